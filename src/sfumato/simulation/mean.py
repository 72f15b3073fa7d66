"""A mean, asked of simulated devices that hold a vector each."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import DataError
from sfumato.flow.campaign import run
from sfumato.flow.release import MeanRelease
from sfumato.flow.task import Task
from sfumato.planning import Plan
from sfumato.privacy import SeededRng
from sfumato.questions import answers
from sfumato.questions import answers as open_answers
from sfumato.questions.answers import Asked
from sfumato.questions.mean.design import MeanCampaign, MeanDesign
from sfumato.questions.registry import begun
from sfumato.simulation.fleet import Asking, Knowledge, cohorts_for
from sfumato.simulation.population import Population
from sfumato.sketch import VectorSketch
from sfumato.sketch.vector import fit

Reals = npt.NDArray[np.floating[Any]]
_PIECE = 1 << 22  # numbers that are clipped and sketched together


def holders(vectors: Reals) -> Population:
    """The devices whose vectors are finite, by their place in the data; others abstain."""
    step = max(1, _PIECE // vectors.shape[1])
    starts = range(0, len(vectors), step)
    kept = [start + np.flatnonzero(fit(vectors[start : start + step])) for start in starts]
    chunks = tuple(pa.array(part) for part in kept if part.size)
    if not chunks:
        raise DataError("no vector in the data is finite, so there is nobody to ask")
    return Population(chunks, None, None, sum(map(len, chunks)))


def ask(planned: Plan, vectors: Reals, asking: Asking) -> MeanRelease:
    """Ask the devices that have a vector, in as many rounds as it takes."""
    sized, study = planned.design, planned.study
    assert isinstance(sized, MeanDesign)  # as the question says
    if vectors.shape[1] != sized.dimensions:
        raise DataError(
            f"the data's vectors have {vectors.shape[1]:,} dimensions; the study's have "
            f"{sized.dimensions:,}"
        )
    design, _ = begun(sized, asking.rng)
    population = asking.population
    cohorts = cohorts_for(study, design, population, exact=asking.protocol)
    asked = min(design.devices, population.devices)

    def values(task: Task, rows: pa.Array) -> tuple[Any, None]:
        sketch = task.sketch
        assert isinstance(sketch, VectorSketch)  # a mean's campaign asks for nothing else
        held = rows.to_numpy(zero_copy_only=False)
        # Rounding need not be secret, so what comes from the public seed repeats in any order.
        first = int(held[0]) if held.size else 0
        rng = SeededRng(design.seed, len(done), first)
        return sketch.tables(vectors[held], rng=rng), None

    def held(row: pa.Array) -> Reals:
        vector: Reals = vectors[row[0].as_py()]
        return vector

    knowledge = Knowledge(design, held=held)
    fleet = asking.fleet(population, cohorts, values, knowledge, tasks=len(design.shares))
    campaign, done = MeanCampaign(design, asked=asked), list[Task]()

    def gather(task: Task) -> Any:
        done.append(task)
        return fleet.gather(task)

    run(campaign, gather, ledger=asking.books, rng=asking.rng, charge_of=design.charge_of)
    asking.tell("estimating", 1.0)
    notes = [*planned.warnings, *fleet.notes]
    if missing := len(vectors) - population.devices:
        notes.append(
            f"{missing:,} devices abstained: their vectors hold NaN or infinite numbers. How many "
            "do is shown as it is"
        )
    if population.devices != design.devices:
        notes.append(
            f"the data holds {population.devices:,} devices with a vector; the plan was made for "
            f"{design.devices:,}"
        )
    told = Asked(devices=fleet.asked, rounds=len(done), notes=tuple(notes))
    release = open_answers.from_mean(planned, campaign, told, done)
    return answers.timed(release, time.perf_counter() - asking.started)

"""A population of devices driven through the same flow as real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.batch import Batch
from sfumato.campaign import run
from sfumato.device import contribute
from sfumato.engine import Engine, LocalEngine
from sfumato.frequencies import PILOT_COHORT, FrequencyCampaign, FrequencyDesign
from sfumato.plan import Plan, bytes_per_device, plan
from sfumato.population import Cohorts, Data, Population, Shard
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng
from sfumato.release import NORMAL_95, Cost, Release
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study
from sfumato.task import Task

I64 = npt.NDArray[np.int64]

Progress = Callable[[str, float], None]
_Promised = TypeVar("_Promised", Plan, Release)


def simulate(
    question: Plan | Study | Mapping[str, Any] | Path | str,
    data: Data | Population,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Release:
    """Ask a plan's question of the devices in `data`, through the same flow as real devices.

    A row is one device's item unless a device column groups rows; a count column makes a row that
    many devices (or, with a device column, that many values of the device). With a `seed` the run
    repeats exactly, its noise included, so it is for study and never for a real release.

    >>> release = simulate(
    ...     {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6},
    ...     {"item": ["oak"] * 600 + ["elm"] * 300}, seed=1)
    >>> release.items.to_pylist()
    ['oak', 'elm']
    """
    started = time.perf_counter()
    tell = progress or (lambda stage, share: None)
    tell("reading", 0.0)
    columns = {"item": item_column, "device": device_column, "count": count_column}
    population = (
        data
        if isinstance(data, Population)
        else Population.load(data, **{f"{role}_column": name for role, name in columns.items()})
    )
    tell("planning", 0.0)
    planned = _planned(question, population)
    rng: Rng = SystemRng() if seed is None else SeededRng(seed)
    public_seed = int(rng.words(1)[0]) & LARGEST_INTEGER
    design = replace(planned.design, seed=public_seed)
    population = population.bounded(design.items_per_device, rng=rng)
    fleet = _Fleet(planned, design, population, rng, engine or LocalEngine(), tell)
    campaign = FrequencyCampaign(design, planned.dictionary.items)
    books = ledger or Ledger(Budget(epsilon=planned.study.epsilon, delta=planned.study.delta))
    run(campaign, fleet.gather, ledger=books, rng=rng)
    tell("estimating", 1.0)
    release = _release(planned, campaign, fleet, started)
    return (
        release
        if seed is None
        else _qualified(
            release, "this run's noise was drawn from a seed: who knows it can take the noise off"
        )
    )


class _Fleet:
    """Answers for the devices: a task in, the batch of its cohort out."""

    def __init__(
        self,
        planned: Plan,
        design: FrequencyDesign,
        population: Population,
        rng: Rng,
        engine: Engine,
        tell: Progress,
    ) -> None:
        self.planned, self.design, self.population = planned, design, population
        self.rng, self.engine, self.tell = rng, engine, tell
        self.cohorts = _cohorts(planned.study, design, population)
        self.asked = 0
        self.tasks = 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", self.tasks / len(self.cohorts.shares))
        self.tasks += 1
        answering = 0

        def shards() -> Iterator[Shard]:
            nonlocal answering
            for shard in self.cohorts.shards(self.population, task.cohort):
                self.asked += shard.asked
                answering += shard.answering
                if shard.answering:
                    yield shard

        total = self.engine.sum(lambda shard: self._contribute(task, shard), shards())
        batch = Batch.empty(task)
        return batch if total is None else batch + Batch(task.id, total, answering)

    def _contribute(self, task: Task, shard: Shard) -> I64:
        values: Any = shard.items
        weights = shard.weights
        if self.design.mode == "one_hot":  # a device whose item is not listed sends zeros
            category = self.planned.dictionary.categories(shard.items)
            values, listed = category[category >= 0], category >= 0
            weights = None if weights is None else weights[listed]
        return contribute(task, values, devices=shard.answering, weights=weights, rng=self.rng)


def _planned(
    question: Plan | Study | Mapping[str, Any] | Path | str, population: Population
) -> Plan:
    """The plan itself, or one made for as many devices and, if need be, the items of the data."""
    if isinstance(question, Plan):
        return question
    if isinstance(question, Path | str):
        study = Study.load(question)
    else:
        study = question if isinstance(question, Study) else Study.from_mapping(question)
    if study.devices is None:
        study = replace(study, devices=population.devices)
    if study.dictionary is not None:
        return plan(study)
    # A simulation may list what its devices hold; a real study cannot know that.
    planned = plan(study, items=pa.chunked_array(population.chunks).unique())
    return _qualified(planned, "the items listed were taken from the devices' own data")


def _qualified(promised: _Promised, exception: str) -> _Promised:
    """The same with an exception to its promise, where there is a promise."""
    privacy = promised.privacy
    if privacy.epsilon is None:
        return promised
    statement = f"{privacy.statement}; not covered: {exception}"
    return replace(promised, privacy=replace(privacy, statement=statement))


def _cohorts(study: Study, design: FrequencyDesign, population: Population) -> Cohorts:
    asked = min(1.0, design.devices / population.devices)
    pilot = asked * design.pilot_devices / design.devices
    names = [task.cohort for task in design.tasks()]
    shares = {PILOT_COHORT: pilot} if design.pilot_devices else {}
    shares |= {name: (asked - pilot) / len(names) for name in names}
    return Cohorts(
        shares=shares,
        in_order=study.cohorts == "different",
        dropout=study.dropout,
        seed=design.seed,
    )


def _release(planned: Plan, campaign: FrequencyCampaign, fleet: _Fleet, started: float) -> Release:
    """Counts over all devices asked: those that did not answer are taken to be like those that did.

    What that adds to the error is the sampling of devices: a count c known from one device in s has
    a variance of c·(s − 1) from it.
    """
    estimates = campaign.estimates()
    scale = fleet.asked / max(campaign.answered, 1)
    counts = estimates.counts * scale
    sampling = np.maximum(counts, 0) * (scale - 1)
    error = np.sqrt((scale * estimates.standard_error) ** 2 + sampling)
    half = np.sqrt((scale * estimates.half_width) ** 2 + NORMAL_95**2 * sampling)
    order = np.argsort(-counts, kind="stable")
    if planned.study.threshold is not None:
        order = order[counts[order] >= planned.study.threshold]
    sized = replace(fleet.design, width=campaign.width)
    summary = planned.summary()
    summary["parameters"] |= {"decoder": estimates.decoder}
    if fleet.design.pilot_devices:
        summary["parameters"] |= {"width": estimates.width}
    return Release(
        items=planned.dictionary.items.take(pa.array(order)),
        counts=counts[order],
        standard_error=error[order],
        half_width=half[order],
        privacy=planned.privacy,
        cost=Cost(
            devices=fleet.asked,
            rounds=planned.design.rounds + (1 if planned.design.pilot_devices else 0),
            bytes_per_device=bytes_per_device(sized),
            seconds=time.perf_counter() - started,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=tuple(_notes(planned, fleet)),
    )


def _notes(planned: Plan, fleet: _Fleet) -> list[str]:
    notes = list(planned.warnings)
    held, wanted = fleet.population.devices, planned.design.devices
    if held < wanted:
        notes.append(f"the data holds {held:,} devices; the plan was made for {wanted:,}")
    elif held > wanted:
        notes.append(f"{fleet.asked:,} of the {held:,} devices in the data were asked, as planned")
    return notes

"""A population of devices driven through the same flow as real ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import DataError, StudyError
from sfumato.flow.campaign import run
from sfumato.flow.release import CountRelease, MeanRelease, Release
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng
from sfumato.questions.answers import bounding_note
from sfumato.questions.promise import TIME
from sfumato.simulation import vectors
from sfumato.simulation.engines import Engine, LocalEngine
from sfumato.simulation.fleet import DeviceFleet, Fleet, Progress
from sfumato.simulation.population import Cohorts, Data, Population
from sfumato.study import Study

_SEEDED = "this run's noise was drawn from a seed: who knows it can take the noise off"
_Promised = TypeVar("_Promised", bound=Plan | Release)
_Asked = Plan | Study | Mapping[str, Any] | Path | str
_Vectors = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]


@overload
def simulate(
    question: _Asked,
    data: _Vectors,
    *,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> MeanRelease: ...


@overload
def simulate(
    question: _Asked,
    data: Data | Population,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> CountRelease: ...


def simulate(
    question: _Asked,
    data: Data | Population | _Vectors,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> Release:
    """Ask a plan's question of the devices in `data`, through the same flow as real devices.

    A row is one device's item unless a device column groups rows; a count column makes a row that
    many devices (or, with a device column, that many values of the device). With a `seed` the run
    repeats exactly, its noise included, so it is for study and never for a real release.

    The data of a mean is an array (devices, dimensions), a vector a device; `vectors.load` reads
    one from a file.

    Tables are made and added many at a time, since a sum is the same, masked or not. With
    `protocol` every device answers by itself, message by message, as it would over a network: one
    to forty milliseconds a device. It then draws its coins and noise by chance of its own, so that
    devices of a `NetworkFleet` with the same seed send the same tables. Under trust "local" they
    answer by themselves anyway, and `protocol` changes nothing.

    >>> release = simulate(
    ...     {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6},
    ...     {"item": ["oak"] * 600 + ["elm"] * 300}, seed=1)
    >>> release.items.to_pylist()
    ['oak', 'elm']
    """
    started = time.perf_counter()
    tell = progress or (lambda stage, share: None)
    tell("reading", 0.0)
    rng: Rng = SystemRng() if seed is None else SeededRng(seed)
    columns = {"item": item_column, "device": device_column, "count": count_column}
    study = question.study if isinstance(question, Plan) else Study.read(question)
    population = _population(study, data, columns)
    tell("planning", 0.0)
    planned = question if isinstance(question, Plan) else _plan(study, population)
    seeded = planned.design.with_seed(rng)
    sized = seeded.question
    planned = replace(planned, design=sized)
    alone = protocol and not study.is_local
    devices, notes = sized.bound(population, plan=planned, rng=rng, alone=alone)
    cohorts = Cohorts.of(planned.study, sized, seeded.seed, devices.devices, exact=alone)
    promised = None if study.is_local else planned.study.epsilon  # a report has its own epsilon
    ledger = ledger or Ledger(Budget(epsilon=promised, delta=planned.study.delta))
    engine = engine or LocalEngine(workers=None if seed is None else 1)  # in one order
    parts = (devices, cohorts, sized, planned.dictionary, rng, engine, tell)
    fleet = DeviceFleet(*parts, seed=seed, ledger=ledger) if alone else Fleet(*parts)
    campaign = sized.campaign(
        planned,
        secret=seeded.secret,
        # Counts are scaled up to all that are asked; the threshold is on those, so it comes down.
        least=(planned.study.threshold or 0.0) * (1 - planned.study.dropout),
        devices=min(sized.devices, devices.devices),
    )
    run(campaign, fleet.gather, ledger=ledger, rng=rng, charge_of=sized.charge_of)
    tell("estimating", 1.0)
    participation = fleet.participation(
        rounds=planned.predicted["rounds"],
        notes=(*planned.warnings, *_about(sized.devices, population, fleet.asked), *notes),
    )
    release = sized.answer(campaign, planned, participation)
    if sized.items_per_device is not None and population.owners is not None:
        release = replace(release, notes=(*release.notes, bounding_note(sized.items_per_device)))
    release = release.timed(time.perf_counter() - started, TIME)
    return release if seed is None else _qualified(release, _SEEDED)


def _population(study: Study, data: Any, columns: Mapping[str, str | None]) -> Population:
    """The devices in the data, which must be of the kind that the question is about."""
    if study.facts.data == "examples":
        raise StudyError(
            "a model is trained by sfumato.simulation.train.train, or `sfumato train` on the "
            "command line"
        )
    wants_vectors, is_array = study.facts.data == "vectors", isinstance(data, np.ndarray)
    if wants_vectors != is_array and (wants_vectors or getattr(data, "ndim", 1) > 1):
        raise DataError(  # a row of items in an array is fine
            "a mean, and nothing else, is of vectors in an array (devices, dimensions); the "
            f"question is {study.question}",
            hint="sfumato.simulation.vectors.load reads an array from a file",
        )
    if wants_vectors:
        if any(columns.values()):
            raise DataError("an array of vectors has no columns of items, devices or counts")
        return Population.of_vectors(vectors.checked(data))
    if isinstance(data, Population):
        if any(columns.values()):
            raise DataError("a population has no columns to choose; it was loaded with them")
        return data
    return Population.load(data, **{f"{role}_column": name for role, name in columns.items()})


def _plan(study: Study, population: Population) -> Plan:
    """A plan for as many devices and, if need be, for the items or dimensions of the data."""
    if study.devices is None:
        study = replace(study, devices=population.devices)
    if population.vectors is not None and study.dimensions is None:
        study = replace(study, dimensions=population.vectors.shape[1])
    if study.dictionary is not None or study.facts.dictionary != "listed":
        return plan(study)
    # A simulation may list what its devices hold; a real study cannot know that.
    planned = plan(study, items=pa.chunked_array(population.chunks).unique())
    return _qualified(planned, "the items listed were taken from the devices' own data")


def _qualified(promised: _Promised, exception: str) -> _Promised:
    """The same with an exception to its promise, where there is a promise."""
    return replace(promised, privacy=promised.privacy.but_for(exception))


def _about(wanted: int, population: Population, asked: int) -> list[str]:
    """How many devices there were, if not as many as planned."""
    devices = population.devices
    if devices < wanted:
        return [f"the data holds {devices:,} devices; the plan was made for {wanted:,}"]
    if devices > wanted:
        return [f"{asked:,} of the {devices:,} devices in the data were asked, as planned"]
    return []

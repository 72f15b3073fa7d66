"""Simulate a study: devices in memory, through the same flow as real ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.engines import Engine, LocalEngine
from sfumato.errors import DataError, StudyError
from sfumato.flow.campaign import run
from sfumato.flow.release import CountRelease, MeanRelease, Release
from sfumato.flow.segments import SEPARATOR
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng
from sfumato.questions.answers import bounding_note
from sfumato.questions.promise import SEEDED_NOISE, TIME
from sfumato.simulation import vectors
from sfumato.simulation.fleet import DeviceFleet, Fleet, Progress
from sfumato.simulation.population import Cohorts, Data, Population
from sfumato.study import Study

_Private = TypeVar("_Private", bound=Plan | Release)
_Question = Plan | Study | Mapping[str, Any] | Path | str
_Vectors = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_]
# No type says whether a file or a table has items or vectors; these have items. A path comes first
# in the overloads, since a str is a sequence of str, too.
_Items = (
    Mapping[Any, int]
    | Mapping[Any, Collection[str]]
    | Sequence[str]
    | Sequence[Collection[str]]
    | npt.NDArray[np.str_]
)


class _Run(TypedDict, total=False):
    """How `simulate` runs."""

    seed: int | None
    ledger: Ledger | None
    engine: Engine | None
    protocol: bool
    progress: Progress | None


class _Columns(_Run, total=False):
    """And the columns that have the roles."""

    item_column: str | None
    device_column: str | None
    count_column: str | None
    segment_column: str | None


@overload
def simulate(question: _Question, data: _Vectors, **options: Unpack[_Run]) -> MeanRelease: ...


@overload
def simulate(question: _Question, data: Path | str, **options: Unpack[_Columns]) -> Any: ...


@overload
def simulate(
    question: _Question, data: _Items | Population, **options: Unpack[_Columns]
) -> CountRelease: ...


@overload
def simulate(question: _Question, data: Data, **options: Unpack[_Columns]) -> Any: ...


def simulate(
    question: _Question,
    data: Data | Population | _Vectors | _Items,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    segment_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> Release:
    """Ask a plan's question of the devices in `data`, through the same flow as real devices.

    A row is one device's item unless a device column groups rows; a count column makes a row that
    many devices (or, with a device column, that many values of the device). If the study has
    segments, a segment column ("segment" by default) has the segment of each row. With a `seed` the
    run repeats exactly, including its noise, so it is for experiments and never for a real release.

    The data of a mean is an array (devices, dimensions), a file of one, or a data frame with one
    column per coordinate (`vectors.load`). Other data is a file, a data frame, a list of items, a
    list with each device's items, or a mapping from items to counts (`Population.load`).

    The answers of many devices are made and added at once, since the sum is the same, masked or
    not: by the `engine`, which is a `LocalEngine` by default and does not change the result.
    With `protocol` every device answers by itself, message by message, as it would over a network,
    in one to forty milliseconds per device. It then has its own random generator, so that devices
    of a `NetworkFleet` with the same seed send the same tables. With trust "local"
    `protocol` changes nothing.

    >>> release = simulate(
    ...     {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6},
    ...     {"item": ["oak"] * 600 + ["elm"] * 300}, seed=1)
    >>> release.items.to_pylist()
    ['oak', 'elm']
    """
    if data is None:
        raise DataError(
            "a simulation needs the data of devices; got None",
            hint="give the path of a file, a data frame, an array or a list",
        )
    started = time.perf_counter()
    report = progress or (lambda stage, share: None)
    report("reading", 0.0)
    rng: Rng = SystemRng() if seed is None else SeededRng(seed)
    columns = {
        "item": item_column,
        "device": device_column,
        "count": count_column,
        "segment": segment_column,
    }
    study = question.study if isinstance(question, Plan) else Study.read(question)
    population = _population(study, data, columns)
    report("planning", 0.0)
    planned = question if isinstance(question, Plan) else _plan(study, population)
    seeded = planned.design.with_seed(rng)
    sized = seeded.question
    planned = replace(planned, design=sized)
    alone = protocol and not study.is_local
    if engine is not None and alone:
        raise StudyError(
            "an engine adds up the answers of many devices at once; with protocol every device "
            "answers by itself, one after another",
            hint="leave out engine",
        )
    devices, notes = sized.bound(population, plan=planned, rng=rng, alone=alone)
    cohorts = Cohorts.of(planned.study, sized, seeded.seed, devices.devices, exact=alone)
    epsilon = None if study.is_local else planned.study.epsilon  # local reports are not charged
    own = Budget(epsilon=epsilon, delta=planned.study.delta)
    with closing(Ledger(own)) if ledger is None else nullcontext(ledger) as account:
        parts = (devices, cohorts, sized, planned.dictionary, rng, engine or LocalEngine(), report)
        fleet = DeviceFleet(*parts, seed=seed, ledger=account) if alone else Fleet(*parts)
        campaign = sized.campaign(
            planned,
            secret=seeded.secret,
            # The threshold is for counts over all devices; the campaign counts respondents only.
            least=(planned.study.threshold or 0.0) * (1 - planned.study.expected_dropout),
            devices=min(sized.devices, devices.devices),
        )
        run(campaign, fleet.gather, ledger=account, rng=rng, charge_of=sized.charge_of)
    report("estimating", 1.0)
    participation = fleet.participation(
        rounds=planned.predicted["rounds"],
        notes=(*planned.warnings, *_size_notes(sized.devices, population, fleet.devices), *notes),
    )
    release = sized.answer(campaign, planned, participation)
    if sized.items_per_device is not None and population.owners is not None:
        note = bounding_note(sized.items_per_device, copies=study.count == "copies")
        release = replace(release, notes=(*release.notes, note))
    if population.coordinates is not None:
        release = replace(release, names=population.coordinates)  # type: ignore[call-arg]  # a mean
    release = release.timed(time.perf_counter() - started, TIME)
    return release if seed is None else _with_exception(release, SEEDED_NOISE)


def _population(study: Study, data: Any, columns: Mapping[str, str | None]) -> Population:
    """The devices in the data, which must be of the question's kind."""
    if study.facts.data == "examples":
        raise StudyError(
            "a train study is simulated by sfumato.train, or by `sfumato train` on the command line"
        )
    if study.facts.data == "vectors":
        if any(columns.values()):
            raise DataError("vectors have no columns of items, devices or counts; leave them out")
        return Population.of_vectors(vectors.load(data), vectors.names(data))
    if isinstance(data, np.ndarray) and data.ndim > 1:
        raise DataError(
            "an array of vectors (devices, dimensions) is data for a mean, and for no other "
            f"question; the question is {study.question}"
        )
    if isinstance(data, Population):
        if any(columns.values()):
            raise DataError("columns are chosen when a population is loaded; leave them out here")
        return data
    if columns["segment"] and not study.segments:
        raise DataError(
            "a segment column is for studies with segments; this one has none",
            hint="set segments in the study, or leave the column out",
        )
    if study.segments:
        columns = {**columns, "segment": columns["segment"] or "segment"}
    return Population.load(data, **{f"{role}_column": name for role, name in columns.items()})


def _plan(study: Study, population: Population) -> Plan:
    """A plan for the devices in the data and, if needed, for its items or dimensions."""
    if study.devices is None:
        study = replace(study, devices=population.devices)
    if population.vectors is not None and study.dimensions is None:
        study = replace(study, dimensions=population.vectors.shape[1])
    if study.dictionary is not None or study.facts.dictionary != "listed":
        return plan(study)
    # A simulation may list its devices' items; a real study does not know them.
    items = pa.chunked_array(population.chunks).unique()
    if study.segments:
        items = pc.list_element(pc.split_pattern(items, SEPARATOR, max_splits=1), 1).unique()
    planned = plan(study, items=items)
    return _with_exception(planned, "the list of items, which comes from the devices' own data")


def _with_exception(result: _Private, exception: str) -> _Private:
    """The same plan or release with one more exception to its guarantee, if it has one."""
    return replace(result, privacy=result.privacy.but_for(exception))


def _size_notes(planned: int, population: Population, sample: int) -> list[str]:
    """A note about the number of devices, if it differs from the plan."""
    devices = population.devices
    if devices < planned:
        return [f"the data has {devices:,} devices; the plan was made for {planned:,}"]
    if devices > planned:
        # A device is in a cohort at random, so that their number is the planned one on average.
        end = "as planned" if sample == planned else f"and the plan was made for {planned:,}"
        return [f"{sample:,} of the {devices:,} devices in the data were asked, {end}"]
    return []

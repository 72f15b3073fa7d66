"""Simulated devices that answer tasks: a task in, the batch of its cohort out.

Here tables are made and added many at a time, since a sum is the same; `device_fleet` makes them
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import SfumatoError
from sfumato.flow.accumulator import Batch, Collector
from sfumato.flow.aggregation import Masked
from sfumato.flow.contribute import contribute
from sfumato.flow.release import charge
from sfumato.flow.task import Task
from sfumato.privacy import Ledger, Rng, SeededRng, SystemRng
from sfumato.privacy.samplers import below
from sfumato.questions.frequencies.design import PILOT_COHORT, FrequencyDesign
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.prefix_search.design import EVERYBODY
from sfumato.questions.registry import Design, keys_of
from sfumato.simulation.engines import Engine
from sfumato.simulation.population import Cohorts, Population, Shard
from sfumato.study import Study

I64 = npt.NDArray[np.int64]
# What devices encode of their items, and which of the items that is of (all if None).
Values = Callable[[Task, pa.Array], tuple[Any, npt.NDArray[np.bool_] | None]]


class Fleet:
    """Devices of a population, in cohorts; who does not answer is counted as asked."""

    def __init__(
        self,
        population: Population,
        cohorts: Cohorts,
        values: Values,
        rng: Rng,
        engine: Engine,
        tell: Progress,
        *,
        tasks: int = 1,  # that there will be
    ) -> None:
        self.population, self.cohorts, self.values = population, cohorts, values
        self.rng, self.engine, self.tell = rng, engine, tell
        self.notes: list[str] = []
        self.asked = 0  # devices, each once
        self._counted: set[str] = set()
        self._tasks, self._done = tasks, 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", min(self._done / self._tasks, 1.0))
        self._done += 1
        answering, first = 0, task.cohort not in self._counted
        self._counted.add(task.cohort)

        def shards() -> Iterator[Shard]:
            nonlocal answering
            for shard in self.cohorts.shards(self.population, task.cohort):
                self.asked += shard.asked if first else 0
                answering += shard.answering
                if shard.answering:
                    yield shard

        total = self.engine.sum(lambda shard: self._contribute(task, shard), shards())
        batch = Batch.empty(task)
        return batch if total is None else batch + Batch(task.id, total, answering)

    def _contribute(self, task: Task, shard: Shard) -> I64:
        values, chosen = self.values(task, shard.items)
        weights = shard.weights
        if weights is not None and chosen is not None:
            weights = weights[chosen]
        return contribute(task, values, devices=shard.answering, weights=weights, rng=self.rng)


def cohorts_of(
    study: Study,
    names: list[str],
    devices: int,
    pilot_devices: int,
    population: Population,
    seed: int,
    *,
    exact: bool = False,
) -> Cohorts:
    """Cohorts of these names, alike in size, and one for a pilot; as many devices as planned.

    Masked rounds need them to be as large as planned, and so do tasks that wait for so many.
    """
    asked = min(1.0, devices / population.devices)
    pilot = asked * pilot_devices / devices
    shares = {PILOT_COHORT: pilot} if pilot_devices else {}
    shares |= {name: (asked - pilot) / len(names) for name in names}
    return Cohorts(
        shares=shares,
        in_order=study.cohorts == "different",
        dropout=study.dropout,
        seed=seed,
        exact=exact or study.masked or study.trust == "secure",
    )


def cohorts_for(
    study: Study, design: Design, population: Population, *, exact: bool = False
) -> Cohorts:
    """The cohorts that the tasks of a design ask, by its public seed."""
    asked = design.names if isinstance(design, HistogramDesign) else design
    pilot_devices, names = 0, [EVERYBODY]
    if isinstance(asked, HeavyHitterDesign):
        names = [f"round {round}" for round in range(asked.rounds)]
    elif isinstance(asked, FrequencyDesign):
        pilot_devices, names = asked.pilot_devices, [task.cohort for task in asked.tasks()]
    return cohorts_of(
        study, names, asked.devices, pilot_devices, population, asked.seed, exact=exact
    )


@dataclass(frozen=True, slots=True, repr=False)
class Asking:
    """With what, and of whom, a question that is answered by sums is asked."""

    population: Population
    rng: Rng
    engine: Engine
    tell: Progress
    books: Ledger
    protocol: bool  # whether each device answers by itself, message by message
    started: float  # on the clock that the bill is read from
    seed: int | None = None  # of the devices' own chance, with `protocol`

    def bounded(self, limit: int) -> Population:
        """The devices with at most so many of their values; by themselves they choose later."""
        return self.population if self.protocol else self.population.bounded(limit, rng=self.rng)

    def fleet(
        self,
        population: Population,
        cohorts: Cohorts,
        values: Values,
        knowledge: Knowledge,
        *,
        tasks: int,
    ) -> Fleet | DeviceFleet:
        """`values` are what devices encode together, `knowledge` is what each does by itself."""
        if not self.protocol:
            return Fleet(population, cohorts, values, self.rng, self.engine, self.tell, tasks=tasks)
        return DeviceFleet(
            population,
            cohorts,
            knowledge,
            rng=self.rng,
            seed=self.seed,
            books=self.books,
            tell=self.tell,
            tasks=tasks,
        )


Progress = Callable[[str, float], None]

_PIECE = 256  # devices between two tellings of how far it is


def as_texts(items: pa.Array) -> list[str]:
    held: list[str] = items.to_pylist()
    return held


@dataclass(frozen=True, slots=True, repr=False)
class Knowledge:
    """What devices are told of a study, and what they hold."""

    design: Design  # with its hash functions
    places: Mapping[str, int] | None = None  # of the dictionary's items
    held: Callable[[pa.Array], Any] = as_texts  # a device's value, of its rows in the population


@dataclass(frozen=True, slots=True, repr=False)
class _Present:
    """A device that answers."""

    number: int
    items: pa.Array


class DeviceFleet:
    """Devices of a population, in cohorts; who does not answer is counted as asked."""

    def __init__(
        self,
        population: Population,
        cohorts: Cohorts,
        knowledge: Knowledge,
        *,
        rng: Rng,
        seed: int | None,
        books: Ledger,
        tell: Progress,
        tasks: int,
    ) -> None:
        """Device k draws from `SeededRng(seed, k)`; without a seed, from the system. `rng` is for
        all else, and `books` pay before a masked sum is opened."""
        try:
            from sfumato.device import private
        except ImportError as problem:
            raise SfumatoError(
                "devices that answer one by one need cryptography",
                hint='pip install "sfumato[secure]"',
            ) from problem
        self._private = private
        self.population, self.cohorts, self._knowledge = population.expanded(), cohorts, knowledge
        self.rng, self._seed, self.books, self.tell = rng, seed, books, tell
        self.notes: list[str] = []
        self.asked = 0  # devices, each once
        self._counted: set[str] = set()
        self._tasks, self._done = tasks, 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", min(self._done / self._tasks, 1.0))
        self._done += 1
        asked, present = 0, list[_Present]()
        for shard in self.cohorts.shards(self.population, task.cohort):
            assert shard.numbers is not None  # the population is expanded
            asked += shard.asked
            devices = zip(shard.numbers.tolist(), shard.each_device(), strict=True)
            present += [_Present(number, items) for number, items in devices]
        self.asked += asked if task.cohort not in self._counted else 0
        self._counted.add(task.cohort)
        if isinstance(task.aggregation, Masked):
            return self._in_round(task, asked, present)
        return self._by_reports(task, present)

    def _by_reports(self, task: Task, present: list[_Present]) -> Batch:
        collector = Collector(task)
        keys, places = keys_of(self._knowledge.design, task), self._knowledge.places
        for start in range(0, len(present), _PIECE):
            self._say(task, "reports", start / len(present))
            collector.add(
                self._private.table_report(task, keys, self._held(device), places)(
                    self._chance(device)
                ).to_bytes()
                for device in present[start : start + _PIECE]
            )
        return collector.batch

    def _in_round(self, task: Task, asked: int, present: list[_Present]) -> Batch:
        """A masked round, message by message; who does not answer vanishes at some step of it."""
        from sfumato.secagg import rehearsal
        from sfumato.secagg.coordinator import Phase

        round = task.masked_round(asked, self.rng.words(2).tobytes().hex())
        keys, places = keys_of(self._knowledge.design, task), self._knowledge.places

        def table_of(member: int) -> I64:
            device = present[member]
            make = self._private.table(task, keys, self._held(device), places)
            table: I64 = make(self._chance(device))
            return table

        steps = (Phase.ENROL, Phase.SHARE, Phase.MASK)
        when = below(len(steps), asked - len(present), self.rng).tolist()
        outcome = rehearsal.run(
            round,
            table_of,
            leaving={len(present) + k: steps[step] for k, step in enumerate(when)},
            before_unmask=lambda: charge(
                task, ledger=self.books, loss=self._knowledge.design.charge_of(task)
            ),
            rng=self.rng,
            progress=lambda step, share: self._say(task, step, share),
        )
        self.notes.append(
            f"{task.cohort}: {asked:,} devices ran the masked round, {outcome.survivors:,} to the "
            f"end; a device sent at most {outcome.bytes_up.max():,} bytes, was told at most "
            f"{outcome.bytes_down.max():,}, and computed for "
            f"{1000 * outcome.device_seconds / asked:.1f} ms; the collector took "
            f"{outcome.collector_seconds:.2f} s"
        )
        total = outcome.total.reshape(task.sketch.shape)
        return Batch(task.id, total, outcome.survivors, charged=True)

    def _held(self, device: _Present) -> Any:
        return self._knowledge.held(device.items)

    def _chance(self, device: _Present) -> Rng:
        return SystemRng() if self._seed is None else SeededRng(self._seed, device.number)

    def _say(self, task: Task, step: str, share: float) -> None:
        done = (self._done - 1 + share) / self._tasks
        self.tell(f"asking {task.cohort}: {step}", min(done, 1.0))

"""Simulated devices that answer tasks with the batch of their cohort.

`Fleet` makes the tables and records of many devices at once, since the sum is the same;
`DeviceFleet` lets every device answer by itself, message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.arrays import I64
from sfumato.device import private
from sfumato.engines import Engine
from sfumato.flow.accumulator import Batch, Collector, RecordBatch, TallyAccumulator
from sfumato.flow.contribute import contribute
from sfumato.flow.release import charge
from sfumato.flow.task import AnyTask, Task
from sfumato.privacy import Account, Rng, SeededRng, SystemRng
from sfumato.privacy.samplers import below, stream
from sfumato.questions.question import Dictionary, Participation, Question
from sfumato.secagg import rehearsal
from sfumato.secagg.coordinator import Phase
from sfumato.simulation.population import Cohorts, Population, Shard

Progress = Callable[[str, float], None]

_PIECE = 256  # number of reports between two updates of the progress
_RECORDS = 1 << 18  # number of records that are randomised together


@dataclass(frozen=True, slots=True, repr=False)
class _Part:
    """Answering devices: all that a worker needs of them."""

    items: Any  # an Arrow array, or vectors (devices, dimensions)
    weights: I64 | None
    owners: I64 | None
    devices: int
    first: int  # for vectors, the place of the first
    rng: Rng


@dataclass(frozen=True, slots=True, repr=False)
class _Asking:
    """The answers of parts to one task, as pure functions that can be pickled."""

    question: Question
    task: Any
    dictionary: Dictionary | None
    number: int  # of the task

    def table(self, part: _Part) -> Batch:
        """The sum of the tables of a part."""
        values, rows = self._values(part)
        weights, owners = part.weights, part.owners
        if rows is not None:
            weights = None if weights is None else weights[rows]
            owners = None if owners is None else owners[rows]
        total = contribute(
            self.task, values, devices=part.devices, weights=weights, owners=owners, rng=part.rng
        )
        return Batch(self.task.id, total, part.devices)

    def records(self, part: _Part) -> RecordBatch:
        """The counted records of a part; every device sends the same number."""
        tallies, (values, _) = TallyAccumulator(self.task), self._values(part)
        records = part.devices * self.task.records_per_report
        for piece in each_record(values, part.weights, self.task.none(1), records):
            tallies.fold(piece, rng=part.rng)
        return tallies.batch(part.devices)

    def _values(self, part: _Part) -> tuple[Any, npt.NDArray[np.bool_] | None]:
        place = (self.number, part.first)
        return self.question.values(self.task, part.items, dictionary=self.dictionary, place=place)


@dataclass(slots=True, repr=False)
class Fleet:
    """The devices of a population, in cohorts."""

    population: Population
    cohorts: Cohorts
    question: Question  # with its seed
    dictionary: Dictionary | None
    rng: Rng
    engine: Engine
    progress: Progress
    devices: int = 0  # number asked, each once
    respondents: int = 0
    notes: list[str] = field(default_factory=list)
    tasks: list[tuple[AnyTask, int]] = field(default_factory=list)
    _cohorts: set[str] = field(default_factory=set)  # those asked so far

    def gather(self, task: Any) -> Batch | RecordBatch:
        """The batch of a task's cohort."""
        self._say(task)
        batch = self._records(task) if task.is_local else self._sum(task)
        self.tasks.append((task, batch.count))
        return batch

    def participation(self, *, rounds: int, notes: Sequence[str]) -> Participation:
        return Participation(
            devices=self.devices,
            respondents=self.respondents,
            rounds=rounds,
            tasks=self.tasks,
            notes=(*notes, *self.notes),
        )

    def _sum(self, task: Task) -> Batch:
        batch = self.engine.sum(self._asking(task).table, self._parts(task))
        return Batch.empty(task) if batch is None else Batch.empty(task) + batch

    def _records(self, task: Any) -> RecordBatch:
        batch = self.engine.sum(self._asking(task).records, self._parts(task))
        return TallyAccumulator(task).batch(0) if batch is None else batch

    def _asking(self, task: AnyTask) -> _Asking:
        return _Asking(self.question, task, self.dictionary, len(self.tasks) + 1)

    def _parts(self, task: AnyTask) -> Iterator[_Part]:
        """The answering devices of a task. Each part has random words of its own, so that a seeded
        answer depends neither on the order of parts nor on where they are computed."""
        count, number = 0, 0
        expected = max(1.0, self.population.devices * self.cohorts.shares[task.cohort])
        for shard in self._shards(task):
            for piece in shard.pieces():
                items, first = piece.items, 0
                if self.population.vectors is not None:
                    rows = items.to_numpy(zero_copy_only=False)
                    items, first = self.population.vectors[rows], int(rows[0])
                rng = stream(self.rng, f"task {len(self.tasks)} shard {number}")
                yield _Part(items, piece.weights, piece.owners, piece.answering, first, rng)
                number += 1
                count += piece.answering
                self._say(task, min(count / expected, 1.0))

    def _shards(self, task: AnyTask) -> Iterator[Shard]:
        first = task.cohort not in self._cohorts
        self._cohorts.add(task.cohort)
        for shard in self.cohorts.shards(self.population, task.cohort):
            if first:
                self.devices += shard.devices
                self.respondents += shard.answering
            yield shard

    def _say(self, task: AnyTask, share: float = 0.0, step: str = "") -> None:
        done = (len(self.tasks) + share) / self.question.task_count
        self.progress(f"asking {task.cohort}{step}", min(done, 1.0))


@dataclass(frozen=True, slots=True, repr=False)
class _Respondent:
    """A device that answers."""

    number: int
    items: pa.Array


class DeviceFleet(Fleet):
    """Devices that answer by themselves. Device k draws from `SeededRng(seed, k)` or, without a
    seed, from the system; everything else draws from the fleet's generator. The ledger is charged
    before a masked sum is opened."""

    def __init__(self, *fleet: Any, seed: int | None, ledger: Account) -> None:
        Fleet.__init__(self, *fleet)
        self._seed, self._ledger = seed, ledger
        self.population = self.population.expanded()
        listed = None if self.dictionary is None else self.dictionary.items.to_pylist()
        self._places = listed and {item: place for place, item in enumerate(listed)}

    def _sum(self, task: Task) -> Batch:
        devices, respondents = 0, list[_Respondent]()
        for shard in self._shards(task):
            assert shard.numbers is not None  # the population is expanded
            devices += shard.devices
            pairs = zip(shard.numbers.tolist(), shard.each_device(), strict=True)
            respondents += [_Respondent(number, items) for number, items in pairs]
        return (
            self._in_round(task, devices, respondents)
            if task.is_masked
            else self._by_reports(task, respondents)
        )

    def _by_reports(self, task: Task, respondents: list[_Respondent]) -> Batch:
        keys, collector = self.question.item_keys(task), Collector(task)
        for start in range(0, len(respondents), _PIECE):
            self._say(task, start / len(respondents), ": reports")
            collector.add(
                private.table_report(task, keys, self._value(device), self._places)(
                    self._chance(device)
                ).to_bytes()
                for device in respondents[start : start + _PIECE]
            )
        batch: Batch = collector.batch
        return batch

    def _in_round(self, task: Task, devices: int, respondents: list[_Respondent]) -> Batch:
        """A masked round, message by message; missing devices drop out at random steps."""
        round = task.masked_round(devices, self.rng.words(2).tobytes().hex())
        keys = self.question.item_keys(task)

        def table_of(member: int) -> I64:
            device = respondents[member]
            make = private.table(task, keys, self._value(device), self._places)
            table: I64 = make(self._chance(device))
            return table

        steps = (Phase.ENROL, Phase.SHARE, Phase.MASK)
        when = below(len(steps), devices - len(respondents), self.rng).tolist()
        outcome = rehearsal.run(
            round,
            table_of,
            leaving={len(respondents) + k: steps[step] for k, step in enumerate(when)},
            before_unmask=lambda: charge(
                task, ledger=self._ledger, loss=self.question.charge_of(task)
            ),
            rng=self.rng,
            progress=lambda step, share: self._say(task, share, f": {step}"),
        )
        self.notes.append(
            f"{task.cohort}: {outcome.survivors:,} of {devices:,} devices completed the masked "
            f"round; a device sent at most {outcome.bytes_up.max():,} bytes, received at most "
            f"{outcome.bytes_down.max():,} and computed for "
            f"{1000 * outcome.device_seconds / devices:.1f} ms on average; the collector computed "
            f"for {outcome.collector_seconds:.2f} s"
        )
        total = outcome.total.reshape(task.sketch.shape)
        return Batch(task.id, total, outcome.survivors, charged=True)

    def _value(self, device: _Respondent) -> Any:
        """The data of a device: its items, or its vector."""
        if self.population.vectors is None:
            return device.items.to_pylist()
        return self.population.vectors[device.items[0].as_py()]

    def _chance(self, device: _Respondent) -> Rng:
        return SystemRng() if self._seed is None else SeededRng(self._seed, device.number)


def each_record(
    values: npt.NDArray[Any], weights: I64 | None, none: npt.NDArray[Any], records: int
) -> Iterator[npt.NDArray[Any]]:
    """The values of `records` records, in pieces: each value as often as `weights` says, and then
    `none`, (1, ...), for devices with fewer values than records."""
    ends = np.cumsum(np.ones(len(values), dtype=np.int64) if weights is None else weights)
    count = int(ends[-1]) if ends.size else 0
    for start in range(0, count, _RECORDS):
        places = np.arange(start, min(start + _RECORDS, count))
        yield values[np.searchsorted(ends, places, side="right")]
    for start in range(count, records, _RECORDS):
        yield np.repeat(none, min(_RECORDS, records - start), axis=0)

"""The collector's side: admit reports, count each once, add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import MismatchError, TaskError
from sfumato.flow.aggregation import Plain
from sfumato.flow.report import Report
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy.tallies import Tally

I64 = npt.NDArray[np.int64]


class Rejection(StrEnum):
    """Why a report was not added. A bad report is not an exception."""

    MALFORMED = "malformed"  # not the bytes of a report, or of another length than the task's
    WRONG_TASK = "wrong_task"  # it answers another task
    CONFLICTING = "conflicting"  # a known id with other bytes
    BATCH_FULL = "batch_full"  # one more could wrap the sum
    IMPOSSIBLE = "impossible"  # a record that the task's randomizer never makes


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """A sum of sealed tables over `count` devices of one task. Batches of one task add."""

    task_id: str
    total: I64
    count: int
    charged: bool = False  # on the ledger already: a masked sum is seen as soon as it is unmasked

    def __add__(self, other: Batch) -> Batch:
        if self.task_id != other.task_id:
            raise MismatchError(
                f"batches of different tasks do not add: {self.task_id[:8]} and {other.task_id[:8]}"
            )
        if self.charged or other.charged:
            raise MismatchError("a sum that was seen is a batch of its own")
        return Batch(self.task_id, self.total + other.total, self.count + other.count)

    def __repr__(self) -> str:  # never the sum
        return f"Batch(task={self.task_id[:8]}…, count={self.count})"

    @classmethod
    def empty(cls, task: Task) -> Batch:
        return cls(task.id, np.zeros(task.sketch.shape, dtype=np.int64), 0)


@dataclass(slots=True, repr=False)
class Collector:
    """Admits reports to one task's batch; a report seen before is accepted and counted once."""

    task: Task
    batch: Batch = field(init=False)
    rejected: Counter[Rejection] = field(default_factory=Counter)
    _task_id: str = field(init=False)
    _aggregation: Plain = field(init=False)
    _seen: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.task.aggregation, Plain):
            raise TaskError("a masked task has no reports; its round gives the sum")
        self._aggregation = self.task.aggregation
        self.batch = Batch.empty(self.task)
        self._task_id = self.task.id

    def add(self, reports: Iterable[bytes]) -> None:
        """Add reports as they came over the wire."""
        for data in reports:
            reason = self._admit(data)
            if reason is not None:
                self.rejected[reason] += 1

    def _admit(self, data: bytes) -> Rejection | None:
        try:
            report = Report.from_bytes(data)
        except MismatchError:
            return Rejection.MALFORMED
        if report.task_id != self._task_id:
            return Rejection.WRONG_TASK
        try:
            table = self._aggregation.unpack(report.message, self.task.sketch.shape)
        except MismatchError:
            return Rejection.MALFORMED
        known = self._seen.get(report.report_id)
        if known is not None:
            return None if known == hash(report.message) else Rejection.CONFLICTING
        if self.batch.count >= self.task.max_count:
            return Rejection.BATCH_FULL
        self._seen[report.report_id] = hash(report.message)
        self.batch = self.batch + Batch(self._task_id, table, 1)
        return None

    def __repr__(self) -> str:
        return f"Collector({self.batch!r}, rejected={dict(self.rejected)})"


@dataclass(slots=True, repr=False)
class LocalCollector:
    """Admits reports of one local task and folds their records into a tally, each report once."""

    task: LocalTask
    tally: Tally = field(init=False)
    rejected: Counter[Rejection] = field(default_factory=Counter)
    repeated: int = 0  # reports that came again, and were counted once
    _task_id: str = field(init=False)
    _seen: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tally = Tally(self.task.randomizer)
        self._task_id = self.task.id

    def add(self, reports: Iterable[bytes]) -> None:
        """Add reports as they came over the wire; a report counts whole or not at all."""
        admitted: list[bytes] = []
        for data in reports:
            reason = self._admit(data, admitted)
            if reason is not None:
                self.rejected[reason] += 1
        if admitted:
            self.tally.fold(_records(b"".join(admitted), self.task))

    def add_records(self, records: pa.Array | pa.ChunkedArray) -> None:
        """Add a column of records that a batch of reports was sealed into; duplicates are gone."""
        for part in records.chunks if isinstance(records, pa.ChunkedArray) else [records]:
            if part.null_count or part.type != pa.binary(self.task.randomizer.record_bytes):
                raise MismatchError(
                    f"records must be a column of {self.task.randomizer.record_bytes} bytes each, "
                    f"none missing; got {part.type}"
                )
            size = self.task.randomizer.record_bytes
            data = np.frombuffer(part.buffers()[1], dtype=np.uint8)
            wrong = self.tally.fold(
                data[part.offset * size : (part.offset + len(part)) * size].reshape(-1, size)
            )
            if wrong:
                self.rejected[Rejection.IMPOSSIBLE] += wrong

    def _admit(self, data: bytes, admitted: list[bytes]) -> Rejection | None:
        try:
            report = Report.from_bytes(data)
        except MismatchError:
            return Rejection.MALFORMED
        if report.task_id != self._task_id:
            return Rejection.WRONG_TASK
        message, size = report.message, self.task.randomizer.record_bytes
        if not message or len(message) % size or len(message) > self.task.message_bytes:
            return Rejection.MALFORMED
        known = self._seen.get(report.report_id)
        if known is not None:
            self.repeated += known == hash(message)
            return None if known == hash(message) else Rejection.CONFLICTING
        if not self.task.randomizer.valid(_records(message, self.task)).all():
            return Rejection.IMPOSSIBLE
        self._seen[report.report_id] = hash(message)
        admitted.append(message)
        return None

    def __repr__(self) -> str:
        return f"LocalCollector({self.tally!r}, rejected={dict(self.rejected)})"


def _records(data: bytes, task: LocalTask) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, task.randomizer.record_bytes)

"""Decide which reports of an upload count, for all of them at once.

An upload is a sequence of frames (see `report`). A malformed sequence is refused as a whole; a
report that does not fit its task is left out and counted by reason. Of several reports with one id,
the first counts (`first_of_each`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from sfumato.arrays import I64, U8, Bool
from sfumato.errors import MismatchError, TaskError
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.report import HEADER_BYTES, LENGTH_BYTES, WIRE_VERSION
from sfumato.flow.task import RecordTask, Task
from sfumato.sketch import SparseSketch

_CELLS_AT_ONCE = 1 << 20  # of tables, or bits of sparse reports, that are unpacked together
_ID = slice(HEADER_BYTES - 16, HEADER_BYTES)  # where a report has its id


class Rejection(StrEnum):
    """Why a report does not count. A bad report is not an exception."""

    MALFORMED = "malformed"  # not a report, or not of the task's length
    WRONG_TASK = "wrong_task"  # it answers another task
    BATCH_FULL = "batch_full"  # one more could wrap the sum
    IMPOSSIBLE = "impossible"  # a record or a table that a device of the task never makes


class TooManyReportsError(MismatchError):
    """An upload has too many reports."""


_REASONS = dict(enumerate((Rejection.MALFORMED, Rejection.WRONG_TASK, Rejection.IMPOSSIBLE), 1))
_VERDICTS = {reason: verdict for verdict, reason in _REASONS.items()}


@dataclass(frozen=True, slots=True, repr=False)
class AdmittedReports:
    """The frames of an upload that count, and the number of rejected ones by reason."""

    count: int
    body: bytes
    rejected: Counter[Rejection] = field(default_factory=Counter)

    def __repr__(self) -> str:  # never the reports
        return f"AdmittedReports({self.count} reports, rejected={dict(self.rejected)})"


class Admission:
    """The rules of one task. Stateless: the same upload always gets the same answer.

    A report is admitted if it begins with the wire version and the task's digest, has a length that
    the task allows, and has a message that a device following the task could have sent.
    """

    def __init__(self, task: Task | RecordTask) -> None:
        self._head = bytes([WIRE_VERSION]) + bytes.fromhex(task.id)
        self._begins = np.frombuffer(self._head, dtype=np.uint8)
        most_bytes = task.message_bytes
        self._fits: Callable[[int], bool]
        self._ends: Callable[[U8], Bool]  # whether bits after the last cell are zero
        self._possible: Callable[[U8], Bool]
        if task.is_masked:
            raise TaskError("a masked task has no reports; its round gives the sum")
        if isinstance(task, Task):
            used = task.message_bits % 8  # bits of the last byte
            self._fits = lambda size: size == most_bytes
            self._ends = lambda messages: messages[:, -1] < (1 << used if used else 256)
            self._possible = lambda messages: _possible_messages(task, messages)
        else:
            width, valid = task.record_bytes, task.source.valid
            self._ends = lambda messages: np.ones(len(messages), dtype=np.bool_)
            self._fits = lambda size: 0 < size <= most_bytes and size % width == 0

            def possible(messages: U8) -> Bool:
                records = np.ascontiguousarray(messages).reshape(-1, width)
                whole: Bool = valid(records).reshape(len(messages), -1).min(axis=1)
                return whole

            self._possible = possible

    def admit(self, body: bytes, *, most_reports: int) -> AdmittedReports:
        """The reports of an upload that count. Raises MismatchError if it is not a sequence of
        frames, and TooManyReportsError if it has more than `most_reports`."""
        if 0 < (count := self._all_good(body)) <= most_reports:
            return AdmittedReports(count, body)
        starts, sizes = frames(body, most_reports)
        data = np.frombuffer(body, dtype=np.uint8)
        verdicts = np.empty(len(starts), dtype=np.uint8)
        alike = (sizes == sizes[0]).all()
        for size in sizes[:1] if alike else np.unique(sizes):
            members = slice(None) if alike else np.flatnonzero(sizes == size)
            verdicts[members] = self._verdicts(_rows(data, starts[members], int(size)))
        if not verdicts.any():
            return AdmittedReports(len(starts), body)
        is_admitted = verdicts == 0
        parts = [
            body[start - LENGTH_BYTES : start + size]
            for start, size in zip(
                starts[is_admitted].tolist(), sizes[is_admitted].tolist(), strict=True
            )
        ]
        rejected = Counter(_REASONS[verdict] for verdict in verdicts[~is_admitted].tolist())
        return AdmittedReports(len(parts), b"".join(parts), rejected)

    def _all_good(self, body: bytes) -> int:
        """The number of reports, if they have one length and all count; else 0.

        Nearly all uploads are like that, and this test is fast.
        """
        size = int.from_bytes(body[:LENGTH_BYTES], "little")
        count, rest = divmod(len(body), LENGTH_BYTES + size)
        if rest or not self._fits(size - HEADER_BYTES):
            return 0
        rows = np.frombuffer(body, dtype=np.uint8).reshape(count, LENGTH_BYTES + size)
        head = body[:LENGTH_BYTES] + self._head
        if count == 1:
            alike = body.startswith(head)
        else:
            alike = bool((rows[:, : len(head)] == np.frombuffer(head, dtype=np.uint8)).all())
        messages = rows[:, LENGTH_BYTES + HEADER_BYTES :]
        good = alike and self._ends(messages).all() and self._possible(messages).all()
        return count if good else 0

    def _verdicts(self, reports: U8) -> U8:
        """For each of these reports of one length: 0, or its key in `_REASONS`."""
        count, size = reports.shape
        if size < HEADER_BYTES:
            return np.full(count, _VERDICTS[Rejection.MALFORMED], dtype=np.uint8)
        verdicts = np.zeros(count, dtype=np.uint8)
        matches = reports[:, : len(self._begins)] == self._begins
        ours = matches.all(axis=1)
        verdicts[~ours] = _VERDICTS[Rejection.WRONG_TASK]
        verdicts[~matches[:, 0]] = _VERDICTS[Rejection.MALFORMED]
        if not self._fits(size - HEADER_BYTES):
            verdicts[ours] = _VERDICTS[Rejection.MALFORMED]
        elif ours.any():
            messages, reasons = reports[ours, HEADER_BYTES:], verdicts[ours]
            ends = self._ends(messages)
            reasons[~ends] = _VERDICTS[Rejection.MALFORMED]
            reasons[ends] = np.where(
                self._possible(messages[ends]), 0, _VERDICTS[Rejection.IMPOSSIBLE]
            )
            verdicts[ours] = reasons
        return verdicts


def _possible_messages(task: Task, messages: U8) -> Bool:
    """Which of these messages one device of the task can make."""
    aggregation, possible = task.aggregation, np.empty(len(messages), dtype=np.bool_)
    is_sparse = isinstance(aggregation, Sparse)
    piece = max(1, _CELLS_AT_ONCE // (task.message_bits if is_sparse else task.cells))
    for start in range(0, len(messages), piece):
        part = slice(start, start + piece)
        if isinstance(aggregation, Sparse):
            assert isinstance(task.sketch, SparseSketch)  # by the task's check
            possible[part] = task.sketch.possible_entries(aggregation.unpack(messages[part]))
            continue
        assert isinstance(aggregation, Plain)  # a masked task has no reports
        words = [aggregation.unpack(row.tobytes(), task.sketch.shape) for row in messages[part]]
        tables = aggregation.open(np.stack(words))
        possible[part] = task.sketch.possible(tables, task.items_per_device)
    return possible


def frames(body: bytes, most: int) -> tuple[I64, I64]:
    """The starts and the lengths of the reports in a body: (count,) each."""
    if not body:
        raise MismatchError("an upload must have at least one report; got none")
    size = int.from_bytes(body[:LENGTH_BYTES], "little")
    count, rest = divmod(len(body), LENGTH_BYTES + size)
    if not rest:  # the usual case: all have one length
        rows = np.frombuffer(body, dtype=np.uint8).reshape(count, LENGTH_BYTES + size)
        if (rows[:, :LENGTH_BYTES] == rows[0, :LENGTH_BYTES]).all():
            if count > most:
                raise _too_many(most)
            starts = np.arange(count, dtype=np.int64) * (LENGTH_BYTES + size) + LENGTH_BYTES
            return starts, np.full(count, size, dtype=np.int64)
    places: list[tuple[int, int]] = []
    at = 0
    while at < len(body):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(body[at:start], "little")
        if start > len(body) or at > len(body):
            raise MismatchError("the last report of an upload is shorter than its length says")
        if len(places) == most:
            raise _too_many(most)
        places.append((start, at - start))
    starts, sizes = np.array(places, dtype=np.int64).T
    return starts, sizes


def first_of_each(bodies: Iterable[bytes]) -> dict[bytes, bytes]:
    """The messages of these uploads by report id; of two with one id, the first."""
    messages: dict[bytes, bytes] = {}
    for body in bodies:
        starts, sizes = frames(body, len(body))
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            report = body[start : start + size]
            messages.setdefault(report[_ID], report[HEADER_BYTES:])
    return messages


def _too_many(most: int) -> TooManyReportsError:
    return TooManyReportsError(f"an upload may have at most {most} reports; send several uploads")


def _rows(data: U8, starts: I64, size: int) -> U8:
    """Reports of one length as the rows of an array: (count, size)."""
    step = size + LENGTH_BYTES
    if len(starts) * step == len(data):  # nothing else is in the body
        return data.reshape(-1, step)[:, LENGTH_BYTES:]
    rows: U8 = data[starts[:, None] + np.arange(size)]
    return rows

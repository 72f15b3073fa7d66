"""Which reports of an upload are stored: decided for all of them at once, before they are.

An upload is a row of frames (see `report`). A row that does not add up is refused whole; a report
that does not fit its task is left out and counted by reason. Whether a report came before is found
when reports are sealed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sfumato.collector.problems import Problem
from sfumato.device.offers import AnyTask
from sfumato.errors import TaskError
from sfumato.flow.accumulator import Rejection
from sfumato.flow.aggregation import Plain
from sfumato.flow.report import HEADER_BYTES, LENGTH_BYTES, WIRE_VERSION
from sfumato.flow.task import LocalTask, Task

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_REASONS = dict(enumerate((Rejection.MALFORMED, Rejection.WRONG_TASK, Rejection.IMPOSSIBLE), 1))
_VERDICTS = {reason: verdict for verdict, reason in _REASONS.items()}


@dataclass(frozen=True, slots=True, repr=False)
class Admitted:
    """The frames of an upload that may be stored, and why others may not."""

    count: int
    body: bytes
    rejected: Counter[Rejection] = field(default_factory=Counter)

    def __repr__(self) -> str:  # never the reports
        return f"Admitted({self.count} reports, rejected={dict(self.rejected)})"


class Admission:
    """The rules of one task. Stateless: the same upload is admitted in the same way again.

    A report is admitted if it begins with the wire version and the task's digest, has a length that
    the task allows, and says something that a device following the task could have said.
    """

    def __init__(self, task: AnyTask) -> None:
        self._head = bytes([WIRE_VERSION]) + bytes.fromhex(task.id)
        self._begins = np.frombuffer(self._head, dtype=np.uint8)
        most_bytes = task.message_bytes
        self._wrong: Rejection  # of what no device could have said
        self._fits: Callable[[int], bool]
        self._possible: Callable[[U8], Bool]
        if isinstance(task, Task):
            if not isinstance(task.aggregation, Plain):
                raise TaskError("reports of a masked task are not uploaded one by one")
            used = task.cells * task.aggregation.modulus_bits % 8  # bits of the last byte
            self._wrong = Rejection.MALFORMED
            self._fits = lambda size: size == most_bytes
            self._possible = lambda messages: messages[:, -1] < (1 << used if used else 256)
        else:
            told = task.randomizer if isinstance(task, LocalTask) else task.discoverer
            width = told.record_bytes
            self._wrong = Rejection.IMPOSSIBLE
            self._fits = lambda size: 0 < size <= most_bytes and size % width == 0

            def possible(messages: U8) -> Bool:
                records = np.ascontiguousarray(messages).reshape(-1, width)
                whole: Bool = told.valid(records).reshape(len(messages), -1).min(axis=1)
                return whole

            self._possible = possible

    def admit(self, body: bytes, *, most_reports: int) -> Admitted:
        """What of an upload may be stored; Problem if it is no row of frames, or too long a one."""
        if 0 < (count := self.all_good(body)) <= most_reports:
            return Admitted(count, body)
        starts, sizes = frames(body, most_reports)
        data = np.frombuffer(body, dtype=np.uint8)
        verdicts = np.empty(len(starts), dtype=np.uint8)
        alike = (sizes == sizes[0]).all()
        for size in sizes[:1] if alike else np.unique(sizes):
            members = slice(None) if alike else np.flatnonzero(sizes == size)
            verdicts[members] = self._verdicts(_rows(data, starts[members], int(size)))
        if not verdicts.any():
            return Admitted(len(starts), body)
        kept = verdicts == 0
        parts = [
            body[start - LENGTH_BYTES : start + size]
            for start, size in zip(starts[kept].tolist(), sizes[kept].tolist(), strict=True)
        ]
        rejected = Counter(_REASONS[verdict] for verdict in verdicts[~kept].tolist())
        return Admitted(len(parts), b"".join(parts), rejected)

    def all_good(self, body: bytes) -> int:
        """How many reports a body has, if they have one length and none is to be rejected; else 0.

        That is what nearly every upload is, and quick to see.
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
        return count if alike and self._possible(messages).all() else 0

    def _verdicts(self, reports: U8) -> U8:
        """For each of these reports of one length 0, or which of `_REASONS` it is rejected for."""
        count, size = reports.shape
        if size < HEADER_BYTES:
            return np.full(count, _VERDICTS[Rejection.MALFORMED], dtype=np.uint8)
        verdicts = np.zeros(count, dtype=np.uint8)
        headed = reports[:, : len(self._begins)] == self._begins
        ours = headed.all(axis=1)
        verdicts[~ours] = _VERDICTS[Rejection.WRONG_TASK]
        verdicts[~headed[:, 0]] = _VERDICTS[Rejection.MALFORMED]
        if not self._fits(size - HEADER_BYTES):
            verdicts[ours] = _VERDICTS[Rejection.MALFORMED]
        elif ours.any():
            possible = self._possible(reports[ours, HEADER_BYTES:])
            verdicts[ours] = np.where(possible, 0, _VERDICTS[self._wrong])
        return verdicts


def frames(body: bytes, most: int) -> tuple[I64, I64]:
    """Where the reports of a body start, and how long they are: (count,) each."""
    if not body:
        raise Problem("malformed-upload", hint="an upload has one report at least")
    size = int.from_bytes(body[:LENGTH_BYTES], "little")
    count, rest = divmod(len(body), LENGTH_BYTES + size)
    if not rest:  # the rule: all have one length
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
            raise Problem(
                "malformed-upload", hint="the last report is shorter than its length says"
            )
        if len(places) == most:
            raise _too_many(most)
        places.append((start, at - start))
    starts, sizes = np.array(places, dtype=np.int64).T
    return starts, sizes


def _too_many(most: int) -> Problem:
    return Problem("too-large", hint=f"an upload has {most} reports at most; send several")


def _rows(data: U8, starts: I64, size: int) -> U8:
    """Reports of one length as the rows of an array: (count, size)."""
    step = size + LENGTH_BYTES
    if len(starts) * step == len(data):  # nothing else is in the body
        return data.reshape(-1, step)[:, LENGTH_BYTES:]
    rows: U8 = data[starts[:, None] + np.arange(size)]
    return rows

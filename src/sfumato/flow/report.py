"""The bytes of a report: a version, the task it answers, an id and a message.

byte 0        wire version (1)
bytes 1–32    digest of the task
bytes 33–48   report id, random, so that a report sent twice is counted once
bytes 49–     the message: a sealed table, or the records of a local task; its length is the task's

Several reports travel as frames: each after its length, four bytes, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sfumato.errors import MismatchError
from sfumato.flow.task import LocalTask, Task

WIRE_VERSION = 1
HEADER_BYTES = 49
LENGTH_BYTES = 4  # before each report of an upload


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """One device's answer to one task, sealed."""

    task_id: str
    report_id: bytes
    message: bytes

    def __post_init__(self) -> None:
        if (len(self.task_id), len(self.report_id)) != (64, 16):
            raise MismatchError("a report must have a task id of 64 digits and an id of 16 bytes")

    def to_bytes(self) -> bytes:
        return bytes([WIRE_VERSION]) + bytes.fromhex(self.task_id) + self.report_id + self.message

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        if len(data) < HEADER_BYTES or data[0] != WIRE_VERSION:
            raise MismatchError(
                f"a report must begin with version {WIRE_VERSION} and a header of "
                f"{HEADER_BYTES} bytes"
            )
        return cls(data[1:33].hex(), data[33:49], data[49:])

    def __repr__(self) -> str:  # never the message
        return f"Report(task={self.task_id[:8]}…, {HEADER_BYTES + len(self.message)} bytes)"


def report_bytes(task: Task | LocalTask) -> int:
    """The size of a report to this task; reports with the records of a local task one by one are
    shorter."""
    return HEADER_BYTES + task.message_bytes


def to_frames(reports: Iterable[bytes]) -> bytes:
    """Concatenate reports, each after its length.

    >>> to_frames([b"oak", b"elm"])
    b'\\x03\\x00\\x00\\x00oak\\x03\\x00\\x00\\x00elm'
    """
    return b"".join(len(data).to_bytes(LENGTH_BYTES, "little") + data for data in reports)


def from_frames(body: bytes) -> list[bytes]:
    """Split a body into reports; a body that ends within a frame raises MismatchError.

    >>> from_frames(to_frames([b"oak", b"elm"]))
    [b'oak', b'elm']
    """
    reports, start = [], 0
    while start < len(body):
        end = start + LENGTH_BYTES + int.from_bytes(body[start : start + LENGTH_BYTES], "little")
        if end > len(body) or start + LENGTH_BYTES > len(body):
            raise MismatchError(f"an upload of {len(body)} bytes ends within a frame")
        reports.append(body[start + LENGTH_BYTES : end])
        start = end
    return reports

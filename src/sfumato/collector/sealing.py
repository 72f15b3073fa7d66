"""From uploads to what a study keeps of them: after it, no report id stands beside its record.

Records of a local task are put in a random order and kept in a Parquet file with one column; tables
of a central task are added, and only the sum is kept.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sfumato.collector.admission import frames
from sfumato.device.offers import AnyTask
from sfumato.errors import DataError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy import Rng

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

COLUMN = "record"
MOST_REPORTS = 50_000  # sealed together
MOST_BYTES = 8 << 20  # of reports sealed together, about: other writers wait meanwhile
_ID = slice(HEADER_BYTES - 16, HEADER_BYTES)  # where a report has its id
_PIECE_BITS = 1 << 26  # of tables that are unpacked together


def most_reports(task: AnyTask) -> int:
    """How many reports of a task are sealed together, so that they fit into memory
    and a transaction is short."""
    return max(1, min(MOST_REPORTS, MOST_BYTES // (HEADER_BYTES + task.message_bytes)))


def first_of_each(bodies: Iterable[bytes]) -> dict[bytes, bytes]:
    """The messages in these uploads by report id; of an id that came twice, the first."""
    messages: dict[bytes, bytes] = {}
    for body in bodies:
        starts, sizes = frames(body, len(body))
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            report = body[start : start + size]
            messages.setdefault(report[_ID], report[HEADER_BYTES:])
    return messages


def seal(task: AnyTask, messages: Sequence[bytes], *, rng: Rng) -> bytes:
    """What is kept of the messages of admitted reports."""
    if isinstance(task, Task):
        return to_bytes(total_of(task, messages))
    records = np.frombuffer(b"".join(messages), dtype=np.uint8).reshape(-1, record_bytes(task))
    return _to_parquet(records[np.argsort(rng.words(records.shape[0]))])


def batch_of(task: Task, sealed: Iterable[bytes], count: int) -> Batch:
    """The batch of `count` devices that the sums of a central task add up to."""
    total = Batch.empty(task).total
    for data in sealed:
        total = total + from_bytes(data)
    return Batch(task.id, total, count)


def records_of(data: bytes) -> pa.ChunkedArray:
    """The column of records that a local task's reports were sealed into."""
    try:
        return pq.read_table(pa.BufferReader(data), columns=[COLUMN]).column(COLUMN)
    except (pa.ArrowException, KeyError) as problem:
        raise DataError("sealed records are damaged: restore the store from a backup") from problem


def as_rows(records: pa.ChunkedArray, size: int) -> Iterable[U8]:
    """The records as arrays, (n, size) each."""
    for part in records.chunks:
        held = np.frombuffer(part.buffers()[1], dtype=np.uint8)
        yield held[part.offset * size : (part.offset + len(part)) * size].reshape(-1, size)


def record_bytes(task: AnyTask) -> int:
    assert not isinstance(task, Task)  # a central task has tables
    return (task.randomizer if isinstance(task, LocalTask) else task.discoverer).record_bytes


def total_of(task: Task, messages: Sequence[bytes]) -> I64:
    """The sum of sealed tables, modulo their modulus: what `Collector` adds one by one.

    A table's bits are added up over all messages before they are put together, which is the same
    number: unpacking is linear.
    """
    assert isinstance(task.aggregation, Plain)  # an offer has no other
    bits, size = task.aggregation.modulus_bits, task.message_bytes
    packed = np.frombuffer(b"".join(messages), dtype=np.uint8).reshape(-1, size)
    digits = np.zeros(task.cells * bits, dtype=np.int64)
    piece = max(1, _PIECE_BITS // (8 * size))
    for start in range(0, packed.shape[0], piece):
        part = np.unpackbits(packed[start : start + piece], axis=1, bitorder="little")
        digits += part[:, : digits.size].sum(axis=0, dtype=np.int64)
    # Beyond 63 bits a sum wraps, which changes nothing modulo a smaller power of two.
    total = (digits.reshape(-1, bits) << np.arange(bits, dtype=np.int64)).sum(axis=1)
    return np.asarray(total & np.int64((1 << bits) - 1)).reshape(task.sketch.shape)


def to_bytes(table: I64) -> bytes:
    """A table for the store."""
    file = io.BytesIO()
    np.save(file, table, allow_pickle=False)
    return file.getvalue()


def from_bytes(data: bytes) -> I64:
    """The table that `to_bytes` wrote."""
    try:
        table = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as problem:
        raise DataError("a stored sum is damaged: restore the store from a backup") from problem
    return np.asarray(table, dtype=np.int64)


def _to_parquet(records: U8) -> bytes:
    count, size = records.shape
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(size), count, [None, pa.py_buffer(np.ascontiguousarray(records))]
    )
    file = io.BytesIO()
    pq.write_table(
        pa.table({COLUMN: column}),
        file,
        compression="none",  # of random bits nothing can be spared
        use_dictionary=False,
        write_statistics=False,
    )
    return file.getvalue()

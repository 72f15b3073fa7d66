"""On the collector: add up admitted reports.

An accumulator adds messages, writes its content in a form that separates no report from the others
(`seal`), reads such content again (`merge`), and returns the batch of a task. Of tables only the
sum is stored; records are stored in a random order, in a Parquet file with one column, and counted.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sfumato.arrays import I64, U8
from sfumato.errors import DataError, MismatchError, TaskError
from sfumato.flow.admission import Admission, Rejection, first_of_each
from sfumato.flow.aggregation import Sparse
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Rng
from sfumato.privacy.tallies import Tally
from sfumato.sketch import ItemCounts, SparseSketch, SparseTable
from sfumato.sketch.keys import limbs

COLUMN = "record"
_PIECE_BITS = 1 << 26  # size of the tables that are unpacked together


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """A sum of sealed tables over `count` devices of one task. Batches of one task add."""

    task_id: str
    total: Any  # an array, or a SparseTable
    count: int
    charged: bool = False  # whether the ledger has it already: unmasking reveals a masked sum

    def __add__(self, other: Batch) -> Batch:
        if self.task_id != other.task_id:
            raise MismatchError(
                f"batches of different tasks do not add: {self.task_id[:8]} and {other.task_id[:8]}"
            )
        if self.charged or other.charged:
            raise MismatchError("a batch that is charged already cannot be added to another")
        return Batch(self.task_id, self.total + other.total, self.count + other.count)

    def __repr__(self) -> str:  # never the sum
        return f"Batch(task={self.task_id[:8]}…, count={self.count})"

    @classmethod
    def empty(cls, task: Task) -> Batch:
        return cls(task.id, table_from_bytes(task, None), 0)


@dataclass(frozen=True, slots=True, repr=False)
class RecordBatch:
    """The counted records of `count` reports to one local task."""

    task_id: str
    tallies: list[Tally]
    count: int
    records: int  # without the impossible ones
    impossible: int = 0  # records that no device sends, which were left out

    def __add__(self, other: RecordBatch) -> RecordBatch:
        if self.task_id != other.task_id:
            raise MismatchError(
                f"batches of different tasks do not add: {self.task_id[:8]} and {other.task_id[:8]}"
            )
        return RecordBatch(
            self.task_id,
            [mine + its for mine, its in zip(self.tallies, other.tallies, strict=True)],
            self.count + other.count,
            self.records + other.records,
            self.impossible + other.impossible,
        )

    def __repr__(self) -> str:  # never the tallies
        return f"RecordBatch(task={self.task_id[:8]}…, count={self.count})"


class Accumulator(Protocol):
    """Adds up the reports of one task."""

    def add(self, messages: Sequence[bytes]) -> None:
        """Add the messages of admitted reports, each of them once."""
        ...

    def seal(self, *, rng: Rng) -> bytes:
        """The content as bytes for the store; only before anything is merged."""
        ...

    def merge(self, sealed: bytes) -> None:
        """Add the content that `seal` returned."""
        ...

    def batch(self, count: int) -> Batch | RecordBatch:
        """The batch of `count` reports; call it last."""
        ...


def accumulator(task: Task | LocalTask | WordTask) -> Accumulator:
    """An empty accumulator for a task."""
    if not isinstance(task, Task):
        return TallyAccumulator(task)
    is_sparse = isinstance(task.aggregation, Sparse)
    return SparseAccumulator(task) if is_sparse else SumAccumulator(task)


class SumAccumulator:
    """Adds tables."""

    def __init__(self, task: Task) -> None:
        if task.is_masked:
            raise TaskError("a masked task has no reports; its round gives the sum")
        self._task = task
        self._total: I64 = np.zeros(task.sketch.shape, dtype=np.int64)

    def add(self, messages: Sequence[bytes]) -> None:
        """Add sealed tables, modulo their modulus.

        Bits are added over all messages before they are put together, which gives the same sum
        because unpacking is linear.
        """
        task = self._task
        bits, size = task.aggregation.modulus_bits, task.message_bytes
        packed = np.frombuffer(b"".join(messages), dtype=np.uint8).reshape(-1, size)
        digits = np.zeros(task.cells * bits, dtype=np.int64)
        piece = max(1, _PIECE_BITS // (8 * size))
        for start in range(0, packed.shape[0], piece):
            part = np.unpackbits(packed[start : start + piece], axis=1, bitorder="little")
            digits += part[:, : digits.size].sum(axis=0, dtype=np.int64)
        # Beyond 63 bits a sum wraps, which changes nothing modulo a smaller power of two.
        total = (digits.reshape(-1, bits) << np.arange(bits, dtype=np.int64)).sum(axis=1)
        self._total += np.asarray(total & np.int64((1 << bits) - 1)).reshape(task.sketch.shape)

    def seal(self, *, rng: Rng) -> bytes:
        return to_bytes(self._total)

    def merge(self, sealed: bytes) -> None:
        part = from_bytes(sealed)
        if part.shape != self._total.shape:
            raise DataError(
                f"a stored sum of this task must have the shape {self._total.shape}; got "
                f"{part.shape}: restore the store from a backup"
            )
        self._total += part

    def batch(self, count: int) -> Batch:
        return Batch(self._task.id, self._total.copy(), count)

    def __repr__(self) -> str:  # never the sum
        return f"SumAccumulator(task={self._task.id[:8]}…)"


class SparseAccumulator:
    """Adds up the numbers that devices send instead of tables."""

    def __init__(self, task: Task) -> None:
        assert isinstance(task.aggregation, Sparse)  # the caller has checked
        self._task, self._aggregation = task, task.aggregation
        self._limbs = limbs(self._aggregation.entry_bits)
        self._parts = [SparseTable.of(np.zeros((0, self._limbs), dtype=np.uint64))]

    def add(self, messages: Sequence[bytes]) -> None:
        size = self._task.message_bytes
        packed = np.frombuffer(b"".join(messages), dtype=np.uint8).reshape(-1, size)
        piece = max(1, _PIECE_BITS // (8 * size))
        for start in range(0, len(packed), piece):
            entries = self._aggregation.unpack(packed[start : start + piece])
            numbers = entries.reshape(-1, self._limbs)
            self._add(SparseTable.of(numbers[numbers.any(axis=1)]))  # without "none"

    def seal(self, *, rng: Rng) -> bytes:
        return to_bytes(self._total())

    def merge(self, sealed: bytes) -> None:
        self._add(SparseTable.from_array(from_bytes(sealed), self._limbs))

    def _add(self, table: SparseTable) -> None:
        """Add a table to those of about its size, so that no cell is added up often."""
        self._parts.append(table)
        while len(self._parts) > 1 and len(self._parts[-2]) <= 2 * len(self._parts[-1]):
            last = self._parts.pop()
            self._parts[-1] += last

    def _total(self) -> SparseTable:
        while len(self._parts) > 1:
            last = self._parts.pop()
            self._parts[-1] += last
        return self._parts[0]

    def batch(self, count: int) -> Batch:
        sketch = self._task.sketch
        assert isinstance(sketch, SparseSketch)  # by the task's check
        return Batch(self._task.id, sketch.from_sparse(self._total()), count)

    def __repr__(self) -> str:  # never the sum
        return f"SparseAccumulator(task={self._task.id[:8]}…)"


class TallyAccumulator:
    """Counts randomised records."""

    def __init__(self, task: LocalTask | WordTask) -> None:
        self._task = task
        self._tallies = task.tallies()
        self._waiting: list[U8] = []  # records that are not counted yet
        self._records = self._impossible = 0

    def add(self, messages: Sequence[bytes]) -> None:
        data = np.frombuffer(b"".join(messages), dtype=np.uint8)
        self._waiting.append(data.reshape(-1, self._task.record_bytes))

    def seal(self, *, rng: Rng) -> bytes:
        records = np.concatenate(self._waiting)
        return to_parquet(records[np.argsort(rng.words(records.shape[0]))])

    def merge(self, sealed: bytes) -> None:
        self.add_column(records_of(sealed))

    def add_column(self, records: pa.ChunkedArray) -> None:
        """Count a column of records."""
        for part in records.chunks:
            size = self._task.record_bytes
            if part.null_count or part.type != pa.binary(size):
                raise MismatchError(
                    f"records must be a column of {size} bytes each, none missing; got {part.type}"
                )
            data = np.frombuffer(part.buffers()[1], dtype=np.uint8)
            self._fold(
                data[part.offset * size : (part.offset + len(part)) * size].reshape(-1, size)
            )

    def batch(self, count: int) -> RecordBatch:
        for records in self._waiting:
            self._fold(records)
        self._waiting.clear()
        return RecordBatch(self._task.id, self._tallies, count, self._records, self._impossible)

    def fold(self, values: npt.NDArray[np.generic], *, rng: Rng) -> None:
        """Randomise the values of simulated devices, and count the records."""
        self._fold(self._task.randomize(values, rng=rng))

    def _fold(self, records: U8) -> None:
        wrong = self._task.fold(records, self._tallies)
        self._impossible += wrong
        self._records += records.shape[0] - wrong

    def __repr__(self) -> str:  # never the tallies
        return f"TallyAccumulator(task={self._task.id[:8]}…)"


class Collector:
    """Admits reports to one task's batch in memory, as the service does with its store: duplicates
    count once, and of two reports with one id the first counts."""

    def __init__(self, task: Task | LocalTask | WordTask) -> None:
        self.rejected: Counter[Rejection] = Counter()
        self.duplicates = 0
        self._task, self._admission, self._sum = task, Admission(task), accumulator(task)
        self._ids: set[bytes] = set()

    def add(self, reports: Iterable[bytes]) -> None:
        """Add reports in their wire format; a report counts completely or not at all."""
        reports = list(reports)
        if not reports:
            return
        admitted = self._admission.admit(to_frames(reports), most_reports=len(reports))
        self.rejected += admitted.rejected
        messages = first_of_each([admitted.body]) if admitted.count else {}
        new = {name: message for name, message in messages.items() if name not in self._ids}
        self.duplicates += admitted.count - len(new)
        if self._task.most_reports is not None:
            capacity = max(0, self._task.most_reports - len(self._ids))
            if len(new) > capacity:
                self.rejected[Rejection.BATCH_FULL] += len(new) - capacity
                new = dict(list(new.items())[:capacity])
        self._ids |= new.keys()
        if new:
            self._sum.add(list(new.values()))

    @property
    def batch(self) -> Any:
        """The batch of all admitted reports: a `Batch`, or the `RecordBatch` of a local task."""
        return self._sum.batch(len(self._ids))

    def __repr__(self) -> str:  # never the reports
        return f"Collector({len(self._ids)} reports, rejected={dict(self.rejected)})"


def records_of(sealed: bytes) -> pa.ChunkedArray:
    """The column of records in the sealed reports of a local task."""
    try:
        return pq.read_table(pa.BufferReader(sealed), columns=[COLUMN]).column(COLUMN)
    except (pa.ArrowException, KeyError, OSError) as problem:
        raise DataError("sealed records are damaged: restore the store from a backup") from problem


def to_bytes(table: I64 | SparseTable) -> bytes:
    """A table as bytes for the store."""
    file = io.BytesIO()
    np.save(file, np.asarray(table), allow_pickle=False)
    return file.getvalue()


def table_from_bytes(task: Task, data: bytes | None) -> I64 | SparseTable:
    """The table of a task that `to_bytes` wrote; an empty one if there is no data."""
    array = np.zeros(task.sketch.shape, dtype=np.int64) if data is None else from_bytes(data)
    if isinstance(task.sketch, ItemCounts):
        return SparseTable.from_array(array, limbs(task.sketch.entry_bits))
    return array


def from_bytes(data: bytes) -> I64:
    """The array that `to_bytes` wrote."""
    try:
        table = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, TokenError) as problem:
        raise DataError("a stored sum is damaged: restore the store from a backup") from problem
    if table.dtype != np.int64:
        raise DataError("a stored sum is damaged: restore the store from a backup")
    return np.asarray(table)


def to_parquet(records: U8) -> bytes:
    """Records, (n, size), as bytes for the store."""
    count, size = records.shape
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(size), count, [None, pa.py_buffer(np.ascontiguousarray(records))]
    )
    file = io.BytesIO()
    pq.write_table(
        pa.table({COLUMN: column}),
        file,
        compression="none",  # random bits do not compress
        use_dictionary=False,
        write_statistics=False,
    )
    return file.getvalue()

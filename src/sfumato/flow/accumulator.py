"""The collector's side: what admitted reports add up to.

An accumulator adds messages, keeps what it added in a form in which no report can be told from
another (`seal`), takes such pieces in again (`merge`), and gives the batch of a task. Tables are
added, and only their sum is kept; records are kept in a random order, in a Parquet file with one
column, and counted.
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

from sfumato.errors import DataError, MismatchError, TaskError
from sfumato.flow.admission import Admission, Rejection, first_of_each
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Rng
from sfumato.privacy.tallies import Tally

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

COLUMN = "record"
_PIECE_BITS = 1 << 26  # of tables that are unpacked together


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


@dataclass(frozen=True, slots=True, repr=False)
class RecordBatch:
    """The counted records of `count` reports to one local task."""

    task_id: str
    tallies: list[Tally]
    count: int
    records: int  # counted, so without the impossible ones
    impossible: int = 0  # records that no device makes, which were left out

    def __repr__(self) -> str:  # never the tallies
        return f"RecordBatch(task={self.task_id[:8]}…, count={self.count})"


class Accumulator(Protocol):
    """What reports of one task are added to."""

    def add(self, messages: Sequence[bytes]) -> None:
        """Add the messages of admitted reports, each of which came once."""
        ...

    def seal(self, *, rng: Rng) -> bytes:
        """What is kept of what was added to an accumulator into which nothing was merged."""
        ...

    def merge(self, sealed: bytes) -> None:
        """Add what `seal` gave."""
        ...

    def batch(self, count: int) -> Batch | RecordBatch:
        """What `count` reports add up to; nothing is added after it."""
        ...


def accumulator(task: Task | LocalTask | WordTask) -> Accumulator:
    """An empty accumulator of a task."""
    return SumAccumulator(task) if isinstance(task, Task) else TallyAccumulator(task)


class SumAccumulator:
    """Adds tables."""

    def __init__(self, task: Task) -> None:
        if task.is_masked:
            raise TaskError("a masked task has no reports; its round gives the sum")
        self._task = task
        self._total = Batch.empty(task).total

    def add(self, messages: Sequence[bytes]) -> None:
        """Add sealed tables, modulo their modulus.

        A table's bits are added up over all messages before they are put together, which is the
        same number: unpacking is linear.
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


class TallyAccumulator:
    """Counts randomised records."""

    def __init__(self, task: LocalTask | WordTask) -> None:
        self._task = task
        self._tallies = task.tallies()
        self._waiting: list[U8] = []  # records that were added and are not counted yet
        self._records = self._impossible = 0

    def add(self, messages: Sequence[bytes]) -> None:
        data = np.frombuffer(b"".join(messages), dtype=np.uint8)
        self._waiting.append(data.reshape(-1, self._task.record_bytes))

    def seal(self, *, rng: Rng) -> bytes:
        records = np.concatenate(self._waiting)
        return to_parquet(records[np.argsort(rng.words(records.shape[0]))])

    def merge(self, sealed: bytes) -> None:
        for part in records_of(sealed).chunks:
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
        """Randomise what devices have to say, and count it: for simulated devices."""
        self._fold(self._task.randomize(values, rng=rng))

    def _fold(self, records: U8) -> None:
        wrong = self._task.fold(records, self._tallies)
        self._impossible += wrong
        self._records += records.shape[0] - wrong

    def __repr__(self) -> str:  # never the tallies
        return f"TallyAccumulator(task={self._task.id[:8]}…)"


class Collector:
    """Admits reports to one task's batch in memory, as a service does over a store: a report that
    came before is counted once, and of an id that came twice the first report counts."""

    def __init__(self, task: Task | LocalTask | WordTask) -> None:
        self.rejected: Counter[Rejection] = Counter()
        self.repeated = 0  # reports that came again
        self._task, self._admission, self._sum = task, Admission(task), accumulator(task)
        self._seen: set[bytes] = set()

    def add(self, reports: Iterable[bytes]) -> None:
        """Add reports as they came over the wire; a report counts whole or not at all."""
        sent = list(reports)
        if not sent:
            return
        admitted = self._admission.admit(to_frames(sent), most_reports=len(sent))
        self.rejected += admitted.rejected
        messages = first_of_each([admitted.body]) if admitted.count else {}
        fresh = {name: message for name, message in messages.items() if name not in self._seen}
        self.repeated += admitted.count - len(fresh)
        if self._task.most_reports is not None:
            room = max(0, self._task.most_reports - len(self._seen))
            if len(fresh) > room:
                self.rejected[Rejection.BATCH_FULL] += len(fresh) - room
                fresh = dict(list(fresh.items())[:room])
        self._seen |= fresh.keys()
        if fresh:
            self._sum.add(list(fresh.values()))

    @property
    def batch(self) -> Any:
        """What all admitted reports add up to: a `Batch`, or a `RecordBatch` of a local task."""
        return self._sum.batch(len(self._seen))

    def __repr__(self) -> str:  # never what came
        return f"Collector({len(self._seen)} reports, rejected={dict(self.rejected)})"


def records_of(sealed: bytes) -> pa.ChunkedArray:
    """The column of records that a local task's reports were sealed into."""
    try:
        return pq.read_table(pa.BufferReader(sealed), columns=[COLUMN]).column(COLUMN)
    except (pa.ArrowException, KeyError, OSError) as problem:
        raise DataError("sealed records are damaged: restore the store from a backup") from problem


def to_bytes(table: I64) -> bytes:
    """A table for the store."""
    file = io.BytesIO()
    np.save(file, table, allow_pickle=False)
    return file.getvalue()


def from_bytes(data: bytes) -> I64:
    """The table that `to_bytes` wrote."""
    try:
        table = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, TokenError) as problem:
        raise DataError("a stored sum is damaged: restore the store from a backup") from problem
    if table.dtype != np.int64:
        raise DataError("a stored sum is damaged: restore the store from a backup")
    return np.asarray(table)


def to_parquet(records: U8) -> bytes:
    """Records, (n, size), as they are kept."""
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

"""Sparse tables: only the cells that are not zero, each under its number. They add like others.

A number is (limbs,) little-endian 64-bit words, as a key is (`sketch.keys`), and never zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, U64, Bool
from sfumato.errors import DataError
from sfumato.sketch.invertible import Listing
from sfumato.sketch.keys import Column, TextKeys, WordKeys, limbs, numbers_of
from sfumato.sketch.norms import Norms, check_weights, listed_norms
from sfumato.spec import later, spec


@dataclass(frozen=True, slots=True, repr=False)
class SparseTable:
    """Cells with their counts, by ascending number. `+` adds the counts of equal numbers.

    >>> oak, elm = np.array([[7]], dtype=np.uint64), np.array([[3]], dtype=np.uint64)
    >>> np.asarray(SparseTable.of(oak) + SparseTable.of(elm) + SparseTable.of(oak))
    array([[3, 1],
           [7, 2]])
    """

    numbers: U64  # (n, limbs), each once
    counts: I64  # (n,)

    @classmethod
    def of(cls, numbers: U64, counts: I64 | None = None) -> SparseTable:
        """The table of cells that may repeat, each counted `counts` times (once if not given)."""
        distinct, place = np.unique(numbers, axis=0, return_inverse=True)
        total = np.zeros(len(distinct), dtype=np.int64)
        np.add.at(total, place.reshape(-1), 1 if counts is None else counts)
        return cls(distinct, total)

    @classmethod
    def from_array(cls, array: I64, limb_count: int) -> SparseTable:
        """The table that `np.asarray` turned into rows of numbers and counts. DataError if this
        array cannot be one of reports."""
        if array.ndim != 2 or array.shape[1] != limb_count + 1:
            raise DataError(
                f"a stored sparse table must have {limb_count + 1} columns; got the shape "
                f"{array.shape}: restore the store from a backup"
            )
        numbers = np.ascontiguousarray(array[:, :-1]).view(np.uint64)
        is_table = numbers.any(axis=1).all() and comes_before(numbers[:-1], numbers[1:]).all()
        if not is_table or (array[:, -1] < 1).any():
            raise DataError(
                "a stored sparse table must have each number once, ascending and above 0, with a "
                "count of at least 1: restore the store from a backup"
            )
        return cls(numbers, array[:, -1].copy())

    def __add__(self, other: SparseTable) -> SparseTable:
        return self.of(
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.counts, other.counts]),
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        rows = np.concatenate([self.numbers.view(np.int64), self.counts[:, None]], axis=1)
        return rows if dtype is None else rows.astype(dtype)

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:  # never the cells
        return f"SparseTable({len(self)} cells)"


@runtime_checkable
class SparseSketch(Protocol):
    """A sketch whose cells have numbers, so that a device can send those of its values."""

    @property
    def entry_bits(self) -> int:
        """The bits of a number."""
        ...

    def numbers(self, values: Any) -> U64:
        """The number of each value's cell: (n, limbs)."""
        ...

    def possible_entries(self, numbers: U64) -> Bool:
        """Which devices can have sent these numbers, (devices, entries, limbs), where 0 is none.
        A device sends them in ascending order."""
        ...

    def from_sparse(self, table: SparseTable) -> Any:
        """The same table as `encode` makes it."""
        ...


@spec("item_counts")
class ItemCounts:
    """Count the items of an open domain, each under its key, in a sparse table.

    Error: none but the noise on a list of the items.
    Sensitivity: of a list: one device with `values` different items moves as many counts by one; if
        `copies` count, it moves counts by at most `values` together, and perhaps one by all of it.
        A table takes no noise: the set of its cells would still show every item.

    >>> counts = ItemCounts(keys=TextKeys(length=8))
    >>> listing = counts.list(counts.encode(["oak", "elm"]) + counts.encode(["oak"]))
    >>> sorted(zip(listing.items.to_pylist(), listing.counts.tolist()))
    [('elm', 1), ('oak', 2)]
    """

    word_bits: ClassVar[None] = None

    keys: TextKeys | WordKeys  # their numbers are never 0
    round: int = 0  # tables of different rounds do not add
    copies: bool = later(False)  # whether a device may count several times for an item

    @property
    def shape(self) -> tuple[int, ...]:
        """Of no cells, as long as nobody has sent any."""
        return (0, limbs(self.keys.bits) + 1)

    @property
    def entry_bits(self) -> int:
        return self.keys.bits

    def encode(self, values: Column, weights: I64 | None = None) -> SparseTable:
        """The table of these items, each counted `weights` times (once if not given)."""
        numbers = self.numbers(values)
        check_weights(weights, len(numbers))
        return SparseTable.of(numbers, weights)

    def numbers(self, values: Column) -> U64:
        return numbers_of(self.keys, values)

    def list(self, table: SparseTable, *, candidates: U64 | None = None) -> Listing:
        """The items of a table; nothing is left in it, so `candidates` are not needed."""
        return Listing(
            items=self.keys.items(table.numbers)[0],
            counts=table.counts,
            values=table.counts,
            keys=table.numbers,
            cells_left=0,
            inserted=int(table.counts.sum()),
            keys_estimate=float(len(table)),
        )

    def estimate(self, table: SparseTable, values: Column) -> F64:
        """The counts of these items, zero for those that are not in the table."""
        counts = dict(zip(map(bytes, table.numbers), table.counts.tolist(), strict=True))
        numbers = self.keys.numbers(values)[0]
        return np.array([counts.get(bytes(row), 0) for row in numbers], dtype=np.float64)

    def sensitivity(self, values: int) -> Norms:
        return listed_norms(values, self.copies)

    def possible(self, tables: Iterable[SparseTable], values: int) -> Bool:
        """Those with at most `values` keys, each counted once unless `copies` count."""
        return np.array(
            [
                int(table.counts.sum()) <= values
                and bool((table.counts >= 1).all() if self.copies else (table.counts == 1).all())
                and bool(self.keys.texts(table.numbers)[1].all())
                for table in tables
            ],
            dtype=np.bool_,
        )

    def possible_entries(self, numbers: U64) -> Bool:
        is_none: Bool = (numbers == 0).min(axis=2)
        is_key = self.keys.texts(numbers.reshape(-1, numbers.shape[2]))[1].reshape(is_none.shape)
        ascends = comes_before(numbers[:, :-1], numbers[:, 1:]) | is_none[:, 1:]
        if self.copies:
            ascends |= (numbers[:, :-1] == numbers[:, 1:]).all(axis=2)
        after_none = ~(is_none[:, 1:] & ~is_none[:, :-1])
        return np.asarray((is_key | is_none).all(axis=1) & (ascends & after_none).all(axis=1))

    def from_sparse(self, table: SparseTable) -> SparseTable:
        return table


def comes_before(numbers: U64, others: U64) -> Bool:
    """Where a number, (..., limbs), comes before the other one in the order of `SparseTable`."""
    before = np.zeros(numbers.shape[:-1], dtype=np.bool_)
    for limb in reversed(range(numbers.shape[-1])):
        one, other = numbers[..., limb], others[..., limb]
        before = (one < other) | ((one == other) & before)
    return before

"""The invertible sketch (IBLT) of paper 001: a table from which its keys can be listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sfumato import hashing
from sfumato.arrays import F64, I64, U64, Bool, Whole
from sfumato.errors import SpecError
from sfumato.kernels import invertible as kernels
from sfumato.sketch import capacity, keys
from sfumato.sketch.keys import Column, Keys
from sfumato.sketch.norms import Norms, check_weights, listed_norms
from sfumato.spec import LARGEST_INTEGER, later, require, spec

if TYPE_CHECKING:  # not installed on devices
    import pyarrow as pa


MOST_WORD_BITS = 62  # largest ring for the sums
_PART_BITS = 60  # most bits of a key in one word: below the prime of the hashes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Listing:
    """The keys listed from a table, each once, and how much is left in it."""

    items: pa.Array
    counts: I64  # insertions of each
    values: I64  # the sum of the values inserted with each; its count if there are no values
    keys: U64  # the items' numbers, for `candidates` of another listing
    cells_left: int  # cells that are not empty: 0 if every key was listed
    inserted: int  # total insertions in the table, listed or not
    keys_estimate: float  # distinct keys in the table; exact if every one was listed

    @property
    def is_complete(self) -> bool:
        return self.cells_left == 0

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:  # never the items
        return f"Listing({len(self)} keys, {self.cells_left} cells left)"


@spec("invertible_sketch")
class InvertibleSketch:
    """Sum keys of an open domain, and list them without a dictionary.

    A key goes to one cell of each row. A cell is a few words of one ring, modulo 2**word_bits, and
    each insertion adds: a one (`count_bits`), the key, a check of it (`check_bits` at the top of
    every word) and optionally a value. A cell in which one key was inserted c times holds c times
    that key's content, so the key is read, verified by its check, and removed from its other cells;
    and so on, until every key is listed or the remaining keys share all their cells.

    Differs from the paper: the paper divides by c in a prime field of 31 bits, one field per sum;
    here c = 2**v · odd is divided out in the ring of the secure sum. That leaves the top v bits of
    a word unknown, so the check is on top: v bits of it are lost (`wrong_keys` allows for that) and
    none of the key, however often it was inserted. A cell is as wide as its fields, 48 bits for the
    paper's words against its eight words per key. Each row has cells of its own. A key must belong
    to the cell that it is read from, and its other cells must hold it often enough.

    Error: listed counts are exact, except for wrong keys, whose number `wrong_keys` bounds. All of
        `keys` keys are listed with probability at least 1 − capacity.failure_bound(keys, rows,
        width).
    Sensitivity: of a complete listing: one device with `values` keys moves as many counts by one;
        if `copies` count, it moves counts by at most `values` together.
        The table itself takes no noise: with noise on it, a key is not that key any more.

    >>> from sfumato.sketch.keys import TextKeys
    >>> sketch = InvertibleSketch(keys=TextKeys(length=8), rows=3, width=8, count_bits=8,
    ...                           check_bits=20, seed=1)
    >>> table = sketch.encode(["oak", "elm"]) + sketch.encode(["oak"])
    >>> listing = sketch.list(table)
    >>> sorted(zip(listing.items.to_pylist(), listing.counts.tolist()))
    [('elm', 1), ('oak', 2)]
    """

    keys: Keys
    rows: int = 3
    width: int  # cells of each row
    count_bits: int  # cells must not hold 2**count_bits insertions
    value_bits: int = 0  # values of a cell must add up to less than 2**value_bits; 0: no values
    check_bits: int  # in each word
    seed: int
    round: int = 0
    copies: bool = later(False)  # whether a device may insert a key several times

    def check(self) -> None:
        require.within(2, 8, rows=self.rows)
        require.within(1, 1 << 31, width=self.width)
        require.within(1, 40, count_bits=self.count_bits)
        require.within(0, 50, value_bits=self.value_bits)
        require(
            max(2, self.count_bits - 1) <= self.check_bits <= 44,
            f"check_bits must be {max(2, self.count_bits - 1)} to 44, so that a key can be read "
            f"however often it is inserted; got {self.check_bits}",
        )
        require.within(0, LARGEST_INTEGER, seed=self.seed)
        require.at_least(0, round=self.round)
        require(
            self.value_bits + self.count_bits + self.check_bits < MOST_WORD_BITS,
            "value_bits, count_bits and check_bits must leave space for a key in "
            f"{MOST_WORD_BITS} bits",
        )

    @property
    def words(self) -> int:
        """How many words a cell has."""
        available = min(_PART_BITS, MOST_WORD_BITS - self.check_bits)
        needed = self.value_bits + self.count_bits + self.keys.bits
        return max(1, -(-needed // available))

    @property
    def word_bits(self) -> int:
        """Sums must be taken modulo 2**word_bits."""
        least = self.value_bits + self.count_bits
        return max(least, -(-(least + self.keys.bits) // self.words)) + self.check_bits

    @property
    def cell_bits(self) -> int:
        return self.words * self.word_bits

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.width, self.words)

    def encode(self, values: Column, weights: I64 | None = None, amounts: I64 | None = None) -> I64:
        """The table of these items, each inserted `weights` times (once if not given); `amounts`
        are the totals to be added to their values. Items without a key are refused."""
        return self.encode_keys(keys.numbers_of(self.keys, values), weights, amounts)

    def distinct(self, values: Column) -> pa.Array:
        """The items of the keys of these values, each once."""
        return self.keys.items(np.unique(keys.numbers_of(self.keys, values), axis=0))[0]

    def encode_keys(
        self, numbers: U64, weights: I64 | None = None, amounts: I64 | None = None
    ) -> I64:
        """The same for keys given as numbers, (n, limbs)."""
        count = len(numbers)
        check_weights(weights, count)
        check_weights(amounts, count)
        if amounts is not None and not self.value_bits:
            raise SpecError("this sketch keeps no values; give it value_bits")
        nothing = np.zeros(0, dtype=np.int64)
        if amounts is None:
            ones = np.ones(count, dtype=np.int64) if weights is None else weights
            amounts = ones if self.value_bits else nothing
        times = nothing if weights is None else weights
        table = np.zeros((self.rows * self.width, self.words), dtype=np.uint64)
        kernels.insert(table, self.parts(numbers), times, amounts, *self.hashes, self.layout)
        return table.view(np.int64).reshape(self.shape)

    def list(self, table: Whole, *, candidates: U64 | None = None) -> Listing:
        """List the keys of a table. `candidates`, keys of other listings, help if it gets stuck."""
        if table.shape != self.shape:
            raise SpecError(f"a table must have the shape {self.shape}; got {table.shape}")
        mask = np.uint64((1 << self.word_bits) - 1)
        left = (table.astype(np.int64, copy=False).view(np.uint64) & mask).reshape(-1, self.words)
        if candidates is not None and self.value_bits:
            raise SpecError("a table that is listed with candidates must be without values")
        inserted = self._inserted(left)
        candidate_keys = (
            np.zeros((0, keys.limbs(self.keys.bits)), dtype=np.uint64)
            if candidates is None
            else candidates
        )
        parts, counts, values = kernels.peel(
            left, self.parts(candidate_keys), *self.hashes, self.layout
        )
        numbers = self._joined(parts)
        items, valid = self.keys.items(numbers)
        valid &= parts[:, -1] >> np.uint64(self._last_bits) == 0
        for word in range(1, self.words):  # by columns: much faster than along short rows
            left[:, 0] |= left[:, word]
        cells_left = int(np.count_nonzero(left[:, 0]))
        if not valid.all():  # a damaged table: some numbers are not keys, so the list is incomplete
            items, numbers, counts, values = (
                items.filter(valid), numbers[valid], counts[valid], values[valid],
            )  # fmt: skip
            cells_left = max(cells_left, 1)
        return Listing(
            items=items,
            counts=counts,
            values=values if self.value_bits else counts,
            keys=numbers,
            cells_left=cells_left,
            inserted=inserted,
            keys_estimate=self._estimated(len(counts), cells_left),
        )

    def wrong_keys(self, keys: int, insertions: int) -> float:
        """A bound on the expected number of wrong keys read from a table with this many keys and
        insertions, whatever they are (docs/proofs/listing.md).

        A cell of several keys is examined at most once per key. If 2**v divides its count, it
        passes for one key with a chance of 2**-(check_bits − v) per word, and that key belongs
        there with a chance of 1/width; Markov's inequality bounds the number of cells with 2**v
        insertions.
        """
        expected = 0.0
        for twos in range(self.count_bits):
            examinations = min(float(keys), insertions * (1 + keys / self.width) / 2**twos)
            chance = 2.0 ** -(self.words * max(self.check_bits - twos, 0)) / self.width
            expected += self.rows * examinations * chance
        return expected

    def collisions(self, keys: int) -> float:
        """The chance that two of `keys` keys have one fingerprint, and so the same cells."""
        return keys**2 / 2 * max(self.words - 1, 0) / 2.0**61

    def estimate(self, table: Whole, values: Column) -> F64:
        """The counts of these items, zero for those not listed."""
        listing = self.list(table)
        numbers, _ = self.keys.numbers(values)
        counts = dict(zip(map(bytes, listing.keys), listing.counts.tolist(), strict=True))
        return np.array([counts.get(bytes(row), 0) for row in numbers], dtype=np.float64)

    def sensitivity(self, values: int) -> Norms:
        return listed_norms(values, self.copies)

    def possible(self, tables: I64, values: int) -> Bool:
        """Those that list at most `values` keys, each inserted once unless `copies` count. Two keys
        that share a cell in every row cannot be listed, but that has a chance of width**-rows
        only."""
        return np.array([self._is_possible(table, values) for table in tables], dtype=np.bool_)

    def _is_possible(self, table: I64, values: int) -> bool:
        listing = self.list(table)
        if not listing.is_complete or listing.counts.sum() > values:
            return False
        if (listing.counts < 1).any() or not (self.copies or (listing.counts == 1).all()):
            return False
        mask = np.int64((1 << self.word_bits) - 1)
        again = self.encode_keys(listing.keys, listing.counts)
        return np.array_equal(again & mask, table & mask)

    def _inserted(self, table: U64) -> int:
        """Total insertions: the counts of a row, if no cell is over its count_bits."""
        first = table.reshape(self.shape)[0, :, 0] >> np.uint64(self.value_bits)
        return int((first & np.uint64((1 << self.count_bits) - 1)).sum())

    def _estimated(self, listed: int, cells_left: int) -> float:
        if cells_left == 0:
            return float(listed)
        cells = self.rows * self.width
        if self.rows != 3 or listed > 0.9 * cells_left:  # duplicates, not a core
            return max(listed + 2 * cells_left / 3, capacity.keys_of_core(cells_left, cells))
        return max(float(listed), capacity.keys_of_core(cells_left, cells))

    @property
    def layout(self) -> tuple[int, int, int, int]:
        return (self.value_bits, self.count_bits, self.check_bits, self.word_bits)

    @property
    def hashes(self) -> tuple[int, U64, U64, int]:
        point = hashing.row_polynomials(self.seed, "key", self.round, 1, 1)
        buckets = hashing.row_polynomials(self.seed, "key cell", self.round, self.rows, 3)
        checks = hashing.row_polynomials(self.seed, "key check", self.round, self.words, 3)
        return int(point[0, 0]), buckets, checks, self.width

    def _part_sizes(self) -> tuple[int, ...]:
        """How many bits of a key each word has."""
        each = self.word_bits - self.check_bits
        first = each - self.value_bits - self.count_bits
        return (first, *[each] * (self.words - 1))

    @property
    def _last_bits(self) -> int:
        """How many bits of a key the last word has; it may have space for more."""
        return self.keys.bits - sum(self._part_sizes()[:-1])

    def parts(self, numbers: U64) -> U64:
        """Keys cut into the parts that words hold; the last may be shorter."""
        parts, start = np.zeros((len(numbers), self.words), dtype=np.uint64), 0
        for word, size in enumerate(self._part_sizes()):
            size = min(size, self.keys.bits - start)
            if size > 0:
                parts[:, word] = keys.take(numbers, start, size)
                start += size
        return parts

    def _joined(self, parts: U64) -> U64:
        numbers = np.zeros((len(parts), keys.limbs(self.keys.bits)), dtype=np.uint64)
        start = 0
        for word, size in enumerate(self._part_sizes()):
            size = min(size, self.keys.bits - start)
            if size > 0:
                keys.put(numbers, start, size, parts[:, word] & np.uint64((1 << size) - 1))
                start += size
        return numbers

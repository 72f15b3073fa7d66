"""The whole message of paper 001's algorithms 2 and 3: invertible sketches of several samples of a
device's items, and perhaps a count sketch of all of them, in one table."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sfumato.arrays import F64, I64, U64, Bool
from sfumato.errors import SpecError
from sfumato.privacy import Rng
from sfumato.privacy.sampling import count_heads, threshold_sample
from sfumato.sketch.count import CountSketch
from sfumato.sketch.invertible import InvertibleSketch, Listing
from sfumato.sketch.keys import Column, TextKeys, WordKeys, numbers_of
from sfumato.sketch.norms import Norms, listed_norms
from sfumato.spec import require, spec

UNITS = 2  # values are kept in halves, since a sampling threshold may be a half of an odd number


@spec("sampled_tables")
class SampledTables:
    """`repetitions` invertible sketches, each of a threshold sample of a device's items with coins
    and hash functions of its own (paper 001, algorithms 1 and 2); with `counts`, also a count
    sketch of all of its items (algorithm 3). One table has them all, one after another, so that a
    device answers once.

    A sample keeps an item of which a device has c copies with probability min(c/threshold, 1), as
    if it had max(c, threshold) of them. If copies do not count, a device has one of each.

    Error: the mean over repetitions of an item's value is unbiased if all tables are listed, with a
        variance of at most count·(threshold − 1)/repetitions.
    Sensitivity: of the lists: one device adds at most `values` keys to each; no noise fits a table.

    >>> from sfumato.privacy import SeededRng
    >>> tables = SampledTables(
    ...     tables=InvertibleSketch(keys=TextKeys(length=8), rows=3, width=8, count_bits=8,
    ...                             check_bits=20, seed=1, copies=True),
    ...     repetitions=2, threshold=1.0)
    >>> total = tables.draw(["oak", "oak", "elm"], owners=np.array([0, 0, 1]), rng=SeededRng(1))
    >>> [dict(zip(part.items.to_pylist(), part.counts.tolist())) == {"oak": 1, "elm": 1}
    ...  for part in tables.lists(total)]
    [True, True]
    """

    tables: InvertibleSketch  # of the first repetition; `round` counts the rounds
    repetitions: int
    threshold: float
    counts: CountSketch | None = None
    count_bits: int = 0  # of a cell of `counts`, with its sign

    def check(self) -> None:
        require.at_least(1, repetitions=self.repetitions)
        require(
            self.threshold >= 1 and self.threshold * UNITS % 1 == 0,
            f"threshold must be at least 1 and a multiple of 0.5; got {self.threshold}",
        )
        require(
            isinstance(self.tables.keys, TextKeys | WordKeys),
            "keys must be those of texts or words",
        )
        require(
            (self.counts is None) == (self.count_bits == 0) and self.count_bits <= 62,
            f"count_bits must be 1 to 62 with counts, and 0 without; got {self.count_bits}",
        )

    @property
    def copies(self) -> bool:
        return self.tables.copies

    @property
    def keys(self) -> TextKeys | WordKeys:
        keys = self.tables.keys
        assert isinstance(keys, TextKeys | WordKeys)  # by the check
        return keys

    @property
    def shape(self) -> tuple[int, ...]:
        cells = 0 if self.counts is None else math.prod(self.counts.shape)
        return (self.repetitions * math.prod(self.tables.shape) + cells,)

    @property
    def word_bits(self) -> int:
        """One ring for all words: residues modulo a power of two may be taken modulo a higher."""
        return max(self.tables.word_bits, self.count_bits)

    def sketch(self, repetition: int) -> InvertibleSketch:
        """The sketch of one repetition, with its own hash functions."""
        return replace(self.tables, round=self.tables.round * self.repetitions + repetition)

    def draw(
        self, values: Column, weights: I64 | None = None, owners: I64 | None = None, *, rng: Rng
    ) -> I64:
        """A table of samples of these values. `owners` has the device of each; without them, each
        value is another device's, or that of `weights` devices."""
        numbers = numbers_of(self.keys, values)
        counted = [] if self.counts is None else [self.counts.encode(values, weights).reshape(-1)]
        copies = np.ones(len(numbers), dtype=np.int64)
        if owners is not None:
            pairs = np.concatenate([numbers, owners.astype(np.uint64)[:, None]], axis=1)
            distinct, copies = np.unique(pairs, axis=0, return_counts=True)
            numbers = distinct[:, :-1]
            copies = copies if self.copies else np.ones_like(copies)
        samples = [
            self._sample(self.sketch(repetition), numbers, copies, weights, rng)
            for repetition in range(self.repetitions)
        ]
        return np.concatenate([*samples, *counted])

    def _sample(
        self, sketch: InvertibleSketch, numbers: U64, copies: I64, weights: I64 | None, rng: Rng
    ) -> I64:
        if weights is None:
            sample = threshold_sample(copies, self.threshold, rng=rng)
            rows, times = np.flatnonzero(sample), None
            amounts = np.rint(UNITS * sample[rows]).astype(np.int64)
        else:  # one copy each
            heads = count_heads(weights, 1 / self.threshold, rng)
            rows = np.flatnonzero(heads)
            times = heads[rows]
            amounts = np.rint(UNITS * self.threshold * times).astype(np.int64)
        values = amounts if sketch.value_bits else None
        return sketch.encode_keys(numbers[rows], times, values).reshape(-1)

    def encode(self, values: I64, weights: I64 | None = None) -> I64:
        """The sum of tables that were drawn, (n, *shape)."""
        if weights is not None:
            raise SpecError("tables of samples are added as they are; leave out weights")
        return np.asarray(values.sum(axis=0))

    def lists(self, table: I64) -> list[Listing]:
        """What can be listed of each repetition."""
        tables = table[: self._cells].reshape(self.repetitions, *self.tables.shape)
        return [self.sketch(number).list(part) for number, part in enumerate(tables)]

    def amounts(self, listing: Listing) -> F64:
        """The copies that a listed item's sample stands for."""
        if self.tables.value_bits:
            return np.asarray(listing.values / UNITS)
        return np.asarray(listing.counts * self.threshold)

    def counted(self, table: I64) -> I64:
        """The table of `counts`."""
        assert self.counts is not None  # otherwise nobody asks
        return table[self._cells :].reshape(self.counts.shape)

    def estimate(self, table: I64, values: Column) -> F64:
        """The mean over repetitions of what these items' samples stand for."""
        totals: dict[bytes, float] = {}
        for listing in self.lists(table):
            for key, amount in zip(listing.keys, self.amounts(listing).tolist(), strict=True):
                totals[bytes(key)] = totals.get(bytes(key), 0.0) + amount / self.repetitions
        numbers, _ = self.keys.numbers(values)
        return np.array([totals.get(bytes(row), 0.0) for row in numbers], dtype=np.float64)

    def sensitivity(self, values: int) -> Norms:
        return listed_norms(values, self.copies)

    def possible(self, tables: I64, values: int) -> Bool:
        """Those whose repetitions have at most `values` keys in all, each once and with the amount
        of a sample."""
        return np.array([self._is_possible(table, values) for table in tables], dtype=np.bool_)

    def _is_possible(self, table: I64, values: int) -> bool:
        listings = self.lists(table)
        if not all(part.is_complete and (part.counts == 1).all() for part in listings):
            return False
        if len(np.unique(np.concatenate([part.keys for part in listings]), axis=0)) > values:
            return False
        mask = np.int64((1 << self.tables.word_bits) - 1)
        whole = table[: self._cells].reshape(self.repetitions, *self.tables.shape)
        for number, part in enumerate(listings):
            amounts = None
            if self.tables.value_bits:
                amounts = part.values
                sampled = (amounts == UNITS * self.threshold) | (
                    (amounts > UNITS * self.threshold) & (amounts % UNITS == 0)
                )
                most = values if self.copies else 1
                if not sampled.all() or (amounts > UNITS * max(self.threshold, most)).any():
                    return False
            again = self.sketch(number).encode_keys(part.keys, None, amounts)
            if not np.array_equal(again & mask, whole[number] & mask):
                return False
        if self.counts is None:
            return True
        return bool(self.counts.possible(self.counted(table)[None], values)[0])

    @property
    def _cells(self) -> int:
        """The words of all repetitions, which come first."""
        return self.repetitions * math.prod(self.tables.shape)

"""The loops of invertible sketches in numpy: used on devices, and to test the compiled twins.

A cell is `words` residues modulo 2**bits. `layout` is (value_bits, count_bits, check_bits, bits);
`sketch.invertible` says what they mean. `parts` is (n, words): the bits of each key that go into
each word. Tables are (rows · width, words) of uint64.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sfumato.arrays import I64, U8, U64, Bool
from sfumato.kernels.count.plain import add_mod, cells, evaluate, mix, multiply_mod

Layout = tuple[int, int, int, int]
Listed = tuple[U64, I64, I64]  # parts, counts, values

FIELD_BITS = 61


def text_keys(data: U8, offsets: I64, length: int, limbs: int) -> tuple[U64, Bool]:
    """The bytes data[offsets[i]:offsets[i + 1]] and a one after them, (n, limbs); and which of them
    have at most `length` bytes; the others are zero."""
    lengths = np.diff(offsets)
    fits = lengths <= length
    rows = np.zeros((lengths.size, 8 * limbs), dtype=np.uint8)
    places = np.arange(min(length, int(lengths.max(initial=0))))
    inside = (places < lengths[:, None]) & fits[:, None]
    if places.size:
        index = np.where(inside, offsets[:-1, None] + places, 0)
        rows[:, : places.size] = np.where(inside, data[index], 0)
    rows[np.flatnonzero(fits), lengths[fits]] = 1
    return rows.view("<u8").astype(np.uint64), fits


def places(parts: U64, point: np.uint64, buckets: U64, checks: U64, width: int) -> tuple[I64, U64]:
    """The cell of each key in every row, (n, rows), and its check in every word, (n, words), as
    field elements."""
    value = np.zeros(len(parts), dtype=np.uint64)
    for word in range(parts.shape[1]):
        value = add_mod(multiply_mod(value, point), parts[:, word])
    value = mix(value)
    rows = [
        row * width + cells(evaluate(buckets[row], value), width) for row in range(len(buckets))
    ]
    check_values = [evaluate(hash_, value) for hash_ in checks]
    return np.stack(rows, axis=1), np.stack(check_values, axis=1)


def contents(parts: U64, checks: U64, layout: Layout) -> U64:
    """The words that one insertion of each key adds to its cells, without its value: (n, words)."""
    value_bits, count_bits, check_bits, bits = layout
    content = parts.copy()
    content[:, 0] = (content[:, 0] << np.uint64(value_bits + count_bits)) + np.uint64(
        1 << value_bits
    )
    top = checks >> np.uint64(FIELD_BITS - check_bits)
    return content + (top << np.uint64(bits - check_bits))


def insert(
    table: U64,
    parts: U64,
    weights: I64,
    values: I64,
    point: np.uint64,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> None:
    """Add each key to its cells `weights` times (once if there are none), and its value once."""
    cell, check = places(parts, point, buckets, checks, width)
    content = contents(parts, check, layout)
    if weights.size:
        content *= weights.astype(np.uint64)[:, None]
    if values.size:
        content[:, 0] += values.astype(np.uint64)
    for row in range(cell.shape[1]):
        np.add.at(table, cell[:, row], content)
    table &= np.uint64((1 << layout[3]) - 1)


def peel(
    table: U64,
    candidates: U64,
    point: np.uint64,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> Listed:
    """Remove every key that can be read from the table, in place; see the compiled twin."""
    reader = _Reader(table, candidates, point, buckets, checks, width, layout)
    reader.run()
    parts = np.array(reader.parts, dtype=np.uint64).reshape(-1, table.shape[1])
    return (
        parts,
        np.array(reader.counts, dtype=np.int64),
        np.array(reader.values, dtype=np.int64),
    )


class _Reader:
    """Reads one cell at a time, in Python integers: slow and simple."""

    def __init__(
        self,
        table: U64,
        candidates: U64,
        point: np.uint64,
        buckets: U64,
        checks: U64,
        width: int,
        layout: Layout,
    ) -> None:
        self.table, self.candidates, self.layout = table, candidates, layout
        self.hashes: tuple[Any, ...] = (point, buckets, checks, width)
        self.waiting: deque[int] = deque()
        self.changed: set[int] = set()
        self.scan = 0
        self.parts: list[list[int]] = []
        self.counts: list[int] = []
        self.values: list[int] = []

    def run(self) -> None:
        for place in range(len(self.table)):
            self._enqueue(place)
        self._drain()
        if not len(self.candidates):
            return
        cell, check = places(self.candidates, *self.hashes)
        content = contents(self.candidates, check, self.layout)
        progress = True
        while progress:
            progress = False
            for key in range(len(self.candidates)):
                for place in cell[key].tolist():
                    progress |= self._split(place, key, cell, content)

    def _enqueue(self, place: int) -> None:
        """Queue a cell: first if it has one insertion, after all of these if it has more."""
        count = self._count(place)
        self.changed.discard(place)
        if count == 1:
            if place not in self.waiting:
                self.waiting.append(place)
        elif count:
            self.changed.add(place)

    def _next(self) -> int:
        if self.waiting:
            return self.waiting.popleft()
        while self.scan not in self.changed:
            self.scan = (self.scan + 1) % len(self.table)
        self.changed.discard(self.scan)
        return self.scan

    def _drain(self) -> None:
        limit = 2 * len(self.table)
        while (self.waiting or self.changed) and len(self.parts) < limit:
            place = self._next()
            key = self._pure([int(word) for word in self.table[place]], place)
            if key is not None:
                for other in self._take(*key):
                    self._enqueue(other)

    def _count(self, place: int) -> int:
        value_bits, count_bits, *_ = self.layout
        return int(self.table[place, 0]) >> value_bits & (1 << count_bits) - 1

    def _pure(self, cell: list[int], place: int) -> tuple[list[int], int, int] | None:
        value_bits, count_bits, check_bits, bits = self.layout
        value, first = cell[0] & (1 << value_bits) - 1, cell[0] >> value_bits
        count = first & (1 << count_bits) - 1
        if count == 0:
            return None
        twos = (count & -count).bit_length() - 1
        if twos > check_bits:
            return None
        inverse = pow(count >> twos, -1, 1 << 64)
        parts, tails = [], []
        for word, content in enumerate([first, *cell[1:]]):
            size = bits - value_bits if word == 0 else bits
            if content & (1 << twos) - 1:
                return None
            one = (content >> twos) * inverse & (1 << size - twos) - 1
            if word == 0:
                if one & (1 << count_bits) - 1 != 1:
                    return None
                one >>= count_bits
                size -= count_bits
            parts.append(one & (1 << size - check_bits) - 1)
            tails.append(one >> size - check_bits)
        row = np.array([parts], dtype=np.uint64)
        at, check = places(row, *self.hashes)
        if place not in at[0]:
            return None
        for tail, whole in zip(tails, check[0].tolist(), strict=True):
            if tail != (whole >> FIELD_BITS - check_bits) & (1 << check_bits - twos) - 1:
                return None
        if any(self._count(other) < count for other in at[0].tolist()):
            return None
        return parts, count, value

    def _take(self, parts: list[int], count: int, value: int) -> list[int]:
        row = np.array([parts], dtype=np.uint64)
        at, check = places(row, *self.hashes)
        content = contents(row, check, self.layout)[0] * np.uint64(count)
        content[0] += np.uint64(value)
        mask = np.uint64((1 << self.layout[3]) - 1)
        for place in at[0]:
            self.table[place] = (self.table[place] - content) & mask
        self.parts.append(parts)
        self.counts.append(count)
        self.values.append(value)
        return [int(place) for place in at[0]]

    def _split(self, place: int, key: int, cell: I64, content: U64) -> bool:
        """Whether a cell holds this candidate and one more key, which are then removed."""
        total = self._count(place)
        mask = np.uint64((1 << self.layout[3]) - 1)
        most = min(total - 1, *(self._count(int(other)) for other in cell[key]))
        for count in range(1, most + 1):
            rest = (self.table[place] - content[key] * np.uint64(count)) & mask
            rest_key = self._pure([int(word) for word in rest], place)
            if rest_key is None:
                continue
            for other in self._take(*rest_key):
                self._enqueue(other)
            for other in self._take([int(part) for part in self.candidates[key]], count, 0):
                self._enqueue(other)
            self._drain()
            return True
        return False

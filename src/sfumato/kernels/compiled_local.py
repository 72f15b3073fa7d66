"""The loops of local privacy compiled by numba: same signatures and results as `plain_local`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from sfumato.kernels.compiled import _fold, _multiply_high, _reduce
from sfumato.kernels.plain_local import BLOCK

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

_0, _1, _3 = np.uint64(0), np.uint64(1), np.uint64(3)
_ALL = np.uint64((1 << 64) - 1)
_PARTS = 2048  # parts that vectors are dealt into first, so that each part fits the cache
_GROUP = 63  # vectors that six planes of carries can count


@njit(inline="always")
def _cell(x8: Any, a: Any, b: Any, c: Any, width8: Any) -> Any:
    return _multiply_high(_reduce(_fold(_fold(a, x8) + b, x8) + c), width8)


@njit(nogil=True, cache=True)
def row_cells(points: U64, rows: I64, hashes: U64, width: int) -> I64:
    result = np.empty(points.size, dtype=np.int64)
    width8 = np.uint64(width) << _3
    for i in range(points.size):
        row = rows[i]
        x8 = points[i] << _3
        result[i] = _cell(x8, hashes[row, 0], hashes[row, 1], hashes[row, 2], width8)
    return result


@njit(nogil=True, cache=True)
def biased_words(digits: U8, words: U64, out: U64) -> tuple[int, int]:
    place, used = 0, 0
    while place + BLOCK <= out.size:
        a = b = c = d = _ALL  # lanes not yet decided
        w = x = y = z = _0  # ones
        taken = used
        for k in range(digits.size):
            if a | b | c | d == _0:
                break
            if taken + BLOCK > words.size:
                return place, used
            e, f, g, h = words[taken], words[taken + 1], words[taken + 2], words[taken + 3]
            taken += BLOCK
            if digits[k]:
                w, x, y, z = w | (a & ~e), x | (b & ~f), y | (c & ~g), z | (d & ~h)
                a, b, c, d = a & e, b & f, c & g, d & h
            else:
                a, b, c, d = a & ~e, b & ~f, c & ~g, d & ~h
        out[place], out[place + 1], out[place + 2], out[place + 3] = w, x, y, z
        place, used = place + BLOCK, taken
    return _last_words(digits, words, out, place, used)


@njit(nogil=True, cache=True)
def _last_words(digits: U8, words: U64, out: U64, place: int, used: int) -> tuple[int, int]:
    """The same for the few words that do not fill a block."""
    size = out.size - place
    if size == 0:
        return place, used
    taken = used
    lanes = np.full(size, _ALL)
    ones = np.zeros(size, dtype=np.uint64)
    for k in range(digits.size):
        if not lanes.any():
            break
        if taken + size > words.size:
            return place, used
        for i in range(size):
            word = words[taken + i]
            if digits[k]:
                ones[i] |= lanes[i] & ~word
                lanes[i] &= word
            else:
                lanes[i] &= ~word
        taken += size
    out[place:] = ones
    return out.size, taken


def add_bits(rows: I64, bits: U64, table: npt.NDArray[np.integer]) -> None:
    """Vectors are brought into the order of their rows in two steps, since taking them from all
    over memory costs more than adding them."""
    if rows.size >= 64 * _PARTS:
        each = -(-table.shape[0] // _PARTS)
        ends = np.cumsum(np.bincount(rows // each, minlength=_PARTS))
        dealt, dealt_rows = np.empty_like(bits), np.empty_like(rows)
        _deal(rows, bits, each, ends - np.diff(ends, prepend=0), dealt_rows, dealt)
        rows, bits = dealt_rows, dealt
    small = table.shape[0] <= 1 << 16  # sixteen bits are sorted by counting
    order = np.argsort(rows.astype(np.uint16) if small else rows, kind="stable")
    _add_bits(rows, order, bits, table)


@njit(nogil=True, cache=True)
def _deal(rows: I64, bits: U64, each: int, place: I64, out_rows: I64, out: U64) -> None:
    for i in range(rows.size):
        part = rows[i] // each
        to = place[part]
        place[part] = to + 1
        out_rows[to] = rows[i]
        source, target = bits[i], out[to]
        for word in range(source.size):
            target[word] = source[word]


@njit(nogil=True, cache=True)
def _add_bits(rows: I64, order: I64, bits: U64, table: npt.NDArray[np.integer]) -> None:
    """Vectors of one row are added up to 63 at a time: full adders over whole words keep the count
    of every lane in six planes, which are then spread over the cells."""
    words = bits.shape[1]
    ones, twos, fours = (
        np.empty(words, np.uint64),
        np.empty(words, np.uint64),
        np.empty(words, np.uint64),
    )
    eights, more, most = (
        np.empty(words, np.uint64),
        np.empty(words, np.uint64),
        np.empty(words, np.uint64),
    )
    start = 0
    while start < order.size:
        row = rows[order[start]]
        for word in range(words):
            ones[word] = twos[word] = fours[word] = eights[word] = more[word] = most[word] = _0
        stop = start
        while stop < order.size and rows[order[stop]] == row and stop - start < _GROUP:
            vector = bits[order[stop]]
            for word in range(words):
                carry = vector[word]
                held = ones[word]
                ones[word] = held ^ carry
                carry &= held
                held = twos[word]
                twos[word] = held ^ carry
                carry &= held
                held = fours[word]
                fours[word] = held ^ carry
                carry &= held
                held = eights[word]
                eights[word] = held ^ carry
                carry &= held
                held = more[word]
                more[word] = held ^ carry
                most[word] ^= carry & held
            stop += 1
        line = table[row]
        for word in range(words):
            a, b, c, d, e, f = (
                ones[word],
                twos[word],
                fours[word],
                eights[word],
                more[word],
                most[word],
            )
            for lane in range(64):
                shift = np.uint64(lane)
                line[64 * word + lane] += (
                    ((a >> shift) & _1)
                    + (((b >> shift) & _1) << _1)
                    + (((c >> shift) & _1) << np.uint64(2))
                    + (((d >> shift) & _1) << _3)
                    + (((e >> shift) & _1) << np.uint64(4))
                    + (((f >> shift) & _1) << np.uint64(5))
                )
        start = stop


@njit(nogil=True, cache=True)
def add_signs(places: I64, signs: npt.NDArray[np.int8], flat: npt.NDArray[np.integer]) -> None:
    for i in range(places.size):
        flat[places[i]] += signs[i]


@njit(nogil=True, cache=True)
def gather(points: U64, table: npt.NDArray[np.integer] | F64, hashes: U64) -> F64:
    total = np.zeros(points.size)
    width8 = np.uint64(table.shape[1]) << _3
    for row in range(table.shape[0]):
        a, b, c, line = hashes[row, 0], hashes[row, 1], hashes[row, 2], table[row]
        for i in range(points.size):
            total[i] += line[_cell(points[i] << _3, a, b, c, width8)]
    return total


@njit(nogil=True, cache=True)
def gather_hadamard(points: U64, table: npt.NDArray[np.integer], hashes: U64) -> F64:
    total = np.zeros(points.size)
    width = table.shape[1]
    width8 = np.uint64(width) << _3
    line = np.empty(width, dtype=np.int32)
    for row in range(table.shape[0]):
        a, b, c = hashes[row, 0], hashes[row, 1], hashes[row, 2]
        line[:] = table[row]
        _transform(line)
        for i in range(points.size):
            total[i] += line[_cell(points[i] << _3, a, b, c, width8)]
    return total


@njit(nogil=True, cache=True)
def collide(points: U64, others: U64, weights: F64, hashes: U64, shares: F64, width: int) -> F64:
    total = np.zeros(points.size)
    width8 = np.uint64(width) << _3
    even = weights.sum() / width
    line = np.empty(width)
    for row in range(hashes.shape[0]):
        a, b, c = hashes[row, 0], hashes[row, 1], hashes[row, 2]
        line[:] = 0.0
        for i in range(others.size):
            line[_cell(others[i] << _3, a, b, c, width8)] += weights[i]
        line -= even
        line *= shares[row]
        for i in range(points.size):
            total[i] += line[_cell(points[i] << _3, a, b, c, width8)]
    return total


@njit(nogil=True, cache=True)
def hadamard(rows: npt.NDArray[np.integer] | F64) -> None:
    for row in range(rows.shape[0]):
        _transform(rows[row])


@njit(nogil=True, cache=True)
def _transform(line: npt.NDArray[np.integer] | F64) -> None:
    size = line.size
    half = 1
    while half < size:
        for start in range(0, size, 2 * half):
            for i in range(start, start + half):
                a, b = line[i], line[i + half]
                line[i] = a + b
                line[i + half] = a - b
        half *= 2

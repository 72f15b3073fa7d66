"""The loops compiled by numba: same signatures and results as `plain`.

A product modulo 2**61 - 1 is one 64 × 64 → 128 multiplication: with x8 = 8x, the high word of
a × x8 is a·x >> 61 and the low word >> 3 is a·x mod 2**61, and their sum is congruent to a·x. Three
such steps with additions stay below 2**64 (1.75 × 2**63), so a cubic is reduced once, at the end.
Kernels are compiled on first use and cached on disk.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfumato.arrays import F64, I64, U8, U32, U64
from sfumato.kernels.compiling import kernel
from sfumato.kernels.count.plain import MIXED_PRIME, MIXER

_P = np.uint64((1 << 61) - 1)
_1, _3, _61 = np.uint64(1), np.uint64(3), np.uint64(61)
_BLOCK = 512  # items decoded together: their readings stay in the first-level cache
_WORD, _WIDE = ir.IntType(64), ir.IntType(128)


def _product(builder: Any, a: Any, b: Any) -> Any:
    return builder.mul(builder.zext(a, _WIDE), builder.zext(b, _WIDE))


def _high_word(builder: Any, product: Any) -> Any:
    return builder.trunc(builder.lshr(product, ir.Constant(_WIDE, 64)), _WORD)


@intrinsic
def _fold(context: Any, a: Any, x8: Any) -> Any:
    """A word congruent to a·x, given x8 = 8x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = _product(builder, *args)
        low = builder.lshr(builder.trunc(product, _WORD), ir.Constant(_WORD, 3))
        total = builder.add(low, _high_word(builder, product))
        # An empty assembly line keeps LLVM from half-vectorising the chain, which halves its speed.
        opaque = ir.InlineAsm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0")
        return builder.call(opaque, [total])

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _multiply_high(context: Any, a: Any, b: Any) -> Any:
    """The high word of a 128-bit product."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _high_word(builder, _product(builder, *args))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _negate_unless(context: Any, value: Any, bit: Any) -> Any:
    """value if bit is 1, -value if it is 0, by the sign bit: a branch costs four times more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flip = builder.shl(builder.xor(args[1], ir.Constant(_WORD, 1)), ir.Constant(_WORD, 63))
        flipped = builder.xor(builder.bitcast(args[0], _WORD), flip)
        return builder.bitcast(flipped, ir.DoubleType())

    return types.float64(types.float64, types.uint64), generate


@intrinsic
def _load_word(context: Any, data: Any, offset: Any) -> Any:
    """Eight bytes of a byte array as a word of the machine, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.gep(array.data, [args[1]])
        return builder.load(builder.bitcast(address, ir.PointerType(_WORD)), align=1)

    return types.uint64(data, types.int64), generate


@njit(inline="always")
def _reduce(value: Any) -> Any:
    value = (value & _P) + (value >> _61)
    return value - _P if value >= _P else value


@njit(inline="always")
def _mix(value: Any) -> Any:
    value ^= value >> np.uint64(32)
    value = (value * MIXER) & _P
    value ^= value >> np.uint64(29)
    return MIXED_PRIME if value == _P else value


@njit(inline="always")
def _cell(x8: Any, b0: Any, b1: Any, width8: Any) -> Any:
    return _multiply_high(_reduce(_fold(b0, x8) + b1), width8)


@njit(inline="always")
def _sign_word(x8: Any, s0: Any, s1: Any, s2: Any, s3: Any) -> Any:
    return _reduce(_fold(_fold(_fold(s0, x8) + s1, x8) + s2, x8) + s3)


@kernel
def fingerprint_integers(items: I64, point: np.uint64) -> U64:
    result = np.empty(items.size, dtype=np.uint64)
    x8 = point << _3
    low56 = np.uint64((1 << 56) - 1)
    for i in range(items.size):
        word = np.uint64(items[i])
        value = _fold(word & low56, x8) + (word >> np.uint64(56))
        result[i] = _mix(_reduce(_fold(value, x8) + np.uint64(8)))
    return result


@kernel
def fingerprint_bytes(data: U8, offsets: I64, point: np.uint64) -> U64:
    result = np.empty(offsets.size - 1, dtype=np.uint64)
    x8 = point << _3
    low56 = np.uint64((1 << 56) - 1)
    readable = data.size - 8  # the last offset at which a whole word may be loaded
    for i in range(result.size):
        start, stop = offsets[i], offsets[i + 1]
        value = np.uint64(0)
        position = start
        while position + 7 <= stop and position <= readable:
            value = _reduce(_fold(value, x8) + (_load_word(data, position) & low56))
            position += 7
        while position < stop:
            left = min(stop - position, 7)
            chunk = np.uint64(0)
            if position <= readable:
                chunk = _load_word(data, position) & ((_1 << np.uint64(8 * left)) - _1)
            else:
                for byte in range(left):
                    chunk |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
            value = _reduce(_fold(value, x8) + chunk)
            position += left
        result[i] = _mix(_reduce(_fold(value, x8) + np.uint64(stop - start)))
    return result


@kernel
def _encode(
    points: U64, weights: I64, weighted: bool, buckets: U64, signs: U64, bit: np.uint64, table: I64
) -> None:
    rows, width = table.shape
    width8 = np.uint64(width) << _3
    for row in range(rows):  # row by row: one row stays in the cache while the points are streamed
        b0, b1 = buckets[row, 0], buckets[row, 1]
        s0, s1, s2, s3 = signs[row, 0], signs[row, 1], signs[row, 2], signs[row, 3]
        line = table[row]
        if weighted:
            for i in range(points.size):
                x8 = points[i] << _3
                odd = (_sign_word(x8, s0, s1, s2, s3) >> bit) & _1
                line[_cell(x8, b0, b1, width8)] += (np.int64(odd << _1) - 1) * weights[i]
        else:
            for i in range(points.size):
                x8 = points[i] << _3
                odd = (_sign_word(x8, s0, s1, s2, s3) >> bit) & _1
                line[_cell(x8, b0, b1, width8)] += np.int64(odd << _1) - 1


def encode(points: U64, weights: I64 | None, buckets: U64, signs: U64, bit: int, width: int) -> I64:
    table = np.zeros((signs.shape[0], width), dtype=np.int64)
    factors = np.empty(0, dtype=np.int64) if weights is None else weights
    _encode(points, factors, weights is not None, buckets, signs, np.uint64(bit), table)
    return table


@kernel
def _hash_cells(points: U64, bucket: U64, width: int, out: U32) -> None:
    width8 = np.uint64(width) << _3
    b0, b1 = bucket[0], bucket[1]
    for i in range(points.size):
        out[i] = _cell(points[i] << _3, b0, b1, width8)


@kernel
def _hash_signs(points: U64, sign: U64, out: U64) -> None:
    s0, s1, s2, s3 = sign[0], sign[1], sign[2], sign[3]
    for i in range(points.size):
        out[i] = _sign_word(points[i] << _3, s0, s1, s2, s3)


@kernel
def _add_readings(line: F64, cells: U32, words: U64, bit: np.uint64, out: F64) -> None:
    for i in range(out.size):
        out[i] += _negate_unless(line[cells[i]], (words[i] >> bit) & _1)


@kernel
def _add_medians(block: F64, comparators: I64, result: F64) -> None:
    """Add the median of each column of `block` (rows, n) to `result`; sorts `block` on the way.

    A sorting network, one comparator over all columns at a time: no branches, so it vectorises.
    """
    for k in range(comparators.shape[0]):
        low, high = block[comparators[k, 0]], block[comparators[k, 1]]
        for i in range(result.size):
            a, b = low[i], high[i]
            low[i] = a if a < b else b
            high[i] = b if a < b else a
    rows = block.shape[0]
    if rows % 2:
        result += block[rows // 2, : result.size]
    else:
        result += (block[rows // 2 - 1, : result.size] + block[rows // 2, : result.size]) / 2


@kernel
def _decode(
    points: U64,
    tables: F64,
    buckets: U64,
    signs: U64,
    rounds: I64,
    mean: bool,
    fresh: bool,
    comparators: I64,
    result: F64,
) -> None:
    """Rounds inside rows, so that rounds with the same hash functions evaluate them once;
    `fresh` needs a round's rows together, and its rounds share nothing."""
    rows, width = tables.shape[1:]
    block = np.empty((rows, _BLOCK))
    cells = np.empty(_BLOCK, dtype=np.uint32)
    words = np.empty(_BLOCK, dtype=np.uint64)
    groups, members = (rounds.shape[0], 1) if fresh else (1, rounds.shape[0])
    for start in range(0, points.size, _BLOCK):
        part, out = points[start : start + _BLOCK], result[start : start + _BLOCK]
        for group in range(groups):
            for row in range(rows):
                line = block[row, : part.size]
                line[:] = 0.0
                bucket, sign = -1, -1
                for round in range(group, group + members):
                    if rounds[round, 0] != bucket:
                        bucket = rounds[round, 0]
                        _hash_cells(part, buckets[bucket, row], width, cells)
                    if rounds[round, 1] != sign:
                        sign = rounds[round, 1]
                        _hash_signs(part, signs[sign, row], words)
                    bit = np.uint64(rounds[round, 2])
                    _add_readings(tables[round, row], cells, words, bit, line)
                if mean:
                    out += line
            if not mean:
                _add_medians(block[:, : part.size], comparators, out)
    if mean:
        result /= rows


def decode(
    points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64, mean: bool, fresh: bool
) -> F64:
    result = np.zeros(points.size)
    comparators = sorting_network(tables.shape[1])
    _decode(points, tables, buckets, signs, rounds, mean, fresh, comparators, result)
    return result


@kernel
def _readings(points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64, result: F64) -> None:
    cells = np.empty(points.size, dtype=np.uint32)
    words = np.empty(points.size, dtype=np.uint64)
    for row in range(tables.shape[1]):
        bucket, sign = -1, -1
        for round in range(rounds.shape[0]):
            if rounds[round, 0] != bucket:
                bucket = rounds[round, 0]
                _hash_cells(points, buckets[bucket, row], tables.shape[2], cells)
            if rounds[round, 1] != sign:
                sign = rounds[round, 1]
                _hash_signs(points, signs[sign, row], words)
            bit = np.uint64(rounds[round, 2])
            _add_readings(tables[round, row], cells, words, bit, result[round, row])


def readings(points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64) -> F64:
    result = np.zeros((*tables.shape[:2], points.size))
    _readings(points, tables, buckets, signs, rounds, result)
    return result


@cache
def sorting_network(size: int) -> I64:
    """Batcher's odd-even merge sort as comparators (low, high): (count, 2)."""
    pairs = []
    p = 1
    while p < size:
        k = p
        while k >= 1:
            pairs += [
                (i + j, i + j + k)
                for j in range(k % p, size - k, 2 * k)
                for i in range(min(k, size - j - k))
                if (i + j) // (2 * p) == (i + j + k) // (2 * p)
            ]
            k //= 2
        p *= 2
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)

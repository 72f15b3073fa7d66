"""The loops of dense sketches compiled by numba: as their twins in `plain`, up to rounding.

In wide rows a piece of the vector stays in the first-level cache while every row is processed. In
each row it is cut where a chunk ends and where its rotation wraps around; in between, coordinates
and cells are contiguous and are taken 32 at a time, with the 32 signs that start there. In rows
of at most 32 cells a chunk is taken at once: chunks are added up by how far they turn, and turned
at the end. Sums are taken in float32, in one order whatever the number of threads.
"""

# mypy: disable-error-code="call-arg", no-warn-unreachable
# Numba passes an intrinsic its context itself, and mypy takes the calls that miss it for ones that
# never return.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfumato.arrays import F32, I32, U32
from sfumato.kernels.compiling import kernel
from sfumato.kernels.dense.plain import FIRST, SECOND

LANES = 32  # numbers taken at a time; rows with more cells are wide
PIECE = 4096  # coordinates processed together
_WORDS = PIECE // LANES + 2  # words of signs: a piece may start inside one, and one more is read
_STRIDE = PIECE + LANES  # from block to block: a power of two would crowd one part of the cache
_LINE = 16  # numbers in a line of the cache
_COPIES = 4  # copies of the sums of a narrow row, so that additions do not wait for each other
_FIRST, _SECOND = np.uint32(FIRST), np.uint32(SECOND)
_1, _15, _16, _31 = (np.uint32(k) for k in (1, 15, 16, 31))

_FLOAT, _WORD, _PAIR = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _BITS = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(1), LANES)


@intrinsic
def _add_32(
    context: Any, target: Any, place: Any, source: Any, start: Any, signs: Any, begin: Any
) -> Any:
    """Add 32 numbers of `source` from `start` on to those of `target` from `place` on, with the
    32 signs that begin at a bit of `signs`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature, args, 0)
        added = builder.load(_address(context, builder, signature, args, 2), align=4)
        minus = builder.bitcast(_signs_at(context, builder, signature, args, 4), _BITS)
        added = builder.select(minus, builder.fneg(added), added)
        builder.store(builder.fadd(builder.load(to, align=4), added), to, align=4)
        return context.get_dummy_value()

    kinds = (target, types.int64, source, types.int64, signs, types.int64)
    return types.void(*kinds), generate


@intrinsic
def _add_some(
    context: Any,
    target: Any,
    place: Any,
    source: Any,
    start: Any,
    signs: Any,
    begin: Any,
    count: Any,
) -> Any:
    """The same for at most 31 numbers; no others are read or written."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _FLOATS.as_pointer()
        load = _named(
            builder, "llvm.masked.load.v32f32.p0", _FLOATS, [pointer, _WORD, _BITS, _FLOATS]
        )
        store = _named(
            builder, "llvm.masked.store.v32f32.p0", ir.VoidType(), [_FLOATS, pointer, _WORD, _BITS]
        )
        there = _first_lanes(builder, args[6])
        zeros, align = ir.Constant(_FLOATS, None), _WORD(4)
        to = _address(context, builder, signature, args, 0)
        added = _address(context, builder, signature, args, 2)
        added = builder.call(load, [added, align, there, zeros])
        minus = builder.bitcast(_signs_at(context, builder, signature, args, 4), _BITS)
        added = builder.select(minus, builder.fneg(added), added)
        total = builder.fadd(builder.call(load, [to, align, there, zeros]), added)
        builder.call(store, [total, to, align, there])
        return context.get_dummy_value()

    kinds = (target, types.int64, source, types.int64, signs, types.int64, types.int64)
    return types.void(*kinds), generate


@intrinsic
def _add_first(
    context: Any,
    target: Any,
    place: Any,
    source: Any,
    start: Any,
    signs: Any,
    begin: Any,
    count: Any,
) -> Any:
    """The same for the first `count` of 32 numbers, all of which exist: zeros are added for the
    others. No masked store is needed, so that the next addition need not wait."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature, args, 0)
        added = builder.load(_address(context, builder, signature, args, 2), align=4)
        minus = builder.bitcast(_signs_at(context, builder, signature, args, 4), _BITS)
        added = builder.select(minus, builder.fneg(added), added)
        zeros = ir.Constant(_FLOATS, None)
        added = builder.select(_first_lanes(builder, args[6]), added, zeros)
        builder.store(builder.fadd(builder.load(to, align=4), added), to, align=4)
        return context.get_dummy_value()

    kinds = (target, types.int64, source, types.int64, signs, types.int64, types.int64)
    return types.void(*kinds), generate


@intrinsic
def _order(context: Any, sums: Any, place: Any, same: Any, other: Any) -> Any:
    """Swap each of the 32 numbers at `place` with its counterpart at `other` if it is larger;
    `same` is `sums` again."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        here = _address(context, builder, signature, args, 0)
        there = _address(context, builder, signature, args, 2)
        one, two = builder.load(here, align=4), builder.load(there, align=4)
        less = builder.fcmp_ordered("<", one, two)
        builder.store(builder.select(less, one, two), here, align=4)
        builder.store(builder.select(less, two, one), there, align=4)
        return context.get_dummy_value()

    return types.void(sums, types.int64, same, types.int64), generate


def _address(context: Any, builder: Any, signature: Any, args: Any, which: int) -> Any:
    """The address of 32 numbers of a flat array: argument `which`, from the offset after it."""
    array = context.make_array(signature.args[which])(context, builder, args[which])
    return builder.bitcast(builder.gep(array.data, [args[which + 1]]), _FLOATS.as_pointer())


def _signs_at(context: Any, builder: Any, signature: Any, args: Any, which: int) -> Any:
    """32 bits of an array of words: argument `which`, from the bit in the argument after it."""
    array = context.make_array(signature.args[which])(context, builder, args[which])
    place = builder.gep(array.data, [builder.lshr(args[which + 1], _PAIR(5))])
    pair = builder.load(builder.bitcast(place, _PAIR.as_pointer()), align=4)
    return builder.trunc(builder.lshr(pair, builder.and_(args[which + 1], _PAIR(31))), _WORD)


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first lanes, at most 32."""
    return builder.bitcast(
        builder.trunc(builder.sub(builder.shl(_PAIR(1), count), _PAIR(1)), _WORD), _BITS
    )


def _named(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    existing = builder.module.globals.get(name)
    return existing or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


@njit(inline="always")
def _sign_word(number: Any, first: Any, second: Any) -> Any:
    word = np.uint32(number) ^ first
    word = np.uint32((word ^ (word >> _16)) * _FIRST)  # numba works in 64 bits
    word = np.uint32((word ^ (word >> _15) ^ second) * _SECOND)
    return np.uint32(word ^ (word >> _16))


@njit(inline="always")
def _signed(value: Any, word: Any, place: Any) -> Any:
    return -value if (word >> (np.uint32(place) & _31)) & _1 else value


@kernel
def encode_wide(
    table: F32, vector: F32, rotations: I32, sign_keys: U32, width: int, first: int, last: int
) -> None:
    """Add a vector to the cells from `first` to `last` of a flat table, row after row."""
    signs = np.empty(_WORDS, dtype=np.uint32)
    for start in range(0, vector.size, PIECE):
        stop = min(start + PIECE, vector.size)
        for row in range(first // width, (last - 1) // width + 1):
            key, other = sign_keys[row, 0], sign_keys[row, 1]
            for k in range(_WORDS):
                signs[k] = _sign_word((start >> 5) + k, key, other)
            base = row * width
            low, high = max(first - base, 0), min(last - base, width)
            chunk, i = start // width, start
            while i < stop:
                end = (chunk + 1) * width
                cell = i - chunk * width + rotations[row, chunk]
                if cell >= width:
                    cell -= width
                following = min(stop, min(end, i + width - cell))
                if following == end:
                    chunk += 1
                if cell < low:
                    skipped = min(low - cell, following - i)
                    i += skipped
                    cell += skipped
                till = min(following, i + high - cell)
                to = base + cell - i
                while i + LANES <= till:
                    _add_32(table, to + i, vector, i, signs, i - start)
                    i += LANES
                if i < till:
                    _add_some(table, to + i, vector, i, signs, i - start, till - i)
                i = following


@kernel
def encode_narrow(
    table: F32, vector: F32, rotations: I32, sign_keys: U32, width: int, first: int, last: int
) -> None:
    """The same for whole rows from `first` to `last`, of at most 32 cells."""
    signs = np.empty(vector.size // LANES + 2, dtype=np.uint32)
    sums = np.empty(_COPIES * width * LANES, dtype=np.float32)
    totals = np.empty(width, dtype=np.float64)
    chunks = max(vector.size - LANES, 0) // width  # with 32 coordinates to read
    for row in range(first, last):
        key, other = sign_keys[row, 0], sign_keys[row, 1]
        for k in range(signs.size):
            signs[k] = _sign_word(k, key, other)
        sums[:] = 0
        for chunk in range(chunks):
            turn = (chunk % _COPIES * width + rotations[row, chunk]) * LANES
            _add_first(sums, turn, vector, chunk * width, signs, chunk * width, width)
        totals[:] = 0
        for group in range(_COPIES * width):
            for place in range(width):
                totals[(place + group) % width] += sums[group * LANES + place]
        for i in range(chunks * width, vector.size):
            cell = (i + rotations[row, i // width]) % width
            totals[cell] += _signed(vector[i], signs[i >> 5], i)
        for cell in range(width):
            table[row * width + cell] += np.float32(totals[cell])


@kernel
def decode_wide(
    vector: F32,
    table: F32,
    rotations: I32,
    sign_keys: U32,
    width: int,
    blocks: int,
    scale: float,
    first: int,
    last: int,
) -> None:
    """Fill in the coordinates from `first` to `last`, both multiples of PIECE unless at the end."""
    signs = np.empty(_WORDS, dtype=np.uint32)
    sums = np.empty(blocks * _STRIDE + _LINE, dtype=np.float32)
    sums = sums[-(sums.ctypes.data >> 2) % _LINE :]  # from the start of a line
    rows = rotations.shape[0] // blocks
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        sums[:] = 0
        for row in range(rotations.shape[0]):
            key, other = sign_keys[row, 0], sign_keys[row, 1]
            for k in range(_WORDS):
                signs[k] = _sign_word((start >> 5) + k, key, other)
            to = row // rows * _STRIDE - start
            chunk, i = start // width, start
            while i < stop:
                end = (chunk + 1) * width
                cell = i - chunk * width + rotations[row, chunk]
                if cell >= width:
                    cell -= width
                till = min(stop, min(end, i + width - cell))
                if till == end:
                    chunk += 1
                at = row * width + cell - i
                while i + LANES <= till:
                    _add_32(sums, to + i, table, at + i, signs, i - start)
                    i += LANES
                if i < till:
                    _add_some(sums, to + i, table, at + i, signs, i - start, till - i)
                i = till
        _write_medians(vector, start, stop, sums, blocks, scale)


@kernel
def decode_narrow(
    vector: F32,
    table: F32,
    rotations: I32,
    sign_keys: U32,
    width: int,
    blocks: int,
    scale: float,
    first: int,
    last: int,
) -> None:
    """The same for rows of at most 32 cells, and from chunk `first` to chunk `last`."""
    count = rotations.shape[0]
    rows, stride = count // blocks, 3 * LANES
    ringed = np.zeros(
        count * stride, dtype=np.float32
    )  # each row twice, so that no rotation wraps around
    for row in range(count):
        for cell in range(2 * width):
            ringed[row * stride + cell] = table[row * width + cell % width]
    chunks = PIECE // width
    signs = np.empty(count * _WORDS, dtype=np.uint32)
    sums = np.empty(blocks * _STRIDE + _LINE, dtype=np.float32)
    sums = sums[-(sums.ctypes.data >> 2) % _LINE :]  # from the start of a line
    total = np.empty(LANES, dtype=np.float32)
    for piece in range(first, last, chunks):
        start = piece * width
        word = start >> 5
        for row in range(count):
            for k in range(_WORDS):
                signs[row * _WORDS + k] = _sign_word(word + k, sign_keys[row, 0], sign_keys[row, 1])
        stop = min(piece + chunks, last)
        for block in range(blocks):
            for chunk in range(piece, stop):
                total[:] = 0
                for row in range(block * rows, (block + 1) * rows):
                    begin = row * _WORDS * LANES + chunk * width - word * LANES
                    turn = row * stride + rotations[row, chunk]
                    _add_32(total, 0, ringed, turn, signs, begin)
                to = block * _STRIDE + (chunk - piece) * width
                for k in range(LANES):  # the next chunk overwrites the excess
                    sums[to + k] = total[k]
        end = min(stop * width, vector.size)
        _write_medians(vector, start, end, sums, blocks, scale)


@kernel
def _write_medians(
    vector: F32, start: int, stop: int, sums: F32, blocks: int, scale: float
) -> None:
    """Write the median over blocks of their sums into the vector; overwrites `sums`."""
    count = stop - start
    for begin in range(0, count, 2 * LANES):  # in pairs, so that neither waits for its last step
        for last in range(blocks - 1, (blocks - 1) // 2 - 1, -1):
            for block in range(last):  # the largest moves up
                here = block * _STRIDE + begin
                _order(sums, here, sums, here + _STRIDE)
                _order(sums, here + LANES, sums, here + LANES + _STRIDE)
    low, high = (blocks - 1) // 2 * _STRIDE, blocks // 2 * _STRIDE
    factor = np.float32(scale)
    if low == high:
        for k in range(count):
            vector[start + k] = sums[low + k] * factor
    else:
        half = np.float32(scale / 2)
        for k in range(count):
            vector[start + k] = (sums[low + k] + sums[high + k]) * half

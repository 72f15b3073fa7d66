"""The loops of dense sketches in numpy: used on devices, and to test the compiled twins.

A row of a table is a count sketch of a real vector, (length,), in `width` cells. `rotations` is
(rows, chunks) of int32 and `sign_keys` is (rows, 2) of uint32; `sketch.dense` says what they mean.
Results are multiplied by `scale`. Sums are taken in float64 and returned as float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sfumato.arrays import F32, F64, I32, I64, U32, U64

FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # odd multipliers of a mixing function of 32 bits
GOLDEN = 0x9E3779B97F4A7C15  # the odd step of a counter of 64 bits
TOGETHER = 1 << 18  # hashes computed at once
NARROW = 256  # cells of a row below which a chunk is too short for a slice of its own

_32 = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


def encode(vector: F32, rotations: I32, sign_keys: U32, width: int, scale: float) -> F32:
    """The table of a vector, (rows, width)."""
    table = np.empty((len(rotations), width), dtype=np.float32)
    for row, (turns, keys) in enumerate(zip(rotations, sign_keys, strict=True)):
        signed = _signed(vector, keys)
        if width < NARROW:
            cells = rotated_cells(turns, vector.size, width)
            total = np.asarray(np.bincount(cells, signed, width), dtype=np.float64)
        else:
            total = np.zeros(width)
            for part, cell in _slices(turns, vector.size, width):
                total[cell] += signed[part]
        table[row] = total * scale
    return table


def decode(
    table: F32, rotations: I32, sign_keys: U32, length: int, blocks: int, scale: float
) -> F32:
    """The adjoint of `encode` for each block of rows, and the median over blocks, (length,)."""
    rows, width = len(table) // blocks, table.shape[1]
    sums = np.zeros((blocks, length), dtype=np.float64)
    for row, (turns, keys) in enumerate(zip(rotations, sign_keys, strict=True)):
        if width < NARROW:
            cells_read = table[row, rotated_cells(turns, length, width)]
        else:
            cells_read = np.empty(length, dtype=np.float32)
            for part, cell in _slices(turns, length, width):
                cells_read[part] = table[row, cell]
        sums[row // rows] += _signed(cells_read, keys)
    return _median(sums, scale)


def encode_hashed(vector: F32, keys: U64, width: int, scale: float) -> F32:
    """The same if every coordinate is hashed to a cell; `keys` is (rows,)."""
    table = np.empty((keys.size, width), dtype=np.float32)
    for rows in _groups(0, keys.size, vector.size):
        cells, signs = hashed_cells(keys[rows], vector.size, width)
        cells += width * np.arange(len(cells))[:, None]
        total = np.bincount(cells.reshape(-1), (vector * signs).reshape(-1), width * len(cells))
        table[rows] = (total * scale).reshape(-1, width)
    return table


def decode_hashed(table: F32, keys: U64, length: int, blocks: int, scale: float) -> F32:
    each = len(table) // blocks
    sums = np.zeros((blocks, length), dtype=np.float64)
    for block in range(blocks):
        for rows in _groups(block * each, (block + 1) * each, length):
            cells, signs = hashed_cells(keys[rows], length, table.shape[1])
            read = np.take_along_axis(table[rows], cells, axis=1) * signs
            sums[block] += read.sum(axis=0, dtype=np.float64)
    return _median(sums, scale)


def rotations_of(keys: U64, chunks: int, width: int) -> I32:
    """How far each row turns each chunk, (rows, chunks): uniform up to a relative 2**-33."""
    steps = np.arange(1, chunks + 1, dtype=np.uint64)
    return np.stack([_below(_scattered(key, steps), width).astype(np.int32) for key in keys])


def rotated_cells(turns: I32, length: int, width: int) -> I64:
    """The cell of each coordinate in a row, (length,)."""
    places = np.arange(length, dtype=np.int64)
    return (places % width + turns[places // width]) % width


def hashed_cells(keys: U64, length: int, width: int) -> tuple[I64, F32]:
    """The cell and the sign of each coordinate in rows, (rows, length), from the two ends of a
    word."""
    words = _scattered(keys[:, None], np.arange(1, length + 1, dtype=np.uint64))
    signs = 1 - 2 * (words & np.uint64(1)).astype(np.float32)
    return _below(words, width).astype(np.int64), signs


def sign_words(keys: U32, count: int) -> U32:
    """The signs of 32 coordinates in each word: a set bit means minus.

    One to one for every key, and uniform over the second: the bits of a word are independent.
    """
    words = np.arange(count, dtype=np.uint32) ^ keys[0]
    words ^= words >> np.uint32(16)
    words *= np.uint32(FIRST)
    words ^= words >> np.uint32(15)
    words ^= keys[1]
    words *= np.uint32(SECOND)
    words ^= words >> np.uint32(16)
    return np.asarray(words, dtype=np.uint32)


def _signed(vector: F32, keys: U32) -> F32:
    """A copy of the vector in which a row's signs are flipped."""
    words = sign_words(keys, -(-vector.size // 32)).astype("<u4", copy=False)
    bits = np.unpackbits(words.view(np.uint8), count=vector.size, bitorder="little")
    return (vector.view(np.uint32) ^ (bits.astype(np.uint32) << np.uint32(31))).view(np.float32)


def _slices(turns: I32, length: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of a vector and their cells, in order: one or two per chunk."""
    for chunk, turn in enumerate(turns.tolist()):
        start, stop = chunk * width, min((chunk + 1) * width, length)
        split = min(start + width - turn, stop)
        yield slice(start, split), slice(turn, turn + split - start)
        if split < stop:
            yield slice(split, stop), slice(0, stop - split)


def _groups(first: int, last: int, length: int) -> Iterator[slice]:
    """Rows that are processed together, so that short vectors take few steps."""
    step = max(1, TOGETHER // length)
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def _median(sums: F64, scale: float) -> F32:
    """The median over blocks of their sums."""
    middle = sums[0] if len(sums) == 1 else np.median(sums, axis=0)
    return np.asarray(middle * scale, dtype=np.float32)


def _scattered(key: np.uint64 | U64, steps: U64) -> U64:
    """A word for each step of a counter that starts at the key (SplitMix64)."""
    words = key + steps * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)), dtype=np.uint64)


def _below(words: U64, width: int) -> U64:
    """word × width >> 64, for a width of at most 2**31."""
    wide = np.uint64(width)
    return ((words >> _32) * wide + (((words & _LOW) * wide) >> _32)) >> _32

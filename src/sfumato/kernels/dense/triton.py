"""The loops of dense sketches on a GPU, by Triton: twins of `plain`, equal except for the order
in which floats are added.

They are limited by integer arithmetic, so the words of signs, one bit per coordinate and row, are
computed first and read back. After that a program streams: to encode, it owns cells of one row and
sums their coordinates, chunk after chunk; to decode, it owns coordinates of one chunk and sums
their readings, row after row.
"""

# ruff: noqa: N803  # Triton writes constants in capitals
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sign_words(words, keys, blocks, TILE: tl.constexpr):
    """The signs of 32 coordinates each, (rows, blocks)."""
    row = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    h = block.to(tl.uint32) ^ tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (h >> 15) ^ tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    h = h * 0x846CA68B
    h = h ^ (h >> 16)
    tl.store(
        words + row.to(tl.int64) * blocks + block, h.to(tl.int32, bitcast=True), block < blocks
    )


@triton.jit
def _signed(value, word, i):
    """The value, negated where bit i mod 32 of the word is set."""
    flip = (word << ((i & 31) ^ 31)) & -0x80000000
    return (value.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    table, vector, rotations, words, length, width, chunks, blocks, scale, tiles, count,
    TILE: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """A tile of cells of one row, over `count` chunks of one vector."""
    vector += tl.program_id(2).to(tl.int64) * length
    table += tl.program_id(2).to(tl.int64) * (tl.num_programs(0) // tiles) * width
    row = tl.program_id(0) // tiles
    cell = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = cell < width
    first = tl.program_id(1) * count
    last = tl.minimum(first + count, chunks)
    whole = tl.minimum(last, length // width)  # the last chunk may be short
    words += row.to(tl.int64) * blocks
    rotations += row * chunks
    total = tl.zeros((TILE,), dtype=tl.float32)
    for q in range(first, whole):
        place = (cell - tl.load(rotations + q)).to(tl.uint32)  # below zero becomes very large
        i = tl.minimum(place, place + width).to(tl.int32) + q * width
        value = tl.load(vector + i, mask=inside, other=0.0)
        total += _signed(value, tl.load(words + (i >> 5), mask=inside, other=0), i)
    for q in range(tl.maximum(first, whole), last):
        place = (cell - tl.load(rotations + q)).to(tl.uint32)  # below zero becomes very large
        i = tl.minimum(place, place + width).to(tl.int32) + q * width
        valid = inside & (i < length)
        value = tl.load(vector + i, mask=valid, other=0.0)
        total += _signed(value, tl.load(words + (i >> 5), mask=valid, other=0), i)
    target = table + row.to(tl.int64) * width + cell
    if ATOMIC:
        tl.atomic_add(target, total * scale, mask=inside, sem="relaxed")
    else:
        tl.store(target, total * scale, mask=inside)


@triton.jit
def decode(
    vector, table, rotations, words, length, width, chunks, blocks, scale, tiles,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of coordinates of one chunk, over all rows."""
    q = tl.program_id(0) // tiles
    place = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    i = q * width + place
    inside = (place < width) & (i < length)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for row in tl.static_range(ROWS):
        cell = (place + tl.load(rotations + row * chunks + q)).to(tl.uint32)
        cell = tl.minimum(cell, cell - width)
        value = tl.load(table + row * width + cell, mask=inside, other=0.0)
        word = tl.load(words + row * blocks + (i >> 5), mask=inside, other=0)
        total += _signed(value, word, i)
    tl.store(vector + i, total * scale, mask=inside)


@triton.jit
def decode_narrow(
    vector, table, rotations, words, length, width, chunks, blocks, scale,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of coordinates of any chunks, over all rows: for chunks shorter than a tile."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < length
    q = i // width
    place = i - q * width
    total = tl.zeros((TILE,), dtype=tl.float32)
    for row in tl.static_range(ROWS):
        cell = (place + tl.load(rotations + row * chunks + q, mask=inside, other=0)).to(tl.uint32)
        cell = tl.minimum(cell, cell - width)
        value = tl.load(table + row * width + cell, mask=inside, other=0.0)
        word = tl.load(words + row * blocks + (i >> 5), mask=inside, other=0)
        total += _signed(value, word, i)
    tl.store(vector + i, total * scale, mask=inside)

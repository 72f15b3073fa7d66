"""The loops of local privacy in numpy: used on devices, and equal to the compiled twins."""

from __future__ import annotations

import numpy as np

from sfumato.arrays import F64, I64, U8, U32, U64, Whole
from sfumato.kernels.count.plain import add_mod, cells, evaluate, multiply_mod

BLOCK = 4  # words whose lanes are decided together


def row_cells(points: U64, rows: I64, hashes: U64, width: int) -> I64:
    coefficients = hashes[rows]
    value = coefficients[:, 0]
    for degree in (1, 2):
        value = add_mod(multiply_mod(value, points), coefficients[:, degree])
    return cells(value, width)


def hadamard_records(
    points: U64, places: I64, flips: U64, hashes: U64, width: int, out: U8
) -> None:
    cells = row_cells(points, places // width, hashes, width)
    coins = np.unpackbits(flips.astype("<u8").view(np.uint8), bitorder="little")[: points.size]
    minus = (np.bitwise_count(cells & places) & 1) ^ coins
    codes = (2 * places + minus).astype("<i8")
    out[:] = codes.view(np.uint8).reshape(-1, 8)[:, : out.shape[1]]


def biased_words(digits: U8, words: U64, out: U64) -> tuple[int, int]:
    place, used = 0, 0
    while place < out.size:
        size = min(BLOCK, out.size - place)
        every = (1 << 64 * size) - 1
        undecided, ones, position = every, 0, used
        for digit in digits.tolist():
            if not undecided:
                break
            if position + size > words.size:
                return place, used
            random = int.from_bytes(
                words[position : position + size].astype("<u8").tobytes(), "little"
            )
            position += size
            if digit:
                ones |= undecided & ~random  # these lanes are below the probability
                undecided &= random
            else:
                undecided &= ~random  # the removed lanes are above it
        out[place : place + size] = np.frombuffer(ones.to_bytes(8 * size, "little"), dtype="<u8")
        place, used = place + size, position
    return place, used


def deposit(bits: U64, words: U64) -> None:
    places = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")
    values = np.unpackbits(bits.astype("<u8").view(np.uint8), bitorder="little")
    at = np.flatnonzero(places)
    places[at] = values[: at.size]
    words[:] = np.packbits(places, bitorder="little").view("<u8")


def count_rows(records: U8, row_bytes: int, counts: I64) -> U32:
    rows = np.zeros(records.shape[0], dtype=np.uint32)
    for byte in range(row_bytes):
        rows |= records[:, byte].astype(np.uint32) << np.uint32(8 * byte)
    counts += np.bincount(rows[rows < counts.size], minlength=counts.size)
    return rows


def add_bits(rows: Whole, records: U8, skip: int, table: Whole) -> None:
    spread = np.unpackbits(records[:, skip:], axis=1, bitorder="little")
    np.add.at(table, rows, spread[:, : table.shape[1]].astype(table.dtype))


def add_signs(codes: Whole, flat: Whole) -> None:
    signs = 1 - 2 * (codes & 1).astype(flat.dtype)
    np.add.at(flat, codes >> 1, signs)


def gather(points: U64, table: Whole | F64, hashes: U64) -> F64:
    total = np.zeros(points.size)
    for row, line in zip(hashes, table, strict=True):
        total += line[cells(evaluate(row, points), line.size)]
    return total


def gather_hadamard(points: U64, table: Whole, hashes: U64) -> F64:
    total = np.zeros(points.size)
    for row, line in zip(hashes, table, strict=True):
        transformed = line[None].astype(np.int64)
        hadamard(transformed)
        total += transformed[0, cells(evaluate(row, points), line.size)]
    return total


def collide(points: U64, others: U64, weights: F64, hashes: U64, shares: F64, width: int) -> F64:
    total = np.zeros(points.size)
    even = weights.sum() / width
    for row, share in zip(hashes, shares, strict=True):
        line = np.bincount(cells(evaluate(row, others), width), weights, minlength=width) - even
        total += share * line[cells(evaluate(row, points), width)]
    return total


def hadamard(rows: Whole | F64) -> None:
    size = rows.shape[1]
    half = 1
    while half < size:
        pairs = rows.reshape(rows.shape[0], -1, 2, half)
        first, second = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = first + second, first - second
        half *= 2

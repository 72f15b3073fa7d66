"""The loops in numpy: what a device runs, and what the compiled twins are tested against."""

from __future__ import annotations

import numpy as np

from sfumato.arrays import F64, I64, U8, U64

PRIME = (1 << 61) - 1
CHUNK_BYTES = 7  # any seven bytes are below the prime

MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd: 2**64 over the golden ratio
MIXED_PRIME = np.uint64(0x1016B07DE0B583EB)  # the image of p

_P = np.uint64(PRIME)
_LOW29, _LOW32 = np.uint64((1 << 29) - 1), np.uint64((1 << 32) - 1)
_3, _29, _32, _61 = np.uint64(3), np.uint64(29), np.uint64(32), np.uint64(61)


def multiply_mod(a: U64 | np.uint64, b: U64 | np.uint64) -> U64:
    """a × b mod 2**61 - 1 from 32-bit halves, for a and b below the prime."""
    a_high, a_low = a >> _32, a & _LOW32
    b_high, b_low = b >> _32, b & _LOW32
    middle = a_high * b_low + a_low * b_high  # below 2**62: no overflow
    low = a_low * b_low
    # 2**64 = 8 and 2**61 = 1 here; middle × 2**32 = (middle >> 29) + (its low 29 bits << 32)
    total = (a_high * b_high << _3) + (middle >> _29) + ((middle & _LOW29) << _32)
    total = (total & _P) + (total >> _61) + (low & _P) + (low >> _61)
    total = (total & _P) + (total >> _61)
    reduced: U64 = np.where(total >= _P, total - _P, total)
    return reduced


def add_mod(a: U64, b: U64 | np.uint64) -> U64:
    """a + b mod 2**61 - 1, for a and b below the prime."""
    total = a + b
    return np.where(total >= _P, total - _P, total)


def evaluate(coefficients: U64, points: U64) -> U64:
    """A polynomial, highest degree first, at every point."""
    value = np.full(points.shape, coefficients[0], dtype=np.uint64)
    for coefficient in coefficients[1:]:
        value = add_mod(multiply_mod(value, points), coefficient)
    return value


def cells(values: U64, width: int) -> I64:
    """value × width >> 61: cells 0 .. width - 1, each for p/width values, give or take two."""
    high, low = (values >> _32) * np.uint64(width), (values & _LOW32) * np.uint64(width)
    return ((high + (low >> _32)) >> _29).astype(np.int64)


def sign_of(values: U64, bit: int) -> I64:
    """+1 where the bit is set, -1 where it is not."""
    return ((values >> np.uint64(bit) & np.uint64(1)).astype(np.int64) << 1) - 1


def mix(values: U64) -> U64:
    """Scatter field elements, one to one; p, which is not an element, is mapped once more.

    A fingerprint is linear in an item's digits, so that items in sequence ("id 1", "id 2", …) would
    reach the cells of a pairwise independent hash at even steps and collide in clusters.
    """
    values = values ^ (values >> _32)
    values = (values * MIXER) & _P
    values = values ^ (values >> _29)
    return np.where(values == _P, MIXED_PRIME, values)


def fingerprint_integers(items: I64, point: np.uint64) -> U64:
    words = items.astype("<i8").view("<u8").astype(np.uint64)
    value = add_mod(multiply_mod(words & np.uint64((1 << 56) - 1), point), words >> np.uint64(56))
    return mix(add_mod(multiply_mod(value, point), np.uint64(8)))


def fingerprint_bytes(data: U8, offsets: I64, point: np.uint64) -> U64:
    """One step per chunk position, over the items that reach it."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    value = np.zeros(lengths.size, dtype=np.uint64)
    active = np.flatnonzero(lengths > 0)
    position = 0
    while active.size:
        chunk = np.zeros(active.size, dtype=np.uint64)
        for byte in range(CHUNK_BYTES):
            inside = position + byte < lengths[active]
            index = np.where(inside, starts[active] + position + byte, 0)
            digit = np.where(inside, data[index], 0).astype(np.uint64)
            chunk |= digit << np.uint64(8 * byte)
        value[active] = add_mod(multiply_mod(value[active], point), chunk)
        position += CHUNK_BYTES
        active = active[lengths[active] > position]
    return mix(add_mod(multiply_mod(value, point), lengths.astype(np.uint64)))


def encode(points: U64, weights: I64 | None, buckets: U64, signs: U64, bit: int, width: int) -> I64:
    rows = signs.shape[0]
    table = np.zeros((rows, width), dtype=np.int64)
    for row in range(rows):
        value = sign_of(evaluate(signs[row], points), bit)
        if weights is not None:
            value *= weights
        np.add.at(table[row], cells(evaluate(buckets[row], points), width), value)
    return table


def readings(points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64) -> F64:
    rows, width = tables.shape[1:]
    result = np.empty((rounds.shape[0], rows, points.size))
    for round, (bucket, sign, bit) in enumerate(rounds):
        for row in range(rows):
            cell = cells(evaluate(buckets[bucket, row], points), width)
            plus = sign_of(evaluate(signs[sign, row], points), bit)
            result[round, row] = tables[round, row, cell] * plus
    return result


def decode(
    points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64, mean: bool, fresh: bool
) -> F64:
    result = np.zeros(points.size)
    if points.size == 0:
        return result
    every = readings(points, tables, buckets, signs, rounds)
    # Sums run in the order of the compiled twin, so that floats agree to the last bit.
    groups = list(every) if fresh else [sum(every[1:], start=every[0])]
    for group in groups:
        if mean:
            for line in group:
                result += line
        else:
            result += np.median(group, axis=0)
    return result / tables.shape[1] if mean else result

"""The loops of local privacy, compiled and in numpy: equal bit for bit, and to their definition.

Each loop is written out once more here, slowly: lanes one by one, hash functions in
Python's whole numbers, Hadamard's matrix in full.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import linalg

from checks import SEED, assert_binomial, assert_chi_square
from sfumato import hashing, kernels
from sfumato.kernels import local
from sfumato.kernels.count import plain
from sfumato.kernels.local import compiled as compiled_local
from sfumato.kernels.local import plain as plain_local

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Whole = npt.NDArray[np.integer]

PRIME = plain.PRIME
TWINS: list[Any] = [compiled_local, plain_local]
EDGES = np.array([0, 1, 2**32 - 1, 2**32, 2**60, PRIME - 2, PRIME - 1], dtype=np.uint64)
UNTOUCHED = np.uint64(0x0123456789ABCDEF)


def elements(rng: np.random.Generator, *shape: int) -> U64:
    """Field elements, a tenth of them at the edges where carries and folds go wrong."""
    values = rng.integers(0, PRIME, shape, dtype=np.uint64)
    return np.where(rng.random(shape) < 0.1, rng.choice(EDGES, shape), values)


def all_words(rng: np.random.Generator, *shape: int) -> U64:
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def same(first: npt.NDArray[np.generic], second: npt.NDArray[np.generic]) -> bool:
    """Equal to the last bit, type and shape too; −0.0 is not 0.0."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


def cell(point: int, row: U64, width: int) -> int:
    """What `hashing` says a cell is, in whole numbers."""
    a, b, c = (int(coefficient) for coefficient in row)
    return ((a * point * point + b * point + c) % PRIME) * width >> 61


# Biased words


def digits_of(probability: Fraction, count: int = 256) -> U8:
    scaled = int(probability * 2**count)
    return np.array([scaled >> (count - 1 - k) & 1 for k in range(count)], dtype=np.uint8)


PROBABILITIES = {
    "a half": digits_of(Fraction(1, 2)),
    "a third": digits_of(Fraction(1, 3)),
    "a ninth": digits_of(Fraction(1, 9)),
    "nearly never": digits_of(Fraction(1, 2**40)),
    "nearly always": digits_of(1 - Fraction(1, 2**40)),
    "never": np.zeros(256, dtype=np.uint8),
    "all ones": np.ones(256, dtype=np.uint8),
    "three digits": np.array([1, 0, 1], dtype=np.uint8),
}


def slow_biased_words(digits: U8, words: U64, size: int) -> tuple[list[int], int, int]:
    """Lane by lane: 1 if the lane's number is below the probability; (out, done, used)."""
    out: list[int] = []
    used = 0
    while len(out) < size:
        block = min(plain_local.BLOCK, size - len(out))
        open_lanes = {(word, lane) for word in range(block) for lane in range(64)}
        ones = [0] * block
        position = used
        for digit in digits.tolist():
            if not open_lanes:
                break
            if position + block > words.size:
                return out, len(out), used
            for word, lane in list(open_lanes):
                bit = int(words[position + word]) >> lane & 1
                if bit != digit:
                    open_lanes.discard((word, lane))
                    ones[word] |= digit << lane
            position += block
        out += ones
        used = position
    return out, len(out), used


@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 11, 64])
def test_biased_words_are_the_same(name: str, size: int) -> None:
    """Whatever the number of random words: none, too few, just enough, too many."""
    rng = np.random.default_rng([SEED, size])
    digits = PROBABILITIES[name]
    words = all_words(rng, 300 * max(size, 1))
    full = compiled_local.biased_words(digits, words, np.empty(size, dtype=np.uint64))
    assert full[0] == size
    some = {0, 1, 3, 4, 5, 37, *range(max(full[1] - 9, 0), full[1] + 10)}
    for count in sorted(some):
        results = []
        for twin in TWINS:
            out = np.full(size, UNTOUCHED)
            results.append((*twin.biased_words(digits, words[:count], out), out.tobytes()))
        assert results[0] == results[1], f"{count} words for {size}"
        assert (results[0][0] == size) == (count >= full[1])


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize("size", [1, 3, 4, 6, 8])
def test_a_lane_is_one_when_its_number_is_below_the_probability(
    twin: Any, name: str, size: int
) -> None:
    rng = np.random.default_rng([SEED, size])
    digits, words = PROBABILITIES[name], all_words(rng, 300 * size)
    for count in (words.size, 15 * size, 7 * size + 1):
        out = np.full(size, UNTOUCHED)
        done, used = twin.biased_words(digits, words[:count], out)
        slow, slow_done, slow_used = slow_biased_words(digits, words[:count], size)
        assert (done, used) == (slow_done, slow_used)
        assert out[:done].tolist() == slow
        assert (out[done:] == UNTOUCHED).all()


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_every_number_of_three_digits_is_compared_exactly(twin: Any, size: int) -> None:
    """All eight numbers once in eight lanes: as many ones as the probability has eighths."""
    for digits in product((0, 1), repeat=3):
        words = np.zeros(3 * size, dtype=np.uint64)
        for lane in range(8):  # lane k holds the number k, most significant digit first
            for place in range(3):
                if lane >> (2 - place) & 1:
                    words[place * size : (place + 1) * size] |= np.uint64(1 << lane)
        if size == 5:  # a block of four and one of one: rearranged for each
            words = np.r_[np.repeat(words[[0, 5, 10]], 4), words[[0, 5, 10]]]
        out = np.full(size, UNTOUCHED)
        assert twin.biased_words(np.array(digits, dtype=np.uint8), words, out) == (size, 3 * size)
        eighths = 4 * digits[0] + 2 * digits[1] + digits[2]
        others = 64 - 8 if eighths else 0  # the lanes that hold zeros throughout
        assert [word.bit_count() for word in out.tolist()] == [eighths + others] * size
        assert [word & 0xFF for word in out.tolist()] == [(1 << eighths) - 1] * size


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
def test_a_number_that_equals_the_probability_is_not_below_it(twin: Any) -> None:
    digits = PROBABILITIES["a third"]
    words = np.where(digits.astype(np.bool_), ~np.uint64(0), np.uint64(0)).repeat(4)
    out = np.full(4, UNTOUCHED)
    assert twin.biased_words(digits, words, out) == (4, 4 * 256)
    assert not out.any()


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
@pytest.mark.parametrize("size", [1, 4, 9, 30])
def test_words_that_were_not_used_up_go_on_where_it_stopped(twin: Any, size: int) -> None:
    """Give the words piece by piece, unused ones first: the bits are those of one call."""
    rng = np.random.default_rng([SEED, size])
    digits, words = PROBABILITIES["a ninth"], all_words(rng, 300 * size)
    whole = np.empty(size, dtype=np.uint64)
    twin.biased_words(digits, words, whole)
    for step in (1, 7, 50):
        out, done, start, stop = np.full(size, UNTOUCHED), 0, 0, 0
        while done < size:
            stop += step
            filled, used = twin.biased_words(digits, words[start:stop], out[done:])
            done, start = done + filled, start + used
        assert same(out, whole)


# Bits brought to their places


def slow_deposit(bits: U64, words: U64) -> list[int]:
    stream = sum(word << 64 * place for place, word in enumerate(bits.tolist()))
    out = []
    for word in words.tolist():
        result = 0
        for lane in range(64):
            if word >> lane & 1:
                result |= (stream & 1) << lane
                stream >>= 1
        out.append(result)
    return out


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 200])
def test_deposited_bits_are_the_same(size: int, share: float) -> None:
    """With as many words of bits as are needed and no more; the next one is never looked at."""
    rng = np.random.default_rng([SEED, size])
    lanes = rng.random((size, 64)) < share
    words = np.packbits(lanes, axis=1, bitorder="little").view("<u8").reshape(-1)
    words = words.astype(np.uint64)
    bits = all_words(rng, -(-int(lanes.sum()) // 64))
    expected = slow_deposit(bits, words)
    for twin in TWINS:
        mine = words.copy()
        twin.deposit(bits, mine)
        assert mine.dtype == np.uint64
        assert mine.tolist() == expected


def test_bits_are_scattered_without_the_instruction_for_it() -> None:
    """What a machine runs that has none, in Python's whole numbers."""
    rng = np.random.default_rng(SEED)
    for mask in (0, 1, 1 << 63, (1 << 64) - 1, *all_words(rng, 50).tolist()):
        bits = int(all_words(rng, 1)[0])
        scattered = compiled_local.scatter_slowly(np.uint64(bits), np.uint64(mask))
        words = np.array([mask], dtype=np.uint64)
        assert int(scattered) == slow_deposit(np.array([bits], dtype=np.uint64), words)[0]


# Adding bit vectors and signs


def sum_of_bits(rows: I64, records: U8, skip: int, table: Whole) -> Whole:
    """Row by row, with sums that numpy makes."""
    bits = np.unpackbits(records[:, skip:], axis=1, bitorder="little")[:, : table.shape[1]]
    result = table.copy()
    order = np.argsort(rows, kind="stable")
    present, starts = np.unique(rows[order], return_index=True)
    if present.size:
        added = np.add.reduceat(bits[order].astype(np.int64), starts, axis=0)
        result[present] += added.astype(table.dtype)
    return result


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("width", [2, 8, 63, 64, 65, 130, 255, 256, 257, 1000, 1024])
@pytest.mark.parametrize("count", [0, 1, 2, 62, 63, 64, 65, 126, 127, 128, 1000])
def test_added_bits_are_the_same(count: int, width: int, kind: type[np.integer]) -> None:
    """Around the 63 vectors that are counted together, in one row and in several, and where rows
    have so few vectors that they are added one by one."""
    rng = np.random.default_rng([SEED, count, width])
    for skip, rows in ((0, 1), (1, 2), (2, 7), (3, 300)):
        records = rng.integers(0, 256, (count, skip + -(-width // 8)), dtype=np.uint8)
        records[: count // 3] = 0xFF  # every lane counts as far as it can
        row_numbers = rng.integers(0, rows, count).astype(np.uint32)
        table = rng.integers(0, 1000, (rows, width)).astype(kind)
        expected = sum_of_bits(row_numbers.astype(np.int64), records, skip, table)
        for twin in TWINS:
            mine = table.copy()
            twin.add_bits(row_numbers, records, skip, mine)
            assert same(mine, expected)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int64])
def test_rows_of_any_whole_type_are_added_to(kind: type[np.integer]) -> None:
    rng = np.random.default_rng(SEED)
    records = rng.integers(0, 256, (1000, 9), dtype=np.uint8)
    row_numbers = rng.integers(0, 200, 1000).astype(kind)
    expected = sum_of_bits(row_numbers.astype(np.int64), records, 1, np.zeros((200, 64), np.int32))
    for twin in TWINS:
        mine = np.zeros((200, 64), dtype=np.int32)
        twin.add_bits(row_numbers, records, 1, mine)
        assert same(mine, expected)


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (64 * 2048 + 77, 1),
        (64 * 2048 + 77, 2047),
        (64 * 2048 + 1, 65_536),
        (2 * 65_537, 65_537),  # on either side of where vectors are added one by one
        (2 * 65_537 - 1, 65_537),
    ],
)
def test_many_vectors_are_the_same(count: int, rows: int) -> None:
    rng = np.random.default_rng([SEED, count, rows])
    records = rng.integers(0, 256, (count, 10), dtype=np.uint8)
    row_numbers = rng.integers(0, rows, count).astype(np.uint32)
    row_numbers[:200] = row_numbers[-200:] = rows - 1
    table = rng.integers(0, 5, (rows, 64)).astype(np.int32)
    expected = sum_of_bits(row_numbers.astype(np.int64), records, 2, table)
    before = row_numbers.copy(), records.copy()
    for twin in TWINS:
        mine = table.copy()
        twin.add_bits(row_numbers, records, 2, mine)
        assert same(mine, expected)
    assert same(row_numbers, before[0])
    assert same(records, before[1])


def test_sixteen_bits_are_filled_to_the_brim() -> None:
    """65,535 vectors of ones in one row: the largest count that a cell of a tally may hold."""
    records, rows = np.full((65_535, 8), 0xFF, np.uint8), np.zeros(65_535, dtype=np.uint32)
    for twin in TWINS:
        table = np.zeros((1, 64), dtype=np.uint16)
        twin.add_bits(rows, records, 0, table)
        assert (table == 65_535).all()


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_counted_rows_are_the_same(count: int, row_bytes: int) -> None:
    """Rows that do not exist are returned and not counted."""
    rng = np.random.default_rng([SEED, count, row_bytes])
    records = rng.integers(0, 256, (count, row_bytes + 3), dtype=np.uint8)
    records[:, 1:row_bytes] = rng.integers(0, 2, (count, row_bytes - 1))
    slow = [int.from_bytes(record[:row_bytes].tobytes(), "little") for record in records]
    for rows in (1, 200, 256, 70_000):
        before = rng.integers(0, 9, rows)
        expected = before + np.bincount([row for row in slow if row < rows], minlength=rows)
        for twin in TWINS:
            counts = before.copy()
            row_numbers = twin.count_rows(records, row_bytes, counts)
            assert row_numbers.tolist() == slow
            assert same(counts, expected)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_added_signs_are_the_same(count: int, kind: type[np.integer]) -> None:
    rng = np.random.default_rng([SEED, count])
    for size, of in (
        (1, np.uint8),
        (3, np.uint8),
        (128, np.uint8),
        (1000, np.uint16),
        (9, np.int64),
    ):
        codes = rng.integers(0, 2 * size, count).astype(of)
        signs = np.where(codes % 2 == 1, -1, 1)
        flat = rng.integers(-100, 100, size).astype(kind)
        expected = flat + np.bincount(codes // 2, signs, minlength=size).astype(kind)
        for twin in TWINS:
            mine = flat.copy()
            twin.add_signs(codes, mine)
            assert same(mine, expected)


# Reading tables


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 2, 1), (5, 16, 1), (1024, 32_768, 4)])
def test_hadamard_records_are_the_matrix(twin: Any, rows: int, width: int, size: int) -> None:
    """Each is its place and the matrix's sign there, turned by its own coin and no other."""
    rng = np.random.default_rng([SEED, rows, width])
    points, hashes = elements(rng, 150), elements(rng, rows, 3)
    places = rng.integers(0, rows * width, 150)
    flips = all_words(rng, 3)[:3]
    out = np.empty((150, size), dtype=np.uint8)
    twin.hadamard_records(points, places, flips, hashes, width, out)
    for i, (point, place) in enumerate(zip(points.tolist(), places.tolist(), strict=True)):
        row, column = divmod(place, width)
        minus = (cell(point, hashes[row], width) & column).bit_count() % 2
        flip = int(flips[i // 64]) >> i % 64 & 1
        assert int.from_bytes(out[i].tobytes(), "little") == 2 * place + (minus ^ flip)


def tables(rng: np.random.Generator, rows: int, width: int) -> list[npt.NDArray[Any]]:
    return [
        rng.integers(0, 2**16, (rows, width)).astype(np.uint16),
        rng.integers(-(2**31), 2**31, (rows, width)).astype(np.int32),
        rng.integers(-(2**40), 2**40, (rows, width)),
        rng.normal(0, 1000, (rows, width)),
    ]


@pytest.mark.parametrize("width", [2, 3, 56, 1000])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_gathered_sums_are_the_same(count: int, rows: int, width: int) -> None:
    """Floats, too: both twins add in the order of the rows."""
    rng = np.random.default_rng([SEED, count, rows, width])
    points, hashes = elements(rng, count), elements(rng, rows, 3)
    for table in tables(rng, rows, width):
        sums = compiled_local.gather(points, table, hashes)
        assert same(sums, plain_local.gather(points, table, hashes))
        for point, total in zip(points.tolist()[:20], sums.tolist(), strict=False):
            cells = [cell(point, row, width) for row in hashes]
            exact = 0.0
            for line, place in zip(table, cells, strict=True):
                exact += float(line[place])
            assert total == exact


def test_points_in_threads_give_what_they_give_in_one() -> None:
    rng = np.random.default_rng(SEED)
    points, hashes = elements(rng, 3 * kernels.PIECE + 17), elements(rng, 3, 3)
    table = rng.integers(0, 2**16, (3, 56)).astype(np.uint16)
    assert same(local.gather(points, table, hashes), compiled_local.gather(points, table, hashes))


@pytest.mark.parametrize("width", [2, 4, 64, 1024])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64])
def test_gathered_transforms_are_the_same(rows: int, width: int, kind: type[np.integer]) -> None:
    rng = np.random.default_rng([SEED, rows, width])
    points, hashes = elements(rng, 200), elements(rng, rows, 3)
    table = rng.integers(-(2**15), 2**15, (rows, width)).astype(kind)
    before = table.copy()
    sums = compiled_local.gather_hadamard(points, table, hashes)
    assert same(sums, plain_local.gather_hadamard(points, table, hashes))
    assert same(table, before)
    dense = table.astype(np.int64) @ linalg.hadamard(width)
    assert np.array_equal(sums, plain_local.gather(points, dense, hashes))


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
def test_transforms_of_a_row_with_more_than_two_thousand_million_records_are_exact(
    twin: Any,
) -> None:
    """A tally turns to 64-bit cells for such a row, so its reading must not wrap around."""
    rng = np.random.default_rng(SEED)
    points, hashes = elements(rng, 50), elements(rng, 1, 3)
    table = np.array([[2**31, -(2**31) - 5, 2**33, 7]], dtype=np.int64)
    dense = table @ linalg.hadamard(4)
    assert np.array_equal(
        twin.gather_hadamard(points, table, hashes), plain_local.gather(points, dense, hashes)
    )


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32, 64])
def test_the_transform_is_hadamards_matrix(twin: Any, kind: Any, width: int) -> None:
    rng = np.random.default_rng([SEED, width])
    rows = rng.integers(-1000, 1000, (7, width)).astype(kind)
    mine = rows.copy()
    twin.hadamard(mine)
    assert same(mine, (rows @ linalg.hadamard(width).astype(kind)).astype(kind))
    twin.hadamard(mine)
    assert same(mine, (rows * width).astype(kind))


@pytest.mark.parametrize("width", [128, 1024, 32_768])
def test_transforms_are_the_same_and_twice_gives_width_times_the_row(width: int) -> None:
    rows = np.random.default_rng([SEED, width]).integers(-1000, 1000, (3, width))
    first, second = rows.copy(), rows.copy()
    compiled_local.hadamard(first)
    plain_local.hadamard(second)
    assert same(first, second)
    compiled_local.hadamard(first)
    assert same(first, rows * width)


@pytest.mark.parametrize("width", [2, 7, 56])
@pytest.mark.parametrize(("count", "weight_count"), [(0, 0), (1, 1), (40, 25)])
def test_collisions_are_those_of_the_whole_matrix(
    count: int, weight_count: int, width: int
) -> None:
    """To float error: a sum of `rows` × `weight_count` terms of at most 10⁴ is off by 10⁻⁹ at
    most."""
    rng = np.random.default_rng([SEED, count, width])
    rows = 9
    points, others = elements(rng, count), elements(rng, weight_count)
    weights, hashes = rng.normal(0, 1000, weight_count), elements(rng, rows, 3)
    shares = rng.dirichlet(np.ones(rows))
    matrix = np.zeros((count, weight_count))
    for row, share in zip(hashes, shares, strict=True):
        mine = [cell(point, row, width) for point in points.tolist()]
        theirs = [cell(point, row, width) for point in others.tolist()]
        matrix += share * (np.equal.outer(mine, theirs) - 1 / width)
    for twin in (*TWINS, local):
        collisions = twin.collide(points, others, weights, hashes, shares, width)
        assert collisions.shape == (count,)
        assert np.allclose(collisions, matrix @ weights, rtol=0, atol=1e-9)


# Hash functions


@pytest.mark.parametrize("width", [2, 3, 56, 1024, 2**20 + 7, 2**31])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_point_s_cell_is_the_polynomial_s(rows: int, width: int) -> None:
    rng = np.random.default_rng([SEED, rows, width])
    points, hashes = elements(rng, 500), elements(rng, rows, 3)
    row_numbers = rng.integers(0, rows, 500)
    cells = compiled_local.row_cells(points, row_numbers, hashes, width)
    assert same(cells, plain_local.row_cells(points, row_numbers, hashes, width))
    assert same(cells, local.row_cells(points, row_numbers, hashes, width))
    slow = [
        cell(point, hashes[row], width)
        for point, row in zip(points.tolist(), row_numbers.tolist(), strict=True)
    ]
    assert cells.tolist() == slow
    for row in range(min(rows, 5)):
        every = np.full(500, row)
        assert same(
            compiled_local.row_cells(points, every, hashes, width),
            plain.cells(plain.evaluate(hashes[row], points), width),
        )


def test_at_every_edge_the_twins_have_the_same_cell() -> None:
    """Every combination of extreme coefficients and points."""
    hashes = np.array(list(product(EDGES.tolist(), repeat=3)), dtype=np.uint64)
    for point in EDGES:
        points, rows = np.full(len(hashes), point), np.arange(len(hashes))
        for width in (2, 1000, 2**31):
            cells = compiled_local.row_cells(points, rows, hashes, width)
            assert same(cells, plain_local.row_cells(points, rows, hashes, width))
            assert cells.tolist() == [cell(int(point), row, width) for row in hashes]


def test_rows_have_hash_functions_of_their_own() -> None:
    many = hashing.row_hashes(5, 0, 1000)
    assert same(hashing.row_hashes(5, 0, 257), many[:257].copy())  # more rows change none
    assert (many < np.uint64(PRIME)).all()
    assert np.unique(many).size == many.size
    for other in (hashing.row_hashes(6, 0, 1000), hashing.row_hashes(5, 1, 1000)):
        assert not np.intersect1d(other, many).size
    with pytest.raises(ValueError, match="read-only"):
        many[0, 0] = 1


ROWS = 1 << 16
WIDTH = 5


def cells_over_rows(point: int, hashes: U64) -> I64:
    return local.row_cells(np.full(ROWS, point, np.uint64), np.arange(ROWS), hashes, WIDTH)


@pytest.mark.parametrize("point", [0, 1, 2**40 + 7, PRIME - 1])
def test_over_rows_each_point_s_cell_is_uniform(point: int) -> None:
    """False alarm 1e-6 (chi-square). Power: a cell that is 10% too likely, the others alike, has a
    noncentrality of 164 and is missed with probability below 1e-12."""
    cells = cells_over_rows(point, hashing.row_hashes(SEED, 0, ROWS))
    assert_chi_square(np.bincount(cells, minlength=WIDTH), np.full(WIDTH, 1 / WIDTH))


def test_over_rows_the_cells_of_three_points_are_independent() -> None:
    """False alarm 1e-6 (chi-square on 125 triples), and 1e-6 for each pair's meetings."""
    hashes = hashing.row_hashes(SEED, 0, ROWS)
    first, second, third = (cells_over_rows(point, hashes) for point in (1, 2, 3))
    triples = np.bincount((first * WIDTH + second) * WIDTH + third, minlength=WIDTH**3)
    assert_chi_square(triples, np.full(WIDTH**3, WIDTH**-3))
    for one, other in ((first, second), (first, third), (second, third)):
        assert_binomial(int((one == other).sum()), ROWS, 1 / WIDTH)


def test_hash_functions_that_are_only_pairwise_independent_are_caught() -> None:
    """The negative control: straight lines, on which the third value follows from two."""
    hashes = hashing.row_hashes(SEED, 0, ROWS).copy()
    hashes[:, 0] = 0
    first, second, third = (cells_over_rows(point, hashes) for point in (1, 2, 3))
    pairs = np.bincount(first * WIDTH + second, minlength=WIDTH**2)
    assert_chi_square(pairs, np.full(WIDTH**2, WIDTH**-2))  # pairs look as they should
    triples = np.bincount((first * WIDTH + second) * WIDTH + third, minlength=WIDTH**3)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(triples, np.full(WIDTH**3, WIDTH**-3))


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
def test_kernels_write_to_none_of_their_inputs(twin: Any) -> None:
    """Read-only inputs work, and a write to one would raise (numpy) or show (compiled)."""
    rng = np.random.default_rng(SEED)
    inputs: dict[str, npt.NDArray[Any]] = {
        "points": elements(rng, 60),
        "rows": rng.integers(0, 8, 60),
        "hashes": elements(rng, 8, 3),
        "records": rng.integers(0, 256, (60, 17), dtype=np.uint8),
        "table": rng.integers(0, 100, (8, 16)).astype(np.int32),
        "weights": rng.normal(0, 1, 60),
        "shares": rng.dirichlet(np.ones(8)),
        "digits": PROBABILITIES["a third"].copy(),
        "words": all_words(rng, 500),
    }
    before = {name: value.tobytes() for name, value in inputs.items()}
    for value in inputs.values():
        value.flags.writeable = False
    points, rows, hashes = inputs["points"], inputs["rows"], inputs["hashes"]
    twin.row_cells(points, rows, hashes, 16)
    out = np.empty((points.size, 1), dtype=np.uint8)
    twin.hadamard_records(points, rows, inputs["words"], hashes, 16, out)
    twin.biased_words(inputs["digits"], inputs["words"], np.empty(6, dtype=np.uint64))
    twin.count_rows(inputs["records"], 1, np.zeros(8, dtype=np.int64))
    twin.add_bits(rows, inputs["records"], 1, np.zeros((8, 128), dtype=np.int32))
    twin.add_signs(rows, np.zeros(8, dtype=np.int32))
    twin.gather(points, inputs["table"], hashes)
    twin.gather_hadamard(points, inputs["table"], hashes)
    twin.collide(points, points, inputs["weights"], hashes, inputs["shares"], 16)
    assert before == {name: value.tobytes() for name, value in inputs.items()}

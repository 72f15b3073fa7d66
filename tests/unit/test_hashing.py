"""Fingerprints, polynomials, cells and signs: equal to the reference, and as random as said."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED, assert_binomial, assert_chi_square
from sfumato import hashing
from sfumato.errors import SpecError
from sfumato.hashing import Polynomial, coefficients, fingerprint
from sfumato.kernels.count import plain
from sfumato.sketch import CountSketch
from vectors import reference

U64 = npt.NDArray[np.uint64]
Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
PRIME = reference.PRIME
EDGES = [0, 1, 2, 2**32 - 1, 2**32, 2**60, PRIME - 2, PRIME - 1]

elements = st.sampled_from(EDGES) | st.integers(0, PRIME - 1)
seeds = st.integers(0, 2**53 - 1)


def words(values: list[int]) -> U64:
    return np.array(values, dtype=np.uint64)


def test_the_golden_polynomial_has_its_golden_values() -> None:
    """G9 of the digest: a quadratic at 42 and at 2**40 + 7, and their residues mod 1024."""
    quadratic = Polynomial((123456789, 987654321, 555555555))
    values = quadratic(words([42, 2**40 + 7]))
    assert values.tolist() == [259814812833, 261228438842260942]
    assert (values % np.uint64(1024)).tolist() == [161, 462]


@given(st.lists(elements, min_size=1, max_size=5), st.lists(elements, min_size=1, max_size=8))
def test_a_polynomial_is_the_sum_of_its_powers(powers: list[int], points: list[int]) -> None:
    values = Polynomial(tuple(powers))(words(points)).tolist()
    assert values == [reference.evaluate(powers, x) for x in points]


@given(elements, elements)
def test_products_and_sums_are_those_of_the_field(a: int, b: int) -> None:
    assert int(plain.multiply_mod(words([a]), words([b]))[0]) == a * b % PRIME
    assert int(plain.add_mod(words([a]), words([b]))[0]) == (a + b) % PRIME


@given(elements, st.integers(2, 2**31))
def test_a_cell_is_the_share_of_the_width_that_the_value_is_of_the_field(
    value: int, width: int
) -> None:
    (cell,) = plain.cells(words([value]), width).tolist()
    assert cell == reference.cell(value, width)
    assert 0 <= cell < width


@given(elements, st.integers(0, 60))
def test_a_sign_is_a_bit_of_the_value(value: int, bit: int) -> None:
    assert plain.sign_of(words([value]), bit).tolist() == [reference.sign(value, bit)]


@pytest.mark.parametrize("width", [2, 3, 5, 1000, 1024, 65_536, 2**31 - 1, 2**31])
def test_every_cell_is_hit_by_as_many_values_as_any_other_give_or_take_two(width: int) -> None:
    """Cell c takes the values from ⌈c·2**61/width⌉ up to the next cell's first: exact counting."""
    for cell in sorted({0, 1, width // 3, width // 2, width - 2, width - 1}):
        first = -(-cell * 2**61 // width)
        after = min(-(-(cell + 1) * 2**61 // width), PRIME)
        assert abs(after - first - PRIME // width) <= 1  # so any two differ by at most two
        edges = plain.cells(words([first, after - 1]), width)
        assert edges.tolist() == [cell, cell]


def test_quadratics_over_a_small_field_are_three_wise_independent() -> None:
    """Exhaustive over F_7: for any three points, each triple of values comes from one quadratic."""
    quadratics = list(itertools.product(range(7), repeat=3))
    for points in itertools.combinations(range(7), 3):
        counts = Counter(
            tuple(reference.evaluate(list(q), x, prime=7) for x in points) for q in quadratics
        )
        assert len(counts) == 343
        assert set(counts.values()) == {1}


def test_lines_over_a_small_field_are_not_three_wise_independent() -> None:
    """The control: one coefficient fewer, and three values are no longer free."""
    lines = itertools.product(range(7), repeat=2)
    counts = Counter(
        tuple(reference.evaluate(list(q), x, prime=7) for x in (0, 1, 2)) for q in lines
    )
    assert len(counts) == 49


@pytest.mark.parametrize("independence", [2, 3, 4])
def test_a_family_draws_one_coefficient_for_each_value_it_makes_independent(
    independence: int,
) -> None:
    polynomial = Polynomial.draw(SEED, "a label", 7, independence=independence)
    assert polynomial.coefficients == tuple(
        reference.coefficients(SEED, "a label", 7, count=independence)
    )


@given(seeds, st.text(st.characters(codec="ascii")), st.integers(0, 10**6), st.integers(1, 9))
def test_coefficients_are_those_of_the_reference(
    seed: int, label: str, round: int, count: int
) -> None:
    values = coefficients(seed, label, round, count=count)
    assert values.tolist() == reference.coefficients(seed, label, round, count=count)


def test_other_labels_draw_other_coefficients() -> None:
    values = [
        coefficients(*labels, count=4).tobytes()
        for labels in ((1, "cell", 0, 0), (1, "sign", 0, 0), (1, "cell", 1, 0), (1, "cell", 0, 1))
    ]
    assert len(set(values)) == len(values)
    assert coefficients(1, "a", "b", count=1) != coefficients(1, "ab", count=1)
    assert coefficients(1, "1", count=1) != coefficients(1, 1, count=1)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert coefficients(5, "x", count=3).tolist() == coefficients(5, "x", count=9).tolist()[:3]


@given(st.lists(st.binary(max_size=40), max_size=20), seeds)
def test_fingerprints_of_bytes_are_those_of_the_reference(items: list[bytes], seed: int) -> None:
    assert fingerprint(items, seed).tolist() == [reference.fingerprint(i, seed) for i in items]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), seeds)
def test_fingerprints_of_integers_are_those_of_the_reference(items: list[int], seed: int) -> None:
    numbers = np.array(items, dtype=np.int64)
    expected = [reference.fingerprint(item, seed) for item in items]
    assert fingerprint(numbers, seed).tolist() == expected


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=10))
def test_a_string_is_its_utf8_bytes(items: list[str]) -> None:
    as_bytes = fingerprint([item.encode() for item in items], 3)
    assert np.array_equal(fingerprint(items, 3), as_bytes)
    assert np.array_equal(fingerprint(pa.array(items, type=pa.string()), 3), as_bytes)


def test_an_integer_is_its_eight_bytes() -> None:
    numbers = np.array([0, -1, 2**62, -(2**63)])
    eight = [int(number).to_bytes(8, "little", signed=True) for number in numbers]
    assert np.array_equal(fingerprint(numbers, 3), fingerprint(eight, 3))


def test_items_that_differ_only_in_trailing_zeros_are_told_apart() -> None:
    """The length is hashed too; without it, zero bytes would add nothing."""
    assert len(set(fingerprint([b"\0" * n for n in range(30)], 3).tolist())) == 30


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str
)
def test_arrow_arrays_of_every_byte_type_and_every_slice_hash_alike(kind: pa.DataType) -> None:
    items = [b"oak", b"", b"seven b", b"eight by", b"x" * 50, b"elm", "forêt".encode()]
    array = pa.array([item.decode() for item in items]).cast(kind)
    expected = fingerprint(items, 9)
    for start in range(len(items) + 1):
        for stop in range(start, len(items) + 1):
            assert np.array_equal(
                fingerprint(array.slice(start, stop - start), 9), expected[start:stop]
            )


def test_chunked_and_dictionary_arrays_hash_as_their_items() -> None:
    items = ["oak", "elm", "oak", "", "a longer item than seven bytes", "oak"]
    expected = fingerprint(items, 9)
    array = pa.array(items)
    chunked = pa.chunked_array([array.slice(0, 2), array.slice(2, 0), array.slice(2)])
    assert np.array_equal(fingerprint(chunked, 9), expected)
    assert np.array_equal(fingerprint(pa.chunked_array([], type=pa.string()), 9), expected[:0])
    coded = array.dictionary_encode()
    assert np.array_equal(fingerprint(coded, 9), expected)
    assert np.array_equal(fingerprint(coded.slice(1, 4), 9), expected[1:5])
    assert np.array_equal(fingerprint(pa.chunked_array([coded, coded]), 9), np.tile(expected, 2))


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8", ">u4"])
def test_integers_of_every_size_and_order_hash_alike(dtype: str) -> None:
    numbers = np.array([0, 1, 100], dtype=dtype)
    expected = fingerprint(np.array([0, 1, 100], dtype=np.int64), 9)
    assert np.array_equal(fingerprint(numbers, 9), expected)
    if dtype[0] != ">":
        array = pa.array(numbers)
        assert np.array_equal(fingerprint(array, 9), expected)
        assert np.array_equal(fingerprint(array.slice(1, 2), 9), expected[1:])


def test_integers_with_gaps_between_them_hash_alike() -> None:
    numbers = np.arange(100, dtype=np.int64)
    assert np.array_equal(fingerprint(numbers[::7], 9), fingerprint(numbers, 9)[::7])


@pytest.mark.parametrize(
    "items",
    [
        pa.array(["oak", None]),
        pa.array([1, None]),
        pa.array(["oak", None]).dictionary_encode(),
        pa.chunked_array([["oak"], [None]], type=pa.string()),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["oak", None])),
        pa.nulls(2),
    ],
    ids=["strings", "integers", "codes", "chunks", "dictionary", "nulls"],
)
def test_missing_items_are_refused(items: pa.Array) -> None:
    with pytest.raises(SpecError):
        fingerprint(items, 1)


@pytest.mark.parametrize(
    "items",
    [
        pa.array([1.5]),
        pa.array([True]),
        pa.array([["oak"]]),
        np.array([1.5]),
        np.array([True]),
        [1.5],
        [None],
        np.array([2**63], dtype=np.uint64),
        pa.array([2**63], type=pa.uint64()),
    ],
    ids=["double", "boolean", "list", "numpy double", "numpy boolean", "float", "none", "u8", "pa"],
)
def test_what_is_neither_bytes_nor_a_64_bit_integer_is_refused(items: hashing.Items) -> None:
    with pytest.raises(SpecError):
        fingerprint(items, 1)


def test_fingerprinting_leaves_its_input_alone() -> None:
    numbers = np.arange(-5, 5, dtype=np.int64)
    copy = numbers.copy()
    fingerprint(numbers, 1)
    assert np.array_equal(numbers, copy)


def test_row_polynomials_are_shared_and_so_cannot_be_written() -> None:
    table = hashing.row_polynomials(1, "cell", 0, 3, 2)
    assert table is hashing.row_polynomials(1, "cell", 0, 3, 2)
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 0
    rows = [reference.coefficients(1, "cell", 0, row, count=2) for row in range(3)]
    assert table.tolist() == rows


DRAWS = 20_000
SEEDS = 20


def drawn_places(item: bytes, width: int) -> Places:
    """Cell and sign of one item under DRAWS hash functions: SEEDS seeds of many rows each."""
    cells, signs = [], []
    for seed in range(SEEDS):
        sketch = CountSketch(rows=DRAWS // SEEDS, width=width, seed=(SEED + seed) % 2**53)
        points = np.repeat(sketch.points([item]), sketch.rows)
        cells.append(plain.cells(plain.evaluate(sketch.buckets.T, points), width))
        signs.append(plain.sign_of(plain.evaluate(sketch.signs.T, points), 0))
    return np.concatenate(cells), np.concatenate(signs)


@pytest.fixture(scope="module")
def two_items() -> tuple[Places, Places]:
    return drawn_places(b"oak", 10), drawn_places(b"elm", 10)


def test_cells_of_two_items_are_uniform_together(two_items: tuple[Places, Places]) -> None:
    """False alarm 1e-6 (chi-square over the 100 pairs of cells, 20,000 hash functions).

    Power: two items that are put together 5% more often than chance are missed with probability
    below 1e-20 (noncentral chi-square); 3% more often, with probability 0.002.
    """
    (first, _), (second, _) = two_items
    pairs = np.bincount(first * 10 + second, minlength=100)
    assert_chi_square(pairs, np.full(100, 0.01))


def test_signs_of_two_items_and_their_cells_are_uniform_together(
    two_items: tuple[Places, Places],
) -> None:
    """False alarm 1e-6 (chi-square over 4 pairs of signs in 10 cells, 20,000 hash functions)."""
    (cells, first), (_, second) = two_items
    bins = cells * 4 + (first + 1) + (second + 1) // 2
    assert_chi_square(np.bincount(bins, minlength=40), np.full(40, 1 / 40))
    assert_binomial(int((first == 1).sum()), DRAWS, 0.5)


def test_a_constant_sign_and_a_stuck_cell_are_caught(two_items: tuple[Places, Places]) -> None:
    """The control: what the two tests above must not let pass."""
    (cells, first), (second_cells, _) = two_items
    constant = np.ones_like(first)
    with pytest.raises(AssertionError):
        assert_chi_square(
            np.bincount(cells * 4 + (first + 1) + (constant + 1) // 2, minlength=40),
            np.full(40, 1 / 40),
        )
    stuck = np.where(np.arange(DRAWS) % 20 == 0, cells, second_cells)  # 5% more often together
    with pytest.raises(AssertionError):
        assert_chi_square(np.bincount(cells * 10 + stuck, minlength=100), np.full(100, 0.01))


def test_cells_of_many_items_under_one_seed_are_uniform() -> None:
    """False alarm 1e-6 (chi-square over 64 cells, 200,000 items; pairwise independence makes the
    counts' variances those of independent draws, and the law is close to it)."""
    sketch = CountSketch(rows=1, width=64, seed=SEED)
    items = np.random.default_rng(SEED).integers(-(2**63), 2**63 - 1, 200_000)
    cells = plain.cells(plain.evaluate(sketch.buckets[0], sketch.points(items)), 64)
    assert_chi_square(np.bincount(cells, minlength=64), np.full(64, 1 / 64))

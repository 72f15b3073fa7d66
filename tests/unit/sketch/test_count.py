"""The count sketch: what it is made of, its arithmetic, and how far one device moves it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError, SpecError
from sfumato.flow.aggregation import Plain
from sfumato.sketch import CountSketch
from vectors import reference

I64 = npt.NDArray[np.int64]

sketches = st.builds(
    CountSketch,
    rows=st.integers(1, 5),
    width=st.integers(2, 40),
    seed=st.integers(0, 2**53 - 1),
    bucket_round=st.integers(0, 200),
    sign_round=st.integers(0, 200),
)
counted = st.lists(
    st.tuples(st.binary(max_size=12), st.integers(-(2**40), 2**40)), min_size=1, max_size=12
)


def as_dict(sketch: CountSketch) -> dict[str, Any]:
    names = ("rows", "width", "seed", "bucket_round", "sign_round")
    return {name: getattr(sketch, name) for name in names}


def split(pairs: list[tuple[bytes, int]]) -> tuple[list[bytes], I64]:
    return [item for item, _ in pairs], np.array([weight for _, weight in pairs])


@given(sketches, counted)
def test_tables_are_those_of_the_reference(
    sketch: CountSketch, pairs: list[tuple[bytes, int]]
) -> None:
    items, weights = split(pairs)
    expected = reference.encode(as_dict(sketch), items, weights.tolist())
    assert sketch.encode(items, weights).tolist() == expected


@given(sketches, counted)
def test_estimates_are_those_of_the_reference(
    sketch: CountSketch, pairs: list[tuple[bytes, int]]
) -> None:
    items, weights = split(pairs)
    table = sketch.encode(items, weights)
    expected = [reference.estimate([as_dict(sketch)], [table.tolist()], item) for item in items]
    assert sketch.estimate(table, items).tolist() == expected


@given(sketches, counted, counted)
def test_tables_add_as_their_items_do(
    sketch: CountSketch, first: list[tuple[bytes, int]], second: list[tuple[bytes, int]]
) -> None:
    items, weights = split(first + second)
    whole = sketch.encode(items, weights)
    assert np.array_equal(sketch.encode(*split(first)) + sketch.encode(*split(second)), whole)


@given(sketches, counted, counted, st.integers(43, 62))
def test_tables_add_modulo_a_power_of_two_as_their_items_do(
    sketch: CountSketch,
    first: list[tuple[bytes, int]],
    second: list[tuple[bytes, int]],
    bits: int,
) -> None:
    """Sealed, unpacked, added and opened: exact as long as the sum fits the modulus.

    Whatever does not fit is off by a multiple of the modulus, and by nothing else.
    """
    wire = Plain(modulus_bits=bits)
    received = [
        wire.unpack(wire.seal(sketch.encode(*split(part))), sketch.shape)
        for part in (first, second)
    ]
    whole = sketch.encode(*split(first + second))
    opened = wire.open(received[0] + received[1])
    assert not ((opened - whole) % (1 << bits)).any()
    fits = np.abs(whole) < 1 << (bits - 1)
    assert np.array_equal(opened[fits], whole[fits])


def test_an_item_goes_to_one_cell_a_row() -> None:
    sketch = CountSketch(rows=7, width=11, seed=SEED)
    for item in range(50):
        table = sketch.encode(np.array([item]))
        assert (np.abs(table).sum(axis=1) == 1).all()


def test_a_lone_item_is_read_exactly() -> None:
    for rows in range(1, 8):
        sketch = CountSketch(rows=rows, width=16, seed=SEED)
        table = sketch.encode([b"oak"], np.array([12345]))
        assert sketch.estimate(table, [b"oak"]).tolist() == [12345.0]
        assert sketch.estimate(table, [b"oak"], decode="mean").tolist() == [12345.0]


def test_nothing_encodes_to_zeros() -> None:
    sketch = CountSketch(rows=3, width=8, seed=1)
    assert sketch.encode([]).tolist() == [[0] * 8] * 3
    assert sketch.estimate(sketch.encode([]), [b"oak"]).tolist() == [0.0]
    assert sketch.estimate(sketch.encode([]), []).tolist() == []


def test_even_rows_average_the_two_middle_readings() -> None:
    sketch = CountSketch(rows=4, width=3, seed=5)
    items = np.arange(30)
    table = sketch.encode(items, np.arange(30) ** 2)
    readings = np.array(
        [
            [plus * table[row, cell] for row in range(4) for cell, plus in [_place(sketch, i, row)]]
            for i in range(30)
        ]
    )
    ranked = np.sort(readings, axis=1)
    assert np.array_equal(sketch.estimate(table, items), (ranked[:, 1] + ranked[:, 2]) / 2)
    assert np.array_equal(sketch.estimate(table, items, decode="mean"), readings.sum(axis=1) / 4)


def _place(sketch: CountSketch, item: int, row: int) -> tuple[int, int]:
    return reference.place(as_dict(sketch), item, row)


def test_rounds_share_what_their_round_numbers_say() -> None:
    """Shared keeps cells and signs, Hybrid keeps the cells, Fresh keeps neither."""
    items = np.arange(200)
    base = CountSketch(rows=1, width=50, seed=SEED)
    hybrid = CountSketch(rows=1, width=50, seed=SEED, sign_round=1)
    fresh = CountSketch(rows=1, width=50, seed=SEED, bucket_round=1, sign_round=1)

    def cells(sketch: CountSketch) -> list[int]:
        return [int(np.flatnonzero(sketch.encode(items[i : i + 1])[0])[0]) for i in items]

    def signs(sketch: CountSketch) -> list[int]:
        return [int(sketch.encode(items[i : i + 1]).sum()) for i in items]

    assert cells(base) == cells(hybrid)
    assert signs(base) != signs(hybrid)
    assert cells(base) != cells(fresh)
    assert signs(hybrid) == signs(fresh)


def test_sixty_rounds_share_a_sign_hash_and_the_next_one_draws_anew() -> None:
    def at(round: int) -> CountSketch:
        return CountSketch(rows=2, width=8, seed=1, sign_round=round)

    assert all(at(round).signs is at(0).signs for round in range(60))
    assert [at(round).sign_bit for round in (0, 1, 59, 60, 61)] == [0, 1, 59, 0, 1]
    assert not np.array_equal(at(60).signs, at(0).signs)


@pytest.mark.parametrize("fingerprints", [False, True])
def test_encoding_points_is_encoding_their_items(fingerprints: bool) -> None:
    sketch = CountSketch(rows=3, width=64, seed=1)
    items = [f"item {i}" for i in range(100)]
    weights = np.arange(100)
    points = sketch.points(items)
    factors = weights if fingerprints else None
    assert np.array_equal(sketch.encode_points(points, factors), sketch.encode(items, factors))


ITEMS = 500
ROWS = 5


def every_table(width: int) -> I64:
    """The tables of ITEMS devices with one item each, flattened: (items, cells)."""
    sketch = CountSketch(rows=ROWS, width=width, seed=SEED)
    return np.array([sketch.encode(np.array([item])).ravel() for item in range(ITEMS)])


@pytest.mark.parametrize("width", [2, 20, 200])
def test_one_item_moves_exactly_one_cell_a_row_by_one(width: int) -> None:
    """The zero-out sensitivity, by brute force over every item: L1 = rows, L2² = rows, exactly."""
    tables = every_table(width)
    bound = CountSketch(rows=ROWS, width=width, seed=SEED).sensitivity(1)
    assert (np.abs(tables).sum(axis=1) == bound.l1).all()
    assert math.isclose(bound.l2**2, ROWS)
    assert ((tables**2).sum(axis=1) == ROWS).all()
    assert ((tables != 0).sum(axis=1) == bound.unit_cells).all()
    assert np.abs(tables).max() == 1


@pytest.mark.parametrize("width", [2, 20, 200])
def test_replacing_an_item_moves_the_table_by_at_most_twice_as_much(width: int) -> None:
    """By brute force over every pair of items: ‖a − b‖² ≤ 4·rows."""
    tables = every_table(width)
    products = tables @ tables.T
    distances = 2 * ROWS - 2 * products
    assert distances.max() <= 4 * ROWS


def test_the_replace_sensitivity_is_not_root_two_times_the_other() -> None:
    """Two items in one cell with opposite signs are 2 apart there: ‖a − b‖² > 2·rows is common.

    The control of the test above: a bound of 2·rows, often used, is broken.
    """
    tables = every_table(20)
    assert (2 * ROWS - 2 * tables @ tables.T).max() > 2 * ROWS


@pytest.mark.parametrize("values", [2, 3])
def test_several_items_of_one_device_stay_within_the_norms(values: int) -> None:
    """Brute force over every choice of items; all alike, or met in every row, reaches the bound."""
    sketch = CountSketch(rows=3, width=2, seed=SEED)
    bound = sketch.sensitivity(values)
    tables = [sketch.encode(np.array([item])) for item in range(12)]
    reached = 0.0
    for choice in itertools.combinations_with_replacement(tables, values):
        total = np.sum(choice, axis=0)
        assert np.abs(total).sum() <= bound.l1
        reached = max(reached, float(np.sqrt((total**2).sum())))
    assert reached == pytest.approx(bound.l2, rel=1e-12)  # float error of two square roots
    assert bound.unit_cells == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": -1},
        {"width": 1},
        {"width": 2**31 + 1},
        {"seed": -1},
        {"seed": 2**53},
        {"bucket_round": -1},
        {"sign_round": -1},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        CountSketch(**{"rows": 3, "width": 8, "seed": 1, **wrong})


def test_the_widest_table_is_read_in_its_last_cells() -> None:
    """Cells beyond 2**30 are cells, too; the table itself is too large to hold, so hashes only."""
    sketch = CountSketch(rows=1, width=2**31, seed=1)
    places = [_place(sketch, item, 0)[0] for item in range(200)]
    assert max(places) > 2**30
    assert max(places) < 2**31


def test_a_table_of_another_shape_is_refused() -> None:
    sketch = CountSketch(rows=3, width=8, seed=1)
    for shape in ((3, 9), (2, 8), (8, 3), (24,)):
        with pytest.raises(MismatchError, match="must be"):
            sketch.estimate(np.zeros(shape), [b"oak"])

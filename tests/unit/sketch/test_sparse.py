"""Sparse tables: the laws of every sketch (tests/conformance/test_sketches.py), without a shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import DataError, SpecError
from sfumato.sketch import ItemCounts, OneHot, SparseSketch, SparseTable, TextKeys, WordKeys
from sfumato.sketch.keys import limbs
from sfumato.sketch.sparse import comes_before
from sfumato.spec import digest, from_json, to_json

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

TEXTS = ItemCounts(keys=TextKeys(length=20))  # keys of three words
WORDS = ItemCounts(keys=WordKeys(alphabet="abcdefgh", length=5))
BOTH = pytest.mark.parametrize("sketch", [TEXTS, WORDS], ids=["texts", "words"])

items = st.text(alphabet="abcdefgh", min_size=1, max_size=5)
weighted = st.lists(st.tuples(items, st.integers(-(2**40), 2**40)), max_size=20)
numbers = st.lists(st.integers(1, 2**130), max_size=12)


def encoded(sketch: ItemCounts, pairs: list[tuple[str, int]]) -> SparseTable:
    weights = np.array([weight for _, weight in pairs], dtype=np.int64)
    return sketch.encode([item for item, _ in pairs], weights)


def rows(table: SparseTable) -> list[list[int]]:
    """The cells that are not zero: zeros may stay behind, as in an array."""
    cells: list[list[int]] = np.asarray(table)[table.counts != 0].tolist()
    return cells


def column(values: list[int]) -> U64:
    """Numbers of up to 192 bits as rows of three words."""
    words = [[value >> 64 * limb & 2**64 - 1 for limb in range(3)] for value in values]
    return np.array(words, dtype=np.uint64).reshape(-1, 3)


@BOTH
@given(first=weighted, second=weighted, factor=st.integers(-(2**10), 2**10))
def test_tables_are_linear(
    sketch: ItemCounts, first: list[tuple[str, int]], second: list[tuple[str, int]], factor: int
) -> None:
    added = encoded(sketch, first) + encoded(sketch, second)
    assert rows(added) == rows(encoded(sketch, first + second))
    scaled = np.asarray(encoded(sketch, first))
    scaled[:, -1] *= factor
    times = [(item, factor * weight) for item, weight in first]
    assert rows(encoded(sketch, times)) == scaled[scaled[:, -1] != 0].tolist()


@BOTH
@given(pairs=weighted, chance=st.randoms(use_true_random=False), cut=st.integers(0, 20))
def test_neither_order_nor_grouping_changes_a_table(
    sketch: ItemCounts, pairs: list[tuple[str, int]], chance: Any, cut: int
) -> None:
    whole, shuffled = encoded(sketch, pairs), pairs.copy()
    chance.shuffle(shuffled)
    assert np.array_equal(encoded(sketch, shuffled), whole)
    parts = encoded(sketch, shuffled[cut:]) + encoded(sketch, shuffled[:cut])
    assert np.array_equal(parts, whole)


@BOTH
@given(values=st.lists(items, max_size=30))
def test_many_items_are_the_same_items_one_by_one(sketch: ItemCounts, values: list[str]) -> None:
    whole, singly = sketch.encode(values), sketch.encode([])
    for value in values:
        singly += sketch.encode([value])
    assert np.array_equal(whole, singly)
    assert sketch.estimate(whole, values).tolist() == [float(values.count(v)) for v in values]
    listing = sketch.list(whole)
    counts = dict(zip(listing.items.to_pylist(), listing.counts.tolist(), strict=True))
    assert counts == {value: values.count(value) for value in values}
    assert (listing.cells_left, listing.inserted) == (0, len(values))


def test_a_large_column_is_counted_like_a_small_one() -> None:
    """Where the compiled loops take over."""
    places = np.random.default_rng(SEED).integers(0, 700, 40_000)
    column = pa.array([f"word {place}" for place in places.tolist()])
    once = pa.array([f"word {place}" for place in range(700)])
    counts = np.bincount(places, minlength=700)
    assert np.array_equal(TEXTS.encode(column), TEXTS.encode(once, counts))
    assert TEXTS.estimate(TEXTS.encode(column), ["nobody has it"]).tolist() == [0.0]


@BOTH
def test_inputs_are_unchanged(sketch: ItemCounts) -> None:
    weights = np.arange(3)
    table = sketch.encode(["abc", "h", "abc"])
    other = sketch.encode(["h", "g"])
    inputs = (weights, table.numbers, table.counts, other.numbers, other.counts)
    before = [each.tobytes() for each in inputs]
    for each in inputs:
        each.flags.writeable = False
    sketch.encode(["a", "b", "c"], weights)
    sketch.estimate(table + other, ["abc"])
    sketch.list(table)
    assert [each.tobytes() for each in inputs] == before


@BOTH
def test_weights_are_one_whole_number_for_each_item(sketch: ItemCounts) -> None:
    for wrong in (np.ones(2, dtype=np.int64), np.ones(3), np.ones((3, 1), dtype=np.int64)):
        with pytest.raises(SpecError, match="weights"):
            sketch.encode(["a", "b", "c"], wrong)  # type: ignore[arg-type]  # what is tested


@BOTH
def test_a_table_survives_as_an_array(sketch: ItemCounts) -> None:
    table = sketch.encode(["abc", "h", "abc", "hhhhh"])
    again = SparseTable.from_array(np.asarray(table), limbs(sketch.entry_bits))
    assert np.array_equal(again.numbers, table.numbers)
    assert np.array_equal(again.counts, table.counts)
    assert again.counts.sum() == 4
    nothing = SparseTable.from_array(np.asarray(sketch.encode([])), limbs(sketch.entry_bits))
    assert (len(nothing), np.asarray(nothing).shape) == (0, sketch.shape)
    assert "abc" not in repr(table)


@BOTH
def test_another_process_builds_the_same_sketch_and_other_rounds_differ(sketch: ItemCounts) -> None:
    again = from_json(to_json(sketch))
    assert again == sketch
    assert np.array_equal(again.encode(["abc"]), sketch.encode(["abc"]))
    other = from_json(json.dumps({**json.loads(to_json(sketch)), "round": 1}))
    assert digest(other) != digest(sketch)


@given(numbers)
def test_numbers_come_in_the_order_of_their_lowest_words(values: list[int]) -> None:
    """The order in which reports and tables have them: by the lowest 64 bits first."""
    by_words = sorted({tuple(row) for row in column(values).tolist()})
    table = SparseTable.of(column(values))
    assert [tuple(row) for row in table.numbers.tolist()] == by_words
    assert comes_before(table.numbers[:-1], table.numbers[1:]).all()
    assert not comes_before(table.numbers[1:], table.numbers[:-1]).any()
    assert not comes_before(table.numbers, table.numbers).any()
    assert table.counts.sum() == len(values)


GOOD = np.asarray(TEXTS.encode(["oak", "elm", "elm"]))
DAMAGED: dict[str, I64] = {
    "too few columns": GOOD[:, 1:],
    "one row without its table": GOOD[0],
    "descending": GOOD[::-1],
    "a number twice": GOOD[[0, 0, 1]],
    "a number that stands for none": GOOD * np.array([0, 0, 0, 1]),
    "a count of zero": GOOD - np.array([0, 0, 0, 1]),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_table_is_refused(how: str) -> None:
    assert len(SparseTable.from_array(GOOD, 3)) == 2
    with pytest.raises(DataError, match="restore the store from a backup"):
        SparseTable.from_array(DAMAGED[how], 3)


def test_a_table_of_categories_that_do_not_exist_is_refused() -> None:
    sketch = OneHot(categories=5)
    assert sketch.from_sparse(SparseTable.of(sketch.numbers([4, 0, 4]))).tolist() == [1, 0, 0, 0, 2]
    with pytest.raises(DataError, match="numbers up to 5"):
        sketch.from_sparse(SparseTable.of(np.array([[6]], dtype=np.uint64)))


def test_one_hot_cells_are_numbered_from_one() -> None:
    sketch = OneHot(categories=7)
    assert isinstance(sketch, SparseSketch)
    assert sketch.numbers([0, 6]).tolist() == [[1], [7]]
    assert (sketch.entry_bits, OneHot(categories=8).entry_bits) == (3, 4)
    with pytest.raises(SpecError, match="0 to 6"):
        sketch.numbers([7])


def test_items_without_a_key_are_refused_and_not_named() -> None:
    with pytest.raises(SpecError, match="1 are not") as refusal:
        TEXTS.numbers(["oak", "a text that is too long"])
    assert "too long" not in str(refusal.value)


@BOTH
def test_possible_tables_have_few_keys_each_once(sketch: ItemCounts) -> None:
    one, two = sketch.encode(["abc"]), sketch.encode(["abc", "h"])
    twice = sketch.encode(["abc", "abc"])
    no_key = SparseTable.of(np.full((1, limbs(sketch.entry_bits)), 2**63, dtype=np.uint64))
    assert sketch.possible([one, two, twice, no_key], 1).tolist() == [True, False, False, False]
    assert sketch.possible([one, two], 2).tolist() == [True, True]


def test_sensitivity_is_that_of_different_items() -> None:
    norms = TEXTS.sensitivity(4)
    assert (norms.l1, norms.l2, norms.unit_cells) == (4, 2.0, 4)

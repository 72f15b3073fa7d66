"""One cell a category: exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.errors import SpecError
from sfumato.sketch import OneHot


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-(2**40), 2**40)), max_size=30))
def test_counts_are_exact(pairs: list[tuple[int, int]]) -> None:
    sketch = OneHot(categories=10)
    table = sketch.encode([c for c, _ in pairs], np.array([w for _, w in pairs], dtype=np.int64))
    truth = [sum(weight for category, weight in pairs if category == c) for c in range(10)]
    assert table.tolist() == truth
    assert sketch.estimate(table, np.arange(10)).tolist() == truth


def test_each_value_counts_once_without_weights() -> None:
    assert OneHot(categories=3).encode([0, 2, 2]).tolist() == [1, 0, 2]
    assert OneHot(categories=3).encode([]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("category", [-1, 3, 2**40])
def test_a_category_out_of_range_is_refused(category: int) -> None:
    sketch = OneHot(categories=3)
    with pytest.raises(SpecError, match="0 to 2"):
        sketch.encode([0, category])
    with pytest.raises(SpecError, match="0 to 2"):
        sketch.estimate(np.zeros(3), [category])


@pytest.mark.parametrize("wrong", [[1.9], [True, False], ["1"], [None]], ids=str)
def test_a_category_must_be_a_whole_number(wrong: list[int]) -> None:
    sketch = OneHot(categories=3)
    with pytest.raises(SpecError, match="whole"):
        sketch.encode(wrong)
    with pytest.raises(SpecError, match="whole"):
        sketch.estimate(np.zeros(3), wrong)


def test_there_must_be_a_category() -> None:
    with pytest.raises(SpecError, match="categories"):
        OneHot(categories=0)


@pytest.mark.parametrize("values", [1, 2, 3])
def test_values_of_one_device_stay_within_the_norms_and_reach_them(values: int) -> None:
    sketch = OneHot(categories=4)
    bound = sketch.sensitivity(values)
    tables = [sketch.encode(list(choice)) for choice in np.ndindex(*[4] * values)]
    assert max(int(table.sum()) for table in tables) == bound.l1
    assert max(int((table**2).sum()) for table in tables) == bound.l2**2
    exact = all((table[table != 0] == 1).all() and table.sum() == 1 for table in tables)
    assert bound.unit_cells == (1 if exact else 0)

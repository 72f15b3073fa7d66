"""How many keys a table lists: the bound against enumeration and against simulated tables."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from checks import SEED
from sfumato.errors import SpecError
from sfumato.sketch.capacity import (
    EXACT,
    ROUNDING,
    core_of_keys,
    failure_bound,
    keys_of_core,
    least_width,
    log_none_alone,
    sized,
    threshold_load,
    typical_cells,
    typical_keys,
)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MOST_ROWS = 6  # what ROUNDING has to cover: an error of log_none_alone counts once a row


def left_after_peeling(cells: I64, width: int) -> I64:
    """Cells that stay full in each table; `cells` is (tables, keys, rows), each 0 .. width − 1."""
    tables, keys, rows = cells.shape
    offset = width * np.arange(rows) + rows * width * np.arange(tables)[:, None, None]
    stuck = (cells + offset).reshape(tables * keys, rows)
    while True:
        loads = np.bincount(stuck.ravel(), minlength=tables * rows * width)
        shared = (loads[stuck] > 1).all(axis=1)
        if shared.all():
            left: I64 = np.count_nonzero(loads.reshape(tables, rows * width), axis=1)
            return left
        stuck = stuck[shared]


@functools.cache
def simulated(tables: int, keys: int, rows: int, width: int, salt: int = 0) -> I64:
    rng = np.random.default_rng([SEED, salt])
    return left_after_peeling(rng.integers(0, width, size=(tables, keys, rows)), width)


def assert_at_most(events: int, trials: int, chance: float, false_alarm: float = 1e-6) -> None:
    """So many events are not too many for an event of at most this chance: exact, one-sided."""
    probability = float(stats.binom.sf(events - 1, trials, chance))
    assert probability >= false_alarm, (
        f"{events} of {trials} at chance {chance:.3g}: {probability:.1g}"
    )


def none_alone(size: int, width: int) -> Fraction:
    """P(size) by inclusion and exclusion over the cells that hold one key, in integers."""
    ways = sum(
        (-1) ** alone
        * math.comb(width, alone)
        * math.perm(size, alone)
        * (width - alone) ** (size - alone)
        for alone in range(min(size, width) + 1)
    )
    return Fraction(ways, width**size)


def log(share: Fraction) -> float:
    return math.log(share.numerator) - math.log(share.denominator)


@pytest.mark.parametrize(("width", "most"), [(1, 6), (2, 8), (3, 6), (4, 5), (5, 5)])
def test_the_chance_that_none_is_alone_is_that_of_all_placements(width: int, most: int) -> None:
    logs = log_none_alone(most, width)
    for size in range(2, most + 1):
        placements = list(itertools.product(range(width), repeat=size))
        crowded = sum(all(placed.count(c) > 1 for c in placed) for placed in placements)
        share = Fraction(crowded, len(placements))
        assert none_alone(size, width) == share
        assert abs(logs[size - 2] - log(share)) <= ROUNDING / MOST_ROWS


@pytest.mark.parametrize("width", [2, 7, 40, 300, 3000, 10**6, 10**9])
def test_sets_up_to_the_limit_are_counted_exactly(width: int) -> None:
    logs = log_none_alone(EXACT, width)
    for size in (2, 3, 4, 5, 50, 101, 300, EXACT - 1, EXACT):
        assert abs(logs[size - 2] - log(none_alone(size, width))) <= ROUNDING / MOST_ROWS


@pytest.mark.parametrize("width", [2, 40, 300, 3000, 10**6])
def test_larger_sets_are_bounded_from_above_and_closely(width: int) -> None:
    """Closely: by the factor that a normal law has, whose variance is at most two for a key."""
    logs = log_none_alone(2 * EXACT, width)
    for size in (EXACT + 1, EXACT + 2, 700, 2 * EXACT):
        excess = float(logs[size - 2]) - log(none_alone(size, width))
        assert excess >= -ROUNDING / MOST_ROWS
        assert excess <= math.log(2 * math.sqrt(2 * math.pi * 2 * size))  # twice: odd sizes


@pytest.mark.parametrize(("keys", "rows", "width"), [(2, 3, 2), (3, 3, 3), (4, 3, 2), (4, 2, 4)])
def test_the_bound_is_the_mean_number_of_stopping_sets(keys: int, rows: int, width: int) -> None:
    """Over all placements, but for the first key's, which is the same by symmetry."""
    spots = np.array(list(itertools.product(range(width), repeat=rows)))
    rest = np.array(list(itertools.product(range(len(spots)), repeat=keys - 1)))
    cells = spots[np.concatenate([np.zeros((len(rest), 1), dtype=np.int64), rest], axis=1)]
    stopping = np.zeros(len(cells), dtype=np.int64)
    for size in range(2, keys + 1):
        for subset in itertools.combinations(range(keys), size):
            some = cells[:, list(subset)]
            together = (some[:, :, None] == some[:, None]).sum(axis=2)  # itself included
            stopping += (together > 1).all(axis=(1, 2))
    assert np.array_equal(left_after_peeling(cells, width) > 0, stopping > 0)
    mean = float(stopping.mean())
    assert mean < 1, "capped: choose a case that is not"
    assert mean <= failure_bound(keys, rows, width) <= mean * (1 + 2 * ROUNDING)


TABLES = 20_000
CASES = [(150, 3, 100), (50, 3, 30), (50, 4, 23)]


def same_cells(keys: int, spots: int) -> float:
    """The exact chance that two of the keys share all their cells: a birthday problem."""
    return -math.expm1(float(np.log1p(-np.arange(keys) / spots).sum()))


@pytest.mark.parametrize(("keys", "rows", "width"), CASES)
def test_tables_fail_no_more_often_than_bounded_and_no_less_than_pairs(
    keys: int, rows: int, width: int
) -> None:
    """False alarm 1e-6 (exact binomial, each side). The power is that of the negative control."""
    failures = int((simulated(TABLES, keys, rows, width) > 0).sum())
    assert_at_most(failures, TABLES, failure_bound(keys, rows, width))
    assert_at_most(TABLES - failures, TABLES, 1 - same_cells(keys, width**rows))


@pytest.mark.parametrize(("keys", "rows", "width"), CASES)
def test_a_bound_ten_times_too_low_is_caught(keys: int, rows: int, width: int) -> None:
    """The negative control. Missed with probability below 1e-6: failures are as many as pairs."""
    failures = int((simulated(TABLES, keys, rows, width) > 0).sum())
    low = failure_bound(keys, rows, width) / 10
    missed_up_to = int(stats.binom.isf(1e-6, TABLES, low))
    assert stats.binom.cdf(missed_up_to, TABLES, same_cells(keys, width**rows)) < 1e-6
    with pytest.raises(AssertionError):
        assert_at_most(failures, TABLES, low)


def test_pairs_ten_times_too_many_are_caught() -> None:
    failures = int((simulated(TABLES, 150, 3, 100) > 0).sum())
    with pytest.raises(AssertionError):
        assert_at_most(TABLES - failures, TABLES, 1 - 10 * same_cells(150, 100**3))


def test_pairs_make_nine_tenths_of_the_bound_where_the_table_is_not_crowded() -> None:
    for keys, rows, width in [(150, 3, 100), (1000, 3, 600), (1000, 4, 1000), (100_000, 3, 60_000)]:
        pairs = same_cells(keys, width**rows)
        assert pairs <= failure_bound(keys, rows, width) <= pairs / 0.9


def test_a_crowded_table_has_no_bound() -> None:
    for rows, crowded in [(3, 1.5), (4, 1.58), (5, 1.74)]:
        assert failure_bound(20_000, rows, int(20_000 * crowded / rows)) == 1.0
        assert failure_bound(20_000, rows, int(20_000 * (crowded + 0.03) / rows)) < 0.01
    assert failure_bound(10_000, 3, 1) == 1.0


def test_one_key_is_always_listed() -> None:
    assert failure_bound(0, 3, 1) == failure_bound(1, 3, 1) == 0.0
    assert least_width(1, 3, 0.5) == 1
    assert sized(1, 1e-9) == (3, 1)


@given(st.integers(2, 90), st.integers(1, 6), st.integers(1, 200))
def test_the_bound_falls_with_width_and_rows_and_rises_with_keys(
    keys: int, rows: int, width: int
) -> None:
    bound = failure_bound(keys, rows, width)
    assert 0 < bound <= 1
    assert failure_bound(keys, rows, width + 1) <= bound
    assert failure_bound(keys, rows + 1, width) <= bound
    assert failure_bound(keys + 1, rows, width) >= bound


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_the_bound_falls_with_width_where_large_sets_are_bounded(rows: int) -> None:
    bounds = [failure_bound(2000, rows, width) for width in range(700, 2000, 20)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.01 < bounds[0]


SIZES = list(itertools.product((2, 10, 50, 300, 1000, 5000), (0.2, 1e-2, 1e-6, 3e-8)))


@pytest.mark.parametrize(("keys", "failure"), SIZES)
def test_the_least_width_is_enough_and_one_less_is_not(keys: int, failure: float) -> None:
    for rows in (3, 4, 5, 6):
        width = least_width(keys, rows, failure)
        assert failure_bound(keys, rows, width) <= failure
        assert width == 1 or failure_bound(keys, rows, width - 1) > failure


@pytest.mark.parametrize(("keys", "failure"), SIZES)
def test_a_sized_table_keeps_its_promise_with_the_fewest_cells(keys: int, failure: float) -> None:
    rows, width = sized(keys, failure)
    assert failure_bound(keys, rows, width) <= failure
    assert rows * width == min(n * least_width(keys, n, failure) for n in (3, 4, 5, 6))
    assert sized(keys, failure, most_rows=3) == (3, least_width(keys, 3, failure))


def test_sized_tables_fail_as_rarely_as_asked() -> None:
    """False alarm 1e-6 (exact binomial)."""
    failures = int((simulated(TABLES, 50, *sized(50, 0.01)) > 0).sum())
    assert_at_most(failures, TABLES, 0.01)


def test_a_table_sized_for_three_times_the_failures_is_caught() -> None:
    """The negative control. Missed with probability below 1e-6: two keys in one place suffice."""
    rows, width = sized(50, 0.03, most_rows=3)
    missed_up_to = int(stats.binom.isf(1e-6, TABLES, 0.01))
    assert stats.binom.cdf(missed_up_to, TABLES, same_cells(50, width**rows)) < 1e-6
    failures = int((simulated(TABLES, 50, rows, width) > 0).sum())
    with pytest.raises(AssertionError):
        assert_at_most(failures, TABLES, 0.01)


@pytest.mark.parametrize(("rows", "load"), [(3, 0.818469), (4, 0.772280), (5, 0.701780)])
def test_the_threshold_is_that_of_the_theory(rows: int, load: float) -> None:
    assert round(threshold_load(rows), 6) == load


@pytest.mark.parametrize(
    ("keys", "rows", "cells"),
    [
        (10, 3, 21),  # 2.0 cells a key, in whole rows
        (49, 3, 99),
        (50, 3, 102),  # 2.0 would be 100 cells, where 1.5 are enough
        (100, 3, 150),
        (200, 3, 300),
        (500, 3, 702),  # 1.4
        (1000, 3, 1302),  # 1.3
        (30_000, 3, 39_000),
        (1000, 4, 1380),  # 1.3 · 1.29487/1.22179
    ],
)
def test_typical_tables_are_those_measured(keys: int, rows: int, cells: int) -> None:
    assert typical_cells(keys, rows) == cells


@given(st.integers(1, 20_000), st.integers(3, 6))
def test_typical_keys_are_the_most_that_typical_cells_hold(cells: int, rows: int) -> None:
    keys = typical_keys(cells, rows)
    assert keys == 0 or typical_cells(keys, rows) <= cells
    assert typical_cells(keys + 1, rows) > cells


LISTED = [(keys, rows) for rows in (3, 4) for keys in (20, 49, 68, 150, 216, 500, 770)]


@pytest.mark.parametrize(("keys", "rows"), LISTED)
def test_typical_tables_list_more_than_four_times_in_five(keys: int, rows: int) -> None:
    """False alarm 1e-6 (exact binomial). Power: at most 2/3 is missed with probability < 1e-6."""
    assert stats.binom.sf(stats.binom.ppf(1e-6, 1000, 0.8) - 1, 1000, 2 / 3) < 1e-6
    width = typical_cells(keys, rows) // rows
    assert_at_most(int((simulated(1000, keys, rows, width) > 0).sum()), 1000, 0.2)


@pytest.mark.parametrize("keys", [20, 68, 150, 500])
def test_a_table_of_one_cell_and_a_sixth_for_a_key_is_caught(keys: int) -> None:
    """The negative control: above the threshold load most tables fail, the large ones all."""
    failures = int((simulated(1000, keys, 3, round(keys * 7 / 18)) > 0).sum())
    with pytest.raises(AssertionError):
        assert_at_most(failures, 1000, 0.2)


@pytest.mark.parametrize(
    ("share", "keys_for_a_cell"), [(0.5, 0.845746), (0.8, 1.106097), (0.95, 1.609182)]
)
def test_the_core_tells_the_keys_of_equation_3(share: float, keys_for_a_cell: float) -> None:
    cells = 10**6
    assert round(keys_of_core(int(share * cells), cells) / cells, 6) == keys_for_a_cell


def test_a_key_for_a_cell_leaves_the_core_of_the_theory() -> None:
    assert round(core_of_keys(3000, 3000), 6) == 0.722740


def test_no_core_is_expected_below_the_threshold_and_0_3577_of_the_cells_at_it() -> None:
    assert core_of_keys(0.818469 * 10**6, 10**6) == 0.0
    assert core_of_keys(0.0, 1) == 0.0
    assert 0.3577 <= core_of_keys(0.8185 * 10**6, 10**6) < 0.37


@given(st.integers(400, 999), st.integers(1, 100))
def test_the_core_of_the_keys_of_a_core_is_that_core(thousandths: int, thousands: int) -> None:
    """To float error: keys for a cell grow by 0.12 or more with the share, so it grows tenfold."""
    left, cells = thousandths * thousands, 1000 * thousands
    share = core_of_keys(keys_of_core(left, cells), cells)
    assert abs(share - left / cells) <= 100 * np.finfo(float).eps


def test_a_small_core_is_of_keys_that_share_all_their_cells() -> None:
    assert keys_of_core(0, 3000, peeled=2000) == 2000
    assert keys_of_core(3, 3000) == 2
    assert keys_of_core(3, 3000, peeled=1998) == 2000
    assert round(keys_of_core(1072, 3000)) == 715  # 0.35733 of the cells; the next are 0.35767
    assert keys_of_core(1073, 3000, peeled=100) == keys_of_core(1073, 3000) > 0.818 * 3000


@pytest.mark.parametrize("cells", [1, 2, 3, 30, 300, 3000])
def test_more_cells_left_mean_more_keys(cells: int) -> None:
    keys = [keys_of_core(left, cells) for left in range(cells + 1)]
    assert keys == sorted(keys)
    assert keys[-1] == 3.5 * cells


def test_a_large_saturated_table_held_more_than_one_with_an_empty_cell() -> None:
    cells = 10**6
    assert keys_of_core(cells, cells) == keys_of_core(cells - 1, cells) > 3.5 * cells


STUCK = 50


def estimates(keys: int, cells: int, tables: int, salt: int) -> F64:
    left = simulated(tables, keys, 3, cells // 3, salt)
    return np.array([keys_of_core(int(cell), cells) for cell in left])


def assert_within_a_hundredth(estimated: F64, keys: int) -> None:
    """False alarm 4e-9: with 1.2% for one of 50 tables, a hundredth is 5.9 standard errors."""
    assert estimated.size == STUCK
    assert abs(float(estimated.mean()) / keys - 1) <= 0.01


def test_stuck_tables_tell_their_keys() -> None:
    assert_within_a_hundredth(estimates(3000, 3000, STUCK, salt=1), 3000)


def test_keys_off_by_a_fiftieth_are_caught() -> None:
    """The negative control. Missed with probability 4e-9, at the same 5.9 standard errors."""
    with pytest.raises(AssertionError):
        assert_within_a_hundredth(estimates(3060, 3000, STUCK, salt=1), 3000)


def assert_mean_square(estimated: F64, keys: int, error: float, false_alarm: float = 1e-6) -> None:
    """The root mean square error is at most `error` of the keys: chi-square, for a normal law."""
    squares = float(np.sum((estimated / keys - 1) ** 2)) / error**2
    assert float(stats.chi2.sf(squares, estimated.size)) >= false_alarm


STATED = [(3000, 3000, 0.012), (6000, 3000, 0.027), (300, 300, 0.04)]


@pytest.mark.parametrize(("keys", "cells", "error"), STATED)
def test_the_error_of_a_core_is_as_stated(keys: int, cells: int, error: float) -> None:
    """False alarm 1e-6. Power: an error 1.5 times as large is missed with probability 3e-4."""
    assert_mean_square(estimates(keys, cells, 200, salt=2), keys, error)


@pytest.mark.parametrize(("keys", "cells", "error"), STATED)
def test_an_error_stated_as_half_is_caught(keys: int, cells: int, error: float) -> None:
    """The negative control. At 1.75 times what is stated, as measured, missed with 6e-10."""
    with pytest.raises(AssertionError):
        assert_mean_square(estimates(keys, cells, 200, salt=2), keys, error / 2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="keys must be at least 0; got -1"):
        failure_bound(-1, 3, 10)
    with pytest.raises(SpecError, match="rows must be at least 1; got 0"):
        failure_bound(10, 0, 10)
    with pytest.raises(SpecError, match="width must be at least 1; got 0"):
        failure_bound(10, 3, 0)
    with pytest.raises(SpecError, match="rows must be at least 1; got 0"):
        least_width(10, 0, 0.1)
    for failure in (0.0, 1.0):
        with pytest.raises(SpecError, match="failure must be above 0 and below 1"):
            sized(10, failure)
    with pytest.raises(SpecError, match="most_rows must be at least 3; got 2"):
        sized(10, 0.1, most_rows=2)
    with pytest.raises(SpecError, match="rows must be at least 3; got 2"):
        typical_cells(10, rows=2)
    with pytest.raises(SpecError, match="keys must be at least 1; got 0"):
        typical_cells(0)
    with pytest.raises(SpecError, match="cells must be at least 0; got -1"):
        typical_keys(-1)
    with pytest.raises(SpecError, match="left must be 0 to cells; got 4 of 3 cells"):
        keys_of_core(4, 3)
    with pytest.raises(SpecError, match="cells must be at least 1; got 0"):
        core_of_keys(1, 0)

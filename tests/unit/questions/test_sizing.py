"""How large a sketch must be: the formulas of paper 000 and their golden values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from checks import SEED
from sfumato.errors import SpecError
from sfumato.questions.sizing import (
    PowerLaw,
    fit_power_law,
    instance_width,
    majority_collisions,
    minimax_width,
    rows_for,
)


@pytest.mark.parametrize(
    ("items", "paper", "ours"), [(175_000, 16, 17), (150_868, 15, 15), (739_972, 17, 17)]
)
def test_rows_are_those_of_the_papers_data_or_the_next_odd_number(
    items: int, paper: int, ours: int
) -> None:
    assert rows_for(items, paper=True) == paper
    assert rows_for(items) == ours


def test_rows_are_odd_and_never_fewer_than_the_theory_asks() -> None:
    for items in (1, 2, 10, 1000, 10**6, 10**9):
        for risk in (0.5, 0.1, 0.001):
            rows = rows_for(items, risk=risk)
            assert rows % 2 == 1
            assert math.log(2 * items / risk) <= rows < math.log(2 * items / risk) + 2


def test_minimax_width_is_equation_3() -> None:
    assert minimax_width(0.002, constant=2, devices=10**6) == 2000
    assert minimax_width(0.002, constant=6, devices=10**6) == 6000
    assert minimax_width(0.002, constant=2, devices=100) == 200


def test_instance_width_has_its_golden_value() -> None:
    """G3 of the digest: three heavy shares and a tail of 1.171875 units."""
    shares = np.array([0.5, 0.25, 0.1, 0.05, 0.05, 0.05])
    assert instance_width(shares, 0.08, constant=1, devices=10**6) == 3 + 1.171875
    assert instance_width(shares, 0.08, constant=2, devices=10**6) == 8.34375


@pytest.mark.parametrize(("beta", "ranks", "width"), [(0.2, 338, 54.2348), (0.1, 175_000, 28.7610)])
def test_widths_of_a_power_law_have_their_golden_values(
    beta: float, ranks: int, width: float
) -> None:
    """G3 of the digest, given to four digits; ranks stop where the shares would sum beyond one."""
    law = PowerLaw(alpha=1.1, beta=beta).shares(175_000)
    assert law.size == ranks
    instance = instance_width(law, 0.01, constant=2, devices=10**6)
    assert f"{instance:.4f}" == f"{width:.4f}"


def test_shares_of_a_law_sum_to_at_most_one_and_one_more_would_not() -> None:
    for alpha, beta in ((1.05, 0.15), (0.5, 0.01), (2.0, 0.9)):
        law = PowerLaw(alpha=alpha, beta=beta).shares(10_000)
        assert law.sum() <= 1 + 1e-12
        assert law.sum() + beta * (law.size + 1) ** -alpha > 1 + 1e-12


def test_instance_width_is_never_more_than_minimax() -> None:
    """Shares sum to one, so at most 1/target are heavy and the light ones' squares are few."""
    rng = np.random.default_rng(SEED)
    for target in (0.3, 0.05, 0.004):
        for _ in range(50):
            shares = rng.dirichlet(np.full(rng.integers(1, 300), rng.uniform(0.05, 2)))
            width = instance_width(shares, target, constant=6, devices=10**6)
            assert width <= minimax_width(target, constant=6, devices=10**6)


def test_no_width_is_larger_than_the_devices_ask_for() -> None:
    shares = np.full(1000, 0.001)
    assert instance_width(shares, 0.0001, constant=2, devices=10) == 20


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_a_target_that_is_not_a_share_is_refused(target: float) -> None:
    with pytest.raises(SpecError, match="target_error"):
        minimax_width(target, constant=2, devices=10)
    with pytest.raises(SpecError, match="target_error"):
        instance_width(np.array([0.5]), target, constant=2, devices=10)


def test_majority_collisions_are_ten_items_over_width_cubed_at_five_rows() -> None:
    for width in (50, 200, 215):
        assert math.isclose(majority_collisions(10**5, 5, width), 10 * 10**5 / width**3)
    assert majority_collisions(10**5, 5, 216) < 0.1 < majority_collisions(10**5, 5, 215)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
def test_majority_collisions_are_the_binomial_tail_to_first_order(rows: int) -> None:
    """At least the exact expectation, and at most that over the chance of no further collision."""
    width = 100
    exact = 1000 * stats.binom.sf(rows // 2, rows, 1 / width)
    expected_items = majority_collisions(1000, rows, width)
    assert exact * (1 - 1e-12) <= expected_items <= exact * (1 - 1 / width) ** -rows


@pytest.mark.parametrize("alpha", [0.8, 1.05, 1.3, 2.0, 5.0])
def test_a_law_is_recovered_from_its_own_shares(alpha: float) -> None:
    """Least squares with nothing left over: to the solver's tolerance, 1e-8 relative."""
    beta = 0.3
    ranks = np.arange(1, 1001, dtype=np.float64)
    law = fit_power_law(np.random.default_rng(SEED).permutation(beta * ranks**-alpha))
    assert law.alpha == pytest.approx(alpha, rel=1e-6)
    assert law.beta == pytest.approx(beta, rel=1e-6)


def test_only_the_largest_shares_above_three_times_the_noise_are_fitted() -> None:
    ranks = np.arange(1, 21, dtype=np.float64)
    shares = 0.3 * ranks**-1.5
    drowned = np.where(ranks > 10, 0.0009, shares)  # from rank 11 on: a floor of noise
    fitted = fit_power_law(drowned, noise=0.003)
    assert fitted.alpha == pytest.approx(1.5, rel=1e-6)
    assert fit_power_law(drowned).alpha != pytest.approx(1.5, rel=1e-6)
    more = np.r_[shares, np.full(100, shares[-1])]
    assert fit_power_law(more).alpha == pytest.approx(1.5, rel=1e-6)
    assert fit_power_law(more, most=40).alpha != pytest.approx(1.5, rel=1e-6)


def test_the_fit_is_of_shares_and_not_of_their_logarithms() -> None:
    """A small share that is off by half hardly counts, as squared error has it."""
    ranks = np.arange(1, 21, dtype=np.float64)
    shares = 0.3 * ranks**-2.0
    shares[-1] /= 2
    assert fit_power_law(shares).alpha == pytest.approx(2.0, abs=1e-3)
    slope, _ = np.polyfit(np.log(ranks), np.log(np.sort(shares)[::-1]), 1)
    assert abs(-slope - 2.0) > 1e-2


@pytest.mark.parametrize(
    "shares", [np.array([]), np.array([0.5]), np.array([0.5, -0.1]), np.zeros(30)]
)
def test_a_pilot_that_shows_too_little_is_refused(
    shares: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    with pytest.raises(SpecError, match="at least two"):
        fit_power_law(shares)


def test_a_flat_or_rising_start_still_gives_a_falling_law() -> None:
    law = fit_power_law(np.full(20, 0.01))
    assert law.alpha > 0
    assert 0 < law.beta <= 1

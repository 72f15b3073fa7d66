"""The statistical checks themselves: what they let pass, and what they must not."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from checks import SEED, assert_binomial, assert_chi_square, assert_mean


def tails(successes: int, trials: int, chance: Fraction) -> tuple[Fraction, Fraction]:
    mass = [comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    return sum(mass[: successes + 1], start=Fraction(0)), sum(mass[successes:], start=Fraction(0))


@pytest.mark.parametrize("false_alarm", [1e-2, 1e-6])
def test_the_binomial_check_refuses_exactly_the_two_tails(false_alarm: float) -> None:
    """Against exact fractions, for every number of successes in 40 trials."""
    for successes in range(41):
        likely = min(tails(successes, 40, Fraction(1, 4))) >= Fraction(false_alarm) / 2
        try:
            assert_binomial(successes, 40, 0.25, false_alarm)
            passed = True
        except AssertionError:
            passed = False
        assert passed == likely


def test_the_chi_square_check_accepts_draws_and_refuses_wrong_shares() -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.random.default_rng(SEED).multinomial(10_000, shares)
    assert_chi_square(counts, shares)
    with pytest.raises(AssertionError):
        assert_chi_square(counts, [0.35, 0.35, 0.2, 0.1])


def test_a_bin_that_is_never_hit_counts_its_expectation() -> None:
    """Five bins of which one is empty: its whole expectation of 2000 is against the claim."""
    with pytest.raises(AssertionError):
        assert_chi_square([2500, 2500, 2500, 2500, 0], np.full(5, 0.2))


def test_a_hit_where_none_can_be_is_refused() -> None:
    assert_chi_square([500, 500, 0], [0.5, 0.5, 0.0])
    with pytest.raises(AssertionError, match="zero"):
        assert_chi_square([500, 499, 1], [0.5, 0.5, 0.0])


def test_rare_bins_are_pooled_and_not_forgotten() -> None:
    """A hundred bins that expect two hits each are one bin that expects 200."""
    shares = np.r_[0.8, np.full(100, 0.002)]
    assert_chi_square(np.r_[800, np.full(100, 2)], shares)
    with pytest.raises(AssertionError):
        assert_chi_square(np.r_[1000, np.zeros(100)], shares)
    assert_chi_square([500, 500, 0], [0.4995, 0.4995, 0.001])  # one rare bin joins the next


def test_shares_that_do_not_sum_to_one_and_too_few_draws_are_refused() -> None:
    with pytest.raises(AssertionError, match="sum"):
        assert_chi_square([5, 5], [0.5, 0.4])
    with pytest.raises(AssertionError, match="too few"):
        assert_chi_square([3, 3], [0.5, 0.5])


def test_the_mean_check_allows_the_stated_number_of_standard_errors() -> None:
    """At a false alarm of 1e-6 that is 4.89 of them, on either side."""
    samples = np.zeros(10_000)
    for inside in (-0.0488, 0.0488):
        assert_mean(samples, inside, 1.0)
    for outside in (-0.0490, 0.0490):
        with pytest.raises(AssertionError):
            assert_mean(samples, outside, 1.0)

"""What the samplers draw follows the closed forms; `unit/privacy` shows that they must."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import opendp.prelude as dp
import pytest

from checks import SEED, assert_binomial, assert_chi_square, assert_mean
from sfumato.privacy import (
    Noise,
    NoiseInShares,
    SeededRng,
    SystemRng,
    discrete_gaussian,
    discrete_laplace,
)
from sfumato.privacy.noise_kinds import NOISES
from sfumato.privacy.samplers import sampler_of
from unit.privacy import exact

I64 = npt.NDArray[np.int64]

DRAWS = 200_000
CELLS = 100_000
OPENDP = 40_000  # it draws one by one
CASES = [(noise, scale) for noise in NOISES for scale in (0.5, 1.0, 3.0, 9.4467, 40.0)]


def assert_law(draws: I64, noise: str, scale: float) -> None:
    """The draws follow the closed form: chi-square over all values, false alarm 1e-6."""
    reach = exact.reach(noise, scale)
    shares = exact.masses(noise, scale, reach)
    inside = np.clip(draws.ravel(), -reach, reach) + reach
    assert_chi_square(np.bincount(inside, minlength=shares.size), shares / shares.sum())


@pytest.mark.parametrize(("noise", "scale"), CASES)
def test_draws_follow_the_stated_law(noise: Noise, scale: float) -> None:
    """False alarm 1e-6 (chi-square). Power: a scale off by 5% either way is missed with probability
    below 1e-10; the worst is Laplace at 40, 442 bins, noncentrality 454 against a bar of 597."""
    assert_law(sampler_of(noise, scale).draw(DRAWS, SeededRng(SEED, 1)), noise, scale)


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
@pytest.mark.parametrize(("noise", "scale"), CASES)
def test_a_scale_off_by_five_per_cent_is_caught(noise: Noise, scale: float, factor: float) -> None:
    """The negative control."""
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(sampler_of(noise, scale * factor).draw(DRAWS, SeededRng(SEED, 2)), noise, scale)


@pytest.mark.parametrize("noise", NOISES)
def test_draws_from_the_system_follow_the_stated_law(noise: Noise) -> None:
    """False alarm 1e-6 (chi-square), every time with other words. Power: as above."""
    assert_law(sampler_of(noise, 3.0).draw(DRAWS, SystemRng()), noise, 3.0)


@pytest.mark.parametrize(("noise", "scale"), [case for case in CASES if case[1] < 10])
def test_noise_has_its_mean_and_its_variance(noise: Noise, scale: float) -> None:
    """False alarm 6e-7 each (five standard errors, from the law's own fourth moment). Power: a
    variance 10% off is missed with probability below 1e-6: the standard error is 0.45% for a
    Gaussian and at most 0.9%, for Laplace at 0.5."""
    draws = sampler_of(noise, scale).draw(CELLS, SeededRng(SEED, 3)).astype(np.float64)
    variance, fourth = exact.moments(noise, scale, exact.reach(noise, scale))
    assert_mean(draws, 0.0, math.sqrt(variance), false_alarm=6e-7)
    assert_mean(draws**2, variance, math.sqrt(fourth - variance**2), false_alarm=6e-7)


def test_a_variance_off_by_ten_per_cent_is_caught() -> None:
    """The negative control: a scale 5% too large."""
    draws = discrete_gaussian(9.4467 * 1.05, CELLS, SeededRng(SEED, 4)).astype(np.float64)
    variance, fourth = exact.moments("gaussian", 9.4467, exact.reach("gaussian", 9.4467))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(draws**2, variance, math.sqrt(fourth - variance**2), false_alarm=6e-7)


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_as_often_above_zero_as_below(noise: Noise) -> None:
    """False alarm 1e-6 (exact binomial). Power: 51% above zero is missed with probability below
    1e-3, 52% with probability below 1e-6, of some 170,000 draws that are not zero."""
    draws = sampler_of(noise, 3.0).draw(DRAWS, SeededRng(SEED, 5))
    assert_binomial(int((draws > 0).sum()), int((draws != 0).sum()), 0.5)


def test_noise_that_leans_to_one_side_is_caught() -> None:
    """The negative control: 2% of the draws moved up by four."""
    draws = discrete_gaussian(3.0, DRAWS, SeededRng(SEED, 6))
    draws[: DRAWS // 50] += 4
    with pytest.raises(AssertionError):
        assert_binomial(int((draws > 0).sum()), int((draws != 0).sum()), 0.5)


@pytest.mark.parametrize("noise", NOISES)
def test_neighbouring_draws_have_nothing_to_do_with_each_other(noise: Noise) -> None:
    """False alarm 1e-6 (the mean product of neighbours, whose standard deviation is the variance).
    Power: a correlation of 0.03 is missed with probability below 1e-6."""
    draws = sampler_of(noise, 3.0).draw(DRAWS, SeededRng(SEED, 7)).astype(np.float64)
    variance, _ = exact.moments(noise, 3.0, exact.reach(noise, 3.0))
    assert_mean(draws[::2] * draws[1::2], 0.0, variance)


def opendp_draws(noise: Noise) -> I64:
    """Integers with discrete noise of scale 3, by OpenDP's own samplers."""
    dp.enable_features("contrib")
    integers = dp.vector_domain(dp.atom_domain(T=int))
    measurement = (
        dp.m.make_gaussian(integers, dp.l2_distance(T=int), scale=3.0)
        if noise == "gaussian"
        else dp.m.make_laplace(integers, dp.l1_distance(T=int), scale=3.0)
    )
    return np.array(measurement([0] * OPENDP), dtype=np.int64)


def assert_same_moments(theirs: I64, ours: I64, noise: str) -> None:
    variance, fourth = exact.moments(noise, 3.0, exact.reach(noise, 3.0))
    assert_mean(ours - theirs, 0.0, math.sqrt(2 * variance))
    assert_mean(ours**2 - theirs**2, 0.0, math.sqrt(2 * (fourth - variance**2)))


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_moments_agree_with_those_of_opendp(noise: Noise) -> None:
    """False alarm 1e-6 each (normal; OpenDP draws afresh every time). Power: a scale 10% off is
    missed with probability below 1e-6 (thirteen standard errors or more)."""
    assert_same_moments(
        opendp_draws(noise), sampler_of(noise, 3.0).draw(OPENDP, SeededRng(SEED, 8)), noise
    )


def test_a_scale_that_is_not_opendps_is_caught() -> None:
    """The negative control."""
    ours = discrete_laplace(3.3, OPENDP, SeededRng(SEED, 12))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_same_moments(opendp_draws("laplace"), ours, "laplace")


# Shares


SHARES = NoiseInShares(scale=6.0, survivors=20, colluders=4)


def sums_of_shares(mechanism: NoiseInShares, devices: int, rng: SeededRng) -> I64:
    """What the shares of `devices` devices, each drawn on its own, add up to in 100,000 cells."""
    total = np.zeros(CELLS, dtype=np.int64)
    for _ in range(devices):
        total = mechanism.at_device(total, devices=1, rng=rng)
    return total


@pytest.mark.parametrize("devices", [16, 20, 29])
def test_shares_add_up_to_skellam_noise_of_the_devices_that_stay(devices: int) -> None:
    """False alarm 1e-6 (chi-square). Power: a scale 5% off is missed with probability below 1e-10
    (noncentrality above 400, some 50 bins). 16 are the honest ones among the least admissible."""
    scale = SHARES.scale * math.sqrt(devices / (SHARES.survivors - SHARES.colluders))
    assert_law(sums_of_shares(SHARES, devices, SeededRng(SEED, 9)), "skellam", scale)


def test_shares_drawn_for_many_devices_at_once_have_the_same_law() -> None:
    """False alarm 1e-6 (chi-square). Power: as above."""
    total = SHARES.at_device(np.zeros(CELLS, dtype=np.int64), devices=29, rng=SeededRng(SEED, 10))
    assert_law(total, "skellam", SHARES.scale * math.sqrt(29 / 16))


def test_shares_of_too_few_devices_are_caught() -> None:
    """The negative control: 14 of the 16 honest devices, 6% less noise."""
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(sums_of_shares(SHARES, 14, SeededRng(SEED, 11)), "skellam", SHARES.scale)

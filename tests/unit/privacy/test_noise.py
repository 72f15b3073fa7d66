"""What each mechanism does at its stations; conformance tests hold all of them to the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest

from checks import SEED
from sfumato.errors import ImpossibleError, SpecError
from sfumato.privacy import (
    AdditiveLoss,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    NoPrivacy,
    SeededRng,
    epsilon_of,
    least_noise,
    skellam,
)
from sfumato.privacy.noise import AT_RELEASE
from sfumato.privacy.noise_kinds import NOISES, Noise
from sfumato.privacy.samplers import LARGEST_SCALE, sampler_of
from sfumato.sketch import CountSketch, Norms, OneHot
from unit.privacy import exact

TABLE = np.arange(12, dtype=np.int64).reshape(3, 4)
ROWS = CountSketch(rows=5, width=64, seed=1).sensitivity(1)


def test_no_noise_changes_nothing_and_costs_everything() -> None:
    mechanism = NoNoise()
    assert np.array_equal(mechanism.at_device(TABLE, devices=3, rng=SeededRng(SEED)), TABLE)
    assert np.array_equal(mechanism.at_release(TABLE, count=3, rng=SeededRng(SEED)), TABLE)
    assert mechanism.loss(ROWS) == NoPrivacy()
    assert mechanism.stddev(1000) == 0


@pytest.mark.parametrize("noise", AT_RELEASE)
def test_noise_at_release_is_that_of_the_sampler(noise: Noise) -> None:
    mechanism = NoiseAtRelease(noise=noise, scale=4.0)
    added = mechanism.at_release(TABLE, count=9, rng=SeededRng(SEED)) - TABLE
    assert np.array_equal(added, sampler_of(noise, 4.0).draw((3, 4), SeededRng(SEED)))


def test_noise_at_release_leaves_devices_alone() -> None:
    mechanism = NoiseAtRelease(noise="gaussian", scale=4.0)
    assert np.array_equal(mechanism.at_device(TABLE, devices=1, rng=SeededRng(SEED)), TABLE)
    assert not mechanism.in_shares


def test_the_loss_names_noise_scale_and_contribution() -> None:
    expected = AdditiveLoss(noise="gaussian", scale=4.0, l1=5.0, l2=math.sqrt(5), unit_cells=5)
    assert NoiseAtRelease(noise="gaussian", scale=4.0).loss(ROWS) == expected
    several = OneHot(categories=9).sensitivity(3)
    shares = NoiseInShares(scale=6.0, survivors=100, colluders=5)
    expected = AdditiveLoss(noise="skellam", scale=6.0, l1=3.0, l2=3.0, unit_cells=0)
    assert shares.loss(several) == expected


@pytest.mark.parametrize("scale", [1.0, 2.0, 9.4467])
@pytest.mark.parametrize("noise", NOISES)
def test_stated_deviations_are_those_of_the_laws(noise: Noise, scale: float) -> None:
    """A discrete Gaussian's variance is scale²·(1 − 8π²·scale²·e^(−2π²·scale²)), nearly; at scale
    one that is 2.2e-7 off. Others are exact, up to float sums."""
    variance, _ = exact.moments(noise, scale, math.ceil(45 * scale))
    off = 8 * math.pi**2 * scale**2 * math.exp(-2 * math.pi**2 * scale**2)
    tolerance = 1.1 * off + 1e-13 if noise == "gaussian" else 1e-12
    assert abs(variance / NOISES[noise].stddev(scale) ** 2 - 1) <= tolerance


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("contribution", [ROWS, OneHot(categories=4).sensitivity(2)], ids=repr)
def test_the_least_noise_costs_at_most_epsilon_and_is_the_least(
    contribution: Norms, epsilon: float
) -> None:
    best = least_noise(contribution, epsilon=epsilon, delta=1e-6)
    assert epsilon_of([best.loss(contribution)], 1e-6) <= epsilon
    for noise in AT_RELEASE:
        other = least_noise(contribution, epsilon=epsilon, delta=1e-6, noises=[noise])
        assert other.noise == noise
        assert best.stddev(1) <= other.stddev(1)
    pure = least_noise(contribution, epsilon=epsilon, delta=0.0)
    assert epsilon_of([pure.loss(contribution)], 0.0) <= epsilon


def test_shares_of_the_least_cohort_make_the_stated_noise() -> None:
    """More survivors, more noise: 20% dropout and 5% colluders allowed, all stay: 1.155 times."""
    mechanism = NoiseInShares(scale=9.0, survivors=800, colluders=50)
    assert mechanism.stddev(750) == pytest.approx(9.0, rel=1e-15)
    assert mechanism.stddev(1000) / 9.0 == pytest.approx(math.sqrt(1000 / 750), rel=1e-15)
    assert mechanism.in_shares


def test_shares_are_skellam_and_many_devices_are_drawn_at_once() -> None:
    mechanism = NoiseInShares(scale=9.0, survivors=100)
    one = mechanism.at_device(TABLE, devices=1, rng=SeededRng(SEED)) - TABLE
    assert np.array_equal(one, skellam(0.9, (3, 4), SeededRng(SEED)))
    many = mechanism.at_device(TABLE, devices=400, rng=SeededRng(SEED)) - TABLE
    assert np.array_equal(many, skellam(0.9 * 20, (3, 4), SeededRng(SEED)))


def test_shares_add_nothing_at_the_release() -> None:
    mechanism = NoiseInShares(scale=9.0, survivors=100)
    released = mechanism.at_release(TABLE, count=100, rng=SeededRng(SEED))
    assert np.array_equal(released, TABLE)


def test_a_release_with_too_few_survivors_is_refused() -> None:
    mechanism = NoiseInShares(scale=9.0, survivors=100)
    with pytest.raises(ImpossibleError, match="at least 100 devices for its noise; got 99"):
        mechanism.at_release(TABLE, count=99, rng=SeededRng(SEED))


@pytest.mark.parametrize("devices", [0, -3])
def test_shares_of_no_device_are_refused(devices: int) -> None:
    with pytest.raises(SpecError, match="devices must be at least 1"):
        NoiseInShares(scale=9.0, survivors=100).at_device(
            TABLE, devices=devices, rng=SeededRng(SEED)
        )


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, LARGEST_SCALE["gaussian"] + 1.0])
def test_impossible_scales_are_refused(scale: float) -> None:
    with pytest.raises(SpecError):
        NoiseAtRelease(noise="gaussian", scale=scale)
    with pytest.raises(SpecError):
        NoiseInShares(scale=scale, survivors=1)


def test_skellam_is_not_added_at_the_release() -> None:
    with pytest.raises(SpecError, match="got skellam"):
        NoiseAtRelease(noise="skellam", scale=1.0)


@pytest.mark.parametrize(("survivors", "colluders"), [(0, 0), (5, 5), (5, 6), (5, -1)])
def test_impossible_cohorts_are_refused(survivors: int, colluders: int) -> None:
    with pytest.raises(SpecError):
        NoiseInShares(scale=1.0, survivors=survivors, colluders=colluders)


def test_norms_of_several_items_are_those_of_items_in_one_cell() -> None:
    assert OneHot(categories=4).sensitivity(3) == Norms(l1=3, l2=3, unit_cells=0)
    sketch = CountSketch(rows=4, width=8, seed=1)
    assert sketch.sensitivity(1) == Norms(l1=4, l2=2.0, unit_cells=4)
    assert sketch.sensitivity(3) == Norms(l1=12, l2=6.0, unit_cells=0)

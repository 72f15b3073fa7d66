"""Private lists of names: exact deltas, and an audit by enumeration.

Oracles: DIGEST 2D and 2E.
"""

from __future__ import annotations

import math
from dataclasses import fields as fields_of
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from checks import SEED, assert_binomial, assert_mean
from marks import quick
from sfumato.errors import ImpossibleError, SpecError
from sfumato.privacy import (
    AdditiveLoss,
    ApproximateLoss,
    Budget,
    Ledger,
    ListedAbove,
    SeededRng,
    best_list,
    epsilon_of,
    threshold_sample,
)
from sfumato.privacy.listing import (
    least_threshold,
    lists,
    noise_tail,
    sampled_delta,
    without_promise,
)
from sfumato.privacy.samplers import log_mass
from sfumato.sketch import Norms

ONE = Norms(l1=1, l2=1, unit_cells=1)


SAMPLED = {
    4: ([24, 14, 11], [35, 20, 15]),
    10: ([10, 8, 7], [15, 10, 9]),
    25: ([6, 5, 5], [9, 7, 6]),
}


@pytest.mark.parametrize("times", quick(SAMPLED, 25))
def test_the_least_thresholds_of_a_sample_without_noise(times: int) -> None:
    """DIGEST 2D's table, for delta 1e-6 and 1e-8 at epsilon 0.5, 1 and 2."""
    for delta, expected in zip((1e-6, 1e-8), SAMPLED[times], strict=True):
        thresholds = [
            least_threshold("none", 1 / times, 1, epsilon, delta) for epsilon in (0.5, 1.0, 2.0)
        ]
        assert [threshold for _, threshold in filter(None, thresholds)] == expected


def _exact_delta(rate: Fraction, threshold: int, factor: Fraction, most: int) -> Fraction:
    """The hockey-stick divergence in whole numbers, both directions, by enumeration."""

    def law(count: int) -> list[Fraction]:
        mass = [math.comb(count, j) * rate**j * (1 - rate) ** (count - j) for j in range(most + 2)]
        return [sum(mass[:threshold], Fraction(0)), *mass[threshold:]]

    worst = Fraction(0)
    for count in range(most + 1):
        one, other = law(count + 1), law(count)
        there = sum((max(Fraction(0), a - factor * b) for a, b in zip(one, other, strict=True)),
                    Fraction(0))  # fmt: skip
        back = sum((max(Fraction(0), b - factor * a) for a, b in zip(one, other, strict=True)),
                   Fraction(0))  # fmt: skip
        worst = max(worst, there, back)
    return worst


@pytest.mark.parametrize(("rate", "threshold"), [(Fraction(1, 4), 4), (Fraction(1, 10), 3)])
def test_the_delta_of_a_sample_is_the_exact_one(rate: Fraction, threshold: int) -> None:
    factor = Fraction(27, 10)
    exact = _exact_delta(rate, threshold, factor, math.ceil(6 * threshold / rate))
    delta = sampled_delta(float(rate), threshold, math.log(2.7))
    assert math.isclose(delta, float(exact), rel_tol=1e-9)


def test_a_rate_that_shows_absence_is_refused() -> None:
    assert sampled_delta(0.5, 50, 0.5) == 1.0  # epsilon must be at least ln 2
    assert sampled_delta(1.0, 50, 5.0) == 1.0


def test_least_thresholds_with_noise() -> None:
    """DIGEST 2D: continuous noise has 14.1 / 22.4 (one item), 74.7 / 51.8 (5), 323 / 107 (20)."""
    expected = {1: (14.1, 22.4), 5: (74.7, 51.8), 20: (323, 107)}
    for items, continuous in expected.items():
        laplace, gaussian = lists(1.0, items_per_device=items, epsilon=1.0, delta=1e-6)
        thresholds = (laplace.threshold, gaussian.threshold)
        for whole, real in zip(thresholds, continuous, strict=True):
            assert real <= whole <= 1.05 * real + 1  # whole numbers, and noise on them


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_tails_are_those_of_the_noise_or_above(noise: Any) -> None:
    first, logs = log_mass(noise, 2.5)
    mass = np.exp(logs)
    for least in range(1, 12):
        exact = mass[least - first :].sum()
        assert exact <= noise_tail(noise, 2.5, least) * (1 + 1e-12)
        if least >= 5:  # two deviations out, where thresholds are, it is not far above
            assert noise_tail(noise, 2.5, least) <= 1.2 * exact


def _released(mechanism: ListedAbove, holders: int) -> dict[int, float]:
    """The law of the release of one item with this many holders: 0 for nothing."""
    first, mass = 0, np.ones(1)
    if mechanism.noise != "none":
        first, logs = log_mass(mechanism.noise, mechanism.scale)
        mass = np.exp(logs)
    law: dict[int, float] = {0: 0.0}
    for count in range(holders + 1):
        share = stats.binom.pmf(count, holders, mechanism.rate)
        if count == 0:  # not in the sample: nothing is noised
            law[0] += share
            continue
        for value, chance in zip(count + first + np.arange(mass.size), mass, strict=True):
            output = int(value) if value >= mechanism.threshold else 0
            law[output] = law.get(output, 0.0) + share * chance
    return law


def _divergence(one: dict[int, float], other: dict[int, float], epsilon: float) -> float:
    outcomes = one.keys() | other.keys()
    return sum(
        max(0.0, one.get(value, 0.0) - math.exp(epsilon) * other.get(value, 0.0))
        for value in outcomes
    )


def _audited(mechanism: ListedAbove, epsilon: float) -> float:
    """The exact delta of one item's release, over true counts and both directions."""
    return max(
        max(_divergence(a, b, epsilon), _divergence(b, a, epsilon))
        for count in (range(120) if mechanism.noise == "none" else (0, 1, 2, 3, 5, 8, 20, 60, 150))
        for a, b in [(_released(mechanism, count + 1), _released(mechanism, count))]
    )


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
def test_every_list_keeps_its_promise_exactly(rate: float) -> None:
    for mechanism in lists(rate, epsilon=1.0, delta=1e-4):
        assert _audited(mechanism, 1.0) <= 1e-4 * (1 + 1e-9), mechanism


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
def test_a_list_with_too_low_a_threshold_is_caught(rate: float) -> None:
    """The control: two below the least threshold breaks the promise (one may be slack)."""
    for mechanism in lists(rate, epsilon=1.0, delta=1e-4):
        broken = ListedAbove(
            rate=mechanism.rate,
            noise=mechanism.noise,
            scale=mechanism.scale,
            threshold=mechanism.threshold - 2,
            epsilon=None,
            delta=0.0,
        )
        assert _audited(broken, 1.0) > 1e-4, mechanism


def test_a_list_that_does_not_keep_its_promise_cannot_be_made() -> None:
    fine = best_list(0.1, epsilon=1.0, delta=1e-6)
    fields = {part.name: getattr(fine, part.name) for part in fields_of(fine)}
    for change in (
        {"threshold": fine.threshold - 1}, {"rate": 0.2}, {"epsilon": 0.5}, {"delta": 1e-8},
        {"items_per_device": 3}, {"amplified": False}, {"scale": fine.scale / 2},
    ):  # fmt: skip
        with pytest.raises(SpecError, match="costs a delta"):
            ListedAbove(**(fields | change))


def test_several_items_of_a_device_cost_as_many_times() -> None:
    """All m items of one device at once, by independence: the product of m laws."""
    options = lists(0.25, items_per_device=2, epsilon=1.0, delta=1e-3)
    for one in options:
        if one.noise == "gaussian":
            continue  # accounted for by its own composition; the product is below it
        with_one = _released(one, 1)
        total = sum(
            max(0.0, with_one[a] * with_one[b] - math.exp(1.0) * (a == 0) * (b == 0))
            for a in with_one
            for b in with_one
        )
        assert total <= 1e-3


def test_the_chance_to_be_listed_is_what_happens() -> None:
    """False alarm 1e-6 each (exact binomial); 20,000 draws tell 2% of a chance near one half."""
    for mechanism in lists(0.25, epsilon=1.0, delta=1e-6):
        count = mechanism.detectable()
        assert mechanism.chance(count) >= 0.95 > mechanism.chance(count - 1)
        rng = SeededRng(SEED)
        _, sample = mechanism.sample(np.zeros(20_000), np.full(20_000, count), rng=rng)
        counts = np.r_[
            np.asarray(sample), np.zeros(20_000 - len(np.asarray(sample)), dtype=np.int64)
        ]
        _, listed = mechanism.release(counts[counts > 0], rng=rng)
        assert_binomial(int(listed.sum()), 20_000, mechanism.chance(count))
        with pytest.raises(AssertionError):
            assert_binomial(int(listed.sum()), 20_000, mechanism.chance(count) - 0.02)


def test_the_estimate_is_unbiased_and_its_variance_known() -> None:
    """DIGEST 2E: mean c and variance c·(t − 1) for c devices; 2,000 repeats, 1e-6 each."""
    mechanism = without_promise(0.1)
    _, sample = mechanism.sample(np.zeros(2_000), np.full(2_000, 400), rng=SeededRng(SEED))
    estimates = np.asarray(sample) * 10.0
    assert_mean(estimates, 400.0, 60.0)
    assert_mean((estimates - 400) ** 2, 3_600.0, math.sqrt(2) * 3_600)
    with pytest.raises(AssertionError):
        assert_mean(estimates, 410.0, 60.0)


def test_values_take_part_by_coins_of_their_own() -> None:
    mechanism = without_promise(0.25)
    items = pa.array([str(k) for k in range(10_000)])
    sample, none = mechanism.sample(items, None, rng=SeededRng(SEED))
    assert none is None
    assert_binomial(len(sample), 10_000, 0.25)
    assert without_promise(1.0).sample(items, None, rng=SeededRng(1))[0] is items


def test_threshold_sampling_is_algorithm_one() -> None:
    """DIGEST 2E: h = 3, t = 10: P(10) = .3, so mean 3, variance 21; 12 stays; t = 1 is nothing."""
    samples = threshold_sample(np.full(100_000, 3), 10.0, rng=SeededRng(SEED))
    assert set(samples.tolist()) == {0.0, 10.0}
    assert_binomial(int((samples == 10).sum()), 100_000, 0.3)
    with pytest.raises(AssertionError):
        assert_binomial(int((samples == 10).sum()), 100_000, 0.31)
    assert threshold_sample(np.array([12, 10]), 10.0, rng=SeededRng(1)).tolist() == [12.0, 10.0]
    assert threshold_sample(np.array([0, 1, 5]), 1.0, rng=SeededRng(1)).tolist() == [0.0, 1.0, 5.0]
    with pytest.raises(SpecError, match="threshold must be above 0"):
        threshold_sample(np.array([1]), 0.0, rng=SeededRng(1))


def test_thinning_gives_the_lower_rate() -> None:
    mechanism = best_list(0.1, epsilon=1.0, delta=1e-6)
    thinned = mechanism.thin(np.full(2_000, 50), 0.5, rng=SeededRng(SEED))
    assert_binomial(int(thinned.sum()), 100_000, 0.2)
    assert mechanism.thin(np.array([7]), 0.1, rng=SeededRng(1)).tolist() == [7]


def test_the_best_list_has_the_smallest_detectable_count() -> None:
    for rate in (1.0, 0.2, 0.02):
        every = lists(rate, epsilon=1.0, delta=1e-6)
        best = best_list(rate, epsilon=1.0, delta=1e-6)
        assert best.detectable() == min(option.detectable() for option in every)


def test_a_list_that_finds_all_items_from_a_threshold_on_is_preferred() -> None:
    """Gaussian noise finds items from 131 devices on. Laplace noise does from 144 on, and is better
    if items below that are left out anyway."""
    promise: Any = {"items_per_device": 3, "epsilon": 0.3, "delta": 1e-5}
    kinds = {
        threshold: best_list(1.0, threshold=threshold, **promise).noise
        for threshold in (0.0, 100.0, 131.0, 144.0)
    }
    assert kinds == {0.0: "gaussian", 100.0: "gaussian", 131.0: "gaussian", 144.0: "laplace"}


def test_without_delta_there_is_no_list() -> None:
    with pytest.raises(ImpossibleError, match="delta must be above 0"):
        best_list(0.5, epsilon=1.0, delta=0.0)


def test_losses_that_are_only_known_as_a_pair_add_up() -> None:
    pair = ApproximateLoss(epsilon=0.5, delta=4e-7)
    assert epsilon_of([pair], 1e-6) == pytest.approx(0.5, abs=1e-4)
    assert epsilon_of([pair, pair], 1e-6) == pytest.approx(1.0, abs=1e-3)
    assert epsilon_of([pair, pair, pair], 1e-6) == math.inf  # their deltas are more than that
    noise = AdditiveLoss(noise="gaussian", scale=20.0, l1=1, l2=1, unit_cells=1)
    both = epsilon_of([pair, noise], 1e-6)
    assert 0.5 < both <= 0.5 + epsilon_of([noise], 6e-7) + 1e-3


def test_the_ledger_takes_a_list_that_costs_all_there_is() -> None:
    mechanism = best_list(0.1, epsilon=1.0, delta=1e-6)
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    for cohort in ("round 0", "round 1"):  # other devices
        ledger.charge(campaign="a", cohort=cohort, task=cohort, loss=mechanism.loss(ONE))
    assert ledger.spent() == pytest.approx(1.0, abs=1e-4)

"""Statistical checks with a stated false-alarm probability, and the seed they run under.

Each check raises AssertionError if the observation is less likely than `false_alarm` under the
claim. Every test that uses one has a negative control: a wrong claim that the check must catch.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from sfumato.arrays import F64

SEED = int(os.environ.get("SFUMATO_TEST_SEED", "20261115"))
"""Fixed by default; nightly runs set SFUMATO_TEST_SEED to a fresh number."""

LEAST_EXPECTED = 10.0  # least expected number of observations in a bin of its own


def assert_binomial(
    successes: int, trials: int, probability: float, false_alarm: float = 1e-6
) -> None:
    """The successes fit a binomial law: exact, two-sided, false_alarm/2 on either side."""
    at_most = float(stats.binom.cdf(successes, trials, probability))
    at_least = float(stats.binom.sf(successes - 1, trials, probability))
    assert min(at_most, at_least) >= false_alarm / 2, (
        f"{successes} of {trials} successes at probability {probability:.6g}: "
        f"P(at most) = {at_most:.2g}, P(at least) = {at_least:.2g}"
    )


def assert_chi_square(
    observed: npt.ArrayLike, expected_probabilities: npt.ArrayLike, false_alarm: float = 1e-6
) -> None:
    """Counts per bin fit the probabilities (Pearson; the chi-square law is its limit).

    Bins expected to hold fewer than ten are pooled, smallest first, until the pool holds ten. A bin
    that was never hit counts its expectation; a hit in a bin of probability zero fails at once.
    """
    counts = np.asarray(observed, dtype=np.float64)
    shares = np.asarray(expected_probabilities, dtype=np.float64)
    assert counts.shape == shares.shape, f"{counts.shape} bins against {shares.shape}"
    assert math.isclose(shares.sum(), 1.0, abs_tol=1e-9), f"shares sum to {shares.sum()}"
    assert not counts[shares == 0].any(), "a bin of probability zero was hit"
    counts, shares = counts[shares > 0], shares[shares > 0]
    order = np.argsort(shares, kind="stable")
    counts, expected = counts[order], counts.sum() * shares[order]
    pooled = 0
    while pooled < expected.size and (
        expected[pooled] < LEAST_EXPECTED or 0 < expected[:pooled].sum() < LEAST_EXPECTED
    ):
        pooled += 1
    if pooled:
        counts = np.r_[counts[:pooled].sum(), counts[pooled:]]
        expected = np.r_[expected[:pooled].sum(), expected[pooled:]]
    assert counts.size >= 2, "too few observations: every bin was pooled"
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    probability = float(stats.chi2.sf(statistic, counts.size - 1))
    assert probability >= false_alarm, (
        f"chi-square {statistic:.1f} over {counts.size} bins: probability {probability:.2g}"
    )


def assert_mean(
    samples: npt.ArrayLike, mean: float, stddev_of_one: float, false_alarm: float = 1e-6
) -> None:
    """The samples' mean is the stated one: two-sided normal test, for sums of many samples.

    `stddev_of_one` is the standard deviation of one sample. The normal law is the limit of the
    sum's, so it needs enough samples that no one of them weighs much.
    """
    values = np.asarray(samples, dtype=np.float64)
    error = stddev_of_one / math.sqrt(values.size)
    deviations = abs(float(values.mean()) - mean) / error
    allowed = -float(special.ndtri(false_alarm / 2))
    assert deviations <= allowed, (
        f"mean {values.mean():.6g} of {values.size} samples is {deviations:.1f} standard errors "
        f"from {mean:.6g}; {allowed:.1f} are allowed"
    )


def voted_law(holders: int, rate: float, repetitions: int, needed: int) -> F64:
    """P(samples = s and votes ≥ needed) for each s, one repetition after another."""
    one = stats.binom.pmf(np.arange(holders + 1), holders, rate)
    joint = np.zeros((repetitions + 1, repetitions * holders + 1))  # votes, samples
    joint[0, 0] = 1.0
    for _ in range(repetitions):
        after = joint * one[0]
        for sampled in range(1, holders + 1):
            after[1:, sampled:] += one[sampled] * joint[:-1, : joint.shape[1] - sampled]
        joint = after
    return np.asarray(joint[needed:].sum(axis=0))

"""Exact coverage: the laws are summed, nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import voted_law
from sfumato.privacy.intervals import (
    CONFIDENCE,
    NORMAL_95,
    NoiseLaw,
    of_estimates,
    of_sums,
    of_support,
    of_votes,
)
from sfumato.privacy.noise_kinds import NOISES, Noise
from unit.privacy import exact

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
ROUNDING = 1e-9  # rounding error of a sum of probabilities
LAWS: dict[str, NoiseLaw] = {
    "none": NoiseLaw.none(),
    "laplace, epsilon 0.5": NoiseLaw.of("laplace", 2.0),
    "laplace, epsilon 3": NoiseLaw.of("laplace", 1 / 3),
    "laplace, epsilon 8": NoiseLaw.of("laplace", 1 / 8),
    **{noise: NoiseLaw.of(noise, 0.9) for noise in NOISES},
    "gaussian": NoiseLaw.of("gaussian", 0.55),
    "two rounds": NoiseLaw.of("laplace", 1 / 3) + NoiseLaw.of("laplace", 1 / 3),
}


def seen_law(noise: NoiseLaw, counted: F64) -> tuple[I64, F64]:
    """Values and probabilities of a count (0, 1, … with these probabilities) with noise."""
    values = np.arange(-noise.reach, counted.size + noise.reach)
    return values, np.convolve(counted, noise.mass)


def covered(values: I64, mass: F64, low: F64, high: F64, truth: int, above: int | None) -> float:
    """The probability that the interval holds the truth, given that the count is shown."""
    visible = values >= (values.min() if above is None else above)
    inside = (low <= truth) & (truth <= high)
    return float(mass[visible & inside].sum() / mass[visible].sum())


@pytest.mark.parametrize("noise", NOISES)
def test_the_width_is_the_least_that_holds_the_confidence(noise: Noise) -> None:
    law, table = NoiseLaw.of(noise, 3.0), exact.masses(noise, 3.0, 150)
    for confidence in (0.5, 0.95, 0.999):
        width = law.width(confidence)
        assert table[150 - width : 151 + width].sum() >= confidence
        assert table[151 - width : 150 + width].sum() < confidence
    for chance in (0.4, 1e-3, 1e-9):
        least = law.exceeded(chance)
        assert table[150 + least :].sum() <= chance < table[149 + least :].sum()


def test_noises_add_as_their_laws_do() -> None:
    one, other = NoiseLaw.of("laplace", 1.0), NoiseLaw.of("skellam", 2.0)
    both = one + other
    assert both.variance == pytest.approx(one.variance + other.variance, rel=1e-9)
    assert both.mass.sum() == pytest.approx(1.0, abs=1e-12)
    skellam = NoiseLaw.of("skellam", 3.0) + NoiseLaw.of("skellam", 4.0)
    assert skellam.at_least(np.arange(0, 20)) == pytest.approx(
        NoiseLaw.of("skellam", 5.0).at_least(np.arange(0, 20)), abs=1e-12
    )
    assert (one + NoiseLaw.none()).mass is one.mass


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("name", LAWS)
def test_sums_are_covered_whatever_the_truth(name: str, share: float) -> None:
    """At least 95% for every count, and less without the least likely accepted value."""
    noise, devices = LAWS[name], 60
    respondents = round(share * devices)
    for truth in range(devices + 1):
        counted = stats.hypergeom(devices, truth, respondents).pmf(np.arange(truth + 1))
        values, mass = seen_law(noise, counted)
        low, high = of_sums(values, noise, devices=devices, respondents=respondents)
        assert covered(values, mass, low, high, truth, None) >= CONFIDENCE - ROUNDING
        accepted = mass[(low <= truth) & (truth <= high) & (mass > 0)]
        likelier = accepted[accepted > accepted.min() * (1 + ROUNDING)]  # ties go together
        assert likelier.sum() < CONFIDENCE


def test_normal_quantiles_do_not_cover_coarse_noise() -> None:
    """The control: intervals of an earlier version."""
    noise = LAWS["two rounds"]
    values = np.arange(-noise.reach, noise.reach + 1)
    inside = np.abs(values) <= NORMAL_95 * np.sqrt(noise.variance)
    assert noise.mass[inside].sum() < 0.83
    low, high = of_sums(values, noise, devices=1, respondents=1)
    assert noise.mass[(low <= 0) & (high >= 0)].sum() >= 0.95
    few, respondents = 2, 42  # devices that hold an item, of 60
    counted = stats.hypergeom(60, few, respondents).pmf(np.arange(few + 1))
    scaled = np.arange(few + 1) * 60 / respondents
    normal = np.abs(scaled - few) <= NORMAL_95 * np.sqrt(scaled * (60 / respondents - 1))
    assert counted[normal].sum() < 0.95


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("name", ["laplace, epsilon 0.5", "laplace, epsilon 3", "gaussian", "none"])
def test_what_is_listed_above_a_threshold_is_covered(name: str, rate: float) -> None:
    """Given that it is listed; counts at and below the threshold included, if they may be."""
    noise, devices, above = LAWS[name], 80, 9
    for truth in range(1, devices + 1, 3):
        counted = stats.binom(truth, rate).pmf(np.arange(truth + 1))
        values, mass = seen_law(noise, counted)
        if mass[values >= above].sum() < 1e-9:
            continue
        low, high = of_sums(
            values, noise, devices=devices, respondents=devices, rate=rate, above=above
        )
        assert covered(values, mass, low, high, truth, above) >= CONFIDENCE - ROUNDING


def test_intervals_that_forget_the_threshold_miss_what_is_listed() -> None:
    """The control: an item of six devices, listed from nine on."""
    noise, truth, above = LAWS["laplace, epsilon 0.5"], 6, 9
    values, mass = seen_law(noise, np.eye(truth + 1)[truth])
    low, high = of_sums(values, noise, devices=80, respondents=80)
    assert covered(values, mass, low, high, truth, above) < 0.9
    low, high = of_sums(values, noise, devices=80, respondents=80, above=above)
    assert covered(values, mass, low, high, truth, above) >= 0.95


@pytest.mark.parametrize(("devices", "epsilon"), [(20, 4.0), (20, 1.0), (150, 8.0), (150, 2.0)])
def test_local_reports_are_covered_whatever_the_truth(devices: int, epsilon: float) -> None:
    others = 4
    truth = np.exp(epsilon) / (np.exp(epsilon) + others)
    lie = (1 - truth) / others
    for holders in range(0, devices + 1, 1 if devices < 50 else 7):
        own = stats.binom(holders, truth).pmf(np.arange(holders + 1))
        rest = stats.binom(devices - holders, lie).pmf(np.arange(devices - holders + 1))
        mass = np.convolve(own, rest)
        low, high = of_support(
            np.arange(devices + 1), truth=truth, lie=lie, devices=devices, respondents=devices
        )
        assert mass[(low <= holders) & (holders <= high)].sum() >= CONFIDENCE - ROUNDING


def test_wide_laws_are_covered_to_within_a_per_cent() -> None:
    """Where the variance is 100 or more, a normal law is used: here it is at its worst."""
    noise, devices, respondents = LAWS["laplace, epsilon 3"], 4_000, 2_000
    for truth in (420, 700, 2_000, 3_700):
        counted = stats.hypergeom(devices, truth, respondents).pmf(np.arange(truth + 1))
        values, mass = seen_law(noise, counted)
        low, high = of_sums(values, noise, devices=devices, respondents=respondents)
        assert 0.94 <= covered(values, mass, low, high, truth, None) <= 0.96


def test_estimates_have_the_sampling_of_the_truth_in_them() -> None:
    counts = np.array([-30.0, 0.0, 50.0, 700.0])
    low, high = of_estimates(counts, 10.0, devices=1_000, respondents=1_000)
    assert low == pytest.approx(counts - 10 * NORMAL_95)
    assert high == pytest.approx(counts + 10 * NORMAL_95)
    low, high = of_estimates(counts, 10.0, devices=1_000, respondents=700)
    assert (low[1:] < counts[1:] / 0.7).all()
    assert (high > counts / 0.7).all()
    assert (high - counts / 0.7)[2] > (counts / 0.7 - low)[2]  # more holders vary more
    everybody = of_estimates(np.array([700.0]), 10.0, devices=1_000, respondents=700)
    nobody = of_estimates(np.array([0.0]), 10.0, devices=1_000, respondents=700)
    assert (everybody[1] - everybody[0])[0] == pytest.approx((nobody[1] - nobody[0])[0], rel=0.15)


def test_empty_input_gives_empty_bounds() -> None:
    none = np.zeros(0, dtype=np.int64)
    for low, high in (
        of_sums(none, LAWS["skellam"], devices=9, respondents=7),
        of_estimates(none.astype(np.float64), 1.0, devices=9, respondents=7),
    ):
        assert low.size == high.size == 0


# Of items in a majority of samples


VOTING_DEVICES = 30


def voting_coverage(bounds: Callable[[I64, int], tuple[F64, F64]], respondents: int) -> list[float]:
    """The exact coverage of every truth that is shown with a probability of 1e-6 or more."""
    covered = []
    for truth in range(1, VOTING_DEVICES + 1):
        law = np.zeros(9 * VOTING_DEVICES + 1)
        for answering in range(min(truth, respondents) + 1):
            chance = stats.hypergeom.pmf(answering, VOTING_DEVICES, truth, respondents)
            part = voted_law(answering, 0.2, 9, 5)
            law[: part.size] += chance * part
        if law.sum() < 1e-6:
            continue
        low, high = bounds(np.arange(law.size), respondents)
        inside = (low <= truth) & (truth <= high)
        covered.append(float(law[inside].sum() / law.sum()))
    return covered


def by_votes(samples: I64, respondents: int) -> tuple[F64, F64]:
    return of_votes(
        samples, devices=VOTING_DEVICES, respondents=respondents, rate=0.2, repetitions=9, needed=5
    )


def by_a_normal_law(samples: I64, respondents: int) -> tuple[F64, F64]:
    low, high = of_estimates(
        samples / 0.2, 0.0, devices=9 * VOTING_DEVICES, respondents=9 * respondents, rate=0.2,
        above=25.0,
    )  # fmt: skip
    return low / 9, high / 9


def test_counts_in_a_majority_of_samples_are_covered_given_that_they_are_shown() -> None:
    """By enumeration: no false alarm. All of these laws are narrow, so all are exact."""
    for respondents in (30, 24):
        covered = voting_coverage(by_votes, respondents)
        assert len(covered) > 25
        assert min(covered) >= 0.95 - 1e-9


def test_a_normal_law_of_all_samples_covers_rare_items_too_seldom() -> None:
    """The control, and what was done before: it takes the sum for what decides if an item is
    shown. (With 29 samples at a rate of 1/25 it covered 71% where 4% of the items were shown.)"""
    assert min(voting_coverage(by_a_normal_law, 30)[:10]) < 0.95 - 1e-9

"""Shuffled epsilon is an upper bound: golden numbers, and every outcome of small fleets.

Oracles list outcomes and add up probabilities; they share nothing with the library but the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import mpmath  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sfumato.errors import SpecError
from sfumato.privacy import shuffling
from sfumato.privacy.shuffling import closed_form_epsilon, shuffled_epsilon

F64 = npt.NDArray[np.float64]
Bound = Callable[[float, int, float], float]
Law = dict[tuple[int, ...], float]

FLOAT = 1e-12  # relative: what adding up fewer than a thousand doubles may be off by, and more
LEFT_OUT = 1e-17  # mass that an oracle may omit
JUST_BELOW = 1 - 1e-4  # precision of an epsilon; 1e-6 of delta is set aside


def epsilon_of_2021(local_epsilon: float, count: int, delta: float) -> float:
    """The reduction of 2021: another report is a clone with probability e^−local_epsilon."""
    return shuffling.numerical_epsilon(local_epsilon, count, delta, math.exp(-local_epsilon))


# Oracles


def delta_of_pair(local_epsilon: float, count: int, rate: float, epsilon: float) -> float:
    """The delta of a bit among fair clones, by adding up all numbers of clones and of zeros.

    Numbers more than nine deviations out are left out: less than LEFT_OUT in all.
    """
    truth = math.exp(local_epsilon) / (math.exp(local_epsilon) + 1)
    middle, reach = (count - 1) * rate, 9 * math.sqrt((count - 1) * rate) + 40
    here, there = 0.0, 0.0
    for clones in range(max(int(middle - reach), 0), min(int(middle + reach), count - 1) + 1):
        reach = 4.5 * math.sqrt(clones) + 40
        zeros = np.arange(max(int(clones / 2 - reach), 0), min(int(clones / 2 + reach), clones) + 2)
        others, with_one = stats.binom.pmf([zeros, zeros - 1], clones, 0.5)
        first = truth * with_one + (1 - truth) * others
        second = truth * others + (1 - truth) * with_one
        likely = stats.binom.pmf(clones, count - 1, rate)
        here += likely * np.maximum(first - math.exp(epsilon) * second, 0).sum()
        there += likely * np.maximum(second - math.exp(epsilon) * first, 0).sum()
    return float(max(here, there))


def shuffled(reports: Sequence[Sequence[float]]) -> Law:
    """How often each symbol was sent: all outcomes, from each device's law of reports."""
    law: Law = {(0,) * len(reports[0]): 1.0}
    for report in reports:
        longer: Law = {}
        for counts, likely in law.items():
            for symbol, probability in enumerate(report):
                more = (*counts[:symbol], counts[symbol] + 1, *counts[symbol + 1 :])
                longer[more] = longer.get(more, 0.0) + likely * probability
        law = longer
    return law


def true_delta(first: Law, second: Law, epsilon: float) -> float:
    """The least delta at this epsilon, both ways round."""
    factor = math.exp(epsilon)
    here = math.fsum(max(p - factor * second[at], 0.0) for at, p in first.items())
    there = math.fsum(max(p - factor * first[at], 0.0) for at, p in second.items())
    return max(here, there)


def response(categories: int, local_epsilon: float) -> F64:
    """Randomized response: the law of reports of each category, one per row."""
    weights = np.exp(local_epsilon * np.eye(categories))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def with_a_neutral_symbol(local_epsilon: float, share: float) -> F64:
    """Two values that send a neutral third symbol alike, and a value that hides both the least.

    Others send what the two send as rarely as local_epsilon lets them, and a fourth symbol else.
    That symbol is never sent by the two, so only the pair of them is local_epsilon-DP: a harder
    case than any randomizer.
    """
    lie = share / (math.exp(local_epsilon) + 1)
    neutral = 1 - share
    other = [lie, lie, neutral * math.exp(-local_epsilon)]
    truth = lie * math.exp(local_epsilon)
    return np.array(
        [[truth, lie, neutral, 0], [lie, truth, neutral, 0], [*other, 1 - math.fsum(other)]]
    )


# Golden numbers


@pytest.mark.parametrize(
    ("local_epsilon", "count", "golden"),
    [
        (4.0, 10**5, 0.59),
        (4.0, 10**6, 0.23),
        (4.0, 10**7, 0.077),
        (8.0, 10**6, 1.09),
        (8.0, 10**8, 0.18),
    ],
)
def test_the_closed_form_is_golden(local_epsilon: float, count: int, golden: float) -> None:
    epsilon = closed_form_epsilon(local_epsilon, count, 1e-8)
    assert f"{epsilon:.2g}" == f"{golden:.2g}" or f"{epsilon:.2f}" == f"{golden:.2f}"


def test_where_the_closed_form_does_not_hold_local_epsilon_does() -> None:
    assert closed_form_epsilon(8.0, 10**5, 1e-8) == 8.0
    limit = math.log(10**5 / (16 * math.log(2 / 1e-8)))
    assert closed_form_epsilon(limit * (1 - 1e-9), 10**5, 1e-8) < limit
    assert closed_form_epsilon(limit * (1 + 1e-9), 10**5, 1e-8) == limit * (1 + 1e-9)


CASES = [  # local epsilon, count, delta; published numbers for 2021; all digits of ours
    (4.0, 10**5, 1e-6, 0.1751, "0.1698", "0.1182"),
    (8.0, 10**6, 1e-6, 0.5172, "0.4445", "0.3037"),
    (4.0, 10**6, 1e-6, 0.0502, "0.04931", "0.03428"),
    (4.0, 10**8, 1e-9, 0.00643, "0.006409", "0.004502"),
]


@pytest.mark.parametrize(("local_epsilon", "count", "delta", "published", "old", "new"), CASES)
def test_numerical_epsilons_are_golden_and_at_most_what_was_published(
    local_epsilon: float, count: int, delta: float, published: float, old: str, new: str
) -> None:
    """The published program adds mass that it did not look at, up to delta, and takes wide steps.

    So its numbers (a typing error corrected) are bounds like ours, and larger.
    """
    clones = epsilon_of_2021(local_epsilon, count, delta)
    epsilon = shuffled_epsilon(local_epsilon, count, delta)
    assert f"{clones:.4g}" == old
    assert f"{epsilon:.4g}" == new
    assert epsilon < clones <= published < closed_form_epsilon(local_epsilon, count, delta)


# Against the truth: the pair that is claimed to be the worst


@pytest.mark.parametrize("delta", [0.2, 1e-3, 1e-9])
@pytest.mark.parametrize("count", [1, 2, 7, 60, 400])
@pytest.mark.parametrize("local_epsilon", [0.1, 1.0, 3.0])
def test_epsilon_is_never_below_that_of_the_pair_and_just_above(
    local_epsilon: float, count: int, delta: float
) -> None:
    rates = {2 / (math.exp(local_epsilon) + 1), math.exp(-local_epsilon)}
    for rate in rates:
        epsilon = shuffling.numerical_epsilon(local_epsilon, count, delta, rate)
        lost = delta_of_pair(local_epsilon, count, rate, epsilon)
        assert lost + LEFT_OUT <= delta
        if epsilon > 0:
            assert delta_of_pair(local_epsilon, count, rate, epsilon * JUST_BELOW) > delta


def test_epsilon_of_a_large_fleet_is_that_of_the_pair() -> None:
    epsilon, rate = shuffled_epsilon(4.0, 10**5, 1e-6), 2 / (math.exp(4.0) + 1)
    assert delta_of_pair(4.0, 10**5, rate, epsilon) + LEFT_OUT <= 1e-6
    assert delta_of_pair(4.0, 10**5, rate, epsilon * JUST_BELOW) > 1e-6


def test_one_device_alone_gains_only_from_delta() -> None:
    """Of one report delta = (e^e0 − e^e)/(e^e0 + 1)."""
    expected = math.log(math.exp(2.0) - 0.1 * (math.exp(2.0) + 1))
    assert expected <= shuffled_epsilon(2.0, 1, 0.1) <= expected * (1 + 1e-5)


# Against the truth: whole fleets


cached_epsilon = lru_cache(shuffled_epsilon)  # the same for fleets of one size


def fleets() -> Iterator[tuple[float, int, Law, Law]]:
    """Small fleets of randomized response: local epsilon, count, outcomes for two neighbours."""
    for local_epsilon in (0.5, 1.0, 2.0, 3.0):
        two, four = response(2, local_epsilon), response(4, local_epsilon)
        for count in (1, 2, 3, 5, 8):
            for ones in range(count):  # of the others
                others = [two[0]] * (count - 1 - ones) + [two[1]] * ones
                yield local_epsilon, count, shuffled([two[0], *others]), shuffled([two[1], *others])
        for count in (2, 4, 6):
            others = [four[2 + index % 2] for index in range(count - 1)]
            yield local_epsilon, count, shuffled([four[0], *others]), shuffled([four[1], *others])


FLEETS = list(fleets())
DELTAS = (0.3, 0.1, 0.03, 1e-3)


def test_no_outcome_of_a_small_fleet_shows_more_than_is_said() -> None:
    for (local_epsilon, count, first, second), delta in itertools.product(FLEETS, DELTAS):
        epsilon = cached_epsilon(local_epsilon, count, delta)
        assert true_delta(first, second, epsilon) <= delta * (1 + FLOAT)


def test_half_of_epsilon_would_be_caught_and_so_would_too_many_clones() -> None:
    """The negative control: the test above can fail."""
    half, many = 0, 0
    for (local_epsilon, count, first, second), delta in itertools.product(FLEETS, DELTAS):
        epsilon = cached_epsilon(local_epsilon, count, delta)
        half += true_delta(first, second, epsilon / 2) > delta
        if local_epsilon >= 2 and len(next(iter(first))) == 4:
            rate = 4 / (math.exp(local_epsilon) + 1)
            wrong = shuffling.numerical_epsilon(local_epsilon, count, delta, rate)
            many += true_delta(first, second, wrong) > delta
    assert half > len(FLEETS) * len(DELTAS) / 2
    assert many > 0


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("local_epsilon", [0.5, 2.0, 4.0])
def test_a_symbol_that_says_nothing_does_not_say_more_than_is_said(
    local_epsilon: float, share: float
) -> None:
    """Where the proof of 2023 has its gap: a neutral symbol tells that the others are clones."""
    one, two, other = with_a_neutral_symbol(local_epsilon, share).tolist()
    for count in (2, 5, 12):
        first, second = (
            shuffled([one] + [other] * (count - 1)),
            shuffled([two] + [other] * (count - 1)),
        )
        for delta in DELTAS:
            epsilon = cached_epsilon(local_epsilon, count, delta)
            assert true_delta(first, second, epsilon) <= delta * (1 + FLOAT)


weights = st.floats(-2.0, 2.0)


@settings(max_examples=100, deadline=None)
@given(
    logs=st.lists(st.tuples(weights, weights, weights), min_size=2, max_size=4),
    others=st.lists(st.sampled_from([0, 1, 2]), max_size=4),
    delta=st.sampled_from(DELTAS),
)
def test_no_randomizer_shows_more_than_is_said(
    logs: list[tuple[float, float, float]], others: list[int], delta: float
) -> None:
    """Any table of three values and up to four symbols is a randomizer of some local epsilon."""
    table = np.exp(np.array(logs).T)
    table /= table.sum(axis=1, keepdims=True)
    local_epsilon = float(np.log(table.max(axis=0) / table.min(axis=0)).max())
    local_epsilon = max(local_epsilon, 1e-9) * (1 + FLOAT)
    rows = table.tolist()
    rest = [rows[value] for value in others]
    first, second = shuffled([rows[0], *rest]), shuffled([rows[1], *rest])
    epsilon = shuffled_epsilon(local_epsilon, 1 + len(others), delta)
    assert true_delta(first, second, epsilon) <= delta * (1 + FLOAT) + 1e-15


# How it moves


def test_more_devices_or_a_larger_delta_cost_less() -> None:
    for local_epsilon in (0.5, 8.0):
        by_count = [shuffled_epsilon(local_epsilon, 10**k, 1e-6) for k in range(0, 9, 2)]
        by_delta = [shuffled_epsilon(local_epsilon, 10**5, 10.0**-k) for k in range(13, 0, -3)]
        for epsilons in (by_count, by_delta):
            assert all(before >= after for before, after in itertools.pairwise(epsilons))
            assert epsilons[-1] < epsilons[0] <= local_epsilon


@pytest.mark.parametrize("bound", [shuffled_epsilon, closed_form_epsilon])
@pytest.mark.parametrize("local_epsilon", [1e-300, 1e-9, 1.0, 99.0, 1e6])
def test_epsilon_is_never_above_local_epsilon_nor_below_zero(
    bound: Bound, local_epsilon: float
) -> None:
    for count, delta in itertools.product([1, 1000], [0.0, 5e-324, 1e-100, 1e-6, 1 - 1e-16]):
        assert 0 <= bound(local_epsilon, count, delta) <= local_epsilon
    assert 0 <= bound(local_epsilon, 10**400, 1e-6) <= local_epsilon


def test_without_a_delta_shuffling_promises_nothing_more() -> None:
    assert shuffled_epsilon(1.0, 10**6, 0.0) == 1.0
    assert closed_form_epsilon(1.0, 10**6, 0.0) == 1.0


def test_devices_beyond_a_billion_are_not_counted() -> None:
    assert shuffled_epsilon(8.0, 10**12, 1e-9) == shuffled_epsilon(8.0, 10**9, 1e-9)


# Which way it is rounded


def test_fewer_blocks_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = shuffled_epsilon(4.0, 10**6, 1e-6)
    monkeypatch.setattr(shuffling, "BLOCKS", 20)
    assert fine < shuffled_epsilon(4.0, 10**6, 1e-6) < 1.05 * fine


@pytest.mark.parametrize("count", [10**3, 10**6, 10**9])
def test_binomial_masses_are_right_to_nine_digits(count: int) -> None:
    """And by another digit: a tenth of what is set aside for them."""
    for rate in (0.5, 2 / (math.exp(0.1) + 1), 2 / (math.exp(4) + 1), 2 / (math.exp(8) + 1)):
        stddev = math.sqrt(count * rate * (1 - rate))
        for steps in (-9, -3, 0, 1, 4, 9, 20):
            value = int(count * rate + steps * stddev)
            if 0 <= value <= count:
                exact = mass(value, count, rate)
                assert abs(stats.binom.pmf(value, count, rate) / exact - 1) < 1e-10


@pytest.mark.parametrize("count", [10**3, 10**6, 10**8])
def test_binomial_tails_are_right_to_nine_digits(count: int) -> None:
    """Another digit as above. The sum ends where what is left is less than 1e-13 of it."""
    for steps in (3, 6, 12):
        value = int(count / 2 + steps * math.sqrt(count) / 2)
        ratio = term = 1.0  # of a mass to the first of the tail: ratios fall, so a geometric tail
        total = 0.0
        for above in range(value + 1, count + 1):
            total += term
            ratio = (count - above) / (above + 1)
            term *= ratio
            if term < 1e-13 * (1 - ratio) * total:
                break
        exact = mass(value + 1, count, 0.5) * total
        assert abs(stats.binom.sf(value, count, 0.5) / exact - 1) < 1e-10


def mass(value: int, count: int, rate: float) -> mpmath.mpf:
    """P(Bin(count, rate) = value), to about thirty digits."""
    with mpmath.workdps(50):
        ways = mpmath.loggamma(count + 1) - mpmath.loggamma(value + 1)
        ways -= mpmath.loggamma(count - value + 1)
        chance = mpmath.mpf(rate)
        return mpmath.exp(
            ways + value * mpmath.log(chance) + (count - value) * mpmath.log1p(-chance)
        )


# What cannot be


@pytest.mark.parametrize("bound", [shuffled_epsilon, closed_form_epsilon])
@pytest.mark.parametrize(
    ("local_epsilon", "count", "delta", "message"),
    [
        (0.0, 10, 0.1, "local_epsilon must be above 0 and finite; got 0.0"),
        (-1.0, 10, 0.1, "local_epsilon must be above 0 and finite; got -1.0"),
        (math.inf, 10, 0.1, "local_epsilon must be above 0 and finite; got inf"),
        (math.nan, 10, 0.1, "local_epsilon must be above 0 and finite; got nan"),
        (1.0, 0, 0.1, "count must be a whole number of at least 1; got 0"),
        (1.0, 2.5, 0.1, "count must be a whole number of at least 1; got 2.5"),
        (1.0, math.nan, 0.1, "count must be a whole number of at least 1; got nan"),
        (1.0, 10, -0.1, "delta must be at least 0 and below 1; got -0.1"),
        (1.0, 10, 1.0, "delta must be at least 0 and below 1; got 1.0"),
        (1.0, 10, math.nan, "delta must be at least 0 and below 1; got nan"),
    ],
)
def test_what_cannot_be_is_refused(
    bound: Bound, local_epsilon: float, count: int, delta: float, message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        bound(local_epsilon, count, delta)
    assert str(refused.value) == message

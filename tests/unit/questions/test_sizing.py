"""How large a sketch must be: the formulas of paper 000 and their golden values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from checks import SEED
from sfumato import hashing
from sfumato.errors import SpecError
from sfumato.questions.sizing import (
    PowerLaw,
    Reading,
    ShareLimits,
    Spread,
    failure,
    fit_power_law,
    fresh_bound,
    heterogeneity,
    instance_width,
    largest_spread,
    law_of_pilot,
    majority_collisions,
    minimax_width,
    noise_bound,
    predicted_spread,
    rows_for,
    tail_bound,
    width_for,
    width_for_any,
    width_within,
)
from sfumato.sketch import CountSketch, DecodedRounds, refine


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


def falling(alpha: float, items: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    shares = np.arange(1, items + 1, dtype=np.float64) ** -alpha
    return np.asarray(shares / shares.sum())


# --- the prediction for the refined decoder


@pytest.mark.parametrize(("alpha", "width"), [(1.1, 40), (1.1, 160), (1.5, 40), (2.0, 40)])
def test_the_predicted_spread_is_that_of_placebos(alpha: float, width: int) -> None:
    """Placebos of 6 tables, 16,384 each: within 30%, ten times the deviation of their root mean
    square between tables. An error of plain medians is more than 1.6 times as large."""
    rows, devices, shares = 13, 200_000, falling(alpha, 5_000)
    measured, medians = [], []
    for seed in range(6):
        counts = np.random.default_rng([SEED, seed]).multinomial(devices, shares)
        sketch = CountSketch(rows=rows, width=width, seed=seed)
        rounds = DecodedRounds.of([(sketch, sketch.encode(np.arange(5_000), counts))])
        points = hashing.fingerprint(np.arange(5_000), seed)
        measured.append(np.mean(refine(rounds, points).placebo_errors ** 2))
        medians.append(np.mean(rounds.estimate(rounds.placebos()) ** 2))
    error = math.sqrt(float(np.mean(measured))) / devices
    predicted = predicted_spread(shares, Reading(rows=rows), width=width)
    assert 0.7 < error / predicted.collisions < 1.3
    assert predicted.noise == 0
    assert math.sqrt(float(np.mean(medians))) / devices > 1.6 * predicted.total


def test_fitted_items_have_the_predicted_error_of_least_squares() -> None:
    """140 items of falling counts in 390 cells, and noise: their error is 1.25 times that of a mean
    of 13 readings. 840 errors vary by 2.4%, so 10% is four deviations. Without the cells of fitted
    items the prediction would be 20% too small, and 1/(1 − fitted/cells) 25% too large."""
    rows, width, items, noise = 13, 30, 140, 100.0
    counts = np.rint(1e6 * 0.945 ** np.arange(items)).astype(np.int64)
    chance = np.random.default_rng(SEED)
    errors = []
    for seed in range(6):
        sketch = CountSketch(rows=rows, width=width, seed=seed)
        table = sketch.encode(np.arange(items), counts)
        table = table + np.rint(chance.normal(0, noise, table.shape)).astype(np.int64)
        rounds = DecodedRounds.of([(sketch, table)])
        errors.append(refine(rounds, hashing.fingerprint(np.arange(items), seed)).counts - counts)
    shares, devices = counts / counts.sum(), counts.sum()
    predicted = predicted_spread(shares, Reading(rows=rows, noise=noise / devices), width=width)
    assert predicted.fitted == pytest.approx(items, rel=1e-3)
    assert predicted.total * devices == pytest.approx(
        noise / math.sqrt(rows) / math.sqrt(1 - 140 / 390), rel=1e-3
    )
    assert float(np.sqrt(np.mean(np.square(errors)))) == pytest.approx(
        predicted.total * devices, rel=0.1
    )


@pytest.mark.slow
def test_of_a_few_items_too_many_may_stay_by_chance() -> None:
    """20 items of 5%, and 980 of nothing: only whether all are taken out matters. Tables of the
    width for a risk of 5% are read within the target, those of the width for the mean (a risk of
    half) often not. Of 60, 12 failures or more have a chance of 1e-4 at 5%, and fewer one of 1e-6
    at half."""
    law = np.r_[np.full(20, 0.05), np.zeros(980)]
    spread = largest_spread(0.005, items=1_000, risk=0.05)
    assert spread is not None
    reading = Reading(rows=13, risk=0.05)
    counts, points = np.rint(200_000 * law).astype(np.int64), np.arange(1_000)

    def failures(width: int) -> int:
        missed = 0
        for seed in range(60):
            sketch = CountSketch(rows=13, width=width, seed=seed)
            rounds = DecodedRounds.of([(sketch, sketch.encode(points, counts))])
            read = refine(rounds, hashing.fingerprint(points, seed)).counts
            missed += bool(np.abs(read - counts).max() > 0.005 * 200_000)
        return missed

    assert failures(width_for(law, spread, reading, most=200)) < 12
    assert failures(width_for(law, spread, replace(reading, risk=0.5), most=200)) >= 12


def test_noise_and_collisions_add_up_and_rounds_average_collisions_only() -> None:
    """Hardly an item is peeled where none stands out: 1 in 10,000."""
    shares = np.full(1_000, 0.001)
    one = predicted_spread(shares, Reading(rows=10, noise=0.002), width=50)
    assert math.isclose(one.collisions**2, 0.001 / 500, rel_tol=1e-3)
    assert math.isclose(one.noise**2, 0.002**2 / 10, rel_tol=1e-3)
    assert math.isclose(one.total**2, one.collisions**2 + one.noise**2)
    reading = Reading(rows=10, noise=0.002, rounds=10, gain=10)
    many = predicted_spread(shares, reading, width=50)
    assert math.isclose(many.collisions**2, one.collisions**2 / 10, rel_tol=1e-3)
    assert math.isclose(many.noise, one.noise, rel_tol=1e-3)


def test_a_width_is_the_least_with_its_spread_and_any_data_need_no_more() -> None:
    reading = Reading(rows=13, noise=0.0005, risk=0.05)
    spread = largest_spread(0.005, items=5_000, risk=0.1)
    assert spread is not None
    most = math.ceil(width_for_any(spread, reading))
    for law in (falling(1.1, 5_000), falling(2.0, 5_000), np.full(200, 0.005)):
        width = width_for(law, spread, reading, most=most)
        assert width <= most

        def predict(width: int, law: Any = law) -> Spread:
            return predicted_spread(law, reading, width=width)

        assert predict(width).total <= spread
        assert predict(int(0.98 * width) - 2).total > spread


def test_any_data_of_devices_with_several_items_need_as_much_more() -> None:
    """Five times 295 items of 3.4 deviations, near the size that needs most cells, need more than
    suffices for devices with one item, and not more than suffices for those with five."""
    reading = Reading(rows=13, risk=0.05)
    spread = 0.00113
    one, five = (width_for_any(spread, reading, mass=mass) for mass in (1.0, 5.0))
    needed = width_for(np.full(5 * 295, 1 / 295), spread, reading, most=10_000)
    assert 4 * one < needed <= math.ceil(five)


READING = Reading(rows=13, noise=0.0001, risk=0.05)
SPREAD = 0.00113


def limits_of(shares: Any, *, slack: float = 0.0, largest: float | None = None) -> ShareLimits:
    """Limits that these shares keep, up to `slack` on their squares."""
    squares = float(np.sum(shares**2))
    return ShareLimits(
        mass=1.0,
        devices=10**9,
        squares=((1 - slack) * squares, (1 + slack) * squares),
        cubes=0.0,
        largest=1.1 * float(shares.max()) if largest is None else largest,
        error=1e-6,
        level=0.01,
    )


def test_no_data_within_limits_need_more_than_the_bound_and_some_need_it() -> None:
    """Laws of up to three sizes. For items of one size, with nothing else known but their squares
    and the largest, the bound is what they need (to 5%: steps of widths and of sizes)."""
    chance = np.random.default_rng(SEED)
    anything = width_for_any(SPREAD, READING)
    for _ in range(8):
        numbers = chance.integers(1, 300, size=3)
        shares = np.repeat(chance.dirichlet(np.ones(3)) / numbers, numbers)
        bound = width_within(limits_of(shares, slack=0.05), SPREAD, READING)
        assert width_for(shares, SPREAD, READING, most=1_000) <= math.ceil(bound)
        assert bound <= anything * (1 + 1e-9)
    alike = np.full(200, 0.005)
    bound = width_within(limits_of(alike), SPREAD, READING)
    assert bound == pytest.approx(width_for(alike, SPREAD, READING, most=1_000), rel=0.05)
    assert bound < 0.9 * anything


def test_what_a_sample_leaves_open_makes_the_bound_wider() -> None:
    alike = np.full(200, 0.005)
    exact = limits_of(alike)
    widths = [
        width_within(limits, SPREAD, READING)
        for limits in (
            exact,
            limits_of(alike, slack=0.1),
            limits_of(alike, slack=0.1, largest=0.02),
            limits_of(alike, slack=1.0, largest=1.0),
        )
    ]
    assert widths == sorted(widths)
    assert widths[0] < 0.95 * widths[2] < 0.95 * widths[3]
    assert widths[3] == pytest.approx(width_for_any(SPREAD, READING), rel=0.01)
    cubes = width_within(replace(exact, cubes=20.0), SPREAD, READING)
    assert cubes > widths[0]  # squares are less certain
    absurd = replace(exact, squares=(0.5, 0.6))  # more than shares of at most 0.005 can have
    assert math.isinf(width_within(absurd, SPREAD, READING))
    assert math.isinf(width_within(exact, 0.001, replace(READING, noise=0.1)))


def test_a_share_above_all_readings_is_as_surprising_as_its_reading() -> None:
    limits = replace(limits_of(np.full(200, 0.005)), error=0.001, devices=10_000, largest=0.01)
    deviation = math.hypot(0.001, math.sqrt(limits.most / 10_000))
    assert stats.norm.cdf((0.01 - limits.most) / deviation) == pytest.approx(0.01)
    assert limits.surprise(np.array([limits.most]))[0] == pytest.approx(-math.log(0.01))
    assert limits.surprise(np.array([0.01]))[0] == pytest.approx(math.log(2))


def test_a_failure_is_a_sum_over_items_and_sampling_counts() -> None:
    alone = failure(0.001, 0.005, items=1_000)
    assert math.isclose(alone, 1_000 * 2 * stats.norm.sf(5), rel_tol=1e-12)
    common = failure(0.001, 0.005, items=1_000, sampling=np.array([0.002]))
    assert math.isclose(
        common - alone,
        2 * (stats.norm.sf(0.005 / math.hypot(0.001, 0.002)) - stats.norm.sf(5)),
        rel_tol=1e-9,
    )
    spread = largest_spread(0.005, items=1_000, risk=0.1)
    assert spread is not None
    assert math.isclose(failure(spread, 0.005, items=1_000), 0.1, rel_tol=1e-6)
    assert largest_spread(0.005, items=1_000, risk=0.1, sampling=np.array([0.01])) is None


def test_the_law_of_a_pilot_has_its_largest_shares_and_squares() -> None:
    law = law_of_pilot(np.array([0.1, 0.3, 0.05]), squares=0.004, limit=0.04, items=2_000)
    assert law.size == 2_000
    assert law[:3].tolist() == [0.3, 0.1, 0.05]
    assert np.all(np.diff(law) <= 0)
    assert law[3] <= 0.04
    assert math.isclose(float(np.sum(law[3:] ** 2)), 0.004, rel_tol=1e-6)
    assert law_of_pilot(np.array([0.5]), squares=0.0, limit=0.01, items=10).tolist() == [0.5]
    flat = law_of_pilot(np.array([]), squares=1.0, limit=0.01, items=10)
    assert np.allclose(flat, 0.01)  # no law below the limit has more


# --- bounds of the paper


def test_widths_by_law_grow_as_corollary_2_4_says() -> None:
    """Each width over its rate hardly changes while the target falls a hundredfold."""
    rank, devices = np.arange(1, 1_000_001, dtype=np.float64), 10**9
    laws: dict[str, tuple[Any, Any]] = {
        "2^-i": (2.0 ** -np.minimum(rank, 1_000), lambda t: math.log(1 / t)),
        "i^-2": (rank**-2.0, lambda t: t**-0.5),
        "1/(i log^2 i)": (1 / (rank * np.log(rank + 1) ** 2), lambda t: 1 / (t * math.log(t) ** 2)),
        "flat": (np.full(100_000, 1e-5), None),
    }
    for name, (weights, rate) in laws.items():
        shares = weights / weights.sum()
        widths = [
            instance_width(shares, target, constant=1, devices=devices)
            for target in (1e-2, 1e-3, 1e-4)
        ]
        if rate is None:  # no share reaches the target: below 1/target, and falling with it
            assert all(width <= 1 / t for width, t in zip(widths, (1e-2, 1e-3, 1e-4), strict=True))
            continue
        ratios = [width / rate(t) for width, t in zip(widths, (1e-2, 1e-3, 1e-4), strict=True)]
        assert max(ratios) < 1.6 * min(ratios), name


def test_bounds_fall_with_the_tail_and_hybrid_is_never_above_shared() -> None:
    rng = np.random.default_rng(SEED)
    rounds = rng.dirichlet(np.full(300, 0.2), size=10)
    mean = rounds.mean(axis=0)
    sizes: Any = {"rows": 9, "width": 40, "risk": 0.01}
    vector = heterogeneity(rounds)
    assert np.all(vector <= mean + 1e-15)
    assert tail_bound(vector, **sizes) <= tail_bound(mean, **sizes)
    alike = np.tile(mean, (10, 1))
    assert np.allclose(heterogeneity(alike), mean / math.sqrt(10))
    gain = tail_bound(mean, **sizes) / tail_bound(heterogeneity(alike), **sizes)
    assert gain == pytest.approx(math.sqrt(10))
    ratio = fresh_bound(rounds, **sizes) / tail_bound(vector, **sizes)
    assert ratio == pytest.approx(math.sqrt(math.log(10 / 0.01)))
    with pytest.raises(SpecError, match="rows"):
        tail_bound(mean, rows=2, width=40, risk=0.01)


def test_errors_of_hybrid_rounds_follow_the_tail_of_f_and_those_of_shared_rounds_do_not() -> None:
    """Theorem 3.2: ten rounds that are alike, or with items of their own. Both have the same counts
    in all, so that Shared has the same error, but F is √10 times as large in the second. Largest
    errors of 1,000 items, 90% of 20 sketches: such quantiles vary by 20%, so a factor 2 is three
    deviations of a ratio of two; the control, Shared's ratio of 1, is outside."""
    shares, rounds, rows, width = falling(1.3, 1_000), 10, rows_for(1_000), 50
    counts, items = np.rint(100_000 * shares).astype(np.int64), np.arange(1_000)
    alike = np.tile(counts, (rounds, 1))
    own = np.where(np.arange(rounds)[:, None] == items % rounds, rounds * counts, 0)
    sizes: Any = {"rows": rows, "width": width, "risk": 0.1 / 1_000}
    bounds = [tail_bound(heterogeneity(each / each.sum()), **sizes) for each in (own, alike)]
    assert bounds[0] / bounds[1] == pytest.approx(math.sqrt(10))

    def error(cohorts: Any, is_hybrid: bool) -> float:
        largest = []
        for seed in range(20):
            tables = []
            for number, cohort in enumerate(cohorts):
                sign = number if is_hybrid else 0
                sketch = CountSketch(rows=rows, width=width, seed=seed, sign_round=sign)
                tables.append((sketch, sketch.encode(items, cohort)))
            estimates = DecodedRounds.of(tables).estimate(tables[0][0].points(items))
            largest.append(np.abs(estimates - cohorts.sum(axis=0)).max())
        return float(np.quantile(largest, 0.9))

    assert 0.5 < error(own, True) / error(alike, True) / math.sqrt(10) < 2
    assert error(own, False) == error(alike, False)


def test_errors_of_medians_fall_with_the_width_as_the_bound_of_corollary_2_2_does() -> None:
    """The largest of 2,000 errors, in 90% of 20 sketches, is about 15 times the bound with constant
    1, at every width, while the bound falls 38 times. Quantiles of 20 runs vary by 20%, so a factor
    2 is three deviations of a ratio of two; a bound in width^-1/2 alone would be off by 9."""
    shares = falling(1.3, 2_000)
    counts = np.rint(1_000_000 * shares).astype(np.int64)
    items, rows = np.arange(2_000), rows_for(2_000)
    bounds, errors = [], []
    for width in (25, 400):
        bounds.append(tail_bound(shares, rows=rows, width=width, risk=0.1 / 2_000))
        sketches = [CountSketch(rows=rows, width=width, seed=seed) for seed in range(20)]
        largest = [
            np.abs(each.estimate(each.encode(items, counts), items) - counts).max()
            for each in sketches
        ]
        errors.append(float(np.quantile(largest, 0.9)) / counts.sum())
    assert bounds[0] / bounds[1] > 35
    assert 0.5 < (errors[0] / errors[1]) / (bounds[0] / bounds[1]) < 2


def test_more_rounds_of_as_many_devices_have_more_noise_and_fewer_collisions() -> None:
    """Section 4's remark: N fixed, M rises; and n fixed, both fall."""
    keys: Any = {"items": 1_000, "risk": 0.1, "epsilon": 1.0, "delta": 1e-6}
    shares = falling(1.1, 1_000)
    fixed = [noise_bound(**keys, cohort=100_000 // m, rounds=m) for m in (1, 10, 100)]
    assert np.allclose(np.array(fixed) / fixed[0], [1, math.sqrt(10), 10])
    growing = [noise_bound(**keys, cohort=1_000, rounds=m) for m in (1, 10, 100)]
    assert np.allclose(np.array(growing) / growing[0], [1, 1 / math.sqrt(10), 0.1])
    tails = [
        tail_bound(heterogeneity(np.tile(shares, (m, 1))), rows=10, width=40, risk=0.1)
        for m in (1, 10, 100)
    ]
    assert np.allclose(np.array(tails) / tails[0], [1, 1 / math.sqrt(10), 0.1])

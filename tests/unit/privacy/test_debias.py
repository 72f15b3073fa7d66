"""From tallies to counts: errors as stated, intervals that cover, thresholds that hold.

Populations fall off like rank^-1.2 and are small enough for collisions to matter: with 64 rows of
56 cells and 200,000 devices they bring 60 times the variance of the coins.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED, assert_mean
from marks import quick
from sfumato.errors import SpecError
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    SeededRng,
    Tally,
    debias,
)
from sfumato.privacy.debias import Null

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

Z95 = 1.959964
DEVICES, ITEMS, RUNS = 200_000, 300, 40


def sized(rows: int) -> dict[str, Any]:
    return {
        "count mean": CountMeanSketch(epsilon=4.0, rows=rows, width=64, seed=1),
        "optimal flips": CountMeanSketch(epsilon=4.0, rows=rows, width=64, seed=1, flips="optimal"),
        "hadamard": HadamardCountMeanSketch(epsilon=4.0, rows=rows, width=64, seed=1),
        "hashed": HashedResponse(epsilon=4.0, rows=rows, width=56, seed=1),
        "direct": DirectResponse(epsilon=4.0, categories=ITEMS),
    }


NAMES = list(sized(1))
HASHED = [name for name in NAMES if name != "direct"]


def zipf(devices: int, items: int) -> I64:
    """Whole counts that fall off like rank^-1.2 and add up."""
    shares = np.arange(1, items + 1) ** -1.2
    counts: I64 = np.floor(devices * shares / shares.sum()).astype(np.int64)
    counts[0] += devices - counts.sum()
    return counts


def tallied(randomizer: Any, counts: I64, run: int) -> tuple[Tally, npt.NDArray[Any]]:
    """The tally of devices with these items, under the hash functions of this run."""
    one = randomizer if isinstance(randomizer, DirectResponse) else replace(randomizer, seed=run)
    values = one.values(np.arange(counts.size))
    tally = Tally(one)
    tally.fold(one.randomize(np.repeat(values, counts), rng=SeededRng(SEED, run)))
    return tally, values


@dataclass(frozen=True)
class ErrorSamples:
    """The errors of many runs, (runs, items)."""

    errors: F64
    standard_errors: F64
    unlisted_errors: F64
    unlisted_standard_errors: F64
    solved: float

    @property
    def deviations(self) -> F64:
        return self.errors / self.standard_errors

    @property
    def coverage(self) -> float:
        return float(np.mean(np.abs(self.deviations) <= Z95))


def error_samples(
    randomizer: Any, counts: I64, listed: int, *, collision_aware: bool, runs: int, first: int = 0
) -> ErrorSamples:
    """Estimates of the first `listed` items, over runs with hash functions of their own."""
    parts, solved = [], 0.0
    for run in range(first, first + runs):
        tally, values = tallied(randomizer, counts, run)
        estimates = debias.estimate(tally, values[:listed], collision_aware=collision_aware)
        unlisted = estimates.unlisted - float(counts[listed:].sum())
        parts.append(
            (
                estimates.counts - counts[:listed],
                estimates.standard_error,
                unlisted,
                estimates.unlisted_error,
            )
        )
        if match := re.search(r"solved for ([\d,]+)", estimates.decoder):
            solved += int(match[1].replace(",", "")) / runs
    errors, standard, unlisted_errors, unlisted_standard = (
        np.array(x) for x in zip(*parts, strict=True)
    )
    return ErrorSamples(errors, standard, unlisted_errors, unlisted_standard, solved)


UNLISTED = np.array([30_000, 20_000, 10_000])


@cache
def complete(name: str, collision_aware: bool) -> ErrorSamples:
    """A dictionary that lists everything. Collision-aware with 64 rows; plain with 512, since with
    64 an item collides with the most common one once or twice, which no normal interval
    describes."""
    randomizer = sized(64 if collision_aware else 512)[name]
    return error_samples(
        randomizer, zipf(DEVICES, ITEMS), ITEMS, collision_aware=collision_aware, runs=RUNS
    )


@cache
def with_unlisted(name: str) -> ErrorSamples:
    """30% of the devices hold one of three items that nobody listed."""
    counts = np.r_[zipf(DEVICES - int(UNLISTED.sum()), ITEMS), UNLISTED]
    return error_samples(sized(256)[name], counts, ITEMS, collision_aware=True, runs=RUNS)


def assert_covers(deviations: F64) -> None:
    """95% of the intervals hold the truth, give or take 1%.

    With 12,000 intervals 1% is five standard errors (0.2%; errors of items in one run are all but
    independent), so the false alarm is 6e-7. Power: intervals that are 10% too narrow cover 92.2%
    and are missed with probability below 1e-12; 6% (93.5%), below 1e-2."""
    share = float(np.mean(np.abs(deviations) <= Z95))
    assert deviations.size >= 12_000
    assert 0.94 <= share <= 0.96, f"coverage {share:.4f}"


# Intervals


@pytest.mark.parametrize("collision_aware", [True, False], ids=["aware", "plain"])
@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_intervals_cover(name: str, collision_aware: bool) -> None:
    assert_covers(complete(name, collision_aware).deviations)


@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_intervals_cover_when_three_devices_in_ten_hold_what_is_not_listed(name: str) -> None:
    assert_covers(with_unlisted(name).deviations)


def test_intervals_ten_per_cent_too_narrow_are_caught() -> None:
    """The negative control."""
    for name in ("hashed", "direct"):
        with pytest.raises(AssertionError, match="coverage"):
            assert_covers(complete(name, True).deviations / 0.9)


def test_intervals_without_collisions_are_caught() -> None:
    """The negative control: the coins' error alone, around the paper's plain means."""
    result = complete("hashed", False)
    alone = debias.variance(sized(512)["hashed"], count=DEVICES, holders=0.0, squares=0.0)
    with pytest.raises(AssertionError, match="coverage"):
        assert_covers(result.errors / math.sqrt(alone))


@pytest.mark.parametrize("collision_aware", [True, False], ids=["aware", "plain"])
@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_standard_errors_are_as_large_as_errors(name: str, collision_aware: bool) -> None:
    """Within 5%, which is seven standard errors of a root mean square of 12,000 (0.65%; 0.9% with
    the fourth moments of collisions). Power: 10% off is missed with probability below 1e-6."""
    size = math.sqrt(float(np.mean(complete(name, collision_aware).deviations ** 2)))
    assert size == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", quick(HASHED, "hashed"))
def test_the_formula_predicts_the_plain_estimate_s_error(name: str) -> None:
    """Within 5%, from the true counts. False alarm and power: as above."""
    counts = zipf(DEVICES, ITEMS).astype(np.float64)
    others = float(np.sum(counts**2)) - counts**2
    stated = debias.variance(sized(512)[name], count=DEVICES, holders=counts, squares=others)
    size = math.sqrt(float(np.mean(complete(name, False).errors ** 2 / stated)))
    assert size == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_the_error_of_what_is_not_listed_covers(name: str) -> None:
    """False alarm 1e-6 (chi-square over 40 runs: errors are 1.57 times as large as stated). Power:
    errors stated 2.4 times too small are missed with probability 5e-4, 3 times, with 1e-6."""
    for result in (complete(name, True), complete(name, False), with_unlisted(name)):
        deviations = result.unlisted_errors / result.unlisted_standard_errors
        assert float(np.sum(deviations**2)) <= stats.chi2.isf(1e-6, RUNS)


@pytest.mark.slow
def test_a_few_listed_items_are_not_sure_of_themselves_beside_a_common_one_that_is_not_listed() -> (
    None
):
    """30 rare items, and one that nobody listed with 30% of the devices. Its collisions bring nine
    times the coins' variance and must be in the error, though the listed counts do not show it.

    False alarm below 1e-6: of 3000 intervals at 95%, 92% is seven standard errors away.
    """
    counts = np.r_[np.full(30, 100), 60_000, np.full(1370, 100)]
    result = error_samples(sized(512)["hashed"], counts, 30, collision_aware=True, runs=100)
    assert result.coverage >= 0.92


@pytest.mark.parametrize("items", [300, 5000])
def test_plain_errors_do_not_grow_with_the_dictionary(items: int) -> None:
    """The squares of estimates hold the collisions' variance, too: over many items it adds up, and
    must not be taken for counts. Within 10%; false alarm below 1e-6 (the root mean square of 9,000
    or more deviations is known to 1%)."""
    runs = 9000 // items + 2
    counts = zipf(DEVICES, items)
    result = error_samples(
        sized(64)["hashed"], counts, items, collision_aware=False, runs=max(runs, 6), first=500
    )
    size = math.sqrt(float(np.mean(result.deviations**2)))
    assert size == pytest.approx(1.0, abs=0.1)


def test_an_item_s_own_devices_are_not_taken_for_others_that_it_meets() -> None:
    """The most common item has the fewest collisions: by the formula its error is 1.4 times smaller
    than a rare item's, and the stated one must be within 10% of the formula's."""
    counts = zipf(DEVICES, ITEMS).astype(np.float64)
    others = float(np.sum(counts**2)) - counts**2
    stated = debias.variance(sized(512)["hashed"], count=DEVICES, holders=counts, squares=others)
    claimed = np.sqrt(np.mean(complete("hashed", False).standard_errors ** 2, axis=0))
    assert claimed[0] / math.sqrt(stated[0]) == pytest.approx(1.0, abs=0.1)


# Bias


@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_plain_estimates_are_unbiased(name: str) -> None:
    """Each item's mean over 40 runs: false alarm 1e-6 in all. Power: in one item, a bias of one
    standard error is missed with probability 0.34, one of 1.6 with probability below 1e-4."""
    result = complete(name, False)
    counts = zipf(DEVICES, ITEMS).astype(np.float64)
    others = float(np.sum(counts**2)) - counts**2
    stated = debias.variance(
        sized(512)[name],
        count=DEVICES,
        holders=counts,
        squares=0 * others if name == "direct" else others,
    )
    for item in range(ITEMS):
        deviations = result.errors[:, item] / math.sqrt(stated[item])
        assert_mean(deviations, 0.0, 1.0, false_alarm=1e-6 / ITEMS)


@pytest.mark.parametrize("name", quick(HASHED, "hashed"))
def test_collisions_solved_for_leave_no_bias(name: str) -> None:
    """150 items, all of them solved for. False alarm 1e-6 in all; power as above."""
    counts = zipf(DEVICES, 150)
    result = error_samples(sized(64)[name], counts, 150, collision_aware=True, runs=25, first=1000)
    assert result.solved == 150
    for item in range(150):
        assert_mean(result.deviations[:, item], 0.0, 1.0, false_alarm=1e-6 / 150)
    assert_mean(result.deviations, 0.0, together(150))


@pytest.mark.parametrize("name", quick(HASHED, "hashed"))
def test_items_not_solved_for_are_low_by_a_tenth_of_their_error_at_most(name: str) -> None:
    """Solving absorbs a little of the other counts: about solved/cells of them. False alarm 6e-7:
    five standard errors (0.02) beyond that tenth."""
    result = complete(name, True)
    rare = result.deviations[:, int(result.solved) :]
    allowed = 5 * together(ITEMS) / math.sqrt(rare.size)
    assert -0.1 - allowed <= float(rare.mean()) <= allowed


def together(items: int) -> float:
    """How much more the mean over items of a run varies than that of independent ones: two items
    share a cell of a row, and its error, once in `width` rows; 1.05 for what solving adds."""
    return 1.05 * math.sqrt(1 + items / 56)


# Accuracy


@pytest.mark.slow
def test_solving_for_collisions_is_near_the_optimum_where_plain_means_are_far_from_it() -> None:
    """1024 rows of 56 cells, a thousand items, a million devices. The mean square over 8 runs of
    800 rare items is known to 1.8%: aware 1.00 by the formula (1.02 with what solving adds), and
    1.08 is three standard errors or more above; plain 17, and 10 is 20 below."""
    randomizer = HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1)
    counts = zipf(1_000_000, 1000)
    optimal = debias.optimal_variance(4.0) * counts.sum()
    ratios = {}
    for collision_aware in (True, False):
        result = error_samples(
            randomizer, counts, 1000, collision_aware=collision_aware, runs=8, first=2000
        )
        ratios[collision_aware] = float(np.mean(result.errors[:, 200:] ** 2)) / optimal
    assert ratios[True] < 1.08
    assert ratios[False] > 10


@pytest.mark.parametrize(("epsilon", "golden"), [(1.0, "3.6827"), (2.0, "0.7241"), (4.0, "0.0760")])
def test_the_optimum_is_the_known_one_and_is_reached(epsilon: float, golden: str) -> None:
    """By a hashed response of e^epsilon + 1 cells, whole: within 0.5%, which is what rounding
    e^1 + 1 = 3.72 to 4 costs."""
    assert f"{debias.optimal_variance(epsilon):.4f}" == golden
    width = round(math.exp(epsilon)) + 1
    response = HashedResponse(epsilon=epsilon, rows=1 << 20, width=width, seed=1)
    alone = debias.variance(response, count=1.0, holders=0.0, squares=0.0)
    assert 1 - 1e-5 < alone / debias.optimal_variance(epsilon) < 1.005


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (4, 8), (1024, 64)])
def test_the_variance_is_the_paper_s_set_right(epsilon: float, rows: int, width: int) -> None:
    """DIGEST 5A, "Exact": the same numbers from formulas that were written down independently."""
    n, k, m = 1000.0, rows, width
    holders = np.array([0.0, 10.0, 300.0])
    squares = np.array([5e5, 4e5, 1e5])
    c = (math.exp(epsilon / 2) + 1) / (math.exp(epsilon / 2) - 1)
    paper = (m / (m - 1)) ** 2 * (
        n * (c**2 - 1) / 4
        + (n - holders) / m * (1 - 1 / m - 1 / k + 1 / (k * m))
        + (1 / (k * m) - 1 / (k * m**2)) * squares
    )
    sketch = CountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=1)
    variance = debias.variance(sketch, count=n, holders=holders, squares=squares)
    assert np.allclose(variance, paper, rtol=1e-12)
    c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
    paper = (m / (m - 1)) ** 2 * (
        n * c**2
        - holders
        - (n - holders) / m**2
        + (1 / k) * (1 / m - 1 / m**2) * (squares - (n - holders))
    )
    hadamard = HadamardCountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=1)
    variance = debias.variance(hadamard, count=n, holders=holders, squares=squares)
    assert np.allclose(variance, paper, rtol=1e-12)


# Significance


NULL_RUNS = 400


def null_runs(name: str, level: float) -> int:
    """How many of 400 runs list an item although nobody holds it: 100 such items, and devices with
    20,000 others, one each."""
    randomizer = (
        DirectResponse(epsilon=4.0, categories=100) if name == "direct" else sized(256)[name]
    )
    counts = np.r_[np.zeros(100, dtype=np.int64), np.ones(20_000, dtype=np.int64)]
    alarms = 0
    for run in range(NULL_RUNS):
        tally, values = tallied(randomizer, counts, 3000 + run)
        estimates = debias.estimate(tally, values[:100])
        alarms += bool(estimates.significant(level=level).any())
    return alarms


@pytest.mark.parametrize("name", quick(NAMES, "hashed", "direct"))
def test_family_wise_a_false_item_is_as_rare_as_stated(name: str) -> None:
    """At most 5%: false alarm 1e-6 (exact binomial). Power: 15% is missed with probability 0.013,
    20% with probability 1e-6."""
    alarms = null_runs(name, 0.05)
    assert float(stats.binom.sf(alarms - 1, NULL_RUNS, 0.05)) >= 1e-6, f"{alarms} alarms"


def test_a_level_four_times_as_high_is_caught() -> None:
    """The negative control: 20% where 5% is stated."""
    alarms = null_runs("hashed", 0.20)
    assert float(stats.binom.sf(alarms - 1, NULL_RUNS, 0.05)) < 1e-6


@pytest.mark.parametrize("name", quick(HASHED, "hashed"))
def test_items_that_meet_common_ones_are_listed_no_more_often(name: str) -> None:
    """100 items that nobody holds among 200 that fall off like rank^-1.2, in 512 rows: at most 5%
    of 60 runs have a false one. False alarm 1e-6 (exact binomial): 15 runs or more. Power: 50% is
    missed with probability below 1e-4."""
    counts = np.r_[zipf(DEVICES, 200), np.zeros(100, dtype=np.int64)]
    alarms = 0
    for run in range(60):
        tally, values = tallied(sized(512)[name], counts, 4000 + run)
        alarms += bool(debias.estimate(tally, values).significant()[200:].any())
    assert float(stats.binom.sf(alarms - 1, 60, 0.05)) >= 1e-6, f"{alarms} alarms"


@pytest.mark.parametrize("items", [1, 100, 10**6])
@pytest.mark.parametrize("support", [0.5, 1 / 56, 1e-4])
@pytest.mark.parametrize("records", [3, 10, 1000, 10**6])
def test_the_threshold_is_the_least_that_chance_reaches_as_rarely_as_stated(
    records: int, support: float, items: int
) -> None:
    """Against scipy's exact binomial; where even all records together prove nothing, nothing is
    significant."""
    mean, deviation = records * support, math.sqrt(records * support * (1 - support))
    null = Null(deviation, records, support)
    least = mean + null.threshold(items)  # in records, as the error is one deviation
    assert stats.binom.sf(math.ceil(least) - 1, records, support) <= 0.05 / items * (1 + 1e-9)
    if least <= records:
        assert stats.binom.sf(math.ceil(least) - 2, records, support) > 0.05 / items * (1 - 1e-9)


def test_without_records_the_threshold_is_the_normal_one() -> None:
    for items in (1, 1000):
        expected = 3.0 * stats.norm.isf(0.01 / items)
        assert Null(3.0).threshold(items, 0.01) == pytest.approx(expected, rel=1e-9)
    many = Null(3.0, 10**9, 0.5)
    assert many.threshold(100) == pytest.approx(Null(3.0).threshold(100), rel=1e-4)


@pytest.mark.parametrize("null", [Null(2.0), Null(2.0, 5000, 0.02)], ids=["normal", "binomial"])
def test_chances_fall_with_the_count_and_are_those_of_the_law(null: Null) -> None:
    counts = np.linspace(-8, 30, 400)
    chances = null.chances(counts)
    assert (np.diff(chances) <= 0).all()
    assert ((chances >= 0) & (chances <= 1)).all()
    if math.isinf(null.records):
        assert np.allclose(chances, stats.norm.sf(counts / 2.0), rtol=1e-12)
    else:
        spoke = np.round(100 + counts / 2.0 * math.sqrt(98))
        assert np.allclose(chances, stats.binom.sf(spoke - 1, 5000, 0.02), rtol=1e-9)


def benjamini_hochberg(chances: F64, level: float) -> Bool:
    """Straight from the paper: the largest k with the k-th smallest at most level·k/n; all up to
    that size are listed."""
    ordered = sorted(chances.tolist())
    bars = [level * (k + 1) / len(ordered) for k in range(len(ordered))]
    passed = [p for p, bar in zip(ordered, bars, strict=True) if p <= bar]
    return chances <= (max(passed) if passed else -1.0)


@pytest.mark.parametrize("null", [Null(1.0), Null(1.0, 5000, 0.02)], ids=["normal", "binomial"])
@pytest.mark.parametrize("items", [1, 2, 50, 1000])
def test_false_discoveries_are_found_as_benjamini_and_hochberg_do(items: int, null: Null) -> None:
    rng = np.random.default_rng([SEED, items])
    for share in (0.0, 0.1, 1.0):
        counts = rng.normal(0, 1, items) + 4.0 * (rng.random(items) < share)
        for level in (0.01, 0.05, 0.5):
            discoveries = debias.significant(counts, null, level=level, rule="false discovery")
            assert np.array_equal(discoveries, benjamini_hochberg(null.chances(counts), level))


def test_false_discoveries_are_a_twentieth_on_average() -> None:
    """200 items, 40 of them true at 4 deviations: the expected share is 0.05·160/200 = 4%. False
    alarm 1e-6. Power: 6% is missed with probability below 1e-6."""
    rng = np.random.default_rng(SEED)
    shares = []
    for _ in range(2000):
        counts = rng.normal(0, 1, 200)
        counts[:40] += 4.0
        discoveries = debias.significant(counts, Null(1.0), rule="false discovery")
        shares.append(discoveries[40:].sum() / max(int(discoveries.sum()), 1))
    assert_mean(shares, 0.04, float(np.std(shares)))


def test_significance_is_the_threshold_s() -> None:
    null = Null(2.0)
    counts = np.array([-50.0, 0.0, null.threshold(4) - 1e-6, null.threshold(4) + 1e-6])
    assert debias.significant(counts, null).tolist() == [False, False, False, True]
    assert debias.significant(np.empty(0), null).shape == (0,)
    assert debias.significant(np.empty(0), null, rule="false discovery").shape == (0,)
    for level in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(SpecError, match="level must be"):
            debias.significant(counts, null, level=level)


# Consistency


@pytest.mark.parametrize("size", [1, 2, 30, 2000])
def test_both_ways_to_consistency_agree(size: int) -> None:
    rng = np.random.default_rng([SEED, size])
    for scale in (0.1, 100.0, 1e6):
        for total in (1e-3, 1000.0, 1e9):
            counts = rng.normal(total / size, scale, size)
            before = counts.copy()
            first = debias.consistent(counts, total)
            second = debias.consistent(counts, total, rule="simplex")
            close = 1e-9 * (total + scale * size)  # float error of a sum of so much
            assert np.allclose(first, second, rtol=0, atol=close)
            for projection in (first, second):
                assert (projection >= 0).all()
                assert float(projection.sum()) == pytest.approx(total, abs=close)
            assert np.array_equal(counts, before)


def test_consistent_counts_are_the_nearest() -> None:
    """The projection: no other point of the simplex is nearer. Every positive count loses the same
    amount, and none that is zero would have kept anything."""
    rng = np.random.default_rng(SEED)
    counts = rng.normal(5, 30, 200)
    projection = debias.consistent(counts, 1000.0)
    lost = counts - projection
    shift = float(lost[projection > 0].mean())
    assert np.allclose(lost[projection > 0], shift, atol=1e-9)
    assert (counts[projection == 0] <= shift + 1e-9).all()
    for _ in range(200):
        other = rng.dirichlet(np.ones(200)) * 1000.0
        assert np.sum((other - counts) ** 2) >= np.sum((projection - counts) ** 2)


@pytest.mark.parametrize("rule", ["norm_sub", "simplex"])
def test_counts_that_are_consistent_stay_as_they_are(rule: Any) -> None:
    counts = np.array([5.0, 0.0, 15.0])
    assert np.allclose(debias.consistent(counts, 20.0, rule=rule), counts)
    assert debias.consistent(np.array([-3.0]), 7.0, rule=rule).tolist() == [7.0]


@pytest.mark.parametrize("total", [0.0, -5.0, math.nan])
def test_a_total_must_be_above_zero(total: float) -> None:
    with pytest.raises(SpecError, match="total must be above 0"):
        debias.consistent(np.array([1.0, 2.0]), total)


@pytest.mark.parametrize("rule", ["norm_sub", "simplex"])
def test_no_counts_at_all_are_refused_in_words(rule: Any) -> None:
    with pytest.raises(SpecError):
        debias.consistent(np.empty(0), 10.0, rule=rule)


# Estimates


@pytest.mark.parametrize("name", NAMES)
def test_a_tally_without_records_is_refused(name: str) -> None:
    randomizer = sized(4)[name]
    with pytest.raises(SpecError, match="no record"):
        debias.estimate(Tally(randomizer), randomizer.values(np.arange(3)))


@pytest.mark.parametrize("collision_aware", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_asking_about_nothing_gives_nothing(name: str, collision_aware: bool) -> None:
    tally, values = tallied(sized(8)[name], np.array([50, 50]), 1)
    estimates = debias.estimate(tally, values[:0], collision_aware=collision_aware)
    assert estimates.counts.shape == estimates.standard_error.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tally_gives_the_same_estimates_and_is_not_changed(name: str) -> None:
    tally, values = tallied(sized(16)[name], zipf(20_000, 50), 1)
    before = tally.cells.copy(), tally.row_counts.copy(), values.copy()
    first, second = (debias.estimate(tally, values) for _ in range(2))
    assert np.array_equal(first.counts, second.counts)
    assert np.array_equal(first.standard_error, second.standard_error)
    for copy, now in zip(before, (tally.cells, tally.row_counts, values), strict=True):
        assert np.array_equal(copy, now)


@pytest.mark.parametrize("name", HASHED)
def test_the_order_of_the_dictionary_does_not_matter(name: str) -> None:
    """All 100 items are solved for, to a millionth of the readings."""
    tally, values = tallied(sized(64)[name], zipf(DEVICES, 100), 1)
    order = np.random.default_rng(SEED).permutation(100)
    first, second = debias.estimate(tally, values), debias.estimate(tally, values[order])
    assert np.allclose(first.counts[order], second.counts, rtol=0, atol=1e-4 * DEVICES**0.5)


@pytest.mark.parametrize("name", HASHED)
def test_an_item_listed_twice_is_refused_or_counted_twice(name: str) -> None:
    """Not shared out between its two places. Half of a count would be 100 standard errors away."""
    tally, values = tallied(sized(64)[name], np.array([100_000, 50_000, 50_000]), 1)
    try:
        estimates = debias.estimate(tally, values[[0, 1, 2, 0]])
    except SpecError:
        return
    assert np.allclose(
        estimates.counts, [1e5, 5e4, 5e4, 1e5], atol=6 * estimates.standard_error.max()
    )


def test_categories_that_were_not_asked_about_are_unlisted() -> None:
    """`unlisted` is every device whose item is not asked about: false alarm 2e-9, six errors."""
    tally, values = tallied(DirectResponse(epsilon=4.0, categories=5), np.full(5, 20_000), 1)
    estimates = debias.estimate(tally, values[:2])
    assert estimates.unlisted == pytest.approx(60_000, abs=6 * estimates.unlisted_error)


def test_small_errors_are_not_claimed_of_small_tallies() -> None:
    """One record: errors are as large as readings, and nothing is significant."""
    for name in NAMES:
        tally, values = tallied(sized(8)[name], np.array([1, 0, 0, 0, 0]), 1)
        estimates = debias.estimate(tally, values)
        assert np.isfinite(estimates.counts).all()
        assert (estimates.standard_error > 0).all()
        assert not estimates.significant().any()


def test_estimates_print_no_counts() -> None:
    tally, values = tallied(sized(8)["hashed"], np.array([500, 300]), 1)
    assert "500" not in repr(tally)
    assert "counts" not in repr(debias.estimate(tally, values))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_intervals_cover_over_many_more_runs(name: str) -> None:
    """300 runs of 300 intervals: 0.5% is seven standard errors for independent ones, and five with
    the little that items of a run have in common. Aware, with and without unlisted items."""
    counts = zipf(DEVICES, ITEMS)
    outside = np.r_[zipf(DEVICES - int(UNLISTED.sum()), ITEMS), UNLISTED]
    for population in (counts, outside):
        result = error_samples(
            sized(512)[name], population, ITEMS, collision_aware=True, runs=300, first=5000
        )
        assert 0.945 <= result.coverage <= 0.955


def ratio_of_few(oracle: HashedResponse, *, as_before: bool = False) -> float:
    """Mean square of 36 records' estimates of items that nobody holds, relative to the stated
    variance. `as_before`: as if all rows had records, and 140 items were few among their cells."""
    items = oracle.values([f"item {place}" for place in range(140)])
    ratios = []
    for run in range(60):
        tally = Tally(oracle)
        tally.fold(oracle.randomize(items[:36], rng=SeededRng(SEED, run)))
        estimates = debias.estimate(tally, items)
        claimed_error = estimates.null_error[40:]
        if as_before:
            cells = oracle.width / np.sum((tally.row_counts / tally.count) ** 2)
            claimed_error = claimed_error * math.sqrt(
                (1 - 140 / cells) / (1 - 140 / tally.cells.size)
            )
        ratios.append(np.mean((estimates.counts[40:] / claimed_error) ** 2))
    return float(np.mean(ratios))


@pytest.mark.slow
def test_items_that_no_longer_stand_out_once_solved_for_stay_solved_for() -> None:
    """A second pass may select none of the items that the first one solved for, or in another
    order; the solution still belongs to them."""
    oracle = HashedResponse(epsilon=3.6, rows=147, width=38, seed=SEED)
    items = oracle.values([f"item {place}" for place in range(140)])
    solved = 0
    for run in range(300):
        tally = Tally(oracle)
        tally.fold(oracle.randomize(items[:36], rng=SeededRng(SEED, run)))
        estimates = debias.estimate(tally, items)
        assert np.isfinite(estimates.counts).all()
        assert (estimates.standard_error > 0).all()
        solved += "solved for 0 items" not in estimates.decoder
    assert 10 < solved < 300  # both cases occurred


def test_few_records_are_not_solved_for_more_items_than_they_tell_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """36 records fill 36 of 1,120 rows, so they distinguish at most 180 cells.

    False alarm: 60 runs have a mean square of 1 with a deviation of about .05 (items of a run err
    together), so 1.5 is beyond chance. The control solves for all 140 items, as was done when all
    rows were counted.
    """
    oracle = HashedResponse(epsilon=1.3, rows=1_120, width=5, seed=SEED)
    assert 0.5 < ratio_of_few(oracle) < 1.5
    monkeypatch.setattr(debias, "MOST", 1.0)
    assert ratio_of_few(oracle, as_before=True) > 3

"""The refined decoder against the median: better where it may be, never much worse, honest errors.

Each comparison is of the largest error over the dictionary (l-infinity), as a mean over three
seeds. The full table, over real data too, is a benchmark.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED, assert_binomial
from sfumato.privacy import SeededRng, discrete_gaussian
from sfumato.sketch import CountSketch, DecodedRounds, refine

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Kind = Literal["shared", "hybrid", "fresh"]

ITEMS, DEVICES, ROUNDS, ROWS, SEEDS = 20_000, 100_000, 10, 5, 5
NOISE = 9.45  # epsilon 1 at delta 1e-6 for five rows
LAWS, WIDTHS, KINDS = (1.1, 2.0, 5.0), (50, 200), ("shared", "hybrid", "fresh")
EVERY = list(itertools.product(LAWS, WIDTHS, KINDS))


def quick(*cases: tuple[float, int, Kind]) -> list[object]:
    """Every case; those not kept run with the slow tests."""
    return [
        pytest.param(
            *case, marks=[] if case in cases else pytest.mark.slow, id="{}-{}-{}".format(*case)
        )
        for case in EVERY
    ]


def shares(law: float, items: int) -> F64:
    falling = np.arange(1, items + 1, dtype=np.float64) ** -law
    return np.asarray(falling / falling.sum())


def tables_of(
    counts: I64, kind: Kind, width: int, seed: int, noise: float = 0.0
) -> tuple[DecodedRounds, U64]:
    """The rounds of `counts`, (rounds, items), and the items' fingerprints."""
    items = np.arange(counts.shape[1])
    pairs = []
    for round, count in enumerate(counts):
        sketch = CountSketch(
            rows=ROWS,
            width=width,
            seed=(SEED + seed) % 2**53,
            bucket_round=round if kind == "fresh" else 0,
            sign_round=0 if kind == "shared" else round,
        )
        table = sketch.encode(items, count)
        if noise:
            table = table + discrete_gaussian(noise, table.shape, SeededRng(SEED, seed, round))
        pairs.append((sketch, table))
    return DecodedRounds.of(pairs), pairs[0][0].points(items)


@cache
def largest_errors(
    law: float, width: int, kind: Kind, alike: bool = True, noise: float = 0.0
) -> tuple[float, float]:
    """The l-infinity error of the median and of the refined decoder, in devices, as it typically
    is: one run in eight of i^-5 at width 50 (Hybrid) stays caught in a heavy item's shadow."""
    median, refined = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng([SEED, seed])
        counts = rng.multinomial(DEVICES // ROUNDS, shares(law, ITEMS), size=ROUNDS)
        if not alike:
            counts = np.stack([count[rng.permutation(ITEMS)] for count in counts])
        rounds, points = tables_of(counts, kind, width, seed, noise)
        truth = counts.sum(axis=0)
        median.append(np.abs(rounds.estimate(points) - truth).max())
        refined.append(np.abs(refine(rounds, points).counts - truth).max())
    return float(np.median(median)), float(np.median(refined))


@pytest.mark.parametrize(
    ("law", "width", "kind"),
    quick((1.1, 200, "shared")),
)
def test_alike_rounds_are_read_five_times_better_than_by_the_median(
    law: float, width: int, kind: Kind
) -> None:
    """Without noise. The ratio was 12 (i^-1.1, width 50, Shared) to beyond 1000 when this was
    written, and varied by less than a quarter between seeds at the low end, so a ratio of five is
    several deviations away. The control is the test below, where rounds differ."""
    median, refined = largest_errors(law, width, kind)
    assert 5 * refined <= median


@pytest.mark.slow
def test_different_rounds_are_seen_not_to_gain_five_times() -> None:
    """The control: the same check fails on rounds that have little to lend one another."""
    median, refined = largest_errors(1.1, 50, "hybrid", alike=False)
    assert 5 * refined > median


@pytest.mark.slow
def test_different_rounds_are_peeled_each_on_its_own() -> None:
    """Items that are heavy in one round only are found there: 170 to 290 times better than the
    median when this was written (i^-2, width 200, Hybrid). A count per item and no more, the same
    in every round, would gain nothing."""
    median, refined = largest_errors(2.0, 200, "hybrid", alike=False)
    assert 5 * refined <= median


@pytest.mark.parametrize(("law", "width", "kind"), quick((1.1, 50, "hybrid")))
def test_different_rounds_are_read_no_worse_than_by_the_median(
    law: float, width: int, kind: Kind
) -> None:
    """Each round has its own permutation of the items; five per cent is allowed."""
    median, refined = largest_errors(law, width, kind, alike=False)
    assert refined <= 1.05 * median


@pytest.mark.parametrize(
    ("law", "width", "kind"), quick((2.0, 200, "hybrid"), (5.0, 200, "shared"))
)
def test_noised_tables_are_read_no_worse_than_by_the_median(
    law: float, width: int, kind: Kind
) -> None:
    """Discrete Gaussian noise on every cell of every round; five per cent is allowed."""
    median, refined = largest_errors(law, width, kind, noise=NOISE)
    assert refined <= 1.05 * median


@pytest.mark.parametrize("kind", KINDS)
def test_tables_that_hold_only_noise_are_left_as_they_are(kind: Kind) -> None:
    """Hardly anything is peeled, and the error is no worse than the median's.

    False alarm below 1e-6: of 20,000 items about 0.6 stand four deviations out by chance, each
    with its neighbours in the table; nine or more is 3e-8 for a Poisson count of mean 0.6.
    """
    nothing = np.zeros((ROUNDS, ITEMS), dtype=np.int64)
    rounds, points = tables_of(nothing, kind, 200, seed=0, noise=NOISE)
    refined = refine(rounds, points)
    assert refined.peeled.size < 9
    median = rounds.estimate(points)
    assert np.sqrt(np.mean(refined.counts**2)) <= np.sqrt(np.mean(median**2))


def test_a_planted_item_is_not_taken_for_noise() -> None:
    """The control: one item of forty deviations is found, and peeled."""
    counts = np.zeros((ROUNDS, ITEMS), dtype=np.int64)
    counts[:, 7] = round(40 * NOISE / math.sqrt(ROUNDS))
    rounds, points = tables_of(counts, "hybrid", 200, seed=0, noise=NOISE)
    refined = refine(rounds, points)
    assert 7 in refined.peeled
    assert abs(refined.counts[7] - counts[:, 7].sum()) < 10 * NOISE * math.sqrt(ROUNDS)


RUNS = 50
LOW, HIGH = 0.93, 0.97  # what a 95% interval may cover, as a share of (item, run) pairs


@cache
def coverage(level: float, runs: int) -> tuple[F64, int]:
    """Share of items inside the interval in each run, and in how many runs one drawn item is."""
    covered, hits = [], 0
    for run in range(runs):
        rng = np.random.default_rng([SEED, run])
        counts = rng.multinomial(20_000, shares(1.1, 3000), size=1)
        rounds, points = tables_of(counts, "shared", 100, seed=run, noise=NOISE)
        refined = refine(rounds, points)
        width = np.quantile(np.abs(refined.placebo_errors), level, method="higher")
        inside = np.abs(refined.counts - counts[0]) <= refined.widen(float(width))
        covered.append(float(inside.mean()))
        hits += int(inside[rng.integers(inside.size)])
    return np.array(covered), hits


def assert_covers(covered: F64) -> None:
    """The mean coverage is between LOW and HIGH, by 4.9 standard errors (1e-6, normal)."""
    margin = 4.9 * covered.std() / math.sqrt(covered.size)
    assert covered.mean() - margin > LOW, f"{covered.mean():.4f} ± {margin:.4f}"
    assert covered.mean() + margin < HIGH, f"{covered.mean():.4f} ± {margin:.4f}"


@pytest.mark.parametrize("runs", [RUNS, pytest.param(500, marks=pytest.mark.slow)])
def test_placebo_errors_give_intervals_that_cover_95_per_cent(runs: int) -> None:
    """False alarm 1e-6 (exact binomial over one item a run; runs are independent, items are not).

    Power: the mean over all items is within 2% of 95%, shown to 4.9 standard errors of the runs.
    """
    covered, hits = coverage(0.95, runs)
    assert_binomial(hits, runs, 0.95)
    assert_covers(covered)


def test_intervals_of_another_level_are_caught() -> None:
    """The control: intervals at 90% and at 99% miss the band."""
    for level in (0.90, 0.99):
        with pytest.raises(AssertionError):
            assert_covers(coverage(level, 12)[0])

"""Which items somebody must hold, from sketches of one round or several."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from checks import SEED
from marks import quick
from sfumato.privacy import SeededRng
from sfumato.privacy.samplers import discrete_laplace
from sfumato.sketch import CountSketch, DecodedRounds
from sfumato.sketch.absent import coin_limit, significant_items, sum_limit

ITEMS, HELD_ITEMS, RUNS, LEVEL = 1_000, 300, 200, 0.5


def tables(mode: str, run: int, rounds: int = 3) -> DecodedRounds:
    """Counts like a power law, over rounds, with the noise of a release."""
    counts = np.floor(3_000 / np.arange(1, HELD_ITEMS + 1) ** 1.1).astype(np.int64)
    rng = SeededRng(SEED, run)
    pairs = []
    for round in range(1 if mode == "one" else rounds):
        sketch = CountSketch(
            rows=7,
            width=150,
            seed=SEED % 2**32 + run,
            bucket_round=round if mode == "fresh" else 0,
            sign_round=round if mode in ("fresh", "hybrid") else 0,
        )
        table = sketch.encode(np.arange(HELD_ITEMS), counts)
        pairs.append((sketch, table + discrete_laplace(3.0, table.shape, rng)))
    return DecodedRounds.of(pairs)


@pytest.mark.parametrize("mode", quick(["one", "hybrid", "fresh"], "one", "hybrid"))
def test_items_that_nobody_holds_are_seldom_found(mode: str) -> None:
    """At level 0.5, so that it can be seen. False alarm 1e-9 (exact binomial); the control below is
    what fails it."""
    false, detections = 0, 0
    for run in range(RUNS if mode == "one" else RUNS // 8):
        rounds = tables(mode, run)
        points = rounds.sketches[0].points(np.arange(ITEMS))
        significant, limit = significant_items(rounds, points, level=LEVEL)
        false += bool(significant[HELD_ITEMS:].any())
        detections += int(significant[:HELD_ITEMS].sum())
        assert limit > 0
    runs = RUNS if mode == "one" else RUNS // 8
    assert stats.binom.sf(false - 1, runs, LEVEL) > 1e-9
    assert detections / runs > 15


def test_a_normal_quantile_would_find_items_that_nobody_holds() -> None:
    """The control: placebos' deviation times the normal quantile, as it was. At the same level it
    must fail the test above."""
    false = 0
    for run in range(RUNS):
        rounds = tables("one", run)
        points = rounds.sketches[0].points(np.arange(ITEMS))
        error = float(np.quantile(np.abs(rounds.estimate(rounds.placebos())), 0.68))
        limit = stats.norm.isf(LEVEL / ITEMS) * error
        false += bool((rounds.estimate(points)[HELD_ITEMS:] > limit).any())
    assert stats.binom.sf(false - 1, RUNS, LEVEL) < 1e-9


def test_looking_again_finds_what_the_heaviest_hid() -> None:
    rounds = tables("one", 0)
    points = rounds.sketches[0].points(np.arange(ITEMS))
    significant, _ = significant_items(rounds, points, level=0.05)
    heights = np.median(rounds.readings(points).sum(axis=0), axis=0)
    first = heights > 0.5 * heights.max()
    assert significant[first].all()
    assert significant.sum() > first.sum()


def test_an_empty_table_finds_nothing() -> None:
    rounds = tables("hybrid", 1)
    rounds = rounds.with_tables(np.zeros_like(rounds.tables))
    significant, limit = significant_items(
        rounds, rounds.sketches[0].points(np.arange(9)), level=0.05
    )
    assert not significant.any()
    assert limit == 0


def sums_of(table: np.ndarray) -> np.ndarray:
    """The sums of all choices of one cell in each row: the law of an item that nobody holds."""
    sums = np.zeros(1)
    for row in table:
        sums = (sums[:, None] + row).ravel()
    return sums


ONE_COLLISION = np.zeros((7, 6))
ONE_COLLISION[0, 0] = 9.0


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_a_sum_limit_is_reached_with_at_most_its_chance(rate: float) -> None:
    """Against every sum of small tables."""
    chance = np.random.default_rng(SEED)
    for table in (
        chance.poisson(0.3, (7, 6)).astype(float),
        chance.poisson(20.0, (6, 8)).astype(float),
        chance.normal(0.0, 3.0, (7, 6)),
        ONE_COLLISION,
    ):
        limit, sums = sum_limit(table, rate), sums_of(table)
        assert np.mean(sums >= limit - 1e-9) <= rate
        deviations = (limit - sums.mean()) / sums.std()
        assert deviations < 2 * stats.norm.isf(rate) + 2  # far tighter than no limit


def test_a_normal_limit_would_be_passed_too_often() -> None:
    """The control of the test above: one sum in six is in the far tail of a normal law."""
    sums = sums_of(ONE_COLLISION)
    normal = sums.mean() + stats.norm.isf(0.05) * sums.std()
    assert np.mean(sums >= normal) == pytest.approx(1 / 6)


@pytest.mark.parametrize("rate", [0.1, 1e-3, 1e-8])
@pytest.mark.parametrize(("records", "chance"), [(30, 0.4), (400, 0.01), (100_000, 1 / 56)])
def test_a_coin_limit_is_reached_with_at_most_its_chance(
    records: int, chance: float, rate: float
) -> None:
    """Against the binomial law, whose own limit is about a deviation less at most."""
    limit = coin_limit(records, chance, rate)
    assert stats.binom.sf(np.ceil(limit) - 1, records, chance) <= rate
    exact = stats.binom.isf(rate, records, chance)
    deviation = np.sqrt(records * chance * (1 - chance))
    assert exact <= limit <= exact + 1 + deviation


def test_a_sum_limit_of_a_constant_table_is_its_sum() -> None:
    assert sum_limit(np.zeros((3, 4)), 0.01) == 0
    assert sum_limit(np.full((3, 4), 2.0), 0.01) == pytest.approx(6.0)

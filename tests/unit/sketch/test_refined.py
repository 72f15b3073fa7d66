"""The refined decoder's arithmetic; how good it is, is in statistics/test_refined.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED
from sfumato.sketch import CountSketch, DecodedRounds, refine

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def rounds_of(
    counts: I64, *, width: int = 50, rows: int = 5, fresh: bool = False
) -> tuple[DecodedRounds, U64]:
    """Tables of `counts`, (rounds, items), and the items' fingerprints."""
    items = np.arange(counts.shape[1])
    sketches = [
        CountSketch(rows=rows, width=width, seed=SEED, bucket_round=m if fresh else 0, sign_round=m)
        for m in range(counts.shape[0])
    ]
    pairs = [(sketch, sketch.encode(items, c)) for sketch, c in zip(sketches, counts, strict=True)]
    return DecodedRounds.of(pairs), sketches[0].points(items)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_few_heavy_items_among_many_are_counted_exactly(fresh: bool) -> None:
    """Ten items in fifty cells, alike in every round: colliding for the median, then peeled off."""
    counts = np.zeros((4, 5000), dtype=np.int64)
    counts[:, :10] = np.random.default_rng(SEED).integers(500, 10_000, 10)
    rounds, points = rounds_of(counts, fresh=fresh)
    refined = refine(rounds, points)
    assert np.array_equal(np.rint(refined.counts), counts.sum(axis=0))
    assert sorted(refined.peeled) == list(range(10))
    assert not np.array_equal(rounds.estimate(points), counts.sum(axis=0))


def test_empty_tables_are_read_by_the_median() -> None:
    rounds, points = rounds_of(np.zeros((3, 1000), dtype=np.int64))
    refined = refine(rounds, points)
    assert refined.peeled.size == 0
    assert refined.decode == "median"
    assert not refined.counts.any()


@pytest.mark.parametrize("items", [0, 1, 2])
def test_any_number_of_items_may_be_asked_about(items: int) -> None:
    rounds, points = rounds_of(np.full((2, 2000), 3, dtype=np.int64))
    assert refine(rounds, points[:items]).counts.shape == (items,)


def test_the_parts_of_the_devices_may_be_given() -> None:
    """One round has nine tenths of the devices; said or unsaid, what collides is peeled."""
    counts = np.zeros((2, 3000), dtype=np.int64)
    counts[0, :8], counts[1, :8] = 9000, 1000
    rounds, points = rounds_of(counts)
    refined = refine(rounds, points, shares=np.array([0.9, 0.1]))
    assert np.array_equal(np.rint(refined.counts), counts.sum(axis=0))
    assert np.array_equal(np.rint(refine(rounds, points).counts), counts.sum(axis=0))


def test_refining_leaves_tables_and_points_alone() -> None:
    rng = np.random.default_rng(SEED)
    rounds, points = rounds_of(rng.poisson(3, (3, 2000)))
    copies = rounds.tables.copy(), points.copy()
    refine(rounds, points)
    assert np.array_equal(rounds.tables, copies[0])
    assert np.array_equal(points, copies[1])


def test_refining_again_gives_the_same_bits() -> None:
    rng = np.random.default_rng(SEED)
    rounds, points = rounds_of(rng.poisson(20_000 / np.arange(1, 2001.0), (3, 2000)))
    first, second = refine(rounds, points), refine(rounds, points)
    assert first.counts.tobytes() == second.counts.tobytes()
    assert first.placebo_errors.tobytes() == second.placebo_errors.tobytes()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_reading_that_is_kept_is_the_median_or_the_mean(fresh: bool) -> None:
    """Where nothing is peeled the answer is a plain decoding of the tables as they came."""
    rounds, points = rounds_of(np.zeros((2, 500), dtype=np.int64), fresh=fresh)
    noise = np.random.default_rng(SEED).normal(0, 10, rounds.tables.shape)
    noisy = rounds.with_tables(np.rint(noise))
    refined = refine(noisy, points[:20])
    if refined.peeled.size == 0:
        assert np.array_equal(refined.counts, noisy.estimate(points[:20], decode=refined.decode))
    errors = noisy.estimate(noisy.placebos(), decode=refined.decode)
    assert refined.placebo_errors.shape == errors.shape


@pytest.mark.parametrize("seed", [229, 264, 277])
def test_what_is_already_fitted_to_the_grid_is_left_alone(seed: int) -> None:
    """Six items, peeled exactly but for the rounding of their counts: there is nothing to fit."""
    rng = np.random.default_rng(seed)
    law = np.arange(1, 7, dtype=np.float64) ** -3
    counts = np.zeros((3, 500), dtype=np.int64)
    counts[:, :6] = rng.multinomial(10_000, law / law.sum(), size=3)
    items = np.arange(500)
    sketches = [
        CountSketch(rows=5, width=50, seed=seed, bucket_round=m, sign_round=m) for m in range(3)
    ]
    pairs = [(sketch, sketch.encode(items, c)) for sketch, c in zip(sketches, counts, strict=True)]
    refined = refine(DecodedRounds.of(pairs), sketches[0].points(items))
    assert np.array_equal(np.rint(refined.counts), counts.sum(axis=0))

"""Theory of count sketches: bias, variance, rounds, and the ordering of paper 000.

Exhaustive tests need every hash function there is on a few points. `realise` finds polynomials
that act on those points as a given table of cells and signs does, so that the library's own
encoding and decoding are what is enumerated; `by_hand` does the same with nothing but lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED, assert_mean
from sfumato import kernels
from sfumato.kernels.count import plain
from sfumato.sketch import CountSketch, DecodedRounds
from vectors import reference

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Kind = Literal["shared", "hybrid", "fresh"]
Row = tuple[int, ...]  # a cell, or a sign, for each item


# --- hash functions by name


def random_elements(rng: np.random.Generator, *shape: int) -> U64:
    return rng.integers(0, plain.PRIME, shape, dtype=np.uint64)


POINTS = random_elements(np.random.default_rng([SEED, 1]), 6)


@cache
def lines(width: int, items: int) -> dict[Row, U64]:
    """For every way to put the items into cells, a line that does so."""
    coefficients = random_elements(
        np.random.default_rng([SEED, width, items]), 20 * width**items, 2
    )
    columns = [
        plain.cells(plain.evaluate(coefficients.T, np.full(len(coefficients), x)), width)
        for x in POINTS[:items]
    ]
    keys = np.stack(columns, axis=1).tolist()
    return {tuple(key): line for key, line in zip(keys, coefficients, strict=True)}


@cache
def cubics(items: int) -> dict[Row, U64]:
    """For every way to sign the items, a cubic that does so."""
    coefficients = random_elements(np.random.default_rng([SEED, items]), 20 * 2**items, 4)
    columns = [
        plain.sign_of(plain.evaluate(coefficients.T, np.full(len(coefficients), x)), 0)
        for x in POINTS[:items]
    ]
    keys = np.stack(columns, axis=1).tolist()
    return {tuple(key): cubic for key, cubic in zip(keys, coefficients, strict=True)}


def realise(cells: Sequence[Row], signs: Sequence[Row], width: int) -> tuple[U64, U64]:
    """Polynomials, one per row, that act on POINTS as these tables do."""
    buckets = np.stack([lines(width, len(row))[row] for row in cells])
    return buckets, np.stack([cubics(len(row))[row] for row in signs])


def by_library(
    cells: Sequence[Row], signs: Sequence[Sequence[Row]], width: int, counts: Sequence[Row]
) -> tuple[list[list[list[int]]], list[float]]:
    """Tables of each round and decoded totals, by the library: one set of cells, signs per
    round."""
    points = POINTS[: len(counts[0])]
    buckets, _ = realise(cells, signs[0], width)
    sign_blocks = [realise(cells, each, width)[1] for each in signs]
    tables = [
        kernels.encode(points, np.array(count), buckets, block, 0, width)
        for count, block in zip(counts, sign_blocks, strict=True)
    ]
    which = np.array([[0, round, 0] for round in range(len(counts))])
    stacked = np.stack(tables).astype(np.float64)
    totals = kernels.decode(
        points, stacked, buckets[None], np.stack(sign_blocks), which, "median", False
    )
    return [table.tolist() for table in tables], totals.tolist()


def by_hand(
    cells: Sequence[Row], signs: Sequence[Sequence[Row]], width: int, counts: Sequence[Row]
) -> tuple[list[list[list[int]]], list[Fraction]]:
    """The same, with lists."""
    tables = []
    for each, count in zip(signs, counts, strict=True):
        table = [[0] * width for _ in cells]
        for row, (places, pluses) in enumerate(zip(cells, each, strict=True)):
            for place, plus, weight in zip(places, pluses, count, strict=True):
                table[row][place] += plus * weight
        tables.append(table)
    totals = []
    for item in range(len(counts[0])):
        readings = [
            sum(
                (Fraction(each[row][item] * table[row][cells[row][item]]))
                for each, table in zip(signs, tables, strict=True)
            )
            for row in range(len(cells))
        ]
        totals.append(reference.median([Fraction(reading) for reading in readings]))
    return tables, totals


# --- exhaustive

ALL_CELLS = list(itertools.product(range(2), repeat=3))
ALL_SIGNS = list(itertools.product((-1, 1), repeat=3))


def moments(values: Sequence[Fraction]) -> tuple[Fraction, Fraction]:
    mean = sum(values, start=Fraction(0)) / len(values)
    return mean, sum(((v - mean) ** 2 for v in values), start=Fraction(0)) / len(values)


def test_one_row_is_unbiased_with_the_stated_variance_over_every_hash_function() -> None:
    """Exact: 8 ways to choose cells × 8 to choose signs, counts (3, 1, 2), width 2.

    Mean 3 and variance (‖counts‖² − 3²)/2 = 2.5 for the first item.
    """
    actual, expected = [], []
    for cells, signs in itertools.product(ALL_CELLS, ALL_SIGNS):
        tables, totals = by_library([cells], [[signs]], 2, [(3, 1, 2)])
        by_list = by_hand([cells], [[signs]], 2, [(3, 1, 2)])
        assert tables == by_list[0]
        assert totals == by_list[1]
        actual.append(Fraction(totals[0]))
        expected.append(by_list[1][0])
    assert moments(actual) == moments(expected) == (Fraction(3), Fraction(5, 2))


def test_a_hybrid_row_is_unbiased_with_the_stated_variance_over_every_hash_function() -> None:
    """Exact: one choice of cells and two of signs, counts (3, 1, 2) then (1, 4, 0), width 2.

    The average over rounds has mean 2 and variance (1 + 4 + 16)/(2² · 2) = 2.625.
    """
    actual, expected = [], []
    for cells, first, second in itertools.product(ALL_CELLS, ALL_SIGNS, ALL_SIGNS):
        rounds: tuple[list[Row], list[list[Row]], int, list[Row]]
        rounds = ([cells], [[first], [second]], 2, [(3, 1, 2), (1, 4, 0)])
        actual.append(Fraction(by_library(*rounds)[1][0]) / 2)
        expected.append(by_hand(*rounds)[1][0] / 2)
    assert actual == expected
    assert moments(actual) == (Fraction(2), Fraction(21, 8))


def test_shared_signs_have_a_larger_variance_than_hybrid_ones() -> None:
    """The control: with the same signs in both rounds the exhaustive variance is not 2.625."""
    variances = []
    for cells, signs in itertools.product(ALL_CELLS, ALL_SIGNS):
        totals = by_library([cells], [[signs], [signs]], 2, [(3, 1, 2), (1, 4, 0)])[1]
        variances.append(Fraction(totals[0]) / 2)
    assert moments(variances) == (Fraction(2), Fraction((1 + 4) ** 2 + (2 + 0) ** 2, 4 * 2))


# --- golden: G1 and G2 of the digest

G1_CELLS: list[Row] = [(0, 1, 2, 3, 0, 1), (1, 1, 3, 0, 2, 2), (3, 0, 0, 1, 2, 3)]
G1_SIGNS: list[Row] = [(1, -1, 1, 1, -1, 1), (1, 1, -1, 1, -1, -1), (-1, 1, 1, -1, 1, 1)]
G2_SIGNS: list[Row] = [tuple(s if i == 0 else -s for i, s in enumerate(r)) for r in G1_SIGNS]
G1_COUNTS, G2_COUNTS = (5, 3, 0, 2, 1, 0), (4, 0, 1, 0, 0, 3)
G1_TABLE = [[4, -3, 0, 2], [2, 8, -1, 0], [3, -2, 1, -5]]
G2_TABLE = [[4, -3, -1, 0], [0, 4, 3, 1], [-1, 0, 0, -7]]


@pytest.mark.parametrize("decode", [by_library, by_hand], ids=["library", "by hand"])
def test_the_golden_round_has_its_table_and_its_medians(decode: object) -> None:
    tables, totals = decode(G1_CELLS, [G1_SIGNS], 4, [G1_COUNTS])  # type: ignore[operator]  # one of two
    assert tables == [G1_TABLE]
    assert totals == [5, 3, 0, 2, 1, -3]


@pytest.mark.parametrize("decode", [by_library, by_hand], ids=["library", "by hand"])
def test_the_golden_hybrid_rounds_have_their_tables_and_their_medians(decode: object) -> None:
    tables, totals = decode(  # type: ignore[operator]  # one of two
        G1_CELLS, [G1_SIGNS, G2_SIGNS], 4, [G1_COUNTS, G2_COUNTS]
    )
    assert tables == [G1_TABLE, G2_TABLE]
    assert [total / 2 for total in totals] == [6, 2, 0.5, 1, 0.5, 1]


def test_the_list_decoder_is_the_library_on_real_hashes() -> None:
    """What checks the goldens is itself checked, on sketches whose hashes nobody chose."""
    for seed in range(5):
        sketches = [CountSketch(rows=3, width=4, seed=seed, sign_round=m) for m in (0, 1)]
        points = sketches[0].points(np.arange(6))
        cells = [
            tuple(plain.cells(plain.evaluate(h, points), 4).tolist()) for h in sketches[0].buckets
        ]
        signs = [
            [tuple(plain.sign_of(plain.evaluate(h, points), s.sign_bit).tolist()) for h in s.signs]
            for s in sketches
        ]
        tables, totals = by_hand(cells, signs, 4, [G1_COUNTS, G2_COUNTS])
        pairs = [
            (s, s.encode(np.arange(6), np.array(c)))
            for s, c in zip(sketches, (G1_COUNTS, G2_COUNTS), strict=True)
        ]
        assert [table.tolist() for _, table in pairs] == tables
        assert DecodedRounds.of(pairs).estimate(points).tolist() == totals


# --- by simulation

DRAWS, ROWS, WIDTH, FLAT = 20_000, 5, 20, 200


@cache
def flat_readings(signed: bool = True) -> F64:
    """Readings of one of 200 items of count 1 under 20,000 × 5 hash functions, (draws, rows)."""
    rng = np.random.default_rng([SEED, 2])
    points = random_elements(rng, FLAT)
    buckets, signs = random_elements(rng, DRAWS * ROWS, 2), random_elements(rng, DRAWS * ROWS, 4)
    if not signed:  # a broken family: the constant 1, which is odd
        signs[:, :3], signs[:, 3] = 0, 1
    table = kernels.encode(points, None, buckets, signs, 0, WIDTH)
    which = np.zeros((1, 3), dtype=np.int64)
    tables = table[None].astype(np.float64)
    read = kernels.readings(points[:1], tables, buckets[None], signs[None], which)
    return read.reshape(DRAWS, ROWS)


def test_the_median_of_an_odd_number_of_rows_is_unbiased() -> None:
    """False alarm 1e-6 (normal, 20,000 draws; the standard deviation is the sample's).

    Power: a bias of 0.1 on a count of 1 is eight standard errors.
    """
    medians = np.median(flat_readings(), axis=1)
    assert_mean(medians, 1.0, float(medians.std()))


def test_without_signs_the_median_is_seen_to_be_biased() -> None:
    """The control: a constant sign counts what collides, about 200/20 items."""
    medians = np.median(flat_readings(signed=False), axis=1)
    with pytest.raises(AssertionError):
        assert_mean(medians, 1.0, float(medians.std()))


def test_one_row_has_the_stated_variance() -> None:
    """False alarm 1e-6 (normal, of 100,000 squared errors; their deviation is the sample's).

    Variance (‖counts‖² − 1)/width = 199/20. Power: 5% more or less is eleven standard errors.
    """
    squares = (flat_readings().ravel() - 1.0) ** 2
    assert_mean(squares, (FLAT - 1) / WIDTH, float(squares.std()))


def test_a_variance_that_is_off_by_five_per_cent_is_caught() -> None:
    """The control: the formula for one cell more, or for counting the item itself, or for less."""
    squares = (flat_readings().ravel() - 1.0) ** 2
    for wrong in (1.05, 0.95):
        with pytest.raises(AssertionError):
            assert_mean(squares, wrong * (FLAT - 1) / WIDTH, float(squares.std()))


def at_most(successes: int, trials: int, probability: float, false_alarm: float = 1e-6) -> bool:
    """Whether this many successes are likely enough if `probability` is the largest possible."""
    return bool(stats.binom.sf(successes - 1, trials, probability) >= false_alarm)


def test_the_error_bound_of_the_docstring_holds() -> None:
    """3·‖counts‖/√width is exceeded with probability at most exp(−rows/4), rows = 15.

    False alarm 1e-6 (exact binomial, one-sided, 6,666 draws). The control is a bound ten times
    smaller, which is broken.
    """
    grouped = flat_readings().ravel()[: DRAWS * ROWS // 15 * 15].reshape(-1, 15)
    errors = np.abs(np.median(grouped, axis=1) - 1.0)
    bound, risk = 3 * np.sqrt(FLAT / WIDTH), float(np.exp(-15 / 4))
    assert at_most(int((errors > bound).sum()), errors.size, risk)
    assert not at_most(int((errors > bound / 10).sum()), errors.size, risk)


# --- rounds


def round_sketch(kind: Kind, round: int, rows: int, width: int, seed: int) -> CountSketch:
    return CountSketch(
        rows=rows,
        width=width,
        seed=seed,
        bucket_round=round if kind == "fresh" else 0,
        sign_round=0 if kind == "shared" else round,
    )


def test_shared_rounds_equal_one_round_over_the_union_bit_for_bit() -> None:
    rng = np.random.default_rng(SEED)
    items = rng.integers(0, 1000, (10, 500))
    sketch = CountSketch(rows=5, width=100, seed=SEED)
    points = sketch.points(np.arange(1000))
    rounds = DecodedRounds.of([(sketch, sketch.encode(each)) for each in items])
    whole = DecodedRounds.of([(sketch, sketch.encode(items.ravel()))])
    assert rounds.tables.tobytes() == whole.tables.tobytes()
    assert rounds.estimate(points).tobytes() == whole.estimate(points).tobytes()


COHORTS, HEAVY = 100, 1000  # rounds, and devices in each, that all hold the round's own item


def own_items(kind: Kind) -> F64:
    """Errors, as shares of all devices, when each of 100 rounds has one item of its own."""
    pairs = []
    for round in range(COHORTS):
        sketch = round_sketch(kind, round, rows=9, width=40, seed=SEED)
        pairs.append((sketch, sketch.encode(np.array([round]), np.array([HEAVY]))))
    rounds = DecodedRounds.of(pairs)
    counts = rounds.estimate(rounds.sketches[0].points(np.arange(COHORTS)))
    return (counts - HEAVY) / (COHORTS * HEAVY)


def majority_meetings() -> I64:
    """Per item, in how many Fresh rounds a majority of its rows reads the round's own item."""
    meetings = np.zeros(COHORTS, dtype=np.int64)
    for round in range(COHORTS):
        sketch = round_sketch("fresh", round, rows=9, width=40, seed=SEED)
        points = sketch.points(np.arange(COHORTS))
        cells = np.array([plain.cells(plain.evaluate(h, points), 40) for h in sketch.buckets])
        shared = (cells == cells[:, round : round + 1]).sum(axis=0)
        meetings += (shared > 4) & (np.arange(COHORTS) != round)
    return meetings


def test_rounds_with_nothing_in_common_are_exact_under_fresh_hashing() -> None:
    """Analytic: a round's median is 0 or the count unless a majority of rows collide."""
    assert not own_items("fresh")[majority_meetings() == 0].any()


def test_rounds_with_nothing_in_common_err_under_hybrid_and_shared_hashing() -> None:
    """The counterexample to "Hybrid is best": readings are added before the median is taken.

    A Hybrid row adds up 99 other items, each there with probability 1/40: it is 0 for all of 100
    items with probability below 1e-9.
    """
    assert np.sqrt(np.mean(own_items("hybrid") ** 2)) > 0
    assert np.sqrt(np.mean(own_items("shared") ** 2)) > 0


# --- Fig. 3 of paper 000, on data with counts like rank^-1.8

DEVICES, DOMAIN, ROUNDS = 150_000, 150_868, 10


@cache
def many_errors(kind: Kind, width: int) -> float:
    """How many items err by more than 0.1/width, as a mean over three seeds."""
    samples = []
    for seed in range(3):
        rng = np.random.default_rng([SEED, seed])
        shares = np.arange(1, DOMAIN + 1) ** -1.8
        counts = rng.multinomial(DEVICES // ROUNDS, shares / shares.sum(), size=ROUNDS)
        places = np.flatnonzero(counts.any(axis=0))
        pairs = []
        for round, count in enumerate(counts):
            sketch = round_sketch(kind, round, rows=5, width=width, seed=SEED + seed)
            pairs.append((sketch, sketch.encode(places, count[places])))
        points = pairs[0][0].points(np.arange(DOMAIN))
        errors = np.abs(DecodedRounds.of(pairs).estimate(points) - counts.sum(axis=0)) / DEVICES
        samples.append(int((errors > 0.1 / width).sum()))
    return float(np.mean(samples))


def ordered_as_in_the_paper(hybrid: Kind, fresh: Kind, shared: Kind) -> bool:
    """Whether the three behave as Hybrid, Fresh and Shared do; the bands are about 5 deviations."""
    best = many_errors(hybrid, 200)
    return bool(
        2 * best < many_errors(fresh, 200)
        and 6 * best < many_errors(shared, 200)
        and 0.8 <= many_errors(shared, 1200) / best <= 2.6
        and 0.4 <= many_errors(fresh, 600) / best <= 1.5
    )


def test_hybrid_needs_a_sixth_of_the_width_of_shared_and_a_third_of_fresh() -> None:
    """Hybrid at 200 cells does what Shared does at 1200 and Fresh at 600.

    False alarm about 1e-6: the bands are five standard deviations of a mean of three seeds, from
    six earlier runs (285 ± 39, 413 ± 34, 235 ± 23; at width 200 Shared 3180 ± 268, Fresh 888 ± 30).
    Power: any two of the three exchanged are caught, by the control.
    """
    assert ordered_as_in_the_paper("hybrid", "fresh", "shared")


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations(("hybrid", "fresh", "shared")))[1:],
    ids="-".join,
)
def test_any_other_order_is_caught(order: tuple[Kind, Kind, Kind]) -> None:
    """The control."""
    assert not ordered_as_in_the_paper(*order)

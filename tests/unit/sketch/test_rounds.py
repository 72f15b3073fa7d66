"""Several rounds, decoded together: Shared, Hybrid and Fresh."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED, assert_binomial
from sfumato.errors import MismatchError
from sfumato.kernels.count import plain
from sfumato.sketch import CountSketch, DecodedRounds, Running
from sfumato.sketch.rounds import GRID
from vectors import reference

I64 = npt.NDArray[np.int64]
Kind = Literal["shared", "hybrid", "fresh"]
KINDS: tuple[Kind, ...] = ("shared", "hybrid", "fresh")
ITEMS = 300


def sketch(kind: Kind, round: int, rows: int = 5, width: int = 40) -> CountSketch:
    return CountSketch(
        rows=rows,
        width=width,
        seed=SEED,
        bucket_round=round if kind == "fresh" else 0,
        sign_round=0 if kind == "shared" else round,
    )


def campaign(kind: Kind, rounds: int, rows: int = 5) -> list[tuple[CountSketch, I64]]:
    """Each round's sketch and table, for counts that differ from round to round."""
    rng = np.random.default_rng([SEED, rounds, rows])
    return [
        (spec, spec.encode(np.arange(ITEMS), rng.integers(0, 100, ITEMS)))
        for spec in (sketch(kind, round, rows) for round in range(rounds))
    ]


def points() -> npt.NDArray[np.uint64]:
    return sketch("shared", 0).points(np.arange(ITEMS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_running_counts_equal_those_of_all_the_tables(kind: Kind, rows: int) -> None:
    pairs = campaign(kind, 7, rows)
    running = Running(points(), rows=rows, fresh=kind == "fresh")
    for step, (spec, table) in enumerate(pairs, start=1):
        running.add(spec, table)
        whole = DecodedRounds.of(pairs[:step]).estimate(points())
        assert np.array_equal(running.estimate(), whole)


def test_running_counts_are_not_changed_by_who_reads_them() -> None:
    running = Running(points(), rows=5, fresh=True)
    running.add(*campaign("fresh", 1)[0])
    running.estimate()[:] = -1
    assert (running.estimate() != -1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_decoded_as_the_reference_does(kind: Kind) -> None:
    pairs = campaign(kind, 3)
    described = [
        {
            "rows": spec.rows,
            "width": spec.width,
            "seed": spec.seed,
            "bucket_round": spec.bucket_round,
            "sign_round": spec.sign_round,
        }
        for spec, _ in pairs
    ]
    tables = [table.tolist() for _, table in pairs]
    estimates = DecodedRounds.of(pairs).estimate(points()[:40])
    assert estimates.tolist() == [reference.estimate(described, tables, item) for item in range(40)]


@pytest.mark.parametrize("decode", ["median", "mean"])
def test_shared_rounds_are_one_round_over_everybody(decode: Literal["median", "mean"]) -> None:
    """Bit for bit: a table of one spec is added to the others, whatever the number of rounds."""
    pairs = campaign("shared", 6)
    together = DecodedRounds.of(pairs)
    assert together.tables.shape == (1, 5, 40)
    union = np.sum([table for _, table in pairs], axis=0)
    alone = DecodedRounds.of([(pairs[0][0], union)])
    assert together.tables.tobytes() == alone.tables.tobytes()
    first = together.estimate(points(), decode=decode)
    assert first.tobytes() == alone.estimate(points(), decode=decode).tobytes()


def test_tables_of_one_spec_are_added_wherever_they_come() -> None:
    pairs = campaign("hybrid", 3)
    doubled = [*pairs, *reversed(pairs)]
    rounds = DecodedRounds.of(doubled)
    assert rounds.sketches == tuple(spec for spec, _ in pairs)
    assert np.array_equal(rounds.tables, 2 * np.stack([table for _, table in pairs]))


def test_rounds_leave_the_tables_they_are_given_alone() -> None:
    pairs = campaign("shared", 3)
    copies = [table.copy() for _, table in pairs]
    rounds = DecodedRounds.of(pairs)
    rounds.estimate(points())
    rounds.subtract(points(), np.ones((1, ITEMS)))
    assert all(np.array_equal(table, copy) for (_, table), copy in zip(pairs, copies, strict=True))


def test_the_order_of_rounds_does_not_matter() -> None:
    for kind in KINDS:
        pairs = campaign(kind, 5)
        there = DecodedRounds.of(pairs).estimate(points())
        assert np.array_equal(there, DecodedRounds.of(pairs[::-1]).estimate(points()))


@pytest.mark.parametrize(
    "other",
    [
        CountSketch(rows=5, width=40, seed=SEED + 1, sign_round=1),
        CountSketch(rows=5, width=41, seed=SEED, sign_round=1),
        CountSketch(rows=3, width=40, seed=SEED, sign_round=1),
    ],
    ids=["seed", "width", "rows"],
)
def test_rounds_of_different_campaigns_are_refused(other: CountSketch) -> None:
    first = campaign("hybrid", 1)
    with pytest.raises(MismatchError, match="share rows, width and seed"):
        DecodedRounds.of([*first, (other, other.encode(np.arange(ITEMS)))])


def test_a_table_of_another_shape_and_no_table_at_all_are_refused() -> None:
    ((spec, table),) = campaign("shared", 1)
    with pytest.raises(MismatchError, match="must be"):
        DecodedRounds.of([(spec, table[:, :-1])])
    with pytest.raises(MismatchError, match="at least one"):
        DecodedRounds.of([])


def test_only_rounds_with_their_own_cells_are_fresh() -> None:
    assert [DecodedRounds.of(campaign(kind, 3)).fresh for kind in KINDS] == [False, False, True]
    assert not DecodedRounds.of(campaign("fresh", 1)).fresh


def test_one_round_of_several_is_that_round_alone() -> None:
    for kind in ("hybrid", "fresh"):
        pairs = campaign(kind, 4)
        rounds = DecodedRounds.of(pairs)
        for index, pair in enumerate(pairs):
            alone = DecodedRounds.of([pair]).estimate(points())
            assert np.array_equal(rounds.one(index).estimate(points()), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_subtracting_every_item_leaves_nothing(kind: Kind) -> None:
    rng = np.random.default_rng(SEED)
    counts = rng.integers(0, 1000, (4, ITEMS)) + rng.integers(0, GRID, (4, ITEMS)) / GRID
    sketches = [sketch(kind, round) for round in range(4)]
    whole = [
        (s, s.encode(np.arange(ITEMS), np.rint(c * GRID).astype(np.int64)) / GRID)
        for s, c in zip(sketches, counts, strict=True)
    ]
    rounds = DecodedRounds.of(whole)
    removed = counts.sum(axis=0, keepdims=True) if kind == "shared" else counts
    assert not rounds.subtract(points(), removed).tables.any()
    assert rounds.tables.any()


def test_readings_are_sign_times_cell() -> None:
    pairs = campaign("hybrid", 2, rows=3)
    readings = DecodedRounds.of(pairs).readings(points())
    assert readings.shape == (2, 3, ITEMS)
    for round, (spec, table) in enumerate(pairs):
        for row in range(3):
            cells = plain.cells(plain.evaluate(spec.buckets[row], points()), spec.width)
            signs = plain.sign_of(plain.evaluate(spec.signs[row], points()), spec.sign_bit)
            assert np.array_equal(readings[round, row], signs * table[row, cells])


def test_placebos_are_other_points_than_the_items() -> None:
    rounds = DecodedRounds.of(campaign("hybrid", 2))
    placebos = rounds.placebos()
    assert len(np.unique(placebos)) == len(placebos) == 1 << 14
    assert not np.isin(placebos, points()).any()
    assert np.array_equal(rounds.placebos(100), placebos[:100])


MANY = 70


def test_seventy_rounds_of_hybrid_signs_count_a_lone_item_exactly() -> None:
    """Sixty rounds share a sign hash; the tenth after them reads the next one."""
    running = Running(points()[:1], rows=5, fresh=False)
    pairs = []
    for round in range(MANY):
        spec = sketch("hybrid", round)
        pairs.append((spec, spec.encode(np.array([0]), np.array([round + 1]))))
        running.add(*pairs[-1])
    total = MANY * (MANY + 1) / 2
    assert DecodedRounds.of(pairs).estimate(points()[:1]).tolist() == [total]
    assert running.estimate().tolist() == [total]


def hybrid_signs(rounds: list[int], rows: int, items: int) -> I64:
    """Signs of items, (rounds, rows, items)."""
    some = sketch("hybrid", 0).points(np.arange(items))
    sketches = [sketch("hybrid", round, rows) for round in rounds]
    return np.array(
        [[plain.sign_of(plain.evaluate(h, some), s.sign_bit) for h in s.signs] for s in sketches]
    )


LOOKED_AT = [0, 1, 2, 30, 58, 59, 60, 61, 69]
PAIRS = [(a, b) for a in range(len(LOOKED_AT)) for b in range(a)]


def test_signs_of_different_rounds_agree_half_the_time() -> None:
    """False alarm 36 · 1e-6 (exact binomial for each pair of rounds; 50 rows of 40 items, whose
    signs are uniform and four-wise independent).

    Power: rounds that agree 60% of the time are missed with probability 2e-5.
    """
    signs = hybrid_signs(LOOKED_AT, rows=50, items=40)
    for a, b in PAIRS:
        assert_binomial(int((signs[a] == signs[b]).sum()), signs[0].size, 0.5)


def test_rounds_with_the_same_signs_are_caught() -> None:
    """The control: Shared rounds, and signs of one bit that depend on that of another."""
    signs = hybrid_signs([0, 1], rows=50, items=40)
    with pytest.raises(AssertionError):
        assert_binomial(int((signs[0] == signs[0]).sum()), signs[0].size, 0.5)
    leaning = np.where(np.arange(signs[1].size).reshape(signs[1].shape) % 3 == 0, *signs)
    with pytest.raises(AssertionError):
        assert_binomial(int((signs[0] == leaning).sum()), signs[0].size, 0.5)

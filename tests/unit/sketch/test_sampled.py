"""Tables of threshold samples: paper 001's algorithm 1, b times, and a count sketch beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from checks import SEED
from sfumato.errors import SpecError
from sfumato.privacy import SeededRng
from sfumato.sketch import CountSketch, InvertibleSketch, SampledTables, TextKeys

TABLES = InvertibleSketch(
    keys=TextKeys(length=6), rows=3, width=20, count_bits=10, value_bits=16, check_bits=20,
    seed=SEED, copies=True,
)  # fmt: skip
SKETCH = SampledTables(tables=TABLES, repetitions=3, threshold=2.5)
COUNTED = replace(SKETCH, counts=CountSketch(rows=3, width=40, seed=SEED), count_bits=40)


def amounts(sketch: SampledTables, table: np.ndarray) -> list[dict[str, float]]:
    return [
        dict(zip(part.items.to_pylist(), sketch.amounts(part).tolist(), strict=True))
        for part in sketch.lists(table)
    ]


def test_an_item_with_many_copies_stays_and_one_with_few_becomes_the_threshold_or_nothing() -> None:
    items = ["oak"] * 4 + ["elm"] * 2 + ["ash"]
    results: set[tuple[str, float]] = set()
    for seed in range(12):
        table = SKETCH.draw(items, owners=np.zeros(7, dtype=np.int64), rng=SeededRng(seed))
        for listed in amounts(SKETCH, table):
            assert listed["oak"] == 4.0  # at least the threshold: always kept, as it is
            results |= set(listed.items())
    assert results == {("oak", 4.0), ("elm", 2.5), ("ash", 2.5)}


def test_samples_are_unbiased_with_the_papers_variance() -> None:
    """3,000 devices with c copies each: the mean is c, within six standard errors, and the variance
    c·(t − c), by the chi-squared law of a normal sum; false alarm 1e-6. A coin per copy would have
    a variance of c·(t − 1), four times as large, which the same test refuses."""
    devices, copies, threshold = 3_000, 4, 5.0
    tables = replace(TABLES, count_bits=14, value_bits=20)
    sketch = replace(SKETCH, tables=tables, threshold=threshold, repetitions=120)
    owners = np.repeat(np.arange(devices), copies)
    table = sketch.draw(["oak"] * owners.size, owners=owners, rng=SeededRng(SEED))
    totals = np.array([listed["oak"] for listed in amounts(sketch, table)])
    variance = devices * copies * (threshold - copies)
    assert abs(totals.mean() - devices * copies) < 6 * np.sqrt(variance / totals.size)
    squares = ((totals - totals.mean()) ** 2).sum()
    law = stats.chi2(totals.size - 1)
    assert 5e-7 < law.cdf(squares / variance) < 1 - 5e-7
    assert law.cdf(squares / (devices * copies * (threshold - 1))) < 5e-7
    heads = [sum(part.counts) for part in sketch.lists(table)]
    assert all(head * threshold == total for head, total in zip(heads, totals, strict=True))


def test_the_sum_of_devices_tables_has_the_items_of_all() -> None:
    whole = replace(COUNTED, threshold=1.0)  # everything is kept
    rng = SeededRng(SEED)
    one = whole.draw(["oak", "oak", "elm"], owners=np.zeros(3, dtype=np.int64), rng=rng)
    two = whole.draw(["oak"], owners=np.zeros(1, dtype=np.int64), rng=rng)
    both = whole.draw(
        ["oak", "oak", "elm", "oak"], owners=np.array([0, 0, 0, 1]), rng=SeededRng(SEED + 1)
    )
    mask = (1 << whole.tables.word_bits) - 1
    cells = whole.repetitions * np.prod(whole.tables.shape)
    assert np.array_equal((one + two)[:cells] & mask, both[:cells] & mask)
    assert np.array_equal(whole.counted(one + two), whole.counted(both))
    assert whole.encode(np.stack([one, two])).tolist() == (one + two).tolist()
    assert amounts(whole, both) == [{"oak": 3.0, "elm": 1.0}] * 3
    assert whole.estimate(both, ["oak", "elm", "fir"]).tolist() == [3.0, 1.0, 0.0]
    assert whole.counts is not None
    assert whole.counts.estimate(whole.counted(both), ["oak", "elm"]).tolist() == [3.0, 1.0]


def test_repetitions_have_coins_and_hash_functions_of_their_own() -> None:
    hashes = [SKETCH.sketch(repetition).hashes[1].tolist() for repetition in range(3)]
    other = replace(SKETCH, tables=replace(TABLES, round=1))
    hashes += [other.sketch(repetition).hashes[1].tolist() for repetition in range(3)]
    assert len({str(each) for each in hashes}) == 6
    items = [f"t{number}" for number in range(40)]
    wide = replace(SKETCH, tables=replace(TABLES, width=60))
    table = wide.draw(items, owners=np.zeros(40, dtype=np.int64), rng=SeededRng(SEED))
    first, second, third = ({*listed} for listed in amounts(wide, table))
    assert first != second != third != first


def test_devices_that_share_a_row_toss_a_coin_each() -> None:
    """Mean and variance of a binomial, within six standard errors (false alarm 1e-8)."""
    one_copy = replace(SKETCH, tables=replace(TABLES, copies=False, value_bits=0))
    devices = np.array([900], dtype=np.int64)
    table = one_copy.draw(["oak"], devices, rng=SeededRng(SEED))
    for listed in amounts(one_copy, table):
        assert abs(listed["oak"] - 900) < 6 * np.sqrt(900 * 1.5)


@pytest.mark.parametrize("sketch", [SKETCH, COUNTED])
def test_a_table_that_a_device_can_make_is_possible_and_others_are_not(
    sketch: SampledTables,
) -> None:
    owners = np.zeros(3, dtype=np.int64)
    for seed in range(10):
        table = sketch.draw(["oak", "oak", "elm"], owners=owners, rng=SeededRng(seed))
        assert sketch.possible(table[None], 3).tolist() == [True]
    whole = replace(sketch, threshold=1.0)
    table = whole.draw(["oak", "ash", "elm"], owners=owners, rng=SeededRng(1))
    assert whole.possible(table[None], 3).tolist() == [True]
    twice = whole.draw(["oak"], owners=owners[:1], rng=SeededRng(1)) * 2
    noise = np.random.default_rng(SEED).integers(-(2**20), 2**20, table.shape)
    many = whole.draw(["oak"] * 5, owners=np.zeros(5, dtype=np.int64), rng=SeededRng(1))
    assert whole.possible(np.stack([table, twice, noise]), 2).tolist() == [False, False, False]
    assert whole.possible(many[None], 5).tolist() == [True]
    assert whole.possible(many[None], 4).tolist() == [False]


@pytest.mark.parametrize(
    "change",
    [{"repetitions": 0}, {"threshold": 0.5}, {"threshold": 2.3}, {"count_bits": 9}],
)
def test_impossible_sizes_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        replace(SKETCH, **change)  # type: ignore[arg-type]  # one of its fields

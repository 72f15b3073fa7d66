"""The runs behind the figures of paper 001: count sketches that are queried for every string, and
invertible sketches that list their items.

Tables come from `sketch` and campaigns from `heavy_hitters`. A method is scored by F1: of the items
that it lists as held by at least `threshold` devices, against those that are. A budget is the
number of words of 16 bits that a device sends per round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfumato import kernels
from sfumato.arrays import F64, I64, U64
from sfumato.flow.release import NoisedSum
from sfumato.privacy import SeededRng
from sfumato.privacy.listing import without_promise
from sfumato.questions.heavy_hitters.design import (
    LOAD,
    PAPER_LOAD,
    HeavyHitterCampaign,
    HeavyHitterDesign,
)
from sfumato.reproduce.frequencies.runs import MODES, Mode, encode_rounds
from sfumato.reproduce.heavy_hitters.data import CELLS_PER_KEY, DEVICES, WORD_BITS, Words
from sfumato.sketch import CountSketch, InvertibleSketch

Counting = Literal["shared", "fresh", "hybrid", "unsigned"]

COUNTING: tuple[Counting, ...] = (*MODES, "unsigned")
ROWS = 3  # of an invertible sketch
_PLUS = np.array([0, 0, 0, 1], dtype=np.uint64)  # a sign polynomial that is always one


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The question, and the budget of a device."""

    rounds: int
    threshold: int
    budget: int


class Score(NamedTuple):
    """The quality of a list of heavy hitters."""

    f1: float
    wrong: int  # keys that a table listed and none of its devices sent


def sketch_totals(
    mode: Counting, counts: I64, points: U64, *, rows: int, width: int, seed: int
) -> F64:
    """Totals over rounds of every string, (categories,), by the median over rows."""
    if mode == "unsigned":
        return _count_median(counts, points, rows=rows, width=width, seed=seed)
    signed: Mode = mode
    tables = encode_rounds(
        signed, counts, points[: counts.shape[1]], rows=rows, width=width, seed=seed
    )
    return tables.estimate(points)


def _count_median(counts: I64, points: U64, *, rows: int, width: int, seed: int) -> F64:
    """Sketches without signs, new in every round: medians over rows, added up over rounds."""
    rounds = len(counts)
    plus = np.tile(_PLUS, (rows, 1))
    buckets = np.stack(
        [
            CountSketch(rows=rows, width=width, seed=seed, bucket_round=round).buckets
            for round in range(rounds)
        ]
    )
    tables = np.empty((rounds, rows, width))
    for round, count in enumerate(counts):
        some = np.flatnonzero(count)
        tables[round] = kernels.encode(points[some], count[some], buckets[round], plus, 0, width)
    which = np.zeros((rounds, 3), dtype=np.int64)
    which[:, 0] = np.arange(rounds)
    return kernels.decode(points, tables, buckets, plus[None], which, "median", True)


def count_sketches(
    counts: I64, points: U64, setting: Setting, *, rows: tuple[int, ...], seed: int
) -> Iterator[tuple[Counting, int, float]]:
    """Kind, rows and F1 of every count sketch that fits the budget with one word per cell."""
    heavy = np.zeros(points.size, dtype=np.bool_)
    heavy[: counts.shape[1]] = counts.sum(axis=0) >= setting.threshold
    for height in rows:
        width = setting.budget // height
        for mode in COUNTING:
            totals = sketch_totals(mode, counts, points, rows=height, width=width, seed=seed)
            listed = totals >= setting.threshold
            yield mode, height, f1(int(np.sum(listed & heavy)), int(listed.sum()), int(heavy.sum()))


def f1(right: int, listed: int, heavy: int) -> float:
    return 2 * right / (listed + heavy) if listed + heavy else 1.0


def paper_keys(words: Words, budget: int) -> float:
    """The number of keys for which the paper's table of this budget is made."""
    return budget / words.paper_key_words


def fixed_times(words: Words, counts: I64, setting: Setting) -> float:
    """The paper's t, of sampling by 1/t, for a table of this budget: as large as needed, but small
    enough to leave two of an item that is just a heavy hitter."""
    most = float(counts.sum(axis=1).max())
    return max(1.0, min(most / paper_keys(words, setting.budget), setting.threshold / 2))


def paper_design(
    words: Words, counts: I64, setting: Setting, *, times: float | None, seed: int
) -> HeavyHitterDesign:
    """The paper's tables: a sample of one in `times`, or adaptive (algorithm 4) if that is None."""
    keys = paper_keys(words, setting.budget)
    first = max(1.0, DEVICES / keys) if times is None else times
    return _design(
        words,
        counts,
        setting,
        width=int(CELLS_PER_KEY * keys) // ROWS,
        cell_bits=WORD_BITS * words.paper_cell_words,
        seed=seed,
        mechanism=without_promise(1 / first),
        adaptive=times is None,
        target=PAPER_LOAD * keys,
        partial=False,
        paper=True,
    )


def our_design(
    words: Words, counts: I64, setting: Setting, *, seed: int, adaptive: bool | None = None
) -> HeavyHitterDesign:
    """Ours: no sampling where the items of a whole round fit, which a pilot would find."""
    width = setting.budget // words.cell_words // ROWS
    target = LOAD * ROWS * width
    if adaptive is None:
        adaptive = words.distinct > target
    return _design(
        words,
        counts,
        setting,
        width=width,
        cell_bits=WORD_BITS * words.cell_words,
        seed=seed,
        mechanism=without_promise(min(1.0, target / DEVICES) if adaptive else 1.0),
        adaptive=adaptive,
        target=target,
        partial=True,
    )


def _design(words: Words, counts: I64, setting: Setting, **sizes: Any) -> HeavyHitterDesign:
    return HeavyHitterDesign(
        keys=words.keys,
        devices=setting.rounds * int(counts.sum(axis=1).max()),
        rounds=setting.rounds,
        rows=ROWS,
        items_per_device=1,
        **sizes,
    )


def score_campaign(
    design: HeavyHitterDesign, words: Words, counts: I64, setting: Setting, *, seed: int
) -> Score:
    """The score of a campaign at its end, with devices sampled in every round."""
    campaign = HeavyHitterCampaign(design, SeededRng(seed), least=setting.threshold)
    rng, wrong = np.random.default_rng([seed, setting.budget]), 0
    for count in counts:
        task = campaign.next_task()
        assert task is not None  # there is one round per row of counts
        sketch = task.sketch
        assert isinstance(sketch, InvertibleSketch)  # a search uses no other
        items = np.flatnonzero(count)
        devices = rng.binomial(count[items], campaign.rate)
        items, devices = items[devices > 0], devices[devices > 0]
        table = sketch.encode_keys(words.numbers[items], devices)
        campaign.absorb(NoisedSum(task, table, int(count.sum())))
        last = campaign.rounds[-1]
        if last.is_used:
            places = _places(last.listing.items, words.items.take(pa.array(items)))
            wrong += int(np.sum(places < 0))
    place = _places(campaign.heavy_hitters().items, words.items)
    heavy = counts.sum(axis=0) >= setting.threshold
    right = int(np.sum(heavy[place[place >= 0]]))
    return Score(f1(right, place.size, int(heavy.sum())), wrong)


def _places(items: pa.Array, among: pa.Array) -> I64:
    """The positions of the items among others, or -1."""
    places = pc.index_in(items.cast(among.type), value_set=among)
    return np.asarray(pc.fill_null(places, -1)).astype(np.int64)

"""Ten million items into a sketch of 5 × 65,536: against datasketches, numpy and scatter-adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from datasketches import count_min_sketch
from numba import njit

from benchmarks import race
from benchmarks.lines import Line, Settings
from sfumato import hashing
from sfumato.sketch import CountSketch

NAME = "encode"
SEED = 1
ROWS, WIDTH_BITS = 5, 16
table = race.table

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def run(settings: Settings) -> Iterator[Line]:
    items = 20_000 if settings.quick else 10_000_000
    sampled = min(items, 200_000)
    chance = np.random.default_rng(SEED)
    points = hashing.fingerprint(chance.integers(0, 1 << 40, size=items), SEED)
    listed = points[:sampled].tolist()
    cells = chance.integers(0, 1 << WIDTH_BITS, size=items, dtype=np.uint32)
    odd = chance.integers(0, 1 << 63, size=ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sketch = CountSketch(rows=ROWS, width=1 << WIDTH_BITS, seed=SEED)
    for cores in race.core_counts():
        case = f"{cores} core{'s' if cores > 1 else ''}"
        if not settings.wants(case):
            continue

        def scatter(start: int, stop: int) -> I64:
            sums = np.zeros((ROWS, 1 << WIDTH_BITS), dtype=np.int64)
            _scatter(cells[start:stop], sums)
            return sums

        yield race.run(
            race.Race(
                name=NAME,
                case=case,
                sizes={"items": items, "rows": ROWS, "width": 1 << WIDTH_BITS, "cores": cores},
                seeds=[SEED],
                ours=race.Contender(lambda: sketch.encode_points(points)),
                peers={
                    "datasketches count_min": race.Contender(
                        lambda: count_min(listed), items / sampled
                    ),
                    "numpy bincount": race.Contender(lambda: bincount(points, odd)),
                },
                floors={
                    f"{ROWS} scatter-adds": race.Contender(race.in_parts(scatter, items, cores))
                },
                packages=["datasketches"],
                cores=cores,
                note=f"datasketches was timed on {sampled:,} items and scaled to {items:,}; peers "
                "run on one core; numpy hashes by multiply-shift, which proves less than ours; the "
                "floor hashes nothing",
            ),
            settings,
        )


def count_min(items: list[int]) -> object:
    """The peer has one update per call and a minimum in place of signs."""
    sketch = count_min_sketch(ROWS, 1 << WIDTH_BITS)
    for item in items:
        sketch.update(item)
    return sketch


def bincount(points: U64, odd: U64) -> npt.NDArray[np.float64]:
    """A count sketch in numpy alone; `odd` has one multiplier per row."""
    sums = np.empty((odd.size, 1 << WIDTH_BITS))
    for row, multiplier in enumerate(odd):
        hashed = points * multiplier
        cell = (hashed >> np.uint64(64 - WIDTH_BITS)).astype(np.int64)
        sign = (hashed >> np.uint64(63 - WIDTH_BITS) & np.uint64(1)).astype(np.float64) * 2 - 1
        sums[row] = np.bincount(cell, weights=sign, minlength=1 << WIDTH_BITS)
    return sums


@njit(nogil=True, cache=True)
def _scatter(cells: Any, sums: Any) -> None:
    for row in range(sums.shape[0]):
        line = sums[row]
        for i in range(cells.size):
            line[cells[i]] += 1

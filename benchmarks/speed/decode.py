"""A million counts out of a sketch of 16 × 65,536: against numpy and sixteen gathers per item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks import race
from benchmarks.lines import Line, Settings
from sfumato import hashing
from sfumato.sketch import CountSketch, DecodedRounds

NAME = "decode"
SEED = 1
ROWS, WIDTH_BITS = 16, 16
table = race.table

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]


def run(settings: Settings) -> Iterator[Line]:
    items = 20_000 if settings.quick else 1_000_000
    chance = np.random.default_rng(SEED)
    points = hashing.fingerprint(chance.integers(0, 1 << 40, size=items), SEED)
    cells = chance.integers(0, 1 << WIDTH_BITS, size=items, dtype=np.uint32)
    odd = chance.integers(0, 1 << 63, size=ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sketch = CountSketch(rows=ROWS, width=1 << WIDTH_BITS, seed=SEED)
    rounds = DecodedRounds.of([(sketch, sketch.encode_points(points))])
    sums = rounds.tables[0]
    read = np.empty(items)
    for cores in race.core_counts():
        case = f"{cores} core{'s' if cores > 1 else ''}"
        if not settings.wants(case):
            continue

        def gather(start: int, stop: int) -> None:
            _gather(cells[start:stop], sums, read[start:stop])

        yield race.run(
            race.Race(
                name=NAME,
                case=case,
                sizes={"items": items, "rows": ROWS, "width": 1 << WIDTH_BITS, "cores": cores},
                seeds=[SEED],
                ours=race.Contender(lambda: rounds.estimate(points)),
                peers={
                    "numpy gather and median": race.Contender(
                        lambda: gather_median(points, odd, sums)
                    )
                },
                floors={f"{ROWS} gathers": race.Contender(race.in_parts(gather, items, cores))},
                cores=cores,
                note="numpy runs on one core and hashes by multiply-shift; the floor hashes "
                "nothing and takes no median",
            ),
            settings,
        )


def gather_median(points: U64, odd: U64, sums: F64) -> F64:
    """The peer: a numpy user's count sketch; `odd` has one multiplier per row."""
    readings = np.empty((odd.size, points.size))
    for row, multiplier in enumerate(odd):
        hashed = points * multiplier
        cell = (hashed >> np.uint64(64 - WIDTH_BITS)).astype(np.int64)
        sign = (hashed >> np.uint64(63 - WIDTH_BITS) & np.uint64(1)).astype(np.float64) * 2 - 1
        readings[row] = sums[row, cell] * sign
    return np.asarray(np.median(readings, axis=0))


@njit(nogil=True, cache=True)
def _gather(cells: Any, sums: Any, read: Any) -> None:
    read[:] = 0.0
    for row in range(sums.shape[0]):
        line = sums[row]
        for i in range(cells.size):
            read[i] += line[cells[i]]

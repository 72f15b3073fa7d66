"""Figures 1, 2 and 3 of paper 000: how wide a sketch must be, and how rounds should share hashes.

Beyond the paper, and drawn dashed: sizes with our constant 6, and Hybrid rounds read by the
refined decoder. Every repeat has its own seed, which draws the devices and the hash functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.reproduce import Claim, Figure, Outcome, Progress, Scale
from sfumato.reproduce.frequencies import claims as frequency_claims
from sfumato.reproduce.frequencies import data
from sfumato.reproduce.frequencies.data import LAW_ITEMS, LAW_ROWS, ROUNDS, Source
from sfumato.reproduce.frequencies.runs import (
    MODES,
    errors,
    item_points,
    one_round,
    ten_rounds,
)
from sfumato.reproduce.panels import Curves, Panel, Reading, Series, draw, lines, run_all

FIRST_SEED = 1
Keys = tuple[str, str, str]
FIGURE_1_KEYS: tuple[Keys, ...] = (("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i"))
LAWS = (1.1, 2.0, 5.0)
LAW_DEVICES = 1 << 40  # expected counts as whole numbers: shares to the 2**-40th
LARGEST_ERROR = "largest error (share of devices)"

# Colours of Okabe and Ito, which people with colour blindness can tell apart.
SERIES: Mapping[str, Series] = {
    "shared": Series(label="Shared", colour="#D55E00", marker="s"),
    "fresh": Series(label="Fresh", colour="#0072B2", marker="^"),
    "hybrid": Series(label="Hybrid", colour="#009E73", marker="o"),
    "hybrid refined": Series(
        label="Hybrid, refined decoder (ours)", colour="#009E73", marker="o", dashed=True
    ),
    "minimax": Series(label="minimax, eq. (3)", colour="#000000", marker="s"),
    "instance": Series(label="instance optimal, eq. (2)", colour="#CC79A7", marker="^"),
    "two-phase": Series(label="two-phase", colour="#E69F00", marker="o"),
    "instance 6": Series(
        label="instance, constant 6 (ours)", colour="#CC79A7", marker="^", dashed=True
    ),
    "two-phase 6": Series(
        label="two-phase, constant 6 (ours)", colour="#E69F00", marker="o", dashed=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    repeats: int
    widths: tuple[int, ...]
    targets: tuple[float, ...] = ()

    @property
    def seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats)


def _between(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in np.geomspace(low, high, count))


FIGURE_1: Mapping[Scale, Size] = {
    "small": Size(repeats=2, widths=(50, 200, 1000), targets=_between(0.0012, 0.09, 5)),
    "paper": Size(repeats=4, widths=(50, 100, 200, 500, 1000), targets=_between(0.0012, 0.09, 10)),
}
FIGURE_2: Mapping[Scale, Size] = {
    "small": Size(repeats=12, widths=(50, 100, 200, 400, 1000, 2000)),
    "paper": Size(repeats=1000, widths=(50, 100, 150, 200, 300, 500, 1000, 2000)),
}
FIGURE_3: Mapping[Scale, Size] = {
    "small": Size(repeats=2, widths=(50, 100, 200, 400, 600, 1200)),
    "paper": Size(repeats=10, widths=(50, 100, 200, 300, 400, 600, 800, 1000, 1200)),
}


def figure_1(size: Size, progress: Progress) -> Outcome:
    """Panels a, d, g: widths by strategy; b, e, h: the errors they give; c, f, i: rounds."""
    found = (data.gowalla(), data.c4_commits() or data.c4_law(), data.sentiment())
    sources = list(zip(FIGURE_1_KEYS, found, strict=True))

    def job(given: tuple[Keys, Source, int]) -> list[Reading]:
        (width_key, error_key, rounds_key), source, seed = given
        readings = []
        for target, series, width, error in one_round(source, size.targets, seed):
            readings.append(Reading(width_key, series, target, width))
            readings.append(Reading(error_key, series, target, error))
        for width, series, error in ten_rounds(source, size.widths, seed):
            readings.append(Reading(rounds_key, series, width, error))
        return readings

    panels = [panel for keys, source in sources for panel in _panels_1(source, keys)]
    jobs = [(*pair, seed) for pair in sources for seed in size.seeds]
    readings = run_all(job, jobs, lambda given: given[1].name, progress)
    numbers = lines("000-fig1", panels, readings, size.seeds)
    return _outcome(
        "Paper 000, figure 1: one round sized three ways, and ten rounds",
        panels,
        numbers,
        frequency_claims.figure_1(sources, Curves(numbers)),
        columns=3,
    )


def _panels_1(source: Source, keys: Keys) -> list[Panel]:
    one = f"{source.name}\none round of {source.one_round:,} devices, {source.rows} rows"
    target = "target error (share of devices)"
    return [
        Panel(key=keys[0], title=one, data=source.data, x_name=target, y_name="width"),
        Panel(
            key=keys[1],
            title=one,
            data=source.data,
            x_name=target,
            y_name=LARGEST_ERROR,
            diagonal="target",
        ),
        Panel(
            key=keys[2],
            title=_ten_rounds_of(source),
            data=source.data,
            x_name="width",
            y_name=LARGEST_ERROR,
            floor=0.5 / (ROUNDS * source.per_round),
            floor_name="half a device",
        ),
    ]


def _ten_rounds_of(source: Source) -> str:
    devices = f"{ROUNDS} rounds of {source.per_round:,} devices"
    return f"{source.name}\n{devices}, {source.rows} rows"


def figure_2(size: Size, progress: Progress) -> Outcome:
    """The mean largest error of the three modes on three power laws, rounds exactly alike."""

    def job(given: tuple[str, float, int]) -> list[Reading]:
        key, exponent, seed = given
        shares = data.power_law_shares(exponent, LAW_ITEMS)
        counts = np.tile(np.rint(shares * LAW_DEVICES).astype(np.int64), (ROUNDS, 1))
        points = item_points(LAW_ITEMS, seed)
        return [
            Reading(key, mode, width, float(wrong.max()))
            for width in size.widths
            for mode in MODES
            for wrong in [errors(mode, counts, points, rows=LAW_ROWS, width=width, seed=seed)]
        ]

    keyed = list(zip("abc", LAWS, strict=True))
    panels = [
        Panel(
            key=key,
            title=f"law i^-{exponent:g}\n{LAW_ITEMS:,} items, {LAW_ROWS} rows",
            data=f"law i^-{exponent:g}, expected counts, the same in each of {ROUNDS} rounds",
            x_name="width",
            y_name="mean l" + LARGEST_ERROR[1:],
        )
        for key, exponent in keyed
    ]
    jobs = [(*pair, seed) for pair in keyed for seed in size.seeds]
    readings = run_all(job, jobs, lambda given: f"law i^-{given[1]:g}", progress)
    numbers = lines("000-fig2", panels, readings, size.seeds)
    return _outcome(
        f"Paper 000, figure 2: {ROUNDS} rounds exactly alike, synthetic laws",
        panels,
        numbers,
        frequency_claims.figure_2(keyed, Curves(numbers)),
        columns=3,
    )


def figure_3(size: Size, progress: Progress) -> Outcome:
    """Items with an error above 0.1/width, on the law i^-1.8 and on what stands in for C4."""
    found = (data.c4_law(), data.c4_commits(), data.c4_hosts())
    sources = list(zip("abc", (source for source in found if source), strict=False))

    def job(given: tuple[str, Source, int]) -> list[Reading]:
        key, source, seed = given
        counts = source.counts(ROUNDS, source.per_round, np.random.default_rng(seed))
        points = item_points(source.categories, seed)
        return [
            Reading(key, mode, width, int(np.sum(wrong > 0.1 / width)))
            for width in size.widths
            for mode in MODES
            for wrong in [errors(mode, counts, points, rows=source.rows, width=width, seed=seed)]
        ]

    panels = [
        Panel(
            key=key,
            title=_ten_rounds_of(source),
            data=source.data,
            x_name="width",
            y_name="items with error above 0.1/width",
            floor=0.1,
            floor_name="none",
            level=("hybrid", 200),
        )
        for key, source in sources
    ]
    jobs = [(*pair, seed) for pair in sources for seed in size.seeds]
    readings = run_all(job, jobs, lambda given: given[1].name, progress)
    numbers = lines("000-fig3", panels, readings, size.seeds)
    return _outcome(
        f"Paper 000, figure 3: items estimated badly, of {data.C4_ITEMS:,}",
        panels,
        numbers,
        frequency_claims.figure_3(sources, Curves(numbers)),
        columns=len(panels),
    )


def _outcome(
    title: str,
    panels: Sequence[Panel],
    numbers: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    *,
    columns: int,
) -> Outcome:
    return Outcome(
        numbers=numbers,
        claims=claims,
        draw=lambda: draw(title, panels, numbers, SERIES, columns=columns),
    )


def _at(
    run: Callable[[Size, Progress], Outcome], sizes: Mapping[Scale, Size]
) -> Callable[[Scale, Progress], Outcome]:
    return lambda scale, progress: run(sizes[scale], progress)


FIGURES = (
    Figure(
        name="000-fig1",
        title="sketch widths and errors on real data, one round and ten (paper 000)",
        run=_at(figure_1, FIGURE_1),
    ),
    Figure(
        name="000-fig2",
        title="Shared, Fresh and Hybrid rounds that are exactly alike (paper 000)",
        run=_at(figure_2, FIGURE_2),
    ),
    Figure(
        name="000-fig3",
        title="items estimated badly by Shared, Fresh and Hybrid rounds (paper 000)",
        run=_at(figure_3, FIGURE_3),
    ),
)

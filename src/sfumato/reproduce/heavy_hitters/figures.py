"""Figures 1 to 4 of paper 001: heavy hitters by what devices send, by rounds and by sampling.

Figures 1 and 2 of the paper show the same. Beyond the paper, and drawn dashed: our tables. The
count sketches are asked about all 97,336 strings, and each shows the number of rows that was best
on average at that x, chosen after the fact: a help that the other methods do not get. Whole words
have no such list, so there only invertible sketches are run. Every repeat has its own seed, which
draws devices, coins and hash functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sfumato.reproduce import Claim, Figure, Outcome, Progress, Scale
from sfumato.reproduce.frequencies.runs import item_points
from sfumato.reproduce.heavy_hitters import claims as heavy_claims
from sfumato.reproduce.heavy_hitters import data, runs
from sfumato.reproduce.heavy_hitters.claims import wrong_panel
from sfumato.reproduce.heavy_hitters.data import Words
from sfumato.reproduce.heavy_hitters.runs import Setting
from sfumato.reproduce.panels import Curves, Panel, Reading, Series, draw, lines, run_all

FIRST_SEED = 1
F1 = "F1 of the heavy hitters"
WRONG = "keys listed that nobody held"
Keyed = tuple[str, Words]

# Colours of Okabe and Ito, which people with colour blindness can tell apart.
SERIES: Mapping[str, Series] = {
    "unsigned": Series(label="count-median, no signs", colour="#CC79A7", marker="v"),
    "shared": Series(label="CountSketch, Shared", colour="#D55E00", marker="s"),
    "hybrid": Series(label="CountSketch, Hybrid", colour="#009E73", marker="o"),
    "fresh": Series(label="CountSketch, Fresh", colour="#0072B2", marker="^"),
    "unsampled": Series(label="IBLT, no sampling", colour="#999999", marker="x"),
    "fixed": Series(label="IBLT, fixed sampling", colour="#56B4E9", marker="D"),
    "adaptive": Series(label="IBLT, adaptive", colour="#E69F00", marker="P"),
    "ours": Series(label="ours", colour="#000000", marker="o", dashed=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    repeats: int
    along: tuple[float, ...]  # the figure's x: budgets, rounds, or t
    rows: tuple[int, ...]  # that count sketches may have

    @property
    def seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats)


_ROWS = (5, 7, 9, 11)
_TIMES = (1, 1.25, 2, 5, 10, 20, 50, 100)
_BUDGETS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
FIGURE_2: Mapping[Scale, Size] = {
    "small": Size(repeats=2, along=(200, 500, 2_000, 5_000, 20_000), rows=(5, 9)),
    "paper": Size(repeats=3, along=_BUDGETS, rows=_ROWS),
}
FIGURE_3: Mapping[Scale, Size] = {
    "small": Size(repeats=2, along=(10, 30), rows=(5, 9)),
    "paper": Size(repeats=3, along=(10, 30, 50, 100), rows=_ROWS),
}
FIGURE_4: Mapping[Scale, Size] = {
    "small": Size(repeats=2, along=_TIMES, rows=_ROWS),
    "paper": Size(repeats=12, along=_TIMES, rows=_ROWS),
}
SETTING_2 = Setting(rounds=30, threshold=50, budget=0)  # the budget is what varies
SETTING_3 = Setting(rounds=0, threshold=200, budget=10_000)  # the rounds are
SETTING_4 = Setting(rounds=30, threshold=200, budget=5_000)


def figure_2(name: str, size: Size, progress: Progress) -> Outcome:
    """F1 by what a device may send."""
    return _every_method(
        name,
        f"Paper 001, figures 1 and 2: {SETTING_2.rounds} rounds, at least {SETTING_2.threshold} "
        "devices",
        lambda budget: replace(SETTING_2, budget=int(budget)),
        "words of 16 bits that a device sends in a round",
        heavy_claims.figure_2,
        size,
        progress,
    )


def figure_3(name: str, size: Size, progress: Progress) -> Outcome:
    """F1 by rounds."""
    return _every_method(
        name,
        f"Paper 001, figure 3: {SETTING_3.budget:,} words, at least {SETTING_3.threshold} devices",
        lambda rounds: replace(SETTING_3, rounds=int(rounds)),
        "rounds",
        heavy_claims.figure_3,
        size,
        progress,
    )


def _every_method(
    name: str,
    title: str,
    setting: Callable[[float], Setting],
    x_name: str,
    claims: Callable[[Sequence[Keyed], Curves], Sequence[Claim]],
    size: Size,
    progress: Progress,
) -> Outcome:
    keyed = _keyed()

    def job(given: tuple[float, str, Words, int]) -> list[Reading]:
        x, key, words, seed = given
        return _methods(key, words, setting(x), x, size.rows, seed)

    jobs = [(x, *pair, seed) for x in size.along for pair in keyed for seed in size.seeds]
    readings = run_all(job, jobs, lambda given: f"{x_name.split()[0]}: {given[0]:,g}", progress)
    panels = _panels(keyed, x_name)
    return _outcome(name, title, panels, readings, size, partial(claims, keyed))


def figure_4(name: str, size: Size, progress: Progress) -> Outcome:
    """F1 of a fixed sample of one in t, and of tables that find their own t, which are drawn as
    level lines."""
    keyed, setting = _keyed(), SETTING_4

    def job(given: tuple[str, Words, int]) -> list[Reading]:
        key, words, seed = given
        counts = words.rounds(setting.rounds, seed)
        designs = {
            ("fixed", times): runs.paper_design(words, counts, setting, times=times, seed=seed)
            for times in size.along
        }
        adaptive = runs.paper_design(words, counts, setting, times=None, seed=seed)
        ours = runs.our_design(words, counts, setting, seed=seed, adaptive=True)
        found = [
            Reading(key, series, times, runs.listed(design, words, counts, setting, seed=seed).f1)
            for (series, times), design in designs.items()
        ]
        for series, design in (("adaptive", adaptive), ("ours", ours)):
            score = runs.listed(design, words, counts, setting, seed=seed).f1
            found += [Reading(key, series, times, score) for times in size.along]
        return found

    jobs = [(*pair, seed) for pair in keyed for seed in size.seeds]
    readings = run_all(job, jobs, lambda given: given[1].name, progress)
    asked = f"{setting.rounds} rounds, {setting.budget:,} words, at least {setting.threshold}"
    return _outcome(
        name,
        f"Paper 001, figure 4: {asked} devices",
        _panels(keyed, "t: one device in t is sampled"),
        readings,
        size,
        partial(heavy_claims.figure_4, keyed),
    )


def _keyed() -> list[Keyed]:
    return list(zip("abcd", [*data.short_words(), *data.whole_words()], strict=False))


def _methods(
    key: str, words: Words, setting: Setting, x: float, rows: tuple[int, ...], seed: int
) -> list[Reading]:
    """Every method over the same devices. A count sketch's series names its rows, too."""
    counts = words.rounds(setting.rounds, seed)
    times = runs.fixed_times(words, counts, setting)
    designs = {
        "unsampled": runs.paper_design(words, counts, setting, times=1.0, seed=seed),
        "fixed": runs.paper_design(words, counts, setting, times=times, seed=seed),
        "adaptive": runs.paper_design(words, counts, setting, times=None, seed=seed),
        "ours": runs.our_design(words, counts, setting, seed=seed),
    }
    readings = []
    if words.categories:
        points = item_points(words.categories, seed)
        readings += [
            Reading(key, f"{mode}/{height}", x, score)
            for mode, height, score in runs.count_sketches(
                counts, points, setting, rows=rows, seed=seed
            )
        ]
    for series, design in designs.items():
        score = runs.listed(design, words, counts, setting, seed=seed)
        readings.append(Reading(key, series, x, score.f1))
        readings.append(Reading(wrong_panel(key), series, x, score.wrong))
    return readings


def best_rows(
    readings: Iterable[Reading],
) -> tuple[list[Reading], dict[tuple[str, str, float], int]]:
    """Of each count sketch the rows with the best mean at an x, and which they were."""
    held: dict[tuple[str, str, float], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for panel, series, x, y in readings:
        kind, _, rows = series.partition("/")
        held[panel, kind, x][int(rows or runs.ROWS)].append(y)
    kept, chosen = [], {}
    for (panel, kind, x), tried in held.items():
        best, values = max(tried.items(), key=lambda pair: float(np.mean(pair[1])))
        kept += [Reading(panel, kind, x, y) for y in values]
        chosen[panel, kind, x] = best
    return kept, chosen


def _panels(keyed: Sequence[Keyed], x_name: str) -> list[Panel]:
    return [
        Panel(
            key=key,
            title=f"{words.name}\n{_domain(words)}",
            data=words.data,
            x_name=x_name,
            y_name=F1,
            linear=True,
        )
        for key, words in keyed
    ]


def _domain(words: Words) -> str:
    if words.categories:
        return f"{words.categories:,} strings"
    return "an open domain, of which no count sketch can be asked"


def _outcome(
    name: str,
    title: str,
    panels: Sequence[Panel],
    readings: Iterable[Reading],
    size: Size,
    claims: Callable[[Curves], Sequence[Claim]],
) -> Outcome:
    kept, chosen = best_rows(readings)
    undrawn = [
        Panel(key=wrong_panel(p.key), title=p.title, data=p.data, x_name=p.x_name, y_name=WRONG)
        for p in panels
    ]
    numbers: list[dict[str, Any]] = [
        {**line, "rows": chosen[line["panel"], line["series"], line["x"]]}
        for line in lines(name, [*panels, *undrawn], kept, size.seeds)
    ]
    columns = 2 if len(panels) % 2 == 0 else len(panels)
    return Outcome(
        numbers=numbers,
        claims=claims(Curves(numbers)),
        draw=lambda: draw(title, panels, numbers, SERIES, columns=columns),
    )


def _figure(
    name: str,
    title: str,
    run: Callable[[str, Size, Progress], Outcome],
    sizes: Mapping[Scale, Size],
) -> Figure:
    return Figure(
        name=name,
        title=f"{title} (paper 001)",
        run=lambda scale, progress: run(name, sizes[scale], progress),
    )


FIGURES = (
    _figure("001-fig1", "the same as 001-fig2", figure_2, FIGURE_2),
    _figure("001-fig2", "heavy hitters by what a device sends", figure_2, FIGURE_2),
    _figure("001-fig3", "heavy hitters by the number of rounds", figure_3, FIGURE_3),
    _figure("001-fig4", "heavy hitters by how much is sampled", figure_4, FIGURE_4),
)

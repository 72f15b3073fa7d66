"""Figures 1 and 2 and tables 1 to 3 of paper 002: accuracy and rate of compressed private training.

A table's numbers are drawn as accuracy and rate by the noise multiplier, beside those that the
paper printed for its own data. Rows are no compression, the best fixed rate ("Genie"), Adapt Norm
at four c, Two Stage, and ours (dashed). Every line of numbers has the epsilon of its multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sfumato.reproduce import Figure, Outcome, Progress, Scale
from sfumato.reproduce.learning import claims as learning_claims
from sfumato.reproduce.learning import data
from sfumato.reproduce.learning.claims import ERRORS, OURS, PAPERS, STAGED, Slack
from sfumato.reproduce.learning.data import Printed, Workload
from sfumato.reproduce.learning.runs import (
    NONE,
    Job,
    Method,
    Runs,
    paper_epsilon,
    shown,
    train_all,
)
from sfumato.reproduce.panels import Panel, Reading, Series, draw, lines

FIRST_SEED = 1
ACCURACY, RATE, NOISE = "accuracy on test examples", "rate (parameters by cells sent)", "noise z"
OURS_ERRORS = (0.1, 0.5)  # of ours, in figure 2
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "os^vDP"

# Colours of Okabe and Ito, which people with colour blindness can tell apart.
SERIES: Mapping[str, Series] = {
    "none": Series(label="none", colour="#999999", marker="x"),
    "genie": Series(label="Genie", colour="#56B4E9", marker="D"),
    "fixed": Series(label="fixed rates", colour="#56B4E9", marker="D"),
    "adapt_norm": Series(label="Adapt Norm", colour="#D55E00", marker="s"),
    "adapt_norm 0.25": Series(label="Adapt Norm 0.25", colour="#CC79A7", marker="v"),
    "adapt_norm 0.1": Series(label="Adapt Norm 0.1", colour="#D55E00", marker="s"),
    "adapt_norm 0.05": Series(label="Adapt Norm 0.05", colour="#E69F00", marker="P"),
    "adapt_norm 0.01": Series(label="Adapt Norm 0.01", colour="#009E73", marker="^"),
    "two_stage": Series(label="Two Stage", colour="#0072B2", marker="^"),
    str(STAGED): Series(label="Two Stage 0.1", colour="#0072B2", marker="o"),
    "ours": Series(label="ours", colour="#000000", marker="o", dashed=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    workloads: tuple[Workload, ...]
    multipliers: tuple[tuple[float, ...], ...]  # of each workload
    rates: tuple[float, ...]  # fixed ones
    repeats: int
    slack: Slack
    gpu: bool = False

    @property
    def seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats)

    def jobs(self, methods: Sequence[Method]) -> list[Job]:
        every = [NONE, *(Method("fixed", rate) for rate in self.rates), *methods]
        return [
            Job(place, multiplier, method, seed)
            for place, multipliers in enumerate(self.multipliers)
            for multiplier in multipliers
            for method in every
            for seed in self.seeds
        ]

    def train(self, methods: Sequence[Method], progress: Progress) -> list[Runs]:
        return train_all(self.workloads, self.jobs(methods), progress, gpu=self.gpu)


_SMALL = Size(
    workloads=(data.SMALL_1,),
    multipliers=((0.5, 1.0, 2.0),),
    rates=(2, 4, 8, 16, 32, 64),
    repeats=2,
    slack=Slack(share=0.02, errors=2.0),
)
_FULL = Size(
    workloads=(data.PAPER_1,),
    multipliers=(data.TABLE_1.multipliers,),
    rates=tuple(2.0**power for power in range(1, 14)),
    repeats=2,
    slack=Slack(share=0.01, errors=0.0),
    gpu=True,
)
SIZES_1: Mapping[Scale, Size] = {"small": _SMALL, "paper": _FULL}
SIZES_2: Mapping[Scale, Size] = {
    "small": replace(
        _SMALL, workloads=(data.SMALL_2,), multipliers=((0.5, 1.0),), rates=(4, 16, 64)
    ),
    "paper": replace(_FULL, workloads=(data.PAPER_2,), multipliers=(data.TABLE_2.multipliers,)),
}
SIZES_3: Mapping[Scale, Size] = {
    "small": replace(
        _SMALL, workloads=(data.SMALL_3,), multipliers=((0.5, 1.0),), rates=(4, 16, 64)
    ),
    "paper": replace(_FULL, workloads=(data.PAPER_3,), multipliers=(data.TABLE_3.multipliers,)),
}
FIGURE_1: Mapping[Scale, Size] = {
    "small": replace(
        _SMALL,
        workloads=(data.SMALL_1, data.SMALL_2, data.SMALL_3),
        multipliers=((0.5, 1.0),) * 3,
        rates=(4, 16, 64, 256),
    ),
    "paper": replace(
        _FULL,
        workloads=(data.PAPER_1, data.PAPER_2, data.PAPER_3),
        multipliers=((0.1, 0.3, 0.5),) * 3,
    ),
}
FIGURE_2: Mapping[Scale, Size] = {
    "small": replace(_SMALL, multipliers=((1.0, 2.0),), rates=(2, 8, 32, 128)),
    "paper": replace(
        _FULL,
        workloads=(data.PAPER_1, data.PAPER_2, data.PAPER_3),
        multipliers=((0.3,),) * 3,
    ),
}


def table(name: str, number: int, printed: Printed, size: Size, progress: Progress) -> Outcome:
    """Accuracy and rate by noise multiplier, here and in the paper."""
    norms = [Method("adapt_norm", error) for error in ERRORS]
    (runs,) = size.train([*norms, STAGED, OURS], progress)
    readings: list[Reading] = []
    tried: list[dict[str, Any]] = []
    for z in runs.multipliers:
        rows = {"none": NONE, "genie": runs.genie(z), "ours": OURS}
        rows |= {str(method): method for method in (*norms, STAGED)}
        for series, method in rows.items():
            found = runs.found[z, method]
            readings += [Reading("a", series, z, float(y)) for y in found.accuracies]
            readings += [Reading("b", series, z, float(y)) for y in found.rates]
        tried += _fixed_rates(name, runs, z, size)
    panels = _table_panels(runs, printed)
    drawn = [
        *_with_epsilon(lines(name, panels, readings, size.seeds), runs),
        *_printed_lines(name, panels, printed),
    ]
    return Outcome(
        numbers=[*drawn, *tried],
        claims=learning_claims.table(number, runs, printed, size.slack),
        draw=lambda: draw(
            f"Paper 002, table {number}: {runs.workload.name}, and the paper's {printed.name}",
            panels,
            drawn,
            SERIES,
            columns=2,
        ),
    )


def figure_1(name: str, size: Size, progress: Progress) -> Outcome:
    """Accuracy by fixed rate for each task, and the best rate of each by noise."""
    every = size.train([], progress)
    letters = "abcdefgh"[: len(every) + 1]
    series: dict[str, Series] = {}
    panels, numbers = [], []
    for letter, runs in zip(letters, every, strict=False):
        panel = Panel(
            key=letter,
            title=f"{runs.workload.name}\n{runs.parameters:,} parameters",
            data=runs.data,
            x_name="fixed rate (1: no compression)",
            y_name=ACCURACY,
            linear=True,
        )
        panels.append(panel)
        for z in runs.multipliers:
            key = f"z = {z:g}"
            series.setdefault(key, _style(key, len(series)))
            readings = [
                Reading(letter, key, method.value or 1.0, float(y))
                for (noise, method), found in runs.found.items()
                if noise == z
                for y in found.accuracies
            ]
            made = lines(name, [panel], readings, size.seeds)
            numbers += _with_epsilon(made, runs, z)
    best = letters[-1]
    for runs in every:
        key = runs.workload.name
        panel = Panel(
            key=best,
            title="the best rate that loses at most 1%",
            data=runs.data,
            x_name=NOISE,
            y_name=RATE,
        )
        series[key] = _style(key, len(series))
        readings = [
            Reading(best, key, z, float(y))
            for z in runs.multipliers
            for y in runs.found[z, runs.genie(z)].rates
        ]
        made = lines(name, [panel], readings, size.seeds)
        numbers += _with_epsilon(made, runs)
    panels.append(panel)
    return Outcome(
        numbers=numbers,
        claims=learning_claims.figure_1(every),
        draw=lambda: draw(
            "Paper 002, figure 1: what a fixed rate costs",
            panels,
            numbers,
            series,
            columns=2 if len(panels) % 2 == 0 else len(panels),
        ),
    )


def figure_2(name: str, size: Size, progress: Progress) -> Outcome:
    """Accuracy by the rate that Adapt Norm and Two Stage came to, over c."""
    methods = [Method(kind, c) for kind in ("adapt_norm", "two_stage") for c in ERRORS]
    methods += [Method("ours", error) for error in OURS_ERRORS]
    every = size.train(methods, progress)
    panels, numbers = [], []
    pairs = [(runs, z) for runs in every for z in runs.multipliers]
    for letter, (runs, z) in zip("abcdefghijkl", pairs, strict=False):
        panel = Panel(
            key=letter,
            title=f"{runs.workload.name}\nz = {z:g}, epsilon {shown(runs.epsilons[z])}",
            data=runs.data,
            x_name=RATE,
            y_name=ACCURACY,
            linear=True,
        )
        panels.append(panel)
        for (noise, method), found in runs.found.items():
            if noise != z:
                continue
            readings = [
                Reading(letter, method.kind, found.rate, float(y)) for y in found.accuracies
            ]
            for line in lines(name, [panel], readings, size.seeds):
                (told,) = _with_epsilon([line], runs, z)
                numbers.append({**told, "method": str(method)})
    return Outcome(
        numbers=numbers,
        claims=learning_claims.figure_2(every, size.slack),
        draw=lambda: draw(
            "Paper 002, figure 2: accuracy by rate over c",
            panels,
            numbers,
            SERIES,
            columns=len(panels),
        ),
    )


def _table_panels(runs: Runs, printed: Printed) -> list[Panel]:
    """Here above, the paper below; z and its epsilon are in the numbers."""
    spend = ", ".join(shown(runs.epsilons[z]) for z in runs.multipliers)
    here = f"{runs.workload.name}\nepsilon {spend} for z from the left"
    spend = ", ".join(shown(paper_epsilon(printed, z)) for z in printed.multipliers)
    there = f"the paper's: {printed.name}\nepsilon {spend} for z from the left"
    said = f"printed in the paper: {printed.name}, {printed.parameters:,} parameters"
    return [
        Panel(key="a", title=here, data=runs.data, x_name=NOISE, y_name=ACCURACY, linear=True),
        Panel(key="b", title=here, data=runs.data, x_name=NOISE, y_name=RATE),
        Panel(key="c", title=there, data=said, x_name=NOISE, y_name=ACCURACY, linear=True),
        Panel(key="d", title=there, data=said, x_name=NOISE, y_name=RATE),
    ]


def _as_printed(printed: Printed) -> Iterable[Reading]:
    for panel, rows, unit in (("c", printed.accuracy, 100.0), ("d", printed.rate, 1.0)):
        for row, values in rows.items():
            series = row if row == "genie" else f"{PAPERS.kind} {row}"
            for z, value in zip(printed.multipliers, values, strict=True):
                yield Reading(panel, series, z, value / unit)


def _printed_lines(name: str, panels: Sequence[Panel], printed: Printed) -> list[dict[str, Any]]:
    """What the paper printed has no seeds of ours; its means are over five runs."""
    epsilons = {z: paper_epsilon(printed, z) for z in printed.multipliers}
    return [
        {**line, "seeds": None, "epsilon": epsilons[line["x"]], "delta": 1 / printed.clients}
        for line in lines(name, panels, _as_printed(printed), range(1))
    ]


def _with_epsilon(
    made: Sequence[dict[str, Any]], runs: Runs, multiplier: float | None = None
) -> list[dict[str, Any]]:
    """The lines with what this noise costs; without a multiplier, a line's x is it."""
    spent = [runs.epsilons[line["x"] if multiplier is None else multiplier] for line in made]
    return [
        {**line, "epsilon": epsilon, "delta": runs.delta}
        for line, epsilon in zip(made, spent, strict=True)
    ]


def _fixed_rates(name: str, runs: Runs, multiplier: float, size: Size) -> list[dict[str, Any]]:
    """Numbers that are not drawn: every fixed rate that was tried."""
    panel = Panel(
        key=f"fixed rates at z = {multiplier:g}",
        title="",
        data=runs.data,
        x_name="fixed rate",
        y_name=ACCURACY,
    )
    readings = [
        Reading(panel.key, "fixed", rate, float(y))
        for rate in size.rates
        for y in runs.found[multiplier, Method("fixed", rate)].accuracies
    ]
    return _with_epsilon(lines(name, [panel], readings, size.seeds), runs, multiplier)


def _style(label: str, place: int) -> Series:
    at = place % len(_COLOURS)
    return Series(label=label, colour=_COLOURS[at], marker=_MARKERS[at])


def _figure(
    name: str,
    title: str,
    run: Callable[[str, Size, Progress], Outcome],
    sizes: Mapping[Scale, Size],
) -> Figure:
    return Figure(
        name=name,
        title=f"{title} (paper 002)",
        run=lambda scale, progress: run(name, sizes[scale], progress),
    )


def _table(number: int, printed: Printed, title: str, sizes: Mapping[Scale, Size]) -> Figure:
    return _figure(
        f"002-table{number}",
        title,
        lambda name, size, progress: table(name, number, printed, size, progress),
        sizes,
    )


FIGURES = (
    _figure("002-fig1", "accuracy of private training by fixed rate", figure_1, FIGURE_1),
    _figure("002-fig2", "accuracy by rate of adaptive compression", figure_2, FIGURE_2),
    _table(1, data.TABLE_1, "adaptive compression, handwriting", SIZES_1),
    _table(2, data.TABLE_2, "adaptive compression, next character", SIZES_2),
    _table(3, data.TABLE_3, "adaptive compression, next word", SIZES_3),
)

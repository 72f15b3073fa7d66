"""Repeated runs as number lines, and number lines as a picture with panels.

A run gives readings; `lines` makes one number line of each panel, series and x, with the mean over
runs, its standard error and the range that holds the middle 80% of runs. Pictures are drawn from
those lines alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sfumato.errors import SfumatoError
from sfumato.reproduce import Progress

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Line = Mapping[str, Any]
_Job = TypeVar("_Job")

LOW, HIGH = 0.1, 0.9  # quantiles over runs that a line gives beside the mean
CHANCE = 3  # standard errors within which two means are not told apart
_GUIDE: Mapping[str, Any] = {"color": "#888888", "linestyle": ":", "linewidth": 1.2}


class Reading(NamedTuple):
    """One number of one run."""

    panel: str
    series: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes, and what its numbers are about."""

    key: str  # the paper's letter
    title: str
    data: str
    x_name: str
    y_name: str
    diagonal: str = ""  # what the line y = x means, where there is one
    floor: float = 0.0  # smaller values are drawn here, since a logarithmic axis has no zero
    floor_name: str = ""
    level: tuple[str, float] | None = None  # a series and an x at whose y a line runs across
    linear: bool = False  # y runs evenly from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """How a series is drawn, the same in every panel."""

    label: str
    colour: str
    marker: str
    dashed: bool = False  # beyond the paper


def run_all(
    job: Callable[[_Job], list[Reading]],
    jobs: Sequence[_Job],
    stage: Callable[[_Job], str],
    progress: Progress,
) -> list[Reading]:
    """The readings of all jobs, a job a core at a time (the kernels release the lock)."""
    readings: list[Reading] = []
    progress(stage(jobs[0]), 0.0)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done, (given, found) in enumerate(zip(jobs, pool.map(job, jobs), strict=True), 1):
            readings += found
            progress(stage(given), done / len(jobs))
    return readings


def lines(
    figure: str, panels: Sequence[Panel], readings: Iterable[Reading], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One line of plain JSON values a panel, series and x, in the order they first came."""
    about = {panel.key: panel for panel in panels}
    held: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for panel, series, x, y in readings:
        held[panel, series, x].append(y)
    return [
        {
            "figure": figure,
            "panel": panel,
            "data": about[panel].data,
            "series": series,
            "x_name": about[panel].x_name,
            "x": x,
            "y_name": about[panel].y_name,
            "y": float(np.mean(values)),
            "y_stderr": float(np.std(values, ddof=1) / len(values) ** 0.5 if values[1:] else 0),
            "y_low": float(np.quantile(values, LOW)),
            "y_high": float(np.quantile(values, HIGH)),
            "repeats": len(values),
            "seeds": {"first": seeds[0], "last": seeds[-1]},
        }
        for (panel, series, x), values in held.items()
    ]


class Curves:
    """The number lines by panel and series; arrays are in the order of x."""

    def __init__(self, numbers: Sequence[Line]) -> None:
        held: dict[tuple[str, str], list[Line]] = defaultdict(list)
        for line in numbers:
            held[line["panel"], line["series"]].append(line)
        self._held = {key: sorted(group, key=lambda n: n["x"]) for key, group in held.items()}

    def get(self, panel: str, series: str, field: str = "y") -> F64:
        return np.array([line[field] for line in self._held[panel, series]], dtype=np.float64)

    def at(self, panel: str, series: str, x: float) -> float:
        """The mean at this x, or not a number where it was not run."""
        found = [line["y"] for line in self._held[panel, series] if line["x"] == x]
        return float(found[0]) if found else float("nan")

    def behind(self, panel: str, series: str, other: str) -> Bool:
        """Where a series' mean is above the other's by more than chance explains, by x."""
        gap = self.get(panel, series) - self.get(panel, other)
        noise = np.hypot(self.get(panel, series, "y_stderr"), self.get(panel, other, "y_stderr"))
        return np.asarray(gap > CHANCE * noise)

    def series(self, panel: str) -> list[str]:
        return [series for key, series in self._held if key == panel]


def draw(
    title: str,
    panels: Sequence[Panel],
    numbers: Sequence[Line],
    series: Mapping[str, Series],
    *,
    columns: int,
) -> Any:
    """A matplotlib figure with these panels, `columns` in a row, and one legend below."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SfumatoError("plots need matplotlib", hint='pip install "sfumato[plot]"') from problem
    from matplotlib.lines import Line2D

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.5 * rows + 1.0), layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    curves = Curves(numbers)
    shown: dict[str, Series] = {}
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, curves, series)
        shown |= {name: series[name] for name in curves.series(panel.key)}
    handles = [Line2D([], [], label=style.label, **_line_style(style)) for style in shown.values()]
    runs = max(line["repeats"] for line in numbers)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(5, len(handles)),
        fontsize=8.5,
        frameon=False,
        title=f"mean of {runs:,} run{'s' * (runs > 1)}; shaded: the middle 80% of them",
        title_fontsize=8.5,
    )
    return figure


def _line_style(style: Series) -> dict[str, Any]:
    return {
        "color": style.colour,
        "marker": style.marker,
        "markersize": 4.5,
        "markerfacecolor": "white" if style.dashed else style.colour,
        "linestyle": "--" if style.dashed else "-",
        "linewidth": 1.5,
    }


def _draw_panel(axes: Any, panel: Panel, curves: Curves, series: Mapping[str, Series]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    if panel.linear:
        axes.set_ylim(0, 1.02)
    else:
        axes.set_yscale("log")
    for name in curves.series(panel.key):
        style = series[name]
        x = curves.get(panel.key, name, "x")
        y, low, high = (
            np.maximum(curves.get(panel.key, name, field), panel.floor)
            for field in ("y", "y_low", "y_high")
        )
        axes.fill_between(x, low, high, color=style.colour, alpha=0.13, linewidth=0)
        axes.plot(x, y, **_line_style(style))
    if panel.diagonal:
        ends = axes.get_xlim()
        axes.plot(ends, ends, **_GUIDE)
        axes.set_xlim(ends)
        _note(axes, ends[1], ends[1], panel.diagonal, "right")
    if panel.level is not None:
        name, where = panel.level
        height = max(curves.at(panel.key, name, where), panel.floor)
        axes.axhline(height, **_GUIDE)
        _note(axes, axes.get_xlim()[1], height, f"{series[name].label} at {where:g}", "right")
    if panel.floor and min(curves.get(panel.key, n).min() for n in curves.series(panel.key)) < (
        panel.floor
    ):
        axes.axhline(panel.floor, **_GUIDE)
        _note(axes, axes.get_xlim()[0], panel.floor, f" {panel.floor_name}", "left")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"({panel.key}) {panel.title}", fontsize=9, loc="left")
    axes.set_xlabel(panel.x_name, fontsize=9)
    axes.set_ylabel(panel.y_name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _note(axes: Any, x: float, y: float, text: str, side: str) -> None:
    axes.text(x, y, text, fontsize=7.5, color="#666666", ha=side, va="bottom")

"""Repeated runs as number lines, and number lines as a picture with panels.

A run gives readings; `lines` makes one number line of each panel, series and x, with the mean over
runs and the range that holds the middle 80% of them. Pictures are drawn from those lines alone.
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
Line = Mapping[str, Any]
_Job = TypeVar("_Job")

LOW, HIGH = 0.1, 0.9  # quantiles over runs that a line gives beside the mean


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
    from_zero: bool = False  # y may be 0, so its axis is linear up to 1 and logarithmic beyond


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
    """A matplotlib figure with these panels, `columns` in a row, and one legend for a column."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SfumatoError("plots need matplotlib", hint='pip install "sfumato[plot]"') from problem
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.3 * columns, 3.4 * rows + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.subplots(rows, columns, squeeze=False)
    curves = Curves(numbers)
    for place, panel in enumerate(panels):
        axes = grid[place // columns][place % columns]
        _draw_panel(axes, panel, curves, series)
        if place < columns and _differs(panels, curves, place, columns):
            axes.legend(fontsize=7.5, frameon=False)
    for place in range(len(panels), rows * columns):
        grid[place // columns][place % columns].set_visible(False)
    return figure


def _differs(panels: Sequence[Panel], curves: Curves, place: int, columns: int) -> bool:
    """Whether a panel of the first row shows other series than the one before it."""
    return place == 0 or curves.series(panels[place].key) != curves.series(panels[place - 1].key)


def _draw_panel(axes: Any, panel: Panel, curves: Curves, series: Mapping[str, Series]) -> None:
    axes.set_xscale("log")
    if panel.from_zero:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    for name in curves.series(panel.key):
        style = series[name]
        x = curves.get(panel.key, name, "x")
        axes.fill_between(
            x,
            curves.get(panel.key, name, "y_low"),
            curves.get(panel.key, name, "y_high"),
            color=style.colour,
            alpha=0.13,
            linewidth=0,
        )
        axes.plot(
            x,
            curves.get(panel.key, name),
            label=style.label,
            color=style.colour,
            marker=style.marker,
            markersize=4.5,
            markerfacecolor="white" if style.dashed else style.colour,
            linestyle="--" if style.dashed else "-",
            linewidth=1.5,
        )
    if panel.diagonal:
        ends = axes.get_xlim()
        axes.plot(ends, ends, color="#888888", linestyle=":", linewidth=1.2, label=panel.diagonal)
        axes.set_xlim(ends)
    axes.set_title(f"({panel.key}) {panel.title}", fontsize=9, loc="left")
    axes.set_xlabel(panel.x_name, fontsize=9)
    axes.set_ylabel(panel.y_name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)

"""Readings as number lines, and number lines as a picture with panels.

A run gives readings. Readings that differ only in their value are repeats of each other and make
one number line, with the mean over runs, its standard error and the range of the middle 80% of
runs. Pictures are drawn from those lines alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from sfumato.arrays import F64, Bool
from sfumato.flow import pictures

Line = Mapping[str, Any]

LOW, HIGH = 0.1, 0.9  # quantiles over runs, beside the mean of a line
CHANCE = 3  # standard errors within which two means count as equal
COLOURS: Mapping[str, str] = {  # of Okabe and Ito, safe for people with colour blindness
    "blue": "#0072B2",
    "red": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#999999",
}
_GUIDE: Mapping[str, Any] = {"color": "#888888", "linestyle": ":", "linewidth": 1.2}


class Reading(NamedTuple):
    """One number of one run, and further fields for its line."""

    panel: str
    series: str
    x: float
    y: float
    more: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes, and the meaning of its numbers."""

    key: str  # the paper's letter
    title: str
    data: str
    x_name: str
    y_name: str
    _: KW_ONLY
    is_drawn: bool = True
    diagonal: str = ""  # label of the line y = x, where there is one
    floor: float = 0.0  # smaller values are drawn here, since a logarithmic axis has no zero
    floor_name: str = ""
    level: tuple[str, float] | None = None  # a series and an x; a line is drawn at that height
    linear: bool = False  # a linear y axis from 0 to 1


@dataclass(frozen=True, slots=True)
class Series:
    """How a series is drawn, the same in every panel."""

    label: str
    colour: str  # one of COLOURS
    marker: str
    dashed: bool = False  # beyond the paper

    @property
    def line(self) -> dict[str, Any]:
        """The keywords of matplotlib's lines."""
        return {
            "color": COLOURS[self.colour],
            "marker": self.marker,
            "markersize": 4.5,
            "markerfacecolor": "white" if self.dashed else COLOURS[self.colour],
            "linestyle": "--" if self.dashed else "-",
            "linewidth": 1.5,
        }


def numbered_series(label: str, place: int) -> Series:
    """A series without a style of its own; its number decides colour and marker."""
    return Series(label, list(COLOURS)[place % 6], "os^vDP"[place % 6])


def standard_error(values: Sequence[float] | F64) -> float:
    """The standard error of a mean; 0 where there is one value only."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def number_lines(
    figure: str, panels: Iterable[Panel], readings: Iterable[Reading], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One line of plain JSON values for all readings that differ only in y, in their order."""
    about = {panel.key: panel for panel in panels}
    groups: dict[tuple[str, str, float, str], tuple[Reading, list[float]]] = {}
    for reading in readings:
        key = (reading.panel, reading.series, reading.x, repr(reading.more))
        groups.setdefault(key, (reading, []))[1].append(reading.y)
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
            "y_stderr": standard_error(values),
            "y_low": float(np.quantile(values, LOW)),
            "y_high": float(np.quantile(values, HIGH)),
            "repeats": len(values),
            "seeds": {"first": min(seeds), "last": max(seeds)},
            **more,
        }
        for (panel, series, x, _, more), values in groups.values()
    ]


class Curves:
    """The number lines by panel and series; arrays are in the order of x."""

    def __init__(self, lines: Sequence[Line]) -> None:
        groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
        for line in lines:
            groups[line["panel"], line["series"]].append(line)
        self._groups = {key: sorted(group, key=lambda n: n["x"]) for key, group in groups.items()}
        self.repeats = max((line["repeats"] for line in lines if "repeats" in line), default=0)

    def get(self, panel: str, series: str, field: str = "y") -> F64:
        """One field of a series, by x."""
        return np.array([line[field] for line in self._groups[panel, series]], dtype=np.float64)

    def at(self, panel: str, series: str, x: float) -> float:
        """The mean at this x, or NaN if there is none."""
        means = [line["y"] for line in self._groups[panel, series] if line["x"] == x]
        return float(means[0]) if means else float("nan")

    def behind(self, panel: str, series: str, other: str) -> Bool:
        """By x, whether a series' mean is above the other's by more than chance explains."""
        gap = self.get(panel, series) - self.get(panel, other)
        noise = np.hypot(self.get(panel, series, "y_stderr"), self.get(panel, other, "y_stderr"))
        return np.asarray(gap > CHANCE * noise)

    def series(self, panel: str) -> list[str]:
        """The series of a panel."""
        return [series for key, series in self._groups if key == panel]


# Numbers for people.


def short(value: float) -> str:
    """Two digits, or a whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def brief(epsilon: float) -> str:
    """Three digits, without exponents."""
    return f"{epsilon:,.0f}" if epsilon >= 100 else f"{epsilon:.3g}"


def span(values: F64) -> str:
    """The smallest and the largest of the values."""
    low, high = short(values.min()), short(values.max())
    return low if low == high else f"{low} to {high}"


# Pictures.


def canvas(title: str, rows: int, columns: int, size: tuple[float, float], **grid: Any) -> Any:
    """A matplotlib figure and an array of its axes."""
    figure = pictures.figure(*size)
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False, **grid).reshape(-1)


def dress(axes: Any, panel: Panel) -> None:
    """Add what every panel has: its title, the names of its axes and a grid."""
    axes.set_title(f"({panel.key}) {panel.title}", fontsize=9, loc="left")
    axes.set_xlabel(panel.x_name, fontsize=9)
    axes.set_ylabel(panel.y_name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_panels(
    title: str,
    panels: Sequence[Panel],
    curves: Curves,
    series: Mapping[str, Series],
    columns: int,
    labels: int,
) -> Any:
    """A matplotlib figure of the panels that have numbers, `columns` per row, and one legend below
    with `labels` per row."""
    panels = [panel for panel in panels if panel.is_drawn and curves.series(panel.key)]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = canvas(title, rows, columns, (4.2 * columns, 3.5 * rows + 1.0))
    from matplotlib.lines import Line2D

    styles: dict[str, Series] = {}
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, curves, series)
        styles |= {name: series[name] for name in curves.series(panel.key)}
    handles = [Line2D([], [], label=style.label, **style.line) for style in styles.values()]
    runs = f"{curves.repeats:,} run{'s' * (curves.repeats > 1)}"
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(labels, len(handles)),
        fontsize=8.5,
        frameon=False,
        title=f"mean of {runs}; shaded: the middle 80% of them",
        title_fontsize=8.5,
    )
    return figure


def _draw_panel(axes: Any, panel: Panel, curves: Curves, series: Mapping[str, Series]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    if panel.linear:
        axes.set_ylim(0, 1.02)
    else:
        axes.set_yscale("log")
    for name in curves.series(panel.key):
        x = curves.get(panel.key, name, "x")
        y, low, high = (
            np.maximum(curves.get(panel.key, name, field), panel.floor)
            for field in ("y", "y_low", "y_high")
        )
        axes.fill_between(x, low, high, color=COLOURS[series[name].colour], alpha=0.13, linewidth=0)
        axes.plot(x, y, **series[name].line)
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
    least = min(curves.get(panel.key, name).min() for name in curves.series(panel.key))
    if least < panel.floor:
        axes.axhline(panel.floor, **_GUIDE)
        _note(axes, axes.get_xlim()[0], panel.floor, f" {panel.floor_name}", "left")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    dress(axes, panel)


def _note(axes: Any, x: float, y: float, text: str, side: str) -> None:
    axes.text(x, y, text, fontsize=7.5, color="#666666", ha=side, va="bottom")

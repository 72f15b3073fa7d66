"""The pictures of paper 004, drawn from number lines.

The paper's algorithms are filled circles and full lines, ours hollow squares and dashed ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.errors import SfumatoError
from sfumato.privacy import HashedResponse
from sfumato.reproduce.local.claims import Measured, Search
from sfumato.reproduce.local.data import SEARCHES
from sfumato.reproduce.panels import Curves, Line, Panel

BANDS = (0, 1, 10, 100, 1_000, 10_000)  # true counts from which errors are taken together
BAND_NAMES = ("none", "1 to 9", "10 to 99", "100 to\n999", "1,000 to\n9,999", "10,000\nand more")
Z95 = NormalDist().inv_cdf(0.975)

# Colours of Okabe and Ito, which people with colour blindness can tell apart.
PAPER, OURS, TRUTH = "#0072B2", "#D55E00", "#000000"
BY_WIDTH, BY_ROWS = ("#56B4E9", "#0072B2", "#009E73"), ("#E69F00", "#CC79A7", "#000000")
MARKS: Mapping[str, Any] = {"linestyle": "none", "markersize": 5, "elinewidth": 1.2}
GREY: Mapping[str, Any] = {"color": "#666666"}
DOTTED: Mapping[str, Any] = {"linestyle": ":", "linewidth": 1.2}
STYLES: Mapping[str, Mapping[str, Any]] = {
    "paper": {"color": PAPER, "marker": "o"},
    "ours": {"color": OURS, "marker": "s", "markerfacecolor": "white"},
}


def _canvas(title: str, panels: Sequence[Panel], ratios: Sequence[float]) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as problem:
        raise SfumatoError("plots need matplotlib", hint='pip install "sfumato[plot]"') from problem
    picture = Picture(figsize=(4.6 * sum(ratios), 4.6), layout="constrained")
    picture.suptitle(title, fontsize=11)
    grid = list(picture.subplots(1, len(panels), width_ratios=ratios, squeeze=False)[0])
    for axes, panel in zip(grid, panels, strict=True):
        axes.set_title(f"({panel.key}) {panel.title}", fontsize=9, loc="left")
        axes.set_xlabel(panel.x_name, fontsize=9)
        axes.set_ylabel(panel.y_name, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return picture, grid


def figure_4(
    title: str,
    panels: Sequence[Panel],
    numbers: Sequence[Line],
    widths: Sequence[int],
    rows: Sequence[int],
    ours: HashedResponse,
) -> Any:
    """The standard deviation of a count by rows and by bytes."""
    curves = Curves(numbers)
    picture, (left, right) = _canvas(title, panels, (1.2, 1.2))
    for width, colour in zip(widths, BY_WIDTH, strict=True):
        x = curves.get("a", f"exact {width}", "x")
        y, most = (curves.get("a", f"{name} {width}") for name in ("exact", "bound"))
        left.plot(x, y, color=colour, label=f"count mean sketch, width m = {width:,}")
        left.plot(x, most, **GREY, **DOTTED)
        _over_runs(left, curves, "a", f"measured {width}", {"color": colour, "marker": "o"})
    for row, colour in zip(rows, BY_ROWS, strict=True):
        x, y = curves.get("b", f"rows {row}", "x"), curves.get("b", f"rows {row}")
        right.plot(x, y, color=colour, label=f"count mean sketch, rows k = {row:,}")
    left.plot(curves.get("a", "ours", "x"), curves.get("a", "ours"), "--", color=OURS, zorder=1)
    sizes = f"width {ours.width:,}", f"{ours.rows:,} rows of width {ours.width:,}"
    for axes, key, size in ((left, "a", sizes[0]), (right, "b", sizes[1])):
        label = f"hashed response (ours), {size}"
        _over_runs(axes, curves, key, "ours", STYLES["ours"], label=label)
        axes.set(xscale="log", yscale="log")
    left.plot([], [], **GREY, label="exact variance")
    left.plot([], [], **GREY, **DOTTED, label="the paper's bound")
    left.plot([], [], "o", markersize=5, **GREY, label="measured; bars: the middle 80% of runs")
    _finish(left, right)
    return picture


def _over_runs(
    axes: Any, curves: Curves, key: str, series: str, style: Mapping[str, Any], **more: Any
) -> None:
    """Means over runs, with the range of most runs."""
    x, y, low, high = (curves.get(key, series, field) for field in ("x", "y", "y_low", "y_high"))
    axes.errorbar(x, y, np.maximum([y - low, high - y], 0), **style, **MARKS, **more)


def use_case(
    title: str, panels: Sequence[Panel], numbers: Sequence[Line], runs: Sequence[Measured]
) -> Any:
    """What one run told, how far all runs are off, and how their errors are spread."""
    picture, (first, second, third) = _canvas(title, panels, (1.25, 1.0, 0.9))
    curves, about = Curves(numbers), {run.series: run for run in reversed(runs)}
    ranks = curves.get("a", "truth", "x")
    first.plot(ranks, curves.get("a", "truth"), color=TRUTH, linewidth=1.2, label="truth")
    z = curves.get("c", "paper", "x")
    normal = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    third.plot(z, normal, color=TRUTH, linewidth=1.2, label="normal law")
    for series, style in STYLES.items():
        run, colour = about[series], {"color": style["color"]}
        name = f"{run.oracle}{' (ours)' * (series == 'ours')}, {run.record_bytes} bytes a record"
        half = Z95 * curves.get("a", series, "standard_error")
        x = ranks * (1.03 if series == "ours" else 0.97)  # side by side
        first.errorbar(x, curves.get("a", series), half, **style, **MARKS, label=name)
        first.axhline(run.threshold, **colour, **DOTTED)
        x = np.array([BANDS.index(int(low)) for low in curves.get("b", f"{series} measured", "x")])
        y, many = (curves.get("b", f"{series} measured", field) for field in ("y", "items"))
        second.errorbar(x, y, 2 * y / np.sqrt(2 * many), **style, **MARKS)
        line = {**colour, "linestyle": "--" if series == "ours" else "-", "linewidth": 1.3}
        second.plot(x, curves.get("b", f"{series} predicted"), **line)
        third.step(z, curves.get("c", series), where="mid", **line, label=run.oracle)
    first.set(xscale="log", yscale="log")
    first.set_ylim(bottom=about["ours"].threshold / 4)
    first.plot([], [], **GREY, **DOTTED, label="threshold (5%, family-wise)")
    places = [BANDS.index(int(low)) for low in curves.get("b", "paper measured", "x")]
    second.set_xticks(places, [BAND_NAMES[place] for place in places])
    second.plot([], [], "o", markersize=5, **GREY, label="measured; bars: two standard errors")
    second.plot([], [], **GREY, label="predicted")
    second.set_ylim(0, 1.2 * second.get_ylim()[1])  # room for the legend
    third.set_ylim(top=0.5)
    _finish(first, second, third)
    return picture


def new_words(
    title: str, panels: Sequence[Panel], numbers: Sequence[Line], runs: Sequence[Search]
) -> Any:
    """Which words one run found, and how many words all runs did."""
    picture, (left, right) = _canvas(title, panels, (1.5, 1.0))
    curves = Curves(numbers)
    most = max(run.devices for run in runs)
    shown = {run.series: run for run in reversed(runs) if run.devices == most}  # the first of each
    ranks, truth = curves.get("a", "truth", "x"), curves.get("a", "truth")
    left.plot(ranks, truth, color=TRUTH, linewidth=1.2, label="truth")
    for (series, name), style in zip(SEARCHES.items(), STYLES.values(), strict=True):
        run = shown[series]
        label = f"{name}{' (ours)' * (series == 'prefixes')}, {run.record_bytes} bytes a record"
        half = Z95 * curves.get("a", series, "standard_error")
        x, y = curves.get("a", series, "x"), curves.get("a", series)
        left.errorbar(x, y, half, **style, **MARKS, label=label)
        left.axhline(run.threshold, color=style["color"], **DOTTED)
        x, y = curves.get("b", series, "x"), curves.get("b", series)
        right.plot(x, y, "--" if series == "prefixes" else "-", color=style["color"], zorder=1)
        _over_runs(right, curves, "b", series, style, label=name)
    left.plot([], [], **GREY, **DOTTED, label="threshold (5%, family-wise)")
    left.set(yscale="log", ylim=(min(run.threshold for run in shown.values()) / 2, None))
    right.set(xscale="log", ylim=(0, None))
    right.minorticks_off()
    right.set_xticks(curves.get("b", "puzzle", "x"))
    _finish(left, right)
    return picture


def _finish(*grid: Any) -> None:
    """Legends, and whole numbers on axes with few ticks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axes in grid:
        axes.legend(fontsize=8, frameon=False)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
                axis.set_minor_formatter(NullFormatter())

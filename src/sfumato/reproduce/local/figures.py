"""Figure 4 of paper 004, and measurements of its five use cases.

A use case is run twice over the same devices: with the paper's algorithm, parameters and plain
means, and with the choice of `local_plan` for the same epsilon, with collisions solved (ours, drawn
hollow). Records are made, folded and read as by a service. Figure 4 has too many devices for that:
its tallies are drawn cell by cell (`runs.simulated_tally`). Every repeat has its own seed, which
draws coins and hash functions; the devices stay the same.

Paper 004 prints no accuracy, so the claims are about its formulas. "Known" numbers are from an
earlier, independent calculation or simulation with those formulas and parameters. Claims marked
(ours) are about sfumato's additions to the paper. Where a claim allows for chance, it allows
`CHANCE` standard errors: one false alarm in sixteen thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from sfumato.arrays import F64, I64
from sfumato.flow.word_discovery import DiscoveredWords
from sfumato.privacy import CountMeanSketch, HashedResponse, Randomizer, debias
from sfumato.privacy.debias import LocalEstimates
from sfumato.privacy.randomizers import in_epoch
from sfumato.questions.local_frequencies import plan as local_plan
from sfumato.questions.local_frequencies.design import NAMES, oracle_of
from sfumato.reproduce.frequencies.data import power_law_shares
from sfumato.reproduce.frequencies.runs import item_names
from sfumato.reproduce.local import data, runs
from sfumato.reproduce.local.data import Case, Source
from sfumato.reproduce.local.runs import SEARCHES, WORD_EPSILON, Measurement, Search
from sfumato.reproduce.panels import COLOURS, Curves, Panel, Reading, canvas, dress
from sfumato.reproduce.runner import (
    FIRST_SEED,
    Claim,
    Experiment,
    Figure,
    Job,
    by_workload,
    repeat,
)

CHANCE = 4.0
CLOSE = 0.05  # how far a measured standard error may be from the formula's
FIRST_RUN = {"seeds": {"first": FIRST_SEED, "last": FIRST_SEED}}  # for lines about one run

# Styles: the paper's algorithms have filled circles and full lines, ours hollow squares and dashed
# lines.
Z95 = NormalDist().inv_cdf(0.975)
TRUTH: Mapping[str, Any] = {"color": COLOURS["black"], "linewidth": 1.2}
MARKS: Mapping[str, Any] = {"linestyle": "none", "markersize": 5, "elinewidth": 1.2}
GUIDE: Mapping[str, Any] = {"color": "#666666"}
DOTTED: Mapping[str, Any] = {"linestyle": ":", "linewidth": 1.2}
STYLES: Mapping[str, Mapping[str, Any]] = {
    "paper": {"color": COLOURS["blue"], "marker": "o"},
    "ours": {"color": COLOURS["red"], "marker": "s", "markerfacecolor": "white"},
}


def _picture(title: str, panels: Sequence[Panel], ratios: Sequence[float]) -> tuple[Any, Any]:
    size = (4.6 * sum(ratios), 4.6)
    picture, grid = canvas(title, 1, len(panels), size, width_ratios=ratios)
    for axes, panel in zip(grid, panels, strict=True):
        dress(axes, panel)
    return picture, grid


def _over_runs(
    axes: Any, curves: Curves, key: str, series: str, style: Mapping[str, Any], **more: Any
) -> None:
    """Draw means over runs, with the range of most runs."""
    x, y, low, high = (curves.get(key, series, field) for field in ("x", "y", "y_low", "y_high"))
    axes.errorbar(x, y, np.maximum([y - low, high - y], 0), **style, **MARKS, **more)


def _finish(grid: Iterable[Any]) -> None:
    """Add legends, and whole numbers to logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axes in grid:
        axes.legend(fontsize=8, frameon=False)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
                axis.set_minor_formatter(NullFormatter())


# Figure 4.

EPSILON_4, DEVICES_4, ITEMS_4, LAW_4 = 2.0, 100_000_000, 2_600, 1.2
WIDTHS_4, ALL_WIDTHS_4 = (32, 128, 1_024), tuple(2**k for k in range(3, 13))
ROWS_4, THREE_ROWS_4 = tuple(2**k for k in range(5, 17)), (32, 1_024, 65_536)
MOST_CELLS_4 = 4_000_000  # of a simulated tally
REFERENCE_BOUND: Mapping[tuple[int, int], float] = {  # width, rows: figure 4 for 2,600 items
    (32, 32): 833_154,
    (128, 1_024): 72_549,
    (1_024, 1_024): 27_012,
    (1_024, 65_536): 10_114,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size4:
    """How much of figure 4 is measured."""

    rows: tuple[int, ...]
    repeats: int  # of large sketches; small ones, with few but heavy collisions, have more
    ours: int  # repeats of ours


def figure_4(size: Size4) -> Experiment:
    """The standard deviation of a count by width m and rows k: bound, exact, measured, ours."""
    shares = power_law_shares(LAW_4, ITEMS_4)
    plan = local_plan.options(epsilon=EPSILON_4, items=ITEMS_4, records=DEVICES_4)[0].randomizer
    assert isinstance(plan, HashedResponse)  # a long dictionary and a small epsilon

    def run(job: Job) -> Iterator[Reading]:
        series, oracle = job.workload
        oracle = replace(oracle, seed=job.seed)
        rng = np.random.default_rng([job.seed, oracle.rows, oracle.width])
        counts = rng.multinomial(DEVICES_4, shares)
        values = oracle.values(item_names(ITEMS_4, job.seed))
        tally = runs.simulated_tally(oracle, values, counts, rng)
        estimates = debias.estimate(tally, values, collision_aware=series == "ours")
        rare = slice(ITEMS_4 // 2, None)  # items whose own devices add almost nothing
        error = runs.root_mean_square((estimates.counts - counts)[rare])
        yield Reading("a", series, oracle.rows, error)
        if oracle.rows == plan.rows:
            yield Reading("b", series, oracle.record_bytes, error)

    jobs = []
    for rows in size.rows:
        for width in WIDTHS_4:
            if rows * width <= MOST_CELLS_4:
                workload = (f"measured {width}", _sketch_4(rows, width))
                jobs += repeat([workload], size.repeats * max(1, 512 // rows))
    ours = [("ours", replace(plan, rows=rows)) for rows in (*size.rows[1:], plan.rows)]
    law = f"law i^-{LAW_4:g} over {ITEMS_4:,} items, {DEVICES_4:,} devices, as in the paper"
    heading = f"Paper 004, figure 4: epsilon {EPSILON_4:g}, {law}"
    y_name = "standard deviation of a count (devices)"
    panels = [
        Panel("a", "by rows and width", law, "rows k", y_name),
        Panel("b", "by what a device sends", law, "bytes of a record", y_name),
    ]
    formulas = list(_formulas_4(DEVICES_4 * shares))
    return Experiment(
        heading=heading,
        jobs=[*jobs, *repeat(ours, size.ours)],
        stage=lambda workload: f"{workload[1].rows:,} rows × {workload[1].width:,}",
        run=lambda job: list(run(job)),
        panels=panels,
        readings=lambda results: [*formulas, *chain.from_iterable(results)],
        claims=lambda _, curves: claims_4(curves, plan),
        picture=lambda _, curves: _draw_4(heading, panels, curves, plan),
    )


def _sketch_4(rows: int, width: int) -> CountMeanSketch:
    return CountMeanSketch(epsilon=EPSILON_4, rows=rows, width=width, seed=0)


def _formulas_4(expected: F64) -> Iterator[Reading]:
    """The bound and the exact standard deviation."""
    squares = float(expected @ expected)
    for width in ALL_WIDTHS_4:
        for rows in ROWS_4:
            sketch = _sketch_4(rows, width)
            spread = debias.variance(sketch, count=DEVICES_4, holders=0.0, squares=squares)
            if width in WIDTHS_4:
                most = debias.variance_bound(sketch, count=float(expected.sum()), squares=squares)
                yield Reading("a", f"bound {width}", rows, math.sqrt(most))
                yield Reading("a", f"exact {width}", rows, math.sqrt(spread))
            if rows in THREE_ROWS_4:
                yield Reading("b", f"rows {rows}", sketch.record_bytes, math.sqrt(spread))


def claims_4(curves: Curves, plan: HashedResponse) -> Iterator[Claim]:
    """The claims about figure 4; the plan is ours."""
    here = {key: curves.at("a", f"bound {key[0]}", key[1]) for key in REFERENCE_BOUND}
    yield Claim(  # rounded or truncated to whole devices: both are within one
        text="4 the bound of theorem 4.2 has the known values, to the device",
        holds=all(abs(here[key] - reference) < 1 for key, reference in REFERENCE_BOUND.items()),
        detail="; ".join(
            f"m = {width:,}, k = {rows:,}: {here[width, rows]:,.1f} (known {reference:,.0f})"
            for (width, rows), reference in REFERENCE_BOUND.items()
        ),
    )
    exact = {width: curves.get("a", f"exact {width}") for width in WIDTHS_4}
    looseness = np.concatenate([curves.get("a", f"bound {w}") / exact[w] for w in WIDTHS_4])
    yield Claim(
        text="4 the bound of theorem 4.2 holds: the exact standard deviation is nowhere larger",
        holds=bool(np.all(looseness >= 1)),
        detail=f"bound over exact: {looseness.min():.4f} to {looseness.max():.4f}",
    )
    yield Claim(
        text="4 the standard deviation falls with the width m and with the rows k, everywhere",
        holds=all(bool(np.all(np.diff(exact[width]) < 0)) for width in WIDTHS_4)
        and all(bool(np.all(exact[b] < exact[a])) for a, b in pairwise(WIDTHS_4)),
        detail="; ".join(
            f"m = {width:,}: {exact[width][0]:,.0f} to {exact[width][-1]:,.0f}"
            for width in WIDTHS_4
        ),
    )
    ratios = []
    for width in WIDTHS_4:
        rows = curves.get("a", f"measured {width}", "x")
        predicted = [curves.at("a", f"exact {width}", row) for row in rows]
        ratios.append(curves.get("a", f"measured {width}") / predicted)
    ratio = np.concatenate(ratios)
    yield Claim(
        text=f"4 the measured standard deviation is within {CLOSE:.0%} of the exact one, at "
        "every size",
        holds=bool(np.all(np.abs(ratio - 1) <= CLOSE)),
        detail=f"measured over exact at {ratio.size} sizes: {ratio.min():.3f} to "
        f"{ratio.max():.3f}, mean {ratio.mean():.3f}",
    )
    mine, best = curves.at("a", "ours", plan.rows), curves.at("a", "exact 1024", 65_536)
    yield Claim(
        text="(ours) hashed response with collisions solved errs less than the largest sketch",
        holds=mine < best,
        detail=f"{mine:,.0f} devices with {plan.rows * plan.width:,} cells and "
        f"{plan.record_bytes} bytes a record; {best:,.0f} with {1_024 * 65_536:,} cells and 130 "
        "bytes",
    )


def _draw_4(title: str, panels: Sequence[Panel], curves: Curves, plan: HashedResponse) -> Any:
    """The standard deviation of a count by rows and by bytes."""
    picture, (left, right) = _picture(title, panels, (1.2, 1.2))
    for width, name in zip(WIDTHS_4, ("sky", "blue", "green"), strict=True):
        x = curves.get("a", f"exact {width}", "x")
        y, most = (curves.get("a", f"{kind} {width}") for kind in ("exact", "bound"))
        left.plot(x, y, color=COLOURS[name], label=f"count mean sketch, width m = {width:,}")
        left.plot(x, most, **GUIDE, **DOTTED)
        style = {"color": COLOURS[name], "marker": "o"}
        _over_runs(left, curves, "a", f"measured {width}", style)
    for rows, name in zip(THREE_ROWS_4, ("orange", "pink", "black"), strict=True):
        x, y = curves.get("b", f"rows {rows}", "x"), curves.get("b", f"rows {rows}")
        right.plot(x, y, color=COLOURS[name], label=f"count mean sketch, rows k = {rows:,}")
    x, y = curves.get("a", "ours", "x"), curves.get("a", "ours")
    left.plot(x, y, "--", color=COLOURS["red"], zorder=1)
    sizes = f"width {plan.width:,}", f"{plan.rows:,} rows of width {plan.width:,}"
    for axes, key, size in ((left, "a", sizes[0]), (right, "b", sizes[1])):
        label = f"hashed response (ours), {size}"
        _over_runs(axes, curves, key, "ours", STYLES["ours"], label=label)
        axes.set(xscale="log", yscale="log")
    left.plot([], [], **GUIDE, label="exact variance")
    left.plot([], [], **GUIDE, **DOTTED, label="the paper's bound")
    left.plot([], [], "o", markersize=5, **GUIDE, label="measured; bars: the middle 80% of runs")
    _finish((left, right))
    return picture


# Use cases.

FEWEST = 5  # least number of items in a band of true counts
BINS = np.arange(-4.0, 4.25, 0.25)  # of errors divided by standard errors
ITEMS_SHOWN = 24  # items drawn with their intervals
BANDS = (0, 1, 10, 100, 1_000, 10_000)  # lower ends of bands of true counts
BAND_NAMES = ("none", "1 to 9", "10 to 99", "100 to\n999", "1,000 to\n9,999", "10,000\nand more")
COVERAGE_BAND = (0.94, 0.97)
ALIKE = 0.02  # tolerance for the known numbers


class Use(NamedTuple):
    """One run of a use case."""

    measured: Measurement
    estimates: LocalEstimates
    predicted: F64  # standard errors


Uses = Mapping[str, Sequence[Use]]  # runs of the paper's sketch and of ours


def use_case(case: Case, size: data.UseSize) -> Experiment:
    """One use case with the paper's sketch and with ours, over the same devices."""
    source = case.source().first(size.items)
    counts = source.counts(size.devices, np.random.default_rng(FIRST_SEED))
    order = np.argsort(-counts, kind="stable")
    source, counts = replace(source, items=source.items.take(order)), counts[order]
    epsilon, items = case.sketch.epsilon, counts.size
    plan = local_plan.options(epsilon=epsilon, items=items, records=size.devices)[0].randomizer
    oracles: dict[str, Randomizer] = {"paper": case.sketch, "ours": plan}

    def run(job: Job) -> Use:
        series = job.workload
        oracle = in_epoch(oracles[series], 0, job.seed)
        ours = series == "ours"
        estimates = runs.estimates(oracle, source, counts, job.seed, job.tell, collision_aware=ours)
        predicted = estimates.standard_error if ours else runs.exact_error(oracle, counts)
        name = NAMES[oracle_of(oracle)]
        measured = runs.measure(series, name, job.seed, oracle, counts, estimates, predicted)
        return Use(measured, estimates, predicted)

    def readings(uses: Uses) -> Iterator[Reading]:
        yield from _top_readings(source, counts, uses)
        for use in chain.from_iterable(uses.values()):
            yield from _band_readings(use, counts, size.repeats)

    about = f"{source.data}; {size.devices:,} devices"
    heading = f"Paper 004: {case.title}, epsilon {epsilon:g}, {items:,} items\n{about}"
    error, ratio = "standard error (devices)", "error over predicted standard error"
    panels = [
        Panel("a", "estimates of one run with 95% intervals", about, "rank of the item", "devices"),
        Panel("b", "standard error by true count", about, "devices that hold the item", error),
        Panel("c", "errors of all items", about, ratio, "density"),
    ]
    return Experiment(
        heading=heading,
        jobs=repeat(oracles, size.repeats),
        stage=lambda series: NAMES[oracle_of(oracles[series])],
        run=run,
        gather=lambda uses: dict(zip(oracles, by_workload(uses, size.repeats), strict=True)),
        panels=panels,
        readings=readings,
        records=lambda uses: [
            {"data": about, **asdict(use.measured)} for use in chain.from_iterable(uses.values())
        ],
        claims=lambda uses, _: use_claims(
            *([use.measured for use in uses[series]] for series in oracles),
            items=items,
            reference=(case.error, case.threshold) if size.has_reference else None,
            share=case.share,
        ),
        picture=lambda uses, curves: _draw_use(heading, panels, curves, uses),
        at_once=1,
    )


def _band_readings(use: Use, counts: I64, repeats: int) -> Iterator[Reading]:
    """Measured and predicted errors by true count, and the distribution of errors over predictions.
    A band's line also has its number of items, of all runs."""
    series, wrong = use.measured.series, use.estimates.counts - counts
    band = np.searchsorted(BANDS, counts, side="right") - 1
    for place, low in enumerate(BANDS):
        mine = band == place
        many = int(np.count_nonzero(mine))
        if many >= FEWEST:
            for name, values in (("measured", wrong), ("predicted", use.predicted)):
                error = runs.root_mean_square(values[mine])
                yield Reading("b", f"{series} {name}", low, error, {"items": many * repeats})
    ratio = np.clip(wrong / use.predicted, BINS[0], BINS[-1])
    density, _ = np.histogram(ratio, BINS, density=True)
    middles = (BINS[:-1] + BINS[1:]) / 2
    for x, y in zip(middles.tolist(), density.tolist(), strict=True):
        yield Reading("c", series, x, y)


def _top_readings(source: Source, counts: I64, uses: Uses) -> Iterator[Reading]:
    """The first run's estimates, from the most common item to some that ours cannot list."""
    first = {series: group[0].estimates for series, group in uses.items()}
    worth = int(np.sum(counts > first["ours"].null.threshold(counts.size) / 2))
    ranks = np.unique(np.geomspace(1, max(worth, 2), ITEMS_SHOWN).round().astype(int)).tolist()
    every = [("truth", counts.astype(np.float64), np.zeros(counts.size))]
    every += [(series, one.counts, one.standard_error) for series, one in first.items()]
    for series, values, errors in every:
        for rank in ranks:
            item = {"item": source.items[rank - 1].as_py()} if source.measured else {}
            more = {**FIRST_RUN, **item, "standard_error": float(errors[rank - 1])}
            yield Reading("a", series, rank, float(values[rank - 1]), more)


def use_claims(
    paper: Sequence[Measurement],
    ours: Sequence[Measurement],
    *,
    items: int,
    reference: tuple[float, float] | None,
    share: float,
) -> Iterator[Claim]:
    """The claims about a use case. `reference` is the known standard error and threshold of this
    dictionary, if any; `share` bounds our variance, as a share of the paper's."""
    name = f"{paper[0].oracle} ({paper[0].record_bytes} bytes)"
    yield from _honest_claims(name, paper, items, "the exact formula's")
    if reference:
        error, threshold = reference
        here = _mean(paper, "error_unheld"), _mean(paper, "threshold")
        yield Claim(
            text=f"{name}: standard error and family-wise threshold are the known ones, within "
            f"{ALIKE:.0%}",
            holds=abs(here[0] / error - 1) <= ALIKE and abs(here[1] / threshold - 1) <= ALIKE,
            detail=f"{here[0]:,.1f} devices (known {error:,.0f}), threshold {here[1]:,.0f} (known "
            f"{threshold:,.0f} by the normal law; here by the binomial)",
        )
    mine = f"(ours) {ours[0].oracle} ({ours[0].record_bytes} bytes)"
    yield from _honest_claims(mine, ours, items, "the one that it reports")
    ratio = _mean(ours, "error", 2) / _mean(paper, "error", 2)
    yield Claim(
        text=f"{mine}: at most {share:g} times the variance of the paper's in fewer bytes",
        holds=ratio <= share and ours[0].record_bytes < paper[0].record_bytes,
        detail=f"variance {ratio:.3f} times, {ours[0].record_bytes} bytes a record for "
        f"{paper[0].record_bytes}, {ours[0].table_cells:,} cells for {paper[0].table_cells:,}",
    )
    lists = _mean(ours, "listed"), _mean(paper, "listed")
    yield Claim(
        text=f"{mine}: more items are above the threshold than in the paper's",
        holds=lists[0] > lists[1],
        detail=f"{lists[0]:.1f} items for {lists[1]:.1f}, of {items:,}",
    )


def _honest_claims(
    name: str, group: Sequence[Measurement], items: int, formula: str
) -> Iterator[Claim]:
    """The claims about an oracle's estimates."""
    many = _runs(len(group))
    means, slopes = (
        sum(getattr(run, field) for run in group) / math.sqrt(len(group))
        for field in ("mean_off", "slope_off")
    )
    yield Claim(
        text=f"{name}: counts are unbiased: their mean error is zero and their slope over the true "
        f"counts is one, within {CHANCE:g} standard errors",
        holds=abs(means) <= CHANCE and abs(slopes) <= CHANCE,
        detail=f"mean error {means:+.2f}, slope {slopes:+.2f} standard errors off, over {many}",
    )
    ratio = math.sqrt(_mean(group, "error_ratio", 2))
    chance = 1 / math.sqrt(2 * items * len(group))
    yield Claim(
        text=f"{name}: the measured standard error is within {CLOSE:.0%} of {formula}",
        holds=abs(ratio - 1) <= CLOSE,
        detail=f"{ratio:.4f} times (± {chance:.4f} by chance), over {items:,} items and "
        f"{many}; {_mean(group, 'error'):,.1f} devices",
    )
    share, (low, high) = _mean(group, "coverage"), COVERAGE_BAND
    chance = math.sqrt(runs.COVERED * (1 - runs.COVERED) / (items * len(group)))
    yield Claim(
        text=f"{name}: 95% intervals hold the true count of {low:.0%} to {high:.0%} of items",
        holds=low - CHANCE * chance <= share <= high + CHANCE * chance,
        detail=f"{share:.2%} (± {chance:.2%} by chance)",
    )
    wrong = sum(run.listed_unheld > 0 for run in group)
    likely = sum(  # probability of at least this many wrong runs at the allowed rate
        math.comb(len(group), k) * debias.LEVEL**k * (1 - debias.LEVEL) ** (len(group) - k)
        for k in range(wrong, len(group) + 1)
    )
    yield Claim(
        text=f"{name}: at most {debias.LEVEL:.0%} of runs list an item that nobody holds",
        holds=likely > 1 - NormalDist().cdf(CHANCE),
        detail=f"{wrong} of {many}; {_mean(group, 'listed'):.1f} items are above the "
        f"threshold of {_mean(group, 'threshold'):,.0f} devices, and {_mean(group, 'above'):.1f} "
        "are in truth",
    )


def _mean(group: Sequence[Measurement], field: str, power: int = 1) -> float:
    return float(np.mean([getattr(run, field) ** power for run in group]))


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"


def _draw_use(title: str, panels: Sequence[Panel], curves: Curves, uses: Uses) -> Any:
    """The estimates of one run, the errors of all runs, and their distribution."""
    picture, (first, second, third) = _picture(title, panels, (1.25, 1.0, 0.9))
    ranks = curves.get("a", "truth", "x")
    first.plot(ranks, curves.get("a", "truth"), **TRUTH, label="truth")
    z = curves.get("c", "paper", "x")
    third.plot(z, np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi), **TRUTH, label="normal law")
    for series, style in STYLES.items():
        run, colour = uses[series][0].measured, {"color": style["color"]}
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
    first.set_ylim(bottom=run.threshold / 4)  # ours: the last of the loop
    first.plot([], [], **GUIDE, **DOTTED, label="threshold (5%, family-wise)")
    second.set_xticks(x, [BAND_NAMES[place] for place in x])
    second.plot([], [], "o", markersize=5, **GUIDE, label="measured; bars: two standard errors")
    second.plot([], [], **GUIDE, label="predicted")
    second.set_ylim(0, 1.2 * second.get_ylim()[1])  # room for the legend
    third.set_ylim(top=0.5)
    _finish((first, second, third))
    return picture


# New words.

REFERENCE_WORDS = 38  # found by the puzzle among 2,000,000 devices
REFERENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSize:
    """The numbers of devices among which words are searched."""

    devices: tuple[int, ...]  # growing
    repeats: int
    rows: int  # of the puzzle's sketches
    has_reference: bool = False  # whether the known numbers are for this size


Searches = Sequence[tuple[Search, DiscoveredWords, I64]]


def new_words(size: WordSize) -> Experiment:
    """Words that nobody listed, by the paper's puzzle and by prefixes, over the same devices."""
    source, most = data.new_words(), size.devices[-1]
    about = f"{source.data}, half of the devices; the other half hold random letters"
    heading = f"Paper 004: new words, epsilon {WORD_EPSILON:g}\n{about}"
    title = f"words found among {most:,} devices, with 95% intervals"
    panels = [
        Panel("a", title, about, "rank of the word", "devices"),
        Panel("b", f"words found of {len(source.items)}", about, "devices", "words"),
    ]
    seeds = range(FIRST_SEED, FIRST_SEED + size.repeats)

    def readings(results: Searches) -> Iterator[Reading]:
        first = [each for each in results if (each[0].devices, each[0].seed) == (most, FIRST_SEED)]
        ranks = {word: rank for rank, word in enumerate(source.items.to_pylist(), 1)}
        for rank, count in enumerate(first[0][2].tolist(), 1):  # how many hold each word
            yield Reading("a", "truth", rank, count, FIRST_RUN)
        for search, words, _ in first:
            columns = (
                words.words.to_pylist(),
                words.counts.tolist(),
                words.standard_error.tolist(),
            )
            for word, count, error in zip(*columns, strict=True):
                if word in ranks:
                    more = {**FIRST_RUN, "item": word, "standard_error": error}
                    yield Reading("a", search.series, ranks[word], count, more)
        for search, _, _ in results:
            yield Reading("b", search.series, search.devices, search.found)

    return Experiment(
        heading=heading,
        jobs=[
            Job((devices, series), seed)
            for devices in size.devices
            for seed in seeds
            for series in SEARCHES
        ],
        stage=lambda workload: f"{SEARCHES[workload[1]]}, {workload[0]:,} devices",
        run=lambda job: runs.find_words(source, job, size.rows),
        panels=panels,
        readings=readings,
        records=lambda results: [{"data": about, **asdict(search)} for search, _, _ in results],
        claims=lambda results, _: word_claims(
            [search for search, _, _ in results if search.devices == most],
            words=len(source.items),
            has_reference=size.has_reference,
        ),
        picture=lambda results, curves: _draw_words(heading, panels, curves, results),
        at_once=1,
    )


def word_claims(group: Sequence[Search], *, words: int, has_reference: bool) -> Iterator[Claim]:
    """The claims about searches among the same number of devices."""
    puzzle, ours = ([run for run in group if run.series == series] for series in SEARCHES)
    puzzled, extended = ([run.found for run in runs] for runs in (puzzle, ours))
    if has_reference:
        yield Claim(
            text=f"the puzzle finds at least {REFERENCE_WORDS} of {words} words among "
            f"{puzzle[0].devices:,} devices, on average",
            holds=float(np.mean(puzzled)) >= REFERENCE_WORDS,
            detail=f"{_list(puzzled)} words; the rarest is held by "
            f"{min(run.rarest for run in puzzle):,} devices (known: {REFERENCE_WORDS} words, down "
            "to 4,874)",
        )
        seconds = [max(run.seconds for run in runs) for runs in (puzzle, ours)]
        yield Claim(
            text=f"discovery takes less than {REFERENCE_SECONDS:g} seconds of processor time",
            holds=seconds[0] < REFERENCE_SECONDS,
            detail=f"puzzle {seconds[0]:.1f} s at most, prefixes {seconds[1]:.1f} s",
        )
    wrong = [sum(run.false for run in runs) for runs in (puzzle, ours)]
    yield Claim(
        text="no false word is found, by either search",
        holds=not any(wrong),
        detail=f"{wrong[0]} by the puzzle, {wrong[1]} by prefixes, over {_runs(len(puzzle))} of "
        "each",
    )
    yield Claim(
        text="(ours) prefix extension finds more words, with equal epsilon and devices and in "
        "fewer bytes",
        holds=min(extended) > max(puzzled) and ours[0].record_bytes < puzzle[0].record_bytes,
        detail=f"{_list(extended)} words for {_list(puzzled)}; {ours[0].record_bytes} bytes a "
        f"record for {puzzle[0].record_bytes}; the rarest is held by "
        f"{min(run.rarest for run in ours):,} devices",
    )


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _draw_words(title: str, panels: Sequence[Panel], curves: Curves, results: Searches) -> Any:
    """The words that one run found, and the numbers of words that all runs found."""
    picture, (left, right) = _picture(title, panels, (1.5, 1.0))
    most = max(search.devices for search, _, _ in results)
    first = {run.series: run for run, _, _ in reversed(results) if run.devices == most}
    left.plot(curves.get("a", "truth", "x"), curves.get("a", "truth"), **TRUTH, label="truth")
    for (series, name), style in zip(SEARCHES.items(), STYLES.values(), strict=True):
        run, ours = first[series], series == "prefixes"
        label = f"{name}{' (ours)' * ours}, {run.record_bytes} bytes a record"
        half = Z95 * curves.get("a", series, "standard_error")
        x, y = curves.get("a", series, "x"), curves.get("a", series)
        left.errorbar(x, y, half, **style, **MARKS, label=label)
        left.axhline(run.threshold, color=style["color"], **DOTTED)
        x, y = curves.get("b", series, "x"), curves.get("b", series)
        right.plot(x, y, "--" if ours else "-", color=style["color"], zorder=1)
        _over_runs(right, curves, "b", series, style, label=name)
    left.plot([], [], **GUIDE, **DOTTED, label="threshold (5%, family-wise)")
    left.set(yscale="log", ylim=(min(run.threshold for run in first.values()) / 2, None))
    right.set(xscale="log", ylim=(0, None))
    right.minorticks_off()
    right.set_xticks(x)
    _finish((left, right))
    return picture


FIGURES = (
    Figure(
        "004-fig4",
        "standard deviation of a count by the sketch's width and rows (paper 004)",
        figure_4,
        small=Size4(rows=(32, 128), repeats=2, ours=1),
        paper=Size4(rows=(32, 128, 1_024, 8_192), repeats=8, ours=8),
    ),
    *(
        Figure(
            case.name,
            f"{case.title} under local privacy, by the paper's sketch and ours (paper 004)",
            partial(use_case, case),
            case.small,
            case.paper,
        )
        for case in data.CASES
    ),
    Figure(
        "004-new-words",
        "words nobody listed, by the fragment puzzle and by prefixes (paper 004)",
        new_words,
        small=WordSize(devices=(100_000, 300_000), repeats=1, rows=256),
        paper=WordSize(
            devices=(300_000, 1_000_000, 2_000_000), repeats=3, rows=2_048, has_reference=True
        ),
    ),
)

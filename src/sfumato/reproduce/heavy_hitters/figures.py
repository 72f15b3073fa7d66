"""Figures 1 to 4 and table 1 of paper 001: heavy hitters by traffic, by rounds and by sampling.

Figures 1 and 2 of the paper show the same. Beyond the paper, and drawn dashed: our tables. The
count sketches are queried for all 97,336 strings, and each has the number of rows that was best on
average at that x, chosen after the fact: an advantage over the other methods. Whole words have no
such list, so only invertible sketches are run there. Every repeat has its own seed, which draws
devices, coins and hash functions.

A claim's text says how it is checked. A method counts as behind another at an x where its mean F1
is lower by more than three standard errors of the difference. Claims marked (ours) are about
sfumato's additions to the paper. The paper's "count-median" is a sketch without signs; an advantage
over it is not always one over a CountSketch with signs, so both are compared.

Table 1 is about orders of growth. It is shown by the sizes that plans take for the guarantees, ours
and the paper's, beside the formulas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from sfumato.arrays import F64
from sfumato.planning import plan
from sfumato.questions import guarantees
from sfumato.reproduce.frequencies.runs import item_points
from sfumato.reproduce.heavy_hitters import data, runs
from sfumato.reproduce.heavy_hitters.data import Words
from sfumato.reproduce.heavy_hitters.runs import Setting
from sfumato.reproduce.panels import Curves, Panel, Reading, Series
from sfumato.reproduce.runner import Claim, Experiment, Figure, Job, repeat

SERIES: Mapping[str, Series] = {
    "unsigned": Series("count-median, no signs", "pink", "v"),
    "shared": Series("CountSketch, Shared", "red", "s"),
    "hybrid": Series("CountSketch, Hybrid", "green", "o"),
    "fresh": Series("CountSketch, Fresh", "blue", "^"),
    "unsampled": Series("IBLT, no sampling", "grey", "x"),
    "fixed": Series("IBLT, fixed sampling", "sky", "D"),
    "adaptive": Series("IBLT, adaptive", "orange", "P"),
    "ours": Series("ours", "black", "o", dashed=True),
}
SETTING_2 = Setting(rounds=30, threshold=50, budget=0)  # the budget varies
SETTING_3 = Setting(rounds=0, threshold=200, budget=10_000)  # the rounds vary
SETTING_4 = Setting(rounds=30, threshold=200, budget=5_000)
PAPER = ("unsampled", "fixed", "adaptive")
SIGNED = ("shared", "hybrid", "fresh")
LEVEL = 0.8  # the F1 at which the paper compares traffic
TIMES_LESS = 10  # the paper's ratio there
OURS_SHARE = 0.4  # our traffic, as a share of the paper's adaptive IBLT's
ORDER = ((2_000, 0.2), (5_000, 0.1, 0.75))  # budgets and bounds of an independent simulation
FLAT = 0.03  # an independent simulation of figure 3 had .95, .93, .93 over 10, 30, 100 rounds
FALLS = 0.1
NEAR = 0.02  # how near the best t counts as the best

TABLE_SERIES: Mapping[str, Series] = {
    "list": Series("a list", "black", "o"),
    "counts": Series("the counts of a histogram", "blue", "s"),
    "paper list": Series("a list, paper's constants", "grey", "x", dashed=True),
    "paper counts": Series("counts, paper's constants", "sky", "^", dashed=True),
    "list bound": Series("mn/tau", "orange", "D"),
    "counts bound": Series("mn·min(√R/tau, 1)", "green", "P"),
}
TABLE_DEVICES = 20_000  # in each round, with one item each
TABLE_THRESHOLD, TABLE_ROUNDS = 500.0, 4  # where the other one varies
FAILURE = 0.05
SPREAD = 2.5  # for whole cells and terms of a lower order

ClaimsOf = Callable[[str, Words, Curves], Iterator[Claim]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    repeats: int
    along: tuple[float, ...]  # the figure's x: budgets, rounds, or t
    rows: tuple[int, ...] = (5, 7, 9, 11)  # of count sketches


def figure_2(size: Size) -> Experiment:
    """F1 by a device's budget."""
    return _every_method(
        f"Paper 001, figures 1 and 2: {SETTING_2.rounds} rounds, at least {SETTING_2.threshold} "
        "devices",
        lambda budget: replace(SETTING_2, budget=int(budget)),
        "words of 16 bits that a device sends in a round",
        claims_2,
        size,
    )


def figure_3(size: Size) -> Experiment:
    """F1 by rounds."""
    return _every_method(
        f"Paper 001, figure 3: {SETTING_3.budget:,} words, at least {SETTING_3.threshold} devices",
        lambda rounds: replace(SETTING_3, rounds=int(rounds)),
        "rounds",
        claims_3,
        size,
    )


def _every_method(
    heading: str, setting_at: Callable[[float], Setting], x_name: str, claims: ClaimsOf, size: Size
) -> Experiment:
    """Every method over the same devices. The series of a count sketch includes its rows."""
    keyed = _keyed()

    def run(job: Job) -> Iterator[Reading]:
        (x, key, words), seed = job.workload, job.seed
        setting = setting_at(x)
        counts = words.rounds(setting.rounds, seed)
        times = runs.fixed_times(words, counts, setting)
        designs = {
            "unsampled": runs.paper_design(words, counts, setting, times=1.0, seed=seed),
            "fixed": runs.paper_design(words, counts, setting, times=times, seed=seed),
            "adaptive": runs.paper_design(words, counts, setting, times=None, seed=seed),
            "ours": runs.our_design(words, counts, setting, seed=seed),
        }
        if words.categories:
            points = item_points(words.categories, seed)
            for mode, rows, f1 in runs.count_sketches(
                counts, points, setting, rows=size.rows, seed=seed
            ):
                yield Reading(key, f"{mode}/{rows}", x, f1)
        for series, design in designs.items():
            score = runs.score_campaign(design, words, counts, setting, seed=seed)
            yield Reading(key, series, x, score.f1)
            yield Reading(wrong_panel(key), series, x, score.wrong)

    return _experiment(
        heading,
        repeat([(x, key, words) for x in size.along for key, words in keyed], size.repeats),
        lambda workload: f"{x_name.split()[0]}: {workload[0]:,g}",
        run,
        keyed,
        x_name,
        claims,
    )


def figure_4(size: Size) -> Experiment:
    """F1 of a fixed sample of one in t, and of tables that find their own t, which are drawn as
    level lines."""
    keyed, setting = _keyed(), SETTING_4

    def run(job: Job) -> Iterator[Reading]:
        (key, words), seed = job.workload, job.seed
        counts = words.rounds(setting.rounds, seed)
        for times in size.along:
            design = runs.paper_design(words, counts, setting, times=times, seed=seed)
            score = runs.score_campaign(design, words, counts, setting, seed=seed)
            yield Reading(key, "fixed", times, score.f1)
        adaptive = runs.paper_design(words, counts, setting, times=None, seed=seed)
        ours = runs.our_design(words, counts, setting, seed=seed, adaptive=True)
        for series, design in (("adaptive", adaptive), ("ours", ours)):
            score = runs.score_campaign(design, words, counts, setting, seed=seed)
            for times in size.along:
                yield Reading(key, series, times, score.f1)

    return _experiment(
        f"Paper 001, figure 4: {setting.rounds} rounds, {setting.budget:,} words, at least "
        f"{setting.threshold} devices",
        repeat(keyed, size.repeats),
        lambda workload: str(workload[1].name),
        run,
        keyed,
        "t: one device in t is sampled",
        claims_4,
    )


def table_1(size: Size) -> Experiment:
    """The words that a device sends, by rounds and by threshold."""

    def run(job: Job) -> list[Reading]:
        panel, x = job.workload
        rounds, threshold = (int(x), TABLE_THRESHOLD) if panel == "a" else (TABLE_ROUNDS, x)
        return [
            Reading(panel if series in TABLE_SERIES else f"{panel} logarithms", series, x, words)
            for series, words in costs(rounds, threshold)
        ]

    heads = {"a": ("rounds", f"threshold {TABLE_THRESHOLD:g}")}
    heads["b"] = ("threshold", f"{TABLE_ROUNDS} rounds")
    text = (
        f"any data of {TABLE_DEVICES:,} devices in each round, one item each; failure {FAILURE:g}"
    )
    return Experiment(
        heading="Paper 001, table 1: what a device sends for a list, and for counts, of any data",
        jobs=repeat([*(("a", x) for x in size.along), *(("b", x) for x in _THRESHOLDS)], 1),
        stage=lambda workload: f"{heads[workload[0]][0]}: {workload[1]:,g}",
        run=run,
        panels=[
            panel
            for key, (x_name, title) in heads.items()
            for panel in (
                Panel(key, title, text, x_name, "words of 16 bits"),
                Panel(f"{key} logarithms", title, text, x_name, "factor", is_drawn=False),
            )
        ],
        claims=lambda _, curves: table_claims(curves),
        series=TABLE_SERIES,
    )


def costs(rounds: int, threshold: float) -> Iterator[tuple[str, float]]:
    """Words of a device, by the sizes of plans and by the paper's formulas. A cell of a count
    sketch is a word, as in the paper."""
    study = {"question": "heavy_hitters", "trust": "central", "epsilon": math.inf, "alphabet": "ab"}
    study |= {"algorithm": "threshold_sampling", "word_length": 16, "threshold": threshold}
    study |= {"devices": rounds * TABLE_DEVICES, "rounds": rounds, "failure_probability": FAILURE}
    yield "list", plan(study).predicted["words"]
    alike = guarantees.Rounds(devices=TABLE_DEVICES, rounds=rounds, items_per_device=1, alike=True)
    yield "counts", math.prod(guarantees.sketch_for(alike, threshold, FAILURE / 2))
    sizes = guarantees.PaperSizes(
        items=TABLE_DEVICES, rounds=rounds, threshold=threshold, failure_probability=FAILURE
    )
    yield "paper list", sizes.words
    yield "paper counts", sizes.rows * sizes.width
    yield "list bound", guarantees.list_cost(TABLE_DEVICES, threshold)
    yield "counts bound", guarantees.histogram_cost(TABLE_DEVICES, rounds, threshold)
    yield "logarithm", sizes.logarithm
    yield "gamma", sizes.gamma


def table_claims(curves: Curves) -> Iterator[Claim]:
    """Growth as in the theorems: the bound, times ln(4mnR/(tau·beta)), and for the paper's tables
    times ln R."""
    for series, name in (
        ("list", "a list costs mn/tau, whatever the rounds"),
        ("counts", "counts cost √R times as much"),
    ):
        for prefix, whose in (("", "our sizes"), ("paper ", "the paper's constants")):
            spans = []
            for key, what in (("a", "rounds"), ("b", "thresholds")):
                logarithms, words = f"{key} logarithms", curves.get(key, prefix + series)
                shares = (
                    words / curves.get(key, f"{series} bound") / curves.get(logarithms, "logarithm")
                )
                if prefix + series == "paper list":
                    shares = shares / curves.get(logarithms, "gamma")
                spans.append((float(shares.max() / shares.min()), what))
            detail = ", ".join(f"over {what} {span:.2f} times" for span, what in spans)
            yield Claim(
                text=f"{name} ({whose}): words over the bound with its logarithms vary by at most "
                f"{SPREAD:g} times",
                holds=all(span <= SPREAD for span, _ in spans),
                detail=detail,
            )


def _keyed() -> list[tuple[str, Words]]:
    return list(zip("abcd", [*data.short_words(), *data.whole_words()], strict=False))


def _experiment(
    heading: str,
    jobs: Sequence[Job],
    stage: Callable[[Any], str],
    run: Callable[[Job], Iterator[Reading]],
    keyed: Sequence[tuple[str, Words]],
    x_name: str,
    claims: ClaimsOf,
) -> Experiment:
    panels = []
    for key, words in keyed:
        strings = f"{words.categories:,} strings"
        domain = (
            strings if words.categories else "an open domain, of which no count sketch can be asked"
        )
        title, wrong = f"{words.name}\n{domain}", "keys listed that nobody held"
        panels += [
            Panel(key, title, words.data, x_name, "F1 of the heavy hitters", linear=True),
            Panel(wrong_panel(key), title, words.data, x_name, wrong, is_drawn=False),
        ]
    return Experiment(
        heading=heading,
        jobs=jobs,
        stage=stage,
        run=lambda job: list(run(job)),
        panels=panels,
        readings=lambda results: best_rows(chain.from_iterable(results)),
        claims=lambda _, curves: [c for pair in keyed for c in claims(*pair, curves)],
        series=SERIES,
        columns=2 if len(keyed) % 2 == 0 else len(keyed),
    )


def wrong_panel(key: str) -> str:
    """The panel, which is not drawn, of the number of listed keys that nobody held."""
    return f"{key} wrong"


def best_rows(readings: Iterable[Reading]) -> list[Reading]:
    """For each count sketch, the rows with the best mean at an x; lines include these rows."""
    groups: dict[tuple[str, str, float], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for panel, series, x, y, _ in readings:
        kind, _, rows = series.partition("/")
        groups[panel, kind, x][int(rows or runs.ROWS)].append(y)
    best = {
        key: max(tried.items(), key=lambda pair: float(np.mean(pair[1])))
        for key, tried in groups.items()
    }
    return [
        Reading(*key, y, {"rows": rows}) for key, (rows, values) in best.items() for y in values
    ]


def claims_2(key: str, words: Words, curves: Curves) -> Iterator[Claim]:
    """The claims about one domain by budget."""
    name = f"2({key}) {words.name}"
    if words.categories:
        lead = curves.get(key, "adaptive") - curves.get(key, "unsigned")
        yield Claim(
            text=f"{name}: the adaptive IBLT is far above count-median without signs: behind at no "
            "budget, and by 0.2 or more ahead on average",
            holds=bool(np.mean(lead) >= 0.2)
            and not _is_behind(curves, key, "adaptive", "unsigned"),
            detail=f"ahead by {_by_x(curves, key, lead)}; on average {np.mean(lead):.2f}",
        )
        yield _ten_times_less(name, key, curves, ("unsigned",), "count-median without signs")
        yield _ten_times_less(name, key, curves, SIGNED, "the best CountSketch with signs")
        (few, ahead), (many, low, high) = ORDER
        fresh, adaptive = curves.at(key, "fresh", few), curves.at(key, "adaptive", few)
        unsigned, larger = curves.at(key, "unsigned", many), curves.at(key, "adaptive", many)
        yield Claim(
            text=f"{name}: the order of an independent simulation: at {few:,} words the adaptive "
            f"IBLT is more than {ahead:g} above Fresh; at {many:,} count-median is below {low:g}, "
            f"the adaptive IBLT above {high:g}",
            holds=bool(adaptive > fresh + ahead and unsigned < low and larger > high),
            detail=f"at {few:,}: adaptive {adaptive:.3f}, Fresh {fresh:.3f}; at {many:,}: "
            f"adaptive {larger:.3f}, count-median {unsigned:.3f}",
        )
    yield Claim(
        text=f"{name}: of the paper's IBLTs the adaptive one is best: behind at no budget",
        holds=not _is_behind(curves, key, "adaptive", *PAPER[:2]),
        detail="; ".join(
            f"{series} {_by_x(curves, key, curves.get(key, series))}"
            for series in ("adaptive", *PAPER[:2])
        ),
    )
    yield _at_least(f"(ours) {name}: at least the paper's IBLTs", key, curves, PAPER)
    if words.categories:
        others = ("unsigned", *SIGNED)
        yield _at_least(f"(ours) {name}: at least every CountSketch", key, curves, others)
    ours, paper = budget_for(curves, key, "ours"), budget_for(curves, key, "adaptive")
    yield Claim(
        text=f"(ours) {name}: F1 = {LEVEL:g} with at most {OURS_SHARE:g} of the words of the "
        "paper's adaptive IBLT",
        holds=bool(np.isfinite(ours) and ours <= OURS_SHARE * paper),
        detail=f"ours {_words(ours)}, adaptive IBLT {_words(paper)}: {ours / paper:.2f} of them",
    )
    wrong, repeats = (curves.get(wrong_panel(key), "ours", field) for field in ("y", "repeats"))
    yield Claim(
        text=f"(ours) {name}: no key is listed that nobody held",
        holds=not np.any(wrong),
        detail=f"{wrong @ repeats:g} in {int(repeats.sum()):,} campaigns, all rounds",
    )


def _ten_times_less(
    name: str, key: str, curves: Curves, others: Sequence[str], called: str
) -> Claim:
    iblt = budget_for(curves, key, "adaptive")
    needed = {series: budget_for(curves, key, series) for series in others}
    other = min(needed.values())
    each = ", ".join(f"{series} {_words(value)}" for series, value in needed.items())
    times = f"{other / iblt:.1f} times as many" if np.isfinite(other) else "more than were tried"
    return Claim(
        text=f"{name}: F1 = {LEVEL:g} at {TIMES_LESS} times less communication than {called}",
        holds=bool(np.isfinite(iblt) and other >= TIMES_LESS * iblt),
        detail=f"words for F1 = {LEVEL:g}: adaptive IBLT {_words(iblt)}, {each}: {times}",
    )


def _at_least(text: str, key: str, curves: Curves, others: Sequence[str]) -> Claim:
    best = np.max([curves.get(key, other) for other in others], axis=0)
    return Claim(
        text=f"{text}, at every budget",
        holds=not _is_behind(curves, key, "ours", *others),
        detail=f"ours {_by_x(curves, key, curves.get(key, 'ours'))}; best of {', '.join(others)} "
        f"{_by_x(curves, key, best)}",
    )


def claims_3(key: str, words: Words, curves: Curves) -> Iterator[Claim]:
    """The claims about one domain by rounds."""
    name = f"3({key}) {words.name}"
    yield _flat(f"{name}: the IBLT with fixed sampling", key, "fixed", curves)
    yield _flat(f"{name}: the adaptive IBLT", key, "adaptive", curves)
    yield _flat(f"(ours) {name}: ours", key, "ours", curves)
    if words.categories:
        yield _falls(f"{name}: count-median without signs", key, "unsigned", curves)
        yield _falls(f"{name}: the Shared CountSketch", key, "shared", curves)
        yield _falls(f"{name}: the Fresh CountSketch", key, "fresh", curves)


def _flat(name: str, key: str, series: str, curves: Curves) -> Claim:
    """The error of sampling near the threshold does not depend on the rounds, and on a power law
    neither does the share of heavy hitters near it. It still moves a little: estimates are
    multiples of t, and words do not follow a power law."""
    values = curves.get(key, series)
    drop = float(np.max(np.maximum.accumulate(values) - values))
    return Claim(
        text=f"{name} does not fall with the rounds: no mean is more than {FLAT:g} below an "
        "earlier one",
        holds=bool(drop <= FLAT),
        detail=f"{_by_x(curves, key, values)}; range {np.ptp(values):.3f}, largest fall {drop:.3f}",
    )


def _falls(name: str, key: str, series: str, curves: Curves) -> Claim:
    values = curves.get(key, series)
    return Claim(
        text=f"{name} falls with the rounds, by more than {FALLS:g}",
        holds=bool(values[0] - values[-1] > FALLS),
        detail=_by_x(curves, key, values),
    )


def claims_4(key: str, words: Words, curves: Curves) -> Iterator[Claim]:
    """The claims about one domain by sampling."""
    name = f"4({key}) {words.name}"
    fixed, times = curves.get(key, "fixed"), curves.get(key, "fixed", "x")
    best, at = float(fixed.max()), float(times[np.argmax(fixed)])
    adaptive, ours = curves.get(key, "adaptive")[0], curves.get(key, "ours")[0]
    tried = f"best t {at:g}: {best:.3f}; fixed {_by_x(curves, key, fixed)}"
    yield Claim(
        text=f"{name}: adaptive is within {NEAR:g} of the best fixed t, or above",
        holds=bool(adaptive >= best - NEAR),
        detail=f"adaptive {adaptive:.3f}; {tried}",
    )
    yield Claim(
        text=f"(ours) {name}: adaptive is at least the best fixed t of the paper's IBLT",
        holds=not _is_behind(curves, key, "ours", "fixed"),
        detail=f"ours {ours:.3f}; {tried}",
    )


def budget_for(curves: Curves, key: str, series: str) -> float:
    """The words at which a series reaches an F1 of `LEVEL`, interpolated between budgets on a
    logarithmic scale; infinite if it never does, and the least budget if it always does."""
    budgets, values = curves.get(key, series, "x"), curves.get(key, series)
    reached = np.flatnonzero(values >= LEVEL)
    if reached.size == 0:
        return float("inf")
    last = int(reached[0])
    if last == 0:
        return float(budgets[0])
    pair = slice(last - 1, last + 1)
    return float(np.exp(np.interp(LEVEL, values[pair], np.log(budgets[pair]))))


def _is_behind(curves: Curves, key: str, series: str, *others: str) -> bool:
    """Whether another's F1 is somewhere above the series' by more than chance explains."""
    return any(bool(np.any(curves.behind(key, other, series))) for other in others)


def _words(budget: float) -> str:
    return f"{budget:,.0f}" if np.isfinite(budget) else "never"


def _by_x(curves: Curves, key: str, values: F64) -> str:
    where = curves.get(key, "adaptive", "x")
    return ", ".join(f"{value:.3f} at {x:,g}" for value, x in zip(values, where, strict=True))


_BUDGETS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
_THRESHOLDS = (100.0, 200.0, 500.0, 1_000.0, 2_000.0)
_TIMES = (1, 1.25, 2, 5, 10, 20, 50, 100)
SMALL_2 = Size(repeats=2, along=(200, 500, 2_000, 5_000, 20_000), rows=(5, 9))
PAPER_2 = Size(repeats=3, along=_BUDGETS)
FIGURES = (
    Figure("001-fig1", "the same as 001-fig2 (paper 001)", figure_2, SMALL_2, PAPER_2),
    Figure(
        "001-fig2", "heavy hitters by what a device sends (paper 001)", figure_2, SMALL_2, PAPER_2
    ),
    Figure(
        "001-fig3",
        "heavy hitters by the number of rounds (paper 001)",
        figure_3,
        small=Size(repeats=2, along=(10, 30), rows=(5, 9)),
        paper=Size(repeats=3, along=(10, 30, 50, 100)),
    ),
    Figure(
        "001-fig4",
        "heavy hitters by how much is sampled (paper 001)",
        figure_4,
        small=Size(repeats=2, along=_TIMES),
        paper=Size(repeats=12, along=_TIMES),
    ),
    Figure(
        "001-table1",
        "what a list and a histogram cost, by rounds and threshold (paper 001)",
        table_1,
        small=Size(repeats=1, along=(1, 4, 16, 64)),
        paper=Size(repeats=1, along=(1, 4, 16, 64, 256)),
    ),
)

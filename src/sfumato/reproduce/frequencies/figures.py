"""Figures 1, 2 and 3 of paper 000: how wide a sketch must be, and how rounds should share hashes.

Beyond the paper, and drawn dashed: sizes with our constant 6, and Hybrid rounds with the refined
decoder. Every repeat has its own seed, which draws the devices and the hash functions.

A claim's text says how it is checked. Two means whose difference is within three standard errors
count as equal: with few rows the largest error is set by rare collisions, and a mean over few runs
by one of them. Claims marked (ours) are about sfumato's additions to the paper. The "known" numbers
are from an earlier, independent simulation with about twenty runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.arrays import F64, Bool
from sfumato.questions import sizing
from sfumato.reproduce.frequencies import data
from sfumato.reproduce.frequencies.data import LAW_ITEMS, LAW_ROWS, ROUNDS, Source
from sfumato.reproduce.frequencies.runs import errors_by_mode, one_round, ten_rounds
from sfumato.reproduce.panels import Curves, Panel, Reading, Series, short, span
from sfumato.reproduce.runner import Claim, Experiment, Figure, Job, repeat

LARGEST_ERROR = "largest error (share of devices)"
SERIES: Mapping[str, Series] = {
    "shared": Series("Shared", "red", "s"),
    "fresh": Series("Fresh", "blue", "^"),
    "hybrid": Series("Hybrid", "green", "o"),
    "hybrid refined": Series("Hybrid, refined decoder (ours)", "green", "o", dashed=True),
    "minimax": Series("minimax, eq. (3)", "black", "s"),
    "instance": Series("instance optimal, eq. (2)", "pink", "^"),
    "two-phase": Series("two-phase", "orange", "o"),
    "instance 6": Series("instance, constant 6 (ours)", "pink", "^", dashed=True),
    "two-phase 6": Series("two-phase, constant 6 (ours)", "orange", "o", dashed=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    repeats: int
    widths: tuple[int, ...]
    targets: tuple[float, ...] = ()


def _between(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in np.geomspace(low, high, count))


def _ten_rounds_of(source: Source) -> str:
    devices = f"{ROUNDS} rounds of {source.per_round:,} devices"
    return f"{source.name}\n{devices}, {source.rows} rows"


# Figure 1.

Keys = tuple[str, str, str]  # panels of widths, of errors and of rounds


def figure_1(size: Size) -> Experiment:
    """Panels a, d, g: widths by strategy; b, e, h: their errors; c, f, i: rounds."""
    sources = (data.gowalla(), data.c4_commits() or data.c4_law(), data.sentiment())
    keyed: list[tuple[Keys, Source]] = [
        (("a", "b", "c"), sources[0]),
        (("d", "e", "f"), sources[1]),
        (("g", "h", "i"), sources[2]),
    ]

    def run(job: Job) -> Iterator[Reading]:
        (width_key, error_key, rounds_key), source = job.workload
        for target, series, width, error in one_round(source, size.targets, job.seed):
            yield Reading(width_key, series, target, width)
            yield Reading(error_key, series, target, error)
        for width, series, error in ten_rounds(source, size.widths, job.seed):
            yield Reading(rounds_key, series, width, error)

    return Experiment(
        heading="Paper 000, figure 1: one round sized three ways, and ten rounds",
        jobs=repeat(keyed, size.repeats),
        stage=lambda workload: str(workload[1].name),
        run=lambda job: list(run(job)),
        panels=[panel for keys, source in keyed for panel in _panels_1(keys, source)],
        claims=lambda _, curves: [c for pair in keyed for c in claims_1(*pair, curves)],
        series=SERIES,
        columns=3,
    )


def _panels_1(keys: Keys, source: Source) -> list[Panel]:
    one = f"{source.name}\none round of {source.one_round:,} devices, {source.rows} rows"
    about, target = source.data, "target error (share of devices)"
    half = 0.5 / (ROUNDS * source.per_round)
    return [
        Panel(keys[0], one, about, target, "width"),
        Panel(keys[1], one, about, target, LARGEST_ERROR, diagonal="target"),
        Panel(
            keys[2],
            _ten_rounds_of(source),
            about,
            "width",
            LARGEST_ERROR,
            floor=half,
            floor_name="half a device",
        ),
    ]


def claims_1(keys: Keys, source: Source, curves: Curves) -> Iterator[Claim]:
    """The claims about one source."""
    key, error_key, rounds_key = keys
    minimax, instance, piloted = (
        curves.get(key, strategy) for strategy in ("minimax", "instance", "two-phase")
    )
    yield Claim(
        text=f"1({key}) {source.name}: instance-optimal and two-phase sizes are at most half the "
        "minimax width, at every target",
        holds=bool(np.all(2 * instance <= minimax) and np.all(2 * piloted <= minimax)),
        detail=f"minimax is {span(minimax / instance)} times the instance-optimal width and "
        f"{span(minimax / piloted)} times the two-phase width; two-phase is "
        f"{span(piloted / instance)} times the instance-optimal width",
    )
    paper, ours = sizing.PAPER_CONSTANT, sizing.CONSTANT
    name = f"1({error_key}) {source.name}"
    small = ("instance", "two-phase")
    yield _reaches_target(name, error_key, source, curves, paper, small, (*small, "minimax"))
    small = ("instance 6", "two-phase 6")
    yield _reaches_target(f"(ours) {name}", error_key, source, curves, ours, small, small)
    name = f"1({rounds_key}) {source.name}"
    yield _modes(name, rounds_key, source, curves)
    median, refined = curves.get(rounds_key, "hybrid"), curves.get(rounds_key, "hybrid refined")
    exact = refined < 0.5 / (ROUNDS * source.per_round)  # exact after rounding
    gain = median / np.maximum(refined, np.finfo(float).tiny)
    cells = ["exact" if sure else f"{short(g)}×" for sure, g in zip(exact, gain, strict=True)]
    yield Claim(
        text=f"(ours) {name}: the refined decoder cuts Hybrid's error at least in half, at every "
        "width",
        holds=bool(np.all(exact | (gain >= 2))),
        detail=f"median's error over refined's: {_by_width(curves, rounds_key, cells)}",
    )


def _reaches_target(
    name: str,
    key: str,
    source: Source,
    curves: Curves,
    constant: float,
    strategies: Sequence[str],
    all_strategies: Sequence[str],
) -> Claim:
    """Whether sizes with a constant reach the target error."""
    ratios = "; ".join(
        f"{strategy.removesuffix(' 6')} "
        f"{span(curves.get(key, strategy) / curves.get(key, strategy, 'x'))}"
        for strategy in all_strategies
    )
    rows = sizing.rows_for(source.categories, paper=True)
    few = f"; {source.rows} rows where theory asks for {rows}" if source.rows < rows else ""
    return Claim(
        text=f"{name}: sizes with constant {constant:g} reach the target error, in 90% of runs "
        "at every target",
        holds=all(
            np.all(curves.get(key, strategy, "y_high") <= curves.get(key, strategy, "x"))
            for strategy in strategies
        ),
        detail=f"mean largest error over target: {ratios}{few}",
    )


def _modes(name: str, key: str, source: Source, curves: Curves) -> Claim:
    shared, fresh, hybrid = _three(key, curves)
    if source.light_tail:
        text = "Hybrid is best: neither Fresh nor Shared errs less at any width"
        holds = not np.any(_is_beaten(key, curves))
    else:
        text = (
            "Hybrid and Fresh are alike (within a factor of two) and better than Shared, at "
            "every width"
        )
        holds = bool(np.all(_alike(key, curves)))
    return Claim(
        text=f"{name}: {text}",
        holds=holds,
        detail=f"Hybrid/Fresh {_by_width(curves, key, hybrid / fresh)}; "
        f"Shared/Hybrid {span(shared / hybrid)}, Shared/Fresh {span(shared / fresh)}",
    )


# Figure 2.

LAW_DEVICES = 1 << 40  # expected counts as whole numbers: shares in units of 2**-40
LAWS = {"a": 1.1, "b": 2.0, "c": 5.0}  # exponents by panel
WIDE = 200  # the width from which five rows are enough for 100,000 items (`majority_collisions`)
REFERENCE_2: Mapping[tuple[float, int], str] = {  # law, width: Shared, Hybrid, Fresh
    (1.1, 200): ".058, .0100, .0080",
    (1.1, 1000): ".0066, .0020, .0020",
    (2.0, 200): ".051, .018, .024",
    (2.0, 1000): ".0031, .00069, .00069",
    (5.0, 200): ".020, .00052, .040",
    (5.0, 1000): "8e-4, 3e-7, 1e-5",
}


def figure_2(size: Size) -> Experiment:
    """The mean largest error of the three modes on three power laws, with identical rounds."""

    def run(job: Job) -> list[Reading]:
        key, exponent = job.workload
        shares = data.power_law_shares(exponent, LAW_ITEMS)
        counts = np.tile(np.rint(shares * LAW_DEVICES).astype(np.int64), (ROUNDS, 1))
        wrong = errors_by_mode(counts, LAW_ROWS, size.widths, job.seed)
        return [Reading(key, mode, width, float(errors.max())) for width, mode, errors in wrong]

    return Experiment(
        heading=f"Paper 000, figure 2: {ROUNDS} rounds exactly alike, synthetic laws",
        jobs=repeat(LAWS.items(), size.repeats),
        stage=lambda workload: f"law i^-{workload[1]:g}",
        run=run,
        panels=[
            Panel(
                key,
                f"law i^-{exponent:g}\n{LAW_ITEMS:,} items, {LAW_ROWS} rows",
                f"law i^-{exponent:g}, expected counts, the same in each of {ROUNDS} rounds",
                "width",
                f"mean {LARGEST_ERROR}",
            )
            for key, exponent in LAWS.items()
        ],
        claims=lambda _, curves: claims_2(curves),
        series=SERIES,
        columns=3,
    )


def claims_2(curves: Curves) -> Iterator[Claim]:
    """The claims about the laws together. The theorems compare upper bounds; with few rows and
    little width Fresh wins."""
    wide = curves.get("a", "hybrid", "x") >= WIDE
    shared, fresh, hybrid = _three("a", curves)
    yield Claim(
        text=f"2(a) low degree (i^-{LAWS['a']:g}): Hybrid is like Fresh (within a factor "
        f"of two) and both beat Shared, at widths from {WIDE}",
        holds=bool(np.all(_alike("a", curves)[wide])),
        detail=f"Hybrid/Fresh {_by_width(curves, 'a', hybrid / fresh)}; "
        f"Shared over the worse of them {span(shared / np.maximum(hybrid, fresh))}"
        + _reference_numbers("; Shared", "a", curves),
    )
    shared, fresh, hybrid = _three("c", curves)
    lead = np.minimum(shared, fresh) / hybrid
    typical = float(np.exp(np.mean(np.log(lead[wide]))))
    yield Claim(
        text=f"2(c) high degree (i^-{LAWS['c']:g}): Hybrid is clearly best: behind at no "
        f"width from {WIDE}, and ahead by a factor of two or more on average",
        holds=bool(typical >= 2 and not np.any(_is_beaten("c", curves)[wide])),
        detail=f"error of the better of Shared and Fresh over Hybrid's: "
        f"{_by_width(curves, 'c', lead)}; geometric mean from {WIDE} on: {short(typical)}"
        + _reference_numbers("; Shared", "c", curves),
    )
    ratios, worse = [], []
    for key, exponent in LAWS.items():
        shared, fresh, hybrid = _three(key, curves)
        ratios.append(f"i^-{exponent:g}: {_by_width(curves, key, shared / hybrid)}")
        behind = curves.behind(key, "hybrid", "fresh")
        widths = curves.get(key, "hybrid", "x")[behind]
        over = zip(hybrid[behind] / fresh[behind], widths, strict=True)
        where = ", ".join(f"{short(ratio)}× at {width:g}" for ratio, width in over)
        worse.append(f"i^-{exponent:g}: {where or 'nowhere'}")
    yield Claim(
        text="2 Hybrid is nowhere worse than Shared, on every law and at every width",
        holds=not any(np.any(curves.behind(key, "hybrid", "shared")) for key in LAWS),
        detail=f"Shared/Hybrid {'; '.join(ratios)}. On i^-{LAWS['b']:g}"
        + _reference_numbers(" Shared", "b", curves),
    )
    narrow = float(curves.get("a", "hybrid", "x")[0])
    expected = sizing.majority_collisions(LAW_ITEMS, LAW_ROWS, int(narrow))
    yield Claim(
        text="2 Hybrid is never worse than Fresh (theorem 3.2 against 3.1)",
        holds=not any(np.any(curves.behind(key, "hybrid", "fresh")) for key in LAWS),
        detail=f"Hybrid's error over Fresh's where Fresh wins: {'; '.join(worse)}. Five rows are "
        f"too few: at width {narrow:g} about {expected:.2g} items meet the heaviest in a majority "
        "of rows, and Hybrid keeps its cells, so they stay wrong in every round",
    )


def _reference_numbers(start: str, key: str, curves: Curves) -> str:
    """Our numbers beside the known ones, at the widths that have both."""
    pairs = []
    for width in (200, 1000):
        here = [curves.at(key, mode, width) for mode in ("shared", "hybrid", "fresh")]
        if not np.isnan(here).any():
            means = ", ".join(f"{value:.2g}" for value in here)
            pairs.append(f"{width}: {means} (known {REFERENCE_2[LAWS[key], width]})")
    return f"{start}, Hybrid, Fresh at " + "; at ".join(pairs) if pairs else ""


# Figure 3.

MANY_TIMES_SHARED, MANY_TIMES_FRESH = 6, 2  # how far Hybrid leads at width 200 on i^-1.8
SHARED_BAND, FRESH_BAND = (0.8, 2.6), (0.4, 1.5)  # Shared@1200 and Fresh@600 over Hybrid@200
REFERENCE_3 = (
    "Hybrid@200 285±39, Shared@1200 413±34, Fresh@600 235±23, Shared@200 3180, Fresh@200 888"
)


def figure_3(size: Size) -> Experiment:
    """Items with an error above 0.1/width, on the law i^-1.8 and on the substitutes for C4."""
    sources = (data.c4_law(), data.c4_commits(), data.c4_hosts())
    keyed = list(zip("abc", (source for source in sources if source), strict=False))

    def run(job: Job) -> list[Reading]:
        key, source = job.workload
        counts = source.counts(ROUNDS, source.per_round, np.random.default_rng(job.seed))
        return [
            Reading(key, mode, width, int(np.sum(errors > 0.1 / width)))
            for width, mode, errors in errors_by_mode(counts, source.rows, size.widths, job.seed)
        ]

    return Experiment(
        heading=f"Paper 000, figure 3: items estimated badly, of {data.C4_ITEMS:,}",
        jobs=repeat(keyed, size.repeats),
        stage=lambda workload: str(workload[1].name),
        run=run,
        panels=[
            Panel(
                key,
                _ten_rounds_of(source),
                source.data,
                "width",
                "items with error above 0.1/width",
                floor=0.1,
                floor_name="none",
                level=("hybrid", 200),
            )
            for key, source in keyed
        ],
        claims=lambda _, curves: [c for pair in keyed for c in claims_3(*pair, curves)],
        series=SERIES,
        columns=3,
    )


def claims_3(key: str, source: Source, curves: Curves) -> Iterator[Claim]:
    """The claims about one source."""
    name = f"3({key}) {source.name}"
    reference = f"; known on this law: {REFERENCE_3}" if source.name == "law i^-1.8" else ""
    hybrid = curves.at(key, "hybrid", 200)
    shared, fresh = curves.at(key, "shared", 1200), curves.at(key, "fresh", 600)
    yield Claim(
        text=f"{name}: Hybrid at width 200 does about as well as Shared at 1200 (which has "
        f"{SHARED_BAND[0]} to {SHARED_BAND[1]} times as many items wrong) and Fresh at 600 "
        f"({FRESH_BAND[0]} to {FRESH_BAND[1]} times)",
        holds=SHARED_BAND[0] * hybrid <= shared <= SHARED_BAND[1] * hybrid
        and FRESH_BAND[0] * hybrid <= fresh <= FRESH_BAND[1] * hybrid,
        detail=f"items: Hybrid@200 {hybrid:.1f}, Shared@1200 {shared:.1f}, "
        f"Fresh@600 {fresh:.1f}; Shared needs {_width_to_match(curves, key, 'shared')}, "
        f"Fresh {_width_to_match(curves, key, 'fresh')} to match Hybrid@200{reference}",
    )
    shared, fresh = curves.at(key, "shared", 200), curves.at(key, "fresh", 200)
    yield Claim(
        text=f"{name}: at width 200 Shared has over {MANY_TIMES_SHARED} times and Fresh "
        f"over {MANY_TIMES_FRESH} times as many items wrong as Hybrid",
        holds=shared > MANY_TIMES_SHARED * hybrid and fresh > MANY_TIMES_FRESH * hybrid,
        detail=f"items: Hybrid {hybrid:.1f}, Fresh {fresh:.1f}, Shared {shared:.1f}",
    )


def _width_to_match(curves: Curves, key: str, mode: str) -> str:
    """The width, by interpolation, at which a mode has as few wrong items as Hybrid at 200."""
    target = curves.at(key, "hybrid", 200)
    widths, wrong = curves.get(key, mode, "x"), curves.get(key, mode)
    if target <= 0 or wrong[-1] > target:
        return f"a width above {widths[-1]:g}"
    falling = np.minimum.accumulate(np.maximum(wrong, 1e-3))[::-1]
    width = np.exp(np.interp(np.log(target), np.log(falling), np.log(widths[::-1])))
    return f"width {width:.0f} (Hybrid saves {1 - 200 / width:.0%})"


def _three(key: str, curves: Curves) -> tuple[F64, F64, F64]:
    return curves.get(key, "shared"), curves.get(key, "fresh"), curves.get(key, "hybrid")


def _is_beaten(key: str, curves: Curves) -> Bool:
    """By width, whether Hybrid is behind another mode."""
    return curves.behind(key, "hybrid", "fresh") | curves.behind(key, "hybrid", "shared")


def _alike(key: str, curves: Curves) -> Bool:
    """By width, whether Hybrid and Fresh are within a factor of two and better than Shared."""
    shared, fresh, hybrid = _three(key, curves)
    ratio = hybrid / fresh
    return (ratio <= 2) & (ratio >= 1 / 2) & (np.maximum(hybrid, fresh) < shared)


def _by_width(curves: Curves, key: str, values: Sequence[str] | F64) -> str:
    cells = [value if isinstance(value, str) else short(value) for value in values]
    widths = curves.get(key, "hybrid", "x")
    return ", ".join(f"{cell} at {width:g}" for cell, width in zip(cells, widths, strict=True))


_TARGETS = 0.0012, 0.09
FIGURES = (
    Figure(
        "000-fig1",
        "sketch widths and errors on real data, one round and ten (paper 000)",
        figure_1,
        small=Size(repeats=2, widths=(50, 200, 1000), targets=_between(*_TARGETS, 5)),
        paper=Size(repeats=4, widths=(50, 100, 200, 500, 1000), targets=_between(*_TARGETS, 10)),
    ),
    Figure(
        "000-fig2",
        "Shared, Fresh and Hybrid rounds that are exactly alike (paper 000)",
        figure_2,
        small=Size(repeats=12, widths=(50, 100, 200, 400, 1000, 2000)),
        paper=Size(repeats=1000, widths=(50, 100, 150, 200, 300, 500, 1000, 2000)),
    ),
    Figure(
        "000-fig3",
        "items estimated badly by Shared, Fresh and Hybrid rounds (paper 000)",
        figure_3,
        small=Size(repeats=2, widths=(50, 100, 200, 400, 600, 1200)),
        paper=Size(repeats=10, widths=(50, 100, 200, 300, 400, 600, 800, 1000, 1200)),
    ),
)

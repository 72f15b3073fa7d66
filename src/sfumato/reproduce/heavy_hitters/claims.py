"""What paper 001 says about its figures, held against the numbers.

A claim's text says how it is checked. A method counts as behind another at an x where its mean F1
is lower by more than three standard errors of the difference. Claims marked (ours) are about what
sfumato does beyond the paper. The paper's "count-median" is a sketch without signs; what it shows
against that does not always hold against a CountSketch with signs, so both are held against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sfumato.reproduce import Claim
from sfumato.reproduce.heavy_hitters.data import Words
from sfumato.reproduce.panels import Curves

F64 = npt.NDArray[np.float64]
Keyed = tuple[str, Words]

PAPER = ("unsampled", "fixed", "adaptive")
SIGNED = ("shared", "hybrid", "fresh")
LEVEL = 0.8  # the F1 at which the paper compares what is sent
TIMES_LESS = 10  # what the paper says there
OURS_SHARE = 0.4  # of what the paper's adaptive IBLT sends
ORDER = ((2_000, 0.2), (5_000, 0.1, 0.75))  # budgets and bounds of an independent simulation
FLAT = 0.03  # an independent simulation of figure 3 had .95, .93, .93 over 10, 30, 100 rounds
FALLS = 0.1
NEAR = 0.02  # how near the best t counts as the best


def wrong_panel(key: str) -> str:
    """The panel of numbers that are not drawn: keys listed that nobody held."""
    return f"{key} wrong"


def figure_2(keyed: Sequence[Keyed], curves: Curves) -> list[Claim]:
    claims = []
    for key, words in keyed:
        name = f"2({key}) {words.name}"
        if words.categories:
            claims += [
                _above_count_median(name, key, curves),
                _ten_times_less(name, key, curves, ("unsigned",), "count-median without signs"),
                _ten_times_less(name, key, curves, SIGNED, "the best CountSketch with signs"),
                _order(name, key, curves),
            ]
        claims.append(_adaptive_best(name, key, curves))
        claims.append(_at_least(f"(ours) {name}: at least the paper's IBLTs", key, curves, PAPER))
        if words.categories:
            others = ("unsigned", *SIGNED)
            claims.append(
                _at_least(f"(ours) {name}: at least every CountSketch", key, curves, others)
            )
        claims += [_less_sent(name, key, curves), _none_wrong(name, key, curves)]
    return claims


def _above_count_median(name: str, key: str, curves: Curves) -> Claim:
    lead = curves.get(key, "adaptive") - curves.get(key, "unsigned")
    return Claim(
        text=f"{name}: the adaptive IBLT is far above count-median without signs: behind at no "
        "budget, and by 0.2 or more ahead on average",
        holds=bool(np.mean(lead) >= 0.2 and not np.any(curves.behind(key, "unsigned", "adaptive"))),
        detail=f"ahead by {_by_x(curves, key, lead)}; on average {np.mean(lead):.2f}",
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
        holds=bool(other >= TIMES_LESS * iblt),
        detail=f"words for F1 = {LEVEL:g}: adaptive IBLT {_words(iblt)}, {each}: {times}",
    )


def _order(name: str, key: str, curves: Curves) -> Claim:
    (small, lead), (large, low, high) = ORDER
    fresh, adaptive = curves.at(key, "fresh", small), curves.at(key, "adaptive", small)
    unsigned, larger = curves.at(key, "unsigned", large), curves.at(key, "adaptive", large)
    return Claim(
        text=f"{name}: the order of an independent simulation: at {small:,} words the adaptive "
        f"IBLT is more than {lead:g} above Fresh; at {large:,} count-median is below {low:g}, the "
        f"adaptive IBLT above {high:g}",
        holds=bool(adaptive > fresh + lead and unsigned < low and larger > high),
        detail=f"at {small:,}: adaptive {adaptive:.3f}, Fresh {fresh:.3f}; at {large:,}: "
        f"adaptive {larger:.3f}, count-median {unsigned:.3f}",
    )


def _adaptive_best(name: str, key: str, curves: Curves) -> Claim:
    others = ("unsampled", "fixed")
    return Claim(
        text=f"{name}: of the paper's IBLTs the adaptive one is best: behind at no budget",
        holds=not any(np.any(curves.behind(key, other, "adaptive")) for other in others),
        detail="; ".join(
            f"{series} {_by_x(curves, key, curves.get(key, series))}"
            for series in ("adaptive", *others)
        ),
    )


def _at_least(text: str, key: str, curves: Curves, others: Sequence[str]) -> Claim:
    ours = curves.get(key, "ours")
    best = np.max([curves.get(key, other) for other in others], axis=0)
    return Claim(
        text=f"{text}, at every budget",
        holds=not any(np.any(curves.behind(key, other, "ours")) for other in others),
        detail=f"ours {_by_x(curves, key, ours)}; best of {', '.join(others)} "
        f"{_by_x(curves, key, best)}",
    )


def _less_sent(name: str, key: str, curves: Curves) -> Claim:
    ours, paper = budget_for(curves, key, "ours"), budget_for(curves, key, "adaptive")
    return Claim(
        text=f"(ours) {name}: F1 = {LEVEL:g} with at most {OURS_SHARE:g} of the words of the "
        "paper's adaptive IBLT",
        holds=bool(ours <= OURS_SHARE * paper),
        detail=f"ours {_words(ours)}, adaptive IBLT {_words(paper)}: {ours / paper:.2f} of them",
    )


def _none_wrong(name: str, key: str, curves: Curves) -> Claim:
    wrong = curves.get(wrong_panel(key), "ours")
    runs = int(curves.get(wrong_panel(key), "ours", "repeats").sum())
    total = float(wrong @ curves.get(wrong_panel(key), "ours", "repeats"))
    return Claim(
        text=f"(ours) {name}: no key is listed that nobody held",
        holds=not np.any(wrong),
        detail=f"{total:g} in {runs:,} campaigns, all rounds",
    )


def figure_3(keyed: Sequence[Keyed], curves: Curves) -> list[Claim]:
    claims = []
    for key, words in keyed:
        name = f"3({key}) {words.name}"
        claims += [
            _flat(f"{name}: the IBLT with fixed sampling", key, "fixed", curves),
            _flat(f"{name}: the adaptive IBLT", key, "adaptive", curves),
            _flat(f"(ours) {name}: ours", key, "ours", curves),
        ]
        if words.categories:
            claims += [
                _falls(f"{name}: count-median without signs", key, "unsigned", curves),
                _falls(f"{name}: the Shared CountSketch", key, "shared", curves),
                _falls(f"{name}: the Fresh CountSketch", key, "fresh", curves),
            ]
    return claims


def _flat(name: str, key: str, series: str, curves: Curves) -> Claim:
    """What sampling gets wrong near the threshold does not depend on the rounds, and on a power law
    neither does the share of heavy hitters that are near it. It moves a little all the same:
    estimates are multiples of t, and words are no power law."""
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


def figure_4(keyed: Sequence[Keyed], curves: Curves) -> list[Claim]:
    claims = []
    for key, words in keyed:
        name = f"4({key}) {words.name}"
        fixed, times = curves.get(key, "fixed"), curves.get(key, "fixed", "x")
        best, at = float(fixed.max()), float(times[np.argmax(fixed)])
        adaptive, ours = curves.get(key, "adaptive")[0], curves.get(key, "ours")[0]
        shown = f"best t {at:g}: {best:.3f}; fixed {_by_x(curves, key, fixed)}"
        claims += [
            Claim(
                text=f"{name}: adaptive is within {NEAR:g} of the best fixed t, or above",
                holds=bool(adaptive >= best - NEAR),
                detail=f"adaptive {adaptive:.3f}; {shown}",
            ),
            Claim(
                text=f"(ours) {name}: adaptive is at least the best fixed t of the paper's IBLT",
                holds=not np.any(curves.behind(key, "fixed", "ours")),
                detail=f"ours {ours:.3f}; {shown}",
            ),
        ]
    return claims


def budget_for(curves: Curves, key: str, series: str, level: float = LEVEL) -> float:
    """The words at which a series reaches this F1, between budgets that were run by the logarithm;
    infinite if it never does, and the least that was run if it always has."""
    budgets, values = curves.get(key, series, "x"), curves.get(key, series)
    reached = np.flatnonzero(values >= level)
    if reached.size == 0:
        return float("inf")
    last = int(reached[0])
    if last == 0:
        return float(budgets[0])
    pair = slice(last - 1, last + 1)
    return float(np.exp(np.interp(level, values[pair], np.log(budgets[pair]))))


def _words(budget: float) -> str:
    return f"{budget:,.0f}" if np.isfinite(budget) else "never"


def _by_x(curves: Curves, key: str, values: F64) -> str:
    where = curves.get(key, "adaptive", "x")
    return ", ".join(f"{value:.3f} at {x:,g}" for value, x in zip(values, where, strict=True))

"""What paper 004 says, and what is known of its parameters, held against the numbers.

Paper 004 prints no accuracy: what can be held against it are its formulas. "Known" numbers are an
earlier, independent calculation's or simulation's, from those formulas and parameters. Claims
marked (ours) are about what sfumato does beyond the paper. Where a claim leaves room for chance it
is `CHANCE` standard errors: a false alarm in sixteen thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from sfumato.privacy import HashedResponse, Randomizer, debias
from sfumato.privacy.debias import LocalEstimates
from sfumato.reproduce import Claim
from sfumato.reproduce.panels import Curves

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

CHANCE = 4.0
CLOSE = 0.05  # how far a measured standard error may be from the formula's
COVERED = 0.95
COVERAGE_BAND = (0.94, 0.97)
ALIKE = 0.02  # how far a size may be from the known one
KNOWN_DEVICES = 1_000_000
KNOWN_BOUND: Mapping[tuple[int, int], float] = {  # width, rows: figure 4 for 2,600 items
    (32, 32): 833_154,
    (128, 1_024): 72_549,
    (1_024, 1_024): 27_012,
    (1_024, 65_536): 10_114,
}
KNOWN_WORDS = 38  # found by the puzzle among 2,000,000 devices
KNOWN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one oracle, held against the truth."""

    series: str
    oracle: str
    seed: int
    record_bytes: int
    table_cells: int
    mean_off: float  # mean error over items, in standard errors of that mean
    slope_off: float  # slope of estimates over true counts less one, in its standard errors
    error_ratio: float  # root mean square of errors over what the formula says
    coverage: float  # of 95% intervals
    error: float  # root mean square
    error_unheld: float  # what is reported for an item that nobody holds
    threshold: float  # 5%, family-wise, for an item that meets no heavy one
    listed: int
    listed_unheld: int
    above: int  # items whose true count is above the threshold


def measure(
    series: str,
    oracle: str,
    seed: int,
    randomizer: Randomizer,
    counts: I64,
    found: LocalEstimates,
    predicted: F64,
) -> Measured:
    """`predicted` is each item's standard error by the formula."""
    truth = counts.astype(np.float64)
    wrong = found.counts - truth
    # Items that share a cell of a sketch err together; a response's cells add up to its records.
    together = 0.0 if isinstance(randomizer, HashedResponse) else randomizer.collision
    threshold = found.null.threshold(counts.size)
    listed = found.significant()
    half = NormalDist().inv_cdf((1 + COVERED) / 2) * found.standard_error
    return Measured(
        series=series,
        oracle=oracle,
        seed=seed,
        record_bytes=randomizer.record_bytes,
        table_cells=randomizer.rows * randomizer.width,
        mean_off=float(wrong.sum()) / _error_of_sum(predicted, together),
        slope_off=float(truth @ wrong) / _error_of_sum(truth * predicted, together),
        error_ratio=_root_mean_square(wrong / predicted),
        coverage=float(np.mean(np.abs(wrong) <= half)),
        error=_root_mean_square(wrong),
        error_unheld=found.null.error,
        threshold=threshold,
        listed=int(listed.sum()),
        listed_unheld=int(np.sum(listed & (counts == 0))),
        above=int(np.sum(truth > threshold)),
    )


def _error_of_sum(errors: F64, together: float) -> float:
    alone = float(errors @ errors)
    return math.sqrt(alone + together * (float(errors.sum()) ** 2 - alone))


def use_case(
    paper: Sequence[Measured],
    ours: Sequence[Measured],
    *,
    items: int,
    known_error: float,
    known_threshold: float,
    share: float,
) -> list[Claim]:
    """`known_…` scaled to the devices of these runs; zero where they are of another dictionary.
    `share`: at most this of the paper's variance is ours."""
    name = f"{paper[0].oracle} ({paper[0].record_bytes} bytes)"
    mine = f"(ours) {ours[0].oracle} ({ours[0].record_bytes} bytes)"
    claims = [
        _unbiased(name, paper),
        _as_predicted(name, paper, items, "the exact formula's"),
        _covered(name, paper, items),
        _listed(name, paper),
    ]
    if known_error:
        claims.append(_known(name, paper, known_error, known_threshold))
    ratio = _mean(ours, "error", 2) / _mean(paper, "error", 2)
    lists = _mean(ours, "listed"), _mean(paper, "listed")
    return [
        *claims,
        _unbiased(mine, ours),
        _as_predicted(mine, ours, items, "the one that it reports"),
        _covered(mine, ours, items),
        _listed(mine, ours),
        Claim(
            text=f"{mine}: at most {share:g} times the variance of the paper's in fewer bytes",
            holds=ratio <= share and ours[0].record_bytes < paper[0].record_bytes,
            detail=f"variance {ratio:.3f} times, {ours[0].record_bytes} bytes a record for "
            f"{paper[0].record_bytes}, {ours[0].table_cells:,} cells for {paper[0].table_cells:,}",
        ),
        Claim(
            text=f"{mine}: more items are above the threshold than in the paper's",
            holds=lists[0] > lists[1],
            detail=f"{lists[0]:.1f} items for {lists[1]:.1f}, of {items:,}",
        ),
    ]


def _unbiased(name: str, runs: Sequence[Measured]) -> Claim:
    means, slopes = (
        sum(getattr(run, field) for run in runs) / math.sqrt(len(runs))
        for field in ("mean_off", "slope_off")
    )
    return Claim(
        text=f"{name}: counts are unbiased: their mean error is zero and their slope over the true "
        f"counts is one, within {CHANCE:g} standard errors",
        holds=abs(means) <= CHANCE and abs(slopes) <= CHANCE,
        detail=f"mean error {means:+.2f}, slope {slopes:+.2f} standard errors off, over "
        f"{_runs(runs)}",
    )


def _as_predicted(name: str, runs: Sequence[Measured], items: int, what: str) -> Claim:
    ratio = math.sqrt(_mean(runs, "error_ratio", 2))
    chance = 1 / math.sqrt(2 * items * len(runs))
    return Claim(
        text=f"{name}: the measured standard error is within {CLOSE:.0%} of {what}",
        holds=abs(ratio - 1) <= CLOSE,
        detail=f"{ratio:.4f} times (± {chance:.4f} by chance), over {items:,} items and "
        f"{_runs(runs)}; {_mean(runs, 'error'):,.1f} devices",
    )


def _covered(name: str, runs: Sequence[Measured], items: int) -> Claim:
    share = _mean(runs, "coverage")
    chance = math.sqrt(COVERED * (1 - COVERED) / (items * len(runs)))
    low, high = COVERAGE_BAND
    return Claim(
        text=f"{name}: 95% intervals hold the true count of {low:.0%} to {high:.0%} of items",
        holds=low - CHANCE * chance <= share <= high + CHANCE * chance,
        detail=f"{share:.2%} (± {chance:.2%} by chance)",
    )


def _listed(name: str, runs: Sequence[Measured]) -> Claim:
    wrong = sum(run.listed_unheld > 0 for run in runs)
    # How likely so many runs of the allowed share of wrong ones would be.
    likely = sum(
        math.comb(len(runs), k) * debias.LEVEL**k * (1 - debias.LEVEL) ** (len(runs) - k)
        for k in range(wrong, len(runs) + 1)
    )
    return Claim(
        text=f"{name}: at most {debias.LEVEL:.0%} of runs list an item that nobody holds",
        holds=likely > 1 - NormalDist().cdf(CHANCE),
        detail=f"{wrong} of {_runs(runs)}; {_mean(runs, 'listed'):.1f} items are above the "
        f"threshold of {_mean(runs, 'threshold'):,.0f} devices, and {_mean(runs, 'above'):.1f} "
        "are in truth",
    )


def _known(name: str, runs: Sequence[Measured], error: float, threshold: float) -> Claim:
    here = _mean(runs, "error_unheld"), _mean(runs, "threshold")
    return Claim(
        text=f"{name}: standard error and family-wise threshold are the known ones, within "
        f"{ALIKE:.0%}",
        holds=abs(here[0] / error - 1) <= ALIKE and abs(here[1] / threshold - 1) <= ALIKE,
        detail=f"{here[0]:,.1f} devices (known {error:,.0f}), threshold {here[1]:,.0f} (known "
        f"{threshold:,.0f} by the normal law; here by the binomial)",
    )


def figure_4(curves: Curves, widths: Sequence[int], *, ours: tuple[int, int, int]) -> list[Claim]:
    """`ours`: the plan's rows, its cells and its bytes."""
    bound = {width: curves.get("a", f"bound {width}") for width in widths}
    exact = {width: curves.get("a", f"exact {width}") for width in widths}
    looseness = np.concatenate([bound[width] / exact[width] for width in widths])
    ratios = []
    for width in widths:
        rows = curves.get("a", f"measured {width}", "x")
        said = [curves.at("a", f"exact {width}", row) for row in rows]
        ratios.append(curves.get("a", f"measured {width}") / said)
    ratio = np.concatenate(ratios)
    rows_ours, cells, size = ours
    mine = curves.at("a", "ours", rows_ours)
    best = curves.at("a", "exact 1024", 65_536)
    return [
        _golden(curves),
        Claim(
            text="4 the bound of theorem 4.2 holds: the exact standard deviation is nowhere larger",
            holds=bool(np.all(looseness >= 1)),
            detail=f"bound over exact: {looseness.min():.4f} to {looseness.max():.4f}",
        ),
        Claim(
            text="4 the standard deviation falls with the width m and with the rows k, everywhere",
            holds=all(bool(np.all(np.diff(exact[width]) < 0)) for width in widths)
            and all(bool(np.all(exact[b] < exact[a])) for a, b in pairwise(widths)),
            detail="; ".join(
                f"m = {width:,}: {exact[width][0]:,.0f} to {exact[width][-1]:,.0f}"
                for width in widths
            ),
        ),
        Claim(
            text=f"4 the measured standard deviation is within {CLOSE:.0%} of the exact one, at "
            "every size",
            holds=bool(np.all(np.abs(ratio - 1) <= CLOSE)),
            detail=f"measured over exact at {ratio.size} sizes: {ratio.min():.3f} to "
            f"{ratio.max():.3f}, mean {ratio.mean():.3f}",
        ),
        Claim(
            text="(ours) hashed response with collisions solved errs less than the largest sketch",
            holds=mine < best,
            detail=f"{mine:,.0f} devices with {cells:,} cells and {size} bytes a record; "
            f"{best:,.0f} with {1_024 * 65_536:,} cells and 130 bytes",
        ),
    ]


def _golden(curves: Curves) -> Claim:
    """Rounded or cut to whole devices: both are within one."""
    here = {key: curves.at("a", f"bound {key[0]}", key[1]) for key in KNOWN_BOUND}
    return Claim(
        text="4 the bound of theorem 4.2 has the known values, to the device",
        holds=all(abs(here[key] - known) < 1 for key, known in KNOWN_BOUND.items()),
        detail="; ".join(
            f"m = {width:,}, k = {rows:,}: {here[width, rows]:,.1f} (known {known:,.0f})"
            for (width, rows), known in KNOWN_BOUND.items()
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for words, held against the truth."""

    series: str
    seed: int
    devices: int
    record_bytes: int
    found: int
    false: int
    candidates: int
    rarest: int  # true count of the rarest word found
    threshold: float
    seconds: float  # of processor time, for the discovery alone


def searches(runs: Sequence[Search], *, words: int, devices: int, paper_size: bool) -> list[Claim]:
    """Claims are about the runs with the most devices."""
    puzzle, ours = (
        [run for run in runs if run.series == series and run.devices == devices]
        for series in ("puzzle", "prefixes")
    )
    found = [run.found for run in puzzle]
    listed = [run.found for run in ours]
    claims = []
    if paper_size:
        claims.append(
            Claim(
                text=f"the puzzle finds at least {KNOWN_WORDS} of {words} words among {devices:,} "
                "devices, on average",
                holds=float(np.mean(found)) >= KNOWN_WORDS,
                detail=f"{_list(found)} words; the rarest is held by "
                f"{min(run.rarest for run in puzzle):,} devices (known: {KNOWN_WORDS} words, down "
                "to 4,874)",
            )
        )
        claims.append(
            Claim(
                text=f"discovery takes less than {KNOWN_SECONDS:g} seconds of processor time",
                holds=max(run.seconds for run in puzzle) < KNOWN_SECONDS,
                detail=f"puzzle {max(run.seconds for run in puzzle):.1f} s at most, prefixes "
                f"{max(run.seconds for run in ours):.1f} s",
            )
        )
    wrong = [sum(run.false for run in group) for group in (puzzle, ours)]
    return [
        *claims,
        Claim(
            text="no false word is found, by either search",
            holds=not any(wrong),
            detail=f"{wrong[0]} by the puzzle, {wrong[1]} by prefixes, over {len(puzzle)} run"
            f"{'s' * (len(puzzle) > 1)} of each",
        ),
        Claim(
            text="(ours) prefix extension finds more words, with equal epsilon and devices and in "
            "fewer bytes",
            holds=min(listed) > max(found) and ours[0].record_bytes < puzzle[0].record_bytes,
            detail=f"{_list(listed)} words for {_list(found)}; {ours[0].record_bytes} bytes a "
            f"record for {puzzle[0].record_bytes}; the rarest is held by "
            f"{min(run.rarest for run in ours):,} devices",
        ),
    ]


def _root_mean_square(values: F64) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _mean(runs: Sequence[Measured], field: str, power: int = 1) -> float:
    return float(np.mean([getattr(run, field) ** power for run in runs]))


def _runs(runs: Sequence[Measured]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) > 1)}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))

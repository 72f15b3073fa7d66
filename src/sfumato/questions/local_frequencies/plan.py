"""Sizing a local study: which oracle, how wide, how many rows, and what it will tell.

Every candidate has its predicted error, its bytes and its server time, from formulas that are exact
(`debias.variance`) but for what collisions cost, where counts are taken to fall off like
rank^-1.1. Among the candidates within 5% of the least variance the one with the fewest bytes a
report wins, then the one with the smallest table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow.release import Privacy
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    debias,
)
from sfumato.privacy.shuffling import shuffled_epsilon
from sfumato.questions.local_frequencies.design import NAMES, LocalDesign, oracle_of
from sfumato.questions.new_words.design import NAMES as WORD_NAMES
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.promise import rounded_up
from sfumato.sketch.words import LATIN, check_alphabet
from sfumato.study import Study

REFERENCE_EXPONENT = 1.1
TABLE_CELLS = 250_000  # a table of a million bytes, at four a cell
CELLS_PER_ITEM = 40  # so that solving for every item's collisions adds 2.5% to the variance
GOOD_ENOUGH = 1.05  # times the least variance: among these, fewer bytes win
MOST_WIDTH = 1 << 16
PAPER_ROWS, PAPER_WIDTH = 65_536, 1_024
FOUND = NormalDist().inv_cdf(0.95)  # an item counts as detectable if found so often
_MOST_TIMES = 1e6  # the error wanted: beyond, nobody has so many devices
_LOOKUPS, _FOLDS = 3e8, 5e6  # a second on one core, about: what server time is predicted from


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to ask, and what it would give."""

    randomizer: Randomizer
    standard_error: float  # of an item that few hold
    record_bytes: int
    table_bytes: int
    server_seconds: float

    @property
    def oracle(self) -> str:
        return oracle_of(self.randomizer)

    def to_dict(self) -> dict[str, Any]:
        return {
            "oracle": self.oracle,
            "rows": self.randomizer.rows,
            "width": self.randomizer.width,
            "standard_error": self.standard_error,
            "bytes_per_report": self.record_bytes,
            "table_bytes": self.table_bytes,
            "server_seconds": self.server_seconds,
        }


def option(randomizer: Randomizer, *, items: int, records: int, aware: bool = True) -> Option:
    """What this randomizer would give for a dictionary of this size and this many records."""
    cells = randomizer.rows * randomizer.width
    lookups = (items + debias.PLACEBOS) * randomizer.rows
    return Option(
        randomizer=randomizer,
        standard_error=predicted_error(randomizer, items=items, records=records, aware=aware),
        record_bytes=randomizer.record_bytes,
        table_bytes=cells * (2 if records / randomizer.rows < 60_000 else 4),
        server_seconds=records / _FOLDS + lookups / _LOOKUPS,
    )


def predicted_error(
    randomizer: Randomizer, *, items: int, records: int, aware: bool = True
) -> float:
    """The standard error of an item that few hold, by the formulas of `debias`."""
    chance = randomizer.collision
    shares = np.arange(1, items + 1, dtype=np.float64) ** -REFERENCE_EXPONENT
    counts = records * shares / shares.sum()
    alone = float(debias.variance(randomizer, count=records, held=0.0, squares=0.0))
    every = float(np.sum(counts**2))
    met = float(debias.variance(randomizer, count=records, held=0.0, squares=every))
    if chance == 0 or not aware or met < (1 + debias.MATTERS) * alone:
        return math.sqrt(met)
    cells = randomizer.rows * randomizer.width
    if items <= debias.MOST * cells:
        return math.sqrt(alone / (1 - items / cells))
    left = counts[counts < debias.SURE * math.sqrt(alone)]
    rest = float(np.sum(left**2))
    return math.sqrt(float(debias.variance(randomizer, count=records, held=0.0, squares=rest)))


def options(
    *, epsilon: float, items: int, records: int, most_bytes: int | None = None
) -> list[Option]:
    """Every candidate that fits into `most_bytes` a record, the best first."""
    fitting = [
        option(randomizer, items=items, records=records)
        for randomizer in _candidates(epsilon, items)
        if most_bytes is None or randomizer.record_bytes <= most_bytes
    ]
    least = min((one.standard_error for one in fitting), default=0.0)

    def worth(one: Option) -> tuple[bool, float, int, int, float]:
        good = one.standard_error**2 <= GOOD_ENOUGH * least**2
        error = 0.0 if good else one.standard_error
        return (not good, error, one.record_bytes, one.table_bytes, one.standard_error)

    return sorted(fitting, key=worth)


def hashed_width(epsilon: float) -> int:
    """The width with the least variance: e^epsilon + 1, as a whole number that is allowed."""
    best = math.exp(min(epsilon, math.log(MOST_WIDTH))) + 1
    return int(min(max(round(best), 2), MOST_WIDTH))


def _candidates(epsilon: float, items: int) -> Iterator[Randomizer]:
    width = hashed_width(epsilon)
    cells = min(max(CELLS_PER_ITEM * items, 16 * width), TABLE_CELLS)
    rows = max(8, cells // width)
    yield HashedResponse(epsilon=epsilon, rows=rows, width=width, seed=0)
    if items + 1 <= MOST_WIDTH:
        yield DirectResponse(epsilon=epsilon, categories=items)
    for width in (64, 256, 1_024):
        for rows in (64, 1_024, PAPER_ROWS):
            yield CountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=0, flips="optimal")
            yield CountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=0)
    for width in (1_024, 32_768):
        yield HadamardCountMeanSketch(epsilon=epsilon, rows=1_024, width=width, seed=0)


def design(study: Study, items: int) -> tuple[LocalDesign, dict[str, Any], list[str]]:
    """The design of a local study, what it should give, and what to be warned of."""
    assert study.devices is not None  # plan() has checked
    if study.epsilon is None:
        raise StudyError(
            "local privacy needs an epsilon: nobody is trusted with a record that has no noise",
            hint='set epsilon, or use trust = "central"',
        )
    if study.items_per_device != 1:
        raise StudyError(
            f"items_per_device is for sums; got {study.items_per_device} with trust local",
            hint="use daily_reports for the number of reports that one device may send",
        )
    if study.publish == "rounds":
        raise StudyError('publish = "rounds" is for trust = "central"; leave it out')
    per_device = study.daily_reports or 1
    records = max(1, math.floor(study.devices * (1 - study.dropout))) * per_device
    limit = study.bytes_per_device
    most = None if limit is None else (limit - HEADER_BYTES) // per_device
    if study.paper_mode:
        sketch = CountMeanSketch(epsilon=study.epsilon, rows=PAPER_ROWS, width=PAPER_WIDTH, seed=0)
        found = [option(sketch, items=items, records=records, aware=False)]
        found = [one for one in found if most is None or one.record_bytes <= most]
    else:
        found = options(epsilon=study.epsilon, items=items, records=records, most_bytes=most)
    if not found:
        need = HEADER_BYTES + 3 * per_device
        raise ImpossibleError(
            f"bytes_per_device {limit} leaves {max(most or 0, 0)} bytes for a record",
            hint=f"set bytes_per_device to {need} or more",
        )
    best = found[0]
    made = LocalDesign(
        randomizer=best.randomizer,
        items=items,
        devices=study.devices,
        rounds=study.rounds,
        records_per_device=per_device,
        aware=not study.paper_mode,
    )
    null = debias.Null(best.standard_error, records, best.randomizer.support)
    level = null.threshold(items)
    optimal = math.sqrt(debias.optimal_variance(study.epsilon) * records)
    predicted = {
        "standard_error": best.standard_error,
        "half_width_95": NormalDist().inv_cdf(0.975) * best.standard_error,
        "standard_error_share": best.standard_error / study.devices,
        "times_optimal_variance": (best.standard_error / optimal) ** 2,
        "significant_from": level,
        "smallest_detectable_count": level + FOUND * best.standard_error,
        "bytes_per_report": best.record_bytes,
        "bytes_per_device": HEADER_BYTES + per_device * best.record_bytes,
        "table_bytes": best.table_bytes,
        "server_seconds": best.server_seconds,
        "rounds": study.rounds,
        "assumes": f"counts fall off like rank^-{REFERENCE_EXPONENT}"
        if best.randomizer.collision
        else "nothing about the data",
    }
    _check_target(study, items, best.standard_error)
    return made, predicted, _warnings(study, made)


def word_design(study: Study) -> tuple[WordDesign, dict[str, Any], list[str]]:
    """How new words will be looked for: by prefixes, or in `paper_mode` by the paper's puzzle."""
    assert study.devices is not None  # plan() has checked
    if study.epsilon is None:
        raise StudyError(
            "local privacy needs an epsilon: nobody is trusted with a record that has no noise"
        )
    for name in ("target_error", "threshold", "bytes_per_device"):
        if getattr(study, name) is not None:
            raise StudyError(f"{name} is not for new_words: what stands out of the noise is listed")
    if study.rounds != 1:
        raise StudyError(f"new_words are found in one round; got rounds = {study.rounds}")
    alphabet = LATIN if study.alphabet is None else study.alphabet
    check_alphabet(study.word_length, alphabet)  # before it is searched for lengths to ask about
    per_device = study.daily_reports or 1
    records = max(1, math.floor(study.devices * (1 - study.dropout))) * per_device
    search: FragmentPuzzle | PrefixExtension
    if study.paper_mode:
        search = puzzle(study.epsilon, alphabet=alphabet, length=study.word_length)
        final, share = search.word, 1.0
    else:
        search = prefix_search(study.epsilon, alphabet=alphabet, length=study.word_length)
        final, share = search.prefix, 1 / len(search.lengths)
    made = WordDesign(discoverer=search, devices=study.devices, records_per_device=per_device)
    last = records * share
    error = math.sqrt(float(debias.variance(final, count=last, held=0.0, squares=0.0))) / share
    candidates = 1_000_000  # about what is asked about at the end
    level = debias.Null(error, last, final.support).threshold(candidates)
    predicted = {
        "standard_error": error,
        "half_width_95": NormalDist().inv_cdf(0.975) * error,
        "standard_error_share": error / study.devices,
        "significant_from": level,
        "smallest_detectable_count": level + FOUND * error,
        "bytes_per_report": search.record_bytes,
        "bytes_per_device": HEADER_BYTES + per_device * search.record_bytes,
        "rounds": 1,
        "assumes": "words found at every length or position; about a million candidates at the end",
    }
    return made, predicted, []


def puzzle(
    epsilon: float, *, alphabet: str = LATIN, length: int = 10, rows: int = 2_048
) -> FragmentPuzzle:
    """The puzzle with the paper's sizes: a quarter of epsilon for the word, the rest for the
    fragment (2 and 6 of 8), which finds more words than halves do."""
    return FragmentPuzzle(
        word=CountMeanSketch(epsilon=epsilon / 4, rows=rows, width=PAPER_WIDTH, seed=1),
        fragment=CountMeanSketch(epsilon=3 * epsilon / 4, rows=rows, width=PAPER_WIDTH, seed=2),
        seed=3,
        length=length + length % 2,
        alphabet=alphabet,
    )


def prefix_search(epsilon: float, *, alphabet: str = LATIN, length: int = 10) -> PrefixExtension:
    """Prefix extension on the best oracle: steps so long that the first has some ten thousand
    prefixes to ask about, and each later one multiplies them by as little as may be."""
    symbols = len(alphabet) + 1
    first = max(1, min(length, int(math.log(20_000, symbols))))
    lengths = sorted({*range(first, min(first + 4, length)), *range(first + 3, length, 2), length})
    width = hashed_width(epsilon)
    return PrefixExtension(
        prefix=HashedResponse(
            epsilon=epsilon, rows=max(64, TABLE_CELLS * 2 // width), width=width, seed=1
        ),
        lengths=tuple(lengths),
        alphabet=alphabet,
        width=max(32, 30_000 // symbols),
    )


def promise(study: Study, made: LocalDesign | WordDesign) -> Privacy:
    """What a device is promised by its own coins; what shuffling adds is said of a release."""
    oracle = made.randomizer if isinstance(made, LocalDesign) else made.discoverer
    epsilon, per_device = oracle.epsilon, made.records_per_device
    day = (
        f"a device sends at most {per_device} reports per day, epsilon {per_device * epsilon:g} "
        "together, and days add up"
        if per_device > 1
        else "a device sends at most one report per day, and days add up"
    )
    return Privacy(
        epsilon=epsilon,
        delta=0.0,
        guarantee=f"{epsilon:g}-local differential privacy for each report",
        unit="report",
        neighbours='any two values, "none" among them: one report\'s value is replaced by another',
        mechanism=f"{algorithm(made)}: each device randomises its own report",
        trust=study.trust,
        sees="nobody sees a value; everybody may see the reports",
        assumptions=(day, "the device's own random generator is sound"),
        not_covered=("which devices take part, and on which days",),
    )


def shuffled(privacy: Privacy, reports: Sequence[int], delta: float, per_device: int) -> Privacy:
    """The promise of a release of so many reports per round, with what shuffling them adds.

    It is computed from the reports that were counted: fewer reports hide a device less. It is for
    one report per device; the round with the fewest reports decides.
    """
    least = min(reports, default=0)
    if privacy.epsilon is None or delta == 0 or per_device > 1 or least < 1:
        return privacy
    epsilon = rounded_up(shuffled_epsilon(privacy.epsilon, least, delta))
    if epsilon >= privacy.epsilon:
        return privacy
    second = (
        f"({epsilon:g}, {delta:g})-differential privacy against anybody who sees only the "
        f"{least:,} shuffled reports, if the shuffler is trusted"
    )
    return replace(privacy, second=second)


def algorithm(made: LocalDesign | WordDesign) -> str:
    if isinstance(made, WordDesign):
        return WORD_NAMES[type(made.discoverer)]
    return NAMES[oracle_of(made.randomizer)]


def draw(study: Study, items: int) -> Any:
    """The trade-off as a matplotlib figure, after figure 4 of paper 004: error against the size of
    the table for each oracle, and what the plan took."""
    from sfumato.errors import SfumatoError

    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SfumatoError("plots need matplotlib", hint='pip install "sfumato[plot]"') from problem
    assert study.devices is not None  # plan() has checked
    assert study.epsilon is not None  # and design() will
    made, predicted, _ = design(study, items)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.add_subplot()
    records, epsilon = study.devices, study.epsilon

    def curve(oracles: list[Randomizer], aware: bool, label: str, **look: Any) -> None:
        errors = [
            predicted_error(oracle, items=items, records=records, aware=aware) for oracle in oracles
        ]
        axes.plot([oracle.rows * oracle.width for oracle in oracles], errors, label=label, **look)

    for width, colour in zip((64, 256, 1_024), ("#a3b8d1", "#5f81ad", "#27476e"), strict=True):
        sketches: list[Randomizer] = [
            CountMeanSketch(epsilon=epsilon, rows=2**k, width=width, seed=0) for k in range(5, 17)
        ]
        name = f"count mean sketch, width {width:,}"
        curve(sketches, False, name, marker="o", markersize=3, color=colour)
    width = hashed_width(epsilon)
    responses: list[Randomizer] = [
        HashedResponse(epsilon=epsilon, rows=max(2, int(cells / width)), width=width, seed=0)
        for cells in np.geomspace(1_000, 4_000_000, 12)
    ]
    curve(responses, False, "hashed response, plain means", linestyle=":", color="#b5502b")
    curve(responses, True, "hashed response, collisions solved", color="#b5502b")
    axes.axhline(
        math.sqrt(debias.optimal_variance(study.epsilon) * records),
        color="#888888",
        linestyle="--",
        linewidth=1,
        label="least possible for a large domain",
    )
    chosen = made.randomizer
    axes.plot(
        [chosen.rows * chosen.width],
        [predicted["standard_error"]],
        "*",
        markersize=15,
        color="#222222",
        label=f"the plan: {algorithm(made)}",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("cells of the table")
    axes.set_ylabel("standard error of a rare item, devices")
    axes.set_title(
        f"epsilon {study.epsilon:g}, {study.devices:,} devices, {items:,} items", loc="left"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _check_target(study: Study, items: int, error: float) -> None:
    if study.target_error is None:
        return
    assert study.devices is not None  # plan() has checked
    assert study.epsilon is not None  # and so has design()
    share = NormalDist().inv_cdf(1 - 0.05 / (2 * items)) * error / study.devices
    if share > study.target_error:
        times = share / study.target_error
        enough = math.ceil(study.devices * min(times, _MOST_TIMES) ** 2)
        more = f"ask {enough:,} devices, " if times < _MOST_TIMES else ""
        raise ImpossibleError(
            f"with epsilon {study.epsilon:g} and {study.devices:,} devices the largest error over "
            f"{items:,} items is about {share:.2g}; target_error is {study.target_error:g}",
            hint=f"{more}raise epsilon, or set target_error to {share:.2g}",
        )


def _warnings(study: Study, made: LocalDesign) -> list[str]:
    found = []
    if study.cohorts == "different":
        found.append("cohorts has no effect with trust local: every round is read on its own")
    if made.randomizer.epsilon > 8:
        found.append(
            f"epsilon {made.randomizer.epsilon:g} a report promises little: an item is told apart "
            f"with odds of up to e^{made.randomizer.epsilon:g}"
        )
    return found

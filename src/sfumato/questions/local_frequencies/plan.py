"""Size a local study: the oracle, its width and rows, and the predicted error.

Every candidate has a predicted error and size. The formulas are exact
(`debias.variance`) except for the effect of collisions, which assumes that counts fall like
rank^-1.1. Among the candidates within 5% of the least variance, the one with the fewest bytes per
report wins, then the one with the smallest table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import pictures
from sfumato.flow.report import HEADER_BYTES
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    debias,
)
from sfumato.questions import sizing
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.plan import assumption, reference_law
from sfumato.questions.local_frequencies.design import NAMES, LocalDesign, oracle_of
from sfumato.questions.promise import local_promise
from sfumato.questions.question import Dictionary, Plan
from sfumato.study import Study

TABLE_CELLS = 250_000  # a table of a million bytes, at four per cell
CELLS_PER_ITEM = 40  # so that correcting for all collisions adds 2.5% to the variance
GOOD_ENOUGH = 1.05  # factor on the least variance: within it, fewer bytes win
WORTH_A_WARNING = 1.1  # factor on the least standard error
MOST_WIDTH = 1 << 16
PAPER_ROWS, PAPER_WIDTH = 65_536, 1_024
PAPER_SIZES = {"count_mean": (PAPER_ROWS, PAPER_WIDTH), "hadamard": (1_024, 32_768)}
DETECTION = NormalDist().inv_cdf(0.95)  # detectable means listed with this probability
_TRIES = 20  # the error hardly depends on the count, so that these are more than enough
_READINGS = 3  # of each item, if collisions are solved for
_LARGEST_FACTOR = 1e6  # beyond this, more devices are no useful advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate randomizer with its predicted error and cost."""

    randomizer: Randomizer
    standard_error: float  # of a rare item
    record_bytes: int
    table_bytes: int

    @property
    def oracle(self) -> str:
        return oracle_of(self.randomizer)


def option(
    randomizer: Randomizer, *, items: int, records: int, collision_aware: bool = True
) -> Option:
    """The predicted error and cost of a randomizer."""
    cells = randomizer.rows * randomizer.width
    return Option(
        randomizer=randomizer,
        standard_error=predicted_error(
            randomizer, items=items, records=records, collision_aware=collision_aware
        ),
        record_bytes=randomizer.record_bytes,
        table_bytes=cells * (2 if records / randomizer.rows < 60_000 else 4),
    )


def predicted_error(
    randomizer: Randomizer, *, items: int, records: int, collision_aware: bool = True
) -> float:
    """The standard error of a rare item, by the formulas of `debias`."""
    chance = randomizer.collision
    counts = records * reference_law(items)
    alone = float(debias.variance(randomizer, count=records, holders=0.0, squares=0.0))
    every = float(np.sum(counts**2))
    variance = float(debias.variance(randomizer, count=records, holders=0.0, squares=every))
    if chance == 0 or not collision_aware or variance < (1 + debias.MATTERS) * alone:
        return math.sqrt(variance)
    cells = randomizer.rows * randomizer.width
    if items <= debias.MOST * cells:
        return math.sqrt(alone / (1 - items / cells))
    left = counts[counts < debias.SURE * math.sqrt(alone)]
    rest = float(np.sum(left**2))
    return math.sqrt(float(debias.variance(randomizer, count=records, holders=0.0, squares=rest)))


def options(
    *,
    epsilon: float,
    items: int,
    records: int,
    most_bytes: int | None = None,
    algorithm: str | None = None,
    rows: int | None = None,
    width: int | None = None,
    collision_aware: bool = True,
) -> list[Option]:
    """All candidates with at most `most_bytes` per record, the best first; only those of one
    algorithm, and of these rows and width, where they are given."""
    fitting = [
        option(randomizer, items=items, records=records, collision_aware=collision_aware)
        for name in NAMES
        for randomizer in _candidates(
            name, epsilon, items, *((rows, width) if name == algorithm else (None, None))
        )
        if most_bytes is None or randomizer.record_bytes <= most_bytes
    ]
    least = min((one.standard_error for one in fitting), default=0.0)

    def worth(one: Option) -> tuple[bool, float, int, int, float]:
        good = one.standard_error**2 <= GOOD_ENOUGH * least**2
        error = 0.0 if good else one.standard_error
        return (not good, error, one.record_bytes, one.table_bytes, one.standard_error)

    return [one for one in sorted(fitting, key=worth) if algorithm in (None, one.oracle)]


def hashed_width(epsilon: float) -> int:
    """The allowed width with the least variance: about e^epsilon + 1."""
    best = math.exp(min(epsilon, math.log(MOST_WIDTH))) + 1
    return int(min(max(round(best), 2), MOST_WIDTH))


def _candidates(
    name: str, epsilon: float, items: int, rows: int | None, width: int | None
) -> Iterator[Randomizer]:
    """Randomizers of one algorithm, of the usual sizes where none are given."""
    if name == "direct":
        if items + 1 <= MOST_WIDTH:
            yield DirectResponse(epsilon=epsilon, categories=items)
        return
    if name == "hashed":
        width = width or hashed_width(epsilon)
        cells = min(max(CELLS_PER_ITEM * items, 16 * width), TABLE_CELLS)
        yield HashedResponse(
            epsilon=epsilon, rows=rows or max(8, cells // width), width=width, seed=0
        )
        return
    is_hadamard = name == "hadamard"
    all_rows = (1_024,) if is_hadamard else (64, 1_024, PAPER_ROWS)
    widths = (1_024, 32_768) if is_hadamard else (64, 256, 1_024)
    for each_width in (width,) if width else widths:
        for each_rows in (rows,) if rows else all_rows:
            sizes: Any = {"epsilon": epsilon, "rows": each_rows, "width": each_width, "seed": 0}
            if is_hadamard:
                yield HadamardCountMeanSketch(**sizes)
            else:
                yield CountMeanSketch(
                    **sizes, flips="symmetric" if name == "count_mean" else "optimal"
                )


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a study of frequencies whose devices trust nobody."""
    assert dictionary is not None  # a study of frequencies lists its items
    design, predicted = size(study, len(dictionary))
    name = NAMES[oracle_of(design.randomizer)]
    return Plan(
        study=study,
        design=design,
        dictionary=dictionary,
        algorithm=name,
        predicted=predicted,
        privacy=local_promise(
            name, design.randomizer.epsilon, design.records_per_device, design.influence
        ),
        warnings=(*_warnings(study, len(dictionary), predicted), *dictionary.warnings),
    )


def _warnings(study: Study, items: int, predicted: dict[str, Any]) -> list[str]:
    """What a plan without `algorithm` and `paper_mode` would do better."""
    if study.algorithm is None and not study.paper_mode:
        return []
    free = replace(
        study, preset=None, paper_mode=False, algorithm=None, rows=None, width=None,
        target_error=None,
    )  # fmt: skip
    design, best = size(free, items)
    worse = predicted["standard_error"] / best["standard_error"]
    if worse < WORTH_A_WARNING:
        return []
    return [
        f"the standard error is {worse:.2g} times that of {NAMES[oracle_of(design.randomizer)]} "
        f"({best['standard_error']:,.4g}, {best['bytes_per_device']} bytes per device), which a "
        "plan chooses if the study names no algorithm"
    ]


def size(study: Study, items: int) -> tuple[LocalDesign, dict[str, Any]]:
    """The best design for a dictionary of `items`, with its predicted error and cost."""
    if study.epsilon is None:
        raise StudyError(
            "local privacy needs a finite epsilon: nobody is trusted with records without noise",
            hint='set epsilon, or use trust = "central"',
        )
    if study.publish == "rounds":
        raise StudyError('publish = "rounds" is for trust = "central"; leave it out')
    per_device = study.daily_reports or 1
    records = study.answering() * per_device
    limit = study.bytes_per_device
    most = None if limit is None else (limit - HEADER_BYTES) // per_device
    name, rows, width = _named(study)
    choices = options(
        epsilon=study.epsilon, items=items, records=records, most_bytes=most, algorithm=name,
        rows=rows, width=width, collision_aware=not study.paper_mode,
    )  # fmt: skip
    if not choices and name == "direct" and items + 1 > MOST_WIDTH:
        raise ImpossibleError(
            f'algorithm "direct" takes at most {MOST_WIDTH - 1:,} items; got {items:,}',
            hint='use "hashed"',
        )
    if not choices:
        need = HEADER_BYTES + per_device * _shortest(name, study.epsilon, items, rows, width)
        raise ImpossibleError(
            f"bytes_per_device {limit} leaves only {max(most or 0, 0)} bytes for a record",
            hint=f"set bytes_per_device to {need} or more",
        )
    best = choices[0]
    design = LocalDesign(
        randomizer=best.randomizer,
        items=items,
        devices=study.device_count,
        rounds=study.round_count,
        records_per_device=per_device,
        aware=not study.paper_mode,
    )
    null = debias.Null(best.standard_error, records, best.randomizer.support)
    level = null.threshold(items)
    optimal = math.sqrt(debias.optimal_variance(study.epsilon) * records)
    scale = study.device_count * per_device / records  # a release counts all devices asked
    error = scale * best.standard_error
    law = reference_law(items)
    middle, largest = (_error_of(best, law[rank], records, scale) for rank in (items // 2, 0))
    detectable = detectable_count(
        scale * level, lambda count: _error_of(best, count / (scale * records), records, scale)
    )
    alone = float(debias.variance(best.randomizer, count=records, holders=0.0, squares=0.0))
    collisions = best.standard_error**2 - alone
    if collisions < 1e-9 * alone:  # rounding
        collisions = 0.0
    first = min(law[0], 1.0)
    predicted = {
        "standard_error": error,
        "standard_error_of_middle": middle,
        "standard_error_of_largest": largest,
        "error_from_noise": scale * math.sqrt(alone),
        "error_from_collisions": scale * math.sqrt(collisions),
        "error_from_sampling": math.sqrt(scale * first * records * (1 - first) * (scale - 1)),
        "half_width_95": NormalDist().inv_cdf(0.975) * error,
        "standard_error_share": error / study.device_count,
        "times_optimal_variance": (best.standard_error / optimal) ** 2,
        "significant_from": scale * level,
        "detectable_count": detectable,
        "bytes_per_report": best.record_bytes,
        "bytes_per_device": HEADER_BYTES + per_device * best.record_bytes,
        "table_bytes": best.table_bytes,
        **_costs(design),
        "rounds": study.round_count,
        **assumption(law),
    }
    _check_target(study, items, error)
    return design, predicted


def _costs(design: LocalDesign) -> dict[str, float | int]:
    """Every item, and placebos, are read in every row (the paper's p·k), and again to solve for
    collisions; a Hadamard sketch is transformed first (k·m·log m). Records are counted bit by bit
    (n·m, or n if they are short)."""
    rows, width = design.randomizer.rows, design.randomizer.width
    readings = _READINGS if design.aware and design.randomizer.collision else 1
    lookups = readings * (design.items + debias.PLACEBOS) * rows * design.rounds
    if isinstance(design.randomizer, HadamardCountMeanSketch):
        lookups += design.rounds * rows * width * round(math.log2(width))
    return costs([(design.tasks()[0], design.devices)], lookups=lookups, items=design.items)


def _shortest(
    name: str | None, epsilon: float, items: int, rows: int | None, width: int | None
) -> int:
    """The bytes of the shortest record of an algorithm; of a hashed response, if none is named."""
    candidates = _candidates(name or "hashed", epsilon, items, rows, width)
    return min(randomizer.record_bytes for randomizer in candidates)


def _named(study: Study) -> tuple[str | None, int | None, int | None]:
    """The algorithm, rows and width that a study names; in paper_mode those of paper 004."""
    name = study.algorithm or ("count_mean" if study.paper_mode else None)
    if name in (None, "direct") and (study.rows or study.width):
        raise StudyError(
            "rows and width are the sizes of a table of hashed items; algorithm is "
            + (name or "not given"),
            hint="set algorithm to hashed, count_mean_optimal, count_mean or hadamard, or leave "
            "out rows and width",
        )
    rows, width = PAPER_SIZES.get(name or "", (None, None)) if study.paper_mode else (None, None)
    return name, study.rows or rows, study.width or width


def detectable_count(level: float, error: Callable[[float], float]) -> float:
    """The count whose estimate reaches `level` with a probability of 95%, given the standard error
    of an item by its count."""
    count = level
    for _ in range(_TRIES):
        count = level + DETECTION * error(count)
    return count


def _error_of(best: Option, share: float, records: int, scale: float) -> float:
    """The standard error of an item that this share of the records holds, if a record in `scale`
    arrives."""
    share = min(share, 1.0)
    holders = share * records
    own = debias.variance(best.randomizer, count=records, holders=holders, squares=0.0)
    own -= debias.variance(best.randomizer, count=records, holders=0.0, squares=0.0)
    error = math.sqrt(best.standard_error**2 + float(own))
    sampling = scale * holders * (1 - share) * (scale - 1)
    return math.sqrt((scale * error) ** 2 + sampling)


def draw(study: Study, items: int) -> Any:
    """Plot the error against the size of the table for each oracle and for the plan's choice, after
    figure 4 of paper 004; returns the matplotlib figure."""
    assert study.epsilon is not None  # checked by design()
    design, predicted = size(study, items)
    figure = pictures.figure(7.5, 5)
    axes = figure.add_subplot()
    records, epsilon = study.device_count, study.epsilon

    def curve(oracles: list[Randomizer], collision_aware: bool, label: str, **look: Any) -> None:
        errors = [
            predicted_error(oracle, items=items, records=records, collision_aware=collision_aware)
            for oracle in oracles
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
    curve(responses, True, "hashed response, collisions corrected", color="#b5502b")
    axes.axhline(
        math.sqrt(debias.optimal_variance(study.epsilon) * records),
        color="#888888",
        linestyle="--",
        linewidth=1,
        label="least possible for a large domain",
    )
    randomizer = design.randomizer
    axes.plot(
        [randomizer.rows * randomizer.width],
        [predicted["standard_error"]],
        "*",
        markersize=15,
        color="#222222",
        label=f"the plan: {NAMES[oracle_of(design.randomizer)]}",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("cells of the table")
    axes.set_ylabel("standard error of a rare item, devices")
    axes.set_title(
        f"epsilon {study.epsilon:g}, {study.device_count:,} devices, {items:,} items", loc="left"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _check_target(study: Study, items: int, error: float) -> None:
    if study.target_error is None:
        return
    assert study.epsilon is not None  # checked by design()
    risk = study.failure_probability or sizing.RISK
    share = NormalDist().inv_cdf(1 - risk / (2 * items)) * error / study.device_count
    if share > study.target_error:
        factor = share / study.target_error
        enough = math.ceil(study.device_count * min(factor, _LARGEST_FACTOR) ** 2)
        more = f"ask {enough:,} devices, " if factor < _LARGEST_FACTOR else ""
        raise ImpossibleError(
            f"with epsilon {study.epsilon:g} and {study.devices:,} devices the largest error over "
            f"{items:,} items is about {share:.2g}; target_error is {study.target_error:g}",
            hint=f"{more}raise epsilon, or set target_error to {share:.2g}",
        )

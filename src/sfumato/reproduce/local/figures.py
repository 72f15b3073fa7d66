"""Figure 4 of paper 004, and its five uses, measured.

A use case is run twice over the same devices: with the paper's algorithm, parameters and plain
means, and with what `local_plan` takes for the same epsilon, collisions solved for (ours, drawn
hollow). Records are made, folded and read as by a service. Figure 4 has too many devices for that:
its tallies are drawn cell by cell (`data.simulated_tally`). Every repeat has its own seed,
which draws coins and hash functions; the devices stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.flow.word_discovery import Found
from sfumato.privacy import (
    CountMeanSketch,
    HashedResponse,
    Randomizer,
    SeededRng,
    debias,
)
from sfumato.privacy.debias import LocalEstimates
from sfumato.privacy.randomizers import in_epoch
from sfumato.questions.local_frequencies import plan as local_plan
from sfumato.questions.local_frequencies.design import NAMES, oracle_of
from sfumato.reproduce import Figure, Outcome, Progress, Scale
from sfumato.reproduce.frequencies.data import power_law_shares
from sfumato.reproduce.frequencies.runs import item_names
from sfumato.reproduce.local import claims as local_claims
from sfumato.reproduce.local import data, pictures
from sfumato.reproduce.local.claims import Measured, Search, measure
from sfumato.reproduce.local.pictures import BANDS
from sfumato.reproduce.panels import Curves, Panel, Reading, lines, run_all

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

FIRST_SEED = 1
EPSILON_4, DEVICES_4, ITEMS_4, LAW_4 = 2.0, 100_000_000, 2_600, 1.2
WIDTHS_4, ALL_WIDTHS_4 = (32, 128, 1_024), tuple(2**k for k in range(3, 13))
ROWS_4, THREE_ROWS_4 = tuple(2**k for k in range(5, 17)), (32, 1_024, 65_536)
MOST_CELLS_4 = 4_000_000  # of a simulated tally
FEWEST = 5  # items that a band of true counts must have
BINS = np.arange(-4.0, 4.25, 0.25)  # of errors over standard errors
SHOWN = 24  # items drawn with their intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Size4:
    """How much of figure 4 is measured."""

    rows: tuple[int, ...]
    repeats: int  # of large sketches; small ones, whose collisions are few and heavy, more often
    ours: int  # repeats of ours

    def repeats_of(self, rows: int) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats * max(1, 512 // rows))


FIGURE_4: Mapping[Scale, Size4] = {
    "small": Size4(rows=(32, 128), repeats=2, ours=1),
    "paper": Size4(rows=(32, 128, 1_024, 8_192), repeats=8, ours=8),
}


def bound(epsilon: float, rows: int, width: int, counts: F64) -> float:
    """The paper's bound on the standard deviation of a count (theorem 4.2)."""
    n, e, k, m = float(counts.sum()), math.exp(epsilon / 2), rows, width
    squares = float(counts @ counts) / (n * k * m)
    return m / (m - 1) * math.sqrt(n * (e / (e - 1) ** 2 + 1 / m + squares))


def figure_4(scale: Scale, progress: Progress) -> Outcome:
    """The standard deviation of a count by width m and rows k: bound, exact, measured, ours."""
    size = FIGURE_4[scale]
    shares = power_law_shares(LAW_4, ITEMS_4)
    seeds = size.repeats_of(min(size.rows))
    plan = local_plan.options(epsilon=EPSILON_4, items=ITEMS_4, records=DEVICES_4)[0].randomizer
    assert isinstance(plan, HashedResponse)  # a long dictionary and a small epsilon
    expected = DEVICES_4 * shares
    readings = []
    for width in ALL_WIDTHS_4:
        for rows in ROWS_4:
            sketch = CountMeanSketch(epsilon=EPSILON_4, rows=rows, width=width, seed=0)
            squares = float(expected @ expected)
            spread = debias.variance(sketch, count=DEVICES_4, held=0.0, squares=squares)
            said = bound(EPSILON_4, rows, width, expected)
            if width in WIDTHS_4:
                readings.append(Reading("a", f"bound {width}", rows, said))
                readings.append(Reading("a", f"exact {width}", rows, math.sqrt(spread)))
            if rows in THREE_ROWS_4:
                sent = sketch.record_bytes
                readings.append(Reading("b", f"rows {rows}", sent, math.sqrt(spread)))

    def job(given: tuple[CountMeanSketch | HashedResponse, str, int]) -> list[Reading]:
        oracle, series, seed = given
        rng = np.random.default_rng([seed, oracle.rows, oracle.width])
        counts = rng.multinomial(DEVICES_4, shares)
        values = oracle.values(item_names(ITEMS_4, seed))
        tally = data.simulated_tally(oracle, values, counts, rng)
        found = debias.estimate(tally, values, aware=series == "ours")
        rare = slice(ITEMS_4 // 2, None)  # whose own devices add nothing to speak of
        error = float(np.sqrt(np.mean((found.counts - counts)[rare] ** 2)))
        made = [Reading("a", series, oracle.rows, error)]
        if oracle.rows == plan.rows:
            made.append(Reading("b", series, oracle.record_bytes, error))
        return made

    jobs: list[tuple[CountMeanSketch | HashedResponse, str, int]] = [
        (
            CountMeanSketch(epsilon=EPSILON_4, rows=rows, width=width, seed=seed),
            f"measured {width}",
            seed,
        )
        for rows in size.rows
        for width in WIDTHS_4
        for seed in size.repeats_of(rows)
        if rows * width <= MOST_CELLS_4
    ]
    jobs += [
        (replace(plan, rows=rows, seed=seed), "ours", seed)
        for rows in (*size.rows[1:], plan.rows)
        for seed in range(FIRST_SEED, FIRST_SEED + size.ours)
    ]
    readings += run_all(
        job, jobs, lambda given: f"{given[0].rows:,} rows × {given[0].width:,}", progress
    )
    law = f"law i^-{LAW_4:g} over {ITEMS_4:,} items, {DEVICES_4:,} devices, as in the paper"
    y = "standard deviation of a count (devices)"
    panels = [
        Panel(key="a", title="by rows and width", data=law, x_name="rows k", y_name=y),
        Panel(
            key="b", title="by what a device sends", data=law, x_name="bytes of a record", y_name=y
        ),
    ]
    numbers = lines("004-fig4", panels, readings, seeds)
    ours = (plan.rows, plan.rows * plan.width, plan.record_bytes)
    title = f"Paper 004, figure 4: epsilon {EPSILON_4:g}, {law}"
    return Outcome(
        numbers=numbers,
        claims=local_claims.figure_4(Curves(numbers), WIDTHS_4, ours=ours),
        draw=lambda: pictures.figure_4(title, panels, numbers, WIDTHS_4, THREE_ROWS_4, plan),
    )


DEVICES: Mapping[Scale, int] = {"small": 100_000, "paper": 1_000_000}


def use_case(case: data.Case, scale: Scale, progress: Progress) -> Outcome:
    """One use case by the paper's sketch and by ours, over the same devices."""
    devices, paper_size = DEVICES[scale], scale == "paper"
    source = case.source() if paper_size else case.source().first(case.small_items)
    counts = source.counts(devices, np.random.default_rng(FIRST_SEED))
    order = np.argsort(-counts, kind="stable")
    source, counts = replace(source, items=source.items.take(order)), counts[order]
    repeats = case.repeats if paper_size else case.small_repeats
    seeds = range(FIRST_SEED, FIRST_SEED + repeats)
    epsilon = case.sketch.epsilon
    plan = local_plan.options(epsilon=epsilon, items=counts.size, records=devices)[0].randomizer
    oracles: dict[str, Randomizer] = {"paper": case.sketch, "ours": plan}
    runs: dict[str, list[Measured]] = {series: [] for series in oracles}
    readings, top = [], []
    jobs = [(seed, series) for seed in seeds for series in oracles]
    for done, (seed, series) in enumerate(jobs):
        oracle = in_epoch(oracles[series], 0, seed)
        name = NAMES[oracle_of(oracle)]

        def tell(share: float, name: str = name, done: int = done) -> None:
            progress(name, (done + share) / len(jobs))

        found = data.estimates(oracle, source, counts, seed, tell, aware=series == "ours")
        predicted = found.standard_error if series == "ours" else data.exact_error(oracle, counts)
        runs[series].append(measure(series, name, seed, oracle, counts, found, predicted))
        readings += _bands(series, counts, found, predicted)
        if seed == FIRST_SEED:
            top.append((series, found))
        tell(1.0)
    about = f"{source.data}; {devices:,} devices"
    panels = [
        Panel(
            key="a",
            title="estimates of one run with 95% intervals",
            data=about,
            x_name="rank of the item",
            y_name="devices",
        ),
        Panel(
            key="b",
            title="standard error by true count",
            data=about,
            x_name="devices that hold the item",
            y_name="standard error (devices)",
        ),
        Panel(
            key="c",
            title="errors of all items",
            data=about,
            x_name="error over predicted standard error",
            y_name="density",
        ),
    ]
    numbers = [
        *_top_lines(case.name, panels, source, counts, dict(top)),
        *(_with_items(line, counts) for line in lines(case.name, panels, readings, seeds)),
    ]
    scaled = math.sqrt(devices / local_claims.KNOWN_DEVICES) * paper_size
    claims = local_claims.use_case(
        runs["paper"],
        runs["ours"],
        items=counts.size,
        known_error=case.error * scaled,
        known_threshold=case.threshold * scaled,
        share=case.share,
    )
    title = f"Paper 004: {case.title}, epsilon {epsilon:g}, {counts.size:,} items\n{about}"
    every = [*runs["paper"], *runs["ours"]]
    return Outcome(
        numbers=[*numbers, *({"figure": case.name, "data": about, **asdict(r)} for r in every)],
        claims=claims,
        draw=lambda: pictures.use_case(title, panels, numbers, every),
    )


def _bands(series: str, counts: I64, found: LocalEstimates, predicted: F64) -> list[Reading]:
    """Errors measured and predicted by true count, and how errors over predictions are spread."""
    wrong = found.counts - counts
    band = np.searchsorted(BANDS, counts, side="right") - 1
    made = []
    for place, low in enumerate(BANDS):
        mine = band == place
        if np.count_nonzero(mine) >= FEWEST:
            for name, values in (("measured", wrong), ("predicted", predicted)):
                error = float(np.sqrt(np.mean(values[mine] ** 2)))
                made.append(Reading("b", f"{series} {name}", low, error))
    density, _ = np.histogram(np.clip(wrong / predicted, BINS[0], BINS[-1]), BINS, density=True)
    middles = (BINS[:-1] + BINS[1:]) / 2
    pairs = zip(middles.tolist(), density.tolist(), strict=True)
    return made + [Reading("c", series, x, y) for x, y in pairs]


def _with_items(line: dict[str, Any], counts: I64) -> dict[str, Any]:
    """A band's line also says over how many items, of all runs, it is."""
    if line["panel"] != "b":
        return line
    inside = np.searchsorted(BANDS, counts, side="right") - 1 == BANDS.index(line["x"])
    return {**line, "items": int(inside.sum()) * line["repeats"]}


def _top_lines(
    figure: str,
    panels: Sequence[Panel],
    source: data.Source,
    counts: I64,
    found: Mapping[str, LocalEstimates],
) -> list[dict[str, Any]]:
    """The first run's estimates of items from the most common down to what ours cannot list."""
    worth = int(np.sum(counts > found["ours"].null.threshold(counts.size) / 2))
    ranks = np.unique(np.geomspace(1, max(worth, 2), SHOWN).round().astype(int)).tolist()
    made = []
    for series, values, errors in (
        ("truth", counts.astype(np.float64), np.zeros(counts.size)),
        *((name, one.counts, one.standard_error) for name, one in found.items()),
    ):
        readings = [Reading("a", series, rank, float(values[rank - 1])) for rank in ranks]
        for line in lines(figure, panels, readings, (FIRST_SEED,)):
            place = int(line["x"]) - 1
            extra = {"item": source.items[place].as_py()} if source.measured else {}
            made.append({**line, **extra, "standard_error": float(errors[place])})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSize:
    """Among how many devices words are looked for."""

    devices: tuple[int, ...]  # growing
    repeats: int
    rows: int  # of the puzzle's sketches


NEW_WORDS: Mapping[Scale, WordSize] = {
    "small": WordSize(devices=(100_000, 300_000), repeats=1, rows=256),
    "paper": WordSize(devices=(300_000, 1_000_000, 2_000_000), repeats=3, rows=2_048),
}


def new_words(scale: Scale, progress: Progress) -> Outcome:
    """Words that nobody listed, by the paper's puzzle and by prefixes, over the same devices."""
    size, source = NEW_WORDS[scale], data.new_words()
    seeds = range(FIRST_SEED, FIRST_SEED + size.repeats)
    jobs = [(n, seed, series) for n in size.devices for seed in seeds for series in data.SEARCHES]
    runs, readings, listed = [], [], []
    for done, (devices, seed, series) in enumerate(jobs):
        stage, share = f"{data.SEARCHES[series]}, {devices:,} devices", 1 / len(jobs)
        rng = np.random.default_rng([seed, devices])
        counts = source.counts(devices // 2, rng)
        search = data.search(series, seed, size.rows)
        codes = np.concatenate(
            [
                np.repeat(search.codes(source.items)[0], counts, axis=0),
                data.random_words(devices - devices // 2, rng),
            ]
        )
        tallies, coins = search.tallies(), SeededRng(seed, devices)
        for start in range(0, devices, data.PIECE):
            progress(stage, share * (done + start / devices / 2))
            search.fold(search.randomize(codes[start : start + data.PIECE], rng=coins), tallies)
        progress(stage, share * (done + 0.5))
        began = time.process_time()
        found = search.find(tallies)
        took = time.process_time() - began
        truth = dict(zip(source.items.to_pylist(), counts.tolist(), strict=True))
        right = [word for word in found.words.to_pylist() if word in truth]
        runs.append(
            Search(
                series=series,
                seed=seed,
                devices=devices,
                record_bytes=search.record_bytes,
                found=len(right),
                false=len(found) - len(right),
                candidates=found.candidates,
                rarest=min((truth[word] for word in right), default=0),
                threshold=found.threshold,
                seconds=took,
            )
        )
        readings.append(Reading("b", series, devices, len(right)))
        if (devices, seed) == (size.devices[-1], FIRST_SEED):
            listed.append((series, found))
            ranked = counts
        progress(stage, share * (done + 1))
    about = f"{source.data}, half of the devices; the other half hold random letters"
    panels = [
        Panel(
            key="a",
            title=f"words found among {size.devices[-1]:,} devices, with 95% intervals",
            data=about,
            x_name="rank of the word",
            y_name="devices",
        ),
        Panel(
            key="b",
            title=f"words found of {len(source.items)}",
            data=about,
            x_name="devices",
            y_name="words",
        ),
    ]
    numbers = [
        *_word_lines(panels, source, ranked, dict(listed)),
        *lines("004-new-words", panels, readings, seeds),
    ]
    title = f"Paper 004: new words, epsilon {data.WORD_EPSILON:g}\n{about}"
    return Outcome(
        numbers=[
            *numbers,
            *({"figure": "004-new-words", "data": about, **asdict(r)} for r in runs),
        ],
        claims=local_claims.searches(
            runs, words=len(source.items), devices=size.devices[-1], paper_size=scale == "paper"
        ),
        draw=lambda: pictures.new_words(title, panels, numbers, runs),
    )


def _word_lines(
    panels: Sequence[Panel], source: data.Source, counts: I64, found: Mapping[str, Found]
) -> list[dict[str, Any]]:
    """The first run with the most devices: how many hold each word, and what was found."""
    ranks = {word: rank for rank, word in enumerate(source.items.to_pylist(), 1)}
    readings = [Reading("a", "truth", rank, n) for rank, n in enumerate(counts.tolist(), 1)]
    made: list[dict[str, Any]] = lines("004-new-words", panels, readings, (FIRST_SEED,))
    for series, one in found.items():
        for word, count, error in zip(
            one.words.to_pylist(), one.counts.tolist(), one.standard_error.tolist(), strict=True
        ):
            if word in ranks:
                reading = Reading("a", series, ranks[word], count)
                (line,) = lines("004-new-words", panels, [reading], (FIRST_SEED,))
                made.append({**line, "item": word, "standard_error": error})
    return made


def _named(case: data.Case) -> Figure:
    return Figure(
        name=case.name,
        title=f"{case.title} under local privacy, by the paper's sketch and ours (paper 004)",
        run=partial(use_case, case),
    )


FIGURES = (
    Figure(
        name="004-fig4",
        title="standard deviation of a count by the sketch's width and rows (paper 004)",
        run=figure_4,
    ),
    *(_named(case) for case in data.CASES),
    Figure(
        name="004-new-words",
        title="words nobody listed, by the fragment puzzle and by prefixes (paper 004)",
        run=new_words,
    ),
)

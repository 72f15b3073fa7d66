"""New words: are they listed as often as plans predict?

Each case plants words in a fleet, some with the count whose predicted chance is a half and some
with the plan's detectable count, and runs whole searches. Predictions assume that no word of the
other devices is common, and hold for the background "spread": each of these has a random word of
its own. In the background "common" half of them share one word and half have none: a search solves
for these two, which may leave less noise than predicted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.lines import Line, Settings, line, markdown
from sfumato.flow.word_discovery import with_seed
from sfumato.privacy import SeededRng
from sfumato.privacy.debias import LEVEL
from sfumato.questions.new_words.detection import Search, detectable, listing_chance
from sfumato.questions.new_words.plan import prefix_search
from sfumato.sketch.words import LATIN

NAME = "words"
SIZES = (500, 1_500, 6_000, 30_000, 300_000)
EPSILONS = (2.0, 4.0, 8.0)
TRIALS = 250  # words of each count
POINTS = 0.10  # requirement: the largest error of a prediction
MOST_PLANTED = 0.9  # of the devices; words of different counts have fleets of their own otherwise
RISK = 0.001  # of a false complaint about false words
MOST_WORDS = 10  # of each count in a fleet
COMMON = "zzz"
LETTERS = 8  # of a planted word

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    devices: int
    epsilon: float
    background: str = "spread"

    @property
    def label(self) -> str:
        return f"{self.devices}/{self.epsilon:g}/{self.background}"


def cases(quick: bool = False) -> list[Case]:
    if quick:
        return [Case(devices=500, epsilon=8.0)]
    return [
        Case(devices=devices, epsilon=epsilon, background=background)
        for background in ("spread", "common")
        for devices in SIZES
        for epsilon in EPSILONS
    ]


def run(settings: Settings) -> Iterator[Line]:
    jobs = [(case, settings) for case in cases(settings.quick) if settings.wants(case.label)]
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        yield from map(_job, jobs) if settings.processes == 1 else pool.map(_job, jobs)


def _job(job: tuple[Case, Settings]) -> Line:
    return measure(*job)


def measure(case: Case, settings: Settings) -> Line:
    search = prefix_search(case.epsilon, records=case.devices)
    counts = [half_count(search, case.devices), detectable(search, case.devices)]
    trials = settings.repeats or (2 if settings.quick else TRIALS)
    shares, false = listing_shares(
        search, counts, case.devices, trials=trials, background=case.background
    )
    return line(
        NAME,
        case.label,
        settings,
        sizes={"devices": case.devices, "epsilon": case.epsilon},
        seeds=[0, len(false) - 1],
        repetitions=len(false),
        words=shares.shape[1] * words_per_fleet(counts, case.devices),
        counts=counts,
        predicted=[listing_chance(search, count, case.devices) for count in counts],
        measured=shares.mean(axis=1).tolist(),
        half_widths=[half_width(each) for each in shares],
        false_runs=sum(false),
    )


def half_count(search: Search, records: int) -> int:
    """The least count whose predicted chance is a half."""
    return bisect_left(
        range(records + 1), True, key=lambda count: listing_chance(search, count, records) >= 0.5
    )


def words_per_fleet(counts: Sequence[int], records: int) -> int:
    """How many words of each count are planted together: a quarter of the devices, or one."""
    return max(1, min(MOST_WORDS, records // (4 * sum(counts))))


def half_width(shares: F64) -> float:
    """Of the 95% interval of a mean over runs: words of one run share a table."""
    return float(1.96 * shares.std(ddof=1) / math.sqrt(shares.size))


def listing_shares(
    search: Search,
    counts: Sequence[int],
    records: int,
    *,
    trials: int,
    background: str = "spread",
    first: int = 0,
) -> tuple[F64, list[bool]]:
    """The share of the planted words of each count that is listed, in each run, (counts, runs), and
    which runs list a false word. A fleet too small for words of all counts has one of them."""
    each = words_per_fleet(counts, records)
    alone = each * sum(counts) > MOST_PLANTED * records
    fleets = [[count] for count in counts] if alone else [list(counts)]
    shares, false = [], []
    for run in range(first, first + math.ceil(trials / each)):
        results = [
            search_once(search, fleet, each, records, background, seed=len(fleets) * run + place)
            for place, fleet in enumerate(fleets)
        ]
        shares.append([share for hits, _ in results for share in hits])
        false.append(any(is_false for _, is_false in results))
    return np.array(shares).T, false


def search_once(
    search: Search, counts: Sequence[int], each: int, records: int, background: str, *, seed: int
) -> tuple[list[float], bool]:
    """The listed share of `each` words of each count, and whether a false word is listed."""
    rng = np.random.default_rng([seed, records])
    length = min(LETTERS, search.length)
    words = [letters(each, length, rng) for _ in counts]
    rest = records - each * sum(counts)
    if background == "spread":
        others = letters(rest, length, rng)
    else:
        others = [COMMON] * (rest // 2) + [""] * (rest - rest // 2)
    seeded: Any = with_seed(search, seed)
    codes = [np.repeat(seeded.codes(w)[0], c, axis=0) for w, c in zip(words, counts, strict=True)]
    rows = np.concatenate([*codes, seeded.codes(others)[0]])
    tallies = seeded.tallies()
    seeded.fold(seeded.randomize(rows, rng=SeededRng(seed, records)), tallies)
    discovered = set(seeded.find(tallies).words.to_pylist())
    shares = [len(discovered.intersection(group)) / each for group in words]
    return shares, bool(discovered.difference(others, *words))


def letters(count: int, length: int, rng: np.random.Generator) -> list[str]:
    """Random words of a to z."""
    rows = np.array(list(LATIN))[rng.integers(0, 26, (count, length))]
    return ["".join(row) for row in rows.tolist()]


def table(lines: list[Line]) -> str:
    header = [
        "devices", "epsilon", "other devices", "count", "predicted", "measured",
        "detectable count", "predicted", "measured", "words of each", "runs with a false word",
    ]  # fmt: skip
    rows = []
    for each in lines:
        sizes = each["sizes"]
        texts = []
        for place, count in enumerate(each["counts"]):
            predicted, measured, half = (
                100 * each[name][place] for name in ("predicted", "measured", "half_widths")
            )
            texts += [f"{count:,}", f"{predicted:.0f}%", f"{measured:.0f}% ± {half:.0f}"]
        rows.append(
            [
                f"{sizes['devices']:,}",
                f"{sizes['epsilon']:g}",
                each["case"].rpartition("/")[2],
                *texts,
                str(each["words"]),
                f"{each['false_runs']} of {each['repetitions']}",
            ]
        )
    return markdown(header, rows)


def report(lines: list[Line]) -> str:
    """The page benchmarks/results/words.md."""
    return f"# New words\n\n{table(sorted(lines, key=_place))}\n"


def _place(each: Line) -> tuple[bool, int, float]:
    sizes = each["sizes"]
    return each["case"].endswith("common"), sizes["devices"], sizes["epsilon"]


def missed(lines: list[Line]) -> list[str]:
    """Cases that are listed less or more often than predicted, and those with false words."""
    complaints = []
    for each in lines:
        pairs = zip(each["counts"], each["predicted"], each["measured"], strict=True)
        for count, predicted, measured in pairs:
            if abs(measured - predicted) > POINTS:
                complaints.append(
                    f"{each['case']}: words of {count} devices are listed in {measured:.0%}, "
                    f"predicted {predicted:.0%}"
                )
        if stats.binom.sf(each["false_runs"] - 1, each["repetitions"], LEVEL) < RISK:
            complaints.append(f"{each['case']}: {each['false_runs']} runs with a false word")
    return complaints

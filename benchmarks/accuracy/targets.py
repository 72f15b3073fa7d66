"""Target errors: are they met, and in how few bytes?

A study with a `target_error` asks a pilot, which sizes a sketch for the rest. Each case is a law of
counts. Whole studies are run, pilot and noise included, and the largest error over all items is
compared with the target. Beside them the smallest sketch is searched that meets the target without
a pilot, with the same decoder and promise: of the plan's rows and of 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from scipy import stats

from benchmarks.lines import ROOT, Line, Settings, line, markdown
from sfumato import plan
from sfumato.flow.accumulator import Batch
from sfumato.flow.campaign import run as run_campaign
from sfumato.flow.task import Task
from sfumato.privacy import Budget, Ledger, SeededRng
from sfumato.questions.frequencies.design import (
    PILOT_COHORT,
    FrequencyCampaign,
    FrequencyDesign,
)
from sfumato.questions.frequencies.plan import noise_for
from sfumato.sketch import CountSketch

NAME = "targets"
DATA = ROOT.parent / "shared" / "data"
RUNS = 200
SEARCH = 60  # runs for each width that the search tries
RISK = 0.1  # the default failure_probability
MOST_BYTES = 1.3  # requirement: times the least that meets the target
FEW_ROWS = 5
FIRST = 1_000  # seed of the first study: constants of `sizing` were chosen with those below
FIRST_SEARCH = 10_000  # seeds of the search, which no study has

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

LAWS: dict[str, Callable[[F64, float], F64]] = {  # rank and target to a share, up to a factor
    "2^-i": lambda rank, target: 2.0 ** -np.minimum(rank, 1_000),
    "i^-2": lambda rank, target: rank**-2.0,
    "i^-1.5": lambda rank, target: rank**-1.5,
    "i^-1.1": lambda rank, target: rank**-1.1,
    "i^-0.8": lambda rank, target: rank**-0.8,
    "1/(i log^2 i)": lambda rank, target: 1 / (rank * np.log(rank + 1) ** 2),
    "half in one": lambda rank, target: np.where(rank == 1, rank.size - 1.0, 1.0),
    "20 of 2%": lambda rank, target: np.where(rank <= 20, 0.02, 0.6 / (rank.size - 20)),
    "two steps": lambda rank, target: np.where(
        rank <= 5, 0.05, np.where(rank <= 100, 0.003, 0.465 / (rank.size - 100))
    ),
    "flat at the target": lambda rank, target: np.where(rank <= 1 / target, 1.0, 0.0),
}
FRESH: dict[str, Callable[[F64, float], F64]] = {  # written down before any of them was run
    "i^-0.5": lambda rank, target: rank**-0.5,
    "i^-1.3": lambda rank, target: rank**-1.3,
    "(i + 10)^-1.2": lambda rank, target: (rank + 10) ** -1.2,
    "0.97^i": lambda rank, target: 0.97**rank,
    "50 alike, then 1/i": lambda rank, target: np.where(
        rank <= 50, 0.6 / 50, 0.4 / rank / np.sum(1 / rank[50:])
    ),
    "400 alike": lambda rank, target: np.where(rank <= 400, 1.0, 0.0),
    "i^-3 and i^-0.7": lambda rank, target: (
        rank**-3 / np.sum(rank**-3) + rank**-0.7 / np.sum(rank**-0.7)
    ),
    "lognormal": lambda rank, target: np.exp(2.5 * stats.norm.isf((rank - 0.5) / rank.size)),
    "words of tweets": lambda rank, target: _counted(
        "sentiment140_user_words.parquet", "word", rank.size
    ),
    "venues of Gowalla": lambda rank, target: _counted(
        "gowalla_nyc_checkins.parquet", "venue", rank.size
    ),
    "gamma draws": lambda rank, target: np.sort(
        np.random.default_rng(26).gamma(0.05, size=rank.size)
    )[::-1],
    "one of 70%, 120 alike": lambda rank, target: np.where(
        rank == 1, 0.7, np.where(rank <= 121, 0.0025, 0.0)
    ),
}
FILES = ("words of tweets", "venues of Gowalla")  # laws of files in `DATA`


def _counted(name: str, column: str, items: int) -> F64:
    """How often each of the most common values of a column occurs, the largest first."""
    table = pyarrow.parquet.read_table(DATA / name)
    counts = table["count"] if "count" in table.column_names else pa.array(np.ones(len(table)))
    totals = pa.table({"value": table[column], "count": counts}).group_by("value")
    return np.sort(totals.aggregate([("count", "sum")])["count_sum"].to_numpy())[::-1][:items]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A law, and the sizes of the study."""

    law: str
    items: int = 5_000
    devices: int = 200_000
    target: float = 0.005

    @property
    def label(self) -> str:
        return f"{self.law}/{self.items}"

    @property
    def counts(self) -> I64:
        shares = (LAWS | FRESH)[self.law](
            np.arange(1, self.items + 1, dtype=np.float64), self.target
        )
        chance = np.random.default_rng(0)
        return chance.multinomial(self.devices, shares / shares.sum())

    @property
    def study(self) -> dict[str, Any]:
        return {
            "question": "frequencies",
            "trust": "central",
            "algorithm": "count_sketch",
            "epsilon": 1.0,
            "delta": 1e-7,
            "devices": self.devices,
            "target_error": self.target,
        }


def cases(quick: bool = False) -> list[Case]:
    if quick:
        return [Case(law="i^-1.5", items=2_000, devices=20_000, target=0.02)]
    large = Case(law="i^-1.1", items=30_000, devices=1_000_000, target=0.004)
    fresh = [law for law in FRESH if law not in FILES or DATA.exists()]
    return [*(Case(law=law) for law in LAWS), large, *(Case(law=law) for law in fresh)]


def run(settings: Settings) -> Iterator[Line]:
    jobs = [(case, settings) for case in cases(settings.quick) if settings.wants(case.label)]
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        yield from map(_job, jobs) if settings.processes == 1 else pool.map(_job, jobs)


def _job(job: tuple[Case, Settings]) -> Line:
    return measure(*job)


def measure(case: Case, settings: Settings) -> Line:
    """Run the study, and search for the smallest sketch."""
    runs = settings.repeats or (3 if settings.quick else RUNS)
    planned = plan(case.study, items=pa.array([str(number) for number in range(case.items)]))
    design = planned.design
    assert isinstance(design, FrequencyDesign)
    results = [simulate_study(design, case.counts, seed) for seed in range(FIRST, FIRST + runs)]
    errors, widths = np.array([error for error, _ in results]), [width for _, width in results]
    bytes_sent = [design.traffic(width)["bytes_per_device"] for width in widths]
    pilot = design.traffic()["pilot_bytes_per_device"]
    share = design.pilot_devices / design.devices
    search = 3 if settings.quick else SEARCH
    least = {rows: smallest(case, design, rows, runs=search) for rows in (design.rows, FEW_ROWS)}
    return line(
        NAME,
        case.label,
        settings,
        sizes={"items": case.items, "devices": case.devices, "rows": design.rows},
        seeds=[FIRST, FIRST + runs - 1],
        repetitions=runs,
        target=case.target,
        met=int(np.sum(errors <= case.target)),
        errors=[float(value) for value in np.quantile(errors, [0.5, 0.9, 1.0])],
        widths=[int(min(widths)), float(np.median(widths)), int(max(widths))],
        predicted_bytes=planned.predicted["bytes_per_device"],
        bytes=float(np.mean(bytes_sent)),
        pilot_bytes=pilot,
        mean_bytes=float((1 - share) * np.mean(bytes_sent) + share * pilot),
        least_bytes=least[design.rows],
        least_bytes_with_few_rows=least[FEW_ROWS],
    )


def simulate_study(design: FrequencyDesign, counts: I64, seed: int) -> tuple[float, int]:
    """The largest error of a study, as a share of the devices, and the width of its sketch."""
    chance, rng = np.random.default_rng(seed), SeededRng(seed)
    design = replace(design, seed=seed)
    pilot = chance.multivariate_hypergeometric(counts, design.pilot_devices)

    def gather(task: Task) -> Batch:
        own = pilot if task.cohort == PILOT_COHORT else counts - pilot
        devices = int(own.sum())
        table = task.sketch.encode(np.arange(own.size), own)
        total = task.mechanism.at_device(table, devices=devices, rng=rng)
        return Batch(task.id, total, devices)

    campaign = FrequencyCampaign(design, np.arange(counts.size))
    run_campaign(campaign, gather, ledger=Ledger(Budget(epsilon=None, delta=1e-6)), rng=rng)
    estimates = campaign.estimates()
    scaled = estimates.counts * counts.sum() / estimates.respondents
    return float(np.abs(scaled - counts).max() / counts.sum()), campaign.width


def smallest(case: Case, design: FrequencyDesign, rows: int, *, runs: int) -> int:
    """The bytes of the smallest sketch of so many rows that meets the target in a share 1 − RISK of
    the runs, to about 3%."""
    counts = case.counts
    norms = CountSketch(rows=rows, width=2, seed=0).sensitivity(1)
    study = plan(case.study, items=pa.array(["a", "b"])).study
    alone = replace(
        design,
        rows=rows,
        mechanism=noise_for(study, norms),
        pilot_devices=0,
        target_error=None,
        failure_probability=None,
    )

    def is_enough(width: int) -> bool:
        misses = 0
        for seed in range(FIRST_SEARCH, FIRST_SEARCH + runs):
            error, _ = simulate_study(replace(alone, width=width), counts, seed)
            misses += error > case.target
            if misses > RISK * runs:
                return False
        return True

    low, high = 1, 2
    while not is_enough(high):
        low, high = high, math.ceil(1.5 * high)
    while high - low > max(1, low // 30):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return replace(alone, width=high).traffic()["bytes_per_device"]


def table(lines: list[Line]) -> str:
    """One table for the laws that sizes were developed with, and one for others."""
    parts = [
        ("Laws that sizes were developed with", [each for each in lines if not _is_fresh(each)]),
        (
            "Laws written down before any of them was run",
            [each for each in lines if _is_fresh(each)],
        ),
    ]
    return "\n\n".join(f"**{title}**\n\n{_table(part)}" for title, part in parts if part)


def _is_fresh(result: Line) -> bool:
    return result["case"].rpartition("/")[0] in FRESH


def _table(lines: list[Line]) -> str:
    header = [
        "law of counts", "items", "devices", "target", "met", "largest error, 50% / 90%",
        "width", "bytes", "least bytes", "with 5 rows", "times the least", "pilot's bytes",
        "mean bytes",
    ]  # fmt: skip
    rows = []
    for each in lines:
        sizes = each["sizes"]
        rows.append(
            [
                each["case"].rpartition("/")[0],
                f"{sizes['items']:,}",
                f"{sizes['devices']:,}",
                f"{each['target']:g}",
                f"{each['met']} of {each['repetitions']}",
                f"{each['errors'][0]:.2g} / {each['errors'][1]:.2g}",
                f"{each['widths'][1]:.0f}",
                f"{each['bytes']:,.0f}",
                f"{each['least_bytes']:,}",
                f"{each['least_bytes_with_few_rows']:,}",
                f"{times_least(each):.2f}",
                f"{each['pilot_bytes']:,}",
                f"{each['mean_bytes']:,.0f}",
            ]
        )
    return markdown(header, rows)


def times_least(result: Line) -> float:
    """Bytes of a device, over the least of the same rows."""
    return float(result["bytes"] / result["least_bytes"])


def report(lines: list[Line]) -> str:
    """The page benchmarks/results/targets.md."""
    return f"# Target errors\n\n{table(lines)}\n"


def missed(lines: list[Line]) -> list[str]:
    """Cases that miss their target more often than allowed, or that take too many bytes."""
    complaints = []
    for each in lines:
        misses = each["repetitions"] - each["met"]
        chance = stats.binom.sf(misses - 1, each["repetitions"], RISK)
        if misses > RISK * each["repetitions"]:
            complaints.append(f"{each['case']}: {misses} misses, by chance with {chance:.2g}")
        if times_least(each) > MOST_BYTES:
            complaints.append(f"{each['case']}: {times_least(each):.2f} times the least bytes")
    return complaints

"""How often the truth lies in the 95% interval, over seeded simulations of a sketched study."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.lines import Line, Settings, line, markdown
from sfumato import Plan, plan, simulate

NAME = "coverage"
RUNS = 200
EXPONENT = 1.1
COMMON = 20  # the most common items, also reported separately
LEAST, MOST = 0.93, 0.97  # the requirement on the share of (item, run) pairs covered


@dataclass(frozen=True, slots=True)
class Case:
    """A study: its epsilon, rounds and sizes.

    A plan noises all rounds once if possible, so many rounds differ from one only where there is no
    noise or each round is released.
    """

    epsilon: float
    rounds: int
    publish: str = "final"
    items: int = 5_000
    devices: int = 30_000
    bytes_per_device: int = 4_096  # 5,000 cells would take 10,625: so a sketch

    @property
    def label(self) -> str:
        suffix = "/each shown" if self.publish == "rounds" else ""
        return f"epsilon={self.epsilon:g}/rounds={self.rounds}{suffix}"


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: shares of the items whose true count lies within low and high."""

    seed: int
    covered: float
    common_covered: float
    half_width: float
    decoder: str


def run(settings: Settings) -> Iterator[Line]:
    selection = [case for case in cases(settings.quick) if settings.wants(case.label)]
    seeds = range(settings.repeats or (2 if settings.quick else RUNS))
    jobs = [(case, seed) for case in selection for seed in seeds]
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        runs = map(_job, jobs) if settings.processes == 1 else pool.map(_job, jobs, chunksize=10)
        for case in selection:
            yield _line(settings, case, list(itertools.islice(runs, len(seeds))))


def cases(quick: bool = False) -> list[Case]:
    if quick:
        return [Case(math.inf, 5, items=500, devices=2_000, bytes_per_device=512)]
    every = [Case(epsilon, rounds) for epsilon in (1.0, math.inf) for rounds in (1, 5)]
    return [*every, Case(1.0, 5, publish="rounds")]


def measure(case: Case, seed: int) -> Run:
    """Draw the devices, simulate the study, and compare."""
    planned = _plan(case)
    shares = np.arange(1, case.items + 1, dtype=np.float64) ** -EXPONENT
    truth = np.random.default_rng(seed).multinomial(case.devices, shares / shares.sum())
    items = planned.listed.items
    release = simulate(planned, {"item": items, "count": truth}, count_column="count", seed=seed)
    which = pc.index_in(release.items, value_set=items).to_numpy()
    inside = (release.low <= truth[which]) & (truth[which] <= release.high)
    return Run(
        seed=seed,
        covered=float(inside.mean()),
        common_covered=float(inside[which < COMMON].mean()),
        half_width=float(np.mean(release.high - release.low) / 2),
        decoder=release.plan["parameters"]["decoder"],
    )


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"coverage/{result['case']}: {result['covered']:.4f} of the pairs are covered, not "
        f"{LEAST:g} to {MOST:g}; seeds {result['seeds'][0]} to {result['seeds'][-1]}"
        for result in lines
        if not LEAST <= result["covered"] <= MOST
    ]


def table(lines: Sequence[Line]) -> str:
    """Shares covered, with the standard error of each over runs."""
    header = ["study", "algorithm", "runs", "covered", f"covered, {COMMON} most common"]
    header += ["half width", "least run", "most run"]
    rows = [
        [
            result["case"],
            result["algorithm"],
            str(result["repetitions"]),
            f"{result['covered']:.4f} ± {result['covered_error']:.4f}",
            f"{result['common_covered']:.4f} ± {result['common_covered_error']:.4f}",
            f"{result['half_width']:.1f}",
            f"{result['interval'][0]:.4f}",
            f"{result['interval'][1]:.4f}",
        ]
        for result in lines
    ]
    return markdown(header, rows)


def _line(settings: Settings, case: Case, runs: list[Run]) -> Line:
    planned = _plan(case)
    covered = [run.covered for run in runs]
    common = [run.common_covered for run in runs]
    return line(
        NAME,
        case.label,
        settings,
        sizes={"items": case.items, "devices": case.devices, "rounds": case.rounds},
        seeds=[run.seed for run in runs],
        repetitions=len(runs),
        study=planned.study.to_dict(),
        algorithm=planned.algorithm,
        parameters=planned.parameters,
        covered=float(np.mean(covered)),
        covered_error=_standard_error(covered),
        common_covered=float(np.mean(common)),
        common_covered_error=_standard_error(common),
        median=float(np.median(covered)),
        interval=[min(covered), max(covered)],
        half_width=float(np.mean([run.half_width for run in runs])),
        runs=[asdict(run) for run in runs],
    )


def _standard_error(shares: list[float]) -> float:
    return float(np.std(shares, ddof=1) / math.sqrt(len(shares)))


def _job(job: tuple[Case, int]) -> Run:
    return measure(*job)


@cache
def _plan(case: Case) -> Plan:
    study = {
        "question": "frequencies",
        "trust": "central",
        "epsilon": case.epsilon,
        "delta": 1e-6,
        "devices": case.devices,
        "rounds": case.rounds,
        "publish": case.publish,
        "bytes_per_device": case.bytes_per_device,
    }
    return plan(study, items=pa.array([f"item {number:05d}" for number in range(case.items)]))

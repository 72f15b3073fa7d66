"""Frequencies under trust "secure" on real data: is the error as planned?

The question of paper 000 with epsilon 1, 5% of the devices vanishing and 10% that may be corrupt.
The error is the root mean square, over all items, of the difference from the devices' own counts;
beside it are the intervals' coverage, and the ledger's epsilon at the end. Where `shared/data` is
missing, power laws replace the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from benchmarks.lines import Line, Settings, line, markdown
from sfumato import Plan, plan, simulate
from sfumato.privacy import Budget, Ledger
from sfumato.reproduce.frequencies.data import Source, c4_commits, gowalla, sentiment

NAME = "secure"
RUNS = 5
STUDY = {
    "question": "frequencies",
    "trust": "secure",
    "epsilon": 1.0,
    "delta": 1e-6,
    "dropout": 0.05,
    "corrupt": 0.1,
}
LEAST, MOST = 0.9, 1.1  # the requirement on measured over predicted error


@dataclass(frozen=True, slots=True)
class Run:
    seed: int
    ratio: float  # measured over predicted standard error
    covered: float
    spent: float


def run(settings: Settings) -> Iterator[Line]:
    sources = [sentiment()] if settings.quick else [gowalla(), sentiment(), c4_commits()]
    for source in filter(None, sources):
        for rounds in (1,) if settings.quick else (1, 10):
            case = f"{source.name}/rounds={rounds}"
            if settings.wants(case):
                yield _line(settings, case, source, rounds)


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"secure/{result['case']}: the error is {result['ratio']:.3f} times what was predicted, "
        f"epsilon {result['spent']:.4f}; seeds {result['seeds'][0]} to {result['seeds'][-1]}"
        for result in lines
        if not (LEAST <= result["ratio"] <= MOST and result["spent"] <= 1)
    ]


def table(lines: Sequence[Line]) -> str:
    header = ["data", "algorithm", "devices", "predicted error", "measured/predicted", "covered"]
    rows = [
        [
            result["case"],
            result["algorithm"],
            f"{result['sizes']['devices']:,}",
            f"{result['predicted']:.2f}",
            f"{result['ratio']:.3f} ({min(result['ratios']):.3f} to {max(result['ratios']):.3f})",
            f"{result['covered']:.3f}",
            f"{result['spent']:.4f}",
        ]
        for result in lines
    ]
    return markdown([*header, "epsilon spent"], rows)


def _line(settings: Settings, case: str, source: Source, rounds: int) -> Line:
    devices = (300 if settings.quick else min(source.per_round, 9_000)) * min(rounds, 6)
    holdings = source.draw(devices, np.random.default_rng(devices))
    items = pa.array([str(item) for item in range(source.categories)])
    planned = plan(STUDY | {"devices": devices, "rounds": rounds}, items=items)
    seeds = range(settings.repeats or (1 if settings.quick else RUNS))
    runs = [_measure(planned, items, holdings, seed) for seed in seeds]
    ratios = [run.ratio for run in runs]
    return line(
        NAME,
        case,
        settings,
        sizes={"devices": devices, "items": source.categories, "rounds": rounds},
        seeds=list(seeds),
        repetitions=len(runs),
        study=planned.study.to_dict(),
        algorithm=planned.algorithm,
        parameters=planned.parameters,
        data=source.data,
        predicted=planned.predicted["standard_error"],
        ratio=float(np.mean(ratios)),
        ratios=ratios,
        covered=float(np.mean([run.covered for run in runs])),
        spent=max(run.spent for run in runs),
    )


def _measure(planned: Plan, items: pa.Array, holdings: np.ndarray, seed: int) -> Run:
    counts = np.bincount(holdings, minlength=len(items))
    books = Ledger(Budget(epsilon=planned.study.epsilon, delta=planned.study.delta))
    data = pa.table({"item": items.take(pa.array(holdings))})
    release = simulate(planned, data, seed=seed, ledger=books)
    truth = counts[release.items.cast(pa.int64()).to_numpy()]
    errors = release.counts - truth
    return Run(
        seed=seed,
        ratio=float(np.sqrt(np.mean(errors**2))) / planned.predicted["standard_error"],
        covered=float(np.mean((release.low <= truth) & (truth <= release.high))),
        spent=books.spent(),
    )

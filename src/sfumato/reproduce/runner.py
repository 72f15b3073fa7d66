"""The parts of a figure, and the one runner that makes every figure.

An `Experiment` is a figure at one scale: jobs (each a workload and a seed), the function that runs
a job, the panels of its readings, and the claims to be checked. The runner does the rest: it reads
the data, runs the jobs, reports progress, makes number lines from the readings, and evaluates the
claims. Pictures are drawn from the number lines alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Literal, NamedTuple

from sfumato.errors import SpecError
from sfumato.reproduce.panels import Curves, Line, Panel, Reading, Series, draw_panels, number_lines

Scale = Literal["small", "paper"]
Progress = Callable[[str, float], None]  # the current stage, and the share of all that is done

FIRST_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the paper, and whether it holds here."""

    text: str
    holds: bool
    detail: str  # the numbers behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a figure."""

    numbers: Sequence[Mapping[str, Any]]  # one JSON line each
    claims: Sequence[Claim]
    draw: Callable[[], Any]  # makes the matplotlib figure


class Job(NamedTuple):
    """One run of a workload. The seed draws everything that is random in it."""

    workload: Any
    seed: int
    tell: Callable[[float], None] = lambda share: None  # reports the share that is done


def repeat(workloads: Iterable[Any], repeats: int) -> list[Job]:
    """Each workload with `repeats` seeds."""
    seeds = range(FIRST_SEED, FIRST_SEED + repeats)
    return [Job(workload, seed) for workload in workloads for seed in seeds]


def by_workload(results: Sequence[Any], repeats: int) -> list[tuple[Any, ...]]:
    """The results of `repeat`, grouped by workload."""
    return [tuple(results[at : at + repeats]) for at in range(0, len(results), repeats)]


def _no_records(evidence: Any) -> Iterable[Line]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A figure at one scale: its jobs, its panels and its claims.

    `gather` turns the results of the jobs, in their order, into the evidence for readings and
    claims. Results are lists of readings unless `readings` converts them.
    """

    heading: str  # of the picture
    jobs: Sequence[Job]
    stage: Callable[[Any], str]  # names the stage while a workload runs
    run: Callable[[Job], Any]
    gather: Callable[[list[Any]], Any] = list
    panels: Sequence[Panel]
    readings: Callable[[Any], Iterable[Reading]] = chain.from_iterable
    records: Callable[[Any], Iterable[Line]] = _no_records  # further lines, which are not drawn
    claims: Callable[[Any, Curves], Iterable[Claim]]
    series: Mapping[str, Series] = field(default_factory=dict)
    columns: int = 2  # panels per row
    labels: int = 5  # labels per row of the legend
    picture: Callable[[Any, Curves], Any] | None = None  # draws pictures that are not by panels
    at_once: int = os.cpu_count() or 1  # parallel jobs; the kernels release the lock
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while jobs run

    def draw(self, evidence: Any, curves: Curves) -> Any:
        """The matplotlib figure."""
        if self.picture is not None:
            return self.picture(evidence, curves)
        return draw_panels(
            self.heading, self.panels, curves, self.series, self.columns, self.labels
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure or table of a paper that can be reproduced."""

    name: str
    title: str
    experiment: Callable[[Any], Experiment]  # takes a size; reads the data
    small: Any  # the sizes of both scales
    paper: Any
    trains: bool = False  # whether it needs PyTorch

    def run(self, scale: Scale, progress: Progress) -> Outcome:
        """Make the figure."""
        sizes = {"small": self.small, "paper": self.paper}
        if scale not in sizes:
            raise SpecError(f"scale must be small or paper; got {scale!r}")
        if self.trains:
            import sfumato.learn  # noqa: F401  # fails early, and says what to install
        progress("reading data", 0.0)
        return conduct(self.name, self.experiment(sizes[scale]), progress)


def conduct(name: str, experiment: Experiment, progress: Progress) -> Outcome:
    """Run an experiment and check its claims."""
    evidence = experiment.gather(_run_jobs(experiment, progress))
    seeds = [job.seed for job in experiment.jobs]
    lines = number_lines(name, experiment.panels, experiment.readings(evidence), seeds)
    curves = Curves(lines)
    return Outcome(
        numbers=[*lines, *({"figure": name, **record} for record in experiment.records(evidence))],
        claims=list(experiment.claims(evidence, curves)),
        draw=lambda: experiment.draw(evidence, curves),
    )


def _run_jobs(experiment: Experiment, progress: Progress) -> list[Any]:
    """The results of all jobs, in their order."""
    shares, lock = [0.0] * len(experiment.jobs), Lock()

    def run(place: int, job: Job) -> Any:
        def tell(share: float) -> None:
            with lock:
                shares[place] = share
                progress(experiment.stage(job.workload), sum(shares) / len(shares))

        tell(0.0)
        result = experiment.run(job._replace(tell=tell))
        tell(1.0)
        return result

    with experiment.around(), ThreadPoolExecutor(experiment.at_once) as pool:
        return list(pool.map(run, range(len(shares)), experiment.jobs))

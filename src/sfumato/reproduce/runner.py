"""The parts of a figure, and the one runner that makes every figure.

An `Experiment` is a figure at one scale: jobs (each a workload and a seed), the function that runs
a job, the panels of its readings, and the claims to be checked. The runner does the rest: it reads
the data, runs the jobs on an engine, reports progress, makes number lines from the readings, and
evaluates the claims. A job is a pure function of its workload and its seed, so the numbers are the
same on any engine. Pictures are drawn from the number lines alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, Literal, NamedTuple

from sfumato.engines import Engine, LocalEngine
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


def _say_nothing(share: float) -> None:
    pass


class Job(NamedTuple):
    """One run of a workload. The seed draws everything that is random in it."""

    workload: Any
    seed: int
    tell: Callable[[float], None] = _say_nothing  # reports the share that is done


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
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # entered by each job

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

    def run(self, scale: Scale, progress: Progress, engine: Engine | None = None) -> Outcome:
        """Make the figure. The jobs run on the `engine`, by default in threads of this process."""
        sizes = {"small": self.small, "paper": self.paper}
        if scale not in sizes:
            raise SpecError(f"scale must be small or paper; got {scale!r}")
        if self.trains:
            import sfumato.learn  # noqa: F401  # fails early, and says what to install
        progress("reading data", 0.0)
        return conduct(self.name, self.experiment(sizes[scale]), progress, engine)


def conduct(
    name: str, experiment: Experiment, progress: Progress, engine: Engine | None = None
) -> Outcome:
    """Run an experiment and check its claims."""
    if engine is None:
        results = _run_here(experiment, progress)
    else:
        results = _run_on(engine, experiment, progress)
    evidence = experiment.gather(results)
    seeds = [job.seed for job in experiment.jobs]
    lines = number_lines(name, experiment.panels, experiment.readings(evidence), seeds)
    curves = Curves(lines)
    return Outcome(
        numbers=[*lines, *({"figure": name, **record} for record in experiment.records(evidence))],
        claims=list(experiment.claims(evidence, curves)),
        draw=lambda: experiment.draw(evidence, curves),
    )


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of some jobs, by their places. They add."""

    by_place: Mapping[int, Any]

    def __add__(self, other: _Results) -> _Results:
        return _Results({**self.by_place, **other.by_place})


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs one job; it can be pickled if the experiment's functions can."""

    run: Callable[[Job], Any]
    around: Callable[[], AbstractContextManager[None]]

    def __call__(self, numbered: tuple[int, Job]) -> _Results:
        place, job = numbered
        with self.around():
            return _Results({place: self.run(job)})


def _run_here(experiment: Experiment, progress: Progress) -> list[Any]:
    """The results of all jobs, in their order, from threads of this process. Jobs say how far they
    are."""
    shares, lock = [0.0] * len(experiment.jobs), Lock()
    run = _Run(experiment.run, experiment.around)

    def run_and_tell(numbered: tuple[int, Job]) -> _Results:
        place, job = numbered

        def tell(share: float) -> None:
            with lock:
                shares[place] = share
                progress(experiment.stage(job.workload), sum(shares) / len(shares))

        tell(0.0)
        results = run((place, job._replace(tell=tell)))
        tell(1.0)
        return results

    engine = LocalEngine(experiment.at_once)
    return _in_order(engine.sum(run_and_tell, enumerate(experiment.jobs)))


def _run_on(engine: Engine, experiment: Experiment, progress: Progress) -> list[Any]:
    """The same from an engine, whose workers may be other processes: progress is by jobs begun."""

    def jobs() -> Iterator[tuple[int, Job]]:
        for place, job in enumerate(experiment.jobs):
            progress(experiment.stage(job.workload), place / len(experiment.jobs))
            yield place, job

    results = _in_order(engine.sum(_Run(experiment.run, experiment.around), jobs()))
    progress("checking claims", 1.0)
    return results


def _in_order(results: _Results | None) -> list[Any]:
    by_place = {} if results is None else results.by_place
    return [by_place[place] for place in sorted(by_place)]

"""Figures 1 and 2 and tables 1 to 3 of paper 002: accuracy and rate of compressed private training.

A table's numbers are drawn as accuracy and rate by noise multiplier, beside the paper's own
numbers. Rows are no compression, the best fixed rate ("Genie"), Adapt Norm at four c, Two Stage,
and ours (dashed). Every number line has the epsilon of its multiplier.

A claim's text says how it is checked, and its detail has every number behind it: accuracies with
their standard errors over seeds, rates, and epsilon beside each noise multiplier z. Claims marked
(ours) are about sfumato's additions to the paper. Epsilon here is of Poisson cohorts by Rényi
bounds (`accounting.epsilon_of`); that of the paper's own setting is by privacy loss distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sfumato.reproduce.learning import data
from sfumato.reproduce.learning.data import Printed, Workload
from sfumato.reproduce.learning.runs import (
    AT_ONCE,
    NONE,
    Method,
    Runs,
    Scores,
    before_training,
    need_gpu,
    one_thread,
    paper_epsilon,
    train,
)
from sfumato.reproduce.panels import Panel, Reading, Series, brief, numbered_series
from sfumato.reproduce.runner import Claim, Experiment, Figure, Job, by_workload, repeat

ACCURACY, RATE, NOISE = "accuracy on test examples", "rate (parameters by cells sent)", "noise z"
ERRORS = (0.25, 0.1, 0.05, 0.01)  # c of Adapt Norm
HEURISTIC = 0.1  # the c that the paper uses everywhere else
VIABLE = tuple(error for error in ERRORS if error <= HEURISTIC)
OURS = Method("ours", 0.1)
OURS_ERRORS = (0.1, 0.5)  # of ours, in figure 2
PAPERS = Method("adapt_norm", HEURISTIC)
STAGED = Method("two_stage", HEURISTIC)
FAR = 1.2  # times the accuracy of guessing
TIMES = 2.0  # our rate, relative to Adapt Norm's
ORDERS = 10.0  # "orders of magnitude" is at least this factor
ROUGHLY = 2.0  # a factor that "roughly" allows
SERIES: Mapping[str, Series] = {
    "none": Series("none", "grey", "x"),
    "genie": Series("Genie", "sky", "D"),
    "fixed": Series("fixed rates", "sky", "D"),
    "adapt_norm": Series("Adapt Norm", "red", "s"),
    "adapt_norm 0.25": Series("Adapt Norm 0.25", "pink", "v"),
    "adapt_norm 0.1": Series("Adapt Norm 0.1", "red", "s"),
    "adapt_norm 0.05": Series("Adapt Norm 0.05", "orange", "P"),
    "adapt_norm 0.01": Series("Adapt Norm 0.01", "green", "^"),
    "two_stage": Series("Two Stage", "blue", "^"),
    str(STAGED): Series("Two Stage 0.1", "blue", "o"),
    "ours": Series("ours", "black", "o", dashed=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """How much accuracy a method may lose and still count as equally accurate."""

    share: float  # of the other's accuracy
    errors: float  # or this many standard errors of the difference, if that is more

    def allows(self, scores: Scores, other: Scores) -> bool:
        chance = self.errors * math.hypot(scores.stderr, other.stderr)
        return other.accuracy - scores.accuracy <= max(self.share * other.accuracy, chance)

    def __str__(self) -> str:
        chance = f" or {self.errors:g} standard errors" if self.errors else ""
        return f"{self.share:.0%}{chance}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a figure is run."""

    workloads: tuple[Workload, ...]
    multipliers: tuple[tuple[float, ...], ...]  # of each workload
    rates: tuple[float, ...]  # fixed rates
    repeats: int
    slack: Slack
    gpu: bool = False


def _trainings(size: Size, methods: Sequence[Method]) -> tuple[list[Runs], dict[str, Any]]:
    """The workloads, and the part of an experiment that trains them: without compression, at fixed
    rates and with these methods."""
    every = [NONE, *(Method("fixed", rate) for rate in size.rates), *methods]
    workloads = [
        (place, z, method)
        for place, multipliers in enumerate(size.multipliers)
        for z in multipliers
        for method in every
    ]
    if size.gpu:
        need_gpu(size.workloads, [len(z) * len(every) * size.repeats for z in size.multipliers])
    federated = [task.load() for task in size.workloads]
    before = [
        before_training(*arguments)
        for arguments in zip(size.workloads, federated, size.multipliers, strict=True)
    ]

    def gather(results: list[tuple[float, float]]) -> list[Runs]:
        scores: list[dict[tuple[float, Method], Scores]] = [{} for _ in before]
        groups = by_workload(results, size.repeats)
        for (place, z, method), group in zip(workloads, groups, strict=True):
            scores[place][z, method] = Scores(*np.array(group).T)
        return [replace(runs, scores=group) for runs, group in zip(before, scores, strict=True)]

    def run(job: Job) -> tuple[float, float]:
        place, z, method = job.workload
        return train(size.workloads[place], federated[place], z, method, job.seed, gpu=size.gpu)

    return before, {
        "jobs": repeat(workloads, size.repeats),
        "stage": lambda workload: f"z = {workload[1]:g}, {workload[2]}",
        "run": run,
        "gather": gather,
        "at_once": 1 if size.gpu else AT_ONCE,
        "around": one_thread,
    }


def table(number: int, printed: Printed, size: Size) -> Experiment:
    """Accuracy and rate by noise multiplier, here and in the paper."""
    norms = [Method("adapt_norm", error) for error in ERRORS]
    (task,), trainings = _trainings(size, [*norms, STAGED, OURS])

    def readings(every: list[Runs]) -> Iterator[Reading]:
        (runs,) = every
        for z in runs.multipliers:
            rows = {"none": NONE, "genie": runs.genie(z), "ours": OURS}
            rows |= {str(method): method for method in (*norms, STAGED)}
            for series, method in rows.items():
                yield from _repeats("a", series, z, runs.scores[z, method].accuracies, runs, z)
                yield from _repeats("b", series, z, runs.scores[z, method].rates, runs, z)
        yield from _as_printed(printed)
        for z in runs.multipliers:  # every fixed rate that was tried
            for rate in size.rates:
                accuracies = runs.scores[z, Method("fixed", rate)].accuracies
                yield from _repeats(_fixed_rates_panel(z), "fixed", rate, accuracies, runs, z)

    title = f"{task.workload.name}\nepsilon {_list(task.epsilons.values())} for z from the left"
    theirs = [paper_epsilon(printed, z) for z in printed.multipliers]
    there = f"the paper's: {printed.name}\nepsilon {_list(theirs)} for z from the left"
    source = f"printed in the paper: {printed.name}, {printed.parameters:,} parameters"
    return Experiment(
        heading=f"Paper 002, table {number}: {task.workload.name}, and the paper's {printed.name}",
        **trainings,
        panels=[
            Panel("a", title, task.data, NOISE, ACCURACY, linear=True),
            Panel("b", title, task.data, NOISE, RATE),
            Panel("c", there, source, NOISE, ACCURACY, linear=True),
            Panel("d", there, source, NOISE, RATE),
            *(
                Panel(_fixed_rates_panel(z), "", task.data, "fixed rate", ACCURACY, is_drawn=False)
                for z in task.multipliers
            ),
        ],
        readings=readings,
        claims=lambda every, _: table_claims(number, every[0], printed, size.slack),
        series=SERIES,
    )


def _repeats(
    panel: str, series: str, x: float, values: Any, runs: Runs, z: float, **more: Any
) -> Iterator[Reading]:
    """The readings of all seeds, with the epsilon of their noise."""
    more = {"epsilon": runs.epsilons[z], "delta": runs.delta, **more}
    return (Reading(panel, series, x, float(y), more) for y in values)


def _as_printed(printed: Printed) -> Iterator[Reading]:
    """The paper's own numbers, without seeds; they are means over five runs."""
    for panel, rows, unit in (("c", printed.accuracy, 100.0), ("d", printed.rate, 1.0)):
        for row, values in rows.items():
            series = row if row == "genie" else f"{PAPERS.kind} {row}"
            for z, value in zip(printed.multipliers, values, strict=True):
                cost = {"epsilon": paper_epsilon(printed, z), "delta": 1 / printed.clients}
                yield Reading(panel, series, z, value / unit, {"seeds": None, **cost})


def _fixed_rates_panel(multiplier: float) -> str:
    return f"fixed rates at z = {multiplier:g}"


def figure_1(size: Size) -> Experiment:
    """Accuracy by fixed rate for each task, and the best rate of each by noise."""
    tasks, trainings = _trainings(size, [])
    *letters, best = list("abcdefgh")[: len(tasks) + 1]
    names = [f"z = {z:g}" for task in tasks for z in task.multipliers]
    names = list(dict.fromkeys([*names, *(task.workload.name for task in tasks)]))

    def readings(every: list[Runs]) -> Iterator[Reading]:
        for letter, runs in zip(letters, every, strict=True):
            for (z, method), scores in runs.scores.items():
                x = method.value or 1.0
                yield from _repeats(letter, f"z = {z:g}", x, scores.accuracies, runs, z)
        for runs in every:
            for z in runs.multipliers:
                rates = runs.scores[z, runs.genie(z)].rates
                yield from _repeats(best, runs.workload.name, z, rates, runs, z, data=runs.data)

    panels = [
        Panel(
            letter,
            f"{task.workload.name}\n{task.parameters:,} parameters",
            task.data,
            "fixed rate (1: no compression)",
            ACCURACY,
            linear=True,
        )
        for letter, task in zip(letters, tasks, strict=True)
    ]
    panels.append(Panel(best, "the best rate that loses at most 1%", "", NOISE, RATE))
    return Experiment(
        heading="Paper 002, figure 1: what a fixed rate costs",
        **trainings,
        panels=panels,
        readings=readings,
        claims=lambda every, _: claims_1(every),
        series={name: numbered_series(name, place) for place, name in enumerate(names)},
        columns=2 if len(panels) % 2 == 0 else len(panels),
    )


def figure_2(size: Size) -> Experiment:
    """Accuracy by the rate that Adapt Norm and Two Stage came to, over c."""
    methods = [Method(kind, c) for kind in ("adapt_norm", "two_stage") for c in ERRORS]
    methods += [Method("ours", error) for error in OURS_ERRORS]
    tasks, trainings = _trainings(size, methods)
    pairs = [(place, z) for place, task in enumerate(tasks) for z in task.multipliers]
    keyed = dict(zip("abcdefghijkl", pairs, strict=False))

    def readings(every: list[Runs]) -> Iterator[Reading]:
        for letter, (place, z) in keyed.items():
            runs = every[place]
            for (noise, method), scores in runs.scores.items():
                if noise == z:
                    x, name = scores.rate, str(method)
                    yield from _repeats(
                        letter, method.kind, x, scores.accuracies, runs, z, method=name
                    )

    return Experiment(
        heading="Paper 002, figure 2: accuracy by rate over c",
        **trainings,
        panels=[
            Panel(
                letter,
                f"{tasks[place].workload.name}\nz = {z:g}, {_epsilon(tasks[place], z)}",
                tasks[place].data,
                RATE,
                ACCURACY,
                linear=True,
            )
            for letter, (place, z) in keyed.items()
        ],
        readings=readings,
        claims=lambda every, _: claims_2(every, size.slack),
        series=SERIES,
        columns=len(keyed),
    )


# Claims.


def table_claims(number: int, runs: Runs, printed: Printed, slack: Slack) -> Iterator[Claim]:
    """The claims about one of tables 1 to 3."""
    name, scores, every = f"table {number}, {runs.workload.name}", runs.scores, runs.multipliers
    yield Claim(  # without it, claims about accuracies mean nothing
        text=f"{name}: without compression the model is far better than guessing (by a fifth)",
        holds=all(scores[z, NONE].accuracy >= FAR * runs.guessing for z in every),
        detail=f"guessing {runs.guessing:.4f}; "
        + _by_noise(runs, lambda z: f"{scores[z, NONE].accuracy:.4f}"),
    )
    by_error = {c: [scores[z, _norm(c)].rate for z in every] for c in ERRORS}
    yield Claim(
        text=f"{name}: Adapt Norm's rate rises with the noise at every c",
        holds=all(map(_rises, by_error.values())),
        detail="; ".join(
            f"c = {c:g}: "
            + ", ".join(
                f"{rate:.3g} at z = {z:g} ({_epsilon(runs, z)})"
                for z, rate in zip(every, rates, strict=True)
            )
            for c, rates in by_error.items()
        ),
    )
    upwards = sorted(ERRORS)
    by_noise = {z: [scores[z, _norm(c)].rate for c in upwards] for z in every}
    yield Claim(
        text=f"{name}: Adapt Norm's rate rises with c at every z",
        holds=all(map(_rises, by_noise.values())),
        detail=_by_noise(
            runs,
            lambda z: ", ".join(
                f"{rate:.3g} at c = {c:g}" for c, rate in zip(upwards, by_noise[z], strict=True)
            ),
        ),
    )
    yield Claim(
        text=f"{name}: Adapt Norm at c of {HEURISTIC:g} or less is within {slack} of the accuracy "
        "without compression",
        holds=all(
            slack.allows(scores[z, _norm(c)], scores[z, NONE]) for z in every for c in VIABLE
        ),
        detail=_by_noise(
            runs,
            lambda z: (
                f"none {_accuracy(scores[z, NONE])}, "
                + ", ".join(f"c = {c:g}: {_accuracy(scores[z, _norm(c)])}" for c in ERRORS)
            ),
        ),
    )
    yield _above_two_stage(name, runs, HEURISTIC, slack)
    yield from _common_claims(name, runs, slack)
    if printed.said_epsilon is not None:
        yield _epsilon_as_said(number, printed)
    if runs.parameters == printed.parameters:  # only for the paper's own model
        theirs = dict(zip(printed.multipliers, printed.rate[f"{HEURISTIC:g}"], strict=True))
        rates = {z: (scores[z, PAPERS].rate, theirs[z]) for z in every if z in theirs}
        yield Claim(
            text=f"{name}: Adapt Norm's rate at c = {HEURISTIC:g} is the paper's, to a factor of "
            f"{ROUGHLY:g}",
            holds=bool(rates)
            and all(paper / ROUGHLY <= here <= paper * ROUGHLY for here, paper in rates.values()),
            detail=", ".join(
                f"z = {z:g}: {here:.3g}, the paper's {paper:g}"
                for z, (here, paper) in rates.items()
            ),
        )


def claims_1(every: Sequence[Runs]) -> Iterator[Claim]:
    """The claims about the best fixed rates by task and noise."""
    for z in every[0].multipliers:
        if all(z in runs.multipliers for runs in every):
            best = [max(runs.genie(z).value, 1.0) for runs in every]
            yield Claim(
                text=f"figure 1, z = {z:g}: the best fixed rate differs by a factor of "
                f"{ORDERS:g} or more between tasks",
                holds=max(best) >= ORDERS * min(best),
                detail="; ".join(
                    f"{runs.workload.name} ({_epsilon(runs, z)}): {_genie(runs, z)}"
                    for runs in every
                ),
            )
    for runs in every:
        best = [max(runs.genie(z).value, 1.0) for z in runs.multipliers]
        yield Claim(
            text=f"figure 1, {runs.workload.name}: the best fixed rate does not fall as noise "
            "grows",
            holds=best == sorted(best),
            detail=_by_noise(runs, partial(_genie, runs)),
        )


def claims_2(every: Sequence[Runs], slack: Slack) -> Iterator[Claim]:
    """The claims about accuracy and rate of the adaptive methods over c."""
    for runs in every:
        name = f"figure 2, {runs.workload.name}"
        for c in ERRORS:
            yield _above_two_stage(name, runs, c, slack)
        yield from _common_claims(name, runs, slack)


def _above_two_stage(name: str, runs: Runs, error: float, slack: Slack) -> Claim:
    pairs = {
        z: (runs.scores[z, _norm(error)], runs.scores[z, Method("two_stage", error)])
        for z in runs.multipliers
    }
    return Claim(
        text=f"{name}: Adapt Norm's rate is above Two Stage's at c = {error:g}, and its accuracy "
        f"is within {slack}",
        holds=all(
            norm.rate > staged.rate and slack.allows(norm, staged)
            for norm, staged in pairs.values()
        ),
        detail=_by_noise(
            runs, lambda z: f"Adapt Norm {_both(pairs[z][0])}, Two Stage {_both(pairs[z][1])}"
        ),
    )


def _common_claims(name: str, runs: Runs, slack: Slack) -> Iterator[Claim]:
    """The claims that tables and figure 2 have in common."""
    task, scores, every = runs.workload, runs.scores, runs.multipliers
    most = task.rounds / task.warm_up
    staged = {key: group.rate for key, group in scores.items() if key[1].kind == "two_stage"}
    yield Claim(
        text=f"{name}: Two Stage's rate is at most rounds by warm-up rounds, {task.rounds}/"
        f"{task.warm_up} = {most:g}",
        holds=all(rate <= most for rate in staged.values()),
        detail="; ".join(f"z = {z:g}, {method}: {r:.3g}" for (z, method), r in staged.items()),
    )
    yield Claim(
        text=f"{name}: the best fixed rate within 1%, found by trying all, is above Adapt Norm's "
        f"at c = {HEURISTIC:g}",
        holds=all(scores[z, runs.genie(z)].rate > scores[z, PAPERS].rate for z in every),
        detail=_by_noise(
            runs, lambda z: f"Genie {_genie(runs, z)}, Adapt Norm {_both(scores[z, PAPERS])}"
        ),
    )
    yield Claim(
        text=f"(ours) {name}: at least {TIMES:g} times the rate of Adapt Norm at c = "
        f"{HEURISTIC:g}, and within {slack} of the accuracy without compression",
        holds=all(
            scores[z, OURS].rate >= TIMES * scores[z, PAPERS].rate
            and slack.allows(scores[z, OURS], scores[z, NONE])
            for z in every
        ),
        detail=_by_noise(
            runs,
            lambda z: (
                f"ours {_both(scores[z, OURS])}, Adapt Norm {_both(scores[z, PAPERS])}: "
                f"{scores[z, OURS].rate / scores[z, PAPERS].rate:.2g} times; none "
                f"{_accuracy(scores[z, NONE])}"
            ),
        ),
    )


def _epsilon_as_said(number: int, printed: Printed) -> Claim:
    assert printed.said_epsilon is not None  # checked by the caller
    highest = printed.said_multiplier
    epsilons = {z: paper_epsilon(printed, z) for z in sorted({*printed.multipliers, highest})}
    last = epsilons[highest]
    return Claim(
        text=f"table {number}: the paper's highest noise multiplier, {highest:g}, is roughly "
        f"epsilon {printed.said_epsilon:g}, to a factor of {ROUGHLY:g}, at delta = "
        f"1/{printed.clients:,}",
        holds=printed.said_epsilon / ROUGHLY <= last <= printed.said_epsilon * ROUGHLY,
        detail="with Poisson cohorts "
        + ", ".join(f"z = {z:g} is epsilon {brief(epsilon)}" for z, epsilon in epsilons.items())
        + f"; {printed.cohort:,} of {printed.clients:,} clients, {printed.rounds:,} rounds",
    )


def _norm(error: float) -> Method:
    return Method("adapt_norm", error)


def _rises(values: Sequence[float]) -> bool:
    return values == sorted(values) and values[-1] > values[0]


def _by_noise(runs: Runs, describe: Callable[[float], str]) -> str:
    return "; ".join(f"z = {z:g} ({_epsilon(runs, z)}): {describe(z)}" for z in runs.multipliers)


def _epsilon(runs: Runs, multiplier: float) -> str:
    return f"epsilon {brief(runs.epsilons[multiplier])}"


def _list(epsilons: Iterable[float]) -> str:
    return ", ".join(map(brief, epsilons))


def _accuracy(scores: Scores) -> str:
    return f"{scores.accuracy:.4f} ± {scores.stderr:.4f}"


def _both(scores: Scores) -> str:
    return f"{_accuracy(scores)} / {scores.rate:.3g}"


def _genie(runs: Runs, multiplier: float) -> str:
    return _both(runs.scores[multiplier, runs.genie(multiplier)])


# Sizes.

SMALL = Size(
    workloads=(data.SMALL_1,),
    multipliers=((0.5, 1.0, 2.0),),
    rates=(2, 4, 8, 16, 32, 64),
    repeats=2,
    slack=Slack(share=0.02, errors=2.0),
)
RECURRENT = replace(SMALL, multipliers=((0.5, 1.0),), rates=(4, 16, 64))
FULL = Size(
    workloads=(data.PAPER_1,),
    multipliers=(data.TABLE_1.multipliers,),
    rates=tuple(2.0**power for power in range(1, 14)),
    repeats=2,
    slack=Slack(share=0.01, errors=0.0),
    gpu=True,
)
_SMALL_TASKS = (data.SMALL_1, data.SMALL_2, data.SMALL_3)
_PAPER_TASKS = (data.PAPER_1, data.PAPER_2, data.PAPER_3)
FIGURES = tuple(
    Figure(name, f"{title} (paper 002)", experiment, small, paper, trains=True)
    for name, title, experiment, small, paper in (
        (
            "002-fig1",
            "accuracy of private training by fixed rate",
            figure_1,
            replace(
                SMALL, workloads=_SMALL_TASKS, multipliers=((0.5, 1.0),) * 3, rates=(4, 16, 64, 256)
            ),
            replace(FULL, workloads=_PAPER_TASKS, multipliers=((0.1, 0.3, 0.5),) * 3),
        ),
        (
            "002-fig2",
            "accuracy by rate of adaptive compression",
            figure_2,
            replace(SMALL, multipliers=((1.0, 2.0),), rates=(2, 8, 32, 128)),
            replace(FULL, workloads=_PAPER_TASKS, multipliers=((0.3,),) * 3),
        ),
        (
            "002-table1",
            "adaptive compression, handwriting",
            partial(table, 1, data.TABLE_1),
            SMALL,
            FULL,
        ),
        (
            "002-table2",
            "adaptive compression, next character",
            partial(table, 2, data.TABLE_2),
            replace(RECURRENT, workloads=(data.SMALL_2,)),
            replace(FULL, workloads=(data.PAPER_2,), multipliers=(data.TABLE_2.multipliers,)),
        ),
        (
            "002-table3",
            "adaptive compression, next word",
            partial(table, 3, data.TABLE_3),
            replace(RECURRENT, workloads=(data.SMALL_3,)),
            replace(FULL, workloads=(data.PAPER_3,), multipliers=(data.TABLE_3.multipliers,)),
        ),
    )
)

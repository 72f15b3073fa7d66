"""Figures 2 to 6 and 9 of paper 003: the traffic, accuracy and actual privacy of sketched training.

Accuracies are drawn by a device's traffic, in rounds of uncompressed training, as in the paper. The
legend says for every curve whether it is private at all; numbers and claims have the epsilon of all
rounds together beside the one that the paper claims for each round.

A claim's text says how it is checked. Details have accuracies with their standard errors over seeds
and, beside every curve, the privacy that holds: the epsilon of all rounds together, or "no DP
guarantee". The paper's own epsilon is of one round, for neighbours that differ in one coordinate of
a random gradient; it is not differential privacy. Claims marked (ours) are about the private mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np

from sfumato.reproduce.diffsketch import data, runs
from sfumato.reproduce.diffsketch.data import DELTA, PRINTED_RATE, Quantised, Size, Task
from sfumato.reproduce.diffsketch.runs import Run, Trial, trial
from sfumato.reproduce.learning.runs import AT_ONCE, one_thread
from sfumato.reproduce.panels import Panel, Reading, Series, brief, numbered_series
from sfumato.reproduce.runner import Claim, Experiment, Figure, by_workload, repeat

ACCURACY = "accuracy on test examples"
TRAFFIC = "rounds by rate: what a device has sent"
LETTERS = "abcdefgh"
NOT_PRIVATE = "no DP guarantee"  # as in `learn.diffsketch`, which needs PyTorch
HOLDS = f"what is claimed; what holds: {NOT_PRIVATE}"
GAIN = 0.05  # the paper's least gain over cpSGD
MARGIN = 0.02  # a "marginal decrease" in accuracy
ORDERS = 10.0  # "orders of magnitude" is at least this factor
REACHED = 0.9  # share of the uncompressed accuracy at which traffic is compared
MOST = 0.5  # "most" of the rounds is more than this share
ERRORS = 2.0  # standard errors within which two accuracies count as equal
SERIES: Mapping[str, Series] = {
    "plain": Series(f"uncompressed ({NOT_PRIVATE})", "grey", "x"),
    "paper": Series(f"DiffSketch as printed ({NOT_PRIVATE})", "red", "s"),
    "sketch": Series(f"sketches ({NOT_PRIVATE})", "orange", "^"),
    "sketch corrected": Series(f"sketches, error correction ({NOT_PRIVATE})", "pink", "v"),
    "cpsgd": Series(f"cpSGD, table 1 ({NOT_PRIVATE})", "blue", "o"),
    "cpsgd rotated": Series(f"cpSGD rotated ({NOT_PRIVATE})", "sky", "D"),
    "vector noise": Series("noise on vectors, each device", "sky", "D"),
    "sketch noise": Series("noise on sketches, each device", "blue", "o"),
    "gaussian": Series("ours: noise on the sum of sketches", "black", "o", dashed=True),
}

Trials = Sequence[Trial]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a figure is run."""

    tasks: tuple[Task, ...]
    sizes: tuple[tuple[Size, ...], ...] = ()  # of the sketches, for each task
    rows: tuple[Quantised, ...] = ()  # of table 1
    epsilon: float = 1.0  # per round, as the paper would claim it
    total: float = 10.0  # of all rounds, for ours
    targets: tuple[float, ...] = (1.0,)  # of figure 9
    repeats: int

    @property
    def panels(self) -> list[tuple[str, Task, tuple[Size, ...]]]:
        """The key, task and sizes of each panel."""
        return list(zip(LETTERS, self.tasks, self.sizes, strict=False))


def _experiment(
    heading: str,
    extent: Extent,
    trials: Trials,
    panels: Sequence[Panel],
    claims: Callable[[Trials], Iterable[Claim]],
    series: Mapping[str, Series] = SERIES,
    readings: Callable[[Trial], Iterable[Reading]] | None = None,
) -> Experiment:
    """Train every trial once per seed; `readings` replaces the accuracies by traffic."""
    tasks = {each.task.name: each.task for each in trials}
    federated = {name: task.load() for name, task in tasks.items()}
    runs.load_compiled_kernels()
    readings_of = readings or _accuracies

    def gather(results: list[Run]) -> Trials:
        groups = by_workload(results, extent.repeats)
        return [replace(each, runs=group) for each, group in zip(trials, groups, strict=True)]

    return Experiment(
        heading=heading,
        jobs=repeat(trials, extent.repeats),
        stage=lambda each: f"{each.series}: {each.exchange.label}",
        run=lambda job: runs.train(job.workload, federated[job.workload.task.name], job.seed),
        gather=gather,
        panels=panels,
        readings=lambda trials: chain.from_iterable(map(readings_of, trials)),
        claims=lambda trials, _: claims(trials),
        series=series,
        labels=min(2, len(panels)),  # labels that say "no DP guarantee" are long
        at_once=AT_ONCE,
        around=one_thread,
    )


def _accuracies(each: Trial) -> Iterator[Reading]:
    for run in each.runs:
        for round, y in zip(run.rounds, run.accuracies, strict=True):
            more = {"round": round, **each.fields}
            yield Reading(each.panel, each.series, round / each.rate, float(y), more)


def _accuracy_panel(key: str, title: str, task: Task) -> Panel:
    return Panel(key, title, task.data, TRAFFIC, ACCURACY, linear=True)


def by_place(trials: Trials) -> dict[tuple[str, str], Trial]:
    """The curves by panel and series."""
    return {(each.panel, each.series): each for each in trials}


# Figure 2.


def figure_2(extent: Extent) -> Experiment:
    """Comparison with cpSGD at equal bits."""
    (task,) = extent.tasks
    keyed = list(zip(LETTERS, extent.rows, strict=False))
    trials, panels = [], []
    for panel, row in keyed:
        add, size = partial(trial, task, panel), data.EQUAL_RATE[row.bits]
        multiplier = runs.sampled_multiplier(row.epsilon, task.cohort, task.clients, task.rounds)
        ours = add("gaussian", runs.noised_sketch(task, size, multiplier, "sum"))
        trials += [
            add("plain", runs.plain()),
            add("paper", runs.printed(size, row.epsilon, padding=0), row.epsilon),
            add("cpsgd", runs.quantised(task, row, rotate=False), row.epsilon),
            add("cpsgd rotated", runs.quantised(task, row, rotate=True), row.epsilon),
            ours,
        ]
        title = f"“epsilon {row.epsilon:g}”, {row.bits} bits\nours: {ours.privacy}"
        panels.append(_accuracy_panel(panel, title, task))
    heading = "Paper 003, figure 2: DiffSketch and cpSGD"
    return _experiment(heading, extent, trials, panels, partial(claims_2, keyed))


def claims_2(rows: Sequence[tuple[str, Quantised]], trials: Trials) -> Iterator[Claim]:
    """The claims about cpSGD."""
    curves = by_place(trials)
    for panel, row in rows:
        name = f"2({panel}) epsilon {row.epsilon:g}, {row.bits} bits"
        paper, raw, turned, plain, ours = (
            curves[panel, series]
            for series in ("paper", "cpsgd", "cpsgd rotated", "plain", "gaussian")
        )
        yield Claim(
            text=f"{name}: DiffSketch is at least {100 * GAIN:g} points above cpSGD",
            holds=paper.final - raw.final >= GAIN,
            detail=f"{_end(paper)}; {_end(raw)}; rotated, as its authors advise: "
            f"{_end(turned)}; without compression {_end(plain)}",
        )
        yield _same_privacy(name, (paper, raw, turned))
        yield _theorem_of_cpsgd(name, row, raw)
        yield _useful(name, ours, plain)


def _theorem_of_cpsgd(name: str, row: Quantised, raw: Trial) -> Claim:
    """The claim about the paper's table 1."""
    from sfumato.learn.diffsketch import BinomialVector

    task, exchange = raw.task, raw.exchange
    assert isinstance(exchange, BinomialVector)  # the series is cpSGD's
    sending = exchange.epsilon(task.parameters, task.cohort * row.coins, exchange.clip)
    every = exchange.epsilon(task.parameters, task.clients * row.coins, exchange.clip)
    needed = math.ceil(4 * 23 * math.log(10 * task.parameters / exchange.delta) / task.cohort)
    enough = runs.quantised(task, row._replace(coins=needed), rotate=False)
    assert isinstance(enough, BinomialVector)  # from `runs.quantised`
    then = enough.epsilon(task.parameters, task.cohort * needed, enough.clip)
    return Claim(
        text=f"{name}: table 1's {row.levels} levels and {row.coins} coins give epsilon "
        f"{row.epsilon:g} a round by cpSGD's own theorem, with the coins of the {task.cohort} "
        "devices that send",
        holds=sending <= row.epsilon,
        detail=f"with their coins the theorem {_theorem(sending)}; with those of all "
        f"{task.clients:,} devices, of which {task.clients - task.cohort:,} send nothing, it "
        f"{_theorem(every)}; it takes {needed} coins a device "
        f"({math.ceil(math.log2(row.levels + needed))} bits) to apply, and then {_theorem(then)}; "
        f"table 1 calls {row.bits} bits {PRINTED_RATE[row.bits]:g} times less, and "
        f"32/{row.bits} = {32 / row.bits:g}",
    )


def _theorem(epsilon: float) -> str:
    return f"says {brief(epsilon)}" if math.isfinite(epsilon) else "does not apply"


# Figures 3 and 4.


def against_noise(number: int, extent: Extent) -> Experiment:
    """Comparison with noise on vectors and on sketches."""
    from sfumato.learn.diffsketch import multiplier_for

    (task,), (sizes,), epsilon = extent.tasks, extent.sizes, extent.epsilon
    each = multiplier_for(epsilon, DELTA)
    multiplier = runs.sampled_multiplier(extent.total, task.cohort, task.clients, task.rounds)
    whole = task.cohort == task.clients  # every worker in every round: errors are corrected
    trials, panels = [], []
    for panel, size in zip(LETTERS, sizes, strict=False):
        # For the recurrent model, padding longer than the vector would be too slow.
        padding = runs.padding_for(task, size, epsilon) if whole else task.parameters
        add = partial(trial, task, panel)
        printed = runs.printed(size, epsilon, padding=padding, correction=whole)
        paper = add("paper", printed, epsilon)
        noised = add("sketch noise", runs.noised_sketch(task, size, each, "device"), epsilon)
        ours = add("gaussian", runs.noised_sketch(task, size, multiplier, "sum"))
        trials += [
            add("plain", runs.plain()),
            paper,
            add("sketch", runs.sketched(size)),
            add("vector noise", runs.noised_vector(task, each, "device"), epsilon),
            noised,
            ours,
        ]
        if whole:
            trials.append(add("sketch corrected", runs.sketched(size, correction=True)))
        title = (
            f"{size}, {paper.rate:.1f} times less, “epsilon {epsilon:g}”\nnoise on each device: "
            f"{noised.privacy}\nours: {ours.privacy}"
        )
        panels.append(_accuracy_panel(panel, title, task))
    names = [(panel, str(size)) for panel, size in zip(LETTERS, sizes, strict=False)]
    heading = f"Paper 003, figure {number}: DiffSketch and noise"
    return _experiment(heading, extent, trials, panels, partial(noise_claims, number, names))


def noise_claims(number: int, panels: Sequence[tuple[str, str]], trials: Trials) -> Iterator[Claim]:
    """The claims about noise, in figures 3 and 4."""
    curves = by_place(trials)
    for panel, size in panels:
        name = f"{number}({panel}) {size}"
        paper, plain, vector, table, sketch = (
            curves[panel, series]
            for series in ("paper", "plain", "vector noise", "sketch noise", "sketch")
        )
        level = REACHED * plain.final
        mine, other = paper.sent_for(level), vector.sent_for(level)
        yield Claim(
            text=f"{name}: DiffSketch takes {ORDERS:g} times less communication than noise on "
            f"vectors to reach {REACHED:.0%} of the accuracy without noise or compression",
            holds=math.isfinite(mine) and other >= ORDERS * mine,
            detail=f"to {level:.3f}: DiffSketch {_worth(mine)}, noise on vectors "
            f"{_worth(other)}, neither {_worth(plain.sent_for(level))}; ends: {_end(paper)}; "
            f"{_end(vector)}",
        )
        yield Claim(
            text=f"{name}: DiffSketch is more accurate than noise on sketches in every round",
            holds=_is_better(paper, table),
            detail=f"{_end(paper)}; {_end(table)}",
        )
        yield Claim(
            text=f"{name}: DiffSketch loses at most {100 * MARGIN:g} points to uncompressed "
            "training",
            holds=paper.final >= plain.final - MARGIN,
            detail=f"{_end(paper)}; {_end(plain)}; sketches alone: {_end(sketch)}",
        )
        yield _same_privacy(name, (paper, vector, table))
        if (panel, "sketch corrected") in curves:
            corrected = curves[panel, "sketch corrected"]
            yield Claim(
                text=f"{name}: error correction improves accuracy",
                holds=_is_better(corrected, sketch),
                detail=f"with {_end(corrected)}; without {_end(sketch)}",
            )
        yield _useful(name, curves[panel, "gaussian"], plain)


def _same_privacy(name: str, every: Sequence[Trial]) -> Claim:
    return Claim(
        text=f"{name}: every method is epsilon {every[0].claimed_per_round:g} private in each "
        "round",
        holds=all(math.isfinite(each.epsilon) for each in every),
        detail="; ".join(f"{each.series}: {each.privacy}" for each in every)
        + f" ({every[0].task.rounds:,} rounds, which the paper does not add up)",
    )


def _useful(name: str, private: Trial, plain: Trial) -> Claim:
    return Claim(
        text=f"(ours) {name}: with {private.privacy}, noise on the sum of clipped sketches, it is "
        f"within {100 * MARGIN:g} points of uncompressed training without noise",
        holds=private.final >= plain.final - MARGIN,
        detail=f"{_end(private)}; {_end(plain)}",
    )


# Figure 5.


def figure_5(extent: Extent) -> Experiment:
    """Accuracy by traffic, over rates; sketches alone."""
    trials, panels = [], []
    series = {"plain": SERIES["plain"]}
    for panel, task, sizes in extent.panels:
        trials.append(trial(task, panel, "plain", runs.plain()))
        for size in sizes:
            each = trial(task, panel, str(size), runs.sketched(size))
            label = f"{each.series}: {each.rate:.1f} times ({NOT_PRIVATE})"
            series[each.series] = numbered_series(label, len(series) - 1)
            trials.append(each)
        panels.append(_accuracy_panel(panel, f"{task.name}\n{NOT_PRIVATE}", task))
    heading = "Paper 003, figure 5: accuracy by rate"
    return _experiment(heading, extent, trials, panels, claims_5, series)


def claims_5(trials: Trials) -> Iterator[Claim]:
    """The claims about rates, from the lowest to the highest."""
    for panel, (plain, *every) in _by_panel(trials):
        level = REACHED * plain.final
        traffic = [each.sent_for(level) for each in every]
        name = f"5({panel}) {plain.task.name}"
        yield Claim(
            text=f"{name}: the higher the rate, the less is sent until {REACHED:.0%} of the "
            "uncompressed accuracy",
            holds=all(math.isfinite(each) for each in traffic)
            and all(np.diff(traffic) < 0)
            and traffic[0] < plain.sent_for(level),
            detail=f"to {level:.3f}: uncompressed {_worth(plain.sent_for(level))}, "
            + ", ".join(
                f"{each.rate:.1f} times {_worth(volume)}"
                for each, volume in zip(every, traffic, strict=True)
            ),
        )
        yield Claim(
            text=f"{name}: a higher rate ends no more accurate, beyond chance",
            holds=not any(_is_better(high, low) for low, high in pairwise(every)),
            detail="; ".join(_end(each) for each in (*every, plain)),
        )


# Figure 6.


def figure_6(extent: Extent) -> Experiment:
    """Theorem 2's epsilon by rate, a median over workers and rounds; drawn where it is finite."""

    def readings(each: Trial) -> Iterator[Reading]:
        more = {**each.fields, "applies": float(np.isfinite(each.claimed).mean())}
        for run in each.runs:
            median = float(np.median(run.claimed))
            if math.isfinite(median):
                yield Reading(
                    each.panel, f"{each.series}".split(" at ")[0], each.rate, median, more
                )

    paddings = {"no padding": 0, "padding": 1}
    trials = [
        trial(
            task,
            panel,
            key,
            runs.printed(size, extent.epsilon, padding=times * task.parameters),
            extent.epsilon,
        )
        for panel, task, sizes in extent.panels
        for key, times in paddings.items()
        for size in sizes
    ]
    panels = [
        Panel(key, f"{task.name}\n{HOLDS}", task.data, "rate", "theorem 2's “epsilon”, the median")
        for key, task, _ in extent.panels
    ]
    series = {
        "no padding": numbered_series(f"no padding ({NOT_PRIVATE})", 0),
        "padding": numbered_series(f"padded to twice the length ({NOT_PRIVATE})", 1),
    }
    return _experiment(
        "Paper 003, figure 6: what is claimed by rate",
        extent,
        trials,
        panels,
        claims_6,
        series,
        readings,
    )


def claims_6(trials: Trials) -> Iterator[Claim]:
    """The claims about curves of growing rate and no padding."""
    for panel, every in _by_panel(each for each in trials if each.series == "no padding"):
        name = f"6({panel}) {every[0].task.name}"
        medians = [float(np.median(each.claimed)) for each in every]
        shares = [float(np.isfinite(each.claimed).mean()) for each in every]
        detail = "; ".join(
            f"{each.rate:.1f} times: median {brief(median)}, and it applies to {share:.0%} of "
            "workers' rounds"
            for each, median, share in zip(every, medians, shares, strict=True)
        )
        yield Claim(
            text=f"{name}: theorem 2's epsilon falls as the rate grows (medians; infinite "
            "where it does not apply)",
            holds=all(high < low or low == high == math.inf for low, high in pairwise(medians))
            and math.isfinite(medians[-1]),
            detail=detail,
        )
        yield Claim(
            text=f"{name}: theorem 2 applies to every worker and round without padding",
            holds=min(shares) == 1.0,
            detail=detail,
        )
        yield Claim(
            text=f"{name}: that epsilon is differential privacy",
            holds=False,
            detail="the hash functions are public, so a sketch is a function of the vector: 0 "
            "and (1, 0, …, 0) are told apart surely, and epsilon is infinite",
        )


# Figure 9.


def figure_9(extent: Extent) -> Experiment:
    """Theorem 2's epsilon over all workers and rounds, as a distribution function."""
    (task,), ((size,),) = extent.tasks, extent.sizes
    first = extent.targets[0]
    paddings = [(f"no padding, target {first:g}", 0, first)]
    paddings += [
        (f"padded for {target:g}", runs.padding_for(task, size, target), target)
        for target in extent.targets
    ]
    trials = [
        trial(task, "a", key, runs.printed(size, target, padding=padding, correction=True), target)
        for key, padding, target in paddings
    ]

    def readings(each: Trial) -> Iterator[Reading]:
        more = {**each.fields, "noised": each.noised}
        for run in each.runs:
            for x in np.geomspace(0.01, 20, 34):
                share = float(np.mean(run.claimed <= x))
                yield Reading("a", each.series, float(x), share, more)

    title = f"{task.name}, {size}, {trials[0].rate:.1f} times\n{HOLDS}"
    value, share = "theorem 2's “epsilon” of a worker's round", "share of them at or below"
    return _experiment(
        "Paper 003, figure 9: what is claimed, by round",
        extent,
        trials,
        [Panel("a", title, task.data, value, share, linear=True)],
        claims_9,
        {
            each.series: numbered_series(f"{each.series} ({NOT_PRIVATE})", place)
            for place, each in enumerate(trials)
        },
        readings,
    )


def claims_9(trials: Trials) -> Iterator[Claim]:
    """The claims about rounds that are validated."""
    for each in trials:
        target = each.claimed_per_round
        assert target is not None  # figure 9 is about validation
        share = float(np.mean(each.claimed <= target))
        yield Claim(
            text=f"9 {each.series}: most workers' rounds are within epsilon {target:g} by "
            "theorem 2, so that noise is added in a few cases only",
            holds=share > MOST,
            detail=f"{share:.1%} of {each.claimed.size:,}; median "
            f"{brief(float(np.median(each.claimed)))}; noise was added in {each.noised:.1%}; "
            f"privacy that holds: {each.privacy}",
        )


def _by_panel(trials: Iterable[Trial]) -> Iterator[tuple[str, list[Trial]]]:
    return ((key, list(group)) for key, group in groupby(trials, lambda each: each.panel))


def _is_better(one: Trial, other: Trial) -> bool:
    """Whether one ends more accurate, by more than chance explains."""
    return one.final > other.final + ERRORS * math.hypot(one.stderr, other.stderr)


def _end(each: Trial) -> str:
    return (
        f"{each.series} {each.final:.4f} ± {each.stderr:.4f} at {each.rate:.1f} times "
        f"({each.privacy})"
    )


def _worth(communication: float) -> str:
    return f"{communication:.3g} rounds' worth" if math.isfinite(communication) else "never"


def _figure(
    name: str, title: str, experiment: Callable[[Extent], Experiment], **options: Any
) -> Figure:
    """A figure; at small scale tasks are small, and there are two repeats instead of five."""
    small = {data.DIGITS: data.SMALL_DIGITS, data.DEVICES: data.SMALL_DEVICES}
    small[data.ROLE_TASK] = data.SMALL_ROLES
    paper = Extent(**options, repeats=5)
    tasks = tuple(small[task] for task in paper.tasks)
    extents = replace(paper, tasks=tasks, targets=paper.targets[:1], repeats=2), paper
    return Figure(name, f"{title} (paper 003)", experiment, *extents, trains=True)


_RATES: Mapping[str, Any] = {
    "tasks": (data.DIGITS, data.ROLE_TASK),
    "sizes": (
        tuple(Size(7, width) for width in (45, 22, 15, 11)),  # 25, 50, 75, 100 times
        tuple(Size(10, width) for width in (245, 190, 100)),  # 16, 21, 40 times
    ),
}
FIGURES = (
    _figure(
        "003-fig2",
        "sketched training and cpSGD",
        figure_2,
        tasks=(data.DEVICES,),
        rows=data.TABLE_1,
    ),
    _figure(
        "003-fig3",
        "sketched SGD and noise, digits",
        partial(against_noise, 3),
        tasks=(data.DIGITS,),
        sizes=(data.DIGIT_SIZES,),
    ),
    _figure(
        "003-fig4",
        "sketched averaging and noise, roles",
        partial(against_noise, 4),
        tasks=(data.ROLE_TASK,),
        sizes=(data.ROLE_SIZES,),
        epsilon=10.0,  # "slightly larger", says the paper
    ),
    _figure("003-fig5", "accuracy by what sketches send", figure_5, **_RATES),
    _figure("003-fig6", "the epsilon that is claimed, by rate", figure_6, **_RATES),
    _figure(
        "003-fig9",
        "the epsilon that is claimed, by round",
        figure_9,
        tasks=(data.DIGITS,),
        sizes=((Size(7, 15),),),
        targets=(1.0, 0.1),  # the text says 1, the caption 0.1; that pads by 89 times the model
    ),
)

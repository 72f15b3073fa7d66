"""Figures 2 to 6 and 9 of paper 003: what sketched training sends, how accurate it is, and which
privacy holds.

Accuracies are drawn by what a device has sent, in rounds of uncompressed training, as in the paper.
The legend says of every curve whether it is private at all; numbers and claims have the epsilon of
all rounds together beside the one that the paper claims for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.reproduce import Figure, Outcome, Progress, Scale
from sfumato.reproduce.diffsketch import claims as diffsketch_claims
from sfumato.reproduce.diffsketch import data, runs
from sfumato.reproduce.diffsketch.data import DELTA, Quantised, Size, Task
from sfumato.reproduce.diffsketch.runs import Found, Job
from sfumato.reproduce.panels import Panel, Reading, Series, draw, lines

FIRST_SEED = 1
ACCURACY = "accuracy on test examples"
SENT = "rounds by rate: what a device has sent"
LETTERS = "abcdefgh"
NOT_PRIVATE = "no DP guarantee"  # as `learn.diffsketch` says it, which needs PyTorch

# Colours of Okabe and Ito, which people with colour blindness can tell apart.
SERIES: Mapping[str, Series] = {
    "plain": Series(label=f"uncompressed ({NOT_PRIVATE})", colour="#999999", marker="x"),
    "paper": Series(label=f"DiffSketch as printed ({NOT_PRIVATE})", colour="#D55E00", marker="s"),
    "sketch": Series(label=f"sketches ({NOT_PRIVATE})", colour="#E69F00", marker="^"),
    "sketch corrected": Series(
        label=f"sketches, error correction ({NOT_PRIVATE})", colour="#CC79A7", marker="v"
    ),
    "cpsgd": Series(label=f"cpSGD, table 1 ({NOT_PRIVATE})", colour="#0072B2", marker="o"),
    "cpsgd rotated": Series(label=f"cpSGD rotated ({NOT_PRIVATE})", colour="#56B4E9", marker="D"),
    "vector noise": Series(label="noise on vectors, each device", colour="#56B4E9", marker="D"),
    "sketch noise": Series(label="noise on sketches, each device", colour="#0072B2", marker="o"),
    "gaussian": Series(
        label="ours: noise on the sum of sketches", colour="#000000", marker="o", dashed=True
    ),
}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "os^vDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a figure is run."""

    tasks: tuple[Task, ...]
    sizes: tuple[tuple[Size, ...], ...]  # of the sketches, for each task
    rows: tuple[Quantised, ...] = ()  # of table 1
    epsilon: float = 1.0  # a round, that the paper would claim
    total: float = 10.0  # of all rounds, for ours
    targets: tuple[float, ...] = (1.0,)  # of figure 9
    repeats: int

    @property
    def seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats)


def figure_2(name: str, extent: Extent, progress: Progress) -> Outcome:
    """Against cpSGD at as many bits."""
    (task,) = extent.tasks
    jobs, keyed = [], list(zip(LETTERS, extent.rows, strict=False))
    for panel, row in keyed:
        size = data.EQUAL_RATE[row.bits]
        multiplier = runs.sampled_multiplier(row.epsilon, task.cohort, task.clients, task.rounds)
        jobs += [
            Job(panel, "plain", runs.plain()),
            Job(panel, "paper", runs.printed(size, row.epsilon, padding=0), row.epsilon),
            Job(panel, "cpsgd", runs.quantised(task, row, rotate=False), row.epsilon),
            Job(panel, "cpsgd rotated", runs.quantised(task, row, rotate=True), row.epsilon),
            Job(panel, "gaussian", runs.noised_sketch(task, size, multiplier, "sum")),
        ]
    found = runs.train_all(task, jobs, extent.seeds, progress)
    curves = diffsketch_claims.by_place(found)
    titles = {
        panel: f"“epsilon {row.epsilon:g}”, {row.bits} bits\nours: "
        f"{curves[panel, 'gaussian'].privacy}"
        for panel, row in keyed
    }
    return _outcome(
        name,
        "Paper 003, figure 2: DiffSketch and cpSGD",
        found,
        titles,
        diffsketch_claims.figure_2(keyed, curves),
        extent,
    )


def against_noise(number: int, name: str, extent: Extent, progress: Progress) -> Outcome:
    """Figures 3 and 4: against noise on vectors and on sketches."""
    from sfumato.learn.diffsketch import multiplier_for

    (task,), (sizes,) = extent.tasks, extent.sizes
    each = multiplier_for(extent.epsilon, DELTA)
    multiplier = runs.sampled_multiplier(extent.total, task.cohort, task.clients, task.rounds)
    whole = task.cohort == task.clients  # every worker in every round: errors are corrected
    keyed = list(zip(LETTERS, sizes, strict=False))
    jobs = []
    for panel, size in keyed:
        # Longer padding than the vector would not fit a round of the recurrent model.
        padding = runs.padding_for(task, size, extent.epsilon) if whole else task.parameters
        printed = runs.printed(size, extent.epsilon, padding=padding, correction=whole)
        jobs += [
            Job(panel, "plain", runs.plain()),
            Job(panel, "paper", printed, extent.epsilon),
            Job(panel, "sketch", runs.sketched(size)),
            Job(panel, "vector noise", runs.noised_vector(task, each, "device"), extent.epsilon),
            Job(
                panel, "sketch noise", runs.noised_sketch(task, size, each, "device"),
                extent.epsilon,
            ),
            Job(panel, "gaussian", runs.noised_sketch(task, size, multiplier, "sum")),
        ]  # fmt: skip
        if whole:
            jobs.append(Job(panel, "sketch corrected", runs.sketched(size, correction=True)))
    found = runs.train_all(task, jobs, extent.seeds, progress)
    curves = diffsketch_claims.by_place(found)
    titles = {
        panel: f"{size}, {curves[panel, 'paper'].rate:.1f} times less, “epsilon "
        f"{extent.epsilon:g}”\nnoise on each device: {curves[panel, 'sketch noise'].privacy}"
        f"\nours: {curves[panel, 'gaussian'].privacy}"
        for panel, size in keyed
    }
    return _outcome(
        name,
        f"Paper 003, figure {number}: DiffSketch and noise",
        found,
        titles,
        diffsketch_claims.against_noise(number, [(p, str(size)) for p, size in keyed], curves),
        extent,
    )


def figure_5(name: str, extent: Extent, progress: Progress) -> Outcome:
    """Accuracy by what was sent, over rates; sketches alone."""
    found: list[Found] = []
    titles, panels = {}, []
    series = {"plain": SERIES["plain"]}
    for place, (panel, task, sizes) in enumerate(
        zip(LETTERS, extent.tasks, extent.sizes, strict=False)
    ):
        jobs = [Job(panel, "plain", runs.plain())]
        jobs += [Job(panel, str(size), runs.sketched(size)) for size in sizes]
        made = runs.train_all(task, jobs, extent.seeds, _part(progress, place, len(extent.tasks)))
        found += made
        titles[panel] = f"{task.name}\n{NOT_PRIVATE}"
        panels.append((panel, [(each.job.series, each.rate) for each in made[1:]]))
        for each in made[1:]:
            label = f"{each.job.series}: {each.rate:.1f} times ({NOT_PRIVATE})"
            series[each.job.series] = _style(label, len(series) - 1)
    return _outcome(
        name,
        "Paper 003, figure 5: accuracy by rate",
        found,
        titles,
        diffsketch_claims.figure_5(panels, diffsketch_claims.by_place(found)),
        extent,
        series,
    )


def figure_6(name: str, extent: Extent, progress: Progress) -> Outcome:
    """Theorem 2's epsilon by rate, a median over workers and rounds; drawn where it is finite."""
    panels, readings, numbers, claimed = [], [], [], []
    series = {
        "no padding": _style(f"no padding ({NOT_PRIVATE})", 0),
        "padding": _style(f"padded to twice the length ({NOT_PRIVATE})", 1),
    }
    for place, (panel, task, sizes) in enumerate(
        zip(LETTERS, extent.tasks, extent.sizes, strict=False)
    ):
        jobs = [
            Job(panel, key, runs.printed(size, extent.epsilon, padding=padding), extent.epsilon)
            for key, padding in (("no padding", 0), ("padding", task.parameters))
            for size in sizes
        ]
        made = runs.train_all(task, jobs, extent.seeds, _part(progress, place, len(extent.tasks)))
        about = Panel(
            key=panel,
            title=f"{task.name}\nwhat is claimed; what holds: {NOT_PRIVATE}",
            data=task.data,
            x_name="rate",
            y_name="theorem 2's “epsilon”, the median",
        )
        panels.append(about)
        for each in made:
            readings = [
                Reading(panel, each.job.series, each.rate, median)
                for curve in each.curves
                if math.isfinite(median := float(np.median(curve.claimed)))
            ]
            share = float(np.isfinite(each.claimed).mean())
            numbers += [
                {**line, **runs.fields(each), "applies": share}
                for line in lines(name, [about], readings, extent.seeds)
            ]
        claimed.append((panel, made[: len(sizes)]))
    drawn = [panel for panel in panels if any(line["panel"] == panel.key for line in numbers)]
    return Outcome(
        numbers=numbers,
        claims=diffsketch_claims.figure_6(claimed),
        draw=lambda: _draw("Paper 003, figure 6: what is claimed by rate", drawn, numbers, series),
    )


def figure_9(name: str, extent: Extent, progress: Progress) -> Outcome:
    """Theorem 2's epsilon over all workers and rounds: which share is below a value."""
    (task,), ((size,),) = extent.tasks, extent.sizes
    first = extent.targets[0]
    paddings = [(f"no padding, target {first:g}", 0, first)]
    paddings += [
        (f"padded for {target:g}", runs.padding_for(task, size, target), target)
        for target in extent.targets
    ]
    jobs = [
        Job("a", key, runs.printed(size, target, padding=padding, correction=True), target)
        for key, padding, target in paddings
    ]
    found = runs.train_all(task, jobs, extent.seeds, progress)
    panel = Panel(
        key="a",
        title=f"{task.name}, {size}, {found[0].rate:.1f} times\nwhat is claimed; what holds: "
        f"{NOT_PRIVATE}",
        data=task.data,
        x_name="theorem 2's “epsilon” of a worker's round",
        y_name="share of them at or below",
        linear=True,
    )
    grid = np.geomspace(0.01, 20, 34)
    numbers: list[dict[str, Any]] = []
    series = {}
    for place, each in enumerate(found):
        key = each.job.series
        series[key] = _style(f"{key} ({NOT_PRIVATE})", place)
        readings = [
            Reading("a", key, float(x), float(np.mean(curve.claimed <= x)))
            for curve in each.curves
            for x in grid
        ]
        made = lines(name, [panel], readings, extent.seeds)
        numbers += [{**line, **runs.fields(each), "noised": each.noised} for line in made]
    return Outcome(
        numbers=numbers,
        claims=diffsketch_claims.figure_9(found),
        draw=lambda: _draw(
            "Paper 003, figure 9: what is claimed, by round", [panel], numbers, series
        ),
    )


def _outcome(
    name: str,
    title: str,
    found: Sequence[Found],
    titles: Mapping[str, str],
    claims: Sequence[Any],
    extent: Extent,
    series: Mapping[str, Series] = SERIES,
) -> Outcome:
    """Accuracies by what was sent."""
    tasks = {each.job.panel: each.task for each in found}
    panels = [
        Panel(key=key, title=text, data=tasks[key].data, x_name=SENT, y_name=ACCURACY, linear=True)
        for key, text in titles.items()
    ]
    about = {panel.key: panel for panel in panels}
    numbers: list[dict[str, Any]] = []
    for each in found:
        key = each.job.panel
        readings = [
            Reading(key, each.job.series, round / each.rate, float(y))
            for curve in each.curves
            for round, y in zip(curve.rounds, curve.accuracies, strict=True)
        ]
        made = lines(name, [about[key]], readings, extent.seeds)
        numbers += [
            {**line, "round": round, **runs.fields(each)}
            for line, round in zip(made, each.rounds, strict=True)
        ]
    return Outcome(
        numbers=numbers,
        claims=claims,
        draw=lambda: _draw(title, panels, numbers, series),
    )


def _draw(
    title: str,
    panels: Sequence[Panel],
    numbers: Sequence[Mapping[str, Any]],
    series: Mapping[str, Series],
) -> Any:
    """At most two panels in a row, and as many labels: those that say what is not private are
    long."""
    columns = min(2, len(panels))
    picture = draw(title, panels, numbers, series, columns=columns)
    (wide,) = picture.legends
    wide.remove()
    picture.legend(
        handles=wide.legend_handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        title=wide.get_title().get_text(),
        title_fontsize=8.5,
    )
    return picture


def _part(progress: Progress, place: int, count: int) -> Progress:
    return lambda stage, share: progress(stage, (place + share) / count)


def _style(label: str, place: int) -> Series:
    at = place % len(_COLOURS)
    return Series(label=label, colour=_COLOURS[at], marker=_MARKERS[at])


_DIGIT_RATES = tuple(Size(7, width) for width in (45, 22, 15, 11))  # 25, 50, 75, 100 times
_ROLE_RATES = tuple(Size(10, width) for width in (245, 190, 100))  # 16, 21, 40 times
_ROLE_EPSILON = 10.0  # "slightly larger", says the paper of figure 4
FIGURE_2: Mapping[Scale, Extent] = {
    "small": Extent(tasks=(data.SMALL_DEVICES,), sizes=((),), rows=data.TABLE_1, repeats=2),
    "paper": Extent(tasks=(data.DEVICES,), sizes=((),), rows=data.TABLE_1, repeats=5),
}
FIGURE_3: Mapping[Scale, Extent] = {
    "small": Extent(tasks=(data.SMALL_DIGITS,), sizes=(data.DIGIT_SIZES,), repeats=2),
    "paper": Extent(tasks=(data.DIGITS,), sizes=(data.DIGIT_SIZES,), repeats=5),
}
FIGURE_4: Mapping[Scale, Extent] = {
    "small": Extent(
        tasks=(data.SMALL_ROLES,), sizes=(data.ROLE_SIZES,), epsilon=_ROLE_EPSILON, repeats=2
    ),
    "paper": Extent(
        tasks=(data.ROLE_TASK,), sizes=(data.ROLE_SIZES,), epsilon=_ROLE_EPSILON, repeats=5
    ),
}
FIGURE_5: Mapping[Scale, Extent] = {
    "small": Extent(
        tasks=(data.SMALL_DIGITS, data.SMALL_ROLES), sizes=(_DIGIT_RATES, _ROLE_RATES), repeats=2
    ),
    "paper": Extent(
        tasks=(data.DIGITS, data.ROLE_TASK), sizes=(_DIGIT_RATES, _ROLE_RATES), repeats=5
    ),
}
FIGURE_6 = FIGURE_5
FIGURE_9: Mapping[Scale, Extent] = {
    "small": Extent(tasks=(data.SMALL_DIGITS,), sizes=((Size(7, 15),),), repeats=2),
    # The text says 1, the caption 0.1; padding for that is 89 times the model.
    "paper": Extent(tasks=(data.DIGITS,), sizes=((Size(7, 15),),), targets=(1.0, 0.1), repeats=5),
}


def _figure(
    name: str,
    title: str,
    run: Callable[[str, Extent, Progress], Outcome],
    extents: Mapping[Scale, Extent],
) -> Figure:
    def start(scale: Scale, progress: Progress) -> Outcome:
        import sfumato.learn  # noqa: F401  # says what to install

        return run(name, extents[scale], progress)

    return Figure(name=name, title=f"{title} (paper 003)", run=start)


def _number(number: int) -> Callable[[str, Extent, Progress], Outcome]:
    return lambda name, extent, progress: against_noise(number, name, extent, progress)


FIGURES = (
    _figure("003-fig2", "sketched training and cpSGD", figure_2, FIGURE_2),
    _figure("003-fig3", "sketched SGD and noise, digits", _number(3), FIGURE_3),
    _figure("003-fig4", "sketched averaging and noise, roles", _number(4), FIGURE_4),
    _figure("003-fig5", "accuracy by what sketches send", figure_5, FIGURE_5),
    _figure("003-fig6", "the epsilon that is claimed, by rate", figure_6, FIGURE_6),
    _figure("003-fig9", "the epsilon that is claimed, by round", figure_9, FIGURE_9),
)

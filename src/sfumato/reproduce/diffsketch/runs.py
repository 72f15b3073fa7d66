"""The trainings behind paper 003's figures, with the epsilon that holds beside the claimed one.

A run is a `learn.diffsketch.SketchedTraining`. Runs of one seed share the initial model, the
cohorts and the order of examples, as in the paper.

PyTorch is imported only when something is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.arrays import F64
from sfumato.privacy.accounting import epsilon_of
from sfumato.reproduce.diffsketch.data import BATCH, DELTA, RATIO, Quantised, Size, Task
from sfumato.reproduce.panels import brief, standard_error

if TYPE_CHECKING:  # they need PyTorch
    from sfumato.learn.data import Federated
    from sfumato.learn.diffsketch import DiffSketch, DiffSketchDesign, Exchange


LOOSE = 2.0  # the clip of cpSGD, relative to that of Gaussian noise


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The results of one seed."""

    rounds: tuple[int, ...]
    accuracies: F64  # after each of these rounds
    claimed: F64  # theorem 2's epsilon of all workers and rounds, infinite where it does not apply
    noised: float  # share of them in which noise was added because of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One curve: its place in the figure, its exchange and privacy, and its runs by seed."""

    task: Task
    panel: str
    series: str
    exchange: Exchange
    claimed_per_round: float | None  # the epsilon that the paper would claim for it
    rate: float
    epsilon: float  # of all rounds, at DELTA; infinite where nothing is promised
    runs: tuple[Run, ...] = ()

    @property
    def rounds(self) -> tuple[int, ...]:
        return self.runs[0].rounds

    @property
    def accuracies(self) -> F64:
        """(seeds, evaluated rounds)."""
        return np.stack([run.accuracies for run in self.runs])

    @property
    def final(self) -> float:
        return float(self.accuracies[:, -1].mean())

    @property
    def stderr(self) -> float:
        return standard_error(self.accuracies[:, -1])

    @property
    def claimed(self) -> F64:
        return np.concatenate([run.claimed for run in self.runs])

    @property
    def noised(self) -> float:
        return float(np.mean([run.noised for run in self.runs]))

    @property
    def privacy(self) -> str:
        """For people: the privacy that would hold with exact and secret noise."""
        from sfumato.learn.diffsketch import NOT_PRIVATE

        if not math.isfinite(self.epsilon):
            return NOT_PRIVATE
        return f"epsilon {brief(self.epsilon)} at delta {DELTA:g} in all, if noise were not seeded"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of every number line about privacy; infinite is null."""
        return {
            "exchange": self.exchange.label,
            "rate": self.rate,
            "claimed_epsilon_a_round": self.claimed_per_round,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": DELTA if math.isfinite(self.epsilon) else None,
            "privacy": self.privacy,
        }

    def sent_for(self, level: float) -> float:
        """The traffic until the mean accuracy reaches a level, in rounds of uncompressed training;
        infinite if it never does."""
        reached = np.flatnonzero(self.accuracies.mean(axis=0) >= level)
        return self.rounds[reached[0]] / self.rate if reached.size else math.inf


def trial(
    task: Task, panel: str, series: str, exchange: Exchange, claimed: float | None = None
) -> Trial:
    """A curve before its runs."""
    planned = design(task, exchange, 0)
    return Trial(
        task=task,
        panel=panel,
        series=series,
        exchange=exchange,
        claimed_per_round=claimed,
        rate=planned.rate,
        epsilon=planned.epsilon(DELTA),
    )


def design(task: Task, exchange: Exchange, seed: int) -> DiffSketchDesign:
    from sfumato.flow.model_terms import LocalTraining
    from sfumato.learn.diffsketch import DiffSketchDesign

    return DiffSketchDesign(
        model=task.model,
        inputs=task.inputs,
        classes=task.classes,
        clients=task.clients,
        cohort=task.cohort,
        rounds=task.rounds,
        local=LocalTraining(
            learning_rate=task.learning_rate,
            batch=BATCH,
            steps=task.steps,
            most_examples=task.most_examples,
        ),
        exchange=exchange,
        seed=seed,
    )


def load_compiled_kernels() -> None:
    """Load the compiled kernels, which a single short vector would not load: there will be many."""
    from sfumato.sketch.dense import DenseSketch

    length = 1 << 18
    sketch = DenseSketch(length=length, rows=4, width=64, seed=0)
    sketch.decode(sketch.encode(np.zeros(length, dtype=np.float32)))


def train(trial: Trial, data: Federated, seed: int) -> Run:
    """One training of a curve."""
    from sfumato.learn.diffsketch import SketchedTraining

    task = trial.task
    training = SketchedTraining(design(task, trial.exchange, seed), data, seed=seed, delta=DELTA)
    accuracies: list[float] = []
    claimed: list[float] = []
    noised = 0
    for result in training.run(evaluate_at=frozenset(task.evaluated_rounds)):
        claimed += result.claimed
        noised += result.noised
        if result.accuracy is not None:
            accuracies.append(result.accuracy)
    share = noised / max(len(claimed), 1)
    return Run(task.evaluated_rounds, np.array(accuracies), np.array(claimed), share)


# Exchanges of the figures.


def plain() -> Exchange:
    from sfumato.learn.diffsketch import NoisyVector

    return NoisyVector()


def sketched(size: Size, **options: Any) -> DiffSketch:
    """Sketches alone, unless options add noise or correct errors."""
    from sfumato.learn.diffsketch import DiffSketch

    return DiffSketch(rows=size.rows, width=size.width, **{"seed": 1, **options})


def printed(size: Size, epsilon: float, *, padding: int, correction: bool = False) -> DiffSketch:
    """Algorithm 2 as printed: not private."""
    return sketched(
        size,
        mode="paper",
        epsilon=epsilon,
        padding=padding,
        correction=correction,
        i_know_this_is_not_private=True,
    )


def noised_sketch(task: Task, size: Size, multiplier: float, where: Any) -> Exchange:
    return sketched(size, mode="gaussian", clip=task.clip, noise_multiplier=multiplier, noise=where)


def noised_vector(task: Task, multiplier: float, where: Any) -> Exchange:
    from sfumato.learn.diffsketch import NoisyVector

    return NoisyVector(clip=task.clip, noise_multiplier=multiplier, noise=where)


def quantised(task: Task, row: Quantised, *, rotate: bool) -> Exchange:
    """cpSGD. Without rotation a single entry may be as large as the whole vector; with rotation
    four deviations are enough. Its noise is so small that few vectors need to be clipped."""
    from sfumato.learn.diffsketch import BinomialVector

    padded_length = 1 << (task.parameters - 1).bit_length()
    clip = LOOSE * task.clip
    return BinomialVector(
        clip=clip,
        largest=4 * clip / math.sqrt(padded_length) if rotate else clip,
        levels=row.levels,
        coins=row.coins,
        rotate=rotate,
        seed=1,
    )


def padding_for(task: Task, size: Size, epsilon: float) -> int:
    """The padding for which theorem 2 claims this epsilon for a Gaussian vector."""
    from sfumato.learn.diffsketch import padded_length

    return max(0, padded_length(size.rows, size.width, epsilon, RATIO) - task.parameters)


@cache
def sampled_multiplier(epsilon: float, cohort: int, clients: int, rounds: int) -> float:
    """The noise multiplier on sums over cohorts of a fixed size at which all rounds cost epsilon,
    rounded up, to a hundredth of itself."""
    from sfumato.learn.diffsketch import NoisyVector, privacy_loss

    def cost(multiplier: float) -> float:
        exchange = NoisyVector(clip=1.0, noise_multiplier=multiplier)
        loss = privacy_loss(exchange, cohort=cohort, clients=clients, rounds=rounds)
        return epsilon_of([loss], DELTA)

    low, high = 0.0, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    return high

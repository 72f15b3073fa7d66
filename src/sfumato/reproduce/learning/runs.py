"""The trainings behind paper 002's figures and tables, and their privacy cost.

A run is a `learn.training.Training` with noise in floats, which is fast and repeatable. Runs of one
seed share the initial model, the cohorts and their examples, so methods differ only by their
sketches and their noise. A run's accuracy is that on the test examples after the last round; its
rate is the number of parameters divided by the cells that a client sends, over all rounds (the
paper's harmonic mean, second sketches counted).

PyTorch is imported only when something is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple

from sfumato.arrays import F64
from sfumato.errors import SfumatoError
from sfumato.privacy.accounting import epsilon_of
from sfumato.reproduce.learning.data import Printed, Workload
from sfumato.reproduce.panels import standard_error

if TYPE_CHECKING:  # they need PyTorch
    from sfumato.learn.compression import Compression
    from sfumato.learn.data import Federated
    from sfumato.learn.design import TrainingDesign

Kind = Literal["none", "fixed", "adapt_norm", "two_stage", "ours"]

EARLY = 4.0  # factor of our error in the first round; the default of `FreeNorm`
FEASIBLE = 0.01  # relative loss of accuracy that the paper allows a fixed rate
AT_ONCE = min(2, os.cpu_count() or 1)  # trainings on a processor, one thread each; on a GPU, one
INTERVAL = 0.01  # to which privacy losses are rounded up for the paper's epsilon


class Method(NamedTuple):
    """How updates are compressed; the value is a rate (fixed) or an error c."""

    kind: Kind
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}" if self.value else self.kind


NONE = Method("none")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The results of one method's trainings, by seed."""

    accuracies: F64
    rates: F64

    @property
    def accuracy(self) -> float:
        return float(self.accuracies.mean())

    @property
    def rate(self) -> float:
        return float(self.rates.mean())

    @property
    def stderr(self) -> float:
        """The standard error of the accuracy."""
        return standard_error(self.accuracies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All trainings of one workload, by noise multiplier and method, and each multiplier's cost
    here: epsilon at delta = 1/clients."""

    workload: Workload
    clients: int
    parameters: int
    epsilons: Mapping[float, float]
    guessing: float  # accuracy of always predicting the most common class of the test set
    scores: Mapping[tuple[float, Method], Scores]

    @property
    def delta(self) -> float:
        return 1 / self.clients

    @property
    def multipliers(self) -> tuple[float, ...]:
        return tuple(self.epsilons)

    @property
    def data(self) -> str:
        """A full description of what was run."""
        task = self.workload
        return (
            f"{task.name}: {self.parameters:,} parameters, {self.clients:,} clients, "
            f"{task.cohort} a round, {task.rounds} rounds; stands for {task.stands_for}"
        )

    def genie(self, multiplier: float) -> Method:
        """The highest fixed rate whose mean accuracy is at most 1% below the uncompressed one; no
        compression if there is none."""
        least = (1 - FEASIBLE) * self.scores[multiplier, NONE].accuracy
        feasible = [
            method
            for (noise, method), each in self.scores.items()
            if noise == multiplier and method.kind == "fixed" and each.accuracy >= least
        ]
        return max(feasible, key=lambda method: method.value, default=NONE)


def design(
    task: Workload, clients: int, multiplier: float, method: Method, seed: int
) -> TrainingDesign:
    """The training of one method, with Poisson cohorts."""
    from sfumato.flow.model_terms import LocalTraining
    from sfumato.learn.design import ServerOptimizer, TrainingDesign

    return TrainingDesign(
        model=task.model,
        inputs=task.inputs,
        classes=task.classes,
        hidden=task.hidden,
        clients=clients,
        cohort=task.cohort,
        rounds=task.rounds,
        local=LocalTraining(
            learning_rate=task.learning_rate, batch=task.batch, most_examples=task.most_examples
        ),
        clip=task.clip,
        noise_multiplier=multiplier,
        compression=compression(task, method),
        server=ServerOptimizer(learning_rate=task.server_learning_rate),
        seed=seed,
    )


def compression(task: Workload, method: Method) -> Compression:
    from sfumato.learn import compression as rules

    if method.kind == "fixed":
        return rules.FixedRate(rate=method.value)
    if method.kind == "adapt_norm":
        return rules.AdaptNorm(error=method.value, first=task.first)
    if method.kind == "two_stage":
        return rules.TwoStage(error=method.value, warm_up=task.warm_up)
    if method.kind == "ours":
        return rules.FreeNorm(error=method.value, early=EARLY)
    return rules.NoCompression()


def train(
    task: Workload, data: Federated, multiplier: float, method: Method, seed: int, *, gpu: bool
) -> tuple[float, float]:
    """The accuracy and the rate of one training."""
    import torch

    from sfumato.learn.training import Training

    training = Training(
        design(task, len(data.train), multiplier, method, seed),
        data,
        device=torch.device("cuda" if gpu else "cpu"),
        exact=False,
        noise_seed=seed,
        chunk=task.chunk,
    )
    for _ in training.run(evaluate_every=task.rounds):  # once, at the end
        pass
    accuracy = training.history[-1].accuracy
    assert accuracy is not None  # the last round is always evaluated
    return accuracy, training.campaign.rate


def before_training(task: Workload, data: Federated, multipliers: Sequence[float]) -> Runs:
    """The runs of a workload before any training: sizes and epsilons."""
    from sfumato.learn import models

    clients = len(data.train)
    designs = {z: design(task, clients, z, NONE, 0) for z in multipliers}
    targets = data.test_targets[data.test_targets >= 0]  # those that count
    return Runs(
        workload=task,
        clients=clients,
        parameters=models.count(designs[multipliers[0]].make()),
        epsilons={z: epsilon_of([each.loss], 1 / clients) for z, each in designs.items()},
        guessing=float(targets.bincount().max()) / len(targets),
        scores={},
    )


def paper_epsilon(printed: Printed, multiplier: float) -> float:
    """The epsilon of the paper's own clients, cohorts and rounds at delta = 1/clients, if cohorts
    are Poisson samples: by privacy loss distributions, rounded up."""
    return sampled_epsilon(printed.clients, printed.cohort, printed.rounds, multiplier)


@cache
def sampled_epsilon(
    clients: int, cohort: int, rounds: int, multiplier: float, interval: float = INTERVAL
) -> float:
    """The epsilon of Gaussian noise on Poisson samples; privacy losses are rounded up to the
    interval."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval
    )
    one = dp_accounting.GaussianDpEvent(multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(cohort / clients, one)
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, rounds))
    return float(accountant.get_epsilon(1 / clients))


def need_gpu(tasks: Sequence[Workload], trainings: Sequence[int]) -> None:
    """Raise an error if there is no GPU; `trainings` is the number of trainings of each task."""
    import torch

    if torch.cuda.is_available():
        return
    each = "; ".join(
        f"{count} trainings of {task.rounds} rounds with {task.cohort} clients each: {task.name}"
        for task, count in zip(tasks, trainings, strict=True)
    )
    raise SfumatoError(
        f"paper scale needs a GPU that PyTorch can use (CUDA), and there is none; it is {each}",
        hint="use --scale small, or a machine with a GPU",
    )


_TRAINING = Lock()
_trainings: list[int] = []  # for each under way, the number of threads before the first


@contextmanager
def one_thread() -> Iterator[None]:
    """Run each training on one thread, also several in one process; small products gain nothing
    from more, and their sums are then the same on every machine."""
    import torch

    with _TRAINING:
        _trainings.append(_trainings[0] if _trainings else torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _TRAINING:
            before = _trainings.pop()
            if not _trainings:
                torch.set_num_threads(before)

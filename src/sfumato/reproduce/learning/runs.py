"""The trainings behind paper 002's figures and tables, and what they cost in privacy.

Nothing here trains or sketches by itself: a run is a `learn.training.Training` with noise in
floats, which is quick and repeatable. Runs of one seed share the model's start, the cohorts and
their examples, so methods differ by their sketches and their noise alone. A run's accuracy is the
share of right predictions on the test examples after the last round; its rate is the parameters by
the cells that a client sends, over all rounds (the paper's harmonic mean, second sketches counted).

PyTorch is imported when something is trained, not before.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sfumato.errors import SfumatoError
from sfumato.privacy.accounting import epsilon_of
from sfumato.reproduce import Progress
from sfumato.reproduce.learning.data import Printed, Workload

if TYPE_CHECKING:  # they need PyTorch
    from sfumato.learn.compression import Compression
    from sfumato.learn.data import Federated
    from sfumato.learn.design import TrainingDesign

F64 = npt.NDArray[np.float64]
Kind = Literal["none", "fixed", "adapt_norm", "two_stage", "ours"]

EARLY = 4.0  # of ours: times the error in the first round; the default of `FreeNorm`
FEASIBLE = 0.01  # relative loss of accuracy that the paper allows a fixed rate
MOST_AT_ONCE = 2  # trainings on a processor at a time, a thread each
INTERVAL = 0.01  # of the privacy losses that the paper's epsilon is computed from; rounded up


class Method(NamedTuple):
    """How updates are compressed; the value is a rate (fixed) or an error c."""

    kind: Kind
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}" if self.value else self.kind


NONE = Method("none")


class Job(NamedTuple):
    """One training."""

    place: int  # of the workload
    multiplier: float
    method: Method
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the trainings of one method gave, by seed."""

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
        """Of the accuracy; 0 where there is one run only."""
        count = len(self.accuracies)
        return float(self.accuracies.std(ddof=1) / count**0.5) if count > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All trainings of one workload, by noise multiplier and method, and what each multiplier
    costs a client here: epsilon at delta = 1/clients."""

    workload: Workload
    clients: int
    parameters: int
    found: Mapping[tuple[float, Method], Found]
    epsilons: Mapping[float, float]
    guessing: float  # accuracy of who always says the commonest class of the test set

    @property
    def delta(self) -> float:
        return 1 / self.clients

    @property
    def multipliers(self) -> tuple[float, ...]:
        return tuple(self.epsilons)

    @property
    def data(self) -> str:
        """What was run, in full."""
        task = self.workload
        return (
            f"{task.name}: {self.parameters:,} parameters, {self.clients:,} clients, "
            f"{task.cohort} a round, {task.rounds} rounds; stands for {task.stands_for}"
        )

    def genie(self, multiplier: float) -> Method:
        """The highest fixed rate that loses at most 1% of the uncompressed accuracy, by means; no
        compression if none does."""
        least = (1 - FEASIBLE) * self.found[multiplier, NONE].accuracy
        feasible = [
            method
            for (noise, method), found in self.found.items()
            if noise == multiplier and method.kind == "fixed" and found.accuracy >= least
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


def train_all(
    tasks: Sequence[Workload], jobs: Sequence[Job], progress: Progress, *, gpu: bool
) -> list[Runs]:
    """The outcomes of all jobs, by workload. On a processor two trainings run at a time; on a GPU
    one does, since one fills it."""
    import sfumato.learn  # noqa: F401  # says what to install, before anything else fails

    if gpu:
        _need_gpu(tasks, jobs)
    progress("reading data", 0.0)
    data = [task.load() for task in tasks]

    def job(given: Job) -> tuple[float, float]:
        return _train(tasks[given.place], data[given.place], given, gpu=gpu)

    held: dict[tuple[int, float, Method], list[tuple[float, float]]] = defaultdict(list)
    with _one_thread(), ThreadPoolExecutor(_at_once(gpu)) as pool:
        for done, (given, found) in enumerate(zip(jobs, pool.map(job, jobs), strict=True), 1):
            held[given.place, given.multiplier, given.method].append(found)
            stage = f"z = {given.multiplier:g}, {given.method}"
            progress(stage, done / len(jobs))
    return [_gathered(place, task, data[place], held) for place, task in enumerate(tasks)]


def _train(task: Workload, data: Federated, given: Job, *, gpu: bool) -> tuple[float, float]:
    import torch

    from sfumato.learn.training import Training

    training = Training(
        design(task, len(data.train), given.multiplier, given.method, given.seed),
        data,
        device=torch.device("cuda" if gpu else "cpu"),
        exact=False,
        noise_seed=given.seed,
        chunk=task.chunk,
    )
    for _ in training.run(evaluate_every=task.rounds):  # once, at the end
        pass
    accuracy = training.history[-1].accuracy
    assert accuracy is not None  # the last round is always looked at
    return accuracy, training.campaign.rate


def _gathered(
    place: int,
    task: Workload,
    data: Federated,
    held: Mapping[tuple[int, float, Method], Sequence[tuple[float, float]]],
) -> Runs:
    from sfumato.learn import models

    found = {
        (multiplier, method): Found(*np.array(values, dtype=np.float64).T)
        for (where, multiplier, method), values in held.items()
        if where == place
    }
    clients = len(data.train)
    multipliers = sorted({multiplier for multiplier, _ in found})
    designs = {z: design(task, clients, z, NONE, 0) for z in multipliers}
    return Runs(
        workload=task,
        clients=clients,
        parameters=models.count(designs[multipliers[0]].make()),
        found=found,
        epsilons={z: epsilon_of([of.loss], 1 / clients) for z, of in designs.items()},
        guessing=_commonest(data),
    )


def _commonest(data: Federated) -> float:
    """The share of the commonest class among the test targets that count."""
    targets = data.test_targets[data.test_targets >= 0]
    return float(targets.bincount().max()) / len(targets)


def paper_epsilon(printed: Printed, multiplier: float) -> float:
    """Of the paper's own clients, cohorts and rounds at delta = 1/clients, if cohorts are Poisson
    samples: by privacy loss distributions, rounded up."""
    return _sampled_epsilon(printed.clients, printed.cohort, printed.rounds, multiplier)


@cache
def _sampled_epsilon(clients: int, cohort: int, rounds: int, multiplier: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=INTERVAL
    )
    one = dp_accounting.GaussianDpEvent(multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(cohort / clients, one)
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, rounds))
    return float(accountant.get_epsilon(1 / clients))


def shown(epsilon: float) -> str:
    """To three digits, without exponents."""
    return f"{epsilon:,.0f}" if epsilon >= 100 else f"{epsilon:.3g}"


def _need_gpu(tasks: Sequence[Workload], jobs: Sequence[Job]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    each = "; ".join(
        f"{sum(job.place == place for job in jobs)} trainings of {task.rounds} rounds with "
        f"{task.cohort} clients each: {task.name}"
        for place, task in enumerate(tasks)
    )
    raise SfumatoError(
        f"paper scale needs a GPU that PyTorch can use (CUDA), and there is none; it is {each}",
        hint="use --scale small, or a machine with a GPU",
    )


def _at_once(gpu: bool) -> int:
    return 1 if gpu else min(MOST_AT_ONCE, os.cpu_count() or 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each training on one thread; small products gain nothing from more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

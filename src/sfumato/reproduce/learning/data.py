"""The trainings of paper 002, the data that replace its own, and the paper's own numbers.

A `Workload` is data, a model and how clients and server train. At paper scale the models are the
paper's and the data are the public part of its own: 396 of 3,400 writers of F-EMNIST, Shakespeare's
roles, and commit messages in place of Stack Overflow's sentences. At small scale the models are
small as well: MNIST by writer with logistic regression, and recurrent models of 32 units on short
sequences. Rounds are fewer than the paper's, and the server's learning rate is the same for every
noise multiplier, while the paper tuned it for each. Every number and title describes what was run.
A missing file is an error, since no law can replace handwriting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

from sfumato.reproduce.files import need_file

if TYPE_CHECKING:  # both need PyTorch
    from sfumato.learn.data import Federated

ROLES, MESSAGES = "shakespeare_roles.parquet", "commit_sequences.parquet"
TESTED = 2_000  # test sequences of small recurrent models
SHORT = 20  # characters of their sequences
SHORT_SENTENCE, FEW_WORDS = 10, 200  # words of their sentences and of their vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, data and training parameters, without the noise and the sketches."""

    name: str  # for titles and claims
    stands_for: str  # the paper's own training
    load: Callable[[], Federated]
    model: str
    inputs: int | None = None
    classes: int | None = None
    hidden: int | None = None
    cohort: int = 100
    rounds: int
    learning_rate: float  # of clients
    batch: int
    most_examples: int | None = None
    clip: float
    server_learning_rate: float
    first: int  # cells of the first round of Adapt Norm
    chunk: int = 16  # clients that train together

    @property
    def warm_up(self) -> int:
        """Rounds of whole vectors in Two Stage: the paper's share of them, 75 of 1,500."""
        return max(1, self.rounds // 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A table of the paper: accuracy and rate by noise multiplier; "genie", or the error c."""

    name: str
    parameters: int
    clients: int
    cohort: int
    rounds: int
    multipliers: tuple[float, ...]
    accuracy: Mapping[str, tuple[float, ...]]  # percent
    rate: Mapping[str, tuple[float, ...]]
    said_epsilon: float | None = None  # "roughly", at the highest multiplier
    said_multiplier: float = 0.7  # from appendix F; table 1 does not have it


TABLE_1 = Printed(
    name="F-EMNIST",
    parameters=1_018_174,
    clients=3_400,
    cohort=100,
    rounds=1_500,
    multipliers=(0.1, 0.2, 0.3, 0.5),
    accuracy={
        "genie": (81.23, 79.70, 77.68, 74.92),
        "0.25": (78.87, 75.53, 77.01, 74.97),
        "0.1": (81.34, 78.53, 77.81, 75.36),
        "0.05": (81.84, 79.04, 78.43, 75.66),
        "0.01": (82.51, 79.59, 78.67, 75.56),
    },
    rate={
        "genie": (339, 341, 1_443, 2_391),
        "0.25": (101, 212, 284, 332),
        "0.1": (47, 94, 117, 134),
        "0.05": (24, 47, 59, 68),
        "0.01": (5, 9, 12, 13),
    },
    said_epsilon=10.0,
)
TABLE_2 = Printed(
    name="Shakespeare",
    parameters=820_522,
    clients=715,
    cohort=100,
    rounds=1_500,
    multipliers=(0.1, 0.2, 0.3, 0.5, 0.7),
    accuracy={
        "genie": (55.41, 53.91, 52.48, 50.44, 48.68),
        "0.25": (55.71, 53.93, 52.26, 49.12, 46.96),
        "0.1": (55.77, 54.17, 52.57, 49.87, 47.84),
        "0.05": (55.89, 54.29, 52.82, 50.23, 48.12),
        "0.01": (55.83, 54.28, 52.85, 50.66, 48.87),
    },
    rate={
        "genie": (133, 210, 342, 460, 511),
        "0.25": (24, 64, 117, 235, 367),
        "0.1": (12, 29, 49, 98, 154),
        "0.05": (7, 17, 27, 50, 75),
        "0.01": (2, 5, 8, 13, 18),
    },
)
TABLE_3 = Printed(
    name="Stack Overflow, next word",
    parameters=4_050_748,
    clients=342_477,
    cohort=1_000,
    rounds=1_500,
    multipliers=(0.1, 0.3, 0.5, 0.7),
    accuracy={
        "genie": (23.77, 22.36, 22.07, 21.33),
        "0.25": (23.97, 22.59, 22.06, 21.15),
        "0.1": (24.03, 22.70, 22.12, 21.31),
        "0.05": (23.93, 22.39, 22.14, 21.35),
        "0.01": (24.10, 22.57, 22.17, 21.38),
    },
    rate={
        "genie": (15, 33, 45, 48),
        "0.25": (2, 4, 12, 16),
        "0.1": (1, 3, 7, 10),
        "0.05": (1, 2, 4, 6),
        "0.01": (1, 1, 2, 3),
    },
    said_epsilon=5.0,
)


def learn_data() -> ModuleType:
    """`sfumato.learn.data`, which needs PyTorch: imported only when data are read."""
    from sfumato.learn import data

    return data


def tested_on(federated: Federated, most: int) -> Federated:
    """The same clients, with a random but constant part of the test examples."""
    import torch

    count = len(federated.test_targets)
    some = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]
    return replace(
        federated,
        test_inputs=federated.test_inputs[some],
        test_targets=federated.test_targets[some],
    )


SMALL_1 = Workload(
    name="MNIST by writer, softmax",
    stands_for="F-EMNIST, cnn of 1,018,174 parameters",
    load=lambda: learn_data().mnist(
        need_file("mnist-train-images-idx3-ubyte.gz").parent,
        writers=need_file("mnist_writers.npz"),
    ),
    model="softmax",
    rounds=40,
    learning_rate=0.1,
    batch=20,
    clip=0.5,
    server_learning_rate=0.5,
    first=400,
)
SMALL_2 = Workload(
    name=f"Shakespeare's roles in {SHORT} characters, char_lstm of 32 units",
    stands_for="Shakespeare, char_lstm of 820,522 parameters",
    load=lambda: tested_on(learn_data().shakespeare(need_file(ROLES), length=SHORT), TESTED),
    model="char_lstm",
    hidden=32,
    rounds=40,
    learning_rate=4.0,
    batch=4,
    most_examples=16,
    clip=1.85,
    server_learning_rate=2.0,
    first=900,
)
SMALL_3 = Workload(
    name=f"commit messages in {FEW_WORDS} words, word_lstm of 32 units",
    stands_for="Stack Overflow's next word, word_lstm of 4,050,748 parameters",
    load=lambda: tested_on(
        learn_data().commits(need_file(MESSAGES), vocabulary=FEW_WORDS, length=SHORT_SENTENCE),
        TESTED,
    ),
    model="word_lstm",
    inputs=FEW_WORDS + 4,
    classes=FEW_WORDS + 4,
    hidden=32,
    rounds=40,
    learning_rate=2.0,
    batch=8,
    most_examples=32,
    clip=1.0,
    server_learning_rate=1.0,
    first=3_000,
)
PAPER_1 = Workload(
    name="F-EMNIST, a sample of its writers, cnn",
    stands_for="F-EMNIST with 3,400 writers, 1,500 rounds",
    load=lambda: learn_data().femnist(need_file("femnist_leaf.npz")),
    model="cnn",
    rounds=1_200,
    learning_rate=0.1,
    batch=20,
    clip=0.49,
    server_learning_rate=0.125,
    first=50_000,
    chunk=128,
)
PAPER_2 = Workload(
    name="Shakespeare's roles, char_lstm",
    stands_for="Shakespeare with 715 roles, 1,500 rounds",
    load=lambda: learn_data().shakespeare(need_file(ROLES)),
    model="char_lstm",
    rounds=120,
    learning_rate=2.0,
    batch=8,
    most_examples=32,
    clip=1.85,
    server_learning_rate=1.0,
    first=50_000,
    chunk=128,
)
PAPER_3 = Workload(
    name="commit messages, word_lstm",
    stands_for="Stack Overflow's next word with 342,477 users, 1,500 rounds of 1,000",
    load=lambda: learn_data().commits(need_file(MESSAGES)),
    model="word_lstm",
    rounds=150,
    learning_rate=0.5,
    batch=16,
    most_examples=64,
    clip=1.0,
    server_learning_rate=1.0,
    first=50_000,
    chunk=50,
)

"""The trainings of paper 003 and the paper's own numbers.

Models and numbers of clients are the paper's: 10 workers of 200 digits, 6,000 devices of 10 digits,
both with logistic regression of 7,850 parameters, and 46 speaking roles with a recurrent model of
39,720. The paper gives no number of rounds, no clip and no sizes of that model; ours are in every
number. The roles are the 46 that say most in the public text, cut into sequences. At small scale
there are fewer rounds, and roles have short sequences with a larger step. A missing file is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sfumato.reproduce.files import need_file
from sfumato.reproduce.learning.data import learn_data, tested_on

if TYPE_CHECKING:  # it needs PyTorch
    from sfumato.learn.data import Federated

ROLES = 46
TESTED = 1_000  # test sequences of the recurrent model
SHORT = 20  # characters of a sequence at small scale
BATCH = 10
RATIO = 1.2815515655446004  # the 90th percentile of a Gaussian, in deviations
DELTA = 1e-5


class Size(NamedTuple):
    """The size of a sketch."""

    rows: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.width}"


class Quantised(NamedTuple):
    """A row of the paper's table 1."""

    epsilon: float
    bits: int
    levels: int
    coins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Data, model and local training, without the exchange."""

    name: str
    load: Callable[[], Federated]
    model: str
    parameters: int
    inputs: int | None = None
    classes: int | None = None
    clients: int
    cohort: int
    rounds: int
    learning_rate: float
    steps: int | None  # None: one epoch
    most_examples: int | None = None
    clip: float  # of an update, where it is clipped: about the median norm

    @property
    def data(self) -> str:
        """A full description of what is run."""
        return (
            f"{self.name}: {self.parameters:,} parameters, {self.cohort:,} of {self.clients:,} "
            f"clients a round, {self.rounds:,} rounds, learning rate {self.learning_rate:g}"
        )

    @property
    def evaluated_rounds(self) -> tuple[int, ...]:
        """Rounds after which accuracy is measured: evenly on a logarithmic scale, and the last."""
        ladder = (1, 2, 3, 5, 7)
        every = [step * 10**power for power in range(1, 5) for step in ladder]
        return (*(each for each in every if each < self.rounds), self.rounds)


TABLE_1 = (
    Quantised(epsilon=5, bits=4, levels=12, coins=4),
    Quantised(epsilon=5, bits=5, levels=23, coins=9),
    Quantised(epsilon=10, bits=4, levels=14, coins=2),
    Quantised(epsilon=10, bits=5, levels=28, coins=4),
)
PRINTED_RATE = {4: 10.0, 5: 6.0}  # table 1's rates by bits; 32 bits divided by them are 8 and 6.4
EQUAL_RATE: Mapping[int, Size] = {4: Size(7, 112), 5: Size(7, 187)}  # sketches of that rate
DIGIT_SIZES = (Size(7, 22), Size(7, 15))  # 50 and 75 times smaller
ROLE_SIZES = (Size(10, 190), Size(10, 245))  # 21 and 16 times smaller; figure 4 swaps them


def _digits(clients: int, examples: int) -> Federated:
    folder = need_file("mnist-train-images-idx3-ubyte.gz").parent
    federated: Federated = learn_data().mnist(folder, clients=clients, examples=examples)
    return federated


def _roles(length: int) -> Federated:
    from sfumato.learn.diffsketch import largest_clients

    federated = learn_data().shakespeare(need_file("shakespeare_roles.parquet"), length=length)
    return tested_on(largest_clients(federated, ROLES), TESTED)


DIGITS = Task(
    name="MNIST, softmax",
    load=lambda: _digits(10, 200),
    model="softmax",
    parameters=7_850,
    clients=10,
    cohort=10,
    rounds=2_000,
    learning_rate=0.01,
    steps=1,
    clip=0.02,
)
SMALL_DIGITS = replace(DIGITS, rounds=300)
DEVICES = replace(DIGITS, name="MNIST*, softmax", load=lambda: _digits(6_000, 10), clients=6_000)
SMALL_DEVICES = replace(DEVICES, rounds=300)
ROLE_TASK = Task(
    name="Shakespeare's roles, LSTM",
    load=lambda: _roles(80),
    model="small_lstm",
    parameters=39_720,
    clients=ROLES,
    cohort=1,
    rounds=300,
    learning_rate=0.8,
    steps=None,
    clip=1.0,
)
SMALL_ROLES = replace(
    ROLE_TASK,
    name=f"Shakespeare's roles, {SHORT} characters, LSTM",
    load=lambda: _roles(SHORT),
    rounds=100,
    learning_rate=3.0,
    most_examples=100,
    clip=2.0,
)

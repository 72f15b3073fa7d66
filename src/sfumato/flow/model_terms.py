"""What a device is told of a model that it helps to train, without anything that could train it.

A round's parameters are float32 numbers, little-endian, one after another; their SHA-256 is their
name. `ModelTerms` says which model they are of and what a client does with its examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.errors import SpecError
from sfumato.privacy.samplers import Rng
from sfumato.spec import require, spec

F32 = npt.NDArray[np.float32]
Reals = npt.NDArray[np.floating[Any]]

MOST_PARAMETERS = 1 << 25  # of a model that devices fetch: 128 MiB
PARAMETER_BYTES = 4


@spec("local_training")
class LocalTraining:
    """Plain gradient descent on batches of a client's own examples, in a random order.

    Epochs go through all examples, `steps` through that many batches and begin anew, in another
    order, when the examples are used up: steps = 1 is distributed SGD. A batch that is left over at
    the end of an epoch is smaller. `most_examples` bounds what a client uses of its data in a
    round; which ones, is drawn anew every round.
    """

    learning_rate: float
    batch: int
    epochs: int = 1
    steps: int | None = None
    most_examples: int | None = None

    def check(self) -> None:
        require(self.learning_rate > 0, f"learning_rate must be above 0; got {self.learning_rate}")
        for name in ("batch", "epochs", "steps", "most_examples"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1; got {value}")
        require(
            self.steps is None or self.epochs == 1,
            "a client trains for epochs or for steps; give one of them",
        )


@spec("model_terms")
class ModelTerms:
    """A model as devices are asked to train it in one round: which one, how, and from where.

    >>> numbers = np.array([0.5, -1.0], dtype=np.float32)
    >>> terms = ModelTerms(model="softmax", local=LocalTraining(learning_rate=0.1, batch=20),
    ...                    round=1, rounds=20, parameters=2, digest=digest_of(to_bytes(numbers)))
    >>> terms.read(to_bytes(numbers))
    array([ 0.5, -1. ], dtype=float32)
    >>> terms.kept(np.array([1.0, np.nan], dtype=np.float32))
    array([0., 0.], dtype=float32)
    """

    model: str
    inputs: int | None = None
    classes: int | None = None
    hidden: int | None = None
    local: LocalTraining
    round: int  # of this training, from 1
    rounds: int  # that it has in all
    largest_l1: float | None = None  # an update longer than this is sent as zeros
    parameters: int  # how many
    digest: str  # SHA-256 of the round's, in hexadecimal

    def check(self) -> None:
        require(
            1 <= self.round <= self.rounds,
            f"round must be 1 to {self.rounds}; got {self.round}",
        )
        require(
            1 <= self.parameters <= MOST_PARAMETERS,
            f"a model for devices must have 1 to {MOST_PARAMETERS:,} parameters; "
            f"got {self.parameters:,}",
        )
        require(
            self.largest_l1 is None or self.largest_l1 > 0,
            f"largest_l1 must be above 0; got {self.largest_l1}",
        )
        require(
            len(self.digest) == 64 and set(self.digest) <= set("0123456789abcdef"),
            "digest must be 64 hexadecimal digits; got something else",
        )

    @property
    def size(self) -> int:
        """Of the parameters, in bytes."""
        return PARAMETER_BYTES * self.parameters

    def read(self, body: bytes) -> F32:
        """The round's parameters, which nobody can write to; other bytes raise SpecError."""
        if len(body) != self.size or digest_of(body) != self.digest:
            raise SpecError("a round's parameters must be those that its offer names; got others")
        return np.frombuffer(body, dtype="<f4").astype(np.float32, copy=False)

    def kept(self, update: Reals) -> F32:
        """An update as it is sent: zeros if it is not finite or too long, so that who has such a
        one is not told from the others."""
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.asarray(update, dtype=np.float32)
            length = float(np.abs(numbers).sum(dtype=np.float64))
        limit = np.inf if self.largest_l1 is None else self.largest_l1
        return numbers if length < limit else np.zeros_like(numbers)  # not for what is no number


Train: TypeAlias = Callable[[ModelTerms, F32, Rng], Reals]
"""What a device computes in a round: the terms, the parameters and its chance to an update."""


def to_bytes(numbers: Reals) -> bytes:
    """Parameters as devices get them."""
    return np.ascontiguousarray(numbers, dtype="<f4").tobytes()


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()

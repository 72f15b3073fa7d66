"""The description of a model that devices help to train, without any code to train it.

A round's parameters are little-endian float32 numbers, named by their SHA-256. `ModelTerms` names
the model and describes how a client trains on its examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F32
from sfumato.errors import SpecError
from sfumato.privacy.samplers import Rng
from sfumato.spec import require, spec

Reals = npt.NDArray[np.floating[Any]]

MOST_PARAMETERS = 1 << 25  # limit for a model that devices fetch: 128 MiB
PARAMETER_BYTES = 4


@spec("local_training")
class LocalTraining:
    """Plain gradient descent on batches of a client's own examples, in a random order.

    An epoch goes through all examples; its last batch may be smaller. `steps` is a number of
    batches instead: if the examples run out, they start again in another order, and steps = 1 is
    distributed SGD. A client uses at most `most_examples` in a round, drawn anew for every round.
    """

    learning_rate: float
    batch: int
    epochs: int = 1
    steps: int | None = None
    most_examples: int | None = None

    def check(self) -> None:
        require.above(0, learning_rate=self.learning_rate)
        require.at_least(
            1,
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            most_examples=self.most_examples,
        )
        require(
            self.steps is None or self.epochs == 1,
            "a client trains for epochs or for steps; set only one of them",
        )


@spec("model_terms")
class ModelTerms:
    """The model of one round of training: which model, how to train it, and from which parameters.

    >>> numbers = np.array([0.5, -1.0], dtype=np.float32)
    >>> terms = ModelTerms(model="softmax", local=LocalTraining(learning_rate=0.1, batch=20),
    ...                    round=1, rounds=20, parameters=2, digest=digest_of(to_bytes(numbers)))
    >>> terms.read(to_bytes(numbers))
    array([ 0.5, -1. ], dtype=float32)
    >>> terms.bounded_update(np.array([1.0, np.nan], dtype=np.float32))
    array([0., 0.], dtype=float32)
    """

    model: str
    inputs: int | None = None
    classes: int | None = None
    hidden: int | None = None
    local: LocalTraining
    round: int  # from 1
    rounds: int  # total number
    largest_l1: float | None = None  # a longer update is replaced by zeros
    parameters: int  # number of parameters
    digest: str  # SHA-256 of the round's parameters, in hexadecimal

    def check(self) -> None:
        require.within(1, self.rounds, round=self.round)
        require(
            1 <= self.parameters <= MOST_PARAMETERS,
            f"a model for devices must have 1 to {MOST_PARAMETERS:,} parameters; "
            f"got {self.parameters:,}",
        )
        require.above(0, largest_l1=self.largest_l1)
        require(
            len(self.digest) == 64 and set(self.digest) <= set("0123456789abcdef"),
            "digest must be 64 hexadecimal digits; got something else",
        )

    @property
    def size(self) -> int:
        """The size of the parameters in bytes."""
        return PARAMETER_BYTES * self.parameters

    def read(self, body: bytes) -> F32:
        """The round's parameters as a read-only array; other bytes raise SpecError."""
        if len(body) != self.size or digest_of(body) != self.digest:
            raise SpecError(
                "the parameters of a round must have the digest in its offer; they do not"
            )
        return np.frombuffer(body, dtype="<f4").astype(np.float32, copy=False)

    def bounded_update(self, update: Reals) -> F32:
        """An update as it is sent: zeros if it is not finite or too long, so that such a device
        cannot be recognised."""
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.asarray(update, dtype=np.float32)
            length = float(np.abs(numbers).sum(dtype=np.float64))
        limit = np.inf if self.largest_l1 is None else self.largest_l1
        return numbers if length < limit else np.zeros_like(numbers)  # false if length is NaN


Train: TypeAlias = Callable[[ModelTerms, F32, Rng], Reals]
"""Computes a device's update in a round from the terms, the parameters and a generator."""


def to_bytes(numbers: Reals) -> bytes:
    """Parameters as the bytes that devices fetch."""
    return np.ascontiguousarray(numbers, dtype="<f4").tobytes()


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()

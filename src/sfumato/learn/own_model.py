"""A module of your own in a training, with its loss and its clients' optimizer.

No study can describe these, so they exist in Python only, and a collector cannot send them to
devices.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sfumato.errors import SpecError
from sfumato.learn import models
from sfumato.learn.design import ModelDesign
from sfumato.learn.gradients import cross_entropy
from sfumato.spec import require

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets of a batch to one number, such as `torch.nn.MSELoss()`."""
Optimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""A new optimizer of these parameters, such as `functools.partial(torch.optim.Adam, lr=0.01)`."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OwnModel:
    """A module, the loss of its outputs and the optimizer of a client; by default cross-entropy of
    classes, and gradient descent.

    Whatever a module remembers of its inputs stays in a copy: every client trains one, and a
    release has another, which has seen no example (`make`).
    """

    module: nn.Module
    loss: Loss = cross_entropy
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        lazy = nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer
        values = [*self.module.named_parameters(), *self.module.named_buffers()]
        if waiting := [name for name, value in values if isinstance(value, lazy)]:
            raise SpecError(
                f"all parameters must have a size; {waiting[0]} has none before the first input",
                hint="call the module once on an input like those of clients",
            )
        trained = models.trainable(self.module)
        require(
            len(trained) > 0, "a model must have at least one parameter that requires a gradient"
        )
        for name, value in trained.items():
            require(
                value.dtype == torch.float32,
                f"parameters must be float32, as updates are; {name} is {value.dtype}: call "
                "model.float()",
            )
        self.make()

    def make(self) -> nn.Module:
        """A copy of the module."""
        try:
            return copy.deepcopy(self.module)
        except (RuntimeError, TypeError) as problem:
            raise SpecError(f"the module must allow copy.deepcopy: {problem}") from problem

    def digest(self) -> str:
        """Of everything that training leaves as it is: names, shapes, frozen values."""
        hashed = hashlib.sha256()
        for name, value in [*self.module.named_parameters(), *self.module.named_buffers()]:
            hashed.update(repr((name, tuple(value.shape), str(value.dtype))).encode())
            if not value.requires_grad:
                hashed.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


def model_of(design: ModelDesign, own: OwnModel | None) -> nn.Module:
    """The model of a training: its own, or the one that its design names."""
    if own is None:
        return design.make()
    length = models.count(own.module)
    require(
        length == design.length and design.model is None,
        f"the module must be the one that was planned, of {design.length:,} parameters; it has "
        f"{length:,}",
    )
    return own.make()


def loss_of(own: OwnModel | None) -> Loss:
    return cross_entropy if own is None else own.loss

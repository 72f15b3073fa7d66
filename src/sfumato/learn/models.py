"""The papers' models by name, and any model's parameters as one vector.

    softmax    784 → 10, logistic regression                          7,850 parameters (paper 003)
    mlp        784 → 128 → 62                                       108,478
    cnn        two 3×3 convolutions, dense 128, 62 classes        1,018,174 (paper 002, F-EMNIST)
    char_lstm  90 characters, embedding 8, two LSTM layers of 256   820,522 (paper 002, Shakespeare)
    word_lstm  10,004 words, embedding 96, LSTM of 670, dense 96  4,050,748 (paper 002, next word)

The counts are for the default sizes; vocabularies include the four symbols that are neither
characters nor words (`data.PAD`, `BEGIN`, `END`, `UNKNOWN`). Paper 002's CNN drops out a quarter of
its features in training and half of its dense layer; ours does not. Dropout has no parameters, and
without it a client's result is a function of its examples and their order alone.

Weights start as in Keras, which the papers used: Glorot's uniform law, orthogonal recurrent
matrices, zero biases (one for an LSTM's forget gate), embeddings uniform within 0.05.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import DataError, SpecError
from sfumato.flow.model_terms import digest_of
from sfumato.spec import require

OWN = "a module of your own"  # a model that has no name
_SIZES = {  # by default: inputs, classes, hidden
    "softmax": (784, 10, 0),
    "mlp": (784, 62, 128),
    "cnn": (784, 62, 128),
    "char_lstm": (90, 90, 256),
    "word_lstm": (10_004, 10_004, 670),
}
NAMES = tuple(_SIZES)
_EMBEDDED = {"char_lstm": 8, "word_lstm": 96}
_SYMBOLS = {"char_lstm": 80, "word_lstm": 20}  # of an example, in the papers
_LARGEST_START = 0.05  # bound on the initial values of an embedding


class Square(nn.Module):
    """Examples of side² numbers as images of one channel, (batch, 1, side, side)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, examples: Tensor) -> Tensor:
        return examples.reshape(-1, 1, self.side, self.side)


class Perceptron(nn.Sequential):
    """Linear layers with rectifiers between them, for flattened examples."""


class Convolutional(nn.Sequential):
    """Convolutions of images, one flattening, and linear layers."""


class Layer(nn.Module):
    """One LSTM layer from basic operations: fused layers do not vectorise over clients.

    The order of the gates is candidate, input, forget, output.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.empty(inputs, 4 * hidden))
        self.recurrent = nn.Parameter(torch.empty(hidden, 4 * hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))

    def forward(self, sequence: Tensor) -> Tensor:
        """(batch, time, inputs) to (batch, time, hidden)."""
        entering = sequence @ self.inputs + self.bias
        hidden = self.recurrent.shape[0]
        output = entering.new_zeros(entering.shape[0], hidden)
        memory = output
        outputs = []
        for now in entering.unbind(1):
            gates = now + output @ self.recurrent
            candidate = gates[:, :hidden].tanh()
            enter, keep, leave = gates[:, hidden:].sigmoid().chunk(3, dim=1)
            memory = keep * memory + enter * candidate
            output = leave * memory.tanh()
            outputs.append(output)
        return torch.stack(outputs, dim=1)


class Recurrent(nn.Module):
    """Predicts each next symbol of a sequence: (batch, time) to (batch, time, classes)."""

    def __init__(
        self, symbols: int, embedded: int, hidden: int, layers: int, narrowed: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(symbols, embedded))
        self.layers = nn.ModuleList(
            Layer(embedded if number == 0 else hidden, hidden) for number in range(layers)
        )
        self.narrow = nn.Linear(hidden, narrowed) if narrowed else None
        self.output = nn.Linear(narrowed or hidden, classes)

    def forward(self, symbols: Tensor) -> Tensor:
        sequence = self.embedding[symbols]
        for layer in self.layers:
            sequence = layer(sequence)
        if self.narrow is not None:
            sequence = self.narrow(sequence)
        return self.output(sequence)  # type: ignore[no-any-return]  # modules return tensors


def make(
    name: str | None,
    *,
    inputs: int | None = None,
    classes: int | None = None,
    hidden: int | None = None,
    seed: int,
) -> nn.Module:
    """A model by its name; the same seed gives the same parameters.

    `inputs` is the number of values of an example, or of symbols; `hidden` is the width of the
    dense or recurrent layers. The defaults are the papers'.

    >>> count(make("softmax", seed=1))
    7850
    """
    if name is None:
        raise SpecError(
            f"this training is of {OWN}, which exists in Python only",
            hint="run it there: sfumato.train(study, data, model=…)",
        )
    if name not in NAMES:
        raise SpecError(f"a model must be one of {', '.join(NAMES)}; got {name!r}")
    usual = _SIZES[name]
    inputs = usual[0] if inputs is None else inputs
    classes = usual[1] if classes is None else classes
    hidden = usual[2] if hidden is None else hidden
    require.at_least(1, inputs=inputs)
    require.at_least(2, classes=classes)
    require(
        hidden == 0 if name == "softmax" else hidden >= 1,
        f"hidden must be at least 1, and a softmax model has none; got {hidden}",
    )
    with torch.device("meta"):  # building draws nothing from the global generator
        model = _build(name, inputs, classes, hidden)
    return initialise(model, seed)


def _build(name: str, inputs: int, classes: int, hidden: int) -> nn.Module:
    if name == "softmax":
        return Perceptron(nn.Flatten(), nn.Linear(inputs, classes))
    if name == "mlp":
        return Perceptron(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )
    if name == "cnn":
        side = math.isqrt(inputs)
        require(
            side * side == inputs and side >= 8,
            f"the cnn takes square images of side 8 or more; got {inputs} numbers per example",
        )
        side_left = (side - 2) // 2 - 2
        return Convolutional(
            Square(side),
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * side_left**2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
    if name == "char_lstm":
        return Recurrent(inputs, 8, hidden, layers=2, narrowed=0, classes=classes)
    return Recurrent(inputs, 96, hidden, layers=1, narrowed=96, classes=classes)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """A model on the meta device as one on the CPU with the initial parameters of this seed."""
    model, generator = model.to_empty(device="cpu"), torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            value.zero_()
            if ".layers." in f".{name}":
                hidden = value.shape[0] // 4
                value[2 * hidden : 3 * hidden] = 1.0
        elif name == "embedding":
            value.uniform_(-_LARGEST_START, _LARGEST_START, generator=generator)
        elif name.endswith("recurrent"):
            nn.init.orthogonal_(value, generator=generator)
        else:
            nn.init.xavier_uniform_(value, generator=generator)
    return model


def products(name: str | None, *, parameters: int, inputs: int | None = None) -> int:
    """How many pairs of numbers a model multiplies for one example, roughly: one pair per
    parameter, but for convolutions and recurrent layers, which use a parameter several times. An
    example of a recurrent model is as long as in the papers.

    >>> products("softmax", parameters=7850), products("cnn", parameters=1_018_174)
    (7850, 3424414)
    """
    if name is None:
        return parameters
    if name in _EMBEDDED:
        symbols = _SIZES[name][0] if inputs is None else inputs
        return (parameters - symbols * _EMBEDDED[name]) * _SYMBOLS[name]
    if name != "cnn":
        return parameters
    side = math.isqrt(_SIZES[name][0] if inputs is None else inputs)
    first, second = (side - 2) ** 2, ((side - 2) // 2 - 2) ** 2  # places of the convolutions
    of_first, of_second = 32 * 9, 64 * 32 * 9
    return parameters + (first - 1) * of_first + (second - 1) * of_second


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, in the order of the vector, without frozen ones."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def count(model: nn.Module) -> int:
    """The number of values that training changes: the length of `flatten(model)`."""
    return sum(value.numel() for value in trainable(model).values())


def flatten(model: nn.Module) -> Tensor:
    """A copy of the parameters as one vector, (count,)."""
    values = trainable(model).values()
    if not values:
        raise SpecError("a model must have at least one parameter that requires a gradient")
    return torch.cat([value.detach().reshape(-1) for value in values])


def unflatten(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """The vector's parameters by name, as views; leading dimensions are kept.

    For `torch.func.functional_call(model, unflatten(model, flat), (inputs,))`.
    """
    parameters = trainable(model)
    length = sum(value.numel() for value in parameters.values())
    if flat.ndim == 0 or flat.shape[-1] != length:
        raise SpecError(
            f"a vector of this model has length {length}; got shape {tuple(flat.shape)}"
        )
    views, start = {}, 0
    for name, value in parameters.items():
        piece = flat[..., start : start + value.numel()]
        views[name] = piece.view(*flat.shape[:-1], *value.shape)
        start += value.numel()
    return views


@torch.no_grad()
def assign(model: nn.Module, flat: Tensor) -> None:
    """Copy a vector of shape (count,) into the model's parameters."""
    parameters = trainable(model)
    for name, value in unflatten(model, flat).items():
        parameters[name].copy_(value)


def state_file(release: Mapping[str, Any], parameters: bytes) -> bytes:
    """A file for `torch.load` and `load_state_dict`, from a release's JSON and its parameters."""
    if digest_of(parameters) != release["model"]["sha256"]:
        raise DataError("the parameters must be those of the release; their digest differs")
    keys = release["study"]["training"]
    sizes = {name: keys.get(name) for name in ("inputs", "classes", "hidden")}
    model = make(keys["model"], **sizes, seed=0)
    assign(model, torch.from_numpy(np.frombuffer(parameters, dtype="<f4").copy()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()

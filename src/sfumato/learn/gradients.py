"""Gradients of many clients at once, for each kind of the papers' models.

Perceptrons have handwritten gradients, and a recurrent layer is one function with its own gradient.
Convolutions are products with patches on a GPU; on a CPU such a model trains one client after
another, which is faster. So does any other module (`clients`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import SpecError
from sfumato.learn import models
from sfumato.learn.data import IGNORED

Tensors: TypeAlias = list[Tensor]
Pair: TypeAlias = tuple[Tensor, Tensor]


class Engine(Protocol):
    """Computes the gradients of one kind of model."""

    model: nn.Module

    def step(
        self, parameters: Tensors, into: Tensors, batch: Pair, rate: float, first: bool
    ) -> Pair:
        """Write −rate × gradient into `into` if this is the first step, else add it; return each
        client's summed loss and number of targets. Parameters are (clients, …) each; in the first
        step those of all clients are views of one tensor.
        """
        ...


def views(model: nn.Module, state: Tensor) -> Tensors:
    return list(models.unflatten(model, state).values())


def engine_of(model: nn.Module, device: torch.device) -> Engine | None:
    """The engine of one of the papers' models; None for a model whose clients train one by one."""
    if not all(value.requires_grad for value in model.parameters()):
        return None
    if isinstance(model, models.Recurrent):
        return Batched(model, _recurrent(model))
    if isinstance(model, models.Perceptron):
        return Linear(model)
    if isinstance(model, models.Convolutional) and device.type != "cpu":
        return Batched(model, convolutional(list(model)))
    return None  # on a CPU, one client's convolutions fit in the cache; those of many do not


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of classes, without targets that are ignored: the loss by default."""
    return _losses(outputs, targets).sum() / (targets != IGNORED).sum().clamp(min=1)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target, 0 where it is ignored; shapes (…, classes) and (…)."""
    if logits.shape[:-1] != targets.shape:
        raise SpecError(
            f"the model gives classes for {tuple(logits.shape[:-1])}; targets are"
            f" {tuple(targets.shape)}"
        )
    each = functional.log_softmax(logits, dim=-1)
    each = each.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets != IGNORED, -each, 0.0)


def targets_of(targets: Tensor) -> Tensor:
    """The number of each client's targets that count."""
    return (targets != IGNORED).flatten(1).sum(dim=1)


def _write(into: Tensors, gradients: Sequence[Tensor], rate: float, first: bool) -> None:
    for place, gradient in zip(into, gradients, strict=True):
        if first:
            torch.mul(gradient, -rate, out=place)
        else:
            place.add_(gradient, alpha=-rate)


class Batched:
    """A forward pass for many clients at once; the sum of their losses gives all gradients."""

    def __init__(self, model: nn.Module, logits: Callable[[Tensors, Tensor], Tensor]) -> None:
        self.model = model
        self._logits = logits

    def step(
        self, parameters: Tensors, into: Tensors, batch: Pair, rate: float, first: bool
    ) -> Pair:
        inputs, targets = batch
        counts = targets_of(targets)
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in parameters]
            sums = _losses(self._logits(leaves, inputs), targets).flatten(1).sum(dim=1)
            gradients = torch.autograd.grad((sums / counts.clamp(min=1)).sum(), leaves)
        _write(into, gradients, rate, first)
        return sums.detach(), counts


class Linear:
    """Linear layers with rectifiers between them, and a handwritten gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(
        self, parameters: Tensors, into: Tensors, batch: Pair, rate: float, first: bool
    ) -> Pair:
        entering, back, sums, counts = self.forward(parameters, batch, first)
        back *= -rate  # the gradient is linear in it: everything below comes out as an update
        for layer in reversed(range(len(entering))):
            weight = parameters[2 * layer]
            places, bias = into[2 * layer], into[2 * layer + 1]
            below = self.backward(back, weight, entering[layer], first) if layer else back
            if first:
                torch.bmm(back.mT, entering[layer], out=places)
                torch.sum(back, dim=1, out=bias)
            else:
                places.baddbmm_(back.mT, entering[layer])
                bias += back.sum(dim=1)
            back = below
        return sums, counts

    def forward(
        self, parameters: Tensors, batch: Pair, same: bool
    ) -> tuple[Tensors, Tensor, Tensor, Tensor]:
        """The inputs of each layer, (clients, batch, …); the gradient of the loss with respect to
        the last layer's output; each client's summed loss and number of targets.
        """
        inputs, targets = batch
        values = inputs.flatten(2)
        entering = []
        for layer in range(len(parameters) // 2):
            if layer:
                values = values.relu_()
            entering.append(values)
            weight, bias = parameters[2 * layer], parameters[2 * layer + 1]
            if same:  # one product for all clients
                values = functional.linear(values, weight[0], bias[0])
            else:
                values = torch.baddbmm(bias[:, None], values, weight.mT)
        counts = targets_of(targets)
        chances = functional.log_softmax(values, dim=-1)
        counted = targets != IGNORED
        place = targets.clamp(min=0)[..., None]
        sums = torch.where(counted, -chances.gather(-1, place)[..., 0], 0.0).sum(dim=1)
        share = counted / counts.clamp(min=1).to(values.dtype)[:, None]
        back = chances.exp_().mul_(share[..., None]).scatter_add_(-1, place, -share[..., None])
        return entering, back, sums, counts

    def backward(self, back: Tensor, weight: Tensor, entering: Tensor, same: bool) -> Tensor:
        below = back @ weight[0] if same else torch.bmm(back, weight)
        return below.mul_(entering > 0)


def convolutional(layers: Sequence[nn.Module]) -> Callable[[Tensors, Tensor], Tensor]:
    """The layers for many clients: images are (clients, channels, batch, height, width), so that a
    convolution is one product per client.
    """

    def logits(parameters: Tensors, values: Tensor) -> Tensor:
        rest = iter(parameters)
        if values.ndim == 5:  # (clients, batch, channels, height, width)
            values = values.transpose(1, 2)
        for layer in layers:
            if isinstance(layer, models.Square):
                values = values.reshape(values.shape[0], 1, values.shape[1], layer.side, layer.side)
            elif isinstance(layer, nn.Conv2d):
                weight, bias = next(rest), next(rest)
                tall, wide = weight.shape[-2:]
                clients, _, batch, height, width = values.shape
                patches = _patches(values, tall, wide)
                values = torch.baddbmm(bias[..., None], weight.flatten(2), patches)
                values = values.view(clients, -1, batch, height - tall + 1, width - wide + 1)
            elif isinstance(layer, nn.MaxPool2d):
                pooled = functional.max_pool2d(values.flatten(0, 1), layer.kernel_size)
                values = pooled.view(*values.shape[:2], *pooled.shape[1:])
            elif isinstance(layer, nn.Flatten):
                values = (values.transpose(1, 2) if values.ndim == 5 else values).flatten(2)
            elif isinstance(layer, nn.Linear):
                weight, bias = next(rest), next(rest)
                values = _product(values, weight, bias)
            else:
                values = values.relu()
        return values

    return logits


class _Product(torch.autograd.Function):
    """A linear layer for many clients: (clients, batch, inputs), (clients, outputs, inputs) and
    (clients, outputs). Autograd's own gradient of the weight would be transposed, and slow to add.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return torch.baddbmm(bias[:, None], values, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        (back,) = gradients
        return torch.bmm(back, weight), torch.bmm(back.mT, values), back.sum(dim=1)


class _Patches(torch.autograd.Function):
    """Every window of the images as a column: (clients, channels × window, batch × windows)."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, tall: int, wide: int) -> Tensor:
        ctx.shape, ctx.window = images.shape, (tall, wide)
        windows = images.unfold(3, tall, 1).unfold(4, wide, 1).permute(0, 1, 5, 6, 2, 3, 4)
        return windows.flatten(4).flatten(1, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        clients, channels, batch, height, width = ctx.shape
        tall, wide = ctx.window
        high, long = height - tall + 1, width - wide + 1
        columns = gradients[0].view(clients, channels, tall, wide, batch, high, long)
        images = columns.new_zeros(ctx.shape)
        for down in range(tall):
            for right in range(wide):
                images[..., down : down + high, right : right + long] += columns[:, :, down, right]
        return images, None, None


def _recurrent(model: models.Recurrent) -> Callable[[Tensors, Tensor], Tensor]:
    def logits(parameters: Tensors, symbols: Tensor) -> Tensor:
        rest = iter(parameters)
        embedding = next(rest)
        clients, batch, time = symbols.shape
        own = torch.arange(clients, device=symbols.device)[:, None, None] * embedding.shape[1]
        values = functional.embedding(symbols.transpose(1, 2) + own, embedding.flatten(0, 1))
        for _ in model.layers:
            weight, recurrent, bias = next(rest), next(rest), next(rest)
            entering = torch.baddbmm(bias[:, None], values.flatten(1, 2), weight)
            entering = entering.view(clients, time, batch, -1)
            values = recurrent_outputs(entering, recurrent)
        values = values.flatten(1, 2)
        for weight, bias in zip(rest, rest, strict=True):
            values = _product(values, weight, bias)
        return values.view(clients, time, batch, -1).transpose(1, 2)

    return logits


class _Memory(torch.autograd.Function):
    """`models.Layer` after its product with the inputs: (clients, time, batch, 4 × hidden) and the
    recurrent matrices (clients, hidden, 4 × hidden) to (clients, time, batch, hidden).

    The gradient of the recurrent matrix is one product over all time steps; autograd would write
    the whole matrix at every step.
    """

    @staticmethod
    def forward(ctx: Any, entering: Tensor, recurrent: Tensor) -> Tensor:
        clients, time, batch, gates = entering.shape
        hidden = gates // 4
        opened = torch.empty_like(entering)  # candidate, input, forget, output
        memories = entering.new_empty(clients, time, batch, hidden)
        squeezed, outputs = torch.empty_like(memories), torch.empty_like(memories)
        for step in range(time):
            if step == 0:
                opened[:, 0] = entering[:, 0]
            else:
                now = opened[:, step]
                torch.baddbmm(entering[:, step], outputs[:, step - 1], recurrent, out=now)
            opened[:, step, :, :hidden].tanh_()
            opened[:, step, :, hidden:].sigmoid_()
            candidate, enter, keep, leave = opened[:, step].chunk(4, dim=-1)
            memory = torch.mul(candidate, enter, out=memories[:, step])
            if step:
                memory.addcmul_(keep, memories[:, step - 1])
            torch.tanh(memory, out=squeezed[:, step])
            torch.mul(leave, squeezed[:, step], out=outputs[:, step])
        ctx.save_for_backward(recurrent, opened, memories, squeezed, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        recurrent, opened, memories, squeezed, outputs = ctx.saved_tensors
        above = gradients[0]
        clients, time, batch, hidden = outputs.shape
        candidate, enter, keep, leave = opened.chunk(4, dim=-1)
        before = torch.zeros_like(memories)
        before[:, 1:] = memories[:, :-1]
        # Derivative of the memory (for the last gate, of the output) by a gate's input.
        slopes = torch.cat(
            [
                enter * (1 - candidate * candidate),
                candidate * enter * (1 - enter),
                before * keep * (1 - keep),
                squeezed * leave * (1 - leave),
            ],
            dim=-1,
        ).view(clients, time, batch, 4, hidden)
        through = leave * (1 - squeezed * squeezed)  # derivative of the output by the memory
        back = torch.empty_like(opened)
        by_gate = back.view(clients, time, batch, 4, hidden)
        transposed = recurrent.mT
        memory = torch.zeros_like(memories[:, 0])
        output = above[:, time - 1]
        for step in range(time - 1, -1, -1):
            memory = memory.addcmul(output, through[:, step])
            torch.mul(slopes[:, step, :, :3], memory[:, :, None], out=by_gate[:, step, :, :3])
            torch.mul(slopes[:, step, :, 3], output, out=by_gate[:, step, :, 3])
            if step:
                output = torch.baddbmm(above[:, step - 1], back[:, step], transposed)
                memory = memory * keep[:, step]
        late, early = back[:, 1:].flatten(1, 2), outputs[:, :-1].flatten(1, 2)
        return back, torch.bmm(early.mT, late)


# torch leaves `apply` untyped.
_product: Callable[[Tensor, Tensor, Tensor], Tensor] = _Product.apply
_patches: Callable[[Tensor, int, int], Tensor] = _Patches.apply
recurrent_outputs: Callable[[Tensor, Tensor], Tensor] = _Memory.apply

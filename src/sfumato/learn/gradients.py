"""Gradients of many clients at once, for each kind of model.

Stacks of linear layers and rectifiers have handwritten gradients, and a recurrent layer is one
function with its own gradient. Convolutions are products with patches on a GPU; on a CPU such a
model trains one client after another, which is faster. Any other module goes through
`torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import SpecError
from sfumato.learn import models
from sfumato.learn.data import IGNORED, Clients

Tensors: TypeAlias = list[Tensor]
Pair: TypeAlias = tuple[Tensor, Tensor]

_STATEFUL = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)  # layers that draw random numbers or keep state in training


class Engine(Protocol):
    """Computes the gradients of one kind of model."""

    model: nn.Module
    together: bool  # whether a step is for many clients; else for one

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


def engine_of(model: nn.Module, clients: Clients, device: torch.device) -> Engine:
    plain = all(value.requires_grad for value in model.parameters())
    if plain and isinstance(model, models.Recurrent):
        return Batched(model, _recurrent(model))
    if plain and type(model) is nn.Sequential and clients.targets.ndim == 1:
        layers = list(model)
        if _is_linear_stack(layers, clients.inputs):
            return Linear(model)
        if _is_convolutional(layers, clients.inputs):
            if device.type == "cpu":  # one client's weights fit in the cache; those of many do not
                return Single(model)
            return Batched(model, convolutional(layers))
    for layer in model.modules():
        if layer.training and isinstance(layer, _STATEFUL):
            raise SpecError(
                f"{type(layer).__name__} cannot be trained for many clients at once: it draws"
                " random numbers or keeps state; call model.eval(), or leave it out"
            )
    return Vectorised(model)


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


class Vectorised:
    """Any module, through vmap: one gradient per client."""

    together = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names = list(models.trainable(model))

        def loss(parameters: Tensors, inputs: Tensor, targets: Tensor) -> Any:
            named = dict(zip(names, parameters, strict=True))
            logits = torch.func.functional_call(model, named, (inputs,))
            total = _losses(logits, targets).sum()
            return total / (targets != IGNORED).sum().clamp(min=1), total

        self._gradients = torch.func.vmap(torch.func.grad(loss, has_aux=True))

    def step(
        self, parameters: Tensors, into: Tensors, batch: Pair, rate: float, first: bool
    ) -> Pair:
        inputs, targets = batch
        gradients, sums = self._gradients(parameters, inputs, targets)
        _write(into, gradients, rate, first)
        return sums, targets_of(targets)


class Single:
    """One client at a time, through the module itself."""

    together = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = list(models.trainable(model))

    def step(
        self, parameters: Tensors, into: Tensors, batch: Pair, rate: float, first: bool
    ) -> Pair:
        inputs, targets = batch
        counts = targets_of(targets)
        with torch.enable_grad():
            leaves = [each[0].detach().requires_grad_() for each in parameters]
            named = dict(zip(self._names, leaves, strict=True))
            logits = torch.func.functional_call(self.model, named, (inputs[0],))
            total = _losses(logits, targets[0]).sum()
            gradients = torch.autograd.grad(total / counts[0].clamp(min=1), leaves)
        _write(into, [each[None] for each in gradients], rate, first)
        return total.detach()[None], counts


class Batched:
    """A forward pass for many clients at once; the sum of their losses gives all gradients."""

    together = True

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

    together = True

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


def _is_linear_stack(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """Whether these are linear layers with rectifiers between them, for flat examples."""
    if layers and isinstance(layers[0], nn.Flatten):
        layers = layers[1:] if _is_supported(layers[0]) else ()
    elif inputs.ndim != 2:
        return False
    return (
        len(layers) % 2 == 1
        and all(_is_supported(layer) for layer in layers)
        and all(type(layer) is nn.Linear for layer in layers[::2])
        and all(type(layer) is nn.ReLU for layer in layers[1::2])
    )


def _is_convolutional(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """Whether these are convolutions of images, one flattening, and linear layers."""
    flattened = [at for at, layer in enumerate(layers) if isinstance(layer, nn.Flatten)]
    if len(flattened) != 1 or not all(_is_supported(layer) for layer in layers):
        return False
    images, rest = layers[: flattened[0]], layers[flattened[0] + 1 :]
    squares = sum(isinstance(layer, models.Square) for layer in images)
    return (
        len(images) > 0
        and (isinstance(images[0], models.Square) if squares else inputs.ndim == 4)
        and squares <= 1
        and not any(type(layer) is nn.Linear for layer in images)
        and all(type(layer) in (nn.Linear, nn.ReLU) for layer in rest)
    )


def _is_supported(layer: nn.Module) -> bool:
    """Whether `convolutional` and `Linear` implement this layer."""
    if isinstance(layer, nn.Conv2d):
        options = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return options == ((1, 1), (0, 0), (1, 1), 1) and layer.bias is not None
    if isinstance(layer, nn.MaxPool2d):
        return (
            layer.stride == layer.kernel_size
            and layer.padding == 0
            and layer.dilation == 1
            and not layer.ceil_mode
            and not layer.return_indices
        )
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    if isinstance(layer, nn.Linear):
        return layer.bias is not None
    return type(layer) in (nn.ReLU, models.Square)


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

"""What clients do in a round, many of them at once.

A chunk of clients trains together: each has its own parameters, one row of a (clients, parameters)
array, and matrix products run over all rows in one call. A batch that is short is padded with
targets that count for nothing; a client that is done is not touched again. What a client computes
is what it would compute alone: a plain loop over its batches gives the same numbers up to rounding,
whatever the size of the chunk.

Stacks of linear layers and rectifiers have gradients written by hand, and recurrent layers are one
function with its own gradient. Convolutions are products with patches on a GPU; on a CPU such a
model trains one client after another, which was quicker. Any other module goes through
`torch.func.vmap`. Everything runs on the device of the parameters and of the clients' examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import SpecError
from sfumato.learn import models
from sfumato.learn.data import IGNORED, Clients
from sfumato.spec import require, spec

_NOT_ALONE = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)  # layers that draw, or keep, something besides parameters in training
_GHOST_CHUNK = 64  # clients whose examples are gathered together where no one's gradient is made


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Updates:
    """What a chunk of clients computed; leave out those that are not `sound`: not finite.

    `members` are positions in `chosen`, on the CPU. `deltas`, (members, parameters), are new minus
    old parameters, zero for a client without examples. `examples` counts the different examples
    used. `loss` is the mean over the targets seen, each before the step it was part of.
    """

    members: Tensor
    deltas: Tensor
    examples: Tensor
    loss: Tensor
    sound: Tensor

    def __repr__(self) -> str:  # never an update
        return f"Updates(of {len(self.members)} clients)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ClippedSum:
    """The sum of updates scaled to a norm of at most `clip`; per client in the order of `chosen`.

    `norms` are those before clipping. A client that is not `sound` is not in the sum.
    """

    total: Tensor
    norms: Tensor
    examples: Tensor
    loss: Tensor
    sound: Tensor

    def __repr__(self) -> str:  # never an update
        return f"ClippedSum(of {len(self.norms)} clients)"


def check_fit(model: nn.Module, clients: Clients) -> None:
    """Raise SpecError unless the model takes these inputs and has a class for each target.

    Runs the model on one example, and looks at all targets: once before training, not every round.
    """
    if clients.targets.numel() == 0:
        return
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            logits = model(clients.inputs[:1].to(device))
    except (RuntimeError, IndexError) as problem:
        raise SpecError(
            f"the model does not take inputs of shape {tuple(clients.inputs.shape[1:])}: {problem}"
        ) from problem
    if logits.shape[:-1] != clients.targets[:1].shape:
        raise SpecError(
            f"the model must give classes for targets of shape {tuple(clients.targets.shape[1:])};"
            f" it gives {tuple(logits.shape[1:])}"
        )
    largest = int(clients.targets.max())
    if largest >= logits.shape[-1]:
        raise SpecError(f"the model has {logits.shape[-1]} classes; a target is {largest}")
    if isinstance(model, models.Recurrent):
        largest = int(clients.inputs.max())
        if largest >= model.embedding.shape[0]:
            raise SpecError(
                f"the model knows {model.embedding.shape[0]} symbols; an input is {largest}"
            )


def updates(
    model: nn.Module,
    flat: Tensor,
    clients: Clients,
    chosen: Sequence[int] | Tensor,
    training: LocalTraining,
    *,
    generator: torch.Generator,
    chunk: int = 16,
) -> Iterator[Updates]:
    """Train the chosen clients from the parameters `flat`, `chunk` of them at a time.

    Clients with like numbers of batches train together, so chunks do not come in the order of
    `chosen`; `Updates.members` says who is in one. The generator, one of the CPU, is drawn from
    before this returns, and results do not depend on `chunk` or on the device but for rounding.
    """
    require(chunk >= 1, f"chunk must be at least 1; got {chunk}")
    engine = _engine(model, clients, flat.device)
    plan = _plan(model, flat, clients, chosen, training, generator)

    def chunks() -> Iterator[Updates]:
        for start in range(0, len(plan.queue), chunk):
            yield _train(engine, flat, clients, plan, plan.queue[start : start + chunk])

    return chunks()


def clipped_gradient_sum(
    model: nn.Module,
    flat: Tensor,
    clients: Clients,
    chosen: Sequence[int] | Tensor,
    training: LocalTraining,
    clip: float,
    *,
    generator: torch.Generator,
) -> ClippedSum:
    """The sum of the chosen clients' updates, each scaled down to a norm of at most `clip`.

    The same as clipping what `updates` gives with the same generator. Where a client takes one step
    with a stack of linear layers, no client's gradient is made: its norm follows from the products
    of the examples with one another, and the sum is one product over all clients (Li, Tramèr,
    Liang and Hashimoto 2022 call it ghost clipping). Such a norm is off by rounding relative to the
    examples' own gradients, not to their mean: where these cancel, by more than other norms.
    """
    require(clip > 0, f"clip must be above 0; got {clip}")
    engine = _engine(model, clients, flat.device)
    if training.steps == 1 and isinstance(engine, _Linear):
        plan = _plan(model, flat, clients, chosen, training, generator)
        return _ghost(engine, flat, clients, plan, clip)
    count = len(chosen)
    total = torch.zeros_like(flat)
    norms = torch.zeros(count, dtype=flat.dtype, device=flat.device)
    examples = torch.zeros(count, dtype=torch.int64, device=flat.device)
    loss, sound = torch.zeros_like(norms), torch.ones_like(norms, dtype=torch.bool)
    for part in updates(model, flat, clients, chosen, training, generator=generator):
        members = part.members.to(flat.device)
        norm = torch.linalg.vector_norm(part.deltas, dim=1)
        scale = _scale(norm, clip, part.sound)
        part.deltas.masked_fill_(~part.sound[:, None], 0)  # our own copy; 0 × inf would stay
        total += scale @ part.deltas
        norms[members], loss[members] = norm, part.loss
        examples[members], sound[members] = part.examples, part.sound
    return ClippedSum(total=total, norms=norms, examples=examples, loss=loss, sound=sound)


def _scale(norms: Tensor, clip: float, sound: Tensor) -> Tensor:
    return torch.where(sound, (clip / norms).clamp(max=1.0), 0.0)  # a norm of 0: clip/0 = inf → 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which examples every chosen client visits, in which order; all on the CPU."""

    training: LocalTraining
    order: Tensor  # examples; a client's epochs stand one after another
    start: Tensor  # of each client in `order`
    held: Tensor  # how many different examples a client may use
    steps: Tensor
    queue: Tensor  # positions of the clients, the most steps and examples first

    def batches(self, members: Tensor) -> _Batches:
        batch, held, steps = self.training.batch, self.held[members], self.steps[members]
        most = int(steps.max())
        step = torch.arange(most)[:, None]
        of_epoch = ((held + batch - 1) // batch).clamp(min=1)
        begin = self.start[members] + step // of_epoch * held + step % of_epoch * batch
        length = torch.where(
            step < steps, (held - step % of_epoch * batch).clamp(max=batch), torch.tensor(0)
        )
        width = int(length.max()) if most else 0
        valid = torch.arange(width) < length[..., None]
        place = torch.where(valid, begin[..., None] + torch.arange(width), begin[..., None])
        place = place.clamp(max=max(len(self.order) - 1, 0))  # of clients that are done
        active = (step < steps).sum(dim=1)
        widths = length.amax(dim=1) if most else length.sum(dim=1)
        full = length.sum(dim=1) == active * widths
        return _Batches(
            examples=self.order[place] if most else place,
            valid=valid,
            active=active.tolist(),
            widths=widths.tolist(),
            full=full.tolist(),
        )

    def used(self, members: Tensor) -> Tensor:
        return torch.minimum(self.held[members], self.steps[members] * self.training.batch)


@dataclass(frozen=True, slots=True)
class _Batches:
    """The examples of a chunk's steps, (steps, members, batch); a place that is not valid is one of
    the client's own examples, so that nothing of one client enters another's sums.
    """

    examples: Tensor
    valid: Tensor
    active: list[int]  # members, from the first, that still train
    widths: list[int]
    full: list[bool]

    def gather(
        self, clients: Clients, step: int, examples: Tensor, valid: Tensor, kind: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step; `examples` and `valid` are ours, on the clients' device."""
        rows, width = self.active[step], self.widths[step]
        index = examples[step, :rows, :width]
        flat_index = index.reshape(-1)
        inputs = clients.inputs.index_select(0, flat_index)
        if inputs.is_floating_point():
            inputs = inputs.to(kind)
        targets = clients.targets.index_select(0, flat_index)
        inputs = inputs.view(rows, width, *inputs.shape[1:])
        targets = targets.view(rows, width, *targets.shape[1:])
        if not self.full[step]:
            invalid = ~valid[step, :rows, :width]
            if targets.ndim == 3:
                invalid = invalid[..., None]
            targets = targets.masked_fill(invalid, IGNORED)
        return inputs, targets


def _plan(
    model: nn.Module,
    flat: Tensor,
    clients: Clients,
    chosen: Sequence[int] | Tensor,
    training: LocalTraining,
    generator: torch.Generator,
) -> _Plan:
    length = models.count(model)
    require(flat.shape == (length,), f"parameters must be ({length},); got {tuple(flat.shape)}")
    for part in (clients.inputs, clients.targets):
        require(
            part.device == flat.device,
            f"clients' examples must be where the parameters are, {flat.device}; call clients.to",
        )
    require(generator.device.type == "cpu", "the generator must be one of the CPU")
    chosen = torch.as_tensor(chosen, dtype=torch.int64, device="cpu").reshape(-1)
    if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= len(clients)):
        raise SpecError(f"chosen clients must be 0 to {len(clients) - 1}")
    sizes = clients.sizes[chosen]
    most = training.most_examples
    held = sizes if most is None else sizes.clamp(max=most)
    of_epoch = (held + training.batch - 1) // training.batch
    if training.steps is None:
        steps = of_epoch * training.epochs
    else:
        steps = torch.where(held > 0, torch.tensor(training.steps), torch.tensor(0))
    epochs = (steps + of_epoch - 1) // of_epoch.clamp(min=1)
    space = held * epochs
    start = space.cumsum(0) - space

    order = torch.empty(int(space.sum()), dtype=torch.int64)
    examples, owner, rank = _shuffled(clients.offsets[chosen], None, sizes, generator)
    kept = rank < held[owner]
    examples, owner, rank = examples[kept], owner[kept], rank[kept]
    order[start[owner] + rank] = examples
    for epoch in range(1, int(epochs.max()) if len(chosen) else 0):
        again = epochs > epoch
        first = start + (epoch - 1) * held
        places, owner, rank = _shuffled(first, again, held, generator)
        order[start[owner] + epoch * held[owner] + rank] = order[places]
    queue = torch.argsort(held, descending=True, stable=True)
    queue = queue[torch.argsort(steps[queue], descending=True, stable=True)]
    return _Plan(training=training, order=order, start=start, held=held, steps=steps, queue=queue)


def _shuffled(
    first: Tensor, wanted: Tensor | None, sizes: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`first[i]` to `first[i] + sizes[i] − 1` of each wanted client i in a random order, with i and
    the place in that order.
    """
    if wanted is not None:
        sizes = torch.where(wanted, sizes, torch.tensor(0))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    rank = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    keys = torch.rand(len(owner), dtype=torch.float64, generator=generator)
    # Sorted by client, then by key: keys are below 1, and owners already stand in order.
    shuffle = torch.argsort(owner + keys, stable=True)
    return (first[owner] + rank)[shuffle], owner, rank


class _Engine(Protocol):
    """How a kind of model makes its gradients."""

    model: nn.Module
    together: bool  # many clients in one step; else one

    def step(
        self,
        parameters: list[Tensor],
        into: list[Tensor],
        batch: tuple[Tensor, Tensor],
        rate: float,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        """Write −rate × gradient into `into` if this is the first step, else add it; give each
        client's summed loss and its number of targets. Parameters are (clients, …) each; in the
        first step all clients' are the same, views of one.
        """
        ...


@torch.no_grad()
def _train(
    engine: _Engine, flat: Tensor, clients: Clients, plan: _Plan, members: Tensor
) -> Updates:
    deltas = flat.new_empty(len(members), len(flat))
    loss = flat.new_zeros(len(members))
    group = len(members) if engine.together else 1
    for start in range(0, len(members), group):
        part = slice(start, start + group)
        _fill(engine, flat, clients, plan, members[part], deltas[part], loss[part])
    # A sum is not finite where an entry is not, and a sum that overflows is no update either.
    sound = torch.isfinite(deltas.sum(dim=1)) & torch.isfinite(loss)
    used = plan.used(members).to(flat.device)
    return Updates(members=members, deltas=deltas, examples=used, loss=loss, sound=sound)


def _fill(
    engine: _Engine,
    flat: Tensor,
    clients: Clients,
    plan: _Plan,
    members: Tensor,
    state: Tensor,
    loss: Tensor,
) -> None:
    """Write the members' updates to `state` and their mean losses to `loss`, which is zero."""
    batches = plan.batches(members)
    examples, valid = batches.examples.to(flat.device), batches.valid.to(flat.device)
    taken, more = (*batches.active, 0, 0)[:2]  # clients that take a step; that take another
    state[taken:] = 0
    seen = torch.zeros_like(loss)
    same = flat.expand(len(members), -1)
    for step, rows in enumerate(batches.active):
        batch = batches.gather(clients, step, examples, valid, flat.dtype)
        into = _views(engine.model, state[:rows])
        parameters = _views(engine.model, same[:rows]) if step == 0 else into
        sums, targets = engine.step(parameters, into, batch, plan.training.learning_rate, step == 0)
        loss[:rows] += sums
        seen[:rows] += targets
        if step == 0:
            state[:more] += flat
    state[:more] -= flat
    loss /= seen.clamp(min=1)


def _views(model: nn.Module, state: Tensor) -> list[Tensor]:
    return list(models.unflatten(model, state).values())


def _engine(model: nn.Module, clients: Clients, device: torch.device) -> _Engine:
    plain = all(value.requires_grad for value in model.parameters())
    if plain and isinstance(model, models.Recurrent):
        return _Batched(model, _recurrent(model))
    if plain and type(model) is nn.Sequential and clients.targets.ndim == 1:
        layers = list(model)
        if _is_linear_stack(layers, clients.inputs):
            return _Linear(model)
        if _is_convolutional(layers, clients.inputs):
            if device.type == "cpu":  # one client's weights fit in the cache; those of many do not
                return _Single(model)
            return _Batched(model, _convolutional(layers))
    for layer in model.modules():
        if layer.training and isinstance(layer, _NOT_ALONE):
            raise SpecError(
                f"{type(layer).__name__} cannot be trained for many clients at once: it draws or"
                " keeps something besides the parameters; call model.eval(), or leave it out"
            )
    return _Vectorised(model)


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


def _targets(targets: Tensor) -> Tensor:
    """How many of each client's targets count."""
    return (targets != IGNORED).flatten(1).sum(dim=1)


def _write(into: list[Tensor], gradients: Sequence[Tensor], rate: float, first: bool) -> None:
    for place, gradient in zip(into, gradients, strict=True):
        if first:
            torch.mul(gradient, -rate, out=place)
        else:
            place.add_(gradient, alpha=-rate)


class _Vectorised:
    """Any module, through vmap: one gradient a client."""

    together = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names = list(models.trainable(model))

        def loss(parameters: list[Tensor], inputs: Tensor, targets: Tensor) -> Any:
            named = dict(zip(names, parameters, strict=True))
            logits = torch.func.functional_call(model, named, (inputs,))
            total = _losses(logits, targets).sum()
            return total / (targets != IGNORED).sum().clamp(min=1), total

        self._gradients = torch.func.vmap(torch.func.grad(loss, has_aux=True))

    def step(
        self,
        parameters: list[Tensor],
        into: list[Tensor],
        batch: tuple[Tensor, Tensor],
        rate: float,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        gradients, sums = self._gradients(parameters, inputs, targets)
        _write(into, gradients, rate, first)
        return sums, _targets(targets)


class _Single:
    """One client at a time, through the module itself."""

    together = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = list(models.trainable(model))

    def step(
        self,
        parameters: list[Tensor],
        into: list[Tensor],
        batch: tuple[Tensor, Tensor],
        rate: float,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        counts = _targets(targets)
        with torch.enable_grad():
            leaves = [each[0].detach().requires_grad_() for each in parameters]
            named = dict(zip(self._names, leaves, strict=True))
            logits = torch.func.functional_call(self.model, named, (inputs[0],))
            total = _losses(logits, targets[0]).sum()
            gradients = torch.autograd.grad(total / counts[0].clamp(min=1), leaves)
        _write(into, [each[None] for each in gradients], rate, first)
        return total.detach()[None], counts


class _Batched:
    """A forward pass written for many clients; the sum of their losses has all the gradients."""

    together = True

    def __init__(self, model: nn.Module, logits: Callable[[list[Tensor], Tensor], Tensor]) -> None:
        self.model = model
        self._logits = logits

    def step(
        self,
        parameters: list[Tensor],
        into: list[Tensor],
        batch: tuple[Tensor, Tensor],
        rate: float,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        counts = _targets(targets)
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in parameters]
            sums = _losses(self._logits(leaves, inputs), targets).flatten(1).sum(dim=1)
            gradients = torch.autograd.grad((sums / counts.clamp(min=1)).sum(), leaves)
        _write(into, gradients, rate, first)
        return sums.detach(), counts


class _Linear:
    """Linear layers with rectifiers between them; the gradient is written out."""

    together = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(
        self,
        parameters: list[Tensor],
        into: list[Tensor],
        batch: tuple[Tensor, Tensor],
        rate: float,
        first: bool,
    ) -> tuple[Tensor, Tensor]:
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
        self, parameters: list[Tensor], batch: tuple[Tensor, Tensor], same: bool
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What enters each layer, (clients, batch, …); the loss's gradient in the last layer's
        output; each client's summed loss and number of targets.
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
        counts = _targets(targets)
        chances = functional.log_softmax(values, dim=-1)
        known = targets != IGNORED
        place = targets.clamp(min=0)[..., None]
        sums = torch.where(known, -chances.gather(-1, place)[..., 0], 0.0).sum(dim=1)
        share = known / counts.clamp(min=1).to(values.dtype)[:, None]
        back = chances.exp_().mul_(share[..., None]).scatter_add_(-1, place, -share[..., None])
        return entering, back, sums, counts

    def backward(self, back: Tensor, weight: Tensor, entering: Tensor, same: bool) -> Tensor:
        below = back @ weight[0] if same else torch.bmm(back, weight)
        return below.mul_(entering > 0)


@torch.no_grad()
def _ghost(engine: _Linear, flat: Tensor, clients: Clients, plan: _Plan, clip: float) -> ClippedSum:
    count, rate = len(plan.queue), plan.training.learning_rate
    total = torch.zeros_like(flat)
    into = _views(engine.model, total)
    parameters = [each[None] for each in _views(engine.model, flat)]
    norms = torch.zeros(count, dtype=flat.dtype, device=flat.device)
    loss, sound = torch.zeros_like(norms), torch.ones_like(norms, dtype=torch.bool)
    for start in range(0, count, _GHOST_CHUNK):
        members = plan.queue[start : start + _GHOST_CHUNK]
        batches = plan.batches(members)
        if not batches.active:
            continue
        members = members[: batches.active[0]].to(flat.device)
        examples, valid = batches.examples.to(flat.device), batches.valid.to(flat.device)
        batch = batches.gather(clients, 0, examples, valid, flat.dtype)
        entering, back, sums, counts = engine.forward(parameters, batch, True)
        backs = [back]
        for layer in reversed(range(1, len(entering))):
            backs.insert(0, engine.backward(backs[0], parameters[2 * layer], entering[layer], True))
        squares = torch.zeros_like(sums)
        for below, above in zip(entering, backs, strict=True):
            # ‖Σ aᵢ bᵢᵀ‖² = Σᵢⱼ (aᵢ·aⱼ)(bᵢ·bⱼ); a bias has bᵢ = 1.
            products = torch.bmm(below, below.mT).add_(1).mul_(torch.bmm(above, above.mT))
            squares += products.sum(dim=(1, 2))
        norm = rate * squares.clamp(min=0).sqrt()
        mean = sums / counts.clamp(min=1)
        good = torch.isfinite(norm) & torch.isfinite(mean)
        factor = (-rate * _scale(norm, clip, good))[:, None, None]
        bad = ~good[:, None, None]
        for layer, (below, above) in enumerate(zip(entering, backs, strict=True)):
            above = above.mul_(factor).masked_fill_(bad, 0).flatten(0, 1)
            below = below.masked_fill(bad, 0).flatten(0, 1)
            into[2 * layer].addmm_(above.mT, below)
            into[2 * layer + 1] += above.sum(dim=0)
        norms[members], loss[members], sound[members] = norm, mean, good
    used = plan.used(torch.arange(count)).to(flat.device)
    return ClippedSum(total=total, norms=norms, examples=used, loss=loss, sound=sound)


def _is_linear_stack(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """A linear layer, and others after rectifiers; flattened examples enter."""
    if layers and isinstance(layers[0], nn.Flatten):
        layers = layers[1:] if _is_known(layers[0]) else ()
    elif inputs.ndim != 2:
        return False
    return (
        len(layers) % 2 == 1
        and all(_is_known(layer) for layer in layers)
        and all(type(layer) is nn.Linear for layer in layers[::2])
        and all(type(layer) is nn.ReLU for layer in layers[1::2])
    )


def _is_convolutional(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """Convolutions of images, flattened once, and linear layers."""
    flattened = [at for at, layer in enumerate(layers) if isinstance(layer, nn.Flatten)]
    if len(flattened) != 1 or not all(_is_known(layer) for layer in layers):
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


def _is_known(layer: nn.Module) -> bool:
    """Whether `_convolutional` and `_Linear` do what this layer does."""
    if isinstance(layer, nn.Conv2d):
        usual = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return usual == ((1, 1), (0, 0), (1, 1), 1) and layer.bias is not None
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


def _convolutional(layers: Sequence[nn.Module]) -> Callable[[list[Tensor], Tensor], Tensor]:
    """The layers for many clients: images lie as (clients, channels, batch, height, width), so that
    a convolution is one product a client.
    """

    def logits(parameters: list[Tensor], values: Tensor) -> Tensor:
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
    (clients, outputs). Recorded, the weight's gradient would come out transposed, and slow to add.
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


def _recurrent(model: models.Recurrent) -> Callable[[list[Tensor], Tensor], Tensor]:
    def logits(parameters: list[Tensor], symbols: Tensor) -> Tensor:
        rest = iter(parameters)
        embedding = next(rest)
        clients, batch, time = symbols.shape
        own = torch.arange(clients, device=symbols.device)[:, None, None] * embedding.shape[1]
        values = functional.embedding(symbols.transpose(1, 2) + own, embedding.flatten(0, 1))
        for _ in model.layers:
            weight, recurrent, bias = next(rest), next(rest), next(rest)
            entering = torch.baddbmm(bias[:, None], values.flatten(1, 2), weight)
            entering = entering.view(clients, time, batch, -1)
            values = _memory(entering, recurrent)
        values = values.flatten(1, 2)
        for weight, bias in zip(rest, rest, strict=True):
            values = _product(values, weight, bias)
        return values.view(clients, time, batch, -1).transpose(1, 2)

    return logits


class _Memory(torch.autograd.Function):
    """`models.Layer` after its product with the inputs: (clients, time, batch, 4 × hidden) and the
    recurrent matrices (clients, hidden, 4 × hidden) to (clients, time, batch, hidden).

    The gradient in the recurrent matrix is one product over all time steps, where recording every
    step would write the whole matrix once a step.
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
        # How a gate's input moves the memory; for the last, the output.
        slopes = torch.cat(
            [
                enter * (1 - candidate * candidate),
                candidate * enter * (1 - enter),
                before * keep * (1 - keep),
                squeezed * leave * (1 - leave),
            ],
            dim=-1,
        ).view(clients, time, batch, 4, hidden)
        through = leave * (1 - squeezed * squeezed)  # the memory moves the output
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
_memory: Callable[[Tensor, Tensor], Tensor] = _Memory.apply

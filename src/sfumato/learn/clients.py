"""Local training of many clients at once.

A chunk of clients trains together: each has its own parameters, one row of a (clients, parameters)
array, and matrix products run over all rows in one call. A short batch is padded with targets that
count for nothing; a client that is done is not touched again. A client computes what it would
compute alone: a plain loop over its batches gives the same numbers up to rounding, whatever the
size of the chunk.

`gradients` computes the gradients of each kind of model. Clients of any other model train one after
another, in that plain loop: each has a copy of the module, and random numbers from a seed of its
own, so that no client changes what another computes, whatever the module does or keeps. Everything
runs on the device of the parameters and of the clients' examples.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sfumato.errors import SpecError
from sfumato.flow.model_terms import LocalTraining
from sfumato.learn import models
from sfumato.learn.data import IGNORED, Clients
from sfumato.learn.gradients import Engine, cross_entropy, engine_of, targets_of, views
from sfumato.learn.own_model import Loss, OwnModel
from sfumato.spec import require


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Updates:
    """The updates of a chunk of clients; callers must leave out those that are not `sound`, which
    are not finite.

    `members` are positions in the cohort, on the CPU. `deltas`, (members, parameters), are new
    minus old parameters, zero for a client without examples. `examples` counts the different
    examples used. `loss` is the mean over targets (over examples, with a loss of your own), each
    taken before the step it was part of.
    """

    members: Tensor
    deltas: Tensor
    examples: Tensor
    loss: Tensor
    sound: Tensor

    def __repr__(self) -> str:  # never an update
        return f"Updates(of {len(self.members)} clients)"


def check_fit(model: nn.Module, clients: Clients, loss: Loss = cross_entropy) -> None:
    """Raise SpecError unless the model takes these inputs, keeps its buffers, and has a class for
    each target, or the loss takes its outputs and the targets.

    Runs a copy of the model on one example and checks all targets: once before training, not every
    round.
    """
    if clients.targets.numel() == 0:
        return
    model = copy.deepcopy(model)
    device = next(model.parameters()).device
    first = torch.tensor([0, 0])  # twice, since some layers need more than one example
    inputs, targets = clients.inputs[first].to(device), clients.targets[first].to(device)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    try:
        with _drawing_from(0, device):
            outputs = model(inputs)
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        raise SpecError(
            f"the model does not take inputs of shape {tuple(clients.inputs.shape[1:])}: {problem}"
        ) from problem
    for name, value in model.named_buffers():
        if name not in buffers or not torch.equal(value, buffers[name]):
            raise SpecError(
                f"the model's buffer {name} changes in training, as the running statistics of "
                "BatchNorm do; clipping and noise protect parameters only",
                hint="use GroupNorm or LayerNorm, or freeze the layer with .eval()",
            )
    if loss is cross_entropy:
        _check_classes(model, clients, outputs)
        return
    shapes = (
        f"outputs of shape {tuple(outputs.shape[1:])} with targets of shape "
        f"{tuple(targets.shape[1:])}"
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")  # of MSELoss and others
            value = loss(outputs, targets)
    except UserWarning as problem:
        raise SpecError(
            f"outputs and targets must have the same shape for this loss, or it compares each "
            f"output of a batch with every target; got {shapes}",
            hint="squeeze the outputs, as with outputs.squeeze(-1) at the end of forward, or "
            "unsqueeze the targets, as with targets.unsqueeze(-1)",
        ) from problem
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        raise SpecError(
            f"the loss does not take {shapes}, {targets.dtype}: {problem}",
            hint="give float targets, such as targets.float()"
            if not targets.is_floating_point() and _takes(loss, outputs, targets.float())
            else None,
        ) from problem
    if not (isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad):
        raise SpecError(
            "the loss of a batch must be one number that depends on the parameters, such as a "
            'mean (reduction="mean")'
        )


def _takes(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    try:
        loss(outputs, targets)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


def _check_classes(model: nn.Module, clients: Clients, logits: Tensor) -> None:
    if clients.targets.is_floating_point():
        raise SpecError(
            "targets must be whole numbers, the classes that cross-entropy needs; they are "
            "real numbers",
            hint="call sfumato.train with a loss for them, such as torch.nn.MSELoss()",
        )
    least = int(clients.targets.min())
    require(least >= IGNORED, f"targets must be at least −1, which is ignored; got {least}")
    logits = logits[:1]
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
    cohort: Sequence[int] | Tensor,
    training: LocalTraining,
    *,
    generator: torch.Generator,
    chunk: int = 16,
    own: OwnModel | None = None,
) -> Iterator[Updates]:
    """Train the clients of a cohort from the parameters `flat`, `chunk` of them at a time; those of
    an `own` model, which `model` is a copy of, one after another.

    Clients with similar numbers of batches train together, so chunks are not in the order of
    `cohort`; `Updates.members` says which clients a chunk has. The generator must be on the CPU and
    is used before this returns. Up to rounding, results do not depend on `chunk` or the device.
    """
    require.at_least(1, chunk=chunk)
    engine = engine_of(model, flat.device) if own is None else None
    schedule = make_schedule(model, flat, clients, cohort, training, generator)
    fill = (
        _one_by_one(model, own, len(schedule.queue), generator)
        if engine is None
        else partial(_fill, engine)
    )

    def chunks() -> Iterator[Updates]:
        for start in range(0, len(schedule.queue), chunk):
            yield _train(fill, flat, clients, schedule, schedule.queue[start : start + chunk])

    return chunks()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which examples every client of a cohort visits, in which order; all on the CPU."""

    training: LocalTraining
    order: Tensor  # examples; a client's epochs stand one after another
    start: Tensor  # where each client's examples start in `order`
    usable: Tensor  # how many different examples a client may use
    steps: Tensor
    queue: Tensor  # positions of the clients, the most steps and examples first

    def batches(self, members: Tensor) -> Batches:
        batch, usable, steps = self.training.batch, self.usable[members], self.steps[members]
        most = int(steps.max())
        step = torch.arange(most)[:, None]
        of_epoch = ((usable + batch - 1) // batch).clamp(min=1)
        begin = self.start[members] + step // of_epoch * usable + step % of_epoch * batch
        length = torch.where(
            step < steps, (usable - step % of_epoch * batch).clamp(max=batch), torch.tensor(0)
        )
        width = int(length.max()) if most else 0
        valid = torch.arange(width) < length[..., None]
        place = torch.where(valid, begin[..., None] + torch.arange(width), begin[..., None])
        place = place.clamp(max=max(len(self.order) - 1, 0))  # for clients that are done
        active = (step < steps).sum(dim=1)
        widths = length.amax(dim=1) if most else length.sum(dim=1)
        full = length.sum(dim=1) == active * widths
        return Batches(
            examples=self.order[place] if most else place,
            valid=valid,
            active=active.tolist(),
            widths=widths.tolist(),
            full=full.tolist(),
        )

    def examples_used(self, members: Tensor) -> Tensor:
        return torch.minimum(self.usable[members], self.steps[members] * self.training.batch)


@dataclass(frozen=True, slots=True)
class Batches:
    """The examples of a chunk's steps, (steps, members, batch). Padding repeats one of the client's
    own examples, so that nothing of one client enters another's sums.
    """

    examples: Tensor
    valid: Tensor
    active: list[int]  # how many members, from the first, still train
    widths: list[int]
    full: list[bool]

    def gather(
        self, clients: Clients, step: int, examples: Tensor, valid: Tensor, kind: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step; `examples` and `valid` are on the clients' device."""
        rows, width = self.active[step], self.widths[step]
        index = examples[step, :rows, :width]
        flat_index = index.reshape(-1)
        inputs = clients.inputs.index_select(0, flat_index)
        targets = clients.targets.index_select(0, flat_index)
        inputs, targets = (
            part.to(kind) if part.is_floating_point() else part for part in (inputs, targets)
        )
        inputs = inputs.view(rows, width, *inputs.shape[1:])
        targets = targets.view(rows, width, *targets.shape[1:])
        if not self.full[step]:
            invalid = ~valid[step, :rows, :width]
            if targets.ndim == 3:
                invalid = invalid[..., None]
            targets = targets.masked_fill(invalid, IGNORED)
        return inputs, targets


def make_schedule(
    model: nn.Module,
    flat: Tensor,
    clients: Clients,
    cohort: Sequence[int] | Tensor,
    training: LocalTraining,
    generator: torch.Generator,
) -> Schedule:
    length = models.count(model)
    require(flat.shape == (length,), f"parameters must be ({length},); got {tuple(flat.shape)}")
    for part in (clients.inputs, clients.targets):
        require(
            part.device == flat.device,
            f"clients' examples must be where the parameters are, {flat.device}; call clients.to",
        )
    require(generator.device.type == "cpu", "the generator must be one of the CPU")
    cohort = torch.as_tensor(cohort, dtype=torch.int64, device="cpu").reshape(-1)
    if len(cohort) and (int(cohort.min()) < 0 or int(cohort.max()) >= len(clients)):
        raise SpecError(f"clients of a cohort must be 0 to {len(clients) - 1}")
    sizes = clients.sizes[cohort]
    most = training.most_examples
    usable = sizes if most is None else sizes.clamp(max=most)
    of_epoch = (usable + training.batch - 1) // training.batch
    if training.steps is None:
        steps = of_epoch * training.epochs
    else:
        steps = torch.where(usable > 0, torch.tensor(training.steps), torch.tensor(0))
    epochs = (steps + of_epoch - 1) // of_epoch.clamp(min=1)
    space = usable * epochs
    start = space.cumsum(0) - space

    order = torch.empty(int(space.sum()), dtype=torch.int64)
    examples, owner, rank = _shuffled(clients.offsets[cohort], None, sizes, generator)
    within = rank < usable[owner]
    examples, owner, rank = examples[within], owner[within], rank[within]
    order[start[owner] + rank] = examples
    for epoch in range(1, int(epochs.max()) if len(cohort) else 0):
        again = epochs > epoch
        first = start + (epoch - 1) * usable
        places, owner, rank = _shuffled(first, again, usable, generator)
        order[start[owner] + epoch * usable[owner] + rank] = order[places]
    queue = torch.argsort(usable, descending=True, stable=True)
    queue = queue[torch.argsort(steps[queue], descending=True, stable=True)]
    return Schedule(training, order, start, usable, steps, queue)


def _shuffled(
    first: Tensor, mask: Tensor | None, sizes: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`first[i]` to `first[i] + sizes[i] − 1` of each client i (where `mask` is true) in a random
    order, with i and the place in that order.
    """
    if mask is not None:
        sizes = torch.where(mask, sizes, torch.tensor(0))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    rank = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    keys = torch.rand(len(owner), dtype=torch.float64, generator=generator)
    # Sorted by client, then by key: keys are below 1, and owners already stand in order.
    shuffle = torch.argsort(owner + keys, stable=True)
    return (first[owner] + rank)[shuffle], owner, rank


_Fill: TypeAlias = Callable[[Tensor, Clients, Schedule, Tensor, Tensor, Tensor], None]
"""Trains the members, and writes their updates and mean losses to the last two tensors."""


@torch.no_grad()
def _train(
    fill: _Fill, flat: Tensor, clients: Clients, schedule: Schedule, members: Tensor
) -> Updates:
    deltas = flat.new_empty(len(members), len(flat))
    loss = flat.new_zeros(len(members))
    fill(flat, clients, schedule, members, deltas, loss)
    # The sum is not finite where an entry is not; an update whose sum overflows is not used either.
    sound = torch.isfinite(deltas.sum(dim=1)) & torch.isfinite(loss)
    examples = schedule.examples_used(members).to(flat.device)
    return Updates(members=members, deltas=deltas, examples=examples, loss=loss, sound=sound)


def _fill(
    engine: Engine,
    flat: Tensor,
    clients: Clients,
    schedule: Schedule,
    members: Tensor,
    state: Tensor,
    loss: Tensor,
) -> None:
    """Train the members together; `loss` is zero."""
    batches = schedule.batches(members)
    examples, valid = batches.examples.to(flat.device), batches.valid.to(flat.device)
    once, twice = (*batches.active, 0, 0)[:2]  # clients with at least one step, with at least two
    state[once:] = 0
    counts = torch.zeros_like(loss)
    same = flat.expand(len(members), -1)
    for step, rows in enumerate(batches.active):
        batch = batches.gather(clients, step, examples, valid, flat.dtype)
        into = views(engine.model, state[:rows])
        parameters = views(engine.model, same[:rows]) if step == 0 else into
        sums, targets = engine.step(
            parameters, into, batch, schedule.training.learning_rate, step == 0
        )
        loss[:rows] += sums
        counts[:rows] += targets
        if step == 0:
            state[:twice] += flat
    state[:twice] -= flat
    loss /= counts.clamp(min=1)


def _one_by_one(
    model: nn.Module, own: OwnModel | None, count: int, generator: torch.Generator
) -> _Fill:
    """Train clients one after another, with PyTorch alone: slow, and right for every module."""
    loss_of, optimizer = (own.loss, own.optimizer) if own else (cross_entropy, None)
    seeds = torch.randint(1 << 62, (count,), generator=generator).tolist()

    @torch.enable_grad()
    def train(
        flat: Tensor, clients: Clients, schedule: Schedule, member: int
    ) -> tuple[Tensor, Tensor]:
        """The parameters after a client's local training, and its mean loss."""
        batches = schedule.batches(torch.tensor([member]))
        examples, valid = batches.examples.to(flat.device), batches.valid.to(flat.device)
        copied = copy.deepcopy(model)
        models.assign(copied, flat)
        parameters = list(models.trainable(copied).values())
        stepper = optimizer(parameters) if optimizer else None
        total, counted = flat.new_zeros(()), flat.new_zeros(())
        for step in range(len(batches.active)):
            inputs, targets = batches.gather(clients, step, examples, valid, flat.dtype)
            copied.zero_grad()
            loss = loss_of(copied(inputs[0]), targets[0])
            torch.autograd.backward(loss)
            if stepper is not None:
                stepper.step()
            else:
                _descend(parameters, schedule.training.learning_rate)
            count = targets_of(targets)[0] if loss_of is cross_entropy else len(targets[0])
            total, counted = total + loss.detach() * count, counted + count
        return models.flatten(copied), total / counted.clamp(min=1)

    def fill(
        flat: Tensor,
        clients: Clients,
        schedule: Schedule,
        members: Tensor,
        state: Tensor,
        loss: Tensor,
    ) -> None:
        for place, member in enumerate(members.tolist()):
            with _drawing_from(seeds[member], flat.device):
                trained, loss[place] = train(flat, clients, schedule, member)
            torch.sub(trained, flat, out=state[place])

    return fill


@torch.no_grad()
def _descend(parameters: list[nn.Parameter], rate: float) -> None:
    for value in parameters:
        if value.grad is not None:
            value.add_(value.grad, alpha=-rate)


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of layers come from this seed; the process's generators stay as they are."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

"""Local training of many clients at once.

A chunk of clients trains together: each has its own parameters, one row of a (clients, parameters)
array, and matrix products run over all rows in one call. A short batch is padded with targets that
count for nothing; a client that is done is not touched again. A client computes what it would
compute alone: a plain loop over its batches gives the same numbers up to rounding, whatever the
size of the chunk.

`gradients` computes the gradients of each kind of model. Everything runs on the device of the
parameters and of the clients' examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.errors import SpecError
from sfumato.flow.model_terms import LocalTraining
from sfumato.learn import models
from sfumato.learn.data import IGNORED, Clients
from sfumato.learn.gradients import Engine, engine_of, views
from sfumato.spec import require


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Updates:
    """The updates of a chunk of clients; callers must leave out those that are not `sound`, which
    are not finite.

    `members` are positions in the cohort, on the CPU. `deltas`, (members, parameters), are new
    minus old parameters, zero for a client without examples. `examples` counts the different
    examples used. `loss` is the mean over targets, each taken before the step it was part of.
    """

    members: Tensor
    deltas: Tensor
    examples: Tensor
    loss: Tensor
    sound: Tensor

    def __repr__(self) -> str:  # never an update
        return f"Updates(of {len(self.members)} clients)"


def check_fit(model: nn.Module, clients: Clients) -> None:
    """Raise SpecError unless the model takes these inputs and has a class for each target.

    Runs the model on one example and checks all targets: once before training, not every round.
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
    cohort: Sequence[int] | Tensor,
    training: LocalTraining,
    *,
    generator: torch.Generator,
    chunk: int = 16,
) -> Iterator[Updates]:
    """Train the clients of a cohort from the parameters `flat`, `chunk` of them at a time.

    Clients with similar numbers of batches train together, so chunks are not in the order of
    `cohort`; `Updates.members` says which clients a chunk has. The generator must be on the CPU and
    is used before this returns. Up to rounding, results do not depend on `chunk` or the device.
    """
    require(chunk >= 1, f"chunk must be at least 1; got {chunk}")
    engine = engine_of(model, clients, flat.device)
    schedule = make_schedule(model, flat, clients, cohort, training, generator)

    def chunks() -> Iterator[Updates]:
        for start in range(0, len(schedule.queue), chunk):
            yield _train(engine, flat, clients, schedule, schedule.queue[start : start + chunk])

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


@torch.no_grad()
def _train(
    engine: Engine, flat: Tensor, clients: Clients, schedule: Schedule, members: Tensor
) -> Updates:
    deltas = flat.new_empty(len(members), len(flat))
    loss = flat.new_zeros(len(members))
    group = len(members) if engine.together else 1
    for start in range(0, len(members), group):
        part = slice(start, start + group)
        _fill(engine, flat, clients, schedule, members[part], deltas[part], loss[part])
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
    """Write the members' updates to `state` and their mean losses to `loss`, which is zero."""
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

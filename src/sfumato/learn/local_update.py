"""What one client of a training computes, on its own device: needs PyTorch, and no other client."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.flow.model_terms import F32, ModelTerms, Train
from sfumato.learn import models
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.data import Clients
from sfumato.privacy import Rng


def update(terms: ModelTerms, parameters: F32, inputs: Tensor, targets: Tensor, rng: Rng) -> F32:
    """New minus old parameters after the local training that `terms` asks for: what
    `learn.clients.updates` gives for a client with these examples alone.

    `inputs` is (examples, …), `targets` (examples,) or (examples, time), as in `learn.data`; there
    may be none, and then the update is zeros, as is one that is not finite or too long.
    """
    model = models.make(  # for its shape; its own, since some are called with parameters put in
        terms.model, inputs=terms.inputs, classes=terms.classes, hidden=terms.hidden, seed=0
    )
    held = Clients(inputs, targets, torch.tensor([0, len(targets)]))
    check_fit(model, held)
    flat = torch.tensor(parameters)
    chance = torch.Generator().manual_seed(int(rng.words(1)[0]))
    (part,) = updates(model, flat, held, [0], terms.local, generator=chance, chunk=1)
    delta = part.deltas[0] if bool(part.sound[0]) else torch.zeros_like(flat)
    return terms.bounded_update(delta.numpy())


def trainer(inputs: Tensor, targets: Tensor) -> Train:
    """A client with these examples, for `Device.join`."""

    def train(terms: ModelTerms, parameters: F32, rng: Rng) -> F32:
        return update(terms, parameters, inputs, targets, rng)

    return train


def trainers(clients: Clients) -> list[Train]:
    """All of them, one by one."""
    return [trainer(*clients.held(client)) for client in range(len(clients))]

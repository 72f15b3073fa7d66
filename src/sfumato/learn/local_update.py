"""The update of one client of a training, computed on its own device with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.arrays import F32
from sfumato.flow.model_terms import ModelTerms, Train
from sfumato.learn import models
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.data import Clients
from sfumato.privacy import Rng


def update(terms: ModelTerms, parameters: F32, inputs: Tensor, targets: Tensor, rng: Rng) -> F32:
    """New minus old parameters after the local training that `terms` asks for: the result of
    `learn.clients.updates` for one client with these examples.

    `inputs` is (examples, …), `targets` (examples,) or (examples, time), as in `learn.data`; there
    may be none. Without examples, or if it is not finite or too long, the update is zeros.
    """
    model = models.make(  # only its shape matters; threads must not share one
        terms.model, inputs=terms.inputs, classes=terms.classes, hidden=terms.hidden, seed=0
    )
    client = Clients(inputs, targets, torch.tensor([0, len(targets)]))
    check_fit(model, client)
    flat = torch.tensor(parameters)
    chance = torch.Generator().manual_seed(int(rng.words(1)[0]))
    (part,) = updates(model, flat, client, [0], terms.local, generator=chance, chunk=1)
    delta = part.deltas[0] if bool(part.sound[0]) else torch.zeros_like(flat)
    return terms.bounded_update(delta.numpy())


def trainer(inputs: Tensor, targets: Tensor) -> Train:
    """The training function of a client with these examples, for `Device.join`."""

    def train(terms: ModelTerms, parameters: F32, rng: Rng) -> F32:
        return update(terms, parameters, inputs, targets, rng)

    return train


def trainers(clients: Clients) -> list[Train]:
    """The training function of each client."""
    return [trainer(*clients.examples(client)) for client in range(len(clients))]

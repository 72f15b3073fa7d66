"""Federated training: clients' examples, their local training, and the sum of their updates.

Needs PyTorch, which sfumato itself does not: `pip install "sfumato[learn]"`.

    models       the papers' models by name; a model's parameters as one vector
    data         clients and their examples, from files
    clients      local training of many clients at once
    gradients    how each kind of model computes its gradients
    tensors      sketches of tensors, on the processor and on a GPU
    compression  rules that size sketches
    training     rounds, checkpoints, figures
"""

from __future__ import annotations

import importlib.util

from sfumato.errors import SfumatoError

if importlib.util.find_spec("torch") is None:
    raise SfumatoError(
        "sfumato.learn needs PyTorch, which is not installed",
        hint='pip install "sfumato[learn]"',
    )

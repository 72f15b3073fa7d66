"""A model that a collector released, as a file that PyTorch reads."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sfumato.errors import DataError
from sfumato.flow.model_terms import digest_of
from sfumato.learn import models


def state_file(released: Mapping[str, Any], parameters: bytes) -> bytes:
    """What `torch.load` and `load_state_dict` take, from a release's JSON and its parameters."""
    if digest_of(parameters) != released["model"]["sha256"]:
        raise DataError("the parameters must be those of the release; their digest differs")
    keys = released["study"]["training"]
    sizes = {name: keys.get(name) for name in ("inputs", "classes", "hidden")}
    model = models.make(keys["model"], **sizes, seed=0)
    models.assign(model, torch.from_numpy(np.frombuffer(parameters, dtype="<f4").copy()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()

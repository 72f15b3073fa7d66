"""Private federated analytics and learning.

Ask a fleet of devices a question and get an answer with error bars, a true privacy statement and
its cost. `plan(study)` sizes the question, `simulate(plan, data)` answers it for simulated devices,
and `train(study, data)` trains a model on them; the parts are in `sfumato.sketch`,
`sfumato.privacy` and `sfumato.flow`.

The names below are imported when they are first used, so that a device (`sfumato.device`), which
uses none of them, needs only numpy and cryptography.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.errors import SfumatoError
    from sfumato.flow.release import CountRelease, MeanRelease, Release
    from sfumato.learn.data import Federated
    from sfumato.planning import Plan, plan
    from sfumato.simulation.simulate import simulate
    from sfumato.simulation.train import TrainedModel, train
    from sfumato.study import Study

__all__ = [
    "CountRelease",
    "Federated",
    "MeanRelease",
    "Plan",
    "Release",
    "SfumatoError",
    "Study",
    "TrainedModel",
    "plan",
    "simulate",
    "train",
]
__version__ = "0.1.0"

_HOMES = {
    "CountRelease": "flow.release",
    "Federated": "learn.data",
    "MeanRelease": "flow.release",
    "Plan": "planning",
    "Release": "flow.release",
    "SfumatoError": "errors",
    "Study": "study",
    "TrainedModel": "simulation.train",
    "plan": "planning",
    "simulate": "simulation.simulate",
    "train": "simulation.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

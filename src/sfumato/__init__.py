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
    from sfumato.errors import (
        BudgetError,
        DataError,
        ImpossibleError,
        SfumatoError,
        SimulationWarning,
        SpecError,
        StudyError,
    )
    from sfumato.flow.release import CountRelease, MeanRelease, Release
    from sfumato.learn.data import Federated as Federated
    from sfumato.planning import Plan, plan
    from sfumato.simulation.simulate import simulate
    from sfumato.simulation.train import TrainedModel as TrainedModel
    from sfumato.simulation.train import train as train
    from sfumato.study import Study

__all__ = [
    "BudgetError",
    "CountRelease",
    "DataError",
    "ImpossibleError",
    "MeanRelease",
    "Plan",
    "Release",
    "SfumatoError",
    "SimulationWarning",
    "SpecError",
    "Study",
    "StudyError",
    "plan",
    "simulate",
]
__version__ = "0.1.0"

_HOMES = {
    "BudgetError": "errors",
    "CountRelease": "flow.release",
    "DataError": "errors",
    "ImpossibleError": "errors",
    "MeanRelease": "flow.release",
    "Plan": "planning",
    "Release": "flow.release",
    "SfumatoError": "errors",
    "SimulationWarning": "errors",
    "SpecError": "errors",
    "Study": "study",
    "StudyError": "errors",
    "plan": "planning",
    "simulate": "simulation.simulate",
}
_LEARN = {  # these need PyTorch, so `from sfumato import *` leaves them out
    "Federated": "learn.data",
    "TrainedModel": "simulation.train",
    "train": "simulation.train",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _LEARN.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _LEARN:
        importlib.import_module(f"{__name__}.learn")  # says what to install
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LEARN})

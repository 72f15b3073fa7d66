"""Private federated analytics and learning.

Ask a fleet of devices a question and get an answer with error bars, a true privacy statement and
its cost. `plan(study)` sizes the question, and `simulate(plan, data)` answers it for simulated
devices; the parts are in `sfumato.sketch`, `sfumato.privacy` and `sfumato.flow`.

The names below are imported when they are first used, so that a device (`sfumato.device`), which
uses none of them, needs only numpy and cryptography.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfumato.errors import SfumatoError
    from sfumato.flow.release import CountRelease, MeanRelease, Release
    from sfumato.planning import Plan, plan
    from sfumato.simulation.simulate import simulate
    from sfumato.study import Study

__all__ = [
    "CountRelease",
    "MeanRelease",
    "Plan",
    "Release",
    "SfumatoError",
    "Study",
    "plan",
    "simulate",
]
__version__ = "0.1.0"

_HOMES = {
    "CountRelease": "flow.release",
    "MeanRelease": "flow.release",
    "Plan": "planning",
    "Release": "flow.release",
    "SfumatoError": "errors",
    "Study": "study",
    "plan": "planning",
    "simulate": "simulation.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

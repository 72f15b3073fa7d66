"""Keys that studies need, and access to designs that only some questions have."""

from __future__ import annotations

from typing import Any

from sfumato.planning import Plan
from sfumato.questions.frequencies.design import FrequencyDesign

NEEDED: dict[str, dict[str, Any]] = {"mean": {"dimensions": 30, "clip": 1.0}}
"""Keys that every study of a question needs."""


def sums_of(plan: Plan) -> FrequencyDesign:
    """The design of frequencies that are answered by sums."""
    assert isinstance(plan.design, FrequencyDesign)
    return plan.design

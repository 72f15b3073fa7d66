"""Access to designs that only some questions have."""

from __future__ import annotations

from sfumato.planning import Plan
from sfumato.questions.frequencies.design import FrequencyDesign


def sums_of(plan: Plan) -> FrequencyDesign:
    """The design of frequencies that are answered by sums."""
    assert isinstance(plan.design, FrequencyDesign)
    return plan.design

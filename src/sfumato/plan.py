"""The old name of `sfumato.planning`; imports from here keep working."""

from sfumato.planning import Plan, plan

__all__ = [
    "Plan",
    "plan",
]

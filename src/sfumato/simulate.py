"""The old name of `sfumato.simulation.simulate`; imports from here keep working."""

from sfumato.simulation.simulate import simulate

__all__ = [
    "simulate",
]

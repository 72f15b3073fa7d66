"""How far one device can move a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norms:
    """Bounds on one device's contribution to a table, in every norm that noise asks for.

    `unit_cells` says more than a bound where it can: the contribution is exactly that many cells,
    each moved by exactly one (0 if no such thing is known). It makes accounting exact.
    """

    l1: float
    l2: float
    unit_cells: int = 0

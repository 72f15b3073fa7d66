"""Contributions to a table: bounds on one device's, and checks of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from sfumato.arrays import I64
from sfumato.errors import SpecError


@dataclass(frozen=True, slots=True)
class Norms:
    """Bounds on one device's contribution to a table, in every norm that noise needs.

    `unit_cells` is more than a bound: the contribution is exactly that many cells, each moved by
    exactly one (0 if that is not known). It makes accounting exact. `largest` is the most that a
    cell moves, if that is not the number of values.
    """

    l1: float
    l2: float
    unit_cells: int = 0
    largest: int | None = field(default=None, repr=False)


def listed_norms(values: int, copies: bool) -> Norms:
    """The contribution of one device with `values` values to the counts of a list: as many counts
    by one, or if `copies` count, perhaps one of them by all."""
    if copies:
        return Norms(l1=values, l2=values)
    return Norms(l1=values, l2=math.sqrt(values), unit_cells=values)


def check_weights(weights: I64 | None, count: int) -> None:
    """Raise unless there is one whole weight per value: kernels do not check."""
    if weights is None:
        return
    if weights.shape != (count,) or weights.dtype != np.int64:
        raise SpecError(
            f"weights must be {count} 64-bit integers; got {weights.dtype} of shape {weights.shape}"
        )

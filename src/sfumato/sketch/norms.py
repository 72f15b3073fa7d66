"""What goes into a table: how far one device can move it, and with what weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sfumato.errors import SpecError


@dataclass(frozen=True, slots=True)
class Norms:
    """Bounds on one device's contribution to a table, in every norm that noise asks for.

    `unit_cells` says more than a bound where it can: the contribution is exactly that many cells,
    each moved by exactly one (0 if no such thing is known). It makes accounting exact. `largest` is
    the most that a cell moves, where that is not the number of values.
    """

    l1: float
    l2: float
    unit_cells: int = 0
    largest: int | None = field(default=None, repr=False)


def check_weights(weights: npt.NDArray[np.int64] | None, count: int) -> None:
    """Raise unless there is one whole weight a value: kernels do not look."""
    if weights is None:
        return
    if weights.shape != (count,) or weights.dtype != np.int64:
        raise SpecError(
            f"weights must be {count} 64-bit integers; got {weights.dtype} of shape {weights.shape}"
        )

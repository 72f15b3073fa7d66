"""How large a sketch must be: the formulas of paper 000, section 2, and their assumptions.

Equations (2) and (3) have an unspecified constant. The paper's experiments use 2, which misses the
target error by a factor of up to seven; 6 met it in every case tried, so we use 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sfumato.errors import SpecError

F64 = npt.NDArray[np.float64]

CONSTANT = 6.0
PAPER_CONSTANT = 2.0
RISK = 0.1  # the paper's p: the chance that some item misses the target error


def rows_for(items: int, *, risk: float = RISK, paper: bool = False) -> int:
    """ln(2·items/risk) rows; odd, so that the median is one reading, unless `paper`."""
    rows = math.ceil(math.log(2 * items / risk))
    return rows if paper or rows % 2 else rows + 1


def minimax_width(target: float, *, constant: float, devices: int) -> float:
    """Equation (3): enough for any data. `target` is a share of the devices."""
    _check_target(target)
    return constant * min(2 / target, devices)


def instance_width(shares: F64, target: float, *, constant: float, devices: int) -> float:
    """Equation (2): enough for data with these shares.

    >>> instance_width(np.array([.5, .25, .1, .05, .05, .05]), .08, constant=2, devices=10**6)
    8.34375
    """
    _check_target(target)
    heavy = shares >= target
    light = float(np.sum(shares[~heavy] ** 2))
    return constant * min(int(heavy.sum()) + light / target**2, devices)


def majority_collisions(items: int, rows: int, width: int) -> float:
    """The expected number of items that collide with the heaviest one in a majority of rows.

    Their median is the heaviest item's count, not their own: with fewer rows than the theory
    demands, they set the largest error. Hybrid rounds repeat them; Fresh rounds draw them anew.
    """
    majority = rows // 2 + 1
    return items * math.comb(rows, majority) * float(width) ** -majority


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Shares beta·i^−alpha for ranks i = 1, 2, … as long as they sum to at most one."""

    alpha: float
    beta: float

    def shares(self, items: int) -> F64:
        """The shares of ranks 1 .. i*, i* being the last rank at which the sum is at most one."""
        shares = self.beta * np.arange(1, items + 1, dtype=np.float64) ** -self.alpha
        return shares[np.cumsum(shares) <= 1 + 1e-12]


def fit_power_law(largest: F64, *, noise: float = 0.0, most: int = 20) -> PowerLaw:
    """Fit the largest shares by least squares, as the two-phase method does (paper 000, section 2).

    The fit is in the linear domain, started at the fit of the logarithms. It uses only shares above
    three times the `noise`, and at most `most` of them.
    """
    from scipy import optimize  # slow to import, and only pilots need it

    ranked = np.sort(largest)[::-1][:most]
    clear = ranked[ranked > max(3 * noise, 0.0)]
    if clear.size < 2:
        raise SpecError(
            f"a power law needs at least two shares above the noise; got {clear.size}",
            hint="use a larger pilot",
        )
    rank = np.arange(1, clear.size + 1, dtype=np.float64)
    slope, intercept = np.polyfit(np.log(rank), np.log(clear), 1)
    start = (max(-slope, 1e-3), min(math.exp(intercept), 1.0))
    fitted = optimize.least_squares(
        lambda law: law[1] * rank ** -law[0] - clear, start, bounds=([1e-3, 1e-12], [50.0, 1.0])
    )
    return PowerLaw(alpha=float(fitted.x[0]), beta=float(fitted.x[1]))


def _check_target(target: float) -> None:
    if not 0 < target < 1:
        raise SpecError(f"target_error must be above 0 and below 1; got {target}")

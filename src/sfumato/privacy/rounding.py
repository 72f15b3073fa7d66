"""Real vectors as whole numbers, and back, so that a modular sum can add them."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from sfumato.arrays import F64, I64
from sfumato.errors import SpecError
from sfumato.privacy.samplers import Rng
from sfumato.spec import require, spec

LARGEST = 2.0**52  # largest scaled cell: beyond it a double has no fractions
ROUNDING_COST = 0.01  # variance that rounding may add, as a share of the noise's
COARSEST = 1000.0  # fewest whole numbers in the largest norm of a table
_SLACK = 1e-9  # relative rounding error of a norm


@spec("rounding")
class Rounding:
    """Scale a vector and round each cell up or down at random, so that the mean is kept; repeat
    until the result is no longer than `l2` (Kairouz, Liu and Steinke 2021).

    Claim: whatever the input of norm `clip`, the integers' norms are at most `l1` and `l2`.
    Proof: `l2` is checked before anything is returned. An integer is at most its square, so
        l1 ≤ l2²; and l1 ≤ √cells·l2 for every vector.
    Assumes: nothing about `rng`: privacy comes from noise that is calibrated to these norms.
    Utility: an attempt is too long with probability at most `risk`, since the squared norm is below
        (s·c)² + d/4 + √(2·ln(1/risk))·(s·c + √d/2) otherwise; so the mean of a vector is off by at
        most risk/(1 − risk)·√d/s in norm. The variance of a cell is at most 1/(4·s²).
    """

    unit_cells: ClassVar[int] = 0  # cells move by any amount within the norms
    clip: float  # largest L2 norm of a vector
    scale: float  # whole numbers per unit
    cells: int
    risk: float = 2**-10

    def check(self) -> None:
        require.above(0, clip=self.clip, scale=self.scale)
        require.at_least(1, cells=self.cells)
        require(0 < self.risk < 1, f"risk must be above 0 and below 1; got {self.risk}")
        require(
            self.clip * self.scale <= LARGEST,
            f"clip × scale must be at most 2**52; got {self.clip} × {self.scale}",
        )

    @property
    def l2(self) -> float:
        """Largest L2 norm of the integers."""
        long, root = self.scale * self.clip, math.sqrt(self.cells)
        likely = long**2 + self.cells / 4
        likely += math.sqrt(2 * math.log(1 / self.risk)) * (long + root / 2)
        return math.sqrt(min(likely, (long + root) ** 2))

    @property
    def l1(self) -> float:
        return min(self.l2**2, math.sqrt(self.cells) * self.l2)

    @property
    def largest(self) -> int:
        """The largest cell of one vector, for which the modulus of a sum must have space."""
        return min(math.floor(self.l2), math.floor(self.scale * self.clip) + 1)

    def integers(self, vectors: F64, *, rng: Rng) -> I64:
        """Each row of (n, cells) as whole numbers; a row longer than `clip` is refused.

        >>> from sfumato.privacy import SeededRng
        >>> Rounding(clip=1.0, scale=10.0, cells=2).integers(
        ...     np.array([[0.6, -0.8]]), rng=SeededRng(1))
        array([[ 6, -8]])
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.cells:
            raise SpecError(f"vectors must be (n, {self.cells}); got {vectors.shape}")
        length = np.linalg.norm(vectors, axis=1)
        if not np.all(length <= self.clip * (1 + _SLACK)):  # also refuses NaN
            raise SpecError(f"a vector's norm must be at most {self.clip}: clip it first")
        scaled = vectors * self.scale
        result = np.empty(vectors.shape, dtype=np.int64)
        pending = np.arange(vectors.shape[0])
        while pending.size:
            low = np.floor(scaled[pending])
            chance = (rng.words(low.size) >> np.uint64(11)).reshape(low.shape) * 2.0**-53
            rounded = (low + (chance < scaled[pending] - low)).astype(np.int64)
            fits = np.einsum("ij,ij->i", rounded, rounded, dtype=np.float64) <= self.l2**2
            result[pending[fits]] = rounded[fits]
            pending = pending[~fits]
        return result

    def reals(self, total: I64) -> F64:
        """A sum of integers in the unit of the vectors."""
        return total / self.scale


def fineness(cells: int, devices: int, multiplier: float) -> float:
    """How many whole numbers the largest norm of a table should have, for sums over `devices` with
    noise of `multiplier` times that norm: enough that rounding costs little beside the noise.
    Rounding adds at most a quarter per device to a cell's variance, and lengthens a device's table.

    >>> fineness(300, 10, 1.0), fineness(10_000_000, 10, 1.0)
    (1000.0, 15811.38830084...)
    """
    return max(
        COARSEST,
        math.sqrt(devices / 4 / ROUNDING_COST) / (multiplier or 1.0),
        math.sqrt(cells / 4 / ROUNDING_COST),
    )

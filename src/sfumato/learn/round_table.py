"""Noise for rounds of a trusted server that release more than a sum: the update, a norm, a count.

All are cells of one table (`RoundSketch`), so a round is one task, one sum and one charge. That
matters where cohorts are drawn in secret: one coin decides about all cells of a client, while three
tables with separate coins would not have the loss that is charged (docs/decisions/0028).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from sfumato.kernels import I64
from sfumato.privacy import Rng
from sfumato.privacy.accounting import SMOOTHING, AdditiveLoss, Loss
from sfumato.privacy.noise import Contribution, NoiseAtRelease
from sfumato.privacy.samplers import discrete_gaussian
from sfumato.sketch.vector import RoundSketch
from sfumato.spec import require, spec


@spec("round_noise")
class RoundNoise(NoiseAtRelease):
    """Discrete Gaussian noise on each part of a round's table, and one number for the second part.

    A release has the noised main table, then the noised norm of the second table (or of its
    distance from the second sketch of the decoded update), as a whole number of the second's unit,
    then the noised count. The second table itself is never released.

    Claim: one release costs what Gaussian noise of the multiplier z costs, where 1/z² is the sum of
        (sensitivity/deviation)² over the released parts; neighbours are zero-out.
    Proof: docs/proofs/sampled_rounds.md, "What is asked beside the sum".
    Assumes: as `NoiseAtRelease`.
    """

    sketch: RoundSketch
    asks: Literal["nothing", "norm", "error"]
    second_scale: float = 0.0  # for the second table, before its norm is rounded
    count_scale: float = 0.0

    def check(self) -> None:
        NoiseAtRelease.check(self)
        asks, counts = self.sketch.second is not None, self.sketch.counts
        require(self.noise == "gaussian", f"noise of a round is gaussian; got {self.noise}")
        require(
            (self.asks != "nothing", self.second_scale > 0, self.count_scale > 0)
            == (asks, asks, counts),
            "every part that a round releases must have noise, and no other part can have any",
        )

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        main, second, clips = self.sketch.split(total)
        table = discrete_gaussian(self.scale, main.shape, rng) + main
        parts = [table.reshape(-1)]
        if self.sketch.second is not None:
            norm = self._norm(table, second)
            # Rounding a norm to a whole number changes it by at most one, like a table that is
            # longer by one.
            scale = self.second_scale * (1 + 1 / self.sketch.second.rounding.l2)
            parts.append(norm + discrete_gaussian(scale, (1,), rng))
        if self.sketch.counts:
            parts.append(clips + discrete_gaussian(self.count_scale, (1,), rng))
        return np.concatenate(parts)

    def _norm(self, table: I64, second: I64) -> int:
        sketch = self.sketch.second
        assert sketch is not None  # checked by the caller
        reals = second / sketch.scale
        if self.asks == "error":
            assert sketch.dense is not None  # a second sketch is small
            reals = reals - sketch.dense.encode(self.sketch.main.decode(table, 1))
        return round(float(np.linalg.norm(reals)) * sketch.scale)

    def loss(self, contribution: Contribution) -> Loss:
        """As one table whose noise costs what all parts cost together, each priced as continuous
        noise (docs/proofs/noise.md); where a part has too little noise for that, a table with so
        little that it is priced by Rényi bounds as well."""
        main = self.sketch.main.rounding
        parts = [(main.l2, self.scale)]
        if self.sketch.second is not None:
            parts.append((self.sketch.second.rounding.l2, self.second_scale))
        if self.sketch.counts:
            parts.append((1.0, self.count_scale))
        if min(scale for _, scale in parts) ** 2 > SMOOTHING:
            spent = sum(l2**2 / (scale**2 - SMOOTHING) for l2, scale in parts)
            scale, l2 = math.sqrt(main.l2**2 / spent + SMOOTHING), main.l2
        else:
            scale, l2 = 1.0, math.sqrt(sum((l2 / scale) ** 2 for l2, scale in parts))
        return AdditiveLoss(noise="gaussian", scale=scale, l1=max(l2, l2**2), l2=l2, unit_cells=0)

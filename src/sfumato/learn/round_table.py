"""Rounds that release more than a sum: the update, a norm and a count, in one table.

A trusted server may ask a cohort for more than the sum of its updates. The rest is in further cells
of the same table, so a round is one task, one sum and one charge. That matters where cohorts are
drawn in secret: one coin decides about all cells of a client, while three tables with separate
coins would not have the loss that is charged (docs/decisions/0028).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.errors import SpecError
from sfumato.kernels import F64, I64
from sfumato.privacy import Rng
from sfumato.privacy.accounting import AdditiveLoss, Loss
from sfumato.privacy.noise import Contribution, NoiseAtRelease
from sfumato.privacy.samplers import discrete_gaussian
from sfumato.sketch.norms import Norms
from sfumato.sketch.vector import Reals, VectorSketch
from sfumato.spec import require, spec

Bool = npt.NDArray[np.bool_]


@spec("round_sketch")
class RoundSketch:
    """One flat table: the cells of `main`, those of `second`, and a cell that counts clips.

    A client adds 1 to the last cell if its update is no longer than the clip, and −1 if it is
    longer.
    """

    main: VectorSketch
    second: VectorSketch | None = None  # for the norm, or the error of the decoded update
    counts: bool = False  # whether updates within the clip are counted

    @property
    def shape(self) -> tuple[int]:
        second = 0 if self.second is None else self.second.cells
        return (self.main.cells + second + self.counts,)

    @property
    def word_bits(self) -> None:
        return None

    def tables(self, vectors: Reals, *, rng: Rng) -> I64:
        """The tables of clients with these updates (n, length), (n, cells)."""
        parts = [self.main.tables(vectors, rng=rng)]
        if self.second is not None:
            parts.append(self.second.tables(vectors, rng=rng))
        if self.counts:
            norms = np.linalg.norm(np.asarray(vectors, dtype=np.float64), axis=1)
            parts.append(np.where(norms <= self.main.clip, 1, -1))
        rows = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
        return np.concatenate(rows, axis=1)

    def encode(self, values: I64, weights: I64 | None = None) -> I64:
        """The sum of clients' tables (n, cells); a table that is too long is refused."""
        main, second, count = self.split(values)
        parts = [self.main.encode(main, weights)]
        if self.second is not None:
            parts.append(self.second.encode(second, weights))
        if np.abs(count).max(initial=0) > 1:
            raise SpecError("a client's table must count its update once")
        parts.append(count.sum(axis=0) if weights is None else weights @ count)
        return np.concatenate([part.reshape(-1) for part in parts])

    def split(self, table: npt.NDArray[Any]) -> tuple[Any, Any, Any]:
        """The three parts of a table, or of each of several; a part may be empty."""
        leading = table.shape[:-1]
        ends = [self.main.cells, self.shape[0] - self.counts]
        main, second, count = np.split(table, ends, axis=-1)
        if self.second is not None:
            second = second.reshape(*leading, *self.second.shape)
        return main.reshape(*leading, *self.main.shape), second, count

    def read(self, table: I64) -> tuple[I64, float | None, float | None]:
        """The main table, the norm of the second in the unit of sums, and the count, from a
        released table."""
        main, rest = table[: self.main.cells].reshape(self.main.shape), table[self.main.cells :]
        measurement = None if self.second is None else float(rest[0]) / self.second.scale
        return main, measurement, float(rest[-1]) if self.counts else None

    def estimate(self, table: npt.NDArray[np.number[Any]], values: npt.ArrayLike) -> F64:
        """The sum's coordinates at these indices, 0 to length − 1."""
        return self.main.estimate(self.split(table)[0], values)

    def sensitivity(self, values: int) -> Norms:
        parts = [self.main.sensitivity(values)]
        if self.second is not None:
            parts.append(self.second.sensitivity(values))
        if self.counts:
            parts.append(Norms(l1=values, l2=values, largest=values))
        return Norms(
            l1=sum(part.l1 for part in parts),
            l2=math.hypot(*(part.l2 for part in parts)),
            largest=max(part.largest or 0 for part in parts),
        )

    def possible(self, tables: I64, values: int) -> Bool:
        main, second, count = self.split(tables)
        possible: Bool = self.main.possible(main, values) & (np.abs(count) <= values).all(axis=1)
        return possible if self.second is None else possible & self.second.possible(second, values)


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
        main = self.sketch.main.rounding
        spent = (main.l2 / self.scale) ** 2
        if self.sketch.second is not None:
            spent += (self.sketch.second.rounding.l2 / self.second_scale) ** 2
        if self.sketch.counts:
            spent += 1 / self.count_scale**2
        return AdditiveLoss(
            noise="gaussian", scale=main.l2 / math.sqrt(spent), l1=main.l1, l2=main.l2, unit_cells=0
        )

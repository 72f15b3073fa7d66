"""The count sketch of items, after Charikar, Chen and Farach-Colton (2002) and paper 000."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sfumato import hashing, kernels
from sfumato.arrays import F64, I64, U64, Bool
from sfumato.sketch.norms import Norms, check_weights
from sfumato.spec import LARGEST_INTEGER, require, spec

ROUNDS_PER_SIGN = 60  # signs that one hash value carries: its bits, one a round
WIDEST = 1 << 31


@spec("count_sketch")
class CountSketch:
    """Count the items of an open domain in a fixed table of `rows` × `width` cells.

    Each row sends an item to one cell with a sign; the count is read back as the median over
    rows of sign × cell. Tables of one spec add: encode(a) + encode(b) == encode(a + b).

    A sketch belongs to a round, and the two round numbers say what rounds have in common (paper
    000, section 3): *Shared* (0, 0) keeps cells and signs, *Hybrid* (0, round) keeps the cells and
    draws new signs, *Fresh* (round, round) draws both anew. `DecodedRounds` decodes them together.

    Error: for an item chosen without knowledge of `seed`, |estimate − count| exceeds
        3·‖counts‖₂/√width with probability at most exp(−rows/4)  (Chebyshev in a row,
        Hoeffding over rows; docs/proofs/count_sketch.md). One row reads the count without bias
        and with variance (‖counts‖² − count²)/width, exactly.
    Sensitivity: one item moves one cell per row by one: L1 = rows, L2 = √rows. Several items of one
        device may collide with equal signs, so `values` of them move L2 by values·√rows.

    >>> sketch = CountSketch(rows=5, width=64, seed=1)
    >>> table = sketch.encode([b"oak", b"oak", b"elm"])
    >>> sketch.estimate(table, [b"oak", b"elm", b"fir"])
    array([2., 1., 0.])
    """

    word_bits: ClassVar[None] = None

    rows: int  # odd, so that the median is one row's reading; even rows average the middle two
    width: int
    seed: int  # public: it is in the task, and every device must use the same
    bucket_round: int = 0
    sign_round: int = 0

    def check(self) -> None:
        require.at_least(1, rows=self.rows)
        require.within(2, WIDEST, width=self.width)
        require.within(0, LARGEST_INTEGER, seed=self.seed)
        for name in ("bucket_round", "sign_round"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.width)

    @property
    def buckets(self) -> U64:
        """Coefficients of the pairwise independent cell hashes, (rows, 2)."""
        return hashing.row_polynomials(self.seed, "cell", self.bucket_round, self.rows, 2)

    @property
    def signs(self) -> U64:
        """Coefficients of the four-wise independent sign hashes, (rows, 4).

        A value has 61 bits, enough for sixty rounds, so a known dictionary is hashed once.
        """
        block = self.sign_round // ROUNDS_PER_SIGN
        return hashing.row_polynomials(self.seed, "sign", block, self.rows, 4)

    @property
    def sign_bit(self) -> int:
        return self.sign_round % ROUNDS_PER_SIGN

    def points(self, items: hashing.Items) -> U64:
        """Fingerprints of items: hash once, then `encode_points` in every round."""
        return hashing.fingerprint(items, self.seed)

    def encode(self, values: hashing.Items, weights: I64 | None = None) -> I64:
        """The table of these items, each counted `weights` times (once if not given)."""
        return self.encode_points(self.points(values), weights)

    def encode_points(self, points: U64, weights: I64 | None = None) -> I64:
        check_weights(weights, points.size)
        return kernels.encode(points, weights, self.buckets, self.signs, self.sign_bit, self.width)

    def estimate(
        self,
        table: npt.NDArray[np.number],
        values: hashing.Items,
        *,
        decode: kernels.Decode = "median",
    ) -> F64:
        from sfumato.sketch.rounds import DecodedRounds  # rounds imports this module

        return DecodedRounds.of([(self, table)]).estimate(self.points(values), decode=decode)

    def sensitivity(self, values: int) -> Norms:
        return Norms(
            l1=values * self.rows,
            l2=values * math.sqrt(self.rows),
            unit_cells=self.rows if values == 1 else 0,
        )

    def possible(self, tables: I64, values: int) -> Bool:
        """A value adds 1 or −1 to one cell of each row, so two can cancel."""
        weights = np.abs(np.clip(tables, -values - 1, values + 1)).sum(axis=2)  # no sum wraps
        parities = (weights & 1) == (weights[:, :1] & 1)
        return np.asarray(((weights <= values) & parities).all(axis=1))

"""One noisy cell, or one noisy category: randomised response, hashed and direct."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, U8, U64, Bool, Whole
from sfumato.errors import SpecError
from sfumato.kernels import local
from sfumato.privacy.randomizers.randomizer import (
    MOST_CELLS,
    HashedRows,
    Moments,
    add_codes,
    bytes_for,
    check_epsilon,
    check_sizes,
    count_by_row,
    from_bytes,
    to_bytes,
)
from sfumato.privacy.samplers import Bernoulli, Rng, below
from sfumato.spec import require, spec

Cells = npt.NDArray[np.integer]


@spec("hashed_response")
class HashedResponse(HashedRows):
    """Randomised response on the item's cell in one of many rows: optimal local hashing with public
    hash functions, so that records add up in a table.

    Beyond paper 004. With width = e^epsilon + 1 the variance is 4e^epsilon/(e^epsilon − 1)², the
    least that any local randomizer of a large domain has (Wang and others 2017), in a record of two
    or three bytes.

    Claim: epsilon-local differential privacy for one record, neighbours being any two items.
    Proof: docs/proofs/randomizers.md: the row does not depend on the item; a cell is sent with
        probability `truth` or (1 − truth)/(width − 1), and their ratio is at most e^epsilon.
    Assumes: as `CountMeanSketch`.
    Utility: unbiased over the hash seed; `debias.variance` is exact.
    """

    signed: ClassVar[bool] = False
    epsilon: float
    rows: int
    width: int
    seed: int
    epoch: int = 0

    check = check_sizes

    @property
    def record_bytes(self) -> int:
        return bytes_for(self.rows * self.width)

    @property
    def moments(self) -> Moments:
        return _response_moments(self.truth, self.width)

    @property
    def reach(self) -> float:
        return _response_reach(self.truth, self.width)

    @property
    def support(self) -> float:
        return 1 / self.width  # whatever the device holds, a hashed cell is one of `width`

    @property
    def truth(self) -> float:
        return self.coin.probability

    def randomize(self, values: U64, *, rng: Rng) -> U8:
        rows = below(self.rows, values.size, rng)
        cells = local.row_cells(values, rows, self.hashes, self.width)
        answers = _respond(cells, self.width, self.coin, rng)
        return to_bytes(rows * self.width + answers, self.record_bytes)

    def valid(self, records: U8) -> Bool:
        return from_bytes(records) < self.rows * self.width

    def count_rows(self, records: U8, counts: I64) -> Whole:
        return count_by_row(from_bytes(records) // self.width, counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        add_codes(from_bytes(records), cells)

    def readings(self, cells: Cells, count: int, values: U64) -> F64:
        lie = (1 - self.truth) / (self.width - 1)
        return (local.gather(values, cells, self.hashes) - lie * count) / (self.truth - lie)

    @property
    def coin(self) -> Bernoulli:
        return Bernoulli.truth(self.epsilon, self.width - 1)


@spec("direct_response")
class DirectResponse:
    """Randomised response on the item itself, for a short list: `categories` and one for others.

    Better than any hashing if the list is shorter than about 3e^epsilon + 2.

    Claim, proof, assumes: as `HashedResponse`, with one row and no hash function.
    Utility: unbiased; no collisions.
    """

    rows: ClassVar[int] = 1
    collision: ClassVar[float] = 0.0
    signed: ClassVar[bool] = False
    epsilon: float
    categories: int

    def check(self) -> None:
        check_epsilon(self.epsilon)
        require(
            1 <= self.categories < MOST_CELLS,
            f"categories must be 1 to 2**31 - 1; got {self.categories}",
        )

    @property
    def width(self) -> int:
        return self.categories + 1

    @property
    def record_bytes(self) -> int:
        return bytes_for(self.width)

    @property
    def moments(self) -> Moments:
        return _response_moments(self.coin.probability, self.width)

    @property
    def reach(self) -> float:
        return _response_reach(self.coin.probability, self.width)

    @property
    def support(self) -> float:
        return (1 - self.coin.probability) / (self.width - 1)

    def values(self, items: Any) -> I64:
        """Categories; anything but 0 .. categories − 1 counts as other."""
        category = np.asarray(items)
        if category.size and category.dtype.kind not in "iu":
            raise SpecError("a direct response takes categories: whole numbers")
        category = category.astype(np.int64)
        outside = (category < 0) | (category >= self.categories)
        return np.where(outside, self.categories, category)

    def randomize(self, values: I64, *, rng: Rng) -> U8:
        return to_bytes(_respond(values, self.width, self.coin, rng), self.record_bytes)

    def valid(self, records: U8) -> Bool:
        return from_bytes(records) < self.width

    def count_rows(self, records: U8, counts: I64) -> Whole:
        return count_by_row(np.zeros(records.shape[0], dtype=np.int64), counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        add_codes(from_bytes(records), cells)

    def readings(self, cells: Cells, count: int, values: I64) -> F64:
        truth = self.coin.probability
        lie = (1 - truth) / (self.width - 1)
        answers: F64 = cells[0, values].astype(np.float64)
        return (answers - lie * count) / (truth - lie)

    def set_variance(self, count: float, inside: float, listed: int) -> float:
        """The variance of the number of devices, `inside` of `count`, whose category is not one of
        the `listed` ones: all other categories together are one noisy answer."""
        truth = self.coin.probability
        lie = (1 - truth) / (self.width - 1)
        others = self.width - listed
        hit, miss = truth + (others - 1) * lie, others * lie
        holders = min(max(inside, 0.0), count)
        spread = holders * hit * (1 - hit) + (count - holders) * miss * (1 - miss)
        return spread / (truth - lie) ** 2

    @property
    def coin(self) -> Bernoulli:
        return Bernoulli.truth(self.epsilon, self.width - 1)


def _respond(cells: I64, width: int, coin: Bernoulli, rng: Rng) -> I64:
    """Each cell with the coin's probability, otherwise another one, uniformly."""
    honest = coin.bits(cells.size, rng)
    step = 1 + below(width - 1, cells.size, rng)  # never 0: a lie is never the truth
    return np.where(honest, cells, (cells + step) % width)


def _response_moments(truth: float, width: int) -> Moments:
    lie = (1 - truth) / (width - 1)
    scale = (truth - lie) ** 2
    hit = truth * (1 - truth) / scale
    return Moments(own=hit, hit=hit, miss=lie * (1 - lie) / scale)


def _response_reach(truth: float, width: int) -> float:
    """A record counts for one cell of its row or category, and there by this much more."""
    return 1 / (truth - (1 - truth) / (width - 1))

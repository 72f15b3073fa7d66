"""Local differential privacy: what a device may say about its item so that nobody need be trusted.

A randomizer turns items into records, a few bytes each, and folds records into a tally: an integer
table that adds. Four of them, all over the same rows of hash functions (paper 004, and beyond):

    CountMeanSketch          a whole row of noisy bits: CMS, or with better flips ("optimal")
    HadamardCountMeanSketch  one noisy bit of the row's Walsh–Hadamard transform: HCMS
    HashedResponse           one noisy cell of the row: the least variance, in three bytes
    DirectResponse           one noisy category of a short list, with no hashing at all

Records have a fixed length, so their size says nothing. Privacy comes from the coins alone: it
holds for any hash functions, whoever chose them. `debias` reads tallies.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato import hashing
from sfumato.errors import SpecError
from sfumato.kernels import local
from sfumato.privacy.samplers import Bernoulli, Rng, below
from sfumato.spec import LARGEST_INTEGER, require, spec

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.integer]
Whole = npt.NDArray[np.integer]

LARGEST_EPSILON = 32.0
MOST_CELLS = 1 << 31
_PIECE = 1 << 13  # records made together, so that their bits stay in the cache


class Moments(NamedTuple):
    """Variances of what one record adds to the reading of an item, before collisions are set right:
    by a device that holds it, by one whose item is in its cell, by one whose item is not."""

    own: float
    hit: float
    miss: float


@runtime_checkable
class Randomizer(Protocol):
    """What every randomizer does."""

    @property
    def epsilon(self) -> float: ...

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def collision(self) -> float:
        """The chance that two items share a cell of a row."""
        ...

    @property
    def record_bytes(self) -> int: ...

    @property
    def signed(self) -> bool:
        """Whether cells can be negative."""
        ...

    @property
    def moments(self) -> Moments: ...

    @property
    def support(self) -> float:
        """How likely a record speaks for an item that its device does not hold, over all hash
        functions; 1/2 where records speak for and against."""
        ...

    def values(self, items: Any) -> npt.NDArray[Any]:
        """Items as `randomize` and `readings` take them; hash once, use often."""
        ...

    def randomize(self, values: npt.NDArray[Any], *, rng: Rng) -> U8:
        """A record for each value: (n, record_bytes)."""
        ...

    def valid(self, records: U8) -> Bool:
        """Which records this randomizer could have made: (n,)."""
        ...

    def count_rows(self, records: U8, counts: I64) -> Whole:
        """The row of every valid record, (n,); adds to the number of records of each, in place."""
        ...

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        """Add valid records, whose rows are known, to a tally's cells, (rows, width), in place."""
        ...

    def readings(self, cells: Cells, count: int, values: npt.NDArray[Any]) -> F64:
        """For each value the unbiased number of devices in its cells, over all rows: its own and
        those that collide with it."""
        ...


def _check(self: Any) -> None:
    require(
        0 < self.epsilon <= LARGEST_EPSILON,
        f"epsilon must be above 0, at most {LARGEST_EPSILON:g}; got {self.epsilon}",
    )
    require(self.rows >= 1, f"rows must be at least 1; got {self.rows}")
    require(self.width >= 2, f"width must be at least 2; got {self.width}")
    require(
        self.rows * self.width <= MOST_CELLS,
        f"rows × width must be at most 2**31; got {self.rows} × {self.width}",
    )
    require(0 <= self.seed <= LARGEST_INTEGER, f"seed must be 0 to 2**53 - 1; got {self.seed}")
    require(0 <= self.epoch <= LARGEST_INTEGER, f"epoch must be at least 0; got {self.epoch}")


@spec("count_mean_sketch")
class CountMeanSketch:
    """Count Mean Sketch (paper 004, algorithms 2 to 4): a row of bits, each flipped by a coin.

    A device draws a row, sets the bit of its item's cell there, and flips every bit. "symmetric"
    flips are the paper's: each with probability 1/(1 + e^(epsilon/2)), halved because two items
    differ in two bits. "optimal" ones tell the truth about the item's own bit half of the time and
    set another with probability 1/(1 + e^epsilon) (Wang and others 2017, OUE): at epsilon 4 the
    variance is 2.3 times less, in as many bytes.

    Claim: epsilon-local differential privacy for one record, neighbours being any two items.
    Proof: docs/proofs/randomizers.md; test: every output enumerated.
    Assumes: `rng` is cryptographic on real devices. Nothing about the hash functions.
    Utility: unbiased over the hash seed; `debias.variance` is exact.
    """

    epsilon: float
    rows: int
    width: int
    seed: int
    epoch: int = 0  # a new one draws new hash functions, so that collisions do not stay
    flips: Literal["symmetric", "optimal"] = "symmetric"

    check = _check

    @property
    def collision(self) -> float:
        return 1 / self.width

    @property
    def record_bytes(self) -> int:
        return self._row_bytes + -(-self.width // 8)

    @property
    def signed(self) -> bool:
        return False

    @property
    def rates(self) -> tuple[float, float]:
        """How likely a bit is 1 if it is the item's own, and if it is not."""
        flip = self._coin.probability
        return (1 - flip if self.flips == "symmetric" else 0.5), flip

    @property
    def moments(self) -> Moments:
        own, other = self.rates
        scale = (own - other) ** 2
        seen, unseen = own * (1 - own) / scale, other * (1 - other) / scale
        return Moments(own=seen, hit=seen, miss=unseen)

    @property
    def support(self) -> float:
        own, other = self.rates
        return self.collision * own + (1 - self.collision) * other

    def values(self, items: hashing.Items) -> U64:
        return hashing.fingerprint(items, self.seed)

    def randomize(self, values: U64, *, rng: Rng) -> U8:
        records = np.empty((values.size, self.record_bytes), dtype=np.uint8)
        for start in range(0, values.size, _PIECE):
            part = values[start : start + _PIECE]
            self._randomize(part, records[start : start + _PIECE], rng)
        return records

    def _randomize(self, values: U64, records: U8, rng: Rng) -> None:
        rows = below(self.rows, values.size, rng)
        cells = local.row_cells(values, rows, self._hashes, self.width)
        words = -(-self.width // 64)
        bits = self._coin.words(values.size * words, rng)
        own = np.uint64(1) << (cells & 63).astype(np.uint64)
        place = np.arange(0, bits.size, words) + (cells >> 6)
        if self.flips == "symmetric":
            bits[place] ^= own
        else:
            coins = rng.words(-(-values.size // 64)).astype("<u8").view(np.uint8)
            heads = np.unpackbits(coins, bitorder="little")[: values.size].astype(np.bool_)
            bits[place] = np.where(heads, bits[place] | own, bits[place] & ~own)
        records[:, : self._row_bytes] = _to_bytes(rows, self._row_bytes)
        packed = bits.astype("<u8", copy=False).view(np.uint8).reshape(values.size, -1)
        records[:, self._row_bytes :] = packed[:, : -(-self.width // 8)]
        if self.width % 8:
            records[:, -1] &= np.uint8((1 << self.width % 8) - 1)

    def valid(self, records: U8) -> Bool:
        if self.rows == 1 << 8 * self._row_bytes:  # every number is a row
            fits = np.ones(records.shape[0], dtype=np.bool_)
        else:
            fits = _from_bytes(records[:, : self._row_bytes]) < self.rows
        if self.width % 8:
            fits &= records[:, -1] >> np.uint8(self.width % 8) == 0
        return fits

    def count_rows(self, records: U8, counts: I64) -> Whole:
        return local.count_rows(records, self._row_bytes, counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        local.add_bits(rows, records, self._row_bytes, cells)

    def readings(self, cells: Cells, count: int, values: U64) -> F64:
        own, other = self.rates
        return (local.gather(values, cells, self._hashes) - other * count) / (own - other)

    @property
    def _coin(self) -> Bernoulli:
        return Bernoulli.flip(self.epsilon / 2 if self.flips == "symmetric" else self.epsilon)

    @property
    def _row_bytes(self) -> int:
        return _bytes_for(self.rows)

    @property
    def _hashes(self) -> U64:
        return hashing.row_hashes(self.seed, self.epoch, self.rows)


@spec("hadamard_count_mean_sketch")
class HadamardCountMeanSketch:
    """Hadamard Count Mean Sketch (paper 004, algorithms 5 to 7): one noisy bit of a row.

    The row's vector is 1 at the item's cell and 0 elsewhere (the paper's text says −1, which its
    algorithm and analysis contradict); one coordinate of its Walsh–Hadamard transform is ±1, by the
    parity of two numbers, and is flipped with probability 1/(1 + e^epsilon): one bit differs
    between two items, so epsilon is not halved.

    Claim, proof, assumes: as `CountMeanSketch`.
    Utility: unbiased; variance about (e^epsilon + 1)²/(e^epsilon − 1)² a device, which no epsilon
        brings below 1: `HashedResponse` is better in fewer bytes.
    """

    epsilon: float
    rows: int
    width: int  # a power of two
    seed: int
    epoch: int = 0

    def check(self) -> None:
        _check(self)
        require(
            self.width & (self.width - 1) == 0, f"width must be a power of two; got {self.width}"
        )

    @property
    def collision(self) -> float:
        return 1 / self.width

    @property
    def record_bytes(self) -> int:
        return _bytes_for(2 * self.rows * self.width)

    @property
    def signed(self) -> bool:
        return True

    @property
    def moments(self) -> Moments:
        square = self._scale**2
        return Moments(own=square - 1, hit=square - 1, miss=square)

    @property
    def support(self) -> float:
        return 0.5

    def values(self, items: hashing.Items) -> U64:
        return hashing.fingerprint(items, self.seed)

    def randomize(self, values: U64, *, rng: Rng) -> U8:
        rows = below(self.rows, values.size, rng)
        places = below(self.width, values.size, rng)
        cells = local.row_cells(values, rows, self._hashes, self.width)
        minus = (np.bitwise_count(cells & places) & 1).astype(np.bool_)
        minus ^= self._coin.bits(values.size, rng)
        return _to_bytes(((rows * self.width + places) << 1) + minus, self.record_bytes)

    def valid(self, records: U8) -> Bool:
        return _from_bytes(records) < 2 * self.rows * self.width

    def count_rows(self, records: U8, counts: I64) -> Whole:
        shift = (2 * self.width).bit_length() - 1  # a power of two
        return _counted(_from_bytes(records) >> shift, counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        local.add_signs(_from_bytes(records), cells.reshape(-1))

    def readings(self, cells: Cells, count: int, values: U64) -> F64:
        return self._scale * local.gather_hadamard(values, cells, self._hashes)

    @property
    def _scale(self) -> float:
        return 1 / (1 - 2 * self._coin.probability)

    @property
    def _coin(self) -> Bernoulli:
        return Bernoulli.flip(self.epsilon)

    @property
    def _hashes(self) -> U64:
        return hashing.row_hashes(self.seed, self.epoch, self.rows)


@spec("hashed_response")
class HashedResponse:
    """Randomised response on the item's cell in one of many rows: optimal local hashing with public
    hash functions, so that records add up in a table.

    Beyond paper 004. With width = e^epsilon + 1 the variance is 4e^epsilon/(e^epsilon − 1)², the
    least that any local randomizer of a large domain has (Wang and others 2017), in a record of two
    or three bytes.

    Claim: epsilon-local differential privacy for one record, neighbours being any two items.
    Proof: docs/proofs/randomizers.md: a row is drawn without looking at the item; a cell is sent
        with probability `truth` or (1 − truth)/(width − 1), and their ratio is e^epsilon at most.
    Assumes: as `CountMeanSketch`.
    Utility: unbiased over the hash seed; `debias.variance` is exact.
    """

    epsilon: float
    rows: int
    width: int
    seed: int
    epoch: int = 0

    check = _check

    @property
    def collision(self) -> float:
        return 1 / self.width

    @property
    def record_bytes(self) -> int:
        return _bytes_for(self.rows * self.width)

    @property
    def signed(self) -> bool:
        return False

    @property
    def moments(self) -> Moments:
        return _response_moments(self.truth, self.width)

    @property
    def support(self) -> float:
        return 1 / self.width  # whatever the device holds, a hashed cell is one of `width`

    @property
    def truth(self) -> float:
        return self._coin.probability

    def values(self, items: hashing.Items) -> U64:
        return hashing.fingerprint(items, self.seed)

    def randomize(self, values: U64, *, rng: Rng) -> U8:
        rows = below(self.rows, values.size, rng)
        cells = local.row_cells(values, rows, self._hashes, self.width)
        sent = _respond(cells, self.width, self._coin, rng)
        return _to_bytes(rows * self.width + sent, self.record_bytes)

    def valid(self, records: U8) -> Bool:
        return _from_bytes(records) < self.rows * self.width

    def count_rows(self, records: U8, counts: I64) -> Whole:
        return _counted(_from_bytes(records) // self.width, counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        _add_codes(_from_bytes(records), cells)

    def readings(self, cells: Cells, count: int, values: U64) -> F64:
        lie = (1 - self.truth) / (self.width - 1)
        return (local.gather(values, cells, self._hashes) - lie * count) / (self.truth - lie)

    @property
    def _coin(self) -> Bernoulli:
        return Bernoulli.truth(self.epsilon, self.width - 1)

    @property
    def _hashes(self) -> U64:
        return hashing.row_hashes(self.seed, self.epoch, self.rows)


@spec("direct_response")
class DirectResponse:
    """Randomised response on the item itself, for a short list: `categories` and one for others.

    Better than any hashing where the list is shorter than about 3e^epsilon + 2.

    Claim, proof, assumes: as `HashedResponse`, with one row and no hash function.
    Utility: unbiased; no collisions.
    """

    epsilon: float
    categories: int

    def check(self) -> None:
        require(
            0 < self.epsilon <= LARGEST_EPSILON,
            f"epsilon must be above 0, at most {LARGEST_EPSILON:g}; got {self.epsilon}",
        )
        require(
            1 <= self.categories < MOST_CELLS,
            f"categories must be 1 to 2**31 - 1; got {self.categories}",
        )

    @property
    def rows(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.categories + 1

    @property
    def collision(self) -> float:
        return 0.0

    @property
    def record_bytes(self) -> int:
        return _bytes_for(self.width)

    @property
    def signed(self) -> bool:
        return False

    @property
    def moments(self) -> Moments:
        return _response_moments(self._coin.probability, self.width)

    @property
    def support(self) -> float:
        return (1 - self._coin.probability) / (self.width - 1)

    def values(self, items: Any) -> I64:
        """Categories; what is not 0 .. categories − 1 counts as other."""
        category = np.asarray(items)
        if category.size and category.dtype.kind not in "iu":
            raise SpecError("a direct response takes categories: whole numbers")
        category = category.astype(np.int64)
        outside = (category < 0) | (category >= self.categories)
        return np.where(outside, self.categories, category)

    def randomize(self, values: I64, *, rng: Rng) -> U8:
        return _to_bytes(_respond(values, self.width, self._coin, rng), self.record_bytes)

    def valid(self, records: U8) -> Bool:
        return _from_bytes(records) < self.width

    def count_rows(self, records: U8, counts: I64) -> Whole:
        return _counted(np.zeros(records.shape[0], dtype=np.int64), counts)

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        _add_codes(_from_bytes(records), cells)

    def readings(self, cells: Cells, count: int, values: I64) -> F64:
        truth = self._coin.probability
        lie = (1 - truth) / (self.width - 1)
        told: F64 = cells[0, values].astype(np.float64)
        return (told - lie * count) / (truth - lie)

    @property
    def _coin(self) -> Bernoulli:
        return Bernoulli.truth(self.epsilon, self.width - 1)


def _respond(cells: I64, width: int, coin: Bernoulli, rng: Rng) -> I64:
    """Each cell with the coin's probability, else another one, all alike."""
    honest = coin.bits(cells.size, rng)
    step = 1 + below(width - 1, cells.size, rng)  # never 0: a lie is never the truth
    return np.where(honest, cells, (cells + step) % width)


def _response_moments(truth: float, width: int) -> Moments:
    lie = (1 - truth) / (width - 1)
    scale = (truth - lie) ** 2
    seen = truth * (1 - truth) / scale
    return Moments(own=seen, hit=seen, miss=lie * (1 - lie) / scale)


def _add_codes(codes: Whole, cells: Cells) -> None:
    counted = np.bincount(codes, minlength=cells.size)
    cells += counted.reshape(cells.shape).astype(cells.dtype)


def _counted(rows: Whole, counts: I64) -> Whole:
    counts += np.bincount(rows, minlength=counts.size)
    return rows


def _bytes_for(codes: int) -> int:
    """Bytes that hold the numbers 0 .. codes − 1."""
    return max(1, math.ceil((codes - 1).bit_length() / 8))


def _to_bytes(codes: I64, size: int) -> U8:
    """Each number as little-endian bytes: (n, size)."""
    wide = np.ascontiguousarray(codes, dtype="<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :size])


def _from_bytes(data: U8) -> Whole:
    """Little-endian numbers, as wide as they need to be."""
    size = data.shape[1]
    wide = 1 << (size - 1).bit_length()  # 1, 2, 4 or 8
    if wide > size:
        padded = np.zeros((data.shape[0], wide), dtype=np.uint8)
        padded[:, :size] = data
        data = padded
    return np.ascontiguousarray(data).view(f"<u{wide}").reshape(-1)

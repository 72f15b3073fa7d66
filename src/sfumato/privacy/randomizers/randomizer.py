"""The interface of randomizers, and the checks and encodings that they share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato import hashing
from sfumato.arrays import F64, I64, U8, U64, Bool, Whole
from sfumato.privacy.samplers import Rng
from sfumato.spec import LARGEST_INTEGER, require

Cells = npt.NDArray[np.integer]

LEAST_EPSILON = 1e-6  # below, floats cannot distinguish the truth from a lie
LARGEST_EPSILON = 32.0
MOST_CELLS = 1 << 31
_NO_TEXT = b"\xff"  # not valid UTF-8


class Moments(NamedTuple):
    """Variances of one record's contribution to the reading of an item, before the correction for
    collisions: of a device that holds it, of one whose item is in its cell, of any other."""

    own: float
    hit: float
    miss: float


@runtime_checkable
class Randomizer(Protocol):
    """Turns items into noisy records, and tallies of records into readings."""

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
    def reach(self) -> float:
        """The most by which a reading changes if one record becomes another valid one, or none."""
        ...

    @property
    def support(self) -> float:
        """The probability that a record supports an item that its device does not hold, over all
        hash functions; 1/2 if records count for and against an item."""
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
        """The row of every valid record, (n,); adds the records of each row to `counts`."""
        ...

    def fold(self, records: U8, rows: Whole, cells: Cells) -> None:
        """Add valid records, whose rows are known, to a tally's cells, (rows, width), in place."""
        ...

    def readings(self, cells: Cells, count: int, values: npt.NDArray[Any]) -> F64:
        """For each value, an unbiased estimate of the devices in its cells, over all rows: its own
        and those that collide with it."""
        ...


@runtime_checkable
class Hashed(Randomizer, Protocol):
    """A randomizer over rows of hash functions, which follow from a seed and an epoch."""

    @property
    def seed(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def hashes(self) -> U64:
        """Coefficients of the three-wise independent cell hashes, (rows, 3)."""
        ...


class HashedRows:
    """Common to randomizers over rows of hash functions: `check_sizes` is their check."""

    __slots__ = ()
    rows: int
    width: int
    seed: int
    epoch: int

    @property
    def collision(self) -> float:
        return 1 / self.width

    @property
    def hashes(self) -> U64:
        return hashing.row_hashes(self.seed, self.epoch, self.rows)

    def values(self, items: hashing.Items) -> U64:
        return hashing.fingerprint(items, self.seed)


def check_epsilon(epsilon: float) -> None:
    require(
        LEAST_EPSILON <= epsilon <= LARGEST_EPSILON,
        f"epsilon must be {LEAST_EPSILON:g} to {LARGEST_EPSILON:g}; got {epsilon}",
    )


def check_sizes(self: Any) -> None:
    check_epsilon(self.epsilon)
    require.at_least(1, rows=self.rows)
    require.at_least(2, width=self.width)
    require(
        self.rows * self.width <= MOST_CELLS,
        f"rows × width must be at most 2**31; got {self.rows} × {self.width}",
    )
    require.within(0, LARGEST_INTEGER, seed=self.seed)
    require(0 <= self.epoch <= LARGEST_INTEGER, f"epoch must be at least 0; got {self.epoch}")


def add_codes(codes: Whole, cells: Cells) -> None:
    counts = np.bincount(codes, minlength=cells.size)
    cells += counts.reshape(cells.shape).astype(cells.dtype)


def count_by_row(rows: Whole, counts: I64) -> Whole:
    counts += np.bincount(rows, minlength=counts.size)
    return rows


def bytes_for(codes: int) -> int:
    """How many bytes hold the numbers 0 .. codes − 1."""
    return max(1, math.ceil((codes - 1).bit_length() / 8))


def to_bytes(codes: I64, size: int) -> U8:
    """Each number as little-endian bytes: (n, size)."""
    wide = np.ascontiguousarray(codes, dtype="<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :size])


def from_bytes(data: U8) -> Whole:
    """Little-endian numbers, of four bytes or eight."""
    size = data.shape[1]
    wide = 4 if size <= 4 else 8
    if wide > size:
        padded = np.zeros((data.shape[0], wide), dtype=np.uint8)
        padded[:, :size] = data
        data = padded
    return np.ascontiguousarray(data).view(f"<u{wide}").reshape(-1)


def no_item(randomizer: Randomizer) -> npt.NDArray[Any]:
    """The value, (1,), that stands for "none" in the record of a device without an item: no text
    has its bytes, and among categories it is one of the others."""
    return randomizer.values([_NO_TEXT] if isinstance(randomizer, Hashed) else [-1])


def in_epoch(randomizer: Randomizer, epoch: int, seed: int | None = None) -> Randomizer:
    """The same randomizer with the hash functions of another epoch, and another seed if given."""
    if not isinstance(randomizer, Hashed):
        return randomizer
    keep = randomizer.seed if seed is None else seed
    return replace(randomizer, epoch=epoch, seed=keep)  # type: ignore[type-var]  # a dataclass

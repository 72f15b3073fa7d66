"""Real vectors, compressed or whole, as tables of whole numbers of a bounded norm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, Bool
from sfumato.errors import SpecError
from sfumato.privacy.rounding import Rounding
from sfumato.privacy.samplers import Rng
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.norms import Norms, check_weights
from sfumato.spec import require, spec

Reals = npt.NDArray[np.floating[Any]]

MOST_HEADROOM = 1.2  # largest headroom
_DEVIATIONS = 4.0  # deviations of a sketch's squared length that are not clipped
_SLACK = 1e-9  # relative rounding error of a norm
_FIRST_OCTAVE, _LAST_OCTAVE = -32, 31  # of the bins of norms; four per octave fit into one byte


@spec("vector_sketch")
class VectorSketch:
    """Sum real vectors: each is clipped, sketched, clipped again and rounded to whole numbers.

    Without a `dense` sketch a vector has one cell per coordinate. `tables` runs on the device: it
    makes one device's contribution to the sum; `encode` adds such tables, and refuses one that is
    too long.

    Error: unbiased, except for the second clip. The sketch of a vector is longer than the vector
        half of the time; `headroom` allows for four deviations of that (at most for a fifth).
    Sensitivity: the second clip bounds the vector that is rounded, and rounding is repeated until
        the integers are no longer than `Rounding.l2`, so the norms hold whatever the vector is.

    >>> from sfumato.privacy import SeededRng
    >>> sketch = VectorSketch(length=2, clip=1.0, bound=1.0, scale=100.0)
    >>> sketch.tables(np.array([[0.6, 0.8], [30.0, 40.0]]), rng=SeededRng(1))
    array([[60, 80],
           [60, 80]])
    """

    word_bits: ClassVar[None] = None

    length: int  # of the vectors
    clip: float  # largest L2 norm of a vector
    bound: float  # largest L2 norm of its sketch, all blocks together; of a whole vector, `clip`
    scale: float  # whole numbers per unit
    dense: DenseSketch | None = None

    def check(self) -> None:
        require.at_least(1, length=self.length)
        require.above(0, clip=self.clip)
        if self.dense is None:
            require(
                self.bound == self.clip,
                f"a whole vector is clipped once: bound must be {self.clip}; got {self.bound}",
            )
        else:
            require(
                self.dense.length == self.length,
                f"the sketch must be of {self.length} coordinates; got {self.dense.length}",
            )
        _ = self.rounding  # checks itself

    @property
    def rounding(self) -> Rounding:
        return Rounding(clip=self.bound, scale=self.scale, cells=self.cells)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,) if self.dense is None else self.dense.shape

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    def tables(self, vectors: Reals, *, rng: Rng) -> I64:
        """The contributions of devices with these vectors (n, length) to the sum, (n, *shape)."""
        array = np.asarray(vectors)
        if array.ndim != 2 or array.shape[1] != self.length or array.dtype.kind != "f":
            raise SpecError(
                f"vectors must be real numbers of shape (n, {self.length}); "
                f"got {array.dtype} of shape {array.shape}"
            )
        with np.errstate(over="ignore"):  # a longer float may become infinite, and is refused
            reals = array.astype(np.float64)
        if not is_finite(reals).all():
            raise SpecError("a vector must hold finite numbers; a device without one abstains")
        short = clip_rows(reals, self.clip)
        if self.dense is not None:
            sketched = self.dense.encode(short).astype(np.float64)
            short = clip_rows(sketched.reshape(len(array), self.cells), self.bound)
        return self.rounding.integers(short, rng=rng).reshape(len(array), *self.shape)

    def encode(self, values: I64, weights: I64 | None = None) -> I64:
        """The sum of devices' tables (n, *shape), each counted `weights` times."""
        if values.shape[1:] != self.shape or values.dtype != np.int64:
            raise SpecError(
                f"tables must be 64-bit integers of shape (n, {', '.join(map(str, self.shape))}); "
                f"got {values.dtype} of shape {values.shape}"
            )
        check_weights(weights, len(values))
        if not self.possible(values, 1).all():
            raise SpecError(f"a device's table must have a norm of at most {self.rounding.l2:.6g}")
        flat = values.reshape(len(values), self.cells)
        if weights is not None:
            flat = flat * weights[:, None]
        total: I64 = flat.sum(axis=0)
        return total.reshape(self.shape)

    def decode(self, table: npt.NDArray[np.number[Any]], count: int) -> F64:
        """The mean (length,) of `count` vectors, from the sum of their tables."""
        if count < 1:
            raise SpecError(f"a mean is of at least 1 device; got {count}")
        mean = np.asarray(table, dtype=np.float64) / (self.scale * count)
        return mean if self.dense is None else self.dense.decode(mean).astype(np.float64)

    def estimate(self, table: npt.NDArray[np.number[Any]], values: npt.ArrayLike) -> F64:
        """The sum's coordinates at these positions, 0 .. length − 1."""
        return self.decode(table, 1)[np.asarray(values, dtype=np.int64)]

    def sensitivity(self, values: int) -> Norms:
        rounding = self.rounding
        return Norms(
            l1=values * rounding.l1,
            l2=values * rounding.l2,
            largest=values * rounding.largest,
        )

    def possible(self, tables: I64, values: int) -> Bool:
        flat = tables.reshape(len(tables), self.cells)
        squares = np.einsum("ij,ij->i", flat, flat, dtype=np.float64)
        return np.asarray(squares <= (values * self.rounding.l2) ** 2 * (1 + _SLACK))


@spec("round_sketch")
class RoundSketch:
    """Sum more than an update: one flat table with the cells of `main`, those of `second`, and one
    that counts clips.

    A client adds 1 to the last cell if its update is no longer than the clip, and −1 if it is
    longer.
    """

    word_bits: ClassVar[None] = None

    main: VectorSketch
    second: VectorSketch | None = None  # for the norm, or the error of the decoded update
    counts: bool = False  # whether updates within the clip are counted

    @property
    def shape(self) -> tuple[int]:
        second = 0 if self.second is None else self.second.cells
        return (self.main.cells + second + self.counts,)

    @property
    def length(self) -> int:
        return self.main.length

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


@spec("norm_bins")
class NormBins:
    """Bins of the L2 norms of vectors: each is longer than the one before by one part of an octave.

    The first bin has all norms up to 2**-32, zero included, and the last one all that are longer
    than the others'.

    >>> bins = NormBins(length=2, per_octave=2)
    >>> [bins.upper_end(place) for place in bins.places(np.array([[3.0, 4.0], [0.0, 0.0]]))]
    [5.656854249492381, 2.3283064365386963e-10]
    """

    length: int  # of the vectors
    per_octave: int  # bins in which norms double

    def check(self) -> None:
        require.at_least(1, length=self.length, per_octave=self.per_octave)

    @property
    def count(self) -> int:
        return (_LAST_OCTAVE - _FIRST_OCTAVE) * self.per_octave + 1

    @property
    def ends(self) -> tuple[float, float]:
        """The upper ends of the first and of the last bin."""
        return self.upper_end(0), self.upper_end(self.count - 1)

    def upper_end(self, place: int) -> float:
        """The upper end of a bin. Vectors longer than the last one are in the last bin as well."""
        return float(2.0 ** (_FIRST_OCTAVE + place / self.per_octave))

    def places(self, vectors: Reals) -> I64:
        """The bins of vectors (n, length) of finite numbers."""
        reals = np.asarray(vectors, dtype=np.float64)
        largest = np.max(np.abs(reals), axis=1, initial=0.0)
        unit = np.divide(reals, largest[:, None], out=np.zeros_like(reals), where=reals != 0)
        with np.errstate(divide="ignore"):  # a vector of zeros is infinitely short
            octaves = np.log2(largest) + np.log2(np.linalg.norm(unit, axis=1))
        places = np.ceil((octaves - _FIRST_OCTAVE) * self.per_octave)
        return np.asarray(np.clip(places, 0, self.count - 1), dtype=np.int64)


def headroom(cells: int) -> float:
    """How much longer than its vector a sketch of `cells` may be before it is clipped.

    The squared length of a sketch has a relative variance of at most 2/cells. The headroom is four
    deviations of it, but at most a fifth of the length: small sketches are clipped now and then,
    since headroom costs noise.

    >>> round(headroom(60), 3), round(headroom(1_500), 3), round(headroom(100_000), 3)
    (1.2, 1.071, 1.009)
    """
    return min(MOST_HEADROOM, math.sqrt(1 + _DEVIATIONS * math.sqrt(2 / cells)))


def is_finite(vectors: Reals) -> Bool:
    """Which rows of (n, length) hold finite numbers only."""
    return np.asarray(np.isfinite(vectors).all(axis=1))


def clip_rows(vectors: F64, clip: float) -> F64:
    """Scale rows that are longer than `clip` down to that norm. All numbers must be finite."""
    largest = np.max(np.abs(vectors), axis=1, keepdims=True, initial=0.0)
    unit = np.divide(vectors, largest, out=np.zeros_like(vectors), where=largest > 0)
    length = np.linalg.norm(unit, axis=1, keepdims=True)  # 1 to √cells: no square overflows
    with np.errstate(over="ignore"):  # an infinite length is too long
        is_short = largest * length <= clip
    return np.where(is_short, vectors, unit * (clip / np.maximum(length, 1.0)))

"""Count-mean and count-median-of-means sketches of a long real vector (paper 002).

A row of `placing="hashed"` hashes every coordinate to a cell, as a count sketch does. A row of
`placing="rotation"` does not scatter: the vector is cut into chunks of `width` coordinates, each
chunk is turned by a random number of cells, and the turned chunks are added, every coordinate with
a sign. Coordinate i = q·width + p lands in cell (p + rotations[row, q]) mod width. Two coordinates
of different chunks collide with probability 1/width, two of one chunk never: no expectation gets
worse, and memory is streamed. Rotations come from a mixing hash of row and chunk, signs from one of
row and i // 32 whose word holds 32 of them (`kernels.dense.plain.sign_words`). A linear hash would
not do: consecutive chunks would turn together.

The effect of rotation on neighbours. The error of coordinate i in a row is a sum of
sign(i)·sign(j)·z_j over the j in the same cell, one in each other chunk. If i collides with j then
i + 1 collides with j + 1 (except where a chunk ends). The two errors have four different signs, so
they are uncorrelated; they are not independent, for their sizes are those of neighbouring z_j.
Hence:

- Coordinates, medians. The collisions of coordinate i are independent from chunk to chunk, row to
  row and block to block. Its variance, and every bound for the mean over rows or the median over
  blocks of one coordinate, is that of a hashed sketch or better; a bound for all coordinates that
  adds up their chances holds whatever the dependence.
- Norms. Mean and variance of a squared norm involve pairs of coordinates alone, so they are no
  larger. Higher moments may be: two runs of m equal entries in different chunks collide more rarely
  than if hashed, and then many entries at once; where that is rare, the fourth moment of a row's
  error is about m times larger (a test has it exactly). Rows and blocks average that out. Bounds by
  Chebyshev's inequality hold.
- Top-k. About as many wrong entries are expected as in a hashed sketch, but they come in runs, so
  their number varies more: a run of large entries leaves a faint copy of itself, with other signs,
  in every other chunk of a row. The copies move when `round` does.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato import hashing
from sfumato.arrays import F32, I32, U32, U64
from sfumato.errors import SpecError
from sfumato.kernels import dense as kernels
from sfumato.kernels.dense import plain as plain_dense
from sfumato.spec import LARGEST_INTEGER, require, spec

Reals = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]

LONGEST = 1 << 31  # longest vector and row
MOST_ROWS = 1 << 20  # in all blocks together


@spec("dense_sketch")
class DenseSketch:
    """Compress real vectors into `blocks` × `rows` × `width` cells by a random linear map.

    A row is a count sketch: each coordinate is added to one cell with a sign. The rows of a block
    are independent and divided by √rows, so that a block keeps the squared norm in expectation and
    its transpose reads the vector back without bias: a count-mean sketch. With several blocks a
    coordinate's reading is the median over them. Tables of one spec add, as their vectors do, up to
    float32 rounding. `seed` is public; a new `round` is a new map, and it must not be chosen after
    the vectors are known.

    Error: with one block, decode(encode(z)) is z in the mean, and its expected squared distance
        from z is (length − 1)/(rows·width)·‖z‖² if hashed, and with rotations no more: the sum over
        chunks z_q of ‖z_q‖²·(length − |z_q|)/(rows·width), nothing if there is one chunk. norm² is
        ‖z‖² in the mean, with variance 2·(‖z‖⁴ − Σ‖z_q‖⁴)/(blocks·rows·width); if hashed, Σ z_i⁴
        in place of Σ‖z_q‖⁴. Noise of variance 1 in every cell of one block becomes noise of
        variance 1 in every coordinate. All this is for vectors chosen without knowledge of `seed`,
        and assumes that the signs are four-wise independent, which is tested and not proved.
    Sensitivity: a table is longer than its vector about half the time: clip tables, not vectors
        alone. Clipped blocks of norm B each make a table of norm √blocks·B.

    >>> sketch = DenseSketch(length=1000, rows=15, width=100, seed=1)
    >>> vector = np.zeros(1000, dtype=np.float32)
    >>> vector[7] = 10
    >>> table = sketch.encode(vector)
    >>> table.shape, round(sketch.norm(table), 3)
    ((15, 100), 10.0)
    >>> int(np.argmax(sketch.decode(table)))
    7
    """

    length: int  # of the vectors
    rows: int = 15  # of a block
    width: int
    blocks: int = 1
    placing: Literal["rotation", "hashed"] = "rotation"
    seed: int
    round: int = 0

    def check(self) -> None:
        require.within(1, LONGEST, length=self.length, width=self.width)
        for name in ("rows", "blocks"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(
            self.rows * self.blocks <= MOST_ROWS,
            f"rows × blocks must be at most 2**20; got {self.rows} × {self.blocks}",
        )
        require.within(0, LARGEST_INTEGER, seed=self.seed)
        require.at_least(0, round=self.round)

    @classmethod
    def within(
        cls, cells: int, *, length: int, rows: int, seed: int, round: int, blocks: int = 1
    ) -> DenseSketch:
        """The widest sketch with at most `cells`, and with fewer rows if there are fewer cells; of
        at least one cell per block.

        >>> DenseSketch.within(100, length=1000, rows=15, seed=1, round=0).shape
        (15, 6)
        """
        each = max(cells // blocks, 1)
        rows = min(rows, each)
        return cls(
            length=length, rows=rows, width=each // rows, blocks=blocks, seed=seed, round=round
        )

    @property
    def shape(self) -> tuple[int, int]:
        return (self.blocks * self.rows, self.width)

    @property
    def cells(self) -> int:
        return self.blocks * self.rows * self.width

    @property
    def rotations(self) -> I32:
        """How far each row turns each chunk of `width` coordinates, (blocks × rows, chunks)."""
        return _rotations(self.seed, self.round, self.shape[0], self.length, self.width)

    @property
    def sign_keys(self) -> U32:
        """The keys from which the signs of each row follow, (blocks × rows, 2)."""
        return self.row_keys[:, 1:].astype(np.uint32)  # the low 32 bits

    @property
    def placing_keys(self) -> U64:
        """The keys of each row's cells where `placing` is "hashed", (blocks × rows,)."""
        return self.row_keys[:, 0]

    def encode(self, vectors: Reals) -> F32:
        """The table of a vector (length,), of shape `shape`; or of each of (n, length)."""
        reals = _float32(vectors, "vectors")
        if reals.ndim not in (1, 2) or reals.shape[-1] != self.length:
            raise SpecError(
                f"vectors must be ({self.length},) or (n, {self.length}); got {reals.shape}"
            )
        each = reals.reshape(-1, self.length)
        scale = 1 / math.sqrt(self.rows)
        if self.placing == "hashed":
            tables = np.empty((len(each), *self.shape), dtype=np.float32)
            for vector, table in zip(each, tables, strict=True):
                table[:] = plain_dense.encode_hashed(vector, self.placing_keys, self.width, scale)
        else:
            tables = kernels.encode(each, self.rotations, self.sign_keys, self.width, scale)
        _require_finite(tables, "vectors")
        return tables.reshape(*reals.shape[:-1], *self.shape)

    def decode(self, table: Reals) -> F32:
        """An estimate of the vector with this table, (length,): unbiased if `blocks` is 1,
        otherwise the median over blocks, coordinate by coordinate."""
        cells = self._table(table)
        scale = 1 / math.sqrt(self.rows)
        if self.placing == "hashed":
            keys = self.placing_keys
            return plain_dense.decode_hashed(cells, keys, self.length, self.blocks, scale)
        return kernels.decode(
            cells, self.rotations, self.sign_keys, self.length, self.blocks, scale
        )

    def norm(self, table: Reals) -> float:
        """An estimate of the vector's L2 norm; its square is unbiased."""
        cells = self._table(table).reshape(-1)
        return math.sqrt(float(np.einsum("i,i->", cells, cells, dtype=np.float64)) / self.blocks)

    @property
    def row_keys(self) -> U64:
        return hashing.row_polynomials(self.seed, "dense", self.round, self.shape[0], 3)

    def _table(self, table: Reals) -> F32:
        cells = _float32(table, "a table")
        if cells.shape != self.shape:
            raise SpecError(f"a table must have the shape {self.shape}; got {cells.shape}")
        _require_finite(cells, "a table")
        return cells


def top(vector: F32, k: int) -> F32:
    """A copy of the vector in which all but the `k` entries of largest size are zero.

    >>> top(np.array([3, -5, 1], dtype=np.float32), 1)
    array([ 0., -5.,  0.], dtype=float32)
    """
    if vector.ndim != 1:
        raise SpecError(f"a vector must have one dimension; got {vector.ndim}")
    require.at_least(0, k=k)
    if k >= vector.size:
        return vector.copy()
    result = np.zeros_like(vector)
    if k > 0:
        largest = np.argpartition(np.abs(vector), -k)[-k:]
        result[largest] = vector[largest]
    return result


@lru_cache(maxsize=4)  # if rows are narrow, they are as large as a vector
def _rotations(seed: int, round: int, rows: int, length: int, width: int) -> I32:
    keys = hashing.row_polynomials(seed, "dense", round, rows, 3)
    rotations = plain_dense.rotations_of(keys[:, 0], -(-length // width), width)
    rotations.flags.writeable = False  # cached, so shared
    return rotations


def _float32(values: Reals, name: str) -> F32:
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise SpecError(f"{name} must be of real numbers; got {array.dtype}")
    with np.errstate(over="ignore"):  # too large numbers become infinite, and are refused later
        return np.ascontiguousarray(array, dtype=np.float32)


def _require_finite(table: F32, name: str) -> None:
    """One sum suffices to find NaN: every coordinate is in every row."""
    with np.errstate(invalid="ignore"):
        total = float(np.sum(table, dtype=np.float64))
    if not math.isfinite(total):
        raise SpecError(
            f"{name} must hold finite numbers whose sums fit in float32; this holds infinite ones, "
            "larger ones or NaN: leave it out, or clip it"
        )


@lru_cache
def median_variance(count: int) -> float:
    """The variance of the median of an odd number of standard normal variables.

    >>> median_variance(1), round(median_variance(5), 5)
    (1.0, 0.28683)
    """
    if count == 1:
        return 1.0
    half = count // 2
    x = np.linspace(-9, 9, 4_001)
    below = np.array([NormalDist().cdf(each) for each in x])
    density = (below * below[::-1]) ** half * np.exp(-(x**2) / 2)
    return float(np.sum(x**2 * density) / np.sum(density))


def spread_of_squares(squared: float, cells: int, noise: float) -> float:
    """The standard deviation of a noised count-mean table's squared norm, if that of the vector is
    `squared`: its variance is 4·squared·noise² + 2·cells·noise⁴ from the noise, and at most
    2·squared²/cells from the sketch."""
    return math.sqrt(4 * squared * noise**2 + 2 * cells * noise**4 + 2 * squared**2 / cells)

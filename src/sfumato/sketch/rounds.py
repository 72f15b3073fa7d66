"""Several rounds of count sketches, decoded together: Shared, Fresh and Hybrid (paper 000)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from sfumato import hashing, kernels
from sfumato.arrays import F64, I64, U64
from sfumato.errors import MismatchError
from sfumato.sketch.count import CountSketch

PLACEBOS = 1 << 14
GRID = 1 << 20  # counts are subtracted to a millionth


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRounds:
    """The tables of a campaign's rounds, (rounds, rows, width), decoded together.

    Tables of one spec are added (Shared). Rounds with the same cells and other signs (Hybrid) add
    their readings row by row and take the median of the sums. Rounds with their own cells (Fresh)
    are decoded one by one and the answers added. Counts are totals over all rounds.

    Hybrid, one row: unbiased, with variance Σ over rounds of (‖counts‖² − count²)/width.
    """

    sketches: tuple[CountSketch, ...]
    tables: F64

    @classmethod
    def of(cls, pairs: Iterable[tuple[CountSketch, npt.NDArray[np.number]]]) -> Self:
        sums: dict[CountSketch, F64] = {}
        for sketch, table in pairs:
            if table.shape != sketch.shape:
                raise MismatchError(f"a table must be {sketch.shape}; got {table.shape}")
            total = sums.get(sketch)
            addend = np.asarray(table, dtype=np.float64)
            sums[sketch] = addend if total is None else total + addend
        first = next(iter(sums), None)
        if first is None:
            raise MismatchError("rounds must hold at least one table; got none")
        if any((s.rows, s.width, s.seed) != (first.rows, first.width, first.seed) for s in sums):
            raise MismatchError("the rounds of one campaign must share rows, width and seed")
        return cls(sketches=tuple(sums), tables=np.stack(list(sums.values())))

    @property
    def fresh(self) -> bool:
        return len({sketch.bucket_round for sketch in self.sketches}) > 1

    @property
    def seed(self) -> int:
        return self.sketches[0].seed

    def with_tables(self, tables: F64) -> DecodedRounds:
        return replace(self, tables=tables)

    def one(self, index: int) -> DecodedRounds:
        """One of the rounds."""
        return DecodedRounds(
            sketches=(self.sketches[index],), tables=self.tables[index : index + 1]
        )

    def estimate(self, points: U64, *, decode: kernels.Decode = "median") -> F64:
        """Counts of the items with these fingerprints, (n,)."""
        return kernels.decode(points, self.tables, *self._hashes(), decode, self.fresh)

    def readings(self, points: U64) -> F64:
        """Sign × cell, (rounds, rows, n)."""
        return kernels.readings(points, self.tables, *self._hashes())

    def subtract(self, points: U64, counts: F64) -> DecodedRounds:
        """The tables without these items; `counts` is (rounds, n)."""
        tables = self.tables.copy()
        for round, sketch in enumerate(self.sketches):
            scaled = np.rint(counts[round] * GRID).astype(np.int64)
            tables[round] -= sketch.encode_points(points, scaled) / GRID
        return self.with_tables(tables)

    def placebos(self, count: int = PLACEBOS) -> U64:
        """Fingerprints that belong to no item: their readings are pure error.

        Under random hashing an absent item has the same collisions and noise as any other, so its
        estimate is a draw from the error of this table (docs/proofs/placebos.md).
        """
        return hashing.coefficients(self.seed, "placebo", count=count)

    def _hashes(self) -> tuple[U64, U64, I64]:
        buckets, which_bucket = _distinct(
            [(sketch.bucket_round, sketch.buckets) for sketch in self.sketches]
        )
        signs, which_sign = _distinct(
            [(sketch.sign_round - sketch.sign_bit, sketch.signs) for sketch in self.sketches]
        )
        bits = np.array([sketch.sign_bit for sketch in self.sketches], dtype=np.int64)
        return buckets, signs, np.stack([which_bucket, which_sign, bits], axis=1)


def _distinct(labelled: list[tuple[int, U64]]) -> tuple[U64, I64]:
    """Each coefficient block once, and which of them each round uses."""
    order = {label: i for i, label in enumerate(dict.fromkeys(label for label, _ in labelled))}
    blocks = dict(labelled)
    which = np.array([order[label] for label, _ in labelled], dtype=np.int64)
    return np.stack([blocks[label] for label in order]), which


class Running:
    """Counts of a known dictionary, updated round by round without keeping the tables.

    State is (rows, items) for Shared and Hybrid and (items,) for Fresh, whatever the number of
    rounds; the answer equals that of `DecodedRounds` over the same tables.
    """

    def __init__(self, points: U64, *, rows: int, fresh: bool) -> None:
        self._points = points
        self._fresh = fresh
        self._sum = np.zeros(points.size if fresh else (rows, points.size))
        self._first: CountSketch | None = None

    def add(self, sketch: CountSketch, table: npt.NDArray[np.number]) -> None:
        first = self._first = self._first or sketch
        if (sketch.rows, sketch.width, sketch.seed) != (first.rows, first.width, first.seed):
            raise MismatchError("the rounds of one campaign must share rows, width and seed")
        if not self._fresh and (sketch.bucket_round, sketch.rows) != (
            first.bucket_round,
            len(self._sum),
        ):
            raise MismatchError("rounds whose readings are added must share their cells and rows")
        round = DecodedRounds.of([(sketch, table)])
        self._sum += (
            round.estimate(self._points) if self._fresh else round.readings(self._points)[0]
        )

    def estimate(self) -> F64:
        return self._sum.copy() if self._fresh else np.asarray(np.median(self._sum, axis=0))

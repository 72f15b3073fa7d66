"""Integer counts of randomised records: they can be added, saved and loaded.

Cells are as narrow as the records so far allow, sixteen bits at first, so that the largest sketch
of paper 004 (65,536 rows of 1,024 cells) takes 128 MiB, and twice that when a row has more than
65,535 records.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sfumato.arrays import I64, U8
from sfumato.errors import DataError, MismatchError
from sfumato.privacy.randomizers import Randomizer
from sfumato.spec import digest

Cells = npt.NDArray[np.integer]

_FORMAT = 1
_PIECE_BYTES = 1 << 29  # records folded together: many per row, so that adding them is quick


@dataclass(slots=True, repr=False)
class Tally:
    """The sum of all records of one randomizer so far. Tallies of one randomizer add."""

    randomizer: Randomizer
    cells: Cells = field(init=False)  # (rows, width)
    row_counts: I64 = field(init=False)  # records of each row

    def __post_init__(self) -> None:
        shape = (self.randomizer.rows, self.randomizer.width)
        self.cells = np.zeros(shape, dtype=self._width_for(0))
        self.row_counts = np.zeros(self.randomizer.rows, dtype=np.int64)

    @property
    def count(self) -> int:
        return int(self.row_counts.sum())

    def fold(self, records: U8) -> int:
        """Add the records that are valid, (n, record_bytes); return how many were not."""
        if records.ndim != 2 or records.shape[1] != self.randomizer.record_bytes:
            raise MismatchError(
                f"records must have {self.randomizer.record_bytes} bytes; got {records.shape}"
            )
        rejected = 0
        piece = min(_PIECE_BYTES // self.randomizer.record_bytes, 1 << 24)
        for start in range(0, records.shape[0], piece):
            part = records[start : start + piece]
            valid = self.randomizer.valid(part)
            if not valid.all():
                rejected += int(np.count_nonzero(~valid))
                part = part[valid]
            part = np.ascontiguousarray(part)
            counts = self.row_counts.copy()
            rows = self.randomizer.count_rows(part, counts)
            self._widen(counts)
            self.randomizer.fold(part, rows, self.cells)
            self.row_counts = counts
        return rejected

    def __add__(self, other: Tally) -> Tally:
        if self.randomizer != other.randomizer:
            raise MismatchError("tallies of different randomizers do not add")
        total = Tally(self.randomizer)
        total.row_counts = self.row_counts + other.row_counts
        kind = self._width_for(int(total.row_counts.max()))
        total.cells = self.cells.astype(kind)
        total.cells += other.cells.astype(kind, copy=False)
        return total

    def save(self, path: Path | str) -> None:
        """Write a snapshot atomically: a crash leaves the previous one."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                format=np.int64(_FORMAT),
                randomizer=np.frombuffer(bytes.fromhex(digest(self.randomizer)), dtype=np.uint8),
                cells=self.cells,
                row_counts=self.row_counts,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, randomizer: Randomizer, path: Path | str) -> Tally:
        """Read the snapshot at `path`; one of another randomizer, or a damaged one, is refused."""
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except OSError as problem:
            raise DataError(f"the tally {path} cannot be read: {problem.strerror}") from problem
        except (ValueError, EOFError, zipfile.BadZipFile) as problem:
            raise DataError(f"the tally {path} is damaged") from problem
        if set(arrays) != {"format", "randomizer", "cells", "row_counts"} or arrays["format"] != (
            _FORMAT
        ):
            raise DataError(f"the tally {path} is not of format {_FORMAT}")
        if arrays["randomizer"].tobytes().hex() != digest(randomizer):
            raise MismatchError(f"the tally {path} is of another randomizer")
        tally = cls(randomizer)
        if arrays["cells"].shape != tally.cells.shape:
            raise DataError(f"the tally {path} is damaged")
        tally.cells, tally.row_counts = arrays["cells"], arrays["row_counts"]
        return tally

    def __repr__(self) -> str:  # never the cells
        return f"Tally({type(self.randomizer).__name__}, count={self.count})"

    def _widen(self, counts: I64) -> None:
        kind = self._width_for(int(counts.max()))
        if kind != self.cells.dtype:
            self.cells = self.cells.astype(kind)

    def _width_for(self, most: int) -> np.dtype[np.integer]:
        """The narrowest cells that hold `most` records of one row."""
        kinds = (
            (np.int16, np.int32, np.int64)
            if self.randomizer.signed
            else (np.uint16, np.int32, np.int64)
        )
        fitting = [kind for kind in kinds if most <= np.iinfo(kind).max]
        return np.dtype(fitting[0])

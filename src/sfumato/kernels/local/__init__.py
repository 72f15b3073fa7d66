"""The hot loops of local privacy, over plain arrays: each twice, like those in `kernels`.

`points` is (n,) of field elements and `hashes` is (rows, 3) of polynomial coefficients, highest
degree first: three-wise independent cells. A bit vector is packed into little-endian words,
(n, words).
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

import numpy as np

from sfumato.arrays import F64, I64, U8, U64, Whole
from sfumato.kernels import SMALL, Twins, in_parts
from sfumato.kernels.local import plain

Cells = Whole | F64
_LOOKUPS = 1 << 23  # cells read per core for which another is worthwhile
_TWINS = Twins("local", SMALL)
_Counts = TypeVar("_Counts", bound="Whole")


def row_cells(points: U64, rows: I64, hashes: U64, width: int) -> I64:
    """The cell of each point in its own row: (n,)."""
    return _twin(4 * points.size).row_cells(points, rows, hashes, width)  # type: ignore[no-any-return]


def hadamard_records(
    points: U64, places: I64, flips: U64, hashes: U64, width: int, out: U8
) -> None:
    """Fill `out`, (n, bytes), with little-endian numbers: twice the place, and 1 if the sign of the
    Walsh–Hadamard matrix there, in the column of the point's cell, is −1; or 0, where the point's
    bit of `flips` is set. A place is row × width + column, and the width a power of two."""
    _twin(4 * points.size).hadamard_records(points, places, flips, hashes, width, out)


def biased_words(digits: U8, words: U64, out: U64) -> tuple[int, int]:
    """Fill `out` with bits that are 1 with the probability of these binary digits.

    Each of the 64 lanes of a word compares its own uniform number with the probability, digit by
    digit, and the lanes of four words proceed together: about nine random words per word. Words may
    run out, so it returns how many of `out` are done and how many of `words` are used up; call
    again for the rest.
    """
    return _twin(out.size * 64).biased_words(digits, words, out)  # type: ignore[no-any-return]


def deposit(bits: U64, words: U64) -> None:
    """Put the next of `bits`, lowest first, at every 1 of `words`, in place."""
    _twin(words.size * 64).deposit(bits, words)


def count_rows(records: U8, row_bytes: int, counts: I64) -> Whole:
    """The row at the beginning of every record, (n,); counts valid ones in `counts`, in place."""
    return _twin(records.shape[0]).count_rows(records, row_bytes, counts)  # type: ignore[no-any-return]


def add_bits(rows: Whole, records: U8, skip: int, table: _Counts) -> None:
    """Add bit vectors to their rows of `table`, (rows, width), in place.

    A record has `skip` bytes and then its bits, the lowest of each byte first.
    """
    _twin(records.size * 8).add_bits(rows, records, skip, table)


def add_signs(codes: Whole, flat: _Counts) -> None:
    """Add −1 for an odd code, +1 for an even one, to place code // 2 of a flat table."""
    _twin(codes.size).add_signs(codes, flat)


def gather(points: U64, table: Cells, hashes: U64) -> F64:
    """The sum over rows of the cell that each point has there: (n,)."""
    kernels = _twin((points.size + 64) * table.shape[0])  # a row takes as long as 64 points
    cores = points.size * table.shape[0] // _LOOKUPS
    parts = in_parts(lambda a, b: kernels.gather(points[a:b], table, hashes), points.size, cores)
    return np.concatenate(parts)


def gather_hadamard(points: U64, table: Whole, hashes: U64) -> F64:
    """As `gather`, of the Walsh–Hadamard transform of each row; the table stays as it is."""
    work = table.size + points.size * table.shape[0]
    kernels = _twin(work)

    def some(a: int, b: int) -> F64:
        part: F64 = kernels.gather_hadamard(points, table[a:b], hashes[a:b])
        return part

    return np.asarray(sum(in_parts(some, table.shape[0], work // _LOOKUPS)))


def collide(points: U64, others: U64, weights: F64, hashes: U64, shares: F64, width: int) -> F64:
    """The weights of `others` that collide with each point: in excess of the mean over cells, in
    each row, averaged over rows with `shares`: (n,)."""
    kernels = _twin((points.size + others.size + 64) * hashes.shape[0])
    return kernels.collide(points, others, weights, hashes, shares, width)  # type: ignore[no-any-return]


def hadamard(rows: F64 | Whole) -> None:
    """The Walsh–Hadamard transform of each row, in place and without a factor."""
    _twin(rows.size).hadamard(rows)


def _twin(work: int) -> ModuleType:
    return (_TWINS.compiled() if work >= SMALL else None) or plain

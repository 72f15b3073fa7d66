"""The hot loops, over plain arrays: each twice, compiled (`compiled`) and in numpy (`plain`).

The twins have one signature and give equal results, bit for bit, as a test checks (those of `dense`
up to rounding). Small inputs take the numpy path until the first large one, so a device never
compiles or even imports numba; large ones take the compiled path, cut into one piece per core (the
kernels release the interpreter lock).

All arithmetic is over p = 2**61 - 1; `hashing` says what the values mean. `points` is (n,) of
field elements. `buckets` is (·, rows, 2) and `signs` is (·, rows, 4) of polynomial coefficients,
highest degree first; `rounds` is (rounds, 3): which of the buckets, which of the signs, and which
bit of the sign's value a round uses. Tables are (rounds, rows, width).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, U8, U64

Words = npt.NDArray[np.unsignedinteger[Any]]
Decode = Literal["median", "mean"]

SMALL = 1 << 14  # hash evaluations below which numpy is as fast as loading the compiled twin
PIECE = 1 << 17  # fewest items per thread

_Result = TypeVar("_Result")
_Array = TypeVar("_Array", U64, F64)


def fingerprint_bytes(data: U8, offsets: I64, point: int) -> U64:
    """Field elements of the byte strings data[offsets[i]:offsets[i + 1]]."""
    kernels = _TWINS.pick(data.size)
    return _over_items(
        offsets.size - 1,
        lambda a, b: kernels.fingerprint_bytes(data, offsets[a : b + 1], np.uint64(point)),
    )


def fingerprint_integers(items: I64, point: int) -> U64:
    """Field elements of integers, each as its eight bytes."""
    kernels = _TWINS.pick(items.size)
    return _over_items(
        items.size, lambda a, b: kernels.fingerprint_integers(items[a:b], np.uint64(point))
    )


def encode(points: U64, weights: I64 | None, buckets: U64, signs: U64, bit: int, width: int) -> I64:
    """The (rows, width) count sketch of one round: the sum over items of weight × sign."""
    kernels = _TWINS.pick(points.size * signs.shape[0])

    def piece(a: int, b: int) -> I64:
        part = None if weights is None else weights[a:b]
        table: I64 = kernels.encode(points[a:b], part, buckets, signs, bit, width)
        return table

    cores = points.size // (4 * width) if points.size >= PIECE else 1
    pieces = in_parts(piece, points.size, cores)
    return np.sum(pieces, axis=0) if len(pieces) > 1 else pieces[0]


def decode(
    points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64, how: Decode, fresh: bool
) -> F64:
    """Counts over all rounds, (n,).

    `fresh`: each round is decoded on its own and the answers are added. Otherwise readings are
    added over rounds, row by row, and decoded once. Even rows: the two middle readings' mean.
    """
    kernels = _TWINS.pick(points.size * tables.shape[0] * tables.shape[1])
    mean = how == "mean"
    return _over_items(
        points.size,
        lambda a, b: kernels.decode(points[a:b], tables, buckets, signs, rounds, mean, fresh),
    )


def readings(points: U64, tables: F64, buckets: U64, signs: U64, rounds: I64) -> F64:
    """Sign × cell for every round, row and item: (rounds, rows, n)."""
    kernels = _TWINS.pick(points.size * tables.shape[0] * tables.shape[1])
    result: F64 = kernels.readings(points, tables, buckets, signs, rounds)
    return result


def cores_allowed() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_compiled() -> bool:
    """Whether numba is installed; without it every loop runs in numpy."""
    return importlib.util.find_spec("numba") is not None


class Twins:
    """The loops of one folder, compiled and in numpy."""

    def __init__(self, folder: str, small: int, *, are_equal: bool = True) -> None:
        self._folder = folder
        self._small = small  # work below which numba is not loaded
        self._are_equal = are_equal  # bit for bit: otherwise only the work decides between them
        self._compiled: ModuleType | None = None

    def compiled(self) -> ModuleType | None:
        """The compiled twin, if numba is installed."""
        if self._compiled is None and is_compiled():
            self._compiled = import_module(f"sfumato.kernels.{self._folder}.compiled")
        return self._compiled

    def pick(self, work: int) -> ModuleType:
        """The compiled twin if it is worth loading, or loaded and equal; else the other one."""
        loaded = self._compiled if self._are_equal else None
        compiled = self.compiled() if work >= self._small else loaded
        return compiled or import_module(f"sfumato.kernels.{self._folder}.plain")


_TWINS = Twins("count", SMALL)


def in_parts(
    function: Callable[[int, int], _Result], size: int, cores: int, step: int = 1
) -> list[_Result]:
    """function(start, stop) over all of `size`, cut at multiples of `step` into one part for each
    core: at most `cores`, as many as are worthwhile."""
    cores = max(1, min(cores, cores_allowed()))
    cuts = sorted({size * core // cores // step * step for core in range(cores)} | {size})
    if len(cuts) <= 2:
        return [function(0, size)]
    with ThreadPoolExecutor(len(cuts) - 1) as pool:
        return list(pool.map(function, cuts[:-1], cuts[1:]))


def _over_items(size: int, function: Callable[[int, int], _Array]) -> _Array:
    pieces = in_parts(function, size, size // PIECE)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

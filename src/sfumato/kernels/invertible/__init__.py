"""The hot loops of invertible sketches; as in `kernels`, each exists twice."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt

from sfumato.kernels import is_compiled
from sfumato.kernels.invertible.plain import Layout, Listed

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

SMALL = 1 << 10  # keys below which numba is not loaded


def text_keys(
    data: npt.NDArray[np.uint8], offsets: I64, length: int, limbs: int
) -> tuple[U64, npt.NDArray[np.bool_]]:
    """Byte strings as numbers, a one after the last byte; and which are short enough."""
    keys_and_fits: tuple[U64, npt.NDArray[np.bool_]] = _pick(offsets.size).text_keys(
        data, offsets, length, limbs
    )
    return keys_and_fits


def insert(
    table: U64,
    parts: U64,
    weights: I64,
    values: I64,
    point: int,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> None:
    """Add each key to its cells `weights` times, and its value once, in place."""
    kernels = _pick(len(parts))
    kernels.insert(table, parts, weights, values, np.uint64(point), buckets, checks, width, layout)


def peel(
    table: U64,
    candidates: U64,
    point: int,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
    signed: bool,
) -> Listed:
    """Remove every key that can be read from the table, in place: parts, counts and values. Devices
    never do this, so it is compiled if numba is installed."""
    listed: Listed = _compiled().peel(
        table, candidates, np.uint64(point), buckets, checks, width, layout, signed
    )
    return listed


@cache
def _compiled() -> ModuleType:
    if is_compiled():
        from sfumato.kernels.invertible import compiled as compiled_invertible

        return compiled_invertible
    return _plain()


@cache
def _plain() -> ModuleType:
    from sfumato.kernels.invertible import plain as plain_invertible

    return plain_invertible


def _pick(work: int) -> ModuleType:
    is_loaded = _compiled.cache_info().currsize > 0
    return _compiled() if work >= SMALL or is_loaded else _plain()

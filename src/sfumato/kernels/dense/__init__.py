"""The hot loops of dense sketches; as in `kernels`, each exists twice.

The twins add in another order and precision, so they are equal up to float32 rounding. Each gives
the same bits every time, on any number of cores.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType

import numpy as np

from sfumato.kernels import cores_allowed, is_compiled
from sfumato.kernels.dense import plain as plain_dense
from sfumato.kernels.dense.plain import F32, I32, U32

SMALL = 1 << 20  # coordinates times rows below which numba is not loaded
WORK_PER_CORE = 1 << 21  # coordinates times rows for which another core is worthwhile


def encode(vectors: F32, rotations: I32, sign_keys: U32, width: int, scale: float) -> F32:
    """The tables of vectors (n, length) times `scale`, (n, rows, width)."""
    rows = len(rotations)
    tables = np.zeros((len(vectors), rows, width), dtype=np.float32)
    kernels = pick_kernels(vectors.size * rows)
    if kernels is None:
        for vector, table in zip(vectors, tables, strict=True):
            table[:] = plain_dense.encode(vector, rotations, sign_keys, width, scale)
        return tables
    is_narrow = width <= kernels.LANES
    add = kernels.encode_narrow if is_narrow else kernels.encode_wide
    whole = rows if is_narrow else rows * width

    def add_each(first: int, last: int) -> None:
        for vector, table in zip(vectors[first:last], tables[first:last], strict=True):
            add(table.reshape(-1), vector, rotations, sign_keys, width, 0, whole)

    if len(vectors) > 1:
        _in_parts(add_each, len(vectors), vectors.size * rows)
    elif len(vectors):
        table, vector = tables.reshape(-1), vectors[0]
        _in_parts(
            lambda first, last: add(table, vector, rotations, sign_keys, width, first, last),
            whole,
            vectors.size * rows,
        )
    tables *= np.float32(scale)
    return tables


def decode(
    table: F32, rotations: I32, sign_keys: U32, length: int, blocks: int, scale: float
) -> F32:
    """The adjoint of `encode` for each block of rows, and the median over blocks, (length,)."""
    rows, width = table.shape
    kernels = pick_kernels(length * rows)
    if kernels is None:
        return plain_dense.decode(table, rotations, sign_keys, length, blocks, scale)
    vector, flat = np.empty(length, dtype=np.float32), table.reshape(-1)
    is_narrow = width <= kernels.LANES
    part = kernels.decode_narrow if is_narrow else kernels.decode_wide
    _in_parts(
        lambda first, last: part(
            vector, flat, rotations, sign_keys, width, blocks, scale, first, last
        ),
        rotations.shape[1] if is_narrow else length,
        length * rows,
        1 if is_narrow else kernels.PIECE,
    )
    return vector


def _in_parts(part: Callable[[int, int], None], size: int, work: int, step: int = 1) -> None:
    """part(first, last) over all of `size`, cut at multiples of `step` into one part per core."""
    cores = max(1, min(cores_allowed(), work // WORK_PER_CORE))
    cuts = sorted({size * core // cores // step * step for core in range(cores)} | {size})
    if len(cuts) == 2:
        part(0, size)
        return
    with ThreadPoolExecutor(len(cuts) - 1) as pool:
        list(pool.map(part, cuts[:-1], cuts[1:]))


@cache
def compiled_kernels() -> ModuleType | None:
    if not is_compiled():
        return None
    from sfumato.kernels.dense import compiled as compiled_dense

    return compiled_dense


def pick_kernels(work: int) -> ModuleType | None:
    """The compiled twin, where there is one and it is worth waking; else none."""
    is_loaded = compiled_kernels.cache_info().currsize > 0
    return compiled_kernels() if work >= SMALL or is_loaded else None

"""The hot loops of dense sketches; as in `kernels`, each exists twice.

The twins add in another order and precision, so they are equal up to float32 rounding. Each gives
the same bits every time, on any number of cores, and the size of the input alone decides which one
runs: so a seeded run gives the same bits whatever its process did before.
"""

from __future__ import annotations

import numpy as np

from sfumato.arrays import F32, I32, U32
from sfumato.kernels import Twins, in_parts
from sfumato.kernels.dense import plain as plain_dense

SMALL = 1 << 20  # coordinates times rows below which numba is not loaded
WORK_PER_CORE = 1 << 21  # coordinates times rows for which another core is worthwhile
TWINS = Twins("dense", SMALL, are_equal=False)


def encode(vectors: F32, rotations: I32, sign_keys: U32, width: int, scale: float) -> F32:
    """The tables of vectors (n, length) times `scale`, (n, rows, width)."""
    rows = len(rotations)
    tables = np.zeros((len(vectors), rows, width), dtype=np.float32)
    kernels = TWINS.pick(vectors.size * rows)
    if kernels is plain_dense:
        for vector, table in zip(vectors, tables, strict=True):
            table[:] = plain_dense.encode(vector, rotations, sign_keys, width, scale)
        return tables
    is_narrow = width <= kernels.LANES
    add = kernels.encode_narrow if is_narrow else kernels.encode_wide
    whole = rows if is_narrow else rows * width
    cores = vectors.size * rows // WORK_PER_CORE

    def add_each(first: int, last: int) -> None:
        for vector, table in zip(vectors[first:last], tables[first:last], strict=True):
            add(table.reshape(-1), vector, rotations, sign_keys, width, 0, whole)

    if len(vectors) > 1:
        in_parts(add_each, len(vectors), cores)
    elif len(vectors):
        table, vector = tables.reshape(-1), vectors[0]
        in_parts(
            lambda first, last: add(table, vector, rotations, sign_keys, width, first, last),
            whole,
            cores,
        )
    tables *= np.float32(scale)
    return tables


def decode(
    table: F32, rotations: I32, sign_keys: U32, length: int, blocks: int, scale: float
) -> F32:
    """The adjoint of `encode` for each block of rows, and the median over blocks, (length,)."""
    rows, width = table.shape
    kernels = TWINS.pick(length * rows)
    if kernels is plain_dense:
        return plain_dense.decode(table, rotations, sign_keys, length, blocks, scale)
    vector, flat = np.empty(length, dtype=np.float32), table.reshape(-1)
    is_narrow = width <= kernels.LANES
    part = kernels.decode_narrow if is_narrow else kernels.decode_wide
    in_parts(
        lambda first, last: part(
            vector, flat, rotations, sign_keys, width, blocks, scale, first, last
        ),
        rotations.shape[1] if is_narrow else length,
        length * rows // WORK_PER_CORE,
        1 if is_narrow else kernels.PIECE,
    )
    return vector

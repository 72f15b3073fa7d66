"""The hot loops of invertible sketches; as in `kernels`, each exists twice."""

from __future__ import annotations

import numpy as np

from sfumato.arrays import I64, U8, U64, Bool
from sfumato.kernels import Twins
from sfumato.kernels.invertible import plain
from sfumato.kernels.invertible.plain import Layout, Listed

_TWINS = Twins("invertible", small=1 << 10)  # keys


def text_keys(data: U8, offsets: I64, length: int, limbs: int) -> tuple[U64, Bool]:
    """Byte strings as numbers, a one after the last byte; and which are short enough."""
    keys_and_fits: tuple[U64, Bool] = _TWINS.pick(offsets.size).text_keys(
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
    kernels = _TWINS.pick(len(parts))
    kernels.insert(table, parts, weights, values, np.uint64(point), buckets, checks, width, layout)


def peel(
    table: U64,
    candidates: U64,
    point: int,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> Listed:
    """Remove every key that can be read from the table, in place: parts, counts and values. Devices
    never do this, so it is compiled if numba is installed."""
    kernels = _TWINS.compiled() or plain
    listed: Listed = kernels.peel(
        table, candidates, np.uint64(point), buckets, checks, width, layout
    )
    return listed

"""Packed words added to a table without being unpacked first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

U64 = npt.NDArray[np.uint64]
Words = npt.NDArray[np.unsignedinteger[Any]]

_1, _63, _64 = np.uint64(1), np.uint64(63), np.uint64(64)


@njit(nogil=True, cache=True)
def add(total: Words, held: U64, bits: int) -> None:
    """`held` is the packed words in 64 bits each, and at least one more after them."""
    step = np.uint64(bits)
    mask = ((_1 << (step - _1)) << _1) - _1  # by two steps: a shift by 64 is none
    at = np.uint64(0)
    for cell in range(total.size):
        place, low = at >> np.uint64(6), at & _63
        word = (held[place] >> low) | ((held[place + _1] << _1) << (_63 - low))
        total[cell] += word & mask
        at += step

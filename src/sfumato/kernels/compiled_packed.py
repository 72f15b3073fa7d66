"""Packed words added to a table without being unpacked first: many tables in one call, so that a
thread which adds them need not ask for the interpreter in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

U8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

_1, _3, _7, _8, _64 = (np.uint64(number) for number in (1, 3, 7, 8, 64))


@njit(nogil=True, cache=True)
def add(total: Words, data: U8, tables: int, size: int, bits: int) -> None:
    """`data` is tables of so many bytes, one after another, and nine bytes more."""
    step = np.uint64(bits)
    mask = ((_1 << (step - _1)) << _1) - _1  # by two steps: a shift by 64 is none
    for table in range(tables):
        start, at = np.uint64(table * size), np.uint64(0)
        for cell in range(total.size):
            place, low = start + (at >> _3), at & _7
            word = np.uint64(0)
            for byte in range(8):  # one load
                word |= np.uint64(data[place + np.uint64(byte)]) << np.uint64(8 * byte)
            word >>= low
            if low + step > _64:
                word |= np.uint64(data[place + _8]) << (_64 - low)
            total[cell] += word & mask
            at += step

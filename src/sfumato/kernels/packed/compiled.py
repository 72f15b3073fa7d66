"""Packed words added to a table without being unpacked first."""

from __future__ import annotations

import numpy as np

from sfumato.arrays import U8
from sfumato.kernels import Words
from sfumato.kernels.compiling import kernel

_1, _3, _7, _8, _64 = (np.uint64(number) for number in (1, 3, 7, 8, 64))


@kernel
def add(total: Words, data: U8, bits: int) -> None:
    """Add one packed table."""
    step = np.uint64(bits)
    mask = ((_1 << (step - _1)) << _1) - _1  # by two steps: a shift by 64 is none
    # Cells with eight more bytes after their first.
    inner = min(total.size, max(0, 8 * (data.size - 8) // bits))
    at = np.uint64(0)
    for cell in range(inner):
        place, low = at >> _3, at & _7
        word = np.uint64(0)
        for byte in range(8):  # one load
            word |= np.uint64(data[place + np.uint64(byte)]) << np.uint64(8 * byte)
        word >>= low
        if low + step > _64:
            word |= np.uint64(data[place + _8]) << (_64 - low)
        total[cell] += word & mask
        at += step
    for cell in range(inner, total.size):
        word = np.uint64(0)
        for bit in range(bits):
            place = at + np.uint64(bit)
            word |= np.uint64((data[place >> _3] >> (place & _7)) & _1) << np.uint64(bit)
        total[cell] += word
        at += step

"""Add packed words to a table without unpacking them first: many tables in one call, in place, so
that a thread neither copies them nor needs the interpreter lock in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types  # type: ignore[attr-defined]  # numba's own types
from numba.core import cgutils
from numba.extending import intrinsic

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Words = npt.NDArray[np.unsignedinteger[Any]]

_1, _3, _7, _8, _64 = (np.uint64(number) for number in (1, 3, 7, 8, 64))


def _as_pointer(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """For numba: an address as something that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


_pointer: Any = intrinsic(_as_pointer)


@njit(nogil=True, cache=True)
def add(total: Words, addresses: U64, size: int, bits: int) -> None:
    """Add tables of `size` bytes, each at its address."""
    step = np.uint64(bits)
    mask = ((_1 << (step - _1)) << _1) - _1  # in two steps: a shift by 64 is undefined
    # Cells whose first byte is followed by eight more.
    inner = min(total.size, max(0, 8 * (size - 8) // bits))
    for table in range(addresses.size):
        data = carray(_pointer(addresses[table]), size, np.uint8)
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

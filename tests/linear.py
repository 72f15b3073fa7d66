"""Linear complexity: how short a shift register makes a sequence of bits (Berlekamp and Massey)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def shortest_register(bits: Iterable[int]) -> tuple[int, int]:
    """The length of the shortest linear feedback shift register that gives `bits`, and its taps.

    Bit j of the taps says that the bit j places back is added, modulo 2. One long integer holds the
    bits so far, the last one lowest, so a step takes a few operations on whole integers.

    >>> shortest_register([1, 0, 0, 1, 0, 0, 1, 0])  # each bit is the one three places back
    (3, 9)
    """
    taps, before = 1, 1
    length, since = 0, 1
    past = 0
    for place, bit in enumerate(bits):
        past = past << 1 | int(bit)
        if (past & taps).bit_count() & 1:
            if 2 * length <= place:
                taps, before = taps ^ before << since, taps
                length, since = place + 1 - length, 1
                continue
            taps ^= before << since
        since += 1
    return length, taps


def continued(bits: Iterable[int], taps: int, count: int) -> npt.NDArray[np.uint8]:
    """The next `count` bits of a register with these taps after `bits`."""
    past = 0
    for bit in bits:
        past = past << 1 | int(bit)
    output = []
    for _ in range(count):
        bit = (past << 1 & taps).bit_count() & 1
        past = past << 1 | bit
        output.append(bit)
    return np.array(output, dtype=np.uint8)

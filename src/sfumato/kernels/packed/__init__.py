"""Tables of words of a few bits, packed without gaps: packing, unpacking, and adding to a sum.

Word k takes the bits k·b to k·b + b − 1 of the message, lowest first (little-endian). Large tables
are added by compiled code if numba is installed, others by numpy; sums are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfumato.errors import MismatchError
from sfumato.kernels import Twins, Words

SMALL = 1 << 14  # words below which numba is not loaded
TWINS = Twins("packed", SMALL)


def pack_words(words: Words, bits: int) -> bytes:
    """Words modulo 2**bits, lowest bit first, without gaps."""
    if bits in (8, 16, 32, 64) and words.dtype.itemsize * 8 == bits:
        return words.astype(words.dtype.newbyteorder("<"), copy=False).tobytes()
    wide = words.astype("<u8").view(np.uint8).reshape(words.size, 8)
    digits = np.unpackbits(wide, axis=1, bitorder="little")[:, :bits]
    return np.packbits(digits.reshape(-1), bitorder="little").tobytes()


def unpack_words(data: bytes, cells: int, bits: int, lane: type[np.unsignedinteger]) -> Words:
    """The words that `pack_words` packed."""
    check_packed(data, cells, bits)
    kind = np.dtype(lane)
    if kind.itemsize * 8 == bits:
        return np.frombuffer(data, dtype=kind.newbyteorder("<")).astype(kind, copy=False)
    # Eight words take `bits` bytes, so the k-th of each eight begins at every `bits`-th byte.
    eights = max(1, -(-cells // 8))
    padded = np.zeros(eights * bits + 9, dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    words = np.empty((eights, 8), dtype=kind)
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        values = np.ndarray(eights, "<u8", padded.data, first, (bits,)) >> np.uint64(shift)
        if shift + bits > 64:
            above = np.ndarray(eights, np.uint8, padded.data, first + 8, (bits,)).astype(np.uint64)
            values |= above << np.uint64(64 - shift)
        words[:, place] = values & np.uint64((1 << bits) - 1)
    return words.reshape(-1)[:cells]


def add_packed(total: Words, tables: Sequence[bytes], bits: int) -> None:
    """Add tables of packed words to `total`, whose words have at least as many bits; sums wrap
    around. A malformed table raises MismatchError, and then none is added.

    >>> total = np.array([1, 2, 3], dtype=np.uint8)
    >>> add_packed(total, [pack_words(np.array([1, 0, 7], dtype=np.uint8), 3)] * 2, 3)
    >>> total
    array([ 3,  2, 17], dtype=uint8)
    """
    for data in tables:
        check_packed(data, total.size, bits)
    compiled = TWINS.compiled() if total.size >= SMALL and total.itemsize * 8 != bits else None
    for data in tables:
        if compiled is None:
            total += unpack_words(data, total.size, bits, total.dtype.type)
        else:
            compiled.add(total, np.frombuffer(data, dtype=np.uint8), bits)


def check_packed(data: bytes, cells: int, bits: int) -> None:
    """Raise MismatchError unless these are `cells` packed words."""
    if len(data) != -(-cells * bits // 8):
        raise MismatchError(
            f"a packed table must have {-(-cells * bits // 8)} bytes; got {len(data)}"
        )
    used = cells * bits % 8  # bits of the last byte
    if used and data[-1] >> used:
        raise MismatchError("the last bits of a packed table must be zero")

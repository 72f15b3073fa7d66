"""Who may see a summand, and how a table travels."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato.errors import MismatchError
from sfumato.spec import require, spec

I64 = npt.NDArray[np.int64]


@runtime_checkable
class Aggregation(Protocol):
    """Seal one device's table into bytes; open a sum of unpacked ones."""

    @property
    def hides_summands(self) -> bool: ...

    @property
    def modulus_bits(self) -> int: ...

    def message_bytes(self, cells: int) -> int: ...

    def seal(self, table: I64) -> bytes: ...

    def unpack(self, message: bytes, shape: tuple[int, ...]) -> I64: ...

    def open(self, total: I64) -> I64: ...


@spec("plain")
class Plain:
    """The collector is trusted with every table: it adds them and forgets them.

    A table travels as whole numbers modulo 2**modulus_bits, packed to the bit: exactly the words
    that a masked sum sends, without the masks (docs/decisions/0006). So a bill does not change when
    a study moves to a secure sum, and a message's length says nothing about what is in it.

    Who sees what: the collector could read each device's table. Choose `trust` accordingly.
    """

    modulus_bits: int

    def check(self) -> None:
        require(
            2 <= self.modulus_bits <= 62, f"modulus_bits must be 2 to 62; got {self.modulus_bits}"
        )

    @property
    def hides_summands(self) -> bool:
        return False

    def message_bytes(self, cells: int) -> int:
        return -(-cells * self.modulus_bits // 8)

    def seal(self, table: I64) -> bytes:
        return pack(table, self.modulus_bits)

    def unpack(self, message: bytes, shape: tuple[int, ...]) -> I64:
        return unpack(message, math.prod(shape), self.modulus_bits).reshape(shape)

    def open(self, total: I64) -> I64:
        """Residues to the whole numbers nearest zero: −2**(bits−1) .. 2**(bits−1) − 1."""
        modulus = np.int64(1) << self.modulus_bits
        residue = total % modulus
        return np.where(residue >= modulus // 2, residue - modulus, residue)


def pack(table: I64, bits: int) -> bytes:
    """Numbers modulo 2**bits, least significant bit first, with no gaps between them.

    >>> pack(np.array([1, -1, 0]), 4).hex()
    'f100'
    """
    residue = (table.reshape(-1) & np.int64((1 << bits) - 1)).astype(np.uint64)
    places = np.arange(bits, dtype=np.uint64)
    digits = (residue[:, None] >> places & np.uint64(1)).astype(np.uint8)
    return np.packbits(digits.reshape(-1), bitorder="little").tobytes()


def unpack(message: bytes, count: int, bits: int) -> I64:
    """The `count` residues, 0 .. 2**bits − 1, that `pack` wrote."""
    if len(message) != -(-count * bits // 8):
        raise MismatchError(
            f"a message of {count} cells must have {-(-count * bits // 8)} bytes; "
            f"got {len(message)}"
        )
    digits = np.unpackbits(np.frombuffer(message, dtype=np.uint8), bitorder="little")
    if digits[count * bits :].any():
        raise MismatchError("the last bits of a message must be zero")
    places = np.arange(bits, dtype=np.int64)
    table: I64 = (digits[: count * bits].reshape(count, bits).astype(np.int64) << places).sum(
        axis=1
    )
    return table

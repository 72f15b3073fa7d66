"""Who may see a summand, and how a table travels."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato.errors import MismatchError
from sfumato.secagg.parameters import Mode
from sfumato.spec import require, spec

I64 = npt.NDArray[np.int64]


@runtime_checkable
class Aggregation(Protocol):
    """Who may see a summand, how long a table is on the wire, and how a sum of residues is read."""

    @property
    def hides_summands(self) -> bool: ...

    @property
    def modulus_bits(self) -> int: ...

    def message_bytes(self, cells: int) -> int: ...

    def open(self, total: I64) -> I64: ...


@spec("plain")
class Plain:
    """The collector is trusted with every table: it adds them and forgets them.

    A table travels as whole numbers modulo 2**modulus_bits, packed to the bit: exactly the words
    that a masked sum sends, without the masks (docs/decisions/0006). So the size of a table does
    not change when a study moves to a secure sum, and the length of a message reveals nothing.

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
        return centred(total, 1 << self.modulus_bits)


@spec("masked")
class Masked:
    """Nobody sees a summand: devices add masks that cancel in the sum (`secagg`).

    A table travels in a masked round (`Task.masked_round`), in as many bytes as under `Plain`; the
    round's other messages are counted as well (`MaskedRound.bytes_up` and `bytes_down`).

    Who sees what: only the sum over at least the task's `min_count` devices is visible, under the
    assumptions in docs/concepts/secure-aggregation.md.
    """

    modulus_bits: int
    corrupt: float  # share of a cohort that may collude with the collector
    mode: Mode = "semi_honest"  # what the collector may do
    security_bits: int = 80
    prime: bool = False  # compute modulo 2**modulus_bits − 1, a prime, so that division works

    def check(self) -> None:
        require(
            2 <= self.modulus_bits <= 62, f"modulus_bits must be 2 to 62; got {self.modulus_bits}"
        )
        require(
            0 <= self.corrupt < 1, f"corrupt must be at least 0 and below 1; got {self.corrupt}"
        )

    @property
    def hides_summands(self) -> bool:
        return True

    def message_bytes(self, cells: int) -> int:
        return -(-cells * self.modulus_bits // 8)

    def open(self, total: I64) -> I64:
        return centred(total, (1 << self.modulus_bits) - self.prime)


def centred(total: I64, modulus: int) -> I64:
    """Map residues to the whole numbers nearest zero.

    >>> centred(np.array([0, 7, 8, 15]), 16)
    array([ 0,  7, -8, -1])
    """
    residue = total % np.int64(modulus)
    return np.where(residue >= (modulus + 1) // 2, residue - modulus, residue)


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

"""Who may see a summand, and how a table travels."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sfumato.kernels.packed import pack_words, unpack_words
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
        return pack_words(table.reshape(-1).astype(np.uint64), self.modulus_bits)

    def unpack(self, message: bytes, shape: tuple[int, ...]) -> I64:
        """The residues, 0 .. 2**modulus_bits − 1, of a table."""
        words = unpack_words(message, math.prod(shape), self.modulus_bits, np.uint64)
        return words.view(np.int64).reshape(shape)

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

"""Who may see a summand, and how a table travels."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from sfumato.arrays import I64, U8, U64
from sfumato.kernels.packed import pack_words, unpack_words
from sfumato.secagg.parameters import Mode, require_security
from sfumato.sketch.keys import limbs
from sfumato.spec import require, spec


@runtime_checkable
class Aggregation(Protocol):
    """Who may see a summand, how long a table is on the wire, and how a sum of residues is read."""

    @property
    def hides_summands(self) -> bool: ...

    @property
    def modulus_bits(self) -> int: ...

    def message_bits(self, cells: int) -> int: ...

    def open(self, total: I64) -> I64: ...


@spec("plain")
class Plain:
    """The collector is trusted with every table: it adds them and forgets them.

    A table travels as whole numbers modulo 2**modulus_bits, packed to the bit: exactly the words
    that a masked sum sends, without the masks (docs/decisions/0006). So the size of a table does
    not change when a study moves to a secure sum, and the length of a message reveals nothing.

    Who sees what: the collector could read each device's table. Choose `trust` accordingly.
    """

    hides_summands: ClassVar[bool] = False
    modulus_bits: int

    def check(self) -> None:
        require.within(2, 62, modulus_bits=self.modulus_bits)

    def message_bits(self, cells: int) -> int:
        return cells * self.modulus_bits

    def seal(self, table: I64) -> bytes:
        return pack_words(table.reshape(-1).astype(np.uint64), self.modulus_bits)

    def unpack(self, message: bytes, shape: tuple[int, ...]) -> I64:
        """The residues, 0 .. 2**modulus_bits − 1, of a table."""
        words = unpack_words(message, math.prod(shape), self.modulus_bits, np.uint64)
        return words.view(np.int64).reshape(shape)

    def open(self, total: I64) -> I64:
        return centred(total, 1 << self.modulus_bits)


@spec("sparse")
class Sparse:
    """The collector is trusted with every report, and a device sends its values themselves: the
    numbers of the cells that they count in, instead of a table of all cells.

    A report has `entries` numbers of `entry_bits` bits each, in ascending order and packed to the
    bit. 0 stands for none, so that the length of a message reveals nothing.

    Who sees what: the collector could read each device's values, as it could under `Plain`.
    """

    hides_summands: ClassVar[bool] = False
    modulus_bits: ClassVar[int] = 62  # counts are 64-bit integers: no number of devices wraps them
    entries: int  # of one device
    entry_bits: int

    def check(self) -> None:
        for name in ("entries", "entry_bits"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")

    def message_bits(self, cells: int) -> int:
        return self.entries * self.entry_bits

    def seal(self, numbers: U64) -> bytes:
        """The message of at most `entries` numbers, (n, limbs)."""
        every = np.zeros((self.entries, limbs(self.entry_bits)), dtype=np.uint64)
        every[self.entries - len(numbers) :] = numbers[np.lexsort(numbers.T[::-1])]
        bits = np.unpackbits(_bytes(every), axis=1, bitorder="little")[:, : self.entry_bits]
        return np.packbits(bits.reshape(-1), bitorder="little").tobytes()

    def unpack(self, messages: U8) -> U64:
        """The numbers of messages, as rows of bytes: (n, entries, limbs)."""
        bits = np.unpackbits(messages, axis=1, bitorder="little")
        bits = bits[:, : self.entries * self.entry_bits]
        wide = np.zeros((bits.shape[0] * self.entries, 64 * limbs(self.entry_bits)), dtype=np.uint8)
        wide[:, : self.entry_bits] = bits.reshape(-1, self.entry_bits)
        numbers = np.packbits(wide, axis=1, bitorder="little").view("<u8").astype(np.uint64)
        return numbers.reshape(bits.shape[0], self.entries, limbs(self.entry_bits))

    def open(self, total: I64) -> I64:
        return total


@spec("masked")
class Masked:
    """Nobody sees a summand: devices add masks that cancel in the sum (`secagg`).

    A table travels in a masked round (`Task.masked_round`), in as many bytes as under `Plain`; the
    round's other messages are counted as well (`MaskedRound.bytes_up` and `bytes_down`).

    Who sees what: only the sum over at least the task's `min_count` devices is visible, under the
    assumptions in docs/concepts/secure-aggregation.md.
    """

    hides_summands: ClassVar[bool] = True
    modulus_bits: int
    corrupt: float  # share of a cohort that may collude with the collector
    mode: Mode = "semi_honest"  # what the collector may do
    security_bits: int = 80
    prime: bool = False  # compute modulo 2**modulus_bits − 1, a prime, so that division works

    def check(self) -> None:
        require.within(2, 62, modulus_bits=self.modulus_bits)
        require(
            0 <= self.corrupt < 1, f"corrupt must be at least 0 and below 1; got {self.corrupt}"
        )
        require_security(self.security_bits, self.mode)

    def message_bits(self, cells: int) -> int:
        return cells * self.modulus_bits

    def open(self, total: I64) -> I64:
        return centred(total, (1 << self.modulus_bits) - self.prime)


def _bytes(numbers: U64) -> U8:
    """The bytes of each number, (n, limbs), lowest first."""
    return np.ascontiguousarray(numbers.astype("<u8")).view(np.uint8)


def centred(total: I64, modulus: int) -> I64:
    """Map residues to the whole numbers nearest zero.

    >>> centred(np.array([0, 7, 8, 15]), 16)
    array([ 0,  7, -8, -1])
    """
    residue = total % np.int64(modulus)
    return np.where(residue >= (modulus + 1) // 2, residue - modulus, residue)

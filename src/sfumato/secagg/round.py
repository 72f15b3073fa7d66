"""One secure sum as data: its tables, its devices and the assumptions about them."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from sfumato.secagg import parameters
from sfumato.secagg.merkle import most_proof_bytes
from sfumato.secagg.parameters import Mode, Parameters
from sfumato.spec import digest, require, spec

KEY_BYTES = 32
SIGNATURE_BYTES = 64
KEYS_BYTES = 4 + 3 * KEY_BYTES + SIGNATURE_BYTES
NEIGHBOUR_BYTES = KEY_BYTES + KEYS_BYTES  # its identity and its enrolment
SHARE_BYTES = 36
ACKNOWLEDGEMENT_BYTES = 4 + KEY_BYTES + SIGNATURE_BYTES
COMMITMENT_BYTES = 6  # commitment to a share, which identifies liars
SEALED_BYTES = 2 * SHARE_BYTES + 16
BOX_BYTES = SEALED_BYTES + 2 * COMMITMENT_BYTES
LANES = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))
PRIMES = (61,)  # bits of Mersenne primes: a mask is uniform up to 2**-bits per cell


@spec("masked_round")
class MaskedRound:
    """One secure sum: its tables, its devices and the assumptions about them."""

    task: str  # the task of the tables
    cells: int
    modulus_bits: int
    cohort: int  # devices invited; members are 0 .. cohort − 1 of the roster
    corrupt: float  # share of them that may work with the collector
    dropout: float  # share that may drop out
    mode: Mode
    nonce: str  # unique to the round
    security_bits: int = 80  # 40, and 40 more against a collector that tries graphs
    prime: bool = False  # add modulo 2**modulus_bits − 1, a prime, in place of 2**modulus_bits

    def check(self) -> None:
        require.at_least(1, cells=self.cells)
        require.within(2, 64, modulus_bits=self.modulus_bits)
        require(
            not self.prime or self.modulus_bits in PRIMES,
            f"2**modulus_bits − 1 must be a prime, of {PRIMES} bits; got {self.modulus_bits}",
        )
        require(self.cohort >= 3, f"a cohort must have at least 3 members; got {self.cohort}")
        for name in ("corrupt", "dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}")
        require(
            len(self.nonce) == 32 and set(self.nonce) <= set("0123456789abcdef"),
            "nonce must be 32 hexadecimal digits",
        )
        require(
            self.mode == "semi_honest" or self.least_survivors >= self.majority,
            f"{self.majority} devices must stay in a semi_malicious round, so that no two sums can "
            f"be opened; got a floor of {self.least_survivors}: lower dropout or corrupt",
        )
        parameters.require_security(self.security_bits, self.mode)

    @property
    def salt(self) -> bytes:
        return _salt(self)

    @property
    def least_survivors(self) -> int:
        """The fewest devices with which a phase is closed and a sum opened."""
        return math.ceil((1 - self.dropout) * self.cohort - 1e-9)

    def parameters(self, enrolled: int) -> Parameters:
        """Neighbours and threshold for this many devices; every device computes them itself.

        All corrupt members of the cohort may be among them, and as many may still drop out as the
        floor allows.
        """
        return _parameters(self, enrolled)

    @property
    def majority(self) -> int:
        """Two sets of this many members have an honest one in common."""
        return (self.cohort + self._corrupt) // 2 + 1

    def quorum(self, enrolled: int) -> int:
        """How many of the committee must sign the same survivors: no two sets can have this many
        signatures, since only corrupt devices sign both. 0 in a "semi_honest" round."""
        return self.parameters(enrolled).threshold if self.mode == "semi_malicious" else 0

    @property
    def _corrupt(self) -> int:
        return math.floor(self.corrupt * self.cohort + 1e-9)

    @property
    def modulus(self) -> int:
        return (1 << self.modulus_bits) - self.prime

    @property
    def vector_bytes(self) -> int:
        """The size of a masked table."""
        return -(-self.cells * self.modulus_bits // 8)

    def bytes_up(self, enrolled: int) -> int:
        """How many bytes a device sends, if none drops out."""
        degree = self.parameters(enrolled).neighbours
        signed = SIGNATURE_BYTES if self.mode == "semi_malicious" else 0
        return KEYS_BYTES + degree * (BOX_BYTES + SHARE_BYTES) + self.vector_bytes + signed

    def bytes_down(self, enrolled: int) -> int:
        """How many bytes a device receives at most, if none drops out.

        They grow with the logarithm of the cohort, but for three sets of members: a bit for each.
        """
        degree, members = self.parameters(enrolled).neighbours, -(-self.cohort // 8)
        proof, signed = most_proof_bytes(degree + 1, self.cohort), 0
        if quorum := self.quorum(enrolled):
            signed = quorum * ACKNOWLEDGEMENT_BYTES
            proof += most_proof_bytes(quorum, self.cohort)
        each = NEIGHBOUR_BYTES + 4 + BOX_BYTES
        return 3 * members + KEY_BYTES + degree * each + signed + proof

    @property
    def lane(self) -> type[np.unsignedinteger]:
        """The word in which cells are masked and added."""
        return next(kind for bits, kind in LANES if self.modulus_bits <= bits)


@lru_cache(maxsize=16)
def _salt(round: MaskedRound) -> bytes:
    return bytes.fromhex(digest(round))


@lru_cache(maxsize=64)
def _parameters(round: MaskedRound, enrolled: int) -> Parameters:
    leaving = max(0, enrolled - round.least_survivors)
    return parameters.find(
        enrolled,
        corrupt=min((round._corrupt + 1e-6) / enrolled, 1 - 1e-6),
        dropout=(leaving + 1e-6) / enrolled,
        mode=round.mode,
        security_bits=round.security_bits,
        any_dropouts=round.mode == "semi_malicious",
    )

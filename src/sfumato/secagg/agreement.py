"""What all devices of a masked round must have in common, and the keys that follow from it.

Everything that shapes a round is in `MaskedRound`, and its digest salts every key. Devices that
were told different things derive different masks, which then do not cancel: what a collector gets
for lying is noise, not somebody's table.

    pair key   HKDF-SHA256(X25519(own mask key, neighbour's), salt = digest, "mask" + both + root)
    self key   HKDF-SHA256(seed, salt = digest, "self" + root)
    box key    HKDF-SHA256(X25519(own box key, neighbour's), salt = digest, "box" + root)

A mask is the AES-128-CTR stream of 16 bytes of key and 12 of counter start, both from HKDF. `root`
is the hash of all enrolled keys.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sfumato.errors import MismatchError
from sfumato.secagg import parameters
from sfumato.secagg.parameters import Mode, Parameters
from sfumato.spec import digest, require, spec

Words = npt.NDArray[np.unsignedinteger]

KEY_BYTES = 32
SIGNATURE_BYTES = 64
KEYS_BYTES = 4 + 3 * KEY_BYTES + SIGNATURE_BYTES
LANES = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))


@spec("masked_round")
class MaskedRound:
    """One secure sum: of what, over whom, and what is assumed of them."""

    task: str  # whose tables are added
    cells: int
    modulus_bits: int
    cohort: int  # devices invited; members are 0 .. cohort − 1 of the roster
    corrupt: float  # share of them that may work with the collector
    dropout: float  # share that may vanish
    mode: Mode
    nonce: str  # no two rounds have the same
    security_bits: int = 80  # 40, and 40 more for a collector that tries graphs (see `root_of`)

    def check(self) -> None:
        require(self.cells >= 1, f"cells must be at least 1; got {self.cells}")
        require(
            2 <= self.modulus_bits <= 64, f"modulus_bits must be 2 to 64; got {self.modulus_bits}"
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
            self.security_bits >= 40, f"security_bits must be at least 40; got {self.security_bits}"
        )

    @property
    def salt(self) -> bytes:
        return _salt(self)

    @property
    def least_survivors(self) -> int:
        """Devices below which a phase is not closed and nothing is opened."""
        return math.ceil((1 - self.dropout) * self.cohort - 1e-9)

    def parameters(self, enrolled: int) -> Parameters:
        """Neighbours and threshold for as many devices; every device works them out itself.

        All corrupt members of the cohort may be among them, and as many may still vanish as the
        floor allows.
        """
        corrupt = math.floor(self.corrupt * self.cohort + 1e-9)
        leaving = max(0, enrolled - self.least_survivors)
        return parameters.find(
            enrolled,
            corrupt=min((corrupt + 1e-6) / enrolled, 1 - 1e-6),
            dropout=(leaving + 1e-6) / enrolled,
            mode=self.mode,
            security_bits=self.security_bits,
        )

    @property
    def lane(self) -> type[np.unsignedinteger]:
        """The word in which cells are masked and added; what is above the modulus is cut off."""
        return next(kind for bits, kind in LANES if self.modulus_bits <= bits)


@lru_cache(maxsize=16)
def _salt(round: MaskedRound) -> bytes:
    return bytes.fromhex(digest(round))


@dataclass(frozen=True, slots=True)
class Keys:
    """What a member enrols with: two public keys and a commitment, signed by its identity.

    bytes 0–3 member, 4–35 box key, 36–67 mask key, 68–99 SHA-256 of the seed, 100–163 signature.
    """

    member: int
    box: bytes
    mask: bytes
    commitment: bytes
    signature: bytes

    def signed(self, salt: bytes) -> bytes:
        body = self.to_bytes()[:-SIGNATURE_BYTES]
        return b"sfumato/1/secagg/keys/" + salt + body

    def is_by(self, identity: bytes, salt: bytes) -> bool:
        return verified(identity, self.signature, self.signed(salt))

    def to_bytes(self) -> bytes:
        parts = (self.box, self.mask, self.commitment, self.signature)
        return self.member.to_bytes(4, "little") + b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Keys:
        if len(data) != KEYS_BYTES:
            raise MismatchError(f"enrolled keys must have {KEYS_BYTES} bytes; got {len(data)}")
        box, mask, commitment = (data[4 + k * KEY_BYTES :][:KEY_BYTES] for k in range(3))
        member = int.from_bytes(data[:4], "little")
        return cls(member, box, mask, commitment, data[-SIGNATURE_BYTES:])


def root_of(keys: dict[int, Keys]) -> bytes:
    """The hash of all that enrolled, in the order of members.

    A device cannot tell whether the root it is told is this hash, so a collector may try as many as
    it can compute, and keep the ring that it likes best.
    """
    every = hashlib.sha256(b"sfumato/1/secagg/enrolled/")
    for member in sorted(keys):
        every.update(hashlib.sha256(keys[member].to_bytes()).digest())
    return every.digest()


def ring_seed(salt: bytes, root: bytes) -> bytes:
    return hashlib.sha256(b"sfumato/1/secagg/graph/" + salt + root).digest()


def members_to_bytes(members: set[int], cohort: int) -> bytes:
    """A set of members as one bit each, member 0 in the lowest bit of the first byte."""
    flags = np.zeros(cohort, dtype=np.uint8)
    flags[sorted(members)] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def members_from_bytes(data: bytes, cohort: int) -> set[int]:
    if len(data) != -(-cohort // 8):
        raise MismatchError(f"a set of members must have {-(-cohort // 8)} bytes; got {len(data)}")
    flags = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if flags[cohort:].any():
        raise MismatchError("a set of members must not name more than the cohort")
    return set(np.flatnonzero(flags).tolist())


def verified(identity: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(identity: bytes, message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(identity).sign(message)


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """X25519; a public key of low order, which agrees with everybody, is refused."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError as problem:
        raise MismatchError("a public key must not be of low order") from problem


def derive(secret: bytes, salt: bytes, label: bytes, root: bytes, size: int) -> bytes:
    return HKDF(
        algorithm=hashes.SHA256(), length=size, salt=salt, info=b"sfumato/1/secagg/" + label + root
    ).derive(secret)


def stream_of(secret: bytes, salt: bytes, label: bytes, root: bytes) -> tuple[bytes, bytes]:
    """A mask's AES key and its first counter block."""
    made = derive(secret, salt, label, root, 28)
    return made[:16], made[16:] + bytes(4)


def bare(public: bytes) -> bytes:
    """A public key as X25519 reads it, which ignores the highest bit."""
    return public[:-1] + bytes([public[-1] & 0x7F])


def pair_label(member: int, neighbour: int) -> bytes:
    """What a pair's mask is derived under: no other pair has it, whoever copies whose key."""
    low, high = sorted((member, neighbour))
    return b"mask" + low.to_bytes(4, "little") + high.to_bytes(4, "little")


def sign_of(member: int, neighbour: int) -> int:
    """Of two neighbours the lower one adds their mask, the higher one subtracts it."""
    return 1 if member < neighbour else -1


def pack_words(words: Words, bits: int) -> bytes:
    """Words modulo 2**bits, lowest bit first, with no gaps."""
    if bits in (8, 16, 32, 64) and words.dtype.itemsize * 8 == bits:
        return words.astype(words.dtype.newbyteorder("<"), copy=False).tobytes()
    wide = words.astype("<u8").view(np.uint8).reshape(words.size, 8)
    digits = np.unpackbits(wide, axis=1, bitorder="little")[:, :bits]
    return np.packbits(digits.reshape(-1), bitorder="little").tobytes()


def unpack_words(data: bytes, cells: int, bits: int, lane: type[np.unsignedinteger]) -> Words:
    if len(data) != -(-cells * bits // 8):
        raise MismatchError(
            f"a masked table must have {-(-cells * bits // 8)} bytes; got {len(data)}"
        )
    kind = np.dtype(lane)
    if kind.itemsize * 8 == bits:
        return np.frombuffer(data, dtype=kind.newbyteorder("<")).astype(kind)
    digits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if digits[cells * bits :].any():
        raise MismatchError("the last bits of a masked table must be zero")
    wide = np.zeros((cells, 8 * kind.itemsize), dtype=np.uint8)
    wide[:, :bits] = digits[: cells * bits].reshape(cells, bits)
    packed = np.packbits(wide, axis=1, bitorder="little")
    return packed.view(kind.newbyteorder("<")).reshape(-1).astype(kind)

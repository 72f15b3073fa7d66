"""The facts that all devices of a masked round must agree on, and the keys that follow from them.

Everything that shapes a round is in `MaskedRound`, and its digest salts every key. Devices with
different facts derive different masks, which then do not cancel: a collector that lies gets noise,
not a device's table.

    box key    HKDF-SHA256(X25519(own box key, neighbour's), salt = digest, "box" + ring seed)
    pair key   HKDF-SHA256(X25519(own mask key, neighbour's), salt = digest, "mask" + both + view)
    self key   HKDF-SHA256(seed, salt = digest, "self" + view)

A mask is the AES-128-CTR stream of 16 bytes of key and 12 of counter start, both from HKDF. `root`
is the hash of all enrolled keys, and the ring seed that of the roster (the Merkle
root of all members' identities), the root and the enrolled members. `view` is the hash of these
and of the members that shared: a device that was told otherwise has other masks,
with every neighbour.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sfumato.errors import MismatchError
from sfumato.kernels import cores_allowed
from sfumato.secagg.parameters import LARGEST_COHORT
from sfumato.secagg.round import (
    COMMITMENT_BYTES,
    KEY_BYTES,
    KEYS_BYTES,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    MaskedRound,
)
from sfumato.spec import require

Words = npt.NDArray[np.unsignedinteger]
Claim = tuple[bytes, bytes, bytes]
"""Identity, signature and message: that the identity has signed the message."""

SIGNATURES_PER_CORE = 100  # fewest for another core; each takes a tenth of a millisecond
_FIELD = 2**255 - 19
_KEYS = struct.Struct(f"<I{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{SIGNATURE_BYTES}s")
_SHA256 = hashes.SHA256()
_LOW_ORDER = {
    0,
    1,
    _FIELD - 1,
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
}


@dataclass(frozen=True, slots=True)
class Keys:
    """A member's enrolment: two public keys and a commitment, signed by its identity.

    bytes 0–3 member, 4–35 box key, 36–67 mask key, 68–99 SHA-256 of the seed, 100–163 signature.
    """

    member: int
    box: bytes
    mask: bytes
    commitment: bytes
    signature: bytes

    def signed_text(self, salt: bytes) -> bytes:
        return b"sfumato/1/secagg/keys/" + salt + self.to_bytes()[:-SIGNATURE_BYTES]

    def claim(self, identity: bytes, salt: bytes) -> Claim:
        """The claim that these keys belong to this identity."""
        return identity, self.signature, self.signed_text(salt)

    def to_bytes(self) -> bytes:
        return _KEYS.pack(self.member, self.box, self.mask, self.commitment, self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> Keys:
        if len(data) != KEYS_BYTES:
            raise MismatchError(f"enrolled keys must have {KEYS_BYTES} bytes; got {len(data)}")
        return cls(*_KEYS.unpack(data))


def root_of(keys: dict[int, Keys]) -> bytes:
    """The hash of all enrolled keys, in the order of members.

    A device cannot check that the root it receives is this hash, so a collector may try as many
    roots as it can compute, and choose the most useful ring.
    """
    every = hashlib.sha256(b"sfumato/1/secagg/enrolled/")
    for member in sorted(keys):
        every.update(hashlib.sha256(keys[member].to_bytes()).digest())
    return every.digest()


def commitment(salt: bytes, owner: int, holder: int, label: bytes, share: bytes) -> bytes:
    """An owner's commitment to a share, beside the box: the holder checks it, and so does the
    collector when the share comes back. To anyone with fewer shares than the threshold the others
    are uniform, so a hash reveals nothing about them. Six bytes identify a liar, except one that
    tries 2**48 lies."""
    text = commitment_prefix(salt, owner, label) + holder.to_bytes(4, "little") + share
    return hashlib.sha256(text).digest()[:COMMITMENT_BYTES]


def commitment_prefix(salt: bytes, owner: int, label: bytes) -> bytes:
    """The beginning of an owner's commitments, the same for all holders."""
    return b"sfumato/1/secagg/share/" + label + salt + owner.to_bytes(4, "little")


def commitments(owners: Iterable[bytes], holder: int, shares: bytes) -> bytes:
    """The commitments of owners to the shares of one holder, concatenated; `owners` are their
    `commitment_prefix`. A collector needs tens of thousands."""
    name, starts = holder.to_bytes(4, "little"), range(0, len(shares), SHARE_BYTES)
    sha256 = hashlib.sha256
    return b"".join(
        [
            sha256(owner + name + shares[start : start + SHARE_BYTES]).digest()[:COMMITMENT_BYTES]
            for owner, start in zip(owners, starts, strict=True)
        ]
    )


def view_of(
    round: MaskedRound,
    roster: bytes,
    root: bytes,
    enrolled: Set[int],
    shared: Set[int],
) -> bytes:
    """The hash of all that a device was told before it masked; `roster` is a Merkle root."""
    sets = (members_to_bytes(members, round.cohort) for members in (enrolled, shared))
    return hashlib.sha256(b"sfumato/2/secagg/view/" + roster + root + b"".join(sets)).digest()


def is_connected(
    round: MaskedRound, roster: bytes, root: bytes, enrolled: Set[int], survivors: Set[int]
) -> bool:
    """Whether enough members of every half neighbourhood survive to include honest ones."""
    window = round.parameters(len(enrolled)).window
    if window == 0:
        return True
    listed = tuple(sorted(enrolled))
    ring = ring_of(round, roster, root, listed)
    places = {place for place, member in enumerate(listed) if member in survivors}
    return ring.fewest(places, ring.degree // 2) >= window


def neighbours_of(
    round: MaskedRound,
    roster: bytes,
    root: bytes,
    enrolled: Iterable[int],
    members: Iterable[int],
) -> dict[int, list[int]]:
    """The neighbours of these members among the enrolled ones, in the order of members."""
    listed = tuple(sorted(enrolled))
    ring = ring_of(round, roster, root, listed)
    return {
        member: [listed[other] for other in ring.neighbours(bisect_left(listed, member))]
        for member in members
    }


@lru_cache(maxsize=4)
def ring_of(round: MaskedRound, roster: bytes, root: bytes, listed: tuple[int, ...]) -> Ring:
    # The set is hashed as well: otherwise a collector could choose it so that certain members are
    # next to each other, in an order that it knows.
    members = members_to_bytes(set(listed), round.cohort)
    degree = round.parameters(len(listed)).neighbours
    return Ring.draw(ring_seed(round, roster, root, members), len(listed), degree=degree)


def ring_seed(round: MaskedRound, roster: bytes, root: bytes, enrolled: bytes) -> bytes:
    """The hash from which the ring follows; `roster` is a Merkle root, and `enrolled` has a bit for
    each member. Boxes are sealed for it: only devices on the same ring hold shares of each other's
    secrets. (Without the roster, a collector would know the ring, and give corrupt identities the
    places around a victim.)"""
    text = b"sfumato/2/secagg/graph/" + round.salt + roster + root + enrolled
    return hashlib.sha256(text).digest()


def committee_of(
    round: MaskedRound, roster: bytes, root: bytes, enrolled: Set[int]
) -> frozenset[int]:
    """The members that sign the survivors for all: the first on the ring, as many as a device has
    neighbours."""
    listed = tuple(sorted(enrolled))
    ring = ring_of(round, roster, root, listed)
    return frozenset(listed[place] for place in ring.order[: ring.degree])


def members_to_bytes(members: Set[int], cohort: int) -> bytes:
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


def acknowledgement_text(salt: bytes, view: bytes, survivors: bytes) -> bytes:
    """The text that a device signs to acknowledge the survivors."""
    return b"sfumato/1/secagg/survivors/" + salt + view + survivors


def verify_all(claims: Sequence[Claim]) -> list[bool]:
    """Which of these signatures are valid; many are checked on several cores."""
    cores = max(1, min(cores_allowed(), len(claims) // SIGNATURES_PER_CORE))
    if cores == 1:
        return _verify_part(claims)
    cuts = [len(claims) * part // cores for part in range(cores + 1)]
    parts = [claims[first:last] for first, last in pairwise(cuts)]
    with ThreadPoolExecutor(cores) as pool:
        return list(chain.from_iterable(pool.map(_verify_part, parts)))


def _verify_part(claims: Sequence[Claim]) -> list[bool]:
    results = []
    for identity, signature, message in claims:
        try:
            Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)
            results.append(True)
        except (InvalidSignature, ValueError):
            results.append(False)
    return results


def sign(identity: bytes, message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(identity).sign(message)


def public_identity(identity: bytes) -> bytes:
    """The public key of this private one, with which a device signs."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def public_of(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def private_key(private: bytes) -> X25519PrivateKey:
    """Loading a key takes as long as agreeing on a secret, so it is done once."""
    return X25519PrivateKey.from_private_bytes(private)


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """X25519; a public key of low order, which agrees with everybody, is refused."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as problem:
        raise MismatchError("a public key must not be of low order") from problem


def is_low_order(public: bytes) -> bool:
    """Whether a public key agrees on zero with everybody: of order 1, 2, 4 or 8 (RFC 7748)."""
    return int.from_bytes(canonical_key(public), "little") % _FIELD in _LOW_ORDER


def fingerprint(message: bytes, salt: bytes) -> bytes:
    """Distinguishes messages by all their bytes, ten times as fast as a hash (GMAC).

    Anyone with the salt can make two messages with one fingerprint: it is for finding duplicates,
    where the first message counts, and passing for one's own first message gains nothing.
    """
    return _mac(salt[:16]).encrypt(len(message).to_bytes(12, "little"), b"", message)


@lru_cache(maxsize=8)
def _mac(key: bytes) -> AESGCM:
    return AESGCM(key)


def derive(secret: bytes, salt: bytes, label: bytes, context: bytes, size: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) of `secret`; label and context are its info."""
    info = b"sfumato/1/secagg/" + label + context
    return HKDF(algorithm=_SHA256, length=size, salt=salt, info=info).derive(secret)


def stream_of(secret: bytes, salt: bytes, label: bytes, view: bytes) -> tuple[bytes, bytes]:
    """A mask's AES key and its first counter block."""
    material = derive(secret, salt, label, view, 28)
    return material[:16], material[16:] + bytes(4)


def canonical_key(public: bytes) -> bytes:
    """A public key as X25519 reads it, without the highest bit, which is ignored."""
    return public[:-1] + bytes([public[-1] & 0x7F])


def pair_label(member: int, neighbour: int) -> bytes:
    """The label from which a pair's mask is derived: unique to the pair, even if keys are
    copied."""
    low, high = sorted((member, neighbour))
    return b"mask" + low.to_bytes(4, "little") + high.to_bytes(4, "little")


def sign_of(member: int, neighbour: int) -> int:
    """The lower of two neighbours adds their mask, the higher one subtracts it."""
    return 1 if member < neighbour else -1


LABEL = b"sfumato/1/secagg/ring/"
WORD_BITS = 32
_SPARE_WORDS = 8


def permutation(seed: bytes, cohort: int) -> tuple[int, ...]:
    """The members 0 .. cohort − 1 in an order that follows from `seed`.

    >>> permutation(b"a public seed", 5)
    (3, 2, 4, 1, 0)
    """
    require.within(1, LARGEST_COHORT, cohort=cohort)
    return shuffle(stream_words(seed, cohort), cohort)


@dataclass(frozen=True, slots=True)
class Ring:
    """The graph in which each member has `degree` neighbours: half before it, half after.

    `order` is the members in the order of the ring. `degree` is even, or joins all with all.

    >>> Ring((3, 2, 4, 1, 0), degree=2).neighbours(3)
    [0, 2]
    """

    order: tuple[int, ...]
    degree: int
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cohort = len(self.order)
        require(
            sorted(self.order) == list(range(cohort)),
            f"order must hold each of 0 to {cohort - 1} once, {cohort} being its length",
        )
        require(
            1 <= self.degree < cohort and (self.degree % 2 == 0 or self.degree == cohort - 1),
            f"degree must be even and below {cohort}, or {cohort - 1}; got {self.degree}",
        )
        places = [0] * cohort
        for place, member in enumerate(self.order):
            places[member] = place
        object.__setattr__(self, "_places", tuple(places))  # the class is frozen

    @classmethod
    def draw(cls, seed: bytes, cohort: int, *, degree: int) -> Ring:
        """The ring of a public seed."""
        return cls(permutation(seed, cohort), degree)

    def neighbours(self, member: int) -> list[int]:
        """The neighbours of this member, in ascending order."""
        cohort = len(self.order)
        require(0 <= member < cohort, f"member must be 0 to {cohort - 1}; got {member}")
        if self.degree == cohort - 1:
            return [other for other in range(cohort) if other != member]
        place, reach = self._places[member], self.degree // 2
        steps = (*range(-reach, 0), *range(1, reach + 1))
        return sorted(self.order[(place + step) % cohort] for step in steps)

    def fewest(self, members: Set[int], run: int) -> int:
        """The fewest of these members among `run` in a row, anywhere on the ring.

        >>> Ring((3, 2, 4, 1, 0), degree=2).fewest({3, 2, 1}, 2)
        1
        """
        flags = np.isin(self.order, np.fromiter(members, dtype=np.int64))
        sums = np.cumsum(np.r_[0, flags, flags[:run]])
        return int((sums[run : run + flags.size] - sums[: flags.size]).min())


def shuffle(words: Iterator[int], cohort: int, word_bits: int = WORD_BITS) -> tuple[int, ...]:
    """`word_bits` is 32; tests make it small, to enumerate every sequence of words."""
    order, span = list(range(cohort)), 1 << word_bits
    for place in range(cohort - 1, 0, -1):
        limit = span - span % (place + 1)
        while (word := next(words)) >= limit:
            pass
        other = word % (place + 1)
        order[place], order[other] = order[other], order[place]
    return tuple(order)


def stream_words(seed: bytes, cohort: int) -> Iterator[int]:
    """An endless stream of words; those that a cohort needs are computed in one piece."""
    stream, count, start = hashlib.shake_128(LABEL + seed), cohort + _SPARE_WORDS, 0
    while True:
        words = struct.unpack(f"<{count}I", stream.digest(4 * count))
        yield from words[start:]
        count, start = 2 * count, count

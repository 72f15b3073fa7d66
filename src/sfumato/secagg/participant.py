"""A device's side of a masked round: pure steps over bytes.

    enrol() ─▶ share(roster) ─▶ mask(boxes, table) ─▶ [acknowledge(survivors)] ─▶ unmask(survivors)

Every step checks its input before it answers, and refuses by raising: a roster below the round's
floor, neighbours other than those of the ring, keys that no enrolled identity signed for this
round, boxes that do not open, a set of survivors below the floor or other than the first one that
it answered. A refused step changes nothing. Steps can be repeated: the same message gives the same
answer, byte for byte, also from a state that was saved and loaded (`to_json`, `from_json`).

Claim: the collector learns the sum over the survivors and nothing else, except with the probability
    that was given to `parameters.find`, if at most `corrupt` of the cohort work with it. In
    "semi_honest" rounds it and they follow the protocol; in "semi_malicious" ones they may send
    anything, and it may claim that any device dropped out.
Proof: docs/proofs/secure_aggregation.md. Nobody outside the project has checked it.
Assumes: the members of the roster are different devices; a device joins a round once, and as many
    rounds of a campaign as its promise allows for; the state is saved before every answer is sent
    and never restored from an older copy; the round is the task's (`contribute.join_round` checks).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sfumato.errors import MismatchError, SpecError
from sfumato.kernels import masks
from sfumato.kernels.packed import pack_words
from sfumato.privacy.samplers import Rng
from sfumato.secagg.agreement import (
    Claim,
    Keys,
    Words,
    acknowledgement_text,
    agree,
    canonical_key,
    commitment,
    committee_of,
    derive,
    fingerprint,
    is_connected,
    members_from_bytes,
    members_to_bytes,
    neighbours_of,
    pair_label,
    private_key,
    public_identity,
    public_of,
    ring_seed,
    sign,
    sign_of,
    stream_of,
    verify_all,
    view_of,
)
from sfumato.secagg.merkle import HASH_BYTES, root_from
from sfumato.secagg.round import (
    ACKNOWLEDGEMENT_BYTES,
    BOX_BYTES,
    KEY_BYTES,
    NEIGHBOUR_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    MaskedRound,
)
from sfumato.secagg.sharing import are_shares, split_many
from sfumato.spec import from_json, to_json

VERSION = 2
_PART = 1 << 16  # cells that fit in the cache


@dataclass(slots=True, repr=False)
class Participant:
    """One device in one round. It holds secrets: keep it on the device."""

    round: MaskedRound
    member: int
    identity: bytes  # Ed25519 private key
    roster: bytes  # Merkle root of the members' Ed25519 public keys, from the invitation
    box_key: bytes
    mask_key: bytes
    seed: bytes
    sharing_seed: bytes  # randomness of the shares, so that they can be made again
    root: bytes = b""
    enrolled_bits: bytes = b""  # one bit per member: a set of integers takes 500 times as much
    neighbours: dict[int, Keys] = field(default_factory=dict)
    view: bytes = b""  # hash of all that it was told before it masked
    shared_bits: bytes = b""
    neighbour_shares: dict[int, bytes] = field(
        default_factory=dict
    )  # shares of neighbours, seed and key
    masked: bytes = b""  # fingerprint of the masked table
    survivors: bytes = b""  # the only set that it answers
    _ciphers: dict[int, ChaCha20Poly1305] = field(default_factory=dict)  # not part of the state
    _own: dict[bytes, X25519PrivateKey] = field(default_factory=dict)  # not part of the state

    @classmethod
    def join(
        cls,
        round: MaskedRound,
        member: int,
        identity: bytes,
        roster: bytes,
        *,
        rng: Rng,
    ) -> Participant:
        """Take part in a round, with fresh secrets. `roster` is the root of the Merkle tree over
        the identities of all members; `share` checks that it has this device's."""
        if len(roster) != HASH_BYTES or not 0 <= member < round.cohort:
            raise SpecError(
                f"a participant needs a roster of {HASH_BYTES} bytes and a member below "
                f"{round.cohort}; got {len(roster)} bytes and {member}"
            )
        box_key, mask_key, seed, sharing_seed = (rng.words(4).tobytes() for _ in range(4))
        return cls(round, member, identity, roster, box_key, mask_key, seed, sharing_seed)

    def enrol(self) -> bytes:
        """Public keys and the commitment to the seed, signed."""
        self._check_secrets()
        keys = Keys(
            self.member,
            public_of(self._key(self.box_key)),
            public_of(self._key(self.mask_key)),
            hashlib.sha256(self.seed).digest(),
            bytes(64),
        )
        signature = sign(self.identity, keys.signed_text(self.round.salt))
        return Keys(keys.member, keys.box, keys.mask, keys.commitment, signature).to_bytes()

    def share(self, roster: bytes) -> bytes:
        """Boxes for the neighbours, each with a share of the seed and of the mask key.

        `roster`: the set of enrolled members, the root, the neighbours' identities and keys, and a
        proof that this device and they are on the round's roster.
        """
        self._check_secrets()
        enrolled, root, keys = self._read_roster(roster)
        facts = (root, self._bits(enrolled), keys)
        if self.root and (self.root, self.enrolled_bits, self.neighbours) != facts:
            raise MismatchError("this device has answered another roster of this round")
        threshold = self.round.parameters(len(enrolled)).threshold
        members = sorted(keys)
        seed = ring_seed(self.round, self.roster, root, facts[1])
        shares = split_many(
            [self.seed, self.mask_key],
            threshold=threshold,
            points=[1 + member for member in members],
            rng=_SharingRng(self.sharing_seed + seed),  # shares on two rings must not add up
        )
        self._ciphers = self._box_ciphers(keys, seed)
        context = self.round.salt + seed
        boxes = []
        for member, text in zip(members, shares, strict=True):
            sealed = self._ciphers[member].encrypt(box_nonce(self.member, member), text, context)
            boxes.append(sealed + self.share_commitments(self.member, member, text))
        self.root, self.enrolled_bits, self.neighbours = facts
        return b"".join(boxes)

    def mask(self, boxes: bytes, table: npt.NDArray[np.integer]) -> bytes:
        """The masked table, packed.

        `boxes`: the set of members that shared, then member and box of each neighbour among them.
        """
        self._check_secrets()
        if not self.root:
            raise SpecError("a device masks after it has shared")
        if table.shape != (self.round.cells,):
            raise SpecError(f"the table must have {self.round.cells} cells; got {table.shape}")
        modulus = self.round.modulus
        shared, shares = self.open_boxes(boxes)
        view = view_of(self.round, self.roster, self.root, self.enrolled, shared)
        total = self._residues(table)
        streams = [stream_of(self.seed, self.round.salt, b"self", view)]
        signs = [1]
        own, salt = self._key(self.mask_key), self.round.salt
        for member in sorted(shares):
            secret = agree(own, self.neighbours[member].mask)
            label = pair_label(self.member, member)
            streams.append(stream_of(secret, salt, label, view))
            signs.append(sign_of(self.member, member))
        masks.add_streams(total, streams, signs, modulus=modulus if self.round.prime else None)
        message = pack_words(total, self.round.modulus_bits)
        digest = fingerprint(message, self.sharing_seed)  # this seed is never revealed
        if self.masked and (
            self.masked != digest or self.neighbour_shares != shares or self.view != view
        ):
            raise MismatchError("this device has masked another table, or for other neighbours")
        self.masked, self.neighbour_shares, self.view = digest, shares, view
        self.shared_bits, self._ciphers = self._bits(shared), {}
        return message

    def acknowledge(self, survivors: bytes) -> bytes:
        """Sign the set of survivors, so that devices of "semi_malicious" rounds can compare it."""
        self.check_survivors(survivors)
        self.survivors = survivors
        return sign(self.identity, acknowledgement_text(self.round.salt, self.view, survivors))

    def unmask(self, survivors: bytes, acknowledgements: bytes = b"") -> bytes:
        """For each neighbour that shared, in the order of members: a share of its seed if it
        survived, of its mask key if not. Never both.

        `acknowledgements`, in "semi_malicious" rounds: members, identities and signatures of a
        quorum, and a proof that they are on the round's roster.
        """
        alive = self.check_survivors(survivors)
        if self.round.mode == "semi_malicious":
            self.check_acknowledgements(survivors, acknowledgements)
        self.survivors = survivors
        answer = b""
        for member in sorted(self.neighbour_shares):
            seed, key = (
                self.neighbour_shares[member][:SHARE_BYTES],
                self.neighbour_shares[member][SHARE_BYTES:],
            )
            answer += seed if member in alive else key
        return answer

    def forget_table(self) -> None:
        """The masked table has arrived: delete everything that could remove its masks, or confirm a
        guess of the table. Enrolling, sharing and masking are refused from now on; acknowledging
        and unmasking work as before."""
        self.box_key = self.mask_key = self.seed = self.sharing_seed = bytes(KEY_BYTES)
        self._own.clear()

    def _check_secrets(self) -> None:
        """Zeros in their place would be keys and seeds that everybody knows."""
        if self.mask_key == bytes(KEY_BYTES):
            raise SpecError(
                "this device has forgotten its secrets of this round, as its table has arrived, so "
                "it cannot enrol, share or mask in it again; let it take part in another round"
            )

    def to_json(self) -> str:
        """The whole state, secrets included; store it where only this device can read it."""
        data = {
            "version": VERSION,
            "round": to_json(self.round),
            "member": self.member,
            "roster": self.roster.hex(),
            "neighbours": [self.neighbours[m].to_bytes().hex() for m in sorted(self.neighbours)],
            "held": {
                str(member): share.hex() for member, share in sorted(self.neighbour_shares.items())
            },
        }
        return json.dumps(data | {name: getattr(self, name).hex() for name in _SECRETS})

    @classmethod
    def from_json(cls, text: str) -> Participant:
        try:
            data: dict[str, Any] = json.loads(text)
            if data.get("version") != VERSION:
                raise SpecError(f"a participant's state must be of version {VERSION}")
            return cls._from_state(data)
        except (ValueError, LookupError, TypeError, AttributeError):
            # Not from the problem itself, which would show the state and its secrets.
            raise SpecError("this is not the state of a participant, or it is damaged") from None

    @classmethod
    def _from_state(cls, data: dict[str, Any]) -> Participant:
        secrets = {name: bytes.fromhex(data[name]) for name in _SECRETS}
        for name, size in _SIZES.items():
            if len(secrets[name]) not in size:
                raise SpecError("this is not the state of a participant, or it is damaged")
        keys = [Keys.from_bytes(bytes.fromhex(text)) for text in data["neighbours"]]
        return cls(
            round=from_json(data["round"]),
            member=data["member"],
            roster=bytes.fromhex(data["roster"]),
            neighbours={key.member: key for key in keys},
            neighbour_shares={int(m): bytes.fromhex(share) for m, share in data["held"].items()},
            identity=secrets["identity"],
            box_key=secrets["box_key"],
            mask_key=secrets["mask_key"],
            seed=secrets["seed"],
            sharing_seed=secrets["sharing_seed"],
            root=secrets["root"],
            view=secrets["view"],
            enrolled_bits=secrets["enrolled_bits"],
            shared_bits=secrets["shared_bits"],
            masked=secrets["masked"],
            survivors=secrets["survivors"],
        )

    @property
    def enrolled(self) -> set[int]:
        return members_from_bytes(self.enrolled_bits, self.round.cohort)

    @property
    def shared(self) -> set[int]:
        return members_from_bytes(self.shared_bits, self.round.cohort)

    def _bits(self, members: set[int]) -> bytes:
        return members_to_bytes(members, self.round.cohort)

    def __repr__(self) -> str:  # never a secret
        return f"Participant(member={self.member}, round={self.round.task[:8]}…)"

    @property
    def _threshold(self) -> int:
        enrolled = int.from_bytes(self.enrolled_bits, "little").bit_count()
        return self.round.parameters(enrolled).threshold

    def _residues(self, table: npt.NDArray[np.integer]) -> Words:
        """The table modulo the round's modulus, part by part, so that it is read once."""
        total = np.empty(table.size, dtype=self.round.lane)
        modulus = self.round.modulus
        for start in range(0, table.size, _PART):
            part = table[start : start + _PART]
            if not (-modulus <= 2 * int(part.min()) and int(part.max()) < modulus):
                raise SpecError(
                    f"cells must fit {self.round.modulus_bits} bits; the sum would wrap"
                )
            if self.round.prime:
                part = part.astype(np.int64) % modulus
            total[start : start + _PART] = part.astype(np.int64, copy=False).view(np.uint64)
        return total

    def share_commitments(self, owner: int, holder: int, shares: bytes) -> bytes:
        seed, key, salt = shares[:SHARE_BYTES], shares[SHARE_BYTES:], self.round.salt
        return commitment(salt, owner, holder, b"seed", seed) + commitment(
            salt, owner, holder, b"key", key
        )

    def _key(self, private: bytes) -> X25519PrivateKey:
        if private not in self._own:
            self._own[private] = private_key(private)
        return self._own[private]

    def _box_ciphers(self, keys: dict[int, Keys], ring: bytes) -> dict[int, ChaCha20Poly1305]:
        """The ciphers of the boxes to and from these neighbours."""
        own, salt = self._key(self.box_key), self.round.salt
        return {
            member: ChaCha20Poly1305(derive(agree(own, key.box), salt, b"box", ring, KEY_BYTES))
            for member, key in keys.items()
        }

    def _read_roster(self, roster: bytes) -> tuple[set[int], bytes, dict[int, Keys]]:
        size = -(-self.round.cohort // 8)
        if len(roster) < size + KEY_BYTES:
            raise MismatchError("a roster must begin with a set of members and a root")
        enrolled = members_from_bytes(roster[:size], self.round.cohort)
        root, rest = roster[size : size + KEY_BYTES], roster[size + KEY_BYTES :]
        if self.member not in enrolled:
            raise MismatchError("the roster does not list this device")
        if len(enrolled) < self.round.least_survivors:
            raise MismatchError(
                f"at least {self.round.least_survivors} devices must have enrolled; "
                f"got {len(enrolled)}"
            )
        expected = neighbours_of(self.round, self.roster, root, enrolled, [self.member])[
            self.member
        ]
        end = len(expected) * NEIGHBOUR_BYTES
        starts = range(0, min(end, len(rest) - NEIGHBOUR_BYTES + 1), NEIGHBOUR_BYTES)
        entries = [rest[start : start + NEIGHBOUR_BYTES] for start in starts]
        neighbours = [Keys.from_bytes(entry[KEY_BYTES:]) for entry in entries]
        if [keys.member for keys in neighbours] != expected:
            raise MismatchError("the neighbours must be those of the ring")
        identities = {
            keys.member: entry[:KEY_BYTES] for keys, entry in zip(neighbours, entries, strict=True)
        }
        self._check_listed(identities | {self.member: public_identity(self.identity)}, rest[end:])
        signed = verify_all(
            [keys.claim(identities[keys.member], self.round.salt) for keys in neighbours]
        )
        for keys, good in zip(neighbours, signed, strict=True):
            if not good:
                raise MismatchError(f"member {keys.member}'s keys must be signed for this round")
        own = public_of(self._key(self.mask_key))
        if (
            len({canonical_key(keys.mask) for keys in neighbours} | {canonical_key(own)})
            != len(neighbours) + 1
        ):
            raise MismatchError("no two devices may have the same mask key")
        return enrolled, root, {keys.member: keys for keys in neighbours}

    def open_boxes(self, boxes: bytes) -> tuple[set[int], dict[int, bytes]]:
        size = -(-self.round.cohort // 8)
        shared, boxes = members_from_bytes(boxes[:size], self.round.cohort), boxes[size:]
        if len(boxes) % (4 + BOX_BYTES):
            raise MismatchError("boxes must be whole")
        if self.member not in shared or not shared <= self.enrolled:
            raise MismatchError("those that shared must have enrolled, this device among them")
        if len(shared) < self.round.least_survivors:
            raise MismatchError(
                f"at least {self.round.least_survivors} devices must have shared; got {len(shared)}"
            )
        shares: dict[int, bytes] = {}
        seed = ring_seed(self.round, self.roster, self.root, self.enrolled_bits)
        self._ciphers = self._ciphers or self._box_ciphers(self.neighbours, seed)
        context = self.round.salt + seed
        for start in range(0, len(boxes), 4 + BOX_BYTES):
            member = int.from_bytes(boxes[start : start + 4], "little")
            if member not in self.neighbours or member in shares:
                raise MismatchError(f"a box of member {member} was not expected")
            box = boxes[start + 4 : start + 4 + BOX_BYTES]
            sealed, expected = box[:SEALED_BYTES], box[SEALED_BYTES:]
            nonce = box_nonce(member, self.member)
            try:
                shares[member] = self._ciphers[member].decrypt(nonce, sealed, context)
            except InvalidTag as problem:
                raise MismatchError(f"the box of member {member} does not open") from problem
            if self.share_commitments(member, self.member, shares[member]) != expected:
                raise MismatchError(f"the box of member {member} does not match its commitments")
        if not are_shares(b"".join(shares.values())):
            wrong = next(member for member, text in shares.items() if not are_shares(text))
            raise MismatchError(f"the box of member {wrong} does not hold shares")
        threshold = self._threshold
        if len(shares) < threshold:
            raise MismatchError(
                f"at least {threshold} neighbours must have shared; got {len(shares)}"
            )
        if shares.keys() != shared & self.neighbours.keys():
            raise MismatchError("there must be a box of every neighbour that shared, and no other")
        return shared, shares

    def check_survivors(self, survivors: bytes) -> set[int]:
        if not self.masked:
            raise SpecError("a device unmasks after it has masked")
        if self.survivors and survivors != self.survivors:
            raise MismatchError("this device has answered another set of survivors of this round")
        alive = members_from_bytes(survivors, self.round.cohort)
        if not alive <= self.shared:
            raise MismatchError("survivors must have shared")
        if self.member not in alive:  # a device reported as dropped must not help
            raise MismatchError("this device has masked its table and must be among the survivors")
        threshold = self._threshold
        if len(alive & self.neighbour_shares.keys()) < threshold:
            raise MismatchError(f"at least {threshold} neighbours must survive")
        if len(alive) < self.round.least_survivors:
            raise MismatchError(
                f"at least {self.round.least_survivors} devices must survive; got {len(alive)}"
            )
        if not is_connected(self.round, self.roster, self.root, self.enrolled, alive):
            raise MismatchError(
                "too many next to each other on the ring are reported as dropped out"
            )
        return alive

    def check_acknowledgements(self, survivors: bytes, acknowledgements: bytes) -> None:
        enrolled = self.enrolled
        quorum = self.round.quorum(len(enrolled))
        end = quorum * ACKNOWLEDGEMENT_BYTES
        if len(acknowledgements) < end:
            raise MismatchError(f"{quorum} devices must have signed these survivors")
        text = acknowledgement_text(self.round.salt, self.view, survivors)
        claims: dict[int, Claim] = {}
        for start in range(0, end, ACKNOWLEDGEMENT_BYTES):
            one = acknowledgements[start : start + ACKNOWLEDGEMENT_BYTES]
            member, signature = int.from_bytes(one[:4], "little"), one[4 + KEY_BYTES :]
            claims[member] = (one[4 : 4 + KEY_BYTES], signature, text)
        if len(claims) < quorum:
            raise MismatchError(f"{quorum} different devices must have signed")
        if not claims.keys() <= committee_of(self.round, self.roster, self.root, enrolled):
            raise MismatchError("those that signed must be in the committee")
        identities = {member: identity for member, (identity, _, _) in claims.items()}
        self._check_listed(identities, acknowledgements[end:])
        good = sum(verify_all(list(claims.values())))
        if good < quorum:
            raise MismatchError(f"{quorum} devices must have signed these survivors; got {good}")

    def _check_listed(self, identities: Mapping[int, bytes], proof: bytes) -> None:
        """Raise MismatchError unless the roster has these identities for these members."""
        if root_from(identities, proof, count=self.round.cohort) != self.roster:
            raise MismatchError(
                "the roster must list this device and every other under the key that was shown"
            )


class _SharingRng:
    """Words that follow from a secret seed, so that a device can make the same shares again."""

    def __init__(self, seed: bytes) -> None:
        self._text, self._draws = b"sfumato/1/secagg/shares/" + seed, 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        self._draws += 1
        stream = hashlib.shake_256(self._text + self._draws.to_bytes(4, "little"))
        return np.frombuffer(stream.digest(8 * count), dtype="<u8").astype(np.uint64)


_SECRETS = (
    "identity",
    "box_key",
    "mask_key",
    "seed",
    "sharing_seed",
    "root",
    "view",
    "enrolled_bits",
    "shared_bits",
    "masked",
    "survivors",
)


_SIZES = {
    **dict.fromkeys(("identity", "box_key", "mask_key", "seed", "sharing_seed"), (KEY_BYTES,)),
    **dict.fromkeys(("root", "view"), (0, KEY_BYTES)),
}


def box_nonce(source: int, target: int) -> bytes:
    return source.to_bytes(6, "little") + target.to_bytes(6, "little")

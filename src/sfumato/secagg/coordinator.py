"""The collector's side of a masked round: it adds tables that it cannot read.

    ENROL ─close─▶ SHARE ─close─▶ MASK ─close─▶ [ACK ─close─▶] UNMASK ─finish─▶ DONE
    and ABORTED from any of them; ACK only in "semi_malicious" rounds

Messages are admitted with `add`, which returns a `Refusal` or None and never raises for a bad
message; a repeated message counts once. Closing a phase below its floor aborts the round. Masked
tables are added as they arrive and not kept.

The state can be saved after every step (`to_bytes`, `from_bytes`), the sum so far and its members
together: save it before acknowledging a message and before announcing the outcome of a phase, and
a collector that crashes continues where it was. Restored from an older copy it asks again for the
messages it has lost, gets the same bytes, and adds each table once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import ImpossibleError, MismatchError, SpecError
from sfumato.kernels import masks
from sfumato.kernels.packed import add_packed, check_packed, unpack_words
from sfumato.secagg.agreement import (
    Keys,
    Words,
    acknowledgement_text,
    agree,
    canonical_key,
    commitment_prefix,
    commitments,
    committee_of,
    fingerprint,
    is_low_order,
    members_from_bytes,
    members_to_bytes,
    neighbours_of,
    pair_label,
    private_key,
    public_of,
    root_of,
    sign_of,
    stream_of,
    verify_all,
    view_of,
)
from sfumato.secagg.merkle import Tree
from sfumato.secagg.round import (
    BOX_BYTES,
    COMMITMENT_BYTES,
    KEYS_BYTES,
    SHARE_BYTES,
    MaskedRound,
)
from sfumato.secagg.sharing import are_shares, join_many
from sfumato.spec import from_json, to_json

VERSION = 2
_ADDRESSED = 4 + BOX_BYTES  # a box after its source


class Phase(StrEnum):
    ENROL = "enrol"
    SHARE = "share"
    MASK = "mask"
    ACK = "ack"
    UNMASK = "unmask"
    DONE = "done"
    ABORTED = "aborted"


class Refusal(StrEnum):
    """Why a message was not accepted."""

    UNKNOWN = "unknown"  # no such member, or it has no part in this phase
    LATE = "late"  # the phase is over, or has not begun
    MALFORMED = "malformed"  # not the bytes of this phase's message
    UNSIGNED = "unsigned"  # keys or survivors that this member did not sign for this round
    COPIED = "copied"  # another member's mask key
    FALSE = "false"  # a share other than the one it received
    EQUIVOCATING = "equivocating"  # differs from the message it sent before


@dataclass(slots=True, repr=False)
class Coordinator:
    """The collector's state of one round."""

    round: MaskedRound
    roster: tuple[bytes, ...]  # Ed25519 public keys of the members
    phase: Phase = Phase.ENROL
    keys: dict[int, Keys] = field(default_factory=dict)
    root: bytes = b""
    view: bytes = b""  # hash of all that devices are told before they mask
    neighbours: dict[int, list[int]] = field(default_factory=dict)
    boxes: dict[int, bytes] = field(default_factory=dict)  # by source, in the order of neighbours
    survivors: set[int] = field(default_factory=set)
    acknowledgements: dict[int, bytes] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)  # by source, for those that shared
    liars: set[int] = field(default_factory=set)  # members with wrong shares or a wrong secret
    total_words: Words = field(init=False)
    fingerprints: dict[tuple[Phase, int], bytes] = field(default_factory=dict)
    _tree: Tree = field(init=False)  # over the roster
    _mask_keys: set[bytes] = field(default_factory=set)
    _key_bytes: dict[int, bytes] = field(default_factory=dict)
    _sets: dict[tuple[Phase, int], bytes] = field(default_factory=dict)  # as they are sent
    _tables: list[bytes] = field(default_factory=list)  # to be added, within `add_all`
    _signers: set[int] = field(default_factory=set)  # of messages, within `add_all`
    _addressed: dict[int, bytes] = field(default_factory=dict)  # boxes by receiver
    _commitment_prefixes: dict[int, bytes] = field(default_factory=dict)  # by owner, in UNMASK

    def __post_init__(self) -> None:
        if len(self.roster) != self.round.cohort:
            raise SpecError(f"the roster must list {self.round.cohort} members")
        self._tree = Tree(self.roster)
        self.total_words = np.zeros(self.round.cells, dtype=self.round.lane)

    def add(self, phase: Phase, member: int, message: bytes) -> Refusal | None:
        """Accept a member's message of a phase, or say why not."""
        return self.add_all(phase, {member: message})[member]

    def add_all(self, phase: Phase, messages: Mapping[int, bytes]) -> dict[int, Refusal | None]:
        """Accept messages of a phase by member; tables are added together, which is faster."""
        takes = {
            Phase.ENROL: self._enrol,
            Phase.SHARE: self._share,
            Phase.MASK: self._mask,
            Phase.ACK: self._acknowledge,
            Phase.UNMASK: self._unmask,
        }
        take, salt = takes.get(phase, _too_late), self.round.salt
        self._signers = self._signers_of(phase, messages)
        refusals: dict[int, Refusal | None] = {}
        for member, message in messages.items():
            if not 0 <= member < self.round.cohort:
                refusals[member] = Refusal.UNKNOWN
                continue
            digest = fingerprint(message, salt)
            before = self.fingerprints.get((phase, member))
            if before is not None:
                refusals[member] = None if before == digest else Refusal.EQUIVOCATING
                continue
            refusals[member] = take(member, message) if phase is self.phase else Refusal.LATE
            if refusals[member] is None:
                self.fingerprints[phase, member] = digest
        if self._tables:
            add_packed(self.total_words, self._tables, self.round.modulus_bits)
            self._tables.clear()
        return refusals

    def close(self) -> Phase:
        """End the phase; return the next one, or ABORTED if too few answered."""
        least = self.round.least_survivors
        counts = {
            Phase.ENROL: (len(self.keys), least),
            Phase.SHARE: (len(self.boxes), least),
            Phase.MASK: (len(self.survivors), least),
            Phase.ACK: (len(self._signed()), self._quorum),
        }
        if self.phase not in counts:
            raise SpecError(f"the phase {self.phase} cannot be closed")
        count, floor = counts[self.phase]
        if count < floor:
            self.phase = Phase.ABORTED
            return self.phase
        if self.phase is Phase.ENROL:
            self.root = root_of(self.keys)
            self.neighbours = neighbours_of(
                self.round, self.roster_root, self.root, self.keys, self.keys
            )
        elif self.phase is Phase.SHARE:
            self.view = view_of(
                self.round, self.roster_root, self.root, self.keys.keys(), self.boxes.keys()
            )
        self.phase = {
            Phase.ENROL: Phase.SHARE,
            Phase.SHARE: Phase.MASK,
            Phase.MASK: Phase.ACK if self.round.mode == "semi_malicious" else Phase.UNMASK,
            Phase.ACK: Phase.UNMASK,
        }[self.phase]
        return self.phase

    @property
    def roster_root(self) -> bytes:
        """The Merkle root of the roster, with which devices join."""
        return self._tree.root

    def roster_for(self, member: int) -> bytes:
        """The enrolled members, the root, identity and keys of each of this member's neighbours,
        and a proof that they and this member are on the roster."""
        others = self.neighbours[member]
        keys = b"".join([self.roster[other] + self._key_bytes[other] for other in others])
        return self._set_of(self.keys) + self.root + keys + self._tree.proof([member, *others])

    def boxes_for(self, member: int) -> bytes:
        """The members that shared, and the boxes of neighbours for this member."""
        return self._set_of(self.boxes) + self._addressed_to(member)

    def survivor_set(self) -> bytes:
        """The members whose tables are in the sum, once the phase MASK is over."""
        if self.phase not in (Phase.ACK, Phase.UNMASK, Phase.DONE):
            raise SpecError("the survivors are known when masking is over")
        return self._set_of(self.survivors)

    def signatures(self) -> bytes:
        """Member, identity and signature of each device of a quorum, and a proof that they are on
        the roster; the same for all receivers."""
        signers = self._signed()[: self._quorum]
        signed = [
            member.to_bytes(4, "little") + self.roster[member] + self.acknowledgements[member]
            for member in signers
        ]
        return b"".join(signed) + self._tree.proof(signers)

    def _signed(self) -> list[int]:
        """The members of the committee that have acknowledged the survivors."""
        if not self.acknowledgements:
            return []
        members = committee_of(self.round, self.roster_root, self.root, self.keys.keys())
        return sorted(members & self.acknowledgements.keys())

    @property
    def _quorum(self) -> int:
        return self.round.quorum(len(self.keys))

    def finish(self) -> Words:
        """The sum over the survivors as residues of the modulus, without masks.

        Secrets are checked against their commitments: a member that shared another one is in
        `liars`, and the round is over. (Members that sent a wrong share are there already.) Called
        again, it returns the same.
        """
        if self.phase is Phase.DONE:
            return self.total_words
        if self.phase is not Phase.UNMASK:
            raise SpecError(f"a round is finished after unmasking; it is in {self.phase}")
        try:
            streams, signs = self._masks_left()
        except (ImpossibleError, MismatchError):
            self.phase = Phase.ABORTED
            raise
        modulus = self.round.modulus if self.round.prime else None
        masks.add_streams(self.total_words, streams, [-sign for sign in signs], modulus=modulus)
        if modulus is None and 8 * self.total_words.itemsize > self.round.modulus_bits:
            self.total_words &= self.round.lane(self.round.modulus - 1)
        self.phase = Phase.DONE
        return self.total_words

    def checkpoint(self) -> bytes:
        """The survivors and the sum so far, which `restore` needs beside the messages of the
        earlier phases, if tables were not kept."""
        total = self.total_words.astype(self.total_words.dtype.newbyteorder("<"), copy=False)
        return members_to_bytes(self.survivors, self.round.cohort) + total.tobytes()

    def restore(self, checkpoint: bytes) -> None:
        """Continue the phase MASK with a sum that `checkpoint` wrote."""
        size = -(-self.round.cohort // 8)
        if self.phase is not Phase.MASK or len(checkpoint) != size + self.total_words.nbytes:
            raise SpecError("a sum must be restored in the phase mask of its own round")
        survivors = members_from_bytes(checkpoint[:size], self.round.cohort)
        if not survivors <= self.boxes.keys():
            raise SpecError("a sum must be of devices that have shared")
        total = np.frombuffer(checkpoint[size:], dtype=self.total_words.dtype.newbyteorder("<"))
        self.total_words[:] = total
        self.survivors = survivors

    def to_bytes(self) -> bytes:
        """The whole state: a line of JSON, then the sum so far."""
        data = {
            "version": VERSION,
            "round": to_json(self.round),
            "roster": [key.hex() for key in self.roster],
            "phase": self.phase,
            "keys": [self.keys[member].to_bytes().hex() for member in sorted(self.keys)],
            "boxes": {m: message.hex() for m, message in self.boxes.items()},
            "survivors": sorted(self.survivors),
            "acknowledgements": {
                m: signature.hex() for m, signature in self.acknowledgements.items()
            },
            "answers": {m: message.hex() for m, message in self.answers.items()},
            "liars": sorted(self.liars),
            "said": [[phase, m, digest.hex()] for (phase, m), digest in self.fingerprints.items()],
        }
        total = self.total_words.astype(self.total_words.dtype.newbyteorder("<"), copy=False)
        return json.dumps(data).encode() + b"\n" + total.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Coordinator:
        head, _, rest = data.partition(b"\n")
        try:
            state: dict[str, Any] = json.loads(head)
            if state.get("version") != VERSION:
                raise SpecError(f"a coordinator's state must be of version {VERSION}")
            return cls._from_state(state, rest)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise SpecError("this is not the state of a coordinator, or it is damaged") from None

    @classmethod
    def _from_state(cls, state: dict[str, Any], rest: bytes) -> Coordinator:
        coordinator = cls(
            from_json(state["round"]), tuple(bytes.fromhex(key) for key in state["roster"])
        )
        coordinator.total_words[:] = np.frombuffer(
            rest, dtype=coordinator.total_words.dtype.newbyteorder("<")
        )
        coordinator.phase = Phase(state["phase"])
        keys = [Keys.from_bytes(bytes.fromhex(key)) for key in state["keys"]]
        coordinator.keys = {key.member: key for key in keys}
        coordinator._mask_keys = {canonical_key(key.mask) for key in keys}
        coordinator._key_bytes = {key.member: key.to_bytes() for key in keys}
        if coordinator.phase is not Phase.ENROL:
            coordinator.root = root_of(coordinator.keys)
            coordinator.neighbours = neighbours_of(
                coordinator.round,
                coordinator.roster_root,
                coordinator.root,
                coordinator.keys,
                coordinator.keys,
            )
        for name in ("boxes", "answers"):
            messages = {int(member): bytes.fromhex(text) for member, text in state[name].items()}
            getattr(coordinator, name).update(messages)
        if coordinator.phase not in (Phase.ENROL, Phase.SHARE):
            coordinator.view = view_of(
                coordinator.round,
                coordinator.roster_root,
                coordinator.root,
                coordinator.keys.keys(),
                coordinator.boxes.keys(),
            )
        coordinator.survivors, coordinator.liars = set(state["survivors"]), set(state["liars"])
        coordinator.acknowledgements = {
            int(member): bytes.fromhex(text) for member, text in state["acknowledgements"].items()
        }
        coordinator.fingerprints = {
            (Phase(p), m): bytes.fromhex(digest) for p, m, digest in state["said"]
        }
        return coordinator

    def __repr__(self) -> str:  # never the sum
        return f"Coordinator({self.phase}, {len(self.keys)} enrolled, {len(self.survivors)} masked)"

    def _enrol(self, member: int, message: bytes) -> Refusal | None:
        try:
            keys = Keys.from_bytes(message)
        except MismatchError:
            return Refusal.MALFORMED
        if keys.member != member:
            return Refusal.MALFORMED
        if member not in self._signers:
            return Refusal.UNSIGNED
        if is_low_order(keys.box) or is_low_order(keys.mask):  # every neighbour would refuse
            return Refusal.MALFORMED
        if canonical_key(keys.mask) in self._mask_keys:
            return Refusal.COPIED
        self._mask_keys.add(canonical_key(keys.mask))
        self._key_bytes[member] = message
        self.keys[member] = keys
        return None

    def _share(self, member: int, message: bytes) -> Refusal | None:
        if member not in self.keys:
            return Refusal.UNKNOWN
        if len(message) != BOX_BYTES * len(self.neighbours[member]):
            return Refusal.MALFORMED
        self.boxes[member] = message
        return None

    def _mask(self, member: int, message: bytes) -> Refusal | None:
        if member not in self.boxes:
            return Refusal.UNKNOWN
        if member in self.survivors:  # restored from a checkpoint: its table is in the sum
            return None
        try:
            if self.round.prime:
                words = unpack_words(
                    message, self.round.cells, self.round.modulus_bits, self.round.lane
                )
                if (words >= self.round.modulus).any():
                    return Refusal.MALFORMED
                self.total_words = ((self.total_words + words) % self.round.modulus).astype(
                    self.round.lane
                )
            else:
                check_packed(message, self.round.cells, self.round.modulus_bits)
                self._tables.append(message)
        except MismatchError:
            return Refusal.MALFORMED
        self.survivors.add(member)
        return None

    def _acknowledge(self, member: int, message: bytes) -> Refusal | None:
        if member not in self.survivors:
            return Refusal.UNKNOWN
        if member not in self._signers:
            return Refusal.UNSIGNED
        self.acknowledgements[member] = message
        return None

    def _signers_of(self, phase: Phase, messages: Mapping[int, bytes]) -> set[int]:
        """The members with a new message and a valid signature, in phases of signed messages."""
        if phase is not self.phase or phase not in (Phase.ENROL, Phase.ACK):
            return set()
        unseen = {
            member: message
            for member, message in messages.items()
            if 0 <= member < self.round.cohort and (phase, member) not in self.fingerprints
        }
        if phase is Phase.ENROL:
            enrolments = {
                m: Keys.from_bytes(message)
                for m, message in unseen.items()
                if len(message) == KEYS_BYTES
            }
            claims = {
                member: keys.claim(self.roster[member], self.round.salt)
                for member, keys in enrolments.items()
                if keys.member == member
            }
        else:
            text = acknowledgement_text(self.round.salt, self.view, self.survivor_set())
            claims = {
                member: (self.roster[member], message, text)
                for member, message in unseen.items()
                if member in self.survivors
            }
        good = verify_all(list(claims.values()))
        return {member for member, is_good in zip(claims, good, strict=True) if is_good}

    def _unmask(self, member: int, message: bytes) -> Refusal | None:
        if member not in self.survivors:
            return Refusal.UNKNOWN
        if not self._commitment_prefixes:
            self._commitment_prefixes = {
                owner: commitment_prefix(self.round.salt, owner, _label(owner in self.survivors))
                for owner in self.boxes
            }
        owners = self._owners(member)
        if len(message) != SHARE_BYTES * len(owners) or not are_shares(message):
            return Refusal.MALFORMED
        if not self.are_committed_shares(member, owners, message):
            self.liars.add(member)
            return Refusal.FALSE
        self.liars.discard(member)  # the wrong share may have come from an impostor
        self.answers[member] = message
        return None

    def are_committed_shares(self, member: int, owners: list[int], shares: bytes) -> bool:
        """Whether a member's shares of its neighbours' secrets match the owners' commitments in
        their boxes for this member."""
        boxes = np.frombuffer(self._addressed_to(member), np.uint8).reshape(-1, _ADDRESSED)
        seeds, keys = (
            boxes[:, -2 * COMMITMENT_BYTES : -COMMITMENT_BYTES],
            boxes[:, -COMMITMENT_BYTES:],
        )
        alive = np.array([owner in self.survivors for owner in owners], dtype=bool)
        expected = np.where(alive[:, np.newaxis], seeds, keys).tobytes()
        return expected == commitments(
            [self._commitment_prefixes[owner] for owner in owners], member, shares
        )

    def _addressed_to(self, member: int) -> bytes:
        """Source and box of each neighbour that shared, for one member. Sorted for all members at
        once when sharing is over, which is much faster than one by one."""
        if self.phase in (Phase.ENROL, Phase.SHARE):
            raise SpecError("boxes are sent when sharing is over")
        if not self._addressed:
            addressed: dict[int, list[bytes]] = {member: [] for member in self.keys}
            for source in sorted(self.boxes):
                sender, message = source.to_bytes(4, "little"), self.boxes[source]
                starts = range(0, len(message), BOX_BYTES)
                for other, start in zip(self.neighbours[source], starts, strict=True):
                    addressed[other].append(sender + message[start : start + BOX_BYTES])
            self._addressed = {member: b"".join(boxes) for member, boxes in addressed.items()}
        return self._addressed[member]

    def _owners(self, member: int) -> list[int]:
        """The neighbours whose shares a member holds."""
        return [other for other in self.neighbours[member] if other in self.boxes]

    def _set_of(self, members: Collection[int]) -> bytes:
        """Members as bytes, computed once. Survivors have shared, and members that shared have
        enrolled, so two of these sets with equal sizes are equal."""
        key = (self.phase, len(members))
        if key not in self._sets:
            self._sets[key] = members_to_bytes(set(members), self.round.cohort)
        return self._sets[key]

    @property
    def _threshold(self) -> int:
        return self.round.parameters(len(self.keys)).threshold

    def _masks_left(self) -> tuple[list[tuple[bytes, bytes]], list[int]]:
        """The streams that are still in the sum, and their signs."""
        salt, view = self.round.salt, self.view
        streams, signs = [], []
        for member, secret in self._secrets().items():
            if member in self.survivors:
                streams.append(stream_of(secret, salt, b"self", view))
                signs.append(1)
                continue
            own = private_key(secret)
            for other in self.neighbours[member]:
                if other in self.survivors:
                    shared = agree(own, self.keys[other].mask)
                    streams.append(stream_of(shared, salt, pair_label(other, member), view))
                    signs.append(sign_of(other, member))
        return streams, signs

    def _secrets(self) -> dict[int, bytes]:
        """For each member that shared, its seed if it survived and its mask key if not."""
        members = sorted(self.boxes)
        opened: dict[int, bytes] = {}
        for member, secret in zip(members, join_many(*self._shares_of(members)), strict=True):
            if secret is None or not self.is_committed_secret(member, secret):
                self.liars.add(member)
                raise ImpossibleError(
                    f"the secret of member {member} does not match its commitment",
                    hint="ask again in a new round without it",
                )
            opened[member] = secret
        return opened

    def _shares_of(self, members: list[int]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """For each of these members, as many shares of its secret as the threshold, from the lowest
        neighbours; and their points, one row per member."""
        sources, threshold = sorted(self.answers), self._threshold
        owners = [self._owners(source) for source in sources]
        counts = [len(some) for some in owners]
        source = np.repeat(np.array(sources, dtype=np.int64), counts)
        owner = np.fromiter(chain.from_iterable(owners), np.int64, source.size)
        shares = np.frombuffer(b"".join(self.answers[s] for s in sources), f"V{SHARE_BYTES}")
        order = np.argsort(owner, kind="stable")
        first, end = (np.searchsorted(owner[order], members, side) for side in ("left", "right"))
        for member, count in zip(members, (end - first).tolist(), strict=True):
            self._check_enough(member, count)
        picks = order[first[:, np.newaxis] + np.arange(threshold)]
        return shares[picks].tobytes(), 1 + source[picks]

    def _check_enough(self, member: int, count: int) -> None:
        if count < self._threshold:
            raise ImpossibleError(
                f"{self._threshold} neighbours must give a share for every device; "
                f"of member {member} there are {count}",
                hint="ask again in a new round, with new keys; what corrupt devices kept back may "
                "have opened this one, so it stays charged",
            )

    def is_committed_secret(self, member: int, secret: bytes) -> bool:
        if member in self.survivors:
            return hashlib.sha256(secret).digest() == self.keys[member].commitment
        return public_of(private_key(secret)) == self.keys[member].mask


def _label(alive: bool) -> bytes:
    """The secret of an owner of which its neighbours send shares."""
    return b"seed" if alive else b"key"


def _too_late(member: int, message: bytes) -> Refusal:
    return Refusal.LATE

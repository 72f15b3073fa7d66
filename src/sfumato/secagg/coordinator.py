"""The collector's side of a masked round: it adds what it cannot read.

    ENROL ─close─▶ SHARE ─close─▶ MASK ─close─▶ [ACK ─close─▶] UNMASK ─finish─▶ DONE
    and ABORTED from any of them; ACK only in "semi_malicious" rounds

Messages are admitted with `add`, which answers with a `Refusal` or None and never raises for what a
device sent; the same message twice is one message. Closing a phase below its floor aborts the
round. Masked tables are added as they come and not kept.

The state can be saved after every step (`to_bytes`, `from_bytes`), the sum so far and whose tables
are in it together: save it before a message is acknowledged, before a phase's outcome is told, and
a collector that dies goes on where it was. Restored from an older copy it asks again for what it
has forgotten, gets the same bytes, and adds each table once.
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
    acknowledged,
    agree,
    bare,
    commitments,
    committing,
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
    verified,
    view_of,
)
from sfumato.secagg.round import (
    BOX_BYTES,
    COMMITMENT_BYTES,
    KEYS_BYTES,
    SHARE_BYTES,
    MaskedRound,
)
from sfumato.secagg.sharing import are_shares, join_many
from sfumato.spec import from_json, to_json

VERSION = 1
_ADDRESSED = 4 + BOX_BYTES  # with its source before it


class Phase(StrEnum):
    ENROL = "enrol"
    SHARE = "share"
    MASK = "mask"
    ACK = "ack"
    UNMASK = "unmask"
    DONE = "done"
    ABORTED = "aborted"


class Refusal(StrEnum):
    """Why a message was not taken."""

    UNKNOWN = "unknown"  # no such member, or one that is not asked in this phase
    LATE = "late"  # the phase is over, or has not begun
    MALFORMED = "malformed"  # not the bytes of this phase's message
    UNSIGNED = "unsigned"  # keys or survivors that this member did not sign for this round
    COPIED = "copied"  # another member's mask key
    FALSE = "false"  # a share other than the one that was given to it
    EQUIVOCATING = "equivocating"  # another message than the one it sent before


@dataclass(slots=True, repr=False)
class Coordinator:
    """One round, as the collector sees it."""

    round: MaskedRound
    roster: tuple[bytes, ...]  # Ed25519 public keys of the members
    phase: Phase = Phase.ENROL
    keys: dict[int, Keys] = field(default_factory=dict)
    root: bytes = b""
    view: bytes = b""  # what devices are told before they mask, hashed
    neighbours: dict[int, list[int]] = field(default_factory=dict)
    boxes: dict[int, bytes] = field(default_factory=dict)  # by source, in the order of neighbours
    survivors: set[int] = field(default_factory=set)
    acknowledgements: dict[int, bytes] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)  # by source, for those that shared
    liars: set[int] = field(default_factory=set)  # who sent wrong shares, or shared a wrong secret
    _total: Words = field(init=False)
    _said: dict[tuple[Phase, int], bytes] = field(default_factory=dict)
    _mask_keys: set[bytes] = field(default_factory=set)
    _key_bytes: dict[int, bytes] = field(default_factory=dict)
    _sets: dict[tuple[Phase, int], bytes] = field(default_factory=dict)  # as they are told
    _tables: list[bytes] = field(default_factory=list)  # to be added, within `add_all`
    _signers: set[int] = field(default_factory=set)  # of what they say, within `add_all`
    _addressed: dict[int, bytes] = field(default_factory=dict)  # boxes, by whom they are for
    _committing: dict[int, bytes] = field(default_factory=dict)  # by owner, in UNMASK

    def __post_init__(self) -> None:
        if len(self.roster) != self.round.cohort:
            raise SpecError(f"the roster must list {self.round.cohort} members")
        self._total = np.zeros(self.round.cells, dtype=self.round.lane)

    def add(self, phase: Phase, member: int, message: bytes) -> Refusal | None:
        """Take a member's message of a phase, unless there is something against it."""
        return self.add_all(phase, {member: message})[member]

    def add_all(self, phase: Phase, messages: Mapping[int, bytes]) -> dict[int, Refusal | None]:
        """Take messages of a phase by member; tables are added together, which is quicker."""
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
            said = fingerprint(message, salt)
            before = self._said.get((phase, member))
            if before is not None:
                refusals[member] = None if before == said else Refusal.EQUIVOCATING
                continue
            refusals[member] = take(member, message) if phase is self.phase else Refusal.LATE
            if refusals[member] is None:
                self._said[phase, member] = said
        if self._tables:
            add_packed(self._total, self._tables, self.round.modulus_bits)
            self._tables.clear()
        return refusals

    def close(self) -> Phase:
        """End the phase: the next one, or ABORTED if too few answered."""
        least = self.round.least_survivors
        answered = {
            Phase.ENROL: (len(self.keys), least),
            Phase.SHARE: (len(self.boxes), least),
            Phase.MASK: (len(self.survivors), least),
            Phase.ACK: (len(self.acknowledgements), self.round.quorum),
        }
        if self.phase not in answered:
            raise SpecError(f"the phase {self.phase} is not one to close")
        count, floor = answered[self.phase]
        if count < floor:
            self.phase = Phase.ABORTED
            return self.phase
        if self.phase is Phase.ENROL:
            self.root = root_of(self.keys)
            self.neighbours = neighbours_of(self.round, self.root, self.keys, self.keys)
        elif self.phase is Phase.SHARE:
            self.view = view_of(
                self.round, self.roster, self.root, self.keys.keys(), self.boxes.keys()
            )
        self.phase = {
            Phase.ENROL: Phase.SHARE,
            Phase.SHARE: Phase.MASK,
            Phase.MASK: Phase.ACK if self.round.mode == "semi_malicious" else Phase.UNMASK,
            Phase.ACK: Phase.UNMASK,
        }[self.phase]
        return self.phase

    def roster_for(self, member: int) -> bytes:
        """Who enrolled, the root, and the keys of this member's neighbours."""
        keys = [self._key_bytes[other] for other in self.neighbours[member]]
        return self._set_of(self.keys) + self.root + b"".join(keys)

    def boxes_for(self, member: int) -> bytes:
        """Who shared, and the boxes that neighbours addressed to this member."""
        return self._set_of(self.boxes) + self._addressed_to(member)

    def survivor_set(self) -> bytes:
        """Whose tables are in the sum: the same for everybody, once the phase MASK is over."""
        if self.phase not in (Phase.ACK, Phase.UNMASK, Phase.DONE):
            raise SpecError("the survivors are known when masking is over")
        return self._set_of(self.survivors)

    def signatures(self) -> bytes:
        """What a quorum of devices signed: the same for everybody."""
        signers = sorted(self.acknowledgements)[: self.round.quorum]
        return b"".join(
            member.to_bytes(4, "little") + self.acknowledgements[member] for member in signers
        )

    def finish(self) -> Words:
        """The sum over the survivors as residues of the modulus, with the masks off.

        Secrets are checked against what was committed to: who shared another one is in `liars`,
        and the round is over. (Who sent a wrong share is there already.) Asked again, it gives the
        same.
        """
        if self.phase is Phase.DONE:
            return self._total
        if self.phase is not Phase.UNMASK:
            raise SpecError(f"a round is finished after unmasking; it is in {self.phase}")
        try:
            streams, signs = self._masks_left()
        except (ImpossibleError, MismatchError):
            self.phase = Phase.ABORTED
            raise
        modulus = self.round.modulus if self.round.prime else None
        masks.add_streams(self._total, streams, [-sign for sign in signs], modulus=modulus)
        if modulus is None and 8 * self._total.itemsize > self.round.modulus_bits:
            self._total &= self.round.lane(self.round.modulus - 1)
        self.phase = Phase.DONE
        return self._total

    def checkpoint(self) -> bytes:
        """Whose tables are in the sum so far, and the sum: what `restore` needs beside the messages
        of the phases before, when tables were not kept."""
        total = self._total.astype(self._total.dtype.newbyteorder("<"), copy=False)
        return members_to_bytes(self.survivors, self.round.cohort) + total.tobytes()

    def restore(self, checkpoint: bytes) -> None:
        """Go on in the phase MASK with a sum that `checkpoint` wrote."""
        size = -(-self.round.cohort // 8)
        if self.phase is not Phase.MASK or len(checkpoint) != size + self._total.nbytes:
            raise SpecError("a sum is restored in the phase mask of its own round")
        survivors = members_from_bytes(checkpoint[:size], self.round.cohort)
        if not survivors <= self.boxes.keys():
            raise SpecError("a sum must be of devices that have shared")
        total = np.frombuffer(checkpoint[size:], dtype=self._total.dtype.newbyteorder("<"))
        self._total[:] = total
        self.survivors = survivors

    def to_bytes(self) -> bytes:
        """The whole state: a line of JSON, then the sum so far."""
        data = {
            "version": VERSION,
            "round": to_json(self.round),
            "roster": [key.hex() for key in self.roster],
            "phase": self.phase,
            "keys": [self.keys[member].to_bytes().hex() for member in sorted(self.keys)],
            "boxes": {m: given.hex() for m, given in self.boxes.items()},
            "survivors": sorted(self.survivors),
            "acknowledgements": {m: sent.hex() for m, sent in self.acknowledgements.items()},
            "answers": {m: given.hex() for m, given in self.answers.items()},
            "liars": sorted(self.liars),
            "said": [[phase, m, said.hex()] for (phase, m), said in self._said.items()],
        }
        total = self._total.astype(self._total.dtype.newbyteorder("<"), copy=False)
        return json.dumps(data).encode() + b"\n" + total.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Coordinator:
        head, _, rest = data.partition(b"\n")
        try:
            state: dict[str, Any] = json.loads(head)
            if state.get("version") != VERSION:
                raise SpecError(f"a coordinator's state must be of version {VERSION}")
            return cls._loaded(state, rest)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise SpecError("this is not the state of a coordinator, or it is damaged") from None

    @classmethod
    def _loaded(cls, state: dict[str, Any], rest: bytes) -> Coordinator:
        made = cls(from_json(state["round"]), tuple(bytes.fromhex(key) for key in state["roster"]))
        made._total[:] = np.frombuffer(rest, dtype=made._total.dtype.newbyteorder("<"))
        made.phase = Phase(state["phase"])
        keys = [Keys.from_bytes(bytes.fromhex(key)) for key in state["keys"]]
        made.keys = {key.member: key for key in keys}
        made._mask_keys = {bare(key.mask) for key in keys}
        made._key_bytes = {key.member: key.to_bytes() for key in keys}
        if made.phase is not Phase.ENROL:
            made.root = root_of(made.keys)
            made.neighbours = neighbours_of(made.round, made.root, made.keys, made.keys)
        for name in ("boxes", "answers"):
            given = {int(member): bytes.fromhex(text) for member, text in state[name].items()}
            getattr(made, name).update(given)
        if made.phase not in (Phase.ENROL, Phase.SHARE):
            made.view = view_of(
                made.round, made.roster, made.root, made.keys.keys(), made.boxes.keys()
            )
        made.survivors, made.liars = set(state["survivors"]), set(state["liars"])
        made.acknowledgements = {
            int(member): bytes.fromhex(sent) for member, sent in state["acknowledgements"].items()
        }
        made._said = {(Phase(p), m): bytes.fromhex(said) for p, m, said in state["said"]}
        return made

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
        if bare(keys.mask) in self._mask_keys:
            return Refusal.COPIED
        self._mask_keys.add(bare(keys.mask))
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
        if member in self.survivors:  # restored without its message, whose table is in the sum
            return None
        try:
            if self.round.prime:
                words = unpack_words(
                    message, self.round.cells, self.round.modulus_bits, self.round.lane
                )
                if (words >= self.round.modulus).any():
                    return Refusal.MALFORMED
                self._total = ((self._total + words) % self.round.modulus).astype(self.round.lane)
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
        """Of those that say something new in a phase of signed messages, who signed it."""
        if phase is not self.phase or phase not in (Phase.ENROL, Phase.ACK):
            return set()
        new = {
            member: message
            for member, message in messages.items()
            if 0 <= member < self.round.cohort and (phase, member) not in self._said
        }
        if phase is Phase.ENROL:
            given = {m: Keys.from_bytes(sent) for m, sent in new.items() if len(sent) == KEYS_BYTES}
            claims = {
                member: keys.claim(self.roster[member], self.round.salt)
                for member, keys in given.items()
                if keys.member == member
            }
        else:
            said = acknowledged(self.round.salt, self.view, self.survivor_set())
            claims = {
                member: (self.roster[member], sent, said)
                for member, sent in new.items()
                if member in self.survivors
            }
        good = verified(list(claims.values()))
        return {member for member, is_good in zip(claims, good, strict=True) if is_good}

    def _unmask(self, member: int, message: bytes) -> Refusal | None:
        if member not in self.survivors:
            return Refusal.UNKNOWN
        if not self._committing:
            self._committing = {
                owner: committing(self.round.salt, owner, _label(owner in self.survivors))
                for owner in self.boxes
            }
        owners = self._owners(member)
        if len(message) != SHARE_BYTES * len(owners) or not are_shares(message):
            return Refusal.MALFORMED
        if not self._were_given(member, owners, message):
            self.liars.add(member)
            return Refusal.FALSE
        self.liars.discard(member)  # whoever spoke in its name before
        self.answers[member] = message
        return None

    def _were_given(self, member: int, owners: list[int], shares: bytes) -> bool:
        """Whether a member's shares of its neighbours' secrets are what the owners committed to,
        and the member found in their boxes."""
        boxes = np.frombuffer(self._addressed_to(member), np.uint8).reshape(-1, _ADDRESSED)
        seeds, keys = (
            boxes[:, -2 * COMMITMENT_BYTES : -COMMITMENT_BYTES],
            boxes[:, -COMMITMENT_BYTES:],
        )
        alive = np.array([owner in self.survivors for owner in owners], dtype=bool)
        said = np.where(alive[:, np.newaxis], seeds, keys).tobytes()
        return said == commitments([self._committing[owner] for owner in owners], member, shares)

    def _addressed_to(self, member: int) -> bytes:
        """Source and box of each neighbour that shared, for one member. Sorted for all of them at
        once when sharing is over, which takes a fraction of the time of one by one."""
        if self.phase in (Phase.ENROL, Phase.SHARE):
            raise SpecError("boxes are handed out when sharing is over")
        if not self._addressed:
            addressed: dict[int, list[bytes]] = {member: [] for member in self.keys}
            for source in sorted(self.boxes):
                name, message = source.to_bytes(4, "little"), self.boxes[source]
                starts = range(0, len(message), BOX_BYTES)
                for other, start in zip(self.neighbours[source], starts, strict=True):
                    addressed[other].append(name + message[start : start + BOX_BYTES])
            self._addressed = {member: b"".join(boxes) for member, boxes in addressed.items()}
        return self._addressed[member]

    def _owners(self, member: int) -> list[int]:
        """The neighbours of which a member holds shares."""
        return [other for other in self.neighbours[member] if other in self.boxes]

    def _set_of(self, members: Collection[int]) -> bytes:
        """Members as bytes, worked out once. Survivors have shared, and who shared has enrolled, so
        two of these sets that have one size are one."""
        key = (self.phase, len(members))
        if key not in self._sets:
            self._sets[key] = members_to_bytes(set(members), self.round.cohort)
        return self._sets[key]

    @property
    def _threshold(self) -> int:
        return self.round.parameters(len(self.keys)).threshold

    def _masks_left(self) -> tuple[list[tuple[bytes, bytes]], list[int]]:
        """The streams that are still in the sum, and with which sign."""
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
        """Of each member that shared, its seed if it survived and its mask key if not."""
        members = sorted(self.boxes)
        opened: dict[int, bytes] = {}
        for member, secret in zip(members, join_many(*self._shares_of(members)), strict=True):
            if secret is None or not self._is_committed(member, secret):
                self.liars.add(member)
                raise ImpossibleError(
                    f"the secret of member {member} is not what it committed to",
                    hint="ask again in a new round without it",
                )
            opened[member] = secret
        return opened

    def _shares_of(self, members: list[int]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """For each of these members, shares of its secret that neighbours gave, as many as it takes
        and by the lowest of them; and their points, a row for each member."""
        sources, threshold = sorted(self.answers), self._threshold
        owners = [self._owners(source) for source in sources]
        counts = [len(some) for some in owners]
        source = np.repeat(np.array(sources, dtype=np.int64), counts)
        owner = np.fromiter(chain.from_iterable(owners), np.int64, source.size)
        shares = np.frombuffer(b"".join(self.answers[s] for s in sources), f"V{SHARE_BYTES}")
        order = np.argsort(owner, kind="stable")
        first, end = (np.searchsorted(owner[order], members, side) for side in ("left", "right"))
        for member, held in zip(members, (end - first).tolist(), strict=True):
            self._check_enough(member, held)
        chosen = order[first[:, np.newaxis] + np.arange(threshold)]
        return shares[chosen].tobytes(), 1 + source[chosen]

    def _check_enough(self, member: int, held: int) -> None:
        if held < self._threshold:
            raise ImpossibleError(
                f"{self._threshold} neighbours must give a share for every device; "
                f"of member {member} there are {held}",
                hint="ask again in a new round, with new keys; what corrupt devices kept back may "
                "have opened this one, so it stays charged",
            )

    def _is_committed(self, member: int, secret: bytes) -> bool:
        if member in self.survivors:
            return hashlib.sha256(secret).digest() == self.keys[member].commitment
        return public_of(private_key(secret)) == self.keys[member].mask


def _label(alive: bool) -> bytes:
    """What of an owner its neighbours give shares of."""
    return b"seed" if alive else b"key"


def _too_late(member: int, message: bytes) -> Refusal:
    return Refusal.LATE

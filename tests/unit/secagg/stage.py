"""A masked round in one process, seen by a collector that writes down everything it hears."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from checks import SEED
from sfumato.errors import MismatchError
from sfumato.kernels import masks
from sfumato.kernels.packed import unpack_words
from sfumato.privacy import SeededRng
from sfumato.secagg.agreement import (
    Words,
    agree,
    committee_of,
    members_from_bytes,
    members_to_bytes,
    pair_label,
    private_key,
    sign_of,
    stream_of,
)
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.merkle import Tree
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import ACKNOWLEDGEMENT_BYTES, BOX_BYTES, SHARE_BYTES, MaskedRound
from sfumato.secagg.sharing import join

I64 = npt.NDArray[np.int64]

STEPS = (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK)
ROUND = MaskedRound(
    task="ab" * 32,
    cells=50,
    modulus_bits=20,
    cohort=24,
    corrupt=0.1,
    dropout=0.25,
    mode="semi_honest",
    nonce="cd" * 16,
)


@cache
def identity(member: int) -> bytes:
    return SeededRng(SEED, 1, member).words(4).tobytes()


@cache
def public_identity(member: int) -> bytes:
    private = Ed25519PrivateKey.from_private_bytes(identity(member))
    return private.public_key().public_bytes_raw()


def roster(cohort: int) -> tuple[bytes, ...]:
    return tuple(public_identity(member) for member in range(cohort))


class Stage:
    """The collector's state and all devices; `leave` says from which phase on members are
    silent."""

    def __init__(
        self,
        round: MaskedRound = ROUND,
        *,
        tables: npt.NDArray[np.integer] | None = None,
        leave: Mapping[int, Phase] | None = None,
        kind: type[Participant] = Participant,
        kinds: Mapping[int, type[Participant]] | None = None,
        seed: int = 0,
    ) -> None:
        self.round, self.leave = round, dict(leave or {})
        classes = dict.fromkeys(range(round.cohort), kind) | dict(kinds or {})
        self.devices = [
            classes[member].join(
                round,
                member,
                identity(member),
                Tree(roster(round.cohort)).root,
                rng=SeededRng(SEED, 2, seed, member),
            )
            for member in range(round.cohort)
        ]
        limit = min(1000, 2 ** (round.modulus_bits - 1))
        random_tables = np.random.default_rng([SEED, seed]).integers(
            -limit, limit, (round.cohort, round.cells)
        )
        self.tables = random_tables if tables is None else tables
        self.collector = Coordinator(round, roster(round.cohort))
        self.answers: dict[tuple[Phase, int], bytes] = {}

    def takes(self, phase: Phase) -> list[int]:
        """The remaining members of a phase."""
        members_of_phase: Collection[int] = {
            Phase.ENROL: range(self.round.cohort),
            Phase.SHARE: self.collector.keys,
            Phase.MASK: self.collector.boxes,
        }.get(phase, self.collector.survivors)
        return [
            member
            for member in sorted(members_of_phase)
            if member not in self.leave or STEPS.index(phase) < STEPS.index(self.leave[member])
        ]

    def message_for(self, phase: Phase, member: int) -> bytes:
        """The message of an honest collector to a device in a phase."""
        if phase is Phase.SHARE:
            return self.collector.roster_for(member)
        if phase is Phase.MASK:
            return self.collector.boxes_for(member)
        return b"" if phase is Phase.ENROL else self.collector.survivor_set()

    def answer(self, phase: Phase, member: int) -> bytes:
        """The answer of a device."""
        device, message = self.devices[member], self.message_for(phase, member)
        steps: dict[Phase, Callable[[], bytes]] = {
            Phase.ENROL: device.enrol,
            Phase.SHARE: lambda: device.share(message),
            Phase.MASK: lambda: device.mask(message, self.tables[member]),
            Phase.ACK: lambda: device.acknowledge(message),
            Phase.UNMASK: lambda: device.unmask(message, self.collector.signatures()),
        }
        return steps[phase]()

    def run(self, phase: Phase) -> None:
        """One phase, which is then closed; UNMASK is left open for `finish`."""
        for member in self.takes(phase):
            self.answers[phase, member] = answer = self.answer(phase, member)
            refusal = self.collector.add(phase, member, answer)
            assert refusal is None, refusal
        if phase is not Phase.UNMASK:
            self.collector.close()

    def until(self, phase: Phase) -> Coordinator:
        """Up to the beginning of a phase, or to where the round aborts."""
        while self.collector.phase not in (phase, Phase.ABORTED):
            self.run(self.collector.phase)
        return self.collector

    def finish(self) -> I64:
        self.until(Phase.UNMASK)
        self.run(Phase.UNMASK)
        return self.collector.finish().astype(np.int64)

    def expected(self, members: Iterable[int] | None = None) -> I64:
        summands = sorted(self.collector.survivors if members is None else members)
        return np.asarray(self.tables[summands].astype(np.int64).sum(axis=0) % self.round.modulus)

    def neighbours(self, member: int) -> list[int]:
        return self.collector.neighbours[member]

    @property
    def threshold(self) -> int:
        return self.round.parameters(len(self.collector.keys)).threshold

    # The attacker's methods.

    def set_of(self, members: Iterable[int]) -> bytes:
        return members_to_bytes(set(members), self.round.cohort)

    def box(self, source: int, target: int) -> bytes:
        """The box of one member for another, as it was sent."""
        message = self.answers[Phase.SHARE, source]
        return pieces(message, self.neighbours(source), BOX_BYTES)[target]

    def share(self, source: int, owner: int) -> bytes:
        """The share of another member's secret that a member sent."""
        return pieces(self.answers[Phase.UNMASK, source], self.devices[source].neighbour_shares)[
            owner
        ]

    def words_of(self, victim: int) -> Words:
        """A victim's masked table, as it was sent."""
        return self.words_of_message(self.answers[Phase.MASK, victim])

    def words_of_message(self, message: bytes) -> Words:
        return unpack_words(message, self.round.cells, self.round.modulus_bits, self.round.lane)

    def read(
        self,
        victim: int,
        *,
        seed: bytes | None = None,
        key: bytes | None = None,
        pairs: Mapping[int, bytes] | None = None,
        label: Callable[[int, int], bytes] = pair_label,
    ) -> I64:
        """A victim's masked table without the masks of its seed, of its mask key with everybody,
        and of some pairs' shared secrets; as whole numbers nearest zero. The attacker knows its own
        messages to the victim, and so its view."""
        shared = dict(pairs or {})
        if key is not None:
            own = private_key(key)
            shared = {
                other: agree(own, self.collector.keys[other].mask)
                for other in self.neighbours(victim)
                if other in self.collector.boxes
            }
        salt, view = self.round.salt, self.devices[victim].view
        streams = [stream_of(seed, salt, b"self", view)] if seed is not None else []
        signs = [-1] * len(streams)
        for other, secret in shared.items():
            streams.append(stream_of(secret, salt, label(victim, other), view))
            signs.append(-sign_of(victim, other))
        words = self.words_of(victim).copy()
        masks.add_streams(words, streams, signs)
        return nearest_zero(words, self.round.modulus)

    def sum_of(
        self, members: Iterable[int], seeds: Mapping[int, bytes], keys: Mapping[int, bytes]
    ) -> I64:
        """The sum over some members without the masks of their seeds and those that they have with
        members whose mask keys are known; as residues."""
        total = np.zeros(self.round.cells, dtype=np.int64)
        private_keys = {member: private_key(key) for member, key in keys.items()}
        for member in members:
            public = self.collector.keys[member].mask
            pairs = {
                other: agree(private_keys[other], public)
                for other in self.devices[member].neighbour_shares
                if other in private_keys
            }
            total += self.read(member, seed=seeds[member], pairs=pairs)
        return np.asarray(total % self.round.modulus)


class Haul:
    """The shares that an attacker collected: of seeds and of mask keys, by owner, then by
    sender."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.shares: dict[bool, dict[int, dict[int, bytes]]] = {True: {}, False: {}}

    def ask(self, member: int, survivors: bytes, signatures: bytes = b"") -> bool:
        """Whether a device gives its shares for these survivors; of seeds of those (True) that are
        among them, of mask keys of the others (False)."""
        device = self.stage.devices[member]
        try:
            answer = device.unmask(survivors, signatures)
        except MismatchError:
            return False
        alive = members_from_bytes(survivors, self.stage.round.cohort)
        for owner, share in pieces(answer, device.neighbour_shares).items():
            self.shares[owner in alive].setdefault(owner, {})[member] = share
        return True

    def corrupt(self, member: int) -> None:
        """A corrupt device reveals all its shares."""
        for owner, both in self.stage.devices[member].neighbour_shares.items():
            self.shares[True].setdefault(owner, {})[member] = both[:SHARE_BYTES]
            self.shares[False].setdefault(owner, {})[member] = both[SHARE_BYTES:]

    def seeds(self, members: Iterable[int]) -> dict[int, bytes] | None:
        return self._join(True, members)

    def keys(self, members: Iterable[int]) -> dict[int, bytes] | None:
        return self._join(False, members)

    def _join(self, seed: bool, members: Iterable[int]) -> dict[int, bytes] | None:
        """The secrets of all of these, or None if there are too few shares of one."""
        threshold = self.stage.threshold
        secrets = {}
        for member in members:
            shares = self.shares[seed].get(member, {})
            if len(shares) < threshold:
                return None
            secrets[member] = opened(shares, threshold)
        return secrets


def nearest_zero(words: npt.NDArray[np.integer], modulus: int) -> I64:
    """Residues as whole numbers."""
    residues = [int(word) % modulus for word in words]
    return np.array([word - modulus * (2 * word >= modulus) for word in residues], dtype=np.int64)


def pieces(answer: bytes, owners: Iterable[int], size: int = SHARE_BYTES) -> dict[int, bytes]:
    """An answer's shares, by their owners."""
    return {
        owner: answer[place * size : (place + 1) * size]
        for place, owner in enumerate(sorted(owners))
    }


def opened(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """A secret from shares, by the member that gave them."""
    return join({1 + member: share for member, share in shares.items()}, threshold=threshold)


def signed_by(stage: Stage, signatures: Mapping[int, bytes], members: Iterable[int]) -> bytes:
    """The acknowledgements of those of `members` in the committee that have signed, at most a
    quorum, as sent to a device: with their identities, and a proof that these are on the roster."""
    listed, enrolled = stage.collector.roster, stage.collector.keys.keys()
    committee = committee_of(
        stage.round, stage.collector.roster_root, stage.collector.root, enrolled
    )
    signers = [member for member in members if member in signatures and member in committee]
    del signers[stage.round.quorum(len(enrolled)) :]
    return entries(stage, {member: signatures[member] for member in signers}) + Tree(listed).proof(
        signers
    )


def entries(stage: Stage, signatures: Mapping[int, bytes]) -> bytes:
    """Member, identity and signature of each that has signed."""
    acknowledgements = b"".join(
        member.to_bytes(4, "little") + stage.collector.roster[member] + signature
        for member, signature in signatures.items()
    )
    assert len(acknowledgements) == len(signatures) * ACKNOWLEDGEMENT_BYTES
    return acknowledgements


def assert_hidden(read: I64, table: npt.NDArray[np.integer]) -> None:
    """The values read are independent of the table: of 50 cells of 20 bits three or more agree by
    chance with probability below 1e-13."""
    assert read.size == 50
    assert int((read == table).sum()) <= 2

"""The collector's messages to members in a phase, derived from the stored messages of members.

They follow from the members' messages of earlier phases, which do not change once a phase has
begun; so a worker after a restart, or another process over the same store, derives the same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock

from sfumato.collector.store.round_tables import RoundRow, RoundTables, accepted_members
from sfumato.device import invitations
from sfumato.errors import DataError
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.round import MaskedRound
from sfumato.spec import from_json

_MOST = 8  # phases whose messages are derived and cached; each takes megabytes

MessageFor = Callable[[int], bytes | None]
"""The message to a member in a phase; None if the member did not answer in the phase before."""


class PhaseMessages:
    """Messages to members, by round and phase. Any thread may use them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_worker: dict[tuple[str, str], MessageFor] = {}  # in rounds that it drives here
        self._derived: OrderedDict[tuple[str, str], MessageFor] = OrderedDict()  # the last few

    def put(self, round_id: str, phase: str, message_for: MessageFor) -> None:
        """Set the messages with which a phase begins."""
        with self._lock:
            self._by_worker[round_id, phase] = message_for

    def of_phase(self, tx: RoundTables, row: RoundRow, phase: str) -> MessageFor:
        """The messages of a phase that has begun."""
        key = row.id, phase
        with self._lock:
            if key in self._derived:
                self._derived.move_to_end(key)
            message_for = self._by_worker.get(key) or self._derived.get(key)
        if message_for is None:
            message_for = messages_of(replay(tx, replace(row, phase=phase)))
            with self._lock:
                self._derived[key] = message_for
                while len(self._derived) > _MOST:
                    self._derived.popitem(last=False)
        return message_for

    def drop(self, round_id: str, phase: str | None = None) -> None:
        """Drop the messages of a phase that is over, or of a whole round."""
        with self._lock:
            for messages in (self._by_worker, self._derived):
                for key in [key for key in messages if key[0] == round_id]:
                    if phase in (key[1], None):
                        del messages[key]


def messages_of(coordinator: Coordinator) -> MessageFor:
    """The messages of the phase that a round is in. Any thread may use them, even after the phase:
    the state that they follow from no longer changes."""
    phase = coordinator.phase
    if phase is Phase.SHARE:
        members, of = set(coordinator.keys), coordinator.roster_for
        return lambda member: of(member) if member in members else None
    if phase is Phase.MASK:
        members, of = set(coordinator.boxes), coordinator.boxes_for
        of(min(members))  # sorts the boxes for all of them
        return lambda member: of(member) if member in members else None
    if phase is Phase.UNMASK and coordinator.round.mode == "semi_malicious":
        members, text = set(coordinator.acknowledgements), coordinator.signatures()
    elif phase in (Phase.ACK, Phase.UNMASK):
        members, text = set(coordinator.survivors), coordinator.survivor_set()
    else:
        members, text = set(), b""
    return lambda member: text if member in members else None


def replay(tx: RoundTables, row: RoundRow) -> Coordinator:
    """A round's coordinator, rebuilt from its rows, at the beginning of its phase; in the phase
    MASK, with the sum so far. The messages of the phase are still to be added."""
    round: MaskedRound = from_json(row.spec)
    coordinator = Coordinator(round, tuple(bytes(identity) for identity, _ in tx.members(row.id)))
    if not invitations.is_to(coordinator.roster_root, tx.invitation(row.id)):
        raise DataError(f"round {row.id} began with another version of sfumato")
    while True:
        phase = coordinator.phase
        if phase is Phase.MASK and (checkpoint := tx.checkpoint(row.id)) is not None:
            coordinator.restore(checkpoint)
        if phase == row.phase:
            return coordinator
        if phase is Phase.UNMASK:
            raise DataError(f"there is no phase {row.phase} in round {row.id}")
        if phase is not Phase.MASK:
            _add_again(tx, row, coordinator)
        if coordinator.close() is Phase.ABORTED:
            raise DataError(f"some messages of round {row.id} are missing")


def expected_members(coordinator: Coordinator) -> set[int]:
    """The members whose messages the phase waits for."""
    acknowledged = coordinator.round.mode == "semi_malicious"
    return {
        Phase.ENROL: set(range(coordinator.round.cohort)),
        Phase.SHARE: set(coordinator.keys),
        Phase.MASK: set(coordinator.boxes),
        Phase.ACK: coordinator.survivors,
        Phase.UNMASK: set(coordinator.acknowledgements) if acknowledged else coordinator.survivors,
    }[coordinator.phase]


def _add_again(tx: RoundTables, row: RoundRow, coordinator: Coordinator) -> None:
    """Add the messages of a phase that is over, except refused ones and those of members that were
    not expected to send one."""
    phase = coordinator.phase
    accepted = accepted_members(tx.senders(row.id, str(phase)))
    senders = sorted(accepted & expected_members(coordinator))
    for refusal in coordinator.add_all(phase, tx.messages(row.id, str(phase), senders)).values():
        if refusal is not None:
            raise DataError(f"a message that had been accepted is now refused: {refusal}")

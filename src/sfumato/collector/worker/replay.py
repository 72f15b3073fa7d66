"""What members are told in a phase: worked out from the messages that are stored, and never stored
itself.

It follows from the messages of the phases before, which nobody changes once a phase has begun; so a
worker that starts anew, or another process over the same store, works out the same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock

from sfumato.collector.store.round_tables import RoundRow, RoundTables, standing
from sfumato.errors import DataError
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.round import MaskedRound
from sfumato.spec import from_json

_MOST = 8  # that are worked out and kept; each is megabytes

Speech = Callable[[int], bytes | None]
"""What a member is told in a phase; None if it is told nothing, since it was not heard before."""


class Spoken:
    """By round and phase. Any thread may say or hear."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._said: dict[tuple[str, str], Speech] = {}  # by this process's worker, in rounds it has
        self._worked_out: OrderedDict[tuple[str, str], Speech] = OrderedDict()  # here, the last few

    def say(self, round_id: str, phase: str, speech: Speech) -> None:
        """Members are told this when the phase begins."""
        with self._lock:
            self._said[round_id, phase] = speech

    def heard(self, round_id: str, phase: str) -> Speech | None:
        """What members are told in a phase of a round, if it is known here."""
        key = round_id, phase
        with self._lock:
            if key in self._worked_out:
                self._worked_out.move_to_end(key)
            return self._said.get(key) or self._worked_out.get(key)

    def hear(self, tx: RoundTables, row: RoundRow, phase: str) -> Speech:
        """What members are told in a phase of a round that has begun."""
        speech = self.heard(row.id, phase)
        if speech is None:
            speech = speech_of(replayed(tx, replace(row, phase=phase)))
            with self._lock:
                self._worked_out[row.id, phase] = speech
                while len(self._worked_out) > _MOST:
                    self._worked_out.popitem(last=False)
        return speech

    def forget(self, round_id: str, phase: str | None = None) -> None:
        """The phase is over, or the round is."""
        with self._lock:
            for known in (self._said, self._worked_out):
                for key in [key for key in known if key[0] == round_id]:
                    if phase in (key[1], None):
                        del known[key]


def speech_of(coordinator: Coordinator) -> Speech:
    """What is told in the phase that a round is in. Any thread may ask, when the phase is over too:
    what it follows from was settled before."""
    phase = coordinator.phase
    if phase is Phase.SHARE:
        told, of = set(coordinator.keys), coordinator.roster_for
        return lambda member: of(member) if member in told else None
    if phase is Phase.MASK:
        told, of = set(coordinator.boxes), coordinator.boxes_for
        of(min(told))  # sorts the boxes for all of them
        return lambda member: of(member) if member in told else None
    if phase is Phase.UNMASK and coordinator.round.mode == "semi_malicious":
        told, text = set(coordinator.acknowledgements), coordinator.signatures()
    elif phase in (Phase.ACK, Phase.UNMASK):
        told, text = set(coordinator.survivors), coordinator.survivor_set()
    else:
        told, text = set(), b""
    return lambda member: text if member in told else None


def replayed(tx: RoundTables, row: RoundRow) -> Coordinator:
    """A round's coordinator as its rows tell it, at the beginning of its phase; in the phase MASK,
    with the sum so far. What came in the phase is to be taken."""
    round: MaskedRound = from_json(row.spec)
    coordinator = Coordinator(round, tuple(bytes(identity) for identity, _ in tx.members(row.id)))
    while True:
        phase = coordinator.phase
        if phase is Phase.MASK and (checkpoint := tx.checkpoint(row.id)) is not None:
            coordinator.restore(checkpoint)
        if phase == row.phase:
            return coordinator
        if phase is Phase.UNMASK:
            raise DataError(f"there is no phase {row.phase} in round {row.id}")
        if phase is not Phase.MASK:
            _take_again(tx, row, coordinator)
        if coordinator.close() is Phase.ABORTED:
            raise DataError(f"the messages of round {row.id} are not all there")


def asked(coordinator: Coordinator) -> set[int]:
    """Whose messages the phase waits for."""
    acknowledged = coordinator.round.mode == "semi_malicious"
    return {
        Phase.ENROL: set(range(coordinator.round.cohort)),
        Phase.SHARE: set(coordinator.keys),
        Phase.MASK: set(coordinator.boxes),
        Phase.ACK: coordinator.survivors,
        Phase.UNMASK: set(coordinator.acknowledgements) if acknowledged else coordinator.survivors,
    }[coordinator.phase]


def _take_again(tx: RoundTables, row: RoundRow, coordinator: Coordinator) -> None:
    """Take the messages of a phase that is over, all that were not refused. Who was not asked may
    have sent one when the others were all there."""
    phase = coordinator.phase
    came = sorted(standing(tx.senders(row.id, str(phase))) & asked(coordinator))
    for refusal in coordinator.add_all(phase, tx.messages(row.id, str(phase), came)).values():
        if refusal is not None:
            raise DataError(f"a message that was taken is now refused: {refusal}")

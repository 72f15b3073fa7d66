"""A whole masked round in one process: every message of both roles, and no network.

Tables are made one at a time and added as they arrive, so memory holds one table, the sum, and the
state of each device (about 30 kB with 60 neighbours).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sfumato.arrays import I64
from sfumato.errors import ImpossibleError
from sfumato.privacy.samplers import Rng
from sfumato.secagg.agreement import public_identity
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound

Progress = Callable[[str, float], None]

_STEPS = (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK)


@dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """The sum of a round, and its cost."""

    total: I64  # residues, over the survivors
    survivors: int
    bytes_up: I64  # by member
    bytes_down: I64
    device_seconds: float  # of all devices together
    collector_seconds: float

    def __repr__(self) -> str:  # never the sum
        return f"Outcome({self.survivors} survivors)"


def run(
    round: MaskedRound,
    table_of: Callable[[int], npt.NDArray[np.integer]],
    *,
    leaving: Mapping[int, Phase] | None = None,
    before_unmask: Callable[[], None] | None = None,
    rng: Rng,
    progress: Progress | None = None,
) -> Outcome:
    """Sum the tables of a cohort; member m sends nothing from the phase `leaving[m]` on.

    `before_unmask` is called just before the sum is opened; an exception from it ends the round.
    Raises ImpossibleError if too many leave for a sum.
    """
    identities = [rng.words(4).tobytes() for _ in range(round.cohort)]
    coordinator = Coordinator(round, tuple(public_identity(identity) for identity in identities))
    devices = [
        Participant.join(round, member, identity, coordinator.roster_root, rng=rng)
        for member, identity in enumerate(identities)
    ]
    course = _RunningRound(coordinator, devices, table_of, leaving or {})
    for number, phase in enumerate(_STEPS):
        if phase is not course.collector.phase:  # ACK is not in every round
            continue
        if progress is not None:
            progress(phase.value, number / len(_STEPS))
        if phase is Phase.UNMASK and before_unmask is not None:
            before_unmask()
        course.run(phase)
    return course.outcome()


class _RunningRound:
    """A round under way, and its cost so far."""

    def __init__(
        self,
        collector: Coordinator,
        devices: list[Participant],
        table_of: Callable[[int], npt.NDArray[np.integer]],
        leaving: Mapping[int, Phase],
    ) -> None:
        self.collector, self.devices, self.table_of = collector, devices, table_of
        self.leaving = leaving
        self.up = np.zeros(len(devices), dtype=np.int64)
        self.down = np.zeros(len(devices), dtype=np.int64)
        self.device_seconds = self.collector_seconds = 0.0

    def run(self, phase: Phase) -> None:
        """Exchange one message and answer with every remaining device."""
        for member in self._members_of(phase):
            start = time.perf_counter()
            message = self._message_for(phase, member)
            message_time = time.perf_counter()
            table = self.table_of(member) if phase is Phase.MASK else None
            table_time = time.perf_counter()
            answer = self._answer(phase, self.devices[member], message, table)
            answer_time = time.perf_counter()
            refusal = self.collector.add(phase, member, answer)
            self.collector_seconds += message_time - start + time.perf_counter() - answer_time
            self.device_seconds += answer_time - table_time
            assert refusal is None, refusal  # both roles are ours
            self.down[member] += len(message)
            self.up[member] += len(answer)
        if phase is Phase.UNMASK:
            return
        started = time.perf_counter()
        if self.collector.close() is Phase.ABORTED:
            raise ImpossibleError(
                f"a round needs {self.collector.round.least_survivors} devices to the end; "
                f"too few were left in phase {phase}",
                hint="ask a larger cohort, or allow for more dropouts; nothing was opened",
            )
        self.collector_seconds += time.perf_counter() - started

    def outcome(self) -> Outcome:
        started = time.perf_counter()
        total = self.collector.finish().astype(np.int64)
        self.collector_seconds += time.perf_counter() - started
        return Outcome(
            total=total,
            survivors=len(self.collector.survivors),
            bytes_up=self.up,
            bytes_down=self.down,
            device_seconds=self.device_seconds,
            collector_seconds=self.collector_seconds,
        )

    def _members_of(self, phase: Phase) -> list[int]:
        collector = self.collector
        takes = {
            Phase.ENROL: range(collector.round.cohort),
            Phase.SHARE: collector.keys,
            Phase.MASK: collector.boxes,
            Phase.ACK: collector.survivors,
            Phase.UNMASK: collector.acknowledgements
            if collector.round.mode == "semi_malicious"
            else collector.survivors,
        }[phase]
        return [
            member
            for member in sorted(takes)
            if member not in self.leaving
            or _STEPS.index(phase) < _STEPS.index(self.leaving[member])
        ]

    def _message_for(self, phase: Phase, member: int) -> bytes:
        collector = self.collector
        if phase is Phase.ENROL:
            return b""
        if phase is Phase.SHARE:
            return collector.roster_for(member)
        if phase is Phase.MASK:
            return collector.boxes_for(member)
        if phase is Phase.UNMASK and collector.round.mode == "semi_malicious":
            return collector.signatures()
        return collector.survivor_set()

    def _answer(
        self,
        phase: Phase,
        device: Participant,
        message: bytes,
        table: npt.NDArray[np.integer] | None,
    ) -> bytes:
        if phase is Phase.ENROL:
            return device.enrol()
        if phase is Phase.SHARE:
            return device.share(message)
        if phase is Phase.MASK:
            assert table is not None  # `run` has made it
            return device.mask(message, table)
        if phase is Phase.ACK:
            return device.acknowledge(message)
        if device.round.mode == "semi_malicious":  # it has signed the survivors already
            return device.unmask(device.survivors, message)
        return device.unmask(message)

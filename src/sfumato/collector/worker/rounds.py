"""The worker's side of masked rounds: only the worker drives them, from rows and into rows.

Members' messages are in the store before they are acknowledged, and the answers to members follow
from the store. In between the worker keeps a `Coordinator` for each round, which is rebuilt from
the rows after a restart: so a killed worker continues where it was, and nothing counts twice.

    waiting ─▶ enrol ─▶ share ─▶ mask ─▶ [ack ─▶] unmask ─▶ done
    and aborted from any of them: too few are left, or the budget refuses

Masked tables are added in groups, as they arrive (`table_queue`) or after another process has
stored them. A group is one transaction: the sum so far and the members whose tables are in it; no
table is kept. The set of survivors and the charge to the ledger are one transaction, too, before
members learn of them; so a round is charged once, if its sum could ever have been opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sfumato.collector import studies
from sfumato.collector.logs import count_field
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.round_tables import (
    ACCEPTED,
    ENDED,
    RoundRow,
    StoreOutcome,
    accepted_members,
)
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.collector.worker.replay import (
    PhaseMessages,
    expected_members,
    messages_of,
    replay,
)
from sfumato.collector.worker.round_cache import most_bytes
from sfumato.collector.worker.table_queue import QueuedTable, TableQueue
from sfumato.device import invitations
from sfumato.errors import BudgetError, DataError, ImpossibleError, MismatchError, StoreDamaged
from sfumato.flow.accumulator import Batch
from sfumato.flow.release import charge
from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.spec import to_json

GROUP_BYTES = 32 << 20  # size of a group of messages
MOST_LOST = 2  # how many rounds of a task may be charged without a result
_FEW_BYTES = 8 << 20  # wait for more tables below this size, while others are still to come

Outcome = Literal["done", "too_few", "over_budget", "false_secret", "few_shares", "damaged"]
"""How a round ended, for monitoring; it never says which devices were missing."""

Conclude = Callable[[Transaction, TaskRow, Batch | None], None]
"""Stores a task's batch, or that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """How long to wait for devices, and how often to try."""

    cohort_seconds: float = 600.0  # wait for more devices once there are enough
    phase_seconds: float = 120.0  # wait for the answers of a phase
    tries: int = 5  # how many rounds of a task may be aborted after enough devices enrolled


class RoundDriver:
    """Drives the rounds of all tasks of a store, in one worker at a time.

    Claim: a task's batch is the exact sum of the tables of the survivors of one round, or there is
        none; a round whose survivors were announced is on the ledger once.
    """

    def __init__(
        self,
        store: Store,
        *,
        key: bytes,
        now: Callable[[], float],
        rng: Rng,
        log: Callable[..., None],
        limits: RoundLimits,
        notify: Callable[[], None],
        scrub: Callable[[], None],
        tables: TableQueue | None = None,
        messages: PhaseMessages | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`notify` is called when there is something new for members, `scrub` when their messages
        were deleted; `tables` has the masked tables that this process received, and `messages` the
        messages to members."""
        self._store, self._key, self._now, self._rng, self._log = store, key, now, rng, log
        self._limits, self._notify, self._scrub = limits, notify, scrub
        self._tables, self._messages = tables or TableQueue(0), messages or PhaseMessages()
        self._metrics = metrics or Metrics()
        self._coordinators: dict[str, Coordinator] = {}  # by round
        self._rounds: set[str] = set()  # active rounds formed or rebuilt by this worker
        self._enough_since: dict[str, float] = {}  # by task

    def advance(
        self,
        study: StudyRow,
        task: TaskRow,
        *,
        is_over: bool,
        may_skip: bool = False,
        conclude: Conclude,
    ) -> bool:
        """Advance a task by one step; return whether there was one.

        `is_over`: no new device is asked. If rounds were aborted or lost too often, the task ends
        without an answer if the study `may_skip` it, else ImpossibleError is raised; BudgetError
        if the ledger refuses a round.
        """
        with self._store.reading() as tx:
            rounds, waiting = tx.rounds(task.id), tx.waiting_count(task.id)
        for row in rounds:
            if row.phase not in ENDED:
                return self._step(study, task, row, conclude)
        problem = self._check_tries(rounds)
        if is_over or (problem is not None and may_skip):
            with self._store.transaction() as tx:
                conclude(tx, task, None)
            self._notify()
            return True
        if problem is not None:
            raise problem
        return self._form(study, task, waiting)

    def _check_tries(self, rounds: Sequence[RoundRow]) -> ImpossibleError | None:
        """The reason not to try another round, if any. A round in which too few devices enrolled
        does not count: only public keys were sent, and silent devices no longer wait."""
        tries = [row for row in rounds if row.was_formed]
        lost = [row for row in tries if row.charged]
        if len(lost) >= MOST_LOST:
            return ImpossibleError(
                f"{len(lost)} masked rounds were charged without a result, the last because "
                f"{lost[-1].problem}",
                hint="their charges stay; a single device can cause this, so check which may join",
            )
        if len(tries) >= self._limits.tries:
            return ImpossibleError(
                f"{len(tries)} masked rounds were aborted, the last because {tries[-1].problem}",
                hint="ask more devices, or plan with a larger dropout",
            )
        return None

    def tidy(self) -> None:
        """Drop the remains of ended rounds."""
        with self._store.reading() as tx:
            ended = tx.ended_rounds()
        if ended:
            with self._store.transaction() as tx:
                tx.drop_ended_rounds()
            self._scrub()
        if self._coordinators:
            with self._store.reading() as tx:
                over = self._coordinators.keys() - tx.active_rounds().keys()
            for round_id in over:
                self._drop(round_id)
                self._rounds.discard(round_id)

    def _form(self, study: StudyRow, task: TaskRow, waiting: int) -> bool:
        """Form a round if enough devices wait; if more than needed, choose at random."""
        spec: Task = studies.task_of(task)
        target = spec.max_count - 1  # the cohort that the noise is planned for
        cohort = min(waiting, target)
        if waiting < least_waiting(spec):
            self._enough_since.pop(task.id, None)
            return False
        since = self._enough_since.setdefault(task.id, self._now())
        if waiting < target and 0 <= self._now() - since < self._limits.cohort_seconds:
            return False
        round = spec.masked_round(cohort, self._rng.words(2).tobytes().hex())
        try:
            round.parameters(cohort)
        except ImpossibleError:  # too few for a secure round
            return False
        with self._store.transaction() as tx:
            current = tx.lock_study(study.id)
            devices = sample_cohort(tx.waiting_devices(task.id), cohort, self._rng)
            if len(devices) < cohort or current is None or current.state != "collecting":
                return False  # the study has been closed or deleted
            roster = tuple(bytes(identity) for _, identity in devices)
            row = RoundRow(
                id=round.nonce,
                spec=to_json(round),
                phase=str(Phase.ENROL),
                is_open=1,
                deadline=self._deadline(),
                turn=1,
                charged=0,
            )
            coordinator = Coordinator(round, roster)
            signed = invitations.sign(round, coordinator.roster_root, self._key)
            invitation = json.dumps(signed)
            tx.add_round(task.id, row, invitation, [number for number, _ in devices])
        self._coordinators[round.nonce] = coordinator
        self._rounds.add(round.nonce)
        del self._enough_since[task.id]
        self._log("round-formed", study_id=study.id, task_id=task.id, **count_field(cohort))
        self._notify()
        return True

    def _step(self, study: StudyRow, task: TaskRow, row: RoundRow, conclude: Conclude) -> bool:
        try:
            coordinator = self._coordinator(row)
            return self._step_round(study, task, row, coordinator, conclude)
        except (DataError, StoreDamaged) as problem:
            # To build it again from the same rows would not help; the next round has other rows.
            self._drop(row.id)
            self._abort(study, task, row, "damaged", str(problem))
            return True
        except BaseException:
            # The state in memory may be ahead of the store, which is authoritative.
            self._drop(row.id)
            raise

    def _step_round(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        coordinator: Coordinator,
        conclude: Conclude,
    ) -> bool:
        phase, senders = coordinator.phase, _senders(coordinator)
        with self._store.reading() as tx:
            outcomes = tx.senders(row.id, str(phase))
        if phase != row.phase or not _agree(phase, outcomes, senders):
            # Another worker has continued the round while this one had lost its lock.
            self._drop(row.id)
            return True
        if phase is Phase.MASK and row.is_open:
            self._tables.open(row.id)
            if self._add_tables(row, coordinator, outcomes):
                return True
        is_complete = expected_members(coordinator) <= outcomes.keys()
        new = sorted(accepted_members(outcomes) - senders)
        many = phase is not Phase.MASK or len(new) * coordinator.round.vector_bytes >= _FEW_BYTES
        if new and (many or is_complete or not row.is_open):
            self._add_messages(row, coordinator, new)
            return True
        if is_complete or not row.is_open:
            self._close(study, task, row, coordinator, conclude)
            return True
        if self._now() >= row.deadline:
            with self._store.transaction() as tx:
                tx.close_phase(row.id)
            return True
        return False

    def _add_messages(
        self, row: RoundRow, coordinator: Coordinator, members: Sequence[int]
    ) -> None:
        """Add a group of these members' messages to the coordinator.

        Only tables change the store: the sum that they are in. After a restart, a worker adds the
        other messages again.
        """
        phase = coordinator.phase
        most = max(1, GROUP_BYTES // most_bytes(coordinator.round, phase))
        with self._store.reading() as tx:
            messages = tx.messages(row.id, str(phase), members[:most])
            digests = tx.message_digests(row.id, str(phase), members[:most])
        for member, body in messages.items():
            if fingerprint(body, coordinator.round.salt) != digests[member]:
                raise StoreDamaged(
                    f"a message of round {row.id} is damaged: it is not what was stored"
                )
        refusals = coordinator.add_all(phase, messages)
        outcomes = {member: str(refusal or ACCEPTED) for member, refusal in refusals.items()}
        if phase is not Phase.MASK:
            outcomes = {member: each for member, each in outcomes.items() if each != ACCEPTED}
        if outcomes:
            with self._store.transaction() as tx:
                tx.lock_round(row.id)  # before its messages, in the same order as elsewhere
                tx.set_outcomes(row.id, str(phase), outcomes, drop_bodies=phase is Phase.MASK)
                if phase is Phase.MASK:
                    tx.set_checkpoint(row.id, coordinator.checkpoint())
        self._report_refusals(outcomes.values())

    def _add_tables(
        self, row: RoundRow, coordinator: Coordinator, senders: Collection[int]
    ) -> bool:
        """Add a group of the tables that wait in memory; return whether there was one to add.

        The store answers the `senders` of earlier tables. If anything goes wrong, no table is
        accepted here, and the coordinator in memory is dropped.
        """
        tables = self._tables.take(row.id, GROUP_BYTES)
        first: dict[int, QueuedTable] = {}
        for table in tables:
            if table.member not in senders:
                first.setdefault(table.member, table)
        is_added = False
        try:
            if first:
                is_added = self._add_group(row, coordinator, first.values())
        finally:
            if first and not is_added:
                self._drop(row.id)
            new = set(first.values()) if is_added else set()
            outcomes: list[StoreOutcome | None] = [
                "new" if table in new else None for table in tables
            ]
            self._tables.settle(tables, outcomes)
        return bool(first)

    def _add_group(
        self, row: RoundRow, coordinator: Coordinator, tables: Collection[QueuedTable]
    ) -> bool:
        """Add these to the stored sum; if this returns False, the coordinator must be dropped."""
        before, phase = set(coordinator.survivors), str(Phase.MASK)
        bodies = {table.member: table.body for table in tables}
        outcomes = {
            member: (fingerprint(bodies[member], coordinator.round.salt), str(refusal or ACCEPTED))
            for member, refusal in coordinator.add_all(Phase.MASK, bodies).items()
        }
        with self._store.transaction() as tx:
            current = tx.lock_round(row.id)
            if current is None or current.phase != phase or not current.is_open:
                return False
            stored = tx.senders(row.id, phase)
            if _summands(stored) != before or stored.keys() & outcomes.keys():
                return False
            tx.add_outcomes(row.id, phase, outcomes)
            tx.set_checkpoint(row.id, coordinator.checkpoint())
        self._report_refusals(outcome for _, outcome in outcomes.values())
        return True

    def _report_refusals(self, outcomes: Iterable[str]) -> None:
        refused = sum(outcome != ACCEPTED for outcome in outcomes)
        if refused:
            self._log("messages-refused", **count_field(refused))
            self._notify()  # so that refused members need not wait

    def _drop(self, round_id: str) -> None:
        """Drop the state of a round from memory; the store has what counts."""
        self._coordinators.pop(round_id, None)
        self._tables.close(round_id)
        self._messages.drop(round_id)

    def _close(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        coordinator: Coordinator,
        conclude: Conclude,
    ) -> None:
        """End a phase whose messages have all been added."""
        phase, spec = coordinator.phase, studies.task_of(task)
        self._tables.close(row.id)
        if phase is Phase.UNMASK:
            self._finish(study, task, row, coordinator, conclude)
            return
        if coordinator.close() is Phase.ABORTED:
            problem = f"too few devices were left in the phase {phase}"
            remaining = coordinator.keys if phase is Phase.ENROL else None
            self._abort(study, task, row, "too_few", problem, remaining=remaining)
            return
        charging = phase is Phase.MASK
        loss = studies.charge_of(study, spec) if charging else None
        self._messages.put(row.id, str(coordinator.phase), messages_of(coordinator))
        try:
            if loss is not None:
                with self._store.reading() as tx:  # outside the transaction: composing is slow
                    StoreLedger(tx).check(
                        campaign=spec.campaign, cohort=spec.cohort, task=spec.id, loss=loss
                    )
            with self._store.transaction() as tx:
                if not _is_alive(tx, study, row):
                    self._drop(row.id)
                    return
                if loss is not None:
                    charge(spec, ledger=StoreLedger(tx), loss=loss)
                tx.open_phase(
                    row.id,
                    str(coordinator.phase),
                    self._deadline(),
                    charged=charging or bool(row.charged),
                )
        except BudgetError as problem:
            self._abort(study, task, row, "over_budget", str(problem))
            raise
        self._messages.drop(row.id, str(phase))
        self._log("round-phase", study_id=study.id, task_id=task.id, reason=coordinator.phase)
        self._notify()

    def _finish(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        coordinator: Coordinator,
        conclude: Conclude,
    ) -> None:
        spec, liars = studies.task_of(task), set(coordinator.liars)
        try:
            total = coordinator.finish()
        except (ImpossibleError, MismatchError):
            # Naming the device would not help: its key was made for this one round.
            if coordinator.liars - liars:
                problem = "a device shared another secret than it had committed to"
                self._abort(study, task, row, "false_secret", problem)
            else:
                problem = "too few devices sent the shares that open the sum"
                self._abort(study, task, row, "few_shares", problem)
            return
        table = total.astype(np.int64).reshape(spec.sketch.shape)
        batch = Batch(spec.id, table, len(coordinator.survivors), charged=True)
        with self._store.transaction() as tx:
            if not _is_alive(tx, study, row):
                return
            conclude(tx, task, batch)
            tx.end_round(row.id, "done")
        self._drop(row.id)
        self._metrics.rounds.labels("done").inc()
        self._scrub()
        self._notify()

    def _abort(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        outcome: Outcome,
        problem: str,
        *,
        remaining: Collection[int] | None = None,
    ) -> None:
        """Abort a round without a result. The next one has a new nonce, new keys and new noise.

        `remaining` members, if not None, wait for it, and the others do not.
        """
        with self._store.transaction() as tx:
            if _is_alive(tx, study, row):
                if remaining is not None:
                    tx.dissolve(row.id, remaining)
                tx.end_round(row.id, "aborted", problem)
        self._drop(row.id)
        self._metrics.rounds.labels(outcome).inc()
        self._log("round-aborted", study_id=study.id, task_id=task.id, reason=problem)
        self._scrub()
        self._notify()

    def _coordinator(self, row: RoundRow) -> Coordinator:
        """The round's coordinator, from its rows. Devices cut off by a restart get more time."""
        if row.id in self._coordinators:
            return self._coordinators[row.id]
        with self._store.reading() as tx:
            coordinator = replay(tx, row)
            self._check_rows(tx, row, coordinator)
        if row.id not in self._rounds:
            with self._store.transaction() as tx:
                tx.set_deadline(row.id, max(row.deadline, self._deadline()))
        self._rounds.add(row.id)
        self._coordinators[row.id] = coordinator
        return coordinator

    @staticmethod
    def _check_rows(tx: Transaction, row: RoundRow, coordinator: Coordinator) -> None:
        """Raise if a snapshot of the rows is inconsistent, so that rebuilding the round again would
        not help."""
        current = tx.round(row.id)
        if current is not None and current.phase == row.phase:
            outcomes, senders = tx.senders(row.id, row.phase), _senders(coordinator)
            if not _agree(coordinator.phase, outcomes, senders):
                raise DataError(
                    f"the rows of round {row.id} do not agree: the sum is of {len(senders)} "
                    f"tables, and {len(_summands(outcomes))} were accepted"
                )

    def _deadline(self) -> int:
        return math.ceil(self._now() + self._limits.phase_seconds)


def least_waiting(task: Task) -> int:
    """The fewest waiting devices with which a round begins after a while: half of those that it can
    do without may be missing, so that as many may still drop out."""
    cohort = task.max_count - 1
    return cohort - -(-(cohort - task.min_count) // 2)


def sample_cohort(
    waiting: Sequence[tuple[int, bytes]], count: int, rng: Rng
) -> list[tuple[int, bytes]]:
    """A random sample of this size, in random order."""
    if not waiting:
        return []
    order = np.argsort(rng.words(len(waiting)), kind="stable")
    return [waiting[place] for place in order[:count].tolist()]


def _summands(outcomes: Mapping[int, str]) -> set[int]:
    return {member for member, outcome in outcomes.items() if outcome == ACCEPTED}


def _agree(phase: Phase, outcomes: Mapping[int, str], senders: Collection[int]) -> bool:
    """Whether the rows agree with a coordinator that has the messages of these senders. The rows
    say which tables were accepted, but of other messages only which were refused."""
    if phase is Phase.MASK:
        return _summands(outcomes) == senders
    return accepted_members(outcomes).issuperset(senders)


def _senders(coordinator: Coordinator) -> set[int]:
    """The members whose messages of the phase it has accepted."""
    return {
        Phase.ENROL: set(coordinator.keys),
        Phase.SHARE: set(coordinator.boxes),
        Phase.MASK: coordinator.survivors,
        Phase.ACK: set(coordinator.acknowledgements),
        Phase.UNMASK: set(coordinator.answers),
    }[coordinator.phase]


def _is_alive(tx: Transaction, study: StudyRow, row: RoundRow) -> bool:
    """Whether neither the study nor the round has been ended, nor can be before this transaction
    is over."""
    current, round = tx.lock_study(study.id), tx.round(row.id)
    return (
        current is not None
        and current.state in ("collecting", "closing")
        and round is not None
        and round.phase == row.phase
    )

"""The worker's side of masked rounds: it alone drives them, from rows and into rows.

What members sent is in the store before it is acknowledged, and what they are told follows from
what is there. In between the worker keeps a `Coordinator` for each round, which is made again from
the rows after a restart: so a worker that is killed goes on where it was, and nothing counts twice.

    waiting ─▶ enrol ─▶ share ─▶ mask ─▶ [ack ─▶] unmask ─▶ done
    and aborted from any of them: too few are left, or the budget refuses

Masked tables are added in groups, as they arrive (`table_queue`) or from where another process
stored them. A group is one transaction: the sum so far and whose tables are in it; no table is
kept. The set of survivors and the charge to the ledger are one, too, before anybody is told; so a
round is charged once, if its sum could ever have been opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sfumato.collector import studies
from sfumato.collector.logs import counted
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.round_tables import (
    ENDED,
    TAKEN,
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
from sfumato.errors import BudgetError, DataError, ImpossibleError, MismatchError
from sfumato.flow.accumulator import Batch
from sfumato.flow.release import charge
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.spec import from_json, to_json
from sfumato.study import Study

GROUP_BYTES = 32 << 20  # of messages that are taken together
MOST_LOST = 2  # rounds of a task that were charged and opened nothing
_FEW_BYTES = 8 << 20  # of tables that are not worth a group, while others are still to come
_LIKELY_BITS = 10  # a smaller cohort keeps its floor but for one round in a thousand

Outcome = Literal["done", "too_few", "over_budget", "false_secret", "few_shares"]
"""How a round ended, for who watches: never of whom it was that too few were left."""

Conclude = Callable[[Transaction, TaskRow, Batch | None], None]
"""Puts a task's batch, or that there is none, where the study finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long rounds are waited for."""

    cohort_seconds: float = 600.0  # for more devices, when there are enough
    phase_seconds: float = 120.0  # for the answers of a phase
    tries: int = 5  # rounds of a task that may be aborted after enough have enrolled


class RoundDriver:
    """The rounds of all tasks of a store. One worker at a time has them.

    Claim: a task's batch is the exact sum of the tables of the survivors of one round, or there is
        none; a round of which survivors were told is on the ledger once.
    """

    def __init__(
        self,
        store: Store,
        *,
        key: bytes,
        now: Callable[[], float],
        rng: Rng,
        log: Callable[..., None],
        patience: Patience,
        notify: Callable[[], None],
        forget: Callable[[], None],
        tables: TableQueue | None = None,
        messages: PhaseMessages | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`notify` is called when there is something new for members, `forget` when what they sent
        was deleted; `tables` has the masked tables that this process received, and `messages` the
        messages to members."""
        self._store, self._key, self._now, self._rng, self._log = store, key, now, rng, log
        self._patience, self._notify, self._forget = patience, notify, forget
        self._tables, self._messages = tables or TableQueue(0), messages or PhaseMessages()
        self._metrics = metrics or Metrics()
        self._coordinators: dict[str, Coordinator] = {}  # by round
        self._known: set[str] = set()  # rounds under way that were made, or made again, here
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
        """Bring a task a step on; whether there was one to go.

        `is_over`: nobody new is asked. If rounds were aborted or lost too often, the task is over
        without an answer where that `may_skip` it, and else ImpossibleError is raised; BudgetError
        if the ledger refuses one.
        """
        with self._store.reading() as tx:
            rounds, waiting = tx.rounds(task.id), tx.waiting(task.id)
        for row in rounds:
            if row.phase not in ENDED:
                return self._step(study, task, row, conclude)
        problem = self._tried_too_often(rounds)
        if is_over or (problem is not None and may_skip):
            with self._store.transaction() as tx:
                conclude(tx, task, None)
            self._notify()
            return True
        if problem is not None:
            raise problem
        return self._form(study, task, waiting)

    def _tried_too_often(self, rounds: Sequence[RoundRow]) -> ImpossibleError | None:
        """Why there is not one more, if so. A round to which too few enrolled is no try: nothing
        but public keys was sent, and who did not answer waits no more."""
        tried = [row for row in rounds if row.came_together]
        lost = [row for row in tried if row.charged]
        if len(lost) >= MOST_LOST:
            return ImpossibleError(
                f"{len(lost)} masked rounds were charged and opened nothing, the last because "
                f"{lost[-1].problem}",
                hint="each of them is spent; a single device can do this, so see who may join",
            )
        if len(tried) >= self._patience.tries:
            return ImpossibleError(
                f"{len(tried)} masked rounds were aborted, the last because {tried[-1].problem}",
                hint="ask more devices than may vanish, or plan with a larger dropout",
            )
        return None

    def tidy(self) -> None:
        """Drop what is left of rounds that are over, whoever ended them."""
        with self._store.reading() as tx:
            ended = tx.ended()
        if ended:
            with self._store.transaction() as tx:
                tx.drop_ended()
            self._forget()
        if self._coordinators:
            with self._store.reading() as tx:
                over = self._coordinators.keys() - tx.under_way().keys()
            for round_id in over:
                self._drop(round_id)
                self._known.discard(round_id)

    def _form(self, study: StudyRow, task: TaskRow, waiting: int) -> bool:
        """Make a round of those who wait, if they are enough; of some by lot, if they are more."""
        spec: Task = from_json(task.spec)
        wanted = spec.max_count - 1  # as many as its noise was made for
        cohort = min(waiting, wanted)
        if waiting < spec.min_count or not _is_likely_kept(study, spec, cohort):
            self._enough_since.pop(task.id, None)
            return False
        since = self._enough_since.setdefault(task.id, self._now())
        if waiting < wanted and 0 <= self._now() - since < self._patience.cohort_seconds:
            return False
        round = spec.masked_round(cohort, self._rng.words(2).tobytes().hex())
        try:
            round.parameters(cohort)
        except ImpossibleError:  # so few cannot keep a secret from each other
            return False
        with self._store.transaction() as tx:
            current = tx.held_study(study.id)
            chosen = _drawn(tx.who_waits(task.id), cohort, self._rng)
            if len(chosen) < cohort or current is None or current.state != "collecting":
                return False  # the study was closed or deleted meanwhile
            roster = tuple(bytes(identity) for _, identity in chosen)
            row = RoundRow(
                id=round.nonce,
                spec=to_json(round),
                phase=str(Phase.ENROL),
                is_open=1,
                deadline=self._deadline(),
                turn=1,
                charged=0,
            )
            invitation = json.dumps(invitations.sign(round, roster, self._key))
            tx.add_round(task.id, row, invitation, [number for number, _ in chosen])
        self._coordinators[round.nonce] = Coordinator(round, roster)
        self._known.add(round.nonce)
        del self._enough_since[task.id]
        self._log("round-formed", study_id=study.id, task_id=task.id, **counted(cohort))
        self._notify()
        return True

    def _step(self, study: StudyRow, task: TaskRow, row: RoundRow, conclude: Conclude) -> bool:
        try:
            coordinator = self._coordinator(row)
            return self._stepped(study, task, row, coordinator, conclude)
        except BaseException:
            # What is in memory may be ahead of the store, which is what counts.
            self._drop(row.id)
            raise

    def _stepped(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        coordinator: Coordinator,
        conclude: Conclude,
    ) -> bool:
        phase, answered = coordinator.phase, _answered(coordinator)
        with self._store.reading() as tx:
            outcomes = tx.senders(row.id, str(phase))
        if phase != row.phase or not _agree(phase, outcomes, answered):
            # Another worker has been at it, while this one had lost its lock.
            self._drop(row.id)
            return True
        if phase is Phase.MASK and row.is_open:
            self._tables.open(row.id)
            if self._add_tables(row, coordinator, outcomes):
                return True
        all_in = expected_members(coordinator) <= outcomes.keys()
        came = sorted(accepted_members(outcomes) - answered)
        many = phase is not Phase.MASK or len(came) * coordinator.round.vector_bytes >= _FEW_BYTES
        if came and (many or all_in or not row.is_open):
            self._take(row, coordinator, came)
            return True
        if all_in or not row.is_open:
            self._close(study, task, row, coordinator, conclude)
            return True
        if self._now() >= row.deadline:
            with self._store.transaction() as tx:
                tx.close_phase(row.id)
            return True
        return False

    def _take(self, row: RoundRow, coordinator: Coordinator, came: Sequence[int]) -> None:
        """Take a group of the messages that came.

        Of what is taken, only tables leave a mark in the store: the sum that they are in. A worker
        that starts anew takes the other messages once more.
        """
        phase = coordinator.phase
        most = max(1, GROUP_BYTES // most_bytes(coordinator.round, phase))
        with self._store.reading() as tx:
            messages = tx.messages(row.id, str(phase), came[:most])
        refusals = coordinator.add_all(phase, messages)
        outcomes = {member: str(refusal or TAKEN) for member, refusal in refusals.items()}
        if phase is not Phase.MASK:
            outcomes = {member: said for member, said in outcomes.items() if said != TAKEN}
        if outcomes:
            with self._store.transaction() as tx:
                tx.held_round(row.id)  # before its messages, as everybody does
                tx.settle(row.id, str(phase), outcomes, forget=phase is Phase.MASK)
                if phase is Phase.MASK:
                    tx.set_checkpoint(row.id, coordinator.checkpoint())
        self._say_refused(outcomes.values())

    def _add_tables(self, row: RoundRow, coordinator: Coordinator, known: Collection[int]) -> bool:
        """Add a group of the tables that wait in memory; whether there was one to add.

        Whoever is `known` to have sent a table is answered by the store. If anything is in the way,
        none is taken here, and what is in memory is forgotten.
        """
        tables = self._tables.take(row.id, GROUP_BYTES)
        first: dict[int, QueuedTable] = {}
        for table in tables:
            if table.member not in known:
                first.setdefault(table.member, table)
        is_added = False
        try:
            if first:
                is_added = self._is_added(row, coordinator, first.values())
        finally:
            if first and not is_added:
                self._drop(row.id)
            new = set(first.values()) if is_added else set()
            outcomes: list[StoreOutcome | None] = [
                "new" if table in new else None for table in tables
            ]
            self._tables.settle(tables, outcomes)
        return bool(first)

    def _is_added(
        self, row: RoundRow, coordinator: Coordinator, tables: Collection[QueuedTable]
    ) -> bool:
        """Whether these are in the stored sum now; if not, what is in memory is of no use."""
        before, phase = set(coordinator.survivors), str(Phase.MASK)
        bodies = {table.member: table.body for table in tables}
        outcomes = {
            member: (fingerprint(bodies[member], coordinator.round.salt), str(refusal or TAKEN))
            for member, refusal in coordinator.add_all(Phase.MASK, bodies).items()
        }
        with self._store.transaction() as tx:
            current = tx.held_round(row.id)
            if current is None or current.phase != phase or not current.is_open:
                return False
            known = tx.senders(row.id, phase)
            if _taken(known) != before or known.keys() & outcomes.keys():
                return False
            tx.add_settled(row.id, phase, outcomes)
            tx.set_checkpoint(row.id, coordinator.checkpoint())
        self._say_refused(outcome for _, outcome in outcomes.values())
        return True

    def _say_refused(self, outcomes: Iterable[str]) -> None:
        refused = sum(outcome != TAKEN for outcome in outcomes)
        if refused:
            self._log("messages-refused", **counted(refused))
            self._notify()  # who was refused need not wait

    def _drop(self, round_id: str) -> None:
        """Forget what is in memory of a round; the store has what counts."""
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
        """End a phase of which everything that came is taken."""
        phase, spec = coordinator.phase, from_json(task.spec)
        self._tables.close(row.id)
        if phase is Phase.UNMASK:
            self._finish(study, task, row, coordinator, conclude)
            return
        if coordinator.close() is Phase.ABORTED:
            problem = f"too few devices were left in the phase {phase}"
            staying = coordinator.keys if phase is Phase.ENROL else None
            self._abort(study, task, row, "too_few", problem, staying=staying)
            return
        charging = phase is Phase.MASK
        loss = studies.charge_of(study, spec) if charging else None
        self._messages.put(row.id, str(coordinator.phase), messages_of(coordinator))
        try:
            if loss is not None:
                with self._store.reading() as tx:  # it takes a second, and is remembered
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
        spec, known = from_json(task.spec), set(coordinator.liars)
        try:
            total = coordinator.finish()
        except (ImpossibleError, MismatchError):
            # Whose fault it was helps nobody: its key was made for this once.
            if coordinator.liars - known:
                problem = "a device shared another secret than it had committed to"
                self._abort(study, task, row, "false_secret", problem)
            else:
                problem = "too few devices gave their shares of what opens the sum"
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
        self._forget()
        self._notify()

    def _abort(
        self,
        study: StudyRow,
        task: TaskRow,
        row: RoundRow,
        outcome: Outcome,
        problem: str,
        *,
        staying: Collection[int] | None = None,
    ) -> None:
        """Nothing more is opened of it. The next one has a new nonce, new keys and new noise.

        If `staying` are given, they wait again, and the others of the round do not.
        """
        with self._store.transaction() as tx:
            if _is_alive(tx, study, row):
                if staying is not None:
                    tx.dissolve(row.id, staying)
                tx.end_round(row.id, "aborted", problem)
        self._drop(row.id)
        self._metrics.rounds.labels(outcome).inc()
        self._log("round-aborted", study_id=study.id, task_id=task.id, reason=problem)
        self._forget()
        self._notify()

    def _coordinator(self, row: RoundRow) -> Coordinator:
        """The round's, as its rows tell it. Who was cut off by a restart gets more time."""
        if row.id in self._coordinators:
            return self._coordinators[row.id]
        with self._store.reading() as tx:
            coordinator = replay(tx, row)
            self._check_rows(tx, row, coordinator)
        if row.id not in self._known:
            with self._store.transaction() as tx:
                tx.set_deadline(row.id, max(row.deadline, self._deadline()))
        self._known.add(row.id)
        self._coordinators[row.id] = coordinator
        return coordinator

    @staticmethod
    def _check_rows(tx: Transaction, row: RoundRow, coordinator: Coordinator) -> None:
        """Raise if the rows, as they are at one moment, are not those of one round: to make it from
        them again would not help."""
        current = tx.round(row.id)
        if current is not None and current.phase == row.phase:
            outcomes, answered = tx.senders(row.id, row.phase), _answered(coordinator)
            if not _agree(coordinator.phase, outcomes, answered):
                raise DataError(
                    f"the rows of round {row.id} do not agree: the sum is of {len(answered)} "
                    f"tables, and {len(_taken(outcomes))} were taken"
                )

    def _deadline(self) -> int:
        return math.ceil(self._now() + self._patience.phase_seconds)


def _is_likely_kept(study: StudyRow, task: Task, cohort: int) -> bool:
    """Whether so many leave the task's floor, if devices vanish as the study expects."""
    asked: Study = from_json(study.study)
    expected = SecureSum(corrupt=asked.corrupt, dropout=asked.dropout)
    return expected.least(cohort, grace_bits=_LIKELY_BITS) >= task.min_count


def _drawn(waiting: Sequence[tuple[int, bytes]], count: int, rng: Rng) -> list[tuple[int, bytes]]:
    """So many of those that wait, by lot, and in an order by lot."""
    if not waiting:
        return []
    order = np.argsort(rng.words(len(waiting)), kind="stable")
    return [waiting[place] for place in order[:count].tolist()]


def _taken(outcomes: Mapping[int, str]) -> set[int]:
    return {member for member, outcome in outcomes.items() if outcome == TAKEN}


def _agree(phase: Phase, outcomes: Mapping[int, str], answered: Collection[int]) -> bool:
    """Whether a coordinator has taken what it should, by the rows. Of a table that is taken the
    rows say so; of any other message, if it was refused."""
    if phase is Phase.MASK:
        return _taken(outcomes) == answered
    return accepted_members(outcomes).issuperset(answered)


def _answered(coordinator: Coordinator) -> set[int]:
    """Whose messages of the phase it has taken."""
    return {
        Phase.ENROL: set(coordinator.keys),
        Phase.SHARE: set(coordinator.boxes),
        Phase.MASK: coordinator.survivors,
        Phase.ACK: set(coordinator.acknowledgements),
        Phase.UNMASK: set(coordinator.answers),
    }[coordinator.phase]


def _is_alive(tx: Transaction, study: StudyRow, row: RoundRow) -> bool:
    """Whether neither the study nor the round was ended by somebody else, nor is before this
    transaction is over."""
    current, round = tx.held_study(study.id), tx.round(row.id)
    return (
        current is not None
        and current.state in ("collecting", "closing")
        and round is not None
        and round.phase == row.phase
    )

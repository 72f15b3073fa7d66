"""The worker: seals what came, closes what is full, releases what is done. One step at a time.

Each thing it does is one transaction, and what is to be done next is read from the store; so a
worker that was killed at any moment and started again gives the same releases. At most one runs
over a store at a time: whoever calls `step` holds `Store.worker_lock`.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from json import dumps

from sfumato.collector import logs, studies
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.collector.studies import campaign_of, plan_of
from sfumato.collector.worker.replay import PhaseMessages
from sfumato.collector.worker.rounds import Patience, RoundDriver
from sfumato.collector.worker.table_queue import TableQueue
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import SfumatoError, StoreError
from sfumato.flow.accumulator import Batch, accumulator, to_bytes
from sfumato.flow.admission import Rejection, first_of_each
from sfumato.flow.release import Release, noised_sum
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.task import AnyTask
from sfumato.planning import Plan
from sfumato.privacy import Rng, SystemRng
from sfumato.questions.answers import bounding_note
from sfumato.questions.promise import TIME
from sfumato.questions.question import Participation
from sfumato.spec import from_json

SEAL_SECONDS = 60.0  # that uploads of an open task wait: the more are sealed together, the better
MOST_REPORTS = 50_000  # sealed together
MOST_BYTES = 8 << 20  # of reports sealed together, about: other writers wait meanwhile
_EPOCH = date(1970, 1, 1)


class Worker:
    """Brings every study as far as it can come.

    Claim: each report that was acknowledged is in its study's release once, whatever came again
        and whenever the worker was killed; what a release costs is on the ledger with it.
    """

    def __init__(
        self,
        store: Store,
        *,
        key: bytes,
        now: Callable[[], float] = time.time,
        rng: Rng | None = None,
        log: Callable[..., None] = logs.log,
        retention_days: int | None = None,
        seal_seconds: float = SEAL_SECONDS,
        patience: Patience | None = None,
        notify: Callable[[], None] = lambda: None,
        tables: TableQueue | None = None,
        messages: PhaseMessages | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`key` signs the offers of tasks that follow others; `retention_days` after its end, all
        that a study's devices sent is dropped (None: never). `notify` is called when there is
        something new for the devices of a masked round, for which `patience` waits; `tables` has
        the tables of some of them, and `messages` the messages to them."""
        self._store, self._key, self._now, self._log = store, key, now, log
        self._rng = rng or SystemRng()
        self._retention_days, self._seal_seconds = retention_days, seal_seconds
        self._sealed_at: dict[str, float] = {}  # by task
        self._campaigns: studies.Memory = {}
        self._rounds = RoundDriver(
            store,
            key=key,
            now=now,
            rng=self._rng,
            log=log,
            patience=patience or Patience(),
            notify=notify,
            forget=self._forget_soon,
            tables=tables,
            messages=messages,
            metrics=metrics,
        )
        self._tidied: set[str] = set()  # studies at their end, of which nothing is left to drop
        self._is_forgotten = False  # whether what was deleted is out of the store's files

    def step(self) -> bool:
        """One turn for every study; whether there was anything to do, so that more may follow.

        A study that cannot be brought further fails, and says why; the others go on. A StoreError
        is raised: try again later.
        """
        self._rounds.tidy()
        with self._store.reading() as tx:
            rows = tx.studies()
        turns = [self._turn(row) for row in rows]
        if not self._is_forgotten:
            with suppress(StoreError):  # a full disk, say: the next step tries again
                self._is_forgotten = self._store.forget()
            give_back()
        return any(turns)

    def _turn(self, row: StudyRow) -> bool:
        try:
            return self._advance(row) if row.state in studies.ALIVE else self._tidy(row)
        except StoreError:
            raise
        except Exception as problem:  # this study's own trouble, whatever it is
            ours = isinstance(problem, SfumatoError)
            reason = str(problem) if ours else f"internal error: {type(problem).__name__}"
            self._end(row, "failed", reason)
            return True

    def _advance(self, row: StudyRow) -> bool:
        with self._store.reading() as tx:
            tasks = [task for task in tx.tasks(row.id) if task.state != "done"]
        if not tasks:
            if self._is_over(row) or not self._ask_more(row):
                self._release(row)
            return True
        turns = [self._advance_task(row, task) for task in tasks]
        return any(turns)

    def _ask_more(self, row: StudyRow) -> bool:
        """Open the next task of a study whose others are done; whether there is one."""
        with self._store.reading() as tx:
            task = studies.next_task(tx, row, key=self._key, memory=self._campaigns)
        if task is None:
            return False
        with self._store.transaction() as tx:
            current = tx.held_study(row.id)
            if current is not None and current.state == "collecting":
                studies.add_task(tx, task)
        return True

    def _advance_task(self, row: StudyRow, task: TaskRow) -> bool:
        """Close, seal or finish it; or go on with its masked round."""
        if from_json(task.spec).is_masked:
            return self._rounds.advance(
                row,
                task,
                is_over=task.state == "closing" or self._is_over(row),
                may_skip=studies.may_skip(row),
                conclude=self._conclude,
            )
        with self._store.reading() as tx:
            sealed = tx.sealed_count(task.id)
            waiting = tx.received(task.id) - tx.counts(task.id).get("repeated", 0) - sealed
        is_full = task.wanted is not None and sealed >= task.wanted
        if task.state == "open" and (is_full or self._is_over(row)):
            with self._store.transaction() as tx:
                is_closing = tx.set_task_state(task.id, "closing", expected=["open"])
            if is_closing:
                told = logs.counted(sealed)
                self._log("task-closing", study_id=row.id, task_id=task.id, **told)
            return True
        if waiting and (task.state == "closing" or self._is_time(task, sealed, waiting)):
            self._seal(row, task)
            return True
        if task.state == "closing" and not waiting:
            self._finish(row, task)
            return True
        return False

    def _is_over(self, row: StudyRow) -> bool:
        """Whether its devices are asked no more."""
        closes = studies.terms_of(row).closes
        return row.state == "closing" or (closes is not None and self._today() > closes)

    def _is_time(self, task: TaskRow, sealed: int, waiting: int) -> bool:
        """Whether an open task is sealed now. It is full when so many *different* reports came, and
        who came twice is found by sealing."""
        since = self._now() - self._sealed_at.setdefault(task.id, self._now())
        return (
            not 0 <= since < self._seal_seconds  # below 0: the clock was set back
            or waiting >= MOST_REPORTS
            or (task.wanted is not None and sealed + waiting >= task.wanted)
        )

    def _seal(self, row: StudyRow, task: TaskRow) -> None:
        spec = from_json(task.spec)
        with self._store.reading() as tx:
            uploads = tx.pending(task.id, most_reports(spec))
        messages = first_of_each(body for _, _, body in uploads)
        came = sum(count for _, count, _ in uploads)
        with self._store.transaction() as tx:
            fresh = tx.unseen(task.id, list(messages))
            kept = [message for name, message in messages.items() if name in fresh]
            if spec.most_reports is not None:  # `room` has seen to it, but for older tasks
                kept = kept[: max(0, spec.most_reports - tx.sealed_count(task.id))]
            if kept:
                together = accumulator(spec)
                together.add(kept)
                tx.add_sealed(task.id, together.seal(rng=self._rng), len(kept))
            tx.delete_uploads(task.id, [number for number, _, _ in uploads])
            tx.give_room(task.id, came - len(kept))
            for counter, by in (
                ("reports", len(kept)),
                ("repeated", came - len(fresh)),
                (f"rejected:{Rejection.BATCH_FULL}", len(fresh) - len(kept)),
            ):
                if by:
                    tx.count(task.id, counter, by)
        self._sealed_at[task.id] = self._now()
        self._forget_soon()
        if told := logs.counted(len(kept)):  # of few, not even that there were any
            self._log("sealed", study_id=row.id, task_id=task.id, **told)

    def _finish(self, row: StudyRow, task: TaskRow) -> None:
        """The end of a task to which all reports are sealed."""
        spec = from_json(task.spec)
        if not spec.is_local:
            with self._store.reading() as tx:
                StoreLedger(tx).check(
                    campaign=spec.campaign,
                    cohort=spec.cohort,
                    task=spec.id,
                    loss=studies.charge_of(row, spec),
                )
        with self._store.transaction() as tx:
            current = tx.held_study(row.id)
            if current is None or current.state not in studies.ALIVE:
                return
            count = tx.sealed_count(task.id)
            batch: Batch | None = None
            if not spec.is_local and count >= spec.min_count:
                together = accumulator(spec)
                for sealed in tx.sealed(task.id):
                    together.merge(sealed)
                summed = together.batch(count)
                assert isinstance(summed, Batch)  # as it is not local
                batch = summed
            self._conclude(tx, task, batch)

    def _conclude(self, tx: Transaction, task: TaskRow, batch: Batch | None) -> None:
        """A task is done, and what its batch says is an answer."""
        if batch is not None:
            spec, row = from_json(task.spec), studies.found(tx, task.study_id)
            loss = studies.charge_of(row, spec)
            answer = noised_sum(spec, batch, ledger=StoreLedger(tx), rng=self._rng, loss=loss)
            tx.add_answer(task.id, to_bytes(answer.table), answer.count)
            if batch.charged:  # a masked one, of which no reports were counted before
                tx.count(task.id, "reports", batch.count)
        tx.set_task_state(task.id, "done", expected=studies.UNDONE)
        tx.end_waiting(task.id)
        told = logs.counted(tx.counts(task.id).get("reports", 0))
        self._log("task-done", study_id=task.study_id, task_id=task.id, **told)

    def _release(self, row: StudyRow) -> None:
        started = time.perf_counter()
        release = release_of(self._store, row, self._campaigns)
        day = (_EPOCH + timedelta(days=self._today())).isoformat()
        release = replace(release.timed(time.perf_counter() - started, TIME), released=day)
        text = dumps(release.to_dict(), ensure_ascii=False, allow_nan=False)
        self._end(row, "released", release=text, parameters=release.model)

    def _end(
        self,
        row: StudyRow,
        state: studies.End,
        problem: str = "",
        *,
        release: str | None = None,
        parameters: bytes | None = None,
    ) -> None:
        with self._store.transaction() as tx:
            if not studies.end(tx, row.id, state, problem):  # it was deleted meanwhile
                return
            if release is not None:
                tx.put_release(row.id, release)
            if parameters is not None:
                tx.put_released_model(row.id, parameters)
        self._campaigns.pop(row.id, None)
        self._forget_soon()
        level = logging.ERROR if state == "failed" else logging.INFO
        fields = {"reason": problem} if problem else {}
        self._log(f"study-{state}", level=level, study_id=row.id, **fields)

    def _tidy(self, row: StudyRow) -> bool:
        """Drop what a study at its end has no more use for. One that was deleted is cleaned once
        more, since this worker may have been at it meanwhile."""
        kept = self._retention_days is None or self._today() - row.since < self._retention_days
        if row.id in self._tidied or (row.state != "deleted" and kept):
            return False
        with self._store.transaction() as tx:
            for task in tx.tasks(row.id):
                tx.set_task_state(task.id, "done", expected=studies.UNDONE)
            tx.drop_data(row.id)
        self._tidied.add(row.id)
        self._forget_soon()
        return False

    def _forget_soon(self) -> None:
        """What devices sent was deleted: at the end of this step it leaves the files, too."""
        self._is_forgotten = False

    def _today(self) -> int:
        return int(self._now() // DAY_SECONDS)


def most_reports(task: AnyTask) -> int:
    """How many reports of a task are sealed together, so that they fit into memory and a
    transaction is short."""
    return max(1, min(MOST_REPORTS, MOST_BYTES // (HEADER_BYTES + task.message_bytes)))


def give_back() -> None:
    """Return free memory to the system, where the C library can (glibc).

    It keeps what was freed between pieces that are still in use, and under steady load that grows
    by megabytes a minute, though no more is in use. This takes milliseconds: after much was freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_of(store: Store, row: StudyRow, memory: studies.Memory | None = None) -> Release:
    """The release of a study whose tasks are done; ImpossibleError if too few have answered."""
    with store.reading() as tx:
        planned = plan_of(tx, row)
        campaign = campaign_of(tx, row, planned, memory)
        tasks = [
            (from_json(task.spec), tx.counts(task.id).get("reports", 0))
            for task in tx.tasks(row.id)
        ]
    answered = [(task, count) for task, count in tasks if count]
    devices = _devices(tasks)
    participation = Participation(
        devices=devices,
        respondents=devices,
        rounds=len(answered),
        tasks=answered,
        notes=_notes(planned, devices),
    )
    return planned.design.answer(campaign, planned, participation)


def _devices(tasks: Sequence[tuple[AnyTask, int]]) -> int:
    """Devices behind reports to these tasks: those of one cohort are the same for all its tasks,
    those of one campaign are in one of its cohorts, and several campaigns ask the same."""
    campaigns: dict[str, dict[str, int]] = {}
    for task, count in tasks:
        cohorts = campaigns.setdefault(task.campaign, {})
        cohorts[task.cohort] = max(cohorts.get(task.cohort, 0), count)
    return max((sum(cohorts.values()) for cohorts in campaigns.values()), default=0)


def _notes(planned: Plan, reports: int) -> tuple[str, ...]:
    question = planned.design
    came = (
        f"{reports:,} devices whose tables are in the sums"
        if planned.study.is_masked
        else f"{reports:,} reports that came"
    )
    notes = [
        *planned.warnings,
        f"counts are of the {came}: how many devices were asked, or sent nothing, is not known "
        "over a network",
    ]
    if question.items_per_device is not None:
        notes.append(bounding_note(question.items_per_device))
    if reports < question.devices:
        notes.append(f"the plan was made for {question.devices:,} devices")
    return tuple(notes)

"""The worker: seals uploads, closes full tasks and releases finished studies, one step at a time.

Each action is one transaction, and the next one is read from the store; so a worker that is killed
at any moment and started again gives the same releases. At most one worker runs per store: the
caller of `step` holds `Store.worker_lock`.

For the same reason an action that failed can be tried again: it has left nothing behind. A charge
and the noised sum that it pays for are one transaction. An error before its commit leaves neither,
and nobody has seen the noise; after it, every try reads the same noised sum, and charges nothing.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from json import dumps

import pyarrow as pa

from sfumato import files
from sfumato.collector import logs, studies
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import FaultRow, Store, StudyRow, TaskRow, Transaction
from sfumato.collector.studies import campaign_of, plan_of, task_of
from sfumato.collector.worker import partitions
from sfumato.collector.worker.replay import PhaseMessages
from sfumato.collector.worker.rounds import RoundDriver, RoundLimits
from sfumato.collector.worker.table_queue import TableQueue
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import (
    BudgetError,
    ImpossibleError,
    SfumatoError,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from sfumato.flow.accumulator import Batch, accumulator, to_bytes
from sfumato.flow.admission import Rejection, first_of_each
from sfumato.flow.release import Release, noised_sum
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.task import AnyTask, Task
from sfumato.privacy import Rng, SystemRng
from sfumato.questions.answers import network_participation
from sfumato.questions.promise import TIME

SEAL_SECONDS = 60.0  # how long uploads to an open task wait, so that many are sealed together
MOST_REPORTS = 50_000  # most reports sealed together
MOST_BYTES = 8 << 20  # about the most bytes sealed together, as other writers have to wait
FIRST_PAUSE_SECONDS = 1  # after the first fault of a study; doubled by each further one
LONGEST_PAUSE_SECONDS = 900
_FINAL = (ImpossibleError, BudgetError)  # the study's outcome: trying again changes nothing
_OF_THE_STORE = (StoreFull, StoreReadOnly, StoreUnavailable)  # they concern every study
_EPOCH = date(1970, 1, 1)


class Worker:
    """Brings every study as far as possible.

    Claim: each acknowledged report is in its study's release exactly once, whatever was sent twice
        and whenever the worker was killed or failed; the cost of a release is on the ledger with
        it, once.

    What becomes of a study after an error:

    - ImpossibleError (too few devices, too many lost rounds) and BudgetError (a store's budget
      never grows, and charges are never taken back) are its outcome: it fails, with the reason.
    - StoreFull, StoreReadOnly and StoreUnavailable concern every study, and are raised by `step`.
    - Everything else is a *fault* of this study: memory ran out, a library failed, its data is
      damaged (StoreDamaged, DataError), its spec cannot be read by this version. The study stays as
      it is and is tried again, after pauses that double up to `LONGEST_PAUSE_SECONDS`; the fault is
      in the store, for everybody to see, until a try succeeds. Other studies go on.
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
        lake: str | None = None,
        seal_seconds: float = SEAL_SECONDS,
        limits: RoundLimits | None = None,
        notify: Callable[[], None] = lambda: None,
        tables: TableQueue | None = None,
        messages: PhaseMessages | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`key` signs the offers of later tasks; the data that devices sent is dropped
        `retention_days` after the end of their study (None: never). `lake` is an address to which
        the sealed reports of local studies move (`partitions`). `limits` are those of masked
        rounds; `notify` is called when there is something new for their devices, `tables` has
        tables that this process received, and `messages` the messages to members."""
        self._store, self._key, self._now, self._log = store, key, now, log
        self._rng = rng or SystemRng()
        self._retention_days, self._seal_seconds = retention_days, seal_seconds
        self._lake = lake
        self._metrics = metrics or Metrics()
        self._sealed_at: dict[str, float] = {}  # by task
        self._unsaved_faults: dict[str, FaultRow] = {}  # by study
        self._campaigns: studies.CampaignCache = {}  # of studies under way
        self._rounds = RoundDriver(
            store,
            key=key,
            now=now,
            rng=self._rng,
            log=log,
            limits=limits or RoundLimits(),
            notify=notify,
            scrub=self._request_scrub,
            tables=tables,
            messages=messages,
            metrics=self._metrics,
        )
        self._tidied: set[str] = set()  # ended studies without data to drop
        self._is_scrubbed = False  # whether deleted data is out of the store's files

    def step(self) -> bool:
        """Give every study one turn; return whether there was anything to do, so that more may
        follow.

        An error in the work for one study does not concern the others; the class says what becomes
        of it. An error of the whole store is raised: try again later.
        """
        self._save_faults()
        self._rounds.tidy()
        with self._store.reading() as tx:
            rows, faults = tx.studies(), tx.faults()
        turns = [self._turn(row, faults.get(row.id)) for row in rows]
        if not self._is_scrubbed:
            with suppress(StoreError):  # such as a full disk: the next step tries again
                self._is_scrubbed = self._store.scrub()
            trim_memory()
        return any(turns)

    def _turn(self, row: StudyRow, fault: FaultRow | None) -> bool:
        pause = 0.0 if fault is None else fault.next_try - self._now()
        if 0 < pause <= LONGEST_PAUSE_SECONDS:  # above: the clock was set back
            return False
        try:
            is_busy = self._attempt(row)
            if fault is not None:
                with self._store.transaction() as tx:
                    tx.clear_fault(row.id)
        except _OF_THE_STORE:
            raise
        except Exception as problem:  # of any kind: it concerns this study only
            self._note_fault(row, 1 if fault is None else fault.tries + 1, problem)
            return False
        return is_busy

    def _attempt(self, row: StudyRow) -> bool:
        if row.state not in studies.ALIVE:
            self._tidy(row)
            return False
        try:
            return self._advance(row)
        except _FINAL as problem:
            self._end(row, "failed", str(problem))
            return True

    def _note_fault(self, row: StudyRow, tries: int, problem: Exception) -> None:
        self._campaigns.pop(row.id, None)  # it may have been changed halfway
        self._metrics.worker_errors.inc()
        self._log(
            "study-failing",
            level=logging.ERROR,
            study_id=row.id,
            count=tries,
            reason=logs.reason_of(problem),
        )
        pause = min(FIRST_PAUSE_SECONDS << min(tries - 1, 20), LONGEST_PAUSE_SECONDS)
        next_try = math.ceil(self._now() + pause)
        self._unsaved_faults[row.id] = FaultRow(row.id, words_of(problem), tries, next_try)
        self._save_faults()

    def _save_faults(self) -> None:
        """Store the faults. After an error of its own connection the worker can write nothing until
        it has the lock again; so this is repeated at the next step."""
        if self._unsaved_faults:
            with self._store.transaction() as tx:
                for fault in self._unsaved_faults.values():
                    tx.set_fault(fault)
            self._unsaved_faults.clear()

    def _advance(self, row: StudyRow) -> bool:
        with self._store.reading() as tx:
            tasks = [task for task in tx.tasks(row.id) if task.state != "done"]
        if not tasks:
            if self._is_over(row) or not self._open_next_task(row):
                self._release(row)
            return True
        turns = [self._advance_task(row, task) for task in tasks]
        return any(turns)

    def _open_next_task(self, row: StudyRow) -> bool:
        """Open the next task of a study whose others are done; return whether there is one."""
        with self._store.reading() as tx:
            task = studies.next_task(tx, row, key=self._key, now=self._now(), cache=self._campaigns)
        if task is None:
            return False
        with self._store.transaction() as tx:
            current = tx.lock_study(row.id)
            if current is not None and current.state == "collecting":
                studies.add_task(tx, task)
        return True

    def _advance_task(self, row: StudyRow, task: TaskRow) -> bool:
        """Close, seal or finish a task, or advance its masked round."""
        if task_of(task).is_masked:
            return self._rounds.advance(
                row,
                task,
                is_over=task.state == "closing" or self._is_over(row),
                may_skip=studies.design_of(row).may_skip,
                conclude=self._conclude,
            )
        with self._store.reading() as tx:
            sealed, waiting = tx.sealed_count(task.id), tx.pending_count(task.id)
        enough = self._enough(row, task)
        is_full = enough is not None and sealed >= enough
        if task.state == "open" and (is_full or self._is_over(row)):
            with self._store.transaction() as tx:
                is_closing = tx.set_task_state(task.id, "closing", expected=["open"])
            if is_closing:
                fields = logs.count_field(sealed)
                self._log("task-closing", study_id=row.id, task_id=task.id, **fields)
            return True
        may_close = enough is not None and sealed + waiting >= enough
        if waiting and (task.state == "closing" or self._is_time(task, waiting, may_close)):
            self._seal(row, task)
            return True
        is_complete = task.state == "closing" and not waiting
        if self._move(row, task, rest=is_complete):
            return True
        if is_complete:
            self._finish(row, task)
            return True
        return False

    def _move(self, row: StudyRow, task: TaskRow, *, rest: bool) -> bool:
        """Move sealed reports of a local study to the lake, if there is one."""
        spec = task_of(task)
        if self._lake is None or not spec.is_local:
            return False
        has_moved = partitions.move(
            self._store, row, task, spec, to=self._lake, rest=rest, rng=self._rng
        )
        if has_moved:
            self._request_scrub()
        return has_moved

    def _is_over(self, row: StudyRow) -> bool:
        """Whether its devices are no longer asked."""
        closes = studies.terms_of(row).closes
        return row.state == "closing" or (closes is not None and self._today() > closes)

    def _enough(self, row: StudyRow, task: TaskRow) -> int | None:
        """The number of reports with which a task closes now; None if it stays open with any."""
        if task.target is None or task.open_until is None:
            return task.target
        if self._now() < task.open_until:
            return None
        minimum = studies.terms_of(row).minimum
        if minimum is None:
            return task.target
        spec = task_of(task)
        return max(min(minimum, task.target), 1 if spec.is_local else spec.min_count)

    def _is_time(self, task: TaskRow, waiting: int, may_close: bool) -> bool:
        """Whether to seal an open task now. It closes with enough *different* reports, and
        duplicates are only found by sealing."""
        since = self._now() - self._sealed_at.setdefault(task.id, self._now())
        return (
            not 0 <= since < self._seal_seconds  # below 0: the clock was set back
            or waiting >= MOST_REPORTS
            or may_close
        )

    def _seal(self, row: StudyRow, task: TaskRow) -> None:
        spec = task_of(task)
        with self._store.reading() as tx:
            uploads = tx.pending_uploads(task.id, most_reports(spec))
        messages = first_of_each(body for _, _, body in uploads)
        received = sum(count for _, count, _ in uploads)
        with self._store.transaction() as tx:
            fresh = tx.add_report_ids(task.id, list(messages))
            reports = [message for name, message in messages.items() if name in fresh]
            if spec.most_reports is not None:  # older tasks may have more: they had no limit
                reports = reports[: max(0, spec.most_reports - tx.sealed_count(task.id))]
            if reports:
                together = accumulator(spec)
                together.add(reports)
                tx.add_sealed(task.id, together.seal(rng=self._rng), len(reports))
            tx.delete_uploads(task.id, [number for number, _, _ in uploads])
            tx.return_capacity(task.id, received - len(reports))
            for counter, by in (
                ("reports", len(reports)),
                ("repeated", received - len(fresh)),
                (f"rejected:{Rejection.BATCH_FULL}", len(fresh) - len(reports)),
            ):
                if by:
                    tx.count(task.id, counter, by)
        self._sealed_at[task.id] = self._now()
        self._request_scrub()
        if fields := logs.count_field(len(reports)):  # a few reports are not logged at all
            self._log("sealed", study_id=row.id, task_id=task.id, **fields)

    def _finish(self, row: StudyRow, task: TaskRow) -> None:
        """End a task whose reports are all sealed."""
        spec, batch = task_of(task), None
        if not spec.is_local:
            with self._store.reading() as tx:  # no report comes any more, so it does not change
                StoreLedger(tx).check(
                    campaign=spec.campaign,
                    cohort=spec.cohort,
                    task=spec.id,
                    loss=studies.charge_of(row, spec),
                )
                batch = _sum_of(tx, spec)
        with self._store.transaction() as tx:
            current = tx.lock_study(row.id)
            if current is None or current.state not in studies.ALIVE:
                return
            self._conclude(tx, task, batch)

    def _conclude(self, tx: Transaction, task: TaskRow, batch: Batch | None) -> None:
        """Mark a task as done, and store the noised sum of its batch as its answer."""
        if batch is not None:
            spec, row = task_of(task), studies.get_study(tx, task.study_id)
            loss = studies.charge_of(row, spec)
            answer = noised_sum(spec, batch, ledger=StoreLedger(tx), rng=self._rng, loss=loss)
            tx.add_answer(task.id, to_bytes(answer.table), answer.count)
            if batch.charged:  # a masked one, whose reports have not been counted yet
                tx.count(task.id, "reports", batch.count)
        tx.set_task_state(task.id, "done", expected=studies.UNFINISHED)
        tx.end_waiting(task.id)
        tx.delete_report_ids(task.id)  # no device sends to it any more
        fields = logs.count_field(tx.counts(task.id).get("reports", 0))
        self._log("task-done", study_id=task.study_id, task_id=task.id, **fields)

    def _release(self, row: StudyRow) -> None:
        started = time.perf_counter()
        release = release_of(self._store, row, self._campaigns)
        day = (_EPOCH + timedelta(days=self._today())).isoformat()
        release = replace(release.timed(time.perf_counter() - started, TIME), released=day)
        text = dumps(release.to_dict(), ensure_ascii=False, allow_nan=False)
        if self._lake is not None:
            partitions.finish(self._store, row, at=self._lake)
        self._end(row, "released", release=text, parameters=release.model_bytes)

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
            if not studies.end(tx, row.id, state, problem):  # it has been deleted
                return
            if release is not None:
                tx.put_release(row.id, release)
            if parameters is not None:
                tx.put_released_model(row.id, parameters)
        self._campaigns.pop(row.id, None)
        self._request_scrub()
        level = logging.ERROR if state == "failed" else logging.INFO
        fields = {"reason": problem} if problem else {}
        self._log(f"study-{state}", level=level, study_id=row.id, **fields)

    def _tidy(self, row: StudyRow) -> None:
        """Drop the data of an ended study. A deleted one is cleaned once more, since this worker
        may have written to it while it was being deleted."""
        retains = self._retention_days is None or self._today() - row.since < self._retention_days
        if row.id in self._tidied or (row.state != "deleted" and retains):
            return
        with self._store.transaction() as tx:
            current = tx.lock_study(row.id)
            if current is None or current.state != row.state:  # it is being tried again
                return
            for task in tx.tasks(row.id):
                tx.set_task_state(task.id, "done", expected=studies.UNFINISHED)
            if self._lake is not None:
                files.delete_folder(partitions.folder_of(self._lake, row.id))
            tx.drop_data(row.id)
        self._tidied.add(row.id)
        self._request_scrub()

    def _request_scrub(self) -> None:
        """Remove deleted data from the store's files at the end of this step."""
        self._is_scrubbed = False

    def _today(self) -> int:
        return int(self._now() // DAY_SECONDS)


def most_reports(task: AnyTask) -> int:
    """The most reports of a task to seal together, so that they fit into memory and a transaction
    is short."""
    return max(1, min(MOST_REPORTS, MOST_BYTES // (HEADER_BYTES + task.message_bytes)))


def trim_memory() -> None:
    """Return free memory to the system: Arrow's, and the C library's where it can (glibc).

    It keeps free memory between pieces that are still in use, which under steady load grows by
    megabytes per minute. This takes milliseconds, so call it after much was freed.
    """
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_of(store: Store, row: StudyRow, cache: studies.CampaignCache | None = None) -> Release:
    """The release of a study whose tasks are done; ImpossibleError if too few devices answered."""
    with store.reading() as tx:
        planned = plan_of(tx, row)
        campaign = campaign_of(tx, row, planned, cache)
        tasks = [(task_of(task), tx.counts(task.id).get("reports", 0)) for task in tx.tasks(row.id)]
    return planned.design.answer(campaign, planned, network_participation(planned, tasks))


def words_of(problem: Exception) -> str:
    """A fault in words for people who may see the study. Messages of other libraries may show
    values, and those of the store name files and hosts; both are for the log only."""
    is_ours = isinstance(problem, SfumatoError) and not isinstance(problem, StoreError)
    if is_ours or isinstance(problem, StoreDamaged):
        return str(problem)
    return f"internal error: {type(problem).__name__}"


def _sum_of(tx: Transaction, task: Task) -> Batch | None:
    """The sum of a task's sealed tables; None if there are too few."""
    count = tx.sealed_count(task.id)
    if count < task.min_count:
        return None
    together = accumulator(task)
    for sealed in tx.sealed_records(task.id):
        together.merge(sealed)
    batch = together.batch(count)
    assert isinstance(batch, Batch)  # since the task is not local
    return batch

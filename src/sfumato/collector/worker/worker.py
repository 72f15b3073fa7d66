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
from datetime import date, timedelta
from json import dumps
from typing import TYPE_CHECKING

from sfumato.collector import campaigns, logs, sealing, studies
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.collector.studies import campaign_of, plan_of
from sfumato.collector.worker.replay import Spoken
from sfumato.collector.worker.rounds import Patience, Rounds
from sfumato.collector.worker.table_queue import Arrivals
from sfumato.device.offers import AnyTask
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import ImpossibleError, SfumatoError, StoreError
from sfumato.flow.accumulator import Batch, LocalCollector, Rejection
from sfumato.flow.aggregation import Masked
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import Cost, MeanRelease, ModelRelease, Release, noised_sum
from sfumato.flow.secure_sum import bytes_of
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import Discoverer, WordTask
from sfumato.planning import Plan
from sfumato.privacy import Rng, SystemRng, Tally
from sfumato.questions import answers
from sfumato.questions import answers as open_answers
from sfumato.questions.answers import Asked
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramCampaign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.mean.design import MeanCampaign
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.prefix_search.design import PrefixCampaign
from sfumato.spec import from_json

if TYPE_CHECKING:
    from sfumato.learn.campaign import TrainingCampaign


SEAL_SECONDS = 60.0  # that uploads of an open task wait: the more are sealed together, the better
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
        tell: Callable[[], None] = lambda: None,
        arrivals: Arrivals | None = None,
        spoken: Spoken | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`key` signs the offers of tasks that follow others; `retention_days` after its end, all
        that a study's devices sent is dropped (None: never). `tell` is called when there is
        something new for the devices of a masked round, for which `patience` waits; the tables of
        some are among the `arrivals`, and some are told what is `spoken`."""
        self._store, self._key, self._now, self._log = store, key, now, log
        self._rng = rng or SystemRng()
        self._retention_days, self._seal_seconds = retention_days, seal_seconds
        self._sealed_at: dict[str, float] = {}  # by task
        self._trainings: studies.Memory = {}
        self._rounds = Rounds(
            store,
            key=key,
            now=now,
            rng=self._rng,
            log=log,
            patience=patience or Patience(),
            tell=tell,
            forget=self._forget_soon,
            arrivals=arrivals,
            spoken=spoken,
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
            task = studies.next_task(tx, row, key=self._key, memory=self._trainings)
        if task is None:
            return False
        with self._store.transaction() as tx:
            current = tx.held_study(row.id)
            if current is not None and current.state == "collecting":
                studies.add_task(tx, task)
        return True

    def _advance_task(self, row: StudyRow, task: TaskRow) -> bool:
        """Close, seal or finish it; or go on with its masked round."""
        if _is_masked(task):
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
            or waiting >= sealing.MOST_REPORTS
            or (task.wanted is not None and sealed + waiting >= task.wanted)
        )

    def _seal(self, row: StudyRow, task: TaskRow) -> None:
        spec = from_json(task.spec)
        with self._store.reading() as tx:
            uploads = tx.pending(task.id, sealing.most_reports(spec))
        messages = sealing.first_of_each(body for _, _, body in uploads)
        came = sum(count for _, count, _ in uploads)
        with self._store.transaction() as tx:
            fresh = tx.unseen(task.id, list(messages))
            kept = [message for name, message in messages.items() if name in fresh]
            if isinstance(spec, Task):  # `room` has seen to it, but for tasks from before it
                kept = kept[: max(0, spec.max_count - tx.sealed_count(task.id))]
            if kept:
                tx.add_sealed(task.id, sealing.seal(spec, kept, rng=self._rng), len(kept))
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
        if isinstance(spec, Task):
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
            batch = None
            if isinstance(spec, Task) and count >= spec.min_count:
                batch = sealing.batch_of(spec, tx.sealed(task.id), count)
            self._conclude(tx, task, batch)

    def _conclude(self, tx: Transaction, task: TaskRow, batch: Batch | None) -> None:
        """A task is done, and what its batch says is an answer."""
        if batch is not None:
            spec, row = from_json(task.spec), studies.found(tx, task.study_id)
            loss = studies.charge_of(row, spec)
            answer = noised_sum(spec, batch, ledger=StoreLedger(tx), rng=self._rng, loss=loss)
            tx.add_answer(task.id, sealing.to_bytes(answer.table), answer.count)
            if batch.charged:  # a masked one, of which no reports were counted before
                tx.count(task.id, "reports", batch.count)
        tx.set_task_state(task.id, "done", expected=studies.UNDONE)
        tx.end_waiting(task.id)
        told = logs.counted(tx.counts(task.id).get("reports", 0))
        self._log("task-done", study_id=task.study_id, task_id=task.id, **told)

    def _release(self, row: StudyRow) -> None:
        started = time.perf_counter()
        release = release_of(self._store, row)
        release = answers.timed(release, time.perf_counter() - started)
        day = _EPOCH + timedelta(days=self._today())
        text = dumps(
            release.to_dict() | {"released": day.isoformat()}, ensure_ascii=False, allow_nan=False
        )
        parameters = release.parameters if isinstance(release, ModelRelease) else None
        self._end(row, "released", release=text, parameters=parameters)

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
        self._trainings.pop(row.id, None)
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


def _is_masked(task: TaskRow) -> bool:
    spec = from_json(task.spec)
    return isinstance(spec, Task) and isinstance(spec.aggregation, Masked)


def give_back() -> None:
    """Return free memory to the system, where the C library can (glibc).

    It keeps what was freed between pieces that are still in use, and under steady load that grows
    by megabytes a minute, though no more is in use. This takes milliseconds: after much was freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_of(store: Store, row: StudyRow) -> Release | MeanRelease | ModelRelease:
    """The release of a study whose tasks are done; ImpossibleError if too few have answered."""
    with store.reading() as tx:
        planned = plan_of(tx, row)
        tasks = [
            (from_json(task.spec), tx.counts(task.id).get("reports", 0))
            for task in tx.tasks(row.id)
        ]
        if isinstance(planned.design, LocalDesign):
            tallies, wrong = _tallies(tx, [task for task, _ in tasks])
        elif isinstance(planned.design, WordDesign):
            search = planned.design.discoverer
            tallies, sent, wrong = _word_tallies(tx, search, [task for task, _ in tasks])
        else:
            campaign, wrong = campaign_of(tx, row, planned), 0
    counted = [task for task, count in tasks if count]
    devices = _devices(tasks)
    asked = Asked(devices=devices, rounds=len(counted), notes=_notes(planned, devices, wrong))
    if isinstance(planned.design, LocalDesign):
        return answers.from_tallies(planned, tallies, asked, answered=devices)
    if isinstance(planned.design, WordDesign):
        return answers.from_words(planned, search, tallies, asked, sent=sent)
    training = campaigns.trained(campaign)
    if training is not None:
        return _from_training(planned, training, asked, [each for each in tasks if each[1]])
    return _from_sums(planned, campaign, asked, counted)


def _from_training(
    planned: Plan, campaign: TrainingCampaign, asked: Asked, tasks: Sequence[tuple[Task, int]]
) -> ModelRelease:
    """The model after the rounds that were held; those to come were charged nothing."""
    if not tasks:
        raise ImpossibleError("no round was held, so the model is what it was at the start")
    rounds, held = campaign.design.rounds, campaign.held
    missing = f"{held:,} of {rounds:,} rounds were held: too few devices came to the others"
    sent = sum(sum(bytes_of(task)) * count for task, count in tasks)
    return ModelRelease.of(
        campaign.parameters(),
        rate=campaign.rate,
        rounds_held=held,
        privacy=planned.privacy,
        cost=Cost(
            devices=asked.devices,
            rounds=held,
            bytes_per_device=round(sent / asked.devices),
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=planned.summary(),
        notes=asked.notes if held == rounds else (*asked.notes, missing),
    )


def _from_sums(
    planned: Plan, campaign: Campaign, asked: Asked, tasks: Sequence[Task]
) -> Release | MeanRelease:
    if not (campaign.answered if isinstance(campaign, FrequencyCampaign) else tasks):
        raise ImpossibleError("no device answered, so there is nothing to estimate from")
    if isinstance(campaign, FrequencyCampaign):
        return answers.from_sums(planned, campaign, asked)
    if campaign.next_task() is not None:
        raise ImpossibleError(
            f"this study was closed after {len(tasks)} of its tasks, and it takes all of them"
        )
    if isinstance(campaign, PrefixCampaign):
        return open_answers.from_prefixes(planned, campaign, asked)
    if isinstance(campaign, MeanCampaign):
        return open_answers.from_mean(planned, campaign, asked, tasks)
    assert isinstance(campaign, HeavyHitterCampaign | HistogramCampaign)  # there is no other
    return open_answers.from_list(planned, campaign, asked)


def _devices(tasks: Sequence[tuple[AnyTask, int]]) -> int:
    """Devices behind reports to these tasks: those of one cohort are the same for all its tasks,
    those of one campaign are in one of its cohorts, and several campaigns ask the same."""
    campaigns: dict[str, dict[str, int]] = {}
    for task, count in tasks:
        cohorts = campaigns.setdefault(task.campaign, {})
        cohorts[task.cohort] = max(cohorts.get(task.cohort, 0), count)
    return max((sum(cohorts.values()) for cohorts in campaigns.values()), default=0)


def _tallies(tx: Transaction, tasks: Sequence[LocalTask]) -> tuple[list[Tally], int]:
    """A tally a task, and how many records no device could have made."""
    collectors = [LocalCollector(task) for task in tasks]
    for collector in collectors:
        for data in tx.sealed(collector.task.id):
            collector.add_records(sealing.records_of(data))
    wrong = sum(collector.rejected[Rejection.IMPOSSIBLE] for collector in collectors)
    return [collector.tally for collector in collectors], wrong


def _word_tallies(
    tx: Transaction, search: Discoverer, tasks: Sequence[WordTask]
) -> tuple[list[Tally], int, int]:
    """The tallies of a search, how many records they hold, and how many were not possible."""
    tallies, sent, wrong = search.tallies(), 0, 0
    for task in tasks:
        for data in tx.sealed(task.id):
            for records in sealing.as_rows(sealing.records_of(data), search.record_bytes):
                sent += records.shape[0]
                wrong += search.fold(records, tallies)
    return tallies, sent - wrong, wrong


def _notes(planned: Plan, reports: int, wrong: int) -> tuple[str, ...]:
    design = planned.design
    came = (
        f"{reports:,} devices whose tables are in the sums"
        if planned.study.masked or planned.study.trust == "secure"
        else f"{reports:,} reports that came"
    )
    notes = [
        *planned.warnings,
        f"counts are of the {came}: how many devices were asked, or sent nothing, is not known "
        "over a network",
    ]
    if planned.contributions is not None:
        notes.append(answers.bounding(planned.contributions))
    if reports < design.devices:
        notes.append(f"the plan was made for {design.devices:,} devices")
    if wrong:
        notes.append(f"{wrong:,} records that no device makes were left out")
    return tuple(notes)

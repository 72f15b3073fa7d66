"""The life of a study: planned, opened to devices, closed, deleted; its tasks one after another.

A study gets a public seed of its own when it is created, so that no two studies share hash
functions, tasks or a place in the ledger. Its question, plan and progress are in the store; nothing
is kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa

from sfumato import lake
from sfumato.collector.problems import Problem
from sfumato.collector.requests import Request, from_lines, to_lines
from sfumato.collector.store.digests import Row
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import (
    FaultRow,
    Store,
    StudyRow,
    StudyState,
    TaskRow,
    TaskState,
    Transaction,
)
from sfumato.device import offers
from sfumato.device.offers import Offer
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import DataError, SpecError, StoreDamaged, StudyError
from sfumato.flow.accumulator import RecordBatch, TallyAccumulator, records_of, table_from_bytes
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import digest_of
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import AnyTask, LocalTask
from sfumato.flow.word_discovery import WordTask
from sfumato.planning import Plan, plan
from sfumato.privacy import Charge, Rng
from sfumato.questions.question import Question
from sfumato.questions.registry import planner_of, read_plan
from sfumato.spec import from_json, to_json
from sfumato.study import Study

End = Literal["released", "failed", "deleted"]  # states in which a study asks nothing more
ALIVE: tuple[StudyState, ...] = ("collecting", "closing")
UNFINISHED: tuple[TaskState, ...] = ("open", "closing")
LONGEST_OPEN = 366 * DAY_SECONDS  # of one task
_DIGEST = re.compile("[0-9a-f]{64}")
RESTORED = (  # the problem of a study that a restored store must not release
    "the store was restored from a copy, and this study may have been released after the copy was "
    "made; its open tasks are charged"
)


CampaignCache: TypeAlias = dict[str, tuple[Campaign, int]]
"""Campaigns by study, with how many of their tasks were absorbed; the store is authoritative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The part of the request that a study's row keeps beside the plan."""

    request: str  # its digest
    dictionary: str | None
    daily_reports: int
    delay_seconds: int
    lifetime_epsilon: float | None
    closes: int | None
    open_seconds: int | None = None
    minimum: int | None = None
    passcode: bool = False  # whether devices need one


@dataclass(frozen=True, slots=True)
class NextTask:
    """A task to open, and the parameters that its devices start from."""

    row: TaskRow
    model: bytes | None = field(default=None, repr=False)


def create(
    store: Store,
    request: Request | Mapping[str, Any],
    *,
    key: bytes,
    rng: Rng,
    now: Callable[[], float],
) -> StudyRow:
    """Plan a study and open its first task; repeating a request returns the same study.

    Raises StudyError or ImpossibleError for an impossible study, BudgetError if the ledger would
    refuse its release, Problem name-taken if another study has the name.
    """
    request = request if isinstance(request, Request) else Request.from_mapping(request)
    study, dictionary = request.parse_study(), request.dictionary()
    body = None if dictionary is None else to_lines(dictionary)
    dictionary_digest = None if body is None else hashlib.sha256(body).hexdigest()
    digest = request.digest(study, dictionary_digest)
    with store.reading() as tx:
        if row := _existing_study(tx, request.name, digest):
            return row
    today = int(now() // DAY_SECONDS)
    if request.closes is not None and request.closes < today:
        raise StudyError(
            f"closes must not be in the past: today is day {today}; got {request.closes}"
        )
    _check_open_time(request, study, now())
    passcode = None if request.passcode_digest is None else _bytes_of(request.passcode_digest)
    study = study.with_seed(rng)
    planned = plan(study, items=request.items)
    seeded = planned.design.with_seed(rng)
    planned = replace(planned, design=seeded.question)
    if planned.dictionary is not None:  # the planner may have crossed it with segments
        body = to_lines(planned.dictionary)
        dictionary_digest = hashlib.sha256(body).hexdigest()
    terms = Terms(
        request=digest,
        dictionary=dictionary_digest,
        daily_reports=_daily_reports(request, study),
        delay_seconds=request.delay_seconds,
        lifetime_epsilon=request.lifetime_epsilon,
        closes=request.closes,
        open_seconds=request.open_seconds,
        minimum=request.minimum,
        passcode=passcode is not None,
    )
    row = StudyRow(
        id=rng.words(2).tobytes().hex(),
        name=request.name,
        purpose=request.purpose,
        state="collecting",
        study=to_json(study),
        design=to_json(planned.design),
        plan=json.dumps(planned.to_dict()),
        settings=json.dumps(asdict(terms)),
    )
    with store.transaction() as tx:
        if existing := _existing_study(tx, request.name, digest):
            return existing
        if body is not None and dictionary_digest is not None:
            tx.add_dictionary(dictionary_digest, body)
        tx.add_study(row)
        if passcode is not None:
            tx.set_passcode(row.id, passcode)
        if seeded.secret:
            tx.set_secret(row.id, seeded.secret)
        first = next_task(tx, row, key=key, now=now())
        assert first is not None  # every plan has a task
        target = first.row.target
        if request.minimum is not None and target is not None and request.minimum > target:
            raise StudyError(
                f"minimum must be at most the {target:,} reports that the study is planned for; "
                f"got {request.minimum:,}"
            )
        add_task(tx, first)
        task = from_json(first.row.spec)
        if not task.is_local:
            StoreLedger(tx).check(
                campaign=task.campaign,
                cohort=task.cohort,
                task=task.id,
                loss=charge_of(row, task),
            )
        return get_study(tx, row.id)


def next_task(
    tx: Transaction, row: StudyRow, *, key: bytes, now: float, cache: CampaignCache | None = None
) -> NextTask | None:
    """The next task of a study whose tasks are all done, if it has another one.

    A campaign may need minutes for this, so do not hold a lock on the store meanwhile.
    """
    number, planned, terms = len(tx.tasks(row.id)), plan_of(tx, row), terms_of(row)
    campaign, question = campaign_of(tx, row, planned, cache), planned.design
    task, model = campaign.next_task(), campaign.parameters()
    if task is None:
        return None
    of_tables = {} if task.is_local else _terms_of_tables(planned, task)
    offer = Offer(
        study=row.name,
        purpose=row.purpose,
        question=planned.study.question,
        trust=planned.study.trust,
        task=task,
        epsilon=task.epsilon,
        **of_tables,
        daily_reports=terms.daily_reports,
        delay_seconds=terms.delay_seconds,
        lifetime_epsilon=terms.lifetime_epsilon,
        items_per_report=task.items_per_report,
        dictionary=terms.dictionary,
        closes=terms.closes,
        model=None if model is None else question.model_terms(model, number),
        passcode=terms.passcode,
        segments=planned.study.segments,
    )
    devices = question.closing_count(task, answering=1 - planned.study.expected_dropout)
    task_row = TaskRow(
        id=task.id,
        study_id=row.id,
        number=number,
        spec=to_json(task),
        envelope=json.dumps(offers.sign(offer, key)),
        state="open",
        target=devices * (terms.daily_reports if task.is_local else 1),
        capacity_left=task.most_reports,
        open_until=None if terms.open_seconds is None else math.ceil(now + terms.open_seconds),
    )
    return NextTask(task_row, model)


def add_task(tx: Transaction, task: NextTask) -> None:
    """Open a task, including its model."""
    tx.add_task(task.row)
    if task.model is not None:
        tx.add_model(task.row.id, digest_of(task.model), task.model)


def close(store: Store, study_id: str) -> StudyRow:
    """Stop collecting; the worker then releases the results. Closing twice is harmless."""
    with store.transaction() as tx:
        get_study(tx, study_id)
        if tx.set_study_state(study_id, "closing", expected=["collecting"]):
            for task in tx.tasks(study_id):
                tx.set_task_state(task.id, "closing", expected=["open"])
        row = get_study(tx, study_id)
        if row.state not in ("closing", "released"):
            raise Problem("wrong-state", f"a study that is {row.state} cannot be closed")
        return row


def replace_passcode(store: Store, study_id: str, digest: str) -> StudyRow:
    """From now on, devices need the passcode with this SHA-256; the one before is refused."""
    value = _bytes_of(digest)
    with store.transaction() as tx:
        row = tx.lock_study(study_id)
        if row is None:
            raise Problem("unknown-study")
        if row.state not in ALIVE:
            raise Problem("wrong-state", f"a study that is {row.state} needs no passcode")
        if not terms_of(row).passcode:
            raise Problem(
                "wrong-state",
                "a study that was opened without a passcode cannot get one: its offers say so",
                hint="open another study",
            )
        tx.set_passcode(study_id, value)
        return row


def retry(store: Store, study_id: str) -> StudyRow:
    """Let the worker try a study at once: one with a fault, or one that failed and still has data.

    A failed one is not opened to devices again: what they sent is released, if now it can be. An
    answer that it was charged for is stored with the charge, and is used again; what was not
    charged is charged when it is released. A study that failed because its store was restored is
    refused: it may have been released already.
    """
    with store.transaction() as tx:
        row = get_study(tx, study_id)
        if row.state == "failed":
            _revive(tx, row)
        elif row.state not in ALIVE:
            raise Problem("wrong-state", f"a study that is {row.state} cannot be tried again")
        tx.clear_fault(study_id)
        return get_study(tx, study_id)


def _revive(tx: Transaction, row: StudyRow) -> None:
    if row.problem == RESTORED:
        raise Problem(
            "wrong-state",
            "this study may have been released before its store was restored",
            hint="open a new study in its place",
        )
    tasks, answers = tx.tasks(row.id), {answer.owner for answer in tx.answer_rows(row.id)}
    if not answers and not any(
        tx.sealed_count(task.id) or tx.pending_uploads(task.id, 1) for task in tasks
    ):
        raise Problem("wrong-state", "nothing is left of what devices sent to this study")
    tx.set_study_state(row.id, "closing", expected=["failed"])
    for task in tasks:
        if task.id not in answers:
            tx.set_task_state(task.id, "closing", expected=["done"])


def delete(store: Store, study_id: str) -> StudyRow:
    """Drop all data that devices sent; the release, the charges and the name stay."""
    with store.transaction() as tx:
        get_study(tx, study_id)
        end(tx, study_id, "deleted", expected=get_args(StudyState))
        tx.drop_data(study_id)
        return get_study(tx, study_id)


def end(
    tx: Transaction,
    study_id: str,
    state: End,
    problem: str = "",
    *,
    expected: Collection[StudyState] = ALIVE,
) -> bool:
    """Bring a study to a final state; False, with nothing changed, if it was in none of the
    expected states."""
    if not tx.set_study_state(study_id, state, problem, expected=expected):
        return False
    for task in tx.tasks(study_id):  # first, so that no device joins or uploads any more
        tx.set_task_state(task.id, "done", expected=UNFINISHED)
    tx.end_rounds(study_id, f"its study is {state}")
    tx.clear_fault(study_id)
    return True


def state(store: Store, study_id: str) -> dict[str, Any]:
    """Everything about a study except its release, as plain data."""
    with store.reading() as tx:
        row, fault = get_study(tx, study_id), tx.fault(study_id)
        tasks = [_task_state(tx, task) for task in tx.tasks(row.id)]
    terms = asdict(terms_of(row))
    del terms["request"]
    rejected: dict[str, int] = {}
    for task in tasks:
        for reason, count in task["rejected"].items():
            rejected[reason] = rejected.get(reason, 0) + count
    return {
        "id": row.id,
        "name": row.name,
        "purpose": row.purpose,
        "state": row.state,
        "since": row.since,
        "problem": row.problem,
        "fault": fault_state(fault),
        "received": sum(task["received"] for task in tasks),
        "counted": sum(task["counted"] for task in tasks),
        "repeated": sum(task["repeated"] for task in tasks),
        "rejected": rejected,
        **json.loads(row.plan),
        "terms": terms,
        "tasks": tasks,
    }


def fault_state(fault: FaultRow | None) -> dict[str, Any] | None:
    """The fault of a study as plain data."""
    if fault is None:
        return None
    return {name: value for name, value in asdict(fault).items() if name != "study_id"}


def report_count(tx: Transaction, task_id: str) -> int:
    """The number of reports received for a task, including those of masked rounds and those that
    were dropped since."""
    counts = tx.counts(task_id)
    return max(tx.received_count(task_id), counts.get("reports", 0) + counts.get("repeated", 0))


def get_study(tx: Transaction, study_id: str) -> StudyRow:
    row = tx.study(study_id)
    if row is None:
        raise Problem("unknown-study")
    return row


def charge_of(row: StudyRow, task: AnyTask) -> Charge:
    """The charge to the ledger for a release of the task."""
    return design_of(row).charge_of(task)


def plan_of(tx: Transaction, row: StudyRow) -> Plan:
    """The plan of a study, with its seed."""
    record, terms = json.loads(row.plan), terms_of(row)
    body = None if terms.dictionary is None else tx.dictionary(terms.dictionary)
    if body is not None and hashlib.sha256(body).hexdigest() != terms.dictionary:
        raise StoreDamaged(f"the dictionary {terms.dictionary} is damaged: its digest is another")
    dictionary = None if body is None else from_lines(body)
    return read_plan(record, study=row.study, design=row.design, dictionary=dictionary)


def design_of(row: StudyRow) -> Question:
    """What a study was sized to, without its dictionary."""
    planner_of(from_json(row.study))  # its import registers the kinds of its specs
    design: Question = from_json(row.design)
    return design


def task_of(row: TaskRow) -> Any:
    """The task of a row; StoreDamaged if it is another than devices were asked."""
    return _parse_task(row.id, row.spec)


@lru_cache(maxsize=256)
def _parse_task(task_id: str, spec: str) -> Any:
    task = from_json(spec)
    if task.id != task_id:
        raise StoreDamaged(f"the task {task_id} is damaged: its digest is another")
    return task


def terms_of(row: StudyRow) -> Terms:
    return Terms(**json.loads(row.settings))


def campaign_of(
    tx: Transaction, row: StudyRow, planned: Plan, cache: CampaignCache | None = None
) -> Campaign:
    """The campaign of a study, with the answers so far absorbed.

    With a `cache`, only the answers since the last call are absorbed.
    """
    secret, question = tx.secret(row.id), planned.design
    if secret is None and question.has_secret:
        raise DataError(f"the data of study {row.id} was dropped")
    cached = None if cache is None else cache.pop(row.id, None)  # not kept if this fails halfway
    campaign, done = cached or (
        question.campaign(
            planned, secret=secret or b"", least=planned.study.threshold or 0.0, name=row.id
        ),
        0,
    )
    for task_row in tx.tasks(row.id)[done:]:
        if task_row.state != "done":
            break
        task = campaign.next_task()
        if task is None or task.id != task_row.id:
            raise DataError(f"the stored tasks of study {row.id} do not match its campaign")
        answer = answer_of(tx, task)
        if answer is not None:
            campaign.absorb(answer)
        elif question.may_skip:
            campaign.skip()
        else:
            break
        done += 1
    if cache is not None:
        cache[row.id] = (campaign, done)
    return campaign


def answer_of(tx: Transaction, task: Any) -> NoisedSum | RecordBatch | None:
    """The answer of a finished task: the stored noised sum, or the counts of its records; None if
    too few devices took part."""
    if not task.is_local:
        answer = tx.answer(task.id)
        return (
            None
            if answer is None
            else NoisedSum(task, table_from_bytes(task, answer[0]), answer[1])
        )
    tally = TallyAccumulator(task)
    for row in tx.sealed_rows(task.id):
        tally.add_column(records_in(row, task))
    return tally.batch(tx.sealed_count(task.id))


def records_in(row: Row, task: LocalTask | WordTask) -> pa.ChunkedArray:
    """The records of a sealed row, from the store or from its file in the lake."""
    content = row.check()
    if row.file is None or row.records is None:
        return records_of(content)
    folder = row.file.rsplit("/", 2)[0]
    source = lake.Source(folder=folder, export=folder.rpartition("/")[2], task=task)
    return pa.chunked_array(
        [chunk for column in source.read(partition_of(row)) for chunk in column.chunks]
    )


def partition_of(row: Row) -> lake.Partition:
    """The partition in the lake that has the records of a sealed row."""
    assert row.file is not None  # the caller has looked
    assert row.records is not None
    name = "/".join(row.file.rsplit("/", 2)[1:])
    return lake.Partition(name=name, reports=row.count, records=row.records)


def _existing_study(tx: Transaction, name: str, digest: str) -> StudyRow | None:
    row = tx.study_by_name(name)
    if row is not None and terms_of(row).request != digest:
        raise Problem("name-taken", hint="give this study another name")
    return row


def _check_open_time(request: Request, study: Study, now: float) -> None:
    seconds = request.open_seconds
    if request.minimum is not None:
        if seconds is None:
            raise StudyError(
                "minimum says which reports suffice after open_seconds; set open_seconds, too"
            )
        if request.minimum < 1:
            raise StudyError(f"minimum must be at least 1; got {request.minimum}")
    if seconds is None:
        return
    if not 1 <= seconds <= LONGEST_OPEN:
        raise StudyError(f"open_seconds must be 1 to {LONGEST_OPEN}; got {seconds}")
    if study.is_masked:
        raise StudyError(
            "open_seconds is for studies whose devices send reports; a masked round starts when "
            "its cohort is complete",
            hint='leave it out with trust = "secure"',
        )
    if request.closes is not None and now + seconds > (request.closes + 1) * DAY_SECONDS:
        raise StudyError(
            f"open_seconds must end before the last day for reports does; {seconds} seconds from "
            f"now are after day {request.closes}"
        )


def _bytes_of(passcode_digest: str) -> bytes:
    if not isinstance(passcode_digest, str) or not _DIGEST.fullmatch(passcode_digest):
        raise StudyError(
            "passcode_digest must be the SHA-256 of a passcode, 64 hexadecimal digits in lower "
            "case; got something else"
        )
    return bytes.fromhex(passcode_digest)


def _daily_reports(request: Request, study: Study) -> int:
    planned = study.daily_reports or 1
    daily = planned if request.daily_reports is None else request.daily_reports
    if daily > planned:
        raise StudyError(
            f"the study is planned for {planned} reports per device and day; got {daily}",
            hint='set daily_reports in the study, too; with trust = "central" it is one',
        )
    return daily


def _terms_of_tables(planned: Plan, task: AnyTask) -> dict[str, Any]:
    """The terms that only an offer of a task with tables has."""
    question = planned.design
    return {
        "delta": planned.privacy.delta,
        "noise": question.least_noise,
        "contributions": question.tasks_per_device,
        "keys": question.item_keys(task),
        "masked": planned.study.masked,
    }


def _cohort_of(task: TaskRow) -> str:
    try:
        return str(from_json(task.spec).cohort)
    except SpecError:  # the page that says so must still be shown
        return "damaged"


def _task_state(tx: Transaction, task: TaskRow) -> dict[str, Any]:
    counts, rounds = tx.counts(task.id), tx.rounds(task.id)
    return {
        "id": task.id,
        "cohort": _cohort_of(task),
        "waiting": tx.waiting_count(task.id),
        "rounds": [{"phase": row.phase, "problem": row.problem} for row in rounds],
        "state": task.state,
        "wanted": task.target,
        "open_until": task.open_until,
        "received": report_count(tx, task.id),
        "counted": counts.get("reports", 0),
        "repeated": counts.get("repeated", 0),
        "rejected": {
            name.removeprefix("rejected:"): count
            for name, count in counts.items()
            if name.startswith("rejected:")
        },
    }

"""Check a whole store: what the database says of its files, every digest, and the ledger.

Nothing is changed, and the collector may run meanwhile. Each study is read in a snapshot of its
own, so that a long check does not hold up the cleaning of the store's files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sfumato.collector import studies
from sfumato.collector.store.database import database
from sfumato.collector.store.digests import Row
from sfumato.collector.store.driver import Database
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import Store, StudyRow, Transaction
from sfumato.errors import DataError, SfumatoError, StoreError
from sfumato.flow.model_terms import digest_of
from sfumato.spec import from_json


@dataclass(frozen=True, slots=True)
class Findings:
    """What was checked, and what is wrong, in words."""

    checked: Mapping[str, int]  # number of rows by kind
    without_digest: int  # rows that an earlier version has stored
    database: bool  # whether the database has checked its own files
    problems: tuple[str, ...]


def check(url: str | Path) -> Findings:
    """Check the store at `url`; StoreError if there is none, or it is of another version."""
    place = database(url)
    if place.is_empty():
        raise StoreError(f"{place.name} is empty, so there is nothing to check")
    with closing(Store(place)) as store:
        with store.reading():
            pass  # raises if it is of another version
        return _Check(place, store).run()


class _Check:
    def __init__(self, place: Database, store: Store) -> None:
        self._place, self._store = place, store
        self._checked: Counter[str] = Counter()
        self._without_digest = 0
        self._problems: list[str] = []

    def run(self) -> Findings:
        of_database: list[str] | None = []
        with self._noting("the database"):
            of_database = self._place.check()
            self._problems.extend(f"the database: {line}" for line in of_database or ())
        rows: list[StudyRow] = []
        with self._noting("the list of studies"), self._store.reading() as tx:
            rows = tx.studies()
        for row in rows:
            self._checked["study"] += 1
            for part in (self._check_digests, self._check_counts, self._check_charges):
                self._check_study(row, part)
        with self._noting("the ledger"), self._store.reading() as tx:
            self._check_ledger(tx)
        return Findings(
            dict(self._checked),
            self._without_digest,
            of_database is not None,
            tuple(dict.fromkeys(self._problems)),
        )

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Turn an error within the block into a problem, so that the check goes on."""
        try:
            yield
        except Exception as error:  # of any kind: damaged data may cause any
            reason = str(error) if isinstance(error, SfumatoError) else type(error).__name__
            self._problems.append(f"{name} cannot be read: {reason}")

    def _check_study(
        self, row: StudyRow, part: Callable[[Transaction, StudyRow], Iterator[str]]
    ) -> None:
        name = f"study {row.name!r}"
        with self._noting(name), self._store.reading() as tx:
            for problem in part(tx, row):
                self._problems.append(f"{name}: {problem}")

    def _check_digests(self, tx: Transaction, row: StudyRow) -> Iterator[str]:
        """Everything of a study that has a digest."""
        for each in _rows(tx, row):
            self._checked[each.kind] += 1
            self._without_digest += each.digest is None
            if each.is_damaged:
                yield f"{each.name} is damaged: it is not what was stored"
        for digest, body in tx.models(row.id):
            self._checked["model"] += 1
            if digest_of(body) != digest:
                yield f"the model {digest} is damaged: its digest is another"
        dictionary = studies.terms_of(row).dictionary
        if dictionary is not None:
            self._checked["dictionary"] += 1
            lines = tx.dictionary(dictionary)
            if lines is None or hashlib.sha256(lines).hexdigest() != dictionary:
                yield f"the dictionary {dictionary} is damaged or missing"

    def _check_counts(self, tx: Transaction, row: StudyRow) -> Iterator[str]:
        """The numbers of reports, which are stored with the sums and beside them."""
        answers = {answer.owner: answer.count for answer in tx.answer_rows(row.id)}
        for task in tx.tasks(row.id):
            self._checked["task"] += 1
            spec, sealed = studies.task_of(task), tx.sealed_count(task.id)
            counted = tx.counts(task.id).get("reports", 0)
            if not spec.is_masked and sealed not in (0, counted):
                yield f"task {task.id} counts {counted} reports; {sealed} are sealed"
            for each in tx.sealed_rows(task.id):
                if each.records is not None:
                    yield from _problems_of_file(each, spec)
            if (count := answers.get(task.id, counted)) != counted:
                yield f"task {task.id} counts {counted} reports; its answer is of {count}"

    def _check_charges(self, tx: Transaction, row: StudyRow) -> Iterator[str]:
        """Every opened sum is on the ledger, once, and with the loss of its design."""
        answers = {answer.owner for answer in tx.answer_rows(row.id)}
        tasks = {task.id: task for task in tx.tasks(row.id)}
        charges = [entry for entry in tx.entries() if entry[2] in tasks]
        for campaign, cohort, task_id, loss in charges:
            spec = studies.task_of(tasks[task_id])
            if (campaign, cohort) != (spec.campaign, spec.cohort):
                yield f"the charge for task {task_id} names another campaign or cohort"
            if from_json(loss) != studies.charge_of(row, spec):
                yield f"the charge for task {task_id} is not that of its design"
        times = Counter(task_id for _, _, task_id, _ in charges)
        for task in tasks.values():
            spec = studies.task_of(task)
            if spec.is_local:
                continue
            lost = sum(bool(each.charged) for each in tx.rounds(task.id))
            least = max(int(task.id in answers), lost)
            if times[task.id] < least:
                yield f"task {task.id} was opened {least} times and charged {times[task.id]} times"
            if not spec.is_masked and times[task.id] > 1:
                yield f"task {task.id} was charged {times[task.id]} times"

    def _check_ledger(self, tx: Transaction) -> None:
        ledger = StoreLedger(tx)
        entries = ledger.entries()  # raises if one cannot be read
        self._checked["charge"] += len(entries)
        for entry in entries:
            if tx.task(entry.task) is None:
                self._problems.append(f"the ledger: no study has the charged task {entry.task}")
        if entries:
            ledger.spent()  # raises if the charges or the budget make no sense


def _problems_of_file(row: Row, task: Any) -> Iterator[str]:
    """What is wrong with a sealed row's file in the lake."""
    try:
        studies.records_in(row, task)
    except DataError as problem:
        yield str(problem)


def _rows(tx: Transaction, row: StudyRow) -> Iterator[Row]:
    tasks = tx.tasks(row.id)
    rounds = [each for task in tasks for each in tx.rounds(task.id)]
    single = (tx.release_row(row.id), tx.released_model_row(row.id))
    checkpoints = (tx.checkpoint_row(each.id) for each in rounds)
    yield from chain.from_iterable(tx.sealed_rows(task.id) for task in tasks)
    yield from tx.answer_rows(row.id)
    yield from (each for each in (*single, *checkpoints) if each is not None)


def lines_of(findings: Findings) -> Sequence[str]:
    """The findings for people to read."""
    counts = ", ".join(f"{kind} {count:,}" for kind, count in sorted(findings.checked.items()))
    lines = [f"checked: {counts.replace('_', ' ')}" if counts else "there is nothing in the store"]
    if not findings.database:
        lines.append("the database has no check of its own files; use its tools (pg_amcheck)")
    if findings.without_digest:
        lines.append(
            f"{findings.without_digest:,} of these were stored by an earlier version, without a "
            "digest: their damage cannot be seen"
        )
    lines.extend(findings.problems or ["nothing is damaged"])
    return lines

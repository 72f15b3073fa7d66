r"""The store: the data of a collector, in an SQLite file or on a database server.

Everything happens in a transaction, whole or not at all, and is on disk after its block. The
methods of `Transaction` are all that can be done in one.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> store = Store.open(f"sqlite:///{folder.name}/collector.db")
    >>> store.migrate()
    >>> with store.transaction() as tx:
    ...     tx.add_dictionary("5f" * 32, b'"oak"\n"elm"\n')
    >>> with store.reading() as tx:
    ...     tx.dictionary("5f" * 32)
    b'"oak"\n"elm"\n'
    >>> store.close()
    >>> folder.cleanup()

An upload has a number, its task, its count of reports and their bytes: no time, no address.
"""

# ruff: noqa: S608 -- only our own names are put into statements; every value is a parameter

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from threading import Lock, local
from typing import Literal, Self, TypeVar

from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.digests import Row, digest_of
from sfumato.collector.store.driver import Database, DatabaseConnection
from sfumato.collector.store.round_tables import RoundTables
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import StoreError, StoreUnavailable

T = TypeVar("T")
StudyState = Literal["collecting", "closing", "released", "failed", "deleted"]
TaskState = Literal["open", "closing", "done"]
UploadOutcome = Literal["stored", "closed", "full"]

_MOST_LISTED = 50_000  # values in one statement


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A study, with what it asks as JSON."""

    id: str  # 16 random bytes, in hexadecimal
    name: str
    purpose: str
    state: StudyState
    study: str
    design: str
    plan: str
    settings: str
    problem: str = ""  # why it failed
    since: int = 0  # day (since 1970) on which it entered its state; set by the store


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task of a study."""

    id: str
    study_id: str
    number: int  # within its study, from 0
    spec: str
    envelope: str
    state: TaskState
    target: int | None  # number of reports at which it closes by itself
    capacity_left: int | None = None  # how many more reports it accepts; None: any number
    open_until: int | None = None  # in seconds since 1970; it does not close by itself before


@dataclass(frozen=True, slots=True)
class FaultRow:
    """An unexpected error in the work for a study, which the worker tries again."""

    study_id: str
    problem: str
    tries: int  # how many failed in a row
    next_try: int  # in seconds since 1970


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A bearer token, without its secret."""

    id: str
    name: str
    role: str  # admin or analyst
    expires: int  # in seconds since 1970
    studies: str | None = None  # the ids of those it may see, with commas; None: all

    def may_see(self, study_id: str) -> bool:
        return self.studies is None or study_id in self.studies.split(",")


_STUDY = ", ".join(field.name for field in fields(StudyRow))
_TASK = "id, study_id, number, spec, envelope, state, wanted, room, open_until"  # as in TaskRow
_TOKEN = ", ".join(field.name for field in fields(TokenRow))
_FAULT = ", ".join(field.name for field in fields(FaultRow))


class Transaction(RoundTables):
    """All reads and writes, valid within the block of `Store.transaction`; those about masked
    rounds are in `round_tables`."""

    def add_study(self, row: StudyRow) -> None:
        self._insert("study", _STUDY, [(*astuple(row)[:-1], self._today)])

    def studies(self) -> list[StudyRow]:
        """All studies, the oldest first."""
        return [StudyRow(*row) for row in self._run(f"SELECT {_STUDY} FROM study ORDER BY number")]

    def study(self, study_id: str) -> StudyRow | None:
        row = self._first(f"SELECT {_STUDY} FROM study WHERE id = ?", study_id)
        return None if row is None else StudyRow(*row)

    def study_by_name(self, name: str) -> StudyRow | None:
        row = self._first(f"SELECT {_STUDY} FROM study WHERE name = ?", name)
        return None if row is None else StudyRow(*row)

    def lock_study(self, study_id: str) -> StudyRow | None:
        """The study; nobody else can change its state before this transaction is over."""
        row = self._first(
            f"SELECT {_STUDY} FROM study WHERE id = ?{self._open.share_lock}", study_id
        )
        return None if row is None else StudyRow(*row)

    def set_study_state(
        self,
        study_id: str,
        state: StudyState,
        problem: str = "",
        *,
        expected: Collection[StudyState],
    ) -> bool:
        """Change the state if it is one of the expected ones; return whether it was.

        Then nobody else can change it before this transaction is over.
        """
        changed = self._run(
            "UPDATE study SET state = ?, problem = ?, since = ?"
            f" WHERE id = ? AND state IN ({_marks(expected)}) RETURNING number",
            state,
            problem,
            self._today,
            study_id,
            *expected,
        )
        if not changed and self.study(study_id) is None:
            raise StoreError(f"there is no study {study_id}")
        return bool(changed)

    def set_passcode(self, study_id: str, digest: bytes) -> None:
        """Store the digest of a study's passcode, in place of an earlier one; it is deleted with
        the study's data."""
        self._run(
            "INSERT INTO passcode VALUES (?, ?)"
            " ON CONFLICT (study_id) DO UPDATE SET digest = excluded.digest",
            study_id,
            digest,
        )

    def passcodes(self) -> dict[str, bytes]:
        """The digests of all passcodes, by study."""
        rows = self._run("SELECT study_id, digest FROM passcode")
        return {study_id: bytes(digest) for study_id, digest in rows}

    def set_fault(self, row: FaultRow) -> None:
        """Record the latest fault of a study, in place of the one before."""
        self.clear_fault(row.study_id)
        self._insert("fault", _FAULT, [astuple(row)])

    def clear_fault(self, study_id: str) -> None:
        self._run("DELETE FROM fault WHERE study_id = ?", study_id)

    def fault(self, study_id: str) -> FaultRow | None:
        return self.faults().get(study_id)

    def faults(self) -> dict[str, FaultRow]:
        """The faults of all studies that have one, by study."""
        rows = self._run(f"SELECT {_FAULT} FROM fault ORDER BY study_id")
        return {row[0]: FaultRow(*row) for row in rows}

    def add_task(self, row: TaskRow) -> None:
        self._insert("task", _TASK, [astuple(row)])

    def tasks(self, study_id: str) -> list[TaskRow]:
        rows = self._run(f"SELECT {_TASK} FROM task WHERE study_id = ? ORDER BY number", study_id)
        return [TaskRow(*row) for row in rows]

    def task(self, task_id: str) -> TaskRow | None:
        row = self._first(f"SELECT {_TASK} FROM task WHERE id = ?", task_id)
        return None if row is None else TaskRow(*row)

    def open_tasks(self) -> list[TaskRow]:
        rows = self._run(f"SELECT {_TASK} FROM task WHERE state = 'open' ORDER BY task")
        return [TaskRow(*row) for row in rows]

    def set_envelope(self, task_id: str, envelope: str) -> None:
        """Replace the signed offer of a task."""
        self._run("UPDATE task SET envelope = ? WHERE id = ?", envelope, task_id)

    def set_task_state(
        self, task_id: str, state: TaskState, *, expected: Collection[TaskState]
    ) -> bool:
        """Change the state if it is one of the expected ones; return whether it was.

        After the commit, no upload is accepted for a task that is not open.
        """
        changed = self._run(
            f"UPDATE task SET state = ? WHERE id = ? AND state IN ({_marks(expected)})"
            " RETURNING task",
            state,
            task_id,
            *expected,
        )
        if not changed:
            self._task(task_id)  # raises if it does not exist
        return bool(changed)

    def add_dictionary(self, digest: str, body: bytes) -> None:
        """Store a dictionary; one with the same digest is the same."""
        self._run("INSERT INTO dictionary VALUES (?, ?) ON CONFLICT DO NOTHING", digest, body)

    def dictionary(self, digest: str) -> bytes | None:
        row = self._first("SELECT body FROM dictionary WHERE digest = ?", digest)
        return None if row is None else row[0]

    def add_model(self, task_id: str, digest: str, body: bytes) -> None:
        """Store the parameters of a task, and delete those of its study's earlier tasks."""
        self._run(
            "DELETE FROM model WHERE task IN (SELECT task FROM task WHERE study_id ="
            " (SELECT study_id FROM task WHERE id = ?))",
            task_id,
        )
        self._insert("model", "task, digest, body", [(self._task(task_id), digest, body)])

    def model(self, digest: str) -> bytes | None:
        """The parameters with this digest, if the latest task of a study has them."""
        row = self._first("SELECT body FROM model WHERE digest = ? LIMIT 1", digest)
        return None if row is None else row[0]

    def models(self, study_id: str) -> list[tuple[str, bytes]]:
        """(digest, parameters) of a study's tasks."""
        return self._run(
            "SELECT model.digest, model.body FROM model JOIN task USING (task)"
            " WHERE task.study_id = ? ORDER BY task.number",
            study_id,
        )

    def insert_uploads(self, uploads: Sequence[tuple[str, int, bytes]]) -> list[UploadOutcome]:
        """Store uploads (task id, reports, body), each whole or not at all.

        "closed" if its task is not open, or can never accept that many reports. "full" if it may
        have capacity once the pending reports are sealed and duplicates found. A task that is open
        here stays open until this transaction is over.
        """
        counts: dict[str, list[int]] = {}
        for task_id, count, _ in uploads:
            counts.setdefault(task_id, []).append(count)
        # Sorted, so that two such transactions cannot deadlock.
        by_task = {task_id: self._reserve(task_id, counts[task_id]) for task_id in sorted(counts)}
        each = {task_id: iter(outcomes) for task_id, (_, outcomes) in by_task.items()}
        outcomes = [next(each[task_id]) for task_id, _, _ in uploads]
        self._insert(
            "upload",
            "task, count, body",
            [
                (by_task[task_id][0], count, body)
                for (task_id, count, body), outcome in zip(uploads, outcomes, strict=True)
                if outcome == "stored"
            ],
        )
        return outcomes

    def _reserve(self, task_id: str, counts: Sequence[int]) -> tuple[int, list[UploadOutcome]]:
        """Reserve capacity for uploads with these counts; return the task's number and outcomes."""
        if task := self._lock_open_task(task_id):
            return task, ["stored"] * len(counts)
        total = sum(counts)
        row = self._first(
            "UPDATE task SET room = room - ? WHERE id = ? AND state = 'open' AND room >= ?"
            " RETURNING task",
            total,
            task_id,
            total,
        )
        if row is not None:
            return row[0], ["stored"] * len(counts)
        return self._reserve_some(task_id, counts)

    def _reserve_some(self, task_id: str, counts: Sequence[int]) -> tuple[int, list[UploadOutcome]]:
        """`_reserve` for a task that cannot accept all of them."""
        row = self._first(  # an UPDATE, which also locks the row
            "UPDATE task SET room = room WHERE id = ? AND state = 'open' AND room IS NOT NULL"
            " RETURNING task, room",
            task_id,
        )
        if row is None:
            return 0, ["closed"] * len(counts)
        (task, capacity_left), pending = row, self.pending_count(task_id)
        outcomes: list[UploadOutcome] = []
        for count in counts:
            if count <= capacity_left:
                capacity_left, pending = capacity_left - count, pending + count
                outcomes.append("stored")
            else:
                outcomes.append("full" if count <= capacity_left + pending else "closed")
        self._run("UPDATE task SET room = ? WHERE task = ?", capacity_left, task)
        return task, outcomes

    def return_capacity(self, task_id: str, reports: int) -> None:
        """Let the task accept as many others in place of stored reports that do not count."""
        self._run("UPDATE task SET room = room + ? WHERE id = ?", reports, task_id)

    def pending_uploads(self, task_id: str, most_reports: int) -> list[tuple[int, int, bytes]]:
        """Uploads (number, reports, body) that are not sealed, the oldest first.

        They have at most `most_reports` together, but at least one is returned if there is any.
        """
        task = self._task(task_id)
        return self._run(_PENDING, task, task, most_reports, most_reports)

    def delete_report_ids(self, task_id: str) -> None:
        """Delete the ids of a task that takes no reports any more."""
        self._run("DELETE FROM seen WHERE task = ?", self._task(task_id))

    def delete_uploads(self, task_id: str, numbers: Sequence[int]) -> None:
        """Raise StoreUnavailable if one of them is missing: then another worker has it."""
        task = self._task(task_id)
        for some in _parts(numbers):
            query, parameters = self._open.values_query(some)
            deleted = self._run(
                f"DELETE FROM upload WHERE number IN ({query}) AND task = ? RETURNING number",
                *parameters,
                task,
            )
            if len(deleted) != len(set(some)):
                raise StoreUnavailable(
                    f"only {len(deleted)} of {len(some)} uploads to be sealed were left",
                    hint="another worker has sealed the others; try again",
                )

    def add_report_ids(self, task_id: str, ids: Sequence[bytes]) -> set[bytes]:
        """Store the ids of a task's reports; return those that are new."""
        task, fresh = self._task(task_id), set[bytes]()
        for some in _parts(sorted(set(ids))):  # sorted: neighbours share a page
            query, parameters = self._open.values_query(some)
            fresh.update(
                report_id
                for (report_id,) in self._run(
                    f"INSERT INTO seen (task, id) SELECT ?, value FROM ({query}) AS given"
                    " WHERE true ON CONFLICT DO NOTHING RETURNING id",
                    task,
                    *parameters,
                )
            )
        return fresh

    def add_sealed(self, task_id: str, data: bytes, count: int) -> None:
        digest = digest_of("sealed", task_id, data, count)
        self._insert(
            "sealed", "task, count, data, digest", [(self._task(task_id), count, data, digest)]
        )

    def sealed_records(self, task_id: str) -> Iterator[bytes]:
        """Sealed records in their order, one at a time: all of them may not fit in memory.

        StoreDamaged if one is not what was stored, as for everything here that has a digest.
        """
        for row in self.sealed_rows(task_id):
            yield row.check()

    def sealed_rows(self, task_id: str) -> Iterator[Row]:
        """The rows of sealed records, without a check of their digests."""
        return (self.sealed_row(task_id, number) for number in self.sealed_numbers(task_id))

    def sealed_numbers(self, task_id: str) -> list[int]:
        """The numbers of a task's rows of sealed records, in their order."""
        rows = self._run(
            "SELECT number FROM sealed WHERE task = ? ORDER BY number", self._task(task_id)
        )
        return [number for (number,) in rows]

    def sealed_row(self, task_id: str, number: int) -> Row:
        """One row of sealed records; StoreError if it was deleted."""
        row = self._first(
            "SELECT data, count, digest, file, records FROM sealed WHERE number = ?", number
        )
        if row is None:
            raise StoreError(f"the reports of task {task_id} were deleted meanwhile")
        data, count, digest, file, records = row
        return Row("sealed", task_id, data, count, digest, number, file, records)

    def planned_file(self, task_id: str) -> tuple[str, list[int]] | None:
        """The file in the lake that gets rows of a task next, and their numbers."""
        rows = self._run(
            "SELECT file, number FROM sealed WHERE task = ? AND file IS NOT NULL"
            " AND records IS NULL ORDER BY number",
            self._task(task_id),
        )
        return (rows[0][0], [number for _, number in rows]) if rows else None

    def unplanned_rows(self, task_id: str) -> tuple[list[tuple[int, int]], int]:
        """(number, reports) of the rows that no file gets, and the number of files so far."""
        task = self._task(task_id)
        rows = self._run(
            "SELECT number, count FROM sealed WHERE task = ? AND file IS NULL ORDER BY number", task
        )
        return rows, self._sum("SELECT COUNT(DISTINCT file) FROM sealed WHERE task = ?", task)

    def plan_file(self, file: str, numbers: Sequence[int]) -> None:
        """Decide that the records of these rows go to a file, before it is written."""
        for some in _parts(numbers):
            query, parameters = self._open.values_query(some)
            self._run(f"UPDATE sealed SET file = ? WHERE number IN ({query})", file, *parameters)

    def move_to_file(self, task_id: str, file: str, records: int) -> None:
        """Delete the records that `file` has now; a row that names it takes their place.

        Raise StoreUnavailable if they are gone: then another worker has done this.
        """
        task = self._task(task_id)
        moved = self._run(
            "DELETE FROM sealed WHERE task = ? AND file = ? AND records IS NULL RETURNING count",
            task,
            file,
        )
        if not moved:
            raise StoreUnavailable(f"another worker has moved the records of {file}; try again")
        count, data = sum(count for (count,) in moved), f"{file} {records}".encode()
        digest = digest_of("sealed", task_id, data, count)
        self._insert(
            "sealed",
            "task, count, data, digest, file, records",
            [(task, count, data, digest, file, records)],
        )

    def sealed_count(self, task_id: str) -> int:
        """The number of sealed reports."""
        return self._sum("SELECT SUM(count) FROM sealed WHERE task = ?", self._task(task_id))

    def count(self, task_id: str, name: str, by: int) -> None:
        self._run(
            "INSERT INTO counter (task, name, count) VALUES (?, ?, ?)"
            " ON CONFLICT (task, name) DO UPDATE SET count = counter.count + excluded.count",
            self._task(task_id),
            name,
            by,
        )

    def counts(self, task_id: str) -> dict[str, int]:
        task = self._task(task_id)
        return dict(self._run("SELECT name, count FROM counter WHERE task = ? ORDER BY name", task))

    def pending_count(self, task_id: str) -> int:
        """The number of reports that are not sealed."""
        return self._sum("SELECT SUM(count) FROM upload WHERE task = ?", self._task(task_id))

    def received_count(self, task_id: str) -> int:
        """The number of acknowledged reports: pending, sealed and duplicate ones."""
        repeated = self.counts(task_id).get("repeated", 0)
        return self.pending_count(task_id) + self.sealed_count(task_id) + repeated

    def add_answer(self, task_id: str, table: bytes, count: int) -> None:
        """A task has one answer; a second is refused."""
        digest = digest_of("answer", task_id, table, count)
        self._insert(
            "answer", "task, count, data, digest", [(self._task(task_id), count, table, digest)]
        )

    def answer_rows(self, study_id: str) -> list[Row]:
        """The rows of a study's answers, in the tasks' order, without a check of their digests."""
        rows = self._run(
            "SELECT task.id, answer.data, answer.count, answer.digest"
            " FROM answer JOIN task USING (task) WHERE task.study_id = ? ORDER BY task.number",
            study_id,
        )
        return [Row("answer", *row) for row in rows]

    def answer(self, task_id: str) -> tuple[bytes, int] | None:
        """The table and count of a task, if it has an answer."""
        row = self._first(
            "SELECT data, count, digest FROM answer WHERE task = ?", self._task(task_id)
        )
        return None if row is None else (Row("answer", task_id, *row).check(), row[1])

    def add_entry(self, campaign: str, cohort: str, task: str, loss_json: str) -> None:
        """Append to the ledger, permanently."""
        self._insert("entry", "campaign, cohort, task, loss", [(campaign, cohort, task, loss_json)])

    def entries(self) -> list[tuple[str, str, str, str]]:
        return self._run("SELECT campaign, cohort, task, loss FROM entry ORDER BY number")

    def set_budget(self, budget_json: str) -> None:
        """Set the budget, permanently; repeating the same one changes nothing."""
        if self.budget() == budget_json:
            return
        if self.budget() is not None:
            raise StoreError(
                "the budget of a store cannot be changed",
                hint="use another store for another budget",
            )
        self._insert("budget", "number, spec", [(1, budget_json)])

    def budget(self) -> str | None:
        row = self._first("SELECT spec FROM budget")
        return None if row is None else row[0]

    def lock_budget(self) -> None:
        """Keep others from charging until this transaction is over; they then read its charges."""
        self._run(f"SELECT spec FROM budget{self._open.exclusive_lock}")

    def put_release(self, study_id: str, release_json: str) -> None:
        """Store the release of a study permanently; a second one is refused."""
        digest = digest_of("release", study_id, release_json.encode())
        self._insert("release", "study_id, data, digest", [(study_id, release_json, digest)])

    def release(self, study_id: str) -> str | None:
        row = self.release_row(study_id)
        return None if row is None else row.check().decode()

    def release_row(self, study_id: str) -> Row | None:
        """The row of a study's release, without a check of its digest."""
        row = self._first("SELECT data, digest FROM release WHERE study_id = ?", study_id)
        return None if row is None else Row("release", study_id, row[0].encode(), 0, row[1])

    def put_released_model(self, study_id: str, body: bytes) -> None:
        """Store a released model's parameters permanently."""
        digest = digest_of("released_model", study_id, body)
        self._insert("released_model", "study_id, body, digest", [(study_id, body, digest)])

    def released_model(self, study_id: str) -> bytes | None:
        row = self.released_model_row(study_id)
        return None if row is None else row.check()

    def released_model_row(self, study_id: str) -> Row | None:
        """The row of a study's released model, without a check of its digest."""
        row = self._first("SELECT body, digest FROM released_model WHERE study_id = ?", study_id)
        return None if row is None else Row("released_model", study_id, row[0], 0, row[1])

    def add_token(self, row: TokenRow, digest: bytes) -> None:
        self._insert("token", f"{_TOKEN}, digest", [(*astuple(row), digest)])

    def token(self, digest: bytes) -> TokenRow | None:
        row = self._first(f"SELECT {_TOKEN} FROM token WHERE digest = ?", digest)
        return None if row is None else TokenRow(*row)

    def tokens(self) -> list[TokenRow]:
        return [TokenRow(*row) for row in self._run(f"SELECT {_TOKEN} FROM token ORDER BY number")]

    def revoke(self, token_id: str) -> bool:
        """Delete a token; return whether it existed."""
        return bool(self._run("DELETE FROM token WHERE id = ? RETURNING number", token_id))

    def add_session(self, digest: bytes, token_id: str, expires: int) -> None:
        """Add the session of a person who signed in with a token; it ends with the token, if not
        before."""
        self._insert("session", "digest, token_id, expires", [(digest, token_id, expires)])

    def session(self, digest: bytes) -> tuple[TokenRow, int] | None:
        """The token of a session, and when the session ends."""
        row = self._first(
            f"SELECT {', '.join(f'token.{field.name}' for field in fields(TokenRow))},"
            " session.expires FROM session JOIN token ON token.id = session.token_id"
            " WHERE session.digest = ?",
            digest,
        )
        return None if row is None else (TokenRow(*row[:-1]), row[-1])

    def end_session(self, digest: bytes) -> None:
        self._run("DELETE FROM session WHERE digest = ?", digest)

    def end_sessions(self, before: int) -> None:
        """Delete the sessions that expire by then."""
        self._run("DELETE FROM session WHERE expires <= ?", before)

    def drop_data(self, study_id: str) -> None:
        """Delete uploads, sealed records, report ids, answers, rounds, the models that rounds
        started from and the passcode's digest; the ledger and the release stay."""
        self.drop_rounds(study_id)
        self._run("DELETE FROM passcode WHERE study_id = ?", study_id)
        for table in ("upload", "sealed", "seen", "answer", "model"):
            self._run(
                f"DELETE FROM {table} WHERE task IN (SELECT task FROM task WHERE study_id = ?)",
                study_id,
            )


_PENDING = """
SELECT number, count, body FROM upload WHERE task = ? AND number <= (
  SELECT MAX(number) FROM (
    SELECT number, SUM(count) OVER (ORDER BY number) AS total,
      ROW_NUMBER() OVER (ORDER BY number) AS place
    FROM (SELECT number, count FROM upload WHERE task = ? ORDER BY number LIMIT ?) AS first
  ) AS summed WHERE total <= ? OR place = 1
) ORDER BY number"""


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


def _parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _MOST_LISTED):
        yield values[start : start + _MOST_LISTED]


class _Worker(local):
    """The connection of the thread that holds the worker's lock; each thread has its own."""

    connection: DatabaseConnection | None = None


class Store:
    """An open store. Any thread may use it; each transaction has a connection of its own."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self._idle: list[DatabaseConnection] = []
        self._lock = Lock()
        self._is_closed = False
        self._worker = _Worker()

    @classmethod
    def open(cls, url: str | Path, *, now: Callable[[], float] = time.time) -> Self:
        """The store at `sqlite:///FILE`, a path or `postgresql://…`; see `database`."""
        return cls(database(url), now=now)

    @property
    def name(self) -> str:
        """Its name in messages, without a password."""
        return self._database.name

    def migrate(self) -> None:
        """Create the tables, or update those of an older version."""
        schema.migrate(self._database)

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Read and write; an exception that leaves the block undoes everything."""
        return self._transaction(writing=True)

    def reading(self) -> AbstractContextManager[Transaction]:
        """Read a snapshot; writing raises StoreReadOnly."""
        return self._transaction(writing=False)

    def scrub(self) -> bool:
        """Remove deleted data from the files, as far as the database allows it.

        False if another connection prevented it: try again.
        """
        return self._database.scrub()

    @contextmanager
    def worker_lock(self) -> Iterator[bool]:
        """Whether this is the only worker: True for one holder at a time, over all processes.

        Within the block, its thread writes over the connection that holds the lock. A worker that
        has lost both can therefore write nothing more: it gets StoreUnavailable.
        """
        with self._database.worker_lock() as connection:
            if connection is None:
                yield False
                return
            schema.check_version(self._database, connection)
            self._worker.connection = connection
            try:
                yield True
            finally:
                self._worker.connection = None

    def check_worker(self) -> None:
        """Raise StoreUnavailable if this thread, which took the worker's lock, has lost it."""
        connection = self._worker.connection
        assert connection is not None  # within the block of `worker_lock`
        self._begin_as_worker(connection, writing=False).rollback()

    def close(self) -> None:
        """Close the connections; one in use is closed when its transaction is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __repr__(self) -> str:
        return f"Store({self.name})"

    @contextmanager
    def _transaction(self, *, writing: bool) -> Iterator[Transaction]:
        connection = self._begin(writing=writing)
        tx = Transaction(connection, today=int(self._now() // DAY_SECONDS))
        try:
            yield tx
            if connection.has_failed:  # and the error was caught within the block
                raise StoreError(
                    "a transaction in which a call failed cannot be committed",
                    hint="let the error leave the block",
                )
            connection.commit()
        except BaseException:
            if not connection.has_failed:
                with suppress(StoreError):  # it sets has_failed
                    connection.rollback()
            raise
        finally:
            tx.end()
            self._give_back(connection)

    def _begin(self, *, writing: bool) -> DatabaseConnection:
        """Begin a transaction on the worker's connection, an idle one or a new one."""
        if writing and self._worker.connection is not None:
            return self._begin_as_worker(self._worker.connection, writing=True)
        while True:
            with self._lock:
                self._check_open()
                idle = self._idle.pop() if self._idle else None
            connection = idle or self._connect()
            try:
                connection.begin(writing=writing)
            except BaseException:
                is_stale = idle is not None and idle.is_lost  # the server has restarted
                connection.close()
                if is_stale:
                    continue
                raise
            return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self.name} is closed", hint="open it again")

    def _begin_as_worker(
        self, connection: DatabaseConnection, *, writing: bool
    ) -> DatabaseConnection:
        self._check_open()
        if connection.has_failed:
            raise StoreUnavailable(
                f"the only worker of {self.name} has lost its lock",
                hint="take the lock again and repeat what was not committed",
            )
        try:
            connection.begin(writing=writing)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> DatabaseConnection:
        connection = self._database.connect()
        try:
            schema.check_version(self._database, connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: DatabaseConnection) -> None:
        """Keep a connection for the next transaction, unless something failed on it."""
        if not connection.has_failed:
            if connection is self._worker.connection:
                return
            with self._lock:
                if not self._is_closed:
                    self._idle.append(connection)
                    return
        connection.close()  # also rolls back

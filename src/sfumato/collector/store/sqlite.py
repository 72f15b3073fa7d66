"""A store in one SQLite file: in WAL mode, synced at every commit, with deleted data zeroed."""
# ruff: noqa: S608 -- only our own names are put into statements; every value is a parameter

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from sfumato.collector.store.driver import WAIT_SECONDS, Row
from sfumato.errors import (
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

_OLDEST = (3, 38, 0)  # the first with JSON always built in; STRICT and RETURNING are older
_ROWS_TOGETHER = 50  # rows per statement; a thread releases the GIL once per statement
_LARGEST_LOG_BYTES = 64 << 20
_LOG_PAGES = 1 << 13  # copy the log into the file at this length (32 MB)
_SCRUB_MILLISECONDS = 100  # how long scrubbing may block writers while readers use the log
_TYPES = {
    "number": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "integer": "INTEGER",
    "bytes": "BLOB",
    "table": "STRICT",
    "index_table": "STRICT, WITHOUT ROWID",
}
_RETRY_SECONDS = 0.01  # between attempts to change the journal mode
_MAGIC = b"SQLite format 3\0"
_SETTINGS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA secure_delete = ON",  # a sealed upload must not stay in a free page
    f"PRAGMA journal_size_limit = {_LARGEST_LOG_BYTES}",
    f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}",
    "CREATE TEMP TABLE given (value)",
)


class Sqlite:
    """The database in the file `path`; a missing file is created, readable by its owner only."""

    types: Mapping[str, str] = _TYPES

    def __init__(self, path: Path, *, wait_seconds: float = WAIT_SECONDS) -> None:
        if str(path) in (":memory:", ".", ""):
            raise StoreError(
                "a store must be a file, so that acknowledged reports survive a crash; "
                f"got {str(path)!r}",
                hint="name a file: sqlite:///collector.db",
            )
        if sqlite3.sqlite_version_info < _OLDEST:
            raise StoreError(
                f"a store needs SQLite {'.'.join(map(str, _OLDEST))} or later; "
                f"this Python has {sqlite3.sqlite_version}",
                hint="use a later Python, or PostgreSQL",
            )
        self.path = path.absolute()
        self._wait_seconds = wait_seconds
        self._turns = _Turns()

    @property
    def name(self) -> str:
        return f"the store {self.path}"

    def connect(self) -> SqliteConnection:
        with _as_store_errors(self.path):
            _make_if_missing(self.path)
            raw = sqlite3.connect(
                self.path, isolation_level=None, timeout=self._wait_seconds, check_same_thread=False
            )
            try:
                for setting in _SETTINGS:
                    raw.execute(setting)
                if _start_log(raw, self._wait_seconds) != "wal":  # SQLite does not raise for this
                    raise _read_only(self.path)
            except BaseException:
                raw.close()
                raise
        return SqliteConnection(self.path, raw, self._turns, self._wait_seconds)

    def append_only(self, table: str, key: str) -> list[str]:
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        return [
            *(
                f"CREATE TRIGGER no_{verb}_of_{table} BEFORE {verb} ON {table} {refuse}"
                for verb in ("UPDATE", "DELETE")
            ),
            # INSERT OR REPLACE would delete without a DELETE trigger.
            f"CREATE TRIGGER no_second_{table} BEFORE INSERT ON {table}"
            f" WHEN EXISTS (SELECT 1 FROM {table} WHERE {key} = NEW.{key}) {refuse}",
        ]

    def is_empty(self) -> bool:
        if not self.path.exists():  # connecting would create it
            return True
        with closing(self.connect()) as connection:
            return not connection.tables()

    def copy_to(self, path: Path) -> None:
        with _as_store_errors(path):
            _copy(self.path, path)
            with closing(sqlite3.connect(path)) as copy:
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, not three

    def copy_from(self, path: Path) -> None:
        with read_copy(path):  # it is checked there
            pass
        self.connect().close()  # creates the file, for its owner only
        with _as_store_errors(self.path):
            _copy(path, self.path)

    def check(self) -> list[str]:
        with closing(self.connect()) as connection:
            lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check")]
            rows = connection.execute("PRAGMA foreign_key_check")
        missing = [
            f"a row of {table} refers to a missing one of {parent}" for table, _, parent, _ in rows
        ]
        return [line for line in lines if line != "ok"] + missing

    def scrub(self) -> bool:
        # The file has zeros in place of a deleted row; the log keeps the old page until truncated.
        has_turn = self._turns.take(self._wait_seconds)
        try:
            with closing(self.connect()) as connection:
                connection.execute(f"PRAGMA busy_timeout = {_SCRUB_MILLISECONDS}")
                ((busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            if has_turn:
                self._turns.give()
        return not busy

    @contextmanager
    def worker_lock(self) -> Iterator[SqliteConnection | None]:
        with _as_store_errors(self.path):
            path = self.path.with_name(f"{self.path.name}.worker")
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(file):
                yield None
                return
            with closing(self.connect()) as connection:
                yield connection
        finally:
            os.close(file)  # releases the lock, as the end of the process does


class _Turns:
    """A fair lock for the writing threads of this process: the longest wait goes first.

    SQLite makes a writer retry at intervals, so a thread that writes all the time would starve
    one that writes now and then. Other processes still have to retry.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_taken = False
        self._waiting: deque[Lock] = deque()

    def take(self, wait_seconds: float) -> bool:
        """Whether our turn came in time; if not, SQLite reports the conflict."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            gate = Lock()
            gate.acquire()
            self._waiting.append(gate)
        if gate.acquire(timeout=wait_seconds):
            return True
        with self._lock:
            if gate not in self._waiting:  # our turn came just as we gave up
                return True
            self._waiting.remove(gate)
            return False

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


class SqliteConnection:
    share_lock = exclusive_lock = ""  # SQLite has only one writer at a time
    is_lost = False

    def __init__(
        self, path: Path, raw: sqlite3.Connection, turns: _Turns, wait_seconds: float
    ) -> None:
        self._path = path
        self._raw = raw
        self._turns = turns
        self._wait_seconds = wait_seconds
        self._has_turn = False
        self._writing = True
        self.has_failed = False

    def begin(self, *, writing: bool) -> None:
        self.has_failed = False
        with self._watched():
            if writing != self._writing:
                self._raw.execute(f"PRAGMA query_only = {'OFF' if writing else 'ON'}")
                self._writing = writing
            if writing:
                self._has_turn = self._turns.take(self._wait_seconds)
            self._raw.execute("BEGIN IMMEDIATE" if writing else "BEGIN")

    def commit(self) -> None:
        with self._watched():
            self._raw.execute("COMMIT")
        self._end_turn()

    def rollback(self) -> None:
        with self._watched():
            if self._raw.in_transaction:  # SQLite itself rolls back when the disk is full
                self._raw.execute("ROLLBACK")
        self._end_turn()

    def close(self) -> None:
        with self._watched():
            self._raw.close()
        self._end_turn()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with self._watched():
            return self._raw.execute(sql, parameters).fetchall()

    def execute_many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        with self._watched():
            self._raw.executemany(sql, parameters)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        one = f"({', '.join('?' * len(columns))})"
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "
        whole = len(rows) - len(rows) % _ROWS_TOGETHER
        if whole:
            parts = [rows[k : k + _ROWS_TOGETHER] for k in range(0, whole, _ROWS_TOGETHER)]
            self.execute_many(
                statement + ", ".join([one] * _ROWS_TOGETHER),
                [list(chain.from_iterable(part)) for part in parts],
            )
        self.execute_many(statement + one, rows[whole:])

    def values_query(self, values: Sequence[bytes] | Sequence[int]) -> tuple[str, Sequence[Any]]:
        if all(isinstance(value, int) for value in values):
            return "SELECT value FROM json_each(?)", (json.dumps(list(values)),)
        self.execute("DELETE FROM given")
        self.insert("given", ["value"], [(value,) for value in values])
        return "SELECT value FROM given", ()

    def tables(self) -> set[str]:
        return {name for (name,) in self.execute("SELECT name FROM sqlite_schema")}

    def overwrite_deleted(self, *, always: bool) -> None:
        self.execute(f"PRAGMA secure_delete = {'ON' if always else 'FAST'}")

    def lock_schema(self) -> None:
        """Do nothing: SQLite has only one writer at a time."""

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.give()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            self.has_failed = True
            raise _store_error(self._path, problem) from None


class SqliteCopy:
    """A file that `Sqlite.copy_to` wrote, open for reading."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    @property
    def version(self) -> int:
        return int(self._raw.execute("SELECT MAX(version) FROM migration").fetchone()[0])

    @property
    def tables(self) -> list[str]:
        """Tables with data, each after those that its rows refer to."""
        names = self._raw.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        parents = {
            name: {row[2] for row in self._raw.execute(f"PRAGMA foreign_key_list({name})")}
            for (name,) in names
            if _is_of_store(name)
        }
        return list(TopologicalSorter(parents).static_order())

    @property
    def numbers(self) -> dict[str, int]:
        """The last number that each table with numbers has given to a row."""
        rows = self._raw.execute("SELECT name, seq FROM sqlite_sequence")
        return {name: last for name, last in rows if _is_of_store(name)}

    def columns(self, table: str) -> list[str]:
        return [row[1] for row in self._raw.execute(f"PRAGMA table_info({table})")]

    def rows(self, table: str) -> Iterator[Row]:
        return self._raw.execute(f"SELECT * FROM {table}")


@contextmanager
def read_copy(path: Path) -> Iterator[SqliteCopy]:
    """Open the copy of a store; StoreError if it is another file, or damaged."""
    with _as_store_errors(path), closing(_read_only_connection(path)) as raw:
        try:
            sound = raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            table = raw.execute("SELECT 1 FROM sqlite_schema WHERE name = 'migration'").fetchone()
        except sqlite3.DatabaseError as problem:
            if problem.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            sound = table = None
        if not (sound and table):
            raise StoreError(
                f"{path} must be a copy of a store; it is another file, or damaged",
                hint="sfumato backup writes copies",
            )
        yield SqliteCopy(raw)


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database, by its first bytes."""
    with _as_store_errors(path), path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _is_of_store(table: str) -> bool:
    return table != "migration" and not table.startswith("sqlite_")


def _make_if_missing(path: Path) -> None:
    """Create the file, readable by its owner only.

    An existing file is not opened: closing it would release all locks of this process on it
    (POSIX), and another process could then remove the log.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _read_only_connection(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_SECONDS)


def _copy(source: Path, target: Path) -> None:
    """Copy a snapshot of all pages in one transaction."""
    with closing(_read_only_connection(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start_log(raw: sqlite3.Connection, wait_seconds: float) -> str:
    """Set the journal mode to WAL, and return what it is then.

    While another connection does this to a new file, SQLite raises at once, whatever its timeout.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            (mode,) = raw.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as problem:
            if problem.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return str(mode)


@contextmanager
def _as_store_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's and file errors as `StoreError`s, without the cause: it may show values."""
    try:
        yield
    except sqlite3.Error as problem:
        raise _store_error(path, problem) from None
    except OSError as problem:
        raise _file_error(path, problem) from None


def _store_error(path: Path, problem: sqlite3.Error) -> StoreError:
    # The low byte is the primary error code; the higher bytes refine it.
    kind = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if kind == sqlite3.SQLITE_FULL or (kind == sqlite3.SQLITE_IOERR and _is_full(path)):
        return _full(path)
    if kind == sqlite3.SQLITE_READONLY:
        return _read_only(path)
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return StoreUnavailable(
            f"the store {path} is locked: {problem}",
            hint="find the process that holds the lock; try again",
        )
    if kind in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return StoreUnavailable(
            f"the store {path} cannot be reached: {problem}",
            hint="check that its folder exists and its disk works; try again",
        )
    if str(problem).startswith("Could not decode"):  # its message has the whole text
        return StoreDamaged("a text in the store is damaged: it is not UTF-8")
    return StoreError(f"the store {path} refuses: {problem}")


def _file_error(path: Path, problem: OSError) -> StoreError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path)
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _read_only(path)
    return StoreUnavailable(
        f"the store {path} cannot be reached: {problem.strerror}",
        hint="check that its folder exists",
    )


def _full(path: Path) -> StoreFull:
    return StoreFull(
        f"there is no room left for the store {path}", hint="free space on its disk; try again"
    )


def _read_only(path: Path) -> StoreReadOnly:
    return StoreReadOnly(
        f"the store {path} is read-only",
        hint="check the owner of the file and its folder, and how its disk is mounted",
    )


def _is_full(path: Path) -> bool:
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:
        return False

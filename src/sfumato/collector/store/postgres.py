"""A store on a PostgreSQL server, for a collector of more than one process.

It uses locks between sessions, so a pooler must give each connection a session of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from sfumato.collector.store import schema
from sfumato.collector.store.driver import WAIT_SECONDS, Row
from sfumato.collector.store.sqlite import is_sqlite, read_copy
from sfumato.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable

_CONNECT_SECONDS = 10
_WORKER, _SCHEMA = 0x5F01, 0x5F02  # our advisory locks; each schema has its own
_TYPES = {
    "number": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "integer": "BIGINT",
    "bytes": "BYTEA",
    "table": "",
    "index_table": "",
}
_COLUMN_TYPES = {int: "int8", str: "text", bytes: "bytea"}
_FULL = {"53100"}  # SQLSTATE; a whole class is named by its first two characters
_READ_ONLY = {"25006", "42501"}
_UNAVAILABLE = {"08", "40", "53", "55P03", "57", "58"}
_ALIVE = {  # both ends notice within about eleven seconds that the other's machine is gone
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}
_LET_GO = """SELECT set_config(name, value, false) FROM pg_settings JOIN (VALUES
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '11s'), ('client_connection_check_interval', '1s'),
    ('application_name', 'sfumato worker')) AS ours (name, value) USING (name)"""
_IS_DURABLE = """SELECT current_setting('fsync') = 'on',
    set_config('lock_timeout', %s, false),
    CASE current_setting('synchronous_commit')
        WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END"""
_REFUSE = """CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE restrict_violation USING MESSAGE = TG_TABLE_NAME || ' is append-only'; END $$"""


class Postgres:
    """The database at a `postgresql://…` URL."""

    types: Mapping[str, str] = _TYPES

    def __init__(self, url: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        try:
            parts = conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            # The message does not show it: it may contain a password.
            raise StoreError(
                "the address of a store on PostgreSQL cannot be read",
                hint="write postgresql://user:password@host:5432/name, with %40 for an @ in a part",
            ) from None
        self.url = url
        self._wait_seconds = wait_seconds
        self.name = f"the store {parts.get('dbname', '')} on {parts.get('host', 'this machine')}"

    def connect(self) -> PostgresConnection:
        try:
            return PostgresConnection(self.name, self._raw_connection())
        except psycopg.Error as problem:
            raise _store_error(self.name, problem) from None

    def append_only(self, table: str, key: str) -> list[str]:
        return [
            _REFUSE,
            f"CREATE TRIGGER no_change_of_{table} BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}"
            " EXECUTE FUNCTION refuse_change()",
        ]

    def is_empty(self) -> bool:
        with closing(self.connect()) as connection:
            return not connection.tables()

    def copy_to(self, path: Path) -> None:
        self._run("pg_dump", "--format=custom", f"--file={path}")

    def copy_from(self, path: Path) -> None:
        if is_sqlite(path):  # the copy of a store that moves to this server
            self._copy_from_sqlite(path)
            return
        self._run(
            "pg_restore",
            *("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"),
            str(path),
        )

    def _copy_from_sqlite(self, path: Path) -> None:
        """Copy all rows under their numbers, in one transaction; the copy keeps its version."""
        with read_copy(path) as copy, closing(self.connect()) as connection:
            connection.begin(writing=True)
            try:
                connection.lock_schema()
                schema.create(self, connection, copy.version)
                for table in copy.tables:
                    connection.copy_rows(table, copy.columns(table), copy.rows(table))
                for table, last in copy.numbers.items():
                    connection.continue_numbers(table, copy.columns(table)[0], last)
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def check(self) -> None:
        """Nothing: the server has its own tools for this (checksums, pg_amcheck)."""

    def scrub(self) -> bool:
        """Do nothing: the server removes rows with VACUUM, its log with the next checkpoints."""
        return True

    @contextmanager
    def worker_lock(self) -> Iterator[PostgresConnection | None]:
        # The session owns the lock: it ends with the connection, the process or its machine.
        with closing(self.connect()) as connection:
            lock = "SELECT pg_try_advisory_lock(?, hashtext(current_schema()))"
            is_ours = connection.execute(lock, (_WORKER,)) == [(True,)]
            if is_ours:
                connection.execute(_LET_GO)
            yield connection if is_ours else None

    def _raw_connection(self) -> psycopg.Connection[Row]:
        own: dict[str, Any] = {"client_encoding": "utf8", "connect_timeout": _CONNECT_SECONDS}
        parts = {**own, **_ALIVE, **conninfo.conninfo_to_dict(self.url)}
        raw = psycopg.connect(conninfo.make_conninfo("", **parts), autocommit=True)
        try:
            row = raw.execute(_IS_DURABLE, (f"{round(1000 * self._wait_seconds)}ms",)).fetchone()
            if row is None or row[0] is not True:
                raise StoreError(
                    f"{self.name} would lose acknowledged reports in a crash: fsync is off there",
                    hint="set fsync = on in postgresql.conf",
                )
        except BaseException:
            raw.close()
            raise
        return raw

    def _run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's own programs, without the password among its arguments."""
        parts = conninfo.conninfo_to_dict(self.url)
        password = parts.pop("password", None)
        process = subprocess.run(
            [_program_path(program), f"--dbname={conninfo.make_conninfo('', **parts)}", *arguments],
            env=os.environ if password is None else {**os.environ, "PGPASSWORD": str(password)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            # Only the first line: the others may show a row.
            reason = next(iter(process.stderr.splitlines()), f"exit code {process.returncode}")
            raise StoreError(f"{program} failed on {self.name}: {reason}")


class PostgresConnection:
    share_lock = " FOR SHARE"
    exclusive_lock = " FOR UPDATE"

    def __init__(self, name: str, raw: psycopg.Connection[Row]) -> None:
        self._name = name
        self._raw = raw
        self.has_failed = False

    @property
    def is_lost(self) -> bool:
        return self._raw.closed

    def begin(self, *, writing: bool) -> None:
        self.has_failed = False
        if not writing:
            self._query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        elif (
            self._query("BEGIN ISOLATION LEVEL READ COMMITTED; SHOW transaction_read_only") == "on"
        ):
            self.has_failed = True
            raise _read_only(self._name)

    def commit(self) -> None:
        self._query("COMMIT")

    def rollback(self) -> None:
        self._query("ROLLBACK")

    def close(self) -> None:
        self._raw.close()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with self._watched():
            query = sql.replace("?", "%s").encode()
            cursor = self._raw.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        with self._watched(), self._raw.cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s").encode(), parameters)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        names = ", ".join(columns)
        if len(rows) == 1:
            marks = ", ".join("?" * len(columns))
            self.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows[0])  # noqa: S608
        elif rows:
            query = f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)".encode()
            with self._watched(), self._raw.cursor() as cursor, cursor.copy(query) as copy:
                copy.set_types([_COLUMN_TYPES[type(value)] for value in rows[0]])
                for row in rows:
                    copy.write_row(row)

    def copy_rows(self, table: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
        """Insert rows that have their numbers already; they may contain NULL."""
        query = f"COPY {table} ({', '.join(columns)}) FROM STDIN".encode()
        with self._watched(), self._raw.cursor() as cursor, cursor.copy(query) as copy:
            for row in rows:
                copy.write_row(row)

    def continue_numbers(self, table: str, column: str, last: int) -> None:
        """Give the next row of a table the number after `last`."""
        self.execute("SELECT setval(pg_get_serial_sequence(?, ?), ?)", (table, column, last))

    def values_query(self, values: Sequence[bytes] | Sequence[int]) -> tuple[str, Sequence[Any]]:
        kind = "bytea" if values and isinstance(values[0], bytes) else "bigint"
        return f"SELECT value FROM unnest(?::{kind}[]) AS given (value)", (list(values),)  # noqa: S608

    def tables(self) -> set[str]:
        rows = self.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
        return {name for (name,) in rows}

    def overwrite_deleted(self, *, always: bool) -> None:
        """Do nothing: VACUUM removes deleted data."""

    def lock_schema(self) -> None:
        self.execute("SELECT pg_advisory_xact_lock(?, hashtext(current_schema()))", (_SCHEMA,))

    def _query(self, statements: str) -> str | None:
        """The result of the last of these statements without parameters, in one round trip."""
        with self._watched():
            cursor = self._raw.execute(statements.encode(), prepare=False)
            while cursor.nextset():
                pass
            row = cursor.fetchone() if cursor.description else None
            return None if row is None else row[0]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as problem:  # its details show whole rows, so it is not the cause
            self.has_failed = True
            raise _store_error(self._name, problem) from None


def _program_path(program: str) -> str:
    """The path of one of PostgreSQL's programs; Debian keeps some off the PATH, by version."""
    by_version = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), key=_version)
    path = shutil.which(program) or next(map(str, reversed(by_version)), None)
    if path is None:
        raise StoreError(f"{program} is not installed", hint="install PostgreSQL's client programs")
    return path


def _version(program: Path) -> float:
    folder = program.parents[1].name
    return float(folder) if folder.replace(".", "", 1).isdigit() else 0.0


def _store_error(name: str, problem: psycopg.Error) -> StoreError:
    state = problem.sqlstate
    message = problem.diag.message_primary
    if message is None:  # the server was not reached, or closed the connection
        message = next(iter(str(problem).splitlines()), type(problem).__name__)
    if state in _FULL:
        return StoreFull(f"there is no room left for {name}", hint="free space on its disk")
    if state in _READ_ONLY:
        return _read_only(name)
    if (state is None and isinstance(problem, psycopg.OperationalError)) or (
        state is not None and not _UNAVAILABLE.isdisjoint({state, state[:2]})
    ):
        return StoreUnavailable(
            f"{name} cannot be reached: {message}",
            hint="check that the server runs and knows this user and database; try again",
        )
    return StoreError(f"{name} refuses: {message}")


def _read_only(name: str) -> StoreReadOnly:
    return StoreReadOnly(
        f"{name} is read-only",
        hint="check that the server is not a standby, and the privileges of this user",
    )

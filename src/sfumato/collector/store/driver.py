"""Databases behind one small interface, so that the store's SQL is written once.

Statements use `?` for a parameter. What differs is in `sqlite`, `postgres` and so on. Their errors
are raised as `StoreError`s, without a value in the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

WAIT_SECONDS = 30  # how long to wait for a lock that another connection holds

Row = tuple[Any, ...]


class DatabaseConnection(Protocol):
    """One session with a database: used by one thread at a time, in one transaction at a time."""

    @property
    def has_failed(self) -> bool:
        """Whether a call has raised since the transaction began; then it must not be committed."""

    @property
    def is_lost(self) -> bool:
        """Whether the database has closed the connection, so that a new one may work."""

    @property
    def share_lock(self) -> str:
        """The end of a SELECT whose rows must not change until this transaction is over."""

    @property
    def exclusive_lock(self) -> str:
        """The end of a SELECT whose rows nobody else may lock until this transaction is over."""

    def begin(self, *, writing: bool) -> None:
        """Begin a transaction that writes, or one that reads a snapshot."""

    def commit(self) -> None:
        """Commit; the transaction is on disk when this returns."""

    def rollback(self) -> None: ...

    def close(self) -> None: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]: ...

    def execute_many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Execute a statement without a result once for each of these."""

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert many rows at once, numbered in their order."""

    def values_query(self, values: Sequence[bytes] | Sequence[int]) -> tuple[str, Sequence[Any]]:
        """A query with one column, `value`, and its parameters; valid until the next call."""

    def tables(self) -> set[str]:
        """The names of the existing tables."""

    def overwrite_deleted(self, *, always: bool) -> None:
        """Overwrite all data that is deleted from now on, or only where that costs nothing."""

    def lock_schema(self) -> None:
        """Keep others from migrating until this transaction is over."""


class Database(Protocol):
    """A place for a store."""

    @property
    def name(self) -> str:
        """Its name in messages, without a password."""

    @property
    def types(self) -> Mapping[str, str]:
        """The values of the placeholders in `schema`."""

    def connect(self) -> DatabaseConnection: ...

    def append_only(self, table: str, key: str) -> list[str]:
        """Statements after which the database refuses to change or delete a row of `table`."""

    def is_empty(self) -> bool:
        """Whether it has no tables, or does not exist."""

    def copy_to(self, path: Path) -> None:
        """Write a snapshot to the empty file `path`, while others keep reading and writing."""

    def copy_from(self, path: Path) -> None:
        """Fill this empty database with what `copy_to` wrote, whole or not at all. A server also
        takes a copy from an SQLite file."""

    def check(self) -> list[str] | None:
        """What is wrong with its files, in words; None if the database cannot check them."""

    def scrub(self) -> bool:
        """Remove deleted data from the files; False if another connection prevented it."""

    def worker_lock(self) -> AbstractContextManager[DatabaseConnection | None]:
        """A connection for the only worker of all processes, or None if another one has the lock.

        A worker that has lost the lock can do nothing more on this connection.
        """

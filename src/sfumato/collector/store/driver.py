"""Two databases behind one small interface, so that the store's SQL is written once.

SQL has `?` for a parameter. What SQLite and PostgreSQL do differently is in their own files:
`sqlite` and `postgres`. Their errors leave as `StoreError`s, without a value in the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

WAIT_SECONDS = 30  # for a lock that somebody else holds

Row = tuple[Any, ...]


class Connection(Protocol):
    """One session with a database: used by one thread at a time, in one transaction at a time."""

    @property
    def has_failed(self) -> bool:
        """Whether a call raised since the transaction began; then it must not be committed."""

    @property
    def is_lost(self) -> bool:
        """Whether the database has hung up, so that a new connection may do better."""

    @property
    def sharing(self) -> str:
        """Ends a SELECT whose rows must stay as they are until this transaction is over."""

    @property
    def holding(self) -> str:
        """Ends a SELECT whose rows nobody else may hold until this transaction is over."""

    def begin(self, *, writing: bool) -> None:
        """A transaction that writes, or one that reads what was there at one moment."""

    def commit(self) -> None:
        """Return means that it is on disk."""

    def rollback(self) -> None: ...

    def close(self) -> None: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]: ...

    def execute_many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """The same once for each of these, which tells nothing."""

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Many rows at once, numbered in their order."""

    def listed(self, values: Sequence[bytes] | Sequence[int]) -> tuple[str, Sequence[Any]]:
        """A query with one column, `value`, and its parameters; good until the next call."""

    def tables(self) -> set[str]:
        """The names of the tables that are there."""

    def overwrite_deleted(self, *, always: bool) -> None:
        """Whether all that is deleted from now on is overwritten, or only where that is free."""

    def lock_schema(self) -> None:
        """Let nobody else migrate until this transaction is over."""


class Database(Protocol):
    """Where a store is."""

    @property
    def name(self) -> str:
        """For messages: no password is in it."""

    @property
    def types(self) -> Mapping[str, str]:
        """What the braces in `schema` stand for."""

    def connect(self) -> Connection: ...

    def append_only(self, table: str, key: str) -> list[str]:
        """Statements after which the database refuses to change or delete a row of `table`."""

    def is_empty(self) -> bool:
        """Whether there is no table in it, or no database at all."""

    def copy_to(self, path: Path) -> None:
        """Write what is there at one moment to the empty file `path`, while others go on."""

    def copy_from(self, path: Path) -> None:
        """Fill this empty database with what `copy_to` wrote, whole or not at all."""

    def forget(self) -> bool:
        """Take what was deleted out of the files; False: somebody was in the way, try again."""

    def worker_lock(self) -> AbstractContextManager[Connection | None]:
        """A connection for the only worker, None if another has it: one over all processes.

        Whoever has lost the lock can do nothing more on this connection.
        """

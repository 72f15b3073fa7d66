"""The store: what a collector keeps, in an SQLite file or on a PostgreSQL server.

Everything happens in a transaction, whole or not at all; after its block it is on disk. What can be
done in one is in `transaction`.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> store = Store.open(f"sqlite:///{folder.name}/collector.db")
    >>> store.migrate()
    >>> with store.transaction() as tx:
    ...     tx.add_dictionary("5f" * 32, b'"oak"\\n"elm"\\n')
    >>> with store.reading() as tx:
    ...     tx.dictionary("5f" * 32)
    b'"oak"\\n"elm"\\n'
    >>> store.close()
    >>> folder.cleanup()

An upload has a number, its task, how many reports and their bytes: no time, no address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock

from sfumato.collector import schema
from sfumato.collector.database import database
from sfumato.collector.driver import Connection, Database
from sfumato.collector.transaction import (
    StudyRow,
    StudyState,
    TaskRow,
    TaskState,
    TokenRow,
    Transaction,
)
from sfumato.errors import StoreError

__all__ = ["Store", "StudyRow", "StudyState", "TaskRow", "TaskState", "TokenRow", "Transaction"]

_DAY_SECONDS = 86_400


class Store:
    """A store that is open. Any thread may use it; each transaction has a connection of its own."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self._idle: list[Connection] = []
        self._lock = Lock()
        self._is_closed = False

    @classmethod
    def open(cls, url: str | Path, *, now: Callable[[], float] = time.time) -> Store:
        """The store at `sqlite:///FILE`, a path or `postgresql://…`; see `database`."""
        return cls(database(url), now=now)

    @property
    def name(self) -> str:
        """What to call it in a message; there is no password in it."""
        return self._database.name

    def migrate(self) -> None:
        """Make the tables, or bring those of an older version up to date."""
        schema.migrate(self._database)

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Read and write. Nothing is kept if an exception leaves the block."""
        return self._transaction(writing=True)

    def reading(self) -> AbstractContextManager[Transaction]:
        """Read what was there at one moment; to write raises StoreReadOnly."""
        return self._transaction(writing=False)

    def forget(self) -> bool:
        """Take what was deleted out of the files, as far as the database lets us.

        False if somebody was in the way: try again.
        """
        return self._database.forget()

    def worker_lock(self) -> AbstractContextManager[bool]:
        """Whether this is the only worker: True for one holder at a time, over all processes."""
        return self._database.worker_lock()

    def close(self) -> None:
        """Close the connections; one that is in use is closed when its transaction is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __repr__(self) -> str:
        return f"Store({self.name})"

    @contextmanager
    def _transaction(self, *, writing: bool) -> Iterator[Transaction]:
        connection = self._begun(writing=writing)
        tx = Transaction(connection, today=int(self._now() // _DAY_SECONDS))
        try:
            yield tx
            if connection.has_failed:  # and its error was caught within the block
                raise StoreError(
                    "a transaction in which a call failed is never kept",
                    hint="let the error leave the block",
                )
            connection.commit()
        except BaseException:
            self._undo(connection)
            raise
        finally:
            tx.end()
        self._give_back(connection)

    def _begun(self, *, writing: bool) -> Connection:
        """A connection, idle or new, with a transaction begun."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise StoreError(f"{self.name} was closed", hint="open it again")
                idle = self._idle.pop() if self._idle else None
            connection = idle or self._connected()
            try:
                connection.begin(writing=writing)
            except BaseException:
                is_stale = idle is not None and idle.is_lost  # the server was started anew
                connection.close()
                if is_stale:
                    continue
                raise
            return connection

    def _connected(self) -> Connection:
        connection = self._database.connect()
        try:
            schema.check_version(self._database, connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _undo(self, connection: Connection) -> None:
        """Roll back. A connection on which something failed is not used again."""
        if not connection.has_failed:
            with suppress(StoreError):  # has_failed tells
                connection.rollback()
        if connection.has_failed:
            connection.close()  # which rolls back as well
        else:
            self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

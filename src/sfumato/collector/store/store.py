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
from threading import Lock, local
from typing import Self

from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.driver import Connection, Database
from sfumato.collector.store.transaction import (
    StudyRow,
    StudyState,
    Taking,
    TaskRow,
    TaskState,
    TokenRow,
    Transaction,
)
from sfumato.errors import StoreError, StoreUnavailable

__all__ = [
    "Store",
    "StudyRow",
    "StudyState",
    "Taking",
    "TaskRow",
    "TaskState",
    "TokenRow",
    "Transaction",
]

_DAY_SECONDS = 86_400


class _Worker(local):
    """What the thread that holds the worker's lock writes over; each thread has its own."""

    connection: Connection | None = None


class Store:
    """A store that is open. Any thread may use it; each transaction has a connection of its own."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self._idle: list[Connection] = []
        self._lock = Lock()
        self._is_closed = False
        self._worker = _Worker()

    @classmethod
    def open(cls, url: str | Path, *, now: Callable[[], float] = time.time) -> Self:
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

    @contextmanager
    def worker_lock(self) -> Iterator[bool]:
        """Whether this is the only worker: True for one holder at a time, over all processes.

        What its thread writes within the block goes over the connection that holds the lock. So
        a worker whose lock is lost, with the connection, writes nothing more: StoreUnavailable.
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
        """A connection with a transaction begun: the worker's, an idle one or a new one."""
        if writing and self._worker.connection is not None:
            return self._begun_by_worker(self._worker.connection)
        while True:
            with self._lock:
                self._check_open()
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self.name} was closed", hint="open it again")

    def _begun_by_worker(self, connection: Connection) -> Connection:
        self._check_open()
        if connection.has_failed:
            raise StoreUnavailable(
                f"the only worker of {self.name} has lost its lock",
                hint="take the lock again; what was not committed is done again",
            )
        try:
            connection.begin(writing=True)
        except BaseException:
            connection.close()
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
        if connection is self._worker.connection:
            return  # it is kept for the next
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

"""What every table's statements are run by, until their transaction is over."""
# ruff: noqa: S608 -- only names of our own are put into statements; every value is a parameter

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.collector.store.driver import Connection, Row
from sfumato.errors import StoreError


class Statements:
    """A connection while a transaction is open on it."""

    def __init__(self, connection: Connection, *, today: int) -> None:
        self._connection: Connection | None = connection
        self._today = today
        self._tasks: dict[str, int] = {}
        self._rounds: dict[str, int] = {}

    def end(self) -> None:
        """Called by the store."""
        self._connection = None

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise StoreError("this transaction is over", hint="read and write within its block")
        return self._connection

    def _run(self, sql: str, *parameters: Any) -> list[Any]:
        return self._open.execute(sql, parameters)

    def _insert(self, table: str, columns: str, rows: Sequence[Row]) -> None:
        self._open.insert(table, columns.split(", "), rows)

    def _sum(self, sql: str, *parameters: Any) -> int:
        return int(self._run(sql, *parameters)[0][0] or 0)

    def _task(self, task_id: str) -> int:
        """The number that stands for a task in the tables."""
        if task_id not in self._tasks:
            rows = self._run("SELECT task FROM task WHERE id = ?", task_id)
            if not rows:
                raise no_task(task_id)
            self._tasks[task_id] = rows[0][0]
        return self._tasks[task_id]

    def _held_open(self, task_id: str) -> int | None:
        """The number of a task, if it is open and takes any number of reports; nobody can close it
        before this is over."""
        rows = self._run(
            "SELECT task FROM task WHERE id = ? AND state = 'open' AND room IS NULL"
            + self._open.sharing,
            task_id,
        )
        return rows[0][0] if rows else None


def no_task(task_id: str) -> StoreError:
    return StoreError(f"there is no task {task_id}")

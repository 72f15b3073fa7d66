"""A queue in memory for masked tables on their way into a sum.

A table is long, and needed only once. So if the worker of a round is in the process that receives
a table, the table waits for it here. The worker adds the waiting tables, stores the new sum and its
members in one transaction, and only then are they acknowledged. A table that is not added in this
way, for any reason, is stored like any other message, and added from the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from sfumato.collector.store.round_tables import StoreOutcome


@dataclass(slots=True, eq=False, repr=False)
class QueuedTable:
    """A member's table; `settle` is called once with its outcome, from any thread. None: it was not
    added, and has to be stored."""

    member: int
    body: bytes
    settle: Callable[[StoreOutcome | None], None]


class TableQueue:
    """Tables that wait for this process's worker, by round, with at most `most_bytes` in total.

    Claim: every table that `offer` accepts is settled once.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._waiting: dict[str, deque[QueuedTable]] = {}  # by open round
        self._bytes = 0  # of tables that wait or are being added

    def open(self, round_id: str) -> None:
        """Accept tables of this round from now on."""
        with self._lock:
            self._waiting.setdefault(round_id, deque())

    def close(self, round_id: str) -> None:
        """Accept no more tables of this round, and settle those that wait."""
        with self._lock:
            rest = self._waiting.pop(round_id, deque())
        self.settle(rest, [None] * len(rest))

    def offer(self, round_id: str, table: QueuedTable) -> bool:
        """Queue a table, to be settled; False if it was not accepted, and stays the caller's."""
        with self._lock:
            waiting = self._waiting.get(round_id)
            if waiting is None or self._bytes + len(table.body) > self._most_bytes:
                return False
            waiting.append(table)
            self._bytes += len(table.body)
            return True

    def withdraw(self, round_id: str, table: QueuedTable) -> None:
        """Remove a table, unless it is being added already."""
        with self._lock:
            try:
                self._waiting.get(round_id, deque()).remove(table)
            except ValueError:
                return
        self.settle([table], [None])

    def take(self, round_id: str, most_bytes: int) -> list[QueuedTable]:
        """Take the oldest tables, about `most_bytes`; the caller has to `settle` them."""
        tables: list[QueuedTable] = []
        with self._lock:
            waiting = self._waiting.get(round_id, deque())
            while waiting and most_bytes > 0:
                tables.append(waiting.popleft())
                most_bytes -= len(tables[-1].body)
        return tables

    def settle(
        self, tables: Sequence[QueuedTable], outcomes: Sequence[StoreOutcome | None]
    ) -> None:
        """Report the outcomes of tables."""
        with self._lock:
            self._bytes -= sum(len(table.body) for table in tables)
        for table, outcome in zip(tables, outcomes, strict=True):
            table.settle(outcome)

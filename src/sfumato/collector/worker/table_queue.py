"""Masked tables on their way from a connection into a sum, without a detour over the disk.

A table is long, and of use once: to be added. So where the worker of a round is in the process that
receives a table, the table waits for it here, in memory. The worker adds what waits, stores the new
sum and whose tables are in it in one transaction, and only then are they acknowledged. Whatever is
not added in this way, for whatever reason, is stored as any other message, and added from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from sfumato.collector.store.round_tables import StoreOutcome


@dataclass(slots=True, eq=False, repr=False)
class QueuedTable:
    """A member's table; `settle` is called once with what became of it, from any thread. None: it
    was not added, and is to be stored."""

    member: int
    body: bytes
    settle: Callable[[StoreOutcome | None], None]


class TableQueue:
    """Tables that wait for this process's worker, by round; at most so many bytes of them.

    Claim: every table that `offer` accepts is settled once.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._waiting: dict[str, deque[QueuedTable]] = {}  # of rounds whose tables the worker adds
        self._bytes = 0  # of those that wait or are being added

    def open(self, round_id: str) -> None:
        """The worker adds tables of this round from now on."""
        with self._lock:
            self._waiting.setdefault(round_id, deque())

    def close(self, round_id: str) -> None:
        """It adds no more of them."""
        with self._lock:
            rest = self._waiting.pop(round_id, deque())
        self.settle(rest, [None] * len(rest))

    def offer(self, round_id: str, table: QueuedTable) -> bool:
        """Whether it waits here now, to be settled. If not it is still the caller's."""
        with self._lock:
            waiting = self._waiting.get(round_id)
            if waiting is None or self._bytes + len(table.body) > self._most_bytes:
                return False
            waiting.append(table)
            self._bytes += len(table.body)
            return True

    def withdraw(self, round_id: str, table: QueuedTable) -> None:
        """Wait no longer, unless it is being added already."""
        with self._lock:
            try:
                self._waiting.get(round_id, deque()).remove(table)
            except ValueError:
                return
        self.settle([table], [None])

    def take(self, round_id: str, most_bytes: int) -> list[QueuedTable]:
        """Those that came first, about so many bytes; `settle` them."""
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
        """Tell those who wait what became of their tables."""
        with self._lock:
            self._bytes -= sum(len(table.body) for table in tables)
        for table, outcome in zip(tables, outcomes, strict=True):
            table.settle(outcome)

"""Masked tables on their way from a connection into a sum, without a detour over the disk.

A table is long, and of use once: to be added. So where the worker of a round is in the process that
a table came to, the table waits for it here, in memory. The worker adds what waits, stores the new
sum and whose tables are in it in one transaction, and only then are they acknowledged. Whatever is
not taken so, for whatever reason, is stored as any other message, and added from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from sfumato.collector.store.round_tables import Keeping


@dataclass(slots=True, eq=False, repr=False)
class Arrival:
    """A member's table; `tell` is called once with what became of it, from any thread. None: it was
    not taken here, and is to be stored."""

    member: int
    body: bytes
    tell: Callable[[Keeping | None], None]


class Arrivals:
    """Tables that wait for this process's worker, by round; at most so many bytes of them.

    Claim: every table that is offered and taken in is told once what became of it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._waiting: dict[str, deque[Arrival]] = {}  # of rounds whose tables the worker takes
        self._bytes = 0  # of those that wait or are being added

    def open(self, round_id: str) -> None:
        """The worker takes tables of this round from now on."""
        with self._lock:
            self._waiting.setdefault(round_id, deque())

    def close(self, round_id: str) -> None:
        """It takes no more of them."""
        with self._lock:
            left = self._waiting.pop(round_id, deque())
        self.settle(left, [None] * len(left))

    def has_room(self, round_id: str, size: int) -> bool:
        """Whether tables of this round are taken, and so many bytes of them could wait now."""
        with self._lock:
            return round_id in self._waiting and self._bytes + size <= self._most_bytes

    def offer(self, round_id: str, arrival: Arrival) -> bool:
        """Whether it waits here now, to be told. If not it is still the caller's."""
        with self._lock:
            waiting = self._waiting.get(round_id)
            if waiting is None or self._bytes + len(arrival.body) > self._most_bytes:
                return False
            waiting.append(arrival)
            self._bytes += len(arrival.body)
            return True

    def withdraw(self, round_id: str, arrival: Arrival) -> None:
        """Wait no longer, unless it is being added already."""
        with self._lock:
            try:
                self._waiting.get(round_id, deque()).remove(arrival)
            except ValueError:
                return
        self.settle([arrival], [None])

    def take(self, round_id: str, most_bytes: int) -> list[Arrival]:
        """Those that came first, about so many bytes; `settle` them."""
        taken: list[Arrival] = []
        with self._lock:
            waiting = self._waiting.get(round_id, deque())
            while waiting and most_bytes > 0:
                taken.append(waiting.popleft())
                most_bytes -= len(taken[-1].body)
        return taken

    def settle(self, arrivals: Sequence[Arrival], kept: Sequence[Keeping | None]) -> None:
        """Tell what became of them."""
        with self._lock:
            self._bytes -= sum(len(arrival.body) for arrival in arrivals)
        for arrival, one in zip(arrivals, kept, strict=True):
            arrival.tell(one)

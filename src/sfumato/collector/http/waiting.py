"""Long polls: a request that waits for a change is woken at once if this process's worker makes it,
and soon if another process does.

While any request waits, the store is polled for changes of rounds, by one small query for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Literal

from sfumato.collector.logs import log_error
from sfumato.collector.store.store import Store
from sfumato.errors import StoreError

POLL_SECONDS = 0.5

Wakening = Literal["change", "timeout", "superseded"]


class ChangeNotifier:
    """A number that rises when a round may have changed. All methods but `notify` and `stop` belong
    to one loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[bytes, tuple[int, asyncio.Future[Wakening]]] = {}  # by device
        self._arrivals = count()
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self.number = 0

    def notify(self) -> None:
        """Wake all requests, because a round has changed; from any thread."""
        self._in_loop(self._wake)

    def stop(self) -> None:
        """Let no request wait any longer; from any thread."""
        self._stopping = True
        self._in_loop(self._wake)

    def arrival_number(self) -> int:
        """A number for a request that will wait; later requests have higher numbers."""
        return next(self._arrivals)

    async def wait(self, number: int, seconds: float, *, who: bytes, arrival: int) -> Wakening:
        """Wait until the number has risen above `number`, at most for `seconds`.

        A later request of the same device, `who`, supersedes this one: each waiting request keeps a
        connection, and a device may keep only one.
        """
        self._loop = asyncio.get_running_loop()
        if self._stopping:
            return "timeout"
        if self.number != number:
            return "change"
        mine: asyncio.Future[Wakening] = self._loop.create_future()
        latest, other = self._waiting.get(who, (arrival, None))
        if latest > arrival:
            return "superseded"
        _settle(other, "superseded")
        self._waiting[who] = arrival, mine
        if self._watcher is None or self._watcher.done():
            self._watcher = self._loop.create_task(self._watch())
        timer = self._loop.call_later(max(0.0, seconds), _settle, mine, "timeout")
        try:
            return await mine
        finally:
            timer.cancel()
            if self._waiting.get(who) == (arrival, mine):
                del self._waiting[who]

    async def _watch(self) -> None:
        """Look for changes that other processes make, as long as any request waits."""
        last = await asyncio.to_thread(self._read_state)
        self._wake()  # there may have been changes before
        while not self._stopping:
            await asyncio.sleep(POLL_SECONDS)
            if not self._waiting:  # a woken request waits again by now, if at all
                return
            state = await asyncio.to_thread(self._read_state)
            if state is not None and state != last:
                last = state
                self._wake()

    def _read_state(self) -> tuple[int, int] | None:
        try:
            with self._store.reading() as tx:
                return tx.revision()
        except StoreError as error:
            log_error("news-not-read", error)
            return None

    def _wake(self) -> None:
        self.number += 1
        waiting, self._waiting = self._waiting, {}
        for _, request in waiting.values():
            _settle(request, "timeout" if self._stopping else "change")

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)


def _settle(request: asyncio.Future[Wakening] | None, wakening: Wakening) -> None:
    if request is not None and not request.done():
        request.set_result(wakening)

"""Long polls: whoever waits for a change is woken at once if this process's worker makes it, and
soon if another's does.

While anybody waits, the store is asked now and then whether any round has changed; one small query,
however many wait.
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
    """A number that rises when a round may have changed. All but `notify` and `stop` is for one
    loop."""

    def __init__(self, store: Store, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[bytes, tuple[int, asyncio.Future[Wakening]]] = {}  # by device
        self._arrivals = count()
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self.number = 0

    def notify(self) -> None:
        """A round has changed; from any thread."""
        self._in_loop(self._wake)

    def stop(self) -> None:
        """Let nobody wait any longer; from any thread."""
        self._stopping = True
        self._in_loop(self._wake)

    def arrival_number(self) -> int:
        """For a request that is going to wait: later ones have higher numbers."""
        return next(self._arrivals)

    async def wait(self, number: int, seconds: float, *, who: bytes, arrival: int) -> Wakening:
        """Wait until the number has risen above `number`, or for so many seconds.

        A later request of the same device, `who`, supersedes this one: each that waits keeps a
        connection, and there must be no more of them than devices.
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
        """Look for changes that other processes make, as long as anybody waits."""
        known = await self._read_state()
        self._wake()  # for changes before this looked
        while not self._stopping:
            await asyncio.sleep(self._poll_seconds)
            if not self._waiting:  # a request that was woken waits again by now, if at all
                return
            state = await self._read_state()
            if state is not None and state != known:
                known = state
                self._wake()

    async def _read_state(self) -> tuple[int, int] | None:
        try:
            return await asyncio.to_thread(self._read)
        except StoreError as error:
            log_error("news-not-read", error)
            return None

    def _read(self) -> tuple[int, int]:
        with self._store.reading() as tx:
            return tx.revision()

    def _wake(self) -> None:
        self.number += 1
        waiting, self._waiting = self._waiting, {}
        for _, one in waiting.values():
            _settle(one, "timeout" if self._stopping else "change")

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended, and nobody waits
                self._loop.call_soon_threadsafe(function)


def _settle(waiting: asyncio.Future[Wakening] | None, heard: Wakening) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(heard)

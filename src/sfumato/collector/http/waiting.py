"""Who waits for something to be told is woken: at once by this process's worker, soon by others'.

While anybody waits, the store is asked now and then whether there is something new in any round;
one small query, however many wait.
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

Heard = Literal["news", "nothing", "elsewhere"]


class News:
    """A number that changes when there may be something new. All but `tell` is for one loop."""

    def __init__(self, store: Store, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[bytes, tuple[int, asyncio.Future[Heard]]] = {}  # by who waits
        self._turns = count()
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self.number = 0

    def tell(self) -> None:
        """There is something new; from any thread."""
        self._in_loop(self._wake)

    def stop(self) -> None:
        """Let nobody wait any longer; from any thread."""
        self._stopping = True
        self._in_loop(self._wake)

    def turn(self) -> int:
        """For one that is going to wait: later ones have higher turns."""
        return next(self._turns)

    async def wait(self, number: int, seconds: float, *, who: bytes, turn: int) -> Heard:
        """Until there is something newer than `number`, or for so many seconds.

        Whoever waits a second time, elsewhere, is not waited for any longer where it did before:
        a connection is kept for each that waits, and there must be no more of them than devices.
        """
        self._loop = asyncio.get_running_loop()
        if self._stopping:
            return "nothing"
        if self.number != number:
            return "news"
        mine: asyncio.Future[Heard] = self._loop.create_future()
        latest, other = self._waiting.get(who, (turn, None))
        if latest > turn:
            return "elsewhere"
        _settle(other, "elsewhere")
        self._waiting[who] = turn, mine
        if self._watcher is None or self._watcher.done():
            self._watcher = self._loop.create_task(self._watch())
        timer = self._loop.call_later(max(0.0, seconds), _settle, mine, "nothing")
        try:
            return await mine
        finally:
            timer.cancel()
            if self._waiting.get(who) == (turn, mine):
                del self._waiting[who]

    async def _watch(self) -> None:
        """Look for what other processes have to tell, as long as anybody waits."""
        known = await self._looked()
        self._wake()  # for what came before this looked
        while not self._stopping:
            await asyncio.sleep(self._poll_seconds)
            if not self._waiting:  # who was woken waits again by now, if it still does
                return
            seen = await self._looked()
            if seen is not None and seen != known:
                known = seen
                self._wake()

    async def _looked(self) -> tuple[int, int] | None:
        try:
            return await asyncio.to_thread(self._read)
        except StoreError as error:
            log_error("news-not-read", error)
            return None

    def _read(self) -> tuple[int, int]:
        with self._store.reading() as tx:
            return tx.news()

    def _wake(self) -> None:
        self.number += 1
        waiting, self._waiting = self._waiting, {}
        for _, one in waiting.values():
            _settle(one, "nothing" if self._stopping else "news")

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended, and nobody waits
                self._loop.call_soon_threadsafe(function)


def _settle(waiting: asyncio.Future[Heard] | None, heard: Heard) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(heard)

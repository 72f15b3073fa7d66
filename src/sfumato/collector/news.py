"""Who waits for something to be told is woken: at once by this process's worker, soon by others'.

While anybody waits, the store is asked now and then whether there is something new in any round;
one small query, however many wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sfumato.collector.logs import log_error
from sfumato.collector.store import Store
from sfumato.errors import StoreError

POLL_SECONDS = 0.5


class News:
    """A number that changes when there may be something new. All but `tell` is for one loop."""

    def __init__(self, store: Store, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._waiting = 0
        self._stopping = False
        self.number = 0

    def tell(self) -> None:
        """There is something new; from any thread."""
        self._in_loop(self._wake)

    def stop(self) -> None:
        """Let nobody wait any longer; from any thread."""
        self._stopping = True
        self._in_loop(self._wake)

    async def wait(self, number: int, seconds: float) -> bool:
        """Until there is something newer than `number`; whether that was within so many seconds."""
        self._loop = asyncio.get_running_loop()
        until = self._loop.time() + seconds
        self._waiting += 1
        try:
            if self._watcher is None or self._watcher.done():
                self._watcher = self._loop.create_task(self._watch())
            while self.number == number and not self._stopping:
                left = until - self._loop.time()
                if left <= 0:
                    return False
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    return False
            return not self._stopping
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        """Look for what other processes have to tell, as long as anybody waits."""
        known = await self._looked()
        self._wake()  # for what came before this looked
        while self._waiting and not self._stopping:
            await asyncio.sleep(self._poll_seconds)
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
        self._changed.set()
        self._changed = asyncio.Event()

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

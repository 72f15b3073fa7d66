"""From futures that another thread resolves to the loop that waits for them, many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Bridge:
    """Brings results to the loop. A commit has many, and one wake-up of the loop brings them all;
    `asyncio.wrap_future` would wake it for each."""

    def __init__(self) -> None:
        self._resolved: deque[tuple[Future[Any], asyncio.Future[Any]]] = deque()
        self._is_called = False

    async def result(self, future: Future[T]) -> T:
        """What the future comes to. It is cancelled, if it still can be, with whoever waits."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def tell(future: Future[T]) -> None:  # in the thread that resolved it
            self._resolved.append((future, waiter))
            if not self._is_called:
                self._is_called = True
                loop.call_soon_threadsafe(self._settle)

        future.add_done_callback(tell)
        try:
            return await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _settle(self) -> None:
        self._is_called = False  # before looking: who comes after the look calls again
        while self._resolved:
            future, waiter = self._resolved.popleft()
            if waiter.done():  # nobody waits any more
                continue
            if (problem := future.exception()) is None:
                waiter.set_result(future.result())
            else:
                waiter.set_exception(problem)

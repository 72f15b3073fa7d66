"""Between the loop and a thread that it waits for: to and fro with many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from sfumato.collector.logs import log_error

T = TypeVar("T")


class Bridge:
    """Waits for what another thread does.

    To wake a thread, or a loop, costs more than what most uploads need. So the thread is woken when
    the loop has done all that was there to do, and the loop once for all that a commit resolved.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` wakes the thread."""
        self._wake_thread = wake
        self._is_waking = False
        self._brought: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_called = False

    def bring(self, call: Callable[[T], None]) -> Callable[[T], None]:
        """A function for the thread: with what it is given, `call` is called in the loop."""
        loop = asyncio.get_running_loop()
        if not self._is_waking:
            self._is_waking = True
            loop.call_soon(self._wake)

        def tell(what: T) -> None:  # in the thread
            self._brought.append((call, what))
            if not self._is_called:
                self._is_called = True
                with suppress(RuntimeError):  # the loop has ended, and nobody waits
                    loop.call_soon_threadsafe(self._settle)

        return tell

    async def result(self, future: Future[T]) -> T:
        """What the future comes to. It is cancelled, if it still can be, with whoever waits."""
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(future: Future[T]) -> None:
            if waiter.done():  # nobody waits any more
                return
            if (problem := future.exception()) is None:
                waiter.set_result(future.result())
            else:
                waiter.set_exception(problem)

        future.add_done_callback(self.bring(settle))
        try:
            return await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _wake(self) -> None:
        self._is_waking = False
        self._wake_thread()

    def _settle(self) -> None:
        self._is_called = False  # before looking: who comes after the look calls again
        while self._brought:
            call, what = self._brought.popleft()
            try:
                call(what)
            except Exception as problem:  # one's trouble is not the others'
                log_error("internal", problem)

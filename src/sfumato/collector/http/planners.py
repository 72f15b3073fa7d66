"""Planning studies, beside everything else: it may take minutes, and reports must not wait for it.

It has threads of its own, few of them, that the end of the process does not wait for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from sfumato.collector.logs import log_error
from sfumato.collector.problems import Problem
from sfumato.errors import ImpossibleError

MOST = 2  # plans that are made at a time
_RETRY_SECONDS = 10
_EXTREME = (ArithmeticError, IndexError, MemoryError)  # what numbers without measure end in

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Planners:
    """Runs what plans, in threads of its own."""

    def __init__(self, most: int = MOST) -> None:
        self._free = threading.Semaphore(most)

    async def call(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """Wait for it without blocking the loop; `busy` if as many as may be are at it."""
        if not self._free.acquire(blocking=False):
            raise Problem(
                "busy",
                "other studies are being planned",
                retry_after_seconds=_RETRY_SECONDS,
            )
        done: Future[_T] = Future()

        def run() -> None:
            done.set_running_or_notify_cancel()  # from here on nobody can take it back
            try:
                result = function(*arguments, **options)
            except BaseException as problem:
                self._free.release()
                done.set_exception(problem)
            else:
                self._free.release()
                done.set_result(result)

        threading.Thread(target=run, name="planner", daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except _EXTREME as problem:
            log_error("not-planned", problem)
            raise ImpossibleError(
                "no plan can be made of numbers as large or as small as these"
            ) from None

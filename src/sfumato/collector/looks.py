"""Looking things up for many who ask at once: one thread, and one transaction for all that wait.

To go to a thread and back, and to begin a transaction, costs more than most questions; so those
that are asked while some are being answered share the next transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from sfumato.collector.store.store import Store, Transaction
from sfumato.errors import SfumatoError, StoreError

T = TypeVar("T")
Look = Callable[[Transaction], T]

_MOST = 256  # answered together


class Looks:
    """Questions to the store, for one loop. What a question raises as a Problem is its own."""

    def __init__(self, store: Store, call: Callable[..., Awaitable[Any]]) -> None:
        """`call(function, *arguments)` runs what blocks, away from the loop."""
        self._store = store
        self._call = call
        self._waiting: list[tuple[Look[Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def look(self, question: Look[T]) -> T:
        """What the question finds in the store, as it is after it was asked."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append((question, answer))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                found = await self._call(self._answered, [question for question, _ in group])
            except Exception as problem:  # whatever it is, nobody may wait for ever
                found = [problem] * len(group)
            for (_, answer), one in zip(group, found, strict=True):
                if answer.done():  # nobody waits any more
                    continue
                if isinstance(one, Exception):
                    answer.set_exception(one)
                else:
                    answer.set_result(one)

    def _answered(self, questions: Sequence[Look[Any]]) -> list[Any]:
        with self._store.reading() as tx:
            return [_asked(question, tx) for question in questions]


def _asked(question: Look[Any], tx: Transaction) -> Any:
    try:
        return question(tx)
    except StoreError:  # everybody's
        raise
    except SfumatoError as problem:
        return problem

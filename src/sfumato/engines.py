"""Sum a function over shards: the only form of parallel work.

A shard is data, or the name of data. Functions are pure: a shard may be computed twice, and counts
once. Sums are of whole numbers, so they are the same in any order and with any engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

_Shard = TypeVar("_Shard")
_Part = TypeVar("_Part", bound=Any)  # an array, or whatever else adds


class Engine(Protocol):
    """Adds up function(shard) over all shards, in any order. It takes shards from their source as
    it needs them, so the source can tell how far it is."""

    def sum(
        self, function: Callable[[_Shard], _Part], shards: Iterable[_Shard]
    ) -> _Part | None: ...


class LocalEngine:
    """Threads of this process: the compiled kernels release the interpreter lock.

    It keeps few shards at a time, so memory depends on their size and not on their number.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1

    def sum(self, function: Callable[[_Shard], _Part], shards: Iterable[_Shard]) -> _Part | None:
        """The sum, or None if there are no shards."""
        total: _Part | None = None
        running: deque[Future[_Part]] = deque()

        def take() -> None:
            nonlocal total
            part = running.popleft().result()
            total = part if total is None else total + part

        with ThreadPoolExecutor(self.workers) as pool:
            for shard in shards:
                running.append(pool.submit(function, shard))
                if len(running) > self.workers:
                    take()
            while running:
                take()
        return total

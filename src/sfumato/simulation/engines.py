"""Sum a function over shards: the only form of parallel work."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
_Shard = TypeVar("_Shard")


class Engine(Protocol):
    """Adds up function(shard) over all shards, in any order."""

    def sum(self, function: Callable[[_Shard], I64], shards: Iterable[_Shard]) -> I64 | None: ...


class LocalEngine:
    """Threads of this process: the compiled kernels release the interpreter lock.

    It keeps few shards at a time, so memory depends on their size and not on their number.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1

    def sum(self, function: Callable[[_Shard], I64], shards: Iterable[_Shard]) -> I64 | None:
        """The sum, or None if there are no shards."""
        total: I64 | None = None
        running: deque[Future[I64]] = deque()

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

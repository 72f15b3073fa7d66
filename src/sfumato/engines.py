"""Sum a function over shards: the only form of parallel work.

A shard is data, or the name of data. Functions are pure: a shard may be computed twice, and counts
once. Sums are of whole numbers, so they are the same in any order and with any engine.
"""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from sfumato.errors import SfumatoError

_RETRIES = 2  # of a shard whose function raises, as when a store of files is busy
_PATIENCE_SECONDS = 60  # for the first worker of a scheduler

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
        running = set[Future[_Part]]()

        def take() -> None:
            nonlocal total, running
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                part = future.result()
                total = part if total is None else total + part

        with ThreadPoolExecutor(self.workers) as pool:
            for shard in shards:
                running.add(pool.submit(function, shard))
                if len(running) > self.workers:
                    take()
            while running:
                take()
        return total


class DaskEngine:
    """Workers of a Dask cluster: at the address of a scheduler, or else processes of this machine.

    Every shard is one task, and parts are added in pairs as they come, on the workers; only the sum
    comes here. Tasks are pure, so a shard or a sum that is lost with its worker is computed again,
    and counts once. At most two parts per worker, and the sums that they are added to, exist at a
    time. Function and shards are pickled, and a worker gets the function once. Workers need the
    same version of sfumato, and access to what the shards name.

    Close it, or use it in a `with` statement; that ends the processes that it started.
    """

    def __init__(self, scheduler: str | None = None, *, workers: int | None = None) -> None:
        """`workers` is the number of processes to start, by default one per core; with a
        `scheduler` none are started."""
        distributed = importlib.import_module("distributed")  # an extra, and untyped
        self._cluster: Any = None
        if scheduler is None:
            self._cluster = distributed.LocalCluster(
                n_workers=workers or os.cpu_count() or 1,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # any port: another cluster may have 8787
            )
        try:
            self._client: Any = distributed.Client(
                scheduler or self._cluster, timeout=_PATIENCE_SECONDS
            )
            self._client.wait_for_workers(1, timeout=_PATIENCE_SECONDS)
        except OSError as problem:  # also if the time is over
            raise SfumatoError(
                f"the Dask scheduler at {scheduler} must be reached, and have a worker, within "
                f"{_PATIENCE_SECONDS} seconds",
                hint="start it with `dask scheduler`, and workers with `dask worker ADDRESS`",
            ) from problem

    @property
    def address(self) -> str:
        """The address of the scheduler."""
        return str(self._client.scheduler.address)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, on their machines."""
        return list(self._client.run(os.getpid).values())

    def sum(self, function: Callable[[_Shard], _Part], shards: Iterable[_Shard]) -> _Part | None:
        """The sum, or None if there are no shards. An error or an interrupt cancels the rest."""
        most = 2 * max(1, sum(self._client.nthreads().values()))
        source, parts, running = iter(shards), list[Any](), set[Any]()
        arrivals = importlib.import_module("distributed").as_completed()
        has_more = True

        def submit(work: Callable[..., Any], *arguments: Any) -> None:
            future = self._client.submit(work, *arguments, pure=False, retries=_RETRIES)
            running.add(future)
            arrivals.add(future)

        # A task and no scattered data, which would be lost with the workers that have it.
        shared = self._client.submit(_same, function, pure=False, retries=_RETRIES)
        try:
            while has_more or running:
                while has_more and len(running) + len(parts) < most:
                    try:
                        submit(_call, shared, next(source))
                    except StopIteration:
                        has_more = False
                if running:
                    future = next(arrivals)
                    running.remove(future)
                    if future.status != "finished":
                        future.result()  # raises
                    parts.append(future)
                if len(parts) > 1:
                    submit(operator.add, parts.pop(), parts.pop())
            return parts[0].result() if parts else None
        finally:
            self._client.cancel([*running, *parts], force=True)

    def close(self) -> None:
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _call(function: Callable[[_Shard], _Part], shard: _Shard) -> _Part:
    return function(shard)

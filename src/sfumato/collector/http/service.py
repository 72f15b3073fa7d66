"""What the endpoints work with: one object, made at the start and closed at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from sfumato import __version__
from sfumato.collector.bridge import Bridge
from sfumato.collector.http.commit_queue import Uploads, Writer
from sfumato.collector.http.limits import Bodies
from sfumato.collector.http.task_cache import OpenTasks
from sfumato.collector.http.waiting import News
from sfumato.collector.logs import log_error
from sfumato.collector.looks import Looks
from sfumato.collector.metrics import Metrics
from sfumato.collector.problems import Problem
from sfumato.collector.settings import Settings
from sfumato.collector.store.ledger import work_out
from sfumato.collector.store.round_tables import Keeping
from sfumato.collector.store.store import Store
from sfumato.collector.worker.replay import Spoken
from sfumato.collector.worker.round_cache import LiveRounds
from sfumato.collector.worker.table_queue import Arrival, Arrivals
from sfumato.collector.worker.thread import Background
from sfumato.errors import ImpossibleError, SfumatoError

_THREADS = 8  # that wait for the store; as many connections
_PAGE_THREADS = 3  # the same, for people
_BUSY_SECONDS = 1.0  # that a masked table waits for a worker which does something else
_READY_SECONDS = 1.0  # an answer about readiness is good for so long

_P = ParamSpec("_P")
_I = TypeVar("_I")
_T = TypeVar("_T")


class Service:
    """A collector's store and threads. Everything that blocks goes through `call`."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        key: bytes,
        metrics: Metrics | None = None,
        worker: Background | None = None,
        news: News | None = None,
        arrivals: Arrivals | None = None,
        spoken: Spoken | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.settings = settings
        self.key = key  # signs offers
        self.metrics = metrics or Metrics()
        self.worker = worker
        self.now = now
        self.uploads = Uploads(store, settings, self.metrics)
        if worker is not None:
            worker.is_more_coming = lambda: self.uploads.has_writes
        self.bridge = Bridge(self.uploads.wake)
        self.planners = Planners()
        self.bodies = Bodies(settings.queue_bytes + settings.study_bytes)
        self.tasks = OpenTasks(store, settings, self.call)
        self.spoken = spoken or Spoken()
        self.rounds = LiveRounds(store, self.call, self.spoken)
        self.looks = Looks(store, self.call)
        self.news = news or News(store)
        self.arrivals = arrivals or Arrivals(0)
        self._to_worker = Bridge(partial(self.wake_worker, now=True))  # tables wait for it
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
        self._page_pool = ThreadPoolExecutor(_PAGE_THREADS, thread_name_prefix="pages")
        self._ready_until = -1.0
        self.metrics.set("sfumato_build_info", 1, version=__version__)

    def start(self) -> None:
        self.uploads.start()
        threading.Thread(target=self._work_out_ledger, name="ledger", daemon=True).start()

    async def drain(self) -> None:
        """Store what was taken; end the threads. The store stays open."""
        await asyncio.to_thread(self.uploads.stop)
        self._pool.shutdown(wait=True)
        self._page_pool.shutdown(wait=True)

    async def call(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """Run what blocks in a thread, and wait for it without blocking the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*arguments, **options))

    async def show(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """As `call`, for pages: in threads that devices never keep busy."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._page_pool, lambda: function(*arguments, **options))

    async def write(self, size: int, apply: Writer[_I, _T], item: _I) -> _T:
        """Store an item of about so many bytes in the next commit; what came of it, when it is
        done."""
        return await self.bridge.result(self.uploads.write(size, apply, item, wake=False))

    def offer_table(
        self, round_id: str, member: int, body: bytes, tell: Callable[[Keeping | None], None]
    ) -> bool:
        """Whether this process's worker may add a masked table to its round's sum. If so `tell` is
        called in the loop when it has; or with None if it did not, so that the table is to be
        stored. A worker that is busy with something else is not waited for."""
        loop = asyncio.get_running_loop()

        def settle(kept: Keeping | None) -> None:
            timer.cancel()
            tell(kept)

        arrival = Arrival(member, body, self._to_worker.bring(settle))
        if not self.arrivals.offer(round_id, arrival):
            return False
        timer = loop.call_later(_BUSY_SECONDS, self.arrivals.withdraw, round_id, arrival)
        return True

    async def add_table(self, round_id: str, member: int, body: bytes) -> Keeping | None:
        """As `offer_table`, for who waits."""
        waiter: asyncio.Future[Keeping | None] = asyncio.get_running_loop().create_future()

        def settle(kept: Keeping | None) -> None:
            if not waiter.done():  # else nobody waits any more
                waiter.set_result(kept)

        return await waiter if self.offer_table(round_id, member, body, settle) else None

    def wake_worker(self, *, now: bool = False) -> None:
        """There is something for it to do, and `now` no more is expected with it; one in another
        process finds out by itself."""
        if self.worker is not None:
            self.worker.wake(now=now)

    async def check_ready(self) -> None:
        """Raise Problem or StoreError unless reports can be stored and the worker does its work."""
        if not self.uploads.alive:
            raise Problem("stopping", retry_after_seconds=5)
        if self.worker is not None and not self.worker.healthy:
            raise Problem("worker-failing", retry_after_seconds=5)
        if time.monotonic() >= self._ready_until:
            await self.call(self._write_nothing)
            self._ready_until = time.monotonic() + _READY_SECONDS

    def _work_out_ledger(self) -> None:
        with suppress(SfumatoError):  # whoever asks for the ledger is told
            work_out(self.store)

    def _write_nothing(self) -> None:
        with self.store.transaction():
            pass

    def __repr__(self) -> str:  # never the key
        return f"Service({self.store!r})"


def service_of(request: Request) -> Service:
    """The service that a request was made to."""
    service = request.app.state.service
    assert isinstance(service, Service)  # `app.create_app` put it there
    return service


MOST = 2  # plans that are made at a time
_RETRY_SECONDS = 10
_EXTREME = (ArithmeticError, IndexError, MemoryError)  # what numbers without measure end in


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

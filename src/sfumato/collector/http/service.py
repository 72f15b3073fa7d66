"""The object that all routes work with, made at the start and closed at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, ParamSpec, TypeVar

from starlette.requests import Request

from sfumato.collector.http.commit_queue import CommitQueue
from sfumato.collector.http.contents import Contents
from sfumato.collector.http.limits import Bodies, Turnstile
from sfumato.collector.http.task_cache import TaskCache
from sfumato.collector.http.waiting import ChangeNotifier
from sfumato.collector.logs import log_error
from sfumato.collector.memory import ADMISSIONS
from sfumato.collector.metrics import Metrics
from sfumato.collector.problems import Problem
from sfumato.collector.settings import Settings
from sfumato.collector.store.ledger import precompute_costs
from sfumato.collector.store.round_tables import StoreOutcome
from sfumato.collector.store.store import Store
from sfumato.collector.worker.replay import PhaseMessages
from sfumato.collector.worker.round_cache import RoundCache
from sfumato.collector.worker.table_queue import QueuedTable, TableQueue
from sfumato.collector.worker.thread import WorkerThread
from sfumato.collector.worker.worker import trim_memory
from sfumato.errors import ImpossibleError

_THREADS = 8  # for calls of the store, each with a connection
_PAGE_THREADS = 3  # the same, for pages
_BUSY_SECONDS = 1.0  # how long a masked table waits for a busy worker
_TABLE_BYTES = 32 << 20  # of masked tables that are being read and added
SIGN_IN_BYTES = 4 << 10  # of the form of somebody who has not signed in
_READY_SECONDS = 1.0  # how long an answer about readiness is valid

WorkerRole = Literal["active", "standby", "none"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Service:
    """A collector's store, caches and threads. All blocking functions go through `call`."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        key: bytes,
        metrics: Metrics | None = None,
        worker: WorkerThread | None = None,
        changes: ChangeNotifier | None = None,
        tables: TableQueue | None = None,
        messages: PhaseMessages | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.key = key  # signs offers
        self.metrics = metrics or Metrics()
        self.worker = worker
        self.commits = CommitQueue(store, settings, self.metrics)
        self.planners = Planners()
        self.admissions = asyncio.Semaphore(ADMISSIONS)
        self.uploads = Bodies(2 * max(settings.queue_bytes, settings.upload_bytes))  # of devices
        self.requests = Bodies(2 * settings.study_bytes)  # with a token or a session
        self.sign_ins = Bodies(2 * settings.connections * SIGN_IN_BYTES)  # never full
        self.contents = Contents(settings.study_bytes)
        self.tasks = TaskCache(store, settings, self.call)
        self.rounds = RoundCache(store, self.call, messages)
        self.changes = changes or ChangeNotifier(store)
        self.table_turnstile = Turnstile(_TABLE_BYTES)
        self._tables = tables or TableQueue(0)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
        self._page_pool = ThreadPoolExecutor(_PAGE_THREADS, thread_name_prefix="pages")
        self._ready_until, self._failing = -1.0, 0

    def start(self) -> None:
        self.commits.start()
        costs = threading.Thread(target=precompute_costs, args=[self.store], name="ledger")
        costs.daemon = True  # composing may take long
        costs.start()

    async def drain(self) -> None:
        """Store everything in the queue, and end the threads. The store stays open."""
        await asyncio.to_thread(self.commits.stop)
        self._pool.shutdown(wait=True)
        self._page_pool.shutdown(wait=True)

    async def call(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """Run a blocking function in a thread, and wait for it without blocking the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*arguments, **options))

    async def show(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """The same for pages, in threads that devices never keep busy."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._page_pool, lambda: function(*arguments, **options))

    async def add_table(self, round_id: str, member: int, body: bytes) -> StoreOutcome | None:
        """Have this process's worker add a masked table to its round's sum. None if there is no
        such worker, or it is busy with something else: then the table must be stored."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[StoreOutcome | None] = loop.create_future()

        def settle(result: StoreOutcome | None) -> None:
            if not outcome.done():  # else the request has ended
                outcome.set_result(result)

        def settle_from_thread(result: StoreOutcome | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result)

        table = QueuedTable(member, body, settle_from_thread)
        if not self._tables.offer(round_id, table):
            return None
        self.wake_worker()
        timer = loop.call_later(_BUSY_SECONDS, self._tables.withdraw, round_id, table)
        try:
            return await outcome
        finally:
            timer.cancel()

    def wake_worker(self) -> None:
        """Tell the worker of this process that there is work; others find out by themselves."""
        if self.worker is not None:
            self.worker.wake()

    async def check_ready(self) -> int:
        """Raise Problem or StoreError unless reports can be stored and the worker works.

        Returns the number of studies with a fault. They do not make the service unready: their
        reports are stored, and so are those of the others.
        """
        if not self.commits.alive:
            raise Problem("stopping", retry_after_seconds=5)
        if self.worker is not None and not self.worker.healthy:
            raise Problem("worker-failing", retry_after_seconds=5)
        if time.monotonic() >= self._ready_until:
            self._failing = await self.call(self.count_failing, writing=True)
            self._ready_until = time.monotonic() + _READY_SECONDS
        return self._failing

    @property
    def worker_role(self) -> WorkerRole:
        """What this process does of the work that only one process of a store may do."""
        if self.worker is None:
            return "none"
        return "active" if self.worker.is_active else "standby"

    def count_failing(self, *, writing: bool = False) -> int:
        """The number of studies with a fault, whichever process has the worker; with `writing`, in
        a transaction that fails unless the store can be written. It blocks."""
        with self.store.transaction() if writing else self.store.reading() as tx:
            return len(tx.faults())

    def __repr__(self) -> str:  # never the key
        return f"Service({self.store!r})"


def service_of(request: Request) -> Service:
    """The service that a request is for."""
    service = request.app.state.service
    assert isinstance(service, Service)  # `app.create_app` put it there
    return service


MOST_PLANS = 2  # at a time
_RETRY_SECONDS = 10
_EXTREME = (ArithmeticError, IndexError, MemoryError)  # raised for extreme numbers


class Planners:
    """Runs functions that plan, each in a thread of its own, and at most `most` at a time."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._free = threading.Semaphore(most)

    async def call(
        self, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        """Wait for a function without blocking the loop; `busy` if too many run already."""
        if not self._free.acquire(blocking=False):
            raise Problem(
                "busy",
                "other studies are being planned",
                retry_after_seconds=_RETRY_SECONDS,
            )
        done: Future[_T] = Future()

        def run() -> None:
            done.set_running_or_notify_cancel()  # it cannot be cancelled any more
            try:
                result = function(*arguments, **options)
            except BaseException as problem:
                self._free.release()
                done.set_exception(problem)
            else:
                self._free.release()
                done.set_result(result)
            trim_memory()  # a large dictionary takes a lot of it

        threading.Thread(target=run, name="planner", daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except _EXTREME as problem:
            log_error("not-planned", problem)
            raise ImpossibleError(
                "no plan can be made with numbers as large or as small as these"
            ) from None

"""The queue of everything that devices send: one thread, and one commit for all that waits.

A commit costs a sync of the disk, whether it holds one upload or a thousand; so uploads that arrive
during one commit share the next. Acknowledged means committed: an upload is answered after the
transaction that holds it, never before. The queue is bounded by bytes and by uploads, and tasks and
rounds take turns in it; without room it refuses (`busy`), and says when to come back according to
the measured speed.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sfumato.collector.http.limits import Room
from sfumato.collector.logs import count_field, log_error
from sfumato.collector.metrics import Metrics
from sfumato.collector.problems import Problem
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store, Transaction, UploadOutcome

Item = TypeVar("Item")
T = TypeVar("T")
Writer = Callable[[Transaction, Sequence[Item]], Sequence[T]]
"""Stores items, and returns the outcome of each. It must raise nothing but StoreError."""

_LONGEST_WAIT_SECONDS = 60
_FULL_SECONDS = 5  # about how long it takes to seal a task that may be full
_OVERHEAD_BYTES = 256  # of an upload in the queue, beside its body
_PAST_WEIGHT = 0.8  # in the measured speed


@dataclass(slots=True, repr=False)
class _Upload:
    task_id: str
    count: int
    body: bytes
    rejected: Mapping[str, int]


@dataclass(slots=True, repr=False)
class _Write:
    """An item in the queue, and the future that waits for it."""

    who: str
    size: int
    apply: Writer[Any, Any]
    item: Any
    outcome: asyncio.Future[Any]


class CommitQueue:
    """A queue of uploads and other writes, and the thread that stores them. `start` it, and `stop`
    it.

    Claim: if `add_upload` returns True, the upload is committed and will be counted; if it returns
        False, the upload came too late for its task; if it raises an error, the upload may or may
        not be stored, so its device sends it again, and duplicates are found by their ids.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        *,
        bytes_per_second: float = 1e6,
    ) -> None:
        """`bytes_per_second` is the assumed speed of the store until the first commit."""
        self._store = store
        self._settings = settings or Settings()
        self._metrics = metrics or Metrics()
        self._waiting: dict[str, deque[_Write]] = {}  # by task or round
        # Of those that wait or are being stored; twice the limits, since one may take half.
        self._bytes = Room(2 * self._settings.queue_bytes)
        self._writes = Room(2 * self._settings.queue_uploads)
        self._changed = threading.Condition()
        self._stopping = False
        self._bytes_per_second = bytes_per_second
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._metrics.watch(self._metrics.queue_bytes, lambda: self._bytes.taken)
        self._metrics.watch(self._metrics.queue_uploads, lambda: self._writes.taken)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Refuse new uploads, store those in the queue, end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def add_upload(
        self, task_id: str, count: int, body: bytes, rejected: Mapping[str, int]
    ) -> bool:
        """Store an upload. After the commit, return whether its task was open.

        `rejected` counts the reports that were left out, by reason; it is stored with the upload.
        """
        upload = _Upload(task_id, count, body, rejected)
        return await self.write(len(body), _store, upload, who=task_id)

    async def write(
        self, size: int, apply: Writer[Item, T | Problem], item: Item, *, who: str
    ) -> T:
        """Store an item of about `size` bytes in the next transaction, together with others that
        have the same `apply`. After the commit, return the outcome that `apply` gave for it. The
        item takes room of `who`, a task or a round."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        with self._changed:
            if self._stopping:
                raise Problem("stopping", retry_after_seconds=5)
            self._check_capacity(who, size + _OVERHEAD_BYTES)
            if not self._waiting:  # wake the thread when the loop has nothing else to do
                loop.call_soon(self._wake)
            write = _Write(who, size + _OVERHEAD_BYTES, apply, item, outcome)
            self._waiting.setdefault(who, deque()).append(write)
            self._bytes.take(who, write.size)
            self._writes.take(who, 1)
        return await outcome

    def check_capacity(self, who: str) -> None:
        """Raise `busy` if there is no room for `who`, before a body is read in vain."""
        with self._changed:
            self._check_capacity(who, 1)

    def _check_capacity(self, who: str, size: int) -> None:
        if not self._writes.taken:
            return  # one write always fits
        if not (self._bytes.has_room(who, size) and self._writes.has_room(who, 1)):
            seconds = math.ceil(self._bytes.taken / self._bytes_per_second)
            raise Problem("busy", retry_after_seconds=min(max(seconds, 1), _LONGEST_WAIT_SECONDS))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                group = self._take(self._settings.commit_bytes)
            try:
                begin = time.perf_counter()
                outcomes = self._commit(group)
                self._measure(sum(write.size for write in group), time.perf_counter() - begin)
            except Exception as problem:
                # Whatever it is, no request may wait forever, and later commits may succeed.
                with self._changed:
                    group += self._take(math.inf)
                log_error("uploads-not-stored", problem, **count_field(len(group)))
                outcomes = [problem] * len(group)
            with self._changed:  # they are no longer in memory
                for write in group:
                    self._give_back(write)
            for loop in {write.outcome.get_loop() for write in group}:
                with suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(_settle, loop, group, outcomes)

    def _take(self, most_bytes: float) -> list[_Write]:
        """The next writes of about `most_bytes`, in turns of one of each task or round, without
        those that were cancelled."""
        group: list[_Write] = []
        size = 0
        while self._waiting and size < most_bytes:
            who = next(iter(self._waiting))
            waiting = self._waiting.pop(who)
            write = waiting.popleft()
            if waiting:
                self._waiting[who] = waiting  # behind all others
            if write.outcome.cancelled():
                self._give_back(write)
            else:
                size += write.size
                group.append(write)
        return group

    def _give_back(self, write: _Write) -> None:
        self._bytes.give_back(write.who, write.size)
        self._writes.give_back(write.who, 1)

    def _measure(self, size: int, seconds: float) -> None:
        speed = size / max(seconds, 1e-6)
        self._bytes_per_second = _PAST_WEIGHT * self._bytes_per_second + (1 - _PAST_WEIGHT) * speed
        self._metrics.commits.inc()
        self._metrics.commit_seconds.inc(seconds)

    def _commit(self, group: Sequence[_Write]) -> list[Any]:
        """The outcome of each write; a Problem concerns that write alone."""
        # Always in this order, so that rows of tasks are locked before those of rounds, as the
        # worker does it.
        places_by_writer: dict[Writer[Any, Any], list[int]] = {
            _store: [],
            Transaction.join_all: [],
            Transaction.add_messages: [],
        }
        for place, write in enumerate(group):
            places_by_writer.setdefault(write.apply, []).append(place)
        outcomes: list[Any] = [None] * len(group)
        with self._store.transaction() as tx:
            for apply, places in places_by_writer.items():
                items = [group[place].item for place in places]
                for place, outcome in zip(places, apply(tx, items), strict=True):
                    outcomes[place] = outcome
        return outcomes


def _settle(
    loop: asyncio.AbstractEventLoop, group: Sequence[_Write], outcomes: Sequence[Any]
) -> None:
    """Set the outcomes that are awaited in this loop."""
    for write, outcome in zip(group, outcomes, strict=True):
        if write.outcome.get_loop() is not loop or write.outcome.done():
            continue
        if isinstance(outcome, Exception):
            write.outcome.set_exception(outcome)
        else:
            write.outcome.set_result(outcome)


def _store(tx: Transaction, uploads: Sequence[_Upload]) -> list[bool | Problem]:
    """Store uploads, and count the reports that were left out of them."""
    rows = [(each.task_id, each.count, each.body) for each in uploads if each.count]
    inserted = iter(tx.insert_uploads(rows))
    takings: list[UploadOutcome] = [next(inserted) if each.count else "stored" for each in uploads]
    rejected: Counter[tuple[str, str]] = Counter()
    for upload, taking in zip(uploads, takings, strict=True):
        if taking == "stored":
            for reason, count in upload.rejected.items():
                rejected[upload.task_id, f"rejected:{reason}"] += count
    for (task_id, name), count in sorted(rejected.items()):
        tx.count(task_id, name, count)
    return [_full() if taking == "full" else taking == "stored" for taking in takings]


def _full() -> Problem:
    return Problem(
        "busy",
        "this task may have all the reports that it has room for; they are being counted",
        retry_after_seconds=_FULL_SECONDS,
    )

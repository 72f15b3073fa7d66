"""Storing uploads: one thread, and one commit for all that wait.

A commit costs a sync of the disk, whether it holds one upload or a thousand; so uploads that arrive
during one commit share the next. What was acknowledged is committed: a future is resolved after
the transaction that holds its upload, never before. The queue is bounded by bytes and by uploads; a
full one refuses (`busy`), and says for how long by how fast it has been emptied.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from sfumato.collector.logs import counted, log_error
from sfumato.collector.metrics import Metrics
from sfumato.collector.problems import Problem
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store, Taking, Transaction

Item = TypeVar("Item")
T = TypeVar("T")
Writer = Callable[[Transaction, Sequence[Item]], Sequence[T]]
"""Stores items and tells what became of each. It must raise nothing but StoreError."""

_LONGEST_WAIT_SECONDS = 60
_FULL_SECONDS = 5  # until a task that may be full has been sealed, about
_OVERHEAD_BYTES = 256  # of an upload in the queue, beside its body
_NONE: Mapping[str, int] = MappingProxyType({})
_MEMORY = 0.8  # weight of the past in the measured speed


class _Told:
    """What of a future the thread uses, for somebody who is called: a future costs much more."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def set_result(self, result: object) -> None:
        self._tell(result)

    def set_exception(self, problem: BaseException) -> None:
        self._tell(problem)


@dataclass(slots=True, repr=False)  # not frozen: that makes it slower to make
class _Upload:
    task_id: str
    count: int
    body: bytes
    rejected: Mapping[str, int]
    stored: Future[bool] | _Told

    @property
    def size(self) -> int:
        return len(self.body) + _OVERHEAD_BYTES


@dataclass(slots=True, repr=False)
class _Write:
    """Anything else that is stored with the others, by what stores many of its kind."""

    size: int
    apply: Writer[Any, Any]
    item: Any
    stored: Future[Any] | _Told


class Uploads:
    """A queue of uploads and the thread that stores them. `start` it, and `stop` it.

    Claim: a future that is True stands for an upload that is committed, and will be counted; one
        that is False, for a task that takes it no more; one with an error, for an upload that may
        or may not be stored, so that its device sends it again and duplicates are found by their
        ids.
    """

    def __init__(
        self, store: Store, settings: Settings | None = None, metrics: Metrics | None = None
    ) -> None:
        self._store = store
        self._settings = settings or Settings()
        self._metrics = metrics or Metrics()
        self._waiting: deque[_Upload | _Write] = deque()
        self._bytes = 0  # of those that wait or are being stored
        self._uploads = 0
        self._writes = 0  # among them
        self._changed = threading.Condition()
        self._stopping = False
        self._bytes_per_second = 1e6  # a guess until the first commit
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._metrics.read("sfumato_queue_bytes", lambda: self._bytes)
        self._metrics.read("sfumato_queue_uploads", lambda: self._uploads)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more, store what was taken, end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_writes(self) -> bool:
        """Whether anything but uploads waits, or is being stored."""
        return self._writes > 0

    def submit(
        self,
        task_id: str,
        count: int,
        body: bytes,
        rejected: Mapping[str, int] | None = None,
        *,
        wake: bool = True,
    ) -> Future[bool]:
        """Hand an upload over. The future tells, after the commit, whether its task was open.

        `rejected` counts what was left out of it, by reason; it is stored with the upload. Whoever
        has more to hand over may leave the thread asleep, and `wake` it after the last.
        """
        stored: Future[bool] = Future()
        self._queue(_Upload(task_id, count, body, rejected or {}, stored), wake=wake)
        return stored

    def hand_over(
        self, task_id: str, count: int, body: bytes, tell: Callable[[bool | BaseException], None]
    ) -> None:
        """As `submit`, for whoever wakes the thread and waits for no future: `tell` is called in
        the thread with what would have been the future's result, or its error."""
        self._queue(_Upload(task_id, count, body, _NONE, _Told(tell)), wake=False)

    def wake(self) -> None:
        """Let the thread store what waits."""
        with self._changed:
            self._changed.notify_all()

    def write(
        self, size: int, apply: Writer[Item, T], item: Item, *, wake: bool = True
    ) -> Future[T]:
        """Store an item of about so many bytes in the transaction of all that wait, together with
        others that have the same `apply`; the future is what that gave for it, after the commit."""
        stored: Future[T] = Future()
        self._queue(_Write(size + _OVERHEAD_BYTES, apply, item, stored), wake=wake)
        return stored

    def hand_over_write(
        self,
        size: int,
        apply: Writer[Item, T],
        item: Item,
        tell: Callable[[T | BaseException], None],
    ) -> None:
        """As `write`, for whoever wakes the thread and waits for no future."""
        self._queue(_Write(size + _OVERHEAD_BYTES, apply, item, _Told(tell)), wake=False)

    def _queue(self, upload: _Upload | _Write, *, wake: bool = True) -> None:
        with self._changed:
            if self._stopping:
                raise Problem("stopping", retry_after_seconds=5)
            self._check_room(upload.size)
            self._waiting.append(upload)
            self._bytes += upload.size
            self._uploads += 1
            self._writes += isinstance(upload, _Write)
            if wake:
                self._changed.notify_all()

    def check_room(self) -> None:
        """Raise `busy` if the queue is full: before a body is read that could not be taken."""
        with self._changed:
            self._check_room(1)

    def _check_room(self, size: int) -> None:
        if not self._uploads:
            return  # one always fits
        full = self._bytes + size > self._settings.queue_bytes
        if full or self._uploads >= self._settings.queue_uploads:
            seconds = math.ceil(self._bytes / self._bytes_per_second)
            raise Problem("busy", retry_after_seconds=min(max(seconds, 1), _LONGEST_WAIT_SECONDS))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                group = self._take(self._settings.commit_bytes)
            try:
                begun = time.perf_counter()
                stored = self._commit(group)
                self._measure(sum(upload.size for upload in group), time.perf_counter() - begun)
            except Exception as problem:
                # Whatever it is, nobody may wait for ever, and later ones may fare better.
                with self._changed:
                    group += self._take(math.inf)
                log_error("uploads-not-stored", problem, **counted(len(group)))
                self._forget(group)
                for upload in group:
                    upload.stored.set_exception(problem)
                continue
            self._forget(group)
            for upload, done in zip(group, stored, strict=True):
                if isinstance(done, Problem):
                    upload.stored.set_exception(done)
                else:
                    upload.stored.set_result(done)

    def _take(self, most_bytes: float) -> list[_Upload | _Write]:
        """The next uploads, about so many bytes, that somebody still waits for."""
        group: list[_Upload | _Write] = []
        size = 0
        while self._waiting and size < most_bytes:
            upload = self._waiting.popleft()
            if upload.stored.set_running_or_notify_cancel():
                size += upload.size
                group.append(upload)
            else:
                self._uploads -= 1
                self._writes -= isinstance(upload, _Write)
                self._bytes -= upload.size
        return group

    def _forget(self, group: list[_Upload | _Write]) -> None:
        """They are no longer in memory."""
        with self._changed:
            self._uploads -= len(group)
            self._writes -= sum(isinstance(upload, _Write) for upload in group)
            self._bytes -= sum(upload.size for upload in group)

    def _measure(self, size: int, seconds: float) -> None:
        speed = size / max(seconds, 1e-6)
        self._bytes_per_second = _MEMORY * self._bytes_per_second + (1 - _MEMORY) * speed
        self._metrics.add("sfumato_commits_total")
        self._metrics.add("sfumato_commit_seconds_total", seconds)

    def _commit(self, group: list[_Upload | _Write]) -> list[Any]:
        """What each upload, or write, comes to; a Problem is for it alone."""
        # Places in the group, always in this order: so that rows of tasks are held before those of
        # rounds, as the worker does it.
        alike: dict[Writer[Any, Any], list[int]] = {
            _store: [],
            Transaction.join_all: [],
            Transaction.add_messages: [],
        }
        for place, each in enumerate(group):
            alike.setdefault(each.apply if isinstance(each, _Write) else _store, []).append(place)
        outcomes: list[Any] = [None] * len(group)
        with self._store.transaction() as tx:
            for apply, places in alike.items():
                items = [
                    each.item if isinstance(each := group[place], _Write) else each
                    for place in places
                ]
                for place, outcome in zip(places, apply(tx, items), strict=True):
                    outcomes[place] = outcome
        return outcomes


def _store(tx: Transaction, uploads: Sequence[_Upload]) -> list[bool | Problem]:
    """Store uploads, and count what was left out of them."""
    given = [(each.task_id, each.count, each.body) for each in uploads if each.count]
    taken = iter(tx.insert_uploads(given))
    takings: list[Taking] = [next(taken) if each.count else "stored" for each in uploads]
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

"""The open tasks, read from the store about once per second and kept ready for devices."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from starlette.requests import Request

from sfumato.collector.http.limits import Bucket
from sfumato.collector.logs import log_error
from sfumato.collector.problems import Problem
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store, TaskRow
from sfumato.collector.studies import task_of
from sfumato.device import passcodes
from sfumato.errors import SfumatoError, StoreError
from sfumato.flow.admission import Admission
from sfumato.flow.task import Task

FASTEST = 4  # times the rate at which the planned reports arrive if devices spread them evenly
FIRST_SHARE = 10  # a tenth of the planned reports may come at once
OFFLINE_DAYS = 30  # and, in any case, all that a device has after so many days
_FRESH_SECONDS = 1.0
_MOST_CLOSED = 10_000  # ids kept, so that late devices do not cost a read each
_DAMAGED_SECONDS = 60  # after which devices of a damaged task ask again
_TASK_ID = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that takes reports, or, if `masked` is set, is answered in masked rounds."""

    id: str
    study_id: str
    admission: Admission | None
    bucket: Bucket
    masked: Task | None = None
    needs_passcode: bool = False
    passcode: bytes = field(default=b"", repr=False)  # its digest

    def check_passcode(self, request: Request) -> None:
        """Raise Problem unless the request has the study's passcode, if there is one.

        Call it before anything else is done for the request: a stranger must not take the rate or
        the room of the devices that have the passcode.
        """
        if self.needs_passcode and not passcodes.matches(
            request.headers.get(passcodes.HEADER, ""), self.passcode
        ):
            raise Problem("wrong-passcode", hint=f"send it as {passcodes.HEADER}: sfp_…")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The open tasks at one moment, and the body that offers them all."""

    tasks: dict[str, OpenTask]
    offers: bytes
    etag: str
    read_at: float


class TaskCache:
    """The open tasks of a store, at most a second old. Unknown tasks are looked up at once.

    Whether a task is still open is checked again in the transaction that stores an upload.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        call: Callable[..., Awaitable[object]],
    ) -> None:
        """`call(function, *arguments)` runs a blocking function in a thread."""
        self._store = store
        self._settings = settings
        self._call = call
        self._lock = asyncio.Lock()
        self._closed: set[str] = set()
        self._damaged: set[str] = set()
        self._snapshot: Snapshot | None = None
        self._renewal: asyncio.Future[None] | None = None  # before the snapshot is too old

    async def snapshot(self, *, fresh: bool = False) -> Snapshot:
        """The tasks that are open now; `fresh` reads the store in any case."""
        now = time.monotonic()
        oldest = now if fresh else now - _FRESH_SECONDS
        snapshot = self._snapshot
        if snapshot is None or snapshot.read_at < oldest:
            async with self._lock:
                if self._snapshot is None or self._snapshot.read_at < oldest:
                    await self._call(self._refresh)
        elif snapshot.read_at < now - _FRESH_SECONDS / 2 and (
            self._renewal is None or self._renewal.done()
        ):
            self._renewal = asyncio.ensure_future(self._renew())  # so that no request waits for it
        assert self._snapshot is not None  # `_refresh` returned
        return self._snapshot

    async def _renew(self) -> None:
        with suppress(StoreError):  # the next request gets it
            await self.snapshot(fresh=True)

    async def find(self, task_id: str) -> OpenTask:
        """The open task of this id; Problem if there is none, or it is closed."""
        task = (await self.snapshot()).tasks.get(task_id)
        if task_id in self._damaged:  # it is not closed: devices keep their reports, and wait
            raise Problem("store-unavailable", retry_after_seconds=_DAMAGED_SECONDS)
        if task is None and task_id not in self._closed and _TASK_ID.fullmatch(task_id):
            state = await self._call(self._state, task_id)
            if state == "open":  # it was opened a moment ago
                task = (await self.snapshot(fresh=True)).tasks.get(task_id)
            if state is not None and task is None:
                if len(self._closed) >= _MOST_CLOSED:
                    self._closed.clear()
                self._closed.add(task_id)
        if task is not None:
            return task
        if task_id in self._closed:
            raise task_closed()
        raise Problem("unknown-task", hint="GET /v1/offers lists the open tasks")

    def _state(self, task_id: str) -> str | None:
        with self._store.reading() as tx:
            row = tx.task(task_id)
        return None if row is None else row.state

    def _refresh(self) -> None:
        read_at = time.monotonic()
        with self._store.reading() as tx:
            rows, digests = tx.open_tasks(), tx.passcodes()
        previous = {} if self._snapshot is None else self._snapshot.tasks
        tasks: dict[str, OpenTask] = {}
        envelopes, damaged = [], set()
        for row in rows:
            try:
                envelope = json.loads(row.envelope)
                task = previous.get(row.id) or self._open_task(row)
                # No passcode has the digest b"".
                tasks[row.id] = replace(task, passcode=digests.get(row.study_id, b""))
                envelopes.append(envelope)
            except (SfumatoError, ValueError) as problem:  # the other tasks are still offered
                damaged.add(row.id)
                if row.id not in self._damaged:
                    log_error("task-damaged", problem, task_id=row.id)
        self._damaged = damaged
        offers = json.dumps({"offers": envelopes}, separators=(",", ":")).encode()
        etag = f'"{sha256(offers).hexdigest()[:32]}"'
        self._snapshot = Snapshot(tasks, offers, etag, read_at)

    def _open_task(self, row: TaskRow) -> OpenTask:
        task = task_of(row)
        masked = task.is_masked
        return OpenTask(
            row.id,
            row.study_id,
            None if masked else Admission(task),
            self._bucket(row),
            task if masked else None,
            needs_passcode=_offer_of(row).get("passcode", False),
        )

    def _bucket(self, row: TaskRow) -> Bucket:
        """The limit on the rate of a task's reports."""
        seconds = 0.0 if row.open_until is None else row.open_until - time.time()
        if row.capacity_left and seconds > 0:  # it must not be full before its time is over
            first = max(1, row.capacity_left // FIRST_SHARE)
            rate = (row.capacity_left - first) / seconds
            return Bucket(rate, row.capacity_left, first=first)
        limits = self._settings
        if limits.reports_per_second is not None or row.target is None:
            return Bucket(limits.reports_per_second, limits.upload_reports)
        offer = _offer_of(row)
        burst = max(row.target // FIRST_SHARE, OFFLINE_DAYS * offer["daily_reports"])
        return Bucket(FASTEST * row.target / offer["delay_seconds"], burst)


def _offer_of(row: TaskRow) -> dict[str, Any]:
    offer: dict[str, Any] = json.loads(json.loads(row.envelope)["offer"])
    return offer


def task_closed() -> Problem:
    return Problem("task-closed", hint="forget this task; GET /v1/offers lists the open ones")

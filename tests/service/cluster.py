"""Two collectors on one PostgreSQL database behind a proxy, and a fleet whose every report can be
recognised: the collector that is the worker is killed while devices upload.

The record of device k is the number k: cell k of a table with a cell for each device. So every cell
of the tally must be one. Here devices do not randomise, so that the count is exact.
"""

from __future__ import annotations

import http.client
import json
import queue
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from certificates import write_certificate
from databases import execute
from proxies import proxy
from service.processes import PATIENCE_SECONDS
from service.restarting import Admin, KillableCollector, running_collectors
from sfumato import lake
from sfumato.collector import studies
from sfumato.collector.export import export
from sfumato.collector.store.store import Store
from sfumato.flow.accumulator import RecordBatch
from sfumato.flow.report import Report, to_frames
from sfumato.flow.task import LocalTask

ROWS, WIDTH = 4_096, 256  # cells for 1,048,576 devices
ITEMS = [f"tree {number}" for number in range(20)]
THREADS = 8
REPEATED = 10  # one of so many acknowledged uploads is sent once more
PAUSE_SECONDS = 0.05
LIMITED_SECONDS = 1.0  # after an answer of 429: HAProxy counts requests that it refuses, too
SLOWEST = 1_000  # reports per second that a worker seals on a busy machine
TABLES = ("upload", "seen", "sealed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the reports of devices, each of which got an acknowledgement in the end."""

    devices: int
    counted: int  # by the release
    lost: int  # cells of devices that are zero
    doubled: int  # cells of devices that are above one
    invented: int  # other cells that are not zero
    repeated: int  # reports that were sent twice, and counted once
    is_fold_equal: bool  # the tally of the exported files
    is_release_equal: bool  # the release of the exported files
    statuses: dict[str, int]
    upload_seconds: float
    replaced_seconds: float  # from the kill until the other one says that it is the worker
    released_seconds: float  # from closing the study to its release
    table_bytes: dict[str, int]  # the most in the database, with indexes

    @property
    def is_sound(self) -> bool:
        wrong = self.lost or self.doubled or self.invented or self.counted != self.devices
        return not wrong and self.is_fold_equal and self.is_release_equal


@dataclass(slots=True)
class Fleet:
    """Threads that upload through a proxy, each over a connection of its own, until everything is
    acknowledged."""

    port: int
    certificate: Path
    task: LocalTask
    bodies: queue.SimpleQueue[bytes]
    statuses: Counter[str] = field(default_factory=Counter)
    problem: Exception | None = None

    def run(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._live, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        return threads

    def _live(self) -> None:
        connection = self._connect()
        try:
            while True:
                with suppress(queue.Empty):
                    body = self.bodies.get_nowait()
                    while (status := self._post(connection, body)) != "201":
                        time.sleep(LIMITED_SECONDS if status == "429" else PAUSE_SECONDS)
                    if self.statuses[status] % REPEATED == 0:
                        self._post(connection, body)
                    continue
                return
        except Exception as problem:
            self.problem = problem
        finally:
            connection.close()

    def _post(self, connection: http.client.HTTPSConnection, body: bytes) -> str:
        try:
            connection.request("POST", f"/v1/tasks/{self.task.id}/reports", body)
            answer = connection.getresponse()
            answer.read()
            status = str(answer.status)
        except (OSError, http.client.HTTPException):
            connection.close()  # the next request opens it again
            status = "none"
        self.statuses[status] += 1
        assert status in {"201", "429", "502", "503", "504", "none"}, status
        return status

    def _connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self.certificate)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)


def trial(
    folder: Path,
    store: str,
    *,
    proxy_name: str,
    devices: int,
    reports_per_upload: int,
) -> Outcome:
    """Upload, kill the worker at a third of it, start it again at two thirds; close the study,
    export it, and compare everything."""
    key = folder / "one" / "collector.key"
    options: dict[str, Any] = {
        "stays": True,
        "signing_key": key,
        "seal_seconds": 1,
        "worker_seconds": 0.5,
    }
    collectors = [
        KillableCollector(folder / name, store, proxies="127.0.0.1", **options)
        for name in ("one", "two")
    ]
    certificate = write_certificate(folder)
    with running_collectors(*collectors):
        addresses = [each.address or "" for each in collectors]
        admin = Admin(collectors)
        study, task = admin.open(request(devices))
        assert isinstance(task, LocalTask)
        uploads = queue.SimpleQueue[bytes]()
        for body in bodies(task, devices, reports_per_upload):
            uploads.put(body)
        most = uploads.qsize()
        with proxy(proxy_name, folder, addresses, certificate) as port:
            fleet = Fleet(port, certificate, task, uploads)
            started = time.monotonic()
            threads = fleet.run()
            _wait(lambda: fleet.statuses["201"] >= most / 3, "a third", fleet)
            (victim,) = [each for each in collectors if role(each) == "active"]
            (other,) = [each for each in collectors if each is not victim]
            victim.kill()
            killed = time.monotonic()
            _wait(lambda: role(other) == "active", "another worker", fleet)
            replaced_seconds = time.monotonic() - killed
            _wait(lambda: fleet.statuses["201"] >= 2 * most / 3, "two thirds", fleet)
            victim.start()
            _wait(lambda: not any(each.is_alive() for each in threads), "the rest", fleet)
            upload_seconds = time.monotonic() - started
        assert role(victim) == "standby"
        closed, most_bytes = time.monotonic(), dict.fromkeys(TABLES, 0)
        admin.ask(lambda client: client.close_study(study))
        until = closed + PATIENCE_SECONDS + devices / SLOWEST
        while admin.ask(lambda client: client.study(study))["state"] == "closing":
            assert time.monotonic() < until, collectors[0].log() + collectors[1].log()
            for name in TABLES:  # ids are deleted with the end of the task
                most_bytes[name] = max(most_bytes[name], size_of(store, name))
            time.sleep(PAUSE_SECONDS)
        release = admin.ask(lambda client: client.release(study))
        released_seconds = time.monotonic() - closed
    with closing(Store.open(store)) as opened:
        with opened.reading() as tx:
            own = studies.answer_of(tx, task)
            repeated = tx.counts(task.id).get("repeated", 0)
        assert isinstance(own, RecordBatch)
        reports = export(opened, study, folder / "lake")
    ((_, folded),) = reports.count()
    return Outcome(
        devices=devices,
        counted=release["cost"]["devices"],
        **compare(own.tallies[0].cells.ravel(), devices),
        repeated=repeated,
        is_fold_equal=all(
            np.array_equal(ours.cells, its.cells)
            for ours, its in zip(own.tallies, folded.tallies, strict=True)
        ),
        is_release_equal=_timeless(lake.fold(folder / "lake").to_dict()) == _timeless(release),
        statuses=dict(fleet.statuses),
        upload_seconds=upload_seconds,
        replaced_seconds=replaced_seconds,
        released_seconds=released_seconds,
        table_bytes=most_bytes,
    )


def compare(cells: npt.NDArray[np.number[Any]], devices: int) -> dict[str, int]:
    """What is wrong with a tally in which each device has a cell of its own."""
    return {
        "lost": int((cells[:devices] < 1).sum()),
        "doubled": int((cells[:devices] > 1).sum()),
        "invented": int((cells[devices:] != 0).sum()),
    }


def request(devices: int) -> dict[str, Any]:
    """A local study that does not close by itself."""
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 2 * devices}
    sizes = {"algorithm": "hashed", "rows": ROWS, "width": WIDTH}
    return {"name": "Trees", "purpose": "To count.", "items": ITEMS, "study": study | sizes}


def bodies(task: LocalTask, devices: int, reports_per_upload: int) -> Iterator[bytes]:
    """All uploads: the record of device k is k."""
    assert devices <= ROWS * WIDTH
    size, task_id = task.record_bytes, task.id
    for first in range(0, devices, reports_per_upload):
        yield to_frames(
            Report(task_id, secrets.token_bytes(16), number.to_bytes(size, "little")).to_bytes()
            for number in range(first, min(first + reports_per_upload, devices))
        )


def size_of(store: str, table: str) -> int:
    """Bytes of a table with its indexes."""
    ((size,),) = execute(store, "SELECT pg_total_relation_size(?::regclass)", table)
    return int(size)


def role(collector: KillableCollector) -> str:
    """What a collector says about the worker."""
    assert collector.address is not None
    connection = http.client.HTTPConnection(
        collector.address.removeprefix("http://"), timeout=PATIENCE_SECONDS
    )
    with closing(connection):
        connection.request("GET", "/ready")
        return str(json.loads(connection.getresponse().read()).get("worker", "failing"))


def _timeless(release: dict[str, Any]) -> dict[str, Any]:
    """A release without the day and the seconds."""
    cost = {name: value for name, value in release["cost"].items() if name != "seconds"}
    return {name: value for name, value in release.items() if name != "released"} | {"cost": cost}


def _wait(condition: Callable[[], bool], what: str, fleet: Fleet) -> None:
    """Return when the condition holds; fail when a thread has failed, or nothing moves any more."""
    moved, at = -1, time.monotonic()
    while not condition():
        if fleet.problem is not None:
            raise fleet.problem
        if fleet.statuses["201"] != moved:
            moved, at = fleet.statuses["201"], time.monotonic()
        assert time.monotonic() < at + PATIENCE_SECONDS, f"waited for {what}: {fleet.statuses}"
        time.sleep(0.02)

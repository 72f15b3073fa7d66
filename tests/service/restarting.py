"""Collectors that are killed and restarted, and devices that keep trying."""

from __future__ import annotations

import http.client
import json
import random
import secrets
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from service.processes import PATIENCE_SECONDS, launch
from sfumato.collector import tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.store.store import Store
from sfumato.device import offers
from sfumato.errors import ServiceError, StoreUnavailable
from sfumato.flow import contribute as device
from sfumato.flow.report import Report, to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import SystemRng

T = TypeVar("T")

PAUSE_SECONDS = 0.02  # before a device, or an administrator, tries again
_AGAIN = {429, 503}  # statuses after which devices try again


class KillableCollector:
    """A collector's process, which can be killed at any moment; only the store survives.

    If it `stays`, it keeps its first address after each restart.
    """

    def __init__(self, folder: Path, store: str, *, stays: bool = False, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.store = folder, store
        self.address: str | None = None  # None: it does not run
        self._settings = {"seal_seconds": 0.1, "log_level": "warning", **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._stays, self._port = stays, 0

    def begin(self) -> None:
        """Start it, without waiting for it."""
        assert self._process is None
        self._process = launch(self.folder, self.store, port=self._port, **self._settings)

    def start(self) -> None:
        """Start it, and return when it answers."""
        if self._process is None:
            self.begin()
        assert self._process is not None
        until = time.monotonic() + PATIENCE_SECONDS
        while self.address is None:
            first_line, end, _ = (self.folder / "stdout").read_text().partition("\n")
            if end:
                self.address = first_line.removeprefix("listening on ")
                self._port = int(self.address.rpartition(":")[2]) if self._stays else 0
            else:
                assert self._process.poll() is None, self.log()
                assert time.monotonic() < until, "the collector does not start"
                time.sleep(0.01)

    def attempt(self) -> tuple[int, str]:
        """Start it where it cannot run; return its exit code and its stderr."""
        self.begin()
        assert self._process is not None
        code = self._process.wait(PATIENCE_SECONDS)
        self._process = None
        return code, self.log()

    def kill(self) -> None:
        """Kill it, as a system without free memory does."""
        self.address = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@contextmanager
def running_collectors(*collectors: KillableCollector) -> Iterator[None]:
    """Start collectors, and kill them at the end."""
    try:
        for collector in collectors:
            collector.start()
        yield
    finally:
        for collector in collectors:
            collector.kill()


class Admin:
    """An administrator of some collectors over one store, who retries when none answers."""

    def __init__(self, collectors: Sequence[KillableCollector]) -> None:
        self._collectors = collectors
        with closing(Store.open(collectors[0].store)) as store:
            self._token = tokens.create(store, role="admin", name="admin", days=1)[1]

    def ask(self, question: Callable[[AdminClient], T]) -> T:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            for collector in self._collectors:
                if (address := collector.address) is not None:
                    try:
                        return question(AdminClient(address, self._token))
                    except (ServiceError, StoreUnavailable):  # it or its store was killed
                        if time.monotonic() > until:
                            raise
            assert time.monotonic() < until, "no collector is alive"
            time.sleep(PAUSE_SECONDS)

    def open(self, request: dict[str, Any]) -> tuple[str, LocalTask | Task | WordTask]:
        """Create a study; return its id and its task, from its offer."""
        study_id = self.ask(lambda client: client.create_study(request))["id"]
        first = self._collectors[0]
        key = offers.public_key(bytes.fromhex((first.folder / "collector.key").read_text()))
        assert first.address is not None
        connection = http.client.HTTPConnection(first.address.removeprefix("http://"), timeout=20)
        with closing(connection):
            connection.request("GET", "/v1/offers")
            envelopes = json.loads(connection.getresponse().read())["offers"]
        verified = [offers.verify(envelope, key) for envelope in envelopes]
        (task,) = [offer.task for offer in verified if offer.study == request["name"]]
        return study_id, task

    def wait_for_release(self, study_id: str) -> dict[str, Any]:
        """Wait for the release of a study, and return it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (state := self.ask(lambda client: client.study(study_id)))["state"] != "released":
            assert state["state"] in ("collecting", "closing"), state["problem"]
            assert time.monotonic() < until, self._collectors[0].log()
            time.sleep(PAUSE_SECONDS)
        return self.ask(lambda client: client.release(study_id))


def report_maker(task: LocalTask | Task | WordTask) -> Callable[[int], bytes]:
    """A function that makes the report of a device by its number: all have the same value, and each
    an id of its own."""
    assert not isinstance(task, WordTask)
    rng = SystemRng()
    if isinstance(task, Task):
        example = device.report(task, [0], rng=rng)
    else:
        example = device.local_report(task, [0], rng=rng)
    task_id = task.id  # a digest, which takes longer than a report
    return lambda number: Report(task_id, secrets.token_bytes(16), example.message).to_bytes()


@dataclass(eq=False)
class FleetStudy:
    """A study for a fleet: each device has a number, and sends one report for it."""

    task_id: str
    report: Callable[[int], bytes]  # of the device of a number
    most: float = float("inf")  # numbers that may be used so far
    next_number: int = 0  # reports of all lower numbers may have arrived
    acknowledged: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Upload:
    study: FleetStudy
    numbers: frozenset[int]
    reports: tuple[bytes, ...]


class Fleet:
    """Threads that upload all the time, to any running collector.

    Uploads are repeated, byte for byte, until they are acknowledged; a few devices give up. Some
    repeat acknowledged reports, alone or among new ones.
    """

    def __init__(
        self,
        collectors: Sequence[KillableCollector],
        studies: Sequence[FleetStudy],
        *,
        threads: int,
        seed: str,
    ) -> None:
        self._collectors, self._studies = collectors, studies
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._past: list[Upload] = []  # acknowledged ones
        self.statuses: Counter[int | None] = Counter()  # None: no answer
        self._threads = [
            threading.Thread(target=self._live, args=(random.Random(f"{seed} {number}"),))
            for number in range(threads)
        ]

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Upload during the block."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _live(self, chance: random.Random) -> None:
        with closing(_Line(self._collectors, chance)) as line:
            while not self._over.is_set():
                upload = self._upload(chance)
                if upload is None or not self._deliver(upload, line, chance):
                    self._over.wait(PAUSE_SECONDS)

    def _upload(self, chance: random.Random) -> Upload | None:
        """Something to send: mostly new, sometimes old, sometimes both."""
        old = chance.choice(self._past) if self._past else None
        if old is not None and chance.random() < 0.1:
            return old
        study = chance.choice(self._studies)
        with self._lock:
            first = study.next_number
            study.next_number = int(min(first + chance.randint(1, 4), study.most))
        fresh = range(first, study.next_number)
        reports = [study.report(number) for number in fresh]
        if old is not None and old.study is study and chance.random() < 0.1:
            reports.append(chance.choice(old.reports))
            chance.shuffle(reports)
        return Upload(study, frozenset(fresh), tuple(reports)) if reports else None

    def _deliver(self, upload: Upload, line: _Line, chance: random.Random) -> bool:
        """Send until it is acknowledged; return whether it was."""
        while not self._over.is_set():
            if not line.is_open():
                self._over.wait(PAUSE_SECONDS)
                continue
            status = line.post(upload.study.task_id, to_frames(upload.reports))
            with self._lock:
                self.statuses[status] += 1
                if status == 201:
                    upload.study.acknowledged |= upload.numbers
                    self._past.append(upload)
                    return True
            if (status is not None and status not in _AGAIN) or chance.random() < 0.05:
                return False
            self._over.wait(PAUSE_SECONDS)
        return False


class _Line:
    """A connection to one of the collectors, as long as it lasts."""

    def __init__(self, collectors: Sequence[KillableCollector], chance: random.Random) -> None:
        self._collectors, self._chance = collectors, chance
        self._connection: http.client.HTTPConnection | None = None

    def is_open(self) -> bool:
        """Whether there is a collector to send to."""
        if self._connection is None and (address := self._chance.choice(self._collectors).address):
            self._connection = http.client.HTTPConnection(
                address.removeprefix("http://"), timeout=20
            )
        return self._connection is not None

    def post(self, task_id: str, body: bytes) -> int | None:
        """Post an upload; return the status, or None if there was no answer."""
        assert self._connection is not None  # see `is_open`
        try:
            self._connection.request("POST", f"/v1/tasks/{task_id}/reports", body)
            answer = self._connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            self.close()
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

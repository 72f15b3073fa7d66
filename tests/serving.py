"""A collector for tests: real HTTP on a free port, an open study, reports."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.collector.http.app import create_app
from sfumato.collector.http.service import Service
from sfumato.collector.serve import address_of, listen, make_server
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.device import offers
from sfumato.device.offers import Offer
from sfumato.flow.report import Report, to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import HashedResponse, SystemRng
from sfumato.spec import to_json

TASK = LocalTask(
    randomizer=HashedResponse(epsilon=4.0, rows=64, width=56, seed=1), cohort="everybody"
)
KEY = bytes(range(32))
PATIENCE_SECONDS = 20.0


class Faulty(Store):
    """A store whose commits can be made to fail, or to wait."""

    problem: Exception | None = None
    gate: threading.Event | None = None
    commits = 0  # begun, not necessarily done

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with super().transaction() as tx:
            yield tx
            self.commits += 1
            if self.gate is not None:
                assert self.gate.wait(PATIENCE_SECONDS)
            if self.problem is not None:
                raise self.problem


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem."""
        assert self.headers["content-type"] == "application/problem+json"
        return str(self.json()["code"])


def ask(
    address: str,
    method: str,
    path: str,
    body: bytes | str | None = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    try:
        fields = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
        connection.request(method, path, body, fields)
        return read(connection)
    finally:
        connection.close()


def read(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    names = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, names, response.read())


def settings(folder: Path, **options: Any) -> Settings:
    """Settings of a collector with its files in `folder`, and short intervals."""
    defaults = {
        "store": f"sqlite:///{folder}/collector.db",
        "signing_key": str(folder / "collector.key"),
        "listen": "127.0.0.1:0",
        "worker_seconds": 0.05,
        "seal_seconds": 0.1,
        "log_level": "error",
        "reports_per_second": 1_000_000,  # devices of tests do not spread them over a day
    }
    return Settings(**{**defaults, **options})


def opened(
    store: Store,
    *,
    key: bytes = KEY,
    task: LocalTask | Task | WordTask = TASK,
    name: str = "Trees",
    capacity_left: int | None = None,
) -> str:
    """Put an open study with one local task into the store, and return its id."""
    study_id = secrets.token_hex(16)
    offer = Offer(
        study=name,
        purpose="Which trees to plant next.",
        question="frequencies",
        trust="local",
        task=task,
        epsilon=task.epsilon,
    )
    with store.transaction() as tx:
        tx.add_study(
            StudyRow(
                id=study_id,
                name=name,
                purpose=offer.purpose,
                state="collecting",
                study="{}",
                design="{}",
                plan="{}",
                settings="{}",
            )
        )
        tx.add_task(
            TaskRow(
                id=task.id,
                study_id=study_id,
                number=0,
                spec=to_json(task),
                envelope=json.dumps(offers.sign(offer, key)),
                state="open",
                target=None,
                capacity_left=capacity_left,
            )
        )
    return study_id


def reports(count: int, task: LocalTask = TASK) -> list[bytes]:
    """The reports of this many devices."""
    values = task.randomizer.values(np.array(["oak"] * count))
    records = task.randomizer.randomize(values, rng=SystemRng())
    return [
        Report(task.id, secrets.token_bytes(16), record.tobytes()).to_bytes() for record in records
    ]


def body(count: int, task: LocalTask = TASK) -> bytes:
    return to_frames(reports(count, task))


def stored(store: Store, task: LocalTask | Task | WordTask = TASK) -> int:
    """The number of reports of a task in the store."""
    with store.reading() as tx:
        return tx.received_count(task.id)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail if it does not in time."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.01)


@contextmanager
def served(service: Service) -> Iterator[str]:
    """The address of a service, running without a worker during the block."""
    server = make_server(create_app(service), service.settings)
    listening, started = listen(service.settings), threading.Event()
    server.on_started = started.set
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        assert started.wait(PATIENCE_SECONDS)
        yield address_of(listening, service.settings)
    finally:
        server.should_exit = True
        thread.join()
    assert not undocumented_answers(service)


def undocumented_answers(service: Service) -> list[tuple[str, ...]]:
    """Method, address and status of every answer that a service gave, and that its description does
    not have. Each may also answer 500, and no address describes HEAD."""
    answers = {
        (sample.labels["method"], sample.labels["route"], sample.labels["code"])
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "sfumato_request_seconds_count"
    }
    operations = {
        (method.upper(), path): operation
        for path, methods in create_app(service).openapi()["paths"].items()
        for method, operation in methods.items()
    }
    return sorted(
        (method, path, code)
        for method, path, code in answers
        if (method, path) in operations
        and code not in {"500", *operations[method, path]["responses"]}
    )

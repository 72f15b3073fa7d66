"""A collector answers any bytes in time, without an internal error, and keeps running."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from checks import SEED
from service.fuzzing import Fuzzer, Knowledge, Responses, send_all
from service.processes import Collector, collector
from serving import ask
from sfumato.collector.client import AdminClient
from sfumato.device.offers import verify
from sfumato.flow import contribute as device
from sfumato.flow.contribute import local_report
from sfumato.flow.report import Report, to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import SystemRng

ITEMS = [f"tree {number}" for number in range(40)]
STUDIES: dict[str, dict[str, Any]] = {
    "Trees": {"question": "frequencies", "trust": "local", "epsilon": 4.0},
    "Parks": {"question": "frequencies", "trust": "central", "epsilon": None},
    "Words": {"question": "new_words", "trust": "local", "epsilon": 8.0},
    "Lakes": {"question": "frequencies", "trust": "secure", "epsilon": None, "devices": 40},
}
BY_DESIGN = {"503", "507"}  # the store is unavailable or full


def request_of(name: str, kind: str) -> dict[str, Any]:
    return {
        "name": name,
        "purpose": "To plant.",
        "study": {"devices": 1_000_000, **STUDIES[kind]},
        "items": None if kind == "Words" else ITEMS,
    }


def message(task: LocalTask | Task | WordTask, number: int) -> bytes:
    """The message of a device to a task."""
    if isinstance(task, WordTask):
        return local_report(task, [f"oak{'abcdefg'[number % 7]}"], rng=SystemRng()).message
    value: Any = number if task.takes_categories() else ITEMS[number]
    if isinstance(task, Task):
        return device.report(task, [value], rng=SystemRng()).message
    return device.local_report(task, [value], rng=SystemRng()).message


def learn(served: Collector, admin: AdminClient) -> Knowledge:
    """Open studies to upload to, and studies to harm; return what helps to fuzz."""
    for kind in STUDIES:
        admin.create_study(request_of(kind, kind))
    envelopes = json.loads(ask(served.address, "GET", "/v1/offers").body)["offers"]
    offers = [verify(envelope, served.public_key) for envelope in envelopes]
    victims = [admin.create_study(request_of(f"{kind} to harm", kind))["id"] for kind in STUDIES]
    return Knowledge(
        paths=json.loads(ask(served.address, "GET", "/openapi.json").body)["paths"],
        tokens=(served.token("admin"), served.token("analyst")),
        study_ids=victims,
        digests=[offer.dictionary for offer in offers if offer.dictionary is not None],
        messages={
            offer.task.id: [message(offer.task, number) for number in range(20)]
            for offer in offers
            if offer.trust != "secure"
        },
        masked=[offer.task.id for offer in offers if offer.trust == "secure"],
        studies=[request_of(kind, kind) for kind in STUDIES],
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, Knowledge]]:
    folder: Path = tmp_path_factory.mktemp("collector")
    with collector(
        folder, upload_seconds=1.0, idle_seconds=1, study_bytes=300_000, log_level="debug"
    ) as served:
        yield served, learn(served, served.admin())


def fuzz(site: tuple[Collector, Knowledge], count: int) -> Responses:
    served, knowledge = site
    return asyncio.run(send_all(served.address, Fuzzer(knowledge, SEED).requests(count)))


def check(site: tuple[Collector, Knowledge], responses: Responses) -> None:
    served, knowledge = site
    assert not responses.failed, responses.failed[:3]
    assert not responses.slow, responses.slow[:3]
    assert {status for status in responses.statuses if status >= "500" and status.isdigit()} <= (
        BY_DESIGN
    )
    log = [json.loads(line) for line in served.stderr.read_text().splitlines()]
    assert not [line for line in log if line["event"] == "internal"]
    assert served.process.poll() is None
    assert ask(served.address, "GET", "/health").status == 200
    assert ask(served.address, "GET", "/ready").status == 200
    for task_id, messages in knowledge.messages.items():
        report = Report(task_id, bytes(16), messages[0]).to_bytes()
        path = f"/v1/tasks/{task_id}/reports"
        assert ask(served.address, "POST", path, to_frames([report])).status == 201
    admin = served.admin()
    states = {study["name"]: study["state"] for study in admin.studies()}
    assert states.pop("Lakes") in ("collecting", "failed")  # rounds without devices are aborted
    assert {states[name] for name in STUDIES if name in states} == {"collecting"}


def test_two_thousand_requests_do_no_harm(site: tuple[Collector, Knowledge]) -> None:
    responses = fuzz(site, 2_000)
    check(site, responses)
    assert {"200", "201", "400", "401", "404", "405"} <= responses.statuses.keys()


def test_bad_requests_do_not_fill_the_log(site: tuple[Collector, Knowledge]) -> None:
    served, _ = site
    before = served.stderr.read_text()
    upgrade = (
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    for _ in range(100):
        assert first_bytes(served, b"\x16\x03\x01 canary7391\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert first_bytes(served, upgrade).startswith(b"HTTP/1.1 200")
    log = served.stderr.read_text().removeprefix(before)
    assert len(log.splitlines()) < 10
    assert "canary7391" not in log
    assert "pip install" not in log


def first_bytes(served: Collector, data: bytes) -> bytes:
    """The beginning of the answer to these bytes."""
    host, port = served.address.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=20)) as connection:
        connection.sendall(data)
        return connection.recv(100)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_hundred_thousand_requests_do_no_harm(site: tuple[Collector, Knowledge]) -> None:
    responses = fuzz(site, 100_000)
    print(dict(sorted(responses.statuses.items())), f"longest {responses.longest_seconds:.2f} s")  # noqa: T201
    check(site, responses)

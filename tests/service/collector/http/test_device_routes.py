"""Answers to devices, over real HTTP: an acknowledged upload is on disk."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from serving import (
    KEY,
    TASK,
    Answer,
    Faulty,
    ask,
    body,
    opened,
    read,
    reports,
    served,
    settings,
    stored,
    wait_for,
)
from sfumato.collector.http.service import Service
from sfumato.device import offers
from sfumato.errors import StoreFull, StoreReadOnly, StoreUnavailable
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask

LIMITS = {"upload_bytes": 20_000, "upload_reports": 100, "upload_seconds": 0.3, "idle_seconds": 1}
UPLOAD = f"/v1/tasks/{TASK.id}/reports"


class Served:
    """A service and its address."""

    def __init__(self, address: str, service: Service, store: Faulty) -> None:
        self.address, self.service, self.store = address, service, store
        self._number = 0

    def upload(self, data: bytes, task: LocalTask = TASK) -> Answer:
        return ask(self.address, "POST", f"/v1/tasks/{task.id}/reports", data)

    def new_task(self) -> LocalTask:
        """Open another task."""
        self._number += 1
        task = replace(TASK, cohort=f"cohort {self._number}")
        opened(self.store, task=task, name=f"Trees {self._number}")
        return task

    def close(self, task: LocalTask) -> None:
        with self.store.transaction() as tx:
            tx.set_task_state(task.id, "closing", expected=["open"])

    def offers(self, task: LocalTask) -> bool:
        """Whether devices are offered this task."""
        envelopes = ask(self.address, "GET", "/v1/offers").json()["offers"]
        return task.cohort in [
            json.loads(envelope["offer"])["task"]["cohort"] for envelope in envelopes
        ]


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("collector")
    store = Faulty.open(folder / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    service = Service(store, settings(folder, **LIMITS), key=KEY)
    with served(service) as address:
        yield Served(address, service, store)
    store.close()


@pytest.fixture
def faults(collector: Served) -> Iterator[Faulty]:
    """The store, repaired after the test."""
    yield collector.store
    collector.store.problem = collector.store.gate = None


def test_offers_are_signed_with_the_collectors_key(collector: Served) -> None:
    answer = ask(collector.address, "GET", "/v1/offers")
    assert answer.status == 200
    offered = [
        offers.verify(envelope, offers.public_key(KEY)) for envelope in answer.json()["offers"]
    ]
    assert TASK in [offer.task for offer in offered]


def test_offers_that_are_known_are_not_sent_again(collector: Served) -> None:
    etag = ask(collector.address, "GET", "/v1/offers").headers["etag"]
    again = ask(collector.address, "GET", "/v1/offers", headers={"If-None-Match": etag})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    other = ask(collector.address, "GET", "/v1/offers", headers={"If-None-Match": '"other"'})
    assert other.status == 200


def test_head_is_answered_as_get_without_the_body(collector: Served) -> None:
    get, head = (ask(collector.address, method, "/v1/offers") for method in ("GET", "HEAD"))
    assert (head.status, head.body) == (200, b"")
    assert head.headers["etag"] == get.headers["etag"]


def test_a_task_that_may_be_full_is_busy_and_a_full_one_is_closed(
    collector: Served,
) -> None:
    task = replace(TASK, cohort="few")
    opened(collector.store, task=task, name="Few trees", capacity_left=2)
    assert collector.upload(body(2, task), task).status == 201
    for data in (body(1, task), body(1, task) + body(1)):  # part of the second is rejected
        answer = collector.upload(data, task)
        assert (answer.status, answer.code) == (429, "busy")
        assert "room" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) > 0
    answer = collector.upload(body(3, task), task)
    assert (answer.status, answer.code) == (410, "task-closed")
    assert stored(collector.store, task) == 2


def test_offers_are_of_open_tasks_only(collector: Served) -> None:
    task = collector.new_task()
    wait_for(lambda: collector.offers(task), "the new offer")
    collector.close(task)
    wait_for(lambda: not collector.offers(task), "the offer to go")


def test_a_dictionary_is_named_by_its_digest_and_kept_for_ever(collector: Served) -> None:
    lines = '"oak"\n"Ölbaum"\n'.encode()
    digest = sha256(lines).hexdigest()
    with collector.store.transaction() as tx:
        tx.add_dictionary(digest, lines)
    answer = ask(collector.address, "GET", f"/v1/dictionaries/{digest}")
    assert (answer.status, answer.body) == (200, lines)
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize("digest", ["0" * 64, "oak", "%00", "0" * 63])
def test_a_missing_dictionary_is_unknown(collector: Served, digest: str) -> None:
    answer = ask(collector.address, "GET", f"/v1/dictionaries/{digest}")
    assert (answer.status, answer.code) == (404, "unknown-dictionary")


def test_reports_are_stored_and_acknowledged(collector: Served) -> None:
    task = collector.new_task()
    answer = collector.upload(body(7, task), task)
    assert (answer.status, answer.body) == (201, b"")
    assert stored(collector.store, task) == 7


def test_a_bad_report_does_not_fail_the_others(collector: Served) -> None:
    task = collector.new_task()
    frames = [*reports(3, task), b"nonsense", *reports(2), reports(1, task)[0][:-1] + b"\xff"]
    answer = collector.upload(to_frames(frames), task)
    assert answer.status == 200
    assert answer.json() == {"rejected": {"malformed": 1, "wrong_task": 2, "impossible": 1}}
    assert stored(collector.store, task) == 3


def test_an_upload_of_bad_reports_stores_nothing(collector: Served) -> None:
    task = collector.new_task()
    answer = collector.upload(to_frames([b"nonsense"]), task)
    assert (answer.status, answer.json()) == (200, {"rejected": {"malformed": 1}})
    assert stored(collector.store, task) == 0


@pytest.mark.parametrize("data", [b"", b"\1", b"\5\0\0\0abc"])
def test_a_body_that_is_not_a_sequence_of_frames_is_refused(collector: Served, data: bytes) -> None:
    answer = collector.upload(data)
    assert (answer.status, answer.code) == (400, "malformed-upload")


@pytest.mark.parametrize("task_id", ["0" * 64, "oak", "%00", TASK.id.upper(), TASK.id + "0"])
def test_a_missing_task_is_unknown(collector: Served, task_id: str) -> None:
    answer = ask(collector.address, "POST", f"/v1/tasks/{task_id}/reports", body(1))
    assert (answer.status, answer.code) == (404, "unknown-task")


def test_a_closed_task_takes_nothing_whether_or_not_the_cache_is_fresh(collector: Served) -> None:
    task = collector.new_task()
    assert collector.upload(body(1, task), task).status == 201
    collector.close(task)
    answer = collector.upload(body(1, task), task)  # the cache still has it as open
    assert (answer.status, answer.code) == (410, "task-closed")
    wait_for(lambda: not collector.offers(task), "the service to know")
    for _ in range(2):
        answer = collector.upload(body(1, task), task)
        assert (answer.status, answer.code) == (410, "task-closed")
    assert stored(collector.store, task) == 1


def test_a_task_that_was_opened_a_moment_ago_takes_reports(collector: Served) -> None:
    ask(collector.address, "GET", "/v1/offers")  # the cache is fresh for a second
    task = collector.new_task()
    assert collector.upload(body(1, task), task).status == 201


def test_a_body_with_too_large_a_length_is_not_read(collector: Served) -> None:
    connection = http.client.HTTPConnection(collector.address.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", UPLOAD)
    connection.putheader("Content-Length", "1000000")
    connection.endheaders(b"the rest does not come")
    answer = read(connection)
    connection.close()
    assert (answer.status, answer.code) == (413, "too-large")


def test_a_body_that_gets_too_large_is_refused(collector: Served) -> None:
    connection = http.client.HTTPConnection(collector.address.removeprefix("http://"), timeout=10)
    parts = (b"\xff" * 1_000 for _ in range(30))
    connection.request("POST", UPLOAD, parts, encode_chunked=True)
    answer = read(connection)
    connection.close()
    assert (answer.status, answer.code) == (413, "too-large")


def test_an_upload_with_too_many_reports_is_too_large(collector: Served) -> None:
    answer = collector.upload(body(101))
    assert (answer.status, answer.code) == (413, "too-large")
    assert collector.upload(body(100)).status == 201


def test_a_body_that_does_not_arrive_in_time_is_refused(collector: Served) -> None:
    connection = http.client.HTTPConnection(collector.address.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", UPLOAD)
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"half of it")
    answer = read(connection)
    connection.close()
    assert (answer.status, answer.code) == (408, "too-slow")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (StoreFull("canary"), 507, "store-full"),
        (StoreUnavailable("canary"), 503, "store-unavailable"),
        (StoreReadOnly("canary"), 503, "store-read-only"),
        (ValueError("canary"), 500, "internal"),
    ],
)
def test_an_upload_that_is_not_committed_is_not_acknowledged(
    collector: Served, faults: Faulty, problem: Exception, status: int, code: str
) -> None:
    task = collector.new_task()
    assert collector.upload(body(1, task), task).status == 201
    faults.problem = problem
    answer = collector.upload(body(1, task), task)
    assert (answer.status, answer.code) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert b"canary" not in answer.body
    faults.problem = None
    assert stored(collector.store, task) == 1
    assert collector.upload(body(1, task), task).status == 201
    assert stored(collector.store, task) == 2


def test_an_answer_waits_for_the_commit(collector: Served, faults: Faulty) -> None:
    task = collector.new_task()
    data = body(1, task)
    assert collector.upload(data, task).status == 201
    faults.gate = threading.Event()
    commits = faults.commits
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(collector.upload(data, task)))
    thread.start()
    wait_for(lambda: faults.commits > commits, "the commit to begin")
    assert not answers
    faults.gate.set()
    thread.join()
    assert [answer.status for answer in answers] == [201]


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/offers/", "/v1", "/docs", "/redoc", "/v1/tasks//reports"]
)
def test_nothing_is_at_other_addresses(collector: Served, path: str) -> None:
    answer = ask(collector.address, "GET", path)
    assert (answer.status, answer.code) == (404, "not-found")


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v1/offers"), ("GET", UPLOAD), ("POST", "/health")]
)
def test_other_methods_are_refused(collector: Served, method: str, path: str) -> None:
    answer = ask(collector.address, method, path)
    assert (answer.status, answer.code) == (405, "method-not-allowed")


@pytest.mark.parametrize("path", ["/health", "/nothing", "/openapi.json", "/metrics", "/v1/me"])
def test_nothing_else_is_cached_and_the_server_does_not_introduce_itself(
    collector: Served, path: str
) -> None:
    answer = ask(collector.address, "GET", path)
    assert answer.headers["cache-control"] == "no-store"
    assert "server" not in answer.headers


def test_a_connection_without_a_request_is_closed(collector: Served) -> None:
    host, port = collector.address.removeprefix("http://").split(":")
    for data in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            assert connection.recv(100) == b""


def test_headers_without_end_are_refused(collector: Served) -> None:
    host, port = collector.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 20_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_one_connection_carries_many_uploads(collector: Served) -> None:
    task = collector.new_task()
    connection = http.client.HTTPConnection(collector.address.removeprefix("http://"), timeout=10)
    for _ in range(5):
        connection.request("POST", f"/v1/tasks/{task.id}/reports", body(2, task))
        assert read(connection).status == 201
    connection.request("POST", f"/v1/tasks/{task.id}/reports", body(101, task))
    assert read(connection).status == 413
    connection.request("POST", f"/v1/tasks/{task.id}/reports", body(2, task))
    assert read(connection).status == 201
    connection.close()
    assert stored(collector.store, task) == 12


def test_a_task_has_a_limited_rate_of_reports(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    store.migrate()
    opened(store)
    limits = settings(tmp_path, reports_per_second=20, upload_reports=50)
    service = Service(store, limits, key=KEY)
    with served(service) as address:
        assert ask(address, "POST", UPLOAD, body(50)).status == 201
        answer = ask(address, "POST", UPLOAD, body(50))
        assert (answer.status, answer.code) == (429, "busy")
        assert 2 <= int(answer.headers["retry-after"]) <= 3  # 50 at 20 per second
        assert stored(store) == 50
    assert not service.commits.alive
    store.close()


def test_devices_must_wait_when_the_queue_is_full_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    with served(Service(store, settings(tmp_path, queue_uploads=3), key=KEY)) as address:
        assert ask(address, "POST", UPLOAD, body(1)).status == 201
        store.gate = threading.Event()
        answers: list[Answer] = []

        def send() -> None:
            answers.append(ask(address, "POST", UPLOAD, body(1)))

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) == 5, "the refusals")
        assert {answer.code for answer in answers} == {"busy"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", UPLOAD)
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        assert read(connection).code == "busy"  # its body is not read
        connection.close()
        store.gate.set()
        for thread in threads:
            thread.join()
    assert sorted(answer.status for answer in answers) == [201] * 3 + [429] * 5
    assert stored(store) == 4
    store.close()

"""The server's connections: heads, bodies, pipelined requests, slow clients, stops."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serving import (
    KEY,
    TASK,
    Answer,
    Faulty,
    body,
    opened,
    reports,
    served,
    settings,
    stored,
    wait_for,
)
from sfumato.collector.http.service import Service
from sfumato.collector.serve import listen
from sfumato.errors import StoreFull
from sfumato.flow.report import to_frames

CLOSED = replace(TASK, cohort="of yesterday")
UNKNOWN = replace(TASK, cohort="unknown")
LIMITS = {"upload_bytes": 100_000, "upload_reports": 1_000}


@dataclass(frozen=True)
class Place:
    """A collector, and its store."""

    address: tuple[str, int]
    store: Faulty


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("collector")
    store = Faulty.open(folder / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    opened(store, task=CLOSED, name="Trees of yesterday")
    with store.transaction() as tx:
        tx.set_task_state(CLOSED.id, "closing", expected=["open"])
    with served(Service(store, settings(folder, **LIMITS), key=KEY)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield Place((host, int(port)), store)
    store.close()


@contextmanager
def separate_place(folder: Path, **options: Any) -> Iterator[Place]:
    """A collector for one test, with an open task."""
    store = Faulty.open(folder / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    with served(Service(store, settings(folder, **options), key=KEY)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield Place((host, int(port)), store)
    store.close()


@contextmanager
def connected(place: Place) -> Iterator[socket.socket]:
    with closing(socket.create_connection(place.address, timeout=20)) as connection:
        yield connection


def read(connection: socket.socket) -> Answer:
    """The next answer, to its end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = connection.recv(1)
        assert part, "the connection was closed"
        head += part
    lines = head.decode().lower().split("\r\n")[1:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    data = b""
    if "content-length" not in headers:  # it ends with the connection
        while part := connection.recv(1_000):
            data += part
    else:
        while len(data) < int(headers["content-length"]):
            data += connection.recv(int(headers["content-length"]) - len(data))
    return Answer(int(head.split()[1]), headers, data)


def request(
    data: bytes = b"", path: str = "/health", method: str = "GET", *headers: str, version: str = "1"
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.{version}",
        "Host: collector",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + data


def upload(data: bytes, *headers: str, task_id: str = TASK.id, version: str = "1") -> bytes:
    return request(data, f"/v1/tasks/{task_id}/reports", "POST", *headers, version=version)


def in_chunks(data: bytes, task_id: str = TASK.id) -> bytes:
    """An upload that does not say how long it is."""
    head = f"POST /v1/tasks/{task_id}/reports HTTP/1.1\r\nHost: collector\r\n"
    chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 20_000,
        b"GET /" + b"a" * 20_000,
        b"GET /health HTTP/1.1\r\n" + b"X-Short: a\r\n" * 2_000,
        b"GET /health HTTP/1.1\r\n" + b"X-Short: a\r\n" * 3_000 + b"\r\n",
    ],
    ids=["value", "path", "headers", "headers that end"],
)
@pytest.mark.parametrize("size", [100_000, 1_000])
def test_a_head_that_is_too_long_is_refused_in_one_part_or_in_many(
    place: Place, head: bytes, size: int
) -> None:
    with connected(place) as connection:
        try:
            for start in range(0, len(head), size):
                connection.sendall(head[start : start + size])
            answer = connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            return  # it was refused before it was complete, and the answer was lost
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_head_of_many_parts_is_read(place: Place) -> None:
    with connected(place) as connection:
        for byte in request():
            connection.sendall(bytes([byte]))
        assert read(connection).status == 200


def test_requests_after_a_body_do_not_count_as_one_long_head(place: Place) -> None:
    """Requests without a pause between them, cut at various places."""
    requests = [upload(body(900)), request(), upload(body(1)), upload(body(1_000)), request()]
    data = b"".join(requests)
    for size in (len(data), 50_000, 20_000, 1_999):
        with connected(place) as connection:
            for start in range(0, len(data), size):
                connection.sendall(data[start : start + size])
            assert [read(connection).status for _ in requests] == [201, 200, 201, 201, 200]


def test_small_parts_of_an_answer_do_not_wait_for_one_another(tmp_path: Path) -> None:
    with (
        closing(listen(settings(tmp_path))) as listening,
        closing(socket.create_connection(listening.getsockname(), timeout=20)),
        closing(listening.accept()[0]) as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("frames", "task_id", "status"),
    [
        (reports(1), TASK.id, 201),
        (reports(50), TASK.id, 201),
        ([*reports(2), b"nonsense"], TASK.id, 200),
        (reports(1, UNKNOWN), TASK.id, 200),
        ([], TASK.id, 400),
        (reports(1_001), TASK.id, 413),
        (reports(1, UNKNOWN), UNKNOWN.id, 404),
        (reports(1), TASK.id.upper(), 404),
        (reports(1, CLOSED), CLOSED.id, 410),
    ],
    ids=["one", "many", "bad", "other", "none", "long", "unknown", "upper", "closed"],
)
def test_an_upload_is_answered_the_same_whole_or_in_chunks(
    place: Place, frames: list[bytes], task_id: str, status: int
) -> None:
    with connected(place) as connection:
        answers = []
        for data in (
            upload(to_frames(frames), task_id=task_id),
            in_chunks(to_frames(frames), task_id),
        ):
            before = stored(place.store)
            connection.sendall(data)
            answer = read(connection)
            headers = {name: value for name, value in answer.headers.items() if name != "date"}
            answers.append((answer.status, headers, answer.body, stored(place.store) - before))
        assert answers[0] == answers[1]
        assert answers[0][0] == status


@pytest.mark.parametrize("problem", [StoreFull("canary"), ValueError("canary")])
def test_a_failed_upload_is_answered_the_same_whole_or_in_chunks(
    place: Place, problem: Exception
) -> None:
    with connected(place) as connection:
        connection.sendall(upload(body(1)))
        assert read(connection).status == 201
        place.store.problem = problem
        try:
            answers = []
            for data in (upload(body(1)), in_chunks(body(1))):
                connection.sendall(data)
                answers.append(read(connection))
        finally:
            place.store.problem = None
        assert answers[0].status == (507 if isinstance(problem, StoreFull) else 500)
        assert answers[0].body == answers[1].body
        assert answers[0].headers.keys() == answers[1].headers.keys()
        connection.sendall(upload(body(1)))
        assert read(connection).status == 201


def test_a_body_may_follow_its_head_at_once_or_later(place: Place) -> None:
    for seconds in (0.0, 0.5):
        with connected(place) as connection:
            for _ in range(3):
                head, end, data = upload(body(5)).partition(b"\r\n\r\n")
                connection.sendall(head + end)
                assert not threading.Event().wait(seconds)
                connection.sendall(data[:20])
                connection.sendall(data[20:])
                assert read(connection).status == 201


def test_a_device_that_waits_for_100_continue_gets_it(place: Place) -> None:
    with connected(place) as connection:
        head, end, data = upload(body(5), "Expect: 100-continue").partition(b"\r\n\r\n")
        connection.sendall(head + end)
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(data)
        assert read(connection).status == 201


@pytest.mark.parametrize(
    "data", [upload(body(1), "Connection: close"), upload(body(1), version="0")]
)
def test_a_connection_is_closed_on_request(place: Place, data: bytes) -> None:
    with connected(place) as connection:
        connection.sendall(data)
        answer = read(connection)
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        assert connection.recv(1) == b""


def test_uploads_without_a_pause_are_answered_in_their_order(place: Place) -> None:
    with connected(place) as connection:
        before = stored(place.store)
        requests = [upload(body(1)), upload(to_frames([b"bad"])), request(), upload(body(2))] * 5
        connection.sendall(b"".join(requests))
        assert [read(connection).status for _ in requests] == [201, 200, 200, 201] * 5
        assert stored(place.store) == before + 15


def test_a_device_that_leaves_before_the_answer_does_not_disturb_others(place: Place) -> None:
    with connected(place) as connection:
        connection.sendall(upload(body(1)))
        assert read(connection).status == 201
    before = stored(place.store)
    place.store.gate, commits = threading.Event(), place.store.commits
    try:
        with connected(place) as leaving, connected(place) as staying:
            leaving.sendall(upload(body(1)))
            wait_for(lambda: place.store.commits > commits, "the commit to begin")
            leaving.close()
            staying.sendall(upload(body(1)))
            place.store.gate.set()
            assert read(staying).status == 201
    finally:
        place.store.gate = None
    assert stored(place.store) == before + 2


def test_an_upload_under_way_is_answered_when_the_collector_stops(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    answers: list[Answer] = []
    with served(Service(store, settings(tmp_path), key=KEY)) as url:
        host, port = url.removeprefix("http://").split(":")
        place = Place((host, int(port)), store)
        connection = socket.create_connection(place.address, timeout=20)
        connection.sendall(upload(body(1)))
        assert read(connection).status == 201
        store.gate, commits = threading.Event(), store.commits
        connection.sendall(upload(body(1)))
        wait_for(lambda: store.commits > commits, "the commit to begin")
        threading.Timer(0.3, store.gate.set).start()  # when it is stopping
    with closing(connection):
        answers.append(read(connection))
        assert connection.recv(1) == b""
    assert answers[0].status == 201
    assert stored(store) == 2
    store.close()


def test_requests_before_an_answer_are_answered_after_it(place: Place) -> None:
    """The client does not wait for answers."""
    with connected(place) as connection:
        connection.sendall(upload(body(1)))
        assert read(connection).status == 201
        before = stored(place.store)
        place.store.gate, commits = threading.Event(), place.store.commits
        try:
            connection.sendall(upload(body(1)))
            wait_for(lambda: place.store.commits > commits, "the commit to begin")
            for data in (upload(body(2)), upload(to_frames([b"bad"])), request(), upload(body(1))):
                connection.sendall(data)
                assert not threading.Event().wait(0.02)  # so that it is read on its own
        finally:
            place.store.gate.set()
            place.store.gate = None
        assert [read(connection).status for _ in range(5)] == [201, 201, 200, 200, 201]
        assert stored(place.store) == before + 4


@pytest.mark.slow
def test_a_connection_is_kept_while_it_is_used_and_closed_when_it_is_idle(tmp_path: Path) -> None:
    with separate_place(tmp_path, idle_seconds=1) as place:
        store = place.store
        with connected(place) as used, connected(place) as partial, connected(place) as unused:
            for turn in range(8):  # for twice as long
                used.sendall(upload(body(1)) if turn % 3 else request())
                assert read(used).status in (200, 201)
                if turn == 0:
                    partial.sendall(upload(body(1)))
                    assert read(partial).status == 201
                    partial.sendall(upload(body(1))[:30])
                assert not threading.Event().wait(0.3)
            for idle in (partial, unused):
                idle.setblocking(False)
                assert idle.recv(1) == b""
            store.gate = threading.Event()
            used.sendall(upload(body(1)))
            assert not threading.Event().wait(1.5)  # it is not idle while it waits
            store.gate.set()
            store.gate = None
            assert read(used).status == 201
            assert used.recv(1) == b""  # after another second


def test_a_request_within_a_header_is_not_a_request(place: Place) -> None:
    """The rest of a head looks like another request, but is the value of a header."""
    with connected(place) as connection:
        before = stored(place.store)
        connection.sendall(upload(body(1)) + b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        assert read(connection).status == 201
        connection.sendall(upload(body(1)))  # all of it belongs to the request before
        assert read(connection).status == 400  # which now has two hosts
        assert stored(place.store) == before + 1
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: {}\r\nContent-Length: 0",
        "Content-Length: +{}",
        "Content-Length: 0x{}",
        "Content-Length : {}",
        "Content-Length: {}\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, identity\r\nContent-Length: {}",
        "Transfer-Encoding: xchunked",
    ],
)
def test_a_request_whose_length_can_be_read_in_two_ways_is_refused(
    place: Place, lengths: str
) -> None:
    data, before = body(1), stored(place.store)
    head = f"POST /v1/tasks/{TASK.id}/reports HTTP/1.1\r\nHost: collector\r\n"
    head += lengths.format(len(data), len(data)) + "\r\n\r\n"
    with connected(place) as connection:
        connection.sendall(head.encode() + data + upload(body(1)))
        assert read(connection).status == 400
        assert connection.recv(1) == b""
    assert stored(place.store) == before

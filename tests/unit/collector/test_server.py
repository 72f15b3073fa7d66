"""What reaches a connection before anything is asked: heads too long, bodies that are not heads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from serving import KEY, TASK, body, opened, served, settings
from sfumato.collector.server import listen
from sfumato.collector.service import Service
from sfumato.collector.store import Store


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    folder = tmp_path_factory.mktemp("collector")
    store = Store.open(folder / "collector.db")
    store.migrate()
    opened(store)
    with served(Service(store, settings(folder), key=KEY)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)
    store.close()


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with closing(socket.create_connection(address, timeout=20)) as connection:
        yield connection


def status(connection: socket.socket) -> int:
    """Of the next answer, which is read to its end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = connection.recv(1)
        assert part, "the connection was closed"
        head += part
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
    left = int(fields[b"content-length"])
    while left:
        left -= len(connection.recv(left))
    return int(head.split()[1])


def request(data: bytes = b"", path: str = "/health", method: str = "GET") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: collector\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def upload(count: int) -> bytes:
    return request(body(count), f"/v1/tasks/{TASK.id}/reports", "POST")


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
def test_a_head_that_is_too_long_is_refused_in_one_part_or_in_many(
    address: tuple[str, int], head: bytes
) -> None:
    for size in (len(head), 1_000):
        with connected(address) as connection:
            try:
                for start in range(0, len(head), size):
                    connection.sendall(head[start : start + size])
            except (BrokenPipeError, ConnectionResetError):
                continue  # it was refused before all of it was sent
            try:
                assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
            except ConnectionResetError:
                continue  # the answer was lost: more came than was read


def test_a_head_of_many_parts_is_read(address: tuple[str, int]) -> None:
    with connected(address) as connection:
        for byte in request():
            connection.sendall(bytes([byte]))
        assert status(connection) == 200


def test_what_follows_a_body_is_not_taken_for_one_long_head(address: tuple[str, int]) -> None:
    """Requests without a pause between them, cut at all sorts of places."""
    sent = b"".join([upload(1_000), request(), upload(1), upload(2_000), request()])
    for size in (len(sent), 50_000, 20_000, 1_999):
        with connected(address) as connection:
            for start in range(0, len(sent), size):
                connection.sendall(sent[start : start + size])
            assert [status(connection) for _ in range(5)] == [201, 200, 201, 201, 200]


def test_small_parts_of_an_answer_do_not_wait_for_one_another(tmp_path: Path) -> None:
    with (
        closing(listen(settings(tmp_path))) as listening,
        connected(listening.getsockname()),
        closing(listening.accept()[0]) as taken,
    ):
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

"""A stranger on a raw connection: every answer belongs to its request, and nobody is held for long.

Behind a proxy, many people share one connection to the collector. If the collector reads one
request as two, or answers out of order, somebody gets another person's answer.
"""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from serving import KEY, served, settings
from sfumato.collector.http.service import Service
from sfumato.collector.store.store import Store

PAUSE_SECONDS = 0.1  # between two packets
CONNECTIONS = 64
WRITE_SECONDS = 2  # for a client to read something of its answer
TASK_ID = "0" * 64
DICTIONARY = b'"tree"\n' * (1 << 20)  # more than the kernel buffers for a connection
DIGEST = hashlib.sha256(DICTIONARY).hexdigest()
PAGE = b'"tree"\n' * 4_000  # less than the server buffers for a connection
PAGE_DIGEST = hashlib.sha256(PAGE).hexdigest()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    folder = tmp_path_factory.mktemp("collector")
    with closing(Store.open(f"sqlite:///{folder}/collector.db")) as store:
        store.migrate()
        with store.transaction() as tx:
            tx.add_dictionary(DIGEST, DICTIONARY)
            tx.add_dictionary(PAGE_DIGEST, PAGE)
        service = Service(
            store,
            settings(folder, idle_seconds=1, upload_seconds=WRITE_SECONDS, connections=CONNECTIONS),
            key=KEY,
        )
        with served(service) as url:
            host, port = url.removeprefix("http://").split(":")
            yield host, int(port)


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", "Host: collector", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def statuses(address: tuple[str, int], packets: list[bytes]) -> list[int]:
    """The statuses of all answers to these packets, in order, until the connection ends."""
    answers = b""
    with (
        suppress(ConnectionError),  # closed by the collector
        closing(socket.create_connection(address, timeout=20)) as connection,
    ):
        for packet in packets:
            connection.sendall(packet)
            time.sleep(PAUSE_SECONDS)
        while part := connection.recv(1 << 16):
            answers += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


HEALTH = request("GET /health")  # answered by 200
NOWHERE = request("GET /nowhere")  # answered by 404
GARBAGE = b"\x00garbage\r\n\r\n"  # answered by 400, and then the connection ends
UPGRADE = ("Connection: Upgrade", "Upgrade: h2c")
WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket")
UPLOAD = request(f"POST /v1/tasks/{TASK_ID}/reports", "Content-Length: 4")  # 404
SMUGGLED = f"Content-Length: {len(HEALTH)}"


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        ([NOWHERE + HEALTH], [404, 200]),
        ([request("POST /nowhere", *UPGRADE, SMUGGLED), HEALTH], [404]),
        ([request("POST /nowhere", *UPGRADE, SMUGGLED, body=HEALTH)], [404]),
        (
            [request("POST /nowhere", *WEBSOCKET, SMUGGLED), HEALTH, NOWHERE],
            [404, 404],
        ),
        ([request("GET /health", *UPGRADE), NOWHERE], [200, 404]),
        ([request("GET /health", *UPGRADE) + NOWHERE], [200, 404]),
        ([request("CONNECT /health"), NOWHERE], [405, 404]),
        ([HEALTH + GARBAGE], [200, 400]),
        ([NOWHERE + HEALTH + GARBAGE], [404, 200, 400]),
        ([UPLOAD + b"abcd" + GARBAGE], [404, 400]),
        ([UPLOAD, b"abcd", HEALTH], [404, 200]),
        ([UPLOAD + b"ab", b"cd" + HEALTH + NOWHERE], [404, 200, 404]),
        (
            [request("POST /nowhere", "Expect: 100-continue", SMUGGLED), HEALTH + NOWHERE],
            [404, 404],
        ),
        (
            [
                request("POST /nowhere", "Content-Length: 5", "Transfer-Encoding: chunked")
                + b"0\r\n\r\n"
                + HEALTH
            ],
            [400],
        ),
    ],
    ids=[
        "pipelined",
        "upgrade, late body",
        "upgrade, body",
        "websocket, late body",
        "upgrade, then another",
        "upgrade and another",
        "connect",
        "garbage",
        "pipelined garbage",
        "garbage after a body",
        "late body",
        "body in parts",
        "continue",
        "two lengths",
    ],
)
def test_every_request_gets_its_own_answer(
    address: tuple[str, int], packets: list[bytes], expected: list[int]
) -> None:
    assert statuses(address, packets) == expected


def drain(connection: socket.socket, pauses: int = 0) -> int:
    """How many bytes arrive until the connection ends, with a pause after each of the first."""
    size = 0
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            size += len(part)
            pauses -= 1
            time.sleep(PAUSE_SECONDS if pauses >= 0 else 0)
    return size


def test_a_client_that_does_not_read_is_cut_off(address: tuple[str, int]) -> None:
    with closing(socket.create_connection(address, timeout=20)) as connection:
        connection.sendall(request(f"GET /v1/dictionaries/{DIGEST}"))
        time.sleep(2 * WRITE_SECONDS)
        assert drain(connection) < len(DICTIONARY)


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_all_of_its_answer(address: tuple[str, int]) -> None:
    with closing(socket.socket()) as connection:
        connection.settimeout(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(address)
        connection.sendall(request(f"GET /v1/dictionaries/{DIGEST}", "Connection: close"))
        pauses = round(2 * WRITE_SECONDS / PAUSE_SECONDS)
        assert drain(connection, pauses) > len(DICTIONARY)


def test_idle_connections_keep_nobody_out(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            stack.enter_context(closing(socket.create_connection(address, timeout=20)))
        assert statuses(address, [request("GET /health", "Connection: close")]) == [200]


def test_a_client_that_never_reads_is_gone_after_a_time(address: tuple[str, int]) -> None:
    """Whether its unread answers fill the server's buffer or only the kernel's."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(socket.create_connection(address, timeout=20)))
            for _ in range(CONNECTIONS // 2)
        ]
        time.sleep(PAUSE_SECONDS)  # until all are accepted
        before = count_sockets()
        for number, connection in enumerate(connections):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            connection.sendall(request(f"GET /v1/dictionaries/{PAGE_DIGEST}") * (2 * number + 1))
        assert count_sockets() == before
        until = time.monotonic() + 20
        while count_sockets() > before - len(connections):
            assert time.monotonic() < until, "some are still open"
            time.sleep(PAUSE_SECONDS)


def count_sockets() -> int:
    """Of this process, which has both ends of each connection."""
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            count += file.readlink().name.startswith("socket:")
    return count

"""Many devices, as a collector sees them: uploads over a few connections, one after another.

`python -m benchmarks.speed.uploading ADDRESS TASK_ID FILE CONNECTIONS SECONDS` sends the upload in
a file repeatedly, each time with new report ids, and prints statistics. It is a separate process,
and does so little per request that the collector is the limit: one thread over non-blocking
sockets, and only the status is parsed.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from sfumato.flow.report import HEADER_BYTES, LENGTH_BYTES

_ID = slice(LENGTH_BYTES + HEADER_BYTES - 16, LENGTH_BYTES + HEADER_BYTES)
_TIMEOUT_SECONDS = 30.0


class Uploads:
    """Requests of one length that differ only in the ids of their reports."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self._request = bytearray(head + body)
        size = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
        frames = np.frombuffer(self._request, dtype=np.uint8)[len(head) :].reshape(-1, size)
        self._ids = frames[:, _ID]
        self.reports = len(frames)

    def next(self) -> bytes:
        fresh = np.frombuffer(os.urandom(self._ids.size), dtype=np.uint8)
        self._ids[:] = fresh.reshape(self._ids.shape)
        return bytes(self._request)


@dataclass(slots=True)
class Connection:
    """A connection with one current request, and the part of it that is not sent yet."""

    socket: socket.socket
    unsent: bytes = b""
    start: float = 0.0
    answer: bytes = b""


@dataclass(slots=True)
class Tally:
    """The statuses and times of all answers."""

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def drive(address: str, uploads: Uploads, connections: int, seconds: float) -> dict[str, Any]:
    """Keep every connection busy for `seconds`; later answers do not count."""
    parts = urlsplit(address)
    selector = selectors.DefaultSelector()
    tally = Tally()
    all_connections = [
        Connection(socket.create_connection((parts.hostname, parts.port), _TIMEOUT_SECONDS))
        for _ in range(connections)
    ]
    try:
        for connection in all_connections:
            connection.socket.setblocking(False)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        start = time.perf_counter()
        for connection in all_connections:
            _send(connection, uploads.next(), selector)
        while time.perf_counter() < start + seconds:
            ready = selector.select(_TIMEOUT_SECONDS)
            if not ready:
                raise RuntimeError(f"the collector has not answered for {_TIMEOUT_SECONDS} s")
            for key, events in ready:
                connection = key.data
                if events & selectors.EVENT_WRITE:
                    _send(connection, connection.unsent, selector)
                elif _read_answer(connection, tally):
                    _send(connection, uploads.next(), selector)
        elapsed = time.perf_counter() - start
    finally:
        selector.close()
        for connection in all_connections:
            connection.socket.close()
    stored = tally.statuses.get("201", 0)
    return {
        "uploads": stored,
        "reports": stored * uploads.reports,
        "seconds": elapsed,
        "statuses": tally.statuses,
        "latency_seconds": latencies(tally.seconds),
    }


def latencies(seconds: list[float]) -> dict[str, float]:
    """Quantiles of the answers' times."""
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: float(np.quantile(seconds, share)) for name, share in shares.items()}


def _send(connection: Connection, data: bytes, selector: selectors.BaseSelector) -> None:
    """Send as much as possible now, and the rest when the socket is writable."""
    waited = bool(connection.unsent)
    if not waited:
        connection.start = time.perf_counter()
    try:
        count = connection.socket.send(data)
    except BlockingIOError:
        count = 0
    connection.unsent = data[count:]
    if bool(connection.unsent) != waited:
        event = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        selector.modify(connection.socket, event, connection)


def _read_answer(connection: Connection, tally: Tally) -> bool:
    """Continue reading; whether the answer is complete."""
    part = connection.socket.recv(1 << 16)
    if not part:
        raise RuntimeError("the collector closed a connection")
    connection.answer += part
    head, end, body = connection.answer.partition(b"\r\n\r\n")
    if not end or len(body) < _length(head):
        return False
    status = head[9:12].decode()
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    tally.seconds.append(time.perf_counter() - connection.start)
    connection.answer = b""
    return True


def _length(head: bytes) -> int:
    at = head.lower().index(b"content-length:") + 15
    return int(head[at:].split(b"\r\n", 1)[0])


def head_of(task_id: str, body: bytes) -> bytes:
    """The request line and headers of an upload."""
    return (
        f"POST /v1/tasks/{task_id}/reports HTTP/1.1\r\nHost: collector\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


def _main(address: str, task_id: str, file: str, connections: str, seconds: str) -> None:
    body = Path(file).read_bytes()
    uploads = Uploads(head_of(task_id, body), body)
    print(json.dumps(drive(address, uploads, int(connections), float(seconds))))


if __name__ == "__main__":
    _main(*sys.argv[1:])

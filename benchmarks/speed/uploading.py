"""Many devices, as a collector sees them: uploads over a few connections, one after another.

`python -m benchmarks.speed.uploading ADDRESS TASK_ID FILE CONNECTIONS SECONDS` sends the upload in
a file again and again, each time with report ids that were never sent before, and prints how it
went. It is a process of its own, and does so little for a request that the collector is the limit:
one thread over non-blocking sockets, nothing parsed but the status.
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
_PATIENCE_SECONDS = 30.0


class Uploads:
    """Requests that differ in the ids of their reports alone, all of one length."""

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
    """A connection with one request under way; what of it is still to be sent."""

    socket: socket.socket
    unsent: bytes = b""
    begun: float = 0.0
    answer: bytes = b""


@dataclass(slots=True)
class Tally:
    """What was answered, and how long each took."""

    statuses: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def drive(address: str, uploads: Uploads, connections: int, seconds: float) -> dict[str, Any]:
    """Keep every connection busy for so long; answers that come later do not count."""
    parts = urlsplit(address)
    selector = selectors.DefaultSelector()
    tally = Tally()
    opened = [
        Connection(socket.create_connection((parts.hostname, parts.port), _PATIENCE_SECONDS))
        for _ in range(connections)
    ]
    try:
        for connection in opened:
            connection.socket.setblocking(False)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        begun = time.perf_counter()
        for connection in opened:
            _send(connection, uploads.next(), selector)
        while time.perf_counter() < begun + seconds:
            ready = selector.select(_PATIENCE_SECONDS)
            if not ready:
                raise RuntimeError(f"the collector has not answered for {_PATIENCE_SECONDS} s")
            for key, events in ready:
                connection = key.data
                if events & selectors.EVENT_WRITE:
                    _send(connection, connection.unsent, selector)
                elif _answered(connection, tally):
                    _send(connection, uploads.next(), selector)
        elapsed = time.perf_counter() - begun
    finally:
        selector.close()
        for connection in opened:
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
    """Quantiles of how long each took."""
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: float(np.quantile(seconds, share)) for name, share in shares.items()}


def _send(connection: Connection, data: bytes, selector: selectors.BaseSelector) -> None:
    """Send what can be sent now; the rest when there is room."""
    waited = bool(connection.unsent)
    if not waited:
        connection.begun = time.perf_counter()
    try:
        sent = connection.socket.send(data)
    except BlockingIOError:
        sent = 0
    connection.unsent = data[sent:]
    if bool(connection.unsent) != waited:
        wanted = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        selector.modify(connection.socket, wanted, connection)


def _answered(connection: Connection, tally: Tally) -> bool:
    """Read on; whether the answer is whole."""
    part = connection.socket.recv(1 << 16)
    if not part:
        raise RuntimeError("the collector closed a connection")
    connection.answer += part
    head, end, body = connection.answer.partition(b"\r\n\r\n")
    if not end or len(body) < _length(head):
        return False
    status = head[9:12].decode()
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    tally.seconds.append(time.perf_counter() - connection.begun)
    connection.answer = b""
    return True


def _length(head: bytes) -> int:
    at = head.lower().index(b"content-length:") + 15
    return int(head[at:].split(b"\r\n", 1)[0])


def head_of(task_id: str, body: bytes) -> bytes:
    """What comes before the body of an upload."""
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

"""Many requests over a few connections at once, with as little work per request as possible.

One thread over non-blocking sockets; only the status and length of an answer are parsed.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 300.0
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """A request."""

    method: str
    path: str
    body: bytes = b""
    ticket: str = ""

    def to_bytes(self, host: str) -> bytes:
        ticket = f"Authorization: Ticket {self.ticket}\r\n" if self.ticket else ""
        head = (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: {host}\r\n{ticket}"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    number: int = -1  # of the current request
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    answer: bytearray | None = None


class Connections:
    """Persistent connections to a collector."""

    def __init__(self, address: str, connections: int) -> None:
        parts = urlsplit(address)
        self._host = parts.netloc
        self._selector = selectors.DefaultSelector()
        self._lines = []
        for _ in range(connections):
            line = _Connection(
                socket.create_connection((parts.hostname, parts.port), TIMEOUT_SECONDS)
            )
            line.socket.setblocking(False)
            line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(line.socket, selectors.EVENT_READ, line)
            self._lines.append(line)

    def send(self, requests: Sequence[Request]) -> list[tuple[int, bytes]]:
        """Send each request once; return the status and body of each answer."""
        answers: list[tuple[int, bytes]] = [(0, b"")] * len(requests)
        waiting = deque(range(len(requests)))
        for line in self._lines[: len(requests)]:
            self._begin(line, waiting, requests)
        left = len(requests)
        while left:
            ready = self._selector.select(TIMEOUT_SECONDS)
            if not ready:
                raise RuntimeError(f"no answer for {TIMEOUT_SECONDS} s")
            for key, events in ready:
                line = key.data
                if events & selectors.EVENT_WRITE:
                    self._send(line)
                elif (answer := _read(line)) is not None:
                    answers[line.number] = answer
                    left -= 1
                    if waiting:
                        self._begin(line, waiting, requests)
        return answers

    def _begin(self, line: _Connection, waiting: deque[int], requests: Sequence[Request]) -> None:
        line.number = waiting.popleft()
        line.unsent = memoryview(requests[line.number].to_bytes(self._host))
        line.answer = bytearray()
        self._send(line)

    def _send(self, line: _Connection) -> None:
        try:
            count = line.socket.send(line.unsent)
        except BlockingIOError:
            count = 0
        line.unsent = line.unsent[count:]
        event = selectors.EVENT_WRITE if line.unsent else selectors.EVENT_READ
        if self._selector.get_key(line.socket).events != event:
            self._selector.modify(line.socket, event, line)

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._selector.close()
        for line in self._lines:
            line.socket.close()


def _read(line: _Connection) -> tuple[int, bytes] | None:
    """Continue reading; the answer, if it is complete."""
    part = line.socket.recv(_READ_BYTES)
    if not part or line.answer is None:
        raise RuntimeError("the collector closed a connection")
    line.answer += part
    end = line.answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(line.answer[:end]).lower()
    at = head.find(b"content-length:")
    size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0  # a 204 has none
    if len(line.answer) < end + 4 + size:
        return None
    answer = int(head[9:12]), bytes(line.answer[end + 4 :])
    line.answer = None
    return answer

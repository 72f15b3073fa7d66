"""Limits on what one client may take: the head of a request, the bytes of a body, the time to send
them, the reports per second of a task."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sfumato.collector.problems import Problem

HEAD_BYTES = 16 << 10  # of a request's line and headers
_HEAD_TOO_LONG = "The request's head is too long."


class HeadLimits:
    """An application whose requests have heads of at most `HEAD_BYTES`, received in time.

    uvicorn closes a connection that is idle between two requests, but it waits for ever for a first
    request and for the rest of an incomplete one, however long that gets. So each of its
    connections is put behind a `_Connection`, which limits bytes and time while the application has
    no request from that connection.
    """

    def __init__(self, app: ASGIApp, *, seconds: float) -> None:
        """A connection is closed if no head is complete `seconds` after the previous answer."""
        self._app = app
        self._seconds = seconds
        self._connections: dict[tuple[str, int], _Connection] = {}  # by the client's address

    def protocol(self, stock: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
        """A protocol for uvicorn's option `http`: its `stock` protocol within these limits."""
        connections, seconds = self._connections, self._seconds

        class Limited(_Connection):
            def __init__(self, **options: object) -> None:
                super().__init__(stock(**options), connections, seconds)

        return Limited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = self._connections[scope["client"]]
        head_bytes, body_bytes = len(scope["raw_path"]) + len(scope["query_string"]), 0
        for name, value in scope["headers"]:
            head_bytes += len(name) + len(value)
            if name == b"content-length":
                body_bytes = _number(value)
        connection.begin_request(body_bytes)
        try:
            if head_bytes > HEAD_BYTES:
                answer = PlainTextResponse(_HEAD_TOO_LONG, 400, {"Connection": "close"})
                await answer(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            connection.end_request()


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol inside; closes the connection if no request begins."""

    def __init__(
        self,
        inside: asyncio.Protocol,
        connections: dict[tuple[str, int], _Connection],
        seconds: float,
    ) -> None:
        self._inside, self._connections, self._seconds = inside, connections, seconds
        self._loop = asyncio.get_running_loop()
        self._bytes_left = HEAD_BYTES
        self._requests = 0  # being answered by the application
        self._idle_since = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client = transport.get_extra_info("peername")[:2]
        self._connections[self._client] = self
        self._timer = self._loop.call_later(self._seconds, self._check_idle)
        self._inside.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        del self._connections[self._client]
        self._inside.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        self._inside.data_received(data)
        if self._bytes_left < 0 and not self._requests:
            self._loop.call_soon(self._check_bytes)  # after a complete request has begun

    def eof_received(self) -> bool | None:
        return self._inside.eof_received()

    def pause_writing(self) -> None:
        self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._inside.resume_writing()

    def begin_request(self, body_bytes: int) -> None:
        """Note that a head is complete, and how many bytes belong to its body."""
        self._requests += 1
        self._bytes_left += body_bytes

    def end_request(self) -> None:
        """Note that the request is answered; part of its body may still arrive."""
        self._requests -= 1
        self._bytes_left = max(self._bytes_left, HEAD_BYTES)
        self._idle_since = self._loop.time()

    def _check_bytes(self) -> None:
        if self._bytes_left < 0 and not (self._requests or self._transport.is_closing()):
            text = _HEAD_TOO_LONG.encode()
            head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(text) + text)
            self._transport.close()

    def _check_idle(self) -> None:
        """Close the connection if it is idle. (A timer for every request would cost more.)"""
        left = self._idle_since + self._seconds - self._loop.time()
        if self._requests:
            left = self._seconds
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self._transport.close()


def _number(value: bytes) -> int:
    """The number in a header; 0 if it is not a number."""
    return int(value) if value.isdigit() and len(value) <= 20 else 0


class Bodies:
    """Reads the bodies of requests, each within its limits and all together within `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0  # of bodies that are being read

    async def read(self, request: Request, *, most_bytes: int, seconds: float) -> bytes:
        """The whole body. Raise `too-large` as soon as it is too large, and `too-slow` if it is not
        complete in time."""
        receive = request.receive
        for name, value in request.scope["headers"]:
            if name == b"content-length" and _number(value) > most_bytes:
                raise _too_large(most_bytes)
        parts: list[bytes] = []
        size, more_body = 0, True
        try:
            async with asyncio.timeout(seconds):
                while more_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more_body = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    size += len(part)
                    self._bytes += len(part)
                    if size > most_bytes:
                        raise _too_large(most_bytes)
                    if self._bytes > self._most_bytes:
                        raise Problem("busy", retry_after_seconds=math.ceil(seconds))
        except TimeoutError:
            raise Problem("too-slow") from None
        finally:
            self._bytes -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Bucket:
    """A token bucket: `per_second` on average, up to `burst` at once; None is no limit."""

    def __init__(
        self,
        per_second: int | None,
        burst: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = max(burst, per_second or 0)
        self._now = now
        self._left = float(self._burst)
        self._filled_at = now()

    def take(self, count: int) -> None:
        """Take `count`, or raise `busy` and take nothing if there are not as many."""
        if self._per_second is None:
            return
        now = self._now()
        self._left = min(self._left + (now - self._filled_at) * self._per_second, self._burst)
        self._filled_at = now
        if count > self._left:
            seconds = math.ceil((count - self._left) / self._per_second)
            raise Problem("busy", retry_after_seconds=max(seconds, 1))
        self._left -= count


class Turnstile:
    """Admits requests in the order of arrival while they take at most `most_bytes` together; one
    always fits."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def enter(self, size: int, *, seconds: float) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, at most for `seconds`; give them back at the end."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit_next()
        is_late = False
        try:
            try:
                async with asyncio.timeout(seconds):
                    await turn
            except TimeoutError:
                is_late = turn.cancelled()
                self._bytes += size if is_late else 0
            yield
        finally:
            self._bytes -= size if is_late or not turn.cancelled() else 0
            self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done() and self._bytes and self._bytes + size > self._most_bytes:
                return
            self._waiting.popleft()
            if not turn.done():
                self._bytes += size
                turn.set_result(None)


def _too_large(most_bytes: int) -> Problem:
    return Problem("too-large", hint=f"a body here has {most_bytes} bytes at most")

"""Limits on what one client may take: the head of a request, the bytes of a body, the time to send
them, the reports per second of a task."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sfumato.collector.problems import Problem

HEAD_BYTES = 16 << 10  # of a request's line and headers
_PROGRESS_BYTES = 64 << 10  # read by a client within `write_seconds`, unless less was waiting
_LINGER_SECONDS = 1.0  # for a client to read the end of an answer before its connection is gone


class ConnectionLimits:
    """An application whose clients send short heads, send and read in time, and do not keep others
    out by doing nothing.

    uvicorn closes a connection that is idle between two requests, but it waits without limit for a
    first request, for the rest of a head that has begun, and for a client that does not read its
    answer; it refuses new clients while idle ones have all connections; and it knows a connection
    with TLS only after the handshake. So each of its connections is put behind a `_Connection`,
    which is counted from the moment that it is accepted, does the handshake itself and has
    deadlines for all of these; and of many, the one that has been idle for longest gives way to a
    new one.
    """

    def __init__(
        self, app: ASGIApp, *, connections: int, idle_seconds: float, write_seconds: float
    ) -> None:
        """A connection is closed if no request is complete `idle_seconds` after the previous
        answer, if its client reads hardly anything of an answer for `write_seconds`, or if it is
        idle when there are more than seven eighths of `connections`."""
        self._app, self._most = app, connections
        self.idle_seconds, self.write_seconds = idle_seconds, write_seconds
        self._connections: dict[tuple[str, int], _Connection] = {}  # by the client's address

    def protocol(
        self, stock: type[asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> type[asyncio.Protocol]:
        """A protocol for uvicorn's option `http`: its own, `stock`, within these limits, and over
        TLS if there are certificates for it."""
        limits = self

        class Limited(_Connection):
            def __init__(self, **options: object) -> None:
                super().__init__(stock(**options), limits, tls)

        return Limited

    def add(self, connection: _Connection) -> None:
        """Count a new connection, and close another one if there are many."""
        others = self._connections.values()
        if len(others) >= self._most * 7 // 8:
            idle = [each for each in others if each.is_idle]
            if idle:
                min(idle, key=lambda each: each.idle_since).close()
        if len(others) > self._most:  # one more than uvicorn's limit, which is answered by 503
            connection.close()
        self._connections[connection.client] = connection

    def discard(self, connection: _Connection) -> None:
        if self._connections.get(connection.client) is connection:
            del self._connections[connection.client]

    def close_idle(self) -> None:
        """Close all connections without a request."""
        for connection in [each for each in self._connections.values() if each.is_idle]:
            connection.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = self._connections.get(scope["client"])
        if connection is None:
            return  # closed in the meantime
        connection.begin_request()
        try:
            fault = _fault_of_head(scope)
            if fault is None:
                await self._app(scope, receive, send)
            else:
                answer = PlainTextResponse(fault, 400, {"Connection": "close"})
                await answer(scope, receive, send)
        finally:
            connection.end_request()


def _fault_of_head(scope: Scope) -> str | None:
    """Why a request is refused for its head. A length and an encoding together are refused because
    a proxy may have read the other one of them."""
    size, lengths = len(scope["raw_path"]) + len(scope["query_string"]), 0
    for name, value in scope["headers"]:
        size += len(name) + len(value)
        lengths += name in (b"content-length", b"transfer-encoding")
    if size > HEAD_BYTES:
        return "The request's head is too long."
    return "The request has two lengths." if lengths > 1 else None


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol inside, after the handshake if there is one, and closes
    the connection when it is late."""

    def __init__(
        self, inside: asyncio.Protocol, limits: ConnectionLimits, tls: ssl.SSLContext | None
    ) -> None:
        self._inside, self._limits, self._tls = inside, limits, tls
        self._loop = asyncio.get_running_loop()
        self._requests = 0  # in progress
        self.idle_since = self._loop.time()
        self._write_timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._is_open = False  # for the protocol inside
        self._early = b""  # received before that

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.client: tuple[str, int] = transport.get_extra_info("peername")[:2]
        self._idle_timer = self._loop.call_later(self._limits.idle_seconds, self._check_idle)
        self._limits.add(self)
        if self._tls is None:
            self._open()
        else:
            self._transport.pause_reading()
            self._handshake = self._loop.create_task(self._shake_hands(self._tls))

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        if self._transport.is_closing():  # it has given way to another one
            return
        transport = None
        with suppress(OSError):  # the client has left, or does not speak TLS
            transport = await self._loop.start_tls(
                self._transport,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.idle_seconds,
                ssl_shutdown_timeout=_LINGER_SECONDS,
            )
        if transport is None or transport.is_closing():
            self._transport.abort()
            self.connection_lost(None)  # asyncio does not call it during a handshake
            return
        transport.set_write_buffer_limits(high=_PROGRESS_BYTES)  # the default is eight times that
        self._transport = transport
        self._open()
        early, self._early = self._early, b""
        if early:
            self._inside.data_received(early)

    def _open(self) -> None:
        self._is_open = True
        self._inside.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.cancel()
        self._stop_write_timer()
        self._limits.discard(self)
        if self._is_open:
            self._is_open = False
            self._inside.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            self._inside.data_received(data)
        else:  # the first request may come with the end of the handshake
            self._early += data

    def eof_received(self) -> bool | None:
        return self._inside.eof_received() if self._is_open else None

    def pause_writing(self) -> None:
        self._start_write_timer()
        self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        self._inside.resume_writing()

    def begin_request(self) -> None:
        self._requests += 1

    def end_request(self) -> None:
        self._requests -= 1
        self.idle_since = self._loop.time()

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection; it stays counted until its client has read what is left, or has had
        a second for that."""
        self._transport.close()
        self._idle_timer.cancel()
        self._idle_timer = self._loop.call_later(_LINGER_SECONDS, self._abort)

    def _abort(self) -> None:
        """Drop the connection with its unread bytes, which the kernel would keep for minutes."""
        connection = self._transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:  # else it is closed already
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._transport.abort()

    def _start_write_timer(self) -> None:
        self._unread_bytes = self._transport.get_write_buffer_size()
        self._write_timer = self._loop.call_later(self._limits.write_seconds, self._check_write)

    def _check_write(self) -> None:
        if self._unread_bytes - self._transport.get_write_buffer_size() < _PROGRESS_BYTES:
            self._abort()
        else:
            self._start_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_idle(self) -> None:
        """One timer per connection: one per request would cost more."""
        left = self.idle_since + self._limits.idle_seconds - self._loop.time()
        if self._requests:
            left = self._limits.idle_seconds
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._check_idle)
        else:
            self.close()


def _number(value: bytes) -> int:
    """The number in a header; 0 if it is not a number."""
    return int(value) if value.isdigit() and len(value) <= 20 else 0


class Room:
    """Room for `most` of something, shared so that nobody can take all of it: each may have as much
    as is free. One alone may take half, two a third each, and there is always some for another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken_by: Counter[str] = Counter()
        self.taken = 0

    def has_room(self, who: str, size: int) -> bool:
        return self._taken_by[who] + size <= self._most - self.taken - size

    def take(self, who: str, size: int) -> None:
        self._taken_by[who] += size
        self.taken += size

    def give_back(self, who: str, size: int) -> None:
        self.taken -= size
        self._taken_by[who] -= size
        if not self._taken_by[who]:
            del self._taken_by[who]


class Bodies:
    """Reads the bodies of requests, each within its limits and all together within a `Room`."""

    def __init__(self, most_bytes: int) -> None:
        self._room = Room(most_bytes)

    @asynccontextmanager
    async def read(
        self, request: Request, *, most_bytes: int, seconds: float, who: str = ""
    ) -> AsyncIterator[bytes]:
        """The whole body, which takes room of `who` until the end of the block. Raise `too-large`
        as soon as it is too large, `busy` if there is no room, and `too-slow` if it is not complete
        in time."""
        receive = request.receive
        for name, value in request.scope["headers"]:
            if name == b"content-length" and _number(value) > most_bytes:
                raise _too_large(most_bytes)
        parts: list[bytes] = []
        size, more_body = 0, True
        try:
            try:
                async with asyncio.timeout(seconds):
                    while more_body:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise ClientDisconnect
                        part, more_body = message.get("body", b""), message.get("more_body", False)
                        if size + len(part) > most_bytes:
                            raise _too_large(most_bytes)
                        if not self._room.has_room(who, len(part)):
                            raise Problem("busy", retry_after_seconds=math.ceil(seconds))
                        parts.append(part)
                        size += len(part)
                        self._room.take(who, len(part))
            except TimeoutError:
                raise Problem("too-slow") from None
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._room.give_back(who, size)


class Bucket:
    """A token bucket: `per_second` on average, up to `burst` at once; None is no limit."""

    def __init__(
        self,
        per_second: float | None,
        burst: int,
        now: Callable[[], float] = time.monotonic,
        *,
        first: int | None = None,
    ) -> None:
        """`first` is how many may come at once in the beginning; None: `burst`."""
        self._per_second = per_second
        self._burst = max(burst, math.floor(per_second or 0))
        self._now = now
        self._left = float(self._burst if first is None else first)
        self._filled_at = now()

    def take(self, count: int) -> None:
        """Take `count`. If there are not as many, take nothing and raise `busy`; if there never
        will be, `too-large`."""
        if self._per_second is None:
            return
        if count > self._burst:
            hint = f"this task takes {self._burst} reports at once at most"
            raise Problem("too-large", hint=hint)
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

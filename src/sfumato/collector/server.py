"""uvicorn, set up to take requests from strangers: bounded, and telling nothing about them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sfumato.collector.settings import Settings
from sfumato.errors import ServiceError, SpecError

_HEADER_BYTES = 16 << 10  # of a request's line and headers
_BACKLOG = 2048


class Impatient(HttpToolsProtocol):
    """A connection whose requests' headers must be short, and arrive within the idle time.

    uvicorn ends a connection that is idle between requests, but waits for ever for a first request
    and for the rest of one that has begun, however long it is.
    """

    _deadline: asyncio.TimerHandle | None = None
    _heads = 0  # that were read on this connection
    _is_in_body = False
    _head_bytes = 0  # of the head that is being read, as far as it is known
    _named_bytes = 0  # of its headers, by their names and values

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        heads, was_in_body = self._heads, self._is_in_body
        super().data_received(data)
        if was_in_body or self._is_in_body or self._heads != heads:
            self._head_bytes = 0
        else:  # all of it is part of one head
            self._head_bytes += len(data)
            if self._head_bytes > _HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too long.")
        self._expect_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._named_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value)
        if self._named_bytes > _HEADER_BYTES:
            raise ValueError("the head is too long")  # answered as any head that is malformed
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heads += 1
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way:
            self._clear()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server that is stopped by whoever runs it, and not by signals of its own."""

    on_started: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.on_started is not None:
            self.on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: Settings) -> Server:
    """The server; certificates are read now."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Impatient,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.connections,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as problem:
        raise SpecError(
            f"the certificate {settings.tls_cert} and its key cannot be used: {problem.strerror}"
        ) from problem
    return Server(config)


def listen(settings: Settings) -> socket.socket:
    """The socket on which the server takes connections."""
    host, port = settings.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as problem:
        raise ServiceError(
            f"cannot listen on {settings.listen}: {problem.strerror}",
            hint="see what else listens there, or set listen to another address",
        ) from problem
    # Connections inherit it. asyncio sets it on sockets that name their protocol, and this one does
    # not; without, the second part of an answer waits 40 ms for the first to be acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket, settings: Settings) -> str:
    """The address to reach it by."""
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

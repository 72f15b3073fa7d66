"""uvicorn, set up to take requests from strangers: bounded, and telling nothing about them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from sfumato.collector.connection import Connection
from sfumato.collector.long_bodies import LongBodies
from sfumato.collector.settings import Settings
from sfumato.errors import ServiceError, SpecError

_BACKLOG = 2048


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


def make_server(app: FastAPI, settings: Settings) -> Server:
    """The server; certificates are read now."""
    quick = getattr(app.state, "quick", ())
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=partial(Connection, quick=quick, long_bodies=LongBodies()),  # type: ignore[arg-type]  # it is only called
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

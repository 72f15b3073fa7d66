"""A collector in this process: its store, its worker and its server, from start to end."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from types import FrameType
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from sfumato import __version__
from sfumato.collector import keys, logs
from sfumato.collector.http.app import create_app
from sfumato.collector.http.limits import HEAD_BYTES, ConnectionLimits
from sfumato.collector.http.service import Service
from sfumato.collector.http.waiting import ChangeNotifier
from sfumato.collector.metrics import Metrics
from sfumato.collector.preflight import OTHER_FILES, load_certificate
from sfumato.collector.settings import Settings
from sfumato.collector.store.ledger import set_budget
from sfumato.collector.store.store import Store
from sfumato.collector.worker.replay import PhaseMessages
from sfumato.collector.worker.rounds import RoundLimits
from sfumato.collector.worker.table_queue import TableQueue
from sfumato.collector.worker.thread import WorkerThread
from sfumato.collector.worker.worker import Worker, trim_memory
from sfumato.device import offers
from sfumato.device.client import is_loopback
from sfumato.errors import ServiceError
from sfumato.spec import require

_GARBAGE = 20_000  # allocations before the garbage collector runs
_SWITCH_SECONDS = 0.002  # how long the worker may delay an answer; Python's default is 5 ms


class CollectorServer:
    """A collector that is set up but not yet running: its store and its socket are open."""

    def __init__(
        self,
        settings: Settings,
        *,
        with_worker: bool = True,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`routes` are served beside the collector's own, such as the dashboard's."""
        self._settings = settings
        self.store, self.key = open_store(settings)
        try:
            metrics, self._changes = Metrics(), ChangeNotifier(self.store)
            tables, messages = TableQueue(settings.queue_bytes), PhaseMessages()
            self._worker = (
                worker_of(
                    self.store,
                    settings,
                    self.key,
                    metrics,
                    notify=self._changes.notify,
                    tables=tables,
                    messages=messages,
                )
                if with_worker
                else None
            )
            self.service = Service(
                self.store,
                settings,
                key=self.key,
                metrics=metrics,
                worker=self._worker,
                changes=self._changes,
                tables=tables,
                messages=messages,
            )
            self._server: Server = make_server(create_app(self.service, routes), settings)
            self._socket = listen(settings)
        except BaseException:
            self.store.close()
            raise
        self.address = address_of(self._socket, settings)

    @property
    def public_key(self) -> str:
        """The key for devices to check offers with, in hexadecimal."""
        return offers.public_key(self.key).hex()

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; then finish active requests, and close the store."""
        try:
            if self._worker is not None:
                self._worker.start()
            self._server.on_started = started
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            if self._worker is not None:
                _end(self._worker, self._settings)
            self.store.close()
        logs.log("stopped")

    @property
    def stopping(self) -> bool:
        return self._server.should_exit

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more requests; from any thread. `at_once` does not wait for active ones."""
        self._server.should_exit = True
        self._changes.stop()
        self._server.force_exit = self._server.force_exit or at_once


def open_store(settings: Settings) -> tuple[Store, bytes]:
    """The store, migrated and with its budget, and the key that signs its offers."""
    store = Store.open(settings.store)
    try:
        store.migrate()
        set_budget(store, settings.budget)
        return store, keys.load_or_make(settings.signing_key, store)
    except BaseException:
        store.close()
        raise


def worker_of(
    store: Store,
    settings: Settings,
    key: bytes,
    metrics: Metrics | None = None,
    *,
    notify: Callable[[], None] = lambda: None,
    tables: TableQueue | None = None,
    messages: PhaseMessages | None = None,
) -> WorkerThread:
    """The worker of a store, in its own thread; it calls `notify` when there is something new for
    waiting devices. It shares `tables` and `messages` with a server in this process."""
    worker = Worker(
        store,
        key=key,
        retention_days=settings.retention_days,
        lake=settings.lake,
        seal_seconds=settings.seal_seconds,
        limits=RoundLimits(
            cohort_seconds=settings.cohort_seconds,
            phase_seconds=settings.phase_seconds,
            tries=settings.round_tries,
        ),
        notify=notify,
        tables=tables,
        messages=messages,
        metrics=metrics,
    )
    return WorkerThread(store, worker.step, pause_seconds=settings.worker_seconds, metrics=metrics)


def serve(
    settings: Settings,
    *,
    announce: Callable[[str], None],
    with_worker: bool = True,
    routes: Sequence[BaseRoute] = (),
) -> None:
    """Run a collector until SIGTERM or SIGINT; a second signal stops it at once.

    `announce` is called with the address once the collector answers.
    """
    logs.set_up(settings.log_level)
    settings = fit_connections(settings)
    sys.setswitchinterval(_SWITCH_SECONDS)
    collector = CollectorServer(settings, with_worker=with_worker, routes=routes)
    gc.freeze()  # these objects stay; scanning them again and again took a tenth of all time
    gc.set_threshold(_GARBAGE, *gc.get_threshold()[1:])

    def stop(number: int, frame: FrameType | None) -> None:
        collector.stop(at_once=collector.stopping)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _log_warnings(collector)

    def started() -> None:
        logs.log(
            "started",
            address=collector.address,
            version=__version__,
            public_key=collector.public_key,
        )
        announce(collector.address)

    collector.run(started)


def fit_connections(settings: Settings) -> Settings:
    """Allow this process as many open files as its connections need. Where the system does not, it
    has fewer connections: without a free file, no connection can be accepted, nor refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = settings.connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return settings
    if hard != resource.RLIM_INFINITY and hard < files:
        connections = hard - OTHER_FILES
        require(
            connections > 0,
            f"a collector needs more than {OTHER_FILES} open files; the system allows {hard}",
        )
        logs.log(
            "few-connections",
            level=logging.WARNING,
            count=connections,
            hint=f"raise the limit of open files (ulimit -n, LimitNOFILE) to {files}",
        )
        settings, files = replace(settings, connections=connections), hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return settings


def work(settings: Settings) -> None:
    """Run a collector's worker alone until SIGTERM or SIGINT."""
    logs.set_up(settings.log_level)
    store, key = open_store(settings)
    try:
        worker = worker_of(store, settings, key)
        signals: SimpleQueue[int] = SimpleQueue()  # its put() is safe in a signal handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: signals.put(number))
        worker.start()
        logs.log("started", version=__version__)
        signals.get()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # a second signal stops it at once
        _end(worker, settings)
    finally:
        store.close()
    logs.log("stopped")


@contextmanager
def running(
    settings: Settings, *, with_worker: bool = True, routes: Sequence[BaseRoute] = ()
) -> Iterator[CollectorServer]:
    """A collector in a thread of this process, for as long as the block lasts."""
    collector = CollectorServer(settings, with_worker=with_worker, routes=routes)
    started = threading.Event()
    thread = threading.Thread(target=collector.run, args=(started.set,), name="collector")
    thread.start()
    try:
        while not started.wait(0.05):
            if not thread.is_alive():
                raise ServiceError("the collector did not start; see its log")
        yield collector
    finally:
        collector.stop()
        thread.join()


def _end(worker: WorkerThread, settings: Settings) -> None:
    """Stop the worker, but do not wait for a long step: what it has not committed is repeated."""
    if not worker.stop(settings.shutdown_seconds):
        logs.log("worker-left", level=logging.WARNING, reason="its step takes long")


def _log_warnings(collector: CollectorServer) -> None:
    with collector.store.reading() as tx:
        tokens = tx.tokens()
    if not tokens:
        logs.log(
            "no-token",
            level=logging.WARNING,
            hint="sfumato token create --role admin --name NAME creates one",
        )
    address = urlsplit(collector.address)
    if address.scheme == "http" and not is_loopback(address.hostname or ""):
        logs.log(
            "plain-http",
            level=logging.WARNING,
            hint="set tls_cert and tls_key, or listen on 127.0.0.1 behind a TLS proxy",
        )


_BACKLOG = 2048  # connections that the kernel accepts before we do
_ACCEPTS = 32  # by us at a time
_TRIM_TICKS = 300  # tenths of a second between two times that free memory is returned
_UNREAD_BYTES = 1 << 18  # of an answer, in the kernel's buffer of a connection


class Server(uvicorn.Server):
    """A server that its caller stops; it does not handle signals itself."""

    on_started: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # uvicorn's option says how many asyncio accepts at a time
        if self.started and self.on_started is not None:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._limits.close_idle()  # uvicorn does not know those without a handshake
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TRIM_TICKS == 0:
            await asyncio.to_thread(trim_memory)  # what many connections had
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: Settings) -> Server:
    """Create the server, and load its certificates."""
    if settings.hosts:
        app = TrustedHostMiddleware(app, allowed_hosts=settings.hosts, www_redirect=False)
    if settings.proxies:
        # Inside the limits, not by uvicorn's option: those know a connection by its real address.
        # Its types are uvicorn's own, in place of Starlette's.
        inside: Any = app
        app = cast(ASGIApp, ProxyHeadersMiddleware(inside, trusted_hosts=list(settings.proxies)))
    limited = ConnectionLimits(
        app,
        connections=settings.connections,
        idle_seconds=settings.idle_seconds,
        write_seconds=settings.upload_seconds,
    )
    # Not httptools: with it, the body of a request that asks for an upgrade is read as a request.
    stock = uvicorn.Config(app, http="h11", log_config=None)
    stock.load()
    config = uvicorn.Config(
        limited,
        loop="asyncio",
        http=limited.protocol(stock.http_protocol_class, load_certificate(settings)),
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.connections,
        backlog=_ACCEPTS,
        timeout_keep_alive=settings.idle_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    config.load()
    return Server(config, limited)


def listen(settings: Settings) -> socket.socket:
    """Open the socket on which the server accepts connections."""
    host, port = settings.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as problem:
        raise ServiceError(
            f"cannot listen on {settings.listen}: {problem.strerror}",
            hint="find out what else listens there, or set listen to another address",
        ) from problem
    # Connections inherit this. asyncio sets it only on sockets that name their protocol, which this
    # one does not; without it, the second part of an answer waits 40 ms for an acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited as well: what a client has not read stays with us, where its deadline sees it.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
    return listening


def address_of(listening: socket.socket, settings: Settings) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

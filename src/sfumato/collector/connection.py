"""A connection with a stranger: bounded, patient up to a point, quick with what most send."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_HEAD_BYTES = 16 << 10  # of a request's line and headers
_HOLD_SECONDS = 0.2  # for which a body is waited for here; then the application does
_LONG_HOLD_SECONDS = 5.0  # the same, for one that is long
_ABOUT_BODIES = (b"content-length", b"transfer-encoding")
_LENGTH = re.compile(b"[0-9]{1,15}")
SHORT_BYTES = 1 << 16  # of a body that is not long


Answer = Callable[[bytes | ASGIApp], None]
"""Is called in the loop: with what `plain` made, or with an application that answers otherwise."""


class Quick(Protocol):
    """Takes requests for which nothing is needed but their head and their body."""

    def may_take(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request with this head is one of them. Its whole body is read, however long the
        head says it is; so it must say, and it must be little enough."""

    def take(self, scope: Mapping[str, Any], body: bytes, answer: Answer) -> bool:
        """Do what is asked, or begin to, and `answer` now or later; False if nothing was done, and
        the application is to do it."""

    def leave(self, scope: Mapping[str, Any]) -> None:
        """Forget a request that it might have taken: its body did not come, or not in time."""


def length_of(scope: Mapping[str, Any]) -> float:
    """Of a request's body, as its head says it; infinite if it does not say so plainly."""
    said = [header for header in scope["headers"] if header[0] in _ABOUT_BODIES]
    if not said:
        return 0
    plainly = len(said) == 1 and said[0][0] == b"content-length" and _LENGTH.fullmatch(said[0][1])
    return int(said[0][1]) if plainly else math.inf


def plain(status: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """An answer, from its status on, but for the headers of every answer of a server."""
    said = {**headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return f"{status}\r\n{head}\r\n".encode() + body


class Connection(HttpToolsProtocol):
    """uvicorn's, with two limits and a short cut.

    uvicorn ends a connection that is idle between requests, but waits for ever for a first request
    and for the rest of one that has begun, however long it is. Here a head must be short, and
    arrive within the idle time.

    Requests that one of `quick` takes are answered without a task of their own and without the
    layers of an application, which cost several times what storing an upload does.
    """

    _deadline: asyncio.TimerHandle | None = None
    _heads = 0  # that were read on this connection
    _is_in_body = False
    _head_bytes = 0  # of the head that is being read, as far as it is known
    _named_bytes = 0  # of its headers, by their names and values
    _held: RequestResponseCycle | None = None  # a request for one of `quick`
    _taker: Quick | None = None  # which one
    _held_until: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, quick: Sequence[Quick] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._quick = quick

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        self._let_go(to_application=False)
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: whoever asks for another protocol is answered in this one."""

    # Heads

    def data_received(self, data: bytes) -> None:
        heads, was_in_body = self._heads, self._is_in_body
        super().data_received(data)
        if was_in_body or self._is_in_body or self._heads != heads:
            self._head_bytes = 0
        else:  # all of it is part of one head
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too long.")
        self._go_on()
        self._expect_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._named_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value)
        if self._named_bytes > _HEAD_BYTES:
            raise ValueError("the head is too long")  # answered as any head that is malformed
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heads += 1
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle is self._held:  # whose length was agreed to, and who reads nothing meanwhile
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

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

    # The short cut

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """What uvicorn does with a request whose turn it is, unless one of `quick` may take it."""
        if (
            app is self.app  # else uvicorn has too many connections
            and not cycle.waiting_for_100_continue
            and not self.flow.write_paused  # else whoever asks does not listen
        ):
            for quick in self._quick:
                if quick.may_take(cycle.scope):
                    self._held, self._taker = cycle, quick
                    return
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._go_on()  # the next request may be here already

    def _go_on(self) -> None:
        """Let `quick` have the request that is held, when its body is there."""
        if (cycle := self._held) is None or self.transport.is_closing():
            return
        if not cycle.more_body:
            assert self._taker is not None  # or nothing would be held
            self._held = None  # an answer at once may begin the next request
            self._stop_holding()
            if self._taker.take(cycle.scope, bytes(cycle.body), partial(self._answer, cycle)):
                cycle.body = bytearray()  # which else stays until the next request
            else:
                super()._start_asgi_task(cycle, self.app)
        elif self._held_until is None:
            is_short = length_of(cycle.scope) <= SHORT_BYTES
            seconds = _HOLD_SECONDS if is_short else _LONG_HOLD_SECONDS
            self._held_until = self.loop.call_later(seconds, self._let_go)

    def _let_go(self, *, to_application: bool = True) -> None:
        """Hand the request that is held to the application, with what has come of its body."""
        self._stop_holding()
        if (cycle := self._held) is not None:
            assert self._taker is not None  # or nothing would be held
            self._held = None
            self._taker.leave(cycle.scope)
            if to_application:
                super()._start_asgi_task(cycle, self.app)

    def _stop_holding(self) -> None:
        if self._held_until is not None:
            self._held_until.cancel()
            self._held_until = None

    def _answer(self, cycle: RequestResponseCycle, what: bytes | ASGIApp) -> None:
        if cycle.disconnected or self.transport.is_closing():
            return
        if not isinstance(what, bytes):
            super()._start_asgi_task(cycle, what)  # type: ignore[arg-type]  # uvicorn's own types
            return
        always = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if not cycle.keep_alive:
            always.append(b"connection: close\r\n")
        status, _, rest = what.partition(b"\r\n")
        self.transport.write(b"".join([b"HTTP/1.1 ", status, b"\r\n", *always, rest]))
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

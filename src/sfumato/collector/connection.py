"""A connection with a stranger: bounded, patient up to a point, quick with what most send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from httptools import HttpRequestParser
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sfumato.collector.logs import log_error
from sfumato.collector.long_bodies import LongBodies
from sfumato.collector.problems import Problem, problem_response
from sfumato.collector.usual import HEAD_BYTES, SHORT_BYTES, length_of, usual

_HOLD_SECONDS = 0.2  # for which a body is waited for here; then the application does
_LONG_HOLD_SECONDS = 5.0  # the same, for one that is long


Answer = Callable[[bytes | ASGIApp], None]
"""Is called in the loop: with what `plain` made, or with an application that answers otherwise."""


class Quick(Protocol):
    """Takes requests for which nothing is needed but their head and their body."""

    def may_take(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request with this head is one of them. Its whole body is read, however long the
        head says it is; so it must say, and it must be little enough."""

    def take(self, scope: Mapping[str, Any], body: bytes | bytearray, answer: Answer) -> bool:
        """Do what is asked, or begin to, and `answer` now or later; False if nothing was done, and
        the application is to do it."""

    def leave(self, scope: Mapping[str, Any]) -> None:
        """Forget a request that it might have taken: its body did not come, or not in time."""


def plain(status: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """An answer, from its status on, but for the headers of every answer of a server."""
    said = {**headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return f"{status}\r\n{head}\r\n".encode() + body


class _LongBody:
    """A body that is read to where it stays, past the parser, which would have it copied often."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parsed = bytearray()  # what came with the head
        self.place: bytearray | None = None  # for all of it, once there is room
        self.come = 0

    def begin(self, place: bytearray) -> None:
        self.place, self.come = place, len(self.parsed)
        place[: self.come] = self.parsed

    @property
    def rest(self) -> memoryview:
        """Where what is to come goes."""
        assert self.place is not None  # or nothing is read
        return memoryview(self.place)[self.come :]

    @property
    def unparsed(self) -> bytes:
        return b"" if self.place is None else bytes(self.place[len(self.parsed) : self.come])


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's, with two limits and a short cut.

    uvicorn ends a connection that is idle between requests, but waits for ever for a first request
    and for the rest of one that has begun, however long it is. Here a head must be short, and
    arrive within the idle time.

    Requests that one of `quick` takes are answered without a task of their own and without the
    layers of an application, which cost several times what storing an upload does; those that are
    usual, without uvicorn's parser as well.
    """

    _early: bytearray | None = None  # what came while a usual request is being answered
    _is_ending = False  # after the usual request under way
    _is_declined = False  # the next request: one of `quick` had it, and did not take it
    _idle_since = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _heads = 0  # that were read on this connection
    _is_in_head = False  # the parser has seen the beginning of one, and not its end
    _is_in_body = False
    _head_bytes = 0  # of the head that is being read, as far as it is known
    _named_bytes = 0  # of its headers, by their names and values
    _held: RequestResponseCycle | None = None  # a request for one of `quick`
    _taker: Quick | None = None  # which one
    _held_until: asyncio.TimerHandle | None = None
    _long: _LongBody | None = None  # its body, if that is long

    def __init__(
        self,
        *arguments: Any,
        quick: Sequence[Quick] = (),
        long_bodies: LongBodies,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._quick = quick
        self._long_bodies = long_bodies
        self._scratch = self._long_bodies.scratch

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        self._let_go(to_application=False)
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: whoever asks for another protocol is answered in this one."""

    def get_buffer(self, sizehint: int) -> memoryview:
        long = self._long
        return self._scratch if long is None or long.place is None else long.rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._long is None or self._long.place is None:
            self.data_received(bytes(self._scratch[:nbytes]))
            return
        self._long.come += nbytes
        if self._long.come == self._long.size:
            self._end_long()

    # Heads

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            self.flow.pause_reading()  # until the answer
            return
        if self._is_between and self._take_usual(data):
            return
        if not self._head_bytes:
            self._idle_since = self.loop.time()
        heads, was_in_body = self._heads, self._is_in_body
        super().data_received(data)
        if was_in_body or self._is_in_body or self._heads != heads:
            self._head_bytes = 0
        else:  # all of it is part of one head
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too long.")
        self._go_on()
        self._expect_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._named_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value)
        if self._named_bytes > HEAD_BYTES:
            raise ValueError("the head is too long")  # answered as any head that is malformed
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heads += 1
        self._is_in_head, self._is_in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._long is not None and self.cycle is self._held:
            self._long.parsed += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def _expect_request(self) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way:
            self._clear()
        elif self._deadline is None:
            self._idle_since = self.loop.time()
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        """Unless something came: to set a timer anew for every request would cost more."""
        self._deadline = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._early is not None:  # it is not idle
            left = self.timeout_keep_alive
        if left > 0:
            self._deadline = self.loop.call_later(left, self._give_up)
        else:
            self.transport.close()

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # The shortest cut

    @property
    def _is_between(self) -> bool:
        """Whether no request is under way, and another would be taken."""
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not (self._head_bytes or self._is_in_head or self._is_in_body or self.pipeline)
            and not (self.flow.write_paused or self.transport.is_closing())
            and (self.limit_concurrency is None or len(self.connections) < self.limit_concurrency)
        )

    def _take_usual(self, data: bytes) -> bool:
        """Whether all of this is a request that one of `quick` took."""
        request = usual(data)
        if request is None:
            return False
        for quick in self._quick:
            if quick.may_take(request.scope):
                self._early = bytearray()
                self._unset_keepalive_if_required()
                if quick.take(request.scope, request.body, self._answer_usual):
                    return True
                self._early, self._is_declined = None, True
                return False
        return False

    def _answer_usual(self, what: bytes | ASGIApp) -> None:
        if self.transport.is_closing():
            return
        if not isinstance(what, bytes):
            task = self.loop.create_task(self._answer_by(what))
            self.tasks.add(task)  # for which uvicorn waits at its end
            task.add_done_callback(self.tasks.discard)
            return
        self._write(what, keep_alive=not self._is_ending)
        early, self._early = self._early, None
        if self._is_ending:
            return
        self._expect_request()
        self._idle_since = self.loop.time()
        if early:
            self.flow.resume_reading()
            self.data_received(bytes(early))

    async def _answer_by(self, application: ASGIApp) -> None:
        """Answer with what an application says that needs to know nothing of the request."""
        start: Message = {}
        body = b""

        async def send(message: Message) -> None:
            nonlocal start, body
            start = message if message["type"] == "http.response.start" else start
            body += message.get("body", b"")

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        try:
            await application({"type": "http", "headers": []}, receive, send)
        except Exception as problem:  # whatever it is, somebody waits for an answer
            log_error("internal", problem)
            await problem_response(Problem("internal"))({"type": "http"}, receive, send)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        status = HTTPStatus(start["status"])
        self._answer_usual(plain(f"{status.value} {status.phrase}", body, headers))

    def shutdown(self) -> None:
        """uvicorn ends: after the answer, if one is due."""
        if self._early is None:
            super().shutdown()
        else:
            self._is_ending = True

    # The short cut

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """What uvicorn does with a request whose turn it is, unless one of `quick` may take it."""
        is_declined, self._is_declined = self._is_declined, False
        if (
            not is_declined
            and app is self.app  # else uvicorn has too many connections
            and not cycle.waiting_for_100_continue
            and not self.flow.write_paused  # else whoever asks does not listen
        ):
            for quick in self._quick:
                if quick.may_take(cycle.scope):
                    self._held, self._taker = cycle, quick
                    if (length := length_of(cycle.scope)) > SHORT_BYTES and not cycle.body:
                        self._long = _LongBody(int(length))
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
            body = bytes(cycle.body if self._long is None else self._long.parsed)
            self._hand_over(cycle, body, partial(self._answer, cycle))
        elif self._held_until is None:
            seconds = _HOLD_SECONDS if self._long is None else _LONG_HOLD_SECONDS
            self._held_until = self.loop.call_later(seconds, self._let_go)
            if self._long is not None:
                self.flow.pause_reading()  # until there is room
                self._long_bodies.lend(self, self._long.size, self._begin_long)

    def _hand_over(
        self, cycle: RequestResponseCycle, body: bytes | bytearray, answer: Answer
    ) -> bool:
        assert self._taker is not None  # or nothing would be held
        self._held = self._long = None  # an answer at once may begin the next request
        self._stop_holding()
        is_taken = self._taker.take(cycle.scope, body, answer)
        # A body else stays until the next request.
        cycle.body = bytearray() if is_taken else bytearray(body)
        if not is_taken:
            super()._start_asgi_task(cycle, self.app)
        return is_taken

    def _begin_long(self, place: bytearray) -> None:
        assert self._long is not None  # or nobody would have asked
        self._long.begin(place)
        self.flow.resume_reading()

    def _end_long(self) -> None:
        """All of a long body is here. uvicorn's parser has not seen it, and begins anew."""
        cycle, long = self._held, self._long
        assert cycle is not None  # or it would not have been read
        assert long is not None  # likewise
        assert long.place is not None  # likewise
        place = long.place
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._is_in_body = cycle.more_body = False
        cycle.message_event.set()  # for an application that reads it

        def answer(what: bytes | ASGIApp) -> None:
            self._long_bodies.give_back(place)
            self._answer(cycle, what)

        is_taken = False
        try:
            is_taken = self._hand_over(cycle, place, answer)
        finally:
            if not is_taken:
                self._long_bodies.give_back(place)

    def _let_go(self, *, to_application: bool = True) -> None:
        """Hand the request that is held to the application, with what has come of its body."""
        self._stop_holding()
        if (cycle := self._held) is None:
            return
        assert self._taker is not None  # or nothing would be held
        self._taker.leave(cycle.scope)
        long, self._held, self._long = self._long, None, None
        if to_application:
            super()._start_asgi_task(cycle, self.app)
        if long is not None:
            self._long_bodies.forget(self)
            if to_application:
                self.flow.resume_reading()
                super().on_body(bytes(long.parsed))
                super().data_received(long.unparsed)
            if long.place is not None:
                self._long_bodies.give_back(long.place)

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
        self._write(what, keep_alive=cycle.keep_alive)
        cycle.response_started = cycle.response_complete = True
        cycle.on_response()

    def _write(self, what: bytes, *, keep_alive: bool) -> None:
        """Write what `plain` made, and end the connection unless it is kept."""
        always = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if not keep_alive:
            always.append(b"connection: close\r\n")
        end = what.index(b"\r\n") + 2  # of the status
        rest = memoryview(what)[end:]
        self.transport.write(b"".join([b"HTTP/1.1 ", what[:end], *always, rest]))
        if not keep_alive:
            self.transport.close()

"""What devices in masked rounds mostly say and ask, answered without an application.

A round of a thousand devices is some ten thousand requests within seconds: messages that are
stored, and questions to which everybody's answer is known since the phase began.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from sfumato.collector.connection import Answer, plain
from sfumato.collector.http.round_routes import (
    JOIN_BYTES,
    PHASES,
    acknowledged,
    admitted,
    digest_of,
    invitation_for,
    not_kept,
    room_for,
    ticket_in,
)
from sfumato.collector.http.service import Service
from sfumato.collector.logs import log_error
from sfumato.collector.problems import ALWAYS, Problem, problem_response
from sfumato.collector.store.round_tables import Join, Joining, Keeping, Message
from sfumato.collector.store.store import Transaction
from sfumato.collector.usual import SHORT_BYTES, length_of
from sfumato.collector.worker.round_cache import LiveRound
from sfumato.errors import SfumatoError
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Phase
from sfumato.secagg.round import KEY_BYTES

_IN_ROUND = re.compile("/v1/rounds/([0-9a-f]{32})/([a-z]{1,8})/([0-9]{1,9})")
_TICKETS = "/v1/tickets"
_JOIN = re.compile("/v1/tasks/([0-9a-f]{64})/join")
_PATHS = {"PUT": _IN_ROUND, "POST": _JOIN}
_JSON = {"content-type": "application/json", **ALWAYS}
_BYTES = {"content-type": "application/octet-stream", **ALWAYS}
_STORED = {201: plain("201 Created", b"{}", _JSON), 200: plain("200 OK", b"{}", _JSON)}


class QuickRounds:
    """A short cut (see `connection`). Whatever is unusual goes the long way, to the route: a round
    that is not known, a wrong ticket, a long message that is no table, a question that has to
    wait.

    Claim: what is answered is what the route would have answered within the last second.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        # Long bodies that are being read: how many bytes, of which round and member.
        self._long: dict[int, tuple[int, tuple[str, int]]] = {}

    def may_take(self, scope: Mapping[str, Any]) -> bool:
        path, method = scope["path"], scope["method"]
        if method == "GET":
            is_ours = path == _TICKETS or bool(_IN_ROUND.fullmatch(path))
            return is_ours and length_of(scope) == 0
        if method not in _PATHS or not _PATHS[method].fullmatch(path):
            return False
        return (length := length_of(scope)) <= SHORT_BYTES or self._may_hold(scope, path, length)

    def _may_hold(self, scope: Mapping[str, Any], path: str, length: float) -> bool:
        """Whether a long body is a member's table, for which this process's worker has room."""
        found = self._member(scope, path)
        if found is None or found[1] is not Phase.MASK or length != found[0].spec.vector_bytes:
            return False
        whose = found[0].spec.nonce, found[2]
        if any(whose == other for _, other in self._long.values()):
            return False  # a member has one table
        held = sum(size for size, _ in self._long.values()) + int(length)
        if not self._service.arrivals.has_room(found[0].spec.nonce, held):
            return False
        self._long[id(scope)] = int(length), whose
        return True

    def leave(self, scope: Mapping[str, Any]) -> None:
        self._long.pop(id(scope), None)

    def take(self, scope: Mapping[str, Any], body: bytes | bytearray, answer: Answer) -> bool:
        path, method = scope["path"], scope["method"]
        self.leave(scope)
        if method == "GET":
            found = self._placed(scope) if path == _TICKETS else self._told(scope, path)
            if found is None:
                return False
            answer(found)
            return True
        try:
            if method == "PUT":
                return self._say(scope, path, body, answer)
            return self._join(scope, path, bytes(body), answer)
        except Problem:
            return False  # the route says which

    def _told(self, scope: Mapping[str, Any], path: str) -> bytes | None:
        member = self._member(scope, path)
        if member is None:
            return None
        service = self._service
        body = service.rounds.told(*member, news=service.news.number)
        return None if body is None else plain("200 OK", body, _BYTES)

    def _placed(self, scope: Mapping[str, Any]) -> bytes | None:
        ticket, service = ticket_in(scope["headers"]), self._service
        if ticket is None:
            return None
        place = service.rounds.place(digest_of(ticket.encode()), news=service.news.number)
        if place is None:
            return None
        live, member = place
        return plain("200 OK", invitation_for(live, member), _JSON)

    def _say(
        self, scope: Mapping[str, Any], path: str, body: bytes | bytearray, answer: Answer
    ) -> bool:
        found, service = self._member(scope, path), self._service
        if found is None or len(body) > found[0].most_bytes(found[1]):
            return False
        live, phase, member = found
        round_id = live.spec.nonce

        def settle(kept: Keeping | BaseException) -> None:
            status = None
            if not isinstance(kept, BaseException):
                status = acknowledged(service, live, phase, kept)
            answer(_otherwise(service, round_id, kept) if status is None else _STORED[status])

        def store() -> None:
            said = bytes(body)
            service.uploads.hand_over_write(
                len(body),
                Transaction.add_messages,
                Message(round_id, str(phase), member, fingerprint(said, live.spec.salt), said),
                service.bridge.bring(settle),
            )

        def settle_table(kept: Keeping | None) -> None:
            if kept is not None:
                settle(kept)
                return
            try:
                store()
            except Exception as problem:  # whatever it is, somebody waits for an answer
                settle(problem)

        if phase is Phase.MASK:
            table = cast(bytes, body)  # it is only read
            if service.offer_table(round_id, member, table, settle_table):
                return True
        store()
        return True

    def _join(self, scope: Mapping[str, Any], path: str, body: bytes, answer: Answer) -> bool:
        service, found = self._service, _JOIN.fullmatch(path)
        opened = service.tasks.known(found[1]) if found else None
        ticket = ticket_in(scope["headers"])
        if opened is None or opened.masked is None or ticket is None or len(body) != KEY_BYTES:
            return False
        if not service.rounds.has_room(opened.id, most=room_for(opened.masked)):
            return False
        task_id, campaign, digest = opened.id, opened.masked.campaign, digest_of(ticket.encode())

        def settle(joined: Joining | BaseException) -> None:
            if isinstance(joined, BaseException):
                answer(problem_response(_problem_of(joined)))
                return
            try:
                status = admitted(service, joined)
            except Problem as problem:
                answer(problem_response(problem))
                return
            text = b'{"ticket":"%b"}' % ticket.encode()
            answer(plain("201 Created" if status == 201 else "200 OK", text, _JSON))

        service.uploads.hand_over_write(
            JOIN_BYTES,
            Transaction.join_all,
            Join(task_id, campaign, body, digest),
            service.bridge.bring(settle),
        )
        return True

    def _member(self, scope: Mapping[str, Any], path: str) -> tuple[LiveRound, Phase, int] | None:
        """Who speaks in which phase of which round, if that is known and so."""
        found = _IN_ROUND.fullmatch(path)
        live = self._service.rounds.known(found[1]) if found else None
        ticket = ticket_in(scope["headers"])
        if found is None or live is None or ticket is None or found[2] not in PHASES:
            return None
        if not live.has(PHASES[found[2]]):
            return None
        member = live.members.get(digest_of(ticket.encode()))
        return None if str(member) != found[3] else (live, PHASES[found[2]], int(found[3]))


def _otherwise(service: Service, round_id: str, kept: Keeping | BaseException) -> ASGIApp:
    """What is answered to a message that was not stored."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(kept, BaseException):
            problem = _problem_of(kept)
        else:
            try:
                problem = await not_kept(service, kept, round_id)
            except SfumatoError as error:
                problem = Problem.of(error)
        service.metrics.add("sfumato_round_messages_total", code=str(problem.status))
        await problem_response(problem)(scope, receive, send)

    return application


def _problem_of(error: BaseException) -> Problem:
    if isinstance(error, SfumatoError):
        return Problem.of(error)
    log_error("internal", error)
    return Problem("internal")

"""What devices ask and say in masked rounds: to join, which round they are in, what comes next.

A device proves who it is by a ticket that it drew itself; only the ticket's digest is kept. Every
message, or the sum that it went into, is on disk when it is acknowledged, and what devices are told
follows from that: so any process over the store may answer, and one that is killed forgets nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sfumato.collector.http.service import Service, service_of
from sfumato.collector.http.waiting import Heard
from sfumato.collector.problems import Problem
from sfumato.collector.store.round_tables import (
    ENDED,
    Join,
    Joining,
    Keeping,
    Message,
    Place,
    RoundRow,
    standing,
)
from sfumato.collector.store.store import Transaction
from sfumato.collector.worker.replay import Spoken
from sfumato.collector.worker.round_cache import LiveRound
from sfumato.errors import SfumatoError
from sfumato.flow.task import Task
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Phase, Refusal
from sfumato.secagg.round import KEY_BYTES

T = TypeVar("T")
LONGEST_WAIT = 25  # seconds that an answer may be waited for
TICKET = re.compile("[0-9a-f]{64}")
_WAIT = re.compile(b"wait=([0-9]{1,9})")  # int() refuses thousands of digits
_ORDER = (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK, Phase.DONE)
PHASES = {str(phase): phase for phase in _ORDER[:-1]}
_ROOM = 4  # times a cohort may wait
JOIN_BYTES = 256  # that a device which waits takes in the store, about


async def join(request: Request) -> Response:
    """Wait for a masked round of a task, under a public key that was made for this once.

    The ticket comes in `Authorization: Ticket …`, 64 hexadecimal digits that the device drew; the
    same key and ticket again are the same device.

        201  it waits; the body says the ticket   409  key-taken, masked-task
        200  it did already                       410  task-closed
        400  malformed-join                       429  busy; Retry-After is set
        404  unknown-task                         503  store-unavailable; Retry-After is set
    """
    service = service_of(request)
    opened = await service.tasks.find(request.path_params["task_id"])
    task = opened.masked
    if task is None:
        raise Problem("masked-task", hint="POST a report to this task")
    identity = await service.bodies.read(
        request, most_bytes=KEY_BYTES, seconds=service.settings.upload_seconds
    )
    if len(identity) != KEY_BYTES:
        raise Problem("malformed-join", hint="send an Ed25519 public key, and nothing else")
    ticket = ticket_in(request.scope["headers"]) or secrets.token_hex(KEY_BYTES)
    await service.rounds.check_room(opened.id, most=room_for(task))
    digest = digest_of(ticket.encode())
    waiting = Join(opened.id, task.campaign, identity, digest)
    joined = await service.write(JOIN_BYTES, Transaction.join_all, waiting)
    return JSONResponse({"ticket": ticket}, status_code=admitted(service, joined))


async def ticket(request: Request) -> Response:
    """The round that a ticket is for, once its cohort is complete; waited for up to `wait` seconds.

    200  member, and the signed invitation     403  wrong-ticket
    204  not yet; ask again                    410  ticket-over, or its round is over

    Who sees what: a ticket speaks for its device, so it is in a header, which no log of paths has.
    """
    service, given = service_of(request), ticket_in(request.scope["headers"])
    if given is None:
        raise _wrong_ticket()
    digest = digest_of(given.encode())
    place = await _patiently(service, request, partial(_placed, ticket=digest), who=digest)
    if isinstance(place, Response):
        return place
    assert place.round_id is not None  # as `_placed` has it
    assert place.member is not None  # likewise
    live = await service.rounds.find(place.round_id)
    service.rounds.seen_alive(live, news=service.news.number)
    return Response(invitation_for(live, place.member), media_type="application/json")


async def say(request: Request) -> Response:
    """A member's message of a phase. The same bytes again are the same message.

    201  it is stored                            410  round-aborted, round-lost, round-over
    200  it was before                           413  too-large
    403  wrong-ticket                            429  busy; Retry-After is set
    404  unknown-round                           503  store-unavailable; Retry-After is set
    409  wrong-phase, equivocating               507  store-full

    Who sees what: a message is stored as it came; none is logged or measured.
    """
    service = service_of(request)
    try:
        live, phase, member = await _member(request, service)
        kept = await _kept(request, service, live, phase, member)
        status = acknowledged(service, live, phase, kept)
        if status is None:
            raise await not_kept(service, kept, live.spec.nonce)
    except SfumatoError as error:
        problem = Problem.of(error)
        service.metrics.add("sfumato_round_messages_total", code=str(problem.status))
        raise problem from None
    return JSONResponse({}, status_code=status)


async def hear(request: Request) -> Response:
    """What a member is told in a phase; waited for up to `wait` seconds.

    200  the bytes            409  message-refused: why the message before was not taken
    204  not yet; ask again   410  round-aborted, round-lost, round-over
    403  wrong-ticket         404  unknown-round
    """
    service = service_of(request)
    live, phase, member = await _member(request, service)
    ticket = ticket_in(request.scope["headers"]) or ""  # as `_member` has seen
    before = _before(phase, live.spec.mode == "semi_malicious")
    look = partial(
        _told,
        round_id=request.path_params["round_id"],
        phase=phase,
        before=before,
        member=member,
        spoken=service.spoken,
    )
    try:
        body = await _patiently(service, request, look, who=digest_of(ticket.encode()))
    except Problem:
        service.rounds.not_seen_alive(live.spec.nonce)
        raise
    if isinstance(body, Response):
        return body
    service.rounds.learn(live, phase, news=service.news.number)
    return Response(body, media_type="application/octet-stream")


ROUTES = (
    Route("/v1/tasks/{task_id}/join", join, methods=["POST"]),
    Route("/v1/tickets", ticket, methods=["GET"]),
    Route("/v1/rounds/{round_id}/{phase}/{member}", say, methods=["PUT"]),
    Route("/v1/rounds/{round_id}/{phase}/{member}", hear, methods=["GET"]),
)


def acknowledged(service: Service, live: LiveRound, phase: Phase, kept: Keeping) -> int | None:
    """The status of a message that is stored; None if it is not."""
    if kept not in ("new", "same"):
        return None
    if kept == "new":
        service.wake_worker(now=live.is_last(phase))
    status = 201 if kept == "new" else 200
    service.metrics.add("sfumato_round_messages_total", code=str(status))
    return status


async def not_kept(service: Service, kept: Keeping, round_id: str) -> Problem:
    """Why a message is not stored."""
    if kept == "other":
        return Problem("equivocating")
    try:
        await _check_alive(service, round_id)
    except Problem as problem:
        return problem
    return Problem("wrong-phase", hint="ask what the round tells this member")


def admitted(service: Service, joined: Joining) -> int:
    """The status of a device that waits; Problem if it does not."""
    if joined == "closed":
        raise Problem("task-closed", hint="forget this task; GET /v1/offers lists the open ones")
    if joined == "taken":
        raise Problem("key-taken", hint="make a new key for every time")
    service.wake_worker()
    return 201 if joined == "new" else 200


def room_for(task: Task) -> int:
    """Devices that may wait for a round of a task."""
    return _ROOM * task.max_count


def invitation_for(live: LiveRound, member: int) -> bytes:
    """The body of what a member is told when its cohort is complete."""
    return b'{"member":%d,%b' % (member, live.invitation[1:])  # which is a JSON object


async def _kept(
    request: Request, service: Service, live: LiveRound, phase: Phase, member: int
) -> Keeping:
    service.uploads.check_room()
    body = await service.bodies.read(
        request, most_bytes=live.most_bytes(phase), seconds=service.settings.upload_seconds
    )
    round_id = live.spec.nonce
    if phase is Phase.MASK and (kept := await service.add_table(round_id, member, body)):
        return kept
    message = Message(round_id, str(phase), member, fingerprint(body, live.spec.salt), body)
    return await service.write(len(body), Transaction.add_messages, message)


async def _member(request: Request, service: Service) -> tuple[LiveRound, Phase, int]:
    """Who speaks; Problem if it is not who it says."""
    live = await service.rounds.find(request.path_params["round_id"])
    phase = PHASES.get(request.path_params["phase"])
    if phase is None or not live.has(phase):
        raise Problem("not-found")
    given = ticket_in(request.scope["headers"])
    member = None if given is None else live.members.get(digest_of(given.encode()))
    if member is None or request.path_params["member"] != str(member):
        # Whoever was put back to wait is no member any more, and is told why.
        await _check_alive(service, live.spec.nonce)
        raise _wrong_ticket()
    return live, phase, member


async def _patiently(
    service: Service, request: Request, look: Callable[[Transaction], T | None], *, who: bytes
) -> T | Response:
    """What `look` finds, at once or when there is news; 204 if it finds nothing in time.

    Of those that ask with one ticket the last is waited for; the others' connections are closed.
    """
    loop = asyncio.get_running_loop()
    until, turn = loop.time() + _wait(request), service.news.turn()
    while True:
        number = service.news.number
        found = await service.looks.look(look)
        if found is not None:
            return found
        left = until - loop.time()
        heard: Heard = "nothing"
        if left > 0:
            heard = await service.news.wait(number, left, who=who, turn=turn)
        if heard != "news":
            closing = {"Connection": "close"} if heard == "elsewhere" else None
            return Response(status_code=204, headers=closing)


def _placed(tx: Transaction, *, ticket: bytes) -> Place | None:
    """Where a ticket is for, once that is known."""
    place = tx.place(ticket)
    if place is None:
        raise _ticket_over()
    if place.round_id is None:
        return None
    if place.phase in ENDED:
        _alive(tx, place.round_id)  # says how
    return place


def _told(
    tx: Transaction,
    *,
    round_id: str,
    phase: Phase,
    before: Phase | None,
    member: int,
    spoken: Spoken,
) -> bytes | None:
    row = _alive(tx, round_id)
    sent = None if before is None else tx.message(round_id, str(before), member)
    if sent is not None and not standing({member: sent[1]}):
        raise Problem("message-refused", sent[1])
    if _ORDER.index(Phase(row.phase)) < _ORDER.index(phase):
        return None
    body = None if sent is None else spoken.hear(tx, row, str(phase))(member)
    if body is None:  # nothing was heard of it before, or not in time
        raise Problem("message-refused", str(Refusal.LATE))
    return body


def _before(phase: Phase, acknowledged: bool) -> Phase | None:
    """The phase whose message a member must have sent to be told anything in this one."""
    if phase is Phase.ENROL:
        return None
    place = _ORDER.index(phase) - 1
    return _ORDER[place - (phase is Phase.UNMASK and not acknowledged)]


async def _check_alive(service: Service, round_id: str) -> None:
    """Raise Problem if a round is over."""
    try:
        await service.looks.look(partial(_alive, round_id=round_id))
    except Problem:
        service.rounds.not_seen_alive(round_id)
        raise


def _alive(tx: Transaction, round_id: str) -> RoundRow:
    """The round, if it is still under way."""
    row = tx.round(round_id)
    if row is None:
        raise Problem("unknown-round")
    if row.phase == Phase.ABORTED:
        raise Problem("round-lost" if row.charged else "round-aborted", row.problem)
    if row.phase == Phase.DONE:
        raise Problem("round-over")
    return row


def ticket_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The ticket among a request's headers."""
    said = next((said for name, said in headers if name == b"authorization"), b"")
    kind, _, given = said.decode("latin-1").partition(" ")
    return given if kind == "Ticket" and TICKET.fullmatch(given) else None


def _wait(request: Request) -> float:
    asked = _WAIT.fullmatch(request.scope["query_string"])
    return min(int(asked[1]), LONGEST_WAIT) if asked else LONGEST_WAIT


def digest_of(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _wrong_ticket() -> Problem:
    return Problem("wrong-ticket", hint="send it as Authorization: Ticket …")


def _ticket_over() -> Problem:
    return Problem("ticket-over", hint="GET /v1/offers lists the tasks that can be joined")

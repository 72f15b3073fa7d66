"""Routes for masked rounds: to join, to get an invitation, to put and to get messages.

A device identifies itself by a ticket that it drew itself; only the ticket's digest is kept. Every
message, or the sum that it went into, is on disk when it is acknowledged, and all answers follow
from the store: so any process over the store may answer, and one that is killed forgets nothing.
FastAPI documents these routes, and `app.Application` calls their functions directly.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from sfumato.collector.http.device_routes import TaskId
from sfumato.collector.http.openapi import (
    BYTES,
    NOT_STORED,
    PASSCODE_HEADER,
    hexadecimal,
    problems,
    takes_bytes,
)
from sfumato.collector.http.service import Service, service_of
from sfumato.collector.http.task_cache import task_closed
from sfumato.collector.http.waiting import Wakening
from sfumato.collector.problems import Problem
from sfumato.collector.store.round_tables import ENDED, Join, Message, Place, StoreOutcome
from sfumato.collector.store.store import Transaction
from sfumato.collector.worker.round_cache import CachedRound, check_alive, most_bytes
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Phase
from sfumato.secagg.round import KEY_BYTES

T = TypeVar("T")
LONGEST_WAIT = 25  # seconds
_TICKET = re.compile("[0-9a-f]{64}")
_WAIT = re.compile(b"wait=([0-9]{1,9})")  # int() refuses thousands of digits
_PHASES = {
    str(phase): phase for phase in (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK)
}
_COHORTS = 4  # may wait for a round of a task
_JOIN_BYTES = 256  # about what a waiting device takes in the store
_TURN_SECONDS = 5.0  # how long a table waits for others to be read

RoundId = Annotated[str, hexadecimal(32)]
PhaseName = Annotated[str, Path(json_schema_extra={"enum": list(_PHASES)})]
Member = Annotated[str, Path(json_schema_extra={"type": "integer", "minimum": 0})]
TICKET_HEADER = {
    "name": "Authorization",
    "in": "header",
    "description": "Ticket, and the 64 hexadecimal digits of one",
    "schema": {"type": "string", "pattern": "^Ticket [0-9a-f]{64}$"},
}
WAIT_PARAMETER = {
    "name": "wait",
    "in": "query",
    "description": "seconds to wait for an answer",
    "schema": {"type": "integer", "minimum": 0, "maximum": LONGEST_WAIT},
}
NOT_YET: dict[int | str, dict[str, Any]] = {204: {"description": "Not yet: ask again"}}
_OVER = ("round-aborted", "round-lost", "round-over")
router = APIRouter(prefix="/v1")


class Ticket(BaseModel):
    ticket: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Invitation(BaseModel):
    """The place of a device in a round."""

    member: Annotated[int, Field(ge=0)]
    invitation: str = Field(description="canonical JSON of the round and its roster")
    signature: str = Field(description="Ed25519, in hexadecimal")


class Stored(BaseModel):
    """An acknowledgement."""


@router.post(
    "/tasks/{task_id}/join",
    status_code=201,
    response_model=Ticket,
    response_description="It waits",
    responses={
        200: {"description": "It waited already", "model": Ticket},
        **problems(
            "malformed-join",
            "wrong-passcode",
            "unknown-task",
            "masked-task",
            "key-taken",
            "task-closed",
            *NOT_STORED,
        ),
    },
    openapi_extra={
        "parameters": [TICKET_HEADER, PASSCODE_HEADER],
        **takes_bytes("An Ed25519 public key", minLength=KEY_BYTES, maxLength=KEY_BYTES),
    },
)
async def join_round(request: Request, task_id: TaskId) -> Response:
    """Wait for a masked round of a task, under a public key that was made for this once.

    The device draws the ticket itself. The same key and ticket again are the same device.
    """
    service = service_of(request)
    opened = await service.tasks.find(task_id)
    opened.check_passcode(request)
    task = opened.masked
    if task is None:
        raise Problem("masked-task", hint="POST a report to this task")
    async with service.uploads.read(
        request, most_bytes=KEY_BYTES, seconds=service.settings.upload_seconds, who=opened.id
    ) as body:
        identity = body
    if len(identity) != KEY_BYTES:
        raise Problem("malformed-join", hint="send an Ed25519 public key, and nothing else")
    ticket = _ticket_in(request) or secrets.token_hex(KEY_BYTES)
    await service.rounds.check_capacity(opened.id, most=_COHORTS * task.max_count)
    member = Join(opened.id, task.campaign, identity, _digest(ticket))
    outcome = await service.commits.write(_JOIN_BYTES, Transaction.join_all, member, who=opened.id)
    if outcome == "closed":
        raise task_closed()
    if outcome == "taken":
        raise Problem("key-taken", hint="make a new key for every time")
    service.wake_worker()
    return JSONResponse({"ticket": ticket}, 201 if outcome == "new" else 200)


@router.get(
    "/tickets",
    response_model=Invitation,
    response_description="The round",
    responses={
        **NOT_YET,
        **problems("wrong-ticket", "unknown-round", "ticket-over", *_OVER, "store-unavailable"),
    },
    openapi_extra={"parameters": [TICKET_HEADER, WAIT_PARAMETER]},
)
async def get_invitation(request: Request) -> Response:
    """The round that a ticket is for, once its cohort is complete.

    Who sees what: a ticket speaks for its device, so it is in a header, which no log of paths has.
    """
    service, ticket = service_of(request), _ticket_in(request)
    if ticket is None:
        raise _wrong_ticket()
    digest = _digest(ticket)
    place = await long_poll(request, lambda number: _place(service, digest), who=digest)
    if isinstance(place, Response):
        return place
    round, member = place
    # The invitation is a JSON object.
    body = b'{"member":%d,%b' % (member, round.invitation[1:])
    return Response(body, media_type="application/json")


@router.put(
    "/rounds/{round_id}/{phase}/{member}",
    status_code=201,
    response_model=Stored,
    response_description="It is stored",
    responses={
        200: {"description": "It was stored before", "model": Stored},
        **problems(
            "wrong-ticket",
            "not-found",
            "unknown-round",
            "wrong-phase",
            "equivocating",
            *_OVER,
            *NOT_STORED,
        ),
    },
    openapi_extra={"parameters": [TICKET_HEADER], **takes_bytes("The message")},
)
async def put_message(
    request: Request, round_id: RoundId, phase: PhaseName, member: Member
) -> Response:
    """Store a member's message of a phase; the answer comes when it is on disk.

    The same bytes again are the same message.

    Who sees what: a message is stored as it came; none is logged or measured.
    """
    service = service_of(request)
    sender = await _find_member(request, round_id, phase, member)
    service.commits.check_capacity(round_id)
    if sender.phase is Phase.MASK:
        size = most_bytes(sender.round.spec, sender.phase)
        async with service.table_turnstile.enter(size, seconds=_TURN_SECONDS):
            outcome = await _store(request, sender)
    else:
        outcome = await _store(request, sender)
    if outcome == "other":
        raise Problem("equivocating")
    if outcome == "late":
        await service.call(_check_alive, service, sender.round.spec.nonce)
        raise Problem("wrong-phase", hint="ask what the round tells this member")
    if outcome == "new":
        service.wake_worker()
    return _STORED if outcome == "new" else _STORED_BEFORE


@router.get(
    "/rounds/{round_id}/{phase}/{member}",
    response_class=Response,
    responses={
        200: {"description": "The message", "content": BYTES},
        **NOT_YET,
        **problems(
            "wrong-ticket",
            "not-found",
            "unknown-round",
            "message-refused",
            *_OVER,
            "store-unavailable",
        ),
    },
    openapi_extra={"parameters": [TICKET_HEADER, WAIT_PARAMETER]},
)
async def get_message(
    request: Request, round_id: RoundId, phase: PhaseName, member: Member
) -> Response:
    """The message to a member in a phase."""
    service = service_of(request)
    reader = await _find_member(request, round_id, phase, member)

    async def read(number: int) -> bytes | None:
        answer = await service.rounds.answer(reader.round.spec, reader.phase, number=number)
        return answer.message(reader.number)

    body = await long_poll(request, read, who=reader.ticket)
    if isinstance(body, Response):
        return body
    return Response(body, media_type="application/octet-stream")


_STORED, _STORED_BEFORE = JSONResponse({}, 201), JSONResponse({}, 200)


async def long_poll(
    request: Request, read: Callable[[int], Awaitable[T | None]], *, who: bytes
) -> T | Response:
    """What `read` returns, at once or after a change; 204 if that is None until the time is up.
    `read` gets the number of the last change.

    If several requests have the same ticket, only the last one waits; the connections of the others
    are closed.
    """
    changes, loop = service_of(request).changes, asyncio.get_running_loop()
    until, arrival = loop.time() + _wait_seconds(request), changes.arrival_number()
    while True:
        number = changes.number
        result = await read(number)
        if result is not None:
            return result
        seconds = until - loop.time()
        wakening: Wakening = "timeout"
        if seconds > 0:
            wakening = await changes.wait(number, seconds, who=who, arrival=arrival)
        if wakening != "change":
            closing = {"Connection": "close"} if wakening == "superseded" else {}
            return Response(status_code=204, headers=closing)


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of a round, in one of its phases."""

    round: CachedRound
    phase: Phase
    number: int
    ticket: bytes = field(repr=False)  # its digest


async def _store(request: Request, sender: _Member) -> StoreOutcome:
    """Have a table added, or store any other message."""
    service, phase = service_of(request), sender.phase
    round_id, number = sender.round.spec.nonce, sender.number
    async with service.uploads.read(
        request,
        most_bytes=most_bytes(sender.round.spec, phase),
        seconds=service.settings.upload_seconds,
        who=round_id,
    ) as body:
        if phase is Phase.MASK and (outcome := await service.add_table(round_id, number, body)):
            return outcome
        digest = fingerprint(body, sender.round.spec.salt)
        message = Message(round_id, str(phase), number, digest, body)
        return await service.commits.write(
            len(body), Transaction.add_messages, message, who=round_id
        )


async def _find_member(request: Request, round_id: str, phase: str, member: str) -> _Member:
    """The member that a request is from; Problem if the ticket is not this member's."""
    service, ticket = service_of(request), _ticket_in(request)
    round = await service.rounds.find(round_id)
    if phase not in _PHASES or not round.has(_PHASES[phase]):
        raise Problem("not-found")
    digest = b"" if ticket is None else _digest(ticket)
    number = round.members.get(digest)
    if number is None or member != str(number):
        # A device that was put back to wait is not a member any more, and is told why.
        await service.call(_check_alive, service, round.spec.nonce)
        raise _wrong_ticket()
    return _Member(round, _PHASES[phase], number, digest)


async def _place(service: Service, ticket: bytes) -> tuple[CachedRound, int] | None:
    """The round and the member that a ticket is for; None if there is none yet."""
    place = await service.call(_read_place, service, ticket)
    if place.round_id is None or place.member is None:
        return None
    return await service.rounds.find(place.round_id), place.member


def _read_place(service: Service, ticket: bytes) -> Place:
    with service.store.reading() as tx:
        place = tx.place(ticket)
        if place is None:
            hint = "GET /v1/offers lists the tasks that can be joined"
            raise Problem("ticket-over", hint=hint)
        if place.round_id is not None and place.phase in ENDED:
            check_alive(tx, place.round_id)  # says how it ended
        return place


def _check_alive(service: Service, round_id: str) -> None:
    """Raise Problem if a round is over."""
    with service.store.reading() as tx:
        check_alive(tx, round_id)


def _ticket_in(request: Request) -> str | None:
    """The ticket in a request's headers."""
    kind, _, ticket = request.headers.get("authorization", "").partition(" ")
    return ticket if kind == "Ticket" and _TICKET.fullmatch(ticket) else None


def _wait_seconds(request: Request) -> float:
    wait = _WAIT.fullmatch(request.scope["query_string"])
    return min(int(wait[1]), LONGEST_WAIT) if wait else LONGEST_WAIT


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode()).digest()


def _wrong_ticket() -> Problem:
    return Problem("wrong-ticket", hint="send it as Authorization: Ticket …")

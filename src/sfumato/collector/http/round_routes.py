"""The endpoints of masked rounds: to join, to ask for one's round, to send and to get messages.

A device proves who it is by a ticket that it drew itself; only the ticket's digest is kept. Every
message, or the sum that it went into, is on disk when it is acknowledged, and what devices are
answered follows from that: so any process over the store may answer, and one that is killed forgets
nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.routing import Route
from starlette.types import Receive, Scope

from sfumato.collector.http.endpoint import Answer, Endpoint
from sfumato.collector.http.service import Service
from sfumato.collector.http.task_cache import task_closed
from sfumato.collector.http.waiting import Wakening
from sfumato.collector.problems import Problem
from sfumato.collector.store.round_tables import ENDED, Join, Message, Place, StoreOutcome
from sfumato.collector.store.store import Transaction
from sfumato.collector.worker.round_cache import CachedRound, check_alive
from sfumato.secagg.agreement import fingerprint
from sfumato.secagg.coordinator import Phase
from sfumato.secagg.round import KEY_BYTES

T = TypeVar("T")
LONGEST_WAIT = 25  # seconds that an answer may be waited for
_TICKET = re.compile("[0-9a-f]{64}")
_WAIT = re.compile(b"wait=([0-9]{1,9})")  # int() refuses thousands of digits
_PHASES = {
    str(phase): phase for phase in (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK)
}
_COHORTS = 4  # that may wait for a round of a task
_JOIN_BYTES = 256  # that a device which waits takes in the store, about
_TURN_SECONDS = 5.0  # that a table waits for others to be read


async def join(service: Service, scope: Scope, receive: Receive) -> Answer:
    """Wait for a masked round of a task, under a public key that was made for this once.

    The ticket comes in `Authorization: Ticket …`, 64 hexadecimal digits that the device drew; the
    same key and ticket again are the same device.

        201  it waits; the body says the ticket   409  key-taken, masked-task
        200  it did already                       410  task-closed
        400  malformed-join                       429  busy; Retry-After is set
        404  unknown-task                         503  store-unavailable; Retry-After is set
    """
    opened = await service.tasks.find(scope["path_params"]["task_id"])
    task = opened.masked
    if task is None:
        raise Problem("masked-task", hint="POST a report to this task")
    identity = await service.bodies.read(
        scope, receive, most_bytes=KEY_BYTES, seconds=service.settings.upload_seconds
    )
    if len(identity) != KEY_BYTES:
        raise Problem("malformed-join", hint="send an Ed25519 public key, and nothing else")
    ticket = _ticket_in(scope) or secrets.token_hex(KEY_BYTES)
    await service.rounds.check_capacity(opened.id, most=_COHORTS * task.max_count)
    member = Join(opened.id, task.campaign, identity, _digest(ticket))
    outcome = await service.commits.write(_JOIN_BYTES, Transaction.join_all, member)
    if outcome == "closed":
        raise task_closed()
    if outcome == "taken":
        raise Problem("key-taken", hint="make a new key for every time")
    service.wake_worker()
    return Answer.of_json(201 if outcome == "new" else 200, {"ticket": ticket})


async def get_invitation(service: Service, scope: Scope, receive: Receive) -> Answer:
    """The round that a ticket is for, once its cohort is complete; waited for up to `wait` seconds.

    200  member, and the signed invitation     403  wrong-ticket
    204  not yet; ask again                    410  ticket-over, or its round is over

    Who sees what: a ticket speaks for its device, so it is in a header, which no log of paths has.
    """
    ticket = _ticket_in(scope)
    if ticket is None:
        raise _wrong_ticket()
    digest = _digest(ticket)
    place = await long_poll(service, scope, lambda number: _place(service, digest), who=digest)
    if isinstance(place, Answer):
        return place
    round, member = place
    # The invitation is a JSON object.
    return Answer(200, b'{"member":%d,%b' % (member, round.invitation[1:]))


async def put_message(service: Service, scope: Scope, receive: Receive) -> Answer:
    """Store a member's message of a phase. The same bytes again are the same message.

    201  it is stored                            410  round-aborted, round-lost, round-over
    200  it was before                           413  too-large
    403  wrong-ticket                            429  busy; Retry-After is set
    404  unknown-round                           503  store-unavailable; Retry-After is set
    409  wrong-phase, equivocating               507  store-full

    Who sees what: a message is stored as it came; none is logged or measured.
    """
    round, phase, member, _ = await _find_member(service, scope)
    service.commits.check_capacity()
    if phase is Phase.MASK:
        size = round.most_bytes(phase)
        async with service.table_turnstile.enter(size, seconds=_TURN_SECONDS):
            outcome = await _store(service, scope, receive, round, phase, member)
    else:
        outcome = await _store(service, scope, receive, round, phase, member)
    if outcome == "other":
        raise Problem("equivocating")
    if outcome == "late":
        await service.call(_check_alive, service, round.spec.nonce)
        raise Problem("wrong-phase", hint="ask what the round tells this member")
    if outcome == "new":
        service.wake_worker()
    return _STORED if outcome == "new" else _STORED_BEFORE


async def get_message(service: Service, scope: Scope, receive: Receive) -> Answer:
    """The message to a member in a phase; waited for up to `wait` seconds.

    200  the bytes            409  message-refused: why the member's message before was not taken
    204  not yet; ask again   410  round-aborted, round-lost, round-over
    403  wrong-ticket         404  unknown-round
    """
    round, phase, member, digest = await _find_member(service, scope)

    async def read(number: int) -> bytes | None:
        return (await service.rounds.answer(round.spec, phase, number=number)).message(member)

    body = await long_poll(service, scope, read, who=digest)
    return body if isinstance(body, Answer) else Answer(200, body, "application/octet-stream")


_STORED, _STORED_BEFORE = Answer.of_json(201, {}), Answer.of_json(200, {})
_MESSAGE = "/v1/rounds/{round_id}/{phase}/{member}"
ENDPOINTS = (
    Route(_MESSAGE, Endpoint(put_message), methods=["PUT"]),
    Route(_MESSAGE, Endpoint(get_message), methods=["GET"]),
    Route("/v1/tickets", Endpoint(get_invitation), methods=["GET"]),
    Route("/v1/tasks/{task_id}/join", Endpoint(join), methods=["POST"]),
)


async def long_poll(
    service: Service,
    scope: Scope,
    read: Callable[[int], Awaitable[T | None]],
    *,
    who: bytes,
) -> T | Answer:
    """What `read` returns, at once or when something has changed; 204 if that is None in time. It
    is given the number of the last change.

    Of several requests with one ticket the last is waited for; the others' connections are closed.
    """
    loop = asyncio.get_running_loop()
    until, arrival = loop.time() + _wait_seconds(scope), service.changes.arrival_number()
    while True:
        number = service.changes.number
        result = await read(number)
        if result is not None:
            return result
        seconds = until - loop.time()
        wakening: Wakening = "timeout"
        if seconds > 0:
            wakening = await service.changes.wait(number, seconds, who=who, arrival=arrival)
        if wakening != "change":
            closing = {"connection": "close"} if wakening == "superseded" else {}
            return Answer(204, headers=closing)


async def _store(
    service: Service,
    scope: Scope,
    receive: Receive,
    round: CachedRound,
    phase: Phase,
    member: int,
) -> StoreOutcome:
    """Have a table added, or store any other message."""
    body = await service.bodies.read(
        scope,
        receive,
        most_bytes=round.most_bytes(phase),
        seconds=service.settings.upload_seconds,
    )
    round_id = round.spec.nonce
    if phase is Phase.MASK and (outcome := await service.add_table(round_id, member, body)):
        return outcome
    message = Message(round_id, str(phase), member, fingerprint(body, round.spec.salt), body)
    return await service.commits.write(len(body), Transaction.add_messages, message)


async def _find_member(service: Service, scope: Scope) -> tuple[CachedRound, Phase, int, bytes]:
    """The round, the phase, the member and its ticket's digest; Problem if it is another's."""
    parameters = scope["path_params"]
    round = await service.rounds.find(parameters["round_id"])
    phase = _PHASES.get(parameters["phase"])
    if phase is None or not round.has(phase):
        raise Problem("not-found")
    ticket = _ticket_in(scope)
    digest = b"" if ticket is None else _digest(ticket)
    member = round.members.get(digest)
    if member is None or parameters["member"] != str(member):
        # Whoever was put back to wait is no member any more, and is told why.
        await service.call(_check_alive, service, round.spec.nonce)
        raise _wrong_ticket()
    return round, phase, member, digest


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


def _ticket_in(scope: Scope) -> str | None:
    """The ticket among a request's headers."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, ticket = value.decode("latin-1").partition(" ")
            return ticket if kind == "Ticket" and _TICKET.fullmatch(ticket) else None
    return None


def _wait_seconds(scope: Scope) -> float:
    wait = _WAIT.fullmatch(scope["query_string"])
    return min(int(wait[1]), LONGEST_WAIT) if wait else LONGEST_WAIT


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode()).digest()


def _wrong_ticket() -> Problem:
    return Problem("wrong-ticket", hint="send it as Authorization: Ticket …")

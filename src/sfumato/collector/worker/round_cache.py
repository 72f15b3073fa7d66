"""A cache of masked rounds for the endpoints, so that most requests do not read the store."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.collector.problems import Problem
from sfumato.collector.store.round_tables import RoundRow, accepted_members
from sfumato.collector.store.store import Store, Transaction
from sfumato.collector.worker.replay import MessageFor, PhaseMessages
from sfumato.errors import ImpossibleError
from sfumato.secagg.coordinator import Phase, Refusal
from sfumato.secagg.parameters import COMPLETE_BELOW
from sfumato.secagg.round import BOX_BYTES, KEYS_BYTES, SHARE_BYTES, SIGNATURE_BYTES, MaskedRound
from sfumato.spec import from_json

_ORDER = (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK, Phase.DONE)
_ROUND_ID = re.compile("[0-9a-f]{32}")
_MOST_ROUNDS = 64
_FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class CachedRound:
    """A round and its members, which are fixed when it is formed."""

    spec: MaskedRound
    members: Mapping[bytes, int]  # by the digest of their ticket
    invitation: bytes

    def has(self, phase: Phase) -> bool:
        """Whether rounds of its kind have this phase."""
        return phase is not Phase.ACK or self.spec.mode == "semi_malicious"


@dataclass(frozen=True, slots=True, repr=False)
class CachedAnswer:
    """The answers to all members of a round that ask for their message of a phase."""

    outcomes: Mapping[int, str] | None  # of their messages in the phase before, if it has any
    message_for: MessageFor | None  # None: the phase has not begun

    def message(self, member: int) -> bytes | None:
        """A member's message; None if the phase has not begun, Problem if there is none for it."""
        outcome = None if self.outcomes is None else self.outcomes.get(member)
        if outcome is not None and not accepted_members({member: outcome}):
            raise Problem("message-refused", outcome)
        if self.message_for is None:
            return None
        body = None if outcome is None else self.message_for(member)
        if body is None:  # it sent nothing in the phase before, or too late
            raise Problem("message-refused", str(Refusal.LATE))
        return body


def most_bytes(round: MaskedRound, phase: Phase) -> int:
    """The longest possible message of a member in this phase, however many have enrolled."""
    if phase in (Phase.SHARE, Phase.UNMASK):
        each = BOX_BYTES if phase is Phase.SHARE else SHARE_BYTES
        return each * _most_neighbours(round)
    return {
        Phase.ENROL: KEYS_BYTES,
        Phase.MASK: round.vector_bytes,
        Phase.ACK: SIGNATURE_BYTES,
    }[phase]


def _most_neighbours(round: MaskedRound) -> int:
    """The most neighbours that a member can have, plus a quarter. A smaller round has fewer, unless
    it is so small that all members are neighbours."""
    try:
        neighbours = round.parameters(round.cohort).neighbours
    except ImpossibleError:  # no such round is formed
        neighbours = round.cohort
    return min(round.cohort - 1, max(COMPLETE_BELOW, neighbours + neighbours // 4))


def check_alive(tx: Transaction, round_id: str) -> RoundRow:
    """The round, if it is active; Problem if it is over."""
    row = tx.round(round_id)
    if row is None:
        raise Problem("unknown-round")
    if row.phase == Phase.ABORTED:
        raise Problem("round-lost" if row.charged else "round-aborted", row.problem)
    if row.phase == Phase.DONE:
        raise Problem("round-over")
    return row


class RoundCache:
    """Rounds by their id, and the answers of the last second, for one event loop."""

    def __init__(
        self,
        store: Store,
        call: Callable[..., Awaitable[Any]],
        messages: PhaseMessages | None = None,
    ) -> None:
        """`call(function, *arguments)` runs a blocking function outside the loop."""
        self._store = store
        self._call = call
        self._messages = messages or PhaseMessages()
        self._rounds: OrderedDict[str, CachedRound] = OrderedDict()
        self._answers: dict[tuple[str, Phase], tuple[int, asyncio.Future[CachedAnswer]]] = {}
        self._waiting: dict[str, tuple[float, int]] = {}  # when they were counted, by task

    async def find(self, round_id: str) -> CachedRound:
        """The round of this id; Problem if there is none."""
        cached = self._rounds.get(round_id)
        if cached is None and _ROUND_ID.fullmatch(round_id):
            cached = await self._call(self._read, round_id)
            if cached is not None:
                self._rounds[round_id] = cached
                while len(self._rounds) > _MOST_ROUNDS:
                    self._rounds.popitem(last=False)
        if cached is None:
            raise Problem("unknown-round", hint="join a task, and ask with the ticket")
        return cached

    async def answer(self, round: MaskedRound, phase: Phase, *, number: int) -> CachedAnswer:
        """The answer to members in a phase; Problem if the round is over. It is at most a second
        old, and not older than the store's last change, which `number` counts.

        Members ask together when a phase begins: one of them reads, and the others wait for it.
        """
        key = round.nonce, phase
        cached, answer = self._answers.get(key, (None, None))
        if answer is None or cached != number or not _is_reusable(answer):
            answer = asyncio.ensure_future(self._call(self._read_answer, round, phase))
            self._answers[key] = number, answer
            loop = asyncio.get_running_loop()
            loop.call_later(_FRESH_SECONDS, self._answers.pop, key, None)
        return await asyncio.shield(answer)  # others may wait for it, too

    async def check_capacity(self, task_id: str, *, most: int) -> None:
        """Raise `busy` if this many devices wait for a round; they are counted once a second."""
        read_at, waiting = self._waiting.get(task_id, (-math.inf, 0))
        if (now := time.monotonic()) - read_at >= _FRESH_SECONDS:
            if len(self._waiting) > _MOST_ROUNDS:
                self._waiting.clear()
            self._waiting[task_id] = now, waiting  # so that other requests do not count
            waiting = await self._call(self._count, task_id)
            self._waiting[task_id] = time.monotonic(), waiting
        if waiting >= most:
            raise Problem("busy", "enough devices already wait", retry_after_seconds=60)

    def _read(self, round_id: str) -> CachedRound | None:
        with self._store.reading() as tx:
            row = tx.round(round_id)
            if row is None:
                return None
            members = tx.members(round_id)
            invitation = tx.invitation(round_id)
        tickets = {bytes(ticket): member for member, (_, ticket) in enumerate(members)}
        return CachedRound(from_json(row.spec), tickets, invitation.encode())

    def _read_answer(self, round: MaskedRound, phase: Phase) -> CachedAnswer:
        before = _before(phase, round.mode == "semi_malicious")
        with self._store.reading() as tx:
            row = check_alive(tx, round.nonce)
            outcomes = None if before is None else tx.senders(round.nonce, str(before))
            message_for = None
            if _ORDER.index(Phase(row.phase)) >= _ORDER.index(phase):
                message_for = self._messages.of_phase(tx, row, str(phase))
        return CachedAnswer(outcomes, message_for)

    def _count(self, task_id: str) -> int:
        with self._store.reading() as tx:
            return tx.waiting_count(task_id)


def _is_reusable(answer: asyncio.Future[CachedAnswer]) -> bool:
    """Whether it is being read, or has the messages of a phase that has begun: they are final."""
    return not answer.done() or (
        answer.exception() is None and answer.result().message_for is not None
    )


def _before(phase: Phase, is_acknowledged: bool) -> Phase | None:
    """The phase whose message a member must have sent to be answered in this one."""
    if phase is Phase.ENROL:
        return None
    place = _ORDER.index(phase) - 1
    return _ORDER[place - (phase is Phase.UNMASK and not is_acknowledged)]

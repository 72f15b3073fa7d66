"""What the endpoints of masked rounds know without asking the store: a round's members and sizes.

Both are settled when a round is formed, so they may be kept for as long as there is room.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store
from sfumato.collector.worker.replay import Speech, Spoken
from sfumato.errors import ImpossibleError
from sfumato.secagg.coordinator import Phase
from sfumato.secagg.parameters import COMPLETE_BELOW
from sfumato.secagg.round import BOX_BYTES, KEYS_BYTES, SHARE_BYTES, SIGNATURE_BYTES, MaskedRound
from sfumato.spec import from_json

_ORDER = (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.ACK, Phase.UNMASK)
_ROUND_ID = re.compile("[0-9a-f]{32}")
_MOST_ROUNDS = 64
_FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, repr=False)
class Told:
    """What members are told in a phase that has begun: all whose message before was taken."""

    speech: Speech
    news: int  # the number of `News` before this was read
    read_at: float


@dataclass(frozen=True, slots=True, repr=False)
class LiveRound:
    """A round and who may speak in it."""

    spec: MaskedRound
    members: dict[bytes, int]  # by the digest of their ticket
    invitation: bytes
    told: dict[Phase, Told] = field(default_factory=dict)  # the last one only
    alive: dict[int, float] = field(default_factory=dict)  # when it was seen so, by `News.number`
    came: Counter[Phase] = field(default_factory=Counter)  # messages of each phase

    def is_last(self, phase: Phase) -> bool:
        """Count a message that came to this process: as many may have come now as are expected."""
        self.came[phase] += 1
        before = [self.came[other] for other in _ORDER[: _ORDER.index(phase)] if self.came[other]]
        return self.came[phase] in (len(self.members), *before[-1:])

    def has(self, phase: Phase) -> bool:
        """Whether rounds of its kind have this phase."""
        return phase is not Phase.ACK or self.spec.mode == "semi_malicious"

    def most_bytes(self, phase: Phase) -> int:
        return most_bytes(self.spec, phase)


def most_bytes(round: MaskedRound, phase: Phase) -> int:
    """Of a member's message of this phase, however many have enrolled."""
    if phase in (Phase.SHARE, Phase.UNMASK):
        each = BOX_BYTES if phase is Phase.SHARE else SHARE_BYTES
        return each * _most_neighbours(round)
    return {
        Phase.ENROL: KEYS_BYTES,
        Phase.MASK: round.vector_bytes,
        Phase.ACK: SIGNATURE_BYTES,
    }[phase]


def _most_neighbours(round: MaskedRound) -> int:
    """Of a member. Fewer enrolled have fewer, unless they are so few that all are neighbours; a
    quarter more is allowed for."""
    try:
        neighbours = round.parameters(round.cohort).neighbours
    except ImpossibleError:  # such a round is not formed
        neighbours = round.cohort
    return min(round.cohort - 1, max(COMPLETE_BELOW, neighbours + neighbours // 4))


class LiveRounds:
    """Rounds by their id, read from the store once."""

    def __init__(
        self,
        store: Store,
        call: Callable[..., Awaitable[object]],
        spoken: Spoken | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call(function, *arguments)` runs what blocks, away from the loop."""
        self._store = store
        self._call = call
        self._spoken = spoken or Spoken()
        self._now = now
        self._known: OrderedDict[str, LiveRound] = OrderedDict()
        self._waiting: dict[str, tuple[float, int]] = {}

    def known(self, round_id: str) -> LiveRound | None:
        """The round of this id, if no look into the store is needed to tell."""
        return self._known.get(round_id)

    def place(self, ticket: bytes, *, news: int) -> tuple[LiveRound, int] | None:
        """The round and the member of a ticket, by its digest, if no look into the store is needed
        to tell. Whose round was given up before it began has another, or none."""
        for live in reversed(self._known.values()):
            member = live.members.get(ticket)
            seen_at = live.alive.get(news, -math.inf)
            if member is not None and self._now() - seen_at < _FRESH_SECONDS:
                return live, member
        return None

    def seen_alive(self, live: LiveRound, *, news: int) -> None:
        """A look into the store has shown that the round is under way."""
        live.alive.clear()
        live.alive[news] = self._now()

    def not_seen_alive(self, round_id: str) -> None:
        """Somebody was told otherwise, and is not to be invited to it again."""
        if (live := self._known.get(round_id)) is not None:
            live.alive.clear()
            live.told.clear()

    async def find(self, round_id: str) -> LiveRound:
        """The round of this id; Problem if there is none."""
        found = self._known.get(round_id)
        if found is None and _ROUND_ID.fullmatch(round_id):
            read = await self._call(self._read, round_id)
            if isinstance(read, LiveRound):
                found = self._known[round_id] = read
                while len(self._known) > _MOST_ROUNDS:
                    self._known.popitem(last=False)
        if found is None:
            raise Problem("unknown-round", hint="join a task, and ask with the ticket")
        return found

    def learn(self, live: LiveRound, phase: Phase, *, news: int) -> None:
        """Know what everybody is told in a phase, since somebody was."""
        speech = self._spoken.heard(live.spec.nonce, str(phase))
        if speech is not None:
            live.told.clear()
            live.told[phase] = Told(speech, news, self._now())

    def told(self, live: LiveRound, phase: Phase, member: int, *, news: int) -> bytes | None:
        """What a member is told in a phase, if no look into the store is needed to tell."""
        known = live.told.get(phase)
        if known is None or known.news != news or self._now() - known.read_at >= _FRESH_SECONDS:
            live.told.clear()  # a round that is over need not stay in memory
            return None
        return known.speech(member)

    def has_room(self, task_id: str, *, most: int) -> bool:
        """Whether fewer than so many wait, as far as is known; counted now and then."""
        read_at, waiting = self._waiting.get(task_id, (-math.inf, 0))
        return self._now() - read_at < _FRESH_SECONDS and waiting < most

    async def check_room(self, task_id: str, *, most: int) -> None:
        """Raise `busy` if so many wait for a round of a task; counted now and then."""
        read_at, waiting = self._waiting.get(task_id, (-math.inf, 0))
        if self._now() - read_at >= _FRESH_SECONDS:
            if len(self._waiting) > _MOST_ROUNDS:
                self._waiting.clear()
            self._waiting[task_id] = self._now(), waiting  # others need not count meanwhile
            count = await self._call(self._count, task_id)
            assert isinstance(count, int)  # as `_count` has it
            waiting = count
            self._waiting[task_id] = self._now(), waiting
        if waiting >= most:
            raise Problem("busy", "enough devices wait for a round", retry_after_seconds=60)

    def _read(self, round_id: str) -> LiveRound | None:
        with self._store.reading() as tx:
            row = tx.round(round_id)
            if row is None:
                return None
            members = tx.members(round_id)
            invitation = tx.invitation(round_id)
        tickets = {bytes(ticket): member for member, (_, ticket) in enumerate(members)}
        return LiveRound(from_json(row.spec), tickets, invitation.encode())

    def _count(self, task_id: str) -> int:
        with self._store.reading() as tx:
            return tx.waiting(task_id)

"""Many devices in masked rounds over real HTTP, a few connections for all of them.

The devices of a connection take turns: each goes on as far as it can, and when none can, one of
them waits at the collector for all. Some leave on the way, as devices do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from sfumato.device import Joined, Part, Send
from sfumato.errors import ServiceError, SpecError

PHASES = ("enrol", "share", "mask", "ack", "unmask")
PATIENCE_SECONDS = 60.0  # for a collector that does not answer
IDLE_SECONDS = 300.0  # for anything to happen in a round, or for one to begin
LEFT = "left"  # the outcome of who left on purpose
_WAIT_SECONDS = 2  # that one device waits for the others of its connection
_PAUSE_SECONDS = 0.05  # before a collector that was away is asked again


@dataclass(slots=True)
class Traveller:
    """A device on its way through a round. It says nothing from the phase `leaves` on."""

    part: Part
    leaves: str | None = None
    not_before: float = field(default=0.0, repr=False)

    @property
    def has_left(self) -> bool:
        return self.part.phase == self.leaves

    @property
    def outcome(self) -> str | None:
        return LEFT if self.has_left else self.part.outcome


def leaving(rates: Mapping[str, float], chance: np.random.Generator) -> str | None:
    """The phase in which a device leaves, by the share that does in each; None if it stays."""
    if unknown := rates.keys() - set(PHASES):
        raise SpecError(f"a device leaves in one of {', '.join(PHASES)}; got {sorted(unknown)[0]}")
    for phase in PHASES:
        if chance.random() < rates.get(phase, 0.0):
            return phase
    return None


def travel(
    groups: Sequence[tuple[Send, Sequence[Traveller]]],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    idle_seconds: float = IDLE_SECONDS,
) -> Counter[str]:
    """Drive devices, those of each connection in a thread of its own; how they ended.

    They give up if the collector does not answer for `patience_seconds`, or has nothing to tell any
    of a connection's devices for `idle_seconds`: a cohort may never be complete.
    """

    def drive(group: tuple[Send, Sequence[Traveller]]) -> Counter[str]:
        return _drive(*group, patience_seconds, idle_seconds)

    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        return sum(threads.map(drive, groups), Counter[str]())


def _drive(
    send: Send, travellers: Sequence[Traveller], patience_seconds: float, idle_seconds: float
) -> Counter[str]:
    ended: Counter[str] = Counter()
    under_way, idle = list(travellers), False
    until, moved = time.monotonic() + patience_seconds, time.monotonic()
    while under_way:
        went_on = heard = False
        for place, traveller in enumerate(under_way):
            wait = _WAIT_SECONDS if idle and place == 0 else 0
            try:
                went_on = _go(send, traveller, wait) or went_on
                heard = True
            except ServiceError:
                went_on = True  # perhaps; it is asked again at once
                break  # nor would the next one reach it
        if heard:
            until = time.monotonic() + patience_seconds
        elif time.monotonic() > until:
            ended[Joined.UNREACHABLE] += len(under_way)
            return ended
        if not heard:
            time.sleep(_PAUSE_SECONDS)
        idle = not went_on
        if went_on:
            moved = time.monotonic()
        elif time.monotonic() - moved > idle_seconds:
            ended[Joined.WAITING] += len(under_way)
            return ended
        for traveller in under_way:
            if traveller.outcome is not None:
                ended[traveller.outcome] += 1
        under_way = [traveller for traveller in under_way if traveller.outcome is None]
        # Who is in a round hears of something sooner than who waits for one.
        under_way.sort(key=lambda traveller: traveller.part.phase == "wait")
    return ended


def _go(send: Send, traveller: Traveller, wait_seconds: int) -> bool:
    """Go on until there is something to wait for; whether that was any way."""
    part, went_on = traveller.part, False
    while traveller.outcome is None and time.monotonic() >= traveller.not_before:
        asked = part.request(wait_seconds)
        further = part.hear(send(asked.method, asked.path, asked.body, asked.headers))
        if not further:
            traveller.not_before = time.monotonic() + part.retry_after_seconds
            break
        went_on, wait_seconds = True, 0
    return went_on

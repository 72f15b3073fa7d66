"""Many made-up devices, each a real `device.Device`, that answer a collector over real HTTP.

Time is simulated, so that days pass at once: a device records on its day and sends when its records
are due. Only how long the collector takes to answer is real.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from sfumato.device import (
    Device,
    Http,
    MemoryBox,
    Response,
    RoundClient,
    RoundOutcome,
    Send,
    SendSummary,
    SkipReason,
)
from sfumato.device.offers import Offer
from sfumato.device.outbox import DAY_SECONDS, Outcome
from sfumato.errors import ImpossibleError, ServiceError, SpecError
from sfumato.flow.model_terms import Train
from sfumato.privacy import SeededRng, SystemRng
from sfumato.simulation.population import Population

Held: TypeAlias = "Sequence[str] | npt.NDArray[np.floating] | Train"
"""What a device holds: items, or a vector; or what computes its update of a model."""

T = TypeVar("T")

SOON_SECONDS = 3.0  # in which a study that was just made is offered
ROUND_SECONDS = 3.0  # that the next masked round may take to be offered
PATIENCE_SECONDS = 30.0  # in which its next task is, and a collector answers again
AWAY_SECONDS = 1.0  # a longer answer is one of a collector that was away
_TRIES = 40  # of what is still unsent at the end
_LONGEST_PAUSE = 1.0


@dataclass(slots=True)
class Traffic:
    """What went over one connection, in uploads."""

    uploads: int = 0
    repeated: int = 0  # sent twice on purpose
    lost: int = 0  # whose answer was dropped on purpose
    refused: Counter[int] = field(default_factory=Counter)  # by status
    unanswered: int = 0  # because nobody was there


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSummary:
    """What a fleet did, in records and uploads."""

    devices: int
    days: int
    outcomes: Mapping[str, int]  # of values
    sent: int
    rejected: int
    forgotten: int
    unsent: int
    uploads: int
    repeated: int
    lost: int
    refused: Mapping[int, int]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        refused = {str(status): count for status, count in sorted(self.refused.items())}
        return {**plain, "outcomes": dict(sorted(self.outcomes.items())), "refused": refused}


class Unreliable:
    """A way to a collector on which uploads arrive twice, and answers get lost, at a rate."""

    def __init__(self, send: Send, rate: float, chance: np.random.Generator) -> None:
        self._send = send
        self._rate = rate
        self._chance = chance
        self.traffic = Traffic()

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        try:
            answer = self._send(method, path, body, headers)
        except ServiceError:
            self.traffic.unanswered += 1
            raise
        if method == "GET":
            return answer
        again, lost = self._chance.random(2) < self._rate
        if again:
            self.traffic.repeated += 1
            answer = self._send(method, path, body, headers)
        self.traffic.uploads += 1
        if answer.status not in (200, 201):
            self.traffic.refused[answer.status] += 1
        elif lost:
            self.traffic.lost += 1
            raise ServiceError("this answer was dropped on purpose")
        return answer


def holdings(population: Population, devices: int | None, seed: int | None) -> list[list[str]]:
    """What each of so many devices holds, drawn among those in the data without repetition."""
    count = population.devices if devices is None else devices
    if not 1 <= count <= population.devices:
        raise ImpossibleError(f"the data holds {population.devices:,} devices; got {count:,}")
    drawn = np.sort(np.random.default_rng(seed).permutation(population.devices)[:count])
    population = population.expanded()
    held: list[list[str]] = [[] for _ in range(count)]
    place = np.full(population.devices, -1)
    place[drawn] = np.arange(count)
    start = 0
    for chunk in population.chunks:
        rows = np.arange(start, start + len(chunk))
        owners = place[rows if population.owners is None else population.owners[rows]]
        start += len(chunk)
        for row in np.flatnonzero(owners >= 0):
            held[owners[row]].append(str(chunk[int(row)].as_py()))
    return held


class NetworkFleet:
    """Devices over a few kept connections, each connection driven by a thread of its own."""

    def __init__(
        self,
        server: str,
        key: bytes,
        held: Sequence[Held],
        *,
        drop: float = 0.0,
        seed: int | None = None,
        connections: int = 32,
        allow_plain: bool = False,
        come: Callable[[str], Collection[int]] | None = None,
        connect: Callable[[], Send] | None = None,
    ) -> None:
        """`come` says which devices, by number, answer the task of a cohort; all, if it is None.
        `connect` makes a way to the collector, in place of HTTP to `server`.

        Device k draws from `SeededRng(seed, k)`, as in `simulate` with `protocol`: the same devices
        in the same cohorts then send the same tables.
        """
        self._held, self._come = held, come
        self._most = max((len(each) for each in held if not callable(each)), default=0)
        self._links: list[Send] = [
            Http(server, allow_plain=allow_plain) if connect is None else connect()
            for _ in range(connections)
        ]
        chances = np.random.default_rng(seed).spawn(connections + 1)
        self._sends = [
            Unreliable(link, drop, chance)
            for link, chance in zip(self._links, chances, strict=False)
        ]
        self._chance = chances[-1]
        self._moments = self._chance.random(len(held)) * (DAY_SECONDS - 1)  # of a day, to record at
        dictionaries: dict[str, bytes] = {}
        models: dict[str, tuple[str, bytes]] = {}
        self._devices = [
            Device(
                MemoryBox(dictionaries, models),
                self._sends[number % connections],
                key,
                rng=SystemRng() if seed is None else SeededRng(seed, number),
            )
            for number in range(len(held))
        ]

    def ask(
        self,
        study: str,
        *,
        days: int = 1,
        pause_seconds: float = 0.0,
        leaving: Mapping[str, float] | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        progress: Callable[[str, float], None] | None = None,
    ) -> FleetSummary:
        """Let every device agree to the study, record what it holds and send it.

        Values are dealt out over the days, each device's from another day on. In a local study each
        device takes part on as many days as the one that holds the most values, so that what is
        sent does not depend on what a device holds. `pause_seconds` is
        waited between days, for the collector to open the next round. A study that asks the same
        devices again is answered again. Where the fleet was told which devices `come` to which
        cohort, those of each answer on one day, and the fleet waits for the task of the next. In
        masked rounds the share `leaving` of the devices says nothing more from a phase on;
        `patience_seconds` is how long the next round of a study that is to have more is waited for,
        and a collector that is away.
        """
        if self._come is not None and days != 1:
            raise SpecError(f"devices that come by cohort come on one day; got {days} days")
        started = time.perf_counter()
        tell = progress or (lambda stage, share: None)
        today = int(time.time() // DAY_SECONDS)
        offer: Offer | None = self._offer(study, today, SOON_SECONDS)
        assert offer is not None  # else `_offer` has raised
        outcomes, total, answered = Counter[str](), SendSummary(), set[str]()
        asked: Counter[int] = Counter()  # tasks that each device was asked
        if offer.task.is_masked:
            outcomes = self._in_rounds(study, leaving or {}, patience_seconds, tell)
            total = SendSummary(delivered=outcomes[RoundOutcome.DONE])
            return self._summary(days, outcomes, total, time.perf_counter() - started)
        while offer is not None:
            coming = self._coming(offer.task.cohort)
            told, sending, today = self._by_days(
                offer, coming, today, days, pause_seconds, answered, tell
            )
            outcomes += told
            total = (replace(total, pending=0) if self._come is None else total) + sending
            asked.update(coming)
            offer = None if self._is_last(asked, offer) else self._another(study, today, answered)
        return self._summary(days, outcomes, total, time.perf_counter() - started)

    def _by_days(
        self,
        offer: Offer,
        coming: Collection[int],
        today: int,
        days: int,
        pause_seconds: float,
        answered: set[str],
        tell: Callable[[str, float], None],
    ) -> tuple[Counter[str], SendSummary, int]:
        """Record and send, day by day; the day after the last. `answered` gets the tasks' ids."""
        study = offer.study
        last = days - (-offer.delay_seconds // DAY_SECONDS)  # when the last record is due
        outcomes: Counter[str] = Counter()
        total, tries, refused = SendSummary(), 0, 0
        for day in range(last + _TRIES):
            if day > last and not total.pending:
                break
            tell(f"day {day + 1}", min(day / (last + 1), 1.0))
            if 0 < day < days:
                time.sleep(pause_seconds)
                offer = self._offer(study, today + day, PATIENCE_SECONDS)
            answered.add(offer.task.id)
            if day > last and self._refused() > refused:  # busy, or away: give it time, ever more
                time.sleep(min(0.05 * 2**tries, _LONGEST_PAUSE))
                tries += 1
            refused = self._refused()
            total = replace(total, pending=0)
            for told, sending in self._everybody(offer, coming, today, day, days):
                outcomes += told
                total += sending
        return outcomes, total, today + day + 1

    def _another(self, study: str, date: int, answered: set[str]) -> Offer | None:
        """The next task of a study, if there is one; it may take a while to be opened."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            offers = _patiently(lambda: self._devices[0].offers(date * DAY_SECONDS))
            for offered in offers:
                if offered.offer.study == study and offered.offer.task.id not in answered:
                    return offered.offer
            time.sleep(0.1)
        return None

    def _in_rounds(
        self,
        study: str,
        rates: Mapping[str, float],
        patience: float,
        tell: Callable[[str, float], None],
    ) -> Counter[str]:
        """Masked rounds, one after another, until the study asks nobody any more."""
        outcomes: Counter[str] = Counter()
        until, gone, rounds = time.monotonic() + patience, set[int](), 0
        answered: set[str] = set()
        asked: Counter[int] = Counter()  # tasks that each device has answered
        refused = ""  # the task that nobody can answer any more
        seen: list[str] = []  # tasks, in the order in which they were offered
        while time.monotonic() < until:
            asked_at = time.monotonic()
            offer = self._offered_round(study, patience)
            if (away := time.monotonic() - asked_at) > AWAY_SECONDS:  # it was: wait as long again
                until += away
            is_over = offer is not None and offer.model is not None and offer.task.id in answered
            if offer is None or offer.task.id == refused or is_over:
                time.sleep(0.1)
                continue
            coming = self._coming(offer.task.cohort)
            numbers = [number for number in coming if number not in gone]
            travellers = {
                number: Traveller(part, leaves_in(rates, self._chance))
                for number in numbers
                if isinstance(part := self._part(study, number, patience), RoundClient)
            }
            refused = "" if travellers else offer.task.id
            travellers = _of_first_task(travellers, offer.task.id, seen)
            if travellers:
                rounds += 1
                tell(f"round {rounds}", 0.5)
                links = len(self._links)
                ended = travel(
                    [
                        (send, [each for k, each in travellers.items() if k % links == link])
                        for link, send in enumerate(self._sends)
                    ]
                )
                outcomes += ended
                if ended.keys() <= {RoundOutcome.WAITING, RoundOutcome.UNREACHABLE, LEFT}:
                    break  # a cohort that is never complete, or a collector that is gone
                gone |= {number for number, each in travellers.items() if each.has_left}
                done = {
                    number: each.part.offer
                    for number, each in travellers.items()
                    if each.outcome == RoundOutcome.DONE
                }
                answered |= {offer.task.id for offer in done.values()}
                asked.update(done.keys())
                models = [each.model for each in done.values() if each.model is not None]
                if any(model.round == model.rounds for model in models):
                    break
                is_last = all(self._is_last(asked, offer, gone) for offer in done.values())
                is_last &= all(each.part.offer.model is None for each in travellers.values())
                until = time.monotonic() + (ROUND_SECONDS if is_last else patience)
        return outcomes

    def _offered_round(self, study: str, patience: float) -> Offer | None:
        """What the study asks now."""
        device, now = self._devices[0], time.time()
        offers = [offered.offer for offered in _patiently(lambda: device.offers(now), patience)]
        return next((offer for offer in offers if offer.study == study), None)

    def _is_last(
        self, asked: Counter[int], offer: Offer, gone: Collection[int] = frozenset()
    ) -> bool:
        """Whether each device, but for those that are gone, has had all tasks that it may have."""
        here = (number for number in range(len(self._devices)) if number not in gone)
        return all(asked[number] >= offer.contributions for number in here)

    def _coming(self, cohort: str) -> Collection[int]:
        return range(len(self._devices)) if self._come is None else self._come(cohort)

    def _part(self, study: str, number: int, patience: float) -> RoundClient | Outcome | SkipReason:
        """A device's part in a round that it can take part in now."""
        device, now = self._devices[number], time.time()

        def part() -> RoundClient | Outcome | SkipReason:
            for offered in device.offers(now):
                if offered.offer.study == study and offered.consent == "none":
                    device.consent(study)
            return device.part(study, self._held[number], now)

        return _patiently(part, patience)

    def close(self) -> None:
        for link in self._links:
            close = getattr(link, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> NetworkFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _everybody(
        self, offer: Offer, coming: Collection[int], today: int, day: int, days: int
    ) -> Iterator[tuple[Counter[str], SendSummary]]:
        """A day of these devices, those of one connection after one another."""
        links = len(self._links)

        def drive(link: int) -> list[tuple[Counter[str], SendSummary]]:
            mine = [number for number in coming if number % links == link]
            return [self._live(number, offer, today + day, day, days) for number in mine]

        with ThreadPoolExecutor(links) as threads:
            for lives in threads.map(drive, range(links)):
                yield from lives

    def _live(
        self, number: int, offer: Offer, date: int, day: int, days: int
    ) -> tuple[Counter[str], SendSummary]:
        """A day of one device: see what is offered, record what is the day's, send what is due."""
        device, opening = self._devices[number], float(date * DAY_SECONDS)
        outcomes: Counter[str] = Counter()
        if events := self._events(number, offer.task.is_local, day, days):
            for offered in _patiently(lambda: device.offers(opening)):
                if offered.offer.study == offer.study and offered.consent == "none":
                    device.consent(offer.study)
            for value in events:
                moment = opening + float(self._moments[number])
                outcomes[str(device.record(offer.study, value, moment))] += 1
        return outcomes, device.send(opening + DAY_SECONDS - 1)

    def _events(self, number: int, is_local: bool, day: int, days: int) -> Sequence[str | Held]:
        """What a device records on a day: a trusted collector gets all it holds in one table, and
        nothing at all, `()`, is a value where nobody is to know how much there is."""
        held: Any = self._held[number]
        if not is_local:
            return [held] if number % days == day else []
        if all((number + place) % days != day for place in range(max(1, self._most))):
            return []
        return [value for place, value in enumerate(held) if (number + place) % days == day] or [()]

    def _offer(self, study: str, date: int, patience: float) -> Offer:
        """The study as it is offered; between two of its tasks there is none for a while."""
        device, until = self._devices[0], time.monotonic() + patience
        while True:
            for offered in _patiently(lambda: device.offers(date * DAY_SECONDS)):
                if offered.offer.study == study:
                    return offered.offer
            if time.monotonic() > until:
                raise ServiceError(
                    f"the collector does not offer {study!r}",
                    hint="; ".join(device.refused) or "use the study's name, not its id",
                )
            time.sleep(0.1)

    def _refused(self) -> int:
        """Uploads that were not taken, whether or not anybody was there."""
        return sum(send.traffic.refused.total() + send.traffic.unanswered for send in self._sends)

    def _summary(
        self, days: int, outcomes: Counter[str], total: SendSummary, seconds: float
    ) -> FleetSummary:
        traffic = [send.traffic for send in self._sends]
        return FleetSummary(
            devices=len(self._devices),
            days=days,
            outcomes=outcomes,
            sent=total.delivered,
            rejected=total.rejected,
            forgotten=total.forgotten,
            unsent=total.pending,
            uploads=sum(each.uploads for each in traffic),
            repeated=sum(each.repeated for each in traffic),
            lost=sum(each.lost for each in traffic),
            refused=sum((each.refused for each in traffic), Counter()),
            seconds=seconds,
        )


def _of_first_task(
    travellers: dict[int, Traveller], offered: str, seen: list[str]
) -> dict[int, Traveller]:
    """Those with the task that was offered first; the others go on after them.

    What is offered may change while devices ask. Were they driven together, some would be told that
    their task is over, and the others wait for a cohort that lacks them.
    """
    ids = [each.part.offer.task.id for each in travellers.values()]
    seen += [task_id for task_id in dict.fromkeys([offered, *ids]) if task_id not in seen]
    first = min(ids, key=seen.index, default="")
    return {k: each for k, each in travellers.items() if each.part.offer.task.id == first}


def _patiently(ask: Callable[[], T], patience: float = PATIENCE_SECONDS) -> T:
    """Ask again while the collector does not answer, for a while."""
    until = time.monotonic() + patience
    while True:
        try:
            return ask()
        except ServiceError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


PHASES = ("enrol", "share", "mask", "ack", "unmask")
ROUND_PATIENCE_SECONDS = 60.0  # for a collector that does not answer
IDLE_SECONDS = 300.0  # for anything to happen in a round, or for one to begin
LEFT = "left"  # the outcome of who left on purpose
_WAIT_SECONDS = 2  # that one device waits for the others of its connection
_PAUSE_SECONDS = 0.05  # before a collector that was away is asked again


@dataclass(slots=True)
class Traveller:
    """A device on its way through a round. It says nothing from the phase `leaves` on."""

    part: RoundClient
    leaves: str | None = None
    not_before: float = field(default=0.0, repr=False)

    @property
    def has_left(self) -> bool:
        return self.part.phase == self.leaves

    @property
    def outcome(self) -> str | None:
        return LEFT if self.has_left else self.part.outcome


def leaves_in(rates: Mapping[str, float], chance: np.random.Generator) -> str | None:
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
    patience_seconds: float = ROUND_PATIENCE_SECONDS,
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
            ended[RoundOutcome.UNREACHABLE] += len(under_way)
            return ended
        if not heard:
            time.sleep(_PAUSE_SECONDS)
        idle = not went_on
        if went_on:
            moved = time.monotonic()
        elif time.monotonic() - moved > idle_seconds:
            ended[RoundOutcome.WAITING] += len(under_way)
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
        further = part.receive(send(asked.method, asked.path, asked.body, asked.headers))
        if not further:
            traveller.not_before = time.monotonic() + part.retry_after_seconds
            break
        went_on, wait_seconds = True, 0
    return went_on

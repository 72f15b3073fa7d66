"""Many synthetic devices, each a real `device.Device`, that answer a collector over real HTTP.

Time is simulated, so that days pass at once: a device records on its day and sends its records when
they are due. Only the collector's response times are real.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
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
from sfumato.device.offers import WRONG_SIGNATURE, Offer
from sfumato.device.outbox import DAY_SECONDS, Outcome
from sfumato.errors import ImpossibleError, ServiceError, SpecError
from sfumato.flow.model_terms import Train
from sfumato.privacy import SeededRng, SystemRng
from sfumato.simulation.population import Population

Holding: TypeAlias = "Sequence[str] | npt.NDArray[np.floating] | Train"
"""The data of a device: items, or a vector, or a function that computes its update of a model."""

T = TypeVar("T")

STUDY_SECONDS = 3.0  # how long to wait for the offer of a new study
ROUND_SECONDS = 3.0  # how long to wait for another masked round after the last expected one
TIMEOUT_SECONDS = 30.0  # how long to wait for the next task, or for an absent collector
OUTAGE_SECONDS = 1.0  # a longer response time means that the collector was away
_TRIES = 40  # to send the remaining records at the end
_LONGEST_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class Traffic:
    """The uploads of one connection, by outcome."""

    uploads: int = 0
    repeated: int = 0  # deliberately sent twice
    lost: int = 0  # with an answer that was deliberately dropped
    refused: Counter[int] = field(default_factory=Counter)  # by status
    unanswered: int = 0  # the collector was away


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSummary:
    """The records and uploads of a fleet, by outcome."""

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
    """A connection that repeats uploads and loses answers at a given rate."""

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
        is_repeated, is_lost = self._chance.random(2) < self._rate
        if is_repeated:
            self.traffic.repeated += 1
            answer = self._send(method, path, body, headers)
        self.traffic.uploads += 1
        if answer.status not in (200, 201):
            self.traffic.refused[answer.status] += 1
        elif is_lost:
            self.traffic.lost += 1
            raise ServiceError("this answer was deliberately dropped")
        return answer


def draw_holdings(population: Population, devices: int | None, seed: int | None) -> list[list[str]]:
    """The items of `devices` devices, drawn without replacement from those in the data."""
    count = population.devices if devices is None else devices
    if not 1 <= count <= population.devices:
        raise ImpossibleError(
            f"devices must be 1 to {population.devices:,}, the number in the data; got {count:,}"
        )
    sample = np.sort(np.random.default_rng(seed).permutation(population.devices)[:count])
    population = population.expanded()
    holdings: list[list[str]] = [[] for _ in range(count)]
    place = np.full(population.devices, -1)
    place[sample] = np.arange(count)
    start = 0
    for chunk in population.chunks:
        rows = np.arange(start, start + len(chunk))
        owners = place[rows if population.owners is None else population.owners[rows]]
        start += len(chunk)
        for row in np.flatnonzero(owners >= 0):
            holdings[owners[row]].append(str(chunk[int(row)].as_py()))
    return holdings


class NetworkFleet:
    """Devices on a few persistent connections, each driven by its own thread."""

    def __init__(
        self,
        server: str,
        key: bytes,
        holdings: Sequence[Holding],
        *,
        drop: float = 0.0,
        seed: int | None = None,
        connections: int = 32,
        ca: Path | None = None,
        allow_plain: bool = False,
        respondents: Callable[[str], Collection[int]] | None = None,
        connect: Callable[[], Send] | None = None,
        passcode: str | None = None,
    ) -> None:
        """`respondents` maps a cohort to the numbers of the devices that answer its task; by
        default, all do. `ca` is a file of root certificates to use instead of the system's.
        `connect` makes a connection to the collector, instead of HTTP to `server`. All devices
        have the `passcode` of the studies that they answer.

        Device k draws from `SeededRng(seed, k)`, as in `simulate` with `protocol`, so that the same
        devices in the same cohorts send the same tables.
        """
        self._holdings, self._respondents = holdings, respondents
        self._passcode = passcode
        self._most = max((len(each) for each in holdings if not callable(each)), default=0)
        self._links: list[Send] = [
            Http(server, ca=ca, allow_plain=allow_plain) if connect is None else connect()
            for _ in range(connections)
        ]
        chances = np.random.default_rng(seed).spawn(connections + 1)
        self._sends = [
            Unreliable(link, drop, chance)
            for link, chance in zip(self._links, chances, strict=False)
        ]
        self._chance = chances[-1]
        self._moments = self._chance.random(len(holdings)) * (
            DAY_SECONDS - 1
        )  # to record, in a day
        dictionaries: dict[str, bytes] = {}
        models: dict[str, tuple[str, bytes]] = {}
        self._devices = [
            Device(
                MemoryBox(dictionaries, models),
                self._sends[number % connections],
                key,
                rng=SystemRng() if seed is None else SeededRng(seed, number),
            )
            for number in range(len(holdings))
        ]

    def ask(
        self,
        study: str,
        *,
        days: int = 1,
        pause_seconds: float = 0.0,
        dropout_rates: Mapping[str, float] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        progress: Callable[[str, float], None] | None = None,
    ) -> FleetSummary:
        """Let every device consent to the study, record its values and send them.

        Values are spread over the days, starting with a different day for each device. In a local
        study every device takes part on as many days as the one with the most values, so that what
        is sent does not depend on its data. The fleet pauses for `pause_seconds` between days, so
        that the collector can open the next round. If a study asks the same devices again, they
        answer again. If the fleet has `respondents`, those of a cohort answer on one day, and the
        fleet waits for the task of the next cohort. In masked rounds the share `dropout_rates` of
        the devices drops out in a phase; `timeout_seconds` limits the wait for the next round of an
        unfinished study, and for an absent collector. An address where nothing listens at the start
        is an error at once.
        """
        if self._respondents is not None and days != 1:
            raise SpecError(f"a fleet with respondents by cohort takes one day; got {days} days")
        started = time.perf_counter()
        report = progress or (lambda stage, share: None)
        if self._passcode is not None:
            for device in self._devices:
                device.set_passcode(study, self._passcode)
        today = int(time.time() // DAY_SECONDS)
        self._connect_first(today)
        offer: Offer | None = self._offer(study, today, STUDY_SECONDS)
        assert offer is not None  # otherwise `_offer` raises
        outcomes, total, task_ids = Counter[str](), SendSummary(), set[str]()
        task_counts: Counter[int] = Counter()  # by device
        if offer.task.is_masked:
            outcomes = self._in_rounds(study, dropout_rates or {}, timeout_seconds, report)
            total = SendSummary(delivered=outcomes[RoundOutcome.DONE])
            return self._summary(days, outcomes, total, time.perf_counter() - started)
        if dropout_rates:
            raise SpecError(
                "dropout rates (--leave) are for studies with masked rounds; this one has none",
                hint="leave them out; --drop loses answers",
            )
        while offer is not None:
            numbers = self._respondents_of(offer.task.cohort)
            results, sending, today = self._by_days(
                offer, numbers, today, days, pause_seconds, task_ids, report
            )
            outcomes += results
            total = (replace(total, pending=0) if self._respondents is None else total) + sending
            task_counts.update(numbers)
            is_last = self._is_last(task_counts, offer)
            offer = None if is_last else self._next_offer(study, today, task_ids)
        return self._summary(days, outcomes, total, time.perf_counter() - started)

    def _by_days(
        self,
        offer: Offer,
        numbers: Collection[int],
        today: int,
        days: int,
        pause_seconds: float,
        task_ids: set[str],
        report: Callable[[str, float], None],
    ) -> tuple[Counter[str], SendSummary, int]:
        """Record and send day by day, add the tasks to `task_ids`, and return the outcomes and the
        day after the last."""
        study = offer.study
        last = days - (-offer.delay_seconds // DAY_SECONDS)  # day on which the last record is due
        outcomes: Counter[str] = Counter()
        total, tries, refused = SendSummary(), 0, 0
        for day in range(last + _TRIES):
            if day > last and not total.pending:
                break
            stage = f"day {day + 1}" if day < days else f"day {day + 1}, sending what is due"
            report_day = partial(_report_day, report, stage, day, last + 1)
            report_day(0.0)
            if 0 < day < days:
                time.sleep(pause_seconds)
                offer = self._offer(study, today + day, TIMEOUT_SECONDS)
            task_ids.add(offer.task.id)
            if day > last and self._refused() > refused:  # the collector is busy or away: back off
                time.sleep(min(0.05 * 2**tries, _LONGEST_PAUSE_SECONDS))
                tries += 1
            refused = self._refused()
            total = replace(total, pending=0)
            for results, sending in self._all_devices(offer, numbers, today, day, days, report_day):
                outcomes += results
                total += sending
        return outcomes, total, today + day + 1

    def _next_offer(self, study: str, date: int, task_ids: set[str]) -> Offer | None:
        """The offer of a new task, if there is one; it may take a while to open."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < until:
            offer = self._current_offer(study, date * DAY_SECONDS)
            if offer is not None and offer.task.id not in task_ids:
                return offer
            time.sleep(0.1)
        return None

    def _in_rounds(
        self,
        study: str,
        rates: Mapping[str, float],
        timeout: float,
        report: Callable[[str, float], None],
    ) -> Counter[str]:
        """Take part in masked rounds, one after another, until the study is over."""
        outcomes: Counter[str] = Counter()
        until, dropouts, rounds = time.monotonic() + timeout, set[int](), 0
        task_ids: set[str] = set()  # tasks with answers
        task_counts: Counter[int] = Counter()  # answers by device
        refused = ""  # a task that no device can answer any more
        order: list[str] = []  # tasks in the order of their offers
        while time.monotonic() < until:
            start = time.monotonic()
            offer = self._current_offer(study, time.time(), timeout)
            if (seconds := time.monotonic() - start) > OUTAGE_SECONDS:  # the collector was away
                until += seconds
            is_over = offer is not None and offer.model is not None and offer.task.id in task_ids
            if offer is None or offer.task.id == refused or is_over:
                time.sleep(0.1)
                continue
            respondents = self._respondents_of(offer.task.cohort)
            sessions = dict[int, RoundSession]()
            for place, number in enumerate(respondents):
                report(f"joining round {rounds + 1}", place / len(respondents))
                if number in dropouts:
                    continue
                part = self._part(study, number, timeout)
                if isinstance(part, RoundClient):
                    dropout_phase = draw_dropout_phase(rates, self._chance)
                    sessions[number] = RoundSession(part, dropout_phase)
            refused = "" if sessions else offer.task.id
            sessions = sessions_of_first_task(sessions, offer.task.id, order)
            if sessions:
                rounds += 1
                stage, links = f"round {rounds}", len(self._links)
                if leaving := sum(each.dropout_phase is not None for each in sessions.values()):
                    stage += (
                        f", {leaving:,} devices leave: the collector waits for them until its "
                        "phase_seconds are over"
                    )
                results = drive_sessions(
                    [
                        (send, [each for k, each in sessions.items() if k % links == link])
                        for link, send in enumerate(self._sends)
                    ],
                    progress=partial(report, stage),
                )
                outcomes += results
                if results.keys() <= {RoundOutcome.WAITING, RoundOutcome.UNREACHABLE, DROPPED_OUT}:
                    break  # the cohort is never complete, or the collector is gone
                dropouts |= {number for number, each in sessions.items() if each.has_dropped_out}
                done = {
                    number: each.part.offer
                    for number, each in sessions.items()
                    if each.outcome == RoundOutcome.DONE
                }
                task_ids |= {offer.task.id for offer in done.values()}
                task_counts.update(done.keys())
                models = [each.model for each in done.values() if each.model is not None]
                if any(model.round == model.rounds for model in models):
                    break
                offers = done.values()
                is_last = all(self._is_last(task_counts, offer, dropouts) for offer in offers)
                is_last &= all(each.part.offer.model is None for each in sessions.values())
                until = time.monotonic() + (ROUND_SECONDS if is_last else timeout)
        return outcomes

    def _current_offer(
        self, study: str, now: float, timeout: float = TIMEOUT_SECONDS
    ) -> Offer | None:
        """The current offer of a study, if it has one."""
        offers = _retry(lambda: self._devices[0].offers(now), timeout)
        return next((each.offer for each in offers if each.offer.study == study), None)

    def _is_last(
        self, task_counts: Counter[int], offer: Offer, dropouts: Collection[int] = frozenset()
    ) -> bool:
        """Whether all devices, except dropouts, have answered as many tasks as they may."""
        numbers = (number for number in range(len(self._devices)) if number not in dropouts)
        return all(task_counts[number] >= offer.contributions for number in numbers)

    def _respondents_of(self, cohort: str) -> Collection[int]:
        if self._respondents is None:
            return range(len(self._devices))
        return self._respondents(cohort)

    def _part(self, study: str, number: int, timeout: float) -> RoundClient | Outcome | SkipReason:
        """A device's part in the current round of a study, if it can take part."""
        device, now = self._devices[number], time.time()

        def part() -> RoundClient | Outcome | SkipReason:
            _consent(device, study, now)
            return device.part(study, self._holdings[number], now)

        return _retry(part, timeout)

    def close(self) -> None:
        for link in self._links:
            close = getattr(link, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> NetworkFleet:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _all_devices(
        self,
        offer: Offer,
        numbers: Collection[int],
        today: int,
        day: int,
        days: int,
        progress: Callable[[float], None],
    ) -> Iterator[tuple[Counter[str], SendSummary]]:
        """Run one day of these devices, in one thread per connection. `progress` gets the share of
        the first connection's devices that are done."""
        links = len(self._links)

        def drive(
            link: int, report: Callable[[float], None]
        ) -> list[tuple[Counter[str], SendSummary]]:
            mine, results = [number for number in numbers if number % links == link], []
            for place, number in enumerate(mine):
                report(place / len(mine))
                results.append(self._run_day(number, offer, today + day, day, days))
            return results

        with ThreadPoolExecutor(links) as threads:
            for results in threads.map(drive, range(links), chain([progress], repeat(_silent))):
                yield from results

    def _run_day(
        self, number: int, offer: Offer, date: int, day: int, days: int
    ) -> tuple[Counter[str], SendSummary]:
        """Run one day of a device: get the offers, record the day's values, send due records."""
        device, opening = self._devices[number], float(date * DAY_SECONDS)
        outcomes: Counter[str] = Counter()
        if events := self._events(number, offer.task.is_local, day, days):
            _retry(lambda: _consent(device, offer.study, opening))
            for value in events:
                moment = opening + float(self._moments[number])
                outcomes[str(device.record(offer.study, value, moment))] += 1
        return outcomes, device.send(opening + DAY_SECONDS - 1)

    def _events(self, number: int, is_local: bool, day: int, days: int) -> Sequence[str | Holding]:
        """The values that a device records on a day. A trusted collector gets all of them in one
        table; in a local study `()` stands for no value, so that their number stays private."""
        holding: Any = self._holdings[number]
        if not is_local:
            return [holding] if number % days == day else []
        if all((number + place) % days != day for place in range(max(1, self._most))):
            return []
        values = [value for k, value in enumerate(holding) if (number + k) % days == day]
        return values or [()]

    def _offer(self, study: str, date: int, timeout: float) -> Offer:
        """The offer of a study; between two of its tasks there may be none for a while."""
        until = time.monotonic() + timeout
        while (offer := self._current_offer(study, date * DAY_SECONDS)) is None:
            if time.monotonic() > until:
                raise self._not_offered(study)
            time.sleep(0.1)
        return offer

    def _not_offered(self, study: str) -> ServiceError:
        """The error for a study that the collector does not offer."""
        device = self._devices[0]
        refused = dict.fromkeys(device.refused)
        if set(refused) == {WRONG_SIGNATURE}:
            return ServiceError(
                "the key (--key) must be this collector's; it has signed none of the offers",
                hint="sfumato key show prints the collector's public key",
            )
        names = ", ".join(repr(each.offer.study) for each in device.known_offers())
        return ServiceError(
            f"the collector does not offer {study!r}: it is not open any more, or has another name",
            hint="; ".join(refused) or (f"it offers {names}" if names else "no study is open"),
        )

    def _connect_first(self, date: int) -> None:
        """Make the first request, and raise ServiceError at once if nothing listens there."""
        try:
            self._devices[0].offers(date * DAY_SECONDS)
        except ServiceError as problem:  # any other one may be over when it is repeated
            if isinstance(problem.__cause__, ConnectionRefusedError | socket.gaierror):
                raise

    def _refused(self) -> int:
        """The number of uploads that were refused or not answered."""
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


def sessions_of_first_task(
    sessions: dict[int, RoundSession], task_id: str, order: list[str]
) -> dict[int, RoundSession]:
    """The sessions of the task that was offered first; the others continue after them. `task_id` is
    the current task, and `order` gets all tasks in the order of their offers.

    The offer may change while devices ask for it. If they were driven together, some would learn
    that their task is over, and the others would wait for a cohort without them.
    """
    ids = [each.part.offer.task.id for each in sessions.values()]
    order += [name for name in dict.fromkeys([task_id, *ids]) if name not in order]
    first = min(ids, key=order.index, default="")
    return {k: each for k, each in sessions.items() if each.part.offer.task.id == first}


def _consent(device: Device, study: str, now: float) -> None:
    """Fetch the offers, and agree to the study, if the device has not before."""
    for offered in device.offers(now):
        if offered.offer.study == study and offered.consent == "none":
            device.consent(study)


def _retry(request: Callable[[], T], timeout: float = TIMEOUT_SECONDS) -> T:
    """Repeat a request until the collector answers, for at most `timeout` seconds."""
    until = time.monotonic() + timeout
    while True:
        try:
            return request()
        except ServiceError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


PHASES = ("enrol", "share", "mask", "ack", "unmask")
ROUND_TIMEOUT_SECONDS = 60.0  # how long to wait for a collector that does not answer
IDLE_SECONDS = 300.0  # how long to wait for progress in a round, or for its start
DROPPED_OUT = "left"  # the outcome of a device that dropped out deliberately
_WAIT_SECONDS = 2  # how long one device waits on behalf of its connection
_PAUSE_SECONDS = 0.05  # between requests to an absent collector


@dataclass(slots=True)
class RoundSession:
    """A device in a masked round. It sends nothing from its `dropout_phase` on."""

    part: RoundClient
    dropout_phase: str | None = None
    not_before: float = field(default=0.0, repr=False)

    @property
    def has_dropped_out(self) -> bool:
        return self.part.phase == self.dropout_phase

    @property
    def progress(self) -> float:
        """The share of the round's phases that are behind this device."""
        if self.outcome is not None:
            return 1.0
        phase = self.part.phase
        return (PHASES.index(phase) + 1) / (len(PHASES) + 1) if phase in PHASES else 0.0

    @property
    def outcome(self) -> str | None:
        return DROPPED_OUT if self.has_dropped_out else self.part.outcome


def draw_dropout_phase(rates: Mapping[str, float], chance: np.random.Generator) -> str | None:
    """Draw the phase in which a device drops out, by the rate of each; None if it stays."""
    if unknown := rates.keys() - set(PHASES):
        raise SpecError(f"a phase must be one of {', '.join(PHASES)}; got {sorted(unknown)[0]}")
    for phase in PHASES:
        if chance.random() < rates.get(phase, 0.0):
            return phase
    return None


def drive_sessions(
    groups: Sequence[tuple[Send, Sequence[RoundSession]]],
    progress: Callable[[float], None] | None = None,
) -> Counter[str]:
    """Drive sessions to their end, in one thread per connection, and count their outcomes.

    `progress` gets how far those of the first connection are, between 0 and 1.

    They give up if the collector does not answer for `ROUND_TIMEOUT_SECONDS`, or has no news for
    any device of a connection for `IDLE_SECONDS`, since a cohort may never be complete.
    """
    reports = chain([progress or _silent], repeat(_silent))
    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        return sum(threads.map(_drive, groups, reports), Counter[str]())


def _report_day(
    report: Callable[[str, float], None], stage: str, day: int, days: int, share: float
) -> None:
    """Report the share of a day of so many; the remaining records may take more days."""
    report(stage, min((day + share) / days, 1.0))


def _silent(share: float) -> None:
    """Report nothing."""


def _drive(
    group: tuple[Send, Sequence[RoundSession]], report: Callable[[float], None]
) -> Counter[str]:
    (send, sessions), outcomes = group, Counter[str]()
    active, is_idle = list(sessions), False
    until, last_progress = time.monotonic() + ROUND_TIMEOUT_SECONDS, time.monotonic()
    while active:
        report(sum(session.progress for session in sessions) / len(sessions))
        has_progress = has_answer = False
        for place, session in enumerate(active):
            wait = _WAIT_SECONDS if is_idle and place == 0 else 0
            try:
                has_progress = _advance(send, session, wait) or has_progress
                has_answer = True
            except ServiceError:
                has_progress = True  # unknown: ask again at once
                break  # the next session would not reach the collector either
        if has_answer:
            until = time.monotonic() + ROUND_TIMEOUT_SECONDS
        elif time.monotonic() > until:
            outcomes[RoundOutcome.UNREACHABLE] += len(active)
            return outcomes
        if not has_answer:
            time.sleep(_PAUSE_SECONDS)
        is_idle = not has_progress
        if has_progress:
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > IDLE_SECONDS:
            outcomes[RoundOutcome.WAITING] += len(active)
            return outcomes
        for session in active:
            if session.outcome is not None:
                outcomes[session.outcome] += 1
        active = [session for session in active if session.outcome is None]
        # Devices in a round get an answer sooner than devices that wait for one.
        active.sort(key=lambda session: session.part.phase == "wait")
    return outcomes


def _advance(send: Send, session: RoundSession, wait_seconds: int) -> bool:
    """Exchange messages until the session has to wait; return whether there was progress."""
    part, has_progress = session.part, False
    while session.outcome is None and time.monotonic() >= session.not_before:
        request = part.request(wait_seconds)
        if not part.receive(send(request.method, request.path, request.body, request.headers)):
            session.not_before = time.monotonic() + part.retry_after_seconds
            break
        has_progress, wait_seconds = True, 0
    return has_progress

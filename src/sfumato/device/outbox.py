"""What a device keeps, sends and never keeps under local privacy: the rules, without any I/O.

An event is privatised at once, waits with others in an `Outbox`, and leaves at a random time after
its day; of a busy day only some leave. Clock and randomness are arguments. The app keeps the state
(`to_json`) and moves the bytes, in this order: call, save the state, act on what was returned.

    >>> from sfumato.privacy import SeededRng
    >>> rule = Rule(study="Popular emoji", task_id="5f" * 32, epsilon=4.0, daily_reports=2,
    ...             delay_seconds=3600)
    >>> outbox, rng = Outbox(), SeededRng(1)
    >>> outbox.record(rule, lambda rng: b"privatised", now=1_000.0, rng=rng)
    <Outcome.NO_CONSENT: 'no_consent'>
    >>> outbox.consent("Popular emoji")
    >>> outbox.record(rule, lambda rng: b"privatised", now=1_000.0, rng=rng)
    <Outcome.KEPT: 'kept'>
    >>> outbox.due(now=86_399.0)  # not before its day is over
    []
    >>> outbox.due(now=86_400.0 + 3_600.0)
    [Outgoing(task=5f5f5f5f…, 10 bytes)]
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import date, timedelta
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal

from sfumato.errors import SpecError
from sfumato.privacy import Rng
from sfumato.spec import canonical, from_json, require, spec, to_json

State = Literal["sent", "on the way", "waiting"]

VERSION = 1  # of the state's JSON
DAY_SECONDS = 86_400
LONGEST_DELAY = 366 * DAY_SECONDS
_END_OF_TIME = 253_402_300_800  # the year 10000; a clock in milliseconds is beyond it
_LOT_BITS = 53  # what JSON keeps exact
_LAST_LOT = (1 << _LOT_BITS) - 1  # of a record that says nothing: any event's goes before it
_STATES: tuple[State, ...] = ("sent", "on the way", "waiting")
# What data of another shape raises:
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_ROUNDING = 1e-9  # a cap of 0.3 holds three times 0.1


@spec("device_rule")
class Rule:
    """What a device does for one study.

    A record waits until the day of its event is over and then for a random time, uniform in
    [0, delay_seconds). Counted from the event, the same wait would tell when the event was, to
    within the delay, and a day's first records would be gone before its last could compete with
    them. Counted from the end of the day it tells the day at most; a delay of some days hides that.
    """

    study: str  # the name that its user knows; consent, limits and the ledger go by it
    task_id: str
    epsilon: float | None  # of one record: what `privatise` promises; None: the collector can read
    # it, and gets no more than `lifetime_reports` of a device and study
    daily_reports: int  # the most records of one day that are ever sent
    delay_seconds: int
    lifetime_epsilon: float | None = None  # beyond it this device sends nothing more for the study
    lifetime_reports: int = 1  # the same, for records that the collector can read

    def check(self) -> None:
        _check_study(self.study)
        check_hex(self.task_id, 64, "task_id")
        require(
            self.epsilon is None or self.epsilon > 0,
            f"epsilon must be above 0; got {self.epsilon}",
        )
        require(
            self.daily_reports >= 1,
            f"daily_reports must be at least 1; got {self.daily_reports}; "
            "to send nothing, do not ask for consent",
        )
        require(
            1 <= self.delay_seconds <= LONGEST_DELAY,
            f"delay_seconds must be 1 to {LONGEST_DELAY}; got {self.delay_seconds}",
        )
        limit = self.lifetime_epsilon
        require(
            limit is None or (self.epsilon is not None and limit >= self.epsilon),
            f"lifetime_epsilon must allow one record of epsilon {self.epsilon}; "
            f"got {limit}; use None for no limit",
        )
        require(
            self.lifetime_reports >= 1,
            f"lifetime_reports must be at least 1; got {self.lifetime_reports}",
        )


class Outcome(StrEnum):
    """What became of an event. None of these is an error."""

    KEPT = "kept"  # its record waits
    REPLACED_ANOTHER = "replaced_another"  # its record waits, in place of another of the day
    THINNED_OUT = "thinned_out"  # the day has enough records, and the lot fell on others
    NO_CONSENT = "no_consent"  # nothing was privatised
    DAY_OVER = "day_over"  # the day's records went out before, or are for another of its tasks
    LIFETIME_SPENT = "lifetime_spent"  # one more record is more than the rule ever allows


@dataclass(frozen=True, slots=True, repr=False)
class Outgoing:
    """A record to send: `data` for the task. `id` is for `Outbox.sent` only, not to be sent."""

    id: str
    task_id: str
    data: bytes

    def __repr__(self) -> str:  # never the record
        return f"Outgoing(task={self.task_id[:8]}…, {len(self.data)} bytes)"


@dataclass(frozen=True, slots=True, repr=False)
class LogEntry:
    """What a user can look up. `str` says it in words; `records` has (task id, bytes) of each."""

    state: State
    study: str
    day: int | None  # on which it was sent, in days since 1970-01-01 UTC
    records: tuple[tuple[str, bytes], ...]
    epsilon: float  # of all of them together; infinite if the collector can read them

    @property
    def size(self) -> int:
        """How many bytes the records have in all."""
        return sum(len(data) for _, data in self.records)

    def __str__(self) -> str:
        number = len(self.records)
        what = f"{number} record{'s' * (number != 1)} ({self.size} bytes) for {self.study}"
        if math.isinf(self.epsilon):
            what += ", which the collector can read"
        if self.day is not None:
            when = date(1970, 1, 1) + timedelta(days=self.day)
            return f"{when}: sent {what}, at a privacy cost of epsilon {self.epsilon:g}"
        if self.state == "on the way":
            return f"on the way: {what}, counted as epsilon {self.epsilon:g}, receipt not confirmed"
        return f"waiting: {what}, not sent; would cost epsilon {self.epsilon:g}"

    def __repr__(self) -> str:  # never the records
        return f"LogEntry({self})"


@dataclass(slots=True, repr=False, eq=False)
class _Waiting:
    """A privatised record that is not known to have arrived."""

    id: str  # random; also the order in which records are stored and sent
    rule: Rule
    day: int
    limit: int  # the least daily_reports that the study had on this day
    due: int
    lot: int  # the lowest lots of a day stay; 0 once the day is over, as lots tell how busy it was
    handed_out: bool
    data: bytes

    @property
    def study_day(self) -> tuple[str, int]:
        """What it competes in."""
        return self.rule.study, self.day


@dataclass(frozen=True, slots=True, repr=False)
class _Sent:
    """A record that arrived."""

    day: int  # on which that was
    study: str
    task_id: str
    data: bytes
    epsilon: float | None

    @property
    def place(self) -> tuple[int, str, str, bytes, float]:
        """Where it stands in the log."""
        return self.day, self.study, self.task_id, self.data, _cost(self.epsilon)


class Outbox:
    """The records of one device, its user's consent, and the device's own ledger.

    Claim: to whoever sees everything that leaves, and whatever else they know, an event's value
        is epsilon-indistinguishable from any other value; all values of one day and study
        together from any others by at most the sum over the day's records that left, of which
        there are at most `daily_reports`; all values ever by `spent()`. On a day that was begun
        with `take_part` that holds of "no event", too: how many records leave does not depend on
        events. None of it holds of records whose rule has no epsilon: the collector can read
        those, and `spent` is infinite.
    Proof: basic composition over the records that leave. Which of them leave, when and in what
        order depends on lots and clock alone; dropping privatised records is post-processing. It
        is not amplification: what is sent was privatised at epsilon and costs epsilon. An event
        more, on a day that was begun, changes what one of its records is made of, and no more.
    Assumes: `privatise` is epsilon-locally private for any two values, "none" among them; `rng` is
        cryptographic; the state is saved after each call and before what it returned is used, and
        an older state is never brought back. Consent is not hidden, nor are the days that a device
        takes part on; how many records leave, on a day without `take_part`, is not either.
    """

    def __init__(self, *, keep_sent_days: int = 90) -> None:
        """`keep_sent_days`: how long the bytes that were sent stay in the log; 0 keeps none."""
        self._consented: set[str] = set()
        self._waiting: list[_Waiting] = []  # by id, so that not even the order of events is kept
        self._charged: dict[tuple[str, int, float | None], int] = {}  # study, day, epsilon: records
        self._answered: set[str] = set()  # tasks whose collector can read the record: one each
        self._sent: list[_Sent] = []
        self._keep_sent_days = 0
        self.keep_sent(keep_sent_days)

    def consent(self, study: str) -> None:
        """The user opts in to this study. Before that nothing is privatised, kept or sent."""
        _check_study(study)
        self._consented.add(study)

    def withdraw(self, study: str) -> None:
        """The user opts out: consent and everything unsent are gone; ledger and log stay."""
        _check_study(study)
        self._consented.discard(study)
        self.delete(study)

    @property
    def consented(self) -> tuple[str, ...]:
        """The studies that the user has opted in to."""
        return tuple(sorted(self._consented))

    def take_part(
        self, rule: Rule, privatise: Callable[[Rng], bytes], *, now: float, rng: Rng
    ) -> Outcome:
        """Fill the day with records that say "none", which `privatise` makes: as many as may leave.

        A record of an event then takes the place of one of these, so that as many leave whatever
        happens on the day. Call it before each `record`, and once on a day without any; what is
        full stays as it is. The first task of a study that has records on a day has all of them:
        for another the day is over.
        """
        _check_event(rule, privatise)
        day = _day_of(now)
        if refused := self._refused(rule, day):
            return refused
        waiting = self._of_day(rule.study, day)
        if any(record.rule.task_id != rule.task_id for record in waiting):
            return Outcome.DAY_OVER
        limit = min([self._affordable(rule), *(record.limit for record in waiting)])
        missing = range(limit - len(waiting))
        fresh = [self._privatised(rule, privatise, day, rng, says_nothing=True) for _ in missing]
        self._keep_lowest([*fresh, *waiting], limit)
        return Outcome.KEPT

    def record(
        self, rule: Rule, privatise: Callable[[Rng], bytes], *, now: float, rng: Rng
    ) -> Outcome:
        """Privatise an event at once, and keep the record if the day has room or the lot says so.

        Of the value nothing is kept but what `privatise` returns, of the time nothing but the day.
        Each of a day's records draws a lot and the lowest `daily_reports` stay, so each is equally
        likely to be among them, whenever it came. If rules of one study differ in their limit,
        the lowest of the day holds.
        """
        _check_event(rule, privatise)
        day = _day_of(now)
        if refused := self._refused(rule, day):
            return refused
        fresh = self._privatised(rule, privatise, day, rng)
        rivals = [fresh, *self._of_day(rule.study, day)]
        dropped = self._keep_lowest(rivals, min(rival.limit for rival in rivals))
        if fresh in dropped:
            return Outcome.THINNED_OUT
        replaced = any(record.lot != _LAST_LOT for record in dropped)
        return Outcome.REPLACED_ANOTHER if replaced else Outcome.KEPT

    def due(self, now: float) -> list[Outgoing]:
        """The records to send now, by task and in random order; again and again until `sent`.

        Save the state before sending any. A record is charged when it is first handed out, for
        nobody can tell after a crash whether it left. Its day is over then: no other record of
        that day and study gets in. A record that its study cannot afford any more is deleted.
        """
        self._expire(_day_of(now))
        for record in list(self._waiting):
            if record.handed_out or record.due > now:
                continue
            if self._affords(record.rule):
                self._charge(record)
            else:
                self._waiting.remove(record)
        out = [record for record in self._waiting if record.handed_out]
        out.sort(key=lambda record: record.rule.task_id)  # stable: by id, at random, within a task
        return [Outgoing(record.id, record.rule.task_id, record.data) for record in out]

    def sent(self, ids: Iterable[str], now: float) -> int:
        """These arrived: they move to the log. How many did; ids not waiting here change nothing.

        So an answer that comes twice, or after its record was deleted, does no harm.
        """
        named = set(ids)
        for name in named:
            check_hex(name, 32, "an id")
        day = _day_of(now)
        arrived = [record for record in self._waiting if record.id in named]
        for record in arrived:
            if not record.handed_out:  # only if a state older than its `due` was brought back
                self._charge(record)
            rule = record.rule
            self._sent.append(_Sent(day, rule.study, rule.task_id, record.data, rule.epsilon))
        self._sent.sort(key=lambda sent: sent.place)
        self._expire(day)
        return self._keep(lambda record: record.id not in named)

    def delete(self, study: str | None = None) -> int:
        """Delete everything unsent, of one study or of all; how many records that was.

        What was handed out and not confirmed goes, too: it is not sent again, but it may have
        arrived, so the ledger goes on counting it.
        """
        if study is not None:
            _check_study(study)
        return self._keep(lambda record: study is not None and record.rule.study != study)

    def forget(self, task_id: str) -> int:
        """This task is over: drop its unsent records; how many that was."""
        check_hex(task_id, 64, "task_id")
        return self._keep(lambda record: record.rule.task_id != task_id)

    def keep_sent(self, days: int) -> None:
        """Keep what was sent in the log for so many days from now on. The ledger stays anyway."""
        require(
            type(days) is int and 0 <= days <= 36_600,
            f"keep_sent_days must be a whole number from 0 to 36600; got {days!r}",
        )
        self._keep_sent_days = days

    def log(self) -> list[LogEntry]:
        """What was sent, by day and study; then by study what is on the way, and what waits."""
        rows: list[tuple[tuple[int, int, str], str, bytes, float]] = [
            ((0, sent.day, sent.study), sent.task_id, sent.data, _cost(sent.epsilon))
            for sent in self._sent
        ]
        for record in self._waiting:
            heading = (1 if record.handed_out else 2, 0, record.rule.study)
            rows.append((heading, record.rule.task_id, record.data, _cost(record.rule.epsilon)))
        rows.sort(key=lambda row: row[0])
        entries = []
        for (state, day, study), group in groupby(rows, key=lambda row: row[0]):
            _, tasks, data, epsilons = zip(*group, strict=True)
            entries.append(
                LogEntry(
                    state=_STATES[state],
                    study=study,
                    day=None if state else day,
                    records=tuple(zip(tasks, data, strict=True)),
                    epsilon=math.fsum(epsilons),
                )
            )
        return entries

    def spent(self, study: str | None = None, day: int | None = None) -> float:
        """The epsilon of all records that were ever handed out: of a study, of a day, of both.

        `day` is the day of the events, in days since 1970-01-01 UTC. Nothing resets it: not time,
        nor opting out, nor deleting.
        """
        require(
            (study is None or isinstance(study, str)) and (day is None or type(day) is int),
            f"study must be a name and day a whole number, or None for all; got {study!r}, {day!r}",
        )
        return math.fsum(
            _cost(epsilon) * records
            for (charged_study, charged_day, epsilon), records in self._charged.items()
            if study in (None, charged_study) and day in (None, charged_day)
        )

    def to_json(self) -> str:
        """The whole state. It holds privatised records: keep it as safe as the app's own data."""
        return canonical(
            {
                "version": VERSION,
                "keep_sent_days": self._keep_sent_days,
                "consented": sorted(self._consented),
                "waiting": [_plain(record) for record in self._waiting],
                "charged": [
                    {"study": study, "day": day, "epsilon": epsilon, "records": records}
                    for (study, day, epsilon), records in sorted(
                        self._charged.items(), key=lambda entry: (*entry[0][:2], _cost(entry[0][2]))
                    )
                ],
                "answered": sorted(self._answered),
                "sent": [_plain(sent) for sent in self._sent],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Outbox:
        """The outbox whose state this is; anything that `to_json` does not write is refused."""
        try:
            data = json.loads(text)
            version = data["version"]
        except _UNREADABLE:
            raise SpecError(
                "the state of an outbox must be the JSON object that to_json wrote; got another "
                "text; bring back the one that was saved last"
            ) from None
        require(
            type(version) is int and version == VERSION,
            f"the state of an outbox must have version {VERSION}; got {version!r}; "
            "use the release of sfumato that wrote it",
        )
        try:
            outbox = cls._built(data)
            sound = outbox.to_json() == text and outbox._keeps_its_rules()
        except (*_UNREADABLE, SpecError):
            sound = False  # whatever the reason: its message might show a record
        require(
            sound,
            "the state of an outbox must be what to_json wrote, to the byte; got a changed one; "
            "bring back the one that was saved last",
        )
        return outbox

    @classmethod
    def _built(cls, data: Any) -> Outbox:
        """The state in `data`. If it had another field or type, `to_json` writes another text."""
        outbox = cls(keep_sent_days=data["keep_sent_days"])
        outbox._consented = set(data["consented"])
        for record in data["waiting"]:
            rule, privatised = from_json(canonical(record["rule"])), bytes.fromhex(record["data"])
            outbox._waiting.append(_Waiting(**{**record, "rule": rule, "data": privatised}))
        for entry in data["charged"]:
            key = (str(entry["study"]), int(entry["day"]), _epsilon(entry))
            outbox._charged[key] = int(entry["records"])
        outbox._answered = set(data["answered"])
        for record in data["sent"]:
            privatised = bytes.fromhex(record["data"])
            outbox._sent.append(
                _Sent(**{**record, "epsilon": _epsilon(record), "data": privatised})
            )
        return outbox

    def _keeps_its_rules(self) -> bool:
        """Whether the promises hold of a state that was read: it could have been edited."""
        for study in self._consented:
            _check_study(study)
        for record in self._waiting:
            check_hex(record.id, 32, "an id")
        for task_id in self._answered:
            check_hex(task_id, 64, "task_id")
        ids = [record.id for record in self._waiting]
        days = Counter(record.study_day for record in self._waiting)
        handed_out = Counter(
            (*record.study_day, record.rule.epsilon)
            for record in self._waiting
            if record.handed_out
        )
        return (
            all(map(_is_well_typed, self._waiting))
            and all(map(_is_well_typed, self._sent))
            and ids == sorted(set(ids))
            and self._sent == sorted(self._sent, key=lambda sent: sent.place)
            and all(
                record.rule.study in self._consented
                and days[record.study_day] <= record.limit <= record.rule.daily_reports
                for record in self._waiting
            )
            and all(count <= self._charged.get(key, 0) for key, count in handed_out.items())
            and all(
                day >= 0 and _cost(epsilon) > 0 and records >= 1
                for (_, day, epsilon), records in self._charged.items()
            )
        )

    def _expire(self, today: int) -> None:
        """Drop from the log what is too old."""
        self._sent = [sent for sent in self._sent if today < sent.day + self._keep_sent_days]

    def _refused(self, rule: Rule, day: int) -> Outcome | None:
        """Why nothing more is privatised for the study on this day, if that is so."""
        if rule.study not in self._consented:
            return Outcome.NO_CONSENT
        if any((rule.study, day) == charged[:2] for charged in self._charged):
            return Outcome.DAY_OVER
        return None if self._affords(rule) else Outcome.LIFETIME_SPENT

    def _of_day(self, study: str, day: int) -> list[_Waiting]:
        return [record for record in self._waiting if record.study_day == (study, day)]

    def _privatised(
        self,
        rule: Rule,
        privatise: Callable[[Rng], bytes],
        day: int,
        rng: Rng,
        *,
        says_nothing: bool = False,
    ) -> _Waiting:
        """A record with a lot and a time of its own, which does not wait yet."""
        data = privatise(rng)
        require(
            isinstance(data, bytes) and len(data) > 0,
            "privatise must return bytes, at least one; "
            f"got {'none' if isinstance(data, bytes) else type(data).__name__}; encode the record",
        )
        words = rng.words(4)
        return _Waiting(
            id=words[:2].tobytes().hex(),
            rule=rule,
            day=day,
            limit=rule.daily_reports,
            due=(day + 1) * DAY_SECONDS + (int(words[2]) * rule.delay_seconds >> 64),
            lot=_LAST_LOT if says_nothing else int(words[3]) >> (64 - _LOT_BITS),
            handed_out=False,
            data=data,
        )

    def _keep_lowest(self, rivals: list[_Waiting], limit: int) -> list[_Waiting]:
        """Let the lowest lots of a study's day wait, and no others of it; which were dropped."""
        ordered = sorted(rivals, key=lambda rival: rival.lot)
        kept, dropped = ordered[:limit], ordered[limit:]
        for record in kept:
            record.limit = limit
        days = {record.study_day for record in rivals}
        others = [record for record in self._waiting if record.study_day not in days]
        self._waiting = sorted(others + kept, key=lambda record: record.id)
        return dropped

    def _affordable(self, rule: Rule) -> int:
        """How many records of a day the study can afford, if it can afford one."""
        if rule.epsilon is None or rule.lifetime_epsilon is None:
            return rule.daily_reports
        left = rule.lifetime_epsilon * (1 + _ROUNDING) - self.spent(rule.study)
        return min(rule.daily_reports, max(1, int(left / rule.epsilon)))

    def _affords(self, rule: Rule) -> bool:
        """Whether one more record keeps the study within what the rule ever allows."""
        if rule.epsilon is None:
            charged = sum(n for (study, _, _), n in self._charged.items() if study == rule.study)
            return charged < rule.lifetime_reports and rule.task_id not in self._answered
        if rule.lifetime_epsilon is None:
            return True
        after = self.spent(rule.study) + rule.epsilon
        return after <= rule.lifetime_epsilon * (1 + _ROUNDING)

    def _charge(self, record: _Waiting) -> None:
        """The record counts as sent from here on, and its day is over."""
        record.handed_out = True
        if record.rule.epsilon is None:
            self._answered.add(record.rule.task_id)
        key = (*record.study_day, record.rule.epsilon)
        self._charged[key] = self._charged.get(key, 0) + 1
        for other in self._waiting:
            if other.study_day == record.study_day:
                other.lot = 0

    def _keep(self, wanted: Callable[[_Waiting], bool]) -> int:
        """Drop the unsent records that are not wanted; how many that was."""
        before = len(self._waiting)
        self._waiting = [record for record in self._waiting if wanted(record)]
        return before - len(self._waiting)

    def __repr__(self) -> str:  # never a record
        return (
            f"Outbox({len(self._consented)} studies with consent, {len(self._waiting)} records "
            f"unsent, {len(self._sent)} in the log, epsilon {self.spent():g} spent)"
        )


def _check_event(rule: Rule, privatise: Callable[[Rng], bytes]) -> None:
    require(
        isinstance(rule, Rule) and callable(privatise),
        "an event needs a Rule and a function that privatises it; "
        f"got {type(rule).__name__} and {type(privatise).__name__}",
    )


def _day_of(now: float) -> int:
    number = isinstance(now, int | float) and not isinstance(now, bool)
    require(
        number and 0 <= now < _END_OF_TIME,
        f"now must be in seconds since 1970-01-01 UTC, before the year 10000; got {now!r}; "
        "pass the device's clock",
    )
    return int(now // DAY_SECONDS)


def _plain(record: _Waiting | _Sent) -> dict[str, Any]:
    """A record as JSON has it: its bytes in hexadecimal."""
    members = {field.name: getattr(record, field.name) for field in fields(record)}
    if isinstance(record, _Waiting):
        members["rule"] = json.loads(to_json(record.rule))
    return {**members, "data": record.data.hex()}


def _cost(epsilon: float | None) -> float:
    """What a record costs; what the collector can read has no bound."""
    return math.inf if epsilon is None else epsilon


def _epsilon(entry: dict[str, Any]) -> float | None:
    """The epsilon of an entry of the state's JSON, which prints 4.0 as 4."""
    return None if entry["epsilon"] is None else float(entry["epsilon"])


def _is_well_typed(record: _Waiting | _Sent) -> bool:
    """Whether each field has the type that its annotation names, and no number is below zero."""
    given = [(field.type, getattr(record, field.name)) for field in fields(record)]
    return all(
        type(value).__name__ == name.removesuffix(" | None")
        and (not isinstance(value, int | float) or value >= 0)
        for name, value in given
        if value is not None or not name.endswith(" | None")
    )


def _check_study(study: str) -> None:
    require(
        isinstance(study, str) and study.isprintable() and study.strip() == study != "",
        "study must be a name to show on one line, without spaces around it; got "
        f"{study!r}; use the name that the user was shown",
    )


def check_hex(text: str, digits: int, what: str) -> None:
    """Refuse what is not so many hexadecimal digits; the message does not show it."""
    require(
        isinstance(text, str) and len(text) == digits and set(text) <= set("0123456789abcdef"),
        f"{what} must be {digits} hexadecimal digits in lower case; got something else; "
        "use it as it was given out",
    )

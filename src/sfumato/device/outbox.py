"""The rules for what a device keeps and sends under local privacy, without any I/O.

An event is privatised at once. Its record waits in an `Outbox` and is sent at a random time after
the day is over; on a busy day only some records are. Clock and randomness are arguments. The app
stores the state (`to_json`) and sends the bytes, in this order: call, save the state, act on the
result.

    >>> from sfumato.privacy import SeededRng
    >>> rule = SendingRule(study="Popular emoji", task_id="5f" * 32, epsilon=4.0, daily_reports=2,
    ...             delay_seconds=3600)
    >>> outbox, rng = Outbox(), SeededRng(1)
    >>> outbox.record(rule, lambda rng: b"privatised", now=1_000.0, rng=rng)
    <Outcome.NO_CONSENT: 'no_consent'>
    >>> outbox.consent("Popular emoji")
    >>> outbox.record(rule, lambda rng: b"privatised", now=1_000.0, rng=rng)
    <Outcome.QUEUED: 'kept'>
    >>> outbox.due(now=86_399.0)  # not before its day is over
    []
    >>> outbox.due(now=86_400.0 + 3_600.0)
    [OutgoingRecord(task=5f5f5f5f…, 10 bytes)]
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
_PRIORITY_BITS = 53  # JSON numbers are exact up to here
_LAST_PRIORITY = (1 << _PRIORITY_BITS) - 1  # records that say "none": every event comes first
_STATES: tuple[State, ...] = ("sent", "on the way", "waiting")
# Errors raised by data of another shape:
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_ROUNDING = 1e-9  # so that a limit of 0.3 allows three times 0.1


@spec("device_rule")
class SendingRule:
    """When a device sends records for one study, and how many.

    A record waits until the day of its event is over and then for a random time, uniform in
    [0, delay_seconds). Counted from the event, the same wait would reveal the time of the event to
    within the delay, and a day's first records would be sent before its last could compete with
    them. Counted from the end of the day, it reveals at most the day; a delay of several days hides
    that, too.
    """

    study: str  # the name that users see; consent, limits and the ledger are kept under it
    task_id: str
    epsilon: float | None  # of one record, as `privatise` promises; None: the collector can read
    # the records, and gets at most `lifetime_reports` from this device for the study
    daily_reports: int  # the most records of one day that are ever sent
    delay_seconds: int
    lifetime_epsilon: float | None = None  # beyond it this device sends nothing more for the study
    lifetime_reports: int = 1  # the same limit for records that the collector can read

    def check(self) -> None:
        _check_study(self.study)
        check_hex(self.task_id, 64, "task_id")
        require.above(0, epsilon=self.epsilon)
        require(
            self.daily_reports >= 1,
            f"daily_reports must be at least 1; got {self.daily_reports}; "
            "to send nothing, do not ask for consent",
        )
        require.within(1, LONGEST_DELAY, delay_seconds=self.delay_seconds)
        limit = self.lifetime_epsilon
        require(
            limit is None or self.epsilon is not None,
            f'lifetime_epsilon is for studies with trust "local"; got {limit}',
            hint="leave it out: in other studies, the collector's budget limits the epsilon",
        )
        require(
            limit is None or self.epsilon is None or limit >= self.epsilon,
            f"lifetime_epsilon must allow one record of epsilon {self.epsilon}; "
            f"got {limit}; use None for no limit",
        )
        require.at_least(1, lifetime_reports=self.lifetime_reports)


class Outcome(StrEnum):
    """What became of an event. None of these is an error."""

    QUEUED = "kept"  # its record waits
    REPLACED_ANOTHER = "replaced_another"  # its record waits, in place of another of the same day
    THINNED_OUT = "thinned_out"  # the day has enough records, and others were drawn
    NO_CONSENT = "no_consent"  # nothing was privatised
    DAY_OVER = "day_over"  # the day's records were sent already, or belong to another task
    LIFETIME_SPENT = "lifetime_spent"  # the rule allows no further record, ever


@dataclass(frozen=True, slots=True, repr=False)
class OutgoingRecord:
    """A record to send: `data` for the task. `id` is for `Outbox.confirm`; do not send it."""

    id: str
    task_id: str
    data: bytes

    def __repr__(self) -> str:  # never the record
        return f"OutgoingRecord(task={self.task_id[:8]}…, {len(self.data)} bytes)"


@dataclass(frozen=True, slots=True, repr=False)
class LogEntry:
    """An entry of the log for users; `str` puts it in words."""

    state: State
    study: str
    day: int | None  # the day on which it was sent, in days since 1970-01-01 UTC
    records: tuple[tuple[str, bytes], ...]  # task id and data of each
    epsilon: float  # of all records together; infinite if the collector can read them

    @property
    def size(self) -> int:
        """The total number of bytes in the records."""
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
class _WaitingRecord:
    """A privatised record whose receipt is not confirmed."""

    id: str  # random; also the order in which records are stored and sent
    rule: SendingRule
    day: int
    limit: int  # the lowest daily_reports that the study had on this day
    due: int
    priority: (
        int  # the lowest of a day stay; 0 after the day, since priorities show how busy it was
    )
    handed_out: bool
    data: bytes

    @property
    def study_day(self) -> tuple[str, int]:
        """The study and the day whose records compete with each other."""
        return self.rule.study, self.day


@dataclass(frozen=True, slots=True, repr=False)
class _SentRecord:
    """A record whose receipt is confirmed."""

    day: int  # the day of the confirmation
    study: str
    task_id: str
    data: bytes
    epsilon: float | None

    @property
    def sort_key(self) -> tuple[int, str, str, bytes, float]:
        """Its place in the log."""
        return self.day, self.study, self.task_id, self.data, _cost(self.epsilon)


class Outbox:
    """The records of one device, its user's consent, and the device's own ledger.

    Claim: to an observer of everything that is sent, whatever else they know, the value of one
        event is epsilon-indistinguishable from any other value. All values of one day and study
        together are so within the sum of epsilon over the records of that day that were sent, at
        most `daily_reports`; all values ever within `spent()`. After `take_part` on a day, "no
        event" counts as a value: the number of records sent does not depend on events. Nothing is
        claimed for records whose rule has no epsilon: the collector can read them, and `spent` is
        infinite.
    Proof: basic composition over the records that are sent. Which of them are sent, when and in
        what order depends on random priorities and the clock only; dropping privatised records is
        post-processing. It is not amplification: every record was privatised at epsilon and costs
        epsilon. After `take_part`, one more event only changes what one record is made from.
    Assumes: `privatise` is epsilon-locally private for any two values, including "none"; `rng` is
        cryptographic; the state is saved after each call and before its result is used, and an
        older state is never restored. Not hidden: consent, the days on which a device takes part,
        and, on a day without `take_part`, the number of records sent.
    """

    def __init__(self, *, keep_sent_days: int = 90) -> None:
        """`keep_sent_days` is how long sent bytes stay in the log; 0 keeps none."""
        self._consents: set[str] = set()
        self._waiting: list[_WaitingRecord] = []  # by id, so that the order of events is not stored
        self._charges: dict[tuple[str, int, float | None], int] = {}  # study, day, epsilon: records
        self._readable_tasks: set[str] = set()  # answered with a record that the collector can read
        self._log: list[_SentRecord] = []
        self._keep_sent_days = 0
        self.keep_sent(keep_sent_days)

    def consent(self, study: str) -> None:
        """The user opts in to this study. Before that, nothing is privatised, kept or sent."""
        _check_study(study)
        self._consents.add(study)

    def withdraw(self, study: str) -> None:
        """The user opts out: delete consent and everything unsent; keep ledger and log."""
        _check_study(study)
        self._consents.discard(study)
        self.delete(study)

    @property
    def consents(self) -> tuple[str, ...]:
        """The studies that the user has opted in to."""
        return tuple(sorted(self._consents))

    def take_part(
        self, rule: SendingRule, privatise: Callable[[Rng], bytes], *, now: float, rng: Rng
    ) -> Outcome:
        """Fill the day with records that say "none", made by `privatise`, up to the daily limit.

        The record of an event then replaces one of these, so that the same number of records is
        sent whatever happens on the day. Call it before each `record`, and once on a day without
        events; it changes nothing if the day is full. All records of a study's day belong to one
        task, the first to have any; for other tasks the day is over.
        """
        _check_event(rule, privatise)
        day = _day_of(now)
        if refusal := self._refusal(rule, day):
            return refusal
        waiting = self._of_day(rule.study, day)
        if any(record.rule.task_id != rule.task_id for record in waiting):
            return Outcome.DAY_OVER
        limit = min([self._affordable(rule), *(record.limit for record in waiting)])
        missing = range(limit - len(waiting))
        fresh = [self._privatise(rule, privatise, day, rng, says_none=True) for _ in missing]
        self._keep_lowest([*fresh, *waiting], limit)
        return Outcome.QUEUED

    def record(
        self, rule: SendingRule, privatise: Callable[[Rng], bytes], *, now: float, rng: Rng
    ) -> Outcome:
        """Privatise an event at once, and keep its record if it is among those drawn for the day.

        Only the result of `privatise` and the day are kept, neither the value nor the time. Each
        record gets a random priority, and the `daily_reports` lowest of a day stay, so all have the
        same chance whenever they came. If rules of one study differ in their limit, the lowest
        limit of the day applies.
        """
        _check_event(rule, privatise)
        day = _day_of(now)
        if refusal := self._refusal(rule, day):
            return refusal
        fresh = self._privatise(rule, privatise, day, rng)
        rivals = [fresh, *self._of_day(rule.study, day)]
        dropped = self._keep_lowest(rivals, min(rival.limit for rival in rivals))
        if fresh in dropped:
            return Outcome.THINNED_OUT
        replaced = any(record.priority != _LAST_PRIORITY for record in dropped)
        return Outcome.REPLACED_ANOTHER if replaced else Outcome.QUEUED

    def due(self, now: float) -> list[OutgoingRecord]:
        """The records to send now, by task and in random order; repeated until `confirm`.

        Save the state before sending any. A record is charged when it is first handed out, because
        after a crash nobody knows whether it was sent. That ends its day: no other record of that
        day and study is accepted. A record that exceeds its study's lifetime limit is deleted.
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
        return [OutgoingRecord(record.id, record.rule.task_id, record.data) for record in out]

    def study_of(self, task_id: str) -> str | None:
        """The study of the task's records that wait here; None if there are none."""
        studies = (each.rule.study for each in self._waiting if each.rule.task_id == task_id)
        return next(studies, None)

    def task_ids(self) -> set[str]:
        """The tasks of all records here: those in the log and those not yet confirmed."""
        unsent = {record.rule.task_id for record in self._waiting}
        return unsent | {record.task_id for record in self._log}

    def confirm(self, ids: Iterable[str], now: float) -> int:
        """Move the records that arrived to the log; returns how many.

        Ids that are not waiting here are ignored, so an answer that comes twice, or after its
        record was deleted, does no harm.
        """
        names = set(ids)
        for name in names:
            check_hex(name, 32, "an id")
        day = _day_of(now)
        for record in self._waiting:
            if record.id not in names:
                continue
            if not record.handed_out:  # only if a state older than its `due` was restored
                self._charge(record)
            rule = record.rule
            self._log.append(_SentRecord(day, rule.study, rule.task_id, record.data, rule.epsilon))
        self._log.sort(key=lambda record: record.sort_key)
        self._expire(day)
        return self._keep(lambda record: record.id not in names)

    def delete(self, study: str | None = None) -> int:
        """Delete everything unsent, of one study or of all; returns the number of records.

        Records that were handed out and not confirmed are deleted, too. They are not sent again,
        but they may have arrived, so the ledger still counts them.
        """
        if study is not None:
            _check_study(study)
        return self._keep(lambda record: study is not None and record.rule.study != study)

    def forget(self, task_id: str) -> int:
        """Drop the unsent records of a task that is over; returns how many."""
        check_hex(task_id, 64, "task_id")
        return self._keep(lambda record: record.rule.task_id != task_id)

    def keep_sent(self, days: int) -> None:
        """Keep sent records in the log for this many days from now on. The ledger always stays."""
        require(
            type(days) is int and 0 <= days <= 36_600,
            f"keep_sent_days must be a whole number from 0 to 36600; got {days!r}",
        )
        self._keep_sent_days = days

    def log(self) -> list[LogEntry]:
        """Sent records by day and study; then those on the way and those waiting, by study."""
        rows: list[tuple[tuple[int, int, str], str, bytes, float]] = [
            ((0, record.day, record.study), record.task_id, record.data, _cost(record.epsilon))
            for record in self._log
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
        """The epsilon of all records ever handed out, or only those of a study, a day or both.

        `day` is the day of the events, in days since 1970-01-01 UTC. Nothing resets the sum:
        neither time, nor opting out, nor deleting.
        """
        require(
            (study is None or isinstance(study, str)) and (day is None or type(day) is int),
            f"study must be a name and day a whole number, or None for all; got {study!r}, {day!r}",
        )
        return math.fsum(
            _cost(epsilon) * records
            for (charged_study, charged_day, epsilon), records in self._charges.items()
            if study in (None, charged_study) and day in (None, charged_day)
        )

    def to_json(self) -> str:
        """The whole state. It contains privatised records: protect it like the app's own data."""
        return canonical(
            {
                "version": VERSION,
                "keep_sent_days": self._keep_sent_days,
                "consented": sorted(self._consents),
                "waiting": [_plain(record) for record in self._waiting],
                "charged": [
                    {"study": study, "day": day, "epsilon": epsilon, "records": records}
                    for (study, day, epsilon), records in sorted(
                        self._charges.items(), key=lambda entry: (*entry[0][:2], _cost(entry[0][2]))
                    )
                ],
                "answered": sorted(self._readable_tasks),
                "sent": [_plain(record) for record in self._log],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Outbox:
        """The outbox with this state; anything that `to_json` does not write is refused."""
        try:
            data = json.loads(text)
            version = data["version"]
        except _UNREADABLE:
            raise SpecError(
                "the state of an outbox must be the JSON object that to_json wrote; got other "
                "text; restore the state that was saved last"
            ) from None
        require(
            type(version) is int and version == VERSION,
            f"the state of an outbox must have version {VERSION}; got {version!r}; "
            "use the release of sfumato that wrote it",
        )
        try:
            outbox = cls._from_data(data)
            is_valid = outbox.to_json() == text and outbox._is_consistent()
        except (*_UNREADABLE, SpecError):
            is_valid = False  # the cause is hidden: its message might show a record
        require(
            is_valid,
            "the state of an outbox must be exactly what to_json wrote; got a changed one; "
            "restore the state that was saved last",
        )
        return outbox

    @classmethod
    def _from_data(cls, data: Any) -> Outbox:
        """Build an outbox. If `data` has other fields or types, its `to_json` differs."""
        outbox = cls(keep_sent_days=data["keep_sent_days"])
        outbox._consents = set(data["consented"])
        for record in data["waiting"]:
            record["priority"] = record.pop("lot")
            rule, privatised = from_json(canonical(record["rule"])), bytes.fromhex(record["data"])
            outbox._waiting.append(_WaitingRecord(**{**record, "rule": rule, "data": privatised}))
        for entry in data["charged"]:
            key = (str(entry["study"]), int(entry["day"]), _epsilon(entry))
            outbox._charges[key] = int(entry["records"])
        outbox._readable_tasks = set(data["answered"])
        for record in data["sent"]:
            privatised = bytes.fromhex(record["data"])
            outbox._log.append(
                _SentRecord(**{**record, "epsilon": _epsilon(record), "data": privatised})
            )
        return outbox

    def _is_consistent(self) -> bool:
        """Whether a state that was read, and may have been edited, keeps the outbox's promises."""
        for study in self._consents:
            _check_study(study)
        for record in self._waiting:
            check_hex(record.id, 32, "an id")
        for task_id in self._readable_tasks:
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
            and all(map(_is_well_typed, self._log))
            and ids == sorted(set(ids))
            and self._log == sorted(self._log, key=lambda record: record.sort_key)
            and all(
                record.rule.study in self._consents
                and days[record.study_day] <= record.limit <= record.rule.daily_reports
                for record in self._waiting
            )
            and all(count <= self._charges.get(key, 0) for key, count in handed_out.items())
            and all(
                day >= 0 and _cost(epsilon) > 0 and records >= 1
                for (_, day, epsilon), records in self._charges.items()
            )
        )

    def _expire(self, today: int) -> None:
        """Drop old records from the log."""
        self._log = [record for record in self._log if today < record.day + self._keep_sent_days]

    def _refusal(self, rule: SendingRule, day: int) -> Outcome | None:
        """Why nothing more is privatised for the study on this day; None if more may be."""
        if rule.study not in self._consents:
            return Outcome.NO_CONSENT
        if any((rule.study, day) == key[:2] for key in self._charges):
            return Outcome.DAY_OVER
        return None if self._affords(rule) else Outcome.LIFETIME_SPENT

    def _of_day(self, study: str, day: int) -> list[_WaitingRecord]:
        return [record for record in self._waiting if record.study_day == (study, day)]

    def _privatise(
        self,
        rule: SendingRule,
        privatise: Callable[[Rng], bytes],
        day: int,
        rng: Rng,
        *,
        says_none: bool = False,
    ) -> _WaitingRecord:
        """A new record with its own priority and time; the caller adds it to the queue."""
        data = privatise(rng)
        require(
            isinstance(data, bytes) and len(data) > 0,
            "privatise must return bytes, at least one; "
            f"got {'none' if isinstance(data, bytes) else type(data).__name__}; encode the record",
        )
        words = rng.words(4)
        return _WaitingRecord(
            id=words[:2].tobytes().hex(),
            rule=rule,
            day=day,
            limit=rule.daily_reports,
            due=(day + 1) * DAY_SECONDS + (int(words[2]) * rule.delay_seconds >> 64),
            priority=_LAST_PRIORITY if says_none else int(words[3]) >> (64 - _PRIORITY_BITS),
            handed_out=False,
            data=data,
        )

    def _keep_lowest(self, rivals: list[_WaitingRecord], limit: int) -> list[_WaitingRecord]:
        """Keep the lowest priorities of a study's day; returns the records that were dropped."""
        ordered = sorted(rivals, key=lambda rival: rival.priority)
        lowest, dropped = ordered[:limit], ordered[limit:]
        for record in lowest:
            record.limit = limit
        days = {record.study_day for record in rivals}
        others = [record for record in self._waiting if record.study_day not in days]
        self._waiting = sorted(others + lowest, key=lambda record: record.id)
        return dropped

    def _affordable(self, rule: SendingRule) -> int:
        """How many records of one day the study's limits allow, given that they allow one."""
        if rule.epsilon is None or rule.lifetime_epsilon is None:
            return rule.daily_reports
        left = rule.lifetime_epsilon * (1 + _ROUNDING) - self.spent(rule.study)
        return min(rule.daily_reports, max(1, int(left / rule.epsilon)))

    def _affords(self, rule: SendingRule) -> bool:
        """Whether one more record keeps the study within its lifetime limit."""
        if rule.epsilon is None:
            records = sum(n for (study, _, _), n in self._charges.items() if study == rule.study)
            return records < rule.lifetime_reports and rule.task_id not in self._readable_tasks
        if rule.lifetime_epsilon is None:
            return True
        after = self.spent(rule.study) + rule.epsilon
        return after <= rule.lifetime_epsilon * (1 + _ROUNDING)

    def _charge(self, record: _WaitingRecord) -> None:
        """Count the record as sent from now on, and end its day."""
        record.handed_out = True
        if record.rule.epsilon is None:
            self._readable_tasks.add(record.rule.task_id)
        key = (*record.study_day, record.rule.epsilon)
        self._charges[key] = self._charges.get(key, 0) + 1
        for other in self._waiting:
            if other.study_day == record.study_day:
                other.priority = 0

    def _keep(self, condition: Callable[[_WaitingRecord], bool]) -> int:
        """Drop the unsent records that do not fulfil the condition; returns how many."""
        before = len(self._waiting)
        self._waiting = [record for record in self._waiting if condition(record)]
        return before - len(self._waiting)

    def __repr__(self) -> str:  # never a record
        return (
            f"Outbox({len(self._consents)} studies with consent, {len(self._waiting)} records "
            f"unsent, {len(self._log)} in the log, epsilon {self.spent():g} spent)"
        )


def _check_event(rule: SendingRule, privatise: Callable[[Rng], bytes]) -> None:
    require(
        isinstance(rule, SendingRule) and callable(privatise),
        "an event needs a SendingRule and a function that privatises it; "
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


def _plain(record: _WaitingRecord | _SentRecord) -> dict[str, Any]:
    """The JSON object of a record, with its bytes in hexadecimal."""
    members = {field.name: getattr(record, field.name) for field in fields(record)}
    if isinstance(record, _WaitingRecord):
        members["rule"] = json.loads(to_json(record.rule))
        members["lot"] = members.pop("priority")
    return {**members, "data": record.data.hex()}


def _cost(epsilon: float | None) -> float:
    """The cost of a record; infinite if the collector can read it."""
    return math.inf if epsilon is None else epsilon


def _epsilon(entry: dict[str, Any]) -> float | None:
    """The epsilon of an entry in the state's JSON, where 4.0 is written as 4."""
    return None if entry["epsilon"] is None else float(entry["epsilon"])


def _is_well_typed(record: _WaitingRecord | _SentRecord) -> bool:
    """Whether each field has the type of its annotation, and no number is negative."""
    values = [(field.type, getattr(record, field.name)) for field in fields(record)]
    return all(
        type(value).__name__ == name.removesuffix(" | None")
        and (not isinstance(value, int | float) or value >= 0)
        for name, value in values
        if value is not None or not name.endswith(" | None")
    )


def _check_study(study: str) -> None:
    require(
        isinstance(study, str) and study.isprintable() and study.strip() == study != "",
        "study must be one line of printable text without spaces around it; got "
        f"{study!r}; use the name that the user was shown",
    )


def check_hex(text: str, digits: int, what: str) -> None:
    """Raise SpecError unless the text has this many hexadecimal digits; the error omits it."""
    require(
        isinstance(text, str) and len(text) == digits and set(text) <= set("0123456789abcdef"),
        f"{what} must be {digits} hexadecimal digits in lower case; got something else; "
        "use it unchanged",
    )

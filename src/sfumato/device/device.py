"""A device: what an app embeds to take part in studies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from sfumato.device import client
from sfumato.device.box import Box, Retry, SqliteBox, State
from sfumato.device.client import Http, Send
from sfumato.device.offers import Offer, verify
from sfumato.device.outbox import DAY_SECONDS, LogEntry, Outcome, Outgoing
from sfumato.device.private import Value, masked_table, privatiser, says_nothing
from sfumato.device.rounds import PATIENCE_SECONDS, Joined, Part, drive
from sfumato.errors import OfferError, ServiceError
from sfumato.flow.aggregation import Masked
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.report import WIRE_VERSION, Report
from sfumato.flow.task import Task
from sfumato.privacy import ListedAbove, Mechanism, Rng, SystemRng

FIRST_RETRY = 30.0  # seconds, at most, before the second try; twice as many before each next
LONGEST_RETRY = 21_600.0
_MOST_AHEAD = client.LONGEST_ASKED + LONGEST_RETRY  # else the clock was set back since


class Skipped(StrEnum):
    """Why nothing was made of a value, beside the outcomes of an outbox. None is an error."""

    NOT_OFFERED = "not_offered"  # there is no such study, or it is closed, or not fetched whole
    CONSENT_AGAIN = "consent_again"  # its terms are worse than what the user agreed to
    NOT_ASKED_FOR = "not_asked_for"  # it is answered by `join`


@dataclass(frozen=True, slots=True)
class Offered:
    """A study that a user may take part in."""

    offer: Offer
    consent: Literal["none", "given", "again"]  # "again": it was given to better terms
    changes: tuple[str, ...] = ()  # what got worse


@dataclass(frozen=True, slots=True)
class Sending:
    """What one call of `send` did, in records."""

    sent: int = 0  # the collector has them, or has rejected them
    rejected: int = 0  # of those sent
    forgotten: int = 0  # their task is over
    kept: int = 0  # due, and to be tried again

    def __add__(self, other: Sending) -> Sending:
        return Sending(
            self.sent + other.sent,
            self.rejected + other.rejected,
            self.forgotten + other.forgotten,
            self.kept + other.kept,
        )


class Device:
    """Takes part in the studies of one collector, as far as its user agreed to.

    Each call is one transaction on the box, which is on disk before anything is sent or told. No
    value outlives `record`: what is kept is the message that a report will carry. Under trust
    "local" that message is private to everybody; under "central" the collector can read it.
    One thread at a time; several processes may share a box.

    `key` is the collector's public Ed25519 key, which the app knows beforehand; `send` moves bytes
    (`Http`, or anything with its call). `now` is in seconds since 1970-01-01 UTC.
    """

    def __init__(self, box: Box, send: Send, key: bytes, *, rng: Rng | None = None) -> None:
        self._box = box
        self._send = send
        self._key = key
        self._rng: Rng = rng or SystemRng()
        self._state, self._text = State(), ""
        self.refused: tuple[str, ...] = ()  # why offers of the last fetch were not taken

    @classmethod
    def open(cls, path: Path | str, server: str, key: bytes, **options: Any) -> Device:
        """The device whose box is the SQLite file at `path`; `options` are those of `Http`."""
        return cls(SqliteBox(path), Http(server, **options), key)

    def offers(self, now: float) -> list[Offered]:
        """Ask the collector which studies are open, and take those that its key signed.

        A study that the collector offers no more is not recorded for; what waits is still sent. A
        masked round of it is forgotten at the second fetch without it: a collector that closes a
        study may still be at its last round.
        """
        taken: dict[str, Offer] = {}
        refused = []
        for envelope in client.fetch_offers(self._send):
            try:
                offer = self._taken(envelope, taken, now)
                taken[offer.study] = offer
            except (OfferError, ServiceError) as problem:
                refused.append(str(problem))
        self.refused = tuple(refused)
        wanted = {offer.dictionary for offer in taken.values() if offer.dictionary is not None}
        with self._changing() as state:
            self._box.drop_rounds(taken.keys() | state.offered.keys())
            state.offered = taken
            self._box.drop_dictionaries(wanted)
            self._box.drop_models(set(taken))
            return self._offered(state)

    def known_offers(self) -> list[Offered]:
        """The same as of the last fetch, without asking."""
        return self._offered(self._peek())

    def consent(self, study: str) -> None:
        """The user agrees to the terms that the study is offered on now."""
        offer = self._peek().offered.get(study)
        if offer is None:
            raise OfferError(
                "consent is to a study that is offered; this one is not",
                hint="fetch the offers, and use the study's name as it is there",
            )
        self._fetch_dictionary(offer)
        with self._changing() as state:
            state.outbox.consent(study)
            state.agreed[study] = offer

    def withdraw(self, study: str) -> None:
        """The user opts out: consent and everything unsent are gone; ledger and log stay."""
        with self._changing() as state:
            state.outbox.withdraw(study)
            state.agreed.pop(study, None)
            self._box.drop_round(study)

    def record(self, study: str, value: Value, now: float) -> Outcome | Skipped:
        """Make a value private at once and keep the result, if the user agreed and limits allow.

        A study with trust "central" takes a report of a device for each task, no more in all than
        the offer's `contributions`, and may be given several values for it; a local one takes them
        one by one. One with masked tables, as all are with trust "secure", is answered by `join`.

        Of a local study `daily_reports` records leave of each day on which this was called, no more
        and no fewer: those that no value was recorded for say "none". So does a word that is known,
        or of another alphabet. `take_part` begins a day without a value: call it on every day, and
        what leaves does not tell whether anything happened.
        """
        with self._changing() as state:
            offer = self._open(state, study, now)
            if not isinstance(offer, Offer):
                return offer
            if offer.task.is_masked:
                return Skipped.NOT_ASKED_FOR
            task, outbox, rule = offer.task, state.outbox, offer.rule
            privatise = privatiser(offer, value, self._places(offer))
            if not isinstance(task, Task):
                outcome = outbox.take_part(rule, says_nothing(task), now=now, rng=self._rng)
                if privatise is None or outcome is not Outcome.KEPT:
                    return outcome
                return outbox.record(rule, privatise, now=now, rng=self._rng)
            assert privatise is not None  # a table has something to say, be it zeros
            if not state.may_contribute(offer, task):
                return Outcome.LIFETIME_SPENT
            outcome = outbox.record(rule, privatise, now=now, rng=self._rng)
            if outcome in (Outcome.KEPT, Outcome.REPLACED_ANOTHER):
                state.contribute(offer, task)
            return outcome

    def take_part(self, now: float) -> None:
        """Begin the day in every local study that the user agreed to, whether or not anything will
        happen in it: the same as `record` with no value. Call it on a timer, at least once a day.
        """
        for offered in self.known_offers():
            if offered.consent == "given" and offered.offer.task.is_local:
                self.record(offered.offer.study, (), now)

    def part(self, study: str, value: Value, now: float) -> Part | Outcome | Skipped:
        """This device's part in a masked round of a study, to be driven by the caller: the one that
        was begun before, or a new one if the user agreed and the promise allows it.

        The value is kept nowhere but in the part, until its table is masked. Where a model is
        trained, the value is a function of its terms, its parameters and chance (`Train`), which
        gives the update; it is called when the cohort is complete and the table is to be masked.
        The parameters are fetched here, so a collector that does not answer raises ServiceError.
        """
        self._fetch_model(study, now)
        with self._changing() as state:
            begun = self._box.round(study)
            if begun is None:
                offer = self._open(state, study, now)
                if not isinstance(offer, Offer):
                    return offer
                if not isinstance(offer.task, Task) or not offer.task.is_masked:
                    return Skipped.NOT_ASKED_FOR
                if not state.may_contribute(offer, offer.task):
                    return Outcome.LIFETIME_SPENT
                if offer.model is not None and self._parameters(offer) is None:
                    return Skipped.NOT_OFFERED  # another process was just offered another round
                Part.begin(self._box, offer, rng=self._rng)
        part = Part(self._box, self._changing, self._key, study, rng=self._rng)
        part.make_table = masked_table(
            part.offer, value, self._places(part.offer), self._parameters(part.offer)
        )
        return part

    def join(
        self,
        study: str,
        value: Value,
        now: float,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        cohort_seconds: float = math.inf,
        pause: Callable[[float], None] = time.sleep,
    ) -> Joined | Outcome | Skipped:
        """Take part in a masked round of a study, and return when it is over for this device.

        If the collector does not answer for `patience_seconds`, if there is no round after
        `cohort_seconds`, or if the app crashes, the same call goes on where it was.
        """
        try:
            part = self.part(study, value, now)
        except ServiceError:
            return Joined.UNREACHABLE
        if not isinstance(part, Part):
            return part
        return drive(
            part,
            self._send,
            self._chance,
            patience_seconds=patience_seconds,
            cohort_seconds=cohort_seconds,
            pause=pause,
        )

    def send(self, now: float) -> Sending:
        """Send what is due, the reports of a task together; call it on a timer.

        Whatever is not known to have arrived is sent again, the same bytes under the same report
        id, after a wait that doubles and is drawn at random (and no less than the collector asks).
        """
        with self._changing() as state:
            due = state.outbox.due(now)
            ids = state.report_ids
            state.report_ids = {record.id: ids.get(record.id) or self._drawn() for record in due}
            tasks = {record.task_id for record in due}
            state.retries = {task: at for task, at in state.retries.items() if task in tasks}
            report_ids, retries = dict(state.report_ids), dict(state.retries)
        done = Sending()
        reachable = True
        for task, group in groupby(due, key=lambda record: record.task_id):
            records = list(group)
            if task in retries and now < retries[task].at <= now + _MOST_AHEAD:
                done += Sending(kept=len(records))
            else:
                reports = [
                    Report(task, bytes.fromhex(report_ids[record.id]), record.data)
                    for record in records
                ]
                some, reachable = self._upload(task, records, reports, now, reachable)
                done += some
        return done

    def log(self) -> list[LogEntry]:
        """What was sent, what is on the way and what waits, for the user to see."""
        return self._peek().outbox.log()

    def spent(self, study: str | None = None) -> float:
        """The epsilon of all records that ever left, of one study or of all."""
        return self._peek().outbox.spent(study)

    def delete(self, study: str | None = None) -> int:
        """Delete what was not sent, of one study or of all; how many records that was."""
        with self._changing() as state:
            return state.outbox.delete(study)

    def close(self) -> None:
        self._box.close()
        close = getattr(self._send, "close", None)
        if close is not None:
            close()

    def _open(self, state: State, study: str, now: float) -> Offer | Outcome | Skipped:
        """The study's offer, if the user agreed to it and all that it needs is here."""
        offer = state.offered.get(study)
        if offer is None or _is_closed(offer, now):
            return Skipped.NOT_OFFERED
        agreed = state.agreed.get(study)
        if agreed is None:
            return Outcome.NO_CONSENT
        if changes(agreed, offer):
            return Skipped.CONSENT_AGAIN
        if offer.dictionary is not None and self._dictionary(offer) is None:
            return Skipped.NOT_OFFERED
        return offer

    def _places(self, offer: Offer) -> dict[str, int] | None:
        dictionary = self._dictionary(offer)
        return None if dictionary is None else dictionary.places()

    def _taken(self, envelope: Any, taken: dict[str, Offer], now: float) -> Offer:
        """The offer in an envelope, if this device can take part in it."""
        offer = verify(envelope, self._key)
        if offer.min_version > WIRE_VERSION:
            raise OfferError(
                f"this study needs devices of wire version {offer.min_version}; "
                f"this one speaks {WIRE_VERSION}"
            )
        if _is_closed(offer, now):
            raise OfferError("this study is closed")
        if offer.study in taken:
            raise OfferError("a study must be offered once; this one is offered twice")
        if offer.study in self._peek().agreed:
            self._fetch_dictionary(offer)
        return offer

    def _fetch_dictionary(self, offer: Offer) -> None:
        """Have the offer's dictionary here, so that recording asks nobody for anything."""
        if offer.dictionary is None:
            return
        if self._box.dictionary(offer.dictionary) is None:
            dictionary = client.fetch_dictionary(self._send, offer.dictionary)
            self._check_length(offer, len(dictionary.places()))
            with self._box.transaction():
                self._box.keep_dictionary(dictionary.digest, dictionary.body)

    def _fetch_model(self, study: str, now: float) -> None:
        """Have the parameters of a round here that this device is about to join."""
        state = self._peek()
        offer = self._open(state, study, now)
        if not isinstance(offer, Offer) or offer.model is None:
            return
        assert isinstance(offer.task, Task)  # as the offer has seen to
        is_begun = self._box.round(study) is not None
        if is_begun or not state.may_contribute(offer, offer.task) or self._parameters(offer):
            return
        body = client.fetch_model(self._send, offer.model)
        with self._box.transaction():
            self._box.keep_model(study, offer.model.digest, body)

    def _parameters(self, offer: Offer) -> bytes | None:
        """Those of the round that is offered, if they are here."""
        kept = None if offer.model is None else self._box.model(offer.study)
        return kept[1] if kept and offer.model and kept[0] == offer.model.digest else None

    @staticmethod
    def _check_length(offer: Offer, items: int) -> None:
        if offer.task.takes_categories() and items != offer.task.categories:
            raise OfferError("a dictionary must have as many items as its task has categories")

    def _dictionary(self, offer: Offer) -> client.Dictionary | None:
        """Fetched with consent and with every new offer; another process may be about to."""
        body = None if offer.dictionary is None else self._box.dictionary(offer.dictionary)
        return None if body is None else client.Dictionary(str(offer.dictionary), body)

    def _upload(
        self,
        task: str,
        records: list[Outgoing],
        reports: list[Report],
        now: float,
        reachable: bool,
    ) -> tuple[Sending, bool]:
        """Send the reports of one task, and write down what became of them."""
        done, start = Sending(), 0
        for piece in client.in_uploads(reports):
            sent = records[start : start + len(piece)]
            start += len(piece)
            answer = client.Upload(stored=False)
            if reachable:
                try:
                    answer = client.upload(self._send, task, piece)
                except ServiceError:
                    reachable = False  # nor will the next task reach it
            with self._changing() as state:
                done += self._settled(state, task, sent, answer, now)
        return done, reachable

    def _settled(
        self, state: State, task: str, sent: list[Outgoing], answer: client.Upload, now: float
    ) -> Sending:
        if answer.stored:
            state.retries.pop(task, None)
            state.outbox.sent([record.id for record in sent], now)
            for record in sent:
                state.report_ids.pop(record.id, None)
            return Sending(sent=len(sent), rejected=answer.rejected)
        if answer.is_over:
            return Sending(forgotten=state.outbox.forget(task))
        failures = state.retries[task].failures + 1 if task in state.retries else 1
        most = min(FIRST_RETRY * 2.0 ** min(failures - 1, 32), LONGEST_RETRY)
        wait = answer.retry_after_seconds + self._chance() * most
        state.retries[task] = Retry(failures, now + wait)
        return Sending(kept=len(sent))

    def _chance(self) -> float:
        return int(self._rng.words(1)[0]) / 2.0**64

    def _drawn(self) -> str:
        """A report id."""
        return self._rng.words(2).tobytes().hex()

    def _offered(self, state: State) -> list[Offered]:
        return [_compared(state.agreed.get(offer.study), offer) for offer in state.offered.values()]

    def _peek(self) -> State:
        """The state, to look at."""
        with self._box.transaction():
            return self._read(self._box.read())

    def _read(self, text: str | None) -> State:
        if text is None:
            return State()
        return self._state if text == self._text else State.from_json(text)

    @contextmanager
    def _changing(self) -> Iterator[State]:
        """The state, to change: read, changed and written in one transaction of the box."""
        try:
            with self._box.transaction():
                text = self._box.read()
                state = self._read(text)
                self._text = ""  # until it is written, what is in memory is not the state
                yield state
                changed = state.to_json()
                if changed != text:
                    self._box.write(changed)
            self._state, self._text = state, changed
        except BaseException:
            self._state, self._text = State(), ""
            raise

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._peek()
        return f"Device({len(state.agreed)} studies agreed to, {state.outbox!r})"


def _compared(agreed: Offer | None, offer: Offer) -> Offered:
    if agreed is None:
        return Offered(offer, "none")
    worse = changes(agreed, offer)
    return Offered(offer, "again" if worse else "given", worse)


def _is_closed(offer: Offer, now: float) -> bool:
    return offer.closes is not None and now >= (offer.closes + 1) * DAY_SECONDS


_SAME = ("purpose", "question", "trust")
_MOST = (
    "epsilon",
    "delta",
    "daily_reports",
    "lifetime_epsilon",
    "items_per_report",
    "contributions",
)


def changes(agreed: Offer, offered: Offer) -> tuple[str, ...]:
    """The terms that an offer makes worse than what the user agreed to; they need consent again.

    Terms that ask for less need none. Where tables are sent, the promise is the noise that the
    offer names: there must be no less of it. If it names none, the task's must be the same. Where
    they are masked, no more may be left to trust in the collector and in other devices.
    """
    worse = [name for name in _SAME if getattr(agreed, name) != getattr(offered, name)]
    worse += [name for name in _MOST if _limit(offered, name) > _limit(agreed, name)]
    if agreed.masked and not offered.masked:
        worse.append("masked")
    if offered.delay_seconds < agreed.delay_seconds:
        worse.append("delay_seconds")
    if isinstance(agreed.task, Task) and isinstance(offered.task, Task):
        before, after = agreed.task.mechanism, offered.task.mechanism
        if agreed.noise is not None and (offered.noise or 0.0) < agreed.noise:
            worse.append("noise")
        if agreed.noise is None or isinstance(after, ListedAbove):
            worse += [] if _promise(before) == _promise(after) else ["mechanism"]
        if offered.task.min_count < agreed.task.min_count:
            worse.append("min_count")
        if _trained(agreed.model) != _trained(offered.model):
            worse.append("model")
        worse += _less_hidden(agreed.task, offered.task)
    return tuple(worse)


def _less_hidden(agreed: Task, offered: Task) -> list[str]:
    """What of a masked sum protects against fewer, or weaker, than before."""
    before, after = agreed.aggregation, offered.aggregation
    if not (isinstance(before, Masked) and isinstance(after, Masked)):
        return []  # another trust, then
    worse = [
        name
        for name in ("corrupt", "security_bits")
        if getattr(after, name) < getattr(before, name)
    ]
    if before.mode == "semi_malicious" != after.mode:
        worse.append("mode")
    return worse


def _promise(mechanism: Mechanism) -> object:
    """What of a mechanism must stay: of a list that does not count on its coins, all but them."""
    if isinstance(mechanism, ListedAbove) and not mechanism.amplified:
        kept = [field.name for field in fields(mechanism) if field.name != "rate"]
        return [getattr(mechanism, name) for name in kept]
    return mechanism


def _trained(model: ModelTerms | None) -> object:
    """What of a model must stay: all but the round, and the parameters that it brings along."""
    return None if model is None else replace(model, digest="0" * 64, round=1)


def _limit(offer: Offer, name: str) -> float:
    """A limit as a number; where there is none it is infinite."""
    value = getattr(offer, name)
    return math.inf if value is None else float(value)

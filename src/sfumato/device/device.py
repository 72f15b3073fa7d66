"""A device: what an app embeds to take part in studies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from sfumato.device import client, passcodes
from sfumato.device.box import Box, Retry, SqliteBox, State
from sfumato.device.client import Http, Send
from sfumato.device.log import explain
from sfumato.device.offers import Offer, verify
from sfumato.device.outbox import DAY_SECONDS, LogEntry, Outcome, OutgoingRecord
from sfumato.device.private import Value, masked_table, none_privatiser, privatiser
from sfumato.device.rounds import TIMEOUT_SECONDS, RoundClient, RoundOutcome, drive
from sfumato.errors import OfferError, ServiceError
from sfumato.flow.aggregation import Masked
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.report import WIRE_VERSION, Report
from sfumato.flow.task import Task
from sfumato.privacy import ListedAbove, Mechanism, Rng, SystemRng
from sfumato.spec import from_json, to_json

FIRST_RETRY = 30.0  # the longest wait, in seconds, before the second try; it doubles each time
LONGEST_RETRY = 21_600.0
_LATEST_RETRY = client.MAX_RETRY_AFTER + LONGEST_RETRY  # later ones mean: the clock was set back


class SkipReason(StrEnum):
    """Why a value was not recorded, beside the outcomes of an outbox. None of these is an error."""

    NOT_OFFERED = "not_offered"  # there is no such study, or it is closed, or not fully fetched
    CONSENT_AGAIN = "consent_again"  # its terms are worse than those the user agreed to
    NOT_ASKED_FOR = "not_asked_for"  # masked rounds need `join`, all other studies `record`
    NO_PASSCODE = "no_passcode"  # it is for devices that have its passcode, and this one has none


@dataclass(frozen=True, slots=True)
class OfferedStudy:
    """A study that a user may take part in."""

    offer: Offer
    consent: Literal["none", "given", "again"]  # "again": the user agreed to better terms
    changes: tuple[str, ...] = ()  # the terms that got worse


@dataclass(frozen=True, slots=True)
class SendSummary:
    """What one call of `send` did, in numbers of records."""

    delivered: int = 0  # the collector has stored or rejected them
    rejected: int = 0  # out of those delivered
    forgotten: int = 0  # dropped because their task is over
    pending: int = 0  # due, but to be tried again
    wrong_passcode: int = 0  # out of those pending: refused just now, for their study's passcode

    def __add__(self, other: SendSummary) -> SendSummary:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return SendSummary(*(mine + theirs for mine, theirs in pairs))

    def to_dict(self) -> dict[str, int]:
        return {
            "sent": self.delivered,
            "rejected": self.rejected,
            "forgotten": self.forgotten,
            "kept": self.pending,
            "wrong_passcode": self.wrong_passcode,
        }


class Device:
    """Takes part in those studies of one collector that its user agreed to.

    Each call is one transaction on the box, which is on disk before anything is sent or returned.
    `record` does not keep the value, only the message that a report will carry. Under trust "local"
    that message is private even from the collector; under "central" the collector can read it.
    Use it from one thread at a time; several processes may share a box.

    `key` is the collector's public Ed25519 key, which the app knows beforehand; `send` sends
    requests (`Http`, or any callable like it). `now` is in seconds since 1970-01-01 UTC.
    """

    def __init__(self, box: Box, send: Send, key: bytes, *, rng: Rng | None = None) -> None:
        self._box = box
        self._send = send
        self._key = key
        self._rng: Rng = rng or SystemRng()
        self._state, self._text = State(), ""
        self.refused: tuple[str, ...] = ()  # why offers of the last fetch were refused

    @classmethod
    def open(
        cls,
        path: Path | str,
        server: str,
        key: bytes,
        *,
        box_key: bytes | None = None,
        **options: Any,
    ) -> Device:
        """The device whose box is the SQLite file at `path`, sealed with `box_key` if it is given
        (`SqliteBox`); `options` are those of `Http`."""
        return cls(SqliteBox(path, box_key), Http(server, **options), key)

    def offers(self, now: float) -> list[OfferedStudy]:
        """Fetch the collector's open studies, and accept the offers that its key signed.

        Nothing more is recorded for a study that is no longer offered; waiting records are still
        sent. Its masked round is dropped at the second fetch without it: a collector that closes a
        study may still be running its last round.
        """
        accepted: dict[str, Offer] = {}
        refusals = []
        for envelope in client.fetch_offers(self._send):
            try:
                offer = self._accept(envelope, accepted, now)
                accepted[offer.study] = offer
            except (OfferError, ServiceError) as problem:
                refusals.append(str(problem))
        self.refused = tuple(refusals)
        digests = {each.dictionary for each in accepted.values() if each.dictionary is not None}
        with self._transaction() as state:
            self._box.drop_rounds(accepted.keys() | state.offers.keys())
            state.offers = accepted
            self._box.drop_dictionaries(digests)
            self._box.drop_models(set(accepted))
            return self._offered_studies(state)

    def known_offers(self) -> list[OfferedStudy]:
        """The studies of the last fetch, without a request."""
        return self._offered_studies(self._peek())

    def consent(self, study: str) -> None:
        """The user agrees to the terms on which the study is offered now."""
        offer = self._peek().offers.get(study)
        if offer is None:
            raise OfferError(
                "consent must be to a study that is offered; this one is not",
                hint="fetch the offers, and use the study's name as it appears there",
            )
        self._fetch_dictionary(offer)
        with self._transaction() as state:
            state.outbox.consent(study)
            state.agreements[study] = offer

    def set_passcode(self, study: str, passcode: str) -> None:
        """Keep the passcode of a study, in place of an earlier one.

        It is sent with the reports of this study, and when the device joins its masked rounds; the
        study's offers say whether it is needed. Reports that were refused without it are due again.
        All devices have the same one, so it identifies none of them.
        """
        passcodes.check(passcode)
        with self._transaction() as state:
            if state.passcodes.get(study) == passcode:
                return
            state.passcodes[study] = passcode
            state.retries = {
                task: retry
                for task, retry in state.retries.items()
                if state.outbox.study_of(task) != study
            }

    def withdraw(self, study: str) -> None:
        """The user opts out: delete consent and everything unsent; keep ledger and log."""
        with self._transaction() as state:
            state.outbox.withdraw(study)
            state.agreements.pop(study, None)
            self._box.drop_round(study)

    def record(self, study: str, value: Value, now: float) -> Outcome | SkipReason:
        """Privatise a value at once and keep the result, if the user agreed and the limits allow.

        A study with trust "central" accepts one report per task, at most the offer's
        `contributions` in total; the report may cover several values. A local study accepts one
        value per call. A study with masked tables (always so with trust "secure") needs `join`.

        For a local study, exactly `daily_reports` records are sent for each day on which this was
        called. Records without a value say "none", as do words that are already known or have
        another alphabet. `take_part` begins a day without a value: call it every day, and the
        traffic does not reveal whether anything happened.
        """
        with self._transaction() as state:
            offer = self._open(state, study, now)
            if not isinstance(offer, Offer):
                return offer
            if offer.task.is_masked:
                return SkipReason.NOT_ASKED_FOR
            task, outbox, rule = offer.task, state.outbox, offer.rule
            if task.id not in state.tasks:
                state.tasks[task.id] = to_json(task)
            privatise = privatiser(offer, value, self._places(offer))
            if not isinstance(task, Task):
                outcome = outbox.take_part(rule, none_privatiser(task), now=now, rng=self._rng)
                if privatise is None or outcome is not Outcome.QUEUED:
                    return outcome
                return outbox.record(rule, privatise, now=now, rng=self._rng)
            assert privatise is not None  # a table is always sent, if only zeros
            if not state.may_contribute(offer, task):
                return Outcome.LIFETIME_SPENT
            outcome = outbox.record(rule, privatise, now=now, rng=self._rng)
            if outcome in (Outcome.QUEUED, Outcome.REPLACED_ANOTHER):
                state.contribute(offer, task)
            return outcome

    def take_part(self, now: float) -> None:
        """Begin the day in every local study that the user agreed to, with or without events.

        It is the same as `record` without a value. Call it on a timer, at least once a day.
        """
        for study in self.known_offers():
            if study.consent == "given" and study.offer.task.is_local:
                self.record(study.offer.study, (), now)

    def part(self, study: str, value: Value, now: float) -> RoundClient | Outcome | SkipReason:
        """This device's part in a masked round of a study, to be driven by the caller.

        It continues an unfinished round, or begins one if the user agreed and the contribution
        bound allows it. Only the returned client holds the value, until its table is masked.

        To train a model, the value is a function (`Train`) that computes the update from the
        model's terms, its parameters and a random generator; it is called when the cohort is
        complete and the table is to be masked. The parameters are fetched here, which raises
        ServiceError if the collector does not answer.
        """
        self._fetch_model(study, now)
        with self._transaction() as state:
            passcode = state.passcodes.get(study)
            if self._box.round(study) is None:
                offer = self._open(state, study, now)
                if not isinstance(offer, Offer):
                    return offer
                if not isinstance(offer.task, Task) or not offer.task.is_masked:
                    return SkipReason.NOT_ASKED_FOR
                if not state.may_contribute(offer, offer.task):
                    return Outcome.LIFETIME_SPENT
                if offer.model is not None and self._parameters(offer) is None:
                    return SkipReason.NOT_OFFERED  # another process just fetched another round
                RoundClient.begin(self._box, offer, rng=self._rng)
        part = RoundClient(self._box, self._transaction, self._key, study, rng=self._rng)
        part.passcode = passcode
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
        timeout_seconds: float = TIMEOUT_SECONDS,
        cohort_seconds: float = math.inf,
        pause: Callable[[float], None] = time.sleep,
    ) -> RoundOutcome | Outcome | SkipReason:
        """Take part in a masked round of a study, and return when it is over for this device.

        If there is no progress for `timeout_seconds`, no round after `cohort_seconds`, or if the
        app crashes, another call continues where this one stopped.
        """
        try:
            part = self.part(study, value, now)
        except ServiceError:
            return RoundOutcome.UNREACHABLE
        if not isinstance(part, RoundClient):
            return part
        return drive(
            part,
            self._send,
            self._random,
            timeout_seconds=timeout_seconds,
            cohort_seconds=cohort_seconds,
            pause=pause,
        )

    def send(self, now: float) -> SendSummary:
        """Send the records that are due, together for each task; call it on a timer.

        A record without confirmed receipt is sent again, with the same bytes and report id, after
        a wait: as long as the collector asks, plus a random time whose bound doubles each time.
        """
        with self._transaction() as state:
            due = state.outbox.due(now)
            ids = state.report_ids
            state.report_ids = {
                each.id: ids.get(each.id) or self._rng.words(2).tobytes().hex() for each in due
            }
            tasks = {record.task_id for record in due}
            state.retries = {task: at for task, at in state.retries.items() if task in tasks}
            report_ids, retries = dict(state.report_ids), dict(state.retries)
            studies = {task: state.outbox.study_of(task) or "" for task in tasks}
            codes = {task: state.passcodes.get(study) for task, study in studies.items()}
        summary = SendSummary()
        reachable = True
        for task, group in groupby(due, key=lambda record: record.task_id):
            records = list(group)
            if task in retries and now < retries[task].at <= now + _LATEST_RETRY:
                summary += SendSummary(pending=len(records))
            else:
                reports = [
                    Report(task, bytes.fromhex(report_ids[record.id]), record.data)
                    for record in records
                ]
                of_task, reachable = self._upload(
                    task, records, reports, codes[task], now, reachable
                )
                summary += of_task
        return summary

    def log(self) -> list[LogEntry]:
        """The records that were sent, are on the way or are waiting, for the user to see."""
        return self._peek().outbox.log()

    def explain(self, task_id: str, data: bytes) -> dict[str, Any]:
        """How a record in the log was made, and what it says (`log.explain`); only its bytes if an
        older version recorded it."""
        text = self._peek().tasks.get(task_id)
        return {"record": data.hex()} if text is None else explain(from_json(text), data)

    def spent(self, study: str | None = None) -> float:
        """The epsilon of all records ever sent, for one study or for all."""
        return self._peek().outbox.spent(study)

    def delete(self, study: str | None = None) -> int:
        """Delete unsent records, of one study or of all; returns how many."""
        with self._transaction() as state:
            return state.outbox.delete(study)

    def close(self) -> None:
        self._box.close()
        close = getattr(self._send, "close", None)
        if close is not None:
            close()

    def _open(self, state: State, study: str, now: float) -> Offer | Outcome | SkipReason:
        """The study's offer, if the user agreed to it and its dictionary is here."""
        offer = state.offers.get(study)
        if offer is None or _is_closed(offer, now):
            return SkipReason.NOT_OFFERED
        agreement = state.agreements.get(study)
        if agreement is None:
            return Outcome.NO_CONSENT
        if changes(agreement, offer):
            return SkipReason.CONSENT_AGAIN
        if offer.passcode and study not in state.passcodes:
            return SkipReason.NO_PASSCODE
        if offer.dictionary is not None and self._dictionary(offer) is None:
            return SkipReason.NOT_OFFERED
        return offer

    def _places(self, offer: Offer) -> dict[str, int] | None:
        dictionary = self._dictionary(offer)
        return None if dictionary is None else dictionary.places()

    def _accept(self, envelope: Any, accepted: dict[str, Offer], now: float) -> Offer:
        """The offer in an envelope, if this device can take part in it."""
        offer = verify(envelope, self._key)
        if offer.min_version > WIRE_VERSION:
            raise OfferError(
                f"this study needs wire version {offer.min_version} or later; "
                f"this device has {WIRE_VERSION}; update it"
            )
        if _is_closed(offer, now):
            raise OfferError("a study must be open; this one is closed")
        if offer.study in accepted:
            raise OfferError("a study must be offered once; this one is offered twice")
        if offer.study in self._peek().agreements:
            self._fetch_dictionary(offer)
        return offer

    def _fetch_dictionary(self, offer: Offer) -> None:
        """Fetch the offer's dictionary if it is missing, so that recording needs no request."""
        if offer.dictionary is None:
            return
        if self._box.dictionary(offer.dictionary) is None:
            dictionary = client.fetch_dictionary(self._send, offer.dictionary)
            items = len(dictionary.places())
            if offer.task.takes_categories() and items != offer.task.categories:
                raise OfferError(
                    "a dictionary must have one item for each of its task's "
                    f"{offer.task.categories} categories; got {items}"
                )
            with self._box.transaction():
                self._box.keep_dictionary(dictionary.digest, dictionary.body)

    def _fetch_model(self, study: str, now: float) -> None:
        """Fetch the parameters of the round that this device is about to join, if missing."""
        state = self._peek()
        offer = self._open(state, study, now)
        if not isinstance(offer, Offer) or offer.model is None:
            return
        assert isinstance(offer.task, Task)  # checked by the offer
        is_in_round = self._box.round(study) is not None
        if is_in_round or not state.may_contribute(offer, offer.task) or self._parameters(offer):
            return
        body = client.fetch_model(self._send, offer.model)
        with self._box.transaction():
            self._box.keep_model(study, offer.model.digest, body)

    def _parameters(self, offer: Offer) -> bytes | None:
        """The model's parameters for the round that is offered, if they are here."""
        if offer.model is None or (model := self._box.model(offer.study)) is None:
            return None
        digest, body = model
        return body if digest == offer.model.digest else None

    def _dictionary(self, offer: Offer) -> client.Dictionary | None:
        """The offer's dictionary; None while another process is still fetching it."""
        body = None if offer.dictionary is None else self._box.dictionary(offer.dictionary)
        return None if body is None else client.Dictionary(str(offer.dictionary), body)

    def _upload(
        self,
        task: str,
        records: list[OutgoingRecord],
        reports: list[Report],
        passcode: str | None,
        now: float,
        reachable: bool,
    ) -> tuple[SendSummary, bool]:
        """Send the reports of one task, and store what became of them."""
        summary, start = SendSummary(), 0
        for piece in client.split_into_uploads(reports):
            batch = records[start : start + len(piece)]
            start += len(piece)
            answer = client.Upload(stored=False)
            if reachable:
                try:
                    answer = client.upload(self._send, task, piece, passcode)
                except ServiceError:
                    reachable = False  # do not try the next tasks either
            with self._transaction() as state:
                summary += self._settle(state, task, batch, answer, now)
        return summary, reachable

    def _settle(
        self,
        state: State,
        task: str,
        records: list[OutgoingRecord],
        answer: client.Upload,
        now: float,
    ) -> SendSummary:
        if answer.stored:
            state.retries.pop(task, None)
            state.outbox.confirm([record.id for record in records], now)
            for record in records:
                state.report_ids.pop(record.id, None)
            return SendSummary(delivered=len(records), rejected=answer.rejected)
        if answer.is_over:
            return SendSummary(forgotten=state.outbox.forget(task))
        failures = state.retries[task].failures + 1 if task in state.retries else 1
        longest = min(FIRST_RETRY * 2.0 ** min(failures - 1, 32), LONGEST_RETRY)
        wait = answer.retry_after_seconds + self._random() * longest
        state.retries[task] = Retry(failures, now + wait)
        count = len(records)
        return SendSummary(pending=count, wrong_passcode=count if answer.wrong_passcode else 0)

    def _random(self) -> float:
        return int(self._rng.words(1)[0]) / 2.0**64

    def _offered_studies(self, state: State) -> list[OfferedStudy]:
        return [
            _offered_study(state.agreements.get(offer.study), offer)
            for offer in state.offers.values()
        ]

    def _peek(self) -> State:
        """The current state, read-only."""
        with self._box.transaction():
            return self._read(self._box.read())

    def _read(self, text: str | None) -> State:
        if text is None:
            return State()
        return self._state if text == self._text else State.from_json(text)

    @contextmanager
    def _transaction(self) -> Iterator[State]:
        """The state, to change: read, changed and written in one transaction of the box."""
        try:
            with self._box.transaction():
                text = self._box.read()
                state = self._read(text)
                self._text = ""  # until it is written, the copy in memory is not the state
                yield state
                new_text = state.to_json()
                if new_text != text:
                    self._box.write(new_text)
            self._state, self._text = state, new_text
        except BaseException:
            self._state, self._text = State(), ""
            raise

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._peek()
        return f"Device({len(state.agreements)} studies agreed to, {state.outbox!r})"


def _offered_study(agreement: Offer | None, offer: Offer) -> OfferedStudy:
    if agreement is None:
        return OfferedStudy(offer, "none")
    worse = changes(agreement, offer)
    return OfferedStudy(offer, "again" if worse else "given", worse)


def _is_closed(offer: Offer, now: float) -> bool:
    return offer.closes is not None and now >= (offer.closes + 1) * DAY_SECONDS


_MUST_STAY = ("purpose", "question", "trust", "segments")
_MUST_NOT_GROW = (
    "epsilon",
    "delta",
    "daily_reports",
    "lifetime_epsilon",
    "items_per_report",
    "contributions",
)


def changes(agreement: Offer, offer: Offer) -> tuple[str, ...]:
    """The terms that an offer makes worse than the user agreed to; they need consent again.

    Better terms do not need it. For tables, the promise is the noise that the offer states: it must
    not decrease. If the offer states none, the task's mechanism must stay the same. A masked sum
    must not require more trust in the collector or in other devices.
    """
    worse = [name for name in _MUST_STAY if getattr(agreement, name) != getattr(offer, name)]
    worse += [name for name in _MUST_NOT_GROW if _limit(offer, name) > _limit(agreement, name)]
    if agreement.masked and not offer.masked:
        worse.append("masked")
    if offer.delay_seconds < agreement.delay_seconds:
        worse.append("delay_seconds")
    if isinstance(agreement.task, Task) and isinstance(offer.task, Task):
        before, after = agreement.task.mechanism, offer.task.mechanism
        if agreement.noise is not None and (offer.noise or 0.0) < agreement.noise:
            worse.append("noise")
        if agreement.noise is None or isinstance(after, ListedAbove):
            worse += [] if _promise(before) == _promise(after) else ["mechanism"]
        if offer.task.min_count < agreement.task.min_count:
            worse.append("min_count")
        if _model_promise(agreement.model) != _model_promise(offer.model):
            worse.append("model")
        worse += _weaker_masking(agreement.task, offer.task)
    return tuple(worse)


def _weaker_masking(agreement: Task, offer: Task) -> list[str]:
    """The terms of a masked sum that protect against fewer or weaker adversaries than before."""
    before, after = agreement.aggregation, offer.aggregation
    if not (isinstance(before, Masked) and isinstance(after, Masked)):
        return []  # trust has changed
    worse = [
        name
        for name in ("corrupt", "security_bits")
        if getattr(after, name) < getattr(before, name)
    ]
    if before.mode == "semi_malicious" != after.mode:
        worse.append("mode")
    return worse


def _promise(mechanism: Mechanism) -> object:
    """The part of a mechanism that must stay; the sampling rate only if it amplifies privacy."""
    if isinstance(mechanism, ListedAbove) and not mechanism.amplified:
        names = [field.name for field in fields(mechanism) if field.name != "rate"]
        return [getattr(mechanism, name) for name in names]
    return mechanism


def _model_promise(model: ModelTerms | None) -> object:
    """The part of a model that must stay: everything except the round and its parameters."""
    return None if model is None else replace(model, digest="0" * 64, round=1)


def _limit(offer: Offer, name: str) -> float:
    """A limit as a number; infinite if there is none."""
    value = getattr(offer, name)
    return math.inf if value is None else float(value)

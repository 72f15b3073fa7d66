"""A device over real HTTP: consent, what it keeps, what it sends, and when it tries again."""

from __future__ import annotations

import json
import math
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.device.standin import KEY, PUBLIC, StandIn, running
from sfumato.device import Device, Http, MemoryBox, SendSummary, SkipReason, SqliteBox
from sfumato.device.box import State
from sfumato.device.device import FIRST_RETRY, changes
from sfumato.device.offers import Offer, sign
from sfumato.device.outbox import Outcome
from sfumato.errors import OfferError, ServiceError, SpecError
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.segments import pair
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import PrefixExtension, WordTask
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    NoiseAtRelease,
    NoNoise,
    SeededRng,
)
from sfumato.privacy.listing import without_promise
from sfumato.privacy.randomizers.apple_records import read_apple_records
from sfumato.sketch import CountSketch, ItemCounts, OneHot, TextKeys, WordKeys

DAY = 20_000
NOON = DAY * 86_400 + 43_200.0
LATER = (DAY + 2) * 86_400.0  # when all records of noon are due
CANARY = "canary-0f1e2d"

HASHED = Offer(
    study="Street trees",
    purpose="Which trees to plant next.",
    question="frequencies",
    trust="local",
    task=LocalTask(
        randomizer=HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1), cohort="everybody"
    ),
    epsilon=4.0,
    delay_seconds=3600,
)
TWO = replace(HASHED, daily_reports=2)
WORDS = Offer(
    study="New words",
    purpose="Which words the keyboard does not know.",
    question="new_words",
    trust="local",
    task=WordTask(
        discoverer=PrefixExtension(
            prefix=HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1), lengths=(2, 4)
        ),
        cohort="everybody",
    ),
    epsilon=4.0,
)


def direct(server: StandIn) -> Offer:
    task = LocalTask(randomizer=DirectResponse(epsilon=20.0, categories=3), cohort="everybody")
    return replace(HASHED, task=task, epsilon=20.0, dictionary=server.keep(["ash", "elm", "oak"]))


def central(server: StandIn, items_per_device: int = 1, cohort: str = "round 0") -> Offer:
    task = Task(
        sketch=OneHot(categories=3),
        mechanism=NoNoise(),
        aggregation=Plain(modulus_bits=8),
        cohort=cohort,
        items_per_device=items_per_device,
        max_count=50,
    )
    return Offer(
        study="Trusted trees",
        purpose="Which trees to plant next.",
        question="frequencies",
        trust="central",
        task=task,
        epsilon=None,
        items_per_report=items_per_device,
        dictionary=server.keep(["ash", "elm", "oak"]),
    )


def sparse(offer: Offer) -> Offer:
    """The same question, whose devices send the places of their items."""
    assert isinstance(offer.task, Task)
    entries = Sparse(entries=offer.task.items_per_device, entry_bits=2)
    return replace(offer, study="Sparse trees", task=replace(offer.task, aggregation=entries))


def items_of(keys: TextKeys | WordKeys, study: str, items_per_device: int = 1) -> Offer:
    """Ask for items of an open domain, which devices send themselves."""
    task = Task(
        sketch=ItemCounts(keys=keys),
        mechanism=without_promise(1.0, items_per_device),
        aggregation=Sparse(entries=items_per_device, entry_bits=keys.bits),
        cohort="round 0",
        items_per_device=items_per_device,
        max_count=50,
    )
    return Offer(
        study=study,
        purpose="Which trees to plant next.",
        question="heavy_hitters",
        trust="central",
        task=task,
        epsilon=None,
        items_per_report=items_per_device,
    )


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as server:
        yield server


@pytest.fixture
def make(server: StandIn, tmp_path: Path) -> Iterator[Callable[..., Device]]:
    opened: list[Device] = []

    def device(name: str = "box.db", **options: Any) -> Device:
        send = options.pop("send", None) or Http(server.url)
        opened.append(Device(SqliteBox(tmp_path / name), send, PUBLIC, **options))
        return opened[-1]

    yield device
    for device_ in opened:
        device_.close()


@pytest.fixture
def device(make: Callable[..., Device]) -> Device:
    return make()


def agreed(device: Device, server: StandIn, *offers: Offer) -> Device:
    server.offer(*offers)
    device.offers(NOON)
    for offer in offers:
        device.consent(offer.study)
    return device


def test_nothing_is_recorded_before_consent(device: Device, server: StandIn) -> None:
    server.offer(HASHED)
    (offered,) = device.offers(NOON)
    assert (offered.offer, offered.consent) == (HASHED, "none")
    assert device.record("Street trees", "oak", NOON) is Outcome.NO_CONSENT
    assert device.send(LATER) == SendSummary()
    assert [request[0] for request in server.requests] == ["GET"]


def test_a_value_is_sent_as_a_record_of_the_task(device: Device, server: StandIn) -> None:
    agreed(device, server, HASHED)
    assert device.offers(NOON)[0].consent == "given"
    assert device.record("Street trees", "oak", NOON) is Outcome.QUEUED
    assert device.send(NOON + 60) == SendSummary()  # its day is not over
    assert device.send(LATER) == SendSummary(delivered=1)
    assert device.send(LATER) == SendSummary()
    (report,) = server.reports
    assert report.task_id == HASHED.task.id
    assert len(report.message) == HASHED.task.message_bytes
    (entry,) = device.log()
    assert (entry.state, entry.records) == ("sent", ((HASHED.task.id, report.message),))
    assert device.spent() == 4.0


def test_the_records_of_a_direct_response_are_places_in_the_dictionary(
    device: Device, server: StandIn
) -> None:
    """At epsilon 20 a lie has a probability below 1e-8."""
    agreed(device, server, direct(server))
    for day, value in enumerate(["oak", "ash", "yew"]):
        device.record("Street trees", value, NOON + day * 86_400)
        device.send(LATER + day * 86_400)
    assert server.messages == [b"\x02", b"\x00", b"\x03"]  # the last is "other"


def test_recording_asks_the_network_for_nothing(device: Device, server: StandIn) -> None:
    agreed(device, server, direct(server))
    before = len(server.requests)
    device.record("Street trees", "oak", NOON)
    assert len(server.requests) == before


WHAT_HAPPENS: list[Any] = [
    "elm",
    "oak",
    "h2o",
    "",
    (),
    ("elm", "oak", "ash", "fir"),
    ("h2o", "oak"),
]


def view_of(device: Device, server: StandIn, offer: Offer, happens: Any) -> list[object]:
    """The collector's view of a device on two days, except for bytes that are random."""
    agreed(device, server, offer)
    server.requests.clear()
    for day in range(2):
        now = NOON + day * 86_400
        for value in [happens] if isinstance(happens, str) else happens or [()]:
            device.record(offer.study, value, now)
    sending = device.send(NOON + 9 * 86_400)
    reports = [(report.task_id, len(report.message)) for report in server.reports]
    requests = [(method, path, len(body)) for method, path, _, body in server.requests]
    return [sending, reports, requests, device.spent()]


@pytest.mark.parametrize("study", ["words", "words, three a day", "hashed", "direct, two a day"])
@pytest.mark.parametrize("happens", WHAT_HAPPENS, ids=repr)
def test_traffic_does_not_depend_on_the_values_of_a_device(
    device: Device, server: StandIn, study: str, happens: Any
) -> None:
    """A known word, one of another alphabet, none, several: the same number, size and cost.
    The control is the test of an outbox without `take_part`, which sends fewer records."""
    words = replace(WORDS, delay_seconds=3600, dictionary=server.keep(["oak"]))
    offers = {
        "words": words,
        "words, three a day": replace(words, daily_reports=3),
        "hashed": HASHED,
        "direct, two a day": replace(direct(server), daily_reports=2),
    }
    offer = offers[study]
    assert offer.epsilon is not None
    size = HEADER_BYTES + offer.task.message_bytes + 4
    count = 2 * offer.daily_reports
    assert view_of(device, server, offer, happens) == [
        SendSummary(delivered=count),
        [(offer.task.id, offer.task.message_bytes)] * count,
        [("POST", f"/v1/tasks/{offer.task.id}/reports", count * size)],
        count * offer.epsilon,
    ]


def test_a_new_word_is_sent_in_place_of_records_that_say_nothing(
    device: Device, server: StandIn
) -> None:
    """At epsilon 20 a lie has a probability below 1e-5."""
    assert isinstance(WORDS.task, WordTask)
    prefix = HashedResponse(epsilon=20.0, rows=1, width=1000, seed=1)
    search = PrefixExtension(prefix=prefix, lengths=(4,))
    task = replace(WORDS.task, discoverer=search)
    offer = replace(WORDS, task=task, epsilon=20.0, daily_reports=3)
    agreed(device, server, replace(offer, dictionary=server.keep(["oak"])))
    assert device.record("New words", (), NOON) is Outcome.QUEUED
    assert device.record("New words", "oak", NOON) is Outcome.QUEUED
    assert device.record("New words", "elm", NOON) is Outcome.QUEUED
    assert device.record("New words", "h2o", NOON) is Outcome.QUEUED
    assert device.record("New words", "fir", NOON) is Outcome.QUEUED
    assert device.send(LATER + 86_400) == SendSummary(delivered=3)
    sure = {
        word: search.randomize(search.codes([word])[0], rng=SeededRng(1)).tobytes()
        for word in ("elm", "fir", "")
    }
    assert sorted(server.messages) == sorted(sure.values())


def test_the_first_task_of_a_day_has_all_of_its_records(device: Device, server: StandIn) -> None:
    """The number for each task would otherwise reveal when the events happened."""
    agreed(device, server, TWO)
    device.record("Street trees", (), NOON)
    assert isinstance(TWO.task, LocalTask)
    other = replace(TWO, task=replace(TWO.task, cohort="round 1"))
    server.offer(other)
    device.offers(NOON)
    assert device.record("Street trees", "oak", NOON) is Outcome.DAY_OVER
    assert device.record("Street trees", "oak", NOON + 86_400) is Outcome.QUEUED
    device.send(NOON + 9 * 86_400)
    assert Counter(report.task_id for report in server.reports) == {
        TWO.task.id: 2,
        other.task.id: 2,
    }


def test_a_device_takes_part_in_every_local_study_that_its_user_agreed_to(
    device: Device, server: StandIn
) -> None:
    agreed(device, server, TWO, WORDS, central(server))
    for hour in range(3):
        device.take_part(NOON + 3600 * hour)
    assert device.send(NOON + 9 * 86_400) == SendSummary(delivered=3)
    assert Counter(report.task_id for report in server.reports) == {
        TWO.task.id: 2,
        WORDS.task.id: 1,
    }


def test_a_day_has_as_many_records_as_the_lifetime_allows(device: Device, server: StandIn) -> None:
    agreed(device, server, replace(TWO, daily_reports=5, lifetime_epsilon=12.0))
    for day in range(3):
        device.record("Street trees", "oak", NOON + day * 86_400)
        expected = SendSummary(delivered=3) if day == 0 else SendSummary()
        assert device.send(LATER + day * 86_400) == expected
    assert device.spent() == 12.0


def test_a_trusted_collector_gets_one_table_of_a_device_ever(
    device: Device, server: StandIn
) -> None:
    agreed(device, server, central(server))
    assert device.record("Trusted trees", "oak", NOON) is Outcome.QUEUED
    assert device.record("Trusted trees", "ash", NOON + 86_400) is Outcome.QUEUED
    assert device.send(NOON + 9 * 86_400) == SendSummary(delivered=1)
    assert server.messages in ([b"\x00\x00\x01"], [b"\x01\x00\x00"])
    server.offer(central(server, cohort="round 1"))  # the same study asks others
    assert device.offers(NOON + 10 * 86_400)[0].consent == "given"
    again = device.record("Trusted trees", "elm", NOON + 10 * 86_400)
    assert again is Outcome.LIFETIME_SPENT
    assert device.send(NOON + 20 * 86_400) == SendSummary()
    assert device.spent("Trusted trees") == math.inf
    assert "which the collector can read" in str(device.log()[0])


def test_several_values_go_into_one_table_as_far_as_there_is_room(
    device: Device, server: StandIn
) -> None:
    agreed(device, server, central(server, items_per_device=2))
    assert device.record("Trusted trees", ["oak", "yew", "oak", "oak"], NOON) is Outcome.QUEUED
    device.send(NOON + 9 * 86_400)
    assert server.messages in ([b"\x00\x00\x01"], [b"\x00\x00\x02"])


def test_a_device_that_holds_nothing_listed_sends_an_empty_table(
    device: Device, server: StandIn
) -> None:
    agreed(device, server, central(server))
    device.record("Trusted trees", "yew", NOON)
    device.send(NOON + 9 * 86_400)
    assert server.messages == [b"\x00\x00\x00"]


def test_a_sketch_of_an_open_domain_needs_no_dictionary(device: Device, server: StandIn) -> None:
    task = central(server).task
    assert isinstance(task, Task)
    sketch = CountSketch(rows=3, width=8, seed=1)
    task = replace(task, sketch=sketch, mechanism=NoiseAtRelease(noise="gaussian", scale=2.0))
    agreed(device, server, replace(central(server), task=task, dictionary=None))
    device.record("Trusted trees", "oak", NOON)
    device.send(NOON + 9 * 86_400)
    assert isinstance(task.aggregation, Plain)
    table = task.aggregation.open(task.aggregation.unpack(server.messages[0], sketch.shape))
    assert np.array_equal(table, sketch.encode(["oak"]))


@pytest.mark.parametrize(
    "envelope",
    [
        {"offer": sign(HASHED, KEY)["offer"]},
        {**sign(HASHED, KEY), "signature": ""},
        sign(HASHED, bytes(32)),
        {**sign(HASHED, KEY), "offer": sign(WORDS, KEY)["offer"]},
        sign(replace(HASHED, min_version=2), KEY),
        sign(replace(HASHED, closes=DAY - 1), KEY),
        "an offer",
        None,
    ],
    ids=["unsigned", "empty", "other key", "changed", "newer wire", "closed", "text", "null"],
)  # fmt: skip
def test_an_offer_that_cannot_be_trusted_is_not_taken(
    device: Device, server: StandIn, envelope: Any
) -> None:
    server.envelopes = [envelope, sign(WORDS, KEY)]
    assert [offered.offer for offered in device.offers(NOON)] == [WORDS]  # the others are
    assert len(device.refused) == 1
    with pytest.raises(OfferError, match="offered"):
        device.consent("Street trees")
    assert device.record("Street trees", "oak", NOON) is SkipReason.NOT_OFFERED


def test_a_study_that_is_offered_twice_is_taken_once(device: Device, server: StandIn) -> None:
    server.offer(HASHED, replace(HASHED, daily_reports=50))
    assert [offered.offer for offered in device.offers(NOON)] == [HASHED]
    assert device.refused == ("a study must be offered once; this one is offered twice",)


def wider(**changed: Any) -> Offer:
    return replace(HASHED, **{"lifetime_epsilon": 40.0, "daily_reports": 2, **changed})


def with_epsilon(epsilon: float) -> Offer:
    assert isinstance(HASHED.task, LocalTask)
    randomizer = replace(HASHED.task.randomizer, epsilon=epsilon)  # type: ignore[type-var]  # a dataclass
    return wider(task=replace(HASHED.task, randomizer=randomizer), epsilon=epsilon)


WORSE = {
    "epsilon": with_epsilon(5.0),
    "daily_reports": wider(daily_reports=3),
    "delay_seconds": wider(delay_seconds=60),
    "lifetime_epsilon": wider(lifetime_epsilon=80.0),
    "purpose": wider(purpose="Who likes trees."),
}
BETTER = {
    "epsilon": with_epsilon(3.0),
    "daily_reports": wider(daily_reports=1),
    "delay_seconds": wider(delay_seconds=7200),
    "lifetime_epsilon": wider(lifetime_epsilon=8.0),
}


@pytest.mark.parametrize("name", WORSE)
def test_worse_terms_need_consent_again(device: Device, server: StandIn, name: str) -> None:
    agreed(device, server, wider())
    server.offer(WORSE[name])
    (offered,) = device.offers(NOON)
    assert (offered.consent, offered.changes) == ("again", (name,))
    assert device.record("Street trees", "oak", NOON) is SkipReason.CONSENT_AGAIN
    device.consent("Street trees")
    assert device.offers(NOON)[0].consent == "given"
    assert device.record("Street trees", "oak", NOON) is Outcome.QUEUED


@pytest.mark.parametrize("name", BETTER)
def test_better_terms_need_no_consent(device: Device, server: StandIn, name: str) -> None:
    agreed(device, server, wider())
    server.offer(BETTER[name])
    assert device.offers(NOON)[0].consent == "given"
    assert device.record("Street trees", "oak", NOON) is Outcome.QUEUED


def test_less_noise_of_a_trusted_collector_needs_consent_again(
    device: Device, server: StandIn
) -> None:
    offer = central(server)
    assert isinstance(offer.task, Task)
    noised = replace(offer.task, mechanism=NoiseAtRelease(noise="gaussian", scale=9.0))
    agreed(device, server, replace(offer, task=noised))
    server.offer(offer)
    assert device.offers(NOON)[0].changes == ("mechanism",)
    assert device.record("Trusted trees", "oak", NOON) is SkipReason.CONSENT_AGAIN


@pytest.mark.parametrize(("noise", "worse"), [(9.0, ()), (4.0, ("noise",)), (None, ("noise",))])
def test_noise_that_an_offer_names_is_what_counts(
    server: StandIn, noise: float | None, worse: tuple[str, ...]
) -> None:
    """Rounds may differ in their noise as long as none has less than was agreed to."""
    offer = central(server)
    assert isinstance(offer.task, Task)
    less, more = (
        replace(offer.task, mechanism=NoiseAtRelease(noise="gaussian", scale=scale))
        for scale in (8.0, 10.0)
    )
    agreed_to = replace(offer, task=less, noise=5.0)
    assert changes(agreed_to, replace(offer, task=more, noise=noise)) == worse


def test_more_contributions_need_consent_again(server: StandIn) -> None:
    offer = central(server)
    assert changes(offer, replace(offer, contributions=2)) == ("contributions",)
    assert changes(replace(offer, contributions=2), offer) == ()


def test_waiting_records_of_a_study_that_is_no_longer_offered_are_sent(
    device: Device, server: StandIn
) -> None:
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    server.offer()
    assert device.offers(NOON) == []
    assert device.record("Street trees", "oak", NOON) is SkipReason.NOT_OFFERED
    assert device.send(LATER) == SendSummary(delivered=1)


def test_withdrawing_deletes_what_was_not_sent(device: Device, server: StandIn) -> None:
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    device.withdraw("Street trees")
    assert device.log() == []
    assert device.record("Street trees", "oak", NOON) is Outcome.NO_CONSENT
    assert device.send(LATER) == SendSummary()


def test_deleting_leaves_consent(device: Device, server: StandIn) -> None:
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    assert device.delete() == 1
    assert device.record("Street trees", "oak", NOON) is Outcome.QUEUED


@pytest.mark.parametrize("status", [429, 503, 507, 408, 500, 400, 302])
def test_a_failed_upload_is_tried_again_with_the_same_bytes(
    device: Device, server: StandIn, status: int
) -> None:
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    server.script = [(status, {})]
    assert device.send(LATER) == SendSummary(pending=1)
    assert device.send(LATER + FIRST_RETRY) == SendSummary(delivered=1)
    first, second = [body for method, _, _, body in server.requests if method == "POST"]
    assert first == second


def test_an_answer_that_got_lost_counts_a_report_once(
    make: Callable[..., Device], server: StandIn
) -> None:
    """The first connection is fresh, so the loss is not taken for a stale one."""
    device = agreed(make(), server, HASHED)
    device.record("Street trees", "oak", NOON)
    device.close()
    server.script = [(0, {})]
    device = make()
    assert device.send(LATER) == SendSummary(pending=1)
    device.close()
    device = make()  # the app was restarted
    assert device.send(LATER + FIRST_RETRY) == SendSummary(delivered=1)
    assert len(server.reports) == 2
    assert len(server.messages) == 1


def test_a_collector_that_is_away_is_asked_once_a_call(
    make: Callable[..., Device], server: StandIn
) -> None:
    calls = []

    def away(method: str, path: str, body: bytes, headers: Any) -> Any:
        calls.append(path)
        raise ServiceError("away")

    agreed(make(), server, HASHED, WORDS)
    device = make(send=away)
    device.record("Street trees", "oak", NOON)
    device.record("New words", "elm", NOON)
    assert device.send(LATER + 86_400) == SendSummary(pending=2)
    assert len(calls) == 1


def test_waits_double_and_keep_what_the_collector_asks_for(
    make: Callable[..., Device], server: StandIn
) -> None:
    """The k-th wait is the 100 seconds asked for, plus a uniform time below 30·2^k. For 40 devices,
    the largest is in the upper half of that range, except with probability 2^-40."""
    waits: list[list[float]] = []
    for seed in range(40):
        send = Http(server.url)
        box = MemoryBox()
        device = Device(box, send, PUBLIC, rng=SeededRng(seed))
        agreed(device, server, HASHED)
        device.record("Street trees", "oak", NOON)
        now, row = LATER, []
        for _ in range(4):
            server.script = [(429, {"Retry-After": "100"})]
            assert device.send(now) == SendSummary(pending=1)
            retry = State.from_json(box.read() or "").retries[HASHED.task.id]
            row.append(retry.at - now)
            now = retry.at
            before = len(server.requests)
            assert device.send(now - 1) == SendSummary(pending=1)  # not yet
            assert len(server.requests) == before
        waits.append(row)
        send.close()
    for failures, column in enumerate(np.array(waits).T):
        assert (column >= 100).all()
        assert FIRST_RETRY * 2**failures / 2 < column.max() - 100 <= FIRST_RETRY * 2**failures


def test_a_task_that_is_over_is_forgotten(device: Device, server: StandIn) -> None:
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    server.closed.add(HASHED.task.id)
    assert device.send(LATER) == SendSummary(forgotten=1)
    assert device.send(LATER + 86_400) == SendSummary()
    assert device.log() == []


def test_rejected_reports_are_counted_and_not_sent_again(device: Device, server: StandIn) -> None:
    agreed(device, server, TWO)
    for _ in range(2):
        device.record("Street trees", "oak", NOON)
    server.rejecting = 1
    assert device.send(LATER) == SendSummary(delivered=2, rejected=1)
    assert device.send(LATER + 86_400) == SendSummary()


def test_one_upload_per_task(device: Device, server: StandIn) -> None:
    agreed(device, server, TWO, WORDS)
    for day in range(3):
        for _ in range(2):
            device.record("Street trees", "oak", NOON + day * 86_400)
        device.record("New words", "elm", NOON + day * 86_400)
    server.requests.clear()
    assert device.send(NOON + 9 * 86_400) == SendSummary(delivered=9)
    posts = sorted(path for method, path, _, _ in server.requests if method == "POST")
    assert posts == sorted(f"/v1/tasks/{offer.task.id}/reports" for offer in (HASHED, WORDS))
    assert len({report.report_id for report in server.reports}) == 9


def test_every_device_sends_the_same_headers(make: Callable[..., Device], server: StandIn) -> None:
    for name in ("one", "two"):
        device = agreed(make(name), server, HASHED)
        device.record("Street trees", "oak", NOON)
        device.send(LATER)
    host = server.url.removeprefix("http://")
    assert {json.dumps(headers) for _, _, headers, _ in server.requests} == {
        json.dumps({"Host": host, "User-Agent": "sfumato"}),
        json.dumps({"Host": host, "User-Agent": "sfumato", "Content-Length": "55"}),
    }


def test_a_crash_after_any_step_loses_no_charge_and_sends_the_same_bytes(
    make: Callable[..., Device], server: StandIn, tmp_path: Path
) -> None:
    """A device that crashes while sending has its ids on disk before it sends the first byte."""
    device = agreed(make(), server, HASHED)
    device.record("Street trees", "oak", NOON)
    device.close()

    class PowerCut(BaseException):
        pass

    bodies = []

    def cut(method: str, path: str, body: bytes, headers: Any) -> Any:
        bodies.append(body)
        raise PowerCut

    device = make(send=cut)
    with pytest.raises(PowerCut):
        device.send(LATER)
    device.close()
    device = make()
    assert device.spent() == 4.0
    assert device.send(LATER) == SendSummary(delivered=1)
    assert server.requests[-1][3] == bodies[0]


def test_two_processes_may_share_a_box(make: Callable[..., Device], server: StandIn) -> None:
    first, second = make(), make()
    agreed(first, server, TWO)
    assert second.record("Street trees", "oak", NOON) is Outcome.QUEUED
    assert first.record("Street trees", "oak", NOON) is Outcome.QUEUED
    assert second.send(LATER) == SendSummary(delivered=2)
    assert first.send(LATER) == SendSummary()


def test_a_dictionary_of_another_digest_or_length_is_refused(
    device: Device, server: StandIn
) -> None:
    offer = direct(server)
    assert offer.dictionary is not None
    server.offer(offer)
    device.offers(NOON)
    good = server.dictionaries[offer.dictionary]
    server.dictionaries[offer.dictionary] = good + b'"yew"\n'
    with pytest.raises(OfferError, match="digest"):
        device.consent("Street trees")
    short = replace(offer, dictionary=server.keep(["ash", "elm"]))
    server.offer(short)
    device.offers(NOON)
    with pytest.raises(OfferError, match="one item for each of its task's"):
        device.consent("Street trees")
    assert device.record("Street trees", "oak", NOON) is Outcome.NO_CONSENT


def test_a_dictionary_goes_with_its_study(device: Device, server: StandIn, tmp_path: Path) -> None:
    agreed(device, server, direct(server))
    server.offer()
    device.offers(NOON)
    connection = sqlite3.connect(tmp_path / "box.db")
    assert connection.execute("SELECT count(*) FROM dictionary").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize("study", ["local", "words", "central"])
def test_no_value_is_kept_printed_or_sent(
    device: Device, server: StandIn, tmp_path: Path, study: str
) -> None:
    """The records are hashed, so that no dictionary is on disk."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789-"
    words = WordTask(
        discoverer=PrefixExtension(
            prefix=HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1),
            lengths=(2, 16),
            alphabet=alphabet,
        ),
        cohort="everybody",
    )
    offers = {"local": HASHED, "words": replace(WORDS, task=words), "central": central(server)}
    offer = offers[study]
    agreed(device, server, offer)
    assert device.record(offer.study, CANARY, NOON) is Outcome.QUEUED
    texts = [repr(device), repr(device.log()), repr(vars(device))]
    device.send(NOON + 9 * 86_400)
    texts += [repr(device), repr(device.log()), repr(server.requests)]
    spellings = (CANARY, CANARY.encode().hex(), CANARY[:8])
    assert not [spelling for spelling in spellings if spelling in "".join(texts)]
    disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [spelling for spelling in spellings if spelling.encode() in disk]


@pytest.mark.parametrize(
    "value", [f"{CANARY}\ud800", 271_828, ["two", CANARY], None, b"bytes"], ids=repr
)
def test_no_error_shows_a_value(device: Device, server: StandIn, value: Any) -> None:
    agreed(device, server, HASHED)
    with pytest.raises(SpecError) as caught:
        device.record("Street trees", value, NOON)
    text = "".join(traceback.format_exception_only(caught.value))
    assert CANARY not in text
    assert "271828" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert device.log() == []


def test_a_changed_state_is_refused_without_showing_it(
    make: Callable[..., Device], server: StandIn, tmp_path: Path
) -> None:
    device = agreed(make(), server, HASHED)
    device.record("Street trees", "oak", NOON)
    connection = sqlite3.connect(tmp_path / "box.db")
    with connection:
        connection.execute(
            "UPDATE state SET text = replace(text, '\"version\":1', '\"version\":7')"
        )
    connection.close()
    with pytest.raises(SpecError, match="state") as caught:
        device.log()
    assert caught.value.__cause__ is None


def test_a_device_sends_its_items_once_in_a_message_of_one_length(
    device: Device, server: StandIn
) -> None:
    """Sparse reports: of three items, of none that fit, and of items that are there twice."""
    texts = TextKeys(length=4)
    holdings: dict[str, tuple[Offer, list[str]]] = {
        name: (items_of(texts, name, 3), values)
        for name, values in {
            "three": ["oak", "elm", "oak", "ash"],
            "none": ["a text that is too long"],
            "many": ["oak", "elm", "ash", "fir", "yew"],
        }.items()
    }
    holdings["places"] = (sparse(central(server, items_per_device=2)), ["oak", "oak"])
    holdings["unlisted"] = (sparse(central(server, items_per_device=2)), ["oak", "moss"])
    tasks = {}
    for number, (name, (offer, values)) in enumerate(holdings.items()):
        task = replace(offer.task, cohort=f"round {number}")  # studies do not share tasks
        offer = replace(offer, study=name, task=task)
        tasks[task.id] = name
        agreed(device, server, offer)
        assert device.record(name, values, NOON) is Outcome.QUEUED
        device.send(LATER)
    reports = {tasks[report.task_id]: report for report in server.reports}
    assert reports.keys() == holdings.keys()

    def numbers(name: str) -> list[int]:
        aggregation = holdings[name][0].task.aggregation  # type: ignore[union-attr]  # of a Task
        assert isinstance(aggregation, Sparse)
        message = np.frombuffer(reports[name].message, dtype=np.uint8)[None]
        return [int(number) for number in aggregation.unpack(message)[0, :, 0]]

    items = {int(number[0]) for number in texts.numbers(["oak", "elm", "ash", "fir", "yew"])[0]}
    assert len({len(reports[name].message) for name in ("three", "none", "many")}) == 1
    assert numbers("three") == sorted(int(n[0]) for n in texts.numbers(["oak", "elm", "ash"])[0])
    assert numbers("none") == [0, 0, 0]
    assert len(set(numbers("many")) & items) == 3
    assert (numbers("places"), numbers("unlisted")) == ([3, 3], [0, 3])


def segmented(server: StandIn, offer: Offer) -> Offer:
    items = [pair(segment, "oak") for segment in ("en", "fr", "de")]
    return replace(offer, segments=("en", "fr", "de"), dictionary=server.keep(items))


def test_a_segment_and_an_item_are_one_value(device: Device, server: StandIn) -> None:
    """At epsilon 20 a lie has a probability below 1e-8. The segment is in no other part of a
    request: every upload is as long as any other, and the paths are the same."""
    offer = segmented(server, direct(server))
    agreed(device, server, offer)
    uploads = []
    for day, value in enumerate([pair("fr", "oak"), pair("en", "oak"), pair("it", "oak")]):
        before = len(server.requests)
        device.record("Street trees", value, NOON + day * 86_400)
        device.send(LATER + day * 86_400)
        uploads += [(*request[:2], len(request[3])) for request in server.requests[before:]]
    assert server.messages == [b"\x01", b"\x00", b"\x03"]  # the last is "other"
    assert len(set(uploads)) == 1


def test_an_item_without_a_segment_is_refused(device: Device, server: StandIn) -> None:
    local, trusted = segmented(server, direct(server)), segmented(server, central(server))
    agreed(device, server, local, trusted)
    for study in ("Street trees", "Trusted trees"):
        with pytest.raises(SpecError, match="a segment and an item") as caught:
            device.record(study, CANARY, NOON)
        assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert device.record("Street trees", (), NOON) is Outcome.QUEUED  # it says "none"


def test_other_segments_need_consent_again(server: StandIn) -> None:
    offer = segmented(server, direct(server))
    assert changes(offer, replace(offer, segments=("en", "it", "de"))) == ("segments",)
    assert changes(replace(offer, segments=()), offer) == ("segments",)
    with pytest.raises(SpecError, match="segments are for frequencies"):
        replace(WORDS, segments=("en", "fr"))


APPLE = CountMeanSketch(epsilon=4.0, rows=65_536, width=1_024, seed=7)


def test_the_log_shows_each_record_as_figure_3_does(device: Device, server: StandIn) -> None:
    """The parameters and "row,hex" that the log shows are read back to the bytes that were sent."""
    task = LocalTask(randomizer=APPLE, cohort="everybody")
    agreed(device, server, replace(TWO, task=task))
    device.record("Street trees", "oak", NOON)
    device.send(LATER)
    (entry,) = device.log()
    views = [device.explain(task_id, data) for task_id, data in entry.records]
    for record in views:
        assert record["algorithm"] == "count_mean_sketch"
        assert record["record"].startswith(f"{record['row']},")
    text = json.dumps(
        {
            "key": entry.study,
            "parameters": {
                "epsilon": views[0]["epsilon"], "k": views[0]["rows"], "m": views[0]["width"]
            },
            "records": [record["record"] for record in views],
        }
    )  # fmt: skip
    key, sketch, records = read_apple_records(text, seed=7)
    assert (key, sketch) == ("Street trees", APPLE)
    assert sorted(record.tobytes() for record in records) == sorted(server.messages)


RECORDED: dict[str, Any] = {
    "hashed": (HASHED, "hashed_response"),
    "hadamard": (
        replace(
            HASHED,
            task=LocalTask(
                randomizer=HadamardCountMeanSketch(epsilon=4.0, rows=64, width=128, seed=1),
                cohort="everybody",
            ),
        ),
        "hadamard_count_mean_sketch",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_row_in_the_log_is_that_of_the_record(
    device: Device, server: StandIn, name: str
) -> None:
    offer, kind = RECORDED[name]
    agreed(device, server, offer)
    device.record("Street trees", "oak", NOON)
    (entry,) = device.log()
    assert entry.state == "waiting"
    ((task_id, data),) = entry.records
    view = device.explain(task_id, data)
    cells = 56 if name == "hashed" else 2 * 128
    row = int.from_bytes(data, "little") // cells
    assert view == {
        "algorithm": kind,
        "epsilon": 4.0,
        "rows": offer.task.randomizer.rows,
        "width": offer.task.randomizer.width,
        "row": row,
        "record": f"{row},{data.hex()}",
    }


def test_words_and_tables_are_in_the_log_with_their_parts(device: Device, server: StandIn) -> None:
    agreed(device, server, WORDS, central(server))
    device.record("New words", "oaks", NOON)
    device.record("Trusted trees", "oak", NOON)
    views = {}
    for entry in device.log():
        ((task_id, data),) = entry.records
        views[entry.study] = device.explain(task_id, data)
        assert views[entry.study]["record"] == data.hex()
    assert views["New words"]["algorithm"] == "prefix_extension"
    assert views["New words"]["parts"]["prefix"]["rows"] == 1024
    assert (views["Trusted trees"]["algorithm"], views["Trusted trees"]["epsilon"]) == (
        "one_hot",
        None,
    )


def test_a_task_is_kept_as_long_as_its_records(device: Device, server: StandIn) -> None:
    """A record of an older version has no task, and shows its bytes."""
    agreed(device, server, HASHED)
    device.record("Street trees", "oak", NOON)
    text = device._box.read()
    assert text is not None
    assert list(json.loads(text)["tasks"]) == [HASHED.task.id]
    device.delete()
    text = device._box.read()
    assert text is not None
    assert "tasks" not in json.loads(text)
    assert device.explain("0" * 64, b"\x01") == {"record": "01"}

"""The rules of an outbox: what a device keeps and sends, and what its ledger counts."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED, assert_chi_square
from sfumato.device.outbox import (
    DAY_SECONDS,
    LONGEST_DELAY,
    Outbox,
    Outcome,
    OutgoingRecord,
    SendingRule,
)
from sfumato.errors import SpecError
from sfumato.privacy import Rng, SeededRng
from sfumato.spec import canonical, from_json, to_json

U64 = npt.NDArray[np.uint64]

EMOJI = "Popular emoji"
WORDS = "New words"
DAY = 20_000
MORNING = DAY * DAY_SECONDS + 6 * 3600.0
LATER = MORNING + 10 * DAY_SECONDS  # everything of the day is due
RULE = SendingRule(
    study=EMOJI, task_id="5f" * 32, epsilon=4.0, daily_reports=2, delay_seconds=3 * 3600
)
OTHER = SendingRule(study=WORDS, task_id="a0" * 32, epsilon=2.0, daily_reports=3, delay_seconds=60)
CLEAR = "canary-0f1e2d"  # a value; its record is RECORD
RECORD = hashlib.sha256(CLEAR.encode()).digest()[:8]


def consenting(*studies: str, **settings: int) -> Outbox:
    outbox = Outbox(**settings)
    for study in studies or (EMOJI, WORDS):
        outbox.consent(study)
    return outbox


def giving(data: bytes) -> Callable[[Rng], bytes]:
    return lambda rng: data


def filled(
    outbox: Outbox, count: int, rule: SendingRule = RULE, *, now: float = MORNING
) -> list[Outcome]:
    """Record `count` events whose records are 0, 1, 2, … in one byte each."""
    rng = SeededRng(SEED, count)
    return [
        outbox.record(rule, giving(bytes([number])), now=now, rng=rng) for number in range(count)
    ]


def data_of(handed_out: list[OutgoingRecord]) -> list[bytes]:
    return [record.data for record in handed_out]


def ids_of(handed_out: list[OutgoingRecord]) -> list[str]:
    return [record.id for record in handed_out]


def full() -> Outbox:
    """An outbox with something of every kind: sent, on the way, waiting, in two studies."""
    outbox = consenting()
    filled(outbox, 2)
    filled(outbox, 3, OTHER)
    outbox.confirm(ids_of(outbox.due(LATER))[:3], LATER)
    filled(outbox, 2, now=LATER)
    return outbox


# consent


def test_without_consent_nothing_is_privatised_or_kept() -> None:
    def must_not_run(rng: Rng) -> bytes:
        raise AssertionError("privatise was called")

    outbox = consenting(WORDS)
    before = outbox.to_json()
    assert outbox.record(RULE, must_not_run, now=MORNING, rng=SeededRng(SEED)) == Outcome.NO_CONSENT
    assert outbox.to_json() == before
    assert outbox.due(LATER) == []


def test_consent_to_one_study_is_none_to_another() -> None:
    outbox = consenting(WORDS)
    assert outbox.consents == (WORDS,)
    assert filled(outbox, 1, RULE) == [Outcome.NO_CONSENT]
    assert filled(outbox, 1, OTHER) == [Outcome.QUEUED]


def test_withdrawing_leaves_no_trace_of_what_was_not_sent() -> None:
    outbox = consenting(WORDS)
    before = outbox.to_json()
    outbox.consent(EMOJI)
    outbox.record(RULE, giving(RECORD), now=MORNING, rng=SeededRng(SEED))
    assert RECORD.hex() in outbox.to_json()
    outbox.withdraw(EMOJI)
    assert outbox.to_json() == before
    assert filled(outbox, 1) == [Outcome.NO_CONSENT]


def test_withdrawing_deletes_nothing_of_another_study() -> None:
    outbox = consenting()
    filled(outbox, 3, OTHER)
    filled(outbox, 1)
    outbox.withdraw(EMOJI)
    assert len(outbox.due(LATER)) == 3


def test_withdrawing_before_consenting_is_no_error() -> None:
    outbox = Outbox()
    outbox.withdraw(EMOJI)
    assert outbox.to_json() == Outbox().to_json()


# recording


def test_an_event_is_privatised_at_once_with_the_generator_that_was_given() -> None:
    calls = []
    rng = SeededRng(SEED)

    def privatise(generator: Rng) -> bytes:
        calls.append(generator)
        return RECORD

    consenting().record(RULE, privatise, now=MORNING, rng=rng)
    assert calls == [rng]


def test_a_value_is_not_kept() -> None:
    value = [CLEAR]
    outbox = consenting()
    outbox.record(
        RULE,
        lambda rng: hashlib.sha256(value[0].encode()).digest()[:8],
        now=MORNING,
        rng=SeededRng(SEED),
    )
    assert RECORD.hex() in outbox.to_json()
    assert CLEAR not in outbox.to_json()
    assert CLEAR.encode().hex() not in outbox.to_json()


@pytest.mark.parametrize("second", [0.0, 1.0, 43_210.5, DAY_SECONDS - 0.001])
def test_the_time_of_an_event_within_its_day_leaves_no_trace(second: float) -> None:
    """The state is the same, to the byte, whatever the times of the events in the day."""
    states = []
    for now in (MORNING, DAY * DAY_SECONDS + second):
        outbox = consenting()
        filled(outbox, 5, now=now)
        states.append(outbox.to_json())
    assert states[0] == states[1]


def test_the_order_of_events_is_not_kept() -> None:
    outbox = consenting()
    filled(outbox, 40, replace(RULE, daily_reports=40))
    state = json.loads(outbox.to_json())
    ids = [record["id"] for record in state["waiting"]]
    assert ids == sorted(ids)
    assert [record["data"] for record in state["waiting"]] != [f"{n:02x}" for n in range(40)]


def test_an_event_that_cannot_be_privatised_changes_nothing() -> None:
    def fail(rng: Rng) -> bytes:
        raise ZeroDivisionError

    outbox = full()
    before = outbox.to_json()
    with pytest.raises(ZeroDivisionError):
        outbox.record(RULE, fail, now=MORNING + 1e6, rng=SeededRng(SEED))
    assert outbox.to_json() == before


# the daily limit


def test_no_more_than_the_daily_limit_is_kept_and_the_outcome_says_what_happened() -> None:
    outbox = consenting()
    outcomes = filled(outbox, 50)
    assert outcomes[:2] == [Outcome.QUEUED, Outcome.QUEUED]
    assert set(outcomes[2:]) <= {Outcome.REPLACED_ANOTHER, Outcome.THINNED_OUT}
    assert len(outbox.due(LATER)) == 2


def test_the_outcome_says_whether_the_record_is_among_the_kept() -> None:
    outbox, rng = consenting(), SeededRng(SEED)
    for number in range(50):
        outcome = outbox.record(RULE, giving(bytes([number])), now=MORNING, rng=rng)
        waiting = {data for entry in outbox.log() for _, data in entry.records}
        assert (bytes([number]) in waiting) == (outcome != Outcome.THINNED_OUT)


def test_limits_are_for_each_study_and_each_day() -> None:
    outbox = consenting()
    for day in range(3):
        filled(outbox, 9, now=MORNING + day * DAY_SECONDS)
        filled(outbox, 9, OTHER, now=MORNING + day * DAY_SECONDS)
    tasks = Counter(record.task_id for record in outbox.due(LATER))
    assert tasks == {RULE.task_id: 3 * 2, OTHER.task_id: 3 * 3}


def test_tasks_of_one_study_share_its_limit() -> None:
    outbox = consenting()
    filled(outbox, 9)
    filled(outbox, 9, replace(RULE, task_id="77" * 32))
    assert len(outbox.due(LATER)) == 2


@pytest.mark.parametrize("limits", list(permutations([1, 2, 4])))
def test_the_lowest_limit_of_a_day_holds_whatever_its_turn(limits: tuple[int, ...]) -> None:
    outbox = consenting()
    for limit in (*limits, 4):
        filled(outbox, 6, replace(RULE, daily_reports=limit))
    assert len(outbox.due(LATER)) == 1


def begin(outbox: Outbox, rule: SendingRule = RULE) -> Outcome:
    return outbox.take_part(rule, giving(b"none"), now=MORNING, rng=SeededRng(SEED))


@pytest.mark.parametrize("events", range(5))
def test_after_take_part_the_number_of_records_does_not_depend_on_events(events: int) -> None:
    """The control: without `take_part`, one record per event is sent, up to the limit."""
    outbox, control = consenting(), consenting()
    assert begin(outbox) is Outcome.QUEUED
    outcomes = filled(outbox, events)
    assert outcomes[:2] == [Outcome.QUEUED] * len(outcomes[:2])  # "none" goes first
    assert begin(outbox) is Outcome.QUEUED  # a full day does not change
    filled(control, events)
    left = data_of(outbox.due(LATER))
    assert len(left) == 2
    assert left.count(b"none") == 2 - min(events, 2)
    assert len(control.due(LATER)) == min(events, 2)


def test_after_take_part_a_day_keeps_the_lowest_limit_and_the_first_task() -> None:
    outbox = consenting()
    begin(outbox, replace(RULE, daily_reports=3))
    assert begin(outbox, replace(RULE, task_id="77" * 32)) is Outcome.DAY_OVER
    begin(outbox, replace(RULE, daily_reports=1))
    begin(outbox, replace(RULE, daily_reports=3))
    assert Outbox.from_json(outbox.to_json()).to_json() == outbox.to_json()
    assert data_of(outbox.due(LATER)) == [b"none"]
    assert begin(outbox) is Outcome.DAY_OVER


def test_nothing_is_begun_without_consent_or_budget() -> None:
    outbox = Outbox()
    assert begin(outbox) is Outcome.NO_CONSENT
    outbox.consent(EMOJI)
    rule = replace(RULE, lifetime_epsilon=4.0)  # one record, of two that a day may have
    assert begin(outbox, rule) is Outcome.QUEUED
    assert data_of(outbox.due(LATER)) == [b"none"]
    later = outbox.take_part(rule, giving(b"none"), now=LATER, rng=SeededRng(SEED))
    assert later is Outcome.LIFETIME_SPENT


def test_a_clock_set_back_into_a_day_that_was_sent_adds_nothing_to_it() -> None:
    outbox = consenting()
    filled(outbox, 1)  # below the limit, and over all the same
    handed_out = outbox.due(LATER)
    assert filled(outbox, 5) == [Outcome.DAY_OVER] * 5
    outbox.confirm(ids_of(handed_out), LATER)
    assert filled(outbox, 5) == [Outcome.DAY_OVER] * 5
    outbox.withdraw(EMOJI)
    outbox.consent(EMOJI)
    assert filled(Outbox.from_json(outbox.to_json()), 5) == [Outcome.DAY_OVER] * 5


def test_a_clock_that_ran_ahead_does_not_silence_the_days_in_between() -> None:
    outbox = consenting()
    ahead = MORNING + 300 * DAY_SECONDS
    filled(outbox, 2, now=ahead)
    outbox.confirm(ids_of(outbox.due(ahead + 2 * DAY_SECONDS)), ahead + 2 * DAY_SECONDS)
    assert filled(outbox, 2) == [Outcome.QUEUED, Outcome.QUEUED]
    assert len(outbox.due(LATER)) == 2


def kept_pairs(runs: int, rng: Rng) -> list[int]:
    """How often each pair of a day's five records was sent."""
    outcomes: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        outbox = consenting()
        for number in range(5):
            outbox.record(RULE, giving(bytes([number])), now=MORNING + number, rng=rng)
        outcomes[tuple(sorted(data[0] for data in data_of(outbox.due(LATER))))] += 1
    return [outcomes[pair] for pair in combinations(range(5), 2)]


class Tampered:
    """A generator that changes the words for every `period`-th record."""

    def __init__(self, period: int, change: Callable[[U64], None]) -> None:
        self._rng = SeededRng(SEED, 9)
        self._period, self._change, self._calls = period, change, 0

    def words(self, count: int) -> U64:
        words = self._rng.words(count)
        self._calls += 1
        if self._calls % self._period == 0:
            self._change(words)
        return words


def test_each_of_a_days_records_is_equally_likely_to_be_sent() -> None:
    """False alarm 1e-6 (chi-square over the ten pairs). Power: if the last record of the day were
    sent in 44.4% of days rather than 40%, that is missed with probability below 1e-9
    (noncentrality 162)."""
    assert_chi_square(kept_pairs(20_000, SeededRng(SEED, 1)), np.full(10, 0.1))


def test_a_priority_that_favours_a_days_last_record_is_caught() -> None:
    """The negative control: its priority is a tenth lower, so it is sent in 44.4% of days."""

    def lower(words: U64) -> None:
        words[3] -= words[3] // np.uint64(10)

    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(kept_pairs(20_000, Tampered(5, lower)), np.full(10, 0.1))


# the delay


def test_nothing_is_due_before_its_day_is_over_and_everything_once_the_delay_is() -> None:
    outbox = consenting()
    filled(outbox, 2)
    end = (DAY + 1) * DAY_SECONDS
    assert outbox.due(end - 0.001) == []
    assert len(outbox.due(end + RULE.delay_seconds)) == 2


def test_a_record_is_due_at_its_own_time_and_not_before() -> None:
    outbox = consenting()
    filled(outbox, 2, replace(RULE, delay_seconds=LONGEST_DELAY))  # too long for a tie
    first, last = sorted(record["due"] for record in json.loads(outbox.to_json())["waiting"])
    assert [len(outbox.due(now)) for now in (first - 1, first, last - 1, last)] == [0, 1, 1, 2]


def waits(runs: int, rng: Rng) -> list[int]:
    """How many records waited for each twentieth of the delay past the end of their day."""
    rule, bins = replace(RULE, delay_seconds=20_000), [0] * 20
    for number in range(runs):
        outbox = consenting()
        outbox.record(rule, giving(b"r"), now=DAY * DAY_SECONDS + number % DAY_SECONDS, rng=rng)
        due = json.loads(outbox.to_json())["waiting"][0]["due"]
        bins[(due - (DAY + 1) * DAY_SECONDS) // 1000] += 1
    return bins


def test_records_wait_for_a_uniform_time_past_the_end_of_their_day() -> None:
    """False alarm 1e-6 (chi-square over 20 parts of the delay). Power: waits that are 5% too short
    are missed with probability below 1e-18 (noncentrality 263)."""
    assert_chi_square(waits(5_000, SeededRng(SEED, 2)), np.full(20, 0.05))


def test_waits_that_are_too_short_are_caught() -> None:
    """The negative control: 5% too short."""

    def shorten(words: U64) -> None:
        words[2] -= words[2] // np.uint64(20)

    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(waits(5_000, Tampered(1, shorten)), np.full(20, 0.05))


# sending


def test_records_are_handed_out_by_task_without_day_time_or_study() -> None:
    outbox = consenting()
    for day in range(3):
        filled(outbox, 3, OTHER, now=MORNING + day * DAY_SECONDS)
        filled(outbox, 2, now=MORNING + day * DAY_SECONDS)
    handed_out = outbox.due(LATER)
    assert [record.task_id for record in handed_out] == [RULE.task_id] * 6 + [OTHER.task_id] * 9
    assert set(OutgoingRecord.__slots__) == {"id", "task_id", "data"}


def orders(runs: int, rng: Rng) -> list[int]:
    """How often a day's three records were handed out in each order."""
    rule, outcomes = replace(RULE, daily_reports=3), Counter[tuple[int, ...]]()
    for _ in range(runs):
        outbox = consenting()
        for number in range(3):
            outbox.record(rule, giving(bytes([number])), now=MORNING, rng=rng)
        outcomes[tuple(data[0] for data in data_of(outbox.due(LATER)))] += 1
    return [outcomes[order] for order in permutations(range(3))]


def test_records_are_handed_out_in_random_order() -> None:
    """False alarm 1e-6 (chi-square over the six orders). Power: if the last record came first in
    40% of days rather than a third, that is missed with probability below 1e-15
    (noncentrality 200)."""
    assert_chi_square(orders(10_000, SeededRng(SEED, 3)), np.full(6, 1 / 6))


def test_an_order_that_favours_the_last_record_is_caught() -> None:
    """The negative control: one last record in ten always goes first, so 40% of them do."""

    def first(words: U64) -> None:
        if words[3] % np.uint64(10) == 0:
            words[:2] = 0

    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(orders(10_000, Tampered(3, first)), np.full(6, 1 / 6))


def test_the_order_is_the_same_when_a_record_is_handed_out_again() -> None:
    outbox = consenting()
    filled(outbox, 3, OTHER)
    assert outbox.due(LATER) == outbox.due(LATER) == outbox.due(LATER + 1e6)


def test_a_record_is_handed_out_until_it_is_sent() -> None:
    outbox = consenting()
    filled(outbox, 2)
    first, second = outbox.due(LATER)
    assert outbox.confirm([first.id], LATER) == 1
    assert outbox.due(LATER) == [second]
    assert outbox.due(MORNING) == [second]  # also when the clock was set back
    assert outbox.confirm([second.id], LATER) == 1
    assert outbox.due(LATER) == []


def test_a_second_confirmation_changes_nothing() -> None:
    outbox = consenting()
    filled(outbox, 2)
    ids = ids_of(outbox.due(LATER))
    outbox.confirm(ids, LATER)
    before = outbox.to_json()
    assert outbox.confirm(ids, LATER) == 0
    assert outbox.to_json() == before


def test_a_record_that_arrived_although_an_older_state_says_it_waits_is_charged() -> None:
    outbox = consenting()
    filled(outbox, 2)
    older = Outbox.from_json(outbox.to_json())
    older.confirm(ids_of(outbox.due(LATER)), LATER)
    assert older.spent() == outbox.spent() == 8.0
    assert filled(older, 1) == [Outcome.DAY_OVER]


# the log


def test_the_log_says_in_words_what_was_sent_what_is_on_the_way_and_what_waits() -> None:
    outbox = consenting()
    filled(outbox, 2)
    handed_out = outbox.due(LATER)
    outbox.confirm([handed_out[0].id], LATER)
    filled(outbox, 2, OTHER, now=LATER)
    assert [str(entry) for entry in outbox.log()] == [
        "2024-10-14: sent 1 record (1 bytes) for Popular emoji, at a privacy cost of epsilon 4",
        "on the way: 1 record (1 bytes) for Popular emoji, counted as epsilon 4, "
        "receipt not confirmed",
        "waiting: 2 records (2 bytes) for New words, not sent; would cost epsilon 4",
    ]


def test_the_log_has_exactly_the_bytes_that_were_sent() -> None:
    outbox = consenting()
    filled(outbox, 2)
    filled(outbox, 3, OTHER)
    handed_out = outbox.due(LATER)
    outbox.confirm(ids_of(handed_out), LATER)
    logged = [record for entry in outbox.log() for record in entry.records]
    assert sorted(logged) == sorted((record.task_id, record.data) for record in handed_out)
    assert [entry.size for entry in outbox.log()] == [3, 2]  # by study on one day
    assert [entry.epsilon for entry in outbox.log()] == [6.0, 8.0]


def test_what_was_sent_leaves_the_log_after_the_days_that_were_set_and_the_ledger_never() -> None:
    outbox = consenting(keep_sent_days=2)
    filled(outbox, 2)
    outbox.confirm(ids_of(outbox.due(LATER)), LATER)
    outbox.due(LATER + DAY_SECONDS)
    assert len(outbox.log()) == 1
    outbox.due(LATER + 2 * DAY_SECONDS)
    assert outbox.log() == []
    assert outbox.spent(EMOJI, DAY) == 8.0


def test_how_long_the_log_is_kept_can_be_changed_and_zero_keeps_none() -> None:
    outbox = consenting()
    filled(outbox, 2)
    outbox.keep_sent(0)
    outbox.confirm(ids_of(outbox.due(LATER)), LATER)
    assert outbox.log() == []


# deleting


def test_deleting_leaves_no_trace_of_what_was_not_sent() -> None:
    outbox = consenting()
    before = outbox.to_json()
    filled(outbox, 9)
    filled(outbox, 9, OTHER)
    assert outbox.delete() == 5
    assert outbox.to_json() == before


def test_deleting_one_study_leaves_the_others() -> None:
    outbox = consenting()
    filled(outbox, 2)
    filled(outbox, 3, OTHER)
    assert outbox.delete(EMOJI) == 2
    assert {record.task_id for record in outbox.due(LATER)} == {OTHER.task_id}


def test_deleting_does_not_delete_what_was_sent() -> None:
    outbox = full()
    entries = [entry for entry in outbox.log() if entry.state == "sent"]
    outbox.delete()
    assert outbox.log() == entries


def test_a_record_deleted_on_its_way_is_gone_and_stays_charged() -> None:
    outbox = consenting()
    outbox.record(RULE, giving(RECORD), now=MORNING, rng=SeededRng(SEED))
    ids = ids_of(outbox.due(LATER))
    outbox.delete(EMOJI)
    assert RECORD.hex() not in outbox.to_json()
    assert outbox.due(LATER) == []
    assert outbox.confirm(ids, LATER) == 0
    assert outbox.spent(EMOJI) == 4.0


def test_records_of_a_task_that_is_over_are_dropped() -> None:
    outbox = consenting()
    later_task = replace(RULE, task_id="77" * 32)
    filled(outbox, 2)
    filled(outbox, 2, later_task, now=MORNING + DAY_SECONDS)
    assert outbox.forget(RULE.task_id) == 2
    assert RULE.task_id not in outbox.to_json()
    assert {record.task_id for record in outbox.due(LATER)} == {later_task.task_id}


def test_thinned_out_records_leave_no_trace_nor_do_priorities_after_the_day() -> None:
    outbox, rng = consenting(), SeededRng(SEED)
    rule = replace(RULE, delay_seconds=LONGEST_DELAY)
    for number in range(200):
        outbox.record(rule, giving(f"{number:08}".encode()), now=MORNING, rng=rng)
    state = outbox.to_json()
    numbers = [number for number in range(200) if f"{number:08}".encode().hex() in state]
    assert len(numbers) == 2
    first = min(record["due"] for record in json.loads(state)["waiting"])
    assert len(outbox.due(first)) == 1
    assert [record["lot"] for record in json.loads(outbox.to_json())["waiting"]] == [0, 0]


# the ledger


def test_the_ledger_adds_up_what_was_handed_out_by_study_and_day_and_in_all() -> None:
    outbox = consenting()
    filled(outbox, 9)
    filled(outbox, 1, now=MORNING + DAY_SECONDS)
    filled(outbox, 9, OTHER)
    assert outbox.spent() == 0.0
    outbox.due(LATER)
    assert outbox.spent() == 3 * 4.0 + 3 * 2.0
    assert outbox.spent(EMOJI) == 12.0
    assert outbox.spent(day=DAY) == 8.0 + 6.0
    assert outbox.spent(EMOJI, DAY) == 8.0
    assert outbox.spent(EMOJI, DAY + 1) == 4.0
    assert outbox.spent("another", DAY) == outbox.spent(day=DAY + 2) == 0.0


def test_a_record_is_charged_once_however_often_it_is_handed_out_and_sent() -> None:
    outbox = consenting()
    filled(outbox, 1)
    for _ in range(3):
        handed_out = outbox.due(LATER)
    outbox.confirm(ids_of(handed_out), LATER)
    outbox.confirm(ids_of(handed_out), LATER)
    assert outbox.spent() == 4.0


def test_thinning_gives_no_discount() -> None:
    """Two of a hundred records are sent: they cost as much as any two."""
    outbox = consenting()
    filled(outbox, 100)
    outbox.due(LATER)
    assert outbox.spent() == 2 * 4.0


def test_nothing_resets_the_ledger() -> None:
    outbox = full()
    spent = outbox.spent()
    assert spent == 14.0
    outbox.delete()
    outbox.forget(RULE.task_id)
    outbox.withdraw(EMOJI)
    outbox.withdraw(WORDS)
    outbox.keep_sent(0)
    outbox.due(LATER + 1000 * DAY_SECONDS)
    assert Outbox.from_json(outbox.to_json()).spent() == spent


def test_beyond_its_lifetime_epsilon_a_study_sends_nothing_more() -> None:
    rule = replace(RULE, lifetime_epsilon=12.0, delay_seconds=1)
    outbox, handed_out = consenting(), 0
    for day in range(6):
        filled(outbox, 9, rule, now=MORNING + day * DAY_SECONDS)
        out = outbox.due(MORNING + (day + 1) * DAY_SECONDS)
        outbox.confirm(ids_of(out), MORNING + (day + 1) * DAY_SECONDS)
        handed_out += len(out)
    assert handed_out == 3
    assert outbox.spent(EMOJI) == 12.0
    assert filled(outbox, 1, rule, now=LATER) == [Outcome.LIFETIME_SPENT]
    assert "waiting" not in [entry.state for entry in outbox.log()]  # what cannot go is deleted
    assert filled(outbox, 1, OTHER, now=LATER) == [Outcome.QUEUED]


def test_a_study_without_budget_privatises_nothing() -> None:
    rule = replace(RULE, lifetime_epsilon=4.0)
    outbox, calls = consenting(), []
    filled(outbox, 1, rule)
    outbox.due(LATER)

    def privatise(rng: Rng) -> bytes:
        calls.append(rng)
        return RECORD

    outcome = outbox.record(rule, privatise, now=LATER, rng=SeededRng(SEED))
    assert (outcome, calls) == (Outcome.LIFETIME_SPENT, [])


def test_the_lifetime_holds_for_everything_that_is_due_at_once() -> None:
    rule = replace(RULE, lifetime_epsilon=10.0)
    outbox = consenting()
    for day in range(5):
        filled(outbox, 2, rule, now=MORNING + day * DAY_SECONDS)
    assert len(outbox.due(LATER)) == 2
    assert outbox.spent() == 8.0


def test_a_lifetime_of_three_tenths_holds_three_records_of_one_tenth() -> None:
    rule = replace(RULE, epsilon=0.1, daily_reports=9, lifetime_epsilon=0.3)
    outbox = consenting()
    filled(outbox, 9, rule)
    assert len(outbox.due(LATER)) == 3


# the state


def test_the_state_survives_its_json() -> None:
    outbox = full()
    again = Outbox.from_json(outbox.to_json())
    assert again.to_json() == outbox.to_json()
    assert again.log() == outbox.log()
    assert again.consents == outbox.consents
    assert again.due(LATER) == outbox.due(LATER)
    assert again.spent(EMOJI, DAY) == outbox.spent(EMOJI, DAY)


def test_a_rule_survives_its_json() -> None:
    for rule in (RULE, replace(RULE, lifetime_epsilon=8.0)):
        assert from_json(to_json(rule)) == rule


@pytest.mark.parametrize("version", [0, 2, None, True, "1", 1.5])
def test_a_state_of_another_version_is_refused(version: object) -> None:
    state = json.loads(full().to_json())
    with pytest.raises(SpecError, match="version 1"):
        Outbox.from_json(canonical({**state, "version": version}))


DEEP = '{"version":1,"keep_sent_days":1,"consented":[],"waiting":[{"rule":' + "[" * 900 + "]" * 900
DEEP += ',"data":""}],"charged":[],"sent":[]}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", "[" * 100_000, '"version"', "1", DEEP]
)
def test_text_that_is_not_a_state_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="state of an outbox"):
        Outbox.from_json(text)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a state."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from places(data[key])


def is_refused(state: Any) -> bool:
    try:
        Outbox.from_json(canonical(state))
    except SpecError:
        return True
    return False


def test_a_field_too_many_or_too_few_is_refused_wherever_it_is() -> None:
    state = json.loads(full().to_json())
    assert not is_refused(state)
    for container, key in list(places(state)):
        if isinstance(container, dict):
            value = container.pop(key)
            assert is_refused(state), f"{key} is missing"
            container[key] = value
            container["colour"] = 1
            assert is_refused(state), f"beside {key}"
            del container["colour"]
    assert not is_refused(state)


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", [], {}], ids=repr)
def test_a_value_of_another_type_is_refused_wherever_it_is(wrong: object) -> None:
    state = json.loads(full().to_json())
    for container, key in list(places(state)):
        value = container[key]
        same = canonical(wrong) == canonical(value)
        harmless = wrong in (1.5, None) and key in ("epsilon", "lifetime_epsilon")
        harmless |= wrong in ([], {}) and isinstance(value, list | dict)
        harmless |= wrong == "x" and isinstance(value, str) and key in ("task_id", "study")
        if not (same or harmless):
            container[key] = wrong
            assert is_refused(state), f"{key} = {wrong!r}"
            container[key] = value


def edited(edit: Callable[[Any], object]) -> Any:
    state = json.loads(full().to_json())
    edit(state)
    return state


EDITS: dict[str, Callable[[Any], object]] = {
    "a record without consent": lambda state: state.update(consented=[]),
    "a limit beyond the rule's": lambda state: state["waiting"][-1].update(limit=9),
    "more records than the limit": lambda state: state["waiting"].append(
        {**next(r for r in state["waiting"] if not r["handed_out"]), "id": "f" * 32}
    ),
    "a record twice": lambda state: state["waiting"].append(state["waiting"][-1]),
    "records in order of events": lambda state: state["waiting"].reverse(),
    "the log in order of sending": lambda state: state["sent"].reverse(),
    "a record handed out and not charged": lambda state: state.update(charged=[]),
    "a charge of no records": lambda state: state["charged"][0].update(records=0),
    "a charge taken back": lambda state: state["charged"][0].update(records=-1),
    "a day charged twice": lambda state: state["charged"].append(state["charged"][-1]),
    "another kind of spec as a rule": lambda state: state["waiting"][0].update(
        rule={"kind": "one_hot", "categories": 3, "sfumato": 1}
    ),
    "capital digits": lambda state: state["sent"][0].update(data="AB"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_that_breaks_a_rule_is_refused(edit: str) -> None:
    assert is_refused(edited(EDITS[edit]))


def test_a_refused_state_is_not_shown() -> None:
    outbox = consenting()
    outbox.record(RULE, giving(RECORD), now=MORNING, rng=SeededRng(SEED))
    for text in (outbox.to_json() + " ", outbox.to_json()[:-1], f'{{"version":1,"a":"{CLEAR}"}}'):
        with pytest.raises(SpecError) as caught:
            Outbox.from_json(text)
        assert caught.value.__cause__ is None
        assert RECORD.hex() not in str(caught.value)
        assert CLEAR not in str(caught.value)


def test_a_key_that_stands_twice_is_refused() -> None:
    text = Outbox().to_json()
    with pytest.raises(SpecError):
        Outbox.from_json(text.replace("{", '{"version":1,', 1))


def test_nothing_prints_a_record() -> None:
    outbox = consenting()
    outbox.record(RULE, giving(RECORD), now=MORNING, rng=SeededRng(SEED))
    texts = [repr(outbox), str(outbox), repr(outbox.log()), str(outbox.log()[0])]
    handed_out = outbox.due(LATER)
    texts += [repr(handed_out), repr(outbox.log())]
    outbox.confirm(ids_of(handed_out), LATER)
    texts += [repr(outbox), repr(outbox.log()), str(outbox.log()[0])]
    for text in texts:
        assert RECORD.hex() not in text
        assert repr(RECORD)[2:-1] not in text
    assert texts[0] == (
        "Outbox(2 studies with consent, 1 records unsent, 0 in the log, epsilon 0 spent)"
    )


# mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": ""}, "study must be one line"),
        ({"study": "two\nlines"}, "study must be one line"),
        ({"study": " padded"}, "study must be one line"),
        ({"task_id": "5f"}, "task_id must be 64 hexadecimal digits"),
        ({"task_id": "5F" * 32}, "lower case"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": math.inf}, "epsilon of SendingRule must be a finite number"),
        ({"daily_reports": 0}, "daily_reports must be at least 1"),
        ({"delay_seconds": 0}, "delay_seconds must be 1 to"),
        ({"delay_seconds": LONGEST_DELAY + 1}, "delay_seconds must be 1 to"),
        ({"lifetime_epsilon": 3.9}, "must allow one record of epsilon 4"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(RULE, **changes)


MISTAKES: dict[str, Callable[[Outbox], object]] = {
    "a clock before 1970": lambda outbox: outbox.due(-1.0),
    "a clock in milliseconds": lambda outbox: outbox.due(1.8e12),
    "a clock that is no number": lambda outbox: outbox.confirm([], math.nan),
    "no clock": lambda outbox: outbox.due(None),  # type: ignore[arg-type]  # the mistake
    "an empty study": lambda outbox: outbox.consent(""),
    "no study": lambda outbox: outbox.withdraw(None),  # type: ignore[arg-type]  # the mistake
    "a study that is a number": lambda outbox: outbox.delete(3),  # type: ignore[arg-type]  # so is this
    "half a task id": lambda outbox: outbox.forget("5f" * 16),
    "a record for an id": lambda outbox: outbox.confirm([RECORD.hex()], LATER),
    "an id for ids": lambda outbox: outbox.confirm("0" * 32, LATER),
    "a time for a day": lambda outbox: outbox.spent(EMOJI, LATER),  # type: ignore[arg-type]  # the mistake
    "days below zero": lambda outbox: outbox.keep_sent(-1),
    "text for a record": lambda outbox: outbox.record(
        RULE,
        lambda rng: CLEAR,  # type: ignore[arg-type,return-value]  # the mistake
        now=LATER,
        rng=SeededRng(SEED),
    ),
    "an empty record": lambda outbox: outbox.record(
        RULE, giving(b""), now=LATER, rng=SeededRng(SEED)
    ),
    "a value for a function": lambda outbox: outbox.record(
        RULE,
        RECORD,  # type: ignore[arg-type]  # the mistake
        now=LATER,
        rng=SeededRng(SEED),
    ),
    "a study for a rule": lambda outbox: outbox.record(
        EMOJI,  # type: ignore[arg-type]  # the mistake
        giving(RECORD),
        now=LATER,
        rng=SeededRng(SEED),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_of_a_mistake_omits_the_record_and_nothing_changes(mistake: str) -> None:
    outbox = consenting()
    filled(outbox, 2)
    before = outbox.to_json()
    with pytest.raises(SpecError) as caught:
        MISTAKES[mistake](outbox)
    for secret in (CLEAR, RECORD.hex(), repr(RECORD)[2:-1]):
        assert secret not in str(caught.value)
    assert outbox.to_json() == before


def test_every_outcome_is_in_the_guide() -> None:
    guide = Path(__file__).resolve().parents[3] / "docs" / "guides" / "device_rules.md"
    text = guide.read_text(encoding="utf-8")
    assert not [outcome for outcome in Outcome if f"| `{outcome}` |" not in text]


# anything, in any order

STUDIES = (EMOJI, WORDS)
LIFETIME = 3.0
RULES = (
    replace(
        RULE, epsilon=1.0, daily_reports=3, delay_seconds=DAY_SECONDS, lifetime_epsilon=LIFETIME
    ),
    replace(RULE, epsilon=0.5, daily_reports=3, task_id="77" * 32, lifetime_epsilon=LIFETIME),
    replace(OTHER, daily_reports=2),
)
LIMITS = {EMOJI: 3, WORDS: 2}
DAYS = (0.0, 1.0, 2.0, 3.0, 300.0)  # to which the clock jumps, forth and back

Operation = tuple[Any, ...]
OPERATIONS: list[Operation] = [
    *(("record", rule, times) for rule in RULES for times in (1, 2, 6) for _ in range(3)),
    *(("clock", day) for day in DAYS for _ in range(3)),
    *[("due",), ("deliver",), ("deliver",), ("confirm", 1), ("confirm", 3)] * 2,
    *(("consent", study) for study in STUDIES for _ in range(4)),
    *(("withdraw", study) for study in STUDIES),
    *(("delete", study) for study in (*STUDIES, None)),
    *(("forget", rule.task_id) for rule in RULES),
]
LIVES = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.booleans()), max_size=30)


class Device:
    """An app that saves its state after each call, before it uses the result, and may crash."""

    def __init__(self, *, restarts: bool) -> None:
        self.outbox = consenting()
        self.restarts = restarts  # whether the state goes through its JSON after every call
        self.now = MORNING
        self.events: list[tuple[str, int, float, bytes]] = []  # study, day, epsilon, record
        self.on_the_way: list[OutgoingRecord] = []
        self.left: dict[bytes, tuple[str, int, float]] = {}  # everything that ever left the device
        self.arrived: set[bytes] = set()
        self.consents = set(STUDIES)

    def do(self, operation: Operation, crash: bool) -> object:
        """Run one operation; if the device crashes, the call has no effect."""
        name, *arguments = operation
        if name == "deliver":
            return self.do(("due",), False), self.do(("confirm", 99), crash)
        saved, consented, arrived = self.outbox.to_json(), set(self.consents), set(self.arrived)
        result: object = getattr(self, name)(*arguments)
        if crash:
            self.outbox, self.on_the_way = Outbox.from_json(saved), []
            self.consents, self.arrived = consented, arrived
            return None
        if name == "due":
            for outgoing in self.on_the_way:
                event = next(event for event in self.events if event[3] == outgoing.data)
                self.left[outgoing.data] = event[:3]
        if self.restarts:
            self.outbox = Outbox.from_json(self.outbox.to_json())
        return result

    def record(self, rule: SendingRule, times: int) -> list[Outcome]:
        outcomes = []
        for _ in range(times):
            number = len(self.events)
            data = hashlib.sha256(f"{CLEAR}{number}".encode()).digest()[:8]
            assert rule.epsilon is not None  # of the rules that are drawn
            self.events.append((rule.study, int(self.now // DAY_SECONDS), rule.epsilon, data))
            calls = 0

            def privatise(rng: Rng, data: bytes = data) -> bytes:
                nonlocal calls
                calls += 1
                return data

            outcome = self.outbox.record(
                rule, privatise, now=self.now, rng=SeededRng(SEED, 5, number)
            )
            outcomes.append(outcome)
            assert (outcome == Outcome.NO_CONSENT) == (rule.study not in self.consents)
            expected = outcome in (Outcome.QUEUED, Outcome.REPLACED_ANOTHER, Outcome.THINNED_OUT)
            assert calls == expected
            is_waiting = outcome in (Outcome.QUEUED, Outcome.REPLACED_ANOTHER)
            assert (data in self.records()) == is_waiting
        return outcomes

    def clock(self, day: float) -> None:
        self.now = MORNING + day * DAY_SECONDS

    def due(self) -> list[OutgoingRecord]:
        self.on_the_way = self.outbox.due(self.now)
        return self.on_the_way

    def confirm(self, count: int) -> int:
        records = self.on_the_way[:count]
        self.arrived |= {record.data for record in records}
        return self.outbox.confirm(ids_of(records), self.now)

    def consent(self, study: str) -> None:
        self.outbox.consent(study)
        self.consents.add(study)

    def withdraw(self, study: str) -> None:
        self.outbox.withdraw(study)
        self.consents.discard(study)
        self.check_no_trace(study)

    def delete(self, study: str | None) -> None:
        self.outbox.delete(study)
        self.check_no_trace(study)

    def forget(self, task_id: str) -> None:
        self.outbox.forget(task_id)
        assert {data for data, task in self.records().items() if task == task_id} <= self.arrived

    def records(self) -> dict[bytes, str]:
        """Every record on the device, with its task."""
        return {data: task for entry in self.outbox.log() for task, data in entry.records}

    def check_no_trace(self, study: str | None) -> None:
        """Nothing of the study is stored except records that arrived."""
        state = self.outbox.to_json()
        for event_study, _, _, data in self.events:
            if study in (None, event_study) and data not in self.arrived:
                assert data.hex() not in state

    def check(self) -> None:
        """Check the limits for everything that was ever sent."""
        days, spent = Counter[tuple[str, int]](), defaultdict[str, float](float)
        for study, day, epsilon in self.left.values():
            days[study, day] += 1
            spent[study] += epsilon
        for (study, day), count in days.items():
            assert count <= LIMITS[study]
            assert self.outbox.spent(study, day) <= LIMITS[study] * 2.0
        for study in STUDIES:
            assert self.outbox.spent(study) == spent[study]  # halves add up exactly
        assert spent[EMOJI] <= LIFETIME
        assert CLEAR not in self.outbox.to_json()


@settings(max_examples=100)
@given(LIVES)
def test_whatever_happens_the_limits_hold_and_the_ledger_counts_all_that_left(
    life: list[tuple[Operation, bool]],
) -> None:
    device = Device(restarts=False)
    for operation, crash in life:
        device.do(operation, crash)
        device.check()


def test_in_long_lives_the_limits_hold_and_every_outcome_comes_about() -> None:
    """Operations well mixed: Hypothesis shrinks to the point, and this reaches further."""
    chance, outcomes = random.Random(SEED), set[object]()
    for _ in range(40):
        device = Device(restarts=False)
        for operation in chance.choices(OPERATIONS, k=60):
            result = device.do(operation, chance.random() < 0.1)
            device.check()
            if operation[0] == "record" and isinstance(result, list):
                outcomes.update(result)
    assert outcomes == set(Outcome)


@settings(max_examples=50)
@given(LIVES)
def test_a_restart_at_any_point_changes_nothing(
    life: list[tuple[Operation, bool]],
) -> None:
    running, restarting = Device(restarts=False), Device(restarts=True)
    for operation, _ in life:
        assert running.do(operation, False) == restarting.do(operation, False)
        assert running.outbox.to_json() == restarting.outbox.to_json()


def test_an_app_that_restores_an_older_state_breaks_the_limit_and_is_caught() -> None:
    """The negative control: the state of noon is restored after the day's records were sent."""
    device = Device(restarts=False)
    device.record(RULES[2], 2)
    noon = device.outbox.to_json()
    device.delete(None)
    device.record(RULES[2], 2)
    device.clock(3.0)
    device.do(("due",), False)
    device.check()
    device.outbox = Outbox.from_json(noon)
    device.do(("due",), False)
    with pytest.raises(AssertionError):
        device.check()


# a collector that can read the records

READABLE = replace(RULE, epsilon=None)


def test_a_record_that_the_collector_can_read_leaves_once_ever() -> None:
    outbox = consenting()
    filled(outbox, 2, READABLE)
    filled(outbox, 1, READABLE, now=MORNING + DAY_SECONDS)
    (first,) = outbox.due(LATER)  # of three that waited
    outbox.confirm([first.id], LATER)
    assert filled(outbox, 1, READABLE, now=LATER) == [Outcome.LIFETIME_SPENT]
    assert outbox.due(LATER + 10 * DAY_SECONDS) == []
    assert filled(outbox, 1, OTHER, now=LATER) == [Outcome.QUEUED]  # another study's


def test_a_record_that_the_collector_can_read_has_no_bound_and_the_log_says_so() -> None:
    outbox = consenting()
    filled(outbox, 1, READABLE)
    assert "which the collector can read" in str(outbox.log()[0])
    assert outbox.spent() == 0
    outbox.confirm(ids_of(outbox.due(LATER)), LATER)
    assert outbox.spent(EMOJI) == outbox.spent() == math.inf
    assert outbox.spent(WORDS) == 0
    assert "which the collector can read" in str(outbox.log()[0])


def test_a_state_with_readable_records_survives() -> None:
    outbox = consenting()
    filled(outbox, 1, READABLE)
    filled(outbox, 3, OTHER)
    outbox.confirm(ids_of(outbox.due(LATER)), LATER)
    filled(outbox, 1, OTHER, now=LATER)
    again = Outbox.from_json(outbox.to_json())
    assert again.to_json() == outbox.to_json()
    assert [str(entry) for entry in again.log()] == [str(entry) for entry in outbox.log()]


def test_a_readable_record_has_no_lifetime_in_epsilon() -> None:
    with pytest.raises(
        SpecError, match='lifetime_epsilon is for studies with trust "local"; got 4'
    ):
        replace(READABLE, lifetime_epsilon=4.0)

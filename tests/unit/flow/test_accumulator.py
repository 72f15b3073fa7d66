"""On the collector: every good report is added once, and a bad one is counted by its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError
from sfumato.flow.accumulator import Batch, Collector
from sfumato.flow.admission import Rejection
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import report
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.privacy import NoNoise, SeededRng
from sfumato.sketch import OneHot

TASK = Task(
    sketch=OneHot(categories=20),
    mechanism=NoNoise(),
    aggregation=Plain(modulus_bits=7),
    cohort="everybody",
    max_count=10,
)


def opened(collector: Collector) -> list[int]:
    table: list[int] = TASK.aggregation.open(collector.batch.total).tolist()
    return table


def reports(count: int, task: Task = TASK) -> list[bytes]:
    """Device i holds category i."""
    rng = SeededRng(SEED)
    return [report(task, [number], rng=rng).to_bytes() for number in range(count)]


def spoilt(data: bytes) -> dict[str, tuple[bytes, Rejection]]:
    """A good report, made bad in every way; the last byte holds four spare bits."""
    other = replace(TASK, cohort="others")
    return {
        "empty": (b"", Rejection.MALFORMED),
        "another version": (bytes([2]) + data[1:], Rejection.MALFORMED),
        "a cut header": (data[:40], Rejection.MALFORMED),
        "no message": (data[:49], Rejection.MALFORMED),
        "a cut message": (data[:-1], Rejection.MALFORMED),
        "a longer message": (data + b"\0", Rejection.MALFORMED),
        "a spare bit that is set": (data[:-1] + bytes([data[-1] | 0x80]), Rejection.MALFORMED),
        "another task": (report(other, [0], rng=SeededRng(SEED)).to_bytes(), Rejection.WRONG_TASK),
        "no such task": (data[:1] + bytes(32) + data[33:], Rejection.WRONG_TASK),
    }


WAYS = sorted(spoilt(reports(1)[0]))


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_report_is_rejected_for_its_reason_and_adds_nothing(way: str) -> None:
    good = reports(2)
    bad, reason = spoilt(good[0])[way]
    collector = Collector(TASK)
    collector.add([good[1], bad])
    assert collector.rejected == {reason: 1}
    assert collector.batch.count == 1
    assert opened(collector) == [0, 1] + [0] * 18
    collector.add(good)  # a rejected report does not block the right one
    assert collector.batch.count == 2


def test_a_replay_is_counted_once_and_is_no_error() -> None:
    collector, batch = Collector(TASK), reports(3)
    collector.add(batch + batch)
    collector.add(batch)
    assert collector.batch.count == 3
    assert opened(collector) == [1, 1, 1] + [0] * 17
    assert not collector.rejected


def test_of_an_id_that_came_twice_the_first_report_counts() -> None:
    collector, batch = Collector(TASK), reports(2)
    first, second = (Report.from_bytes(data) for data in batch)
    forged = Report(first.task_id, first.report_id, second.message).to_bytes()
    collector.add([batch[0], forged, batch[0]])
    assert not collector.rejected
    assert collector.duplicates == 2
    assert opened(collector) == [1] + [0] * 19


def test_a_malformed_report_does_not_take_its_id() -> None:
    collector, data = Collector(TASK), reports(1)[0]
    collector.add([data[:-1], data])
    assert collector.batch.count == 1
    assert collector.rejected == {Rejection.MALFORMED: 1}


def test_a_full_batch_takes_replays_and_nothing_new() -> None:
    collector, batch = Collector(TASK), reports(12)
    collector.add(batch)
    collector.add(batch[:5])
    assert collector.batch.count == TASK.max_count == 10
    assert collector.rejected == {Rejection.BATCH_FULL: 2}
    assert opened(collector) == [1] * 10 + [0] * 10


@settings(max_examples=40)
@given(st.data())
def test_the_order_of_reports_and_the_grouping_of_batches_do_not_matter(data: Any) -> None:
    *batch, never_sent = reports(9)
    bad = [value for value, _ in spoilt(never_sent).values()]
    arrived = data.draw(st.permutations([*batch, *batch[:3], *bad]))
    cut = data.draw(st.integers(0, len(arrived)))
    together, left, right = Collector(TASK), Collector(TASK), Collector(TASK)
    together.add(arrived)
    earlier = {*arrived[:cut]}
    left.add(arrived[:cut])
    right.add(value for value in arrived[cut:] if value not in earlier or value in bad)
    merged = left.batch + right.batch
    assert merged.count == together.batch.count == 8
    assert np.array_equal(
        TASK.aggregation.open(merged.total), TASK.aggregation.open(together.batch.total)
    )
    assert left.rejected + right.rejected == together.rejected
    assert together.rejected == Counter(reason for _, reason in spoilt(never_sent).values())


@given(st.binary(max_size=100))
def test_any_bytes_are_a_report_or_a_rejection(data: bytes) -> None:
    collector = Collector(TASK)
    collector.add([data, b"\1" + bytes.fromhex(TASK.id) + data])
    assert collector.batch.count + collector.rejected.total() == 2


def test_batches_of_different_tasks_do_not_add() -> None:
    other = replace(TASK, cohort="others")
    with pytest.raises(MismatchError, match="batches of different tasks do not add"):
        Batch.empty(TASK) + Batch.empty(other)


def test_adding_batches_changes_neither() -> None:
    first = Batch(TASK.id, np.arange(20), 3)
    second = Batch(TASK.id, np.ones(20, dtype=np.int64), 1)
    both = first + second
    assert both.count == 4
    assert np.array_equal(both.total, np.arange(1, 21))
    assert np.array_equal(first.total, np.arange(20))
    assert np.array_equal(second.total, np.ones(20))

"""On the device: a report is one device's share of the vectorised sum, and never more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import SpecError
from sfumato.flow.accumulator import Collector
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import contribute, report
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease, NoNoise, SeededRng
from sfumato.sketch import CountSketch, OneHot


def make_task(sketch: Any, items_per_device: int = 1) -> Task:
    return Task(
        sketch=sketch,
        mechanism=NoNoise(),
        aggregation=Plain(modulus_bits=16),
        cohort="everybody",
        items_per_device=items_per_device,
        max_count=1000,
    )


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=25))
def test_single_reports_add_up_to_the_vectorised_contribution(holdings: list[list[int]]) -> None:
    for task in (
        make_task(OneHot(categories=10), items_per_device=3),
        make_task(CountSketch(rows=3, width=8, seed=1), items_per_device=3),
    ):
        collector, rng = Collector(task), SeededRng(SEED)
        values = [np.array(items, dtype=np.int64) for items in holdings]
        collector.add(report(task, items, rng=rng).to_bytes() for items in values)
        together = np.concatenate([np.empty(0, dtype=np.int64), *values])
        total = contribute(task, together, devices=len(holdings), rng=SeededRng(SEED))
        assert collector.batch.count == len(holdings)
        assert np.array_equal(task.aggregation.open(collector.batch.total), total)


@settings(max_examples=30)
@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_unique_values_fill_every_cell_with_zero_or_one(devices: int, order: Any) -> None:
    """Each device holds a unique category: a 2 is a replay, a huge number a mismatch."""
    task = make_task(OneHot(categories=300))
    categories = order.sample(range(300), devices)
    collector, rng = Collector(task), SeededRng(SEED)
    reports = [report(task, [category], rng=rng).to_bytes() for category in categories]
    again = [*reports, *order.sample(reports, devices // 2)]
    order.shuffle(again)
    collector.add(again)
    total = task.aggregation.open(collector.batch.total)
    assert np.array_equal(np.flatnonzero(total == 1), np.sort(categories))
    assert total.sum() == devices == collector.batch.count


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=12),
)
def test_weights_say_how_many_devices_hold_each(holdings: list[tuple[int, int]]) -> None:
    task = make_task(CountSketch(rows=3, width=8, seed=1))
    items = np.array([item for item, _ in holdings], dtype=np.int64)
    weights = np.array([weight for _, weight in holdings], dtype=np.int64)
    weighted = contribute(
        task, items, devices=max(1, int(weights.sum())), weights=weights, rng=SeededRng(SEED)
    )
    repeated = contribute(
        task, np.repeat(items, weights), devices=max(1, int(weights.sum())), rng=SeededRng(SEED)
    )
    assert np.array_equal(weighted, repeated)


def test_a_device_does_not_send_more_values_than_the_task_takes() -> None:
    task = make_task(OneHot(categories=10), items_per_device=2)
    report(task, [1, 1], rng=SeededRng(SEED))
    with pytest.raises(SpecError, match="at most 2 values per device; got 3") as caught:
        report(task, [7, 7, 7], rng=SeededRng(SEED))
    assert "7" not in str(caught.value)


def test_a_device_with_nothing_to_say_sends_zeros_of_the_same_length() -> None:
    task = make_task(OneHot(categories=10))
    empty, full = (report(task, values, rng=SeededRng(SEED)) for values in ([], [3]))
    assert len(empty.message) == len(full.message)
    assert not any(empty.message)


def test_report_ids_differ() -> None:
    task, rng = make_task(OneHot(categories=10)), SeededRng(SEED)
    names = {report(task, [1], rng=rng).report_id for _ in range(1000)}
    assert len(names) == 1000
    assert all(len(name) == 16 for name in names)


def test_a_report_names_its_task_and_survives_the_wire() -> None:
    task = make_task(OneHot(categories=10))
    original = report(task, [1], rng=SeededRng(SEED))
    assert original.task_id == task.id
    assert Report.from_bytes(original.to_bytes()) == original


def test_noise_at_the_release_is_not_on_the_device() -> None:
    quiet = make_task(OneHot(categories=10))
    noised = Task(
        sketch=quiet.sketch,
        mechanism=NoiseAtRelease(noise="gaussian", scale=100.0),
        aggregation=quiet.aggregation,
        cohort=quiet.cohort,
        max_count=quiet.max_count,
    )
    messages = [report(task, [1], rng=SeededRng(SEED)).message for task in (quiet, noised)]
    assert messages[0] == messages[1]

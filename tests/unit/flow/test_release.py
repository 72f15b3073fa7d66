"""From a sum to an answer: nothing is opened before it is charged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED
from sfumato.errors import BudgetError, ImpossibleError, MismatchError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.release import Influence, Privacy, noised_sum
from sfumato.flow.task import Task
from sfumato.privacy import (
    Budget,
    Ledger,
    NoiseAtRelease,
    NoNoise,
    SeededRng,
    discrete_gaussian,
)
from sfumato.sketch import CountSketch

U64 = npt.NDArray[np.uint64]


def make_task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "sketch": CountSketch(rows=3, width=8, seed=1),
        "mechanism": NoiseAtRelease(noise="gaussian", scale=8.0),
        "aggregation": Plain(modulus_bits=12),
        "cohort": "a",
        "min_count": 10,
        "max_count": 100,
    }
    return Task(**{**parts, **changes})


def make_batch(of: Task, count: int = 50) -> Batch:
    return Batch(of.id, np.arange(24).reshape(3, 8), count)


class Untouched:
    """A generator that must not be used."""

    def words(self, count: int) -> U64:
        raise AssertionError("noise was drawn")


class Shut:
    """A sum that fails when anything is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the batch was opened")

    def __mod__(self, modulus: object) -> Any:
        raise AssertionError("the batch was opened")


def shut(of: Task) -> Batch:
    return Batch(of.id, Shut(), 50)


def test_a_release_is_charged_and_carries_the_noise_of_its_generator() -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    answer = noised_sum(task, make_batch(task), ledger=ledger, rng=SeededRng(SEED))
    noise = discrete_gaussian(8.0, (3, 8), SeededRng(SEED))
    assert np.array_equal(answer.table, np.arange(24).reshape(3, 8) + noise)
    assert (answer.task, answer.count) == (task, 50)
    assert [(e.cohort, e.task, e.loss) for e in ledger.entries()] == [("a", task.id, task.loss)]


def test_a_refused_charge_opens_nothing_and_draws_nothing() -> None:
    ledger, task = Ledger(Budget(epsilon=0.1, delta=1e-6)), make_task()
    with pytest.raises(BudgetError):
        noised_sum(task, shut(task), ledger=ledger, rng=Untouched())
    assert ledger.entries() == []


def test_the_charge_is_on_the_ledger_before_anything_is_opened() -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    with pytest.raises(AssertionError, match="the batch was opened"):
        noised_sum(task, shut(task), ledger=ledger, rng=Untouched())
    assert len(ledger.entries()) == 1


def test_every_release_of_one_batch_is_charged() -> None:
    ledger, task = Ledger(Budget(epsilon=1.0, delta=1e-6)), make_task()
    noised_sum(task, make_batch(task), ledger=ledger, rng=SeededRng(SEED))
    with pytest.raises(BudgetError):
        noised_sum(task, make_batch(task), ledger=ledger, rng=Untouched())


@pytest.mark.parametrize("count", [0, 9, 101])
def test_too_few_or_too_many_devices_are_refused_before_anything_is_charged(count: int) -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    with pytest.raises(ImpossibleError, match=f"needs 10 to 100 devices; got {count}"):
        noised_sum(task, make_batch(task, count), ledger=ledger, rng=Untouched())
    assert ledger.entries() == []


@pytest.mark.parametrize("count", [10, 100])
def test_the_least_and_the_most_devices_are_released(count: int) -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    answer = noised_sum(task, make_batch(task, count), ledger=ledger, rng=SeededRng(SEED))
    assert answer.count == count


def test_another_tasks_batch_is_refused_before_anything_is_charged() -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    with pytest.raises(MismatchError, match="this batch belongs to task"):
        noised_sum(task, make_batch(make_task(cohort="b")), ledger=ledger, rng=Untouched())
    assert ledger.entries() == []


def test_an_exact_sum_is_released_only_without_a_limit() -> None:
    task = make_task(mechanism=NoNoise())
    with pytest.raises(BudgetError):
        noised_sum(
            task,
            make_batch(task),
            ledger=Ledger(Budget(epsilon=1e9, delta=1e-6)),
            rng=Untouched(),
        )
    ledger = Ledger(Budget(epsilon=None, delta=0.0))
    answer = noised_sum(task, make_batch(task), ledger=ledger, rng=Untouched())
    assert np.array_equal(answer.table, np.arange(24).reshape(3, 8))
    assert ledger.spent() == math.inf


def test_the_batch_is_not_changed() -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    batch = make_batch(task)
    noised_sum(task, batch, ledger=ledger, rng=SeededRng(SEED))
    assert np.array_equal(batch.total, np.arange(24).reshape(3, 8))


def test_the_cost_is_that_of_the_tasks_loss() -> None:
    ledger, task = Ledger(Budget(epsilon=10.0, delta=1e-6)), make_task()
    noised_sum(task, make_batch(task), ledger=ledger, rng=SeededRng(SEED))
    assert [entry.loss for entry in ledger.entries()] == [task.loss]


def test_a_statement_of_an_older_version_is_read_without_an_influence() -> None:
    privacy = Privacy(
        epsilon=1.0,
        delta=0.0,
        guarantee="a guarantee",
        unit="device",
        neighbours="zero-out",
        mechanism="noise",
        trust="central",
        sees="the collector sees tables",
        influence=Influence(of="a count", most=1.0),
    )
    data = json.loads(json.dumps(privacy.to_dict()))
    assert Privacy.from_dict(data) == privacy
    del data["influence"]
    older = Privacy.from_dict(data)
    assert older == replace(privacy, influence=None)
    assert older.lines == privacy.lines[:-1]

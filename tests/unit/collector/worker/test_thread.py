"""The worker's thread goes on after errors, stops between steps, and is alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving import PATIENCE_SECONDS, wait_for
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.store import Store
from sfumato.collector.worker.thread import WorkerThread
from sfumato.errors import StoreUnavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def start(store: Store) -> Iterator[Callable[..., WorkerThread]]:
    started: list[WorkerThread] = []

    def begin(
        step: Callable[[], bool], metrics: Metrics | None = None, *, pause_seconds: float = 0.01
    ) -> WorkerThread:
        worker = WorkerThread(store, step, pause_seconds=pause_seconds, metrics=metrics)
        worker.start()
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        assert worker.stop(PATIENCE_SECONDS)


def test_steps_follow_one_another(start: Callable[..., WorkerThread]) -> None:
    steps: list[bool] = []

    def step() -> bool:
        steps.append(True)
        return len(steps) < 50

    assert start(step).healthy
    wait_for(lambda: len(steps) > 55, "steps, with pauses after the fiftieth")


def test_simultaneous_wakeups_share_a_step_that_is_not_delayed_forever(
    start: Callable[..., WorkerThread],
) -> None:
    steps: list[float] = []

    def step() -> bool:
        steps.append(time.monotonic())
        return False

    worker = start(step, pause_seconds=PATIENCE_SECONDS)
    wait_for(lambda: len(steps) == 1, "the first step")
    begin = time.monotonic()
    while len(steps) < 3:  # wake it all the time
        worker.wake()
        time.sleep(0.001)
        assert time.monotonic() < begin + PATIENCE_SECONDS
    assert steps[2] - steps[1] > 0.1  # not one step per wakeup
    worker.wake()
    wait_for(lambda: len(steps) == 4, "a step for the last of it")


@pytest.mark.parametrize("problem", [StoreUnavailable("away"), ValueError("a bug")])
def test_after_an_error_it_goes_on(start: Callable[..., WorkerThread], problem: Exception) -> None:
    metrics = Metrics()
    steps: list[bool] = []
    fails = threading.Event()
    fails.set()

    def step() -> bool:
        steps.append(True)
        if fails.is_set():
            raise problem
        return False

    worker = start(step, metrics)
    wait_for(lambda: not worker.healthy, "the error to show")
    assert len(steps) == 1  # it waits before it tries again
    assert "sfumato_worker_errors_total 1.0\n" in metrics.text()
    fails.clear()
    wait_for(lambda: worker.healthy, "it to recover")


def test_it_stops_between_steps(start: Callable[..., WorkerThread]) -> None:
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> bool:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        has_ended.set()
        return True

    worker = start(step)
    assert has_begun.wait(PATIENCE_SECONDS)
    assert not worker.stop(0.05)
    assert not has_ended.is_set()
    may_end.set()
    assert worker.stop(PATIENCE_SECONDS)
    assert has_ended.is_set()
    assert not worker.healthy


def test_of_two_one_works_and_the_other_takes_over(start: Callable[..., WorkerThread]) -> None:
    steps = {"first": 0, "second": 0}

    def step_of(name: str) -> Callable[[], bool]:
        def step() -> bool:
            steps[name] += 1
            return False

        return step

    first = start(step_of("first"))
    wait_for(lambda: steps["first"] > 0, "the first to work")
    second = start(step_of("second"))
    before = steps["first"]
    wait_for(lambda: steps["first"] > before + 10, "the first to go on")
    assert steps["second"] == 0
    assert second.healthy
    first.stop()
    wait_for(lambda: steps["second"] > 0, "the second to take over")


def test_the_age_of_its_last_success_is_measured(start: Callable[..., WorkerThread]) -> None:
    metrics = Metrics()
    start(lambda: False, metrics)

    def age() -> float:
        (line,) = [
            line
            for line in metrics.text().splitlines()
            if line.startswith("sfumato_worker_last_success_age_seconds ")
        ]
        return float(line.split()[1])

    assert 0 <= age() < PATIENCE_SECONDS

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
from sfumato.collector.worker import thread as background
from sfumato.collector.worker.thread import Background
from sfumato.errors import StoreUnavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def start(store: Store) -> Iterator[Callable[..., Background]]:
    started: list[Background] = []

    def begin(step: Callable[[], bool], metrics: Metrics | None = None) -> Background:
        worker = Background(store, step, pause_seconds=0.01, metrics=metrics)
        worker.start()
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        assert worker.stop(PATIENCE_SECONDS)


def test_steps_follow_one_another(start: Callable[..., Background]) -> None:
    steps: list[bool] = []

    def step() -> bool:
        steps.append(True)
        return len(steps) < 50

    assert start(step).healthy
    wait_for(lambda: len(steps) > 55, "steps, with pauses after the fiftieth")


def test_while_more_is_coming_only_who_is_in_a_hurry_begins_a_step(
    start: Callable[..., Background], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_GATHER_SECONDS", 10 * PATIENCE_SECONDS)
    steps: list[bool] = []
    coming = threading.Event()
    coming.set()

    def step() -> bool:
        steps.append(True)
        return len(steps) < 3  # busy or not, it waits

    worker = start(step)
    worker.is_more_coming = coming.is_set

    def hurry() -> None:
        before = len(steps)
        worker.wake(now=True)
        wait_for(lambda: len(steps) > before, "a step for each hurry")

    for _ in range(5):
        hurry()
    done = len(steps)
    worker.wake()
    time.sleep(0.2)
    assert len(steps) <= done + 1  # the last hurry may have come between two steps
    done = len(steps)
    coming.clear()
    wait_for(lambda: len(steps) > done + 1, "steps, now that nothing comes")


def test_what_could_not_wait_is_done_to_its_end_whatever_else_comes(
    start: Callable[..., Background], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps, of which each leaves something to do, follow one hurry."""
    monkeypatch.setattr(background, "_MOST_GATHER_SECONDS", 10 * PATIENCE_SECONDS)
    steps: list[bool] = []
    left = 0

    def step() -> bool:
        nonlocal left
        steps.append(left > 0)
        left = max(0, left - 1)
        return steps[-1]

    worker = start(step)
    worker.is_more_coming = lambda: True
    worker.wake(now=True)
    left = 3
    worker.wake(now=True)
    wait_for(lambda: steps.count(True) == 3, "what was in a hurry")
    assert left == 0


def test_it_does_not_wait_for_more_for_ever(start: Callable[..., Background]) -> None:
    steps: list[bool] = []

    def step() -> bool:
        steps.append(True)
        return False

    worker = start(step)
    worker.is_more_coming = lambda: True
    wait_for(lambda: len(steps) > 2, "steps although there is always more")
    assert worker.healthy


@pytest.mark.parametrize("problem", [StoreUnavailable("away"), ValueError("a bug")])
def test_after_an_error_it_goes_on(start: Callable[..., Background], problem: Exception) -> None:
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
    assert "sfumato_worker_errors_total 1\n" in metrics.text()
    fails.clear()
    wait_for(lambda: worker.healthy, "it to recover")


def test_it_stops_between_steps(start: Callable[..., Background]) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> bool:
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        ended.set()
        return True

    worker = start(step)
    assert begun.wait(PATIENCE_SECONDS)
    assert not worker.stop(0.05)
    assert not ended.is_set()
    may_end.set()
    assert worker.stop(PATIENCE_SECONDS)
    assert ended.is_set()
    assert not worker.healthy


def test_of_two_one_works_and_the_other_takes_over(start: Callable[..., Background]) -> None:
    steps = {"first": 0, "second": 0}

    def step_of(name: str) -> Callable[[], bool]:
        def step() -> bool:
            steps[name] += 1
            return False

        return step

    first = start(step_of("first"))
    wait_for(lambda: steps["first"] > 0, "the first to work")
    second = start(step_of("second"))
    seen = steps["first"]
    wait_for(lambda: steps["first"] > seen + 10, "the first to go on")
    assert steps["second"] == 0
    assert second.healthy
    first.stop()
    wait_for(lambda: steps["second"] > 0, "the second to take over")


def test_the_age_of_its_last_success_is_measured(start: Callable[..., Background]) -> None:
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

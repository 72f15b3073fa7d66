"""Two processes change a study at once, on each database: the second sees what the first has done.

The first waits before its commit until the second waits for it, or has passed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from collecting import KEY, Clock, create, open_task, report, upload, work
from databases import Server, server_of
from serving import PATIENCE_SECONDS, wait_for
from sfumato.collector import studies
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store, StudyRow, Transaction
from sfumato.collector.worker.worker import Worker
from sfumato.privacy import SystemRng

ROUNDS: dict[str, Any] = {"rounds": 2, "publish": "rounds"}
Action = Callable[[Store, str], object]


class GatedStore(Store):
    """A store whose commits can be delayed, and which signals how far it is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begins, self.at_commit, self.may_commit = (threading.Event() for _ in range(3))
        self.may_commit.set()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        self.begins.set()
        with super().transaction() as tx:
            yield tx
            self.at_commit.set()
            assert self.may_commit.wait(PATIENCE_SECONDS)


class Both:
    """Two stores over one database, and a study with a clock that stands still."""

    def __init__(self, url: str, server: Server | None) -> None:
        self.clock, self._server = Clock(), server
        self.first, self.second = (GatedStore.open(url, now=self.clock) for _ in range(2))
        self.first.migrate()

    def close(self) -> None:
        self.first.close()
        self.second.close()

    def study(self, *, steps: Callable[[dict[str, Any]], bool], **keys: Any) -> StudyRow:
        """A study of two devices, after the worker's steps until `steps` holds."""
        row = create(self.first, self.clock, devices=2, **keys)
        task = open_task(self.first, row)
        reports = [report(task, category, rng=SystemRng()) for category in range(2)]
        assert upload(self.first, task, reports)
        worker = self.worker(self.first)
        while not steps(studies.state(self.first, row.id)):
            assert worker.step()
        return row

    def work(self, store: Store, study_id: str) -> None:
        self.worker(store).step()

    def race(self, study_id: str, winner: Action, loser: Action) -> None:
        """Start the loser when the winner is about to commit."""
        self.first.at_commit.clear()
        self.first.may_commit.clear()
        self.second.begins.clear()
        threads = [
            threading.Thread(target=_do, args=(action, store, study_id))
            for action, store in ((winner, self.first), (loser, self.second))
        ]
        threads[0].start()
        assert self.first.at_commit.wait(PATIENCE_SECONDS)
        threads[1].start()
        assert self.second.begins.wait(PATIENCE_SECONDS)
        if self._server is not None:
            wait_for(lambda: self._waits() or not threads[1].is_alive(), "the second to wait")
        self.first.may_commit.set()
        for thread in threads:
            thread.join()

    def _waits(self) -> bool:
        assert self._server is not None
        return bool(self._server.execute("SELECT 1 FROM pg_locks WHERE NOT granted"))

    def worker(self, store: Store) -> Worker:
        return Worker(store, key=KEY, now=self.clock, log=lambda event, **fields: None)


def _do(action: Action, store: Store, study_id: str) -> None:
    with suppress(Problem):  # the state of the study does not allow this any more
        action(store, study_id)


@pytest.fixture
def both(store_url: str, request: pytest.FixtureRequest) -> Iterator[Both]:
    with closing(Both(store_url, server_of(store_url, request))) as both:
        yield both


def is_sealed(state: dict[str, Any]) -> bool:
    """All reports are counted, and the next step finishes the task."""
    return [(task["state"], task["counted"]) for task in state["tasks"]] == [("closing", 2)]


def is_done(state: dict[str, Any]) -> bool:
    return all(task["state"] == "done" for task in state["tasks"])


def is_collecting(state: dict[str, Any]) -> bool:
    return True


def test_a_study_deleted_while_it_is_released_stays_deleted(both: Both) -> None:
    study = both.study(steps=is_done)
    both.race(study.id, studies.delete, both.work)
    assert studies.state(both.first, study.id)["state"] == "deleted"
    with both.first.reading() as tx:
        assert tx.release(study.id) is None


def test_a_study_released_while_it_is_closed_stays_released(both: Both) -> None:
    study = both.study(steps=is_done)
    both.race(study.id, both.work, studies.close)
    assert studies.state(both.first, study.id)["state"] == "released"
    both.work(both.first, study.id)


def test_a_study_deleted_while_it_is_closed_stays_deleted(both: Both) -> None:
    study = both.study(steps=is_collecting)
    both.race(study.id, studies.delete, studies.close)
    state = studies.state(both.first, study.id)
    assert state["state"] == "deleted"
    assert [task["state"] for task in state["tasks"]] == ["done"]


def test_a_study_deleted_while_it_is_deleted_is_deleted(both: Both) -> None:
    study = both.study(steps=is_collecting)
    both.race(study.id, studies.delete, studies.delete)
    assert studies.state(both.first, study.id)["state"] == "deleted"


def test_a_study_deleted_while_its_task_closes_asks_nothing(both: Both) -> None:
    study = both.study(steps=lambda state: state["counted"] == 2)
    both.race(study.id, studies.delete, both.work)
    assert [task["state"] for task in studies.state(both.first, study.id)["tasks"]] == ["done"]


def test_a_study_deleted_while_its_task_ends_is_not_charged(both: Both) -> None:
    study = both.study(steps=is_sealed)
    both.race(study.id, studies.delete, both.work)
    with both.first.reading() as tx:
        assert tx.entries() == []
        assert tx.answer_rows(study.id) == []


@pytest.mark.parametrize("end", [studies.close, studies.delete])
def test_a_study_that_ends_while_it_would_ask_more_opens_no_task(both: Both, end: Action) -> None:
    study = both.study(steps=is_done, **ROUNDS)
    both.race(study.id, end, both.work)
    assert len(studies.state(both.first, study.id)["tasks"]) == 1


def test_a_task_that_ends_while_its_study_is_closed_has_one_answer(both: Both) -> None:
    study = both.study(steps=is_sealed)
    both.race(study.id, both.work, studies.close)
    worker = both.worker(both.first)
    work(worker)
    assert studies.state(both.first, study.id)["state"] == "released"

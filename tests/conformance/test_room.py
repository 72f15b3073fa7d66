"""A task acknowledges no more reports than it can count, on each database."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.errors import StoreError

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None, capacity_left=10)
FREE = TaskRow("a2" * 32, STUDY.id, 1, "{}", "{}", "open", None)


@pytest.fixture
def open_store(store: Store) -> Store:
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
        tx.add_task(FREE)
    return store


def upload(store: Store, *counts: int, task: TaskRow = TASK) -> list[str]:
    with store.transaction() as tx:
        return list(tx.insert_uploads([(task.id, count, b"reports") for count in counts]))


def seal(store: Store, counted: int, repeated: int) -> None:
    """Seal all pending uploads, as the worker does."""
    with store.transaction() as tx:
        tx.delete_uploads(TASK.id, [number for number, _, _ in tx.pending_uploads(TASK.id, 1_000)])
        tx.add_sealed(TASK.id, b"sum", counted)
        tx.return_capacity(TASK.id, repeated)


def capacity_left(store: Store, task: TaskRow = TASK) -> int | None:
    with store.reading() as tx:
        row = tx.task(task.id)
    assert row is not None
    return row.capacity_left


def test_a_task_accepts_reports_up_to_its_capacity(open_store: Store) -> None:
    assert upload(open_store, 4) == ["stored"]
    assert capacity_left(open_store) == 6
    assert upload(open_store, 3, 4, 3) == ["stored", "full", "stored"]
    assert capacity_left(open_store) == 0
    with open_store.reading() as tx:
        assert tx.received_count(TASK.id) == 10


def test_a_task_without_a_limit_accepts_everything(open_store: Store) -> None:
    assert upload(open_store, 1_000, 1_000, task=FREE) == ["stored", "stored"]
    assert capacity_left(open_store, FREE) is None
    with open_store.transaction() as tx:
        tx.return_capacity(FREE.id, 3)
    assert capacity_left(open_store, FREE) is None


def test_sealing_returns_the_capacity_of_duplicates(open_store: Store) -> None:
    assert upload(open_store, 10) == ["stored"]
    assert upload(open_store, 1) == ["full"]
    seal(open_store, counted=7, repeated=3)
    assert capacity_left(open_store) == 3
    assert upload(open_store, 4) == ["closed"]  # it will never have capacity for four
    assert upload(open_store, 3) == ["stored"]
    assert upload(open_store, 4, 3) == ["closed", "full"]
    seal(open_store, counted=3, repeated=0)
    assert upload(open_store, 1) == ["closed"]


def test_a_failed_transaction_uses_no_capacity(open_store: Store) -> None:
    def fail() -> None:
        with open_store.transaction() as tx:
            tx.insert_uploads([(TASK.id, 4, b"reports")])
            tx.add_task(TASK)  # a second of this id

    with pytest.raises(StoreError):
        fail()
    assert capacity_left(open_store) == 10


def test_a_closed_task_accepts_nothing_whatever_its_capacity(open_store: Store) -> None:
    with open_store.transaction() as tx:
        tx.set_task_state(TASK.id, "closing", expected=["open"])
    assert upload(open_store, 1) == ["closed"]
    assert capacity_left(open_store) == 10


def test_simultaneous_uploads_do_not_exceed_the_capacity(open_store: Store, store_url: str) -> None:
    others = [Store.open(store_url) for _ in range(4)]
    outcomes: list[str] = []

    def send(store: Store, counts: Sequence[int]) -> None:
        for count in counts:
            outcomes.extend(f"{count} {outcome}" for outcome in upload(store, count))

    threads = [threading.Thread(target=send, args=(other, [2, 1, 2, 1])) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        other.close()
    total = sum(int(outcome.split()[0]) for outcome in outcomes if outcome.endswith("stored"))
    assert len(outcomes) == 16
    assert total == 10
    assert capacity_left(open_store) == 0
    with open_store.reading() as tx:
        assert tx.received_count(TASK.id) == 10

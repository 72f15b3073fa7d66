"""A task that can count so many reports acknowledges no more, on each database."""

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
def asked(store: Store) -> Store:
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
        tx.add_task(FREE)
    return store


def upload(store: Store, *counts: int, task: TaskRow = TASK) -> list[str]:
    with store.transaction() as tx:
        return list(tx.insert_uploads([(task.id, count, b"reports") for count in counts]))


def seal(store: Store, kept: int, repeated: int) -> None:
    """As the worker does, of all that wait."""
    with store.transaction() as tx:
        tx.delete_uploads(TASK.id, [number for number, _, _ in tx.pending_uploads(TASK.id, 1_000)])
        tx.add_sealed(TASK.id, b"sum", kept)
        tx.return_capacity(TASK.id, repeated)


def room(store: Store, task: TaskRow = TASK) -> int | None:
    with store.reading() as tx:
        row = tx.task(task.id)
    assert row is not None
    return row.capacity_left


def test_a_task_takes_what_it_has_room_for(asked: Store) -> None:
    assert upload(asked, 4) == ["stored"]
    assert room(asked) == 6
    assert upload(asked, 3, 4, 3) == ["stored", "full", "stored"]
    assert room(asked) == 0
    with asked.reading() as tx:
        assert tx.received_count(TASK.id) == 10


def test_a_task_without_a_limit_takes_everything(asked: Store) -> None:
    assert upload(asked, 1_000, 1_000, task=FREE) == ["stored", "stored"]
    assert room(asked, FREE) is None
    with asked.transaction() as tx:
        tx.return_capacity(FREE.id, 3)
    assert room(asked, FREE) is None


def test_what_came_twice_makes_room_when_it_is_sealed(asked: Store) -> None:
    assert upload(asked, 10) == ["stored"]
    assert upload(asked, 1) == ["full"]
    seal(asked, kept=7, repeated=3)
    assert room(asked) == 3
    assert upload(asked, 4) == ["closed"]  # it will never have room for so many
    assert upload(asked, 3) == ["stored"]
    assert upload(asked, 4, 3) == ["closed", "full"]
    seal(asked, kept=3, repeated=0)
    assert upload(asked, 1) == ["closed"]


def test_a_transaction_that_is_undone_takes_no_room(asked: Store) -> None:
    def undone() -> None:
        with asked.transaction() as tx:
            tx.insert_uploads([(TASK.id, 4, b"reports")])
            tx.add_task(TASK)  # a second of this id

    with pytest.raises(StoreError):
        undone()
    assert room(asked) == 10


def test_a_task_that_is_closed_takes_nothing_whatever_its_room(asked: Store) -> None:
    with asked.transaction() as tx:
        tx.set_task_state(TASK.id, "closing", expected=["open"])
    assert upload(asked, 1) == ["closed"]
    assert room(asked) == 10


def test_many_who_upload_at_once_are_not_given_more_than_there_is(
    asked: Store, store_url: str
) -> None:
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
    stored = sum(int(outcome.split()[0]) for outcome in outcomes if outcome.endswith("stored"))
    assert len(outcomes) == 16
    assert stored == 10
    assert room(asked) == 0
    with asked.reading() as tx:
        assert tx.received_count(TASK.id) == 10

"""Uploads are acknowledged when they are committed, together, and never otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serving import (
    PATIENCE_SECONDS,
    TASK,
    Faulty,
    body,
    opened,
    settings,
    stored,
    wait_for,
)
from sfumato.collector.http.commit_queue import CommitQueue
from sfumato.collector.metrics import Metrics
from sfumato.collector.problems import Problem
from sfumato.errors import StoreError, StoreFull, StoreUnavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Faulty]:
    store = Faulty.open(tmp_path / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    opened(store)
    yield store
    store.close()


@contextmanager
def started(uploads: CommitQueue) -> Iterator[CommitQueue]:
    uploads.start()
    try:
        yield uploads
    finally:
        uploads.stop()


LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="session", autouse=True)
def loop() -> Iterator[None]:
    """The loop in which uploads wait, in a thread of its own. It lasts for the session: a process
    that runs tests in any order may come back to this module."""
    thread = threading.Thread(target=LOOP.run_forever)
    thread.start()
    yield
    LOOP.call_soon_threadsafe(LOOP.stop)
    thread.join()
    LOOP.close()


def settle_loop() -> None:
    """Let the loop run everything that was scheduled before."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), LOOP).result(PATIENCE_SECONDS)


def submit(
    queue: CommitQueue,
    task_id: str,
    count: int,
    data: bytes,
    rejected: Mapping[str, int] | None = None,
) -> Future[bool]:
    """Add an upload to the queue; Problem if the queue refuses it."""
    adding = queue.add_upload(task_id, count, data, rejected or {})
    future = asyncio.run_coroutine_threadsafe(adding, LOOP)
    settle_loop()
    if future.done() and isinstance(problem := future.exception(), Problem):
        raise problem
    return future


def outcome(future: Future[bool]) -> bool:
    return future.result(PATIENCE_SECONDS)


def test_an_acknowledged_upload_is_in_the_store(store: Faulty) -> None:
    with started(CommitQueue(store)) as uploads:
        assert outcome(submit(uploads, TASK.id, 3, body(3)))
        assert stored(store) == 3


def test_uploads_that_wait_share_one_commit(store: Faulty) -> None:
    metrics = Metrics()
    with started(CommitQueue(store, metrics=metrics)) as uploads:
        store.gate = threading.Event()
        commits = store.commits
        first = submit(uploads, TASK.id, 1, body(1))
        wait_for(lambda: store.commits > commits, "the first commit to begin")
        others = [submit(uploads, TASK.id, 1, body(1)) for _ in range(50)]
        store.gate.set()
        assert all(map(outcome, [first, *others]))
    assert stored(store) == 51
    assert metrics.registry.get_sample_value("sfumato_commits_total") == 2


def test_nothing_is_acknowledged_before_the_commit(store: Faulty) -> None:
    with started(CommitQueue(store)) as uploads:
        store.gate = threading.Event()
        commits = store.commits
        future = submit(uploads, TASK.id, 1, body(1))
        wait_for(lambda: store.commits > commits, "the commit to begin")
        assert not future.done()
        assert stored(store) == 0  # another connection sees nothing yet
        store.gate.set()
        assert outcome(future)


@pytest.mark.parametrize(
    "problem", [StoreFull("full"), StoreUnavailable("away"), ValueError("bug")]
)
def test_a_commit_that_fails_acknowledges_nothing(store: Faulty, problem: Exception) -> None:
    with started(CommitQueue(store)) as uploads:
        store.problem = problem
        future = submit(uploads, TASK.id, 1, body(1))
        assert future.exception(PATIENCE_SECONDS) is problem
        assert stored(store) == 0


def test_an_error_of_the_store_fails_all_that_wait_and_none_that_come_later(store: Faulty) -> None:
    with started(CommitQueue(store)) as uploads:
        store.gate, store.problem = threading.Event(), StoreUnavailable("away")
        commits = store.commits
        futures = [submit(uploads, TASK.id, 1, body(1))]
        wait_for(lambda: store.commits > commits, "the first commit to begin")
        futures += [submit(uploads, TASK.id, 1, body(1)) for _ in range(5)]
        store.gate.set()
        wait(futures, PATIENCE_SECONDS)
        assert {type(future.exception()) for future in futures} == {StoreUnavailable}
        assert store.commits == commits + 1  # those that waited did not try again
        store.problem = None
        assert outcome(submit(uploads, TASK.id, 1, body(1)))
        assert stored(store) == 1


def test_a_task_that_was_closed_takes_nothing(store: Faulty) -> None:
    with store.transaction() as tx:
        tx.set_task_state(TASK.id, "closing", expected=["open"])
    with started(CommitQueue(store)) as uploads:
        assert not outcome(submit(uploads, TASK.id, 1, body(1)))
    assert stored(store) == 0


def test_a_task_without_room_is_busy_for_its_own_uploads_only(store: Faulty) -> None:
    """And rejected reports of an upload are counted if the others are stored."""
    small = replace(TASK, cohort="few")
    opened(store, task=small, name="Few", capacity_left=2)
    with started(CommitQueue(store)) as uploads:
        store.gate = threading.Event()
        sizes = [(small.id, 2), (small.id, 1), (TASK.id, 5), (small.id, 3)]
        futures = [submit(uploads, task, count, b"x", {"impossible": 1}) for task, count in sizes]
        store.gate.set()
        problem = futures[1].exception(PATIENCE_SECONDS)
        assert [futures[0].result(), futures[2].result(), futures[3].result()] == [
            True,
            True,
            False,
        ]
    assert isinstance(problem, Problem)
    assert (problem.code, problem.retry_after_seconds) == ("busy", 5)
    assert (stored(store), stored(store, small)) == (5, 2)
    with store.reading() as tx:
        assert tx.counts(small.id) == {"rejected:impossible": 1}


@pytest.mark.parametrize(
    "limit",
    [{"queue_uploads": 4}, {"queue_bytes": 4 * (len(body(1)) + 256)}],
    ids=["count", "bytes"],
)
def test_a_full_queue_refuses_and_loses_nothing(
    store: Faulty, tmp_path: Path, limit: dict[str, int]
) -> None:
    with started(CommitQueue(store, settings(tmp_path, **limit))) as uploads:
        store.gate = threading.Event()
        accepted = [submit(uploads, TASK.id, 1, body(1)) for _ in range(4)]
        for _ in range(6):
            with pytest.raises(Problem) as caught:
                submit(uploads, TASK.id, 1, body(1))
            assert caught.value.code == "busy"
            assert 1 <= int(caught.value.headers()["Retry-After"]) <= 60
        with pytest.raises(Problem):
            uploads.check_capacity(TASK.id)
        store.gate.set()
        assert all(map(outcome, accepted))
        uploads.check_capacity(TASK.id)
        assert outcome(submit(uploads, TASK.id, 1, body(1)))
    assert stored(store) == 5


def test_an_upload_larger_than_the_queue_is_taken_when_nothing_waits(
    store: Faulty, tmp_path: Path
) -> None:
    with started(CommitQueue(store, settings(tmp_path, queue_bytes=1))) as uploads:
        assert outcome(submit(uploads, TASK.id, 9, body(9)))


def test_the_slower_the_store_the_longer_is_the_wait(store: Faulty, tmp_path: Path) -> None:
    def retry_after(bytes_per_second: float) -> int:
        limits = settings(tmp_path, queue_bytes=10_000)
        uploads = CommitQueue(store, limits, bytes_per_second=bytes_per_second)
        submit(uploads, TASK.id, 1, bytes(9_744))
        with pytest.raises(Problem) as caught:
            submit(uploads, TASK.id, 1, bytes(1))
        return caught.value.retry_after_seconds or 0

    assert [retry_after(speed) for speed in (1e6, 1_000, 1)] == [1, 10, 60]


def test_a_stop_stores_the_queue_and_refuses_new_uploads(store: Faulty) -> None:
    uploads = CommitQueue(store)
    store.gate = threading.Event()
    uploads.start()
    futures = [submit(uploads, TASK.id, 1, body(1)) for _ in range(20)]
    stopper = threading.Thread(target=uploads.stop)
    stopper.start()
    wait_for(lambda: refuses(uploads), "the queue to refuse")
    store.gate.set()
    stopper.join()
    assert all(map(outcome, futures))
    assert stored(store) == 20
    assert not uploads.alive


def refuses(uploads: CommitQueue) -> bool:
    try:
        submit(uploads, TASK.id, 0, b"").cancel()
    except Problem as problem:
        return problem.code == "stopping"
    return False


def test_a_cancelled_upload_takes_no_room(store: Faulty) -> None:
    metrics = Metrics()
    with started(CommitQueue(store, metrics=metrics)) as uploads:
        store.gate = threading.Event()
        commits = store.commits
        first = submit(uploads, TASK.id, 1, body(1))
        wait_for(lambda: store.commits > commits, "the first commit to begin")
        assert submit(uploads, TASK.id, 1, body(1)).cancel()
        settle_loop()
        store.gate.set()
        assert outcome(first)
        assert outcome(submit(uploads, TASK.id, 1, body(1)))
    assert "sfumato_queue_uploads 0.0\n" in metrics.text()
    assert "sfumato_queue_bytes 0.0\n" in metrics.text()
    assert stored(store) == 2


def test_rejections_are_counted_with_the_upload(store: Faulty) -> None:
    with started(CommitQueue(store)) as uploads:
        assert outcome(submit(uploads, TASK.id, 1, body(1), {"malformed": 2}))
        assert outcome(submit(uploads, TASK.id, 0, b"", {"malformed": 1, "impossible": 4}))
    with store.reading() as tx:
        assert tx.counts(TASK.id) == {"rejected:malformed": 3, "rejected:impossible": 4}
    assert stored(store) == 1


def test_many_threads_lose_nothing(store: Faulty, tmp_path: Path) -> None:
    each, threads = 40, 6
    acknowledged = [0] * threads
    with started(CommitQueue(store, settings(tmp_path, commit_bytes=2_000))) as uploads:

        def send(number: int) -> None:
            for _ in range(each):
                acknowledged[number] += outcome(submit(uploads, TASK.id, 2, body(2)))

        senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    assert sum(acknowledged) == each * threads
    assert stored(store) == 2 * each * threads


def test_a_store_that_is_closed_is_an_error_and_not_a_hang(store: Faulty) -> None:
    with started(CommitQueue(store)) as uploads:
        store.close()
        assert isinstance(
            submit(uploads, TASK.id, 1, body(1)).exception(PATIENCE_SECONDS), StoreError
        )


def test_tasks_take_turns_and_leave_room_for_each_other(store: Faulty, tmp_path: Path) -> None:
    other = replace(TASK, cohort="others")
    opened(store, task=other, name="Others")
    limits = settings(tmp_path, queue_uploads=8, commit_bytes=1)  # one upload in each commit
    with started(CommitQueue(store, limits)) as uploads:
        store.gate = threading.Event()
        flood = [submit(uploads, TASK.id, 1, body(1)) for _ in range(8)]
        with pytest.raises(Problem):
            submit(uploads, TASK.id, 1, body(1))
        late = submit(uploads, other.id, 1, b"x")
        late.add_done_callback(lambda _: order.append(sum(each.done() for each in flood)))
        order: list[int] = []
        store.gate.set()
        assert outcome(late)
        assert all(map(outcome, flood))
    assert order[0] <= 2

"""Several threads and processes over one store, on each database; some of them are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from databases import server_of
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.errors import StoreError, StoreUnavailable

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None)


@pytest.fixture
def open_store(store: Store) -> Store:
    """A store with an open task."""
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
    return store


def test_no_upload_is_accepted_after_its_task_was_closed_and_none_is_lost(
    open_store: Store,
) -> None:
    """Uploads race with the close: the acknowledged ones are those visible after it."""
    for number in range(1, 9):
        task = replace(TASK, id=f"{number:064x}", number=number)
        with open_store.transaction() as tx:
            tx.add_task(task)
        accepted: list[bytes] = []
        is_busy = threading.Event()
        threads = [
            threading.Thread(
                target=upload_until_closed, args=(open_store, task.id, name, accepted, is_busy)
            )
            for name in range(4)
        ]
        for thread in threads:
            thread.start()
        assert is_busy.wait(60)
        with open_store.transaction() as tx:
            tx.set_task_state(task.id, "closing", expected=["open"])
        with open_store.reading() as tx:
            bodies = [body for _, _, body in tx.pending_uploads(task.id, 10_000)]
        for thread in threads:
            thread.join()
        assert sorted(bodies) == sorted(accepted)


def upload_until_closed(
    store: Store, task_id: str, name: int, accepted: list[bytes], is_busy: threading.Event
) -> None:
    for place in range(1_000):
        bodies = [b"%d %d %d" % (name, place, each) for each in range(3)]
        with store.transaction() as tx:
            outcomes = tx.insert_uploads([(task_id, 1, body) for body in bodies])
        accepted += [
            body for body, outcome in zip(bodies, outcomes, strict=True) if outcome == "stored"
        ]
        if set(outcomes) != {"stored"}:
            return
        if len(accepted) >= 30:
            is_busy.set()


HOLDER = """
import sys
from sfumato.collector.store.store import Store
with Store.open(sys.argv[1]).worker_lock() as is_only:
    print(is_only, flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_there_is_one_worker_at_a_time_and_a_killed_one_is_replaced(
    store: Store, store_url: str
) -> None:
    with process(HOLDER, store_url) as first:
        assert read_line(first) == "True"
        with store.worker_lock() as is_only:
            assert not is_only
        first.kill()
        first.wait()
        while True:  # a server takes a moment to notice
            with store.worker_lock() as is_only:
                if is_only:
                    break
    with store.worker_lock() as is_only, store.worker_lock() as is_second:
        assert is_only
        assert not is_second
    with store.worker_lock() as is_only:
        assert is_only


def test_a_worker_writes_under_its_lock_and_keeps_it_when_a_block_raises(
    open_store: Store, store_url: str
) -> None:
    def fail() -> None:
        with open_store.transaction() as tx:
            tx.insert_uploads([(TASK.id, 1, b"undone")])
            raise ValueError

    with open_store.worker_lock() as is_only:
        assert is_only
        with pytest.raises(ValueError):
            fail()
        with open_store.transaction() as tx:
            tx.insert_uploads([(TASK.id, 1, b"kept")])
        with closing(Store.open(store_url)) as other, other.worker_lock() as is_other:
            assert not is_other
    with open_store.reading() as tx:
        assert [body for _, _, body in tx.pending_uploads(TASK.id, 9)] == [b"kept"]


def test_a_worker_whose_call_failed_has_to_take_its_lock_again(open_store: Store) -> None:
    with open_store.worker_lock():
        with pytest.raises(StoreError), open_store.transaction() as tx:
            tx.add_task(TASK)  # a second of this id
        with pytest.raises(StoreUnavailable, match="lost its lock"), open_store.transaction():
            pass
    with open_store.worker_lock() as is_only, open_store.transaction() as tx:
        assert is_only
        assert tx.insert_uploads([(TASK.id, 1, b"again")]) == ["stored"]


def test_a_state_is_changed_from_an_expected_one_only(open_store: Store) -> None:
    with open_store.transaction() as tx:
        assert not tx.set_study_state(STUDY.id, "released", expected=["closing", "failed"])
        assert tx.set_study_state(STUDY.id, "closing", expected=["failed", "collecting"])
        assert not tx.set_task_state(TASK.id, "done", expected=["closing"])
        assert tx.set_task_state(TASK.id, "closing", expected=["open"])
    with open_store.reading() as tx:
        study, task = tx.study(STUDY.id), tx.task(TASK.id)
    assert study is not None
    assert task is not None
    assert (study.state, task.state) == ("closing", "closing")


UPLOADER = """
import sys
from sfumato.collector.store.store import Store
store = Store.open(sys.argv[1])
for place in range(1_000_000):
    with store.transaction() as tx:
        assert tx.insert_uploads([(sys.argv[2], 1, b"%d" % place)]) == ["stored"]
    print(place, flush=True)
"""


def test_acknowledged_uploads_survive_a_kill(
    open_store: Store, store_url: str, request: pytest.FixtureRequest
) -> None:
    with process(UPLOADER, store_url, TASK.id) as child:
        while (acknowledged := int(read_line(child))) < 50:
            pass
        if server := server_of(store_url, request):
            server.restart()
        child.send_signal(signal.SIGKILL)
        assert child.stdout is not None
        acknowledged = max([acknowledged, *map(int, child.stdout.read().split())])
    with open_store.reading() as tx:
        bodies = [int(body) for _, _, body in tx.pending_uploads(TASK.id, 1_000_000)]
    assert bodies == list(range(len(bodies)))
    assert len(bodies) > acknowledged

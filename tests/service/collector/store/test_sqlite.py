"""A store in a file: full, read-only, locked, and scrubbed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sfumato.collector.store.sqlite import Sqlite, SqliteConnection
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.errors import StoreFull, StoreUnavailable

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None)
UPLOAD = (TASK.id, 1, b"x" * 100_000)


class Small(Sqlite):
    """A file that may not grow beyond a megabyte."""

    def connect(self) -> SqliteConnection:
        connection = super().connect()
        connection.execute("PRAGMA max_page_count = 256")
        return connection


def with_task(store: Store) -> Store:
    store.migrate()
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
    return store


def fill(store: Store) -> int:
    """Upload until the store is full; return how many uploads were acknowledged."""
    for acknowledged in range(1_000):
        try:
            with store.transaction() as tx:
                assert tx.insert_uploads([UPLOAD]) == ["stored"]
        except StoreFull:
            return acknowledged
    raise AssertionError("it never filled up")


def make_room(store: Store) -> None:
    with store.transaction() as tx:
        tx.delete_uploads(TASK.id, [number for number, _, _ in tx.pending_uploads(TASK.id, 3)])


def received_count(store: Store) -> int:
    with store.reading() as tx:
        return tx.received_count(TASK.id)


def test_a_full_store_keeps_what_it_acknowledged_and_works_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    with closing(with_task(Store(Small(tmp_path / "collector.db")))) as store:
        acknowledged = fill(store)
        assert 3 < acknowledged == received_count(store)
        make_room(store)
        with store.transaction() as tx:
            assert tx.insert_uploads([UPLOAD]) == ["stored"]
        assert received_count(store) == acknowledged - 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes and ten files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=10", "tmpfs", str(tmp_path)]
    try:
        process = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if process.returncode != 0:
        pytest.skip("a small disk cannot be mounted here: that takes root and its capabilities")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_keeps_what_was_acknowledged_and_is_used_again_when_there_is_room(
    small_disk: Path,
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    with closing(with_task(Store.open(small_disk / "collector.db"))) as store:
        acknowledged = fill(store)
        assert 3 < acknowledged == received_count(store)
        ballast.unlink()
        with store.transaction() as tx:
            assert tx.insert_uploads([UPLOAD]) == ["stored"]
        assert received_count(store) == acknowledged + 1


def test_a_store_on_a_full_disk_says_so_when_it_is_opened(small_disk: Path) -> None:
    path = small_disk / "collector.db"
    with_task(Store.open(path)).close()
    with pytest.raises(OSError, match="space"):
        (small_disk / "ballast").write_bytes(bytes(5 << 20))
    with closing(Store.open(path)) as store:
        with pytest.raises(StoreFull, match="room"), store.transaction() as tx:
            tx.insert_uploads([UPLOAD])
        (small_disk / "ballast").unlink()
        assert received_count(store) == 0


def test_a_disk_without_room_for_a_file_says_so(small_disk: Path) -> None:
    files = [small_disk / f"ballast{number}" for number in range(20)]
    with pytest.raises(OSError, match="space"):
        list(map(Path.touch, files))
    with pytest.raises(StoreFull, match="room"):
        Store.open(small_disk / "collector.db").migrate()


READER = """
import os, sys
from sfumato.collector.store.store import Store
from sfumato.errors import StoreReadOnly
if os.geteuid() == 0:  # root ignores file modes
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = Store.open(sys.argv[1])
try:
    with store.transaction() as tx:
        tx.add_dictionary("d", b"")
except StoreReadOnly as problem:
    print(problem.hint)
store.close()
"""


@pytest.mark.parametrize("folder_mode", [0o777, 0o555], ids=["the file", "its folder as well"])
def test_a_file_that_may_only_be_read_says_so(folder_mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:  # another user may pass through
        folder = Path(name)
        path = folder / "collector.db"
        with_task(Store.open(path)).close()
        path.chmod(0o444)
        folder.chmod(folder_mode)
        process = subprocess.run(
            [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=False
        )
        folder.chmod(0o700)
    assert "the owner of the file" in process.stdout, process.stderr


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        Store.open(tmp_path / "missing" / "collector.db").migrate()


def test_a_file_is_readable_for_its_owner_only(tmp_path: Path) -> None:
    with closing(with_task(Store.open(tmp_path / "collector.db"))):
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_store_that_another_process_holds_is_unavailable_until_it_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "collector.db"
    hasty = Sqlite(path, wait_seconds=0.05)
    with closing(with_task(Store.open(path))) as store, closing(Store(hasty)) as other:
        with store.transaction():
            with pytest.raises(StoreUnavailable, match="locked"), other.transaction():
                pass
            with other.reading() as tx:  # reading goes on
                assert tx.received_count(TASK.id) == 0
        with other.transaction() as tx:
            assert tx.insert_uploads([UPLOAD]) == ["stored"]


def test_a_writer_that_waits_too_long_in_this_process_gives_up_its_turn(tmp_path: Path) -> None:
    with closing(with_task(Store(Sqlite(tmp_path / "collector.db", wait_seconds=0.05)))) as store:
        with store.transaction():
            with pytest.raises(StoreUnavailable, match="locked"), store.transaction():
                pass
            with pytest.raises(StoreUnavailable, match="locked"), store.transaction():
                pass
        for _ in range(3):
            with store.transaction() as tx:
                tx.insert_uploads([UPLOAD])
        assert received_count(store) == 3


def test_a_writer_is_let_in_before_one_that_writes_all_the_time_goes_on(tmp_path: Path) -> None:
    with closing(with_task(Store.open(tmp_path / "collector.db"))) as store:
        stop, transactions, is_writing = threading.Event(), [0], threading.Event()

        def write() -> None:
            while not stop.is_set():
                with store.transaction() as tx:
                    transactions[0] += 1
                    is_writing.set()
                    tx.insert_uploads([UPLOAD] * 5)

        thread = threading.Thread(target=write)
        thread.start()
        overtaken = []
        for _ in range(21):
            is_writing.clear()
            assert is_writing.wait(30)
            before = transactions[0]
            with store.transaction():
                overtaken.append(transactions[0] - before)
        stop.set()
        thread.join()
        assert sorted(overtaken)[10] == 0  # more only if this thread was delayed before it asked


def test_what_was_deleted_is_not_in_the_file(tmp_path: Path) -> None:
    canary = b"canary7391"
    with closing(with_task(Store.open(tmp_path / "collector.db"))) as store:
        with store.transaction() as tx:
            tx.insert_uploads([(TASK.id, 1, canary * 10), (TASK.id, 1, canary * 10_000)])
            tx.add_report_ids(TASK.id, [canary])
        with store.transaction() as tx:
            tx.drop_data(STUDY.id)
    left = [path for path in tmp_path.iterdir() if canary in path.read_bytes()]
    assert os.listdir(tmp_path) == ["collector.db"]
    assert not left


def test_what_was_deleted_is_not_in_the_log_of_a_store_in_use_once_it_is_scrubbed(
    tmp_path: Path,
) -> None:
    canary, log = b"canary7391" * 10, tmp_path / "collector.db-wal"
    with closing(with_task(Store.open(tmp_path / "collector.db"))) as store:
        with store.transaction() as tx:
            tx.insert_uploads([(TASK.id, 1, canary)])
        with store.reading() as tx:
            assert tx.received_count(TASK.id) == 1
            with store.transaction() as other:
                other.drop_data(STUDY.id)
            assert not store.scrub()  # a transaction still reads the log
        assert canary in log.read_bytes()
        assert store.scrub()
        assert canary not in log.read_bytes()
        with store.transaction() as tx:  # it can still be written to
            assert tx.insert_uploads([UPLOAD]) == ["stored"]
        assert received_count(store) == 1

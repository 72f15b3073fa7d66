"""A copy of a store is a snapshot, on each database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from databases import DIALECTS, server_of
from sfumato.collector.backup import backup, restore
from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.errors import StoreError

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None)


@pytest.fixture(params=DIALECTS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The URLs of a store and of its restored copy."""
    server = server_of(request.param, request)
    if server is None:
        return f"sqlite:///{tmp_path}/collector.db", f"sqlite:///{tmp_path}/restored.db"
    return server.empty_database(), server.empty_database()


@contextmanager
def writers(store: Store) -> Iterator[None]:
    """Threads that write: each of their transactions adds an upload and counts it."""
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with store.transaction() as tx:
                tx.count(TASK.id, "reports", 1)
                tx.insert_uploads([(TASK.id, 1, b"x" * 1_000)])

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_copy_made_while_others_write_is_a_snapshot(
    places: tuple[str, str], tmp_path: Path
) -> None:
    url, target = places
    copy = tmp_path / "copy"
    with closing(Store.open(url)) as store:
        store.migrate()
        with store.transaction() as tx:
            tx.add_study(STUDY)
            tx.add_task(TASK)
            tx.add_entry("campaign", "cohort", "task", "{}")
        with writers(store):
            backup(url, copy)
    assert copy.stat().st_mode & 0o777 == 0o600

    restore(target, copy, nothing_released=True)
    with closing(Store.open(target)) as restored:
        with restored.reading() as tx:
            count = tx.received_count(TASK.id)
            assert count == tx.counts(TASK.id).get("reports", 0)
            assert [study.name for study in tx.studies()] == [STUDY.name]
            assert tx.entries() == [("campaign", "cohort", "task", "{}")]
        with restored.transaction() as tx:  # numbers continue
            assert tx.insert_uploads([(TASK.id, 1, b"new")]) == ["stored"]
            assert tx.received_count(TASK.id) == count + 1
            assert tx.pending_uploads(TASK.id, 1_000_000)[-1][2] == b"new"

    with pytest.raises(StoreError, match="not overwritten"):
        restore(target, copy)
    with pytest.raises(StoreError, match="not overwritten"):
        backup(url, copy)
    assert not list(tmp_path.glob(".*"))


def test_there_is_nothing_to_copy_in_an_empty_store(
    places: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="empty"):
        backup(places[0], tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_another_file_is_refused_and_leaves_no_table(
    places: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="no copy"):
        restore(places[1], tmp_path / "missing")
    (tmp_path / "copy").write_bytes(b"something else" * 1_000)
    message = "must be a copy of a store" if "sqlite" in places[1] else "pg_restore"
    with pytest.raises(StoreError, match=message):
        restore(places[1], tmp_path / "copy")
    assert database(places[1]).is_empty()


def test_a_copy_of_an_older_version_is_brought_up_to_date(
    places: tuple[str, str], tmp_path: Path
) -> None:
    schema.migrate(database(places[0]), schema.STEPS[:1])
    backup(places[0], tmp_path / "copy")
    restore(places[1], tmp_path / "copy")
    with closing(Store.open(places[1])) as store, store.reading() as tx:
        assert tx.studies() == []


def test_a_copy_cannot_be_written_where_there_is_no_folder(
    places: tuple[str, str], tmp_path: Path
) -> None:
    schema.migrate(database(places[0]))
    with pytest.raises(StoreError, match="cannot be written"):
        backup(places[0], tmp_path / "missing" / "copy")

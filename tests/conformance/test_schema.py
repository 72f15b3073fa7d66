"""Versions of a store go up step by step, on each database."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import pytest

from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.schema import STEPS, VERSION, AppendOnly, Step
from sfumato.collector.store.store import Store, StudyRow
from sfumato.errors import StoreError

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
OLD: tuple[Step, ...] = (("CREATE TABLE old (number {number}, word TEXT NOT NULL) {table}",),)
NEXT: Step = (
    "ALTER TABLE old ADD COLUMN length {integer}",
    "UPDATE old SET length = LENGTH(word)",
    AppendOnly("old"),
)
BROKEN: Step = ("CREATE TABLE half (word TEXT)", "CREATE TABLE half (word TEXT)")


def run(url: str, sql: str, parameters: Sequence[object] = ()) -> list[tuple[object, ...]]:
    with closing(database(url).connect()) as connection:
        connection.begin(writing=True)
        rows = connection.execute(sql, parameters)
        connection.commit()
        return rows


def test_data_of_an_older_version_is_kept(store_url: str) -> None:
    schema.migrate(database(store_url), OLD)
    run(store_url, "INSERT INTO old (word) VALUES (?)", ("oak",))
    schema.migrate(database(store_url), (*OLD, NEXT))
    schema.migrate(database(store_url), (*OLD, NEXT))  # nothing more to do
    assert run(store_url, "SELECT word, length FROM old") == [("oak", 3)]
    assert run(store_url, "SELECT version FROM migration ORDER BY version") == [(1,), (2,)]
    with pytest.raises(StoreError, match="append-only"):
        run(store_url, "DELETE FROM old")


def test_a_step_that_fails_leaves_the_version_before_it(store_url: str) -> None:
    with pytest.raises(StoreError, match="half"):
        schema.migrate(database(store_url), (*OLD, BROKEN, NEXT))
    with closing(database(store_url).connect()) as connection:
        assert schema.version(connection) == 1
        assert "half" not in connection.tables()
    schema.migrate(database(store_url), (*OLD, NEXT))


def test_a_store_of_each_version_so_far_is_brought_up_to_date(store_url: str) -> None:
    for version in range(1, VERSION + 1):
        schema.migrate(database(store_url), STEPS[:version])
    with closing(Store.open(store_url)) as store:
        store.migrate()
        with store.transaction() as tx:
            tx.add_study(STUDY)
            assert [study.name for study in tx.studies()] == [STUDY.name]


def test_a_store_of_a_later_version_is_refused(store_url: str) -> None:
    later = (*STEPS, ("CREATE TABLE of_the_future (word TEXT)",))
    schema.migrate(database(store_url), later)
    with closing(Store.open(store_url)) as store:
        with pytest.raises(StoreError, match=f"has version {VERSION + 1}"):
            store.migrate()
        with pytest.raises(StoreError, match=f"has version {VERSION + 1}"), store.transaction():
            pass


def test_a_store_that_was_not_migrated_says_so(store_url: str) -> None:
    with closing(Store.open(store_url)) as store:
        with pytest.raises(StoreError, match="has version 0") as raised, store.reading():
            pass
        assert "migrate" in str(raised.value.hint)
        store.migrate()
        with store.reading() as tx:
            assert tx.studies() == []


def test_a_store_is_migrated_once_by_simultaneous_starts(store_url: str) -> None:
    problems: list[Exception] = []
    together = threading.Barrier(6)

    def start() -> None:
        with closing(Store.open(store_url)) as store:
            together.wait()
            try:
                store.migrate()
                with store.reading() as tx:
                    tx.studies()
            except Exception as problem:
                problems.append(problem)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert run(store_url, "SELECT COUNT(*) FROM migration") == [(VERSION,)]

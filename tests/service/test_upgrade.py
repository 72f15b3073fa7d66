"""A store that earlier code wrote goes on under today's, in its file and on another database.

`stores/version-8.sql` was written by the last code with version 8 of the store: four studies of 5
items, two of which are released. In the others, reports wait, sealed and not yet sealed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import browsing
from collecting import KEY, Clock, Stage, work
from databases import DIALECTS, ROOT, execute, table_names
from service.dashboard.visiting import sign_in_as
from sfumato.collector import check
from sfumato.collector.backup import backup, restore
from sfumato.collector.store.schema import VERSION
from sfumato.errors import StoreError

OLD = ROOT / "tests" / "stores" / "version-8.sql"
REPORTS = {  # of the studies that collect: what their devices hold most, and how many answered
    "Local, collecting": (2, 21),
    "Central, collecting": (4, 30),
}


def old_store(folder: Path) -> Path:
    """A file with the store of version 8."""
    path = folder / "old.db"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(OLD.read_text(encoding="utf-8"))
    return path


@pytest.fixture(params=DIALECTS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """The old store opened by today's code: in its file, or moved to a database server."""
    place: str = str(old_store(tmp_path))
    if server := DIALECTS[request.param].server:
        copy, place = place, request.getfixturevalue(f"{server}_url")
        assert restore(place, copy, nothing_released=True) == []
    stage = Stage(place)
    yield stage
    stage.store.close()


def test_an_old_store_keeps_its_releases_and_its_ledger(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "as_it_was").mkdir()
    with closing(sqlite3.connect(old_store(tmp_path / "as_it_was"))) as raw:
        releases = raw.execute("SELECT study_id, data FROM release ORDER BY study_id").fetchall()
        entries = raw.execute("SELECT campaign, cohort, task, loss FROM entry").fetchall()
    query = "SELECT study_id, data FROM release ORDER BY study_id"
    assert execute(str(stage.path), "SELECT MAX(version) FROM migration") == [(VERSION,)]
    assert execute(str(stage.path), query) == releases
    with stage.store.reading() as tx:
        assert (len(releases), tx.entries()) == (2, entries)
    findings = check.check(str(stage.path))
    assert findings.problems == ()
    assert findings.without_digest > 0  # version 8 had none


def test_the_studies_of_an_old_store_are_released_by_todays_code(stage: Stage) -> None:
    stage.clock = Clock(stage.clock.seconds + 1_000)
    stage.worker = stage.start()
    with stage.store.reading() as tx:
        rows = {row.name: row for row in tx.studies()}
    for name, (item, count) in REPORTS.items():
        release = stage.finish(rows[name])
        assert release.cost.devices == count
        assert release.items[int(release.counts.argmax())].as_py() == f"tree {item}"
    for name in ("Local, released", "Central, released"):
        assert stage.release(rows[name]).cost.devices in (28, 40)
    again = stage.create("After the move", trust="local", epsilon=4.0)  # numbers of rows continue
    stage.answer(again, 1, 1)
    assert stage.finish(again).cost.devices == 2
    with stage.store.reading() as tx:
        assert len(tx.entries()) == 2  # the two central ones with a promise
    assert check.check(str(stage.path)).problems == ()


def test_the_dashboard_shows_the_studies_of_an_old_store(tmp_path: Path) -> None:
    place, key = f"sqlite:///{old_store(tmp_path)}", tmp_path / "collector.key"
    key.touch(mode=0o600)
    key.write_text(KEY.hex(), encoding="ascii")
    with (
        browsing.open_stage(tmp_path, store=place, budget_epsilon=4.0) as stage,
        closing(sign_in_as(stage)) as visitor,
    ):
        rows = stage.client.studies()
        assert len(rows) == 4
        for study in rows:
            page = visitor.get(f"/dashboard/studies/{study['id']}")
            assert page.status_code == 200
            assert study["name"] in page.text


def test_a_store_moves_to_a_server_with_every_row(server_url: str, tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path}/collector.db"
    stage = Stage(place)
    study = stage.create("Street trees", trust="local", epsilon=4.0)
    stage.answer(study, *range(12))
    for _ in range(2):  # the first step notes when the reports came, the second seals them
        work(stage.worker)
        stage.clock.advance(100)
    stage.answer(study, *range(3))
    stage.store.close()
    backup(place, tmp_path / "copy.db")
    restore(server_url, tmp_path / "copy.db", nothing_released=True)
    filled = 0
    for table in table_names():
        query = f"SELECT * FROM {table} ORDER BY 1, 2"  # noqa: S608  # our own names
        rows = execute(place, query)
        assert execute(server_url, query) == rows, table
        filled += bool(rows)
    assert filled >= 7
    with pytest.raises(StoreError, match="not overwritten"):
        restore(server_url, tmp_path / "copy.db")


def test_a_copy_that_cannot_be_moved_leaves_no_table(server_url: str, tmp_path: Path) -> None:
    path = old_store(tmp_path)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE study SET purpose = 'a' || char(0)")  # PostgreSQL does not store NUL
        raw.commit()
    with pytest.raises(StoreError):
        restore(server_url, path)
    restore(server_url, old_store(tmp_path))

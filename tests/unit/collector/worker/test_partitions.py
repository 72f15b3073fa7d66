"""Sealed reports that move to the lake are counted once, whenever the worker was killed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import Stage, open_task, upload, work
from databases import execute
from sfumato import lake
from sfumato.collector import studies
from sfumato.collector.check import check
from sfumato.collector.export import export
from sfumato.collector.store.store import StudyRow, Transaction
from sfumato.errors import DataError
from sfumato.flow.accumulator import RecordBatch

LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0, "algorithm": "hashed", "devices": 1_000}
REPORTS = 44
SEALINGS = 4


class Killed(BaseException):
    """The end of a process: nothing catches it."""


@pytest.fixture
def stage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A store with small partitions: two rows of sealed reports fill one."""
    monkeypatch.setattr(lake, "_MOST_RECORDS", 20)
    stage = Stage(store_url)
    yield stage
    stage.store.close()


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def collect(stage: Stage) -> StudyRow:
    """A study with sealed reports in four rows, some of which came twice."""
    study = stage.create(**LOCAL)
    task = open_task(stage.store, study)
    each = REPORTS // SEALINGS
    for start in range(0, REPORTS, each):
        reports = stage.answer(study, *range(start, start + each))
        assert upload(stage.store, task, reports[:3])
        stage.start(seal_seconds=0.0).step()
    return study


def finish(stage: Stage, study: StudyRow, to: Path | str) -> None:
    studies.close(stage.store, study.id)
    work(stage.start(lake=str(to)))


def tally(stage: Stage, study: StudyRow) -> RecordBatch:
    """The collector's own."""
    with stage.store.reading() as tx:
        (row,) = tx.tasks(study.id)
        batch = studies.answer_of(tx, studies.task_of(row))
    assert isinstance(batch, RecordBatch)
    return batch


def assert_alike(ours: RecordBatch, its: RecordBatch) -> None:
    assert (ours.count, ours.records) == (its.count, its.records) == (REPORTS, REPORTS)
    for mine, other in zip(ours.tallies, its.tallies, strict=True):
        assert np.array_equal(mine.cells, other.cells)


def assert_sound(stage: Stage, study: StudyRow, before: RecordBatch, to: Path | str) -> None:
    """The collector, the data set and an export of it count what was there before."""
    assert_alike(before, tally(stage, study))
    ((_, folded),) = lake.Reports.read(f"{to}/{study.id}").count()
    assert_alike(before, folded)
    release, its = stage.release(study).to_dict(), lake.fold(f"{to}/{study.id}").to_dict()
    for data in (release, its):
        data["cost"].pop("seconds")
        data.pop("released", None)
    assert release == its


@pytest.mark.parametrize("kind", ["folder", "fsspec"])
def test_the_release_and_the_fold_are_those_of_reports_in_the_store(
    stage: Stage, kind: str, address: Path, tmp_path: Path
) -> None:
    to = address if kind == "folder" else f"memory://{tmp_path.name}"
    study = collect(stage)
    before = tally(stage, study)
    work(stage.start(lake=str(to)))  # while devices still send: two rows fill a partition
    rows = execute(str(stage.path), "SELECT file, records, count FROM sealed ORDER BY number")
    assert [row[1:] for row in rows] == [(22, 22), (22, 22)]
    assert_alike(before, tally(stage, study))
    finish(stage, study, to)
    assert_sound(stage, study, before, to)
    ((size,),) = execute(str(stage.path), "SELECT SUM(LENGTH(data)) FROM sealed")
    assert size < 2 * 300  # the names of two files
    assert execute(str(stage.path), "SELECT COUNT(*) FROM seen") == [(0,)]
    assert not check(stage.path).problems
    exported = export(stage.store, study.id, tmp_path / "exported").count()
    assert_alike(before, exported[0][1])


def killing(name: str, at: int, when: str, calls: Counter[str]) -> Callable[..., Any]:
    """Wrap a function so that its call number `at` is the last thing that its process does."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            if calls[name] == at and when == "before":
                raise Killed
            result = function(*arguments, **options)
            if calls[name] == at:
                raise Killed
            return result

        return called

    return wrap


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Transaction, "plan_file"), (lake, "write_partition"), (Transaction, "move_to_file")],
)
def test_a_worker_killed_on_the_way_loses_and_doubles_nothing(
    stage: Stage,
    address: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at: int,
    when: str,
) -> None:
    study, calls = collect(stage), Counter[str]()
    before = tally(stage, study)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing(name, at, when, calls)(getattr(owner, name)))
        with pytest.raises(Killed):
            work(stage.start(lake=str(address)))
    assert_alike(before, tally(stage, study))  # nothing is counted from the file alone
    finish(stage, study, address)
    assert_sound(stage, study, before, address)
    assert not list(address.rglob("*00002*"))  # no file of rows that another one has


def test_a_second_worker_that_has_moved_them_is_noticed(stage: Stage) -> None:
    study = collect(stage)
    with stage.store.reading() as tx:
        (task,) = tx.tasks(study.id)
    with pytest.raises(Exception, match="another worker"), stage.store.transaction() as tx:
        tx.move_to_file(task.id, "lake/x/task-0/00000.parquet", 22)


def test_a_study_with_a_missing_file_is_not_released_and_the_file_is_named(
    stage: Stage, address: Path
) -> None:
    study = collect(stage)
    work(stage.start(lake=str(address)))
    file = address / study.id / "task-0" / "00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:-30])
    studies.close(stage.store, study.id)
    worker = stage.start(lake=str(address))
    worker.step()
    worker.step()
    with stage.store.reading() as tx:
        assert "00001.parquet" in tx.faults()[study.id].problem
    assert stage.state(study)["state"] == "closing"
    (problem,) = check(stage.path).problems
    assert "00001.parquet" in problem
    file.write_bytes(content)
    stage.clock.advance(3_600)
    work(worker)
    assert stage.release(study).cost.devices == REPORTS


def test_a_full_disk_is_a_fault_and_leaves_the_records_in_the_store(
    stage: Stage, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = collect(stage)
    before = tally(stage, study)

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("lake cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.write_table", fail)
        stage.start(lake=str(address)).step()
    assert stage.state(study)["fault"]["problem"].endswith("No space left on device")
    stage.clock.advance(3_600)
    finish(stage, study, address)
    assert_sound(stage, study, before, address)


def test_files_are_deleted_with_the_data_of_their_study(stage: Stage, address: Path) -> None:
    study = collect(stage)
    finish(stage, study, address)
    assert (address / study.id / lake.LIST).exists()
    worker = stage.start(lake=str(address), retention_days=1)
    worker.step()
    assert (address / study.id).exists()
    stage.clock.advance(2 * 86_400)
    worker.step()
    assert not (address / study.id).exists()
    with stage.store.reading() as tx:
        assert tx.sealed_count(tx.tasks(study.id)[0].id) == 0
    assert re.fullmatch("[0-9a-f]{32}", study.id)  # so that no name can lead elsewhere

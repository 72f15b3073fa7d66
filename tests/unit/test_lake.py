"""Exported reports: the collector's own tally, from whole data sets only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from collecting import Stage, open_task, upload, word, work
from sfumato import lake
from sfumato.cli.main import main
from sfumato.collector import studies
from sfumato.collector.export import export
from sfumato.collector.store.store import StudyRow
from sfumato.engines import LocalEngine
from sfumato.errors import DataError, MismatchError, StudyError
from sfumato.flow.accumulator import RecordBatch, records_of
from sfumato.flow.report import HEADER_BYTES

LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0}
REPORTS = 40
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "scale.md"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "collector.db")
    yield stage
    stage.store.close()


@pytest.fixture
def study(stage: Stage) -> StudyRow:
    """A released study whose reports were sealed in four parts; some came twice."""
    study = stage.create(**LOCAL, algorithm="hashed", devices=1_000)
    task = open_task(stage.store, study)
    for start in range(0, REPORTS, 10):
        reports = stage.answer(study, *range(start, start + 10))
        assert upload(stage.store, task, reports[:3])
        stage.start(seal_seconds=0.0).step()
    stage.finish(study)
    return study


@pytest.fixture
def folder(stage: Stage, study: StudyRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its export, in partitions of twenty records."""
    monkeypatch.setattr(lake, "_MOST_RECORDS", 20)
    export(stage.store, study.id, tmp_path / "lake")
    return tmp_path / "lake"


def tallies_of(stage: Stage, study: StudyRow) -> list[RecordBatch]:
    """The collector's own tallies."""
    with stage.store.reading() as tx:
        tasks = [studies.task_of(row) for row in tx.tasks(study.id)]
        batches = [studies.answer_of(tx, task) for task in tasks]
    return [batch for batch in batches if isinstance(batch, RecordBatch)]


def assert_same(ours: RecordBatch, theirs: RecordBatch) -> None:
    assert (ours.task_id, ours.count, ours.records) == (
        theirs.task_id,
        theirs.count,
        theirs.records,
    )
    for mine, its in zip(ours.tallies, theirs.tallies, strict=True):
        assert mine.cells.dtype == its.cells.dtype
        assert np.array_equal(mine.cells, its.cells)
        assert np.array_equal(mine.row_counts, its.row_counts)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shard", [1, 1_000])
def test_the_tally_is_the_collectors_own(
    stage: Stage,
    study: StudyRow,
    folder: Path,
    workers: int,
    shard: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With any number of workers and tallies; a report that came twice counts once."""
    monkeypatch.setattr(lake, "_SHARD_RECORDS", shard)
    ((_, batch),) = lake.Reports.read(folder).count(engine=LocalEngine(workers))
    (its,) = tallies_of(stage, study)
    assert batch.count == REPORTS
    assert_same(batch, its)


def test_the_release_is_the_collectors_own(stage: Stage, study: StudyRow, folder: Path) -> None:
    """Except for the day and the seconds."""
    release, its = lake.fold(folder).to_dict(), stage.release(study).to_dict()
    for data in (release, its):
        data["cost"].pop("seconds")
        data.pop("released", None)
    assert release == its


def assert_folds_alike(stage: Stage, study: StudyRow, address: Path) -> None:
    reports = export(stage.store, study.name, address)
    theirs = tallies_of(stage, study)
    assert len(theirs) == len(reports.tasks)
    for (_, batch), its in zip(reports.count(), theirs, strict=True):
        assert_same(batch, its)


def test_rounds_fold_as_well(stage: Stage, tmp_path: Path) -> None:
    study = stage.create(**LOCAL, rounds=2, devices=20)
    for _ in range(2):
        stage.answer(study, *range(10))
        work(stage.start(seal_seconds=0.0))
    assert len(stage.state(study)["tasks"]) == 2
    assert_folds_alike(stage, study, tmp_path / "lake")


@pytest.mark.slow
def test_words_fold_as_well(stage: Stage, tmp_path: Path) -> None:
    study = stage.create(
        question="new_words", items=None, trust="local", epsilon=8.0, devices=1_000
    )
    task = open_task(stage.store, study)
    assert upload(stage.store, task, [word(task, "fern", rng=stage.rng) for _ in range(200)])
    stage.finish(study)
    assert_folds_alike(stage, study, tmp_path / "lake")


def test_an_export_has_no_ids_no_times_and_another_order(stage: Stage, tmp_path: Path) -> None:
    """Records that were sealed together are not beside each other. False alarm below 1e-8: ten
    given places of fifty have the ten records of one sealing."""
    study = stage.create(**LOCAL, items=[f"w{k}" for k in range(2_000)], devices=10_000)
    task, reports = open_task(stage.store, study), list[bytes]()
    for start in range(0, 50, 10):
        reports += stage.answer(study, *range(start, start + 10))
        stage.start(seal_seconds=0.0).step()
    stage.finish(study)
    export(stage.store, study.id, tmp_path / "lake")
    (path,) = (tmp_path / "lake" / "task-0").iterdir()
    column = pq.read_table(path).column("record").to_pylist()
    assert sorted(column) == sorted(report[HEADER_BYTES:] for report in reports)
    sealed = [record.as_py() for data in stage.sealed(task) for record in records_of(data)]
    assert sorted(sealed) == sorted(column)
    parts = [set(sealed[start : start + 10]) for start in range(0, 50, 10)]
    assert len(parts) == len(stage.sealed(task))
    assert not any(set(column[start : start + 10]) in parts for start in range(0, 50, 10))
    for file in (tmp_path / "lake").rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not any(report[33:49] in content for report in reports)
        assert str(int(stage.clock())).encode() not in content
    assert (tmp_path / "lake").stat().st_mode & 0o077 == 0


def sql() -> list[str]:
    """The queries of the guide."""
    return re.findall(r"^```sql\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("algorithm", ["hashed", "hadamard", "direct"])
def test_the_guides_sql_gives_the_same_tally(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(lake, "_MOST_RECORDS", 10)
    study = stage.create(**LOCAL, algorithm=algorithm, devices=1_000)
    for start in range(0, 60, 20):
        stage.answer(study, *range(start, start + 20))
        stage.start(seal_seconds=0.0).step()
    stage.finish(study)
    export(stage.store, study.id, tmp_path / "lake")
    (batch,) = tallies_of(stage, study)
    tally = batch.tallies[0]
    query, signed = sql()
    if algorithm == "hadamard":
        query = query[: query.rindex("SELECT")] + signed
    width = tally.cells.shape[1]
    query = query.replace("lake/task-0", f"{tmp_path}/lake/task-0").replace("64", str(width))
    cells = np.zeros_like(tally.cells)
    for row, cell, records in duckdb.connect().execute(query).fetchall():
        cells[row, cell] = records
    assert np.array_equal(cells, tally.cells)
    assert tally.cells.any()


def test_the_command_line_exports_and_folds(stage: Stage, study: StudyRow, tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(main, [*words, "--json"])

    done = run("export", study.name, "--to", f"{tmp_path}/out", "--store", str(stage.path))
    assert json.loads(done.stdout) == {
        "wrote": f"{tmp_path}/out",
        "reports": REPORTS,
        "records": REPORTS,
        "partitions": 1,
    }
    its = stage.release(study)
    release = json.loads(run("fold", f"{tmp_path}/out", "--workers", "1").stdout)
    assert release["estimates"] == its.frame().to_pylist()
    assert release["privacy"] == its.privacy.to_dict()
    assert run("fold", f"{tmp_path}/missing").exit_code == 2
    assert run("fold", f"{tmp_path}/out", "--scheduler", "tcp://127.0.0.1:1").exit_code == 2


# What is refused


def test_a_study_is_exported_only_if_it_is_local_and_has_ended(
    stage: Stage, study: StudyRow, tmp_path: Path
) -> None:
    central = stage.create("Central")
    with pytest.raises(StudyError, match="keeps sums"):
        export(stage.store, central.id, tmp_path / "a")
    active = stage.create("Active", **LOCAL)
    with pytest.raises(StudyError, match="must have ended"):
        export(stage.store, active.id, tmp_path / "a")
    studies.delete(stage.store, study.id)
    with pytest.raises(StudyError, match=f"has 0 of {REPORTS}"):
        export(stage.store, study.id, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_export_overwrites_nothing(stage: Stage, study: StudyRow, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    with pytest.raises(DataError, match="has files already"):
        export(stage.store, study.id, folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*.*")}


def test_an_export_that_fails_leaves_nothing(
    stage: Stage, study: StudyRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lake, "_list", fail)
    with pytest.raises(KeyboardInterrupt):
        export(stage.store, study.id, tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


def cut(path: Path, folder: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def lose(path: Path, folder: Path) -> None:
    path.unlink()


def copy_another(path: Path, folder: Path) -> None:
    """A partition that would be counted twice."""
    shutil.copy(path.with_name("00000.parquet"), path)


def describe(path: Path, **about: Any) -> None:
    """Say something else about a partition."""
    table = pq.read_table(path)
    old = json.loads(table.schema.metadata[b"sfumato"])
    pq.write_table(table.replace_schema_metadata({"sfumato": json.dumps(old | about)}), path)


def name_another_task(path: Path, folder: Path) -> None:
    describe(path, task="0" * 64)


def name_a_later_version(path: Path, folder: Path) -> None:
    describe(path, version=2)


def name_another_export(path: Path, folder: Path) -> None:
    describe(path, export="0" * 32)


def drop_a_record(path: Path, folder: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def widen(path: Path, folder: Path) -> None:
    table = pq.read_table(path)
    wide = pa.array([record.as_py() + b"\0" for record in table.column("record")])
    wide = wide.cast(pa.binary(len(wide[0].as_py())))
    pq.write_table(pa.table({"record": wide}, metadata=table.schema.metadata), path)


def write_text(path: Path, folder: Path) -> None:
    pq.write_table(pa.table({"record": ["oak"]}), path)


@pytest.mark.parametrize(
    "harm",
    [
        cut,
        lose,
        copy_another,
        name_another_task,
        name_a_later_version,
        name_another_export,
        drop_a_record,
        widen,
        write_text,
    ],
)
def test_a_bad_partition_is_named_before_anything_is_counted(
    folder: Path, harm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(folder / "task-0" / "00001.parquet", folder)
    monkeypatch.setattr(lake.Source, "count", None)
    with pytest.raises(DataError, match=r"00001\.parquet"):
        lake.fold(folder)


def test_a_changed_byte_is_named_and_gives_no_result(folder: Path) -> None:
    path = folder / "task-0" / "00001.parquet"
    record = pq.read_table(path).column("record")[3].as_py()
    content = path.read_bytes()
    at = content.index(record)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(DataError, match=r"00001\.parquet"):
        lake.fold(folder)


def test_a_data_set_without_its_list_or_of_another_version_is_refused(folder: Path) -> None:
    path = folder / "study.json"
    data = json.loads(path.read_text())
    for wrong, message in [
        (data | {"version": 2}, "version 1; got 2"),
        ({"item": "oak"}, "must be the list"),
        (data | {"tasks": [{"id": "0" * 64, "partitions": []}]}, "does not ask task"),
        ({name: value for name, value in data.items() if name != "design"}, "is damaged"),
    ]:
        path.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=message):
            lake.fold(folder)
    path.unlink()
    with pytest.raises(DataError, match=r"study\.json cannot be read"):
        lake.fold(folder)


def test_a_dictionary_of_another_export_is_refused(folder: Path) -> None:
    describe(folder / "dictionary.parquet", export="0" * 32)
    with pytest.raises(DataError, match=r"dictionary\.parquet must be of the export"):
        lake.fold(folder)


# Elsewhere


def test_any_file_system_will_do(stage: Stage, study: StudyRow, tmp_path: Path) -> None:
    for address in ("memory://lake/trees", f"file://{tmp_path}/with space"):
        reports = export(stage.store, study.id, address)
        ((_, batch),) = lake.Reports.read(address).count()
        assert_same(batch, tallies_of(stage, study)[0])
        assert reports.totals()["reports"] == REPORTS
        with pytest.raises(DataError, match="has files already"):
            export(stage.store, study.id, address)


def test_batches_add_if_they_are_of_one_task(stage: Stage, study: StudyRow) -> None:
    (batch,) = tallies_of(stage, study)
    twice = batch + batch
    assert (twice.count, twice.records) == (2 * batch.count, 2 * batch.records)
    assert np.array_equal(twice.tallies[0].cells, 2 * batch.tallies[0].cells)
    with pytest.raises(MismatchError, match="different tasks"):
        batch + replace(batch, task_id="0" * 64)

"""Faults and damage: a study survives errors of any kind, and nothing damaged is released."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks import SEED
from collecting import Stage, entries_of, work
from databases import dialect_of, execute
from failing import MOST_STEPS, FailingStore, Kill, Trouble, release_in_spite_of_errors
from marks import quick
from masking import PHASE_SECONDS, Masking, devices, go, masking, parts
from serving import KEY, TASK, ask, body, opened, served, settings
from sfumato.collector import studies
from sfumato.collector.check import check
from sfumato.collector.http.service import Service
from sfumato.collector.store.store import Store, StudyRow
from sfumato.collector.worker.rounds import RoundLimits
from sfumato.collector.worker.worker import LONGEST_PAUSE_SECONDS, Worker
from sfumato.device import Http, RoundClient, RoundOutcome
from sfumato.errors import StoreDamaged, StoreError

RUNS = 100
COHORT = 12  # devices in a masked round
PAGE_BYTES = 4096  # of an SQLite file


@pytest.mark.parametrize("run", quick(range(RUNS), 0))
def test_each_study_is_released_and_charged_once_by_a_worker_that_fails_and_is_killed(
    run: int, tmp_path: Path
) -> None:
    """Five steps of six fail at a random call, one of five of those by a kill."""
    chance = random.Random(f"{SEED} faults {run}")
    assert release_in_spite_of_errors(tmp_path / "collector.db", chance, kills=True) > 0


@contextmanager
def masked_round(folder: Path) -> Iterator[tuple[Masking, StudyRow, list[RoundClient]]]:
    """A study with a masked round, and devices that are about to join it."""
    with masking(folder) as stage:
        study = stage.create(COHORT)
        with devices(stage, COHORT) as fleet:
            yield stage, study, parts(fleet, stage.clock)


@pytest.mark.parametrize("run", quick(range(20), 0))
def test_a_masked_round_is_released_and_charged_once_by_a_worker_that_fails_and_is_killed(
    run: int, tmp_path: Path
) -> None:
    trouble = Trouble(random.Random(f"{SEED} masked faults {run}"), kills=True)
    with masked_round(tmp_path) as (stage, study, members):

        def start() -> tuple[FailingStore, Worker]:
            store = FailingStore.open(stage.collector.service.settings.store, now=stage.clock)
            store.trouble = trouble
            limits = RoundLimits(phase_seconds=PHASE_SECONDS)
            options: dict[str, Any] = {"log": lambda event, **fields: None, "limits": limits}
            key = stage.collector.key
            return store, Worker(store, key=key, now=stage.clock, **options)

        store, worker = start()
        with Http(stage.collector.address) as send:
            for _ in range(MOST_STEPS):
                for part in members:
                    go(part, send)
                trouble.begin()
                try:
                    with suppress(Exception):  # as the worker's thread does
                        worker.step()
                except Kill:
                    store.close()
                    store, worker = start()
                trouble.end()
                stage.clock.advance(LONGEST_PAUSE_SECONDS)
                if stage.state(study)["state"] == "released":
                    break
            for part in members:
                go(part, send)
        store.close()
        assert trouble.errors > 0
        assert [part.outcome for part in members] == [RoundOutcome.DONE] * COHORT
        assert stage.release(study).counts.tolist() == [1.0] * COHORT
        assert stage.charges() == 1


def test_it_is_the_same_on_every_database(store_url: str) -> None:
    chance = random.Random(f"{SEED} faults on every database")
    assert release_in_spite_of_errors(store_url, chance, kills=True) > 0


# Damage


def close_with_reports(stage: Stage, name: str, **keys: Any) -> StudyRow:
    study = stage.create(name, **keys)
    stage.answer(study, *range(20))
    studies.close(stage.store, study.id)
    return study


def damage(url: str, table: str, column: str, where: str = "true") -> None:
    """Change two bytes of one row, past the store and its triggers."""
    kind = "TEXT" if table == "release" else "BLOB"
    for trigger in (f"no_UPDATE_of_{table}", f"no_change_of_{table}"):
        with suppress(StoreError):
            execute(url, dialect_of(url).drop_trigger.format(trigger=trigger, table=table))
    ((data,),) = execute(url, f"SELECT {column} FROM {table} WHERE {where}")  # noqa: S608
    text = data.encode() if kind == "TEXT" else bytes(data)
    middle = len(text) // 2
    changed = text[:middle] + bytes(byte ^ 1 for byte in text[middle : middle + 2])
    changed += text[middle + 2 :]
    value: Any = changed.decode() if kind == "TEXT" else changed
    execute(url, f"UPDATE {table} SET {column} = ? WHERE {where}", value)  # noqa: S608


@pytest.fixture
def stage(store_url: str) -> Iterator[Stage]:
    stage = Stage(store_url)
    yield stage
    stage.store.close()


def task_number(stage: Stage, study: StudyRow) -> int:
    (task,) = execute(str(stage.path), "SELECT task FROM task WHERE study_id = ?", study.id)[0]
    return int(task)


@pytest.mark.parametrize("keys", [{}, {"trust": "local", "epsilon": 4.0}])
def test_two_changed_bytes_in_a_sealed_row_stop_their_study_alone(
    stage: Stage, keys: dict[str, Any]
) -> None:
    bad, good = close_with_reports(stage, "bad", **keys), close_with_reports(stage, "good", **keys)
    stage.worker.step()  # seals both
    assert check(str(stage.path)).problems == ()
    damage(str(stage.path), "sealed", "data", f"task = {task_number(stage, bad)}")
    work(stage.worker)
    assert [stage.state(row)["state"] for row in (bad, good)] == ["closing", "released"]
    assert "is damaged" in stage.state(bad)["fault"]["problem"]
    (problem,) = check(str(stage.path)).problems
    assert problem.startswith("study 'bad': sealed ")
    for _ in range(5):
        stage.clock.advance(LONGEST_PAUSE_SECONDS)
        work(stage.worker)
    assert stage.state(bad)["state"] == "closing"
    assert stage.state(bad)["fault"]["tries"] == 6
    damage(
        str(stage.path), "sealed", "data", f"task = {task_number(stage, bad)}"
    )  # changes it back
    studies.retry(stage.store, bad.id)
    work(stage.worker)
    assert stage.state(bad)["state"] == "released"


def test_without_a_digest_the_same_damage_is_released(stage: Stage) -> None:
    """The negative control; such rows were stored by a version without digests."""
    study = close_with_reports(stage, "bad", algorithm="one_hot")
    stage.worker.step()
    execute(str(stage.path), "UPDATE sealed SET digest = NULL")
    assert check(str(stage.path)).without_digest == 1
    damage(str(stage.path), "sealed", "data")
    work(stage.worker)
    assert stage.release(study).counts.sum() != 20
    assert check(str(stage.path)).problems == ()


def test_a_changed_count_of_reports_stops_the_study(stage: Stage) -> None:
    study = close_with_reports(stage, "bad")
    stage.worker.step()
    execute(str(stage.path), "UPDATE sealed SET count = 19")
    work(stage.worker)
    assert stage.state(study)["fault"] is not None
    assert len(check(str(stage.path)).problems) == 2


@pytest.mark.parametrize(("table", "column"), [("answer", "data"), ("dictionary", "body")])
def test_other_damage_stops_the_study(stage: Stage, table: str, column: str) -> None:
    study = close_with_reports(stage, "bad", epsilon=1.0, delta=1e-6)
    stage.worker.step()
    if table == "answer":
        stage.worker.step()
    damage(str(stage.path), table, column)
    work(stage.worker)
    assert stage.state(study)["state"] == "closing"
    assert stage.state(study)["fault"] is not None
    assert any("'bad'" in problem for problem in check(str(stage.path)).problems)


def test_a_task_with_another_scale_of_noise_is_not_released(stage: Stage) -> None:
    study = close_with_reports(stage, "bad", epsilon=1.0, delta=1e-6)
    stage.worker.step()
    execute(str(stage.path), "UPDATE task SET spec = REPLACE(spec, '\"scale\":1', '\"scale\":0')")
    work(stage.worker)
    assert "is damaged" in stage.state(study)["fault"]["problem"]
    assert entries_of(stage.store) == []
    assert any("'bad'" in problem for problem in check(str(stage.path)).problems)


def test_a_damaged_release_is_not_shown(stage: Stage) -> None:
    study = close_with_reports(stage, "bad")
    work(stage.worker)
    damage(str(stage.path), "release", "data")
    with stage.store.reading() as tx, pytest.raises(StoreDamaged, match="release of study"):
        tx.release(study.id)
    (problem,) = check(str(stage.path)).problems
    assert problem.startswith("study 'bad': release ")


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("UPDATE entry SET cohort = 'another'", "names another campaign or cohort"),
        ("UPDATE entry SET task = 'another'", "no study has the charged task"),
        ("DELETE FROM entry", "was opened 1 times and charged 0 times"),
        (
            "INSERT INTO entry (campaign, cohort, task, loss)"
            " SELECT campaign, cohort, task, loss FROM entry",
            "was charged 2 times",
        ),
        (
            "UPDATE entry SET loss = REPLACE(loss, '\"scale\":1', '\"scale\":2')",
            "not that of its design",
        ),
        ("UPDATE entry SET loss = 'x'", "cannot be read"),
        ("UPDATE counter SET count = count + 1", "its answer is of 20"),
    ],
)
def test_a_ledger_that_does_not_fit_the_studies_is_noticed(
    stage: Stage, sql: str, reason: str
) -> None:
    close_with_reports(stage, "noised", epsilon=1.0, delta=1e-6)
    work(stage.worker)
    assert check(str(stage.path)).problems == ()
    for verb in ("UPDATE", "DELETE", "change"):
        with suppress(StoreError):
            drop = dialect_of(str(stage.path)).drop_trigger
            execute(str(stage.path), drop.format(trigger=f"no_{verb}_of_entry", table="entry"))
    execute(str(stage.path), sql)
    assert any(reason in problem for problem in check(str(stage.path)).problems)


def test_a_damaged_page_of_a_file_is_named_by_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/collector.db"
    stage = Stage(url)
    close_with_reports(stage, "bad")
    work(stage.worker)
    assert stage.store.scrub()
    stage.store.close()
    path = tmp_path / "collector.db"
    pages = bytearray(path.read_bytes())
    assert check(url).problems == ()
    root = execute(url, "SELECT rootpage FROM sqlite_schema WHERE name = 'sealed'")[0][0]
    pages[(root - 1) * PAGE_BYTES : (root - 1) * PAGE_BYTES + 8] = b"\xff" * 8
    path.write_bytes(pages)
    assert any(problem.startswith("the database") for problem in check(url).problems)


@pytest.mark.parametrize(("table", "column"), [("round", "checkpoint"), ("round_message", "body")])
def test_a_damaged_masked_round_is_aborted_and_not_released(
    tmp_path: Path, table: str, column: str
) -> None:
    """A masked table or the sum of some was changed: the sum that is opened would be another."""
    with masked_round(tmp_path) as (stage, study, members):
        url = stage.collector.service.settings.store
        with Http(stage.collector.address) as send:
            for _ in range(3):
                for part in members:
                    go(part, send, until="mask")
                stage.work()
            for part in members:
                go(part, send)
        if table == "round":
            stage.worker.step()  # adds all tables
            damage(url, table, column)
            stage.restart()
        else:
            damage(url, table, column, "phase = 'mask' AND member = 3")
        stage.work()
        state = stage.state(study)
        ((aborted,),) = [task["rounds"] for task in state["tasks"]]
        assert aborted["phase"] == "aborted"
        assert "is damaged" in aborted["problem"]
        assert (state["state"], state["counted"], stage.charges()) == ("collecting", 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        "spec = REPLACE(spec, '{', '[')",
        "spec = REPLACE(spec, '\"kind\"', '\"king\"')",
        "envelope = REPLACE(envelope, '{', '[')",
    ],
)
def test_a_damaged_task_does_not_shut_out_the_devices_of_others(
    tmp_path: Path, change: str
) -> None:
    """Its own devices keep their reports and try later: the task is not closed."""
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    other = replace(TASK, cohort="others")
    bad, _ = opened(store, name="bad"), opened(store, name="good", task=other)
    where = f" WHERE study_id = '{bad}'"
    execute(str(tmp_path / "collector.db"), f"UPDATE task SET {change}{where}")  # noqa: S608
    with closing(store), served(Service(store, settings(tmp_path), key=KEY)) as address:
        offers = ask(address, "GET", "/v1/offers")
        answers = [
            ask(address, "POST", f"/v1/tasks/{task.id}/reports", body(1, task))
            for task in (other, TASK)
        ]
    assert [json.loads(each["offer"])["study"] for each in offers.json()["offers"]] == ["good"]
    assert [answer.status for answer in answers] == [201, 503]

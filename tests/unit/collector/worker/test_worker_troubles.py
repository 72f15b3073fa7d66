"""The worker after errors, and the data that it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collecting import ITEMS, Stage, entries_of, open_task, upload, work
from sfumato.collector import studies
from sfumato.collector.store.ledger import set_budget
from sfumato.collector.worker import worker
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import StoreError, StoreUnavailable
from sfumato.flow.accumulator import TallyAccumulator
from sfumato.flow.admission import first_of_each
from sfumato.privacy import Budget

LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0}
NOISED: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
ROUNDS: dict[str, Any] = {"rounds": 2, "publish": "rounds"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "collector.db")
    yield stage
    stage.store.close()


@pytest.mark.parametrize("keys", [{}, NOISED, LOCAL, {"question": "new_words", **LOCAL}])
def test_a_study_without_reports_fails_and_says_so(stage: Stage, keys: dict[str, Any]) -> None:
    study = stage.create(**keys)
    studies.close(stage.store, study.id)
    work(stage.worker)
    state = stage.state(study)
    assert state["state"] == "failed"
    assert "no device answered" in state["problem"] or "too few" in state["problem"]
    assert entries_of(stage.store) == []


def test_a_refused_charge_opens_nothing(stage: Stage) -> None:
    """Two studies fit the budget when they are made, and one when they are released."""
    set_budget(stage.store, Budget(epsilon=1.0, delta=1e-6))
    rows = [stage.create(f"study {k}", **NOISED) for k in range(2)]
    for row in rows:
        stage.answer(row, 0, 1)
        studies.close(stage.store, row.id)
    work(stage.worker)
    assert [stage.state(row)["state"] for row in rows] == ["released", "failed"]
    assert "is refused" in stage.state(rows[1])["problem"]
    assert len(entries_of(stage.store)) == 1
    with stage.store.reading() as tx:
        assert tx.answer_rows(rows[1].id) == []
        assert tx.release(rows[1].id) is None


def test_a_poisoned_study_waits_alone_and_shows_no_payload(stage: Stage) -> None:
    bad, good = stage.create("bad", **LOCAL), stage.create("good", **LOCAL)
    task = open_task(stage.store, bad)
    with stage.store.transaction() as tx:
        tx.insert_uploads([(task.id, 1, b"\x05\x00\x00\x00canary is not a report")])
    stage.answer(good, 0)
    for row in (bad, good):
        studies.close(stage.store, row.id)
    work(stage.worker)
    assert [stage.state(row)["state"] for row in (bad, good)] == ["closing", "released"]
    assert stage.state(bad)["fault"] is not None
    assert not upload(stage.store, task, [b"x"])
    assert "canary" not in json.dumps([stage.state(bad), stage.events])
    assert ("study-failing", bad.id) in [
        (event, fields["study_id"]) for event, fields in stage.events
    ]


def test_an_error_that_is_not_ours_is_reported_by_its_type(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> bytes:
        raise ZeroDivisionError("canary")

    study = stage.create(**LOCAL)
    stage.answer(study, 0)
    studies.close(stage.store, study.id)
    monkeypatch.setattr(TallyAccumulator, "seal", fail)
    work(stage.worker)
    assert stage.state(study)["fault"]["problem"] == "internal error: ZeroDivisionError"
    assert "canary" not in json.dumps(stage.events)


def test_damaged_records_are_an_error_of_ours(stage: Stage) -> None:
    study = stage.create(**LOCAL)
    task = open_task(stage.store, study)
    with stage.store.transaction() as tx:
        tx.add_sealed(task.id, b"not Parquet", 1)
    studies.close(stage.store, study.id)
    work(stage.worker)
    assert "damaged" in stage.state(study)["fault"]["problem"]


def test_a_store_in_trouble_is_for_the_caller(stage: Stage) -> None:
    stage.create()
    stage.store.close()
    with pytest.raises(StoreError):
        stage.worker.step()


def test_missing_uploads_are_retried_and_do_no_harm(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study deleted between reading its uploads and sealing them keeps nothing."""
    study = stage.create(**LOCAL)
    task = open_task(stage.store, study)
    stage.answer(study, 0)
    studies.close(stage.store, study.id)
    read = first_of_each

    def meanwhile(bodies: Any) -> dict[bytes, bytes]:
        studies.delete(stage.store, study.id)
        return read(bodies)

    monkeypatch.setattr(worker, "first_of_each", meanwhile)
    with pytest.raises(StoreUnavailable):
        stage.worker.step()
    work(stage.worker)
    assert stage.sealed(task) == []
    assert stage.state(study)["state"] == "deleted"


@pytest.mark.parametrize("days", [0, 29, 30])
def test_what_devices_sent_is_dropped_when_it_was_kept_long_enough(stage: Stage, days: int) -> None:
    study = stage.create(**LOCAL)
    task = open_task(stage.store, study)
    stage.answer(study, 0)
    release = stage.finish(study)
    stage.clock.advance(days * DAY_SECONDS)
    worker = stage.start(retention_days=30)
    assert not worker.step()
    assert not worker.step()
    assert (stage.sealed(task) == []) == (days >= 30)
    assert stage.release(study).to_dict() == release.to_dict()
    assert stage.state(study)["counted"] == 1


def test_without_retention_everything_stays(stage: Stage) -> None:
    study = stage.create(**LOCAL)
    task = open_task(stage.store, study)
    stage.answer(study, 0)
    stage.finish(study)
    stage.clock.advance(10_000 * DAY_SECONDS)
    work(stage.start())
    assert len(stage.sealed(task)) == 1


@pytest.mark.parametrize("count", [1, 99, 100, 150])
def test_the_log_counts_reports_of_many_and_nothing_of_few(stage: Stage, count: int) -> None:
    """A line has a time, and must not reveal when a report arrived."""
    study = stage.create(devices=200, **LOCAL)
    stage.answer(study, *(number % len(ITEMS) for number in range(count)))
    stage.finish(study)
    expected = {"count": count} if count >= 100 else {}
    of_task = ["sealed"] * (count >= 100) + ["task-done"]
    assert [event for event, _ in stage.events] == [*of_task, "study-released"]
    for event, fields in stage.events[:-1]:
        assert fields.keys() - {"count"} == {"study_id", "task_id"}, event
        assert {name: value for name, value in fields.items() if name == "count"} == expected


def test_a_task_of_few_that_closes_by_itself_is_not_counted_in_the_log(stage: Stage) -> None:
    study = stage.create(devices=2)
    stage.answer(study, 0, 1)
    work(stage.worker)
    assert [event for event, _ in stage.events] == ["task-closing", "task-done", "study-released"]
    assert not any("count" in fields for _, fields in stage.events)

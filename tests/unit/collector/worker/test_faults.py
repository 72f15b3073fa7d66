"""Faults of one study: it is tried again, the others go on, and nothing is paid or drawn twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from collecting import Stage, entries_of, work
from databases import execute
from failing import check_once, release_in_spite_of_errors
from sfumato.collector import studies
from sfumato.collector.problems import Problem
from sfumato.collector.store.ledger import set_budget
from sfumato.collector.store.store import Store, StudyRow
from sfumato.collector.worker.worker import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    release_of,
)
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import StoreError, StoreUnavailable
from sfumato.flow.accumulator import SparseAccumulator
from sfumato.privacy import Budget
from sfumato.questions.frequencies.design import FrequencyDesign

LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0}
NOISED: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
ROUNDS: dict[str, Any] = {"rounds": 2, "publish": "rounds"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "collector.db")
    yield stage
    stage.store.close()


def closing_study(stage: Stage, name: str = "Street trees", **keys: Any) -> StudyRow:
    """A study with four reports that takes no more."""
    study = stage.create(name, **keys)
    stage.answer(study, 0, 1, 1, 2)
    studies.close(stage.store, study.id)
    return study


def fail_with(problem: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise problem

    return fail


def answers(stage: Stage, study: StudyRow) -> list[tuple[str, bytes, int]]:
    with stage.store.reading() as tx:
        return [(row.owner, row.check(), row.count) for row in tx.answer_rows(study.id)]


@pytest.mark.parametrize(
    "problem", [MemoryError(), RuntimeError("canary"), OSError(28, "canary"), StoreError("canary")]
)
def test_a_study_survives_an_error_and_is_released_when_it_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    bad, good = closing_study(stage, "bad", **NOISED), closing_study(stage, "good", **LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr(SparseAccumulator, "seal", fail_with(problem))
        work(stage.worker)
        state = stage.state(bad)
        assert (state["state"], state["problem"]) == ("closing", "")
        assert state["fault"]["problem"] == f"internal error: {type(problem).__name__}"
        assert "canary" not in str([state, stage.state(good)])
        assert stage.state(good)["state"] == "released"
        assert stage.state(good)["fault"] is None
    stage.clock.advance(FIRST_PAUSE_SECONDS + 1)
    work(stage.worker)
    assert stage.state(bad)["state"] == "released"
    assert stage.state(bad)["fault"] is None
    assert len(entries_of(stage.store)) == 1


def test_pauses_double_up_to_the_longest_and_start_anew_after_a_success(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, tries, pauses = closing_study(stage, **LOCAL), 14, []
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(MemoryError()))
        for number in range(1, tries + 1):
            work(stage.worker)
            fault = stage.state(study)["fault"]
            assert fault["tries"] == number
            pauses.append(fault["next_try"] - stage.clock())
            stage.clock.seconds = fault["next_try"] - 1.0
            assert not stage.worker.step()
            assert stage.state(study)["fault"] == fault, "it was tried during the pause"
            stage.clock.seconds = fault["next_try"]
    assert pauses == [min(FIRST_PAUSE_SECONDS << k, LONGEST_PAUSE_SECONDS) for k in range(tries)]
    assert stage.worker.step()  # seals
    assert stage.state(study)["fault"] is None


def test_a_fault_is_still_known_after_a_restart(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = closing_study(stage, **LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(MemoryError()))
        work(stage.worker)
    fault, worker = stage.state(study)["fault"], stage.start()
    assert not worker.step()
    assert stage.state(study)["fault"] == fault
    stage.clock.seconds = fault["next_try"]
    work(worker)
    assert stage.state(study)["state"] == "released"


def test_a_clock_that_was_set_back_does_not_lengthen_a_pause(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = closing_study(stage, **LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(MemoryError()))
        work(stage.worker)
    stage.clock.advance(-10 * DAY_SECONDS)
    work(stage.worker)
    assert stage.state(study)["state"] == "released"


def test_an_error_of_the_store_is_for_the_caller_and_no_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = closing_study(stage, **LOCAL)
    problem = StoreUnavailable("it cannot be reached")
    monkeypatch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(problem))
    with pytest.raises(StoreUnavailable):
        stage.worker.step()
    assert stage.state(study)["fault"] is None


def test_a_worker_whose_connection_failed_notes_the_fault_when_it_has_the_lock_again(
    stage: Stage,
) -> None:
    """A statement that the database refuses ends the worker's connection, and with it the lock;
    the study behind it must not keep the others waiting."""
    bad, good = closing_study(stage, "bad", **LOCAL), closing_study(stage, "good", **LOCAL)
    refuse = "BEGIN SELECT RAISE(ABORT, 'refused'); END"
    with stage.store.reading() as tx:
        number = tx.pending_uploads(open_or_closing(stage, bad), 1)[0][0]
    execute(
        str(stage.path),
        f"CREATE TRIGGER poison BEFORE DELETE ON upload WHEN OLD.number = {number} {refuse}",
    )
    with stage.store.worker_lock() as alone:
        assert alone
        with pytest.raises(StoreUnavailable):
            stage.worker.step()
    with stage.store.worker_lock() as alone:
        assert alone
        work(stage.worker)
    assert stage.state(bad)["fault"]["problem"] == "internal error: StoreError"
    assert stage.state(good)["state"] == "released"


def open_or_closing(stage: Stage, study: StudyRow) -> str:
    with stage.store.reading() as tx:
        (task,) = [task for task in tx.tasks(study.id) if task.state != "done"]
    return task.id


# Charges and noise


def test_a_fault_before_the_commit_leaves_neither_a_charge_nor_a_noised_sum(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of the first try was seen by nobody; the second charges once."""
    study = closing_study(stage, **NOISED)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.to_bytes", fail_with(MemoryError()))
        work(stage.worker)  # after the charge, and after the noise is drawn
    assert entries_of(stage.store) == []
    assert answers(stage, study) == []
    assert stage.state(study)["fault"] is not None
    stage.clock.advance(FIRST_PAUSE_SECONDS + 1)
    work(stage.worker)
    assert stage.state(study)["state"] == "released"
    assert len(entries_of(stage.store)) == 1


def test_tries_after_the_charge_use_the_noise_that_was_paid_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two noised sums of the same reports would reveal more than the ledger says."""
    study = closing_study(stage, **NOISED)
    with monkeypatch.context() as patch:
        patch.setattr(FrequencyDesign, "answer", fail_with(MemoryError()))
        for _ in range(3):
            work(stage.worker)
            stage.clock.advance(LONGEST_PAUSE_SECONDS)
    (stored,) = answers(stage, study)
    assert len(entries_of(stage.store)) == 1
    assert stage.state(study)["fault"]["tries"] == 3
    expected = release_of(stage.store, study)
    work(stage.start())  # another worker, as after a restart
    assert answers(stage, study) == [stored]
    assert len(entries_of(stage.store)) == 1
    counts = stage.release(study).counts
    np.testing.assert_array_equal(counts, expected.counts)  # type: ignore[attr-defined]


def test_a_worker_that_fails_five_times_of_six_releases_and_charges_each_study_once(
    tmp_path: Path,
) -> None:
    """tests/attacks/test_faults.py does the same many times, and on PostgreSQL."""
    chance = random.Random(f"{SEED} faults")
    assert release_in_spite_of_errors(tmp_path / "collector.db", chance, kills=True) > 10


def test_a_charge_that_is_paid_twice_or_lost_is_caught(tmp_path: Path) -> None:
    """The negative control of the test above."""
    url = tmp_path / "collector.db"
    release_in_spite_of_errors(url, random.Random(SEED), kills=False)
    with closing(Store.open(url)) as store:
        check_once(store)
        with store.transaction() as tx:
            tx.add_entry(*tx.entries()[0])
        with pytest.raises(AssertionError, match="not what was opened"):
            check_once(store)


# Trying again, and giving up


def test_an_administrator_may_end_the_pause(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    study = closing_study(stage, **LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(MemoryError()))
        for _ in range(9):
            work(stage.worker)
            stage.clock.advance(LONGEST_PAUSE_SECONDS)
        work(stage.worker)
    work(stage.worker)
    assert stage.state(study)["state"] == "closing"
    studies.retry(stage.store, study.id)
    assert stage.state(study)["fault"] is None
    work(stage.worker)
    assert stage.state(study)["state"] == "released"


@pytest.mark.parametrize("keys", [NOISED, LOCAL])
@pytest.mark.parametrize("steps", range(3))
def test_a_study_that_failed_is_released_after_all_and_charged_once(
    stage: Stage, keys: dict[str, Any], steps: int
) -> None:
    """Whether it failed before or after its reports were sealed, and its charge was paid."""
    study = closing_study(stage, **keys)
    for _ in range(steps):
        stage.worker.step()
    with stage.store.transaction() as tx:
        assert studies.end(tx, study.id, "failed", "internal error: MemoryError")
    paid = answers(stage, study)
    work(stage.worker)
    assert studies.retry(stage.store, study.id).state == "closing"
    work(stage.worker)
    state = stage.state(study)
    assert (state["state"], state["problem"], state["counted"]) == ("released", "", 4)
    assert len(entries_of(stage.store)) == (keys is NOISED)
    assert not paid or answers(stage, study) == paid


def test_a_study_whose_outcome_was_a_failure_fails_again(stage: Stage) -> None:
    set_budget(stage.store, Budget(epsilon=1.0, delta=1e-6))
    rows = [closing_study(stage, f"study {number}", **NOISED) for number in range(2)]
    work(stage.worker)
    problem = stage.state(rows[1])["problem"]
    assert "is refused" in problem
    studies.retry(stage.store, rows[1].id)
    work(stage.worker)
    assert (stage.state(rows[1])["state"], stage.state(rows[1])["problem"]) == ("failed", problem)
    assert len(entries_of(stage.store)) == 1


def test_a_study_that_was_released_deleted_or_emptied_cannot_be_tried_again(stage: Stage) -> None:
    released, deleted = closing_study(stage, "released"), closing_study(stage, "deleted")
    empty = stage.create("empty")
    studies.close(stage.store, empty.id)
    studies.delete(stage.store, deleted.id)
    work(stage.worker)
    for study, reason in (
        (released, "is released cannot"),
        (deleted, "is deleted cannot"),
        (empty, "nothing is left"),
    ):
        before = stage.state(study)
        with pytest.raises(Problem, match=reason) as raised:
            studies.retry(stage.store, study.id)
        assert raised.value.code == "wrong-state"
        assert stage.state(study) == before


def test_a_study_of_a_restored_store_cannot_be_tried_again(stage: Stage) -> None:
    """It may have been released before, and its charge is for that release."""
    study = closing_study(stage, **NOISED)
    stage.worker.step()
    with stage.store.transaction() as tx:
        studies.end(tx, study.id, "failed", studies.RESTORED)
    with pytest.raises(Problem, match="before its store was restored"):
        studies.retry(stage.store, study.id)


def test_a_failing_study_that_is_deleted_is_failing_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = closing_study(stage, **LOCAL)
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.worker.worker.first_of_each", fail_with(MemoryError()))
        work(stage.worker)
    studies.delete(stage.store, study.id)
    work(stage.worker)
    assert (stage.state(study)["state"], stage.state(study)["fault"]) == ("deleted", None)


def test_data_of_a_study_that_is_tried_again_is_not_dropped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention is over when an administrator tries again between two calls of the worker."""
    study = closing_study(stage, **LOCAL)
    with stage.store.transaction() as tx:
        studies.end(tx, study.id, "failed", "internal error: MemoryError")
    stage.clock.advance(31 * DAY_SECONDS)
    transaction = stage.store.transaction

    def meanwhile() -> Any:
        monkeypatch.undo()
        studies.retry(stage.store, study.id)
        return transaction()

    worker = stage.start(retention_days=30)
    monkeypatch.setattr(stage.store, "transaction", meanwhile)
    worker.step()
    work(worker)
    assert stage.state(study)["state"] == "released"
    assert stage.state(study)["counted"] == 4

"""The worker: sealing, closing and releasing."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from collecting import ITEMS, TODAY, Stage, entries_of, open_task, report, upload, word, work
from planning_checks import sums_of
from sfumato.collector import studies
from sfumato.collector.store.store import TaskRow
from sfumato.collector.worker import worker as worker_module
from sfumato.collector.worker.worker import SEAL_SECONDS
from sfumato.device.outbox import DAY_SECONDS
from sfumato.flow import contribute as device
from sfumato.flow.accumulator import (
    Collector,
    SumAccumulator,
    from_bytes,
    records_of,
    to_bytes,
)
from sfumato.flow.aggregation import Plain
from sfumato.flow.release import CountRelease
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.task import Task
from sfumato.privacy import NoNoise, SeededRng
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.promise import TIME
from sfumato.questions.question import Participation
from sfumato.sketch import CountSketch
from sfumato.spec import from_json

LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0}
NOISED: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
ROUNDS: dict[str, Any] = {"rounds": 2, "publish": "rounds"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "collector.db")
    yield stage
    stage.store.close()


def counts_of(release: CountRelease) -> dict[str, float]:
    return dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))


# Sealing


@pytest.mark.parametrize("bits", [7, 16, 62])
def test_sums_are_those_of_tables_added_one_by_one(bits: int) -> None:
    """For a sketch with negative cells, in pieces of any size."""
    task = Task(
        sketch=CountSketch(rows=3, width=5, seed=SEED),
        mechanism=NoNoise(),
        aggregation=Plain(modulus_bits=bits),
        cohort="everybody",
        max_count=60,
    )
    rng = SeededRng(SEED)
    reports = [device.report(task, [item], rng=rng) for item in ITEMS]
    messages = [one.message for one in reports]
    assert isinstance(task.aggregation, Plain)
    one_by_one = sum(task.aggregation.unpack(each, task.sketch.shape) for each in messages)
    merged = SumAccumulator(task)
    for start in range(0, len(messages), 7):
        part = SumAccumulator(task)
        part.add(messages[start : start + 7])
        merged.merge(part.seal(rng=rng))
    together = task.aggregation.open(merged.batch(len(messages)).total)
    assert (together == task.aggregation.open(np.asarray(one_by_one))).all()
    assert together.min() < 0


def test_sealed_records_have_no_ids_and_another_order(stage: Stage) -> None:
    study = stage.create(**LOCAL, items=[f"w{k}" for k in range(2_000)], devices=10_000)
    task = open_task(stage.store, study)
    reports = stage.answer(study, *range(50))
    studies.close(stage.store, study.id)
    stage.worker.step()
    (data,) = stage.sealed(task)
    records = [record.as_py() for record in records_of(data)]
    messages = [report[HEADER_BYTES:] for report in reports]
    assert sorted(records) == sorted(messages)
    assert records != messages
    assert not any(report[33:49] in data for report in reports)
    with stage.store.reading() as tx:
        assert tx.pending_uploads(task.id, 1) == []


def test_memory_is_trimmed_after_sealing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    trim_memory = worker_module.trim_memory

    def count_call() -> None:
        trim_memory()
        calls.append(1)

    monkeypatch.setattr(worker_module, "trim_memory", count_call)
    stage.worker.step()  # the first step may scrub the store
    calls.clear()
    stage.worker.step()
    assert not calls
    study = stage.create(**LOCAL)
    stage.answer(study, 0, 1, 2)
    stage.clock.advance(SEAL_SECONDS)
    stage.start(seal_seconds=0.0).step()
    assert calls


@pytest.mark.parametrize("keys", [{}, LOCAL])
def test_a_report_counts_once_however_often_it_came(stage: Stage, keys: dict[str, Any]) -> None:
    study = stage.create(**keys)
    task = open_task(stage.store, study)
    first = stage.answer(study, 0, 1, 2)
    upload(stage.store, task, [first[0], first[0]])
    stage.clock.advance(SEAL_SECONDS)
    work(stage.start(seal_seconds=0.0))
    upload(stage.store, task, [*first, report(task, 3, rng=stage.rng)])
    release = stage.finish(study)
    assert release.cost.devices == 4
    state = stage.state(study)
    assert (state["received"], state["counted"], state["repeated"]) == (9, 4, 5)


def test_uploads_of_an_open_task_wait_for_others(stage: Stage) -> None:
    """The more are sealed together, the less their order reveals."""
    study = stage.create()
    task = open_task(stage.store, study)
    stage.answer(study, 0)
    assert not stage.worker.step()
    stage.clock.advance(SEAL_SECONDS - 1)
    stage.answer(study, 1)
    assert not stage.worker.step()
    assert stage.sealed(task) == []
    stage.clock.advance(1)
    assert stage.worker.step()
    assert len(stage.sealed(task)) == 1
    assert not stage.worker.step()
    stage.clock.advance(-10 * DAY_SECONDS)
    stage.answer(study, 2)
    assert stage.worker.step()  # a clock that was set back does not make them wait for ten days


def test_much_is_sealed_in_pieces_and_studies_take_turns(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MOST_REPORTS", 4)
    rows = [stage.create(f"study {k}", **LOCAL) for k in range(2)]
    tasks = [open_task(stage.store, row) for row in rows]
    for row in rows:
        for start in range(0, 30, 3):
            stage.answer(row, *range(start, start + 3))
    for turn in range(1, 4):
        assert stage.worker.step()
        assert [len(stage.sealed(task)) for task in tasks] == [turn, turn]
    for row in rows:
        assert stage.finish(row).cost.devices == 30


def test_large_tables_are_sealed_by_their_size() -> None:
    class Large:
        message_bytes = 1 << 20

    assert worker_module.most_reports(Large()) == 7  # type: ignore[arg-type]  # no other attribute is used


# Closing


def test_a_task_closes_when_its_target_of_different_reports_is_reached(stage: Stage) -> None:
    study = stage.create(devices=4)
    reports = stage.answer(study, 0, 1, 2)
    for _ in range(3):
        upload(stage.store, open_task(stage.store, study), reports)
    work(stage.worker)
    assert stage.state(study)["state"] == "collecting"
    stage.answer(study, 3)
    work(stage.worker)
    assert stage.state(study)["state"] == "released"


def test_a_study_closes_after_its_last_day(stage: Stage) -> None:
    study = stage.create(terms={"closes": TODAY})
    stage.answer(study, 0)
    work(stage.worker)
    assert stage.state(study)["state"] == "collecting"
    stage.clock.advance(DAY_SECONDS)
    work(stage.worker)
    assert stage.release(study).cost.devices == 1


@pytest.mark.parametrize("keys", [{}, LOCAL])
def test_a_task_that_is_open_for_a_time_does_not_close_when_it_is_full(
    stage: Stage, keys: dict[str, Any]
) -> None:
    """The reports beyond the planned number count, too."""
    study = stage.create(devices=4, terms={"open_seconds": 3_600}, **keys)
    stage.answer(study, *range(5))
    stage.clock.advance(3_599)
    work(stage.worker)
    assert stage.state(study)["state"] == "collecting"
    stage.answer(study, 5)
    stage.clock.advance(1)
    work(stage.worker)
    assert stage.release(study).cost.devices == 6


def test_a_full_task_that_stays_open_is_sealed_as_seldom_as_others(stage: Stage) -> None:
    study = stage.create(devices=4, terms={"open_seconds": 3_600})
    stage.answer(study, *range(5))
    assert not stage.worker.step()
    assert stage.sealed(open_task(stage.store, study)) == []


@pytest.mark.parametrize(("minimum", "state"), [(3, "released"), (4, "collecting")])
def test_the_minimum_suffices_when_the_time_is_over(stage: Stage, minimum: int, state: str) -> None:
    study = stage.create(devices=40, terms={"open_seconds": 60, "minimum": minimum})
    stage.answer(study, 0, 1, 2)
    stage.clock.advance(59)
    work(stage.worker)
    assert stage.state(study)["state"] == "collecting"
    stage.clock.advance(1)
    work(stage.worker)
    assert stage.state(study)["state"] == state


def test_without_a_minimum_a_task_waits_for_the_planned_reports(stage: Stage) -> None:
    study = stage.create(devices=4, terms={"open_seconds": 60})
    stage.answer(study, 0, 1, 2)
    stage.clock.advance(3_600)
    work(stage.worker)
    assert stage.state(study)["state"] == "collecting"
    stage.answer(study, 3)
    work(stage.worker)
    assert stage.release(study).cost.devices == 4


def test_an_admin_may_close_a_study_before_its_time(stage: Stage) -> None:
    study = stage.create(devices=4, terms={"open_seconds": 3_600})
    stage.answer(study, 0, 1)
    assert stage.finish(study).cost.devices == 2


def test_each_round_is_open_for_its_time(stage: Stage) -> None:
    study = stage.create(devices=6, terms={"open_seconds": 60}, **ROUNDS)
    for number in range(2):
        task = open_task(stage.store, study)
        assert (task.number, task.open_until) == (number, math.ceil(stage.clock() + 60))
        stage.answer(study, 0, 1, 2)
        work(stage.worker)
        assert open_task(stage.store, study).id == task.id
        stage.clock.advance(61)
        work(stage.worker)
    assert stage.release(study).cost.devices == 6


@pytest.mark.parametrize("keys", [ROUNDS, {**LOCAL, "rounds": 2}])
def test_rounds_come_one_after_another(stage: Stage, keys: dict[str, Any]) -> None:
    study = stage.create(devices=6, **keys)
    first = open_task(stage.store, study)
    stage.answer(study, 0, 1, 2)
    work(stage.worker)
    second = open_task(stage.store, study)
    assert (second.number, second.target) == (1, 3)
    assert not upload(stage.store, first, [report(first, 5, rng=stage.rng)])
    stage.answer(study, 3, 4, 5)
    work(stage.worker)
    release = stage.release(study)
    assert (release.cost.devices, release.cost.rounds) == (6, 2)
    if keys is ROUNDS:
        assert [counts_of(release)[item] for item in ITEMS] == [1.0] * 6 + [0.0] * 54


def test_a_study_closed_between_rounds_releases_what_there_is(stage: Stage) -> None:
    study = stage.create(devices=6, **ROUNDS)
    stage.answer(study, 0, 1, 2)
    work(stage.worker)
    release = stage.finish(study)
    assert (release.cost.devices, release.cost.rounds) == (3, 1)
    assert any("made for 6 devices" in note for note in release.notes)


def test_no_more_reports_are_acknowledged_than_a_sum_has_room_for(stage: Stage) -> None:
    """While the worker is away, and some of them are duplicates."""
    study = stage.create(devices=2)
    task = open_task(stage.store, study)
    most = from_json(task.spec).max_count
    reports = [report(task, k % 60, rng=stage.rng) for k in range(most + 5)]
    assert upload(stage.store, task, reports[:5])
    outcomes = [upload(stage.store, task, [one]) for one in reports]
    assert outcomes == [True] * (most - 5) + [False] * 10
    stage.worker.step()
    assert upload(stage.store, task, reports[-10:-5])  # some were duplicates
    assert not upload(stage.store, task, reports[-5:])
    work(stage.worker)
    release = stage.release(study)
    assert release.cost.devices == sum(release.counts) == most
    assert stage.state(study)["rejected"] == {}
    assert stage.state(study)["repeated"] == 5


def test_a_sum_never_holds_more_than_it_can(stage: Stage) -> None:
    """For a task from an older version, without a capacity."""
    study = stage.create(devices=2)
    task = open_task(stage.store, study)
    with closing(sqlite3.connect(stage.path)) as raw, raw:
        raw.execute("UPDATE task SET room = NULL")
    most = from_json(task.spec).max_count
    upload(stage.store, task, [report(task, k % 60, rng=stage.rng) for k in range(most + 5)])
    work(stage.worker)
    release = stage.release(study)
    assert release.cost.devices == sum(release.counts) == most
    assert stage.state(study)["rejected"] == {"batch_full": 5}


# Releasing


def test_a_local_release_is_that_of_the_same_records_in_memory(stage: Stage) -> None:
    study = stage.create(**LOCAL, devices=300)
    task: Any = from_json(open_task(stage.store, study).spec)
    reports = stage.answer(study, *(k % 5 for k in range(300)))
    work(stage.worker)
    collector = Collector(task)
    collector.add(reports)
    with stage.store.reading() as tx:
        planned = studies.plan_of(tx, study)
    campaign = planned.design.campaign(planned, name=study.id)
    campaign.absorb(collector.batch)
    participation = Participation(devices=300, respondents=300, rounds=1)
    alike = planned.design.answer(campaign, planned, participation).timed(0.0, TIME)
    assert isinstance(alike, CountRelease)
    release = stage.release(study)
    assert release.frame() == alike.frame()
    assert release.privacy == alike.privacy
    assert release.plan == alike.plan
    assert any("300 reports received" in note for note in release.notes)


def test_new_words_are_found(stage: Stage) -> None:
    study = stage.create(
        question="new_words",
        **{**LOCAL, "epsilon": 8.0},
        items=["oak"],
        alphabet="aelmox",
        word_length=3,
        devices=600,
    )
    task = open_task(stage.store, study)
    reports = [word(task, text, rng=stage.rng) for text in ["elm"] * 350 + ["axe"] * 200]
    upload(stage.store, task, reports)
    release = stage.finish(study)
    assert release.items.to_pylist()[:2] == ["elm", "axe"]  # others with a chance of 5%
    assert release.plan["parameters"]["reports"] == release.cost.devices == 550


def test_a_noised_release_is_on_the_ledger_with_its_answer(stage: Stage) -> None:
    study = stage.create(**NOISED)
    task = open_task(stage.store, study)
    stage.answer(study, *range(30))
    stage.finish(study)
    (entry,) = entries_of(stage.store)
    assert entry.task == task.id
    assert entry.campaign == from_json(task.spec).campaign
    with stage.store.reading() as tx:
        (answer,) = tx.answer_rows(study.id)
    assert (answer.owner, answer.count) == (task.id, 30)
    assert (from_bytes(answer.check()) != np.repeat([1, 0], 30)).any()  # chance: below 1e-30


def test_a_two_phase_study_sizes_its_second_task_by_the_answer_to_the_first(stage: Stage) -> None:
    """With a new worker for every step, so that only the store remembers."""
    keys: Any = {**NOISED, "devices": 50_000, "target_error": 0.02, "algorithm": "count_sketch"}
    study = stage.create(items=[f"tree {k}" for k in range(20_000)], **keys)
    first = open_task(stage.store, study)
    assert from_json(first.spec).cohort == "pilot"
    with stage.store.transaction() as tx:
        tx.set_task_state(first.id, "closing", expected=["open"])
    upload_closed(stage, first, count=500)
    while stage.start().step() and stage.state(study)["tasks"][-1]["state"] != "open":
        pass
    second = from_json(open_task(stage.store, study).spec)
    with stage.store.reading() as tx:
        planned = studies.plan_of(tx, study)
        campaign = studies.campaign_of(tx, study, planned)
    assert isinstance(campaign, FrequencyCampaign)
    assert second == campaign.next_task()
    assert second.sketch.width == campaign.width <= sums_of(planned).width
    stage.answer(study, *range(60))
    release = stage.finish(study)
    assert release.cost.devices == 560
    assert release.plan["parameters"]["width"] == campaign.width
    assert len(entries_of(stage.store)) == 2


def upload_closed(stage: Stage, task: TaskRow, *, count: int) -> None:
    """Seal this many reports of a task at once, as if they had been received."""
    spec = from_json(task.spec)
    table = sum(spec.sketch.encode([ITEMS[k % 3]]) for k in range(count))
    with stage.store.transaction() as tx:
        tx.add_sealed(task.id, to_bytes(table), count)
        tx.count(task.id, "reports", count)


def test_a_release_has_its_date_and_survives_the_store(stage: Stage) -> None:
    study = stage.create(**LOCAL)
    stage.answer(study, 0, 1)
    release = stage.finish(study)
    with stage.store.reading() as tx:
        release_dict = json.loads(tx.release(study.id) or "")
    assert release_dict.pop("released") == "2024-10-04"
    assert CountRelease.from_dict(release_dict).to_dict().keys() == release_dict.keys()
    assert release.study == release_dict["study"]

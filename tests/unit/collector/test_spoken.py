"""What members are told in a phase, before it is stored: the same, and none of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from masking import Masking, devices, go, masking, parts, play
from serving import settings, wait_for
from sfumato.agent import Http, Joined
from sfumato.collector import spoken
from sfumato.collector.rounds import _may_be_spoken
from sfumato.collector.serve import running
from sfumato.collector.spoken import Spoken
from sfumato.collector.store import Transaction
from sfumato.errors import StoreError

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as made:
        yield made


def test_what_is_said_is_heard_in_its_phase_only() -> None:
    memory = Spoken()
    assert memory.heard("a", "share") is None
    memory.say("a", "share", {0: b"told"})
    assert memory.heard("a", "share") == {0: b"told"}
    assert memory.heard("a", "mask") is None
    assert memory.heard("b", "share") is None
    memory.say("a", "mask", {1: b"more"})
    assert memory.heard("a", "share") is None
    assert memory.heard("a", "mask") == {1: b"more"}
    memory.forget("a")
    memory.forget("a")
    assert memory.heard("a", "mask") is None


def test_devices_of_another_process_wait_until_it_is_stored(
    stage: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker here is another process's: between its two transactions, they are told nothing."""
    study, add, waited = stage.create(COUNT), Transaction.add_told, []

    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)

        def added_late(self: Transaction, round_id: str, phase: str, told: Any) -> None:
            if told := list(told):
                for part in made:
                    asked = part.request(0)
                    if part.waits:
                        answer = send(asked.method, asked.path, asked.body, asked.headers)
                        waited.append(answer.status)
            add(self, round_id, phase, told)

        monkeypatch.setattr(Transaction, "add_told", added_late)
        play(stage, made)
    assert set(waited) <= {204}
    assert len(waited) >= 2 * COUNT
    assert {part.outcome for part in made} == {Joined.DONE}
    assert stage.release(study).counts.tolist() == [1.0] * COUNT


@pytest.mark.parametrize("dies", [True, False])
def test_a_worker_that_fails_before_it_is_stored_stores_the_same(
    stage: Masking, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    study, add = stage.create(COUNT), Transaction.add_told
    said: list[list[tuple[int, bytes]]] = []

    def fails_at_first(self: Transaction, round_id: str, phase: str, told: Any) -> None:
        if told := list(told):
            said.append(told)
            if len(said) % 2 == 1 and len(told) > 1:
                raise StoreError("the disk is gone")
        add(self, round_id, phase, told)

    monkeypatch.setattr(Transaction, "add_told", fails_at_first)
    work = stage.work

    def work_on() -> None:
        for _ in range(3):
            try:
                work()
            except StoreError:
                if dies:
                    stage.restart()

    monkeypatch.setattr(stage, "work", work_on)
    with devices(stage, COUNT) as them:
        made = parts(them, stage.clock)
        play(stage, made)
    assert said[0] == said[1]  # keys of neighbours
    assert said[2] == said[3]  # boxes
    assert {part.outcome for part in made} == {Joined.DONE}
    assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert stage.charges() == 1


@pytest.mark.parametrize("most_bytes", [0, spoken.MOST_BYTES])
def test_devices_of_the_same_process_need_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Unless it is too much to be kept in memory."""
    monkeypatch.setattr(spoken, "MOST_BYTES", most_bytes)
    heard: list[str] = []
    hear = Spoken.heard

    def counted(self: Spoken, round_id: str, phase: str) -> Any:
        if (found := hear(self, round_id, phase)) is not None:
            heard.append(phase)
        return found

    monkeypatch.setattr(Spoken, "heard", counted)
    with running(settings(tmp_path, worker_seconds=0.01)) as collector:
        stage = Masking(collector)
        study = stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(collector.address) as send:
            made = parts(them, stage.clock)

            def all_done() -> bool:
                for part in made:
                    go(part, send)
                return all(part.outcome is not None for part in made)

            wait_for(all_done, "the devices to be done")
            wait_for(lambda: stage.state(study)["state"] == "released", "the release")
        assert {part.outcome for part in made} == {Joined.DONE}
        assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert set(heard) == ({"share", "mask"} if most_bytes else set())


def test_only_what_each_is_told_for_itself_may_be_spoken() -> None:
    assert not _may_be_spoken([(-1, b"survivors")])
    assert not _may_be_spoken([])
    assert _may_be_spoken([(0, b"a"), (1, b"b")])

"""What members are told in a phase: worked out from what is stored, everywhere the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marks import quick
from masking import Masking, devices, go, masking, parts, play, play_on
from serving import settings
from sfumato.collector.serve import running
from sfumato.collector.store.round_tables import RoundRow, RoundTables
from sfumato.collector.worker import replay
from sfumato.collector.worker.replay import MessageFor, PhaseMessages
from sfumato.device import Http
from sfumato.errors import DataError

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as made:
        yield made


def saying(text: bytes) -> MessageFor:
    return lambda member: text


def test_messages_are_those_of_the_worker_until_they_are_dropped_and_then_derived(
    stage: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are derived the last are kept."""
    messages, rounds = PhaseMessages(), list[str]()
    monkeypatch.setattr(replay, "replay", lambda tx, row: rounds.append(row.id))
    monkeypatch.setattr(replay, "messages_of", lambda coordinator: saying(b"derived"))
    messages.put("a", "share", saying(b"the worker's"))
    row = RoundRow("", "", "mask", 1, 1, 1, 0)
    with stage.collector.store.reading() as tx:

        def text(round_id: str, phase: str) -> bytes | None:
            return messages.of_phase(tx, replace(row, id=round_id), phase)(0)

        for number in range(30):
            assert text(str(number), "mask") == b"derived"
            assert text("0", "mask") == b"derived"
            assert text("a", "share") == b"the worker's"
        assert rounds == [str(number) for number in range(30)]
        assert text("1", "mask") == b"derived"  # once more, after so many others
        messages.drop("a", "mask")
        assert text("a", "share") == b"the worker's"
        messages.drop("a")
        messages.drop("a")
        assert text("a", "share") == b"derived"
    assert rounds[30:] == ["1", "a"]


Told = tuple[PhaseMessages, str, dict[int, bytes | None]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """All messages: of whom, in which phase, and to whom."""
    put, of_phase, told = PhaseMessages.put, PhaseMessages.of_phase, list[Told]()

    def note_put(self: PhaseMessages, round_id: str, phase: str, message_for: MessageFor) -> None:
        told.append((self, phase, {member: message_for(member) for member in range(99)}))
        put(self, round_id, phase, message_for)

    def note(self: PhaseMessages, tx: RoundTables, row: RoundRow, phase: str) -> MessageFor:
        message_for = of_phase(self, tx, row, phase)
        told.append((self, phase, {member: message_for(member) for member in range(99)}))
        return message_for

    monkeypatch.setattr(PhaseMessages, "put", note_put)
    monkeypatch.setattr(PhaseMessages, "of_phase", note)
    return told


@pytest.mark.parametrize("mode", quick(["semi_honest", "semi_malicious"], "semi_honest"))
def test_another_process_tells_the_same(stage: Masking, told: list[Told], mode: str) -> None:
    """The worker is another process's than the one that devices ask: each works it out."""
    study = stage.create(60, dropout=0.1, collector=mode, corrupt=0.05)
    leaving = {3: "enrol", 7: "share", 11: "mask", 20: "unmask"}
    with devices(stage, 60) as them:
        made = parts(them, stage.clock)
        play(stage, made, leaving=leaving)
    phases = {"share", "mask", "unmask"} | ({"ack"} if mode == "semi_malicious" else set())
    assert {phase for _, phase, _ in told} == phases
    for phase in phases:
        by_whom = {id(whose): messages for whose, at, messages in told if at == phase}
        assert len(by_whom) == 2, phase
        one, other = by_whom.values()
        assert one == other
        heard = {member for member, message in one.items() if message is not None}
        assert len(heard) == {"share": 59, "mask": 58, "ack": 57, "unmask": 57}[phase]
    assert stage.release(study).counts.sum() == 57


def test_a_phase_that_is_over_is_told_again_as_it_was(stage: Masking) -> None:
    """A device that was ended before it wrote down what it heard asks once more."""
    study = stage.create(COUNT)
    asked: list[tuple[Any, bytes]] = []
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)

        def noting(method: str, path: str, body: bytes, headers: Any) -> Any:
            answer = send(method, path, body, headers)
            if method == "GET" and answer.status == 200 and "/rounds/" in path:
                asked.append(((method, path, body, headers), answer.body))
            for earlier, told in asked[-3 * COUNT :: COUNT]:
                again = send(*earlier)
                assert again.body == told or again.status == 410  # the round is over
            return answer

        play_on(stage, study, made, noting, step=stage.work)
    assert len({request[1].split("/")[-2] for request, _ in asked}) == 3


def test_messages_that_are_gone_are_an_error_of_the_store(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        while made[0].phase != "mask":
            for part in made:
                go(part, send, until="mask")
            stage.work()
        with stage.collector.store.transaction() as tx:
            ((round_id,),) = tx._run("SELECT id FROM round")
            row = tx.round(round_id)
            assert row is not None
            assert replay.replay(tx, row).boxes
            tx._run("DELETE FROM round_message WHERE phase = 'share' AND member > 0")
            with pytest.raises(DataError, match="not all there"):
                replay.replay(tx, row)
            tx._run("UPDATE round_message SET body = ? WHERE phase = 'enrol'", b"")
            with pytest.raises(DataError, match="taken is now refused: malformed"):
                replay.replay(tx, row)


def test_a_phase_that_a_round_does_not_have_is_not_found(stage: Masking) -> None:
    """And whoever asks for it keeps nobody else from an answer."""
    study = stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)

        def asking(method: str, path: str, body: bytes, headers: Any) -> Any:
            if "/rounds/" in path:
                pieces = path.split("?")[0].split("/")
                other = "/".join([*pieces[:-2], "ack", pieces[-1]])
                for verb in ("GET", "PUT"):
                    assert send(verb, other, b"", headers).status == 404
            return send(method, path, body, headers)

        play_on(stage, study, made, asking, step=stage.work)
    with stage.collector.store.reading() as tx:
        ((round_id,),) = tx._run("SELECT id FROM round")
        row = tx.round(round_id)
        assert row is not None
        with pytest.raises(DataError):
            replay.replay(tx, replace(row, phase="ack"))


def test_the_process_of_the_worker_works_nothing_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []
    monkeypatch.setattr(replay, "replay", lambda tx, row: again.append(row.phase))
    with running(settings(tmp_path, worker_seconds=0.01)) as collector:
        stage = Masking(collector)
        study = stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(collector.address) as send:
            made = parts(them, stage.clock)
            play_on(stage, study, made, send)
        assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert again == []

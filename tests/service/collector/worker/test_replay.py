"""Messages to members: derived from the store, and the same in every process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from databases import execute
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
    with masking(tmp_path) as stage:
        yield stage


def constant(text: bytes) -> MessageFor:
    return lambda member: text


def test_messages_are_those_of_the_worker_until_they_are_dropped_and_then_derived(
    stage: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last few derived ones are cached."""
    messages, rounds = PhaseMessages(), list[str]()
    monkeypatch.setattr(replay, "replay", lambda tx, row: rounds.append(row.id))
    monkeypatch.setattr(replay, "messages_of", lambda coordinator: constant(b"derived"))
    messages.put("a", "share", constant(b"the worker's"))
    row = RoundRow("", "", "mask", 1, 1, 1, 0)
    with stage.collector.store.reading() as tx:

        def text(round_id: str, phase: str) -> bytes | None:
            return messages.of_phase(tx, replace(row, id=round_id), phase)(0)

        for number in range(30):
            assert text(str(number), "mask") == b"derived"
            assert text("0", "mask") == b"derived"
            assert text("a", "share") == b"the worker's"
        assert rounds == [str(number) for number in range(30)]
        assert text("1", "mask") == b"derived"  # derived again, after many others
        messages.drop("a", "mask")
        assert text("a", "share") == b"the worker's"
        messages.drop("a")
        messages.drop("a")
        assert text("a", "share") == b"derived"
    assert rounds[30:] == ["1", "a"]


LoggedMessages = tuple[PhaseMessages, str, dict[int, bytes | None]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[LoggedMessages]:
    """All messages: their source, phase and recipients."""
    put, of_phase, log = PhaseMessages.put, PhaseMessages.of_phase, list[LoggedMessages]()

    def note_put(self: PhaseMessages, round_id: str, phase: str, message_for: MessageFor) -> None:
        log.append((self, phase, {member: message_for(member) for member in range(99)}))
        put(self, round_id, phase, message_for)

    def note(self: PhaseMessages, tx: RoundTables, row: RoundRow, phase: str) -> MessageFor:
        message_for = of_phase(self, tx, row, phase)
        log.append((self, phase, {member: message_for(member) for member in range(99)}))
        return message_for

    monkeypatch.setattr(PhaseMessages, "put", note_put)
    monkeypatch.setattr(PhaseMessages, "of_phase", note)
    return log


@pytest.mark.parametrize("mode", quick(["semi_honest", "semi_malicious"], "semi_honest"))
def test_another_process_sends_the_same(
    stage: Masking, log: list[LoggedMessages], mode: str
) -> None:
    """The worker and the server are in different processes: each derives the messages."""
    study = stage.create(60, dropout=0.1, collector=mode, corrupt=0.05)
    dropouts = {3: "enrol", 7: "share", 11: "mask", 20: "unmask"}
    with devices(stage, 60) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members, leaving=dropouts)
    phases = {"share", "mask", "unmask"} | ({"ack"} if mode == "semi_malicious" else set())
    assert {phase for _, phase, _ in log} == phases
    for phase in phases:
        by_whom = {id(whose): messages for whose, at, messages in log if at == phase}
        assert len(by_whom) == 2, phase
        one, other = by_whom.values()
        assert one == other
        recipients = {member for member, message in one.items() if message is not None}
        assert len(recipients) == {"share": 59, "mask": 58, "ack": 57, "unmask": 57}[phase]
    assert stage.release(study).counts.sum() == 57


def test_the_message_of_an_earlier_phase_can_be_read_again(stage: Masking) -> None:
    """A device that ended before it stored its message asks again."""
    study = stage.create(COUNT)
    requests: list[tuple[Any, bytes]] = []
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)

        def repeat(method: str, path: str, body: bytes, headers: Any) -> Any:
            answer = send(method, path, body, headers)
            if method == "GET" and answer.status == 200 and "/rounds/" in path:
                requests.append(((method, path, body, headers), answer.body))
            for earlier, message in requests[-3 * COUNT :: COUNT]:
                again = send(*earlier)
                assert again.body == message or again.status == 410  # the round is over
            return answer

        play_on(stage, study, members, repeat, step=stage.work)
    assert len({request[1].split("/")[-2] for request, _ in requests}) == 3


def test_a_round_of_another_version_is_not_continued(stage: Masking) -> None:
    """Its ring and its masks are others: the sum would be noise. So the next round is tried."""
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        while members[0].phase != "mask":
            for part in members:
                go(part, send, until="mask")
            stage.work()
    store, url = stage.collector.store, stage.collector.service.settings.store
    with store.reading() as tx:
        (round_id,) = tx.active_rounds()
        row, invitation = tx.round(round_id), json.loads(tx.invitation(round_id))
    assert row is not None
    body = json.loads(invitation["invitation"])
    body["roster"] = [key * 32 for key in ("00", "01")]  # a list of keys, as before
    old = json.dumps({**invitation, "invitation": json.dumps(body)})
    execute(url, "UPDATE round SET invitation = ?", old)
    with store.reading() as tx, pytest.raises(DataError, match="another version"):
        replay.replay(tx, row)
    stage.restart()
    stage.work()
    with store.reading() as tx:
        (task,) = tx.tasks(study.id)
        (ended,) = tx.rounds(task.id)
    assert (ended.phase, ended.charged) == ("aborted", 0)
    assert "another version" in ended.problem


def test_missing_and_damaged_messages_are_errors(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        while members[0].phase != "mask":
            for part in members:
                go(part, send, until="mask")
            stage.work()
        store, url = stage.collector.store, stage.collector.service.settings.store
        with store.reading() as tx:
            (round_id,) = tx.active_rounds()
            row = tx.round(round_id)
            assert row is not None
            assert replay.replay(tx, row).boxes
        execute(url, "DELETE FROM round_message WHERE phase = 'share' AND member > 0")
        with store.reading() as tx, pytest.raises(DataError, match="are missing"):
            replay.replay(tx, row)
        execute(url, "UPDATE round_message SET body = ? WHERE phase = 'enrol'", b"")
        with store.reading() as tx, pytest.raises(DataError, match="now refused: malformed"):
            replay.replay(tx, row)


def test_a_phase_that_a_round_does_not_have_is_not_found(stage: Masking) -> None:
    """Nor does asking for it disturb the round."""
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)

        def probe(method: str, path: str, body: bytes, headers: Any) -> Any:
            if "/rounds/" in path:
                pieces = path.split("?")[0].split("/")
                other = "/".join([*pieces[:-2], "ack", pieces[-1]])
                for verb in ("GET", "PUT"):
                    assert send(verb, other, b"", headers).status == 404
            return send(method, path, body, headers)

        play_on(stage, study, members, probe, step=stage.work)
    ((round_id,),) = execute(stage.collector.service.settings.store, "SELECT id FROM round")
    with stage.collector.store.reading() as tx:
        row = tx.round(round_id)
        assert row is not None
        with pytest.raises(DataError):
            replay.replay(tx, replace(row, phase="ack"))


def test_the_process_of_the_worker_derives_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []
    monkeypatch.setattr(replay, "replay", lambda tx, row: again.append(row.phase))
    with running(settings(tmp_path, worker_seconds=0.01)) as collector:
        stage = Masking(collector)
        study = stage.create(COUNT)
        with devices(stage, COUNT) as fleet, Http(collector.address) as send:
            members = parts(fleet, stage.clock)
            play_on(stage, study, members, send)
        assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert again == []

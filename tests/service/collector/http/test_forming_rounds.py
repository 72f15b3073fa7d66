"""How masked rounds form, which of them count as tries, and what one device can do to them."""

from __future__ import annotations

import gc
import http.client
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from masking import NAME, Masking, devices, go, masking, parts, play
from serving import ask
from sfumato.collector import studies
from sfumato.collector.worker.round_cache import most_bytes
from sfumato.collector.worker.rounds import MOST_LOST, sample_cohort
from sfumato.device import Http, RoundClient, RoundOutcome
from sfumato.privacy import SeededRng
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.round import BOX_BYTES, SHARE_BYTES, MaskedRound
from sfumato.spec import from_json

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


def join_and_leave(stage: Masking, send: Http, count: int) -> None:
    """Let `count` devices join, and drop out."""
    with devices(stage, count) as dropouts:
        for device in dropouts:
            part = device.part(NAME, "tree 0", stage.clock())
            assert isinstance(part, RoundClient)
            go(part, send)


def test_devices_that_came_and_went_do_not_fail_a_study(stage: Masking) -> None:
    """Three cohorts of them wait; then a whole cohort comes that stays and answers everything."""
    study = stage.create(COUNT, dropout=0.0)  # one may be missing
    with devices(stage, COUNT) as live, Http(stage.collector.address) as send:
        join_and_leave(stage, send, 3 * COUNT)
        clients = parts(live, stage.clock)
        for _ in range(36):  # an aborted round takes one turn, a complete one four
            for part in clients:
                go(part, send)
            if stage.state(study)["state"] != "collecting":
                break
            stage.wait_out()
    assert [part.outcome for part in clients].count(RoundOutcome.DONE) >= COUNT - 1
    assert stage.release(study).counts.sum() >= COUNT - 1
    (task,) = stage.state(study)["tasks"]
    phases = [each["phase"] for each in task["rounds"]]
    assert phases[-1] == "done"
    # Each of the others has dropped one cohort at most. (That 11 of 12 sampled devices are alive
    # while twelve dropouts wait has probability below 1e-4, and needs two such rounds before.)
    assert len(phases) >= 1 + 3 > stage.tries


def test_a_round_with_too_few_enrolments_puts_its_members_back(stage: Masking) -> None:
    study = stage.create(COUNT, dropout=0.0)  # one may be missing
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        for part in clients[2:]:
            go(part, send)
        stage.wait_out()
        with stage.collector.store.reading() as tx:
            (task,) = tx.tasks(study.id)
            (row,) = tx.rounds(task.id)
            assert (row.phase, row.was_formed, row.deadline) == ("aborted", False, 0)
            assert tx.invitation(row.id) == ""
            assert tx.waiting_count(task.id) == COUNT - 2
        for part in clients[:2]:  # too late
            assert go(part, send).outcome in (RoundOutcome.NOT_NEEDED, RoundOutcome.ABORTED)
        for part in clients[2:]:
            assert (go(part, send).phase, part.outcome) == ("wait", None)
        others = [device.part(NAME, "tree 1", stage.clock()) for device in them[:2]]
        assert all(isinstance(part, RoundClient) for part in others)
        everybody = [*others, *clients[2:]]
        play(stage, everybody)  # type: ignore[arg-type]  # checked above
        assert {part.outcome for part in clients[2:]} == {RoundOutcome.DONE}
    assert stage.state(study)["state"] == "released"
    assert stage.charges() == 1


def test_a_device_that_is_put_back_waits_for_another_round_than_before(stage: Masking) -> None:
    """An answer that is a second old may still invite it to the aborted round."""
    stage.create(COUNT, dropout=0.0)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        request = clients[0].request(0)
        invitation = send(request.method, request.path, request.body, request.headers)
        go(clients[0], send)
        stage.wait_out()
        go(clients[0], send)
        assert clients[0].phase == "wait"
        assert not clients[0].receive(invitation)
        assert (clients[0].phase, clients[0].outcome) == ("wait", None)


def test_one_program_that_takes_all_places_does_not_fail_a_study(stage: Masking) -> None:
    """It stops the study while it runs, as the guide says, but not for good."""
    study = stage.create(COUNT)
    task = stage.state(study)["tasks"][0]["id"]
    for _ in range(4 * COUNT):
        path = f"/v1/tasks/{task}/join"
        ask(stage.collector.address, "POST", path, secrets.token_bytes(32))
    for _ in range(stage.tries + 2):
        stage.work()
        stage.wait_out()
    assert stage.state(study)["state"] == "collecting"
    with devices(stage, COUNT) as them:
        clients = parts(them, stage.clock)
        play(stage, clients)
    assert {part.outcome for part in clients} == {RoundOutcome.DONE}


def test_a_cohort_is_drawn_by_lot() -> None:
    """A device that came first is in a cohort as often as any other, and has any number there."""
    waiting = [(number, bytes([number])) for number in range(20)]
    cohorts = [sample_cohort(waiting, 5, SeededRng(seed)) for seed in range(2_000)]
    assert all(len(set(cohort)) == 5 for cohort in cohorts)
    assert cohorts[0] == sample_cohort(waiting, 5, SeededRng(0))
    times = np.bincount([number for cohort in cohorts for number, _ in cohort], minlength=20)
    # Each is binomial(2000, 1/4), of deviation 19.4. By Bonferroni over 20 devices six deviations
    # are exceeded with probability below 1e-7; the first five always, or never, is 38 or more.
    assert np.abs(times - 500).max() < 6 * 19.4
    firsts = np.bincount([cohort[0][0] for cohort in cohorts], minlength=20)
    assert np.abs(firsts - 100).max() < 6 * 9.75  # binomial(2000, 1/20)


def test_a_smaller_cohort_is_formed_when_no_more_devices_come(stage: Masking) -> None:
    study = stage.create(30, dropout=0.2)
    with devices(stage, 26) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        assert stage.state(study)["tasks"][0]["rounds"] == []
        stage.clock.advance(601)
        play(stage, clients)
    assert stage.release(study).counts.sum() == 26


def test_a_round_that_tolerates_no_dropout_is_not_formed(stage: Masking) -> None:
    """Only as many as the floor wait, and a tenth of them are expected to drop out."""
    study = stage.create(40)
    with stage.collector.store.reading() as tx:
        spec = from_json(tx.tasks(study.id)[0].spec)
    with Http(stage.collector.address) as send:
        join_and_leave(stage, send, spec.min_count)
        for _ in range(2):
            stage.work()
            stage.clock.advance(601)
        stage.work()
        assert stage.state(study)["tasks"][0]["rounds"] == []
        join_and_leave(stage, send, 36 - spec.min_count)  # with probability 1/1000 below the floor
        stage.work()
        stage.clock.advance(601)
        stage.work()
    (round,) = stage.state(study)["tasks"][0]["rounds"]
    assert round["phase"] == "enrol"


def test_a_study_stops_after_two_lost_rounds(tmp_path: Path) -> None:
    """One device shares another seed than it commits to; that is seen when the sum is opened, and
    the round is charged."""
    with masking(tmp_path, budget_epsilon=10.0) as stage:
        study = stage.create(COUNT, epsilon=1.0)
        for _ in range(MOST_LOST):
            with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
                clients = parts(them, stage.clock)
                for part in clients:
                    go(part, send)
                stage.work()
                request = clients[0].request(0)
                clients[0].receive(
                    send(request.method, request.path, request.body, request.headers)
                )
                assert clients[0].participant is not None
                clients[0].participant.seed = bytes(range(32))
                play(stage, clients)
                stage.work()
        state = stage.state(study)
        assert state["state"] == "failed"
        assert "2 masked rounds were charged without a result" in state["problem"]
        assert "another secret than it had committed to" in state["problem"]
        assert "member" not in state["problem"]  # it names no device
        assert stage.charges() == MOST_LOST < stage.tries
        assert 'sfumato_rounds_total{outcome="false_secret"} 2.0' in stage.metrics.text()


def coordinators() -> int:
    """How many coordinators of rounds are in memory."""
    gc.collect()
    return sum(type(each) is Coordinator for each in gc.get_objects())


def test_a_rounds_memory_is_freed_when_its_study_is_deleted(stage: Masking) -> None:
    study, before = stage.create(COUNT), coordinators()
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        assert coordinators() == before + 1
        studies.delete(stage.collector.store, study.id)
        stage.work()
    assert coordinators() == before


@pytest.mark.parametrize("cohort", [12, 100, 10_000])
def test_the_limit_of_a_message_is_just_above_the_longest_valid_one(cohort: int) -> None:
    round = MaskedRound(
        task="5f" * 32,
        cells=100,
        modulus_bits=16,
        cohort=cohort,
        corrupt=0.1,
        dropout=0.1,
        mode="semi_honest",
        nonce="00" * 16,
    )
    least, step = round.least_survivors, max(1, cohort // 40)
    most = max(round.parameters(n).neighbours for n in range(least, cohort + 1, step))
    for phase, size in ((Phase.SHARE, BOX_BYTES), (Phase.UNMASK, SHARE_BYTES)):
        assert size * most <= most_bytes(round, phase) <= size * max(20, 1.25 * most)


def test_a_refused_message_is_not_kept(stage: Masking, tmp_path: Path) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        request = clients[0].request(0)
        clients[0].receive(send(request.method, request.path, request.body, request.headers))
        request = clients[0].request(0)
        send(request.method, request.path, bytes(len(request.body)), request.headers)
        stage.work()
        with closing(sqlite3.connect(tmp_path / "collector.db")) as database:
            rows = database.execute("SELECT outcome, LENGTH(body) FROM round_message")
            ((outcome, size),) = rows.fetchall()
    assert outcome not in ("", "taken")
    assert size == 0


def test_a_round_whose_rows_do_not_agree_is_aborted(stage: Masking, tmp_path: Path) -> None:
    """A table is marked as added, but the sum does not have it. To build the round from rows again
    would not help, and a worker must not try forever."""
    study = stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for _ in range(3):
            for part in clients:
                go(part, send, until="mask")
            stage.work()
        go(clients[0], send)
        with closing(sqlite3.connect(tmp_path / "collector.db")) as database, database:
            database.execute("UPDATE round_message SET outcome = 'taken' WHERE phase = 'mask'")
        stage.restart()
        stage.work()  # must end
    state = stage.state(study)
    assert (state["state"], state["fault"]) == ("collecting", None)
    ((aborted,),) = [task["rounds"] for task in state["tasks"]]
    assert aborted["phase"] == "aborted"
    assert "do not agree: the sum is of 0 tables, and 1 were accepted" in aborted["problem"]
    assert stage.charges() == 0


def test_a_ticket_keeps_one_connection(tmp_path: Path) -> None:
    """Each request with it ends the previous one, so that others are still answered."""
    with masking(tmp_path, connections=10) as stage:
        study = stage.create(COUNT)
        task = stage.state(study)["tasks"][0]["id"]
        headers = {"Authorization": f"Ticket {secrets.token_hex(32)}"}
        path = f"/v1/tasks/{task}/join"
        ask(stage.collector.address, "POST", path, secrets.token_bytes(32), headers=headers)
        connections: list[http.client.HTTPConnection] = []
        for _ in range(12):  # more than there may be
            connections.append(http.client.HTTPConnection(stage.collector.address[7:], timeout=20))
            connections[-1].request("GET", "/v1/tickets", headers=headers)
            if len(connections) > 1:
                answer = connections[-2].getresponse()
                assert (answer.status, answer.getheader("connection")) == (204, "close")
        assert ask(stage.collector.address, "GET", "/health").status == 200
        for connection in connections:
            connection.close()

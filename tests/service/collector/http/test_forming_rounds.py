"""Who comes into a masked round, which rounds count as tries, what one device can do to them."""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from masking import NAME, Masking, devices, go, masking, parts, play
from serving import ask
from sfumato.collector import studies
from sfumato.collector.metrics import Metrics
from sfumato.collector.worker.round_cache import most_bytes
from sfumato.collector.worker.rounds import MOST_LOST, _drawn
from sfumato.device import Http, Joined, Part
from sfumato.privacy import SeededRng
from sfumato.secagg.coordinator import Phase
from sfumato.secagg.round import BOX_BYTES, SHARE_BYTES, MaskedRound
from sfumato.spec import from_json

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as made:
        yield made


def waiting(stage: Masking, send: Http, count: int) -> None:
    """So many join, and are never heard of again."""
    with devices(stage, count) as gone:
        for device in gone:
            part = device.part(NAME, "tree 0", stage.clock())
            assert isinstance(part, Part)
            go(part, send)


def test_devices_that_came_and_went_do_not_fail_a_study(stage: Masking) -> None:
    """Three cohorts of them wait; a whole cohort that answers everything comes, and stays."""
    study = stage.create(COUNT, dropout=0.0)  # one may be missing
    with devices(stage, COUNT) as live, Http(stage.collector.address) as send:
        waiting(stage, send, 3 * COUNT)
        made = parts(live, stage.clock)
        for _ in range(36):  # an aborted round takes one turn, and one that is not takes four
            for part in made:
                go(part, send)
            if stage.state(study)["state"] != "collecting":
                break
            stage.wait_out()
    assert [part.outcome for part in made].count(Joined.DONE) >= COUNT - 1
    assert stage.release(study).counts.sum() >= COUNT - 1
    (task,) = stage.state(study)["tasks"]
    phases = [each["phase"] for each in task["rounds"]]
    assert phases[-1] == "done"
    # Each of the others has forgotten a cohort at most. (That 11 of 12 drawn are alive while twelve
    # who are gone wait has probability below 1e-4, and needs two rounds of nobody else before.)
    assert len(phases) >= 1 + 3 > stage.tries


def test_a_round_to_which_too_few_enrol_puts_back_who_did(stage: Masking) -> None:
    study = stage.create(COUNT, dropout=0.0)  # one may be missing
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        for part in made[2:]:
            go(part, send)
        stage.wait_out()
        with stage.collector.store.reading() as tx:
            (task,) = tx.tasks(study.id)
            (row,) = tx.rounds(task.id)
            assert (row.phase, row.came_together, row.deadline) == ("aborted", False, 0)
            assert tx.invitation(row.id) == ""
            assert tx.waiting(task.id) == COUNT - 2
        for part in made[:2]:  # too late: nobody waits for them any more
            assert go(part, send).outcome in (Joined.NOT_NEEDED, Joined.ABORTED)
        for part in made[2:]:
            assert (go(part, send).phase, part.outcome) == ("wait", None)
        others = [device.part(NAME, "tree 1", stage.clock()) for device in them[:2]]
        assert all(isinstance(part, Part) for part in others)
        everybody = [*others, *made[2:]]
        play(stage, everybody)  # type: ignore[arg-type]  # as was seen
        assert {part.outcome for part in made[2:]} == {Joined.DONE}
    assert stage.state(study)["state"] == "released"
    assert stage.charges() == 1


def test_a_device_that_is_put_back_waits_for_another_round_than_before(stage: Masking) -> None:
    """An answer that is a second old may still invite it to the round that was given up."""
    stage.create(COUNT, dropout=0.0)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        asked = made[0].request(0)
        invited = send(asked.method, asked.path, asked.body, asked.headers)
        go(made[0], send)
        stage.wait_out()
        go(made[0], send)
        assert made[0].phase == "wait"
        assert not made[0].hear(invited)
        assert (made[0].phase, made[0].outcome) == ("wait", None)


def test_one_program_that_fills_the_room_does_not_fail_a_study(stage: Masking) -> None:
    """It stops the study while it goes on, as the guide says; but not for good."""
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
        made = parts(them, stage.clock)
        play(stage, made)
    assert {part.outcome for part in made} == {Joined.DONE}


def test_a_cohort_is_drawn_by_lot() -> None:
    """A device that came first is in a cohort as often as any other, and has any number there."""
    waiting = [(number, bytes([number])) for number in range(20)]
    drawn = [_drawn(waiting, 5, SeededRng(seed)) for seed in range(2_000)]
    assert all(len(set(cohort)) == 5 for cohort in drawn)
    assert drawn[0] == _drawn(waiting, 5, SeededRng(0))
    times = np.bincount([number for cohort in drawn for number, _ in cohort], minlength=20)
    # Each is binomial(2000, 1/4), of deviation 19.4. By Bonferroni over 20 devices six deviations
    # are exceeded with probability below 1e-7; the first five always, or never, is 38 or more.
    assert np.abs(times - 500).max() < 6 * 19.4
    firsts = np.bincount([cohort[0][0] for cohort in drawn], minlength=20)
    assert np.abs(firsts - 100).max() < 6 * 9.75  # binomial(2000, 1/20)


def test_a_smaller_cohort_is_taken_when_nobody_more_comes(stage: Masking) -> None:
    study = stage.create(30, dropout=0.2)
    with devices(stage, 26) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        assert stage.state(study)["tasks"][0]["rounds"] == []
        stage.clock.advance(601)
        play(stage, made)
    assert stage.release(study).counts.sum() == 26


def test_a_round_of_which_nobody_may_vanish_is_not_formed(stage: Masking) -> None:
    """As many as the floor wait: a tenth of them are expected to vanish."""
    study = stage.create(40)
    with stage.collector.store.reading() as tx:
        spec = from_json(tx.tasks(study.id)[0].spec)
    with Http(stage.collector.address) as send:
        waiting(stage, send, spec.min_count)
        for _ in range(2):
            stage.work()
            stage.clock.advance(601)
        stage.work()
        assert stage.state(study)["tasks"][0]["rounds"] == []
        waiting(stage, send, 36 - spec.min_count)  # of which one in a thousand is below the floor
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
        metrics = stage.worker._rounds._metrics = Metrics()
        for _ in range(MOST_LOST):
            with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
                made = parts(them, stage.clock)
                for part in made:
                    go(part, send)
                stage.work()
                asked = made[0].request(0)
                made[0].hear(send(asked.method, asked.path, asked.body, asked.headers))
                assert made[0]._participant is not None
                made[0]._participant.seed = bytes(range(32))
                play(stage, made)
                stage.work()
        shown = stage.state(study)
        assert shown["state"] == "failed"
        assert "2 masked rounds were charged and opened nothing" in shown["problem"]
        assert "another secret than it had committed to" in shown["problem"]
        assert "member" not in shown["problem"]  # whose fault it was
        assert stage.charges() == MOST_LOST < stage.tries
        assert 'sfumato_rounds_total{outcome="false_secret"} 2' in metrics.text()


def test_a_rounds_memory_goes_when_its_study_is_deleted(stage: Masking) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        assert stage.worker._rounds._coordinators
        studies.delete(stage.collector.store, study.id)
        stage.work()
    assert not stage.worker._rounds._coordinators


@pytest.mark.parametrize("cohort", [12, 100, 10_000])
def test_a_message_may_be_as_long_as_any_that_is_taken_and_not_much_longer(cohort: int) -> None:
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


def test_what_is_refused_is_not_kept(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        asked = made[0].request(0)
        made[0].hear(send(asked.method, asked.path, asked.body, asked.headers))
        asked = made[0].request(0)
        send(asked.method, asked.path, bytes(len(asked.body)), asked.headers)
        stage.work()
        with stage.collector.store.reading() as tx:
            (kept,) = tx._run("SELECT outcome, LENGTH(body) FROM round_message")
    assert kept[0] not in ("", "taken")
    assert kept[1] == 0


def test_a_round_whose_rows_do_not_agree_fails_its_study(stage: Masking) -> None:
    """A table is said to be in the sum and is not: to make the round from rows again would not
    help, and a worker must not try for ever."""
    study = stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for _ in range(3):
            for part in made:
                go(part, send, until="mask")
            stage.work()
        go(made[0], send)
        with stage.collector.store.transaction() as tx:
            tx._run("UPDATE round_message SET outcome = 'taken' WHERE phase = 'mask'")
        stage.restart()
        stage.work()  # or it finds work for ever
    shown = stage.state(study)
    assert shown["state"] == "failed"
    assert "do not agree: the sum is of 0 tables, and 1 were taken" in shown["problem"]


def test_a_ticket_keeps_one_connection(tmp_path: Path) -> None:
    """Each question of it ends the one before, so that others are still answered."""
    with masking(tmp_path, connections=10) as stage:
        study = stage.create(COUNT)
        task = stage.state(study)["tasks"][0]["id"]
        headers = {"Authorization": f"Ticket {secrets.token_hex(32)}"}
        path = f"/v1/tasks/{task}/join"
        ask(stage.collector.address, "POST", path, secrets.token_bytes(32), headers=headers)
        held: list[http.client.HTTPConnection] = []
        for _ in range(12):  # more than there may be
            held.append(http.client.HTTPConnection(stage.collector.address[7:], timeout=20))
            held[-1].request("GET", "/v1/tickets", headers=headers)
            if len(held) > 1:
                answer = held[-2].getresponse()
                assert (answer.status, answer.getheader("connection")) == (204, "close")
        assert ask(stage.collector.address, "GET", "/health").status == 200
        for connection in held:
            connection.close()

"""Masked rounds over real HTTP: exact sums, messages that count once, clean ends."""

from __future__ import annotations

import hashlib
import http.client
import secrets
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databases import execute
from masking import NAME, PHASE_SECONDS, Masking, agreed, devices, go, masking, parts, play
from serving import Answer, ask, settings, wait_for
from sfumato.collector import studies
from sfumato.collector.serve import running
from sfumato.collector.store.ledger import StoreLedger
from sfumato.device import Device, Http, MemoryBox, RoundClient, RoundOutcome
from sfumato.device.outbox import Outcome
from sfumato.spec import from_json

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


def send_message(
    stage: Masking, part: RoundClient, body: bytes | None = None, **changed: Any
) -> Answer:
    """Send the next message of a part, or one with another body, ticket or path."""
    request = part.request(0)
    path = str(changed.get("path", request.path))
    headers = changed.get("headers", request.headers)
    return ask(
        stage.collector.address,
        str(changed.get("method", request.method)),
        path,
        request.body if body is None else body,
        headers=headers,
    )


def rows(stage: Masking, sql: str) -> list[Any]:
    return execute(stage.collector.service.settings.store, sql)


def in_phase(stage: Masking, members: list[RoundClient], phase: str, send: Http) -> None:
    """Bring all members to the point where they send their messages of the phase."""
    for _ in range(8):
        for part in members:
            while (
                part.outcome is None and part.request(0).path.split("?")[0].split("/")[-2] != phase
            ):
                request = part.request(0)
                if not part.receive(
                    send(request.method, request.path, request.body, request.headers)
                ):
                    break
            if part.outcome is None and part.waits and part.phase == phase:
                request = part.request(0)
                part.receive(send(request.method, request.path, request.body, request.headers))
        if all(part.phase == phase and not part.waits for part in members):
            return
        stage.work()
    raise AssertionError(f"the phase {phase} does not come")


def test_a_round_adds_up_every_table_once_and_is_charged_once(stage: Masking) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members)
    assert [part.outcome for part in members] == [RoundOutcome.DONE] * COUNT
    release = stage.release(study)
    assert release.counts.tolist() == [1.0] * COUNT
    assert release.cost.devices == COUNT
    assert stage.charges() == 1
    assert rows(stage, "SELECT MAX(LENGTH(body)) FROM round_message") == [(0,)]


def test_devices_may_vanish_at_every_step(stage: Masking) -> None:
    study = stage.create(30, dropout=0.2)
    dropouts = {3: "enrol", 7: "share", 11: "mask", 20: "unmask"}
    with devices(stage, 30) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members, leaving=dropouts)
    release = stage.release(study)
    counted = {
        item for item, count in zip(release.items.to_pylist(), release.counts, strict=True) if count
    }
    assert counted == {f"tree {k}" for k in range(30)} - {"tree 3", "tree 7", "tree 11"}
    assert release.counts.sum() == 27
    assert stage.charges() == 1


def test_a_semi_malicious_round_has_acknowledgements(stage: Masking) -> None:
    study = stage.create(40, dropout=0.05, corrupt=0.05, collector="semi_malicious")
    phases: set[str] = set()
    with devices(stage, 40) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members, before_step=phases.add)
    assert "ack" in phases
    assert {part.outcome for part in members} == {RoundOutcome.DONE}
    assert stage.release(study).counts.sum() == 40


@pytest.mark.parametrize("phase", ["enrol", "share", "mask", "unmask"])
def test_a_worker_continues_from_the_rows_after_a_restart(stage: Masking, phase: str) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, phase, send)
        for part in members[: COUNT // 2]:
            assert send_message(stage, part).status == 201
        stage.worker.step()
        stage.restart()
        stage.clock.advance(PHASE_SECONDS - 1)  # members get the lost time back
        stage.work()
        stage.clock.advance(2)
        stage.work()
        play(stage, members, before_step=lambda _: stage.restart())
    assert {part.outcome for part in members} == {RoundOutcome.DONE}
    assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert stage.charges() == 1


def test_tables_are_added_in_groups_that_a_restart_does_not_add_again(
    stage: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.collector.worker.rounds.GROUP_BYTES", 1)  # one table per group
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, "mask", send)
        for part in members:
            assert send_message(stage, part).status == 201
        for _ in range(5):
            stage.worker.step()
            stage.restart()
        accepted = "SELECT COUNT(*) FROM round_message WHERE phase = 'mask' AND outcome = 'taken'"
        assert rows(stage, accepted) == [(5,)]
        assert rows(stage, f"{accepted} AND LENGTH(body) > 0") == [(0,)]
        play(stage, members)
    assert stage.release(study).counts.tolist() == [1.0] * COUNT


def test_a_worker_that_lost_its_lock_for_a_while_takes_nothing_for_granted(
    stage: Masking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers take turns, each with its memory from the end of its last turn."""
    monkeypatch.setattr("sfumato.collector.worker.rounds.GROUP_BYTES", 1)  # one table per group
    study = stage.create(COUNT)
    first = stage.worker
    stage.restart()
    workers = [first, stage.worker]

    def other(phase: str) -> None:
        workers.reverse()
        stage.worker = workers[0]
        for worker in workers * 3:
            worker.step()

    with devices(stage, COUNT) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members, before_step=other)
    assert {part.outcome for part in members} == {RoundOutcome.DONE}
    assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert stage.charges() == 1


def test_surplus_devices_are_released_when_the_round_is_over(stage: Masking) -> None:
    stage.create(COUNT, rounds=2, dropout=0.0)
    with devices(stage, COUNT // 2 + 2) as fleet:
        members = parts(fleet, stage.clock)
        play(stage, members)
        outcomes = [part.outcome for part in members]
        assert outcomes.count(RoundOutcome.DONE) == COUNT // 2
        assert outcomes.count(RoundOutcome.NOT_NEEDED) == 2


@pytest.mark.parametrize("phase", ["enrol", "share", "mask", "unmask"])
def test_a_message_counts_once_and_another_in_its_place_is_refused(
    stage: Masking, phase: str
) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, phase, send)
        first = members[0].request(0)
        other = bytes([first.body[0] ^ 1]) + first.body[1:]
        assert send_message(stage, members[0]).status == 201
        assert send_message(stage, members[0]).status == 200
        refused = send_message(stage, members[0], other)
        assert (refused.status, refused.code) == (409, "equivocating")
        stage.work()  # it is accepted, and its digest is stored
        assert send_message(stage, members[0]).status == 200
        assert send_message(stage, members[0], other).status == 409
        play(stage, members)
        request = {"method": "PUT", "path": first.path, "headers": first.headers}
        assert (
            send_message(stage, members[0], first.body, **request).status == 200
        )  # after the end, too
        assert send_message(stage, members[0], other, **request).code == "equivocating"
    assert stage.release(study).counts.tolist() == [1.0] * COUNT


def test_a_message_needs_the_ticket_of_its_member(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, "enrol", send)
        own, others = members[0].request(0), members[1].request(0)
        for headers in (others.headers, {}, {"Authorization": "Ticket " + "0" * 64}):
            answer = send_message(stage, members[0], headers=headers)
            assert (answer.status, answer.code) == (403, "wrong-ticket")
            answer = send_message(stage, members[0], b"", method="GET", headers=headers)
            assert answer.code == "wrong-ticket"
        round_id = own.path.split("/")[3]
        for path, code in {
            own.path.replace(round_id, "0" * 32): "unknown-round",
            own.path.replace(round_id, "nothing"): "unknown-round",
            own.path.replace("enrol", "nothing"): "not-found",
            own.path.replace("enrol", "share"): "wrong-phase",
            own.path.replace("enrol", "unmask"): "wrong-phase",
        }.items():
            assert send_message(stage, members[0], path=path).code == code
        assert send_message(stage, members[0], bytes(1_000)).code == "too-large"
        stage.work()
        assert rows(stage, "SELECT COUNT(*) FROM round_message") == [(0,)]


def test_a_late_message_is_refused_and_the_round_goes_on(stage: Masking) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, "enrol", send)
        for part in members[1:]:
            go(part, send)
        stage.wait_out()
        assert send_message(stage, members[0]).code == "wrong-phase"
        go(members[0], send)
        assert members[0].outcome is RoundOutcome.LATE
        play(stage, members[1:])
    assert stage.release(study).counts.sum() == COUNT - 1


def test_a_refused_message_gets_the_reason(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, "enrol", send)
        enrolled = members[0].request(0)
        unsigned = enrolled.body[:-64] + bytes(64)
        assert send_message(stage, members[0], unsigned).status == 201
        stage.work()
        answer = send_message(
            stage, members[0], b"", method="GET", path=enrolled.path.replace("enrol", "share")
        )
        assert (answer.status, answer.code, answer.json()["detail"]) == (
            409,
            "message-refused",
            "unsigned",
        )


def test_a_round_below_its_floor_is_aborted_and_the_next_one_has_other_secrets(
    stage: Masking,
) -> None:
    study = stage.create(COUNT, dropout=0.0)  # one may be missing
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        play(stage, members, leaving={0: "mask", 1: "mask"})
        assert {part.outcome for part in members[2:]} == {RoundOutcome.ABORTED}
        assert stage.charges() == 0
        for part in members[:2]:
            go(part, send)
        assert [part.outcome for part in members[:2]] == [RoundOutcome.ABORTED] * 2
        play(stage, parts(fleet, stage.clock))
    (task,) = stage.state(study)["tasks"]
    assert [each["phase"] for each in task["rounds"]] == ["aborted", "done"]
    assert "too few" in task["rounds"][0]["problem"]
    assert rows(stage, "SELECT COUNT(DISTINCT id) FROM round") == [(2,)]
    assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert stage.charges() == 1


def test_a_study_fails_after_so_many_aborted_rounds_and_says_why(stage: Masking) -> None:
    study = stage.create(COUNT, dropout=0.0)
    with devices(stage, COUNT + 1) as fleet, Http(stage.collector.address) as send:
        for number in range(stage.tries):
            members = parts(fleet[:COUNT], stage.clock)
            for part in members:
                go(part, send)
            stage.work()
            if number == stage.tries - 1:
                (waiting,) = parts(fleet[COUNT:], stage.clock)
                go(waiting, send)
            play(stage, members, leaving={0: "share", 1: "share"})
            for part in members:
                go(part, send)
        assert go(waiting, send).outcome is RoundOutcome.NOT_NEEDED
    state = stage.state(study)
    assert state["state"] == "failed"
    assert "3 masked rounds were aborted" in state["problem"]
    assert "too few" in state["problem"]
    assert stage.charges() == 0


def test_a_sum_that_could_have_been_opened_counts_for_its_devices(stage: Masking) -> None:
    """Too many devices vanish after they learned the survivors: the charge stays on the ledger."""
    study = stage.create(COUNT, dropout=0.0)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        play(stage, members, leaving=dict.fromkeys(range(COUNT - 1), "unmask"))
        assert stage.charges() == 1
        for part in members:
            go(part, send)
        assert {part.outcome for part in members[:-1]} == {RoundOutcome.LOST}
        for device in fleet:  # each has sent its table for this task
            assert device.part(NAME, "tree 0", stage.clock()) is Outcome.LIFETIME_SPENT
    with devices(stage, COUNT) as others:  # these may still be asked
        play(stage, parts(others, stage.clock))
    assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert stage.charges() == 2


def test_a_round_that_the_budget_refuses_opens_nothing(tmp_path: Path) -> None:
    with masking(tmp_path, budget_epsilon=1.0) as stage:
        study = stage.create(COUNT, epsilon=0.9)
        with stage.collector.store.transaction() as tx:  # another study spends it meanwhile
            (task,) = tx.tasks(study.id)
            spec = from_json(task.spec)
            StoreLedger(tx).charge(campaign="other", cohort="x", task="y", loss=spec.loss)
        with devices(stage, COUNT) as fleet:
            members = parts(fleet, stage.clock)
            play(stage, members)
            assert {part.outcome for part in members} == {RoundOutcome.ABORTED}
        state = stage.state(study)
        assert state["state"] == "failed"
        assert "budget" in state["problem"]
        assert stage.charges() == 1


def test_wrong_joins_are_refused(stage: Masking) -> None:
    study = stage.create(COUNT)
    (task,) = stage.state(study)["tasks"]
    path, key = f"/v1/tasks/{task['id']}/join", secrets.token_bytes(32)
    mine, others = ({"Authorization": f"Ticket {secrets.token_hex(32)}"} for _ in range(2))

    def join(body: bytes, headers: dict[str, str], where: str = path) -> Answer:
        return ask(stage.collector.address, "POST", where, body, headers=headers)

    assert join(key, mine).status == 201
    assert join(key, mine).json() == {"ticket": mine["Authorization"].split()[1]}
    assert join(key, mine).status == 200
    assert join(key, others).code == "key-taken"
    assert join(secrets.token_bytes(32), mine).code == "key-taken"
    assert join(b"short", others).code == "malformed-join"
    assert join(bytes(33), others).code == "too-large"
    assert join(key, others, path.replace(task["id"], "0" * 64)).code == "unknown-task"
    ticket_of_server = join(secrets.token_bytes(32), {}).json()["ticket"]

    def placed(ticket: str, path: str = "/v1/tickets?wait=0") -> Answer:
        headers = {"Authorization": f"Ticket {ticket}"}
        return ask(stage.collector.address, "GET", path, headers=headers)

    assert placed(ticket_of_server).status == 204
    assert placed("0" * 64).code == "ticket-over"
    for ticket in ("nothing", ticket_of_server.upper()):
        assert placed(ticket).code == "wrong-ticket"
    # Logs of proxies have paths, so none is a ticket's.
    assert placed(ticket_of_server, f"/v1/tickets/{ticket_of_server}?wait=0").code == "not-found"
    reports = path.replace("join", "reports")
    assert ask(stage.collector.address, "POST", reports, b"x").code == "masked-task"
    assert rows(stage, "SELECT COUNT(*) FROM joined") == [(2,)]
    assert hashlib.sha256(ticket_of_server.encode()).digest() in [
        bytes(ticket) for (ticket,) in rows(stage, "SELECT ticket FROM joined")
    ]  # and nowhere the ticket itself


def test_a_closed_study_releases_waiting_devices(stage: Masking) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT - 3) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        studies.close(stage.collector.store, study.id)
        stage.work()
        for part in members:
            go(part, send)
        assert {part.outcome for part in members} == {RoundOutcome.NOT_NEEDED}
    assert stage.state(study)["problem"].startswith("no device answered")


def test_a_deleted_study_ends_its_round_for_everybody(stage: Masking) -> None:
    study = stage.create(COUNT)
    with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
        members = parts(fleet, stage.clock)
        for part in members:
            go(part, send)
        stage.work()
        in_phase(stage, members, "mask", send)
        go(members[0], send)
        studies.delete(stage.collector.store, study.id)
        stage.work()
        for part in members:
            go(part, send)
        assert all(part.outcome in (RoundOutcome.ABORTED, RoundOutcome.LATE) for part in members)
    for table in ("round", "joined", "round_message"):
        assert rows(stage, f"SELECT COUNT(*) FROM {table}") == [(0,)]  # noqa: S608  # our own names
    assert stage.charges() == 0


def test_several_collectors_share_a_round(store_url: str, tmp_path: Path) -> None:
    """Each device asks another process than before; only one has a worker."""
    with masking(tmp_path, store=store_url) as stage:
        study = stage.create(COUNT)
        with (
            running(settings(tmp_path, store=store_url), with_worker=False) as second,
            devices(stage, COUNT) as fleet,
            Http(stage.collector.address) as one,
            Http(second.address) as other,
        ):
            members = parts(fleet, stage.clock)
            for turn in range(40):
                for place, part in enumerate(members):
                    if part.outcome is None:
                        send = (one, other)[(place + turn) % 2]
                        request = part.request(0)
                        part.receive(
                            send(request.method, request.path, request.body, request.headers)
                        )
                stage.work()
            assert {part.outcome for part in members} == {RoundOutcome.DONE}, stage.state(study)[
                "problem"
            ]
        assert stage.release(study).counts.tolist() == [1.0] * COUNT


def test_waiting_devices_are_woken_at_once_and_by_another_process_soon(tmp_path: Path) -> None:
    """Devices block on their long polls, in both processes; none of them polls repeatedly."""
    with (
        running(settings(tmp_path, worker_seconds=0.3)) as first,
        running(settings(tmp_path), with_worker=False) as second,
    ):
        stage = Masking(first)
        study = stage.create(COUNT)
        ended: list[object] = []

        def live(number: int) -> None:
            send = Http((first, second)[number % 2].address)
            with Device(MemoryBox(), send, bytes.fromhex(first.public_key)) as device:
                agreed(device, stage.clock)
                ended.append(device.join(NAME, f"tree {number}", stage.clock()))

        threads = [threading.Thread(target=live, args=(number,)) for number in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert ended == [RoundOutcome.DONE] * COUNT
        wait_for(lambda: stage.state(study)["state"] == "released", "the release")


def test_a_collector_that_stops_ends_long_polls(tmp_path: Path) -> None:
    with running(settings(tmp_path, shutdown_seconds=20), with_worker=False) as collector:
        study = Masking(collector).create(COUNT)
        (task,) = studies.state(collector.store, study.id)["tasks"]
        joined = ask(
            collector.address, "POST", f"/v1/tasks/{task['id']}/join", secrets.token_bytes(32)
        )
        connection = http.client.HTTPConnection(
            collector.address.removeprefix("http://"), timeout=20
        )
        ticket = {"Authorization": f"Ticket {joined.json()['ticket']}"}
        connection.request("GET", "/v1/tickets", headers=ticket)
        assert not select.select([connection.sock], [], [], 1.0)[0]  # the device waits
        collector.stop()
        assert connection.getresponse().status == 204
        connection.close()

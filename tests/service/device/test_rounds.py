"""A device in masked rounds: what it stores, repeats, refuses and counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from masking import NAME, Masking, agreed, devices, go, masking, parts, play
from serving import wait_for
from sfumato.device import (
    Device,
    Http,
    MemoryBox,
    Response,
    RoundClient,
    RoundOutcome,
    Send,
    SkipReason,
    SqliteBox,
    invitations,
)
from sfumato.device.outbox import Outcome
from sfumato.device.rounds import drive
from sfumato.errors import ServiceError, SpecError
from sfumato.secagg.round import MaskedRound

COUNT = 12
CANARY = "tree 0"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


class Recorder:
    """Records the requests, and may change the answers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.requests: list[tuple[str, str, bytes]] = []
        self.change: Callable[[str, Response], Response] = lambda path, answer: answer

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        self.requests.append((method, path, body))
        return self.change(path, self._send(method, path, body, headers))


def test_an_app_that_crashes_at_every_step_repeats_the_same_messages(
    stage: Masking, tmp_path: Path
) -> None:
    """One device is closed and opened again before and after each of its requests."""
    study = stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        record = Recorder(send)
        path = tmp_path / "device.db"
        box = SqliteBox(path)
        agreed(Device(box, record, key), stage.clock)
        box.close()
        others, outcome = parts(them, stage.clock), None
        for _ in range(60):
            for other in others:
                go(other, send)
            stage.work()
            box = SqliteBox(path)
            part = Device(box, record, key).part(NAME, f"tree {COUNT - 1}", stage.clock())
            assert isinstance(part, RoundClient)
            request = part.request(0)
            answer = record(request.method, request.path, request.body, request.headers)
            box.close()  # the answer is lost
            box = SqliteBox(path)
            part = Device(box, record, key).part(NAME, f"tree {COUNT - 1}", stage.clock())
            assert isinstance(part, RoundClient)
            assert part.request(0).body == request.body
            answer = record(request.method, request.path, request.body, request.headers)
            part.receive(answer)
            outcome = part.outcome
            assert (box.round(NAME) is None) == (outcome is not None)
            box.close()
            if outcome is not None:
                break
        stage.work()
    assert outcome is RoundOutcome.DONE
    puts = [(path, body) for method, path, body in record.requests if method == "PUT"]
    assert len({path for path, _ in puts}) == 4
    assert len(set(puts)) == 4  # to each address always the same bytes
    assert stage.release(study).counts.tolist()[:COUNT] == [1.0] * COUNT


def test_no_value_is_in_the_box_and_no_secret_stays_there(stage: Masking, tmp_path: Path) -> None:
    stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        path = tmp_path / "device.db"
        box = SqliteBox(path)
        device = agreed(Device(box, send, key), stage.clock)
        device.record(NAME, CANARY, stage.clock())
        mine = device.part(NAME, CANARY, stage.clock())
        assert isinstance(mine, RoundClient)
        content = b""

        def read(phase: str) -> None:
            nonlocal content
            row = box.round(NAME)
            content += path.read_bytes() + (row[0].encode() if row else b"")

        play(stage, [mine, *parts(them, stage.clock)], before_step=read)
        assert mine.outcome is RoundOutcome.DONE
        identities = json.loads("[" + ",".join(_states(content)) + "]")
        assert identities  # there was something to check
        # Items appear only in the dictionary, which everybody has.
        dictionary = b"".join(f'"tree {k}"\n'.encode() for k in range(COUNT))
        assert CANARY.encode() not in content.replace(dictionary, b"")
        secret = identities[0]["identity"].encode()
        assert secret not in path.read_bytes()
        box.close()


def _states(content: bytes) -> list[str]:
    """The states of a round among other bytes."""
    decoder, states, at = json.JSONDecoder(), [], 0
    text = content.decode("latin-1")
    while (at := text.find('{"identity":', at)) >= 0:
        try:
            state, end = decoder.raw_decode(text[at:])
        except ValueError:
            at += 1
            continue
        states.append(json.dumps(state))
        at += end
    return states


def _cohort(device: Device, stage: Masking) -> str | None:
    offers = device.offers(stage.clock())
    return offers[0].offer.task.cohort if offers else None


def test_a_device_contributes_once_to_a_task(stage: Masking) -> None:
    stage.create(COUNT, rounds=2, dropout=0.0)
    with devices(stage, COUNT) as them:
        first, second = them[: COUNT // 2], them[COUNT // 2 :]
        play(stage, parts(first, stage.clock))
        wait_for(lambda: _cohort(first[0], stage) == "round 1", "the next round to be offered")
        for device in first:  # it is for others
            assert _cohort(device, stage) == "round 1"
            assert device.part(NAME, "tree 1", stage.clock()) is Outcome.LIFETIME_SPENT
        for device in second:
            device.offers(stage.clock())
        play(stage, parts(second, stage.clock))
    assert stage.charges() == 2


def test_the_same_devices_answer_every_task_of_their_cohort_once(stage: Masking) -> None:
    """A search by prefixes asks every device for each task, and its promise accounts for that."""
    study = stage.create(
        30,
        question="heavy_hitters",
        epsilon=None,
        alphabet="abcdef",
        word_length=8,
        bytes_per_device=6_000,
        threshold=5,
    )
    words = ["defaced"] * 14 + ["facade"] * 10 + ["bead"] * 6
    tasks: list[str] = []
    with devices(stage, 30) as them:
        while stage.state(study)["state"] == "collecting":
            wait_for(lambda: _task(them[0], stage) not in tasks, "the next task")
            joining = []
            for device, word in zip(them, words, strict=True):
                (offered,) = device.offers(stage.clock())
                assert offered.consent == "given"
                part = device.part(NAME, word, stage.clock())
                assert isinstance(part, RoundClient)
                joining.append(part)
            play(stage, joining)
            assert {part.outcome for part in joining} == {RoundOutcome.DONE}
            tasks.append(joining[0].offer.task.id)
    assert len(tasks) == offered.offer.contributions > 1
    release = stage.release(study)
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == {
        "defaced": 14.0,
        "facade": 10.0,
        "bead": 6.0,
    }
    assert stage.charges() == len(tasks)


def _task(device: Device, stage: Masking) -> str:
    offers = device.offers(stage.clock())
    return offers[0].offer.task.id if offers else ""


def test_joining_needs_consent_and_a_masked_study(stage: Masking) -> None:
    stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with Http(stage.collector.address) as send:
        device = Device(MemoryBox(), send, key)
        assert device.join(NAME, "oak", stage.clock()) is SkipReason.NOT_OFFERED
        device.offers(stage.clock())
        assert device.join(NAME, "oak", stage.clock()) is Outcome.NO_CONSENT
        device.consent(NAME)
        assert device.record(NAME, "oak", stage.clock()) is SkipReason.NOT_ASKED_FOR
        assert isinstance(device.part(NAME, "oak", stage.clock()), RoundClient)
        device.withdraw(NAME)
        assert device.part(NAME, "oak", stage.clock()) is Outcome.NO_CONSENT


def _change_body(answer: Response, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Response:
    return replace(answer, body=json.dumps(change(json.loads(answer.body))).encode())


def _sign_again(stage: Masking, key: bytes, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    """A function that changes an invitation's round, or only its signature."""

    def change(envelope: dict[str, Any]) -> dict[str, Any]:
        public = bytes.fromhex(stage.collector.public_key)
        invitation = invitations.verify(envelope, public)
        round: MaskedRound = replace(invitation.round, **changes)
        return envelope | invitations.sign(round, invitation.roster, key)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stage: _sign_again(stage, bytes(32)), "signed"),
        (
            lambda stage: _sign_again(stage, stage.collector.key, task="00" * 32),
            "not match its task",
        ),
        (
            lambda stage: _sign_again(stage, stage.collector.key, dropout=0.8),
            "not match its task",
        ),
        (
            lambda stage: _sign_again(stage, stage.collector.key, corrupt=0.0),
            "not match its task",
        ),
        (lambda stage: lambda data: data | {"member": -1}, "member below"),
        (lambda stage: lambda data: data | {"member": COUNT}, "member below"),
        (lambda stage: lambda data: {"member": 0}, "two texts"),
    ],
    ids=["key", "task", "dropout", "corrupt", "negative", "beyond", "nothing"],
)
def test_an_invitation_that_does_not_fit_the_task_is_refused(
    stage: Masking, change: Callable[[Masking], Callable[[Any], Any]], says: str
) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        recorder = Recorder(send)
        recorder.change = lambda path, answer: _change_body(answer, change(stage))
        go(clients[0], recorder)
        assert clients[0].outcome is RoundOutcome.REFUSED
        assert says in clients[0].problem
        assert len(recorder.requests) == 1  # it sent nothing


@pytest.mark.parametrize("phase", ["share", "mask", "unmask"])
def test_a_changed_message_is_refused_and_nothing_more_is_sent(stage: Masking, phase: str) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        recorder = Recorder(send)

        def flip(path: str, answer: Response) -> Response:
            if f"/{phase}/" not in path or answer.status != 200 or answer.body == b"{}":
                return answer
            if phase == "unmask":  # the list of survivors is empty
                return replace(answer, body=bytes(len(answer.body)))
            middle = len(answer.body) // 2
            body = (
                answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
            )
            return replace(answer, body=body)

        recorder.change = flip
        for _ in range(12):
            for part in clients[1:]:
                go(part, send)
            go(clients[0], recorder)
            stage.work()
            if clients[0].outcome is not None:
                break
        assert clients[0].outcome is RoundOutcome.REFUSED
        puts = [path for method, path, _ in recorder.requests if method == "PUT"]
        assert not [path for path in puts if f"/{phase}/" in path]
        part_or_outcome = them[0].part(NAME, "tree 1", stage.clock())
        has_sent_table = phase == "unmask"
        assert (part_or_outcome is Outcome.LIFETIME_SPENT) == has_sent_table


def test_a_busy_or_absent_collector_is_asked_again(stage: Masking) -> None:
    stage.create(COUNT)
    pauses: list[float] = []
    with devices(stage, 1) as (device,), Http(stage.collector.address) as send:
        part = device.part(NAME, "oak", stage.clock())
        assert isinstance(part, RoundClient)
        answers = [Response(429, {"retry-after": "7"}, b"{}"), Response(503, {}, b"{}"), None]

        def unsteady(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            if answers:
                answer = answers.pop(0)
                if answer is None:
                    raise ServiceError("away")
                return answer
            return send(method, path, body, headers) if method == "POST" else Response(410, {}, b"")

        outcome = drive(part, unsteady, lambda: 1.0, pause=pauses.append)
        assert outcome is RoundOutcome.NOT_NEEDED
        assert pauses == [7.5, 1.0, 2.0]


def test_a_collector_that_stays_away_is_left_for_later(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, 1) as (device,):

        def nobody(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            raise ServiceError("away")

        part = device.part(NAME, "oak", stage.clock())
        assert isinstance(part, RoundClient)
        outcome = drive(part, nobody, lambda: 0.0, timeout_seconds=0.0, pause=lambda _: None)
        assert outcome is RoundOutcome.UNREACHABLE
        assert isinstance(device.part(NAME, "oak", stage.clock()), RoundClient)


def test_a_collector_without_progress_in_a_phase_is_left_for_later(stage: Masking) -> None:
    """It may have no worker, for example: it answers every request with 204."""
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        clients = parts(them, stage.clock)
        for part in clients:
            go(part, send)
        stage.work()
        paths: list[str] = []

        def at_once(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            paths.append(path)
            assert len(paths) < 50, "it asks forever"
            return send(method, path.replace("wait=15", "wait=0"), body, headers)

        outcome = drive(clients[0], at_once, lambda: 0.0, timeout_seconds=0.0, pause=lambda _: None)
        assert outcome is RoundOutcome.UNREACHABLE
        assert clients[0].phase == "share"
        assert isinstance(them[0].part(NAME, "tree 0", stage.clock()), RoundClient)  # to continue


def test_only_one_program_drives_a_round_of_a_device(stage: Masking, tmp_path: Path) -> None:
    stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with ExitStack() as stack:
        send = stack.enter_context(Http(stage.collector.address))
        boxes = [SqliteBox(tmp_path / "device.db") for _ in range(2)]
        for box in boxes:
            stack.callback(box.close)
        agreed(Device(boxes[0], send, key), stage.clock)
        one, other = (Device(box, send, key).part(NAME, "oak", stage.clock()) for box in boxes)
        assert isinstance(one, RoundClient)
        assert isinstance(other, RoundClient)
        assert one.request(0).body == other.request(0).body
        go(one, send)
        request = other.request(0)
        answer = send(request.method, request.path, request.body, request.headers)
        with pytest.raises(SpecError, match="only one program"):
            other.receive(answer)

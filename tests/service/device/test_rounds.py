"""A device in masked rounds: what it keeps, repeats, refuses and counts."""

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
    Joined,
    MemoryBox,
    Part,
    Response,
    Send,
    Skipped,
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
    with masking(tmp_path) as made:
        yield made


class Recorder:
    """Notes what is sent, and may change what is answered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.sent: list[tuple[str, str, bytes]] = []
        self.change: Callable[[str, Response], Response] = lambda path, answer: answer

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        self.sent.append((method, path, body))
        return self.change(path, self._send(method, path, body, headers))


def test_an_app_that_crashes_at_every_step_says_the_same_again(
    stage: Masking, tmp_path: Path
) -> None:
    """One device is closed and opened anew before and after each of its requests."""
    study = stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        record = Recorder(send)
        path = tmp_path / "device.db"
        box = SqliteBox(path)
        agreed(Device(box, record, key), stage.clock)
        box.close()
        made, outcome = parts(them, stage.clock), None
        for _ in range(60):
            for other in made:
                go(other, send)
            stage.work()
            box = SqliteBox(path)
            part = Device(box, record, key).part(NAME, f"tree {COUNT - 1}", stage.clock())
            assert isinstance(part, Part)
            asked = part.request(0)
            answer = record(asked.method, asked.path, asked.body, asked.headers)
            box.close()  # the answer is lost
            box = SqliteBox(path)
            part = Device(box, record, key).part(NAME, f"tree {COUNT - 1}", stage.clock())
            assert isinstance(part, Part)
            assert part.request(0).body == asked.body
            answer = record(asked.method, asked.path, asked.body, asked.headers)
            part.hear(answer)
            outcome = part.outcome
            assert (box.round(NAME) is None) == (outcome is not None)
            box.close()
            if outcome is not None:
                break
        stage.work()
    assert outcome is Joined.DONE
    puts = [(path, body) for method, path, body in record.sent if method == "PUT"]
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
        assert isinstance(mine, Part)
        seen = b""

        def look(phase: str) -> None:
            nonlocal seen
            kept = box.round(NAME)
            seen += path.read_bytes() + (kept[0].encode() if kept else b"")

        play(stage, [mine, *parts(them, stage.clock)], before_step=look)
        assert mine.outcome is Joined.DONE
        identities = json.loads("[" + ",".join(_states(seen)) + "]")
        assert identities  # there was something to look at
        # The dictionary, which everybody has, is all that names an item.
        dictionary = b"".join(f'"tree {k}"\n'.encode() for k in range(COUNT))
        assert CANARY.encode() not in seen.replace(dictionary, b"")
        secret = identities[0]["identity"].encode()
        assert secret not in path.read_bytes()
        box.close()


def _states(seen: bytes) -> list[str]:
    """The states of a part among other bytes."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = seen.decode("latin-1")
    while (at := text.find('{"identity":', at)) >= 0:
        try:
            state, end = decoder.raw_decode(text[at:])
        except ValueError:
            at += 1
            continue
        found.append(json.dumps(state))
        at += end
    return found


def _cohort(device: Device, stage: Masking) -> str | None:
    offered = device.offers(stage.clock())
    return offered[0].offer.task.cohort if offered else None


def test_a_device_contributes_once_to_a_task(stage: Masking) -> None:
    stage.create(COUNT, rounds=2, dropout=0.0)
    with devices(stage, COUNT) as them:
        first, second = them[: COUNT // 2], them[COUNT // 2 :]
        play(stage, parts(first, stage.clock))
        asked = "round 1"
        wait_for(lambda: _cohort(first[0], stage) == asked, "the next round to be offered")
        for device in first:  # it is for others
            assert _cohort(device, stage) == asked
            assert device.part(NAME, "tree 1", stage.clock()) is Outcome.LIFETIME_SPENT
        for device in second:
            device.offers(stage.clock())
        play(stage, parts(second, stage.clock))
    assert stage.charges() == 2


def test_the_same_devices_answer_every_task_of_their_cohort_once(stage: Masking) -> None:
    """A search by prefixes asks everybody again and again, as its promise counts with."""
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
    answered: list[str] = []
    with devices(stage, 30) as them:
        while stage.state(study)["state"] == "collecting":
            wait_for(lambda: _task(them[0], stage) not in answered, "the next task")
            joining = []
            for device, word in zip(them, words, strict=True):
                (offered,) = device.offers(stage.clock())
                assert offered.consent == "given"
                part = device.part(NAME, word, stage.clock())
                assert isinstance(part, Part)
                joining.append(part)
            play(stage, joining)
            assert {part.outcome for part in joining} == {Joined.DONE}
            answered.append(joining[0].offer.task.id)
    assert len(answered) == offered.offer.contributions > 1
    release = stage.release(study)
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == {
        "defaced": 14.0,
        "facade": 10.0,
        "bead": 6.0,
    }
    assert stage.charges() == len(answered)


def _task(device: Device, stage: Masking) -> str:
    offered = device.offers(stage.clock())
    return offered[0].offer.task.id if offered else ""


def test_joining_needs_consent_and_a_masked_study(stage: Masking) -> None:
    stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with Http(stage.collector.address) as send:
        device = Device(MemoryBox(), send, key)
        assert device.join(NAME, "oak", stage.clock()) is Skipped.NOT_OFFERED
        device.offers(stage.clock())
        assert device.join(NAME, "oak", stage.clock()) is Outcome.NO_CONSENT
        device.consent(NAME)
        assert device.record(NAME, "oak", stage.clock()) is Skipped.NOT_ASKED_FOR
        assert isinstance(device.part(NAME, "oak", stage.clock()), Part)
        device.withdraw(NAME)
        assert device.part(NAME, "oak", stage.clock()) is Outcome.NO_CONSENT


def _changed(answer: Response, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Response:
    return replace(answer, body=json.dumps(change(json.loads(answer.body))).encode())


def _resigned(stage: Masking, key: bytes, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    """The same invitation with another round in it, or another signature under it."""

    def change(told: dict[str, Any]) -> dict[str, Any]:
        public = bytes.fromhex(stage.collector.public_key)
        invitation = invitations.verify(told, public)
        made: MaskedRound = replace(invitation.round, **changed)
        return told | invitations.sign(made, invitation.roster, key)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stage: _resigned(stage, bytes(32)), "signed"),
        (lambda stage: _resigned(stage, stage.collector.key, task="00" * 32), "not what its task"),
        (lambda stage: _resigned(stage, stage.collector.key, dropout=0.8), "not what its task"),
        (lambda stage: _resigned(stage, stage.collector.key, corrupt=0.0), "not what its task"),
        (lambda stage: lambda told: told | {"member": (told["member"] + 1) % COUNT}, "roster"),
        (lambda stage: lambda told: told | {"member": -1}, "roster"),
        (lambda stage: lambda told: {"member": 0}, "two texts"),
    ],
    ids=["key", "task", "dropout", "corrupt", "member", "negative", "nothing"],
)
def test_an_invitation_that_is_not_the_tasks_is_refused(
    stage: Masking, change: Callable[[Masking], Callable[[Any], Any]], says: str
) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        changed = Recorder(send)
        changed.change = lambda path, answer: _changed(answer, change(stage))
        go(made[0], changed)
        assert made[0].outcome is Joined.REFUSED
        assert says in made[0].problem
        assert len(changed.sent) == 1  # it said nothing


@pytest.mark.parametrize("phase", ["share", "mask", "unmask"])
def test_what_was_changed_on_the_way_is_refused_and_nothing_more_is_said(
    stage: Masking, phase: str
) -> None:
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        changed = Recorder(send)

        def flip(path: str, answer: Response) -> Response:
            if f"/{phase}/" not in path or answer.status != 200 or answer.body == b"{}":
                return answer
            if phase == "unmask":  # nobody is said to have survived
                return replace(answer, body=bytes(len(answer.body)))
            middle = len(answer.body) // 2
            body = (
                answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
            )
            return replace(answer, body=body)

        changed.change = flip
        for _ in range(12):
            for part in made[1:]:
                go(part, send)
            go(made[0], changed)
            stage.work()
            if made[0].outcome is not None:
                break
        assert made[0].outcome is Joined.REFUSED
        said = [path for method, path, _ in changed.sent if method == "PUT"]
        assert not [path for path in said if f"/{phase}/" in path]
        given = them[0].part(NAME, "tree 1", stage.clock())
        assert (given is Outcome.LIFETIME_SPENT) == (phase == "unmask")  # its table had left


def test_a_busy_or_absent_collector_is_asked_again(stage: Masking) -> None:
    stage.create(COUNT)
    pauses: list[float] = []
    with devices(stage, 1) as (device,), Http(stage.collector.address) as send:
        part = device.part(NAME, "oak", stage.clock())
        assert isinstance(part, Part)
        told = [Response(429, {"retry-after": "7"}, b"{}"), Response(503, {}, b"{}"), None]

        def unsteady(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            if told:
                answer = told.pop(0)
                if answer is None:
                    raise ServiceError("away")
                return answer
            return send(method, path, body, headers) if method == "POST" else Response(410, {}, b"")

        ended = drive(part, unsteady, lambda: 1.0, pause=pauses.append)
        assert ended is Joined.NOT_NEEDED
        assert pauses == [7.5, 1.0, 2.0]


def test_a_collector_that_stays_away_is_left_for_later(stage: Masking) -> None:
    stage.create(COUNT)
    with devices(stage, 1) as (device,):

        def nobody(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            raise ServiceError("away")

        part = device.part(NAME, "oak", stage.clock())
        assert isinstance(part, Part)
        ended = drive(part, nobody, lambda: 0.0, patience_seconds=0.0, pause=lambda _: None)
        assert ended is Joined.UNREACHABLE
        assert isinstance(device.part(NAME, "oak", stage.clock()), Part)


def test_a_collector_that_tells_nothing_new_in_a_phase_is_left_for_later(stage: Masking) -> None:
    """It has no worker, say: every question is answered, with 204."""
    stage.create(COUNT)
    with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
        made = parts(them, stage.clock)
        for part in made:
            go(part, send)
        stage.work()
        asked: list[str] = []

        def at_once(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
            asked.append(path)
            assert len(asked) < 50, "it asks for ever"
            return send(method, path.replace("wait=15", "wait=0"), body, headers)

        ended = drive(made[0], at_once, lambda: 0.0, patience_seconds=0.0, pause=lambda _: None)
        assert ended is Joined.UNREACHABLE
        assert made[0].phase == "share"
        assert isinstance(them[0].part(NAME, "tree 0", stage.clock()), Part)  # to go on with


def test_two_programs_of_one_device_do_not_speak_in_its_name(
    stage: Masking, tmp_path: Path
) -> None:
    stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with ExitStack() as stack:
        send = stack.enter_context(Http(stage.collector.address))
        boxes = [SqliteBox(tmp_path / "device.db") for _ in range(2)]
        for box in boxes:
            stack.callback(box.close)
        agreed(Device(boxes[0], send, key), stage.clock)
        one, other = (Device(box, send, key).part(NAME, "oak", stage.clock()) for box in boxes)
        assert isinstance(one, Part)
        assert isinstance(other, Part)
        assert one.request(0).body == other.request(0).body
        go(one, send)
        asked = other.request(0)
        answer = send(asked.method, asked.path, asked.body, asked.headers)
        with pytest.raises(SpecError, match="another program"):
            other.hear(answer)

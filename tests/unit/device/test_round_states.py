"""The state that a device keeps of a masked round, and what becomes of it when things go wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from masking import NAME, Masking, agreed, devices, go, masking, parts, play
from sfumato.device import Device, Http, MemoryBox, Response, RoundClient, RoundOutcome, SqliteBox
from sfumato.device.box import State
from sfumato.device.offers import public_key
from sfumato.errors import StoreFull
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE
from sfumato.flow.task import Task
from sfumato.privacy import SystemRng
from sfumato.secagg.agreement import members_to_bytes
from sfumato.secagg.merkle import Tree
from sfumato.secagg.participant import Participant
from unit.device.test_promises import (
    Offering,
    consenting_device,
    masked_task,
    offer_for,
    offer_with,
    resume,
)

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


def test_nothing_in_the_file_shows_a_table_that_has_arrived(stage: Masking, tmp_path: Path) -> None:
    """Neither the masked table, nor secrets that unmask it or allow testing guesses of it."""
    study = stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        path = tmp_path / "device.db"
        box = SqliteBox(path)
        mine = agreed(Device(box, send, key), stage.clock).part(NAME, "tree 11", stage.clock())
        assert isinstance(mine, RoundClient)
        clients = [*parts(them, stage.clock), mine]
        for _ in range(3):
            for part in clients:
                go(part, send, until="mask")
            stage.work()
        get = mine.request(0)  # the input of its masks
        mine.receive(send(get.method, get.path, get.body, get.headers))
        put, (text, message) = mine.request(0), box.round(NAME) or ("", b"")
        assert (put.method, message) == ("PUT", put.body)
        state = json.loads(json.loads(text)["participant"])
        secrets = [state[name].encode() for name in ("seed", "mask_key", "sharing_seed", "box_key")]
        assert all(secret in path.read_bytes() for secret in secrets)
        mine.receive(send(put.method, put.path, put.body, put.headers))
        assert (box.round(NAME) or ("", b"?"))[1] == b""
        assert not any(secret in path.read_bytes() for secret in [put.body, *secrets])
        box.close()
        box = SqliteBox(path)  # the rest is enough to continue
        again = Device(box, send, key).part(NAME, "tree 11", stage.clock())
        assert isinstance(again, RoundClient)
        play(stage, [*clients[:-1], again])
        box.close()
    assert again.outcome is RoundOutcome.DONE
    assert stage.release(study).counts.tolist() == [1.0] * COUNT


class FullOnce(MemoryBox):
    """A box whose disk is full the first time that a masked table is to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    def keep_round(self, study: str, state: str, message: bytes) -> None:
        if self.is_full and '"stage":"say mask"' in state:
            self.is_full = False
            raise StoreFull("no space")
        super().keep_round(study, state, message)


def test_a_table_that_could_not_be_stored_is_masked_at_the_next_try(stage: Masking) -> None:
    study = stage.create(COUNT, epsilon=1.0)  # with noise, the next try has another table
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        device = agreed(Device(FullOnce(), send, key), stage.clock)
        mine = device.part(NAME, "tree 11", stage.clock())
        assert isinstance(mine, RoundClient)
        clients = [*parts(them, stage.clock), mine]
        for _ in range(3):
            for part in clients:
                go(part, send, until="mask")
            stage.work()
        with pytest.raises(StoreFull):
            go(mine, send)
        assert (mine.phase, mine.outcome) == ("mask", None)
        play(stage, clients)
    assert {part.outcome for part in clients} == {RoundOutcome.DONE}
    assert stage.state(study)["state"] == "released"


def test_a_round_without_parameters_ends_for_the_device() -> None:
    """A signed round of 31 devices, for a task that was planned for 30."""
    task = replace(masked_task(devices=30), max_count=31)
    box = MemoryBox()
    device = consenting_device(Offering(offer_for("Trees", task)), box)
    keys = [bytes([k]) * 32 for k in range(31)]
    participant = Participant.join(
        task.masked_round(31, PLACEHOLDER_NONCE),
        0,
        keys[0],
        Tree([public_key(key) for key in keys]).root,
        rng=SystemRng(),
    )
    part = resume(device, box, "Trees", stage="hear share", participant=participant.to_json())
    part.receive(Response(200, {}, members_to_bytes(set(range(31)), 31) + bytes(32)))
    assert part.outcome is RoundOutcome.REFUSED
    assert part.problem


def test_the_round_of_a_study_that_is_no_longer_offered_is_dropped(tmp_path: Path) -> None:
    """At the second fetch without it: the first may come during its last round."""
    trees, shrubs = (
        offer_for("Trees", masked_task()),
        offer_for("Shrubs", masked_task(campaign="shrubs")),
    )
    for box in (MemoryBox(), SqliteBox(tmp_path / "device.db")):
        collector = Offering(trees, shrubs)
        device = consenting_device(collector, box)
        for study in ("Trees", "Shrubs"):
            assert isinstance(device.part(study, "oak", 1.0), RoundClient)
        collector.offers = [trees]
        device.offers(2.0)
        assert box.round("Shrubs") is not None
        device.offers(3.0)
        assert box.round("Shrubs") is None
        assert box.round("Trees") is not None
        device.close()


@pytest.mark.parametrize(
    ("code", "aborted_round", "outcome"),
    [
        ("ticket-over", "", RoundOutcome.NOT_NEEDED),
        ("ticket-over", "0" * 32, RoundOutcome.ABORTED),  # it was in a round that was aborted
        ("round-aborted", "", RoundOutcome.ABORTED),
        ("round-over", "", RoundOutcome.LATE),
        ("round-over", "0" * 32, RoundOutcome.LATE),
        ("round-lost", "", RoundOutcome.LATE),
    ],
)
def test_a_waiting_device_learns_how_the_round_that_it_missed_ended(
    code: str, aborted_round: str, outcome: RoundOutcome
) -> None:
    box = MemoryBox()
    device = consenting_device(Offering(offer_for("Trees", masked_task())), box)
    part = resume(device, box, "Trees", stage="wait", round_id=aborted_round)
    part.receive(Response(410, {}, json.dumps({"code": code}).encode()))
    assert part.outcome is outcome


@pytest.mark.parametrize("mode", ["semi_honest", "semi_malicious"])
@pytest.mark.parametrize("stage", ["say mask", "hear unmask"])
@pytest.mark.parametrize("code", ["round-aborted", "message-refused", "wrong-phase"])
def test_a_collector_that_may_lie_is_not_believed_that_nothing_was_opened(
    mode: str, stage: str, code: str
) -> None:
    """The attack: it says so about a table that it goes on to open, and the device masks another
    one for the same task. A collector that follows the protocol is believed."""
    box, offer = MemoryBox(), offer_with(mode=mode)
    task = offer.task
    assert isinstance(task, Task)
    device = consenting_device(Offering(offer), box)
    part = resume(device, box, "Trees", stage=stage, round_id="0" * 32)
    with box.transaction():
        state = State.from_json(box.read() or "")
        state.contribute(offer, task).tasks.add(task.id)
        box.write(state.to_json())
    part.receive(Response(410, {}, json.dumps({"code": code}).encode()))
    assert part.outcome is not None
    again = device.part("Trees", "oak", 2.0)
    assert isinstance(again, RoundClient) == (mode == "semi_honest")

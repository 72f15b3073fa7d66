"""What a device keeps of a masked round under way, and what becomes of it when things go wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from masking import NAME, Masking, agreed, devices, go, masking, parts, play
from sfumato.device import Device, Http, Joined, MemoryBox, Part, Response, SqliteBox
from sfumato.device.offers import public_key
from sfumato.errors import StoreFull
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE
from sfumato.privacy import SystemRng
from sfumato.secagg.agreement import members_to_bytes
from sfumato.secagg.participant import Participant
from unit.device.test_promises import Offering, masked, offered
from unit.device.test_promises import agreed as agreed_to

COUNT = 12


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as made:
        yield made


def test_nothing_in_the_file_shows_a_table_that_has_arrived(stage: Masking, tmp_path: Path) -> None:
    """Neither the masked table nor what takes its masks off, or tells by trying what it was."""
    study = stage.create(COUNT)
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        path = tmp_path / "device.db"
        box = SqliteBox(path)
        mine = agreed(Device(box, send, key), stage.clock).part(NAME, "tree 11", stage.clock())
        assert isinstance(mine, Part)
        made = [*parts(them, stage.clock), mine]
        for _ in range(3):
            for part in made:
                go(part, send, until="mask")
            stage.work()
        asked = mine.request(0)  # what it is told before it masks
        mine.hear(send(asked.method, asked.path, asked.body, asked.headers))
        said, (text, message) = mine.request(0), box.round(NAME) or ("", b"")
        assert (said.method, message) == ("PUT", said.body)
        secret = json.loads(json.loads(text)["participant"])
        shown = [secret[name].encode() for name in ("seed", "mask_key", "sharing_seed", "box_key")]
        assert all(each in path.read_bytes() for each in shown)
        mine.hear(send(said.method, said.path, said.body, said.headers))
        assert box.round(NAME) == (mine._text, b"")
        assert not any(each in path.read_bytes() for each in [said.body, *shown])
        box.close()
        box = SqliteBox(path)  # what is left is enough to go on with
        again = Device(box, send, key).part(NAME, "tree 11", stage.clock())
        assert isinstance(again, Part)
        play(stage, [*made[:-1], again])
        box.close()
    assert again.outcome is Joined.DONE
    assert stage.release(study).counts.tolist() == [1.0] * COUNT


class FullOnce(MemoryBox):
    """A box whose disk is full when a masked table is to be kept, once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    def keep_round(self, study: str, state: str, message: bytes) -> None:
        if self.is_full and '"stage":"say mask"' in state:
            self.is_full = False
            raise StoreFull("no space")
        super().keep_round(study, state, message)


def test_a_table_that_could_not_be_kept_is_masked_at_the_next_try(stage: Masking) -> None:
    study = stage.create(COUNT, epsilon=1.0)  # noise: the table is another at the next try
    key = bytes.fromhex(stage.collector.public_key)
    with devices(stage, COUNT - 1) as them, Http(stage.collector.address) as send:
        device = agreed(Device(FullOnce(), send, key), stage.clock)
        mine = device.part(NAME, "tree 11", stage.clock())
        assert isinstance(mine, Part)
        made = [*parts(them, stage.clock), mine]
        for _ in range(3):
            for part in made:
                go(part, send, until="mask")
            stage.work()
        with pytest.raises(StoreFull):
            go(mine, send)
        assert (mine.phase, mine.outcome) == ("mask", None)
        play(stage, made)
    assert {part.outcome for part in made} == {Joined.DONE}
    assert stage.state(study)["state"] == "released"


def test_a_round_without_parameters_ends_for_the_device() -> None:
    """A signed round of 31 devices, of a task that was planned for 30."""
    task = replace(masked(asked=30), max_count=31)
    device = agreed_to(Offering(offered("Trees", task)))
    part = device.part("Trees", "oak", 1.0)
    assert isinstance(part, Part)
    keys = [bytes([k]) * 32 for k in range(31)]
    joined = Participant.join(
        task.masked_round(31, PLACEHOLDER_NONCE),
        0,
        keys[0],
        tuple(public_key(key) for key in keys),
        rng=SystemRng(),
    )
    part._participant = joined
    part._progress = replace(part._progress, stage="hear share", participant=joined.to_json())
    told = members_to_bytes(set(range(31)), 31) + bytes(32)
    part.hear(Response(200, {}, told))
    assert part.outcome is Joined.REFUSED
    assert part.problem


def test_a_round_of_a_study_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """At the second fetch without it: the first may come while its last round is under way."""
    trees, shrubs = offered("Trees", masked()), offered("Shrubs", masked(campaign="shrubs"))
    for box in (MemoryBox(), SqliteBox(tmp_path / "device.db")):
        collector = Offering(trees, shrubs)
        device = agreed_to(collector, box)
        for study in ("Trees", "Shrubs"):
            assert isinstance(device.part(study, "oak", 1.0), Part)
        collector.offers = [trees]
        device.offers(2.0)
        assert box.round("Shrubs") is not None
        device.offers(3.0)
        assert box.round("Shrubs") is None
        assert box.round("Trees") is not None
        device.close()


@pytest.mark.parametrize(
    ("code", "given_up", "outcome"),
    [
        ("ticket-over", "", Joined.NOT_NEEDED),
        ("ticket-over", "0" * 32, Joined.ABORTED),  # it was in a round that was given up
        ("round-aborted", "", Joined.ABORTED),
        ("round-over", "", Joined.LATE),
        ("round-over", "0" * 32, Joined.LATE),
        ("round-lost", "", Joined.LATE),
    ],
)
def test_who_waits_hears_how_the_round_ended_that_it_missed(
    code: str, given_up: str, outcome: Joined
) -> None:
    part = agreed_to(Offering(offered("Trees", masked()))).part("Trees", "oak", 1.0)
    assert isinstance(part, Part)
    part._progress = replace(part._progress, stage="wait", round_id=given_up)
    part.hear(Response(410, {}, json.dumps({"code": code}).encode()))
    assert part.outcome is outcome

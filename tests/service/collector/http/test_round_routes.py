"""What devices in masked rounds are answered: the same by every collector over a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from masking import PHASES, Masking, devices, go, masking, parts
from serving import Answer, ask, settings
from sfumato.collector.serve import CollectorServer, running
from sfumato.device import Http, Joined, Part

COUNT = 12


@contextmanager
def another(folder: Path) -> Iterator[CollectorServer]:
    """Another collector over the same store."""
    with running(settings(folder), with_worker=False) as other:
        yield other


def both(stage: Masking, other: CollectorServer, *asked: Any, **options: Any) -> Answer:
    """What both answer, which must be the same."""
    first, second = (
        ask(address, *asked, **options) for address in (stage.collector.address, other.address)
    )
    assert (first.status, first.body) == (second.status, second.body), asked
    dated = ("date",)
    assert {k: v for k, v in first.headers.items() if k not in dated} == {
        k: v for k, v in second.headers.items() if k not in dated
    }
    return first


def questions(part: Part) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """All that a member may ask, and some that it may not."""
    asked = part.request(0)
    if "/v1/rounds/" not in asked.path:
        yield asked.method, asked.path, asked.headers
        return
    base, _, member = asked.path.split("?")[0].rpartition("/")
    place = base.rpartition("/")[0]
    for phase in (*PHASES, "ack", "nothing"):
        yield "GET", f"{place}/{phase}/{member}?wait=0", asked.headers
    yield "GET", f"{place}/share/{int(member) + 1}?wait=0", asked.headers
    yield "GET", f"{place}/share/{member}?wait=0", {}


def test_every_question_at_every_step_has_one_answer(tmp_path: Path) -> None:
    seen: set[int] = set()
    with masking(tmp_path) as stage, another(tmp_path) as other:
        stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
            made = parts(them, stage.clock)
            for _ in range(12):
                for part in made:
                    go(part, send)
                    if part.outcome is None and part.waits:
                        for method, path, headers in questions(part):
                            seen.add(both(stage, other, method, path, headers=headers).status)
                stage.work()
            assert {part.outcome for part in made} == {Joined.DONE}
    assert seen >= {200, 204, 403, 404, 409}


def test_every_message_has_one_answer(tmp_path: Path) -> None:
    """Said again, another in its place, in another phase, too long, by nobody."""
    with masking(tmp_path) as stage, another(tmp_path) as other:
        stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
            made = parts(them, stage.clock)
            for part in made:
                go(part, send)
            stage.work()
            asked = made[0].request(0)
            assert made[0].hear(send(asked.method, asked.path, asked.body, asked.headers))
            said = made[0].request(0)
            assert said.method == "PUT"
            assert send(said.method, said.path, said.body, said.headers).status == 201
            late = said.path.replace("/enrol/", "/mask/")
            told = [
                both(stage, other, "PUT", path, body, headers=headers).status
                for path, body, headers in [
                    (said.path, said.body, said.headers),
                    (said.path, bytes(len(said.body)), said.headers),
                    (late, b"x", said.headers),
                    (said.path, bytes(10_000), said.headers),
                    (said.path, said.body, {}),
                    (said.path.replace("/enrol/", "/nothing/"), b"x", said.headers),
                ]
            ]
    assert told == [200, 409, 409, 413, 403, 404]


def test_devices_join_or_are_told_why_not(tmp_path: Path) -> None:
    with masking(tmp_path) as stage, another(tmp_path) as other:
        study = stage.create(COUNT)
        path = f"/v1/tasks/{stage.state(study)['tasks'][0]['id']}/join"
        tickets = [{"Authorization": f"Ticket {k:064x}"} for k in range(4)]
        address = stage.collector.address
        first = [ask(address, "POST", path, bytes([k]) * 32, headers=tickets[k]) for k in range(3)]
        assert [answer.status for answer in first] == [201] * 3
        assert first[0].json() == {"ticket": f"{0:064x}"}
        told = [
            both(stage, other, "POST", path, body, headers=headers).status
            for body, headers in [
                (bytes([0]) * 32, tickets[0]),
                (bytes([0]) * 32, tickets[1]),
                (bytes(31), tickets[3]),
                (bytes(100_000), tickets[3]),
            ]
        ]
    assert told == [200, 409, 400, 413]

"""The short way of masked rounds answers as the long one does, and is the usual one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from masking import PHASES, Masking, devices, go, masking, parts
from serving import Answer, ask, settings
from sfumato.collector.http import app
from sfumato.collector.http.service import Service
from sfumato.collector.quick_rounds import QuickRounds
from sfumato.collector.serve import Collector, running
from sfumato.collector.store.store import Store
from sfumato.device import Http, Joined, Part

COUNT = 12
JOIN_PATH = f"/v1/tasks/{'a' * 64}/join"


class Never(QuickRounds):
    """Takes nothing."""

    def may_take(self, scope: Mapping[str, Any]) -> bool:
        return False


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the requests that went the short way."""
    seen: list[str] = []
    take = QuickRounds.take

    def counted(self: QuickRounds, scope: Mapping[str, Any], *arguments: Any) -> bool:
        done = take(self, scope, *arguments)
        if done:
            seen.append(str(scope["method"]))
        return done

    monkeypatch.setattr(QuickRounds, "take", counted)
    return seen


@contextmanager
def slow(folder: Path) -> Iterator[Collector]:
    """Another collector over the same store, without a short way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "QuickRounds", Never)
        collector = running(settings(folder), with_worker=False)
        with collector as other:
            yield other


def both(stage: Masking, other: Collector, *asked: Any, **options: Any) -> Answer:
    """What both answer, which must be the same."""
    quick, long = (
        ask(address, *asked, **options) for address in (stage.collector.address, other.address)
    )
    assert (quick.status, quick.body) == (long.status, long.body), asked
    dated = ("date",)
    assert {k: v for k, v in quick.headers.items() if k not in dated} == {
        k: v for k, v in long.headers.items() if k not in dated
    }
    return quick


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


def test_every_question_at_every_step_has_one_answer(tmp_path: Path, taken: list[str]) -> None:
    seen: set[int] = set()
    with masking(tmp_path) as stage, slow(tmp_path) as other:
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
    assert {"GET", "PUT", "POST"} <= set(taken)


def test_every_message_has_one_answer(tmp_path: Path, taken: list[str]) -> None:
    """Said again, another in its place, in another phase, too long, by nobody."""
    with masking(tmp_path) as stage, slow(tmp_path) as other:
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
    assert taken.count("PUT") >= 2


def test_devices_join_the_short_way_or_are_told_why_not(tmp_path: Path, taken: list[str]) -> None:
    with masking(tmp_path) as stage, slow(tmp_path) as other:
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
    assert "POST" in taken


@pytest.mark.parametrize(
    ("method", "path", "headers", "is_taken"),
    [
        ("GET", "/v1/tickets", [], True),
        ("GET", "/v1/tickets", [(b"content-length", b"0")], True),
        ("GET", "/v1/tickets", [(b"content-length", b"5")], False),  # nobody waits for a body
        ("GET", "/v1/tickets", [(b"transfer-encoding", b"chunked")], False),
        ("GET", "/v1/tickets/more", [], False),
        ("POST", JOIN_PATH, [(b"content-length", b"32")], True),
        ("POST", JOIN_PATH, [(b"content-length", b"65536")], True),
        ("POST", JOIN_PATH, [(b"content-length", b"65537")], False),
        ("POST", JOIN_PATH, [(b"content-length", b"1e3")], False),
        ("POST", JOIN_PATH, [(b"content-length", b"9" * 5_000)], False),
        ("POST", JOIN_PATH, [(b"content-length", b"32"), (b"content-length", b"32")], False),
        ("POST", JOIN_PATH, [(b"content-length", b"3"), (b"transfer-encoding", b"x")], False),
        ("DELETE", JOIN_PATH, [(b"content-length", b"32")], False),
        ("PUT", JOIN_PATH, [(b"content-length", b"32")], False),
        ("PUT", f"/v1/rounds/{'0' * 32}/mask/1", [(b"content-length", b"65536")], True),
        ("PUT", f"/v1/rounds/{'0' * 32}/mask/1", [(b"content-length", b"65537")], False),
        ("POST", f"/v1/rounds/{'0' * 32}/mask/1", [(b"content-length", b"9")], False),
    ],
)
def test_what_may_go_the_short_way(
    tmp_path: Path, method: str, path: str, headers: list[tuple[bytes, bytes]], is_taken: bool
) -> None:
    with closing(Store.open(tmp_path / "collector.db")) as store:
        quick = QuickRounds(Service(store, settings(tmp_path), key=bytes(32)))
        scope = {"method": method, "path": path, "headers": headers}
        assert quick.may_take(scope) is is_taken
        assert quick._long == {}

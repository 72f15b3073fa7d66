"""Answers to devices in masked rounds: every collector over a store gives the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from masking import PHASES, Masking, devices, go, masking, parts
from serving import Answer, ask, settings
from sfumato.collector.serve import CollectorServer, running
from sfumato.device import Http, RoundClient, RoundOutcome

COUNT = 12


@contextmanager
def another(folder: Path) -> Iterator[CollectorServer]:
    """Another collector over the same store."""
    with running(settings(folder), with_worker=False) as other:
        yield other


def both(stage: Masking, other: CollectorServer, *request: Any, **options: Any) -> Answer:
    """The answer of both collectors, which must be the same."""
    first, second = (
        ask(address, *request, **options) for address in (stage.collector.address, other.address)
    )
    assert (first.status, first.body) == (second.status, second.body), request
    dated = ("date",)
    assert {k: v for k, v in first.headers.items() if k not in dated} == {
        k: v for k, v in second.headers.items() if k not in dated
    }
    return first


def requests(part: RoundClient) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Every request that a member may make, and some that it may not."""
    request = part.request(0)
    if "/v1/rounds/" not in request.path:
        yield request.method, request.path, request.headers
        return
    base, _, member = request.path.split("?")[0].rpartition("/")
    place = base.rpartition("/")[0]
    for phase in (*PHASES, "ack", "nothing"):
        yield "GET", f"{place}/{phase}/{member}?wait=0", request.headers
    yield "GET", f"{place}/share/{int(member) + 1}?wait=0", request.headers
    yield "GET", f"{place}/share/{member}?wait=0", {}


def test_every_request_at_every_step_has_one_answer(tmp_path: Path) -> None:
    statuses: set[int] = set()
    with masking(tmp_path) as stage, another(tmp_path) as other:
        stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
            clients = parts(them, stage.clock)
            for _ in range(12):
                for part in clients:
                    go(part, send)
                    if part.outcome is None and part.waits:
                        for method, path, headers in requests(part):
                            answer = both(stage, other, method, path, headers=headers)
                            statuses.add(answer.status)
                stage.work()
            assert {part.outcome for part in clients} == {RoundOutcome.DONE}
    assert statuses >= {200, 204, 403, 404, 409}


def test_every_message_has_one_answer(tmp_path: Path) -> None:
    """The same again, another message, another phase, too long, without a ticket."""
    with masking(tmp_path) as stage, another(tmp_path) as other:
        stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
            clients = parts(them, stage.clock)
            for part in clients:
                go(part, send)
            stage.work()
            request = clients[0].request(0)
            assert clients[0].receive(
                send(request.method, request.path, request.body, request.headers)
            )
            message = clients[0].request(0)
            assert message.method == "PUT"
            assert send(message.method, message.path, message.body, message.headers).status == 201
            late = message.path.replace("/enrol/", "/mask/")
            statuses = [
                both(stage, other, "PUT", path, body, headers=headers).status
                for path, body, headers in [
                    (message.path, message.body, message.headers),
                    (message.path, bytes(len(message.body)), message.headers),
                    (late, b"x", message.headers),
                    (message.path, bytes(10_000), message.headers),
                    (message.path, message.body, {}),
                    (message.path.replace("/enrol/", "/nothing/"), b"x", message.headers),
                ]
            ]
    assert statuses == [200, 409, 409, 413, 403, 404]


def test_devices_join_or_get_the_reason_why_not(tmp_path: Path) -> None:
    with masking(tmp_path) as stage, another(tmp_path) as other:
        study = stage.create(COUNT)
        path = f"/v1/tasks/{stage.state(study)['tasks'][0]['id']}/join"
        tickets = [{"Authorization": f"Ticket {k:064x}"} for k in range(4)]
        address = stage.collector.address
        first = [ask(address, "POST", path, bytes([k]) * 32, headers=tickets[k]) for k in range(3)]
        assert [answer.status for answer in first] == [201] * 3
        assert first[0].json() == {"ticket": f"{0:064x}"}
        statuses = [
            both(stage, other, "POST", path, body, headers=headers).status
            for body, headers in [
                (bytes([0]) * 32, tickets[0]),
                (bytes([0]) * 32, tickets[1]),
                (bytes(31), tickets[3]),
                (bytes(100_000), tickets[3]),
            ]
        ]
    assert statuses == [200, 409, 400, 413]

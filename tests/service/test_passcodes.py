"""Only devices that have a study's passcode report to it, or join its masked rounds."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from collecting import ITEMS, open_task, report, request
from serving import Answer, ask, read, settings, wait_for
from sfumato.collector import studies, tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.problems import Problem
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.store.store import StudyRow
from sfumato.device import (
    Device,
    Http,
    MemoryBox,
    RoundClient,
    RoundOutcome,
    SendSummary,
    SkipReason,
    passcodes,
)
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import ServiceError, SpecError
from sfumato.flow.report import to_frames
from sfumato.privacy import SystemRng
from sfumato.simulation.network_fleet import NetworkFleet

NAME = "Street trees"
DEVICES = 12
CODE, OTHER = passcodes.create(), passcodes.create()
TRUSTS: dict[str, dict[str, Any]] = {
    "local": {"trust": "local", "epsilon": 8.0},
    "central": {"trust": "central", "epsilon": None},
    "secure": {"trust": "secure", "epsilon": None, "dropout": 0.1, "corrupt": 0.05},
}


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorServer]:
    with running(settings(tmp_path)) as collector:
        yield collector


def create(
    collector: CollectorServer, trust: str = "central", code: str | None = CODE, **keys: Any
) -> StudyRow:
    terms: dict[str, Any] = {"delay_seconds": 1}
    if code is not None:
        terms["passcode_digest"] = passcodes.digest(code).hex()
    values = request(NAME, terms=terms, **{"devices": DEVICES, **TRUSTS[trust], **keys})
    return studies.create(
        collector.store, values, key=collector.key, rng=SystemRng(), now=time.time
    )


def post(
    collector: CollectorServer, study: StudyRow, what: str, code: str | None, body: bytes
) -> Answer:
    headers = {} if code is None else {passcodes.HEADER: code}
    path = f"/v1/tasks/{open_task(collector.store, study).id}/{what}"
    return ask(collector.address, "POST", path, body, headers=headers)


def one_report(collector: CollectorServer, study: StudyRow) -> bytes:
    return to_frames([report(open_task(collector.store, study), 3, rng=SystemRng())])


def device_of(collector: CollectorServer, code: str | None) -> Device:
    """A device that consented, and has this passcode."""
    key = bytes.fromhex(collector.public_key)
    device = Device(MemoryBox(), Http(collector.address), key)
    device.offers(time.time())
    device.consent(NAME)
    if code is not None:
        device.set_passcode(NAME, code)
    return device


def fleet(collector: CollectorServer, code: str | None) -> NetworkFleet:
    key, holdings = bytes.fromhex(collector.public_key), [[ITEMS[k % 3]] for k in range(DEVICES)]
    return NetworkFleet(collector.address, key, holdings, connections=2, passcode=code)


@pytest.mark.parametrize(
    "code",
    [None, "", OTHER, CODE[:-1], f"Bearer {CODE}"],
    ids=["none", "empty", "another", "shortened", "with a scheme"],
)
@pytest.mark.parametrize("trust", TRUSTS)
def test_a_stranger_is_refused(collector: CollectorServer, trust: str, code: str | None) -> None:
    study = create(collector, trust)
    if trust == "secure":
        answer = post(collector, study, "join", code, bytes(32))
    else:
        answer = post(collector, study, "reports", code, one_report(collector, study))
    assert (answer.status, answer.code) == (403, "wrong-passcode")
    state = studies.state(collector.store, study.id)
    assert state["received"] == state["tasks"][0]["waiting"] == 0


def test_a_refused_body_is_not_read(collector: CollectorServer) -> None:
    """Nor waited for: the answer comes although nothing of the body does."""
    task, limits = open_task(collector.store, create(collector)), collector.service.settings
    with closing(http.client.HTTPConnection(collector.address.removeprefix("http://"))) as line:
        line.putrequest("POST", f"/v1/tasks/{task.id}/reports")
        line.putheader("Content-Length", str(limits.upload_bytes))
        line.endheaders()
        began = time.monotonic()
        assert read(line).code == "wrong-passcode"
        assert time.monotonic() - began < limits.upload_seconds / 2


@pytest.mark.parametrize("trust", TRUSTS)
def test_devices_with_the_passcode_answer_a_study(collector: CollectorServer, trust: str) -> None:
    study = create(collector, trust)
    with fleet(collector, CODE) as devices:
        summary = devices.ask(NAME)
    assert (summary.sent, summary.refused) == (DEVICES, {})
    wait_for(lambda: studies.state(collector.store, study.id)["state"] == "released", "the release")
    assert studies.state(collector.store, study.id)["counted"] == DEVICES
    if trust != "local":  # there is no noise
        with collector.store.reading() as tx:
            release = json.loads(tx.release(study.id) or "")
        counts = {row["item"]: row["count"] for row in release["estimates"]}
        assert {item: counts[item] for item in ITEMS[:3]} == Counter(
            ITEMS[k % 3] for k in range(DEVICES)
        )


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_device_without_the_passcode_does_not_take_part(
    collector: CollectorServer, trust: str
) -> None:
    """It spends nothing of its ledger on reports that would be refused."""
    create(collector, trust)
    with device_of(collector, None) as device:
        (offered,) = device.known_offers()
        assert offered.offer.passcode
        if trust == "secure":
            assert device.join(NAME, ITEMS[0], time.time()) is SkipReason.NO_PASSCODE
        else:
            assert device.record(NAME, ITEMS[0], time.time()) is SkipReason.NO_PASSCODE
            device.take_part(time.time())
            assert device.log() == []


def test_a_report_that_was_refused_is_sent_with_the_next_passcode(
    collector: CollectorServer,
) -> None:
    study = create(collector)
    later = time.time() + 2 * DAY_SECONDS
    with device_of(collector, OTHER) as device:
        assert device.record(NAME, ITEMS[0], time.time()) == "kept"
        assert device.send(later) == SendSummary(pending=1, wrong_passcode=1)
        device.set_passcode(NAME, OTHER)  # the same: the device waits, as for any refusal
        assert device.send(later) == SendSummary(pending=1)
        device.set_passcode(NAME, CODE)
        assert device.send(later) == SendSummary(delivered=1)
    assert studies.state(collector.store, study.id)["received"] == 1


def test_a_device_with_another_passcode_is_told_so_when_it_joins(
    collector: CollectorServer,
) -> None:
    create(collector, "secure")
    with device_of(collector, OTHER) as device, Http(collector.address) as send:
        assert device.join(NAME, ITEMS[0], time.time()) is RoundOutcome.WRONG_PASSCODE
        device.set_passcode(NAME, CODE)
        part = device.part(NAME, ITEMS[0], time.time())
        assert isinstance(part, RoundClient)
        joining = part.request(0)
        assert CODE not in repr(joining) + repr(part)
        part.receive(send(joining.method, joining.path, joining.body, joining.headers))
        assert part.phase == "wait"
        assert passcodes.HEADER not in part.request(0).headers  # its ticket suffices


def test_a_passcode_is_sent_to_its_study_only(collector: CollectorServer) -> None:
    create(collector)
    values = request("Park trees", devices=DEVICES)
    studies.create(collector.store, values, key=collector.key, rng=SystemRng(), now=time.time)
    headers: dict[str, set[str]] = {}

    def watch(method: str, path: str, body: bytes, extra: Any) -> Any:
        headers.setdefault(path, set()).update(extra)
        return send(method, path, body, extra)

    with Http(collector.address) as send:
        device = Device(MemoryBox(), watch, bytes.fromhex(collector.public_key))
        for offered in device.offers(time.time()):
            device.consent(offered.offer.study)
        device.set_passcode(NAME, CODE)
        for name in (NAME, "Park trees"):
            assert device.record(name, ITEMS[0], time.time()) == "kept"
        assert device.send(time.time() + 2 * DAY_SECONDS).delivered == 2
    task = next(each.offer.task.id for each in device.known_offers() if each.offer.study == NAME)
    assert {path for path, names in headers.items() if passcodes.HEADER in names} == {
        f"/v1/tasks/{task}/reports"
    }


def test_a_passcode_is_replaced_at_once(collector: CollectorServer) -> None:
    study = create(collector)
    body = one_report(collector, study)
    _, token = tokens.create(collector.store, role="admin", name="ops", days=1)
    client = AdminClient(collector.address, token)
    assert post(collector, study, "reports", CODE, body).status == 201
    assert client.replace_passcode(study.id, OTHER)["terms"]["passcode"] is True
    assert post(collector, study, "reports", CODE, body).status == 403
    assert post(collector, study, "reports", OTHER, body).status == 201
    client.close_study(study.id)
    wait_for(lambda: client.study(study.id)["state"] != "closing", "the end of the study")
    with pytest.raises(ServiceError, match="needs no passcode"):
        client.replace_passcode(study.id, CODE)


def test_a_study_that_is_open_to_everybody_stays_so(collector: CollectorServer) -> None:
    """Its offers say that no passcode is needed, and devices have agreed to them."""
    study = create(collector, code=None)
    with pytest.raises(Problem, match="opened without a passcode"):
        studies.replace_passcode(collector.store, study.id, passcodes.digest(CODE).hex())
    for code in (None, CODE):
        answer = post(collector, study, "reports", code, one_report(collector, study))
        assert answer.status == 201


def test_a_digest_that_is_none_is_refused_and_not_shown(collector: CollectorServer) -> None:
    _, token = tokens.create(collector.store, role="admin", name="ops", days=1)
    study = create(collector)
    for wrong in (CODE, "", "ab" * 31, "AB" * 32):
        with pytest.raises(SpecError, match="must be the SHA-256") as caught:
            AdminClient(collector.address, token).create_study(
                request("Park trees", terms={"passcode_digest": wrong})
            )
        path, body = f"/v1/studies/{study.id}/passcode", json.dumps({"passcode_digest": wrong})
        answer = ask(collector.address, "PUT", path, body, token=token)
        assert (answer.status, answer.code) == (422, "invalid-study")
        assert CODE not in str(caught.value) + answer.body.decode()


def test_the_store_has_the_digest_of_a_passcode_until_the_data_is_deleted(
    collector: CollectorServer,
) -> None:
    study = create(collector)
    with collector.store.reading() as tx:
        assert tx.passcodes() == {study.id: passcodes.digest(CODE)}
    studies.delete(collector.store, study.id)
    with collector.store.reading() as tx:
        assert tx.passcodes() == {}
    assert studies.state(collector.store, study.id)["terms"]["passcode"] is True


def test_without_its_digest_a_study_lets_nobody_in(collector: CollectorServer) -> None:
    """A store that lost it must not be open to everybody."""
    study = create(collector)
    with collector.store.transaction() as tx:
        tx.set_passcode(study.id, b"")
    answer = post(collector, study, "reports", CODE, one_report(collector, study))
    assert answer.code == "wrong-passcode"


def test_the_description_has_the_header_and_the_answer(collector: CollectorServer) -> None:
    paths = ask(collector.address, "GET", "/openapi.json").json()["paths"]
    for what in ("reports", "join"):
        operation = paths[f"/v1/tasks/{{task_id}}/{what}"]["post"]
        assert passcodes.HEADER in [each["name"] for each in operation["parameters"]]
        assert "wrong-passcode" in operation["responses"]["403"]["description"]

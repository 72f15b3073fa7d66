"""A flood of well-formed reports does not end a study, nor keep all of its devices out of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from collecting import open_task, report, request
from serving import ask, settings, wait_for
from sfumato.collector import studies
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import StudyRow
from sfumato.device import passcodes
from sfumato.device.client import passcode_headers
from sfumato.flow.report import to_frames
from sfumato.privacy import SystemRng

DEVICES = 1_000
MOST = 1_217  # what the sums of a study of 1,000 devices have room for
FLOOD_SECONDS = 3.0
OPEN_SECONDS = 6


def default_rates(folder: Path) -> Settings:
    return settings(folder, reports_per_second=None)


def opened(collector: CollectorServer, **terms: Any) -> StudyRow:
    values = request(devices=DEVICES, terms=terms)
    row = studies.create(collector.store, values, key=collector.key, rng=SystemRng(), now=time.time)
    assert open_task(collector.store, row).capacity_left == MOST
    return row


def send(
    collector: CollectorServer, study: StudyRow, count: int, passcode: str | None = None
) -> int:
    """Send new reports in one body, and return the status of the answer."""
    task = open_task(collector.store, study)
    frames = to_frames(report(task, k % 60, rng=SystemRng()) for k in range(count))
    headers = passcode_headers(passcode)
    path = f"/v1/tasks/{task.id}/reports"
    return ask(collector.address, "POST", path, frames, headers=headers).status


def flood(
    collector: CollectorServer, study: StudyRow, seconds: float, passcode: str | None = None
) -> int:
    """Send bodies of 20 reports, as fast as possible; return how many reports were stored."""
    stored, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        stored += 20 * (send(collector, study, 20, passcode) == 201)
    return stored


def state(collector: CollectorServer, study: StudyRow) -> dict[str, Any]:
    return studies.state(collector.store, study.id)


def test_one_body_does_not_end_a_study(tmp_path: Path) -> None:
    with running(default_rates(tmp_path)) as collector:
        study = opened(collector)
        assert send(collector, study, MOST) == 413
        assert send(collector, study, DEVICES // 10) == 201  # a tenth may come at once
        assert send(collector, study, 1) == 429
        assert state(collector, study)["received"] == DEVICES // 10


@pytest.mark.slow
def test_many_bodies_do_not_end_a_study_either(tmp_path: Path) -> None:
    with running(default_rates(tmp_path)) as collector:
        study = opened(collector)
        assert 0 < flood(collector, study, FLOOD_SECONDS) <= DEVICES // 10
        assert state(collector, study)["state"] == "collecting"


def test_a_flood_without_the_passcode_takes_nothing_from_devices_that_have_it(
    tmp_path: Path,
) -> None:
    """The whole tenth that may come at once is still there; the control: with the passcode, the
    same flood takes it."""
    code = passcodes.create()
    with running(default_rates(tmp_path)) as collector:
        study = opened(collector, passcode_digest=passcodes.digest(code).hex())
        assert flood(collector, study, 1.0) == flood(collector, study, 1.0, passcodes.create()) == 0
        assert send(collector, study, DEVICES // 10, code) == 201
        assert send(collector, study, 20, code) == 429
        assert state(collector, study)["received"] == DEVICES // 10


@pytest.mark.slow
def test_a_study_that_is_open_for_a_time_has_room_until_its_end(tmp_path: Path) -> None:
    """Whatever rates the settings allow: a device that tries again gets in."""
    with running(settings(tmp_path)) as collector:
        study = opened(collector, open_seconds=OPEN_SECONDS)
        until = open_task(collector.store, study).open_until
        assert until is not None
        stored = flood(collector, study, FLOOD_SECONDS)
        assert DEVICES // 10 < stored < MOST
        wait_for(lambda: send(collector, study, 1) == 201, "an honest device")
        assert state(collector, study)["state"] == "collecting"
        assert time.time() < until
        while time.time() < until - 0.5:
            stored += 20 * (send(collector, study, 20) == 201)
        assert stored > DEVICES  # full, by its plan
        assert state(collector, study)["state"] == "collecting"
        wait_for(lambda: state(collector, study)["state"] == "released", "the release")
        assert time.time() >= until
        assert state(collector, study)["counted"] == stored + 1

"""Honest devices during a flood of ten times their rate: what was acknowledged is counted, and
people are answered."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlencode

import pytest

import flooding
from collecting import ITEMS
from flooding import Orders
from service.processes import Collector, collector, wait_for_end
from serving import ask
from sfumato.collector.client import AdminClient
from sfumato.collector.store.store import Store

PER_SECOND = 100.0  # reports of honest devices
FLOOD = 10  # times that rate, half of it against the same study
VISIT_SECONDS = 0.5  # between the requests of a person
STUDY_VISITS = 10  # visits per new study
PATIENCE_SECONDS = 600.0


def open_study(admin: AdminClient, name: str, devices: int = 1_000_000) -> str:
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": devices}
    request = {"name": name, "purpose": "Which trees to plant.", "study": study, "items": ITEMS}
    return str(admin.create_study(request)["id"])


def task_of(running: Collector, study_id: str) -> str:
    store = Store.open(running.store)
    try:
        with store.reading() as tx:
            (task,) = tx.tasks(study_id)
        return task.spec
    finally:
        store.close()


def start(orders: Orders, file: Path) -> subprocess.Popen[bytes]:
    """A process that writes its tally to a file."""
    with file.open("wb") as stdout:
        return subprocess.Popen(
            [sys.executable, flooding.__file__, json.dumps(asdict(orders))], stdout=stdout
        )


def percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))]


def visit(
    running: Collector, token: str, study_id: str, admin: AdminClient, *, opens: bool
) -> dict[str, float]:
    """How long a person waits for a study, for signing in, and for a new study, if any."""
    host = running.address.removeprefix("http://")
    begin = time.monotonic()
    assert admin.study(study_id)["state"] == "collecting"
    read = time.monotonic()
    form = urlencode({"token": token})
    headers = {
        "Origin": running.address,
        "Host": host,
        "Content-Type": "application/x-www-form-urlencoded",
    }
    assert ask(running.address, "POST", "/dashboard/sign-in", form, headers=headers).status == 303
    signed_in = time.monotonic()
    if opens:
        open_study(admin, secrets.token_hex(4))
    return {
        "study": read - begin,
        "sign-in": signed_in - read,
        "new study": time.monotonic() - signed_in,
    }


@pytest.mark.parametrize(
    "devices",
    [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["50", "10000"],
)
def test_a_flood_costs_no_acknowledged_report_and_keeps_nobody_waiting(
    tmp_path: Path, devices: int
) -> None:
    with collector(tmp_path) as running:
        admin, token = running.admin(), running.token()
        trees, birds = open_study(admin, "Trees"), open_study(admin, "Birds")
        host, port = running.address.removeprefix("http://").split(":")

        def orders(study: str, count: int, per_second: float, connections: int = 0) -> Orders:
            return Orders(
                host=host,
                port=int(port),
                task=task_of(running, study),
                count=count,
                per_second=per_second,
                items=ITEMS,
                connections=connections,
                is_honest=connections == 0,
            )

        share = FLOOD // 2
        files = [tmp_path / name for name in ("honest", "same", "other")]
        loads = (
            orders(trees, devices, PER_SECOND),
            orders(trees, share * devices, share * PER_SECOND, 8),
            orders(birds, share * devices, share * PER_SECOND, 8),
        )
        processes = [start(*arguments) for arguments in zip(loads, files, strict=True)]
        visits: list[dict[str, float]] = []
        try:
            while not visits or processes[0].poll() is None:
                opens = len(visits) % STUDY_VISITS == 0
                visits.append(visit(running, token, trees, admin, opens=opens))
                time.sleep(VISIT_SECONDS)
            for process in processes:
                assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
        honest, same, other = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        assert honest["acknowledged"] == devices
        for study, count in (
            (trees, devices + same["acknowledged"]),
            (birds, other["acknowledged"]),
        ):
            assert admin.study(study)["received"] == count
        admin.close_study(trees)
        assert wait_for_end(admin, trees)["counted"] == devices + same["acknowledged"]
        slowest = {name: max(each[name] for each in visits) for name in visits[0]}
        sys.stdout.write(
            f"\n{devices:,} devices: p50 {percentile(honest['seconds'], 0.5):.3f} s,"
            f" p99 {percentile(honest['seconds'], 0.99):.3f} s, {honest['statuses']};"
            f" flood {same['statuses']} and {other['statuses']};"
            f" {len(visits)} visits, at most {slowest}\n"
        )
        assert max(slowest.values()) < 1, slowest

"""Masked rounds whose collector is killed in every phase, while devices vanish: the sum is exact.

Each device has its own item and there is no noise, so a correct release has a one for every device
whose masked table was acknowledged, and a zero for every other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from service.restarting import Admin, KillableCollector, running_collectors
from sfumato.collector.store.store import Store
from sfumato.device import Device, Http, MemoryBox, Response, RoundClient, RoundOutcome, offers
from sfumato.errors import ServiceError
from sfumato.flow.release import CountRelease
from sfumato.simulation.network_fleet import (
    DROPPED_OUT,
    PHASES,
    RoundSession,
    draw_dropout_phase,
    drive_sessions,
)

NAME = "Street trees"


class Line:
    """A connection to a collector whose address changes at each restart."""

    def __init__(self, collector: KillableCollector) -> None:
        self._collector = collector
        self._address: str | None = None
        self._http: Http | None = None

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        address = self._collector.address
        if address is None:
            raise ServiceError("the collector does not run")
        if address != self._address:
            self.close()
            self._address, self._http = address, Http(address)
        assert self._http is not None  # created with the address
        return self._http(method, path, body, headers)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()


@dataclass
class Fate:
    """Kills the collector once in each of some phases, after some of its messages.

    It ends a phase after its last message, so that nothing depends on the speed of the machine.
    """

    collector: KillableCollector
    kills: Sequence[str]
    coming: Mapping[str, int]  # number of devices that send a message in each phase
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._problem: BaseException | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._live)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _live(self) -> None:
        try:
            with closing(Store.open(self.collector.store)) as store:
                while not self._over.wait(0.005):
                    self._look(store)
        except BaseException as problem:
            self._problem = problem

    def _look(self, store: Store) -> None:
        with store.reading() as tx:
            rows = [tx.round(round_id) for round_id in tx.active_rounds()]
            phases = {row.id: row.phase for row in rows if row is not None}
            counts = {round_id: len(tx.senders(round_id, phases[round_id])) for round_id in phases}
        for round_id, phase in phases.items():
            if phase in set(self.kills) - set(self.killed):
                if counts[round_id] >= 0.3 * self.coming[phase]:
                    self.killed.append(phase)
                    self.collector.kill()
                    self.collector.start()
            elif counts[round_id] >= self.coming[phase]:
                with store.transaction() as tx:
                    row = tx.round(round_id)
                    if row is not None and row.phase == phase:
                        tx.close_phase(round_id)


def run(
    folder: Path,
    devices: int,
    *,
    kills: Sequence[str],
    rates: Mapping[str, float],
    **keys: Any,
) -> tuple[CountRelease, list[RoundSession], int]:
    """Run a study from its creation to its release; return the release, each device's session, and
    the number of charges."""
    collector = KillableCollector(
        folder, f"sqlite:///{folder}/collector.db", worker_seconds=0.05, phase_seconds=600
    )
    study = {"question": "frequencies", "trust": "secure", "epsilon": None, "devices": devices}
    request = {
        "name": NAME,
        "purpose": "Which trees to plant next.",
        "study": {**study, "dropout": 0.1, "corrupt": 0.05, **keys},
        "items": [f"tree {k}" for k in range(devices)],
    }
    chance = np.random.default_rng(SEED)
    with running_collectors(collector):
        admin = Admin([collector])
        study_id, _ = admin.open(request)
        key = offers.public_key(bytes.fromhex((folder / "collector.key").read_text().strip()))
        lines = [Line(collector) for _ in range(4)]
        shared: dict[str, bytes] = {}
        fleet = [Device(MemoryBox(shared), lines[k % 4], key) for k in range(devices)]
        for device in fleet:
            device.offers(time.time())
            device.consent(NAME)
        sessions = []
        for k, device in enumerate(fleet):
            part = device.part(NAME, f"tree {k}", time.time())
            assert isinstance(part, RoundClient), part
            sessions.append(RoundSession(part, draw_dropout_phase(rates, chance)))
        coming = {
            phase: sum(each.dropout_phase not in PHASES[: place + 1] for each in sessions)
            for place, phase in enumerate(PHASES)
        }
        fate = Fate(collector, kills, coming)
        with fate.at_work():
            drive_sessions([(lines[group], sessions[group::4]) for group in range(4)])
            release = CountRelease.from_dict(admin.wait_for_release(study_id))
        for line in lines:
            line.close()
        charged = len(admin.ask(lambda client: client.ledger())["entries"])
    assert sorted(fate.killed) == sorted(kills)
    return release, sessions, charged


def check(release: CountRelease, sessions: Sequence[RoundSession], charged: int) -> None:
    counts = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
    for k, session in enumerate(sessions):
        is_masked = session.dropout_phase not in ("enrol", "share", "mask")
        assert counts[f"tree {k}"] == float(is_masked), (k, session.outcome, session.dropout_phase)
        assert session.outcome == (
            RoundOutcome.DONE if session.dropout_phase is None else DROPPED_OUT
        )
    assert release.cost.devices == release.counts.sum()
    assert charged == 1


def test_a_collector_that_is_killed_twice_gives_an_exact_sum(tmp_path: Path) -> None:
    """A tenth of forty devices vanish."""
    rates = {phase: 0.025 for phase in PHASES if phase != "ack"}  # it has no such phase
    check(*run(tmp_path, 40, kills=["mask", "unmask"], rates=rates, dropout=0.2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_collector_that_is_killed_in_every_phase_gives_an_exact_sum(tmp_path: Path) -> None:
    """Two hundred devices that do not trust the collector; a tenth of them vanish."""
    rates = dict.fromkeys(PHASES, 0.02)
    check(*run(tmp_path, 200, kills=PHASES, rates=rates, collector="semi_malicious"))

"""Masked rounds whose collector is killed in every phase, while devices vanish: the sum is exact.

Each device holds an item of its own and there is no noise, so a correct release has a one for every
device whose masked table was acknowledged, and a zero for every other one.
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
from integration.serving import Admin, Mortal, living
from sfumato.collector.store.store import Store
from sfumato.device import Device, Http, Joined, MemoryBox, Part, Response, offers
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
    """A way to a collector that is somewhere else after each death."""

    def __init__(self, collector: Mortal) -> None:
        self._collector = collector
        self._address: str | None = None
        self._http: Http | None = None

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        address = self._collector.address
        if address is None:
            raise ServiceError("nobody is there")
        if address != self._address:
            self.close()
            self._address, self._http = address, Http(address)
        assert self._http is not None  # it was made with the address
        return self._http(method, path, body, headers)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()


@dataclass
class Fate:
    """Kills the collector once in each of some phases, when some of its messages have come.

    It ends a phase when all have come that will, so that nothing depends on how busy a machine is.
    """

    collector: Mortal
    kills: Sequence[str]
    coming: Mapping[str, int]  # devices that speak in each phase
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
            live = tx._run("SELECT id, phase FROM round WHERE phase NOT IN ('done', 'aborted')")
            came = {round_id: len(tx.senders(round_id, phase)) for round_id, phase in live}
        for round_id, phase in live:
            if phase in set(self.kills) - set(self.killed):
                if came[round_id] >= 0.3 * self.coming[phase]:
                    self.killed.append(phase)
                    self.collector.kill()
                    self.collector.start()
            elif came[round_id] >= self.coming[phase]:
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
    """A study from its creation to its release: what it gave, each device's part, and how often it
    was charged."""
    collector = Mortal(
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
    with living(collector):
        admin = Admin([collector])
        study_id, _ = admin.open(request)
        key = offers.public_key(bytes.fromhex((folder / "collector.key").read_text().strip()))
        lines = [Line(collector) for _ in range(4)]
        shared: dict[str, bytes] = {}
        them = [Device(MemoryBox(shared), lines[k % 4], key) for k in range(devices)]
        for device in them:
            device.offers(time.time())
            device.consent(NAME)
        sessions = []
        for k, device in enumerate(them):
            part = device.part(NAME, f"tree {k}", time.time())
            assert isinstance(part, Part), part
            sessions.append(RoundSession(part, draw_dropout_phase(rates, chance)))
        coming = {
            phase: sum(each.dropout_phase not in PHASES[: place + 1] for each in sessions)
            for place, phase in enumerate(PHASES)
        }
        fate = Fate(collector, kills, coming)
        with fate.at_work():
            drive_sessions([(lines[group], sessions[group::4]) for group in range(4)])
            release = CountRelease.from_dict(admin.released(study_id))
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
        assert session.outcome == (Joined.DONE if session.dropout_phase is None else DROPPED_OUT)
    assert release.cost.devices == release.counts.sum()
    assert charged == 1


def test_a_collector_that_is_killed_twice_gives_an_exact_sum(tmp_path: Path) -> None:
    """Of forty devices a tenth vanish."""
    rates = {phase: 0.025 for phase in PHASES if phase != "ack"}  # which there is not
    check(*run(tmp_path, 40, kills=["mask", "unmask"], rates=rates, dropout=0.2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_collector_that_is_killed_in_every_phase_gives_an_exact_sum(tmp_path: Path) -> None:
    """Two hundred devices that trust the collector with nothing, a tenth of whom vanish."""
    rates = dict.fromkeys(PHASES, 0.02)
    check(*run(tmp_path, 200, kills=PHASES, rates=rates, collector="semi_malicious"))

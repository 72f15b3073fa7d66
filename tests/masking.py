"""A study with masked rounds, its devices and its worker, all driven by a test step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from collecting import Clock
from serving import settings, undocumented_answers, wait_for
from sfumato.collector import studies
from sfumato.collector.metrics import Metrics
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.store.store import StudyRow
from sfumato.collector.worker.rounds import RoundLimits
from sfumato.collector.worker.table_queue import TableQueue
from sfumato.collector.worker.worker import Worker
from sfumato.device import Device, Http, MemoryBox, RoundClient, RoundOutcome, Send
from sfumato.flow.release import CountRelease
from sfumato.privacy import SystemRng

NAME = "Street trees"
PHASES = ("enrol", "share", "mask", "unmask")
PHASE_SECONDS = 60.0


@dataclass
class Masking:
    """A collector without a running worker, and a worker that the test steps."""

    collector: CollectorServer
    clock: Clock = field(default_factory=Clock)
    tries: int = 3
    tables: TableQueue | None = None

    def __post_init__(self) -> None:
        self.changes = 0
        self.metrics = Metrics()
        self.restart()

    def restart(self) -> None:
        """Start another worker, with nothing in memory."""

        def notify() -> None:
            self.changes += 1

        self.worker = Worker(
            self.collector.store,
            key=self.collector.key,
            now=self.clock,
            log=lambda event, **fields: None,
            limits=RoundLimits(cohort_seconds=600, phase_seconds=PHASE_SECONDS, tries=self.tries),
            notify=notify,
            tables=self.tables,
            metrics=self.metrics,
        )

    def create(self, devices: int, **keys: Any) -> StudyRow:
        """A study of one-hot values without noise, unless the keys say otherwise."""
        study = {
            "question": "frequencies",
            "trust": "secure",
            "epsilon": None,
            "devices": devices,
            "dropout": 0.1,
            "corrupt": 0.05,
            **keys,
        }
        request = {
            "name": NAME,
            "purpose": "Which trees to plant next.",
            "study": study,
            "items": names(devices) if study["question"] == "frequencies" else None,
        }
        return studies.create(
            self.collector.store,
            request,
            key=self.collector.key,
            rng=SystemRng(),
            now=self.clock,
        )

    def work(self) -> None:
        for _ in range(1_000):
            if not self.worker.step():
                return
        raise AssertionError("the worker finds work forever")

    def wait_out(self) -> None:
        """Let the phase's time pass."""
        self.clock.advance(PHASE_SECONDS + 2)
        self.work()

    def state(self, study: StudyRow) -> dict[str, Any]:
        return studies.state(self.collector.store, study.id)

    def release(self, study: StudyRow) -> CountRelease:
        with self.collector.store.reading() as tx:
            text = tx.release(study.id)
        assert text is not None, self.state(study)["problem"]
        return CountRelease.from_dict(json.loads(text))

    def charges(self) -> int:
        with self.collector.store.reading() as tx:
            return len(tx.entries())


@contextmanager
def masking(folder: Path, routes: Sequence[BaseRoute] = (), **options: Any) -> Iterator[Masking]:
    with running(settings(folder, **options), with_worker=False, routes=routes) as collector:
        yield Masking(collector)
    assert not undocumented_answers(collector.service)


def names(count: int) -> list[str]:
    return [f"tree {k}" for k in range(count)]


def agreed(device: Device, clock: Clock) -> Device:
    device.offers(clock())
    device.consent(NAME)
    return device


@contextmanager
def devices(masking: Masking, count: int, *, address: str | None = None) -> Iterator[list[Device]]:
    """Devices that consented to the study, on one connection."""
    key = bytes.fromhex(masking.collector.public_key)
    shared: dict[str, bytes] = {}
    with Http(address or masking.collector.address) as send:
        yield [agreed(Device(MemoryBox(shared), send, key), masking.clock) for _ in range(count)]


def parts(devices: Sequence[Device], clock: Clock) -> list[RoundClient]:
    """The parts of the devices, the k-th with the k-th value."""
    results = [device.part(NAME, f"tree {k}", clock()) for k, device in enumerate(devices)]
    assert all(isinstance(part, RoundClient) for part in results), results
    return results  # type: ignore[return-value]  # checked above


def go(part: RoundClient, send: Send, *, until: str | None = None) -> RoundClient:
    """Exchange messages until the device has to wait, or reaches the phase `until`."""
    while part.outcome is None and (until is None or part.phase != until):
        request = part.request(0)
        if not part.receive(send(request.method, request.path, request.body, request.headers)):
            break
    return part


def play(
    masking: Masking,
    parts: Sequence[RoundClient],
    *,
    leaving: dict[int, str] | None = None,
    before_step: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run a whole round: all devices send, then the worker works, until the round is over. The k-th
    device drops out in the phase leaving[k]; the collector waits for it until the phase ends."""
    leaves = leaving or {}
    with Http(masking.collector.address) as send:
        for _ in range(20):
            for place, part in enumerate(parts):
                go(part, send, until=leaves.get(place))
            staying = [part for k, part in enumerate(parts) if k not in leaves]
            if all(part.outcome is not None for part in staying):
                masking.work()
                if leaves:
                    masking.wait_out()
                return
            changes = masking.changes
            before_step(staying[0].phase)
            masking.work()
            if masking.changes == changes:  # a device is missing
                masking.wait_out()
    raise AssertionError(f"the round does not end: {[part.phase for part in parts]}")


def play_on(
    masking: Masking,
    study: StudyRow,
    parts: Sequence[RoundClient],
    send: Send,
    *,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Run a round until its study is released; the collector works by itself, or by `step`."""

    def all_done() -> bool:
        for part in parts:
            go(part, send)
        step()
        return all(part.outcome is not None for part in parts)

    wait_for(all_done, "the devices to be done")
    wait_for(lambda: masking.state(study)["state"] == "released", "the release")
    assert {part.outcome for part in parts} == {RoundOutcome.DONE}

"""Secure studies with default keys, a fifth of whose devices are killed at random moments.

Every device's noised table is recorded as it is masked. The release must be the sum of the tables
that were acknowledged, to the last unit, and its noise must have the variance that the plan states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED
from masking import Masking, masking
from service.processes import collector as running_collector
from sfumato.collector import studies
from sfumato.device import Device, Http, MemoryBox, RoundClient, RoundOutcome, Send
from sfumato.errors import ServiceError
from sfumato.flow.release import CountRelease
from sfumato.privacy import SystemRng

NAME = "Street trees"
ITEMS = 400
KILLED = 0.2  # share of the devices
FALSE_ALARM = 1e-6

MOMENTS = (  # in their order: the phase, and whether the device waits for news
    ("join", False),
    ("wait", True),
    ("enrol", False),
    ("share", True),
    ("share", False),
    ("mask", True),
    ("mask", False),
    ("unmask", True),
    ("unmask", False),
)
BEFORE_THE_TABLE = MOMENTS[: MOMENTS.index(("mask", False))]

Moment = tuple[str, bool]
I64 = npt.NDArray[np.int64]


@dataclass(eq=False)
class MortalDevice:
    """A device's part in a round, until it is killed.

    It is killed at a moment, before or after it sends its request; then it hears no answer.
    """

    part: RoundClient
    killed_at: Moment | None
    sends_last: bool
    is_dead: bool = False
    table: I64 | None = None  # with its noise
    is_counted: bool = False  # whether its masked table was acknowledged

    def __post_init__(self) -> None:
        make = self.part.make_table
        assert make is not None

        def make_and_record(rng: Any) -> I64:
            self.table = make(rng)
            return self.table.copy()

        self.part.make_table = make_and_record

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.part.outcome is not None

    def go(self, send: Send) -> None:
        """Exchange messages until the device has to wait, or is killed."""
        while not self.is_over:
            moment = self.part.phase, self.part.waits
            self.is_dead = moment == self.killed_at
            if self.is_dead and not self.sends_last:
                return
            request = self.part.request(0)
            answer = send(request.method, request.path, request.body, request.headers)
            if moment == ("mask", False) and answer.status in (200, 201):
                self.is_counted = True
            if self.is_dead or not self.part.receive(answer):
                return


@dataclass
class Population:
    """Devices with one item each, a share of which will be killed at random moments."""

    count: int
    moments: Sequence[Moment] = MOMENTS
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def __post_init__(self) -> None:
        self.items = self.chance.integers(0, ITEMS, self.count)
        self.killed = set(self.chance.permutation(self.count)[: round(KILLED * self.count)])

    def devices(self, key: bytes, sends: Sequence[Send], now: float) -> list[MortalDevice]:
        shared: dict[str, bytes] = {}
        results = []
        for number in range(self.count):
            device = Device(MemoryBox(shared), sends[number % len(sends)], key)
            device.offers(now)
            device.consent(NAME)
            part = device.part(NAME, f"tree {self.items[number]}", now)
            assert isinstance(part, RoundClient), part
            moment = self.moments[int(self.chance.integers(len(self.moments)))]
            results.append(
                MortalDevice(
                    part,
                    killed_at=moment if number in self.killed else None,
                    sends_last=bool(self.chance.integers(2)),
                )
            )
        return results

    def check(self, release: CountRelease, devices: Sequence[MortalDevice]) -> None:
        """The release is the sum of the tables that were acknowledged, with the stated noise."""
        places = np.array([int(item.split()[1]) for item in release.items.to_pylist()])
        counts = np.zeros(ITEMS, dtype=np.int64)
        counts[places] = release.counts.astype(np.int64)
        counted = [number for number, device in enumerate(devices) if device.is_counted]
        tables = [table for k in counted if (table := devices[k].table) is not None]
        assert len(tables) == len(counted) == release.cost.devices
        assert np.array_equal(counts, np.sum(tables, axis=0))
        truth = np.bincount(self.items[counted], minlength=ITEMS)
        share = release.plan["parameters"]["noise_scale_of_a_share"]
        variance = share**2 * len(counted)
        assert_noise(counts - truth, variance)
        for wrong in (variance / 2, 2 * variance):  # half or twice the shares are noticed
            with pytest.raises(AssertionError):
                assert_noise(counts - truth, wrong)


def assert_noise(noise: I64, variance: float) -> None:
    """The noise of many cells has this variance: chi-square, with a false alarm of one in a
    million. With 400 cells, half or twice the variance passes with a probability below 1e-4."""
    at_most = stats.chi2.cdf(float(np.sum(noise.astype(np.float64) ** 2)) / variance, noise.size)
    assert FALSE_ALARM / 2 <= at_most <= 1 - FALSE_ALARM / 2, at_most


def request(devices: int) -> dict[str, Any]:
    """A study with default keys: question, trust, epsilon and devices."""
    keys = {"question": "frequencies", "trust": "secure", "epsilon": 1.0, "devices": devices}
    return {
        "name": NAME,
        "purpose": "Which trees to plant next.",
        "study": keys,
        "items": [f"tree {k}" for k in range(ITEMS)],
    }


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


@pytest.mark.parametrize("moments", [MOMENTS, BEFORE_THE_TABLE], ids=["any", "before the table"])
def test_the_sum_over_the_survivors_is_exact(stage: Masking, moments: Sequence[Moment]) -> None:
    """Eight of forty devices; the collector's clock is the test's."""
    study = studies.create(
        stage.collector.store,
        request(40),
        key=stage.collector.key,
        rng=SystemRng(),
        now=stage.clock,
    )
    population = Population(40, moments)
    with Http(stage.collector.address) as send:
        key = bytes.fromhex(stage.collector.public_key)
        devices = population.devices(key, [send], stage.clock())
        while not all(device.is_over for device in devices):
            for device in devices:
                device.go(send)
            changes = stage.changes
            stage.work()
            if stage.changes == changes:  # somebody is missing
                stage.clock.advance(601)
                stage.work()
        stage.clock.advance(601)
        stage.work()
    population.check(stage.release(study), devices)
    assert {device.part.outcome for device in devices} == {None, RoundOutcome.DONE}
    assert stage.charges() == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moments", [MOMENTS, BEFORE_THE_TABLE], ids=["any", "before the table"])
def test_a_collector_in_a_process_of_its_own_opens_an_exact_sum(
    tmp_path: Path, moments: Sequence[Moment]
) -> None:
    """Sixty of three hundred devices, on six connections, in real time; on a slow machine, some of
    the others may be late and count as dropouts."""
    population = Population(300, moments)
    with running_collector(tmp_path, cohort_seconds=10, phase_seconds=10) as collector:
        admin = collector.admin()
        study_id = admin.create_study(request(300))["id"]
        sends = [Http(collector.address) for _ in range(6)]
        devices = population.devices(collector.public_key, sends, time.time())

        def drive(link: int) -> None:
            mine = devices[link :: len(sends)]
            while not all(device.is_over for device in mine):
                for device in mine:
                    try:
                        device.go(sends[link])
                    except ServiceError:  # the collector is busy; ask again
                        device.is_dead = False
                time.sleep(0.05)

        with ThreadPoolExecutor(len(sends)) as threads:
            list(threads.map(drive, range(len(sends))))
        until = time.monotonic() + 60
        while admin.study(study_id)["state"] != "released":
            assert time.monotonic() < until, admin.study(study_id)
            time.sleep(0.2)
        release = CountRelease.from_dict(admin.release(study_id))
        assert len(admin.ledger()["entries"]) == 1
        for send in sends:
            send.close()
    population.check(release, devices)

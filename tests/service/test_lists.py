"""Campaigns over a real network with exactly the results of their simulation, through collectors
that are killed between rounds and in the middle of a round.

Devices draw from `SeededRng(seed, k)` and a study's hash functions and secret from
`SeededRng(seed)`, in both. Nothing else is drawn: the noise on a list is the campaign's own. (Noise
at the release would be the collector's, which has no seed.)
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from service.restarting import Admin, KillableCollector, running_collectors
from sfumato import plan, simulate
from sfumato.collector import studies
from sfumato.collector.store.store import Store
from sfumato.device import Http, Response, offers
from sfumato.privacy import ListedAbove, SeededRng
from sfumato.simulation import network_fleet
from sfumato.simulation.network_fleet import NetworkFleet, draw_holdings
from sfumato.simulation.population import Cohorts, Population
from sfumato.spec import from_json
from sfumato.study import Study

ITEMS = 2  # per device
STUDY: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "adaptive": True,
    "items_per_device": ITEMS,
    "word_length": 4,
}
PROMISED = STUDY | {"epsilon": 8.0, "delta": 1e-2, "bytes_per_device": 6_000}
OPEN = STUDY | {"epsilon": None, "bytes_per_device": 500}
CONNECTIONS = 4  # of the fleet, each with one request at a time


def trees(devices: int) -> dict[str, list[str]]:
    """Items of devices: a few common ones, and many rare ones."""
    chance = np.random.default_rng([SEED, devices])
    numbers = np.minimum(chance.zipf(1.3, devices * ITEMS), 500)
    return {
        "item": [f"t{number}" for number in numbers],
        "device": [f"d{place // ITEMS}" for place in range(numbers.size)],
    }


@dataclass
class Fate:
    """Kills the collector, and restarts it, before certain messages of a study's devices: by the
    number of the step, and the number of messages in it so far.

    A task of plain reports is a step. A masked round has five: join, enrol, share, mask and
    unmask.
    """

    collector: KillableCollector
    deaths: set[tuple[int, int]]
    died: list[tuple[int, int]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)  # by step, in their order
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_by(self, method: str, path: str) -> None:
        if method == "GET":
            return
        step = path.rpartition("/")[0] if method == "PUT" else path  # without the member
        with self._lock:
            self._counts[step] += 1
            moment = (list(self._counts).index(step), self._counts[step] - 1)
            if moment in self.deaths and moment not in self.died:
                self.died.append(moment)
                self.collector.kill()
                self.collector.start()


@dataclass
class Course:
    """The result of a study from its creation to its release, and its sampling rates."""

    estimates: list[dict[str, Any]]
    rates: list[float]


def over_the_network(
    collector: KillableCollector,
    patch: pytest.MonkeyPatch,
    name: str,
    keys: Mapping[str, Any],
    *,
    deaths: Sequence[tuple[int, int]],
    seed: int,
) -> Course:
    """Ask the devices over HTTP, each in the cohort that it has in the simulation."""
    key = bytes.fromhex((collector.folder / "collector.key").read_text().strip())
    request = {
        "name": name,
        "purpose": "Which to plant next.",
        "study": keys,
        "items": dictionary_of(keys),
        "delay_seconds": 1,
    }
    population = Population.load(trees(keys["devices"]), device_column="device")
    fate = Fate(collector, set(deaths))

    class Line(Http):
        def __call__(
            self, method: str, path: str, body: bytes, headers: Mapping[str, str]
        ) -> Response:
            fate.pass_by(method, path)
            return super().__call__(method, path, body, headers)

    patch.setattr(network_fleet, "Http", Line)
    with closing(Store.open(collector.store)) as store:
        row = studies.create(store, request, key=key, rng=SeededRng(seed), now=time.time)
        study, design = from_json(row.study), from_json(row.design)
        assert isinstance(study, Study)
        public = getattr(design, "names", design)  # its seed assigns devices to cohorts
        cohorts = Cohorts.of(study, design, public.seed, population.devices, exact=True)
        assert collector.address is not None
        with NetworkFleet(
            collector.address,
            offers.public_key(key),
            draw_holdings(population, None, None),
            seed=seed,
            connections=CONNECTIONS,
            respondents=lambda cohort: cohorts.numbers(population, cohort).tolist(),
        ) as fleet:
            summary = fleet.ask(name)
        times = 2 if keys["question"] == "histogram" else 1
        assert summary.sent + summary.forgotten == times * keys["devices"]
        # A device whose answer was lost may find its task closed, and its report counted.
        assert summary.forgotten <= CONNECTIONS * len(deaths)
        assert summary.unsent == 0
        released = Admin([collector]).wait_for_release(row.id)
        with store.reading() as tx:
            tasks = [from_json(task.spec) for task in tx.tasks(row.id)]
    assert sorted(fate.died) == sorted(deaths)
    masked = keys["trust"] == "secure" or keys.get("masked", False)
    assert all(task.is_masked == masked for task in tasks)
    listing = [task.mechanism for task in tasks if isinstance(task.mechanism, ListedAbove)]
    return Course(released["estimates"], [mechanism.rate for mechanism in listing])


def dictionary_of(keys: Mapping[str, Any]) -> list[str] | None:
    """The dictionary, if the question has one."""
    return [f"t{number}" for number in range(1, 9)] if keys["question"] == "frequencies" else None


def simulate_study(keys: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    release = simulate(
        plan(dict(keys), items=dictionary_of(keys)),
        trees(keys["devices"]),
        device_column="device",
        seed=seed,
        protocol=True,
    )
    rows: list[dict[str, Any]] = release.to_dict()["estimates"]
    return rows


def check(
    folder: Path,
    patch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    deaths: Sequence[Sequence[tuple[int, int]]],
) -> None:
    """Run a campaign with a privacy guarantee and one without, each through a collector that is
    killed and through one that is not."""
    campaigns = [(PROMISED | sizes, SEED), (OPEN | sizes, SEED + 2)]
    courses: list[list[Course]] = [[], []]
    for place, killing in (("killed", deaths), ("alive", [(), ()])):
        collector = KillableCollector(
            folder / place, f"sqlite:///{folder}/{place}.db", stays=True, worker_seconds=0.05
        )
        with running_collectors(collector):
            for number, (keys, seed) in enumerate(campaigns):
                courses[number].append(
                    over_the_network(
                        collector, patch, f"{number}", keys, deaths=killing[number], seed=seed
                    )
                )
    for (keys, seed), (killed, alive) in zip(campaigns, courses, strict=True):
        expected = simulate_study(keys, seed)
        assert expected
        assert killed.estimates == expected
        assert alive.estimates == expected
        assert killed.rates == alive.rates
        assert len(set(alive.rates)) == sizes["rounds"]  # each table determines the next rate
        assert simulate_study(keys, seed + 1) != expected  # the control


@pytest.mark.slow
def test_a_campaign_whose_collector_is_killed_ends_as_its_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the second of three rounds, and between the second and the third."""
    check(tmp_path, monkeypatch, {"devices": 120, "rounds": 3}, [[(1, 20)], [(2, 0)]])


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_large_campaign_whose_collector_is_killed_ends_as_its_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [(0, 150), (1, 0), (2, 199), (3, 100), (4, 0)]
    check(tmp_path, monkeypatch, {"devices": 1_200, "rounds": 6}, [deaths, deaths])


MASKED = {"masked": True, "corrupt": 0.05, "dropout": 0.0}  # everybody answers
COUNTED = MASKED | {"question": "histogram", "trust": "central", "epsilon": None, "word_length": 4}


def check_masked(
    folder: Path,
    patch: pytest.MonkeyPatch,
    keys: Mapping[str, Any],
    deaths: Sequence[tuple[int, int]],
) -> Course:
    """Run a campaign in masked rounds, through a collector that is killed."""
    store = f"sqlite:///{folder}/collector.db"
    collector = KillableCollector(folder, store, stays=True, worker_seconds=0.05, phase_seconds=600)
    with running_collectors(collector):
        course = over_the_network(collector, patch, "Trees", keys, deaths=deaths, seed=SEED)
    expected = simulate_study(keys, SEED)
    assert expected
    assert course.estimates == expected
    assert simulate_study(keys, SEED + 1) != expected  # the control
    return course


@pytest.mark.slow
def test_a_campaign_in_masked_rounds_ends_as_its_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of the masked tables of the second round."""
    sizes = {"devices": 120, "rounds": 2, "bytes_per_device": 20_000}
    course = check_masked(tmp_path, monkeypatch, PROMISED | MASKED | sizes, [(8, 30)])
    assert len(set(course.rates)) == 2


@pytest.mark.slow
def test_a_histogram_in_masked_rounds_ends_as_its_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the names and the counts. A table is too small for all names."""
    sizes = {"devices": 40, "items_per_device": ITEMS, "bytes_per_device": 2_000}
    check_masked(tmp_path, monkeypatch, COUNTED | sizes, [(5, 0)])


@pytest.mark.slow
def test_noise_in_shares_is_the_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trust "secure" all noise comes from the devices, so both have the same. Killed while
    the first round is unmasked, and between the two."""
    study = {"question": "frequencies", "trust": "secure", "epsilon": 1.0}
    sizes = {"devices": 80, "rounds": 2, "items_per_device": ITEMS, "corrupt": 0.05, "dropout": 0.0}
    check_masked(tmp_path, monkeypatch, study | sizes, [(4, 20), (5, 0)])

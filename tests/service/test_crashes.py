"""A collector is killed repeatedly while devices upload: no acknowledged report is lost, and none
counts twice.

Every device of the central study has its own value, and there is no noise; so each count of the
release must be 0 or 1, and 1 if the report was acknowledged.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from databases import Server
from service.processes import PATIENCE_SECONDS
from service.restarting import (
    Admin,
    Fleet,
    FleetStudy,
    KillableCollector,
    report_maker,
    running_collectors,
)
from sfumato.flow import contribute as device
from sfumato.flow.release import CountRelease
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy import SystemRng

SEED = os.environ.get("SFUMATO_TEST_SEED", "crashes")
THREADS = 6
MOST_ANSWERS = 100  # between two kills
MOST_SECONDS = 0.2  # longest pause before a kill
START_SECONDS = 1.5  # about how long a start takes; some are killed within it


@dataclass(frozen=True)
class Outcome:
    """What became of all reports."""

    kills: int
    restarts: int  # of the database
    acknowledged: int  # reports of both studies
    unique: int  # those of the central study
    unacknowledged: int
    lost: int
    doubled: int
    invented: int  # values that no device sent

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.doubled or self.invented)


def compare(
    cells: Sequence[float],
    central: FleetStudy,
    records: int,
    local: FleetStudy,
    *,
    kills: int,
    restarts: int,
) -> Outcome:
    """Compare the releases with the acknowledged reports."""
    count = np.asarray(cells)
    acknowledged = np.isin(np.arange(count.size), list(central.acknowledged))
    return Outcome(
        kills=kills,
        restarts=restarts,
        acknowledged=len(central.acknowledged) + len(local.acknowledged),
        unique=len(central.acknowledged),
        unacknowledged=sum(each.next_number - len(each.acknowledged) for each in (central, local)),
        lost=int((count[acknowledged] < 1).sum()) + max(0, len(local.acknowledged) - records),
        doubled=int((count > 1).sum()) + max(0, records - local.next_number),
        invented=int((count[central.next_number :] != 0).sum())
        + int((count != np.round(count)).sum()),
    )


class Trial:
    """Two studies, some collectors over one store, and kills."""

    def __init__(self, collectors: Sequence[KillableCollector], *, values: int, seed: str) -> None:
        self.collectors, self.chance = collectors, random.Random(seed)
        self.admin = Admin(collectors)
        self._values, self._rng = values, SystemRng()
        self._central_id, task = self.admin.open(
            _request("One tree each", _items(values), devices=2 * values)
        )
        assert isinstance(task, Task)
        self._task = task
        self.central = FleetStudy(task.id, self._table, most=0)
        self._local_id, task = self.admin.open(
            _request("Street trees", _items(20), trust="local", epsilon=4.0, devices=10_000_000)
        )
        assert isinstance(task, LocalTask)
        self.local = FleetStudy(task.id, report_maker(task))
        self.fleet = Fleet(collectors, [self.central, self.local], threads=THREADS, seed=seed)

    def run(self, kills: int, postgres: Server | None = None, restarts: int = 0) -> Outcome:
        """Kill this many times, the last of them while the studies close; return the outcome."""
        deeds = ["kill"] * kills + ["restart"] * restarts
        self.chance.shuffle(deeds)
        late = max(1, len(deeds) // 8)  # deeds while the studies are closed
        with self.fleet.uploading():
            for number, deed in enumerate(deeds):
                self.central.most = self._values * (number + 1) // len(deeds)
                if number == len(deeds) - late:
                    self._close()
                is_closed = number >= len(deeds) - late
                if deed == "kill":
                    self._kill(is_closed)
                else:
                    assert postgres is not None
                    self._live(is_closed)
                    postgres.restart()
            self._close()
        central = CountRelease.from_dict(self.admin.wait_for_release(self._central_id))
        local = CountRelease.from_dict(self.admin.wait_for_release(self._local_id))
        unexpected = self.fleet.statuses.keys() - {None, 201, 410, 503}
        assert not unexpected, f"{self.fleet.statuses}\n{self.collectors[0].log()}"
        assert central.cost.devices == central.counts.sum()
        return compare(
            self._cells(central),
            self.central,
            local.cost.devices,
            self.local,
            kills=kills,
            restarts=restarts,
        )

    def _cells(self, release: CountRelease) -> list[float]:
        """The released count of each value, by its number."""
        counts = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
        return [counts[item] for item in _items(self._values)]

    def _kill(self, is_closed: bool) -> None:
        victim = self.chance.choice(self.collectors)
        if self.chance.random() < 0.2:  # before it answers for the first time
            victim.kill()
            victim.begin()
            time.sleep(self.chance.uniform(0, START_SECONDS))
        else:
            self._live(is_closed)
        victim.kill()
        victim.start()

    def _live(self, is_closed: bool) -> None:
        """Wait for some acknowledged uploads, unless the studies are closed, and a moment more."""
        answers = 0 if is_closed else self.chance.randint(1, MOST_ANSWERS)
        until = time.monotonic() + PATIENCE_SECONDS
        target = self.fleet.statuses[201] + answers
        while self.fleet.statuses[201] < target:
            assert time.monotonic() < until, self.fleet.statuses
            time.sleep(0.001)
        time.sleep(self.chance.uniform(0, MOST_SECONDS))

    def _close(self) -> None:
        self.admin.ask(lambda client: client.close_study(self._central_id))
        self.admin.ask(lambda client: client.close_study(self._local_id))

    def _table(self, number: int) -> bytes:
        return device.report(self._task, [number], rng=self._rng).to_bytes()


def _items(count: int) -> list[str]:
    return [f"tree {number}" for number in range(count)]


def _request(name: str, items: list[str], **keys: Any) -> dict[str, Any]:
    """A study for more devices than there are, so that it does not close by itself."""
    study = {"question": "frequencies", "trust": "central", "epsilon": None, **keys}
    return {"name": name, "purpose": "Which to plant next.", "items": items, "study": study}


def test_nothing_is_lost_or_doubled_when_a_collector_is_killed(tmp_path: Path) -> None:
    check(on_file(tmp_path, kills=3))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_nothing_is_lost_or_doubled_in_fifty_kills(tmp_path: Path) -> None:
    check(on_file(tmp_path, kills=50))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_nothing_is_lost_or_doubled_in_fifty_kills_and_five_of_their_server(
    tmp_path: Path, postgres: Server, postgres_url: str
) -> None:
    check(on_server(tmp_path, postgres, postgres_url, kills=50, restarts=5))


def on_file(folder: Path, *, kills: int) -> Outcome:
    """One collector over a file."""
    collector = KillableCollector(folder / "one", f"sqlite:///{folder}/collector.db")
    with running_collectors(collector):
        return Trial([collector], values=100 * kills, seed=SEED).run(kills)


def on_server(folder: Path, postgres: Server, url: str, *, kills: int, restarts: int) -> Outcome:
    """Two collectors over a PostgreSQL server, which is killed as well."""
    key = folder / "one" / "collector.key"
    collectors = [KillableCollector(folder / name, url, signing_key=key) for name in ("one", "two")]
    with running_collectors(*collectors):
        trial = Trial(collectors, values=100 * (kills + restarts), seed=SEED)
        return trial.run(kills, postgres, restarts)


def check(outcome: Outcome) -> None:
    print(outcome)  # noqa: T201
    assert outcome.is_sound, outcome
    assert outcome.acknowledged > 20 * outcome.kills, outcome  # or the test shows nothing


@pytest.mark.parametrize(
    ("cells", "records", "fault"),
    [
        ([1, 1, 0, 0], 2, "sound"),
        ([1, 1, 1, 0], 3, "sound"),
        ([1, 0, 0, 0], 2, "lost"),
        ([1, 1, 0, 0], 1, "lost"),
        ([1, 2, 0, 0], 2, "doubled"),
        ([1, 1, 2, 0], 2, "doubled"),
        ([1, 1, 0, 0], 4, "doubled"),
        ([1, 1, 0, 1], 2, "invented"),
        ([1, 1, 0, -1], 2, "invented"),
        ([1, 1.5, 0, 0], 2, "invented"),
    ],
)
def test_lost_and_doubled_reports_are_noticed(cells: list[float], records: int, fault: str) -> None:
    """In both studies, three devices sent something and two were acknowledged."""
    pair = [FleetStudy("", lambda _: b"", next_number=3, acknowledged={0, 1}) for _ in range(2)]
    outcome = compare(cells, pair[0], records, pair[1], kills=0, restarts=0)
    assert outcome.is_sound == (fault == "sound")
    assert outcome.is_sound or getattr(outcome, fault) > 0
    assert (outcome.acknowledged, outcome.unique, outcome.unacknowledged) == (4, 2, 2)

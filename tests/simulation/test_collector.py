"""Random lives of a collector: uploads, replays, crashes, closing; every report counts once.

Each report of a central study without noise has a unique value, so a correct release has a one
in every cell whose report was acknowledged and a zero where none was sent: a two is a replay, and
a zero is a loss. A crash is a store call before or after which everything in memory is thrown away.
A failing run prints its seed; add it to `REGRESSIONS` under a name, so that it is run again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checks import SEED
from collecting import ITEMS, KEY, Clock, report, request, work
from marks import quick
from sfumato.collector import studies
from sfumato.collector.store.store import Store, TaskRow
from sfumato.collector.worker.worker import Worker
from sfumato.device.outbox import DAY_SECONDS
from sfumato.flow import secure_sum
from sfumato.flow.accumulator import records_of
from sfumato.flow.admission import Admission
from sfumato.flow.release import CountRelease
from sfumato.flow.report import from_frames, to_frames
from sfumato.privacy import SeededRng
from sfumato.spec import from_json

RUNS, ROOM_RUNS, SLOW_RUNS, OPERATIONS = 50, 10, 1_000, 28
RETENTION_DAYS = 20
REGRESSIONS: dict[str, str] = {}  # seeds of runs that failed once, by cause
SEEDS = REGRESSIONS | {f"run {number}": f"{SEED} {number}" for number in range(RUNS)}


class Crash(BaseException):
    """The process is gone; nothing in it catches this."""


class Doom:
    """Ends the process at a chosen store call."""

    def __init__(self) -> None:
        self.calls: int | None = None  # number left; None: the process lives
        self.commits_only = False  # count commits, before and after, and no other calls

    def tick(self, *, commit: bool = False) -> None:
        if self.calls is None or (self.commits_only and not commit):
            return
        self.calls -= 1
        if self.calls < 0:
            self.calls = None
            raise Crash


class DoomedStore(Store):
    """A store whose calls, begins and commits may each be the last, before or after they act."""

    doom: Doom

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self.doom.tick()
        with super().transaction() as tx:
            yield _Watched(tx, self.doom)
            self.doom.tick(commit=True)
        self.doom.tick(commit=True)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        self.doom.tick()
        with super().reading() as tx:
            yield _Watched(tx, self.doom)


class _Watched:
    def __init__(self, tx: Any, doom: Doom) -> None:
        self._tx, self._doom = tx, doom

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tx, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._doom.tick()
            answer = method(*arguments, **options)
            self._doom.tick()
            return answer

        return call


@dataclass
class Fate:
    """The state of one study as seen from outside."""

    request: dict[str, Any]
    id: str | None = None
    used: int = 0  # number of categories
    batches: list[tuple[TaskRow, list[bytes]]] = field(default_factory=list)
    category: dict[bytes, int] = field(default_factory=dict)  # of each report
    acknowledged: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)  # sent, but not answered
    copies: int = 0  # reports in acknowledged uploads, with duplicates
    doubtful_copies: int = 0
    released: str | None = None
    stopped: bool = False  # closed, or past its last day, so that it may end before its last round
    deleted: bool = False

    @property
    def is_central(self) -> bool:
        return bool(self.request["study"]["trust"] == "central")


class World:
    """A collector, its devices and its administrator, all driven by one seed."""

    def __init__(self, url: str, seed: str) -> None:
        self.url, self.chance = url, random.Random(seed)
        self.rng = SeededRng(self.chance.getrandbits(32))
        self.clock, self.doom = Clock(), Doom()
        self.fates: list[Fate] = []
        self.open()
        self.store.migrate()

    def open(self) -> None:
        self.store = DoomedStore.open(self.url, now=self.clock)
        assert isinstance(self.store, DoomedStore)
        self.store.doom = self.doom
        self.worker = Worker(
            self.store,
            key=KEY,
            now=self.clock,
            rng=self.rng,
            log=lambda event, **fields: None,
            retention_days=RETENTION_DAYS,
        )

    def close(self) -> None:
        self.store.close()

    def survive(self, operation: Callable[[], None]) -> None:
        """Run an operation; if the process crashes, start it again."""
        try:
            operation()
        except Crash:
            self.close()
            self.open()

    def live(self, operations: int) -> None:
        deeds = {
            self.create: 2,
            self.upload: 8,
            self.replay: 4,
            self.mix: 4,
            self.step: 6,
            self.arm: 4,
            self.wait: 2,
            self.close_study: 1,
            self.delete_study: 0.3,
        }
        self.survive(self.create)
        for deed in self.chance.choices(list(deeds), list(deeds.values()), k=operations):
            self.survive(deed)
            self.survive(self.try_again)
            self.survive(self.look)
        for _ in range(4):  # the end has crashes, too, but finitely many
            self.survive(self.arm)
            self.survive(self.close_all)
            self.survive(lambda: work(self.worker))
        self.doom.calls = None
        self.close_all()
        work(self.worker)

    # Operations

    def create(self) -> None:
        keys: dict[str, Any] = {"devices": self.chance.choice([3, 10, 60])}
        if self.chance.random() < 0.4:
            keys |= {"trust": "local", "epsilon": 4.0, "rounds": self.chance.choice([1, 3])}
        elif self.chance.random() < 0.6:
            keys |= {"rounds": self.chance.choice([2, 3]), "publish": "rounds"}
        closes = self.chance.choice([None, self.clock() // DAY_SECONDS + 2])
        terms = {"closes": None if closes is None else int(closes)}
        fate = Fate(request(f"study {len(self.fates)}", terms=terms, **keys))
        self.fates.append(fate)
        self._create(fate)

    def _create(self, fate: Fate) -> None:
        row = studies.create(self.store, fate.request, key=KEY, rng=self.rng, now=self.clock)
        assert fate.id in (None, row.id), "the same request made another study"
        fate.id = row.id

    def try_again(self) -> None:
        """Create the studies again whose creation was not answered."""
        for fate in self.fates:
            if fate.id is None:
                self._create(fate)

    def upload(self) -> None:
        if pair := self._one_to_ask():
            fate, task = pair
            self.send(fate, task, self._fresh(fate, task))

    def replay(self) -> None:
        if fate := self._one(lambda fate: bool(fate.batches)):
            task, reports = self.chance.choice(fate.batches)
            self.send(fate, task, reports)

    def mix(self) -> None:
        """Upload new reports mixed with some old ones, perhaps twice."""
        if (pair := self._one_to_ask()) is None:
            return
        fate, task = pair
        old = [report for row, batch in fate.batches if row.id == task.id for report in batch]
        again = self.chance.choices(old, k=self.chance.randint(1, 6)) if old else []
        reports = again + self._fresh(fate, task)
        self.chance.shuffle(reports)
        self.send(fate, task, reports)

    def step(self) -> None:
        for _ in range(self.chance.randint(1, 8)):
            self.worker.step()

    def arm(self) -> None:
        self.doom.calls = self.chance.randint(0, 40)

    def wait(self) -> None:
        self.clock.advance(self.chance.choice([70.0, DAY_SECONDS, 3 * DAY_SECONDS]))
        for fate in self.fates:
            closes = fate.request["closes"]
            fate.stopped |= closes is not None and self.clock() // DAY_SECONDS > closes

    def close_study(self) -> None:
        if fate := self._one(lambda fate: not fate.deleted):
            assert fate.id is not None
            fate.stopped = True
            with self.store.reading() as tx:
                row = studies.get_study(tx, fate.id)
            if row.state != "failed":
                studies.close(self.store, fate.id)

    def delete_study(self) -> None:
        if fate := self._one(lambda fate: True):
            assert fate.id is not None
            fate.deleted = True  # perhaps: doubtful cases are not checked
            studies.delete(self.store, fate.id)

    def close_all(self) -> None:
        for fate in self.fates:
            assert fate.id is not None
            fate.stopped = True
            with self.store.reading() as tx:
                row = studies.get_study(tx, fate.id)
            if row.state == "collecting":
                studies.close(self.store, row.id)

    # Invariants

    def look(self) -> None:
        """A release comes after the last round, unless the study was stopped, and never changes."""
        with self.store.reading() as tx:
            for fate in self.fates:
                if fate.id is None:
                    continue
                text = tx.release(fate.id)
                assert fate.released in (None, text), "a release has changed"
                fate.released = text
                if text is not None and not fate.stopped:
                    rounds = fate.request["study"].get("rounds", 1)
                    assert len(tx.tasks(fate.id)) == rounds, "a study ended before its last round"

    def check(self) -> None:
        """Every report counts once, and every opened sum is charged."""
        with self.store.reading() as tx:
            charged = [entry[2] for entry in tx.entries()]
        assert len(set(charged)) == len(charged), "a task was charged twice"
        for fate in self.fates:
            self._check_study(fate, charged)

    def _check_study(self, fate: Fate, charged: list[str]) -> None:
        assert fate.id is not None
        with self.store.reading() as tx:
            row, tasks = studies.get_study(tx, fate.id), tx.tasks(fate.id)
            text = tx.release(fate.id)
            counts = [tx.counts(task.id) for task in tasks]
            waiting = sum(len(tx.pending_uploads(task.id, 1)) for task in tasks)
            sealed = [data for task in tasks for data in tx.sealed_records(task.id)]
        assert {task.state for task in tasks} == {"done"}
        assert waiting == 0, "reports wait for a study that has ended"
        if row.state == "deleted":
            assert sealed == []
            return
        if row.state == "failed":
            assert row.problem.startswith("no device answered"), row.problem
            assert not fate.acknowledged, "a study failed that had reports"
            return
        assert row.state == "released"
        assert text is not None
        release = CountRelease.from_dict(json.loads(text))
        reports = sum(count.get("reports", 0) for count in counts)
        assert len(fate.acknowledged) <= reports <= len(fate.acknowledged | fate.doubtful)
        assert release.cost.devices == reports
        copies = reports + sum(count.get("repeated", 0) for count in counts)
        assert fate.copies <= copies <= fate.copies + fate.doubtful_copies
        assert not any(name.startswith("rejected") for count in counts for name in count)
        if fate.is_central:
            ids = [task.id for task, count in zip(tasks, counts, strict=True) if count]
            assert [task_id for task_id in charged if task_id in ids] == ids
            self._check_cells(fate, release)
        elif sealed:
            assert sum(len(records_of(data)) for data in sealed) == reports

    def _check_cells(self, fate: Fate, release: CountRelease) -> None:
        cells = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
        for category, item in enumerate(ITEMS):
            if category in fate.acknowledged:
                assert cells[item] == 1, f"an acknowledged report counts {cells[item]} times"
            elif category in fate.doubtful:
                assert cells[item] in (0, 1), f"a report counts {cells[item]} times"
            else:
                assert cells[item] == 0, "a report that was never sent counts"

    # Devices

    def _one(self, fits: Callable[[Fate], bool]) -> Fate | None:
        fitting = [fate for fate in self.fates if fate.id is not None and fits(fate)]
        return self.chance.choice(fitting) if fitting else None

    def _one_to_ask(self) -> tuple[Fate, TaskRow] | None:
        """A study and one of its tasks: mostly the last one, whether it is open or not."""
        if (fate := self._one(lambda fate: fate.used < len(ITEMS) - 8)) is None:
            return None
        assert fate.id is not None  # by `_one`
        with self.store.reading() as tx:
            tasks = tx.tasks(fate.id)
        return fate, tasks[-1] if self.chance.random() < 0.9 else self.chance.choice(tasks)

    def _fresh(self, fate: Fate, task: TaskRow) -> list[bytes]:
        return self.new_reports(fate, task, self.chance.randint(1, 8))

    def new_reports(self, fate: Fate, task: TaskRow, count: int) -> list[bytes]:
        """New reports, each with a unique item."""
        reports = []
        for _ in range(count):
            data = report(task, fate.used, rng=self.rng)
            fate.category[data] = fate.used
            fate.used += 1
            reports.append(data)
        fate.batches.append((task, reports))
        return reports

    def send(self, fate: Fate, task: TaskRow, reports: list[bytes]) -> None:
        categories = {fate.category[report] for report in reports}
        admitted = Admission(from_json(task.spec)).admit(to_frames(reports), most_reports=10_000)
        assert len(from_frames(admitted.body)) == admitted.count == len(reports)
        try:
            with self.store.transaction() as tx:
                (stored,) = tx.insert_uploads([(task.id, admitted.count, admitted.body)])
        except Crash:
            fate.doubtful |= categories
            fate.doubtful_copies += len(reports)
            raise
        if stored == "stored":
            fate.acknowledged |= categories
            fate.copies += len(reports)


def run(url: str, seed: str) -> None:
    world = World(url, seed)
    try:
        world.live(OPERATIONS)
        world.check()
    except BaseException as problem:
        problem.add_note(f"seed {seed!r}")
        raise
    finally:
        world.close()


@pytest.mark.parametrize(
    "name", quick(SEEDS, *REGRESSIONS, *(f"run {number}" for number in range(15)))
)
def test_every_acknowledged_report_counts_once_whatever_happens(tmp_path: Path, name: str) -> None:
    run(f"sqlite:///{tmp_path}/collector.db", SEEDS[name])


@pytest.mark.parametrize("number", range(ROOM_RUNS))
def test_every_acknowledged_report_counts_once_in_sums_with_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Reports beyond the capacity of a sum are not acknowledged."""
    monkeypatch.setattr(secure_sum, "most_devices", lambda expected: expected + 2)
    run(f"sqlite:///{tmp_path}/collector.db", f"{SEED} little room {number}")


def test_a_crash_before_or_after_any_commit_of_the_worker_changes_nothing(tmp_path: Path) -> None:
    """The same run, with a crash before and after each commit of the worker."""
    calls = 0
    while crashes(f"sqlite:///{tmp_path}/{calls}.db", calls):
        calls += 1
    assert calls > 20  # otherwise the run is too short


def crashes(url: str, calls: int) -> bool:
    """Run two studies from upload to release; return whether the worker crashed."""
    world = World(url, "a story")
    try:
        requests: list[dict[str, Any]] = [
            request("central", devices=4, rounds=2, publish="rounds"),
            request("local", devices=4, trust="local", epsilon=4.0),
        ]
        world.fates = [Fate(one) for one in requests]
        world.try_again()
        world.doom.calls, world.doom.commits_only = calls, True
        for _ in range(2):
            for fate in world.fates:
                assert fate.id is not None
                lived, world.doom.calls = world.doom.calls, None
                with world.store.reading() as tx:
                    task = tx.tasks(fate.id)[-1]
                world.send(fate, task, world.new_reports(fate, task, 3))
                world.send(fate, task, fate.batches[-1][1])
                world.doom.calls = lived
            for _ in range(2):  # the second time, the worker was started again
                world.survive(lambda: work(world.worker))
        died, world.doom.calls = world.doom.calls is None, None
        world.look()
        world.check()
        assert all(fate.released for fate in world.fates)
        return died
    except BaseException as problem:
        problem.add_note(f"after {calls} commits")
        raise
    finally:
        world.close()


@pytest.mark.parametrize("number", range(2))
def test_every_acknowledged_report_counts_once_on_a_server(server_url: str, number: int) -> None:
    run(server_url, f"{SEED} {server_url.partition(':')[0]} {number}")


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(SLOW_RUNS // 100))
def test_many_lives(tmp_path: Path, hundred: int) -> None:
    for number in range(100):
        run(f"sqlite:///{tmp_path}/{number}.db", f"{SEED} slow {hundred} {number}")

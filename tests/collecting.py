"""Studies, reports and a clock for tests of the collector."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checks import SEED
from sfumato.collector import studies
from sfumato.collector.store.ledger import StoreLedger
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.collector.worker.worker import Worker
from sfumato.device.outbox import DAY_SECONDS
from sfumato.flow import contribute as device
from sfumato.flow.contribute import local_report
from sfumato.flow.release import CountRelease
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Entry, Rng, SeededRng, SystemRng
from sfumato.spec import from_json

KEY = bytes(range(32))
ITEMS = [f"tree {k}" for k in range(60)]
TODAY = 20_000  # days since 1970


class Clock:
    """A clock that stands still until it is advanced."""

    def __init__(self, seconds: float = TODAY * DAY_SECONDS + 1.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


def request(
    name: str = "Street trees",
    *,
    items: Sequence[str] | None = ITEMS,
    terms: dict[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """A request for a study without noise, unless the keys of the study say otherwise."""
    study = {"question": "frequencies", "trust": "central", "epsilon": None, "devices": 40, **keys}
    purpose = "Which trees to plant next."
    return {"name": name, "purpose": purpose, "study": study, "items": items} | (terms or {})


def create(
    store: Store, clock: Clock, *arguments: Any, rng: Rng | None = None, **keys: Any
) -> StudyRow:
    """The study of a `request` with these arguments."""
    values = request(*arguments, **keys)
    return studies.create(store, values, key=KEY, rng=rng or SystemRng(), now=clock)


def open_task(store: Store, study: StudyRow) -> TaskRow:
    """The only open task of a study."""
    with store.reading() as tx:
        (row,) = [row for row in tx.tasks(study.id) if row.state == "open"]
    return row


def report(task: TaskRow, category: int, *, rng: Rng) -> bytes:
    """The report of a device with an item of `ITEMS`."""
    spec: LocalTask | Task | WordTask = from_json(task.spec)
    value: Any = category if spec.takes_categories() else ITEMS[category]
    if isinstance(spec, Task):
        return device.report(spec, [value], rng=rng).to_bytes()
    if isinstance(spec, LocalTask):
        return device.local_report(spec, [value], rng=rng).to_bytes()
    raise AssertionError("for words there is `word`")


def word(task: TaskRow, text: str, *, rng: Rng) -> bytes:
    """The report of a device with a word."""
    spec = from_json(task.spec)
    assert isinstance(spec, WordTask)
    return local_report(spec, [text], rng=rng).to_bytes()


def upload(store: Store, task: TaskRow, reports: Iterable[bytes]) -> bool:
    """Store reports as the service does; return whether the task accepted them."""
    frames = list(reports)
    with store.transaction() as tx:
        return tx.insert_uploads([(task.id, len(frames), to_frames(frames))]) == ["stored"]


def work(worker: Worker, most: int = 1_000) -> None:
    """Step until there is nothing to do."""
    for _ in range(most):
        if not worker.step():
            return
    raise AssertionError(f"the worker finds work after {most} steps")


class Stage:
    """A store, a worker and a clock; `events` has the log."""

    def __init__(self, path: Path | str) -> None:
        self.clock, self.rng, self.path = Clock(), SeededRng(SEED), path
        self.store = Store.open(path, now=self.clock)
        self.store.migrate()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.worker = self.start()

    def start(self, **options: Any) -> Worker:
        return Worker(
            self.store,
            key=KEY,
            now=self.clock,
            rng=self.rng,
            log=lambda event, **fields: self.events.append((event, fields)),
            **options,
        )

    def create(self, *arguments: Any, **keys: Any) -> StudyRow:
        return create(self.store, self.clock, *arguments, rng=self.rng, **keys)

    def answer(self, study: StudyRow, *categories: int) -> list[bytes]:
        """Send one report for each of these categories to the open task."""
        task = open_task(self.store, study)
        reports = [report(task, category, rng=self.rng) for category in categories]
        assert upload(self.store, task, reports)
        return reports

    def state(self, study: StudyRow) -> dict[str, Any]:
        return studies.state(self.store, study.id)

    def release(self, study: StudyRow) -> CountRelease:
        with self.store.reading() as tx:
            text = tx.release(study.id)
        assert text is not None, self.state(study)["problem"]
        return CountRelease.from_dict(json.loads(text))

    def finish(self, study: StudyRow) -> CountRelease:
        studies.close(self.store, study.id)
        work(self.worker)
        return self.release(study)

    def sealed(self, task: TaskRow) -> list[bytes]:
        with self.store.reading() as tx:
            return list(tx.sealed_records(task.id))


def entries_of(store: Store) -> list[Entry]:
    """The charges in the ledger of a store."""
    with store.reading() as tx:
        return StoreLedger(tx).entries()

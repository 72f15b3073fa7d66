"""A worker whose store and clock fail at random, and is killed at random, until all is released."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from collecting import ITEMS, KEY, Clock, create, open_task, report, upload
from sfumato.collector import studies
from sfumato.collector.store.store import Store, Transaction
from sfumato.collector.worker.worker import LONGEST_PAUSE_SECONDS, Worker
from sfumato.privacy import SeededRng

ERRORS = (MemoryError, RuntimeError, OSError, ValueError, ZeroDivisionError, KeyError)
MOST_CALLS = 40  # after how many calls an error comes at the latest
MOST_STEPS = 3_000
STUDIES: dict[str, dict[str, Any]] = {
    "sums": {},
    "noised": {"epsilon": 1.0, "delta": 1e-6},
    "rounds": {"rounds": 2, "publish": "rounds", "devices": 80},
    "local": {"trust": "local", "epsilon": 4.0},
}


class Kill(BaseException):
    """The process is gone; nothing in it catches this."""


class Trouble:
    """Raises an error at a random one of the next calls, five times of six."""

    def __init__(self, chance: random.Random, *, kills: bool) -> None:
        self._chance, self._kills = chance, kills
        self._calls: int | None = None  # number left; None: nothing goes wrong
        self.errors = 0

    def begin(self) -> None:
        """Choose what goes wrong in the next step, if anything."""
        self._calls = None
        if self._chance.random() < 5 / 6:
            self._calls = self._chance.randint(0, MOST_CALLS)

    def end(self) -> None:
        self._calls = None

    def tick(self) -> None:
        if self._calls is None:
            return
        self._calls -= 1
        if self._calls < 0:
            self._calls = None
            self.errors += 1
            if self._kills and self._chance.random() < 0.2:
                raise Kill
            raise self._chance.choice(ERRORS)("canary")


class FailingStore(Store):
    """A store each of whose calls, begins and commits may fail, before or after it acts."""

    trouble: Trouble

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self.trouble.tick()
        with super().transaction() as tx:
            yield _Watched(tx, self.trouble)
            self.trouble.tick()
        self.trouble.tick()

    @contextmanager
    def reading(self) -> Iterator[Any]:
        self.trouble.tick()
        with super().reading() as tx:
            yield _Watched(tx, self.trouble)


class _Watched:
    def __init__(self, tx: Transaction, trouble: Trouble) -> None:
        self._tx, self._trouble = tx, trouble

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tx, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._trouble.tick()
            answer = method(*arguments, **options)
            self._trouble.tick()
            return answer

        return call


def release_in_spite_of_errors(url: str | Path, chance: random.Random, *, kills: bool) -> int:
    """Release a store's studies with a worker that fails five times of six; return the number of
    errors. Raises AssertionError if a study is not released and charged exactly once."""
    clock, rng = Clock(), SeededRng(chance.getrandbits(32))
    trouble = Trouble(chance, kills=kills)

    def now() -> float:
        trouble.tick()
        return clock()

    def start() -> tuple[Store, Worker]:
        store = FailingStore.open(url, now=clock)
        assert isinstance(store, FailingStore)
        store.trouble = trouble
        options: dict[str, Any] = {"log": lambda event, **fields: None, "seal_seconds": 0.0}
        return store, Worker(store, key=KEY, now=now, rng=rng, **options)

    store, worker = start()
    store.migrate()
    rows = [
        create(store, clock, name, rng=rng, terms={"closes": int(clock() // 86_400)}, **keys)
        for name, keys in STUDIES.items()
    ]
    for row in rows:
        task = open_task(store, row)
        reports = [report(task, category, rng=rng) for category in range(len(ITEMS))]
        for first in range(0, len(reports), 20):
            assert upload(store, task, reports[first : first + 20])
    clock.advance(86_400)
    earlier: dict[str, Any] = {}  # answers and releases, which must never change
    for _ in range(MOST_STEPS):
        trouble.begin()
        try:
            with suppress(Exception):  # as the worker's thread does
                worker.step()
        except Kill:
            store.close()
            store, worker = start()
        trouble.end()
        clock.advance(LONGEST_PAUSE_SECONDS)
        with store.reading() as tx:
            for row in tx.studies():
                values: dict[str, Any] = {
                    each.owner: (each.check(), each.count) for each in tx.answer_rows(row.id)
                }
                if (text := tx.release(row.id)) is not None:
                    values[row.id] = text
                for key, value in values.items():
                    assert earlier.setdefault(key, value) == value, "noise was drawn a second time"
            if all(row.state == "released" for row in tx.studies()):
                break
    check_once(store)
    store.close()
    return trouble.errors


def check_once(store: Store) -> None:
    """Every study is released, every sum is charged exactly once, and every report counts once."""
    with store.reading() as tx:
        rows, charged = tx.studies(), [entry[2] for entry in tx.entries()]
        sums = [each.owner for row in rows for each in tx.answer_rows(row.id)]
        releases = {row.name: tx.release(row.id) for row in rows}
    for row in rows:
        assert row.state == "released", (row.name, row.state, studies.state(store, row.id)["fault"])
        assert studies.state(store, row.id)["counted"] == len(ITEMS)
    assert sorted(charged) == sorted(sums), "what was charged is not what was opened"
    for name in ("sums", "rounds"):  # these have no noise
        counts = [row["count"] for row in json.loads(releases[name] or "")["estimates"]]
        assert counts == [1.0] * len(ITEMS), name

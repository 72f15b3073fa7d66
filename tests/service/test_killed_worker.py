"""A worker killed with SIGKILL at a random moment, again and again, gives the same releases."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checks import SEED
from collecting import ITEMS, KEY, Clock, create, open_task, report, upload, work
from sfumato.collector.store.store import Store
from sfumato.collector.worker import worker as working
from sfumato.collector.worker.worker import Worker
from sfumato.privacy import SeededRng

STORES = 10
SEALED_TOGETHER = 10  # so that there are many transactions

PROGRAM = """
import os, random, signal, sys, time
from sfumato.collector.worker import worker as working
from sfumato.collector.store.store import Store
from sfumato.collector.worker.worker import Worker

working.MOST_REPORTS, chance = int(sys.argv[1]), random.Random(sys.argv[2])
key, now, urls = bytes.fromhex(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]

def work(url):
    store = Store.open(url, now=lambda: now)
    with store.worker_lock() as alone:
        assert alone
        worker = Worker(store, key=key, now=lambda: now, log=lambda event, **fields: None)
        while worker.step():
            pass
    store.close()

def start(url):
    if child := os.fork():
        return child
    try:
        work(url)
        os._exit(0)
    except BaseException as problem:
        print(repr(problem), file=sys.stderr, flush=True)
        os._exit(1)

def ended(child):  # whether it was killed
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False

work(urls[0])  # so that what is compiled and imported on the way is there for those that follow
began = time.monotonic()
assert not ended(start(urls[1]))  # left alone, to know how long it takes
seconds, kills = time.monotonic() - began, 0
for url in urls[2:]:
    for attempt in range(2):
        child = start(url)
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        if not ended(child):
            break
        kills += 1
    began = time.monotonic()
    assert not ended(start(url))
    seconds = max(seconds / 2, min(seconds, time.monotonic() - began)) if kills < 3 else seconds
print(kills)
"""


@pytest.fixture
def unsealed_store(tmp_path: Path) -> Path:
    """A store with central and local studies; it has reports, some of them twice, none sealed."""
    path, clock, rng = tmp_path / "unsealed.db", Clock(), SeededRng(SEED)
    store = Store.open(path, now=clock)
    store.migrate()
    terms = {"closes": int(clock() // 86_400)}
    for name, keys in {
        "central": {},
        "rounds": {"rounds": 2, "publish": "rounds", "devices": 80},
        "local": {"trust": "local", "epsilon": 4.0},
    }.items():
        row = create(store, clock, name, rng=rng, terms=terms, **keys)
        task = open_task(store, row)
        reports = [report(task, category, rng=rng) for category in range(len(ITEMS))]
        for start in range(0, len(reports), 7):
            assert upload(store, task, reports[max(0, start - 3) : start + 7])
    store.close()
    return path


def releases(path: Path) -> dict[str, Any]:
    """All releases without their running time, and the charges."""
    store, result = Store.open(path), {}
    with store.reading() as tx:
        for row in tx.studies():
            assert row.state == "released", row.problem
            result[row.name] = json.loads(tx.release(row.id) or "")
            del result[row.name]["cost"]["seconds"]
        result["charged"] = [entry[2] for entry in tx.entries()]
    store.close()
    return result


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_gives_the_release_of_one_left_alone(
    unsealed_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`charged` is compared as well: nothing is charged twice."""
    tomorrow = Clock()
    tomorrow.advance(86_400)
    copies = [tmp_path / f"{number}.db" for number in range(STORES + 2)]
    paths = [Path(shutil.copy(unsealed_store, copy)) for copy in copies]
    done = subprocess.run(
        [
            sys.executable,
            *("-c", PROGRAM, str(SEALED_TOGETHER), str(SEED), KEY.hex(), str(tomorrow())),
            *(f"sqlite:///{path}" for path in paths),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        int(done.stdout) >= 3
    )  # of up to twenty; on a machine that was slow at first, kills come too late
    monkeypatch.setattr(working, "MOST_REPORTS", 1_000)  # another way of sealing gives the same
    store = Store.open(unsealed_store, now=tomorrow)
    work(Worker(store, key=KEY, now=tomorrow, log=lambda event, **fields: None))
    store.close()
    alone = releases(unsealed_store)
    assert [row["count"] for row in alone["central"]["estimates"]] == [1.0] * len(ITEMS)
    assert all(releases(path) == alone for path in paths)

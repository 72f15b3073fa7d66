"""Exported reports folded from Parquet on two cores, with threads and with Dask: against the
compiled loops alone, over the same records in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import race
from benchmarks.lines import Line, Settings
from sfumato import lake
from sfumato.engines import DaskEngine, LocalEngine
from sfumato.flow.accumulator import records_of, to_parquet
from sfumato.flow.task import LocalTask
from sfumato.planning import Plan, plan
from sfumato.privacy import SystemRng
from sfumato.privacy.randomizers import CountMeanSketch
from sfumato.privacy.tallies import Tally

NAME = "fold"
SEED = 1
CORES = 2
REPETITIONS = 3
PIECE = 1 << 22  # records that are generated together
MOST_TIMES_THE_KERNEL = 2.0  # the requirement: at least half of the kernel's own rate
STUDIES: dict[str, tuple[int, dict[str, Any]]] = {
    "hashed": (100_000_000, {"algorithm": "hashed"}),
    "count_mean": (20_000_000, {"algorithm": "count_mean", "rows": 1024, "width": 1024}),
}
table = race.table

U8 = npt.NDArray[np.uint8]


def run(settings: Settings) -> Iterator[Line]:
    engines = ("local",) if settings.quick else ("local", "dask")
    repeats = settings.repeats or (1 if settings.quick else REPETITIONS)
    for kind, (size, keys) in STUDIES.items():
        cases = [f"{kind}/{engine}" for engine in engines]
        if not any(map(settings.wants, cases)):
            continue
        records = 20_000 if settings.quick else size
        planned, task = _plan(keys)
        parts = list(_records(task, records))
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder) / "lake", planned, task, parts)
            for engine in engines:
                if settings.wants(f"{kind}/{engine}"):
                    yield _race(
                        f"{kind}/{engine}",
                        Path(folder) / "lake",
                        task,
                        parts,
                        Settings(quick=settings.quick, repeats=repeats),
                    )


def missed(lines: list[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"fold/{line['case']}: takes {ratio['median']:.2f} times as long as the kernel, not at "
        f"most {MOST_TIMES_THE_KERNEL:g}"
        for line in lines
        for ratio in line["ratio_to_floor"].values()
        if ratio["median"] > MOST_TIMES_THE_KERNEL
    ]


def _race(case: str, folder: Path, task: LocalTask, parts: list[U8], settings: Settings) -> Line:
    place: AbstractContextManager[Any] = (
        DaskEngine(workers=CORES) if case.endswith("dask") else nullcontext(LocalEngine(CORES))
    )
    records = sum(map(len, parts))
    with place as engine:
        ((_, batch),) = lake.Reports.read(folder).count(engine=engine)
        expected = _kernel(task, parts)
        if not np.array_equal(batch.tallies[0].cells, expected.cells):
            raise AssertionError(f"{case}: the tally must be the kernel's, bit for bit")
        return race.run(
            race.Race(
                name=NAME,
                case=case,
                sizes={
                    "records": records,
                    "record_bytes": task.record_bytes,
                    "rows": task.randomizer.rows,
                    "width": task.randomizer.width,
                    "cores": CORES,
                },
                seeds=[SEED],
                ours=race.Contender(lambda: lake.Reports.read(folder).count(engine=engine)),
                peers={},
                floors={"the kernel alone": race.Contender(lambda: _kernel(task, parts))},
                cores=CORES,
                note="records drawn uniformly; files in the cache of the system; a running cluster",
                warm_up=False,  # the check has compiled the loops
            ),
            settings,
        )


def _plan(keys: dict[str, Any]) -> tuple[Plan, LocalTask]:
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 10**8}
    planned = plan(study | keys, items=[f"item {number}" for number in range(1_000)])
    planned = replace(planned, design=planned.design.with_seed(SystemRng()).question)
    task = planned.design.campaign(planned, name=NAME).next_task()
    assert isinstance(task, LocalTask)  # by its trust
    return planned, task


def _records(task: LocalTask, count: int) -> Iterator[U8]:
    """Valid records, drawn uniformly: how fast they are counted does not depend on the items."""
    chance, size = np.random.default_rng(SEED), task.record_bytes
    rows, width = task.randomizer.rows, task.randomizer.width
    for start in range(0, count, PIECE):
        some = min(PIECE, count - start)
        if isinstance(task.randomizer, CountMeanSketch):
            records = chance.integers(0, 256, (some, size), dtype=np.uint8)
            numbers, used = chance.integers(0, rows, some), size - width // 8
        else:
            records = np.empty((some, size), dtype=np.uint8)
            numbers, used = chance.integers(0, rows * width, some), size
        records[:, :used] = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :used]
        yield records


def _write(folder: Path, planned: Plan, task: LocalTask, parts: list[U8]) -> None:
    sealed = ((records_of(to_parquet(part)), len(part)) for part in parts)
    lake.write(folder, planned, [(task, sealed)], campaign=NAME, rng=SystemRng())


def _kernel(task: LocalTask, parts: list[U8]) -> Tally:
    """Count the records with as many threads, each in a tally of its own."""

    def count(mine: list[U8]) -> Tally:
        tally = Tally(task.randomizer)
        for part in mine:
            tally.fold(part)
        return tally

    with ThreadPoolExecutor(CORES) as pool:
        tallies = list(pool.map(count, [parts[number::CORES] for number in range(CORES)]))
    return sum(tallies[1:], tallies[0])

"""Folds and simulations on Dask: the same results, also if a worker is killed halfway."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from click.testing import CliRunner

from checks import SEED
from sfumato import lake
from sfumato.cli.main import main
from sfumato.engines import DaskEngine
from sfumato.errors import DataError
from sfumato.flow.accumulator import RecordBatch, TallyAccumulator, records_of
from sfumato.flow.task import LocalTask
from sfumato.planning import plan
from sfumato.privacy import SeededRng
from sfumato.reproduce.frequencies import figures as frequencies
from sfumato.reproduce.runner import conduct

pytestmark = pytest.mark.slow  # a cluster takes seconds to start

RECORDS, PARTITIONS = 5_000, 24
STUDY = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "algorithm": "hashed"}


@pytest.fixture(scope="module")
def engine() -> Iterator[DaskEngine]:
    with DaskEngine(workers=2) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in many partitions, each of them a shard."""
    monkeypatch.setattr(lake, "_MOST_RECORDS", RECORDS)
    monkeypatch.setattr(lake, "_SHARD_RECORDS", RECORDS)
    rng = SeededRng(SEED)
    items = [f"tree {k}" for k in range(200)]
    planned = plan({**STUDY, "devices": 10**6}, items=items)
    planned = replace(planned, design=planned.design.with_seed(rng).question)
    task = planned.design.campaign(planned, name="trees").next_task()
    assert isinstance(task, LocalTask)

    def sealed() -> Iterator[tuple[pa.ChunkedArray, int]]:
        for _ in range(PARTITIONS):
            part = TallyAccumulator(task)
            values = np.resize(task.values(items), RECORDS)
            part.add([task.randomize(values, rng=rng).tobytes()])
            yield records_of(part.seal(rng=rng)), RECORDS

    lake.write(tmp_path / "lake", planned, [(task, sealed())], campaign="trees", rng=rng)
    return tmp_path / "lake"


def tally(folder: Path, **options: Any) -> RecordBatch:
    ((_, batch),) = lake.Reports.read(folder).count(**options)
    return batch


def assert_same(ours: RecordBatch, theirs: RecordBatch) -> None:
    assert (ours.count, ours.records) == (theirs.count, theirs.records)
    assert ours.count == RECORDS * PARTITIONS
    assert np.array_equal(ours.tallies[0].cells, theirs.tallies[0].cells)
    assert np.array_equal(ours.tallies[0].row_counts, theirs.tallies[0].row_counts)


def test_the_tally_is_the_same_on_a_cluster(folder: Path, engine: DaskEngine) -> None:
    shares: list[float] = []
    ours = tally(folder, engine=engine, progress=lambda stage, share: shares.append(share))
    assert_same(ours, tally(folder))
    assert shares == sorted(shares)
    assert len(shares) == 1 + PARTITIONS


def test_the_tally_is_the_same_if_a_worker_is_killed_halfway(
    folder: Path, engine: DaskEngine
) -> None:
    victim = engine.worker_pids[0]
    killed: list[int] = []

    def kill(stage: str, share: float) -> None:
        if share >= 0.5 and not killed:
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    assert_same(tally(folder, engine=engine, progress=kill), tally(folder))
    assert killed
    assert victim not in engine.worker_pids


def test_a_damaged_page_is_named_by_the_worker_that_reads_it(
    folder: Path, engine: DaskEngine
) -> None:
    path = folder / "task-0" / "00007.parquet"
    content = bytearray(path.read_bytes())
    content[RECORDS] ^= 1  # in the middle of the records
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"00007\.parquet"):
        tally(folder, engine=engine)


@pytest.mark.parametrize("trust", ["central", "secure", "local"])
def test_a_seeded_simulation_is_the_same_on_a_cluster(
    trust: str, tmp_path: Path, engine: DaskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, on a scheduler that is there already, in many shards."""
    monkeypatch.setattr("sfumato.simulation.population._SHARD_DEVICES", 500)
    keys = "delta = 1e-6\nrounds = 2\ndropout = 0.1\n" if trust == "secure" else ""
    keys = "delta = 1e-6\n" if trust == "central" else keys
    study, data = tmp_path / "study.toml", tmp_path / "data.csv"
    study.write_text(f'question = "frequencies"\ntrust = "{trust}"\nepsilon = 4.0\n{keys}')
    rows = (f"tree {number},{100 + number}" for number in range(60))
    data.write_text("\n".join(["item,devices", *rows]))
    command = ["simulate", str(study), "--data", str(data), "--count-column", "devices"]

    def release(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, [*command, "--seed", "7", "--json", *options])
        assert done.exit_code == 0, done.stderr
        content: dict[str, Any] = json.loads(done.stdout)
        del content["cost"]["seconds"]
        return content

    theirs = release("--engine", "dask", "--scheduler", engine.address)
    assert theirs == release() == release("--workers", "1")


FIGURES = ("000-fig2", "001-fig3", "002-fig2", "003-fig3", "004-emoji")  # one of each paper


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_on_a_cluster(
    name: str, engine: DaskEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from tiny_figures import EXPERIMENTS

    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))  # no files
    shares: list[float] = []
    ours = conduct(name, EXPERIMENTS[name](), lambda _, share: shares.append(share), engine)
    theirs = conduct(name, EXPERIMENTS[name](), lambda _, share: None)
    assert ours.numbers == theirs.numbers
    assert ours.claims == theirs.claims
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_figure_is_the_same_if_a_worker_is_killed_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    size = frequencies.Size(repeats=12, widths=(50, 1000))
    killed: list[int] = []
    with DaskEngine(workers=2) as engine:

        def kill(stage: str, share: float) -> None:
            if share >= 0.5 and not killed:
                killed.append(engine.worker_pids[0])
                os.kill(killed[0], signal.SIGKILL)

        ours = conduct("000-fig2", frequencies.figure_2(size), kill, engine)
        assert killed
        assert killed[0] not in engine.worker_pids
    theirs = conduct("000-fig2", frequencies.figure_2(size), lambda _, share: None)
    assert ours.numbers == theirs.numbers
    assert ours.claims == theirs.claims


def test_an_interrupt_ends_a_figure_and_leaves_the_engine_free(engine: DaskEngine) -> None:
    def interrupt(stage: str, share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    size = frequencies.Size(repeats=2, widths=(50, 1000))
    with pytest.raises(KeyboardInterrupt):
        conduct("000-fig2", frequencies.figure_2(size), interrupt, engine)
    assert engine.sum(_sleepless, range(10)).tolist() == [45]  # type: ignore[union-attr]


def test_a_figure_by_the_command_is_the_same_on_a_cluster(
    engine: DaskEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))

    def lines(*options: str) -> str:
        out = tmp_path / "-".join(["out", *options[1:2]])
        command = ["reproduce", "000-fig2", "--json", "--out", str(out), *options]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    theirs = lines("--engine", "dask", "--scheduler", engine.address)
    assert theirs == lines() == lines("--workers", "3")


def _sleepless(shard: int) -> npt.NDArray[np.int64]:
    return np.array([shard])


def _failing(shard: tuple[str, int]) -> npt.NDArray[np.int64]:
    """Fails until this shard has been tried as often as the second number says."""
    path, tries = shard
    with Path(path).open("a") as file:
        file.write(".")
    if Path(path).stat().st_size < tries:
        raise OSError("the store of files is busy")
    return np.array([1])


def test_a_shard_that_fails_is_tried_three_times(engine: DaskEngine, tmp_path: Path) -> None:
    assert engine.sum(_failing, [(f"{tmp_path}/third", 3)]).tolist() == [1]  # type: ignore[union-attr]
    with pytest.raises(OSError, match="busy"):
        engine.sum(_failing, [(f"{tmp_path}/fourth", 4)])
    assert (tmp_path / "fourth").stat().st_size == 3


def test_an_error_cancels_the_rest(engine: DaskEngine) -> None:
    def shards() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.sum(_sleepless, shards())
    assert engine.sum(_sleepless, range(10)).tolist() == [45]  # type: ignore[union-attr]
    assert engine.sum(_sleepless, []) is None


def test_a_scheduler_that_is_there_already_is_used_and_left(engine: DaskEngine) -> None:
    address = engine.address
    with DaskEngine(address) as second:
        assert sorted(second.worker_pids) == sorted(engine.worker_pids)
        assert second.sum(_sleepless, range(10)).tolist() == [45]  # type: ignore[union-attr]
    assert engine.sum(_sleepless, range(10)).tolist() == [45]  # type: ignore[union-attr]


def test_a_cluster_of_its_own_is_on_loopback_only(engine: DaskEngine) -> None:
    assert engine.address.startswith("tcp://127.0.0.1:")

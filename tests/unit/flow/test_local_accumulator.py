"""Local reports: the wire format, admission, tallies, snapshots, Apple's form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import DataError, MismatchError, SpecError, TaskError
from sfumato.flow.accumulator import Collector, RecordBatch, TallyAccumulator, to_parquet
from sfumato.flow.admission import Rejection
from sfumato.flow.contribute import local_report
from sfumato.flow.report import HEADER_BYTES, Report
from sfumato.flow.task import LocalTask
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    SeededRng,
    Tally,
)
from sfumato.privacy.randomizers.apple_records import read_apple_records

RANDOMIZERS: list[Randomizer] = [
    CountMeanSketch(epsilon=4.0, rows=300, width=128, seed=1),
    CountMeanSketch(epsilon=2.0, rows=7, width=100, seed=1, flips="optimal"),
    HadamardCountMeanSketch(epsilon=4.0, rows=33, width=64, seed=1),
    HashedResponse(epsilon=4.0, rows=100, width=56, seed=1),
    DirectResponse(epsilon=1.0, categories=5),
]


@pytest.fixture(params=RANDOMIZERS, ids=lambda one: f"{type(one).__name__}-{one.width}")
def task(request: pytest.FixtureRequest) -> LocalTask:
    return LocalTask(randomizer=request.param, cohort="everybody", records_per_report=3)


def reports(task: LocalTask, count: int, start: int = 0) -> list[bytes]:
    """Reports of `count` devices, one to three items each."""
    rng = SeededRng(SEED, start)
    return [
        local_report(task, np.arange(device, device + 1 + device % 3) % 5, rng=rng).to_bytes()
        for device in range(start, start + count)
    ]


def tally_of(collector: Collector) -> Tally:
    batch = collector.batch
    assert isinstance(batch, RecordBatch)
    return batch.tallies[0]


def test_reports_one_by_one_and_all_at_once_make_the_same_tally(task: LocalTask) -> None:
    batch = reports(task, 60)
    together, apart = Collector(task), Collector(task)
    together.add(batch)
    for report in reversed(batch):
        apart.add([report])
    assert np.array_equal(tally_of(together).cells, tally_of(apart).cells)
    assert np.array_equal(tally_of(together).row_counts, tally_of(apart).row_counts)
    assert tally_of(together).count == 3 * 60  # devices with fewer items send as many records
    assert not together.rejected


def test_a_report_sent_twice_counts_once(task: LocalTask) -> None:
    batch = reports(task, 10)
    collector = Collector(task)
    collector.add(batch + batch[:4])
    collector.add(batch[:2])
    assert tally_of(collector).count == 3 * 10
    assert collector.duplicates == 6
    assert not collector.rejected


def test_bad_reports_are_rejected_by_reason_and_change_nothing(task: LocalTask) -> None:
    batch = reports(task, 10)
    collector = Collector(task)
    collector.add(batch)
    before = tally_of(collector).cells.copy()
    good = Report.from_bytes(reports(task, 1, start=99)[0])
    size = task.randomizer.record_bytes
    other = LocalTask(randomizer=task.randomizer, cohort="somebody else", records_per_report=3)
    impossible = b"\xff" * size
    bad: dict[str, tuple[bytes | Report, str]] = {
        "cut short": (good.to_bytes()[:-1] if size > 1 else good.to_bytes()[:HEADER_BYTES], "m"),
        "no header": (b"\x01" * 20, "m"),
        "another version": (b"\x02" + good.to_bytes()[1:], "m"),
        "empty": (b"", "m"),
        "too many records": (Report(good.task_id, b"r" * 16, good.message[:size] * 4), "m"),
        "another task": (local_report(other, np.array([1]), rng=SeededRng(1)), "w"),
        "wrong index": (Report(good.task_id, b"q" * 16, impossible), "i"),
    }
    reasons = {
        "m": Rejection.MALFORMED,
        "w": Rejection.WRONG_TASK,
        "i": Rejection.IMPOSSIBLE,
    }
    for number, (data, why) in enumerate(bad.values(), 1):
        collector.add([data if isinstance(data, bytes) else data.to_bytes()])
        assert collector.rejected.total() == number
        assert collector.rejected[reasons[why]] >= 1
    assert np.array_equal(tally_of(collector).cells, before)


def test_random_bytes_never_reach_the_tally() -> None:
    """A random string begins with the version and the task's 32 bytes with probability 2**-264."""
    task = LocalTask(randomizer=RANDOMIZERS[3], cohort="everybody")
    collector = Collector(task)
    chance = np.random.default_rng(SEED)
    lengths = chance.integers(0, 80, 200_000)
    data = chance.bytes(int(lengths.sum()))
    ends = np.cumsum(lengths)
    collector.add(data[end - size : end] for end, size in zip(ends, lengths, strict=True))
    assert collector.rejected.total() == 200_000
    assert tally_of(collector).count == 0
    assert not tally_of(collector).cells.any()


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_whatever_follows_a_good_header_is_admitted_whole_or_not_at_all(message: bytes) -> None:
    task = LocalTask(randomizer=RANDOMIZERS[0], cohort="everybody", records_per_report=3)
    collector = Collector(task)
    collector.add([Report(task.id, b"0" * 16, message).to_bytes()])
    size = task.randomizer.record_bytes
    assert tally_of(collector).count in (0, len(message) // size)
    assert (tally_of(collector).count == 0) == bool(collector.rejected)


def test_sealed_batches_fold_like_reports(task: LocalTask) -> None:
    size = task.record_bytes
    messages = [Report.from_bytes(report).message for report in reports(task, 40)]
    one = Collector(task)
    one.add(reports(task, 40))
    pieces = [TallyAccumulator(task) for _ in range(2)]
    pieces[0].add(messages[:5])
    pieces[1].add(messages[5:])
    merged = TallyAccumulator(task)
    for piece in pieces:
        merged.merge(piece.seal(rng=SeededRng(SEED)))
    assert np.array_equal(tally_of(one).cells, merged.batch(40).tallies[0].cells)
    first = np.frombuffer(messages[0][:size] + b"\xff" * size, dtype=np.uint8)
    wrong = TallyAccumulator(task)
    wrong.merge(to_parquet(first.reshape(2, size)))
    assert (wrong.batch(2).records, wrong.batch(2).impossible) == (1, 1)
    with pytest.raises(MismatchError, match="bytes each"):
        wrong.merge(to_parquet(np.zeros((3, size + 1), dtype=np.uint8)))
    with pytest.raises(DataError, match="damaged"):
        wrong.merge(b"not Parquet")


def test_a_device_sends_no_more_than_the_task_takes(task: LocalTask) -> None:
    with pytest.raises(SpecError, match="at most 3 items per report; got 4"):
        local_report(task, np.array([1, 2, 3, 4], dtype=np.int64), rng=SeededRng(1))
    with pytest.raises(TaskError, match="records_per_report"):
        LocalTask(randomizer=task.randomizer, cohort="x", records_per_report=0)


def folded(task: LocalTask, count: int, seed: int) -> Tally:
    tally = Tally(task.randomizer)
    values = task.randomizer.values(np.arange(count) % 5)
    tally.fold(task.randomizer.randomize(values, rng=SeededRng(SEED, seed)))
    return tally


def test_tallies_add_up(task: LocalTask) -> None:
    one, two = folded(task, 500, 1), folded(task, 300, 2)
    both = one + two
    assert both.count == 800
    assert np.array_equal(both.cells, one.cells.astype(np.int64) + two.cells)
    other = LocalTask(randomizer=DirectResponse(epsilon=3.0, categories=9), cohort="x")
    with pytest.raises(MismatchError, match="do not add"):
        one + folded(other, 1, 1)


def test_cells_widen_before_they_overflow(task: LocalTask) -> None:
    """One row's counter is set just below sixteen bits; the next records must not wrap it."""
    tally = folded(task, 10, 1)
    room = np.iinfo(tally.cells.dtype).max
    tally.row_counts[:] = room - 2
    tally.cells[:] = room - 2
    before = tally.cells.astype(np.int64)
    more = task.randomizer.randomize(
        task.randomizer.values(np.zeros(2000, dtype=np.int64)), rng=SeededRng(SEED, 3)
    )
    tally.fold(more)
    assert tally.cells.dtype == np.int32
    added = tally.cells.astype(np.int64) - before
    alone = Tally(task.randomizer)
    alone.fold(more)
    assert np.array_equal(added, alone.cells)


def test_a_snapshot_survives_a_crash_while_the_next_is_written(
    task: LocalTask, tmp_path: Path
) -> None:
    tally = folded(task, 100, 1)
    tally.save(tmp_path / "tally.npz")
    (tmp_path / "tally.npz.partial").write_bytes(b"half a snapshot")  # the crash
    again = Tally.load(task.randomizer, tmp_path / "tally.npz")
    assert np.array_equal(again.cells, tally.cells)
    assert again.count == 100
    again.fold(task.randomizer.randomize(task.randomizer.values(np.arange(3)), rng=SeededRng(2)))
    again.save(tmp_path / "tally.npz")
    assert Tally.load(task.randomizer, tmp_path / "tally.npz").count == 103
    assert not (tmp_path / "tally.npz.partial").exists()


def test_damaged_and_foreign_snapshots_are_refused(task: LocalTask, tmp_path: Path) -> None:
    path = tmp_path / "tally.npz"
    folded(task, 100, 1).save(path)
    with pytest.raises(MismatchError, match="another randomizer"):
        Tally.load(DirectResponse(epsilon=3.0, categories=9), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="damaged"):
        Tally.load(task.randomizer, path)
    with pytest.raises(DataError, match="cannot be read"):
        Tally.load(task.randomizer, tmp_path / "none.npz")


def test_nothing_prints_what_it_holds(task: LocalTask) -> None:
    collector = Collector(task)
    collector.add(reports(task, 3))
    assert "cells" not in repr(collector)
    assert "array" not in repr(tally_of(collector))


def test_records_in_apples_form_fold_like_ours() -> None:
    sketch = CountMeanSketch(epsilon=4.0, rows=1_000, width=256, seed=3)
    ours = sketch.randomize(sketch.values(["oak", "elm", "fir"]), rng=SeededRng(SEED))
    lines = []
    for record in ours:
        bits = np.unpackbits(record[2:], bitorder="little")
        row = int.from_bytes(record[:2].tobytes(), "little")
        lines.append(f"{row},{np.packbits(bits).tobytes().hex()}")
    text = {"key": "tree", "parameters": {"epsilon": 4, "k": 1_000, "m": 256}, "records": lines}
    key, randomizer, records = read_apple_records(json.dumps(text), seed=3)
    assert (key, randomizer) == ("tree", sketch)
    assert np.array_equal(records, ours)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"records": ["5"]}, "row,hexadecimal"),
        ({"records": ["5,zz"]}, "hexadecimal digits"),
        ({"records": ["5,ab"]}, "must have 4 digits; got 2"),
        ({"records": ["10,abcd"]}, "row below 10"),
        ({"records": ["-1,abcd"]}, "row,hexadecimal"),
        ({"records": ["\u0665,abcd"]}, "row,hexadecimal"),
        ({"records": [7]}, "row,hexadecimal"),
        ({"records": "5,abcd"}, "records a list"),
        ({"parameters": {"epsilon": 4, "k": 10}}, "exactly epsilon, k and m"),
        ({"parameters": {"epsilon": 4, "k": 10, "m": 12}}, "multiple of 8"),
        ({"parameters": {"epsilon": 4, "k": 1.5, "m": 16}}, "whole numbers"),
        ({"parameters": {"epsilon": "4", "k": 10, "m": 16}}, "epsilon must be a number"),
        ({"device": "somebody"}, "exactly key, parameters and records"),
    ],
)
def test_records_in_apples_form_that_are_amiss_are_refused(change: object, says: str) -> None:
    text = {"key": "k", "parameters": {"epsilon": 4, "k": 10, "m": 16}, "records": ["5,abcd"]}
    read_apple_records(json.dumps(text), seed=1)
    with pytest.raises(DataError, match=says):
        read_apple_records(json.dumps({**text, **change}), seed=1)  # type: ignore[dict-item]  # wrong on purpose
    with pytest.raises(DataError, match="must be JSON"):
        read_apple_records("{", seed=1)

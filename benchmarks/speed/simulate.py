"""Ten million devices simulated from a file: seconds and peak memory, each in a fresh process.

The floor reads the same file with pyarrow and counts its items exactly. `python -m
benchmarks.speed.simulate ours|floor FILE STUDY` is the process that is measured.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from benchmarks import race
from benchmarks.lines import ROOT, Line, Settings

NAME = "simulate"
SEED = 1
REPETITIONS = 3
MOST_BYTES = 10**9  # the requirement: ten million items in less than this
DISTINCT = {"one-hot": 10_000, "sketch": 200_000}  # beyond 21,000 a full table is too long


def run(settings: Settings) -> Iterator[Line]:
    items = 20_000 if settings.quick else 10_000_000
    cases = [(kind, end) for kind in DISTINCT for end in ("parquet", "csv")]
    if settings.quick:
        cases = [("sketch", "csv")]
    timed = Settings(
        quick=settings.quick,
        repeats=settings.repeats or (1 if settings.quick else REPETITIONS),
    )
    with tempfile.TemporaryDirectory() as folder:
        if not settings.quick:
            _warm_up(Path(folder))
        for kind, end in cases:
            case = f"{kind}/{end}"
            if settings.wants(case):
                path = Path(folder) / f"{kind}.{end}"
                write(path, items, DISTINCT[kind])
                study = _study(kind, quick=settings.quick)
                yield _race(timed, case, path, {"items": items, "distinct": DISTINCT[kind]}, study)
                path.unlink()


def table(lines: list[Line]) -> str:
    """The race, and its peak memory."""
    peaks = [
        f"{line['case']}: peak memory {line['peak_bytes'] / 1e6:,.0f} MB "
        f"(floor {line['floor_peak_bytes'] / 1e6:,.0f} MB), {line['algorithm']}"
        for line in lines
    ]
    return "\n".join([race.table(lines), *peaks])


def missed(lines: list[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"simulate/{line['case']}: peak memory is {line['peak_bytes']:,} bytes, not below "
        f"{MOST_BYTES:,}"
        for line in lines
        if line["peak_bytes"] >= MOST_BYTES
    ]


def write(path: Path, items: int, distinct: int) -> None:
    """Write items of a power law, one per row, a million at a time."""
    names = pa.array([f"item {number:07d}" for number in range(distinct)])
    shares = np.arange(1, distinct + 1, dtype=np.float64) ** -1.05
    upto = np.cumsum(shares / shares.sum())
    chance = np.random.default_rng(SEED)
    schema = pa.schema([("item", pa.string())])
    open_writer: Callable[..., Any] = (
        pa.parquet.ParquetWriter if path.suffix == ".parquet" else pa.csv.CSVWriter
    )
    with open_writer(str(path), schema) as writer:
        for start in range(0, items, 1_000_000):
            count = min(1_000_000, items - start)
            numbers = np.minimum(np.searchsorted(upto, chance.random(count)), distinct - 1)
            writer.write_table(pa.table({"item": names.take(pa.array(numbers))}, schema=schema))


def _race(
    settings: Settings, case: str, path: Path, sizes: dict[str, int], study: dict[str, Any]
) -> Line:
    peaks: list[int] = []

    def floor() -> object:
        result = _in_process("floor", path, study)
        peaks.append(result["peak_bytes"])
        return result

    def more(results: list[Any]) -> dict[str, Any]:
        return {
            "peak_bytes": max(result["peak_bytes"] for result in results),
            "floor_peak_bytes": max(peaks),
            "algorithm": results[-1]["algorithm"],
            "study": study,
        }

    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes=sizes | {"file_bytes": path.stat().st_size},
            seeds=[SEED],
            ours=race.Contender(lambda: _in_process("ours", path, study), seconds=_seconds),
            peers={},
            floors={"pyarrow reads and counts": race.Contender(floor, seconds=_seconds)},
            note="seconds and peak memory are of a fresh process each; imports are not timed; the "
            "peak is the largest of the repetitions",
            more=more,
            warm_up=False,
        ),
        settings,
    )


def _seconds(result: Any) -> float:
    return float(result["seconds"])


def _warm_up(folder: Path) -> None:
    """Compile and cache the kernels by a run that is not timed."""
    path = folder / "warm.parquet"
    write(path, 300_000, DISTINCT["sketch"])
    _in_process("ours", path, _study("sketch", quick=False))
    path.unlink()


def _in_process(what: str, path: Path, study: dict[str, Any]) -> dict[str, Any]:
    module = "benchmarks.speed.simulate"
    command = [sys.executable, "-m", module, what, str(path), json.dumps(study)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{module} {what} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _study(kind: str, *, quick: bool) -> dict[str, Any]:
    epsilon = None if quick else 1.0  # finding the noise's scale would take most of a quick run
    short = quick and kind == "sketch"  # few devices hold few items, so only short tables sketch
    return {
        "question": "frequencies",
        "trust": "central",
        "epsilon": epsilon,
        "delta": 1e-7,
        "bytes_per_device": 1 << (12 if short else 16),
    }


def _ours(path: Path, study: dict[str, Any]) -> dict[str, Any]:
    from sfumato import Study, simulate

    started = time.perf_counter()
    release = simulate(Study(**study), path, seed=SEED)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "algorithm": release.plan["algorithm"]}


def _floor(path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    read = pa.parquet.read_table if path.suffix == ".parquet" else pa.csv.read_csv
    read(path).column("item").value_counts()
    return {"seconds": time.perf_counter() - started}


def peak_bytes() -> int:
    """The most memory this process had resident.

    On Linux from its own status: getrusage would include the memory of the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for text in status.read_text(encoding="utf-8").splitlines():
            if text.startswith("VmHWM:"):
                return int(text.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _main(what: str, path: str, study: str) -> None:
    measured = _ours(Path(path), json.loads(study)) if what == "ours" else _floor(Path(path))
    print(json.dumps({**measured, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    _main(*sys.argv[1:])

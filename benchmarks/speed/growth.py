"""How time and memory grow: with reports, dictionary, devices, dimensions, partitions and cohort.

Each size runs in a process of its own, on one core. Seconds are the processor's, so that others on
the machine disturb them little; memory is the peak over what the process had when it was ready.
An exponent is the slope of a least-squares line through logarithms, with its 95% interval.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from scipy import stats

from benchmarks.lines import ROOT, Line, Settings, line, markdown

NAME = "growth"
SEED = 1
REPETITIONS = 2
CORES = 1
PLANNED = [10, 100, 1_000, 10_000]  # cohorts, as plans make them
BEYOND = [10_000, 100_000, 1_000_000]
SECURE_CELLS = 64  # so that the table is a small part of a device's work
MIB = 1 << 20

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to measure at several sizes; `prepare` returns the work at one of them."""

    sizes: Sequence[int]
    prepare: Callable[[int, Path], Work]
    expected: str  # exponent, and why
    memory: str = ""  # expected
    unit: str = "seconds"  # of the processor; else of the number that the work returns
    devices: Callable[[int], int] = lambda size: 1  # among which the work is divided
    of: Callable[[float], float] = float  # what the exponent is of, as a function of the size
    write: Callable[[int, Path], None] = lambda size, folder: None  # files, in another process


def run(settings: Settings) -> Iterator[Line]:
    for name, case in CASES.items():
        if settings.wants(name):
            yield _measure(name, case, settings)


def table(lines: Sequence[Line]) -> str:
    """Measurements at every size, and exponents with 95% intervals beside the expected ones."""
    rows = [
        [
            result["case"],
            " ".join(f"{point['size']:.0e}".replace("e+0", "e") for point in result["points"]),
            " ".join(f"{point['median']:.2g}" for point in result["points"]) + f" {result['unit']}",
            _interval(result["exponent"]),
            result["expected"],
            " ".join(f"{point['bytes'] / MIB:.0f}" for point in result["points"])
            if result["memory"]
            else "",
            result["memory"],
        ]
        for result in lines
    ]
    head = ["case", "sizes", "measured", "exponent", "expected", "MiB more", "expected"]
    return markdown(head, rows)


def missed(lines: Sequence[Line]) -> list[str]:
    """Exponents whose interval is above the expected one."""
    return [
        f"growth/{result['case']}: the exponent is {_interval(result['exponent'])}, not "
        f"{result['expected']}"
        for result in lines
        if result["exponent"]["interval"][0] > float(result["expected"].split()[0])
    ]


def fit(sizes: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """The exponent of a power law through these points, and its 95% interval."""
    line = stats.linregress(np.log(sizes), np.log(values))
    half = stats.t.ppf(0.975, len(sizes) - 2) * line.stderr if len(sizes) > 2 else math.inf
    return {"exponent": float(line.slope), "interval": [line.slope - half, line.slope + half]}


def _interval(exponent: dict[str, Any]) -> str:
    low, high = exponent["interval"]
    return f"{exponent['exponent']:.2f} ({low:.2f} to {high:.2f})"


def _measure(name: str, case: Case, settings: Settings) -> Line:
    sizes = [case.sizes[0] * times for times in (1, 2, 4)] if settings.quick else case.sizes
    repeats = settings.repeats or (1 if settings.quick else REPETITIONS)
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            place = Path(folder) / str(size)
            case.write(size, place)
            points.append(_in_process(name, size, sizes[0], place, Path(folder) / "warm", repeats))
    pairs = [(case.of(point["size"]), value) for point in points for value in point["values"]]
    return line(
        NAME,
        name,
        settings,
        sizes={"sizes": list(sizes), "cores": CORES},
        seeds=[SEED],
        repetitions=repeats,
        points=[point | {"median": float(np.median(point["values"]))} for point in points],
        exponent=fit(*zip(*pairs, strict=True)),
        unit=case.unit,
        expected=case.expected,
        memory=case.memory,
        note="processor seconds; bytes are the peak over the resident memory before, in a process "
        "of its own that has done the smallest size before",
    )


def _in_process(
    name: str, size: int, least: int, place: Path, warm: Path, repeats: int
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.speed.growth", name]
    arguments = [str(part) for part in (size, least, place, warm, repeats)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"growth {name} failed at {size}: {done.stderr[-2000:]}")
    point: dict[str, Any] = json.loads(done.stdout)
    return point


def _main(name: str, size: str, least: str, place: str, warm: str, repeats: str) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    case = CASES[name]
    if not Path(warm).exists():
        case.write(int(least), Path(warm))
    case.prepare(int(least), Path(warm))()  # compiles and imports
    work = case.prepare(int(size), Path(place))
    gc.collect()
    before = _reset_peak()
    values = []
    for _ in range(int(repeats)):
        started = time.process_time()
        result = work()
        seconds = (time.process_time() - started) / case.devices(int(size))
        values.append(seconds if case.unit == "seconds" else result)
    more = max(_status("VmHWM") - before, 0)
    print(json.dumps({"size": int(size), "values": values, "bytes": more}))


def _reset_peak() -> int:
    """Forget the peak of this process's memory; what it has resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux only
    return _status("VmRSS")


def _status(key: str) -> int:
    for text in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if text.startswith(f"{key}:"):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _local_task(items: int = 1_000) -> tuple[Any, Any]:
    """A plan for hashed responses and its task."""
    from sfumato.planning import plan
    from sfumato.privacy import SeededRng

    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 10**8}
    planned = plan(study | {"algorithm": "hashed"}, items=[f"item {k}" for k in range(items)])
    planned = replace(planned, design=planned.design.with_seed(SeededRng(SEED)).question)
    return planned, planned.design.campaign(planned, name=NAME).next_task()


def _write_lake(reports: int, folder: Path, *, partition: int) -> None:
    """Exported reports, in partitions of this many."""
    from sfumato import lake
    from sfumato.flow.accumulator import records_of, to_parquet
    from sfumato.privacy import SystemRng

    planned, task = _local_task()
    cells = task.randomizer.rows * task.randomizer.width
    chance = np.random.default_rng(SEED)

    def sealed() -> Iterator[tuple[pa.ChunkedArray, int]]:
        for start in range(0, reports, partition):
            count = min(partition, reports - start)
            numbers = chance.integers(0, cells, count).astype("<u8")
            records = numbers.view(np.uint8).reshape(-1, 8)[:, : task.record_bytes]
            yield records_of(to_parquet(np.ascontiguousarray(records))), count

    with mock.patch.object(lake, "_MOST_RECORDS", partition):
        lake.write(folder, planned, [(task, sealed())], campaign=NAME, rng=SystemRng())


def _fold(reports: int, folder: Path) -> Work:
    from sfumato import lake
    from sfumato.engines import LocalEngine

    return lambda: lake.Reports.read(folder).count(engine=LocalEngine(1))


def _estimate(items: int, folder: Path) -> Work:
    from sfumato.flow.accumulator import TallyAccumulator
    from sfumato.privacy import SeededRng
    from sfumato.privacy.debias import estimate

    _, task = _local_task()
    accumulator, rng = TallyAccumulator(task), SeededRng(SEED)
    holdings = pa.array([f"item {k % 1_000}" for k in range(100_000)])
    accumulator.fold(task.values(holdings), rng=rng)
    (tally,) = accumulator.batch(100_000).tallies
    names = pa.array([f"item {k}" for k in range(items)])
    return lambda: estimate(tally, task.values(names))


def _simulate(trust: str, **keys: Any) -> Callable[[int, Path], Work]:
    def prepare(devices: int, folder: Path) -> Work:
        from sfumato.engines import LocalEngine
        from sfumato.planning import plan
        from sfumato.simulation.simulate import simulate

        items = [f"item {k}" for k in range(100)]
        study = {"question": "frequencies", "trust": trust, "epsilon": 4.0, "devices": devices}
        planned = plan(study | ({} if trust == "local" else {"delta": 1e-9}) | keys, items=items)
        shares = np.full(len(items), 1 / len(items))
        counts = np.random.default_rng(SEED).multinomial(devices, shares)
        data = {"item": items, "devices": counts}
        return lambda: simulate(
            planned, data, count_column="devices", seed=SEED, engine=LocalEngine(1)
        )

    return prepare


def _mean(dimensions: int, folder: Path) -> Work:
    from sfumato.engines import LocalEngine
    from sfumato.planning import plan
    from sfumato.simulation.simulate import simulate

    devices = 500
    study = {"question": "mean", "trust": "central", "epsilon": 4.0, "delta": 1e-6, "clip": 1.0}
    planned = plan(study | {"devices": devices, "dimensions": dimensions})
    data = np.random.default_rng(SEED).normal(size=(devices, dimensions)).astype(np.float32)
    data /= math.sqrt(dimensions)
    return lambda: simulate(planned, data, seed=SEED, engine=LocalEngine(1))


def _round(cohort: int) -> Any:
    from sfumato.secagg.round import MaskedRound

    return MaskedRound(
        task="0" * 64,
        cells=SECURE_CELLS,
        modulus_bits=32,
        cohort=cohort,
        corrupt=0.05,
        dropout=0.1,
        nonce="0" * 32,
        mode="semi_honest",
    )


class _Device:
    """One device of a cohort, and the messages that it receives. Of the others only those that its
    messages depend on compute anything: its neighbours, which have neighbours of their own. All
    members share a few identities, since nobody sees more of them."""

    MEMBER = 0
    IDENTITIES = 512

    def __init__(self, cohort: int) -> None:
        from sfumato.secagg.agreement import members_to_bytes, neighbours_of, public_identity
        from sfumato.secagg.merkle import Tree
        from sfumato.secagg.round import BOX_BYTES

        self.round, self.table = _round(cohort), np.zeros(SECURE_CELLS, dtype=np.int64)
        self.secrets = [k.to_bytes(32, "big") for k in range(min(cohort, self.IDENTITIES))]
        public = [public_identity(secret) for secret in self.secrets]
        roster = [public[member % len(public)] for member in range(cohort)]
        tree, everybody = Tree(roster), range(cohort)
        self.roster, root, members = tree.root, bytes(32), members_to_bytes(set(everybody), cohort)
        facts = self.round, self.roster, root, everybody
        near = neighbours_of(*facts, [self.MEMBER])[self.MEMBER]
        rings = neighbours_of(*facts, [self.MEMBER, *near])
        others = {member: self.join(member) for row in rings.values() for member in row}
        keys = {member: roster[member] + other.enrol() for member, other in others.items()}

        def listing_for(member: int) -> bytes:
            proof = tree.proof([member, *rings[member]])
            return members + root + b"".join(keys[other] for other in rings[member]) + proof

        boxes = b""
        for member in near:
            start = BOX_BYTES * rings[member].index(self.MEMBER)
            box = others[member].share(listing_for(member))[start : start + BOX_BYTES]
            boxes += member.to_bytes(4, "little") + box
        self.messages = listing_for(self.MEMBER), members + boxes, members

    def join(self, member: int) -> Any:
        from sfumato.privacy import SeededRng
        from sfumato.secagg.participant import Participant

        identity, rng = self.secrets[member % len(self.secrets)], SeededRng(SEED, member)
        return Participant.join(self.round, member, identity, self.roster, rng=rng)

    def run(self) -> list[bytes]:
        """Its whole part of a round; its answers."""
        from sfumato.secagg.agreement import ring_of

        ring_of.cache_clear()
        device = self.join(self.MEMBER)
        listing, boxes, survivors = self.messages
        answers = [device.enrol(), device.share(listing), device.mask(boxes, self.table)]
        return [*answers, device.unmask(survivors)]


def _secure(cohort: int, folder: Path) -> Work:
    return _Device(cohort).run


def _secure_bytes(cohort: int, folder: Path) -> Work:
    total = _bytes_beside_table(cohort)
    return lambda: total


def _secure_bytes_without_sets(cohort: int, folder: Path) -> Work:
    """Without the three sets of members, a bit for each."""
    total = _bytes_beside_table(cohort) - 3 * -(-cohort // 8)
    return lambda: total


def _bytes_beside_table(cohort: int) -> int:
    """The bytes that a device sends and receives beside its table, in real messages."""
    device = _Device(cohort)
    answers = device.run()
    most = device.round.bytes_up(cohort) + device.round.bytes_down(cohort)
    total = sum(map(len, (*answers, *device.messages)))
    assert total <= most, (total, most)
    return int(total - device.round.vector_bytes)


def _decades(first: int, count: int = 4) -> list[int]:
    return [first * 10**k for k in range(count)]


CASES = {
    "fold/reports": Case(
        sizes=_decades(10**5),
        prepare=_fold,
        write=lambda size, folder: _write_lake(size, folder, partition=1 << 22),
        expected="1",
        memory="constant",
    ),
    "fold/partitions": Case(
        sizes=_decades(1),
        prepare=_fold,
        write=lambda size, folder: _write_lake(20_000 * size, folder, partition=20_000),
        expected="1",
        memory="constant",
    ),
    "estimate/dictionary": Case(sizes=_decades(10**3), prepare=_estimate, expected="1", memory="1"),
    "simulate central/devices": Case(
        sizes=_decades(10**5),
        prepare=_simulate("central"),
        expected="0 (rows count, not devices)",
        memory="constant",
    ),
    "simulate local/devices": Case(
        sizes=_decades(10**4), prepare=_simulate("local"), expected="1", memory="constant"
    ),
    "simulate secure/devices": Case(
        sizes=_decades(10**4),
        prepare=_simulate("secure", rounds=1),
        expected="0 (rows count, not devices)",
        memory="constant",
    ),
    "mean/dimensions": Case(sizes=_decades(10**2), prepare=_mean, expected="1", memory="1"),
    "device of a secure round/cohort, seconds": Case(
        sizes=PLANNED,
        prepare=_secure,
        expected="1 of the logarithm",
        of=math.log,
    ),
    "device of a secure round/cohort, bytes": Case(
        sizes=PLANNED,
        prepare=_secure_bytes,
        expected="1 of the logarithm",
        unit="bytes",
        of=math.log,
    ),
    "device of a secure round/large cohorts without sets, bytes": Case(
        sizes=_decades(1_000),
        prepare=_secure_bytes_without_sets,
        expected="1 of the logarithm",
        unit="bytes",
        of=math.log,
    ),
    "device of a secure round/cohorts beyond plans, seconds": Case(
        sizes=BEYOND,
        prepare=_secure,
        expected="1 (the shuffle of all members)",
    ),
    "device of a secure round/cohorts beyond plans, bytes": Case(
        sizes=BEYOND,
        prepare=_secure_bytes,
        expected="1 (three bits for each member)",
        unit="bytes",
    ),
}

if __name__ == "__main__":
    _main(*sys.argv[1:])

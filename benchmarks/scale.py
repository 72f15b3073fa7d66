"""A plan for 10^9 devices: arithmetic over measured rates, and a simulation of arrivals.

`python -m benchmarks.scale` writes `benchmarks/results/scale.md`, which is part of
docs/concepts/scale.md. Every rate and size is read from lines of `benchmarks/results`; what is not
measured is an assumption, and is listed as one. A *store* is one database with its collectors and
its worker, on a machine like that of the measurements; nothing is extrapolated to larger ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from benchmarks.lines import RESULTS, Line, latest, markdown

PAGE = RESULTS / "scale.md"
DAY_SECONDS, MONTH_DAYS = 86_400, 30
SIMULATED, SEED = 1_000_000, 1  # devices of the simulation of arrivals
BINS = 96  # of a quarter of an hour, for the peak
_DAY_HOURS = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What nobody has measured. Change them to yours."""

    devices: int = 1_000_000_000
    cohort: int = 1_000  # of a masked round
    used_share: float = 0.5  # of what a machine could do, at its peak
    overhead_bytes: int = 6_000  # of an upload over a new connection: TLS 1.3, certificates, heads
    connection_seconds: float = 16.0  # a proxy's connection: idle_seconds and a request
    round_seconds: float = 300.0  # how long a device takes part in a masked round
    memory_bytes: int = 8 << 30  # of a store's machine, for its index of report ids
    core_hour: float = 0.05  # dollars, like all prices
    disk_gb_month: float = 0.12
    lake_gb_month: float = 0.023
    proxy_gb: float = 0.008  # of traffic through a load balancer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What lines of results say, per store."""

    cores: int  # of the machine, shared by collector, database and the program that uploads
    reports_per_second: float  # acknowledged, one per upload
    upload_bytes: int
    seal_seconds: float  # of processor time per report: worker and database
    id_bytes: float  # in the database, per report, until its task ends
    record_bytes: int  # in the lake
    fold_seconds: float  # of processor time per record
    rounds_per_second: float  # masked, of one worker
    table_bytes: int  # what a device uploads in a masked round

    @classmethod
    def read(cls) -> Measured:
        ingest, fold = _lines("ingest"), _lines("fold")
        cluster, rounds = _lines("cluster"), _lines("rounds")
        upload, sealed = ingest["postgresql/1 an upload"], ingest["postgresql/seal"]
        folded, masked = fold["hashed/local"], rounds["1000 devices/65536 words"]
        ids = [line["table_bytes"]["seen"] / line["devices"] for line in cluster.values()]
        return cls(
            cores=upload["machine"]["cores"],
            reports_per_second=upload["reports_per_second"],
            upload_bytes=upload["sizes"]["upload_bytes"],
            seal_seconds=sealed["cpu_seconds_a_report"],
            id_bytes=max(ids),
            record_bytes=folded["sizes"]["record_bytes"],
            fold_seconds=folded["median"] * folded["sizes"]["cores"] / folded["sizes"]["records"],
            rounds_per_second=1 / masked["median"],
            table_bytes=masked["sizes"]["vector_bytes"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many devices a day one store takes, by what would break."""

    accepting: float
    sealing: float
    ids: float
    rounds: float

    @property
    def local(self) -> float:
        return min(self.accepting, self.sealing, self.ids)


def bounds(measured: Measured, assumptions: Assumptions, peak: float) -> Bounds:
    """`peak` is the highest rate of arrivals over their mean. Sealing may lag behind it, since what
    waits is on disk; it takes one core, of the worker or of the database. Devices of a masked round
    do not wait for hours."""
    day = DAY_SECONDS * assumptions.used_share
    return Bounds(
        accepting=measured.reports_per_second * day / peak,
        sealing=day / measured.seal_seconds,
        ids=assumptions.memory_bytes / measured.id_bytes,
        rounds=measured.rounds_per_second * day * assumptions.cohort / peak,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One study of a day."""

    stores: int
    mean_per_second: float
    peak_per_second: float
    connections: float  # at the peak, at the proxies
    network_bytes: float
    database_bytes: float  # at the end of the day, of all stores
    lake_bytes: float
    release_seconds: float  # from the last report, on one machine
    dollars: Mapping[str, float]  # per day


def local(measured: Measured, assumptions: Assumptions, peak: float) -> Plan:
    """Every device sends one report."""
    stores = math.ceil(assumptions.devices / bounds(measured, assumptions, peak).local)
    mean = assumptions.devices / DAY_SECONDS
    network = assumptions.devices * float(measured.upload_bytes + assumptions.overhead_bytes)
    database, in_lake = (
        assumptions.devices * measured.id_bytes,
        assumptions.devices * measured.record_bytes,
    )
    return Plan(
        stores=stores,
        mean_per_second=mean,
        peak_per_second=mean * peak,
        connections=mean * peak * assumptions.connection_seconds,
        network_bytes=network,
        database_bytes=database,
        lake_bytes=in_lake,
        release_seconds=assumptions.devices * measured.fold_seconds / measured.cores,
        dollars=_dollars(measured, assumptions, stores, network, database, in_lake),
    )


def secure(measured: Measured, assumptions: Assumptions, peak: float) -> Plan:
    """Every device takes part in one masked round."""
    stores = math.ceil(assumptions.devices / bounds(measured, assumptions, peak).rounds)
    mean = assumptions.devices / DAY_SECONDS
    network = assumptions.devices * float(measured.table_bytes + assumptions.overhead_bytes)
    return Plan(
        stores=stores,
        mean_per_second=mean,
        peak_per_second=mean * peak,
        connections=mean * peak * assumptions.round_seconds,
        network_bytes=network,
        database_bytes=0.0,  # tables are added and not kept
        lake_bytes=0.0,
        release_seconds=1 / measured.rounds_per_second,
        dollars=_dollars(measured, assumptions, stores, network, 0.0, 0.0),
    )


def _dollars(
    measured: Measured,
    assumptions: Assumptions,
    stores: int,
    network: float,
    database: float,
    in_lake: float,
) -> dict[str, float]:
    return {
        "machines": stores * measured.cores * 24 * assumptions.core_hour,
        "traffic": network / 1e9 * assumptions.proxy_gb,
        "disks": database / 1e9 * assumptions.disk_gb_month / MONTH_DAYS,
        "lake": in_lake / 1e9 * assumptions.lake_gb_month / MONTH_DAYS,
    }


def arrivals(online: str, *, devices: int = SIMULATED, seed: int = SEED) -> npt.NDArray[np.float64]:
    """The hours of a day (UTC) at which devices send a report: each draws a random time of the day
    after its record, and sends then, or when it is next online.

    `online` is a key of `PATTERNS`: always; while its owner is awake; while it charges at night, in
    one time zone or in three. When a device's day begins and how long it lasts varies (normal, with
    a standard deviation of an hour and a half).
    """
    rng = np.random.default_rng(seed)
    schedule = rng.uniform(0, _DAY_HOURS, devices)
    begin, hours, zones = PATTERNS[online]
    if hours >= _DAY_HOURS:
        return schedule
    begins = begin - rng.choice(zones, devices) + rng.normal(0, 1.5, devices)
    lengths = np.clip(hours + rng.normal(0, 1.5, devices), 1, _DAY_HOURS)
    since = (schedule - begins) % _DAY_HOURS
    return np.where(since < lengths, schedule, begins) % _DAY_HOURS


PATTERNS: Mapping[str, tuple[float, float, tuple[int, ...]]] = {
    "always": (0.0, 24.0, (0,)),
    "while awake, one time zone": (7.0, 16.0, (0,)),
    "while charging at night, three time zones": (22.5, 8.0, (-6, 1, 8)),
    "while charging at night, one time zone": (22.5, 8.0, (0,)),
}
WORST = "while charging at night, one time zone"


def peak_over_mean(hours: npt.NDArray[np.float64]) -> float:
    """The busiest quarter of an hour over the mean."""
    counts, _ = np.histogram(hours, bins=BINS, range=(0, _DAY_HOURS))
    return float(counts.max() / counts.mean())


def report() -> str:
    """The tables of the page."""
    measured, assumptions = Measured.read(), Assumptions()
    peaks = {name: peak_over_mean(arrivals(name)) for name in PATTERNS}
    limits = bounds(measured, assumptions, peaks[WORST])
    plans = [
        local(measured, assumptions, peaks[WORST]),
        secure(measured, assumptions, peaks[WORST]),
    ]
    parts = {
        "Measured, per store": markdown(
            ("", ""),
            [
                ("cores of the machine", f"{measured.cores}"),
                ("reports acknowledged, one per upload", f"{measured.reports_per_second:,.0f}/s"),
                ("bytes of an upload's body", f"{measured.upload_bytes}"),
                ("sealing, worker and database", f"{1e6 * measured.seal_seconds:.1f} µs"),
                ("ids in the database", f"{measured.id_bytes:.0f} bytes per report"),
                ("records in the lake", f"{measured.record_bytes} bytes per report"),
                ("folding", f"{1e9 * measured.fold_seconds:.0f} ns per record"),
                ("masked rounds of 1,000 devices", f"{measured.rounds_per_second:.2f}/s"),
                ("bytes of a masked table", f"{measured.table_bytes:,}"),
            ],
        ),
        "Assumed": markdown(
            ("", ""),
            [
                (each.name.replace("_", " "), f"{getattr(assumptions, each.name):,}")
                for each in fields(assumptions)
            ],
        ),
        "Arrivals": markdown(
            ("devices are online", "peak over mean"),
            [(name, f"{peak:.2f}") for name, peak in peaks.items()],
        ),
        "Devices per day and store, before it breaks": markdown(
            ("what", "devices"),
            [
                ("accepting reports, at the peak", _millions(limits.accepting)),
                ("sealing", _millions(limits.sealing)),
                ("report ids fit into memory", _millions(limits.ids)),
                ("masked rounds of one worker", _millions(limits.rounds)),
            ],
        ),
        "Masked rounds of 100 devices, on a busy machine": markdown(
            ("cohorts at once", "processor time of the collector per round"),
            [
                (f"{each['sizes']['cohorts']}", f"{each['cpu_seconds_a_round']:.2f} s")
                for each in _lines("rounds").values()
                if "cpu_seconds_a_round" in each
            ],
        ),
        f"{assumptions.devices:,} devices in a day": markdown(
            ("", "local", "secure"),
            [
                ("stores", *(f"{each.stores:,}" for each in plans)),
                ("arrivals, mean", *(f"{each.mean_per_second:,.0f}/s" for each in plans)),
                ("arrivals, peak", *(f"{each.peak_per_second:,.0f}/s" for each in plans)),
                ("connections, peak", *(_millions(each.connections) for each in plans)),
                ("network", *(_bytes(each.network_bytes) for each in plans)),
                ("databases", *(_bytes(each.database_bytes) for each in plans)),
                ("lake", *(_bytes(each.lake_bytes) for each in plans)),
                (
                    "time to release, on one machine",
                    *(f"{each.release_seconds:,.0f} s" for each in plans),
                ),
                *(
                    (f"$ per day: {name}", *(f"{each.dollars[name]:,.0f}" for each in plans))
                    for name in plans[0].dollars
                ),
                ("$ per day", *(f"{sum(each.dollars.values()):,.0f}" for each in plans)),
            ],
        ),
    }
    return (
        "\n\n".join(["# scale", *(f"**{name}**\n\n{text}" for name, text in parts.items())]) + "\n"
    )


def _lines(name: str) -> dict[str, Line]:
    return {each["case"]: each for each in latest(RESULTS / f"{name}.jsonl")}


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M"


def _bytes(count: float) -> str:
    if count == 0:
        return "none"
    return f"{count / 1e12:,.1f} TB" if count >= 1e12 else f"{count / 1e9:,.0f} GB"


if __name__ == "__main__":
    PAGE.write_text(report(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"), file=sys.stdout)

"""Timing as a race: all contenders in turn, repeatedly, so that all have the same conditions.

A machine's speed drifts with its load and its clock. Two times that were measured minutes apart
cannot be compared; two in a row can. So every repetition times ours, the peers and the floors, and
the ratio is computed within the repetition.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lines import Line, Settings, line, markdown

REPETITIONS = 7


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time; `scale` is the full work divided by its own."""

    run: Callable[[], object]
    scale: float = 1.0
    seconds: Callable[[object], float] | None = None  # read from the result; else the wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One case of a speed benchmark: ours against peers (as fast?) and floors (how far off?)."""

    name: str
    case: str
    sizes: Mapping[str, Any]
    seeds: Sequence[int]
    ours: Contender
    peers: Mapping[str, Contender]
    floors: Mapping[str, Contender]
    packages: Sequence[str] = ()  # their versions are recorded
    cores: int | None = None  # None: all
    note: str = ""
    more: Callable[[list[object]], Mapping[str, Any]] = field(default=lambda results: {})
    warm_up: bool = True


def run(race: Race, settings: Settings) -> Line:
    """Time everything in turn; medians over repetitions, intervals from smallest to largest."""
    repetitions = settings.repeats or (1 if settings.quick else REPETITIONS)
    contenders = {"ours": race.ours, **race.peers, **race.floors}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    results = []
    with on_cores(race.cores):
        if race.warm_up:
            for contender in contenders.values():
                contender.run()
        for _ in range(repetitions):
            for name, contender in contenders.items():
                started = time.perf_counter()
                result = contender.run()
                seconds = time.perf_counter() - started
                if contender.seconds is not None:
                    seconds = contender.seconds(result)
                times[name].append(seconds * contender.scale)
                if name == "ours":
                    results.append(result)
    ours = times["ours"]
    return line(
        race.name,
        race.case,
        settings,
        sizes=race.sizes,
        seeds=race.seeds,
        repetitions=repetitions,
        packages=race.packages,
        unit="seconds",
        **_summary(ours),
        seconds={name: statistics.median(seconds) for name, seconds in times.items()},
        ratio_to_peer={
            name: _summary([peer / own for peer, own in zip(times[name], ours, strict=True)])
            for name in race.peers
        },
        ratio_to_floor={
            name: _summary([own / floor for floor, own in zip(times[name], ours, strict=True)])
            for name in race.floors
        },
        note=race.note,
        **race.more(results),
    )


def table(lines: Sequence[Line]) -> str:
    """Times faster than the peers and times the floors' time: median (smallest to largest)."""
    rows = [
        [
            f"{result['name']}/{result['case']}",
            f"{result['median']:.4g}",
            "; ".join(_ratio(name, ratio) for name, ratio in result["ratio_to_peer"].items()),
            "; ".join(_ratio(name, ratio) for name, ratio in result["ratio_to_floor"].items()),
        ]
        for result in lines
    ]
    return markdown(["case", "seconds", "times faster than", "times the floor"], rows)


@contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """Keep this process on `count` cores, where the system can; sfumato uses all that it sees."""
    if count is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def in_parts(function: Callable[[int, int], object], size: int, cores: int) -> Callable[[], object]:
    """function(start, stop) over `size` items, one part per core: floors use as many as we may."""
    if cores == 1:
        return lambda: function(0, size)
    cuts = [size * part // cores for part in range(cores + 1)]

    def spread() -> object:
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(function, cuts[:-1], cuts[1:]))

    return spread


def core_counts() -> list[int]:
    """One core, and two where there are two."""
    return [1, 2] if (os.cpu_count() or 1) >= 2 else [1]


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "interval": [min(values), max(values)]}


def _ratio(name: str, ratio: Mapping[str, Any]) -> str:
    low, high = ratio["interval"]
    return f"{name} {ratio['median']:.3g} ({low:.3g} to {high:.3g})"

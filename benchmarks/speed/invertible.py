"""Keys into an invertible sketch and out of it again, on one core: against two peers and memory.

The peers are those in `.peers` (`scripts/peers` says how to get and build them): a C++ library with
64-bit keys and 4-byte values, and that of TensorFlow Federated with strings of ten characters. Each
races against our sketch of the same keys and values. The floor is what any such table must do: read
and write one random cell per row and key.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from benchmarks import race
from benchmarks.lines import ROOT, Line, Settings
from benchmarks.peer import Peer, python_of
from benchmarks.race import Contender
from sfumato.sketch import IntegerKeys, InvertibleSketch, TextKeys, capacity

NAME = "invertible"
SEED = 1
DRIVER = ROOT / ".peers" / "iblt_cpp" / "driver"
TFF_SOURCES = ROOT / ".peers" / "tff_iblt"
REPEATS = 3  # per measurement of a peer, which times itself
LEAST = {"C++": 5.0, "TFF": 50.0}  # times faster than a peer
table = race.table

I64 = npt.NDArray[np.int64]
_CALLS = count(1)


def run(settings: Settings) -> Iterator[Line]:
    sizes = (2_000,) if settings.quick else (10_000, 100_000, 1_000_000)
    for keys in sizes:
        yield from _integers(settings, keys)
    python = python_of(".venv-tff") if TFF_SOURCES.exists() else None
    peer = Peer(python, "tff_iblt_server.py") if python is not None else None
    try:
        for keys in (1_000,) if settings.quick else (1_000, 5_000):
            yield from _strings(settings, keys, peer)
    finally:
        if peer is not None:
            peer.close()


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"{line['name']}/{line['case']}: {ratio['median']:.3g} times faster than {peer}, "
        f"not {LEAST[peer]:g}"
        for line in lines
        for peer, ratio in line["ratio_to_peer"].items()
        if ratio["median"] < LEAST[peer]
    ]


def _integers(settings: Settings, keys: int) -> Iterator[Line]:
    chance = np.random.default_rng(SEED)
    items = np.unique(chance.integers(0, 1 << 62, 2 * keys))[:keys]
    chance.shuffle(items)
    sketch = InvertibleSketch(
        keys=IntegerKeys(bits=63), rows=3, width=-(-capacity.typical_cells(keys) // 3),
        count_bits=5, value_bits=36, check_bits=10, seed=SEED,
    )  # fmt: skip
    amounts = chance.integers(0, 1 << 31, keys)
    peer: dict[str, Any] = {}
    if DRIVER.exists() and keys <= 100_000:
        peer = {"C++": lambda: _run_driver(keys)}
    yield from _both(settings, f"{keys:,} integers", sketch, items, amounts, peer)


def _strings(settings: Settings, keys: int, tff: Peer | None) -> Iterator[Line]:
    chance = np.random.default_rng(SEED)
    letters = chance.integers(97, 123, (keys, 10), dtype=np.uint8)
    items = pa.array(np.unique(letters.view("S10").astype("U10").reshape(-1)))
    sketch = InvertibleSketch(
        keys=TextKeys(length=10), rows=3, width=-(-capacity.typical_cells(len(items)) // 3),
        count_bits=8, check_bits=16, seed=SEED,
    )  # fmt: skip
    peer: dict[str, Any] = {}
    if tff is not None:
        peer = {"TFF": lambda: tff.ask({"keys": keys, "repeats": REPEATS})}
    yield from _both(settings, f"{keys:,} strings", sketch, items, None, peer)


def _both(
    settings: Settings,
    case: str,
    sketch: InvertibleSketch,
    items: Any,
    amounts: I64 | None,
    peer: Mapping[str, Any],
) -> Iterator[Line]:
    filled = sketch.encode(items, None, amounts)
    assert sketch.list(filled).is_complete
    total = len(items)
    calls = max(1, 50_000 // total)  # more calls per measurement for small tables
    cells = np.random.default_rng(SEED).integers(0, sketch.width, (total, sketch.rows))
    scratch = np.zeros((sketch.rows * sketch.width, sketch.words), dtype=np.uint64)
    work = {
        "insert": lambda: sketch.encode(items, None, amounts),
        "list": lambda: sketch.list(filled),
    }
    for what, ours in work.items():
        if not settings.wants(f"{what}/{case}"):
            continue
        yield race.run(
            race.Race(
                name=NAME,
                case=f"{what}/{case}",
                sizes={"keys": total, "cell_bits": sketch.cell_bits},
                seeds=[SEED],
                ours=Contender(partial(_again, ours, calls), scale=1 / calls),
                peers={
                    name: Contender(ask, seconds=_seconds_of(what)) for name, ask in peer.items()
                },
                floors={
                    "cells touched": Contender(
                        partial(_again, lambda: _touch(scratch, cells, sketch.width), calls),
                        scale=1 / calls,
                    )
                },
                cores=1,
                note="the floor hashes nothing and checks nothing",
            ),
            settings,
        )


def _seconds_of(what: str) -> Any:
    def seconds(answer: Any) -> float:
        assert all(answer["listed"])
        return float(np.median(answer[f"{what}_seconds"]))

    return seconds


def _run_driver(keys: int) -> Any:
    """Run the C++ peer in its own process; it times itself."""
    command = [str(DRIVER), str(keys), str(REPEATS), str(next(_CALLS))]  # other keys each time
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _again(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


@njit(nogil=True, cache=True)
def _touch(table: Any, cells: Any, width: int) -> None:
    for i in range(cells.shape[0]):
        for row in range(cells.shape[1]):
            cell = row * width + cells[i, row]
            for word in range(table.shape[1]):
                table[cell, word] += np.uint64(i)

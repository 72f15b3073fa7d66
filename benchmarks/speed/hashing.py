"""Fingerprints of strings and integers: against xxhash one by one, and a copy of the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from benchmarks import race
from benchmarks.lines import Line, Settings
from sfumato.hashing import fingerprint

NAME = "hashing"
SEED = 1
table = race.table


def run(settings: Settings) -> Iterator[Line]:
    count = 1 << (12 if settings.quick else 21)
    for length in (8, 20, 60):
        for cores in race.core_counts():
            case = f"strings/{length} bytes/{_cores(cores)}"
            if settings.wants(case):
                items, data = strings(count, length)
                yield _race(settings, case, items, data, items.cast(pa.binary()).to_pylist(), cores)
    for cores in race.core_counts():
        case = f"integers/{_cores(cores)}"
        if settings.wants(case):
            numbers = np.random.default_rng(SEED).integers(0, 1 << 62, size=count)
            encoded = [number.to_bytes(8, "little") for number in numbers.tolist()]
            yield _race(settings, case, numbers, numbers.view(np.uint8), encoded, cores)


def strings(count: int, length: int) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
    """Random lower-case strings of one length, and their bytes (count × length,)."""
    letters = np.random.default_rng(SEED).integers(97, 123, size=count * length, dtype=np.uint8)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(length)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.string(), count, buffers), letters


def one_by_one(encoded: list[bytes]) -> list[int]:
    """The peer: one call per item."""
    return [xxhash.xxh64_intdigest(item) for item in encoded]


def _race(
    settings: Settings,
    case: str,
    items: pa.Array | npt.NDArray[np.integer],
    data: npt.NDArray[np.uint8],
    encoded: list[bytes],
    cores: int,
) -> Line:
    """Ours on the items, the peer on their bytes in `encoded`, the floor on all bytes at once."""
    target = np.empty_like(data)

    def copy(start: int, stop: int) -> None:
        np.copyto(target[start:stop], data[start:stop])

    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes={"items": len(items), "bytes": data.size, "cores": cores},
            seeds=[SEED],
            ours=race.Contender(lambda: fingerprint(items, SEED)),
            peers={"xxhash one by one": race.Contender(lambda: one_by_one(encoded))},
            floors={"copy": race.Contender(race.in_parts(copy, data.size, cores))},
            packages=["xxhash"],
            cores=cores,
            note="the peer is a Python loop on one core over bytes that are encoded beforehand",
        ),
        settings,
    )


def _cores(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"

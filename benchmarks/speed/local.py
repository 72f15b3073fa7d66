"""Local privacy on one core: devices, folding and estimating, against pure-ldp and bare loops.

pure-ldp runs in its own environment and process (`scripts/peers`), on fewer records, scaled to
ours; without that environment the race is run without it. Its Hadamard sketch needs 18.6 GB at the
paper's width of 32,768, so it runs at width 1,024.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import race
from benchmarks.lines import Line, Settings
from benchmarks.peer import Peer, python_of
from benchmarks.race import Contender
from sfumato.kernels import local
from sfumato.privacy import (
    CountMeanSketch,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    SystemRng,
    Tally,
    debias,
)
from sfumato.privacy.randomizers import Hashed

NAME = "local"
SERVER = "pure_ldp_server.py"
PEER_RECORDS = 3_000
table = race.table


def run(settings: Settings) -> Iterator[Line]:
    python = python_of(".venv-peers")
    peer = Peer(python, SERVER) if python is not None else None
    try:
        yield from _races(settings, peer)
    finally:
        if peer is not None:
            peer.close()


def _races(settings: Settings, peer: Peer | None) -> Iterator[Line]:
    quick = settings.quick
    rows = 256 if quick else 65_536
    cms = CountMeanSketch(epsilon=4.0, rows=rows, width=1_024, seed=1)
    hcms = HadamardCountMeanSketch(
        epsilon=4.0, rows=64 if quick else 1_024, width=1_024 if quick else 32_768, seed=1
    )
    hashed = HashedResponse(epsilon=4.0, rows=1_024, width=56, seed=1)
    as_cms: list[Any] = ["cms", 4.0, rows, 1_024]
    as_hcms: list[Any] = ["hcms", 4.0, 64 if quick else 1_024, 1_024]
    cases: list[tuple[str, Randomizer, int, list[Any] | None]] = [
        ("count mean", cms, 2_000 if quick else 4_000_000, as_cms),
        ("hadamard", hcms, 2_000 if quick else 4_000_000, as_hcms),
        ("hashed response", hashed, 2_000 if quick else 4_000_000, None),
    ]
    for name, randomizer, count, oracle in cases:
        devices = min(count, 200_000)
        values = np.resize(randomizer.values(np.arange(1_000)), devices)
        if settings.wants(f"{name}/device"):
            yield _race(
                settings,
                f"{name}/device",
                {"records": devices, "rows": randomizer.rows, "width": randomizer.width},
                Contender(partial(randomizer.randomize, values, rng=SystemRng())),
                _against(peer, "device", oracle, devices),
                {"random bytes": Contender(partial(_random, randomizer, devices))},
                "the floor draws as many random words as the records hold bits, and no more",
            )
        if settings.wants(f"{name}/fold"):
            yield _fold_race(settings, name, randomizer, count, oracle, peer)
        if settings.wants(f"{name}/estimate"):
            yield _estimate_race(settings, name, randomizer, oracle, peer)


def _fold_race(
    settings: Settings,
    name: str,
    randomizer: Randomizer,
    count: int,
    oracle: list[Any] | None,
    peer: Peer | None,
) -> Line:
    part = randomizer.randomize(
        np.resize(randomizer.values(np.arange(1_000)), min(count, 1 << 18)), rng=SystemRng()
    )
    records = np.resize(part, (count, part.shape[1]))
    if isinstance(randomizer, CountMeanSketch):  # repeated bits, in random rows
        rows = np.random.default_rng(1).integers(0, randomizer.rows, count).astype("<u4")
        records[:, : randomizer.record_bytes - 128] = rows.view(np.uint8).reshape(-1, 4)[
            :, : randomizer.record_bytes - 128
        ]
    tally = Tally(randomizer)
    return _race(
        settings,
        f"{name}/fold",
        {"records": count, "rows": randomizer.rows, "width": randomizer.width},
        Contender(lambda: tally.fold(records)),
        _against(peer, "fold", oracle, count),
        {"read the records": Contender(lambda: int(records.sum(dtype=np.uint64)))},
        "the floor adds up the bytes of the records",
    )


def _estimate_race(
    settings: Settings,
    name: str,
    randomizer: Randomizer,
    oracle: list[Any] | None,
    peer: Peer | None,
) -> Line:
    items = 50 if settings.quick else (2_600 if name == "count mean" else 250_000)
    if name == "hashed response":
        items = min(items, 2_600)
    tally = Tally(randomizer)
    values = randomizer.values(np.arange(items))
    tally.fold(randomizer.randomize(np.resize(values, 100_000), rng=SystemRng()))
    points = values.astype(np.uint64)
    return _race(
        settings,
        f"{name}/estimate",
        {"items": items, "rows": randomizer.rows, "width": randomizer.width},
        Contender(
            lambda: debias.estimate(tally, values, collision_aware=name == "hashed response")
        ),
        _against(peer, "estimate", oracle, items, items=2),
        {
            "hash only": Contender(
                lambda: [
                    local.row_cells(points, np.full(items, row), _hashes(randomizer), 1_024)
                    for row in range(min(randomizer.rows, 64))
                ],
                randomizer.rows / min(randomizer.rows, 64),
            )
        },
        "the floor evaluates the hash functions and reads nothing",
    )


def _race(
    settings: Settings,
    case: str,
    sizes: Mapping[str, Any],
    ours: Contender,
    peers: Mapping[str, Contender],
    floors: Mapping[str, Contender],
    note: str,
) -> Line:
    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes=sizes,
            seeds=[1],
            ours=ours,
            peers=peers,
            floors=floors,
            cores=1,
            note=note,
            more=lambda results: {
                "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            },
        ),
        settings,
    )


def _against(
    peer: Peer | None, step: str, oracle: list[Any] | None, work: int, items: int = 0
) -> dict[str, Contender]:
    """pure-ldp on a part of the work, scaled to all of it; its seconds are CPU time."""
    if peer is None or oracle is None:
        return {}
    records = min(work, PEER_RECORDS)
    share = work / (items or records)
    return {
        "pure-ldp": Contender(
            partial(peer.ask, {"step": step, "oracle": oracle, "records": records, "items": items}),
            share,
            seconds=lambda result: float(result),  # type: ignore[arg-type]  # what ask returns
        )
    }


def _random(randomizer: Randomizer, count: int) -> object:
    return SystemRng().words(-(-count * randomizer.record_bytes // 8))


def _hashes(randomizer: Randomizer) -> npt.NDArray[np.uint64]:
    assert isinstance(randomizer, Hashed)  # all that are raced here
    return randomizer.hashes

"""Ten million parameters into a dense sketch and out of it again, on two cores: against two peers.

PyTorch gets its hashes beforehand: `scatter_add` fills a table, a gather and a mean decode it.
csvec is the count sketch of FetchSGD, on PyTorch with stored hashes; it decodes by the median over
rows, so it races against blocks of one row. It takes part where `.peers` has it (`scripts/peers`
says how to get it). Any sketch of a vector must pass over it once, so a copy is the floor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from benchmarks import race
from benchmarks.lines import ROOT, Line, Settings
from benchmarks.race import Contender
from sfumato.sketch.dense import DenseSketch

NAME = "dense"
SEED = 1
COMPRESSION = 50  # coordinates per cell of a row
CSVEC = ROOT / ".peers" / "csvec" / "csvec.py"
LEAST = {"csvec": 20.0, "torch": 8.0}  # times faster than a peer
table = race.table

F32 = npt.NDArray[np.float32]


def run(settings: Settings) -> Iterator[Line]:
    length = 50_000 if settings.quick else 10_000_000
    vector = np.random.default_rng(SEED).normal(size=length).astype(np.float32)
    torch = _torch()
    for rows in (5,) if settings.quick else (5, 15):
        yield from _torch_cases(settings, vector, rows, torch)
        if torch is not None and CSVEC.exists():
            yield from _csvec_cases(settings, vector, rows, torch)


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"{line['name']}/{line['case']}: {ratio['median']:.3g} times faster than {peer}, "
        f"not {LEAST[peer]:g}"
        for line in lines
        for peer, ratio in line["ratio_to_peer"].items()
        if ratio["median"] < LEAST[peer]
    ]


def _torch_cases(
    settings: Settings, vector: F32, rows: int, torch: ModuleType | None
) -> Iterator[Line]:
    """Encoding, and decoding by the mean over rows."""
    cases = {what: f"{what}/{rows} rows/torch" for what in ("encode", "mean")}
    if not any(settings.wants(case) for case in cases.values()):
        return
    sketch = DenseSketch(length=vector.size, rows=rows, width=vector.size // COMPRESSION, seed=SEED)
    filled = sketch.encode(vector)
    encodes: dict[str, Callable[[], object]] = {}
    decodes: dict[str, Callable[[], object]] = {}
    if torch is not None:
        chance = torch.Generator().manual_seed(SEED)
        tensor = torch.from_numpy(vector)
        cells = torch.randint(0, sketch.width, (rows, vector.size), generator=chance)
        signs = torch.randint(0, 2, (rows, vector.size), generator=chance).float() * 2 - 1
        read_from = torch.from_numpy(filled)

        def scatter() -> object:
            result = torch.zeros(rows, sketch.width)
            for row in range(rows):
                result[row].scatter_add_(0, cells[row], signs[row] * tensor)
            return result

        def gather() -> object:
            result = torch.zeros(vector.size)
            for row in range(rows):
                result += read_from[row].gather(0, cells[row]) * signs[row]
            return result / rows

        encodes, decodes = {"torch": scatter}, {"torch": gather}
    if settings.wants(cases["encode"]):
        yield _line(
            settings, cases["encode"], sketch, vector, lambda: sketch.encode(vector), encodes
        )
    if settings.wants(cases["mean"]):
        yield _line(settings, cases["mean"], sketch, vector, lambda: sketch.decode(filled), decodes)


def _csvec_cases(settings: Settings, vector: F32, rows: int, torch: ModuleType) -> Iterator[Line]:
    """Encoding, and decoding by the median over rows."""
    cases = {what: f"{what}/{rows} rows/csvec" for what in ("encode", "median")}
    if not any(settings.wants(case) for case in cases.values()):
        return
    sketch = DenseSketch(
        length=vector.size, rows=1, blocks=rows, width=vector.size // COMPRESSION, seed=SEED
    )
    filled, tensor = sketch.encode(vector), torch.from_numpy(vector)
    module = _csvec()
    peer = module.CSVec(d=vector.size, c=sketch.width, r=rows, device="cpu")

    def accumulate() -> object:
        peer.zero()
        peer.accumulateVec(tensor)
        return peer.table

    encodes: dict[str, Callable[[], object]] = {"csvec": accumulate}
    decodes: dict[str, Callable[[], object]] = {"csvec": peer._findAllValues}
    if settings.wants(cases["encode"]):
        yield _line(
            settings, cases["encode"], sketch, vector, lambda: sketch.encode(vector), encodes
        )
    if settings.wants(cases["median"]):
        yield _line(
            settings, cases["median"], sketch, vector, lambda: sketch.decode(filled), decodes
        )
    module.cache.clear()  # gigabytes of hashes


def _line(
    settings: Settings,
    case: str,
    sketch: DenseSketch,
    vector: F32,
    ours: Callable[[], F32],
    peers: dict[str, Callable[[], object]],
) -> Line:
    cores = race.core_counts()[-1]
    copy = np.empty_like(vector)

    def copy_part(first: int, last: int) -> None:
        copy[first:last] = vector[first:last]

    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes={"length": sketch.length, "rows": sketch.shape[0], "width": sketch.width},
            seeds=[SEED],
            ours=Contender(lambda: ours() is None),  # a race keeps our results, which are large
            peers={name: Contender(work) for name, work in peers.items()},
            floors={"copy": Contender(race.in_parts(copy_part, vector.size, cores))},
            packages=("torch",),
            cores=cores,
            note="hashes of the peers are drawn before; ours are computed on the way",
            more=lambda results: _quality(ours(), sketch, vector),
        ),
        settings,
    )


def _quality(result: F32, sketch: DenseSketch, vector: F32) -> dict[str, float]:
    """The squared norm of a table (1 is expected) or the squared error of a reading, over ‖z‖²."""
    square = float(vector @ vector)
    if result.shape == sketch.shape:
        return {"squared_norm": sketch.norm(result) ** 2 / square}
    error = (result - vector).astype(np.float64)
    return {"squared_error": float(error @ error) / square}


def _torch() -> ModuleType | None:
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(race.core_counts()[-1])
    return torch


def _csvec() -> ModuleType:
    spec = importlib.util.spec_from_file_location("csvec", CSVEC)
    assert spec is not None  # the file is there
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

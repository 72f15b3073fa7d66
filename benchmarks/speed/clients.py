"""A round of a hundred simulated clients on one core: against pfl-research, Flower and a loop.

A client trains a perceptron of 784, 128 and 62 units on a batch of 20; its update is clipped; the
updates are added. Ours is a whole round of `Training` in floats, including the server's step, which
peers leave out. pfl, the loop and ours have the core to themselves in turn; Flower has an actor on
every core. Peers run in their own environments and processes (`scripts/peers`), where those exist.

Before they race, all sums are compared with one in double precision. A client holds one batch, so
that the order of examples does not matter, and half of the updates are clipped.

The last lines are another question: by how much sketching lengthens a round of the convolutional
network of paper 002, and Adapt Norm, which has a second sketch. A few clients are timed, and scaled
to a hundred.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import race
from benchmarks.lines import Line, Settings
from benchmarks.peer import Peer, python_of
from benchmarks.race import Contender
from sfumato.flow.model_terms import LocalTraining
from sfumato.learn import models
from sfumato.learn.campaign import TrainingCampaign
from sfumato.learn.clients import updates
from sfumato.learn.compression import AdaptNorm, Compression, FixedRate
from sfumato.learn.data import Clients, Federated
from sfumato.learn.design import ServerOptimizer, TrainingDesign
from sfumato.learn.tensors import TensorSketch
from sfumato.learn.training import Training

NAME = "clients"
SEED = 1
BATCH = 20
CHUNK = 16  # clients whose products the floor computes together, as we do
ROUNDS = 3  # per measurement, of all but Flower
LEARNING_RATE = 0.1
LEAST = {"pfl": 3.0, "Flower": 20.0}  # times faster than a peer, with one step
# Worst rounding error of the longest sum of products in single precision, 784 terms.
CLOSE = 784 * 2.0**-24

# Sketching of paper 002's network.
COHORT = 100
TIMED = 4  # clients of the cohort
EXAMPLES = 140  # per writer of F-EMNIST in LEAF's sample, on average
RATE = 50
MOST_TIMES_WITHOUT = 1.05
SKETCHED: dict[str, Compression] = {"sketching": FixedRate(rate=RATE), "adapt norm": AdaptNorm()}

F32 = npt.NDArray[np.float32]
Work = Callable[[], Any]


def run(settings: Settings) -> Iterator[Line]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            peers = _Peers(folder, 4 if settings.quick else COHORT)
            stack.callback(peers.close)
            for steps in (1, 5):
                yield from _rounds(settings, peers, steps)
        for case, rule in SKETCHED.items():
            if settings.wants(case):
                yield _sketching(settings, case, rule)
    finally:
        torch.set_num_threads(threads)


def table(lines: Sequence[Line]) -> str:
    """The race, and clients per second."""
    rates = [
        f"{line['case']}, clients per second: "
        + ", ".join(
            f"{name} {line['sizes']['clients'] / seconds:,.0f}"
            for name, seconds in line["seconds"].items()
        )
        for line in lines
    ]
    return "\n".join([race.table(lines), *rates])


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [f"{NAME}/{line['case']}: {text}" for line in lines for text in _complaints(line)]


def _complaints(line: Line) -> Iterator[str]:
    if line["case"] == "sketching":
        share = line["ratio_to_floor"]["without"]["median"]
        if share > MOST_TIMES_WITHOUT:
            yield f"a round takes {share:.4g} times as long, not {MOST_TIMES_WITHOUT:g}"
    elif line["sizes"].get("steps") == 1:
        for peer, ratio in line["ratio_to_peer"].items():
            if ratio["median"] < LEAST.get(peer, 0.0):
                yield f"{ratio['median']:.3g} times faster than {peer}, not {LEAST[peer]:g}"


class _Peers:
    """The peers that are installed, and the examples that all read."""

    def __init__(self, folder: Path, clients: int) -> None:
        chance = np.random.default_rng(SEED)
        self.folder, self.count = folder, clients
        inputs = chance.random((clients, BATCH, 784), dtype=np.float32)
        targets = chance.integers(0, 62, (clients, BATCH))
        self.inputs, self.targets = torch.from_numpy(inputs), torch.from_numpy(targets)
        self.model = models.make("mlp", seed=SEED)
        parts = [part.detach().numpy() for part in self.model.parameters()]
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        arrays = dict(zip(names, parts, strict=True)) | {"inputs": inputs, "targets": targets}
        np.savez(folder / "clients.npz", **arrays)  # type: ignore[arg-type]  # none is an option
        pfl, flower = python_of(".venv-pfl"), python_of(".venv-flower")
        self.there: dict[str, Peer] = {}
        if pfl is not None:
            self.there["pfl"] = Peer(pfl, "pfl_server.py")
        if flower is not None:
            self.there["Flower"] = Peer(flower, "flower_clients_server.py")

    def clients(self) -> Clients:
        return Clients(
            inputs=self.inputs.reshape(-1, 784),
            targets=self.targets.reshape(-1),
            offsets=torch.arange(self.count + 1) * BATCH,
        )

    def ask(self, name: str, steps: int, clip: float) -> Any:
        task = {
            "path": str(self.folder / "clients.npz"),
            "sum": str(self.folder / f"{name}.npy"),
            "clients": self.count,
            "steps": steps,
            "learning_rate": LEARNING_RATE,
            "clip": clip,
            "rounds": ROUNDS,
            "actors": race.core_counts()[-1],
        }
        return self.there[name].ask(task)

    def sum(self, name: str) -> F32:
        result: F32 = np.load(self.folder / f"{name}.npy")
        return result

    def close(self) -> None:
        for peer in self.there.values():
            peer.close()


def _rounds(settings: Settings, peers: _Peers, steps: int) -> Iterator[Line]:
    case = f"{steps} step" + "s" * (steps > 1)
    if not settings.wants(case):
        return
    truth, norms = _loop(peers, peers.model.double(), steps, np.inf)
    clip = float(np.median(norms))
    truth, _ = _loop(peers, peers.model, steps, clip)
    peers.model.float()
    clients = peers.clients()
    local = LocalTraining(learning_rate=LEARNING_RATE, batch=BATCH, steps=steps)
    flat = models.flatten(peers.model)

    contenders: dict[str, Contender] = {
        "loop": _again(lambda: _loop(peers, peers.model, steps, clip)[0])
    }
    _compare("the loop", _loop(peers, peers.model, steps, clip)[0], truth)
    versions = {}
    for name in peers.there:
        versions[name] = peers.ask(name, steps, clip)["version"]
        _compare(name, torch.from_numpy(peers.sum(name)), truth)
        contenders[name] = Contender(partial(peers.ask, name, steps, clip), seconds=_seconds)
    work = _round(clients, local, clip)
    _compare(f"our {case}", work(), truth)
    floors = {"products": partial(_products, peers)} if steps == 1 else {}
    yield race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes={"clients": peers.count, "batch": BATCH, "steps": steps}
            | {"parameters": flat.numel(), "clip": clip},
            seeds=[SEED],
            ours=_again(work),
            peers=contenders,
            floors={floor: _again(products) for floor, products in floors.items()},
            packages=["torch"],
            cores=1,
            note="ours, pfl and the loop on one core; Flower on all. The floor is one step's "
            "matrix products, and for clipping the weighted sum",
            more=lambda results: {"peer_versions": versions},
        ),
        settings,
    )


def _round(clients: Clients, local: LocalTraining, clip: float) -> Callable[[], Tensor]:
    """A round of our training, always from the same model; returns the sum."""
    count = len(clients)
    design = TrainingDesign(
        model="mlp",
        clients=count,
        cohort=count,
        rounds=1,
        sampling="fixed",
        local=local,
        clip=clip,
        noise_multiplier=0.0,
        server=ServerOptimizer(momentum=0.0),  # its memory is then the mean update
        seed=SEED,
    )
    tests = clients.inputs[:1], clients.targets[:1]
    training = Training(design=design, data=Federated(clients, *tests, "made up"), exact=False)
    start = training.campaign.state()
    flat = start["flat"].clone()

    def again() -> Tensor:
        training.campaign = TrainingCampaign.load(design, {**start, "flat": flat.clone()})
        figures = training.round()
        assert figures.answered == count
        return training.campaign.memory["first"] * count

    return again


def _loop(peers: _Peers, model: nn.Module, steps: int, clip: float) -> tuple[Tensor, list[float]]:
    """One client after another through the module: the sum, and the norms before clipping."""
    parameters = list(model.parameters())
    start = [value.detach().clone() for value in parameters]
    total = [torch.zeros_like(value) for value in start]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    norms = []
    for inputs, targets in zip(peers.inputs.to(start[0].dtype), peers.targets, strict=True):
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
        with torch.no_grad():
            deltas = [now - then for now, then in zip(parameters, start, strict=True)]
            norm = float(torch.linalg.vector_norm(torch.cat([each.ravel() for each in deltas])))
            for place, delta in zip(total, deltas, strict=True):
                place.add_(delta, alpha=min(1.0, clip / norm))
            for now, then in zip(parameters, start, strict=True):
                now.copy_(then)
        norms.append(norm)
    return torch.cat([each.ravel() for each in total]), norms


def _compare(who: str, result: Tensor, truth: Tensor) -> None:
    off = float(torch.linalg.vector_norm(result.double() - truth) / torch.linalg.vector_norm(truth))
    assert off <= CLOSE, f"the sum of {who} is off by {off:.3g} of its norm"


@torch.no_grad()
def _products(peers: _Peers) -> Tensor:
    """One step's matrix products for all clients, and the weighted sum of their updates."""
    first, _, second, _ = peers.model.parameters()
    total = torch.zeros(first.numel() + second.numel())
    state = torch.empty(CHUNK, total.numel())
    for start in range(0, peers.count, CHUNK):
        inputs = peers.inputs[start : start + CHUNK]
        hidden = inputs @ first.mT
        out = hidden @ second.mT
        back = out @ second
        updates_of_chunk = state[: len(inputs)]
        below, above = updates_of_chunk[:, : first.numel()], updates_of_chunk[:, first.numel() :]
        torch.bmm(back.mT, inputs, out=below.view(-1, *first.shape))
        torch.bmm(out.mT, hidden, out=above.view(-1, *second.shape))
        total += torch.ones(len(inputs)) @ updates_of_chunk
    return total


def _again(work: Work) -> Contender:
    def stretch() -> None:  # returns nothing, since a race keeps our results
        for _ in range(ROUNDS):
            work()

    return Contender(stretch, scale=1 / ROUNDS)


def _seconds(answer: Any) -> float:
    return float(answer["seconds"])


def _sketching(settings: Settings, case: str, rule: Compression) -> Line:
    """Encoding every update and decoding the sum, beside training, clipping and adding. A rule that
    measures a norm takes it from the sum of second sketches."""
    timed, examples = (1, BATCH) if settings.quick else (TIMED, EXAMPLES)
    chance = torch.Generator().manual_seed(SEED)
    clients = Clients(
        inputs=torch.rand(timed * examples, 784, generator=chance),
        targets=torch.randint(0, 62, (timed * examples,), generator=chance),
        offsets=torch.arange(timed + 1) * examples,
    )
    local = LocalTraining(learning_rate=0.01, batch=BATCH)
    design = TrainingDesign(
        model="cnn", clients=COHORT, cohort=COHORT, rounds=1, local=local, clip=1.0,
        noise_multiplier=0.0, seed=SEED,
    )  # fmt: skip
    model = design.make()
    flat = models.flatten(model)
    dense = design.sketch(flat.numel(), flat.numel() // RATE, 0)
    assert dense is not None  # it is smaller than the model
    sketch, second = TensorSketch(dense), None
    if rule.asks == "norm":
        second = TensorSketch(design.second_sketch(flat.numel(), 0))

    def both() -> Mapping[str, float]:
        started = time.perf_counter()
        parts = list(
            updates(model, flat, clients, range(timed), local, generator=chance, chunk=timed)
        )
        deltas = parts[0].deltas
        scale = (design.clip / torch.linalg.vector_norm(deltas, dim=1)).clamp(max=1.0)
        scale @ deltas
        trained = time.perf_counter()
        encoded = sketch.encode(deltas)
        if second is not None:
            torch.linalg.vector_norm(second.encode(deltas).sum(dim=0))
        tables = time.perf_counter()
        sketch.decode(encoded[0])
        decoded = time.perf_counter()
        without = (trained - started) * COHORT / timed
        return {
            "without": without,
            "with": without + (tables - trained) * COHORT / timed + decoded - tables,
        }

    results: list[Mapping[str, float]] = []

    def measure() -> Mapping[str, float]:
        results.append(both())
        return results[-1]

    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes={"clients": COHORT, "timed": timed, "examples": examples}
            | {"parameters": flat.numel(), "rows": dense.shape[0], "width": dense.width},
            seeds=[SEED],
            ours=Contender(measure, seconds=partial(_part, "with")),
            peers={},
            floors={"without": Contender(lambda: results[-1], seconds=partial(_part, "without"))},
            packages=["torch"],
            cores=1,
            note=f"{timed} of {COHORT} clients were timed, and scaled; the sum is decoded once",
        ),
        settings,
    )


def _part(name: str, result: Any) -> float:
    return float(result[name])

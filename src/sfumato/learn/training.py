"""Federated training: rounds of local training, a private sum of updates, a step of the server."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError  # torch's own, of files that hold no tensors

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import DataError, ImpossibleError, SpecError
from sfumato.learn import models
from sfumato.learn.campaign import TrainingCampaign, by_devices, mechanism, shown
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.compression import MAIN_SHARE, Seen, Sizing
from sfumato.learn.data import IGNORED, Federated
from sfumato.learn.design import TrainingDesign, whole_numbers
from sfumato.learn.on_device import trainer
from sfumato.learn.tensors import TensorSketch
from sfumato.privacy.noise import NoiseAtRelease
from sfumato.privacy.samplers import Rng, SeededRng, SystemRng
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER, digest, require

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """One round. The counts are exact, so they are for who runs the training and for nobody else:
    what is kept in files is `shown`, which follows from noised sums and public numbers.
    """

    round: int
    asked: int | None = None
    answered: int | None = None
    left_out: int | None = None  # clients whose update was not finite or too long
    empty: int | None = None  # clients without examples
    cells: int  # that a client sends, of both sketches
    clip: float
    seconds: float
    accuracy: float | None = None  # on the test set, where it was looked at
    loss: float | None = None
    rate: float | None = None  # parameters by cells sent, over all rounds so far

    @property
    def shown(self) -> RoundFigures:
        """The same without the counts: how many were asked tells who may have been."""
        return replace(self, asked=None, answered=None, left_out=None, empty=None)


@dataclass(slots=True)
class Training:
    """A training that runs, stops and goes on: `run` continues from the last checkpoint.

    With `exact`, sums are of whole numbers and noise comes from the exact samplers, as the promise
    says. Without, sums and noise are floats on the model's device: quicker, and for
    experiments only. With `noise_seed` a run can be repeated, noise included. With `protocol` every
    client of a secure sum computes by itself, as devices do over a network, and a network's run
    with the same seeds gives the same model, bit for bit.
    """

    design: TrainingDesign
    data: Federated
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exact: bool = True
    noise_seed: int | None = None
    protocol: bool = False
    chunk: int = 16
    model: nn.Module = field(init=False)
    flat: Tensor = field(init=False)
    memory: dict[str, Tensor] = field(init=False, default_factory=dict)
    sizing: Sizing = field(init=False)
    clip: float = field(init=False)
    done: int = field(init=False, default=0)
    cells_sent: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)
    history: list[RoundFigures] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if len(self.data.train) != self.design.clients:
            raise SpecError(
                f"the design is for {self.design.clients} clients; the data has "
                f"{len(self.data.train)}"
            )
        if self.protocol and not (self.exact and self.design.secure is not None):
            raise SpecError(
                "clients compute by themselves for an exact, secure sum; set trust to "
                '"secure", and exact to True'
            )
        self.model = self.design.make().to(self.device)
        check_fit(self.model, self.data.train)
        self.data = self.data.to(self.device)
        self.flat = models.flatten(self.model)
        self.sizing = self.design.compression.start(self.length, self.design.largest)
        self.clip = self.design.clip

    @property
    def length(self) -> int:
        return self.flat.numel()

    @property
    def rate(self) -> float:
        """Parameters by cells sent, over all rounds: the paper's (harmonic) rate."""
        return self.length * self.done / self.cells_sent if self.cells_sent else 1.0

    def run(
        self,
        *,
        evaluate_every: int = 10,
        checkpoint: Path | None = None,
        metrics: Path | None = None,
        tell: Progress | None = None,
        until: int | None = None,
    ) -> Iterator[RoundFigures]:
        """Round after round to the end (or to round `until`), each as it is done.

        A checkpoint is written whole or not at all, after every round and before anything of it is
        shown: what is done again after a crash was never seen. Metrics are appended, one line of
        JSON a round.
        """
        require(evaluate_every >= 1, f"evaluate_every must be at least 1; got {evaluate_every}")
        last = self.design.rounds if until is None else min(self.design.rounds, until)
        while self.done < last:
            figures = self.round()
            looks = self.done % evaluate_every == 0 or self.done == last
            if looks:
                accuracy, loss = self.evaluate()
                figures = RoundFigures(
                    **{**asdict(figures), "accuracy": accuracy, "loss": loss, "rate": self.rate}
                )
                self.history.append(figures.shown)
            if checkpoint is not None:
                self.save(checkpoint)
            if metrics is not None:
                with metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(figures.shown)) + "\n")
            if tell is not None:
                tell(f"round {self.done}", self.done / self.design.rounds)
            yield figures

    def round(self) -> RoundFigures:
        """One round: ask a cohort, add what it sends, noise, decode, step.

        A client whose update is not finite, or too long, sends zeros, and its share of the noise.
        """
        if self.done >= self.design.rounds:
            raise SpecError(
                f"all {self.design.rounds} rounds are done, and no more are accounted for",
                hint="make a design with more rounds",
            )
        started = time.perf_counter()
        design, number = self.design, self.done
        chosen = self._cohort(number)
        answering = self._answering(chosen, number)
        if self.protocol:
            return self._by_devices(len(chosen), answering, started)
        dense = design.sketch(self.length, self.sizing.cells, number)
        total = (_ExactSum if self.exact else _FloatSum)(self, dense, number)
        left_out = empty = 0
        for part in updates(
            self.model, self.flat, self.data.train, answering, design.local,
            generator=self._generator("examples", number), chunk=self.chunk,
        ):  # fmt: skip
            sound = part.sound
            if design.largest_l1 is not None:
                sound = sound & (part.deltas.abs().sum(dim=1) < design.largest_l1)
            held = part.deltas if bool(sound.all()) else part.deltas[sound]
            left_out += len(part.deltas) - len(held)
            empty += int((part.examples == 0).sum())
            total.add(held)
        noised = total.noised(len(answering))
        sent = (self.length if dense is None else dense.cells) + noised.second_cells
        if noised.update is not None:
            design.server.step(self.flat, noised.update / design.cohort, self.memory)
            self.sizing = design.compression.after(self.sizing, noised.seen, self.length)
            if design.adaptive_clip is not None:
                self.clip = design.adaptive_clip.after(self.clip, noised.within / design.cohort)
        self.done += 1
        self.cells_sent += sent
        self.seconds += time.perf_counter() - started
        return RoundFigures(
            round=self.done, asked=len(chosen), answered=len(answering), left_out=left_out,
            empty=empty, cells=sent, clip=self.clip, seconds=time.perf_counter() - started,
        )  # fmt: skip

    def _by_devices(self, asked: int, answering: Tensor, started: float) -> RoundFigures:
        """A round of clients that compute by themselves, client k with its own seed."""
        data = self.data.train.to("cpu")
        campaign = TrainingCampaign(
            self.design, self.flat, self.sizing, self.memory, self.done, cells_sent=self.cells_sent
        )
        devices = (
            (
                SystemRng() if self.noise_seed is None else SeededRng(self.noise_seed, client),
                trainer(*data.held(client)),
            )
            for client in answering.tolist()
        )
        answer = by_devices(campaign, devices)
        if answer is None:
            campaign.skip()
        else:
            campaign.absorb(answer)
        sent = campaign.cells_sent - self.cells_sent
        self.sizing, self.done = campaign.sizing, campaign.done
        self.cells_sent = campaign.cells_sent
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return RoundFigures(
            round=self.done, asked=asked, answered=len(answering), cells=sent, clip=self.clip,
            seconds=seconds,
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, batch: int = 1024) -> tuple[float, float]:
        """Share of right predictions and mean loss on the test set."""
        models.assign(self.model, self.flat)
        right = loss = seen = 0.0
        for start in range(0, len(self.data.test_inputs), batch):
            targets = self.data.test_targets[start : start + batch].reshape(-1)
            logits = self.model(self.data.test_inputs[start : start + batch])
            logits = logits.reshape(-1, logits.shape[-1])
            known = targets != IGNORED
            right += float(((logits.argmax(dim=1) == targets) & known).sum())
            loss += float(
                functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            )
            seen += float(known.sum())
        return right / max(seen, 1.0), loss / max(seen, 1.0)

    def save(self, path: Path) -> None:
        """All that a later `load` needs to go on, written beside and then put in place."""
        state = {
            "design": digest(self.design),
            "flat": self.flat.cpu(),
            "memory": {name: value.cpu() for name, value in self.memory.items()},
            "sizing": asdict(self.sizing),
            "clip": self.clip,
            "done": self.done,
            "cells_sent": self.cells_sent,
            "seconds": self.seconds,
            "history": [asdict(figures) for figures in self.history],
        }
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same design; another one's is refused."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as problem:
            raise DataError(f"{path} is not a checkpoint: {problem}") from problem
        if not isinstance(state, dict) or not isinstance(state.get("design"), str):
            raise DataError(f"{path} is not a checkpoint of a training")
        found = state["design"]
        if found != digest(self.design):
            raise DataError(
                f"the checkpoint {path} is of another training (design {found[:12]}…)",
                hint="go on with the study it was made with, or start anew in another file",
            )
        try:
            flat, sizing = state["flat"].to(self.device), Sizing(**state["sizing"])
            memory = {name: value.to(self.device) for name, value in state["memory"].items()}
            history = [RoundFigures(**figures) for figures in state["history"]]
            clip, done, cells_sent = state["clip"], state["done"], state["cells_sent"]
            seconds = state["seconds"]
        except (KeyError, TypeError, AttributeError) as problem:
            raise DataError(f"the checkpoint {path} lacks something: {problem}") from problem
        if flat.shape != self.flat.shape:
            raise DataError(
                f"the checkpoint {path} must have {self.length} parameters; it has {flat.numel()}"
            )
        self.flat, self.memory, self.sizing, self.history = flat, memory, sizing, history
        self.clip, self.done, self.cells_sent, self.seconds = clip, done, cells_sent, seconds

    def rng(self, label: str, round: int) -> Rng:
        """Chance for rounding and noise; from the system unless the run is to be repeated."""
        if self.noise_seed is None:
            return SystemRng()
        return SeededRng(_seed(self.noise_seed, label, round))

    def _generator(self, label: str, round: int) -> torch.Generator:
        """Chance for the order of examples. All clients draw from one stream, so that one of them
        moves what the others draw: unless it is secret, their updates tell who was asked."""
        if self.noise_seed is None:
            return torch.Generator().manual_seed(int(SystemRng().words(1)[0]))
        return torch.Generator().manual_seed(_seed(self.noise_seed, label, round))

    def _cohort(self, round: int) -> Tensor:
        """Who is asked: secret, so drawn from the system unless the run is to be repeated. Passes
        are public."""
        design = self.design
        if design.sampling == "passes":
            return torch.from_numpy(design.members(round))
        chance = np.random.default_rng(self.rng("cohort", round).words(4))
        if design.sampling == "poisson":
            drawn = chance.random(design.clients) < design.cohort / design.clients
            return torch.from_numpy(np.flatnonzero(drawn))
        return torch.from_numpy(np.sort(chance.permutation(design.clients)[: design.cohort]))

    def _answering(self, chosen: Tensor, round: int) -> Tensor:
        if self.design.dropout == 0:
            return chosen
        chance = np.random.default_rng(self.rng("dropout", round).words(4))
        return chosen[torch.from_numpy(chance.random(len(chosen)) >= self.design.dropout)]


@dataclass(frozen=True, slots=True)
class _Noised:
    """What a round shows, in the unit of sums; no update if too few clients were left."""

    update: Tensor | None
    seen: Seen
    second_cells: int = 0
    within: float = 0.0  # updates no longer than the clip, noised


class _FloatSum:
    """A round's sum in floats, on the model's device."""

    def __init__(self, training: Training, dense: DenseSketch | None, round: int) -> None:
        design = training.design
        self.training, self.dense, self.number = training, dense, round
        self.asks = design.compression.asks
        if self.asks == "norm" and training.sizing.rounds >= getattr(
            design.compression, "warm_up", math.inf
        ):
            self.asks = "nothing"  # the second stage has all of the budget
        self.second = (
            None if self.asks == "nothing" else design.second_sketch(training.length, round)
        )
        # No room for sketches that are longer than their vectors: to cut those a little costs a
        # model less than the noise for the room.
        self.bound = self.second_bound = training.clip
        self.progress = (round + 1) / design.rounds
        self.share = 1.0 if self.second is None else MAIN_SHARE
        self.within = 0.0
        self._start()

    def _start(self) -> None:
        device, length = self.training.device, self.training.length
        self.map = None if self.dense is None else TensorSketch(self.dense, device)
        self.second_map = None if self.second is None else TensorSketch(self.second, device)
        shape = (length,) if self.dense is None else self.dense.shape
        self.total = torch.zeros(shape, device=device)
        if self.second is not None:
            self.second_total = torch.zeros(self.second.shape, device=device)

    def add(self, deltas: Tensor) -> None:
        norms = torch.linalg.vector_norm(deltas, dim=1)
        self.within += float((norms <= self.training.clip).sum()) - len(norms) / 2
        deltas *= (self.training.clip / norms).clamp(max=1.0).nan_to_num(nan=1.0)[:, None]
        self.total += _bounded(deltas if self.map is None else self.map.encode(deltas), self.bound)
        if self.second_map is not None:
            self.second_total += _bounded(self.second_map.encode(deltas), self.second_bound)

    def noised(self, answered: int) -> _Noised:
        training = self.training
        deviation = training.design.multiplier * self.bound / math.sqrt(self.share)
        generator = torch.Generator(training.device).manual_seed(self._noise_seed())
        if deviation:
            noise = torch.randn(self.total.shape, generator=generator, device=training.device)
            self.total += deviation * noise
        update = self.total if self.map is None else self.map.decode(self.total)
        return _Noised(
            update=update,
            seen=self._seen(float(self.total.square().sum()), deviation, update, generator),
            second_cells=0 if self.second is None else self.second.cells,
            within=self._within(generator),
        )

    def _noise_seed(self) -> int:
        return int(self.training.rng("noise", self.number).words(1)[0]) & LARGEST_INTEGER

    def _seen(
        self, squared: float, deviation: float, update: Tensor, generator: torch.Generator
    ) -> Seen:
        cells = self.total.numel()
        if self.second_map is None:
            return Seen(squared=squared, cells=cells, noise=deviation, progress=self.progress)
        table = self.second_total
        if self.asks == "error":
            table = table - self.second_map.encode(update)
        spread = self.training.design.multiplier * self.second_bound / math.sqrt(1 - MAIN_SHARE)
        noise = float(torch.randn((), generator=generator, device=generator.device))
        queried = float(torch.linalg.vector_norm(table)) + spread * noise
        return Seen(
            squared=squared,
            cells=cells,
            noise=deviation,
            progress=self.progress,
            queried=queried,
            second_noise=spread,
        )

    def _within(self, generator: torch.Generator) -> float:
        design = self.training.design
        if design.adaptive_clip is None:
            return 0.0
        noise = float(torch.randn((), generator=generator, device=generator.device))
        spread = design.adaptive_clip.deviation(design.cohort) if design.noise_multiplier else 0.0
        return self.within + spread * noise + design.cohort / 2


class _ExactSum(_FloatSum):
    """A round's sum in whole numbers, with noise from the exact samplers."""

    def _start(self) -> None:
        training = self.training
        self.sketch = self._whole(self.dense, self.bound)
        self.rounding_rng = training.rng("rounding", self.number)
        self.total_table = np.zeros(self.sketch.shape, dtype=np.int64)
        self.second_map = None
        if self.second is not None:
            self.second_sketch = self._whole(self.second, self.second_bound)
            self.second_table = np.zeros(self.second.shape, dtype=np.int64)

    def _whole(self, dense: DenseSketch | None, bound: float) -> VectorSketch:
        training = self.training
        return whole_numbers(training.design, training.length, dense, training.clip)

    def add(self, deltas: Tensor) -> None:
        norms = torch.linalg.vector_norm(deltas, dim=1)
        self.within += float((norms <= self.training.clip).sum()) - len(norms) / 2
        held = deltas.cpu().numpy()
        tables = self.sketch.tables(held, rng=self.rounding_rng)
        self.total_table += self.sketch.encode(tables)
        if self.second is not None:
            tables = self.second_sketch.tables(held, rng=self.rounding_rng)
            self.second_table += self.second_sketch.encode(tables)

    def noised(self, answered: int) -> _Noised:
        training, design = self.training, self.training.design
        rng = training.rng("noise", self.number)
        length = self.sketch.rounding.l2
        scale = design.multiplier * length / math.sqrt(self.share)
        table, deviation = self.total_table, scale
        if scale and design.secure is None:
            table = NoiseAtRelease(noise="gaussian", scale=scale).at_release(
                table, count=answered, rng=rng
            )
        elif scale:
            shares = mechanism(design, self.sketch)
            try:
                table = shares.at_release(
                    shares.at_device(table, devices=max(answered, 1), rng=rng),
                    count=answered,
                    rng=rng,
                )
            except ImpossibleError:  # too few are left: nothing is opened, nothing is learned
                return _Noised(update=None, seen=Seen(squared=0.0, cells=1, noise=1.0))
            deviation = shares.stddev(answered)
        update, seen = shown(self.sketch, table, deviation=deviation, progress=self.progress)
        if self.second is not None:
            seen = self._asked(seen, update, rng)
        return _Noised(
            update=torch.from_numpy(update.astype(np.float32)).to(training.device),
            seen=seen,
            second_cells=0 if self.second is None else self.second.cells,
            within=self._within_exactly(rng),
        )

    def _asked(self, seen: Seen, update: npt.NDArray[np.float64], rng: Rng) -> Seen:
        """The same with the noised norm, or error, of the second sketch."""
        assert self.second is not None  # as was seen
        unit = self.second_sketch.scale
        table = self.second_table / unit
        if self.asks == "error":
            table = table - self.second.encode(update)
        longest = self.second_sketch.rounding.l2
        scale = self.training.design.multiplier * longest / math.sqrt(1 - MAIN_SHARE)
        whole = np.array([round(float(np.linalg.norm(table)) * unit)], dtype=np.int64)
        # Rounding a norm to a whole number moves it by one at most: the table is that much longer.
        noise = NoiseAtRelease(noise="gaussian", scale=scale * (1 + 1 / longest))
        queried = float(noise.at_release(whole, count=1, rng=rng)[0]) / unit
        return replace(seen, queried=queried, second_noise=scale / unit)

    def _within_exactly(self, rng: Rng) -> float:
        design = self.training.design
        if design.adaptive_clip is None:
            return 0.0
        halves = np.array([round(2 * self.within)], dtype=np.int64)  # one half a client
        if design.noise_multiplier:
            scale = 2 * design.adaptive_clip.deviation(design.cohort)
            halves = NoiseAtRelease(noise="gaussian", scale=scale).at_release(
                halves, count=1, rng=rng
            )
        return float(halves[0]) / 2 + design.cohort / 2


def _bounded(tables: Tensor, bound: float) -> Tensor:
    """The sum of tables (n, …), each scaled down to a norm of at most `bound`."""
    rows = tables.reshape(len(tables), -1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    scale = (bound / norms).clamp(max=1.0).nan_to_num(nan=1.0)
    total: Tensor = (scale @ rows).reshape(tables.shape[1:])
    return total


def _seed(seed: int, label: str, round: int) -> int:
    text = f"sfumato/1/training/{seed}/{label}/{round}".encode()
    return int.from_bytes(sha256(text).digest()[:6], "little")

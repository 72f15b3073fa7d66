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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import DataError, ImpossibleError, SpecError
from sfumato.learn import models
from sfumato.learn.clients import LocalTraining, check_fit, updates
from sfumato.learn.compression import MAIN_SHARE, Compression, NoCompression, Seen, Sizing
from sfumato.learn.data import IGNORED, Federated
from sfumato.learn.tensors import TensorSketch
from sfumato.privacy.accounting import AdditiveLoss, NoPrivacy, SampledLoss
from sfumato.privacy.noise import NoiseAtRelease
from sfumato.privacy.rounding import Rounding
from sfumato.privacy.samplers import LARGEST_SCALE, Rng, SeededRng, SystemRng
from sfumato.secure_sum import SecureSum
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER, digest, kind_of, require, spec

Progress = Callable[[str, float], None]
ROUNDING_COST = 0.01  # of the noise's variance, that rounding to whole numbers may add
COARSEST = 1000.0  # whole numbers to the largest norm of a table, at the least
SECOND_WIDTH = 2  # times its rows: cells of a row of the sketch whose norm is asked for


@spec("server_optimizer")
class ServerOptimizer:
    """What the server does with the mean update: a step along it, or along an average of the past.

    "adam" is FedAdam (Reddi et al. 2021), with its floor under the root of the second moment.
    """

    method: Literal["sgd", "momentum", "adam"] = "momentum"
    learning_rate: float = 1.0
    momentum: float = 0.9
    second: float = 0.99  # adam: memory of squares
    floor: float = 1e-3  # adam

    def check(self) -> None:
        require(self.learning_rate > 0, f"learning_rate must be above 0; got {self.learning_rate}")
        for name in ("momentum", "second"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}")
        require(self.floor > 0, f"floor must be above 0; got {self.floor}")

    def step(self, flat: Tensor, update: Tensor, memory: dict[str, Tensor]) -> None:
        """Move the parameters in place by an update, which is new minus old."""
        if self.method == "sgd":
            flat.add_(update, alpha=self.learning_rate)
            return
        first = memory.setdefault("first", torch.zeros_like(flat))
        if self.method == "momentum":
            first.mul_(self.momentum).add_(update)
            flat.add_(first, alpha=self.learning_rate)
            return
        squares = memory.setdefault("squares", torch.zeros_like(flat))
        first.mul_(self.momentum).add_(update, alpha=1 - self.momentum)
        squares.mul_(self.second).addcmul_(update, update, value=1 - self.second)
        flat.addcdiv_(first, squares.sqrt().add_(self.floor), value=self.learning_rate)


@spec("adaptive_clip")
class AdaptiveClip:
    """Lets the clip follow a quantile of the updates' norms (Andrew et al. 2021).

    Every client adds ½ to a count if its update is no longer than the clip and −½ if it is. The
    count is noised with a deviation of `noise` and paid for out of the round's multiplier, so the
    round costs what it would have cost without. The clip is raised when too few are within it.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None  # None: a twentieth of the cohort

    def check(self) -> None:
        require(0 < self.quantile < 1, f"quantile must be above 0, below 1; got {self.quantile}")
        require(self.rate > 0, f"rate must be above 0; got {self.rate}")
        require(self.noise is None or self.noise > 0, f"noise must be above 0; got {self.noise}")

    def deviation(self, cohort: int) -> float:
        return cohort / 20 if self.noise is None else self.noise

    def left(self, multiplier: float, cohort: int) -> float:
        """The multiplier that updates must have for the round to cost `multiplier` in all."""
        rest = 1 / multiplier**2 - 1 / (2 * self.deviation(cohort)) ** 2
        if rest <= 0:
            raise ImpossibleError(
                f"counting clipped updates with a deviation of {self.deviation(cohort):g} costs "
                f"more than a noise multiplier of {multiplier:g}",
                hint="give adaptive_clip more noise, or ask larger cohorts",
            )
        return 1 / math.sqrt(rest)

    def after(self, clip: float, share: float) -> float:
        """The next clip, given the noised share of updates within this one."""
        return clip * math.exp(-self.rate * (min(max(share, 0.0), 1.0) - self.quantile))


@spec("training_design")
class TrainingDesign:
    """A training, fully sized: whom it asks, what they compute, what is added, what it costs.

    A round asks a random cohort. Each client trains on its own examples; its update is clipped,
    sketched, clipped again and added; the sum is noised and decoded, and the server steps along it.

    Claim: all rounds together are (epsilon, delta)-DP for each client at the epsilon that
        `accounting.epsilon_of` gives for `loss`.
    Proof: docs/proofs/sampled_rounds.md. The sum of what clients send has a sensitivity of the
        second clip, whatever the model is; sizes, clips and steps follow from noised sums.
    Assumes: cohorts are drawn at random and stay secret; under trust "central" the server is
        trusted with the sum (`secure`: with nothing but sums over enough clients).
    """

    model: str
    inputs: int | None = None
    classes: int | None = None
    hidden: int | None = None
    clients: int  # in the population
    cohort: int  # clients of a round, on average
    rounds: int
    sampling: Literal["poisson", "fixed"] = "poisson"
    local: LocalTraining
    clip: float  # largest norm of an update
    adaptive_clip: AdaptiveClip | None = None
    largest_l1: float | None = None  # an update longer than this is left out, as in paper 002
    noise_multiplier: float  # deviation of the noise by the sensitivity; 0 for none
    compression: Compression = NoCompression()
    rows: int = 15  # of the sketch
    server: ServerOptimizer = ServerOptimizer()
    dropout: float = 0.0  # share of a cohort that does not answer
    secure: SecureSum | None = None
    seed: int  # of the model and of the sketches: public

    def check(self) -> None:
        for name in ("clients", "cohort", "rounds", "rows"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(
            self.cohort <= self.clients,
            f"a cohort must not exceed the {self.clients} clients; got {self.cohort}",
        )
        require(self.clip > 0, f"clip must be above 0; got {self.clip}")
        require(
            self.noise_multiplier >= 0,
            f"noise_multiplier must be at least 0; got {self.noise_multiplier}",
        )
        require(0 <= self.dropout < 1, f"dropout must be at least 0, below 1; got {self.dropout}")
        require(0 <= self.seed < LARGEST_INTEGER, f"seed must be 0 to 2**53 - 2; got {self.seed}")
        require(
            self.largest_l1 is None or self.largest_l1 > 0,
            f"largest_l1 must be above 0; got {self.largest_l1}",
        )
        kind = type(self.compression).__name__
        require(
            self.noise_multiplier > 0 or kind in ("NoCompression", "FixedRate"),
            f"{kind} sizes sketches by the noise; without noise use a fixed rate",
        )
        if self.secure is not None:
            require(
                self.compression.asks == "nothing",
                f"{kind} asks for a noised norm, and noise in shares cannot be added to one; use "
                "free_norm, whose norm comes with the sum",
            )
            require(self.adaptive_clip is None, "a secure sum has a fixed clip")
            # Who adds up learns how many stayed, and noise comes with them: given that number,
            # coins draw a cohort of a fixed size.
            require(
                self.sampling == "fixed",
                f'a secure sum shows how many clients are in it; set sampling to "fixed", which is '
                f"accounted for so; got {self.sampling}",
            )
            self.secure.noise(1.0, self.cohort)  # that there are enough
        if self.adaptive_clip is not None and self.noise_multiplier > 0:
            self.adaptive_clip.left(self.noise_multiplier, self.cohort)

    @property
    def devices(self) -> int:
        return self.clients

    def parameters(self) -> dict[str, Any]:
        """What was chosen, for people to read."""
        return {
            "model": self.model,
            "clients": self.clients,
            "cohort": self.cohort,
            "sampling": self.sampling,
            "rounds": self.rounds,
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "compression": kind_of(self.compression),
            "rows": self.rows,
            "server": self.server.method,
        }

    @property
    def multiplier(self) -> float:
        """Of the noise on updates, and on what is asked beside them."""
        if self.adaptive_clip is None or self.noise_multiplier == 0:
            return self.noise_multiplier
        return self.adaptive_clip.left(self.noise_multiplier, self.cohort)

    @property
    def loss(self) -> SampledLoss | NoPrivacy:
        """What all rounds cost a client."""
        if self.noise_multiplier == 0:
            return NoPrivacy()
        # Finer tables cost less under Skellam noise, and nothing else about them matters here.
        one = AdditiveLoss(
            noise="gaussian" if self.secure is None else "skellam",
            scale=self.noise_multiplier * COARSEST,
            l1=COARSEST**2,
            l2=COARSEST,
            unit_cells=0,
        )
        return SampledLoss(
            loss=one,
            probability=self.cohort / self.clients,
            scheme=self.sampling,
            times=self.rounds,
        )

    @property
    def largest(self) -> float:
        """The squared norm of a round's sum by the noise's variance, at the most."""
        return (self.cohort / self.multiplier) ** 2 if self.multiplier else math.inf

    def make(self) -> nn.Module:
        return models.make(
            self.model, inputs=self.inputs, classes=self.classes, hidden=self.hidden, seed=self.seed
        )

    def sketch(self, length: int, cells: int, round: int) -> DenseSketch | None:
        """The sketch of a round that may have so many cells; None for the vectors themselves."""
        if cells >= length:
            return None
        rows = min(self.rows, cells)
        return DenseSketch(
            length=length, rows=rows, width=max(1, cells // rows), seed=self.seed, round=round
        )

    def second_sketch(self, length: int, round: int) -> DenseSketch:
        """The small sketch whose norm is asked for: ⌈ln d⌉ rows."""
        rows = math.ceil(math.log(length)) if length > 1 else 1
        width = SECOND_WIDTH * rows
        return DenseSketch(length=length, rows=rows, width=width, seed=self.seed + 1, round=round)


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
    experiments only. With `noise_seed` a run can be repeated, noise included.
    """

    design: TrainingDesign
    data: Federated
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exact: bool = True
    noise_seed: int | None = None
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
        """Who is asked: secret, so drawn from the system unless the run is to be repeated."""
        design = self.design
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
            assert design.secure is not None  # as was seen
            shares = design.secure.noise(scale, design.cohort)
            try:
                table = shares.at_release(
                    shares.at_device(table, devices=max(answered, 1), rng=rng),
                    count=answered,
                    rng=rng,
                )
            except ImpossibleError:  # too few are left: nothing is opened, nothing is learned
                return _Noised(update=None, seen=Seen(squared=0.0, cells=1, noise=1.0))
            deviation = shares.stddev(answered)
        unit = self.sketch.scale
        update = self.sketch.decode(table, 1)
        seen = self._seen_exactly(
            float(np.square(table / unit).sum()), deviation / unit, update, rng
        )
        return _Noised(
            update=torch.from_numpy(update.astype(np.float32)).to(training.device),
            seen=seen,
            second_cells=0 if self.second is None else self.second.cells,
            within=self._within_exactly(rng),
        )

    def _seen_exactly(self, squared: float, deviation: float, update: Any, rng: Rng) -> Seen:
        cells = self.sketch.cells
        if self.second is None:
            return Seen(squared=squared, cells=cells, noise=deviation, progress=self.progress)
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
        return Seen(
            squared=squared, cells=cells, noise=deviation, queried=queried,
            second_noise=scale / unit,
        )  # fmt: skip

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


def whole_numbers(
    design: TrainingDesign, length: int, dense: DenseSketch | None, clip: float
) -> VectorSketch:
    """Updates as whole numbers, so fine that rounding costs little beside the noise: it adds at
    most a quarter a client to a cell's variance, and lengthens a client's table. Coarser where so
    much noise is asked for that it could not be drawn."""
    cells = length if dense is None else dense.cells
    fine = max(
        COARSEST,
        math.sqrt(design.cohort / 4 / ROUNDING_COST) / (design.multiplier or 1.0),
        math.sqrt(cells / 4 / ROUNDING_COST),
    )
    if design.multiplier:
        fine = _drawable(design, fine, cells)
    return VectorSketch(length=length, clip=clip, bound=clip, scale=fine / clip, dense=dense)


def _drawable(design: TrainingDesign, fine: float, cells: int) -> float:
    """So many whole numbers to the clip, or as many as the samplers' largest scale allows."""
    if design.secure is None:
        share = 1.0 if design.compression.asks == "nothing" else 1 - MAIN_SHARE
        most, least = LARGEST_SCALE["gaussian"] * math.sqrt(share), 1.0
    else:  # more clients than are needed add more noise; the loss is of tables as coarse as that
        most = LARGEST_SCALE["skellam"] / design.secure.noise(1.0, design.cohort).stddev(
            design.cohort
        )
        least = COARSEST

    def is_drawn(fine: float) -> bool:  # a norm that is asked for is longer by one
        length = Rounding(clip=1.0, scale=fine, cells=cells).l2 + 1
        return design.multiplier * length <= most

    if is_drawn(fine):
        return fine
    if not is_drawn(least):
        raise ImpossibleError(
            f"noise of {design.multiplier:g} times a table of {cells:,} cells is more than can be "
            "drawn",
            hint="raise epsilon, ask for fewer rounds or smaller cohorts, or for smaller sketches",
        )
    low, high = least, fine
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_drawn(middle) else (low, middle)
    return low


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

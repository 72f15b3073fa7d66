"""Federated training: rounds of local training, a private sum of updates, a step of the server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError  # torch's own, of files that hold no tensors

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import DataError, SpecError
from sfumato.learn import models
from sfumato.learn.campaign import TrainingCampaign, by_devices
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.compression import Sizing
from sfumato.learn.data import IGNORED, TESTED_ON_CLIENTS, Federated
from sfumato.learn.design import TrainingDesign
from sfumato.learn.local_update import trainer
from sfumato.learn.sums import ExactSum, FloatSum
from sfumato.privacy.samplers import Rng, SeededRng, SystemRng
from sfumato.spec import digest, require

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """One round. Counts and time are exact, so they are for who runs the training and for nobody
    else. What is kept in files is `shown`: it follows from noised sums and public numbers, but for
    accuracy and loss where `not_covered` says so.
    """

    round: int
    asked: int | None = None
    answered: int | None = None
    left_out: int | None = None  # clients whose update was not finite or too long
    empty: int | None = None  # clients without examples
    cells: int  # that a client sends, of both sketches
    clip: float
    seconds: float | None = None
    accuracy: float | None = None  # on the test set, where it was looked at
    loss: float | None = None
    rate: float | None = None  # parameters by cells sent, over all rounds so far
    not_covered: str | None = None  # what of these figures is exact and tells of clients' data

    @property
    def shown(self) -> RoundFigures:
        """The same without counts and time: they tell who may have been asked, and what of."""
        return replace(self, asked=None, answered=None, left_out=None, empty=None, seconds=None)


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
    seconds: float = field(init=False, default=0.0)  # of this process
    id: str = field(init=False)  # random; the checkpoint has it, and so do charges to a ledger
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
        self.id = SystemRng().words(2).tobytes().hex()

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
        charge: Callable[[int], None] | None = None,
    ) -> Iterator[RoundFigures]:
        """Round after round to the end (or to round `until`), each as it is done.

        `charge` is told the number of every round, from 0, before anything of it is computed, and
        stops the training by raising. A checkpoint is written whole or not at all, after every
        round and before anything of it is shown. Metrics are appended, one line of JSON per round.
        """
        require(evaluate_every >= 1, f"evaluate_every must be at least 1; got {evaluate_every}")
        last = self.design.rounds if until is None else min(self.design.rounds, until)
        while self.done < last:
            if charge is not None:
                charge(self.done)
            figures = self.round()
            looks = self.done % evaluate_every == 0 or self.done == last
            if looks:
                accuracy, loss = self.evaluate()
                figures = replace(
                    figures,
                    accuracy=accuracy,
                    loss=loss,
                    rate=self.rate,
                    not_covered=TESTED_ON_CLIENTS if self.data.has_private_test else None,
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
        total = (ExactSum if self.exact else FloatSum)(self, dense, number)
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
            "id": self.id,
            "flat": self.flat.cpu(),
            "memory": {name: value.cpu() for name, value in self.memory.items()},
            "sizing": asdict(self.sizing),
            "clip": self.clip,
            "done": self.done,
            "cells_sent": self.cells_sent,
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
            name = state["id"]
        except (KeyError, TypeError, AttributeError) as problem:
            raise DataError(f"the checkpoint {path} lacks something: {problem}") from problem
        if flat.shape != self.flat.shape:
            raise DataError(
                f"the checkpoint {path} must have {self.length} parameters; it has {flat.numel()}"
            )
        self.flat, self.memory, self.sizing, self.history = flat, memory, sizing, history
        self.clip, self.done, self.cells_sent, self.id = clip, done, cells_sent, name

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


def _seed(seed: int, label: str, round: int) -> int:
    text = f"sfumato/1/training/{seed}/{label}/{round}".encode()
    return int.from_bytes(sha256(text).digest()[:6], "little")

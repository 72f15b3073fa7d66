"""The server's side of a training: one task per round, one step per noised sum.

It holds parameters, never an example or an update, and everything it does follows from public
numbers and noised sums: absorbing the same answers again gives the same model, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.arrays import F64, I64
from sfumato.errors import MismatchError
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import to_bytes
from sfumato.flow.release import NoisedSum
from sfumato.flow.secure_sum import sum_task
from sfumato.flow.task import Task
from sfumato.learn import models
from sfumato.learn.compression import MAIN_SHARE, RoundStatistics, Sizing, rounds_measured
from sfumato.learn.design import TrainingDesign, second_whole_numbers, whole_numbers
from sfumato.learn.tensors import TensorSketch
from sfumato.privacy import Mechanism, NoiseAtRelease, NoNoise, Rng
from sfumato.privacy.accounting import SMOOTHING, AdditiveLoss, Loss
from sfumato.privacy.noise import Contribution
from sfumato.privacy.samplers import discrete_gaussian
from sfumato.sketch.dense import DenseSketch, median_variance, spread_of_squares
from sfumato.sketch.vector import RoundSketch, VectorSketch
from sfumato.spec import digest, require, spec

NAME_DIGITS = 32  # how much of a design's digest the name of a campaign has


@spec("round_noise")
class RoundNoise(NoiseAtRelease):
    """Discrete Gaussian noise on each part of a round's table, and one number for the second part.

    All parts are cells of one table, so a round is one task, one sum and one charge. That matters
    where cohorts are drawn in secret: one coin decides about all cells of a client, while three
    tables with separate coins would not have the loss that is charged (docs/decisions/0028).

    A release has the noised main table, then the noised norm of the second table (or of its
    distance from the second sketch of the decoded update), as a whole number of the second's unit,
    then the noised count. The second table itself is never released.

    Claim: one release costs what Gaussian noise of the multiplier z costs, where 1/z² is the sum of
        (sensitivity/deviation)² over the released parts; neighbours are zero-out.
    Proof: docs/proofs/sampled_rounds.md, "What is asked beside the sum".
    Assumes: as `NoiseAtRelease`.
    """

    sketch: RoundSketch
    asks: Literal["nothing", "norm", "error"]
    second_scale: float = 0.0  # for the second table, before its norm is rounded
    count_scale: float = 0.0

    def check(self) -> None:
        NoiseAtRelease.check(self)
        asks, counts = self.sketch.second is not None, self.sketch.counts
        require(self.noise == "gaussian", f"noise of a round is gaussian; got {self.noise}")
        require(
            (self.asks != "nothing", self.second_scale > 0, self.count_scale > 0)
            == (asks, asks, counts),
            "every part that a round releases must have noise, and no other part can have any",
        )

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        main, second, clips = self.sketch.split(total)
        table = discrete_gaussian(self.scale, main.shape, rng) + main
        parts = [table.reshape(-1)]
        if self.sketch.second is not None:
            norm = self._norm(table, second)
            # Rounding a norm to a whole number changes it by at most one, like a table that is
            # longer by one.
            scale = self.second_scale * (1 + 1 / self.sketch.second.rounding.l2)
            parts.append(norm + discrete_gaussian(scale, (1,), rng))
        if self.sketch.counts:
            parts.append(clips + discrete_gaussian(self.count_scale, (1,), rng))
        return np.concatenate(parts)

    def _norm(self, table: I64, second: I64) -> int:
        sketch = self.sketch.second
        assert sketch is not None  # checked by the caller
        reals = second / sketch.scale
        if self.asks == "error":
            assert sketch.dense is not None  # a second sketch is small
            reals = reals - sketch.dense.encode(self.sketch.main.decode(table, 1))
        return round(float(np.linalg.norm(reals)) * sketch.scale)

    def loss(self, contribution: Contribution) -> Loss:
        """As one table whose noise costs what all parts cost together, each priced as continuous
        noise (docs/proofs/noise.md); where a part has too little noise for that, a table with so
        little that it is priced by Rényi bounds as well."""
        main = self.sketch.main.rounding
        parts = [(main.l2, self.scale)]
        if self.sketch.second is not None:
            parts.append((self.sketch.second.rounding.l2, self.second_scale))
        if self.sketch.counts:
            parts.append((1.0, self.count_scale))
        if min(scale for _, scale in parts) ** 2 > SMOOTHING:
            spent = sum(l2**2 / (scale**2 - SMOOTHING) for l2, scale in parts)
            scale, l2 = math.sqrt(main.l2**2 / spent + SMOOTHING), main.l2
        else:
            scale, l2 = 1.0, math.sqrt(sum((l2 / scale) ** 2 for l2, scale in parts))
        return AdditiveLoss(noise="gaussian", scale=scale, l1=max(l2, l2**2), l2=l2, unit_cells=0)


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What a round releases, in the unit of sums: all of it is noised, so all of it is public."""

    table: F64 | Tensor  # sum of the updates, sketched or whole
    noise: float  # deviation of the noise on each cell of the table
    measurement: float | None = None  # noised norm, or error, of the second sketch
    second_noise: float = 0.0  # deviation of the noise on the measurement
    within_clip: float | None = None  # number of updates no longer than the clip


@dataclass(slots=True, repr=False)
class TrainingCampaign(Campaign):
    """The state of a training: `next_task` asks for a round, `absorb` steps along its sum.

    To the ledger, a pass over the clients is a campaign and a round is one of its cohorts. So the
    ledger, and each device's own, count one round per pass, which is what the design's loss
    assumes. Where cohorts are drawn at random, every round is a pass, and all clients are its
    cohort: a client that is not drawn adds zeros. A round that could not be held is skipped
    (`skip`); what was charged for it stays charged.
    """

    design: TrainingDesign
    flat: Tensor
    sizing: Sizing
    clip: float
    memory: dict[str, Tensor] = field(default_factory=dict)  # state of the server's optimiser
    done: int = 0
    rounds_held: int = 0  # rounds that were not skipped
    cells_sent: int = 0

    @classmethod
    def begin(
        cls,
        design: TrainingDesign,
        device: torch.device | str = "cpu",
        model: nn.Module | None = None,
    ) -> TrainingCampaign:
        """A campaign before its first round, from the parameters of a model, or of the design's."""
        flat = models.flatten(design.make() if model is None else model).to(device)
        sizing = design.compression.start(flat.numel(), design.largest)
        return cls(design, flat, sizing, design.clip)

    @classmethod
    def load(
        cls, design: TrainingDesign, state: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> TrainingCampaign:
        """Continue from a `state`; KeyError, TypeError or AttributeError if something is amiss."""
        return cls(
            design,
            state["flat"].to(device),
            Sizing(**state["sizing"]),
            state["clip"],
            {name: value.to(device) for name, value in state["memory"].items()},
            done=state["done"],
            rounds_held=state.get("held", state["done"]),  # older checkpoints lack it
            cells_sent=state["cells_sent"],
        )

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on: tensors and plain data."""
        return {
            "flat": self.flat.cpu(),
            "memory": {name: value.cpu() for name, value in self.memory.items()},
            "sizing": asdict(self.sizing),
            "clip": self.clip,
            "done": self.done,
            "held": self.rounds_held,
            "cells_sent": self.cells_sent,
        }

    @property
    def length(self) -> int:
        return self.flat.numel()

    @property
    def rate(self) -> float:
        """Parameters divided by cells sent, over all rounds so far: the paper's harmonic rate."""
        return self.length * self.done / self.cells_sent if self.cells_sent else 1.0

    def parameters(self) -> bytes:
        """The parameters that the next round starts from: float32, little-endian."""
        return to_bytes(self.flat.detach().cpu().numpy())

    # The next round's task.

    @property
    def dense(self) -> DenseSketch | None:
        """The sketch of updates; None if they are sent whole."""
        return self.design.sketch(self.length, self.sizing.cells, self.done)

    @property
    def second(self) -> DenseSketch | None:
        """The small sketch whose norm, or error, is measured; None if the rule measures nothing, or
        no longer, after its warm-up."""
        if self.sizing.rounds >= rounds_measured(self.design.compression):
            return None
        return self.design.second_sketch(self.length, self.done)

    @property
    def cells(self) -> int:
        """Number of cells that a client sends, of both sketches."""
        main, second = self.dense, self.second
        return (self.length if main is None else main.cells) + (second.cells if second else 0)

    @property
    def multipliers(self) -> tuple[float, float]:
        """Deviations of the noise, relative to the longest table: on the sum of updates, and on
        what is measured beside it."""
        whole = self.design.multiplier
        if self.second is None:
            return whole, 0.0
        return whole / math.sqrt(MAIN_SHARE), whole / math.sqrt(1 - MAIN_SHARE)

    @property
    def count_noise(self) -> float:
        """Deviation of the noise on the count of updates within the clip."""
        rule, design = self.design.adaptive_clip, self.design
        return rule.deviation(design.cohort) if rule and design.noise_multiplier else 0.0

    def next_task(self) -> Task | None:
        design, number = self.design, self.done
        if number >= design.rounds:
            return None
        sketch, mechanism = self._table()
        return sum_task(
            design.secure,
            sketch=sketch,
            mechanism=mechanism,
            campaign=f"{digest(design)[:NAME_DIGITS]} pass {number // design.rounds_per_pass}",
            cohort=f"round {number}",
            devices=design.cohort,
            most=design.cohort if design.sampling == "passes" else design.clients,
        )

    def _table(self) -> tuple[VectorSketch | RoundSketch, Mechanism]:
        design = self.design
        main = whole_numbers(design, self.length, self.dense, self.clip)
        if design.secure is not None:
            return self._masked_table(main)
        scale = self.multipliers[0] * main.rounding.l2
        if self.second is None and design.adaptive_clip is None:
            return main, NoiseAtRelease(noise="gaussian", scale=scale) if scale else NoNoise()
        second = None
        if self.second is not None:
            second = whole_numbers(design, self.length, self.second, self.clip)
        sketch = RoundSketch(main=main, second=second, counts=design.adaptive_clip is not None)
        if not scale:
            return sketch, NoNoise()
        return sketch, RoundNoise(
            noise="gaussian",
            sketch=sketch,
            asks=design.compression.asks if second else "nothing",
            scale=scale,
            second_scale=self.multipliers[1] * second.rounding.l2 if second else 0.0,
            count_scale=math.sqrt((2 * self.count_noise) ** 2 + SMOOTHING * (self.count_noise > 0)),
        )

    def _masked_table(self, main: VectorSketch) -> tuple[VectorSketch | RoundSketch, Mechanism]:
        """One table for a secure sum, with noise of one scale on all cells. The second sketch is
        in a coarser unit, so that its part of the sensitivity is its part of the budget."""
        design, second = self.design, self.second
        sketch: VectorSketch | RoundSketch = main
        assert design.secure is not None  # checked by the caller
        if second is not None:
            coarse = second_whole_numbers(main, second, self.clip)
            sketch = RoundSketch(main=main, second=coarse)
        scale = design.multiplier * sketch.sensitivity(1).l2
        return sketch, design.secure.noise(scale, design.cohort) if scale else NoNoise()

    # The answer.

    def absorb(self, answer: NoisedSum) -> None:
        self.take(self.read(answer))

    def read(self, answer: NoisedSum) -> RoundResult:
        """The result of a round, from the answer to the last task."""
        if answer.task.cohort != f"round {self.done}":
            raise MismatchError(
                f"this training waits for round {self.done}; got the sum of another round"
            )
        noise, sketch, table = answer.task.mechanism, answer.task.sketch, answer.table
        measurement, second_noise, within_clip = None, 0.0, None
        if isinstance(sketch, RoundSketch) and noise.in_shares:
            measurement, second_noise = self._measure(sketch, answer)
            table, sketch = sketch.split(answer.table)[0], sketch.main
        elif isinstance(sketch, RoundSketch):
            table, measurement, count = sketch.read(answer.table)
            within_clip = None if count is None else count / 2 + self.design.cohort / 2
            if isinstance(noise, RoundNoise) and sketch.second is not None:
                second_noise = noise.second_scale / sketch.second.scale
            sketch = sketch.main
        assert isinstance(sketch, VectorSketch)  # `next_task` asks for nothing else
        deviation = noise.stddev(answer.count) / sketch.scale
        return RoundResult(table / sketch.scale, deviation, measurement, second_noise, within_clip)

    def _measure(self, sketch: RoundSketch, answer: NoisedSum) -> tuple[float, float]:
        """The norm of the second table of a secure sum, or of its distance from the second sketch
        of the decoded sum, and its deviation: computed from what was released."""
        second = sketch.second
        assert second is not None  # as `_masked_table` makes it
        assert second.dense is not None
        table, gap, _ = sketch.split(answer.table)
        gap = gap / second.scale
        if self.design.compression.asks == "error":
            gap = gap - second.dense.encode(sketch.main.decode(table, 1))
        noise = answer.task.mechanism.stddev(answer.count) / second.scale
        return norm_of_table(float((gap * gap).sum()), second.cells, noise)

    def take(self, result: RoundResult) -> None:
        """Decode a round's result, step along it, size the next sketch and move the clip."""
        design, cells, dense = self.design, self.cells, self.dense
        update = torch.as_tensor(result.table)
        blocks = 1 if dense is None else dense.blocks
        statistics = RoundStatistics(
            squared=float((result.table * result.table).sum()) / blocks,
            cells=update.numel(),
            noise=result.noise / math.sqrt(blocks),
            read_noise=blocks * median_variance(blocks),
            progress=(self.done + 1) / design.rounds,
            measurement=result.measurement,
            second_noise=result.second_noise,
            slack=None if design.secure is None else math.sqrt(2) * result.second_noise,
        )
        if dense is not None:
            update = TensorSketch(dense, update.device).decode(update)
        step = update.float().to(self.flat.device) / design.cohort
        design.server.step(self.flat, step, self.memory)
        self.sizing = design.compression.after(self.sizing, statistics, self.length)
        if design.adaptive_clip is not None:
            assert result.within_clip is not None  # the task asked for it
            self.clip = design.adaptive_clip.after(self.clip, result.within_clip / design.cohort)
        self.done, self.rounds_held = self.done + 1, self.rounds_held + 1
        self.cells_sent += cells

    def skip(self) -> None:
        """Go on without the current round: too few clients were left, and no sum was released."""
        if self.done < self.design.rounds:
            self.cells_sent += self.cells
            self.done += 1

    def __repr__(self) -> str:
        return f"TrainingCampaign({self.done} of {self.design.rounds} rounds done)"


def norm_of_table(squared: float, cells: int, noise: float) -> tuple[float, float]:
    """The norm behind a table with noise of this deviation on each cell, from the table's squared
    norm, and its deviation; √2 of them are what √2 deviations of the squared norm make.

    >>> norm, deviation = norm_of_table(900.0 + 36, 36, 1.0)
    >>> round(norm, 3), round(deviation, 3)
    (30.0, 3.404)
    """
    square = max(squared - cells * noise**2, 0.0)
    upper = square + math.sqrt(2) * spread_of_squares(square, cells, noise)
    return math.sqrt(square), (math.sqrt(upper) - math.sqrt(square)) / math.sqrt(2)

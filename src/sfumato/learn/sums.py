"""A round's sum over many clients at once: in floats, or in whole numbers with exact noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.errors import ImpossibleError
from sfumato.learn.campaign import mechanism, shown
from sfumato.learn.compression import MAIN_SHARE, Seen
from sfumato.learn.design import whole_numbers
from sfumato.learn.tensors import TensorSketch
from sfumato.privacy.noise import NoiseAtRelease
from sfumato.privacy.samplers import Rng
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER

if TYPE_CHECKING:
    from sfumato.learn.training import Training


@dataclass(frozen=True, slots=True)
class Noised:
    """What a round shows, in the unit of sums; no update if too few clients were left."""

    update: Tensor | None
    seen: Seen
    second_cells: int = 0
    within: float = 0.0  # updates no longer than the clip, noised


class FloatSum:
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

    def noised(self, answered: int) -> Noised:
        training = self.training
        deviation = training.design.multiplier * self.bound / math.sqrt(self.share)
        generator = torch.Generator(training.device).manual_seed(self._noise_seed())
        if deviation:
            noise = torch.randn(self.total.shape, generator=generator, device=training.device)
            self.total += deviation * noise
        update = self.total if self.map is None else self.map.decode(self.total)
        return Noised(
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


class ExactSum(FloatSum):
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

    def noised(self, answered: int) -> Noised:
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
                return Noised(update=None, seen=Seen(squared=0.0, cells=1, noise=1.0))
            deviation = shares.stddev(answered)
        update, seen = shown(self.sketch, table, deviation=deviation, progress=self.progress)
        if self.second is not None:
            seen = self._asked(seen, update, rng)
        return Noised(
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

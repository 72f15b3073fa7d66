"""A round's sum over many clients at once: in floats, or in whole numbers with exact noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.errors import ImpossibleError, SpecError
from sfumato.learn.campaign import mechanism, shown
from sfumato.learn.compression import MAIN_SHARE, Seen
from sfumato.learn.design import whole_numbers
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


_TILE = 1024  # cells or coordinates of a program
_TOGETHER = 1 << 23  # coordinates that programs read at one time: a second-level cache holds them
_PROGRAMS = 1 << 12  # that keep every multiprocessor busy


class TensorSketch:
    """A dense sketch where tensors are: the same map as `DenseSketch`, up to the order of sums.

    On the processor the tensors share memory with the arrays that the sketch takes. On a GPU it
    keeps what the sketch draws: its rotations, and a bit a coordinate and row for the signs.

    >>> sketch = TensorSketch(DenseSketch(length=1000, rows=15, width=100, seed=1))
    >>> table = sketch.encode(torch.ones(1000))
    >>> tuple(table.shape), tuple(sketch.decode(table).shape)
    ((15, 100), (1000,))
    """

    def __init__(self, sketch: DenseSketch, device: torch.device | str = "cpu") -> None:
        self.sketch, self.device = sketch, torch.device(device)
        if self.device.type == "cpu":
            return
        if sketch.placing != "rotation":
            raise SpecError("on a GPU a sketch is placed by rotation; use the processor for others")
        self._rotations = torch.tensor(sketch.rotations, device=self.device)
        keys = torch.tensor(sketch.sign_keys.view("int32"), device=self.device)
        rows, blocks = sketch.shape[0], -(-sketch.length // 32)
        self._words = torch.empty(rows, blocks, dtype=torch.int32, device=self.device)
        _kernels().sign_words[(-(-blocks // _TILE), rows)](self._words, keys, blocks, TILE=_TILE)

    @property
    def shape(self) -> tuple[int, int]:
        return self.sketch.shape

    def encode(self, vectors: Tensor) -> Tensor:
        """The table of a vector (length,), or of each of (n, length)."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.sketch.encode(vectors.detach().numpy()))
        self._check(vectors, (self.sketch.length,), (vectors.shape[0], self.sketch.length))
        many = vectors.reshape(-1, self.sketch.length).float().contiguous()
        width, chunks = self.sketch.width, self._rotations.shape[1]
        tile = min(_TILE, 1 << (width - 1).bit_length())
        tiles = -(-width // tile)
        parts = max(self.sketch.length // _TOGETHER, _PROGRAMS // (tiles * self.shape[0]), 1)
        count = -(-chunks // min(parts, chunks))
        parts = -(-chunks // count)
        tables = torch.zeros(len(many), *self.shape, device=self.device)
        _kernels().encode[(self.shape[0] * tiles, parts, len(many))](
            tables, many, self._rotations, self._words, self.sketch.length, width, chunks,
            self._words.shape[1], 1 / math.sqrt(self.sketch.rows), tiles, count,
            TILE=tile, ATOMIC=parts > 1, num_warps=max(1, tile // 256),
        )  # fmt: skip
        return tables if vectors.ndim == 2 else tables[0]

    def decode(self, table: Tensor) -> Tensor:
        """An estimate of the vector whose table this is; see `DenseSketch.decode`."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.sketch.decode(table.detach().numpy()))
        self._check(table, self.shape)
        rows = self.sketch.rows
        readings = [self._adjoint(table, block * rows) for block in range(self.sketch.blocks)]
        if len(readings) == 1:
            return readings[0]
        ordered = torch.stack(readings).sort(dim=0).values
        middle = len(readings) // 2
        if len(readings) % 2:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2

    def _adjoint(self, table: Tensor, start: int) -> Tensor:
        """The transpose of the block that begins at this row."""
        rows, width, length = self.sketch.rows, self.sketch.width, self.sketch.length
        vector = torch.empty(length, device=self.device)
        part = table[start : start + rows].float().contiguous()
        turned, words = self._rotations[start : start + rows], self._words[start : start + rows]
        chunks = turned.shape[1]
        given = (vector, part, turned, words, length, width, chunks, words.shape[1])
        scale = 1 / math.sqrt(rows)
        if width < _TILE:
            grid = (-(-length // _TILE),)
            _kernels().decode_narrow[grid](*given, scale, ROWS=rows, TILE=_TILE, num_warps=8)
        else:
            tiles = -(-width // _TILE)
            grid = (chunks * tiles,)
            _kernels().decode[grid](*given, scale, tiles, ROWS=rows, TILE=_TILE, num_warps=8)
        return vector

    def _check(self, given: Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(given.shape) not in shapes or given.device.type != self.device.type:
            raise SpecError(
                f"a tensor on {self.device} must have the shape {' or '.join(map(str, shapes))}; "
                f"got {tuple(given.shape)} on {given.device}"
            )


def _kernels() -> Any:
    try:
        from sfumato.kernels.dense import triton as triton_dense
    except ImportError as problem:
        raise SpecError(
            "sketches on a GPU need Triton, which PyTorch for CUDA brings along"
        ) from problem
    return triton_dense

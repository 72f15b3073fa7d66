"""Dense sketches of tensors, on the processor or a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import SpecError
from sfumato.sketch.dense import DenseSketch

_TILE = 1024  # cells or coordinates per program
_CACHED = 1 << 23  # coordinates that fit in a second-level cache
_PROGRAMS = 1 << 12  # enough to keep every multiprocessor busy


class TensorSketch:
    """A dense sketch of tensors on their device: the map of `DenseSketch`, up to the order of sums.

    On the processor, tensors share memory with the arrays that the sketch takes. On a GPU the
    sketch's random choices are kept: its rotations, and one sign bit per coordinate and row.

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
            raise SpecError("on a GPU a sketch must be placed by rotation; use the processor")
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
        parts = max(self.sketch.length // _CACHED, _PROGRAMS // (tiles * self.shape[0]), 1)
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
        """An estimate of the vector with this table; see `DenseSketch.decode`."""
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
        rotations, words = self._rotations[start : start + rows], self._words[start : start + rows]
        chunks = rotations.shape[1]
        arguments = (vector, part, rotations, words, length, width, chunks, words.shape[1])
        scale = 1 / math.sqrt(rows)
        if width < _TILE:
            grid = (-(-length // _TILE),)
            _kernels().decode_narrow[grid](*arguments, scale, ROWS=rows, TILE=_TILE, num_warps=8)
        else:
            tiles = -(-width // _TILE)
            grid = (chunks * tiles,)
            _kernels().decode[grid](*arguments, scale, tiles, ROWS=rows, TILE=_TILE, num_warps=8)
        return vector

    def _check(self, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(tensor.shape) not in shapes or tensor.device.type != self.device.type:
            raise SpecError(
                f"a tensor on {self.device} must have the shape {' or '.join(map(str, shapes))}; "
                f"got {tuple(tensor.shape)} on {tensor.device}"
            )


def _kernels() -> Any:
    try:
        from sfumato.kernels.dense import triton as triton_dense
    except ImportError as problem:
        raise SpecError(
            "sketches on a GPU need Triton, which is part of PyTorch for CUDA"
        ) from problem
    return triton_dense

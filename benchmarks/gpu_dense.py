"""Dense sketches on a GPU: `python -m benchmarks.gpu_dense`, where PyTorch sees one.

100 million parameters into 5 and 15 rows and back, against PyTorch's scatter and gather with hashes
that are drawn beforehand, and against a copy of the vector, which is the floor. All in one run;
times are medians of many launches, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sfumato.learn.tensors import TensorSketch
from sfumato.sketch.dense import DenseSketch

LENGTH = 100_000_000
CASES = ((5, 50), (15, 50), (15, 1000))  # rows, parameters per cell


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU that PyTorch sees")
    vector = torch.randn(LENGTH, device="cuda")
    other = torch.empty_like(vector)
    copy = timed(lambda: other.copy_(vector))
    print(f"{torch.cuda.get_device_name()}: a copy of {LENGTH:,} parameters takes {copy:.3f} ms")
    for rows, rate in CASES:
        print(line(vector, other, copy, rows, rate))


def line(vector: Tensor, other: Tensor, copy: float, rows: int, rate: int) -> str:
    width, device = LENGTH // (rows * rate), vector.device
    sketch = TensorSketch(DenseSketch(length=LENGTH, rows=rows, width=width, seed=1), device)
    table = sketch.encode(vector)
    error = float((sketch.decode(table) - vector).square().mean())
    encode, decode = timed(lambda: sketch.encode(vector)), timed(lambda: sketch.decode(table))
    cells = torch.randint(0, width, (LENGTH,), device=device)
    signs = torch.randint(0, 2, (LENGTH,), device=device) * 2.0 - 1
    row = torch.zeros(width, device=device)
    scatter = rows * timed(lambda: row.zero_().scatter_add_(0, cells, vector * signs))
    gather = rows * timed(lambda: other.add_(row[cells] * signs))
    return (
        f"{rows} rows, {rate} per cell: encode {encode:.3f} ms, {encode / copy:.1f} copies, "
        f"{scatter / encode:.1f} times faster than scatter_add; decode {decode:.3f} ms, "
        f"{decode / copy:.1f} copies, {gather / decode:.1f} times faster than gather; squared "
        f"error {error:.2f} per coordinate, {rate} expected"
    )


def timed(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=40, return_mode="median"))


if __name__ == "__main__":
    main()

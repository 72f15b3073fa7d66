"""Sketches of tensors are the sketches of arrays, on the processor and on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sfumato.errors import SpecError
from sfumato.learn.tensors import TensorSketch
from sfumato.sketch.dense import DenseSketch

SHAPES = [  # length, rows, width, blocks
    (1_000, 15, 100, 1),
    (1_000, 15, 64, 2),
    (999, 4, 7, 3),  # narrow rows, and a last chunk that is short
    (33, 3, 1, 2),  # one cell per row
    (50, 2, 200, 1),  # wider than the vector
    (5_000, 1, 1_024, 3),
    (40_000, 6, 3_001, 2),
    (1, 1, 1, 1),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sketch_of(shape: tuple[int, int, int, int]) -> DenseSketch:
    length, rows, width, blocks = shape
    return DenseSketch(length=length, rows=rows, width=width, blocks=blocks, seed=5, round=3)


def vectors(count: int, length: int) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(length))


def tolerance(sketch: DenseSketch, vector: torch.Tensor) -> float:
    """How much the order of sums may change a cell: one rounding error per coordinate in it."""
    chunks = -(-sketch.length // sketch.width)
    return float(2.0**-23 * (chunks + 1) * vector.abs().max() * math.sqrt(chunks))


@pytest.mark.parametrize("shape", SHAPES)
def test_on_the_processor_a_tensor_sketch_is_the_sketch(shape: tuple[int, int, int, int]) -> None:
    dense = sketch_of(shape)
    batch, sketch = vectors(3, dense.length), TensorSketch(dense)
    tables = sketch.encode(batch)
    assert np.array_equal(tables.numpy(), dense.encode(batch.numpy()))
    assert np.array_equal(sketch.encode(batch[1]).numpy(), dense.encode(batch[1].numpy()))
    assert np.array_equal(sketch.decode(tables[0]).numpy(), dense.decode(tables[0].numpy()))
    assert sketch.shape == dense.shape


def test_tensors_that_need_gradients_are_taken_as_they_are() -> None:
    dense = sketch_of(SHAPES[0])
    batch = vectors(2, dense.length).requires_grad_()
    assert not TensorSketch(dense).encode(batch).requires_grad


def test_inputs_are_left_alone() -> None:
    dense = sketch_of(SHAPES[0])
    batch = vectors(2, dense.length)
    before = batch.clone()
    table = TensorSketch(dense).encode(batch)
    copy = table.clone()
    TensorSketch(dense).decode(table[0])
    assert torch.equal(batch, before)
    assert torch.equal(table, copy)


@pytest.mark.parametrize("shape", [(999,), (2, 999), (1, 2, 1_000), ()])
def test_vectors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=r"must be \(1000,\) or \(n, 1000\)"):
        TensorSketch(sketch_of(SHAPES[0])).encode(torch.ones(shape))


@pytest.mark.parametrize("shape", [(1_500,), (15, 99), (2, 15, 100)])
def test_tables_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=r"must have the shape \(15, 100\)"):
        TensorSketch(sketch_of(SHAPES[0])).decode(torch.ones(shape))


def test_what_is_not_finite_is_refused_on_the_processor() -> None:
    batch = torch.ones(1_000)
    batch[3] = math.nan
    with pytest.raises(SpecError, match="finite"):
        TensorSketch(sketch_of(SHAPES[0])).encode(batch)


@needs_gpu
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_tables_are_the_processors_but_for_the_order_of_sums(
    shape: tuple[int, int, int, int], count: int
) -> None:
    dense = sketch_of(shape)
    batch = vectors(count, dense.length)
    result = TensorSketch(dense, "cuda").encode(batch.cuda()).cpu()
    expected = torch.from_numpy(dense.encode(batch.numpy()))
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= tolerance(dense, batch)
    one = TensorSketch(dense, "cuda").encode(batch[0].cuda()).cpu()
    assert float((one - expected[0]).abs().max()) <= tolerance(dense, batch)


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_readings_are_the_processors_but_for_the_order_of_sums(
    shape: tuple[int, int, int, int],
) -> None:
    dense = sketch_of(shape)
    table = torch.randn(dense.shape, generator=torch.Generator().manual_seed(2))
    result = TensorSketch(dense, "cuda").decode(table.cuda()).cpu()
    expected = torch.from_numpy(dense.decode(table.numpy()))
    # A reading is the sum of `rows` cells by √rows.
    allowed = 2.0**-23 * (dense.rows + 1) * math.sqrt(dense.rows) * float(table.abs().max())
    assert float((result - expected).abs().max()) <= allowed


@needs_gpu
def test_on_a_gpu_other_shapes_devices_and_placings_are_refused() -> None:
    dense = sketch_of(SHAPES[0])
    sketch = TensorSketch(dense, "cuda")
    with pytest.raises(SpecError, match="must have the shape"):
        sketch.encode(torch.ones(999, device="cuda"))
    with pytest.raises(SpecError, match="must have the shape"):
        sketch.decode(torch.ones(15, 99, device="cuda"))
    with pytest.raises(SpecError, match="on cpu"):
        sketch.encode(torch.ones(1_000))
    other = DenseSketch(length=1_000, rows=15, width=100, placing="hashed", seed=1)
    with pytest.raises(SpecError, match="placed by rotation"):
        TensorSketch(other, "cuda")

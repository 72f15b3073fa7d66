"""Errors and sizes grow as paper 002's lower bounds do, which have no constants."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sfumato import plan
from sfumato.errors import SpecError
from sfumato.questions.mean.bounds import (
    order_of_bits,
    order_of_bits_with_tail,
    order_of_error,
    order_of_error_with_tail,
)
from sfumato.questions.mean.design import MeanDesign, cells_for

SIZES: list[dict[str, Any]] = [
    {"devices": devices, "dimensions": 100_000, "epsilon": epsilon, "delta": delta}
    for devices in (1_000, 20_000)
    for epsilon in (0.5, 1.0)
    for delta in (1e-6, 1e-9)
]
STUDY: dict[str, Any] = {"question": "mean", "trust": "central", "clip": 1.0}


def ratios(mine: list[float], bounds: list[float]) -> list[float]:
    return [each / bound for each, bound in zip(mine, bounds, strict=True)]


def test_the_error_of_whole_vectors_grows_as_theorem_b_1_says() -> None:
    """Errors differ by a factor of 2,000. The control: without the root of delta, ratios differ."""
    errors = [
        plan(STUDY | size | {"compression": "none"}).predicted["l2_error"] ** 2 for size in SIZES
    ]
    assert max(errors) > 1_000 * min(errors)
    ours = ratios(errors, [order_of_error(**size, length=1e9) for size in SIZES])
    assert min(ours) >= 1
    assert max(ours) < 1.3 * min(ours)
    fixed = [order_of_error(**size | {"delta": 1e-6}, length=1e9) for size in SIZES]
    assert max(ratios(errors, fixed)) > 1.4 * min(ratios(errors, fixed))


def test_cells_for_a_known_length_grow_as_corollary_3_2_says() -> None:
    """Cells differ by a factor of 100,000, since the length is squared; they stay above bits."""
    cells, bits = [], []
    for size in SIZES:
        design = plan(STUDY | size | {"compression": "adapt_norm"}).design
        assert isinstance(design, MeanDesign)
        for length in (0.001, 0.01):
            cells.append(cells_for((size["devices"] * length) ** 2, design.multiplier, 0.1))
            bits.append(order_of_bits(**size | {"dimensions": 10**9}, length=length))
    assert max(cells) > 50_000 * min(cells)
    assert min(ratios(cells, bits)) >= 1
    assert max(ratios(cells, bits)) < 1.3 * min(ratios(cells, bits))


def test_bounds_are_those_of_the_paper() -> None:
    size: dict[str, Any] = {"devices": 100, "dimensions": 50, "epsilon": 1.0, "delta": math.exp(-9)}
    assert order_of_error(**size, length=1.0) == pytest.approx(50 * 9 / 100**2)
    assert order_of_error(**size, length=0.1) == pytest.approx(0.01)  # the mean itself
    assert order_of_error_with_tail(**size, tail=0.1, sparsity=10) == pytest.approx(0.01 + 0.009)
    assert order_of_error_with_tail(**size, tail=0.9, sparsity=10) == pytest.approx(0.045)
    assert order_of_error_with_tail(**size | {"epsilon": 0.01}, tail=2.0, sparsity=10) == 1.0
    assert order_of_bits(**size, length=0.1) == pytest.approx(10**2 / 9)
    assert order_of_bits(**size, length=0.9) == 50
    assert order_of_bits(**size | {"epsilon": 90.0}, length=0.05) == pytest.approx(0.05**2 * 5_000)
    assert order_of_bits_with_tail(dimensions=64, sparsity=4, error=1 / 16) == 4 * 6
    with pytest.raises(SpecError, match="twice as many dimensions"):
        order_of_bits_with_tail(dimensions=7, sparsity=4, error=0.1)
    with pytest.raises(SpecError, match="delta must be below 1"):
        order_of_error(**size | {"delta": 1.0})

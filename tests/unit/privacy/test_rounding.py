"""Real vectors to whole numbers: never too long, right on average."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from checks import SEED
from sfumato.errors import SpecError
from sfumato.privacy import Rounding, SeededRng


def unit_vectors(count: int, cells: int, seed: int = 0) -> Any:
    vectors = np.random.default_rng([SEED, seed]).normal(size=(count, cells))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("cells", [1, 7, 400])
def test_no_vector_comes_out_longer_than_promised(scale: float, cells: int) -> None:
    rounding = Rounding(clip=2.0, scale=scale, cells=cells, risk=0.5)
    vectors = 2.0 * unit_vectors(300, cells)
    integers = rounding.integers(vectors, rng=SeededRng(SEED))
    assert np.linalg.norm(integers, axis=1).max() <= rounding.l2 * (1 + 1e-12)
    assert np.abs(integers).sum(axis=1).max() <= rounding.l1 * (1 + 1e-12)
    assert np.abs(integers).max() <= rounding.largest
    assert np.abs(rounding.reals(integers) - vectors).max() < 1 / scale
    assert rounding.unit_cells == 0


def test_without_the_condition_some_would_be_too_long() -> None:
    """The control: halves vary most, and at risk 0.9 a sixth of plain roundings are too long."""
    rounding = Rounding(clip=2.5, scale=2.0, cells=100, risk=0.9)
    halves = np.full((500, 100), 0.25)
    plain = np.floor(2.0 * halves + np.random.default_rng(SEED).random(halves.shape))
    assert np.mean(np.linalg.norm(plain, axis=1) > rounding.l2) > 0.05
    integers = rounding.integers(halves, rng=SeededRng(SEED))
    assert (np.linalg.norm(integers, axis=1) <= rounding.l2).all()


def test_the_mean_is_kept() -> None:
    """100,000 roundings of one vector: each cell's mean within 5 deviations of 1/(2·√100000).

    False alarm: one of 20 cells beyond 5 deviations, below 1.2e-5. Power: rounding to the nearest
    would be off by ten times what is allowed.
    """
    rounding = Rounding(clip=1.0, scale=3.0, cells=20)
    vector = unit_vectors(1, 20)
    integers = rounding.integers(np.repeat(vector, 100_000, axis=0), rng=SeededRng(SEED))
    error = np.abs(integers.mean(axis=0) - 3.0 * vector[0])
    allowed = 5 / (2 * math.sqrt(100_000)) + rounding.risk / (1 - rounding.risk) * math.sqrt(20)
    assert error.max() < allowed
    assert np.abs(np.rint(3.0 * vector[0]) - 3.0 * vector[0]).max() > 10 * allowed


def test_attempts_are_rarely_too_long() -> None:
    """At risk 1/2 at most half of 2,000 plain roundings are too long (binomial, 5 deviations)."""
    rounding = Rounding(clip=1.0, scale=5.0, cells=300, risk=0.5)
    scaled = 5.0 * np.repeat(unit_vectors(1, 300), 2_000, axis=0)
    plain = np.floor(scaled + np.random.default_rng(SEED).random(scaled.shape))
    assert np.mean(np.linalg.norm(plain, axis=1) > rounding.l2) < 0.5 + 5 * 0.5 / math.sqrt(2_000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clip": 0.0}, "clip must be above 0"),
        ({"scale": -1.0}, "scale must be above 0"),
        ({"cells": 0}, "cells must be at least 1"),
        ({"risk": 1.0}, "risk must be above 0"),
        ({"scale": 2.0**53}, "at most 2"),
    ],
)
def test_a_rounding_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Rounding(**({"clip": 1.0, "scale": 4.0, "cells": 3} | change))


def test_vectors_that_are_too_long_or_of_another_shape_are_refused() -> None:
    rounding = Rounding(clip=1.0, scale=4.0, cells=3)
    for wrong in ([[1.0, 1.0, 0.0]], [[math.nan, 0.0, 0.0]], [[math.inf, 0.0, 0.0]]):
        with pytest.raises(SpecError, match="at most 1"):
            rounding.integers(np.array(wrong), rng=SeededRng(SEED))
    with pytest.raises(SpecError, match=r"must be \(n, 3\)"):
        rounding.integers(np.zeros((2, 4)), rng=SeededRng(SEED))

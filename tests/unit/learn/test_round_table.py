"""A round's table with more than its sum: its parts, its release and its cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sfumato.errors import SpecError
from sfumato.learn.campaign import RoundNoise
from sfumato.privacy import AdditiveLoss, SeededRng
from sfumato.privacy.accounting import SMOOTHING
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import RoundSketch, VectorSketch

LENGTH = 40
MAIN = VectorSketch(
    length=LENGTH, clip=1.0, bound=1.0, scale=1e3,
    dense=DenseSketch(length=LENGTH, rows=3, width=7, seed=1),
)  # fmt: skip
SECOND = replace(MAIN, dense=DenseSketch(length=LENGTH, rows=2, width=4, seed=2))
WHOLE = RoundSketch(main=MAIN, second=SECOND, counts=True)
SKETCHES = [
    WHOLE,
    RoundSketch(main=MAIN),
    RoundSketch(main=MAIN, second=SECOND),
    RoundSketch(main=MAIN, counts=True),
]


def noise_for(sketch: RoundSketch, scale: float = 2e3, asks: Any = "norm") -> RoundNoise:
    return RoundNoise(
        noise="gaussian",
        sketch=sketch,
        asks="nothing" if sketch.second is None else asks,
        scale=scale,
        second_scale=0.0 if sketch.second is None else 3 * scale,
        count_scale=4.0 if sketch.counts else 0.0,
    )


def updates(count: int) -> Any:
    """Updates; every other one is longer than the clip."""
    vectors = np.random.default_rng(1).normal(size=(count, LENGTH))
    size = np.where(np.arange(count) % 2, 3.0, 0.5) / np.linalg.norm(vectors, axis=1)
    return (vectors * size[:, None]).astype(np.float32)


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda each: f"{each.shape[0]} cells")
def test_the_parts_are_those_of_their_own_sketches(sketch: RoundSketch) -> None:
    vectors, rng, again = updates(5), SeededRng(1), SeededRng(1)
    tables = sketch.tables(vectors, rng=rng)
    assert tables.shape == (5, *sketch.shape)
    main, second, count = sketch.split(tables)
    assert np.array_equal(main, MAIN.tables(vectors, rng=again))
    if sketch.second is not None:
        assert np.array_equal(second, SECOND.tables(vectors, rng=again))
    assert count.reshape(-1).tolist() == ([1, -1, 1, -1, 1] if sketch.counts else [])
    weights = np.array([1, 2, 0, 1, 3])
    assert np.array_equal(sketch.encode(tables), tables.sum(axis=0))
    assert np.array_equal(sketch.encode(tables, weights), weights @ tables)
    assert sketch.encode(tables[:0]).tolist() == [0] * sketch.shape[0]
    assert sketch.tables(vectors[:0], rng=rng).shape == (0, *sketch.shape)


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda each: f"{each.shape[0]} cells")
def test_no_table_is_longer_than_its_sensitivity(sketch: RoundSketch) -> None:
    norms = sketch.sensitivity(1)
    tables = sketch.tables(1e3 * updates(50), rng=SeededRng(1))
    assert np.abs(tables).sum(axis=1).max() <= norms.l1
    assert np.linalg.norm(tables.astype(np.float64), axis=1).max() <= norms.l2
    assert norms.largest is not None
    assert np.abs(tables).max() <= norms.largest


@pytest.mark.parametrize("cell", [0, MAIN.cells, WHOLE.shape[0] - 1])
def test_a_table_that_is_too_long_in_any_part_is_refused(cell: int) -> None:
    table = np.zeros((1, *WHOLE.shape), dtype=np.int64)
    table[0, cell] = 10_000
    with pytest.raises(SpecError):
        WHOLE.encode(table)


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda each: f"{each.shape[0]} cells")
def test_a_second_table_is_released_as_one_noised_number(sketch: RoundSketch) -> None:
    """With next to no noise: the main table, the norm, the count, and no other cell."""
    tables = sketch.tables(updates(6), rng=SeededRng(1))
    quiet = replace(noise_for(sketch, 1e-3), count_scale=1e-3 if sketch.counts else 0.0)
    release = quiet.at_release(sketch.encode(tables), count=6, rng=SeededRng(2))
    asks = sketch.second is not None
    assert release.shape == (MAIN.cells + asks + sketch.counts,)
    table, norm, count = sketch.read(release)
    main, second, _ = sketch.split(tables.sum(axis=0))
    assert np.array_equal(table, main)
    assert count == (0.0 if sketch.counts else None)
    if norm is None:
        assert not asks
    else:
        assert math.isclose(norm, np.linalg.norm(second) / SECOND.scale, abs_tol=1 / SECOND.scale)


def test_an_error_is_the_distance_from_what_was_decoded() -> None:
    tables = WHOLE.tables(updates(6), rng=SeededRng(1))
    total = WHOLE.encode(tables)
    release = noise_for(WHOLE, 1.0, asks="error").at_release(total, count=6, rng=SeededRng(2))
    table, error, _ = WHOLE.read(release)
    _, second, _ = WHOLE.split(total)
    assert SECOND.dense is not None
    distance = second / SECOND.scale - SECOND.dense.encode(MAIN.decode(table, 1))
    assert error is not None
    assert abs(error - np.linalg.norm(distance)) < 30 / SECOND.scale  # ten deviations


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda each: f"{each.shape[0]} cells")
def test_all_parts_are_paid_for(sketch: RoundSketch) -> None:
    noise = noise_for(sketch)
    loss = noise.loss(sketch.sensitivity(1))
    assert isinstance(loss, AdditiveLoss)
    spent = MAIN.rounding.l2**2 / (noise.scale**2 - SMOOTHING)
    spent += SECOND.rounding.l2**2 / ((3 * noise.scale) ** 2 - SMOOTHING) if sketch.second else 0.0
    spent += 1 / (4.0**2 - SMOOTHING) if sketch.counts else 0.0
    assert math.isclose(loss.l2**2 / (loss.scale**2 - SMOOTHING), spent)
    little = replace(noise, scale=1.0).loss(sketch.sensitivity(1))  # priced by Rényi bounds
    assert isinstance(little, AdditiveLoss)
    spent += MAIN.rounding.l2**2 * (1 - 1 / (noise.scale**2 - SMOOTHING))
    assert little.scale**2 < SMOOTHING
    assert math.isclose((little.l2 / little.scale) ** 2, spent, rel_tol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"second_scale": 0.0},
        {"count_scale": 0.0},
        {"scale": 0.0},
        {"asks": "nothing"},
        {"noise": "laplace"},
        {"sketch": RoundSketch(main=MAIN)},
    ],
)
def test_nothing_is_released_without_noise(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        replace(noise_for(WHOLE), **fields)

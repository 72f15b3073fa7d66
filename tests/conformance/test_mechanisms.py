"""What every registered mechanism must do, found through the registry: nobody opts in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import sfumato.simulation.simulate  # noqa: F401  # registers every kind
from checks import SEED, assert_mean
from sfumato.privacy import (
    ListedAbove,
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    SeededRng,
    best_list,
    epsilon_of,
)
from sfumato.privacy.noise import AT_RELEASE
from sfumato.sketch import CountSketch, OneHot
from sfumato.spec import digest, from_json, kinds, to_json
from unit.privacy import exact

I64 = npt.NDArray[np.int64]

CELLS = 100_000
COUNT = 30
EXAMPLES: dict[str, list[Any]] = {
    "listed_above": [best_list(0.25, epsilon=1.0, delta=1e-6)],
    "no_noise": [NoNoise()],
    "noise_at_release": [
        NoiseAtRelease(noise=noise, scale=scale) for noise in AT_RELEASE for scale in (1.0, 9.4467)
    ],
    "noise_in_shares": [
        NoiseInShares(scale=6.0, survivors=20, colluders=4),
        NoiseInShares(scale=1.0, survivors=30),
    ],
}
CONTRIBUTIONS = [
    OneHot(categories=4).sensitivity(1),
    CountSketch(rows=5, width=8, seed=1).sensitivity(1),
    CountSketch(rows=5, width=8, seed=1).sensitivity(3),
]


def is_mechanism(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("at_device", "at_release", "loss", "stddev"))


# A round's noise fits its own table alone: tests/unit/learn/test_round_table.py has the same tests.
MECHANISMS = sorted(
    kind for kind, cls in kinds().items() if is_mechanism(cls) and kind != "round_noise"
)
CASES = [example for kind in MECHANISMS for example in EXAMPLES.get(kind, [])]


@pytest.fixture(params=CASES, ids=repr)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    candidate: Mechanism = request.param
    return candidate


def noise_of(mechanism: Mechanism, table: I64, rng: SeededRng) -> I64:
    """What both stations add to the table of COUNT devices."""
    contribution = mechanism.at_device(table, devices=COUNT, rng=rng)
    return mechanism.at_release(contribution, count=COUNT, rng=rng) - table


def squares_stddev(mechanism: Mechanism) -> float:
    """Standard deviation of the square of a cell's noise, from the closed form of its law."""
    noise = mechanism.noise if isinstance(mechanism, NoiseAtRelease) else "skellam"
    scale = mechanism.scale if isinstance(mechanism, NoiseAtRelease) else mechanism.stddev(COUNT)
    variance, fourth = exact.moments(noise, scale, exact.reach(noise, scale))
    return math.sqrt(fourth - variance**2)


def test_every_mechanism_has_examples() -> None:
    assert EXAMPLES.keys() == set(MECHANISMS)


def test_it_survives_its_json(mechanism: Mechanism) -> None:
    again = from_json(to_json(mechanism))
    assert again == mechanism
    assert digest(again) == digest(mechanism)


def test_inputs_are_not_changed(mechanism: Mechanism) -> None:
    table = np.arange(20, dtype=np.int64).reshape(4, 5)
    table.flags.writeable = False
    assert noise_of(mechanism, table, SeededRng(SEED)).shape == (4, 5)
    assert np.array_equal(table, np.arange(20).reshape(4, 5))


def test_results_are_integers_of_the_same_shape(mechanism: Mechanism) -> None:
    for shape in ((7,), (3, 4), (0,)):
        noised = mechanism.at_release(
            mechanism.at_device(
                np.zeros(shape, dtype=np.int64), devices=COUNT, rng=SeededRng(SEED)
            ),
            count=COUNT,
            rng=SeededRng(SEED),
        )
        assert noised.shape == shape
        assert noised.dtype == np.int64


def test_noise_does_not_depend_on_the_table(mechanism: Mechanism) -> None:
    """Additive: the same words give the same noise, whatever it is added to."""
    zeros = np.zeros((5, 6), dtype=np.int64)
    full = np.arange(30, dtype=np.int64).reshape(5, 6) * 1000 - 7
    without = noise_of(mechanism, zeros, SeededRng(SEED))
    assert np.array_equal(without, noise_of(mechanism, full, SeededRng(SEED)))


def test_noise_repeats_with_its_seed_and_differs_with_another(mechanism: Mechanism) -> None:
    table = np.zeros(1000, dtype=np.int64)
    first = noise_of(mechanism, table, SeededRng(SEED, 1))
    assert np.array_equal(first, noise_of(mechanism, table, SeededRng(SEED, 1)))
    if mechanism.stddev(COUNT) > 0:
        assert not np.array_equal(first, noise_of(mechanism, table, SeededRng(SEED, 2)))


def test_noise_is_unbiased_and_has_the_stated_deviation(mechanism: Mechanism) -> None:
    """False alarm 6e-7 each (five standard errors). Power: a deviation 5% off is missed with
    probability below 1e-6 (ten standard errors or more off)."""
    noise = noise_of(mechanism, np.zeros(CELLS, dtype=np.int64), SeededRng(SEED, 3))
    stddev = mechanism.stddev(COUNT)
    if stddev == 0:
        assert not noise.any()
        return
    assert_mean(noise, 0.0, stddev, false_alarm=6e-7)
    assert_mean(
        noise.astype(np.float64) ** 2, stddev**2, squares_stddev(mechanism), false_alarm=6e-7
    )


def test_a_wrong_deviation_is_caught(mechanism: Mechanism) -> None:
    """The negative control: the stated deviation is 5% off."""
    if mechanism.stddev(COUNT) == 0:
        pytest.skip("there is no deviation to get wrong")
    noise = noise_of(mechanism, np.zeros(CELLS, dtype=np.int64), SeededRng(SEED, 4))
    wrong = (mechanism.stddev(COUNT) * 1.05) ** 2
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(
            noise.astype(np.float64) ** 2, wrong, squares_stddev(mechanism), false_alarm=6e-7
        )


@pytest.mark.parametrize("contribution", CONTRIBUTIONS, ids=repr)
def test_the_loss_is_finite_just_where_there_is_noise(
    mechanism: Mechanism, contribution: Any
) -> None:
    loss = mechanism.loss(contribution)
    assert from_json(to_json(loss)) == loss
    is_private = mechanism.stddev(COUNT) > 0 or isinstance(mechanism, ListedAbove)
    assert math.isfinite(epsilon_of([loss], 1e-6)) == is_private


def test_devices_add_noise_just_where_it_is_in_shares(mechanism: Mechanism) -> None:
    table = np.zeros(1000, dtype=np.int64)
    contribution = mechanism.at_device(table, devices=COUNT, rng=SeededRng(SEED))
    assert contribution.any() == mechanism.in_shares


def test_losses_grow_with_the_contribution(mechanism: Mechanism) -> None:
    costs = [epsilon_of([mechanism.loss(one)], 1e-6) for one in CONTRIBUTIONS]
    assert costs == sorted(costs)

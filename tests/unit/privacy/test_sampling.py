"""Contribution bounds: never more than the limit, and which values count is fair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED, assert_chi_square
from sfumato.errors import SpecError
from sfumato.privacy import SeededRng, bound_contributions

OWNERS = st.lists(st.integers(-3, 5), max_size=60).map(lambda x: np.array(x, dtype=np.int64))


@given(devices=OWNERS, limit=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_no_device_keeps_more_than_the_limit_and_none_loses_without_need(
    devices: np.ndarray[tuple[int], np.dtype[np.int64]], limit: int, seed: int
) -> None:
    before = devices.copy()
    indices = bound_contributions(devices, limit, rng=SeededRng(seed))
    assert np.array_equal(devices, before)
    assert np.array_equal(indices, np.unique(indices))  # sorted, none twice
    totals = dict(zip(*np.unique(devices, return_counts=True), strict=True))
    left = dict(zip(*np.unique(devices[indices], return_counts=True), strict=True))
    assert left == {device: min(count, limit) for device, count in totals.items()}


def test_a_devices_values_are_kept_uniformly_at_random() -> None:
    """Every pair among five values equally often, over 60,000 devices with their values mixed up.

    False alarm 1e-6 (chi-square, 10 pairs). Power: a pair 15% too likely is missed with
    probability below 1e-8 (noncentrality 150 against a bar of 45).
    """
    devices = np.tile(np.arange(60_000), 5)
    indices = bound_contributions(devices, 2, rng=SeededRng(SEED))
    place = indices // 60_000
    pairs = place[np.argsort(devices[indices], kind="stable")].reshape(60_000, 2)
    names = list(itertools.combinations(range(5), 2))
    counts = [np.count_nonzero((pairs == name).all(axis=1)) for name in names]
    assert sum(counts) == 60_000
    assert_chi_square(counts, np.full(10, 0.1))


def test_keeping_the_first_values_is_caught_by_the_same_check() -> None:
    """The negative control, in small: the first value is kept a little too often."""
    shares = np.full(10, 0.1)
    shares[:4] *= 1.15  # the pairs that hold the first value
    shares[4:] = (1 - shares[:4].sum()) / 6
    counts = np.random.default_rng(SEED).multinomial(60_000, shares)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(counts, np.full(10, 0.1))


def test_the_choice_repeats_with_its_seed_and_differs_with_another() -> None:
    devices = np.zeros(1000, dtype=np.int64)
    first = bound_contributions(devices, 10, rng=SeededRng(SEED, 1))
    assert np.array_equal(first, bound_contributions(devices, 10, rng=SeededRng(SEED, 1)))
    assert not np.array_equal(first, bound_contributions(devices, 10, rng=SeededRng(SEED, 2)))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(SpecError, match="items_per_device must be at least 1"):
        bound_contributions(np.array([1, 2]), limit, rng=SeededRng(SEED))

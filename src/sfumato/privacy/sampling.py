"""Bounds on the number of values a device contributes, and samples of them."""

from __future__ import annotations

import numpy as np

from sfumato.arrays import F64, I64
from sfumato.errors import SpecError
from sfumato.privacy.samplers import Rng

_COINS = 1 << 20  # how many are tossed together


def bound_contributions(devices: I64, limit: int, *, rng: Rng) -> I64:
    """Which values to keep so that no device has more than `limit`: sorted indices into `devices`.

    `devices` names the owner of each value. A device's values are chosen uniformly at random; a
    device with at most `limit` keeps them all. Nothing else about them matters, so the bound holds
    for any values.

    >>> from sfumato.privacy import SeededRng
    >>> indices = bound_contributions(np.array([7, 7, 7, 8]), 1, rng=SeededRng(1))
    >>> len(indices), indices[-1]
    (2, np.int64(3))
    """
    if limit < 1:
        raise SpecError(f"items_per_device must be at least 1; got {limit}")
    if devices.size == 0:
        return np.empty(0, dtype=np.int64)
    order = np.lexsort((rng.words(devices.size), devices))  # by device, at random within
    owner = devices[order]
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    place = np.arange(owner.size) - np.repeat(starts, np.diff(np.r_[starts, owner.size]))
    return np.sort(order[place < limit])


def threshold_sample(counts: I64, threshold: float, *, rng: Rng) -> F64:
    """Paper 001's algorithm 1: counts from `threshold` on stay; a smaller one becomes the threshold
    with probability count/threshold, and zero otherwise. Unbiased; the variance of a smaller
    count is count·(threshold − count).

    (The paper's text has lost the line that sets a kept count to the threshold.)

    >>> from sfumato.privacy import SeededRng
    >>> threshold_sample(np.array([0, 10, 12]), 10.0, rng=SeededRng(1)).tolist()
    [0.0, 10.0, 12.0]
    """
    if not threshold > 0:
        raise SpecError(f"threshold must be above 0; got {threshold}")
    if counts.size and counts.min() < 0:
        raise SpecError("counts must be at least 0")
    share = np.minimum(counts / threshold, 1.0)
    survives = rng.words(counts.size).reshape(counts.shape) < np.minimum(
        share * 2.0**64, np.nextafter(2.0**64, 0)
    ).astype(np.uint64)
    large = counts >= threshold
    return np.where(large, counts.astype(np.float64), np.where(survives, threshold, 0.0))


def count_heads(weights: I64 | int, rate: float, rng: Rng) -> I64:
    """How many of each row's coins show heads, each with this probability: exactly, since a rate is
    a multiple of 2**-64 unless it is below 2**-11, where it is rounded down."""
    limit = np.uint64(min(int(rate * 2**64), 2**64 - 1))
    if isinstance(weights, int):
        return (rng.words(weights) < limit).astype(np.int64)
    ends = np.cumsum(weights)
    counts = np.zeros(weights.size, dtype=np.int64)
    for start in range(0, int(ends[-1]) if ends.size else 0, _COINS):
        stop = min(start + _COINS, int(ends[-1]))
        heads = start + np.flatnonzero(rng.words(stop - start) < limit)
        np.add.at(counts, np.searchsorted(ends, heads, side="right"), 1)
    return counts

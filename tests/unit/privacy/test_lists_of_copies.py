"""Lists that count copies (`ListedAbove.copies`): their exact delta, by enumeration.

A device has a histogram with at most m copies in all. For every way to divide them among items, and
any number of copies that others have, both joint laws of the release are enumerated, with and
without the device; their hockey-stick divergence is the exact delta. Masses are those of `exact`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED
from marks import quick
from sfumato.errors import SpecError
from sfumato.privacy import ListedAbove, SeededRng
from sfumato.privacy.listing import lists
from unit.privacy import exact

F64 = npt.NDArray[np.float64]
REACH = 160  # of the noise: beyond are less than 1e-11 of the laws here
OTHERS = (0, 1, 7, 60)  # copies of an item that other devices have
SPLITS = {2: [(1,), (2,), (1, 1)], 3: [(3,), (1, 2), (1, 1, 1)]}
CASES = [
    (epsilon, delta, items)
    for epsilon in (0.7, 1.0, 3.0)
    for delta in (1e-2, 1e-4)
    for items in SPLITS
]


def promised(epsilon: float, delta: float, items: int) -> ListedAbove:
    (option,) = lists(1.0, items_per_device=items, epsilon=epsilon, delta=delta, copies=True)
    return option


def unchecked(mechanism: ListedAbove, **changes: Any) -> ListedAbove:
    values = {part.name: getattr(mechanism, part.name) for part in fields(mechanism)}
    return ListedAbove(**(values | {"epsilon": None, "delta": 0.0} | changes))


def law(mechanism: ListedAbove, count: int, masses: F64) -> F64:
    """Of one item: the probability of nothing, of the threshold, and of each count above it."""
    outcomes = np.zeros(REACH + max(OTHERS) + 5)
    if count == 0:
        outcomes[0] = 1.0
        return outcomes
    noised = count + np.arange(-REACH, REACH + 1)
    np.add.at(outcomes, np.maximum(noised - mechanism.threshold + 1, 0), masses)
    return outcomes


def exact_delta(mechanism: ListedAbove, epsilon: float, splits: list[tuple[int, ...]]) -> float:
    """The largest divergence in both directions."""
    masses = exact.masses(mechanism.noise, mechanism.scale, REACH)
    worst, factor = 0.0, math.exp(epsilon)
    choose: Iterable[tuple[int, ...]]
    for split in splits:
        choose = itertools.product(OTHERS, repeat=len(split))
        if len(set(split)) == 1:  # items alike: their order does not matter
            choose = itertools.combinations_with_replacement(OTHERS, len(split))
        for others in choose:
            present, absent = np.ones(1), np.ones(1)
            for own, count in zip(split, others, strict=True):
                present = np.multiply.outer(present, law(mechanism, count + own, masses)).ravel()
                absent = np.multiply.outer(absent, law(mechanism, count, masses)).ravel()
                large = (present > 1e-12) | (absent > 1e-12)  # what is left out counts in full
                lost = float(present[~large].sum() + absent[~large].sum())
                present, absent = np.r_[present[large], lost], np.r_[absent[large], 0.0]
            worst = max(
                worst,
                float(np.maximum(0.0, present - factor * absent).sum()),
                float(np.maximum(0.0, absent - factor * present).sum()),
            )
    return worst


@pytest.mark.parametrize("case", quick(CASES, (1.0, 1e-2, 2)))
def test_a_list_of_copies_keeps_its_promise_exactly(case: tuple[float, float, int]) -> None:
    epsilon, delta, items = case
    option = promised(*case)
    assert exact_delta(option, epsilon, SPLITS[items]) <= delta * (1 + 1e-6)
    # The controls: three quarters of the noise, and a threshold that is lower by one.
    assert exact_delta(unchecked(option, scale=0.75 * option.scale), epsilon, SPLITS[items]) > delta
    lower = unchecked(option, threshold=option.threshold - 1)
    assert exact_delta(lower, epsilon, SPLITS[items]) > delta


def test_a_list_of_devices_does_not_protect_copies() -> None:
    """The control for the bound: Gaussian noise for two items that move by one each is too little
    for one that moves by two."""
    options = lists(1.0, items_per_device=2, epsilon=1.0, delta=1e-2)
    (gaussian,) = (option for option in options if option.noise == "gaussian")
    assert exact_delta(gaussian, 1.0, [(1, 1)]) <= 1e-2
    assert exact_delta(gaussian, 1.0, [(2,)]) > 1e-2


@pytest.mark.parametrize("items", [1, 2, 5, 40])
def test_the_worst_division_of_own_copies_is_one_of_the_two_in_the_claim(items: int) -> None:
    """Of all divisions of m copies among items that nobody else has, found by dynamic programming,
    none lists one with a larger expected number than m items of one copy or one item of m."""
    option = promised(1.0, 1e-4, items)
    tail = exact.masses("laplace", option.scale, 4_000)[::-1].cumsum()[::-1]  # P(noise ≥ k − 4000)
    chance = [0.0, *(float(tail[4_000 + option.threshold - own]) for own in range(1, items + 1))]
    best = [0.0] * (items + 1)
    for total in range(1, items + 1):
        best[total] = max(chance[own] + best[total - own] for own in range(1, total + 1))
    assert math.isclose(best[items], max(items * chance[1], chance[items]), rel_tol=1e-9)
    assert best[items] <= 1e-4


def test_copies_need_laplace_noise_without_amplification() -> None:
    values: dict[str, Any] = {"rate": 1.0, "noise": "laplace", "scale": 9.0, "threshold": 90}
    values |= {"epsilon": 1.0, "delta": 1e-3, "items_per_device": 3, "copies": True}
    for changes in ({"noise": "gaussian", "scale": 90.0}, {"rate": 0.5, "amplified": True}):
        with pytest.raises(SpecError, match="must have Laplace noise"):
            ListedAbove(**values | changes)
    with pytest.raises(SpecError, match="this list costs a delta of 1 "):  # one device suffices
        ListedAbove(
            rate=1.0, noise="laplace", scale=9.0, threshold=3, epsilon=1.0, delta=1e-3,
            items_per_device=3, copies=True,
        )  # fmt: skip


def test_an_audit_of_a_device_with_all_copies_of_its_own_item() -> None:
    """The device's own item is listed with probability delta at most, and about that often if m
    copies are the worst case: exact binomial test, false alarm 1e-6. The control has a threshold
    that is lower by the copies, which is found with a power above 1 − 1e-9."""
    own, runs = 3, 40_000
    option = promised(3.0, 5e-3, own)

    def listed(mechanism: ListedAbove) -> int:
        counts = np.full(runs, own, dtype=np.int64)
        return int(mechanism.release(counts, rng=SeededRng(SEED))[1].sum())

    assert stats.binom.sf(listed(option) - 1, runs, option.delta) > 1e-6
    broken = unchecked(option, threshold=option.threshold - 2 * own)
    assert stats.binom.sf(listed(broken) - 1, runs, option.delta) < 1e-6


def test_copies_on_few_devices_are_found_from_a_larger_count_if_devices_drop_out() -> None:
    """Against a direct enumeration of the devices that answer."""
    option = promised(1.0, 1e-4, 4)
    devices = lists(1.0, items_per_device=1, epsilon=1.0, delta=1e-4)
    assert all(each.chance(50) == each.chance(50, answering=1.0) for each in devices)
    count, answering = 94, 0.8
    masses = exact.masses("laplace", option.scale, 2_000)
    tail = masses[::-1].cumsum()[::-1]
    expected = 0.0
    for holders in range(24):
        for last in (0, 1):  # 23 devices with four, one with two
            copies = 4 * holders + 2 * last
            weight = stats.binom.pmf(holders, 23, answering)
            weight *= answering if last else 1 - answering
            expected += weight * tail[2_000 + option.threshold - copies]
    assert math.isclose(option.chance(count, answering=answering), expected, rel_tol=1e-9)
    assert option.detectable(answering=0.8) > option.detectable()

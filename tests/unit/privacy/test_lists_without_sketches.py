"""Lists of all items, with noise and a threshold (`ListedAbove` at rate 1): their exact delta.

The release of a device's items is enumerated: for each item nothing, or its noised count. The
hockey-stick divergence of the two joint laws, with and without the device, is the exact delta.
Masses are those of `exact`, so nothing here comes from the samplers or the accountant.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from marks import quick
from sfumato.errors import SpecError
from sfumato.privacy import ListedAbove
from sfumato.privacy.listing import lists
from unit.privacy import exact

F64 = npt.NDArray[np.float64]
REACH = 90  # of the noise: beyond are less than 1e-9 of the laws here
OTHERS = (0, 1, 2, 6, 60)  # devices that hold an item besides the one that may be missing


def law(mechanism: ListedAbove, holders: int) -> F64:
    """Of one item: the probability of nothing, of the threshold, and of each count above it."""
    outcomes = np.zeros(REACH + max(OTHERS) + 2)
    if holders == 0:  # it is in no table, so it gets no noise
        outcomes[0] = 1.0
        return outcomes
    masses = exact.masses(mechanism.noise, mechanism.scale, REACH)
    for noise, chance in zip(range(-REACH, REACH + 1), masses, strict=True):
        count = holders + noise
        place = count - mechanism.threshold + 1 if count >= mechanism.threshold else 0
        outcomes[place] += chance
    return outcomes


def divergence(one: F64, other: F64, epsilon: float) -> float:
    return float(np.maximum(0.0, one - math.exp(epsilon) * other).sum())


def exact_delta(mechanism: ListedAbove, epsilon: float, items: int) -> float:
    """The largest divergence in both directions, whoever else holds the device's items; it may have
    fewer than `items`."""
    worst = 0.0
    laws = {count: law(mechanism, count) for count in {*OTHERS, *(k + 1 for k in OTHERS)}}
    for number in range(1, items + 1):
        for others in itertools.combinations_with_replacement(OTHERS, number):
            present, absent = np.ones(1), np.ones(1)
            for count in others:  # items get independent noise
                present = np.multiply.outer(present, laws[count + 1])
                absent = np.multiply.outer(absent, laws[count])
            worst = max(
                worst, divergence(present, absent, epsilon), divergence(absent, present, epsilon)
            )
    return worst


def unchecked(mechanism: ListedAbove, **changes: Any) -> ListedAbove:
    """The same list without its claim, so that it can be a broken one."""
    values = {part.name: getattr(mechanism, part.name) for part in fields(mechanism)}
    return ListedAbove(**(values | {"epsilon": None, "delta": 0.0} | changes))


CASES = [
    (epsilon, delta, items)
    for epsilon in (0.5, 1.0, 3.0)
    for delta in (1e-2, 1e-4)
    for items in (1, 2)
]
DEFAULTS = [case for case in CASES if case[:2] == (1.0, 1e-2)]


@pytest.mark.parametrize("case", quick(CASES, *DEFAULTS))
def test_a_list_of_all_items_keeps_its_promise_exactly(case: tuple[float, float, int]) -> None:
    epsilon, delta, items = case
    options = lists(1.0, items_per_device=items, epsilon=epsilon, delta=delta)
    assert {option.noise for option in options} == {"laplace", "gaussian"}
    for option in options:
        assert exact_delta(option, epsilon, items) <= delta * (1 + 1e-9), option


@pytest.mark.parametrize("case", quick(CASES, *DEFAULTS))
def test_too_little_noise_or_too_low_a_threshold_is_caught(case: tuple[float, float, int]) -> None:
    """The broken twins: the next lower threshold (for Gaussian noise, whose delta is shared with
    the threshold's, two fifths lower), and three quarters of the noise."""
    epsilon, delta, items = case
    for option in lists(1.0, items_per_device=items, epsilon=epsilon, delta=delta):
        lower = option.threshold - 1
        if option.noise == "gaussian":
            lower = math.floor(0.6 * option.threshold)
        assert exact_delta(unchecked(option, threshold=lower), epsilon, items) > delta, option
        twin = unchecked(option, scale=0.75 * option.scale)
        assert exact_delta(twin, epsilon, items) > delta, option


@pytest.mark.parametrize("items", [1, 2])
def test_the_claim_for_laplace_noise_is_tight(items: int) -> None:
    """The worst case is a device all of whose items nobody else holds: the chance that one of them
    is listed, 1 − (1 − q)^m, of which m·q is at most q more."""
    option = lists(1.0, items_per_device=items, epsilon=1.0, delta=1e-3)[0]
    assert option.noise == "laplace"
    worst = exact_delta(option, 1.0, items)
    claimed = {part.name: getattr(option, part.name) for part in fields(option)}
    assert ListedAbove(**claimed | {"delta": worst * (1 + 1e-3)})
    with pytest.raises(SpecError, match="this list costs a delta"):
        ListedAbove(**claimed | {"delta": worst * (1 - 1e-9)})


def test_items_that_are_counted_twice_break_the_promise() -> None:
    """The control for the contribution bound: a device that a list counts twice for one item, or
    for one item more than the list was made for."""
    option = lists(1.0, epsilon=1.0, delta=1e-3)[0]
    assert exact_delta(option, 1.0, 1) <= 1e-3
    assert exact_delta(option, 1.0, 2) > 1e-3
    twice = max(divergence(law(option, k + 2), law(option, k), 1.0) for k in OTHERS)
    assert twice > 1e-3

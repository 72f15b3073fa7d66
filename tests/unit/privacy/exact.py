"""Noise laws and privacy losses by other means than the library's: closed forms, brute force.

Masses come from mpmath's theta and Bessel functions; divergences are summed over all outcomes.
Nothing here calls sfumato.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import mpmath  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import numpy.typing as npt
from scipy import optimize

F64 = npt.NDArray[np.float64]


def _gaussian(scale: mpmath.mpf, value: int) -> mpmath.mpf:
    weight = mpmath.exp(-(mpmath.mpf(value) ** 2) / (2 * scale**2))
    return weight / mpmath.jtheta(3, 0, mpmath.exp(-1 / (2 * scale**2)))


def _laplace(scale: mpmath.mpf, value: int) -> mpmath.mpf:
    ratio = mpmath.exp(-1 / scale)
    return (1 - ratio) / (1 + ratio) * ratio ** abs(value)


def _skellam(scale: mpmath.mpf, value: int) -> mpmath.mpf:
    return mpmath.exp(-(scale**2)) * mpmath.besseli(abs(value), scale**2)


LAWS = {  # of each noise: P(noise = value), and how many scales and steps its tail is long
    "gaussian": (_gaussian, 9, 25),
    "laplace": (_laplace, 45, 0),
    "skellam": (_skellam, 9, 25),
}


def mass(noise: str, scale: float, value: int, *, bits: int = 200) -> mpmath.mpf:
    """P(noise = value), to about `bits` bits."""
    with mpmath.workprec(bits):
        return LAWS[noise][0](mpmath.mpf(scale), value)  # a float is a number: none is rounded


def reach(noise: str, scale: float) -> int:
    """Beyond it lies less than 1e-18 of the law."""
    _, scales, steps = LAWS[noise]
    return math.ceil(scales * scale) + steps


@lru_cache(maxsize=64)
def masses(noise: str, scale: float, reach: int) -> F64:
    """P(−reach), …, P(reach), as floats."""
    half = [float(mass(noise, scale, value)) for value in range(reach + 1)]
    table = np.array(half[:0:-1] + half)
    table.flags.writeable = False  # cached, so shared
    return table


def cumulative(noise: str, scale: float, value: int, *, bits: int = 400) -> mpmath.mpf:
    """P(noise ≤ value), to about `bits` bits, tails included."""
    with mpmath.workprec(bits):
        if value >= 0:
            return 1 - cumulative(noise, scale, -value - 1, bits=bits)
        if noise == "laplace":  # a geometric series
            return mass(noise, scale, value, bits=bits) / (1 - mpmath.exp(-1 / mpmath.mpf(scale)))
        total, tiny = mpmath.mpf(0), mpmath.mpf(2) ** -bits
        for below in itertools.count(value, -1):
            term = mass(noise, scale, below, bits=bits + 32)
            total += term
            if term < tiny * total:
                return total
        raise AssertionError("the loop above is endless")  # for the type checker


def moments(noise: str, scale: float, reach: int) -> tuple[float, float]:
    """Variance, and the fourth moment."""
    values = np.arange(-reach, reach + 1, dtype=np.float64)
    table = masses(noise, scale, reach)
    return float(table @ values**2), float(table @ values**4)


def delta_of_shift(
    noise: str, scale: float, shift: Sequence[int], epsilon: float, reach: int
) -> float:
    """The least delta at this epsilon when a table moves by `shift`: max over both directions.

    Every outcome within `reach` of zero in each cell is looked at; the mass beyond counts as lost.
    """
    there, here = np.ones(1), np.ones(1)
    for step in shift:
        law = masses(noise, scale, reach + abs(step))
        middle = reach + abs(step)
        base = law[middle - reach : middle + reach + 1]
        moved = law[middle - reach - step : middle + reach + 1 - step]
        here, there = np.outer(here, base).ravel(), np.outer(there, moved).ravel()
    lost = max(float(1 - here.sum()), float(1 - there.sum()), 0.0)
    return lost + max(
        float(np.maximum(there - np.exp(epsilon) * here, 0).sum()),
        float(np.maximum(here - np.exp(epsilon) * there, 0).sum()),
    )


def epsilon_of_shift(
    noise: str, scale: float, shift: Sequence[int], delta: float, reach: int
) -> float:
    """The least epsilon at this delta when a table moves by `shift`."""
    if delta_of_shift(noise, scale, shift, 0.0, reach) <= delta:
        return 0.0
    high = 1.0
    while delta_of_shift(noise, scale, shift, high, reach) > delta:
        high *= 2
    return float(
        optimize.brentq(
            lambda epsilon: delta_of_shift(noise, scale, shift, epsilon, reach) - delta,
            0.0,
            high,
            xtol=1e-12,
        )
    )


def delta_of_units(noise: str, scale: float, cells: int, epsilon: float, reach: int) -> float:
    """The least delta at this epsilon when `cells` cells move by one each, Gaussian or Laplace.

    The loss depends on one whole number only: the sum of the cells (Gaussian), or how many of them
    are at least one (Laplace). So the law of that number is all there is to sum over.
    """
    if noise == "laplace":
        ratio = np.exp(-1 / scale)
        here = _power(np.array([1.0, ratio]) / (1 + ratio), cells)  # without the device
        there = _power(np.array([ratio, 1.0]) / (1 + ratio), cells)
    else:
        law = _power(masses(noise, scale, reach), cells)
        here, there = np.r_[law, np.zeros(cells)], np.r_[np.zeros(cells), law]
    return float(np.maximum(there - np.exp(epsilon) * here, 0).sum())


def _power(law: F64, count: int) -> F64:
    total = np.ones(1)
    for _ in range(count):
        total = np.convolve(total, law)
    return total

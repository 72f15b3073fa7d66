"""The kinds of noise on whole numbers, one record each: all that distinguishes one from another.

Samplers, accounting, mechanisms, planners and their tests read `NOISES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Literal

import numpy as np

from sfumato.arrays import F64

Noise = Literal["gaussian", "laplace", "skellam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKind:
    """A noise that is symmetric around zero and has a scale as its only parameter."""

    title: str  # its name for people
    weights: Callable[[Fraction, int], list[int]]
    """Whole numbers proportional to the probabilities of 0, 1, 2, … for a scale: each is within
    2**-bits of its share of the whole, and so is the sum of those left out."""
    largest_scale: int  # tables grow with it: about two million entries
    stddev: Callable[[float], float]  # of a scale
    renyi: Callable[[F64, float, float, float], F64]
    """A bound on the Rényi divergence at these orders, given l1, l2 and the scale."""
    logs: Callable[[float, int], F64]
    """Logarithms of the probabilities of 0, …, reach for a scale, up to a constant: to float
    accuracy, however small they are."""
    is_pure: bool = False  # whether its epsilon is l1/scale, with a delta of 0
    at_release: bool = True  # whether a collector adds it; if not, devices do, in shares
    in_samples: bool = True  # whether `renyi` holds for cohorts drawn at random (`SampledLoss`)


_GUARD_BITS = 80  # rounding in a table of up to 2**24 entries stays below one place


def _gaussian_weights(stddev: Fraction, bits: int) -> list[int]:
    """exp(−x²/2σ²) for x = 0, 1, …: each the last times a ratio, each ratio the last times q."""
    bits += _GUARD_BITS
    root = exp_below(-1 / (2 * stddev**2), bits)
    square = root * root >> bits
    weights, weight, ratio = [], 1 << bits, root
    while weight:
        weights.append(weight)
        weight = weight * ratio >> bits
        ratio = ratio * square >> bits
    return weights


def _laplace_weights(scale: Fraction, bits: int) -> list[int]:
    bits += _GUARD_BITS
    ratio = exp_below(-1 / scale, bits)
    weights, weight = [], 1 << bits
    while weight:
        weights.append(weight)
        weight = weight * ratio >> bits
    return weights


def _skellam_weights(stddev: Fraction, bits: int) -> list[int]:
    """Bessel's I_x(μ), μ the variance, by Miller's backward recurrence, which is stable:
    I_{x−1} = I_{x+1} + (2x/μ)·I_x, every term positive."""
    bits += _GUARD_BITS
    variance = stddev**2
    mu = float(variance)
    last, logarithm = 0, 0.0
    while logarithm > -bits:  # Amos 1974: I_x/I_{x−1} < μ/(x − 1/2 + √((x − 1/2)² + μ²))
        last += 1
        logarithm += math.log2(mu / (last - 0.5 + math.hypot(last - 0.5, mu)))
    after, here = 0, 1 << bits
    weights = [here]
    for x in range(last, 0, -1):
        before = after + 2 * x * variance.denominator * here // variance.numerator
        after, here = here, before
        weights.append(here)
    shift = max(here.bit_length() - bits, 0)
    return [weight for weight in (w >> shift for w in reversed(weights)) if weight]


def _laplace_stddev(scale: float) -> float:
    ratio = math.exp(-1 / scale)
    return math.sqrt(2 * ratio) / (1 - ratio)


def _gaussian_renyi(orders: F64, l1: float, l2: float, scale: float) -> F64:
    """Canonne, Kamath, Steinke 2020, theorem 14."""
    return orders * l2**2 / (2 * scale**2)


def _laplace_renyi(orders: F64, l1: float, l2: float, scale: float) -> F64:
    """Of anything that is epsilon-DP: min(epsilon, order·epsilon²/2)."""
    pure = l1 / scale
    return np.minimum(pure, orders * pure**2 / 2)


def _skellam_renyi(orders: F64, l1: float, l2: float, scale: float) -> F64:
    """Agarwal, Kairouz, Liu 2021, theorem 3.5: integer orders; others are rounded up."""
    order, variance = np.ceil(orders), scale**2
    gaussian = order * l2**2 / (2 * variance)
    extra = np.minimum(
        ((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance)
    )
    return np.asarray(gaussian + extra)


def _gaussian_logs(scale: float, reach: int) -> F64:
    return -(np.arange(reach + 1.0) ** 2) / (2 * scale**2)


def _laplace_logs(scale: float, reach: int) -> F64:
    return -np.arange(reach + 1.0) / scale


def _skellam_logs(scale: float, reach: int) -> F64:
    """By I_x/I_{x−1} = 1/(2x/μ + I_{x+1}/I_x), from far above `reach` downwards: each step divides
    the error of the start by more than 4x²/μ² + 1."""
    mu, last = scale**2, reach + math.ceil(20 * scale) + 100
    ratio, ratios = 0.0, np.zeros(last + 1)
    for x in range(last, 0, -1):
        ratio = 1 / (2 * x / mu + ratio)
        ratios[x] = ratio
    ratios[0] = 1.0
    return np.asarray(np.cumsum(np.log(ratios[: reach + 1])))


NOISES: dict[Noise, NoiseKind] = {
    "gaussian": NoiseKind(
        title="discrete Gaussian",
        weights=_gaussian_weights,
        largest_scale=1 << 16,
        stddev=float,  # to within 3e-7 of it for a scale of at least 1
        renyi=_gaussian_renyi,
        logs=_gaussian_logs,
    ),
    "laplace": NoiseKind(
        title="discrete Laplace",
        weights=_laplace_weights,
        largest_scale=1 << 12,
        stddev=_laplace_stddev,
        renyi=_laplace_renyi,
        logs=_laplace_logs,
        is_pure=True,
        in_samples=False,
    ),
    "skellam": NoiseKind(
        title="Skellam",
        weights=_skellam_weights,
        largest_scale=1 << 16,
        stddev=float,
        renyi=_skellam_renyi,
        logs=_skellam_logs,
        at_release=False,
    ),
}


def exp_below(exponent: Fraction, bits: int) -> int:
    """exp(exponent) × 2**bits, rounded down; `decimal` rounds its exp correctly."""
    digits = int(bits * 0.302) + 20 + max(0, math.ceil(float(exponent) * 0.4343))
    with localcontext(Context(prec=digits)):
        value = (Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
        return int(value * (Decimal(2) ** bits))

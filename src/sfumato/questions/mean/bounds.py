"""Paper 002's lower bounds for means, in orders: the theorems leave constants and logarithms open.

Vectors of at most length G have a mean of length M·G. Errors are squared, as shares of G². Nothing
is sized by these numbers; tests compare how they and our sizes grow. Theorem 3.3 has none: to take
the bits of `order_of_bits` for every mean, an unbiased protocol needs two rounds, and "adapt_norm"
has two.
"""

from __future__ import annotations

import math

from sfumato.spec import require


def order_of_error(
    *, devices: int, dimensions: int, epsilon: float, delta: float, length: float = 1.0
) -> float:
    """Theorem B.1: no private mean has a smaller squared error on all means of this length M.

    >>> error = order_of_error(devices=1_000, dimensions=100, epsilon=1.0, delta=1e-6)
    >>> round(error, 6)
    0.001382
    """
    _check(devices, dimensions, epsilon, delta)
    return min(length**2, dimensions * math.log(1 / delta) / (devices * epsilon) ** 2)


def order_of_error_with_tail(
    *, devices: int, dimensions: int, epsilon: float, delta: float, tail: float, sparsity: int
) -> float:
    """Theorem B.2: the same on all means of which all coordinates but the `sparsity` largest
    have at most the length `tail`·G."""
    _check(devices, dimensions, epsilon, delta)
    noise = math.log(1 / delta) / (devices * epsilon) ** 2
    return min(1.0, tail**2 + sparsity * noise, dimensions * noise)


def order_of_bits(
    *, devices: int, dimensions: int, epsilon: float, delta: float, length: float
) -> float:
    """Corollary 3.2: bits that a device sends, if a secure sum is all that the server sees, the
    mean is unbiased, and its error is of the least order for means of this length M.

    >>> order_of_bits(devices=1_000, dimensions=10**6, epsilon=1.0, delta=math.exp(-10), length=0.1)
    1000.0
    """
    _check(devices, dimensions, epsilon, delta)
    by_noise = (length * devices * epsilon) ** 2 / math.log(1 / delta)
    return min(dimensions, by_noise, length**2 * devices * dimensions)


def order_of_bits_with_tail(*, dimensions: int, sparsity: int, error: float) -> float:
    """Theorem B.4: bits that a device sends in a secure sum, biased or not, whose squared error is
    at most `error` on the means of `order_of_error_with_tail`; for dimensions of at least twice
    `sparsity`."""
    require.at_least(1, sparsity=sparsity)
    require.above(0, error=error)
    require(
        dimensions >= 2 * sparsity,
        "the bound needs at least twice as many dimensions as the sparsity",
    )
    return sparsity * max(math.log2(dimensions / (sparsity * math.sqrt(error))), 0.0)


def _check(devices: int, dimensions: int, epsilon: float, delta: float) -> None:
    require.at_least(1, devices=devices, dimensions=dimensions)
    require.above(0, epsilon=epsilon, delta=delta)
    require(delta < 1, f"delta must be below 1; got {delta}")

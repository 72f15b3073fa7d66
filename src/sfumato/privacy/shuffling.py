"""Amplification by shuffling: a second epsilon, against observers of shuffled reports.

Each device randomizes its value on its own, and a trusted shuffler removes the senders. Then a
report hides among the others that could have been sent for the same value: its clones. The
neighbouring relation is replace: one device's value becomes another, the number of devices is
public. The local epsilon still holds against everyone, the shuffler included; the epsilon computed
here is stated beside it and never replaces it.

Both functions give upper bounds for every randomizer of this local epsilon. The numerical one is
several times smaller; the closed form is for reading and for checking.
"""

from __future__ import annotations

import math

import numpy as np

from sfumato.arrays import F64, I64
from sfumato.errors import SpecError

_PRECISION = 1e-6  # of a numerical epsilon, relative; it is rounded up
_TAIL = 1e-6  # of delta: set aside for there being very few clones
BLOCKS = 4096  # numbers of clones that are evaluated; others are rounded down to one of them
_FLOAT = 1e-14  # relative error of a few float operations, and more
_BINOMIAL = 1e-9  # the same for a binomial probability from scipy; a test finds less than a tenth
_UNDERFLOW = 1e-290  # bound on the sum of all terms that are too small for a float
_LARGEST_COUNT = 10**9  # more devices hide no worse, and binomials were compared up to here
_LARGEST_EPSILON = 100.0  # above, nobody has a clone


def shuffled_epsilon(local_epsilon: float, count: int, delta: float) -> float:
    """The epsilon, at this delta, of the shuffled reports of `count` devices: an upper bound.

    Claim: if each of `count` devices sends one report through the same randomizer, which is
        local_epsilon-DP, then the reports without their order are (epsilon, delta)-DP, neighbours
        differing in one device's value. Never above local_epsilon; rounded up, never down.
    Proof: docs/proofs/shuffling.md. No randomizer reveals more than one under which each other
        report is, with probability 2/(exp(local_epsilon) + 1), a clone: a fair bit. Its delta is
        summed over the number of clones; terms left out of the sum count in full.
    Assumes: the shuffler is honest and shows reports without order, time or sender; a device
        sends one report; `count` leaves out reports that the observer knows or made; binomial
        probabilities from scipy are right to nine digits (a test compares them).

    >>> f"{shuffled_epsilon(4.0, 100_000, 1e-6):.4f}"
    '0.1182'
    """
    _check(local_epsilon, count, delta)
    clone_rate = 2 * math.exp(-local_epsilon) / (1 + math.exp(-local_epsilon))
    return numerical_epsilon(local_epsilon, count, delta, clone_rate)


def closed_form_epsilon(local_epsilon: float, count: int, delta: float) -> float:
    """The same bound from a formula: easy to read, and several times as large.

    Claim: as for `shuffled_epsilon`. The formula holds for
        local_epsilon ≤ ln(count/(16·ln(2/delta))); beyond, and where the formula gives more,
        local_epsilon itself is returned.
    Proof: Feldman, McMillan, Talwar 2021 ("Hiding among the clones"), theorem 3.1.
    Assumes: the same about devices and shuffler.

    >>> round(closed_form_epsilon(4.0, 100_000, 1e-8), 2)
    0.59
    """
    _check(local_epsilon, count, delta)
    if delta == 0:
        return local_epsilon
    log_count, log_delta = math.log(count), math.log(delta)
    if local_epsilon > log_count - math.log(16 * (math.log(2) - log_delta)):
        return local_epsilon
    inverse = math.exp(local_epsilon - log_count)  # of the number of clones, about
    root = math.sqrt(inverse * (math.log(4) - log_delta))
    bound = math.log1p(math.tanh(local_epsilon / 2) * (8 * root + 8 * inverse))
    return min(local_epsilon, bound * (1 + _FLOAT))


def _check(local_epsilon: float, count: int, delta: float) -> None:
    if not 0 < local_epsilon < math.inf:
        raise SpecError(f"local_epsilon must be above 0 and finite; got {local_epsilon}")
    if not count >= 1 or count % 1:
        raise SpecError(f"count must be a whole number of at least 1; got {count}")
    if not 0 <= delta < 1:
        raise SpecError(f"delta must be at least 0 and below 1; got {delta}")


def numerical_epsilon(local_epsilon: float, count: int, delta: float, clone_rate: float) -> float:
    """The least epsilon (to a millionth, rounded up) whose delta is small enough for this rate."""
    if delta == 0 or local_epsilon > _LARGEST_EPSILON:
        return local_epsilon
    clones, weights = _numbers_of_clones(int(min(count, _LARGEST_COUNT)) - 1, clone_rate, delta)

    def enough(epsilon: float) -> bool:
        lost = float(weights @ _delta_given(clones, local_epsilon, epsilon))
        return lost * (1 + 2 * _BINOMIAL) + _TAIL * delta + _UNDERFLOW <= delta * (1 - _FLOAT)

    if enough(0.0):
        return 0.0
    low, high = 0.0, local_epsilon
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if middle in (low, high):  # there is no float between them
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _numbers_of_clones(others: int, clone_rate: float, delta: float) -> tuple[I64, F64]:
    """Possible numbers of clones among the others, and their probabilities.

    Each number stands for all up to the next, the last for all above: more clones hide no worse.
    The probability of fewer clones than the first is at most _TAIL·delta.
    """
    from scipy import stats

    rate = clone_rate * (1 - _FLOAT)
    mean, exponent = others * rate, -math.log(_TAIL) - math.log(delta)
    reach = math.sqrt(2 * mean * exponent)  # Chernoff: P(C ≤ mean − reach) ≤ exp(−exponent)
    first = max(math.floor(mean - reach), 0)
    last = min(math.ceil(mean + reach + exponent), others)
    numbers = np.arange(first, last + 1)
    masses = stats.binom.pmf(numbers, others, rate)
    masses[-1] = stats.binom.sf(last - 1, others, rate)
    starts = np.arange(0, numbers.size, math.ceil(numbers.size / BLOCKS))
    return numbers[starts], np.add.reduceat(masses, starts)


def _delta_given(clones: I64, local_epsilon: float, epsilon: float) -> F64:
    """The delta of a bit among this many clones at this epsilon, rounded up; one per number.

    The bit is 0 with probability t = e^e0/(e^e0 + 1) under one hypothesis and 1 − t under the
    other; clones are fair. With c clones, the best test asks whether more than m = ⌊share·(c + 1)⌋
    of all bits are 0 (docs/proofs/shuffling.md); with B ~ Bin(c, ½) it gains
        (t − e^e·(1 − t))·P(B = m) − (e^e − 1)·P(B > m)
    A float may miss m by one: it is rounded down, m + 1 is tried too, and the larger gain is right.
    """
    from scipy import stats

    below = -math.expm1(-local_epsilon)
    gain = -math.expm1(epsilon - local_epsilon) / (1 + math.exp(-local_epsilon))
    loss = math.expm1(epsilon)
    share = (loss + below) / ((1 + math.exp(epsilon)) * below)
    least = np.floor(share * (1 - _FLOAT) * (clones + 1))
    gains = [
        gain * (1 + 2 * _BINOMIAL) * stats.binom.pmf(zeros, clones, 0.5)
        - loss * (1 - 2 * _BINOMIAL) * stats.binom.sf(zeros, clones, 0.5)
        for zeros in (least, least + 1)
    ]
    return np.asarray(np.maximum(*gains))

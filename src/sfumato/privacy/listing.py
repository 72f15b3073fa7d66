"""Private lists of names from an open domain: only names that enough devices hold are released.

A decoded table shows every name in it, even one that a single device holds. The list that leaves
the decoder is made differentially private: devices send a sample (`rate`), counts may get noise,
and names below a threshold are not released. docs/proofs/listing.md has the proofs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sfumato.arrays import F64, I64, Bool
from sfumato.errors import ImpossibleError
from sfumato.privacy import samplers
from sfumato.privacy.accounting import (
    AdditiveLoss,
    ApproximateLoss,
    Loss,
    NoPrivacy,
    calibrate,
    delta_of,
)
from sfumato.privacy.intervals import NoiseLaw
from sfumato.privacy.noise import AtRelease, Contribution
from sfumato.privacy.noise_kinds import NOISES
from sfumato.privacy.samplers import Rng, log_mass
from sfumato.privacy.sampling import count_heads
from sfumato.spec import later, require, spec

ListNoise = Literal["none", "laplace", "gaussian"]

DETECTION_SHARE = 0.95  # chance that an item with the detectable count is listed
_SLACK = 1e-9  # relative rounding error of a claim that is computed again


@spec("listed_above")
class ListedAbove(AtRelease):
    """List the names whose count in a sample, with noise, reaches `threshold`; release no others.

    Each device tosses a coin for each of its items, which takes part with probability `rate`. The
    sum goes to the decoder, which is trusted with it, counts the items of the sample, adds `noise`
    to each count and lists those that reach the threshold.

    Claim: the list is (epsilon, delta)-DP; neighbours differ by one device's items, at most
        `items_per_device` different ones, becoming none; if `copies` count, at most so many items
        and copies of them together. `unlisted` is the part of delta for a
        table that cannot be listed completely; nothing is released from such a table.
    Proof: docs/proofs/listing.md. Without noise, the coins are the noise (Bharadwaj and Cormode
        2022): delta by enumeration, `sampled_delta`. With it, names held by others are protected
        by the noise, names held by nobody else by the threshold; and if `amplified`, by the coins.
    Assumes: the decoder is trusted; it lists the whole sample or nothing; rates were fixed before
        the devices answered, if privacy relies on the coins (noise "none", or `amplified`).
    Utility: count / rate is unbiased before the threshold; its variance for an item that c devices
        hold is c·(1/rate − 1) + (noise's variance)/rate².
    """

    rate: float
    noise: ListNoise
    scale: float  # of the noise; 0 if there is none
    threshold: int
    items_per_device: int = 1
    amplified: bool = True
    epsilon: float | None  # None: no promise
    delta: float
    unlisted: float = 0.0
    statistic: float = 0.0
    """Part of epsilon for releasing the number of different items, with Laplace noise."""
    copies: bool = later(False)  # whether a device may count several times for an item

    def check(self) -> None:
        require(0 < self.rate <= 1, f"rate must be above 0, at most 1; got {self.rate}")
        require.at_least(1, threshold=self.threshold)
        require(
            (self.scale > 0) == (self.noise != "none"),
            f"scale must be above 0 with noise and 0 without; got {self.noise}, {self.scale}",
        )
        if self.epsilon is None:
            return
        require(
            not self.copies or (self.noise == "laplace" and (self.rate == 1 or not self.amplified)),
            "a list that counts copies must have Laplace noise, and must not use amplification by "
            f"sampling; got noise {self.noise} at rate {self.rate}",
        )
        require(
            0 <= self.statistic < self.epsilon,
            f"statistic must be at least 0 and below epsilon; got {self.statistic}",
        )
        spent = self.unlisted + _delta(
            self.noise, self.scale, self.rate if self.amplified else 1.0, self.threshold,
            self.items_per_device, self.epsilon - self.statistic, self.copies,
        )  # fmt: skip
        require(
            spent <= self.delta * (1 + _SLACK),
            f"this list costs a delta of {spent:.3g} at epsilon {self.epsilon}; "
            f"it may cost {self.delta:.3g}",
        )

    @property
    def noise_title(self) -> str:
        """The name of the noise for people."""
        return "no" if self.noise == "none" else NOISES[self.noise].title

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        """The sum as it is, for the decoder only."""
        return total

    def loss(self, contribution: Contribution) -> Loss:
        if self.epsilon is None:
            return NoPrivacy()
        return ApproximateLoss(epsilon=self.epsilon, delta=self.delta)

    def stddev(self, count: int) -> float:
        return 0.0  # of the table's cells

    def law(self, count: int) -> NoiseLaw:
        return NoiseLaw.none()  # on the table's cells

    @property
    def list_law(self) -> NoiseLaw:
        """The distribution of the noise on a count of the list."""
        return NoiseLaw.none() if self.noise == "none" else NoiseLaw.of(self.noise, self.scale)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on a count of the list."""
        return _stddev(self.noise, self.scale)

    @property
    def most_per_item(self) -> int:
        """The most by which one device moves the count of one item."""
        return self.items_per_device if self.copies else 1

    def sample(self, values: Any, weights: I64 | None, *, rng: Rng) -> tuple[Any, I64 | None]:
        """The values that take part, of rows that `weights` devices (one each if None) hold."""
        if self.rate == 1:
            return values, weights
        counts = count_heads(len(values) if weights is None else weights, self.rate, rng)
        rows = np.flatnonzero(counts)
        plain = isinstance(values, np.ndarray | Sequence)  # otherwise an Arrow column
        sampled = np.asarray(values)[rows] if plain else values.take(rows)
        return sampled, None if weights is None else counts[rows]

    def release(self, counts: I64, *, rng: Rng) -> tuple[I64, Bool]:
        """Counts in the sample with their noise, and which of them may be released."""
        noised = counts
        if self.noise == "laplace":
            noised = counts + samplers.discrete_laplace(self.scale, counts.shape, rng)
        elif self.noise == "gaussian":
            noised = counts + samplers.discrete_gaussian(self.scale, counts.shape, rng)
        return noised, noised >= self.threshold

    def chance(self, count: int, least: float = 0.0, *, answering: float = 1.0) -> float:
        """The probability that an item of `count` devices is listed, with an estimate of at least
        `least` over the devices that answer; each answers with probability `answering`. Of copies
        each device has as many as it may send: then their number varies most."""
        threshold = max(self.threshold, math.ceil(least * self.rate - 1e-9))
        each = self.most_per_item
        return _chance(self.noise, self.scale, self.rate, answering, each, threshold, count)

    def detectable(
        self, least: float = 0.0, share: float = DETECTION_SHARE, *, answering: float = 1.0
    ) -> int:
        """The smallest count that is listed with a probability of at least `share`."""

        def chance(count: int) -> float:
            return self.chance(count, least, answering=answering)

        high = 1
        while chance(high) < share:
            high *= 2
        return bisect_left(range(high), share, key=chance)

    def thin(self, counts: I64, rate: float, *, rng: Rng) -> I64:
        """Thin the counts of a sample taken at a higher `rate` to the rate of this list."""
        return counts if rate == self.rate else count_heads(counts, self.rate / rate, rng)


def lists(
    rate: float,
    *,
    items_per_device: int = 1,
    epsilon: float,
    delta: float,
    unlisted: float = 0.0,
    statistic: float = 0.0,
    amplified: bool = True,
    copies: bool = False,
) -> list[ListedAbove]:
    """All kinds of list at this rate that keep the promise, each with its least threshold. Copies
    of an item need Laplace noise: it is made for a bound on their total, and a Gaussian for the
    same total, all on one item, is wider."""
    options = []
    kinds: tuple[ListNoise, ...] = ("laplace",) if copies else ("none", "laplace", "gaussian")
    amplified = amplified and not copies
    for noise in kinds:
        amplification = rate if amplified else 1.0
        parameters = least_threshold(
            noise, amplification, items_per_device, epsilon - statistic, delta - unlisted, copies
        )
        if parameters is not None:
            scale, threshold = parameters
            options.append(
                ListedAbove(
                    rate=rate,
                    noise=noise,
                    scale=scale,
                    threshold=threshold,
                    items_per_device=items_per_device,
                    amplified=amplified,
                    epsilon=epsilon,
                    delta=delta,
                    unlisted=unlisted,
                    statistic=statistic,
                    copies=copies,
                )
            )
    if not options:
        raise ImpossibleError(
            f"no list of names is ({epsilon:g}, {delta:g})-private: delta must be above 0",
            hint="set delta to a tenth of one over the number of devices",
        )
    return options


def best_list(
    rate: float, *, threshold: float = 0.0, answering: float = 1.0, **promise: Any
) -> ListedAbove:
    """The list at this rate with the smallest detectable count, if items that fewer than
    `threshold` devices hold are left out, and each device answers with probability `answering`.
    A list that finds all other items is preferred."""
    options = lists(rate, **promise)

    def found_from(option: ListedAbove) -> int:
        return option.detectable(answering=answering)

    able = [option for option in options if not threshold or found_from(option) <= threshold]
    if not able:
        return min(options, key=found_from)
    least = threshold * answering
    return min(able, key=lambda option: option.detectable(least, answering=answering))


def sampled_delta(rate: float, threshold: int, epsilon: float) -> float:
    """The exact delta of releasing the counts of a sample that reach `threshold`, if each device
    has one item.

    The largest over true counts k of the hockey-stick divergence of Bin(k + 1, rate) from Bin(k,
    rate), where all values below the threshold are one outcome; the other direction costs nothing
    if epsilon is at least −log(1 − rate). Enumerated up to 6·threshold/rate; beyond, the divergence
    is at most a binomial tail, which falls with k (Chernoff).

    >>> f"{sampled_delta(0.1, 8, 1.0):.2g}"
    '2.3e-07'
    """
    if rate >= 1 or epsilon < -math.log1p(-rate):
        return 1.0
    return _sampled_delta(rate, threshold, epsilon)


@lru_cache(maxsize=4096)
def _sampled_delta(rate: float, threshold: int, epsilon: float) -> float:
    from scipy import stats

    most = math.ceil(6 * threshold / rate)
    worst, factor = 0.0, math.exp(epsilon)
    high = 6 * threshold + 12 * math.ceil(math.sqrt(6 * threshold)) + 60  # all but 1e-20
    values = np.arange(threshold, min(high, most + 1) + 1)
    for start in range(0, most + 1, 256):
        k = np.arange(start, min(start + 256, most + 1))[:, None]
        with_one, without = stats.binom(k + 1, rate), stats.binom(k, rate)
        more = with_one.pmf(values) - factor * without.pmf(values)
        below = with_one.cdf(threshold - 1) - factor * without.cdf(threshold - 1)
        beyond = with_one.sf(values[-1])  # counted in full
        divergences = np.maximum(more, 0).sum(axis=1) + (np.maximum(below, 0) + beyond)[:, 0]
        worst = max(worst, float(divergences.max()))
    # P(k+1; j) > e^epsilon·P(k; j) only for j above (k + 1)·share, and share exceeds the rate.
    share = 1 - (1 - rate) * math.exp(-epsilon)
    distance = share * math.log(share / rate) + (1 - share) * math.log((1 - share) / (1 - rate))
    return max(worst, math.exp(-(most + 2) * distance))


@lru_cache(maxsize=4096)
def _delta(
    noise: ListNoise,
    scale: float,
    rate: float,
    threshold: int,
    items: int,
    epsilon: float,
    copies: bool = False,
) -> float:
    """The delta of a list at this epsilon."""
    if copies:  # a device's own items: all different, or all the same
        if items / scale > epsilon * (1 + _SLACK) or threshold <= items:
            return 1.0
        return max(
            items * noise_tail(noise, scale, threshold - 1),
            noise_tail(noise, scale, threshold - items),
        )
    if noise == "none":
        return items * sampled_delta(rate, threshold, epsilon / items)
    if noise == "laplace":  # item by item: each is a release of its own
        allowed = _unsampled(rate, epsilon / items)
        if 1 / scale > allowed * (1 + _SLACK):
            return 1.0
        return items * rate * noise_tail(noise, scale, threshold - 1)
    if items > 1:
        rate = 1.0  # no amplification for several items of one device
    return rate * (
        _gaussian_delta(scale, items, _unsampled(rate, epsilon))
        + items * noise_tail(noise, scale, threshold - 1)
    )


def least_threshold(
    noise: ListNoise,
    rate: float,
    items: int,
    epsilon: float,
    delta: float,
    copies: bool = False,
) -> tuple[float, int] | None:
    """The scale and the least threshold that keep a promise, if there are any."""
    if delta <= 0:
        return None
    scale = 0.0
    if noise == "none" and (rate >= 1 or epsilon / items < -math.log1p(-rate)):
        return None
    if noise == "laplace":
        scale = math.nextafter(1 / _unsampled(rate, epsilon / items), math.inf)
    if noise == "gaussian":
        amplification = rate if items == 1 else 1.0
        scale = calibrate(
            "gaussian", l1=float(items), l2=math.sqrt(items), unit_cells=items,
            epsilon=_unsampled(amplification, epsilon), delta=min(delta / (2 * amplification), 0.5),
        )  # fmt: skip

    def keeps(threshold: int) -> bool:
        return _delta(noise, scale, rate, threshold, items, epsilon, copies) <= delta

    high = 2
    while not keeps(high):
        high *= 2
        if high > 1 << 40:
            return None
    return scale, bisect_left(range(high), True, lo=2, key=keeps)


def _unsampled(rate: float, epsilon: float) -> float:
    """The epsilon of a mechanism that has this epsilon when applied to a sample of this rate."""
    return math.log1p(math.expm1(epsilon) / rate)


def _gaussian_delta(scale: float, items: int, epsilon: float) -> float:
    return delta_of(
        AdditiveLoss(
            noise="gaussian", scale=scale, l1=float(items), l2=math.sqrt(items), unit_cells=items
        ),
        epsilon,
    )


@lru_cache(maxsize=256)
def _mass(noise: ListNoise, scale: float) -> tuple[int, F64]:
    if noise == "none":
        return 0, np.ones(1)
    first, logs = log_mass(noise, scale)
    return first, np.exp(logs)


def _stddev(noise: ListNoise, scale: float) -> float:
    first, mass = _mass(noise, scale)
    return float(np.sqrt(((first + np.arange(mass.size)) ** 2 * mass).sum()))


def noise_tail(noise: ListNoise, scale: float, least: int) -> float:
    """P[noise ≥ least], for a least of 1 or more; never too small."""
    if noise == "laplace":
        return math.exp(-least / scale) / (1 + math.exp(-1 / scale))
    # A discrete Gaussian's tail: its first term, and ratios that only fall.
    first = math.exp(-(least**2) / (2 * scale**2))
    ratio = math.exp(-(2 * least + 1) / (2 * scale**2))
    normal = max(math.sqrt(2 * math.pi) * scale, 1.0)  # at most the sum over all whole numbers
    return min(1.0, first / (1 - ratio) / normal)


@lru_cache(maxsize=1 << 14)
def _chance(
    noise: ListNoise,
    scale: float,
    rate: float,
    answering: float,
    each: int,
    threshold: int,
    count: int,
) -> float:
    """The chance that an item is listed, of whose `count` copies every device has `each`."""
    first, mass = _mass(noise, scale)
    over = np.cumsum(mass[::-1])[::-1]  # P[noise ≥ first + k]

    def reached(sampled: I64) -> F64:
        needed = threshold - sampled - first
        inside = over[np.clip(needed, 0, over.size - 1)]
        return np.where(needed <= 0, 1.0, np.where(needed < over.size, inside, 0.0))

    if each == 1 or answering == 1:  # one coin for both, or none for answering
        sampled, weight = _heads(count, rate * answering)
        return float(weight @ reached(sampled))
    holders, left = divmod(count, each)
    devices, weight = _heads(holders, answering)
    chance = np.zeros(devices.size)
    for extra, share in ((0, 1 - answering), (left, answering)):  # the last device has fewer
        for place, copies in enumerate((each * devices + extra).tolist()):
            sampled, sample_weight = _heads(copies, rate)
            chance[place] += share * float(sample_weight @ reached(sampled))
    return float(weight @ chance)


def _heads(count: int, rate: float) -> tuple[I64, F64]:
    """How many of `count` coins show heads, and with what probability: all but 2**-60 of it."""
    from scipy import stats

    if rate == 1:
        return np.array([count]), np.ones(1)
    heads = np.arange(count + 1)
    if count >= 4096:
        middle, wide = count * rate, 10 * math.sqrt(count * rate * (1 - rate)) + 50
        heads = np.arange(max(0, int(middle - wide)), min(count, int(middle + wide)) + 1)
    return heads, np.asarray(stats.binom.pmf(heads, count, rate))


def without_promise(rate: float, items_per_device: int = 1, *, copies: bool = False) -> ListedAbove:
    """A sample that may be released as a whole."""
    return ListedAbove(
        rate=rate, noise="none", scale=0.0, threshold=1, items_per_device=items_per_device,
        epsilon=None, delta=0.0, copies=copies,
    )  # fmt: skip

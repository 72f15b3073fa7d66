"""95% intervals for counts that were noised, sampled and perhaps listed only above a threshold.

Each possible truth accepts the likeliest observations that together have a probability of 95%; an
interval holds every truth that accepts the observation (Sterne 1954). So it covers the truth with a
probability of at least 95%, whatever the truth is. Noise is on whole numbers, and coarse if epsilon
is large: the exact laws are used, since normal ones would cover 70% in places. Where a law is so
wide that its steps do not matter, a normal law of the same variance takes its place; its variance
is taken at each candidate (a score interval), not at the estimate.

Counts that are shown only from a threshold on are biased upwards by selection. Given `above`, the
laws are conditional on reaching the threshold.

Claim: P(low ≤ truth ≤ high) ≥ 0.95 for every truth that is shown with a probability above 1e-9,
    given that it is shown, where the law is exact; elsewhere up to the error of a normal
    approximation at a deviation of ten or more.
Proof: docs/proofs/intervals.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64
from sfumato.privacy.noise_kinds import Noise
from sfumato.privacy.samplers import log_mass

Law = Callable[[I64], tuple[I64, F64]]
"""For each possible truth (n,): the first value, (n,), and the probabilities from there on."""

CONFIDENCE = 0.95
NORMAL_95 = 1.959964  # a normal variable is within this many deviations 95% of the time
_WIDE = 100.0  # variance from which a law on whole numbers is treated as normal
_WIDE_TRUNCATED = 1e4  # the same where a threshold truncates it
_REACH = 9.0  # deviations beyond which a law is negligible
_ROWS = 2048  # laws that are computed together
_HALVINGS = 60  # steps of the bisection for a bound
_ROUNDING = 1e-12  # error of a sum of probabilities
_CERTAIN = 1 - 1e-4  # chance from which an item is taken to be always shown
_UNSEEN = 1e-9  # chance up to which an item is taken to be never shown: floats hide its law


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NoiseLaw:
    """The distribution of symmetric noise on whole numbers: of −reach, …, 0, …, reach.

    >>> coin = NoiseLaw(np.array([0.25, 0.5, 0.25]))
    >>> (coin + coin).at_least(np.array([2, 1, -2])).round(9).tolist()
    [0.0625, 0.3125, 1.0]
    >>> coin.width(0.9), coin.exceeded(0.3)
    (1, 1)
    """

    mass: F64

    @classmethod
    def none(cls) -> NoiseLaw:
        return cls(np.ones(1))

    @classmethod
    def of(cls, kind: Noise, scale: float) -> NoiseLaw:
        _, logs = log_mass(kind, scale)
        return cls(np.exp(logs))

    def __add__(self, other: NoiseLaw) -> NoiseLaw:
        """The law of the sum of two independent noises."""
        if self.mass.size == 1 or other.mass.size == 1:
            return self if other.mass.size == 1 else other
        from scipy import signal

        mass = np.maximum(signal.fftconvolve(self.mass, other.mass), 0.0)
        reliable = np.flatnonzero(mass > 1e-18)  # less is rounding error of the convolution
        edge = min(int(reliable[0]), mass.size - 1 - int(reliable[-1]))
        return NoiseLaw(mass[edge : mass.size - edge])

    @property
    def reach(self) -> int:
        return self.mass.size // 2

    @property
    def variance(self) -> float:
        values = np.arange(-self.reach, self.reach + 1, dtype=np.float64)
        return float(values**2 @ self.mass)

    def at_least(self, values: npt.NDArray[Any]) -> F64:
        """P(noise ≥ value) for each value."""
        tails = np.append(np.cumsum(self.mass[::-1])[::-1], 0.0)
        places = np.clip(np.asarray(values, dtype=np.int64) + self.reach, 0, tails.size - 1)
        return np.asarray(np.minimum(tails[places], 1.0))

    def exceeded(self, chance: float) -> int:
        """The least value that is reached with at most this chance."""
        tails = np.cumsum(self.mass[::-1])  # P(noise ≥ reach), P(noise ≥ reach − 1), …
        return self.reach + 1 - int(np.searchsorted(tails, chance, side="right"))

    def width(self, confidence: float = CONFIDENCE) -> int:
        """The least q with P(|noise| ≤ q) ≥ confidence."""
        return self.exceeded((1 - confidence) / 2) - 1


def of_sums(
    sums: I64,
    noise: NoiseLaw,
    *,
    devices: int,
    respondents: int,
    rate: float = 1.0,
    per_device: int = 1,
    above: int | None = None,
) -> tuple[F64, F64]:
    """Bounds on how many of `devices` devices hold each item, from sums over `respondents` of them.

    `sums` are whole numbers: the holders among the respondents, each counted with probability
    `rate`, plus noise. A device may count up to `per_device` times for one item. `above` is the
    least sum that is shown.
    """
    values, places = np.unique(sums, return_inverse=True)
    x, share, width = values.astype(np.float64), respondents / devices * rate, noise.width()
    sampling = _Sampling(
        devices=devices, share=share, fixed=rate == 1 and per_device == 1, per_device=per_device
    )
    plain = (x - width, x + width) if share == 1 else _score(x, width / NORMAL_95, sampling)
    likely = np.clip(x / share, 0, devices)
    variance = noise.variance + sampling.variance(likely)
    low, high = _by_law(
        values,
        plain,
        _sampled_law(noise, devices, respondents, rate) if per_device == 1 or share == 1 else None,
        likely=likely,
        reach=(8 * np.sqrt(variance) + 20) / share + noise.width(1 - 1e-6),
        variance=np.where(share == 1, np.inf, variance),  # then `plain` is exact
        variance_near=variance,
        devices=devices,
        above=above,
        score_at=lambda at: _truncated_score(
            x[at], width / NORMAL_95, sampling, above or 0, step=1.0
        ),
    )
    # No truth is below zero, but the noise can be: a bound of zero would hide it.
    low = np.where((low <= 0) & (share < 1), np.minimum((x - width) / share, 0.0), low)
    return low[places], high[places]


def of_support(
    support: I64,
    *,
    truth: float,
    lie: float,
    devices: int,
    respondents: int,
    above: int | None = None,
) -> tuple[F64, F64]:
    """Bounds on how many of `devices` devices hold each item, from how many of `respondents`
    records support it: a holder's with probability `truth`, any other with probability `lie`."""
    values, places = np.unique(support, return_inverse=True)
    share, gain = respondents / devices, truth - lie
    estimates: F64 = (values.astype(np.float64) - lie * respondents) / gain
    likely = np.clip(estimates / share, 0, devices)
    variance = _support_variance(likely, truth, lie, devices, respondents)
    sampling = _Sampling(
        devices=devices,
        share=share,
        fixed=True,
        per_device=1,
        slope=(truth * (1 - truth) - lie * (1 - lie)) / gain**2,
    )
    error, least = math.sqrt(respondents * lie * (1 - lie)) / gain, (above or 0) - lie * respondents
    low, high = _by_law(
        values,
        _score(estimates, error, sampling),
        _support_law(truth, lie, devices, respondents),
        likely=likely,
        reach=(8 * np.sqrt(variance) + 20) / gain / share,
        variance=variance,
        variance_near=variance,
        devices=devices,
        above=above,
        score_at=lambda at: _truncated_score(
            estimates[at], error, sampling, least / gain, step=1 / gain
        ),
    )
    low = np.where(low <= 0, np.minimum(estimates / share, 0.0), low)
    return low[places], np.maximum(high, 0.0)[places]


def of_estimates(
    counts: F64,
    error: F64 | float,
    *,
    devices: int,
    respondents: int,
    rate: float = 1.0,
    per_device: int = 1,
    above: float | None = None,
) -> tuple[F64, F64]:
    """Bounds on how many of `devices` devices hold each item, from estimates over `respondents`
    with normal errors of deviation `error`. They may come from a sample: `rate` is a holder's
    chance to be in it."""
    sampling = _Sampling(
        devices=devices,
        share=respondents / devices * rate,
        fixed=rate == 1 and per_device == 1,
        per_device=per_device,
    )
    x, deviation = counts * rate, np.broadcast_to(np.asarray(error) * rate, counts.shape)
    if above is None:
        return _score(x, deviation, sampling)
    return _truncated_score(x, deviation, sampling, above * rate, step=0.0)


def of_votes(
    sampled: I64,
    *,
    devices: int,
    respondents: int,
    rate: float,
    repetitions: int,
    needed: int,
) -> tuple[F64, F64]:
    """Bounds on how many of `devices` devices hold each item, from how often `respondents` of them
    were in samples: `repetitions` samples, in each of which a holder is with probability `rate`,
    given that at least `needed` samples have a holder.

    The exact law of the sum given the votes, where an item might have been shown by chance or its
    law is narrow; a score interval for items that are too common for that. If 1/`rate` is more than
    64, every 1/(32·rate)-th truth is tried, and bounds are moved outwards by as much.
    """
    from scipy import stats

    share, total = respondents / devices, repetitions * rate

    def chance(answering: float) -> float:
        one = -math.expm1(answering * math.log1p(-rate))
        return float(stats.binom.sf(needed - 1, repetitions, one))

    missing = repetitions * rate * (1 - share)  # devices are missing from every repetition
    per_device = math.ceil((1 - rate + missing) / (1 - share * rate)) if share < 1 else 1
    low, high = of_estimates(
        sampled / rate,
        0.0,
        devices=repetitions * devices,
        respondents=repetitions * respondents,
        rate=rate,
        per_device=per_device,
        above=needed / rate,
    )
    low, high = low / repetitions, high / repetitions
    sure = 1.0 / rate
    while chance(sure) < _CERTAIN:
        sure *= 1.1
    sure = max(sure, _WIDE / (total * (1 - rate)))
    spread = math.sqrt(total * sure * (1 + total * (1 - share)))
    values, places = np.unique(sampled, return_inverse=True)
    near = values[values <= total * sure + 8 * spread + 20]
    if near.size:
        likely = float(near[-1]) / total
        deviation = math.sqrt(likely / total * (1 + total * (1 - share)))
        most = min((likely + 8 * deviation + 20 / total) / share, devices)
        step = max(1, math.floor(1 / (32 * rate)))
        law = _voted_law(devices, respondents, rate, repetitions, needed, most=most, step=step)
        ends = np.full(near.size, math.ceil(most / step))
        least, greatest = _accepting_truths(
            near, law, np.zeros(near.size), ends, devices // step + 1, None
        )
        for bounds, exact in (
            (low, least * step - (step - 1)),
            (high, np.minimum(greatest * step + (step - 1), devices)),
        ):
            has_exact = (places < near.size) & ~np.isnan(np.append(exact, np.nan))[
                np.minimum(places, near.size)
            ]
            bounds[has_exact] = exact[places[has_exact]]
    return low, high


def _voted_law(
    devices: int,
    respondents: int,
    rate: float,
    repetitions: int,
    needed: int,
    *,
    most: float,
    step: int,
) -> Law:
    """The law of how often holders are in all samples, given that enough samples have one; of every
    `step`-th number of holders.

    A sample's generating function is (1 − rate + rate·z)^a for a holders that answer, and without
    the chance that it has none, q, in a vote: so the sum given v votes has C(b, v)·q^(b − v)·(g −
    q)^v, whose coefficients a Fourier transform gives.
    """
    from scipy import special

    share = respondents / devices
    answering = np.arange(0, math.ceil(most / step) + 1) * float(step)
    mean = repetitions * rate * answering[-1]
    size = 1 << math.ceil(math.log2(mean + 10 * math.sqrt(mean) + 40))
    roots = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
    generating = (1 - rate + rate * roots) ** answering[:, None]
    none = (1 - rate) ** answering[:, None]
    transform = np.zeros_like(generating)
    power = (generating - none) ** needed
    for votes in range(needed, repetitions + 1):
        transform += special.comb(repetitions, votes) * none ** (repetitions - votes) * power
        power *= generating - none
    masses = np.maximum(np.fft.irfft(transform, n=size, axis=1), 0.0)

    def weights(holders: I64) -> F64:
        """How likely each number of answers is; with steps, a normal law will do."""
        if step == 1:
            return _hypergeometric(answering.astype(np.int64), holders, devices, respondents)
        spread = np.sqrt(holders * (1 - holders / devices) * share * (1 - share)) + 1e-9
        edges = special.ndtr((answering + step / 2 - holders * share) / spread)
        return np.diff(edges, axis=1, prepend=0.0)

    def law(numbers: I64) -> tuple[I64, F64]:
        holders = np.minimum(numbers * step, devices)
        if share == 1:
            mass = masses[np.minimum(numbers, answering.size - 1)]
        else:
            mass = weights(holders[:, None]) @ masses
        total = mass.sum(axis=1, keepdims=True)
        mass = np.divide(mass, total, out=np.zeros_like(mass), where=total > _UNSEEN)
        return np.zeros(numbers.size, dtype=np.int64), mass

    return law


def _by_law(
    values: I64,
    plain: tuple[F64, F64],
    law: Law | None,
    *,
    likely: F64,
    reach: F64,
    variance: F64,
    variance_near: F64,
    devices: int,
    above: int | None,
    score_at: Callable[[I64], tuple[F64, F64]],
) -> tuple[F64, F64]:
    """Bounds by the exact law where it is narrow, and up to a larger variance near `above`."""
    low, high = plain
    near = np.zeros(values.size, dtype=np.bool_)
    if above is not None:  # a count far above it is shown with certainty
        near = values <= above + 8 * np.sqrt(variance_near) + 20
    wide = near & (variance_near >= _WIDE_TRUNCATED) if law is not None else near
    narrow = (variance < _WIDE) if law is not None else np.zeros(values.size, dtype=np.bool_)
    for mask, least, limit in (
        (~near & narrow, likely - reach, None),
        (near & ~wide, np.zeros(values.size), above),
    ):
        at = np.flatnonzero(mask)
        if law is None or not at.size:
            continue
        bounds = _accepting_truths(
            values[at], law, least[at], likely[at] + reach[at], devices, limit
        )
        low[at] = np.where(np.isnan(bounds[0]), low[at], bounds[0])
        high[at] = np.where(np.isnan(bounds[1]), high[at], bounds[1])
    at = np.flatnonzero(wide)
    if at.size:
        low[at], high[at] = score_at(at)
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling:
    """How the number of counted holders varies: by which devices respond, and by coins."""

    devices: int
    share: float  # of all holders, the part that is counted on average
    fixed: bool  # whether the number of respondents is fixed, each counted at most once
    per_device: int
    slope: float = 0.0  # variance that a counted holder adds by its own coins

    @property
    def linear(self) -> float:
        grown = self.devices / max(self.devices - 1, 1) if self.fixed else 1.0
        return self.share * (self.per_device * (1 - self.share) * grown + self.slope)

    @property
    def square(self) -> float:
        return self.share * (1 - self.share) / max(self.devices - 1, 1) if self.fixed else 0.0

    def variance(self, holders: F64) -> F64:
        return np.maximum(self.linear * holders - self.square * holders**2, 0.0)


def _score(x: F64, error: F64 | float, sampling: _Sampling) -> tuple[F64, F64]:
    """Every c with |x − c·share| within 1.96 deviations, the deviation being that at c."""
    share, edge = sampling.share, NORMAL_95 * np.asarray(error)
    a = share**2 + NORMAL_95**2 * sampling.square
    b = 2 * x * share + NORMAL_95**2 * sampling.linear
    root = np.sqrt(np.maximum(b**2 - 4 * a * (x**2 - edge**2), 0.0))
    return (
        # Below zero there are no holders, so the noise alone varies.
        np.where(x < edge, (x - edge) / share, (b - root) / (2 * a)),
        np.where(x < -edge, (x + edge) / share, (b + root) / (2 * a)),
    )


def _truncated_score(
    x: F64, error: F64 | float, sampling: _Sampling, above: float, *, step: float
) -> tuple[F64, F64]:
    """Every c for which a value as far from c·share as x has a chance of more than 5%, given that
    it is shown: that it is at least `above`, or at least x if x was shown for other reasons. Values
    are `step` apart."""
    from scipy import special

    share, edge = sampling.share, np.minimum(above, x) - step / 2

    def chance(c: F64) -> F64:
        deviation = np.sqrt(np.asarray(error) ** 2 + sampling.variance(np.maximum(c, 0.0)))
        deviation = np.maximum(deviation, 1e-9)
        away = np.maximum(np.abs(x - c * share) - step / 2, 0.0) / deviation
        cut = (c * share - edge) / deviation
        far_above = np.exp(np.minimum(special.log_ndtr(-away) - special.log_ndtr(cut), 0.0))
        far_below = np.maximum(special.ndtr(-away) - special.ndtr(-cut), 0.0)
        with np.errstate(invalid="ignore"):  # 0/0 where it is never shown: such a c is refused
            return np.asarray(far_above + far_below / np.exp(special.log_ndtr(cut)))

    middle = x / share
    spread = np.sqrt(np.asarray(error) ** 2 + sampling.variance(np.maximum(middle, 0.0)))
    far = 12 * spread / share + 1
    bounds = []
    for outside in (np.minimum(middle - far, 0.0), middle + far):
        inside = middle.copy()
        for _ in range(_HALVINGS):
            between = (inside + outside) / 2
            accepted = chance(between) > 1 - CONFIDENCE
            inside = np.where(accepted, between, inside)
            outside = np.where(accepted, outside, between)
        bounds.append(inside)
    return bounds[0], bounds[1]


def _accepting_truths(
    x: I64, law: Law, least: F64, most: F64, devices: int, above: int | None
) -> tuple[F64, F64]:
    """The least and the greatest truth within reach that accepts each x; nan where none does."""
    low, high = np.full(x.size, np.nan), np.full(x.size, np.nan)
    starts = np.clip(np.floor(least), 0, devices).astype(np.int64)
    ends = np.clip(np.ceil(most), 0, devices).astype(np.int64)
    for part in _pieces(starts, ends):
        first, mass = law(part)
        values = first[:, None] + np.arange(mass.shape[1])
        if above is not None:
            mass = np.where(values >= above, mass, 0.0)
            visible = mass.sum(axis=1, keepdims=True)
            mass = np.divide(mass, visible, out=np.zeros_like(mass), where=visible > 0)
        order = np.argsort(-mass, axis=1, kind="stable")
        total = np.cumsum(np.take_along_axis(mass, order, axis=1), axis=1)
        needed = (total < CONFIDENCE - _ROUNDING).sum(axis=1, keepdims=True)
        likeliest = np.arange(mass.shape[1]) <= needed
        accepted = np.zeros_like(likeliest)
        np.put_along_axis(accepted, order, likeliest, axis=1)
        places = np.clip(np.searchsorted(x, values), 0, x.size - 1)
        rows, columns = np.nonzero(accepted & (mass > 0) & (x[places] == values))
        at = places[rows, columns]
        np.fmin.at(low, at, part[rows])
        np.fmax.at(high, at, part[rows])
    return low, high


def _pieces(starts: I64, ends: I64) -> list[I64]:
    """All whole numbers in some [start, end], in pieces."""
    order = np.argsort(starts, kind="stable")
    merged: list[list[int]] = []
    for start, end in zip(starts[order].tolist(), ends[order].tolist(), strict=True):
        if merged and start <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    every = np.concatenate([np.arange(start, end + 1) for start, end in merged])
    return [every[k : k + _ROWS] for k in range(0, every.size, _ROWS)]


def _sampled_law(noise: NoiseLaw, devices: int, respondents: int, rate: float) -> Law:
    """The law of the holders among the respondents, by their coins, plus the noise."""
    share = respondents / devices * rate
    edge = noise.width(1 - 1e-15)
    tail = noise.mass[noise.reach - edge : noise.reach + edge + 1]

    def law(holders: I64) -> tuple[I64, F64]:
        if share == 1:
            return holders - edge, np.broadcast_to(tail, (holders.size, tail.size)).copy()
        k = _windowed(holders, share)
        counted = (
            _hypergeometric(k, holders[:, None], devices, respondents)
            if rate == 1
            else _binomial(k, holders[:, None], share)
        )
        return k[:, 0] - edge, _convolved(counted, tail[None, :])

    return law


def _support_law(truth: float, lie: float, devices: int, respondents: int) -> Law:
    """The law of the records that support an item: of its holders, and of others."""

    def law(holders: I64) -> tuple[I64, F64]:
        chance = truth * respondents / devices  # a holder may not have responded
        rest = respondents - np.rint(holders * (respondents / devices)).astype(np.int64)
        own, others = _windowed(holders, chance), _windowed(rest, lie)
        return own[:, 0] + others[:, 0], _convolved(
            _binomial(own, holders[:, None], chance), _binomial(others, rest[:, None], lie)
        )

    return law


def _support_variance(
    holders: F64, truth: float, lie: float, devices: int, respondents: int
) -> F64:
    share = respondents / devices
    return holders * share * truth * (1 - share * truth) + (respondents - holders * share) * lie * (
        1 - lie
    )


def _windowed(count: I64, share: F64 | float) -> I64:
    """For each row, the values that a binomial variable can plausibly take."""
    middle = np.rint(count * share).astype(np.int64)
    widest = float(np.max(count * share * (1 - np.asarray(share)), initial=0.0))
    wide = math.ceil(_REACH * math.sqrt(widest) + 20)
    return np.asarray(middle[:, None] + np.arange(-wide, wide + 1))


def _convolved(first: F64, second: F64) -> F64:
    from scipy import signal

    rows = np.broadcast_to(second, (first.shape[0], second.shape[1]))
    return np.asarray(np.maximum(signal.fftconvolve(first, rows, axes=1), 0.0))


def _binomial(k: I64, n: I64, share: F64 | float) -> F64:
    from scipy import special

    inside = (k >= 0) & (k <= n)
    k = np.where(inside, k, 0)
    log = (
        special.gammaln(n + 1)
        - special.gammaln(k + 1)
        - special.gammaln(n - k + 1)
        + special.xlogy(k, share)
        + special.xlog1py(n - k, -np.asarray(share))
    )
    return np.where(inside, np.exp(log), 0.0)


def _hypergeometric(k: I64, holders: I64, devices: int, respondents: int) -> F64:
    from scipy import special

    inside = (k >= 0) & (k <= holders) & (k <= respondents) & (respondents - k <= devices - holders)
    k = np.where(inside, k, 0)

    def ways(n: Any, j: Any) -> Any:
        return special.gammaln(n + 1) - special.gammaln(j + 1) - special.gammaln(n - j + 1)

    with np.errstate(all="ignore"):  # outside of the law
        log = (
            ways(holders, k) + ways(devices - holders, respondents - k) - ways(devices, respondents)
        )
    return np.where(inside, np.exp(np.where(inside, log, 0.0)), 0.0)

"""Which words a search finds: the chance that a word is listed, by its count, before any record."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64
from sfumato.flow.word_discovery import PASSES, FragmentPuzzle, PrefixExtension
from sfumato.privacy import Randomizer, debias
from sfumato.sketch.absent import coin_limit

Limits: TypeAlias = tuple[F64, F64]
Search: TypeAlias = FragmentPuzzle | PrefixExtension

DETECTABLE = 0.95  # a detectable word is listed with this probability
_FAR = 4.5  # deviations beyond which chances are nothing
_PLACES = 8  # places per deviation at which a chance is computed
_MANY = 1e4  # variance from which binomial tails are approximated, to within 1e-5
_SIZES = 9  # numbers of records of a stage, between which limits are interpolated
_NORMAL = np.array([NormalDist().inv_cdf((k + 0.5) / 6) for k in range(6)])  # in equal shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A test that a word must pass, over the records of a length or position.

    A record supports a word by chance with probability `oracle.support`, and if its device has the
    word, with a larger one. A word passes if enough records support it.
    """

    oracle: Randomizer
    share: float  # of the records
    rate: float  # the chance that a word that nobody has passes
    ranked: bool = False  # whether the limit is the rank of a word, or the bound of `coin_limit`

    @property
    def truth(self) -> float:
        """The chance that the record of a device that has the word supports it."""
        return self.oracle.support + (1 - self.oracle.collision) / self.oracle.reach

    def limit(self, records: int) -> float:
        """The number that must support a word, of so many records of the stage."""
        from scipy import special

        if self.ranked:
            return float(special.bdtrik(1 - self.rate, records, self.oracle.support))
        return coin_limit(records, self.oracle.support, self.rate)

    def height(self, records: float) -> float:
        """The count, over the stage's records, whose estimate is at the limit."""
        mine = max(round(self.share * records), 1)
        gain = (1 - self.oracle.collision) / self.oracle.reach
        return (self.limit(mine) - mine * self.oracle.support) / gain

    def limits(self, records: float) -> Limits:
        """Numbers of records that the stage may get, and how many of them must support a word."""
        mean = self.share * records
        spread = _FAR * math.sqrt(mean * max(1 - self.share, 0.0))
        sizes = np.linspace(max(mean - spread, 1.0), mean + spread, _SIZES)
        return sizes, np.array([self.limit(round(size)) for size in sizes.tolist()])

    def chance(self, count: float, records: float, limits: Limits | None = None) -> float:
        """The chance that a word passes that `count` of the devices behind `records` have, if the
        others' records are independent: no word among them fills cells of its own."""
        from scipy import special

        odds = self.share * self.truth
        mean = count * odds
        spread = _FAR * (math.sqrt(mean) + 1)
        step = max(1, int(math.sqrt(mean) / _PLACES))
        own = np.arange(max(0, math.floor(mean - spread)), min(count, mean + spread) + 1, step)
        log = special.gammaln(count + 1) - special.gammaln(own + 1)
        log += -special.gammaln(count - own + 1) + special.xlogy(own, odds)
        weights = np.exp(log + special.xlog1py(count - own, -odds))
        mine = own + (count - own) * self.share * (1 - self.truth) / (1 - odds)
        rest = max(records - count, 0.0) * self.share
        others = rest + math.sqrt(rest * max(1 - self.share, 0.0)) * _NORMAL[:, None]
        others = np.rint(np.maximum(others, 0.0)).astype(np.int64)
        sizes, needs = self.limits(records) if limits is None else limits
        least = np.floor(np.interp(mine + others, sizes, needs)) + 1 - own
        reached = tail(least, others, self.oracle.support)
        return min(float(reached.mean(axis=0) @ weights / weights.sum()), 1.0)


def tail(least: F64, records: npt.NDArray[Any], support: float) -> F64:
    """The chance that at least `least` of so many records support a word.

    Where the variance v is large, by a normal law with a correction for its skewness (Edgeworth).
    The next terms of that series and of its correction for steps are, with He₁ = x, He₃ = x³ − 3x
    and He₅ = x⁵ − 10x³ + 15x, at most (0.55/24 + 2.31/72 + 0.25/24)/v: below 1e-5.
    """
    from scipy import special

    if records.min() * support * (1 - support) > _MANY:  # much faster
        deviation = np.sqrt(records * support * (1 - support))
        x = (least - 0.5 - records * support) / deviation
        density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        skewness = (1 - 2 * support) / deviation
        return np.asarray(special.ndtr(-x) + skewness / 6 * (x**2 - 1) * density)
    reached = special.bdtrc(np.clip(least - 1, 0, records), records, support)
    return np.where(least <= 0, 1.0, np.where(least > records, 0.0, reached))


def stages(search: Search, answering: float = 1.0) -> list[Stage]:
    """The tests that a word must pass to be listed, if this share of the devices answers."""
    if isinstance(search, PrefixExtension):
        share, last = answering / len(search.lengths), len(search.lengths) - 1
        rates = [search.rate(place) for place in range(last)]
        rates.append(debias.LEVEL / search.candidates(last) / PASSES)
        return [Stage(oracle=search.prefix, share=share, rate=rate) for rate in rates]
    rate = min(search.fragments / search.fragment_keys, 0.5)
    share, listed = answering / search.positions, debias.LEVEL / search.most_candidates
    part = Stage(oracle=search.fragment, share=share, rate=rate, ranked=True)
    whole = Stage(oracle=search.word, share=answering, rate=listed / PASSES)
    return [part] * search.positions + [whole]


def listing_chance(search: Search, count: float, records: float, answering: float = 1.0) -> float:
    """The probability that a word is listed that `count` of the devices behind `records` have."""
    tests = stages(search, answering)
    return _all_passed(Counter(tests), dict.fromkeys(tests), count, records, answering)


@lru_cache(maxsize=256)
def detectable(search: Search, records: float, answering: float = 1.0) -> int:
    """The least count that is listed with a probability of 95%; more than the records if not even a
    word that all of them hold is."""
    times = Counter(reversed(stages(search, answering)))  # the hardest first
    limits = {stage: stage.limits(records) for stage in times}

    def is_found(count: int) -> bool:
        return _all_passed(times, limits, count, records, answering, DETECTABLE) >= DETECTABLE

    most = math.ceil(records) + 1
    low = min(max(0, *(math.floor(stage.height(records)) for stage in times)), most)
    if is_found(low):  # at the limit of a stage it is listed in about half of all searches
        low = 0
    step = max(1, math.isqrt(low))
    while low + step < most and not is_found(low + step):
        low, step = low + step, 2 * step
    return bisect_left(range(most), True, low, min(low + step, most), key=is_found)


def _all_passed(
    times: Counter[Stage],
    limits: Mapping[Stage, Limits | None],
    count: float,
    records: float,
    answering: float,
    least: float = 0.0,
) -> float:
    """The chance that a word passes all stages, or anything below `least` if it is below.

    A device that reports to one stage reports to no other that shares the devices with it. So the
    numbers of a word's devices vary less in sum than if they were independent, which lowers the
    product of the chances p by exp(−count/2·((Σ log p′)² − Σ (log p′)²)), to second order.
    """
    chances = {}
    for stage in times:
        chances[stage] = stage.chance(count, records, limits[stage])
        passed = math.prod(chance ** times[each] for each, chance in chances.items())
        if passed <= least:
            return passed
    more = count + max(1.0, round(math.sqrt(count)))
    slopes = [
        math.log(stage.chance(more, records, limits[stage]) / chance) / (more - count)
        for stage, chance in chances.items()
        if stage.share < answering
        for _ in range(times[stage])
    ]
    together = sum(slopes) ** 2 - sum(slope**2 for slope in slopes)
    return passed * math.exp(-count / 2 * together)

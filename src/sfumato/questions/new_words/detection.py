"""Which words a search finds: the chance that a word is listed, by its count, before any record."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sfumato.flow.word_discovery import PASSES, FragmentPuzzle, PrefixExtension
from sfumato.privacy import Randomizer, debias

Search: TypeAlias = FragmentPuzzle | PrefixExtension

DETECTABLE = 0.95  # a detectable word is listed with this probability
_FAR = 6.0  # deviations beyond which chances are nothing
_PLACES = 16  # places per deviation at which a chance is computed
_STEPS = 60  # of a bisection


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A test that a word must pass, over the records of a length or position.

    A record supports a word by chance with probability `oracle.support`, and if its device has the
    word, with a larger one. A word passes if enough records support it.
    """

    oracle: Randomizer
    share: float  # of the records
    rate: float  # the chance that a word that nobody has passes
    ranked: bool = False  # whether the limit is met exactly, or by the bound of `sum_limit`

    @property
    def truth(self) -> float:
        """The chance that the record of a device that has the word supports it."""
        return self.oracle.support + (1 - self.oracle.collision) / self.oracle.reach

    def limit(self, records: float) -> float:
        """The number of records that must support a word."""
        from scipy import special

        most, lie = max(round(self.share * records), 1), self.oracle.support
        if self.ranked:
            return float(special.bdtrik(1 - self.rate, most, lie))
        low, high = lie, 1.0
        if -math.log(lie) * most <= -math.log(self.rate):
            return most + 1.0  # not even if all of them do
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if most * _divergence(middle, lie) < -math.log(self.rate):
                low = middle
            else:
                high = middle
        return most * high

    def height(self, records: float) -> float:
        """The count, over the stage's records, whose estimate is at the limit."""
        chance = max(round(self.share * records), 1) * self.oracle.support
        gain = (1 - self.oracle.collision) / self.oracle.reach
        return (self.limit(records) - chance) / gain

    def chance(self, count: float, records: float, limit: float | None = None) -> float:
        """The chance that a word passes that `count` of the devices behind `records` have."""
        from scipy import special

        need = math.floor(self.limit(records) if limit is None else limit) + 1
        others = max(round(self.share * (records - count)), 0)
        odds = self.share * self.truth
        mean = count * odds
        spread = _FAR * (math.sqrt(mean) + 1)
        step = max(1, int(math.sqrt(mean) / _PLACES))
        own = np.arange(max(0, math.floor(mean - spread)), min(count, mean + spread) + 1, step)
        log = special.gammaln(count + 1) - special.gammaln(own + 1)
        log += -special.gammaln(count - own + 1) + special.xlogy(own, odds)
        weights = np.exp(log + special.xlog1py(count - own, -odds))
        rest = need - own
        reached = special.bdtrc(np.clip(rest - 1, 0, others), others, self.oracle.support)
        reached = np.where(rest <= 0, 1.0, np.where(rest > others, 0.0, reached))
        return float(min(weights @ reached / weights.sum(), 1.0))


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
    return math.prod(stage.chance(count, records) for stage in stages(search, answering))


def detectable(search: Search, records: float, answering: float = 1.0) -> int:
    """The least count that is listed with a probability of 95%; more than the records if not even a
    word that all of them hold is."""
    times = Counter(reversed(stages(search, answering)))  # the hardest first
    tests = {stage: stage.limit(records) for stage in times}

    def is_found(count: int) -> bool:
        left = 1.0
        for stage, limit in tests.items():
            left *= stage.chance(count, records, limit) ** times[stage]
            if left < DETECTABLE:
                return False
        return True

    return bisect_left(range(math.ceil(records) + 1), True, key=is_found)


def _divergence(share: float, chance: float) -> float:
    """The Kullback-Leibler divergence of two coins."""
    rest = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return share * math.log(share / chance) + rest

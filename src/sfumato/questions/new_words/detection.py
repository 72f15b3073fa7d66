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
from sfumato.sketch.absent import coin_limit

Search: TypeAlias = FragmentPuzzle | PrefixExtension

DETECTABLE = 0.95  # a detectable word is listed with this probability
_FAR = 6.0  # deviations beyond which chances are nothing
_PLACES = 16  # places per deviation at which a chance is computed


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

    def cases(self, records: float) -> list[tuple[float, int, int]]:
        """Numbers of records that the stage may get, how likely each is, and how many of them must
        support a word."""
        mean = self.share * records
        step = math.sqrt(3 * mean * max(1 - self.share, 0.0))
        places = ((1 / 6, mean - step), (2 / 3, mean), (1 / 6, mean + step))
        sizes = [(weight, max(round(place), 1)) for weight, place in places]
        return [(weight, size, math.floor(self.limit(size)) + 1) for weight, size in sizes]

    def chance(
        self, count: float, records: float, cases: list[tuple[float, int, int]] | None = None
    ) -> float:
        """The chance that a word passes that `count` of the devices behind `records` have."""
        from scipy import special

        odds = self.share * self.truth
        mean = count * odds
        spread = _FAR * (math.sqrt(mean) + 1)
        step = max(1, int(math.sqrt(mean) / _PLACES))
        own = np.arange(max(0, math.floor(mean - spread)), min(count, mean + spread) + 1, step)
        log = special.gammaln(count + 1) - special.gammaln(own + 1)
        log += -special.gammaln(count - own + 1) + special.xlogy(own, odds)
        weights = np.exp(log + special.xlog1py(count - own, -odds))
        passed = 0.0
        for weight, size, need in self.cases(records) if cases is None else cases:
            others = max(round(size - self.share * count), 0)
            rest = need - own
            reached = special.bdtrc(np.clip(rest - 1, 0, others), others, self.oracle.support)
            reached = np.where(rest <= 0, 1.0, np.where(rest > others, 0.0, reached))
            passed += weight * float(weights @ reached / weights.sum())
        return min(passed, 1.0)


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
    tests = {stage: stage.cases(records) for stage in times}

    def is_found(count: int) -> bool:
        left = 1.0
        for stage, cases in tests.items():
            left *= stage.chance(count, records, cases) ** times[stage]
            if left < DETECTABLE:
                return False
        return True

    return bisect_left(range(math.ceil(records) + 1), True, key=is_found)

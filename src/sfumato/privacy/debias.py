"""From a tally of randomised records to counts with errors.

What a cell holds is set right for the coins (`Randomizer.readings`); what is left to set right are
collisions: an item's cells also hold the devices of other items. Paper 004 subtracts what
collisions bring on average, and its error then has a part that does not average out: with fixed
hash functions the same items meet the same ones every day. Here the hash functions are known and so
is the dictionary, so the collisions are solved for (`collision_aware`, the default): counts f satisfy

    g = G·f + noise,   G[d, d'] = how often d and d' share a cell, less what chance would bring

over the rows, and least squares over the items that matter is a few products with G, each computed
from the hashes (`kernels.local.collide`) without ever making G.

Error: `variance` is exact for the plain estimate, over coins and hash functions. For the aware one
    the part that comes from collisions is measured on items that do not exist, hashed like any
    other, so that devices whose items are not in the dictionary are in the error, too
    (docs/proofs/randomizers.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.errors import SpecError
from sfumato.kernels import local
from sfumato.privacy.intervals import NORMAL_95, of_estimates, of_support
from sfumato.privacy.randomizers import DirectResponse, Hashed, HashedResponse, Randomizer
from sfumato.privacy.tallies import Tally

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

PLACEBOS = 2048  # items that do not exist, on which collisions are measured
LEVEL = 0.05  # of the family-wise error, or of the false discovery rate
MATTERS = 0.01  # collisions below this share of the variance are left alone
SURE = 4.0  # deviations from which an item's collisions are solved for
MOST = 0.05  # share of the cells that may be solved for at once: each adds noise to the others
_SEEN = 0.15  # how much more than stated placebos may err by chance: three of their deviations
_WHOLE = 1e-6  # of a count, by which rounding moves it
_LOOKS, _FIT, _STEPS = 3, 1e-6, 40


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LocalEstimates:
    """Counts (n,) over the devices of a tally, and their errors."""

    counts: F64
    standard_error: F64
    null: Null  # the law of an item that nobody holds and that meets no heavy one
    null_error: F64  # the deviation of each item if nobody held it, (n,): those it meets add to it
    alone: float  # the same by coins alone, had no item met another
    unlisted: float  # devices whose item is not among those asked about
    unlisted_error: float
    decoder: str

    def thresholds(self, level: float = LEVEL) -> F64:
        """From which count each item is significant, at this family-wise level over all, (n,)."""
        limit = self.null.threshold(self.counts.size, level)
        return limit * self.null_error / self.null.error

    def interval(
        self, *, asked: int, answered: int, per_device: int = 1, above: float | None = None
    ) -> tuple[F64, F64]:
        """95% intervals for counts over `asked` devices, of which `answered` sent their records.

        `above` is the least count that is shown. Coins are taken as they fall, on whole numbers;
        what collisions add to the variance widens an interval.
        """
        if per_device > 1 and answered < asked:  # a device's records are missing together
            return of_estimates(
                self.counts, self.standard_error, asked=per_device * asked,
                answered=per_device * answered, per_device=per_device, above=above,
            )  # fmt: skip
        records, lie = round(self.null.records), self.null.support
        gain = math.sqrt(records * lie * (1 - lie)) / self.alone
        spoke = np.rint(lie * records + gain * self.counts)
        low, high = of_support(
            spoke.astype(np.int64),
            truth=min(lie + gain, 1.0),
            lie=lie,
            asked=max(per_device * asked, records),
            answered=records,
            above=None if above is None else math.ceil(lie * records + gain * above),
        )
        scale = max(asked / answered, 1.0)
        middle = scale * (spoke - lie * records) / gain
        off = scale * self.counts - middle  # solving for collisions leaves whole numbers
        off = np.where(np.abs(off) < _WHOLE * scale, 0.0, off)
        collisions = np.maximum(self.null_error**2 - self.alone**2, 0.0)
        collisions = np.where(collisions < _WHOLE * self.alone**2, 0.0, collisions)
        more = NORMAL_95 * scale * np.sqrt(collisions)
        below = np.where(more > 0, middle + off - np.hypot(middle - low, more), low + off)
        below = np.where(low <= 0, np.minimum(below, 0.0), below)  # nobody was not ruled out
        return below, np.where(more > 0, middle + off + np.hypot(high - middle, more), high + off)

    def significant(
        self,
        *,
        level: float = LEVEL,
        rule: Literal["family-wise", "false discovery"] = "family-wise",
    ) -> Bool:
        """Which items somebody holds; see `significant`."""
        alike = self.counts * self.null.error / self.null_error
        return significant(alike, self.null, level=level, rule=rule)


def variance(
    randomizer: Randomizer, *, count: float, held: float | F64, squares: float | F64
) -> Any:
    """The exact variance of the plain estimate of an item that `held` of `count` devices hold.

    `squares` is the sum of the squares of all other items' counts. Over coins, rows and hash
    functions drawn at random. After paper 004, theorems 4.2 and 4.4, whose bounds leave the item
    itself in the sum and drop smaller terms.
    """
    own, hit, miss = randomizer.moments
    chance = randomizer.collision
    others = count - held
    coins = held * own + others * (chance * hit + (1 - chance) * miss)
    meeting = (
        chance * (1 - chance) * (others * (1 - 1 / randomizer.rows) + squares / randomizer.rows)
    )
    return (coins + meeting) / (1 - chance) ** 2


def optimal_variance(epsilon: float) -> float:
    """4e^epsilon/(e^epsilon − 1)² a device: the least for a rare item of a large domain."""
    return 4 * math.exp(epsilon) / math.expm1(epsilon) ** 2


def estimate(
    tally: Tally,
    values: npt.NDArray[Any],
    *,
    collision_aware: bool = True,
    none: npt.NDArray[Any] | None = None,
) -> LocalEstimates:
    """Counts of these values (`Randomizer.values`), with standard errors.

    `none`, (1,), is the value of devices that have nothing to say, of which there may be many: it
    is solved for with the others, and counted among the unlisted.

    Without `collision_aware`, the paper's plain means: unbiased over the hash functions. With it, collisions
    are solved for where they matter, which costs a little of that: an item that is too rare to be
    solved for reads a few per cent low, far within its error (docs/proofs/randomizers.md).
    """
    randomizer, count = tally.randomizer, tally.count
    if count == 0:
        raise SpecError("there is nothing to estimate from: the tally holds no record")
    if none is not None:
        return _without_last(
            estimate(tally, np.concatenate([values, none]), collision_aware=collision_aware)
        )
    distinct, places = np.unique(values, return_inverse=True)
    if distinct.size < values.size:  # an item asked about twice is one item, told twice
        return _repeated(estimate(tally, distinct, collision_aware=collision_aware), places)
    chance = randomizer.collision
    raw = randomizer.readings(tally.cells, count, values) - chance * count
    counts = raw / (1 - chance)
    sure = float(variance(randomizer, count=count, held=0.0, squares=0.0))
    squares = squares_of(randomizer, counts, sure)
    null = float(variance(randomizer, count=count, held=0.0, squares=squares))
    if chance == 0:
        return _with_errors(tally, values, counts, null, "direct")
    if collision_aware and null < (1 + MATTERS) * sure:  # but who knows what was not listed
        placebos = randomizer.readings(tally.cells, count, _placebos(values, PLACEBOS))
        seen = float(np.mean((placebos - chance * count) ** 2)) / (1 - chance) ** 2
        if seen < (1 + _SEEN) * sure:
            return _with_errors(tally, values, counts, max(null, seen), "plain means")
    if not collision_aware:
        own = np.clip(counts**2 - sure, 0.0, squares)  # an item does not meet itself
        less = variance(randomizer, count=count, held=0.0, squares=squares - own) - null
        return _with_errors(tally, values, counts, null, "plain means", less)
    return _aware(tally, values, raw, sure)


@dataclass(frozen=True, slots=True)
class Null:
    """How the estimate of an item that nobody holds is distributed: what thresholds are made of.

    It is a binomial variable, the number of `records` that speak for the item by chance, scaled to
    a standard deviation of `error`. Where few do it is skewed, and a normal threshold would be
    passed far too often. Without records, a normal variable.
    """

    error: float
    records: float = math.inf
    support: float = 0.5

    def threshold(self, items: int, level: float = LEVEL) -> float:
        """The count from which an item is significant, at this family-wise level over `items`."""
        chance = level / items
        if math.isinf(self.records):
            return self.error * NormalDist().inv_cdf(1 - chance)
        low, high = math.floor(self._mean), math.floor(self.records) + 1  # which is never reached
        while high - low > 1:  # the least number that is reached with no more than this chance
            middle = (low + high) // 2
            low, high = (low, middle) if self._reached(middle) <= chance else (middle, high)
        return self.error * (high - 0.5 - self._mean) / self._deviation

    def chances(self, counts: F64) -> F64:
        """How likely chance alone reaches each of these counts."""
        from scipy import special

        if math.isinf(self.records):
            return np.asarray(special.ndtr(-counts / self.error))
        spoke = np.rint(self._mean + counts / self.error * self._deviation)
        return np.asarray(self._reached(np.clip(spoke, 1, self.records)))

    def _reached(self, spoke: Any) -> Any:
        """P(binomial ≥ spoke), for spoke ≥ 1."""
        from scipy import special

        return special.betainc(spoke, self.records - spoke + 1, self.support)

    @property
    def _mean(self) -> float:
        return self.records * self.support

    @property
    def _deviation(self) -> float:
        return math.sqrt(self._mean * (1 - self.support))


def significant(
    counts: F64,
    null: Null,
    *,
    level: float = LEVEL,
    rule: Literal["family-wise", "false discovery"] = "family-wise",
) -> Bool:
    """Which items somebody holds. "family-wise": one false item or more with probability `level`
    at most (Bonferroni). "false discovery": a share `level` of those listed is false, on average
    (Benjamini and Hochberg 1995)."""
    if not 0 < level < 1:
        raise SpecError(f"level must be above 0 and below 1; got {level}")
    if counts.size == 0:
        return np.zeros(0, dtype=np.bool_)
    if rule == "family-wise":
        return np.asarray(counts > null.threshold(counts.size, level))
    chances = null.chances(counts)
    order = np.argsort(chances, kind="stable")
    below = chances[order] <= level * np.arange(1, counts.size + 1) / counts.size
    listed = np.zeros(counts.size, dtype=np.bool_)
    if below.any():
        listed[order[: int(np.flatnonzero(below)[-1]) + 1]] = True
    return listed


def consistent(
    counts: F64, total: float, *, rule: Literal["norm_sub", "simplex"] = "norm_sub"
) -> F64:
    """Counts made to look possible: none negative, all adding up to `total`. Biased.

    "norm_sub" (Wang and others 2020) takes the same amount off every positive count until the sum
    is right, which is the Euclidean projection on the simplex; "simplex" computes that projection
    by sorting (Duchi and others 2008). They agree; errors shrink, and intervals no longer hold.
    """
    if not total > 0:
        raise SpecError(f"total must be above 0; got {total}")
    if counts.size == 0:
        raise SpecError("there must be counts to make consistent; got none")
    if rule == "simplex":
        falling = np.sort(counts)[::-1]
        spare = (np.cumsum(falling) - total) / np.arange(1, counts.size + 1)
        kept = np.flatnonzero(falling > spare)[-1]
        return np.asarray(np.maximum(counts - spare[kept], 0.0))
    positive = np.ones(counts.size, dtype=np.bool_)
    while True:
        shift = (counts[positive].sum() - total) / np.count_nonzero(positive)
        wrong = positive & (counts <= shift)
        if not wrong.any():
            return np.where(positive, counts - shift, 0.0)
        positive &= ~wrong


def squares_of(randomizer: Randomizer, counts: F64, sure: float) -> float:
    """The sum of the squares of the true counts: without what noise and collisions add to those of
    the estimates, the latter in proportion to the sum itself."""
    met = 1 + (counts.size - 1) / (randomizer.rows * (randomizer.width - 1))
    return max(float(np.sum(counts**2 - sure)), 0.0) / met


def _aware(tally: Tally, values: U64, raw: F64, sure: float) -> LocalEstimates:
    """Solve for the collisions of the items that matter, and take them off all others."""
    randomizer = tally.randomizer
    assert isinstance(randomizer, Hashed)  # only these have collisions
    hashes, width = randomizer.hashes, randomizer.width
    shares = tally.row_counts / tally.count
    cells = width / float(shares @ shares)  # as many as there are, unless few records fill few rows
    keep = 1 - randomizer.collision
    placebos = _placebos(values, PLACEBOS)
    both = np.concatenate([values, placebos])
    reading = np.concatenate([raw, randomizer.readings(tally.cells, tally.count, placebos)])
    reading[values.size :] -= randomizer.collision * tally.count
    most = int(MOST * cells)
    counts, deviation = reading / keep, math.sqrt(sure)
    chosen, met = np.empty(0, dtype=np.int64), np.zeros(both.size)
    solved = np.empty(0)
    for _ in range(_LOOKS):
        spread = max(deviation, float(np.std(counts[values.size :])))
        listed = counts[: values.size]
        before = chosen
        if values.size <= most:
            chosen = np.arange(values.size)
        else:
            chosen = np.flatnonzero(listed > SURE * spread)
            chosen = chosen[np.argsort(-listed[chosen], kind="stable")][:most]
        if chosen.size == 0 or np.array_equal(np.sort(before), np.sort(chosen)):
            chosen = before  # in whose order they were solved for
            break
        solved = _solve(values[chosen], reading[chosen], listed[chosen], hashes, shares, width)
        met = local.collide(both, values[chosen], solved, hashes, shares, width)
        counts = (reading - met) / keep
        counts[chosen] = solved
    # Of a met item only the mean is taken off: in which rows its devices were, and their coins,
    # stay as noise, more for an item that meets a heavy one and less for one that meets none.
    _, hit, miss = randomizer.moments
    excess = met * (1 + hit - miss) / keep**2
    null = max(sure, float(np.mean(counts[values.size :] ** 2 - excess[values.size :])))
    inflation = np.ones(values.size)
    inflation[chosen] = 1 / (1 - chosen.size / cells)
    decoder = f"collisions solved for {chosen.size:,} items"
    excess = excess[: values.size]
    excess[chosen] -= solved * (1 + hit - miss) / keep  # an item does not meet itself
    excess = np.maximum(excess, -sure / 2)
    return _with_errors(tally, values, counts[: values.size], null, decoder, excess, inflation)


def _solve(points: U64, reading: F64, start: F64, hashes: U64, shares: F64, width: int) -> F64:
    """Counts f of these items with G·f = reading, by conjugate gradients."""

    def product(f: F64) -> F64:
        return local.collide(points, points, f, hashes, shares, width)

    solution = start.copy()
    gap = reading - product(solution)
    direction, size = gap.copy(), float(gap @ gap)
    goal = _FIT**2 * float(reading @ reading)
    for _ in range(_STEPS):
        if size <= goal:
            break
        moved = product(direction)
        length = size / float(direction @ moved)
        solution += length * direction
        gap -= length * moved
        size, last = float(gap @ gap), size
        direction = gap + size / last * direction
    return solution


def _without_last(found: LocalEstimates) -> LocalEstimates:
    """The same without the last value, whose devices are unlisted."""
    spread = found.standard_error**2
    return replace(
        found,
        counts=found.counts[:-1],
        standard_error=found.standard_error[:-1],
        null_error=found.null_error[:-1],
        unlisted=found.unlisted + float(found.counts[-1]),
        unlisted_error=found.unlisted_error * math.sqrt(1 - float(spread[-1] / spread.sum())),
    )


def _repeated(found: LocalEstimates, places: I64) -> LocalEstimates:
    return replace(
        found,
        counts=found.counts[places],
        standard_error=found.standard_error[places],
        null_error=found.null_error[places],
    )


def _with_errors(
    tally: Tally,
    values: npt.NDArray[Any],
    counts: F64,
    null: float,
    decoder: str,
    excess: float | F64 = 0.0,
    inflation: float | F64 = 1.0,
) -> LocalEstimates:
    """A held item's own devices add other noise than the devices of other items."""
    randomizer, count = tally.randomizer, tally.count
    nobody = float(variance(randomizer, count=count, held=0.0, squares=0.0))
    everybody = float(variance(randomizer, count=count, held=float(count), squares=0.0))
    slope = (everybody - nobody) / count
    held = np.clip(counts, 0, count)
    alone = np.broadcast_to((null + excess) * inflation, counts.shape)
    spread = np.maximum(alone + slope * held * inflation, 0.0)
    unlisted, unlisted_error = count - float(counts.sum()), math.sqrt(float(spread.sum()))
    if not isinstance(randomizer, HashedResponse):
        # A row's cells err on their own, so items that share one err together; those of a response
        # add up to the row's records exactly.
        unlisted_error *= math.sqrt(1 + counts.size * randomizer.collision)
    if isinstance(randomizer, DirectResponse):
        unlisted_error = math.sqrt(randomizer.set_variance(count, unlisted, values.size))
    return LocalEstimates(
        counts=counts,
        standard_error=np.sqrt(spread),
        null=Null(math.sqrt(null), count, randomizer.support),
        null_error=np.sqrt(alone),
        alone=math.sqrt(nobody),
        unlisted=unlisted,
        unlisted_error=unlisted_error,
        decoder=decoder,
    )


def _placebos(values: U64, count: int) -> U64:
    """Points of items that are not among `values`: drawn from the field, which is almost empty."""
    drawn = np.random.Generator(np.random.Philox(int(values[0]) if values.size else 0))
    points = drawn.integers(0, (1 << 61) - 1, count, dtype=np.uint64)
    return points[~np.isin(points, values)]

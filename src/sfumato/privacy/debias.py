"""From a tally of randomised records to counts with errors.

`Randomizer.readings` corrects the cells for the coins; collisions remain to be corrected: an item's
cells also count the devices of other items. Paper 004 subtracts the average effect of collisions,
and its error then has a part that does not average out: with fixed hash functions the same items
collide every day. Here the hash functions and the dictionary are known, so the collisions are
solved for (`collision_aware`, the default): counts f satisfy

    g = G·f + noise,   G[d, d'] = how often d and d' share a cell, less the average by chance

over the rows, and least squares over the items that matter is a few products with G, each computed
from the hashes (`kernels.local.collide`) without ever building G.

Error: `variance` is exact for the plain estimate, over coins and hash functions. For the
    collision-aware one the part that comes from collisions is measured on items that do not exist,
    hashed like any other, so the error includes devices whose items are not in the dictionary
    (docs/proofs/randomizers.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, U64, Bool
from sfumato.errors import SpecError
from sfumato.kernels import local
from sfumato.privacy.intervals import NORMAL_95, of_estimates, of_support
from sfumato.privacy.randomizers import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    Hashed,
    HashedResponse,
    Randomizer,
)
from sfumato.privacy.tallies import Tally

PLACEBOS = 2048  # items that do not exist, on which collisions are measured
LEVEL = 0.05  # of the family-wise error, or of the false discovery rate
MATTERS = 0.01  # collisions below this share of the variance are left alone
SURE = 4.0  # an item's collisions are solved for if it is above this many deviations
MOST = 0.05  # most items to solve for, as a share of the cells: each adds noise to the others
_PLACEBO_EXCESS = 0.15  # excess variance of placebos that is put down to chance: three deviations
_WHOLE = 1e-6  # relative rounding error of a count
_PASSES, _FIT, _STEPS = 3, 1e-6, 40


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LocalEstimates:
    """Counts (n,) over the devices of a tally, and their errors."""

    counts: F64
    standard_error: F64
    null: Null  # the law of an item that nobody holds and that collides with no heavy one
    null_error: F64  # the deviation of each item if nobody held it, collisions included, (n,)
    alone: float  # the same by coins alone, without collisions
    unlisted: float  # devices whose item is not among those estimated
    unlisted_error: float
    decoder: str

    def thresholds(self) -> F64:
        """The count from which each item is significant, at a family-wise level of 5% over all,
        (n,)."""
        limit = self.null.threshold(self.counts.size, LEVEL)
        return limit * self.null_error / self.null.error

    def interval(
        self, *, devices: int, respondents: int, per_device: int = 1, above: float | None = None
    ) -> tuple[F64, F64]:
        """95% intervals for counts over `devices` devices, if `respondents` of them sent records.

        `above` is the least count that is shown. The coins are treated exactly, on whole numbers;
        the variance that collisions add widens an interval.
        """
        if per_device > 1 and respondents < devices:  # a device's records are missing together
            return of_estimates(
                self.counts, self.standard_error, devices=per_device * devices,
                respondents=per_device * respondents, per_device=per_device, above=above,
            )  # fmt: skip
        records, lie = round(self.null.records), self.null.support
        gain = math.sqrt(records * lie * (1 - lie)) / self.alone
        support = np.rint(lie * records + gain * self.counts)
        low, high = of_support(
            support.astype(np.int64),
            truth=min(lie + gain, 1.0),
            lie=lie,
            devices=max(per_device * devices, records),
            respondents=records,
            above=None if above is None else math.ceil(lie * records + gain * above),
        )
        scale = max(devices / respondents, 1.0)
        middle = scale * (support - lie * records) / gain
        remainder = scale * self.counts - middle  # not 0 where collisions were solved for
        remainder = np.where(np.abs(remainder) < _WHOLE * scale, 0.0, remainder)
        collisions = np.maximum(self.null_error**2 - self.alone**2, 0.0)
        collisions = np.where(collisions < _WHOLE * self.alone**2, 0.0, collisions)
        widening = NORMAL_95 * scale * np.sqrt(collisions)
        below = np.where(
            widening > 0, middle + remainder - np.hypot(middle - low, widening), low + remainder
        )
        below = np.where(low <= 0, np.minimum(below, 0.0), below)  # zero holders are not ruled out
        return below, np.where(
            widening > 0, middle + remainder + np.hypot(high - middle, widening), high + remainder
        )

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
    randomizer: Randomizer, *, count: float, holders: float | F64, squares: float | F64
) -> Any:
    """The exact variance of the plain estimate of an item that `holders` of `count` devices hold.

    `squares` is the sum of the squares of all other items' counts. Over coins, rows and hash
    functions drawn at random. After paper 004, theorems 4.2 and 4.4, whose bounds leave the item
    itself in the sum and drop smaller terms.
    """
    own, hit, miss = randomizer.moments
    chance = randomizer.collision
    others = count - holders
    coins = holders * own + others * (chance * hit + (1 - chance) * miss)
    collisions = (
        chance * (1 - chance) * (others * (1 - 1 / randomizer.rows) + squares / randomizer.rows)
    )
    return (coins + collisions) / (1 - chance) ** 2


def variance_bound(
    randomizer: CountMeanSketch | HadamardCountMeanSketch, *, count: float, squares: float
) -> float:
    """The paper's bound on the variance of an item's count (theorem 4.2; for Hadamard sketches,
    theorem 4.4). `squares` is the sum of the squares of all counts, the item's own included.

    >>> sketch = CountMeanSketch(epsilon=2.0, rows=32, width=32, seed=0)
    >>> bound = variance_bound(sketch, count=100.0, squares=10_000.0)
    >>> bool(bound > variance(sketch, count=100.0, holders=0.0, squares=10_000.0))
    True
    """
    collisions = squares / (count * randomizer.rows * randomizer.width)
    if isinstance(randomizer, HadamardCountMeanSketch):
        e = math.exp(randomizer.epsilon)
        each = ((e + 1) / (e - 1)) ** 2 + collisions
    else:
        e = math.exp(randomizer.epsilon / 2)
        each = e / (e - 1) ** 2 + 1 / randomizer.width + collisions
    return count * each / (1 - 1 / randomizer.width) ** 2


def optimal_variance(epsilon: float) -> float:
    """4e^epsilon/(e^epsilon − 1)² per device: the least for a rare item of a large domain."""
    return 4 * math.exp(epsilon) / math.expm1(epsilon) ** 2


def estimate(
    tally: Tally,
    values: npt.NDArray[Any],
    *,
    collision_aware: bool = True,
    none: npt.NDArray[Any] | None = None,
) -> LocalEstimates:
    """Counts of these values (`Randomizer.values`), with standard errors.

    `none`, (1,), is the value sent by devices without an item, of which there may be many: it is
    solved for with the others, and counted among the unlisted.

    Without `collision_aware`, the estimates are the paper's plain means: unbiased over the hash
    functions. With it, collisions are solved for where they matter, at the cost of a small bias: an
    item that is too rare to be solved for reads a few per cent low, far within its error
    (docs/proofs/randomizers.md).
    """
    randomizer, count = tally.randomizer, tally.count
    if count == 0:
        raise SpecError("there is nothing to estimate from: the tally holds no record")
    if none is not None:
        return _without_last(
            estimate(tally, np.concatenate([values, none]), collision_aware=collision_aware)
        )
    distinct, places = np.unique(values, return_inverse=True)
    if distinct.size < values.size:  # repeated items are estimated once
        return _repeated(estimate(tally, distinct, collision_aware=collision_aware), places)
    chance = randomizer.collision
    raw = randomizer.readings(tally.cells, count, values) - chance * count
    counts = raw / (1 - chance)
    sure = float(variance(randomizer, count=count, holders=0.0, squares=0.0))
    squares = squares_of(randomizer, counts, sure)
    null = float(variance(randomizer, count=count, holders=0.0, squares=squares))
    if chance == 0:
        return _with_errors(tally, values, counts, null, "direct")
    if collision_aware and null < (1 + MATTERS) * sure:  # unless unlisted items collide
        placebos = randomizer.readings(tally.cells, count, _placebos(values, PLACEBOS))
        placebo_variance = float(np.mean((placebos - chance * count) ** 2)) / (1 - chance) ** 2
        if placebo_variance < (1 + _PLACEBO_EXCESS) * sure:
            return _with_errors(tally, values, counts, max(null, placebo_variance), "plain means")
    if not collision_aware:
        own = np.clip(counts**2 - sure, 0.0, squares)  # an item does not collide with itself
        less = variance(randomizer, count=count, holders=0.0, squares=squares - own) - null
        return _with_errors(tally, values, counts, null, "plain means", less)
    return _solved_for_collisions(tally, values, raw, sure)


@dataclass(frozen=True, slots=True)
class Null:
    """The distribution of the estimate of an item that nobody holds, from which thresholds follow.

    It is a binomial variable, the number of `records` that support the item by chance, scaled to a
    standard deviation of `error`. If that number is small it is skewed, and a normal threshold
    would be passed far too often. With infinitely many records it is a normal variable.
    """

    error: float
    records: float = math.inf
    support: float = 0.5

    def threshold(self, items: int, level: float = LEVEL) -> float:
        """The count from which an item is significant, at this family-wise level over `items`."""
        chance = level / items
        if math.isinf(self.records):
            return self.error * NormalDist().inv_cdf(1 - chance)
        low, high = math.floor(self._mean), math.floor(self.records) + 1  # never reached
        while high - low > 1:  # find the least number that is reached with at most this chance
            middle = (low + high) // 2
            low, high = (low, middle) if self._reached(middle) <= chance else (middle, high)
        return self.error * (high - 0.5 - self._mean) / self._deviation

    def chances(self, counts: F64) -> F64:
        """The probability that chance alone reaches each of these counts."""
        from scipy import special

        if math.isinf(self.records):
            return np.asarray(special.ndtr(-counts / self.error))
        support = np.rint(self._mean + counts / self.error * self._deviation)
        return np.asarray(self._reached(np.clip(support, 1, self.records)))

    def _reached(self, support: Any) -> Any:
        """P(binomial ≥ support), for support ≥ 1."""
        from scipy import special

        return special.betainc(support, self.records - support + 1, self.support)

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
    """Counts adjusted to be possible: none negative, and adding up to `total`. Biased.

    "norm_sub" (Wang and others 2020) subtracts the same amount from every positive count until the
    sum is right, which is the Euclidean projection on the simplex; "simplex" computes that
    projection by sorting (Duchi and others 2008). They agree; errors shrink, and intervals are no
    longer valid.
    """
    if not total > 0:
        raise SpecError(f"total must be above 0; got {total}")
    if counts.size == 0:
        raise SpecError("there must be counts to make consistent; got none")
    if rule == "simplex":
        falling = np.sort(counts)[::-1]
        spare = (np.cumsum(falling) - total) / np.arange(1, counts.size + 1)
        last = np.flatnonzero(falling > spare)[-1]
        return np.asarray(np.maximum(counts - spare[last], 0.0))
    positive = np.ones(counts.size, dtype=np.bool_)
    while True:
        shift = (counts[positive].sum() - total) / np.count_nonzero(positive)
        wrong = positive & (counts <= shift)
        if not wrong.any():
            return np.where(positive, counts - shift, 0.0)
        positive &= ~wrong


def squares_of(randomizer: Randomizer, counts: F64, sure: float) -> float:
    """The sum of the squares of the true counts: that of the estimates without the parts added by
    noise and by collisions, the latter in proportion to the sum itself."""
    collisions = 1 + (counts.size - 1) / (randomizer.rows * (randomizer.width - 1))
    return max(float(np.sum(counts**2 - sure)), 0.0) / collisions


def _solved_for_collisions(tally: Tally, values: U64, raw: F64, sure: float) -> LocalEstimates:
    """Solve for the collisions of the heavy items, and subtract them from all others."""
    randomizer = tally.randomizer
    assert isinstance(randomizer, Hashed)  # only these have collisions
    hashes, width = randomizer.hashes, randomizer.width
    shares = tally.row_counts / tally.count
    cells = width / float(shares @ shares)  # all cells, unless there are fewer records than rows
    keep = 1 - randomizer.collision
    placebos = _placebos(values, PLACEBOS)
    both = np.concatenate([values, placebos])
    reading = np.concatenate([raw, randomizer.readings(tally.cells, tally.count, placebos)])
    reading[values.size :] -= randomizer.collision * tally.count
    most = int(MOST * cells)
    counts, deviation = reading / keep, math.sqrt(sure)
    heavy, collisions = np.empty(0, dtype=np.int64), np.zeros(both.size)
    solution = np.empty(0)
    for _ in range(_PASSES):
        spread = max(deviation, float(np.std(counts[values.size :])))
        listed = counts[: values.size]
        before = heavy
        if values.size <= most:
            heavy = np.arange(values.size)
        else:
            heavy = np.flatnonzero(listed > SURE * spread)
            heavy = heavy[np.argsort(-listed[heavy], kind="stable")][:most]
        if heavy.size == 0 or np.array_equal(np.sort(before), np.sort(heavy)):
            heavy = before  # in the order in which they were solved for
            break
        solution = _solve(values[heavy], reading[heavy], listed[heavy], hashes, shares, width)
        collisions = local.collide(both, values[heavy], solution, hashes, shares, width)
        counts = (reading - collisions) / keep
        counts[heavy] = solution
    # Only the mean of a colliding item is subtracted: the rows of its devices and their coins
    # remain as noise, more for an item that collides with a heavy one and less for the others.
    _, hit, miss = randomizer.moments
    excess = collisions * (1 + hit - miss) / keep**2
    null = max(sure, float(np.mean(counts[values.size :] ** 2 - excess[values.size :])))
    inflation = np.ones(values.size)
    inflation[heavy] = 1 / (1 - heavy.size / cells)
    decoder = f"collisions solved for {heavy.size:,} items"
    excess = excess[: values.size]
    excess[heavy] -= solution * (1 + hit - miss) / keep  # an item does not collide with itself
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
        image = product(direction)
        length = size / float(direction @ image)
        solution += length * direction
        gap -= length * image
        size, last = float(gap @ gap), size
        direction = gap + size / last * direction
    return solution


def _without_last(estimates: LocalEstimates) -> LocalEstimates:
    """The same without the last value, whose devices are unlisted."""
    spread = estimates.standard_error**2
    return replace(
        estimates,
        counts=estimates.counts[:-1],
        standard_error=estimates.standard_error[:-1],
        null_error=estimates.null_error[:-1],
        unlisted=estimates.unlisted + float(estimates.counts[-1]),
        unlisted_error=estimates.unlisted_error * math.sqrt(1 - float(spread[-1] / spread.sum())),
    )


def _repeated(estimates: LocalEstimates, places: I64) -> LocalEstimates:
    return replace(
        estimates,
        counts=estimates.counts[places],
        standard_error=estimates.standard_error[places],
        null_error=estimates.null_error[places],
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
    """An item's own devices add other noise than the devices of other items."""
    randomizer, count = tally.randomizer, tally.count
    nobody = float(variance(randomizer, count=count, holders=0.0, squares=0.0))
    everybody = float(variance(randomizer, count=count, holders=float(count), squares=0.0))
    slope = (everybody - nobody) / count
    holders = np.clip(counts, 0, count)
    alone = np.broadcast_to((null + excess) * inflation, counts.shape)
    spread = np.maximum(alone + slope * holders * inflation, 0.0)
    unlisted, unlisted_error = count - float(counts.sum()), math.sqrt(float(spread.sum()))
    if not isinstance(randomizer, HashedResponse):
        # The cells of a row have independent errors, so items that share a cell err together; the
        # cells of a hashed response add up to the row's records exactly.
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
    generator = np.random.Generator(np.random.Philox(int(values[0]) if values.size else 0))
    points = generator.integers(0, (1 << 61) - 1, count, dtype=np.uint64)
    return points[~np.isin(points, values)]

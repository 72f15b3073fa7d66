"""Readings of items that nobody holds, and so which items are significantly above zero."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from sfumato.arrays import F64, U64, Bool
from sfumato.kernels import Decode
from sfumato.sketch.rounds import DecodedRounds

_GRID = 1 << 18  # places at which the law of a mean of readings is computed
_PASSES = 3  # each over tables without the items of the last one
_FITS = 3  # readings of the significant items, each without the counts of the others
_DRAWS = 1 << 16  # size of the sample of readings of one row over several rounds
_EXACT_SIGNS = 256  # up to this many combinations of signs, all are enumerated
_PIECE = 1 << 16  # items that are read together
_LARGEST_EXPONENT = 600.0  # exp of more overflows
_HALVINGS = 60  # of an interval, until it is as small as a rounding error
_SKEWED = 5.0  # how far below a normal law's, in logarithms, the best s is looked for


def absent_limit(table: F64, decode: Decode, rate: float) -> float:
    """The reading that an item that nobody holds exceeds with a chance of at most `rate`.

    Such an item has, in each row of the table (rows, width), a uniform cell and a fair sign, all
    independent. So the law of a row's reading is that of the table's own cells with both signs,
    noise and collisions included, and that of the mean or median of rows follows exactly (for even
    rows the median's is bounded). A normal law of the same variance is not enough at a level of one
    in millions: one collision shifts a reading, and shifted readings fill the far tail.
    """
    size = np.abs(table)
    if rate >= 0.5 or not size.any():
        return 0.0
    return _median_limit(size, rate) if decode == "median" else _mean_limit(size, rate)


def sum_limit(table: F64, rate: float) -> float:
    """The sum of its cells, one in each row, that an item that nobody holds reaches with a chance
    of at most `rate`. For tables (rows, width) without signs, such as those of local privacy.

    Claim: the chance is at most `rate`, if hash functions are random and the item was listed
        without knowledge of them, whatever is in the table.
    Proof: docs/proofs/intervals.md. The item's cell of each row is uniform and the rows are
        independent, so that the logarithm of the sum's moment generating function at s is
        K(s) = Σ_rows log mean exp(s·cell), and by Markov's inequality any s > 0 gives a limit:
        (K(s) + log 1/rate)/s. The least of them is taken.
    """
    from scipy import optimize

    rows, width = table.shape
    places = np.nonzero(table)
    values = table[places]
    if values.size == 0:
        return 0.0
    sums, squares = (
        np.bincount(places[0], power, minlength=rows) / width for power in (values, values**2)
    )
    deviation = math.sqrt(max(float(np.sum(squares - sums**2)), 0.0))
    if deviation == 0:  # every row is constant: no chance is involved
        return float(np.sum(sums))
    surprise = -math.log(rate)

    def limit(log: float) -> float:
        s = math.exp(log)
        growth = np.bincount(places[0], np.expm1(s * values), minlength=rows) / width
        return (float(np.sum(np.log1p(growth))) + surprise) / s

    normal = math.log(math.sqrt(2 * surprise) / deviation)  # the best s of a normal law
    most = math.log(_LARGEST_EXPONENT / float(np.abs(values).max()))
    bounds = (min(normal - _SKEWED, most - 1), min(normal + 1, most))
    return float(optimize.minimize_scalar(limit, bounds=bounds, method="bounded").fun)


def coin_limit(records: int, chance: float, rate: float) -> float:
    """The same for the number of `records` that support an item, each with this chance and
    independently: the limit of a table without collisions. More than the records if not even all
    of them would be surprising enough.

    >>> round(coin_limit(100, 0.1, 0.01), 2), coin_limit(3, 0.5, 0.01)
    (20.2, 4.0)
    """
    surprise = -math.log(rate)
    if -math.log(chance) * records <= surprise:
        return records + 1.0
    low, high = chance, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rest = (1 - middle) * math.log((1 - middle) / (1 - chance)) if middle < 1 else 0.0
        enough = records * (middle * math.log(middle / chance) + rest) >= surprise
        low, high = (low, middle) if enough else (middle, high)
    return records * high


def _mean_limit(size: F64, rate: float) -> float:
    """Convolve the laws of the rows on a grid, by spectra, and add the rounding of the grid."""
    rows, width = size.shape
    step = float(size.max(axis=1).sum()) / (_GRID // 2 - rows)
    spectrum = np.ones(_GRID // 2 + 1, dtype=np.complex128)
    for places in np.rint(size / step).astype(np.int64):
        mass = np.bincount(places, minlength=_GRID) / (2 * width)
        spectrum *= np.fft.rfft(mass + np.roll(mass[::-1], 1))  # both signs
    law = np.fft.irfft(spectrum, _GRID)[: _GRID // 2]  # of the sums 0, step, 2·step, …
    beyond = np.cumsum(law[:0:-1])  # the chances to exceed …, 2·step, step, 0
    place = law.size - 1 - int(np.searchsorted(beyond, rate, side="right"))
    return float((place + rows / 2) * step / rows)


def _median_limit(size: F64, rate: float, *, is_sample: bool = False) -> float:
    """The median exceeds a height if half of the rows, or one more than half, exceed it.

    Chances from a sample of readings are replaced by an upper bound that fails once in 10**5.
    """
    rows, width = size.shape
    rows_sorted = np.sort(size, axis=1)
    heights = np.unique(rows_sorted)

    def is_enough(height: float) -> bool:
        chances = np.zeros(rows + 1)  # chance of each number of rows to exceed it
        chances[0] = 1.0
        for row in rows_sorted:
            chance = (width - np.searchsorted(row, height, side="right")) / (2 * width)
            if is_sample:
                chance = min(chance + 5 * (chance / width) ** 0.5 + 13 / width, 0.5)
            chances[1:] = chances[1:] * (1 - chance) + chances[:-1] * chance
            chances[0] *= 1 - chance
        return bool(chances[-(-rows // 2) :].sum() <= rate)

    return float(heights[bisect_left(heights, True, key=is_enough)])


def significant_items(
    rounds: DecodedRounds, points: U64, *, level: float, shares: F64 | None = None
) -> tuple[Bool, float]:
    """Which items somebody holds, at this family-wise level, and the threshold of the last pass.

    An item's reading is the median over rows of the sum over rounds. Significant items are
    subtracted from the tables, and the rest is read again.

    Claim: some item that nobody holds is among them with probability at most `level`, if hash
        functions are random and the items were listed without knowledge of them.
    Proof: docs/proofs/intervals.md. Each pass has its share of the level. Until an item that nobody
        holds is called significant, the subtracted tables depend on held items only, and the cells
        and signs of an item that nobody holds are independent of them.
    """
    parts = np.full(len(rounds.sketches), 1 / len(rounds.sketches)) if shares is None else shares
    significant, counts = np.zeros(points.size, dtype=np.bool_), np.zeros(points.size)
    residual, limit = rounds, 0.0
    for _ in range(_PASSES):
        limit = _limit(residual, level / _PASSES / points.size)
        fresh = ~significant & (_medians(residual, points) > limit)
        if not fresh.any():
            break
        significant |= fresh
        for _ in range(_FITS):
            counts[significant] += _medians(residual, points[significant])
            residual = rounds.subtract(points[significant], parts[:, None] * counts[significant])
    return significant, limit


def _medians(rounds: DecodedRounds, points: U64) -> F64:
    return np.concatenate(
        [
            np.median(rounds.readings(points[k : k + _PIECE]).sum(axis=0), axis=0)
            for k in range(0, points.size, _PIECE)
        ]
    )


def _limit(rounds: DecodedRounds, rate: float) -> float:
    """The reading that an item that nobody holds exceeds with a chance of at most `rate`."""
    tables = rounds.tables
    if len(tables) == 1:
        return absent_limit(tables[0], "median", rate)
    signs = 2 ** (len(tables) - 1)
    is_sample = rounds.fresh or signs > _EXACT_SIGNS
    readings = _row_readings(rounds, signs, is_sample)
    return _median_limit(readings, rate, is_sample=is_sample) if readings.any() else 0.0


def _row_readings(rounds: DecodedRounds, signs: int, is_sample: bool) -> F64:
    """Absolute readings of an item that nobody holds, for each row, (rows, readings): its cell is
    the same in all rounds unless they are fresh, and it has a fair sign in each round."""
    tables = rounds.tables
    count, rows, width = tables.shape
    chance = np.random.Generator(np.random.Philox(rounds.seed))
    if rounds.fresh:
        readings = np.zeros((rows, _DRAWS))
        for table in tables:
            cells = chance.integers(0, width, (rows, _DRAWS))
            coins = chance.integers(0, 2, (rows, _DRAWS)) * 2 - 1
            readings += coins * np.take_along_axis(table, cells, axis=1)
        return np.abs(readings)
    if is_sample:
        ways = chance.integers(0, 2, (-(-_DRAWS // width), count)) * 2 - 1
    else:  # the first round's sign makes no difference to a size
        ways = 1 - 2 * (np.arange(signs)[:, None] >> np.arange(count) & 1)
    sums = np.tensordot(ways.astype(np.float64), tables, axes=1)  # (ways, rows, width)
    return np.abs(sums).transpose(1, 0, 2).reshape(rows, -1)

"""How many keys an invertible sketch lists, and how many it held when listing got stuck.

The table has `rows` × `width` cells, and a key lies in one random cell of every row. Listing peels:
a key alone in a cell is read there and removed from its other cells, again and again. It fails
exactly if some keys form a *stopping set*: every cell that one of them touches, another touches
too. Two keys that share all their cells are the smallest.

There are two ways to size a table. `sized` guarantees a bound on the chance of failure, for any
number of keys up to the given one. `typical_cells` is the rule of paper 001: a table that lists
most of the time. Large tables need 1.5 cells per key for the first, if one in a hundred may fail,
and 1.3 for the second; below 1.22 (`threshold_load`) almost none lists.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from sfumato.arrays import F64
from sfumato.spec import require

EXACT = 512  # sets of up to this many keys are counted exactly, larger ones bounded
ROUNDING = 1e-6  # relative; floats lose less: logarithms of factorials of 100,000 are 1e6 ± 1e-9
TYPICAL = ((99, 20), (300, 15), (1000, 14), (math.inf, 13))  # most cells; cells per ten keys
SMALL_CORE = 2 / 3  # keys per cell of a small core: two that share three cells
SATURATED = 3.5  # least keys per cell if no cell is empty


@functools.lru_cache(maxsize=4096)
def failure_bound(keys: int, rows: int, width: int) -> float:
    """An upper bound on the chance that `keys` distinct keys cannot all be listed.

    The expected number of stopping sets, summed over their sizes: C(keys, size)·P(size)^rows, where
    P(size) is the chance that none of `size` keys is alone in a row (`log_none_alone`).
    Assumes cells that are uniform and independent between keys and rows, chosen without knowledge
    of the keys.

    It is nearly tight if the table is not crowded: then pairs dominate, keys²/2/width^rows. It
    rises steeply to one, and says nothing, below about 1.51 cells per key in three rows (1.59 in
    four, 1.75 in five), although large tables list down to 1.22 (1.29, 1.42): a crowded table that
    fails has very many stopping sets, so their mean is far above the chance of one.

    >>> round(failure_bound(150, 3, 100), 4)  # of 100,000 simulated tables 1.1% failed
    0.0118
    """
    require.at_least(0, keys=keys)
    require.at_least(1, rows=rows, width=width)
    if keys < 2:
        return 0.0
    from scipy import special  # slow to import, and only sizing needs it

    size = np.arange(2, keys + 1, dtype=np.float64)
    log_choices = (
        math.lgamma(keys + 1) - special.gammaln(size + 1) - special.gammaln(keys - size + 1)
    )
    log_means = log_choices + rows * log_none_alone(keys, width)
    if float(log_means.max()) >= 0:
        return 1.0
    return min(1.0, float(np.exp(log_means).sum()) * (1 + ROUNDING))


def log_none_alone(most: int, width: int) -> F64:
    """Logarithm of P(size) for sizes 2 .. most: no key is alone in a row of `width` cells.

    P(size) = size!/width^size · [z^size] (e^z − z)^width. Exact up to `EXACT` keys, except
    for rounding. Beyond, an upper bound: [z^size] F is at most F(z)/z^size at any z > 0, and we
    take nearly the best; it is too high by a factor of up to about √(4π·size).
    """
    from scipy import special  # slow to import, and only sizing needs it

    size = np.arange(2, most + 1, dtype=np.float64)
    logs: F64 = special.gammaln(size + 1) - size * math.log(width)  # of size!/width^size
    exact = min(most, EXACT) - 1
    logs[:exact] += _log_coefficients(exact + 1, width)
    large = size[exact:]
    if large.size:
        point = _saddle(large / width)
        log_cell = point + np.log1p(-point * np.exp(-point))  # of e^z − z
        logs[exact:] += width * log_cell - large * np.log(point)
    return np.minimum(logs, 0.0)


def _log_coefficients(most: int, width: int) -> F64:
    """Logarithm of [z^size] (e^z − z)^width for sizes 2 .. most, by repeated squaring.

    No coefficient of e^z − z = 1 + z²/2 + z³/6 + … is negative, so nothing cancels, and the first
    is one, so no error grows with `width`. With z in units of the saddle point of size most/2 the
    coefficients lie between one, or less by a few digits, and e^(most/2): a float holds them.
    """
    from scipy import special  # slow to import, and only sizing needs it

    unit = float(_saddle(np.array([most / 2 / width]))[0])
    power = np.arange(most + 1, dtype=np.float64)
    square: F64 = np.exp(power * math.log(unit) - special.gammaln(power + 1))
    square[1] = 0.0
    product = np.zeros(most + 1)
    product[0] = 1.0
    left = width
    while left:
        if left & 1:
            product = np.convolve(product, square)[: most + 1]
        left >>= 1
        if left:
            square = np.convolve(square, square)[: most + 1]
    logs: F64 = np.log(product[2:]) - power[2:] * math.log(unit)
    return logs


def _saddle(mean: F64) -> F64:
    """The z at which a cell holds `mean` keys under the law z^k/k! of k = 0, 2, 3, …

    Solves z(e^z − 1)/(e^z − z) = mean by Newton's method in logarithms. The callers' bounds hold at
    any z, so three steps, which leave the mean wrong by less than 1e-5 of it, are enough.
    """
    z = mean / 2 + np.sqrt(mean * mean / 4 + mean)  # right for small and for large means
    for _ in range(3):
        decay = np.exp(-z)
        some = -np.expm1(-z)
        rest = 1 - z * decay
        slope = 1 + z * decay / some + z * (1 - z) * decay / rest
        z = z * np.exp(-np.log(z * some / (rest * mean)) / slope)
    return z


def least_width(keys: int, rows: int, failure: float) -> int:
    """The least width at which `failure_bound` is at most `failure`.

    >>> least_width(150, 3, 0.01)
    106
    """
    require.at_least(0, keys=keys)
    require.at_least(1, rows=rows)
    require(0 < failure < 1, f"failure must be above 0 and below 1; got {failure}")
    if keys < 2:
        return 1
    # Certainly too narrow: fewer cells than keys, or pairs alone make it fail too often.
    pairs = int((math.comb(keys, 2) / failure) ** (1 / rows))
    narrow = max((keys - 1) // rows, pairs - 1)
    wide = 2 * narrow + 1
    while failure_bound(keys, rows, wide) > failure:
        narrow, wide = wide, 2 * wide
    widths = range(narrow + 1, wide)  # `wide` itself is enough, and the answer if none of these is
    return widths.start + bisect_left(
        widths, True, key=lambda width: failure_bound(keys, rows, width) <= failure
    )


@functools.lru_cache(maxsize=256)
def sized(keys: int, failure: float, *, most_rows: int = 6) -> tuple[int, int]:
    """The (rows, width) of fewest cells that fails to list `keys` keys with probability `failure`.

    More rows make it rarer that two keys share all their cells. So rare failures and small tables
    need more rows, and large tables that may fail once in a hundred times need three.

    >>> sized(1000, 0.01), sized(1000, 1e-6)
    ((3, 516), (5, 362))
    """
    require.at_least(3, most_rows=most_rows)
    best = (3, least_width(keys, 3, failure))
    for rows in range(4, most_rows + 1):
        fewer = (best[0] * best[1] - 1) // rows  # the widest that would save a cell
        if fewer >= 1 and failure_bound(keys, rows, fewer) <= failure:
            best = (rows, least_width(keys, rows, failure))
    return best


def threshold_load(rows: int) -> float:
    """Keys per cell at which large tables stop listing: below nearly all list, above none.

    The least of x/(rows·(1 − e^−x)^(rows−1)) over x > 0 (Molloy 2005).

    >>> [round(threshold_load(rows), 6) for rows in (3, 4, 5)]
    [0.818469, 0.77228, 0.70178]
    """
    require.at_least(3, rows=rows)
    return _load(_threshold_rate(rows), rows)


def typical_cells(keys: int, rows: int = 3) -> int:
    """The cells, in whole rows, of a table that lists this many keys most of the time.

    Paper 001 takes 1.3 cells per key, with which small tables fail. Measured for three rows: 2.0
    below 100 cells, 1.5 up to 300, 1.4 up to 1000, then 1.3; for other rows more, in the
    proportion of their `threshold_load`. This is no guarantee; `sized` gives one.

    >>> typical_cells(150), typical_cells(1000), typical_cells(1000, rows=4)
    (225, 1302, 1380)
    """
    require.at_least(1, keys=keys)
    widths = range(2 * keys + 1)  # the last is enough: 2·rows cells per key
    return rows * bisect_left(widths, keys, key=lambda width: typical_keys(rows * width, rows))


def typical_keys(cells: int, rows: int = 3) -> int:
    """The most keys that a table of `cells` lists most of the time; see `typical_cells`.

    >>> typical_keys(225), typical_keys(1302)
    (150, 1001)
    """
    require.at_least(0, cells=cells)
    crowding = threshold_load(3) / threshold_load(rows)
    whole = cells - cells % rows
    for_ten = next(for_ten for up_to, for_ten in TYPICAL if whole <= up_to)
    return int(10 * whole / (for_ten * crowding))


def keys_of_core(left: int, cells: int, *, peeled: int = 0) -> float:
    """How many keys a table of three rows held, if `left` cells stay full after peeling.

    Equation (3) of paper 001, after Molloy (2005): with left/cells = 1 − e^−x·(1 + x) there were
    cells/6 · 2x/(1 − e^−x)² keys, those that could be listed included. Their number, `peeled`, is
    used only where the equation does not hold:

    - Below 0.3577 of the cells. A large table has a larger core or none, so this core consists of
      few keys that share all their cells: there were `peeled`, and about two per three cells left.
    - If all cells are left. The answer is a lower bound: 3.5 keys per cell, or the answer at one
      cell fewer if that is more. At this load a table of 3000 cells is expected to be saturated;
      smaller ones are saturated with fewer keys.

    Error: the measured root mean square is at most 1.2% of the keys with 3000 cells and one key per
        cell, 2.7% with two, 4% with 300 cells and one key per cell. With fewer empty cells it is
        larger: 7% and 14% at three keys per cell.

    >>> round(keys_of_core(500, 1000), 3), keys_of_core(6, 1000, peeled=700)
    (845.746, 704.0)
    """
    require(0 <= left <= cells, f"left must be 0 to cells; got {left} of {cells} cells")
    require.at_least(1, cells=cells)
    require.at_least(0, peeled=peeled)
    if left == cells:
        return max(SATURATED * cells, keys_of_core(cells - 1, cells))
    if left < _core_share(_threshold_rate(3)) * cells:
        return peeled + SMALL_CORE * left
    log_empty = -math.log((cells - left) / cells)  # equals x − log(1 + x), and x < gone + √(2·gone)
    rate = _solve(lambda x: x - math.log1p(x), log_empty, 0.0, log_empty + math.sqrt(2 * log_empty))
    return cells * _load(rate, 3)


def core_of_keys(keys: float, cells: int) -> float:
    """The share of cells expected to stay full after peeling; the inverse of `keys_of_core`.

    Zero below the threshold load of 0.818469 keys per cell, where a large table has no core.

    >>> round(core_of_keys(1000, 1000), 6), core_of_keys(800, 1000)
    (0.72274, 0.0)
    """
    require.at_least(1, cells=cells)
    load = keys / cells
    if load < threshold_load(3):
        return 0.0
    return _core_share(_solve(lambda x: _load(x, 3), load, _threshold_rate(3), 3 * load))


@functools.cache
def _threshold_rate(rows: int) -> float:
    """The x at which `_load` is least: e^x − 1 = (rows − 1)·x."""
    return _solve(lambda x: math.expm1(x) / x, rows - 1, 1.0, float(rows))


def _load(rate: float, rows: int) -> float:
    """Keys per cell of the table, if peeling leaves a Poisson `rate` of them in a cell."""
    return rate / (rows * (-math.expm1(-rate)) ** (rows - 1))


def _core_share(rate: float) -> float:
    """The chance of two keys or more in a cell, at a Poisson `rate`."""
    return 1 - math.exp(-rate) * (1 + rate)


def _solve(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a rising function takes a value, between low and high, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return middle

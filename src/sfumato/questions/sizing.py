"""How large a sketch must be: the formulas of paper 000, and a prediction for our decoder.

Equations (2) and (3) have an unspecified constant. The paper's experiments use 2, which misses the
target error by a factor of up to seven. With 6, plain medians met it in most cases, and missed it
by 1.4 times on Gowalla. So studies are not sized by these equations, but by the error that the
refined decoder is predicted to have (`predicted_spread`); benchmarks/accuracy/targets.py compares
the sizes that follow with the smallest that meet their target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from sfumato.arrays import F64
from sfumato.errors import SpecError

CONSTANT = 6.0
PAPER_CONSTANT = 2.0
RISK = 0.1  # the paper's p: the chance that some item misses the target error
PEELED_FROM = 4.0  # standard deviations from which the refined decoder takes an item out of tables
COMMON = 100  # of the most common items, those whose sampling matters
SMALLEST_WIDTH = 3  # cells per row that a pilot may find sufficient
_STEPS, _FIT = 200, 1e-4  # of the prediction
_SIZES, _GROWTH = 200, 1.05  # of shares, and of deviations, among which a bound takes the worst


def rows_for(items: int, *, risk: float = RISK, paper: bool = False) -> int:
    """ln(2·items/risk) rows; odd, so that the median is one reading, unless `paper`."""
    rows = math.ceil(math.log(2 * items / risk))
    return rows if paper or rows % 2 else rows + 1


def minimax_width(target: float, *, constant: float, devices: int) -> float:
    """Equation (3): enough for any data. `target` is a share of the devices."""
    _check_target(target)
    return constant * min(2 / target, devices)


def instance_width(shares: F64, target: float, *, constant: float, devices: int) -> float:
    """Equation (2): enough for data with these shares.

    >>> instance_width(np.array([.5, .25, .1, .05, .05, .05]), .08, constant=2, devices=10**6)
    8.34375
    """
    _check_target(target)
    heavy = shares >= target
    light = float(np.sum(shares[~heavy] ** 2))
    return constant * min(int(heavy.sum()) + light / target**2, devices)


def tail_bound(shares: F64, *, rows: int, width: int, risk: float, constant: float = 1.0) -> float:
    """Proposition 2.1: the error of one item's median, with probability at least 1 − risk, up to an
    unspecified constant. Rows must be at least ln(1/risk); with ln(items/risk) rows, and the risk
    divided by the items, it is Corollary 2.2's bound for all items.

    For Hybrid rounds `shares` are those of `heterogeneity` (Theorem 3.2). Measured on 2,000 items,
    the constant depends on the law: about 10 for i^-1.1, 15 for i^-1.3 and 100 for i^-2.

    >>> round(tail_bound(np.full(100, .01), rows=7, width=50, risk=.001), 6)
    0.009934
    """
    _check_rows(rows, risk)
    tail = float(np.sum(np.sort(shares)[::-1][width:] ** 2))
    return constant * math.sqrt(math.log(1 / risk) / rows * tail / width)


def fresh_bound(rounds: F64, *, rows: int, width: int, risk: float, constant: float = 1.0) -> float:
    """Theorem 3.1: as `tail_bound` for Fresh rounds, whose shares are (rounds, items)."""
    bound = tail_bound(heterogeneity(rounds), rows=rows, width=width, risk=risk, constant=constant)
    return bound * math.sqrt(math.log(rounds.shape[0] / risk))


def heterogeneity(rounds: F64) -> F64:
    """Theorem 3.2's F, (items,), from the shares of each round, (rounds, items): the root of the
    sum of squares over rounds, divided by their number. At most the mean share; 1/√rounds of it if
    all rounds are alike.

    >>> heterogeneity(np.array([[.5, .5, 0.], [.5, 0., .5]]))
    array([0.35355339, 0.25      , 0.25      ])
    """
    return np.asarray(np.sqrt(np.sum(rounds**2, axis=0)) / rounds.shape[0])


def noise_bound(
    *, items: int, risk: float, epsilon: float, delta: float, cohort: int, rounds: int
) -> float:
    """The second part of Theorem 4.1: the error that noise causes in `rounds` rounds of `cohort`
    devices, up to an unspecified constant; the first part is `tail_bound`.

    >>> once = noise_bound(items=1000, risk=.1, epsilon=1., delta=1e-6, cohort=10_000, rounds=1)
    >>> split = noise_bound(items=1000, risk=.1, epsilon=1., delta=1e-6, cohort=100, rounds=100)
    >>> round(split / once, 6)  # as many devices in a hundred rounds: ten times the noise
    10.0
    """
    logs = math.log(items / risk) * math.log(1 / delta)
    return math.sqrt(logs) / (cohort * math.sqrt(rounds) * epsilon)


def majority_collisions(items: int, rows: int, width: int) -> float:
    """The expected number of items that collide with the heaviest one in a majority of rows.

    Their median is the heaviest item's count, not their own: with fewer rows than the theory
    demands, they set the largest error. Hybrid rounds repeat them; Fresh rounds draw them anew.
    """
    majority = rows // 2 + 1
    return items * math.comb(rows, majority) * float(width) ** -majority


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The standard deviation of an estimate by its causes (paper 000, theorem 4.1), as shares of
    the devices."""

    collisions: float  # with other items in the same cells
    noise: float
    fitted: float  # number of items taken out of the tables

    @property
    def total(self) -> float:
        return math.hypot(self.collisions, self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How estimates are read from tables of some width."""

    rows: int
    noise: float = 0.0
    """The standard deviation of a cell, summed over the rounds, as a share of the devices."""
    rounds: int = 1
    gain: int = 1
    """The number of rounds over which collisions average out: `rounds` for Hybrid and Fresh rounds
    that are alike, otherwise 1."""
    risk: float = 0.5  # about the probability of larger errors than predicted

    @property
    def noise_variance(self) -> float:
        """The part of an estimate's variance that comes from noise, if no item is taken out."""
        return self.noise**2 / self.rows


def predicted_spread(shares: F64, reading: Reading, *, width: float) -> Spread:
    """The error that the refined decoder leaves on data with these shares.

    With the items of a set T left in the tables, a mean of `rows` readings has the variance
    (Σ over T of shares²/(width·gain) + noise²)/rows. Items that are taken out are fitted to the
    cells by least squares: that divides the variance by 1 − fitted/cells, for them and, relative to
    what is left of their shares, for others. An item stays with the probability that its reading is
    below `PEELED_FROM` standard deviations, independently of the others, and every item taken out
    makes the next ones stand out more: the fixed point is reached from above, as by the decoder. Of
    a few items too many may stay by chance, so the sum over T is taken at its normal quantile 1 −
    `risk`.
    """
    from scipy import special  # slow to import

    ranked = np.sort(shares)[::-1]
    squares = ranked**2
    table = reading.rows * width
    most = int(table) // 2  # the decoder fits at most half as many items as there are cells
    peeled_from, deviations = _peeled_from(reading.rounds), _deviations(reading.risk)
    noisy, cells = reading.noise_variance, table * reading.gain
    beyond = float(squares[most:].sum())
    left, fitted = float(squares.sum()), 0.0
    for _ in range(_STEPS):
        spread = math.sqrt((left / cells + noisy) * _inflation(fitted, table))
        if spread == 0:
            break
        stays = special.ndtr(peeled_from - ranked[:most] / spread)
        fitted = float(np.sum(1 - stays))
        chance = deviations * math.sqrt(float(squares[:most] ** 2 @ (stays * (1 - stays))))
        before, left = left, min(left, float(squares[:most] @ stays) + chance + beyond)
        if before - left <= _FIT * before:
            break
    inflation = math.sqrt(_inflation(fitted, table))
    return Spread(
        collisions=inflation * math.sqrt(left / cells),
        noise=inflation * math.sqrt(noisy),
        fitted=fitted,
    )


def _inflation(fitted: float, cells: float) -> float:
    """How many times the variance of a reading is, if so many items are fitted to the cells."""
    return 1 / (1 - min(fitted / cells, 0.5))


def failure(spread: float, target: float, *, items: int, sampling: F64 | None = None) -> float:
    """The probability that some of the items errs by more than the target, at most.

    `sampling` has the standard deviations that devices without an answer add to the most common
    items, as shares of the devices.
    """
    from scipy import special  # slow to import

    common = np.hypot(spread, np.empty(0) if sampling is None else sampling)
    errors, weights = (
        np.append(common, spread),
        np.append(np.ones(common.size), items - common.size),
    )
    with np.errstate(divide="ignore"):
        return float(np.sum(weights * 2 * special.ndtr(-target / errors)))


def largest_spread(
    target: float, *, items: int, risk: float, sampling: F64 | None = None
) -> float | None:
    """The standard deviation of estimates at which a target is met; None if sampling alone misses
    it."""
    _check_target(target)
    if failure(0.0, target, items=items, sampling=sampling) > risk:
        return None
    low, high = 0.0, target
    for _ in range(60):
        middle = (low + high) / 2
        if failure(middle, target, items=items, sampling=sampling) > risk:
            high = middle
        else:
            low = middle
    return low


def width_for(shares: F64, spread: float, reading: Reading, *, most: int) -> int:
    """The least width with which estimates are predicted to have at most this standard deviation,
    except with the reading's risk; at most `most`."""

    def is_enough(width: int) -> bool:
        return predicted_spread(shares, reading, width=width).total <= spread

    low, high = 1, most
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return min(max(high, SMALLEST_WIDTH), most)


def width_for_any(spread: float, reading: Reading, *, mass: float = 1.0) -> float:
    """The width with which estimates have at most this standard deviation, whatever the data.

    Shares sum to `mass`, so of the squares that stay in the tables, the mean and the variance are
    averages over the mass at each size, and so are the cells that fitting takes (`_needs`). The
    worst quantile, mean + z·√variance, is bounded by tangents: √v ≤ v/(2r) + r/2 for every r.
    """
    left = spread**2 - reading.noise_variance
    if left <= 0:
        return math.inf
    sizes = spread * np.linspace(0.01, _peeled_from(reading.rounds) + 4, 1_000)
    mean, variance = _needs(sizes, spread, reading)
    half = _deviations(reading.risk) / 2
    roots = np.sqrt(mass * variance[variance > 0])
    tangents = mean + half * variance / roots[:, None]
    return float(np.min(mass * tangents.max(axis=1) + half * roots)) / (reading.rows * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLimits:
    """What a sample of devices shows of shares, whatever their law.

    They sum to at most `mass`. Their squares have the limits `squares`: the least sum of squares +
    cubes·share³, and the largest of squares − cubes·share³. None was read above `largest`, with
    readings of the standard deviation `error`, and sampling beside; laws under which that has less
    than the probability `level` are excluded.
    """

    mass: float
    devices: int
    squares: tuple[float, float]
    cubes: float
    largest: float
    error: float
    level: float

    @property
    def most(self) -> float:
        """No share is larger: a single one would be too surprising."""
        squared = _deviations(self.level) ** 2
        half = squared / self.devices / 2
        variance = self.largest / self.devices + self.error**2
        return self.largest + half + math.sqrt(half**2 + squared * variance)

    def surprise(self, shares: F64) -> F64:
        """Minus the logarithm of the probability that a share of this size is not read above
        `largest`: of all shares it may sum to −log(level)."""
        from scipy import special  # slow to import

        deviations = np.sqrt(self.error**2 + shares / self.devices)
        return np.asarray(-special.log_ndtr((self.largest - shares) / deviations))


def width_within(
    limits: ShareLimits, spread: float, reading: Reading, *, unless: float = math.inf
) -> float:
    """The width with which estimates have at most this standard deviation, for any data within
    these limits; or some width that is not less than `unless`, which saves time.

    As for `width_for_any`, but the mass at each size is a linear program. With limits on squares, a
    larger deviation than `spread` can need more cells, and the fixed point of `predicted_spread` is
    reached from above: so the worst of them is taken.
    """
    from scipy import optimize  # slow to import

    if spread**2 <= reading.noise_variance:
        return math.inf
    half, worst, deviation = _deviations(reading.risk) / 2, 0.0, spread
    least, most = limits.squares
    bounds = [limits.mass, most, -least, -math.log(limits.level)]
    while True:
        width = width_for_any(deviation, reading, mass=limits.mass)
        if width <= worst or worst >= unless:  # it falls, so larger deviations need less
            return worst
        sizes = np.geomspace(deviation / 100, limits.most, _SIZES)
        mean, variance = _needs(sizes, deviation, reading)
        cubes = limits.cubes * sizes**2
        sums = [np.ones(_SIZES), sizes - cubes, -sizes - cubes, limits.surprise(sizes) / sizes]
        root = math.sqrt(limits.mass * variance.max())
        for _ in range(2):  # the second tangent is at the variance of the first solution
            tangents = mean + half * variance / root
            solution = optimize.linprog(-tangents, A_ub=np.array(sums), b_ub=bounds)
            if not solution.success:  # the limits exclude each other
                return math.inf
            need = half * root - solution.fun
            left = reading.rows * (deviation**2 - reading.noise_variance)
            width = min(width, need / left)
            root = math.sqrt(solution.x @ variance) or root
        worst = max(worst, width)
        deviation *= _GROWTH


def _deviations(risk: float) -> float:
    """The standard deviations that a normal variable exceeds with this probability."""
    return NormalDist().inv_cdf(1 - risk)


def _needs(sizes: F64, deviation: float, reading: Reading) -> tuple[F64, F64]:
    """The squares that stay in the tables per unit of mass in shares of these sizes, with those
    that the cells of fitted items are worth; and their variance.

    A share of x standard deviations stays with probability q = Φ(c − x). Per unit of mass there
    are 1/share such items: share·q of squares stay, with the variance share³·q·(1 − q). The others
    take a cell each, and `_inflation` divides the variance by 1 − fitted/cells; deviation² more
    squares per item have the same effect.
    """
    from scipy import special  # slow to import

    stays, gain = special.ndtr(_peeled_from(reading.rounds) - sizes / deviation), reading.gain
    mean = sizes * stays / gain + deviation**2 * (1 - stays) / sizes
    return mean, sizes**3 * stays * (1 - stays) / gain**2


def _peeled_from(rounds: int) -> float:
    """Standard deviations of a mean of readings; several rounds are peeled by medians."""
    return PEELED_FROM * (math.sqrt(math.pi / 2) if rounds > 1 else 1.0)


def law_of_pilot(largest: F64, *, squares: float, limit: float, items: int) -> F64:
    """Shares of all items, from the largest, the sum of the others' squares, and a limit that no
    other share reaches.

    The others continue the largest as a power law whose squares have that sum. (The paper fits a
    power law to the largest ones and has no such sum; a sketch knows it without decoding, as the
    sum of the squares of its cells, after Alon, Matias and Szegedy 1996.)
    """
    head = np.sort(largest)[::-1]
    rest = items - head.size
    first = float(min(limit, head[-1])) if head.size else limit
    if rest < 1 or squares <= 0 or first <= 0:
        return head
    ranks = np.arange(1, rest + 1) / max(head.size, 1) + 1
    low, high = 0.0, 50.0
    for _ in range(60):
        alpha = (low + high) / 2
        if first**2 * float(np.sum(ranks ** (-2 * alpha))) > squares:
            low = alpha
        else:
            high = alpha
    return np.concatenate([head, first * ranks**-high])


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Shares beta·i^−alpha for ranks i = 1, 2, … as long as they sum to at most one."""

    alpha: float
    beta: float

    def shares(self, items: int) -> F64:
        """The shares of ranks 1 .. i*, i* being the last rank at which the sum is at most one."""
        shares = self.beta * np.arange(1, items + 1, dtype=np.float64) ** -self.alpha
        return shares[np.cumsum(shares) <= 1 + 1e-12]


def fit_power_law(largest: F64, *, noise: float = 0.0, most: int = 20) -> PowerLaw:
    """Fit the largest shares by least squares, as the two-phase method does (paper 000, section 2).

    The fit is in the linear domain, started at the fit of the logarithms. It uses only shares above
    three times the `noise`, and at most `most` of them.
    """
    from scipy import optimize  # slow to import, and only the paper's pilots need it

    ranked = np.sort(largest)[::-1][:most]
    clear = ranked[ranked > max(3 * noise, 0.0)]
    if clear.size < 2:
        raise SpecError(
            f"a power law needs at least two shares above the noise; got {clear.size}",
            hint="use a larger pilot",
        )
    rank = np.arange(1, clear.size + 1, dtype=np.float64)
    slope, intercept = np.polyfit(np.log(rank), np.log(clear), 1)
    start = (max(-slope, 1e-3), min(math.exp(intercept), 1.0))
    fitted = optimize.least_squares(
        lambda law: law[1] * rank ** -law[0] - clear, start, bounds=([1e-3, 1e-12], [50.0, 1.0])
    )
    return PowerLaw(alpha=float(fitted.x[0]), beta=float(fitted.x[1]))


def _check_rows(rows: int, risk: float) -> None:
    if not 0 < risk < 1 or rows < math.log(1 / risk):
        raise SpecError(f"a bound needs at least ln(1/risk) rows; got {rows} rows and risk {risk}")


def _check_target(target: float) -> None:
    if not 0 < target < 1:
        raise SpecError(f"target_error must be above 0 and below 1; got {target}")

"""The privacy cost of mechanisms: losses as data, composed by Google's `dp-accounting`.

A loss says which noise covers which contribution. Losses to the same devices compose; losses to
disjoint cohorts do not add up (the ledger keeps them apart). The neighbouring relation is always
zero-out: one device's message becomes zero and the number of devices is public. A claim for the
replace relation is never made from these numbers: it would need up to twice the sensitivity; the
factor √2 that is often used is not enough (docs/proofs/count_sketch.md).

Where a contribution moves exactly k cells by exactly one, its privacy loss is the k-fold
composition of a one-dimensional shift by one, which is computed exactly (`unit_cells`); nothing is
bounded except by the accountant's discretisation, which rounds up. Where only norms are known,
discrete Gaussian noise of variance v costs at most what continuous Gaussian noise of variance v − 3
costs, which is known exactly (docs/proofs/noise.md); Skellam noise is priced by Rényi bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from sfumato.arrays import F64
from sfumato.errors import SpecError
from sfumato.privacy.noise_kinds import NOISES, Noise
from sfumato.privacy.samplers import LARGEST_SCALE, LEAST_SCALE, log_mass
from sfumato.spec import require, spec

# dp-accounting and scipy take a second to import, and a device never accounts: the functions
# that need them import them.
if TYPE_CHECKING:
    from dp_accounting.pld import privacy_loss_distribution as pld

# Ledgers on disk depend on these, too: a filter's order is one of them.
ORDERS = np.array([1.25, 1.5, *range(2, 65), *range(72, 520, 8), 1024.0, 2048.0])
LISTS_SHARE = 0.25  # of a budget's delta, set aside for lists; ledgers on disk depend on it
LARGEST_MULTIPLIER = 1e4  # of the noise on a table, by its largest norm
_PRECISION = 1e-3  # of a calibrated scale or multiplier, relative; it is rounded up
SMOOTHING = 3.0  # variance by which discrete Gaussian noise is priced as less than it is
_MOST_COMPOSED = 8  # different losses that are composed exactly without a limit: a few seconds,
_MOST_CELLS = 64  # and in all these cells that are moved by one
_SAMPLED_INTERVAL = 1e-3  # grid of losses of sampled rounds; the accountant rounds up
_COARSE = 16.0  # scale up to which divergences of unit shifts are summed: beyond, bounds are close
_NOTHING = -60.0  # logarithm of a part of a sum that no float can show
_MARGIN = 1e-9  # relative, of a delta: for float errors, and for what `SMOOTHING` leaves out


@spec("additive_loss")
class AdditiveLoss:
    """Integer noise on every cell of a table that one device moves within these norms."""

    noise: Noise
    scale: float  # standard deviation (gaussian, skellam) or exponential scale (laplace)
    l1: float
    l2: float
    unit_cells: int  # how many cells are moved by exactly one; 0 if only the norms are known

    @property
    def pure_epsilon(self) -> float:
        """The epsilon with a delta of 0: finite if the noise is pure."""
        return self.l1 / self.scale if NOISES[self.noise].is_pure else math.inf

    def check(self) -> None:
        require.above(0, scale=self.scale)
        require(0 < self.l2 <= self.l1, f"norms must be 0 < l2 <= l1; got {self.l2} and {self.l1}")
        require.at_least(0, unit_cells=self.unit_cells)
        exact = (float(self.unit_cells), math.sqrt(self.unit_cells))
        require(
            self.unit_cells == 0
            or (math.isclose(self.l1, exact[0]) and math.isclose(self.l2, exact[1])),
            f"{self.unit_cells} cells moved by one have norms {exact}; got {(self.l1, self.l2)}",
        )


@spec("approximate_loss")
class ApproximateLoss:
    """The loss of a mechanism of which only (epsilon, delta)-DP is known."""

    epsilon: float
    delta: float

    def check(self) -> None:
        require.above(0, epsilon=self.epsilon)
        require(0 <= self.delta < 1, f"delta must be at least 0, below 1; got {self.delta}")


@spec("sampled_loss")
class SampledLoss:
    """The same loss `times` times, each to a cohort that is drawn at random and kept secret.

    Claim: Poisson sampling, for the zero-out relation; cohorts of a fixed size, for it and for
        replacing a device (which is why it costs more).
    Proof: docs/proofs/sampled_rounds.md. Discrete Gaussian noise under Poisson sampling is priced
        as continuous noise; the rest by Rényi bounds at whole orders.
    """

    loss: AdditiveLoss
    probability: float  # of a device being in a cohort
    scheme: Literal["poisson", "fixed"]
    times: int

    def check(self) -> None:
        require(
            0 < self.probability <= 1,
            f"probability must be above 0, at most 1; got {self.probability}",
        )
        require.at_least(1, times=self.times)
        names = " and ".join(kind.title for kind in NOISES.values() if kind.in_samples)
        require(
            NOISES[self.loss.noise].in_samples,
            f"sampled rounds are accounted for {names} noise; got {self.loss.noise}",
        )


@spec("no_privacy")
class NoPrivacy:
    """A release without noise: the loss is infinite, and is recorded as such."""


Loss = AdditiveLoss | SampledLoss | ApproximateLoss | NoPrivacy


@spec("planned_loss")
class PlannedLoss:
    """The loss of one task of a plan: a list of losses that was fixed before the first task.

    A plan is charged as a whole with the first of its tasks, and covers the others.
    """

    loss: Loss  # of this task, or an upper bound that the plan has for it
    plan: str  # its name
    losses: tuple[Loss, ...]  # all losses of one device
    times: int = 1  # how often each of them occurs

    def check(self) -> None:
        require.at_least(1, times=self.times)
        require(self.loss in self.losses, "a plan covers its own losses only; got another one")

    @property
    def all_losses(self) -> tuple[Loss, ...]:
        return self.losses * self.times


Charge = Loss | PlannedLoss


def loss_of_task(charge: Charge) -> Loss:
    """What one task costs on its own, whether or not it is part of a plan."""
    return charge.loss if isinstance(charge, PlannedLoss) else charge


def epsilon_of(losses: Sequence[Loss], delta: float) -> float:
    """The epsilon of all these losses to the same devices, at this delta; rounded up, never down.

    >>> round(epsilon_of([AdditiveLoss(noise="skellam", scale=9.446669, l1=5, l2=5**0.5,
    ...                                unit_cells=5)], delta=1e-6), 3)
    0.995
    """
    if not 0 <= delta < 1:
        raise SpecError(f"delta must be at least 0 and below 1; got {delta}")
    if any(isinstance(loss, NoPrivacy) for loss in losses):
        return math.inf
    # (epsilon, delta) is pure epsilon except for an event of probability delta; events add up.
    approximate = [loss for loss in losses if isinstance(loss, ApproximateLoss)]
    left = delta - sum(loss.delta for loss in approximate)
    if left < -1e-9 * delta:
        return math.inf
    delta = max(left, 0.0)
    additive = [loss for loss in losses if isinstance(loss, AdditiveLoss)]
    additive += [_pure(loss.epsilon) for loss in approximate]
    sampled = [loss for loss in losses if isinstance(loss, SampledLoss)]
    if not additive and not sampled:
        return 0.0
    if sampled:
        divergences = [*map(renyi, additive), *map(sampled_renyi, sampled)]
        return min(_tight_epsilon(additive, sampled, delta), _renyi_epsilon(divergences, delta))
    pure = sum(loss.pure_epsilon for loss in additive)
    if delta == 0:
        return pure
    if all(loss.unit_cells or NOISES[loss.noise].is_pure for loss in additive):
        return min(pure, float(_composed(additive).get_epsilon_for_delta(delta)))
    bound = _renyi_epsilon([renyi(loss) for loss in additive], delta)
    return min(_tight_epsilon(additive, [], delta), bound)


def _tight_epsilon(
    additive: Sequence[AdditiveLoss], sampled: Sequence[SampledLoss], delta: float
) -> float:
    """The epsilon by exact privacy loss distributions; infinite if a loss has none.

    Discrete Gaussian noise is priced as continuous noise of a smaller variance.
    """
    if delta == 0:
        return math.inf
    squares, coins, exact = 0.0, Counter[tuple[float, float]](), list[AdditiveLoss]()
    for loss in additive:
        if loss.noise == "gaussian" and loss.scale**2 > SMOOTHING:
            squares += _squared_shift(loss)
        elif loss.unit_cells or NOISES[loss.noise].is_pure:
            exact.append(loss)
        else:
            return math.inf
    for each in sampled:
        loss = each.loss
        if loss.noise != "gaussian" or loss.scale**2 <= SMOOTHING:
            return math.inf
        if each.scheme == "poisson" and each.probability == 1:
            squares += each.times * _squared_shift(loss)
        elif each.scheme == "poisson":
            coins[1 / math.sqrt(_squared_shift(loss)), each.probability] += each.times
        else:
            return math.inf
    if not coins and not exact:
        return gaussian_epsilon(math.sqrt(squares), delta)
    return _mixed_epsilon(squares, tuple(coins.items()), tuple(exact), delta)


def _squared_shift(loss: AdditiveLoss) -> float:
    """The squared sensitivity over variance of continuous noise that costs at least as much."""
    return loss.l2**2 / (loss.scale**2 - SMOOTHING)


@lru_cache(maxsize=256)
def _mixed_epsilon(
    squares: float,
    coins: tuple[tuple[tuple[float, float], int], ...],
    exact: tuple[AdditiveLoss, ...],
    delta: float,
) -> float:
    """The epsilon of continuous Gaussian noise, in rounds that everybody or a random sample is in,
    and of losses that are composed exactly; rounded up."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    interval = _SAMPLED_INTERVAL
    if exact:
        interval = _interval(exact)
    else:  # little noise has large losses, for which a coarser grid will do
        interval *= max(1.0, *(0.01 / deviation**2 for (deviation, _), _ in coins))
    parts = [
        pld.from_gaussian_mechanism(
            deviation, sampling_prob=probability, value_discretization_interval=interval
        ).self_compose(times)
        for (deviation, probability), times in coins
    ]
    if squares:
        parts.append(
            pld.from_gaussian_mechanism(
                1 / math.sqrt(squares), value_discretization_interval=interval
            )
        )
    if exact:
        parts.append(_composed(exact))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(delta * (1 - _MARGIN)))


def filter_epsilon(
    campaigns: Sequence[Collection[Sequence[Loss]]], delta: float, limit: float | None
) -> float:
    """The epsilon spent according to a privacy filter for (`limit`, delta): the charges are allowed
    if and only if this is at most `limit`. It is never less than the cost of the same charges as a
    list fixed in advance. Each campaign is a collection of cohorts, and a device is assumed to have
    been in the costliest one.

    Claim: if charges are allowed by this rule only, all releases together are (limit, delta)-DP,
        even where earlier releases decide what is asked next and with how much noise.
    Proof: docs/proofs/ledger.md.

    Without a limit there is no filter: the charges are priced as such a list, by Rényi divergences
    alone if exact composition would take long.
    """
    losses = [loss for cohorts in campaigns for cohort in cohorts for loss in cohort]
    if any(isinstance(loss, NoPrivacy) for loss in losses):
        return math.inf
    if not losses:
        return 0.0
    pure = sum(max(sum(map(_pure_epsilon, cohort)) for cohort in many) for many in campaigns)
    renyi = sum(
        np.max([renyi_divergences(cohort) for cohort in many], axis=0) for many in campaigns
    )
    events = delta_of_lists(campaigns)
    if events > delta * (1 if limit is None else LISTS_SHARE) * (1 + 1e-9):
        return math.inf
    as_list = min(pure, _renyi_epsilon([renyi], max(delta - events, 0.0)))
    if delta == 0:
        return as_list
    if limit is None:
        cells = sum(loss.unit_cells for loss in losses if isinstance(loss, AdditiveLoss))
        is_quick = len(set(losses)) <= _MOST_COMPOSED and cells <= _MOST_CELLS
        return min(as_list, _listed_epsilon(campaigns, delta)) if is_quick else as_list
    place, threshold = _filter_order(limit, (1 - LISTS_SHARE) * delta)
    share = float(renyi[place]) / threshold if threshold > 0 else math.inf
    return max(as_list, min(pure, limit * share))


def _listed_epsilon(campaigns: Sequence[Collection[Sequence[Loss]]], delta: float) -> float:
    """The epsilon of a list of charges that was fixed in advance: by exact composition if the
    cohorts of each campaign cost the same, and at most the sum of what the campaigns cost."""
    different = [{tuple(sorted(cohort, key=repr)) for cohort in cohorts} for cohorts in campaigns]
    share = delta / len(campaigns)
    prices = {cohort: epsilon_of(cohort, share) for cohort in set().union(*different)}
    basic = sum(max(prices[cohort] for cohort in cohorts) for cohorts in different)
    if any(len(cohorts) > 1 for cohorts in different):
        return basic
    return min(basic, epsilon_of([loss for (cohort,) in different for loss in cohort], delta))


def delta_of_lists(campaigns: Sequence[Collection[Sequence[Loss]]]) -> float:
    """The part of delta used by losses that are pure except for an event of some probability."""
    return sum(
        max(
            sum(loss.delta for loss in cohort if isinstance(loss, ApproximateLoss))
            for cohort in cohorts
        )
        for cohorts in campaigns
    )


@lru_cache(maxsize=64)
def _filter_order(epsilon: float, delta: float) -> tuple[int, float]:
    """The one order that a filter for (epsilon, delta) uses, by its place in `ORDERS`, and the
    greatest divergence of that order that implies (epsilon, delta)-DP (Canonne, Kamath, Steinke
    2020, proposition 12). It is the order at which the most Gaussian losses fit."""
    thresholds = epsilon - np.log1p(-1 / ORDERS) + (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    place = int(np.argmax(thresholds / ORDERS))
    return place, float(thresholds[place])


def _pure_epsilon(loss: Loss) -> float:
    """The epsilon of a loss that is pure, or pure except for an event of some probability."""
    if isinstance(loss, ApproximateLoss):
        return loss.epsilon
    return loss.pure_epsilon if isinstance(loss, AdditiveLoss) else math.inf


def renyi_divergences(losses: Sequence[Loss]) -> F64:
    """Rényi divergence of all losses; for those pure except for an event, without that event."""
    total = np.zeros(ORDERS.size)
    for loss in losses:
        if isinstance(loss, SampledLoss):
            total += sampled_renyi(loss)
        elif isinstance(loss, ApproximateLoss):
            total += renyi(_pure(loss.epsilon))
        else:
            assert isinstance(loss, AdditiveLoss)  # losses without noise were handled before
            total += renyi(loss)
    return total


def _renyi_epsilon(divergences: Sequence[F64], delta: float) -> float:
    if delta == 0:
        return math.inf
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    return float(rdp.compute_epsilon(ORDERS, sum(divergences), delta)[0])


def _pure(epsilon: float) -> AdditiveLoss:
    """The loss of anything that is epsilon-DP."""
    return AdditiveLoss(noise="laplace", scale=1 / epsilon, l1=1.0, l2=1.0, unit_cells=0)


def epsilon_text(epsilon: float) -> str:
    """An epsilon for people: four digits, rounded up but for float error, never down.

    >>> epsilon_text(0.99532), epsilon_text(2.0 + 1e-15), epsilon_text(12.3401)
    ('0.9954', '2', '12.35')
    """
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    rounded = Context(prec=4, rounding=ROUND_CEILING).create_decimal(epsilon * (1 - _MARGIN))
    return f"{float(rounded):g}"


def gaussian_stddev(sensitivity: float, epsilon: float, delta: float) -> float:
    """The least standard deviation of continuous Gaussian noise for (epsilon, delta).

    The analytic Gaussian mechanism (Balle and Wang 2018): the starting point for discrete noise,
    and the reference that golden G8 checks.

    >>> round(gaussian_stddev(1.0, 1.0, 1e-6), 6)
    4.224679
    """

    def is_enough(stddev: float) -> bool:
        half, ratio = sensitivity / (2 * stddev), epsilon * stddev / sensitivity
        return _gaussian_delta(half, ratio, epsilon) <= delta

    return _least(is_enough, 0.0, sensitivity, precision=1e-12)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """The epsilon of continuous Gaussian noise whose mean moves by `shift` deviations, rounded up.

    >>> round(gaussian_epsilon(1 / 4.224679, 1e-6), 4)
    1.0
    """
    target = delta * (1 - _MARGIN)

    def is_enough(epsilon: float) -> bool:
        return _gaussian_delta(shift / 2, epsilon / shift, epsilon) <= target

    return 0.0 if is_enough(0.0) else _least(is_enough, 0.0, 1.0, precision=1e-12)


def _gaussian_delta(half: float, ratio: float, epsilon: float) -> float:
    """The delta of continuous Gaussian noise at this epsilon, from half the shift of its mean, in
    deviations, and epsilon over that shift."""
    from scipy import special

    outside = np.exp(epsilon + special.log_ndtr(-half - ratio))
    return float(special.ndtr(half - ratio) - outside)


def _least(
    is_enough: Callable[[float], bool], low: float, high: float, *, precision: float
) -> float:
    """The least number that is enough, relative to this precision and rounded up; `high` is a
    guess, and `low` is not enough."""
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=256)
def calibrate(
    noise: Noise, *, l1: float, l2: float, unit_cells: int, epsilon: float, delta: float
) -> float:
    """The least scale (to a tenth of a per cent, rounded up) at which one release costs epsilon."""
    if not epsilon > 0 or not math.isfinite(epsilon):
        raise SpecError(f"epsilon must be above 0 and finite; got {epsilon}")
    if NOISES[noise].is_pure:
        scale = math.nextafter(l1 / epsilon, math.inf)
        return _within_sampler(noise, scale)
    if not 0 < delta < 1:
        raise SpecError(
            f"{NOISES[noise].title} noise needs a delta above 0 and below 1; got {delta}"
        )

    def cost(scale: float) -> float:
        loss = AdditiveLoss(noise=noise, scale=scale, l1=l1, l2=l2, unit_cells=unit_cells)
        return epsilon_of([loss], delta)

    guess = _within_sampler(noise, gaussian_stddev(l2, epsilon, delta))
    low, high = guess, guess
    while cost(high) > epsilon:
        low, high = high, high * 1.01 if high < 1.05 * guess else high * 1.5
        _within_sampler(noise, high)
    factor = 0.99
    while (low == high or cost(low) <= epsilon) and low > LEAST_SCALE:
        low, high, factor = low * factor, low, factor**2  # small steps first, then larger ones
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    if noise == "gaussian" and not unit_cells:  # known in closed form, unless it is very small
        analytic = gaussian_stddev(l2, epsilon, delta * (1 - 2 * _MARGIN))
        high = min(high, math.sqrt(analytic**2 + SMOOTHING))
    return high


def least_multiplier(cost: Callable[[float], float], epsilon: float) -> float:
    """The least noise multiplier (to a tenth of a per cent, rounded up) at which rounds cost at
    most epsilon; infinite if none up to `LARGEST_MULTIPLIER` is enough.

    >>> least_multiplier(lambda multiplier: 3 / multiplier, 1.5)
    2.0
    """
    low, high = 0.01, 1.0
    while cost(high) > epsilon:
        if high == LARGEST_MULTIPLIER:
            return math.inf
        low, high = high, min(2 * high, LARGEST_MULTIPLIER)
    return _least(lambda multiplier: cost(multiplier) <= epsilon, low, high, precision=_PRECISION)


def _within_sampler(noise: Noise, scale: float) -> float:
    if scale > LARGEST_SCALE[noise]:
        raise SpecError(
            f"{NOISES[noise].title} noise of scale {scale:.6g} is more than the sampler's "
            f"{LARGEST_SCALE[noise]}",
            hint="raise epsilon or delta, or let a device contribute fewer items",
        )
    return scale


def delta_of(loss: AdditiveLoss, epsilon: float) -> float:
    """The delta of a loss of unit cells at this epsilon; rounded up, never down."""
    if not loss.unit_cells:
        raise SpecError("a delta is computed for cells that are moved by exactly one")
    return float(_composed([loss]).get_delta_for_epsilon(epsilon))


def _composed(losses: Sequence[AdditiveLoss]) -> pld.PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as pld

    interval = _interval(losses)
    cells = Counter[tuple[Noise, float]]()  # shifted by one, under each noise of some scale
    parts = []
    for loss in losses:
        if loss.unit_cells:
            cells[loss.noise, loss.scale] += loss.unit_cells
        else:  # pure: any pattern of shifts within l1
            pure = pld.common.DifferentialPrivacyParameters(loss.l1 / loss.scale, 0.0)
            parts.append(pld.from_privacy_parameters(pure, value_discretization_interval=interval))
    parts += [_unit_shift(noise, scale, count, interval) for (noise, scale), count in cells.items()]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return total


def _interval(losses: Sequence[AdditiveLoss]) -> float:
    """The grid of losses: rounding up costs at most one interval per cell, so that their sum is
    small, also beside the losses."""
    cells = sum(loss.unit_cells for loss in losses)
    return min(5e-4 / max(cells, 5), *(2e-3 / max(loss.scale, 1) for loss in losses))


@lru_cache(maxsize=256)
def _unit_shift(
    noise: Noise, scale: float, cells: int, interval: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of `cells` coordinates, each shifted by exactly one under this noise."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    first, logs = log_mass(noise, scale)
    values = range(first, first + logs.size)
    lower = dict(zip(values, logs.tolist(), strict=True))
    upper = {value + 1: log for value, log in lower.items()}
    one = pld.from_two_probability_mass_functions(
        lower, upper, value_discretization_interval=interval
    )
    return one if cells == 1 else one.self_compose(cells)


def renyi(loss: AdditiveLoss, orders: F64 = ORDERS) -> F64:
    """Rényi divergence at each order: bounded from the norms; exact for unit cells with coarse
    noise, for which that bound may be many times too large."""
    bound = NOISES[loss.noise].renyi(orders, loss.l1, loss.l2, loss.scale)
    if not loss.unit_cells or loss.scale > _COARSE:
        return bound
    exact = _unit_renyi(loss.noise, loss.scale, tuple(orders.tolist()))
    return np.minimum(bound, loss.unit_cells * exact)


@lru_cache(maxsize=256)
def _unit_renyi(noise: Noise, scale: float, orders: tuple[float, ...]) -> F64:
    """Rényi divergence of noise from noise that is shifted by one, at each order; infinite where
    the sum would have to go on. Noise is symmetric, so the order of the two does not matter."""
    from scipy import special

    reach = math.ceil(4 * max(orders) + 20 * scale) + 100
    half = NOISES[noise].logs(scale, reach)
    logs = np.concatenate([half[:0:-1], half])
    logs -= special.logsumexp(logs)
    here, shifted = logs[1:], logs[:-1]
    divergences = np.empty(len(orders))
    for place, order in enumerate(orders):
        terms = order * here - (order - 1) * shifted
        total = float(special.logsumexp(terms))
        ends = max(terms[0], terms[-1]) - terms.max()
        divergences[place] = total / (order - 1) if ends < _NOTHING else math.inf
    return divergences * (1 + _MARGIN)


@lru_cache(maxsize=64)
def sampled_renyi(sampled: SampledLoss) -> F64:
    """Rényi divergence of all the rounds at each order; fractional orders are rounded up.

    Poisson: Mironov, Talwar and Zhang 2019, with the moments of this noise instead of a Gaussian's.
    Fixed size: Wang, Balle and Kasiviswanathan 2019, theorem 9, without its pure-DP terms.
    """
    from scipy import special

    fixed = sampled.scheme == "fixed"
    loss = sampled.loss
    if fixed:  # in a cohort without a device, another one takes its place
        loss = AdditiveLoss(
            noise=loss.noise, scale=loss.scale, l1=2 * loss.l1, l2=2 * loss.l2, unit_cells=0
        )
    most = int(ORDERS[-1])
    whole = np.arange(most + 1, dtype=np.float64)
    moments = np.zeros(most + 1)  # log of the j-th moment of the likelihood ratio
    moments[2:] = (whole[2:] - 1) * renyi(loss, whole[2:])
    log_in, log_out = (
        math.log(sampled.probability),
        math.log1p(-sampled.probability) if (sampled.probability < 1) else -math.inf,
    )
    divergences = np.empty(ORDERS.size)
    for place, order in enumerate(np.ceil(ORDERS)):
        j = whole[: int(order) + 1]
        ways = special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
        if fixed:
            terms = ways + j * log_in + moments[: j.size] + math.log(2)
            double = math.log(4) + _log_minus_one(moments[2])
            terms[2] = ways[2] + 2 * log_in + min(double, moments[2] + math.log(2))
            terms[0], terms[1] = 0.0, -math.inf
        else:
            stay = np.where(order > j, (order - j) * log_out if log_out > -math.inf else -np.inf, 0)
            terms = ways + j * log_in + stay + moments[: j.size]
        divergences[place] = max(special.logsumexp(terms), 0.0) / (order - 1)
    unsampled = renyi(loss, np.ceil(ORDERS))  # sampling never adds to the cost
    return sampled.times * np.minimum(divergences, unsampled)


def _log_minus_one(log: float) -> float:
    """log(e**log − 1), for log above 0."""
    return log + math.log(-math.expm1(-log))

"""What rounds with random cohorts cost: against another accountant, and against the exact law."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting import pld  # noqa: F401  # dp_accounting.pld
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from sfumato.errors import BudgetError, SpecError
from sfumato.privacy import AdditiveLoss, Budget, Ledger, Noise, NoPrivacy, accounting, epsilon_of
from sfumato.privacy.accounting import SampledLoss
from sfumato.privacy.noise_kinds import NOISES
from sfumato.spec import from_json, to_json
from unit.privacy import exact

F64 = npt.NDArray[np.float64]
Make = Callable[[AdditiveLoss, float, int], SampledLoss]

SAMPLED = [noise for noise, kind in NOISES.items() if kind.in_samples]
LENGTH = 1000.0  # whole numbers to the norm of a table
DELTA = 1e-6
CLIENTS = 1000
SETTINGS = [(0.01, 100), (0.1, 50), (0.3, 5)]  # probability and rounds
ROUNDING = 1e-9  # of sums of logarithms, relative
ORDERS = [float(order) for order in accounting.ORDERS]
WHOLE = [order for order in ORDERS if order.is_integer()]
LOW = [order for order in WHOLE if order <= 64]  # the best ones here; others take it a minute


def table(multiplier: float, noise: Noise = "gaussian", length: float = LENGTH) -> AdditiveLoss:
    """A table of this norm at the most, in whole numbers: none is longer in L1 than its square."""
    return AdditiveLoss(
        noise=noise, scale=multiplier * length, l1=length**2, l2=length, unit_cells=0
    )


def poisson(loss: AdditiveLoss, probability: float, times: int = 1) -> SampledLoss:
    return SampledLoss(loss=loss, probability=probability, scheme="poisson", times=times)


def fixed(loss: AdditiveLoss, probability: float, times: int = 1) -> SampledLoss:
    return SampledLoss(loss=loss, probability=probability, scheme="fixed", times=times)


# Against dp-accounting


def other_poisson(multiplier: float, probability: float, times: int, orders: list[float]) -> float:
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    one = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, one), times)
    return float(accountant.get_epsilon(DELTA))


def other_fixed(multiplier: float, probability: float, times: int, orders: list[float]) -> float:
    """A replaced device moves a sum by twice its own norm."""
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    one = dp_accounting.GaussianDpEvent(multiplier / 2)
    size = round(probability * CLIENTS)
    event = dp_accounting.SampledWithoutReplacementDpEvent(CLIENTS, size, one)
    accountant.compose(event, times)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("probability", "times"), SETTINGS)
@pytest.mark.parametrize("multiplier", [1.0, 1.5, 2.0, 4.0])
def test_poisson_rounds_cost_what_dp_accounting_finds_at_whole_orders(
    multiplier: float, probability: float, times: int
) -> None:
    """Discrete Gaussian noise has a Gaussian's moments at whole orders, so nothing is lost."""
    ours = renyi_cost(poisson(table(multiplier), probability, times))
    assert math.isclose(
        ours, other_poisson(multiplier, probability, times, WHOLE), rel_tol=ROUNDING
    )


@pytest.mark.parametrize(("probability", "times"), SETTINGS)
@pytest.mark.parametrize("multiplier", [0.7, 1.0, 2.0])
def test_whole_orders_never_cost_less_than_all_orders(
    multiplier: float, probability: float, times: int
) -> None:
    fine = sorted({*ORDERS, *np.arange(2.1, 10, 0.1).round(1).tolist()} - {1.25, 1.5})
    ours = renyi_cost(poisson(table(multiplier), probability, times))
    theirs = other_poisson(multiplier, probability, times, fine)
    assert theirs * (1 - ROUNDING) <= ours <= 1.25 * theirs  # and are not far above


@pytest.mark.parametrize(("probability", "times"), SETTINGS)
@pytest.mark.parametrize("multiplier", [1.0])
def test_poisson_rounds_cost_what_an_exact_accountant_finds(
    multiplier: float, probability: float, times: int
) -> None:
    """dp-accounting's privacy loss distributions of continuous noise, on a finer grid. Ours is
    above it by what a grid of 1e-3 rounds up, and by the variance that is given away."""
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    one = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, one), times)
    theirs = float(accountant.get_epsilon(DELTA))
    loss = poisson(table(multiplier), probability, times)
    ours = epsilon_of([loss], DELTA)
    assert theirs <= ours <= 1.01 * theirs
    assert ours < 0.97 * renyi_cost(loss)


def renyi_cost(loss: SampledLoss) -> float:
    """The epsilon by Rényi divergences alone."""
    divergences = accounting.sampled_renyi(loss)
    return float(compute_epsilon(accounting.ORDERS, divergences, DELTA)[0])


@pytest.mark.parametrize(("probability", "times"), SETTINGS)
@pytest.mark.parametrize("multiplier", [0.7, 1.0, 1.5, 2.0])
def test_fixed_cohorts_cost_what_dp_accounting_finds_for_a_replaced_device(
    multiplier: float, probability: float, times: int
) -> None:
    ours = epsilon_of([fixed(table(multiplier), probability, times)], DELTA)
    assert math.isclose(ours, other_fixed(multiplier, probability, times, LOW), rel_tol=ROUNDING)


@pytest.mark.parametrize(("probability", "times"), SETTINGS)
def test_fixed_cohorts_never_cost_less_than_the_sharper_bound_for_gaussians(
    probability: float, times: int
) -> None:
    """With much noise dp-accounting uses differences of moments (theorem 27 of the same paper)."""
    ours = epsilon_of([fixed(table(4.0), probability, times)], DELTA)
    theirs = other_fixed(4.0, probability, times, LOW)
    assert theirs < ours < 1.2 * theirs


# Against no sampling


@pytest.mark.parametrize("noise", SAMPLED)
@pytest.mark.parametrize(("probability", "times"), [*SETTINGS, (0.9, 3), (1.0, 3)])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0])
def test_sampling_never_costs_more_than_none(
    multiplier: float, probability: float, times: int, noise: Noise
) -> None:
    loss = table(multiplier, noise)
    everybody = epsilon_of([loss] * times, DELTA)
    sampled = epsilon_of([poisson(loss, probability, times)], DELTA)
    if probability < 1:
        # A multiplier of 0.3 wants orders below two, which sampled losses do not have.
        assert sampled < everybody or multiplier < 1
    assert np.all(
        accounting.sampled_renyi(poisson(loss, probability, times))
        <= times * accounting.renyi(loss, np.ceil(accounting.ORDERS)) * (1 + ROUNDING)
    )
    twice = accounting.AdditiveLoss(
        noise=noise, scale=loss.scale, l1=2 * loss.l1, l2=2 * loss.l2, unit_cells=0
    )
    assert np.all(
        accounting.sampled_renyi(fixed(loss, probability, times))
        <= times * accounting.renyi(twice, np.ceil(accounting.ORDERS)) * (1 + ROUNDING)
    )


def test_everybody_every_time_is_no_sampling() -> None:
    everybody = np.array(accounting.sampled_renyi(poisson(table(1.0), 1.0, 7)))
    assert np.allclose(
        everybody, 7 * accounting.renyi(table(1.0), np.ceil(accounting.ORDERS)), rtol=ROUNDING
    )


def test_cost_grows_with_probability_rounds_and_less_noise() -> None:
    settings: list[tuple[Make, float]] = [(poisson, 1.0), (fixed, 2.0)]
    for make, multiplier in settings:
        by_chance = [epsilon_of([make(table(multiplier), p, 20)], DELTA) for p in (0.01, 0.05, 0.2)]
        by_rounds = [epsilon_of([make(table(multiplier), 0.05, t)], DELTA) for t in (1, 10, 100)]
        by_noise = [epsilon_of([make(table(z), 0.05, 20)], DELTA) for z in (4.0, 2.0, 1.0)]
        for costs in (by_chance, by_rounds, by_noise):
            assert costs == sorted(set(costs))
    assert epsilon_of([fixed(table(2.0), 0.05, 20)], DELTA) > epsilon_of(
        [poisson(table(2.0), 0.05, 20)], DELTA
    )


# Skellam noise


@pytest.mark.parametrize("make", [poisson, fixed])
@pytest.mark.parametrize(("probability", "times"), SETTINGS)
def test_skellam_noise_costs_a_little_more_and_less_so_the_finer_it_is(
    make: Make, probability: float, times: int
) -> None:
    gaussian = renyi_cost(make(table(1.0), probability, times))
    costs = [
        epsilon_of([make(table(1.0, "skellam", length), probability, times)], DELTA)
        for length in (10.0, 100.0, 1000.0, 10_000.0)
    ]
    assert costs == sorted(costs, reverse=True)
    assert gaussian < costs[-1] < costs[-2] < gaussian * (1 + 1e-4)
    assert costs[0] > gaussian * 1.001


# Against the exact law: one cell, moved by STEP under discrete Gaussian noise

STEP, REACH = 2, 60  # a deviation is 2 to 6, and an order of 8 looks at places around 16


def laws(noise: Noise, scale: float, moved: int) -> F64:
    """The masses of noise around `moved`, at −REACH .. REACH."""
    whole = exact.masses(noise, scale, REACH + abs(moved))
    middle = REACH + abs(moved)
    return whole[middle - REACH - moved : middle + REACH + 1 - moved]


def mixtures(noise: Noise, scale: float, probability: float) -> tuple[F64, F64]:
    """The release with a device that is asked by chance, and with one that sends zero."""
    without = laws(noise, scale, 0)
    return (1 - probability) * without + probability * laws(noise, scale, STEP), without


def renyi(one: F64, other: F64, order: int) -> float:
    logs = order * np.log(one) + (1 - order) * np.log(other)
    return float(np.logaddexp.reduce(logs)) / (order - 1)


@pytest.mark.parametrize("probability", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("multiplier", [1.0, 1.7])
def test_at_whole_orders_the_divergence_is_exact_and_the_other_way_round_is_no_larger(
    multiplier: float, probability: float
) -> None:
    loss = table(multiplier, length=float(STEP))
    claimed = accounting.sampled_renyi(poisson(loss, probability))
    with_it, without = mixtures("gaussian", multiplier * STEP, probability)
    for order in range(2, 9):
        claim = claimed[ORDERS.index(order)]
        assert math.isclose(renyi(with_it, without, order), claim, rel_tol=1e-9)
        assert renyi(without, with_it, order) <= claim


def test_half_the_probability_is_caught_at_every_order() -> None:
    """The negative control."""
    claimed = accounting.sampled_renyi(poisson(table(1.0, length=float(STEP)), 0.1))
    with_it, without = mixtures("gaussian", 1.0 * STEP, 0.2)
    for order in range(2, 9):
        assert renyi(with_it, without, order) > 1.5 * claimed[ORDERS.index(order)]


@pytest.mark.parametrize("probability", [0.05, 0.3])
@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_skellam_divergences_are_bounded_both_ways(multiplier: float, probability: float) -> None:
    claimed = accounting.sampled_renyi(
        poisson(table(multiplier, "skellam", float(STEP)), probability)
    )
    with_it, without = mixtures("skellam", multiplier * STEP, probability)
    for order in range(2, 7):
        claim = claimed[ORDERS.index(order)]
        assert renyi(without, with_it, order) <= renyi(with_it, without, order) <= claim


def delta_of(one: F64, other: F64, times: int, epsilon: float) -> float:
    """The hockey-stick divergence of `times` independent rounds, the worse way round."""
    first, second = one, other
    for _ in range(times - 1):
        first, second = np.outer(first, one).ravel(), np.outer(second, other).ravel()
    grown = math.exp(epsilon)
    return max(
        float(np.maximum(first - grown * second, 0).sum()),
        float(np.maximum(second - grown * first, 0).sum()),
    )


@pytest.mark.parametrize("noise", SAMPLED)
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("probability", [0.05, 0.5])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_the_exact_delta_of_sampled_rounds_is_below_the_claimed_one(
    noise: Noise, times: int, probability: float, delta: float
) -> None:
    loss = table(1.0, noise, float(STEP))
    epsilon = epsilon_of([poisson(loss, probability, times)], delta)
    assert delta_of(*mixtures(noise, loss.scale, probability), times, epsilon) <= delta


@pytest.mark.parametrize("times", [1, 2, 3])
def test_too_small_a_probability_is_caught_by_the_exact_delta(times: int) -> None:
    """The negative control: Rényi bounds are not sharp at one order, so halves are not caught in
    every setting; in this one they are."""
    loss = table(1.0, length=float(STEP))
    epsilon = epsilon_of([poisson(loss, 0.25, times)], 1e-2)
    assert delta_of(*mixtures("gaussian", loss.scale, 0.5), times, epsilon) > 1e-2


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("probability", [0.05, 0.5])
@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_the_exact_delta_of_fixed_cohorts_is_below_the_claimed_one(
    multiplier: float, probability: float, times: int
) -> None:
    """Another device is there in its place, and pulls the other way; the device is replaced by one
    like that, by nothing, or by its opposite."""
    loss = table(multiplier, length=float(STEP))
    delta = 1e-4
    epsilon = epsilon_of([fixed(loss, probability, times)], delta)
    places = [laws("gaussian", loss.scale, moved) for moved in (-STEP, 0, STEP)]
    for another, one, other in itertools.product(places, repeat=3):
        first = (1 - probability) * another + probability * one
        second = (1 - probability) * another + probability * other
        assert delta_of(first, second, times, epsilon) <= delta


def test_the_price_of_coins_does_not_cover_cohorts_of_a_fixed_size() -> None:
    """The negative control: why they cost more. Another device, which pulls the other way, takes
    the place of a device that is not asked, so that being asked is visible."""
    loss = table(2.0, length=float(STEP))
    delta = 1e-4
    epsilon = epsilon_of([poisson(loss, 0.5, 2)], delta)
    another, one, other = (laws("gaussian", loss.scale, moved) for moved in (-STEP, STEP, -STEP))
    first, second = (0.5 * another + 0.5 * law for law in (one, other))
    assert delta_of(first, second, 2, epsilon) > delta


# As data


def test_sampled_rounds_compose_with_other_losses() -> None:
    rounds, once = poisson(table(1.0), 0.05, 20), table(3.0)
    both = epsilon_of([rounds, once], DELTA)
    assert max(epsilon_of([rounds], DELTA), epsilon_of([once], DELTA)) < both
    assert both < epsilon_of([rounds], DELTA / 2) + epsilon_of([once], DELTA / 2)
    assert math.isclose(
        epsilon_of([poisson(table(1.0), 0.05, 10)] * 2, DELTA),
        epsilon_of([rounds], DELTA),
        rel_tol=ROUNDING,
    )
    assert epsilon_of([rounds, NoPrivacy()], DELTA) == math.inf
    assert epsilon_of([rounds], 0.0) == math.inf


def test_the_ledger_takes_sampled_rounds_and_refuses_too_many() -> None:
    ledger = Ledger(Budget(epsilon=2.0, delta=DELTA))
    rounds = poisson(table(1.0), 0.01, 100)
    ledger.charge(campaign="first", cohort="everybody", task="a", loss=rounds)
    assert ledger.spent() == epsilon_of([rounds], DELTA)
    assert ledger.entries()[0].loss == rounds
    with pytest.raises(BudgetError, match="allows epsilon 2"):
        ledger.charge(
            campaign="second",
            cohort="everybody",
            task="b",
            loss=poisson(table(1.0), 0.1, 100),
        )
    assert len(ledger.entries()) == 1


@pytest.mark.parametrize("make", [poisson, fixed])
def test_a_sampled_loss_is_a_spec(make: Make) -> None:
    loss = make(table(1.0, "skellam"), 0.25, 3)
    assert from_json(to_json(loss)) == loss


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probability": 0.0}, "probability must be above 0, at most 1; got 0"),
        ({"probability": 1.5}, "probability must be above 0, at most 1; got 1.5"),
        ({"probability": math.nan}, "probability|finite|NaN"),
        ({"times": 0}, "times must be at least 1; got 0"),
        ({"scheme": "cyclic"}, "scheme"),
        (
            {"loss": AdditiveLoss(noise="laplace", scale=1.0, l1=1.0, l2=1.0, unit_cells=0)},
            "Gaussian and Skellam noise; got laplace",
        ),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "loss": table(1.0),
        "probability": 0.1,
        "scheme": "poisson",
        "times": 1,
    }
    with pytest.raises(SpecError, match=message):
        SampledLoss(**{**good, **fields})  # type: ignore[arg-type]  # the wrong ones are meant

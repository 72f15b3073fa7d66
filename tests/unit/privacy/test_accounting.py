"""Epsilon is as claimed: golden numbers, brute force, and never less than the truth."""

from __future__ import annotations

import itertools
import math

import mpmath  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.errors import SpecError
from sfumato.privacy import AdditiveLoss, Noise, NoPrivacy, calibrate, epsilon_of, gaussian_stddev
from sfumato.privacy.accounting import SMOOTHING, gaussian_epsilon, least_multiplier, renyi
from sfumato.privacy.noise_kinds import NOISES
from sfumato.sketch import CountSketch, Norms, OneHot
from sfumato.spec import from_json, to_json
from unit.privacy import exact

IMPURE = [noise for noise, kind in NOISES.items() if not kind.is_pure]
SIGMA = 9.446669  # golden G8: epsilon 1, delta 1e-6, five rows
DELTA = 1e-6
SLACK = 5e-4  # most that rounding up may add: one interval per cell, 5e-4 in all
ROOT = 1e-11  # precision of the oracle's epsilon
CUT = 1e-14  # most that cutting tails may add to delta: 1e-15 per composition


def units(noise: Noise, scale: float, cells: int) -> AdditiveLoss:
    """A device that moves `cells` cells by one each."""
    return AdditiveLoss(
        noise=noise, scale=scale, l1=float(cells), l2=math.sqrt(cells), unit_cells=cells
    )


def bounded(noise: Noise, scale: float, norms: Norms) -> AdditiveLoss:
    return AdditiveLoss(noise=noise, scale=scale, l1=norms.l1, l2=norms.l2, unit_cells=0)


# Golden numbers


@pytest.mark.parametrize(("noise", "golden"), [("gaussian", "1.0003"), ("skellam", "0.9953")])
def test_five_rows_at_the_golden_deviation_cost_the_golden_epsilon(
    noise: Noise, golden: str
) -> None:
    assert f"{epsilon_of([units(noise, SIGMA, 5)], DELTA):.4f}" == golden


def test_norms_alone_cost_the_golden_renyi_epsilon_with_skellam_noise() -> None:
    loss = bounded("skellam", SIGMA, Norms(l1=5.0, l2=math.sqrt(5)))
    assert f"{epsilon_of([loss], DELTA):.3f}" == "1.085"


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-6, 1e-9])
def test_a_long_vector_gets_the_analytic_noise(epsilon: float, delta: float) -> None:
    """Within a thousandth: the variance that is given away is 3, of some 10⁵ or more."""
    scale = calibrate("gaussian", l1=1e6, l2=1e3, unit_cells=0, epsilon=epsilon, delta=delta)
    analytic = gaussian_stddev(1e3, epsilon, delta)
    assert analytic <= scale <= 1.001 * analytic
    assert epsilon_of([bounded("gaussian", scale, Norms(l1=1e6, l2=1e3))], delta) <= epsilon


@pytest.mark.slow
def test_ten_rounds_cost_much_less_than_ten_times_one() -> None:
    """3.527 with losses rounded up to 1e-4; here to 1e-5, and what fifty cells round adds up."""
    spent = epsilon_of([units("gaussian", SIGMA, 5)] * 10, DELTA)
    assert 3.527 - 50 * 1e-4 < spent <= 3.53


@pytest.mark.parametrize(
    ("epsilon", "delta", "sensitivity", "golden"),
    [
        (1.0, 1e-6, 1.0, "4.224679"),
        (1.0, 1e-6, math.sqrt(5), "9.446669"),
        (0.5, 1e-5, 1.0, "7.031827"),
        (8.0, 1e-6, 1.0, "0.652935"),
    ],
)
def test_analytic_deviations_are_golden(
    epsilon: float, delta: float, sensitivity: float, golden: str
) -> None:
    assert f"{gaussian_stddev(sensitivity, epsilon, delta):.6f}" == golden


# Against the truth

SHIFTS = [(1,), (3,), (6,), (3, 4), (1, 6), (4, 4)]


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("scale", [2.0, 5.0, 12.0])
def test_gaussian_noise_on_a_vector_costs_no_less_than_the_truth(
    scale: float, shift: tuple[int, ...], delta: float
) -> None:
    """All tables are listed. By Rényi bounds, or as continuous noise of a smaller variance."""
    loss, truth = shift_loss(scale, shift), exact_epsilon(scale, shift, delta)
    priced = gaussian_epsilon(loss.l2 / math.sqrt(scale**2 - SMOOTHING), delta)
    assert truth <= epsilon_of([loss], delta) <= priced
    if len(shift) == 1:
        assert exact_epsilon(scale, shift * 2, delta) <= epsilon_of([loss, loss], delta)


def test_discrete_noise_may_cost_more_than_continuous_noise_of_its_variance() -> None:
    """The control: this is why a part of the variance is given away."""
    costs = [exact_epsilon(2.0, shift, DELTA) for shift in SHIFTS]
    as_continuous = [gaussian_epsilon(math.hypot(*shift) / 2.0, DELTA) for shift in SHIFTS]
    assert any(cost > other + 0.01 for cost, other in zip(costs, as_continuous, strict=True))


@pytest.mark.parametrize("center", [0.0, 0.13, 0.5])
def test_rounding_continuous_noise_at_random_gives_discrete_noise(center: float) -> None:
    """The map of the proof: a whole number near y, with discrete Gaussian weights of variance 3.
    Its result differs from discrete Gaussian noise by a factor of at most 1 ± 10⁻²⁴, which here is
    float error; of variance 0.2 it would differ visibly."""
    assert map_error(SMOOTHING, center) < 1e-12
    assert map_error(0.2, center) > 1e-6


def map_error(given_away: float, center: float) -> float:
    """The largest relative error of the weights of whole numbers near `center`, added up: what the
    proof's map divides by, beside what it would have to."""
    near = np.arange(-60, 61) - center
    total = float(np.exp(-(near**2) / (2 * given_away)).sum())
    return abs(total / math.sqrt(2 * math.pi * given_away) - 1)


def shift_loss(scale: float, shift: tuple[int, ...]) -> AdditiveLoss:
    l2 = math.hypot(*shift)
    return bounded("gaussian", scale, Norms(l1=max(float(sum(shift)), l2), l2=l2))


def exact_epsilon(scale: float, shift: tuple[int, ...], delta: float) -> float:
    reach = math.ceil(10 * scale) + max(shift)
    return exact.epsilon_of_shift("gaussian", scale, shift, delta, reach)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("cells", [1, 5])
@pytest.mark.parametrize("scale", [0.7, 3.0, 20.0])
def test_gaussian_epsilon_is_never_below_the_truth_and_just_above(
    scale: float, cells: int, delta: float
) -> None:
    """The truth: the sum over the law of the sum of the cells, on which alone the loss depends."""
    epsilon = epsilon_of([units("gaussian", scale, cells)], delta)
    reach = math.ceil(15 * scale) + 5
    assert exact.delta_of_units("gaussian", scale, cells, epsilon, reach) <= delta
    assert exact.delta_of_units("gaussian", scale, cells, epsilon - SLACK, reach) >= delta - CUT


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("cells", [1, 2, 5, 17])
@pytest.mark.parametrize("scale", [0.7, 3.0, 20.0])
def test_laplace_epsilon_is_never_below_the_truth_and_just_above(
    scale: float, cells: int, delta: float
) -> None:
    """The truth: how many of the cells are above zero is binomial, and all that the loss needs."""
    epsilon = epsilon_of([units("laplace", scale, cells)], delta)
    assert exact.delta_of_units("laplace", scale, cells, epsilon, 0) <= delta
    if epsilon > SLACK:
        assert exact.delta_of_units("laplace", scale, cells, epsilon - SLACK, 0) >= delta - CUT


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("cells", [1, 2])
@pytest.mark.parametrize("scale", [0.8, 2.5, 6.0])
def test_epsilon_agrees_with_a_sum_over_all_tables(noise: Noise, cells: int, scale: float) -> None:
    """Tables of one and two cells are listed, each with both its probabilities."""
    truth = exact.epsilon_of_shift(noise, scale, (1,) * cells, DELTA, math.ceil(40 * scale))
    claim = epsilon_of([units(noise, scale, cells)], DELTA)
    assert truth - ROOT <= claim <= truth + SLACK


def test_a_claim_made_from_too_little_noise_is_caught_by_the_sum_over_all_tables() -> None:
    """The negative control: 1% less noise than the claim was made for."""
    claim = epsilon_of([units("gaussian", 2.5, 2)], DELTA)
    assert exact.epsilon_of_shift("gaussian", 2.5 * 0.99, (1, 1), DELTA, 60) > claim


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("items", [2, 3])
@pytest.mark.parametrize("scale", [0.6, 2.0, 5.0])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rows", [1, 2])
def test_several_items_never_cost_more_than_claimed(
    noise: Noise, rows: int, scale: float, items: int, delta: float
) -> None:
    """Every way in which the items of one device can move a table of at most two cells.

    One row of two cells, or two rows where all items met in one cell each: moves (a, b) with
    |a| + |b| at most items, or both at most items.
    """
    sketch = CountSketch(rows=rows, width=2, seed=1)
    claim = epsilon_of([bounded(noise, scale, sketch.sensitivity(items))], delta)
    for a, b in itertools.product(range(items + 1), repeat=2):  # signs do not matter: symmetry
        if (a + b <= items) if rows == 1 else True:
            reach = math.ceil(20 * scale) + 12
            assert exact.delta_of_shift(noise, scale, (a, b), claim, reach) <= delta


def test_the_norm_of_different_cells_would_not_cover_items_in_one() -> None:
    """The negative control: l2 = √items·√rows, which holds only if items never collide."""
    wrong = bounded("gaussian", 5.0, Norms(l1=3.0, l2=math.sqrt(3)))
    claim = epsilon_of([wrong], DELTA)
    assert exact.delta_of_shift("gaussian", 5.0, (3, 0), claim, 75) > DELTA


def test_several_items_in_a_known_domain_never_cost_more_than_claimed() -> None:
    for noise, items in itertools.product(NOISES, (2, 4)):
        norms = OneHot(categories=2).sensitivity(items)
        claim = epsilon_of([bounded(noise, 4.0, norms)], DELTA)
        for count in range(items + 1):
            shift = (count, items - count)
            assert exact.delta_of_shift(noise, 4.0, shift, claim, 90) <= DELTA


# Composition


def test_losses_of_different_scales_compose() -> None:
    """The truth: two cells, one under each noise, as one table of two cells would be."""
    losses = [units("gaussian", 3.0, 1), units("gaussian", 30.0, 1)]
    alone = [epsilon_of([loss], DELTA) for loss in losses]
    together = epsilon_of(losses, DELTA)
    assert max(alone) < together < sum(alone)
    here = np.outer(exact.masses("gaussian", 3.0, 60), exact.masses("gaussian", 30.0, 500))
    there = here[:-1, :-1] - math.exp(together) * here[1:, 1:]
    assert np.maximum(there, 0).sum() <= DELTA


def test_losses_of_different_noises_compose() -> None:
    losses = [units("gaussian", 9.0, 5), units("skellam", 80.0, 3), units("laplace", 40.0, 2)]
    together = epsilon_of(losses, DELTA)
    assert max(epsilon_of([loss], DELTA) for loss in losses) <= together
    assert together <= sum(epsilon_of([loss], DELTA / 3) for loss in losses) + SLACK


def test_bounded_laplace_composes_with_exact_losses() -> None:
    """A device with several items under Laplace noise is a pure loss; the rest is as it was."""
    pure = bounded("laplace", 20.0, Norms(l1=2.0, l2=2.0))
    one = units("gaussian", 9.0, 5)
    together = epsilon_of([one, pure], DELTA)
    assert epsilon_of([one], DELTA) < together <= epsilon_of([one], DELTA) + 0.1 + SLACK


def test_a_loss_known_by_its_norms_makes_the_whole_go_by_renyi() -> None:
    several = bounded("gaussian", 20.0, CountSketch(rows=5, width=2, seed=1).sensitivity(2))
    one = units("gaussian", 9.0, 5)
    together = epsilon_of([several, one], DELTA)
    norms_only = [several, bounded("gaussian", 9.0, Norms(l1=5.0, l2=math.sqrt(5)))]
    assert together == epsilon_of(norms_only, DELTA)
    assert together > max(epsilon_of([several], DELTA), epsilon_of([one], DELTA))


def test_the_order_of_losses_does_not_matter() -> None:
    """Up to the accountant's float error, far below its rounding."""
    losses = [units("gaussian", 9.0, 5), units("skellam", 12.0, 3), units("laplace", 8.0, 2)]
    costs = [epsilon_of(order, DELTA) for order in itertools.permutations(losses)]
    assert max(costs) - min(costs) < SLACK


def test_no_losses_cost_nothing() -> None:
    assert epsilon_of([], DELTA) == 0


def test_a_release_without_noise_costs_everything() -> None:
    assert epsilon_of([units("gaussian", SIGMA, 5), NoPrivacy()], DELTA) == math.inf


# Delta


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("cells", [0, 5])
def test_without_delta_only_pure_noise_is_finite(noise: Noise, cells: int) -> None:
    loss = AdditiveLoss(noise=noise, scale=SIGMA, l1=5.0, l2=math.sqrt(5), unit_cells=cells)
    assert math.isfinite(epsilon_of([loss], 0.0)) == NOISES[noise].is_pure


def test_laplace_is_pure() -> None:
    losses = [units("laplace", 4.0, 5), bounded("laplace", 10.0, Norms(l1=3.0, l2=3.0))]
    assert epsilon_of(losses[:1], 0.0) == 5 / 4
    assert epsilon_of(losses, 0.0) == 5 / 4 + 3 / 10


@pytest.mark.parametrize("delta", [1e-20, 1e-15, 1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize(("cells", "epsilon"), [(1, 0.7), (5, 0.1), (17, 3.0)])
def test_delta_never_makes_laplace_cost_more_than_its_pure_epsilon(
    cells: int, epsilon: float, delta: float
) -> None:
    scale = calibrate(
        "laplace",
        l1=float(cells),
        l2=math.sqrt(cells),
        unit_cells=cells,
        epsilon=epsilon,
        delta=0.0,
    )
    assert epsilon_of([units("laplace", scale, cells)], delta) <= epsilon


@pytest.mark.parametrize("delta", [-1e-9, 1.0, 2.0, math.nan])
def test_impossible_deltas_are_refused(delta: float) -> None:
    with pytest.raises(SpecError, match="delta must be at least 0 and below 1"):
        epsilon_of([units("gaussian", SIGMA, 5)], delta)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("cells", [0, 5])
def test_more_noise_and_more_delta_cost_less(noise: Noise, cells: int) -> None:
    def cost(scale: float, delta: float) -> float:
        loss = AdditiveLoss(noise=noise, scale=scale, l1=5.0, l2=math.sqrt(5), unit_cells=cells)
        return epsilon_of([loss], delta)

    by_scale = [cost(scale, DELTA) for scale in (2.0, 3.0, 5.0, 9.0, 30.0, 200.0)]
    by_delta = [cost(9.0, delta) for delta in (1e-12, 1e-9, 1e-6, 1e-3, 1e-1)]
    assert by_scale == sorted(by_scale, reverse=True)
    assert by_delta == sorted(by_delta, reverse=True)


# Calibration


@pytest.mark.parametrize("noise", IMPURE)
@pytest.mark.parametrize(
    ("cells", "epsilon", "delta"), [(1, 1.0, 1e-6), (1, 8.0, 1e-6), (5, 0.1, 1e-9), (17, 1.0, 1e-6)]
)
def test_a_calibrated_scale_meets_epsilon_and_is_nearly_the_least(
    noise: Noise, cells: int, epsilon: float, delta: float
) -> None:
    """Found to a tenth of a per cent; 0.2% less noise costs too much."""
    scale = calibrate(
        noise, l1=float(cells), l2=math.sqrt(cells), unit_cells=cells, epsilon=epsilon, delta=delta
    )
    assert epsilon_of([units(noise, scale, cells)], delta) <= epsilon
    assert epsilon_of([units(noise, scale * 0.998, cells)], delta) > epsilon


@settings(max_examples=30, deadline=None)
@given(
    epsilon=st.floats(0.01, 20),
    items=st.integers(1, 20),
    rows=st.integers(1, 20),
    noise=st.sampled_from(list(NOISES)),
)
def test_bounds_of_any_norms_are_calibrated(
    epsilon: float, items: int, rows: int, noise: Noise
) -> None:
    norms = Norms(l1=float(rows * items), l2=items * math.sqrt(rows))
    try:
        scale = calibrate(
            noise, l1=norms.l1, l2=norms.l2, unit_cells=0, epsilon=epsilon, delta=DELTA
        )
    except SpecError as problem:
        assert "more than the sampler's" in str(problem)  # noqa: PT017  # either outcome is right
        return
    assert epsilon_of([bounded(noise, scale, norms)], DELTA) <= epsilon
    assert epsilon_of([bounded(noise, scale * 0.998, norms)], DELTA) > epsilon * 0.999


def test_laplace_is_calibrated_to_the_pure_epsilon() -> None:
    scale = calibrate("laplace", l1=5.0, l2=math.sqrt(5), unit_cells=5, epsilon=0.7, delta=0.0)
    assert 5 / 0.7 <= scale <= 5 / 0.7 * (1 + 1e-15)
    assert epsilon_of([units("laplace", scale, 5)], 0.0) <= 0.7


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_impossible_epsilons_are_not_calibrated(epsilon: float) -> None:
    with pytest.raises(SpecError, match="epsilon must be above 0"):
        calibrate("gaussian", l1=1.0, l2=1.0, unit_cells=1, epsilon=epsilon, delta=DELTA)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_gaussian_noise_is_not_calibrated_without_a_delta(delta: float) -> None:
    with pytest.raises(SpecError, match="discrete Gaussian noise needs a delta"):
        calibrate("gaussian", l1=1.0, l2=1.0, unit_cells=1, epsilon=1.0, delta=delta)


def test_more_noise_than_the_sampler_has_is_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="more than the sampler's 65536") as caught:
        calibrate("gaussian", l1=5.0, l2=math.sqrt(5), unit_cells=5, epsilon=1e-5, delta=1e-9)
    assert caught.value.hint is not None


# Losses as data


def test_losses_are_specs() -> None:
    for loss in (units("skellam", SIGMA, 5), NoPrivacy()):
        assert from_json(to_json(loss)) == loss


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": math.nan},
        {"l2": 0.0},
        {"l2": 6.0},
        {"unit_cells": -1},
        {"noise": "uniform"},
    ],
)
def test_losses_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {
        "noise": "gaussian",
        "scale": 2.0,
        "l1": 5.0,
        "l2": math.sqrt(5),
        "unit_cells": 5,
    }
    AdditiveLoss(**right)  # type: ignore[arg-type]  # the values match their names
    with pytest.raises(SpecError):
        AdditiveLoss(**{**right, **wrong})  # type: ignore[arg-type]  # wrong on purpose


def test_unit_cells_that_contradict_the_norms_are_refused() -> None:
    """One path reads the cells, the other the norms: both must tell of one contribution."""
    with pytest.raises(SpecError):
        AdditiveLoss(noise="gaussian", scale=9.0, l1=500.0, l2=100.0, unit_cells=1)


@pytest.mark.parametrize("noise", ["gaussian", "skellam"])
@pytest.mark.parametrize("scale", [0.3, 0.7, 1.5, 4.0])
@pytest.mark.parametrize("order", [1.25, 2.0, 7.0, 32.0])
def test_the_divergence_of_a_unit_shift_is_exact(noise: Noise, scale: float, order: float) -> None:
    """Against sums of mpmath's masses at 400 bits, and rounded up by 1e-9 of it."""
    reach = 200
    with mpmath.workprec(400):
        logs = [mpmath.log(exact.mass(noise, scale, x, bits=400)) for x in range(reach + 1)]
        total = mpmath.fsum(
            mpmath.exp(order * logs[abs(x)] - (order - 1) * logs[abs(x - 1)])
            for x in range(1 - reach, reach + 1)
        )
        expected = float(mpmath.log(total) / (order - 1))
    ours = float(renyi(units(noise, scale, 3), np.array([order]))[0])
    assert 3 * expected <= ours * (1 + 1e-12)
    assert ours <= 3 * expected * (1 + 2e-9)
    norms = bounded(noise, scale, Norms(l1=3.0, l2=math.sqrt(3)))
    assert ours <= float(renyi(norms, np.array([order]))[0]) * (1 + 1e-9)


@pytest.mark.parametrize("least", [0.5, 3.0, 8_000.0, 9_000.0, 10_000.0])
def test_a_multiplier_up_to_the_largest_is_found(least: float) -> None:
    assert least <= least_multiplier(lambda z: least / z, 1.0) <= least * 1.001
    assert math.isinf(least_multiplier(lambda z: 10_001.0 / z, 1.0))

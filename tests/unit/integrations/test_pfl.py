"""Sketches in pfl-research: its own statistics and backend, our postprocessors.

Needs pfl, so it runs where `scripts/integrations` has made an environment:

    .venv-pfl-app/bin/python -m pytest tests/unit/integrations/test_pfl.py
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pfl", reason="pfl is not in this environment")

from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.metrics import Metrics, StringMetricName, get_overall_value
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from pfl.stats import MappedVectorStatistics

from sfumato.errors import BudgetError, MismatchError, SpecError
from sfumato.integrations.pfl import Sketched, SketchedSum
from sfumato.integrations.rounds import Layout, UpdateDesign, most_cells
from sfumato.privacy import SeededRng, epsilon_of
from sfumato.sketch.dense import DenseSketch

LENGTH = 340
USERS = 12


def update_of(user: int) -> dict[str, np.ndarray[Any, Any]]:
    values = np.random.default_rng(user).standard_normal(LENGTH)
    values = (0.7 * values / np.linalg.norm(values)).astype(np.float32)
    return {"weight": values[:300].reshape(30, 10), "bias": values[300:]}


def vector_of(stats: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(stats[name]).ravel() for name in ("weight", "bias")])


def the_sum(users: range = range(USERS)) -> np.ndarray[Any, Any]:
    return np.asarray(sum(vector_of(update_of(user)).astype(np.float64) for user in users))


def one_round(
    postprocessors: list[Any],
    change: Any = None,
    weight: float = 1.0,
    cohort: int = USERS,
) -> tuple[Any, Metrics]:
    """Run the postprocessors in the order of the simulated backend."""
    total = None
    for user in range(USERS):
        arrays = update_of(user) if change is None else change(user, update_of(user))
        stats = MappedVectorStatistics(arrays, weight=weight)
        context = UserContext(num_datapoints=1, seed=user, user_id=str(user))
        for each in postprocessors:
            stats, _ = each.postprocess_one_user(stats=stats, user_context=context)
        total = stats if total is None else total + stats
    central = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=cohort,
        population=Population.TRAIN,
        algorithm_params=None,
        model_train_params=None,
        seed=4,
    )
    metrics = Metrics()
    for each in reversed(postprocessors):
        total, more = each.postprocess_server(
            stats=total, central_context=central, aggregate_metrics=Metrics()
        )
        metrics |= more
    return total, metrics


def test_a_sketch_with_one_cell_per_coordinate_decodes_the_sum() -> None:
    """One row of one chunk: nothing collides, so only float32 is lost."""
    sketched = Sketched(rate=1.0, rows=1, seed=3)
    stats, _ = one_round([sketched])
    assert list(stats.keys()) == ["weight", "bias"]
    assert stats["weight"].shape == (30, 10)
    assert stats.weight == USERS
    assert np.abs(vector_of(stats) - the_sum()).max() < 1e-4
    wrong = vector_of(stats)[::-1]
    assert np.abs(wrong - the_sum()).max() > 0.1  # the negative control


def test_the_sum_of_sketches_is_the_sketch_of_the_sum_and_rounds_differ() -> None:
    sketched = Sketched(rate=5.0, rows=4, seed=3)
    results = []
    for number in range(2):
        stats, _ = one_round([sketched])
        sketch = DenseSketch.within(
            most_cells(LENGTH, 5.0), length=LENGTH, rows=4, seed=3, round=number
        )
        expected = sketch.decode(sketch.encode(the_sum()))
        assert np.abs(vector_of(stats) - expected).max() < 1e-4
        results.append(vector_of(stats))
    assert np.abs(results[0] - results[1]).max() > 0.1


def test_pfl_clips_and_noises_the_table() -> None:
    """False alarm 1e-6: with one cell per coordinate, the effect of pfl's noise of deviation s on
    the sum has a squared norm of s²·χ² with LENGTH degrees of freedom; half the deviation would be
    outside."""
    from scipy import stats as distributions

    clip = NormClippingOnly(2, 0.1)
    quiet, _ = one_round(
        [Sketched(rate=1.0, rows=1, seed=3), CentrallyAppliedPrivacyMechanism(clip)]
    )
    shorter = sum(
        0.1 * vector_of(update_of(user)) / np.linalg.norm(vector_of(update_of(user)))
        for user in range(USERS)
    )
    assert np.abs(vector_of(quiet) - shorter).max() < 1e-4
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.1, 3.0))
    loud, _ = one_round([Sketched(rate=1.0, rows=1, seed=3), noise])
    squares = float(np.square((vector_of(loud) - vector_of(quiet)) / 0.3).sum())
    low, high = distributions.chi2.ppf([5e-7, 1 - 5e-7], LENGTH)
    assert low < squares < high
    assert not low < 4 * squares < high


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_our_sum_is_exact_up_to_rounding_and_says_what_it_costs(rate: float) -> None:
    design = UpdateDesign(clip=1.0, rate=rate, rows=3, seed=3)
    summed = SketchedSum(design, cohort=USERS, population=100, delta=1e-5, rng=SeededRng(1))
    stats, metrics = one_round([summed])
    update_round = design.round(Layout.of(update_of(0)), USERS, 0)
    expected = the_sum()
    if update_round.sketch.dense is not None:
        expected = update_round.sketch.dense.decode(
            update_round.sketch.dense.encode(expected)
        ).astype(np.float64)
    # Each of twelve users is rounded by one whole number at most in each of three rows.
    assert (
        np.abs(vector_of(stats) - expected).max()
        <= USERS * math.sqrt(3) / update_round.sketch.scale + 1e-4
    )
    assert stats.weight == USERS
    assert get_overall_value(metrics[StringMetricName("sfumato | epsilon")]) == math.inf


def test_our_noise_is_accounted_for_and_stops_at_the_budget() -> None:
    design = UpdateDesign(clip=1.0, noise_multiplier=1.5, seed=3)
    loss = design.round(Layout.of(update_of(0)), USERS, 0).task.loss
    two = epsilon_of([loss] * 2, 1e-5)
    summed = SketchedSum(
        design, cohort=USERS, population=100, delta=1e-5, most_epsilon=two, rng=SeededRng(1)
    )
    one_round([summed])
    _, metrics = one_round([summed])
    spent = get_overall_value(metrics[StringMetricName("sfumato | epsilon")])
    assert spent == pytest.approx(two, rel=1e-12)
    with pytest.raises(BudgetError):
        one_round([summed])


@pytest.mark.parametrize("own", [False, True])
def test_a_user_that_is_not_finite_adds_zeros_and_cannot_be_recognised(own: bool) -> None:
    def change(user: int, arrays: dict[str, Any]) -> dict[str, Any]:
        if user == USERS - 1:
            arrays["bias"] = np.full_like(arrays["bias"], np.nan)
        return arrays

    design = UpdateDesign(clip=1.0, seed=3)
    postprocessor: Any = Sketched(rate=1.0, rows=1, seed=3)
    if own:
        postprocessor = SketchedSum(
            design, cohort=USERS, population=99, delta=1e-5, rng=SeededRng(1)
        )
    stats, metrics = one_round([postprocessor], change)
    assert stats.weight == USERS
    # A user is rounded by at most one whole number; a clip has a thousand or more.
    assert np.abs(vector_of(stats) - the_sum(range(USERS - 1))).max() < USERS / 1000
    assert len(metrics) == own  # epsilon


def test_what_does_not_fit_is_refused() -> None:
    design = UpdateDesign(clip=1.0, seed=3)

    def new() -> SketchedSum:
        return SketchedSum(design, cohort=USERS, population=99, delta=1e-5, rng=SeededRng(1))

    with pytest.raises(SpecError, match="weighted alike"):
        one_round([new()], weight=2.0)
    with pytest.raises(MismatchError, match="the cohort must be 12"):
        one_round([new()], cohort=13)
    with pytest.raises(SpecError, match="no masked rounds"):
        SketchedSum(UpdateDesign(clip=1.0, secure=True, seed=3), cohort=5, population=9, delta=1e-5)

    def change(user: int, arrays: dict[str, Any]) -> dict[str, Any]:
        return {"weight": arrays["weight"]} if user == 3 else arrays

    with pytest.raises(MismatchError, match="same names and shapes"):
        one_round([new()], change)

"""Means without a clip: norms are counted with noise, and the clip follows from the counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from checks import SEED
from marks import quick
from sfumato import Plan, plan, simulate
from sfumato.device import private
from sfumato.device.offers import Offer
from sfumato.errors import BudgetError, ImpossibleError, SpecError, StudyError
from sfumato.flow.aggregation import Sparse
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.privacy import (
    AdditiveLoss,
    Budget,
    Ledger,
    NoNoise,
    PlannedLoss,
    SeededRng,
    epsilon_of,
)
from sfumato.privacy.accounting import SMOOTHING, epsilon_text, renyi_divergences
from sfumato.questions.mean import clipping
from sfumato.questions.mean.clipping import ClippedMeanCampaign, ClippedMeanDesign
from sfumato.questions.mean.design import MeanDesign
from sfumato.sketch import NormBins, OneHot

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

STUDY: dict[str, Any] = {"question": "mean", "trust": "central", "epsilon": 1.0, "delta": 1e-6}
SIZES = {"devices": 10_000, "dimensions": 8}
BINS = NormBins(length=8, per_octave=4)


def planned_design(study: dict[str, Any]) -> ClippedMeanDesign:
    return design_of(plan(study))


def design_of(planned: Plan) -> ClippedMeanDesign:
    assert isinstance(planned.design, ClippedMeanDesign)
    return planned.design


# Bins.


@given(arrays(np.float64, (3, 8), elements=st.floats(-1e300, 1e300)), st.integers(1, 4))
def test_a_norm_is_within_its_bin(vectors: F64, per_octave: int) -> None:
    bins = NormBins(length=8, per_octave=per_octave)
    before = vectors.copy()
    for vector, place in zip(vectors, bins.places(vectors).tolist(), strict=True):
        norm = math.hypot(*vector)  # without overflow
        if place < bins.count - 1:
            assert norm <= bins.upper_end(place) * (1 + 1e-12)
        if place > 0:
            assert norm >= bins.upper_end(place - 1) * (1 - 1e-12)
    assert np.array_equal(vectors, before)


def test_the_ends_take_what_is_outside() -> None:
    vectors = np.array([[0.0] * 8, [5e-324] * 8, [1e30] + [0.0] * 7, [1e308] * 8])
    assert BINS.places(vectors).tolist() == [0, 0, BINS.count - 1, BINS.count - 1]
    assert BINS.ends == (2.0**-32, 2.0**31)
    assert OneHot(categories=BINS.count).entry_bits == 8


# What is charged.


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("compression", ["none", "adapt_norm"])
def test_the_ledger_is_charged_the_promise_and_not_more(trust: str, compression: str) -> None:
    study = STUDY | {"trust": trust, "compression": compression, "epsilon": 4.0}
    ledger = Ledger(Budget(epsilon=4.0, delta=1e-6))
    vectors = np.random.default_rng(SEED).standard_normal((600, 3_000))
    release = simulate(study, vectors, seed=1, ledger=ledger)
    assert len(ledger.entries()) == release.cost.rounds == (2 if compression == "none" else 3)
    charges = [entry.loss for entry in ledger.entries()]
    assert all(isinstance(charge, PlannedLoss) for charge in charges)
    assert isinstance(charges[0], PlannedLoss)
    assert ledger.spent() == epsilon_of(charges[0].all_losses, 1e-6)
    assert 0.97 * 4 < ledger.spent() <= 4
    with pytest.raises(BudgetError):
        simulate(study, vectors, seed=2, ledger=ledger)


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("compression", ["none", "adapt_norm"])
def test_the_plan_bounds_every_round_whatever_the_clip(
    trust: str, epsilon: float, compression: str
) -> None:
    study = STUDY | {"trust": trust, "compression": compression, "epsilon": epsilon}
    design = planned_design(study | {"devices": 10_000, "dimensions": 3_000})
    norms = design.charge_of(design.norm_task())
    assert isinstance(norms, PlannedLoss)
    assert norms.loss == design.norm_task().loss
    # The noise is sized by bounds from norms, which exact divergences of unit shifts fall below.
    from_norms = [
        replace(loss, unit_cells=0) if isinstance(loss, AdditiveLoss) else loss
        for loss in norms.all_losses
    ]
    assert 0.95 * epsilon < epsilon_of(from_norms, 1e-6) <= epsilon
    assert epsilon_of(norms.all_losses, 1e-6) <= epsilon
    last = design.bins.count - 1
    for place in (0, 1, last // 2, last):
        mean = replace(design.mean, clip=design.bins.upper_end(place))
        for step in range(len(mean.shares)):
            for width in (2, 50, 0) if step else (mean.first_width,):
                task = mean.task(step, width)
                charge = design.charge_of(task)
                assert isinstance(charge, PlannedLoss)
                assert charge.losses == norms.losses
                assert charge.loss == charge.losses[1 + step]
                own, bound = renyi_divergences([task.loss]), renyi_divergences([charge.loss])
                assert np.all(own <= bound * (1 + 1e-12))


def test_norms_cost_a_tenth_of_the_budget() -> None:
    given_clip = plan(STUDY | SIZES | {"clip": 1.0}).design
    assert isinstance(given_clip, MeanDesign)
    design = planned_design(STUDY | SIZES)
    assert math.isclose(design.mean.multiplier**2 * 0.9, given_clip.multiplier**2)
    variance = design.norm_noise**2 - SMOOTHING  # of continuous noise at the same cost
    assert math.isclose(variance * 0.1, given_clip.multiplier**2)


def test_a_statement_describes_both_rounds() -> None:
    sizes = {"devices": 10_000, "dimensions": 3_000, "compression": "adapt_norm"}
    planned = plan(STUDY | sizes)
    design, statement = design_of(planned), planned.privacy.statement
    assert f"noise of {design.norm_noise:.4f}, and the clip is computed from" in statement
    for share in (0.1, 0.9):
        assert f"{design.mean.multiplier / math.sqrt(share):.4f} times" in statement
    tasks = [design.norm_task(), *(design.mean.task(step, 4) for step in (0, 1))]
    spent = epsilon_of([task.loss for task in tasks], 1e-6)
    assert f"cost of epsilon {epsilon_text(spent)}" in statement


# The clip.

RUNS = 300
LONG, SHORT = 150, 130  # places of bins
COUNTS = np.bincount(np.repeat([SHORT, LONG], [9_700, 300]), minlength=BINS.count)


def clips(design: ClippedMeanDesign, counts: I64) -> F64:
    """The clips of RUNS campaigns whose devices are in these bins."""
    rng, task, devices = SeededRng(SEED), design.norm_task(), int(counts.sum())
    tables = (
        task.mechanism.at_release(
            task.mechanism.at_device(counts, devices=devices, rng=rng), count=devices, rng=rng
        )
        for _ in range(RUNS)
    )
    return np.array([design.clip_from(NoisedSum(task, table, devices))[0] for table in tables])


def chance_of_a_wrong_clip(design: ClippedMeanDesign) -> float:
    """A bound for COUNTS: an empty bin seems to have devices, or the long ones' seems empty."""
    law, least = design.norm_task().mechanism.law(10_000), design.least_count(10_000)
    missed = float(law.mass[: max(law.reach + least - 300, 0)].sum())  # noise below least − 300
    return clipping.MISTAKE + missed


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_the_clip_is_the_end_of_the_longest_bin_with_enough_devices(trust: str) -> None:
    """More wrong clips than the exact chance of one explains: false alarm 1e-6."""
    design = planned_design(STUDY | SIZES | {"trust": trust, "dropout": 0.0})
    assert design.longer(10_000) < 300
    chance = chance_of_a_wrong_clip(design)
    assert chance < 2e-3
    wrong = int((clips(design, COUNTS) != BINS.upper_end(LONG)).sum())
    assert wrong <= stats.binom.isf(1e-6, RUNS, chance)


def test_without_the_threshold_clips_would_be_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if every positive count is believed, hardly any clip is right."""
    monkeypatch.setattr(clipping, "MISTAKE", 0.49 * BINS.count)
    design = planned_design(STUDY | SIZES | {"clip": None, "dropout": 0.0})
    assert (clips(design, COUNTS) != BINS.upper_end(LONG)).mean() > 0.9


def test_long_vectors_that_cost_less_bias_than_noise_are_clipped() -> None:
    """With 10⁵ dimensions about 1,500 vectors should be longer than the clip, so that 300 may be.
    The chance of a wrong clip is that of an empty bin, 1e-3, and that of a missed bin, 0."""
    study = STUDY | {"devices": 10_000, "dimensions": 100_000, "compression": "none"}
    design = planned_design(study)
    assert 1_400 < design.longer(10_000) < 1_600
    wrong = int((clips(design, COUNTS) != BINS.upper_end(SHORT)).sum())
    assert wrong <= stats.binom.isf(1e-6, RUNS, clipping.MISTAKE)


def test_the_clip_of_normal_vectors_is_within_a_bin_of_the_quantile() -> None:
    """Norms of 50 normal numbers are in about five bins, and all but the outermost have many times
    the least count: one is missed, or an empty one counts, with a chance of at most 2e-3."""
    norms = np.sqrt(np.random.default_rng(SEED).chisquare(50, 10_000))
    design = planned_design(STUDY | {"devices": 10_000, "dimensions": 50})
    places = design.bins.places(norms[:, None])
    ends = clips(design, np.bincount(places, minlength=BINS.count))
    quantile = np.sort(norms)[-1 - math.floor(design.longer(10_000))]
    apart = np.abs(np.log2(ends / quantile)) * design.bins.per_octave
    assert (apart > 1).sum() <= stats.binom.isf(1e-6, RUNS, 2e-3)


def test_the_rule_for_the_clip_is_the_one_with_the_least_error() -> None:
    """If vectors have one direction, the error is that of the noise and the share of their length
    that is cut off. No clip on a grid has a smaller sum of both than the one with `longer` vectors
    above it, and twice or half of that clip has a clearly larger one."""
    design = planned_design(STUDY | {"devices": 10_000, "dimensions": 1_000})
    norms = np.exp(0.7 * np.random.default_rng(SEED).standard_normal(10_000))
    noise = design.longer(10_000) / 10_000  # of the mean, in units of the clip

    def error(clip: float) -> float:
        return float(noise * clip + np.maximum(norms - clip, 0).mean())

    best = min(map(error, np.quantile(norms, np.linspace(0, 1, 2_001))))
    quantile = float(np.quantile(norms, 1 - noise))
    assert error(quantile) <= best * 1.001
    assert min(error(2 * quantile), error(quantile / 2)) > 1.05 * best


LAWS = {
    "equal": np.full(10_000, 500.0),
    "log-normal": np.exp(0.5 * np.random.default_rng(SEED).standard_normal(10_000)),
    "Pareto": (1 - np.random.default_rng(SEED).random(10_000)) ** -0.5,
}


@pytest.mark.parametrize("law", quick(list(LAWS), "equal"))
def test_the_error_is_close_to_that_of_the_best_fixed_clip(law: str) -> None:
    """All vectors have one direction, the worst case. The least error of a fixed clip is known but
    for its noise's; that of a release, with 1,000 coordinates, has a relative deviation of 2.3%.
    The norms' share of the budget and a bin's width are 1.05 and at most 1.19 of the noise."""
    norms, study = LAWS[law], STUDY | {"devices": 10_000, "dimensions": 1_000}
    vectors = norms[:, None] * np.full(1_000, 1 / math.sqrt(1_000))
    unit = plan(study | {"clip": 1.0, "compression": "none"}).predicted["l2_error"]
    best = min(
        math.hypot(unit * clip, np.maximum(norms - clip, 0).mean())
        for clip in np.quantile(norms, np.linspace(0.5, 1, 501))
    )
    release = simulate(study | {"compression": "none"}, vectors, seed=1)
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert 0.9 < error / best < 1.4


def test_bins_are_coarser_if_devices_are_few_and_too_few_devices_are_refused() -> None:
    per_octave = [
        planned_design(STUDY | {"devices": devices, "dimensions": 8}).bins.per_octave
        for devices in (300, 1_500, 10_000)
    ]
    assert per_octave == [1, 2, 4]
    with pytest.raises(ImpossibleError, match="too few to measure") as refused:
        plan(STUDY | {"devices": 100, "dimensions": 8})
    assert refused.value.hint is not None
    assert "set clip" in refused.value.hint
    plan(STUDY | {"devices": 100, "dimensions": 8, "clip": 1.0})


# Releases.


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_vectors_of_500_have_a_mean_of_500(trust: str) -> None:
    """Five standard errors in each of eight coordinates: false alarm 5e-6. None is clipped but for
    a wrong clip (1e-3), which the seed does not have."""
    release = simulate(STUDY | {"trust": trust}, np.full((5_000, 8), 500.0), seed=1)
    assert release.plan["parameters"]["clip"] >= 500 * math.sqrt(8)
    assert release.standard_error < 10
    assert np.abs(release.mean - 500.0).max() < 5 * release.standard_error
    assert release.cost.bytes_per_device == release.plan["predicted"]["bytes_per_device"]
    ratio = release.standard_error / release.plan["parameters"]["clip"]
    assert math.isclose(ratio, release.plan["predicted"]["standard_error"], rel_tol=0.1)


def test_an_outlier_moves_the_mean_by_at_most_the_clip_over_the_devices() -> None:
    """The noise of both runs is the same, so that the difference is the outlier's alone, and at
    most one step of rounding per device and coordinate."""
    vectors = np.random.default_rng(SEED).standard_normal((2_000, 8))
    means, influences = [], []
    for last in (0.0, 1e30):
        vectors[-1] = last
        release = simulate(STUDY, vectors, seed=1)
        means.append(release.mean)
        influences.append(release.plan["parameters"]["clip"] / 2_000)
    assert influences[0] == influences[1] < 0.01
    design = planned_design(STUDY | {"devices": 2_000, "dimensions": 8})
    step = math.sqrt(8) * influences[0] / design.mean.sketch(0, 0).scale
    moved = float(np.linalg.norm(means[1] - means[0]))
    assert 0.9 * influences[0] < moved <= influences[0] + step


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_single_devices_count_and_add_as_a_simulation_does(trust: str) -> None:
    """Without noise both are the truth: vectors are whole numbers of 2⁻¹⁶ clips."""
    study = STUDY | {"trust": trust, "epsilon": math.inf, "dropout": 0.0}
    vectors = np.random.default_rng(SEED).integers(-9_000, 9_001, (60, 4)) / 1_024.0
    vectors[0] = [16.0, 0, 0, 0]
    added = simulate(study, vectors, seed=1)
    alone = simulate(study, vectors, seed=1, protocol=True)
    assert added.plan["parameters"]["clip"] == 16.0
    assert np.allclose(added.mean, vectors.mean(axis=0), rtol=0, atol=1e-12)
    assert np.array_equal(added.mean, alone.mean)
    if trust == "secure":
        assert sum("completed the masked round" in note for note in alone.notes) == 2


def test_cohorts_count_norms_before_any_of_them_is_asked_for_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 300)
    study = STUDY | {"trust": "secure", "epsilon": 4.0, "dropout": 0.05}
    ledger = Ledger(Budget(epsilon=4.0, delta=1e-6))
    vectors = np.full((600, 8), 500.0)
    release = simulate(study, vectors, seed=1, ledger=ledger)
    assert [entry.cohort for entry in ledger.entries()] == ["cohort 0", "cohort 1"] * 2
    assert release.cost.rounds == release.plan["predicted"]["rounds"] == 4
    assert release.cost.devices == 600
    assert 3.9 < ledger.spent() <= 4.0
    assert np.abs(release.mean - 500.0).max() < 5 * release.standard_error


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_a_byte_limit_includes_the_first_round(trust: str) -> None:
    study = STUDY | {"trust": trust, "devices": 5_000, "dimensions": 100_000}
    limited = plan(study | {"bytes_per_device": 60_000})
    assert 59_000 < limited.predicted["bytes_per_device"] <= 60_000
    design = design_of(limited)
    assert design.rounds == limited.predicted["rounds"] == 3
    assert "a mean no longer than 0.0" in limited.predicted["assumes"]
    with pytest.raises(ImpossibleError) as refused:
        plan(study | {"bytes_per_device": 50})
    assert refused.value.hint is not None
    need = int(refused.value.hint.split()[-3])
    assert plan(study | {"bytes_per_device": need}).predicted["bytes_per_device"] <= need


def test_a_clip_that_is_a_guess_or_at_an_end_has_a_note() -> None:
    spread = 2.0 ** np.random.default_rng(SEED).uniform(-30, 30, (300, 1))  # five per bin
    guess = simulate(STUDY, spread, seed=1)
    assert any("the clip is a guess" in note for note in guess.notes)
    for unit in (1e-15, 1e15):
        release = simulate(STUDY, np.full((1_000, 2), unit), seed=1)
        assert any("an end of its range" in note for note in release.notes)
    usual = simulate(STUDY, np.ones((1_000, 2)), seed=1)
    assert not any("the clip" in note for note in usual.notes)


def test_a_campaign_takes_only_its_own_answers() -> None:
    design = planned_design(STUDY | SIZES)
    campaign = ClippedMeanCampaign(design)
    other = replace(design, bins=replace(BINS, per_octave=2)).norm_task()
    with pytest.raises(SpecError, match="last task"):
        campaign.absorb(NoisedSum(other, np.zeros(127, dtype=np.int64), 10_000))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bins": replace(BINS, length=9)}, "of 8 dimensions"),
        ({"mechanism": NoNoise()}, "must have noise"),
        ({"mean": replace(planned_design(STUDY | SIZES).mean, clip=2.0)}, "in units of the clip"),
    ],
)
def test_designs_check_themselves(change: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        replace(planned_design(STUDY | SIZES), **change)


def test_a_training_still_needs_a_clip() -> None:
    study = {"question": "train", "trust": "central", "epsilon": 1.0, "devices": 100}
    with pytest.raises(StudyError, match="needs clip"):
        plan(study | {"training": {"model": "perceptron", "cohort": 10}})


# Devices.


def offer_of(task: Task, **others: Any) -> Offer:
    terms: dict[str, Any] = {"question": "mean", "trust": "central", "keys": BINS} | others
    return Offer(study="Steps", purpose="To test.", task=task, epsilon=None, delta=1e-6, **terms)


def test_a_device_reports_the_bin_of_its_norm() -> None:
    task = planned_design(STUDY | SIZES).norm_task()
    offer = offer_of(task)
    make = private.privatiser(offer, [3.0, 4.0, 0, 0, 0, 0, 0, 0], None)
    assert make is not None
    message = make(SeededRng(1))
    assert isinstance(task.aggregation, Sparse)
    place = BINS.places(np.array([[5.0] + [0.0] * 7]))[0]
    assert message == bytes([place + 1])
    for wrong in ("oak", [1.0] * 7, [math.nan] * 8, [math.inf] + [0.0] * 7):
        with pytest.raises(SpecError, match="8 finite numbers"):
            private.privatiser(offer, wrong, None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keys": None}, "must have a task of vectors"),
        ({"keys": replace(BINS, per_octave=2)}, "OneHot of 127 cells; got 253"),
        ({"question": "frequencies", "dictionary": "ab" * 32}, "no other question may have one"),
    ],
)
def test_an_offer_of_norms_is_one_of_a_mean_with_the_right_cells(
    change: dict[str, Any], match: str
) -> None:
    with pytest.raises(SpecError, match=match):
        offer_of(planned_design(STUDY | SIZES).norm_task(), **change)


def test_keys_of_norms_are_for_tables_of_norms() -> None:
    task = planned_design(STUDY | SIZES).mean.task(0, 0)
    with pytest.raises(SpecError, match="keys must be None unless"):
        offer_of(task)

"""Rules that size sketches: golden numbers, adaptation and limits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from checks import SEED, assert_mean
from sfumato import plan
from sfumato.errors import SpecError, StudyError
from sfumato.learn.campaign import TrainingCampaign
from sfumato.learn.compression import (
    LARGEST_STEP,
    MAIN_SHARE,
    SLACK,
    AdaptNorm,
    AdaptTail,
    Compression,
    FixedRate,
    FreeNorm,
    NoCompression,
    RoundStatistics,
    Sizing,
    TwoStage,
)
from sfumato.learn.design import TrainingDesign
from sfumato.spec import from_json, to_json

LENGTH = 1_000_000
ROWS = 15
RULES: list[Compression] = [
    NoCompression(),
    FixedRate(rate=20.0),
    AdaptNorm(error=0.25, first=300),
    TwoStage(error=0.05, warm_up=10),
    AdaptTail(error=0.2, step=0.1, first=10, paper_target=100),
    AdaptTail(update="exponential", unit=0.1),
    AdaptTail(update="linear", unit=0.1),
    AdaptTail(update="relative_exponential"),
    AdaptTail(update="relative_linear"),
    TwoStage(warm_up=3, whole_slack=True),
    FreeNorm(error=0.2, early=2.0, memory=0.5),
]


def measured_round(norm: float, *, noise: float = 1.0) -> RoundStatistics:
    """A round that paid for a norm; `noise` is the noise of an undivided budget."""
    return RoundStatistics(
        squared=0.0, cells=1, noise=noise / math.sqrt(MAIN_SHARE), measurement=norm
    )


def adapt_norm_cells(error: float, norm: float, noise: float = 1.0, length: int = LENGTH) -> int:
    rule = AdaptNorm(error=error)
    return rule.after(rule.start(length, math.inf), measured_round(norm, noise=noise), length).cells


# As specs


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_are_specs(rule: Compression) -> None:
    assert from_json(to_json(rule)) == rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_no_rule_asks_for_more_than_the_vector_or_less_than_a_cell(rule: Compression) -> None:
    for length in (1, 7, 50_000):
        for size in (0.0, 1.0, 1e3, 1e300):
            sizing = rule.start(length, size)
            for _ in range(12):
                statistics = RoundStatistics(
                    squared=size, cells=sizing.cells, noise=1.0, measurement=size**0.5
                )
                sizing = rule.after(sizing, statistics, length)
                assert 1 <= sizing.cells <= length


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rounds_are_counted(rule: Compression) -> None:
    sizing = rule.start(100, 10.0)
    for _ in range(20):
        sizing = rule.after(sizing, measured_round(3.0), 100)
    assert sizing.rounds == 20


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        (FixedRate, {"rate": 0.5}, "rate must be at least 1; got 0.5"),
        (AdaptNorm, {"error": 0.0}, "error must be above 0; got 0"),
        (AdaptNorm, {"first": 0}, "first must be at least 1; got 0"),
        (TwoStage, {"error": -1.0}, "error must be above 0; got -1"),
        (TwoStage, {"warm_up": 0}, "warm_up must be at least 1; got 0"),
        (AdaptTail, {"error": 0.0}, "error must be above 0"),
        (AdaptTail, {"step": 1.0}, "step must be above 0, below 1; got 1"),
        (AdaptTail, {"first": 0}, "first must be at least 1"),
        (AdaptTail, {"paper_target": 0}, "paper_target must be at least 1"),
        (FreeNorm, {"error": 0.0}, "error must be above 0"),
        (FreeNorm, {"early": 0.9}, "early must be at least 1; got 0.9"),
        (FreeNorm, {"memory": 1.0}, "memory must be at least 0, below 1; got 1"),
    ],
)
def test_bad_fields_are_refused(rule: type, fields: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        rule(**fields)


# Sizes that do not adapt


def test_whole_vectors_and_fixed_rates_do_not_move() -> None:
    for rule, cells in ((NoCompression(), LENGTH), (FixedRate(rate=30.0), 33_333)):
        sizing = rule.start(LENGTH, 1.0)
        for norm in (0.0, 1.0, 1e9):
            sizing = rule.after(sizing, measured_round(norm), LENGTH)
        assert sizing.cells == cells
    assert FixedRate(rate=50.0).start(20, 1.0).cells == 1


# Adapt Norm


def test_the_golden_norm_has_283_cells_per_row() -> None:
    """A norm of 16.1 with noise of 1, 15 rows and an error of a tenth."""
    assert -(-adapt_norm_cells(0.1, 16.1) // ROWS) == 283
    assert adapt_norm_cells(0.1, 16.1) == math.ceil((16.1 + SLACK) ** 2 / 0.1)


@pytest.mark.parametrize("norm", [0.0, 16.1, 200.0])
def test_the_rate_is_proportional_to_the_error_that_is_allowed(norm: float) -> None:
    cells = [adapt_norm_cells(error, norm, length=10**9) for error in (0.01, 0.05, 0.1, 0.25)]
    sizes = [(norm + SLACK) ** 2 / error for error in (0.01, 0.05, 0.1, 0.25)]
    assert cells == [math.ceil(size) for size in sizes]


def test_the_rate_rises_with_the_noise() -> None:
    """A sum has some norm; with twice the noise it is half as many deviations long."""
    cells = [adapt_norm_cells(0.1, 50.0, noise) for noise in (0.5, 1.0, 2.0, 4.0)]
    assert cells == sorted(set(cells), reverse=True)
    assert (
        adapt_norm_cells(0.1, 50.0, 0.5)
        == adapt_norm_cells(0.1, 100.0, 1.0)
        == adapt_norm_cells(0.1, 200.0, 2.0)
    )


def test_a_longer_sum_is_never_sent_smaller() -> None:
    cells = [adapt_norm_cells(0.1, norm) for norm in (-30.0, 0.0, 1.0, 5.0, 25.0, 125.0, 1e6)]
    assert cells == sorted(cells)
    assert cells[0] == cells[1] == math.ceil(SLACK**2 / 0.1)  # noise can make a norm negative
    assert cells[-1] == LENGTH


def test_slack_is_root_two_deviations_of_the_norm_that_was_paid_for() -> None:
    """A tenth of the budget: 1/√0.1 times the deviation of an undivided budget."""
    assert math.isclose(SLACK, math.sqrt(2) / math.sqrt(1 - MAIN_SHARE))


def test_the_first_round_is_whole_unless_a_size_is_given() -> None:
    assert AdaptNorm().start(LENGTH, 1.0).cells == LENGTH
    assert AdaptNorm(first=300).start(LENGTH, 1.0).cells == 300
    assert AdaptNorm(first=300).start(20, 1.0).cells == 20


# Two Stage


def test_two_stage_sends_whole_vectors_and_then_one_size() -> None:
    rule = TwoStage(error=0.1, warm_up=4)
    sizing, sizes = rule.start(LENGTH, 1.0), []
    for norm in (10.0, 20.0, 30.0, 40.0, 1e9, 0.0):  # the last two come too late to matter
        sizes.append(sizing.cells)
        sizing = rule.after(sizing, measured_round(norm), LENGTH)
    expected = math.ceil((25.0 + SLACK / 2) ** 2 / 0.1)  # a mean of four has half the slack
    assert sizes == [LENGTH] * 4 + [expected] * 2


def test_two_stage_of_the_paper_adds_the_whole_slack() -> None:
    """Line 7 of algorithm 4: C = c₀(mean of norms + √20·σ)²/(B²Pσ²), c₀ dividing as elsewhere."""
    rule = TwoStage(error=0.1, warm_up=4, whole_slack=True)
    sizing = rule.start(LENGTH, 1.0)
    for norm in (10.0, 20.0, 30.0, 40.0):
        sizing = rule.after(sizing, measured_round(norm), LENGTH)
    assert sizing.cells == math.ceil((25.0 + math.sqrt(20)) ** 2 / 0.1)
    design = plan(STUDY | {"compression": "two_stage", "paper_mode": True}).design
    assert isinstance(design, TrainingDesign)
    assert isinstance(design.compression, TwoStage)
    assert design.compression.whole_slack


def test_after_the_warm_up_no_norm_is_needed() -> None:
    rule = TwoStage(warm_up=1)
    sizing = rule.after(rule.start(LENGTH, 1.0), measured_round(5.0), LENGTH)
    statistics = RoundStatistics(squared=1.0, cells=sizing.cells, noise=1.0)
    assert rule.after(sizing, statistics, LENGTH).cells == sizing.cells


@pytest.mark.parametrize(("rounds", "warm_up"), [(40, 4), (100, 25)])
def test_two_stage_never_compresses_more_than_rounds_by_warm_up(rounds: int, warm_up: int) -> None:
    rule = TwoStage(error=1e6, warm_up=warm_up)
    sizing, cells = rule.start(LENGTH, 1.0), 0
    for _ in range(rounds):
        cells += sizing.cells
        sizing = rule.after(sizing, measured_round(0.0), LENGTH)
    assert sizing.cells == 1
    rate = LENGTH * rounds / cells
    assert 0.999 * rounds / warm_up < rate < rounds / warm_up


# Adapt Tail


def tail(error: float, *, paper: int | None = None, noise: float = 2.0, **changes: Any) -> Sizing:
    rule = AdaptTail(error=0.21, paper_target=paper, **changes)
    statistics = RoundStatistics(
        squared=0.0, cells=1, noise=noise, measurement=error, second_noise=3.0
    )
    return rule.after(Sizing(cells=1000), statistics, LENGTH)


def test_adapt_tail_grows_above_its_target_and_shrinks_below() -> None:
    """√1.21 = 1.1 times the error of the noise alone, and √2 deviations of the measurement."""
    target = 1.1 * math.sqrt(LENGTH) * 2.0 + math.sqrt(2) * 3.0
    assert tail(target * 1.001).cells == 1200
    assert tail(target * 0.999).cells == 800


def test_the_papers_target_is_root_n_of_the_error_and_laxer() -> None:
    """Line 6 of algorithm 5, c·√d·σB/√(.9n) + 2σB/√(.1n), times n for sums: σB/√.9 is the noise of
    2 and σB/√.1 that of 3."""
    target = 100 * (0.21 * math.sqrt(LENGTH) * 2.0 / math.sqrt(100) + 2 * 3.0 / math.sqrt(100))
    assert tail(target * 1.001, paper=100).cells == 1200
    assert tail(target * 0.999, paper=100).cells == 800
    assert tail(target * 0.999).cells == 1200


@pytest.mark.parametrize("excess", [-300.0, 40.0])
def test_adapt_tail_moves_by_the_error_itself_as_appendix_h_does(excess: float) -> None:
    """C·(1 + η·x) and C + ⌊η·x⌋ with η = 0.2, for the absolute error x, in units of 50 here, and
    for the error relative to the target."""
    target = 1.1 * math.sqrt(LENGTH) * 2.0 + math.sqrt(2) * 3.0
    absolute, relative = 0.2 * excess / 50, 0.2 * excess / target
    cells = {
        "exponential": math.ceil(max(1000 * (1 + absolute), 1)),
        "linear": 1000 + math.floor(absolute),
        "relative_exponential": math.ceil(1000 * (1 + relative)),
        "relative_linear": 1000 + math.floor(relative),
    }
    for update, expected in cells.items():
        assert tail(target + excess, update=update, unit=50.0).cells == expected


def test_a_study_chooses_the_update_of_adapt_tail() -> None:
    keys = STUDY["training"] | {"tail_update": "linear"}
    design = plan(STUDY | {"compression": "adapt_tail", "training": keys}).design
    assert isinstance(design, TrainingDesign)
    assert isinstance(design.compression, AdaptTail)
    assert design.compression.update == "linear"
    assert design.compression.unit == design.cohort * design.clip
    with pytest.raises(StudyError, match="tail_update has no effect"):
        plan(STUDY | {"compression": "adapt_norm", "training": keys})


def test_adapt_tail_starts_at_a_tenth_unless_a_size_is_given() -> None:
    assert AdaptTail().start(LENGTH, 1.0).cells == LENGTH // 10
    assert AdaptTail().start(3, 1.0).cells == 1
    assert AdaptTail(first=77).start(LENGTH, 1.0).cells == 77


# The free norm


def test_the_free_norm_starts_with_room_for_updates_that_all_point_one_way() -> None:
    assert FreeNorm(error=0.1, early=4.0).start(LENGTH, 10_000.0).cells == 25_000
    assert FreeNorm(error=0.1, early=4.0).start(LENGTH, math.inf).cells == LENGTH


@pytest.mark.parametrize("early", [1.0, 4.0])
def test_compression_may_cost_more_early_and_what_was_asked_for_in_the_end(early: float) -> None:
    """By the same factor in each round: √early halfway."""
    rule = FreeNorm(error=0.1, early=early, memory=0.0)
    for progress, factor in ((0.0, early), (0.5, math.sqrt(early)), (1.0, 1.0)):
        noise, norm = 0.7, 5.0e3
        statistics = RoundStatistics(
            squared=norm + 3000 * noise**2, cells=3000, noise=noise, progress=progress
        )
        expected = norm / noise**2 / (0.1 * factor)
        start = Sizing(cells=round(expected), rounds=3)
        assert abs(rule.after(start, statistics, LENGTH).cells - expected) <= 1 + 1e-9 * expected


def test_it_never_moves_by_more_than_twice() -> None:
    rule = FreeNorm(error=0.1, early=1.0, memory=0.0)
    up = RoundStatistics(squared=1e12, cells=1000, noise=1.0)
    down = RoundStatistics(squared=0.0, cells=1000, noise=1.0)
    start = Sizing(cells=1000, rounds=1)
    assert rule.after(start, up, LENGTH).cells == 1000 * LARGEST_STEP
    assert rule.after(start, down, LENGTH).cells == 1000 / LARGEST_STEP


def test_a_table_shorter_than_its_noise_counts_as_nothing() -> None:
    rule = FreeNorm(memory=0.0)
    statistics = RoundStatistics(squared=10.0, cells=1000, noise=1.0)
    assert rule.after(Sizing(cells=1000), statistics, LENGTH).memory == 0.0


def test_the_first_rounds_are_a_plain_mean_and_later_ones_forget() -> None:
    rule = FreeNorm(memory=0.75)
    sizing, norms = Sizing(cells=1000), [100.0, 200.0, 600.0, 50.0, 50.0, 50.0]
    memories = []
    for norm in norms:
        sizing = rule.after(sizing, RoundStatistics(squared=norm + 9.0, cells=9, noise=1.0), LENGTH)
        memories.append(sizing.memory)
    assert np.allclose(memories[:4], np.cumsum(norms[:4]) / np.arange(1, 5))
    for before, after in itertools.pairwise(memories[3:]):
        assert math.isclose(after, 0.75 * before + 0.25 * 50.0)


TABLES = 3000
CELLS, NOISE, SQUARED = 2_000, 3.0, 40_000.0
SPREAD = math.sqrt(4 * SQUARED / NOISE**2 + 2 * CELLS)  # of |table|²/σ²


def estimated_norms(claimed_noise: float) -> list[float]:
    """The rule's estimates from tables of a sum and Gaussian noise, in units of the noise."""
    rng = np.random.default_rng(SEED)
    table = rng.standard_normal(CELLS)
    table *= math.sqrt(SQUARED) / np.linalg.norm(table)
    rule, start = FreeNorm(memory=0.0), Sizing(cells=CELLS)
    norms = []
    for _ in range(TABLES):
        noised = table + NOISE * rng.standard_normal(CELLS)
        statistics = RoundStatistics(
            squared=float(noised @ noised), cells=CELLS, noise=claimed_noise
        )
        norms.append(rule.after(start, statistics, LENGTH).memory)
    return norms


def test_the_free_norm_is_unbiased() -> None:
    """False alarm 1e-6 (normal). |m|² is 4,444 deviations² here, and its estimate has a deviation
    of 148, so it is never cut off at zero (thirty deviations). Power: see the next test."""
    assert_mean(estimated_norms(NOISE), SQUARED / NOISE**2, SPREAD)


def test_noise_that_is_understated_by_a_per_cent_is_caught() -> None:
    """The negative control: 2% of 2,000 cells is 40, fifteen standard errors of the mean."""
    with pytest.raises(AssertionError, match="standard errors from"):
        assert_mean(estimated_norms(NOISE * 0.99), SQUARED / NOISE**2, SPREAD)


def test_its_memory_reduces_the_deviation() -> None:
    """False alarm below 1e-6: the mean of weights 0.1·0.9^k has √(0.1/1.9) = 0.23 of a round's
    deviation, and five times as much was allowed for."""
    rng = np.random.default_rng(SEED)
    table = np.full(CELLS, math.sqrt(SQUARED / CELLS))
    rule, sizing = FreeNorm(memory=0.9), Sizing(cells=CELLS)
    for _ in range(60):
        noised = table + NOISE * rng.standard_normal(CELLS)
        statistics = RoundStatistics(squared=float(noised @ noised), cells=CELLS, noise=NOISE)
        sizing = replace(rule.after(sizing, statistics, LENGTH), cells=CELLS)
    assert abs(sizing.memory - SQUARED / NOISE**2) < 5 * math.sqrt(0.1 / 1.9) * SPREAD


STUDY: dict[str, Any] = {
    "question": "train", "trust": "central", "epsilon": 8.0, "delta": 1e-4, "devices": 539,
    "rounds": 20, "clip": 0.5, "training": {"model": "softmax", "cohort": 60, "warm_up": 10},
}  # fmt: skip


def test_a_study_with_a_prior_norm_sends_sketches_from_the_first_round_on() -> None:
    staged = STUDY | {"compression": "two_stage"}
    with_norm = staged | {"training": {**STUDY["training"], "prior_norm": 0.05}}
    rates = [plan(each).predicted["rate"] for each in (staged, with_norm)]
    assert rates[0] < 2  # half of the rounds send whole updates
    assert rates[1] > 2 * rates[0]


def test_a_prior_norm_is_not_billed_for_a_second_sketch() -> None:
    """The cells that are billed are those of a round, up to whole rows."""
    for trust in ("central", "secure"):
        study = STUDY | {"compression": "two_stage", "trust": trust}
        planned = plan(study | {"training": {**STUDY["training"], "prior_norm": 0.05}})
        assert isinstance(planned.design, TrainingDesign)
        campaign = TrainingCampaign.begin(planned.design)
        assert campaign.second is None
        billed = campaign.length / planned.predicted["rate"]
        assert 0 <= billed - campaign.cells < planned.design.rows


def test_the_rows_of_a_training_are_those_of_the_study() -> None:
    assert plan(STUDY).parameters["rows"] == 15
    assert plan(STUDY | {"rows": 7}).parameters["rows"] == 7
    with pytest.raises(StudyError, match="rows has no effect"):
        plan(STUDY | {"rows": 7, "compression": "none"})
    with pytest.raises(StudyError, match="width has no effect"):
        plan(STUDY | {"width": 7})


@pytest.mark.parametrize("compression", ["none", "adapt_norm", "adapt_tail", "free_norm", None])
@pytest.mark.parametrize(("key", "value"), [("rate", 4.0), ("prior_norm", 0.05)])
def test_a_key_of_another_rule_is_refused(compression: str | None, key: str, value: float) -> None:
    study = STUDY | {"compression": compression, "training": {**STUDY["training"], key: value}}
    if compression is None:
        del study["compression"]
    with pytest.raises(StudyError, match=rf"training\.{key} has no effect without"):
        plan(study)


def test_rows_are_refused_where_no_rule_is_named_and_updates_are_whole() -> None:
    with pytest.raises(StudyError, match="rows has no effect"):
        plan(STUDY | {"rows": 7, "epsilon": math.inf})


def test_a_prior_norm_sizes_all_rounds_and_measures_none() -> None:
    """A mean of half the clip, of at most 100 deviations: 50² over the error."""
    rule = TwoStage(error=0.5, prior_norm=0.5)
    assert rule.rounds_measured == 0
    sizing = rule.start(10**6, 100.0**2)
    assert sizing.cells == 5_000
    after = rule.after(sizing, RoundStatistics(squared=1.0, cells=5_000, noise=1.0), 10**6)
    assert (after.cells, after.rounds) == (5_000, 1)

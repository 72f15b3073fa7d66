"""Campaigns of frequency questions: their tasks, the order of these, and the decoding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from scipy import stats

from checks import SEED
from sfumato import hashing, plan
from sfumato.errors import DataError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.campaign import run
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.privacy import Budget, Ledger, NoiseAtRelease, NoNoise, SeededRng
from sfumato.privacy.intervals import NoiseLaw
from sfumato.questions import sizing
from sfumato.questions.frequencies.design import (
    PILOT_COHORT,
    PILOT_WIDTH,
    FrequencyCampaign,
    FrequencyDesign,
    law_from_pilot,
    width_from_pilot,
)
from sfumato.questions.frequencies.plan import rehearse
from sfumato.questions.question import Dictionary
from sfumato.sketch import CountSketch, DecodedRounds, OneHot
from sfumato.study import Study

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
ITEMS, DEVICES = 200, 6000


def make_design(**fields: Any) -> FrequencyDesign:
    standard: dict[str, Any] = {
        "mode": "shared",
        "items": ITEMS,
        "devices": DEVICES,
        "rounds": 1,
        "rows": 5,
        "width": 64,
        "seed": SEED,
        "items_per_device": 1,
        "mechanism": NoNoise(),
        "decode": "median",
        "every_round": True,
    }
    return FrequencyDesign(**{**standard, **fields})


def answer(task: Task, counts: I64, rng: SeededRng | None = None) -> NoisedSum:
    """The answer to a task of devices that hold `counts` of each item."""
    table = task.sketch.encode(np.arange(counts.size), counts)
    noised = task.mechanism.at_release(table, count=int(counts.sum()), rng=rng or SeededRng(SEED))
    return NoisedSum(task, noised, int(counts.sum()))


def law(alpha: float, items: int) -> F64:
    falling = np.arange(1, items + 1, dtype=np.float64) ** -alpha
    return np.asarray(falling / falling.sum())


# --- the dictionary


def test_a_dictionary_holds_each_item_once_in_its_first_place() -> None:
    listed = Dictionary(pa.array(["oak", "elm", "oak", "fir"]))
    assert listed.items.to_pylist() == ["oak", "elm", "fir"]
    assert (len(listed), listed.duplicates) == (3, 1)


def test_a_category_is_the_place_in_the_dictionary() -> None:
    listed = Dictionary(pa.array(["oak", "elm", "fir"]))
    values = pa.array(["fir", "oak", "ash", None, "fir"])
    assert listed.categories(values).tolist() == [2, 0, -1, -1, 2]


def test_an_empty_dictionary_and_missing_items_are_refused() -> None:
    with pytest.raises(DataError, match="at least one"):
        Dictionary(pa.array([], type=pa.string()))
    with pytest.raises(DataError, match="missing"):
        Dictionary(pa.array(["oak", None]))


# --- tasks


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("shared", [(0, 0), (0, 0), (0, 0)]),
        ("hybrid", [(0, 0), (0, 1), (0, 2)]),
        ("fresh", [(0, 0), (1, 1), (2, 2)]),
    ],
)
def test_rounds_of_a_mode_have_its_cells_and_signs(
    mode: str, rounds: list[tuple[int, int]]
) -> None:
    tasks = make_design(mode=mode, rounds=3).tasks()
    sketches = [task.sketch for task in tasks]
    assert all(isinstance(sketch, CountSketch) for sketch in sketches)
    pairs = [(s.bucket_round, s.sign_round) for s in sketches if isinstance(s, CountSketch)]
    assert pairs == rounds
    assert len({task.cohort for task in tasks}) == 3
    assert all(task.max_count >= DEVICES / 3 for task in tasks)


def test_a_table_noised_once_is_asked_for_once() -> None:
    (task,) = make_design(rounds=5, every_round=False).tasks()
    assert task.max_count >= DEVICES


@pytest.mark.parametrize("mode", ["hybrid", "fresh"])
def test_rounds_with_signs_of_their_own_are_noised_one_by_one(mode: str) -> None:
    with pytest.raises(SpecError, match="every round must have noise"):
        make_design(mode=mode, rounds=5, every_round=False)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"items": 0}, {"pilot_devices": 100}], ids=str)
def test_a_design_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError):
        make_design(**wrong)


# --- the campaign


@pytest.mark.parametrize("mode", ["shared", "hybrid", "fresh"])
def test_a_campaign_asks_every_round_and_counts_what_was_answered(mode: str) -> None:
    """So wide that a collision in a majority of rows has probability 1e-11: counts are exact."""
    design = make_design(mode=mode, rounds=3, rows=15, width=1 << 15)
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    counts = np.random.default_rng(SEED).multinomial(2000, law(1.1, ITEMS), size=3)
    cohorts = []
    for count in counts:
        task = campaign.next_task()
        assert task is not None
        assert task == campaign.next_task()  # the next task stays the same
        cohorts.append(task)
        campaign.absorb(answer(task, count))
    assert cohorts == design.tasks()
    assert campaign.next_task() is None
    assert campaign.respondents == 6000
    estimates = campaign.estimates()
    assert np.array_equal(estimates.counts, counts.sum(axis=0))
    assert (estimates.decoder, estimates.width) == ("median", 1 << 15)


def test_rounds_may_take_sketches_in_turn_and_their_tables_are_added() -> None:
    """So wide that a collision in a majority of rows has probability 1e-11: counts are exact."""
    design = make_design(mode="fresh", rounds=5, sketches=2, rows=15, width=1 << 15)
    tasks = design.tasks()
    assert [task.sketch for task in tasks[2:]] == [task.sketch for task in tasks[:3]]
    assert tasks[0].sketch != tasks[1].sketch
    assert len({task.id for task in tasks}) == 5
    assert design.gain == 2
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    counts = np.random.default_rng(SEED).multinomial(1000, law(1.1, ITEMS), size=5)
    for task, count in zip(tasks, counts, strict=True):
        assert campaign.next_task() == task
        campaign.absorb(answer(task, count))
    assert campaign.next_task() is None
    assert campaign.respondents == 5000
    assert np.array_equal(campaign.estimates().counts, counts.sum(axis=0))


def planned_rounds(rounds: int, **keys: Any) -> tuple[Study, FrequencyDesign]:
    study = Study.read(
        {
            "question": "frequencies",
            "trust": "secure",
            "epsilon": 1.0,
            "delta": 1e-6,
            "devices": 100 * rounds,
            "rounds": rounds,
            "bytes_per_device": 8_000,
            **keys,
        }
    )
    design = plan(study, items=[f"tree {number}" for number in range(2_500)]).design
    assert isinstance(design, FrequencyDesign)
    return study, design


def test_many_rounds_are_rehearsed_in_a_hundred_with_the_same_noise() -> None:
    """The error must be that of 400 rounds with a sketch each, but for the few collisions more.

    Errors are root mean squares over 16,384 placebos, and depend on rows · width cells: we allow
    five standard errors, √(1/(2 · placebos) + 1/(2 · cells)) of each, and 3% for collisions.
    Control: the noise of 100 rounds is half that of 400.
    """
    study, design = planned_rounds(400)
    assert design.sketches == 100
    design = replace(design, decode="median")
    with_each = rehearse(replace(design, sketches=0), study).standard_error[-1]
    ours = rehearse(design, study).standard_error[-1]
    control = replace(design, sketches=0, rounds=100, devices=10_000)
    cells = design.rows * design.width
    tolerance = 5 * math.sqrt(2 * (1 / (2 * cells) + 1 / (2 * 16_384))) + 0.03
    assert abs(math.log(ours / with_each)) < tolerance < math.log(2) / 2
    assert abs(math.log(rehearse(control, study).standard_error[-1] / with_each)) > tolerance


@pytest.mark.slow  # plans with several rehearsals of a hundred rounds
def test_a_hundred_rounds_have_a_sketch_each_and_so_have_more_if_the_study_asks_for_it() -> None:
    assert planned_rounds(100)[1].sketches == 0
    assert planned_rounds(101, algorithm="fresh")[1].sketches == 0


@pytest.mark.parametrize("decode", ["median", "mean", "refined"])
def test_estimates_are_those_of_the_decoder_with_an_error_each(
    decode: Literal["median", "mean", "refined"],
) -> None:
    campaign = FrequencyCampaign(make_design(decode=decode, width=20), np.arange(ITEMS))
    (task,) = campaign.design.tasks()
    counts = np.random.default_rng(SEED).multinomial(DEVICES, law(1.1, ITEMS))
    campaign.absorb(answer(task, counts))
    estimates = campaign.estimates()
    assert (
        estimates.counts.shape
        == estimates.standard_error.shape
        == estimates.half_width.shape
        == (ITEMS,)
    )
    assert (estimates.half_width >= 0).all()
    assert estimates.decoder.startswith(decode)
    if decode != "refined":
        assert isinstance(task.sketch, CountSketch)
        rounds = DecodedRounds.of([(task.sketch, answer(task, counts).table)])
        points = hashing.fingerprint(np.arange(ITEMS), SEED)
        assert np.array_equal(estimates.counts, rounds.estimate(points, decode=decode))
        errors = rounds.estimate(rounds.placebos(), decode=decode)
        assert np.array_equal(
            estimates.half_width,
            np.full(ITEMS, np.quantile(np.abs(errors), 0.95, method="higher")),
        )
        assert np.allclose(estimates.standard_error, np.sqrt(np.mean(errors**2)), rtol=1e-12)


def test_a_campaign_refuses_an_answer_it_did_not_ask_for() -> None:
    design = make_design(mode="hybrid", rounds=2)
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    first, second = design.tasks()
    counts = np.ones(ITEMS, dtype=np.int64)
    for wrong in (second, replace(first, cohort="somebody else")):
        with pytest.raises(SpecError, match="the answer to its last task"):
            campaign.absorb(answer(wrong, counts))
    campaign.absorb(answer(first, counts))
    with pytest.raises(SpecError, match="the answer to its last task"):
        campaign.absorb(answer(first, counts))
    campaign.absorb(answer(second, counts))
    with pytest.raises(SpecError, match="the answer to its last task"):
        campaign.absorb(answer(second, counts))
    assert campaign.respondents == 2 * ITEMS


def test_there_is_nothing_to_estimate_before_the_first_answer() -> None:
    with pytest.raises(SpecError, match="nothing to estimate"):
        FrequencyCampaign(make_design(), np.arange(ITEMS)).estimates()


# --- one-hot


def test_a_one_hot_campaign_counts_exactly() -> None:
    design = make_design(mode="one_hot", width=0, rows=1, rounds=2)
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    counts = np.random.default_rng(SEED).multinomial(3000, law(1.1, ITEMS), size=2)
    for count in counts:
        task = campaign.next_task()
        assert task is not None
        assert task.sketch == OneHot(categories=ITEMS)
        campaign.absorb(answer(task, count))
    estimates = campaign.estimates()
    assert np.array_equal(estimates.counts, counts.sum(axis=0))
    assert not estimates.standard_error.any()
    assert not estimates.half_width.any()
    assert (estimates.decoder, estimates.width) == ("exact", 0)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_one_noised_one_hot_table_has_the_noises_own_interval(
    noise: Literal["gaussian", "laplace"],
) -> None:
    mechanism = NoiseAtRelease(noise=noise, scale=4.0)
    design = make_design(mode="one_hot", width=0, rows=1, every_round=False, mechanism=mechanism)
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    (task,) = design.tasks()
    campaign.absorb(answer(task, np.full(ITEMS, 30)))
    estimates = campaign.estimates()
    assert (estimates.half_width == NoiseLaw.of(noise, 4.0).width(0.95)).all()
    assert np.allclose(estimates.standard_error, mechanism.stddev(1), rtol=1e-6)


def test_noises_of_several_one_hot_rounds_add_up() -> None:
    mechanism = NoiseAtRelease(noise="gaussian", scale=4.0)
    design = make_design(mode="one_hot", width=0, rows=1, rounds=9, mechanism=mechanism)
    campaign = FrequencyCampaign(design, np.arange(ITEMS))
    for task in design.tasks():
        campaign.absorb(answer(task, np.full(ITEMS, 3)))
    assert np.allclose(campaign.estimates().standard_error, 12.0, rtol=1e-12)


# --- two phases

ZIPF = (1.05, 1.3, 2.0)
TARGET, POPULATION, DOMAIN, PILOTS = 0.002, 17_500, 175_000, 5


def two_phase(alpha: float, seed: int, scale: float) -> tuple[int, float, float, float]:
    """Width by pilot, width for the main devices' own shares, and the two fitted exponents.

    The sizes of the paper's Gowalla experiment, with its constant of 2 and its 16 rows; pilot and
    main phase ask 17,500 devices each, drawn from one law.
    """
    rng = np.random.default_rng([SEED, seed])
    mechanism = NoiseAtRelease(noise="gaussian", scale=scale) if scale else NoNoise()
    design = make_design(
        items=DOMAIN,
        devices=2 * POPULATION,
        rows=16,
        width=math.ceil(sizing.minimax_width(TARGET, constant=2, devices=POPULATION)),
        seed=(SEED + seed) % 2**53,
        mechanism=mechanism,
        every_round=False,
        pilot_devices=POPULATION,
        target_error=TARGET,
        constant=sizing.PAPER_CONSTANT,
    )
    pilot_counts, others = rng.multinomial(POPULATION, law(alpha, DOMAIN), size=2)
    items = np.arange(DOMAIN)
    pilot = answer(design.pilot(), pilot_counts, SeededRng(SEED, seed))
    width = width_from_pilot(pilot, items, design)
    instance = sizing.instance_width(
        others / POPULATION, TARGET, constant=2, devices=2 * POPULATION
    )
    assert isinstance(pilot.task.sketch, CountSketch)
    read = pilot.task.sketch.estimate(pilot.table, items) / POPULATION
    fitted = sizing.fit_power_law(read).alpha
    true = sizing.fit_power_law(pilot_counts / POPULATION).alpha
    return width, instance, fitted, true


@pytest.mark.parametrize("alpha", ZIPF)
@pytest.mark.parametrize("scale", [0.0, 16.9], ids=["exact", "epsilon 1"])
def test_a_pilot_finds_the_law_and_the_width_that_the_data_need(alpha: float, scale: float) -> None:
    """Alpha within 0.02 of the fit to the true top 20, width within 25%: means over five seeds.

    Single pilots had deviations of 0.005 (alpha, centred 0.007 low at 1.05) and 5% (width, centred
    5% low) when this was written, so both bounds are at least five deviations of the mean away:
    false alarm about 1e-6. Power: another law's exponent and width are caught, by the control.
    """
    runs = [two_phase(alpha, seed, scale) for seed in range(PILOTS)]
    widths, instances, exponents, truth = np.array(runs).T
    assert abs(np.mean(exponents - truth)) < 0.02
    assert abs(np.mean(widths / instances) - 1) < 0.25


def test_a_wrong_exponent_would_give_a_wrong_width() -> None:
    """The control: alpha and width of one law do not pass for those of another."""
    runs = [two_phase(2.0, seed, 0.0) for seed in range(PILOTS)]
    others = [two_phase(1.3, seed, 0.0) for seed in range(PILOTS)]
    widths, _, exponents, _ = np.array(runs).T
    _, instances, _, true = np.array(others).T
    assert abs(np.mean(exponents - true)) >= 0.02
    assert abs(np.mean(widths / instances) - 1) >= 0.25


def test_the_pilot_comes_first_and_sizes_the_rest() -> None:
    design = make_design(
        mode="hybrid", rounds=2, width=3000, pilot_devices=2000, target_error=0.01, items=1000
    )
    campaign = FrequencyCampaign(design, np.arange(1000))
    pilot = campaign.next_task()
    assert pilot is not None
    assert pilot.cohort == PILOT_COHORT
    assert pilot.sketch == CountSketch(rows=5, width=PILOT_WIDTH, seed=SEED)
    counts = np.random.default_rng(SEED).multinomial(2000, law(1.5, 1000), size=3)
    with pytest.raises(SpecError, match="the answer to its last task"):
        campaign.absorb(answer(design.tasks()[0], counts[1]))
    pilot_answer = answer(pilot, counts[0])
    campaign.absorb(pilot_answer)
    assert campaign.width == width_from_pilot(pilot_answer, np.arange(1000), design) < 3000
    for round, count in enumerate(counts[1:]):
        task = campaign.next_task()
        assert task == design.tasks(campaign.width)[round]
        assert task.sketch.shape == (5, campaign.width)
        campaign.absorb(answer(task, count))
    assert campaign.next_task() is None
    assert (
        campaign.respondents == 4000
    )  # the pilot's devices sized the sketch; they are not counted
    assert campaign.estimates().width == campaign.width


def test_a_pilot_that_shows_nothing_gives_the_minimax_width() -> None:
    design = make_design(width=777, pilot_devices=2000, target_error=0.01)
    flat = NoisedSum(design.pilot(), np.zeros((5, PILOT_WIDTH), dtype=np.int64), 2000)
    assert width_from_pilot(flat, np.arange(ITEMS), design) == 777


def test_a_piloted_width_is_at_least_two_and_at_most_the_minimax() -> None:
    one_item = np.zeros(ITEMS, dtype=np.int64)
    one_item[:2] = 1900, 100
    for target, width in ((0.9, 50), (0.0001, 50)):
        design = make_design(width=width, pilot_devices=2000, target_error=target, constant=1.0)
        assert (
            2
            <= width_from_pilot(answer(design.pilot(), one_item), np.arange(ITEMS), design)
            <= width
        )


# --- what a pilot shows of any law

PILOT, LARGE, FAILURES = 10_000, 5_000, 0.1
LAWS = {
    "200 alike": np.r_[np.full(200, 0.005), np.zeros(LARGE - 200)],
    "i^-1.1": law(1.1, LARGE),
    "i^-0.5": law(0.5, LARGE),
}


def limits_shown(shares: F64, seed: int) -> sizing.ShareLimits:
    design = make_design(
        items=LARGE,
        devices=20 * PILOT,
        rows=13,
        width=185,
        seed=seed,
        mechanism=NoiseAtRelease(noise="gaussian", scale=18.0),
        decode="refined",
        every_round=False,
        pilot_devices=PILOT,
        target_error=0.005,
        failure_probability=FAILURES,
    )
    counts = np.random.default_rng([SEED, seed]).multinomial(PILOT, shares)
    return law_from_pilot(
        answer(design.pilot(), counts, SeededRng(SEED, seed)), np.arange(LARGE), design
    )[1]


def is_within(shares: F64, limits: sizing.ShareLimits) -> bool:
    squares, cubes = np.sum(shares**2), limits.cubes * np.sum(shares**3)
    least, most = limits.squares
    surprise = limits.surprise(shares[shares > 0]).sum()
    return bool(
        least <= squares + cubes
        and squares - cubes <= most
        and surprise <= -math.log(limits.level)
        and shares.sum() <= limits.mass + 1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_limits_that_a_pilot_shows_hold_as_often_as_stated(name: str) -> None:
    """They may fail with a quarter of the failure probability. Of 150 pilots, false alarm 1e-6."""
    successes = sum(is_within(LAWS[name], limits_shown(LAWS[name], seed)) for seed in range(150))
    assert 150 - successes <= stats.binom.isf(1e-6, 150, FAILURES / 4)


def test_other_laws_are_outside_the_limits_that_a_pilot_shows() -> None:
    """The control: 300 items of a third of a percent, and 100 of one, are not 200 of a half: their
    squares differ by more than six deviations."""
    for seed in range(5):
        limits = limits_shown(LAWS["200 alike"], seed)
        for number in (100, 300):
            other = np.r_[np.full(number, 1 / number), np.zeros(LARGE - number)]
            assert not is_within(other, limits)


@pytest.mark.parametrize("items_per_device", [1, 5])
def test_a_target_is_met_by_devices_with_one_item_and_with_several(items_per_device: int) -> None:
    """As many items of 0.34% as there can be need most cells: with the width that suffices for one
    item per device, five would miss the target twofold."""
    target, share = 0.005, 0.0034
    design = plan(
        {
            "question": "frequencies",
            "trust": "central",
            "algorithm": "count_sketch",
            "epsilon": None,
            "devices": 200_000,
            "target_error": target,
            "items_per_device": items_per_device,
        },
        items=pa.array([str(number) for number in range(LARGE)]),
    ).design
    assert isinstance(design, FrequencyDesign)
    counts = np.zeros(LARGE, dtype=np.int64)
    counts[: int(items_per_device / share)] = int(share * design.devices)
    pilot = np.random.default_rng(SEED).binomial(counts, design.pilot_devices / design.devices)

    def gather(task: Task) -> Batch:
        is_pilot = task.cohort == PILOT_COHORT
        own = pilot if is_pilot else counts - pilot
        devices = design.pilot_devices if is_pilot else design.devices - design.pilot_devices
        return Batch(task.id, task.sketch.encode(np.arange(LARGE), own), devices)

    campaign = FrequencyCampaign(design, np.arange(LARGE))
    run(campaign, gather, ledger=Ledger(Budget(epsilon=None, delta=1e-6)), rng=SeededRng(SEED))
    estimates = campaign.estimates()
    scaled = estimates.counts * design.devices / estimates.respondents
    assert np.abs(scaled - counts).max() <= target * design.devices

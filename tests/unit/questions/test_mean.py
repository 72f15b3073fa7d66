"""Means: contributions are bounded, rounds share a budget, sizes depend on the noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato import plan, simulate
from sfumato.errors import (
    BudgetError,
    DataError,
    ImpossibleError,
    SpecError,
    TaskError,
)
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import run
from sfumato.flow.contribute import contribute, report
from sfumato.flow.release import MeanRelease, NoisedSum
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task, largest_cell
from sfumato.privacy import (
    Budget,
    Ledger,
    NoiseAtRelease,
    NoNoise,
    PlannedLoss,
    Rounding,
    SeededRng,
    epsilon_of,
)
from sfumato.privacy.accounting import ORDERS, renyi_divergences
from sfumato.questions.mean.design import (
    ROWS,
    MeanCampaign,
    MeanDesign,
    cells_for,
    longest,
    squared_norm,
)
from sfumato.simulation.vectors import load, names
from sfumato.sketch import Norms, VectorSketch
from sfumato.sketch.dense import DenseSketch, median_variance
from sfumato.sketch.vector import clip_rows, headroom, is_finite

F64 = npt.NDArray[np.float64]

STUDY: dict[str, Any] = {
    "question": "mean",
    "trust": "central",
    "epsilon": 2.0,
    "delta": 1e-6,
    "clip": 1.0,
}
DESIGN = MeanDesign(
    compression="adapt_norm",
    dimensions=20_000,
    devices=200,
    clip=1.0,
    most_cells=20_000,
    seed=SEED,
    multiplier=1.0,
)
SKETCH = VectorSketch(
    length=50,
    clip=2.0,
    bound=2.4,
    scale=30.0,
    dense=DenseSketch(length=50, rows=3, width=4, seed=SEED),
)


def cloud(devices: int, dimensions: int, norm: float = 0.2, seed: int = SEED) -> F64:
    """Vectors of a mean of this norm, and spread around it."""
    chance = np.random.default_rng(seed)
    mean = chance.standard_normal(dimensions)
    spread = 0.3 * chance.standard_normal((devices, dimensions)) / math.sqrt(dimensions)
    return np.asarray(mean * norm / np.linalg.norm(mean) + spread)


# Contributions.


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=50, max_size=50
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([SKETCH, replace(SKETCH, dense=None, bound=2.0)]),
)
def test_whatever_a_vector_holds_its_table_is_within_the_norms(
    rows: list[list[float]], sketch: VectorSketch
) -> None:
    vectors = np.array(rows)
    before = vectors.copy()
    tables = sketch.tables(vectors, rng=SeededRng(1)).reshape(len(rows), -1)
    norms = sketch.sensitivity(1)
    assert norms.largest is not None
    assert np.all(np.linalg.norm(tables, axis=1) <= norms.l2 * (1 + 1e-12))
    assert np.all(np.abs(tables).sum(axis=1) <= norms.l1 * (1 + 1e-12))
    assert np.abs(tables).max() <= norms.largest
    assert np.array_equal(vectors, before)


def test_a_sketch_longer_than_its_vector_is_clipped_again() -> None:
    """Half of all sketches are longer than their vector; without the second clip some would be
    longer than the bound."""
    vectors = clip_rows(np.random.default_rng(SEED).standard_normal((500, 50)), 2.0)
    assert SKETCH.dense is not None
    free = np.linalg.norm(SKETCH.dense.encode(vectors).reshape(500, -1), axis=1)
    assert (free > SKETCH.bound).sum() > 20
    tables = SKETCH.tables(vectors, rng=SeededRng(1)).reshape(500, -1)
    assert np.linalg.norm(tables, axis=1).max() <= SKETCH.rounding.l2


def test_short_vectors_are_not_clipped() -> None:
    vectors = np.array([[0.3, -0.4], [0.0, 0.0], [3.0, 4.0], [3e300, 4e300], [5e-324, 0.0]])
    results = clip_rows(vectors, 1.0)
    assert np.allclose(results[[0, 1, 4]], vectors[[0, 1, 4]], rtol=1e-15, atol=0)
    assert np.allclose(results[[2, 3]], [[0.6, 0.8]] * 2, rtol=1e-15)


def test_who_has_no_finite_vector_abstains() -> None:
    vectors = np.ones((4, 50))
    vectors[1, 3], vectors[2, 0] = math.nan, -math.inf
    assert is_finite(vectors).tolist() == [True, False, False, True]
    with pytest.raises(SpecError, match="abstains"):
        SKETCH.tables(vectors, rng=SeededRng(1))


def test_tables_add_and_too_long_ones_are_refused() -> None:
    tables = SKETCH.tables(np.ones((3, 50)), rng=SeededRng(1))
    weights = np.array([1, 2, 0])
    assert np.array_equal(SKETCH.encode(tables, weights), tables[0] + 2 * tables[1])
    assert np.array_equal(SKETCH.encode(tables), tables.sum(axis=0))
    with pytest.raises(SpecError, match="norm of at most"):
        SKETCH.encode(2 * tables)
    with pytest.raises(SpecError, match="64-bit integers"):
        SKETCH.encode(tables[:, :2])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dense": None}, "bound must be 2.0"),
        ({"length": 51}, "of 51 coordinates"),
        ({"clip": 0.0}, "clip"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_vector_sketches_check_themselves(change: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        replace(SKETCH, **change)


@pytest.mark.parametrize("wrong", [np.ones(50), np.ones((2, 49)), np.ones((2, 50), dtype=np.int64)])
def test_vectors_of_another_shape_are_refused(wrong: npt.NDArray[Any]) -> None:
    with pytest.raises(SpecError, match=r"shape \(n, 50\)"):
        SKETCH.tables(wrong, rng=SeededRng(1))


def test_a_whole_vector_is_read_back_but_for_rounding() -> None:
    sketch = VectorSketch(length=4, clip=1.0, bound=1.0, scale=1e6)
    vectors = clip_rows(np.random.default_rng(SEED).standard_normal((30, 4)), 1.0)
    table = sketch.encode(sketch.tables(vectors, rng=SeededRng(1)))
    assert np.abs(sketch.decode(table, 30) - vectors.mean(axis=0)).max() <= 1e-6
    assert sketch.estimate(table, [2, 0]).tolist() == sketch.decode(table, 1)[[2, 0]].tolist()
    with pytest.raises(SpecError, match="at least 1 device"):
        sketch.decode(table, 0)


def test_a_modulus_must_hold_the_largest_cell_of_every_device() -> None:
    largest = largest_cell(SKETCH, 1)
    assert largest == SKETCH.rounding.largest == 73
    parts: dict[str, Any] = {"sketch": SKETCH, "mechanism": NoNoise(), "cohort": "all"}
    Task(**parts, aggregation=Plain(modulus_bits=14), max_count=100)
    with pytest.raises(TaskError, match="±7300: at least 14"):
        Task(**parts, aggregation=Plain(modulus_bits=13), max_count=100)


def test_a_device_reports_its_table() -> None:
    task = DESIGN.task(0, 4)
    sketch = task.sketch
    assert isinstance(sketch, VectorSketch)
    table = sketch.tables(cloud(1, 20_000), rng=SeededRng(1))
    message = report(task, table, rng=SeededRng(2))
    assert len(message.message) == task.message_bytes
    assert isinstance(task.aggregation, Plain)
    read = task.aggregation.open(task.aggregation.unpack(message.message, sketch.shape))
    assert np.array_equal(read, table[0])


# Sizes.


def test_the_size_rule_gives_the_golden_width() -> None:
    upper = 16.1 + math.sqrt(20)  # norm and slack of the paper's query, in units of the noise
    assert math.ceil(cells_for(upper**2, 1.0, 0.1) / ROWS) == 283


@pytest.mark.parametrize("error", [0.05, 0.1, 0.25])
def test_widths_follow_norm_noise_and_error(error: float) -> None:
    design = replace(DESIGN, relative_error=error)
    width = design.width_for(400.0, 200)
    enough = [cells_for(400.0, design.noise(1, w, 200), error) for w in (width - 1, width)]
    assert ROWS * (width - 1) < enough[0]
    assert ROWS * width >= enough[1]
    assert design.width_for(0.0, 200) == 2
    assert design.width_for(1e9, 200) == 0  # whole
    assert replace(design, most_cells=3_000).width_for(1e9, 200) == 200
    noisier = replace(design, multiplier=2.0).width_for(400.0, 200)
    assert math.isclose(noisier, width / 4, rel_tol=0.15)  # headroom differs a little


def test_the_free_norm_takes_the_noise_off() -> None:
    squared, deviation = squared_norm(np.full((2, 8), 3.0), 2.0)
    assert squared == 16 * 9 - 16 * 4
    assert deviation == math.sqrt(4 * 80 * 4 + 2 * 16 * 16 + 2 * 80**2 / 16)
    assert squared_norm(np.zeros((2, 8)), 2.0)[0] == 0.0


@pytest.mark.parametrize("cells", [10, 1_000, 100_000])
@pytest.mark.parametrize("devices", [10, 10_000, 10_000_000])
@pytest.mark.parametrize("multiplier", [0.5, 4.5])
def test_rounding_costs_a_hundredth_of_the_noise(
    cells: int, devices: int, multiplier: float
) -> None:
    long = longest(cells, devices, multiplier)
    l2 = Rounding(clip=1.0, scale=long, cells=cells).l2
    ideal, really = (multiplier * long) ** 2, (multiplier * l2) ** 2 + devices / 4
    assert multiplier * l2 <= 1 << 16
    assert really <= 1.0101 * ideal


def test_noise_that_cannot_be_drawn_is_refused() -> None:
    assert 350.0 * Rounding(clip=1.0, scale=longest(10**5, 10, 350.0), cells=10**5).l2 <= 1 << 16
    with pytest.raises(ImpossibleError, match="exceeds the sampler's limit"):
        longest(10**6, 10, 200.0)


def test_headroom_shrinks_as_sketches_grow() -> None:
    rooms = [headroom(cells) for cells in (2, 60, 200, 10_000, 10**6)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[:2] == [1.2, 1.2]


@pytest.mark.parametrize("compression", ["none", "fixed", "adapt_norm", "adapt_tail"])
@pytest.mark.parametrize("secure", [None, SecureSum(corrupt=0.1, dropout=0.05)])
def test_rounds_spend_the_budget_together(compression: Any, secure: SecureSum | None) -> None:
    """The accountant composes all rounds, at any sizes, to no more than one release with the
    whole multiplier (with Skellam noise a little more, which a plan allows for)."""
    design = replace(DESIGN, compression=compression, secure=secure, multiplier=2.4)
    assert math.isclose(sum(design.shares), 1.0)
    rounds = range(len(design.shares))
    release = NoiseAtRelease(noise="gaussian", scale=2400.0).loss(Norms(l1=1e3, l2=1e3))
    alone = epsilon_of([release], 1e-6)
    if secure is not None:  # by the same bounds as Skellam noise
        alone = float(compute_epsilon(ORDERS, renyi_divergences([release]), 1e-6)[0])
    for widths in ([7] * len(rounds), [0 if r else design.first_width for r in rounds]):
        losses = [design.task(r, width).loss for r, width in zip(rounds, widths, strict=True)]
        together = epsilon_of(losses, 1e-6)
        assert together <= alone * (1 + (1e-5 if secure is None else 1e-3))
        assert together >= alone * 0.999


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"most_cells": 20_001}, "at most the 20000"),
        ({"most_cells": 29}, "at least 30 cells"),
        ({"compression": "none", "most_cells": 900}, "as many cells as dimensions"),
        ({"multiplier": 0.0}, "there is none"),
        ({"relative_error": 0.0}, "relative_error"),
        ({"top": 0}, "top"),
        ({"compression": "fixed", "paper_epsilon": 1.0}, "paper"),
        ({"clip": 0.0}, "clip"),
        ({"devices": 0}, "devices"),
    ],
)
def test_designs_check_themselves(change: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        replace(DESIGN, **change)


# Campaigns.


def run_campaign(design: MeanDesign, vectors: F64, seed: int = 1) -> MeanCampaign:
    """A campaign over devices that all answer."""
    campaign, rng = MeanCampaign(design), SeededRng(SEED, seed)

    def gather(task: Task) -> Batch:
        assert isinstance(task.sketch, VectorSketch)
        tables = task.sketch.tables(vectors, rng=rng)
        return Batch(task.id, contribute(task, tables, devices=len(vectors), rng=rng), len(vectors))

    run(campaign, gather, ledger=Ledger(Budget(epsilon=None, delta=1e-6)), rng=rng)
    return campaign


@pytest.mark.parametrize("compression", ["none", "fixed", "adapt_norm", "adapt_tail"])
def test_every_compression_gives_a_mean_and_its_error(compression: Any) -> None:
    vectors = cloud(60, 2_000, 0.3)
    most = 2_000 if compression == "none" else 1_200
    design = replace(
        DESIGN, compression=compression, dimensions=2_000, devices=60, multiplier=0.3,
        most_cells=most, relative_error=0.25,
    )  # fmt: skip
    estimate = run_campaign(design, vectors).estimate()
    assert estimate.respondents == 60
    assert estimate.compressed == (compression != "none")
    error = float(np.linalg.norm(estimate.mean - vectors.mean(axis=0)))
    claimed = estimate.standard_error * math.sqrt(2_000)
    assert 0.5 < error / claimed < 2  # six deviations of a sketch of 80 cells; see statistics


def test_a_campaign_absorbs_its_own_task_only_and_ends() -> None:
    design = replace(DESIGN, compression="none", dimensions=10, most_cells=10, devices=5)
    other = MeanCampaign(replace(design, seed=1))
    campaign = run_campaign(design, cloud(5, 10))
    assert campaign.next_task() is None
    with pytest.raises(SpecError, match="last"):
        other.absorb(campaign.answers[0])
    with pytest.raises(SpecError, match="last round"):
        other.estimate()


def test_top_keeps_the_largest_coordinates() -> None:
    design = replace(DESIGN, compression="none", dimensions=40, most_cells=40, devices=5, top=3)
    vectors = np.zeros((5, 40))
    vectors[:, [4, 7, 9]] = 0.5
    estimate = run_campaign(replace(design, multiplier=0.01), vectors).estimate()
    assert np.flatnonzero(estimate.mean).tolist() == [4, 7, 9]


def test_the_papers_rule_is_kept() -> None:
    """C = ⌈min(n²ε²/ln(1/δ), nd)·(norm + slack)²/(G²·P)⌉, by hand for n = 100, ε = 1, δ = 1e-6,
    G = 1, norm 0.1: slack = 4·ln 160/100 + 2·√(ln 320/100) = 0.68335; 723.82·0.78335²/15 = 29.6."""
    design = replace(DESIGN, devices=100, paper_epsilon=1.0, dimensions=20_000)
    assert design.paper_width(0.1) == 30
    pilot = design.sketch(0, design.first_width)
    assert (pilot.shape, pilot.bound) == ((5, 2), 2.0)


def test_adapt_tail_doubles_up_to_its_cap() -> None:
    design = replace(DESIGN, compression="adapt_tail", dimensions=1_000, most_cells=1_000)
    assert design.tail_widths == (16, 32, 64, 128)
    assert replace(design, most_cells=200).tail_widths == (16, 32)
    assert len(design.shares) == 1 + math.ceil(math.log2(1_000 / (5 * 16)))


# Simulations.


def test_a_simulation_gives_a_release() -> None:
    vectors = cloud(400, 3_000, 0.1)
    study = STUDY | {"epsilon": 4.0, "compression": "adapt_norm"}
    release = simulate(study, vectors, seed=1)
    again = simulate(study, vectors, seed=1)
    assert np.array_equal(release.mean, again.mean)
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert 0.8 < error / (release.standard_error * math.sqrt(3_000)) < 1.25
    assert release.cost.rounds == 2
    assert release.cost.bytes_per_device <= release.plan["predicted"]["bytes_per_device"]
    frame = release.frame()
    assert frame.column_names == ["coordinate", "mean", "standard_error", "low", "high"]
    assert len(frame) == len(release) == 3_000
    data = json.loads(release.to_json())
    assert data["estimates"][7]["mean"] == release.mean[7]
    assert "3,000 coordinates, 400 devices; epsilon 4" in repr(release)
    assert "noise of this run comes from a seed" in release.privacy.statement


def test_a_release_can_be_plotted(tmp_path: Any) -> None:
    release = simulate(STUDY, cloud(100, 30), seed=1)
    release.plot(path=tmp_path / "mean.png")
    assert (tmp_path / "mean.png").stat().st_size > 1_000


def test_the_ledger_is_charged_for_every_round() -> None:
    ledger = Ledger(Budget(epsilon=4.0, delta=1e-6))
    vectors = cloud(400, 3_000, 0.1)
    study = STUDY | {"epsilon": 4.0, "compression": "adapt_norm"}
    simulate(study, vectors, seed=1, ledger=ledger)
    assert len(ledger.entries()) == 2
    assert 3.98 < ledger.spent() <= 4.0
    with pytest.raises(BudgetError):
        simulate(STUDY | {"epsilon": 4.0}, vectors, seed=2, ledger=ledger)


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("compression", ["adapt_norm", "adapt_tail"])
def test_the_rounds_are_a_plan_that_bounds_each_whatever_its_size(
    trust: str, epsilon: float, compression: str
) -> None:
    """The plan fits into the study's own budget, so that a ledger allows it."""
    study = STUDY | {"epsilon": epsilon, "trust": trust, "compression": compression}
    design = plan(study | {"devices": 10_000, "dimensions": 20_000}).design
    assert isinstance(design, MeanDesign)
    for round in range(len(design.shares)):
        for width in (2, 4, design.widest, 0) if round else (design.first_width,):
            task = design.task(round, width)
            charge = design.charge_of(task)
            assert isinstance(charge, PlannedLoss)
            assert charge.loss == charge.losses[round]
            own, bound = renyi_divergences([task.loss]), renyi_divergences([charge.loss])
            assert np.all(own <= bound * (1 + 1e-12))
            assert 0.97 * epsilon < epsilon_of(charge.all_losses, 1e-6) <= epsilon


def test_devices_without_a_vector_are_counted_and_left_out() -> None:
    vectors = cloud(200, 20)
    vectors[5, 3], vectors[6] = math.nan, math.inf
    release = simulate(STUDY | {"epsilon": math.inf}, vectors, seed=1)
    truth = np.delete(vectors, [5, 6], axis=0).mean(axis=0)
    assert np.abs(release.mean - truth).max() < 1e-4
    assert any("2 devices abstained" in note for note in release.notes)
    assert release.cost.devices == 198
    with pytest.raises(DataError, match="no device to ask"):
        simulate(STUDY, np.full((3, 4), math.nan))


def test_the_protocol_gives_the_sum_that_adding_gives() -> None:
    """Without noise both are the truth, exactly where vectors are whole numbers of steps."""
    study = STUDY | {"trust": "secure", "epsilon": math.inf, "dropout": 0.0}
    vectors = np.round(cloud(60, 40) * 2**16) / 2**16
    planned = plan(study | {"devices": 60, "dimensions": 40})
    added = simulate(planned, vectors, seed=1)
    masked = simulate(planned, vectors, seed=1, protocol=True)
    assert np.array_equal(np.rint(added.mean * 2**16 * 60), (vectors * 2**16).sum(axis=0))
    assert np.array_equal(masked.mean, added.mean)
    assert masked.cost.bytes_per_device == planned.predicted["bytes_per_device"]
    text = f"sent at most {planned.predicted['bytes_per_device']:,} bytes"
    assert any(text in note for note in masked.notes)


def test_devices_vanish_from_masked_rounds() -> None:
    study = STUDY | {"trust": "secure", "dropout": 0.1, "epsilon": 50.0}
    vectors = cloud(120, 30)
    release = simulate(study, vectors, seed=SEED, protocol=True)
    assert release.cost.devices == 120
    assert any("completed the masked round" in note for note in release.notes)
    assert any("of 120 devices answered" in note for note in release.notes)
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert error < 4 * release.standard_error * math.sqrt(30)


def test_secure_sums_of_two_rounds_adapt() -> None:
    """The noise of the norms decides whether vectors are compressed, as in 86 of 120 runs with
    other seeds: the share is at least 0.49 (Clopper and Pearson, 1e-6), so all of 20 runs are
    whole with a probability below 2e-6. The relative deviation of an error over 4,000 coordinates
    is 1/√8,000 = 1.1%, so it is 8% off with a probability below 1e-11 (normal). Power: a standard
    error that is 20% off is missed with a probability below 1e-9."""
    vectors = cloud(300, 4_000, 0.05)
    study = STUDY | {"trust": "secure", "dropout": 0.05, "epsilon": 4.0}
    releases = (
        simulate(study | {"compression": "adapt_norm"}, vectors, seed=SEED + run)
        for run in range(20)
    )
    release = next(each for each in releases if each.plan["parameters"]["compressed"])
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert abs(error / (release.standard_error * math.sqrt(4_000)) - 1) < 0.08


IN_COHORTS = STUDY | {"trust": "secure", "epsilon": 4.0, "dropout": 0.05, "compression": "none"}


def test_cohorts_add_up_to_the_mean_with_the_error_and_the_cost_that_were_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The squared error of 4,000 coordinates has a relative deviation of 2.3%, so that its root is
    a tenth off with a probability below 1e-8 (chi-squared). One masked round of all devices would
    have about 1/√3 of the error: the last line, which is the control."""
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 200)
    vectors = cloud(600, 4_000, 0.1)
    planned = plan(IN_COHORTS | {"devices": 600, "dimensions": 4_000})
    ledger = Ledger(Budget(epsilon=4.0, delta=1e-6))
    release = simulate(planned, vectors, seed=1, ledger=ledger)
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert 0.9 < error / planned.predicted["l2_error"] < 1.1
    assert 0.9 < release.standard_error / planned.predicted["standard_error"] < 1.1
    assert release.cost.devices == 600
    assert release.cost.rounds == planned.predicted["rounds"] == 3
    assert release.cost.bytes_per_device == planned.predicted["bytes_per_device"]
    assert [entry.cohort for entry in ledger.entries()] == ["cohort 0", "cohort 1", "cohort 2"]
    assert ledger.spent() <= 4.0
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 600)
    together = plan(IN_COHORTS | {"devices": 600, "dimensions": 4_000}).predicted["l2_error"]
    assert together < error / 1.5


def test_every_cohort_is_asked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 150)
    vectors = cloud(300, 3_000, 0.1)
    ledger = Ledger(Budget(epsilon=4.0, delta=1e-6))
    study = IN_COHORTS | {"compression": "adapt_norm"}
    release = simulate(study, vectors, seed=1, ledger=ledger)
    assert [entry.cohort for entry in ledger.entries()] == ["cohort 0", "cohort 1"] * 2
    assert 3.9 < ledger.spent() <= 4.0
    assert release.cost.rounds == 4
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert 0.8 < error / (release.standard_error * math.sqrt(3_000)) < 1.25


def test_masked_rounds_of_cohorts_give_the_sum_that_adding_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 20)
    study = IN_COHORTS | {"epsilon": math.inf, "dropout": 0.0}
    vectors = np.round(cloud(60, 40) * 2**16) / 2**16
    planned = plan(study | {"devices": 60, "dimensions": 40})
    added = simulate(planned, vectors, seed=1)
    masked = simulate(planned, vectors, seed=1, protocol=True)
    assert np.array_equal(np.rint(added.mean * 2**16 * 60), (vectors * 2**16).sum(axis=0))
    assert np.array_equal(masked.mean, added.mean)
    assert sum("completed the masked round" in note for note in masked.notes) == 3


def test_too_few_devices_with_a_vector_release_nothing() -> None:
    vectors = cloud(100, 10)
    vectors[:50] = math.nan
    planned = plan(STUDY | {"trust": "secure", "devices": 100, "dimensions": 10, "dropout": 0.0})
    with pytest.raises(ImpossibleError, match="devices; got 50"):
        simulate(planned, vectors, seed=1)


def test_a_mean_is_of_vectors_and_nothing_else_is() -> None:
    with pytest.raises(DataError, match="must be an array of vectors"):
        simulate(STUDY, ["oak", "elm"])
    with pytest.raises(DataError, match="the question is frequencies"):
        simulate({"question": "frequencies", "trust": "central", "epsilon": 1.0}, np.ones((3, 2)))
    items: Any = np.array(["oak", "elm", "oak"])
    listed = simulate(
        {"question": "frequencies", "trust": "central", "epsilon": 1.0}, items, seed=1
    )
    assert len(listed) == 2  # a one-dimensional array has items
    with pytest.raises(DataError, match="devices, dimensions"):
        simulate(STUDY, np.ones(3))
    with pytest.raises(DataError, match="have 3 dimensions"):
        simulate(STUDY | {"dimensions": 4}, np.ones((3, 3)))
    with pytest.raises(DataError, match="no columns"):
        simulate(STUDY, np.ones((3, 3)), item_column="x")


@pytest.mark.parametrize("clip", [1e-320, 1e-21, 1e21, 1e300])
def test_a_clip_that_float32_cannot_hold_is_refused(clip: float) -> None:
    with pytest.raises(SpecError, match="another unit"):
        plan(STUDY | {"clip": clip, "devices": 100, "dimensions": 3_000})


@pytest.mark.parametrize("clip", [1e-20, 1e20])
def test_the_least_and_the_largest_clip_make_the_same_table(clip: float) -> None:
    vectors = cloud(20, 2_000)
    ask = STUDY | {"epsilon": 50.0, "relative_error": 1.0}
    release = simulate(ask | {"clip": clip}, vectors * clip, seed=1)
    assert release.plan["parameters"]["compressed"]
    assert np.allclose(release.mean / clip, simulate(ask, vectors, seed=1).mean, atol=1e-3)


@pytest.mark.parametrize("dimensions", [1, 4, 5, 6, 9, 40])
def test_short_vectors_are_sent_whole_whatever_the_compression(dimensions: int) -> None:
    """Five dimensions and fewer leave no width to double."""
    for compression in ("adapt_norm", "adapt_tail"):
        keys = {"devices": 50, "dimensions": dimensions, "compression": compression}
        assert plan(STUDY | keys).algorithm == "whole vectors"


@pytest.mark.slow
def test_noise_of_all_shares_together_can_be_drawn() -> None:
    study = STUDY | {"trust": "secure", "dropout": 0.2, "corrupt": 0.2, "epsilon": 0.03}
    release = simulate(study, cloud(300, 20), seed=1)
    assert 0.5 < np.linalg.norm(release.mean) / (release.standard_error * math.sqrt(20)) < 2


def test_a_plan_counts_who_does_not_answer_as_a_release_does() -> None:
    study = STUDY | {"epsilon": 50.0, "dropout": 0.2, "compression": "none"}
    release = simulate(study, cloud(1_000, 40), seed=1)
    predicted = release.plan["predicted"]
    assert predicted["l2_error"] > 5 * predicted["l2_error_of_noise"]
    assert math.isclose(predicted["standard_error"], release.standard_error, rel_tol=0.25)


def test_a_promise_names_the_noise_of_every_round() -> None:
    planned = plan(STUDY | {"devices": 300, "dimensions": 8_000})
    design = planned.design
    assert isinstance(design, MeanDesign)
    for share in (0.1, 0.9):
        assert f"{design.multiplier / math.sqrt(share):.4f} times" in planned.privacy.statement


def test_numbers_beyond_a_double_and_masked_ones_are_missing() -> None:
    long = np.full((30, 4), 0.1, dtype=np.longdouble)
    long[3, 1] = np.finfo(np.longdouble).max
    masked = np.ma.masked_array(np.full((30, 4), 0.1), mask=np.zeros((30, 4), dtype=np.bool_))
    masked[3, 1] = np.ma.masked
    beyond = np.finfo(np.longdouble).max > np.finfo(np.float64).max  # not on every machine
    assert simulate(STUDY, long, seed=1).cost.devices == (29 if beyond else 30)
    assert simulate(STUDY, masked, seed=1).cost.devices == 29


@pytest.mark.parametrize(
    ("text", "match"),
    [("0.5,0.25\n1,2\n", "must have the names of its columns"), ("a,a\n1,2\n", "different names")],
)
def test_a_file_whose_columns_have_no_names_is_refused(
    tmp_path: Any, text: str, match: str
) -> None:
    path = tmp_path / "vectors.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=match):
        load(path)
    path.write_text("0,1\n1,2\n")
    assert load(path).tolist() == [[1.0, 2.0]]


def test_names_of_columns_stay_with_the_mean(tmp_path: Any) -> None:
    csv, numbers, array = (tmp_path / name for name in ("named.csv", "plain.csv", "v.npy"))
    csv.write_text("steps,hours\n" + "0.3,0.1\n" * 200)
    numbers.write_text("0,1\n" + "0.3,0.1\n" * 200)
    np.save(array, load(csv))
    assert [names(path) for path in (csv, numbers, array)] == [("steps", "hours"), None, None]
    parquet, lists = tmp_path / "named.parquet", tmp_path / "lists.parquet"
    pq.write_table(pa.table({"steps": [0.3], "hours": [0.1]}), parquet)
    pq.write_table(pa.table({"vector": [[0.3, 0.1]]}), lists)
    assert (names(parquet), names(lists)) == (("steps", "hours"), None)
    release = replace(simulate(STUDY, load(csv), seed=1), names=names(csv))
    assert release.frame()["coordinate"].to_pylist() == ["steps", "hours"]
    assert "steps" in repr(release)
    assert MeanRelease.from_dict(json.loads(release.to_json())).names == ("steps", "hours")
    bare = replace(release, names=None)
    assert bare.frame()["coordinate"].to_pylist() == [0, 1]
    assert MeanRelease.from_dict(json.loads(bare.to_json())).names is None


def test_nothing_of_a_vector_is_printed() -> None:
    campaign = run_campaign(
        replace(DESIGN, compression="none", dimensions=10, most_cells=10, devices=5), cloud(5, 10)
    )
    assert repr(campaign.estimate()) == "MeanEstimate(10 coordinates, 5 devices)"


# The split of adapt_tail's budget

TAIL: dict[str, Any] = {
    "question": "mean", "trust": "central", "epsilon": 4.0, "delta": 1e-6, "clip": 1.0,
    "compression": "adapt_tail", "relative_error": 0.5,
}  # fmt: skip


def sparse_vectors(devices: int = 400, dimensions: int = 600) -> F64:
    """Six large coordinates, the same for all devices."""
    vectors = np.zeros((devices, dimensions))
    vectors[:, :6] = 1 / math.sqrt(6)
    return vectors


def tail_campaign(design: MeanDesign, vector: F64, seed: int) -> MeanCampaign:
    """A campaign over 400 devices with the same vector."""
    campaign = MeanCampaign(design)
    while (task := campaign.next_task()) is not None:
        assert isinstance(task.sketch, VectorSketch)
        tables = task.sketch.tables(vector[None], rng=SeededRng(1))
        total = task.sketch.encode(tables, np.array([400]))
        rng = SeededRng(SEED, seed, len(campaign.answers))
        campaign.absorb(NoisedSum(task, task.mechanism.at_release(total, count=400, rng=rng), 400))
    return campaign


def test_the_round_that_is_read_has_what_the_search_for_a_size_leaves() -> None:
    """The search has three tenths, the pilot one, and the last round the rest. The list of losses
    that is charged has all of them."""
    proposal = plan(TAIL | {"devices": 400, "dimensions": 600})
    design = proposal.design
    assert isinstance(design, MeanDesign)
    assert math.isclose(sum(design.shares), 1.0)
    assert math.isclose(design.shares[-1], 0.6)
    assert math.isclose(sum(design.shares[1:-1]), 0.3)
    tasks = tail_campaign(design, sparse_vectors()[0], 1).tasks
    charges = [design.charge_of(task) for task in tasks]
    books = Ledger(Budget(epsilon=4.0, delta=1e-6))
    for task, charge in zip(tasks, charges, strict=True):
        books.charge(campaign=task.campaign, cohort=task.cohort, task=task.id, loss=charge)
    assert 3.9 < books.spent() <= 4.0
    assert (
        f"{design.multiplier / math.sqrt(0.6):.4f} times it in the last"
        in proposal.privacy.mechanism
    )


def test_the_last_sketch_is_the_one_that_was_found_and_otherwise_vectors_are_whole() -> None:
    """One large coordinate fits into a small sketch, of which a pilot with a deviation's slack is
    sure in at least half of the runs: fewer than 2 of 24 with a probability below 2e-6. A dense
    vector fits into none: its mean errs as one of whole vectors with the last round's share."""
    design = plan(TAIL | {"devices": 400, "dimensions": 2_000}).design
    assert isinstance(design, MeanDesign)
    sketches = 0
    for seed in range(24):
        campaign = tail_campaign(replace(design, seed=seed), np.eye(1, 2_000)[0], seed)
        last, before = (task.sketch for task in campaign.tasks[:-3:-1])
        assert isinstance(last, VectorSketch)
        assert isinstance(before, VectorSketch)
        assert last.dense in (before.dense, None)
        assert campaign.estimate().settled
        sketches += last.dense is not None
    assert sketches >= 2
    dense = np.random.default_rng(SEED).standard_normal(2_000)
    dense /= np.linalg.norm(dense)
    campaign = tail_campaign(design, dense, 1)
    assert not campaign.estimate().compressed
    error = float(np.linalg.norm(campaign.estimate().mean - dense))
    alone = math.sqrt(2_000 / 0.6) * design.multiplier / 400
    assert 0.9 < error / alone < 1.1  # six deviations


@pytest.mark.slow
def test_a_sparse_mean_errs_less_than_with_an_even_split() -> None:
    """In each of eight runs, with more noise than collisions: if splits were alike, 2**-8."""
    study = TAIL | {"epsilon": 0.5, "devices": 400, "dimensions": 600}
    proposal, fleet = plan(study), sparse_vectors()
    assert isinstance(proposal.design, MeanDesign)
    even = replace(proposal, design=replace(proposal.design, search_share=None))
    for seed in range(8):
        ours, theirs = (
            float(np.linalg.norm(simulate(each, fleet, seed=seed).mean - fleet.mean(axis=0)))
            for each in (proposal, even)
        )
        assert ours < theirs


@pytest.mark.parametrize("blocks", [1, 3, 5, 15])
def test_a_median_of_blocks_has_the_variance_that_plans_count_on(blocks: int) -> None:
    """200,000 draws: the relative deviation of a variance is below 0.5%; six of them."""
    draws = np.random.default_rng(SEED).standard_normal((200_000, blocks))
    measured = np.median(draws, axis=1).var()
    assert math.isclose(measured, median_variance(blocks), rel_tol=0.03)


def test_the_papers_blocks_and_rows_are_those_of_the_study() -> None:
    design = plan(TAIL | {"devices": 400, "dimensions": 20_000, "blocks": 7, "rows": 3}).design
    assert isinstance(design, MeanDesign)
    sketch = design.task(1, 16).sketch
    assert isinstance(sketch, VectorSketch)
    assert sketch.dense is not None
    assert (sketch.dense.blocks, sketch.dense.rows, sketch.shape) == (7, 3, (21, 16))
    means = plan(STUDY | {"devices": 400, "dimensions": 20_000, "rows": 4}).design
    assert isinstance(means, MeanDesign)
    assert means.sketch(1, 8).shape == (4, 8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"blocks": 4}, "blocks must be odd"),
        ({"compression": "adapt_norm", "blocks": 5}, "blocks has no effect"),
        ({"compression": "none", "rows": 5}, "rows has no effect"),
        ({"failure_probability": 0.1}, "failure_probability has no effect"),
    ],
)
def test_sizes_of_the_paper_without_effect_or_sense_are_refused(
    change: dict[str, Any], match: str
) -> None:
    with pytest.raises(SpecError, match=match):
        plan(TAIL | {"devices": 400, "dimensions": 20_000} | change)


def test_the_papers_beta_sizes_its_sketches() -> None:
    """A tenth of beta: a row more in the pilot, and a longer slack."""
    keys = STUDY | {"devices": 400, "dimensions": 20_000, "compression": "adapt_norm"}
    designs = [
        plan(keys | {"paper_mode": True, "failure_probability": beta}).design
        for beta in (0.05, 0.005)
    ]
    widths, rows = [], []
    for design in designs:
        assert isinstance(design, MeanDesign)
        widths.append(replace(design, paper_epsilon=1.0).paper_width(0.1))
        rows.append(design.sketch(0, 2).shape[0])
    assert rows == [math.ceil(math.log(4 / beta)) for beta in (0.05, 0.005)]
    assert widths[0] < widths[1]

"""Rounds of updates without a framework: what is encoded, added and decoded, and what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as draw

from sfumato.errors import BudgetError, ImpossibleError, MismatchError, SpecError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.integrations.rounds import (
    VERSION,
    Layout,
    Refusal,
    Spending,
    UpdateDesign,
    UpdateRound,
    decode,
    encode,
    multiplier_for,
    seal,
    unseal,
)
from sfumato.privacy import AdditiveLoss, NoPrivacy, SeededRng, epsilon_of
from sfumato.privacy.accounting import SampledLoss
from sfumato.secagg import rehearsal
from sfumato.secagg.coordinator import Phase

MODEL = {
    "weight": np.arange(240, dtype=np.float32).reshape(12, 20) / 100,
    "bias": np.zeros(20, dtype=np.float64),
    "batches": np.array(5),
}
LAYOUT = Layout.of(MODEL)
LENGTH = 260


def updates(count: int, length: float = 0.8) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(1).standard_normal((count, LENGTH))
    return np.asarray(length * drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def test_an_update_moves_the_arrays_and_is_read_off_them() -> None:
    update = updates(1)[0]
    after = LAYOUT.moved(MODEL, update)
    assert LAYOUT.length == LENGTH
    assert after["batches"] is MODEL["batches"]
    assert {name: held.dtype for name, held in after.items()} == {
        name: held.dtype for name, held in MODEL.items()
    }
    # Weights are float32 numbers below 2.4: each is rounded once, by at most 2**-23 × 2.4.
    assert np.abs(LAYOUT.difference(after, MODEL) - update).max() <= 2.4 * 2**-23


@pytest.mark.parametrize(
    "other",
    [
        {**MODEL, "bias": np.zeros(21)},
        {**MODEL, "bias": np.zeros(20, dtype=np.float32)},
        {name: MODEL[name] for name in ("bias", "weight", "batches")},
        {name: MODEL[name] for name in ("weight", "bias")},
    ],
)
def test_arrays_of_another_layout_are_refused(other: Any) -> None:
    assert Layout.of(other).digest != LAYOUT.digest
    with pytest.raises(MismatchError, match="must answer with the arrays it was sent"):
        LAYOUT.difference(other, MODEL)


def test_an_update_of_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match="must have 260 coordinates"):
        LAYOUT.moved(MODEL, np.zeros(259))


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_the_mean_comes_back_up_to_rounding(rate: float) -> None:
    """Whole updates: each client is rounded by one whole number at most. Sketched: the decoded mean
    is that of the exact sketch up to √rows times as much."""
    design = UpdateDesign(clip=1.0, rate=rate, rows=5, seed=9)
    told, rng = design.round(LAYOUT, 7, 3), SeededRng(1)
    given = updates(7, 0.5)
    total = sum(unseal(seal(encode(each, told, rng=rng), told), told) for each in given)
    found = decode(np.asarray(total), 7, told, rng=rng)
    mean = given.mean(axis=0)
    if rate == 1:
        wanted = mean
    else:
        assert told.sketch.dense is not None
        wanted = told.sketch.dense.decode(told.sketch.dense.encode(mean)).astype(np.float64)
    assert np.abs(found - wanted).max() <= math.sqrt(5) / told.sketch.scale + 1e-5
    assert np.abs(found + wanted).max() > 10 / told.sketch.scale  # the negative control


def test_a_masked_round_gives_what_the_plain_one_gives() -> None:
    """The same updates through every message of a masked round, two clients vanishing."""
    design = UpdateDesign(clip=1.0, rate=2.0, rows=4, secure=True, dropout=0.4, seed=9)
    told, rng = design.round(LAYOUT, 8, 1), SeededRng(2)
    tables = [encode(each, told, rng=rng) for each in updates(8)]
    masked = told.task.masked_round(8, "0" * 32)
    leaving = {1: Phase.MASK, 6: Phase.SHARE}
    outcome = rehearsal.run(masked, tables.__getitem__, leaving=leaving, rng=rng)
    assert outcome.survivors == 6
    total = told.task.aggregation.open(outcome.total)
    wanted = sum(table for member, table in enumerate(tables) if member not in leaving)
    assert np.array_equal(total, wanted)
    found = decode(total, 6, told, rng=rng)
    plain = replace(design, secure=False).round(LAYOUT, 8, 1)
    assert plain.sketch == told.sketch
    assert np.array_equal(found, decode(np.asarray(wanted), 6, plain, rng=rng))


def test_noise_in_shares_is_enough_for_the_fewest_that_may_be_left() -> None:
    design = UpdateDesign(
        clip=1.0, noise_multiplier=1.5, secure=True, dropout=0.3, corrupt=0.2, seed=1
    )
    told = design.round(LAYOUT, 10, 1)
    scale = 1.5 * told.sketch.rounding.l2
    assert told.task.min_count == 7
    # Of seven that are left two tell their share: the others' five make up the noise.
    assert told.task.mechanism.stddev(5) == pytest.approx(scale, rel=1e-12)
    loss = told.loss
    assert isinstance(loss, AdditiveLoss)
    assert (loss.noise, loss.scale) == ("skellam", scale)


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_never_wraps(secure: bool) -> None:
    """With the largest tables there can be: one coordinate holds all, and all clients agree."""
    design = UpdateDesign(clip=1.0, secure=secure, seed=1)
    told, rng = design.round(LAYOUT, 5, 1), SeededRng(1)
    update = np.zeros(LENGTH)
    update[3] = -50.0
    total = sum(encode(update, told, rng=rng) for _ in range(5))
    aggregation = told.task.aggregation
    modulus = 1 << aggregation.modulus_bits
    assert np.array_equal(aggregation.open(np.asarray(total) % modulus), total)
    assert decode(np.asarray(total), 5, told, rng=rng)[3] == pytest.approx(-1, abs=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_sent_as_zeros(bad: float) -> None:
    """A client that abstained would change how many are in a round, which has no noise."""
    told = UpdateDesign(clip=1.0, rate=3.0, seed=1).round(LAYOUT, 5, 1)
    update = updates(1)[0]
    assert encode(update, told, rng=SeededRng(1)).any()
    update[11] = bad
    assert not encode(update, told, rng=SeededRng(1)).any()


def test_a_server_that_is_not_trusted_knows_the_cohorts() -> None:
    """So masked sums are charged to everybody, and what is said of random cohorts names whom it
    holds against."""
    with pytest.raises(SpecError, match="it knows who is in a round"):
        UpdateDesign(clip=1.0, secure=True, sampling="fixed", seed=1)
    assert UpdateDesign(clip=1.0, secure=True, seed=1).relation == "zero-out"
    assert UpdateDesign(clip=1.0, sampling="fixed", seed=1).relation.startswith("replace, against")


def test_a_table_that_no_client_can_have_is_refused() -> None:
    told = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 1)
    long = np.full(LENGTH, told.sketch.rounding.largest, dtype=np.int64)
    with pytest.raises(MismatchError, match="norm of at most"):
        unseal(seal(long, told), told)
    with pytest.raises(MismatchError, match="bytes"):
        unseal(b"", told)


def test_tables_of_masked_rounds_do_not_travel_bare() -> None:
    told = UpdateDesign(clip=1.0, secure=True, seed=1).round(LAYOUT, 5, 1)
    table = encode(updates(1)[0], told, rng=SeededRng(1))
    with pytest.raises(SpecError, match="masks alone"):
        seal(table, told)
    with pytest.raises(SpecError, match="never seen alone"):
        unseal(b"", told)


@pytest.mark.parametrize("count", [0, 3, 6])
def test_too_few_or_too_many_clients_open_nothing(count: int) -> None:
    told = UpdateDesign(clip=1.0, secure=True, dropout=0.2, seed=1).round(LAYOUT, 5, 1)
    assert (told.task.min_count, told.task.max_count) == (4, 5)
    with pytest.raises(ImpossibleError, match="4 at the least"):
        decode(np.zeros(LENGTH, dtype=np.int64), count, told, rng=SeededRng(1))


@given(
    draw.floats(0.01, 100),
    draw.sampled_from([0.0, 0.5, 3.0]),
    draw.floats(1, 50),
    draw.booleans(),
    draw.integers(3, 40),
    draw.integers(0, 2**53 - 1),
)
def test_a_round_is_the_same_after_its_journey(
    clip: float, noise: float, rate: float, secure: bool, asked: int, seed: int
) -> None:
    design = UpdateDesign(
        clip=clip, noise_multiplier=noise, rate=rate, secure=secure, dropout=0.1, seed=seed
    )
    told = design.round(LAYOUT, asked, 4)
    again = UpdateRound.from_json(told.to_json())
    assert again == told
    assert again.id == told.id
    assert isinstance(told.task.aggregation, Masked if secure else Plain)


def test_every_part_of_a_round_is_in_its_id() -> None:
    design = UpdateDesign(clip=1.0, noise_multiplier=1.0, rate=2.0, seed=1)
    told = design.round(LAYOUT, 5, 1)
    others = [
        replace(design, clip=2.0).round(LAYOUT, 5, 1),
        replace(design, noise_multiplier=2.0).round(LAYOUT, 5, 1),
        replace(design, rate=3.0).round(LAYOUT, 5, 1),
        replace(design, rows=4).round(LAYOUT, 5, 1),
        replace(design, seed=2).round(LAYOUT, 5, 1),
        replace(design, secure=True).round(LAYOUT, 5, 1),
        design.round(LAYOUT, 6, 1),
        design.round(LAYOUT, 5, 2),
        replace(told, layout="0" * 64),
    ]
    assert len({each.id for each in others} | {told.id}) == 10


def test_what_does_not_belong_is_named() -> None:
    told = UpdateDesign(clip=1.0, rate=2.0, seed=1).round(LAYOUT, 5, 2)
    right: dict[str, Any] = {
        "version": VERSION,
        "layout": told.layout,
        "seed": [1, 2],
        "round": told.id,
    }
    assert told.refusal_of(**right) is None
    wrong = {
        "version": (2, Refusal.VERSION),
        "layout": ("0" * 64, Refusal.SHAPE),
        "seed": ([1, 3], Refusal.SEED),
        "round": ("0" * 64, Refusal.ROUND),
    }
    for name, (value, refusal) in wrong.items():
        for given_value in (value, None):
            assert told.refusal_of(**{**right, name: given_value}) is refusal


def test_a_round_of_another_version_or_with_other_fields_is_refused() -> None:
    told = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 2)
    data = json.loads(told.to_json())
    with pytest.raises(MismatchError, match="version 1; got 2"):
        UpdateRound.from_json(json.dumps({**data, "version": 2}))
    broken: list[str] = [
        "",
        "[]",
        "{}",
        "7",
        json.dumps({**data, "more": 1}),
        json.dumps({**data, "task": {}}),
        json.dumps({**data, "task": {**data["task"], "kind": "plain"}}),
    ]
    for text in broken:
        with pytest.raises(SpecError):
            UpdateRound.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": math.nan},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.inf},
        {"rate": 0.5},
        {"rows": 0},
        {"dropout": 1.0},
        {"corrupt": -0.1},
        {"sampling": "poisson"},
        {"seed": -1},
    ],
)
def test_a_design_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        UpdateDesign(**{"clip": 1.0, "seed": 1, **wrong})


@pytest.mark.parametrize(
    ("asked", "dropout", "corrupt"), [(2, 0.0, 0.0), (4, 0.9, 0.0), (5, 0.5, 0.6)]
)
def test_too_few_clients_for_a_secure_sum_are_refused(
    asked: int, dropout: float, corrupt: float
) -> None:
    design = UpdateDesign(
        clip=1.0, noise_multiplier=1.0, secure=True, dropout=dropout, corrupt=corrupt, seed=1
    )
    with pytest.raises(ImpossibleError, match="too few for a secure sum"):
        design.round(LAYOUT, asked, 1)


def test_noise_at_the_server_costs_what_a_gaussian_costs() -> None:
    told = UpdateDesign(clip=3.0, noise_multiplier=2.0, rate=2.0, seed=1).round(LAYOUT, 5, 1)
    spending = Spending(delta=1e-5)
    for _ in range(10):
        spending.charge(told.loss)
    unit = AdditiveLoss(noise="gaussian", scale=2.0, l1=1.0, l2=1.0, unit_cells=0)
    assert spending.epsilon == pytest.approx(epsilon_of([unit] * 10, 1e-5), rel=1e-9)


def test_rounds_with_random_cohorts_are_composed_as_such() -> None:
    loss = AdditiveLoss(noise="gaussian", scale=1500.0, l1=1000.0, l2=1000.0, unit_cells=0)
    spending = Spending(delta=1e-5)
    for _ in range(20):
        spending.charge(loss, 0.05)
    spending.charge(loss)
    sampled = SampledLoss(loss=loss, probability=0.05, scheme="fixed", times=20)
    assert spending.epsilon == pytest.approx(epsilon_of([sampled, loss], 1e-5), rel=1e-12)
    assert spending.rounds == 21


def test_a_round_without_noise_costs_everything() -> None:
    spending = Spending(delta=1e-5)
    assert spending.epsilon == 0
    told = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 1)
    spending.charge(told.loss, 0.1)
    assert told.loss == NoPrivacy()
    assert spending.epsilon == math.inf


def test_a_charge_beyond_the_budget_is_refused_and_not_recorded() -> None:
    loss = AdditiveLoss(noise="gaussian", scale=1.0, l1=1.0, l2=1.0, unit_cells=0)
    budget = epsilon_of([loss] * 2, 1e-5)
    spending = Spending(delta=1e-5, most_epsilon=budget)
    spending.charge(loss)
    spending.charge(loss)
    with pytest.raises(BudgetError, match="another one would make it"):
        spending.charge(loss)
    assert spending.rounds == 2
    assert spending.epsilon == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize("probability", [None, 0.05])
def test_the_multiplier_is_the_least_that_keeps_epsilon(probability: float | None) -> None:
    multiplier = multiplier_for(4.0, delta=1e-5, rounds=30, probability=probability)

    def cost(noise: float) -> float:
        spending = Spending(delta=1e-5)
        design = UpdateDesign(clip=1.0, noise_multiplier=noise, seed=1)
        for _ in range(30):
            spending.charge(design.round(LAYOUT, 5, 1).loss, probability)
        return spending.epsilon

    assert cost(multiplier) <= 4.0 * (1 + 1e-9)
    assert cost(multiplier / 1.01) > 4.0


def test_an_epsilon_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ImpossibleError, match="no noise multiplier"):
        multiplier_for(1e-6, delta=1e-9, rounds=1000)


def test_the_example_before_and_after_differs_in_what_it_says() -> None:
    """The two apps of the Flower example have the same model and data."""
    from pathlib import Path

    folder = Path(__file__).resolve().parents[3] / "examples" / "flower_quickstart"
    for name in ("digits/task.py", "digits/__init__.py"):
        before, after = (
            (folder / side / name).read_text(encoding="utf-8") for side in ("before", "after")
        )
        assert before == after

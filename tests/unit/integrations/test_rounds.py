"""Rounds of updates without a framework: encoding, adding, decoding and accounting."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as draw

from sfumato.errors import BudgetError, ImpossibleError, MismatchError, SpecError, TaskError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.contribute import contribute, report
from sfumato.flow.release import NoisedSum, charge, noised_sum
from sfumato.integrations.rounds import (
    VERSION,
    Layout,
    Refusal,
    Spending,
    UpdateDesign,
    UpdateRound,
    multiplier_for,
)
from sfumato.privacy import AdditiveLoss, NoPrivacy, Rng, SeededRng, epsilon_of
from sfumato.privacy.accounting import SampledLoss
from sfumato.privacy.ledger import Account, Budget, Ledger
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
    values = np.random.default_rng(1).standard_normal((count, LENGTH))
    return np.asarray(length * values / np.linalg.norm(values, axis=1, keepdims=True))


def table_of(
    update: np.ndarray[Any, Any], update_round: UpdateRound, rng: Rng
) -> np.ndarray[Any, Any]:
    return contribute(update_round.task, update_round.values(update, rng=rng), devices=1, rng=rng)


def open_sum(
    update_round: UpdateRound, total: Any, count: int, spending: Spending | None = None
) -> NoisedSum:
    spending = spending or Spending(delta=1e-5)
    batch = Batch(update_round.task.id, np.asarray(total), count)
    return noised_sum(update_round.task, batch, ledger=spending, rng=SeededRng(7))


def mean_of(update_round: UpdateRound, total: Any, count: int) -> np.ndarray[Any, Any]:
    return update_round.sketch.decode(open_sum(update_round, total, count).table, count)


def charge_rounds(
    books: Account, update_round: UpdateRound, times: int, share: float | None = None
) -> None:
    """Charge `times` rounds like this one, to everybody or to cohorts of a share of the clients."""
    sampling: Any = "all" if share is None else "fixed"
    design = UpdateDesign(clip=1.0, sampling=sampling, seed=1)
    loss = design.charge_of(update_round.task, share or 1.0)
    for number in range(times):
        task = replace(update_round.task, campaign=f"{update_round.task.campaign} again {number}")
        charge(task, ledger=books, loss=loss)


def test_an_update_moves_the_arrays_and_is_read_off_them() -> None:
    update = updates(1)[0]
    after = LAYOUT.apply(MODEL, update)
    assert LAYOUT.length == LENGTH
    assert after["batches"] is MODEL["batches"]
    assert {name: array.dtype for name, array in after.items()} == {
        name: array.dtype for name, array in MODEL.items()
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
        LAYOUT.apply(MODEL, np.zeros(259))


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_the_mean_comes_back_up_to_rounding(rate: float) -> None:
    """Whole updates: each client is rounded by one whole number at most. Sketched: the decoded mean
    is that of the exact sketch up to √rows times as much."""
    design = UpdateDesign(clip=1.0, rate=rate, rows=5, seed=9)
    update_round, rng = design.round(LAYOUT, 7, 3), SeededRng(1)
    vectors = updates(7, 0.5)
    batch = Batch.empty(update_round.task)
    for each in vectors:
        batch += update_round.batch(
            report(update_round.task, update_round.values(each, rng=rng), rng=rng).message
        )
    assert batch.count == 7
    result = mean_of(update_round, batch.total, 7)
    mean = vectors.mean(axis=0)
    if rate == 1:
        expected = mean
    else:
        assert update_round.sketch.dense is not None
        expected = update_round.sketch.dense.decode(update_round.sketch.dense.encode(mean)).astype(
            np.float64
        )
    assert np.abs(result - expected).max() <= math.sqrt(5) / update_round.sketch.scale + 1e-5
    assert np.abs(result + expected).max() > 10 / update_round.sketch.scale  # the negative control


def test_a_masked_round_gives_what_the_plain_one_gives() -> None:
    """The same updates through every message of a masked round, two clients vanishing."""
    design = UpdateDesign(clip=1.0, rate=2.0, rows=4, secure=True, dropout=0.4, seed=9)
    update_round, rng = design.round(LAYOUT, 8, 1), SeededRng(2)
    tables = [table_of(each, update_round, rng).reshape(-1) for each in updates(8)]
    masked = update_round.task.masked_round(8, "0" * 32)
    leaving = {1: Phase.MASK, 6: Phase.SHARE}
    outcome = rehearsal.run(masked, tables.__getitem__, leaving=leaving, rng=rng)
    assert outcome.survivors == 6
    total = outcome.total.astype(np.int64).reshape(update_round.sketch.shape)
    expected = sum(table for member, table in enumerate(tables) if member not in leaving)
    assert np.array_equal(update_round.task.aggregation.open(total).reshape(-1), expected)
    plain = replace(design, secure=False).round(LAYOUT, 8, 1)
    assert plain.sketch == update_round.sketch
    summed = np.asarray(expected).reshape(plain.sketch.shape)
    assert np.array_equal(mean_of(update_round, total, 6), mean_of(plain, summed, 6))


def test_noise_in_shares_is_enough_for_the_fewest_that_may_be_left() -> None:
    design = UpdateDesign(
        clip=1.0, noise_multiplier=1.5, secure=True, dropout=0.3, corrupt=0.2, seed=1
    )
    update_round = design.round(LAYOUT, 10, 1)
    scale = 1.5 * update_round.sketch.rounding.l2
    assert update_round.task.min_count == 7
    # Two of the seven that are left reveal their shares: the other five make up the noise.
    assert update_round.task.mechanism.stddev(5) == pytest.approx(scale, rel=1e-12)
    loss = update_round.task.loss
    assert isinstance(loss, AdditiveLoss)
    assert (loss.noise, loss.scale) == ("skellam", scale)


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_never_wraps(secure: bool) -> None:
    """With the largest possible tables: one coordinate has everything, and all clients agree."""
    design = UpdateDesign(clip=1.0, secure=secure, seed=1)
    update_round, rng = design.round(LAYOUT, 5, 1), SeededRng(1)
    update = np.zeros(LENGTH)
    update[3] = -50.0
    total = np.asarray(sum(table_of(update, update_round, rng) for _ in range(5)))
    aggregation = update_round.task.aggregation
    modulus = 1 << aggregation.modulus_bits
    assert np.array_equal(aggregation.open(total % modulus), total)
    assert mean_of(update_round, total % modulus, 5)[3] == pytest.approx(-1, abs=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_sent_as_zeros(bad: float) -> None:
    """A client that abstained would change the number of clients in a round, which has no noise."""
    update_round = UpdateDesign(clip=1.0, rate=3.0, seed=1).round(LAYOUT, 5, 1)
    update = updates(1)[0]
    assert table_of(update, update_round, SeededRng(1)).any()
    update[11] = bad
    assert not table_of(update, update_round, SeededRng(1)).any()


def test_a_server_that_is_not_trusted_knows_the_cohorts() -> None:
    """So masked sums are charged to everybody, and the relation for random cohorts says against
    whom it holds."""
    with pytest.raises(SpecError, match="it knows who is in a round"):
        UpdateDesign(clip=1.0, secure=True, sampling="fixed", seed=1)
    assert UpdateDesign(clip=1.0, secure=True, seed=1).relation == "zero-out"
    assert UpdateDesign(clip=1.0, sampling="fixed", seed=1).relation.startswith("replace, against")


def test_a_table_that_no_client_can_have_is_refused() -> None:
    update_round = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 1)
    long = np.full(LENGTH, update_round.sketch.rounding.largest, dtype=np.int64)
    assert isinstance(update_round.task.aggregation, Plain)
    with pytest.raises(MismatchError, match="norm of at most"):
        update_round.batch(update_round.task.aggregation.seal(long))
    with pytest.raises(MismatchError, match="bytes"):
        update_round.batch(b"")


def test_tables_of_masked_rounds_do_not_travel_bare() -> None:
    update_round = UpdateDesign(clip=1.0, secure=True, seed=1).round(LAYOUT, 5, 1)
    rng = SeededRng(1)
    with pytest.raises(TaskError, match="takes tables in a masked round"):
        report(update_round.task, update_round.values(updates(1)[0], rng=rng), rng=rng)
    with pytest.raises(SpecError, match="never seen alone"):
        update_round.batch(b"")


@pytest.mark.parametrize("count", [0, 3, 6])
def test_too_few_or_too_many_clients_open_nothing(count: int) -> None:
    update_round = UpdateDesign(clip=1.0, secure=True, dropout=0.2, seed=1).round(LAYOUT, 5, 1)
    assert (update_round.task.min_count, update_round.task.max_count) == (4, 5)
    spending = Spending(delta=1e-5)
    with pytest.raises(ImpossibleError, match="needs 4 to 5 devices"):
        open_sum(update_round, np.zeros(LENGTH, dtype=np.int64), count, spending)
    assert spending.rounds == 0


@given(
    draw.floats(0.01, 100),
    draw.sampled_from([0.0, 0.5, 3.0]),
    draw.floats(1, 50),
    draw.booleans(),
    draw.integers(3, 40),
    draw.integers(0, 2**53 - 1),
)
def test_a_round_is_the_same_after_its_journey(
    clip: float, noise: float, rate: float, secure: bool, cohort: int, seed: int
) -> None:
    design = UpdateDesign(
        clip=clip, noise_multiplier=noise, rate=rate, secure=secure, dropout=0.1, seed=seed
    )
    update_round = design.round(LAYOUT, cohort, 4)
    again = UpdateRound.from_json(update_round.to_json())
    assert again == update_round
    assert again.id == update_round.id
    assert isinstance(update_round.task.aggregation, Masked if secure else Plain)


def test_every_part_of_a_round_is_in_its_id() -> None:
    design = UpdateDesign(clip=1.0, noise_multiplier=1.0, rate=2.0, seed=1)
    update_round = design.round(LAYOUT, 5, 1)
    others = [
        replace(design, clip=2.0).round(LAYOUT, 5, 1),
        replace(design, noise_multiplier=2.0).round(LAYOUT, 5, 1),
        replace(design, rate=3.0).round(LAYOUT, 5, 1),
        replace(design, rows=4).round(LAYOUT, 5, 1),
        replace(design, seed=2).round(LAYOUT, 5, 1),
        replace(design, secure=True).round(LAYOUT, 5, 1),
        design.round(LAYOUT, 6, 1),
        design.round(LAYOUT, 5, 2),
        replace(update_round, layout="0" * 64),
    ]
    assert len({each.id for each in others} | {update_round.id}) == 10


def test_a_refusal_names_the_field_that_does_not_belong() -> None:
    update_round = UpdateDesign(clip=1.0, rate=2.0, seed=1).round(LAYOUT, 5, 2)
    right: dict[str, Any] = {
        "version": VERSION,
        "layout": update_round.layout,
        "seed": [1, 2],
        "round": update_round.id,
    }
    assert update_round.refusal_of(**right) is None
    wrong = {
        "version": (VERSION + 1, Refusal.VERSION),
        "layout": ("0" * 64, Refusal.SHAPE),
        "seed": ([1, 3], Refusal.SEED),
        "round": ("0" * 64, Refusal.ROUND),
    }
    for name, (value, refusal) in wrong.items():
        for given_value in (value, None):
            assert update_round.refusal_of(**{**right, name: given_value}) is refusal


def test_a_round_of_another_version_or_with_other_fields_is_refused() -> None:
    update_round = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 2)
    data = json.loads(update_round.to_json())
    for other in (1, VERSION + 1):
        with pytest.raises(MismatchError, match=f"version {VERSION}; got {other}"):
            UpdateRound.from_json(json.dumps({**data, "version": other}))
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
    ("cohort", "dropout", "corrupt", "reason"),
    [
        (2, 0.0, 0.0, "at least 3 devices"),
        (4, 0.9, 0.0, "only 0 are sure to stay"),
        (5, 0.5, 0.6, "3 may be corrupt and only 3 may stay"),
    ],
)
def test_too_few_clients_for_a_secure_sum_are_refused(
    cohort: int, dropout: float, corrupt: float, reason: str
) -> None:
    design = UpdateDesign(
        clip=1.0, noise_multiplier=1.0, secure=True, dropout=dropout, corrupt=corrupt, seed=1
    )
    with pytest.raises(ImpossibleError, match=reason):
        design.round(LAYOUT, cohort, 1)


def test_noise_at_the_server_costs_what_a_gaussian_costs() -> None:
    update_round = UpdateDesign(clip=3.0, noise_multiplier=2.0, rate=2.0, seed=1).round(
        LAYOUT, 5, 1
    )
    spending = Spending(delta=1e-5)
    charge_rounds(spending, update_round, 10)
    one = AdditiveLoss(noise="gaussian", scale=2000.0, l1=1e6, l2=1000.0, unit_cells=0)
    assert spending.epsilon == pytest.approx(epsilon_of([one] * 10, 1e-5), rel=1e-6)


def test_rounds_of_any_number_add_up() -> None:
    """A client may be in all of them, even in one that is repeated."""
    design = UpdateDesign(clip=1.0, noise_multiplier=2.0, seed=1)
    spending = Spending(delta=1e-5)
    for number in (1, 2, 2):
        charge(design.round(LAYOUT, 5, number).task, ledger=spending)
    loss = design.round(LAYOUT, 5, 1).task.loss
    assert spending.epsilon == pytest.approx(epsilon_of([loss] * 3, 1e-5), rel=1e-12)


def test_rounds_with_random_cohorts_are_composed_as_such() -> None:
    update_round = UpdateDesign(clip=1.0, noise_multiplier=1.5, seed=1).round(LAYOUT, 5, 1)
    loss = update_round.task.loss
    assert isinstance(loss, AdditiveLoss)
    spending = Spending(delta=1e-5)
    charge_rounds(spending, update_round, 20, 0.05)
    charge(update_round.task, ledger=spending)
    sampled = SampledLoss(loss=loss, probability=0.05, scheme="fixed", times=20)
    assert spending.epsilon == pytest.approx(epsilon_of([sampled, loss], 1e-5), rel=1e-12)
    assert spending.rounds == 21


def test_a_round_without_noise_costs_everything() -> None:
    spending = Spending(delta=1e-5)
    assert spending.epsilon == 0
    update_round = UpdateDesign(clip=1.0, seed=1).round(LAYOUT, 5, 1)
    charge_rounds(spending, update_round, 1, 0.1)
    assert update_round.task.loss == NoPrivacy()
    assert spending.epsilon == math.inf


def test_a_round_beyond_the_budget_is_refused_and_neither_recorded_nor_opened() -> None:
    update_round = UpdateDesign(clip=1.0, noise_multiplier=1.0, seed=1).round(LAYOUT, 5, 1)
    budget = epsilon_of([update_round.task.loss] * 2, 1e-5) * (1 + 1e-12)
    spending = Spending(delta=1e-5, most_epsilon=budget)
    zeros = np.zeros(LENGTH, dtype=np.int64)
    open_sum(update_round, zeros, 5, spending)
    open_sum(update_round, zeros, 5, spending)
    with pytest.raises(BudgetError, match="another one would make it"):
        open_sum(update_round, zeros, 5, spending)
    assert spending.rounds == 2
    assert spending.epsilon == pytest.approx(budget, rel=1e-11)


@pytest.mark.parametrize(("rounds", "share", "fewer"), [(20, None, 17), (100, 0.05, 85)])
def test_a_ledger_with_a_limit_ends_a_training_earlier(
    rounds: int, share: float | None, fewer: int
) -> None:
    """That is why integrations have their own books: their list is fixed in advance."""
    noise = multiplier_for(8.0, delta=1e-5, rounds=rounds, probability=share)
    update_round = UpdateDesign(clip=1.0, noise_multiplier=noise, seed=1).round(LAYOUT, 5, 1)
    spending = Spending(delta=1e-5, most_epsilon=8.0)
    ledger = Ledger(Budget(epsilon=8.0, delta=1e-5))
    for books in (spending, ledger):
        with pytest.raises(BudgetError):
            charge_rounds(books, update_round, 2 * rounds, share)
    assert (spending.rounds, len(ledger.entries())) == (rounds, fewer)


@pytest.mark.parametrize("probability", [None, 0.05])
def test_the_multiplier_is_the_least_that_keeps_epsilon(probability: float | None) -> None:
    multiplier = multiplier_for(4.0, delta=1e-5, rounds=30, probability=probability)

    def cost(noise: float) -> float:
        spending = Spending(delta=1e-5)
        design = UpdateDesign(clip=1.0, noise_multiplier=noise, seed=1)
        charge_rounds(spending, design.round(LAYOUT, 5, 1), 30, probability)
        return spending.epsilon

    assert cost(multiplier) <= 4.0 * (1 + 1e-9)
    assert cost(multiplier / 1.01) > 4.0


def test_an_epsilon_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ImpossibleError, match="no noise multiplier"):
        multiplier_for(1e-6, delta=1e-9, rounds=1000)


def test_both_example_apps_have_the_same_model_and_data() -> None:
    from pathlib import Path

    folder = Path(__file__).resolve().parents[3] / "examples" / "flower_quickstart"
    for name in ("digits/task.py", "digits/__init__.py"):
        before, after = (
            (folder / side / name).read_text(encoding="utf-8") for side in ("before", "after")
        )
        assert before == after

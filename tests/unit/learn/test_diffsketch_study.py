"""Sketched training as a study: its promise, its traffic, and the paper's bounds on errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from checks import SEED
from sfumato import plan
from sfumato.errors import SpecError, StudyError
from sfumato.learn.data import Federated, group_by_client
from sfumato.learn.diffsketch import (
    NOT_PRIVATE,
    DiffSketch,
    DiffSketchDesign,
    SketchedTraining,
    convergence_bound,
    sizes_for,
)
from sfumato.privacy.ledger import Budget, Ledger
from sfumato.simulation.train import train

F64 = npt.NDArray[np.float64]

DIFFSKETCH: dict[str, Any] = {
    "question": "train", "trust": "central", "algorithm": "diffsketch", "rows": 5, "width": 8,
    "rounds": 12, "delta": 1e-3, "epsilon": math.inf, "devices": 10,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "model": "softmax", "inputs": 40, "classes": 2, "cohort": 10, "batch": 10, "steps": 1,
    "learning_rate": 0.5, "mode": "none",
}  # fmt: skip
PRINTED = {"mode": "paper", "claimed_epsilon": 1.0, "i_know_this_is_not_private": True}


def sums() -> Federated:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 40, generator=draw)
    targets = (inputs[:, :20].sum(dim=1) > 0).long()
    owner = torch.arange(300) % 10
    examples = group_by_client(inputs[:300], targets[:300], owner, 10)
    return Federated(examples, inputs[300:], targets[300:], "sums", public_test=True)


@pytest.mark.parametrize(
    ("study", "keys", "guarantee"),
    [
        ({}, {}, NOT_PRIVATE),
        ({}, {"sampling": "by_examples", "cohort": 4}, NOT_PRIVATE),
        ({}, PRINTED | {"padding": 9, "correction": True}, NOT_PRIVATE),
        ({"epsilon": 8.0, "clip": 0.3}, {"mode": "gaussian"}, "(8, 0.001)-differential privacy"),
        (
            {"epsilon": 8.0, "clip": 0.3},
            {"mode": "gaussian", "cohort": 3},
            "(8, 0.001)-differential privacy",
        ),
    ],
)
def test_a_study_trains_by_diffsketch_and_says_what_it_promises(
    study: dict[str, Any], keys: dict[str, Any], guarantee: str
) -> None:
    request = DIFFSKETCH | study | {"training": KEYS | keys}
    books = Ledger(Budget(epsilon=study.get("epsilon"), delta=1e-3))
    trained = train(request, sums(), ledger=books)
    epsilon = trained.privacy.epsilon
    assert trained.privacy.guarantee.startswith(guarantee.replace("(8,", f"({rounded(epsilon)},"))
    assert math.isclose(books.spent(), math.inf if epsilon is None else epsilon)
    assert epsilon is None or 7.9 < epsilon <= 8
    assert len(books.entries()) == 12
    assert trained.rate == 82 / 40
    again = [train(request, sums(), seed=1) for _ in range(2)]
    ones, others = (each.parameters for each in again)
    assert all(torch.equal(ones[name], others[name]) for name in ones)
    assert epsilon is None or any("seed" in each for each in again[0].privacy.not_covered)


def rounded(epsilon: float | None) -> str:
    return "" if epsilon is None else f"{math.ceil(1e3 * epsilon) / 1e3:g}"


def test_a_plan_counts_bytes_both_ways() -> None:
    """Algorithm 3 sends the merged sketch back; a client that misses rounds needs the model."""
    everybody = plan(DIFFSKETCH | {"training": KEYS}).predicted
    assert (everybody["bytes_per_round"], everybody["bytes_down_per_round"]) == (160, 160)
    some = plan(DIFFSKETCH | {"training": KEYS | {"cohort": 4}}).predicted
    assert (some["bytes_per_round"], some["bytes_down_per_round"]) == (160, 4 * 82)
    assert some["rate_both_ways"] == 2 * 4 * 82 / (160 + 4 * 82)


def test_cohorts_by_examples_favour_clients_with_more_of_them() -> None:
    """A client with nine tenths of the examples: its part of 3,000 draws, exact binomial test,
    false alarm 1e-6. The control: cohorts that are drawn alike would be noticed."""
    inputs, targets = torch.randn(100, 40), torch.randint(0, 2, (100,))
    owner = torch.cat([torch.zeros(90, dtype=torch.int64), 1 + torch.arange(10) % 9])
    data = Federated(group_by_client(inputs, targets, owner, 10), inputs, targets, "unequal")
    outcome = plan(DIFFSKETCH | {"training": KEYS | {"sampling": "by_examples", "cohort": 10}})
    assert isinstance(outcome.design, DiffSketchDesign)
    runner = SketchedTraining(outcome.design, data, SEED)
    hits = sum(int((runner.cohort(number) == 0).sum()) for number in range(300))
    assert stats.binomtest(hits, 3_000, 0.9).pvalue > 1e-6
    assert stats.binomtest(hits, 3_000, 0.1).pvalue < 1e-6


@pytest.mark.parametrize(
    ("study", "keys", "message"),
    [
        ({"rows": None}, {}, "needs rows and width"),
        ({"epsilon": 1.0}, {}, "promises nothing"),
        ({"clip": 1.0}, {}, "clip is for mode"),
        ({}, {"mode": "paper", "claimed_epsilon": 1.0}, "i_know_this_is_not_private"),
        ({"clip": 1.0}, {"mode": "gaussian"}, "needs epsilon"),
        ({"epsilon": 1.0, "clip": 1.0}, {"mode": "gaussian", "sampling": "by_examples"}, "private"),
        ({"compression": "free_norm"}, {}, "no effect"),
        ({"algorithm": None, "clip": 1.0}, {}, 'without algorithm = "diffsketch"'),
        ({"trust": "secure"}, {}, "federated_averaging"),
        ({}, {"sampling": "passes"}, "sampling must be"),
    ],
)
def test_what_diffsketch_cannot_do_is_refused(
    study: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises((StudyError, SpecError), match=message):
        plan(DIFFSKETCH | study | {"training": KEYS | keys})


# Lemma 1 and theorem 3


@pytest.mark.parametrize(("error", "failure"), [(0.5, 0.2)])
def test_readings_miss_no_more_often_than_lemma_1_says(error: float, failure: float) -> None:
    """Misses of one coordinate in 400 sketches of a vector with a few large coordinates: exact
    binomial test, false alarm 1e-6. The control: a tenth of the width misses more often."""
    vector = np.zeros(300, dtype=np.float32)
    vector[:9] = 1.0
    rows, width = sizes_for(error, failure)

    def misses(rows: int, width: int) -> int:
        limit, count = error * float(np.linalg.norm(vector)), 0
        for seed in range(400):
            sketch = DiffSketch(rows=rows, width=width, seed=seed).sketch(vector.size, 0)
            count += abs(float(sketch.decode(sketch.encode(vector))[20])) > limit
        return count

    assert stats.binomtest(misses(rows, width), 400, failure, alternative="greater").pvalue > 1e-6
    wrong = misses(1, 2)
    assert stats.binomtest(wrong, 400, failure, alternative="greater").pvalue < 1e-6


def test_sketched_sgd_on_a_convex_loss_is_within_theorem_3() -> None:
    """The distance from a point in 40 dimensions, whose gradients have norm 1, in a ball of
    diameter 2: the mean gap of five runs, of the mean of all iterates, is below the bound at every
    round. The control: with one row of width 2 and longer steps it is not."""
    bounds = [
        convergence_bound(
            number, length=40, error=1 / math.sqrt(20), gradient=1.0, diameter=2.0, step=0.8
        )
        for number in range(1, 201)
    ]
    gaps = convex_gaps(DiffSketch(rows=5, width=20, seed=1), step=0.8)
    assert (gaps <= bounds).all()
    assert gaps[-1] < 0.1 * gaps[0]
    assert convex_gaps(DiffSketch(rows=1, width=2, seed=1), step=8.0)[-1] > 1.5 * bounds[-1]


def convex_gaps(exchange: DiffSketch, step: float) -> F64:
    """The mean gap after each of 200 rounds, over five runs."""
    chance = np.random.default_rng(SEED)
    best, gaps = 0.9 * np.eye(40)[0], np.zeros(200)
    for run in range(5):
        own, point, total = replace(exchange, seed=run), -best, np.zeros(40)
        for number in range(1, 201):
            away = point - best
            gradient = (away / np.linalg.norm(away)).astype(np.float32)
            table = own.tables(gradient[None], round=number, chance=chance)[0].astype(np.float64)
            reading = own.read(table, length=40, round=number)
            point = point - step / math.sqrt(number) * reading
            point = point * min(1.0, 1 / float(np.linalg.norm(point)))
            total = total + point
            gaps[number - 1] += float(np.linalg.norm(total / number - best)) / 5
    return gaps

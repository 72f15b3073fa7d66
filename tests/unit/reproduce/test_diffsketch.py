"""Figures of paper 003: what every number says about privacy, and claims that can fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

pytest.importorskip("torch")

from marks import quick
from sfumato.errors import DataError
from sfumato.learn import models
from sfumato.learn.clients import check_fit
from sfumato.learn.diffsketch import NOT_PRIVATE, Exchange, claimed_epsilon, multiplier_for
from sfumato.privacy.accounting import epsilon_of
from sfumato.reproduce import Claim, Outcome
from sfumato.reproduce.diffsketch import data, runs
from sfumato.reproduce.diffsketch import figures as diffsketch_figures
from sfumato.reproduce.diffsketch.data import DELTA, Size, Task
from sfumato.reproduce.diffsketch.figures import (
    SERIES,
    claims_2,
    claims_5,
    claims_6,
    claims_9,
    noise_claims,
)
from sfumato.reproduce.diffsketch.runs import Run, Trial
from sfumato.reproduce.files import data_folder
from tiny_figures import EXTENT, SKETCH, only
from tiny_figures import TASK as TINY

NAMES = tuple(f"003-fig{number}" for number in (2, 3, 4, 5, 6, 9))
FOLDER = data_folder()  # before a test changes the environment
PRIVACY = {"exchange", "rate", "claimed_epsilon_a_round", "epsilon", "delta", "privacy"}
PRIVATE = {"vector noise", "sketch noise", "gaussian"}
OutcomeOf = Callable[[str], Outcome]


@pytest.fixture
def third(outcome_of: OutcomeOf) -> Outcome:
    return outcome_of("003-fig3")


@pytest.mark.parametrize("name", quick(NAMES, "003-fig3", "003-fig9"))
def test_every_number_says_what_was_run_what_is_claimed_and_what_holds(
    name: str, outcome_of: OutcomeOf
) -> None:
    for line in outcome_of(name).numbers:
        assert line.keys() >= PRIVACY
        assert "three centres: 30 parameters" in line["data"]
        private = "gaussian" in line["exchange"] or "noise multiplier" in line["exchange"]
        if private:
            assert line["privacy"].startswith("epsilon")
            assert line["epsilon"] > 0
            assert line["delta"] == DELTA
        else:
            assert line["privacy"] == NOT_PRIVATE
            assert line["epsilon"] is None


@pytest.mark.parametrize("name", quick(NAMES, "003-fig3", "003-fig9"))
def test_pictures_and_claims_say_what_is_not_private(name: str, outcome_of: OutcomeOf) -> None:
    pytest.importorskip("matplotlib")
    outcome = outcome_of(name)
    labels = [text.get_text() for each in outcome.draw().legends for text in each.get_texts()]
    private = {SERIES[key].label for key in PRIVATE}
    assert all((NOT_PRIVATE in label) != (label in private) for label in labels)
    assert any(
        NOT_PRIVATE in claim.detail or "infinite" in claim.detail for claim in outcome.claims
    )


def test_series_that_are_not_private_are_called_so() -> None:
    assert diffsketch_figures.NOT_PRIVATE == NOT_PRIVATE
    for key, style in SERIES.items():
        assert (NOT_PRIVATE in style.label) == (key not in PRIVATE)


def test_communication_is_rounds_by_rate(third: Outcome) -> None:
    for line in third.numbers:
        assert line["x"] == pytest.approx(line["round"] / line["rate"])
    rates = {line["series"]: line["rate"] for line in third.numbers}
    assert rates["plain"] == 1
    assert rates["sketch"] == 30 / 12


def test_epsilon_is_that_of_the_design(third: Outcome) -> None:
    epsilons = {line["series"]: line["epsilon"] for line in third.numbers}
    assert epsilons["gaussian"] <= EXTENT.total * (1 + 1e-9)
    assert epsilons["gaussian"] > 0.95 * EXTENT.total
    each = runs.noised_sketch(TINY, SKETCH, multiplier_for(1.0, DELTA), "device")
    assert epsilons["sketch noise"] == epsilon_of([runs.design(TINY, each, 0).loss], DELTA)
    assert epsilons["sketch noise"] > 1.0  # twelve rounds of 1 are not 1


def test_a_sampled_multiplier_is_enough_and_not_much_more() -> None:
    multiplier = runs.sampled_multiplier(5.0, 10, 6_000, 300)
    exchange = runs.noised_sketch(data.SMALL_DEVICES, Size(7, 112), multiplier, "sum")
    assert 4.5 < runs.design(data.SMALL_DEVICES, exchange, 1).epsilon(DELTA) <= 5.0


def test_figure_9_has_the_share_of_claims_below_each_value(outcome_of: OutcomeOf) -> None:
    by_series: dict[str, list[float]] = {}
    for line in outcome_of("003-fig9").numbers:
        by_series.setdefault(line["series"], []).append(line["y"])
    assert len(by_series) == 3
    assert all(values == sorted(values) for values in by_series.values())


def test_sizes_and_models_are_the_papers() -> None:
    assert models.count(runs.design(data.DIGITS, runs.plain(), 1).make()) == 7_850
    assert models.count(runs.design(data.ROLE_TASK, runs.plain(), 1).make()) == 39_720
    rates = [runs.design(data.DIGITS, runs.sketched(s), 1).rate for s in data.DIGIT_SIZES]
    assert rates == pytest.approx([50.97, 74.76], abs=0.01)
    rates = [runs.design(data.ROLE_TASK, runs.sketched(s), 1).rate for s in data.ROLE_SIZES]
    assert rates == pytest.approx([20.9, 16.2], abs=0.05)  # the paper's labels are the other way
    for row in data.TABLE_1:
        exchange = runs.quantised(data.DEVICES, row, rotate=False)
        assert exchange.bits(7_850) == row.bits * 7_850
        sketch = runs.sketched(data.EQUAL_RATE[row.bits])
        printed = data.PRINTED_RATE[row.bits]
        assert runs.design(data.DEVICES, sketch, 1).rate == pytest.approx(printed, rel=0.01)


def test_padding_is_what_theorem_2_asks_for() -> None:
    padding = runs.padding_for(data.DIGITS, Size(7, 22), 1.0)
    assert claimed_epsilon(7_850 + padding, 7, 22, data.RATIO) <= 1.0
    assert padding == pytest.approx(139_000, rel=0.005)


def test_evaluated_rounds_end_with_the_last() -> None:
    assert data.SMALL_DIGITS.evaluated_rounds == (10, 20, 30, 50, 70, 100, 200, 300)
    assert TINY.evaluated_rounds == (10, 12)


@pytest.mark.skipif(FOLDER is None, reason="the data files are not here")
@pytest.mark.parametrize("task", [data.SMALL_DIGITS, data.SMALL_DEVICES, data.SMALL_ROLES])
def test_models_fit_their_data(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(FOLDER))
    try:
        federated = task.load()
    except DataError as problem:
        pytest.skip(str(problem))
    assert len(federated.train) == task.clients
    check_fit(runs.design(task, runs.plain(), 1).make(), federated.train)


# Claims about synthetic numbers: as in the paper, and with one thing wrong.


def curve(
    panel: str,
    series: str,
    accuracy: float,
    *,
    exchange: Exchange | None = None,
    rate: float = 1.0,
    epsilon: float = math.inf,
    claimed: float | None = 1.0,
    reached: int = 10,
    of: Sequence[float] = (),
    task: Task = TINY,
) -> Trial:
    """Three evaluations; a curve is at its final level from round `reached` on."""
    rounds = (1, 10, 100)
    values = np.array([accuracy if round >= reached else 0.0 for round in rounds])
    run = Run(rounds, values, np.array(of), 0.0)
    return Trial(
        task=task,
        panel=panel,
        series=series,
        exchange=exchange or runs.plain(),
        claimed_per_round=claimed,
        rate=rate,
        epsilon=epsilon,
        runs=(run, run),
    )


def claims_of_noise(**changes: Trial) -> list[Claim]:
    every = {
        "plain": curve("a", "plain", 0.85, reached=1),
        "paper": curve("a", "paper", 0.84, rate=50, epsilon=1.0),
        "sketch": curve("a", "sketch", 0.80, rate=50),
        "corrected": curve("a", "sketch corrected", 0.82, rate=50),
        "vector": curve("a", "vector noise", 0.83, epsilon=9.0),
        "table": curve("a", "sketch noise", 0.5, rate=50, epsilon=9.0),
        "gaussian": curve("a", "gaussian", 0.84, rate=50, epsilon=8.0),
    } | changes
    return list(noise_claims(3, [("a", "7×22")], list(every.values())))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("times less communication", {"vector": curve("a", "vector noise", 0.83, rate=9)}),
        ("times less communication", {"paper": curve("a", "paper", 0.5, rate=50, epsilon=1.0)}),
        ("noise on sketches", {"table": curve("a", "sketch noise", 0.84, rate=50, epsilon=9.0)}),
        ("loses at most", {"paper": curve("a", "paper", 0.82, rate=50, epsilon=1.0)}),
        ("private in each round", {"paper": curve("a", "paper", 0.84, rate=50)}),
        ("error correction", {"corrected": curve("a", "sketch corrected", 0.79, rate=50)}),
        ("(ours)", {"gaussian": curve("a", "gaussian", 0.82, rate=50, epsilon=8.0)}),
    ],
)
def test_a_claim_against_noise_holds_and_would_not_of_other_numbers(
    words: str, changes: dict[str, Trial]
) -> None:
    assert only(claims_of_noise(), words).holds
    assert not only(claims_of_noise(**changes), words).holds


def cpsgd_claims(paper: float, epsilon: float, coins: int = 4) -> list[Claim]:
    row = data.TABLE_1[0]._replace(coins=coins)
    devices = data.SMALL_DEVICES
    raw = runs.quantised(devices, row, rotate=False)
    every = [
        curve("a", "plain", 0.85, task=devices),
        curve("a", "paper", paper, epsilon=epsilon, task=devices),
        curve("a", "cpsgd", 0.6, exchange=raw, epsilon=epsilon, task=devices),
        curve("a", "cpsgd rotated", 0.6, epsilon=epsilon, task=devices),
        curve("a", "gaussian", 0.84, epsilon=5.0, task=devices),
    ]
    return list(claims_2([("a", row)], every))


def test_claims_about_cpsgd_hold_and_would_not_of_other_numbers() -> None:
    assert only(cpsgd_claims(0.66, 1.0), "points above cpSGD").holds
    assert not only(cpsgd_claims(0.64, 1.0), "points above cpSGD").holds
    assert only(cpsgd_claims(0.66, 1.0), "private in each round").holds
    assert not only(cpsgd_claims(0.66, math.inf), "private in each round").holds
    theorem = only(cpsgd_claims(0.66, 1.0), "own theorem")
    assert not theorem.holds
    assert "with their coins the theorem does not apply" in theorem.detail
    assert "with those of all 6,000" in theorem.detail
    assert only(cpsgd_claims(0.66, 1.0, coins=4_000), "own theorem").holds


def test_claims_about_rates_hold_and_would_not_of_other_numbers() -> None:
    def claims(high: float, at: int) -> list[Claim]:
        every = [
            curve("a", "plain", 0.85, reached=10),
            curve("a", "low", 0.84, rate=10, reached=10),
            curve("a", "high", high, rate=50, reached=at),
        ]
        return list(claims_5(every))

    assert only(claims(0.83, 10), "the less is sent").holds
    assert not only(claims(0.83, 100), "the less is sent").holds  # 100/50 is more than 10/10
    assert not only(claims(0.5, 10), "the less is sent").holds  # never gets there
    assert only(claims(0.83, 10), "no more accurate").holds
    assert not only(claims(0.86, 10), "no more accurate").holds


def test_claims_about_theorem_2_hold_and_would_not_of_other_numbers() -> None:
    def claims(low: Sequence[float], high: Sequence[float]) -> list[Claim]:
        rates = ((10, low), (50, high))
        return list(claims_6([curve("a", "no padding", 0.8, rate=r, of=of) for r, of in rates]))

    assert only(claims([2.0, 3.0], [1.0, 1.5]), "falls").holds
    assert not only(claims([2.0, 3.0], [4.0, 4.5]), "falls").holds
    assert only(claims([2.0, 3.0], [1.0, 1.5]), "every worker").holds
    assert not only(claims([2.0, math.inf], [1.0, 1.5]), "every worker").holds
    assert not only(claims([2.0], [1.0]), "is differential privacy").holds  # whatever the numbers

    def ninth_claim(of: Sequence[float]) -> Claim:
        (claim,) = claims_9([curve("a", "x", 0.8, of=of)])
        return claim

    assert ninth_claim([0.1, 0.2, math.inf]).holds
    assert not ninth_claim([0.1, 2.0, math.inf]).holds
    assert NOT_PRIVATE in ninth_claim([0.1]).detail

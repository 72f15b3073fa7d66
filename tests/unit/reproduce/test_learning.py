from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sfumato.errors import DataError
from sfumato.learn import compression, models
from sfumato.learn.clients import check_fit
from sfumato.privacy.accounting import epsilon_of
from sfumato.reproduce import Outcome, figures
from sfumato.reproduce.files import data_folder
from sfumato.reproduce.learning import data, runs
from sfumato.reproduce.learning.data import Workload
from sfumato.reproduce.learning.figures import (
    ERRORS,
    OURS,
    Slack,
    claims_1,
    claims_2,
    table_claims,
)
from sfumato.reproduce.learning.runs import NONE, Method, Runs, Scores
from tiny_figures import CLIENTS, PRINTED, made_up_clients, only
from tiny_figures import WORKLOAD as TINY

FOLDER = data_folder()  # before a test changes the environment
EXACT = Slack(share=0.01, errors=0.0)


@pytest.fixture
def first_table(outcome_of: Callable[[str], Outcome]) -> Outcome:
    return outcome_of("002-table1")


@pytest.mark.parametrize("name", ["002-table1", "002-fig1", "002-fig2"])
def test_every_number_says_what_was_run_and_what_it_costs(
    name: str, outcome_of: Callable[[str], Outcome]
) -> None:
    for line in outcome_of(name).numbers:
        assert line["epsilon"] > 0
        assert ("method" in line) == (name == "002-fig2")
        if line["data"].startswith("printed in the paper"):
            assert (line["seeds"], line["delta"]) == (None, 1 / 3_400)
            continue
        assert line["data"].startswith("three centres")
        assert "30 parameters, 20 clients, 10 a round, 3 rounds" in line["data"]
        assert line["delta"] == 1 / CLIENTS
        assert line["repeats"] == 2


def test_a_table_has_every_row_beside_what_the_paper_printed(first_table: Outcome) -> None:
    rows = {"none", "genie", "two_stage 0.1", "ours"} | {f"adapt_norm {c:g}" for c in ERRORS}
    series: dict[str, set[str]] = {}
    for line in first_table.numbers:
        series.setdefault(line["panel"], set()).add(line["series"])
    assert series["a"] == series["b"] == rows
    assert series["c"] == series["d"] == {"genie", *(f"adapt_norm {c:g}" for c in ERRORS)}
    printed = {
        (line["panel"], line["series"], line["x"]): line["y"]
        for line in first_table.numbers
        if line["panel"] in ("c", "d")
    }
    assert printed["c", "adapt_norm 0.1", 0.3] == pytest.approx(0.7781)
    assert printed["d", "genie", 0.5] == 2_391


def test_rates_are_what_was_sent_and_accuracy_is_learned() -> None:
    federated = made_up_clients(CLIENTS)
    assert runs.before_training(TINY, federated, (1.0,)).parameters == 30
    assert runs.train(TINY, federated, 1.0, NONE, 1, gpu=False)[1] == 1.0
    assert (
        runs.train(TINY, federated, 1.0, Method("fixed", 3.0), 1, gpu=False)[1] == 3.0
    )  # 10 cells
    longer = replace(TINY, rounds=20)
    accuracy, _ = runs.train(longer, federated, 0.01, NONE, 1, gpu=False)
    assert accuracy > 0.8  # a third by guessing


def test_epsilon_is_that_of_the_design_and_falls_with_the_noise() -> None:
    epsilons = runs.before_training(TINY, made_up_clients(CLIENTS), (1.0, 3.0)).epsilons
    loss = runs.design(TINY, CLIENTS, 3.0, NONE, 7).loss
    assert epsilons[3.0] == epsilon_of([loss], 1 / CLIENTS)
    assert epsilons[1.0] > epsilons[3.0] > 0


def test_the_papers_epsilon_is_rounded_up_and_by_little() -> None:
    """Against the same accountant with a grid ten times finer."""
    coarse = runs.paper_epsilon(PRINTED, 0.5)
    sizes = (PRINTED.clients, PRINTED.cohort, PRINTED.rounds)
    fine = runs.sampled_epsilon(*sizes, 0.5, runs.INTERVAL / 10)
    assert fine <= coarse <= 1.01 * fine


def test_a_method_is_the_rule_of_its_name() -> None:
    assert runs.compression(TINY, NONE) == compression.NoCompression()
    assert runs.compression(TINY, Method("fixed", 8)) == compression.FixedRate(rate=8)
    adaptive = runs.compression(TINY, Method("adapt_norm", 0.05))
    assert adaptive == compression.AdaptNorm(error=0.05, first=10)
    long = replace(TINY, rounds=1_500)
    staged = runs.compression(long, Method("two_stage", 0.1))
    assert staged == compression.TwoStage(error=0.1, warm_up=75)  # the paper's
    assert runs.compression(TINY, OURS) == compression.FreeNorm(error=0.1, early=4.0)


def test_paper_scale_has_the_papers_models() -> None:
    for task, printed in (
        (data.PAPER_1, data.TABLE_1),
        (data.PAPER_2, data.TABLE_2),
        (data.PAPER_3, data.TABLE_3),
    ):
        model = runs.design(task, 1_000, 1.0, NONE, 1).make()
        assert models.count(model) == printed.parameters


def test_sizes_fit_their_workloads() -> None:
    for figure in figures().values():
        if figure.name.startswith("002"):
            for size in (figure.small, figure.paper):
                assert len(size.workloads) == len(size.multipliers)
                assert size.gpu == (size is figure.paper)
                assert all(all(np.diff(some) > 0) for some in (*size.multipliers, size.rates))


@pytest.mark.skipif(FOLDER is None, reason="the data files are not here")
@pytest.mark.parametrize("task", [data.SMALL_1, data.SMALL_2, data.SMALL_3], ids=lambda t: t.model)
def test_small_models_fit_their_data(task: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(FOLDER))
    try:
        federated = task.load()
    except DataError as problem:
        pytest.skip(str(problem))
    design = runs.design(task, len(federated.train), 1.0, NONE, 1)
    check_fit(design.make(), federated.train)
    assert 0 < task.first < models.count(design.make())


def test_a_test_set_is_cut_to_the_same_different_examples() -> None:
    whole = made_up_clients(CLIENTS)
    cut, again = data.tested_on(whole, 30), data.tested_on(whole, 30)
    assert torch.equal(cut.test_inputs, again.test_inputs)
    assert len(torch.unique(cut.test_inputs, dim=0)) == 30
    assert cut.train is whole.train
    assert len(data.tested_on(whole, 10_000).test_targets) == len(whole.test_targets)


# Claims about synthetic numbers: as in the paper, and with one thing wrong.


def made_up(change: Callable[[float, Method], tuple[float, float] | None] | None = None) -> Runs:
    """Accuracy falls a little with noise; a rate is proportional to c and z."""
    scores = {}
    for z in (0.5, 1.0):
        base = 0.8 - 0.05 * z
        rows = {NONE: (base, 1.0), OURS: (0.995 * base, 100 * z)}
        rows |= {Method("fixed", rate): (base, rate) for rate in (2.0, 64.0)}
        rows[Method("fixed", 1024.0)] = (0.9 * base, 1024.0)
        rows |= {Method("adapt_norm", c): ((1 - c / 40) * base, 300 * c * z) for c in ERRORS}
        rows |= {Method("two_stage", c): (base, min(200 * c * z, 2.9)) for c in ERRORS}
        for method, values in rows.items():
            accuracy, rate = (change and change(z, method)) or values
            scores[z, method] = Scores(np.full(2, accuracy), np.full(2, rate))
    return Runs(
        guessing=0.1,
        workload=TINY,
        clients=CLIENTS,
        parameters=30,
        scores=scores,
        epsilons={0.5: 9.0, 1.0: 3.0},
    )


@pytest.mark.parametrize(
    ("words", "spoiled", "values"),
    [
        (("far better than guessing",), (1.0, NONE), (0.11, 1.0)),
        (("rises with the noise",), (0.5, Method("adapt_norm", 0.05)), (0.77, 40.0)),
        (("rises with c",), (0.5, Method("adapt_norm", 0.05)), (0.77, 40.0)),
        (
            ("without compression", "Adapt Norm at c of"),
            (1.0, Method("adapt_norm", 0.1)),
            (0.7, 30.0),
        ),
        (("above Two Stage's",), (1.0, Method("two_stage", 0.1)), (0.75, 31.0)),
        (("above Two Stage's",), (1.0, Method("two_stage", 0.1)), (0.79, 2.0)),
        (("rounds by warm-up rounds",), (1.0, Method("two_stage", 0.1)), (0.75, 3.1)),
        (("found by trying all",), (1.0, Method("fixed", 64.0)), (0.5, 64.0)),
        (("(ours)",), (0.5, OURS), (0.77, 29.0)),
        (("(ours)",), (0.5, OURS), (0.76, 50.0)),
    ],
)
def test_a_claim_of_a_table_holds_and_would_not_of_other_numbers(
    words: tuple[str, ...], spoiled: tuple[float, Method], values: tuple[float, float]
) -> None:
    assert only(table_claims(1, made_up(), PRINTED, EXACT), *words).holds
    wrong = made_up(lambda z, method: values if (z, method) == spoiled else None)
    assert not only(table_claims(1, wrong, PRINTED, EXACT), *words).holds


def test_claims_show_epsilon_beside_every_multiplier() -> None:
    for claim in table_claims(1, made_up(), PRINTED, EXACT):
        if "rounds by warm-up" in claim.text or "roughly" in claim.text:
            continue  # by construction, and the paper's own
        assert "z = 0.5 (epsilon 9)" in claim.detail
        assert "z = 1 (epsilon 3)" in claim.detail


def test_the_papers_epsilon_is_roughly_that_of_its_highest_multiplier() -> None:
    """Ten, which is that of 0.7 (appendix F); other accountants give 36.7 for the highest of
    table 1."""
    claim = only(table_claims(1, made_up(), PRINTED, EXACT), "roughly epsilon")
    assert claim.holds
    assert "z = 0.5 is epsilon 36.7, z = 0.7 is epsilon 13.7" in claim.detail
    lower = replace(PRINTED, said_multiplier=0.5)
    assert not only(table_claims(1, made_up(), lower, EXACT), "roughly epsilon").holds


def test_rates_are_compared_with_the_papers_for_its_own_model_only() -> None:
    there = replace(PRINTED, parameters=30, multipliers=(0.5, 1.0))
    printed = replace(there, rate={**there.rate, "0.1": (20.0, 31.0)})
    assert only(table_claims(1, made_up(), printed, EXACT), "is the paper's").holds
    printed = replace(there, rate={**there.rate, "0.1": (20.0, 61.0)})
    assert not only(table_claims(1, made_up(), printed, EXACT), "is the paper's").holds
    claims = table_claims(1, made_up(), PRINTED, EXACT)
    assert not [claim for claim in claims if "is the paper's" in claim.text]


def test_the_genie_takes_the_highest_rate_within_one_percent() -> None:
    assert made_up().genie(0.5) == Method("fixed", 64.0)
    useless = made_up(lambda z, method: (0.1, 2.0) if method.kind == "fixed" else None)
    assert useless.genie(0.5) == NONE


def test_figure_1_asks_for_a_factor_of_ten_between_tasks() -> None:
    low = made_up(lambda z, method: (0.1, 64.0) if method == Method("fixed", 64.0) else None)
    claims = claims_1([made_up(), low])
    assert only(claims, "factor of 10", "z = 0.5").holds  # 64 and 2
    assert not only(claims_1([low, low]), "factor of 10", "z = 1").holds
    falling = made_up(
        lambda z, method: (0.1, 64.0) if (z, method) == (1.0, Method("fixed", 64.0)) else None
    )
    assert only(claims_1([made_up()]), "does not fall").holds
    assert not only(claims_1([falling]), "does not fall").holds


def test_figure_2_has_claims_at_every_error() -> None:
    claims = claims_2([made_up()], EXACT)
    above = [claim for claim in claims if "above Two Stage's" in claim.text]
    assert [claim.holds for claim in above] == [True] * len(ERRORS)


def test_slack_may_allow_for_chance() -> None:
    base = Scores(np.array([0.80, 0.80]), np.ones(2))
    noisy = Scores(np.array([0.70, 0.80]), np.ones(2))  # 0.05 below, a standard error of 0.05
    low = Scores(np.array([0.70, 0.70]), np.ones(2))
    assert Slack(share=0.01, errors=2.0).allows(noisy, base)
    assert not Slack(share=0.01, errors=2.0).allows(low, base)
    assert not EXACT.allows(noisy, base)
    assert EXACT.allows(Scores(np.array([0.793]), np.ones(1)), base)

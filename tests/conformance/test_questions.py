"""One suite over every question and trust: planned, simulated, charged, weighed and collected."""

from __future__ import annotations

import pytest

from questioning import (
    Case,
    check_losses,
    check_plan,
    check_simulation,
    check_traffic,
)
from sfumato.study import QUESTIONS, QuestionFacts

LISTED = ("oak", "elm", "fir")
WORDS = {"alphabet": "aefhiklmorsx", "word_length": 3}
TABLES = {"algorithm": "invertible_sketch"}
COPIES = {"count": "copies", "items_per_device": 2}
MASKED = {"dropout": 0.05, "corrupt": 0.05}
CASES = [
    Case(question="frequencies", trust="central", items=LISTED),
    Case(question="frequencies", trust="central", items=LISTED, keys={"rounds": 2}),
    Case(question="frequencies", trust="central", items=LISTED, keys={"algorithm": "count_sketch"}),
    Case(question="frequencies", trust="secure", items=LISTED, keys=MASKED),
    Case(question="frequencies", trust="local", items=LISTED),
    Case(question="new_words", trust="local", keys=WORDS, devices=600),
    Case(question="heavy_hitters", trust="central"),
    Case(question="heavy_hitters", trust="central", keys={"alphabet": "aeklmo"}),
    Case(question="heavy_hitters", trust="central", keys={"bytes_per_device": 20_000, **TABLES}),
    Case(
        question="heavy_hitters",
        trust="central",
        keys={"bytes_per_device": 20_000, "masked": True, **MASKED},
    ),
    Case(question="heavy_hitters", trust="central", keys=COPIES),
    Case(question="heavy_hitters", trust="secure", keys=WORDS | MASKED),
    Case(question="histogram", trust="central"),
    Case(question="histogram", trust="central", keys={"bytes_per_device": 60_000, **TABLES}),
    Case(question="mean", trust="central", keys={"clip": 1.0, "dimensions": 8}),
    Case(question="mean", trust="secure", keys={"clip": 1.0, "dimensions": 8, **MASKED}),
    Case(question="mean", trust="central", keys={"dimensions": 8}),
    Case(question="mean", trust="secure", keys={"dimensions": 8, **MASKED}),
]
MEDIAN = Case(
    question="median",
    trust="central",
    keys={"epsilon": 0.2},
    cycle=[str(20 + 3 * place) for place in range(20)],
)


@pytest.fixture(params=[*CASES, MEDIAN], ids=str)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Each of the questions, and one that consists of a folder and this entry."""
    facts = QuestionFacts(
        planners={"central": "median.plan:plan"}, release="median.design:MedianRelease"
    )
    monkeypatch.setitem(QUESTIONS, "median", facts)
    param: Case = request.param
    return param


def test_every_question_and_trust_is_here() -> None:
    trained = {("train", "secure"), ("train", "central")}  # by `train`: tests/unit/simulation
    every = {(name, trust) for name, facts in QUESTIONS.items() for trust in facts.planners}
    assert {(case.question, case.trust) for case in CASES} == every - trained


def test_a_plan_is_whole(case: Case) -> None:
    check_plan(case)


def test_the_same_seed_gives_the_same_release(case: Case) -> None:
    check_simulation(case)


def test_what_is_charged_is_what_is_promised(case: Case) -> None:
    check_losses(case)


def test_a_plan_predicts_the_bytes_that_devices_send(case: Case) -> None:
    check_traffic(case)

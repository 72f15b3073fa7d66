"""One suite over every question and trust: planned, simulated, charged, weighed and collected."""

from __future__ import annotations

import pytest

from questioning import (
    CASES,
    EXAMPLES,
    Case,
    check_losses,
    check_plan,
    check_simulation,
    check_traffic,
)
from sfumato.study import QUESTIONS, QuestionFacts

MEDIAN = Case(
    question="example_median",
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
    monkeypatch.setitem(QUESTIONS, "example_median", facts)
    param: Case = request.param
    return param


def test_every_question_and_trust_is_here() -> None:
    every = {(name, trust) for name, facts in QUESTIONS.items() for trust in facts.planners}
    assert set(EXAMPLES) == every, "add a Case to CASES (tests/questioning.py)"


def test_a_plan_is_whole(case: Case) -> None:
    check_plan(case)


def test_the_same_seed_gives_the_same_release(case: Case) -> None:
    check_simulation(case)


def test_what_is_charged_is_what_is_promised(case: Case) -> None:
    check_losses(case)


def test_a_plan_predicts_the_bytes_that_devices_send(case: Case) -> None:
    check_traffic(case)

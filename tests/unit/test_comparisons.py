"""Comparisons show every algorithm that could answer a study, and why one of them is the plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from matplotlib.figure import Figure

from sfumato.errors import SfumatoError
from sfumato.planning import Comparison, compare, plan
from sfumato.study import QUESTIONS

BEATEN = 1.1  # an alternative beats the plan if it is better in error and bytes by this factor
LATIN = "abcdefghijklmnopqrstuvwxyz"
STUDIES: dict[str, dict[str, Any]] = {
    "frequencies/central/small": {"items": 100, "devices": 2_000},
    "frequencies/central/large": {"items": 5_000, "devices": 1_000_000},
    "frequencies/central/bytes": {"items": 5_000, "devices": 100_000, "bytes_per_device": 4_096},
    "frequencies/central/few bytes": {"items": 5_000, "devices": 9_000, "items_per_device": 900,
                                      "bytes_per_device": 1_000},
    "frequencies/central/target": {"items": 5_000, "devices": 50_000, "target_error": 0.01},
    "frequencies/central/pure": {"items": 500, "devices": 20_000, "delta": 0.0},
    "frequencies/central/many": {"items": 50, "devices": 20_000, "items_per_device": 40},
    "frequencies/secure/small": {"items": 200, "devices": 2_000},
    "frequencies/secure/large": {"items": 3_000, "devices": 30_000},
    "frequencies/secure/bytes": {"items": 20_000, "devices": 5_000, "bytes_per_device": 20_000},
    "frequencies/local/small": {"items": 50, "devices": 5_000, "epsilon": 2.0},
    "frequencies/local/weak": {"items": 3, "devices": 5_000, "epsilon": 8.0},
    "frequencies/local/large": {"items": 5_000, "devices": 1_000_000, "epsilon": 4.0},
    "frequencies/local/bytes": {"items": 500, "devices": 9_000, "epsilon": 4.0,
                                "bytes_per_device": 60},
    "new_words/local/small": {"devices": 100_000, "epsilon": 4.0},
    "heavy_hitters/central/small": {"devices": 10_000},
    "heavy_hitters/central/bytes": {"devices": 30_000, "bytes_per_device": 20_000,
                                    "alphabet": LATIN, "word_length": 6},
    "heavy_hitters/central/masked": {"devices": 5_000, "masked": True},
    "heavy_hitters/secure/words": {"devices": 9_000, "alphabet": LATIN, "word_length": 6},
    "histogram/central/small": {"devices": 20_000},
    "mean/central/short": {"devices": 1_000, "dimensions": 200, "clip": 1.0},
    "mean/central/long": {"devices": 500, "dimensions": 3_000, "clip": 1.0},
    "mean/central/bytes": {"devices": 500, "dimensions": 3_000, "clip": 1.0,
                           "bytes_per_device": 2_000},
    "mean/secure/long": {"devices": 500, "dimensions": 3_000, "clip": 1.0},
    "mean/secure/longer": {"devices": 1_000, "dimensions": 100_000, "clip": 1.0},
}  # fmt: skip


def comparison_of(name: str) -> Comparison:
    question, trust = name.split("/")[:2]
    keys = dict(STUDIES[name])
    count = keys.pop("items", None)
    items = None if count is None else pa.array([f"item {number}" for number in range(count)])
    return compare({"question": question, "trust": trust, "epsilon": 1.0, **keys}, items=items)


def better_than_choice(comparison: Comparison) -> list[str]:
    """The algorithms that beat the chosen one in both predicted error and bytes."""
    own = comparison.choice
    return [
        each.algorithm
        for each in comparison.possible
        if BEATEN * each.error < own.error and BEATEN * each.bytes_per_device < own.bytes_per_device
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_no_algorithm_beats_the_plan_in_error_and_bytes(name: str) -> None:
    comparison = comparison_of(name)
    assert better_than_choice(comparison) == []
    question, trust = name.split("/")[:2]
    algorithms = QUESTIONS[question].algorithms.get(trust, ("",))  # type: ignore[call-overload]  # a trust
    assert [each.algorithm for each in comparison.alternatives] == list(algorithms)
    for each in comparison.possible:
        assert each.plan is not None
        assert math.isfinite(each.error)
        assert each.plan.predicted["standard_error"] > 0
        assert each.plan.predicted["bytes_per_device"] >= each.bytes_per_device > 0
        assert each.plan.predicted["server_seconds"] > 0
        assert each.plan.predicted["server_bytes"] > 0


def test_a_choice_that_is_beaten_is_noticed() -> None:
    comparison = comparison_of("frequencies/central/small")
    worse = tuple(
        replace(each, is_chosen=each.algorithm == "count_sketch")
        for each in comparison.alternatives
    )
    assert better_than_choice(replace(comparison, alternatives=worse)) == ["sparse", "one_hot"]


def test_every_question_and_trust_with_a_choice_is_compared() -> None:
    pairs = {tuple(name.split("/")[:2]) for name in STUDIES}
    assert pairs >= {
        (question, trust)
        for question, facts in QUESTIONS.items()
        for trust in facts.algorithms
        if facts.data != "examples"  # training predicts no error
    }, "add a study to STUDIES"


def test_plans_without_a_predicted_error_are_compared_by_bytes() -> None:
    keys = {"question": "train", "trust": "central", "epsilon": 2.0, "devices": 1_000}
    training = {"model": "softmax", "inputs": 20, "classes": 3, "cohort": 100}
    comparison = compare({**keys, "rounds": 20, "clip": 1.0, "training": training})
    assert math.isnan(comparison.choice.error)
    twice = (*comparison.alternatives, replace(comparison.choice, is_chosen=False))
    assert replace(comparison, alternatives=twice).reason == "no other sends fewer bytes"
    with pytest.raises(SfumatoError, match="predict no error"):
        comparison.plot()


def test_the_chosen_alternative_is_the_plan() -> None:
    study = {"question": "heavy_hitters", "trust": "central", "epsilon": 1.0, "devices": 10_000}
    comparison = compare(study)
    assert comparison.choice.plan == plan(study)
    assert [each.is_chosen for each in comparison.alternatives].count(True) == 1
    named = plan({**study, "algorithm": "invertible_sketch"})
    assert comparison.alternatives[1].plan == named


def test_an_impossible_alternative_says_why() -> None:
    comparison = comparison_of("frequencies/central/bytes")
    (one_hot,) = (each for each in comparison.alternatives if each.algorithm == "one_hot")
    assert one_hot.plan is None
    assert "bytes_per_device is 4096" in one_hot.problem
    assert one_hot not in comparison.possible
    assert f"one_hot: {one_hot.problem}" in repr(comparison)
    assert one_hot.problem in repr(one_hot)
    (entry,) = (
        each for each in comparison.to_dict()["alternatives"] if each["algorithm"] == "one_hot"
    )
    assert entry == {
        "algorithm": "one_hot", "chosen": False, "problem": one_hot.problem, "plan": None
    }  # fmt: skip


def test_a_comparison_prints_one_row_per_algorithm_and_a_star_at_the_chosen_one() -> None:
    lines = repr(comparison_of("frequencies/central/small")).splitlines()
    assert lines[0].split() == [
        "algorithm", "error", "(rare)", "(middle)", "(largest)", "bytes", "up", "rounds",
        "server", "s", "server", "MB",
    ]  # fmt: skip
    assert [line[0] for line in lines[1:4]] == ["*", " ", " "]
    assert [line.split()[-7] for line in lines[1:4]] == ["1.36", "1.36", "4.23"]
    assert lines[-1].startswith("* chosen: no other has a clearly smaller error")


def test_a_comparison_is_plain_data() -> None:
    comparison = comparison_of("mean/central/bytes")
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["reason"] == comparison.reason
    assert data["study"]["question"] == "mean"
    plans = {each["algorithm"]: each["plan"] for each in data["alternatives"]}
    assert plans["fixed"]["predicted"]["bytes_per_device"] <= 2_000
    assert plans["none"] is None


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("heavy_hitters/central/masked", {}, "it is the only possible one"),
        ("heavy_hitters/secure/words", {}, "it is the only possible one"),
        ("mean/central/long", {}, "it balances error and bytes"),
        ("mean/central/long", {"compression": "none"}, r"the study asks for it (compression)"),
        ("heavy_hitters/central/small", {}, "and no other sends fewer bytes"),
        (
            "heavy_hitters/central/small",
            {"algorithm": "invertible_sketch"},
            "the study asks for it (algorithm)",
        ),
    ],
)
def test_a_comparison_says_why(name: str, change: dict[str, Any], reason: str) -> None:
    question, trust = name.split("/")[:2]
    study = {"question": question, "trust": trust, "epsilon": 1.0, **STUDIES[name], **change}
    assert reason in compare(study).reason


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("heavy_hitters/central/small", "detectable count"),
        ("mean/central/long", "standard error of a rare item"),
    ],
)
def test_a_comparison_is_drawn_as_error_against_bytes(name: str, label: str) -> None:
    comparison = comparison_of(name)
    figure = comparison.plot()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_ylabel() == label
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}  # type: ignore[index]  # arrays
    assert points == {(each.bytes_per_device, each.error) for each in comparison.possible}
    assert {text.get_text() for text in axes.texts} == {
        each.algorithm for each in comparison.possible
    }

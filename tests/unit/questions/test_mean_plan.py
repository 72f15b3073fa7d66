"""Plans of means: choices, predictions, guarantees and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sfumato import Study, plan, simulate
from sfumato.cli.main import main
from sfumato.errors import ImpossibleError, SpecError, StudyError
from sfumato.planning import Comparison, compare
from sfumato.privacy import epsilon_of
from sfumato.privacy.accounting import epsilon_text
from sfumato.questions.mean.design import MeanDesign
from sfumato.questions.mean.plan import widest_tasks

STUDY: dict[str, Any] = {
    "question": "mean",
    "trust": "central",
    "epsilon": 1.0,
    "delta": 1e-7,
    "devices": 10_000,
    "clip": 1.0,
    "dimensions": 100_000,
}


def planned_design(study: dict[str, Any]) -> MeanDesign:
    design = plan(study).design
    assert isinstance(design, MeanDesign)
    return design


# Two masked rounds of 500 devices take more bytes than one of whole vectors.
DEAR = {"compression": "adapt_norm", "trust": "secure", "devices": 500, "dimensions": 3_000}


def beaten(comparison: Comparison) -> list[str]:
    """Alternatives that are better in one of error and bytes, and no worse in the other."""
    choice = comparison.choice
    return [
        each.algorithm
        for each in comparison.possible
        if each.error <= choice.error
        and each.bytes_per_device <= choice.bytes_per_device
        and (each.error, each.bytes_per_device) != (choice.error, choice.bytes_per_device)
    ]


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("devices", [500, 50_000])
@pytest.mark.parametrize("dimensions", [300, 3_000, 100_000])
def test_no_compression_beats_the_planners_own_in_error_and_bytes(
    trust: str, devices: int, dimensions: int
) -> None:
    keys = {"trust": trust, "devices": devices, "dimensions": dimensions}
    for epsilon in (0.5, 8.0):
        assert beaten(compare(STUDY | keys | {"epsilon": epsilon})) == []


def test_a_compression_that_is_beaten_is_noticed() -> None:
    """The control of the test above."""
    assert beaten(compare(STUDY | DEAR)) == ["adapt_tail", "none"]


@pytest.mark.parametrize(
    ("change", "compression"),
    [
        ({}, "adapt_norm"),
        ({"compression": "none"}, "none"),
        ({"compression": "adapt_tail"}, "adapt_tail"),
        ({"compression": "fixed", "bytes_per_device": 50_000}, "fixed"),
        ({"dimensions": 500}, "none"),  # a pilot could save nothing
        ({"dimensions": 500, "bytes_per_device": 900}, "fixed"),
        ({"dimensions": 500, "compression": "adapt_norm"}, "none"),
        ({"epsilon": math.inf, "compression": "adapt_tail"}, "none"),
        ({"epsilon": math.inf}, "none"),  # no noise to adapt to
        ({"epsilon": math.inf, "bytes_per_device": 50_000}, "fixed"),
    ],
)
def test_compression_is_what_was_asked_for_unless_it_cannot_help(
    change: dict[str, Any], compression: str
) -> None:
    planned = plan(STUDY | change)
    assert planned.parameters["compression"] == compression
    has_warning = any("compression is" in warning for warning in planned.warnings)
    assert has_warning == (compression != change.get("compression", compression))


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("compression", ["none", "fixed", "adapt_norm", "adapt_tail"])
def test_the_accountant_finds_what_is_promised(trust: str, compression: str) -> None:
    study = STUDY | {"trust": trust, "compression": compression, "bytes_per_device": 500_000}
    planned = plan(study | {"devices": 1_000, "dropout": 0.05})
    assert isinstance(planned.design, MeanDesign)
    spent = epsilon_of([task.loss for task in widest_tasks(planned.design)], 1e-7)
    assert 0.99 < spent <= 1.0
    assert f"cost of epsilon {epsilon_text(spent)}" in planned.privacy.mechanism
    assert planned.privacy.neighbours.startswith("zero-out")


@pytest.mark.parametrize("trust", ["central", "secure"])
@pytest.mark.parametrize("compression", ["fixed", "adapt_norm", "adapt_tail"])
def test_a_byte_limit_is_kept_and_used(trust: str, compression: str) -> None:
    study = STUDY | {"trust": trust, "compression": compression, "devices": 1_000}
    predicted = plan(study | {"bytes_per_device": 100_000, "dropout": 0.05}).predicted
    upload = predicted["bytes_per_device"]
    assert upload <= 100_000
    assert upload > (45_000 if compression == "adapt_tail" else 99_000)  # it only doubles


@pytest.mark.parametrize("epsilon", [0.05, 5.0, 60.0])
def test_noise_in_shares_keeps_a_promise_of_any_size(epsilon: float) -> None:
    study = STUDY | {"trust": "secure", "devices": 1_000, "epsilon": epsilon, "dimensions": 20_000}
    design = planned_design(study | {"compression": "adapt_norm"})
    for width in (2, 100, 0):
        losses = [design.task(0, design.first_width).loss, design.task(1, width).loss]
        assert epsilon_of(losses, 1e-7) <= epsilon


def test_a_limit_says_how_long_a_mean_it_is_enough_for() -> None:
    limited = plan(STUDY | {"bytes_per_device": 30_000})
    assert "a mean no longer than 0.0" in limited.predicted["assumes"]
    assert plan(STUDY).predicted["assumes"] == "nothing about the data but the clip"


def test_the_predicted_error_follows_noise_and_clip() -> None:
    """√dimensions·multiplier·clip/devices, and rounding's hundredth; the pilot's ninth and
    compression's tenth at most on top where sizes adapt."""
    whole = plan(STUDY | {"compression": "none"})
    bare = math.sqrt(100_000) * planned_design(STUDY).multiplier / 10_000
    assert bare < whole.predicted["l2_error"] < 1.006 * bare
    longer = plan(STUDY | {"compression": "none", "clip": 3.0})
    assert math.isclose(longer.predicted["l2_error"], 3 * whole.predicted["l2_error"])
    adapted = plan(STUDY).predicted["l2_error"] / whole.predicted["l2_error"]
    assert math.sqrt(1 / 0.9) < adapted < 1.2 * math.sqrt(1.1 / 0.9)


def test_what_is_foreseen_is_what_comes() -> None:
    chance = np.random.default_rng(1)
    vectors = chance.standard_normal((500, 6_000))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    planned = plan(STUDY | {"devices": 500, "dimensions": 6_000, "epsilon": 4.0})
    release = simulate(planned, vectors, seed=1)
    error = float(np.linalg.norm(release.mean - vectors.mean(axis=0)))
    assert 0.85 < error / planned.predicted["l2_error"] < 1.1
    assert release.cost.bytes_per_device < 2 * planned.predicted["bytes_if_mean_is_zero"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clip": None, "paper_mode": True}, "paper_mode needs clip"),
        ({"clip": -1.0}, "clip must be above 0"),
        ({"trust": "local"}, "central"),
        ({"relative_error": 0.0}, "relative_error"),
        ({"relative_error": 2.0}, "relative_error"),
        ({"top": 0}, "top must be at least 1"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"dimensions": None}, "set dimensions"),
        ({"devices": None}, "set devices"),
        ({"compression": "fixed"}, "needs bytes_per_device"),
    ],
)
def test_studies_that_say_something_they_may_not(change: dict[str, Any], match: str) -> None:
    with pytest.raises(StudyError, match=match):
        plan(STUDY | change)


def test_compression_is_one_of_four() -> None:
    with pytest.raises(Exception, match="compression"):
        Study.from_mapping(STUDY | {"compression": "zip"})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"delta": 0.0}, "needs a delta above 0"),
        ({"compression": "none", "bytes_per_device": 1_000}, "whole vectors take"),
        ({"bytes_per_device": 100}, "at least .* bytes per device"),
        ({"trust": "secure", "devices": 3}, "at least 4 devices"),
        ({"epsilon": 0.005}, "exceeds the sampler's limit"),
    ],
)
def test_studies_that_cannot_be_met(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ImpossibleError, match=match):
        plan(STUDY | change)


def test_a_hint_of_bytes_is_enough() -> None:
    with pytest.raises(ImpossibleError) as refused:
        plan(STUDY | {"bytes_per_device": 100})
    assert refused.value.hint is not None
    need = int(refused.value.hint.split()[-3])
    assert plan(STUDY | {"bytes_per_device": need}).predicted["bytes_per_device"] <= need


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"delta": 1e-3}, "more than 1/devices"),
        ({"devices": 100}, "more than the largest possible mean"),
        ({"compression": "adapt_tail"}, "times that of whole vectors"),
        ({"top": 10}, "biased"),
        (DEAR, "leave out compression"),
    ],
)
def test_warnings(change: dict[str, Any], match: str) -> None:
    assert any(match in warning for warning in plan(STUDY | change).warnings)


@pytest.mark.parametrize(("devices", "cohorts"), [(10_000, 1), (10_001, 2), (25_000, 3)])
def test_more_devices_than_one_masked_round_holds_are_asked_in_cohorts(
    devices: int, cohorts: int
) -> None:
    planned = plan(STUDY | {"trust": "secure", "devices": devices})
    design = planned.design
    assert isinstance(design, MeanDesign)
    assert design.cohort_count == cohorts
    assert planned.parameters["cohort"] == -(-devices // cohorts) <= 10_000
    assert planned.predicted["rounds"] == design.rounds == 2 * cohorts
    assert design.tasks_per_device == 2
    assert not any("masked rounds are tested" in warning for warning in planned.warnings)
    with pytest.raises(StudyError, match="rounds has no effect"):
        plan(STUDY | {"trust": "secure", "devices": devices, "rounds": 4})


def test_cohorts_are_for_masked_sums() -> None:
    with pytest.raises(SpecError, match="cohorts are for masked sums"):
        replace(planned_design(STUDY), cohort_count=2)


def test_paper_mode_takes_the_papers_constants() -> None:
    design = planned_design(STUDY | {"paper_mode": True})
    assert (design.paper_epsilon, design.sketch(0, design.first_width).bound) == (1.0, 2.0)


def test_the_command_line_answers_with_a_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "v.npy", np.full((2_000, 30), 0.1))
    (tmp_path / "mean.toml").write_text(
        'question = "mean"\ntrust = "central"\nepsilon = 1.0\nclip = 1.0\n', encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    ask = ["simulate", "mean.toml", "--data"]
    text = CliRunner().invoke(main, [*ask, "v.npy", "--seed", "1"])
    assert text.exit_code == 0
    assert "30 coordinates, 2,000 devices; epsilon 1" in text.stdout
    assert "differential privacy" in text.stdout
    data = CliRunner().invoke(main, [*ask, "v.npy", "--json"])
    means = [row["mean"] for row in json.loads(data.stdout)["estimates"]]
    assert np.abs(np.array(means) - 0.1).max() < 0.02  # seven deviations
    (tmp_path / "v.csv").write_text("steps,hours\n" + "0.3,0.1\n" * 2_000, encoding="utf-8")
    named = CliRunner().invoke(main, [*ask, "v.csv", "--json"])
    rows = json.loads(named.stdout)["estimates"]
    assert [row["coordinate"] for row in rows] == ["steps", "hours"]
    missing = CliRunner().invoke(main, [*ask, "gone.npy"])
    assert missing.exit_code == 2
    assert "no file" in missing.stderr

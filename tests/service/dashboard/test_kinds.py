"""Pages for every question and trust that a collector answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from browsing import TREES, Stage, falling_counts, values_of
from questioning import EXAMPLES
from service.dashboard.test_new_study import NEW, plan_digest
from service.dashboard.test_pages import page_text
from service.dashboard.visiting import Visitor
from sfumato.dashboard.charts import Estimate, largest
from sfumato.dashboard.rendering import rough, sentence
from sfumato.flow.release import Cost, ModelRelease, Privacy
from sfumato.planning import plan
from sfumato.simulation.simulate import simulate
from sfumato.study import QUESTIONS

COMBINATIONS = [(name, trust) for name, facts in QUESTIONS.items() for trust in facts.collected]

KEYS: dict[str, dict[str, Any]] = {  # for tests of pages with numbers
    "frequencies": {},
    "heavy_hitters": {"word_length": 4, "threshold": 500, "devices": 20_000},
    "mean": {"clip": 1.0, "dimensions": 30},
    "train": {"clip": 1.0, "epsilon": 8.0, "rounds": 3, "devices": 200},
}
TRAINING = {"model": "softmax", "inputs": 4, "classes": 2, "cohort": 60}


def keys(question: str, trust: str) -> dict[str, Any]:
    keys = {"question": question, "trust": trust, "epsilon": 1.0, "devices": 2_000, "dropout": 0.1}
    return keys | KEYS[question]


def put(stage: Stage, study: str, release: dict[str, Any]) -> None:
    """Release a study as the worker does, without any reports."""
    with stage.collector.store.transaction() as tx:
        tx.put_release(study, json.dumps(release | {"released": "2026-01-01"}))
        tx.set_study_state(study, "released", expected=["collecting"])
        for task in tx.tasks(study):
            tx.set_task_state(task.id, "done", expected=["open"])


@pytest.mark.parametrize(("question", "trust"), COMBINATIONS)
def test_every_kind_of_study_is_planned_and_shown(
    stage: Stage, admin: Visitor, question: str, trust: str
) -> None:
    case = EXAMPLES[question, trust]
    study_keys = case.study | {"epsilon": 4.0, "delta": 1e-7}  # within the budget
    fields = {name: str(value) for name, value in study_keys.items() if name != "training"}
    fields |= {"name": "Any", "purpose": "Any.", "items": "\n".join(case.items or ())}
    fields["toml"] = "[training]\n" * ("training" in study_keys) + "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in study_keys.get("training", {}).items()
    )
    assert plan_digest(admin, fields)
    study = stage.open(f"{question}, {trust}", items=case.items, **study_keys)
    for path in (f"studies/{study}", f"studies/{study}/close", "studies", "ledger", "costs"):
        answer = admin.get(f"/dashboard/{path}")
        assert answer.status_code == 200
        assert f"{question}, {trust}" in answer.text or path.endswith(("close", "ledger"))


def test_the_form_has_every_question_and_trust(admin: Visitor) -> None:
    page = admin.get(NEW).text
    for question, trust in COMBINATIONS:
        assert f'name="question" value="{question}"' in page
        assert f'name="trust" value="{trust}"' in page
    assert "What is the mean of the devices' vectors? Trust secure, central." in page_text(page)


def test_a_mean_is_shown_by_coordinate_and_drawn_by_size(stage: Stage, admin: Visitor) -> None:
    study_keys = keys("mean", "central")
    study = stage.open("A mean", items=None, **study_keys)
    vectors = np.zeros((2_000, 30))
    vectors[:, 28] = -0.9
    release = simulate({**study_keys, "dropout": 0.0}, vectors, seed=1).to_dict()
    put(stage, study, release)
    page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    assert "Coordinate Estimate" in page
    assert "Counts are" not in page
    assert "Significant" not in page
    chart = admin.get(f"/dashboard/studies/{study}/chart").json()
    values = chart["data"]["values"]
    assert values[0]["label"] == "28"
    assert values[0]["value"] == release["estimates"][28]["mean"]
    assert len(values) == 20
    assert admin.get(f"/dashboard/studies/{study}/release.csv").status_code == 200
    assert admin.get(f"/dashboard/studies/{study}/release.png").status_code == 200


def test_a_count_far_below_0_is_not_among_the_largest() -> None:
    counts = (3, -9, *range(2, 30))
    estimates = [Estimate(str(count), count, count - 1, count + 1, True) for count in counts]
    values = [each.value for each in largest(estimates, are_counts=True)]
    assert values == sorted((each.value for each in estimates), reverse=True)[:20]
    assert largest(estimates, are_counts=False)[0].value == 29
    assert -9 in [each.value for each in largest([*estimates[:10]], are_counts=False)[:2]]


def test_the_plan_of_a_mean_says_how_much_it_errs(admin: Visitor) -> None:
    study_keys = keys("mean", "central")
    fields = {name: str(value) for name, value in study_keys.items()}
    page = page_text(admin.post(NEW, fields | {"name": "Any", "purpose": "Any."}).text)
    predicted = plan(study_keys).predicted
    assert f"Standard error of a coordinate {rough(predicted['standard_error'])}" in page
    assert f"L2 error of the mean {rough(predicted['l2_error'])}" in page


def test_a_model_is_shown_by_its_rounds_its_rate_and_its_promise(
    stage: Stage, admin: Visitor
) -> None:
    study_keys = keys("train", "secure") | {"training": TRAINING}
    study = stage.open("A model", items=None, **study_keys)
    state = stage.client.study(study)
    release = ModelRelease.of(
        b"\0" * 40,
        rate=2.5,
        rounds_held=3,
        privacy=Privacy.from_dict(state["privacy"]),
        cost=Cost(devices=180, rounds=3, bytes_per_device=4_321, seconds=0.1),
        study=state["study"],
        plan=state["plan"],
    )
    open_page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    assert "Model softmax" in open_page
    assert "0% of the rounds" in open_page
    put(stage, study, release.to_dict())
    page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    assert "Parameters 10 Rounds done 3 Compression (parameters per cell) 2.5" in page
    assert release.digest in page
    assert "they need not be secret" in page
    assert admin.get(f"/dashboard/studies/{study}/release.json").status_code == 200
    assert admin.get(f"/dashboard/studies/{study}/release.csv").status_code == 404
    assert admin.get(f"/dashboard/studies/{study}/chart").status_code == 200
    for path in ("studies", "ledger", "costs"):
        assert admin.get(f"/dashboard/{path}").status_code == 200


def test_a_release_that_lists_nothing_says_so(stage: Stage, admin: Visitor) -> None:
    study = stage.open("Nothing", **keys("frequencies", "central"))
    release = simulate(keys("frequencies", "central") | {"dropout": 0.0}, ["oak"] * 2_000, seed=1)
    put(stage, study, release.to_dict() | {"estimates": []})
    page = admin.get(f"/dashboard/studies/{study}").text
    assert "No item is listed" in page
    assert "data-chart" not in page


def test_outcomes_are_shown_beside_predictions(stage: Stage, admin: Visitor) -> None:
    study_keys = keys("heavy_hitters", "central") | {"epsilon": 2.0, "dropout": 0.0}
    study = stage.open("Hitters", items=None, **study_keys)
    release = simulate(study_keys, ["elm"] * 12_000 + ["oak"] * 8_000, seed=1).to_dict()
    put(stage, study, release)
    page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    expected = release["plan"]["predicted"]["detectable_count"]
    actual = release["plan"]["parameters"]["detectable_count"]
    assert f"Detectable from a count of {rough(expected)} {rough(actual)}" in page
    for note in release["notes"]:
        assert page.count(sentence(note)) == 1  # under the answer, and not again as a warning


def test_with_trust_local_errors_are_compared_for_rare_items(stage: Stage, admin: Visitor) -> None:
    study_keys = keys("frequencies", "local") | {"epsilon": 4.0, "dropout": 0.0}
    study = stage.open("Few", **study_keys)
    release = simulate(study_keys, values_of(falling_counts(2_000)), seed=1).to_dict()
    put(stage, study, release)
    errors = [row["standard_error"] for row in release["estimates"]]
    assert max(errors) > 1.1 * min(errors)  # or the test could not tell
    page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    expected = release["plan"]["predicted"]["standard_error"]
    assert f"Standard error of a rare item {rough(expected)} {rough(min(errors))}" in page


def test_the_plan_of_segments_says_how_much_it_errs_in_each(admin: Visitor) -> None:
    study_keys = keys("frequencies", "local")
    segments = {"segments": ["en", "fr"], "segment_shares": [0.8, 0.2]}
    fields = {name: str(value) for name, value in study_keys.items()}
    fields |= {"name": "Any", "purpose": "Any.", "items": "\n".join(TREES)}
    fields["toml"] = "\n".join(f"{name} = {json.dumps(value)}" for name, value in segments.items())
    page = page_text(admin.post(NEW, fields).text)
    predicted = plan({**study_keys, **segments}, items=TREES).predicted
    for name, share in predicted["standard_error_share_of_segment"].items():
        assert f"Standard error, as a share of {name} {rough(share)}" in page

"""Studies with nothing but question, trust, epsilon and devices; and keys that have no effect."""

from __future__ import annotations

import math
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from planning_checks import NEEDED
from sfumato import plan, simulate
from sfumato.collector.worker.rounds import least_waiting
from sfumato.errors import SimulationWarning, StudyError
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE
from sfumato.questions.frequencies.design import FrequencyDesign
from sfumato.sketch.words import BYTES, codes_of, words_of
from sfumato.study import LARGEST_COHORT, PRESETS, QUESTIONS, TRUSTS, Study, Trust

ITEMS = [f"tree {k}" for k in range(50)]
OWN_ADVICE = ("masked", "algorithm", "segment_shares")  # errors that do not say to leave it out
PAIRS = [
    (question, trust)
    for question, facts in QUESTIONS.items()
    for trust in facts.planners
    if facts.data != "examples"
]


def other(key: str) -> Any:
    """A value of a key that is not its default."""
    if key == "preset":
        return next(iter(PRESETS))
    if key in ("segments", "segment_shares"):
        return {"segments": ("a", "b"), "segment_shares": (0.5,)}[key]
    hint, default = get_type_hints(Study)[key], Study.__dataclass_fields__[key].default
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            return next(value for value in get_args(option) if value != default)
        if option is bool:
            return not default
        if option in (int, float, str):
            return {int: 2, float: 0.5, str: "abc"}[option]
        if get_origin(option) is tuple:
            return (0.4, 0.6) if float in get_args(option) else ("abc", "def")
    raise AssertionError(f"no value is known for {key}: {hint}")


def study(question: str, trust: Trust, **keys: Any) -> dict[str, Any]:
    values = {"question": question, "trust": trust, "epsilon": 4.0, "devices": 3_000}
    return values | NEEDED.get(question, {}) | keys


def listed(question: str) -> list[str] | None:
    return ITEMS if QUESTIONS[question].dictionary == "listed" else None


def test_every_key_has_an_effect_on_some_question() -> None:
    names, used = {field.name for field in fields(Study)}, set[str]()
    for facts in QUESTIONS.values():
        for trust in facts.planners:
            used |= facts.keys_with(trust, is_masked=True)
    assert names == used, "name a key in _EVERY, or in `keys` of the questions (study.py)"


@pytest.mark.parametrize(("question", "trust"), PAIRS)
def test_a_key_without_effect_is_refused_by_name(question: str, trust: Trust) -> None:
    used = QUESTIONS[question].keys_with(trust, is_masked=TRUSTS[trust].is_masked)
    for key in {field.name for field in fields(Study)} - used - {"training"}:
        with pytest.raises(StudyError, match=key) as caught:
            plan(study(question, trust, **{key: other(key)}), items=listed(question))
        hint = caught.value.hint
        assert "leave" in (hint or str(caught.value)) or key in OWN_ADVICE


@pytest.mark.parametrize(
    ("question", "trust"),
    [
        pytest.param(*pair, marks=pytest.mark.slow) if pair == ("heavy_hitters", "secure") else pair
        for pair in PAIRS
    ],
)
def test_a_plan_needs_no_other_keys(question: str, trust: Trust) -> None:
    planned = plan(study(question, trust), items=listed(question))
    assert planned.predicted["bytes_per_device"] < 1 << 18
    assert not any("drops out" in warning for warning in planned.warnings)


def test_masked_sums_of_a_large_fleet_are_cut_into_cohorts_of_a_tested_size() -> None:
    keys = study("frequencies", "secure", devices=95_001, delta=1e-8)
    planned = plan(keys, items=ITEMS)
    assert planned.parameters["rounds"] == 10
    assert planned.parameters["cohort"] <= LARGEST_COHORT
    assert planned.parameters["least_survivors"] < 0.8 * planned.parameters["cohort"]
    assert plan(keys | {"rounds": 2}, items=ITEMS).parameters["rounds"] == 2


@pytest.mark.parametrize("devices", [20, 100, 1_000, LARGEST_COHORT])
def test_a_round_ends_without_a_fifth_of_its_devices(devices: int) -> None:
    """It begins without a tenth, and ends without another tenth."""
    design = plan(study("frequencies", "secure", devices=devices), items=ITEMS).design
    assert isinstance(design, FrequencyDesign)
    (task,) = design.tasks()
    assert least_waiting(task) <= 0.9 * devices
    assert task.min_count <= 0.8 * devices
    task.masked_round(least_waiting(task), PLACEHOLDER_NONCE).parameters(task.min_count)


def test_a_round_without_dropouts_begins_with_all_but_one() -> None:
    design = plan(study("frequencies", "secure", dropout=0.0), items=ITEMS).design
    assert isinstance(design, FrequencyDesign)
    assert least_waiting(design.tasks()[0]) == 3_000 - 1


def test_dropouts_are_expected_in_masked_rounds_only() -> None:
    shares: dict[Trust, float] = {"secure": 0.2, "central": 0.0, "local": 0.0}
    for trust, share in shares.items():
        keys = study("frequencies", trust)
        assert Study.from_mapping(keys).expected_dropout == share
        assert Study.from_mapping(keys | {"dropout": 0.02}).expected_dropout == 0.02


def test_a_weak_guarantee_is_warned_of_and_none_is_not_a_number() -> None:
    def warnings(epsilon: float) -> list[str]:
        planned = plan(study("frequencies", "central", epsilon=epsilon), items=ITEMS)
        return [warning for warning in planned.warnings if "weak guarantee" in warning]

    assert not warnings(10.0)
    assert len(warnings(50.0)) == 1
    assert not warnings(math.inf)
    with pytest.raises(StudyError, match="epsilon must be above 0 and at most 1000"):
        warnings(1e9)


def test_clipped_vectors_are_warned_of() -> None:
    keys = {"question": "mean", "trust": "central", "epsilon": 1.0, "clip": 1.0}
    with pytest.warns(SimulationWarning, match=r"50\.0% of the simulated vectors are longer"):
        simulate(keys, np.repeat([[3.0, 4.0], [0.1, 0.1]], 500, axis=0), seed=1)


def test_any_text_has_codes_of_its_bytes_and_is_cut_between_characters() -> None:
    words = ["oak", "Zürich", "日本語", ""]
    codes, fits = codes_of(words, BYTES, 8)
    assert fits.tolist() == [True, True, True, False]
    assert words_of(codes[:3], BYTES).to_pylist() == ["oak", "Zürich", "日本"]
    again, _ = codes_of(words_of(codes[:3], BYTES), BYTES, 8)
    assert np.array_equal(again, codes[:3])


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    codes = np.array([[0xFF, 0x41, 0]], dtype=np.uint16)
    assert words_of(codes, BYTES).to_pylist() == ["�A"]


@pytest.mark.slow
def test_words_of_any_script_are_found_in_cohorts() -> None:
    """4,000 of 12,000 devices hold each word, far above the detectable count."""
    words = ["Zürich", "oak tree", "日本語"]
    keys = {"question": "heavy_hitters", "trust": "secure", "epsilon": 8.0, "delta": 1e-7}
    release = simulate(keys, {"item": words * 4_000}, seed=1)
    assert sorted(release.items.to_pylist()) == sorted(words)
    assert release.plan["parameters"]["cohort"] == 6_000

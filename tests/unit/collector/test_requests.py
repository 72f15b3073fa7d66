"""Requests beyond the limits are refused before they are planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sfumato.collector.http import service as planning
from sfumato.collector.requests import LIMITS, Request
from sfumato.errors import ImpossibleError, SfumatoError, SpecError, StudyError
from sfumato.planning import plan

FREQUENCIES = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 1_000}
WORDS = {"question": "new_words", "trust": "local", "epsilon": 8.0, "devices": 1_000}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epsilon", 255.0),
        ("epsilon", 1e-300),
        ("delta", 5e-324),
        ("devices", 2**53 - 1),
        ("rounds", 10**3 + 1),
        ("items_per_device", 10**6),
        ("target_error", 1e-300),
        ("threshold", 1e308),
        ("dropout", 5e-324),
    ],
)
def test_a_study_beyond_the_limits_is_refused(key: str, value: Any) -> None:
    study = {**FREQUENCIES, "devices": 2_000, key: value}
    with pytest.raises(StudyError, match=f"{key} must be .* for a study that a collector runs"):
        Request(name="Trees", purpose="To plant.", study=study, items=["oak"]).parse_study()


def test_the_guide_has_the_bounds() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/guides/deploy.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,.e-]+) \| ([\d,.e-]+)", text, re.MULTILINE)
    bounds = {key: tuple(float(end.replace(",", "")) for end in ends) for key, *ends in rows}
    assert {key: bounds.get(key) for key in LIMITS} == LIMITS
    assert planning.MOST_PLANS == 2
    assert "A process plans two at a time" in text


@pytest.mark.parametrize("key", ["delta", "dropout", "threshold"])
def test_zero_is_within_the_limits(key: str) -> None:
    study = {**FREQUENCIES, key: 0}
    Request(name="Trees", purpose="To plant.", study=study, items=["oak"]).parse_study()


@pytest.mark.parametrize(
    ("study", "error"),
    [
        ({**WORDS, "word_length": 2**53 - 1}, SpecError),  # its lengths would fill the memory
        ({**WORDS, "alphabet": ""}, SpecError),
        ({**FREQUENCIES, "target_error": 1e-300}, ImpossibleError),
        ({**FREQUENCIES, "target_error": 5e-324}, ImpossibleError),
    ],
)
def test_a_plan_of_extreme_numbers_is_refused_at_once(
    study: dict[str, Any], error: type[SfumatoError]
) -> None:
    with pytest.raises(error):
        plan(study, items=["oak", "elm"] if study["question"] == "frequencies" else None)

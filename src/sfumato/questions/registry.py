"""The planner and the release class of each question, imported when needed, so that PyTorch is
loaded for training only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sfumato.errors import SfumatoError, StudyError
from sfumato.flow.release import Privacy, Release
from sfumato.questions.question import Dictionary, Plan
from sfumato.spec import from_json
from sfumato.study import QUESTIONS, Study

Planner: TypeAlias = Callable[[Study, Dictionary | None], Plan]


def planner_of(study: Study) -> Planner:
    """The planner of a study; importing it registers the kinds of its specs."""
    try:
        planner: Planner = _import(study.facts.planners[study.trust])
    except SfumatoError as problem:  # learn says what is missing
        raise StudyError(
            "a train study needs PyTorch, and it is not installed",
            hint='pip install "sfumato[learn]" wherever the study is planned or collected',
        ) from problem
    return planner


def release_class(question: str) -> type[Release]:
    """The class of a question's releases."""
    kind: type[Release] = _import(QUESTIONS[question].release)
    return kind


def read_release(data: Mapping[str, Any]) -> Release:
    """The release that `to_dict` described."""
    return release_class(data["study"]["question"]).from_dict(data)


def read_plan(
    record: Mapping[str, Any], *, study: str, design: str, dictionary: Dictionary | None
) -> Plan:
    """The plan that `Plan.to_dict` described, with its study and its design as JSON."""
    question: Study = from_json(study)
    planner_of(question)  # its import registers the kinds of its specs
    return Plan(
        study=question,
        design=from_json(design),
        dictionary=dictionary,
        algorithm=record["plan"]["algorithm"],
        predicted=record["plan"]["predicted"],
        privacy=Privacy.from_dict(record["privacy"]),
        warnings=tuple(record["warnings"]),
    )


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

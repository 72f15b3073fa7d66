"""From the name of a question to what plans it and what it releases: imported when it is needed, so
that PyTorch is loaded for training alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sfumato.errors import SfumatoError, StudyError
from sfumato.flow.release import Release
from sfumato.questions.question import Dictionary, Plan
from sfumato.study import QUESTIONS, Study

Planner: TypeAlias = Callable[[Study, Dictionary | None], Plan]


def planner_of(study: Study) -> Planner:
    """What plans a study; the kinds of its specs are known from then on."""
    try:
        planner: Planner = _named(study.facts.planners[study.trust])
    except SfumatoError as problem:  # learn says what it lacks
        raise StudyError(
            "a train study needs PyTorch, and it is not installed",
            hint='pip install "sfumato[learn]" where it is planned and collected',
        ) from problem
    return planner


def release_class(question: str) -> type[Release]:
    """The kind of release that a question gets."""
    kind: type[Release] = _named(QUESTIONS[question].release)
    return kind


def read_release(data: Mapping[str, Any]) -> Release:
    """The release that `to_dict` described."""
    return release_class(data["study"]["question"]).from_dict(data)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

"""From a study to a sized campaign, with its error, its bytes and its promise known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato import files
from sfumato.errors import SfumatoError, StudyError
from sfumato.questions.frequencies import plan as sum_plan
from sfumato.questions.frequencies.design import (
    Dictionary,
)
from sfumato.questions.heavy_hitters import plan as heavy_plan
from sfumato.questions.local_frequencies import plan as local_plan
from sfumato.questions.mean import plan as mean_plan
from sfumato.questions.prefix_search import plan as prefix_plan
from sfumato.questions.prefix_search.design import PrefixDesign
from sfumato.questions.question import Plan
from sfumato.study import Study

__all__ = ["Plan", "learning", "plan"]

I64 = npt.NDArray[np.int64]


def plan(
    study: Study | Mapping[str, Any] | Path | str,
    *,
    items: pa.Array | pa.ChunkedArray | Sequence[str] | None = None,
) -> Plan:
    """Choose and size the campaign that answers a study, and predict what it gives.

    `study` is a Study, its keys, or the path of a TOML file; `items` is the dictionary when it is
    at hand and not in a file. A study that cannot be met raises ImpossibleError, which says what
    would make it possible.
    """
    if isinstance(study, Path | str):
        study = Study.load(study)
    elif not isinstance(study, Study):
        study = Study.from_mapping(study)
    if study.devices is None:
        raise StudyError("a plan needs to know how many devices will be asked; give devices")
    if study.question in ("heavy_hitters", "histogram"):
        return _open_domain(study)
    if study.question == "mean":
        return _mean(study)
    if study.question == "train":
        return _training(study)
    if study.question == "new_words":
        known = _listed(study) if items is None and study.dictionary else items
        return _local(study, Dictionary(_arrow(known)) if known is not None else None)
    dictionary = Dictionary(_listed(study) if items is None else _arrow(items))
    if study.trust == "local":
        return _local(study, dictionary)
    made, predicted, warnings = sum_plan.design(study, len(dictionary))
    return Plan(
        study=study,
        design=made,
        dictionary=dictionary,
        algorithm=sum_plan.algorithm(made),
        predicted=predicted,
        privacy=sum_plan.promise(study, made),
        warnings=(*warnings, *_about(dictionary)),
    )


def learning() -> ModuleType:
    """The server's side of training, for which PyTorch is needed; StudyError if it is not there."""
    try:
        from sfumato.learn import campaign
    except SfumatoError as problem:
        raise StudyError(
            "a train study needs PyTorch, and it is not installed",
            hint='pip install "sfumato[learn]" where it is planned and collected',
        ) from problem
    return campaign


def _local(study: Study, dictionary: Dictionary | None) -> Plan:
    """A plan for devices that trust nobody: of listed items, or of words beyond those known."""
    made, predicted, warnings = (
        local_plan.word_design(study)
        if study.question == "new_words"
        else local_plan.design(study, len(dictionary or ()))
    )
    return Plan(
        study=study,
        design=made,
        dictionary=dictionary,
        algorithm=local_plan.algorithm(made),
        predicted=predicted,
        privacy=local_plan.promise(study, made),
        warnings=(*warnings, *(_about(dictionary) if dictionary is not None else ())),
    )


def _open_domain(study: Study) -> Plan:
    """A plan for items that nobody listed."""
    made, predicted, warnings = (
        prefix_plan.design(study) if study.trust == "secure" else heavy_plan.design(study)
    )
    about = prefix_plan if isinstance(made, PrefixDesign) else heavy_plan
    return Plan(
        study=study,
        design=made,
        dictionary=None,
        algorithm=about.algorithm(made),
        predicted=predicted,
        privacy=about.promise(study, made),
        warnings=tuple(warnings),
    )


def _mean(study: Study) -> Plan:
    """A plan for vectors."""
    made, predicted, warnings = mean_plan.design(study)
    return Plan(
        study=study,
        design=made,
        dictionary=None,
        algorithm=mean_plan.algorithm(made),
        predicted=predicted,
        privacy=mean_plan.promise(study, made),
        warnings=tuple(warnings),
    )


def _training(study: Study) -> Plan:
    """A plan for a model."""
    learning()
    from sfumato.learn import plan as train_plan

    made, predicted, warnings = train_plan.design(study)
    return Plan(
        study=study,
        design=made,
        dictionary=None,
        algorithm=train_plan.algorithm(made),
        predicted=predicted,
        privacy=train_plan.promise(study, made),
        warnings=tuple(warnings),
    )


def _about(dictionary: Dictionary) -> list[str]:
    if not dictionary.duplicates:
        return []
    return [f"the dictionary lists {dictionary.duplicates:,} items twice; each counts once"]


def _listed(study: Study) -> pa.Array:
    if study.dictionary is None:
        raise StudyError(
            "frequencies are of listed items; give a dictionary (a CSV or Parquet file)"
        )
    column = study.dictionary_column or files.column_names(study.dictionary)[0]
    batches = files.read_columns(study.dictionary, [column], [pa.string()])
    parts = [batch.column(0) for batch in batches]
    return pa.concat_arrays(parts) if parts else pa.array([], type=pa.string())


def _arrow(items: pa.Array | pa.ChunkedArray | Sequence[str]) -> pa.Array:
    if isinstance(items, pa.ChunkedArray):
        return items.combine_chunks()
    return items if isinstance(items, pa.Array) else pa.array(items, type=pa.string())

"""Turn a study into a sized campaign whose error, cost and privacy are known in advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from sfumato import files
from sfumato.errors import StudyError
from sfumato.questions.question import Dictionary, Plan
from sfumato.questions.registry import planner_of
from sfumato.study import Study

__all__ = ["Plan", "plan"]


def plan(
    study: Study | Mapping[str, Any] | Path | str,
    *,
    items: pa.Array | pa.ChunkedArray | Sequence[str] | None = None,
) -> Plan:
    """Choose and size the campaign that answers a study, and predict its error and cost.

    `study` is a Study, its keys, or the path of a TOML file; `items` is the dictionary, if it is
    not in a file. A study whose limits cannot be met raises ImpossibleError, which says what would
    make it possible.
    """
    study = Study.read(study)
    if study.devices is None:
        raise StudyError("a plan needs the number of devices that will be asked; set devices")
    return planner_of(study)(study, _dictionary(study, items))


def _dictionary(
    study: Study, items: pa.Array | pa.ChunkedArray | Sequence[str] | None
) -> Dictionary | None:
    """The items that a study lists, if any."""
    if study.facts.dictionary == "none":
        return None
    if items is not None:
        return Dictionary(_arrow(items))
    if study.dictionary is not None:
        column = study.dictionary_column or files.column_names(study.dictionary)[0]
        batches = files.read_columns(study.dictionary, [column], [pa.string()])
        parts = [batch.column(0) for batch in batches]
        return Dictionary(pa.concat_arrays(parts) if parts else pa.array([], type=pa.string()))
    if study.facts.dictionary == "listed":
        raise StudyError(
            f"{study.question} are of listed items; give a dictionary (a CSV or Parquet file)"
        )
    return None


def _arrow(items: pa.Array | pa.ChunkedArray | Sequence[str]) -> pa.Array:
    if isinstance(items, pa.ChunkedArray):
        return items.combine_chunks()
    return items if isinstance(items, pa.Array) else pa.array(items, type=pa.string())

"""A release as a file, for whoever goes on with it elsewhere."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sfumato.errors import SpecError
from sfumato.flow.release import Release
from sfumato.questions.mean.design import MeanRelease

ENDINGS = ("json", "csv", "parquet", "png")
MODEL_ENDING = "pt"  # of parameters, which are not in a release


def exported(data: Mapping[str, Any], ending: str) -> bytes:
    """The file's content, from what `Release.to_dict` gives.

    JSON holds everything; CSV the estimates; Parquet the estimates, with the rest in its metadata;
    PNG bars with error bars, for which `sfumato[plot]` is needed.
    """
    if ending == "json":
        return (json.dumps(data, ensure_ascii=False) + "\n").encode()
    if ending not in ENDINGS:
        raise SpecError(f"a release is exported as {', '.join(ENDINGS)}; got {ending}")
    if "estimates" not in data:
        raise SpecError(
            f"the release of a model has no estimates; got .{ending}",
            hint="export it as .json, and its parameters as .pt",
        )
    file = io.BytesIO()
    if ending == "png":
        kind = MeanRelease if data["study"]["question"] == "mean" else Release
        kind.from_dict(data).plot().savefig(file, dpi=150, format="png")
    elif ending == "csv":
        pa.csv.write_csv(_table(data), file)
    else:
        about = json.dumps({key: data[key] for key in data if key != "estimates"})
        pa.parquet.write_table(_table(data).replace_schema_metadata({"sfumato": about}), file)
    return file.getvalue()


def _table(data: Mapping[str, Any]) -> pa.Table:
    """The estimates; an empty list of items has its columns, too."""
    if data["study"]["question"] == "mean":
        return pa.Table.from_pylist(data["estimates"])
    return Release.from_dict(data).frame()

"""Read columns of CSV, CSV.gz and Parquet files in batches, with errors that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from sfumato.errors import DataError

_BLOCK_BYTES = 16 << 20  # a row must fit in a block: room for strings of a megabyte


def column_names(path: Path | str) -> list[str]:
    """The names of a file's columns, in order."""
    with _open(path) as (kind, source):
        if kind == "parquet":
            return list(pa.parquet.ParquetFile(source).schema_arrow.names)
        return list(_csv(source, {}, None).schema.names)


def read_columns(
    path: Path | str, columns: Sequence[str], types: Sequence[pa.DataType]
) -> Iterator[pa.RecordBatch]:
    """The columns, cast to the types, in batches; a missing column raises DataError."""
    names = column_names(path)
    for column in columns:
        if column not in names:
            raise DataError(f"{path} has no column {column!r}; its columns are {', '.join(names)}")
    schema = dict(zip(columns, types, strict=True))
    with _open(path) as (kind, source):
        if kind == "parquet":
            batches = pa.parquet.ParquetFile(source).iter_batches(columns=list(schema))
        else:
            batches = iter(_csv(source, schema, list(schema)))
        for batch in batches:
            yield pa.RecordBatch.from_arrays(
                [_cast(batch.column(name), type_, path, name) for name, type_ in schema.items()],
                names=list(schema),
            )


def _cast(column: pa.Array, type_: pa.DataType, path: Path | str, name: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        values = pc.cast(column, type_)
        if pa.types.is_string(type_) and pa.types.is_binary(column.type):
            values.validate(full=True)
    except pa.ArrowInvalid as problem:
        raise DataError(
            f"column {name!r} of {path} cannot be read as {type_}: {_first_line(problem)}"
        ) from problem
    return values


def _csv(
    source: pa.NativeFile, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.CSVStreamingReader:
    return pa.csv.open_csv(
        source,
        read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES),
        convert_options=pa.csv.ConvertOptions(
            column_types=types, include_columns=columns, strings_can_be_null=False
        ),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
    )


@contextmanager
def _open(path: Path | str) -> Iterator[tuple[str, pa.NativeFile]]:
    """The kind of a file, and the file decompressed; DataError if it cannot be read."""
    name = str(path)
    if not Path(path).is_file():
        raise DataError(f"there is no file {name}")
    if Path(path).stat().st_size == 0:
        raise DataError(f"{name} is empty; it must have at least a header line")
    parquet = name.endswith((".parquet", ".pq"))
    if not parquet and not name.endswith((".csv", ".csv.gz")):
        raise DataError(f"{name} must end in .csv, .csv.gz or .parquet")
    try:
        if parquet:
            yield "parquet", pa.OSFile(name)
        else:
            yield "csv", pa.input_stream(name, compression="gzip" if name.endswith(".gz") else None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{name} cannot be read: {_first_line(problem)}") from problem


def _first_line(problem: Exception) -> str:
    """The first line of another library's error, shortened."""
    text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    return text if len(text) <= 200 else text[:200] + "…"

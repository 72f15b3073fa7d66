"""Read vectors, one per device, from .npy, .npz, CSV and Parquet files, arrays and data frames."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from sfumato import files
from sfumato.errors import DataError

Reals = npt.NDArray[np.floating[Any]]


def load(data: Any) -> Reals:
    """The vectors (n, dimensions) of a file, an array, a data frame or a list of vectors.

    A .npy file is memory-mapped; a .npz file must have one array. A Parquet or CSV file or a data
    frame has one numeric column per coordinate; a file may instead have one column of lists of the
    same length. A missing value is read as NaN, so that its device abstains.
    """
    if files.is_table(data):
        return check(_from_table(files.table(data)))
    if not isinstance(data, Path | str):
        return check(_from_array(data))
    name = str(data)
    if name.endswith((".npy", ".npz")):
        return check(_from_numpy(Path(data)), name)
    return check(_from_columns(data), name)


def names(data: Any) -> tuple[str, ...] | None:
    """The names of the coordinates, if the data has one column per coordinate; numbers in order
    are no names."""
    if files.is_table(data):
        columns = files.table(data).column_names
    elif not isinstance(data, Path | str) or str(data).endswith((".npy", ".npz")):
        return None
    else:
        columns = files.column_names(data)
        if len(columns) == 1 and _has_lists(data):
            return None
    return None if columns in _numbers(len(columns)) else tuple(columns)


def check(vectors: npt.NDArray[Any], name: str = "the data") -> Reals:
    """The vectors as real numbers, one row per device, or DataError."""
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise DataError(
            f"{name} must be an array of vectors (devices, dimensions), neither of them 0; "
            f"got the shape {vectors.shape}",
            hint="if each device has one number, give a column of them: series.to_frame(), or "
            "array.reshape(-1, 1)"
            if vectors.ndim == 1
            else None,
        )
    if isinstance(vectors, np.ma.MaskedArray) and vectors.dtype.kind in "iubf":
        vectors = np.ma.filled(vectors.astype(np.float64), np.nan)  # masked values are missing
    if vectors.dtype.kind in "iub":
        return vectors.astype(np.float64)
    if vectors.dtype.kind != "f":
        raise DataError(f"{name} must have vectors of real numbers; got {vectors.dtype}")
    if vectors.dtype.itemsize <= 8:
        return vectors
    with np.errstate(over="ignore"):  # too large becomes infinite: that device abstains
        return vectors.astype(np.float64)


def _from_array(data: Any) -> npt.NDArray[Any]:
    if isinstance(data, np.ndarray):
        return data
    try:
        return np.asarray(data)
    except ValueError as problem:
        raise DataError(f"the vectors must have the same length: {problem}") from problem


def _from_table(table: pa.Table) -> npt.NDArray[Any]:
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(column.cast(pa.float64()).to_numpy())
        except pa.ArrowException as problem:
            raise DataError(
                f"every column of the data must be one coordinate, a number; {name!r} is "
                f"{column.type}: {problem}",
                hint="leave out the columns that are none",
            ) from problem
    return np.column_stack(columns) if columns else np.empty((len(table), 0))


def _from_numpy(path: Path) -> npt.NDArray[Any]:
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        if path.suffix == ".npy":
            mapped: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return mapped
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays)
            if len(names) != 1:
                raise DataError(f"{path} must have one array; it has {', '.join(names) or 'none'}")
            only: npt.NDArray[Any] = arrays[names[0]]
            return only
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as problem:
        raise DataError(f"{path} cannot be read as a numpy file: {problem}") from problem


def _from_columns(path: Path | str) -> npt.NDArray[Any]:
    columns = files.column_names(path)
    _check_names(columns, path)
    if len(columns) == 1 and _has_lists(path):
        return _from_lists(path, columns[0])
    parts = [
        np.column_stack([column.to_numpy(zero_copy_only=False) for column in batch.columns])
        for batch in files.read_columns(path, columns, [pa.float64()] * len(columns))
    ]
    return np.concatenate(parts) if parts else np.empty((0, len(columns)))


def _check_names(names: list[str], path: Path | str) -> None:
    """Check the names of columns: duplicates would be read as one column, and a first line of
    numbers is probably a device's vector."""
    if len({*names}) < len(names):
        raise DataError(f"the columns of {path} must have different names; some are the same")
    if all(map(_is_number, names)) and names not in _numbers(len(names)):
        raise DataError(
            f"the first line of {path} must have the names of its columns; it has numbers",
            hint="add a first line with names, such as 0, 1, 2, …",
        )


def _numbers(count: int) -> list[list[str]]:
    """The names of `count` columns that are numbers in order."""
    return [[str(place) for place in range(first, count + first)] for first in (0, 1)]


def _has_lists(path: Path | str) -> bool:
    """Whether the first column of a file has lists."""
    if not str(path).endswith((".parquet", ".pq")):
        return False
    return bool(pa.types.is_nested(pyarrow.parquet.read_schema(path).field(0).type))


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _from_lists(path: Path | str, name: str) -> npt.NDArray[Any]:
    """The rows of a column of lists."""
    parts: list[npt.NDArray[Any]] = []
    for batch in files.read_columns(path, [name], [pa.list_(pa.float64())]):
        column = batch.column(0)
        if column.null_count:
            raise DataError(
                f"vectors in {name!r} of {path} must not be missing; got {column.null_count:,}"
            )
        flat = column.flatten().to_numpy(zero_copy_only=False)
        lengths = {*np.diff(np.asarray(column.offsets)).tolist(), *(len(part[0]) for part in parts)}
        if len(lengths) > 1:
            raise DataError(
                f"vectors in {name!r} of {path} must have the same length; got {min(lengths)} to "
                f"{max(lengths)}"
            )
        if len(column):
            parts.append(flat.reshape(len(column), -1))
    return np.concatenate(parts) if parts else np.empty((0, 0))

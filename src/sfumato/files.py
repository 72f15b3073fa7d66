"""Read columns of CSV, CSV.gz and Parquet files in batches, and tables in memory, with errors that
a user can act on; write files to new folders.

An address is a path, a folder, a pattern such as `days/*.parquet`, or a URL of any file system that
`fsspec` knows (`s3://…`). The files of a folder or pattern are read in the order of their names.
"""

from __future__ import annotations

import csv
import glob
import importlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from sfumato.errors import DataError

ENDINGS = (".csv", ".csv.gz", ".parquet", ".pq")
_BLOCK_BYTES = 16 << 20  # a row must fit in a block: room for strings of a megabyte
_SAMPLE_BYTES = 1 << 16  # how much of a CSV file shows its separator
_SEPARATORS = ",;\t|"


def schema(address: Path | str) -> pa.Schema:
    """The columns of the first file, in order; those of CSV have the types of the first rows."""
    path = paths(address)[0]
    with _open(path) as (kind, source):
        if kind == "parquet":
            return pa.parquet.ParquetFile(source).schema_arrow
        return _csv(path, source, {}, None).schema


def column_names(address: Path | str) -> list[str]:
    """The names of the columns of the first file, in order."""
    return list(schema(address).names)


def read_columns(
    address: Path | str, columns: Sequence[str], types: Sequence[pa.DataType]
) -> Iterator[pa.RecordBatch]:
    """The columns, cast to the types, in batches; a missing column raises DataError."""
    kinds = dict(zip(columns, types, strict=True))
    for path in paths(address):
        names = column_names(path)
        for column in columns:
            if column not in names:
                raise DataError(
                    f"{path} has no column {column!r}; its columns are {', '.join(names)}"
                )
        with _open(path) as (kind, source), _naming_column(path, names):
            if kind == "parquet":
                batches = pa.parquet.ParquetFile(source).iter_batches(columns=list(kinds))
            else:
                batches = iter(_csv(path, source, kinds, list(kinds)))
            for batch in batches:
                yield pa.RecordBatch.from_arrays(
                    [_cast(batch.column(name), type_, path, name) for name, type_ in kinds.items()],
                    names=list(kinds),
                )


def paths(address: Path | str) -> list[str]:
    """The files that an address names, in the order of their names; DataError if there are none."""
    name = str(address)
    parts = urlsplit(name)
    if parts.scheme == "file":
        name = unquote(parts.path)
    elif "://" in name:
        return _remote_paths(name)
    if Path(name).is_dir():
        files = [str(path) for path in sorted(Path(name).rglob("*")) if _is_readable(str(path))]
        if not files:
            raise DataError(f"the folder {name} has no file that ends in {', '.join(ENDINGS)}")
        return files
    if not Path(name).exists() and glob.has_magic(name):
        files = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
        if not files:
            raise DataError(f"no file matches {name}")
        return files
    return [name]


@contextmanager
def open_parquet(path: str) -> Iterator[pa.parquet.ParquetFile]:
    """A Parquet file; DataError, with its name, if it is damaged or cannot be read. On a local disk
    it is mapped into memory, so it must not change meanwhile."""
    with _open(path, mapped=True) as (kind, source):
        if kind != "parquet":
            raise DataError(f"{path} must be a Parquet file")
        yield pa.parquet.ParquetFile(source, page_checksum_verification=True)


def read_bytes(path: str) -> bytes:
    """The content of a small file."""
    try:
        with _open_remote(path) if "://" in path else Path(path).open("rb") as file:
            content: bytes = file.read()
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {_first_line(problem)}") from problem
    return content


def folder(address: Path | str) -> str:
    """The address of a folder, to which `/` and a name can be added."""
    name = str(address)
    parts = urlsplit(name)
    return (unquote(parts.path) if parts.scheme == "file" else name).rstrip("/")


def create_folder(path: str, *, new: bool = True) -> None:
    """Create a folder, for its owner only. DataError if there is one that has files, unless it need
    not be `new`."""
    try:
        if "://" in path:
            system, remote = _file_system(path)
            is_used = system.exists(remote) and bool(system.find(remote))
            system.makedirs(remote, exist_ok=True)
        else:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            is_used = any(Path(path).iterdir())
    except OSError as problem:
        raise DataError(f"{path} cannot be written: {_first_line(problem)}") from problem
    if is_used and new:
        raise DataError(f"{path} has files already, and they are not overwritten")


def delete_folder(path: str) -> None:
    """Delete a folder with everything in it, if there is one."""
    try:
        if "://" in path:
            system, remote = _file_system(path)
            system.rm(remote, recursive=True)
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise DataError(f"{path} cannot be deleted: {_first_line(problem)}") from problem


@contextmanager
def create(path: str) -> Iterator[pa.NativeFile]:
    """A file to write; DataError if that fails."""
    try:
        if "://" in path:
            system, remote = _file_system(path)
            with pa.PythonFile(system.open(remote, "wb"), "w") as file:
                yield file
        else:
            with pa.OSFile(path, "wb") as file:
                yield file
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"{path} cannot be written: {_first_line(problem)}") from problem


@contextmanager
def replace(path: str) -> Iterator[pa.NativeFile]:
    """A file to write, which takes the place of `path` when the block has ended: it is whole then,
    and on disk. Elsewhere than on a disk it is as durable as the file system of the address."""
    if "://" in path:
        with create(path) as file:
            yield file
        return
    draft = Path(f"{path}.{secrets.token_hex(8)}.part")
    with create(str(draft)) as file:
        yield file
    try:
        sync(draft)
        draft.replace(path)
        sync(draft.parent)
    except OSError as problem:
        raise DataError(f"{path} cannot be written: {_first_line(problem)}") from problem


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_table(data: object) -> bool:
    """Whether data in memory has columns: a mapping of them, a data frame, an Arrow table."""
    return isinstance(data, Mapping | pa.RecordBatch) or hasattr(type(data), "columns")


def table(data: Any) -> pa.Table:
    """Data in memory as an Arrow table: a mapping of columns, a data frame of pandas, polars or
    DuckDB, or anything else with Arrow's stream of batches."""
    try:
        if not isinstance(data, Mapping):
            return pa.table(data)
        return pa.table({str(name): _column(values) for name, values in data.items()})
    except (pa.ArrowException, TypeError, ValueError) as problem:
        raise DataError(
            f"the data cannot be read as a table of devices: {_first_line(problem)}",
            hint="if its values are of different kinds, convert them, as with .astype(str)"
            if hasattr(data, "iloc")
            else "give the path of a file, a data frame, a mapping of columns, a list of items, "
            "a list of each device's items, or a mapping from items to counts",
        ) from problem


def _column(values: Any) -> pa.Array | pa.ChunkedArray:
    has_stream = hasattr(values, "__arrow_c_stream__")
    return pa.chunked_array(values) if has_stream else pa.array(values)


def _is_readable(name: str) -> bool:
    return name.endswith(ENDINGS) and Path(name).is_file()


def _cast(column: pa.Array, type_: pa.DataType, path: str, name: str) -> pa.Array:
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
    path: str, source: pa.NativeFile, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.CSVStreamingReader:
    """A reader of CSV in which an empty cell is a missing value, and `""` an empty text. Numbers
    may also be missing by a word such as NA, which could be an item among texts."""
    encoding, separator, is_one_column = _dialect(path)
    has_texts = any(map(pa.types.is_string, types.values()))
    return pa.csv.open_csv(
        source,
        read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=encoding),
        convert_options=pa.csv.ConvertOptions(
            column_types=types,
            include_columns=columns,
            null_values=[""] if has_texts else None,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
        parse_options=pa.csv.ParseOptions(
            newlines_in_values=True,
            delimiter=separator,
            ignore_empty_lines=not is_one_column,  # such a line is an empty cell
        ),
    )


@contextmanager
def _naming_column(path: str, names: Sequence[str]) -> Iterator[None]:
    """Turn Arrow's error about a cell of CSV that is no number into one with the column's name."""
    try:
        yield
    except pa.ArrowInvalid as problem:
        match = re.search(r"CSV column #(\d+):.* conversion error to double: (.*)", str(problem))
        if match is None:
            raise
        raise DataError(
            f"column {names[int(match[1])]!r} of {path} must be numbers; {match[2]}",
            hint="leave out a column of texts; write numbers with a decimal point and without "
            "separators of thousands, such as 1200.5 for 1,200.5 or 1.200,5",
        ) from problem


def _dialect(path: str) -> tuple[str, str, bool]:
    """The encoding of a CSV file, by its byte order mark; the separator that cuts the first lines
    into the most columns of the same number; and whether the first line has one column."""
    with _open(path) as (_, source):
        sample = source.read(_SAMPLE_BYTES)
    is_wide = sample[:2] in (b"\xff\xfe", b"\xfe\xff")
    encoding = "utf-16" if is_wide else "utf-8"
    lines = sample.decode(encoding, "replace").splitlines()
    if len(sample) == _SAMPLE_BYTES and len(lines) > 1:
        lines.pop()  # it may be cut
    separator, most = ",", 1
    for candidate in _SEPARATORS:
        lengths = {len(row) for row in csv.reader(lines, delimiter=candidate) if row}
        if len(lengths) == 1 and max(lengths) > most:
            separator, most = candidate, max(lengths)
    header = next(csv.reader(lines, delimiter=separator), [])
    return encoding, separator, len(header) == 1


@contextmanager
def _open(path: str, *, mapped: bool = False) -> Iterator[tuple[str, pa.NativeFile]]:
    """The kind of a file, and the file decompressed; DataError if it cannot be read."""
    is_remote = "://" in path
    if not is_remote and not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    if not is_remote and Path(path).stat().st_size == 0:
        raise DataError(f"{path} is empty; it must have at least a header line")
    parquet = path.endswith((".parquet", ".pq"))
    if not path.endswith(ENDINGS):
        raise DataError(f"{path} must end in .csv, .csv.gz or .parquet")
    try:
        open_local = pa.memory_map if mapped else pa.OSFile
        with pa.PythonFile(_open_remote(path), "r") if is_remote else open_local(path) as file:
            if path.endswith(".gz"):
                yield "csv", pa.CompressedInputStream(file, "gzip")
            else:
                yield "parquet" if parquet else "csv", file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        is_text = "UTF" in str(problem) or isinstance(problem, UnicodeDecodeError)
        raise DataError(
            f"{path} cannot be read: {_first_line(problem)}",
            hint="a CSV file must be UTF-8, or UTF-16 with a byte order mark; "
            "`iconv -f latin1 -t utf-8` converts others"
            if is_text
            else None,
        ) from problem


def _open_remote(url: str) -> Any:
    system, path = _file_system(url)
    return system.open(path, "rb")


def _remote_paths(url: str) -> list[str]:
    """The URLs of the files in a remote folder, or that match a pattern; otherwise the URL."""
    system, path = _file_system(url)
    try:
        if glob.has_magic(path):
            names = system.glob(path)
        elif system.isdir(path):
            names = [name for name in system.find(path) if name.endswith(ENDINGS)]
        else:
            return [url]
    except OSError as problem:
        raise DataError(f"{url} cannot be read: {_first_line(problem)}") from problem
    if not names:
        raise DataError(f"{url} has no file that ends in {', '.join(ENDINGS)}")
    return [str(system.unstrip_protocol(name)) for name in sorted(names)]


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL by fsspec, and the path in it."""
    try:
        fsspec = importlib.import_module("fsspec")
        system, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as problem:  # most kinds of addresses need their own package
        raise DataError(
            f"{url} cannot be read: {_first_line(problem)}",
            hint="pip install fsspec, and the package for this kind of address, such as s3fs",
        ) from problem
    return system, path


def _first_line(problem: Exception) -> str:
    """The first line of another library's error, shortened; Arrow adds where it happened."""
    message = str(problem)
    if isinstance(problem, pa.ArrowException) and len(problem.args) > 1:
        message = ": ".join(map(str, reversed(problem.args)))
    text = message.splitlines()[0] if message else type(problem).__name__
    return text if len(text) <= 200 else text[:200] + "…"

"""The data files of the experiments.

They are in the folder that SFUMATO_DATA names; without it, in ../shared/data beside the working
directory or beside the project.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from sfumato.errors import DataError
from sfumato.files import read_columns


def data_folder() -> Path | None:
    """The folder with the data files, if there is one."""
    if name := os.environ.get("SFUMATO_DATA"):
        if not Path(name).is_dir():
            raise DataError(f"SFUMATO_DATA must name a folder; got {name}")
        return Path(name)
    projects = (Path.cwd(), Path(__file__).resolve().parents[3])
    folders = [project.parent / "shared" / "data" for project in projects]
    return next((folder for folder in folders if folder.is_dir()), None)


def find_file(name: str) -> Path | None:
    """A data file, or None if it does not exist."""
    folder = data_folder()
    return folder / name if folder is not None and (folder / name).is_file() else None


def need_file(name: str) -> Path:
    """A data file without a substitute."""
    path = find_file(name)
    if path is None:
        raise DataError(
            f"there is no data file {name}",
            hint="set SFUMATO_DATA to the folder that has it; docs/guides/reproducing_the_papers.md"
            " lists the files",
        )
    return path


def read_arrays(path: Path, **columns: pa.DataType) -> list[pa.Array]:
    """The named columns of a file, each as one array."""
    table = pa.Table.from_batches(list(read_columns(path, tuple(columns), tuple(columns.values()))))
    return [table.column(name).combine_chunks() for name in columns]

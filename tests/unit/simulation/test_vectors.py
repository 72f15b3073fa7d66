"""Vectors from files: numpy, CSV and Parquet, and errors for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sfumato.errors import DataError
from sfumato.simulation.vectors import check, load

VECTORS = np.array([[1.0, -2.5], [0.0, 4.0], [3.0, 1e-3]])


def test_numpy_files_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS.astype(np.float32))
    np.savez(tmp_path / "v.npz", vectors=VECTORS)
    vectors = load(tmp_path / "v.npy")
    assert isinstance(vectors, np.memmap)
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, VECTORS)
    assert np.array_equal(load(tmp_path / "v.npz"), VECTORS)


def test_columns_of_numbers_are_coordinates(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("x,y\n1,-2.5\n0,4\n3,0.001\n", encoding="utf-8")
    table = pa.table({"x": VECTORS[:, 0], "y": VECTORS[:, 1].astype(np.float32)})
    pq.write_table(table, tmp_path / "v.parquet", row_group_size=2)
    assert np.array_equal(load(tmp_path / "v.csv"), VECTORS)
    assert np.allclose(load(str(tmp_path / "v.parquet")), VECTORS)
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "one.parquet")
    assert load(tmp_path / "one.parquet").tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.large_list(pa.float64())]
)
def test_a_column_of_lists_is_a_vector_a_row(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(VECTORS.tolist(), type=kind)
    pq.write_table(pa.table({"embedding": column}), tmp_path / "v.parquet", row_group_size=2)
    assert np.allclose(load(tmp_path / "v.parquet"), VECTORS)


def test_a_missing_number_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("x,y\n1,2\n,4\n", encoding="utf-8")
    vectors = load(tmp_path / "v.csv")
    assert np.isnan(vectors).tolist() == [[False, False], [True, False]]


def test_whole_numbers_become_real_ones() -> None:
    assert check(np.array([[1, 2]])).dtype == np.float64


def test_what_cannot_be_vectors_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.ones(3))
    np.save(tmp_path / "none.npy", np.ones((0, 3)))
    np.save(tmp_path / "words.npy", np.array([["oak"]]))
    np.savez(tmp_path / "two.npz", a=VECTORS, b=VECTORS)
    (tmp_path / "junk.npy").write_bytes(b"not numpy at all")
    (tmp_path / "junk.npz").write_bytes(b"PK not a zip")
    (tmp_path / "words.csv").write_text("x\noak\n", encoding="utf-8")
    ragged = pa.table({"v": pa.array([[1.0], [1.0, 2.0]])})
    pq.write_table(ragged, tmp_path / "ragged.parquet")
    pq.write_table(ragged, tmp_path / "groups.parquet", row_group_size=1)
    missing = pa.table({"v": pa.array([[1.0], None])})
    pq.write_table(missing, tmp_path / "missing.parquet")
    for name, match in {
        "flat.npy": "devices, dimensions",
        "none.npy": "neither of them 0",
        "words.npy": "real numbers",
        "two.npz": "it has a, b",
        "junk.npy": "numpy file",
        "junk.npz": "numpy file",
        "gone.npy": "no file",
        "gone.csv": "no file",
        "words.csv": "column 'x' of .* must be numbers",
        "ragged.parquet": "got 1 to 2",
        "groups.parquet": "got 1 to 2",
        "missing.parquet": "must not be missing",
    }.items():
        with pytest.raises(DataError, match=match):
            load(tmp_path / name)

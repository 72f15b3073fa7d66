"""Files by path, folder, pattern and URL; separators, encodings and missing cells of CSV."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from sfumato import files
from sfumato.errors import DataError


def items(address: Path | str) -> list[str | None]:
    column = files.column_names(address)[0]
    batches = files.read_columns(address, [column], [pa.string()])
    return [item for batch in batches for item in batch.column(0).to_pylist()]


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """A folder of one CSV and one Parquet file, and a file of another kind."""
    (tmp_path / "monday.csv").write_text("tree\noak\n")
    pa.parquet.write_table(pa.table({"tree": ["elm"]}), tmp_path / "tuesday.parquet")
    (tmp_path / "notes.txt").write_text("fir")
    return tmp_path


def test_a_folder_is_read_in_the_order_of_names(days: Path) -> None:
    assert items(days) == ["oak", "elm"]


def test_a_pattern_names_files(days: Path) -> None:
    assert items(f"{days}/*.parquet") == ["elm"]
    assert items(f"{days}/*day.*") == ["oak", "elm"]


def test_a_file_url_is_a_path(days: Path) -> None:
    assert items((days / "monday.csv").as_uri()) == ["oak"]


def test_a_url_is_read_by_fsspec(days: Path) -> None:
    assert items(f"local://{days}/monday.csv") == ["oak"]
    assert items(f"local://{days}") == ["oak", "elm"]
    assert items(f"local://{days}/t*.parquet") == ["elm"]
    with pytest.raises(DataError, match="has no file that ends in"):
        items(f"local://{days}/w*.csv")
    with pytest.raises(DataError, match=r"cannot be read: .*No such file"):
        items(f"local://{days}/wednesday.csv")


def test_a_url_that_nothing_can_read_says_what_to_install() -> None:
    with pytest.raises(DataError, match="cannot be read") as problem:
        items("nowhere://trees.csv")
    assert "pip install fsspec" in str(problem.value.hint)


@pytest.mark.parametrize(
    "address", ["none.csv", "*.csv", "."], ids=["a path", "a pattern", "a folder"]
)
def test_an_address_without_files_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no file"):
        items(address)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_that_of_the_first_lines(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_text(f'tree{separator}city\noak{separator}Bonn\n"elm{separator}"{separator}Rom\n')
    assert files.column_names(path) == ["tree", "city"]
    assert items(path) == ["oak", f"elm{separator}"]


def test_a_separator_inside_texts_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_text("tree\noak; old\nelm\n")
    assert items(path) == ["oak; old", "elm"]


def test_utf_16_is_read_by_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_bytes("baum;ort\nKüche;Köln\n".encode("utf-16"))
    assert items(path) == ["Küche"]


def test_another_encoding_says_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_bytes("baum\nKüche\n".encode("latin-1"))
    with pytest.raises(DataError, match="UTF8") as problem:
        items(path)
    assert "iconv" in str(problem.value.hint)


def test_an_empty_cell_is_missing_and_quotes_are_an_empty_text(tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_text('tree,city\n,Bonn\n"",Rom\nNA,Wien\n')
    assert items(path) == [None, "", "NA"]  # Namibia is a country


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_an_empty_line_of_one_column_is_a_missing_cell(end: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_bytes(end.join(["tree", "oak", "", "elm"]).encode())
    assert items(path) == ["oak", None, "elm"]
    path.write_bytes(end.join(["tree", "oak", "elm", ""]).encode())  # the end of the last line
    assert items(path) == ["oak", "elm"]


def test_an_empty_line_of_several_columns_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_text("tree,city\noak,Bonn\n\nelm,Rom\n\n")
    assert items(path) == ["oak", "elm"]


@pytest.mark.parametrize("cell", ['"1,200"', "tall", '"0,52"'])
def test_a_cell_that_is_no_number_names_its_column(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.csv"
    path.write_text(f"tree,height\noak,{cell}\n")
    with pytest.raises(
        DataError, match=r"'height' of .* must be numbers; invalid value"
    ) as problem:
        list(files.read_columns(path, ["height"], [pa.float64()]))
    assert "with a decimal point" in str(problem.value.hint)

"""A release as a file, and back."""

from __future__ import annotations

import io
import json
from html import escape
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from matplotlib.figure import Figure

from sfumato.errors import SpecError
from sfumato.flow.release import CountRelease
from sfumato.planning import plan
from sfumato.questions.registry import read_release
from sfumato.simulation.simulate import simulate

ITEMS = ["oak", "élm", '"quoted", with a comma', "=1+1", "$x_{", "two\nlines"]
STUDY = {"question": "frequencies", "trust": "central", "epsilon": 1.0, "devices": 60}


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    values = [ITEMS[number % len(ITEMS)] for number in range(60)]
    return simulate(plan(STUDY, items=ITEMS), values, seed=1).to_dict()


def test_json_holds_everything(data: dict[str, Any]) -> None:
    assert json.loads(read_release(data).export("json")) == data


def test_csv_holds_the_estimates(data: dict[str, Any]) -> None:
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(
        io.BytesIO(read_release(data).export("csv")), parse_options=options
    )
    assert table.column_names == list(data["estimates"][0])
    assert table["item"].to_pylist() == [row["item"] for row in data["estimates"]]
    # A half width is the difference of two sums, and low the difference with it.
    assert np.allclose(table["low"], [row["low"] for row in data["estimates"]], rtol=1e-12)


def test_parquet_holds_the_estimates_and_what_they_promise(data: dict[str, Any]) -> None:
    table = pyarrow.parquet.read_table(io.BytesIO(read_release(data).export("parquet")))
    assert table["count"].to_pylist() == [row["count"] for row in data["estimates"]]
    about = json.loads(table.schema.metadata[b"sfumato"])
    assert about == {key: data[key] for key in data if key != "estimates"}


def test_png_is_a_picture_whatever_the_items_are_called(data: dict[str, Any]) -> None:
    assert read_release(data).export("png").startswith(b"\x89PNG\r\n\x1a\n")


def test_html_shows_estimates_promise_and_cost_and_runs_nothing(data: dict[str, Any]) -> None:
    hostile = '<script>alert("x")</script>'
    rows = [
        row | {"item": hostile if row["item"] == "oak" else row["item"]}
        for row in data["estimates"]
    ]
    page = read_release(data | {"estimates": rows}).export("html").decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for row in rows:
        assert f"{row['count']:.4g}" in page
    for line in data["privacy"]["statement"]:
        assert escape(line) in page
    assert "60 devices" in page


def test_a_notebook_shows_the_largest_estimates(data: dict[str, Any]) -> None:
    rows = [data["estimates"][0] | {"item": f"tree {number}"} for number in range(30)]
    release: Any = read_release(data | {"estimates": rows})
    assert release._repr_html_().count("<rect") == 10
    assert "20 more" in release._repr_html_()
    assert release.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_plot_goes_into_axes_of_a_given_figure(data: dict[str, Any]) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    release: Any = read_release(data)
    assert release.plot(ax=right) is figure
    assert not left.patches
    assert len(right.patches) == len(ITEMS)


def test_characters_that_no_font_has_are_one_warning(data: dict[str, Any]) -> None:
    names = ["\U0010fffd", "\U0010fffc", *ITEMS]  # for private use
    rows = [data["estimates"][0] | {"item": name} for name in names]
    release: Any = read_release(data | {"estimates": rows})
    with pytest.warns(UserWarning, match="no font of this computer has") as caught:
        assert release.export("png").startswith(b"\x89PNG")
    assert len(caught) == 1


def test_a_release_prints_aligned_counts_and_no_negative_zero(data: dict[str, Any]) -> None:
    names = ["日本語", "cafe\N{COMBINING ACUTE ACCENT}", "oak"]
    rows = [data["estimates"][0] | {"item": name, "low": -0.01} for name in names]
    _, wide, accented, plain = repr(read_release(data | {"estimates": rows})).splitlines()
    assert len(plain) == len(wide) + 3 == len(accented) - 1
    assert "(0.0 …" in plain


def test_other_libraries_read_a_release(data: dict[str, Any]) -> None:
    release: Any = read_release(data)
    assert release.to_pandas().to_dict("records") == data["estimates"]
    assert release.to_polars().to_dicts() == data["estimates"]
    assert pa.table(release).to_pylist() == data["estimates"]


@pytest.mark.parametrize("ending", ["csv", "parquet", "png", "html"])
def test_a_release_that_lists_nothing_is_a_file_too(data: dict[str, Any], ending: str) -> None:
    assert read_release(data | {"estimates": []}).export(ending)


def test_a_mean_is_exported_by_coordinate(data: dict[str, Any]) -> None:
    study = {"question": "mean", "trust": "central", "epsilon": 1.0, "clip": 2.0}
    data = simulate(study, np.ones((20, 3)), seed=1).to_dict()
    table = pyarrow.parquet.read_table(io.BytesIO(read_release(data).export("parquet")))
    assert table["coordinate"].to_pylist() == [0, 1, 2]
    assert table["mean"].to_pylist() == [row["mean"] for row in data["estimates"]]


def test_other_endings_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="must end in json, csv, parquet, png, html; got xlsx"):
        read_release(data).export("xlsx")


def test_a_release_comes_back_from_its_json(data: dict[str, Any]) -> None:
    again = CountRelease.from_dict(json.loads(read_release(data).export("json")))
    assert again.to_dict()["privacy"] == data["privacy"]

"""Data in memory, as people have it: what it is read as, and what is said where it cannot be."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy import stats

from checks import SEED
from sfumato.errors import DataError, SimulationWarning
from sfumato.simulation.population import Cohorts, Population, Shard
from sfumato.simulation.simulate import simulate

TREES = ["oak", "oak", "elm", "oak"]
FRAME = pd.DataFrame({"tree": TREES, "owner": [7, 7, 8, 9]})


def counts(population: Population) -> dict[str, int]:
    """How many devices hold each item, where each holds one."""
    weights = population.weights or [np.ones(len(part), int) for part in population.chunks]
    total: Counter[str] = Counter()
    for items, numbers in zip(population.chunks, weights, strict=True):
        for item, number in zip(items.to_pylist(), numbers.tolist(), strict=True):
            total[item] += number
    return dict(total)


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME["tree"],
        FRAME["tree"].astype("category"),
        FRAME["tree"].value_counts(),
        pl.from_pandas(FRAME),
        pl.Series("tree", TREES),
        pa.table({"tree": TREES}),
        pa.RecordBatch.from_pydict({"tree": TREES}),
        pa.chunked_array([TREES]),
        pa.array(TREES),
        np.array(TREES),
        TREES,
        tuple(TREES),
        {"tree": TREES},
        {"tree": pl.Series(TREES)},
        Counter(TREES),
        {"oak": 3, "elm": np.int64(1)},
    ],
    ids=lambda data: type(data).__module__.split(".")[0] + " " + type(data).__name__,
)
def test_one_item_per_device_in_any_form(data: Any) -> None:
    assert counts(Population.load(data)) == {"oak": 3, "elm": 1}


def test_a_relation_of_duckdb_is_a_table() -> None:
    with duckdb.connect() as database:
        relation = database.sql("select unnest(['oak', 'oak', 'elm', 'oak']) as tree")
        assert counts(Population.load(relation)) == {"oak": 3, "elm": 1}


def test_lists_of_lists_are_the_items_of_devices() -> None:
    population = Population.load([["oak", "elm"], {"oak"}, ("fir",)])
    assert population.devices == 3
    assert population.owners is not None
    assert population.owners.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "data",
    [
        {"tree": [["oak", "elm"], ["oak"], ["fir"]]},
        pd.Series([["oak", "elm"], ["oak"], ["fir"]]),
        pd.DataFrame({"place": "here", "tree": [["oak", "elm"], ["oak"], ["fir"]]}),
        pl.DataFrame({"tree": [["oak", "elm"], ["oak"], ["fir"]]}),
    ],
    ids=["mapping", "series", "pandas", "polars"],
)
def test_a_column_of_lists_has_the_items_of_devices(data: Any) -> None:
    population = Population.load(data, item_column=None if isinstance(data, pd.Series) else "tree")
    assert population.devices == 3
    assert population.owners is not None
    assert population.owners.tolist() == [0, 0, 1, 2]


def test_lists_of_a_device_on_several_rows_are_all_its_own() -> None:
    data = {"tree": [["oak", "elm"], ["fir"], ["oak"]], "owner": ["a", "b", "a"]}
    population = Population.load(data, device_column="owner")
    assert population.devices == 2
    assert population.owners is not None
    assert population.owners.tolist() == [0, 0, 1, 0]


def test_columns_that_are_not_read_may_have_values_of_any_kinds() -> None:
    frame = pd.DataFrame({"note": [object(), 5, "x"], "tree": ["oak", "elm", "oak"], 7: [1, 1, 2]})
    assert counts(Population.load(frame, item_column="tree")) == {"oak": 2, "elm": 1}
    with pytest.raises(DataError, match="no column 'trees'; its columns are note, tree, 7"):
        Population.load(frame, item_column="trees")


def test_columns_of_a_data_frame_group_and_count() -> None:
    assert Population.load(FRAME, device_column="owner").devices == 3
    frame = FRAME["tree"].value_counts().reset_index()
    assert Population.load(frame, count_column="count").devices == 4


def test_a_column_of_counts_that_is_not_used_is_named() -> None:
    with pytest.warns(SimulationWarning, match="count_column='count'"):
        Population.load(FRAME["tree"].value_counts().reset_index())


COUNTED = {"mode": ["bus", "tram", "bike"], "devices": [600, 300, 100]}


@pytest.mark.parametrize("kind", ["columns", "pandas", "polars", "arrow", "csv", "parquet"])
def test_a_column_that_may_count_devices_is_named(kind: str, tmp_path: Path) -> None:
    makers: dict[str, Any] = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.table}
    data = makers.get(kind, dict)(COUNTED)
    if kind == "csv":
        data = tmp_path / "modes.csv"
        data.write_text("mode;devices\nbus;600\ntram;300\nbike;100\n", encoding="utf-8")
    if kind == "parquet":
        data = tmp_path / "modes.parquet"
        pa.parquet.write_table(pa.table(COUNTED), data)
    for item_column in (None, "mode"):
        with pytest.warns(SimulationWarning, match=r"--count-column devices\)") as messages:
            assert Population.load(data, item_column=item_column).devices == 3
        assert len(messages) == 1
    assert Population.load(data, count_column="devices").devices == 1_000


def test_whole_numbers_beside_items_that_occur_again_are_no_counts() -> None:
    assert Population.load(FRAME).devices == 4  # warnings are errors


@pytest.mark.parametrize(
    "data",
    [
        pd.DataFrame({"city": ["Bonn", "Bonn"], "tree": ["oak", "elm"]}),
        pl.DataFrame({"city": ["Bonn", "Bonn"], "tree": ["oak", "elm"]}),
        {"id": [7, 7], "tree": ["oak", "elm"]},
    ],
    ids=["pandas", "polars", "numbers first"],
)
def test_the_first_of_several_columns_is_named(data: Any) -> None:
    first = next(iter(data if isinstance(data, dict) else data.columns))
    with pytest.warns(SimulationWarning, match=f"column '{first}', the first .* 'tree'"):
        Population.load(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Population.load(data, item_column="tree", device_column=first)


def test_lists_of_one_count_are_no_columns() -> None:
    with pytest.raises(DataError, match="must have numbers; got lists of one number"):
        Population.load({"oak": [600], "elm": [300]})
    assert Population.load({"oak": [600]}, item_column="oak").devices == 1


@pytest.mark.parametrize("items", [TREES, [3, 3, 4, 3]])
def test_shares_of_items_are_no_items(items: list[Any]) -> None:
    with pytest.raises(DataError, match="must be whole numbers of devices"):
        Population.load(pd.Series(items).value_counts(normalize=True))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (5, "cannot be read as a table of devices"),
        (object(), "cannot be read as a table of devices"),
        ([["oak"], []], r"device 1 \(counted from 0\) holds none"),
        (["oak", None], "items must not be missing; got 1 missing value"),
        ({"tree": ["oak"], "owner": [1, 2]}, "cannot be read as a table of devices"),
        ({"tree": [{"name": "oak"}, {"name": "elm"}]}, "'tree' .* cannot be read as items"),
        ({"tree": [["oak"], []]}, r"device 1 \(counted from 0\) holds none"),
        (pd.Series(["oak", 5]), "cannot be read as a table of devices"),
        (pd.DataFrame({"tree": ["oak", 5]}), "column tree .*: Expected bytes"),
        (pd.Series(["oak", None]).value_counts(dropna=False), "must not be missing; got 1"),
        (FRAME.groupby("tree").size(), "counts of items or values of devices"),
        ([], "no rows"),
    ],
)
def test_other_data_says_what_would_work(data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Population.load(data)


@pytest.mark.parametrize(
    "data",
    [
        pd.DataFrame({"steps": [1.0, 3.0], "sleep": [2.0, 4.0]}),
        pl.DataFrame({"steps": [1.0, 3.0], "sleep": [2.0, 4.0]}),
        {"steps": [1, 3], "sleep": [2, 4]},
    ],
    ids=["pandas", "polars", "mapping"],
)
def test_a_mean_keeps_the_names_of_columns(data: Any) -> None:
    release: Any = simulate(
        {"question": "mean", "trust": "central", "epsilon": float("inf"), "clip": 10.0}, data
    )
    assert release.frame().column("coordinate").to_pylist() == ["steps", "sleep"]
    assert np.abs(release.mean - [2.0, 3.0]).max() < 2 * release.half_width  # of rounding


def test_a_mean_of_texts_is_refused() -> None:
    study = {"question": "mean", "trust": "central", "epsilon": 1.0, "clip": 1.0}
    with pytest.raises(DataError, match="one coordinate, a number; 'tree' is"):
        simulate(study, FRAME)


@pytest.mark.parametrize("grouped", [True, False])
def test_cohorts_of_exact_sizes_divide_all_devices(grouped: bool) -> None:
    counts = np.array([5, 0, 40, 1, 54])
    names = [f"word {number}" for number in range(5)]
    population = Population.load({"item": names, "count": counts}, count_column="count")
    population = population if grouped else population.expanded()
    shares = dict.fromkeys("abcdefghijkl", 0.07)
    cohorts = Cohorts(shares=shares, in_order=False, dropout=0.0, seed=SEED, exact=True)
    total = np.zeros(5, dtype=np.int64)
    for name in shares:
        for shard in cohorts.shards(population, name):
            assert shard.answering == shard.devices == 7
            rows = np.array([names.index(item) for item in shard.items.to_pylist()])
            total += np.bincount(rows, shard.weights, minlength=5).astype(np.int64)
    assert total.sum() == 84
    assert (total <= counts).all()
    if not grouped:
        numbers = [cohorts.numbers(population, name) for name in shares]
        assert np.unique(np.concatenate(numbers)).size == 84


@pytest.mark.parametrize("exact", [True, False])
def test_the_devices_of_an_exact_cohort_are_a_random_subset(exact: bool) -> None:
    """Of 10 devices, 6 have oak; a cohort of 3 has a hypergeometric number of them. Chi-square at
    1e-6 over 2,000 seeds; negative control: cohorts of random sizes, whose number is binomial."""
    population = Population.load({"oak": 6, "elm": 4})
    shares = {"a": 0.3, "b": 0.3, "c": 0.4}
    oaks = np.zeros(7, dtype=np.int64)
    for seed in range(2_000):
        cohorts = Cohorts(shares=shares, in_order=False, dropout=0.0, seed=seed, exact=exact)
        (shard,) = cohorts.shards(population, "b")
        assert shard.weights is not None
        oaks[dict(zip(shard.items.to_pylist(), shard.weights, strict=True)).get("oak", 0)] += 1
    chances = stats.hypergeom(10, 6, 3).pmf(np.arange(4))
    passes = not oaks[4:].any() and stats.chisquare(oaks[:4], 2_000 * chances).pvalue > 1e-6
    assert passes == exact


def test_pieces_of_a_shard_have_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.simulation.population._SHARD_DEVICES", 10)
    monkeypatch.setattr("sfumato.simulation.population._CHUNK_ROWS", 2)
    items = pa.array(["oak", "elm", "ash"])
    counted = Shard(items, np.array([4, 25, 1]), 30, 30)
    pieces = list(counted.pieces())
    assert [piece.answering for piece in pieces] == [10, 10, 10]
    weights = [
        dict(zip(piece.items.to_pylist(), np.asarray(piece.weights).tolist(), strict=True))
        for piece in pieces
    ]
    assert weights == [{"oak": 4, "elm": 6}, {"elm": 10}, {"elm": 9, "ash": 1}]
    owned = Shard(items, None, 3, 3, owners=np.array([2, 0, 2]))
    parts = [
        (p.items.to_pylist(), (p.owners if p.owners is not None else items).tolist(), p.answering)
        for p in owned.pieces()
    ]
    assert parts == [(["elm"], [0], 2), (["oak", "ash"], [0, 0], 1)]

"""The library agrees with the vectors, and the vectors with the slow reference that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sfumato import hashing
from sfumato.errors import SpecError
from sfumato.flow.accumulator import Collector, accumulator, from_bytes
from sfumato.flow.contribute import report
from sfumato.flow.report import Report, report_bytes
from sfumato.kernels.count import plain
from sfumato.kernels.local import plain as plain_local
from sfumato.privacy import Tally
from sfumato.sketch import DecodedRounds
from sfumato.spec import digest, from_json, to_json
from vectors import reference

FOLDER = Path(__file__).parent / str(reference.WIRE_VERSION)


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


class Words:
    """A generator that gives the words of a vector, and no more."""

    def __init__(self, words: list[int]) -> None:
        self._words: Iterator[int] = iter(words)

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return np.array([next(self._words) for _ in range(count)], dtype=np.uint64)


def test_local_records_and_cells_agree_with_the_vectors() -> None:
    for case in read("local_good.json"):
        oracle = from_json(json.dumps(case["oracle"]))
        for entry in case["cells"]:
            points = oracle.values([bytes.fromhex(entry["item"])])
            row = np.array([entry["row"]])
            place = plain_local.row_cells(points, row, oracle.hashes, oracle.width)
            assert place.tolist() == [entry["cell"]]
        for example in case["records"]:
            record = np.frombuffer(bytes.fromhex(example["record"]), dtype=np.uint8)[None]
            tally = Tally(oracle)
            assert record.shape[1] == oracle.record_bytes
            assert tally.fold(record) == 0
            expected = np.zeros((oracle.rows, oracle.width), dtype=np.int64)
            for row, cell, change in example["adds"]:
                expected[row, cell] += change
            assert np.array_equal(tally.cells, expected)


def test_records_that_no_device_makes_are_refused() -> None:
    for case in read("local_bad.json"):
        oracle = from_json(json.dumps(case["oracle"]))
        record = np.frombuffer(bytes.fromhex(case["record"]), dtype=np.uint8)[None]
        tally = Tally(oracle)
        assert record.shape[1] == oracle.record_bytes, case["why"]
        assert tally.fold(record) == 1, case["why"]
        assert not tally.cells.any()


def test_the_transform_has_the_signs_of_the_reference() -> None:
    table = np.eye(16, dtype=np.int64)
    plain_local.hadamard(table)
    signs = [[reference.hadamard_sign(place, cell) for place in range(16)] for cell in range(16)]
    assert table.tolist() == signs


@pytest.mark.parametrize("name", sorted(reference.vectors()))
def test_the_reference_makes_the_vector_files(name: str) -> None:
    vectors = json.loads(json.dumps(reference.vectors()[name]))
    assert vectors == read(name)


def test_every_good_file_has_its_bad_file() -> None:
    names = {path.name for path in FOLDER.glob("*.json")}
    good = {name for name in names if name.endswith("_good.json")}
    assert good
    assert {name.replace("_good", "_bad") for name in good} <= names


def test_coefficients_agree_with_the_vectors() -> None:
    for case in read("hashing_good.json")["coefficients"]:
        values = hashing.coefficients(case["seed"], *case["labels"], count=4)
        assert [str(word) for word in values] == case["drawn"]


def test_fingerprints_of_bytes_agree_with_the_vectors() -> None:
    for case in read("hashing_good.json")["fingerprints_of_bytes"]:
        (value,) = hashing.fingerprint([bytes.fromhex(case["item"])], case["seed"])
        assert str(value) == case["fingerprint"]


def test_fingerprints_of_integers_agree_with_the_vectors() -> None:
    for case in read("hashing_good.json")["fingerprints_of_integers"]:
        (value,) = hashing.fingerprint(np.array([int(case["item"])]), case["seed"])
        assert str(value) == case["fingerprint"]


def test_polynomials_cells_and_signs_agree_with_the_vectors() -> None:
    data = read("hashing_good.json")
    for case in data["polynomials"]:
        polynomial = hashing.Polynomial(tuple(int(a) for a in case["coefficients"]))
        (value,) = polynomial(np.array([int(case["point"])], dtype=np.uint64))
        assert str(value) == case["value"]
    for case in data["cells"]:
        value = np.array([int(case["value"])], dtype=np.uint64)
        assert plain.cells(value, case["width"]).tolist() == [case["cell"]]
    for case in data["signs"]:
        value = np.array([int(case["value"])], dtype=np.uint64)
        assert plain.sign_of(value, case["bit"]).tolist() == [case["sign"]]


def test_bad_items_and_seeds_are_refused() -> None:
    data = read("hashing_bad.json")
    for case in data["items"]:
        kind = pa.type_for_alias(case["arrow_type"])
        texts = pa.array(case["items"], type=pa.string())
        items = texts if kind == pa.string() else texts.cast(kind)
        with pytest.raises(SpecError):
            hashing.fingerprint(items, seed=1)
    for case in data["seeds"]:
        with pytest.raises(SpecError):
            hashing.fingerprint([b"oak"], seed=int(case["seed"]))


@pytest.mark.parametrize("case", read("count_sketch_good.json"), ids=lambda case: case["name"])
def test_count_sketches_agree_with_the_vectors(case: dict[str, Any]) -> None:
    items = [bytes.fromhex(item) for item in case["items"]]
    pairs = []
    for described, weights, table in zip(
        case["sketches"], case["weights"], case["tables"], strict=True
    ):
        name = described.pop("digest")
        sketch = from_json(json.dumps(described))
        assert digest(sketch) == name
        assert to_json(sketch) == reference.canonical(described)
        encoded = sketch.encode(items, np.array(weights))
        assert encoded.tolist() == table
        pairs.append((sketch, encoded))
    points = pairs[0][0].points([bytes.fromhex(item) for item in case["asked"]])
    assert DecodedRounds.of(pairs).estimate(points).tolist() == case["estimates"]


@pytest.mark.parametrize("case", read("count_sketch_bad.json"), ids=lambda case: case["why"])
def test_bad_count_sketches_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        from_json(json.dumps(case["spec"]))


@pytest.mark.parametrize("case", read("report_good.json"), ids=lambda case: case["name"])
def test_reports_agree_with_the_vectors(case: dict[str, Any]) -> None:
    task = from_json(json.dumps(case["task"]))
    assert task.id == case["task_id"]
    actual = report(task, case["values"], rng=Words([int(word) for word in case["rng_words"]]))
    assert actual.to_bytes().hex() == case["report"]
    assert len(actual.to_bytes()) == report_bytes(task)
    assert Report.from_bytes(actual.to_bytes()) == actual


@pytest.mark.parametrize("case", read("report_bad.json"), ids=["count sketch", "padding"])
def test_bad_reports_are_refused_for_the_stated_reason(case: dict[str, Any]) -> None:
    task = from_json(json.dumps(case["task"]))
    collector = Collector(task)
    for step in case["steps"]:
        before = collector.rejected.copy()
        collector.add([bytes.fromhex(step["report"])])
        refused = [str(reason) for reason in collector.rejected - before]
        assert refused == ([step["rejection"]] if step["rejection"] else []), step["why"]
    assert collector.batch.count == case["count"]
    assert task.aggregation.open(collector.batch.total).tolist() == case["sum"]


@pytest.mark.parametrize("case", read("sparse_good.json"), ids=lambda case: case["name"])
def test_sparse_reports_agree_with_the_vectors(case: dict[str, Any]) -> None:
    task = from_json(json.dumps(case["task"]))
    assert task.id == case["task_id"]
    together = accumulator(task)
    for each in case["reports"]:
        words = Words([int(word) for word in case["rng_words"]])
        actual = report(task, each["values"], rng=words)
        assert actual.to_bytes().hex() == each["report"]
        assert len(actual.to_bytes()) == report_bytes(task)
        collector = Collector(task)
        collector.add([actual.to_bytes()])
        assert (collector.batch.count, collector.rejected) == (1, {})
        together.add([actual.message])
    rows = from_bytes(together.seal(rng=Words([])))
    numbers = rows[:, :-1].copy().view(np.uint64)
    whole = [sum(int(word) << 64 * at for at, word in enumerate(row)) for row in numbers]
    counts = [[str(number), count] for number, count in zip(whole, rows[:, -1], strict=True)]
    assert counts == case["sum"]


@pytest.mark.parametrize("case", read("sparse_bad.json"), ids=lambda case: case["why"])
def test_bad_sparse_reports_are_refused_for_the_stated_reason(case: dict[str, Any]) -> None:
    collector = Collector(from_json(json.dumps(case["task"])))
    collector.add([bytes.fromhex(case["report"])])
    assert (collector.rejected, collector.batch.count) == ({case["rejection"]: 1}, 0)

"""The dense sketch: what holds exactly, or up to float32 rounding, for every map that is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato import hashing, kernels
from sfumato.errors import SpecError
from sfumato.kernels import dense
from sfumato.kernels.dense import compiled as compiled_dense
from sfumato.kernels.dense import plain as plain_dense
from sfumato.sketch.dense import DenseSketch, top
from sfumato.spec import from_json, to_json

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
ROUNDING = 2.0**-24  # relative error of one float32 operation, at most
PLACINGS = ("rotation", "hashed")
GOLDEN_ROTATIONS = [[3, 2, 0], [0, 0, 2]]
GOLDEN_SIGN_KEYS = [[843200490, 3647495897], [2844974446, 1300473231]]
GOLDEN_TABLE = [[1, -1, -2, -2], [2, 2, 1, 3]]

sketches = st.builds(
    DenseSketch,
    length=st.integers(1, 2000),
    width=st.integers(1, 200),
    rows=st.integers(1, 7),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**53 - 1),
    round=st.integers(0, 9),
)


def normal(*shape: int, stream: int = 0) -> F32:
    return np.random.default_rng([SEED, stream]).normal(size=shape).astype(np.float32)


# --- a reference from the contract, in whole numbers and exact sums


def scattered(key: int, step: int) -> int:
    word = (key + step * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def sign(keys: tuple[int, int], i: int) -> int:
    word = (i >> 5) ^ keys[0]
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word ^= keys[1]
    word = word * 0x846CA68B % 2**32
    word ^= word >> 16
    return -1 if word >> (i & 31) & 1 else 1


def places(sketch: DenseSketch) -> list[list[tuple[int, int]]]:
    """The cell and the sign of each coordinate in each row."""
    cells_and_signs = []
    for row in range(sketch.blocks * sketch.rows):
        coefficients = hashing.coefficients(sketch.seed, "dense", sketch.round, row, count=3)
        key, first, second = (int(word) for word in coefficients)
        keys = (first % 2**32, second % 2**32)
        if sketch.placing == "hashed":
            hashes = [scattered(key, i + 1) for i in range(sketch.length)]
            cells_and_signs.append(
                [(word * sketch.width >> 64, 1 - 2 * (word & 1)) for word in hashes]
            )
            continue
        chunks = -(-sketch.length // sketch.width)
        turns = [scattered(key, q + 1) * sketch.width >> 64 for q in range(chunks)]
        cells_and_signs.append(
            [
                ((i % sketch.width + turns[i // sketch.width]) % sketch.width, sign(keys, i))
                for i in range(sketch.length)
            ]
        )
    return cells_and_signs


def matrix(sketch: DenseSketch) -> F64:
    """The linear map itself, (cells, length)."""
    dense = np.zeros((*sketch.shape, sketch.length))
    for row, each in enumerate(places(sketch)):
        for i, (cell, minus) in enumerate(each):
            dense[row, cell, i] = minus / math.sqrt(sketch.rows)
    return dense.reshape(sketch.cells, sketch.length)


def bound(terms: int, sizes: Any) -> Any:
    """The error of a float32 sum of this many terms, scaled once: the classical bound."""
    return (terms + 4) * ROUNDING * sizes


@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize(("length", "width"), [(700, 300), (131, 32), (95, 7), (3, 5), (40, 1)])
def test_a_sketch_is_the_map_of_the_contract(placing: Any, length: int, width: int) -> None:
    sketch = DenseSketch(
        length=length, width=width, rows=3, blocks=2, placing=placing, seed=SEED, round=1
    )
    vector, noise = normal(length), normal(*sketch.shape, stream=1)
    expected = matrix(sketch)
    error = np.abs(sketch.encode(vector).reshape(-1) - expected @ vector)
    assert np.all(error <= bound(length, np.abs(expected) @ np.abs(vector)))
    half = sketch.cells // 2
    cells = noise.reshape(-1).astype(np.float64)
    read = expected[:half].T @ cells[:half], expected[half:].T @ cells[half:]
    error = np.abs(sketch.decode(noise) - (read[0] + read[1]) / 2)
    assert np.all(error <= bound(3, np.abs(expected).T @ np.abs(cells)))


def test_hashes_are_those_of_this_version() -> None:
    """Golden: a kind never changes its meaning. The reference above has found the same."""
    sketch = DenseSketch(length=10, width=4, rows=2, seed=1)
    assert sketch.rotations.tolist() == GOLDEN_ROTATIONS
    assert sketch.sign_keys.tolist() == GOLDEN_SIGN_KEYS
    assert sketch.rotations.dtype == np.int32
    assert sketch.sign_keys.dtype == np.uint32
    ones = sketch.encode(np.ones(10)) * math.sqrt(2)
    assert np.rint(ones).astype(int).tolist() == GOLDEN_TABLE


# --- linear algebra


@settings(max_examples=60)
@given(sketches, st.integers(0, 2**32 - 1))
def test_decoding_is_the_transpose_of_encoding(sketch: DenseSketch, stream: int) -> None:
    if sketch.blocks > 1:  # of one block: the median of several is not linear
        sketch = from_json(to_json(sketch).replace(f'"blocks":{sketch.blocks}', '"blocks":1'))
    vector, noise = normal(sketch.length, stream=stream), normal(*sketch.shape, stream=stream + 1)
    one = float(np.sum(sketch.encode(vector).astype(np.float64) * noise))
    other = float(np.sum(vector.astype(np.float64) * sketch.decode(noise)))
    products = np.abs(vector).sum(dtype=np.float64) * np.abs(noise).max() * math.sqrt(sketch.rows)
    assert abs(one - other) <= 2 * bound(sketch.length + sketch.rows, products)


@pytest.mark.parametrize("placing", PLACINGS)
def test_tables_add_as_their_vectors_do(placing: Any) -> None:
    sketch = DenseSketch(length=3000, width=70, rows=4, blocks=2, placing=placing, seed=SEED)
    one, two = normal(3000, stream=1), normal(3000, stream=2)
    mixed = sketch.encode(2 * one - two)
    apart = 2 * sketch.encode(one) - sketch.encode(two)
    sizes = np.abs(one).sum() + np.abs(two).sum()  # of all, so of those that meet in a cell
    assert np.all(np.abs(mixed - apart) <= 3 * bound(3000 // 70 + 1, sizes))
    assert np.abs(mixed - apart).max() < 1e-3 * np.abs(mixed).max()


def test_rows_wider_than_the_vector_lose_nothing() -> None:
    sketch = DenseSketch(length=500, width=500, rows=3, seed=SEED)
    vector = normal(500)
    assert np.all(np.abs(sketch.decode(sketch.encode(vector)) - vector) <= bound(3, np.abs(vector)))
    assert sketch.norm(sketch.encode(vector)) == pytest.approx(np.linalg.norm(vector), rel=1e-5)


def test_many_vectors_are_encoded_as_one_by_one() -> None:
    for placing in PLACINGS:
        sketch = DenseSketch(length=300, width=40, rows=3, placing=placing, seed=SEED)  # type: ignore[arg-type]  # one of two
        vectors = normal(4, 300)
        assert sketch.encode(vectors).shape == (4, 3, 40)
        assert np.array_equal(sketch.encode(vectors), [sketch.encode(each) for each in vectors])
        assert sketch.encode(vectors[:0]).shape == (0, 3, 40)


def test_one_block_of_several_is_a_count_mean_sketch() -> None:
    """A reading over blocks is the median of what each block alone would read."""
    for blocks in (2, 3, 4, 5):
        sketch = DenseSketch(length=2000, width=90, rows=3, blocks=blocks, seed=SEED)
        alone = DenseSketch(length=2000, width=90, rows=3, seed=SEED)
        table = sketch.encode(normal(2000))
        each = []
        for block in range(blocks):
            rows = slice(3 * block, 3 * block + 3)
            part = table[rows], sketch.rotations[rows], sketch.sign_keys[rows]
            each.append(plain_dense.decode(*part, 2000, 1, 1 / math.sqrt(3)))
        if blocks == 2:
            assert np.array_equal(alone.rotations, sketch.rotations[:3])  # rows are numbered on
        error = np.abs(sketch.decode(table) - np.median(each, axis=0))
        assert np.all(error <= bound(3, math.sqrt(3) * np.abs(table).max()))
        norms = [np.sum(table[3 * b : 3 * b + 3].astype(np.float64) ** 2) for b in range(blocks)]
        assert sketch.norm(table) == pytest.approx(math.sqrt(np.mean(norms)), rel=1e-12)


def test_seeds_rounds_and_placings_make_different_maps() -> None:
    vector = normal(400)
    sketches = [
        DenseSketch(length=400, width=50, rows=3, seed=seed, round=round, placing=placing)  # type: ignore[arg-type]  # one of two
        for seed in (1, 2)
        for round in (0, 1)
        for placing in PLACINGS
    ]
    tables = [sketch.encode(vector) for sketch in sketches]
    for k, table in enumerate(tables):
        assert not any(np.allclose(table, other) for other in tables[:k])
        assert np.array_equal(table, sketches[k].encode(vector))
    rows = tables[0]
    assert not np.allclose(rows[0], rows[1])


# --- the twins


def compiled_tables(vectors: F32, sketch: DenseSketch) -> F32:
    return dense.encode(
        vectors, sketch.rotations, sketch.sign_keys, sketch.width, 1 / math.sqrt(sketch.rows)
    )


@contextmanager
def compiled_alone() -> Iterator[None]:
    """Small inputs take the compiled path, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "TWINS", kernels.Twins("dense", 0))
        assert dense.TWINS.pick(0) is compiled_dense
        yield


@pytest.fixture
def only_compiled() -> Iterator[None]:
    with compiled_alone():
        yield


def test_what_ran_before_does_not_show() -> None:
    """Twins that are equal up to rounding: a seeded run repeats in a process of another history."""
    small, large = (
        DenseSketch(length=length, width=width, rows=15, blocks=3, seed=SEED)
        for length, width in ((300, 20), (1 << 17, 1000))
    )
    vector, noise = normal(300), normal(*small.shape, stream=1)
    large.encode(normal(large.length))
    after = small.encode(vector), small.decode(noise)
    hashes, scale = (small.rotations, small.sign_keys), 1 / math.sqrt(15)
    assert after[0].tobytes() == plain_dense.encode(vector, *hashes, 20, scale).tobytes()
    with compiled_alone():  # the control: the other twin would show
        others = small.encode(vector), small.decode(noise)
    assert any(one.tobytes() != other.tobytes() for one, other in zip(after, others, strict=True))


@settings(max_examples=150)
@given(sketches, st.integers(0, 2**32 - 1))
def test_the_twins_are_equal_up_to_rounding(sketch: DenseSketch, stream: int) -> None:
    """Both add the same numbers, so they differ by no more than float32 sums may be off: the
    number of terms times 2**-24 times the sum of their sizes."""
    vector, noise = normal(sketch.length, stream=stream), normal(*sketch.shape, stream=stream + 1)
    scale, hashes = 1 / math.sqrt(sketch.rows), (sketch.rotations, sketch.sign_keys)
    plain = plain_dense.encode(vector, *hashes, sketch.width, scale)
    with compiled_alone():
        compiled = compiled_tables(vector[None], sketch)[0]
        other = dense.decode(noise, *hashes, sketch.length, sketch.blocks, scale)
    sizes = np.stack(
        [
            np.bincount(
                plain_dense.rotated_cells(turns, sketch.length, sketch.width),
                np.abs(vector),
                sketch.width,
            )
            for turns in sketch.rotations
        ]
    )
    terms = sketch.rotations.shape[1]
    assert np.all(np.abs(plain - compiled) <= bound(terms, scale * sizes))
    read = plain_dense.decode(noise, *hashes, sketch.length, sketch.blocks, scale)
    largest = np.abs(noise).max(axis=1).reshape(sketch.blocks, -1).sum(axis=1).max()
    assert np.all(np.abs(read - other) <= bound(sketch.rows, scale * largest))


@pytest.mark.usefixtures("only_compiled")
@pytest.mark.parametrize("width", [1, 20, 32, 33, 1000, 5000, 40_000])
def test_the_number_of_cores_does_not_show(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = DenseSketch(length=30_001, width=width, rows=5, blocks=2, seed=SEED)
    vectors, noise = normal(3, 30_001), normal(*sketch.shape, stream=1)
    whole = [sketch.encode(vectors[0]), sketch.encode(vectors), sketch.decode(noise)]
    monkeypatch.setattr(dense, "WORK_PER_CORE", 1)
    for cores in (2, 3, 64):
        monkeypatch.setattr(kernels, "cores_allowed", lambda cores=cores: cores)
        parts = [sketch.encode(vectors[0]), sketch.encode(vectors), sketch.decode(noise)]
        for one, other in zip(whole, parts, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.usefixtures("only_compiled")
def test_pieces_join_in_vectors_of_many() -> None:
    """Long enough for several pieces, chunks that straddle them, and a ragged end."""
    for length, width in ((50_003, 1234), (50_003, 31), (50_003, 4096), (8192, 4096)):
        sketch = DenseSketch(length=length, width=width, rows=2, blocks=1, seed=SEED)
        vector = normal(length)
        hashes = (sketch.rotations, sketch.sign_keys)
        plain = plain_dense.encode(vector, *hashes, width, 1 / math.sqrt(2))
        terms = -(-length // width)
        error = np.abs(plain - sketch.encode(vector))
        assert np.all(error <= bound(terms, terms * np.abs(vector).max()))
        assert error.max() < 1e-4 * np.abs(plain).max()
        read = plain_dense.decode(plain, *hashes, length, 1, 1 / math.sqrt(2))
        error = np.abs(read - sketch.decode(plain))
        assert np.all(error <= bound(2, 2 * np.abs(plain).max()))


# --- what is taken and what is refused


@pytest.mark.parametrize("placing", PLACINGS)
def test_inputs_are_not_changed(placing: Any) -> None:
    sketch = DenseSketch(length=600, width=30, rows=3, blocks=2, placing=placing, seed=SEED)
    vector = normal(600)
    table = sketch.encode(vector)
    for value, use in ((vector, sketch.encode), (table, sketch.decode), (table, sketch.norm)):
        value.flags.writeable = False
        before = value.copy()
        use(value)
        assert value.tobytes() == before.tobytes()
    assert not sketch.rotations.flags.writeable


def test_float64_and_whole_numbers_are_converted() -> None:
    sketch = DenseSketch(length=100, width=10, seed=SEED)
    vector = np.arange(100)
    table = sketch.encode(vector.astype(np.float32))
    for values in (vector, vector.astype(np.float64), np.repeat(vector, 2)[::2]):
        assert np.array_equal(sketch.encode(values), table)
    assert table.dtype == sketch.decode(table.astype(np.float64)).dtype == np.float32
    assert np.array_equal(sketch.decode(table.astype(np.float64)), sketch.decode(table))


@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_is_refused(placing: Any, bad: float) -> None:
    sketch = DenseSketch(length=600, width=30, rows=2, placing=placing, seed=SEED)
    vector = np.zeros((2, 600))
    vector[1, 577] = bad
    with pytest.raises(SpecError, match="finite"):
        sketch.encode(vector)
    with pytest.raises(SpecError, match="finite"):
        sketch.encode(np.where(np.arange(600) % 2, bad, -bad))
    table = np.zeros(sketch.shape)
    table[1, 29] = bad
    for use in (sketch.decode, sketch.norm):
        with pytest.raises(SpecError, match="finite"):
            use(table)


def test_shapes_must_be_the_sketch_s_own() -> None:
    sketch = DenseSketch(length=60, width=7, rows=2, seed=SEED)
    for shape in ((59,), (61,), (60, 1), (1, 1, 60), ()):
        with pytest.raises(SpecError, match=r"vectors must be \(60,\)"):
            sketch.encode(np.zeros(shape))
    uses: tuple[Callable[[Any], Any], ...] = (sketch.decode, sketch.norm)
    for shape in ((14,), (2, 8), (7, 2), (1, 2, 7)):
        for use in uses:
            with pytest.raises(SpecError, match=r"a table must have the shape \(2, 7\)"):
                use(np.zeros(shape))
    for wrong in (np.zeros(60, dtype=complex), np.array(["a"] * 60), np.zeros(60, dtype=bool)):
        with pytest.raises(SpecError, match="real numbers"):
            sketch.encode(wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 0),
        ("length", 2**31 + 1),
        ("width", 0),
        ("width", 2**31 + 1),
        ("rows", 0),
        ("blocks", 0),
        ("rows", 2**20 + 1),
        ("seed", -1),
        ("round", -1),
        ("placing", "linear"),
        ("length", 2.5),
    ],
)
def test_a_spec_that_cannot_be_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"length": 10, "width": 5, "seed": 1, field: value}
    with pytest.raises(SpecError, match=field):
        DenseSketch(**fields)


def test_a_spec_is_its_json() -> None:
    sketch = DenseSketch(length=10, width=5, seed=1)
    assert from_json(to_json(sketch)) == sketch
    assert (sketch.rows, sketch.blocks, sketch.placing, sketch.round) == (15, 1, "rotation", 0)
    assert (sketch.shape, sketch.cells) == ((15, 5), 75)


@given(st.lists(st.integers(-5, 5), max_size=30), st.integers(0, 35))
def test_top_keeps_the_largest(values: list[int], k: int) -> None:
    vector = np.array(values, dtype=np.float32)
    largest = top(vector, k)
    assert vector.tolist() == values
    assert np.all((largest == vector) | (largest == 0))
    sizes = sorted(map(abs, values), reverse=True)
    assert sorted(np.abs(largest).tolist(), reverse=True)[:k] == sizes[:k]
    assert np.count_nonzero(largest) <= k


def test_top_refuses_what_it_cannot_do() -> None:
    with pytest.raises(SpecError, match="k must be at least 0"):
        top(np.zeros(3, dtype=np.float32), -1)
    with pytest.raises(SpecError, match="one dimension"):
        top(np.zeros((3, 1), dtype=np.float32), 1)

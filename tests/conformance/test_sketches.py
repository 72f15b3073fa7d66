"""Every sketch keeps the same promises: found through the registry, so that none can stay out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sfumato.simulation.simulate  # noqa: F401  # registers every kind
from checks import SEED
from sfumato.errors import SpecError
from sfumato.sketch import CountSketch, IntegerKeys, InvertibleSketch, OneHot, Sketch
from sfumato.spec import digest, from_json, kind_of, kinds, to_json

I64 = npt.NDArray[np.int64]

EXAMPLES_EACH = 40
DOMAIN = 40  # values drawn in the checks: 0 .. DOMAIN - 1, which every sketch here takes

EXAMPLES: dict[str, list[Any]] = {
    "count_sketch": [
        CountSketch(rows=5, width=16, seed=SEED),
        CountSketch(rows=4, width=3, seed=SEED, sign_round=61),
        CountSketch(rows=1, width=2, seed=SEED, bucket_round=2, sign_round=2),
    ],
    "invertible_sketch": [
        InvertibleSketch(
            keys=IntegerKeys(bits=bits), rows=3, width=40, count_bits=17, check_bits=20, seed=SEED
        )
        for bits in (8, 50)  # one word per cell, and two
    ],
    "one_hot": [OneHot(categories=DOMAIN), OneHot(categories=DOMAIN + 5)],
}

values = st.lists(st.integers(0, DOMAIN - 1), max_size=30)
weighted = st.lists(
    st.tuples(st.integers(0, DOMAIN - 1), st.integers(-(2**40), 2**40)), max_size=20
)


def sketch_kinds() -> Iterator[str]:
    """The registered kinds that are sketches: they encode and estimate.

    Sketches of vectors are left out: their values are not items but tables that devices made,
    bounded in norm, so that they have no values or weights in common with the others
    (tests/unit/questions/test_mean.py, tests/unit/learn/test_round_table.py). Counts of items are
    left out: their tables are sparse, so that they have no shape; they keep the same laws
    (tests/unit/sketch/test_sparse.py). Tables of samples are left out: they are drawn with coins
    (tests/unit/sketch/test_sampled.py).
    """
    for kind, cls in kinds().items():
        counts = callable(getattr(cls, "encode", None)) and callable(getattr(cls, "estimate", None))
        if counts and kind not in (
            "vector_sketch",
            "round_sketch",
            "item_counts",
            "sampled_tables",
        ):
            yield kind


def array(items: list[int]) -> I64:
    return np.array(items, dtype=np.int64)


def encoded(sketch: Sketch, pairs: list[tuple[int, int]]) -> I64:
    table: I64 = sketch.encode(array([v for v, _ in pairs]), array([w for _, w in pairs]))
    return table


def test_every_registered_sketch_is_checked() -> None:
    """A new kind of sketch enters EXAMPLES, and with it every check below."""
    assert set(sketch_kinds()) == EXAMPLES.keys()
    assert all(kind_of(sketch) == kind for kind, some in EXAMPLES.items() for sketch in some)


def equal(sketch: Sketch, one: I64, other: I64) -> bool:
    """Whether two tables are one, in the ring that the sketch's words belong to."""
    if sketch.word_bits is None:
        return np.array_equal(one, other)
    mask = (1 << sketch.word_bits) - 1
    return np.array_equal(one & mask, other & mask)


def check_linear(sketch: Sketch) -> None:
    """encode(a) + encode(b) == encode(a and b), and weights multiply; exact integers."""

    @settings(max_examples=EXAMPLES_EACH)
    @given(weighted, weighted, st.integers(-(2**10), 2**10))
    def linear(first: list[tuple[int, int]], second: list[tuple[int, int]], factor: int) -> None:
        added = encoded(sketch, first) + encoded(sketch, second)
        assert equal(sketch, added, encoded(sketch, first + second))
        scaled = [(value, factor * weight) for value, weight in first]
        assert equal(sketch, encoded(sketch, scaled), factor * encoded(sketch, first))

    linear()


def check_order_and_grouping(sketch: Sketch) -> None:
    """Neither the order of values nor how they are grouped changes the table."""

    @settings(max_examples=EXAMPLES_EACH)
    @given(weighted, st.randoms(use_true_random=False), st.integers(0, 20))
    def free(pairs: list[tuple[int, int]], chance: Any, cut: int) -> None:
        whole = encoded(sketch, pairs)
        shuffled = pairs.copy()
        chance.shuffle(shuffled)
        assert equal(sketch, encoded(sketch, shuffled), whole)
        left, right = shuffled[:cut], shuffled[cut:]
        assert equal(sketch, encoded(sketch, right) + encoded(sketch, left), whole)

    free()


def check_possible_tables(sketch: Sketch) -> None:
    """What a device can make is possible; more of it, less than nothing, or noise is not."""

    @settings(max_examples=EXAMPLES_EACH)
    @given(st.sets(st.integers(0, DOMAIN - 1), max_size=4), st.integers(1, 2**20))
    def distinguish(items: set[int], chance: int) -> None:
        table, most = sketch.encode(array(sorted(items))), max(len(items), 1)
        noise = np.random.default_rng(chance).integers(-(2**20), 2**20, table.shape)
        heavy = (most + 1) * sketch.encode(array([chance % DOMAIN]))
        tables = np.stack([table, heavy, noise])
        assert sketch.possible(tables, most).tolist() == [True, False, False]

    distinguish()


def check_many_are_one_by_one(sketch: Sketch) -> None:
    """Many values at once are the same values one at a time, encoded and estimated."""

    @settings(max_examples=EXAMPLES_EACH)
    @given(values)
    def same(items: list[int]) -> None:
        whole = sketch.encode(array(items))
        singly = [sketch.encode(array([value])) for value in items]
        assert equal(sketch, whole, np.sum([np.zeros_like(whole), *singly], axis=0))
        assert np.array_equal(whole, sketch.encode(array(items), array([1] * len(items))))
        queries = array(items)
        alone = [float(sketch.estimate(whole, array([value]))[0]) for value in items]
        assert sketch.estimate(whole, queries).tolist() == alone

    same()


def check_many_are_one_by_one_at_any_size(sketch: Sketch) -> None:
    """Also where there is so much that the compiled loops take over."""
    values = np.random.default_rng(SEED).integers(0, DOMAIN, 50_000)
    counts = np.bincount(values, minlength=DOMAIN)
    assert np.array_equal(sketch.encode(values), sketch.encode(np.arange(DOMAIN), counts))
    table = sketch.encode(values)
    every = sketch.estimate(table, np.arange(DOMAIN))
    assert np.array_equal(sketch.estimate(table, values), every[values])


def check_inputs_are_unchanged(sketch: Sketch) -> None:
    """Read-only inputs are enough, and keep their bytes."""
    values, weights = np.arange(DOMAIN), np.arange(DOMAIN) - 7
    table = sketch.encode(values)
    inputs = (values, weights, table)
    before = [each.tobytes() for each in inputs]
    for each in inputs:
        each.flags.writeable = False
    sketch.encode(values, weights)
    sketch.estimate(table, values)
    assert [each.tobytes() for each in inputs] == before


def check_json_round_trip(sketch: Sketch) -> None:
    """Another process builds the same sketch from its JSON, and gets the same tables."""
    again = from_json(to_json(sketch))
    assert again == sketch
    assert digest(again) == digest(sketch)
    values = np.arange(DOMAIN)
    assert np.array_equal(again.encode(values, values), sketch.encode(values, values))


def check_other_specs_are_other_digests(sketch: Sketch) -> None:
    """Whatever differs between two specs shows in the digest, so their tables cannot meet."""
    data = json.loads(to_json(sketch))
    for name in data.keys() - {"kind", "sfumato"}:
        changed = data[name] | {"bits": 9} if name == "keys" else data[name] + 1
        other = from_json(json.dumps({**data, name: changed}))
        assert digest(other) != digest(sketch)


def check_tables(sketch: Sketch) -> None:
    """A table is whole numbers of the stated shape; nothing encodes to zeros."""
    table = sketch.encode(np.arange(DOMAIN))
    assert table.dtype == np.int64
    assert table.shape == sketch.shape
    assert sketch.encode(array([])).shape == sketch.shape
    assert not sketch.encode(array([])).any()
    estimates = sketch.estimate(table, np.arange(DOMAIN))
    assert estimates.dtype == np.float64
    assert estimates.shape == (DOMAIN,)


def check_weights(sketch: Sketch) -> None:
    """One whole number a value, or none at all: the compiled loops do not look."""
    for count in (3, 50_000):  # on the numpy path and on the compiled one
        values = np.arange(count) % DOMAIN
        for wrong in (
            np.ones(count - 1, dtype=np.int64),
            np.ones(count + 1, dtype=np.int64),
            np.ones(1, dtype=np.int64),
            np.ones((count, 1), dtype=np.int64),
            np.ones(count),
            np.full(count, np.nan),
            np.ones(count, dtype=bool),
        ):
            with pytest.raises(SpecError, match="weights"):
                sketch.encode(values, wrong)


def check_a_lone_value_is_read_exactly(sketch: Sketch) -> None:
    for value in range(DOMAIN):
        table = sketch.encode(array([value]), array([12_345]))
        assert sketch.estimate(table, array([value])).tolist() == [12_345.0]


def check_sensitivity(sketch: Sketch) -> None:
    """No contribution of this many values exceeds the stated norms; `unit_cells` is exact."""

    @settings(max_examples=EXAMPLES_EACH)
    @given(st.lists(st.integers(0, DOMAIN - 1), min_size=1, max_size=6))
    def bounded(values: list[int]) -> None:
        bound = sketch.sensitivity(len(values))
        table = sketch.encode(array(values))
        assert np.abs(table).sum() <= bound.l1
        assert (table**2).sum() <= bound.l2**2 * (1 + 1e-12)  # l2 is a rounded square root
        if bound.unit_cells:
            assert np.count_nonzero(table) == bound.unit_cells
            assert np.abs(table).max() == 1

    bounded()
    assert sketch.sensitivity(1).unit_cells > 0


def check_sensitivity_is_reached(sketch: Sketch) -> None:
    """The norms are no larger than they must be: values all alike reach them."""
    for count in (1, 2, 5):
        bound = sketch.sensitivity(count)
        table = sketch.encode(array([3] * count))
        assert np.abs(table).sum() == bound.l1
        assert (table**2).sum() >= bound.l2**2 * (1 - 1e-12)


CHECKS: list[Callable[[Sketch], None]] = [
    check_linear,
    check_order_and_grouping,
    check_many_are_one_by_one,
    check_many_are_one_by_one_at_any_size,
    check_inputs_are_unchanged,
    check_json_round_trip,
    check_other_specs_are_other_digests,
    check_tables,
    check_weights,
    check_a_lone_value_is_read_exactly,
    check_sensitivity,
    check_sensitivity_is_reached,
    check_possible_tables,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "sketch", [sketch for some in EXAMPLES.values() for sketch in some], ids=repr
)
def test_every_sketch_keeps_the_promises_of_all(
    sketch: Sketch, check: Callable[[Sketch], None]
) -> None:
    if sketch.word_bits is not None and check in (check_sensitivity, check_sensitivity_is_reached):
        pytest.skip("its words are residues: the norms are of what is listed, and not of the table")
    check(sketch)


class Forgetful:
    """The control: a sketch that breaks promises, one check at a time."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._sound = OneHot(categories=DOMAIN)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._sound.shape

    @property
    def word_bits(self) -> None:
        return None

    def encode(self, values: Any, weights: Any = None) -> I64:
        if self._fault == "writes to its input" and weights is not None:
            weights[:] = 0
        table = self._sound.encode(values, weights)
        if self._fault == "saturates":
            return np.minimum(table, 100)
        if self._fault == "remembers the order" and len(values):
            table[values[0]] += 1
        return table

    def estimate(self, table: Any, values: Any) -> npt.NDArray[np.float64]:
        return self._sound.estimate(table, values) * (2 if self._fault == "doubles" else 1)

    def possible(self, tables: I64, count: int) -> npt.NDArray[np.bool_]:
        return self._sound.possible(tables, count if self._fault != "takes anything" else 2**40)

    def sensitivity(self, count: int) -> Any:
        return self._sound.sensitivity(count if self._fault != "understates its reach" else 1)


@pytest.fixture
def no_shrinking() -> Iterator[None]:
    """The first counterexample will do: that there is one is all that is asked."""
    usual = settings()
    settings.register_profile(
        "no shrinking", usual, phases=[Phase.generate], report_multiple_bugs=False
    )
    settings.load_profile("no shrinking")
    yield
    settings.load_profile("sfumato")


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("saturates", check_linear),
        ("remembers the order", check_order_and_grouping),
        ("remembers the order", check_many_are_one_by_one),
        ("writes to its input", check_inputs_are_unchanged),
        ("doubles", check_a_lone_value_is_read_exactly),
        ("understates its reach", check_sensitivity),
        ("takes anything", check_possible_tables),
    ],
    ids=lambda case: getattr(case, "__name__", case),
)
@pytest.mark.usefixtures("no_shrinking")
def test_a_broken_sketch_is_caught(fault: str, check: Callable[[Sketch], None]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(Forgetful(fault))

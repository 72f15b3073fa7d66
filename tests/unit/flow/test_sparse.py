"""Reports with the numbers of values: canonical, of one length, and added like tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import DataError, SpecError, TaskError
from sfumato.flow.accumulator import (
    Batch,
    Collector,
    SparseAccumulator,
    SumAccumulator,
    accumulator,
    table_from_bytes,
    to_bytes,
)
from sfumato.flow.admission import Rejection
from sfumato.flow.aggregation import Masked, Plain, Sparse
from sfumato.flow.contribute import contribute, report
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.privacy import ListedAbove, NoiseAtRelease, NoNoise, SeededRng, best_list
from sfumato.privacy.listing import without_promise
from sfumato.sketch import CountSketch, ItemCounts, OneHot, SparseTable, TextKeys, WordKeys

U64 = npt.NDArray[np.uint64]

PLACES = Task(
    sketch=OneHot(categories=50),
    mechanism=NoNoise(),
    aggregation=Sparse(entries=3, entry_bits=6),
    cohort="everybody",
    items_per_device=3,
    max_count=1_000,
)
TABLES = replace(PLACES, aggregation=Plain(modulus_bits=13))
KEYS = TextKeys(length=10)  # 81 bits: two words
LISTED = Task(
    sketch=ItemCounts(keys=KEYS),
    mechanism=best_list(1.0, items_per_device=3, epsilon=1.0, delta=1e-6),
    aggregation=Sparse(entries=3, entry_bits=KEYS.bits),
    cohort="everybody",
    items_per_device=3,
    max_count=1_000,
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[Sparse, list[int]]:
    """An aggregation, and numbers of one of its reports, without zeros."""
    bits, entries = draw(st.integers(1, 140)), draw(st.integers(1, 6))
    values = draw(st.lists(st.integers(1, 2**bits - 1), max_size=entries))
    return Sparse(entries=entries, entry_bits=bits), values


def column(values: list[int], bits: int) -> U64:
    size = -(-bits // 64)
    words = [[value >> 64 * limb & 2**64 - 1 for limb in range(size)] for value in values]
    return np.array(words, dtype=np.uint64).reshape(-1, size)


def as_numbers(rows: U64) -> list[int]:
    return [sum(int(word) << 64 * place for place, word in enumerate(row)) for row in rows]


def bytes_of(message: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(message, dtype=np.uint8)[None]


@given(messages())
def test_unpacking_gives_the_numbers_back_after_zeros(case: tuple[Sparse, list[int]]) -> None:
    sparse, values = case
    rows = column(values, sparse.entry_bits)
    before = rows.copy()
    message = sparse.seal(rows)
    assert np.array_equal(rows, before)
    entries = as_numbers(sparse.unpack(bytes_of(message))[0])
    none = sparse.entries - len(values)
    assert entries[:none] == [0] * none
    assert sorted(entries[none:]) == sorted(values)


@given(messages(), st.randoms(use_true_random=False))
def test_a_message_has_one_length_and_does_not_show_the_order(
    case: tuple[Sparse, list[int]], chance: Any
) -> None:
    sparse, values = case
    message = sparse.seal(column(values, sparse.entry_bits))
    assert len(message) == -(-sparse.message_bits(0) // 8)
    assert len(sparse.seal(column([], sparse.entry_bits))) == len(message)
    chance.shuffle(values)
    assert sparse.seal(column(values, sparse.entry_bits)) == message


def test_many_messages_are_unpacked_like_one() -> None:
    sparse = Sparse(entries=2, entry_bits=70)
    some = [sparse.seal(column([k + 1, 2**69 + k], 70)) for k in range(5)]
    together = sparse.unpack(np.concatenate([bytes_of(message) for message in some]))
    assert together.shape == (5, 2, 2)
    for row, message in zip(together, some, strict=True):
        assert np.array_equal(row, sparse.unpack(bytes_of(message))[0])


def test_bits_are_packed_lowest_first_without_gaps() -> None:
    sparse = Sparse(entries=3, entry_bits=3)
    assert sparse.seal(column([5, 1], 3)) == bytes([0b01_001_000, 0b1])


@pytest.mark.parametrize("change", [{"entries": 0}, {"entry_bits": 0}])
def test_reports_without_entries_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="must be at least 1"):
        Sparse(**{"entries": 1, "entry_bits": 1} | change)


def test_the_collector_sees_every_report() -> None:
    assert not PLACES.aggregation.hides_summands


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"aggregation": Sparse(entries=2, entry_bits=6)}, "must have 3 entries of 6 bits"),
        ({"aggregation": Sparse(entries=3, entry_bits=7)}, "must have 3 entries of 6 bits"),
        ({"sketch": CountSketch(rows=3, width=9, seed=1)}, "cells have numbers"),
        ({"sketch": ItemCounts(keys=KEYS), "aggregation": Plain(modulus_bits=9)}, "need it"),
        (
            {"sketch": ItemCounts(keys=KEYS), "aggregation": Masked(modulus_bits=9, corrupt=0.1)},
            "need it",
        ),
        ({"mechanism": without_promise(1.0)}, "add noise to this one"),
    ],
)
def test_parts_that_do_not_fit_make_no_task(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        replace(PLACES, **change)


@pytest.mark.parametrize("mechanism", [NoNoise(), NoiseAtRelease(noise="laplace", scale=2.0)])
def test_counts_of_items_are_only_listed(mechanism: Any) -> None:
    """Noise on a sparse table would leave its set of cells, and so every item, in the clear."""
    with pytest.raises(TaskError, match="cannot be listed"):
        replace(LISTED, mechanism=mechanism)


def test_a_list_is_private_for_as_many_items_as_the_task_takes() -> None:
    with pytest.raises(TaskError, match="private for 3 items per device; the task takes 4"):
        replace(LISTED, items_per_device=4, aggregation=Sparse(entries=4, entry_bits=81))


def test_a_report_of_a_listed_domain_repeats_a_place_that_a_device_has_twice() -> None:
    message = report(PLACES, [7, 2, 7], rng=SeededRng(1)).message
    assert as_numbers(Sparse(entries=3, entry_bits=6).unpack(bytes_of(message))[0]) == [3, 8, 8]


def test_a_report_of_a_list_has_each_item_once() -> None:
    one, again = (
        report(LISTED, values, rng=SeededRng(1)).message
        for values in (["oak", "elm", "oak", "elm"], ["elm", "oak"])
    )
    assert one == again
    with pytest.raises(SpecError, match="at most 3 values per device; got 4"):
        report(LISTED, ["a", "b", "c", "d"], rng=SeededRng(1))
    with pytest.raises(SpecError, match="at most 3 values per device; got 4"):
        report(PLACES, [1, 1, 1, 1], rng=SeededRng(1))


def test_a_report_of_a_sample_leaves_items_out() -> None:
    """Each of 300 devices keeps an item with probability 1/2: fewer than 90 or more than 210 have
    a chance below 1e-11."""
    mechanism = best_list(0.5, items_per_device=3, epsilon=1.0, delta=1e-6)
    task, none = replace(LISTED, mechanism=mechanism), bytes(LISTED.message_bytes)
    reports = [report(task, ["oak"], rng=SeededRng(SEED, k)).message != none for k in range(300)]
    assert 90 < sum(reports) < 210


holdings = st.lists(st.lists(st.integers(0, 49), max_size=3), min_size=1, max_size=12)


def sealed(task: Task, devices: list[Any]) -> list[bytes]:
    return [report(task, values, rng=SeededRng(SEED)).message for values in devices]


@given(holdings, st.integers(0, 12))
def test_places_are_added_like_one_hot_tables(devices: list[list[int]], cut: int) -> None:
    sparse, dense = accumulator(PLACES), accumulator(TABLES)
    assert isinstance(sparse, SparseAccumulator)
    assert isinstance(dense, SumAccumulator)
    for values in devices:
        sparse.add(sealed(PLACES, [values]))
    dense.add(sealed(TABLES, devices))
    batch = sparse.batch(len(devices))
    assert isinstance(batch, Batch)
    dense_batch = dense.batch(len(devices))
    assert isinstance(dense_batch, Batch)
    expected = TABLES.aggregation.open(dense_batch.total)
    assert np.array_equal(PLACES.aggregation.open(batch.total), expected)
    parts = []
    for some in (devices[:cut], devices[cut:]):
        part = accumulator(PLACES)
        part.add(sealed(PLACES, some))
        parts.append(part.seal(rng=SeededRng(1)))
    merged = accumulator(PLACES)
    for part_bytes in reversed(parts):
        merged.merge(part_bytes)
    merged_batch = merged.batch(len(devices))
    assert isinstance(merged_batch, Batch)
    assert np.array_equal(merged_batch.total, expected)


@given(st.lists(st.sets(st.sampled_from(["oak", "elm", "é", ""]), max_size=3), max_size=12))
def test_items_are_added_as_in_a_simulation(devices: list[set[str]]) -> None:
    """There, all items of a shard are counted together."""
    together = accumulator(LISTED)
    together.add(sealed(LISTED, [sorted(items) for items in devices]))
    batch = together.batch(len(devices))
    assert isinstance(batch, Batch)
    items = [item for some in devices for item in sorted(some)]
    at_once = contribute(LISTED, items, devices=len(devices), rng=SeededRng(1))
    assert np.array_equal(batch.total, at_once)
    stored = table_from_bytes(LISTED, to_bytes(batch.total))
    assert isinstance(stored, SparseTable)
    assert np.array_equal(stored, batch.total)


def test_sums_of_any_sizes_are_merged() -> None:
    """Small ones after large ones, and the other way round; a cell of each is in all of them."""
    sums = []
    sizes = [1, 40, 3, 3, 0, 90, 2, 1, 1, 17, 64]
    for order in (sizes, sizes[::-1]):
        merged = accumulator(LISTED)
        for size in order:
            words = ["oak", *(f"w{number}" for number in range(size))]
            merged.merge(to_bytes(LISTED.sketch.encode(words)))
        sums.append(merged.batch(1))
    assert isinstance(sums[0], Batch)
    assert isinstance(sums[1], Batch)
    assert np.array_equal(sums[0].total, sums[1].total)
    estimate = LISTED.sketch.estimate(sums[0].total, ["oak", "w0", "w39", "w89", "w90"])
    assert estimate.tolist() == [11.0, 10.0, 3.0, 1.0, 0.0]


def test_sealed_sums_do_not_depend_on_the_order_of_reports() -> None:
    devices = [["oak"], ["elm", "ash"], ["oak", "ash"], []]
    sums = []
    for order in (devices, devices[::-1]):
        part = accumulator(LISTED)
        part.add(sealed(LISTED, order))
        sums.append(part.seal(rng=SeededRng(1)))
    assert sums[0] == sums[1]


def test_batches_of_sparse_tables_add_and_an_empty_one_changes_nothing() -> None:
    together = accumulator(LISTED)
    together.add(sealed(LISTED, [["oak"], ["elm"]]))
    batch = together.batch(2)
    assert isinstance(batch, Batch)
    both = batch + batch + Batch.empty(LISTED)
    assert both.count == 4
    assert both.total.counts.tolist() == [2, 2]
    assert "oak" not in repr(together) + repr(batch)


@pytest.mark.parametrize("task", [PLACES, LISTED], ids=["places", "items"])
@pytest.mark.parametrize(
    "data",
    [
        b"no array",
        to_bytes(np.zeros((50,), dtype=np.int64)),
        to_bytes(np.zeros((2, 2, 2), dtype=np.int64)),
        to_bytes(np.array([[5, 1, 1], [4, 1, 1]])),
        to_bytes(np.array([[9, 0]])),
    ],
    ids=["no array", "a dense sum", "too deep", "descending", "a count of zero"],
)
def test_a_damaged_sum_is_refused(task: Task, data: bytes) -> None:
    with pytest.raises(DataError, match="restore the store from a backup"):
        accumulator(task).merge(data)


def entries(task: Task, *values: int) -> bytes:
    """A message with these numbers, in this order."""
    assert isinstance(task.aggregation, Sparse)
    whole = 0
    for place, value in enumerate(values):
        whole |= value << place * task.aggregation.entry_bits
    return whole.to_bytes(task.message_bytes, "little")


def key(item: str) -> int:
    return as_numbers(KEYS.numbers([item])[0])[0]


OAK, ELM = sorted([key("oak"), key("elm")], key=lambda value: value & 2**64 - 1)
IMPOSSIBLE: dict[str, tuple[Task, Callable[[], bytes]]] = {
    "a place that does not exist": (PLACES, lambda: entries(PLACES, 0, 0, 51)),
    "the largest number": (PLACES, lambda: entries(PLACES, 0, 0, 63)),
    "places in descending order": (PLACES, lambda: entries(PLACES, 0, 8, 3)),
    "none after a place": (PLACES, lambda: entries(PLACES, 3, 0, 8)),
    "none at the end": (PLACES, lambda: entries(PLACES, 3, 8, 0)),
    "an item twice": (LISTED, lambda: entries(LISTED, 0, OAK, OAK)),
    "items in descending order": (LISTED, lambda: entries(LISTED, 0, ELM, OAK)),
    "none after an item": (LISTED, lambda: entries(LISTED, OAK, 0, ELM)),
    "none after all items": (LISTED, lambda: entries(LISTED, OAK, ELM, 0)),
    "bytes that are no text": (LISTED, lambda: entries(LISTED, 0, 0, 0x01FF)),
    "a text without its end": (LISTED, lambda: entries(LISTED, 0, 0, ord("o"))),
    "bits after the end of a text": (LISTED, lambda: entries(LISTED, 0, 0, OAK | 1 << 79)),
    "an overlong zero": (LISTED, lambda: entries(LISTED, 0, 0, 0x0180C0)),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_entries_that_no_device_sends_are_rejected(kind: str) -> None:
    task, forge = IMPOSSIBLE[kind]
    good = Report(task.id, bytes(16), entries(task, 0, 0, OAK if task is LISTED else 50))
    bad = Report(task.id, b"\1" * 16, forge())
    collector = Collector(task)
    collector.add([good.to_bytes(), bad.to_bytes()])
    assert collector.rejected == {Rejection.IMPOSSIBLE: 1}
    assert collector.batch.count == 1
    assert np.asarray(collector.batch.total).sum() != 0
    alone = Collector(task)
    alone.add([bad.to_bytes()])
    assert (alone.rejected, alone.batch.count) == ({Rejection.IMPOSSIBLE: 1}, 0)


@pytest.mark.parametrize("task", [PLACES, LISTED], ids=["places", "items"])
def test_bits_after_the_last_entry_must_be_zero(task: Task) -> None:
    assert task.message_bits % 8
    good = report(task, [], rng=SeededRng(1)).to_bytes()
    for bit in range(task.message_bits % 8, 8):
        collector = Collector(task)
        collector.add([good[:-1] + bytes([good[-1] | 1 << bit])])
        assert collector.rejected == {Rejection.MALFORMED: 1}


def test_words_of_an_alphabet_are_checked_like_texts() -> None:
    keys = WordKeys(alphabet="ab", length=3)  # five bits: 27 words of three codes
    task = replace(
        LISTED,
        sketch=ItemCounts(keys=keys),
        mechanism=without_promise(1.0),
        aggregation=Sparse(entries=1, entry_bits=keys.bits),
        items_per_device=1,
    )
    admitted = set()
    for number in range(2**keys.bits):
        collector = Collector(task)
        collector.add([Report(task.id, bytes(16), bytes([number])).to_bytes()])
        if not collector.rejected:
            admitted.add(number)
    words = [
        a + b + c for a in "ab" for b in ["", "a", "b"] for c in (["", "a", "b"] if b else [""])
    ]
    assert admitted == {0} | set(as_numbers(keys.numbers(words)[0]))


def test_a_large_upload_is_checked_in_pieces() -> None:
    """More bits than are unpacked at once; one report in the middle is bad."""
    count = (1 << 20) // LISTED.message_bits + 50
    task = replace(LISTED, max_count=count)
    items = as_numbers(KEYS.numbers([f"w{k}" for k in range(count)])[0])
    messages = [entries(task, 0, 0, number) for number in items]
    messages[count // 2] = entries(task, 0, OAK, OAK)
    reports = [
        Report(task.id, k.to_bytes(16, "little"), message).to_bytes()
        for k, message in enumerate(messages)
    ]
    collector = Collector(task)
    collector.add(reports)
    assert collector.rejected == {Rejection.IMPOSSIBLE: 1}
    assert len(collector.batch.total) == count - 1


def test_the_loss_of_a_list_is_what_its_mechanism_claims() -> None:
    assert isinstance(LISTED.mechanism, ListedAbove)
    assert (LISTED.loss.epsilon, LISTED.loss.delta) == (1.0, 1e-6)  # type: ignore[union-attr]
    assert LISTED.noise_multiplier is None

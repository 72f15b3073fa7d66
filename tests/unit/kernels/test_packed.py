"""Packed words added to a table: compiled and by numpy, equal to sums of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError
from sfumato.kernels import packed
from sfumato.kernels.packed import add_packed, pack_words

Words = npt.NDArray[np.unsignedinteger[Any]]
LANES = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))


def lane(bits: int) -> type[np.unsignedinteger]:
    return next(kind for most, kind in LANES if bits <= most)


def random_words(bits: int, shape: tuple[int, ...], seed: int = SEED) -> Words:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**bits, shape, dtype=np.uint64, endpoint=False).astype(lane(bits))


def plain(total: Words, tables: Words) -> Words:
    """Sums word by word, in whole numbers that do not wrap, and then modulo the lane's."""
    sums = total.astype(object) + tables.astype(object).sum(axis=0)
    return np.asarray(sums % 2 ** (8 * total.itemsize), dtype=total.dtype)


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, whatever the size."""
    monkeypatch.setattr(packed, "SMALL", 0 if request.param == "compiled" else 1 << 62)
    assert (packed.TWINS.compiled() is not None) or request.param == "numpy"
    return str(request.param)


@pytest.mark.parametrize("bits", range(2, 65))
def test_tables_of_every_width_add_up(way: str, bits: int) -> None:
    """Word by word, at every place that a word can begin at, up to the last bit."""
    for cells in (1, 7, 8, 9, 129):
        tables = random_words(bits, (3, cells))
        total = random_words(bits, (cells,), seed=SEED + 1)
        expected = plain(total, tables)
        add_packed(total, [pack_words(table, bits) for table in tables], bits)
        assert np.array_equal(total, expected)


@given(st.integers(2, 64), st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_both_ways_agree(bits: int, cells: int, count: int, seed: int) -> None:
    tables = [pack_words(table, bits) for table in random_words(bits, (count, cells), seed)]
    sums = []
    for small in (0, 1 << 62):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "SMALL", small)
            sums.append(random_words(bits, (cells,), seed + 1))
            add_packed(sums[-1], tables, bits)
    assert np.array_equal(sums[0], sums[1])


def test_the_largest_words_wrap(way: str) -> None:
    total = np.full(20, 2**32 - 1, dtype=np.uint32)
    add_packed(total, [pack_words(np.full(20, 2**27 - 1, dtype=np.uint32), 27)] * 2, 27)
    assert (total == 2**28 - 3).all()


def test_one_malformed_table_keeps_all_of_them_out(way: str) -> None:
    good = pack_words(random_words(27, (21,)), 27)  # 567 bits: one of the last byte is not used
    total = np.zeros(21, dtype=np.uint32)
    for wrong in (good[:-1], good + b"\0", b"", good[:-1] + bytes([good[-1] | 0x80])):
        with pytest.raises(MismatchError, match="a packed table"):
            add_packed(total, [good, wrong], 27)
        assert not total.any()
    add_packed(total, [], 27)
    assert not total.any()


def test_a_device_does_not_wake_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def wakes() -> None:
        raise AssertionError("a small table woke the compiler")

    monkeypatch.setattr(packed.TWINS, "compiled", wakes)
    total = np.zeros(1_000, dtype=np.uint32)
    add_packed(total, [pack_words(random_words(20, (1_000,)), 20)], 20)
    assert total.any()

"""A table on the wire: packed to the bit, opened to the whole numbers nearest zero."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError, SpecError
from sfumato.flow.aggregation import Plain
from sfumato.spec import from_json, to_json

I64 = npt.NDArray[np.int64]
WIDTHS = range(2, 63)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, I64]:
    """A modulus, and a table of numbers that it distinguishes."""
    bits = draw(st.integers(2, 62))
    half = 1 << (bits - 1)
    cells = draw(st.lists(st.integers(-half, half - 1), max_size=30))
    return bits, np.array(cells, dtype=np.int64)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_packs_and_unpacks(bits: int) -> None:
    half = 1 << (bits - 1)
    edges = np.array([0, 1, -1, half - 1, -half, half // 2], dtype=np.int64)
    values = np.random.default_rng(SEED).integers(-half, half, size=50)
    table = np.concatenate([edges, values])
    plain = Plain(modulus_bits=bits)
    message = plain.seal(table)
    assert len(message) == -(-table.size * bits // 8)
    residues = plain.unpack(message, table.shape)
    assert np.array_equal(residues, table % (1 << bits))
    assert np.array_equal(plain.open(residues), table)


@given(tables())
def test_sealing_unpacking_and_opening_give_the_table_back(case: tuple[int, I64]) -> None:
    bits, table = case
    plain, before = Plain(modulus_bits=bits), table.copy()
    message = plain.seal(table)
    assert len(message) == -(-plain.message_bits(table.size) // 8)
    assert np.array_equal(plain.open(plain.unpack(message, table.shape)), table)
    assert np.array_equal(table, before)


@given(st.integers(2, 62), st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20))
def test_a_sum_of_residues_opens_to_the_sum_wherever_that_fits(
    bits: int, values: list[int]
) -> None:
    """Partial sums may have any size, even beyond 64 bits: only the final sum must fit."""
    plain, half = Plain(modulus_bits=bits), 1 << (bits - 1)
    target = int(np.clip(sum(values), -half, half - 1))
    summands = [*values, target - sum(values)]
    total = np.zeros(1, dtype=np.int64)
    for value in summands:
        total = total + plain.unpack(plain.seal(np.array([value])), (1,))
    assert plain.open(total).tolist() == [target]


def test_bits_are_packed_lowest_first_without_gaps() -> None:
    assert Plain(modulus_bits=4).seal(np.array([1, -1, 0])) == bytes([0xF1, 0x00])
    assert Plain(modulus_bits=3).seal(np.array([1, 2, 3, -4])) == bytes([0b11_010_001, 0b0000_1000])


def test_shape_is_restored() -> None:
    table = np.arange(-6, 6).reshape(3, 4)
    plain = Plain(modulus_bits=5)
    assert np.array_equal(plain.open(plain.unpack(plain.seal(table), (3, 4))), table)


@pytest.mark.parametrize("length", [0, 3, 5])
def test_a_message_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(MismatchError, match=f"must have 4 bytes; got {length}"):
        Plain(modulus_bits=6).unpack(bytes(length), (5,))


@pytest.mark.parametrize("place", [6, 7])
def test_bits_after_the_last_cell_must_be_zero(place: int) -> None:
    plain = Plain(modulus_bits=6)
    good = plain.seal(np.array([1, 2, 3, 4, 5]))
    assert plain.unpack(good, (5,)).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(MismatchError, match="last bits of a packed table must be zero"):
        plain.unpack(good[:-1] + bytes([good[-1] | 1 << place]), (5,))


@pytest.mark.parametrize("bits", [-1, 0, 1, 63, 64])
def test_widths_that_integers_cannot_hold_are_refused(bits: int) -> None:
    with pytest.raises(SpecError, match="modulus_bits must be 2 to 62"):
        Plain(modulus_bits=bits)


def test_plain_hides_nothing_and_is_a_spec() -> None:
    plain = Plain(modulus_bits=12)
    assert not plain.hides_summands
    assert from_json(to_json(plain)) == plain

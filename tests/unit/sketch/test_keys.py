"""Keys: every item is read back unchanged, and invalid keys are reported."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.errors import SpecError
from sfumato.sketch import IntegerKeys, TextKeys, WordKeys
from sfumato.sketch.keys import put, take

ALPHABET = "cab森defghij"


@given(st.lists(st.text(max_size=12), max_size=20))
def test_any_text_that_is_short_enough_comes_back(texts: list[str]) -> None:
    keys = TextKeys(length=16)
    numbers, fits = keys.numbers(texts)
    assert fits.tolist() == [len(text.encode()) <= 16 for text in texts]
    items, valid = keys.items(numbers[fits])
    assert valid.all()
    assert items.to_pylist() == [text for text, fit in zip(texts, fits, strict=True) if fit]


@given(st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=30), max_size=20))
def test_words_come_back_cut(words: list[str]) -> None:
    for length in (1, 3, 25):
        keys = WordKeys(alphabet=ALPHABET, length=length)
        numbers, fits = keys.numbers(words)
        assert fits.all()
        assert keys.items(numbers)[0].to_pylist() == [word[:length] for word in words]


def test_different_items_have_different_keys() -> None:
    texts = ["", "\0", "a", "a\0", "\0a", "\1", "a\1", "aa"]
    numbers, _ = TextKeys(length=3).numbers(texts)
    assert len(np.unique(numbers, axis=0)) == len(texts)


def test_words_take_as_few_bits_as_there_are_words() -> None:
    assert WordKeys(alphabet="".join(map(chr, range(97, 143))), length=3).bits == 17  # 47**3
    assert TextKeys(length=16).bits == 129


def test_words_with_other_characters_have_no_key() -> None:
    _, fits = WordKeys(alphabet="ab", length=3).numbers(["ab", "", "abc", "a\0b", "b"])
    assert fits.tolist() == [True, False, False, False, True]


def test_what_is_no_key_is_told() -> None:
    keys = np.array([[0x16B616F], [0x026B616F], [0], [0x01FF]], dtype=np.uint64)
    items, valid = TextKeys(length=7).items(keys)
    assert valid.tolist() == [True, False, False, False]  # no end, no key, not UTF-8
    assert items.to_pylist() == ["oak", None, None, None]
    words = WordKeys(alphabet="ab", length=2)
    items, valid = words.items(np.arange(16, dtype=np.uint64)[:, None])
    assert items.drop_null().to_pylist() == ["a", "aa", "ab", "b", "ba", "bb"]


def test_whole_numbers_come_back_and_others_have_no_key() -> None:
    keys = IntegerKeys(bits=40)
    numbers, fits = keys.numbers(np.array([0, 7, (1 << 40) - 1, 1 << 40, -1]))
    assert fits.tolist() == [True, True, True, False, False]
    assert keys.items(numbers)[0].to_pylist()[:3] == [0, 7, (1 << 40) - 1]
    with pytest.raises(SpecError, match="whole numbers"):
        keys.numbers(np.array([0.5]))


@pytest.mark.parametrize("bad", [{"length": 0}, {"length": 257}])
def test_lengths_are_bounded(bad: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="length must be"):
        TextKeys(**bad)


def test_missing_items_are_refused() -> None:
    with pytest.raises(SpecError, match="missing"):
        TextKeys(length=4).numbers(pa.array(["a", None]))


def test_slices_and_dictionaries_are_read_as_what_they_hold() -> None:
    column = pa.array(["oak", "elm", "fir", "ash"])
    for given_column in (column.slice(1, 2), pa.chunked_array([["elm"], ["fir"]]),
                         pa.array(["elm", "fir"]).dictionary_encode()):  # fmt: skip
        numbers, _ = TextKeys(length=4).numbers(given_column)
        assert TextKeys(length=4).items(numbers)[0].to_pylist() == ["elm", "fir"]


@given(st.integers(0, 127), st.integers(1, 64), st.integers(0, 2**64 - 1))
def test_bits_that_were_put_are_taken(start: int, size: int, value: int) -> None:
    words = np.zeros((1, 4), dtype=np.uint64)
    value &= (1 << size) - 1
    put(words, start, size, np.array([value], dtype=np.uint64))
    assert int(take(words, start, size)[0]) == value
    assert sum(int(word) << 64 * k for k, word in enumerate(words[0])) == value << start

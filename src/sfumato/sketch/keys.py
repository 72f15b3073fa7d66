"""Keys of an invertible sketch: items as numbers of a fixed number of bits, and back.

A key is (limbs,) little-endian 64-bit words; a column of them is (n, limbs). A number from a
damaged table need not be a key, so reading says which rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from sfumato.arrays import I64, U8, U64, Bool, Whole
from sfumato.errors import SpecError
from sfumato.kernels import invertible as kernels
from sfumato.sketch.words import Codes, check_alphabet, codes_of, texts_of
from sfumato.spec import require, spec

if TYPE_CHECKING:  # needed only on devices with such keys
    import pyarrow as pa

Column: TypeAlias = "pa.Array | pa.ChunkedArray | Whole | Sequence[str]"

MOST_BYTES = 256  # longest text key
_LIMB = 64
_MOST_RADIX = 1 << 62  # so that a group of characters is one number


@runtime_checkable
class Keys(Protocol):
    """A kind of items, and how they are numbered."""

    @property
    def bits(self) -> int:
        """How many bits a key has."""
        ...

    def numbers(self, items: Column) -> tuple[U64, Bool]:
        """The key of each item, (n, limbs), and which items have one; otherwise it is zero."""
        ...

    def items(self, keys: U64) -> tuple[pa.Array, Bool]:
        """The item of each key, and which rows are a key; otherwise the item is null."""
        ...


@spec("text_keys")
class TextKeys:
    """Strings of at most `length` bytes of UTF-8, in one bit more than that many bytes.

    A one after the last byte marks the end of a string, so that padded strings stay distinct.

    >>> keys, _ = TextKeys(length=8).numbers(["oak"])
    >>> hex(int(keys[0, 0])), TextKeys(length=8).items(keys)[0].to_pylist()
    ('0x16b616f', ['oak'])
    """

    length: int

    def check(self) -> None:
        require.within(1, MOST_BYTES, length=self.length)

    @property
    def bits(self) -> int:
        return 8 * self.length + 1

    def numbers(self, items: Column) -> tuple[U64, Bool]:
        return kernels.text_keys(*_utf8(items), self.length, limbs(self.bits))

    def items(self, keys: U64) -> tuple[pa.Array, Bool]:
        import pyarrow as pa

        texts, valid = self.texts(keys)
        return pa.array(texts, type=pa.string()), valid

    def texts(self, keys: U64) -> tuple[list[str | None], Bool]:
        """The same as `items`, in a list."""
        rows = _bytes(keys)
        size = rows.shape[1]
        last = size - 1 - np.argmax(rows[:, ::-1] != 0, axis=1)
        valid = (rows[np.arange(len(rows)), last] == 1) & (last <= self.length)
        encoded = [row[:end].tobytes() for row, end in zip(rows, last.tolist(), strict=True)]
        texts: list[str | None] = []
        for place, text in enumerate(encoded):
            try:
                texts.append(text.decode() if valid[place] else None)
            except UnicodeDecodeError:
                texts.append(None)
        valid &= np.array([text is not None for text in texts], dtype=np.bool_)
        return texts, valid


@spec("word_keys")
class WordKeys:
    """Words of at most `length` characters of a known alphabet, in as few bits as possible.

    Longer words are cut; the empty word and words with other characters have no key.

    >>> WordKeys(alphabet="abcd", length=3).bits
    7
    """

    alphabet: str
    length: int

    def check(self) -> None:
        check_alphabet(self.length, self.alphabet)

    @property
    def bits(self) -> int:
        return sum(bits for _, bits in self._groups())

    def numbers(self, items: Column) -> tuple[U64, Bool]:
        codes, fits = codes_of(_texts(items), self.alphabet, self.length)
        keys = np.zeros((len(codes), limbs(self.bits)), dtype=np.uint64)
        radix, start, place = np.uint64(self._radix), 0, 0
        for size, bits in self._groups():
            group = np.zeros(len(codes), dtype=np.uint64)
            for code in codes[:, start : start + size].T:
                group = group * radix + code
            put(keys, place, bits, group)
            start, place = start + size, place + bits
        return keys, fits

    def items(self, keys: U64) -> tuple[pa.Array, Bool]:
        import pyarrow as pa

        texts, valid = self.texts(keys)
        return pa.array(texts, type=pa.string()), valid

    def texts(self, keys: U64) -> tuple[list[str | None], Bool]:
        """The same as `items`, in a list."""
        codes: Codes = np.zeros((len(keys), self.length), dtype=np.uint16)
        radix, start, place = np.uint64(self._radix), 0, 0
        valid = np.ones(len(keys), dtype=np.bool_)
        for size, bits in self._groups():
            group = take(keys, place, bits)
            for position in reversed(range(start, start + size)):
                codes[:, position] = group % radix
                group //= radix
            valid &= group == 0
            start, place = start + size, place + bits
        valid &= ~((codes[:, :-1] == 0) & (codes[:, 1:] != 0)).any(axis=1) & (codes[:, 0] != 0)
        words = texts_of(np.where(valid[:, None], codes, 0).astype(np.uint16), self.alphabet)
        return [word or None for word in words], valid

    @property
    def _radix(self) -> int:
        return len(self.alphabet) + 1

    def _groups(self) -> list[tuple[int, int]]:
        """Groups of characters that form one number: their sizes and bits."""
        most = 1
        while self._radix ** (most + 1) <= _MOST_RADIX:
            most += 1
        sizes = [min(most, self.length - start) for start in range(0, self.length, most)]
        return [(size, (self._radix**size - 1).bit_length()) for size in sizes]


@spec("integer_keys")
class IntegerKeys:
    """Whole numbers from 0 to 2**bits − 1.

    >>> IntegerKeys(bits=40).items(IntegerKeys(bits=40).numbers(np.array([7]))[0])[0].to_pylist()
    [7]
    """

    bits: int

    def check(self) -> None:
        require.within(1, 63, bits=self.bits)

    def numbers(self, items: Column) -> tuple[U64, Bool]:
        column = np.asarray(items)
        if column.size and column.dtype.kind not in "iu":
            raise SpecError(f"integer keys must be whole numbers; got {column.dtype}")
        values = column.astype(np.uint64)  # negative ones become too large
        fits = values >> np.uint64(self.bits) == 0
        if not fits.all():
            values[~fits] = 0
        return values[:, None], fits

    def items(self, keys: U64) -> tuple[pa.Array, Bool]:
        import pyarrow as pa

        valid = keys[:, 0] >> np.uint64(self.bits) == 0
        return pa.array(keys[:, 0], mask=~valid, type=pa.uint64()), valid


def numbers_of(keys: Keys, items: Column) -> U64:
    """The keys of these items; those without one are refused."""
    numbers, fits = keys.numbers(items)
    if not fits.all():  # never name them
        raise SpecError(f"items must be keys of this task ({keys}); {int((~fits).sum())} are not")
    return numbers


def take(words: U64, start: int, size: int) -> U64:
    """Bits start .. start + size − 1 of each row, at most 64 of them."""
    limb, shift = divmod(start, _LIMB)
    bits = words[:, limb] >> np.uint64(shift)
    if shift + size > _LIMB:
        bits = bits | (words[:, limb + 1] << np.uint64(_LIMB - shift))
    return bits if size == _LIMB else bits & np.uint64((1 << size) - 1)


def put(words: U64, start: int, size: int, values: U64) -> None:
    """Set these bits, which must be zero, to the values of each row."""
    limb, shift = divmod(start, _LIMB)
    words[:, limb] |= values << np.uint64(shift)
    if shift + size > _LIMB:
        words[:, limb + 1] |= values >> np.uint64(_LIMB - shift)


def limbs(bits: int) -> int:
    """How many words of 64 bits hold this many."""
    return -(-bits // _LIMB)


def _bytes(keys: U64) -> U8:
    return (
        np.ascontiguousarray(keys.astype("<u8"))
        .view(np.uint8)
        .reshape(len(keys), 8 * keys.shape[1])
    )


def _texts(items: Column) -> Sequence[str] | pa.Array:
    """Texts without missing ones. A list stays a list: devices have no pyarrow."""
    if not isinstance(items, Sequence):
        return _strings(items)
    if not all(isinstance(item, str) for item in items):  # never name them
        raise SpecError("items must be texts; got something else")
    return items


def _utf8(items: Column) -> tuple[U8, I64]:
    """The bytes of all texts, and where each begins: (n + 1,)."""
    texts = _texts(items)
    if isinstance(texts, Sequence):
        encoded = [text.encode() for text in texts]
        starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return np.frombuffer(b"".join(encoded), dtype=np.uint8), starts
    column = texts.cast("large_string")
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[column.offset :][: len(column) + 1]
    starts = starts if len(column) else np.zeros(1, dtype=np.int64)
    return np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8), starts


def _strings(items: Column) -> pa.Array:
    import pyarrow as pa

    column: Any = items
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(items, type=pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if column.null_count:
        raise SpecError(f"items must not be missing; got {column.null_count} nulls")
    return column

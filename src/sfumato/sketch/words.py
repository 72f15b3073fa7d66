"""Words as rows of character codes: 0 pads, k is the alphabet's k-th character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sfumato import hashing
from sfumato.arrays import I64, U16, Bool
from sfumato.sketch.count import CountSketch
from sfumato.sketch.onehot import OneHot
from sfumato.spec import require, spec

if TYPE_CHECKING:  # not installed on devices
    import pyarrow as pa

Codes = U16
Words: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[str]"

LATIN = "abcdefghijklmnopqrstuvwxyz"
BYTES = "".join(map(chr, range(1, 256)))
"""The alphabet of any text: its characters stand for the bytes of the text's UTF-8."""
LONGEST_WORD = 10  # characters, unless a study says otherwise
LONGEST_TEXT = 12  # bytes of a new word in any script, unless a study says otherwise


def codes_of(words: Words, alphabet: str, length: int) -> tuple[Codes, Bool]:
    """Words as rows of codes, (n, length), and which of them have only characters of the alphabet.

    >>> codes_of(["bad", "é"], "abcd", 4)[0].tolist()
    [[2, 1, 4, 0], [0, 0, 0, 0]]
    >>> codes_of(["é"], BYTES, 4)[0].tolist()
    [[195, 169, 0, 0]]
    """
    text = words if isinstance(words, Sequence) else words.to_numpy(zero_copy_only=False)
    if alphabet == BYTES:
        text = [_cut(word, length).decode("latin-1") for word in text]
    text = np.asarray(text).astype(f"<U{length}")  # numpy cuts longer ones
    points = np.ascontiguousarray(text).view(np.uint32).reshape(len(words), length)
    order = np.argsort([ord(character) for character in alphabet])
    code_points = np.array([0, *sorted(map(ord, alphabet))], dtype=np.uint32)
    place = np.minimum(np.searchsorted(code_points, points), code_points.size - 1)
    listed = code_points[place] == points
    code = np.r_[0, order + 1][place].astype(np.uint16)
    gap = ((points[:, :-1] == 0) & (points[:, 1:] != 0)).any(axis=1)  # a zero inside a word
    fits = listed.all(axis=1) & (points[:, 0] != 0) & ~gap
    code[~fits] = 0
    return code, fits


def words_of(codes: Codes, alphabet: str) -> pa.Array:
    """The words of these rows of codes. Bytes that are not UTF-8 become U+FFFD."""
    import pyarrow as pa

    return pa.array(texts_of(codes, alphabet), type=pa.string())


def texts_of(codes: Codes, alphabet: str) -> list[str]:
    """The same as `words_of`, in a list."""
    characters = np.array(["", *alphabet])
    words = ["".join(row) for row in characters[codes].tolist()]
    if alphabet == BYTES:
        return [word.encode("latin-1").decode("utf-8", "replace") for word in words]
    return words


def extend(rows: Codes, more: int, symbols: int) -> Codes:
    """Every row with every ending of `more` codes, padding at the end only; in the rows' order.

    A complete word only gets padding, and the empty word is left out.

    >>> extend(np.array([[2, 1], [1, 0]], dtype=np.uint16), 1, 3).tolist()
    [[2, 1, 0], [2, 1, 1], [2, 1, 2], [1, 0, 0]]
    """
    for _ in range(more):
        live = rows[:, -1] != 0 if rows.shape[1] else np.ones(rows.shape[0], dtype=np.bool_)
        sizes = np.where(live, symbols, 1)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        code = (np.arange(starts.size) - starts).astype(np.uint16)
        rows = np.column_stack([np.repeat(rows, sizes, axis=0), code])
        rows = rows[rows[:, 0] != 0] if rows.shape[1] == 1 else rows
    return rows


def endings(more: int, symbols: int) -> int:
    """The number of endings of `more` codes for a word that is not complete.

    >>> endings(2, 3)  # none, a, b, aa, ab, ba, bb
    7
    """
    return sum((symbols - 1) ** letters for letters in range(more + 1))


def _cut(word: str, length: int) -> bytes:
    """The first characters of a word, of at most `length` bytes of UTF-8."""
    return word.encode()[:length].decode("utf-8", "ignore").encode()


def starts_text(codes: Codes, *, whole: bool = False) -> Bool:
    """Which rows of bytes are the start of a text in UTF-8, or a whole text.

    >>> rows = np.array([[97, 195], [97, 169], [195, 169]], dtype=np.uint16)
    >>> starts_text(rows).tolist(), starts_text(rows, whole=True).tolist()
    ([True, False, True], [False, False, True])
    """
    due = np.zeros(codes.shape[0], dtype=np.int64)  # bytes that a character still needs
    fits = np.ones(codes.shape[0], dtype=np.bool_)
    for byte in codes.T:
        follows = (byte >= 0x80) & (byte < 0xC0)
        fits &= np.where(due > 0, follows, (byte < 0x80) | ((byte >= 0xC2) & (byte < 0xF5)))
        more = (byte >= 0xC2).astype(np.int64) + (byte >= 0xE0) + (byte >= 0xF0)
        due = np.where(due > 0, due - 1, more)
    return fits & (due == 0) if whole else fits


def check_alphabet(length: int, alphabet: str) -> None:
    require(1 <= length <= 64, f"length must be 1 to 64 characters; got {length}")
    require(
        len(set(alphabet)) == len(alphabet) >= 1,
        "alphabet must have each character once",
    )
    require("\0" not in alphabet, "alphabet must not contain the zero character, which is padding")


@spec("prefix")
class Prefix:
    """The first `size` characters of words of at most `length` characters; longer words are cut.

    >>> prefix = Prefix(alphabet="ab", length=3, size=2)
    >>> prefix.values(OneHot(categories=9), np.array([[2, 1, 1]], dtype=np.uint16))
    array([7])
    """

    alphabet: str
    length: int  # of the words
    size: int

    def check(self) -> None:
        check_alphabet(self.length, self.alphabet)
        require.within(1, self.length, size=self.size)

    @property
    def radix(self) -> int:
        return len(self.alphabet) + 1

    def values(self, sketch: OneHot | CountSketch, codes: Codes) -> I64:
        """The values that a sketch encodes for words, given as rows of codes (n, length)."""
        prefix = codes[:, : self.size]
        if isinstance(sketch, OneHot):
            places = self.radix ** np.arange(prefix.shape[1], dtype=np.int64)[::-1]
            return np.asarray(prefix.astype(np.int64) @ places)
        wide = np.ascontiguousarray(prefix.astype("<u2")).view(np.uint8)
        points = hashing.fingerprint_rows(
            wide.reshape(prefix.shape[0], 2 * prefix.shape[1]), sketch.seed
        )
        return points.astype(np.int64)  # below 2**61

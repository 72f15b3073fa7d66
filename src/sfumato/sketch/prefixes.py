"""The beginnings of words, as sketches count them: what devices send to a search by prefixes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sfumato import hashing
from sfumato.sketch import CountSketch, OneHot
from sfumato.sketch.words import Codes, check_alphabet
from sfumato.spec import require, spec

I64 = npt.NDArray[np.int64]


@spec("prefix")
class Prefix:
    """The first `size` characters of words of at most `length` of an alphabet; longer are cut.

    >>> prefix = Prefix(alphabet="ab", length=3, size=2)
    >>> prefix.values(OneHot(categories=9), np.array([[2, 1, 1]], dtype=np.uint16))
    array([7])
    """

    alphabet: str
    length: int  # of the words
    size: int

    def check(self) -> None:
        check_alphabet(self.length, self.alphabet)
        require(1 <= self.size <= self.length, f"size must be 1 to {self.length}; got {self.size}")

    @property
    def radix(self) -> int:
        return len(self.alphabet) + 1

    def values(self, sketch: OneHot | CountSketch, codes: Codes) -> I64:
        """What a sketch encodes of words, which are rows of codes (n, length)."""
        prefix = codes[:, : self.size]
        if isinstance(sketch, OneHot):
            places = self.radix ** np.arange(prefix.shape[1], dtype=np.int64)[::-1]
            return np.asarray(prefix.astype(np.int64) @ places)
        wide = np.ascontiguousarray(prefix.astype("<u2")).view(np.uint8)
        points = hashing.fingerprint_rows(
            wide.reshape(prefix.shape[0], 2 * prefix.shape[1]), sketch.seed
        )
        return points.astype(np.int64)  # below 2**61

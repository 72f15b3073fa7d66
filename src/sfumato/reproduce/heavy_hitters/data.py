"""The devices of paper 001's experiments: one word each, drawn from what real users wrote.

The paper takes the first three characters of StackOverflow's tokens over 46 symbols, so there are
46³ = 97,336 strings and a count sketch can be queried for all of them. Here one symbol pads short
words. Its tokens are replaced by the words of Stack Exchange comments and of commit messages. The
same words in full are an open domain, for which no count sketch can be queried. A Zipf-Mandelbrot
law over the same number of keys replaces missing files, and `data` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.arrays import F64, I64, U64
from sfumato.reproduce.files import find_file, read_arrays
from sfumato.sketch import IntegerKeys, Keys, TextKeys, WordKeys

DEVICES = 10_000  # per round, on average
SPREAD = 0.1  # standard deviation of a round's devices, as a share of them
CHARACTERS = 3
ALPHABET = "#'+-0123456789abcdefghijklmnopqrstuvwxyz_$%&@"  # and one symbol that pads
CATEGORIES = (len(ALPHABET) + 1) ** CHARACTERS
LONGEST = 15  # bytes of a whole word; longer ones are left out
WORD_BITS = 16  # bits of a word, the unit of budgets

CELLS_PER_KEY = 1.3  # of the paper's table
_PAPER_FIELDS = 4  # words of a cell of the paper beside the key: check (2), value, insertions
_PAPER_KEY = 2  # words of the paper's key, at least: its field has 31 bits
_SHORT_CELL, _LONG_CELL = 3, 11  # words of our cells: count, key and check in 48 and 176 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The items of devices, their frequencies, and the size of their cells."""

    name: str  # for titles
    data: str  # a full description
    items: pa.Array
    shares: F64
    keys: Keys
    numbers: U64  # the items' keys
    cell_words: int  # words of our cells
    categories: int = 0  # number of possible items; 0 for an open domain

    @property
    def paper_cell_words(self) -> int:
        """Words of the paper's cells: 6 for three characters."""
        return max(_PAPER_KEY, -(-self.keys.bits // WORD_BITS)) + _PAPER_FIELDS

    @property
    def paper_key_words(self) -> int:
        """Words that the paper charges for a key in a table: 8 for three characters."""
        return math.ceil(CELLS_PER_KEY * self.paper_cell_words)

    @property
    def distinct(self) -> float:
        """The mean number of different items that the devices of a round hold."""
        return float(-np.expm1(DEVICES * np.log1p(-self.shares)).sum())

    def rounds(self, rounds: int, seed: int) -> I64:
        """The number of each round's devices that hold each item, (rounds, items)."""
        rng = np.random.default_rng([seed, rounds])
        below = np.cumsum(self.shares)
        counts = []
        for size in np.rint(rng.normal(DEVICES, SPREAD * DEVICES, size=rounds)):
            items = np.searchsorted(below, rng.random(max(1, int(size))), side="right")
            counts.append(np.bincount(np.minimum(items, below.size - 1), minlength=below.size))
        return np.stack(counts)


FILES = {
    "Stack Exchange": "stackexchange_user_words.parquet",
    "commit messages": "commit_user_words.parquet",
}
LAWS = ((2, 1.1), (5, 1.3))  # shifts and exponents of the laws that replace them


def short_words() -> list[Words]:
    """Words cut to three characters, or laws over the same number of strings."""
    return [
        _words_of(source, cut=True) or law(*instead)
        for source, instead in zip(FILES, LAWS, strict=True)
    ]


def whole_words() -> list[Words]:
    """Whole words, where there are files."""
    return [words for source in FILES if (words := _words_of(source, cut=False)) is not None]


def law(shift: int, exponent: float) -> Words:
    """Keys whose shares are proportional to (rank + shift)^-exponent."""
    weight = (np.arange(1, CATEGORIES + 1) + float(shift)) ** -exponent
    order = np.random.default_rng(0).permutation(CATEGORIES)  # so that keys do not reveal ranks
    name = f"law (i+{shift})^-{exponent:g}"
    return Words(
        name=name,
        data=f"{name} over {CATEGORIES:,} keys, in place of words",
        items=pa.array(order.astype(np.uint64)),
        shares=weight / weight.sum(),
        keys=IntegerKeys(bits=(CATEGORIES - 1).bit_length()),
        numbers=order.astype(np.uint64)[:, None],
        cell_words=_SHORT_CELL,
        categories=CATEGORIES,
    )


def _words_of(source: str, *, cut: bool) -> Words | None:
    """The words of a file that have a key, each once; None without the file."""
    path = find_file(FILES[source])
    if path is None:
        return None
    words, counts = read_arrays(path, word=pa.string(), count=pa.int64())
    keys: Keys = TextKeys(length=LONGEST)
    if cut:
        words = pc.utf8_slice_codeunits(words, 0, CHARACTERS)
        keys = WordKeys(alphabet=ALPHABET, length=CHARACTERS)
    table = pa.table({"word": words, "count": counts}).group_by("word", use_threads=False)
    totals = table.aggregate([("count", "sum")])
    items = totals.column("word").combine_chunks()
    numbers, fits = keys.numbers(items)
    uses = np.asarray(totals.column("count_sum").combine_chunks())[fits]
    kind = f"first {CHARACTERS} characters" if cut else "whole words"
    which = kind if cut else f"of at most {LONGEST} bytes"
    return Words(
        name=f"{source}, {kind}",
        data=f"words of {source}, {which} ({path.name})",
        items=items.filter(pa.array(fits)),
        shares=uses / uses.sum(),
        keys=keys,
        numbers=numbers[fits],
        cell_words=_SHORT_CELL if cut else _LONG_CELL,
        categories=CATEGORIES if cut else 0,
    )

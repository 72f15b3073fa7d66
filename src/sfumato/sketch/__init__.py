"""Linear maps: encode values into a table, estimate from a sum of tables.

A sketch holds no data. Tables are plain integer arrays, merging is `+`, and tables of one spec add
up: encode(a) + encode(b) == encode(a + b).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

from sfumato.arrays import F64, Bool
from sfumato.sketch.count import CountSketch
from sfumato.sketch.invertible import InvertibleSketch, Listing
from sfumato.sketch.keys import IntegerKeys, Keys, TextKeys, WordKeys
from sfumato.sketch.norms import Norms
from sfumato.sketch.onehot import OneHot
from sfumato.sketch.refined import refine
from sfumato.sketch.rounds import DecodedRounds, Running
from sfumato.sketch.sampled import SampledTables
from sfumato.sketch.sparse import ItemCounts, SparseSketch, SparseTable
from sfumato.sketch.vector import NormBins, RoundSketch, VectorSketch
from sfumato.sketch.words import Prefix

__all__ = [
    "CountSketch",
    "DecodedRounds",
    "IntegerKeys",
    "InvertibleSketch",
    "ItemCounts",
    "ItemKeys",
    "Keys",
    "Listing",
    "NormBins",
    "Norms",
    "OneHot",
    "Prefix",
    "RoundSketch",
    "Running",
    "SampledTables",
    "Sketch",
    "SparseSketch",
    "SparseTable",
    "TextKeys",
    "VectorSketch",
    "WordKeys",
    "refine",
]

ItemKeys: TypeAlias = TextKeys | WordKeys | Prefix | NormBins
"""The part of an item, or of a vector, that a table counts, if its sketch does not say."""


@runtime_checkable
class Sketch(Protocol):
    """A linear map from values to tables; see `CountSketch` and `OneHot`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def word_bits(self) -> int | None:
        """The bits of the ring that its words belong to; None if they are plain counts."""
        ...

    def encode(self, values: Any, weights: Any = None) -> Any:
        """The table of these values: an array, or for an open domain a SparseTable."""
        ...

    def estimate(self, table: Any, values: Any) -> F64: ...

    def sensitivity(self, values: int) -> Norms: ...

    def possible(self, tables: Any, values: int) -> Bool:
        """Which of these tables, (n, *shape), a device with at most `values` values can make."""
        ...

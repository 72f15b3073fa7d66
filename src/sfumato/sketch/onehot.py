"""A known domain, one cell per category: exact, and the smallest table for a small domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64, U64, Bool, Whole
from sfumato.errors import DataError, SpecError
from sfumato.sketch.norms import Norms, check_weights
from sfumato.spec import require, spec

if TYPE_CHECKING:
    from sfumato.sketch.sparse import SparseTable


@spec("one_hot")
class OneHot:
    """Count the categories 0 .. categories - 1 of a known domain, each in its own cell.

    Error: none but the noise that is added to the table.
    Sensitivity: one value moves one cell by one. `values` of them move the table by at most
        L1 = values and, when they are all one category, L2 = values.

    >>> OneHot(categories=3).encode([0, 2, 2])
    array([1, 0, 2])
    """

    word_bits: ClassVar[None] = None

    categories: int

    def check(self) -> None:
        require.at_least(1, categories=self.categories)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.categories,)

    def encode(self, values: Whole | Sequence[int], weights: I64 | None = None) -> I64:
        """The table of these categories, each counted `weights` times (once if not given)."""
        category = self._checked(values)
        check_weights(weights, category.size)
        table = np.zeros(self.categories, dtype=np.int64)
        np.add.at(table, category, 1 if weights is None else weights)
        return table

    def estimate(self, table: npt.NDArray[np.number], values: Whole | Sequence[int]) -> F64:
        category = self._checked(values)
        return np.asarray(table, dtype=np.float64)[category]

    def sensitivity(self, values: int) -> Norms:
        return Norms(l1=values, l2=values, unit_cells=1 if values == 1 else 0)

    def possible(self, tables: I64, values: int) -> Bool:
        counts = np.clip(tables, -1, values + 1)  # so that no sum wraps
        return np.asarray((counts >= 0).all(axis=1) & (counts.sum(axis=1) <= values))

    @property
    def entry_bits(self) -> int:
        return self.categories.bit_length()

    def numbers(self, values: Whole | Sequence[int]) -> U64:
        """The number of a category is one more than the category."""
        return (self._checked(values) + 1).astype(np.uint64)[:, None]

    def possible_entries(self, numbers: U64) -> Bool:
        entries = numbers[..., 0]
        ascends = (entries[:, :-1] <= entries[:, 1:]).all(axis=1)
        return np.asarray(ascends & (entries <= self.categories).all(axis=1))

    def from_sparse(self, table: SparseTable) -> I64:
        if (table.numbers > self.categories).any():
            raise DataError(
                f"a stored sum must have numbers up to {self.categories}; it has larger ones: "
                "restore the store from a backup"
            )
        dense = np.zeros(self.categories, dtype=np.int64)
        dense[table.numbers[:, 0].astype(np.int64) - 1] = table.counts
        return dense

    def _checked(self, values: Whole | Sequence[int]) -> I64:
        category = np.asarray(values)
        if category.size and category.dtype.kind not in "iu":  # never name the value
            raise SpecError("categories must be whole numbers")
        category = category.astype(np.int64)
        if category.size and not 0 <= category.min() <= category.max() < self.categories:
            raise SpecError(f"a category must be 0 to {self.categories - 1}")
        return category

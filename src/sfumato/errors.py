"""What can go wrong, as one tree.

    SfumatoError
    ├── SpecError          a size, a rate or a field that cannot be
    │   ├── TaskError      parts that do not fit together
    │   └── StudyError     a study that says something it may not
    ├── ImpossibleError    a study that cannot be met; says what would make it possible
    ├── DataError          a file or a column that cannot be read as asked
    ├── MismatchError      tables or batches of different tasks that would have been added
    └── BudgetError        a charge that the ledger refuses

A message says what must hold, what was given and what to do: lower case, no full stop, values in
place. A bad *report* is not an error but a `Rejection` (see `batch`).
"""

from __future__ import annotations


class SfumatoError(Exception):
    """Everything sfumato raises on purpose. `hint` says what to do when the message does not."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class SpecError(SfumatoError):
    """A spec was built from values that cannot be."""


class TaskError(SpecError):
    """Sketch, mechanism and aggregation do not fit together."""


class StudyError(SpecError):
    """A study has an unknown key, a missing key or a value out of range."""


class ImpossibleError(SfumatoError):
    """A study cannot be met; the message says what would make it possible."""


class DataError(SfumatoError):
    """A data file cannot be read as asked."""


class MismatchError(SfumatoError):
    """Tables of different tasks do not add."""


class BudgetError(SfumatoError):
    """The ledger refuses a charge."""

"""What can go wrong, as one tree.

    SfumatoError
    ├── SpecError          a size, a rate or a field with an impossible value
    │   ├── TaskError      parts that do not fit together
    │   └── StudyError     a study with an unknown key or a value out of range
    ├── ImpossibleError    a study that cannot be met; says what would make it possible
    ├── DataError          a file or a column that cannot be read as asked
    ├── MismatchError      tables or batches of different tasks that would have been added
    ├── OfferError         an offer that devices refuse: not signed, or not readable
    ├── ServiceError       a collector that refuses, or cannot be reached
    │   └── NotReadyError  the answer is not there yet: ask again later
    ├── BudgetError        a charge that the ledger refuses
    └── StoreError         a collector's store that refuses or fails
        ├── StoreDamaged       what is read is not what was stored
        ├── StoreFull          no space is left
        ├── StoreReadOnly      it can be read, not written
        └── StoreUnavailable   it cannot be reached now; the same call may work later

A message says what must hold, what was given and what to do: lower case, no full stop, values in
place. A bad *report* is not an error but a `Rejection` (see `flow.admission`).
"""

from __future__ import annotations

import inspect
import warnings


class SfumatoError(Exception):
    """Everything sfumato raises on purpose. `hint` says what to do when the message does not."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class SimulationWarning(UserWarning):
    """A fact about the devices that only a simulation can know, and no release may state."""

    @classmethod
    def warn(cls, message: str) -> None:
        """Warn at the line outside the package that called it."""
        package, level, frame = __name__.partition(".")[0], 1, inspect.currentframe()
        while (
            frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package
        ):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, cls, stacklevel=level)


class SpecError(SfumatoError):
    """A spec was built from impossible values."""


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


class OfferError(SfumatoError):
    """An offer is not signed by the collector's key, or cannot be read."""


class BudgetError(SfumatoError):
    """The ledger refuses a charge."""


class ServiceError(SfumatoError):
    """A collector refuses what it was asked over the network, or cannot be reached."""


class NotReadyError(ServiceError):
    """The answer is not there yet."""


class StoreError(SfumatoError):
    """The store of a collector refuses or fails. Nothing was written."""


class StoreDamaged(StoreError):  # noqa: N818 -- named for what the store is
    """Something in the store is not what was stored: its digest differs."""


class StoreFull(StoreError):  # noqa: N818 -- named for what the store is
    """The store has no space left."""


class StoreReadOnly(StoreError):  # noqa: N818 -- named for what the store is
    """The store can be read, not written."""


class StoreUnavailable(StoreError):  # noqa: N818 -- named for what the store is
    """The store cannot be reached or is locked; the same call may work later."""

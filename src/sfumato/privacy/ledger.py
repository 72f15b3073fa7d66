"""The ledger: append-only charges against a budget. It refuses before anything is spent.

One SQLite file, fsynced on every charge, so a charge that returned survives a crash, and a crash
before that left nothing spent. Charges are made in one exclusive transaction each: two processes
cannot both spend the last of a budget. Triggers refuse to change or delete an entry.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import BudgetError
from sfumato.privacy.accounting import Loss, epsilon_of
from sfumato.spec import from_json, require, spec, to_json

_SCHEMA = [
    "CREATE TABLE budget (only INTEGER PRIMARY KEY CHECK (only = 1), spec TEXT NOT NULL)",
    "CREATE TABLE entry (number INTEGER PRIMARY KEY, cohort TEXT NOT NULL, task TEXT NOT NULL,"
    " loss TEXT NOT NULL)",
    *(
        f"CREATE TRIGGER no_{verb}_of_{table} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END"
        for table in ("budget", "entry")
        for verb in ("UPDATE", "DELETE")
    ),
]


@spec("budget")
class Budget:
    """What may be spent of one device's privacy, over everything that is ever asked of it.

    `epsilon` is None for no limit: losses are recorded, infinite ones too, and none is refused.
    """

    epsilon: float | None
    delta: float

    def check(self) -> None:
        require(
            self.epsilon is None or self.epsilon > 0, f"epsilon must be above 0; got {self.epsilon}"
        )
        require(0 <= self.delta < 1, f"delta must be at least 0, below 1; got {self.delta}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One charge: which devices (a cohort), for which task, what it cost."""

    cohort: str
    task: str
    loss: Loss


class Ledger:
    """Charges against one budget, in a file or in memory.

    Composition: charges to one cohort compose; cohorts are disjoint sets of devices (a campaign
    asks a device at most once), so what is spent is the most that any cohort has spent. The cohort
    "*" is everybody: its charges compose with those of every cohort.

    >>> from sfumato.privacy import AdditiveLoss
    >>> ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    >>> loss = AdditiveLoss(noise="skellam", scale=9.4467, l1=5, l2=5**0.5, unit_cells=5)
    >>> ledger.charge(cohort="round 1", task="t1", loss=loss)
    >>> ledger.charge(cohort="round 2", task="t2", loss=loss)   # other devices: not added
    >>> round(ledger.spent(), 3)
    0.995
    >>> ledger.charge(cohort="round 1", task="t3", loss=loss)
    Traceback (most recent call last):
        ...
    sfumato.errors.BudgetError: this budget allows epsilon 1 at delta 1e-06 ...
    """

    def __init__(self, budget: Budget | None = None, path: Path | str | None = None) -> None:
        """Open the ledger at `path`, or make one; `budget` is needed to make one."""
        exists = path is not None and Path(path).exists()
        self._connection = sqlite3.connect(
            ":memory:" if path is None else path, isolation_level=None, timeout=30
        )
        try:
            self._connection.execute("PRAGMA synchronous = FULL")
            if not exists:
                if budget is None:
                    raise BudgetError(f"there is no ledger at {path}; give a budget to make one")
                self._create(budget)
            self.budget = self._read_budget()
        except sqlite3.DatabaseError as problem:
            raise BudgetError(f"{path} cannot be read as a ledger: {problem}") from problem
        if budget is not None and budget != self.budget:
            raise BudgetError(
                f"the ledger at {path} was made for {_words(self.budget)}; got {_words(budget)}",
                hint="a budget is never changed; use another file for another budget",
            )

    def charge(self, *, cohort: str, task: str, loss: Loss) -> None:
        """Record a loss, or raise BudgetError and record nothing. Return means it is on disk."""
        with self._transaction():
            entries = [*self.entries(), Entry(cohort, task, loss)]
            after = _spent(entries, self.budget.delta)
            if self.budget.epsilon is not None and after > self.budget.epsilon * (1 + 1e-9):
                before = _spent(entries[:-1], self.budget.delta)
                raise BudgetError(
                    f"this budget allows {_words(self.budget)} and has spent {before:.4g}, "
                    f"so a release that would bring it to {after:.4g} is refused",
                    hint="ask other devices, add more noise, or open a ledger with a larger budget",
                )
            self._connection.execute(
                "INSERT INTO entry (cohort, task, loss) VALUES (?, ?, ?)",
                (cohort, task, to_json(loss)),
            )

    def entries(self) -> list[Entry]:
        rows = self._connection.execute("SELECT cohort, task, loss FROM entry ORDER BY number")
        return [Entry(cohort, task, from_json(loss)) for cohort, task, loss in rows]

    def spent(self) -> float:
        """The epsilon spent so far by the device that was asked most, at the budget's delta."""
        return _spent(self.entries(), self.budget.delta)

    def close(self) -> None:
        self._connection.close()

    def __repr__(self) -> str:
        return f"Ledger({_words(self.budget)}, spent={self.spent():.4g})"

    def _create(self, budget: Budget) -> None:
        with self._transaction():
            for statement in _SCHEMA:
                self._connection.execute(statement)
            self._connection.execute("INSERT INTO budget VALUES (1, ?)", (to_json(budget),))

    def _read_budget(self) -> Budget:
        row = self._connection.execute("SELECT spec FROM budget").fetchone()
        if row is None:
            raise BudgetError("this ledger has no budget; it was not made completely")
        budget = from_json(row[0])
        assert isinstance(budget, Budget)  # the table holds nothing else
        return budget

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN EXCLUSIVE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _spent(entries: Sequence[Entry], delta: float) -> float:
    everybody = [entry.loss for entry in entries if entry.cohort == "*"]
    cohorts: dict[str, list[Loss]] = {}
    for entry in entries:
        if entry.cohort != "*":
            cohorts.setdefault(entry.cohort, []).append(entry.loss)
    if not cohorts:
        return epsilon_of(everybody, delta)
    distinct = {tuple(losses) for losses in cohorts.values()}  # alike rounds cost alike
    return max(epsilon_of([*everybody, *losses], delta) for losses in distinct)


def _words(budget: Budget) -> str:
    if budget.epsilon is None:
        return "any epsilon"
    return f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"

"""The ledger: append-only charges against a budget. It refuses before anything is spent.

One SQLite file, fsynced on every charge, so a charge that returned survives a crash, and a crash
before that left nothing spent. Charges are made in one exclusive transaction each: two processes
cannot both spend the last of a budget. Triggers refuse to change or delete an entry.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from sfumato.errors import BudgetError, SpecError
from sfumato.privacy.accounting import (
    LISTS_SHARE,
    Charge,
    Loss,
    PlannedLoss,
    delta_of_lists,
    epsilon_of,
    epsilon_text,
    filter_epsilon,
    loss_of_task,
)
from sfumato.spec import from_json, require, spec, to_json

_SCHEMA = [
    "CREATE TABLE budget (number INTEGER PRIMARY KEY CHECK (number = 1), spec TEXT NOT NULL)",
    "CREATE TABLE entry (number INTEGER PRIMARY KEY, campaign TEXT NOT NULL, cohort TEXT NOT NULL,"
    " task TEXT NOT NULL, loss TEXT NOT NULL)",
    *(
        f"CREATE TRIGGER no_{verb}_of_{table} BEFORE {verb} ON {table}"
        " BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END"
        for table in ("budget", "entry")
        for verb in ("UPDATE", "DELETE")
    ),
    # INSERT OR REPLACE would delete without a DELETE trigger.
    "CREATE TRIGGER no_second_budget BEFORE INSERT ON budget"
    " WHEN EXISTS (SELECT 1 FROM budget WHERE number = NEW.number)"
    " BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END",
    "CREATE TRIGGER no_second_entry BEFORE INSERT ON entry"
    " WHEN EXISTS (SELECT 1 FROM entry WHERE number = NEW.number)"
    " BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END",
]


@spec("budget")
class Budget:
    """The total privacy loss allowed to one device, over all tasks.

    `epsilon` is None for no limit: losses are recorded, infinite ones too, and none is refused.
    Nothing is promised then.
    """

    epsilon: float | None
    delta: float

    def check(self) -> None:
        require(
            self.epsilon is None or 0 < self.epsilon < math.inf,
            f"epsilon must be above 0 and finite (None for no limit); got {self.epsilon}",
        )
        require(0 <= self.delta < 1, f"delta must be at least 0, below 1; got {self.delta}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One charge: the devices (a cohort of a campaign), the task and its loss."""

    campaign: str
    cohort: str
    task: str
    loss: Charge


class Account(Protocol):
    """Where charges are recorded: a `Ledger`, or the ledger of a service's store."""

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Record a loss, or raise BudgetError and record nothing."""
        ...


class Ledger:
    """Charges against one budget, in a file or in memory.

    The cohorts of one campaign are disjoint, so a device has paid for one of them. Nothing is known
    about the devices of different campaigns, so a device is assumed to have been in the costliest
    cohort of each.

    Claim: whatever is charged, and even if the next study, its noise and its time depend on earlier
        releases, all releases together are (epsilon, delta)-DP for each device.
    Proof: docs/proofs/ledger.md. A device's first charge, which may be a whole plan
        (`PlannedLoss`), is priced exactly; several are counted by a Rényi filter.

    >>> from sfumato.privacy import AdditiveLoss
    >>> ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    >>> loss = AdditiveLoss(noise="skellam", scale=9.4467, l1=5, l2=5**0.5, unit_cells=5)
    >>> ledger.charge(campaign="words", cohort="round 1", task="t1", loss=loss)
    >>> ledger.charge(campaign="words", cohort="round 2", task="t2", loss=loss)  # other devices
    >>> round(ledger.spent(), 3)
    0.995
    >>> ledger.charge(campaign="emoji", cohort="round 1", task="t3", loss=loss)  # maybe the same
    Traceback (most recent call last):
        ...
    sfumato.errors.BudgetError: this budget allows epsilon 1 at delta 1e-06 ...
    """

    def __init__(self, budget: Budget | None = None, path: Path | str | None = None) -> None:
        """Open the ledger at `path`, or create one, for which `budget` is needed."""
        self._path = ":memory:" if path is None else str(path)
        exists = path is not None and Path(path).exists()
        if not exists and budget is None:
            raise BudgetError(f"there is no ledger at {path}; give a budget to create one")
        with self._as_budget_errors():
            self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=30)
            # EXTRA syncs the folder as well, so that a power cut cannot bring the journal back.
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self.budget = self._read_budget(budget)
        if budget is not None and budget != self.budget:
            raise BudgetError(
                f"the ledger at {path} was made for {words(self.budget)}; got {words(budget)}",
                hint="a budget is never changed; use another file for another budget",
            )

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Record a loss durably, or raise BudgetError and record nothing."""
        with self._as_budget_errors(), self._transaction():
            afford(Entry(campaign, cohort, task, loss), self.entries(), self.budget)
            self._connection.execute(
                "INSERT INTO entry (campaign, cohort, task, loss) VALUES (?, ?, ?, ?)",
                (campaign, cohort, task, to_json(loss)),
            )

    def entries(self) -> list[Entry]:
        rows = self._connection.execute(
            "SELECT campaign, cohort, task, loss FROM entry ORDER BY number"
        )
        return [
            Entry(campaign, cohort, task, self._parsed(loss))
            for campaign, cohort, task, loss in rows
        ]

    def spent(self) -> float:
        """The epsilon spent by the device with the largest loss."""
        return spent(self.entries(), self.budget)

    def close(self) -> None:
        self._connection.close()

    def __repr__(self) -> str:
        return f"Ledger({words(self.budget)}, spent={epsilon_text(self.spent())})"

    def _read_budget(self, initial: Budget | None) -> Budget:
        """The budget in the file; an empty file gets the tables and the `initial` one."""
        with self._transaction():
            table = self._connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            if table is None and initial is not None:
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute("INSERT INTO budget VALUES (1, ?)", (to_json(initial),))
            row = self._connection.execute("SELECT spec FROM budget").fetchone()
        budget = self._parsed(row[0] if row else "")
        if not isinstance(budget, Budget):
            raise BudgetError(f"the ledger {self._path} has no budget")
        return budget

    def _parsed(self, text: str) -> Any:
        try:
            return _read(text)
        except SpecError as problem:
            raise BudgetError(f"the ledger {self._path} cannot be read: {problem}") from problem

    @contextmanager
    def _as_budget_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as problem:
            raise BudgetError(f"the ledger {self._path} cannot be used: {problem}") from problem

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN EXCLUSIVE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def afford(
    entry: Entry,
    entries: Sequence[Entry],
    budget: Budget,
    *,
    spent_by: Callable[[Sequence[Entry], Budget], float] | None = None,
) -> None:
    """Raise BudgetError if adding this entry to `entries` exceeds the budget.

    `spent_by` is `spent` or a cached version of it.
    """
    if budget.epsilon is None:
        return
    composed = spent_by or spent
    every = [*entries, entry]
    after = composed(every, budget)
    if after <= budget.epsilon * (1 + 1e-9):
        return
    before = composed(entries, budget)
    lists, share = delta_of_lists(_cohorts(every)), LISTS_SHARE * budget.delta
    least = _least_limit(every, budget, after, composed)
    promised = f"needs a budget of epsilon {epsilon_text(least)}"
    hint = "ask other devices, add more noise, or open a ledger with a larger budget"
    if not math.isfinite(after):
        promised = f"promises nothing at a delta of {budget.delta:g}"
        if 0 < share < lists < math.inf:
            promised = f"would bring the delta of lists to {lists:.4g}"
            hint = f"besides other studies, lists may take {share:g} of this budget's delta in all"
    raise BudgetError(
        f"this budget allows {words(budget)} and has spent {epsilon_text(before)}, "
        f"so a release that {promised} is refused",
        hint=hint,
    )


def _least_limit(
    entries: Sequence[Entry],
    budget: Budget,
    counted: float,
    composed: Callable[[Sequence[Entry], Budget], float],
) -> float:
    """The least epsilon (to a millionth, rounded up) of a budget that allows all of these
    entries, which this budget counts as more than it has.

    A filter's order is the best for its own limit, so what it counts beyond that is too much.
    """
    if not math.isfinite(counted):
        return counted
    assert budget.epsilon is not None  # nothing is refused without a limit
    low = high = budget.epsilon
    while composed(entries, replace(budget, epsilon=high)) > high:
        low, high = high, 1.5 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        is_enough = composed(entries, replace(budget, epsilon=middle)) <= middle
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def spent(entries: Sequence[Entry], budget: Budget) -> float:
    """The part of a budget's epsilon that is spent, counted as `Ledger` describes.

    A budget without a limit has no filter: its charges are composed as a list fixed in advance.
    """
    campaigns = _charges(entries)
    if len(campaigns) == 1:
        return max(
            _priced(charges[0], budget.delta)
            if len(charges) == 1
            else filter_epsilon([[list(chain(*charges))]], budget.delta, budget.epsilon)
            for charges in set(map(tuple, campaigns[0]))
        )
    return filter_epsilon(_cohorts(entries), budget.delta, budget.epsilon)


_priced = lru_cache(maxsize=256)(epsilon_of)
_read = lru_cache(maxsize=1024)(from_json)  # the rounds of a training have equal losses


def _charges(entries: Sequence[Entry]) -> list[list[list[tuple[Loss, ...]]]]:
    """Campaigns, their cohorts, and the charges of each cohort: one loss, or a whole plan.

    A plan bounds the loss of one device by all its tasks, whatever their campaigns and cohorts are,
    so it is a campaign of its own with one cohort. A task that it does not cover (a repeated one)
    is charged separately.
    """
    campaigns: dict[object, dict[str, list[tuple[Loss, ...]]]] = {}
    plans: dict[object, _Plan] = {}
    for entry in entries:
        charge = entry.loss
        if isinstance(charge, PlannedLoss):
            name = (charge.plan, charge.losses, charge.times)
            if name not in plans:
                plans[name] = _Plan(charge.all_losses)
                campaigns[name] = {"": [charge.all_losses]}
            if plans[name].covers(entry.campaign, entry.cohort, charge.loss):
                continue
        losses = (loss_of_task(charge),)
        campaigns.setdefault(entry.campaign, {}).setdefault(entry.cohort, []).append(losses)
    return [list(cohorts.values()) for cohorts in campaigns.values()]


class _Plan:
    """The remaining losses of a plan, for the device with the most of them so far."""

    def __init__(self, losses: tuple[Loss, ...]) -> None:
        self._left = Counter(losses)
        self._counts: Counter[tuple[str, str, Loss]] = Counter()  # in a cohort of a campaign
        self._most: Counter[tuple[str, Loss]] = Counter()  # in any cohort of a campaign

    def covers(self, campaign: str, cohort: str, loss: Loss) -> bool:
        """Count one more loss, unless a device might then have more than were planned."""
        if self._counts[campaign, cohort, loss] == self._most[campaign, loss]:
            if not self._left[loss]:
                return False
            self._left[loss] -= 1
            self._most[campaign, loss] += 1
        self._counts[campaign, cohort, loss] += 1
        return True


def _cohorts(entries: Sequence[Entry]) -> list[list[list[Loss]]]:
    return [[list(chain(*charges)) for charges in cohorts] for cohorts in _charges(entries)]


def words(budget: Budget) -> str:
    """A budget in words, as in an error."""
    if budget.epsilon is None:
        return f"any epsilon at delta {budget.delta:g}"
    return f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"

"""The ledger of a service: charges in its store, written with what they pay for or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sfumato.collector.store.store import Store, Transaction
from sfumato.errors import BudgetError
from sfumato.privacy import Budget, Charge, Entry, Loss
from sfumato.privacy.accounting import epsilon_of, loss_of_task
from sfumato.privacy.ledger import afford, spent
from sfumato.spec import from_json, to_json

NO_LIMIT = Budget(epsilon=None, delta=1e-6)  # of a store for which nobody has set another


class StoreLedger:
    """Charges against the one budget of a store, within a transaction: see `privacy.Ledger`.

    What is charged is kept if the transaction is, so a charge and what it pays for are one. Of two
    transactions that charge, the second waits for the first and counts what that has spent.
    """

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    @property
    def budget(self) -> Budget:
        text = self._tx.budget()
        budget = NO_LIMIT if text is None else from_json(text)
        if not isinstance(budget, Budget):
            raise BudgetError("the store's budget cannot be read")
        return budget

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Record a loss, or raise BudgetError and record nothing."""
        self._tx.hold_budget()
        self.check(campaign=campaign, cohort=cohort, task=task, loss=loss)
        self._tx.add_entry(campaign, cohort, task, to_json(loss))

    def check(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Raise BudgetError if this charge would be refused now."""
        afford(Entry(campaign, cohort, task, loss), self.entries(), self.budget, spent_by=spent_by)

    def entries(self) -> list[Entry]:
        return [
            Entry(campaign, cohort, task, from_json(loss))
            for campaign, cohort, task, loss in self._tx.entries()
        ]

    def spent(self) -> float:
        """What is spent of the budget's epsilon by the device that was asked most."""
        return spent_by(self.entries(), self.budget)


def set_budget(store: Store, budget: Budget) -> None:
    """Give the store its budget: once, before its first charge. The same again changes nothing."""
    with store.transaction() as tx:
        known = StoreLedger(tx).budget
        if tx.budget() is None and (budget == NO_LIMIT or not tx.entries()):
            tx.set_budget(to_json(budget))
        elif budget != known:
            raise BudgetError(
                "a budget is never changed, nor given to a store that has charged without one",
                hint="use another store for another budget",
            )


def by_cohort(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """The charges to each cohort of each campaign."""
    cohorts: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        cohorts.setdefault((entry.campaign, entry.cohort), []).append(entry)
    return cohorts


def spent_by(entries: Sequence[Entry], budget: Budget) -> float:
    """As `privacy.ledger.spent`; worked out once, for composing may take a second."""
    return _spent(tuple(entries), budget)


def price(charges: Sequence[Entry], delta: float) -> float:
    """The epsilon of charges to one cohort, if they were all; worked out once."""
    return _price(tuple(loss_of_task(charge.loss) for charge in charges), delta)


def work_out(store: Store) -> None:
    """Compose what was charged so far, so that nobody who asks has to wait for it."""
    with store.reading() as tx:
        ledger = StoreLedger(tx)
        budget, entries = ledger.budget, ledger.entries()
    if entries:
        spent_by(entries, budget)
        for charges in by_cohort(entries).values():
            price(charges, budget.delta)


@lru_cache(maxsize=16)
def _spent(entries: tuple[Entry, ...], budget: Budget) -> float:
    return spent(entries, budget)


@lru_cache(maxsize=512)
def _price(losses: tuple[Loss, ...], delta: float) -> float:
    return epsilon_of(losses, delta)

"""The ledger of a service: charges in its store, each committed together with what it pays for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from sfumato.collector.store.store import Store, Transaction
from sfumato.errors import BudgetError, SfumatoError
from sfumato.privacy import Budget, Charge, Entry, Loss
from sfumato.privacy.accounting import epsilon_of, loss_of_task
from sfumato.privacy.ledger import afford, spent, words
from sfumato.spec import from_json, to_json

NO_LIMIT = Budget(epsilon=None, delta=1e-6)  # the budget of a store until another one is set


class StoreLedger:
    """Charges against the one budget of a store, within a transaction: see `privacy.Ledger`.

    A charge is committed with its transaction, so together with what it pays for. If two
    transactions charge, the second waits for the first and counts its charges.
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
        self._tx.lock_budget()
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
        """The part of the budget's epsilon spent on the device that was asked most."""
        return spent_by(self.entries(), self.budget)


def set_budget(store: Store, budget: Budget) -> None:
    """Set the budget of the store: once, before its first charge. Repeating it changes nothing."""
    with store.transaction() as tx:
        if needs_budget(tx, budget):
            tx.set_budget(to_json(budget))


def needs_budget(tx: Transaction, budget: Budget) -> bool:
    """Whether the store does not have this budget yet; BudgetError if it cannot get it."""
    if tx.budget() is None and (budget == NO_LIMIT or not tx.entries()):
        return True
    if budget != (present := StoreLedger(tx).budget):
        raise BudgetError(
            "a budget cannot be changed, nor set in a store that has charged without one; "
            f"the store has {words(present)}, the settings have {words(budget)}",
            hint="set budget_epsilon and budget_delta as before, or use another store",
        )
    return False


def entries_by_cohort(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """The charges to each cohort of each campaign."""
    cohorts: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        cohorts.setdefault((entry.campaign, entry.cohort), []).append(entry)
    return cohorts


def spent_by(entries: Sequence[Entry], budget: Budget) -> float:
    """`privacy.ledger.spent`, cached, because composition may take a second."""
    return cached_spent(tuple(entries), budget)


def price(charges: Sequence[Entry], delta: float) -> float:
    """The epsilon of these charges to one cohort, as if there were no others; cached."""
    return cached_price(tuple(loss_of_task(charge.loss) for charge in charges), delta)


def precompute_costs(store: Store) -> None:
    """Compose the charges so far into the cache, so that no request has to wait for it. A request
    for the ledger gets the error, if there is one."""
    with suppress(SfumatoError):
        with store.reading() as tx:
            ledger = StoreLedger(tx)
            budget, entries = ledger.budget, ledger.entries()
        if entries:
            spent_by(entries, budget)
            for charges in entries_by_cohort(entries).values():
                price(charges, budget.delta)


@lru_cache(maxsize=16)
def cached_spent(entries: tuple[Entry, ...], budget: Budget) -> float:
    return spent(entries, budget)


@lru_cache(maxsize=512)
def cached_price(losses: tuple[Loss, ...], delta: float) -> float:
    return epsilon_of(losses, delta)

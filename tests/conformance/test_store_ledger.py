"""The ledger of a store, on each database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sfumato.collector.store.ledger import StoreLedger, set_budget
from sfumato.collector.store.store import Store
from sfumato.errors import BudgetError
from sfumato.privacy import AdditiveLoss, Budget

LOSS = AdditiveLoss(noise="skellam", scale=9.4467, l1=5, l2=5**0.5, unit_cells=5)  # about epsilon 1


def test_two_transactions_do_not_both_spend_the_last_of_a_budget(store: Store) -> None:
    set_budget(store, Budget(epsilon=1.01, delta=1e-6))
    charged, ended = threading.Event(), threading.Event()

    def first() -> None:
        with store.transaction() as tx:
            StoreLedger(tx).charge(campaign="a", cohort="x", task="s", loss=LOSS)
            charged.set()
            ended.wait(0.5)  # give the second a chance, which it must not get

    def second() -> None:
        assert charged.wait(30)
        try:
            with store.transaction() as tx:
                StoreLedger(tx).charge(campaign="b", cohort="x", task="t", loss=LOSS)
        finally:
            ended.set()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        one.result()
        with pytest.raises(BudgetError):
            two.result()
    with store.reading() as tx:
        assert 0.9 < StoreLedger(tx).spent() <= 1.01
        assert [entry.campaign for entry in StoreLedger(tx).entries()] == ["a"]

"""Composing charges is slow, so it is done once, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import browsing
import serving
from service.dashboard.visiting import sign_in_as
from sfumato.collector.serve import open_store
from sfumato.collector.store import ledger
from sfumato.collector.store.ledger import StoreLedger, entries_by_cohort, price
from sfumato.privacy import AdditiveLoss, Budget, Entry
from sfumato.privacy.ledger import spent

BUDGET = 100.0  # without a budget a charge composes nothing


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of charges in each composition."""
    calls: list[int] = []

    def counting(entries: Sequence[Entry], budget: Budget) -> float:
        calls.append(len(entries))
        return spent(entries, budget)

    monkeypatch.setattr(ledger, "spent", counting)
    ledger.cached_spent.cache_clear()
    return calls


def charge(folder: Path, times: int, scale: float) -> None:
    store, _ = open_store(serving.settings(folder, budget_epsilon=BUDGET))
    loss = AdditiveLoss(noise="laplace", scale=scale, l1=1.0, l2=1.0, unit_cells=1)
    with store.transaction() as tx:
        for number in range(times):
            StoreLedger(tx).charge(
                campaign=f"c{number}", cohort="everybody", task=f"t{number}", loss=loss
            )
    store.close()


def test_a_charge_composes_once_what_is_then_asked_for(
    tmp_path: Path, compositions: list[int]
) -> None:
    charge(tmp_path, 2, scale=2.5)
    assert compositions == [1, 2]
    store, _ = open_store(serving.settings(tmp_path, budget_epsilon=BUDGET))
    with store.reading() as tx:
        assert StoreLedger(tx).spent() == pytest.approx(0.8)
    store.close()
    assert compositions == [1, 2]


def test_a_collector_composes_what_was_charged_when_it_starts(
    tmp_path: Path, compositions: list[int]
) -> None:
    charge(tmp_path, 2, scale=3.5)
    compositions.clear()
    ledger.cached_spent.cache_clear()  # as another process
    with browsing.open_stage(tmp_path, budget_epsilon=BUDGET) as stage:
        serving.wait_for(lambda: ledger.cached_spent.cache_info().currsize == 1, "the ledger")
        visitor = sign_in_as(stage, "analyst")
        assert "Epsilon spent" in visitor.get("/dashboard/ledger").text
        visitor.close()
    assert compositions == [2]


def test_each_cohort_has_its_price() -> None:
    loss = AdditiveLoss(noise="laplace", scale=2.0, l1=1.0, l2=1.0, unit_cells=1)
    entries = [Entry("a", "one", "t1", loss), Entry("a", "two", "t2", loss)]
    entries.append(Entry("a", "one", "t3", loss))
    cohorts = entries_by_cohort(entries)
    assert {name: len(charges) for name, charges in cohorts.items()} == {
        ("a", "one"): 2,
        ("a", "two"): 1,
    }
    assert price(cohorts["a", "one"], 0.0) == pytest.approx(1.0)
    assert price(cohorts["a", "two"], 0.0) == pytest.approx(0.5)

"""The only loop: tasks out, noised sums in, each charged before the next is asked."""

from __future__ import annotations

import numpy as np
import pytest

from checks import SEED
from sfumato.errors import BudgetError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import Campaign, run
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.privacy import Budget, Ledger, NoiseAtRelease, SeededRng
from sfumato.sketch import OneHot


def task(cohort: str) -> Task:
    return Task(
        sketch=OneHot(categories=2),
        mechanism=NoiseAtRelease(noise="gaussian", scale=4.3),
        aggregation=Plain(modulus_bits=12),
        cohort=cohort,
        max_count=100,
    )


class Rounds(Campaign):
    """Asks these cohorts in turn."""

    def __init__(self, *cohorts: str) -> None:
        self.waiting = [task(cohort) for cohort in cohorts]
        self.absorbed: list[NoisedSum] = []

    def next_task(self) -> Task | None:
        return self.waiting[0] if self.waiting else None

    def absorb(self, answer: NoisedSum) -> None:
        assert answer.task == self.waiting.pop(0)
        self.absorbed.append(answer)


class Fleet:
    """Ten devices in each cohort, all in the first category; records the cohorts asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def gather(self, task: Task) -> Batch:
        self.asked.append(task.cohort)
        return Batch(task.id, np.array([10, 0]), 10)


def test_a_campaign_is_asked_and_told_until_it_has_nothing_more_to_ask() -> None:
    campaign, fleet = Rounds("a", "b", "c"), Fleet()
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    run(campaign, fleet.gather, ledger=ledger, rng=SeededRng(SEED))
    assert fleet.asked == ["a", "b", "c"]
    assert [answer.task.cohort for answer in campaign.absorbed] == fleet.asked
    assert [entry.cohort for entry in ledger.entries()] == ["a", "b", "c"]


def test_a_campaign_with_nothing_to_ask_ends_at_once() -> None:
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    campaign, fleet = Rounds(), Fleet()
    run(campaign, fleet.gather, ledger=ledger, rng=SeededRng(SEED))
    assert fleet.asked == []
    assert campaign.absorbed == []
    assert ledger.entries() == []


def test_a_campaign_ends_where_the_budget_does_and_hears_nothing_more() -> None:
    campaign, fleet = Rounds("a", "a", "b"), Fleet()
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    with pytest.raises(BudgetError):
        run(campaign, fleet.gather, ledger=ledger, rng=SeededRng(SEED))
    assert len(campaign.absorbed) == len(ledger.entries()) == 1
    assert fleet.asked == ["a", "a"]


def test_what_a_campaign_hears_is_noised() -> None:
    """Ten rounds without noise on either cell have a probability below 1e-9 (0.093**20)."""
    campaign = Rounds(*"abcdefghij")
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    run(campaign, Fleet().gather, ledger=ledger, rng=SeededRng(SEED))
    assert any(answer.table.tolist() != [10, 0] for answer in campaign.absorbed)

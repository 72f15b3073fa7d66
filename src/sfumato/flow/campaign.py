"""Questions that take several tasks: the only loop. A campaign sees noised sums, never a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sfumato.flow.accumulator import Batch
from sfumato.flow.release import NoisedSum, noised_sum
from sfumato.flow.task import Task
from sfumato.privacy import Books, Charge, Rng


class Campaign(Protocol):
    """Asks for one task after another, learning from what each gave."""

    def next_task(self) -> Task | None:
        """What to ask next, or None when there is nothing more to ask."""
        ...

    def absorb(self, answer: NoisedSum) -> None:
        """Take in what the last task gave."""
        ...


def step(
    campaign: Campaign,
    task: Task,
    batch: Batch,
    *,
    ledger: Books,
    rng: Rng,
    charge_of: Callable[[Task], Charge] = lambda task: task.loss,
) -> NoisedSum:
    """Charge the answer to a campaign's task, noise it and let the campaign absorb it."""
    answer = noised_sum(task, batch, ledger=ledger, rng=rng, loss=charge_of(task))
    campaign.absorb(answer)
    return answer


def run(
    campaign: Campaign,
    gather: Callable[[Task], Batch],
    *,
    ledger: Books,
    rng: Rng,
    charge_of: Callable[[Task], Charge] = lambda task: task.loss,
) -> list[NoisedSum]:
    """Drive a campaign to its end; `gather` asks the devices of a task's cohort.

    `charge_of` is what the design charges for a task, where its tasks are parts of a plan.
    """
    answers = []
    while (task := campaign.next_task()) is not None:
        batch = gather(task)
        answers.append(step(campaign, task, batch, ledger=ledger, rng=rng, charge_of=charge_of))
    return answers

"""Questions that take several tasks: the only loop. A campaign sees noised sums and counted
records, never a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from sfumato.errors import SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.release import NoisedSum, charge, noised_sum
from sfumato.flow.task import Task
from sfumato.privacy import Account, Charge, Rng


class Campaign(ABC):
    """Asks for one task after another, learning from what each gave."""

    __slots__ = ()

    @abstractmethod
    def next_task(self) -> Any:
        """What to ask next, or None when there is nothing more to ask."""

    @abstractmethod
    def absorb(self, answer: Any) -> None:
        """Take in what the last task gave: a `NoisedSum`, or the `RecordBatch` of a local task."""

    def skip(self) -> None:
        """Go on without an answer to the last task, where a campaign can do without."""
        raise SpecError("this campaign needs the answers to all of its tasks")

    def parameters(self) -> bytes | None:
        """What devices of the next task start from, where a model is trained."""
        return None


def step(
    campaign: Campaign,
    task: Task,
    batch: Batch,
    *,
    ledger: Account,
    rng: Rng,
    charge_of: Callable[[Task], Charge] = lambda task: task.loss,
) -> NoisedSum:
    """Charge the answer to a campaign's task, noise it and let the campaign absorb it."""
    answer = noised_sum(task, batch, ledger=ledger, rng=rng, loss=charge_of(task))
    campaign.absorb(answer)
    return answer


def run(
    campaign: Campaign,
    gather: Callable[[Any], Any],
    *,
    ledger: Account,
    rng: Rng,
    charge_of: Callable[[Any], Charge] = lambda task: task.loss,
) -> list[Any]:
    """Drive a campaign to its end; `gather` asks the devices of a task's cohort.

    `charge_of` is what the design charges for a task, where its tasks are parts of a plan.
    """
    answers = []
    while (task := campaign.next_task()) is not None:
        if task.is_local:  # records are paid for when devices send them, and noised by them
            charge(task, ledger=ledger, loss=charge_of(task))
            answer = gather(task)
            campaign.absorb(answer)
        else:
            batch = gather(task)
            answer = step(campaign, task, batch, ledger=ledger, rng=rng, charge_of=charge_of)
        answers.append(answer)
    return answers

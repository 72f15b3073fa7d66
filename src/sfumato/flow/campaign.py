"""Questions that take several tasks, and the only loop over tasks. A campaign sees noised sums and
counted records, never a report."""

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
    """Asks one task after another, each depending on earlier answers."""

    __slots__ = ()

    @abstractmethod
    def next_task(self) -> Any:
        """The next task, or None at the end."""

    @abstractmethod
    def absorb(self, answer: Any) -> None:
        """Use the answer to the last task: a `NoisedSum`, or the `RecordBatch` of a local task."""

    def expect(self, task_id: str) -> None:
        """Refuse an answer to any other task than the last one."""
        task = self.next_task()
        if task is None or task_id != task.id:
            raise SpecError("a campaign takes only the answer to its last task")

    def skip(self) -> None:
        """Continue without an answer to the last task, if the campaign allows that."""
        raise SpecError("this campaign needs the answers to all of its tasks")

    def parameters(self) -> bytes | None:
        """The model parameters from which devices of the next task start, if it trains a model."""
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
    """Charge a task, add noise to its sum and pass the answer to the campaign."""
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
) -> None:
    """Run a campaign to its end; `gather` asks the devices of a task's cohort.

    `charge_of` gives the charge for a task, if tasks are parts of a plan. Only the campaign keeps
    answers: those of thousands of rounds are gigabytes.
    """
    while (task := campaign.next_task()) is not None:
        if task.is_local:  # devices randomise the records, so they cost when they are sent
            charge(task, ledger=ledger, loss=charge_of(task))
            campaign.absorb(gather(task))
        else:
            step(campaign, task, gather(task), ledger=ledger, rng=rng, charge_of=charge_of)

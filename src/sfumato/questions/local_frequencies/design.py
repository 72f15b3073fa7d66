"""How common is each of these items, if nobody is trusted? Paper 004, and the best known oracle.

A design is a sized randomizer; each round is an epoch with its own hash functions. The counts of
all epochs add up, and so do their variances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato import hashing
from sfumato.errors import ImpossibleError
from sfumato.flow.accumulator import RecordBatch
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Influence
from sfumato.flow.task import LocalTask
from sfumato.privacy import Rng, debias
from sfumato.privacy.debias import LocalEstimates
from sfumato.privacy.randomizers import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    Hashed,
    HashedResponse,
    Randomizer,
    in_epoch,
    no_item,
)
from sfumato.privacy.tallies import Tally
from sfumato.questions.answers import NO_ANSWERS, listed_release
from sfumato.questions.promise import COUNT, round_up, with_shuffling
from sfumato.questions.question import (
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
    Seeded,
    public_seed,
)
from sfumato.spec import digest, require, spec
from sfumato.study import Study

NAMES = {
    "count_mean": "count mean sketch",
    "count_mean_optimal": "count mean sketch with optimal flips",
    "hadamard": "Hadamard count mean sketch",
    "hashed": "hashed response",
    "direct": "direct response",
}


@dataclass(slots=True, repr=False)
class LocalCampaign(Campaign):
    """Asks for records in one task after another; tasks do not depend on earlier answers."""

    tasks: list[Any]  # LocalTask or WordTask
    batches: list[RecordBatch] = field(default_factory=list)

    def next_task(self) -> Any:
        return self.tasks[len(self.batches)] if len(self.batches) < len(self.tasks) else None

    def absorb(self, answer: RecordBatch) -> None:
        self.expect(answer.task_id)
        self.batches.append(answer)

    @property
    def impossible(self) -> int:
        """The number of records that no device could have sent, which were left out."""
        return sum(batch.impossible for batch in self.batches)

    def notes(self) -> tuple[str, ...]:
        if not self.impossible:
            return ()
        return (f"{self.impossible:,} invalid records were left out",)


class LocalDefaults(QuestionDefaults, ABC):
    """Common to questions whose devices trust nobody."""

    __slots__ = ()
    least_noise: ClassVar[None] = None
    devices: int
    records_per_device: int

    @property
    def items_per_device(self) -> int:
        return self.records_per_device

    @abstractmethod
    def tasks(self) -> list[Any]:
        """The tasks, one per round."""

    def campaign(self, plan: Plan, *, name: str | None = None, **context: Any) -> LocalCampaign:
        tasks = self.tasks()
        return LocalCampaign(tasks if name is None else [replace(t, campaign=name) for t in tasks])

    def cohorts(self) -> dict[str, float]:
        tasks = self.tasks()
        return {task.cohort: 1 / len(tasks) for task in tasks}

    def cohort_size(self, task: Any) -> float:
        return self.devices / len(self.tasks())


@spec("local_design")
class LocalDesign(LocalDefaults):
    """A sized campaign of frequency questions to devices that trust nobody."""

    randomizer: Randomizer
    items: int  # size of the dictionary
    devices: int
    rounds: int = 1  # epochs
    records_per_device: int = 1
    aware: bool = True  # correct for collisions where they matter

    def check(self) -> None:
        require.at_least(
            1,
            items=self.items,
            devices=self.devices,
            rounds=self.rounds,
            records_per_device=self.records_per_device,
        )

    @property
    def influence(self) -> Influence:
        """Every record of a day can be about one item. The correction of collisions depends on all
        records, and one of them can change what it corrects."""
        each = self.randomizer.reach / (1 - self.randomizer.collision)
        most = round_up(self.records_per_device * each)
        if not self.aware or self.randomizer.collision == 0:
            return Influence(of=COUNT, most=most, note="for each day on which it reports")
        return Influence(
            of=COUNT,
            most=None,
            note=f"before collisions are corrected it moves a count by at most {most:,g} for each "
            "day on which it reports, but one report can change which collisions are corrected",
        )

    def tasks(self) -> list[LocalTask]:
        """One task per epoch."""
        return [
            LocalTask(
                randomizer=in_epoch(self.randomizer, epoch),
                campaign=digest(self),
                cohort=f"round {epoch}",
                records_per_report=self.records_per_device,
            )
            for epoch in range(self.rounds)
        ]

    def with_seed(self, rng: Rng) -> Seeded:
        """A direct response has no hash functions; its seed is for the cohorts only."""
        seed = public_seed(rng)
        return Seeded(replace(self, randomizer=in_epoch(self.randomizer, 0, seed)), seed)

    def values(
        self,
        task: LocalTask,
        items: pa.Array,
        *,
        dictionary: Dictionary | None,
        place: tuple[int, int],
    ) -> tuple[Any, None]:
        return values_of(task.randomizer, items, dictionary), None

    def answer(
        self, campaign: LocalCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        tallies = [batch.tallies[0] for batch in campaign.batches]
        if not any(tally.count for tally in tallies):
            raise ImpossibleError(NO_ANSWERS)
        estimates = estimates_of(tallies, plan.listed, collision_aware=self.aware)
        records = [tally.count for tally in tallies]
        respondents, per_device = participation.respondents, self.records_per_device
        return listed_release(
            plan,
            replace(participation, notes=(*participation.notes, *campaign.notes())),
            counts=estimates.counts,
            standard_error=estimates.standard_error,
            interval=lambda above: estimates.interval(
                devices=max(participation.devices, respondents),
                respondents=respondents,
                per_device=per_device,
                above=above,
            ),
            significant=estimates.counts > estimates.thresholds(),
            significant_from=estimates.null.threshold(estimates.counts.size),
            respondents=respondents,
            privacy=with_shuffling(
                plan.privacy, records, plan.study.delta, self.records_per_device
            ),
            bytes_per_device=plan.predicted["bytes_per_device"],
            parameters={
                "decoder": estimates.decoder,
                "unlisted": estimates.unlisted,
                "unlisted_error": estimates.unlisted_error,
            },
        )

    def draw(self, study: Study) -> Any:
        """Plot the error against the size of the table for every oracle and for this design."""
        from sfumato.questions.local_frequencies.plan import draw

        return draw(study, self.items)

    @property
    def algorithm(self) -> str:
        return oracle_of(self.randomizer)

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"items": self.items, "oracle": oracle_of(self.randomizer)}
        if not isinstance(self.randomizer, DirectResponse):
            sizes |= {"rows": self.randomizer.rows, "width": self.randomizer.width}
        return sizes | {
            "epsilon_per_report": self.randomizer.epsilon,
            "records_per_device": self.records_per_device,
            "rounds": self.rounds,
            "table_cells": self.randomizer.rows * self.randomizer.width,
        }


def oracle_of(randomizer: Randomizer) -> str:
    """A randomizer's name: one of the keys of `NAMES`."""
    if isinstance(randomizer, CountMeanSketch):
        return "count_mean" if randomizer.flips == "symmetric" else "count_mean_optimal"
    kinds = {
        HadamardCountMeanSketch: "hadamard",
        HashedResponse: "hashed",
        DirectResponse: "direct",
    }
    return kinds[type(randomizer)]


def values_of(randomizer: Randomizer, items: hashing.Items, dictionary: Any) -> npt.NDArray[Any]:
    """Items as values for a randomizer; `dictionary` gives the categories for a direct response."""
    if isinstance(randomizer, DirectResponse):
        return randomizer.values(dictionary.categories(items))
    return randomizer.values(items)


def estimates_of(
    tallies: Sequence[Tally], dictionary: Any, *, collision_aware: bool = True
) -> LocalEstimates:
    """Counts over all epochs; epochs without answers add nothing."""
    parts = [
        debias.estimate(
            tally,
            values_of(tally.randomizer, dictionary.items, dictionary),
            collision_aware=collision_aware,
            none=no_item(tally.randomizer) if isinstance(tally.randomizer, Hashed) else None,
        )
        for tally in tallies
        if tally.count
    ]
    nulls = [part.null for part in parts]
    null_error = np.sqrt(np.sum([part.null_error**2 for part in parts], axis=0))
    return LocalEstimates(
        counts=np.sum([part.counts for part in parts], axis=0),
        standard_error=np.sqrt(np.sum([part.standard_error**2 for part in parts], axis=0)),
        null=debias.Null(
            math.sqrt(sum(null.error**2 for null in nulls)),
            sum(null.records for null in nulls),
            nulls[0].support,
        ),
        null_error=null_error,
        alone=math.sqrt(sum(part.alone**2 for part in parts)),
        unlisted=sum(part.unlisted for part in parts),
        unlisted_error=math.sqrt(sum(part.unlisted_error**2 for part in parts)),
        decoder=parts[-1].decoder,
    )

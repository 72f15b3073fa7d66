"""What is the median of the devices' numbers? One table with a cell per number, noised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.flow.campaign import Campaign
from sfumato.flow.release import EstimateRelease, Influence, NoisedSum
from sfumato.flow.secure_sum import sum_task, traffic
from sfumato.flow.task import Task
from sfumato.privacy import Mechanism
from sfumato.questions.answers import check_finished
from sfumato.questions.question import (
    EVERYBODY,
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
)
from sfumato.sketch import OneHot
from sfumato.spec import digest, spec

NUMBERS = 121


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MedianRelease(EstimateRelease):
    """An estimated median and its 95% interval."""

    median: float
    low: float
    high: float

    def frame(self) -> pa.Table:
        return pa.table({"median": [self.median], "low": [self.low], "high": [self.high]})

    def plot(self, *, top: int = 20, path: str | Path | None = None, ax: Any = None) -> Any:
        errors = np.array([[self.median - self.low], [self.high - self.median]])
        return self._bars(["median"], np.array([self.median]), errors, "median", path=path, ax=ax)

    @classmethod
    def _own(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        (row,) = data["estimates"]
        return dict(row)

    def __repr__(self) -> str:
        return f"MedianRelease: {self.median:g} ({self.low:g} … {self.high:g}); {self._promise()}"


@spec("example_median_design")
class MedianDesign(QuestionDefaults):
    """A sized question for a median."""

    devices: int
    mechanism: Mechanism
    seed: int = 0

    @property
    def rounds(self) -> int:
        return 1

    @property
    def items_per_device(self) -> int:
        return 1

    @property
    def least_noise(self) -> float | None:
        return self.task().noise_multiplier

    @property
    def influence(self) -> Influence:
        return Influence(of="the median", most=NUMBERS - 1.0)

    def task(self) -> Task:
        return sum_task(
            None,
            sketch=OneHot(categories=NUMBERS),
            mechanism=self.mechanism,
            campaign=digest(self),
            cohort=EVERYBODY,
            devices=self.devices,
        )

    def parameters(self) -> dict[str, Any]:
        return {"numbers": NUMBERS}

    def campaign(self, plan: Plan, **context: Any) -> MedianCampaign:
        return MedianCampaign(self)

    def values(
        self, task: Task, items: pa.Array, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        assert dictionary is not None
        category = dictionary.categories(items)
        return category[category >= 0], category >= 0

    def answer(
        self, campaign: MedianCampaign, plan: Plan, participation: Participation
    ) -> MedianRelease:
        check_finished(campaign, participation)
        assert campaign.sums is not None
        below = np.cumsum(campaign.sums.table)
        # Half of the cells add to `below - half` and half take from it; 4 deviations are plenty.
        half, spread = below[-1] / 2, 4 * self.mechanism.stddev(1) * math.sqrt(NUMBERS) / 2
        median, low, high = (
            int(np.argmax(below >= half + shift)) for shift in (0.0, -spread, spread)
        )
        return MedianRelease(
            median=median,
            low=low,
            high=high if below[-1] >= half + spread else NUMBERS - 1,
            **plan.release_head(
                devices=participation.devices,
                rounds=1,
                bytes_per_device=traffic([self.task()])["bytes_per_device"],
                notes=participation.notes,
            ),
        )


@dataclass(slots=True, repr=False)
class MedianCampaign(Campaign):
    """Asks once."""

    design: MedianDesign
    sums: NoisedSum | None = None

    def next_task(self) -> Task | None:
        return self.design.task() if self.sums is None else None

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        self.sums = answer

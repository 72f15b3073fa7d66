"""How common is each of these items, when nobody is trusted? Paper 004, and the best oracle known.

A design is a sized randomizer; each round is an epoch with hash functions of its own. The counts of
all epochs add up, and so do their variances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato import hashing
from sfumato.flow.task import LocalTask
from sfumato.privacy import debias
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
from sfumato.spec import digest, require, spec

F64 = npt.NDArray[np.float64]

NAMES = {
    "count_mean": "count mean sketch",
    "count_mean_optimal": "count mean sketch with optimal flips",
    "hadamard": "Hadamard count mean sketch",
    "hashed": "hashed response",
    "direct": "direct response",
}


@spec("local_design")
class LocalDesign:
    """A sized campaign of frequency questions to devices that trust nobody."""

    randomizer: Randomizer
    items: int  # in the dictionary
    devices: int
    rounds: int = 1  # epochs
    records_per_device: int = 1
    aware: bool = True  # collisions are solved for where they matter

    def check(self) -> None:
        for name in ("items", "devices", "rounds", "records_per_device"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}")

    def tasks(self) -> list[LocalTask]:
        """A task an epoch."""
        return [
            LocalTask(
                randomizer=in_epoch(self.randomizer, epoch),
                campaign=digest(self),
                cohort=f"round {epoch}",
                records_per_report=self.records_per_device,
            )
            for epoch in range(self.rounds)
        ]

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
    """Items as a randomizer takes them; `dictionary` gives the categories of a direct one."""
    if isinstance(randomizer, DirectResponse):
        return randomizer.values(dictionary.categories(items))
    return randomizer.values(items)


def estimates(tallies: Sequence[Tally], dictionary: Any, *, aware: bool = True) -> LocalEstimates:
    """Counts over all epochs; epochs nobody answered in add nothing."""
    parts = [
        debias.estimate(
            tally,
            values_of(tally.randomizer, dictionary.items, dictionary),
            aware=aware,
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

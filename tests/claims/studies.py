"""Studies of every question and trust with synthetic devices, and the claims of their releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import sfumato
from sfumato import CountRelease, Plan

I64 = npt.NDArray[np.int64]
Counts = tuple[int, ...]

# The number of devices that hold each item; the dictionary also lists items that nobody holds.
FLAT: Counts = (20,) * 60
FEW: Counts = (3, 2, 2, 1, 1) * 4
ZIPF: Counts = tuple(int(2_000 / rank**1.1) for rank in range(1, 121))
TINY: Counts = (2, 1, 1, 1)
LARGE: Counts = (60_000, 30_000, 9_000, 1_000) * 3
ABSENT = 120


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One study of the grid."""

    question: str
    trust: str
    epsilon: float
    counts: Counts
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = {TINY: "tiny", FEW: "few", FLAT: "flat", ZIPF: "zipf", LARGE: "large"}
        kind = kinds.get(self.counts, "other")
        more = ",".join(f"{key}={value}" for key, value in self.more.items())
        return f"{self.question}-{self.trust}-{self.epsilon:g}-{kind}-{more}"

    @property
    def truth(self) -> dict[str, int]:
        return {name(place): count for place, count in enumerate(self.counts)}

    def plan(self) -> Plan:
        study = {
            "question": self.question,
            "trust": self.trust,
            "epsilon": self.epsilon,
            "devices": sum(self.counts),
            **({} if self.trust == "local" else {"delta": 1e-6}),
            **self.more,
        }
        listed = [name(place) for place in range(len(self.counts) + ABSENT)]
        return sfumato.plan(study, items=listed if self.question == "frequencies" else None)

    def releases(self, runs: int) -> Iterator[CountRelease]:
        """Releases of the same devices, each with its own noise: nothing is seeded."""
        planned = self.plan()
        data = {"item": list(self.truth), "n": list(self.truth.values())}
        for _ in range(runs):
            yield sfumato.simulate(planned, data, count_column="n")


def name(place: int) -> str:
    """Words of three letters, so that every question can ask about them."""
    letters = "abcdefghij"
    return letters[place // 100 % 10] + letters[place // 10 % 10] + letters[place % 10]


@dataclass
class Tally:
    """Totals over many releases of a cell."""

    inside: int = 0  # number of intervals that contain the truth
    intervals: int = 0
    false: int = 0  # number of releases that mark an item that nobody holds
    runs: int = 0

    def add(self, cell: Cell, release: CountRelease) -> None:
        truth = np.array([cell.truth.get(item, 0) for item in release.items.to_pylist()])
        self.inside += int(((release.low <= truth) & (truth <= release.high)).sum())
        self.intervals += truth.size
        self.false += bool((release.significant & (truth == 0)).any())
        self.runs += 1


def tally(cell: Cell, runs: int) -> Tally:
    total = Tally()
    for release in cell.releases(runs):
        total.add(cell, release)
    return total

"""Simulated devices that answer tasks each by itself, as agents do over a network.

A device makes its table by the agent's own functions, of what it holds and by chance of its own;
what it sends is sealed, and either added by a collector's rules or masked in a round. So a seed
gives the sums that `network_fleet` gives with it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import SfumatoError
from sfumato.flow.accumulator import Batch, Collector
from sfumato.flow.aggregation import Masked
from sfumato.flow.release import charge
from sfumato.flow.task import Task
from sfumato.privacy import Ledger, Rng, SeededRng, SystemRng
from sfumato.privacy.samplers import below
from sfumato.questions.registry import Design, keys_of
from sfumato.simulation.population import Cohorts, Population

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]

_PIECE = 256  # devices between two tellings of how far it is


def as_texts(items: pa.Array) -> list[str]:
    held: list[str] = items.to_pylist()
    return held


@dataclass(frozen=True, slots=True, repr=False)
class Knowledge:
    """What devices are told of a study, and what they hold."""

    design: Design  # with its hash functions
    places: Mapping[str, int] | None = None  # of the dictionary's items
    held: Callable[[pa.Array], Any] = as_texts  # a device's value, of its rows in the population


@dataclass(frozen=True, slots=True, repr=False)
class _Present:
    """A device that answers."""

    number: int
    items: pa.Array


class DeviceFleet:
    """Devices of a population, in cohorts; who does not answer is counted as asked."""

    def __init__(
        self,
        population: Population,
        cohorts: Cohorts,
        knowledge: Knowledge,
        *,
        rng: Rng,
        seed: int | None,
        books: Ledger,
        tell: Progress,
        tasks: int,
    ) -> None:
        """Device k draws from `SeededRng(seed, k)`; without a seed, from the system. `rng` is for
        all else, and `books` pay before a masked sum is opened."""
        try:
            from sfumato.device import private
        except ImportError as problem:
            raise SfumatoError(
                "devices that answer one by one need cryptography",
                hint='pip install "sfumato[secure]"',
            ) from problem
        self._private = private
        self.population, self.cohorts, self._knowledge = population.expanded(), cohorts, knowledge
        self.rng, self._seed, self.books, self.tell = rng, seed, books, tell
        self.notes: list[str] = []
        self.asked = 0  # devices, each once
        self._counted: set[str] = set()
        self._tasks, self._done = tasks, 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", min(self._done / self._tasks, 1.0))
        self._done += 1
        asked, present = 0, list[_Present]()
        for shard in self.cohorts.shards(self.population, task.cohort):
            assert shard.numbers is not None  # the population is expanded
            asked += shard.asked
            devices = zip(shard.numbers.tolist(), shard.each_device(), strict=True)
            present += [_Present(number, items) for number, items in devices]
        self.asked += asked if task.cohort not in self._counted else 0
        self._counted.add(task.cohort)
        if isinstance(task.aggregation, Masked):
            return self._in_round(task, asked, present)
        return self._by_reports(task, present)

    def _by_reports(self, task: Task, present: list[_Present]) -> Batch:
        collector = Collector(task)
        keys, places = keys_of(self._knowledge.design, task), self._knowledge.places
        for start in range(0, len(present), _PIECE):
            self._say(task, "reports", start / len(present))
            collector.add(
                self._private.table_report(task, keys, self._held(device), places)(
                    self._chance(device)
                ).to_bytes()
                for device in present[start : start + _PIECE]
            )
        return collector.batch

    def _in_round(self, task: Task, asked: int, present: list[_Present]) -> Batch:
        """A masked round, message by message; who does not answer vanishes at some step of it."""
        from sfumato.secagg import rehearsal
        from sfumato.secagg.coordinator import Phase

        round = task.masked_round(asked, self.rng.words(2).tobytes().hex())
        keys, places = keys_of(self._knowledge.design, task), self._knowledge.places

        def table_of(member: int) -> I64:
            device = present[member]
            make = self._private.table(task, keys, self._held(device), places)
            table: I64 = make(self._chance(device))
            return table

        steps = (Phase.ENROL, Phase.SHARE, Phase.MASK)
        when = below(len(steps), asked - len(present), self.rng).tolist()
        outcome = rehearsal.run(
            round,
            table_of,
            leaving={len(present) + k: steps[step] for k, step in enumerate(when)},
            before_unmask=lambda: charge(task, ledger=self.books),
            rng=self.rng,
            progress=lambda step, share: self._say(task, step, share),
        )
        self.notes.append(
            f"{task.cohort}: {asked:,} devices ran the masked round, {outcome.survivors:,} to the "
            f"end; a device sent at most {outcome.bytes_up.max():,} bytes, was told at most "
            f"{outcome.bytes_down.max():,}, and computed for "
            f"{1000 * outcome.device_seconds / asked:.1f} ms; the collector took "
            f"{outcome.collector_seconds:.2f} s"
        )
        total = outcome.total.reshape(task.sketch.shape)
        return Batch(task.id, total, outcome.survivors, charged=True)

    def _held(self, device: _Present) -> Any:
        return self._knowledge.held(device.items)

    def _chance(self, device: _Present) -> Rng:
        return SystemRng() if self._seed is None else SeededRng(self._seed, device.number)

    def _say(self, task: Task, step: str, share: float) -> None:
        done = (self._done - 1 + share) / self._tasks
        self.tell(f"asking {task.cohort}: {step}", min(done, 1.0))

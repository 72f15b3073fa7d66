"""Simulated devices that answer tasks: a task in, the batch of its cohort out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.batch import Batch
from sfumato.device import contribute
from sfumato.engine import Engine
from sfumato.errors import SfumatoError
from sfumato.frequencies import PILOT_COHORT
from sfumato.population import Cohorts, Population, Shard
from sfumato.privacy import Ledger, Rng
from sfumato.privacy.samplers import below
from sfumato.release import charge
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study
from sfumato.task import Task

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]
# What devices encode of their items, and which of the items that is of (all if None).
Values = Callable[[Task, pa.Array], tuple[Any, npt.NDArray[np.bool_] | None]]


class Fleet:
    """Devices of a population, in cohorts; who does not answer is counted as asked."""

    def __init__(
        self,
        population: Population,
        cohorts: Cohorts,
        values: Values,
        rng: Rng,
        engine: Engine,
        tell: Progress,
        *,
        books: Ledger | None = None,
        tasks: int = 1,
    ) -> None:
        """With `books` the protocol of masked sums is run, and pays before it opens a sum; `tasks`
        is how many there will be."""
        self.population, self.cohorts, self.values = population, cohorts, values
        self.rng, self.engine, self.tell, self.books = rng, engine, tell, books
        self.notes: list[str] = []
        self.asked = 0  # devices, each once
        self._counted: set[str] = set()
        self._tasks, self._done = tasks, 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", min(self._done / self._tasks, 1.0))
        self._done += 1
        answering, first = 0, task.cohort not in self._counted
        self._counted.add(task.cohort)

        def shards() -> Iterator[Shard]:
            nonlocal answering
            for shard in self.cohorts.shards(self.population, task.cohort):
                self.asked += shard.asked if first else 0
                answering += shard.answering
                if shard.answering:
                    yield shard

        if self.books is not None:
            return self._run_protocol(task, list(shards()), self.books)
        total = self.engine.sum(lambda shard: self._contribute(task, shard), shards())
        batch = Batch.empty(task)
        return batch if total is None else batch + Batch(task.id, total, answering)

    def _run_protocol(self, task: Task, shards: list[Shard], books: Ledger) -> Batch:
        """A masked round, message by message; who does not answer vanishes at some step of it."""
        try:
            from sfumato.secagg import rehearsal
            from sfumato.secagg.coordinator import Phase
        except ImportError as problem:
            raise SfumatoError(
                "masked rounds need cryptography", hint='pip install "sfumato[secure]"'
            ) from problem
        devices = [items for shard in shards for items in shard.each_device()]
        asked = sum(shard.asked for shard in shards)
        round = task.masked_round(asked, self.rng.words(2).tobytes().hex())

        def table_of(member: int) -> I64:
            held = Shard(devices[member], None, 1, 1)
            return self._contribute(task, held).reshape(-1)

        steps = (Phase.ENROL, Phase.SHARE, Phase.MASK)
        when = below(len(steps), asked - len(devices), self.rng).tolist()
        outcome = rehearsal.run(
            round,
            table_of,
            leaving={len(devices) + k: steps[step] for k, step in enumerate(when)},
            before_unmask=lambda: charge(task, ledger=books),
            rng=self.rng,
            progress=lambda step, share: self.tell(
                f"asking {task.cohort}: {step}", min((self._done - 1 + share) / self._tasks, 1.0)
            ),
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

    def _contribute(self, task: Task, shard: Shard) -> I64:
        values, chosen = self.values(task, shard.items)
        weights = shard.weights
        if weights is not None and chosen is not None:
            weights = weights[chosen]
        return contribute(task, values, devices=shard.answering, weights=weights, rng=self.rng)


def cohorts_of(
    study: Study,
    names: list[str],
    devices: int,
    pilot_devices: int,
    population: Population,
    seed: int,
) -> Cohorts:
    """Cohorts of these names, alike in size, and one for a pilot; as many devices as planned."""
    asked = min(1.0, devices / population.devices)
    pilot = asked * pilot_devices / devices
    shares = {PILOT_COHORT: pilot} if pilot_devices else {}
    shares |= {name: (asked - pilot) / len(names) for name in names}
    return Cohorts(
        shares=shares,
        in_order=study.cohorts == "different",
        dropout=study.dropout,
        seed=seed,
        exact=study.trust == "secure",
    )


@dataclass(frozen=True, slots=True, repr=False)
class Asking:
    """With what, and of whom, a question that is answered by sums is asked."""

    population: Population
    rng: Rng
    engine: Engine
    tell: Progress
    books: Ledger
    protocol: bool  # whether masked sums are run message by message
    started: float  # on the clock that the bill is read from

    def public_seed(self) -> int:
        return int(self.rng.words(1)[0]) & LARGEST_INTEGER

    def fleet(
        self,
        study: Study,
        population: Population,
        cohorts: Cohorts,
        values: Values,
        *,
        tasks: int,
    ) -> Fleet:
        runs = self.protocol and study.trust == "secure"
        return Fleet(
            population,
            cohorts,
            values,
            self.rng,
            self.engine,
            self.tell,
            books=self.books if runs else None,
            tasks=tasks,
        )

"""A population of devices driven through the same flow as real ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.batch import Batch
from sfumato.campaign import run
from sfumato.device import contribute
from sfumato.engine import Engine, LocalEngine
from sfumato.errors import ImpossibleError, SfumatoError
from sfumato.frequencies import PILOT_COHORT, FrequencyCampaign, FrequencyDesign
from sfumato.local_frequencies import LocalDesign, in_epoch, values_of
from sfumato.local_frequencies import estimates as local_estimates
from sfumato.new_words import WordDesign, seeded
from sfumato.plan import Plan, plan
from sfumato.population import Cohorts, Data, Population, Shard
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng, Tally, debias
from sfumato.privacy.samplers import below
from sfumato.release import NORMAL_95, Cost, Release, charge
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study
from sfumato.sum_plan import bytes_per_device
from sfumato.task import Task

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

Progress = Callable[[str, float], None]
_TINY = float(np.finfo(np.float64).tiny)
_PIECE = 1 << 18  # devices that privatise together
_Promised = TypeVar("_Promised", Plan, Release)


def simulate(
    question: Plan | Study | Mapping[str, Any] | Path | str,
    data: Data | Population,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> Release:
    """Ask a plan's question of the devices in `data`, through the same flow as real devices.

    A row is one device's item unless a device column groups rows; a count column makes a row that
    many devices (or, with a device column, that many values of the device). With a `seed` the run
    repeats exactly, its noise included, so it is for study and never for a real release.

    A masked sum is exact, so with trust "secure" tables are simply added, with every device's
    noise. With `protocol` every device does run the protocol, message by message: the same sums, at
    ten to forty milliseconds a device.

    >>> release = simulate(
    ...     {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6},
    ...     {"item": ["oak"] * 600 + ["elm"] * 300}, seed=1)
    >>> release.items.to_pylist()
    ['oak', 'elm']
    """
    started = time.perf_counter()
    tell = progress or (lambda stage, share: None)
    tell("reading", 0.0)
    columns = {"item": item_column, "device": device_column, "count": count_column}
    population = (
        data
        if isinstance(data, Population)
        else Population.load(data, **{f"{role}_column": name for role, name in columns.items()})
    )
    tell("planning", 0.0)
    planned = _planned(question, population)
    rng: Rng = SystemRng() if seed is None else SeededRng(seed)
    books = ledger or Ledger(Budget(epsilon=planned.study.epsilon, delta=planned.study.delta))
    if isinstance(planned.design, WordDesign):
        release = _ask_for_words(planned, planned.design, population, rng, tell, started)
    elif isinstance(planned.design, LocalDesign):
        release = _ask_locally(planned, planned.design, population, rng, tell, started)
    else:
        fleet = _Fleet(
            planned,
            planned.design,
            population,
            rng,
            engine or LocalEngine(),
            tell,
            books if protocol else None,
        )
        release = _ask_for_sums(planned, fleet, books, started)
    return (
        release
        if seed is None
        else _qualified(
            release, "this run's noise was drawn from a seed: who knows it can take the noise off"
        )
    )


def _ask_for_sums(planned: Plan, fleet: _Fleet, books: Ledger, started: float) -> Release:
    design, tell = fleet.design, fleet.tell
    campaign = FrequencyCampaign(design, planned.asked_about.items)
    run(campaign, fleet.gather, ledger=books, rng=fleet.rng)
    tell("estimating", 1.0)
    estimates = campaign.estimates()
    summary = planned.summary()
    summary["parameters"] |= {"decoder": estimates.decoder}
    if design.pilot_devices:
        summary["parameters"] |= {"width": estimates.width}
    cost = Cost(
        devices=fleet.asked,
        rounds=design.rounds + (1 if design.pilot_devices else 0),
        bytes_per_device=bytes_per_device(replace(design, width=campaign.width)),
        seconds=0.0,
    )
    answer = _Answer(
        counts=estimates.counts,
        standard_error=estimates.standard_error,
        half_width=estimates.half_width,
        null=debias.Null(alone := float(np.min(estimates.standard_error))),
        null_error=alone,
        answered=campaign.answered,
        notes=[*_notes(planned, fleet.population, fleet.asked), *fleet.notes],
    )
    return _release(planned, answer, summary, cost, started)


def _ask_locally(
    planned: Plan,
    sized: LocalDesign,
    population: Population,
    rng: Rng,
    tell: Progress,
    started: float,
) -> Release:
    """Every device privatises its own items; a tally an epoch counts the records."""
    seed = int(rng.words(1)[0]) & LARGEST_INTEGER
    design = replace(sized, randomizer=in_epoch(sized.randomizer, 0, seed))
    held = sum(map(len, population.chunks))
    population = population.bounded(design.records_per_device, rng=rng)
    notes = []
    if (sent := sum(map(len, population.chunks))) < held:
        notes.append(
            f"devices hold {held:,} values and sent {sent:,} of them, drawn at random within each "
            f"device; counts are of what was sent"
        )
    cohorts = _cohorts(
        planned.study, [task.cohort for task in design.tasks()], design.devices, 0, population, seed
    )
    tallies, asked, answered = [], 0, 0
    for number, task in enumerate(design.tasks()):
        tally = Tally(task.randomizer)
        for shard in cohorts.shards(population, task.cohort):
            asked += shard.asked
            answered += shard.answering
            values = values_of(task.randomizer, shard.items, planned.asked_about)
            for part in _each_device(values, shard.weights):
                tally.fold(task.randomizer.randomize(part, rng=rng))
            tell(
                f"asking {task.cohort}",
                (number + min(asked / max(design.devices, 1), 1) % 1) / design.rounds,
            )
        tallies.append(tally)
    if not any(tally.count for tally in tallies):
        raise ImpossibleError("no device answered, so there is nothing to estimate from")
    tell("estimating", 1.0)
    found = local_estimates(tallies, planned.asked_about, aware=design.aware)
    summary = planned.summary()
    summary["parameters"] |= {
        "decoder": found.decoder,
        "unlisted": found.unlisted,
        "unlisted_error": found.unlisted_error,
    }
    answer = _Answer(
        counts=found.counts,
        standard_error=found.standard_error,
        half_width=NORMAL_95 * found.standard_error,
        null=found.null,
        null_error=found.null_error,
        answered=answered,
        notes=[*_notes(planned, population, asked), *notes],
    )
    cost = Cost(
        devices=asked,
        rounds=design.rounds,
        bytes_per_device=planned.predicted["bytes_per_device"],
        seconds=0.0,
    )
    return _release(planned, answer, summary, cost, started)


def _ask_for_words(
    planned: Plan,
    sized: WordDesign,
    population: Population,
    rng: Rng,
    tell: Progress,
    started: float,
) -> Release:
    """Devices send what they hold that is not in the dictionary of known words."""
    population = population.bounded(sized.records_per_device, rng=rng)
    seed = int(rng.words(1)[0]) & LARGEST_INTEGER
    search, known = seeded(sized.discoverer, seed), planned.dictionary
    cohorts = _cohorts(planned.study, ["everybody"], sized.devices, 0, population, seed)
    tallies, asked, sent, unfit = search.tallies(), 0, 0, 0
    for shard in cohorts.shards(population, "everybody"):
        asked += shard.asked
        codes, fits = search.codes(shard.items)
        new = fits if known is None else fits & (known.categories(shard.items) < 0)
        weights = None if shard.weights is None else shard.weights[new]
        unfit += int(np.sum(~fits if shard.weights is None else shard.weights[~fits]))
        for part in _each_device(codes[new], weights):
            sent += part.shape[0]
            search.fold(search.randomize(part, rng=rng), tallies)
        tell("asking everybody", min(asked / max(sized.devices, 1), 1.0))
    if any(tally.count == 0 for tally in tallies):
        raise ImpossibleError(f"{sent} devices sent a word: too few to find any")
    tell("finding words", 1.0)
    found = search.find(tallies)
    notes = _notes(planned, population, asked)
    if unfit:
        notes.append(
            f"{unfit:,} devices sent nothing: their word has characters not in the alphabet"
        )
    if found.left_out:
        notes.append(f"{found.left_out:,} parts of words were too many to put together")
    summary = planned.summary()
    summary["parameters"] |= {
        "reports": sent,
        "candidates": found.candidates,
        "significant_from": None if math.isinf(found.threshold) else found.threshold,
        "significance_level": debias.LEVEL,
    }
    return Release(
        items=found.words,
        counts=found.counts,
        standard_error=found.standard_error,
        half_width=NORMAL_95 * found.standard_error,
        significant=np.ones(len(found), dtype=np.bool_),
        privacy=planned.privacy,
        cost=Cost(
            devices=asked,
            rounds=1,
            bytes_per_device=planned.predicted["bytes_per_device"],
            seconds=time.perf_counter() - started,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=tuple(notes),
    )


def _each_device(values: npt.NDArray[Any], weights: I64 | None) -> Iterator[npt.NDArray[Any]]:
    """The values one by one, in pieces; a row of `weights` devices is as many values."""
    if weights is None:
        yield values
        return
    ends = np.cumsum(weights)
    for start in range(0, int(ends[-1]) if ends.size else 0, _PIECE):
        places = np.arange(start, min(start + _PIECE, int(ends[-1])))
        yield values[np.searchsorted(ends, places, side="right")]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What either way of asking gives, over the devices that answered."""

    counts: F64
    standard_error: F64
    half_width: F64
    null: debias.Null  # the law of an item that nobody holds
    null_error: F64 | float  # its deviation, item by item
    answered: int
    notes: list[str]


class _Fleet:
    """Answers for the devices: a task in, the batch of its cohort out."""

    def __init__(
        self,
        planned: Plan,
        sized: FrequencyDesign,
        population: Population,
        rng: Rng,
        engine: Engine,
        tell: Progress,
        books: Ledger | None,
    ) -> None:
        """With `books` the protocol of masked sums is run, and pays before it opens a sum."""
        public_seed = int(rng.words(1)[0]) & LARGEST_INTEGER
        self.planned, self.design = planned, replace(sized, seed=public_seed)
        population = population.bounded(sized.items_per_device, rng=rng)
        self.population, self.rng, self.engine, self.tell = population, rng, engine, tell
        self.books = books if sized.secure is not None else None
        self.notes: list[str] = []
        design = self.design
        names = [task.cohort for task in design.tasks()]
        self.cohorts = _cohorts(
            planned.study, names, design.devices, design.pilot_devices, population, design.seed
        )
        self.asked = 0
        self.tasks = 0

    def gather(self, task: Task) -> Batch:
        self.tell(f"asking {task.cohort}", self.tasks / len(self.cohorts.shares))
        self.tasks += 1
        answering = 0

        def shards() -> Iterator[Shard]:
            nonlocal answering
            for shard in self.cohorts.shards(self.population, task.cohort):
                self.asked += shard.asked
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
                f"asking {task.cohort}: {step}",
                (self.tasks - 1 + share) / len(self.cohorts.shares),
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
        values: Any = shard.items
        weights = shard.weights
        if self.design.mode == "one_hot":  # a device whose item is not listed sends zeros
            category = self.planned.asked_about.categories(shard.items)
            values, listed = category[category >= 0], category >= 0
            weights = None if weights is None else weights[listed]
        return contribute(task, values, devices=shard.answering, weights=weights, rng=self.rng)


def _planned(
    question: Plan | Study | Mapping[str, Any] | Path | str, population: Population
) -> Plan:
    """The plan itself, or one made for as many devices and, if need be, the items of the data."""
    if isinstance(question, Plan):
        return question
    if isinstance(question, Path | str):
        study = Study.load(question)
    else:
        study = question if isinstance(question, Study) else Study.from_mapping(question)
    if study.devices is None:
        study = replace(study, devices=population.devices)
    if study.dictionary is not None or study.question == "new_words":
        return plan(study)
    # A simulation may list what its devices hold; a real study cannot know that.
    planned = plan(study, items=pa.chunked_array(population.chunks).unique())
    return _qualified(planned, "the items listed were taken from the devices' own data")


def _qualified(promised: _Promised, exception: str) -> _Promised:
    """The same with an exception to its promise, where there is a promise."""
    privacy = promised.privacy
    if privacy.epsilon is None:
        return promised
    statement = f"{privacy.statement}; not covered: {exception}"
    return replace(promised, privacy=replace(privacy, statement=statement))


def _cohorts(
    study: Study,
    names: list[str],
    devices: int,
    pilot_devices: int,
    population: Population,
    seed: int,
) -> Cohorts:
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


def _release(
    planned: Plan, answer: _Answer, summary: dict[str, Any], cost: Cost, started: float
) -> Release:
    """Counts over all devices asked: those that did not answer are taken to be like those that did.

    What that adds to the error is the sampling of devices: a count c known from one device in s has
    a variance of c·(s − 1) from it.
    """
    scale = cost.devices / max(answer.answered, 1)
    counts = answer.counts * scale
    sampling = np.maximum(counts, 0) * (scale - 1)
    error = np.sqrt((scale * answer.standard_error) ** 2 + sampling)
    half = np.sqrt((scale * answer.half_width) ** 2 + NORMAL_95**2 * sampling)
    level = scale * answer.null.threshold(counts.size)
    significant = counts > level * answer.null_error / max(answer.null.error, _TINY)
    order = np.argsort(-counts, kind="stable")
    if planned.study.threshold is not None:
        order = order[counts[order] >= planned.study.threshold]
    if planned.study.publish == "significant":
        order = order[significant[order]]
    summary["parameters"] |= {"significant_from": level, "significance_level": debias.LEVEL}
    return Release(
        items=planned.asked_about.items.take(pa.array(order, type=pa.int64())),
        counts=counts[order],
        standard_error=error[order],
        half_width=half[order],
        significant=significant[order],
        privacy=planned.privacy,
        cost=replace(cost, seconds=time.perf_counter() - started),
        study=planned.study.to_dict(),
        plan=summary,
        notes=tuple(answer.notes),
    )


def _notes(planned: Plan, population: Population, asked: int) -> list[str]:
    notes = list(planned.warnings)
    held, wanted = population.devices, planned.design.devices
    if held < wanted:
        notes.append(f"the data holds {held:,} devices; the plan was made for {wanted:,}")
    elif held > wanted:
        notes.append(f"{asked:,} of the {held:,} devices in the data were asked, as planned")
    return notes

"""A population of devices driven through the same flow as real ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import DataError, StudyError
from sfumato.flow.campaign import run
from sfumato.flow.release import MeanRelease, Release, charge_reports
from sfumato.flow.task import Task
from sfumato.flow.word_discovery import no_words, seeded
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng, Tally
from sfumato.privacy.randomizers import in_epoch, no_item
from sfumato.questions import answers
from sfumato.questions import answers as open_answers
from sfumato.questions.answers import Asked
from sfumato.questions.frequencies.design import FrequencyCampaign, FrequencyDesign
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.local_frequencies.design import LocalDesign, values_of
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.prefix_search.design import PrefixCampaign, PrefixDesign
from sfumato.questions.registry import begun
from sfumato.simulation import mean as mean_simulation
from sfumato.simulation import open_domain as heavy_simulation
from sfumato.simulation import vectors
from sfumato.simulation.engines import Engine, LocalEngine
from sfumato.simulation.fleet import Asking, Knowledge, Progress, cohorts_for, cohorts_of
from sfumato.simulation.population import Data, Population
from sfumato.sketch.words import Codes
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_PIECE = 1 << 18  # devices that privatise together
_SEEDED = "this run's noise was drawn from a seed: who knows it can take the noise off"
_Promised = TypeVar("_Promised", Plan, Release, MeanRelease)
_Question = Plan | Study | Mapping[str, Any] | Path | str
_Vectors = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]


@overload
def simulate(
    question: _Question,
    data: _Vectors,
    *,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> MeanRelease: ...


@overload
def simulate(
    question: _Question,
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
) -> Release: ...


def simulate(
    question: _Question,
    data: Data | Population | _Vectors,
    *,
    item_column: str | None = None,
    device_column: str | None = None,
    count_column: str | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    protocol: bool = False,
    progress: Progress | None = None,
) -> Release | MeanRelease:
    """Ask a plan's question of the devices in `data`, through the same flow as real devices.

    A row is one device's item unless a device column groups rows; a count column makes a row that
    many devices (or, with a device column, that many values of the device). With a `seed` the run
    repeats exactly, its noise included, so it is for study and never for a real release.

    The data of a mean is an array (devices, dimensions), a vector a device; `vectors.load` reads
    one from a file.

    Tables are made and added many at a time, since a sum is the same, masked or not. With
    `protocol` every device answers by itself, message by message, as it would over a network: one
    to forty milliseconds a device. It then draws its coins and noise by chance of its own, so that
    devices of a `NetworkFleet` with the same seed send the same tables. Under trust "local" they
    answer by themselves anyway, and `protocol` changes nothing.

    >>> release = simulate(
    ...     {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6},
    ...     {"item": ["oak"] * 600 + ["elm"] * 300}, seed=1)
    >>> release.items.to_pylist()
    ['oak', 'elm']
    """
    started = time.perf_counter()
    tell = progress or (lambda stage, share: None)
    tell("reading", 0.0)
    rng: Rng = SystemRng() if seed is None else SeededRng(seed)
    asked = question if isinstance(question, Plan) else _study(question)
    study = asked.study if isinstance(asked, Plan) else asked
    if study.question == "train":
        raise StudyError(
            "a model is trained by sfumato.simulation.train.train, or `sfumato train` on the "
            "command line"
        )
    is_mean, is_array = study.question == "mean", isinstance(data, np.ndarray)
    if is_mean != is_array and (is_mean or getattr(data, "ndim", 1) > 1):  # a row of items is fine
        raise DataError(
            "a mean, and nothing else, is of vectors in an array (devices, dimensions); the "
            f"question is {study.question}",
            hint="sfumato.simulation.vectors.load reads an array from a file",
        )
    columns = {"item": item_column, "device": device_column, "count": count_column}
    if is_mean and isinstance(data, np.ndarray):
        if any(columns.values()):
            raise DataError("an array of vectors has no columns of items, devices or counts")
        mean = _ask_for_mean(
            asked, vectors.checked(data), rng, seed, engine, tell, ledger, protocol, started
        )
        return mean if seed is None else _qualified(mean, _SEEDED)
    population = (
        data
        if isinstance(data, Population)
        else Population.load(data, **{f"{role}_column": name for role, name in columns.items()})
    )
    tell("planning", 0.0)
    planned = _planned(asked, population)
    if isinstance(planned.design, WordDesign):
        release = _ask_for_words(planned, planned.design, population, rng, tell, started, ledger)
    elif isinstance(planned.design, LocalDesign):
        release = _ask_locally(planned, planned.design, population, rng, tell, started, ledger)
    else:
        books = ledger or Ledger(Budget(epsilon=planned.study.epsilon, delta=planned.study.delta))
        ask = Asking(population, rng, engine or LocalEngine(), tell, books, protocol, started, seed)
        if isinstance(planned.design, FrequencyDesign):
            release = _ask_for_sums(planned, planned.design, ask)
        else:
            release = _ask_for_lists(planned, ask)
    release = replace(release, notes=(*release.notes, *_bounding(planned, population)))
    return release if seed is None else _qualified(release, _SEEDED)


def _bounding(planned: Plan, population: Population) -> tuple[str, ...]:
    """The note that devices report only part of what they hold, if they may hold several values."""
    limit = planned.contributions
    return () if limit is None or population.owners is None else (answers.bounding(limit),)


def _ask_for_mean(
    asked: Plan | Study,
    held: npt.NDArray[np.floating[Any]],
    rng: Rng,
    seed: int | None,
    engine: Engine | None,
    tell: Progress,
    ledger: Ledger | None,
    protocol: bool,
    started: float,
) -> MeanRelease:
    population = mean_simulation.holders(held)
    tell("planning", 0.0)
    if isinstance(asked, Study):
        devices, dimensions = asked.devices, asked.dimensions
        asked = plan(
            replace(
                asked,
                devices=devices or population.devices,
                dimensions=dimensions or held.shape[1],
            )
        )
    books = ledger or Ledger(Budget(epsilon=asked.study.epsilon, delta=asked.study.delta))
    one = LocalEngine(workers=1)  # so that noise in shares is drawn in one order
    ask = Asking(population, rng, engine or one, tell, books, protocol, started, seed)
    return mean_simulation.ask(asked, held, ask)


def _ask_for_sums(planned: Plan, sized: FrequencyDesign, ask: Asking) -> Release:
    design, _ = begun(sized, ask.rng)
    population = ask.bounded(design.items_per_device)
    cohorts = cohorts_for(planned.study, design, population, exact=ask.protocol)

    def values(task: Task, items: pa.Array) -> tuple[Any, Bool | None]:
        if design.mode != "one_hot":
            return items, None
        category = planned.asked_about.categories(items)  # who holds none of them sends zeros
        return category[category >= 0], category >= 0

    listed = planned.asked_about.items.to_pylist()
    knowledge = Knowledge(design, {item: place for place, item in enumerate(listed)})
    fleet = ask.fleet(population, cohorts, values, knowledge, tasks=len(cohorts.shares))
    campaign = FrequencyCampaign(design, planned.asked_about.items)
    run(campaign, fleet.gather, ledger=ask.books, rng=ask.rng)
    ask.tell("estimating", 1.0)
    asked = Asked(
        devices=fleet.asked,
        rounds=design.rounds + (1 if design.pilot_devices else 0),
        notes=(*_notes(planned, population, fleet.asked), *fleet.notes),
    )
    release = answers.from_sums(planned, campaign, asked)
    return answers.timed(release, time.perf_counter() - ask.started)


def _ask_for_lists(planned: Plan, ask: Asking) -> Release:
    """An open domain: devices send what the design has keys for, each item once."""
    design = planned.design
    assert isinstance(design, HeavyHitterDesign | HistogramDesign | PrefixDesign)  # as was seen
    outcome = heavy_simulation.ask(planned.study, design, ask)
    asked = Asked(
        devices=outcome.asked,
        rounds=planned.predicted["rounds"],
        notes=(*_notes(planned, ask.population, outcome.asked), *outcome.notes),
    )
    release = (
        open_answers.from_prefixes(planned, outcome.campaign, asked)
        if isinstance(outcome.campaign, PrefixCampaign)
        else open_answers.from_list(planned, outcome.campaign, asked)
    )
    return answers.timed(release, time.perf_counter() - ask.started)


def _ask_locally(
    planned: Plan,
    sized: LocalDesign,
    population: Population,
    rng: Rng,
    tell: Progress,
    started: float,
    ledger: Ledger | None,
) -> Release:
    """Every device privatises its own items; a tally an epoch counts the records."""
    seed = int(rng.words(1)[0]) & LARGEST_INTEGER
    design = replace(sized, randomizer=in_epoch(sized.randomizer, 0, seed))
    if ledger is not None:
        for task in design.tasks():
            charge_reports(task, ledger=ledger)
    population = population.bounded(design.records_per_device, rng=rng)
    cohorts = cohorts_of(
        planned.study, [task.cohort for task in design.tasks()], design.devices, 0, population, seed
    )
    tallies, asked, answered = [], 0, 0
    for number, task in enumerate(design.tasks()):
        tally = Tally(task.randomizer)
        for shard in cohorts.shards(population, task.cohort):
            asked += shard.asked
            answered += shard.answering
            values = values_of(task.randomizer, shard.items, planned.asked_about)
            none, records = no_item(task.randomizer), shard.answering * design.records_per_device
            for part in _each_record(values, shard.weights, none, records):
                tally.fold(task.randomizer.randomize(part, rng=rng))
            tell(
                f"asking {task.cohort}",
                (number + min(asked / max(design.devices, 1), 1) % 1) / design.rounds,
            )
        tallies.append(tally)
    tell("estimating", 1.0)
    whom = Asked(
        devices=asked, rounds=design.rounds, notes=tuple(_notes(planned, population, asked))
    )
    release = answers.from_tallies(planned, tallies, whom, answered=answered)
    return answers.timed(release, time.perf_counter() - started)


def _ask_for_words(
    planned: Plan,
    sized: WordDesign,
    population: Population,
    rng: Rng,
    tell: Progress,
    started: float,
    ledger: Ledger | None,
) -> Release:
    """Devices send what they hold that is not in the dictionary of known words, and "none" where
    that is too little: each sends as many records, whatever it holds."""
    search, known = sized.discoverer, planned.dictionary

    def said(items: pa.Array) -> Codes:
        """What devices with these items have to say, which may be "none"."""
        codes, _ = search.codes(items)
        if known is not None:
            codes[known.categories(items) >= 0] = 0
        return codes

    if population.owners is not None:  # who holds several words chooses among the new ones
        new = np.flatnonzero(said(population.chunks[0])[:, 0])
        population = population.only(new, population.chunks[0].take(pa.array(new)))
        population = population.bounded(sized.records_per_device, rng=rng)
    seed = int(rng.words(1)[0]) & LARGEST_INTEGER
    search = seeded(search, seed)
    if ledger is not None:
        charge_reports(replace(sized, discoverer=search).task(), ledger=ledger)
    cohorts = cohorts_of(planned.study, ["everybody"], sized.devices, 0, population, seed)
    tallies, asked, sent = search.tallies(), 0, 0
    for shard in cohorts.shards(population, "everybody"):
        asked += shard.asked
        records = shard.answering * sized.records_per_device
        for part in _each_record(said(shard.items), shard.weights, no_words(search, 1), records):
            search.fold(search.randomize(part, rng=rng), tallies)
        sent += records
        tell("asking everybody", min(asked / max(sized.devices, 1), 1.0))
    tell("finding words", 1.0)
    whom = Asked(devices=asked, rounds=1, notes=tuple(_notes(planned, population, asked)))
    release = answers.from_words(planned, search, tallies, whom, sent=sent)
    return answers.timed(release, time.perf_counter() - started)


def _each_record(
    values: npt.NDArray[Any], weights: I64 | None, none: npt.NDArray[Any], records: int
) -> Iterator[npt.NDArray[Any]]:
    """What so many records say, in pieces: the values one by one, a row of `weights` devices being
    as many, and then `none`, (1, ...), for devices that hold fewer values than they send."""
    ends = np.cumsum(np.ones(len(values), dtype=np.int64) if weights is None else weights)
    held = int(ends[-1]) if ends.size else 0
    for start in range(0, held, _PIECE):
        places = np.arange(start, min(start + _PIECE, held))
        yield values[np.searchsorted(ends, places, side="right")]
    for start in range(held, records, _PIECE):
        yield np.repeat(none, min(_PIECE, records - start), axis=0)


def _planned(study: Plan | Study, population: Population) -> Plan:
    """The plan itself, or one made for as many devices and, if need be, the items of the data."""
    if isinstance(study, Plan):
        return study
    if study.devices is None:
        study = replace(study, devices=population.devices)
    if study.dictionary is not None or study.question != "frequencies":
        return plan(study)
    # A simulation may list what its devices hold; a real study cannot know that.
    planned = plan(study, items=pa.chunked_array(population.chunks).unique())
    return _qualified(planned, "the items listed were taken from the devices' own data")


def _study(question: Study | Mapping[str, Any] | Path | str) -> Study:
    if isinstance(question, Path | str):
        return Study.load(question)
    return question if isinstance(question, Study) else Study.from_mapping(question)


def _qualified(promised: _Promised, exception: str) -> _Promised:
    """The same with an exception to its promise, where there is a promise."""
    return replace(promised, privacy=promised.privacy.but_for(exception))


def _notes(planned: Plan, population: Population, asked: int) -> list[str]:
    notes = list(planned.warnings)
    held, wanted = population.devices, planned.design.devices
    if held < wanted:
        notes.append(f"the data holds {held:,} devices; the plan was made for {wanted:,}")
    elif held > wanted:
        notes.append(f"{asked:,} of the {held:,} devices in the data were asked, as planned")
    return notes

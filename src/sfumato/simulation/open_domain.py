"""Questions about an open domain, asked of simulated devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.flow.campaign import run
from sfumato.flow.task import Task
from sfumato.privacy.samplers import SecretRng
from sfumato.questions.heavy_hitters.design import (
    HeavyHitterCampaign,
    HeavyHitterDesign,
    HistogramCampaign,
    HistogramDesign,
)
from sfumato.questions.prefix_search.design import PrefixCampaign, PrefixDesign
from sfumato.questions.registry import begun
from sfumato.simulation.fleet import Asking, Knowledge, cohorts_for
from sfumato.simulation.population import Population
from sfumato.sketch import Keys, WordKeys
from sfumato.sketch.words import codes_of
from sfumato.study import Study

Bool = npt.NDArray[np.bool_]
OpenDesign = HeavyHitterDesign | HistogramDesign | PrefixDesign


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """A campaign that is over, how many devices it asked, and what there is to say about that."""

    campaign: HeavyHitterCampaign | HistogramCampaign | PrefixCampaign
    asked: int
    notes: list[str]


def ask(study: Study, design: OpenDesign, asking: Asking) -> Outcome:
    """Ask the population, bounded to what a device may send."""
    if isinstance(design, PrefixDesign):
        return _by_prefixes(study, design, asking)
    return _by_lists(study, design, asking)


def _by_lists(study: Study, sized: HeavyHitterDesign | HistogramDesign, asking: Asking) -> Outcome:
    design, secret = begun(sized, asking.rng)
    names = design.names if isinstance(design, HistogramDesign) else design
    population, notes = _sendable(study, asking, names.keys, names.items_per_device)
    cohorts = cohorts_for(study, design, population, exact=asking.protocol)

    def values(task: Task, items: pa.Array) -> tuple[Any, Bool]:
        numbers, fits = names.keys.numbers(items)
        return names.keys.items(numbers[fits])[0], fits  # cut, where words are

    halves = 2 if isinstance(design, HistogramDesign) else 1
    fleet = asking.fleet(
        population, cohorts, values, Knowledge(design), tasks=halves * names.rounds
    )
    # Counts are scaled up to all that are asked; the threshold is on those, so it comes down.
    least = (study.threshold or 0.0) * (1 - study.dropout)
    campaign: HeavyHitterCampaign | HistogramCampaign
    gather, books, rng = fleet.gather, asking.books, asking.rng
    if isinstance(design, HistogramDesign):
        campaign = HistogramCampaign(design, SecretRng(secret), least=least)
        run(campaign, gather, ledger=books, rng=rng, charge_of=design.charge_of)
    else:
        campaign = HeavyHitterCampaign(names, SecretRng(secret), least=least)
        run(campaign, gather, ledger=books, rng=rng)
    return Outcome(campaign=campaign, asked=fleet.asked, notes=[*notes, *fleet.notes])


def _by_prefixes(study: Study, sized: PrefixDesign, asking: Asking) -> Outcome:
    design, _ = begun(sized, asking.rng)
    keys = WordKeys(alphabet=design.alphabet, length=design.lengths[-1])
    population, notes = _sendable(study, asking, keys, 1)
    cohorts = cohorts_for(study, design, population, exact=asking.protocol)
    levels = {task.id: level for level, task in enumerate(design.tasks())}

    def values(task: Task, items: pa.Array) -> tuple[Any, Bool]:
        codes, fits = codes_of(items, design.alphabet, design.lengths[-1])
        return design.values(levels[task.id], codes[fits]), fits

    fleet = asking.fleet(population, cohorts, values, Knowledge(design), tasks=len(design.lengths))
    campaign = PrefixCampaign(design)
    books, rng = asking.books, asking.rng
    run(campaign, fleet.gather, ledger=books, rng=rng, charge_of=design.charge_of)
    return Outcome(campaign=campaign, asked=fleet.asked, notes=[*notes, *fleet.notes])


def _sendable(study: Study, asking: Asking, keys: Keys, limit: int) -> tuple[Population, list[str]]:
    """Devices with what they may send: items that have a key, each once, at most `limit`."""
    population = asking.population
    # Of a private release it is always said, and not how many, so that it says nothing.
    unfit = _without_key(population, keys) if study.epsilon is None else None
    many = "items" if unfit is None else f"{unfit:,} items"
    notes = [
        f"{many} without a key are not sent: longer than the study allows, or with characters not "
        f"in its alphabet"
    ]
    if unfit == 0:
        notes = []
    if population.owners is None or asking.protocol:  # devices then choose by themselves
        return population, notes
    numbers, fits = keys.numbers(population.chunks[0])
    kept = np.flatnonzero(fits)
    items = keys.items(numbers[kept])[0]  # items with one key are one item
    distinct = population.only(kept, items).distinct().bounded(limit, rng=asking.rng)
    return distinct, notes


def _without_key(population: Population, keys: Keys) -> int:
    """Items of devices that cannot be sent."""
    fits = [keys.numbers(items)[1] for items in population.chunks]
    if population.weights is None:
        return sum(int((~part).sum()) for part in fits)
    return sum(int(w[~part].sum()) for part, w in zip(fits, population.weights, strict=True))

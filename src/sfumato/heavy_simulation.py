"""Questions about an open domain, asked of simulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.campaign import run
from sfumato.fleet import Asking, cohorts_of
from sfumato.frequencies import FrequencyCampaign
from sfumato.heavy_hitters import (
    HeavyHitterCampaign,
    HeavyHitterDesign,
    HistogramDesign,
)
from sfumato.population import Population
from sfumato.prefix_search import EVERYBODY, PrefixCampaign, PrefixDesign
from sfumato.sketch import Keys, WordKeys
from sfumato.study import Study
from sfumato.task import Task
from sfumato.words import codes_of

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
OpenDesign = HeavyHitterDesign | HistogramDesign | PrefixDesign


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OpenAnswer:
    """Items that were found, counted over the devices that answered."""

    items: pa.Array
    counts: F64
    standard_error: F64
    half_width: F64
    asked: int
    answered: int
    parameters: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)


def ask(study: Study, design: OpenDesign, asking: Asking) -> OpenAnswer:
    """Ask the population, bounded to what a device may send, and tell what may be told."""
    if isinstance(design, PrefixDesign):
        return _by_prefixes(study, design, asking)
    names = design.names if isinstance(design, HistogramDesign) else design
    names = replace(names, seed=asking.public_seed())
    population, notes = _sendable(study, asking, names.keys, names.items_per_device)
    cohorts = cohorts_of(
        study,
        [f"round {round}" for round in range(names.rounds)],
        names.devices,
        0,
        population,
        names.seed,
    )

    def values(task: Task, items: pa.Array) -> tuple[Any, Bool]:
        numbers, fits = names.keys.numbers(items)
        return names.keys.items(numbers[fits])[0], fits  # cut, where words are

    halves = 2 if isinstance(design, HistogramDesign) else 1
    fleet = asking.fleet(study, population, cohorts, values, tasks=halves * names.rounds)
    # Counts are scaled up to all that are asked; the threshold is on those, so it comes down.
    least = (study.threshold or 0.0) * (1 - study.dropout)
    campaign = HeavyHitterCampaign(names, asking.rng, least=least)
    run(campaign, fleet.gather, ledger=asking.books, rng=asking.rng)
    found = campaign.found()
    items, counts, error, half = found.items, found.counts, found.standard_error, found.half_width
    answered = found.answered
    parameters: dict[str, Any] = {
        "detectable_count": found.detectable,
        "sampling_rate": found.rate,
        "rounds_not_listed": found.unread,
    }
    if names.partial:
        parameters |= {"listed_share": found.listed}
    if isinstance(design, HistogramDesign) and len(items):
        counted = replace(design.counts, seed=asking.public_seed())
        counting = FrequencyCampaign(counted, items)
        run(counting, fleet.gather, ledger=asking.books, rng=asking.rng)
        read = counting.estimates()
        order = np.argsort(-read.counts, kind="stable")
        items = items.take(pa.array(order))
        counts, error, half = (
            part[order] for part in (read.counts, read.standard_error, read.half_width)
        )
        answered = counting.answered
        parameters |= {"counts_decoder": read.decoder}
    scale = fleet.asked / max(found.answered, 1)
    notes.append(
        f"an item that {round(scale * found.detectable):,} or more of the {fleet.asked:,} devices "
        f"hold is listed with a probability of 95%; rarer ones may be missing"
    )
    if found.unread:
        notes.append(_unread(campaign, found.unread))
    return OpenAnswer(
        items=items,
        counts=counts,
        standard_error=error,
        half_width=half,
        asked=fleet.asked,
        answered=answered,
        parameters=parameters,
        notes=[*notes, *fleet.notes],
    )


def _unread(campaign: HeavyHitterCampaign, unread: int) -> str:
    """What to do about tables that were too full; the promise does not allow to say how full."""
    design = campaign.design
    advice = "give more bytes_per_device"
    if design.rounds > 1:
        advice += ", or more rounds"
    return (
        f"{unread} of {design.rounds} tables could not be listed whole, and nothing is told of "
        f"them; {advice}"
    )


def _by_prefixes(study: Study, sized: PrefixDesign, asking: Asking) -> OpenAnswer:
    design = replace(sized, seed=asking.public_seed())
    keys = WordKeys(alphabet=design.alphabet, length=design.lengths[-1])
    population, notes = _sendable(study, asking, keys, 1)
    cohorts = cohorts_of(study, [EVERYBODY], design.devices, 0, population, design.seed)
    levels = {task.id: level for level, task in enumerate(design.tasks())}

    def values(task: Task, items: pa.Array) -> tuple[Any, Bool]:
        codes, fits = codes_of(items, design.alphabet, design.lengths[-1])
        return design.values(levels[task.id], codes[fits]), fits

    fleet = asking.fleet(study, population, cohorts, values, tasks=len(design.lengths))
    campaign = PrefixCampaign(design)
    run(campaign, fleet.gather, ledger=asking.books, rng=asking.rng)
    found = campaign.found()
    scale = fleet.asked / max(found.answered, 1)
    notes.append(
        f"a word that {round(scale * found.detectable):,} or more of the {fleet.asked:,} devices "
        f"hold is listed with a probability of 95%; rarer ones may be missing"
    )
    if found.left_out:
        notes.append(f"{found.left_out:,} prefixes were too many to be carried on")
    return OpenAnswer(
        items=found.items,
        counts=found.counts,
        standard_error=found.standard_error,
        half_width=found.half_width,
        asked=fleet.asked,
        answered=found.answered,
        parameters={"detectable_count": found.detectable, "candidates": found.candidates},
        notes=[*notes, *fleet.notes],
    )


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
    if population.owners is None:
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

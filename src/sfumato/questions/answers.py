"""From what was collected to a release, whoever collected it: a simulation or a service.

Counts are over all devices asked: those that did not answer are taken to be like those that did.
What that adds to the error is the sampling of devices: a count c known from one device in s has a
variance of c·(s − 1) from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import ImpossibleError
from sfumato.flow.release import NORMAL_95, Cost, MeanRelease, ModelRelease, Release
from sfumato.flow.task import Task
from sfumato.flow.word_discovery import Discoverer
from sfumato.privacy import Tally, debias
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.frequencies.plan import bytes_per_device
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramCampaign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.local_frequencies.design import estimates as local_estimates
from sfumato.questions.mean.design import MeanCampaign
from sfumato.questions.mean.plan import weights
from sfumato.questions.prefix_search.design import PrefixCampaign
from sfumato.questions.question import Plan

F64 = npt.NDArray[np.float64]

Costed = TypeVar("Costed", bound=Release | MeanRelease | ModelRelease)

_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whom the answers come from, and what there is to say about it."""

    devices: int  # asked, whether they answered or not
    rounds: int
    notes: tuple[str, ...] = ()


def from_sums(planned: Plan, campaign: FrequencyCampaign, asked: Asked) -> Release:
    """The release of a campaign that has absorbed its answers."""
    found = campaign.estimates()
    parameters: dict[str, Any] = {"decoder": found.decoder}
    if campaign.design.pilot_devices:
        parameters |= {"width": found.width}
    alone = float(np.min(found.standard_error))
    answer = _Answer(
        counts=found.counts,
        standard_error=found.standard_error,
        half_width=found.half_width,
        null=debias.Null(alone),
        null_error=alone,
        answered=campaign.answered,
        bytes_per_device=bytes_per_device(replace(campaign.design, width=campaign.width)),
        parameters=parameters,
    )
    return _release(planned, answer, asked)


def from_tallies(
    planned: Plan, tallies: Sequence[Tally], asked: Asked, *, answered: int
) -> Release:
    """The release of a local study, from a tally an epoch; `answered` devices are behind them."""
    assert isinstance(planned.design, LocalDesign)  # nothing else has tallies of known items
    if not any(tally.count for tally in tallies):
        raise ImpossibleError("no device answered, so there is nothing to estimate from")
    found = local_estimates(tallies, planned.asked_about, aware=planned.design.aware)
    answer = _Answer(
        counts=found.counts,
        standard_error=found.standard_error,
        half_width=NORMAL_95 * found.standard_error,
        null=found.null,
        null_error=found.null_error,
        answered=answered,
        bytes_per_device=planned.predicted["bytes_per_device"],
        parameters={
            "decoder": found.decoder,
            "unlisted": found.unlisted,
            "unlisted_error": found.unlisted_error,
        },
    )
    return _release(planned, answer, asked)


def from_words(
    planned: Plan, search: Discoverer, tallies: list[Tally], asked: Asked, *, sent: int
) -> Release:
    """The release of a search for new words, to which `sent` records came."""
    if any(tally.count == 0 for tally in tallies):
        raise ImpossibleError(f"{sent:,} records came: too few to find any word")
    found = search.find(tallies)
    notes = list(asked.notes)
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
            devices=asked.devices,
            rounds=asked.rounds,
            bytes_per_device=planned.predicted["bytes_per_device"],
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=tuple(notes),
    )


def timed(release: Costed, seconds: float) -> Costed:
    """The same with the time it took on its bill."""
    return replace(release, cost=replace(release.cost, seconds=seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What either way of asking about known items gives, over the devices that answered."""

    counts: F64
    standard_error: F64
    half_width: F64
    null: debias.Null  # the law of an item that nobody holds
    null_error: F64 | float  # its deviation, item by item
    answered: int
    bytes_per_device: int
    parameters: dict[str, Any]


def _release(planned: Plan, answer: _Answer, asked: Asked) -> Release:
    """Counts over all devices asked; see the module."""
    scale = asked.devices / max(answer.answered, 1)
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
    summary = planned.summary()
    summary["parameters"] |= answer.parameters
    summary["parameters"] |= {"significant_from": level, "significance_level": debias.LEVEL}
    return Release(
        items=planned.asked_about.items.take(pa.array(order, type=pa.int64())),
        counts=counts[order],
        standard_error=error[order],
        half_width=half[order],
        significant=significant[order],
        privacy=planned.privacy,
        cost=Cost(
            devices=asked.devices,
            rounds=asked.rounds,
            bytes_per_device=answer.bytes_per_device,
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=asked.notes,
    )


def from_list(
    planned: Plan, campaign: HeavyHitterCampaign | HistogramCampaign, asked: Asked
) -> Release:
    """The release of a campaign that lists what many hold, and may have counted it again."""
    counting = campaign.counting if isinstance(campaign, HistogramCampaign) else None
    names = campaign.names if isinstance(campaign, HistogramCampaign) else campaign
    found = names.found()
    items, counts, error, half = found.items, found.counts, found.standard_error, found.half_width
    answered = found.answered
    parameters: dict[str, Any] = {
        "detectable_count": found.detectable,
        "sampling_rate": found.rate,
        "rounds_not_listed": found.unread,
    }
    if names.design.partial:
        parameters |= {"listed_share": found.listed}
    if counting is not None:
        read = counting.estimates()
        order = np.argsort(-read.counts, kind="stable")
        items = items.take(pa.array(order))
        counts, error, half = (
            part[order] for part in (read.counts, read.standard_error, read.half_width)
        )
        answered = counting.answered
        parameters |= {"counts_decoder": read.decoder}
    notes = [_detectable("an item", found.detectable, asked, found.answered)]
    if found.unread:
        notes.append(_unread(names, found.unread))
    return _listed_release(planned, items, counts, error, half, answered, parameters, notes, asked)


def from_prefixes(planned: Plan, campaign: PrefixCampaign, asked: Asked) -> Release:
    """The release of a search by prefixes that has come to its end."""
    found = campaign.found()
    notes = [_detectable("a word", found.detectable, asked, found.answered)]
    if found.left_out:
        notes.append(f"{found.left_out:,} prefixes were too many to be carried on")
    return _listed_release(
        planned,
        found.items,
        found.counts,
        found.standard_error,
        found.half_width,
        found.answered,
        {"detectable_count": found.detectable, "candidates": found.candidates},
        notes,
        asked,
    )


def from_mean(
    planned: Plan, campaign: MeanCampaign, asked: Asked, tasks: Sequence[Task]
) -> MeanRelease:
    """The release of a mean, for which devices were asked these tasks."""
    found = campaign.estimate()
    summary = planned.summary()
    summary["parameters"] |= {"cells": found.cells, "compressed": found.compressed}
    notes = list(asked.notes)
    if not found.settled:
        notes.append(
            "the last round still erred by more than its noise explains; adapt_norm would do better"
        )
    if found.answered < asked.devices:
        notes.append(
            f"{found.answered:,} of {asked.devices:,} devices answered; the others are taken to be "
            "like them"
        )
    return MeanRelease(
        mean=found.mean,
        standard_error=found.standard_error,
        privacy=planned.privacy,
        cost=Cost(
            devices=asked.devices,
            rounds=found.rounds,
            bytes_per_device=weights(list(tasks))["bytes_per_device"],
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=tuple(notes),
    )


def _listed_release(
    planned: Plan,
    items: pa.Array,
    counts: F64,
    standard_error: F64,
    half_width: F64,
    answered: int,
    parameters: dict[str, Any],
    notes: list[str],
    asked: Asked,
) -> Release:
    summary = planned.summary()
    summary["parameters"] |= parameters
    scale = asked.devices / max(answered, 1)
    counts = counts * scale
    sampling = np.maximum(counts, 0) * (scale - 1)
    error = np.sqrt((scale * standard_error) ** 2 + sampling)
    half = np.sqrt((scale * half_width) ** 2 + NORMAL_95**2 * sampling)
    kept = np.flatnonzero(counts >= (planned.study.threshold or 0.0))
    return Release(
        items=items.take(pa.array(kept)),
        counts=counts[kept],
        standard_error=error[kept],
        half_width=half[kept],
        significant=np.ones(kept.size, dtype=np.bool_),
        privacy=planned.privacy,
        cost=Cost(
            devices=asked.devices,
            rounds=planned.predicted["rounds"],
            bytes_per_device=planned.predicted["bytes_per_device"],
            seconds=0.0,
        ),
        study=planned.study.to_dict(),
        plan=summary,
        notes=(*asked.notes, *notes),
    )


def _detectable(what: str, count: float, asked: Asked, answered: int) -> str:
    scale = asked.devices / max(answered, 1)
    return (
        f"{what} that {round(scale * count):,} or more of the {asked.devices:,} devices hold is "
        f"listed with a probability of 95%; rarer ones may be missing"
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

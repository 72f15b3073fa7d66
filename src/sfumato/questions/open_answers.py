"""From a campaign over an open domain, or for a mean, to its release, whoever asked the devices.

As in `answers`, counts are over all devices asked: those that did not answer are taken to be like
those that did, and what that adds to the error is the sampling of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.flow.release import NORMAL_95, Cost, Release
from sfumato.flow.task import Task
from sfumato.questions.answers import Asked
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramCampaign
from sfumato.questions.mean.design import MeanCampaign, MeanRelease
from sfumato.questions.mean.plan import weights
from sfumato.questions.prefix_search.design import PrefixCampaign
from sfumato.questions.question import Plan

F64 = npt.NDArray[np.float64]


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
    return _release(planned, items, counts, error, half, answered, parameters, notes, asked)


def from_prefixes(planned: Plan, campaign: PrefixCampaign, asked: Asked) -> Release:
    """The release of a search by prefixes that has come to its end."""
    found = campaign.found()
    notes = [_detectable("a word", found.detectable, asked, found.answered)]
    if found.left_out:
        notes.append(f"{found.left_out:,} prefixes were too many to be carried on")
    return _release(
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


def _release(
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

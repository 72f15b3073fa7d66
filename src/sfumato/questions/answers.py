"""From what was collected to a release, whoever collected it: a simulation or a service.

Counts are over all devices asked: those that did not answer are taken to be like those that did.
What that adds to the error is the sampling of devices, which `privacy.intervals` reckons with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import ImpossibleError
from sfumato.flow.release import Cost, MeanRelease, ModelRelease, Privacy, Release
from sfumato.flow.task import Task
from sfumato.flow.word_discovery import Discoverer
from sfumato.privacy import Tally, debias
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.frequencies.plan import bytes_per_device
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HistogramCampaign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.local_frequencies.design import estimates as local_estimates
from sfumato.questions.local_frequencies.plan import shuffled
from sfumato.questions.mean.design import MeanCampaign
from sfumato.questions.mean.plan import weights
from sfumato.questions.prefix_search.design import PrefixCampaign
from sfumato.questions.promise import TIME
from sfumato.questions.question import Plan

F64 = npt.NDArray[np.float64]

Costed = TypeVar("Costed", bound=Release | MeanRelease | ModelRelease)


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
    significant, limit = campaign.significant()
    answer = _Answer(
        counts=found.counts,
        standard_error=found.standard_error,
        interval=lambda above: found.interval(max(asked.devices, found.answered), above=above),
        significant=significant,
        significant_from=limit,
        answered=found.answered,
        privacy=planned.privacy,
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
    per_device = planned.design.records_per_device
    answer = _Answer(
        counts=found.counts,
        standard_error=found.standard_error,
        interval=lambda above: found.interval(
            asked=max(asked.devices, answered),
            answered=answered,
            per_device=per_device,
            above=above,
        ),
        significant=found.counts > found.thresholds(),
        significant_from=found.null.threshold(found.counts.size),
        answered=answered,
        privacy=shuffled(
            planned.privacy, [tally.count for tally in tallies], planned.study.delta, per_device
        ),
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
    per_device = planned.contributions or 1
    scale = max(asked.devices * per_device / max(sent, 1), 1.0)
    low, high = found.interval(asked.devices * per_device)
    notes = list(asked.notes)
    if found.left_out:
        notes.append(f"{found.left_out:,} parts of words were too many to put together")
    summary = planned.summary()
    summary["parameters"] |= {
        "reports": sent,
        "candidates": found.candidates,
        "significant_from": None if math.isinf(found.threshold) else scale * found.threshold,
        "significance_level": debias.LEVEL,
    }
    return Release(
        items=found.words,
        counts=scale * found.counts,
        standard_error=_with_sampling(found.standard_error, scale * found.counts, scale),
        low=low,
        high=high,
        significant=np.ones(len(found), dtype=np.bool_),
        privacy=shuffled(planned.privacy, [sent], planned.study.delta, per_device),
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


def bounding(contributions: int) -> str:
    """What a count is of, where devices may hold more than they report."""
    values = "one value" if contributions == 1 else f"at most {contributions:,} values"
    return (
        f"a device reports {values}, drawn at random among those it holds: counts are of what "
        "devices report, not of all devices that hold an item"
    )


def timed(release: Costed, seconds: float) -> Costed:
    """The same with the time it took on its bill, which no promise is about."""
    return replace(
        release,
        cost=replace(release.cost, seconds=seconds),
        privacy=release.privacy.but_for(TIME),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What either way of asking about known items gives, over the devices that answered."""

    counts: F64
    standard_error: F64
    interval: Callable[[float | None], tuple[F64, F64]]  # over all asked, of what is shown from
    significant: npt.NDArray[np.bool_]
    significant_from: float
    answered: int
    privacy: Privacy
    bytes_per_device: int
    parameters: dict[str, Any]


def _release(planned: Plan, answer: _Answer, asked: Asked) -> Release:
    """Counts over all devices asked; see the module."""
    scale = asked.devices / max(answer.answered, 1)
    counts = answer.counts * scale
    error = _with_sampling(answer.standard_error, counts, scale)
    significant, above = answer.significant, list[float]()
    order = np.argsort(-counts, kind="stable")
    if planned.study.threshold is not None:
        order = order[counts[order] >= planned.study.threshold]
        above.append(planned.study.threshold / scale)
    if planned.study.publish == "significant":
        order = order[significant[order]]
        above.append(answer.significant_from)
    low, high = answer.interval(max(above, default=None))
    summary = planned.summary()
    summary["parameters"] |= answer.parameters
    summary["parameters"] |= {
        "significant_from": scale * answer.significant_from,
        "significance_level": debias.LEVEL,
    }
    return Release(
        items=planned.asked_about.items.take(pa.array(order, type=pa.int64())),
        counts=counts[order],
        standard_error=error[order],
        low=np.minimum(low, counts)[order],  # an estimate may be outside of what is possible
        high=np.maximum(high, counts)[order],
        significant=significant[order],
        privacy=answer.privacy,
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
    items, counts, error, answered = (
        found.items, found.counts, found.standard_error, found.answered,
    )  # fmt: skip
    low, high = found.interval(max(asked.devices, answered))
    parameters: dict[str, Any] = {
        "detectable_count": found.detectable(max(asked.devices, found.answered)),
        "sampling_rate": found.rate,
        "rounds_not_listed": found.unread,
    }
    if names.design.partial:
        parameters |= {"listed_share": found.listed}
    if counting is not None:
        read = counting.estimates()
        order = np.argsort(-read.counts, kind="stable")
        items = items.take(pa.array(order))
        answered, least = read.answered, planned.study.threshold
        whom = max(asked.devices, answered)
        above = None if least is None else least * answered / whom
        low, high = read.interval(whom, above=above)
        counts, error, low, high = (
            part[order] for part in (read.counts, read.standard_error, low, high)
        )
        parameters |= {"counts_decoder": read.decoder}
    notes = [_detectable("an item", parameters["detectable_count"], asked)]
    if found.unread:
        notes.append(_unread(names, found.unread))
    return _listed_release(
        planned, items, counts, error, (low, high), answered, parameters, notes, asked
    )


def from_prefixes(planned: Plan, campaign: PrefixCampaign, asked: Asked) -> Release:
    """The release of a search by prefixes that has come to its end."""
    found = campaign.found()
    detectable = found.detectable(max(asked.devices, found.answered))
    notes = [_detectable("a word", detectable, asked)]
    if found.left_out:
        notes.append(f"{found.left_out:,} prefixes were too many to be carried on")
    return _listed_release(
        planned,
        found.items,
        found.counts,
        found.standard_error,
        found.interval(max(asked.devices, found.answered)),
        found.answered,
        {"detectable_count": detectable, "candidates": found.candidates},
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
    interval: tuple[F64, F64],
    answered: int,
    parameters: dict[str, Any],
    notes: list[str],
    asked: Asked,
) -> Release:
    summary = planned.summary()
    summary["parameters"] |= parameters
    scale = asked.devices / max(answered, 1)
    counts = counts * scale
    error = _with_sampling(standard_error, counts, scale)
    kept = np.flatnonzero(counts >= (planned.study.threshold or 0.0))
    return Release(
        items=items.take(pa.array(kept)),
        counts=counts[kept],
        standard_error=error[kept],
        low=interval[0][kept],
        high=interval[1][kept],
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


def _with_sampling(standard_error: F64, counts: F64, scale: float) -> F64:
    """Standard errors of counts scaled up to all that were asked: a count that is known from one
    device in `scale` varies by who answered, too."""
    return np.sqrt((scale * standard_error) ** 2 + np.maximum(counts, 0) * (scale - 1))


def _detectable(what: str, count: float, asked: Asked) -> str:
    return (
        f"{what} that {math.ceil(count - 1e-9):,} or more of the {asked.devices:,} devices hold is "
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

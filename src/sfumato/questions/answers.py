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
from sfumato.flow.model_release import ModelRelease
from sfumato.flow.release import NORMAL_95, Cost, Release
from sfumato.flow.word_discovery import Discoverer
from sfumato.privacy import Tally, debias
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.frequencies.plan import bytes_per_device
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.local_frequencies.design import estimates as local_estimates
from sfumato.questions.mean.design import MeanRelease
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
        raise ImpossibleError(f"{sent} devices sent a word: too few to find any")
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

"""What releases of counts have in common, whoever collected them: a simulation or a service.

Counts are over all devices asked: those that did not answer are taken to be like those that did.
What that adds to the error is the sampling of devices, which `privacy.intervals` reckons with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import ImpossibleError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import Cost, CountRelease, Privacy
from sfumato.privacy import debias
from sfumato.questions.question import Participation, Plan

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

NOBODY = "no device answered, so there is nothing to estimate from"


def check_finished(campaign: Campaign, participation: Participation) -> None:
    """Raise ImpossibleError unless all tasks of a campaign that takes all of them were answered."""
    if not participation.tasks:
        raise ImpossibleError(NOBODY)
    if campaign.next_task() is not None:
        raise ImpossibleError(
            f"this study was closed after {len(participation.tasks)} of its tasks, and it takes "
            "all of them"
        )


def counts_of_listed(
    plan: Plan,
    participation: Participation,
    *,
    counts: F64,
    standard_error: F64,
    interval: Callable[[float | None], tuple[F64, F64]],
    significant: Bool,
    significant_from: float,
    answered: int,
    privacy: Privacy,
    bytes_per_device: int,
    parameters: dict[str, Any],
) -> CountRelease:
    """Counts of the dictionary's items over all devices asked, largest first.

    Counts and errors are over the devices that answered, in the dictionary's order; `interval` is
    over all that were asked, of items that are shown from a reading on.
    """
    scale = participation.devices / max(answered, 1)
    counts = counts * scale
    error = with_sampling(standard_error, counts, scale)
    above = list[float]()
    order = np.argsort(-counts, kind="stable")
    if plan.study.threshold is not None:
        order = order[counts[order] >= plan.study.threshold]
        above.append(plan.study.threshold / scale)
    if plan.study.publish == "significant":
        order = order[significant[order]]
        above.append(significant_from)
    low, high = interval(max(above, default=None))
    summary = plan.summary()
    summary["parameters"] |= parameters
    summary["parameters"] |= {
        "significant_from": scale * significant_from,
        "significance_level": debias.LEVEL,
    }
    return CountRelease(
        items=plan.listed.items.take(pa.array(order, type=pa.int64())),
        counts=counts[order],
        standard_error=error[order],
        low=np.minimum(low, counts)[order],  # an estimate may be outside of what is possible
        high=np.maximum(high, counts)[order],
        significant=significant[order],
        privacy=privacy,
        cost=Cost(
            devices=participation.devices,
            rounds=participation.rounds,
            bytes_per_device=bytes_per_device,
            seconds=0.0,
        ),
        study=plan.study.to_dict(),
        plan=summary,
        notes=participation.notes,
    )


def counts_of_discovered(
    plan: Plan,
    participation: Participation,
    *,
    items: pa.Array,
    counts: F64,
    standard_error: F64,
    interval: tuple[F64, F64],
    answered: int,
    parameters: dict[str, Any],
    notes: Sequence[str],
) -> CountRelease:
    """Counts of items that nobody listed, over all devices asked. `interval` is over those already;
    counts and errors are over the devices that answered."""
    summary = plan.summary()
    summary["parameters"] |= parameters
    scale = participation.devices / max(answered, 1)
    counts = counts * scale
    error = with_sampling(standard_error, counts, scale)
    kept = np.flatnonzero(counts >= (plan.study.threshold or 0.0))
    return CountRelease(
        items=items.take(pa.array(kept)),
        counts=counts[kept],
        standard_error=error[kept],
        low=interval[0][kept],
        high=interval[1][kept],
        significant=np.ones(kept.size, dtype=np.bool_),
        privacy=plan.privacy,
        cost=Cost(
            devices=participation.devices,
            rounds=plan.predicted["rounds"],
            bytes_per_device=plan.predicted["bytes_per_device"],
            seconds=0.0,
        ),
        study=plan.study.to_dict(),
        plan=summary,
        notes=(*participation.notes, *notes),
    )


def with_sampling(standard_error: F64, counts: F64, scale: float) -> F64:
    """Standard errors of counts scaled up to all that were asked: a count that is known from one
    device in `scale` varies by who answered, too."""
    return np.sqrt((scale * standard_error) ** 2 + np.maximum(counts, 0) * (scale - 1))


def bounding_note(items_per_device: int) -> str:
    """What a count is of, where devices may hold more than they report."""
    values = "one value" if items_per_device == 1 else f"at most {items_per_device:,} values"
    return (
        f"a device reports {values}, drawn at random among those it holds: counts are of what "
        "devices report, not of all devices that hold an item"
    )


def detectable_note(kind: str, count: float, participation: Participation) -> str:
    """From which count on an item is listed, of how many devices."""
    return (
        f"{kind} that {math.ceil(count - 1e-9):,} or more of the {participation.devices:,} devices "
        "hold is listed with a probability of 95%; rarer ones may be missing"
    )

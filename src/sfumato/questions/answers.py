"""Make releases of counts, for simulations and the service alike.

Counts are over all devices asked, assuming that those that did not answer are like those that did.
This adds the error of sampling devices, which `privacy.intervals` takes into account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.arrays import F64, Bool
from sfumato.errors import ImpossibleError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Privacy
from sfumato.flow.segments import SEPARATOR
from sfumato.flow.task import AnyTask
from sfumato.privacy import debias
from sfumato.questions.promise import over_all_devices
from sfumato.questions.question import Participation, Plan

NO_ANSWERS = "no device answered, so there is nothing to estimate from"


def check_finished(campaign: Campaign, participation: Participation) -> None:
    """Raise ImpossibleError unless every task of the campaign has an answer."""
    if not participation.tasks:
        raise ImpossibleError(NO_ANSWERS)
    if campaign.next_task() is not None:
        raise ImpossibleError(
            f"this study was closed after {len(participation.tasks)} of its tasks, but it needs "
            "all of them"
        )


def listed_release(
    plan: Plan,
    participation: Participation,
    *,
    counts: F64,
    standard_error: F64,
    interval: Callable[[float | None], tuple[F64, F64]],
    significant: Bool,
    significant_from: float,
    respondents: int,
    privacy: Privacy,
    bytes_per_device: int,
    parameters: dict[str, Any],
) -> CountRelease:
    """A release of the dictionary's items, largest first, with counts over all devices asked; with
    segments, one segment after another.

    `counts` and `standard_error` are over the respondents, in the dictionary's order; `interval` is
    over all devices asked, given that items with estimates above its argument are shown.
    """
    scale = participation.devices / max(respondents, 1)
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
    items, segments = plan.listed.items, plan.study.segments
    names = None
    if segments:  # the dictionary has their items one segment after another
        places = np.arange(counts.size) // (counts.size // len(segments))
        order = order[np.argsort(places[order], kind="stable")]
        names = pa.array(segments).take(pa.array(places[order]))
        items = pc.list_element(pc.split_pattern(items, SEPARATOR, max_splits=1), 1)
    return CountRelease(
        items=items.take(pa.array(order, type=pa.int64())),
        segments=names,
        counts=counts[order],
        standard_error=error[order],
        low=np.minimum(low, counts)[order],  # an estimate may be an impossible count
        high=np.maximum(high, counts)[order],
        significant=significant[order],
        **plan.release_head(
            devices=participation.devices,
            rounds=participation.rounds,
            bytes_per_device=bytes_per_device,
            privacy=over_all_devices(privacy, scale),
            parameters={
                **parameters,
                "significant_from": scale * significant_from,
                "significance_level": debias.LEVEL,
            },
            notes=(*participation.notes, *answering_notes(participation, respondents)),
        ),
    )


def discovered_release(
    plan: Plan,
    participation: Participation,
    *,
    items: pa.Array,
    counts: F64,
    standard_error: F64,
    interval: tuple[F64, F64],
    respondents: int,
    parameters: dict[str, Any],
    notes: Sequence[str],
    per_device: int = 1,
    least: float | None = None,
) -> CountRelease:
    """A release of discovered items, with counts over all devices asked.

    `counts` and `standard_error` are over the respondents; `interval` is over all devices asked. A
    device counts up to `per_device` times for an item. Items with a count over all devices below
    `least` (the study's threshold if None) are left out.
    """
    scale = participation.devices / max(respondents, 1)
    counts = counts * scale
    error = with_sampling(standard_error, per_device * counts, scale)
    rows = np.flatnonzero(counts >= ((plan.study.threshold or 0.0) if least is None else least))
    return CountRelease(
        items=items.take(pa.array(rows)),
        counts=counts[rows],
        standard_error=error[rows],
        low=interval[0][rows],
        high=interval[1][rows],
        significant=np.ones(rows.size, dtype=np.bool_),
        **plan.release_head(
            devices=participation.devices,
            rounds=plan.predicted["rounds"],
            bytes_per_device=plan.predicted["bytes_per_device"],
            privacy=over_all_devices(plan.privacy, scale),
            parameters=parameters,
            notes=(*participation.notes, *answering_notes(participation, respondents), *notes),
        ),
    )


def with_sampling(standard_error: F64, counts: F64, scale: float) -> F64:
    """Standard errors of counts that are scaled up to all devices asked: they include the sampling
    error of hearing from one device in `scale`."""
    return np.sqrt((scale * standard_error) ** 2 + np.maximum(counts, 0) * (scale - 1))


def answering_notes(participation: Participation, respondents: int) -> tuple[str, ...]:
    """A note about devices that did not answer, if there are any."""
    if respondents >= participation.devices:
        return ()
    return (
        f"{respondents:,} of {participation.devices:,} devices answered; the others are assumed to "
        "be like them",
    )


def bounding_note(items_per_device: int, *, copies: bool = False) -> str:
    """A note about devices that hold more values than they report."""
    values = "one value" if items_per_device == 1 else f"at most {items_per_device:,} values"
    if copies:
        return (
            f"a device reports {values}, drawn at random from its own with all copies: a count is "
            "the number of copies that are reported, not of all that devices hold"
        )
    return (
        f"a device reports {values}, drawn at random from its own: a count is the number of "
        "devices that report an item, not of all devices that hold it"
    )


def detectable_note(
    kind: str, count: float, participation: Participation, *, copies: bool = False
) -> str:
    """A note about the smallest count that is listed with high probability."""
    if not copies and count > participation.devices:
        return (
            f"not even {kind} that all of the {participation.devices:,} devices hold is listed "
            "with a probability of 95%"
        )
    if copies:
        return (
            f"{kind} of which the {participation.devices:,} devices report "
            f"{math.ceil(count - 1e-9):,} or more copies is listed with a probability of 95%; "
            "rarer ones may be missing"
        )
    return (
        f"{kind} that {math.ceil(count - 1e-9):,} or more of the {participation.devices:,} devices "
        "hold is listed with a probability of 95%; rarer ones may be missing"
    )


def network_participation(plan: Plan, tasks: Sequence[tuple[AnyTask, int]]) -> Participation:
    """Who took part over a network, where it is only known how many reports each task has."""
    devices = _devices(tasks)
    with_reports = [(task, count) for task, count in tasks if count]
    return Participation(
        devices=devices,
        respondents=devices,
        rounds=len(with_reports),
        tasks=with_reports,
        notes=_network_notes(plan, devices),
    )


def _devices(tasks: Sequence[tuple[AnyTask, int]]) -> int:
    """The number of devices behind the reports to these tasks: all tasks of a cohort have the same
    devices, a device is in one cohort of a campaign, and several campaigns ask the same devices."""
    campaigns: dict[str, dict[str, int]] = {}
    for task, count in tasks:
        cohorts = campaigns.setdefault(task.campaign, {})
        cohorts[task.cohort] = max(cohorts.get(task.cohort, 0), count)
    return max((sum(cohorts.values()) for cohorts in campaigns.values()), default=0)


def _network_notes(planned: Plan, reports: int) -> tuple[str, ...]:
    question = planned.design
    answer = "counts cover" if planned.study.facts.data == "items" else "the answer covers"
    subject = "reports received" if question.tasks_per_device == 1 else "devices that sent reports"
    if planned.study.is_masked:
        subject = "devices whose tables are in the sums"
    notes = [
        *planned.warnings,
        f"{answer} the {reports:,} {subject}; over a network, it is not known how many devices "
        "were asked or sent nothing",
    ]
    if question.items_per_device is not None:
        copies = planned.study.count == "copies"
        notes.append(bounding_note(question.items_per_device, copies=copies))
    if reports < question.devices:
        notes.append(f"the plan was made for {question.devices:,} devices")
    return tuple(notes)

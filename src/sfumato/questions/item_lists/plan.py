"""Plan a list or histogram of an open domain for a collector that is trusted with the reports."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.release import Privacy
from sfumato.flow.task import most_devices
from sfumato.privacy import ListedAbove, best_list
from sfumato.privacy.listing import without_promise
from sfumato.questions import guarantees
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.plan import common_warnings
from sfumato.questions.heavy_hitters import plan as invertible
from sfumato.questions.heavy_hitters.plan import (
    check_delta,
    check_threshold,
    keys_of,
    list_errors,
)
from sfumato.questions.item_lists.design import ItemListDesign
from sfumato.questions.promise import ZERO_ITEMS, device_promise
from sfumato.questions.question import Dictionary, Plan
from sfumato.questions.threshold_sampling import plan as threshold_sampling
from sfumato.study import Study

LONGEST_ITEM = 64  # bytes, unless the study says otherwise


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a list of heavy hitters, or a histogram: of the items themselves, unless the study asks
    for sketches. Counts of items that devices send themselves are exact but for the noise on the
    list, so a histogram of them needs no second table."""
    if study.algorithm == "threshold_sampling":
        return threshold_sampling.plan(study)
    _check_keys(study)
    if _wants_sketches(study):
        return invertible.plan(study)
    return _plan(study)


def _check_keys(study: Study) -> None:
    """Refuse keys of other algorithms."""
    for name in ("repetitions", "sampling_threshold"):
        if getattr(study, name) is not None:
            raise StudyError(
                f'{name} is for algorithm "threshold_sampling", without a promise of privacy',
                hint=f'leave out {name}, or set algorithm to "threshold_sampling"',
            )
    if study.failure_probability is None:
        return
    if _wants_sketches(study):
        raise StudyError(
            'failure_probability is for algorithms "sparse" and "threshold_sampling"',
            hint="leave out failure_probability",
        )
    if not study.threshold:
        raise StudyError(
            "failure_probability is the chance that a list misses its threshold; set threshold"
        )


def _wants_sketches(study: Study) -> bool:
    """Whether a study asks for paper 001's invertible sketches. Masked sums need them: a masked
    table must have a fixed set of cells."""
    asks = study.masked or study.paper_mode or study.adaptive is not None
    if asks and study.algorithm == "sparse":
        raise StudyError(
            'algorithm "sparse" sends whole items once; masked, paper_mode and adaptive are for '
            '"invertible_sketch"'
        )
    return asks or study.algorithm == "invertible_sketch"


def _plan(study: Study) -> Plan:
    mechanism = _mechanism(study)
    cut, promise_text = _cut(study, mechanism)
    design = ItemListDesign(
        keys=keys_of(study, LONGEST_ITEM),
        devices=study.device_count,
        rounds=study.round_count,
        items_per_device=study.items_per_device,
        mechanism=mechanism,
        seed=0,
        cut=None if cut is None else cut.count,
        promise=promise_text,
    )
    traffic = secure_sum.traffic(design.tasks()[:1])
    limit = study.bytes_per_device
    if limit is not None and traffic["bytes_per_device"] > limit:
        raise ImpossibleError(
            f"a report of {study.items_per_device} items of up to {design.keys.length} bytes has "
            f"{traffic['bytes_per_device']} bytes; bytes_per_device is {limit}",
            hint=f"set bytes_per_device to {traffic['bytes_per_device']} or more, or reduce "
            "word_length or items_per_device",
        )
    if cut is None:
        detectable = check_threshold(study, mechanism)
    else:
        detectable = mechanism.detectable(cut.count, answering=1 - study.expected_dropout)
    predicted: dict[str, Any] = {
        "detectable_count": detectable,
        **({} if cut is None else {"failure_probability": cut.failure}),
        **list_errors(study, mechanism, detectable),
        **traffic,
        **costs(
            [(design.tasks()[0], study.device_count)],
            lookups=0,
            items=study.device_count / max(detectable, 1),
        ),
        "rounds": study.round_count,
        "assumes": "nothing about the data",
    }
    return Plan(
        study=study,
        design=design,
        algorithm="items in sparse reports"
        + (
            ""
            if study.epsilon is None
            else f", listed above a threshold with {mechanism.noise_title} noise"
        ),
        predicted=predicted,
        privacy=promise(study, design),
        warnings=tuple(_warnings(study)),
    )


def _cut(study: Study, mechanism: ListedAbove) -> tuple[guarantees.Cut | None, str]:
    """From which noisy count on items are listed, if the study asks for both sides of paper 001's
    guarantee; ImpossibleError if the noise is too large for it."""
    failure = study.failure_probability
    if failure is None:
        return None, ""
    assert study.threshold is not None  # checked
    with_counts = study.facts.counts_all
    total = most_devices(study.device_count) * study.items_per_device

    def best(threshold: float) -> guarantees.Cut:
        cut = guarantees.best_cut(mechanism, total, threshold)
        also = guarantees.noise_failure(mechanism, total, threshold) if with_counts else 0.0
        return guarantees.Cut(cut.count, min(1.0, cut.failure + also))

    cut = best(study.threshold)
    if cut.failure > failure:
        enough = math.ceil(study.threshold)
        while best(enough).failure > failure:
            enough *= 2
        steps = range(enough // 2, enough)
        enough = steps.start + bisect_left(steps, True, key=lambda t: best(t).failure <= failure)
        raise ImpossibleError(
            f"with the noise of epsilon {study.epsilon:g}, threshold {study.threshold:g} keeps the "
            f"guarantee except with probability {cut.failure:.3g}; failure_probability is "
            f"{failure:g}",
            hint=f"set threshold to {enough}, or raise epsilon, delta or failure_probability",
        )
    return cut, threshold_sampling.promise_of(study, cut.failure, with_counts=with_counts)


def _mechanism(study: Study) -> ListedAbove:
    if study.epsilon is None:
        return without_promise(1.0, study.items_per_device, copies=study.count == "copies")
    check_delta(study)
    return best_list(
        1.0,
        threshold=study.threshold or 0.0,
        answering=1 - study.expected_dropout,
        items_per_device=study.items_per_device,
        epsilon=study.epsilon,
        delta=study.delta,
        copies=study.count == "copies",
    )


def promise(study: Study, design: ItemListDesign) -> Privacy:
    """The privacy statement of a design, which holds for all of its releases."""
    mechanism = design.mechanism
    description = ""
    if study.epsilon is not None:
        description = (
            f"{mechanism.noise_title} noise of scale {mechanism.scale:.4f} on the count of each "
            f"item that a device sent; items with a noisy count below {mechanism.threshold} are "
            "not released"
        )
    return device_promise(
        study,
        exact="names and counts",
        neighbours=ZERO_ITEMS,
        mechanism=description,
        sees="the collector sees each device's items; it is trusted to count them, to add the "
        "noise and to release only items above the threshold",
        assumptions=(
            f"a device answers once, with at most {design.items_per_device} items, copies included"
            if mechanism.copies
            else "a device answers once, with different items, each of which counts once",
        ),
        influence=design.influence,
    )


def _warnings(study: Study) -> list[str]:
    warnings = common_warnings(study)
    if study.threshold is None and study.epsilon is None:
        warnings.append("threshold is not set, so every item that is found will be listed")
    return warnings

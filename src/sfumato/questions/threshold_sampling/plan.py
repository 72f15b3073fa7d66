"""Plan a list or histogram by paper 001's algorithms 1 to 3: sizes from threshold and failure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.release import Privacy
from sfumato.privacy import NoNoise
from sfumato.questions import guarantees
from sfumato.questions.answers import with_sampling
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.design import FrequencyDesign, Mode
from sfumato.questions.frequencies.plan import common_warnings, secure_of
from sfumato.questions.heavy_hitters.design import most_in_round, most_sampled
from sfumato.questions.heavy_hitters.plan import (
    LONGEST_ITEM,
    checked_sketch,
    histogram_errors,
    keys_of,
    named_errors,
    three_counts,
)
from sfumato.questions.promise import ZERO_ITEMS, device_promise, sum_visibility
from sfumato.questions.question import Plan
from sfumato.questions.threshold_sampling.design import ThresholdSamplingDesign
from sfumato.sketch import capacity
from sfumato.sketch.sampled import UNITS
from sfumato.study import Study

FAILURE = 0.05  # unless the study says otherwise
WORD_BITS = 16  # the paper's unit of communication
_TAIL_BITS = 10
"""A sample has more keys than its table is made for once in 2**10 times: a part of `unread`, which
repetitions outvote. Nothing private depends on it, as on the 2**-40 of `heavy_hitters`."""
_WRONG = 0.01  # share of the failure for wrong keys


def plan(study: Study) -> Plan:
    """Plan ApproxHH, or for a histogram ApproxHist: paper 001's algorithms 2 and 3."""
    _check(study)
    with_counts = study.facts.counts_all
    assert study.threshold is not None  # checked
    cohort = -(-study.device_count // study.round_count)
    items = most_in_round(cohort, masked=study.masked) * study.items_per_device
    failure = study.failure_probability
    if failure is None and study.repetitions is None:
        failure = FAILURE
    part = None if failure is None else failure / 2 if with_counts else failure
    names, of_names = _names(study, items, part)
    rounds = guarantees.Rounds(
        devices=items // study.items_per_device,
        rounds=study.round_count,
        items_per_device=study.items_per_device,
        alike=study.cohorts == "similar",
    )
    counts, of_counts = None, 0.0
    if with_counts:
        counts, of_counts = _counts(study, rounds, part or FAILURE / 2)
    bound = min(1.0, of_names + of_counts)
    promise = ""
    warnings = common_warnings(study)
    if bound < 1 and (failure is None or bound <= failure):
        promise = promise_of(study, bound, with_counts=with_counts)
    elif study.paper_mode:
        warnings.append(
            "the paper's sizes have no proof of its guarantee here: no failure_probability is "
            "promised"
        )
    elif failure is not None:
        raise ImpossibleError(
            f"repetitions {names['repetitions']} and sampling_threshold "
            f"{names['sampling_threshold']:g} keep the guarantee except with probability "
            f"{bound:.3g}; failure_probability is {failure:g}",
            hint="leave out repetitions and sampling_threshold, or raise threshold or "
            "failure_probability",
        )
    design = ThresholdSamplingDesign(
        **names,
        devices=study.device_count,
        rounds=study.round_count,
        seed=0,
        items_per_device=study.items_per_device,
        copies=study.count == "copies",
        counts=counts,
        promise=promise,
        secure=secure_of(study),
    )
    traffic = secure_sum.traffic(design.tasks()[:1])
    if study.bytes_per_device is not None and traffic["bytes_per_device"] > study.bytes_per_device:
        raise ImpossibleError(
            f"these tables have {traffic['bytes_per_device']:,} bytes; bytes_per_device is "
            f"{study.bytes_per_device:,}",
            hint=f"set bytes_per_device to {traffic['bytes_per_device']} or more, raise threshold "
            "or failure_probability, or reduce word_length",
        )
    least = guarantees.list_cost(items, study.threshold)
    if with_counts:
        least = guarantees.histogram_cost(items, study.round_count, study.threshold)
    predicted: dict[str, Any] = {
        "detectable_count": design.detectable(1 - study.expected_dropout),
        **({"failure_probability": bound} if promise else {}),
        **_errors(study, design),
        "keys_a_table_lists": most_sampled(
            items, 1 / design.sampling_threshold, tail_bits=_TAIL_BITS
        ),
        "words": -(-design.task(0).message_bits // WORD_BITS),
        "least_order_of_words": least,
        **traffic,
        **costs(
            [
                (design.task(number), study.device_count // study.round_count)
                for number in range(study.round_count)
            ],
            lookups=0,
            items=items / study.threshold,
        ),
        "rounds": study.round_count,
        "assumes": "nothing about the data"
        if not with_counts or study.round_count == 1 or study.cohorts == "different"
        else "that devices are assigned to rounds at random",
    }
    masked = "masked " if study.masked else ""
    text = f"{masked}majority of {design.repetitions} threshold samples in invertible sketches"
    if counts is not None:
        text += f", with a {counts.mode} count sketch"
    return Plan(
        study=study,
        design=design,
        algorithm=text,
        predicted=predicted,
        privacy=_privacy(study, design),
        warnings=tuple(warnings),
    )


def _check(study: Study) -> None:
    if study.epsilon is not None:
        raise ImpossibleError(
            'algorithm "threshold_sampling" is paper 001\'s own, which has no differential '
            f"privacy; epsilon is {study.epsilon:g}",
            hint='set epsilon to inf, or algorithm to "invertible_sketch", whose samples and '
            "threshold are private",
        )
    if not study.threshold or study.threshold < 1:
        raise StudyError(
            'algorithm "threshold_sampling" needs a threshold of at least 1: it sizes the sample'
        )
    if study.adaptive is not None:
        raise StudyError('adaptive is for algorithm "invertible_sketch"')


def promise_of(study: Study, failure: float, *, with_counts: bool) -> str:
    """What holds of the answer, for people to read."""
    assert study.threshold is not None  # checked
    unit = "copies" if study.count == "copies" else "devices"
    threshold = study.threshold
    if with_counts:
        return (
            f"counts over the devices that answer are within {threshold:g} of the truth, those of "
            f"items that are not listed being taken as 0, except with probability {failure:.3g}"
        )
    return (
        f"of the devices that answer: every item with {threshold:g} {unit} or more is listed, and "
        f"none with {guarantees.LIGHT * threshold:g} or fewer, except with probability "
        f"{failure:.3g}"
    )


def _names(study: Study, items: int, failure: float | None) -> tuple[dict[str, Any], float]:
    """Sizes of the tables for at most `items` copies in a round, and a bound on their failure."""
    assert study.threshold is not None  # checked
    threshold, rounds = study.threshold, study.round_count
    total = float(items * rounds)
    sampling = max(study.sampling_threshold or math.floor(threshold) / 2, 1.0)
    keys, rate = keys_of(study, LONGEST_ITEM), 1 / sampling
    most = most_sampled(items, rate, tail_bits=_TAIL_BITS) + (rate < 1)
    repetitions = study.repetitions
    rows, width = capacity.sized(most, guarantees.UNREAD / 2)
    if study.paper_mode:
        cohort = -(-study.device_count // rounds)
        paper = guarantees.PaperSizes(
            items=cohort * study.items_per_device,
            rounds=rounds,
            threshold=threshold,
            failure_probability=study.failure_probability or FAILURE,
        )
        repetitions = repetitions or paper.repetitions
        rows, width = 3, math.ceil(guarantees.CELLS_PER_KEY * paper.keys / 3)
    if repetitions is None:
        allowed = (1 - 2 * _WRONG) * (failure or FAILURE)
        repetitions = guarantees.repetitions_for_list(
            total, threshold, allowed, sampling_threshold=sampling
        )
    if repetitions is None:
        raise ImpossibleError(
            f"no number of repetitions keeps the guarantee with sampling_threshold {sampling:g}: "
            "a sample must keep items of the threshold more often than not, and items of a tenth "
            "of it less often",
            hint=f"set sampling_threshold to {max(math.floor(threshold) / 2, 1.0):g}",
        )
    value_bits = 0
    if study.count == "copies" and study.items_per_device > sampling:
        value_bits = (
            UNITS * (math.ceil(sampling * most_sampled(items, rate)) + items)
        ).bit_length()
    checked = checked_sketch(
        keys, rows, width, most, most_sampled(items, rate),
        _WRONG * (failure or FAILURE) / (repetitions * rounds), value_bits=value_bits,
    )  # fmt: skip
    if checked is None:
        raise ImpossibleError(
            "a cell has no room for checks against wrong keys", hint="use more rounds"
        )
    sketch, wrong = checked
    unread = 2.0**-_TAIL_BITS + capacity.failure_bound(most, rows, width) + wrong
    bound = guarantees.list_failure(
        total, threshold, sampling_threshold=sampling, repetitions=repetitions, unread=unread,
        wrong=repetitions * rounds * wrong,
    )  # fmt: skip
    sizes = {
        "keys": keys, "rows": rows, "width": width, "count_bits": sketch.count_bits,
        "value_bits": value_bits, "check_bits": sketch.check_bits, "repetitions": repetitions,
        "sampling_threshold": sampling, "unread": unread,
    }  # fmt: skip
    return sizes, bound


def _counts(
    study: Study, rounds: guarantees.Rounds, failure: float
) -> tuple[FrequencyDesign, float]:
    """The sketch of all items, and a bound on the chance that a listed count errs by more than the
    threshold."""
    assert study.threshold is not None  # checked
    rows, width = guarantees.sketch_for(rounds, study.threshold, failure)
    if study.paper_mode:
        cohort = -(-study.device_count // study.round_count)
        paper = guarantees.PaperSizes(
            items=cohort * study.items_per_device,
            rounds=study.round_count,
            threshold=study.threshold,
            failure_probability=study.failure_probability or FAILURE,
        )
        rows, width = paper.rows, max(paper.width, 2)
    mode: Mode = "shared" if study.round_count == 1 else "hybrid"
    design = FrequencyDesign(
        mode=mode,
        items=max(1, math.ceil(rounds.total / max(guarantees.LIGHT * study.threshold, 1.0))),
        devices=study.device_count,
        rounds=study.round_count,
        rows=rows,
        width=width,
        seed=0,
        items_per_device=study.items_per_device,
        mechanism=NoNoise(),
        decode="median",
        every_round=True,
        secure=secure_of(study),
    )
    bound = guarantees.counts_failure(
        rounds, study.threshold, rows=rows, width=width, failure=failure / 10
    )
    return design, bound


def _errors(study: Study, design: ThresholdSamplingDesign) -> dict[str, float]:
    if design.counts is not None:
        return histogram_errors(study, design.counts)
    answering = 1 - study.expected_dropout
    three = three_counts(study, design.detectable(answering))
    variance = three * answering * (design.sampling_threshold - 1) / design.repetitions
    missing = design.mechanism.most_per_item * three
    return named_errors(with_sampling(np.sqrt(variance), missing, 1 / answering))


def _privacy(study: Study, design: ThresholdSamplingDesign) -> Privacy:
    assert study.epsilon is None  # planning has checked: there is no mechanism
    sees = "the collector sees each device's table"
    if design.secure is not None:
        sees = sum_visibility(design.task(0))
    return device_promise(
        study,
        exact="names and counts",
        neighbours=ZERO_ITEMS,
        mechanism="",
        sees=sees + "; everybody sees the names that are in at least half of the lists",
        secure=design.secure,
        influence=design.influence,
    )

"""Size a mean, predict its error, and state its privacy."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import Any

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow.release import Privacy
from sfumato.flow.secure_sum import traffic
from sfumato.flow.task import Task
from sfumato.privacy import calibrate, epsilon_of
from sfumato.privacy.accounting import SMOOTHING, epsilon_text, gaussian_stddev
from sfumato.privacy.noise_kinds import NOISES
from sfumato.privacy.samplers import LARGEST_SCALE
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.plan import common_warnings, secure_of
from sfumato.questions.mean.clipping import NORM_SHARE, ClippedMeanDesign, norm_mechanism
from sfumato.questions.mean.design import (
    BLOCKS,
    LEAST_MULTIPLIER,
    LEAST_VARIANCE,
    LEAST_WIDTH,
    PAPER_RISK,
    ROWS,
    SEARCH_SHARE,
    SLACK,
    Compression,
    MeanDesign,
)
from sfumato.questions.promise import (
    SEES_ALL,
    SEES_TABLES,
    ZERO_OUT,
    device_promise,
    sum_visibility,
)
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch import NormBins
from sfumato.sketch.dense import median_variance, spread_of_squares
from sfumato.study import Study, require

_PARTS = 4  # the fullest octave of norms is assumed to have at least one in four devices
_PER_OCTAVE = (4, 2, 1)  # bins of norms: the finest first
_WORTH = 1.1  # factor on bytes that a pilot must save
_SKELLAM_SPARE = 1.001  # Skellam noise costs up to a share of 2.25/variance more than Gaussian


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a study of a mean."""
    mean, warnings = _size(study)
    design = mean if study.clip is not None else with_norms(study, mean)
    return Plan(
        study=study,
        design=design,
        algorithm=algorithm(mean) + ("" if study.clip is not None else ", clipped by their norms"),
        predicted=_predict(study, mean)
        if isinstance(design, MeanDesign)
        else _predict_clipped(study, design),
        privacy=promise(study, design),
        warnings=(*warnings, *_warnings(study, mean)),
    )


def with_norms(study: Study, mean: MeanDesign) -> ClippedMeanDesign:
    """The design with a first round for the clip. Its bins are as fine as the noise allows."""
    mechanism, count = norm_mechanism(mean, _multiplier(study)), study.answering()
    for per_octave in _PER_OCTAVE:
        bins = NormBins(length=mean.dimensions, per_octave=per_octave)
        design = ClippedMeanDesign(mean=mean, bins=bins, mechanism=mechanism)
        least = _PARTS * per_octave**2 * design.least_count(count)
        if count >= least:
            return design
    raise ImpossibleError(
        f"{count:,} devices are too few to measure how long vectors are with this noise: it takes "
        f"at least {least:,}",
        hint="set clip, ask more devices, or raise epsilon",
    )


def algorithm(design: MeanDesign) -> str:
    names = {
        "none": "whole vectors",
        "fixed": "count-mean sketch" if not design.may_be_whole else "whole vectors",
        "adapt_norm": "count-mean sketch, sized by a pilot",
        "adapt_tail": "count-median sketches, doubled until a pilot agrees",
    }
    return names[design.compression] + (" in masked rounds" if design.secure is not None else "")


def promise(study: Study, question: MeanDesign | ClippedMeanDesign) -> Privacy:
    """The privacy statement of a design, which holds for all of its releases."""
    norms = question if isinstance(question, ClippedMeanDesign) else None
    design = question if isinstance(question, MeanDesign) else question.mean
    tasks = widest_tasks(design)
    mechanism, tables = "", SEES_ALL if study.epsilon is None else SEES_TABLES
    if study.epsilon is not None:
        first_tasks = [] if norms is None else [norms.norm_task()]
        spent = epsilon_of([task.loss for task in (*first_tasks, *tasks)], study.delta)
        kind = NOISES["gaussian" if design.secure is None else "skellam"].title
        first, last = (design.multiplier / math.sqrt(design.shares[k]) for k in (0, -1))
        clip = f"norm {design.clip:g}"
        if norms is not None:
            clip = "the clip"
            mechanism = (
                f"the devices in each of {norms.bins.count} bins of norms are counted with {kind} "
                f"noise of {norms.norm_noise:.4f}, and the clip is computed from these counts; "
            )
        mechanism += (
            f"vectors and their tables are clipped to {clip}; {kind} noise of "
            f"{first:.4f} times that norm"
        )
        of = "" if norms is None else " for the mean"
        if design.search_share is not None:
            search = design.multiplier / math.sqrt(design.shares[1])
            mechanism += (
                f" in the first round{of}, {search:.4f} times it in at most {len(tasks) - 2} "
                f"rounds that look for a size, and {last:.4f} times it in the last"
            )
        elif len(tasks) > 1:
            others = "the second" if len(tasks) == 2 else f"at most {len(tasks) - 1} others"
            mechanism += f" in the first round{of} and {last:.4f} times it in {others}"
        mechanism += f", at a cost of epsilon {epsilon_text(spent)}"
    return device_promise(
        study,
        neighbours=ZERO_OUT.format("tables become"),
        mechanism=mechanism,
        sees=tables if design.secure is None else sum_visibility(tasks[-1]),
        secure=design.secure,
        influence=question.influence,
    )


def widest_tasks(design: MeanDesign) -> list[Task]:
    """The tasks of all rounds, each at its largest size."""
    first = design.task(0, design.first_width)
    if not design.adapts:
        return [first]
    if design.compression == "adapt_tail":
        widths = list(enumerate(design.tail_widths, start=1))
        if design.search_share is not None:
            last = 0 if design.may_be_whole else design.tail_widths[-1]
            widths.append((len(design.shares) - 1, last))
        return [first, *(design.task(round, width) for round, width in widths)]
    return [first, design.task(1, _widest(design))]


def _size(study: Study) -> tuple[MeanDesign, list[str]]:
    if study.dimensions is None:
        raise StudyError("a plan of a mean needs the length of the vectors; set dimensions")
    limit, warnings = study.bytes_per_device, list[str]()
    require(
        study.clip is not None or not study.paper_mode,
        "paper_mode needs clip, as the paper's algorithm does",
    )
    compression = _compression(study)
    _check_keys(study, compression)
    require(
        compression != "fixed" or limit is not None,
        'compression = "fixed" needs bytes_per_device, which sets the size',
    )
    adapts = compression in ("adapt_norm", "adapt_tail")
    if study.epsilon is None and adapts:
        compression = "none" if limit is None else "fixed"
        if study.compression is not None:  # otherwise nobody asked for it
            warnings.append(
                f'compression is "{compression}": it adapts to the noise, and there is none'
            )
    whole = MeanDesign(
        compression="none",
        dimensions=study.dimensions,
        devices=study.device_count,
        clip=1.0 if study.clip is None else study.clip,
        most_cells=study.dimensions,
        seed=0,
        multiplier=_multiplier(study) / math.sqrt(1 if study.clip is not None else 1 - NORM_SHARE),
        relative_error=study.relative_error,
        rows=study.rows or ROWS if compression != "adapt_tail" else ROWS,
        blocks=study.blocks or BLOCKS,
        block_rows=study.rows or 1 if compression == "adapt_tail" else 1,
        paper_risk=study.failure_probability or PAPER_RISK,
        top=study.top,
        secure=secure_of(study),
        cohort_count=study.round_count,
    )
    besides = 0
    if limit is not None and study.clip is None:
        besides = traffic([with_norms(study, whole).norm_task()])["bytes_per_device"]
    upload = _upload(whole) + besides
    if limit is not None and compression == "none" and upload > limit:
        raise ImpossibleError(
            f"whole vectors take {upload:,} bytes per device; bytes_per_device is {limit}",
            hint='raise bytes_per_device, or set compression to "adapt_norm"',
        )
    if compression == "none":
        return whole, warnings
    adapts = compression != "fixed"
    if adapts and not _may_save(whole, study):
        fits = limit is None or upload <= limit
        compression = "none" if fits else "fixed"
        if study.compression is not None:  # otherwise nobody asked for a pilot
            warnings.append(
                f'compression is "{compression}": for vectors this short, a pilot costs more than '
                "it can save"
            )
        if fits:
            return whole, warnings
    paper = study.epsilon if study.paper_mode and compression == "adapt_norm" else None
    design = replace(
        whole, compression=compression, paper_epsilon=paper, paper_delta=max(study.delta, 1e-300),
        search_share=SEARCH_SHARE if compression == "adapt_tail" and not study.paper_mode else None,
    )  # fmt: skip
    return (design if limit is None else _within(design, limit, besides)), warnings


def _check_keys(study: Study, compression: Compression) -> None:
    """Raise StudyError if a key of the paper's is set for another compression."""
    idle = {
        "rows": (study.rows, compression != "none", "whole vectors have no rows"),
        "blocks": (
            study.blocks,
            compression == "adapt_tail",
            'compression = "adapt_tail" has them',
        ),
        "failure_probability": (
            study.failure_probability,
            study.paper_mode and compression == "adapt_norm",
            'only the paper\'s sizes depend on it: paper_mode with compression = "adapt_norm"',
        ),
    }
    for name, (value, has_effect, why) in idle.items():
        require(
            value is None or has_effect,
            f'{name} has no effect on a mean with compression = "{compression}": {why}',
            hint=f"leave out {name}",
        )


def _compression(study: Study) -> Compression:
    """The study's compression, or the default for means."""
    named = study.compression or "adapt_norm"
    assert named != "free_norm"  # Study refuses the two that only training has
    assert named != "two_stage"
    return named


def _multiplier(study: Study) -> float:
    """The noise multiplier of one release that uses the whole budget."""
    if study.epsilon is None:
        return 0.0
    if study.delta == 0:
        raise ImpossibleError(
            "noise for a mean is Gaussian and needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / (study.devices or 1):.1g}",
        )
    scale = gaussian_stddev(1.0, study.epsilon, study.delta)
    # The unit in which the plan's losses are charged; with very little noise they are not.
    unit = math.sqrt(LEAST_VARIANCE - SMOOTHING) / scale if scale > LEAST_MULTIPLIER else 1.0
    scale = calibrate(
        "gaussian", l1=max(unit, unit**2), l2=unit, unit_cells=0, epsilon=study.epsilon,
        delta=study.delta,
    ) / unit  # fmt: skip
    if not study.is_masked:
        return scale
    unit = min(1000.0, LARGEST_SCALE["skellam"] / (2 * scale))  # within the sampler's limit
    exact = calibrate(
        "skellam", l1=unit, l2=unit, unit_cells=0, epsilon=study.epsilon, delta=study.delta
    )
    return max(scale, exact / unit) * _SKELLAM_SPARE


def _may_save(whole: MeanDesign, study: Study) -> bool:
    """Whether a pilot may save cells; and bytes, unless the study asks for a pilot: more than a
    tenth if vectors are independent, since it costs about a tenth in error. adapt_tail costs more,
    and must save bytes where its first size is enough."""
    design = replace(whole, compression=_compression(study))
    pilot = design.sketch(0, design.first_width).cells
    if design.compression == "adapt_tail":
        if not design.tail_widths[0]:
            return False
        return traffic(_usual_tasks(design))["bytes_per_device"] < _upload(whole)
    if pilot + (design.rows * _narrowest(design, 0.0) or design.dimensions) >= design.dimensions:
        return False
    bytes_up = traffic(_usual_tasks(design))["bytes_per_device"]
    return study.compression is not None or _WORTH * bytes_up < _upload(whole)


def _usual_tasks(design: MeanDesign) -> list[Task]:
    """The tasks of a mean that is zero, or that the first size of adapt_tail is enough for."""
    width = _usual_width(design)
    tasks = [design.task(0, design.first_width), design.task(1, width)]
    if design.search_share is not None:
        tasks.append(design.task(len(design.shares) - 1, width))
    return tasks


def _usual_width(design: MeanDesign) -> int:
    """The main round's width if vectors are independent of each other and as long as the clip."""
    if design.compression == "adapt_tail":
        return design.tail_widths[0]
    if design.compression == "adapt_norm":
        return _narrowest(design, answering(design) * design.clip**2)
    return design.first_width


def _narrowest(design: MeanDesign, squared: float) -> int:
    """The main round's width if the sum has this squared norm and the pilot measures it exactly."""
    count = answering(design)
    if design.paper_epsilon is not None:
        return design.paper_width(math.sqrt(squared) / count)
    noise = design.noise(0, design.first_width, count)
    cells = design.sketch(0, design.first_width).cells
    return design.width_for(squared + SLACK * spread_of_squares(squared, cells, noise), count)


def _widest(design: MeanDesign) -> int:
    """The main round's width if all vectors are equal and have the largest norm."""
    if design.paper_epsilon is not None:
        return design.paper_width(design.clip)
    count = answering(design)
    return design.width_for((count * design.clip) ** 2, count)


def answering(design: MeanDesign) -> int:
    dropout = 0.0 if design.secure is None else design.secure.dropout
    return max(1, math.floor(design.devices * (1 - dropout)))


def _within(design: MeanDesign, limit: int, besides: int) -> MeanDesign:
    """The design with the largest sketches whose rounds together upload at most `limit` bytes, of
    which `besides` are not the mean's."""
    if _upload(design) + besides <= limit:
        return design
    rows = design.row_count

    def upload(width: int) -> int:
        return _upload(replace(design, most_cells=rows * width)) + besides

    widths = range(LEAST_WIDTH, (design.dimensions - 1) // rows + 1)
    place = bisect_right(widths, limit, key=upload)
    if place == 0:
        need = upload(LEAST_WIDTH) if widths else _upload(design) + besides
        raise ImpossibleError(
            f"a mean needs at least {need:,} bytes per device; bytes_per_device is {limit}",
            hint=f"set bytes_per_device to {need} or more",
        )
    return replace(design, most_cells=rows * widths[place - 1])


def _upload(design: MeanDesign) -> int:
    return traffic(widest_tasks(design))["bytes_per_device"]


def _predict(study: Study, design: MeanDesign) -> dict[str, Any]:
    tasks, count = widest_tasks(design), study.answering()
    round = len(design.shares) - 1
    width, small = design.first_width, _usual_width(design)
    if design.compression == "adapt_norm":
        width = _widest(design)
    elif design.compression == "adapt_tail":
        width = design.tail_widths[-1]
    noise = _noise_error(design, round, small, count)
    error, assumes = noise, "nothing about the data but the clip"
    cells, longest = design.row_count * width, None
    if design.compression == "adapt_tail":
        error = noise * math.sqrt(1 + design.relative_error)
        assumes = "that few coordinates are large, so that the pilot misses no error"
    elif small:
        compression = math.sqrt((design.dimensions - 1) / (design.row_count * small))
        error = math.hypot(noise, compression * design.clip / math.sqrt(count))
        assumes = "independent vectors; the error of compression is proportional to the mean's norm"
        if design.compression == "fixed":
            longest = math.hypot(noise, compression * design.clip)
    if design.compression == "adapt_norm":
        reach = math.sqrt(design.relative_error * cells) * design.noise(1, width, count) / count
        assumes = "nothing about the data but the clip"
        if width and reach < design.clip and design.paper_epsilon is None:
            assumes = f"a mean no longer than {reach:.3g}; a longer one is compressed too much"
            longest = math.hypot(noise, design.clip * math.sqrt((design.dimensions - 1) / cells))
    # Missing devices add at most the error of a random sample, as in releases.
    absence = design.clip * math.sqrt(1 / count - 1 / design.devices)
    error = math.hypot(error, absence)
    predicted: dict[str, Any] = {"l2_error": error, "l2_error_of_noise": noise}
    if longest is not None:
        predicted |= {"l2_error_if_all_equal": math.hypot(longest, absence)}
    predicted |= {"standard_error": error / math.sqrt(design.dimensions)}
    predicted |= traffic(tasks)
    decoded = design.dimensions * (design.row_count if width else 0)
    usual = _usual_tasks(design) if design.adapts else tasks
    predicted |= costs(
        [(task, design.devices) for task in usual], lookups=decoded, items=design.dimensions
    )
    if design.adapts:
        predicted |= {"bytes_if_mean_is_zero": traffic(usual)["bytes_per_device"]}
    return predicted | {
        "cells": cells or design.dimensions,
        "rounds": len(tasks) * design.cohort_count,
        "assumes": assumes,
    }


def _predict_clipped(study: Study, design: ClippedMeanDesign) -> dict[str, Any]:
    """The prediction for the mean in units of the clip, and the first round's traffic."""
    predicted, norms = _predict(study, design.mean), traffic([design.norm_task()])
    longer = round(design.longer(study.answering()))
    unit = f"errors and norms are in units of the clip, and about {longer:,} vectors are longer"
    assumes = predicted["assumes"]
    predicted["assumes"] = f"{assumes}; {unit}"
    for name in ("bytes_per_device", "bytes_down", "bytes_if_mean_is_zero"):
        if name in predicted:
            predicted[name] += norms.get(name, norms["bytes_per_device"])
    return predicted | {"rounds": predicted["rounds"] + design.mean.cohort_count}


def _noise_error(design: MeanDesign, round: int, width: int, count: int) -> float:
    """The L2 error of the mean from noise and rounding."""
    sketch = design.sketch(round, width)
    variance = design.noise(round, width, count) ** 2 + count / (4 * sketch.scale**2)
    if sketch.dense is not None:
        variance *= median_variance(sketch.dense.blocks)
    return math.sqrt(design.dimensions * variance) / count


def _warnings(study: Study, design: MeanDesign) -> list[str]:
    warnings = common_warnings(study)
    noise = _noise_error(design, len(design.shares) - 1, 0, answering(design))
    if study.epsilon is not None and noise > design.clip:
        warnings.append(
            f"the noise alone causes an error of {noise:.3g}, more than the largest possible mean "
            f"({design.clip:g}); ask more devices, or raise epsilon"
        )
    whole = replace(
        design, compression="none", search_share=None, paper_epsilon=None,
        most_cells=design.dimensions,
    )  # fmt: skip
    if design.compression == "adapt_norm" and study.bytes_per_device is None:
        least, bytes_whole = traffic(_usual_tasks(design))["bytes_per_device"], _upload(whole)
        if least >= bytes_whole:
            warnings.append(
                f"whole vectors err less, and take {bytes_whole:,} bytes per device; adapt_norm "
                f"takes at least {least:,}: leave out compression"
            )
    if design.compression == "adapt_tail":
        width, round = design.tail_widths[0], len(design.shares) - 1
        count = answering(design)
        times = _noise_error(design, round, width, count) / _noise_error(whole, 0, 0, count)
        warnings.append(
            f"adapt_tail asks up to {len(design.tail_widths)} times for a size and reads medians: "
            f"its error is about {times:.2g} times that of whole vectors, which take "
            f"{_upload(whole):,} bytes per device, and it takes up to {_upload(design):,}; use "
            "none or adapt_norm unless you compare with the paper"
        )
    if design.top is not None:
        warnings.append(f"selecting the {design.top:,} largest coordinates makes the mean biased")
    return warnings

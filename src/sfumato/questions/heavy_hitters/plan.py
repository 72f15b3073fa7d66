"""Size a question about an open domain: the table, the sampling rate and the threshold."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import numpy as np

from sfumato.arrays import F64
from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.release import Privacy
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.task import bits_for
from sfumato.privacy import ListedAbove, NoNoise, best_list
from sfumato.privacy.listing import without_promise
from sfumato.privacy.samplers import LARGEST_SCALE
from sfumato.questions import sizing
from sfumato.questions.answers import with_sampling
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.design import FrequencyDesign, Mode
from sfumato.questions.frequencies.plan import (
    DEFAULT_BYTES,
    READINGS,
    SMALLEST_WIDTH,
    common_warnings,
    noise_for,
    reference_law,
    rehearse,
    secure_of,
)
from sfumato.questions.heavy_hitters.design import (
    LOAD,
    PAPER_LOAD,
    TAIL_BITS,
    HeavyHitterDesign,
    HistogramDesign,
    most_in_round,
    most_sampled,
    slack,
)
from sfumato.questions.promise import (
    ZERO_ITEMS,
    device_promise,
    sum_visibility,
)
from sfumato.questions.question import Plan
from sfumato.sketch import (
    CountSketch,
    InvertibleSketch,
    Keys,
    OneHot,
    TextKeys,
    WordKeys,
    capacity,
)
from sfumato.sketch.words import LONGEST_WORD
from sfumato.study import Study

CHECK_BITS = 22  # per cell: about 0.001 wrong keys in thirty rounds
UNLISTED = 0.1  # share of delta for tables that cannot be listed
STATISTIC = 0.1  # share of epsilon for how full a table was
NAMES = 0.5  # share of a histogram's budget for its names
_COUNTS = 0.495  # share for its counts: the accountant rounds up
MOST_ROWS = 8
LEAST_RATE = 2.0**-12  # smallest useful sampling rate
_MOST_RANKS = 1 << 20  # of the reference law
_LEAST_KEYS = 16  # smallest capacity of a table
LONGEST_ITEM = 24  # bytes, unless the study says otherwise: every cell has room for a key


ListDesign = HeavyHitterDesign | HistogramDesign


def plan(study: Study) -> Plan:
    """Plan a study that lists heavy hitters and, for a histogram, then counts them."""
    limit = study.bytes_per_device or DEFAULT_BYTES
    design: ListDesign
    if study.facts.counts_all:
        design = _histogram(study, limit)
    else:
        design = _names(study, limit, 1, study.epsilon, study.delta)
    names, mechanism = design.names, design.names.mechanism
    detectable = check_threshold(study, mechanism, also=", bytes_per_device")
    predicted: dict[str, Any] = {
        "detectable_count": detectable,
        **(
            list_errors(study, mechanism, detectable)
            if design.counts is None
            else histogram_errors(study, design.counts)
        ),
        "sampling_rate": mechanism.rate,
        "keys_a_table_lists": round(
            names.target if names.partial else names.most_keys or names.most_sampled(mechanism.rate)
        ),
        **traffic(design),
        **_costs(design, detectable),
        "rounds": names.rounds,
        "assumes": "nothing about the data"
        if not names.adaptive
        else "the first sampling rate, which adapts to the tables",
    }
    return Plan(
        study=study,
        design=design,
        algorithm=algorithm(design),
        predicted=predicted,
        privacy=promise(study, design),
        warnings=tuple(_warnings(study, names)),
    )


def list_errors(study: Study, mechanism: ListedAbove, detectable: int) -> dict[str, float]:
    """The standard errors of an item with the detectable count and, if counts fall like the
    reference law, of the middle one of all that are detectable and of the largest."""
    three, scale = three_counts(study, detectable), 1 / (1 - study.expected_dropout)
    each = mechanism.most_per_item
    variance = three / scale * (1 / mechanism.rate - 1)
    variance += (mechanism.noise_stddev / mechanism.rate) ** 2
    missing = each * three * np.maximum(1 - three / (each * study.device_count), 0)
    return named_errors(with_sampling(np.sqrt(variance), missing, scale))


def histogram_errors(study: Study, counts: FrequencyDesign) -> dict[str, float]:
    """The standard errors of counts that a count sketch estimates, by a rehearsal."""
    errors = rehearse(counts, study).standard_error
    scale = 1 / (1 - study.expected_dropout)
    law = reference_law(errors.size)
    missing = study.device_count * study.items_per_device * law * (1 - law)
    errors = with_sampling(errors, missing, scale)
    return named_errors(errors[[-1, errors.size // 2, 0]])


def named_errors(errors: F64) -> dict[str, float]:
    names = ("standard_error", "standard_error_of_middle", "standard_error_of_largest")
    return dict(zip(names, errors.tolist(), strict=True))


def three_counts(study: Study, detectable: float) -> F64:
    """The detectable count, that of the middle one of all detectable items and the largest, if
    counts fall like the reference law over as many items as there are devices."""
    law = reference_law(min(study.device_count, _MOST_RANKS))
    counts = study.device_count * study.items_per_device * law
    detected = int(np.count_nonzero(counts >= detectable))
    return np.array([detectable, counts[detected // 2], counts[0]])


def keys_of(study: Study, longest: int) -> TextKeys | WordKeys:
    """The keys of a study's items: words of its alphabet, or any text up to a number of bytes,
    which is `longest` if the study does not say."""
    if study.alphabet is not None:
        return WordKeys(alphabet=study.alphabet, length=study.word_length or LONGEST_WORD)
    return TextKeys(length=study.word_length or longest)


def check_threshold(study: Study, mechanism: ListedAbove, also: str = "") -> int:
    """The smallest count that is listed with a probability of 95%; ImpossibleError if the study's
    threshold asks for rarer items than a private list can have. `also` names another
    key that could be raised."""
    answering = 1 - study.expected_dropout
    least = mechanism.detectable(answering=answering)
    if study.epsilon is not None and study.threshold and least > study.threshold:
        which, unit = "that so many devices hold", "devices"
        if mechanism.copies:
            which, unit = "with so many copies", "copies"
        raise ImpossibleError(
            f"threshold {study.threshold:g} asks for all items {which}; with "
            f"epsilon {study.epsilon:g} and delta {study.delta:g} they are found from {least:,} "
            f"{unit} up",
            hint=f"set threshold to {least}, or raise epsilon{also} or delta",
        )
    return mechanism.detectable((study.threshold or 0.0) * answering, answering=answering)


def check_delta(study: Study) -> None:
    """Refuse a delta of 0: a name that one device alone holds would always be listed, or never."""
    if study.epsilon is not None and study.delta == 0:
        raise ImpossibleError(
            "a list of unknown names needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / (study.devices or 1):.1g}",
        )


def _costs(design: ListDesign, detectable: float) -> dict[str, float | int]:
    """Every cell of a table is read once, and each listed item in every round's counts."""
    names, tasks = design.names, [(design.names.tasks()[0], design.names.devices)]
    listed = names.devices * names.items_per_device / max(detectable, 1)
    lookups = float(tasks[0][0].cells * names.rounds)
    if design.counts is not None:
        tasks.append((design.counts.main_task(0), design.counts.devices))
        lookups += READINGS * listed * design.counts.rows * names.rounds
    return costs(tasks, lookups=lookups, items=listed)


def traffic(design: ListDesign) -> dict[str, int]:
    """The bytes that a device sends, or in masked rounds sends and receives."""
    tasks = [design.names.tasks()[0]]
    if design.counts is not None:
        tasks.append(design.counts.main_task(0))
    return secure_sum.traffic(tasks)


def algorithm(design: ListDesign) -> str:
    names = design.names
    mechanism = names.mechanism
    sampling = "whole" if mechanism.rate == 1 and not names.adaptive else "sampled"
    text = "masked " if names.secure is not None else ""
    text += f"{'adaptively ' if names.adaptive else ''}{sampling} invertible sketch"
    if names.rounds > 1:
        text += "es"
    if mechanism.epsilon is not None:
        text += ", listed above a threshold"
        text += "" if mechanism.noise == "none" else f" with {mechanism.noise_title} noise"
    if design.counts is not None:
        text += f"; counts by {design.counts.mode} count sketches"
    return text


def promise(study: Study, design: ListDesign) -> Privacy:
    """The privacy statement of a design, which holds for all of its releases."""
    names = design.names
    mechanism = names.mechanism
    description = ""
    if study.epsilon is not None:
        description = (
            f"items are sampled with probability {mechanism.rate:.4g}; "
            if mechanism.rate < 1
            else ""
        )
        description += (
            "counts of the sample get no further noise"
            if mechanism.noise == "none"
            else f"{mechanism.noise_title} noise of scale {mechanism.scale:.4f} on each count"
        )
        description += (
            f"; names seen fewer than {mechanism.threshold} times in the sample are not released"
        )
        if design.counts is not None:
            scale = design.counts.parameters()["noise_scale"]
            description += f"; noise of scale {scale:.4f} on each cell of the counts' sketches"
    if names.secure is None:
        sees = "the collector sees each device's table"
    else:
        sees = sum_visibility(names.tasks()[0])
    adds_noise = design.counts is not None and study.epsilon is not None
    sees += "; it is trusted to list their sum"
    sees += ", to add the noise to the counts" if adds_noise else ""
    sees += " and to release only names above the threshold"
    return device_promise(
        study,
        exact="names and counts",
        neighbours=ZERO_ITEMS,
        mechanism=description,
        sees=sees,
        secure=names.secure,
        assumptions=(
            "devices' items do not depend on the study's public seed, which determines the hash "
            "functions",
        ),
        influence=design.influence,
    )


def _names(
    study: Study, limit: int, parts: int, epsilon: float | None, delta: float
) -> HeavyHitterDesign:
    """A search for names that may use one of `parts` equal parts of the bytes."""
    if epsilon is None:
        return _open(study, limit, parts)
    check_delta(study)
    return _private(study, limit, parts, epsilon, delta)


def _open(study: Study, limit: int, parts: int) -> HeavyHitterDesign:
    """Without a guarantee: tables as full as they can be read."""
    keys, items = keys_of(study, LONGEST_ITEM), _items_of_a_round(study)
    paper = study.paper_mode
    adaptive = study.round_count > 1 if study.adaptive is None else study.adaptive
    cell_bits = _cell_bits(keys, items, CHECK_BITS)
    besides = _besides(study)
    cells = max(0, limit // parts - besides) * 8 // cell_bits
    width = cells // 3
    least = 3 * math.ceil(2 * _LEAST_KEYS / 3)
    if cells < least:
        raise _too_small(limit, parts * (besides + -(-least * cell_bits // 8)), keys)
    target = LOAD * 3 * width
    if paper or not adaptive:
        target = capacity.typical_keys(3 * width) * (PAPER_LOAD if paper and adaptive else 1.0)
    rate = min(1.0, target / items)
    if paper and not adaptive and study.threshold:  # appendix D: 1/t, t = max(1, min(M/L0, tau/2))
        rate = min(1.0, max(rate, 2 / study.threshold))
    return HeavyHitterDesign(
        keys=keys,
        devices=study.device_count,
        rounds=study.round_count,
        rows=3,
        width=width,
        cell_bits=cell_bits,
        seed=0,
        items_per_device=study.items_per_device,
        mechanism=without_promise(rate, study.items_per_device, copies=study.count == "copies"),
        adaptive=adaptive,
        target=target,
        partial=not paper,
        paper=paper,
        secure=secure_of(study),
    )


def _private(
    study: Study, limit: int, parts: int, epsilon: float, delta: float
) -> HeavyHitterDesign:
    """With a guarantee: tables that can almost surely be listed, whatever devices hold."""
    keys, items = keys_of(study, LONGEST_ITEM), _items_of_a_round(study)
    adaptive = bool(study.adaptive)
    unlisted = UNLISTED * delta
    failure = unlisted / (1 + math.exp(epsilon))  # it may distinguish neighbours in both directions
    failure /= study.round_count  # a list without noise uses the sampling of all rounds
    statistic = STATISTIC * epsilon if adaptive else 0.0
    spare = slack(study.items_per_device, statistic, failure) if adaptive else 0
    if adaptive:
        _check_scale(study.items_per_device / statistic)
    table = _Table(keys, items, failure / 4, adaptive, _besides(study))
    least = min(items, max(_LEAST_KEYS, most_sampled(items, LEAST_RATE)))
    need = table.bytes(least + spare)
    if limit // parts < need:
        raise _too_small(limit, parts * need, keys)
    room = max(table.most_keys(limit // parts) - spare, least)
    rate = 1.0
    if room < items:  # the highest possible, in steps of the lowest
        steps = range(1, round(1 / LEAST_RATE))
        rate = LEAST_RATE * bisect_left(
            steps, True, key=lambda step: most_sampled(items, step * LEAST_RATE) > room
        )
    sketch = table.sketch(min(room + spare, items))
    mechanism: ListedAbove = best_list(
        rate,
        threshold=study.threshold or 0.0,
        answering=1 - study.expected_dropout,
        items_per_device=study.items_per_device,
        epsilon=epsilon,
        delta=delta,
        unlisted=unlisted,
        statistic=statistic,
        amplified=not adaptive,
        copies=study.count == "copies",
    )
    return HeavyHitterDesign(
        keys=keys,
        devices=study.device_count,
        rounds=study.round_count,
        rows=sketch.rows,
        width=sketch.width,
        count_bits=sketch.count_bits,
        check_bits=sketch.check_bits,
        seed=0,
        items_per_device=study.items_per_device,
        mechanism=mechanism,
        adaptive=adaptive,
        target=PAPER_LOAD * room,
        most_keys=room if adaptive else None,
        partial=False,
        secure=secure_of(study),
    )


def _check_scale(scale: float) -> None:
    most = LARGEST_SCALE["laplace"]
    if scale > most:
        raise ImpossibleError(
            f"an adaptive rate would need noise of scale {scale:,.0f}, above the sampler's limit "
            f"of {most:,}",
            hint="leave out adaptive, raise epsilon, or set items_per_device lower",
        )


class _Table:
    """Sizes tables of a number of keys so that listing fails with a small probability."""

    def __init__(
        self, keys: Keys, items: int, failure: float, adaptive: bool, besides: int
    ) -> None:
        self.keys, self.items, self.adaptive, self.besides = keys, items, adaptive, besides
        self.failure = failure - 2.0**-TAIL_BITS
        if self.failure <= 0:
            raise ImpossibleError(
                "delta is too small to allow for tables that cannot be listed",
                hint=f"multiply delta by {math.ceil(2 * 2.0**-TAIL_BITS / failure)}",
            )

    def sketch(self, count: int) -> InvertibleSketch:
        """The smallest sketch that lists `count` keys."""
        most_rows = MOST_ROWS if count < 1_000 else 6  # more rows only help small tables
        rows, width = capacity.sized(count, self.failure, most_rows=most_rows)
        insertions = self.items if self.adaptive else min(self.items, count)
        checked = checked_sketch(self.keys, rows, width, count, insertions, self.failure)
        if checked is None:
            raise ImpossibleError(
                "delta is too small to allow for misread keys",
                hint="raise delta, or use more rounds",
            )
        return checked[0]

    def bytes(self, count: int) -> int:
        sketch = self.sketch(count)
        return self.besides + -(-sketch.rows * sketch.width * sketch.cell_bits // 8)

    def most_keys(self, limit: int) -> int:
        """About the largest number of keys for which a table has at most `limit` bytes; or 0."""
        high = min(self.items, 8 * limit // self.keys.bits)  # at least one cell per key
        count, best = high, 0
        for _ in range(8):  # sizes are nearly proportional to keys
            size = self.bytes(count)
            if size <= limit:
                best = max(best, count)
                if count == high or size > 0.985 * limit:
                    break
            count = min(high, int(0.997 * count * limit / size))
            if count <= best:
                break
        return best


def checked_sketch(
    keys: Keys,
    rows: int,
    width: int,
    count: int,
    insertions: int,
    allowed: float,
    *,
    value_bits: int = 0,
) -> tuple[InvertibleSketch, float] | None:
    """The sketch of `count` keys with the fewest bits that check for wrong keys, of which it may
    list `allowed` on average, and the number that it does; None if a cell has no room for them."""
    count_bits = max(1, insertions.bit_length())
    for check_bits in range(max(2, count_bits - 1), min(44, 60 - value_bits - count_bits) + 1):
        sketch = InvertibleSketch(
            keys=keys, rows=rows, width=width, count_bits=count_bits, value_bits=value_bits,
            check_bits=check_bits, seed=0,
        )  # fmt: skip
        wrong = sketch.wrong_keys(count, insertions) + sketch.collisions(count)
        if wrong <= allowed:
            return sketch, wrong
    return None


def _cell_bits(keys: Keys, most: int, check_bits: int) -> int:
    """The bits of a cell for up to `most` insertions with at least `check_bits`."""
    count_bits = max(1, most.bit_length())
    for words in range(1, 64):
        each = max(2, count_bits - 1, -(-check_bits // words))
        bits = -(-(keys.bits + count_bits) // words) + each
        if bits <= 62 and bits - each <= 60 and each <= 44:
            return words * bits
    raise StudyError(f"keys of {keys.bits} bits are too long")


def _histogram(study: Study, limit: int) -> HistogramDesign:
    """Names by an invertible sketch, counts of all items by a count sketch (ApproxHist)."""
    if study.count == "copies":
        raise StudyError(
            'count = "copies" of a histogram is for algorithm "sparse" or "threshold_sampling", '
            "whose devices answer once; this one asks them for counts in a second table",
        )
    epsilon = study.epsilon
    names = _names(
        study,
        limit,
        2,
        None if epsilon is None else NAMES * epsilon,
        NAMES * study.delta,
    )
    devices = study.device_count
    expected = max(1_000, round(devices * study.items_per_device / max(study.threshold or 1, 10)))
    rows = sizing.rows_for(expected, paper=study.paper_mode)
    cohort = -(-devices // study.round_count)
    most = most_in_round(cohort, masked=study.masked) * study.items_per_device
    besides = _besides(study)
    width = max(0, limit - limit // 2 - besides) * 8 // bits_for(most) // rows
    if width < SMALLEST_WIDTH:
        need = 2 * (besides + -(-rows * SMALLEST_WIDTH * bits_for(most) // 8))
        raise ImpossibleError(
            f"a histogram's counts need at least {need:,} bytes per device; bytes_per_device is "
            f"{limit}",
            hint=f"set bytes_per_device to {need} or more",
        )
    share = None if epsilon is None else _COUNTS * epsilon
    part = replace(study, epsilon=share, delta=(1 - NAMES) * study.delta, trust="central")
    norms = CountSketch(rows=rows, width=width, seed=0).sensitivity(study.items_per_device)
    mode: Mode = "fresh" if study.cohorts == "different" else "hybrid"
    counts = FrequencyDesign(
        mode="shared" if study.round_count == 1 else mode,
        items=expected,
        devices=devices,
        rounds=study.round_count,
        rows=rows,
        width=width,
        seed=0,
        items_per_device=study.items_per_device,
        mechanism=noise_for(part, norms),
        decode="median" if study.paper_mode else "refined",
        every_round=True,
        secure=secure_of(study),
    )
    return HistogramDesign(names=names, counts=counts)


def _items_of_a_round(study: Study) -> int:
    """An upper limit on the items that the devices of one round send."""
    cohort = -(-study.device_count // study.round_count)
    return most_in_round(cohort, masked=study.masked) * study.items_per_device


def _besides(study: Study) -> int:
    """The bytes that a device sends besides the cells of one table."""
    secure = secure_of(study)
    if secure is None:
        return HEADER_BYTES
    task = secure.task(
        sketch=OneHot(categories=1),
        mechanism=NoNoise(),
        campaign="",
        cohort="",
        devices=-(-study.device_count // study.round_count),
        items_per_device=1,
    )
    return secure_sum.bytes_of(task)[0] - task.message_bytes


def _too_small(limit: int, need: int, keys: Keys) -> ImpossibleError:
    return ImpossibleError(
        f"a table with keys of {keys.bits} bits needs at least {need:,} bytes per device; "
        f"bytes_per_device is {limit:,}",
        hint=f"set bytes_per_device to {need} or more, or reduce word_length",
    )


def _warnings(study: Study, names: HeavyHitterDesign) -> list[str]:
    warnings = common_warnings(study)
    if study.threshold is None and names.mechanism.epsilon is None:
        warnings.append("threshold is not set, so every item that is found will be listed")
    if names.mechanism.rate < 1 and names.mechanism.epsilon is not None:
        warnings.append(
            f"tables have room for a share of {names.mechanism.rate:.3g} of the items; a larger "
            "bytes_per_device would find rarer ones"
        )
    return warnings

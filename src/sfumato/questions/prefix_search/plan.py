"""Size a search by prefixes, and state its privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.errors import ImpossibleError
from sfumato.flow import secure_sum
from sfumato.flow.release import Privacy
from sfumato.flow.secure_sum import SecureSum
from sfumato.privacy import (
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    calibrate,
    epsilon_of,
    gaussian_stddev,
    least_noise,
)
from sfumato.privacy.accounting import epsilon_text
from sfumato.questions.answers import with_sampling
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.plan import (
    DEFAULT_BYTES,
    READINGS,
    REFERENCE_EXPONENT,
    SMALLEST_WIDTH,
    common_warnings,
    reference_law,
    secure_of,
)
from sfumato.questions.heavy_hitters.plan import named_errors, three_counts
from sfumato.questions.prefix_search.design import (
    MOST_CANDIDATES,
    SMALLEST,
    Level,
    PrefixDesign,
    detectable_count,
    noise_level,
)
from sfumato.questions.promise import (
    ZERO_OUT,
    device_promise,
    sum_visibility,
)
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch import CountSketch, Norms, OneHot
from sfumato.sketch.words import BYTES, LONGEST_WORD, check_alphabet, endings
from sfumato.study import Study, require

ROWS = 5
ANY_TEXT_BYTES = 2 * DEFAULT_BYTES  # a search among all texts takes more rounds; doubled if needed
LEDGER_ROUNDING = 1e-9  # relative tolerance of a ledger
_STANDARD = NormalDist()
_TRIES = 4  # the number of rounds and the bytes of each depend on each other


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a search for words under secure sums."""
    limit = study.bytes_per_device or (ANY_TEXT_BYTES if study.alphabet is None else DEFAULT_BYTES)
    try:
        design = _fit(study, limit)
    except _TooSmallError as problem:
        enough = _enough(study, limit)
        if study.bytes_per_device is not None:
            raise ImpossibleError(
                f"a search by prefixes is not possible with {limit:,} bytes per device",
                hint=f"set bytes_per_device to {enough} or more",
            ) from problem
        design = _fit(study, enough)
    predicted = predict(design)
    scale = study.device_count / study.answering()
    detectable = predicted.pop("detectable")
    three = three_counts(study, detectable)
    missing = three * np.maximum(1 - three / study.device_count, 0)
    errors = with_sampling(np.full(3, predicted.pop("standard_error")), missing, scale)
    return Plan(
        study=study,
        design=design,
        algorithm=algorithm(design),
        predicted={
            "detectable_count": round(detectable),
            **named_errors(errors),
            **predicted,
        },
        privacy=promise(study, design),
        warnings=tuple(common_warnings(study)),
    )


def algorithm(design: PrefixDesign) -> str:
    steps = ", ".join(map(str, design.lengths))
    return f"prefixes of {steps} characters in masked rounds"


def promise(study: Study, design: PrefixDesign) -> Privacy:
    """The privacy statement of a search, which holds for all of its releases."""
    mechanism = ""
    if study.epsilon is not None:
        noise = design.mechanism
        assert isinstance(noise, NoiseInShares)  # a finite epsilon has noise
        spent = epsilon_of([task.loss for task in design.tasks()], study.delta)
        rounds = "one round" if design.rounds == 1 else f"{design.rounds} rounds"
        mechanism = (
            f"Skellam noise of scale {noise.scale:.4f} on every cell, at a cost of epsilon "
            f"{epsilon_text(spent)} in {rounds} of all devices"
        )
    return device_promise(
        study,
        neighbours=ZERO_OUT.format("tables become"),
        mechanism=mechanism,
        sees=sum_visibility(design.task(design.rounds - 1)),
        secure=design.secure,
        influence=design.influence,
    )


class _TooSmallError(ImpossibleError):
    """A round's table, or all rounds together, need more bytes."""


def _enough(study: Study, limit: int) -> int:
    """The limit in bytes per device, doubled until a search is possible."""
    while True:
        limit *= 2
        try:
            _fit(study, limit)
        except _TooSmallError:
            continue
        return limit


def _fit(study: Study, limit: int) -> PrefixDesign:
    """The search whose rounds together send at most `limit` bytes."""
    design = _size(study, max(limit // 3, DEFAULT_BYTES // 3))  # to estimate the number of rounds
    besides = _besides(design)
    for _ in range(_TRIES):
        again = _size(study, limit // design.rounds - besides)
        if again.rounds <= design.rounds:
            return again
        design = again
    raise _TooSmallError(f"a search in {design.rounds} rounds needs more than {limit:,} bytes")


def _size(study: Study, bytes_per_round: int) -> PrefixDesign:
    return sized(
        devices=study.device_count,
        length=study.word_length or LONGEST_WORD,
        bytes_per_round=bytes_per_round,
        epsilon=study.epsilon,
        delta=study.delta,
        secure=secure_of(study),
        alphabet=BYTES if study.alphabet is None else study.alphabet,
        items_per_device=study.items_per_device,
        cohort_count=study.round_count,
    )


def _besides(design: PrefixDesign) -> int:
    """The bytes that a device sends in a round besides cells."""
    task = design.task(design.rounds - 1)
    return secure_sum.bytes_of(task)[0] - task.message_bytes


def sized(
    *,
    devices: int,
    length: int,
    bytes_per_round: int,
    epsilon: float | None,
    delta: float,
    secure: SecureSum | None,
    alphabet: str = BYTES,
    items_per_device: int = 1,
    cohort_count: int = 1,
    seed: int = 0,
    most_candidates: int = MOST_CANDIDATES,
) -> PrefixDesign:
    """The search with the fewest levels that `most_candidates` allows, and its noise.

    `bytes_per_round` is for the cells of one table. The number of prefixes that a level keeps is at
    most devices/detectable, since no more can be that common.
    """
    require(
        items_per_device == 1,
        "a search by prefixes takes one word per device, chosen by the device; "
        f"got items_per_device = {items_per_device}",
    )
    require.at_least(1, devices=devices)
    require(
        epsilon is None or 0 < epsilon < math.inf,
        f"epsilon must be above 0 and finite (None for no guarantee); got {epsilon}",
    )
    require(0 <= delta < 1, f"delta must be at least 0 and below 1; got {delta}")
    check_alphabet(length, alphabet)
    radix = len(alphabet) + 1
    first = 1
    while first < length and radix ** (first + 1) <= most_candidates / 8:
        first += 1
    cohort = -(-devices // cohort_count)
    for levels in range(1, length - first + 2):
        noise = _noise(ROWS * levels, cohort, secure, epsilon, delta, exact=False)
        start = PrefixDesign(
            alphabet=alphabet,
            lengths=(first,),
            devices=devices,
            rows=ROWS,
            width=SMALLEST_WIDTH,
            seed=seed,
            mechanism=noise,
            secure=secure,
            most_candidates=most_candidates,
            cohort_count=cohort_count,
        )
        start = replace(start, width=_width(start, bytes_per_round))
        design = _with_lengths(start, length)
        if design.rounds <= levels:
            break
    cells = sum(task.contribution.unit_cells for task in design.tasks())
    noise = _noise(cells, cohort, secure, epsilon, delta, exact=True)
    design = replace(design, mechanism=noise)
    return design if epsilon is None else _within(design, epsilon, delta)


def predict(design: PrefixDesign, *, answering: int | None = None) -> dict[str, Any]:
    """The predicted error and cost of a search, if `answering` devices answer at every level; by
    default, all except the expected dropouts. `detectable` counts all devices, and `standard_error`
    is of counts over those that answer."""
    count = _answering(design) if answering is None else answering
    levels: list[Level] = []
    candidates = endings(design.lengths[0], design.radix) - 1  # without the empty word
    lookups = 0
    for level, length in enumerate(design.lengths):
        lookups += READINGS * candidates * design.rows
        rate = design.rate(level, candidates)
        levels.append(_predict_level(design.sketch(level), design.mechanism, count, rate))
        if level < design.rounds - 1:
            step = endings(design.lengths[level + 1] - length, design.radix)
            expected = math.ceil(_survivors(design, count, levels) * step)
            candidates = min(expected, design.most_candidates)
    detectable = detectable_count(levels, min(count / design.devices, 1.0))
    sketched = any(isinstance(design.sketch(level), CountSketch) for level in range(design.rounds))
    return {
        "detectable": detectable,
        "detectable_share": detectable / design.devices,
        "standard_error": levels[-1].error,
        "rounds": design.task_count,
        **secure_sum.traffic(design.tasks()),
        **costs(
            [(task, design.devices) for task in design.tasks()],
            lookups=lookups,
            items=count / max(detectable, 1),
        ),
        "assumes": design.fitting()
        + (f"; counts fall like rank^-{REFERENCE_EXPONENT}" if sketched else ""),
    }


def _answering(design: PrefixDesign) -> int:
    dropout = 0.0 if design.secure is None else design.secure.dropout
    return max(1, math.floor(design.devices * (1 - dropout)))


def _survivors(design: PrefixDesign, answering: int, levels: Sequence[Level]) -> float:
    """A bound on the prefixes kept at the last of these levels: no more can be that common."""
    return answering / detectable_count(levels) + design.false_prefixes


def _with_lengths(start: PrefixDesign, length: int) -> PrefixDesign:
    """Add lengths after the first, in the largest steps with few enough candidates."""
    design, answering, levels = start, _answering(start), list[Level]()
    candidates = endings(start.length, start.radix) - 1
    while design.length < length:
        rate = min(design.false_prefixes / candidates, 0.5)
        sketch = design.sketch(design.rounds - 1)
        levels.append(_predict_level(sketch, design.mechanism, answering, rate))
        survivors, step = _survivors(design, answering, levels), 1
        while survivors * design.radix ** (step + 1) <= design.most_candidates:
            step += 1
        step = min(step, length - design.length)
        candidates = min(math.ceil(survivors * endings(step, design.radix)), design.most_candidates)
        design = replace(design, lengths=(*design.lengths, design.length + step))
    return design


def _predict_level(
    sketch: OneHot | CountSketch, mechanism: Mechanism, answering: int, rate: float
) -> Level:
    """A level's error from noise, and from collisions with prefixes too rare to be peeled."""
    noise = mechanism.stddev(answering)
    if isinstance(sketch, OneHot):
        return noise_level(mechanism, answering, rate)
    deviations = -_STANDARD.inv_cdf(rate)
    squares = (answering * reference_law(min(answering, 1 << 20))) ** 2
    left = np.cumsum(squares[::-1])[::-1]  # the rest after peeling all before
    most = min(
        sketch.rows * sketch.width // 2, squares.size - 1
    )  # largest number that can be peeled
    peeled, limit = -1, math.inf
    while (above := min(int(np.count_nonzero(squares > limit**2)), most)) > peeled:
        peeled = above
        error = math.sqrt((noise**2 + left[peeled] / sketch.width) / sketch.rows)
        limit = max(deviations * error, SMALLEST)
    return Level(limit, error)


def _width(start: PrefixDesign, most_bytes: int) -> int:
    """The widest table of at most `most_bytes`; wider tables never have smaller cells."""
    widest = max(most_bytes * 8 // (2 * start.rows), SMALLEST_WIDTH)
    sketch = CountSketch(rows=start.rows, width=widest, seed=start.seed)
    bits = start.task_for(sketch).aggregation.modulus_bits
    width = most_bytes * 8 // (bits * start.rows)
    if width < SMALLEST_WIDTH:
        need = -(-SMALLEST_WIDTH * start.rows * bits // 8)
        raise _TooSmallError(
            f"a search by prefixes needs at least {need:,} bytes per round for cells; "
            f"bytes_per_round is {most_bytes:,}",
            hint=f"set bytes_per_round to {need} or more",
        )
    return width


def _noise(
    cells: int,
    devices: int,
    secure: SecureSum | None,
    epsilon: float | None,
    delta: float,
    *,
    exact: bool,
) -> Mechanism:
    """The least noise if a device changes `cells` cells by one, over all levels; within about a per
    cent unless `exact`, which takes a second."""
    if epsilon is None:
        return NoNoise()
    if secure is not None and delta == 0:
        raise ImpossibleError(
            "noise in shares needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / devices:.1g}",
        )
    l1, l2 = float(cells), math.sqrt(cells)
    if secure is None:
        norms = Norms(l1=l1, l2=l2, unit_cells=cells)
        return least_noise(norms, epsilon=epsilon, delta=delta, is_rough=not exact)
    scale = (
        calibrate("skellam", l1=l1, l2=l2, unit_cells=cells, epsilon=epsilon, delta=delta)
        if exact
        else gaussian_stddev(l2, epsilon, delta)
    )
    return secure.noise(scale, devices)


def _within(design: PrefixDesign, epsilon: float, delta: float) -> PrefixDesign:
    """Increase the noise until the ledger, which composes level by level and may round differently,
    stays within epsilon."""
    while epsilon_of([task.loss for task in design.tasks()], delta) > epsilon * (
        1 + LEDGER_ROUNDING
    ):
        assert isinstance(design.mechanism, NoiseAtRelease | NoiseInShares)  # a finite epsilon
        noise = replace(design.mechanism, scale=design.mechanism.scale * 1.001)
        design = replace(design, mechanism=noise)
    return design

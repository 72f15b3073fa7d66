"""How a search by prefixes is sized, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.release import Privacy
from sfumato.flow.secure_sum import SecureSum
from sfumato.privacy import (
    Mechanism,
    Noise,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    calibrate,
    epsilon_of,
    gaussian_stddev,
)
from sfumato.questions.frequencies.plan import (
    DEFAULT_BYTES,
    REFERENCE_EXPONENT,
    SMALLEST_WIDTH,
    about_rounds,
    secure_of,
)
from sfumato.questions.prefix_search.design import (
    MOST_CANDIDATES,
    SMALLEST,
    Level,
    PrefixDesign,
    detectable_count,
    endings,
    noise_level,
)
from sfumato.questions.promise import (
    DROPOUTS,
    NO_PROMISE,
    ZERO_OUT,
    in_words,
    who_colludes,
    who_sees_sums,
)
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch import CountSketch, OneHot
from sfumato.sketch.words import LATIN, check_alphabet
from sfumato.spec import require
from sfumato.study import Study

ROWS = 5
LEDGER_ROUNDING = 1e-9  # what a ledger forgives, relative
_STANDARD = NormalDist()
_TRIES = 4  # the number of rounds decides the bytes of each, and the bytes how many there are


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """The plan of a search for words under secure sums."""
    assert study.devices is not None  # planning has checked
    limit = study.bytes_per_device or DEFAULT_BYTES
    try:
        design = _fitted(study, limit)
    except _TooSmallError as problem:
        raise ImpossibleError(
            f"a search by prefixes cannot be had with {limit:,} bytes a device",
            hint=f"set bytes_per_device to {_enough(study, limit)} or more",
        ) from problem
    predicted = predicted_of(design)
    detectable = predicted.pop("detectable")
    scale = study.devices / max(1, int(study.devices * (1 - study.dropout)))
    return Plan(
        study=study,
        design=design,
        algorithm=algorithm(design),
        predicted={"detectable_count": round(scale * detectable), **predicted},
        privacy=promise(study, design),
        warnings=tuple(_warnings(study)),
    )


def algorithm(design: PrefixDesign) -> str:
    steps = ", ".join(map(str, design.lengths))
    return f"prefixes of {steps} characters in masked rounds"


def promise(study: Study, design: PrefixDesign) -> Privacy:
    """The privacy statement of a search, true of every release it makes."""
    guarantee, mechanism, assumptions = NO_PROMISE, "none", who_colludes(design.secure)
    if study.epsilon is not None:
        noise = design.mechanism
        assert isinstance(noise, NoiseInShares)  # a finite epsilon has noise
        spent = epsilon_of([task.loss for task in design.tasks()], study.delta)
        guarantee = in_words(study.epsilon, study.delta)
        rounds = "a round" if design.rounds == 1 else f"{design.rounds} rounds"
        mechanism = (
            f"Skellam noise of scale {noise.scale:.4f} on every cell spends epsilon {spent:.4f} in "
            f"{rounds} of all devices"
        )
        assumptions += (DROPOUTS,)
    return Privacy(
        epsilon=study.epsilon,
        delta=study.delta if study.epsilon is not None else 0.0,
        guarantee=guarantee,
        unit="device",
        neighbours=ZERO_OUT.format("tables become"),
        mechanism=mechanism,
        trust=study.trust,
        sees=who_sees_sums(design.task(design.rounds - 1)),
        assumptions=assumptions,
    )


class _TooSmallError(ImpossibleError):
    """A round's table, or all rounds together, do not fit."""


def _enough(study: Study, limit: int) -> int:
    """Bytes a device with which there is a search: those given, doubled until there is one."""
    while True:
        limit *= 2
        try:
            _fitted(study, limit)
        except _TooSmallError:
            continue
        return limit


def _fitted(study: Study, limit: int) -> PrefixDesign:
    """The search whose rounds send so many bytes together."""
    made = _sized(study, max(limit // 3, DEFAULT_BYTES // 3))  # for how many rounds there may be
    besides = _besides(made)
    for _ in range(_TRIES):
        again = _sized(study, limit // made.rounds - besides)
        if again.rounds <= made.rounds:
            return again
        made = again
    raise _TooSmallError(f"a search in {made.rounds} rounds needs more than {limit:,} bytes")


def _sized(study: Study, bytes_per_round: int) -> PrefixDesign:
    assert study.devices is not None  # plan() has checked
    return sized(
        devices=study.devices,
        length=study.word_length,
        bytes_per_round=bytes_per_round,
        epsilon=study.epsilon,
        delta=study.delta,
        secure=secure_of(study),
        alphabet=LATIN if study.alphabet is None else study.alphabet,
        items_per_device=study.items_per_device,
    )


def _besides(design: PrefixDesign) -> int:
    """What a device sends in a round besides cells."""
    task = design.task(design.rounds - 1)
    return secure_sum.bytes_of(task)[0] - task.message_bytes


def _warnings(study: Study) -> list[str]:
    found = about_rounds(replace(study, rounds=1))
    if study.rounds > 1:
        found.append("rounds has no effect: every round of a search by prefixes asks everybody")
    if study.target_error is not None:
        found.append("target_error has no effect: an open domain is sized by bytes_per_device")
    return found


def sized(
    *,
    devices: int,
    length: int,
    bytes_per_round: int,
    epsilon: float | None,
    delta: float,
    secure: SecureSum | None,
    alphabet: str = LATIN,
    items_per_device: int = 1,
    rows: int = ROWS,
    seed: int = 0,
    false_prefixes: float = 20.0,
    most_candidates: int = MOST_CANDIDATES,
) -> PrefixDesign:
    """The search with the fewest levels whose candidates can be read, and its noise.

    `bytes_per_round` is for the cells of one table. Levels are as long as `most_candidates` allows
    for what is expected to be kept: at most devices/detectable prefixes can be that common.
    """
    require(
        items_per_device == 1,
        f"a search by prefixes takes one word a device; got items_per_device = {items_per_device}; "
        f"let each device choose one",
        StudyError,
    )
    require(devices >= 1, f"devices must be at least 1; got {devices}", StudyError)
    require(
        epsilon is None or 0 < epsilon < math.inf,
        f"epsilon must be above 0 and finite (None for no promise); got {epsilon}",
        StudyError,
    )
    require(0 <= delta < 1, f"delta must be at least 0, below 1; got {delta}", StudyError)
    check_alphabet(length, alphabet)
    radix = len(alphabet) + 1
    first = 1
    while first < length and radix ** (first + 1) <= most_candidates / 8:
        first += 1
    for levels in range(1, length - first + 2):
        noise = _noise(rows * levels, devices, secure, epsilon, delta, exact=False)
        start = PrefixDesign(
            alphabet=alphabet,
            lengths=(first,),
            devices=devices,
            rows=rows,
            width=SMALLEST_WIDTH,
            seed=seed,
            mechanism=noise,
            secure=secure,
            false_prefixes=false_prefixes,
            most_candidates=most_candidates,
        )
        start = replace(start, width=_width(start, bytes_per_round))
        grown = _grown(start, length)
        if grown.rounds <= levels:
            break
    cells = sum(task.contribution.unit_cells for task in grown.tasks())
    made = replace(grown, mechanism=_noise(cells, devices, secure, epsilon, delta, exact=True))
    return made if epsilon is None else _within(made, epsilon, delta)


def predicted_of(design: PrefixDesign, *, answering: int | None = None) -> dict[str, Any]:
    """What a search will find and cost, if so many devices answer at every level; if not given, all
    but those that a secure sum expects to vanish."""
    count = _answering(design) if answering is None else answering
    levels: list[Level] = []
    candidates = endings(design.lengths[0], design.radix) - 1  # the empty word is none
    for level, length in enumerate(design.lengths):
        rate = design.rate(level, candidates)
        levels.append(_foreseen(design.sketch(level), design.mechanism, count, rate))
        if level < design.rounds - 1:
            step = endings(design.lengths[level + 1] - length, design.radix)
            expected = math.ceil(_survivors(design, count, levels) * step)
            candidates = min(expected, design.most_candidates)
    detectable = detectable_count(levels)
    sketched = any(isinstance(design.sketch(level), CountSketch) for level in range(design.rounds))
    return {
        "detectable": detectable,
        "detectable_share": detectable / count,
        "standard_error": levels[-1].error,
        "rounds": design.rounds,
        **secure_sum.weights(design.tasks()),
        "assumes": f"counts fall off like rank^-{REFERENCE_EXPONENT}"
        if sketched
        else "nothing about the data",
    }


def _answering(design: PrefixDesign) -> int:
    dropout = 0.0 if design.secure is None else design.secure.dropout
    return max(1, math.floor(design.devices * (1 - dropout)))


def _survivors(design: PrefixDesign, answering: int, levels: Sequence[Level]) -> float:
    """Prefixes kept at the last of these levels: no more than that can be that common."""
    return answering / detectable_count(levels) + design.false_prefixes


def _grown(start: PrefixDesign, length: int) -> PrefixDesign:
    """Lengths from the first one on, in the largest steps that give few enough candidates."""
    made, answering, levels = start, _answering(start), list[Level]()
    candidates = endings(start.length, start.radix) - 1
    while made.length < length:
        rate = min(made.false_prefixes / candidates, 0.5)
        sketch = made.sketch(made.rounds - 1)
        levels.append(_foreseen(sketch, made.mechanism, answering, rate))
        survivors, step = _survivors(made, answering, levels), 1
        while survivors * made.radix ** (step + 1) <= made.most_candidates:
            step += 1
        step = min(step, length - made.length)
        candidates = min(math.ceil(survivors * endings(step, made.radix)), made.most_candidates)
        made = replace(made, lengths=(*made.lengths, made.length + step))
    return made


def _foreseen(
    sketch: OneHot | CountSketch, mechanism: Mechanism, answering: int, rate: float
) -> Level:
    """A level's error by its noise, and by collisions with what is too rare to be peeled."""
    noise = mechanism.stddev(answering)
    if isinstance(sketch, OneHot):
        return noise_level(mechanism, answering, rate)
    deviations = -_STANDARD.inv_cdf(rate)
    law = np.arange(1, min(answering, 1 << 20) + 1, dtype=np.float64) ** -REFERENCE_EXPONENT
    squares = (answering * law / law.sum()) ** 2
    left = np.cumsum(squares[::-1])[::-1]  # what is left when all before are peeled
    most = min(sketch.rows * sketch.width // 2, squares.size - 1)  # that a table can tell apart
    peeled, limit = -1, math.inf
    while (above := min(int(np.count_nonzero(squares > limit**2)), most)) > peeled:
        peeled = above
        error = math.sqrt((noise**2 + left[peeled] / sketch.width) / sketch.rows)
        limit = max(deviations * error, SMALLEST)
    return Level(limit, error)


def _width(start: PrefixDesign, most_bytes: int) -> int:
    """The widest table of so many bytes; a larger one never has cells of fewer bits."""
    widest = max(most_bytes * 8 // (2 * start.rows), SMALLEST_WIDTH)
    sketch = CountSketch(rows=start.rows, width=widest, seed=start.seed)
    bits = start.asked(sketch).aggregation.modulus_bits
    width = most_bytes * 8 // (bits * start.rows)
    if width < SMALLEST_WIDTH:
        need = -(-SMALLEST_WIDTH * start.rows * bits // 8)
        raise _TooSmallError(
            f"a search by prefixes needs at least {need:,} bytes a round for cells; "
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
    """The least noise with which a device may move so many cells by one, over all levels; to about
    a per cent unless `exact`, which takes a second."""
    if epsilon is None:
        return NoNoise()
    if secure is not None and delta == 0:
        raise ImpossibleError(
            "noise in shares needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / devices:.1g}",
        )
    norms: Any = {"l1": float(cells), "l2": math.sqrt(cells), "unit_cells": cells}

    def sized(kind: Noise, delta: float) -> float:
        if kind != "laplace" and not exact:
            return gaussian_stddev(math.sqrt(cells), epsilon, delta)
        return calibrate(kind, **norms, epsilon=epsilon, delta=delta)

    if secure is not None:
        return secure.noise(sized("skellam", delta), devices)
    if delta == 0:
        return NoiseAtRelease(noise="laplace", scale=sized("laplace", 0.0))
    gaussian = NoiseAtRelease(noise="gaussian", scale=sized("gaussian", delta))
    if math.sqrt(2) * cells / epsilon > gaussian.scale + 1:
        return gaussian  # Laplace noise of scale cells/epsilon would be larger
    laplace = NoiseAtRelease(noise="laplace", scale=sized("laplace", 0.0))
    return min(gaussian, laplace, key=lambda noise: noise.stddev(1))


def _within(made: PrefixDesign, epsilon: float, delta: float) -> PrefixDesign:
    """The ledger composes level by level, which may round up otherwise than all cells at once."""
    while epsilon_of([task.loss for task in made.tasks()], delta) > epsilon * (1 + LEDGER_ROUNDING):
        assert isinstance(made.mechanism, NoiseAtRelease | NoiseInShares)  # a finite epsilon
        noise = replace(made.mechanism, scale=made.mechanism.scale * 1.001)
        made = replace(made, mechanism=noise)
    return made

"""The runs behind the figures of paper 000: sketches of one round or ten, and their errors.

Tables come from `sketch`, widths from `sizing`, and the pilot's width from `frequencies`. Errors
are shares of all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from sfumato import hashing
from sfumato.arrays import F64, I64, U64
from sfumato.flow.release import NoisedSum
from sfumato.privacy import NoNoise
from sfumato.questions import sizing
from sfumato.questions.frequencies.design import FrequencyDesign, width_from_pilot
from sfumato.reproduce.frequencies.data import PILOT_DEVICES, ROUNDS, Source
from sfumato.sketch import CountSketch, DecodedRounds, refine

Mode = Literal["shared", "fresh", "hybrid"]

MODES: tuple[Mode, ...] = ("shared", "fresh", "hybrid")
PILOT_ROWS = 16  # the paper's pilot is 16 × 100 whatever the main sketch is
LEAST_COUNT = 20  # targets below this many devices are left out: such items matter less


def item_names(items: int, seed: int) -> I64:
    """Items as arbitrary 60-bit integers.

    Cells of consecutive integers are pairwise independent, like any others, but their collisions
    come in clumps, since an affine hash preserves order: means stay the same, and the deviation
    over seeds doubles. Neither the paper's hash functions nor real items have an order.
    """
    return np.random.default_rng([seed, items]).integers(1 << 60, size=items)


def item_points(items: int, seed: int) -> U64:
    """The fingerprints of `item_names`."""
    return hashing.fingerprint(item_names(items, seed), seed)


def encode_rounds(
    mode: Mode, counts: I64, points: U64, *, rows: int, width: int, seed: int
) -> DecodedRounds:
    """The tables of rounds with these counts, (rounds, items); Shared tables are added up."""
    design = _design(mode=mode, items=points.size, rows=rows, width=width, seed=seed)
    tables = counts.sum(axis=0, keepdims=True) if mode == "shared" else counts
    pairs = []
    for round, count in enumerate(tables):
        sketch = design.sketch(round)
        assert isinstance(sketch, CountSketch)  # every mode but one-hot gives one
        some = np.flatnonzero(count)
        pairs.append((sketch, sketch.encode_points(points[some], count[some])))
    return DecodedRounds.of(pairs)


def errors(mode: Mode, counts: I64, points: U64, *, rows: int, width: int, seed: int) -> F64:
    """The median decoder's error for each item, (items,)."""
    rounds = encode_rounds(mode, counts, points, rows=rows, width=width, seed=seed)
    return _relative_errors(rounds.estimate(points), counts)


def errors_by_mode(
    counts: I64, rows: int, widths: Sequence[int], seed: int
) -> Iterator[tuple[int, Mode, F64]]:
    """Width, mode and `errors`, over the same devices for all."""
    points = item_points(counts.shape[1], seed)
    for width in widths:
        for mode in MODES:
            yield width, mode, errors(mode, counts, points, rows=rows, width=width, seed=seed)


def one_round(
    source: Source, targets: Sequence[float], seed: int
) -> Iterator[tuple[float, str, int, float]]:
    """Target, strategy, its width and its largest error, over the same devices for all."""
    items = source.draw(source.one_round + PILOT_DEVICES, np.random.default_rng(seed))
    pilot, main = items[:PILOT_DEVICES], items[PILOT_DEVICES:]  # a device is in one of the two
    counts = np.bincount(main, minlength=source.categories)[None]
    points = item_points(source.categories, seed)
    for target in targets:
        if target <= LEAST_COUNT / source.one_round:
            continue
        for strategy, width in _widths(counts[0], pilot, target, seed).items():
            wrong = errors("shared", counts, points, rows=source.rows, width=width, seed=seed)
            yield target, strategy, width, float(wrong.max())


def ten_rounds(
    source: Source, widths: Sequence[int], seed: int
) -> Iterator[tuple[int, str, float]]:
    """Width, mode (or the refined decoder) and largest error, over the same devices for all."""
    counts = source.counts(ROUNDS, source.per_round, np.random.default_rng(seed))
    points = item_points(source.categories, seed)
    for width in widths:
        for mode in MODES:
            rounds = encode_rounds(mode, counts, points, rows=source.rows, width=width, seed=seed)
            yield width, mode, float(_relative_errors(rounds.estimate(points), counts).max())
            if mode == "hybrid":
                refined = refine(rounds, points).counts
                yield width, "hybrid refined", float(_relative_errors(refined, counts).max())


def _widths(counts: I64, pilot: I64, target: float, seed: int) -> dict[str, int]:
    """Each strategy's width, with the paper's constant and ours."""
    devices = int(counts.sum())
    shares = counts[counts > 0] / devices
    paper, ours = sizing.PAPER_CONSTANT, sizing.CONSTANT
    widths = {
        "minimax": sizing.minimax_width(target, constant=paper, devices=devices),
        "instance": sizing.instance_width(shares, target, constant=paper, devices=devices),
        "two-phase": _pilot_width(pilot, counts, target, paper, seed),
        "instance 6": sizing.instance_width(shares, target, constant=ours, devices=devices),
        "two-phase 6": _pilot_width(pilot, counts, target, ours, seed),
    }
    return {strategy: max(2, math.ceil(width)) for strategy, width in widths.items()}


def _pilot_width(pilot: I64, counts: I64, target: float, constant: float, seed: int) -> int:
    """The width that a pilot over other devices gives for the round with these counts."""
    devices = int(counts.sum())
    most = sizing.minimax_width(target, constant=constant, devices=devices)
    design = _design(
        mode="shared",
        items=counts.size,
        devices=devices + pilot.size,
        rows=PILOT_ROWS,
        width=math.ceil(most),
        seed=seed,
        pilot_devices=pilot.size,
        target_error=target,
        constant=constant,
    )
    names = item_names(counts.size, seed)
    task = design.pilot()
    answer = NoisedSum(task, task.sketch.encode(names[pilot]), pilot.size)
    return width_from_pilot(answer, names, design)


def _design(**sizes: Any) -> FrequencyDesign:
    """A design without noise that decodes each round by itself: the paper's experiments have no
    DP."""
    return FrequencyDesign(
        **{"devices": 1, "rounds": ROUNDS, **sizes},
        items_per_device=1,
        mechanism=NoNoise(),
        decode="median",
        every_round=True,
    )


def _relative_errors(estimate: F64, counts: I64) -> F64:
    off: F64 = np.abs(estimate - counts.sum(axis=0)) / counts.sum()
    return off

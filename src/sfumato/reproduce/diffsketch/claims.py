"""What paper 003 says about its figures, held against the numbers.

A claim's text says how it is checked. Details have accuracies with their standard errors over seeds
and, beside every curve, the privacy that holds: the epsilon of all rounds together, or "no DP
guarantee". The paper's own epsilon is of one round, for neighbours that differ in one coordinate of
a random gradient; it is no differential privacy. Claims marked (ours) are about the mode that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from sfumato.reproduce import Claim
from sfumato.reproduce.diffsketch.data import PRINTED_RATE, Quantised
from sfumato.reproduce.diffsketch.runs import Found, quantised
from sfumato.reproduce.learning.runs import shown

Curves = Mapping[tuple[str, str], Found]  # by panel and series

GAIN = 0.05  # the least that the paper says it gains over cpSGD
LITTLE = 0.02  # a "marginal decrease" in accuracy
ORDERS = 10.0  # "orders of magnitude" is at least this factor
REACHED = 0.9  # of the uncompressed accuracy: where what was sent is compared
MOST = 0.5  # "most" of the rounds is more than this share
ERRORS = 2.0  # standard errors within which two accuracies are not told apart


def by_place(found: Iterable[Found]) -> Curves:
    return {(each.job.panel, each.job.series): each for each in found}


def figure_2(rows: Sequence[tuple[str, Quantised]], curves: Curves) -> list[Claim]:
    claims = []
    for panel, row in rows:
        name = f"2({panel}) epsilon {row.epsilon:g}, {row.bits} bits"
        ours, raw = curves[panel, "paper"], curves[panel, "cpsgd"]
        turned = curves[panel, "cpsgd rotated"]
        claims += [
            Claim(
                text=f"{name}: DiffSketch is at least {100 * GAIN:g} points above cpSGD",
                holds=ours.final - raw.final >= GAIN,
                detail=f"{_told(ours)}; {_told(raw)}; rotated, as its authors advise: "
                f"{_told(turned)}; without compression {_told(curves[panel, 'plain'])}",
            ),
            _same_privacy(name, row.epsilon, (ours, raw, turned)),
            _theorem_of_cpsgd(name, row, raw),
            _useful(name, curves[panel, "gaussian"], curves[panel, "plain"]),
        ]
    return claims


def _theorem_of_cpsgd(name: str, row: Quantised, found: Found) -> Claim:
    """Of the paper's table 1."""
    from sfumato.learn.diffsketch import BinomialVector

    task, exchange = found.task, found.job.exchange
    assert isinstance(exchange, BinomialVector)  # the series is cpSGD's
    asked = exchange.epsilon(task.parameters, task.cohort * row.coins, exchange.clip)
    every = exchange.epsilon(task.parameters, task.clients * row.coins, exchange.clip)
    needed = math.ceil(4 * 23 * math.log(10 * task.parameters / exchange.delta) / task.cohort)
    enough = quantised(task, row._replace(coins=needed), rotate=False)
    assert isinstance(enough, BinomialVector)  # as above
    then = enough.epsilon(task.parameters, task.cohort * needed, enough.clip)
    return Claim(
        text=f"{name}: table 1's {row.levels} levels and {row.coins} coins give epsilon "
        f"{row.epsilon:g} a round by cpSGD's own theorem, with the coins of the {task.cohort} "
        "devices that send",
        holds=asked <= row.epsilon,
        detail=f"with their coins the theorem {_says(asked)}; with those of all {task.clients:,} "
        f"devices, of which {task.clients - task.cohort:,} send nothing, it {_says(every)}; it "
        f"takes {needed} coins a device ({math.ceil(math.log2(row.levels + needed))} bits) to "
        f"apply, and then {_says(then)}; table 1 calls {row.bits} bits "
        f"{PRINTED_RATE[row.bits]:g} times less, and 32/{row.bits} = {32 / row.bits:g}",
    )


def _says(epsilon: float) -> str:
    return f"says {shown(epsilon)}" if math.isfinite(epsilon) else "does not apply"


def against_noise(number: int, panels: Sequence[tuple[str, str]], curves: Curves) -> list[Claim]:
    """Figures 3 and 4."""
    claims = []
    for panel, size in panels:
        name = f"{number}({panel}) {size}"
        ours, plain = curves[panel, "paper"], curves[panel, "plain"]
        vector, table = curves[panel, "vector noise"], curves[panel, "sketch noise"]
        level = REACHED * plain.final
        mine, other = ours.sent_for(level), vector.sent_for(level)
        claims += [
            Claim(
                text=f"{name}: DiffSketch takes {ORDERS:g} times less communication than noise on "
                f"vectors to reach {REACHED:.0%} of the accuracy without noise or compression",
                holds=math.isfinite(mine) and other >= ORDERS * mine,
                detail=f"to {level:.3f}: DiffSketch {_sent(mine)}, noise on vectors "
                f"{_sent(other)}, neither {_sent(plain.sent_for(level))}; ends: {_told(ours)}; "
                f"{_told(vector)}",
            ),
            Claim(
                text=f"{name}: DiffSketch is more accurate than noise on sketches in every round",
                holds=ours.final > table.final + ERRORS * math.hypot(ours.stderr, table.stderr),
                detail=f"{_told(ours)}; {_told(table)}",
            ),
            Claim(
                text=f"{name}: DiffSketch loses at most {100 * LITTLE:g} points to uncompressed "
                "training",
                holds=ours.final >= plain.final - LITTLE,
                detail=f"{_told(ours)}; {_told(plain)}; sketches alone: "
                f"{_told(curves[panel, 'sketch'])}",
            ),
            _same_privacy(name, ours.job.claimed, (ours, vector, table)),
        ]
        if (panel, "sketch corrected") in curves:
            claims.append(
                _correction(name, curves[panel, "sketch corrected"], curves[panel, "sketch"])
            )
        claims.append(_useful(name, curves[panel, "gaussian"], plain))
    return claims


def _correction(name: str, corrected: Found, sketch: Found) -> Claim:
    return Claim(
        text=f"{name}: error correction improves accuracy",
        holds=corrected.final > sketch.final + ERRORS * math.hypot(corrected.stderr, sketch.stderr),
        detail=f"with {_told(corrected)}; without {_told(sketch)}",
    )


def _same_privacy(name: str, claimed: float | None, every: Sequence[Found]) -> Claim:
    assert claimed is not None  # curves that are compared have one
    return Claim(
        text=f"{name}: every method is epsilon {claimed:g} private in each round",
        holds=all(math.isfinite(found.epsilon) for found in every),
        detail="; ".join(f"{found.job.series}: {found.privacy}" for found in every)
        + f" ({every[0].task.rounds:,} rounds, which the paper does not add up)",
    )


def _useful(name: str, private: Found, plain: Found) -> Claim:
    return Claim(
        text=f"(ours) {name}: with {private.privacy}, noise on the sum of clipped sketches, it is "
        f"within {100 * LITTLE:g} points of uncompressed training without noise",
        holds=private.final >= plain.final - LITTLE,
        detail=f"{_told(private)}; {_told(plain)}",
    )


def figure_5(
    panels: Sequence[tuple[str, Sequence[tuple[str, float]]]], curves: Curves
) -> list[Claim]:
    """Panels, with their series and rates from the lowest to the highest."""
    claims = []
    for panel, series in panels:
        found = [curves[panel, key] for key, _ in series]
        plain = curves[panel, "plain"]
        level = REACHED * plain.final
        sent = [each.sent_for(level) for each in found]
        name = f"5({panel}) {plain.task.name}"
        ends = "; ".join(_told(each) for each in found)
        claims += [
            Claim(
                text=f"{name}: the higher the rate, the less is sent until {REACHED:.0%} of the "
                "uncompressed accuracy",
                holds=all(math.isfinite(each) for each in sent)
                and all(np.diff(sent) < 0)
                and sent[0] < plain.sent_for(level),
                detail=f"to {level:.3f}: uncompressed {_sent(plain.sent_for(level))}, "
                + ", ".join(
                    f"{rate:.1f} times {_sent(each)}"
                    for (_, rate), each in zip(series, sent, strict=True)
                ),
            ),
            Claim(
                text=f"{name}: a higher rate ends no more accurate, beyond chance",
                holds=all(
                    high.final <= low.final + ERRORS * math.hypot(low.stderr, high.stderr)
                    for low, high in pairwise(found)
                ),
                detail=f"{ends}; {_told(plain)}",
            ),
        ]
    return claims


def figure_6(panels: Sequence[tuple[str, Sequence[Found]]]) -> list[Claim]:
    """Panels, with curves of growing rate and no padding."""
    claims = []
    for panel, found in panels:
        name = f"6({panel}) {found[0].task.name}"
        medians = [float(np.median(each.claimed)) for each in found]
        shares = [float(np.isfinite(each.claimed).mean()) for each in found]
        said = "; ".join(
            f"{each.rate:.1f} times: median {shown(median)}, and it applies to {share:.0%} of "
            "workers' rounds"
            for each, median, share in zip(found, medians, shares, strict=True)
        )
        claims += [
            Claim(
                text=f"{name}: theorem 2's epsilon falls as the rate grows (medians; infinite "
                "where it does not apply)",
                holds=all(high < low or low == high == math.inf for low, high in pairwise(medians))
                and math.isfinite(medians[-1]),
                detail=said,
            ),
            Claim(
                text=f"{name}: theorem 2 applies to every worker and round without padding",
                holds=min(shares) == 1.0,
                detail=said,
            ),
            Claim(
                text=f"{name}: that epsilon is differential privacy",
                holds=False,
                detail="the hash functions are public, so a sketch is a function of the vector: 0 "
                "and (1, 0, …, 0) are told apart surely, and epsilon is infinite",
            ),
        ]
    return claims


def figure_9(found: Sequence[Found]) -> list[Claim]:
    claims = []
    for each in found:
        target = each.job.claimed
        assert target is not None  # figure 9 is about validation
        share = float(np.mean(each.claimed <= target))
        claims.append(
            Claim(
                text=f"9 {each.job.series}: most workers' rounds are within epsilon {target:g} by "
                "theorem 2, so that noise is added in a few cases only",
                holds=share > MOST,
                detail=f"{share:.1%} of {each.claimed.size:,}; median "
                f"{shown(float(np.median(each.claimed)))}; noise was added in {each.noised:.1%}; "
                f"privacy that holds: {each.privacy}",
            )
        )
    return claims


def _told(found: Found) -> str:
    return (
        f"{found.job.series} {found.final:.4f} ± {found.stderr:.4f} at {found.rate:.1f} times "
        f"({found.privacy})"
    )


def _sent(communication: float) -> str:
    return f"{communication:.3g} rounds' worth" if math.isfinite(communication) else "never"

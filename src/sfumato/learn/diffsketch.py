"""Sketched distributed SGD and federated averaging (paper 003, DiffSketch), labelled honestly.

Paper 003 claims that a count sketch is private by itself. It is not: the hash functions are public,
so a sketch is a function of its vector, and two vectors with different sketches can be
distinguished with certainty (docs/concepts/diffsketch.md). A sketch only saves communication. A
worker's vector goes through one of three exchanges:

    DiffSketch      a count sketch, read back by medians; mode "none" (no noise), "gaussian"
                    (clipped, noised and accounted for) or "paper" (as printed, not private)
    NoisyVector     the vector itself, with Gaussian noise or without
    BinomialVector  cpSGD (Agarwal, Suresh, Yu, Kumar, McMahan 2018): quantised, binomial noise

An exchange that is not differentially private says "no DP guarantee" in its label, repr and
figures, and its loss is `NoPrivacy`, which no finite budget pays for.

A round is a task on the flow: workers send tables of whole numbers, which are added, charged for,
noised and read. Noise is exact; from a seed, for experiments, it promises nothing. Tables without a
bound are clipped at `LONGEST_TABLE`, far beyond any that a training survives: no sum may wrap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.arrays import F32, F64, I64
from sfumato.errors import ImpossibleError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import Campaign, step
from sfumato.flow.contribute import contribute
from sfumato.flow.model_terms import LocalTraining
from sfumato.flow.release import Influence, NoisedSum, Release
from sfumato.flow.task import Task, bits_for, largest_cell
from sfumato.kernels.dense import plain as plain_dense
from sfumato.learn import models
from sfumato.learn.campaign import NAME_DIGITS
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.data import Clients, Federated
from sfumato.learn.design import LEAST_DRAWN, ModelDesign
from sfumato.learn.own_model import OwnModel, loss_of, model_of
from sfumato.learn.training import NoLedger, evaluate
from sfumato.privacy import (
    Account,
    Charge,
    NoiseAtRelease,
    NoNoise,
    PlannedLoss,
    Rng,
    SeededRng,
    SystemRng,
)
from sfumato.privacy.accounting import (
    AdditiveLoss,
    Loss,
    NoPrivacy,
    SampledLoss,
    calibrate,
    epsilon_of,
    epsilon_text,
)
from sfumato.privacy.rounding import COARSEST, ROUNDING_COST
from sfumato.privacy.samplers import LARGEST_SCALE
from sfumato.questions.question import Participation, Plan
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch, clip_rows
from sfumato.spec import LARGEST_INTEGER, digest, later, require, spec

NOT_PRIVATE = "no DP guarantee"
IN_THEORY = "if noise were secret; here it is drawn from a seed, for experiments only"
FLOAT_BITS = 32  # size of a cell that is not quantised
HEADROOM = 1.2  # largest norm of a table, relative to √rows times that of its vector
SMALL_LSTM = "small_lstm"
SMALL_LSTM_SIZES = (90, 7, 52, 2)  # symbols, embedding, units, layers: 39,720 parameters
LONGEST_TABLE = 2.0**22  # bound on the norm of a table that has no clip
_PER_UNIT = 2.0**26  # whole numbers per unit, where there is no noise
_LEAST_NOISE = 16.0  # least deviation of noise on whole numbers; it hides the rounding
_UNIT = 1000.0  # sensitivity in a loss: at this scale integer noise is like continuous noise


# Theorem 2 of the paper: its claims, as numbers whose names say so.


def claimed_epsilon(length: int, rows: int, width: int, ratio: float) -> float:
    """Theorem 2's epsilon of one round, for alpha/sigma = `ratio`; infinite where it says nothing.

    rows·ln(1 + beta·x) with x = ratio²·width·(width − 1)·(1 + ln(length − width))/(length − 2) and
    the least beta that x ≤ 1/2 − 1/beta allows. It is not differential privacy: the theorem assumes
    random vectors, and neighbours that differ in one coordinate, and its proof bounds a cell by the
    error of a reading.

    >>> round(claimed_epsilon(7850, 7, 15, 1.281552), 2)
    14.61
    >>> claimed_epsilon(7850, 7, 22, 1.281552)
    inf
    """
    if length <= max(width, 2):
        return math.inf
    x = claimed_condition(length, width, ratio)
    if not x < 0.5:
        return math.inf
    beta = 1 / (0.5 - x)
    return rows * math.log1p(beta * x)


def claimed_condition(length: int, width: int, ratio: float) -> float:
    """The left side of theorem 2's condition, which must be below 1/2."""
    require(length > max(width, 2), f"length must exceed the width and 2; got {length}, {width}")
    return ratio**2 * width * (width - 1) * (1 + math.log(length - width)) / (length - 2)


def padded_length(rows: int, width: int, epsilon: float, ratio: float) -> int:
    """The least length of a padded vector for which theorem 2 claims this epsilon."""
    low = high = max(width, 2) + 1
    while claimed_epsilon(high, rows, width, ratio) > epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = claimed_epsilon(middle, rows, width, ratio) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


# Lemma 1 and theorem 3: what a sketch costs in accuracy.


def sizes_for(error: float, failure_probability: float) -> tuple[int, int]:
    """Lemma 1: rows and width with which the reading of a coordinate of g is off by more than
    `error` × |g| with at most this probability.

    Width e/error², as in the paper: the reading of a row has variance |g|²/width at most, so by
    Chebyshev's inequality it is off by more with a chance of at most 1/e. The median is off only if
    half of the rows are, which is a tail of a binomial law: about 28·ln(1/failure_probability) rows
    (the paper says O(ln(1/δ))).

    >>> sizes_for(0.5, 0.05)
    (35, 11)
    """
    from scipy import stats

    require(0 < error < 1, f"error must be above 0 and below 1; got {error}")
    require(
        0 < failure_probability < 1,
        f"failure_probability must be above 0 and below 1; got {failure_probability}",
    )
    width = max(2, math.ceil(math.e / error**2))
    chance, rows = 1 / (width * error**2), 1
    while stats.binom.sf(rows // 2, rows, chance) > failure_probability:
        rows += 2
    return rows, width


def convergence_bound(
    rounds: int, *, length: int, error: float, gradient: float, diameter: float, step: float
) -> float:
    """Theorem 3: how far the mean of the first `rounds` iterates of sketched SGD on a convex loss
    is from its minimum, in expectation. Steps are `step`/√i, iterates stay in a set of this
    diameter, gradients of `length` coordinates have a norm of at most `gradient`, and a reading is
    off by at most `error` × |g|, in the root of the mean square.

    As printed: (D²/2c + c·√((i + 1)/i)·(n·μ² + 1)·G²)/√i. It holds: the usual proof gives it
    without the root, which is above 1.

    >>> round(convergence_bound(100, length=50, error=0.2, gradient=1.0, diameter=2.0, step=1.0), 3)
    0.501
    """
    require.at_least(1, rounds=rounds)
    noise = (length * error**2 + 1) * gradient**2
    spread = step * math.sqrt((rounds + 1) / rounds) * noise
    return (diameter**2 / (2 * step) + spread) / math.sqrt(rounds)


def spread(vector: F32) -> tuple[float, float]:
    """The paper's alpha and sigma of a vector: its 90th percentile and standard deviation. Both are
    functions of private data, and so is everything computed from them."""
    return float(np.quantile(vector, 0.9)), float(np.std(vector))


def correct_errors(mean: F32, own: F32) -> F32:
    """The paper's error correction: the mean, with zero in the half of the coordinates where it is
    farthest from a worker's own vector. For that worker's own step: it depends on `own` and is
    never sent."""
    gaps = np.abs(mean - own)
    farthest = np.argpartition(gaps, gaps.size // 2)[gaps.size // 2 :]
    result = mean.copy()
    result[farthest] = 0
    return result


def padding_floor(sketch: DenseSketch, padding: int) -> float:
    """The smallest eigenvalue of the covariance, over cells, of the sketch of `padding` independent
    coordinates of variance one at the end of a vector.

    If the padding's deviation s were a public constant, padding would be Gaussian noise of at least
    deviation s·√floor on every cell, and could be accounted for as such. In the paper s is the
    deviation of the private vector itself.
    """
    require(
        sketch.placing == "rotation" and sketch.rows == 1,
        "the covariance of padding is computed for blocks of one row, placed by rotation",
    )
    require.within(0, sketch.length, padding=padding)
    start, width, total = sketch.length - padding, sketch.width, sketch.cells
    cells, signs = [], []
    ones = np.ones(sketch.length, dtype=np.float32)
    for row, (turns, keys) in enumerate(zip(sketch.rotations, sketch.sign_keys, strict=True)):
        places = plain_dense.rotated_cells(turns, sketch.length, width)
        cells.append(places[start:] + row * width)
        signs.append(plain_dense._signed(ones, keys)[start:])  # the oracle's own signs
    covariance = np.zeros(total * total)
    for cell, sign in zip(cells, signs, strict=True):
        for other, other_sign in zip(cells, signs, strict=True):
            covariance += np.bincount(cell * total + other, sign * other_sign, total * total)
    return max(float(np.linalg.eigvalsh(covariance.reshape(total, total))[0]), 0.0)


# Exchanges: the messages, their privacy loss, and the decoded mean.


@spec("diffsketch")
class DiffSketch:
    """Vectors as count sketches of `rows` × `width` cells, decoded by the median over rows.

    Mode "none" sends the sketch. Mode "gaussian" clips the vector to `clip` and the table to
    `bound`, and adds Gaussian noise of `noise_multiplier` × `bound` to every cell, on each device
    or once to the sum. Mode "paper" is algorithm 2 as printed: a worker appends `padding`
    coordinates of noise with its own vector's deviation, computes theorem 2's epsilon from its own
    data, and adds Laplace noise of scale 2·rows·alpha/epsilon if that exceeds `epsilon` (the paper
    does not say how much; this is for one coordinate that moves by 2·alpha).

    Claim: in mode "gaussian", with secret noise, all rounds together are (epsilon, delta)-DP for
        each client at the epsilon that `accounting.epsilon_of` gives for the design's `loss`;
        neighbours are zero-out, or replace for random cohorts. Noise drawn from a seed, as here,
        promises nothing, and the design's `privacy` says so. In modes "none" and "paper": none.
        Mode "paper" cannot be constructed without `i_know_this_is_not_private`.
    Proof: a message, or its part of the sum, has a bounded norm whatever the data are
        (`VectorSketch`), and the deviation of the noise does not depend on them:
        docs/proofs/sampled_rounds.md. Counterexamples for the other modes:
        docs/concepts/diffsketch.md.
    Assumes: a secret seed; with noise "sum", that nobody sees a summand, and that random cohorts
        stay secret.
    """

    rows: int
    width: int
    mode: Literal["none", "gaussian", "paper"] = "none"
    noise: Literal["device", "sum"] = "sum"
    noise_multiplier: float = 0.0  # gaussian
    clip: float | None = None  # gaussian
    bound: float | None = None  # gaussian; None: 1.2·√rows·clip
    epsilon: float | None = None  # paper: what every round is validated against
    padding: int = 0  # paper
    correction: bool = False  # none, paper: each worker keeps a model of its own
    i_know_this_is_not_private: bool = False
    seed: int

    def check(self) -> None:
        require.at_least(1, rows=self.rows)
        require.at_least(2, width=self.width)
        require.within(0, LARGEST_INTEGER, seed=self.seed)
        private, paper = self.mode == "gaussian", self.mode == "paper"
        require(
            not paper or self.i_know_this_is_not_private,
            'mode "paper" is not differentially private: use mode "gaussian", or say '
            "i_know_this_is_not_private=True",
        )
        require(
            (self.clip is not None and self.clip > 0) if private else self.clip is None,
            f'a clip above 0 belongs to mode "gaussian", and only there; got {self.clip}',
        )
        require(
            self.noise_multiplier > 0 if private else self.noise_multiplier == 0,
            'a noise_multiplier above 0 belongs to mode "gaussian", and only there; got '
            f"{self.noise_multiplier}",
        )
        require(
            self.bound is None or (private and self.bound > 0),
            f'a bound above 0 belongs to mode "gaussian", and only there; got {self.bound}',
        )
        require(
            (self.epsilon is not None and self.epsilon > 0) if paper else self.epsilon is None,
            'the epsilon of a validation belongs to mode "paper", and only there: mode "gaussian" '
            f"is calibrated by noise_multiplier; got {self.epsilon}",
        )
        require(
            self.padding == 0 or (paper and self.padding > 0),
            'padding belongs to mode "paper": its deviation follows from private data; got '
            f"{self.padding}",
        )
        require(
            not (private and self.correction),
            'error correction belongs to modes "none" and "paper": it makes every worker\'s model '
            "depend on its own data without noise",
        )

    def __repr__(self) -> str:
        return f"DiffSketch({self.label})"

    @property
    def label(self) -> str:
        """A label for people, which says so if the exchange is not private."""
        size = f"{self.rows}×{self.width}, {self.mode}"
        if self.mode == "gaussian":
            return f"{size}, noise multiplier {self.noise_multiplier:g} at the {self.noise}"
        return f"{size}, {NOT_PRIVATE}"

    @property
    def table_bound(self) -> float:
        """The largest norm of a table."""
        if self.clip is None:
            return LONGEST_TABLE
        return HEADROOM * math.sqrt(self.rows) * self.clip if self.bound is None else self.bound

    def bits(self, length: int) -> int:
        """Number of bits that a device sends in a round."""
        return FLOAT_BITS * self.rows * self.width

    def sketch(self, length: int, round: int) -> DenseSketch:
        """A new map every round; each row is a block of its own, so that decoding takes medians."""
        return DenseSketch(
            length=length + self.padding, rows=1, blocks=self.rows, width=self.width,
            seed=self.seed, round=round,
        )  # fmt: skip

    def tables(self, vectors: F32, *, round: int, chance: np.random.Generator) -> F32:
        """The tables that workers with these vectors (n, length) send, before clipping and
        rounding."""
        if self.clip is not None:
            vectors = clip_rows(vectors.astype(np.float64), self.clip).astype(np.float32)
        sketch = self.sketch(vectors.shape[1], round)
        if self.mode != "paper":
            return sketch.encode(vectors)
        assert self.epsilon is not None  # `check` requires it
        spreads = [spread(vector) for vector in vectors]  # algorithm 2, lines 3 and 4
        padded = np.zeros((len(vectors), sketch.length), dtype=np.float32)
        padded[:, : vectors.shape[1]] = vectors
        if self.padding:
            for row, (_, sigma) in zip(padded, spreads, strict=True):
                row[-self.padding :] = sigma * chance.standard_normal(self.padding, np.float32)
        tables = sketch.encode(padded)
        for table, (alpha, _), claimed in zip(tables, spreads, self.claims(vectors), strict=True):
            if claimed > self.epsilon:
                scale = 2 * self.rows * abs(alpha) / self.epsilon
                table += chance.laplace(0, scale, size=sketch.shape).astype(np.float32)
        return tables

    def claims(self, vectors: F32) -> list[float]:
        """Mode "paper": theorem 2's epsilon of each worker, infinite where it does not apply."""
        if self.mode != "paper":
            return []
        length = vectors.shape[1] + self.padding
        return [
            claimed_epsilon(length, self.rows, self.width, alpha / sigma) if sigma > 0 else math.inf
            for alpha, sigma in map(spread, vectors)
        ]

    def read(self, mean: F64, *, length: int, round: int) -> F32:
        """The mean of the vectors, decoded from the mean of the tables."""
        sketch = self.sketch(length, round)
        return sketch.decode(mean.reshape(sketch.shape))[:length]


@spec("noisy_vector")
class NoisyVector:
    """Whole vectors, clipped, with Gaussian noise on each device or once on the sum; without noise
    they are sent unchanged.

    Claim, proof, assumes: as `DiffSketch` in mode "gaussian", with `clip` for the bound.
    """

    correction: ClassVar[bool] = False  # whole vectors need none
    clip: float | None = None
    noise_multiplier: float = 0.0
    noise: Literal["device", "sum"] = "sum"

    def check(self) -> None:
        require.at_least(0, noise_multiplier=self.noise_multiplier)
        require.above(0, clip=self.clip)
        require(
            self.noise_multiplier == 0 or self.clip is not None,
            "noise needs a clip: its deviation is a multiple of it",
        )

    def __repr__(self) -> str:
        return f"NoisyVector({self.label})"

    @property
    def label(self) -> str:
        if self.noise_multiplier == 0:
            return f"vectors, {NOT_PRIVATE}"
        return f"vectors, noise multiplier {self.noise_multiplier:g} at the {self.noise}"

    def bits(self, length: int) -> int:
        return FLOAT_BITS * length

    @property
    def table_bound(self) -> float:
        return LONGEST_TABLE if self.clip is None else self.clip

    def tables(self, vectors: F32, *, round: int, chance: np.random.Generator) -> F32:
        return vectors

    def read(self, mean: F64, *, length: int, round: int) -> F32:
        return mean.astype(np.float32)


@spec("binomial_vector")
class BinomialVector:
    """cpSGD: vectors in `levels` steps, with the heads of `coins` fair coins on each coordinate.

    A vector is clipped to the norm `clip`, rotated by a public random rotation if `rotate` (as its
    authors advise; paper 003 mentions none), its entries are clipped to ±`largest` and rounded at
    random to one of `levels` values, and the heads of `coins` fair coins are added. A coordinate
    takes ⌈log2(levels + coins)⌉ bits.

    Claim: none. `epsilon` is that of theorem 1 of Agarwal et al. (2018) for one secure sum, with
        the sensitivities of their lemma 4; we have no proof of it, so it is shown beside other
        figures and never charged: the loss is `NoPrivacy`.
    """

    noise: ClassVar[Literal["sum"]] = "sum"
    noise_multiplier: ClassVar[float] = 0.0  # the coins are in the tables
    correction: ClassVar[bool] = False
    table_bound: ClassVar[float] = LONGEST_TABLE
    clip: float
    largest: float
    levels: int
    coins: int
    rotate: bool = True
    delta: float = 1e-9  # of the theorem, per round
    seed: int

    def check(self) -> None:
        require.above(0, clip=self.clip, largest=self.largest)
        require.at_least(2, levels=self.levels)
        require.at_least(0, coins=self.coins)
        require(0 < self.delta < 1, f"delta must be above 0, below 1; got {self.delta}")
        require.within(0, LARGEST_INTEGER, seed=self.seed)

    def __repr__(self) -> str:
        return f"BinomialVector({self.label})"

    @property
    def label(self) -> str:
        rotation = ", rotated" * self.rotate
        return f"cpSGD, {self.levels} levels, {self.coins} coins{rotation}, {NOT_PRIVATE}"

    @property
    def step(self) -> float:
        """The distance between two levels."""
        return 2 * self.largest / (self.levels - 1)

    def bits(self, length: int) -> int:
        padded = _power_of_two(length) if self.rotate else length
        return padded * math.ceil(math.log2(self.levels + self.coins))

    def tables(self, vectors: F32, *, round: int, chance: np.random.Generator) -> F32:
        values = clip_rows(vectors.astype(np.float64), self.clip).astype(np.float32)
        if self.rotate:
            signs = self._signs(vectors.shape[1], round)
            values = np.pad(values, ((0, 0), (0, signs.size - vectors.shape[1])))
            values = hadamard(values * signs)
        places = (np.clip(values, -self.largest, self.largest) + self.largest) / self.step
        levels = np.floor(places + chance.random(places.shape))
        levels += chance.binomial(self.coins, 0.5, size=places.shape)
        return levels.astype(np.float32)

    def read(self, mean: F64, *, length: int, round: int) -> F32:
        levels = mean - self.coins / 2
        values = (levels * self.step - self.largest).astype(np.float32)
        if self.rotate:
            values = (hadamard(values[None])[0] * self._signs(length, round))[:length]
        return values

    def _signs(self, length: int, round: int) -> F32:
        bits = np.random.default_rng([self.seed, round]).integers(0, 2, _power_of_two(length))
        return (1 - 2 * bits).astype(np.float32)

    def epsilon(self, length: int, coins: int, distance: float) -> float:
        """Theorem 1's epsilon of one round with `coins` in total, at 2·`delta`, if a client's
        vector moves by `distance`; infinite where the theorem does not apply."""
        dimension = _power_of_two(length) if self.rotate else length
        return binomial_epsilon(
            dimension=dimension, coins=coins, levels=self.levels, delta=self.delta,
            distance=distance / self.step,
        )  # fmt: skip


Exchange = DiffSketch | NoisyVector | BinomialVector


def privacy_loss(exchange: Exchange, *, cohort: int, clients: int, rounds: int) -> Loss:
    """A client's loss over all rounds. Cohorts are secret only inside a sum; otherwise a client may
    be in all of them."""
    if exchange.noise_multiplier == 0:
        return NoPrivacy()
    sampled = exchange.noise == "sum" and cohort < clients
    # Tables are coarser where the noise of all devices could not be drawn otherwise.
    most = LEAST_DRAWN / math.sqrt(1 if exchange.noise == "sum" else cohort)
    unit = min(_UNIT, most / exchange.noise_multiplier)
    return SampledLoss(
        loss=AdditiveLoss(
            noise="gaussian",
            scale=exchange.noise_multiplier * unit,
            l1=max(unit, unit**2),
            l2=unit,
            unit_cells=0,
        ),
        probability=cohort / clients if sampled else 1.0,
        scheme="fixed" if sampled else "poisson",
        times=rounds,
    )


def binomial_epsilon(
    *, dimension: int, coins: int, levels: int, delta: float, distance: float
) -> float:
    """Theorem 1 of Agarwal et al. (2018) for fair coins and steps of one, at 2·`delta`: one delta
    for the noise, one for the rounding of a vector that moves by `distance` steps (lemma 4).

    Infinite unless coins/4 ≥ max(23·ln(10·dimension/delta), 2·(levels + 1)).
    """
    largest = levels + 1.0
    variance = coins / 4
    if variance < max(23 * math.log(10 * dimension / delta), 2 * largest):
        return math.inf
    moved = math.sqrt(dimension) * distance
    slack = math.sqrt(2 * moved * math.log(2 / delta))
    l1 = moved + slack + 4 / 3 * math.log(2 / delta)
    l2 = distance + math.sqrt(l1 + slack)
    b, c, d = 1 / 3, math.sqrt(2) * 7 / 4, 2 / 3  # of p = 1/2
    gaussian = l2 * math.sqrt(2 * math.log(1.25 / delta)) / math.sqrt(variance)
    second = (l2 * c * math.sqrt(math.log(10 / delta)) + l1 * b) / (variance * (1 - delta / 10))
    logs = math.log(20 * dimension / delta) * math.log(10 / delta)
    third = largest * (2 / 3 * math.log(1.25 / delta) + d * logs) / variance
    return gaussian + second + third


def hadamard(vectors: F32) -> F32:
    """The orthonormal Walsh–Hadamard transform of each row, which is its own inverse."""
    count, length = vectors.shape
    require(length == _power_of_two(length), f"a length must be a power of two; got {length}")
    result, half = vectors, 1
    while half < length:
        pairs = result.reshape(count, -1, 2, half)
        result = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return np.asarray(result.reshape(count, length) / np.sqrt(np.float32(length)))


def multiplier_for(epsilon: float, delta: float, rounds: int = 1) -> float:
    """The noise multiplier at which `rounds`, each with all clients, cost epsilon in total."""
    one = calibrate("gaussian", l1=_UNIT**2, l2=_UNIT, unit_cells=0, epsilon=epsilon, delta=delta)
    return math.sqrt(rounds) * one / _UNIT


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


# Algorithms 3 and 4.


@spec("diffsketch_design")
class DiffSketchDesign(ModelDesign):
    """A training by algorithm 3 (all clients, one step: distributed SGD) or 4 (a cohort, local
    epochs: federated averaging). A worker's vector is the change of its parameters by local
    training, −learning_rate × gradient for one step, so the server adds the mean to the model.

    With error correction every worker keeps a model of its own, and the result is their mean; all
    clients must then be in every round.
    """

    model: str | None = "softmax"  # or "small_lstm", of 39,720 parameters, or another of `models`
    inputs: int | None = None
    classes: int | None = None
    clients: int
    cohort: int
    rounds: int
    local: LocalTraining
    exchange: Exchange
    by_examples: bool = later(False)
    """Draw a cohort with replacement, clients in proportion to their examples (algorithm 4's p_k),
    instead of all cohorts alike. The number of examples is private, so nothing is promised."""
    seed: int  # of the model: public
    own_parameters: int | None = later(None)  # their number, if the model has no name

    def check(self) -> None:
        ModelDesign.check(self)
        require(
            not self.by_examples or self.exchange.noise_multiplier == 0,
            "a cohort that is drawn by the number of examples has no accounted cost; leave out "
            "by_examples, or the noise",
        )
        require(
            not (self.by_examples and self.exchange.correction),
            "error correction needs every client in every round; leave out by_examples",
        )
        require.at_least(1, rounds=self.rounds)
        require(
            1 <= self.cohort <= self.clients,
            f"a cohort must be 1 to the {self.clients} clients; got {self.cohort}",
        )
        require(
            not self.exchange.correction or self.cohort == self.clients,
            "error correction needs every client in every round: a worker that is left out has an "
            f"old model; got {self.cohort} of {self.clients}",
        )
        require.within(0, LARGEST_INTEGER, seed=self.seed)

    def __repr__(self) -> str:
        return (
            f"DiffSketchDesign({self.model or models.OWN}, {self.cohort} of {self.clients} "
            f"clients, {self.rounds} rounds, {self.exchange!r})"
        )

    def make(self) -> nn.Module:
        if self.model == SMALL_LSTM:
            return small_lstm(self.seed)
        return ModelDesign.make(self)

    @property
    def algorithm(self) -> str:
        return "diffsketch"

    @property
    def method(self) -> str:
        return "distributed SGD" if self.local.steps == 1 else "federated averaging"

    @property
    def tasks_per_device(self) -> int:
        return self.rounds

    @property
    def least_noise(self) -> float | None:
        return self.exchange.noise_multiplier or None

    @property
    def influence(self) -> Influence:
        note = "later rounds start from the parameters that it moved"
        return Influence(of="a parameter of the model", most=None, note=note)

    @property
    def bytes_down(self) -> int:
        """Bytes that a client receives in a round: the merged table if all are in every round
        (algorithm 3), otherwise the model, since it has missed other rounds."""
        everybody = self.cohort == self.clients and not self.by_examples
        return (self.exchange.bits(self.length) if everybody else FLOAT_BITS * self.length) // 8

    def parameters(self) -> dict[str, Any]:
        """The main parameters, for people to read."""
        exchange = self.exchange
        return {
            "model": self.model or models.OWN,
            "clients": self.clients,
            "cohort": self.cohort,
            "rounds": self.rounds,
            "exchange": exchange.label,
            "rows": getattr(exchange, "rows", None),
            "width": getattr(exchange, "width", None),
            "noise_multiplier": exchange.noise_multiplier,
        }

    def campaign(self, plan: Plan, **context: Any) -> SketchCampaign:
        return SketchCampaign(self, models.flatten(self.make()))

    def answer(self, campaign: Any, plan: Plan, participation: Participation) -> Release:
        """Not available: a collector does not run sketched training."""
        raise SpecError("a model is trained by sfumato.train")

    @property
    def rate(self) -> float:
        """32 bits per parameter, divided by what a device sends."""
        return FLOAT_BITS * self.length / self.exchange.bits(self.length)

    @property
    def loss(self) -> Loss:
        """The privacy loss of a client over all rounds."""
        return privacy_loss(
            self.exchange, cohort=self.cohort, clients=self.clients, rounds=self.rounds
        )

    def charge_of(self, task: Task) -> Charge:
        """All rounds are charged as one plan."""
        whole = self.loss
        if not isinstance(whole, SampledLoss):
            return whole
        one = replace(whole, times=1)
        return PlannedLoss(loss=one, plan=digest(self), losses=(one,), times=self.rounds)

    def epsilon(self, delta: float) -> float:
        """The epsilon of all rounds together; infinite where nothing is promised."""
        return epsilon_of([self.loss], delta)

    def privacy(self, delta: float, *, secret: bool = False) -> str:
        """For people: the promise of all rounds together, and why it does not hold unless noise is
        `secret`."""
        epsilon = self.epsilon(delta)
        if not math.isfinite(epsilon):
            return NOT_PRIVATE
        loss = self.loss
        assert isinstance(loss, SampledLoss)  # only Gaussian noise has a finite epsilon
        relation = "zero-out" if loss.scheme == "poisson" else "replace, with secret cohorts"
        promise = (
            f"epsilon {epsilon_text(epsilon)} at delta {delta:g} over {self.rounds} rounds "
            f"({relation})"
        )
        return promise if secret else f"{promise}, {IN_THEORY}"


def small_lstm(seed: int) -> nn.Module:
    """A recurrent model with 39,720 parameters, as in paper 003, which does not give its sizes.

    >>> models.count(small_lstm(1))
    39720
    """
    symbols, embedded, hidden, layers = SMALL_LSTM_SIZES
    with torch.device("meta"):
        model = models.Recurrent(symbols, embedded, hidden, layers, 0, symbols)
    return models.initialise(model, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchedRound:
    """A round: its traffic, the paper's claim about it, and the promise that holds."""

    round: int
    bits: int  # sent by each device of the cohort
    claimed: tuple[float, ...]  # theorem 2's epsilon of each worker, in mode "paper"
    noised: int  # number of workers that added noise because of it
    accuracy: float | None
    privacy: str


@dataclass(slots=True, repr=False)
class SketchCampaign(Campaign):
    """The server's side: one task per round, one step along the decoded mean."""

    design: DiffSketchDesign
    flat: Tensor
    done: int = 0
    mean: F32 = field(default_factory=lambda: np.zeros(0, dtype=np.float32))  # the last round's

    def next_task(self) -> Task | None:
        """Tables are whole numbers, fine enough for rounding to cost little beside the noise, and
        coarse enough for the noise to be drawn. The noise of all devices is drawn at once, as
        their sum."""
        exchange, cohort = self.design.exchange, self.design.cohort
        if self.done == self.design.rounds:
            return None
        bound, multiplier, many = exchange.table_bound, exchange.noise_multiplier, 1.0
        nothing = np.zeros((1, self.flat.numel()), dtype=np.float32)
        cells = exchange.tables(nothing, round=self.done, chance=np.random.default_rng(0)).size
        fine = _PER_UNIT * bound
        if multiplier:
            many = math.sqrt(cohort) if exchange.noise == "device" else 1.0
            most = LARGEST_SCALE["gaussian"] / (multiplier * many) - math.sqrt(cells)
            fine = max(COARSEST, math.sqrt(cells / 4 / ROUNDING_COST), _LEAST_NOISE / multiplier)
            if most < 1:
                raise ImpossibleError(f"noise of {multiplier:g} times a table cannot be drawn")
            fine = min(fine, most)
        sketch = VectorSketch(length=cells, clip=bound, bound=bound, scale=fine / bound)
        scale = many * multiplier * sketch.rounding.l2
        return Task(
            sketch=sketch,
            mechanism=NoiseAtRelease(noise="gaussian", scale=scale) if scale else NoNoise(),
            aggregation=Plain(modulus_bits=bits_for(cohort * largest_cell(sketch, 1))),
            campaign=f"{digest(self.design)[:NAME_DIGITS]} round {self.done}",
            cohort="everybody",  # every client may be drawn
            min_count=cohort,
            max_count=cohort,
        )

    def absorb(self, answer: NoisedSum) -> None:
        assert isinstance(answer.task.sketch, VectorSketch)  # from `next_task`
        mean = answer.task.sketch.decode(answer.table, answer.count)
        self.mean = self.design.exchange.read(mean, length=self.flat.numel(), round=self.done)
        self.flat = self.flat + torch.from_numpy(self.mean)
        self.done += 1


def gather(exchange: Exchange, task: Task, vectors: F32, *, round: int, rng: Rng) -> Batch:
    """The sum of the tables that workers with these vectors (n, length) send."""
    chance = np.random.default_rng(rng.words(4))
    tables = exchange.tables(vectors, round=round, chance=chance).reshape(len(vectors), -1)
    assert isinstance(task.sketch, VectorSketch)  # from `next_task`
    finite = np.nan_to_num(tables, posinf=LONGEST_TABLE, neginf=-LONGEST_TABLE)
    rounded = task.sketch.tables(finite, rng=rng)
    return Batch(task.id, contribute(task, rounded, devices=len(vectors), rng=rng), len(vectors))


@dataclass(slots=True, repr=False)
class SketchedTraining:
    """Run a design on clients; the same seed gives the same run, and keeps no promise. `own` is the
    model of a design without a name for it."""

    design: DiffSketchDesign
    data: Federated
    seed: int | None  # of cohorts, batches and noise; None: they are secret
    delta: float = 1e-5
    ledger: Account = field(default_factory=NoLedger)
    own: OwnModel | None = None
    model: nn.Module = field(init=False)
    campaign: SketchCampaign = field(init=False)
    workers: Tensor | None = field(init=False, default=None)  # their own models, with correction
    privacy: str = field(init=False)

    def __post_init__(self) -> None:
        clients = len(self.data.train)
        if clients != self.design.clients:
            raise SpecError(
                f"the design is for {self.design.clients} clients; the data has {clients}"
            )
        self.model = model_of(self.design, self.own)
        check_fit(self.model, self.data.train, loss_of(self.own))
        self.campaign = SketchCampaign(self.design, models.flatten(self.model))
        if self.design.exchange.correction:
            self.workers = self.campaign.flat.repeat(clients, 1)
        self.privacy = self.design.privacy(self.delta, secret=self.seed is None)
        if self.privacy != NOT_PRIVATE and self.data.not_covered:
            self.privacy += f"; not covered: {'; '.join(self.data.not_covered)}"

    def __repr__(self) -> str:
        return f"SketchedTraining({self.design!r}, round {self.campaign.done}, {self.privacy})"

    @property
    def flat(self) -> Tensor:
        """The model; with error correction, the mean of the workers' models."""
        return self.campaign.flat if self.workers is None else self.workers.mean(dim=0)

    def run(self, *, evaluate_at: frozenset[int] = frozenset()) -> Iterator[SketchedRound]:
        """Run all rounds; evaluate on the test set after those in `evaluate_at` and the last."""
        design, campaign = self.design, self.campaign
        while (task := campaign.next_task()) is not None:
            number = campaign.done
            rng: Rng = SystemRng() if self.seed is None else SeededRng(self.seed, number)
            vectors = self._vectors(number)
            batch = gather(design.exchange, task, vectors, round=number, rng=rng)
            step(campaign, task, batch, ledger=self.ledger, rng=rng, charge_of=design.charge_of)
            if self.workers is not None:
                steps = np.stack([correct_errors(campaign.mean, own) for own in vectors])
                self.workers += torch.from_numpy(steps)
            sketch = design.exchange if isinstance(design.exchange, DiffSketch) else None
            claimed = sketch.claims(vectors) if sketch else []
            is_evaluated = campaign.done in evaluate_at or campaign.done == design.rounds
            yield SketchedRound(
                round=campaign.done,
                bits=design.exchange.bits(campaign.flat.numel()),
                claimed=tuple(claimed),
                noised=sum(each > (sketch.epsilon or 0) for each in claimed) if sketch else 0,
                accuracy=self.evaluate()[0] if is_evaluated else None,
                privacy=self.privacy,
            )

    def evaluate(self) -> tuple[float | None, float | None]:
        """Accuracy and mean loss on the test set."""
        return evaluate(self.model, self.flat, self.data, loss_of(self.own))

    def cohort(self, round: int) -> I64:
        """The clients of a round; drawn by examples, one may be there several times."""
        design = self.design
        if design.by_examples:
            sizes = self.data.train.sizes.numpy().astype(np.float64)
            chance = self._chance(round, 2)
            return np.sort(chance.choice(len(sizes), design.cohort, p=sizes / sizes.sum()))
        everybody = np.arange(design.clients)
        if design.cohort == design.clients:
            return everybody
        return np.sort(self._chance(round, 2).permutation(everybody)[: design.cohort])

    def _chance(self, round: int, purpose: int) -> np.random.Generator:
        if self.seed is None:
            return np.random.default_rng(SystemRng().words(4))
        return np.random.default_rng([self.seed, round, purpose])

    def _vectors(self, round: int) -> F32:
        """The vectors of a round's cohort, (cohort, length)."""
        design, length = self.design, self.campaign.flat.numel()
        cohort = self.cohort(round)
        torch_seed = int(self._chance(round, 3).integers(1 << 62))
        generator = torch.Generator().manual_seed(torch_seed)
        vectors = np.zeros((len(cohort), length), dtype=np.float32)
        groups: list[tuple[Tensor, list[int]]] = [(self.campaign.flat, cohort.tolist())]
        if self.workers is not None:
            groups = [(self.workers[client], [client]) for client in cohort.tolist()]
        place = 0
        for flat, members in groups:
            for part in updates(
                self.model, flat, self.data.train, members, design.local, generator=generator,
                own=self.own,
            ):  # fmt: skip
                deltas = part.deltas.masked_fill(~part.sound[:, None], 0)
                vectors[place + part.members.numpy()] = deltas.numpy()
            place += len(members)
        return vectors


def largest_clients(federated: Federated, count: int) -> Federated:
    """The clients with the most examples, in their order; the test examples stay."""
    train = federated.train
    if not 1 <= count <= len(train):
        raise SpecError(f"there are {len(train)} clients; got {count}")
    largest = torch.argsort(train.sizes, descending=True, stable=True)[:count].sort().values
    spans = [
        torch.arange(int(train.offsets[client]), int(train.offsets[client + 1]))
        for client in largest.tolist()
    ]
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(span) for span in spans]).cumsum(0)
    every = torch.cat(spans)
    clients = Clients(inputs=train.inputs[every], targets=train.targets[every], offsets=offsets)
    return replace(federated, train=clients)

"""Rules that size the sketch of a round's updates from the results of earlier rounds.

All sizes are in the unit of sums. The noise on a sum has a deviation of σ in each coordinate after
decoding, whatever the size; a sketch of L cells adds, to the sum m over a cohort, a compression
error of |m|²/L in each. So L = |m|²/(c·σ²) makes compression cost a share c of what the noise
costs, and a rule is a way to learn |m|² and to choose L from it.

    none          the vectors themselves
    fixed         one size for all rounds
    adapt_norm    paper 002, algorithm 3: a second sketch's norm, noised and paid for with a tenth
                  of the budget, plus √20·σ of slack, sizes the next round
    two_stage     algorithm 4: whole vectors for a while, whose norms size all other rounds
    adapt_tail    algorithm 5: grow or shrink by a fifth as the error is above or below a target;
                  in a secure sum, the second sketch of the last three is in the sum with its own
                  noise, and norm and error are computed from that
    free_norm     ours: the noised table's own norm gives |m|² at no cost, and early rounds, which
                  a model forgets, are sent smaller

Differs from the paper: its formulas mix the units of sums and means, and have the relative error on
the wrong side; with both corrected, the sizes in its tables are of the right order
(docs/decisions/0020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from sfumato.spec import LARGEST_INTEGER, later, require, spec

Asks: TypeAlias = Literal["nothing", "norm", "error"]  # what a round measures

TailUpdate: TypeAlias = Literal[
    "sign", "exponential", "linear", "relative_exponential", "relative_linear"
]

MAIN_SHARE = 0.9  # the updates' share of 1/σ² where a second query takes the rest
SLACK = math.sqrt(20)  # deviations σ that algorithm 3 adds to a norm: √2 of the query's own
LARGEST_STEP = 2.0  # largest factor by which a size changes from one round to the next


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """What a rule learns from a round, in the unit of sums: all noised, so all public."""

    squared: float  # the table's squared norm, noise included; of several blocks, the mean
    cells: int  # of the table
    noise: float  # σ: the deviation of the noise on each cell, divided by √blocks
    progress: float = 1.0  # share of the rounds that are done
    measurement: float | None = None  # the noised norm, or error, of a second sketch
    second_noise: float = 0.0  # deviation of the noise on the measurement
    read_noise: float = 1.0  # variance of the noise on a coordinate, in σ²; above 1 for medians
    slack: float | None = None  # what to add to a measured norm; None: √20·σ, as algorithm 3 does


@dataclass(frozen=True, slots=True)
class Sizing:
    """The state of a rule: the cells that the next round may have, and what the rule remembers.

    A rule's `start` takes the largest possible |m|²/σ²: updates of full length that all point one
    way, as those of a new model nearly do.
    """

    cells: int
    rounds: int = 0
    memory: float = 0.0


class _OneSize:
    """A rule that asks for nothing and keeps its size."""

    __slots__ = ()
    asks: ClassVar[Asks] = "nothing"

    def after(self, sizing: Sizing, statistics: RoundStatistics, length: int) -> Sizing:
        return replace(sizing, rounds=sizing.rounds + 1)


@spec("no_compression")
class NoCompression(_OneSize):
    """Whole vectors."""

    def start(self, length: int, largest: float) -> Sizing:
        return Sizing(cells=length)


@spec("fixed_rate")
class FixedRate(_OneSize):
    """A sketch `rate` times smaller than the vector, in every round: the paper's Genie grid."""

    rate: float

    def check(self) -> None:
        require.at_least(1, rate=self.rate)

    def start(self, length: int, largest: float) -> Sizing:
        return Sizing(cells=max(1, math.floor(length / self.rate)))


@spec("adapt_norm")
class AdaptNorm:
    """Algorithm 3 of paper 002, in consistent units: the norm of the last round sizes the next.

    The first round has `first` cells for lack of a norm; the paper does not say what it took.
    """

    asks: ClassVar[Asks] = "norm"

    error: float = 0.1  # compression's share of the noise's variance
    first: int | None = None  # cells; None for whole vectors

    def check(self) -> None:
        require.above(0, error=self.error)
        require.at_least(1, first=self.first)

    def start(self, length: int, largest: float) -> Sizing:
        return Sizing(cells=length if self.first is None else min(self.first, length))

    def after(self, sizing: Sizing, statistics: RoundStatistics, length: int) -> Sizing:
        """C = (|m| + √20·σ)²/(c·σ²), σ being the noise that the whole budget has.

        >>> statistics = RoundStatistics(
        ...     squared=0, cells=1, noise=1 / math.sqrt(0.9), measurement=16.1
        ... )
        >>> -(-AdaptNorm(error=0.1).after(Sizing(cells=1), statistics, 10**6).cells // 15)
        283
        """
        assert statistics.measurement is not None  # the task asked for it
        noise, slack = _noise_and_slack(statistics)
        cells = (max(statistics.measurement, 0.0) + slack) ** 2 / (self.error * noise**2)
        return replace(sizing, cells=_whole(cells, length), rounds=sizing.rounds + 1)


@spec("two_stage")
class TwoStage:
    """Algorithm 4: `warm_up` rounds of whole vectors, whose mean norm sizes every round after."""

    asks: ClassVar[Asks] = "norm"

    error: float = 0.1
    warm_up: int = 75
    prior_norm: float | None = later(None)  # of the mean update, as a share of the clip
    whole_slack: bool = later(False)  # the paper's √20·σ, not divided by the root of `warm_up`

    def check(self) -> None:
        require.above(0, error=self.error)
        require.at_least(1, warm_up=self.warm_up)
        require(
            self.prior_norm is None or 0 < self.prior_norm <= 1,
            f"prior_norm must be above 0 and at most 1; got {self.prior_norm}",
        )

    @property
    def rounds_measured(self) -> int:
        """Rounds whose norm is measured: none if it is known beforehand."""
        return self.warm_up if self.prior_norm is None else 0

    def start(self, length: int, largest: float) -> Sizing:
        if self.prior_norm is None:
            return Sizing(cells=length)
        return Sizing(cells=_whole(self.prior_norm**2 * largest / self.error, length))

    def after(self, sizing: Sizing, statistics: RoundStatistics, length: int) -> Sizing:
        rounds = sizing.rounds + 1
        if rounds > self.rounds_measured:
            return replace(sizing, rounds=rounds)
        assert statistics.measurement is not None  # the task asked for it
        total = sizing.memory + max(statistics.measurement, 0.0)
        if rounds < self.warm_up:
            return replace(sizing, rounds=rounds, memory=total)
        noise, slack = _noise_and_slack(statistics)
        norm = total / rounds + (slack if self.whole_slack else slack / math.sqrt(rounds))
        cells = _whole(norm**2 / (self.error * noise**2), length)
        return Sizing(cells=cells, rounds=rounds, memory=total)


@spec("adapt_tail")
class AdaptTail:
    """Algorithm 5: a fifth larger when the measured error is above the target, else smaller.

    The error is the distance between the second sketch of the decoded sum and that of the sum, so
    it contains the noise's error as well as compression's. The target must allow for both:
    √(1 + c)·√d·σ, and √2 deviations of the measurement. `paper_target` is the paper's own,
    √n·(c·√d·σ + 2 deviations), which is √n too lax (and, with the units corrected, could never be
    met); it is why the paper saw accuracy lost.

    `update` says what moves the size: the sign of the error, as in algorithm 5, or the
    error itself, in one of appendix H's four ways. The paper does not say in which unit; here it is
    the error of a mean as a share of the clip, so `unit` is cohort × clip.
    """

    asks: ClassVar[Asks] = "error"

    error: float = 0.1
    step: float = 0.2
    first: int | None = None
    paper_target: int | None = None  # the cohort n in the paper's target; None for the right one
    update: TailUpdate = later("sign")
    unit: float = later(1.0)  # of absolute errors

    def check(self) -> None:
        require.above(0, error=self.error, unit=self.unit)
        require(0 < self.step < 1, f"step must be above 0, below 1; got {self.step}")
        require.at_least(1, first=self.first, paper_target=self.paper_target)

    def start(self, length: int, largest: float) -> Sizing:
        return Sizing(cells=max(1, length // 10) if self.first is None else min(self.first, length))

    def after(self, sizing: Sizing, statistics: RoundStatistics, length: int) -> Sizing:
        assert statistics.measurement is not None  # the task asked for it
        expected = math.sqrt(length * statistics.read_noise) * statistics.noise
        if self.paper_target is None:
            target = math.sqrt(1 + self.error) * expected + math.sqrt(2) * statistics.second_noise
        else:
            target = self.error * expected + 2 * statistics.second_noise
            target *= math.sqrt(self.paper_target)
        cells = self._next(sizing.cells, statistics.measurement - target, target)
        return replace(sizing, cells=_whole(cells, length), rounds=sizing.rounds + 1)

    def _next(self, cells: int, excess: float, target: float) -> float:
        """The next number of cells, for an error that exceeds the target by so much."""
        if self.update == "sign":
            return cells * (1 + self.step if excess > 0 else 1 - self.step)
        change = self.step * excess / (target if self.update.startswith("relative") else self.unit)
        change = min(max(change, -LARGEST_INTEGER), LARGEST_INTEGER)  # it may be infinite
        is_linear = self.update.endswith("linear")
        return cells + math.floor(change) if is_linear else cells * (1 + change)


@spec("free_norm")
class FreeNorm:
    """Ours: |m|² from the noised table itself, averaged over rounds, and early rounds sent smaller.

    The squared norm of a table of L cells is |m|² + L·σ² on average, so |table|² − L·σ² estimates
    |m|² at no cost: it is computed from what was released. Its deviation is σ·√(4|m|² + 2L·σ²); an
    average over rounds with weight `memory` reduces that, and removes the need for slack and for
    the tenth of the budget that a query costs.

    A model forgets early noise: later steps shrink its effect. So the share of compression falls
    from `early` × `error` in the first round to `error` in the last, by the same factor in each
    round. Early sums are the longest, so that is where cells are saved.
    """

    asks: ClassVar[Asks] = "nothing"

    error: float = 0.1  # compression's share of the noise's variance, in the last round
    early: float = 4.0  # how many times larger that share is in the first round
    memory: float = 0.9

    def check(self) -> None:
        require.above(0, error=self.error)
        require.at_least(1, early=self.early)
        require(0 <= self.memory < 1, f"memory must be at least 0, below 1; got {self.memory}")

    def start(self, length: int, largest: float) -> Sizing:
        return Sizing(cells=_whole(largest / (self.early * self.error), length))

    def after(self, sizing: Sizing, statistics: RoundStatistics, length: int) -> Sizing:
        now = (
            max(statistics.squared - statistics.cells * statistics.noise**2, 0.0)
            / statistics.noise**2
        )
        # A plain mean in the first rounds, until its weight on the past reaches `memory`.
        keep = min(self.memory, sizing.rounds / (sizing.rounds + 1))
        mean = keep * sizing.memory + (1 - keep) * now
        error = self.error * self.early ** (1 - statistics.progress)
        return Sizing(
            cells=_near(mean / error, sizing.cells, length),
            rounds=sizing.rounds + 1,
            memory=mean,
        )


Compression: TypeAlias = NoCompression | FixedRate | AdaptNorm | TwoStage | AdaptTail | FreeNorm


def rounds_measured(rule: Compression) -> float:
    """The number of rounds, from the first, that measure something beside the sum."""
    if isinstance(rule, TwoStage):
        return rule.rounds_measured
    return 0 if rule.asks == "nothing" else math.inf


def _noise_and_slack(statistics: RoundStatistics) -> tuple[float, float]:
    """The deviation σ that noise would have with the whole budget; what to add to a norm."""
    noise = statistics.noise * math.sqrt(MAIN_SHARE)
    return noise, SLACK * noise if statistics.slack is None else statistics.slack


def _whole(cells: float, length: int) -> int:
    return max(1, math.ceil(min(cells, length)))  # cells may be infinite


def _near(cells: float, last: int, length: int) -> int:
    """The number of cells, at most twice and at least half of the last size."""
    return _whole(min(max(cells, last / LARGEST_STEP), last * LARGEST_STEP), length)

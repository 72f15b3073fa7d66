"""What is the mean of the devices' vectors? Sums whose compression sets itself (paper 002).

A sketch of a long vector errs in proportion to the norm of what it holds, and noise for privacy
does not: so how small a sketch may be depends on how long the mean is, which is not known before.
A first, tiny sketch that is noised like any other tells that length well enough.

Every round asks everybody, and the rounds share one budget (docs/proofs/mean.md says why devices of
their own would make a worse pilot). Sizes come from noised tables, so they cost nothing more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.errors import DataError, ImpossibleError, SpecError
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import Cost, MeanRelease, NoisedSum
from sfumato.flow.secure_sum import ANY_NONCE, SecureSum, weights
from sfumato.flow.task import Task, bits_for, largest_cell, most_devices
from sfumato.privacy import (
    AdditiveLoss,
    Charge,
    Mechanism,
    Noise,
    NoiseAtRelease,
    NoNoise,
    PlannedLoss,
    Rng,
    SeededRng,
)
from sfumato.privacy.samplers import LARGEST_SCALE
from sfumato.questions.answers import check_finished
from sfumato.questions.question import (
    EVERYBODY,
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
)
from sfumato.sketch import VectorSketch
from sfumato.sketch.dense import DenseSketch, top
from sfumato.sketch.vector import headroom
from sfumato.spec import digest, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

F64 = npt.NDArray[np.float64]
Compression = Literal["adapt_norm", "adapt_tail", "fixed", "none"]

ROWS = 15  # of a sketch that is read by means; the paper's
LEAST_WIDTH = 2
PILOT_SHARE = 0.1  # of the budget (in 1/variance): the noise of what follows grows by a ninth
PILOT_WIDTH = 4
SLACK = math.sqrt(2)  # deviations of the pilot's squared norm that are added to it; the paper's
BLOCKS = 5  # of a sketch that is read by medians, a row each
FIRST_WIDTH = 16  # of such a sketch
MEDIAN_OF_FIVE = 0.28684  # variance of the median of five standard normal variables
LEAST_VARIANCE = 1125.0  # of Skellam noise that costs at most 0.2% more than Gaussian noise
SHORTEST, LONGEST = 1e-20, 1e20  # clips whose sketches neither vanish nor overflow in float32
_CHECK = 8.0  # cells of the sketch that errors are measured by, times relative_error²
_ROUNDING = 0.005  # what rounding, and what the norms it needs, may add to the noise's variance
_NO_NOISE = 2.0**16  # whole numbers to the longest vector, where there is no noise
_LOG_RISK = math.sqrt(2 * math.log(2**10))  # as `Rounding` has it
PAPER_HEADROOM = 2.0
PAPER_RISK = 0.05  # the paper's beta


@spec("mean_design")
class MeanDesign(QuestionDefaults):
    """A sized campaign for a mean: all that `MeanCampaign` needs to know.

    *none* sends vectors whole; *fixed* sends a sketch of `most_cells`. *adapt_norm* asks a tiny
    sketch first and sizes the next so that compression adds `relative_error` to the squared error
    of the noise. *adapt_tail* reads sketches by medians, which err less if few coordinates are
    large, doubles them until the first sketch finds no more error than there should be, and pays
    for each: with noise, it is hardly ever worth it.
    """

    compression: Compression
    dimensions: int
    devices: int
    clip: float
    most_cells: int  # that a round may ask for; vectors may be sent whole if it is `dimensions`
    seed: int
    multiplier: float
    """Standard deviation of a sum's noise, over what one device moves it, if one round took the
    whole budget; 0 for no noise."""
    relative_error: float = 0.1
    rows: int = ROWS
    top: int | None = None  # coordinates that are kept at the end, which makes a mean biased
    secure: SecureSum | None = None  # how sums are hidden, and from whom
    paper_epsilon: float | None = None  # for the size rule of the paper's algorithm 1
    paper_delta: float = 1e-6

    def check(self) -> None:
        for name in ("dimensions", "devices", "rows", "most_cells"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}")
        require(
            SHORTEST <= self.clip <= LONGEST,
            f"clip must be {SHORTEST:g} to {LONGEST:g}, so that sketches fit in float32; got "
            f"{self.clip:g}: give vectors in another unit",
        )
        require(self.multiplier >= 0, f"multiplier must be at least 0; got {self.multiplier}")
        require(
            0 < self.relative_error <= 1,
            f"relative_error must be above 0, at most 1; got {self.relative_error}",
        )
        require(self.top is None or self.top >= 1, f"top must be at least 1; got {self.top}")
        require(
            self.most_cells <= self.dimensions,
            f"most_cells must be at most the {self.dimensions} dimensions; got {self.most_cells}",
        )
        require(
            self.compression != "none" or self.may_be_whole,
            "vectors that are not compressed need as many cells as dimensions",
        )
        require(
            self.may_be_whole or self.widest >= LEAST_WIDTH,
            f"a sketch needs at least {LEAST_WIDTH * self.row_count} cells; got {self.most_cells}",
        )
        require(
            self.multiplier > 0 or not self.adapts,
            "compression follows the noise, and there is none: use fixed or none",
        )
        require(
            self.paper_epsilon is None or (self.compression == "adapt_norm" and self.adapts),
            "only adapt_norm has a paper's rule",
        )

    @property
    def adapts(self) -> bool:
        return self.compression in ("adapt_norm", "adapt_tail")

    @property
    def may_be_whole(self) -> bool:
        return self.most_cells >= self.dimensions

    @property
    def row_count(self) -> int:
        """Rows of a main round's table, in all blocks."""
        return BLOCKS if self.compression == "adapt_tail" else self.rows

    @property
    def widest(self) -> int:
        """The widest sketch that is still smaller than the vector."""
        return min(self.most_cells, self.dimensions - 1) // self.row_count

    @property
    def tail_widths(self) -> tuple[int, ...]:
        """Of the rounds of adapt_tail: doubled as long as they are allowed."""
        widths = [min(FIRST_WIDTH, self.widest)]
        while 0 < 2 * widths[-1] <= self.widest:
            widths.append(2 * widths[-1])
        return tuple(widths)

    @property
    def shares(self) -> tuple[float, ...]:
        """What each round may spend of the budget, in 1/variance: they add up to one."""
        if not self.adapts:
            return (1.0,)
        rounds = 1 if self.compression == "adapt_norm" else len(self.tail_widths)
        return (PILOT_SHARE, *[(1 - PILOT_SHARE) / rounds] * rounds)

    @property
    def first_width(self) -> int:
        """Of the first round's sketch; 0 for whole vectors."""
        if self.compression == "fixed":
            return 0 if self.may_be_whole else self.widest
        if self.compression == "none":
            return 0
        if self.compression == "adapt_tail":
            return math.ceil(_CHECK / self.relative_error**2 / self.rows)
        return LEAST_WIDTH if self.paper_epsilon is not None else PILOT_WIDTH

    def sketch(self, round: int, width: int) -> VectorSketch:
        """The sketch of a round: its own hash functions, and the rounding that its noise allows."""
        clip, dense = self.clip, None
        if width:
            pilot = self.adapts and round == 0
            rows, blocks = self.rows, 1
            if pilot and self.paper_epsilon is not None:
                rows = math.ceil(math.log(4 / PAPER_RISK))
            elif self.compression == "adapt_tail" and not pilot:
                rows, blocks = 1, BLOCKS
            dense = DenseSketch(
                length=self.dimensions, rows=rows, width=width, blocks=blocks, seed=self.seed,
                round=round,
            )  # fmt: skip
            room = PAPER_HEADROOM if self.paper_epsilon is not None else headroom(dense.cells)
            clip *= room * math.sqrt(blocks)
        cells = self.dimensions if dense is None else dense.cells
        multiplier, crowd = self.multiplier / math.sqrt(self.shares[round]), 1.0
        if self.secure is not None and multiplier:  # all shares together are more than the least
            crowd = max(1.0, self.secure.noise(1.0, self.devices).stddev(self.devices + 1))
        long = longest(cells, self.devices, multiplier, crowd)
        return VectorSketch(
            length=self.dimensions, clip=self.clip, bound=clip, scale=long / clip, dense=dense
        )

    def mechanism(self, round: int, sketch: VectorSketch) -> Mechanism:
        """The round's share of the budget as noise on its table."""
        if self.multiplier == 0:
            return NoNoise()
        scale = self.multiplier * sketch.sensitivity(1).l2 / math.sqrt(self.shares[round])
        if self.secure is not None:
            return self.secure.noise(scale, self.devices)
        return NoiseAtRelease(noise="gaussian", scale=scale)

    def task(self, round: int, width: int) -> Task:
        sketch = self.sketch(round, width)
        mechanism = self.mechanism(round, sketch)
        if self.secure is not None:
            return self.secure.task(
                sketch=sketch,
                mechanism=mechanism,
                campaign=digest(self),
                cohort=EVERYBODY,
                asked=self.devices,
                items_per_device=1,
            )
        most = most_devices(self.devices)
        return Task(
            sketch=sketch,
            mechanism=mechanism,
            aggregation=Plain(modulus_bits=bits_for(most * largest_cell(sketch, 1))),
            campaign=digest(self),
            cohort=EVERYBODY,
            max_count=most,
        )

    @property
    def rounds(self) -> int:
        """Rounds that there may be, at most."""
        return len(self.shares)

    @property
    def tasks_per_device(self) -> int:
        return self.rounds

    @property
    def items_per_device(self) -> None:
        return None

    @property
    def least_noise(self) -> float:
        return self.multiplier / math.sqrt(max(self.shares))

    def campaign(self, plan: Plan, *, devices: int | None = None, **context: Any) -> MeanCampaign:
        return MeanCampaign(self, asked=devices)

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        """All devices, of whom those without finite numbers abstain."""
        assert population.vectors is not None  # as the question says
        length = population.vectors.shape[1]
        if length != self.dimensions:
            raise DataError(
                f"the data's vectors have {length:,} dimensions; the study's have "
                f"{self.dimensions:,}"
            )
        abstaining = len(population.vectors) - population.devices
        if not abstaining:
            return population, []
        return population, [
            f"{abstaining:,} devices abstained: their vectors hold NaN or infinite numbers. How "
            "many do is shown as it is"
        ]

    def values(
        self, task: Task, items: Any, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, None]:
        """Tables of vectors, rounded by public chance: it need not be secret, and what comes from
        the public seed repeats in any order."""
        sketch = task.sketch
        assert isinstance(sketch, VectorSketch)  # a mean's campaign asks for nothing else
        return sketch.tables(items, rng=SeededRng(self.seed, *place)), None

    def answer(
        self, campaign: MeanCampaign, plan: Plan, participation: Participation
    ) -> MeanRelease:
        check_finished(campaign, participation)
        estimate = campaign.estimate()
        summary = plan.summary()
        summary["parameters"] |= {"cells": estimate.cells, "compressed": estimate.compressed}
        notes = list(participation.notes)
        if not estimate.settled:
            notes.append(
                "the last round still erred by more than its noise explains; adapt_norm would do "
                "better"
            )
        if estimate.answered < participation.devices:
            notes.append(
                f"{estimate.answered:,} of {participation.devices:,} devices answered; the others "
                "are taken to be like them"
            )
        return MeanRelease(
            mean=estimate.mean,
            standard_error=estimate.standard_error,
            privacy=plan.privacy,
            cost=Cost(
                devices=participation.devices,
                rounds=estimate.rounds,
                bytes_per_device=weights(campaign.tasks)["bytes_per_device"],
                seconds=0.0,
            ),
            study=plan.study.to_dict(),
            plan=summary,
            notes=tuple(notes),
        )

    def charge_of(self, task: Task) -> Charge:
        """The losses of all rounds are bounded here, whatever their sizes turn out to be, so that
        they are charged as one plan (docs/proofs/mean.md)."""
        if self.multiplier == 0 or not self.adapts:
            return task.loss
        own = task.loss
        assert isinstance(own, AdditiveLoss)  # as there is noise
        if own.noise == "skellam" and own.scale**2 < LEAST_VARIANCE:
            return own  # the bound is for finer tables
        losses = tuple(self._most_lost(own.noise, share) for share in self.shares)
        share = (self.multiplier * own.l2 / own.scale) ** 2
        place = int(np.argmin([abs(each - share) for each in self.shares]))
        return PlannedLoss(loss=losses[place], plan=digest(self), losses=losses)

    def _most_lost(self, noise: Noise, share: float) -> AdditiveLoss:
        """The loss of a round of this share whose tables are as coarse as they may be."""
        scale = math.sqrt(LEAST_VARIANCE)
        l2 = scale * math.sqrt(share) / self.multiplier
        return AdditiveLoss(noise=noise, scale=scale, l1=max(l2, l2**2), l2=l2, unit_cells=0)

    def noise(self, round: int, width: int, count: int) -> float:
        """Standard deviation of the noise on a cell, in the vectors' own unit."""
        sketch = self.sketch(round, width)
        return self.mechanism(round, sketch).stddev(count) / sketch.scale

    def width_for(self, squared: float, count: int) -> int:
        """The least width at which compressing a sum of this squared norm adds `relative_error` to
        the noise's squared error; 0 to send vectors whole."""

        def is_enough(width: int) -> bool:
            noise = self.noise(1, width, count)
            return self.row_count * width >= cells_for(squared, noise, self.relative_error)

        widths = range(LEAST_WIDTH, self.widest + 1)
        place = bisect_left(widths, True, key=is_enough)
        if place < len(widths):
            return widths[place]
        return 0 if self.may_be_whole else self.widest

    def paper_width(self, norm: float) -> int:
        """The second size of the paper's algorithm 1, for a mean of this norm."""
        assert self.paper_epsilon is not None  # as the caller has seen
        n, epsilon, bound = self.devices, self.paper_epsilon, PAPER_HEADROOM * self.clip
        slack = 2 * bound * math.log(8 / PAPER_RISK) / (n * epsilon)
        slack += bound * math.sqrt(math.log(16 / PAPER_RISK) / n)
        factor = min((n * epsilon) ** 2 / math.log(1 / self.paper_delta), n * self.dimensions)
        cells = factor * ((norm + slack) / self.clip) ** 2
        width = max(math.ceil(cells / self.rows), LEAST_WIDTH)
        return width if width <= self.widest else 0 if self.may_be_whole else self.widest

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"dimensions": self.dimensions, "clip": self.clip}
        sizes |= {"compression": self.compression}
        if self.compression != "none":
            sizes |= {"rows": self.row_count, "cells_at_most": self.most_cells}
        if self.adapts:
            sizes |= {"relative_error": self.relative_error}
            sizes |= {"pilot_cells": self.sketch(0, self.first_width).cells}
            sizes |= {"pilot_share_of_budget": PILOT_SHARE}
        if self.top is not None:
            sizes |= {"top": self.top}
        if self.multiplier:
            kind = "discrete gaussian" if self.secure is None else "skellam, in shares"
            sizes |= {"noise": kind, "noise_multiplier": self.multiplier}
        if self.secure is not None:
            task = self.task(0, self.first_width)
            found = task.masked_round(self.devices, ANY_NONCE).parameters(self.devices)
            sizes |= {"cohort": self.devices, "least_survivors": task.min_count}
            sizes |= {"neighbours": found.neighbours, "threshold": found.threshold}
        return sizes | {"rounds": len(self.shares)}


def cells_for(squared: float, noise: float, relative_error: float) -> float:
    """Cells of a sketch that adds `relative_error` to the squared error of noise on every cell.

    A sum s of d coordinates is read back from m cells with a squared error of (d − 1)·|s|²/m, and
    of d·noise² from the noise: so m = |s|²/(relative_error·noise²), whatever d is.

    >>> math.ceil(cells_for((16.1 + math.sqrt(20)) ** 2, 1.0, 0.1) / 15)  # paper's slack, 15 rows
    283
    """
    return squared / (relative_error * noise**2)


def squared_norm(table: F64, noise: float) -> tuple[float, float]:
    """An estimate of the squared norm of what a noised count-mean table holds, and its deviation.

    |Y|² exceeds |s|² by cells·noise² in the mean. Its variance is 4·|s|²·noise² + 2·cells·noise⁴
    from the noise, and at most 2·|s|⁴/cells from the sketch.
    """
    found = max(0.0, float(np.sum(table**2)) - table.size * noise**2)
    return found, deviation(found, table.size, noise)


def deviation(squared: float, cells: int, noise: float) -> float:
    variance = 4 * squared * noise**2 + 2 * cells * noise**4 + 2 * squared**2 / cells
    return math.sqrt(variance)


def longest(cells: int, devices: int, multiplier: float, crowd: float = 1.0) -> float:
    """Into how many whole numbers the longest vector is cut, so that rounding costs little.

    Rounding adds at most 1/4 to the variance of a device's cell, and lengthens what noise must
    hide; each may add half a per cent to the noise's variance, unless the noise would be larger
    than can be drawn, with all devices' shares of it together being `crowd` times as large.
    """
    if multiplier == 0:
        return _NO_NOISE
    extra = cells / 4 + _LOG_RISK * math.sqrt(cells) / 2
    wanted = (_LOG_RISK + math.sqrt(_LOG_RISK**2 + 4 * _ROUNDING * extra)) / (2 * _ROUNDING)
    wanted = max(wanted, math.sqrt(devices / (4 * _ROUNDING)) / multiplier)
    limit = 0.99 * LARGEST_SCALE["gaussian"] / (multiplier * crowd)
    room = limit**2 - extra
    if room <= _LOG_RISK * limit:
        raise ImpossibleError(
            f"noise of {multiplier:.4g} times what a device sends, on {cells:,} cells, is more "
            "than can be drawn",
            hint="raise epsilon or delta, or ask for shorter vectors",
        )
    return min(wanted, -_LOG_RISK / 2 + math.sqrt(_LOG_RISK**2 / 4 + room))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeanEstimate:
    """A mean over the devices that answered, and how it was come by."""

    mean: F64
    standard_error: float  # of a coordinate: the root mean square over all of them
    cells: int  # of the last round's table
    compressed: bool
    rounds: int
    answered: int
    settled: bool  # false if adapt_tail came to its last round and found the error still too large

    def __repr__(self) -> str:
        return f"MeanEstimate({self.mean.size:,} coordinates, {self.answered:,} devices)"


@dataclass(slots=True, repr=False)
class MeanCampaign(Campaign):
    """Asks for a first table, if sizes adapt; then for as large a one as it takes."""

    design: MeanDesign
    asked: int | None = None  # devices, of whom some may not answer; as planned if not given
    _width: int = field(init=False)
    _answers: list[NoisedSum] = field(default_factory=list)
    _over: bool = False
    _settled: bool = True
    _measured: float = 0.0  # adapt_tail: squared error of the last mean, as the pilot shows it

    def __post_init__(self) -> None:
        self._width = self.design.first_width

    def next_task(self) -> Task | None:
        return None if self._over else self.design.task(len(self._answers), self._width)

    def absorb(self, answer: NoisedSum) -> None:
        task = self.next_task()
        if task is None or answer.task.id != task.id:
            raise SpecError("a campaign absorbs the answer to the task it asked for last")
        self._answers.append(answer)
        design, rounds = self.design, len(self._answers)
        if not design.adapts:
            self._over = True
        elif rounds == 1:
            adapts_norm = design.compression == "adapt_norm"
            self._width = self._sized(answer) if adapts_norm else design.tail_widths[0]
        elif design.compression == "adapt_norm":
            self._over = True
        else:
            self._settled = self._is_close(answer)
            self._over = self._settled or rounds == len(design.shares)
            if not self._over:
                self._width = design.tail_widths[rounds - 1]

    @property
    def tasks(self) -> list[Task]:
        """Those that were answered."""
        return [answer.task for answer in self._answers]

    def estimate(self) -> MeanEstimate:
        """The mean, read from the last round's table."""
        if not self._over:
            raise SpecError("a mean is known when the last round is absorbed")
        answer, design = self._answers[-1], self.design
        sketch, count = _sketch_of(answer), answer.count
        mean = sketch.decode(answer.table, count)
        if design.top is not None:
            mean = top(mean.astype(np.float32), design.top).astype(np.float64)
        return MeanEstimate(
            mean=mean,
            standard_error=math.sqrt(self._variance(answer)),
            cells=sketch.cells,
            compressed=sketch.dense is not None,
            rounds=len(self._answers),
            answered=count,
            settled=self._settled,
        )

    def _sized(self, pilot: NoisedSum) -> int:
        """The next width: for the squared norm that the pilot shows and its slack, and for none
        that cannot be."""
        design, sketch = self.design, _sketch_of(pilot)
        noise = pilot.task.mechanism.stddev(pilot.count) / sketch.scale
        found, spread = squared_norm(sketch.rounding.reals(pilot.table), noise)
        if design.paper_epsilon is not None:
            return design.paper_width(min(math.sqrt(found) / pilot.count, design.clip))
        most = (pilot.count * design.clip) ** 2
        return design.width_for(min(found + SLACK * spread, most), pilot.count)

    def _is_close(self, answer: NoisedSum) -> bool:
        """Whether the pilot, which has hash functions and noise of its own, finds no more error in
        the mean so far than its noise and `relative_error` explain, but for a deviation."""
        design, pilot = self.design, self._answers[0]
        sketch, check = _sketch_of(answer), _sketch_of(pilot)
        assert check.dense is not None  # a pilot is a sketch
        cells, noise = check.cells, pilot.task.mechanism.stddev(pilot.count)
        noise /= check.scale * pilot.count
        gap = check.dense.encode(sketch.decode(answer.table, answer.count)).astype(np.float64)
        gap -= check.rounding.reals(pilot.table) / pilot.count
        self._measured, _ = squared_norm(gap, noise)
        target = (1 + design.relative_error) * self._noise_error(answer)
        target += self._absence(answer.count) + self._absence(pilot.count)
        slack = deviation(target, cells, noise) ** 2 + 2 * target**2 / sketch.cells
        return self._measured <= target + math.sqrt(slack)

    def _noise_error(self, answer: NoisedSum) -> float:
        """Squared error of the mean by noise and rounding, over all coordinates."""
        sketch, count = _sketch_of(answer), answer.count
        variance = (answer.task.mechanism.stddev(count) ** 2 + count / 4) / sketch.scale**2
        if sketch.dense is not None and sketch.dense.blocks > 1:
            variance *= MEDIAN_OF_FIVE
        return self.design.dimensions * variance / count**2

    def _absence(self, count: int) -> float:
        """Squared error by who did not answer, at most: what a sample of so many devices has."""
        asked = self.design.devices if self.asked is None else self.asked
        return self.design.clip**2 * max(0.0, 1 / count - 1 / asked)

    def _variance(self, answer: NoisedSum) -> float:
        """Of a coordinate of the mean, averaged over all."""
        design, sketch, count = self.design, _sketch_of(answer), answer.count
        error = self._noise_error(answer)
        if design.compression == "adapt_tail":
            error = max(error, self._measured)
        elif sketch.dense is not None:
            noise = answer.task.mechanism.stddev(count) / sketch.scale
            found, _ = squared_norm(sketch.rounding.reals(answer.table), noise)
            error += (design.dimensions - 1) * found / (sketch.cells * count**2)
        return (error + self._absence(count)) / design.dimensions


def _sketch_of(answer: NoisedSum) -> VectorSketch:
    sketch = answer.task.sketch
    assert isinstance(sketch, VectorSketch)  # a mean's campaign asks for nothing else
    return sketch

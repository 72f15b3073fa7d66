"""What is the mean of the devices' vectors? Sums with adaptive compression (paper 002).

The error of a sketch of a long vector is proportional to the vector's norm; that of the privacy
noise is not. So how small a sketch may be depends on the norm of the mean, which is not known in
advance. A first, tiny sketch (the pilot), with noise like any other, estimates it well enough.

Every round asks all devices, and the rounds share one budget (docs/proofs/mean.md explains why a
pilot with its own devices would be worse). Sizes come from noised tables, so they cost no privacy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64
from sfumato.errors import DataError, ImpossibleError, SimulationWarning, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import Influence, MeanRelease, NoisedSum
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE, SecureSum, sum_task, traffic
from sfumato.flow.task import Task
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
from sfumato.questions.answers import answering_notes, check_finished
from sfumato.questions.promise import masked_influence, round_up
from sfumato.questions.question import Dictionary, InCohorts, Participation, Plan
from sfumato.sketch import VectorSketch
from sfumato.sketch.dense import DenseSketch, median_variance, spread_of_squares, top
from sfumato.sketch.vector import headroom
from sfumato.spec import digest, later, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

Compression = Literal["adapt_norm", "adapt_tail", "fixed", "none"]

ROWS = 15  # of a sketch that is decoded by means; as in the paper
LEAST_WIDTH = 2
PILOT_SHARE = 0.1  # of the budget (in 1/variance): later noise variance grows by a ninth
PILOT_WIDTH = 4
SEARCH_SHARE = 0.3  # of adapt_tail's budget, for all rounds that look for a size
SLACK = math.sqrt(2)  # standard deviations added to the pilot's squared norm; as in the paper
BLOCKS = 5  # of a sketch that is decoded by medians, with one row each; the paper's R and P
FIRST_WIDTH = 16  # of such a sketch
LEAST_VARIANCE = 1125.0  # at which Skellam noise costs at most 0.2% more than Gaussian noise
LEAST_MULTIPLIER = 0.05  # with which every table has noise of that variance
SHORTEST, LONGEST = 1e-20, 1e20  # limits on the clip, so that float32 does not over- or underflow
_CHECK = 8.0  # adapt_tail: cells of the pilot, times relative_error²
_ROUNDING = (
    0.005  # relative increase of the noise's variance allowed for rounding, and for its norms
)
_NO_NOISE = 2.0**16  # without noise: the integer length of the longest vector
_LOG_RISK = math.sqrt(2 * math.log(2**10))  # as in `Rounding`
PAPER_HEADROOM = 2.0
PAPER_RISK = 0.05  # the paper's beta, unless a study has its own


@spec("mean_design")
class MeanDesign(InCohorts):
    """A sized campaign for a mean, for `MeanCampaign`.

    *none* sends whole vectors; *fixed* sends a sketch of `most_cells`. *adapt_norm* asks for a tiny
    sketch first and sizes the next so that compression adds `relative_error` to the squared error
    of the noise. *adapt_tail* decodes sketches by medians, whose error is smaller if few
    coordinates are large. It doubles the sketch until the pilot finds no more error than expected,
    and asks for the same sketch again, with most of the budget; or for whole vectors, if no size
    was enough. Every round costs privacy: with noise, whole vectors err less.
    """

    items_per_device: ClassVar[None] = None
    compression: Compression
    dimensions: int
    devices: int
    clip: float
    most_cells: int  # limit per round; if it is `dimensions`, vectors may be sent whole
    seed: int
    multiplier: float
    """Standard deviation of the noise over the sensitivity of the sum, if one round used the whole
    budget; 0 for no noise."""
    relative_error: float = 0.1
    rows: int = ROWS
    top: int | None = None  # number of coordinates in the answer; makes the mean biased
    secure: SecureSum | None = None  # for masked sums
    paper_epsilon: float | None = None  # for the size rule of the paper's algorithm 1
    paper_delta: float = 1e-6
    cohort_count: int = later(1)  # masked sums: cohorts that each round asks one after another
    search_share: float | None = later(None)
    """adapt_tail: the share of the budget of all rounds that look for a size, beside the pilot's;
    the rest is for one more round of that size, from which the mean is read. None: the mean is read
    from the round that found the size, and all have the same share."""
    blocks: int = later(BLOCKS)  # adapt_tail: of which a coordinate's reading is the median
    block_rows: int = later(1)  # adapt_tail: rows of a block
    paper_risk: float = later(PAPER_RISK)  # the beta of the paper's algorithm 1

    def check(self) -> None:
        require.at_least(1, dimensions=self.dimensions, devices=self.devices, rows=self.rows)
        require.at_least(1, most_cells=self.most_cells, cohort_count=self.cohort_count)
        require.at_least(1, blocks=self.blocks, block_rows=self.block_rows)
        require(
            self.blocks % 2 == 1,
            f"blocks must be odd, so that the median is one block's reading; got {self.blocks}",
        )
        require(
            0 < self.paper_risk < 1,
            f"paper_risk must be above 0 and below 1; got {self.paper_risk}",
        )
        require(
            SHORTEST <= self.clip <= LONGEST,
            f"clip must be {SHORTEST:g} to {LONGEST:g}, so that sketches fit in float32; got "
            f"{self.clip:g}: use another unit for the vectors",
        )
        require.at_least(0, multiplier=self.multiplier)
        require(
            0 < self.relative_error <= 1,
            f"relative_error must be above 0 and at most 1; got {self.relative_error}",
        )
        require.at_least(1, top=self.top)
        require(
            self.most_cells <= self.dimensions,
            f"most_cells must be at most the {self.dimensions} dimensions; got {self.most_cells}",
        )
        require(
            self.compression != "none" or self.may_be_whole,
            "vectors without compression need as many cells as dimensions; set most_cells",
        )
        require(
            self.may_be_whole or self.widest >= LEAST_WIDTH,
            f"a sketch needs at least {LEAST_WIDTH * self.row_count} cells; got {self.most_cells}",
        )
        require(
            self.multiplier > 0 or not self.adapts,
            "adaptive compression depends on the noise, and there is none; use fixed or none",
        )
        require(
            self.paper_epsilon is None or (self.compression == "adapt_norm" and self.adapts),
            "paper_epsilon is for adapt_norm only",
        )
        require(
            self.search_share is None
            or (self.compression == "adapt_tail" and 0 < self.search_share < 1 - PILOT_SHARE),
            f"search_share is for adapt_tail, above 0 and below {1 - PILOT_SHARE}; got "
            f"{self.search_share}",
        )
        require(
            self.cohort_count == 1 or self.secure is not None,
            "cohorts are for masked sums: a collector that may see tables adds them all; set "
            "cohort_count to 1",
        )

    @property
    def adapts(self) -> bool:
        return self.compression in ("adapt_norm", "adapt_tail")

    @property
    def may_be_whole(self) -> bool:
        return self.most_cells >= self.dimensions

    @property
    def row_count(self) -> int:
        """The number of rows of a main round's table, in all blocks."""
        return self.blocks * self.block_rows if self.compression == "adapt_tail" else self.rows

    @property
    def algorithm(self) -> str:
        return self.compression

    @property
    def widest(self) -> int:
        """The widest sketch that is still smaller than the vector."""
        return min(self.most_cells, self.dimensions - 1) // self.row_count

    @property
    def tail_widths(self) -> tuple[int, ...]:
        """The widths of adapt_tail's rounds: doubled up to the limit."""
        widths = [min(FIRST_WIDTH, self.widest)]
        while 0 < 2 * widths[-1] <= self.widest:
            widths.append(2 * widths[-1])
        return tuple(widths)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each round's share of the budget, in 1/variance; they add up to one."""
        if not self.adapts:
            return (1.0,)
        rounds = 1 if self.compression == "adapt_norm" else len(self.tail_widths)
        if self.search_share is not None:
            each = self.search_share / rounds
            return (PILOT_SHARE, *[each] * rounds, 1 - PILOT_SHARE - self.search_share)
        return (PILOT_SHARE, *[(1 - PILOT_SHARE) / rounds] * rounds)

    @property
    def first_width(self) -> int:
        """The width of the first round's sketch; 0 for whole vectors."""
        if self.compression == "fixed":
            return 0 if self.may_be_whole else self.widest
        if self.compression == "none":
            return 0
        if self.compression == "adapt_tail":
            return math.ceil(_CHECK / self.relative_error**2 / self.rows)
        return LEAST_WIDTH if self.paper_epsilon is not None else PILOT_WIDTH

    def sketch(self, round: int, width: int) -> VectorSketch:
        """The sketch of a round, with its own hash functions and rounding that suits its noise."""
        clip, dense = self.clip, None
        if width:
            pilot = self.adapts and round == 0
            rows, blocks = self.rows, 1
            if pilot and self.paper_epsilon is not None:
                rows = math.ceil(math.log(4 / self.paper_risk))
            elif self.compression == "adapt_tail" and not pilot:
                rows, blocks = self.block_rows, self.blocks
            same = round
            if self.search_share is not None and round == len(self.shares) - 1:
                # The hash functions whose error the pilot has found to be small.
                same = 1 + bisect_left(self.tail_widths, width)
            dense = DenseSketch(
                length=self.dimensions, rows=rows, width=width, blocks=blocks, seed=self.seed,
                round=same,
            )  # fmt: skip
            margin = PAPER_HEADROOM if self.paper_epsilon is not None else headroom(dense.cells)
            clip *= margin * math.sqrt(blocks)
        cells = self.dimensions if dense is None else dense.cells
        multiplier, crowd = self.multiplier / math.sqrt(self.shares[round]), 1.0
        if self.secure is not None and multiplier:  # all shares together exceed the minimum
            cohort = self.cohort_devices
            crowd = max(1.0, self.secure.noise(1.0, cohort).stddev(cohort + 1))
        length = longest(cells, self.cohort_devices, multiplier, crowd)
        return VectorSketch(
            length=self.dimensions, clip=self.clip, bound=clip, scale=length / clip, dense=dense
        )

    def mechanism(self, round: int, sketch: VectorSketch) -> Mechanism:
        """The noise on a round's table, from its share of the budget."""
        if self.multiplier == 0:
            return NoNoise()
        scale = self.multiplier * sketch.sensitivity(1).l2 / math.sqrt(self.shares[round])
        if self.secure is not None:
            return self.secure.noise(scale, self.cohort_devices)
        return NoiseAtRelease(noise="gaussian", scale=scale)

    def task(self, round: int, width: int, cohort: int = 0) -> Task:
        sketch = self.sketch(round, width)
        return sum_task(
            self.secure,
            sketch=sketch,
            mechanism=self.mechanism(round, sketch),
            campaign=digest(self),
            cohort=self.cohort_names()[cohort],
            devices=self.cohort_devices,
        )

    @property
    def rounds(self) -> int:
        """The largest number of rounds, of all cohorts."""
        return len(self.shares) * self.cohort_count

    @property
    def tasks_per_device(self) -> int:
        return len(self.shares)

    @property
    def least_noise(self) -> float:
        return self.multiplier / math.sqrt(max(self.shares))

    @property
    def influence(self) -> Influence:
        return self.influence_over(self.devices)

    def influence_over(self, count: int) -> Influence:
        """The influence on a mean of `count` devices.

        A table can become its opposite, and a coordinate that is read from it is at most as long as
        the table: rows of a sketch have a weight of 1/√rows each.
        """
        which = "" if self.top is None else " that is among the largest before and after"
        of = f"a coordinate of the mean over {count:,} devices{which}"
        if self.secure is not None:
            return masked_influence(of)
        if self.adapts:
            note = "one report to the pilot can change the size of the sketch, and so its error"
            return Influence(of=of, most=None, note=note)
        sketch = self.sketch(0, self.first_width)
        return Influence(of=of, most=round_up(2 * sketch.rounding.l2 / sketch.scale / count))

    def campaign(self, plan: Plan, *, devices: int | None = None, **context: Any) -> MeanCampaign:
        return MeanCampaign(self, devices=devices)

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        """All devices; those with numbers that are not finite abstain."""
        notes = check_vectors(population, self.dimensions)
        assert population.vectors is not None  # as checked
        _warn_of_clipping(population.vectors, self.clip)
        return population, notes

    def values(
        self, task: Task, items: Any, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, None]:
        """Tables of vectors. Their random rounding need not be secret: it comes from the public
        seed, so that it does not depend on the order of devices."""
        sketch = task.sketch
        assert isinstance(sketch, VectorSketch)  # a mean's tasks have no other
        return sketch.tables(items, rng=SeededRng(self.seed, *place)), None

    def answer(
        self, campaign: MeanCampaign, plan: Plan, participation: Participation
    ) -> MeanRelease:
        check_finished(campaign, participation)
        estimate = campaign.estimate()
        notes = list(participation.notes)
        if not estimate.settled:
            notes.append(
                "the error of the last round is still larger than its noise explains; adapt_norm "
                "would do better"
            )
        notes += answering_notes(participation, estimate.respondents)
        notes.append(
            f"this is the mean of vectors clipped to a norm of {campaign.design.clip:.4g}; what "
            "clipping takes off longer vectors is in no standard error and no interval"
        )
        return MeanRelease(
            mean=estimate.mean,
            standard_error=estimate.standard_error,
            **plan.release_head(
                devices=participation.devices,
                rounds=estimate.rounds,
                bytes_per_device=traffic(campaign.tasks)["bytes_per_device"],
                privacy=replace(plan.privacy, influence=self.influence_over(estimate.respondents)),
                parameters={"cells": estimate.cells, "compressed": estimate.compressed},
                notes=notes,
            ),
        )

    def charge_of(self, task: Task) -> Charge:
        """One plan for all rounds, with bounds on their losses that hold for all possible sizes
        (docs/proofs/mean.md)."""
        if self.multiplier == 0 or not self.adapts:
            return task.loss
        own = task.loss
        assert isinstance(own, AdditiveLoss)  # because there is noise
        if own.scale**2 < LEAST_VARIANCE:
            return own  # the bound does not hold for coarse tables
        losses = self.largest_losses()
        return PlannedLoss(loss=losses[self.step_of(task)], plan=digest(self), losses=losses)

    def step_of(self, task: Task) -> int:
        """The place of a task's step among `shares`, or of one with the same share."""
        own = task.loss
        assert isinstance(own, AdditiveLoss)  # because there is noise
        share = (self.multiplier * own.l2 / own.scale) ** 2
        return int(np.argmin([abs(each - share) for each in self.shares]))

    def largest_losses(self) -> tuple[AdditiveLoss, ...]:
        """The loss of each step with the coarsest tables that the bound allows, for all clips."""
        noise: Noise = "gaussian" if self.secure is None else "skellam"
        scale, losses = math.sqrt(LEAST_VARIANCE), []
        for share in self.shares:
            l2 = scale * math.sqrt(share) / self.multiplier
            losses.append(
                AdditiveLoss(noise=noise, scale=scale, l1=max(l2, l2**2), l2=l2, unit_cells=0)
            )
        return tuple(losses)

    def noise(self, round: int, width: int, count: int) -> float:
        """The standard deviation of the noise on a cell, in the unit of the vectors."""
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
        assert self.paper_epsilon is not None  # checked by the caller
        n, epsilon, bound = self.devices, self.paper_epsilon, PAPER_HEADROOM * self.clip
        slack = 2 * bound * math.log(8 / self.paper_risk) / (n * epsilon)
        slack += bound * math.sqrt(math.log(16 / self.paper_risk) / n)
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
            kind = "gaussian" if self.secure is None else "skellam, in shares"
            sizes |= {"noise": kind, "noise_multiplier": self.multiplier}
        if self.secure is not None:
            task = self.task(0, self.first_width)
            cohort = self.cohort_devices
            round = task.masked_round(cohort, PLACEHOLDER_NONCE).parameters(cohort)
            sizes |= {"cohort": cohort, "least_survivors": task.min_count}
            sizes |= {"neighbours": round.neighbours, "threshold": round.threshold}
        return sizes | {"rounds": self.rounds}


def check_vectors(population: Population, dimensions: int) -> list[str]:
    """Notes about devices that abstain; DataError if vectors have another length."""
    assert population.vectors is not None  # devices of this question hold vectors
    length = population.vectors.shape[1]
    if length != dimensions:
        raise DataError(
            f"the data's vectors have {length:,} dimensions; the study's have {dimensions:,}"
        )
    abstaining = len(population.vectors) - population.devices
    if not abstaining:
        return []
    return [
        f"{abstaining:,} devices abstained, because their vectors have NaN or infinite numbers "
        "(an exact number)"
    ]


def _warn_of_clipping(vectors: npt.NDArray[Any], clip: float) -> None:
    """Say how many simulated vectors are scaled down. The number depends on the data, so a
    simulation may warn about it, but a release must not reveal it."""
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    norms = norms[np.isfinite(norms)]  # other devices abstain
    clipped = float(np.mean(norms > clip * (1 + 1e-9))) if norms.size else 0.0
    if clipped > 0:
        SimulationWarning.warn(
            f"{clipped:.1%} of the simulated vectors are longer than the clip {clip:g} and are "
            f"scaled down to it, so the mean is biased; half of the vectors are longer than "
            f"{float(np.median(norms)):.3g}"
        )


def cells_for(squared: float, noise: float, relative_error: float) -> float:
    """The number of cells at which a sketch adds `relative_error` to the noise's squared error.

    A sum s of d coordinates is decoded from m cells with a squared error of (d − 1)·|s|²/m, plus
    d·noise² from the noise: so m = |s|²/(relative_error·noise²) for all d.

    >>> math.ceil(cells_for((16.1 + math.sqrt(20)) ** 2, 1.0, 0.1) / 15)  # paper's slack, 15 rows
    283
    """
    return squared / (relative_error * noise**2)


def squared_norm(table: F64, noise: float) -> tuple[float, float]:
    """Estimate the squared norm behind a noised count-mean table, and its standard deviation.

    |Y|² exceeds |s|² by cells·noise² on average.
    """
    estimate = max(0.0, float(np.sum(table**2)) - table.size * noise**2)
    return estimate, spread_of_squares(estimate, table.size, noise)


def longest(cells: int, devices: int, multiplier: float, crowd: float = 1.0) -> float:
    """The length of the longest vector in integer units, such that rounding costs little.

    Rounding adds at most 1/4 to the variance of a device's cell, and increases the sensitivity.
    Each may add half a per cent to the noise's variance, unless the noise would exceed the
    sampler's limit; the shares of all devices together are `crowd` times as large as the minimum.
    """
    if multiplier == 0:
        return _NO_NOISE
    extra = cells / 4 + _LOG_RISK * math.sqrt(cells) / 2
    length = (_LOG_RISK + math.sqrt(_LOG_RISK**2 + 4 * _ROUNDING * extra)) / (2 * _ROUNDING)
    length = max(length, math.sqrt(devices / (4 * _ROUNDING)) / multiplier)
    limit = 0.99 * LARGEST_SCALE["gaussian"] / (multiplier * crowd)
    square = limit**2 - extra
    if square <= _LOG_RISK * limit:
        raise ImpossibleError(
            f"noise of {multiplier:.4g} times the sensitivity on {cells:,} cells exceeds the "
            "sampler's limit",
            hint="raise epsilon or delta, or use vectors with fewer dimensions",
        )
    return min(length, -_LOG_RISK / 2 + math.sqrt(_LOG_RISK**2 / 4 + square))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeanEstimate:
    """The mean over the respondents, and how it was computed."""

    mean: F64
    standard_error: float  # of a coordinate: the root mean square over all of them
    cells: int  # of the last round's table
    compressed: bool
    rounds: int
    respondents: int
    settled: bool  # false if the error was still too large in adapt_tail's last round

    def __repr__(self) -> str:
        return f"MeanEstimate({self.mean.size:,} coordinates, {self.respondents:,} devices)"


@dataclass(slots=True, repr=False)
class MeanCampaign(Campaign):
    """Asks for a pilot, if sizes adapt, and then for a table of the right size.

    If there are several cohorts, each step asks all of them and adds their sums. Devices of all
    cohorts add equal shares of noise, so the sum of all has the noise of one sum over as many.
    """

    design: MeanDesign
    devices: int | None = None  # number asked; as planned by default
    _width: int = field(init=False)
    answers: list[NoisedSum] = field(default_factory=list)  # one per step, over all cohorts
    _sums: list[NoisedSum] = field(default_factory=list)  # of this step, one per cohort
    _over: bool = False
    _settled: bool = True
    _is_last: bool = False  # adapt_tail: whether a size was found, and its own round is asked
    _measured: float = 0.0  # adapt_tail: squared error of the last mean, by the pilot

    def __post_init__(self) -> None:
        self._width = self.design.first_width

    def next_task(self) -> Task | None:
        if self._over:
            return None
        step = len(self.design.shares) - 1 if self._is_last else len(self.answers)
        return self.design.task(step, self._width, len(self._sums))

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        self._sums.append(answer)
        if len(self._sums) < self.design.cohort_count:
            return
        answer = NoisedSum.total(self._sums)
        self._sums = []
        self.answers.append(answer)
        design, rounds = self.design, len(self.answers)
        if not design.adapts:
            self._over = True
        elif rounds == 1:
            adapts_norm = design.compression == "adapt_norm"
            self._width = self._next_width(answer) if adapts_norm else design.tail_widths[0]
        elif design.compression == "adapt_norm":
            self._over = True
        else:
            self._search(answer)

    def _search(self, answer: NoisedSum) -> None:
        """adapt_tail: the next width; or the last round, of the width that was found or whole."""
        design, rounds = self.design, len(self.answers)
        if self._is_last:
            self._over = True
            self._measured = self._measured_error(answer) if self._width else 0.0
            return
        self._measured = self._measured_error(answer)
        self._settled = self._measured <= self._largest_error(answer)
        was_last = rounds > len(design.tail_widths)
        if design.search_share is None and (self._settled or was_last):
            self._over = True
        elif self._settled:
            self._is_last = True  # of the width of this round
        elif was_last:
            self._is_last = True
            if design.may_be_whole:
                self._width, self._settled = 0, True
        else:
            self._width = design.tail_widths[rounds - 1]

    @property
    def tasks(self) -> list[Task]:
        """The tasks with answers, of one device."""
        return [answer.task for answer in self.answers]

    def estimate(self) -> MeanEstimate:
        """The mean, decoded from the last round's table."""
        if not self._over:
            raise SpecError("a mean needs the answer of the last round")
        answer, design = self.answers[-1], self.design
        sketch, count = _sketch_of(answer), answer.count
        mean = sketch.decode(answer.table, count)
        if design.top is not None:
            mean = top(mean.astype(np.float32), design.top).astype(np.float64)
        return MeanEstimate(
            mean=mean,
            standard_error=math.sqrt(self._variance(answer)),
            cells=sketch.cells,
            compressed=sketch.dense is not None,
            rounds=len(self.answers) * design.cohort_count,
            respondents=count,
            settled=self._settled,
        )

    def _next_width(self, pilot: NoisedSum) -> int:
        """The next width, for the pilot's squared norm with slack, up to the largest possible."""
        design, sketch = self.design, _sketch_of(pilot)
        noise = pilot.task.mechanism.stddev(pilot.count) / sketch.scale
        squared, spread = squared_norm(sketch.rounding.reals(pilot.table), noise)
        if design.paper_epsilon is not None:
            return design.paper_width(min(math.sqrt(squared) / pilot.count, design.clip))
        most = (pilot.count * design.clip) ** 2
        return design.width_for(min(squared + SLACK * spread, most), pilot.count)

    def _measured_error(self, answer: NoisedSum) -> float:
        """The squared error of the mean that the pilot finds, with its own hash functions."""
        pilot, sketch = self.answers[0], _sketch_of(answer)
        check, noise = self._pilot()
        assert check.dense is not None  # a pilot is a sketch
        gap = check.dense.encode(sketch.decode(answer.table, answer.count)).astype(np.float64)
        gap -= check.rounding.reals(pilot.table) / pilot.count
        return squared_norm(gap, noise)[0]

    def _largest_error(self, answer: NoisedSum) -> float:
        """The largest squared error that noise and `relative_error` explain: what is expected and
        one standard deviation."""
        design, pilot = self.design, self.answers[0]
        check, noise = self._pilot()
        target = last = self._noise_error(answer)
        if design.search_share is not None:  # the noise of the round from which the mean is read
            last *= design.shares[1] / design.shares[-1]
        target += design.relative_error * last
        target += self._absence(answer.count) + self._absence(pilot.count)
        slack = spread_of_squares(target, check.cells, noise) ** 2
        slack += 2 * target**2 / _sketch_of(answer).cells
        return target + math.sqrt(slack)

    def _pilot(self) -> tuple[VectorSketch, float]:
        """The pilot's sketch, and the standard deviation of the noise on a cell of its mean."""
        pilot = self.answers[0]
        sketch = _sketch_of(pilot)
        noise = pilot.task.mechanism.stddev(pilot.count)
        return sketch, noise / (sketch.scale * pilot.count)

    def _noise_error(self, answer: NoisedSum) -> float:
        """The squared error of the mean from noise and rounding, over all coordinates."""
        sketch, count = _sketch_of(answer), answer.count
        variance = (answer.task.mechanism.stddev(count) ** 2 + count / 4) / sketch.scale**2
        if sketch.dense is not None:
            variance *= median_variance(sketch.dense.blocks)
        return self.design.dimensions * variance / count**2

    def _absence(self, count: int) -> float:
        """A bound on the squared error from missing devices: that of a random sample."""
        devices = self.design.devices if self.devices is None else self.devices
        return self.design.clip**2 * max(0.0, 1 / count - 1 / devices)

    def _variance(self, answer: NoisedSum) -> float:
        """The variance of a coordinate of the mean, averaged over all."""
        design, sketch, count = self.design, _sketch_of(answer), answer.count
        error = self._noise_error(answer)
        if design.compression == "adapt_tail":
            error = max(error, self._measured)
        elif sketch.dense is not None:
            noise = answer.task.mechanism.stddev(count) / sketch.scale
            squared, _ = squared_norm(sketch.rounding.reals(answer.table), noise)
            error += (design.dimensions - 1) * squared / (sketch.cells * count**2)
        return (error + self._absence(count)) / design.dimensions


def _sketch_of(answer: NoisedSum) -> VectorSketch:
    sketch = answer.task.sketch
    assert isinstance(sketch, VectorSketch)  # a mean's tasks have no other
    return sketch

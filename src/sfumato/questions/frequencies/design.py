"""How common is each of these items? The campaigns of paper 000: one round or many, with or without
a pilot.

The sizes come from `plan`; this module makes the tasks and decodes the answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato import hashing
from sfumato.arrays import F64, I64, Bool
from sfumato.errors import ImpossibleError, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Influence, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of, sum_task, traffic
from sfumato.flow.task import Task
from sfumato.privacy import Mechanism
from sfumato.privacy.debias import LEVEL
from sfumato.privacy.intervals import (
    CONFIDENCE,
    NORMAL_95,
    NoiseLaw,
    of_estimates,
    of_sums,
)
from sfumato.privacy.noise import noise_parameters
from sfumato.questions import sizing
from sfumato.questions.answers import NO_ANSWERS, listed_release
from sfumato.questions.promise import COUNT, masked_influence
from sfumato.questions.question import (
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
)
from sfumato.sketch import CountSketch, DecodedRounds, OneHot, Sketch, refine
from sfumato.sketch.absent import significant_items
from sfumato.spec import digest, later, require, spec

Mode = Literal["one_hot", "shared", "fresh", "hybrid"]
PILOT_WIDTH = 100
PILOT_COHORT = "pilot"


@spec("frequency_design")
class FrequencyDesign(QuestionDefaults):
    """A sized campaign of frequency questions, for `FrequencyCampaign`."""

    mode: Mode
    items: int  # size of the dictionary
    devices: int
    rounds: int
    rows: int
    width: int  # 0 for one_hot; with a pilot, the limit for the second phase
    seed: int
    items_per_device: int
    mechanism: Mechanism
    decode: Literal["median", "mean", "refined"]
    every_round: bool  # whether each round's table gets noise, as it is shown or its signs differ
    pilot_devices: int = 0
    target_error: float | None = None
    constant: float = sizing.CONSTANT
    secure: SecureSum | None = None  # for masked sums
    sparse: bool = later(False)  # with one_hot: devices send places instead of tables
    failure_probability: float | None = later(None)
    """With a pilot: the probability with which some item may err by more than `target_error`. The
    second phase is sized for the refined decoder; if None, by equation (2) and `constant`."""
    similar: bool = later(True)  # whether rounds ask similar devices
    sketches: int = later(0)
    """The number of different sketches that rounds take in turn; 0 for one per round. Tables of one
    sketch are added, so many rounds are decoded as fast as these, and collisions average out over
    them."""

    def check(self) -> None:
        require.at_least(0, sketches=self.sketches)
        require(
            not self.sparse or (self.mode == "one_hot" and self.secure is None),
            "sparse reports are for one_hot tables that the collector may see",
        )
        require.at_least(1, rounds=self.rounds, items=self.items)
        require(
            self.pilot_devices == 0 or self.target_error is not None,
            "a pilot sizes the sketch for a target_error; set target_error",
        )
        require(
            self.every_round or self.mode in ("one_hot", "shared"),
            f"every round must have noise with mode {self.mode}; set every_round to true",
        )
        require(
            self.every_round or self.rounds == 1 or self.secure is None,
            "the sum of a secure round is visible when the round ends; set every_round to true",
        )

    @property
    def algorithm(self) -> str:
        if self.mode == "one_hot":
            return "sparse" if self.sparse else "one_hot"
        return "count_sketch"

    def sketch(self, round: int, width: int | None = None) -> Sketch:
        """The sketch of a round; see `CountSketch` for what rounds share."""
        if self.mode == "one_hot":
            return OneHot(categories=self.items)
        if self.sketches:
            round %= self.sketches
        return CountSketch(
            rows=self.rows,
            width=width or self.width,
            seed=self.seed,
            bucket_round=round if self.mode == "fresh" else 0,
            sign_round=0 if self.mode == "shared" else round,
        )

    def task(self, sketch: Sketch, cohort: str, devices: int) -> Task:
        """A task for one cohort, with room for more devices than expected by chance."""
        return sum_task(
            self.secure,
            sketch=sketch,
            mechanism=self.mechanism,
            campaign=digest(self),
            cohort=cohort,
            devices=devices,
            items_per_device=self.items_per_device,
            sparse=self.sparse and isinstance(sketch, OneHot),  # a pilot has a sketch
        )

    @property
    def tables(self) -> int:
        """The number of tasks of the main phase: one per round, or one for all rounds if noise is
        added once."""
        return self.rounds if self.every_round else 1

    @property
    def task_count(self) -> int:
        return self.tables + (self.pilot_devices > 0)

    @property
    def least_noise(self) -> float | None:
        tasks = [self.pilot(), self.main_task(0)] if self.pilot_devices else [self.main_task(0)]
        multipliers = (task.noise_multiplier for task in tasks)
        return min((noise for noise in multipliers if noise is not None), default=None)

    @property
    def influence(self) -> Influence:
        """Cells of a one-hot table are 0 to `items_per_device`. A row of a sketch reads an item as
        −items_per_device to items_per_device, and a median or mean of rows moves no more than they
        do; the refined decoder has no such bound, and a pilot sizes the sketch."""
        if self.secure is not None:
            return masked_influence(COUNT)
        if self.mode == "one_hot":
            return Influence(of=COUNT, most=float(self.items_per_device))
        if self.decode == "refined" or self.pilot_devices:
            return Influence(
                of=COUNT,
                most=None,
                note="one report can change the size of the sketch"
                if self.pilot_devices
                else "one report can change which items the decoder takes out of the sketch first",
            )
        return Influence(of=COUNT, most=2.0 * self.items_per_device)

    def campaign(self, plan: Plan, **context: Any) -> FrequencyCampaign:
        return FrequencyCampaign(self, plan.listed.items)

    def cohorts(self) -> dict[str, float]:
        pilot = self.pilot_devices / self.devices
        shares = {PILOT_COHORT: pilot} if self.pilot_devices else {}
        names = map(self._cohort, range(self.tables))
        return shares | dict.fromkeys(names, (1 - pilot) / self.tables)

    def cohort_size(self, task: Task) -> float:
        if task.cohort == PILOT_COHORT:
            return self.pilot_devices
        return (self.devices - self.pilot_devices) / self.tables

    def values(
        self, task: Task, items: pa.Array, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, Bool | None]:
        """Items, or for `one_hot` places in the dictionary; devices without one send zeros."""
        if self.mode != "one_hot":
            return items, None
        assert dictionary is not None  # a study of frequencies lists its items
        category = dictionary.categories(items)
        return category[category >= 0], category >= 0

    def answer(
        self, campaign: FrequencyCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        if not campaign.respondents:
            raise ImpossibleError(NO_ANSWERS)
        estimates = campaign.estimates()
        parameters: dict[str, Any] = {"decoder": estimates.decoder}
        if self.pilot_devices:
            parameters |= {"width": estimates.width}
            if estimates.width == self.width:
                note = (
                    f"the pilot found that the target error may need more than {self.width} cells "
                    "per row, the most that this study allows"
                )
                participation = replace(participation, notes=(*participation.notes, note))
        significant, limit = campaign.significant()
        devices = max(participation.devices, estimates.respondents)
        return listed_release(
            plan,
            participation,
            counts=estimates.counts,
            standard_error=estimates.standard_error,
            interval=lambda above: estimates.interval(devices, above=above),
            significant=significant,
            significant_from=limit,
            respondents=estimates.respondents,
            privacy=plan.privacy,
            bytes_per_device=self.traffic(campaign.width)["bytes_per_device"],
            parameters=parameters,
        )

    def traffic(self, width: int | None = None) -> dict[str, int]:
        """The bytes that a device sends, or in a masked round sends and receives; and those of the
        pilot's devices."""
        main = traffic([self.main_task(0, width)])
        if not self.pilot_devices:
            return main
        return main | {"pilot_bytes_per_device": traffic([self.pilot()])["bytes_per_device"]}

    @property
    def gain(self) -> int:
        """The number of rounds over which collisions average out."""
        if not self.similar or self.mode not in ("fresh", "hybrid"):
            return 1
        return min(self.rounds, self.sketches) if self.sketches else self.rounds

    def cell_noise(self, respondents: int) -> float:
        """The standard deviation of a cell of the sum over all rounds, as a share of the
        respondents."""
        each = self.mechanism.stddev(max(respondents // self.tables, 1))
        return math.sqrt(self.tables) * each / max(respondents, 1)

    def tasks(self, width: int | None = None) -> list[Task]:
        """The main phase."""
        return [self.main_task(round, width) for round in range(self.tables)]

    def main_task(self, round: int, width: int | None = None) -> Task:
        """One of the `tables` tasks of the main phase. All have the same sizes and noise."""
        devices = -(-(self.devices - self.pilot_devices) // self.tables)
        return self.task(self.sketch(round, width), self._cohort(round), devices)

    def _cohort(self, round: int) -> str:
        return f"round {round}" if self.every_round else "every round"

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"items": self.items, "items_per_device": self.items_per_device}
        if self.mode != "one_hot":
            sizes |= {"rows": self.rows, "width": self.width, "decode": self.decode}
            sizes |= {"constant": self.constant}
        if self.pilot_devices:
            sizes |= {"pilot_devices": self.pilot_devices, "width_is_at_most": self.width}
        sizes |= noise_parameters(self.mechanism)
        if self.secure is not None:
            sizes |= parameters_of(self.main_task(0))
        return sizes | {"rounds": self.rounds, "noise_every_round": self.every_round}

    def pilot(self) -> Task:
        """Phase one: a small sketch over other devices, noised and charged like any release."""
        width = PILOT_WIDTH
        if self.failure_probability is not None:  # the study's limit on bytes is the pilot's, too
            width = min(width, self.width)
        sketch = CountSketch(
            rows=self.rows, width=width, seed=self.seed, bucket_round=0, sign_round=0
        )
        return self.task(sketch, PILOT_COHORT, self.pilot_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Counts over the respondents, in the dictionary's order, and their errors."""

    counts: F64
    standard_error: F64
    half_width: F64  # of the 95% interval, if all devices answered
    noise: NoiseLaw | None  # of whole counts; None if placebos estimate the error
    respondents: int
    per_device: int  # largest contribution of a device to one item
    decoder: str
    width: int

    def interval(self, devices: int, *, above: float | None = None) -> tuple[F64, F64]:
        """95% intervals for counts over all `devices`, given that items are shown if their estimate
        over the respondents is at least `above`."""
        counts: dict[str, int] = {"devices": devices, "respondents": self.respondents}
        counts["per_device"] = self.per_device
        if self.noise is None:
            return of_estimates(self.counts, self.half_width / NORMAL_95, above=above, **counts)
        least = None if above is None else math.ceil(above - 1e-9)  # `above` may be scaled
        return of_sums(self.counts.astype(np.int64), self.noise, above=least, **counts)


@dataclass(slots=True, repr=False)
class FrequencyCampaign(Campaign):
    """Asks the pilot, if there is one, then every round; decodes all answers together."""

    design: FrequencyDesign
    items: hashing.Items  # the dictionary, in the order of the counts
    width: int = field(init=False)
    _task: Task | None = field(init=False)
    _answers: list[tuple[Task, int]] = field(default_factory=list)  # with numbers of devices
    _sums: dict[Sketch, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = self.design.width
        has_pilot = self.design.pilot_devices > 0
        self._task = self.design.pilot() if has_pilot else self.design.main_task(0)

    def next_task(self) -> Task | None:
        return self._task

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        if answer.task.cohort == PILOT_COHORT:
            self.width = width_from_pilot(answer, self.items, self.design)
        else:
            self._answers.append((answer.task, answer.count))
            total = self._sums.get(answer.task.sketch)
            self._sums[answer.task.sketch] = answer.table if total is None else total + answer.table
        done = len(self._answers)
        has_next = done < self.design.tables
        self._task = self.design.main_task(done, self.width) if has_next else None

    @property
    def respondents(self) -> int:
        """The number of devices behind the estimates."""
        return sum(count for _, count in self._answers)

    def estimates(self) -> Estimates:
        """Counts with errors, from every round so far."""
        if not self._answers:
            raise SpecError("there is nothing to estimate from yet: no round has an answer")
        if self.design.mode == "one_hot":
            return self._one_hot()
        rounds, points = self._rounds(), hashing.fingerprint(self.items, self.design.seed)
        decoder: str = self.design.decode
        if self.design.decode == "refined":
            refined = refine(rounds, points, shares=self._shares(rounds))
            counts, errors, widen = refined.counts, refined.placebo_errors, refined.widen
            decoder = (
                f"refined ({refined.peeled.size} items peeled, rest by {refined.decode})"
                if refined.peeled.size or refined.decode == "mean"
                else "refined (fell back to median)"
            )
        else:
            read = rounds.estimate(
                np.concatenate([points, rounds.placebos()]), decode=self.design.decode
            )
            counts, errors = read[: points.size], read[points.size :]

            def widen(error: float) -> F64:
                return np.full(points.size, error)

        return Estimates(
            counts=counts,
            standard_error=widen(float(np.sqrt(np.mean(errors**2)))),
            half_width=widen(float(np.quantile(np.abs(errors), CONFIDENCE, method="higher"))),
            noise=None,
            respondents=self.respondents,
            per_device=self.design.items_per_device,
            decoder=decoder,
            width=self.width,
        )

    def significant(self, level: float = LEVEL) -> tuple[Bool, float]:
        """Which items are significant, that is, held by some device, and from which estimate on.
        With at most probability `level` any item is marked wrongly."""
        if self.design.mode == "one_hot":
            counts, noise = self._whole_counts()
            least = max(noise.exceeded(level / counts.size), 1)
            return counts >= least, float(least)
        rounds, points = self._rounds(), hashing.fingerprint(self.items, self.design.seed)
        return significant_items(rounds, points, level=level, shares=self._shares(rounds))

    def _rounds(self) -> DecodedRounds:
        return DecodedRounds.of(
            (sketch, total)
            for sketch, total in self._sums.items()
            if isinstance(sketch, CountSketch)
        )

    def _shares(self, rounds: DecodedRounds) -> F64:
        counts = dict.fromkeys(rounds.sketches, 0)
        for task, count in self._answers:
            if isinstance(task.sketch, CountSketch):
                counts[task.sketch] += count
        devices = np.array(list(counts.values()), dtype=np.float64)
        return np.asarray(devices / max(devices.sum(), 1))

    def _whole_counts(self) -> tuple[I64, NoiseLaw]:
        """The sum of the rounds' counts, and the distribution of its noise."""
        noise = NoiseLaw.none()
        for task, count in self._answers:
            noise += task.mechanism.law(count)
        (counts,) = self._sums.values()
        return counts, noise

    def _one_hot(self) -> Estimates:
        counts, noise = self._whole_counts()
        return Estimates(
            counts=counts.astype(np.float64),
            standard_error=np.full(counts.size, math.sqrt(noise.variance)),
            half_width=np.full(counts.size, float(noise.width())),
            noise=noise,
            respondents=self.respondents,
            per_device=self.design.items_per_device,
            decoder="exact",
            width=0,
        )


def width_from_pilot(answer: NoisedSum, items: hashing.Items, design: FrequencyDesign) -> int:
    """Phase two's width. Only the pilot's noised table is used, so the width is post-processing of
    a charged release."""
    if design.failure_probability is None:
        return _width_of_paper(answer, items, design)
    assert design.target_error is not None  # by `check`
    answering = min(answer.count / design.pilot_devices, 1.0)
    respondents = max(1, int((design.devices - design.pilot_devices) * answering))
    law, limits = law_from_pilot(answer, items, design)
    scale = design.devices / respondents  # a release counts all devices asked
    common = np.minimum(law[: sizing.COMMON], 1.0)
    sampling = np.sqrt(common * (1 - common) * (scale - 1) / design.devices)
    risk = design.failure_probability / 2  # of errors, and of items that are not taken out
    spread = sizing.largest_spread(
        design.target_error, items=design.items, risk=risk, sampling=sampling
    )
    if spread is None:
        return design.width
    reading = sizing.Reading(
        rows=design.rows,
        noise=design.cell_noise(respondents),
        rounds=design.rounds,
        gain=design.gain,
        risk=risk,
    )
    width = sizing.width_for(law, spread, reading, most=design.width)
    # Of its half of the risk, items that are not taken out leave a half to the limits' own.
    bound = sizing.width_within(limits, spread, replace(reading, risk=risk / 2), unless=width)
    return width if bound >= width else max(math.ceil(bound), sizing.SMALLEST_WIDTH)


def law_from_pilot(
    answer: NoisedSum, items: hashing.Items, design: FrequencyDesign
) -> tuple[F64, sizing.ShareLimits]:
    """Shares of all items, the largest first, from the pilot's table: the items that the refined
    decoder takes out, and a power law that explains the squares of the cells that are left. Also
    what the table shows of any law."""
    sketch = answer.task.sketch
    assert isinstance(sketch, CountSketch)  # `pilot` has no other
    rounds = DecodedRounds.of([(sketch, answer.table)])
    points = hashing.fingerprint(items, design.seed)
    refined = refine(rounds, points)
    largest = refined.counts[refined.peeled]
    largest = largest[largest > 0]
    residual = rounds.subtract(points[refined.peeled], refined.counts[refined.peeled][None])
    devices = max(answer.count, 1)
    others = max(devices * design.items_per_device - float(largest.sum()), 0.0)
    row_squares = float(np.sum(residual.tables**2)) / sketch.rows * refined.inflation
    noise = sketch.width * answer.task.mechanism.stddev(devices) ** 2
    # Counts of a sample are Poisson: squares of `others` devices sum to `others` more on average.
    squares = max(row_squares - noise - others, 0.0)
    spread = float(np.sqrt(np.mean(refined.placebo_errors**2)))
    law = sizing.law_of_pilot(
        largest / devices,
        squares=squares / devices**2,
        limit=sizing.PEELED_FROM * spread / devices,
        items=design.items,
    )
    return law, _limits_from_pilot(
        answer,
        design,
        largest=max(float(refined.counts.max()), 0.0),
        error=spread * math.sqrt(refined.inflation),
    )


def _limits_from_pilot(
    answer: NoisedSum, design: FrequencyDesign, *, largest: float, error: float
) -> sizing.ShareLimits:
    """What a pilot's table shows of the shares, whatever their law, except with a quarter of the
    failure probability. `largest` is the largest estimate of a count, and `error` its standard
    error.

    Squares of cells are read before any item is taken out, so that no choice biases them. Their sum
    has the relative variance 2/cells, and counts of a sample add the variance
    items_per_device·Σ (4·count³ + 2·count²). Its root depends on the law, but is at most
    variance/(2r) + r/2 for any r: so limits are linear in the cubes.
    """
    sketch, devices = answer.task.sketch, max(answer.count, 1)
    assert isinstance(sketch, CountSketch)  # `pilot` has no other
    assert design.failure_probability is not None  # `width_from_pilot` has checked
    mass, level = design.items_per_device, design.failure_probability / 8  # for each of two
    row_squares = float(np.sum(np.square(answer.table, dtype=np.float64))) / sketch.rows
    squares = max(row_squares - sketch.width * answer.task.mechanism.stddev(devices) ** 2, 0.0)
    fixed = 2 / (sketch.rows * sketch.width) * row_squares**2 + 2 * mass * squares
    root = math.sqrt(fixed + 4 * squares**2 / devices)
    half = NormalDist().inv_cdf(1 - level / 2) / 2
    limit = half * (root + fixed / root)
    return sizing.ShareLimits(
        mass=mass,
        devices=devices,
        # The squares of counts of a sample exceed those of their means by up to mass·devices.
        squares=(
            (squares - mass * devices - limit) / devices**2,
            (squares + limit) / devices**2,
        ),
        cubes=half * 4 * mass * devices / root,
        largest=largest / devices,
        error=error / devices,
        level=level,
    )


def _width_of_paper(answer: NoisedSum, items: hashing.Items, design: FrequencyDesign) -> int:
    """Fit a power law to the pilot's largest shares, then equation (2).

    Differs from the paper: shares below three times the pilot's own error are not fitted, the law
    is i^−alpha (the paper's step 4 has i^alpha and cites equation (4) for (2)), and a pilot that
    shows nothing gives the minimax width.
    """
    sketch = answer.task.sketch
    assert isinstance(sketch, CountSketch)  # `pilot` has no other
    assert design.target_error is not None  # by `check`
    rounds = DecodedRounds.of([(sketch, answer.table)])
    points = hashing.fingerprint(items, design.seed)
    read = rounds.estimate(np.concatenate([points, rounds.placebos()])) / max(answer.count, 1)
    errors = read[points.size :]
    try:
        law = sizing.fit_power_law(
            read[: points.size], noise=float(np.quantile(np.abs(errors), 0.68))
        )
    except SpecError:
        return design.width
    width = sizing.instance_width(
        law.shares(design.items),
        design.target_error,
        constant=design.constant,
        devices=design.devices,
    )
    return int(min(max(math.ceil(width), 2), design.width))

"""Which words that nobody listed are common? Growing prefixes, counted by sums of noised tables.

Every device answers every round: first with the first few characters of its word, then with more,
finally with the whole word. The collector estimates the counts of the candidate prefixes, keeps the
significant ones, and extends them by all endings up to the next length. This follows TreeHist
(Bassily, Nissim, Stemmer and Thakurta 2017) and Zhu et al. 2020, with count sketches instead of
local reports; if the prefixes of a round fit into the table, each has a cell of its own.

Words are rows of character codes (`words`): 0 pads, longer words are cut, and words with other
characters are not sent. A device whose word is not sent answers with a table of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sfumato.arrays import F64, I64, U64, Bool
from sfumato.errors import SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Influence, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of, sum_task
from sfumato.flow.task import Task
from sfumato.privacy import (
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    PlannedLoss,
    Rng,
)
from sfumato.privacy.intervals import NoiseLaw, of_estimates, of_sums
from sfumato.privacy.noise import noise_parameters
from sfumato.questions.answers import check_finished, detectable_note, discovered_release
from sfumato.questions.heavy_hitters.design import items_with_keys
from sfumato.questions.promise import COUNT, masked_influence
from sfumato.questions.question import Dictionary, InCohorts, Participation, Plan
from sfumato.sketch import CountSketch, DecodedRounds, OneHot, WordKeys, refine
from sfumato.sketch.absent import absent_limit
from sfumato.sketch.words import (
    BYTES,
    Codes,
    Prefix,
    check_alphabet,
    codes_of,
    endings,
    extend,
    starts_text,
    words_of,
)
from sfumato.spec import digest, later, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population


MOST_CANDIDATES = 5_000_000  # largest number of prefixes to estimate at a level
FAMILY = 0.05  # probability that any word is listed that no device holds
SURE = 0.95  # probability of finding a word with the detectable count
SMALLEST = 0.5  # counts are whole, so a smaller estimate means none
_MOST_ESTIMATES = 8  # how often all candidates of a level are estimated
_STANDARD = NormalDist()


@spec("prefix_design")
class PrefixDesign(InCohorts):
    """A sized search for words, for `PrefixCampaign`.

    Claim: all levels together are (epsilon, delta)-DP at the epsilon that `accounting.epsilon_of`
        gives for the losses of `tasks()`; neighbours differ by one device's tables becoming zero
        at every level, the number of devices being public.
    Proof: a level's release is a table with noise on every cell, in which the device changes `rows`
        cells by one (one cell of a `OneHot`). The tables compose adaptively: the candidates, and
        whether a level is asked at all, depend only on earlier noised tables. They do not affect
        what a device sends, which is the sketch of its own prefix. The selection of prefixes and
        words is post-processing. With one scale for all levels the loss is that of one table in
        which a device changes the sum of the levels' cells.
    Assumes: what the mechanism assumes; one word per device, the same or another at each level.
    Utility: `FoundWords.detectable` is the smallest count at which a word is found. Any word that
        no device holds is listed with probability `FAMILY`; the limit comes from the table
        (`absent_limit`).
    """

    items_per_device: ClassVar[int] = 1
    alphabet: str
    lengths: tuple[int, ...]  # of prefixes, one per level; the last is the length of words
    devices: int  # at every level
    rows: int
    width: int
    seed: int
    mechanism: Mechanism
    secure: SecureSum | None  # None: the collector is trusted with tables, and adds the noise
    false_prefixes: float = 20.0  # expected number of false prefixes kept at a level
    most_candidates: int = MOST_CANDIDATES
    cohort_count: int = later(1)  # at every level, they are asked one after another

    def check(self) -> None:
        require(
            len(self.lengths) >= 1
            and all(a < b for a, b in zip((0, *self.lengths), self.lengths, strict=False)),
            f"lengths must not be empty and must increase from at least 1; got {self.lengths}",
        )
        check_alphabet(self.lengths[-1], self.alphabet)
        require(
            self.radix <= 1 << 16,
            f"an alphabet must have at most 65,535 characters; got {self.radix - 1}",
        )
        require.at_least(
            1,
            devices=self.devices,
            rows=self.rows,
            most_candidates=self.most_candidates,
            cohort_count=self.cohort_count,
        )
        require.at_least(2, width=self.width)
        require.above(0, false_prefixes=self.false_prefixes)
        steps = np.diff((0, *self.lengths)).tolist()
        most = max(endings(step, self.radix) for step in steps)
        require(
            most <= self.most_candidates,
            f"a prefix must have at most most_candidates = {self.most_candidates} endings up to "
            f"the next length; lengths {self.lengths} give up to {most}",
        )
        kind = type(self.mechanism)
        require(
            kind is NoNoise or kind is (NoiseAtRelease if self.secure is None else NoiseInShares),
            "a secure sum needs noise in shares, and a trusted collector noise at the release; "
            f"got {kind.__name__} with secure = {self.secure}",
        )

    @property
    def radix(self) -> int:
        return len(self.alphabet) + 1

    @property
    def length(self) -> int:
        """The length of words."""
        return self.lengths[-1]

    @property
    def rounds(self) -> int:
        return len(self.lengths)

    def sketch(self, level: int) -> OneHot | CountSketch:
        """One cell per prefix if the table has enough, else a count sketch with its own hashes."""
        prefixes = self.radix ** self.lengths[level]
        if prefixes <= self.rows * self.width:
            return OneHot(categories=prefixes)
        return CountSketch(
            rows=self.rows,
            width=self.width,
            seed=self.seed,
            bucket_round=level,
            sign_round=level,
        )

    def task(self, level: int, cohort: int = 0) -> Task:
        """The task of a level for a cohort; levels have different sketches, and therefore different
        ids."""
        return self.task_for(self.sketch(level), cohort)

    def task_for(self, sketch: OneHot | CountSketch, cohort: int = 0) -> Task:
        return sum_task(
            self.secure,
            sketch=sketch,
            mechanism=self.mechanism,
            campaign=digest(self),
            cohort=self.cohort_names()[cohort],
            devices=self.cohort_devices,
        )

    @property
    def task_count(self) -> int:
        return self.rounds * self.cohort_count

    def tasks(self) -> list[Task]:
        """The tasks of a device: one per level."""
        return [self.task(level) for level in range(self.rounds)]

    def level_of(self, task: Task) -> int:
        sketches: list[Any] = [self.sketch(level) for level in range(self.rounds)]
        return sketches.index(task.sketch)

    @property
    def tasks_per_device(self) -> int:
        return self.rounds

    @property
    def influence(self) -> Influence:
        if self.secure is not None:
            return masked_influence(COUNT)
        note = "one report can change which prefixes are kept, and with them which words are found"
        return Influence(of=COUNT, most=None, note=note)

    def item_keys(self, task: Task) -> Prefix:
        return self.prefix(self.level_of(task))

    def campaign(self, plan: Plan, **context: Any) -> PrefixCampaign:
        return PrefixCampaign(self)

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        keys = WordKeys(alphabet=self.alphabet, length=self.length)
        return items_with_keys(population, keys, 1, plan, rng, alone)

    def values(
        self, task: Task, items: pa.Array, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[I64, Bool]:
        """The prefixes of words in the alphabet."""
        codes, fits = codes_of(items, self.alphabet, self.length)
        return self.prefixes(self.level_of(task), codes[fits]), fits

    def answer(
        self, campaign: PrefixCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        words = campaign.heavy_hitters()
        devices = max(participation.devices, words.respondents)
        detectable = words.detectable(devices)
        kind = "a text" if self.alphabet == BYTES else "a word of the alphabet"
        notes = [detectable_note(f"{kind}, cut to {self._cut},", detectable, participation)]
        if len(words):
            notes.append(
                f"some item of such a list is held by no device with a probability of at most "
                f"{FAMILY:.0%}"
            )
        if words.left_out:
            notes.append(f"{words.left_out:,} prefixes were too many to extend and were left out")
        return discovered_release(
            plan,
            participation,
            items=words.items,
            counts=words.counts,
            standard_error=words.standard_error,
            interval=words.interval(devices),
            respondents=words.respondents,
            parameters={"detectable_count": detectable, "candidates": words.candidates},
            notes=notes,
        )

    @property
    def _cut(self) -> str:
        return f"{self.length} {'bytes' if self.alphabet == BYTES else 'characters'}"

    def fitting(self) -> str:
        """The items that can be found, in words."""
        kind = "any text" if self.alphabet == BYTES else "words of the alphabet"
        return f"{kind}, cut to {self._cut}"

    def charge_of(self, task: Task) -> PlannedLoss:
        """One plan for all levels, since their losses are fixed."""
        losses = tuple(each.loss for each in self.tasks())
        return PlannedLoss(loss=task.loss, plan=digest(self), losses=losses)

    def prefixes(self, level: int, codes: Codes) -> I64:
        """The values that devices encode at a level, from the codes of their words."""
        return self.prefix(level).values(self.sketch(level), codes)

    def prefix(self, level: int) -> Prefix:
        return Prefix(alphabet=self.alphabet, length=self.length, size=self.lengths[level])

    def rate(self, level: int, candidates: int) -> float:
        """The probability of keeping a candidate that no device holds at a level."""
        if level == self.rounds - 1:
            return FAMILY / max(candidates, 1)
        return min(self.false_prefixes / max(candidates, 1), 0.5)

    def parameters(self) -> dict[str, Any]:
        alphabet = "any text, by its bytes" if self.alphabet == BYTES else self.alphabet
        sizes: dict[str, Any] = {"alphabet": alphabet, "lengths": list(self.lengths)}
        sizes |= {"rows": self.rows, "width": self.width, "items_per_device": 1}
        sizes |= {"false_prefixes": self.false_prefixes, "most_candidates": self.most_candidates}
        sizes |= noise_parameters(self.mechanism)
        if self.secure is not None:
            sizes |= parameters_of(self.task(self.rounds - 1))
        return sizes | {"rounds": self.rounds, "noise_every_round": True}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundWords:
    """Significant words, most common first, with counts over the respondents."""

    items: pa.Array
    counts: F64
    standard_error: F64
    noise: NoiseLaw | None  # of whole counts; None if placebos estimate the error
    limit: float  # larger counts are listed
    levels: tuple[Level, ...]  # the levels that were asked
    candidates: int  # number of words (or prefixes, if it ended early) tested at the last level
    left_out: int  # number of significant prefixes that were too many to extend
    respondents: int  # at the last level

    def detectable(self, devices: int) -> float:
        """The smallest count, over all `devices`, at which a word passes every level with a
        probability of 95%. Its prefixes are at least as common, and levels err independently."""
        return detectable_count(self.levels, min(self.respondents / devices, 1.0))

    def interval(self, devices: int) -> tuple[F64, F64]:
        """95% intervals for counts over all `devices`, given that a word is listed."""
        if self.noise is None:
            return of_estimates(
                self.counts, self.standard_error, devices=devices, respondents=self.respondents,
                above=self.limit,
            )  # fmt: skip
        return of_sums(
            self.counts.astype(np.int64), self.noise, devices=devices, respondents=self.respondents,
            above=math.floor(self.limit) + 1,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"FoundWords({len(self)} words of {self.candidates:,} candidates)"


@dataclass(frozen=True, slots=True)
class Level:
    """A level keeps prefixes with estimates above `limit`, whose standard error is `error`."""

    limit: float
    error: float

    def passes(self, count: float, answering: float = 1.0) -> float:
        """The probability that a prefix of `count` devices is kept, if each answers with
        probability `answering`."""
        error = math.sqrt(self.error**2 + count * answering * (1 - answering))
        if error == 0:
            return float(count > self.limit)
        return _STANDARD.cdf((count * answering - self.limit) / error)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counts of candidates (n,), their standard errors, and the limits for keeping them."""

    counts: F64
    errors: F64
    limits: F64
    level: Level
    noise: NoiseLaw | None  # of whole counts


@dataclass(slots=True, repr=False)
class PrefixCampaign(Campaign):
    """Asks for one length after another, and extends the significant prefixes."""

    design: PrefixDesign
    _prefixes: Codes = field(init=False)  # those that passed the last level
    _levels: list[Level] = field(default_factory=list)
    _parts: list[NoisedSum] = field(default_factory=list)  # answers of cohorts at this level
    _over: bool = False
    _counts: F64 = field(default_factory=lambda: np.empty(0))  # of these prefixes
    _errors: F64 = field(default_factory=lambda: np.empty(0))
    _noise: NoiseLaw | None = None
    _candidates: int = 0
    _left_out: int = 0
    _respondents: int = 0

    def __post_init__(self) -> None:
        self._prefixes = np.empty((1, 0), dtype=np.uint16)

    def next_task(self) -> Task | None:
        return None if self._over else self.design.task(len(self._levels), len(self._parts))

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        self._parts.append(answer)
        if len(self._parts) == self.design.cohort_count:
            level = NoisedSum.total(self._parts)
            self._parts = []
            self._read_level(level)

    def _read_level(self, answer: NoisedSum) -> None:
        """Keep the significant prefixes of a level, given the sum over all cohorts."""
        design, level = self.design, len(self._levels)
        step = design.lengths[level] - self._prefixes.shape[1]
        rows = extend(self._prefixes, step, design.radix)
        last = level == design.rounds - 1
        if design.alphabet == BYTES:  # no device has bytes that are no text
            rows = rows[starts_text(rows, whole=last)]
        read = _read(design, level, answer, design.prefixes(level, rows))
        significant = np.flatnonzero(read.counts > read.limits)
        significant = significant[np.argsort(-read.counts[significant], kind="stable")]
        few = significant
        if not last:
            few = self._affordable(rows, significant, design.lengths[level + 1])
        self._left_out += significant.size - few.size
        effective = read.level
        if few.size < significant.size:  # to be extended, others needed counts as large as these
            effective = replace(effective, limit=max(effective.limit, float(read.counts[few[-1]])))
        self._levels.append(effective)
        self._prefixes, self._counts, self._errors = rows[few], read.counts[few], read.errors[few]
        self._candidates, self._respondents, self._noise = rows.shape[0], answer.count, read.noise
        self._over = last or few.size == 0

    def heavy_hitters(self) -> FoundWords:
        """The words that passed every level, if any."""
        if not self._over:
            raise SpecError(
                f"words need the answers of all {self.design.rounds} levels; "
                f"got {len(self._levels)}"
            )
        return FoundWords(
            items=words_of(self._prefixes, self.design.alphabet),
            counts=self._counts,
            standard_error=self._errors,
            noise=self._noise,
            limit=self._levels[-1].limit,
            levels=tuple(self._levels),
            candidates=self._candidates,
            left_out=self._left_out,
            respondents=self._respondents,
        )

    def _affordable(self, rows: Codes, places: I64, length: int) -> I64:
        """The first of these places whose rows have few enough extensions together."""
        many = endings(length - rows.shape[1], self.design.radix)
        sizes = np.where(rows[places, -1] != 0, many, 1)
        return places[np.cumsum(sizes) <= self.design.most_candidates]


def _read(design: PrefixDesign, level: int, answer: NoisedSum, values: I64) -> _Reading:
    sketch, rate = design.sketch(level), design.rate(level, values.size)
    if isinstance(sketch, CountSketch):
        return _read_sketch(sketch, answer.table, sketch.points(values), rate)
    counts = sketch.estimate(answer.table, values)
    mechanism = answer.task.mechanism
    limits, same = noise_level(mechanism, answer.count, rate), np.ones(counts.size)
    return _Reading(
        counts, limits.error * same, limits.limit * same, limits, mechanism.law(answer.count)
    )


def noise_level(mechanism: Mechanism, count: int, rate: float) -> Level:
    """A level with one cell per prefix, whose limit the noise exceeds with probability `rate`."""
    limit = float(mechanism.law(count).exceeded(rate) - 1)
    return Level(max(limit, SMALLEST), mechanism.stddev(count))


def _read_sketch(sketch: CountSketch, table: I64, points: U64, rate: float) -> _Reading:
    """Peel the significant candidates and estimate the rest again, until there are no more.

    `refine` gets only candidates that are significant among all of them, because it peels at four
    standard deviations: of millions of candidates hundreds reach that by chance, and peeling them
    fits the noise. For the same reason the limit is computed twice: peeled candidates below the
    first limit are put back, since some are noise, and the second limit uses that table.
    """
    rounds, deviations = DecodedRounds.of([(sketch, table)]), -_STANDARD.inv_cdf(rate)
    counts, error = rounds.estimate(points), _spread(rounds.estimate(rounds.placebos()))
    candidates = np.array([np.argmax(counts)])  # `refine` needs at least one
    for _ in range(_MOST_ESTIMATES):
        before = candidates.size
        candidates = np.union1d(
            candidates, np.flatnonzero(counts > max(deviations * error, SMALLEST))
        )
        refined = refine(rounds, points[candidates], shares=np.ones(1))
        peeled, error = candidates[refined.peeled], _spread(refined.placebo_errors)
        residual = rounds.subtract(points[peeled], refined.counts[None, refined.peeled])
        counts = residual.estimate(points, decode=refined.decode)
        counts[candidates] = refined.counts
        if candidates.size == before:
            break
    inflation = float(refined.inflation)
    first = absent_limit(residual.tables[0], refined.decode, rate)
    sure = peeled[counts[peeled] > inflation * first]
    residual = rounds.subtract(points[sure], counts[None, sure])
    limit = max(absent_limit(residual.tables[0], refined.decode, rate), SMALLEST)
    wider = np.ones(points.size)
    wider[peeled] = inflation
    level = Level(inflation * limit, inflation * error)  # candidates that pass are usually peeled
    return _Reading(counts, error * wider, limit * wider, level, None)


def _spread(errors: F64) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def detectable_count(levels: Sequence[Level], answering: float = 1.0) -> float:
    """The smallest count that passes all levels with probability `SURE`."""

    def chance(count: float) -> float:
        return math.prod(level.passes(count, answering) for level in levels)

    low, high = 0.0, 1.0
    while chance(high) < SURE:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        sure = chance(middle) >= SURE
        low, high = (low, middle) if sure else (middle, high)
    return max(high, 1.0)

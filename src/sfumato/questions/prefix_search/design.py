"""Which words, that nobody listed, are common? Growing prefixes, counted by sums of noised tables.

Every device answers every round: first with the first few characters of its word, then with more,
last with the whole word. The collector reads each round's table at the prefixes that are still in
the running, keeps those that stand out, and extends them by all endings up to the next length.
After TreeHist (Bassily, Nissim, Stemmer and Thakurta 2017) and Zhu et al. 2020, with count sketches
in place of local reports; a first round whose prefixes fit the table has a cell for each of them.

Words are rows of character codes (`words`): 0 pads, longer words are cut, and words with other
characters are not sent. A device whose word is not sent answers with a table of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfumato.errors import SpecError
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of
from sfumato.flow.task import Task, bits_for, most_devices
from sfumato.privacy import (
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    PlannedLoss,
    Rng,
)
from sfumato.privacy.intervals import NoiseLaw, of_estimates, of_sums
from sfumato.questions.answers import check_finished, counts_of_discovered, detectable_note
from sfumato.questions.heavy_hitters.design import items_with_keys
from sfumato.questions.question import (
    EVERYBODY,
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
)
from sfumato.sketch import CountSketch, DecodedRounds, OneHot, WordKeys, refine
from sfumato.sketch.absent import absent_limit
from sfumato.sketch.words import Codes, Prefix, check_alphabet, codes_of, words_of
from sfumato.spec import digest, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

MOST_CANDIDATES = 5_000_000  # prefixes that a level may be read at
FAMILY = 0.05  # chance that some word is listed that nobody holds
SURE = 0.95  # chance with which a word of the detectable count is found
SMALLEST = 0.5  # counts are whole: less than half a device is nobody
_LOOKS = 8  # readings of all candidates at one level, at most
_STANDARD = NormalDist()


@spec("prefix_design")
class PrefixDesign(QuestionDefaults):
    """A sized search for words: all that `PrefixCampaign` needs to know.

    Claim: all levels together are (epsilon, delta)-DP at the epsilon that `accounting.epsilon_of`
        gives for the losses of `tasks()`; neighbours differ by one device's tables becoming zero
        at every level, the number of devices being public.
    Proof: a level's release is a table with noise on every cell, of which the device moves `rows`
        cells by one (one cell of a `OneHot`). The tables compose, adaptively: which candidates are
        read, and whether a level is asked for at all, depends on earlier noised tables only and not
        on what a device sends, which is the sketch of its own prefix. What is kept from level to
        level and what is listed is post-processing. With one scale for all levels the loss is that
        of one table of which a device moves the sum of the levels' cells.
    Assumes: what the mechanism assumes; one word a device, the same or another at each level.
    Utility: `FoundWords.detectable` says from which count on a word is found. Some word that nobody
        holds is listed with probability `FAMILY`; the limit comes from the table (`absent_limit`).
    """

    alphabet: str
    lengths: tuple[int, ...]  # of prefixes, a level each; the last one is the word's
    devices: int  # asked at every level
    rows: int
    width: int
    seed: int
    mechanism: Mechanism
    secure: SecureSum | None  # None: the collector is trusted with tables, and adds the noise
    false_prefixes: float = 20.0  # that nobody holds, expected to be carried on from a level
    most_candidates: int = MOST_CANDIDATES

    def check(self) -> None:
        require(
            len(self.lengths) >= 1
            and all(a < b for a, b in zip((0, *self.lengths), self.lengths, strict=False)),
            f"lengths must be at least one, and grow from at least 1; got {self.lengths}",
        )
        check_alphabet(self.lengths[-1], self.alphabet)
        require(self.radix <= 1 << 16, f"an alphabet has 65,535 characters; got {self.radix - 1}")
        for name in ("devices", "rows", "most_candidates"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}")
        require(self.width >= 2, f"width must be at least 2; got {self.width}")
        require(
            self.false_prefixes > 0, f"false_prefixes must be above 0; got {self.false_prefixes}"
        )
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
            "the noise of a secure sum is in shares, and that of a trusted collector comes at the "
            f"release; got {kind.__name__} with secure = {self.secure}",
        )

    @property
    def radix(self) -> int:
        return len(self.alphabet) + 1

    @property
    def length(self) -> int:
        """The word's."""
        return self.lengths[-1]

    @property
    def rounds(self) -> int:
        return len(self.lengths)

    def sketch(self, level: int) -> OneHot | CountSketch:
        """A cell for every prefix where the table has as many, else a sketch of the level's own."""
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

    def task(self, level: int) -> Task:
        """What everybody is asked at a level; levels differ in their sketches, so in their ids."""
        return self.asked(self.sketch(level))

    def asked(self, sketch: OneHot | CountSketch) -> Task:
        if self.secure is not None:
            return self.secure.task(
                sketch=sketch,
                mechanism=self.mechanism,
                campaign=digest(self),
                cohort=EVERYBODY,
                asked=self.devices,
                items_per_device=1,
            )
        most = most_devices(self.devices)
        return Task(
            sketch=sketch,
            mechanism=self.mechanism,
            aggregation=Plain(modulus_bits=bits_for(most)),
            campaign=digest(self),
            cohort=EVERYBODY,
            max_count=most,
        )

    def tasks(self) -> list[Task]:
        return [self.task(level) for level in range(self.rounds)]

    def level_of(self, task: Task) -> int:
        return [each.id for each in self.tasks()].index(task.id)

    @property
    def tasks_per_device(self) -> int:
        return self.rounds

    @property
    def items_per_device(self) -> int:
        return 1

    @property
    def least_noise(self) -> float | None:
        known = [noise for task in self.tasks() if (noise := task.noise_multiplier) is not None]
        return min(known, default=None)

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
        """The prefixes of words that the alphabet has."""
        codes, fits = codes_of(items, self.alphabet, self.length)
        return self.prefixes(self.level_of(task), codes[fits]), fits

    def answer(
        self, campaign: PrefixCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        found = campaign.found()
        asked = max(participation.devices, found.answered)
        detectable = found.detectable(asked)
        notes = [detectable_note("a word", detectable, participation)]
        if found.left_out:
            notes.append(f"{found.left_out:,} prefixes were too many to be carried on")
        return counts_of_discovered(
            plan,
            participation,
            items=found.items,
            counts=found.counts,
            standard_error=found.standard_error,
            interval=found.interval(asked),
            answered=found.answered,
            parameters={"detectable_count": detectable, "candidates": found.candidates},
            notes=notes,
        )

    def charge_of(self, task: Task) -> PlannedLoss:
        """The losses of all levels are fixed here, so that they are charged as one plan."""
        losses = tuple(each.loss for each in self.tasks())
        return PlannedLoss(loss=task.loss, plan=digest(self), losses=losses)

    def prefixes(self, level: int, codes: Codes) -> I64:
        """What devices encode at a level, from rows of their words' codes."""
        return self.prefix(level).values(self.sketch(level), codes)

    def prefix(self, level: int) -> Prefix:
        return Prefix(alphabet=self.alphabet, length=self.length, size=self.lengths[level])

    def rate(self, level: int, candidates: int) -> float:
        """The chance with which a candidate that nobody holds is kept at a level."""
        if level == self.rounds - 1:
            return FAMILY / max(candidates, 1)
        return min(self.false_prefixes / max(candidates, 1), 0.5)

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"alphabet": self.alphabet, "lengths": list(self.lengths)}
        sizes |= {"rows": self.rows, "width": self.width, "items_per_device": 1}
        sizes |= {"false_prefixes": self.false_prefixes, "most_candidates": self.most_candidates}
        if isinstance(self.mechanism, NoiseAtRelease):
            sizes |= {"noise": self.mechanism.noise, "noise_scale": self.mechanism.scale}
        if isinstance(self.mechanism, NoiseInShares):
            sizes |= {"noise": "skellam, in shares", "noise_scale": self.mechanism.scale}
            sizes |= {"noise_scale_of_a_share": self.mechanism.share_stddev}
        if self.secure is not None:
            sizes |= parameters_of(self.task(self.rounds - 1))
        return sizes | {"rounds": self.rounds, "noise_every_round": True}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundWords:
    """Words that stand out, most common first, with counts over the devices that answered."""

    items: pa.Array
    counts: F64
    standard_error: F64
    noise: NoiseLaw | None  # of counts that are whole; None where placebos tell the error
    limit: float  # counts above it are listed
    levels: tuple[Level, ...]  # that were asked
    candidates: int  # words, or prefixes if it ended early, that the last table was read at
    left_out: int  # prefixes that stood out, and were not extended since there were too many
    answered: int  # devices behind the last table

    def detectable(self, asked: int) -> float:
        """A word that so many of `asked` devices hold passes every level that was asked with a
        chance of 95%: its prefixes are as common as it is, or more. Levels err independently."""
        return detectable_count(self.levels, min(self.answered / asked, 1.0))

    def interval(self, asked: int) -> tuple[F64, F64]:
        """95% intervals for counts over `asked` devices, given that a word is listed."""
        if self.noise is None:
            return of_estimates(
                self.counts, self.standard_error, devices=asked, respondents=self.answered,
                above=self.limit,
            )  # fmt: skip
        return of_sums(
            self.counts.astype(np.int64), self.noise, devices=asked, respondents=self.answered,
            above=math.floor(self.limit) + 1,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"FoundWords({len(self)} words of {self.candidates:,} candidates)"


@dataclass(frozen=True, slots=True)
class Level:
    """What one level lets through: readings above `limit`, which err by `error`."""

    limit: float
    error: float

    def passes(self, count: float, answering: float = 1.0) -> float:
        """The chance that a prefix of so many devices is kept, if each answers with a chance of
        `answering`."""
        error = math.sqrt(self.error**2 + count * answering * (1 - answering))
        if error == 0:
            return float(count > self.limit)
        return _STANDARD.cdf((count * answering - self.limit) / error)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Candidates' counts (n,), their standard errors, and what each must exceed to be kept."""

    counts: F64
    errors: F64
    limits: F64
    level: Level
    noise: NoiseLaw | None  # of counts that are whole


@dataclass(slots=True, repr=False)
class PrefixCampaign(Campaign):
    """Asks for one length after another, and extends what stands out."""

    design: PrefixDesign
    _kept: Codes = field(init=False)  # prefixes that passed the last level
    _levels: list[Level] = field(default_factory=list)
    _over: bool = False
    _counts: F64 = field(default_factory=lambda: np.empty(0))  # of what was kept
    _errors: F64 = field(default_factory=lambda: np.empty(0))
    _noise: NoiseLaw | None = None
    _candidates: int = 0
    _left_out: int = 0
    _answered: int = 0

    def __post_init__(self) -> None:
        self._kept = np.empty((1, 0), dtype=np.uint16)

    def next_task(self) -> Task | None:
        return None if self._over else self.design.task(len(self._levels))

    def absorb(self, answer: NoisedSum) -> None:
        task = self.next_task()
        if task is None or answer.task.id != task.id:
            raise SpecError("a campaign absorbs the answer to the task it asked for last")
        design, level = self.design, len(self._levels)
        step = design.lengths[level] - self._kept.shape[1]
        rows = extended(self._kept, step, design.radix)
        read = _read(design, level, answer, design.prefixes(level, rows))
        kept = np.flatnonzero(read.counts > read.limits)
        kept = kept[np.argsort(-read.counts[kept], kind="stable")]
        last = level == design.rounds - 1
        few = kept if last else self._affordable(rows, kept, design.lengths[level + 1])
        self._left_out += kept.size - few.size
        passed = read.level
        if few.size < kept.size:  # what was left out would have had to be as common as these
            passed = replace(passed, limit=max(passed.limit, float(read.counts[few[-1]])))
        self._levels.append(passed)
        self._kept, self._counts, self._errors = rows[few], read.counts[few], read.errors[few]
        self._candidates, self._answered, self._noise = rows.shape[0], answer.count, read.noise
        self._over = last or few.size == 0

    def found(self) -> FoundWords:
        """The words that passed every level; none if some level let nothing through."""
        if not self._over:
            raise SpecError(
                f"words are found at the last of {self.design.rounds} levels; "
                f"{len(self._levels)} are absorbed"
            )
        return FoundWords(
            items=words_of(self._kept, self.design.alphabet),
            counts=self._counts,
            standard_error=self._errors,
            noise=self._noise,
            limit=self._levels[-1].limit,
            levels=tuple(self._levels),
            candidates=self._candidates,
            left_out=self._left_out,
            answered=self._answered,
        )

    def _affordable(self, rows: Codes, kept: I64, length: int) -> I64:
        """As many of the kept rows, the largest first, as have few enough extensions."""
        many = endings(length - rows.shape[1], self.design.radix)
        sizes = np.where(rows[kept, -1] != 0, many, 1)
        return kept[np.cumsum(sizes) <= self.design.most_candidates]


def extended(rows: Codes, more: int, symbols: int) -> Codes:
    """Every row with every ending of `more` codes, padding at the end only; in the rows' order.

    A row that has ended stays as it is, and the empty word is none.

    >>> extended(np.array([[2, 1], [1, 0]], dtype=np.uint16), 1, 3).tolist()
    [[2, 1, 0], [2, 1, 1], [2, 1, 2], [1, 0, 0]]
    """
    for _ in range(more):
        live = rows[:, -1] != 0 if rows.shape[1] else np.ones(rows.shape[0], dtype=np.bool_)
        sizes = np.where(live, symbols, 1)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        code = (np.arange(starts.size) - starts).astype(np.uint16)
        rows = np.column_stack([np.repeat(rows, sizes, axis=0), code])
        rows = rows[rows[:, 0] != 0] if rows.shape[1] == 1 else rows
    return rows


def endings(more: int, symbols: int) -> int:
    """How many endings of `more` codes a row has that has not ended.

    >>> endings(2, 3)  # none, a, b, aa, ab, ba, bb
    7
    """
    return sum((symbols - 1) ** used for used in range(more + 1))


def _read(design: PrefixDesign, level: int, answer: NoisedSum, values: I64) -> _Reading:
    sketch, rate = design.sketch(level), design.rate(level, values.size)
    if isinstance(sketch, CountSketch):
        return _sketched(sketch, answer.table, sketch.points(values), rate)
    counts = sketch.estimate(answer.table, values)
    mechanism = answer.task.mechanism
    passed, same = noise_level(mechanism, answer.count, rate), np.ones(counts.size)
    return _Reading(
        counts, passed.error * same, passed.limit * same, passed, mechanism.law(answer.count)
    )


def noise_level(mechanism: Mechanism, count: int, rate: float) -> Level:
    """What a level of one cell per prefix lets through: noise does with a chance of `rate`."""
    limit = float(mechanism.law(count).exceeded(rate) - 1)
    return Level(max(limit, SMALLEST), mechanism.stddev(count))


def _sketched(sketch: CountSketch, table: I64, points: U64, rate: float) -> _Reading:
    """Peel what stands out and read the rest again, until nothing more stands out.

    Only what stands out among all candidates is given to `refine`, which peels at four deviations:
    of millions of candidates hundreds are that far out by chance, and peeling them fits the noise.
    For the same reason the limit is taken twice: what was peeled and does not pass the first one is
    put back, since some of it is noise, and the second limit is of a table with all of its noise.
    """
    rounds, deviations = DecodedRounds.of([(sketch, table)]), -_STANDARD.inv_cdf(rate)
    counts, error = rounds.estimate(points), _spread(rounds.estimate(rounds.placebos()))
    chosen = np.array([np.argmax(counts)])  # `refine` takes one at least
    for _ in range(_LOOKS):
        held = chosen.size
        chosen = np.union1d(chosen, np.flatnonzero(counts > max(deviations * error, SMALLEST)))
        refined = refine(rounds, points[chosen], shares=np.ones(1))
        peeled, error = chosen[refined.peeled], _spread(refined.placebo_errors)
        residual = rounds.subtract(points[peeled], refined.counts[None, refined.peeled])
        counts = residual.estimate(points, decode=refined.decode)
        counts[chosen] = refined.counts
        if chosen.size == held:
            break
    inflation = float(refined.inflation)
    first = absent_limit(residual.tables[0], refined.decode, rate)
    sure = peeled[counts[peeled] > inflation * first]
    residual = rounds.subtract(points[sure], counts[None, sure])
    limit = max(absent_limit(residual.tables[0], refined.decode, rate), SMALLEST)
    wider = np.ones(points.size)
    wider[peeled] = inflation
    level = Level(inflation * limit, inflation * error)  # who passes is peeled, as a rule
    return _Reading(counts, error * wider, limit * wider, level, None)


def _spread(errors: F64) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def detectable_count(levels: Sequence[Level], answering: float = 1.0) -> float:
    """The smallest count that passes all levels with a chance of `SURE`."""

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

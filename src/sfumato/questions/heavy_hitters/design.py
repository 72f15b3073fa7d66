"""Which items, out of an open domain, are held by many? The campaigns of paper 001, made private.

Devices send a sample of their items in an invertible sketch; the decoder, who is trusted with its
sum, lists it; over all rounds the counts add up, and what may be told of them is told.

A campaign with a promise tells only of tables that could be listed whole, and of a table too full
to be sure of that it tells nothing, so that whether it could be listed depends on no device
(docs/proofs/listing.md). Without a promise it keeps what a stuck table gave, and uses the names of
earlier rounds to read later tables.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.errors import SpecError
from sfumato.flow.aggregation import Plain
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of
from sfumato.flow.task import Task, most_devices
from sfumato.privacy import ListedAbove, PlannedLoss, Rng
from sfumato.privacy.intervals import NoiseLaw, of_sums
from sfumato.privacy.samplers import SecretRng, bound, discrete_laplace
from sfumato.questions.answers import check_finished, counts_of_discovered, detectable_note
from sfumato.questions.frequencies.design import FrequencyCampaign, FrequencyDesign
from sfumato.questions.question import (
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
    Seeded,
    drawn_secret,
    public_seed,
)
from sfumato.sketch import (
    InvertibleSketch,
    ItemKeys,
    Keys,
    Listing,
    TextKeys,
    WordKeys,
    capacity,
)
from sfumato.sketch.keys import limbs
from sfumato.spec import digest, later, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

LOAD = 0.8  # keys a cell that the first table should have
MOST_LOAD, LEAST_LOAD = 1.1, 0.5  # names of earlier rounds help to read fuller tables
_STEP = 0.1  # that the load goes up after a table that was listed whole, and down after others
PAPER_LOAD = 0.9  # of the keys that a table of the paper is made for
TAIL_BITS = 40  # more are kept in a round than `most_kept` with probability at most 2**-40
_BOLDEST = 4.0  # times that a rate may change from one round to the next
_LEAST_SINGLES = 0.3
_TINY = float(np.finfo(np.float64).tiny)


class ListDefaults(QuestionDefaults, ABC):
    """What lists and histograms have in common: items with a key, each once for a device."""

    __slots__ = ()

    @abstractmethod
    def search(self) -> HeavyHitterDesign:
        """The search for names."""

    @property
    def has_secret(self) -> bool:
        return True

    def cohorts(self) -> dict[str, float]:
        names = self.search()
        return {f"round {round}": 1 / names.rounds for round in range(names.rounds)}

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        names = self.search()
        return items_with_keys(population, names.keys, names.items_per_device, plan, rng, alone)

    def values(
        self, task: Task, items: pa.Array, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, Bool]:
        """Items that have a key, cut where words are."""
        keys = self.search().keys
        numbers, fits = keys.numbers(items)
        return keys.items(numbers[fits])[0], fits


def items_with_keys(
    population: Population, keys: Keys, limit: int, plan: Plan, rng: Rng, alone: bool
) -> tuple[Population, list[str]]:
    """Devices with what they may send: items that have a key, each once, at most `limit`."""
    # Of a private release it is always said, and not how many, so that it says nothing.
    unfit = _without_key(population, keys) if plan.study.epsilon is None else None
    many = "items" if unfit is None else f"{unfit:,} items"
    notes = [
        f"{many} without a key are not sent: longer than the study allows, or with characters not "
        f"in its alphabet"
    ]
    if unfit == 0:
        notes = []
    if population.owners is None or alone:  # devices then choose by themselves
        return population, notes
    numbers, fits = keys.numbers(population.chunks[0])
    kept = np.flatnonzero(fits)
    items = keys.items(numbers[kept])[0]  # items with one key are one item
    return population.only(kept, items).distinct().bounded(limit, rng=rng), notes


def _without_key(population: Population, keys: Keys) -> int:
    """Items of devices that cannot be sent."""
    fits = [keys.numbers(items)[1] for items in population.chunks]
    if population.weights is None:
        return sum(int((~part).sum()) for part in fits)
    return sum(int(w[~part].sum()) for part, w in zip(fits, population.weights, strict=True))


@spec("heavy_hitter_design")
class HeavyHitterDesign(ListDefaults):
    """A sized search for what many hold: all that `HeavyHitterCampaign` needs to know."""

    keys: Keys
    devices: int
    rounds: int
    rows: int
    width: int
    cell_bits: int = 0  # count and check share what a key leaves of them; or they are given:
    count_bits: int = 0
    check_bits: int = 0
    seed: int
    items_per_device: int
    mechanism: ListedAbove  # its rate is the first round's, and every round's unless `adaptive`
    adaptive: bool = False
    target: float  # different keys that the first table should have
    most_keys: int | None = None  # beyond which a table is not told of, though it was listed
    partial: bool  # keep what a stuck table gave, and read it with what is known
    paper: bool = False  # the paper's rule for the next rate
    secure: SecureSum | None = later(None)  # how tables are hidden from the decoder

    def check(self) -> None:
        for name in ("devices", "rounds", "items_per_device"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}")
        require(self.target > 0, f"target must be above 0; got {self.target}")
        promises = self.mechanism.epsilon is not None
        require(
            not (promises and self.partial),
            "what a stuck table gives depends on every device in it, so a private list is made of "
            "whole tables only; set partial to false",
        )
        require(
            not (promises and self.adaptive)
            or (self.mechanism.statistic > 0 and not self.mechanism.amplified),
            "a rate that adapts shows how full a table was: the mechanism must pay for that "
            "statistic and not count on its coins",
        )
        if promises:
            self._check_tables()

    def _check_tables(self) -> None:
        """That tables fail to be listed as seldom as the mechanism pays for, whatever is in them
        (docs/proofs/listing.md)."""
        told = self.mechanism
        assert told.epsilon is not None  # the caller has seen
        require(self.check_bits > 0, "a private design must say the bits of its cells")
        require(
            not self.adaptive or self.most_keys is not None,
            "a rate that adapts needs most_keys: fuller tables are not told of",
        )
        allowed = told.unlisted / (1 + math.exp(told.epsilon))
        if told.noise == "none":  # which counts on the coins of all rounds
            allowed /= self.rounds
        keys = insertions = self.most_kept(told.rate)
        chance = 2.0**-TAIL_BITS
        if self.adaptive:
            spare = slack(self.items_per_device, told.statistic, allowed)
            keys, insertions = (self.most_keys or 0) + spare, self.most_kept(1.0)
            chance += allowed / 4
        sketch = self.sketch(0, told.rate)
        chance += capacity.failure_bound(keys, self.rows, self.width)
        chance += sketch.wrong_keys(keys, insertions) + sketch.collisions(keys)
        require(
            chance <= allowed,
            f"tables must fail to be listed with a chance of at most {allowed:.3g}; it is "
            f"{chance:.3g}",
        )

    def search(self) -> HeavyHitterDesign:
        return self

    @property
    def names(self) -> HeavyHitterDesign:
        return self

    @property
    def counts(self) -> None:
        """A list has no counts but those of its sample."""
        return None

    @property
    def least_noise(self) -> None:
        return None

    @property
    def asked(self) -> int:
        """Devices in one round's cohort."""
        return -(-self.devices // self.rounds)

    def cohort_size(self, task: Task) -> float:
        return self.asked

    def with_seed(self, rng: Rng) -> Seeded:
        seed = public_seed(rng)
        return Seeded(replace(self, seed=seed), seed, drawn_secret(rng))

    def campaign(
        self, plan: Plan, *, secret: bytes = b"", least: float = 0.0, **context: Any
    ) -> HeavyHitterCampaign:
        return HeavyHitterCampaign(self, SecretRng(secret), least=least)

    def answer(
        self, campaign: HeavyHitterCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        found = campaign.found()
        asked = max(participation.devices, found.answered)
        return counts_of_discovered(
            plan,
            participation,
            items=found.items,
            counts=found.counts,
            standard_error=found.standard_error,
            interval=found.interval(asked),
            answered=found.answered,
            **campaign.about(participation),
        )

    def most_kept(self, rate: float) -> int:
        """Items that the devices of one round send, at most."""
        most = most_in_round(self.asked, masked=self.secure is not None)
        return most_kept(most * self.items_per_device, rate)

    def sketch(self, round: int, rate: float) -> InvertibleSketch:
        if self.check_bits:
            return InvertibleSketch(
                keys=self.keys, rows=self.rows, width=self.width, count_bits=self.count_bits,
                check_bits=self.check_bits, seed=self.seed, round=round,
            )  # fmt: skip
        return sketch_of(
            self.keys, self.rows, self.width, self.cell_bits, self.most_kept(rate), self.seed, round
        )

    def task(self, round: int, rate: float) -> Task:
        sketch, mechanism = self.sketch(round, rate), replace(self.mechanism, rate=rate)
        if self.secure is not None:
            return self.secure.task(
                sketch=sketch,
                mechanism=mechanism,
                campaign=digest(self),
                cohort=f"round {round}",
                asked=self.asked,
                items_per_device=self.items_per_device,
            )
        return Task(
            sketch=sketch,
            mechanism=mechanism,
            aggregation=Plain(modulus_bits=sketch.word_bits),
            campaign=digest(self),
            cohort=f"round {round}",
            items_per_device=self.items_per_device,
            max_count=most_devices(self.asked),
        )

    def tasks(self) -> list[Task]:
        """The tasks of all rounds, at the first rate."""
        return [self.task(round, self.mechanism.rate) for round in range(self.rounds)]

    def parameters(self) -> dict[str, Any]:
        sketch = self.sketch(0, self.mechanism.rate)
        sizes: dict[str, Any] = {
            "items_per_device": self.items_per_device,
            "rows": self.rows,
            "width": self.width,
            "cell_bits": sketch.cell_bits,
            "key_bits": self.keys.bits,
            "sampling_rate": self.mechanism.rate,
            "adaptive": self.adaptive,
            "partial_tables": "kept" if self.partial else "left out",
        }
        if self.mechanism.epsilon is not None:
            sizes |= {"noise": self.mechanism.noise, "noise_scale": self.mechanism.scale}
            sizes |= {"threshold_in_sample": self.mechanism.threshold}
        if self.secure is not None:
            sizes |= parameters_of(self.task(0, self.mechanism.rate))
        return sizes | {"rounds": self.rounds}


@spec("histogram_design")
class HistogramDesign(ListDefaults):
    """Names from one campaign, and counts of everything from another, of the same devices."""

    names: HeavyHitterDesign
    counts: FrequencyDesign

    def check(self) -> None:
        require(
            self.names.secure == self.counts.secure,
            "names and counts must be hidden alike: their secure sums differ",
        )

    @property
    def devices(self) -> int:
        return self.names.devices

    @property
    def rounds(self) -> int:
        return self.names.rounds

    def search(self) -> HeavyHitterDesign:
        return self.names

    @property
    def items_per_device(self) -> int:
        return self.names.items_per_device

    @property
    def task_count(self) -> int:
        return 2 * self.rounds

    @property
    def tasks_per_device(self) -> int:
        return 2

    @property
    def least_noise(self) -> float | None:
        return self.counts.least_noise

    def cohort_size(self, task: Task) -> float:
        if task.campaign == digest(self.names):
            return self.names.asked
        return self.counts.cohort_size(task)

    def item_keys(self, task: Task) -> ItemKeys | None:
        """A sketch of counts does not say what its items are; a table of names does."""
        if task.campaign == digest(self.names):
            return None
        keys = self.names.keys
        assert isinstance(keys, TextKeys | WordKeys)  # a study has no others
        return keys

    def with_seed(self, rng: Rng) -> Seeded:
        names = replace(self.names, seed=public_seed(rng))
        counts = replace(self.counts, seed=public_seed(rng))
        return Seeded(HistogramDesign(names=names, counts=counts), names.seed, drawn_secret(rng))

    def campaign(
        self, plan: Plan, *, secret: bytes = b"", least: float = 0.0, **context: Any
    ) -> HistogramCampaign:
        return HistogramCampaign(self, SecretRng(secret), least=least)

    def answer(
        self, campaign: HistogramCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        if campaign.counting is None:  # no name may be released
            return self.names.answer(campaign.names, plan, participation)
        check_finished(campaign, participation)
        found, read = campaign.names.found(), campaign.counting.estimates()
        order = np.argsort(-read.counts, kind="stable")
        asked, least = max(participation.devices, read.answered), plan.study.threshold
        above = None if least is None else least * read.answered / asked
        low, high = read.interval(asked, above=above)
        about = campaign.names.about(participation)
        about["parameters"] |= {"counts_decoder": read.decoder}
        return counts_of_discovered(
            plan,
            participation,
            items=found.items.take(pa.array(order)),
            counts=read.counts[order],
            standard_error=read.standard_error[order],
            interval=(low[order], high[order]),
            answered=read.answered,
            **about,
        )

    def charge_of(self, task: Task) -> PlannedLoss:
        """A device is asked for names once and for counts once, in whatever rounds: one plan."""
        parts = (self.names.tasks()[0], self.counts.tasks()[0])
        losses = tuple(part.loss for part in parts)
        return PlannedLoss(loss=task.loss, plan=digest(self), losses=losses)

    def parameters(self) -> dict[str, Any]:
        counts = self.counts.parameters()
        return self.names.parameters() | {f"counts_{name}": counts[name] for name in counts}


def sketch_of(
    keys: Keys, rows: int, width: int, cell_bits: int, most_kept: int, seed: int, round: int
) -> InvertibleSketch:
    """The sketch whose cells have so many bits: enough for the counts, the rest for checks."""
    count_bits = max(1, most_kept.bit_length())
    words = max(1, -(-cell_bits // 62))
    check_bits = min(44, cell_bits // words - -(-(keys.bits + count_bits) // words))
    return InvertibleSketch(
        keys=keys, rows=rows, width=width, count_bits=count_bits,
        check_bits=max(check_bits, 2, count_bits - 1), seed=seed, round=round,
    )  # fmt: skip


def most_in_round(asked: int, *, masked: bool) -> int:
    """Devices whose tables may be in a sum over a cohort of about so many."""
    return asked + 1 if masked else most_devices(asked)


def slack(items_per_device: int, statistic: float, failure: float) -> int:
    """Keys that a table may have beyond those that its noised number shows, but for a quarter of
    this chance."""
    return math.ceil(items_per_device / statistic * math.log(4 / failure))


def most_kept(items: int, rate: float) -> int:
    """More than this many of so many items are kept with probability at most 2**-40 (Bernstein)."""
    if rate == 1:
        return items
    mean, log = items * rate, TAIL_BITS * math.log(2)
    return min(items, math.ceil(mean + math.sqrt(2 * mean * log) + log))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Round:
    """What one round gave the decoder."""

    listing: Listing
    rate: float
    devices: int
    is_told: bool  # of a table that is not, nothing is used
    stuck: NoisedSum | None = None  # the table, if it may be read again

    @property
    def read_rate(self) -> float:
        """The share of the devices' items that was listed."""
        listed, held = int(self.listing.counts.sum()), self.listing.inserted
        return self.rate * listed / held if held else self.rate


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HeavyHitters:
    """Items and how many of the answering devices hold them, most first."""

    items: pa.Array
    counts: F64
    standard_error: F64
    seen: I64  # in the samples, with their noise
    noise: NoiseLaw  # on each of these
    least_seen: int  # with fewer, an item is not listed
    rate: float  # of the sample that was told of; the mean of the rounds' where they differ
    mechanism: ListedAbove  # at that rate
    least: float  # estimates below it are not listed
    answered: int  # devices behind the counts
    unread: int  # rounds of which nothing could be told
    listed: float  # share of what was sampled that could be listed, where it could in part

    def interval(self, asked: int) -> tuple[F64, F64]:
        """95% intervals for counts over `asked` devices, given that an item is listed."""
        if not self.answered:
            return np.zeros(0), np.zeros(0)
        return of_sums(
            self.seen, self.noise, devices=asked, respondents=self.answered, rate=self.rate,
            above=self.least_seen,
        )  # fmt: skip

    def detectable(self, asked: int) -> int:
        """The smallest count, over `asked` devices, that is listed with a probability of 95%."""
        if not self.answered:
            return 0
        answering = min(self.answered / asked, 1.0)
        return self.mechanism.detectable(self.least, answering=answering)

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"HeavyHitters({len(self)} items, {self.answered:,} devices)"


@dataclass(slots=True, repr=False)
class HeavyHitterCampaign(Campaign):
    """Asks round after round, with a rate that fits what was seen; tells at the end."""

    design: HeavyHitterDesign
    rng: Rng  # the decoder's own: for the noise on what it tells
    least: float = 0.0  # estimates below it are not listed
    rate: float = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    _absorbed: bytes = b""  # a digest of all answers so far: what the decoder's noise is bound to
    _known: U64 | None = None
    _target: float = field(init=False)
    _found: HeavyHitters | None = None

    def __post_init__(self) -> None:
        self.rate = self.design.mechanism.rate
        self._target = self.design.target

    def next_task(self) -> Task | None:
        if len(self.rounds) == self.design.rounds:
            return None
        return self.design.task(len(self.rounds), self.rate)

    def absorb(self, answer: NoisedSum) -> None:
        task = self.next_task()
        if task is None or answer.task.id != task.id:
            raise SpecError("a campaign absorbs the answer to the task it asked for last")
        sketch = answer.task.sketch
        assert isinstance(sketch, InvertibleSketch)  # `task` asks for nothing else
        self._absorbed = _digest_of(answer, self._absorbed)  # before anything is drawn
        partial = self.design.partial
        listing = sketch.list(answer.table, candidates=self._known if partial else None)
        distinct = self._distinct(listing)
        most = math.inf if self.design.most_keys is None else self.design.most_keys
        self.rounds.append(
            Round(
                listing=listing,
                rate=self.rate,
                devices=answer.count,
                is_told=partial or (listing.is_complete and distinct <= most),
                stuck=answer if partial and not listing.is_complete else None,
            )
        )
        if partial:
            self._learn(listing)
        if self.design.adaptive:
            self.rate = self._next_rate(listing, distinct)

    def found(self) -> HeavyHitters:
        """What may be told, at the end: worked out once, since its noise is paid for once."""
        if self._found is None:
            if self.next_task() is not None and self.design.mechanism.epsilon is not None:
                raise SpecError(
                    f"what may be told is known when all {self.design.rounds} rounds are absorbed; "
                    f"{len(self.rounds)} are"
                )
            found = self._at_the_end()
            if self.design.mechanism.epsilon is None:
                return found
            self._found = found
        return self._found

    def about(self, participation: Participation) -> dict[str, Any]:
        """What a release of the list says about it: parameters and notes."""
        design, found = self.design, self.found()
        detectable = found.detectable(max(participation.devices, found.answered))
        parameters: dict[str, Any] = {
            "detectable_count": detectable,
            "sampling_rate": found.rate,
            "rounds_not_listed": found.unread,
        }
        if design.partial:
            parameters |= {"listed_share": found.listed}
        notes = [detectable_note("an item", detectable, participation)]
        if found.unread:  # the promise does not allow to say how full the tables were
            advice = "give more bytes_per_device"
            if design.rounds > 1:
                advice += ", or more rounds"
            notes.append(
                f"{found.unread} of {design.rounds} tables could not be listed whole, and nothing "
                f"is told of them; {advice}"
            )
        return {"parameters": parameters, "notes": notes}

    def _at_the_end(self) -> HeavyHitters:
        self._read_again()
        used = [part for part in self.rounds if part.is_told and part.read_rate > 0]
        items, counts, errors, seen = self._told(used)
        mechanism = self.design.mechanism
        is_private = mechanism.epsilon is not None
        rates = [part.rate if is_private else part.read_rate for part in used]
        rate = min(rates, default=self.rate)  # private samples are thinned to it
        if not is_private and used:
            devices = [part.devices for part in used]
            rate = min(float(np.average(rates, weights=devices)), 1.0)
        threshold = mechanism.threshold if is_private else 1
        held = sum(part.listing.inserted for part in used)
        listed = sum(int(part.listing.counts.sum()) for part in used)
        return HeavyHitters(
            items=items,
            counts=counts,
            standard_error=errors,
            seen=seen,
            noise=mechanism.list_law,
            least_seen=max(threshold, math.ceil(self.least * rate - 1e-9)),
            rate=rate,
            mechanism=replace(mechanism, rate=rate),
            least=self.least,
            answered=sum(part.devices for part in used),
            unread=len(self.rounds) - len(used),
            listed=listed / held if held else 1.0,
        )

    def _learn(self, listing: Listing) -> None:
        every = listing.keys if self._known is None else np.r_[self._known, listing.keys]
        self._known = np.unique(every, axis=0)

    def _read_again(self) -> None:
        """Stuck tables, with all the names that were learned since."""
        for place, part in enumerate(self.rounds):
            if part.stuck is None:
                continue
            sketch = part.stuck.task.sketch
            assert isinstance(sketch, InvertibleSketch)  # `task` asks for nothing else
            listing = sketch.list(part.stuck.table, candidates=self._known)
            self._learn(listing)
            stuck = None if listing.is_complete else part.stuck
            self.rounds[place] = replace(part, listing=listing, stuck=stuck)

    def _told(self, used: list[Round]) -> tuple[pa.Array, F64, F64, I64]:
        """Items, counts, standard errors and what was seen in the samples, largest first."""
        if not used:
            nothing = np.zeros((0, limbs(self.design.keys.bits)), dtype=np.uint64)
            empty = np.zeros(0)
            return self.design.keys.items(nothing)[0], empty, empty, empty.astype(np.int64)
        every, first, place = np.unique(
            np.concatenate([part.listing.keys for part in used]),
            axis=0, return_index=True, return_inverse=True,
        )  # fmt: skip
        place, size = place.reshape(-1), len(every)
        tell = self._private if self.design.mechanism.epsilon is not None else self._everything
        counts, variances, seen = tell(used, place, size)
        listed = np.flatnonzero(counts >= max(self.least, _TINY))
        order = listed[np.argsort(-counts[listed], kind="stable")]
        items = pa.chunked_array([part.listing.items for part in used])
        return (
            items.take(pa.array(first[order])).combine_chunks(),
            counts[order],
            np.sqrt(variances[order]),
            seen[order],
        )

    def _everything(self, used: list[Round], place: I64, size: int) -> tuple[F64, F64, I64]:
        """Each round counts by its own rate; of a stuck table, what was listed stands for the rest,
        as if chance had chosen it."""
        times = np.concatenate([np.full(len(part.listing), 1 / part.read_rate) for part in used])
        listed = np.concatenate([part.listing.counts for part in used])
        counts = times * listed
        total = np.bincount(place, counts, minlength=size).astype(np.float64)
        variance = np.bincount(place, counts * (times - 1), minlength=size).astype(np.float64)
        return total, variance, np.bincount(place, listed, minlength=size).astype(np.int64)

    def _private(self, used: list[Round], place: I64, size: int) -> tuple[F64, F64, I64]:
        """All rounds thinned to one rate; counts that may not be told are zero."""
        told = replace(self.design.mechanism, rate=min(part.rate for part in used))
        coins = self._own("coins")
        kept = [told.thin(part.listing.counts, part.rate, rng=coins) for part in used]
        exact = np.bincount(place, np.concatenate(kept), minlength=size).astype(np.int64)
        present = np.flatnonzero(exact)  # what was thinned away is not in the sample
        noised, may = told.release(exact[present], rng=self._own("counts", exact))
        counts, variances, seen = np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.int64)
        seen[present[may]] = noised[may]
        counts[present[may]] = noised[may] / told.rate
        variances[present] = (told.noise_stddev / told.rate) ** 2
        return counts, variances + np.maximum(counts, 0) * (1 / told.rate - 1), seen

    def _distinct(self, listing: Listing) -> float:
        """How many different keys a table had, with the noise that the mechanism pays for."""
        statistic = self.design.mechanism.statistic
        if statistic == 0 or not listing.is_complete:
            return listing.keys_estimate
        scale = self.design.items_per_device / statistic
        return len(listing) + int(discrete_laplace(scale, (1,), self._own("keys"))[0])

    def _own(self, purpose: str, *noised: I64) -> Rng:
        """The decoder's randomness for one purpose: it repeats only if every answer so far and
        what is noised are the same (docs/proofs/listing.md)."""
        data = (np.ascontiguousarray(part, dtype="<i8").tobytes() for part in noised)
        return bound(self.rng, purpose, self._absorbed, *data)

    def _next_rate(self, listing: Listing, distinct: float) -> float:
        """Paper 001's algorithm 4 moves half the way to the rate at which the keys, if they were
        proportional to it, would be as many as wanted.

        Without a promise we go the whole way and by the right power: the number of different keys
        in a sample grows with its size to the power of the share of keys that came once (Good and
        Turing). A table that could not be listed whole shows too little for that. And how full the
        next table may be follows how the last one was read.
        """
        design, rate = self.design, self.rate
        if design.mechanism.epsilon is not None and not self.rounds[-1].is_told:
            return rate / 2  # too full, and by how much is nobody's business
        if design.partial:
            cells = design.rows * design.width
            load = self._target / cells + (_STEP if listing.is_complete else -_STEP)
            load = min(max(load, LEAST_LOAD), MOST_LOAD)
            self._target = load * cells
        factor = max(distinct, 1.0) / self._target
        if design.paper or design.mechanism.epsilon is not None or not listing.is_complete:
            step = 0.5 + 0.5 * factor
        else:
            singles = (
                max(float(np.mean(listing.counts == 1)), _LEAST_SINGLES) if len(listing) else 1
            )
            step = factor ** (1 / singles)
        return min(1.0, rate / min(max(step, 1 / _BOLDEST), _BOLDEST))


def _digest_of(answer: NoisedSum, before: bytes) -> bytes:
    """A digest of an answer and of all that came before it: task, number of devices and table."""
    table = np.ascontiguousarray(answer.table, dtype="<i8").tobytes()
    parts = (before, answer.task.id.encode(), str(answer.count).encode(), table)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def majority(repetitions: Sequence[pa.Array]) -> pa.Array:
    """The items that more than half of the repetitions found: paper 001's algorithm 2, whose tables
    are repeated with new coins and new hash functions. A device is in all, and pays for all.

    >>> majority([pa.array(["oak", "elm"]), pa.array(["oak"]), pa.array(["oak", "elm", "fir"])])
    <pyarrow.lib.StringArray object at ...>
    [
      "oak",
      "elm"
    ]
    """
    every = pa.concat_arrays([pc.unique(found) for found in repetitions])
    counted = pc.value_counts(every)
    often = pc.greater(pc.multiply(counted.field("counts"), 2), len(repetitions))
    return counted.field("values").filter(often)


def repetitions_for(items: float, failure: float, *, error: float = 0.2) -> int:
    """How many repetitions make a majority right for so many items at once, each repetition being
    wrong about an item with probability `error`: the least odd number by the exact binomial law.

    With the paper's numbers, 40·6,000 items that could be mistaken and a failure of 0.05, its
    algorithm takes 131 and its proof 308 (and its lemma J.1 does not hold).

    >>> repetitions_for(40 * 6_000, 0.05)
    57
    """
    from scipy import stats

    count = 1
    while items * stats.binom.sf(count // 2, count, error) > failure:
        count += 2
    return count


@dataclass(slots=True, repr=False)
class HistogramCampaign(Campaign):
    """Asks for names, tells those that may be told, and asks how often each is held."""

    design: HistogramDesign
    rng: Rng  # the decoder's own, for the noise on the names that it tells
    least: float = 0.0
    names: HeavyHitterCampaign = field(init=False)
    _counting: FrequencyCampaign | None = None

    def __post_init__(self) -> None:
        self.names = HeavyHitterCampaign(self.design.names, self.rng, least=self.least)

    @property
    def counting(self) -> FrequencyCampaign | None:
        """The second campaign, when the first is over and has found something."""
        if self._counting is None and self.names.next_task() is None:
            found = self.names.found()
            if len(found):
                self._counting = FrequencyCampaign(self.design.counts, found.items)
        return self._counting

    def next_task(self) -> Task | None:
        task = self.names.next_task()
        if task is not None:
            return task
        return None if self.counting is None else self.counting.next_task()

    def absorb(self, answer: NoisedSum) -> None:
        if self.names.next_task() is not None or self.counting is None:
            self.names.absorb(answer)
        else:
            self.counting.absorb(answer)

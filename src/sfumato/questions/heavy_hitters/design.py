"""Which items of an open domain do many devices hold? The campaigns of paper 001, made private.

Devices send a sample of their items in an invertible sketch. A decoder that is trusted with the sum
lists it, adds up the counts of all rounds, and releases those that pass a private threshold.

A campaign with a guarantee uses only tables that were listed completely, and discards a table that
may be too full for that, so that listing succeeds or fails independently of any one device
(docs/proofs/listing.md). Without a guarantee it uses what it can read of an incomplete table, and
reads later tables with the names of earlier rounds.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sfumato.arrays import F64, I64, U64, Bool
from sfumato.errors import SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Influence, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of, sum_task
from sfumato.flow.task import Task, most_devices
from sfumato.privacy import ListedAbove, PlannedLoss, Rng
from sfumato.privacy.intervals import NoiseLaw, of_sums
from sfumato.privacy.samplers import SecretRng, bound, discrete_laplace
from sfumato.questions.answers import check_finished, detectable_note, discovered_release
from sfumato.questions.frequencies.design import FrequencyCampaign, FrequencyDesign
from sfumato.questions.promise import COUNT, masked_influence
from sfumato.questions.question import (
    Dictionary,
    Participation,
    Plan,
    QuestionDefaults,
    Seeded,
    draw_secret,
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
from sfumato.sketch.words import BYTES
from sfumato.spec import digest, later, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population


LOAD = 0.8  # target for the first table: keys per cell
MOST_LOAD, LEAST_LOAD = 1.1, 0.5  # names of earlier rounds help to read fuller tables
_STEP = 0.1  # added to the load after a complete table, subtracted after others
PAPER_LOAD = 0.9  # share of a table's capacity that the paper uses
TAIL_BITS = 40  # a round samples more than `most_sampled` with probability at most 2**-40
_LARGEST_CHANGE = 4.0  # factor between the rates of two rounds
_LEAST_SINGLES = 0.3
_TINY = float(np.finfo(np.float64).tiny)


class ListDefaults(QuestionDefaults):
    """Common to lists and histograms: items with a key, each counted once per device, or as often
    as a device has it."""

    __slots__ = ()
    has_secret: ClassVar[bool] = True

    def search(self) -> Any:
        """The design that finds the names: it has `keys`, `rounds` and `items_per_device`."""
        return self

    @property
    def devices_per_round(self) -> int:
        """The number of devices in one round's cohort."""
        names = self.search()
        return -(-int(names.devices) // int(names.rounds))

    def cohort_size(self, task: Task) -> float:
        return self.devices_per_round

    def fitting(self) -> str:
        """The items that can be listed, in words."""
        keys = self.search().keys
        if isinstance(keys, WordKeys):
            return f"a word of the study's alphabet, cut to {keys.length} characters,"
        return f"an item of at most {keys.length} bytes"

    @property
    def influence(self) -> Influence:
        """An admitted table has at most `items_per_device` keys, once each, but the hash functions
        are public: keys can be chosen that share all cells with another key."""
        if self.search().secure is not None:
            return masked_influence(COUNT)
        note = "with items that it chooses to collide with others it can keep a table from being "
        return Influence(of=COUNT, most=None, note=note + "listed")

    @property
    def algorithm(self) -> str:
        return "invertible_sketch"

    def cohorts(self) -> dict[str, float]:
        rounds = self.search().rounds
        return {f"round {round}": 1 / rounds for round in range(rounds)}

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        names = self.search()
        return items_with_keys(
            population, names.keys, names.items_per_device, plan, rng, alone,
            copies=names.mechanism.copies,
        )  # fmt: skip

    def values(
        self, task: Task, items: pa.Array, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, Bool]:
        """Items that have a key; long words are cut."""
        keys = self.search().keys
        numbers, fits = keys.numbers(items)
        return keys.items(numbers[fits])[0], fits


def items_with_keys(
    population: Population,
    keys: Keys,
    limit: int,
    plan: Plan,
    rng: Rng,
    alone: bool,
    *,
    copies: bool = False,
) -> tuple[Population, list[str]]:
    """Devices with the items that they may send: those with a key, each once unless `copies` count,
    at most `limit`."""
    # A private release always has the note, without a number, so that it reveals nothing.
    unfit = _without_key(population, keys) if plan.study.epsilon is None else None
    notes = [] if unfit == 0 else [_limits(keys, "items" if unfit is None else f"{unfit:,} items")]
    if population.owners is None or alone:  # devices then choose for themselves
        return population, notes
    numbers, fits = keys.numbers(population.chunks[0])
    rows = np.flatnonzero(fits)
    items = keys.items(numbers[rows])[0]  # items with one key are one item
    own = population.only(rows, items)
    return (own if copies else own.distinct()).bounded(limit, rng=rng), notes


def _limits(keys: Keys, items: str) -> str:
    """Which items have no key, and which are cut."""
    if isinstance(keys, TextKeys):
        return f"{items} of more than {keys.length} bytes are not sent"
    if not isinstance(keys, WordKeys):
        return f"{items} of more than {keys.bits} bits are not sent"
    if keys.alphabet == BYTES:
        return f"items of more than {keys.length} bytes are cut to their first {keys.length}"
    return (
        f"{items} with characters outside the study's alphabet are not sent; longer words are cut "
        f"to {keys.length} characters"
    )


def _without_key(population: Population, keys: Keys) -> int:
    """The number of items that cannot be sent."""
    fits = [keys.numbers(items)[1] for items in population.chunks]
    if population.weights is None:
        return sum(int((~part).sum()) for part in fits)
    return sum(int(w[~part].sum()) for part, w in zip(fits, population.weights, strict=True))


@spec("heavy_hitter_design")
class HeavyHitterDesign(ListDefaults):
    """A sized search for heavy hitters, for `HeavyHitterCampaign`."""

    counts: ClassVar[None] = None  # a list has only the counts of its sample
    keys: Keys
    devices: int
    rounds: int
    rows: int
    width: int
    cell_bits: int = 0  # shared by key, count and check; or set the next two:
    count_bits: int = 0
    check_bits: int = 0
    seed: int
    items_per_device: int
    mechanism: ListedAbove  # with the rate of the first round, or of all unless `adaptive`
    adaptive: bool = False
    target: float  # distinct keys in the first table
    most_keys: int | None = None  # a table with more is discarded, even if it was listed
    partial: bool  # use incomplete tables, and read them with the names of other rounds
    paper: bool = False  # use the paper's rule for the next rate
    secure: SecureSum | None = later(None)  # for masked sums

    def check(self) -> None:
        require.at_least(
            1, devices=self.devices, rounds=self.rounds, items_per_device=self.items_per_device
        )
        require.above(0, target=self.target)
        promises = self.mechanism.epsilon is not None
        require(
            not (promises and self.partial),
            "an incomplete listing depends on every device in the table, so a private list uses "
            "complete tables only; set partial to false",
        )
        require(
            not (promises and self.adaptive)
            or (self.mechanism.statistic > 0 and not self.mechanism.amplified),
            "an adaptive rate reveals how full a table was: the mechanism must include that "
            "statistic, and must not use amplification by sampling",
        )
        if promises:
            self._check_tables()

    def _check_tables(self) -> None:
        """Check that listing any table fails at most with the probability that the mechanism
        accounts for (docs/proofs/listing.md)."""
        mechanism = self.mechanism
        assert mechanism.epsilon is not None  # checked by the caller
        require(self.check_bits > 0, "a private design must set count_bits and check_bits")
        require(
            not self.adaptive or self.most_keys is not None,
            "an adaptive rate needs most_keys: fuller tables are discarded",
        )
        allowed = mechanism.unlisted / (1 + math.exp(mechanism.epsilon))
        if mechanism.noise == "none":  # the guarantee uses the sampling of all rounds
            allowed /= self.rounds
        keys = insertions = self.most_sampled(mechanism.rate)
        chance = 2.0**-TAIL_BITS
        if self.adaptive:
            spare = slack(self.items_per_device, mechanism.statistic, allowed)
            keys, insertions = (self.most_keys or 0) + spare, self.most_sampled(1.0)
            chance += allowed / 4
        sketch = self.sketch(0, mechanism.rate)
        chance += capacity.failure_bound(keys, self.rows, self.width)
        chance += sketch.wrong_keys(keys, insertions) + sketch.collisions(keys)
        require(
            chance <= allowed,
            f"listing a table must fail with probability at most {allowed:.3g}; it is {chance:.3g}",
        )

    def campaign(
        self, plan: Plan, *, secret: bytes = b"", least: float = 0.0, **context: Any
    ) -> HeavyHitterCampaign:
        return HeavyHitterCampaign(self, SecretRng(secret), least=least)

    def answer(
        self, campaign: HeavyHitterCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        heavy_hitters = campaign.heavy_hitters()
        devices = max(participation.devices, heavy_hitters.respondents)
        return discovered_release(
            plan,
            participation,
            items=heavy_hitters.items,
            counts=heavy_hitters.counts,
            standard_error=heavy_hitters.standard_error,
            interval=heavy_hitters.interval(devices),
            respondents=heavy_hitters.respondents,
            per_device=self.mechanism.most_per_item,
            **campaign.about(participation),
        )

    @property
    def names(self) -> HeavyHitterDesign:
        return self

    def most_sampled(self, rate: float) -> int:
        """The largest number of items that the devices of one round send."""
        most = most_in_round(self.devices_per_round, masked=self.secure is not None)
        return most_sampled(most * self.items_per_device, rate)

    def sketch(self, round: int, rate: float) -> InvertibleSketch:
        count_bits, check_bits = self.count_bits, self.check_bits
        if not check_bits:  # of `cell_bits`, enough for the counts and the rest for checks
            count_bits = max(1, self.most_sampled(rate).bit_length())
            words = max(1, -(-self.cell_bits // 62))
            check_bits = self.cell_bits // words - -(-(self.keys.bits + count_bits) // words)
            check_bits = max(min(44, check_bits), 2, count_bits - 1)
        return InvertibleSketch(
            keys=self.keys, rows=self.rows, width=self.width, count_bits=count_bits,
            check_bits=check_bits, seed=self.seed, round=round, copies=self.mechanism.copies,
        )  # fmt: skip

    def task(self, round: int, rate: float) -> Task:
        return sum_task(
            self.secure,
            sketch=self.sketch(round, rate),
            mechanism=replace(self.mechanism, rate=rate),
            campaign=digest(self),
            cohort=f"round {round}",
            devices=self.devices_per_round,
            items_per_device=self.items_per_device,
        )

    def tasks(self) -> list[Task]:
        """The tasks of all rounds, at the first round's rate."""
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
    """Names from one campaign, and counts of all items from another, of the same devices."""

    tasks_per_device: ClassVar[int] = 2
    names: HeavyHitterDesign
    counts: FrequencyDesign

    def check(self) -> None:
        require(
            self.names.secure == self.counts.secure,
            "names and counts must have the same secure sum; they differ",
        )

    @property
    def devices(self) -> int:
        return self.names.devices

    @property
    def rounds(self) -> int:
        return self.names.rounds

    @property
    def items_per_device(self) -> int:
        return self.names.items_per_device

    @property
    def task_count(self) -> int:
        return 2 * self.rounds

    def search(self) -> HeavyHitterDesign:
        return self.names

    @property
    def least_noise(self) -> float | None:
        return self.counts.least_noise

    def cohort_size(self, task: Task) -> float:
        if task.campaign == digest(self.names):
            return self.names.devices_per_round
        return self.counts.cohort_size(task)

    def item_keys(self, task: Task) -> ItemKeys | None:
        """The keys of items in a sketch of counts; a table of names has them itself."""
        if task.campaign == digest(self.names):
            return None
        keys = self.names.keys
        assert isinstance(keys, TextKeys | WordKeys)  # studies have no others
        return keys

    def with_seed(self, rng: Rng) -> Seeded:
        names = replace(self.names, seed=public_seed(rng))
        counts = replace(self.counts, seed=public_seed(rng))
        return Seeded(HistogramDesign(names=names, counts=counts), names.seed, draw_secret(rng))

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
        names, estimates = campaign.names.heavy_hitters(), campaign.counting.estimates()
        order = np.argsort(-estimates.counts, kind="stable")
        devices, least = max(participation.devices, estimates.respondents), plan.study.threshold
        above = None if least is None else least * estimates.respondents / devices
        low, high = estimates.interval(devices, above=above)
        about = campaign.names.about(participation)
        about["parameters"] |= {"counts_decoder": estimates.decoder}
        return discovered_release(
            plan,
            participation,
            items=names.items.take(pa.array(order)),
            counts=estimates.counts[order],
            standard_error=estimates.standard_error[order],
            interval=(low[order], high[order]),
            respondents=estimates.respondents,
            **about,
        )

    def charge_of(self, task: Task) -> PlannedLoss:
        """One plan for both tasks of a device: it is asked for names once and for counts once."""
        parts = (self.names.tasks()[0], self.counts.main_task(0))
        losses = tuple(part.loss for part in parts)
        return PlannedLoss(loss=task.loss, plan=digest(self), losses=losses)

    def parameters(self) -> dict[str, Any]:
        counts = self.counts.parameters()
        return self.names.parameters() | {f"counts_{name}": counts[name] for name in counts}


def most_in_round(expected: int, *, masked: bool) -> int:
    """The largest number of tables in a sum over a cohort of about `expected` devices."""
    return expected + 1 if masked else most_devices(expected)


def slack(items_per_device: int, statistic: float, failure: float) -> int:
    """The number of keys that a table may have beyond its noised count of keys, except with
    probability `failure` / 4."""
    return math.ceil(items_per_device / statistic * math.log(4 / failure))


def most_sampled(items: int, rate: float, *, tail_bits: int = TAIL_BITS) -> int:
    """A number of items that a sample exceeds with probability at most 2**-tail_bits, by
    Bernstein's inequality."""
    if rate == 1:
        return items
    mean, log = items * rate, tail_bits * math.log(2)
    return min(items, math.ceil(mean + math.sqrt(2 * mean * log) + log))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Round:
    """The decoder's result of one round."""

    listing: Listing
    rate: float
    devices: int
    is_used: bool  # whether the release may use it
    stuck: NoisedSum | None = None  # an incomplete table, to be read again

    @property
    def read_rate(self) -> float:
        """The share of the devices' items that was listed."""
        listed, inserted = int(self.listing.counts.sum()), self.listing.inserted
        return self.rate * listed / inserted if inserted else self.rate


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HeavyHitters:
    """Items with the number of respondents that hold them, most common first."""

    items: pa.Array
    counts: F64
    standard_error: F64
    sample_counts: I64  # with noise
    noise: NoiseLaw  # on each sample count
    least_in_sample: int  # items with a smaller sample count are not listed
    rate: float  # sampling rate of the counts; the mean over rounds if they differ
    mechanism: ListedAbove  # at that rate
    least: float  # items with a smaller estimate are not listed
    respondents: int
    unread: int  # number of rounds whose tables could not be used
    listed: float  # share of the sample that was listed, if tables may be incomplete

    def interval(self, devices: int) -> tuple[F64, F64]:
        """95% intervals for counts over all `devices`, given that an item is listed."""
        if not self.respondents:
            return np.zeros(0), np.zeros(0)
        return of_sums(
            self.sample_counts, self.noise, devices=devices, respondents=self.respondents,
            rate=self.rate, above=self.least_in_sample, per_device=self.mechanism.most_per_item,
        )  # fmt: skip

    def detectable(self, devices: int) -> int:
        """The smallest count, over all `devices`, that is listed with a probability of 95%."""
        if not self.respondents:
            return 0
        answering = min(self.respondents / devices, 1.0)
        return self.mechanism.detectable(self.least, answering=answering)

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"HeavyHitters({len(self)} items, {self.respondents:,} devices)"


@dataclass(slots=True, repr=False)
class HeavyHitterCampaign(Campaign):
    """Asks one round after another, at a rate that may adapt, and makes the list at the end."""

    design: HeavyHitterDesign
    rng: Rng  # the decoder's own, for the noise on the list
    least: float = 0.0  # items with a smaller estimate are not listed
    rate: float = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    _absorbed: bytes = b""  # digest of all answers so far, to which the decoder's noise is bound
    _names: U64 | None = None  # keys of all rounds
    _target: float = field(init=False)
    _list: HeavyHitters | None = None

    def __post_init__(self) -> None:
        self.rate = self.design.mechanism.rate
        self._target = self.design.target

    def next_task(self) -> Task | None:
        if len(self.rounds) == self.design.rounds:
            return None
        return self.design.task(len(self.rounds), self.rate)

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        sketch = answer.task.sketch
        assert isinstance(sketch, InvertibleSketch)  # `task` has no other
        self._absorbed = digest_of(answer, self._absorbed)  # before any noise is drawn
        partial = self.design.partial
        listing = sketch.list(answer.table, candidates=self._names if partial else None)
        distinct = self._distinct(listing)
        most = math.inf if self.design.most_keys is None else self.design.most_keys
        self.rounds.append(
            Round(
                listing=listing,
                rate=self.rate,
                devices=answer.count,
                is_used=partial or (listing.is_complete and distinct <= most),
                stuck=answer if partial and not listing.is_complete else None,
            )
        )
        if partial:
            self._learn(listing)
        if self.design.adaptive:
            self.rate = self._next_rate(listing, distinct)

    def heavy_hitters(self) -> HeavyHitters:
        """The list, at the end. It is made only once, since its noise is charged once."""
        if self._list is None:
            if self.next_task() is not None and self.design.mechanism.epsilon is not None:
                raise SpecError(
                    f"a private list needs the answers of all {self.design.rounds} rounds; "
                    f"got {len(self.rounds)}"
                )
            result = self._make_list()
            if self.design.mechanism.epsilon is None:
                return result
            self._list = result
        return self._list

    def about(self, participation: Participation) -> dict[str, Any]:
        """Parameters and notes for a release of the list."""
        design, heavy_hitters = self.design, self.heavy_hitters()
        detectable = heavy_hitters.detectable(max(participation.devices, heavy_hitters.respondents))
        parameters: dict[str, Any] = {
            "detectable_count": detectable,
            "sampling_rate": heavy_hitters.rate,
            "rounds_not_listed": heavy_hitters.unread,
        }
        if design.partial:
            parameters |= {"listed_share": heavy_hitters.listed}
        notes = [
            detectable_note(
                design.fitting(), detectable, participation, copies=design.mechanism.copies
            )
        ]
        if heavy_hitters.unread:  # the guarantee does not cover how full the tables were
            advice = "set a larger bytes_per_device"
            if design.rounds > 1:
                advice += ", or more rounds"
            notes.append(
                f"{heavy_hitters.unread} of {design.rounds} tables could not be listed completely "
                f"and were not used; {advice}"
            )
        return {"parameters": parameters, "notes": notes}

    def _make_list(self) -> HeavyHitters:
        self._read_again()
        used = [part for part in self.rounds if part.is_used and part.read_rate > 0]
        items, counts, errors, sample_counts = self._released(used)
        mechanism = self.design.mechanism
        is_private = mechanism.epsilon is not None
        rates = [part.rate if is_private else part.read_rate for part in used]
        rate = min(rates, default=self.rate)  # private samples are reduced to it
        if not is_private and used:
            devices = [part.devices for part in used]
            rate = min(float(np.average(rates, weights=devices)), 1.0)
        threshold = mechanism.threshold if is_private else 1
        inserted = sum(part.listing.inserted for part in used)
        listed = sum(int(part.listing.counts.sum()) for part in used)
        return HeavyHitters(
            items=items,
            counts=counts,
            standard_error=errors,
            sample_counts=sample_counts,
            noise=mechanism.list_law,
            least_in_sample=max(threshold, math.ceil(self.least * rate - 1e-9)),
            rate=rate,
            mechanism=replace(mechanism, rate=rate),
            least=self.least,
            respondents=sum(part.devices for part in used),
            unread=len(self.rounds) - len(used),
            listed=listed / inserted if inserted else 1.0,
        )

    def _learn(self, listing: Listing) -> None:
        every = listing.keys if self._names is None else np.r_[self._names, listing.keys]
        self._names = np.unique(every, axis=0)

    def _read_again(self) -> None:
        """Read incomplete tables again, with the names of all rounds."""
        for place, part in enumerate(self.rounds):
            if part.stuck is None:
                continue
            sketch = part.stuck.task.sketch
            assert isinstance(sketch, InvertibleSketch)  # `task` has no other
            listing = sketch.list(part.stuck.table, candidates=self._names)
            self._learn(listing)
            stuck = None if listing.is_complete else part.stuck
            self.rounds[place] = replace(part, listing=listing, stuck=stuck)

    def _released(self, used: list[Round]) -> tuple[pa.Array, F64, F64, I64]:
        """Items, counts, standard errors and sample counts, largest first."""
        if not used:
            nothing = np.zeros((0, limbs(self.design.keys.bits)), dtype=np.uint64)
            empty = np.zeros(0)
            return self.design.keys.items(nothing)[0], empty, empty, empty.astype(np.int64)
        every, first, place = np.unique(
            np.concatenate([part.listing.keys for part in used]),
            axis=0, return_index=True, return_inverse=True,
        )  # fmt: skip
        place, size = place.reshape(-1), len(every)
        is_private = self.design.mechanism.epsilon is not None
        estimate = self._private_counts if is_private else self._all_counts
        counts, variances, sample_counts = estimate(used, place, size)
        listed = np.flatnonzero(counts >= max(self.least, _TINY))
        order = listed[np.argsort(-counts[listed], kind="stable")]
        items = pa.chunked_array([part.listing.items for part in used])
        return (
            items.take(pa.array(first[order])).combine_chunks(),
            counts[order],
            np.sqrt(variances[order]),
            sample_counts[order],
        )

    def _all_counts(self, used: list[Round], place: I64, size: int) -> tuple[F64, F64, I64]:
        """Estimates by each round's own rate; the listed part of an incomplete table is treated as
        a random sample."""
        times = np.concatenate([np.full(len(part.listing), 1 / part.read_rate) for part in used])
        listed = np.concatenate([part.listing.counts for part in used])
        counts = times * listed
        total = np.bincount(place, counts, minlength=size).astype(np.float64)
        variance = np.bincount(place, counts * (times - 1), minlength=size).astype(np.float64)
        return total, variance, np.bincount(place, listed, minlength=size).astype(np.int64)

    def _private_counts(self, used: list[Round], place: I64, size: int) -> tuple[F64, F64, I64]:
        """Private counts, with all rounds reduced to one rate; zero where none may be released."""
        mechanism = replace(self.design.mechanism, rate=min(part.rate for part in used))
        coins = self._own("coins")
        samples = [mechanism.thin(part.listing.counts, part.rate, rng=coins) for part in used]
        exact = np.bincount(place, np.concatenate(samples), minlength=size).astype(np.int64)
        present = np.flatnonzero(exact)  # without items that thinning removed
        noised, may = mechanism.release(exact[present], rng=self._own("counts", exact))
        counts, variances, sample_counts = (
            np.zeros(size),
            np.zeros(size),
            np.zeros(size, dtype=np.int64),
        )
        sample_counts[present[may]] = noised[may]
        counts[present[may]] = noised[may] / mechanism.rate
        variances[present] = (mechanism.noise_stddev / mechanism.rate) ** 2
        return counts, variances + np.maximum(counts, 0) * (1 / mechanism.rate - 1), sample_counts

    def _distinct(self, listing: Listing) -> float:
        """The number of distinct keys in a table, with the mechanism's noise for that statistic."""
        statistic = self.design.mechanism.statistic
        if statistic == 0 or not listing.is_complete:
            return listing.keys_estimate
        scale = self.design.items_per_device / statistic
        return len(listing) + int(discrete_laplace(scale, (1,), self._own("keys"))[0])

    def _own(self, purpose: str, *noised: I64) -> Rng:
        return bound_to(self.rng, purpose, self._absorbed, *noised)

    def _next_rate(self, listing: Listing, distinct: float) -> float:
        """The rate of the next round.

        Paper 001's algorithm 4 goes half the way to the rate that would give the target number of
        keys, if keys were proportional to the rate.

        Without a guarantee we go the whole way, and with the right power: the number of distinct
        keys in a sample grows with its size to the power of the share of keys with count one (Good
        and Turing). An incomplete table shows too little for that. The target load of the next
        table depends on whether the last one was complete.
        """
        design, rate = self.design, self.rate
        if design.mechanism.epsilon is not None and not self.rounds[-1].is_used:
            return rate / 2  # too full, and the guarantee does not cover by how much
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
        return min(1.0, rate / min(max(step, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE))


def bound_to(rng: Rng, purpose: str, absorbed: bytes, *noised: I64) -> Rng:
    """The decoder's randomness for one purpose. It repeats only if all answers so far (`absorbed`,
    their digest) and the noised numbers are the same (docs/proofs/listing.md)."""
    data = (np.ascontiguousarray(part, dtype="<i8").tobytes() for part in noised)
    return bound(rng, purpose, absorbed, *data)


def digest_of(answer: NoisedSum, before: bytes) -> bytes:
    """A digest of an answer (task, number of devices and table) and of all answers before it."""
    table = np.ascontiguousarray(answer.table, dtype="<i8").tobytes()
    parts = (before, answer.task.id.encode(), str(answer.count).encode(), table)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


@dataclass(slots=True, repr=False)
class HistogramCampaign(Campaign):
    """Asks for names, lists those that may be released, and asks for their counts."""

    design: HistogramDesign
    rng: Rng  # the decoder's own, for the noise on the names
    least: float = 0.0
    names: HeavyHitterCampaign = field(init=False)
    _counting: FrequencyCampaign | None = None

    def __post_init__(self) -> None:
        self.names = HeavyHitterCampaign(self.design.names, self.rng, least=self.least)

    @property
    def counting(self) -> FrequencyCampaign | None:
        """The second campaign, when the first is over and its list is not empty."""
        if self._counting is None and self.names.next_task() is None:
            names = self.names.heavy_hitters()
            if len(names):
                self._counting = FrequencyCampaign(self.design.counts, names.items)
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

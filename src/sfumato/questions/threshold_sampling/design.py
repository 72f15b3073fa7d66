"""Lists by a majority of threshold samples, and histograms of the listed items: paper 001's
algorithms 1 to 3.

A device answers once, with one table (`SampledTables`). What a table of the decoder lists is
released as it is, so there is no promise of privacy.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from sfumato.arrays import F64, I64, U64
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, NoisedSum
from sfumato.flow.secure_sum import SecureSum, parameters_of, sum_task
from sfumato.flow.task import Task, bits_for
from sfumato.privacy import ListedAbove, Rng
from sfumato.privacy.intervals import of_estimates, of_votes
from sfumato.privacy.listing import DETECTION_SHARE, without_promise
from sfumato.questions import guarantees
from sfumato.questions.answers import check_finished, detectable_note, discovered_release
from sfumato.questions.frequencies.design import Estimates, FrequencyCampaign, FrequencyDesign
from sfumato.questions.heavy_hitters.design import ListDefaults, most_in_round
from sfumato.questions.question import Participation, Plan, Seeded, public_seed
from sfumato.sketch import CountSketch, InvertibleSketch, SampledTables, TextKeys, WordKeys
from sfumato.sketch.keys import limbs
from sfumato.spec import digest, require, spec


@spec("threshold_sampling_design")
class ThresholdSamplingDesign(ListDefaults):
    """A sized majority of threshold samples, for `ThresholdSamplingCampaign`."""

    algorithm: ClassVar[str] = "threshold_sampling"
    has_secret: ClassVar[bool] = False
    keys: TextKeys | WordKeys
    devices: int
    rounds: int
    rows: int
    width: int
    count_bits: int
    value_bits: int
    check_bits: int
    seed: int
    items_per_device: int
    copies: bool
    repetitions: int
    sampling_threshold: float
    unread: float  # chance that the table of a sampled item cannot be listed
    counts: FrequencyDesign | None = None  # of the sketch of all items, for a histogram
    promise: str = ""  # what holds of the answer, in words
    secure: SecureSum | None = None

    def check(self) -> None:
        require.at_least(
            1, devices=self.devices, rounds=self.rounds, items_per_device=self.items_per_device
        )
        require(
            self.counts is None or self.counts.secure == self.secure,
            "names and counts must have the same secure sum; they differ",
        )
        _ = self.sketch(0)  # checks the sizes

    @property
    def mechanism(self) -> ListedAbove:
        return without_promise(1.0, self.items_per_device, copies=self.copies)

    def with_seed(self, rng: Rng) -> Seeded:
        seed, counts = public_seed(rng), self.counts
        if counts is not None:
            counts = replace(counts, seed=public_seed(rng))
        return Seeded(replace(self, seed=seed, counts=counts), seed)

    def campaign(self, plan: Plan, **context: Any) -> ThresholdSamplingCampaign:
        return ThresholdSamplingCampaign(self)

    def sketch(self, round: int) -> SampledTables:
        counts = None if self.counts is None else self.counts.sketch(round)
        assert counts is None or isinstance(counts, CountSketch)  # counts are never one_hot
        most = most_in_round(self.devices_per_round, masked=self.secure is not None)
        return SampledTables(
            tables=InvertibleSketch(
                keys=self.keys, rows=self.rows, width=self.width, count_bits=self.count_bits,
                value_bits=self.value_bits, check_bits=self.check_bits, seed=self.seed,
                round=round, copies=self.copies,
            ),
            repetitions=self.repetitions,
            threshold=self.sampling_threshold,
            counts=counts,
            count_bits=0 if counts is None else bits_for(most * self.items_per_device),
        )  # fmt: skip

    def task(self, round: int) -> Task:
        return sum_task(
            self.secure,
            sketch=self.sketch(round),
            mechanism=self.mechanism,
            campaign=digest(self),
            cohort=f"round {round}",
            devices=self.devices_per_round,
            items_per_device=self.items_per_device,
        )

    def tasks(self) -> list[Task]:
        return [self.task(round) for round in range(self.rounds)]

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {
            "items_per_device": self.items_per_device,
            "count": "copies" if self.copies else "devices",
            "sampling_threshold": self.sampling_threshold,
            "repetitions": self.repetitions,
            "rows": self.rows,
            "width": self.width,
            "cell_bits": self.sketch(0).tables.cell_bits,
            "key_bits": self.keys.bits,
        }
        if self.counts is not None:
            sizes |= {
                "counts_rows": self.counts.rows,
                "counts_width": self.counts.width,
                "counts_mode": self.counts.mode,
            }
        if self.secure is not None:
            sizes |= parameters_of(self.task(0))
        return sizes | {"rounds": self.rounds}

    def detectable(self, answering: float = 1.0) -> int:
        """The smallest count that is listed with a probability of 95%; a device answers with
        probability `answering`."""
        from scipy import stats

        needed = guarantees.votes_needed(self.repetitions)

        def chance(count: int) -> float:
            missed = self.unread
            if self.sampling_threshold > 1:
                missed += float(np.exp(-count * answering / self.sampling_threshold))
            listed = 1 - min(missed, 1.0)
            return float(stats.binom.sf(needed - 1, self.repetitions, listed))

        high = 1
        while chance(high) < DETECTION_SHARE:
            high *= 2
        return max(1, bisect_left(range(high), DETECTION_SHARE, key=chance))

    def answer(
        self, campaign: ThresholdSamplingCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        majority, respondents = campaign.majority(), campaign.respondents
        devices = max(participation.devices, respondents)
        detectable = self.detectable(min(respondents / devices, 1.0))
        notes = [
            detectable_note(self.fitting(), detectable, participation, copies=self.copies),
            *([self.promise] if self.promise else []),
        ]
        parameters: dict[str, Any] = {
            "detectable_count": detectable,
            "tables_not_listed": campaign.unread,
        }
        if self.counts is not None and len(majority.items):
            estimates = campaign.estimates(majority.items)
            counts, error = estimates.counts, estimates.standard_error
            interval = estimates.interval(devices)
            parameters |= {"counts_decoder": estimates.decoder}
        else:
            counts, error, interval = (
                majority.counts,
                majority.standard_error,
                majority.interval(devices),
            )
        order = np.argsort(-counts, kind="stable")
        return discovered_release(
            plan,
            participation,
            items=majority.items.take(pa.array(order)),
            counts=counts[order],
            standard_error=error[order],
            interval=(
                np.minimum(interval[0], counts * devices / max(respondents, 1))[order],
                np.maximum(interval[1], counts * devices / max(respondents, 1))[order],
            ),
            respondents=respondents,
            parameters=parameters,
            notes=notes,
            per_device=self.mechanism.most_per_item,
            least=-np.inf,  # the majority decides
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Majority:
    """Items in at least half of the lists, with what their samples stand for."""

    items: pa.Array
    totals: F64  # over all repetitions
    votes: I64
    design: ThresholdSamplingDesign
    respondents: int

    @property
    def counts(self) -> F64:
        return self.totals / self.design.repetitions

    @property
    def standard_error(self) -> F64:
        """An upper bound; it is exact if devices have one copy each."""
        slope = (self.design.sampling_threshold - 1) / self.design.repetitions
        return np.sqrt(self.counts * slope)

    def interval(self, devices: int) -> tuple[F64, F64]:
        """95% intervals for counts over all `devices`, given that an item is in enough samples.

        Nobody knows how many copies a holder has. With one each, the law is that of devices; with
        several, all repetitions together are one sample of as many times the copies, at the rate
        1/sampling_threshold, by a normal law. So an interval for copies spans both. Devices that do
        not answer are missing from every repetition, so their part of the variance counts so many
        times."""
        if not self.respondents:
            return np.zeros(0), np.zeros(0)
        times, rate = self.design.repetitions, 1 / self.design.sampling_threshold
        answering, each = self.respondents / devices, self.design.mechanism.most_per_item
        needed = guarantees.votes_needed(times)
        if rate < 1:
            alone = of_votes(
                np.rint(self.totals * rate).astype(np.int64), devices=devices * each,
                respondents=self.respondents * each, rate=rate, repetitions=times, needed=needed,
            )  # fmt: skip
            if each == 1:
                return alone
        per_device = 1
        if answering < 1:
            missing = times * each * (1 - answering) * rate
            per_device = int(np.ceil((1 - rate + missing) / (1 - answering * rate)))
        low, high = of_estimates(
            self.totals, 0.0, devices=times * devices, respondents=times * self.respondents,
            rate=rate, per_device=per_device, above=needed / rate,
        )  # fmt: skip
        low, high = low / times, high / times
        if rate < 1:
            low, high = np.minimum(low, alone[0]), np.maximum(high, alone[1])
        return low, high


@dataclass(slots=True, repr=False)
class ThresholdSamplingCampaign(Campaign):
    """Asks one round after another, lists every table, and counts votes at the end."""

    design: ThresholdSamplingDesign
    respondents: int = 0
    unread: int = 0  # tables that could not be listed completely, and count for nothing
    _waiting: list[Task] = field(init=False)
    _keys: list[U64] = field(default_factory=list)  # with the number of the repetition
    _amounts: list[F64] = field(default_factory=list)
    _counted: list[tuple[I64, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = self.design.tasks()

    def next_task(self) -> Task | None:
        return self._waiting[0] if self._waiting else None

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        sketch = self._waiting.pop(0).sketch
        assert isinstance(sketch, SampledTables)  # `task` has no other
        for repetition, listing in enumerate(sketch.lists(answer.table)):
            if not listing.is_complete:
                self.unread += 1
                continue
            label = np.full((len(listing), 1), repetition, dtype=np.uint64)
            self._keys.append(np.concatenate([listing.keys, label], axis=1))
            self._amounts.append(sketch.amounts(listing))
        if sketch.counts is not None:
            self._counted.append((sketch.counted(answer.table), answer.count))
        self.respondents += answer.count

    def majority(self) -> Majority:
        """The items in at least half of the repetitions' lists."""
        size = limbs(self.design.keys.bits) + 1
        pairs = np.concatenate([np.zeros((0, size), dtype=np.uint64), *self._keys])
        amounts = np.concatenate([np.zeros(0), *self._amounts])
        pairs, place = np.unique(pairs, axis=0, return_inverse=True)  # one vote for all rounds
        of_pairs = np.bincount(place.reshape(-1), amounts, minlength=len(pairs))
        keys, place, votes = np.unique(
            pairs[:, :-1], axis=0, return_inverse=True, return_counts=True
        )
        totals = np.bincount(place.reshape(-1), of_pairs, minlength=len(keys))
        often = np.flatnonzero(votes >= guarantees.votes_needed(self.design.repetitions))
        return Majority(
            items=self.design.keys.items(keys[often])[0],
            totals=totals[often].astype(np.float64),
            votes=votes[often],
            design=self.design,
            respondents=self.respondents,
        )

    def estimates(self, items: pa.Array) -> Estimates:
        """Counts of these items by the sketch of all items."""
        assert self.design.counts is not None  # otherwise nobody asks
        counting = FrequencyCampaign(self.design.counts, items)
        for task, (table, count) in zip(self.design.counts.tasks(), self._counted, strict=True):
            counting.absorb(NoisedSum(task, table, count))
        return counting.estimates()

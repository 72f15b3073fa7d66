"""A sized question to one batch of devices: sketch, mechanism, aggregation and batch rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sfumato.arrays import U8
from sfumato.errors import TaskError
from sfumato.flow.aggregation import Aggregation, Masked, Sparse
from sfumato.privacy import (
    ApproximateLoss,
    DirectResponse,
    ListedAbove,
    Loss,
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    Rng,
)
from sfumato.privacy.randomizers import Randomizer, no_item
from sfumato.privacy.tallies import Tally
from sfumato.secagg.round import MaskedRound
from sfumato.sketch import (
    InvertibleSketch,
    ItemCounts,
    Norms,
    OneHot,
    SampledTables,
    Sketch,
    SparseSketch,
)
from sfumato.spec import Requirement, digest, spec

require = Requirement(TaskError)


class AnyTask(Protocol):
    """The interface of every task, whatever its devices send."""

    @property
    def id(self) -> str: ...

    @property
    def campaign(self) -> str: ...

    @property
    def cohort(self) -> str: ...

    @property
    def message_bytes(self) -> int:
        """The largest size of a device's message."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether devices send randomised records; otherwise they send tables, which are added."""
        ...

    @property
    def is_masked(self) -> bool:
        """Whether devices answer in a masked round instead of sending reports."""
        ...

    @property
    def epsilon(self) -> float | None:
        """The epsilon of one record; None if the collector is trusted with tables."""
        ...

    @property
    def items_per_report(self) -> int:
        """The largest number of items in a report."""
        ...

    @property
    def loss(self) -> Loss:
        """The privacy loss of one device."""
        ...

    @property
    def most_reports(self) -> int | None:
        """The largest number of reports; None if there is no limit."""
        ...

    @property
    def categories(self) -> int | None:
        """The size of the dictionary, if values are places in one."""
        ...

    def takes_categories(self, keys: object = None) -> bool:
        """Whether values are places in a dictionary, which devices then need. `keys` are those of
        the task's offer."""
        ...


@spec("task")
class Task:
    """A question to one batch of devices. Its id is the digest of its JSON.

    The id covers seed, sizes, noise and cohort, so tables that do not belong together are never
    added. All checks that involve two of the parts are here, and combinations that protect nobody
    are refused: noise in shares needs an aggregation that hides the shares.
    """

    is_local: ClassVar[bool] = False
    epsilon: ClassVar[None] = None
    sketch: Sketch
    mechanism: Mechanism
    aggregation: Aggregation
    campaign: str = ""  # a device is in at most one cohort of a campaign
    cohort: str  # the devices to ask
    items_per_device: int = 1
    min_count: int = 1  # with fewer devices, nothing is released
    max_count: int  # with more devices, the sum could wrap

    def check(self) -> None:
        require(self.items_per_device >= 1, "items_per_device must be at least 1")
        require(
            1 <= self.min_count <= self.max_count,
            f"counts must be 1 <= min_count <= max_count; got {self.min_count}, {self.max_count}",
        )
        require(
            self.aggregation.hides_summands or not self.mechanism.in_shares,
            "noise in shares protects only a sum whose summands are hidden; "
            "use noise at the release, or masked aggregation",
        )
        require(
            self.min_count >= self.mechanism.least_count,
            f"this noise needs a min_count of at least {self.mechanism.least_count}; "
            f"got {self.min_count}",
        )
        if isinstance(self.aggregation, Masked) and isinstance(self.mechanism, NoiseInShares):
            corrupt = math.floor(self.aggregation.corrupt * self.max_count + 1e-9)
            require(
                self.mechanism.colluders >= corrupt,
                f"{corrupt} of {self.max_count} devices may reveal their share of the noise; "
                f"the noise allows for {self.mechanism.colluders}",
            )
        if isinstance(self.aggregation, Sparse) or isinstance(self.sketch, ItemCounts):
            self._check_sparse()
        if isinstance(self.sketch, InvertibleSketch | ItemCounts | SampledTables):
            self._check_listed()
            return
        require(
            not isinstance(self.mechanism, ListedAbove),
            "only an invertible sketch or counts of items can be listed; add noise to this one",
        )
        largest = largest_cell(self.sketch, self.items_per_device) * self.max_count
        largest += self.mechanism.reach(self.max_count, self.cells)
        require(
            2 * largest < 2**self.aggregation.modulus_bits,
            f"modulus_bits must hold sums of ±{largest}: at least {bits_for(largest)}; "
            f"got {self.aggregation.modulus_bits}",
        )

    def _check_sparse(self) -> None:
        """Check a task whose devices send the numbers of their values."""
        sketch, aggregation = self.sketch, self.aggregation
        if not (isinstance(sketch, SparseSketch) and isinstance(aggregation, Sparse)):
            raise TaskError(
                "sparse aggregation is for sketches whose cells have numbers, and items of an open "
                f"domain need it; got {type(aggregation).__name__} with {type(sketch).__name__}"
            )
        entries, bits = self.items_per_device, sketch.entry_bits
        require(
            (aggregation.entries, aggregation.entry_bits) == (entries, bits),
            f"reports of this task must have {entries} entries of {bits} bits; "
            f"got {aggregation.entries} of {aggregation.entry_bits}",
        )

    def _check_listed(self) -> None:
        """Check a task whose table is listed."""
        require(
            isinstance(self.mechanism, ListedAbove),
            "a table with noise cannot be listed: a key with noise is another key. Make the list "
            "private instead (ListedAbove, which trusts the decoder), or search by prefixes, whose "
            "sums may have noise in shares",
        )
        word_bits = self.sketch.word_bits  # words that are residues and wrap by design
        if word_bits is not None:
            require(
                self.aggregation.modulus_bits == word_bits,
                f"modulus_bits must be the sketch's own {word_bits}; "
                f"got {self.aggregation.modulus_bits}",
            )
            require(
                not getattr(self.aggregation, "prime", False),
                "this sketch divides modulo a power of two; prime must be false",
            )
        require(
            not isinstance(self.sketch, SampledTables)
            or getattr(self.mechanism, "epsilon", 0.0) is None,
            "tables of several samples have no list with a promise; set epsilon to None",
        )
        limit = getattr(self.mechanism, "items_per_device", self.items_per_device)
        require(
            self.items_per_device <= limit,
            f"the list is private for {limit} items per device; the task takes "
            f"{self.items_per_device}",
        )
        require(
            getattr(self.sketch, "copies", False) == getattr(self.mechanism, "copies", False),
            "sketch and list must agree on whether copies of an item count; they differ",
        )

    @property
    def id(self) -> str:
        return digest(self)

    @property
    def is_masked(self) -> bool:
        return isinstance(self.aggregation, Masked)

    @property
    def items_per_report(self) -> int:
        return self.items_per_device

    @property
    def most_reports(self) -> int | None:
        """As many as a sum can hold; a masked round is bounded by its cohort."""
        return None if self.is_masked else self.max_count

    @property
    def categories(self) -> int | None:
        return self.sketch.categories if isinstance(self.sketch, OneHot) else None

    def takes_categories(self, keys: object = None) -> bool:
        return self.categories is not None and keys is None

    @property
    def contribution(self) -> Norms:
        return self.sketch.sensitivity(self.items_per_device)

    @property
    def loss(self) -> Loss:
        return self.mechanism.loss(self.contribution)

    @property
    def noise_multiplier(self) -> float | None:
        """The standard deviation of the table's noise over the L2 norm of one contribution, with
        the fewest devices and without those that may be corrupt. None if the noise is not on the
        table."""
        norm = self.contribution.l2
        if isinstance(self.mechanism, NoiseInShares):
            return self.mechanism.scale / norm
        if isinstance(self.mechanism, NoiseAtRelease):
            return self.mechanism.stddev(1) / norm
        return 0.0 if isinstance(self.mechanism, NoNoise) else None

    @property
    def cells(self) -> int:
        return math.prod(self.sketch.shape)

    @property
    def message_bits(self) -> int:
        return self.aggregation.message_bits(self.cells)

    @property
    def message_bytes(self) -> int:
        return -(-self.message_bits // 8)

    def masked_round(self, cohort: int, nonce: str) -> MaskedRound:
        """The round in which `cohort` devices add their tables; use each `nonce` only once."""
        if not isinstance(self.aggregation, Masked):
            raise TaskError("only a task with masked aggregation has masked rounds")
        if not self.min_count <= cohort <= self.max_count:
            raise TaskError(
                f"a cohort of this task must have {self.min_count} to {self.max_count} devices; "
                f"got {cohort}"
            )
        return MaskedRound(
            task=self.id,
            cells=self.cells,
            modulus_bits=self.aggregation.modulus_bits,
            cohort=cohort,
            corrupt=self.aggregation.corrupt,
            dropout=1 - self.min_count / cohort,
            mode=self.aggregation.mode,
            nonce=nonce,
            security_bits=self.aggregation.security_bits,
            prime=self.aggregation.prime,
        )


class RecordTask(ABC):
    """A task whose devices send randomised records."""

    __slots__ = ()
    is_local: ClassVar[bool] = True
    is_masked: ClassVar[bool] = False
    most_reports: ClassVar[None] = None
    records_per_report: int

    @property
    @abstractmethod
    def source(self) -> Any:
        """The randomizer of its records, with their epsilon, length and validity."""

    @property
    def id(self) -> str:
        return digest(self)

    @property
    def epsilon(self) -> float:
        epsilon: float = self.source.epsilon
        return epsilon

    @property
    def record_bytes(self) -> int:
        size: int = self.source.record_bytes
        return size

    @property
    def message_bytes(self) -> int:
        return self.records_per_report * self.record_bytes

    @property
    def items_per_report(self) -> int:
        return self.records_per_report

    @property
    def loss(self) -> ApproximateLoss:
        """The loss of all records that a device sends on one day; the epsilons add up."""
        return ApproximateLoss(epsilon=self.records_per_report * self.epsilon, delta=0.0)

    def randomize(self, values: npt.NDArray[Any], *, rng: Rng) -> U8:
        """One record per value: (n, record_bytes)."""
        records: U8 = self.source.randomize(values, rng=rng)
        return records

    @property
    def categories(self) -> int | None:
        return None

    def takes_categories(self, keys: object = None) -> bool:
        return self.categories is not None


@spec("local_task")
class LocalTask(RecordTask):
    """A question to devices that trust nobody: records of one randomizer. Its id is its digest.

    A new epoch of the same study is another task with other hash functions, so collisions rotate.
    """

    randomizer: Randomizer
    campaign: str = ""
    cohort: str  # the devices to ask
    records_per_report: int = 1  # always this many, however many items a device has
    min_count: int = 1  # with fewer records, nothing is released

    def check(self) -> None:
        require.at_least(1, records_per_report=self.records_per_report, min_count=self.min_count)

    @property
    def source(self) -> Randomizer:
        return self.randomizer

    def values(self, items: Any) -> npt.NDArray[Any]:
        """Items, or categories of a direct response, as values for the randomizer."""
        return self.randomizer.values(items)

    def none(self, count: int) -> npt.NDArray[Any]:
        """`count` values that stand for "none"."""
        return np.repeat(no_item(self.randomizer), count)

    def tallies(self) -> list[Tally]:
        """Empty tallies for its records."""
        return [Tally(self.randomizer)]

    def fold(self, records: U8, tallies: list[Tally]) -> int:
        """Add the valid records, and return the number of invalid ones."""
        return tallies[0].fold(records)

    @property
    def categories(self) -> int | None:
        randomizer: object = self.randomizer
        return randomizer.categories if isinstance(randomizer, DirectResponse) else None


def most_devices(expected: int) -> int:
    """An upper limit on the size of a random cohort of about `expected` devices: seven standard
    deviations more."""
    return expected + max(64, expected // 16, 7 * math.isqrt(expected))


def largest_cell(sketch: Sketch, items_per_device: int) -> int:
    """The largest change of a cell by one device."""
    largest = sketch.sensitivity(items_per_device).largest
    return items_per_device if largest is None else largest


def bits_for(largest: int) -> int:
    """The bits of the least modulus that distinguishes all sums from −largest to largest."""
    return max(2, (2 * largest).bit_length())

"""One fully sized question to one batch of devices: sketch, mechanism, aggregation, batch rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sfumato.errors import TaskError
from sfumato.flow.aggregation import Aggregation, Masked
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
from sfumato.sketch import Norms, OneHot, Sketch
from sfumato.spec import digest, require, spec

U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]


class AnyTask(Protocol):
    """What every task has, whatever its devices send."""

    @property
    def id(self) -> str: ...

    @property
    def campaign(self) -> str: ...

    @property
    def cohort(self) -> str: ...

    @property
    def message_bytes(self) -> int:
        """How long what a device sends is, at most."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether devices send randomised records; else they send tables, which are added."""
        ...

    @property
    def is_masked(self) -> bool:
        """Whether it is answered in a masked round, and not in reports."""
        ...

    @property
    def epsilon(self) -> float | None:
        """What one record costs a device; None where the collector is trusted with a table."""
        ...

    @property
    def items_per_report(self) -> int:
        """How many items one report holds, at most."""
        ...

    @property
    def loss(self) -> Loss:
        """What one device loses by its answer."""
        ...

    @property
    def most_reports(self) -> int | None:
        """Reports that there is room for; None for any number."""
        ...

    @property
    def categories(self) -> int | None:
        """How many there are, where values are given by their place in a dictionary."""
        ...

    def takes_categories(self, keys: object = None) -> bool:
        """Whether values are given by their place in the dictionary, so that a device needs it.
        `keys` are those of its offer."""
        ...


@spec("task")
class Task:
    """What is asked of one batch of devices. Its id is the digest of its JSON.

    The id covers seed, sizes, noise and cohort, so tables that do not belong together cannot meet.
    Every check that needs two of the parts is here, and parts that protect nobody do not combine:
    noise in shares needs an aggregation that hides the shares.
    """

    sketch: Sketch
    mechanism: Mechanism
    aggregation: Aggregation
    campaign: str = ""  # what it is part of; a device is in one of its cohorts at most
    cohort: str  # which devices are asked
    items_per_device: int = 1
    min_count: int = 1  # devices below which nothing is released
    max_count: int  # devices beyond which the sum could wrap

    def check(self) -> None:
        def need(condition: bool, message: str) -> None:
            require(condition, message, TaskError)

        need(self.items_per_device >= 1, "items_per_device must be at least 1")
        need(
            1 <= self.min_count <= self.max_count,
            f"counts must be 1 <= min_count <= max_count; got {self.min_count}, {self.max_count}",
        )
        need(
            self.aggregation.hides_summands or not self.mechanism.in_shares,
            "noise in shares protects only a sum whose summands are hidden; "
            "use noise at the release, or masked aggregation",
        )
        need(
            self.min_count >= self.mechanism.least_count,
            f"this noise needs a min_count of at least {self.mechanism.least_count}; "
            f"got {self.min_count}",
        )
        if isinstance(self.aggregation, Masked) and isinstance(self.mechanism, NoiseInShares):
            corrupt = math.floor(self.aggregation.corrupt * self.max_count + 1e-9)
            need(
                self.mechanism.colluders >= corrupt,
                f"{corrupt} of {self.max_count} devices may tell their share of the noise; "
                f"the noise allows for {self.mechanism.colluders}",
            )
        if self.sketch.word_bits is not None:
            self._check_listed(self.sketch.word_bits)
            return
        need(
            not isinstance(self.mechanism, ListedAbove),
            "only an invertible sketch is listed; use noise on this one",
        )
        largest = largest_cell(self.sketch, self.items_per_device) * self.max_count
        largest += self.mechanism.reach(self.max_count, self.cells)
        need(
            2 * largest < 2**self.aggregation.modulus_bits,
            f"modulus_bits must hold sums of ±{largest}: at least {bits_for(largest)}; "
            f"got {self.aggregation.modulus_bits}",
        )

    def _check_listed(self, word_bits: int) -> None:
        """A table whose words are residues, and wrap by design."""
        require(
            isinstance(self.mechanism, ListedAbove),
            "noise on a table that is to be listed would leave nothing to list: a key with noise "
            "on it is another key. Keep the list private instead (ListedAbove, whose decoder is "
            "trusted), or search by prefixes, whose sums take noise in shares",
            TaskError,
        )
        require(
            self.aggregation.modulus_bits == word_bits,
            f"modulus_bits must be the sketch's own {word_bits}; "
            f"got {self.aggregation.modulus_bits}",
            TaskError,
        )
        require(
            not getattr(self.aggregation, "prime", False),
            "this sketch divides modulo a power of two; prime must be false",
            TaskError,
        )
        given = getattr(self.mechanism, "items_per_device", self.items_per_device)
        require(
            self.items_per_device <= given,
            f"the list is private for {given} items a device; the task takes "
            f"{self.items_per_device}",
            TaskError,
        )

    @property
    def id(self) -> str:
        return digest(self)

    @property
    def is_local(self) -> bool:
        return False

    @property
    def is_masked(self) -> bool:
        return isinstance(self.aggregation, Masked)

    @property
    def epsilon(self) -> None:
        return None

    @property
    def items_per_report(self) -> int:
        return self.items_per_device

    @property
    def most_reports(self) -> int | None:
        """As many as a sum can hold; what comes in a masked round is bounded by its cohort."""
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
        """The noise on its table, in standard deviations over the L2 norm of what one device adds:
        from the fewest devices, and not counting those that may be corrupt. None if the noise is
        elsewhere."""
        moved = self.contribution.l2
        if isinstance(self.mechanism, NoiseInShares):
            return self.mechanism.scale / moved
        if isinstance(self.mechanism, NoiseAtRelease):
            return self.mechanism.stddev(1) / moved
        return 0.0 if isinstance(self.mechanism, NoNoise) else None

    @property
    def cells(self) -> int:
        return math.prod(self.sketch.shape)

    @property
    def message_bytes(self) -> int:
        return self.aggregation.message_bytes(self.cells)

    def masked_round(self, cohort: int, nonce: str) -> MaskedRound:
        """The round in which `cohort` devices add their tables; `nonce` is never used again."""
        if not isinstance(self.aggregation, Masked):
            raise TaskError("only a task with masked aggregation is answered in a masked round")
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
    """What tasks have in common whose devices send randomised records."""

    __slots__ = ()
    records_per_report: int

    @property
    @abstractmethod
    def source(self) -> Any:
        """What makes its records: it has an epsilon, a length, and says which are valid."""

    @property
    def id(self) -> str:
        return digest(self)

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_masked(self) -> bool:
        return False

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
    def most_reports(self) -> None:
        return None

    @property
    def loss(self) -> ApproximateLoss:
        """Of all the records that a device sends on one day: they add up, whatever they say."""
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
    """What is asked of devices that trust nobody: records of one randomizer. Its id is its digest.

    A new epoch of the same study is another task with other hash functions: collisions rotate.
    """

    randomizer: Randomizer
    campaign: str = ""
    cohort: str  # which devices are asked
    records_per_report: int = 1  # of one device at a time: so many, whatever it has to say
    min_count: int = 1  # records below which nothing is released

    def check(self) -> None:
        for name in ("records_per_report", "min_count"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}", TaskError)

    @property
    def source(self) -> Randomizer:
        return self.randomizer

    def values(self, items: Any) -> npt.NDArray[Any]:
        """Items, or categories of a direct response, as the randomizer takes them."""
        return self.randomizer.values(items)

    def none(self, count: int) -> npt.NDArray[Any]:
        """So many values of devices that have nothing to say."""
        return np.repeat(no_item(self.randomizer), count)

    def tallies(self) -> list[Tally]:
        """What its records are counted in, empty."""
        return [Tally(self.randomizer)]

    def fold(self, records: U8, tallies: list[Tally]) -> int:
        """Add the records that are valid; tells how many were not."""
        return tallies[0].fold(records)

    @property
    def categories(self) -> int | None:
        randomizer: object = self.randomizer
        return randomizer.categories if isinstance(randomizer, DirectResponse) else None


def most_devices(asked: int) -> int:
    """How many may come to a cohort of about so many, which chance dealt out: seven deviations
    more."""
    return asked + max(64, asked // 16, 7 * math.isqrt(asked))


def largest_cell(sketch: Sketch, items_per_device: int) -> int:
    """The most that one device moves a cell."""
    largest = sketch.sensitivity(items_per_device).largest
    return items_per_device if largest is None else largest


def bits_for(largest: int) -> int:
    """The least modulus that tells every sum from −largest to largest apart, in bits."""
    return max(2, (2 * largest).bit_length())

"""A sized question, and its plan.

A design is a spec of how a question is asked: its sketches, its noise, its rounds. Every design
implements `Question`, so that simulations, the collector, the dashboard and the command line treat
all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.arrays import I64, Bool
from sfumato.errors import DataError, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.release import Cost, Influence, Privacy, Release
from sfumato.flow.segments import SEPARATOR
from sfumato.flow.task import AnyTask
from sfumato.privacy import Charge, Rng
from sfumato.sketch import ItemKeys
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population


EVERYBODY = "everybody"  # the cohort of tasks that all devices answer
_SECRET_WORDS = 4


class Dictionary:
    """The items to count, or those already known, without duplicates."""

    def __init__(self, items: pa.Array) -> None:
        if len(items) == 0:
            raise DataError("a dictionary must have at least one item; got none")
        if items.null_count:
            raise DataError(f"a dictionary must not have missing items; got {items.null_count}")
        self.items = pc.unique(items)
        self.duplicates = len(items) - len(self.items)

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.duplicates:
            return ()
        duplicates = "1 item" if self.duplicates == 1 else f"{self.duplicates:,} items"
        return (f"the dictionary repeats {duplicates}; each is counted once",)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def bytes(self) -> int:
        """About the size of the dictionary that a device downloads, unless it has it already: one
        JSON string per line."""
        return int(pc.sum(pc.binary_length(self.items)).as_py() or 0) + 3 * len(self.items)

    def crossed(self, segments: Sequence[str]) -> Dictionary:
        """The pairs of each segment with each item, segment by segment (`flow.segments`)."""
        items = self.items.cast(pa.string())
        pairs = Dictionary(
            pa.concat_arrays(
                [pc.binary_join_element_wise(name, items, SEPARATOR) for name in segments]
            )
        )
        pairs.duplicates = self.duplicates
        return pairs

    def categories(self, values: pa.Array) -> I64:
        """Each value's index in the dictionary; −1 where it is not listed."""
        places = pc.index_in(values, value_set=self.items)
        return np.asarray(pc.fill_null(places, -1)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Seeded:
    """A question with its own hash functions, and the public and secret seeds drawn with them."""

    question: Question
    seed: int  # public: it assigns devices to cohorts
    secret: bytes = b""  # seeds the campaign's own randomness (`SecretRng`), if it has any


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """How many devices took part in a campaign, and notes about it."""

    devices: int  # number asked; over a network, where that is unknown, the respondents
    respondents: int
    rounds: int  # for the cost: as planned in a simulation; over a network, those with answers
    tasks: Sequence[tuple[AnyTask, int]] = ()  # each with its number of respondents
    notes: tuple[str, ...] = ()


def public_seed(rng: Rng) -> int:
    """A public seed for hash functions."""
    return int(rng.words(1)[0]) & LARGEST_INTEGER


def draw_secret(rng: Rng) -> bytes:
    """A secret seed for a campaign's own randomness."""
    return rng.words(_SECRET_WORDS).tobytes()


class Question(Protocol):
    """A sized question, as simulations and the collector use it.

    Specs implement it, most of them with `QuestionDefaults`. A real device encodes its values by
    its task's sketch and keys (`device/private.py`); `values` does the same for many simulated
    devices at once.
    """

    @property
    def devices(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    @property
    def task_count(self) -> int:
        """The approximate number of tasks, for progress."""
        ...

    @property
    def tasks_per_device(self) -> int:
        """The largest number of tasks that one device answers."""
        ...

    @property
    def items_per_device(self) -> int | None:
        """The largest number of items that a device reports; None if devices have no items."""
        ...

    @property
    def least_noise(self) -> float | None:
        """The least `noise_multiplier` of its tasks; None if none of them has noise."""
        ...

    @property
    def influence(self) -> Influence:
        """How far one dishonest device can move one number of the answer."""
        ...

    @property
    def has_secret(self) -> bool:
        """Whether its campaign has randomness of its own."""
        ...

    @property
    def may_skip(self) -> bool:
        """Whether its campaign can continue without the answer to a task."""
        ...

    @property
    def algorithm(self) -> str:
        """The name by which a study asks for this kind of design."""
        ...

    def parameters(self) -> dict[str, Any]:
        """The parameters that the planner chose, for people to read."""
        ...

    def charge_of(self, task: Any) -> Charge:
        """The charge for a release of the task."""
        ...

    def with_seed(self, rng: Rng) -> Seeded:
        """The question with its own hash functions. They are drawn first and in a fixed order, so
        that a simulation and a collector with one seed ask the same."""
        ...

    def campaign(
        self,
        plan: Plan,
        *,
        secret: bytes = b"",
        least: float = 0.0,
        devices: int | None = None,
        name: str | None = None,
    ) -> Campaign:
        """A new campaign. `secret` is that of `Seeded`; estimates below `least` are not listed;
        `devices` is the number to ask, if fewer than planned; `name` replaces the design's digest,
        if two studies may have the same."""
        ...

    def cohorts(self) -> Mapping[str, float]:
        """The share of all devices in each cohort."""
        ...

    def closing_count(self, task: Any, *, answering: float) -> int:
        """The number of devices at which a collector closes a task, if the share `answering` of
        the devices answers."""
        ...

    def item_keys(self, task: Any) -> ItemKeys | None:
        """The part of an item that the task's table counts, if its sketch does not determine it."""
        ...

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        """Limit the items of simulated devices to what they may send, with notes about what is
        left out; devices that answer `alone` choose for themselves later."""
        ...

    def values(
        self, task: Any, items: Any, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, Bool | None]:
        """The values that devices encode, and which of the items they come from (None: all).
        `place` has the number of the task and of the first device, and may seed public
        randomness."""
        ...

    def model_terms(self, parameters: bytes, round: int) -> ModelTerms:
        """The terms for devices that train from these parameters in a round."""
        ...

    def answer(self, campaign: Any, plan: Plan, participation: Participation) -> Release:
        """The release of a finished campaign; ImpossibleError if there were too few answers."""
        ...

    def draw(self, study: Study) -> Any:
        """Plot the planner's alternatives; SpecError if the question has no plot."""
        ...


class QuestionDefaults:
    """Defaults that suit most designs: every device is asked, and answers one task."""

    __slots__ = ()
    has_secret: ClassVar[bool] = False
    may_skip: ClassVar[bool] = False

    @property
    def task_count(self: Question) -> int:
        return self.rounds

    @property
    def tasks_per_device(self) -> int:
        return 1

    @property
    def least_noise(self) -> float | None:
        """For designs whose tasks are known beforehand."""
        design: Any = self
        multipliers = (task.noise_multiplier for task in design.tasks())
        return min((noise for noise in multipliers if noise is not None), default=None)

    @property
    def algorithm(self) -> str:
        """For questions with one algorithm, which no study names."""
        return ""

    def charge_of(self, task: Any) -> Charge:
        """The task's own loss, since a device answers one task."""
        loss: Charge = task.loss
        return loss

    def closing_count(self, task: Any, *, answering: float) -> int:
        """The number that was planned; for a masked round, its whole cohort."""
        if task.is_masked:
            cohort: int = task.max_count - 1  # a masked task has room for one more
            return cohort
        return max(1, math.floor(self.cohort_size(task) * answering + 0.5))

    def cohort_size(self, task: Any) -> float:
        """The number of devices that get a task."""
        question: Any = self
        devices: int = question.devices
        return devices

    def cohorts(self) -> Mapping[str, float]:
        return {EVERYBODY: 1.0}

    def with_seed(self, rng: Rng) -> Seeded:
        """Replace the field `seed`, which most designs have."""
        design: Any = self
        seed = public_seed(rng)
        secret = draw_secret(rng) if self.has_secret else b""
        return Seeded(replace(design, seed=seed), seed, secret)

    def item_keys(self, task: Any) -> ItemKeys | None:
        return None

    def bound(
        self: Question, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        if alone or self.items_per_device is None:
            return population, []
        return population.bounded(self.items_per_device, rng=rng), []

    def model_terms(self, parameters: bytes, round: int) -> ModelTerms:
        raise SpecError("this question does not train a model")

    def draw(self, study: Study) -> Any:
        raise SpecError('only plans for frequencies with trust = "local" have a plot')


class InCohorts(QuestionDefaults):
    """Common to questions whose rounds ask one cohort after another, so that a masked sum is not
    over too many devices."""

    __slots__ = ()
    devices: int
    cohort_count: int

    @property
    def cohort_devices(self) -> int:
        """The number of devices in a cohort."""
        return -(-self.devices // self.cohort_count)

    def cohort_names(self) -> list[str]:
        if self.cohort_count == 1:
            return [EVERYBODY]
        return [f"cohort {number}" for number in range(self.cohort_count)]

    def cohorts(self) -> dict[str, float]:
        return dict.fromkeys(self.cohort_names(), 1 / self.cohort_count)

    def cohort_size(self, task: Any) -> float:
        return self.devices / self.cohort_count


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """The design of a study, with its predicted error and cost, and its privacy."""

    study: Study
    design: Question
    dictionary: Dictionary | None = None  # the items to count; for new words, those known
    algorithm: str
    predicted: Mapping[str, Any]
    privacy: Privacy
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Any]:
        return self.design.parameters()

    def draw(self) -> Any:
        """Plot the planner's alternatives; SpecError if the question has no plot."""
        return self.design.draw(self.study)

    @property
    def influence(self) -> Influence:
        """How far one dishonest device can move one number of the answer."""
        return self.design.influence

    @property
    def listed(self) -> Dictionary:
        """The dictionary of a question that needs one."""
        assert self.dictionary is not None  # only for questions whose study lists items
        return self.dictionary

    def to_dict(self) -> dict[str, Any]:
        return {
            "study": self.study.to_dict(),
            "plan": self.summary(),
            "privacy": self.privacy.to_dict(),
            "warnings": list(self.warnings),
        }

    def summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "parameters": self.parameters,
            "predicted": dict(self.predicted),
        }

    def release_head(
        self,
        *,
        devices: int,
        rounds: int,
        bytes_per_device: int,
        seconds: float = 0.0,
        privacy: Privacy | None = None,
        parameters: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The fields that every release of this plan has (`Release`), with more parameters."""
        summary = self.summary()
        summary["parameters"] |= parameters or {}
        return {
            "study": self.study.to_dict(),
            "plan": summary,
            "privacy": privacy or self.privacy,
            "cost": Cost(
                devices=devices, rounds=rounds, bytes_per_device=bytes_per_device, seconds=seconds
            ),
            "notes": tuple(notes),
        }

    def __repr__(self) -> str:
        lines = [f"Plan: {self.algorithm}"]
        lines += [
            f"  {name:<26} {_short(value)}"
            for name, value in self.parameters.items()
            if value is not None
        ]
        lines += ["predicted"]
        lines += [
            f"  {name:<26} {_short(value)}"
            for name, value in self.predicted.items()
            if value is not None
        ]
        lines += ["privacy", *(f"  {line}" for line in self.privacy.lines)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):  # by segment
        return ", ".join(f"{name} {_short(number)}" for name, number in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

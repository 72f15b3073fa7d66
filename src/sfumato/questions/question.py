"""A sized question, and its plan.

A design is a spec that says how a question is asked: its sketches, its noise, its rounds. Every
design fulfils `Question`, so that a simulation, a collector, the dashboard and the command line
drive all of them alike and ask none what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.errors import DataError, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.release import Privacy, Release
from sfumato.flow.task import AnyTask
from sfumato.privacy import Charge, Rng
from sfumato.sketch import ItemKeys
from sfumato.spec import LARGEST_INTEGER
from sfumato.study import Study

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

EVERYBODY = "everybody"  # the cohort of tasks that all devices answer
_SECRET_WORDS = 4


class Dictionary:
    """The items asked about, or those already known, each once."""

    def __init__(self, items: pa.Array) -> None:
        if len(items) == 0:
            raise DataError("a dictionary must hold at least one item; got none")
        if items.null_count:
            raise DataError(f"a dictionary must not hold missing items; got {items.null_count}")
        self.items = pc.unique(items)
        self.duplicates = len(items) - len(self.items)

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.duplicates:
            return ()
        again = "once" if self.duplicates == 1 else f"{self.duplicates:,} times"
        return (f"the dictionary repeats items ({again}); each counts once",)

    def __len__(self) -> int:
        return len(self.items)

    def categories(self, values: pa.Array) -> I64:
        """Each value's index in the dictionary; −1 where it is not listed."""
        found = pc.index_in(values, value_set=self.items)
        return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Seeded:
    """A question with hash functions of its own, and what else was drawn with them."""

    question: Question
    seed: int  # public: devices are dealt out to cohorts by it
    secret: bytes = b""  # of what its campaign draws by itself (`SecretRng`); empty if it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """Who answered a campaign, and what there is to say about it."""

    devices: int  # asked; over a network, where that is not known, as many as answered
    answered: int
    rounds: int  # for the bill: as planned in a simulation, those with answers over a network
    tasks: Sequence[tuple[AnyTask, int]] = ()  # with the number of devices that answered each
    notes: tuple[str, ...] = ()


def public_seed(rng: Rng) -> int:
    """A seed of hash functions, which everybody may know."""
    return int(rng.words(1)[0]) & LARGEST_INTEGER


def drawn_secret(rng: Rng) -> bytes:
    """A secret for what a campaign draws by itself."""
    return rng.words(_SECRET_WORDS).tobytes()


class Question(Protocol):
    """A sized question: what a simulation and a collector need to know of it.

    Specs fulfil it; `QuestionDefaults` has what most of them have in common. What a real device
    sends follows from its task's sketch and keys (`device/private.py`); `values` is the same for
    many simulated devices at once.
    """

    @property
    def devices(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    @property
    def task_count(self) -> int:
        """Tasks that there will be, about: for progress."""
        ...

    @property
    def tasks_per_device(self) -> int:
        """Tasks that one device answers, at most."""
        ...

    @property
    def items_per_device(self) -> int | None:
        """How many of its items a device reports, at most; None where it does not hold items."""
        ...

    @property
    def least_noise(self) -> float | None:
        """The least `noise_multiplier` of its tasks; None if none of them has any noise."""
        ...

    @property
    def has_secret(self) -> bool:
        """Whether its campaign draws something by itself."""
        ...

    @property
    def may_skip(self) -> bool:
        """Whether its campaign goes on without the answer to a task."""
        ...

    def parameters(self) -> dict[str, Any]:
        """What was chosen, for people to read."""
        ...

    def charge_of(self, task: Any) -> Charge:
        """What the ledger is charged for a release of the task."""
        ...

    def with_seed(self, rng: Rng) -> Seeded:
        """The question with hash functions of its own: drawn in one order, before all else, so that
        a simulation and a collector with one seed ask the same."""
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
        """The campaign at its beginning. `secret` is that of `Seeded`; estimates below `least` are
        not listed; `devices` is how many will be asked if fewer than planned; `name` takes the
        place of the design's digest where that does not tell two studies apart."""
        ...

    def cohorts(self) -> Mapping[str, float]:
        """The cohorts of its tasks, and the share of all devices that each has."""
        ...

    def wanted(self, task: Any, *, answering: float) -> int:
        """Devices at which a collector closes a task, if this share of those asked answers."""
        ...

    def item_keys(self, task: Any) -> ItemKeys | None:
        """What of an item the task's table counts, where its sketch does not say."""
        ...

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        """What of their items simulated devices may send, and notes about what they may not;
        devices that answer `alone` choose for themselves later."""
        ...

    def values(
        self, task: Any, items: Any, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, Bool | None]:
        """What devices encode of their items, and which of the items that is of (None: of all).
        `place` is the number of the task and of the first device: public chance may come of it."""
        ...

    def model_terms(self, parameters: bytes, round: int) -> ModelTerms:
        """What devices are told that train from these parameters in a round."""
        ...

    def answer(self, campaign: Any, plan: Plan, participation: Participation) -> Release:
        """The release of a campaign that is over; ImpossibleError where too little came."""
        ...

    def draw(self, study: Study) -> Any:
        """A picture of what the planner chose among; SpecError where there is none."""
        ...


class QuestionDefaults:
    """What most designs have in common: every device is asked, and answers one task."""

    __slots__ = ()

    @property
    def task_count(self: Question) -> int:
        return self.rounds

    @property
    def tasks_per_device(self) -> int:
        return 1

    @property
    def has_secret(self) -> bool:
        return False

    @property
    def may_skip(self) -> bool:
        return False

    def charge_of(self, task: Any) -> Charge:
        """Its own loss: a device answers one task."""
        loss: Charge = task.loss
        return loss

    def wanted(self, task: Any, *, answering: float) -> int:
        """As many as the plan was made for; of a masked round, its whole cohort."""
        if task.is_masked:
            cohort: int = task.max_count - 1  # a masked task leaves room for one more
            return cohort
        return max(1, math.floor(self.cohort_size(task) * answering + 0.5))

    def cohort_size(self, task: Any) -> float:
        """Devices that a task is asked of."""
        question: Any = self
        devices: int = question.devices
        return devices

    def cohorts(self) -> Mapping[str, float]:
        return {EVERYBODY: 1.0}

    def with_seed(self, rng: Rng) -> Seeded:
        """With the seed that most designs have as a field."""
        design: Any = self
        seed = public_seed(rng)
        return Seeded(replace(design, seed=seed), seed)

    def item_keys(self, task: Any) -> ItemKeys | None:
        return None

    def bound(
        self: Question, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        if alone or self.items_per_device is None:
            return population, []
        return population.bounded(self.items_per_device, rng=rng), []

    def model_terms(self, parameters: bytes, round: int) -> ModelTerms:
        raise SpecError("this question trains no model")

    def draw(self, study: Study) -> Any:
        raise SpecError('a plan has a picture if it is of frequencies with trust = "local"')


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """What will be asked, what it should give, what it costs and what it promises."""

    study: Study
    design: Question
    dictionary: Dictionary | None = None  # of items asked about; for new words, of those known
    algorithm: str
    predicted: Mapping[str, Any]
    privacy: Privacy
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Any]:
        return self.design.parameters()

    @property
    def listed(self) -> Dictionary:
        """The items of a question that lists them."""
        assert self.dictionary is not None  # others have no use for it
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

    def __repr__(self) -> str:
        lines = [f"Plan: {self.algorithm}"]
        lines += [f"  {name:<26} {value}" for name, value in self.parameters.items()]
        lines += ["predicted"]
        lines += [f"  {name:<26} {_short(value)}" for name, value in self.predicted.items()]
        lines += ["promise", *(f"  {line}" for line in self.privacy.lines)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

"""Rounds of model updates for any training loop: each round is a task of the flow.

    update ─values, contribute─▶ table ─add, plainly or masked─▶ Batch ─noised_sum─▶ mean update
            clipped, sketched,                                    charged first, opened,
            rounded                                               noised, decoded

Nothing here depends on a framework. A server makes an `UpdateRound` from its `UpdateDesign` and
sends it to clients. It contains everything that must be the same on both sides, and a client's
answer names its `id`. A client that cannot take part says why with a `Refusal`, and so does a
server that cannot accept an answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64, I64
from sfumato.errors import BudgetError, ImpossibleError, MismatchError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.aggregation import Plain
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task, bits_for
from sfumato.privacy import AdditiveLoss, Charge, Loss, NoiseAtRelease, NoNoise, epsilon_of
from sfumato.privacy.accounting import (
    LARGEST_MULTIPLIER,
    SampledLoss,
    epsilon_text,
    least_multiplier,
    loss_of_task,
)
from sfumato.privacy.ledger import Entry
from sfumato.privacy.rounding import COARSEST, fineness
from sfumato.privacy.samplers import Rng
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER, canonical, from_json, require, to_json

Arrays = Mapping[str, npt.NDArray[Any]]

VERSION = 3  # of the messages; a change of meaning is a new number
EVERYBODY = "everybody"  # a client may be in every round


class Refusal(StrEnum):
    """Why a client, or its message, is not in a round."""

    ABSENT = "absent"  # an error, or no record of ours in the answer: is the mod installed?
    VERSION = "version"  # another version of the messages
    SEED = "seed"  # a sketch of another seed or round, which cannot be added
    SHAPE = "shape"  # names, shapes or types of arrays that are not the model's
    ROUND = "round"  # another round in some other way: clip, size, noise
    MALFORMED = "malformed"  # bytes that are not a table of this round, or one that is too long
    PROTOCOL = "protocol"  # a step of the masked round that was refused


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and types of a model's arrays: how its update becomes one vector.

    Arrays of whole numbers (such as a counter of batches) are not trained: they keep their values.

    >>> layout = Layout.of({"weight": np.zeros((2, 3), dtype=np.float32), "seen": np.array(7)})
    >>> layout.length
    6
    """

    parts: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        return cls(tuple((name, array.shape, array.dtype.str) for name, array in arrays.items()))

    @property
    def length(self) -> int:
        """Number of coordinates of an update."""
        return sum(math.prod(shape) for _, shape, kind in self.parts if _is_real(kind))

    @property
    def digest(self) -> str:
        text = canonical([[name, list(shape), kind] for name, shape, kind in self.parts])
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, after: Arrays, before: Arrays) -> F64:
        """The update as one vector; arrays of another layout are refused."""
        for arrays in (after, before):
            if Layout.of(arrays) != self:
                raise MismatchError(
                    "a client must answer with the arrays it was sent: "
                    f"{self._first_difference(arrays)}"
                )
        with np.errstate(invalid="ignore"):  # an update that is not finite is sent as zeros
            return self.vector(after) - self.vector(before)

    def vector(self, arrays: Arrays) -> F64:
        """The real numbers of arrays of this layout, concatenated."""
        real = [
            arrays[name].astype(np.float64).ravel()
            for name, _, kind in self.parts
            if _is_real(kind)
        ]
        return np.concatenate(real) if real else np.zeros(0)

    def apply(self, before: Arrays, update: F64) -> dict[str, npt.NDArray[Any]]:
        """The arrays after an update."""
        require(
            update.shape == (self.length,),
            f"an update of this model must have {self.length} coordinates; got {update.shape}",
        )
        after, start = dict(before), 0
        for name, shape, kind in self.parts:
            if _is_real(kind):
                part = update[start : start + math.prod(shape)].reshape(shape)
                after[name] = (before[name].astype(np.float64) + part).astype(kind)
                start += math.prod(shape)
        return after

    def _first_difference(self, arrays: Arrays) -> str:
        parts = Layout.of(arrays).parts
        for expected, got in zip(self.parts, parts, strict=False):
            if expected != got:
                return "{} of shape {} and type {} became {} of {} and {}".format(*expected, *got)
        return f"{len(self.parts)} arrays became {len(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDesign:
    """How updates are added in every round of a training, whatever the model.

    Claim: a round costs a client what `charge_of` says; all rounds cost what `Spending` adds up.
        Neighbours: one client's table becomes zero ("all"), or another's ("fixed").
    Assumes: under "all" nothing about cohorts, so each round is charged to everybody. Under "fixed"
        each round's cohort is drawn uniformly at random from the connected clients, and only the
        server knows it. A client that answers many rounds is one client. Unless `secure`, the
        server is trusted with every client's table. With `secure` it is not trusted, and it knows
        who is in a round: so "fixed" is refused there.
    """

    clip: float  # largest norm of an update, and of its sketch
    noise_multiplier: float = 0.0  # deviation of the noise divided by the largest norm of a table
    rate: float = 1.0  # coordinates of an update per cell; 1 for whole updates
    rows: int = 15  # of the sketch
    sampling: Literal["all", "fixed"] = "all"
    secure: bool = False  # masked sums and noise in shares: the server sees sums alone
    dropout: float = 0.3  # secure: share of a round's clients that may vanish
    corrupt: float = 0.0  # secure: share that may work with the server
    seed: int  # of the sketches: public, and chosen before any update is computed

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.clip) and self.clip > 0,
            f"clip must be above 0 and finite; got {self.clip}",
        )
        require(
            math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0,
            f"noise_multiplier must be at least 0 and finite; got {self.noise_multiplier}",
        )
        require(
            math.isfinite(self.rate) and self.rate >= 1,
            f"rate must be at least 1 and finite; got {self.rate}",
        )
        require.at_least(1, rows=self.rows)
        require(
            self.sampling in ("all", "fixed"),
            f'sampling must be "all" or "fixed"; got {self.sampling!r}',
        )
        require(
            not (self.secure and self.sampling == "fixed"),
            "with secure the server is not trusted, and it knows who is in a round, so the account "
            'cannot rely on secret cohorts: set sampling to "all"; got "fixed"',
        )
        for name in ("dropout", "corrupt"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}")
        require.within(0, LARGEST_INTEGER, seed=self.seed)

    @property
    def relation(self) -> str:
        """The neighbouring relation of epsilon, and against whom it holds, in a few words."""
        if self.sampling == "fixed":
            return "replace, against those who do not know who took part"
        return "zero-out"

    def sketch(self, length: int, cohort: int, round: int) -> VectorSketch:
        """The sketch that turns updates of `length` coordinates into whole numbers."""
        cells, dense = most_cells(length, self.rate), None
        if cells < length:
            dense = DenseSketch.within(
                cells, length=length, rows=self.rows, seed=self.seed, round=round
            )
            cells = dense.cells
        fine = fineness(cells, cohort, self.noise_multiplier)
        return VectorSketch(
            length=length, clip=self.clip, bound=self.clip, scale=fine / self.clip, dense=dense
        )

    def round(self, layout: Layout, cohort: int, round: int) -> UpdateRound:
        """A round with `cohort` clients; raises ImpossibleError if they are too few."""
        require(layout.length >= 1, "a model must have at least one array of real numbers")
        sketch = self.sketch(layout.length, cohort, round)
        scale = self.noise_multiplier * sketch.rounding.l2
        campaign = f"update round {round}"
        if self.secure:
            secure = SecureSum(corrupt=self.corrupt, dropout=self.dropout)
            task = secure.task(
                sketch=sketch,
                mechanism=secure.noise(scale, cohort, exact=True) if scale else NoNoise(),
                campaign=campaign,
                cohort=EVERYBODY,
                devices=cohort,
                items_per_device=1,
                exact=True,
            )
        else:
            task = Task(
                sketch=sketch,
                mechanism=NoiseAtRelease(noise="gaussian", scale=scale) if scale else NoNoise(),
                aggregation=Plain(modulus_bits=bits_for(cohort * sketch.rounding.largest)),
                campaign=campaign,
                cohort=EVERYBODY,
                max_count=cohort,
            )
        return UpdateRound(task=task, layout=layout.digest)

    def charge_of(self, task: Task, share: float) -> Loss:
        """The loss of a round whose cohort is this share of all clients; under "fixed", against
        those who do not know the cohort."""
        if self.sampling == "all" or not isinstance(task.loss, AdditiveLoss):
            return task.loss
        return SampledLoss(loss=task.loss, probability=share, scheme="fixed", times=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRound:
    """One round, on which server and clients must agree. Its id covers all fields."""

    task: Task
    layout: str  # digest of the model's layout
    version: int = VERSION

    def to_json(self) -> str:
        return canonical(
            {"layout": self.layout, "task": json.loads(to_json(self.task)), "version": self.version}
        )

    @classmethod
    def from_json(cls, text: str) -> UpdateRound:
        """Read a round; another version or other fields are refused."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise MismatchError(
                    f"a round must be of version {VERSION}; got {data['version']!r}: "
                    "install the same sfumato on server and clients"
                )
            if data.keys() != {"layout", "task", "version"}:
                raise SpecError("a round has a layout, a task and a version")
            round = cls(task=from_json(json.dumps(data["task"])), layout=data["layout"])
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise SpecError("this is not a round of updates") from problem
        if not isinstance(round.task, Task) or not isinstance(round.task.sketch, VectorSketch):
            raise SpecError("a round of updates has a task that sums vectors")
        return round

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def sketch(self) -> VectorSketch:
        sketch = self.task.sketch
        assert isinstance(sketch, VectorSketch)  # from `UpdateDesign`, or checked by `from_json`
        return sketch

    @property
    def seed(self) -> tuple[int, int]:
        """The seed and the round of the sketch; (0, 0) for whole updates."""
        dense = self.sketch.dense
        return (0, 0) if dense is None else (dense.seed, dense.round)

    def values(self, update: F64, *, rng: Rng) -> I64:
        """The values that `flow.contribute` encodes for a client's update (length,)."""
        return self.sketch.tables(finite(update)[None], rng=rng)

    def batch(self, message: bytes) -> Batch:
        """One client's sealed table as a batch; raises MismatchError if it is not a table of this
        round, or is too long."""
        aggregation = self.task.aggregation
        if not isinstance(aggregation, Plain):
            raise SpecError("a table of a masked round is never seen alone")
        table = aggregation.unpack(message, self.sketch.shape)
        try:
            self.sketch.encode(aggregation.open(table)[None])
        except SpecError as problem:
            raise MismatchError(str(problem)) from problem
        return Batch(self.task.id, table, 1)

    def refusal_of(
        self, *, version: object, layout: object, seed: object, round: object
    ) -> Refusal | None:
        """What is wrong with an answer with these fields, or None."""
        if version != VERSION:
            return Refusal.VERSION
        if layout != self.layout:
            return Refusal.SHAPE
        if seed != list(self.seed):
            return Refusal.SEED
        return None if round == self.id else Refusal.ROUND


@dataclass(slots=True)
class Spending:
    """The books of a training: the cost of all rounds so far, as a list that was fixed in advance.
    Noise and cohorts must not depend on the results of earlier rounds.

    A `Ledger` with a limit allows for such dependence, and would end a training earlier.

    >>> spending = Spending(delta=1e-5)
    >>> loss = AdditiveLoss(noise="gaussian", scale=1000.0, l1=1000.0, l2=1000.0, unit_cells=0)
    >>> for number in range(4):
    ...     spending.charge(campaign=f"round {number}", cohort="all", task="", loss=loss)
    >>> round(spending.epsilon, 2)
    10.0
    """

    delta: float
    most_epsilon: float | None = None  # a round that would exceed it is neither charged nor opened
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, f"delta must be above 0, below 1; got {self.delta}")
        require.above(0, most_epsilon=self.most_epsilon)

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Record a round's loss, or raise BudgetError and record nothing."""
        self.check(loss)
        self.entries.append(Entry(campaign, cohort, task, loss))

    def check(self, loss: Charge) -> None:
        """Raise BudgetError if another round with this loss may not be paid for."""
        if self.most_epsilon is None:
            return
        after = self._epsilon([*self.entries, Entry("another round", EVERYBODY, "", loss)])
        if after > self.most_epsilon:
            raise BudgetError(
                f"{self.rounds} rounds have spent epsilon {epsilon_text(self.epsilon)} of "
                f"{self.most_epsilon:g}, and another one would make it {epsilon_text(after)}",
                hint="stop here, or plan with more noise or fewer rounds",
            )

    @property
    def rounds(self) -> int:
        return len(self.entries)

    @property
    def epsilon(self) -> float:
        """The epsilon of all rounds together, at `delta`; rounded up."""
        return self._epsilon(self.entries)

    def _epsilon(self, entries: list[Entry]) -> float:
        return epsilon_of([loss_of_task(entry.loss) for entry in entries], self.delta)


def multiplier_for(
    epsilon: float,
    *,
    delta: float,
    rounds: int,
    probability: float | None = None,
    secure: bool = False,
) -> float:
    """The least noise multiplier, rounded up, with which `rounds` cost at most epsilon.

    `probability` is a client's chance to be in a cohort of `sampling="fixed"`; None for "all".
    `secure` is for noise in shares, which is priced by Rényi bounds and takes a little more.

    >>> round(multiplier_for(8.0, delta=1e-5, rounds=20), 2)
    2.69
    >>> round(multiplier_for(8.0, delta=1e-5, rounds=20, secure=True), 2)
    2.86
    """
    require.above(0, epsilon=epsilon)
    require.at_least(1, rounds=rounds)

    def cost(multiplier: float) -> float:
        one = AdditiveLoss(
            noise="skellam" if secure else "gaussian",
            scale=multiplier * COARSEST,
            l1=COARSEST**2,
            l2=COARSEST,
            unit_cells=0,
        )
        if probability is None:
            return epsilon_of([one] * rounds, delta)
        sampled = SampledLoss(loss=one, probability=probability, scheme="fixed", times=rounds)
        return epsilon_of([sampled], delta)

    multiplier = least_multiplier(cost, epsilon)
    if math.isinf(multiplier):
        raise ImpossibleError(
            f"no noise multiplier up to {LARGEST_MULTIPLIER:g} keeps epsilon {epsilon:g} over "
            f"{rounds:,} rounds",
            hint="raise epsilon or delta, or ask for fewer rounds",
        )
    return multiplier


def most_cells(length: int, rate: float) -> int:
    """The number of cells of a table with at least `rate` coordinates per cell."""
    return max(1, math.floor(length / rate))


def finite(vector: F64) -> F64:
    """The vector, or zeros if it has NaN or infinite numbers: staying away would reveal something
    about a client's data."""
    return vector if np.isfinite(vector).all() else np.zeros_like(vector)


def _is_real(kind: str) -> bool:
    return np.dtype(kind).kind == "f"

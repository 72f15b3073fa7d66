"""A round of model updates, as any training loop may run it: encode, add, decode, account.

    update ─encode─▶ whole numbers ─add, plainly or masked─▶ sum ─decode─▶ mean update
                     clipped, sketched,                      noised, and charged first
                     with a share of the noise if masked

Nothing here knows a framework. A server makes an `UpdateRound` out of its `UpdateDesign` and sends
it to clients; whatever must be the same on both sides is in it, and a client names its `id` when it
answers. A client that cannot take part says why with a `Refusal`, and so does a server that cannot
take an answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sfumato.errors import BudgetError, ImpossibleError, MismatchError, SpecError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.task import Task, bits_for
from sfumato.privacy import (
    AdditiveLoss,
    Loss,
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    NoPrivacy,
    epsilon_of,
)
from sfumato.privacy.accounting import SampledLoss
from sfumato.privacy.samplers import Rng
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER, canonical, from_json, require, to_json

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]

VERSION = 1  # of what travels; a change of meaning is a new number
ROUNDING_COST = 0.01  # of the noise's variance, that rounding to whole numbers may add
COARSEST = 1000.0  # whole numbers to the largest norm of a table, at the least
LEAST_MASKED = 3  # clients in a masked round


class Refusal(StrEnum):
    """Why a client, or what it sent, is not in a round."""

    ABSENT = "absent"  # an error or nothing of ours in its answer: is the mod installed?
    VERSION = "version"  # another version of what travels
    SEED = "seed"  # a sketch of another seed or round: it would add to nothing
    SHAPE = "shape"  # arrays of other names, shapes or types than the model's
    ROUND = "round"  # another round in some other way: clip, size, noise
    MALFORMED = "malformed"  # bytes that are no table of this round, or one that is too long
    PROTOCOL = "protocol"  # a step of the masked round that was refused


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and types of a model's arrays: how its update becomes one vector.

    Arrays of whole numbers (a counter of batches) are not trained: they keep their value.

    >>> layout = Layout.of({"weight": np.zeros((2, 3), dtype=np.float32), "seen": np.array(7)})
    >>> layout.length
    6
    """

    parts: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        return cls(tuple((name, held.shape, held.dtype.str) for name, held in arrays.items()))

    @property
    def length(self) -> int:
        """Coordinates of an update."""
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
        with np.errstate(invalid="ignore"):  # what is infinite is refused later
            moved = [
                (after[name].astype(np.float64) - before[name].astype(np.float64)).ravel()
                for name, _, kind in self.parts
                if _is_real(kind)
            ]
        return np.concatenate(moved) if moved else np.zeros(0)

    def moved(self, before: Arrays, update: F64) -> dict[str, npt.NDArray[Any]]:
        """The arrays after an update."""
        require(
            update.shape == (self.length,),
            f"an update of this model must have {self.length} coordinates; got {update.shape}",
        )
        made, start = {}, 0
        for name, shape, kind in self.parts:
            made[name] = before[name]
            if _is_real(kind):
                part = update[start : start + math.prod(shape)].reshape(shape)
                made[name] = (before[name].astype(np.float64) + part).astype(before[name].dtype)
                start += math.prod(shape)
        return made

    def _first_difference(self, arrays: Arrays) -> str:
        given = Layout.of(arrays).parts
        for wanted, got in zip(self.parts, given, strict=False):
            if wanted != got:
                return "{} of shape {} and type {} became {} of {} and {}".format(*wanted, *got)
        return f"{len(self.parts)} arrays became {len(given)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDesign:
    """How updates are added in every round of a training, whatever the model.

    Claim: a round costs a client what `UpdateRound.loss` says; all rounds, what `Spending` adds up.
        Neighbours: one client's table becomes zero ("all"), or another's ("fixed").
    Assumes: under "all" nothing about who is asked, so that each round is charged to everybody.
        Under "fixed" each round's cohort is drawn uniformly at random out of the clients that are
        connected, and nobody but the server knows it. A client that answers many rounds is one
        client. Unless `secure`, the server is trusted with every client's table. With `secure` it
        is not trusted, and it knows who is in a round: so "fixed" is refused there.
    """

    clip: float  # largest norm of an update, and of its sketch
    noise_multiplier: float = 0.0  # deviation of the noise by the largest norm of a table
    rate: float = 1.0  # coordinates of an update to a cell that is sent; 1 for whole updates
    rows: int = 15  # of the sketch
    sampling: Literal["all", "fixed"] = "all"
    secure: bool = False  # masked sums and noise in shares: the server sees sums alone
    dropout: float = 0.3  # secure: share of a round's clients that may vanish
    corrupt: float = 0.0  # secure: share that may work with the server
    seed: int  # of the sketches: public, and chosen before any update is known

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
        require(self.rows >= 1, f"rows must be at least 1; got {self.rows}")
        require(
            self.sampling in ("all", "fixed"),
            f'sampling must be "all" or "fixed"; got {self.sampling!r}',
        )
        require(
            not (self.secure and self.sampling == "fixed"),
            "with secure the server is not trusted, and it knows who is in a round, so the account "
            'cannot count on secret cohorts: set sampling to "all"; got "fixed"',
        )
        for name in ("dropout", "corrupt"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}")
        require(0 <= self.seed <= LARGEST_INTEGER, f"seed must be 0 to 2**53 - 1; got {self.seed}")

    @property
    def relation(self) -> str:
        """The neighbours that epsilon is for, and against whom it holds, in a few words."""
        if self.sampling == "fixed":
            return "replace, against those who do not know who took part"
        return "zero-out"

    def sketch(self, length: int, asked: int, round: int) -> VectorSketch:
        """Updates of so many coordinates as whole numbers, so fine that rounding costs little
        beside the noise: it adds at most a quarter a client to a cell's variance, and lengthens a
        client's table."""
        cells = max(1, math.floor(length / self.rate))
        dense = None
        if cells < length:
            rows = min(self.rows, cells)
            dense = DenseSketch(
                length=length, rows=rows, width=cells // rows, seed=self.seed, round=round
            )
            cells = dense.cells
        fine = max(
            COARSEST,
            math.sqrt(asked / 4 / ROUNDING_COST) / (self.noise_multiplier or 1.0),
            math.sqrt(cells / 4 / ROUNDING_COST),
        )
        return VectorSketch(
            length=length, clip=self.clip, bound=self.clip, scale=fine / self.clip, dense=dense
        )

    def round(self, layout: Layout, asked: int, round: int) -> UpdateRound:
        """What `asked` clients are told in a round; raises ImpossibleError if they are too few."""
        require(layout.length >= 1, "a model must have at least one array of real numbers")
        sketch = self.sketch(layout.length, asked, round)
        scale = self.noise_multiplier * sketch.rounding.l2
        least = max(1, math.ceil((1 - self.dropout) * asked - 1e-9)) if self.secure else 1
        mechanism: Mechanism = NoNoise()
        aggregation: Plain | Masked
        if not self.secure:
            if scale:
                mechanism = NoiseAtRelease(noise="gaussian", scale=scale)
            aggregation = Plain(modulus_bits=bits_for(asked * sketch.rounding.largest))
        else:
            colluders = math.floor(self.corrupt * asked + 1e-9)
            self._check_masked(asked, least, colluders)
            if scale:
                mechanism = NoiseInShares(scale=scale, survivors=least, colluders=colluders)
            largest = asked * sketch.rounding.largest + mechanism.reach(asked, sketch.cells)
            aggregation = Masked(modulus_bits=bits_for(largest), corrupt=self.corrupt)
        task = Task(
            sketch=sketch,
            mechanism=mechanism,
            aggregation=aggregation,
            campaign="update",
            cohort=f"round {round}",
            min_count=least,
            max_count=asked,
        )
        return UpdateRound(task=task, layout=layout.digest)

    def _check_masked(self, asked: int, least: int, colluders: int) -> None:
        """That a complete graph of so many keeps and recovers secrets, as `secagg` will find."""
        if asked < LEAST_MASKED or least <= max(colluders, 1):
            raise ImpossibleError(
                f"of {asked} clients {least} may be left and {colluders} may be corrupt: too few "
                "for a secure sum",
                hint=f"ask at least {LEAST_MASKED} clients, or set corrupt and dropout lower",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRound:
    """One round, as server and clients must agree on it. Its id covers all of it."""

    task: Task
    layout: str  # digest of the model's
    version: int = VERSION

    def to_json(self) -> str:
        return canonical(
            {"layout": self.layout, "task": json.loads(to_json(self.task)), "version": self.version}
        )

    @classmethod
    def from_json(cls, text: str) -> UpdateRound:
        """The round that was sent; one of another version or with other fields is refused."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise MismatchError(
                    f"a round must be of version {VERSION}; got {data['version']!r}: "
                    "install the same sfumato on server and clients"
                )
            if data.keys() != {"layout", "task", "version"}:
                raise SpecError("a round has a layout, a task and a version")
            made = cls(task=from_json(json.dumps(data["task"])), layout=data["layout"])
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise SpecError("this is not a round of updates") from problem
        if not isinstance(made.task, Task) or not isinstance(made.task.sketch, VectorSketch):
            raise SpecError("a round of updates has a task that sums vectors")
        return made

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def sketch(self) -> VectorSketch:
        sketch = self.task.sketch
        assert isinstance(sketch, VectorSketch)  # as it was made, and as from_json has checked
        return sketch

    @property
    def seed(self) -> tuple[int, int]:
        """Of the sketch, and its round; (0, 0) for whole updates."""
        dense = self.sketch.dense
        return (0, 0) if dense is None else (dense.seed, dense.round)

    @property
    def loss(self) -> Loss:
        """What the round costs a client that is in it."""
        return self.task.loss

    @property
    def message_bytes(self) -> int:
        return self.task.message_bytes

    def refusal_of(
        self, *, version: object, layout: object, seed: object, round: object
    ) -> Refusal | None:
        """What is wrong with an answer that names these, or None."""
        if version != VERSION:
            return Refusal.VERSION
        if layout != self.layout:
            return Refusal.SHAPE
        if seed != list(self.seed):
            return Refusal.SEED
        return None if round == self.id else Refusal.ROUND


def encode(update: F64, round: UpdateRound, *, rng: Rng) -> I64:
    """What a client with this update (length,) adds to the sum: whole numbers, of shape (cells,).

    Under a masked aggregation it has the client's share of the noise in it. An update with NaN or
    infinite numbers is sent as zeros: a client that abstained would tell of what it holds.
    """
    update = np.asarray(update, dtype=np.float64)
    if not np.isfinite(update).all():
        update = np.zeros_like(update)
    table = round.sketch.tables(update[None], rng=rng)[0]
    noised = round.task.mechanism.at_device(table, devices=1, rng=rng)
    return noised.reshape(-1)


def seal(table: I64, round: UpdateRound) -> bytes:
    """A client's whole numbers, packed to the bit, for a server that is trusted with them."""
    aggregation = round.task.aggregation
    if not isinstance(aggregation, Plain):
        raise SpecError("a table of a masked round is sent under masks alone")
    return aggregation.seal(table)


def unseal(message: bytes, round: UpdateRound) -> I64:
    """The table (cells,) that `seal` packed; MismatchError if it is none, or too long a one."""
    aggregation = round.task.aggregation
    if not isinstance(aggregation, Plain):
        raise SpecError("a table of a masked round is never seen alone")
    table = aggregation.open(aggregation.unpack(message, round.sketch.shape))
    try:
        return round.sketch.encode(table[None]).reshape(-1)
    except SpecError as problem:
        raise MismatchError(str(problem)) from problem


def decode(total: I64, count: int, round: UpdateRound, *, rng: Rng) -> F64:
    """The mean update (length,) of `count` clients, noised, from the sum of their tables.

    Charge `round.loss` first. Raises ImpossibleError if they are too few for the noise.
    """
    task = round.task
    if not task.min_count <= count <= task.max_count:
        raise ImpossibleError(
            f"a round of {task.max_count} clients is opened with {task.min_count} at the least; "
            f"got {count}",
            hint="ask again in another round; nothing was opened",
        )
    noised = task.mechanism.at_release(total.reshape(round.sketch.shape), count=count, rng=rng)
    return round.sketch.decode(noised, count)


@dataclass(slots=True)
class Spending:
    """What all rounds have cost the clients so far, as a list that was fixed in advance: their
    noise and probability must not be chosen by what earlier rounds showed.

    >>> spending = Spending(delta=1e-5)
    >>> loss = AdditiveLoss(noise="gaussian", scale=1000.0, l1=1000.0, l2=1000.0, unit_cells=0)
    >>> for _ in range(4):
    ...     spending.charge(loss)
    >>> round(spending.epsilon, 2)
    10.8
    """

    delta: float
    most_epsilon: float | None = None  # beyond which nothing is charged, so nothing opened
    rounds: int = 0
    _counts: Counter[tuple[Loss, float | None]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, f"delta must be above 0, below 1; got {self.delta}")
        require(
            self.most_epsilon is None or self.most_epsilon > 0,
            f"most_epsilon must be above 0; got {self.most_epsilon}",
        )

    def charge(self, loss: Loss, probability: float | None = None) -> None:
        """Add a round's loss, to a cohort drawn with this probability (None: to everybody).

        Raises BudgetError, and adds nothing, if it is more than may be spent.
        """
        self.check(loss, probability)
        self._counts[loss, probability] += 1
        self.rounds += 1

    def check(self, loss: Loss, probability: float | None = None) -> None:
        """Raise BudgetError if the round may not be paid for."""
        if self.most_epsilon is None:
            return
        after = self._epsilon(self._counts + Counter({(loss, probability): 1}))
        if after > self.most_epsilon:
            raise BudgetError(
                f"{self.rounds} rounds have spent epsilon {self.epsilon:.4g} of "
                f"{self.most_epsilon:g}, and another one would make it {after:.4g}",
                hint="stop here, or plan with more noise or fewer rounds",
            )

    @property
    def epsilon(self) -> float:
        """Of all rounds together, at `delta`; rounded up."""
        return self._epsilon(self._counts)

    def _epsilon(self, counts: Mapping[tuple[Loss, float | None], int]) -> float:
        return epsilon_of([*_losses(counts)], self.delta)


def _losses(counts: Mapping[tuple[Loss, float | None], int]) -> Iterable[Loss]:
    for (loss, probability), times in counts.items():
        if isinstance(loss, NoPrivacy) or probability is None:
            yield from [loss] * times
            continue
        if not isinstance(loss, AdditiveLoss):
            raise SpecError("rounds with random cohorts are accounted for noise on sums")
        yield SampledLoss(loss=loss, probability=probability, scheme="fixed", times=times)


def multiplier_for(
    epsilon: float, *, delta: float, rounds: int, probability: float | None = None
) -> float:
    """The least noise multiplier, rounded up, with which so many rounds cost at most epsilon.

    `probability` is that of a client to be in a cohort of `sampling="fixed"`; None for "all". It is
    for noise at the server; Skellam noise in shares of tables this fine costs less than a per cent
    more, which `Spending` counts.

    >>> round(multiplier_for(8.0, delta=1e-5, rounds=20), 2)
    2.86
    """
    require(epsilon > 0, f"epsilon must be above 0; got {epsilon}")
    require(rounds >= 1, f"rounds must be at least 1; got {rounds}")

    def cost(multiplier: float) -> float:
        scale = multiplier * COARSEST
        loss = AdditiveLoss(noise="gaussian", scale=scale, l1=COARSEST, l2=COARSEST, unit_cells=0)
        return epsilon_of([*_losses({(loss, probability): rounds})], delta)

    low, high = 0.01, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e4:
            raise ImpossibleError(
                f"no noise multiplier up to 10000 keeps epsilon {epsilon:g} over {rounds:,} rounds",
                hint="raise epsilon or delta, or ask for fewer rounds",
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    return high


def _is_real(kind: str) -> bool:
    return np.dtype(kind).kind == "f"

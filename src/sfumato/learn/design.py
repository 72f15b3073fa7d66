"""The design of a training: model, cohorts, noise, sketches and the server's steps."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import sha256
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.arrays import I64
from sfumato.errors import ImpossibleError, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import PARAMETER_BYTES, LocalTraining, ModelTerms, digest_of
from sfumato.flow.release import Influence, ModelRelease
from sfumato.flow.secure_sum import SecureSum, traffic
from sfumato.flow.task import Task
from sfumato.learn import models
from sfumato.learn.compression import MAIN_SHARE, Compression, NoCompression
from sfumato.privacy.accounting import (
    AdditiveLoss,
    Charge,
    NoPrivacy,
    PlannedLoss,
    SampledLoss,
)
from sfumato.privacy.noise_kinds import Noise
from sfumato.privacy.rounding import COARSEST, Rounding, fineness
from sfumato.privacy.samplers import LARGEST_SCALE, Rng
from sfumato.questions.promise import masked_influence
from sfumato.questions.question import Participation, Plan, QuestionDefaults, Seeded
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import LARGEST_INTEGER, digest, kind_of, later, require, spec

LEAST_DRAWN = LARGEST_SCALE["gaussian"] / 8  # of noise on tables that are coarse because of it
ROWS = 15  # of a sketch, by default; as in the paper
SECOND_WIDTH = 2  # width of the second sketch, as a multiple of its rows
SECURE_WIDTH = 4  # width of a second sketch for a norm, in a secure sum


@spec("server_optimizer")
class ServerOptimizer:
    """How the server steps along the mean update, or along an average of past updates.

    "adam" is FedAdam (Reddi et al. 2021), which adds a floor to the root of the second moment.
    """

    method: Literal["sgd", "momentum", "adam"] = "momentum"
    learning_rate: float = 1.0
    momentum: float = 0.9
    second: float = 0.99  # adam: decay of the mean of squares
    floor: float = 1e-3  # adam

    def check(self) -> None:
        require.above(0, learning_rate=self.learning_rate)
        for name in ("momentum", "second"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}")
        require.above(0, floor=self.floor)

    def step(self, flat: Tensor, update: Tensor, memory: dict[str, Tensor]) -> None:
        """Move the parameters in place by an update, which is new minus old."""
        if self.method == "sgd":
            flat.add_(update, alpha=self.learning_rate)
            return
        first = memory.setdefault("first", torch.zeros_like(flat))
        if self.method == "momentum":
            first.mul_(self.momentum).add_(update)
            flat.add_(first, alpha=self.learning_rate)
            return
        squares = memory.setdefault("squares", torch.zeros_like(flat))
        first.mul_(self.momentum).add_(update, alpha=1 - self.momentum)
        squares.mul_(self.second).addcmul_(update, update, value=1 - self.second)
        flat.addcdiv_(first, squares.sqrt().add_(self.floor), value=self.learning_rate)


@spec("adaptive_clip")
class AdaptiveClip:
    """Lets the clip follow a quantile of the updates' norms (Andrew et al. 2021).

    Every client adds ½ to a count if its update is no longer than the clip and −½ if it is longer.
    The count is noised with a deviation of `noise` and paid for out of the round's multiplier, so
    the round costs what it would have cost without it. The clip rises when too few updates are
    within it.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None  # None: a twentieth of the cohort

    def check(self) -> None:
        require(0 < self.quantile < 1, f"quantile must be above 0, below 1; got {self.quantile}")
        require.above(0, rate=self.rate, noise=self.noise)

    def deviation(self, cohort: int) -> float:
        return cohort / 20 if self.noise is None else self.noise

    def left(self, multiplier: float, cohort: int) -> float:
        """The multiplier that updates must have for the round to cost `multiplier` in all."""
        rest = 1 / multiplier**2 - 1 / (2 * self.deviation(cohort)) ** 2
        if rest <= 0:
            raise ImpossibleError(
                f"counting clipped updates with a deviation of {self.deviation(cohort):g} costs "
                f"more than a noise multiplier of {multiplier:g}",
                hint="give adaptive_clip more noise, or ask larger cohorts",
            )
        return 1 / math.sqrt(rest)

    def after(self, clip: float, share: float) -> float:
        """The next clip, given the noised share of updates within this one."""
        return clip * math.exp(-self.rate * (min(max(share, 0.0), 1.0) - self.quantile))


class ModelDesign(QuestionDefaults):
    """What designs of trainings have in common."""

    __slots__ = ()
    items_per_device: ClassVar[None] = None
    model: str | None
    inputs: int | None
    classes: int | None
    clients: int
    seed: int
    own_parameters: int | None

    def check(self) -> None:
        require(
            (self.model is None) == (self.own_parameters is not None),
            "a design must have the name of a model, or the number of its parameters",
        )

    @property
    def devices(self) -> int:
        return self.clients

    def make(self) -> nn.Module:
        """The model with its first parameters."""
        return models.make(self.model, inputs=self.inputs, classes=self.classes, seed=self.seed)

    @property
    def length(self) -> int:
        """The number of the model's parameters."""
        return self.own_parameters or models.count(self.make())

    def values(self, task: Task, items: Any, **context: Any) -> tuple[Any, None]:
        """Not available: clients compute updates from a model as well as from their data."""
        raise SpecError("a model is trained by sfumato.train")


@spec("training_design")
class TrainingDesign(ModelDesign):
    """A training, fully sized: its cohorts, local training, noise and cost.

    A round asks a cohort. Each client trains on its own examples; its update is clipped, sketched,
    clipped again and added; the sum is noised and decoded, and the server steps along it.

    Cohorts are drawn at random, each client independently ("poisson") or with a fixed size
    ("fixed"), or cohorts go through the clients in a random order ("passes"): each client is in at
    most one cohort of a pass, and a pass has one round per whole cohort.

    Claim: all rounds together are (epsilon, delta)-DP for each client at the epsilon that
        `accounting.epsilon_of` gives for `loss`; neighbours are those of `neighbours`.
    Proof: docs/proofs/sampled_rounds.md. The sum of what clients send has a sensitivity of the
        second clip, whatever the model is; sizes, clips and steps follow from noised sums.
    Assumes: without `secure`, a trusted server, and random cohorts that nobody else knows. With
        `secure` the server sees sums over enough clients and knows their cohorts: the claim holds
        against it, so it does not rely on the randomness of cohorts. With "passes" each client
        answers in at most one cohort of a pass, and nothing must stay secret.
    """

    items_per_device: ClassVar[None] = None
    may_skip: ClassVar[bool] = True
    model: str | None
    inputs: int | None = None
    classes: int | None = None
    hidden: int | None = None
    clients: int  # in the population
    cohort: int  # clients per round, on average
    rounds: int
    sampling: Literal["poisson", "fixed", "passes"] = "poisson"
    local: LocalTraining
    clip: float  # largest norm of an update
    adaptive_clip: AdaptiveClip | None = None
    largest_l1: float | None = None  # an update longer than this is left out, as in paper 002
    noise_multiplier: float  # deviation of the noise divided by the sensitivity; 0 for none
    compression: Compression = NoCompression()
    rows: int = ROWS  # of the sketch
    server: ServerOptimizer = ServerOptimizer()
    dropout: float = 0.0  # share of a cohort that does not answer
    secure: SecureSum | None = None
    seed: int  # of the model and the sketches: public
    own_parameters: int | None = later(None)  # their number, if the model has no name
    blocks: int = later(1)  # of the sketch, of which a coordinate's reading is the median

    def check(self) -> None:
        ModelDesign.check(self)
        for name in ("clients", "cohort", "rounds", "rows", "blocks"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(
            self.blocks % 2 == 1,
            f"blocks must be odd, so that the median is one block's reading; got {self.blocks}",
        )
        require(
            self.cohort <= self.clients,
            f"a cohort must not exceed the {self.clients} clients; got {self.cohort}",
        )
        require.above(0, clip=self.clip)
        require.at_least(0, noise_multiplier=self.noise_multiplier)
        require(0 <= self.dropout < 1, f"dropout must be at least 0, below 1; got {self.dropout}")
        require(0 <= self.seed < LARGEST_INTEGER, f"seed must be 0 to 2**53 - 2; got {self.seed}")
        require.above(0, largest_l1=self.largest_l1)
        kind = type(self.compression).__name__
        require(
            self.noise_multiplier > 0 or kind in ("NoCompression", "FixedRate"),
            f"{kind} sizes sketches by the noise; without noise use a fixed rate",
        )
        if self.secure is not None:
            require(self.adaptive_clip is None, "a secure sum has a fixed clip")
            require(
                self.sampling != "poisson",
                "a secure sum is set up for a cohort of a known size; set sampling to "
                '"passes" or "fixed"; got poisson',
            )
            self.secure.noise(1.0, self.cohort)  # raises if the cohort is too small
        if self.adaptive_clip is not None and self.noise_multiplier > 0:
            self.adaptive_clip.left(self.noise_multiplier, self.cohort)

    @property
    def algorithm(self) -> str:
        return "federated_averaging"

    @property
    def tasks_per_device(self) -> int:
        return self.passes

    @property
    def least_noise(self) -> float:
        return self.multiplier

    @property
    def influence(self) -> Influence:
        of = "a parameter of the model"
        if self.secure is not None:
            return masked_influence(of)
        note = f"its updates are clipped to norm {self.clip:g} of a cohort of {self.cohort:,}, but "
        note += "later rounds start from the parameters that it moved"
        if self.adaptive_clip is not None:
            note = "later rounds start from the parameters and the clip that it moved"
        return Influence(of=of, most=None, note=note)

    def with_seed(self, rng: Rng) -> Seeded:
        """Unchanged: a model's seed comes from its study (`Study.with_seed`)."""
        return Seeded(self, self.seed)

    def campaign(self, plan: Plan, **context: Any) -> Campaign:
        from sfumato.learn.campaign import TrainingCampaign  # imports this module itself

        return TrainingCampaign.begin(self)

    def answer(self, campaign: Any, plan: Plan, participation: Participation) -> ModelRelease:
        """The model after the rounds that were held; rounds still to come cost nothing."""
        tasks: list[tuple[Any, int]] = [each for each in participation.tasks if each[1]]
        if not tasks:
            raise ImpossibleError("no round was held, so the model is the initial one")
        notes = participation.notes
        if campaign.rounds_held < self.rounds:
            notes += (
                f"{campaign.rounds_held:,} of {self.rounds:,} rounds were held: too few devices "
                "took part in the others",
            )
        total_bytes = sum(traffic([task])["bytes_per_device"] * count for task, count in tasks)
        return ModelRelease.of(
            campaign.parameters(),
            rate=campaign.rate,
            rounds_held=campaign.rounds_held,
            **plan.release_head(
                devices=participation.devices,
                rounds=campaign.rounds_held,
                bytes_per_device=round(total_bytes / participation.devices),
                notes=notes,
            ),
        )

    @property
    def rounds_per_pass(self) -> int:
        """Whole cohorts among all clients; 1 where cohorts may overlap."""
        return self.clients // self.cohort if self.sampling == "passes" else 1

    @property
    def passes(self) -> int:
        """The largest number of rounds that one client takes part in."""
        return -(-self.rounds // self.rounds_per_pass)

    def members(self, round: int) -> I64:
        """The clients of a round of a pass: public, from the design's own seed."""
        number, place = divmod(round, self.rounds_per_pass)
        name = sha256(f"sfumato/1/pass/{self.seed}/{number}".encode()).digest()
        order = np.random.default_rng(list(name)).permutation(self.clients)
        return np.sort(order[place * self.cohort : (place + 1) * self.cohort])

    def parameters(self) -> dict[str, Any]:
        """The main parameters, for people to read."""
        return {
            "model": self.model or models.OWN,
            "clients": self.clients,
            "cohort": self.cohort,
            "sampling": self.sampling,
            "rounds": self.rounds,
            "rounds_of_a_client_at_most": self.passes,
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "compression": kind_of(self.compression),
            "rows": self.rows,
            "server": self.server.method,
        } | ({"blocks": self.blocks} if self.blocks > 1 else {})

    @property
    def multiplier(self) -> float:
        """The noise multiplier of updates and of what is measured beside them."""
        if self.adaptive_clip is None or self.noise_multiplier == 0:
            return self.noise_multiplier
        return self.adaptive_clip.left(self.noise_multiplier, self.cohort)

    @property
    def is_amplified(self) -> bool:
        """Whether the loss relies on secret cohorts: only with a trusted server."""
        return self.secure is None and self.sampling != "passes"

    @property
    def neighbours(self) -> Literal["zero-out", "replace"]:
        """The relation that `loss` is for."""
        return "replace" if self.is_amplified and self.sampling == "fixed" else "zero-out"

    @property
    def loss(self) -> SampledLoss | NoPrivacy:
        """The privacy loss of a client over all rounds, against everybody who is not trusted."""
        if self.noise_multiplier == 0:
            return NoPrivacy()
        # Only the coarsest table matters: finer ones cost less. Tables for Gaussian noise are
        # coarser where it could not be drawn otherwise.
        noise: Noise = "gaussian" if self.secure is None else "skellam"
        coarse = COARSEST
        if noise == "gaussian":
            coarse = min(coarse, LEAST_DRAWN / self.noise_multiplier)
        one = AdditiveLoss(
            noise=noise,
            scale=self.noise_multiplier * coarse,
            l1=max(coarse, coarse**2),
            l2=coarse,
            unit_cells=0,
        )
        if not self.is_amplified:  # at most `passes` cohorts, known to have this client
            return SampledLoss(loss=one, probability=1.0, scheme="poisson", times=self.passes)
        return SampledLoss(
            loss=one,
            probability=self.cohort / self.clients,
            scheme="fixed" if self.sampling == "fixed" else "poisson",
            times=self.rounds,
        )

    def charge_of(self, task: Task) -> Charge:
        """All rounds are charged as one plan: the loss of a client in the largest possible number
        of cohorts or, where cohorts are secret, of a client that may be in each of them."""
        if not isinstance(self.loss, SampledLoss):
            return task.loss
        one = self.loss.loss if self.sampling == "passes" else self.round_loss
        return PlannedLoss(loss=one, plan=digest(self), losses=(one,), times=self.passes)

    @property
    def round_loss(self) -> SampledLoss | NoPrivacy:
        """The loss of one round, for a client that may be in its cohort."""
        whole = self.loss
        return whole if isinstance(whole, NoPrivacy) else replace(whole, times=1)

    @property
    def largest(self) -> float:
        """The largest squared norm of a round's sum, divided by the noise's variance."""
        return (self.cohort / self.multiplier) ** 2 if self.multiplier else math.inf

    def make(self) -> nn.Module:
        return models.make(
            self.model, inputs=self.inputs, classes=self.classes, hidden=self.hidden, seed=self.seed
        )

    def model_terms(self, parameters: bytes, round: int) -> ModelTerms:
        """The terms for a client that trains from these parameters in a round."""
        if self.model is None:
            raise SpecError(f"devices have no code for {models.OWN}; name one of the models")
        return ModelTerms(
            model=self.model,
            inputs=self.inputs,
            classes=self.classes,
            hidden=self.hidden,
            local=self.local,
            round=round + 1,
            rounds=self.rounds,
            largest_l1=self.largest_l1,
            parameters=len(parameters) // PARAMETER_BYTES,
            digest=digest_of(parameters),
        )

    def sketch(self, length: int, cells: int, round: int) -> DenseSketch | None:
        """The sketch of a round, of at most `cells`; None if updates are sent whole."""
        if max(cells, self.blocks) >= length:
            return None
        return DenseSketch.within(
            cells, length=length, rows=self.rows, blocks=self.blocks, seed=self.seed, round=round
        )

    def second_sketch(self, length: int, round: int) -> DenseSketch:
        """The small sketch whose norm, or error, is measured: ⌈ln d⌉ rows. In a secure sum each
        of its cells has noise, so one whose norm is measured is smaller."""
        rows = math.ceil(math.log(length)) if length > 1 else 1
        width = SECOND_WIDTH * rows
        if self.secure is not None and self.compression.asks == "norm":
            width = SECURE_WIDTH
        return DenseSketch(length=length, rows=rows, width=width, seed=self.seed + 1, round=round)


def whole_numbers(
    design: TrainingDesign, length: int, dense: DenseSketch | None, clip: float
) -> VectorSketch:
    """The sketch that turns updates into whole numbers, fine enough for rounding to cost little
    beside the noise, and coarser where the samplers could not draw that much noise."""
    cells = length if dense is None else dense.cells
    fine = fineness(cells, design.cohort, design.multiplier)
    if design.multiplier:
        fine = _drawable_fineness(design, fine, cells)
    bound = table_bound(dense, clip)
    return VectorSketch(length=length, clip=clip, bound=bound, scale=fine / bound, dense=dense)


def table_bound(dense: DenseSketch | None, clip: float) -> float:
    """The largest norm of a client's table: there is no headroom for sketches that are longer than
    their vectors, but every block is a sketch of the whole vector."""
    return clip if dense is None else math.sqrt(dense.blocks) * clip


def second_whole_numbers(main: VectorSketch, second: DenseSketch, clip: float) -> VectorSketch:
    """The second sketch of a secure sum, in whole numbers whose norm is the part of both tables'
    that belongs to the second: with noise of one scale on both, each has its part of the budget."""
    target = main.rounding.l2 * math.sqrt(1 / MAIN_SHARE - 1)

    def sketch(fine: float) -> VectorSketch:
        return VectorSketch(
            length=main.length, clip=clip, bound=clip, scale=fine / clip, dense=second
        )

    low, high = 1.0, target  # rounding lengthens a table
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        longer = sketch(middle).rounding.l2 > target
        low, high = (low, middle) if longer else (middle, high)
    return sketch(low)


def _drawable_fineness(design: TrainingDesign, fine: float, cells: int) -> float:
    """Whole numbers per clip: `fine`, or fewer if the samplers' largest scale demands it."""
    if design.secure is None:
        share = 1.0 if design.compression.asks == "nothing" else 1 - MAIN_SHARE
        most, least = LARGEST_SCALE["gaussian"] * math.sqrt(share), 1.0
    else:  # surplus clients add surplus noise; the loss assumes tables at least this fine
        most = LARGEST_SCALE["skellam"] / design.secure.noise(1.0, design.cohort).stddev(
            design.cohort
        )
        most *= 1.0 if design.compression.asks == "nothing" else math.sqrt(MAIN_SHARE)
        least = COARSEST

    def can_draw(fine: float) -> bool:  # rounding may add one to a measured norm
        length = Rounding(clip=1.0, scale=fine, cells=cells).l2 + 1
        return design.multiplier * length <= most

    if can_draw(fine):
        return fine
    if not can_draw(least):
        raise ImpossibleError(
            f"noise of {design.multiplier:g} times a table of {cells:,} cells is more than can be "
            "drawn",
            hint="raise epsilon, ask for fewer rounds or smaller cohorts, or for smaller sketches",
        )
    low, high = least, fine
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if can_draw(middle) else (low, middle)
    return low

"""The server's side of a training of masked sums: one task a round, one step a noised sum.

It holds parameters, never an example or an update, and all that it does follows from public numbers
and noised sums: who absorbs the same answers again has the same model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.device.private import update_table
from sfumato.errors import MismatchError, SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.model_terms import Train, to_bytes
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.learn import models
from sfumato.learn.compression import Seen, Sizing
from sfumato.learn.design import TrainingDesign, whole_numbers
from sfumato.privacy import NoiseInShares, NoNoise, Rng
from sfumato.sketch.vector import VectorSketch
from sfumato.spec import digest

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
NAME_DIGITS = 32  # of a design's digest, in the name of a campaign


@dataclass(slots=True, repr=False)
class TrainingCampaign(Campaign):
    """A training as far as it has come: `next_task` asks a round, `absorb` steps along its sum.

    A pass over the clients is a campaign of the ledger's, a round a cohort of it: so the ledger,
    and each device's own, count one round a pass, which is what the design's loss is of. A round
    that could not be held is skipped (`skip`); what was charged for it stays charged.
    """

    design: TrainingDesign
    flat: Tensor
    sizing: Sizing
    memory: dict[str, Tensor] = field(default_factory=dict)  # of the server's optimiser
    done: int = 0
    held: int = 0  # rounds that were not skipped
    cells_sent: int = 0

    def __post_init__(self) -> None:
        if self.design.secure is None:
            raise SpecError(
                'a training in masked rounds is one of secure sums; set trust to "secure"'
            )

    @classmethod
    def begin(cls, design: TrainingDesign) -> TrainingCampaign:
        """At the first round, with the parameters that the design's seed gives."""
        flat = models.flatten(design.make())
        return cls(design, flat, design.compression.start(flat.numel(), design.largest))

    @property
    def length(self) -> int:
        return self.flat.numel()

    @property
    def rate(self) -> float:
        """Parameters by cells sent, over all rounds that were asked."""
        return self.length * self.done / self.cells_sent if self.cells_sent else 1.0

    def parameters(self) -> bytes:
        """What the clients of the next round start from: float32, little-endian."""
        return to_bytes(self.flat.detach().cpu().numpy())

    def next_task(self) -> Task | None:
        design, secure = self.design, self.design.secure
        assert secure is not None  # as was seen
        if self.done >= design.rounds:
            return None
        dense = design.sketch(self.length, self.sizing.cells, self.done)
        sketch = whole_numbers(design, self.length, dense, design.clip)
        return secure.task(
            sketch=sketch,
            mechanism=mechanism(design, sketch),
            campaign=f"{digest(design)[:NAME_DIGITS]} pass {self.done // design.rounds_per_pass}",
            cohort=f"round {self.done}",
            asked=design.cohort,
            items_per_device=1,
        )

    def absorb(self, answer: NoisedSum) -> None:
        sketch, design = answer.task.sketch, self.design
        if answer.task.cohort != f"round {self.done}" or not isinstance(sketch, VectorSketch):
            raise MismatchError(f"this training waits for its round {self.done}; got another's sum")
        deviation = answer.task.mechanism.stddev(answer.count)
        update, seen = shown(
            sketch, answer.table, deviation=deviation, progress=(self.done + 1) / design.rounds
        )
        step = torch.from_numpy(update.astype(np.float32)).to(self.flat.device) / design.cohort
        design.server.step(self.flat, step, self.memory)
        self.sizing = design.compression.after(self.sizing, seen, self.length)
        self.done, self.held = self.done + 1, self.held + 1
        self.cells_sent += sketch.cells

    def skip(self) -> None:
        """Go on without the round that was asked: too few were left, and no sum was told."""
        task = self.next_task()
        if task is not None:
            self.done += 1
            self.cells_sent += task.cells

    def __repr__(self) -> str:
        return f"TrainingCampaign({self.done} of {self.design.rounds} rounds done)"


def mechanism(design: TrainingDesign, sketch: VectorSketch) -> NoiseInShares | NoNoise:
    """The noise that clients of a secure sum add to a table of a round."""
    assert design.secure is not None  # as callers have seen
    scale = design.multiplier * sketch.rounding.l2
    return design.secure.noise(scale, design.cohort) if scale else NoNoise()


def shown(
    sketch: VectorSketch, table: I64, *, deviation: float, progress: float
) -> tuple[F64, Seen]:
    """The sum of the updates that a noised table holds, and what else it shows.

    `deviation` is that of the noise on a cell, in the table's own whole numbers.
    """
    unit = sketch.scale
    seen = Seen(
        squared=float(np.square(table / unit).sum()),
        cells=sketch.cells,
        noise=deviation / unit,
        progress=progress,
    )
    return sketch.decode(table, 1), seen


def by_devices(
    campaign: TrainingCampaign, devices: Iterable[tuple[Rng, Train]]
) -> NoisedSum | None:
    """What a round of these devices shows, each of whom computes by itself, as it would over a
    network, but for the masks, which leave nothing in a sum; None if they are too few."""
    task = campaign.next_task()
    assert task is not None  # callers count rounds
    parameters = campaign.parameters()
    terms = campaign.design.model_terms(parameters, campaign.done)
    total, count = np.zeros(task.cells, dtype=np.int64), 0
    for rng, train in devices:
        total += update_table(task, terms, parameters, train)(rng)
        count += 1
    if count < task.min_count:
        return None
    return NoisedSum(task, task.aggregation.open(total.reshape(task.sketch.shape)), count)

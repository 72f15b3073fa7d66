"""A mean whose clip comes from the devices: a first round counts how long their vectors are.

A clip that is too short biases the mean, and one that is too long adds noise. So the first round
counts the bins of the vectors' norms, with noise and charged like any other, and the clip is a
function of these counts (docs/proofs/mean.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sfumato.flow.campaign import Campaign
from sfumato.flow.release import Influence, MeanRelease, NoisedSum
from sfumato.flow.secure_sum import sum_task, traffic
from sfumato.flow.task import Task
from sfumato.privacy import Charge, Mechanism, NoiseAtRelease, NoNoise, PlannedLoss, Rng
from sfumato.privacy.accounting import SMOOTHING
from sfumato.questions.answers import check_finished
from sfumato.questions.mean.design import (
    LEAST_MULTIPLIER,
    MeanCampaign,
    MeanDesign,
    check_vectors,
)
from sfumato.questions.promise import masked_influence
from sfumato.questions.question import Dictionary, Participation, Plan, QuestionDefaults, Seeded
from sfumato.sketch import NormBins, OneHot
from sfumato.spec import digest, require, spec

if TYPE_CHECKING:  # the layers above
    from sfumato.simulation.population import Population


NORM_SHARE = 0.1  # of the budget, in 1/variance, for the counts of norms
MISTAKE = 1e-3  # largest probability that any empty bin counts as one with devices
_SKELLAM = 2.25  # Skellam noise of variance v costs up to a share of this over v more


def norm_variance(multiplier: float, *, in_shares: bool) -> float:
    """The least variance of the noise on the counts of norms that costs no more than their share of
    a budget that allows one release with this noise multiplier.

    Skellam noise of variance v costs (1 + 2.25/v)/v, in units of the Gaussian's 1/v, and discrete
    Gaussian noise at most 1/(v − 3).

    >>> norm_variance(1.0, in_shares=False), round(norm_variance(1.0, in_shares=True), 3)
    (13.0, 11.892)
    """
    variance = multiplier**2 / NORM_SHARE
    if not in_shares:
        return variance + SMOOTHING
    return (variance + math.sqrt(variance**2 + 4 * _SKELLAM * variance)) / 2


@spec("clipped_mean_design")
class ClippedMeanDesign(QuestionDefaults):
    """A mean of the same devices whose norms were counted before, for `ClippedMeanCampaign`."""

    items_per_device: ClassVar[None] = None
    mean: MeanDesign  # in units of the clip, so that its own clip is 1
    bins: NormBins
    mechanism: Mechanism  # of the counts

    def check(self) -> None:
        mean = self.mean
        require(
            mean.clip == 1, f"the mean must be in units of the clip: its own is 1; got {mean.clip}"
        )
        require(
            self.bins.length == mean.dimensions,
            f"norms must be of vectors of {mean.dimensions} dimensions; got {self.bins.length}",
        )
        require(
            isinstance(self.mechanism, NoNoise) == (mean.multiplier == 0),
            "counts of norms must have noise if, and only if, the mean has",
        )
        require(
            mean.multiplier == 0 or mean.multiplier >= LEAST_MULTIPLIER,
            f"noise must have a multiplier of at least {LEAST_MULTIPLIER}; "
            f"got {mean.multiplier:.3g}: set clip, or a smaller epsilon",
        )

    @property
    def devices(self) -> int:
        return self.mean.devices

    @property
    def rounds(self) -> int:
        return self.mean.cohort_count + self.mean.rounds

    @property
    def tasks_per_device(self) -> int:
        return 1 + self.mean.tasks_per_device

    @property
    def least_noise(self) -> float:
        return min(self.norm_noise, self.mean.least_noise)

    @property
    def norm_noise(self) -> float:
        """The standard deviation of the noise on a count of norms that the guarantee relies on."""
        return self.norm_task().noise_multiplier or 0.0  # a device moves one count by one

    @property
    def algorithm(self) -> str:
        return self.mean.algorithm

    @property
    def influence(self) -> Influence:
        of = "a coordinate of the mean"
        if self.mean.secure is not None:
            return masked_influence(of)
        note = "one report can change the clip, and with it the bias and the noise of the answer"
        return Influence(of=of, most=None, note=note)

    def cohorts(self) -> dict[str, float]:
        return self.mean.cohorts()

    def cohort_size(self, task: Task) -> float:
        return self.mean.cohort_size(task)

    def with_seed(self, rng: Rng) -> Seeded:
        seeded = self.mean.with_seed(rng)
        assert isinstance(seeded.question, MeanDesign)  # it has only another seed
        return Seeded(replace(self, mean=seeded.question), seeded.seed)

    def norm_task(self, cohort: int = 0) -> Task:
        """The task of the first round: each device's bin, as a one-hot table or a sparse report."""
        return sum_task(
            self.mean.secure,
            sketch=OneHot(categories=self.bins.count),
            mechanism=self.mechanism,
            campaign=digest(self),
            cohort=self.mean.cohort_names()[cohort],
            devices=self.mean.cohort_devices,
            sparse=True,
        )

    def item_keys(self, task: Task) -> NormBins | None:
        return self.bins if isinstance(task.sketch, OneHot) else None

    def longer(self, count: int) -> float:
        """The number of `count` vectors that should be longer than the clip: that at which a
        shorter clip would add as much bias as it saves noise, but at most half of them."""
        mean = self.mean
        noise = mean.noise(len(mean.shares) - 1, 0, count)
        return min(math.sqrt(mean.dimensions) * noise, count / 2)

    def least_count(self, count: int) -> int:
        """A bin with a smaller count may be empty, if `count` devices answer."""
        return max(1, self.mechanism.law(count).exceeded(MISTAKE / self.bins.count))

    def clip_from(self, norms: NoisedSum) -> tuple[float, bool]:
        """The clip, and whether any bin has clearly more devices than its noise.

        Counts that noise alone could have made are left out, so that no empty bin matters. The clip
        is the upper end of the first bin, from the longest, with which more than `longer` vectors
        are in the bins so far.
        """
        table = np.asarray(norms.table)
        least = self.least_count(norms.count)
        is_clear = bool(table.max() >= least)
        places = np.flatnonzero(table >= min(least, int(table.max())))[::-1]
        so_far = np.cumsum(table[places])
        enough = np.flatnonzero(so_far > self.longer(norms.count))
        place = places[enough[0]] if enough.size else places[-1]
        return self.bins.upper_end(int(place)), is_clear

    def campaign(
        self, plan: Plan, *, devices: int | None = None, **context: Any
    ) -> ClippedMeanCampaign:
        return ClippedMeanCampaign(self, devices=devices)

    def bound(
        self, population: Population, *, plan: Plan, rng: Rng, alone: bool
    ) -> tuple[Population, list[str]]:
        return population, check_vectors(population, self.mean.dimensions)

    def values(
        self, task: Task, items: Any, *, dictionary: Dictionary | None, place: tuple[int, int]
    ) -> tuple[Any, None]:
        if isinstance(task.sketch, OneHot):
            return self.bins.places(items), None
        return self.mean.values(task, items, dictionary=dictionary, place=place)

    def answer(
        self, campaign: ClippedMeanCampaign, plan: Plan, participation: Participation
    ) -> MeanRelease:
        check_finished(campaign, participation)
        assert campaign.mean is not None  # the campaign is finished
        release = self.mean.answer(campaign.mean, plan, participation)
        clip, tasks = campaign.mean.design.clip, [self.norm_task(), *campaign.mean.tasks]
        parameters: dict[str, Any] = release.plan["parameters"] | {"clip": clip}
        notes = []
        if not campaign.is_clear:
            notes.append(
                "no bin of norms has clearly more devices than its noise, so the clip is a guess; "
                "ask more devices, raise epsilon, or set clip"
            )
        if clip in self.bins.ends:
            notes.append(
                f"the clip, {clip:.3g}, is an end of its range, so most vectors may be longer or "
                "much shorter; use another unit for the vectors, or set clip"
            )
        return replace(
            release,
            privacy=replace(release.privacy, influence=self.influence),
            cost=replace(
                release.cost,
                rounds=release.cost.rounds + self.mean.cohort_count,
                bytes_per_device=traffic(tasks)["bytes_per_device"],
            ),
            plan={**release.plan, "parameters": parameters},
            notes=(*release.notes, *notes),
        )

    def charge_of(self, task: Task) -> Charge:
        """One plan for all rounds. The loss of the mean's rounds does not depend on the clip, since
        their noise is proportional to it."""
        if self.mean.multiplier == 0:
            return task.loss
        losses = (self.norm_task().loss, *self.mean.largest_losses())
        step = 0 if isinstance(task.sketch, OneHot) else 1 + self.mean.step_of(task)
        return PlannedLoss(loss=losses[step], plan=digest(self), losses=losses)

    def parameters(self) -> dict[str, Any]:
        sizes = self.mean.parameters() | {"clip": "from the first round"}
        sizes |= {"norm_bins": self.bins.count, "norm_bins_per_octave": self.bins.per_octave}
        if self.mean.multiplier:
            sizes |= {"norms_share_of_budget": NORM_SHARE, "norms_noise_scale": self.norm_noise}
        return sizes | {"rounds": self.rounds}


@dataclass(slots=True, repr=False)
class ClippedMeanCampaign(Campaign):
    """Asks for the bins of norms, chooses the clip, and asks for the mean."""

    design: ClippedMeanDesign
    devices: int | None = None  # number asked; as planned by default
    mean: MeanCampaign | None = None  # when the clip is known
    is_clear: bool = True  # false if the clip is a guess
    _norms: list[NoisedSum] = field(default_factory=list)  # one per cohort

    def next_task(self) -> Task | None:
        if self.mean is not None:
            return self.mean.next_task()
        return self.design.norm_task(len(self._norms))

    def absorb(self, answer: NoisedSum) -> None:
        if self.mean is not None:
            self.mean.absorb(answer)
            return
        self.expect(answer.task.id)
        self._norms.append(answer)
        if len(self._norms) == self.design.mean.cohort_count:
            clip, self.is_clear = self.design.clip_from(NoisedSum.total(self._norms))
            self.mean = MeanCampaign(replace(self.design.mean, clip=clip), devices=self.devices)


def norm_mechanism(mean: MeanDesign, multiplier: float) -> Mechanism:
    """The noise on counts of norms, if a release with the whole budget has this multiplier."""
    if multiplier == 0:
        return NoNoise()
    scale = math.sqrt(norm_variance(multiplier, in_shares=mean.secure is not None))
    if mean.secure is not None:
        return mean.secure.noise(scale, mean.cohort_devices)
    return NoiseAtRelease(noise="gaussian", scale=scale)

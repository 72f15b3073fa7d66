"""What each question that is answered by sums means to a collector: its campaign and its terms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from sfumato.device.offers import noise_of
from sfumato.flow.campaign import Campaign
from sfumato.flow.task import Task
from sfumato.planning import Plan, learning
from sfumato.privacy import Rng
from sfumato.questions.frequencies.design import PILOT_COHORT, FrequencyCampaign, FrequencyDesign
from sfumato.questions.heavy_hitters.design import (
    HeavyHitterCampaign,
    HeavyHitterDesign,
    HistogramCampaign,
    HistogramDesign,
)
from sfumato.questions.mean.design import MeanCampaign, MeanDesign
from sfumato.questions.prefix_search.design import PrefixCampaign, PrefixDesign
from sfumato.questions.registry import Design
from sfumato.spec import LARGEST_INTEGER, kinds
from sfumato.study import Study

if TYPE_CHECKING:  # PyTorch takes seconds to import, and only training needs it
    from typing_extensions import TypeIs

    from sfumato.learn.campaign import TrainingCampaign
    from sfumato.learn.design import TrainingDesign

AnyDesign: TypeAlias = "Design | TrainingDesign"


def with_own_seed(study: Study, rng: Rng) -> Study:
    """A study with a model and sketches of its own, so that no other's rounds are its own; what is
    not trained gets its seed with its design (`registry.begun`)."""
    if study.training is None:
        return study
    seed = int(rng.words(1)[0]) % LARGEST_INTEGER
    return replace(study, training=replace(study.training, seed=seed))


def campaign_for(planned: Plan, rng: Rng) -> Campaign:
    """The plan's campaign at its beginning; `rng` is for what it draws by itself."""
    design = planned.design
    if isinstance(design, FrequencyDesign):
        return FrequencyCampaign(design, planned.asked_about.items)
    if isinstance(design, PrefixDesign):
        return PrefixCampaign(design)
    if isinstance(design, MeanDesign):
        return MeanCampaign(design)
    if is_training(design):
        return learning().TrainingCampaign.begin(design)  # type: ignore[no-any-return]  # a module
    least = planned.study.threshold or 0.0
    if isinstance(design, HistogramDesign):
        return HistogramCampaign(design, rng, least=least)
    assert isinstance(design, HeavyHitterDesign)  # `requests` lets no other in
    return HeavyHitterCampaign(design, rng, least=least)


def is_training(design: object) -> TypeIs[TrainingDesign]:
    """Whether it is of a model; asked without importing what trains one."""
    return type(design) is kinds().get("training_design")


def trained(campaign: Campaign) -> TrainingCampaign | None:
    """The campaign, if a model is trained in it."""
    found: Any = campaign
    return found if is_training(getattr(campaign, "design", None)) else None


def contributions(design: AnyDesign) -> int:
    """Tasks that one device answers at most."""
    if isinstance(design, PrefixDesign):
        return design.rounds
    if isinstance(design, MeanDesign):
        return len(design.shares)
    if is_training(design):
        return design.passes
    return 2 if isinstance(design, HistogramDesign) else 1


def least_noise(design: AnyDesign) -> float | None:
    """The least that `offers.noise_of` is for a task of the design; None if no task has any."""
    if isinstance(design, HeavyHitterDesign):
        return None
    if isinstance(design, MeanDesign):
        return design.multiplier / math.sqrt(max(design.shares))
    if is_training(design):
        return design.multiplier
    tasks = design.counts.tasks() if isinstance(design, HistogramDesign) else design.tasks()
    if isinstance(design, FrequencyDesign) and design.pilot_devices:
        tasks = [design.pilot(), *tasks]
    known = [noise for task in tasks if (noise := noise_of(task)) is not None]
    return min(known, default=None)


def wanted(planned: Plan, task: Task) -> int:
    """Devices at which a task closes by itself: as many as the plan was made for."""
    design = planned.design
    if task.aggregation.hides_summands:
        return task.max_count - 1
    share: float
    if isinstance(design, HistogramDesign):
        listing = task.campaign == design.names.task(0, design.names.mechanism.rate).campaign
        counts = design.counts
        share = design.names.asked if listing else counts.devices / len(counts.tasks())
    elif isinstance(design, HeavyHitterDesign):
        share = design.asked
    elif isinstance(design, FrequencyDesign):
        pilot = design.pilot_devices
        main = (design.devices - pilot) / len(design.tasks())
        share = pilot if task.cohort == PILOT_COHORT else main
    else:
        assert isinstance(design, MeanDesign | PrefixDesign)  # which ask everybody
        share = design.devices
    return max(1, math.floor(share * (1 - planned.study.dropout) + 0.5))

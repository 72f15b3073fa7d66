"""What each question that is answered by sums means to a collector: its campaign and its terms."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.campaign import Campaign
from sfumato.frequencies import PILOT_COHORT, FrequencyCampaign, FrequencyDesign
from sfumato.heavy_hitters import HeavyHitterCampaign, HeavyHitterDesign, HistogramDesign
from sfumato.histogram import HistogramCampaign
from sfumato.mean import MeanCampaign, MeanDesign
from sfumato.offers import noise_of
from sfumato.plan import Plan, learning
from sfumato.prefix_search import PrefixCampaign, PrefixDesign
from sfumato.prefixes import Prefix
from sfumato.privacy import Rng
from sfumato.sketch import CountSketch, TextKeys, WordKeys
from sfumato.spec import LARGEST_INTEGER, kinds
from sfumato.study import Study
from sfumato.task import Task

if TYPE_CHECKING:  # PyTorch takes seconds to import, and only training needs it
    from typing_extensions import TypeIs

    from sfumato.learn.campaign import TrainingCampaign
    from sfumato.learn.design import TrainingDesign

Design: TypeAlias = (
    "FrequencyDesign | HeavyHitterDesign | HistogramDesign | PrefixDesign | MeanDesign"
    " | TrainingDesign"
)

SECRET_BYTES = 32


class SecretRng:
    """Words that a secret repeats. What a campaign draws by itself must come out the same whenever
    its answers are absorbed again, and be known to nobody."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._calls = secret, 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        self._calls += 1
        text = b"sfumato/1/campaign/" + self._secret + self._calls.to_bytes(8, "little")
        stream = hashlib.shake_256(text).digest(8 * count)
        return np.frombuffer(stream, dtype="<u8").astype(np.uint64)

    def __repr__(self) -> str:
        return "SecretRng(…)"  # its state is the noise


def with_own_seed(study: Study, rng: Rng) -> Study:
    """A study with a model and sketches of its own, so that no other's rounds are its own; what is
    not trained gets its seed with its design (`seeded`)."""
    if study.training is None:
        return study
    seed = int(rng.words(1)[0]) % LARGEST_INTEGER
    return replace(study, training=replace(study.training, seed=seed))


def seeded(design: Design, rng: Rng) -> Design:
    """The design with hash functions of its own."""
    if is_training(design):
        return design  # made for a study that has them
    if isinstance(design, HistogramDesign):
        return replace(
            design,
            names=replace(design.names, seed=_public_seed(rng)),
            counts=replace(design.counts, seed=_public_seed(rng)),
        )
    return replace(design, seed=_public_seed(rng))


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


def draws(design: object) -> bool:
    """Whether its campaign draws anything by itself."""
    return isinstance(design, HeavyHitterDesign | HistogramDesign)


def contributions(design: Design) -> int:
    """Tasks that one device answers at most."""
    if isinstance(design, PrefixDesign):
        return design.rounds
    if isinstance(design, MeanDesign):
        return len(design.shares)
    if is_training(design):
        return design.passes
    return 2 if isinstance(design, HistogramDesign) else 1


def least_noise(design: Design) -> float | None:
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


def keys_of(design: Design, task: Task) -> TextKeys | WordKeys | Prefix | None:
    """What of an item a task's table counts, where its sketch does not say."""
    if isinstance(design, PrefixDesign):
        level = [each.id for each in design.tasks()].index(task.id)
        return design.prefix(level)
    if isinstance(design, HistogramDesign) and isinstance(task.sketch, CountSketch):
        keys = design.names.keys
        assert isinstance(keys, TextKeys | WordKeys)  # a study has no others
        return keys
    return None


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


def _public_seed(rng: Rng) -> int:
    return int(rng.words(1)[0]) & LARGEST_INTEGER

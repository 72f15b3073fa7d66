"""What all questions that are answered by tables have in common: their designs, and what is drawn
for them before anybody is asked.

A simulation and a collector draw alike, so that from one seed both have the same hash functions
and the same campaign.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.questions.frequencies.design import FrequencyDesign
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.mean.design import MeanDesign
from sfumato.questions.prefix_search.design import PrefixDesign
from sfumato.sketch import CountSketch, TextKeys, WordKeys
from sfumato.sketch.words import Prefix
from sfumato.spec import LARGEST_INTEGER

Design: TypeAlias = (
    FrequencyDesign | HeavyHitterDesign | HistogramDesign | PrefixDesign | MeanDesign
)
_Design = TypeVar("_Design", bound=Design)

_SECRET_WORDS = 4


def begun(design: _Design, rng: Rng) -> tuple[_Design, bytes]:
    """The design with hash functions of its own, and the secret (`SecretRng`) of what its campaign
    draws by itself: 32 bytes, or none. Drawn in this order, and before all else."""
    changes: dict[str, Any] = {"seed": _public_seed(rng)}
    if isinstance(design, HistogramDesign):
        counts = replace(design.counts, seed=_public_seed(rng))
        changes = {"names": replace(design.names, **changes), "counts": counts}
    seeded = replace(design, **changes)
    return seeded, rng.words(_SECRET_WORDS).tobytes() if draws(design) else b""


def draws(design: object) -> bool:
    """Whether its campaign draws anything by itself."""
    return isinstance(design, HeavyHitterDesign | HistogramDesign)


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


def _public_seed(rng: Rng) -> int:
    return int(rng.words(1)[0]) & LARGEST_INTEGER

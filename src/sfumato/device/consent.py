"""What a user agreed to, and whether an offer still keeps to it."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from sfumato.device.offers import Offer
from sfumato.flow.aggregation import Masked
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.task import Task
from sfumato.privacy import ListedAbove, Mechanism

_SAME = ("purpose", "question", "trust")
_MOST = (
    "epsilon",
    "delta",
    "daily_reports",
    "lifetime_epsilon",
    "items_per_report",
    "contributions",
)


def changes(agreed: Offer, offered: Offer) -> tuple[str, ...]:
    """The terms that an offer makes worse than what the user agreed to; they need consent again.

    Terms that ask for less need none. Where tables are sent, the promise is the noise that the
    offer names: there must be no less of it. If it names none, the task's must be the same. Where
    they are masked, no more may be left to trust in the collector and in other devices.
    """
    worse = [name for name in _SAME if getattr(agreed, name) != getattr(offered, name)]
    worse += [name for name in _MOST if _limit(offered, name) > _limit(agreed, name)]
    if agreed.masked and not offered.masked:
        worse.append("masked")
    if offered.delay_seconds < agreed.delay_seconds:
        worse.append("delay_seconds")
    if isinstance(agreed.task, Task) and isinstance(offered.task, Task):
        before, after = agreed.task.mechanism, offered.task.mechanism
        if agreed.noise is not None and (offered.noise or 0.0) < agreed.noise:
            worse.append("noise")
        if agreed.noise is None or isinstance(after, ListedAbove):
            worse += [] if _promise(before) == _promise(after) else ["mechanism"]
        if offered.task.min_count < agreed.task.min_count:
            worse.append("min_count")
        if _trained(agreed.model) != _trained(offered.model):
            worse.append("model")
        worse += _less_hidden(agreed.task, offered.task)
    return tuple(worse)


def _less_hidden(agreed: Task, offered: Task) -> list[str]:
    """What of a masked sum protects against fewer, or weaker, than before."""
    before, after = agreed.aggregation, offered.aggregation
    if not (isinstance(before, Masked) and isinstance(after, Masked)):
        return []  # another trust, then
    worse = [
        name
        for name in ("corrupt", "security_bits")
        if getattr(after, name) < getattr(before, name)
    ]
    if before.mode == "semi_malicious" != after.mode:
        worse.append("mode")
    return worse


def _promise(mechanism: Mechanism) -> object:
    """What of a mechanism must stay: of a list that does not count on its coins, all but them."""
    if isinstance(mechanism, ListedAbove) and not mechanism.amplified:
        kept = [field.name for field in fields(mechanism) if field.name != "rate"]
        return [getattr(mechanism, name) for name in kept]
    return mechanism


def _trained(model: ModelTerms | None) -> object:
    """What of a model must stay: all but the round, and the parameters that it brings along."""
    return None if model is None else replace(model, digest="0" * 64, round=1)


def _limit(offer: Offer, name: str) -> float:
    """A limit as a number; where there is none it is infinite."""
    value = getattr(offer, name)
    return math.inf if value is None else float(value)

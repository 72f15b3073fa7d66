"""All that a device keeps: its outbox, what it was offered and what its user agreed to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache

from sfumato.device.offers import Offer, offer_from_text
from sfumato.device.outbox import Outbox
from sfumato.errors import OfferError, SpecError
from sfumato.flow.task import Task
from sfumato.spec import canonical, to_json

VERSION = 1
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Retry:
    """When a task that could not be answered is tried again."""

    failures: int
    at: float


@dataclass(slots=True)
class Contribution:
    """What this device did for a campaign: its cohort, and the tasks whose sum has its table."""

    study: str
    cohort: str
    tasks: set[str] = field(default_factory=set)  # of masked rounds; an outbox counts the others


@dataclass(slots=True, repr=False)
class State:
    """Changed in place by `Device`, which writes it to its box before it acts on anything."""

    outbox: Outbox = field(default_factory=Outbox)
    offered: dict[str, Offer] = field(default_factory=dict)  # by study, as does the next one
    agreed: dict[str, Offer] = field(default_factory=dict)
    report_ids: dict[str, str] = field(default_factory=dict)  # of records that are on the way
    retries: dict[str, Retry] = field(default_factory=dict)  # by task
    contributed: dict[str, Contribution] = field(default_factory=dict)  # by campaign

    def may_contribute(self, offer: Offer, task: Task) -> bool:
        """Whether a table for this task keeps the device within what the study's promise counts
        with: one cohort of a campaign, a task once, and no more tasks than the offer says. A
        campaign is one study's: another's that names it is not answered."""
        known = self.contributed.get(_campaign(offer, task))
        if known is not None and (
            known.study != offer.study or known.cohort != task.cohort or task.id in known.tasks
        ):
            return False
        every = [part for part in self.contributed.values() if part.study == offer.study]
        return sum(len(part.tasks) for part in every) < offer.contributions

    def contribute(self, offer: Offer, task: Task) -> Contribution:
        """Write down that this device is in the task's cohort."""
        return self.contributed.setdefault(
            _campaign(offer, task), Contribution(offer.study, task.cohort)
        )

    def take_back(self, offer: Offer, task: Task) -> None:
        """The table that was sent for this task is in no sum."""
        part = self.contributed.get(_campaign(offer, task))
        if part is not None and part.study == offer.study:
            part.tasks.discard(task.id)
            if not part.tasks:
                del self.contributed[_campaign(offer, task)]

    def to_json(self) -> str:
        return canonical(
            {
                "version": VERSION,
                "outbox": self.outbox.to_json(),
                "offered": [_text(offer) for offer in self.offered.values()],
                "agreed": [_text(offer) for offer in self.agreed.values()],
                "report_ids": self.report_ids,
                "retries": {
                    task: [retry.failures, retry.at] for task, retry in self.retries.items()
                },
                "contributed": {
                    campaign: [part.study, part.cohort, sorted(part.tasks)]
                    for campaign, part in self.contributed.items()
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> State:
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise SpecError("another version")
            return cls(
                outbox=Outbox.from_json(data["outbox"]),
                offered=_by_study(data["offered"]),
                agreed=_by_study(data["agreed"]),
                report_ids=dict(data["report_ids"]),
                retries={
                    task: Retry(int(n), float(at)) for task, (n, at) in data["retries"].items()
                },
                contributed={
                    campaign: Contribution(study, cohort, set(tasks))
                    for campaign, (study, cohort, tasks) in data["contributed"].items()
                },
            )
        except (*_UNREADABLE, SpecError, OfferError):  # whatever it is: it might show a record
            raise SpecError(
                f"a device's state must be what version {VERSION} wrote; got another text",
                hint="use the release of sfumato that wrote it; a state is not to be edited",
            ) from None


@lru_cache(maxsize=64)
def _text(offer: Offer) -> str:
    return to_json(offer)


def _by_study(texts: list[str]) -> dict[str, Offer]:
    offers = [offer_from_text(text) for text in texts]
    return {offer.study: offer for offer in offers}


def _campaign(offer: Offer, task: Task) -> str:
    return task.campaign or offer.study

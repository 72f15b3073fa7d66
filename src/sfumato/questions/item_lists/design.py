"""Which items of an open domain do many devices hold? Devices send the items themselves.

The collector is trusted with the reports. It counts the items exactly, adds noise to each count and
releases those that reach a threshold (docs/proofs/listing.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from sfumato.errors import SpecError
from sfumato.flow.campaign import Campaign
from sfumato.flow.release import CountRelease, Influence, NoisedSum
from sfumato.flow.secure_sum import sum_task
from sfumato.flow.task import Task
from sfumato.privacy import ListedAbove, Rng
from sfumato.privacy.samplers import SecretRng
from sfumato.questions.answers import check_finished, detectable_note, discovered_release
from sfumato.questions.heavy_hitters.design import (
    HeavyHitters,
    ListDefaults,
    bound_to,
    digest_of,
)
from sfumato.questions.promise import COUNT
from sfumato.questions.question import Participation, Plan
from sfumato.sketch import ItemCounts, SparseTable, TextKeys, WordKeys
from sfumato.spec import digest, later, require, spec


@spec("item_list_design")
class ItemListDesign(ListDefaults):
    """A sized list of items that devices send themselves, for `ItemListCampaign`."""

    algorithm: ClassVar[str] = "sparse"
    keys: TextKeys | WordKeys
    devices: int
    rounds: int
    items_per_device: int
    mechanism: ListedAbove
    seed: int
    cut: int | None = later(None)
    """The noisy count from which items are listed, if not the study's threshold: it lies between
    that and a tenth of it."""
    promise: str = later("")  # what then holds of the list, in words

    def check(self) -> None:
        require.at_least(
            1, devices=self.devices, rounds=self.rounds, items_per_device=self.items_per_device
        )
        require(
            self.mechanism.rate == 1,
            f"rate must be 1: devices send all of their items; got {self.mechanism.rate}",
        )

    @property
    def influence(self) -> Influence:
        """Items of a report are different, and each counts once, unless copies count."""
        return Influence(of=COUNT, most=float(self.mechanism.most_per_item))

    def campaign(
        self, plan: Plan, *, secret: bytes = b"", least: float = 0.0, **context: Any
    ) -> ItemListCampaign:
        least = least if self.cut is None else float(self.cut)
        return ItemListCampaign(self, SecretRng(secret), least=least)

    def tasks(self) -> list[Task]:
        """One task per round, each with its own devices."""
        return [
            sum_task(
                None,
                sketch=ItemCounts(keys=self.keys, round=round, copies=self.mechanism.copies),
                mechanism=self.mechanism,
                campaign=digest(self),
                cohort=f"round {round}",
                devices=self.devices_per_round,
                items_per_device=self.items_per_device,
                sparse=True,
            )
            for round in range(self.rounds)
        ]

    def parameters(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {
            "items_per_device": self.items_per_device,
            "longest_item": self.keys.length,
            "entry_bits": self.keys.bits,
        }
        if self.mechanism.epsilon is not None:
            sizes |= {"noise": self.mechanism.noise, "noise_scale": self.mechanism.scale}
            sizes |= {"least_noisy_count": max(self.mechanism.threshold, self.cut or 0)}
        return sizes | {"rounds": self.rounds}

    def answer(
        self, campaign: ItemListCampaign, plan: Plan, participation: Participation
    ) -> CountRelease:
        check_finished(campaign, participation)
        items = campaign.heavy_hitters()
        devices = max(participation.devices, items.respondents)
        detectable = items.detectable(devices)
        return discovered_release(
            plan,
            participation,
            items=items.items,
            counts=items.counts,
            standard_error=items.standard_error,
            interval=items.interval(devices),
            respondents=items.respondents,
            parameters={"detectable_count": detectable},
            notes=[
                detectable_note(
                    self.fitting(), detectable, participation, copies=self.mechanism.copies
                ),
                *([self.promise] if self.promise else []),
            ],
            per_device=self.mechanism.most_per_item,
            least=None if self.cut is None else 0.0,
        )


@dataclass(slots=True, repr=False)
class ItemListCampaign(Campaign):
    """Asks one round after another, adds up their counts, and makes the list at the end."""

    design: ItemListDesign
    rng: Rng  # the collector's own, for the noise on the list
    least: float = 0.0  # items with a smaller estimate are not listed
    respondents: int = 0
    _total: SparseTable | None = None
    _absorbed: bytes = b""  # digest of all answers so far, to which the noise is bound
    _waiting: list[Task] = field(init=False)
    _list: HeavyHitters | None = None

    def __post_init__(self) -> None:
        self._waiting = self.design.tasks()

    def next_task(self) -> Task | None:
        return self._waiting[0] if self._waiting else None

    def absorb(self, answer: NoisedSum) -> None:
        self.expect(answer.task.id)
        self._waiting.pop(0)
        self._absorbed = digest_of(answer, self._absorbed)
        self._total = answer.table if self._total is None else self._total + answer.table
        self.respondents += answer.count

    def heavy_hitters(self) -> HeavyHitters:
        """The list, at the end. It is made only once, since its noise is charged once."""
        if self._waiting:
            raise SpecError(
                f"a list needs the answers of all {self.design.rounds} rounds; "
                f"{len(self._waiting)} are missing"
            )
        if self._list is None:
            self._list = self._make_list()
        return self._list

    def _make_list(self) -> HeavyHitters:
        mechanism, total = self.design.mechanism, self._total
        assert total is not None  # every design has a round
        rng = bound_to(self.rng, "counts", self._absorbed, total.counts)
        noised, may = mechanism.release(total.counts, rng=rng)
        least = max(mechanism.threshold, math.ceil(self.least - 1e-9))
        rows = np.flatnonzero(may & (noised >= least))
        rows = rows[np.argsort(-noised[rows], kind="stable")]
        items: pa.Array = self.design.keys.items(total.numbers[rows])[0]
        return HeavyHitters(
            items=items,
            counts=noised[rows].astype(np.float64),
            standard_error=np.full(rows.size, mechanism.noise_stddev),
            sample_counts=noised[rows],
            noise=mechanism.list_law,
            least_in_sample=least,
            rate=1.0,
            mechanism=mechanism,
            least=self.least,
            respondents=self.respondents,
            unread=0,
            listed=1.0,
        )

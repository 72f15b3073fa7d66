"""What a device in masked rounds holds a collector to: the terms agreed to, and its own ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sfumato.device import Device, Joined, MemoryBox, Part, Response, Skipped
from sfumato.device.box import Box, State
from sfumato.device.device import changes
from sfumato.device.offers import Offer, public_key, sign
from sfumato.errors import SpecError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease, NoiseInShares, NoNoise
from sfumato.sketch import CountSketch

KEY = bytes(range(32))
SUM = SecureSum(corrupt=0.2, dropout=0.05, mode="semi_malicious")


def masked(
    *, seed: int = 1, campaign: str = "names", cohort: str = "round 0", asked: int = 100
) -> Task:
    return SUM.task(
        sketch=CountSketch(rows=3, width=8, seed=seed),
        mechanism=NoiseInShares(scale=20.0, survivors=2),
        campaign=campaign,
        cohort=cohort,
        devices=asked,
        items_per_device=1,
    )


def offered(study: str, task: Task, *, contributions: int = 1) -> Offer:
    return Offer(
        study=study,
        purpose="Which trees to plant next.",
        question="frequencies",
        trust="secure",
        task=task,
        epsilon=None,
        delta=1e-6,
        noise=task.noise_multiplier,
        contributions=contributions,
    )


class Offering:
    """A collector that offers what it is told to, and nothing else."""

    def __init__(self, *offers: Offer) -> None:
        self.offers: Sequence[Offer] = offers

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        envelopes = [sign(offer, KEY) for offer in self.offers]
        return Response(200, {}, json.dumps({"offers": envelopes}).encode())


def agreed(collector: Offering, box: Box | None = None) -> Device:
    device = Device(box or MemoryBox(), collector, public_key(KEY))
    for each in device.offers(0.0):
        device.consent(each.offer.study)
    return device


def changed(**given: Any) -> Offer:
    """The study's offer, its sum hidden otherwise; noise in shares as that needs it."""
    task = masked()
    assert isinstance(task.aggregation, Masked)
    hidden = replace(task.aggregation, **given)
    colluders = int(hidden.corrupt * task.max_count + 1e-9)
    noise = replace(task.mechanism, colluders=colluders)  # type: ignore[type-var]  # in shares
    return offered("Trees", replace(task, aggregation=hidden, mechanism=noise))


WEAKER = {
    "mode": changed(mode="semi_honest"),
    "corrupt": changed(corrupt=0.1),
    "security_bits": changed(security_bits=40),
}


@pytest.mark.parametrize("name", WEAKER)
def test_a_sum_that_is_hidden_from_fewer_needs_consent_again(name: str) -> None:
    collector = Offering(offered("Trees", masked()))
    device = agreed(collector)
    collector.offers = [WEAKER[name]]
    assert [each.changes for each in device.offers(1.0)] == [(name,)]
    assert device.part("Trees", "oak", 2.0) is Skipped.CONSENT_AGAIN


def test_a_sum_that_is_hidden_from_more_needs_no_consent() -> None:
    for weaker in WEAKER.values():
        assert changes(weaker, offered("Trees", masked())) == ()
    better = changed(security_bits=100)
    collector = Offering(offered("Trees", masked()))
    device = agreed(collector)
    collector.offers = [better]
    device.offers(1.0)
    assert isinstance(device.part("Trees", "oak", 2.0), Part)


def test_an_offer_of_a_masked_sum_whose_noise_is_the_collectors_cannot_be_made() -> None:
    noise = NoiseAtRelease(noise="gaussian", scale=20.0)
    with pytest.raises(SpecError, match="noise from devices"):
        offered("Trees", replace(masked(), mechanism=noise))


def test_a_campaign_is_one_studys() -> None:
    """Else the second would be counted as the first, and asked without end."""
    state, first = State(), masked()
    state.contribute(offered("Trees", first), first).tasks.add(first.id)
    for seed in (1, 2):
        another = masked(seed=seed)
        assert not state.may_contribute(offered("Shrubs", another), another)
    apart = masked(campaign="shrubs")
    assert state.may_contribute(offered("Shrubs", apart), apart)
    state.take_back(offered("Shrubs", first), first)  # it has nothing to take back
    assert not state.may_contribute(offered("Trees", first), first)


def test_a_report_to_a_trusted_collector_keeps_its_campaign_from_other_studies() -> None:
    plain = replace(masked(), mechanism=NoNoise(), aggregation=Plain(modulus_bits=12), min_count=1)
    central = replace(offered("Trees", masked()), trust="central", task=plain, noise=None)
    state, other = State(), masked(seed=2)
    state.contribute(central, plain)
    assert not state.may_contribute(offered("Shrubs", other), other)


@pytest.mark.parametrize(
    "other", [masked(), masked(seed=2, cohort="round 1")], ids=["task", "cohort"]
)
def test_what_may_be_masked_is_asked_again_when_it_is(other: Task) -> None:
    """Two rounds are begun before either table is masked: the second device's part ends there."""
    device = agreed(Offering(offered("Trees", masked()), offered("Shrubs", other)))
    first, second = (device.part(study, "oak", 1.0) for study in ("Trees", "Shrubs"))
    assert isinstance(first, Part)
    assert isinstance(second, Part)
    for part in (first, second):
        part._progress = replace(part._progress, stage="hear mask")
        part._participant = Masks()  # type: ignore[assignment]  # as far as it is needed
        part.hear(Response(200, {}, b""))
    assert (first.phase, first.outcome) == ("mask", None)
    assert first.request().body == b"masked"
    assert second.outcome is Joined.REFUSED
    assert "one too many" in second.problem
    assert device._peek().contributed["names"].study == "Trees"


class Masks:
    """A participant whose neighbours' boxes have come."""

    def mask(self, boxes: bytes, table: npt.NDArray[np.int64]) -> bytes:
        return b"masked"

    def to_json(self) -> str:
        return "{}"

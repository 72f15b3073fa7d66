"""The limits that a device in masked rounds enforces: the terms agreed to, and its own ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sfumato.device import Device, MemoryBox, Response, RoundClient, RoundOutcome, SkipReason
from sfumato.device.box import Box, State
from sfumato.device.device import changes
from sfumato.device.offers import Offer, public_key, sign
from sfumato.errors import SpecError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease, NoiseInShares, NoNoise
from sfumato.secagg.participant import Participant
from sfumato.sketch import CountSketch

KEY = bytes(range(32))
SUM = SecureSum(corrupt=0.2, dropout=0.05, mode="semi_malicious")


def masked_task(
    *, seed: int = 1, campaign: str = "names", cohort: str = "round 0", devices: int = 100
) -> Task:
    return SUM.task(
        sketch=CountSketch(rows=3, width=8, seed=seed),
        mechanism=NoiseInShares(scale=20.0, survivors=2),
        campaign=campaign,
        cohort=cohort,
        devices=devices,
        items_per_device=1,
    )


def offer_for(study: str, task: Task, *, contributions: int = 1) -> Offer:
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
    """A collector that makes these offers, and does nothing else."""

    def __init__(self, *offers: Offer) -> None:
        self.offers: Sequence[Offer] = offers

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        envelopes = [sign(offer, KEY) for offer in self.offers]
        return Response(200, {}, json.dumps({"offers": envelopes}).encode())


def consenting_device(collector: Offering, box: Box | None = None) -> Device:
    device = Device(box or MemoryBox(), collector, public_key(KEY))
    for each in device.offers(0.0):
        device.consent(each.offer.study)
    return device


def resume(device: Device, box: Box, study: str, **changes: Any) -> RoundClient:
    """The device's round at another stage, as if it had been interrupted there."""
    assert isinstance(device.part(study, "oak", 1.0), RoundClient)
    text, message = box.round(study) or ("", b"")
    box.keep_round(study, json.dumps(json.loads(text) | changes), message)
    part = device.part(study, "oak", 1.0)
    assert isinstance(part, RoundClient)
    return part


def offer_with(**terms: Any) -> Offer:
    """The study's offer with other terms of masking, and the noise in shares that they need."""
    task = masked_task()
    assert isinstance(task.aggregation, Masked)
    aggregation = replace(task.aggregation, **terms)
    colluders = int(aggregation.corrupt * task.max_count + 1e-9)
    noise = replace(task.mechanism, colluders=colluders)  # type: ignore[type-var]  # in shares
    return offer_for("Trees", replace(task, aggregation=aggregation, mechanism=noise))


AGREED = offer_with(security_bits=100)
WEAKER = {
    "mode": offer_with(mode="semi_honest", security_bits=100),
    "corrupt": offer_with(corrupt=0.1, security_bits=100),
    "security_bits": offer_with(security_bits=80),
}


@pytest.mark.parametrize("name", WEAKER)
def test_weaker_masking_needs_consent_again(name: str) -> None:
    collector = Offering(AGREED)
    device = consenting_device(collector)
    collector.offers = [WEAKER[name]]
    assert [each.changes for each in device.offers(1.0)] == [(name,)]
    assert device.part("Trees", "oak", 2.0) is SkipReason.CONSENT_AGAIN


def test_stronger_masking_needs_no_consent() -> None:
    for weaker in WEAKER.values():
        assert changes(weaker, AGREED) == ()
    collector = Offering(offer_for("Trees", masked_task()))
    device = consenting_device(collector)
    collector.offers = [AGREED]
    device.offers(1.0)
    assert isinstance(device.part("Trees", "oak", 2.0), RoundClient)


def test_the_collector_cannot_offer_to_add_the_noise_of_a_masked_sum() -> None:
    noise = NoiseAtRelease(noise="gaussian", scale=20.0)
    with pytest.raises(SpecError, match="noise from devices"):
        offer_for("Trees", replace(masked_task(), mechanism=noise))


def test_a_campaign_belongs_to_one_study() -> None:
    """Otherwise the second would be counted as the first, and could ask without limit."""
    state, first = State(), masked_task()
    state.contribute(offer_for("Trees", first), first).tasks.add(first.id)
    for seed in (1, 2):
        another = masked_task(seed=seed)
        assert not state.may_contribute(offer_for("Shrubs", another), another)
    apart = masked_task(campaign="shrubs")
    assert state.may_contribute(offer_for("Shrubs", apart), apart)
    state.take_back(offer_for("Shrubs", first), first)  # without effect
    assert not state.may_contribute(offer_for("Trees", first), first)


def test_a_report_to_a_trusted_collector_keeps_its_campaign_from_other_studies() -> None:
    plain = replace(
        masked_task(), mechanism=NoNoise(), aggregation=Plain(modulus_bits=12), min_count=1
    )
    central = replace(offer_for("Trees", masked_task()), trust="central", task=plain, noise=None)
    state, other = State(), masked_task(seed=2)
    state.contribute(central, plain)
    assert not state.may_contribute(offer_for("Shrubs", other), other)


@pytest.mark.parametrize(
    "other", [masked_task(), masked_task(seed=2, cohort="round 1")], ids=["task", "cohort"]
)
def test_the_contribution_bound_is_checked_again_when_a_table_is_masked(
    other: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds begin before either table is masked: the second ends there for the device."""
    monkeypatch.setattr(Participant, "from_json", lambda text: ReadyToMask())
    box = MemoryBox()
    device = consenting_device(
        Offering(offer_for("Trees", masked_task()), offer_for("Shrubs", other)), box
    )
    first, second = (device.part(study, "oak", 1.0) for study in ("Trees", "Shrubs"))
    assert isinstance(first, RoundClient)
    assert isinstance(second, RoundClient)
    first, second = (resume(device, box, study, stage="hear mask") for study in ("Trees", "Shrubs"))
    for part in (first, second):
        part.receive(Response(200, {}, b""))
    assert (first.phase, first.outcome) == ("mask", None)
    assert first.request().body == b"masked"
    assert second.outcome is RoundOutcome.REFUSED
    assert "one too many" in second.problem
    assert State.from_json(box.read() or "").contributions["names"].study == "Trees"


class ReadyToMask:
    """A participant that has its neighbours' boxes."""

    def mask(self, boxes: bytes, table: npt.NDArray[np.int64]) -> bytes:
        return b"masked"

    def to_json(self) -> str:
        return "{}"

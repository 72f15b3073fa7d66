"""Every question that is answered by sums, through a store and a worker that restarts before every
step: the same releases as a campaign without interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import KEY, Clock, open_task, upload
from masking import NAME
from sfumato.collector import studies
from sfumato.collector.store.store import Store, StudyRow
from sfumato.collector.worker.worker import Worker
from sfumato.device.offers import Offer, public_key, verify
from sfumato.device.private import privatiser
from sfumato.flow.release import CountRelease, MeanRelease
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.privacy import SystemRng
from sfumato.spec import from_json


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One database is enough: `test_store` checks that all store the same."""
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


def create(store: Store, clock: Clock, **keys: Any) -> StudyRow:
    request = {"name": NAME, "purpose": "Which trees to plant next.", "study": keys}
    return studies.create(store, request, key=KEY, rng=SystemRng(), now=clock)


def worker(store: Store, clock: Clock) -> Worker:
    return Worker(store, key=KEY, now=clock, log=lambda event, **fields: None)


def offer_of(store: Store, study: StudyRow) -> Offer:
    return verify(json.loads(open_task(store, study).envelope), public_key(KEY))


def answer(store: Store, study: StudyRow, values: Sequence[Any]) -> Offer:
    """Send one report for each of these values, as a device makes it."""
    offer, rng = offer_of(store, study), SystemRng()
    reports = []
    for value in values:
        privatise = privatiser(offer, value, None)
        assert privatise is not None
        report = Report(offer.task.id, rng.words(2).tobytes(), privatise(rng))
        reports.append(report.to_bytes())
    assert upload(store, open_task(store, study), reports)
    return offer


def finish(store: Store, clock: Clock) -> None:
    """Work to the end, every step by another worker."""
    for _ in range(200):
        if not worker(store, clock).step():
            return
    raise AssertionError("the worker finds work forever")


def released(store: Store, study: StudyRow) -> dict[str, Any]:
    with store.reading() as tx:
        text, row = tx.release(study.id), tx.study(study.id)
    assert text is not None, row
    return json.loads(text)  # type: ignore[no-any-return]  # an object


def counts(store: Store, study: StudyRow) -> dict[str, float]:
    release = CountRelease.from_dict(released(store, study))
    return dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))


@pytest.mark.parametrize("algorithm", [None, "invertible_sketch"])
def test_items_that_nobody_listed_are_found_round_by_round(
    store: Store, clock: Clock, algorithm: str | None
) -> None:
    study = create(
        store,
        clock,
        question="heavy_hitters",
        trust="central",
        epsilon=None,
        devices=60,
        rounds=2,
        bytes_per_device=4_000,
        word_length=12,
        algorithm=algorithm,
    )
    for words in (["oak"] * 20 + ["elm"] * 10, ["oak"] * 5 + ["fir"] * 25):
        offer = answer(store, study, words)
        assert offer.contributions == 1
        finish(store, clock)
    assert counts(store, study) == {"oak": 25.0, "fir": 25.0, "elm": 10.0}


def test_a_rate_that_adapts_is_the_same_however_often_a_worker_starts(
    store: Store, clock: Clock
) -> None:
    """Its campaign draws noise: once, and not each time it is restored."""
    study = create(
        store,
        clock,
        question="heavy_hitters",
        trust="central",
        epsilon=2.0,
        delta=1e-4,
        devices=450,
        rounds=3,
        adaptive=True,
        bytes_per_device=20_000,
        alphabet="abcdefgh",
        word_length=6,
    )
    rates = set()
    for _ in range(3):
        offer = answer(store, study, ["cabbage"] * 90 + ["bead"] * 60)
        assert isinstance(offer.task, Task)
        rates.add(getattr(offer.task.mechanism, "rate", None))
        finish(store, clock)
    assert len(rates) > 1  # it did adapt
    estimates = counts(store, study)
    assert estimates.keys() == {"cabbag", "bead"}  # cut to six letters
    with store.reading() as tx:
        row = tx.study(study.id)
        assert row is not None
        secret = tx.secret(study.id)
        planned = studies.plan_of(tx, row)
        again = [studies.campaign_of(tx, row, planned) for _ in range(2)]
    assert secret is not None
    listed = [each.heavy_hitters() for each in again]  # type: ignore[attr-defined]  # as it is one
    assert listed[0].counts.tolist() == listed[1].counts.tolist()
    assert sorted(listed[0].counts.tolist()) == sorted(estimates.values())
    assert secret.hex() not in json.dumps(studies.state(store, study.id))
    studies.delete(store, study.id)
    with store.reading() as tx:
        assert tx.secret(study.id) is None


def test_what_was_named_is_counted_by_the_same_devices(store: Store, clock: Clock) -> None:
    study = create(
        store,
        clock,
        question="histogram",
        trust="central",
        epsilon=None,
        devices=80,
        bytes_per_device=8_000,
        word_length=12,
        algorithm="invertible_sketch",
    )
    words = ["oak"] * 50 + ["elm"] * 30
    names = answer(store, study, words)
    finish(store, clock)
    numbers = answer(store, study, words)
    assert names.contributions == numbers.contributions == 2
    assert isinstance(names.task, Task)
    assert isinstance(numbers.task, Task)
    assert names.task.campaign != numbers.task.campaign
    assert numbers.keys is not None
    finish(store, clock)
    assert counts(store, study) == pytest.approx({"oak": 50.0, "elm": 30.0}, abs=1e-6)
    assert released(store, study)["cost"]["devices"] == 80


def test_a_mean_is_asked_twice_of_everybody(store: Store, clock: Clock) -> None:
    """The error of a coordinate is within six of its standard errors, but for 2e-9 each."""
    study = create(
        store,
        clock,
        question="mean",
        trust="central",
        epsilon=2.0,
        delta=1e-5,
        devices=300,
        dimensions=2_000,
        compression="adapt_norm",
        clip=1.0,
    )
    vector = np.zeros(2_000)
    vector[7] = 0.8
    offers = []
    for _ in range(2):
        offers.append(answer(store, study, [vector] * 300))
        finish(store, clock)
    assert offers[0].contributions == 2
    assert offers[0].noise == offers[1].noise
    data = released(store, study)
    release = MeanRelease.from_dict(data)
    assert release.to_dict() == data
    assert np.abs(release.mean - vector).max() < 6 * release.standard_error
    assert release.cost.devices == 300


def test_a_study_that_was_closed_too_early_says_so(store: Store, clock: Clock) -> None:
    study = create(
        store,
        clock,
        question="mean",
        trust="central",
        epsilon=2.0,
        delta=1e-5,
        devices=300,
        dimensions=2_000,
        compression="adapt_norm",
        clip=1.0,
    )
    answer(store, study, [np.zeros(2_000)] * 300)
    finish(store, clock)
    studies.close(store, study.id)
    finish(store, clock)
    state = studies.state(store, study.id)
    assert state["state"] == "failed"
    assert "closed after 1 of its tasks" in state["problem"]


def test_every_offer_keeps_the_noise_that_it_names(store: Store, clock: Clock) -> None:
    study = create(
        store,
        clock,
        question="mean",
        trust="secure",
        epsilon=4.0,
        delta=1e-5,
        devices=60,
        dimensions=2_000,
        compression="adapt_norm",
        clip=1.0,
        dropout=0.1,
        corrupt=0.05,
    )
    offer = offer_of(store, study)
    design = from_json(study.design)
    assert offer.noise == design.least_noise
    assert offer.contributions == len(design.shares) == 2

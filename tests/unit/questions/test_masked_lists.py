"""Lists from masked sums: plans, guarantees and offers; the sums stay the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sfumato import simulate
from sfumato.device.device import changes
from sfumato.device.offers import Offer
from sfumato.errors import ImpossibleError, SpecError, StudyError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.secure_sum import SecureSum, bytes_of
from sfumato.planning import plan
from sfumato.privacy import Budget, Ledger, NoiseAtRelease
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.spec import digest, to_json
from sfumato.study import Study

TREES = ["oak", "elm", "ash", "fir"]
STUDY: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "masked": True,
    "epsilon": math.inf,
    "devices": 60,
    "corrupt": 0.05,
    "dropout": 0.0,
    "word_length": 3,
    "bytes_per_device": 8_000,
}
DATA = [TREES[k % 4] for k in range(60)]


def without_masks(study: dict[str, Any]) -> dict[str, Any]:
    """The same tables, not masked."""
    keys = study | {"masked": False, "algorithm": "invertible_sketch"}
    return {name: value for name, value in keys.items() if name != "corrupt"}


def names_of(study: dict[str, Any]) -> HeavyHitterDesign:
    design = plan(study).design
    names = design.names if isinstance(design, HistogramDesign) else design
    assert isinstance(names, HeavyHitterDesign)
    return names


def offer(design: HeavyHitterDesign, **terms: Any) -> Offer:
    fields: dict[str, Any] = {
        "study": "Trees",
        "purpose": "A test.",
        "question": "heavy_hitters",
        "trust": "central",
        "epsilon": None,
        "task": design.tasks()[0],
    }
    return Offer(**fields | terms)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trust": "secure"}, 'with "secure" every sum is masked'),
        ({"question": "frequencies"}, "masked is for heavy_hitters and histogram"),
    ],
)
def test_only_lists_of_a_trusted_collector_are_masked(change: dict[str, Any], says: str) -> None:
    with pytest.raises(StudyError, match=says):
        Study.from_mapping(STUDY | change)


def test_a_study_that_is_not_masked_is_what_it_was() -> None:
    """Digests and ids from before `masked` existed."""
    study = {
        "question": "heavy_hitters",
        "trust": "central",
        "epsilon": math.inf,
        "devices": 1_000,
        "rounds": 2,
        "dropout": 0.0,
        "word_length": 4,
        "bytes_per_device": 3_000,
    }
    tables = without_masks(study)
    for question, design, study_digest, task in (
        ("heavy_hitters", "620c0d870b815993", "c58e1df4cf9a1e81", "c71211b3f4f76212"),
        ("histogram", "81bf51d026fc1063", "644d01c9d4bc1683", "796a22e8c8b11798"),
    ):
        planned = plan(tables | {"question": question})
        assert digest(planned.design).startswith(design)
        unsaid = Study.from_mapping(study | {"question": question})
        assert digest(unsaid).startswith(study_digest)
        assert names_of(tables | {"question": question}).tasks()[0].id.startswith(task)
        assert "masked" not in planned.study.to_dict()
        masked = plan(study | {"question": question, "masked": True, "bytes_per_device": 20_000})
        assert masked.study.to_dict()["masked"] is True
        assert digest(masked.study) != digest(planned.study)


@pytest.mark.parametrize("question", ["heavy_hitters", "histogram"])
def test_tasks_are_masked_and_their_rounds_as_small_as_planned(question: str) -> None:
    study = STUDY | {"question": question, "dropout": 0.1, "rounds": 2}
    planned, names = plan(study), names_of(study)
    secure = SecureSum(corrupt=0.05, dropout=0.1)
    assert names.secure == secure
    for task in names.tasks():
        assert task.aggregation == Masked(modulus_bits=task.sketch.word_bits or 0, corrupt=0.05)
        assert (task.min_count, task.max_count) == (secure.least(29), 31)
        assert planned.design.closing_count(task, answering=0.9) == 30
    assert names.most_sampled(1.0) == 31
    assert isinstance(names_of(without_masks(study)).tasks()[0].aggregation, Plain)
    if isinstance(planned.design, HistogramDesign):
        assert planned.design.counts.secure == secure
        with pytest.raises(SpecError, match="the same secure sum"):
            replace(planned.design, counts=replace(planned.design.counts, secure=None))


@pytest.mark.parametrize("question", ["heavy_hitters", "histogram"])
def test_the_plan_counts_all_messages_of_the_protocol(question: str) -> None:
    planned, names = plan(STUDY | {"question": question}), names_of(STUDY | {"question": question})
    tasks = [names.tasks()[0]]
    if isinstance(planned.design, HistogramDesign):
        tasks += planned.design.counts.tasks()
    up, down = (sum(part) for part in zip(*map(bytes_of, tasks), strict=True))
    predicted = planned.predicted
    assert (predicted["bytes_per_device"], predicted["bytes_down"]) == (up, down)
    assert 0.9 * 8_000 < up <= 8_000
    with pytest.raises(ImpossibleError, match="bytes per device"):
        plan(STUDY | {"question": question, "bytes_per_device": 600})


def test_the_statement_says_what_the_collector_sees() -> None:
    promised = STUDY | {"epsilon": 8.0, "delta": 1e-2, "bytes_per_device": 20_000}
    for study in (STUDY, promised):
        statement = plan(study).privacy.statement
        assert "only sums over at least 59 of 60 devices, and no device's table" in statement
        assert (
            "it is trusted to list their sum and to release only names above the threshold"
            in statement
        )
        assert "sees each device's table" not in statement
    assert "sees each device's table" in plan(without_masks(promised)).privacy.statement
    counted = plan(promised | {"question": "histogram", "bytes_per_device": 60_000})
    assert "to add the noise to the counts" in counted.privacy.statement
    assert isinstance(counted.design, HistogramDesign)
    assert isinstance(counted.design.counts.mechanism, NoiseAtRelease)
    assert counted.privacy.trust == "central"
    assert plan(STUDY).algorithm.startswith("masked ")


@pytest.mark.parametrize("question", ["heavy_hitters", "histogram"])
def test_a_masked_sum_is_listed_like_an_open_one(question: str) -> None:
    """Without noise, and with large enough tables, all three are the truth."""
    study = STUDY | {"question": question, "bytes_per_device": 20_000}
    ways: list[dict[str, Any]] = [{"protocol": True}, {"protocol": False}]
    releases = [simulate(study, DATA, seed=1, **way) for way in ways]
    releases.append(simulate(without_masks(study), DATA, seed=1))
    for release in releases:
        counts = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
        assert counts == pytest.approx(dict.fromkeys(TREES, 15.0))
    assert sum("completed the masked round" in note for note in releases[0].notes) == (
        2 if question == "histogram" else 1
    )


def test_who_vanishes_from_a_masked_round_is_not_in_the_list() -> None:
    study = STUDY | {"dropout": 0.2, "bytes_per_device": 20_000}
    release = simulate(study, DATA, seed=3, protocol=True)
    assert release.counts.sum() == pytest.approx(60)  # scaled to all devices asked
    assert any("60 devices completed the masked round" in note for note in release.notes)
    assert release.cost.bytes_per_device == plan(study).predicted["bytes_per_device"]


def test_a_masked_list_is_charged_once() -> None:
    promised = STUDY | {"epsilon": 8.0, "delta": 1e-2, "bytes_per_device": 20_000}
    for protocol in (True, False):
        ledger = Ledger(Budget(epsilon=8.0, delta=1e-2))
        simulate(promised, DATA, seed=1, ledger=ledger, protocol=protocol)
        assert len(ledger.entries()) == 1


def test_an_offer_tells_the_device_whether_its_table_is_masked() -> None:
    masked, plain = names_of(STUDY), names_of(without_masks(STUDY))
    masked_offer = offer(masked, masked=True)
    assert masked_offer.task.is_masked
    assert "masked" not in to_json(offer(plain))
    with pytest.raises(SpecError, match="or the offer says so; got a masked one"):
        offer(masked)
    with pytest.raises(SpecError, match="or the offer says so; got an open one"):
        offer(plain, masked=True)
    assert "masked" in changes(masked_offer, offer(plain))
    assert "masked" not in changes(offer(plain), masked_offer)

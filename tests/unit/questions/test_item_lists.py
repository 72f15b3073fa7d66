"""Lists of items that devices send themselves: exact counts, noise and a threshold."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

import sfumato
from checks import SEED
from marks import quick
from sfumato.arrays import U64
from sfumato.errors import ImpossibleError, SimulationWarning, SpecError, StudyError
from sfumato.flow.accumulator import to_bytes
from sfumato.flow.release import NoisedSum
from sfumato.flow.report import HEADER_BYTES
from sfumato.planning import plan
from sfumato.privacy import Budget, Ledger, SeededRng, epsilon_of
from sfumato.privacy.listing import noise_tail
from sfumato.privacy.samplers import SecretRng, log_mass
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.item_lists.design import ItemListCampaign, ItemListDesign
from sfumato.sketch import ItemCounts, SparseTable, TextKeys, WordKeys

I64 = npt.NDArray[np.int64]
STUDY: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "epsilon": 1.0,
    "delta": 1e-6,
    "devices": 20_000,
}
COUNTS = {"oak": 9_000, "elm": 4_000, "ash": 400, "a tree with a longer name": 60}
SECRETS = 60


def design_of(**keys: Any) -> ItemListDesign:
    design = plan(STUDY | keys).design
    assert isinstance(design, ItemListDesign)
    return design


def released(study: dict[str, Any], counts: dict[str, int], **options: Any) -> dict[str, float]:
    data = {"item": list(counts), "n": list(counts.values())}
    release = sfumato.simulate(STUDY | study, data, count_column="n", **options)
    assert isinstance(release, sfumato.CountRelease)
    return dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))


def test_a_plan_says_what_it_will_find_and_what_devices_send() -> None:
    planned = plan(STUDY | {"threshold": 100})
    bits = 8 * 64 + 1
    assert planned.predicted["bytes_per_device"] == HEADER_BYTES + math.ceil(bits / 8)
    assert planned.predicted["detectable_count"] >= 100
    assert planned.predicted["assumes"] == "nothing about the data"
    statement = planned.privacy.statement
    assert "(1, 1e-06)-differential privacy for each device" in statement
    assert "the collector sees each device's items" in statement
    mechanism = design_of(threshold=100).mechanism
    assert f"noisy count below {mechanism.threshold} are not released" in statement
    assert (
        epsilon_of([mechanism.loss(ItemCounts(keys=TextKeys(length=9)).sensitivity(1))], 1e-6) == 1
    )


@pytest.mark.parametrize("question", ["heavy_hitters", "histogram"])
@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, ItemListDesign),
        ({"algorithm": "sparse"}, ItemListDesign),
        ({"algorithm": "invertible_sketch"}, (HeavyHitterDesign, HistogramDesign)),
        ({"masked": True}, (HeavyHitterDesign, HistogramDesign)),
        ({"paper_mode": True, "epsilon": math.inf}, (HeavyHitterDesign, HistogramDesign)),
    ],
)
def test_sketches_are_made_only_where_a_study_asks_for_them(
    question: str, keys: dict[str, Any], kind: Any
) -> None:
    sizes = {"question": question, "devices": 300, "bytes_per_device": 400_000, "word_length": 4}
    assert isinstance(plan(STUDY | sizes | keys).design, kind)


@pytest.mark.parametrize("change", [{"masked": True}, {"paper_mode": True}, {"adaptive": True}])
def test_items_that_are_sent_whole_are_neither_masked_nor_sampled(change: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match='are for "invertible_sketch"'):
        plan(STUDY | {"algorithm": "sparse"} | change)


def test_the_longest_item_is_64_bytes_unless_the_study_says_otherwise() -> None:
    assert design_of().keys == TextKeys(length=64)
    assert design_of(word_length=200).keys == TextKeys(length=200)
    assert design_of(alphabet="abc").keys == WordKeys(alphabet="abc", length=10)
    assert design_of(alphabet="abc", word_length=4).keys == WordKeys(alphabet="abc", length=4)
    long, most = "é" * 33, "é" * 32
    assert released({"epsilon": math.inf}, {long: 9, most: 11}) == {most: 11.0}


def test_a_report_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ImpossibleError, match="bytes_per_device is 300") as refusal:
        plan(STUDY | {"items_per_device": 10, "bytes_per_device": 300})
    need = int(str(refusal.value.hint).split()[3])
    fits = plan(STUDY | {"items_per_device": 10, "bytes_per_device": need})
    assert fits.predicted["bytes_per_device"] == need


def test_a_delta_of_zero_is_refused() -> None:
    with pytest.raises(ImpossibleError, match="delta above 0"):
        plan(STUDY | {"delta": 0.0})


THRESHOLDS = [
    {"epsilon": epsilon, "delta": delta, "dropout": dropout, "items_per_device": items}
    for epsilon in (0.3, 1.0, 5.0)
    for delta in (1e-7, 1e-5)
    for dropout in (0.0, 0.4)
    for items in (1, 3, 20)
]
HARD = {"epsilon": 0.3, "delta": 1e-5, "dropout": 0.0, "items_per_device": 3}


@pytest.mark.parametrize("keys", quick(THRESHOLDS, HARD, THRESHOLDS[0]), ids=str)
def test_a_threshold_that_cannot_be_met_is_refused_with_one_that_can(keys: dict[str, Any]) -> None:
    """`HARD`: the noise that is best above the threshold finds less than another one does."""
    with pytest.raises(ImpossibleError, match="asks for all items") as refusal:
        plan(STUDY | keys | {"threshold": 2})
    least = int(str(refusal.value.hint).split()[3].rstrip(","))
    planned = plan(STUDY | keys | {"threshold": least})
    design = planned.design
    assert isinstance(design, ItemListDesign)
    assert design.mechanism.detectable(answering=1 - keys["dropout"]) <= least
    with pytest.raises(ImpossibleError):
        plan(STUDY | keys | {"threshold": least - 1})


def test_without_a_guarantee_every_item_is_listed_exactly() -> None:
    for question in ("heavy_hitters", "histogram"):
        for options in ({}, {"protocol": True}):
            counts = {"oak": 30, "elm": 1, "": 2}
            study = {"question": question, "epsilon": math.inf, "rounds": 3, "devices": 33}
            assert released(study, counts, **options) == {k: float(v) for k, v in counts.items()}
    assert released({"epsilon": math.inf, "threshold": 2}, {"oak": 30, "elm": 1}) == {"oak": 30.0}


@pytest.mark.parametrize("rounds", [1, 4])
def test_counts_are_those_of_all_devices_but_for_the_noise(rounds: int) -> None:
    """False alarm 1e-9 for each count: the tail of its noise, exactly."""
    mechanism = design_of(rounds=rounds).mechanism
    assert (mechanism.rate, mechanism.unlisted) == (1.0, 0.0)
    assert mechanism.noise == "laplace"
    reach = next(k for k in range(1, 1_000) if noise_tail("laplace", mechanism.scale, k) < 5e-10)
    counts = released({"rounds": rounds}, COUNTS)
    assert counts.keys() == COUNTS.keys()
    assert all(abs(counts[item] - COUNTS[item]) < reach for item in COUNTS)
    seeded = released({"rounds": rounds}, COUNTS, seed=SEED)
    assert any(seeded[item] != COUNTS[item] for item in COUNTS)


def test_a_release_counts_all_devices_asked_if_some_do_not_answer() -> None:
    """Of 9,000 holders 60% answer; six deviations of the scaled count are 460."""
    study = STUDY | {"dropout": 0.4}
    release = sfumato.simulate(study, {"item": ["oak"], "n": [9_000]}, count_column="n", seed=SEED)
    assert release.cost.devices == 9_000
    assert abs(release.counts[0] - 9_000) < 460
    assert release.low[0] < 9_000 <= release.high[0]


def test_a_device_counts_once_for_an_item_and_for_at_most_its_bound() -> None:
    rows = [(device, word) for device in range(300) for word in ["oak"] * 5 + ["elm", "fir", "yew"]]
    data = {"item": [word for _, word in rows], "device": [str(device) for device, _ in rows]}
    study = STUDY | {"epsilon": math.inf, "devices": 300, "items_per_device": 2}
    for protocol in (False, True):
        options: Any = {"device_column": "device", "seed": 1, "protocol": protocol}
        with pytest.warns(SimulationWarning) if not protocol else nullcontext():
            release = sfumato.simulate(study, data, **options)
        assert release.counts.sum() == 600
        assert release.counts.max() <= 300
        assert set(release.items.to_pylist()) == {"oak", "elm", "fir", "yew"}


def test_several_items_cost_more_noise_and_a_higher_threshold() -> None:
    one, many = design_of().mechanism, design_of(items_per_device=20).mechanism
    assert many.items_per_device == 20
    assert many.noise_stddev > one.noise_stddev
    assert many.threshold > one.threshold


def test_an_item_that_nobody_sent_is_never_listed() -> None:
    """Its count gets no noise, since it is in no table: not one of 400 noised lists has it, nor
    with a threshold of 1 that every other noise would reach."""
    design = design_of(epsilon=8.0, delta=0.4)
    assert design.mechanism.threshold == 2
    for seed in range(400):
        campaign = ItemListCampaign(design, SecretRng(seed.to_bytes(32, "little")))
        answer(campaign, {"oak": 3})
        assert set(campaign.heavy_hitters().items.to_pylist()) <= {"oak"}


def test_an_item_of_one_device_is_listed_at_most_as_often_as_delta() -> None:
    """200,000 items; false alarm 1e-6 (exact binomial). Power: the next lower threshold lists 1.34%
    of them, against a delta of 1%, and would go unnoticed with probability below 1e-12."""
    design = design_of(epsilon=1.0, delta=0.01)
    counts = np.ones(200_000, dtype=np.int64)
    noised, may = design.mechanism.release(counts, rng=SeededRng(SEED))
    listed = int(may.sum())
    assert stats.binom.sf(listed - 1, counts.size, 0.01) > 1e-6
    lower = int((noised >= design.mechanism.threshold - 1).sum())
    assert stats.binom.sf(lower - 1, counts.size, 0.01) < 1e-12


def answer(campaign: ItemListCampaign, counts: dict[str, int], devices: int = 150) -> None:
    task = campaign.next_task()
    assert task is not None
    assert isinstance(task.sketch, ItemCounts)
    weights = np.array(list(counts.values()), dtype=np.int64)
    campaign.absorb(NoisedSum(task, task.sketch.encode(list(counts), weights), devices))


def listed(
    design: ItemListDesign, rng: SecretRng, *rounds: dict[str, int], devices: int = 150
) -> list[tuple[str, float]]:
    campaign = ItemListCampaign(design, rng)
    for counts in rounds:
        answer(campaign, counts, devices)
    result = campaign.heavy_hitters()
    assert campaign.heavy_hitters() is result  # it is made once
    return list(zip(result.items.to_pylist(), result.counts.tolist(), strict=True))


def test_rounds_are_absorbed_in_order_and_the_list_needs_all_of_them() -> None:
    design = design_of(rounds=2)
    campaign = ItemListCampaign(design, SecretRng(bytes(32)))
    first, second = design.tasks()
    assert first.id != second.id
    table = second.sketch.encode(["oak"])
    with pytest.raises(SpecError, match="only the answer to its last task"):
        campaign.absorb(NoisedSum(second, table, 9))
    answer(campaign, {"oak": 100})
    with pytest.raises(SpecError, match="all 2 rounds; 1 are missing"):
        campaign.heavy_hitters()
    answer(campaign, {"oak": 100, "elm": 90})
    assert campaign.next_task() is None
    with pytest.raises(SpecError, match="only the answer to its last task"):
        campaign.absorb(NoisedSum(second, table, 9))
    assert campaign.heavy_hitters().items.to_pylist() == ["oak", "elm"]
    assert campaign.respondents == 300


def test_a_list_is_in_the_order_of_its_noised_counts_and_then_of_keys() -> None:
    design = replace(design_of(epsilon=math.inf), devices=10)
    result = listed(design, SecretRng(bytes(32)), {"b": 3, "c": 5, "a": 3, "d": 3})
    assert [item for item, _ in result] == ["c", "a", "b", "d"]


class Unbound(SecretRng):
    """The control: a secret that gives the same words whatever they are added to."""

    def bound(self, purpose: str, *data: bytes) -> SecretRng:
        return self

    def words(self, count: int) -> U64:
        self._calls += 1
        return SecretRng(self._secret).bound("", str(self._calls).encode()).words(count)


OTHERS: dict[str, tuple[dict[str, int], int]] = {
    "one more holder": ({"oak": 101, "elm": 90}, 150),
    "one more item": ({"oak": 100, "elm": 90, "zelkova": 1}, 150),
    "another item": ({"oak": 100, "elk": 90}, 150),
    "one more device": ({"oak": 100, "elm": 90}, 151),
}


def equal_noise(kind: type[SecretRng], other: tuple[dict[str, int], int]) -> int:
    """In how many of SECRETS lists the count of oak gets the same noise on other data."""
    design, same = design_of(), 0
    counts, devices = other
    for number in range(SECRETS):
        secret = number.to_bytes(32, "little")
        one = dict(listed(design, kind(secret), {"oak": 100, "elm": 90}))["oak"] - 100
        two = dict(listed(design, kind(secret), counts, devices=devices))["oak"] - counts["oak"]
        same += one == two
    return same


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_other_data_gets_other_noise(other: tuple[dict[str, int], int]) -> None:
    """False alarm 1e-6 (exact binomial); secrets are fixed, so the test is deterministic. Power:
    one, as the control shows."""
    mechanism = design_of().mechanism
    assert mechanism.noise == "laplace"
    _, logs = log_mass("laplace", mechanism.scale)
    most = stats.binom.isf(1e-6, SECRETS, float(np.square(np.exp(logs)).sum()))
    assert most < SECRETS
    assert equal_noise(SecretRng, other) <= most


def test_noise_that_is_bound_to_nothing_repeats() -> None:
    """The control."""
    assert equal_noise(Unbound, OTHERS["one more device"]) == SECRETS


def test_the_same_answers_give_the_same_list_after_a_restart() -> None:
    """From the bytes that the collector stores."""
    design, rounds = design_of(rounds=2), ({"oak": 100, "elm": 90}, {"oak": 50, "ash": 70})
    once = listed(design, SecretRng(bytes(32)), *rounds)
    assert once == listed(design, SecretRng(bytes(32)), *rounds)
    assert once != listed(design, SecretRng(b"1" * 32), *rounds)
    table = design.tasks()[0].sketch.encode(["oak"])
    assert isinstance(table, SparseTable)
    assert to_bytes(table) == to_bytes(design.tasks()[0].sketch.encode(["oak"]))


def test_a_list_is_charged_once_for_each_cohort_and_no_more_than_promised() -> None:
    ledger = Ledger(Budget(epsilon=1.0, delta=1e-6))
    released({"rounds": 3}, COUNTS, ledger=ledger)
    assert [entry.cohort for entry in ledger.entries()] == ["round 0", "round 1", "round 2"]
    assert ledger.spent() == pytest.approx(1.0)


@pytest.mark.parametrize("change", [{"devices": 0}, {"rounds": 0}, {"items_per_device": 0}])
def test_impossible_sizes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="must be at least 1"):
        replace(design_of(), **change)


def test_a_design_whose_devices_keep_items_back_is_refused() -> None:
    sampled = replace(design_of().mechanism, rate=0.5)
    with pytest.raises(SpecError, match="rate must be 1"):
        replace(design_of(), mechanism=sampled)

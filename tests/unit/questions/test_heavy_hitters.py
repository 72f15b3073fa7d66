"""Heavy hitters of an open domain: plans, campaigns, and the way from devices to a release."""

from __future__ import annotations

import math
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

import sfumato
from checks import SEED, assert_binomial
from sfumato.errors import ImpossibleError, SimulationWarning, SpecError, StudyError, TaskError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.contribute import report
from sfumato.flow.release import NoisedSum
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease, NoiseInShares, NoNoise, SeededRng, epsilon_of
from sfumato.questions.heavy_hitters import plan as heavy_plan
from sfumato.questions.heavy_hitters.design import (
    HeavyHitterCampaign,
    HeavyHitterDesign,
    HistogramDesign,
    most_sampled,
)
from sfumato.secagg import rehearsal
from sfumato.secagg.coordinator import Phase
from sfumato.sketch import InvertibleSketch, TextKeys, WordKeys, capacity
from sfumato.spec import from_json, to_json

I64 = npt.NDArray[np.int64]
WORDS = [f"word{k:04d}" for k in range(2_000)]
SHARES = 1 / np.arange(3, len(WORDS) + 3) ** 1.2
SHARES /= SHARES.sum()


def make_study(**changes: Any) -> sfumato.Study:
    fields: dict[str, Any] = {
        "question": "heavy_hitters", "trust": "central", "epsilon": 1.0, "delta": 1e-6,
        "devices": 20_000, "word_length": 8, "bytes_per_device": 400_000,
        "algorithm": "invertible_sketch",
    }  # fmt: skip
    return sfumato.Study(**(fields | changes))


def draw(devices: int, seed: int = 0) -> I64:
    """How many devices hold each word."""
    return np.random.default_rng([SEED, seed]).multinomial(devices, SHARES)


def population(counts: I64) -> dict[str, Any]:
    return {"item": WORDS, "count": counts}


def run(study: sfumato.Study, counts: I64, seed: int = 1, **options: Any) -> sfumato.CountRelease:
    release: sfumato.CountRelease = sfumato.simulate(
        sfumato.plan(study), population(counts), count_column="count", seed=seed, **options
    )
    return release


def design_of(study: sfumato.Study) -> HeavyHitterDesign:
    design = heavy_plan.plan(study).design
    assert isinstance(design, HeavyHitterDesign)
    return design


# Plans


def test_a_private_plan_lists_whatever_devices_hold() -> None:
    """Its table fails with at most a tenth of delta, in both directions between neighbours."""
    for changes in ({}, {"bytes_per_device": 65_536}, {"rounds": 10}, {"items_per_device": 4}):
        study = make_study(**changes)
        design = design_of(study)
        most = design.most_sampled(design.mechanism.rate)
        failure = capacity.failure_bound(most, design.rows, design.width) + 2.0**-40
        sketch = design.sketch(0, design.mechanism.rate)
        failure += sketch.wrong_keys(most, most)
        assert failure * (1 + math.e) <= 0.1 * study.delta
        assert design.mechanism.unlisted == pytest.approx(0.1 * study.delta)
        assert (
            design.tasks()[0].message_bytes + 64
            >= heavy_plan.traffic(design)["bytes_per_device"] - 64
        )
        assert heavy_plan.traffic(design)["bytes_per_device"] <= (study.bytes_per_device or 0)


def test_more_is_kept_than_foreseen_hardly_ever() -> None:
    for items, rate in ((1_000, 0.01), (50_000, 0.3), (10, 0.5)):
        assert stats.binom.sf(most_sampled(items, rate), items, rate) <= 2.0**-40
        assert most_sampled(items, 1.0) == items


def test_a_plan_says_what_it_will_find() -> None:
    planned = sfumato.plan(make_study(threshold=100.0))
    assert planned.predicted["detectable_count"] >= 100
    assert planned.predicted["bytes_per_device"] <= 400_000
    assert "names seen fewer than" in planned.privacy.statement
    assert planned.to_dict()["plan"]["parameters"]["threshold_in_sample"] > 2
    assert from_json(to_json(planned.design)) == planned.design


def test_the_planner_takes_the_list_with_the_smallest_detectable_count() -> None:
    kinds = {
        design_of(make_study(bytes_per_device=size)).mechanism.noise for size in (8_000, 400_000)
    }
    assert kinds == {"none", "laplace"}
    many = design_of(make_study(items_per_device=20, devices=2_000, bytes_per_device=3_000_000))
    assert many.mechanism.noise == "gaussian"


def test_a_threshold_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    """Here the noise that is best above the threshold finds less than another one does."""
    sizes: Any = {"epsilon": 2.0, "delta": 1e-5, "dropout": 0.3, "bytes_per_device": 200_000}
    with pytest.raises(ImpossibleError, match="asks for all items") as refusal:
        sfumato.plan(make_study(threshold=2.0, **sizes))
    least = int(str(refusal.value.hint).split()[3].rstrip(","))
    mechanism = design_of(make_study(threshold=float(least), **sizes)).mechanism
    assert mechanism.detectable(answering=0.7) <= least


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epsilon": None},
        pytest.param({"question": "histogram"}, marks=pytest.mark.slow),
        {"adaptive": True},
    ],
)
def test_too_few_bytes_say_how_many_would_do(changes: dict[str, Any]) -> None:
    with pytest.raises(ImpossibleError, match="bytes per device") as caught:
        heavy_plan.plan(make_study(bytes_per_device=120, **changes))
    assert caught.value.hint is not None
    need = int(caught.value.hint.split("bytes_per_device to ")[1].split()[0])
    heavy_plan.plan(make_study(bytes_per_device=2 * need, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trust": "local"}, "new_words"),
        ({"question": "histogram", "trust": "secure"}, 'needs trust = "central"'),
        ({"dictionary": "words.csv"}, "its domain is open"),
    ],
)
def test_studies_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        make_study(**changes)


def test_no_list_without_a_delta() -> None:
    with pytest.raises(ImpossibleError, match="delta above 0"):
        heavy_plan.plan(make_study(delta=0.0))


def test_cells_have_the_bits_that_were_planned_for_at_every_rate() -> None:
    """Short keys, which fit a word with few check bits: the guarantee is checked for the sketch
    in use, at every rate."""
    for changes in (
        {"alphabet": "abcdefghijklmnopqrstuvwxyz", "word_length": 4, "bytes_per_device": 65_536},
        {"word_length": 10, "adaptive": True, "rounds": 5, "devices": 100_000},
        {"alphabet": "abcdefghijklmnopqrstuvwxyz", "word_length": 4, "adaptive": True,
         "epsilon": 2.0, "bytes_per_device": 20_000},
    ):  # fmt: skip
        design = design_of(make_study(**changes))
        first = design.sketch(0, design.mechanism.rate)
        assert all(design.sketch(0, rate) == first for rate in (1.0, 0.25, 0.01))
        assert heavy_plan.traffic(design)["bytes_per_device"] <= (
            make_study(**changes).bytes_per_device or 0
        )
        with pytest.raises(SpecError, match="must fail with probability"):
            replace(design, check_bits=max(design.count_bits - 1, design.check_bits - 12))
        with pytest.raises(SpecError, match="must fail with probability"):
            replace(design, width=design.width // 2)


# Tasks


def test_noise_on_a_table_that_is_listed_is_refused_with_the_reason() -> None:
    design = design_of(make_study())
    task = design.tasks()[0]
    fields = {part.name: getattr(task, part.name) for part in fields_of(task)}
    bits = task.aggregation.modulus_bits
    masked = Masked(modulus_bits=bits, corrupt=0.1)
    for mechanism in (
        NoiseInShares(scale=3.0, survivors=4_000, colluders=3_000), NoNoise(),
        NoiseAtRelease(noise="gaussian", scale=3.0),
    ):  # fmt: skip
        changes = {"mechanism": mechanism, "aggregation": masked, "min_count": 4_000}
        with pytest.raises(TaskError, match="a key with noise is another key"):
            Task(**(fields | changes))
    Task(**(fields | {"aggregation": masked}))  # a masked sum of it is fine
    with pytest.raises(TaskError, match="modulus_bits must be the sketch's own"):
        Task(**(fields | {"aggregation": Plain(modulus_bits=bits - 1)}))
    with pytest.raises(TaskError, match="divides modulo a power of two"):
        Task(**(fields | {"aggregation": Masked(modulus_bits=bits, corrupt=0.1, prime=True)}))
    with pytest.raises(TaskError, match="private for 1 items"):
        Task(**(fields | {"items_per_device": 2}))


def test_a_private_design_cannot_keep_partial_tables_or_adapt_for_free() -> None:
    design = design_of(make_study())
    with pytest.raises(SpecError, match="complete tables only"):
        replace(design, partial=True)
    with pytest.raises(SpecError, match="must include that statistic"):
        replace(design, adaptive=True)


def test_every_round_charges_all_that_its_devices_will_pay() -> None:
    for changes in ({"rounds": 3}, {"rounds": 3, "adaptive": True}):
        design = design_of(make_study(**changes))
        for task in design.tasks():
            assert epsilon_of([task.loss], 1e-6) == pytest.approx(1.0, abs=1e-4)


# Campaigns


def test_a_campaign_absorbs_only_what_it_asked_for() -> None:
    design = design_of(make_study(rounds=2))
    campaign = HeavyHitterCampaign(design, SeededRng(1))
    other = design.task(1, design.mechanism.rate)
    with pytest.raises(SpecError, match="the answer to its last task"):
        campaign.absorb(NoisedSum(other, np.zeros(other.sketch.shape, dtype=np.int64), 5))


def run_rounds(design: HeavyHitterDesign, counts: list[I64], seed: int = 3) -> HeavyHitterCampaign:
    campaign = HeavyHitterCampaign(design, SeededRng(SEED, seed))
    numbers, _ = design.keys.numbers(WORDS)
    chance = np.random.default_rng([SEED, seed])
    for devices in counts:
        task = campaign.next_task()
        assert task is not None
        assert isinstance(task.sketch, InvertibleSketch)
        sample = chance.binomial(devices, task.mechanism.rate)  # type: ignore[attr-defined]  # a list
        table = task.sketch.encode_keys(numbers[sample > 0], sample[sample > 0])
        campaign.absorb(NoisedSum(task, table, int(devices.sum())))
    assert campaign.next_task() is None
    return campaign


def test_a_rate_goes_to_where_tables_are_full() -> None:
    """Without a guarantee, from a first rate that assumes distinct items."""
    design = design_of(make_study(epsilon=None, rounds=12, bytes_per_device=4_000, devices=60_000))
    campaign = run_rounds(design, [draw(5_000, seed) for seed in range(12)])
    rates = [part.rate for part in campaign.rounds]
    assert rates[0] < 0.2
    assert rates[-1] > 2 * rates[0]
    whole = [part for part in campaign.rounds if part.listing.is_complete]
    assert len(whole) >= 6  # the load is lowered whenever a table could not be read


def test_the_papers_rule_goes_half_the_way() -> None:
    design = design_of(make_study(epsilon=None, rounds=2, bytes_per_device=4_000, paper_mode=True))
    campaign = run_rounds(design, [draw(10_000, seed) for seed in range(2)])
    first = campaign.rounds[0]
    keys = len(first.listing)
    assert campaign.rounds[1].rate == pytest.approx(
        first.rate / (0.5 + 0.5 * keys / design.target), rel=1e-9
    )


def test_a_private_rate_adapts_by_a_noised_statistic_and_tells_at_one_rate() -> None:
    design = design_of(make_study(rounds=6, adaptive=True, devices=60_000, bytes_per_device=60_000))
    campaign = run_rounds(design, [draw(10_000, seed) for seed in range(6)])
    rates = [part.rate for part in campaign.rounds]
    assert len(set(rates)) > 2
    heavy_hitters = campaign.heavy_hitters()
    assert heavy_hitters.rate == min(part.rate for part in campaign.rounds if part.is_used)
    again = HeavyHitterCampaign(design, SeededRng(SEED, 99))
    other = run_rounds(design, [draw(10_000, seed) for seed in range(6)], seed=4)
    assert [part.rate for part in other.rounds][1:] != rates[1:]  # other noise
    assert again.rate == rates[0]


def test_what_is_told_is_worked_out_once_and_at_the_end() -> None:
    """Its noise is charged once: a second call gives the same list, and an early one raises."""
    design = design_of(make_study(rounds=2))
    campaign = run_rounds(design, [draw(10_000, seed) for seed in range(2)])
    assert campaign.heavy_hitters() is campaign.heavy_hitters()
    early = HeavyHitterCampaign(design, SeededRng(1))
    with pytest.raises(SpecError, match="the answers of all 2 rounds; got 0"):
        early.heavy_hitters()


def test_a_table_that_is_too_full_tells_nothing_but_that() -> None:
    design = replace(
        design_of(make_study(rounds=2, adaptive=True, devices=60_000, bytes_per_device=60_000)),
        most_keys=20,
    )
    campaign = run_rounds(design, [draw(20_000, seed) for seed in range(2)])
    heavy_hitters = campaign.heavy_hitters()
    assert (len(heavy_hitters), heavy_hitters.unread, heavy_hitters.respondents) == (0, 2, 0)
    assert campaign.rounds[1].rate == campaign.rounds[0].rate / 2


# From devices to a release


def test_common_items_are_listed_and_rare_ones_are_not() -> None:
    """Recall: an item of the detectable count is listed with probability 95%; more common ones
    almost surely. Fewer than 80% of some fifty has a probability below 1e-5."""
    counts = draw(20_000)
    release = run(make_study(), counts)
    least = release.plan["parameters"]["detectable_count"]
    truth = dict(zip(WORDS, counts.tolist(), strict=True))
    common = {word for word, count in truth.items() if count >= least}
    estimates = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
    assert len(common) > 40
    assert len(common & estimates.keys()) >= 0.8 * len(common)
    assert all(truth[word] > 0 for word in estimates)
    gaps = np.array([estimates[word] - truth[word] for word in estimates])
    assert (np.abs(gaps) <= 6 * release.standard_error.max()).all()
    assert any("95%" in note for note in release.notes)


@pytest.mark.slow
def test_intervals_cover_the_counts_of_common_items() -> None:
    """95% intervals, 30 runs × 12 items far above the threshold: 360 trials; below 86% has a
    probability under 1e-9, and nominal 50% intervals would fail."""
    counts, hits, trials = draw(20_000), 0, 0
    top = np.argsort(-counts)[:12]
    for seed in range(30):
        release = run(make_study(bytes_per_device=60_000), counts, seed=seed)
        rows = {
            word: (low, high)
            for word, low, high in zip(
                release.items.to_pylist(),
                release.low,
                release.high,
                strict=True,
            )
        }
        for place in top:
            low, high = rows.get(WORDS[place], (1.0, 0.0))
            hits += low <= counts[place] <= high
            trials += 1
    assert hits >= 0.86 * trials


@pytest.mark.slow
def test_a_canary_of_one_device_is_listed_no_more_often_than_delta() -> None:
    """With a delta large enough to see: 400 runs at delta 0.05, a word that one device holds.
    False alarm 1e-6 (exact binomial). Power: listed in every second run, it would be detected."""
    releases, runs = 0, 400
    counts = draw(500)
    planned = sfumato.plan(make_study(devices=501, delta=0.05, bytes_per_device=60_000))
    for seed in range(runs):
        release = sfumato.simulate(
            planned,
            {"item": [*WORDS, "canary"], "count": [*counts, 1]},
            count_column="count",
            seed=seed,
        )
        releases += "canary" in release.items.to_pylist()
    assert stats.binom.sf(releases - 1, runs, 0.05) > 1e-6


def test_the_canary_audit_sees_a_threshold_that_is_too_low() -> None:
    """The control: the same audit of a list without a threshold."""
    release = run(make_study(epsilon=None, devices=501), np.r_[1, draw(500)[1:]])
    assert WORDS[0] in release.items.to_pylist()


def test_without_a_promise_a_whole_table_is_exact() -> None:
    counts = draw(20_000)
    release = run(make_study(epsilon=None, threshold=10.0, rounds=4), counts)
    truth = {w: c for w, c in zip(WORDS, counts.tolist(), strict=True) if c >= 10}
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == truth
    assert release.privacy.epsilon is None


def test_a_histogram_counts_what_it_names() -> None:
    counts = draw(20_000)
    study = make_study(question="histogram", rounds=2, cohorts="similar")
    planned = sfumato.plan(study)
    assert isinstance(planned.design, HistogramDesign)
    release = run(study, counts)
    truth = dict(zip(WORDS, counts.tolist(), strict=True))
    assert len(release) > 10
    errors = [
        (count - truth[word]) / error
        for word, count, error in zip(
            release.items.to_pylist(), release.counts, release.standard_error, strict=True
        )
    ]
    assert np.sqrt(np.mean(np.square(errors))) < 2  # of one, were they normal; 20 items and more


def test_a_device_counts_once_for_an_item_and_for_no_more_than_its_bound() -> None:
    """A hundred devices hold one word five times, under two endings that are cut, and others."""
    rows = [(device, word) for device in range(100) for word in ["oakley", "oakum"] * 3 + ["elm"]]
    data = {"item": [word for _, word in rows], "device": [str(device) for device, _ in rows]}
    study = make_study(
        epsilon=None, devices=100, items_per_device=2, alphabet="abcdefghijklmnopqrstuvwxyz",
        word_length=3,
    )  # fmt: skip
    release = sfumato.simulate(sfumato.plan(study), data, device_column="device", seed=1)
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == {
        "oak": 100.0, "elm": 100.0,
    }  # fmt: skip
    with pytest.warns(SimulationWarning, match="200 values and report 100"):
        one = sfumato.simulate(
            sfumato.plan(replace(study, items_per_device=1)), data, device_column="device", seed=1
        )
    assert sum(one.counts) == 100


def test_a_real_device_counts_once_for_an_item_too() -> None:
    """One item three times makes the same report as once; more items are refused."""
    design = design_of(
        make_study(epsilon=None, alphabet="abcdefghijklmnopqrstuvwxyz", word_length=3)
    )
    task = design.task(0, 1.0)
    assert isinstance(task.aggregation, Plain)
    assert isinstance(task.sketch, InvertibleSketch)
    message = report(task, ["oakley", "oakum", "oak"], rng=SeededRng(1))
    listing = task.sketch.list(task.aggregation.unpack(message.message, task.sketch.shape))
    assert (listing.items.to_pylist(), listing.counts.tolist()) == (["oak"], [1])
    with pytest.raises(SpecError, match="at most 1 values"):
        report(task, ["oak", "elm"], rng=SeededRng(1))


def test_a_masked_sum_of_tables_lists_as_their_sum() -> None:
    """The masked ring is the sketch's own, so a secure round of ten devices is one table."""
    design = design_of(make_study(epsilon=None, devices=10, bytes_per_device=4_000))
    task = design.task(0, 1.0)
    fields = {part.name: getattr(task, part.name) for part in fields_of(task)}
    bits = task.aggregation.modulus_bits
    fields |= {"aggregation": Masked(modulus_bits=bits, corrupt=0.1), "min_count": 8}
    masked = Task(**fields)
    assert isinstance(masked.sketch, InvertibleSketch)
    sketch = masked.sketch
    outcome = rehearsal.run(
        masked.masked_round(10, "ab" * 16),
        lambda member: sketch.encode(["oak" if member < 6 else f"elm{member}"]).reshape(-1),
        leaving={9: Phase.MASK},
        before_unmask=lambda: None,
        rng=SeededRng(SEED),
    )
    total = masked.aggregation.open(outcome.total.astype(np.int64).reshape(sketch.shape))
    listing = sketch.list(total)
    assert dict(zip(listing.items.to_pylist(), listing.counts.tolist(), strict=True)) == {
        "oak": 6, "elm6": 1, "elm7": 1, "elm8": 1,
    }  # fmt: skip


def test_items_without_a_key_stay_on_the_device_and_are_counted_in_the_notes() -> None:
    release = sfumato.simulate(
        sfumato.plan(make_study(epsilon=None, devices=30, word_length=4)),
        {"item": ["oak"] * 20 + ["sequoia"] * 10},
        seed=1,
    )
    assert release.items.to_pylist() == ["oak"]
    assert "10 items of more than 4 bytes are not sent" in release.notes


def test_a_private_release_does_not_say_how_many_items_had_no_key() -> None:
    study = make_study(alphabet="ab", word_length=3, devices=501)
    texts = []
    for odd in ("b", "ZZZ"):
        release = sfumato.simulate(sfumato.plan(study), {"item": ["ab"] * 500 + [odd]}, seed=1)
        texts.append(release.notes)
    assert texts[0] == texts[1]


def test_items_of_one_key_are_one_item() -> None:
    data = {"item": ["ab", "ab\0", "abc", "b"] * 10, "device": [str(k // 4) for k in range(40)]}
    study = make_study(epsilon=None, devices=10, items_per_device=4, alphabet="ab", word_length=2)
    release = sfumato.simulate(sfumato.plan(study), data, device_column="device", seed=1)
    assert max(release.counts) <= 10


def test_counts_of_cut_words_are_counts_of_what_they_are_cut_to() -> None:
    study = make_study(
        question="histogram", epsilon=None, devices=900, word_length=3,
        alphabet="abcdefghijklmnopqrstuvwxyz",
    )  # fmt: skip
    release = sfumato.simulate(
        sfumato.plan(study), {"item": ["oaktree"] * 600 + ["elm"] * 300}, seed=1
    )
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == {
        "oak": 600.0, "elm": 300.0,
    }  # fmt: skip


def test_a_threshold_is_on_all_devices_that_are_asked() -> None:
    release = sfumato.simulate(
        sfumato.plan(make_study(epsilon=None, devices=1_000, dropout=0.5, threshold=100.0)),
        {"item": ["oak"] * 300 + ["elm"] * 150 + [f"tree{k}" for k in range(550)]},
        seed=1,
    )
    assert set(release.items.to_pylist()) == {"oak", "elm"}


def test_noise_that_the_sampler_cannot_draw_is_refused_beforehand() -> None:
    with pytest.raises(ImpossibleError, match="the sampler's"):
        heavy_plan.plan(
            make_study(epsilon=0.1, items_per_device=50, adaptive=True, bytes_per_device=3_000_000)
        )


def test_dropouts_are_counted_as_asked() -> None:
    counts = draw(20_000)
    release = run(make_study(epsilon=None, dropout=0.3), counts)
    assert release.cost.devices == 20_000
    top = int(np.argmax(counts))
    at = release.items.to_pylist().index(WORDS[top])
    deviations = (release.counts[at] - counts[top]) / release.standard_error[at]
    assert abs(deviations) < 5


def test_a_sample_has_the_rate_that_was_planned() -> None:
    design = design_of(make_study(bytes_per_device=60_000))
    assert design.mechanism.rate < 1
    campaign = run_rounds(design, [draw(20_000)])
    assert_binomial(campaign.rounds[0].listing.inserted, 20_000, design.mechanism.rate)


def test_keys_are_words_of_an_alphabet_or_any_text() -> None:
    assert heavy_plan.keys_of(make_study(alphabet="abc"), 24) == WordKeys(alphabet="abc", length=8)
    assert heavy_plan.keys_of(make_study(), 24) == TextKeys(length=8)
    unsaid = make_study(word_length=None)
    assert heavy_plan.keys_of(unsaid, 24) == TextKeys(length=24)
    words = heavy_plan.keys_of(replace(unsaid, alphabet="abc"), 24)
    assert words == WordKeys(alphabet="abc", length=10)

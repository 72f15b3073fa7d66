"""Studies that name an algorithm and its sizes, or the setting of a paper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sfumato import plan, simulate
from sfumato.errors import ImpossibleError, SpecError, StudyError
from sfumato.flow.task import Task
from sfumato.privacy import CountMeanSketch, HadamardCountMeanSketch, HashedResponse
from sfumato.questions.frequencies.design import FrequencyDesign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.sketch import CountSketch, capacity
from sfumato.study import PRESETS, QUESTIONS, Study

ITEMS = [f"item {number}" for number in range(300)]
LOCAL = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 20_000}
SUMS = {**LOCAL, "trust": "secure", "epsilon": 1.0, "devices": 2_000, "rounds": 2}


def randomizer(**keys: Any) -> Any:
    design = plan({**LOCAL, **keys}, items=ITEMS).design
    assert isinstance(design, LocalDesign)
    return design.randomizer


def sketches(**keys: Any) -> list[CountSketch]:
    design = plan({**SUMS, **keys}, items=ITEMS).design
    assert isinstance(design, FrequencyDesign)
    tasks: list[Task] = design.tasks()
    return [task.sketch for task in tasks if isinstance(task.sketch, CountSketch)]


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("count_mean", CountMeanSketch),
        ("count_mean_optimal", CountMeanSketch),
        ("hadamard", HadamardCountMeanSketch),
        ("hashed", HashedResponse),
    ],
)
@pytest.mark.parametrize("paper_mode", [False, True])
def test_a_local_table_has_the_rows_and_width_of_the_study(
    algorithm: str, kind: type[Any], paper_mode: bool
) -> None:
    oracle = randomizer(algorithm=algorithm, rows=77, width=16, paper_mode=paper_mode)
    assert isinstance(oracle, kind)
    assert (oracle.rows, oracle.width) == (77, 16)
    if kind is CountMeanSketch:
        assert oracle.flips == ("symmetric" if algorithm == "count_mean" else "optimal")


def test_a_size_that_is_left_out_is_chosen() -> None:
    assert randomizer(algorithm="count_mean", rows=77).width in (64, 256, 1_024)
    assert randomizer(algorithm="count_mean", width=77).rows in (64, 1_024, 65_536)
    hadamard = randomizer(algorithm="hadamard", paper_mode=True)
    assert (hadamard.rows, hadamard.width) == (1_024, 32_768)


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("shared", [(0, 0), (0, 0)]), ("hybrid", [(0, 0), (0, 1)]), ("fresh", [(0, 0), (1, 1)])],
)
def test_rounds_share_what_the_algorithm_says(
    algorithm: str, rounds: list[tuple[int, int]]
) -> None:
    tables = sketches(algorithm=algorithm, rows=4, width=50)
    assert [(each.bucket_round, each.sign_round) for each in tables] == rounds
    assert {(each.rows, each.width) for each in tables} == {(4, 50)}


def test_rows_follow_from_the_failure_probability() -> None:
    """ln(2·300/p), up to the next odd number."""
    assert sketches(algorithm="hybrid", width=50)[0].rows == 9
    assert sketches(algorithm="hybrid", width=50, failure_probability=1e-4)[0].rows == 17


def test_a_target_is_refused_by_its_failure_probability() -> None:
    keys = {**LOCAL, "target_error": 0.013}
    assert plan({**keys, "failure_probability": 0.5}, items=ITEMS).predicted["standard_error"] > 0
    with pytest.raises(ImpossibleError, match="the largest error over"):
        plan({**keys, "failure_probability": 1e-9}, items=ITEMS)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({**LOCAL, "rows": 7}, "algorithm is not given"),
        ({**LOCAL, "algorithm": "direct", "width": 7}, "algorithm is direct"),
        ({**LOCAL, "algorithm": "hadamard", "width": 7}, "width must be a power of two; got 7"),
        ({**LOCAL, "algorithm": "shared"}, "algorithm of frequencies"),
        ({**SUMS, "algorithm": "one_hot", "rows": 7}, "algorithm is one_hot"),
        ({**SUMS, "algorithm": "fresh", "width": 50, "target_error": 0.1}, "asks for one"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        plan(keys, items=ITEMS)


@pytest.mark.parametrize(
    "keys",
    [
        {**SUMS, "algorithm": "hybrid", "rows": 5, "width": 5_000, "bytes_per_device": 9_000},
        {**LOCAL, "algorithm": "count_mean", "width": 8_000, "bytes_per_device": 500},
    ],
    ids=["sums", "local"],
)
def test_sizes_beyond_the_bytes_are_refused_with_bytes_that_suffice(keys: dict[str, Any]) -> None:
    with pytest.raises(ImpossibleError, match="bytes_per_device") as caught:
        plan(keys, items=ITEMS)
    enough = int((caught.value.hint or "").split()[3])
    assert plan({**keys, "bytes_per_device": enough}, items=ITEMS)
    with pytest.raises(ImpossibleError):
        plan({**keys, "bytes_per_device": enough - 1}, items=ITEMS)


def test_what_is_worse_than_the_planners_choice_is_warned_of() -> None:
    warnings = plan({**LOCAL, "algorithm": "hadamard"}, items=ITEMS).warnings
    assert any("times that of" in warning for warning in warnings)
    assert not plan({**LOCAL, "algorithm": "hashed"}, items=ITEMS).warnings
    different = plan({**SUMS, "algorithm": "hybrid", "cohorts": "different"}, items=ITEMS)
    assert any('algorithm "fresh" does not' in warning for warning in different.warnings)
    central = plan({**SUMS, "trust": "central", "algorithm": "shared"}, items=ITEMS)
    assert any("hides nothing" in warning for warning in central.warnings)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_study_whose_keys_all_have_an_effect(name: str) -> None:
    study = Study.from_mapping({"preset": name, "devices": 1_000})
    study.check_keys()
    assert all(getattr(study, key) == value for key, value in PRESETS[name].items())
    assert Study.from_mapping(study.to_dict()) == study
    assert study.question in QUESTIONS


def test_a_preset_and_a_key_that_differs_are_refused() -> None:
    with pytest.raises(StudyError, match=r"has epsilon = 4\.0; got 2\.0"):
        Study.from_mapping({"preset": "apple-emoji-2017", "epsilon": 2.0})
    same = Study.from_mapping({"preset": "apple-emoji-2017", "epsilon": 4.0})
    with pytest.raises(StudyError, match="has rows = 65536; got 5"):
        dataclasses.replace(same, rows=5)
    with pytest.raises(StudyError, match="preset must be one of"):
        Study.from_mapping({**LOCAL, "preset": "apple-emoji-2018"})


def test_lists_of_paper_001_are_one_line() -> None:
    """Figure 2: R = 30, tau = 50, m = 1, three characters; C = 5,000 words of 16 bits here."""
    keys = {"devices": 300_000, "bytes_per_device": 10_000}
    rates = []
    for name in ("lists-adaptive-2023", "lists-fixed-2023"):
        planned = plan({"preset": name, **keys})
        study = planned.study
        assert (study.rounds, study.threshold, study.items_per_device) == (30, 50, 1)
        assert planned.predicted["bytes_per_device"] <= 10_000
        assert planned.privacy.epsilon is None
        rates.append(planned.parameters["sampling_rate"])
    most = planned.design.most_sampled(1.0)  # type: ignore[attr-defined]  # a list's
    keys_listed = capacity.typical_keys(3 * planned.parameters["width"])
    assert math.isclose(rates[1], 1 / max(1.0, min(most / keys_listed, 25)))


def test_apples_sketches_are_those_of_the_paper() -> None:
    """Bytes: a record of k rows and m bits has log2(k) + m bits (CMS) or log2(k) + log2(m) + 1
    (HCMS), in whole bytes."""
    sizes = {
        "apple-emoji-2017": (65_536, 1_024, 4.0, 130),
        "apple-autoplay-2017": (65_536, 1_024, 8.0, 130),
        "apple-energy-2017": (1_024, 32_768, 4.0, 4),
        "apple-health-2017": (65_536, 256, 2.0, 34),
    }
    for name, (rows, width, epsilon, record_bytes) in sizes.items():
        planned = plan({"preset": name, "devices": 1_000_000}, items=ITEMS)
        design = planned.design
        assert isinstance(design, LocalDesign)
        oracle = design.randomizer
        assert (oracle.rows, oracle.width, oracle.epsilon) == (rows, width, epsilon)
        assert not design.aware
        assert planned.predicted["bytes_per_report"] == record_bytes


def test_ten_hybrid_rounds_of_the_paper_are_one_line() -> None:
    """16 rows, even and without noise, read by plain medians. An item collides with one of 29
    others in 8 of its 16 rows with a probability below 1e-11: counts are exact."""
    counts = {f"item {number}": 100 * (30 - number) for number in range(30)}
    data = {"item": list(counts), "count": list(counts.values())}
    study = {"preset": "wu-gowalla-2023", "width": 3_000, "dropout": 0.0}
    release = simulate(study, data, count_column="count", seed=1)
    sizes = release.plan["parameters"]
    assert (sizes["rows"], sizes["width"], sizes["rounds"]) == (16, 3_000, 10)
    assert sizes["decode"] == "median"
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == counts


@pytest.mark.parametrize(
    "keys",
    [
        LOCAL,
        {**LOCAL, "algorithm": "count_mean", "rows": 8, "width": 4, "paper_mode": True},
        {**SUMS, "algorithm": "hybrid", "rows": 5, "width": 20},
        {**SUMS, "trust": "central", "dropout": 0.2},
    ],
    ids=["hashed", "count mean", "hybrid", "one-hot"],
)
def test_a_plan_says_where_its_error_comes_from(keys: dict[str, Any]) -> None:
    predicted = plan(keys, items=ITEMS).predicted
    noise, collisions = predicted["error_from_noise"], predicted["error_from_collisions"]
    assert noise > 0
    rest = predicted["standard_error"] ** 2 - noise**2 - collisions**2  # a rare item's sampling
    assert -1e-9 * noise**2 <= rest <= 0.1 * predicted["error_from_sampling"] ** 2 + 1e-9 * noise**2
    assert (collisions > 0) == ("width" in keys or keys is LOCAL)
    assert (predicted["error_from_sampling"] > 0) == (keys["trust"] != "local")

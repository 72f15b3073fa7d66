"""Studies check themselves; plans size, predict and refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import sfumato
from planning_checks import sums_of
from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow.report import HEADER_BYTES, report_bytes
from sfumato.planning import Plan
from sfumato.privacy import NoiseAtRelease, NoNoise, epsilon_of
from sfumato.privacy.accounting import epsilon_text
from sfumato.questions import sizing
from sfumato.questions.frequencies.plan import DEFAULT_BYTES
from sfumato.study import Study

WORDS = pa.array([f"word {i}" for i in range(20_000)])
BASE: dict[str, Any] = {
    "question": "frequencies",
    "trust": "central",
    "epsilon": 1.0,
    "delta": 1e-6,
    "devices": 100_000,
}


def planned(items: pa.Array = WORDS, **keys: Any) -> Plan:
    return sfumato.plan({**BASE, **keys}, items=items)


def test_a_study_file_is_its_keys_and_its_dictionary_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words.csv").write_text("id,tree\n1,oak\n2,elm\n3,oak\n")
    (tmp_path / "study.toml").write_text(
        'question = "frequencies"\ntrust = "central"\nepsilon = 2\ndevices = 1_000\n'
        'dictionary = "words.csv"\ndictionary_column = "tree"\n'
    )
    plan = sfumato.plan(tmp_path / "study.toml")
    assert plan.listed.items.to_pylist() == ["oak", "elm"]
    assert plan.study.epsilon == 2
    assert any("repeats 1 item" in warning for warning in plan.warnings)


def test_a_number_too_large_to_write_is_not_infinite(tmp_path: Path) -> None:
    study = 'question = "frequencies"\ntrust = "central"\nepsilon = {}\ndevices = 1_000\n'
    (tmp_path / "study.toml").write_text(study.format("1e400"))
    with pytest.raises(StudyError, match="finite, or inf"):
        Study.load(tmp_path / "study.toml")
    (tmp_path / "study.toml").write_text(study.format("inf"))
    assert Study.load(tmp_path / "study.toml").epsilon is None


def test_infinite_epsilon_means_no_noise_and_no_promise() -> None:
    plan = planned(epsilon=math.inf)
    assert sums_of(plan).mechanism == NoNoise()
    assert plan.privacy.epsilon is None
    assert plan.privacy.guarantee.startswith("no differential privacy")


@pytest.mark.parametrize("missing", ["question", "trust", "epsilon"])
def test_a_study_without_its_question_its_trust_or_its_epsilon_is_refused(missing: str) -> None:
    keys = {key: value for key, value in BASE.items() if key != missing}
    with pytest.raises(StudyError, match=missing):
        sfumato.plan(keys, items=WORDS)


def test_a_plan_needs_devices_and_a_dictionary() -> None:
    with pytest.raises(StudyError, match="the number of devices"):
        sfumato.plan({**BASE, "devices": None}, items=WORDS)
    with pytest.raises(StudyError, match="give items, or the study a dictionary"):
        sfumato.plan(BASE)


def sketched(**keys: Any) -> Plan:
    return planned(algorithm="count_sketch", **keys)


def test_devices_send_the_places_of_their_items_to_a_trusted_collector() -> None:
    plan = planned()
    assert plan.algorithm == "sparse one-hot reports"
    assert plan.predicted["bytes_per_device"] == HEADER_BYTES + 2  # 15 bits for 20,000 places
    assert plan.predicted["standard_error"] == pytest.approx(
        planned(algorithm="one_hot").predicted["standard_error"]
    )
    assert "sees each device's items" in plan.privacy.statement
    several = planned(items_per_device=8)
    assert several.predicted["bytes_per_device"] == HEADER_BYTES + 15


def test_a_table_that_is_shorter_than_its_entries_is_sent_whole() -> None:
    plan = planned(items=WORDS[:3], items_per_device=40, devices=10)
    assert plan.algorithm == "one-hot"
    assert "sees each device's table" in plan.privacy.statement


def test_sparse_reports_that_do_not_fit_are_refused_with_what_would_fit() -> None:
    keys: dict[str, Any] = {"items_per_device": 400, "algorithm": "sparse"}
    with pytest.raises(ImpossibleError, match="bytes_per_device is 700") as refusal:
        planned(bytes_per_device=700, **keys)
    enough = int(str(refusal.value.hint).split()[3])
    assert planned(bytes_per_device=enough, **keys).predicted["bytes_per_device"] == enough
    by_itself = planned(bytes_per_device=700, items_per_device=400)
    assert by_itself.algorithm == "count sketch"


def test_an_algorithm_that_the_question_does_not_have_is_refused() -> None:
    with pytest.raises(StudyError, match=r"must be sparse or .* or hybrid; got prefixes"):
        planned(algorithm="prefixes")
    with pytest.raises(StudyError, match=r"must be one_hot or .* or hybrid; got sparse"):
        planned(algorithm="sparse", trust="secure")
    with pytest.raises(StudyError, match=r"must be hashed or .* or hadamard; got sparse"):
        planned(algorithm="sparse", trust="local")


def test_a_small_dictionary_is_counted_one_hot() -> None:
    plan = planned(items=WORDS[:100], algorithm="one_hot")
    assert plan.algorithm == "one-hot"
    assert plan.predicted["bytes_per_device"] < DEFAULT_BYTES


def test_the_bytes_allowed_set_the_width_and_are_kept() -> None:
    for limit in (1_000, 5_000, 20_000):
        plan = sketched(bytes_per_device=limit)
        assert sums_of(plan).mode == "shared"
        used = report_bytes(sums_of(plan).tasks()[0])
        assert used == plan.predicted["bytes_per_device"]
        one_cell_more = sums_of(plan).rows * 8
        assert limit - one_cell_more * 8 < used <= limit


def test_more_bytes_predict_less_error() -> None:
    errors = [
        sketched(bytes_per_device=limit).predicted["standard_error"]
        for limit in (1_000, 3_000, 9_000)
    ]
    assert errors == sorted(set(errors), reverse=True)


def test_a_target_error_is_sized_by_a_pilot_and_minimax_is_only_a_bound() -> None:
    plan = sketched(target_error=0.01)
    assert plan.algorithm == "two-phase count sketch"
    assert plan.predicted["minimax_width"] == 1200
    assert plan.predicted["width"] < sums_of(plan).width < 1200
    assert plan.predicted["half_width_95"] < 0.01 * 100_000
    most = max(report_bytes(task) for task in (*sums_of(plan).tasks(), sums_of(plan).pilot()))
    assert plan.predicted["most_bytes_per_device"] == most


def test_without_enough_devices_for_a_pilot_the_width_suffices_for_any_data() -> None:
    plan = sketched(target_error=0.04, devices=4_000, epsilon=math.inf)
    design = sums_of(plan)
    assert design.pilot_devices == 0
    spread = sizing.largest_spread(0.04, items=len(WORDS), risk=0.05)
    assert spread is not None
    width = sizing.width_for_any(spread, sizing.Reading(rows=design.rows, risk=0.05))
    assert design.width == math.ceil(width)
    assert design.decode == "refined"


def test_a_target_below_the_noise_is_refused_with_what_would_reach_it() -> None:
    with pytest.raises(ImpossibleError, match="noise alone") as refusal:
        planned(target_error=0.0001, devices=5_000)
    hint = str(refusal.value.hint)
    enough = int(hint.split()[1].replace(",", ""))
    planned(target_error=0.0001, devices=enough)  # does not raise
    with pytest.raises(ImpossibleError):
        planned(target_error=0.0001, devices=enough // 2)


def test_without_a_pilot_target_and_bytes_that_exclude_each_other_are_refused() -> None:
    keys: dict[str, Any] = {"target_error": 0.04, "devices": 4_000, "epsilon": math.inf}
    with pytest.raises(ImpossibleError, match=r"needs .* bytes per device") as refusal:
        sketched(**keys, bytes_per_device=200)
    enough = int(str(refusal.value.hint).split()[3].rstrip(","))
    assert sketched(**keys, bytes_per_device=enough).predicted["bytes_per_device"] == enough


def test_with_a_pilot_the_bytes_limit_both_phases() -> None:
    limit = 1_500
    plan = sketched(target_error=0.005, bytes_per_device=limit)
    design = sums_of(plan)
    assert max(report_bytes(task) for task in (*design.tasks(), design.pilot())) <= limit
    assert design.width < sums_of(sketched(target_error=0.005)).width


def test_the_promise_is_what_the_ledger_will_be_charged() -> None:
    plan = sketched(bytes_per_device=3_000)
    assert plan.study.epsilon is not None
    spent = epsilon_of([sums_of(plan).tasks()[0].loss], plan.study.delta)
    assert 0.99 * plan.study.epsilon < spent <= plan.study.epsilon
    assert f"cost of epsilon {epsilon_text(spent)}" in plan.privacy.mechanism
    assert plan.privacy.unit == "device"
    assert plan.privacy.neighbours.startswith("zero-out")


def test_delta_zero_gives_pure_privacy_by_laplace_noise() -> None:
    noise = sums_of(sketched(delta=0.0, bytes_per_device=3_000)).mechanism
    assert isinstance(noise, NoiseAtRelease)
    assert noise.noise == "laplace"


def test_paper_mode_has_the_papers_constant_rows_rounds_and_decoder() -> None:
    similar = planned(paper_mode=True, rounds=10, bytes_per_device=3_000)
    assert (sums_of(similar).mode, sums_of(similar).decode) == ("hybrid", "median")
    assert sums_of(similar).constant == 2
    assert sums_of(similar).rows == math.ceil(math.log(2 * len(WORDS) / 0.1))
    different = planned(paper_mode=True, rounds=10, cohorts="different", bytes_per_device=3_000)
    assert sums_of(different).mode == "fresh"
    assert any("constant 2" in warning for warning in similar.warnings)


def test_different_cohorts_are_never_read_as_hybrid_rounds() -> None:
    plan = sketched(rounds=5, cohorts="different", epsilon=math.inf, bytes_per_device=3_000)
    assert sums_of(plan).mode != "hybrid"


def test_shown_rounds_are_each_noised_and_unshown_shared_ones_once() -> None:
    for publish, every in (("rounds", True), ("final", False)):
        plan = planned(items=WORDS[:50], rounds=4, publish=publish)
        assert sums_of(plan).every_round is every
        assert len(sums_of(plan).tasks()) == (4 if every else 1)


def test_legal_and_unwise_studies_are_warned_of() -> None:
    warnings = sketched(delta=1e-3, bytes_per_device=600).warnings
    assert any("delta" in warning for warning in warnings)
    assert any("majority of rows" in w for w in sketched(bytes_per_device=345).warnings)


def test_a_plan_prints_what_it_will_do() -> None:
    text = repr(sketched(bytes_per_device=3_000))
    for part in ("count sketch", "width", "standard_error", "differential privacy"):
        assert part in text

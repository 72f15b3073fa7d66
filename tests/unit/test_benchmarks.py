"""The lines of a benchmark say what they should, and a missed requirement is told."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from service.test_benchmarks import NAMES
from sfumato.study import QUESTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks, which are not part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))

    def import_benchmark(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return import_benchmark


def test_every_benchmark_is_run_by_a_test(load: Any) -> None:
    groups = load("__main__").GROUPS
    assert sorted(name for group in groups.values() for name in group) == sorted(NAMES)


def test_ratios_are_of_times_in_one_repetition(load: Any) -> None:
    race, lines = load("race"), load("lines")
    times = {
        "ours": iter([1.0, 2.0, 4.0]),
        "peer": iter([5.0, 6.0, 40.0]),
        "floor": iter([1.0] * 3),
    }

    def contender(name: str, scale: float = 1.0) -> Any:
        return race.Contender(lambda: None, scale, lambda _: next(times[name]))

    result = race.run(
        race.Race(
            name="made up",
            case="one",
            sizes={},
            seeds=[],
            ours=contender("ours"),
            peers={"peer": contender("peer", 2.0)},
            floors={"floor": contender("floor")},
        ),
        lines.Settings(repeats=3),
    )
    assert result["ratio_to_peer"]["peer"] == {"median": 10.0, "interval": [6.0, 20.0]}
    assert result["ratio_to_floor"]["floor"] == {"median": 2.0, "interval": [1.0, 4.0]}
    assert (result["median"], result["interval"]) == (2.0, [1.0, 4.0])


def test_the_last_line_of_a_case_counts(load: Any, tmp_path: Path) -> None:
    lines = load("lines")
    path = tmp_path / "new folder" / "made_up.jsonl"
    for number, case in enumerate(["a", "b", "a"]):
        lines.append(path, {"case": case, "number": number})
    assert lines.latest(path) == [{"case": "a", "number": 2}, {"case": "b", "number": 1}]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"refined_error": 0.02}, "5.00 times better, not 10"),
        ({"refined_error": 0.02, "width": 200}, "5.00 times better, not 10"),
        ({"refined_error": 0.02, "width": 1000}, None),
        ({"refined_error": 0.02, "noised": True}, None),
        ({"refined_error": 0.02, "permuted": True}, None),
        ({"refined_error": 0.02, "data": "gowalla"}, None),
        ({"refined_error": 0.104, "permuted": True}, None),
        ({"refined_error": 0.106, "permuted": True}, "more than 1.05 times the median's"),
        ({"refined_error": 0.106, "data": "gowalla"}, "more than 1.05 times the median's"),
        ({"refined_error": 0.0}, None),
        ({"refined_error": 0.0, "median_error": 0.0}, None),
    ],
)
def test_requirements_missed_by_the_refined_decoder_are_reported(
    load: Any, changes: dict[str, Any], complaint: str | None
) -> None:
    parameters = {"data": "i^-2", "width": 50, "noised": False, "permuted": False}
    line = {"case": "made up", "seeds": [7], "median_error": 0.1, "refined_error": 0.001}
    fields = {key: changes.get(key, value) for key, value in {**line, **parameters}.items()}
    complaints = load("accuracy.refined").missed([fields | {"parameters": fields}])
    assert len(complaints) == (complaint is not None)
    assert all(complaint in text and "seeds [7]" in text for text in complaints)


def test_a_coverage_outside_its_limits_is_reported(load: Any) -> None:
    coverage = load("accuracy.coverage")
    line = {"case": "made up", "seeds": [0, 1]}
    assert not coverage.missed([line | {"covered": 0.94}])
    assert len(coverage.missed([line | {"covered": 0.929}, line | {"covered": 0.971}])) == 2


def test_a_collector_that_grows_is_reported(load: Any) -> None:
    ingest = load("speed.ingest")
    assert not ingest.missed([{"case": "memory", "bytes": {"1": 100, "10": 109}}])
    assert len(ingest.missed([{"case": "memory", "bytes": {"1": 100, "10": 112}}])) == 1


def plan_line(algorithm: str, *, own: bool = False, **changes: Any) -> dict[str, Any]:
    """A line of the benchmark of plans, whose predictions are right unless `changes` says not."""
    fields = {"error": 2.0, "low": 1.9, "high": 2.1, "bytes": 100.0, "detectable": None} | changes
    measured = {"error": fields["error"], "interval": [fields["low"], fields["high"]]}
    predicted = {"rare": 2.0, "middle": None, "largest": 2.0, "bytes": 100, "most_bytes": 100}
    return {
        "case": f"mean/central/made up/{algorithm}",
        "algorithm": algorithm,
        "chosen": own,
        "problem": "",
        "study": {"question": "frequencies"},
        "seeds": [0, 9],
        "repetitions": 10,
        "predicted": predicted | {"detectable": fields["detectable"] and 20},
        "measured": {"rare": measured, "middle": None, "largest": None, "bytes": fields["bytes"]}
        | {"detectable": fields["detectable"]},
    }


@pytest.mark.parametrize(
    ("own", "other", "better"),
    [
        ({}, {}, []),
        ({}, {"error": 1.7, "bytes": 80.0}, ["other"]),
        ({}, {"error": 1.9, "bytes": 80.0}, []),  # within 10% in error
        ({}, {"error": 1.7, "bytes": 95.0}, []),  # within 10% in bytes
        ({"detectable": 20.0}, {"error": 1.0, "bytes": 1.0, "detectable": 20.0}, []),
        ({"detectable": 20.0}, {"error": 3.0, "bytes": 1.0, "detectable": 15.0}, ["other"]),
    ],
)
def test_a_plan_that_is_beaten_in_error_and_bytes_is_reported(
    load: Any, own: dict[str, Any], other: dict[str, Any], better: list[str]
) -> None:
    plans = load("accuracy.plans")
    lines = [plan_line("own", own=True, **own), plan_line("other", **other)]
    assert plans.beaten_by(lines, "mean/central/made up") == better
    complaints = [text for text in plans.missed(lines) if "is beaten" in text]
    assert len(complaints) == len(better)
    assert f"In {1 - len(better)} of 1 studies no possible" in plans.report(lines)


def test_a_prediction_that_is_off_beyond_chance_is_reported(load: Any) -> None:
    plans = load("accuracy.plans")
    for changes, is_off in (
        ({}, False),
        ({"error": 2.4, "low": 2.15, "high": 2.6}, False),  # the interval reaches 10%
        ({"error": 2.4, "low": 2.25, "high": 2.6}, True),
        ({"error": 1.6, "low": 1.5, "high": 1.75}, True),
    ):
        lines = [plan_line("own", own=True, **changes)]
        assert len(plans.missed(lines)) == is_off
        assert ("mean/central/made up/own (rare)" in plans.report(lines)) == (changes != {})


def test_an_impossible_algorithm_is_in_the_report_with_its_reason(load: Any) -> None:
    plans = load("accuracy.plans")
    impossible = {
        "case": "mean/central/made up/none", "algorithm": "none", "chosen": False, "problem": "no",
    }  # fmt: skip
    text = plans.report([plan_line("own", own=True), impossible])
    assert "- mean/central/made up, none: no." in text
    assert not plans.missed([plan_line("own", own=True), impossible])


def test_studies_of_plans_are_of_every_question_and_trust_but_training(load: Any) -> None:
    cases = load("accuracy.plans").CASES
    assert len(cases) >= 20
    assert {(case.study.question, case.study.trust) for case in cases} == {
        (question, trust)
        for question, facts in QUESTIONS.items()
        for trust in facts.planners
        if question != "train"
    }, "add a case to CASES (benchmarks/accuracy/plans.py)"


def test_too_much_memory_is_reported(load: Any) -> None:
    simulate = load("speed.simulate")
    assert not simulate.missed([{"case": "made up", "peak_bytes": 999_999_999}])
    assert simulate.missed([{"case": "made up", "peak_bytes": 1_000_000_000}])


def test_requirements_missed_by_a_masked_round_are_reported(load: Any) -> None:
    secagg = load("speed.secagg")
    client = {
        "case": "made up/client",
        "sizes": {"to_the_floor": True},
        "ratio_to_peer": {"a peer": {"median": 8.0}},
        "ratio_to_floor": {"a floor": {"median": 1.3}},
        "bytes_up": 50,
        "bytes_over_vector": 20_000,
        "peers_bytes_up": {"a peer": 100},
    }
    server = {name: client[name] for name in ("sizes", "ratio_to_floor")} | {
        "case": "made up/server",
        "ratio_to_peer": {"a peer": {"median": 40.0}},
    }
    assert not secagg.missed([client, server])
    assert len(secagg.missed([client | {"bytes_up": 51}])) == 1
    assert len(secagg.missed([client | {"bytes_over_vector": 20_001}])) == 1
    for line, faster in ((client, 7.9), (server, 39.9)):
        assert secagg.missed([line | {"ratio_to_peer": {"a peer": {"median": faster}}}])
        slow = line | {"ratio_to_floor": {"a floor": {"median": 1.31}}}
        assert secagg.missed([slow])
        assert not secagg.missed([slow | {"sizes": {"to_the_floor": False}}])


def test_slow_pages_are_reported(load: Any) -> None:
    pages = load("speed.pages")
    visits = [{"page": "ledger", "answer": 0.1, "load": 0.2}] * 99
    slow = [{"page": "ledger", "answer": 0.1, "load": 0.4}] * 10
    line = {"case": "made up", "client": pages.summary([]), "browser": pages.summary(visits)}
    assert line["browser"]["answer"]["ledger"] == {
        "p50": 0.1,
        "p95": 0.1,
        "most": 0.1,
        "times": 99,
    }
    assert not pages.missed([line])
    assert pages.missed([line | {"browser": pages.summary(visits + slow)}]) == [
        "pages/made up: browser, load: 400 ms, not 300"
    ]


def test_requirements_missed_by_simulated_clients_are_reported(load: Any) -> None:
    clients = load("speed.clients")
    fast = {"pfl": {"median": 3.0}, "Flower": {"median": 20.0}, "loop": {"median": 0.9}}
    one = {"case": "made up", "sizes": {"steps": 1}, "ratio_to_peer": fast}
    sketching = {"case": "sketching", "ratio_to_floor": {"without": {"median": 1.05}}}
    assert not clients.missed([one, sketching])
    for peer, median in (("pfl", 2.9), ("Flower", 19.9)):
        slow = one | {"ratio_to_peer": fast | {peer: {"median": median}}}
        assert len(clients.missed([slow])) == 1
        assert not clients.missed([slow | {"sizes": {"steps": 5}}])
    assert clients.missed([sketching | {"ratio_to_floor": {"without": {"median": 1.051}}}])


def test_missing_data_has_no_cases(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refined = load("accuracy.refined")
    monkeypatch.setattr(refined, "ROOT", tmp_path / "repository")
    assert {case.data for case in refined.cases()} == set(refined.LAWS)


def test_every_user_gives_one_of_their_words_in_one_round(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forty users with two words each, in ten rounds of four."""
    refined = load("accuracy.refined")
    folder = tmp_path / "shared" / "data"
    folder.mkdir(parents=True)
    users = np.repeat(np.arange(40), 2)
    words = [f"{word} of {user}" for user in range(40) for word in ("one", "other")]
    made_up = pa.table({"user": users, "word": words, "count": np.ones(80, dtype=np.int64)})
    pa.parquet.write_table(made_up, folder / refined.FILES["sentiment-140"])
    monkeypatch.setattr(refined, "ROOT", tmp_path / "repository")
    counts = refined.sentiment_counts(np.random.default_rng(1))
    assert counts.sum(axis=1).tolist() == [4] * 10
    assert counts.sum(axis=0).reshape(40, 2).sum(axis=1).tolist() == [1] * 40


@pytest.mark.parametrize(
    ("changes", "complaints"),
    [
        ({}, 0),
        ({"measured": [0.61, 0.95]}, 1),
        ({"measured": [0.39, 0.84]}, 2),
        ({"false_runs": 9}, 0),
        ({"false_runs": 15}, 1),
    ],
)
def test_words_that_are_not_listed_as_predicted_are_reported(
    load: Any, changes: dict[str, Any], complaints: int
) -> None:
    right = {
        "case": "500/8/spread", "counts": [34, 53], "predicted": [0.5, 0.95],
        "measured": [0.45, 0.9], "false_runs": 5, "repetitions": 100,
    }  # fmt: skip
    assert len(load("accuracy.words").missed([right | changes])) == complaints


def test_the_tables_of_the_plan_for_scale_are_those_of_its_inputs(load: Any) -> None:
    scale = load("scale")
    text = scale.PAGE.read_text(encoding="utf-8")
    assert text == scale.report(), "run python -m benchmarks.scale"


def test_the_plan_for_scale_is_right_for_round_numbers(load: Any) -> None:
    """Worked out by hand: a thousand devices per second, of which a store accepts 250 at a peak of
    twice the mean when half of it is used."""
    scale = load("scale")
    measured = scale.Measured(
        cores=2,
        reports_per_second=1_000.0,
        upload_bytes=100,
        seal_seconds=0.001,
        id_bytes=100.0,
        record_bytes=10,
        fold_seconds=1e-6,
        rounds_per_second=0.5,
        table_bytes=900,
    )
    assumptions = scale.Assumptions(
        devices=86_400_000,
        overhead_bytes=100,
        connection_seconds=10.0,
        round_seconds=100.0,
        memory_bytes=10**10,
        core_hour=0.5,
        disk_gb_month=3.0,
        lake_gb_month=30.0,
        proxy_gb=0.1,
    )
    limits = scale.bounds(measured, assumptions, 2.0)
    assert limits == scale.Bounds(
        accepting=21_600_000.0, sealing=43_200_000.0, ids=100_000_000.0, rounds=10_800_000.0
    )
    plan = scale.local(measured, assumptions, 2.0)
    assert (plan.stores, plan.mean_per_second, plan.peak_per_second) == (4, 1_000.0, 2_000.0)
    assert (plan.connections, plan.network_bytes) == (20_000.0, 17.28e9)
    assert (plan.database_bytes, plan.lake_bytes) == (8.64e9, 864e6)
    assert plan.release_seconds == pytest.approx(43.2)
    assert plan.dollars == pytest.approx(
        {"machines": 96.0, "traffic": 1.728, "disks": 0.864, "lake": 0.864}
    )
    masked = scale.secure(measured, assumptions, 2.0)
    assert (masked.stores, masked.connections, masked.network_bytes) == (8, 200_000.0, 86.4e9)
    assert masked.release_seconds == 2.0


def test_arrivals_bunch_when_devices_are_online_together(load: Any) -> None:
    """Always online: uniform, with a peak of 1 but for chance. 96 binomial counts of 10,417 on
    average exceed it by 5.6% with a probability of 1e-6 (5.7 standard deviations)."""
    scale = load("scale")
    peaks = {name: scale.peak_over_mean(scale.arrivals(name)) for name in scale.PATTERNS}
    assert 1 <= peaks["always"] < 1.056
    assert max(peaks, key=peaks.__getitem__) == scale.WORST
    assert scale.peak_over_mean(np.full(100, 12.1)) == scale.BINS  # all in one quarter of an hour
    begin, hours, _ = scale.PATTERNS[scale.WORST]
    # Whoever draws an hour offline sends when its night begins: two thirds of all devices.
    hours_of_day = scale.arrivals(scale.WORST)
    assert ((hours_of_day - begin + 6) % 24 < 12).mean() > 1 - hours / 24


def test_an_exponent_is_fitted_with_its_interval(load: Any) -> None:
    growth = load("speed.growth")
    exact = growth.fit([10, 100, 1_000], [3 * size**1.5 for size in (10, 100, 1_000)])
    assert exact["exponent"] == pytest.approx(1.5)
    assert exact["interval"] == pytest.approx([1.5, 1.5])
    low, high = growth.fit([1, 10, 100, 1_000], [1, 12, 90, 1_100])["interval"]
    assert low < 1 < high
    point = {"size": 10, "median": 1.0, "bytes": 1 << 20}
    lines = [
        {"case": "a", "exponent": exact, "expected": expected, "memory": "constant",
         "unit": "seconds", "points": [point]}
        for expected in ("1", "2 at most")
    ]  # fmt: skip
    assert len(growth.missed(lines)) == 1
    assert "1.50 (1.50 to 1.50)" in growth.table(lines)


def test_the_page_of_results_has_peers_floors_and_misses(load: Any, tmp_path: Path) -> None:
    result = {
        "name": "fold",
        "case": "hashed/local",
        "machine": {"cpu": "a processor", "cores": 2},
        "median": 1.0,
        "ratio_to_peer": {"a peer": {"median": 0.5, "interval": [0.4, 0.6]}},
        "ratio_to_floor": {"a floor": {"median": 3.0, "interval": [2.0, 4.0]}},
    }
    (tmp_path / "fold.jsonl").write_text(json.dumps(result), encoding="utf-8")
    page = load("page").page(tmp_path)
    assert "a peer 0.5 (0.4 to 0.6)" in page
    assert "a floor 3 (2 to 4)" in page
    assert "- fold/hashed/local: takes 3.00 times as long as the kernel" in page
    assert page.count("No result is kept") == len(NAMES) - 1

"""Every question and trust, answered by real devices through a real collector."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from conformance.test_questions import MEDIAN, case
from marks import quick
from questioning import CASES, EXAMPLES, MASKED, NAME, Case, check_collection
from serving import settings, wait_for
from sfumato import simulate
from sfumato.collector import studies
from sfumato.collector.serve import running
from sfumato.flow.release import CountRelease, MeanRelease
from sfumato.privacy import SystemRng
from sfumato.simulation.network_fleet import NetworkFleet

__all__ = ["case"]  # a fixture


@pytest.mark.parametrize(
    "case", quick([*CASES, MEDIAN], *EXAMPLES.values(), MEDIAN), ids=str, indirect=True
)
def test_devices_answer_it_and_a_collector_releases_it(case: Case, tmp_path: Path) -> None:
    check_collection(case, tmp_path)


@pytest.mark.parametrize(
    "keys",
    quick(
        [
            {"question": "histogram", "algorithm": "threshold_sampling"},
            {"question": "heavy_hitters", "algorithm": "threshold_sampling"},
            {"question": "heavy_hitters", "algorithm": "invertible_sketch"},
            {"question": "heavy_hitters", "algorithm": "sparse"},
        ],
        {"question": "histogram", "algorithm": "threshold_sampling"},
        {"question": "heavy_hitters", "algorithm": "sparse"},
    ),
    ids=lambda keys: "-".join(keys.values()),
)
@pytest.mark.parametrize("masked", quick([False, True], False))
def test_copies_that_devices_send_over_http_all_count(
    keys: dict[str, str], masked: bool, tmp_path: Path
) -> None:
    """Without noise, and without coins: five devices with three oaks, and five with an elm."""
    if masked and keys["algorithm"] == "sparse":
        pytest.skip("sparse reports are not masked")
    study: dict[str, Any] = {"trust": "central", "epsilon": None, "threshold": 4, "devices": 10}
    study |= {"count": "copies", "items_per_device": 3, "word_length": 4, **keys}
    if keys["algorithm"] == "threshold_sampling":
        study |= {"sampling_threshold": 1.0}
    if masked:
        study |= {"masked": True, "dropout": 0.0, "corrupt": 0.05}
    request = {"name": NAME, "purpose": "A test.", "study": study, "delay_seconds": 1}
    with running(settings(tmp_path)) as collector:
        row = studies.create(
            collector.store, request, key=collector.key, rng=SystemRng(), now=time.time
        )
        key, values = bytes.fromhex(collector.public_key), [["oak"] * 3, ["elm"]] * 5
        with NetworkFleet(collector.address, key, values, connections=4) as fleet:
            fleet.ask(NAME)
        over = ("released", "failed")
        wait_for(lambda: studies.state(collector.store, row.id)["state"] in over, "the release")
        with collector.store.reading() as tx:
            text = tx.release(row.id)
    assert text is not None, studies.state(collector.store, row.id)["problem"]
    release = CountRelease.from_dict(json.loads(text))
    counts = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
    assert counts == {"oak": 15.0, "elm": 5.0}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"clip": 1.0}, {}], ids=["clip", "norms"])
def test_cohorts_of_a_masked_mean_are_asked_one_after_another(
    keys: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices stay in their cohorts; otherwise there would not be enough for the second one."""
    monkeypatch.setattr("sfumato.study.LARGEST_COHORT", 30)
    case = Case(
        question="mean", trust="secure", keys={"dimensions": 8, "epsilon": 20.0, **MASKED, **keys}
    )
    assert case.plan().predicted["rounds"] == 2 * (2 - len(keys))
    check_collection(case, tmp_path)


@pytest.mark.parametrize("trust", quick(["central", "secure"], "central"))
def test_a_collector_and_a_simulation_choose_the_same_clip_and_mean(
    trust: str, tmp_path: Path
) -> None:
    """Without noise, of vectors that are whole numbers of 2**-16 clips."""
    vectors = np.random.default_rng(SEED).integers(-9_000, 9_001, (40, 4)) / 1_024.0
    vectors[0] = [16.0, 0, 0, 0]
    study: dict[str, Any] = {"question": "mean", "trust": trust, "epsilon": None, "devices": 40}
    study |= {"dimensions": 4, "dropout": 0.0}
    request = {"name": NAME, "purpose": "A test.", "study": study, "delay_seconds": 1}
    with running(settings(tmp_path)) as collector:
        row = studies.create(
            collector.store, request, key=collector.key, rng=SystemRng(), now=time.time
        )
        key = bytes.fromhex(collector.public_key)
        with NetworkFleet(collector.address, key, list(vectors), connections=4) as fleet:
            fleet.ask(NAME)
        wait_for(
            lambda: studies.state(collector.store, row.id)["state"] == "released", "the release"
        )
        with collector.store.reading() as tx:
            text = tx.release(row.id)
    assert text is not None
    release = MeanRelease.from_dict(json.loads(text))
    simulated = simulate(study, vectors, seed=1)
    assert release.plan["parameters"]["clip"] == simulated.plan["parameters"]["clip"] == 16.0
    assert np.array_equal(release.mean, simulated.mean)
    assert release.cost.bytes_per_device == simulated.cost.bytes_per_device

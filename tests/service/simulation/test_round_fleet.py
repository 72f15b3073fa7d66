"""Fleets in masked rounds, and fleets that are asked again, over real HTTP."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from checks import SEED
from serving import settings, wait_for
from sfumato.cli.main import main
from sfumato.collector import studies, tokens
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.store.store import StudyRow
from sfumato.device import RoundOutcome
from sfumato.errors import SpecError
from sfumato.flow.release import CountRelease, MeanRelease
from sfumato.privacy import SystemRng
from sfumato.simulation.network_fleet import (
    DROPPED_OUT,
    NetworkFleet,
    draw_dropout_phase,
    sessions_of_first_task,
)

NAME = "Street trees"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next task of these collectors is offered within a second."""
    monkeypatch.setattr("sfumato.simulation.network_fleet.ROUND_SECONDS", 1.5)


def create(collector: CollectorServer, items: list[str] | None = None, **keys: Any) -> StudyRow:
    request = {
        "name": NAME,
        "purpose": "Which trees to plant next.",
        "study": {"epsilon": None, **keys},
        "items": items,
        "delay_seconds": 1,
    }
    return studies.create(
        collector.store, request, key=collector.key, rng=SystemRng(), now=time.time
    )


def released(collector: CollectorServer, study: StudyRow) -> dict[str, Any]:
    over = ("released", "failed")
    wait_for(lambda: studies.state(collector.store, study.id)["state"] in over, "the release")
    with collector.store.reading() as tx:
        text = tx.release(study.id)
    assert text is not None, studies.state(collector.store, study.id)["problem"]
    return json.loads(text)  # type: ignore[no-any-return]  # an object


@pytest.mark.slow
def test_a_fleet_answers_masked_rounds_over_a_bad_network(tmp_path: Path) -> None:
    """Two cohorts of twelve, with repeated messages and lost answers."""
    items = [f"tree {k}" for k in range(24)]
    stages = set[str]()
    with running(settings(tmp_path)) as collector:
        study = create(
            collector,
            items,
            question="frequencies",
            trust="secure",
            devices=24,
            rounds=2,
            dropout=0.0,
            corrupt=0.05,
        )
        with NetworkFleet(
            collector.address,
            bytes.fromhex(collector.public_key),
            [[item] for item in items],
            drop=0.1,
            connections=4,
            seed=SEED,
        ) as fleet:
            summary = fleet.ask(NAME, progress=lambda stage, share: stages.add(stage))
        release = CountRelease.from_dict(released(collector, study))
    assert summary.sent == summary.outcomes[RoundOutcome.DONE] == 24
    assert summary.repeated > 0
    assert summary.lost > 0
    assert release.counts.tolist() == [1.0] * 24
    assert stages >= {"joining round 1", "round 1", "joining round 2", "round 2"}


@pytest.mark.slow
def test_some_of_a_fleet_vanish_in_the_phases_that_they_are_told_to(tmp_path: Path) -> None:
    items = [f"tree {k}" for k in range(30)]
    with running(settings(tmp_path, phase_seconds=2.0)) as collector:
        study = create(
            collector,
            items,
            question="frequencies",
            trust="secure",
            devices=30,
            dropout=0.3,
            corrupt=0.05,
        )
        data = tmp_path / "trees.csv"
        data.write_text("item\n" + "\n".join(items) + "\n")
        options = ("--server", collector.address, "--key", collector.public_key, "--seed", "5")
        done = CliRunner().invoke(
            main,
            [
                "fleet",
                *options,
                "--study",
                NAME,
                "--data",
                str(data),
                "--leave",
                "mask=0.1",
                "--json",
            ],
        )
        assert done.exit_code == 0, done.output
        summary = json.loads(done.stdout)
        release = CountRelease.from_dict(released(collector, study))
    assert "waits for them until its phase_seconds are over" in done.stderr
    left = summary["outcomes"][DROPPED_OUT]
    assert left > 0
    assert release.counts.sum() == 30 - left


def test_devices_are_asked_for_their_vectors_twice(tmp_path: Path) -> None:
    """The mean of equal vectors; its coordinates err by less than six standard errors."""
    vectors = np.zeros((100, 2_000))
    vectors[:, 3] = 0.9
    np.save(tmp_path / "vectors.npy", vectors)
    with running(settings(tmp_path)) as collector:
        study = create(
            collector,
            question="mean",
            trust="central",
            epsilon=2.0,
            delta=1e-5,
            devices=100,
            dimensions=2_000,
            compression="adapt_norm",
            clip=1.0,
        )
        options = ("--server", collector.address, "--key", collector.public_key)
        done = CliRunner().invoke(
            main,
            ["fleet", *options, "--study", NAME, "--data", str(tmp_path / "vectors.npy"), "--json"],
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["sent"] == 200
        release = MeanRelease.from_dict(released(collector, study))
        token = tokens.create(collector.store, role="analyst", name="me", days=1)[1]
        output = CliRunner(env={"SFUMATO_TOKEN": token}).invoke(
            main, ["release", "show", NAME, "--server", collector.address]
        )
    assert "2,000 coordinates, 100 devices" in output.stdout
    assert release.cost.devices == 100
    assert abs(release.mean[3] - 0.9) < 6 * release.standard_error


def test_one_device_takes_part_from_the_command_line(tmp_path: Path) -> None:
    with running(settings(tmp_path)) as collector:
        study = create(
            collector,
            ["oak", "elm"],
            question="frequencies",
            trust="secure",
            devices=5,
            dropout=0.0,
            corrupt=0.0,
        )
        home = ("--home", str(tmp_path / "phone"))
        first = ("--server", collector.address, "--key", collector.public_key)
        runner = CliRunner()
        assert runner.invoke(main, ["device", "offers", *home, *first]).exit_code == 0
        assert runner.invoke(main, ["device", "consent", NAME, *home, "--yes"]).exit_code == 0
        key = bytes.fromhex(collector.public_key)
        with NetworkFleet(collector.address, key, [["elm"]] * 4, connections=2) as fleet:
            others = Thread(target=fleet.ask, args=(NAME,))
            others.start()
            done = runner.invoke(main, ["device", "join", NAME, *home, "--json"], input="oak\n")
            others.join()
        release = CountRelease.from_dict(released(collector, study))
        token = tokens.create(collector.store, role="analyst", name="me", days=1)[1]
        output = CliRunner(env={"SFUMATO_TOKEN": token}).invoke(
            main, ["study", "show", NAME, "--server", collector.address]
        )
    assert "done; round 1: done" in output.stdout
    assert "devices waiting" not in output.stdout
    assert json.loads(done.stdout)["outcome"] == "done", done.output
    counts = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
    assert counts == {"elm": 4.0, "oak": 1.0}


def test_a_device_drops_out_in_an_existing_phase() -> None:
    chance = np.random.default_rng(SEED)
    assert draw_dropout_phase({}, chance) is None
    assert draw_dropout_phase({"mask": 1.0, "unmask": 1.0}, chance) == "mask"
    with pytest.raises(SpecError, match="must be one of"):
        draw_dropout_phase({"masks": 0.5}, chance)


def test_devices_that_were_offered_another_task_go_on_after_the_others() -> None:
    """Together they would wait for a cohort without the devices whose task is over."""

    def at(task_id: str) -> Any:
        part = SimpleNamespace(offer=SimpleNamespace(task=SimpleNamespace(id=task_id)))
        return SimpleNamespace(part=part)

    order: list[str] = []
    mixed = {0: at("first"), 1: at("second"), 2: at("first")}
    assert sessions_of_first_task(mixed, "first", order).keys() == {0, 2}
    later = {0: at("third"), 1: at("second"), 2: at("third")}  # the waiting device comes first
    assert sessions_of_first_task(later, "third", order).keys() == {1}
    assert sessions_of_first_task({0: at("third"), 2: at("third")}, "third", order).keys() == {0, 2}
    assert sessions_of_first_task({}, "third", order) == {}

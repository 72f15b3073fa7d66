"""The checks of the conformance suite for every question and trust."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import SEED
from serving import settings, wait_for
from sfumato.collector import studies
from sfumato.collector.serve import running
from sfumato.dashboard.charts import estimates
from sfumato.errors import BudgetError
from sfumato.flow.release import CountRelease, EstimateRelease, Release
from sfumato.flow.report import report_bytes
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger, Rng, SeededRng, SystemRng
from sfumato.questions.registry import read_release
from sfumato.simulation.network_fleet import NetworkFleet
from sfumato.simulation.simulate import simulate
from sfumato.spec import from_json, to_json
from sfumato.study import QUESTIONS

DEVICES = 60
NAME = "A question"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A study with its devices, each with one item or one vector."""

    question: str
    trust: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[str] | None = None  # the study's dictionary
    cycle: Sequence[str] = ("oak", "oak", "oak", "elm")  # items of the devices, repeated
    devices: int = DEVICES

    def __str__(self) -> str:
        names = ("rounds", "masked", "algorithm", "clip")
        more = "".join(f"-{key}" for key in self.keys if key in names)
        return f"{self.question}-{self.trust}{more}"

    @property
    def study(self) -> dict[str, Any]:
        common = {"epsilon": 8.0, "delta": 1e-3, "devices": self.devices}
        return {"question": self.question, "trust": self.trust, **common, **self.keys}

    @property
    def values(self) -> list[Any]:
        if self.has_vectors:
            return list(np.random.default_rng(SEED).normal(size=(self.devices, 8)) / 8)
        return [self.cycle[place % len(self.cycle)] for place in range(self.devices)]

    @property
    def has_vectors(self) -> bool:
        return self.question in QUESTIONS and QUESTIONS[self.question].data == "vectors"

    def plan(self) -> Plan:
        return plan(self.study, items=self.items)

    def simulate(self, **options: Any) -> Release:
        data: Any = np.array(self.values) if self.has_vectors else self.values
        release: Release = simulate(self.plan(), data, **options)
        return release


LISTED = ("oak", "elm", "fir")
WORDS = {"alphabet": "aefhiklmorsx", "word_length": 3}
TABLES = {"algorithm": "invertible_sketch"}
MASKED = {"dropout": 0.05, "corrupt": 0.05}
CASES = [
    Case(question="frequencies", trust="central", items=LISTED),
    Case(question="frequencies", trust="central", items=LISTED, keys={"rounds": 2}),
    Case(question="frequencies", trust="central", items=LISTED, keys={"algorithm": "count_sketch"}),
    Case(question="frequencies", trust="secure", items=LISTED, keys=MASKED),
    Case(question="frequencies", trust="local", items=LISTED),
    Case(question="new_words", trust="local", keys=WORDS, devices=600),
    Case(question="heavy_hitters", trust="central"),
    Case(question="heavy_hitters", trust="central", keys={"alphabet": "aeklmo"}),
    Case(question="heavy_hitters", trust="central", keys={"bytes_per_device": 20_000, **TABLES}),
    Case(
        question="heavy_hitters",
        trust="central",
        keys={"bytes_per_device": 20_000, "masked": True, **MASKED},
    ),
    Case(question="heavy_hitters", trust="central", keys={"count": "copies"}),
    Case(question="heavy_hitters", trust="secure", keys=WORDS | MASKED),
    Case(question="histogram", trust="central"),
    Case(question="histogram", trust="central", keys={"bytes_per_device": 60_000, **TABLES}),
    Case(question="mean", trust="central", keys={"clip": 1.0, "dimensions": 8}),
    Case(question="mean", trust="secure", keys={"clip": 1.0, "dimensions": 8, **MASKED}),
    Case(question="mean", trust="central", keys={"dimensions": 8}),
    Case(question="mean", trust="secure", keys={"dimensions": 8, **MASKED}),
]
TRAINED = [  # by `train`: tests/unit/simulation
    Case(
        question="train",
        trust=trust,
        keys={
            "clip": 1.0,
            "rounds": 3,
            "training": {"model": "softmax", "inputs": 4, "classes": 2, "cohort": 60},
        },
        devices=200,
    )
    for trust in ("secure", "central")
]
EXAMPLES = {(case.question, case.trust): case for case in reversed([*CASES, *TRAINED])}
"""The first case of every question and trust."""


def plain(release: Release) -> dict[str, Any]:
    """A release without its running time."""
    data = release.to_dict()
    data["cost"].pop("seconds")
    return data


def check_plan(case: Case) -> None:
    """A plan is complete, its design survives JSON, and with_seed depends on the seed."""
    planned = case.plan()
    assert planned.algorithm
    assert {"rounds", "bytes_per_device", "assumes"} <= planned.predicted.keys()
    assert planned.privacy.epsilon is not None
    assert planned.privacy.epsilon <= 8.0 * (1 + 1e-9)
    json.dumps(planned.to_dict(), allow_nan=False)
    design = planned.design
    assert from_json(to_json(design)) == design
    seeds = [design.with_seed(SeededRng(seed)) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1]
    assert seeds[0].seed != seeds[2].seed
    assert bool(seeds[0].secret) == design.has_secret
    assert sum(design.cohorts().values()) <= 1 + 1e-9
    influence = planned.influence
    assert planned.privacy.influence == seeds[0].question.influence == influence
    assert f"Not covered: {influence}" in planned.privacy.lines
    assert influence.note if influence.most is None else influence.most > 0
    if planned.study.is_masked:
        assert influence.most is None


def check_simulation(case: Case) -> None:
    """The same seed gives the same release, and it survives JSON."""
    first, again = (case.simulate(seed=1) for _ in range(2))
    assert plain(first) == plain(again)
    back = read_release(json.loads(first.to_json()))
    assert type(back) is type(first)
    assert back.to_dict() == first.to_dict()
    assert f"Not covered: {first.privacy.influence}" in first.privacy.lines
    assert first.study == case.plan().study.to_dict()
    assert first.cost.devices == case.devices
    for ending in first.endings:
        assert first.export(ending)


def check_losses(case: Case) -> None:
    """A ledger whose budget is the guarantee covers the whole campaign once, and not twice."""
    planned = case.plan()
    epsilon = planned.privacy.epsilon
    assert epsilon is not None
    ledger = Ledger(Budget(epsilon=epsilon, delta=planned.study.delta))
    case.simulate(ledger=ledger)
    assert ledger.entries()
    assert 0.5 * epsilon < ledger.spent() <= epsilon * (1 + 1e-6)
    with pytest.raises(BudgetError):
        case.simulate(ledger=ledger)


def check_traffic(case: Case) -> None:
    """A plan predicts the bytes of its tasks' reports, or of its masked rounds."""
    planned = case.plan()
    seeded = planned.design.with_seed(SeededRng(1))
    campaign = seeded.question.campaign(planned, secret=seeded.secret)
    task, predicted = campaign.next_task(), planned.predicted
    if task.is_masked:
        release = case.simulate(seed=1, protocol=True)
        assert predicted["bytes_per_device"] > 0
        assert predicted["bytes_down"] > 0
        assert any("completed the masked round" in note for note in release.notes)
        return
    per_device = seeded.question.tasks_per_device
    assert report_bytes(task) <= predicted["bytes_per_device"]
    if per_device == 1:
        assert predicted["bytes_per_device"] == report_bytes(task)


def check_collection(case: Case, folder: Path) -> None:
    """Real devices answer a real collector; its release has the same kind as the simulation's, and
    the dashboard can show it."""
    request = {
        "name": NAME,
        "purpose": "To test the question.",
        "study": case.study,
        "items": None if case.items is None else list(case.items),
        "delay_seconds": 1,
    }
    rng: Rng = SystemRng()
    with running(settings(folder)) as collector:
        row = studies.create(collector.store, request, key=collector.key, rng=rng, now=time.time)
        with NetworkFleet(
            collector.address,
            bytes.fromhex(collector.public_key),
            [value if case.has_vectors else [value] for value in case.values],
            connections=4,
        ) as fleet:
            fleet.ask(NAME)
        studies.close(collector.store, row.id)
        over = ("released", "failed")
        wait_for(lambda: studies.state(collector.store, row.id)["state"] in over, "the release")
        with collector.store.reading() as tx:
            text = tx.release(row.id)
        assert text is not None, studies.state(collector.store, row.id)["problem"]
    release, simulated = read_release(json.loads(text)), case.simulate()
    assert type(release) is type(simulated)
    assert release.cost.devices == case.devices
    assert release.cost.rounds >= 1
    assert release.privacy.epsilon == simulated.privacy.epsilon
    if isinstance(release, EstimateRelease) and isinstance(simulated, EstimateRelease):
        assert release.frame().schema == simulated.frame().schema
        assert release.frame().to_pylist()[0].keys() == simulated.frame().to_pylist()[0].keys()
        assert estimates(release.frame().to_pylist())
    if isinstance(release, CountRelease):
        assert release.items[0].as_py() == "oak"  # held by three devices of four
    assert replace(release, notes=()).to_dict().keys() >= simulated.to_dict().keys()

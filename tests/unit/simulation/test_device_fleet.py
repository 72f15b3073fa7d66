"""Devices that answer by themselves: the same sums as real devices with the same randomness."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from marks import quick
from sfumato import simulate
from sfumato.collector import studies
from sfumato.collector.store.store import Store
from sfumato.device.private import table, table_report
from sfumato.engines import LocalEngine
from sfumato.errors import DataError
from sfumato.flow.accumulator import Batch, RecordBatch, accumulator
from sfumato.flow.aggregation import Sparse
from sfumato.flow.task import Task
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger, PlannedLoss, SeededRng
from sfumato.questions.question import Seeded
from sfumato.simulation.fleet import DeviceFleet
from sfumato.simulation.population import Cohorts, Population
from sfumato.spec import from_json

I64 = npt.NDArray[np.int64]

TREES = ["oak", "elm", "ash", "fir"]
DATA = {
    "item": [TREES[k % 4] for k in range(180)] + [TREES[k % 3] for k in range(180)],
    "device": [f"d{k % 60}" for k in range(360)],
}
KEY = bytes(range(32))
ITEMS = {"trust": "central", "word_length": 3, "items_per_device": 2, "bytes_per_device": 3_000}
LISTS = {**ITEMS, "algorithm": "invertible_sketch"}
STUDIES: dict[str, dict[str, Any]] = {
    "frequencies, central": {"question": "frequencies", "trust": "central", "rounds": 2},
    "frequencies, secure": {"question": "frequencies", "trust": "secure", "items_per_device": 2},
    "frequencies, tables": {
        "question": "frequencies",
        "trust": "central",
        "algorithm": "one_hot",
    },
    "items": {"question": "heavy_hitters", "rounds": 3, **ITEMS},
    "lists": {"question": "heavy_hitters", "rounds": 3, **LISTS},
    "histogram": {"question": "histogram", "rounds": 2, **LISTS},
    "prefixes": {
        "question": "heavy_hitters",
        "trust": "secure",
        "alphabet": "aefhiklmorsx",
        "word_length": 3,
    },
}


def planned(name: str, **keys: Any) -> Plan:
    study = {"epsilon": math.inf, "devices": 60, **STUDIES[name], **keys}
    if study["trust"] == "secure" or study.get("masked"):
        study["corrupt"] = 0.05
    return plan(study, items=TREES if study["question"] == "frequencies" else None)


def started(study_plan: Plan, seed: int) -> Seeded:
    """The design with its seed and secret."""
    return study_plan.design.with_seed(SeededRng(seed))


def devices_of(study_plan: Plan, seed: int | None) -> tuple[DeviceFleet, list[Task]]:
    """A fleet, and all tasks of the design."""
    seeded = started(study_plan, seed or 0)
    design: Any = seeded.question
    population = Population.load(DATA, device_column="device")
    fleet = DeviceFleet(
        population,
        Cohorts.of(study_plan.study, design, seeded.seed, population.devices, exact=True),
        design,
        study_plan.dictionary,
        SeededRng(1),
        LocalEngine(),
        lambda stage, share: None,
        seed=seed,
        ledger=Ledger(Budget(epsilon=None, delta=1e-6)),
    )
    parts = [design.names, design.counts] if study_plan.study.question == "histogram" else [design]
    tasks = [task for part in parts for task in part.tasks()]
    return fleet, tasks


def by_hand(fleet: DeviceFleet, task: Task, seed: int) -> I64:
    """The sum of the tables of real devices of the cohort, by their numbers."""
    holdings: list[list[str]] = [[] for _ in range(60)]
    for item, name in zip(DATA["item"], DATA["device"], strict=True):
        holdings[int(name[1:])].append(item)
    keys = fleet.question.item_keys(task)
    places = {item: place for place, item in enumerate(TREES)}
    members = fleet.cohorts.numbers(fleet.population, task.cohort).tolist()
    if isinstance(task.aggregation, Sparse):
        together = accumulator(task)
        make = [table_report(task, keys, holdings[number], places) for number in members]
        together.add(
            [
                sealed(SeededRng(seed, number)).message
                for sealed, number in zip(make, members, strict=True)
            ]
        )
        batch = together.batch(len(members))
        assert isinstance(batch, Batch)
        return np.asarray(batch.total)
    tables = [
        table(task, keys, holdings[number], places)(SeededRng(seed, number)) for number in members
    ]
    total: I64 = np.sum(tables, axis=0)
    return task.aggregation.open(total.reshape(task.sketch.shape))


def opened(task: Task, batch: Batch | RecordBatch) -> list[int]:
    assert isinstance(batch, Batch)
    values: list[int] = np.asarray(task.aggregation.open(batch.total)).reshape(-1).tolist()
    return values


@pytest.mark.parametrize(
    ("name", "epsilon"),
    [(name, math.inf) for name in STUDIES]
    + [(name, 8.0) for name in STUDIES if name != "histogram"],  # a histogram takes far more bytes
)
def test_each_device_sends_what_its_agent_would(name: str, epsilon: float) -> None:
    study_plan = planned(name, epsilon=epsilon, delta=1e-2, bytes_per_device=20_000)
    fleet, tasks = devices_of(study_plan, seed=7)
    for task in tasks:
        batch = fleet.gather(task)
        assert batch.task_id == task.id
        assert opened(task, batch) == by_hand(fleet, task, 7).reshape(-1).tolist()
    assert fleet.devices == 60


def test_another_seed_gives_other_tables() -> None:
    study_plan = planned("lists")
    design: Any = study_plan.design
    often = replace(
        design, mechanism=replace(design.mechanism, rate=0.5)
    )  # so that sampling matters
    study_plan = replace(study_plan, design=often)
    for seed, same in ((7, True), (8, False), (None, False)):
        fleet, tasks = devices_of(study_plan, seed)
        sums = opened(tasks[0], fleet.gather(tasks[0]))
        assert (sums == by_hand(fleet, tasks[0], 7).reshape(-1).tolist()) is same


@pytest.mark.parametrize("name", list(STUDIES))
def test_a_collector_and_a_simulation_draw_alike(name: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    study_plan = planned(name)
    study = study_plan.study.to_dict()
    items = TREES if study_plan.study.question == "frequencies" else None
    row = studies.create(
        store,
        {"name": "Trees", "purpose": "A test.", "study": study, "items": items},
        key=KEY,
        rng=SeededRng(5),
        now=lambda: 0.0,
    )
    seeded = started(study_plan, 5)
    assert from_json(row.design) == seeded.question
    with store.reading() as tx:
        assert (tx.secret(row.id) or b"") == seeded.secret
    assert bool(seeded.secret) == seeded.question.has_secret
    store.close()


def test_reports_to_a_trusted_collector_are_those_of_the_sum() -> None:
    """Without noise both are the truth."""
    study = STUDIES["frequencies, central"] | {"epsilon": math.inf, "items_per_device": 6}
    added, alone = (
        simulate(study, DATA, device_column="device", seed=1, protocol=protocol)
        for protocol in (False, True)
    )
    assert added.to_dict()["estimates"] == alone.to_dict()["estimates"]
    assert alone.cost.devices == 60
    assert alone.counts.sum() == 360


def test_a_mean_of_single_devices_is_the_mean() -> None:
    vectors = np.round(np.random.default_rng(1).normal(size=(40, 20)) * 2**10) / 2**12
    study = {"question": "mean", "trust": "central", "epsilon": math.inf, "clip": 10.0}
    alone = simulate(study, vectors, seed=1, protocol=True)
    assert np.abs(alone.mean - vectors.mean(axis=0)).max() < 1e-4


MASKED_PLANS: dict[str, tuple[dict[str, Any], Any]] = {
    "mean": (
        {"question": "mean", "trust": "secure", "epsilon": 8.0, "delta": 1e-3, "clip": 1.0}
        | {"compression": "adapt_norm"},
        np.full((80, 4_000), 0.01),
    ),
    "mean without a clip": (
        {"question": "mean", "trust": "secure", "epsilon": 8.0, "delta": 1e-3},
        np.full((80, 20), 500.0),
    ),
    "histogram": (
        {"question": "histogram", "trust": "central", "masked": True, "epsilon": 8.0}
        | {"delta": 1e-2, "bytes_per_device": 60_000, "devices": 60},
        ["oak"] * 40 + ["elm"] * 20,
    ),
}


@pytest.mark.parametrize("name", quick(MASKED_PLANS, "mean without a clip"))
def test_masked_rounds_of_several_tasks_fit_the_budget_they_were_planned_for(name: str) -> None:
    """They are charged as one plan, like tables that are added at once."""
    study, data = MASKED_PLANS[name]
    ledger = Ledger(Budget(epsilon=study["epsilon"], delta=study["delta"]))
    simulate(study, data, seed=1, protocol=True, ledger=ledger)
    assert len(ledger.entries()) == 2
    assert all(isinstance(entry.loss, PlannedLoss) for entry in ledger.entries())
    assert ledger.spent() <= study["epsilon"] * (1 + 1e-9)


def test_devices_that_share_a_row_answer_one_by_one() -> None:
    study = STUDIES["frequencies, central"] | {"epsilon": math.inf}
    data = {"item": ["oak", "elm"], "devices": [41, 19]}
    release = simulate(study, data, count_column="devices", seed=1, protocol=True)
    assert dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True)) == {
        "oak": 41.0,
        "elm": 19.0,
    }


def test_the_numbers_of_cohorts_are_all_devices_once() -> None:
    study_plan = planned("lists")
    whole = Population.load({"item": ["oak", "elm"], "devices": [41, 19]}, count_column="devices")
    cohorts = Cohorts.of(
        study_plan.study, started(study_plan, 1).question, 1, whole.devices, exact=True
    )
    with pytest.raises(DataError, match="call expanded"):
        cohorts.numbers(whole, "round 0")
    alone = whole.expanded()
    assert alone.expanded() is alone
    numbers = [cohorts.numbers(alone, cohort).tolist() for cohort in cohorts.shares]
    assert [len(part) for part in numbers] == [20, 20, 20]
    assert sorted(np.concatenate(numbers)) == list(range(60))

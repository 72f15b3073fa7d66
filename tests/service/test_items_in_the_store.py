"""Items that real devices send to a trusted collector: counted, listed above a threshold, and in no
place but those that the data flow names, until the study's data is deleted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from service.canaries import files, rows
from serving import settings, wait_for
from sfumato.collector import studies
from sfumato.collector.serve import running
from sfumato.flow.release import CountRelease
from sfumato.privacy import SystemRng
from sfumato.privacy.listing import noise_tail
from sfumato.questions.item_lists.design import ItemListDesign
from sfumato.questions.registry import read_release
from sfumato.simulation.network_fleet import NetworkFleet
from sfumato.spec import from_json

CANARY = "canary 3f9a17 of one device"
COMMON = {"oak": 50, "elm": 30}
STUDY: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "epsilon": 2.0,
    "delta": 1e-6,
    "devices": 81,
    "items_per_device": 2,
}


class Ended(NamedTuple):
    """A study after its release: everything that the collector shows or keeps of it."""

    release: CountRelease
    answers: dict[str, bytes]
    tables: dict[str, bytes]
    design: ItemListDesign
    charges: int
    file_before: bytes
    file_after: bytes


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder: Path = tmp_path_factory.mktemp("collector")
    request = {"name": "Trees", "purpose": "To plant.", "study": STUDY, "delay_seconds": 1}
    holdings = [["oak", "a tree too long " * 9]] * 50 + [["elm", "elm"]] * 30 + [[CANARY]]
    with running(settings(folder)) as collector:
        store = collector.store
        row = studies.create(store, request, key=collector.key, rng=SystemRng(), now=time.time)
        with NetworkFleet(
            collector.address, bytes.fromhex(collector.public_key), holdings, connections=4
        ) as fleet:
            fleet.ask("Trees")
        studies.close(store, row.id)
        wait_for(lambda: studies.state(store, row.id)["state"] == "released", "the release")
        with store.reading() as tx:
            text, charges = tx.release(row.id), tx.entries()
            envelopes = "".join(task.envelope for task in tx.tasks(row.id))
        assert text is not None
        release = read_release(json.loads(text))
        assert isinstance(release, CountRelease)
        answers = {
            "release": text,
            "state": json.dumps(studies.state(store, row.id)),
            "ledger": json.dumps(charges),
            "offers": envelopes,
            "plan": row.plan,
        }
        path = str(folder / "collector.db")
        tables = rows(path)
        design = from_json(row.design)
        file_before = files(folder, "collector.db")
        studies.delete(store, row.id)
    return Ended(
        release,
        {name: part.encode() for name, part in answers.items()},
        tables,
        design,
        len(charges),
        file_before,
        files(folder, "collector.db"),
    )


def test_items_of_many_devices_are_listed_with_noise(ended: Ended) -> None:
    """False alarm below 1e-6: the noise of each count would have to be 20 or more."""
    counts = dict(zip(ended.release.items.to_pylist(), ended.release.counts.tolist(), strict=True))
    mechanism = ended.design.mechanism
    assert mechanism.noise == "laplace"
    assert noise_tail("laplace", mechanism.scale, 20) < 1e-7
    assert counts.keys() == COMMON.keys()
    assert all(abs(counts[item] - COMMON[item]) < 20 for item in COMMON)
    assert ended.release.cost.devices == 81
    assert ended.charges == 1


def test_an_item_of_one_device_is_shown_nowhere(ended: Ended) -> None:
    """It is listed with a probability of at most delta, 1e-6."""
    for place, data in ended.answers.items():
        assert CANARY.encode() not in data, place
    assert b"oak" in ended.answers["release"]  # the control


def test_it_is_only_in_the_sums_that_the_data_flow_names(ended: Ended) -> None:
    places = {table for table, data in ended.tables.items() if CANARY.encode() in data}
    assert places == {"sealed", "answer"}
    assert not ended.tables["upload"]


def test_it_is_overwritten_when_the_data_is_deleted(ended: Ended) -> None:
    assert CANARY.encode() in ended.file_before
    assert CANARY.encode() not in ended.file_after

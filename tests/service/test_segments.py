"""Segments through a real collector: devices report pairs, and the dashboard shows them apart."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from browsing import open_stage
from marks import quick
from service.dashboard.visiting import Visitor, sign_in_as
from serving import wait_for
from sfumato.collector import studies
from sfumato.flow.release import CountRelease
from sfumato.flow.segments import pair
from sfumato.privacy import SystemRng
from sfumato.simulation.network_fleet import NetworkFleet

NAME = "Emoji by locale"
COUNTS = {("en", "joy"): 12, ("en", "heart"): 6, ("fr", "heart"): 9, ("fr", "kiss"): 3}
STUDIES: dict[str, dict[str, Any]] = {
    "central": {"trust": "central", "epsilon": None},
    "local": {"trust": "local", "epsilon": 20.0, "algorithm": "direct"},
    "secure": {"trust": "secure", "epsilon": None, "dropout": 0.0},
}


@pytest.mark.parametrize("trust", quick(STUDIES, "central"))
def test_a_collector_answers_each_segment(trust: str, tmp_path: Path) -> None:
    """Exactly: without noise, or where all 30 reports are true except with probability 1e-6."""
    values = [[pair(*place)] for place, count in COUNTS.items() for _ in range(count)]
    study = {"question": "frequencies", "devices": 30, "segments": ["en", "fr"], **STUDIES[trust]}
    request = {
        "name": NAME, "purpose": "A test.", "study": study, "items": ["joy", "heart", "kiss"],
        "delay_seconds": 1,
    }  # fmt: skip
    with open_stage(tmp_path) as stage:
        collector = stage.collector
        row = studies.create(
            collector.store, request, key=collector.key, rng=SystemRng(), now=time.time
        )
        assert studies.create(
            collector.store, request, key=collector.key, rng=SystemRng(), now=time.time
        ) == row  # fmt: skip
        (offer,) = stage.offers()
        assert offer.segments == ("en", "fr")
        key = bytes.fromhex(collector.public_key)
        with NetworkFleet(collector.address, key, values, connections=4) as fleet:
            fleet.ask(NAME)
        wait_for(lambda: stage.state(row.id) == "released", "the release")
        release = CountRelease.from_dict(stage.client.release(row.id))
        rows = release.frame().to_pylist()
        counts = {(each["segment"], each["item"]): round(each["count"]) for each in rows}
        assert {place: count for place, count in counts.items() if count} == COUNTS
        assert release.study["segments"] == ["en", "fr"]
        check_pages(sign_in_as(stage, "analyst"), row.id)


def check_pages(visitor: Visitor, study: str) -> None:
    """One chart for each segment, side by side; and a table with a column of segments."""
    page = visitor.get(f"/dashboard/studies/{study}").text
    assert page.count("data-chart=") == 2
    assert '<th scope="col">Segment</th>' in page
    assert page.index("<bdi>fr</bdi></td>") > page.index("<bdi>en</bdi></td>")
    french = visitor.get(f"/dashboard/studies/{study}/chart?segment=fr").json()
    assert [bar["label"] for bar in french["data"]["values"][:2]] == ["heart", "kiss"]
    for query in ("", "?segment=", "?segment=de"):
        answer = visitor.get(f"/dashboard/studies/{study}/chart{query}")
        assert answer.status_code == 404
    table = visitor.get(f"/dashboard/studies/{study}/release.csv").text.splitlines()
    assert table[0].startswith('"segment","item"')
    assert json.loads(visitor.get(f"/dashboard/studies/{study}/release.json").text)["estimates"]
    visitor.close()

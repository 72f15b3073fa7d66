"""Releases: the same from a simulation and from a service, and back from JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import sfumato
from checks import SEED
from sfumato.errors import ImpossibleError
from sfumato.flow.accumulator import TallyAccumulator
from sfumato.flow.release import CountRelease, NoisedSum
from sfumato.flow.task import LocalTask
from sfumato.planning import Plan
from sfumato.privacy import SeededRng
from sfumato.questions.answers import network_participation
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.question import Participation

LOCAL = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 100}
EXACT = {"question": "frequencies", "trust": "central", "epsilon": None, "devices": 100}
ITEMS = ["oak", "elm", "fir"]


def first_task(planned: Plan) -> LocalTask:
    assert isinstance(planned.design, LocalDesign)
    return planned.design.tasks()[0]


def test_a_release_comes_back_from_json() -> None:
    release = sfumato.simulate(LOCAL, ["oak"] * 70 + ["elm"] * 30, seed=SEED)
    back = CountRelease.from_dict(json.loads(release.to_json()))
    assert back.to_dict() == release.to_dict()
    assert back.items.equals(release.items)
    for name in set(CountRelease.columns.values()) - {"items"}:
        assert (getattr(back, name) == getattr(release, name)).all()


def test_a_release_of_an_older_version_is_readable() -> None:
    """These are the fields of the first versions; later ones have defaults."""
    data = json.loads(sfumato.simulate(LOCAL, ["oak"] * 70 + ["elm"] * 30, seed=SEED).to_json())
    promise = ("epsilon", "delta", "guarantee", "unit", "neighbours", "mechanism", "trust", "sees")
    columns = ("item", "count", "standard_error", "low", "high", "significant")
    first = {
        "study": data["study"],
        "plan": data["plan"],
        "privacy": {key: data["privacy"][key] for key in (*promise, "assumptions", "not_covered")},
        "cost": {key: data["cost"][key] for key in ("devices", "rounds", "bytes_per_device")}
        | {"seconds": 1.0},
        "notes": [],
        "estimates": [{column: row[column] for column in columns} for row in data["estimates"]],
    }
    assert CountRelease.from_dict(first).counts.size == 2, "give the field a default (release.py)"


def test_a_release_of_nothing_comes_back_too() -> None:
    release = sfumato.simulate({**EXACT, "threshold": 1e9}, ["oak"] * 100, seed=SEED)
    assert len(CountRelease.from_dict(json.loads(release.to_json()))) == 0


def test_counts_are_over_all_that_were_asked() -> None:
    """Half of the devices answered, so counts double, and so does their uncertainty."""
    planned = sfumato.plan(LOCAL, items=ITEMS)
    task = first_task(planned)
    tallies = TallyAccumulator(task)
    tallies.fold(task.values(np.zeros(50, dtype=np.int64)), rng=SeededRng(SEED))
    campaign = planned.design.campaign(planned)
    campaign.absorb(tallies.batch(50))
    all_of_them, half = (
        planned.design.answer(
            campaign, planned, Participation(devices=devices, respondents=50, rounds=1)
        )
        for devices in (50, 100)
    )
    assert isinstance(half, CountRelease)
    assert isinstance(all_of_them, CountRelease)
    assert (half.counts == 2 * all_of_them.counts).all()
    sampling = np.maximum(half.counts, 0)
    assert np.allclose(half.standard_error**2, 4 * all_of_them.standard_error**2 + sampling)


def test_nothing_comes_of_nothing() -> None:
    planned = sfumato.plan(LOCAL, items=ITEMS)
    campaign = planned.design.campaign(planned)
    campaign.absorb(TallyAccumulator(first_task(planned)).batch(0))
    with pytest.raises(ImpossibleError, match="no device answered"):
        planned.design.answer(campaign, planned, Participation(devices=0, respondents=0, rounds=0))


@pytest.mark.parametrize(
    ("study", "subject"),
    [
        (LOCAL, "counts cover the 90 reports received;"),
        ({**EXACT, "question": "histogram", "algorithm": "sparse"}, "counts cover the 90 reports"),
        (
            {**EXACT, "question": "histogram", "algorithm": "invertible_sketch"},
            "counts cover the 90 devices that sent reports;",  # each sends two
        ),
        (
            {**EXACT, "question": "mean", "dimensions": 4, "clip": 1.0},
            "the answer covers the 90 reports received;",
        ),
        (
            {**EXACT, "question": "mean", "dimensions": 4, "clip": 1.0, "trust": "secure"},
            "the answer covers the 90 devices whose tables are in the sums;",
        ),
    ],
)
def test_a_note_says_what_was_received_over_a_network(study: dict[str, Any], subject: str) -> None:
    planned = sfumato.plan(study, items=ITEMS if study["question"] == "frequencies" else None)
    campaign = planned.design.with_seed(SeededRng(SEED)).question.campaign(
        planned, secret=bytes(32)
    )
    participation = network_participation(planned, [(campaign.next_task(), 90)])
    assert participation.devices == 90
    assert participation.notes[len(planned.warnings)].startswith(subject)


def test_notes_and_time_are_on_the_release() -> None:
    planned = sfumato.plan(EXACT, items=ITEMS)
    campaign = planned.design.campaign(planned)
    task = campaign.next_task()
    assert task is not None
    campaign.absorb(NoisedSum(task, np.array([5, 0, 2]), 7))
    release = planned.design.answer(
        campaign, planned, Participation(devices=7, respondents=7, rounds=1, notes=("so",))
    )
    assert isinstance(release, CountRelease)
    assert dict(zip(release.items.to_pylist(), release.counts, strict=True)) == {
        "oak": 5,
        "fir": 2,
        "elm": 0,
    }
    assert release.notes == ("so",)
    assert release.timed(1.5, "time").cost.seconds == 1.5

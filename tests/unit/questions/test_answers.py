"""Releases: the same from a simulation and from a service, and back from JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sfumato
from checks import SEED
from sfumato.errors import ImpossibleError
from sfumato.flow.release import NoisedSum, Release
from sfumato.flow.task import LocalTask
from sfumato.planning import Plan
from sfumato.privacy import SeededRng, Tally
from sfumato.questions import answers
from sfumato.questions.answers import Asked
from sfumato.questions.frequencies.design import FrequencyCampaign
from sfumato.questions.local_frequencies.design import LocalDesign, values_of

LOCAL = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 100}
EXACT = {"question": "frequencies", "trust": "central", "epsilon": None, "devices": 100}
ITEMS = ["oak", "elm", "fir"]


def first_task(planned: Plan) -> LocalTask:
    assert isinstance(planned.design, LocalDesign)
    return planned.design.tasks()[0]


def test_a_release_comes_back_from_json() -> None:
    release = sfumato.simulate(LOCAL, ["oak"] * 70 + ["elm"] * 30, seed=SEED)
    back = Release.from_dict(json.loads(release.to_json()))
    assert back.head() == release.head()
    assert back.items.equals(release.items)
    for name in ("counts", "standard_error", "low", "high", "significant"):
        assert (getattr(back, name) == getattr(release, name)).all()


def test_a_release_of_nothing_comes_back_too() -> None:
    release = sfumato.simulate({**EXACT, "threshold": 1e9}, ["oak"] * 100, seed=SEED)
    assert len(Release.from_dict(json.loads(release.to_json()))) == 0


def test_counts_are_over_all_that_were_asked() -> None:
    """Half of the devices answered, so counts double, and so does what is not known of them."""
    planned = sfumato.plan(LOCAL, items=ITEMS)
    task = first_task(planned)
    tally = Tally(task.randomizer)
    values = values_of(task.randomizer, ["oak"] * 50, planned.asked_about)
    tally.fold(task.randomizer.randomize(values, rng=SeededRng(SEED)))
    all_of_them, half = (
        answers.from_tallies(planned, [tally], Asked(devices=devices, rounds=1), answered=50)
        for devices in (50, 100)
    )
    assert (half.counts == 2 * all_of_them.counts).all()
    sampling = np.maximum(half.counts, 0)
    assert np.allclose(half.standard_error**2, 4 * all_of_them.standard_error**2 + sampling)


def test_nothing_comes_of_nothing() -> None:
    planned = sfumato.plan(LOCAL, items=ITEMS)
    task = first_task(planned)
    with pytest.raises(ImpossibleError, match="no device answered"):
        answers.from_tallies(
            planned, [Tally(task.randomizer)], Asked(devices=0, rounds=0), answered=0
        )


def test_notes_and_time_are_on_the_release() -> None:
    planned = sfumato.plan(EXACT, items=ITEMS)
    campaign = FrequencyCampaign(planned.sums, planned.asked_about.items)
    task = campaign.next_task()
    assert task is not None
    campaign.absorb(NoisedSum(task, np.array([5, 0, 2]), 7))
    release = answers.from_sums(planned, campaign, Asked(devices=7, rounds=1, notes=("so",)))
    assert dict(zip(release.items.to_pylist(), release.counts, strict=True)) == {
        "oak": 5,
        "fir": 2,
        "elm": 0,
    }
    assert release.notes == ("so",)
    assert answers.timed(release, 1.5).cost.seconds == 1.5

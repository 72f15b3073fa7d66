"""What plans and releases say where there are too few devices, or a delta that promises nothing."""

from __future__ import annotations

import numpy as np
import pytest

import sfumato
from checks import SEED
from planning_checks import NEEDED
from sfumato.flow.release import Influence
from sfumato.planning import plan
from sfumato.privacy.shuffling import shuffled_epsilon
from sfumato.questions.promise import local_promise, with_shuffling
from sfumato.study import QUESTIONS

ITEMS = [f"item {number}" for number in range(20)]
SUMS = [
    (question, trust)
    for question, facts in QUESTIONS.items()
    for trust in facts.planners
    if trust != "local" and question != "train"  # a training is planned from a table of its own
]


@pytest.mark.parametrize(("question", "trust"), SUMS)
def test_every_sum_warns_of_a_delta_above_one_over_the_devices(question: str, trust: str) -> None:
    """The control is a delta of a tenth of it."""

    def warnings(delta: float) -> str:
        keys = {"question": question, "trust": trust, "epsilon": 1.0, "devices": 1_000}
        items = ITEMS if question == "frequencies" else None
        study = keys | {"delta": delta} | NEEDED.get(question, {})
        return "\n".join(plan(study, items=items).warnings)

    assert "more than 1/devices" in warnings(2e-3)
    assert "more than 1/devices" not in warnings(1e-4)


@pytest.mark.parametrize(
    ("question", "trust"), [("frequencies", "local"), ("heavy_hitters", "secure")]
)
def test_nothing_is_said_of_more_devices_than_there_are(question: str, trust: str) -> None:
    study = {"question": question, "trust": trust, "epsilon": 1.0, "devices": 30}
    few = plan(study, items=ITEMS if question == "frequencies" else None)
    assert few.predicted["detectable_count"] > 30  # otherwise nothing is tested
    assert any("not even an item that all devices hold" in each for each in few.warnings)
    release = sfumato.simulate(few, ITEMS[:10] * 3, seed=SEED)
    for note in (*few.warnings, *release.notes):
        assert "or more of the 30 devices" not in note
        assert "only if" not in note


@pytest.mark.parametrize(
    ("devices", "warning"),
    [
        (1_000, None),
        (100, "only if 12% of all copies that the devices may report are of it"),
        (10, "not even an item of which every device reports as many copies as it may"),
    ],
)
def test_a_warning_about_copies_compares_them_with_all_copies(
    devices: int, warning: str | None
) -> None:
    """An item of which 100 devices report 20 copies each is listed: noise of scale 20 hides it with
    a probability below 1e-30."""
    study = {"question": "heavy_hitters", "trust": "central", "epsilon": 1.0, "delta": 1e-3}
    planned = plan({**study, "devices": devices, "count": "copies", "items_per_device": 20})
    warnings = [each for each in planned.warnings if "with a probability of 95%" in each]
    assert [warning is not None and warning in each for each in warnings] == [True] * bool(warning)
    if devices == 100:
        assert 200 < planned.predicted["detectable_count"] < 300  # more than there are devices
        data = {"item": ["oak"] * 100, "device": list(range(100)), "n": [20] * 100}
        columns = {"item_column": "item", "device_column": "device", "count_column": "n"}
        release = sfumato.simulate(planned, data, seed=SEED, **columns)  # type: ignore[call-overload]  # a dict of keywords
        assert release.items.to_pylist() == ["oak"]


def test_a_release_of_counts_says_how_many_devices_answered() -> None:
    """Of 500 devices, each of which drops out with probability 0.2, all answer with probability
    1e-48."""
    study = {"question": "frequencies", "trust": "secure", "epsilon": 8.0, "dropout": 0.2}
    release = sfumato.simulate(study, ITEMS * 25, seed=SEED)
    assert any("of 500 devices answered; the others" in note for note in release.notes)
    central = {"question": "frequencies", "trust": "central", "epsilon": 8.0}
    assert not any("answered" in note for note in sfumato.simulate(central, ITEMS * 25).notes)


def test_shuffling_never_promises_a_delta_above_one_over_the_reports() -> None:
    """The control is a delta that means something, which is used as it is."""
    local = local_promise("any", 1.0, 1, Influence(of="a count", most=1.0, note=""))
    weak = with_shuffling(local, [500], 0.01, 1).second
    assert "0.0002)-differential privacy" in weak
    epsilon = float(weak.split("(")[1].split(",")[0])
    assert epsilon == pytest.approx(shuffled_epsilon(1.0, 500, 0.0002), rel=0.01)
    assert epsilon >= shuffled_epsilon(1.0, 500, 0.0002)
    assert "1e-06)-differential privacy" in with_shuffling(local, [500], 1e-6, 1).second


@pytest.mark.filterwarnings("ignore::sfumato.errors.SimulationWarning")  # it says the same
@pytest.mark.parametrize("clip", [0.25, None])
def test_a_mean_says_to_which_norm_vectors_were_clipped(clip: float | None) -> None:
    """Vectors of norm 1 that are clipped to a quarter have a mean a quarter as long, outside of
    every interval: the release says that intervals do not cover that."""
    vectors = np.zeros((1_000, 3))
    vectors[:, 0] = 1.0
    study = {"question": "mean", "trust": "central", "epsilon": 8.0, "delta": 1e-6, "clip": clip}
    release = sfumato.simulate(study, vectors, seed=SEED)
    norm = release.plan["parameters"]["clip"] if clip is None else clip
    assert any(f"clipped to a norm of {norm:.4g};" in note for note in release.notes)

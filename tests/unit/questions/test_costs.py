"""The predicted work of collectors and simulations grows with the sizes that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sfumato import plan

ITEMS = [f"tree {k}" for k in range(2_000)]


def seconds(question: str, trust: str, *, items: int = 500, **keys: Any) -> float:
    return float(_plan(question, trust, items=items, **keys)["server_seconds"])


def _plan(question: str, trust: str, *, items: int = 500, **keys: Any) -> Mapping[str, Any]:
    study = {"question": question, "trust": trust, "epsilon": 4.0, "devices": 3_000_000, **keys}
    listed = ITEMS[:items] if question == "frequencies" else None
    return plan(study, items=listed).predicted


@pytest.mark.parametrize(
    ("question", "trust", "keys"),
    [
        ("frequencies", "central", {}),
        ("frequencies", "central", {"algorithm": "one_hot"}),
        ("frequencies", "local", {"algorithm": "count_mean"}),
        ("heavy_hitters", "central", {}),
        ("mean", "central", {"dimensions": 100, "clip": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ten_times_the_devices_take_ten_times_as_long(
    question: str, trust: str, keys: dict[str, Any]
) -> None:
    """Or a little less, since the release takes as long for any number of devices; or more, since
    cells have more bits."""
    less, more = (
        seconds(question, trust, **keys, devices=devices) for devices in (3_000_000, 30_000_000)
    )
    assert 8 < more / less < 13


def test_masked_rounds_take_longer_with_more_neighbours() -> None:
    keys = {"devices": 1_000, "items": 500}
    assert seconds("frequencies", "secure", **keys, dropout=0.3) > 1.2 * seconds(
        "frequencies", "secure", **keys, dropout=0.05
    )


def test_wide_records_take_longer_than_short_ones() -> None:
    """Paper 004, section 5: n·m + p·k for a count mean sketch, n + k·m·log m + p·k for a Hadamard
    sketch, for n records of m bits and p items in k rows."""
    sketch, hadamard = (
        {
            devices: seconds("frequencies", "local", algorithm=algorithm, devices=devices)
            for devices in (100, 30_000_000)
        }
        for algorithm in ("count_mean", "hadamard")
    )
    wide, short = (each[30_000_000] - each[100] for each in (sketch, hadamard))
    assert wide > short + 0.1  # seconds
    more_items = seconds("frequencies", "local", algorithm="count_mean", devices=100, items=2_000)
    assert more_items > sketch[100]
    keys: dict[str, Any] = {"algorithm": "hadamard", "devices": 100, "rows": 1_024}
    narrow, wide = (
        seconds("frequencies", "local", **keys, width=width) for width in (1_024, 32_768)
    )
    assert wide > 10 * narrow  # the transform, k·m·log m, is 48 times as long


def test_memory_is_that_of_the_largest_table() -> None:
    def memory(**keys: Any) -> int:
        study = {"question": "mean", "trust": "central", "epsilon": 1.0, "devices": 1_000, **keys}
        return int(plan(study | {"clip": 1.0}).predicted["server_bytes"])

    assert memory(dimensions=10_000_000) > 5 * memory(dimensions=1_000_000)
    assert memory(dimensions=1_000_000) > 24e6  # 64-bit integers, three times


@pytest.mark.parametrize(
    ("question", "trust", "keys"),
    [
        ("frequencies", "central", {}),
        ("frequencies", "central", {"algorithm": "count_sketch"}),
        ("frequencies", "secure", {}),
        ("frequencies", "local", {}),
        ("heavy_hitters", "central", {}),
        pytest.param("heavy_hitters", "secure", {"word_length": 4}, marks=pytest.mark.slow),
        ("histogram", "central", {}),
        pytest.param("new_words", "local", {"word_length": 4}, marks=pytest.mark.slow),
        ("mean", "central", {"dimensions": 100, "clip": 1.0}),
        ("mean", "secure", {"dimensions": 100, "clip": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_simulation_of_more_devices_is_predicted_to_take_longer(
    question: str, trust: str, keys: dict[str, Any]
) -> None:
    """Ten times as long at most, and in less time than the collector of real devices."""
    few, many = (_plan(question, trust, **keys, devices=count) for count in (30_000, 300_000))
    assert 1 < many["simulate_seconds"] / few["simulate_seconds"] < 13
    assert many["simulate_bytes"] >= few["simulate_bytes"] > 1e8  # Python alone takes that much
    assert many["simulate_seconds"] < many["server_seconds"]


@pytest.mark.parametrize(
    "keys",
    [
        {"trust": "central", "clip": 1.0},
        {"trust": "secure", "clip": 1.0},
        {"trust": "central", "algorithm": "diffsketch", "rows": 5, "width": 200, "epsilon": None},
    ],
    ids=["central", "secure", "diffsketch"],
)
def test_a_training_of_more_rounds_clients_or_examples_is_predicted_to_take_longer(
    keys: dict[str, Any],
) -> None:
    def predicted(rounds: int = 4, model: str = "softmax", **training: Any) -> dict[str, Any]:
        study = {"question": "train", "epsilon": 8.0, "delta": 1e-6, "devices": 2_000, **keys}
        if keys.get("algorithm"):
            study |= {"epsilon": float("inf")}
            training |= {"mode": "none"}
        training = {"model": model, "cohort": 100} | training
        return dict(plan(study | {"rounds": rounds, "training": training}).predicted)

    one = predicted()
    assert one["simulate_bytes"] > 3e8  # PyTorch alone takes that much
    assert "20 examples" in one["assumes"]
    for more in (
        predicted(rounds=40),
        predicted(cohort=1_000),
        predicted(steps=1_000),
        predicted(most_examples=20_000),
        predicted(model="cnn"),
    ):
        assert 3 < more["simulate_seconds"] / one["simulate_seconds"] < 1_000
    assert predicted(model="cnn")["simulate_bytes"] > 1.2 * one["simulate_bytes"]
    assert ("server_seconds" in one) == (keys["trust"] == "secure")  # a collector has no others

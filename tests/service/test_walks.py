"""The walks of docs/architecture.md: each step is called, in the order of the page."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from questioning import Case, check_collection
from sfumato.simulation.simulate import simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
LISTED = ("oak", "elm", "fir")
MASKED = {"dropout": 0.05, "corrupt": 0.05}


def walks() -> dict[str, list[str]]:
    """The steps of each walk, by its name."""
    text = PAGE.read_text(encoding="utf-8").split("<!-- walks -->")[1].split("<!-- /walks -->")[0]
    parts = re.split(r"^\*\*(.+?)\*\*$", text, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {name.strip("`"): re.findall(r"`([\w.]+)`", steps) for name, steps in sections}


def calls(scenario: Callable[[], object], steps: set[str]) -> list[str]:
    """The calls of these functions, in order, on all threads."""
    passed: list[str] = []
    names: dict[CodeType, str] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if (name := names.get(code)) is None:
            module = frame.f_globals.get("__name__", "").removeprefix("sfumato.")
            name = names[code] = f"{module}.{code.co_qualname}"
        if name in steps:
            passed.append(name)

    threading.settrace(note)
    sys.settrace(note)
    try:
        scenario()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return passed


def train_once() -> None:
    torch = pytest.importorskip("torch")
    from sfumato.learn.data import Federated, group_by_client
    from sfumato.simulation.train import train

    inputs, targets = torch.randn(120, 4), torch.randint(0, 2, (120,))
    clients = group_by_client(inputs, targets, torch.arange(12).repeat_interleave(10), 12)
    data = Federated(train=clients, test_inputs=inputs, test_targets=targets, name="made up")
    keys = {"model": "softmax", "cohort": 6, "inputs": 4, "classes": 2}
    study = {"question": "train", "trust": "central", "epsilon": 8.0, "delta": 1e-3, "clip": 1.0}
    train({**study, "rounds": 1, "training": keys}, data)


@pytest.mark.parametrize("name", list(walks()))
def test_a_walk_goes_as_the_page_says(name: str, tmp_path: Path) -> None:
    def collect(trust: str, **keys: Any) -> None:
        case = Case(question="frequencies", trust=trust, items=LISTED, keys=keys, devices=24)
        check_collection(case, tmp_path)

    study = {"question": "frequencies", "trust": "central", "epsilon": 1.0}
    scenarios: dict[str, Callable[[], object]] = {
        "simulate": lambda: simulate(study, list(LISTED) * 20),
        "A training round": train_once,
        "A local report": lambda: collect("local"),
        "A masked round": lambda: collect("secure", **MASKED),
    }
    steps = walks()[name]
    assert len(steps) >= 5
    recorded = iter(calls(scenarios[name], set(steps)))
    missing = [
        step for step in steps if step not in recorded
    ]  # `in` continues after the last match
    assert not missing

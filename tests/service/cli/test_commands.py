"""The command line as a user runs it, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sfumato
from cli.test_commands import folder
from running import sfumato as run

__all__ = ["folder"]  # a fixture


def test_simulate_prints_what_the_library_returns(folder: Path) -> None:
    code, out, err = run(
        "simulate", "study.toml", "--data", "data.csv", "--seed", "3", "--json", cwd=folder
    )
    assert code == 0
    assert "asking every round" in err
    data = json.loads(out)
    same = sfumato.simulate(folder / "study.toml", folder / "data.csv", seed=3)
    for release in (data, expected := same.to_dict()):
        del release["cost"]["seconds"], release["study"]["dictionary"]  # a path
    assert list(data) == list(expected)
    assert data == json.loads(json.dumps(expected))
    assert [row["item"] for row in data["estimates"]] == ["oak", "elm", "fir"]


@pytest.mark.slow
def test_the_demo_shows_estimates_beside_the_truth(tmp_path: Path) -> None:
    code, out, err = run("demo", "--devices", "200", cwd=tmp_path)
    assert code == 0, err
    assert out.count("truth") == 3
    assert "dashboard  http://127.0.0.1:" in err


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    code, _, err = run("reproduce", "list", cwd=folder)
    assert (code, "Traceback" in err) == (0, False)

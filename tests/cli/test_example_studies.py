"""Every study in examples/studies is answered by the command in its comment."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sfumato.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "studies"
STUDIES = sorted(FOLDER.glob("*.toml"))
LONG = (
    *("apple-autoplay", "apple-energy"),  # tables of many cells
    *("002-adapt-tail", "002-adapt-norm-of-the-paper"),
    *("002-train-adapt-norm", "002-train-adapt-tail", "002-train-two-stage"),
    *("002-train-fixed-rate", "003-private", "003-as-printed"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The studies, with the data that `make_data.py` makes."""
    copy = tmp_path_factory.mktemp("studies") / "studies"
    shutil.copytree(FOLDER, copy)
    runpy.run_path(str(copy / "make_data.py"))
    return copy


@cache
def answer(path: Path) -> dict[str, Any]:
    """The release that the command in a study's comment prints as JSON."""
    text = path.read_text(encoding="utf-8")
    (command,) = re.findall(r"^# *sfumato ((?:simulate|train) .*)$", text, re.MULTILINE)
    assert path.name in command
    done = CliRunner().invoke(main, [*shlex.split(command), "--seed", "1", "--json"])
    assert done.exit_code == 0, done.output
    release: dict[str, Any] = json.loads(done.stdout)
    assert release["privacy"]["guarantee"]
    return release


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem)
        for path in STUDIES
    ],
)
def test_an_example_study_is_answered(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    release = answer(folder / name)
    if release["study"]["question"] == "train":
        assert release["accuracy"] > 0.2  # 0.1 by chance, with a deviation of 0.01
        return
    assert release["estimates"]
    for key in ("rows", "width"):
        if key in release["study"] and release["study"]["question"] != "mean":
            assert release["plan"]["parameters"][key] == release["study"][key]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fixed-rate", "adapt-norm", "two-stage", "adapt-tail"])
def test_a_study_of_paper_002_trains_with_a_trusted_collector_as_well(
    rule: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"002-train-{rule}.toml"
    text = (folder / path.name).read_text(encoding="utf-8")
    path.write_text(text.replace('"secure"', '"central"', 1), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "clients.npz", tmp_path)
    release = answer(path)
    assert release["study"]["trust"] == "central"
    assert release["accuracy"] > 0.2


def test_the_rules_of_paper_002_compress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch of a fixed size is smaller than whole vectors. The adaptive rules end with a sketch,
    but their two rounds together may send more than whole vectors, since noised norms decide."""
    monkeypatch.chdir(folder)
    whole, fixed, *adaptive = [
        answer(folder / f"002-{name}.toml")
        for name in ("whole-vectors", "fixed-size", "adapt-norm", "adapt-norm-of-the-paper")
    ]
    assert fixed["cost"]["bytes_per_device"] < whole["cost"]["bytes_per_device"]
    assert not whole["plan"]["parameters"].get("compressed")
    assert all(release["plan"]["parameters"]["compressed"] for release in adaptive)

"""Every study in examples/studies is answered by the command in its comment."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from sfumato.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "studies"
STUDIES = sorted(FOLDER.glob("*.toml"))
LONG = ("apple-autoplay", "apple-energy")  # tables of many cells


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem)
        for path in STUDIES
    ],
)
def test_an_example_study_is_answered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    text = path.read_text(encoding="utf-8")
    (command,) = re.findall(r"^# *sfumato (simulate .*)$", text, re.MULTILINE)
    assert path.name in command
    done = CliRunner().invoke(main, [*shlex.split(command), "--seed", "1", "--json"])
    assert done.exit_code == 0, done.output
    release = json.loads(done.stdout)
    assert release["estimates"]
    assert release["privacy"]["guarantee"]
    for key in ("rows", "width"):
        if key in release["study"]:
            assert release["plan"]["parameters"][key] == release["study"][key]

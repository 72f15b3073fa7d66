"""Every study in examples/studies runs.

The data of NAME.toml is NAME.csv; if it has a column `devices`, a row is that many devices.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sfumato import files
from sfumato.cli.main import main

STUDIES = sorted((Path(__file__).resolve().parents[3] / "examples" / "studies").glob("*.toml"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_an_example_is_simulated(study: Path) -> None:
    data = study.with_suffix(".csv")
    arguments = ["simulate", str(study), "--data", str(data), "--seed", "1", "--json"]
    if "devices" in files.column_names(str(data)):
        arguments += ["--count-column", "devices"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    release = json.loads(done.stdout)
    assert release["estimates"]
    assert release["privacy"]["guarantee"]

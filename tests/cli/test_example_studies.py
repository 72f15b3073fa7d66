"""Every study in examples/studies runs on simulated devices.

The data is the file beside it with its name and another ending, or trees.csv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sfumato import simulate
from sfumato.files import column_names
from sfumato.study import Study

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "studies"
STUDIES = sorted(FOLDER.glob("*.toml"))
LONG = ("apple-autoplay", "apple-energy")  # tables of many cells


def data_of(study: Path) -> Path:
    own = [path for path in FOLDER.glob(f"{study.stem}.*") if path != study]
    return own[0] if own else FOLDER / "trees.csv"


def run(path: Path) -> Any:
    data = data_of(path)
    columns = column_names(data)
    roles = {"item_column": "word", "device_column": "user"}
    roles["count_column"] = "copies" if "copies" in columns else "devices"
    chosen = {role: name for role, name in roles.items() if name in columns}
    return simulate(path, data, seed=1, **chosen)


@pytest.mark.filterwarnings("ignore::sfumato.errors.SimulationWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem)
        for path in STUDIES
    ],
)
def test_an_example_study_is_answered(path: Path) -> None:
    study, release = Study.load(path), run(path)
    assert len(release) > 0
    parameters = release.plan["parameters"]
    for key in ("rows", "width"):
        if getattr(study, key) is not None:
            assert parameters[key] == getattr(study, key)


def test_examples_begin_with_what_they_show() -> None:
    assert all(path.read_text(encoding="utf-8").startswith("# Paper 00") for path in STUDIES)

"""The notebooks in examples run, and what they show, which is what the docs show, is true."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TIMES = re.compile(r"[\d.,]+ seconds")  # of the bill


def runner() -> Any:
    """scripts/notebooks, which has no ending, as a module."""
    loader = SourceFileLoader("notebooks", str(ROOT / "scripts" / "notebooks"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def outputs(notebook: Any) -> list[tuple[int, str, str]]:
    """All outputs, with the place of their cells: texts without times, and that there is a picture,
    whose bytes depend on the version of matplotlib."""
    parts = []
    for place, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", []):
            contents = output.get("data", {"text": output.get("text", "")})
            for kind, text in sorted(contents.items()):
                content = "" if kind == "image/png" else TIMES.sub("", "".join(text))
                parts.append((place, kind, content))
    return parts


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_computes(path: Path) -> None:
    module = runner()
    stored = module.nbformat.read(path, as_version=4)
    assert outputs(stored)
    assert outputs(module.executed(path)) == outputs(stored)

"""Files of others are the ones that are written down."""

from __future__ import annotations

import re
from hashlib import sha256
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "src/sfumato/dashboard/static"
ROW = re.compile(r"^\| `([\w.-]+)` \|.*\((\S+\.txt)\) \| `([0-9a-f]{64})` \|$", re.MULTILINE)


@pytest.mark.parametrize(
    "folder",
    [STATIC, ROOT / "tests/service/browser", ROOT / "docs/assets/katex"],
    ids=["pages", "tests", "docs"],
)
def test_files_of_others_are_as_they_came_and_have_their_licence(folder: Path) -> None:
    rows = ROW.findall((folder / "VENDORED.md").read_text(encoding="utf-8"))
    assert sorted(name for name, _, _ in rows) == sorted(
        file.name for file in folder.glob("*.min.*")
    )
    for name, licence, digest in rows:
        assert sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / licence).stat().st_size > 500


def test_templates_and_files_are_in_the_package() -> None:
    package = resources.files("sfumato.dashboard")
    assert (package / "templates" / "base.html").is_file()
    assert (package / "static" / "dashboard.css").is_file()


def test_the_guide_s_pictures_are_there_and_small() -> None:
    guide = (ROOT / "docs/guides/dashboard.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\(\.\./(images/dashboard/[\w.]+)\)", guide))
    there = set((ROOT / "docs/images/dashboard").iterdir())
    assert {ROOT / "docs" / name for name in names} == there
    assert all(picture.stat().st_size < 150_000 for picture in there)

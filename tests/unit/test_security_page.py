"""SECURITY.md names a test for every line of its threat model, and all of them exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "SECURITY.md"
EVERYBODY = (
    "a stranger",
    "a device",
    "a cohort of devices",
    "an administrator",
    "an analyst",
    "a thief",
    "the collector itself",
    "the network",
)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of each line of a page's tables, without the heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "who" and not set(row[0]) <= set("-: ")]


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of a file's test functions; none if there is no such file."""
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text()).body
    return frozenset(part.name for part in body if isinstance(part, ast.FunctionDef))


def missing(text: str) -> list[str]:
    """The tests that a page names and that do not exist."""
    return [
        f"{path}::{name}"
        for path, name in NAME.findall(text)
        if name not in functions_of(ROOT / path)
    ]


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: row[1][:60])
def test_every_line_of_the_threat_model_names_tests_that_exist(row: list[str]) -> None:
    _, sentence, tests = row
    assert re.search(r"\bcan(not)?\b", sentence)
    assert NAME.sub("", tests).strip() == ""  # nothing but tests
    assert NAME.findall(tests)
    assert missing(tests) == []


def test_every_kind_of_attacker_has_lines() -> None:
    names = [row[0].replace("**", "").lower() for row in rows(PAGE.read_text())]
    assert {who: any(name.startswith(who) for name in names) for who in EVERYBODY} == (
        dict.fromkeys(EVERYBODY, True)
    )


def test_a_test_that_does_not_exist_is_noticed() -> None:
    """The negative control: a wrong name, and a wrong file."""
    here = "tests/unit/test_security_page.py"
    names = [f"{here}::test_of_nothing", "tests/unit/nowhere.py::test_readers_find_the_page"]
    text = "".join(f"| who | cannot | `{name}` |\n" for name in names)
    assert missing(text) == names
    assert missing(f"`{here}::test_every_kind_of_attacker_has_lines`") == []


def test_readers_find_the_page() -> None:
    for page in ("README.md", "docs/index.md", "docs/guides/deploy.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(), page

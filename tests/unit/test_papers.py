"""Everything that the papers describe is listed once, and what is said to show it exists."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sfumato.reproduce import figures

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"000": 29, "001": 28, "002": 38, "003": 21, "004": 34}
KINDS = {"algorithm", "parameter", "theorem", "system", "evidence"}
ITEMS: list[dict[str, Any]] = [
    item
    for path in sorted((ROOT / "docs" / "papers").glob("*.toml"))
    for item in tomllib.loads(path.read_text(encoding="utf-8"))["item"]
]


def problem(item: dict[str, Any]) -> str | None:
    """What is wrong with an item, if anything."""
    if item["kind"] not in KINDS:
        return f"kind must be one of {sorted(KINDS)}; got {item['kind']}"
    statuses = {"works", "refused"} | ({"later"} if item["kind"] == "evidence" else set())
    if item["status"] not in statuses:
        return f"status must be one of {sorted(statuses)}; got {item['status']}"
    if item["status"] == "refused" and not item.get("reason"):
        return "what is refused needs a reason"
    if not item["shown_by"]:
        return "nothing shows it"
    is_built = item["kind"] != "evidence" and item["status"] == "works"
    if is_built and not any("::" in name for name in item["shown_by"]):
        return "no test shows it"
    return next((name for name in item["shown_by"] if not exists(name)), None)


def exists(name: str) -> bool:
    """Whether there is such a test (by its name), page or command."""
    path, _, test = name.partition("::")
    if name.startswith("sfumato "):
        words = name.split()
        return words[1] != "reproduce" or words[2] in figures()
    if not (ROOT / path).is_file():
        return False
    if not test:
        return not path.startswith("tests/")  # a whole file of tests shows nothing in particular
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return test.partition("[")[0].rpartition("::")[2] in set(functions)


def test_every_item_of_every_paper_is_listed_once() -> None:
    expected = [
        f"{paper}-{number:02}" for paper, count in COUNTS.items() for number in range(1, count + 1)
    ]
    assert sorted(item["id"] for item in ITEMS) == expected


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["id"])
def test_what_shows_an_item_exists(item: dict[str, Any]) -> None:
    assert problem(item) is None


@pytest.mark.parametrize(
    "change",
    [
        {"shown_by": ["tests/unit/test_papers.py::test_that_is_not_there"]},
        {"shown_by": ["tests/unit/not_there.py::test_not_there"]},
        {"shown_by": ["tests/unit/test_papers.py"]},
        {"shown_by": ["sfumato reproduce 000-nothing"]},
        {"shown_by": []},
        {"shown_by": ["sfumato reproduce 000-fig1"]},
        {"status": "later"},
        {"status": "refused"},
    ],
    ids=str,
)
def test_an_item_that_nothing_shows_is_caught(change: dict[str, Any]) -> None:
    item = {
        "kind": "algorithm",
        "status": "works",
        "shown_by": ["tests/unit/test_papers.py::test_what_shows_an_item_exists"],
    }
    assert problem(item) is None
    assert problem(item | change) is not None

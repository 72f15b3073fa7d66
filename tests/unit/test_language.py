"""What a reader meets: names that are nouns or verbs, and English that needs no second reading."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PARTICIPLES = {
    "answered", "asked", "begun", "chosen", "come", "drawn", "found", "given", "gone", "heard",
    "held", "kept", "known", "made", "met", "said", "seen", "sent", "shown", "spoken", "taken",
    "told", "wanted",
}  # fmt: skip
PATTERNS = {
    "distributive article": r"\b(?:a|one|two|three|\d[\d,]*) "
    r"(?!(?:is|in|of|for|so|to|as|with|per|by|on|at|from|and|or|than)\b)\w+ an? "
    r"(?:cell|client|coordinate|device|item|member|phase|record|report|round|row|study|task|"
    r"upload|word)\b(?! \w+ing\b)",
    "told": r"\b(?:not told|told from|told apart from the others)\b",
    "such a one": r"\bsuch a one\b",
    "surely": r"\bsurely (?:there|found)\b",
    "hurry": r"\bin a hurry\b",
    "again": r"\bcame again\b",
}
SERIALISED = {  # fields of JSON that others read
    "training.py": {"asked", "answered"},
    "runs.py": {"found"},
    "network_fleet.py": {"sent"},
}
RELATIVE = re.compile(r"# (?:that|which|who|whose|whom|of which|in which|by which|for which) ")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name


def faults(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".py":
        for number, name in names(ast.parse(text)):
            allowed = SERIALISED.get(path.name, set())
            if name.strip("_").lower() in PARTICIPLES and name not in allowed:
                yield f"{number}: the name {name} is a participle"
        previous = -1
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                number = token.start[0]
                if RELATIVE.match(token.string) and number != previous + 1:
                    yield f"{number}: a comment that begins with a relative pronoun"
                previous = number
    for what, pattern in PATTERNS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{text.count(chr(10), 0, match.start()) + 1}: {what}: {match.group()}"


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_sentences_are_plain(path: Path) -> None:
    if path != Path(__file__):
        assert list(faults(path)) == []


def test_faults_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("found = 1  # that was sought\nCELLS = 3  # one record a coordinate\n")
    assert [fault.partition(":")[0] for fault in faults(path)] == ["1", "1", "2"]

"""The site of the documentation builds, and loads nothing from elsewhere."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unit.test_docs import ROOT, SAME, console, run, words


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert pages
    assert not [page for page in pages if loads_from_elsewhere(words(page))]


def loads_from_elsewhere(html: str) -> bool:
    """Whether a browser would fetch something from another host to show the page."""
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", html)
    return any(re.search(r"""=["']?(?:https?:)?//""", tag) for tag in tags) or "mermaid" in html


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<link rel=stylesheet href=//fonts.example/a.css>",
        '<pre class="mermaid">',  # the theme would fetch the library that draws it
    ],
)
def test_a_page_that_loads_from_elsewhere_is_caught(html: str) -> None:
    assert loads_from_elsewhere(html)


def test_a_plain_link_is_not_a_load() -> None:
    assert not loads_from_elsewhere('<a href="https://www.rfc-editor.org/rfc/rfc8785">RFC</a>')


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints() -> None:
    transcript = dict(console(words(ROOT / "README.md")))["make demo"]
    _, printed = run("sfumato demo")
    # What devices hold is the same each time; their noise is not, so some intervals miss the truth.
    got = printed.replace("  outside", "")
    want, got = (re.sub(r"\d[\d,]*\.\d", "#", text) for text in (transcript, got))
    assert doctest.OutputChecker().check_output(want, got, SAME), printed

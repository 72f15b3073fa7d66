"""The built site in a browser: nothing missing, nothing cut off, readable for everybody."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from service.browser.screens import AXE
from unit.test_docs import ROOT

if TYPE_CHECKING:  # without a browser, tests are skipped
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

MAIN = [  # the pages that axe reads
    "",
    "tutorials/frequencies/",
    "tutorials/open_domains/",
    "tutorials/mean/",
    "tutorials/training/",
    "guides/gallery/",
    "guides/quickstart/",
    "guides/trust/",
    "guides/writing_a_study/",
    "guides/dashboard/",
    "concepts/comparison/",
    "proofs/randomizers/",
    "reference/sfumato/",
    "changelog/",
]
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
# Boxes whose contents are wider than they are; a pixel is lost to rounding.
TOO_WIDE = """() => [...document.querySelectorAll("pre > code, div.arithmatex")]
  .filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.textContent)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, which is built without warnings: broken links are warnings."""
    site = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return site


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def page_of(
    browser: Browser, address: str, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """A page that is 1280 pixels wide; nothing on it may fail or come from elsewhere."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900},
        color_scheme=scheme,
        permissions=["clipboard-read", "clipboard-write"],
    )
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "response",
        lambda answer: (
            faults.append(f"{answer.status} {answer.url}")
            if answer.status >= 400 or not answer.url.startswith((address, "data:", "blob:"))
            else None
        ),
    )
    yield page
    context.close()
    assert not faults


def faults_of(page: Page) -> list[str]:
    """What axe finds against WCAG 2.2 A and AA."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    report = page.evaluate(
        "(tags) => axe.run(document, {runOnly: tags, resultTypes: ['violations']})", WCAG
    )
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in report["violations"]
        for node in rule["nodes"]
    ]


def test_the_main_pages_are_accessible_in_light_and_dark(browser: Browser, address: str) -> None:
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        with page_of(browser, address, scheme) as page:
            for path in MAIN:
                page.goto(f"{address}/{path}")
                assert page.locator("body").get_attribute("data-md-color-scheme") == (
                    "slate" if scheme == "dark" else "default"
                )
                assert faults_of(page) == [], (path, scheme)
            page.evaluate("() => document.querySelector('article').append(new Image())")
            rules = {fault.partition(":")[0] for fault in faults_of(page)}
            assert "image-alt" in rules  # the negative control


@pytest.mark.timeout(900)
def test_no_code_or_formula_is_cut_off_on_any_page(
    browser: Browser, address: str, folder: Path
) -> None:
    pages = [path.relative_to(folder).as_posix() for path in folder.rglob("index.html")]
    formulas = 0
    with page_of(browser, address) as page:
        for path in pages:
            page.goto(f"{address}/{path}", wait_until="domcontentloaded")
            assert page.evaluate(TOO_WIDE) == [], path
            assert page.locator(".katex-error").count() == 0, path
            formulas += page.locator(".katex-display").count()
        assert formulas > 15
        page.evaluate(
            "() => document.querySelector('article').innerHTML = `<pre><code>${'w'.repeat(300)}`"
        )
        page.add_style_tag(content=".md-typeset pre > code { overflow-wrap: normal }")
        assert len(page.evaluate(TOO_WIDE)) == 1  # the negative control


def test_the_copy_button_copies_commands_without_prompts_and_output(
    browser: Browser, address: str
) -> None:
    with page_of(browser, address) as page:
        page.goto(f"{address}/guides/quickstart/")
        for text, copy in (("$ sfumato plan", "sfumato plan study.toml"), (">>> import", "import")):
            block = page.locator(".highlight", has_text=text).first
            block.hover()
            block.get_by_title("Copy to clipboard").click()
            copied = page.evaluate("() => navigator.clipboard.readText()")
            assert copied.startswith(copy)
            assert "standard_error" not in copied
            assert not [
                line for line in copied.splitlines() if line.startswith(("$", ">>>", "..."))
            ]

"""A browser and a collector: each test fails if a page of it breaks its policy.

On every page, violations of the content security policy, requests to other hosts and errors of
scripts are collected, and there must be none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import browsing
from browsing import Stage
from service.browser.screens import TIMEOUT, WATCH, Screen

if TYPE_CHECKING:  # without a browser, tests are skipped
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for one module: while it is open, no other test of this process can run an event
    loop."""
    try:
        with browsing.browser() as opened:
            from playwright.sync_api import expect

            expect.set_options(timeout=TIMEOUT)
            yield opened
    except LookupError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with browsing.open_stage(tmp_path_factory.mktemp("collector"), budget_epsilon=8.0) as stage:
        yield stage


@pytest.fixture
def options() -> dict[str, Any]:
    """The options of the browser context; a test sets its own by parametrising this."""
    return {}


@pytest.fixture
def screen(browser: Browser, stage: Stage, options: dict[str, Any]) -> Iterator[Screen]:
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT)
    context.add_init_script(WATCH)
    screen = Screen(context, context.new_page(), stage)
    context.on("page", screen.watch)
    screen.watch(screen.page)
    yield screen
    if options.get("java_script_enabled", True):
        screen.errors += screen.page.evaluate("() => window.violations ?? []")
    context.close()
    assert not screen.errors

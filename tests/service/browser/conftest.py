"""A browser and a collector: each test fails if a page of it breaks its policy.

Every page is watched: what the content security policy blocks, what goes to another host and what a
script throws is collected, and must be nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import browsing
from browsing import Stage
from service.browser.screens import PATIENCE, WATCH, Screen

if TYPE_CHECKING:  # where there is no browser, tests are skipped and not in error
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: while it is open, no other test of this process can run an event loop."""
    try:
        with browsing.browser() as opened:
            from playwright.sync_api import expect

            expect.set_options(timeout=PATIENCE)
            yield opened
    except LookupError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with browsing.staged(tmp_path_factory.mktemp("collector"), budget_epsilon=8.0) as stage:
        yield stage


@pytest.fixture
def options() -> dict[str, Any]:
    """How the screen is; a test has its own by parametrising this."""
    return {}


@pytest.fixture
def screen(browser: Browser, stage: Stage, options: dict[str, Any]) -> Iterator[Screen]:
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    context.add_init_script(WATCH)
    screen = Screen(context, context.new_page(), stage)
    context.on("page", screen.watch)
    screen.watch(screen.page)
    yield screen
    if options.get("java_script_enabled", True):
        screen.wrong += screen.page.evaluate("() => window.violations ?? []")
    context.close()
    assert not screen.wrong

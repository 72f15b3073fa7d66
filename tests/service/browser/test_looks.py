"""Accessibility of every page: with a screen reader, in light and dark, on a phone."""

from __future__ import annotations

import time
from typing import Any

import pytest

import serving
from browsing import Stage, falling_counts, values_of
from service.browser.screens import AXE, Screen
from sfumato.collector.store.store import FaultRow

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 360, "height": 740}}
LONG = "Donaudampfschifffahrtsgesellschaft" * 3


@pytest.fixture(scope="module")
def pages(stage: Stage) -> dict[str, str]:
    """The address of every page, in every state."""
    released = stage.open(LONG[:90], devices=200, purpose=LONG)
    stage.answer(LONG[:90], values_of(falling_counts(200)))
    charged = stage.open("Charged trees", trust="central", epsilon=1.0, devices=50)
    stage.answer("Charged trees", values_of(falling_counts(50)))
    serving.wait_for(lambda: stage.state(released) == "released", "the release")
    serving.wait_for(lambda: stage.state(charged) == "released", "the other release")
    failed = stage.open("Failed trees", devices=200)
    stage.finish(failed, "failed")
    failing = stage.open("Failing trees", devices=200)
    with stage.collector.store.transaction() as tx:
        tx.set_fault(FaultRow(failing, f"a task is damaged: {LONG}", 3, int(time.time()) + 850))
    collecting = stage.open("Collected trees", devices=200, terms={"lifetime_epsilon": 40.0})
    stage.answer("Collected trees", values_of(falling_counts(20)))
    studies = "/dashboard/studies"
    return {
        "studies": studies,
        "released": f"{studies}/{released}",
        "failed": f"{studies}/{failed}",
        "failing": f"{studies}/{failing}",
        "collecting": f"{studies}/{collecting}",
        "close": f"{studies}/{collecting}/close",
        "new": f"{studies}/new",
        "ledger": "/dashboard/ledger",
        "costs": "/dashboard/costs",
        "nowhere": "/dashboard/nowhere",
    }


def visit(screen: Screen, path: str) -> None:
    """Open a page and wait until its chart, if it has one, is drawn."""
    screen.open(path)
    if screen.page.locator("[data-chart]").count():
        screen.page.locator("[data-drawn] svg").wait_for()


def show_plan(screen: Screen) -> None:
    """Show a plan below the form, and the rest of the form."""
    page = screen.page
    for name, value in {"name": "T", "purpose": "P", "items": "a\nb", "epsilon": "1"}.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#devices").fill("1000")
    page.get_by_text("More settings (TOML)").click()
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_role("heading", name="Plan").wait_for()


def faults(screen: Screen) -> list[str]:
    """The faults that axe finds on the page, in light and dark."""
    screen.page.emulate_media(color_scheme="dark")
    in_dark = faults_now(screen)
    screen.page.emulate_media(color_scheme="light")
    return [*faults_now(screen), *in_dark]


def faults_now(screen: Screen) -> list[str]:
    """Rules and elements. In dark mode only the colours differ."""
    report = screen.page.evaluate(
        """() => axe.run(document, {
          resultTypes: ["violations"],
          ...(matchMedia("(prefers-color-scheme: dark)").matches
            ? {runOnly: {type: "rule", values: ["color-contrast"]}} : {}),
        })"""
    )
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in report["violations"]
        for node in rule["nodes"]
    ]


def test_no_page_has_a_fault_that_axe_finds(screen: Screen, pages: dict[str, str]) -> None:
    screen.context.add_init_script(path=AXE)
    screen.sign_in("wrong")
    assert faults(screen) == []
    screen.enter()
    for path in pages.values():
        visit(screen, path)
        assert faults(screen) == [], path
    screen.open(pages["new"])
    show_plan(screen)
    assert faults(screen) == []
    screen.page.locator("#devices").fill("0")
    screen.page.get_by_role("button", name="Show the plan").click()
    screen.page.get_by_role("alert").wait_for()
    assert faults(screen) == []


def test_axe_finds_a_fault(screen: Screen) -> None:
    """The negative control."""
    screen.context.add_init_script(path=AXE)
    screen.open("/dashboard/sign-in")
    screen.page.evaluate("() => document.querySelector('label').remove()")
    assert [fault.partition(":")[0] for fault in faults(screen)] == ["label"]
    screen.page.evaluate("() => { document.querySelector('h1').style.color = '#333' }")
    rules = [fault.partition(":")[0] for fault in faults(screen)]
    assert rules == ["label", "color-contrast"]  # a dark colour is visible in light mode


def overflow(screen: Screen) -> int:
    """By how many pixels the page is wider than its window."""
    return int(
        screen.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
    )


@pytest.mark.parametrize("options", [PHONE], ids=["phone"])
def test_on_a_phone_no_page_is_wider_than_the_screen(
    screen: Screen, pages: dict[str, str], options: dict[str, Any]
) -> None:
    screen.open("/dashboard/sign-in")
    assert overflow(screen) == 0
    screen.enter()
    for path in pages.values():
        visit(screen, path)
        assert overflow(screen) == 0, path
    screen.open(pages["new"])
    show_plan(screen)
    assert overflow(screen) == 0
    screen.page.evaluate("() => document.querySelector('main').append('w'.repeat(200))")
    screen.page.evaluate("() => { document.body.style.overflowWrap = 'normal' }")
    assert overflow(screen) > 0  # the negative control


def test_a_chart_follows_the_colours_of_the_page(screen: Screen, pages: dict[str, str]) -> None:
    screen.enter()
    fills = []
    for scheme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=scheme)
        visit(screen, pages["released"])
        fills.append(
            screen.page.locator("[data-chart] .mark-rect path").first.get_attribute("fill")
        )
    assert fills == ["#9db8cd", "#3f6887"]

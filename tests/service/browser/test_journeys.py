"""Journeys through the dashboard, in a real browser, against a real collector."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import browsing
import serving
from browsing import TREES, Stage, falling_counts, values_of
from service.browser.screens import Screen

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect

NO_SCRIPTS = pytest.mark.parametrize("options", [{"java_script_enabled": False}], ids=["plain"])


def fill(page: Page, name: str, **fields: str) -> None:
    """Fill in the form of a new study."""
    page.get_by_label("Name").fill(name)
    page.get_by_label("Purpose").fill("Which trees to plant next.")
    page.get_by_label("Items, one per line").fill("\n".join(TREES))
    for label, value in {"Epsilon": "4", "Devices": "300", **fields}.items():
        page.get_by_label(label, exact=True).fill(value)


@pytest.mark.slow
def test_without_a_study_the_page_says_how_to_start_one(browser: Browser, tmp_path: Path) -> None:
    with browsing.open_stage(tmp_path) as stage:
        page = browser.new_page()
        page.goto(stage.address)
        page.get_by_label("Token").fill(stage.token())
        page.keyboard.press("Enter")
        expect(page.get_by_text("There are no studies yet.")).to_be_visible()
        page.get_by_role("link", name="New study").click()
        expect(page.get_by_role("heading", name="New study")).to_be_visible()
        page.close()


@pytest.mark.slow
def test_a_wrong_token_is_refused_in_words(screen: Screen) -> None:
    screen.sign_in("sfu_" + "0" * 43)
    expect(screen.page.get_by_role("alert")).to_contain_text("This token is not valid.")
    expect(screen.page.get_by_label("Token")).to_be_focused()
    screen.page.get_by_label("Token").fill(screen.stage.token("analyst", "Grace"))
    screen.page.get_by_role("button", name="Sign in").click()
    expect(screen.page.get_by_text("Grace, analyst")).to_be_visible()
    screen.page.get_by_role("button", name="Sign out").click()
    expect(screen.page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_study_is_planned_started_watched_released_and_exported(
    screen: Screen, stage: Stage, tmp_path: Path
) -> None:
    page = screen.page
    screen.enter()
    screen.open("/dashboard/studies/new")
    fill(page, "Watched trees")
    page.get_by_role("button", name="Show the plan").click()
    plan = page.get_by_role("region", name="Plan")
    expect(plan).to_contain_text("4-local differential privacy for each report")
    expect(plan).to_contain_text("± ")
    assert "Watched trees" not in [study["name"] for study in stage.client.studies()]

    plan.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", name="Watched trees")).to_be_visible()
    expect(page.get_by_text("0 of 300 reports")).to_be_visible()
    page.evaluate("() => { window.stays = true }")  # until the page is reloaded

    stage.answer("Watched trees", values_of(falling_counts(120)))
    expect(page.get_by_text("120 of 300 reports")).to_be_visible()
    expect(page.get_by_role("progressbar", name="Reports")).to_have_attribute("value", "120")
    expect(page.get_by_role("status")).to_contain_text("40% of the reports")

    stage.answer("Watched trees", values_of(falling_counts(180)))
    expect(page.locator("[data-drawn] svg")).to_be_visible()
    assert page.evaluate("() => window.stays")
    expect(page.get_by_role("status")).to_contain_text("Released")
    (study,) = [row["id"] for row in stage.client.studies() if row["name"] == "Watched trees"]
    release = stage.client.release(study)
    rows = page.locator(".values tbody tr")
    expect(rows).to_have_count(len(release["estimates"]))
    expect(rows.first).to_contain_text(release["estimates"][0]["item"])
    expect(page.locator("[data-chart] .mark-rule.role-mark line")).to_have_count(20)  # intervals

    for ending in ("JSON", "CSV"):
        with page.expect_download() as download:
            page.get_by_role("link", name=ending, exact=True).click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        assert file.name == f"watched-trees.{ending.lower()}"
        assert file.stat().st_size > 100
    assert json.loads((tmp_path / "watched-trees.json").read_text("utf-8")) == release


@pytest.mark.slow
def test_an_impossible_study_is_refused_before_it_starts(screen: Screen) -> None:
    screen.enter()
    screen.open("/dashboard/studies/new")
    fill(screen.page, "Impossible trees", Devices="0")
    screen.page.get_by_role("button", name="Show the plan").click()
    expect(screen.page.get_by_role("alert")).to_contain_text("Devices must be at least 1; got 0.")
    expect(screen.page.get_by_role("button", name="Start")).to_have_count(0)


@pytest.mark.slow
def test_fields_of_another_question_or_trust_are_not_shown(screen: Screen) -> None:
    page = screen.page
    screen.enter()
    screen.open("/dashboard/studies/new")
    expect(page.get_by_label("Daily reports")).to_be_visible()
    expect(page.get_by_label("Delta")).to_be_hidden()
    expect(page.get_by_label("Alphabet")).to_be_hidden()
    expect(page.get_by_label("Clip")).to_be_hidden()
    page.get_by_role("radio", name="Central", exact=True).check()
    expect(page.get_by_label("Daily reports")).to_be_hidden()
    expect(page.get_by_label("Delta")).to_be_visible()
    page.get_by_role("radio", name="New words", exact=True).check()
    expect(page.get_by_label("Alphabet")).to_be_visible()
    expect(page.get_by_label("Items, one per line")).to_be_visible()
    page.get_by_role("radio", name="Mean", exact=True).check()
    expect(page.get_by_label("Alphabet")).to_be_hidden()
    expect(page.get_by_label("Items, one per line")).to_be_hidden()
    expect(page.get_by_label("Clip")).to_be_visible()


@pytest.mark.slow
def test_a_study_that_fails_says_why_where_it_is_watched(screen: Screen, stage: Stage) -> None:
    study = stage.open("Lonely trees", devices=300)
    screen.enter()
    screen.open(f"/dashboard/studies/{study}")
    expect(screen.page.get_by_text("0 of 300 reports")).to_be_visible()
    stage.finish(study, "failed")
    expect(screen.page.get_by_text("No device answered")).to_be_visible()
    expect(screen.page.get_by_role("status")).to_contain_text("Failed")


def press_to(page: Page, name: str, *, role: str) -> None:
    """Press Tab until the element with this name has a visible focus."""
    element = page.get_by_role(role, name=name, exact=True)  # type: ignore[arg-type]
    for _ in range(60):
        page.keyboard.press("Tab")
        if element.evaluate("element => element === document.activeElement"):
            assert element.evaluate("element => getComputedStyle(element).outlineStyle !== 'none'")
            return
    raise AssertionError(f"Tab does not lead to {name}")


@pytest.mark.slow
def test_a_study_is_made_and_closed_with_the_keyboard_alone(screen: Screen, stage: Stage) -> None:
    page, keys = screen.page, screen.page.keyboard
    screen.open("/")
    page.locator("input:focus").wait_for()
    keys.insert_text(stage.token())  # the field has the focus
    keys.press("Enter")
    page.get_by_role("heading", name="Studies", level=1).wait_for()
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    keys.press("Enter")
    press_to(page, "New study", role="link")
    keys.press("Enter")
    page.get_by_role("heading", name="New study").wait_for()
    for label, text in {
        "Name": "Typed trees",
        "Purpose": "Which trees to plant next.",
        "Items, one per line": "oak\nelm",
        "Epsilon": "4",
        "Devices": "200",
    }.items():
        press_to(page, label, role="textbox")
        keys.insert_text(text)
    press_to(page, "Show the plan", role="button")
    keys.press("Enter")
    page.get_by_role("heading", name="Plan").wait_for()
    press_to(page, "Start", role="button")
    keys.press("Enter")
    page.get_by_role("heading", name="Typed trees").wait_for()
    press_to(page, "Close now …", role="link")
    serving.wait_for(lambda: "0 of 200" in page.inner_text("main"), "the study's progress")
    keys.press("Enter")
    page.get_by_role("heading", name="Close this study?").wait_for()
    press_to(page, "Close", role="button")  # nobody answered: there is nothing to release
    keys.press("Enter")
    expect(page.get_by_text("This study failed")).to_be_visible()  # nobody answered it


@pytest.mark.slow
def test_the_focus_stays_where_it_is_while_a_page_follows_a_study(
    screen: Screen, stage: Stage
) -> None:
    study = stage.open("Focused trees", devices=300)
    screen.enter()
    screen.open("/dashboard/studies")
    link = screen.page.get_by_role("link", name="Focused trees")
    link.focus()
    stage.answer("Focused trees", values_of(falling_counts(40)))
    expect(screen.page.get_by_text("40 of 300 reports")).to_be_visible()
    expect(link).to_be_focused()
    stage.finish(study)


@pytest.mark.slow
@NO_SCRIPTS
def test_everything_but_charts_works_without_scripts(
    screen: Screen, stage: Stage, options: dict[str, Any]
) -> None:
    page = screen.page
    screen.sign_in()
    page.get_by_role("link", name="New study").click()
    fill(page, "Plain trees", Devices="100")
    page.get_by_role("button", name="Show the plan").click()
    expect(page.get_by_role("heading", name="Plan")).to_be_visible()
    expect(page.get_by_label("Name")).to_have_value("Plain trees")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("0 of 100 reports")).to_be_visible()
    stage.answer("Plain trees", values_of(falling_counts(80)))
    page.reload()
    expect(page.get_by_text("80 of 100 reports")).to_be_visible()
    page.get_by_role("link", name="Close now").click()
    page.get_by_role("button", name="Close and release").click()
    expect(page.get_by_role("heading", name="Plain trees")).to_be_visible()
    (study,) = [row["id"] for row in stage.client.studies() if row["name"] == "Plain trees"]
    serving.wait_for(lambda: stage.state(study) == "released", "the release")
    page.reload()
    expect(page.locator(".values tbody tr")).to_have_count(len(TREES))
    expect(page.get_by_text("The chart needs JavaScript")).to_be_visible()


@pytest.mark.slow
def test_a_page_whose_session_ends_goes_to_the_sign_in_page(screen: Screen, stage: Stage) -> None:
    study = stage.open("Left trees", devices=300)
    screen.enter()
    screen.open(f"/dashboard/studies/{study}")
    expect(screen.page.get_by_text("0 of 300 reports")).to_be_visible()
    screen.context.clear_cookies()
    expect(screen.page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert re.search(f"next=/dashboard/studies/{study}$", screen.page.url)
    stage.finish(study, "failed")


def test_what_breaks_the_policy_is_noticed(screen: Screen) -> None:
    """The negative control of the checks in every test."""
    screen.enter()
    screen.open("/dashboard/studies")
    with screen.page.expect_event("pageerror"):
        screen.page.evaluate(
            """async () => {
              document.body.insertAdjacentHTML("beforeend", "<p style='color: red'>");
              await fetch("http://127.0.0.1:1/").catch(() => null);
              setTimeout(() => { throw new Error("on purpose") });
            }"""
        )
    assert "script: on purpose" in screen.errors
    violations = screen.page.evaluate("() => window.violations")
    assert {each.partition(":")[0] for each in violations} == {"style-src-attr", "connect-src"}
    assert any(each.startswith("console: ") for each in screen.errors)
    screen.errors.clear()
    screen.page.evaluate("() => { window.violations = [] }")

"""The contents of the pages: progress, releases and costs."""

from __future__ import annotations

import html
import io
import json
import re
import time
from dataclasses import replace
from decimal import Decimal

import pyarrow.csv
import pyarrow.parquet
import pytest

import serving
from browsing import TREES, Stage, falling_counts, values_of
from service.dashboard.visiting import Visitor
from sfumato.collector import studies
from sfumato.collector.store.store import FaultRow
from sfumato.dashboard.queries import LedgerView
from sfumato.device import passcodes
from sfumato.privacy.accounting import epsilon_text

EVIL = '<script>alert(1)</script>" onload="x'


def page_text(text: str) -> str:
    """The visible text of a page."""
    plain = re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<head>.*</head>", "", text))
    return re.sub(r"\s+", " ", html.unescape(plain))


@pytest.fixture(scope="module")
def study_id(stage: Stage) -> str:
    """The id of a study that was answered and released."""
    study = stage.open("Released trees", devices=500)
    stage.answer("Released trees", values_of(falling_counts(500)))
    serving.wait_for(lambda: stage.state(study) == "released", "the release")
    return study


def test_before_the_first_study_a_page_says_how_to_start_one(
    stage: Stage, analyst: Visitor, admin: Visitor
) -> None:
    assert stage.collector.public_key in analyst.get("/dashboard/studies").text
    assert "There are no studies yet" in admin.get("/dashboard/studies").text
    assert 'href="/dashboard/studies/new"' in admin.get("/dashboard/studies").text
    assert "sfumato study create" in analyst.get("/dashboard/studies").text
    assert 'href="/dashboard/studies/new"' not in analyst.get("/dashboard/studies").text
    assert "There are no charges" in analyst.get("/dashboard/ledger").text
    assert "There are no studies yet" in analyst.get("/dashboard/costs").text


def test_a_list_shows_how_far_each_study_is(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Listed trees", devices=400)
    stage.answer("Listed trees", values_of(falling_counts(100)))
    page = analyst.get("/dashboard/studies").text
    assert "100 of 400 reports" in page_text(page)
    assert 'hx-trigger="every 2s"' in page
    stage.finish(study)


def test_a_study_that_is_over_is_not_asked_for_again_and_again(
    analyst: Visitor, study_id: str
) -> None:
    assert "hx-trigger" not in analyst.get(f"/dashboard/studies/{study_id}").text


def test_a_study_that_collects_says_what_it_asks_and_promises(
    stage: Stage, analyst: Visitor, admin: Visitor
) -> None:
    study = stage.open("Asked trees", devices=1_000, terms={"closes": 40_000})
    stage.answer("Asked trees", values_of(falling_counts(30)))
    state = stage.client.study(study)
    page = page_text(analyst.get(f"/dashboard/studies/{study}").text)
    assert all(line in page for line in state["privacy"]["statement"])
    assert "30 of 1,000 reports" in page
    assert "after 2079-07-08" in page
    assert state["plan"]["algorithm"] in page
    assert f"{state['plan']['predicted']['standard_error']:.4g}" in page
    assert "Close now" not in page
    assert "Close now" in page_text(admin.get(f"/dashboard/studies/{study}").text)
    stage.finish(study)


def test_a_release_is_shown_with_its_own_promise(
    stage: Stage, analyst: Visitor, study_id: str
) -> None:
    """It does not cover how long the release took; with shuffling it has a second guarantee."""
    planned, released = stage.client.study(study_id), stage.client.release(study_id)
    page = page_text(analyst.get(f"/dashboard/studies/{study_id}").text)
    assert set(released["privacy"]["statement"]) - set(planned["privacy"]["statement"])
    assert all(line in page for line in released["privacy"]["statement"])


def test_a_study_with_a_passcode_says_so(stage: Stage, analyst: Visitor) -> None:
    digest = passcodes.digest(passcodes.create()).hex()
    ids = [
        stage.open(f"Trees {k}", devices=500, terms=terms)
        for k, terms in enumerate(({}, {"passcode_digest": digest}))
    ]
    pages = [analyst.get(f"/dashboard/studies/{study}").text for study in ids]
    assert ["only devices that have the passcode" in page for page in pages] == [False, True]
    assert digest not in pages[1]
    for study in ids:
        stage.finish(study, "failed")  # nobody answered


def test_rejected_reports_are_shown_by_reason(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Rejected trees", devices=1_000)
    (task,) = stage.client.study(study)["tasks"]
    bad = [b"no report", b"no report either"]
    body = b"".join(len(part).to_bytes(4, "little") + part for part in bad)
    answer = serving.ask(stage.address, "POST", f"/v1/tasks/{task['id']}/reports", body)
    assert answer.json() == {"rejected": {"malformed": 2}}
    page = page_text(analyst.get(f"/dashboard/studies/{study}").text)
    assert "Rejected: malformed 2" in page
    stage.finish(study, "failed")


def test_a_study_that_failed_says_why(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Nobody's trees", devices=1_000)
    stage.finish(study, "failed")
    page = page_text(analyst.get(f"/dashboard/studies/{study}").text)
    assert "This study failed, and nothing is released." in page
    assert "No device answered, so there is nothing to estimate from." in page


def test_a_failing_study_says_so_and_an_admin_may_try_it_at_once(
    stage: Stage, analyst: Visitor, admin: Visitor
) -> None:
    study, store = stage.open("Failing trees", devices=1_000), stage.collector.store
    fault = FaultRow(study, "internal error: MemoryError", 3, int(time.time()) + 600)
    with store.transaction() as tx:
        tx.set_fault(fault)
    assert "Failing: internal error: MemoryError." in page_text(
        analyst.get("/dashboard/studies").text
    )
    page, path = analyst.get(f"/dashboard/studies/{study}").text, f"/dashboard/studies/{study}"
    assert "Internal error: MemoryError. 3 attempts failed in a row" in page_text(page)
    assert "Try now" not in page
    assert "Try now" in admin.get(path).text
    assert analyst.post(f"{path}/retry", {}).status_code == 403
    answer = admin.post(f"{path}/retry", {})
    assert (answer.status_code, answer.headers["location"]) == (303, path)
    assert "failed in a row" not in admin.get(path).text
    stage.finish(study, "failed")


def test_a_failed_study_with_reports_may_be_released_after_all(
    stage: Stage, analyst: Visitor, admin: Visitor
) -> None:
    study, store = stage.open("Mended trees", devices=1_000), stage.collector.store
    stage.answer("Mended trees", values_of(falling_counts(30)))
    with store.transaction() as tx:
        studies.end(tx, study, "failed", "internal error: MemoryError")
    path = f"/dashboard/studies/{study}"
    assert "Release after all" not in analyst.get(path).text
    assert "Release after all" in admin.get(path).text
    assert admin.post(f"{path}/retry", {}).status_code == 303
    serving.wait_for(lambda: stage.state(study) == "released", "the release")
    assert stage.client.release(study)["cost"]["devices"] == 30


def test_a_release_has_an_interval_for_every_estimate(
    stage: Stage, analyst: Visitor, study_id: str
) -> None:
    estimates = stage.client.release(study_id)["estimates"]
    page = analyst.get(f"/dashboard/studies/{study_id}").text
    values = page[page.index('id="values"') :]
    rows = re.findall(r'<th scope="row"><bdi>(.*?)</bdi></th>(.*?)</tr>', values, re.DOTALL)
    assert [name for name, _ in rows] == [row["item"] for row in estimates]
    for (_, cells), row in zip(rows, estimates, strict=True):
        value, half, low, high = (
            float(cell.replace(",", "")) for cell in re.findall(r'number[^"]*">(.*?)<', cells)
        )
        for rounded, true in (
            (value, row["count"]),
            (half, (row["high"] - row["low"]) / 2),
            (low, row["low"]),
            (high, row["high"]),
        ):
            assert abs(rounded - true) <= 0.5
    assert f"Predicted Actual Reports 500 {sum(falling_counts(500).values())}" in page_text(page)


def test_a_chart_has_the_largest_estimates_with_their_intervals(
    stage: Stage, analyst: Visitor, study_id: str
) -> None:
    estimates = stage.client.release(study_id)["estimates"]
    chart = analyst.get(f"/dashboard/studies/{study_id}/chart").json()
    values = chart["data"]["values"]
    assert [(each["label"], each["value"]) for each in values] == [
        (row["item"], row["count"]) for row in estimates[:20]
    ]
    assert [(each["low"], each["high"]) for each in values] == [
        (row["low"], row["high"]) for row in estimates[:20]
    ]
    assert "$schema" not in chart  # it would be a URL


def test_a_release_can_be_downloaded_in_every_format(
    stage: Stage, analyst: Visitor, study_id: str
) -> None:
    release = stage.client.release(study_id)
    page = analyst.get(f"/dashboard/studies/{study_id}").text
    files = {}
    for path in re.findall(r'href="(/dashboard/studies/\w+/release\.\w+)"', page):
        answer = analyst.get(path)
        ending = path.rpartition(".")[2]
        name = f'attachment; filename="released-trees.{ending}"'
        assert answer.headers["content-disposition"] == name
        files[ending] = answer.content
    assert files.keys() == {"json", "csv", "parquet", "png", "html"}
    assert json.loads(files["json"]) == release
    table = pyarrow.csv.read_csv(io.BytesIO(files["csv"]))
    assert table["item"].to_pylist() == [row["item"] for row in release["estimates"]]
    table = pyarrow.parquet.read_table(io.BytesIO(files["parquet"]))
    about = json.loads(table.schema.metadata[b"sfumato"])
    assert about["privacy"] == release["privacy"]
    assert files["png"].startswith(b"\x89PNG")
    assert analyst.get(f"/dashboard/studies/{study_id}/release.exe").status_code == 404


def test_a_release_that_does_not_exist_yet_is_not_found(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Young trees", devices=1_000)
    for path in ("chart", "release.json"):
        assert analyst.get(f"/dashboard/studies/{study}/{path}").status_code == 404
    stage.finish(study, "failed")


def test_a_long_release_is_shown_page_by_page(stage: Stage, analyst: Visitor) -> None:
    items = [*TREES, *(f"shrub {number}" for number in range(600 - len(TREES)))]
    study = stage.open("Many trees", items=items, trust="central", epsilon=0.2, devices=30)
    stage.answer("Many trees", values_of(falling_counts(30)))
    stage.finish(study)
    pages = [analyst.get(f"/dashboard/studies/{study}?page={page}").text for page in range(1, 7)]
    names = [name for page in pages for name in re.findall(r"<bdi>([\w ]+)</bdi></th>", page)]
    assert len(names) == 600
    assert set(names) == set(items)
    assert "501 to 600 of 600, page 6 of 6" in page_text(pages[5])
    for wrong in ("7", "0", "-1", "x", "1e9"):
        answer = analyst.get(f"/dashboard/studies/{study}?page={wrong}")
        assert answer.status_code == 404


def test_names_and_items_are_shown_as_text_and_not_as_markup(
    stage: Stage, analyst: Visitor
) -> None:
    items = [*TREES, EVIL, "$x_{"]
    study = stage.open(EVIL, items=items, purpose=EVIL, trust="central", epsilon=0.2, devices=30)
    stage.answer(EVIL, values_of(falling_counts(30)))
    for path in ("studies", f"studies/{study}", "ledger", "costs"):
        assert "<script>alert" not in analyst.get(f"/dashboard/{path}").text
    stage.finish(study)
    page = analyst.get(f"/dashboard/studies/{study}").text
    assert "<script>alert" not in page
    assert html.escape(EVIL, quote=False).partition('"')[0] in page
    file = analyst.get(f"/dashboard/studies/{study}/release.png")
    assert file.content.startswith(b"\x89PNG")  # no formula is made of a dollar sign
    assert 'filename="script-alert-1-script-onload-x.png"' in file.headers["content-disposition"]


def test_closing_what_nobody_answered_says_that_it_fails(stage: Stage, admin: Visitor) -> None:
    study = stage.open("Unseen trees", trust="central", epsilon=0.1, devices=300)
    page = page_text(admin.get(f"/dashboard/studies/{study}/close").text)
    assert "There are no reports yet , so the study fails, and nothing is released." in page
    assert "of the budget" not in page
    stage.finish(study, "failed")


def test_closing_asks_first_and_says_what_it_costs(
    stage: Stage, admin: Visitor, analyst: Visitor
) -> None:
    study = stage.open("Closed trees", trust="central", epsilon=0.5, devices=300)
    stage.answer("Closed trees", values_of(falling_counts(60)))
    address = f"/dashboard/studies/{study}/close"
    page = page_text(admin.get(address).text)
    assert "the result from 60 reports is released" in page
    assert "spends epsilon 0.5 of the budget" in page
    assert "The plan assumes 300 devices" in page
    assert stage.state(study) == "collecting"
    assert analyst.post(address, {}).status_code == 403
    assert stage.state(study) == "collecting"
    assert admin.post(address, {}).headers["location"] == f"/dashboard/studies/{study}"
    serving.wait_for(lambda: stage.state(study) == "released", "the release")
    assert admin.get(address).status_code == 303  # there is nothing left to close


def test_the_ledger_has_every_charge_and_what_is_left(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Charged trees", trust="central", epsilon=1.0, devices=30)
    stage.answer("Charged trees", values_of(falling_counts(30)))
    stage.finish(study)
    spent = float(epsilon_text(stage.client.ledger()["spent"]))
    page = page_text(analyst.get("/dashboard/ledger").text)
    assert f"Epsilon spent {spent:g} Epsilon left {8 - spent:.10g} Epsilon limit 8 " in page
    assert re.search(r"Charged trees every round laplace, scale 1 1 1\b", page)


def test_what_is_spent_and_left_of_a_budget_adds_up_to_its_limit() -> None:
    view = LedgerView(limit=3.0, delta=1e-6, spent=0.99532, charges=(), local=())
    assert epsilon_text(view.spent) == "0.9954"
    assert view.left == Decimal("2.0046")
    assert replace(view, limit=0.5).left == 0


def test_a_report_that_is_sent_twice_is_shown_once(stage: Stage, admin: Visitor) -> None:
    study = stage.open("Repeated trees", devices=1_000)
    values = values_of(falling_counts(30))
    body = stage.answer("Repeated trees", values)
    (task,) = stage.client.study(study)["tasks"]
    assert serving.ask(stage.address, "POST", f"/v1/tasks/{task['id']}/reports", body).status == 201
    stage.finish(study)
    state = stage.client.study(study)
    assert (state["received"], state["counted"], state["repeated"]) == (60, 30, 30)
    page = page_text(admin.get(f"/dashboard/studies/{study}").text)
    assert "round 0 done 30 1,000" in page
    assert "Received 60 Counted 30 Duplicates (counted once) 30" in page


def test_the_ledger_says_what_local_studies_cost_a_device_in_a_day(
    stage: Stage, analyst: Visitor
) -> None:
    study = stage.open("Daily trees", devices=1_000, epsilon=1.5, daily_reports=2)
    page = page_text(analyst.get("/dashboard/ledger").text)
    assert "Daily trees collecting 1.5 2 3 no limit" in page
    assert "at most epsilon 3 per day" in page
    stage.finish(study, "failed")
    assert "at most epsilon 0 per day" in page_text(analyst.get("/dashboard/ledger").text)


def test_costs_are_in_bytes_by_study(stage: Stage, analyst: Visitor, study_id: str) -> None:
    predicted = stage.client.study(study_id)["plan"]["predicted"]["bytes_per_device"]
    page = page_text(analyst.get("/dashboard/costs").text)
    assert f"Released trees released {predicted} bytes 1 500 {predicted / 2:.1f} kB" in page


@pytest.mark.parametrize("study", ["0" * 32, "x", "..", "%00"])
def test_a_study_that_is_not_there_is_not_found(analyst: Visitor, study: str) -> None:
    answer = analyst.get(f"/dashboard/studies/{study}")
    assert answer.status_code in (303, 404)  # ".." is the list's own address, to an HTTP client
    if answer.status_code == 404:
        assert answer.headers["content-type"].startswith("text/html")


def test_a_study_that_was_deleted_keeps_its_release(stage: Stage, analyst: Visitor) -> None:
    study = stage.open("Felled trees", trust="central", epsilon=0.2, devices=30)
    stage.answer("Felled trees", values_of(falling_counts(30)))
    stage.finish(study)
    stage.client.delete_study(study)
    page = page_text(analyst.get(f"/dashboard/studies/{study}").text)
    assert "were deleted" in page
    assert "Received 30 Counted 30" in page
    assert "All values" in page

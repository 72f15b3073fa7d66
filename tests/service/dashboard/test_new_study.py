"""A new study by a form: planned first, and started as it was planned."""

from __future__ import annotations

import io
import re
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from browsing import TREES, Stage
from service.dashboard.test_pages import page_text
from service.dashboard.visiting import Visitor
from sfumato.collector.requests import Request
from sfumato.dashboard.fields import GROUPS, applies
from sfumato.dashboard.forms import File, Form
from sfumato.dashboard.new_study import digest_of, items_of, request_of
from sfumato.errors import DataError, StudyError
from sfumato.study import QUESTIONS

COMBINATIONS = [(name, trust) for name, facts in QUESTIONS.items() for trust in facts.collected]

NEW, STUDIES = "/dashboard/studies/new", "/dashboard/studies"
FIELDS = {
    "name": "Park trees",
    "purpose": "Which trees to plant next.",
    "question": "frequencies",
    "trust": "local",
    "items": "\r\n".join(TREES),
    "epsilon": "4",
    "devices": "1,000",
}


def plan_digest(visitor: Visitor, fields: dict[str, str], **options: Any) -> str:
    """The digest of the plan on the page."""
    answer = visitor.post(NEW, fields, **options)
    assert answer.status_code == 200, page_text(answer.text)
    (digest,) = re.findall(r'name="planned" value="([0-9a-f]{64})"', answer.text)
    return str(digest)


def test_nothing_starts_when_a_plan_is_shown(stage: Stage, admin: Visitor) -> None:
    answer = admin.post(NEW, FIELDS)
    assert "<h2>Plan</h2>" in answer.text
    assert "4-local differential privacy" in answer.text
    assert not [study for study in stage.client.studies() if study["name"] == "Park trees"]


def test_a_study_starts_as_it_was_planned(stage: Stage, admin: Visitor) -> None:
    fields = FIELDS | {"daily_reports": "2", "lifetime_epsilon": "40", "closes": "2099-12-31"}
    digest = plan_digest(admin, fields)
    stage.offers()  # the collector has them at hand for a while
    answer = admin.post(STUDIES, fields | {"planned": digest})
    offers = [offer for offer in stage.offers() if offer.study == "Park trees"]
    study = stage.client.study(answer.headers["location"].rpartition("/")[2])
    assert study["name"] == "Park trees"
    assert study["study"]["devices"] == 1_000
    assert study["plan"]["parameters"]["items"] == len(TREES)
    assert study["terms"]["daily_reports"] == 2
    assert study["terms"]["lifetime_epsilon"] == 40
    assert study["terms"]["closes"] == (date(2099, 12, 31) - date(1970, 1, 1)).days
    assert len(offers) == 1
    stage.finish(study["id"], "failed")


def test_a_study_that_was_changed_after_its_plan_is_shown_again(
    stage: Stage, admin: Visitor
) -> None:
    fields = FIELDS | {"name": "Changed trees"}
    digest = plan_digest(admin, fields)
    for changed in ({"epsilon": "8"}, {"items": "oak\nelm"}, {"closes": "2099-12-31"}):
        answer = admin.post(STUDIES, fields | changed | {"planned": digest})
        assert answer.status_code == 200
        assert "has changed since it was planned" in answer.text
    assert "Changed trees" not in [study["name"] for study in stage.client.studies()]
    answer = admin.post(STUDIES, fields | {"name": "Named trees", "planned": digest})
    assert answer.status_code == 303  # what it is called changes no plan
    stage.finish(answer.headers["location"].rpartition("/")[2], "failed")


def test_a_script_gets_the_plan_alone(admin: Visitor) -> None:
    admin.headers["HX-Request"] = "true"
    answer = admin.post(NEW, FIELDS)
    assert answer.status_code == 200
    assert "<html" not in answer.text
    assert "<h2>Plan</h2>" in answer.text
    answer = admin.post(NEW, FIELDS | {"devices": "0"})
    assert answer.status_code == 422
    assert "<html" not in answer.text
    assert "Devices must be at least 1; got 0." in answer.text


@pytest.mark.parametrize(
    ("changed", "message", "wrong"),
    [
        ({"devices": "many"}, "Devices must be a whole number; got 'many'.", "devices"),
        ({"epsilon": "-1"}, "Epsilon must be above 0", "epsilon"),
        ({"epsilon": ""}, "The study must have epsilon.", None),
        ({"items": ""}, "Frequencies need a list of items", None),
        ({"closes": "soon"}, "Closes must be a date; got 'soon'.", "closes"),
        ({"toml": "a ="}, "The study is not TOML", None),
        ({"toml": "colour = 1"}, "Unknown key colour in the study.", None),
        ({"toml": 'dictionary = "/etc/passwd"'}, "Dictionary is for files", None),
        ({"purpose": ""}, "Purpose must be one line", "purpose"),
    ],
)
def test_what_is_wrong_is_said_and_what_was_typed_is_kept(
    admin: Visitor, changed: dict[str, str], message: str, wrong: str | None
) -> None:
    fields = FIELDS | {"name": "Wrong trees"} | changed
    path = NEW
    if "purpose" in changed:
        path, fields = STUDIES, fields | {"planned": plan_digest(admin, fields)}
    answer = admin.post(path, fields)
    assert answer.status_code == 422
    assert message in page_text(answer.text)
    assert 'value="Wrong trees"' in answer.text
    invalid = re.findall(r'id="(\w+)"[^>]*aria-invalid="true"', answer.text)
    assert invalid == ([] if wrong is None else [wrong])


def test_a_name_that_is_taken_is_said_beside_the_form(stage: Stage, admin: Visitor) -> None:
    study = stage.open("Taken trees", devices=999)
    fields = FIELDS | {"name": "Taken trees"}
    answer = admin.post(STUDIES, fields | {"planned": plan_digest(admin, fields)})
    assert answer.status_code == 409
    assert "Another study has this name" in page_text(answer.text)
    stage.finish(study, "failed")


def test_a_budget_that_does_not_allow_it_is_said_beside_the_form(admin: Visitor) -> None:
    fields = FIELDS | {"name": "Dear trees", "trust": "central", "epsilon": "30"}
    answer = admin.post(STUDIES, fields | {"planned": plan_digest(admin, fields)})
    assert answer.status_code == 409
    assert "This budget allows epsilon 8" in page_text(answer.text)


def test_a_file_can_be_chosen_and_is_there_when_the_form_comes_back(admin: Visitor) -> None:
    fields = FIELDS | {"items": ""}
    file = {"dictionary": ("trees.txt", "\n".join(TREES).encode())}
    answer = admin.post(NEW, fields, files=file)
    assert answer.status_code == 200
    (text,) = re.findall(r'<textarea id="items"[^>]*>(.*?)</textarea>', answer.text, re.DOTALL)
    assert text.split() == TREES


def form(files: dict[str, File] | None = None, **texts: str) -> Form:
    return Form({"question": "frequencies", "trust": "local", **texts}, files or {})


@pytest.mark.parametrize("ending", ["csv", "parquet", "txt"])
def test_a_dictionary_is_read_from_files_of_each_kind(ending: str) -> None:
    file = io.BytesIO()
    if ending == "parquet":
        pa.parquet.write_table(pa.table({"tree": ["oak", "elm"], "height": [20, 30]}), file)
    else:
        file.write(
            b"tree,height\noak,20\nelm,30\n" if ending == "csv" else b"\xef\xbb\xbfoak\n elm"
        )
    file_in_form = File(f"Trees.{ending.upper()}", file.getvalue())
    assert items_of(form({"dictionary": file_in_form})) == ["oak", "elm"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trees.csv", b""),
        ("trees.csv", b'"oak'),
        ("trees.parquet", b"PAR1"),
        ("trees.bin", b"\xff\xfe\x00"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused(name: str, content: bytes) -> None:
    with pytest.raises(DataError):
        items_of(form({"dictionary": File(name, content)}))


def test_items_are_pasted_or_in_a_file_and_not_both() -> None:
    with pytest.raises(DataError, match="got both"):
        items_of(form({"dictionary": File("a.txt", b"elm")}, items="oak"))


def test_empty_fields_and_those_of_another_trust_say_nothing() -> None:
    request = request_of(
        form(epsilon="1", delta="1e-9", word_length="5", devices="", threshold=" ")
    )
    assert request["study"] == {"question": "frequencies", "trust": "local", "epsilon": 1.0}
    request = request_of(form(trust="central", delta="1e-9", daily_reports="3"))
    assert request["study"] == {"question": "frequencies", "trust": "central", "delta": 1e-9}


def test_a_dictionary_that_the_question_has_no_use_for_is_left_out() -> None:
    assert request_of(form(question="heavy_hitters", items="oak"))["items"] is None
    assert request_of(form(question="new_words", items="oak"))["items"] == ["oak"]


def test_toml_goes_before_the_fields() -> None:
    text = 'trust = "central"\nepsilon = inf\ncloses = 2099-12-31\npublish = "significant"'
    request = request_of(form(epsilon="1", delta="1e-9", daily_reports="3", toml=text))
    assert request["study"] == {
        "question": "frequencies",
        "trust": "central",
        "epsilon": float("inf"),
        "delta": 1e-9,
        "publish": "significant",
    }
    assert request["closes"] == 47_481
    request = request_of(form(toml=f'passcode_digest = "{"ab" * 32}"'))
    assert request["passcode_digest"] == "ab" * 32
    assert len(digest_of(request)) == 64


@pytest.mark.parametrize("toml", ["devices = " + "1" * 5_000, "a = " + "[" * 3_000, "devices ="])
def test_toml_that_cannot_be_read_is_refused(toml: str) -> None:
    with pytest.raises(StudyError, match="the study is not TOML"):
        request_of(form(toml=toml))


@pytest.mark.parametrize(
    "toml",
    ["closes = 2099-12-31T10:00:00", "minimum = 2.5", 'open_seconds = "long"', "closes = true"],
)
def test_terms_in_toml_that_are_no_whole_numbers_are_refused(toml: str) -> None:
    request = request_of(form(toml=toml))
    assert len(digest_of(request)) == 64
    with pytest.raises(StudyError, match=f"{toml.split()[0]} must be a whole number"):
        Request.from_mapping(request)


def test_a_number_that_is_none_is_refused_by_the_name_of_its_field() -> None:
    for field in (field for _, group in GROUPS for field in group if field.kind != "text"):
        refused = 0
        for question, trust in COMBINATIONS:
            form = Form({"question": question, "trust": trust, field.name: "x"})
            if applies(field, question, trust):
                with pytest.raises(StudyError, match=f"{field.name} must be a"):
                    request_of(form)
                refused += 1
        assert refused > 0


def test_fields_that_do_not_apply_are_hidden_by_the_style(admin: Visitor) -> None:
    (address,) = re.findall(r'rel="stylesheet" href="([^"]+)"', page := admin.get(NEW).text)
    style = admin.get(address).text
    for question, trust in COMBINATIONS:
        choice = f"form:has(#question-{question}:checked):has(#trust-{trust}:checked) "
        (classes,) = re.findall(re.escape(choice) + r":is\(([^)]*)\) { display: none; }", style)
        names = {name.strip().removeprefix(".for-") for name in classes.split(",")}
        fields = [field for _, group in GROUPS for field in group]
        assert names - {"items"} == {
            field.name for field in fields if not applies(field, question, trust)
        }
        assert ("items" in names) == (QUESTIONS[question].dictionary == "none")
        assert all(f"for-{name}" in page for name in names)


def test_a_form_that_nobody_has_filled_in_is_empty(admin: Visitor) -> None:
    page = admin.get(NEW).text
    assert re.findall(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL) == ["", ""]
    values = re.findall(r'<input id="[^>]*? value="([^"]*)"', page)
    assert set(values) == {""}


@pytest.mark.parametrize("text", ["1e400", "-1e400", "Infinity", "nan", "-inf"])
def test_a_number_without_bound_promises_nothing_silently(text: str) -> None:
    with pytest.raises(StudyError):
        request_of(form(epsilon=text))
    if text in ("1e400", "-1e400", "nan", "-inf"):  # the others are not TOML
        with pytest.raises(StudyError, match="finite"):
            request_of(form(toml=f"epsilon = {text}"))


def test_plans_of_different_studies_go_by_different_digests() -> None:
    requests = [request_of(form(epsilon=epsilon, items="oak")) for epsilon in ("1", "2", "inf")]
    assert len({digest_of(request) for request in requests}) == 3
    assert digest_of(requests[0]) == digest_of(requests[0] | {"name": "another"})

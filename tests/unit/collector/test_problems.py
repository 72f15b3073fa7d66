"""One table of problems, which both sides read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato import errors
from sfumato.collector.problems import KINDS, Problem, error_of
from sfumato.errors import NotReadyError, ServiceError, SfumatoError, StoreFull, StudyError

ROOT = Path(__file__).resolve().parents[3]
CLASSES = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SfumatoError)
]


@pytest.mark.parametrize("code", KINDS)
def test_a_problem_is_the_same_error_again_for_a_client(code: str) -> None:
    problem = Problem(code, "what happened", hint="what to do")
    error = error_of(problem.status, json.loads(json.dumps(problem.body())))
    assert type(error) is KINDS[code].error
    assert (str(error), error.hint) == ("what happened", "what to do")


@pytest.mark.parametrize("code", KINDS)
def test_a_problem_without_details_says_the_sentence_of_the_table(code: str) -> None:
    body = Problem(code).body()
    assert body == {"status": KINDS[code].status, "code": code, "title": KINDS[code].title}
    assert str(error_of(body["status"], body)) == KINDS[code].title


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_of_ours_is_answered_with_a_status_of_an_error(cls: type[SfumatoError]) -> None:
    assert 400 <= Problem.of(cls("it went wrong")).status < 600


def test_an_error_of_a_store_names_no_file_and_no_host() -> None:
    problem = Problem.of(StoreFull("no room for /srv/secret.db", hint="look at db.internal"))
    assert (problem.code, problem.status) == ("store-full", 507)
    assert "secret" not in json.dumps(problem.body())
    assert "internal" not in json.dumps(problem.body())


def test_a_mistake_in_a_study_is_described_in_full() -> None:
    problem = Problem.of(StudyError("epsilon must be above 0; got -1", hint="raise it"))
    assert problem.code == "invalid-study"
    assert problem.body()["detail"] == "epsilon must be above 0; got -1"
    assert problem.body()["hint"] == "raise it"


def test_an_error_that_is_not_in_the_table_gives_no_details() -> None:
    problem = Problem.of(errors.MismatchError("tables of 5f5f5f5f do not add"))
    assert problem.body() == {
        "status": 500,
        "code": "internal",
        "title": KINDS["internal"].title,
    }


def test_a_client_that_must_wait_learns_for_how_long() -> None:
    assert Problem("busy", retry_after_seconds=7).headers()["Retry-After"] == "7"
    assert Problem.of(errors.StoreUnavailable("away")).headers()["Retry-After"]


def test_a_release_that_is_not_ready_has_an_error_of_its_own() -> None:
    assert isinstance(error_of(404, Problem("not-ready").body()), NotReadyError)


@pytest.mark.parametrize("body", [None, [], "text", {}, {"code": "new"}, {"code": 1}])
def test_an_answer_of_another_server_is_a_service_error(body: object) -> None:
    assert type(error_of(502, body)) is ServiceError


def test_every_problem_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    rows = [f"| `{code}` | {kind.status} | {kind.title} |" for code, kind in KINDS.items()]
    assert not [row for row in rows if row not in text]

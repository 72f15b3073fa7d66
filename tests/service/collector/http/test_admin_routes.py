"""Administration over real HTTP: roles, and a study from its opening to its release."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from databases import execute
from serving import (
    KEY,
    TASK,
    Answer,
    Faulty,
    ask,
    body,
    opened,
    read,
    served,
    settings,
    undocumented_answers,
    wait_for,
)
from sfumato.collector import tokens
from sfumato.collector.http.app import create_app
from sfumato.collector.http.service import Service
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.store.store import FaultRow, Store
from sfumato.collector.tokens import Role
from sfumato.device.offers import public_key, verify
from sfumato.errors import StoreUnavailable
from sfumato.flow.contribute import local_report
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask
from sfumato.privacy import SystemRng

READY = {"ready": True, "failing_studies": 0, "worker": "active"}
STUDY = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 20}
REQUEST: dict[str, Any] = {
    "name": "Street trees",
    "purpose": "Which trees to plant next.",
    "study": STUDY,
    "items": ["oak", "elm", "fir"],
}
ROOT = Path(__file__).resolve().parents[4]
NOBODYS = "0" * 32

# Every route that needs a token, and its role.
RULES: dict[tuple[str, str], Role] = {
    ("GET", "/v1/me"): "analyst",
    ("POST", "/v1/plan"): "analyst",
    ("POST", "/v1/studies"): "admin",
    ("GET", "/v1/studies"): "analyst",
    ("GET", "/v1/studies/{study_id}"): "analyst",
    ("POST", "/v1/studies/{study_id}/close"): "admin",
    ("PUT", "/v1/studies/{study_id}/passcode"): "admin",
    ("POST", "/v1/studies/{study_id}/retry"): "admin",
    ("DELETE", "/v1/studies/{study_id}"): "admin",
    ("GET", "/v1/studies/{study_id}/release"): "analyst",
    ("GET", "/v1/studies/{study_id}/model"): "analyst",
    ("GET", "/v1/ledger"): "analyst",
    ("GET", "/metrics"): "analyst",
}
OPEN = {
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/offers"),
    ("GET", "/v1/dictionaries/{digest}"),
    ("GET", "/v1/models/{digest}"),
    ("POST", "/v1/tasks/{task_id}/reports"),
    ("POST", "/v1/tasks/{task_id}/join"),
    ("GET", "/v1/tickets"),
    ("PUT", "/v1/rounds/{round_id}/{phase}/{member}"),
    ("GET", "/v1/rounds/{round_id}/{phase}/{member}"),
}


@dataclass(frozen=True)
class Administered:
    """A collector with its worker, and a token of each role."""

    collector: CollectorServer
    tokens: dict[str, str]

    def ask(self, method: str, path: str, content: Any = None, *, role: Role = "admin") -> Answer:
        data = None if content is None else json.dumps(content)
        return ask(self.collector.address, method, path, data, token=self.tokens[role])


@pytest.fixture(scope="module")
def administered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Administered]:
    folder = tmp_path_factory.mktemp("collector")
    with running(settings(folder, study_bytes=100_000, upload_seconds=0.5)) as collector:
        yield Administered(
            collector,
            {
                role: tokens.create(collector.store, role=role, name=role, days=1)[1]
                for role in ("admin", "analyst")
            },
        )
    assert not undocumented_answers(collector.service)


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path of an application, those of included routers too."""
    for route in iter_route_contexts(app.routes):
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path or ""


def test_every_route_has_a_rule(administered: Administered) -> None:
    service = Service(administered.collector.store, settings(Path()), key=KEY)
    assert set(routes(create_app(service))) == RULES.keys() | OPEN


@pytest.mark.parametrize(("method", "path"), RULES, ids=[" ".join(rule) for rule in RULES])
def test_without_a_valid_token_nothing_is_answered(
    administered: Administered, method: str, path: str
) -> None:
    address = administered.collector.address
    row, revoked = tokens.create(administered.collector.store, role="admin", name="x", days=1)
    tokens.revoke(administered.collector.store, row.id)
    expired = tokens.create(
        administered.collector.store, role="admin", name="x", days=1, now=lambda: 0.0
    )[1]
    where = path.format(study_id=NOBODYS)
    answers = [
        ask(address, method, where, headers=headers)
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer sfu_wrong"},
            {"Authorization": f"Basic {administered.tokens['admin']}"},
            {"Authorization": administered.tokens["admin"]},
            {"Authorization": f"Bearer {revoked}"},
            {"Authorization": f"Bearer {expired}"},
            {"Cookie": f"token={administered.tokens['admin']}"},
        )
    ]
    assert {(answer.status, answer.code) for answer in answers} == {(401, "unauthorized")}
    assert len({answer.body for answer in answers}) == 1
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}


@pytest.mark.parametrize(("method", "path"), RULES, ids=[" ".join(rule) for rule in RULES])
def test_a_role_may_do_what_its_rule_says(
    administered: Administered, method: str, path: str
) -> None:
    where = path.format(study_id=NOBODYS)
    refused = {
        role: administered.ask(method, where, role=role).status in (401, 403)
        for role in ("admin", "analyst")
    }
    assert refused == {"admin": False, "analyst": RULES[method, path] == "admin"}


def test_the_body_of_a_refused_request_is_not_read(administered: Administered) -> None:
    """A body is read after the token is checked."""
    connection = http.client.HTTPConnection(
        administered.collector.address.removeprefix("http://"), timeout=10
    )
    connection.putrequest("POST", "/v1/studies")
    connection.putheader("Content-Length", "90000")
    connection.endheaders()
    assert read(connection).code == "unauthorized"
    connection.close()


def test_a_token_knows_whose_it_is(administered: Administered) -> None:
    me = administered.ask("GET", "/v1/me", role="analyst").json()
    assert (me["name"], me["role"]) == ("analyst", "analyst")


def test_a_study_from_its_opening_to_its_release(administered: Administered) -> None:
    collector = administered.collector
    answer = administered.ask("POST", "/v1/studies", REQUEST)
    assert answer.status == 201
    study_id = answer.json()["id"]
    assert administered.ask("POST", "/v1/studies", REQUEST).json()["id"] == study_id

    envelopes = ask(collector.address, "GET", "/v1/offers").json()["offers"]
    offered = [verify(envelope, public_key(collector.key)) for envelope in envelopes]
    (offer,) = [offer for offer in offered if offer.study == "Street trees"]
    assert isinstance(offer.task, LocalTask)
    lines = ask(collector.address, "GET", f"/v1/dictionaries/{offer.dictionary}").body
    assert [json.loads(line) for line in lines.splitlines()] == REQUEST["items"]

    pending = administered.ask("GET", f"/v1/studies/{study_id}/release", role="analyst")
    assert (pending.status, pending.code) == (404, "not-ready")

    where = f"/v1/tasks/{offer.task.id}/reports"
    data = to_reports(offer.task, [0] * 8 + [1] * 4)
    assert ask(collector.address, "POST", where, data).status == 201
    assert ask(collector.address, "POST", where, data).status == 201  # again: counted once
    assert administered.ask("POST", f"/v1/studies/{study_id}/close").status == 200
    wait_for(
        lambda: administered.ask("GET", f"/v1/studies/{study_id}").json()["state"] == "released",
        "the release",
    )
    state = administered.ask("GET", f"/v1/studies/{study_id}", role="analyst").json()
    assert (state["received"], state["counted"], state["repeated"]) == (24, 12, 12)
    release = administered.ask("GET", f"/v1/studies/{study_id}/release", role="analyst").json()
    assert release["cost"]["devices"] == 12
    assert {row["item"] for row in release["estimates"]} == set(REQUEST["items"])

    answer = administered.ask("DELETE", f"/v1/studies/{study_id}")
    assert (answer.status, answer.json()["state"]) == (200, "deleted")
    assert administered.ask("GET", f"/v1/studies/{study_id}/release").json() == release
    assert study_id in [
        row["id"] for row in administered.ask("GET", "/v1/studies").json()["studies"]
    ]


@pytest.mark.parametrize(
    ("change", "status", "code", "text"),
    [
        ({"study": STUDY | {"epsilon": -1}}, 422, "invalid-study", "epsilon"),
        ({"study": STUDY | {"epsilonn": 1}}, 422, "invalid-study", "epsilonn"),
        ({"study": STUDY | {"dictionary": "/etc/passwd"}}, 422, "invalid-study", "items"),
        ({"study": STUDY | {"trust": "nobody"}}, 422, "invalid-study", "trust"),
        ({"study": STUDY | {"target_error": 1e-9}}, 422, "impossible-study", ""),
        ({"items": None}, 422, "invalid-study", "items"),
        ({"items": ["oak", 5]}, 400, "malformed-request", "items.1"),
        ({"name": ""}, 422, "invalid-study", "name"),
        ({"nme": "Trees"}, 400, "malformed-request", "nme"),
        ({"study": "trees"}, 400, "malformed-request", "study"),
        ({"daily_reports": "1"}, 400, "malformed-request", "daily_reports"),
        ({"delay_seconds": 0}, 422, "invalid-study", "delay_seconds"),
        ({"closes": 1}, 422, "invalid-study", "closes"),
    ],
)
def test_an_invalid_study_is_refused_with_the_reason(
    administered: Administered, change: dict[str, Any], status: int, code: str, text: str
) -> None:
    answer = administered.ask("POST", "/v1/studies", REQUEST | {"name": "Another"} | change)
    assert (answer.status, answer.code) == (status, code)
    assert text in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/studies"])
@pytest.mark.parametrize("number", ["1e400", "Infinity", "-1e400", "NaN"])
@pytest.mark.parametrize("key", ["epsilon", "devices"])
def test_a_number_without_bound_promises_nothing_silently(
    administered: Administered, path: str, key: str, number: str
) -> None:
    request = {"study": STUDY | {"trust": "central", key: "?"}, "items": ["oak", "elm"]}
    if path == "/v1/studies":
        request |= {"name": "Without bound", "purpose": "None."}
    data = json.dumps(request).replace('"?"', number)
    answer = ask(
        administered.collector.address, "POST", path, data, token=administered.tokens["admin"]
    )
    assert (answer.status, answer.code) == (400, "malformed-request")
    assert key in answer.json()["detail"]


def test_a_lifetime_without_bound_is_refused(administered: Administered) -> None:
    data = json.dumps(REQUEST | {"name": "Without bound", "lifetime_epsilon": "?"})
    answer = ask(
        administered.collector.address,
        "POST",
        "/v1/studies",
        data.replace('"?"', "1e400"),
        token=administered.tokens["admin"],
    )
    assert (answer.status, answer.code) == (400, "malformed-request")
    assert "lifetime_epsilon" in answer.json()["detail"]


@pytest.mark.parametrize("epsilon", [None, "inf"])
def test_a_study_without_a_promise_says_so(administered: Administered, epsilon: str | None) -> None:
    request = {"study": STUDY | {"trust": "central", "epsilon": epsilon}, "items": ["oak", "elm"]}
    answer = administered.ask("POST", "/v1/plan", request)
    assert (answer.status, answer.json()["privacy"]["epsilon"]) == (200, None)


@pytest.mark.parametrize("data", ["", "{", "[]", "null", '{"study": {}}x', "\x00"])
def test_a_body_that_is_not_json_is_malformed(administered: Administered, data: str) -> None:
    answer = ask(
        administered.collector.address,
        "POST",
        "/v1/studies",
        data,
        token=administered.tokens["admin"],
    )
    assert (answer.status, answer.code) == (400, "malformed-request")


def test_a_study_of_too_many_items_is_too_large(administered: Administered) -> None:
    answer = administered.ask("POST", "/v1/studies", REQUEST | {"items": ["x" * 100] * 1_000})
    assert (answer.status, answer.code) == (413, "too-large")


def test_two_studies_cannot_have_one_name(administered: Administered) -> None:
    first = REQUEST | {"name": "Taken"}
    assert administered.ask("POST", "/v1/studies", first).status == 201
    answer = administered.ask("POST", "/v1/studies", first | {"purpose": "Something else."})
    assert (answer.status, answer.code) == (409, "name-taken")


def test_a_plan_opens_nothing(administered: Administered) -> None:
    before = administered.ask("GET", "/v1/studies").json()
    answer = administered.ask(
        "POST", "/v1/plan", {"study": STUDY, "items": REQUEST["items"]}, role="analyst"
    )
    assert answer.status == 200
    assert answer.json()["plan"]["predicted"]["bytes_per_device"] > 0
    assert administered.ask("GET", "/v1/studies").json() == before


@pytest.mark.parametrize("study_id", [NOBODYS, "oak", "%00", "0" * 31, "%2e%2e"])
@pytest.mark.parametrize(
    ("method", "ending"), [("GET", ""), ("DELETE", ""), ("POST", "/close"), ("GET", "/release")]
)
def test_a_missing_study_is_unknown(
    administered: Administered, method: str, ending: str, study_id: str
) -> None:
    answer = administered.ask(method, f"/v1/studies/{study_id}{ending}")
    assert (answer.status, answer.code) == (404, "unknown-study")


def test_a_deleted_study_cannot_be_closed(administered: Administered) -> None:
    study = administered.ask("POST", "/v1/studies", REQUEST | {"name": "Deleted"}).json()
    administered.ask("DELETE", f"/v1/studies/{study['id']}")
    answer = administered.ask("POST", f"/v1/studies/{study['id']}/close")
    assert (answer.status, answer.code) == (409, "wrong-state")


def test_a_study_beyond_the_budget_is_refused_and_the_ledger_shows_spending(
    tmp_path: Path,
) -> None:
    central = STUDY | {"trust": "central", "epsilon": 1.0, "delta": 1e-6}
    with running(settings(tmp_path, budget_epsilon=0.5)) as collector:
        token = tokens.create(collector.store, role="admin", name="ops", days=1)[1]
        only = Administered(collector, {"admin": token})
        answer = only.ask("POST", "/v1/studies", REQUEST | {"study": central})
        assert (answer.status, answer.code) == (409, "budget-refused")
        assert only.ask("GET", "/v1/ledger").json() == {
            "epsilon": 0.5,
            "delta": 1e-6,
            "spent": 0.0,
            "entries": [],
        }


def test_metrics_can_be_opened_to_everybody(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    store.migrate()
    study_id = opened(store)
    with served(Service(store, settings(tmp_path, open_metrics=True), key=KEY)) as address:
        assert ask(address, "POST", f"/v1/tasks/{TASK.id}/reports", body(250)).status == 201
        assert ask(address, "POST", f"/v1/tasks/{NOBODYS * 2}/reports", body(3)).status == 404
        answer = ask(address, "GET", "/metrics")
    assert answer.status == 200
    text = answer.body.decode()
    assert f'sfumato_reports_total{{outcome="stored",study="{study_id}"}} 200.0\n' in text
    assert "127.0.0.1" not in text
    store.close()


def test_metrics_do_not_tell_when_a_report_came(tmp_path: Path) -> None:
    """One more report changes no metric, below a hundred reports and above. The control: the upload
    with the hundredth does."""
    store = Faulty.open(tmp_path / "collector.db")
    store.migrate()
    study_id = opened(store)

    def lines() -> list[str]:
        text = ask(address, "GET", "/metrics").body.decode()
        return [line for line in text.splitlines() if "age_seconds" not in line]

    def upload(count: int) -> bool:
        before = lines()
        assert ask(address, "POST", f"/v1/tasks/{TASK.id}/reports", body(count)).status == 201
        return lines() != before

    with served(Service(store, settings(tmp_path, open_metrics=True), key=KEY)) as address:
        assert not any(study_id in line for line in lines())
        assert not upload(1)
        assert not upload(97)
        assert not upload(1)
        assert upload(1)  # the hundredth
        assert not upload(1)
    store.close()


def test_a_collector_is_ready_while_its_store_can_be_written(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    assert isinstance(store, Faulty)
    store.migrate()
    with served(Service(store, settings(tmp_path), key=KEY)) as address:
        assert ask(address, "GET", "/ready").json() == READY | {"worker": "none"}
        store.problem = StoreUnavailable("away")
        wait_for(lambda: ask(address, "GET", "/ready").status == 503, "the service to notice")
        assert ask(address, "GET", "/ready").code == "store-unavailable"
        assert ask(address, "GET", "/health").status == 200
        store.problem = None
        assert ask(address, "GET", "/ready").status == 200
    store.close()


def test_metrics_are_shown_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise StoreUnavailable("away")

    with closing(Store.open(tmp_path / "collector.db")) as store:
        store.migrate()
        options = settings(tmp_path, open_metrics=True)
        with served(Service(store, options, key=KEY)) as address:
            monkeypatch.setattr(store, "reading", fail)
            answer = ask(address, "GET", "/metrics")
    assert answer.status == 200
    assert b"sfumato_build_info" in answer.body


def test_a_failing_study_is_shown_and_tried_again_at_once(administered: Administered) -> None:
    """A load balancer must not shut out the devices of other studies, so it stays ready."""
    store, address = administered.collector.store, administered.collector.address
    study = administered.ask("POST", "/v1/studies", REQUEST | {"name": "Failing"}).json()
    assert study["fault"] is None
    next_try = int(time.time()) + 600
    fault = FaultRow(study["id"], "internal error: MemoryError", 3, next_try)
    with store.transaction() as tx:
        tx.set_fault(fault)

    def gauge() -> str:
        text = administered.ask("GET", "/metrics").body.decode()
        return next(line for line in text.splitlines() if line.startswith("sfumato_failing"))

    def ready() -> Any:
        answer = ask(address, "GET", "/ready")
        assert answer.status == 200
        return answer.json()

    expected = {"problem": fault.problem, "tries": 3, "next_try": next_try}
    path = f"/v1/studies/{study['id']}"
    assert administered.ask("GET", path, role="analyst").json()["fault"] == expected
    rows = administered.ask("GET", "/v1/studies", role="analyst").json()["studies"]
    assert [row["fault"] for row in rows if row["id"] == study["id"]] == [expected]
    wait_for(lambda: ready() == READY | {"failing_studies": 1}, "/ready to show it")
    assert "MemoryError" not in ask(address, "GET", "/ready").body.decode()  # open to everybody
    assert gauge() == "sfumato_failing_studies 1.0"

    assert administered.ask("POST", f"{path}/retry").json()["fault"] is None
    wait_for(lambda: ready() == READY, "/ready to show none")
    assert gauge() == "sfumato_failing_studies 0.0"
    administered.ask("DELETE", path)
    assert administered.ask("POST", f"{path}/retry").code == "wrong-state"


def test_a_damaged_release_is_a_problem_of_its_own(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "collector.db")) as store:
        store.migrate()
        study_id = opened(store)
        with store.transaction() as tx:
            tx.put_release(study_id, '{"counts": [1]}')
        url = str(tmp_path / "collector.db")
        execute(url, "DROP TRIGGER no_UPDATE_of_release")
        execute(url, "UPDATE release SET data = '{\"counts\": [2]}'")
        token = tokens.create(store, role="analyst", name="x", days=1)[1]
        with served(Service(store, settings(tmp_path), key=KEY)) as address:
            answer = ask(address, "GET", f"/v1/studies/{study_id}/release", token=token)
    assert (answer.status, answer.code) == (500, "store-damaged")
    assert "counts" not in answer.body.decode()


def test_the_service_describes_every_route(administered: Administered) -> None:
    described = ask(administered.collector.address, "GET", "/openapi.json").json()
    operations = {
        (method.upper(), path) for path, methods in described["paths"].items() for method in methods
    }
    assert operations == (RULES.keys() | OPEN) - {("GET", "/openapi.json")}
    text = json.dumps(described)
    for reference in set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text)):
        assert reference in described["components"]["schemas"]
    guarded = {
        (method.upper(), path)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if operation.get("security")
    }
    assert guarded == RULES.keys()


def test_an_answer_that_is_not_described_would_be_noticed(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    store.migrate()
    service = Service(store, settings(tmp_path), key=KEY)
    service.metrics.observe_request("/v1/offers", "GET", 418, 0.1)
    assert undocumented_answers(service) == [("GET", "/v1/offers", "418")]
    store.close()


def test_what_happens_is_said_by_an_operation_s_name(administered: Administered) -> None:
    paths = ask(administered.collector.address, "GET", "/openapi.json").json()["paths"]
    names = {
        operation["operationId"] for methods in paths.values() for operation in methods.values()
    }
    assert names == {
        "check_health", "check_ready", "close_study", "create_study", "delete_study",
        "get_dictionary", "get_invitation", "get_message", "get_model", "join_round",
        "list_offers", "list_studies", "make_plan", "put_message", "replace_passcode",
        "retry_study", "show_caller", "show_ledger", "show_metrics", "show_model", "show_release",
        "show_study",
        "upload_reports",
    }  # fmt: skip


def to_reports(task: LocalTask, categories: list[int]) -> bytes:
    return to_frames(
        [
            local_report(task, np.array([category]), rng=SystemRng()).to_bytes()
            for category in categories
        ]
    )


def test_every_route_is_in_the_reference_with_its_role() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for (method, path), role in RULES.items():
        assert f"| `{method} {path}` | {role} |" in text
    for method, path in OPEN:
        assert f"`{method} {path}`" in text


def test_every_request_is_timed_under_the_pattern_of_its_address(tmp_path: Path) -> None:
    store = Faulty.open(tmp_path / "collector.db")
    store.migrate()
    opened(store)
    service = Service(store, settings(tmp_path), key=KEY)
    upload = f"/v1/tasks/{TASK.id}/reports"
    with served(service) as address:
        assert ask(address, "POST", upload, body(1)).status == 201
        assert ask(address, "POST", upload, b"x").status == 400
        assert ask(address, "GET", upload).status == 405
        assert ask(address, "GET", "/v1/offers").status == 200
        assert ask(address, "GET", f"/v1/dictionaries/{NOBODYS}").status == 404
        assert ask(address, "GET", f"/v1/studies/{NOBODYS}").status == 401
        assert ask(address, "GET", "/health").status == 200
        assert ask(address, "GET", f"/canary/{NOBODYS}").status == 404
        assert ask(address, "TRACE", "/canary").status == 404
    (requests,) = [
        metric
        for metric in service.metrics.registry.collect()
        if metric.name == "sfumato_request_seconds"
    ]
    counts = {
        (sample.labels["method"], sample.labels["route"], sample.labels["code"]): sample.value
        for sample in requests.samples
        if sample.name.endswith("_count")
    }
    assert counts == {
        ("POST", "/v1/tasks/{task_id}/reports", "201"): 1,
        ("POST", "/v1/tasks/{task_id}/reports", "400"): 1,
        ("other", "/v1/tasks/{task_id}/reports", "405"): 1,
        ("GET", "/v1/offers", "200"): 1,
        ("GET", "/v1/dictionaries/{digest}", "404"): 1,
        ("GET", "/v1/studies/{study_id}", "401"): 1,
        ("GET", "/health", "200"): 1,
        ("other", "other", "404"): 2,
    }
    store.close()

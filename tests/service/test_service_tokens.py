"""Every address that needs a token refuses requests without a suitable one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from serving import Answer, ask, settings
from sfumato.collector import tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.http.app import DIRECT_ROUTERS, create_app
from sfumato.collector.http.service import Service
from sfumato.collector.serve import running
from sfumato.collector.store.store import Store, TokenRow
from sfumato.collector.tokens import Role

FOR_EVERYBODY = {"/health", "/ready"}
READING = {("POST", "/v1/plan")}  # besides every GET; it changes nothing
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
STUDY = {
    "name": "Street trees",
    "purpose": "Which trees to plant next.",
    "study": {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 20},
    "items": ["oak", "elm", "fir"],
}


def needing_a_token(folder: Path) -> list[tuple[str, str]]:
    """Method and path, read off the application itself."""
    with closing(Store.open(folder / "unused.db")) as store:
        app = create_app(Service(store, settings(folder), key=bytes(32)))
        devices = [route for router in DIRECT_ROUTERS for route in router.routes]
        return [
            (method, route.path or "")
            for route in iter_route_contexts(app.routes)
            if isinstance(route.original_route, APIRoute)
            and route.original_route not in devices
            and route.path not in FOR_EVERYBODY
            for method in sorted(route.methods or ())
        ]


@dataclass
class Site:
    """A collector with a study, a good token, an analyst's, and invalid ones."""

    address: str
    study_id: str
    good: str
    low: str
    bad: dict[str, str | None]
    routes: list[tuple[str, str]]

    def ask(self, method: str, path: str, token: str | None) -> Answer:
        return ask(self.address, method, path.format(study_id=self.study_id), b"{}", token=token)

    def content(self) -> list[Answer]:
        """The answers that an administrator gets."""
        paths = ("/v1/studies", "/v1/studies/{study_id}", "/v1/ledger")
        return [
            Answer(a.status, {}, a.body) for a in (self.ask("GET", p, self.good) for p in paths)
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("collector")
    with running(settings(folder)) as served:

        def new_token(role: Role, **options: Any) -> tuple[TokenRow, str]:
            return tokens.create(served.store, role=role, name=role, days=1, **options)

        row, revoked = new_token("admin")
        tokens.revoke(served.store, row.id)
        _, good = new_token("admin")
        yield Site(
            address=served.address,
            study_id=AdminClient(served.address, good).create_study(STUDY)["id"],
            good=good,
            low=new_token("analyst")[1],
            bad={
                "missing": None,
                "wrong": good[:-1] + ("A" if good[-1] != "A" else "B"),
                "cut": good[:-1],
                "expired": new_token("admin", now=lambda: 0.0)[1],
                "revoked": revoked,
            },
            routes=needing_a_token(folder),
        )


def test_the_application_has_addresses_that_need_a_token(site: Site) -> None:
    assert {("DELETE", "/v1/studies/{study_id}"), ("GET", "/metrics")} <= set(site.routes)
    assert len(site.routes) >= 10


def test_an_invalid_token_gets_the_same_answer_as_none(site: Site) -> None:
    before = site.content()
    for method, path in site.routes:
        answers = {name: site.ask(method, path, token) for name, token in site.bad.items()}
        assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(
            site.bad, 401
        ), (method, path)
        assert len({answer.body for answer in answers.values()}) == 1
        header_names = [answer.headers.keys() for answer in answers.values()]
        assert all(names == header_names[0] for names in header_names)
    assert site.content() == before


def test_an_analyst_changes_nothing(site: Site) -> None:
    before = site.content()
    for method, path in site.routes:
        answer = site.ask(method, path, site.low)
        if method == "GET" or (method, path) in READING:
            assert answer.status not in (401, 403), (method, path)
        else:
            assert (answer.status, answer.code) == (403, "forbidden"), (method, path)
    assert site.content() == before


def test_no_other_method_opens_an_address(site: Site) -> None:
    """Not even with a token: a route accepts only the methods that it names."""
    before = site.content()
    for path in {path for _, path in site.routes}:
        methods = {method for method, where in site.routes if where == path}
        for method in set(METHODS) - methods:
            assert site.ask(method, path, site.good).status == 405, (method, path)
    assert site.content() == before


# Tokens for some studies only.

SEES_ALL = {("GET", "/v1/ledger"), ("GET", "/metrics")}  # about all studies at once


@dataclass
class Two:
    """A collector with two studies, and an analyst's token for the first one."""

    site: Site
    own: str
    other: str
    token: str

    def ask(self, method: str, path: str, study_id: str) -> Answer:
        return ask(
            self.site.address, method, path.format(study_id=study_id), b"{}", token=self.token
        )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    with running(settings(folder)) as served:
        _, good = tokens.create(served.store, role="admin", name="ops", days=1)
        client = AdminClient(served.address, good)
        own = client.create_study(STUDY)["id"]
        other = client.create_study({**STUDY, "name": "Secret birds"})["id"]
        row, first = tokens.create(
            served.store, role="analyst", name="Ann", days=1, studies=["Street trees"]
        )
        row, token = tokens.rotate(served.store, row.id, days=1)  # and it stays for one study
        assert row.studies == own
        site = Site(served.address, own, good, first, {}, needing_a_token(folder))
        yield Two(site, own, other, token)


def test_an_analyst_of_one_study_does_not_see_that_there_is_another(two: Two) -> None:
    """Every address that needs a token: about another study, and about one that does not exist, the
    answers are the same to the byte. The control: an analyst of all studies gets different ones."""
    nobodys = "0" * 32
    for method, path in two.site.routes:
        if "{study_id}" not in path:
            continue
        answers = [two.ask(method, path, study_id) for study_id in (two.other, nobodys)]
        assert {answer.status for answer in answers} == ({404} if method == "GET" else {403})
        assert answers[0].body == answers[1].body
        assert answers[0].headers.keys() == answers[1].headers.keys()
    everything = two.site.ask("GET", f"/v1/studies/{two.other}", two.site.good)
    assert everything.status == 200


def test_no_answer_to_an_analyst_of_one_study_names_another(two: Two) -> None:
    for method, path in two.site.routes:
        answer = two.ask(method, path, two.own)
        expected = 403 if (method, path) in SEES_ALL else None
        assert expected in (None, answer.status), (method, path)
        for secret in (two.other, "Secret birds"):
            assert secret.encode() not in answer.body, (method, path)
    listed = two.ask("GET", "/v1/studies", two.own).json()["studies"]
    assert [study["id"] for study in listed] == [two.own]
    assert two.ask("GET", "/v1/me", two.own).json()["studies"] == [two.own]
    assert two.ask("GET", "/v1/studies/{study_id}", two.own).status == 200


def test_a_control_finds_both_names(two: Two) -> None:
    body = two.site.ask("GET", "/v1/studies", two.site.good).body
    assert b"Secret birds" in body
    assert two.other.encode() in body

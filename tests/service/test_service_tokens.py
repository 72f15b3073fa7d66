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

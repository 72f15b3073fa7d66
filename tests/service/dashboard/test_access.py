"""Access: every page has a rule, and every form must come from one of our pages."""

from __future__ import annotations

import asyncio
import http.client
import re
import select
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from starlette.routing import Mount, Route

from browsing import Stage
from service.dashboard.visiting import Visitor
from sfumato.collector import tokens
from sfumato.dashboard import ROUTES

STUDY = "0" * 32
OPEN = {"/sign-in", "/static/{digest}/{name}", "/", "/{path:path}"}  # without a session
ADMIN = {"/studies/new", "/studies/{study_id}/close", "/studies/{study_id}/retry"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every page."""
    (mount,) = [route for route in ROUTES if isinstance(route, Mount)]
    for route in mount.routes:
        assert isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path


PAGES = sorted(routes())
GUARDED = [(method, path) for method, path in PAGES if path not in OPEN]


def ask(visitor: Visitor, method: str, path: str) -> httpx.Response:
    filled = path.replace("{study_id}", STUDY).replace("{ending}", "json")
    return visitor.http.request(method, f"/dashboard{filled}", headers=visitor.headers)


def test_every_page_is_known_here() -> None:
    assert {path for _, path in PAGES} >= OPEN | ADMIN
    assert len(GUARDED) >= 12


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_visitors_without_a_session_are_asked_to_sign_in(
    stranger: Visitor, method: str, path: str
) -> None:
    answer = ask(stranger, method, path)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/dashboard/sign-in")


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_an_analyst_reads_and_changes_nothing(analyst: Visitor, method: str, path: str) -> None:
    answer = ask(analyst, method, path)
    if path in ADMIN or (method, path) == ("POST", "/studies"):
        assert answer.status_code == 403
        assert "role" in answer.text
    elif method == "GET":
        assert answer.status_code in (200, 404)


@pytest.mark.parametrize("path", [path for method, path in GUARDED if method == "POST"])
def test_a_form_without_the_session_s_token_is_refused(admin: Visitor, path: str) -> None:
    filled = f"/dashboard{path.replace('{study_id}', STUDY)}"
    for csrf in ("", "0" * 64):
        answer = admin.post(filled, {"csrf": csrf})
        assert answer.status_code == 403
        assert "another session" in answer.text
    assert admin.get("/dashboard/studies").status_code == 200


@pytest.mark.parametrize("path", [path for method, path in PAGES if method == "POST"])
@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", ""])
def test_a_form_from_elsewhere_is_refused(admin: Visitor, path: str, origin: str | None) -> None:
    if path == "/{path:path}":
        return
    admin.headers = {} if origin is None else {"Origin": origin}
    answer = admin.post(f"/dashboard{path.replace('{study_id}', STUDY)}", {"token": "sfu_x"})
    assert answer.status_code == 403
    assert "not sent by a page" in answer.text


def test_the_token_of_one_session_is_not_that_of_another(admin: Visitor, stage: Stage) -> None:
    first = admin.csrf()
    admin.http.cookies.clear()
    admin.sign_in(stage.token("admin"))
    assert admin.csrf() != first
    assert admin.post("/dashboard/sign-out", {"csrf": first}).status_code == 403


def test_signing_in_gives_a_cookie_that_scripts_and_other_sites_cannot_use(
    stranger: Visitor, stage: Stage
) -> None:
    answer = stranger.sign_in(stage.token())
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Path=/dashboard", "Max-Age=43200"):
        assert part in cookie
    assert "Secure" not in cookie  # over plain http a browser would drop it
    assert answer.headers["location"] == "/dashboard/studies"


def test_behind_a_proxy_with_tls_the_cookie_is_secure(stranger: Visitor, stage: Stage) -> None:
    stranger.headers = {"Origin": "https://collector.example", "Host": "collector.example"}
    answer = stranger.sign_in(stage.token())
    assert answer.status_code == 303
    assert "Secure" in answer.headers["set-cookie"]


def test_a_wrong_an_expired_and_a_revoked_token_are_answered_alike(
    stranger: Visitor, stage: Stage
) -> None:
    store = stage.collector.store
    _, expired = tokens.create(store, role="admin", name="old", days=1, now=lambda: 0.0)
    row, revoked = tokens.create(store, role="admin", name="gone", days=1)
    tokens.revoke(store, row.id)
    answers = [stranger.sign_in(token) for token in ("sfu_wrong", expired, revoked, "")]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert "This token is not valid" in answers[0].text
    assert not any("set-cookie" in answer.headers for answer in answers)


def test_signing_out_ends_the_session(admin: Visitor) -> None:
    cookies = dict(admin.http.cookies)
    answer = admin.post("/dashboard/sign-out", {})
    assert answer.headers["location"] == "/dashboard/sign-in"
    admin.http.cookies.update(cookies)  # as somebody would who had copied it
    assert admin.get("/dashboard/studies").status_code == 303


def test_signing_in_leads_to_the_requested_page(stranger: Visitor, stage: Stage) -> None:
    answer = stranger.get(f"/dashboard/studies/{STUDY}?page=2")
    assert (
        answer.headers["location"]
        == f"/dashboard/sign-in?next=/dashboard/studies/{STUDY}%3Fpage%3D2"
    )
    form = stranger.get(answer.headers["location"]).text
    (path,) = re.findall(r'name="next" value="([^"]+)"', form)
    assert path == f"/dashboard/studies/{STUDY}?page=2"
    assert stranger.sign_in(stage.token(), next=path).headers["location"] == path


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example",
        "/dashboard//evil.example",
        "/dashboard/..",
        "/dashboard/../v1/me",
        "/dashboard/studies/../../v1/me",
        "/dashboard/studies/./new",
        "https://evil.example/dashboard/",
        "/dashboard/../v1/me?x=1",
        "javascript:1",
        "/dashboard/\\evil.example",
        "/dashboard/studies\r\nX: y",
        "/elsewhere",
    ],
)
def test_signing_in_leads_to_no_other_place(stranger: Visitor, stage: Stage, path: str) -> None:
    answer = stranger.sign_in(stage.token(), next=path)
    assert answer.headers["location"] == "/dashboard/studies"


def test_a_live_page_without_a_session_is_sent_to_sign_in(stranger: Visitor) -> None:
    answer = stranger.get("/dashboard/studies", **{"HX-Request": "true"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/dashboard/sign-in"
    assert not answer.content


@pytest.mark.parametrize(
    "path", ["/", "/dashboard", "/dashboard/sign-in", "/dashboard/studies", "/dashboard/nowhere"]
)
def test_every_answer_has_the_headers_of_a_page(admin: Visitor, path: str) -> None:
    headers = admin.get(path).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_pages_hold_no_script_no_style_and_nothing_from_elsewhere(admin: Visitor) -> None:
    for path in ("sign-in", "studies", "studies/new", "ledger", "costs", "nowhere"):
        text = admin.get(f"/dashboard/{path}").text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", text)
        assert not re.search(r"https?://", text)


def test_a_page_does_not_wait_for_requests_of_devices(stage: Stage, admin: Visitor) -> None:
    gate, service = threading.Event(), stage.collector.service
    calls = [service.call(gate.wait) for _ in range(8)]
    threads = [threading.Thread(target=asyncio.run, args=(call,)) for call in calls]
    try:
        for thread in threads:
            thread.start()
        pages = ("studies", "ledger", "costs", "studies/new")
        answers = [admin.get(f"/dashboard/{page}").status_code for page in pages]
        assert all(thread.is_alive() for thread in threads)
        assert answers == [200] * 4
    finally:
        gate.set()
        for thread in threads:
            thread.join()


def test_a_page_that_does_not_change_loads_no_script(admin: Visitor) -> None:
    for path in ("sign-in", "ledger", "costs", "nowhere"):
        assert "<script" not in admin.get(f"/dashboard/{path}").text
    assert "<script" in admin.get("/dashboard/studies/new").text


def test_files_of_a_page_may_be_kept_and_no_others_are_there(
    stranger: Visitor, admin: Visitor
) -> None:
    page = admin.get("/dashboard/studies/new").text
    names = re.findall(r"/dashboard/static/[0-9a-f]{16}/[\w.]+", page)
    assert [name.rpartition("/")[2] for name in names] == [
        "icon.svg",
        "dashboard.css",
        "htmx.min.js",
    ]
    for name in names:
        answer = stranger.get(name)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        plain = stranger.get(name, **{"Accept-Encoding": "identity"})
        assert plain.content == answer.content
    digest = names[0].split("/")[3]
    for wrong in (f"{digest}/VENDORED.md", f"{digest}/../__init__.py", "0/htmx.min.js"):
        assert stranger.get(f"/dashboard/static/{wrong}").status_code == 404


def test_a_large_form_of_a_stranger_is_refused_by_its_length(stage: Stage) -> None:
    connection = http.client.HTTPConnection(stage.address.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", "/dashboard/sign-in")
    connection.putheader("Origin", stage.address)
    connection.putheader("Content-Type", "application/x-www-form-urlencoded")
    connection.putheader("Content-Length", str(60 << 20))
    connection.endheaders(b"token=%61%62")
    assert connection.getresponse().status == 413
    connection.close()


def test_a_large_form_without_a_length_is_refused_before_it_has_arrived(stage: Stage) -> None:
    host, port = stage.address.removeprefix("http://").split(":")
    head = (
        f"POST /dashboard/sign-in HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {stage.address}\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"%61" * 10_000
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode())
        pieces = 0
        while pieces < 2_000 and not select.select([connection], [], [], 0.001)[0]:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            pieces += 1
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert pieces * len(piece) < 6 << 20  # most of it in buffers of the system


@pytest.mark.parametrize("path", ["/sign-out", f"/studies/{STUDY}/close"])
def test_only_the_form_of_a_new_study_may_be_large(admin: Visitor, path: str) -> None:
    large = {"items": "oak\n" * 20_000}
    for parts in ({}, {"files": {"dictionary": ("trees.txt", b"elm")}}):
        assert admin.post(f"/dashboard{path}", large, **parts).status_code == 413
    answer = admin.post("/dashboard/studies/new", large, files={"x": ("", b"")})
    assert answer.status_code == 422  # the items repeat, and other fields are missing
    assert admin.post("/dashboard/studies/new", large).status_code == 413  # pages do not send this


def test_a_page_is_timed_under_the_pattern_of_its_address(stage: Stage, admin: Visitor) -> None:
    admin.get(f"/dashboard/studies/{STUDY}")
    labels = {"route": "/dashboard/studies/{study_id}", "method": "GET", "code": "404"}
    registry = stage.collector.service.metrics.registry
    assert registry.get_sample_value("sfumato_request_seconds_count", labels)


@pytest.fixture
def guest(stage: Stage) -> Iterator[tuple[Visitor, str, str]]:
    """An analyst of one of two studies, and the ids of both."""
    names = ("Guest trees", "Secret birds")
    ids = {study["name"]: study["id"] for study in stage.client.studies()}
    own, other = (ids[name] if name in ids else stage.open(name, devices=1_000) for name in names)
    _, token = tokens.create(
        stage.collector.store, role="analyst", name="Ann", days=1, studies=[own]
    )
    visitor = Visitor(stage)
    assert visitor.sign_in(token).status_code == 303
    yield visitor, own, other
    visitor.close()


def test_an_analyst_of_one_study_sees_no_page_of_another(
    guest: tuple[Visitor, str, str], analyst: Visitor
) -> None:
    """A page of another study is that of one that does not exist, to the byte. An analyst of all
    studies is the control."""
    visitor, own, other = guest
    for method, path in GUARDED:
        if "{study_id}" not in path:
            continue
        answers = [
            visitor.http.request(
                method,
                "/dashboard" + path.format(study_id=study, ending="json"),
                headers=visitor.headers,
            )
            for study in (other, STUDY)
        ]
        assert {answer.status_code for answer in answers} == {403 if path in ADMIN else 404}
        assert answers[0].content == answers[1].content
    assert visitor.get(f"/dashboard/studies/{own}").status_code == 200
    assert analyst.get(f"/dashboard/studies/{other}").status_code == 200


def test_no_page_for_an_analyst_of_one_study_names_another(
    guest: tuple[Visitor, str, str], analyst: Visitor
) -> None:
    visitor, own, other = guest
    for path in ("studies", "costs", "ledger", f"studies/{own}"):
        answer = visitor.get(f"/dashboard/{path}")
        assert answer.status_code == (403 if path == "ledger" else 200)
        assert "Secret birds" not in answer.text
        assert other not in answer.text
        assert "/dashboard/ledger" not in answer.text
    assert "Guest trees" in visitor.get("/dashboard/studies").text
    for path in ("studies", "costs"):
        assert "Secret birds" in analyst.get(f"/dashboard/{path}").text
    assert "/dashboard/ledger" in analyst.get("/dashboard/studies").text

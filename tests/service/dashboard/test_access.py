"""Who may see and do what: every page has a rule, and every form must be of the page's own."""

from __future__ import annotations

import re
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
OPEN = {"/sign-in", "/static/{digest}/{name}", "/", "/{path:path}"}  # to whoever asks
ADMIN = {"/studies/new", "/studies/{study_id}/close"}
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


def asked(visitor: Visitor, method: str, path: str) -> httpx.Response:
    filled = path.replace("{study_id}", STUDY).replace("{ending}", "json")
    return visitor.http.request(method, f"/dashboard{filled}", headers=visitor.headers)


def test_every_page_is_known_here() -> None:
    assert {path for _, path in PAGES} >= OPEN | ADMIN
    assert len(GUARDED) >= 12


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_whoever_is_not_signed_in_is_asked_to(stranger: Visitor, method: str, path: str) -> None:
    answer = asked(stranger, method, path)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/dashboard/sign-in")


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_an_analyst_reads_and_changes_nothing(analyst: Visitor, method: str, path: str) -> None:
    answer = asked(analyst, method, path)
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


def test_after_signing_in_one_is_where_one_wanted_to_be(stranger: Visitor, stage: Stage) -> None:
    asked = stranger.get(f"/dashboard/studies/{STUDY}?page=2")
    assert (
        asked.headers["location"]
        == f"/dashboard/sign-in?next=/dashboard/studies/{STUDY}%3Fpage%3D2"
    )
    form = stranger.get(asked.headers["location"]).text
    (wanted,) = re.findall(r'name="next" value="([^"]+)"', form)
    assert wanted == f"/dashboard/studies/{STUDY}?page=2"
    assert stranger.sign_in(stage.token(), next=wanted).headers["location"] == wanted


@pytest.mark.parametrize(
    "wanted",
    [
        "//evil.example",
        "https://evil.example/dashboard/",
        "/dashboard/../v1/me?x=1",
        "javascript:1",
        "/dashboard/\\evil.example",
        "/dashboard/studies\r\nX: y",
        "/elsewhere",
    ],
)
def test_signing_in_leads_to_no_other_place(stranger: Visitor, stage: Stage, wanted: str) -> None:
    answer = stranger.sign_in(stage.token(), next=wanted)
    assert answer.headers["location"] == "/dashboard/studies"


def test_a_page_that_looks_for_news_is_told_that_its_session_is_over(stranger: Visitor) -> None:
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


def test_a_page_does_not_wait_for_what_devices_keep_busy(stage: Stage, admin: Visitor) -> None:
    gate = threading.Event()
    try:
        waiting = [stage.collector.service._pool.submit(gate.wait) for _ in range(8)]
        pages = ("studies", "ledger", "costs", "studies/new")
        answers = [admin.get(f"/dashboard/{page}").status_code for page in pages]
        assert not any(one.done() for one in waiting)
        assert answers == [200] * 4
    finally:
        gate.set()


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

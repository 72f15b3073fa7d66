"""Checks around every page: the session, the origin of a form, and pages for errors."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from sfumato.collector.http.service import SIGN_IN_BYTES, Service, service_of
from sfumato.collector.problems import KINDS, Problem
from sfumato.collector.tokens import Role
from sfumato.dashboard import sessions
from sfumato.dashboard.forms import FORM_BYTES, Form
from sfumato.dashboard.rendering import add_headers, page
from sfumato.dashboard.sessions import Session
from sfumato.errors import SfumatoError

HOME = "/dashboard/studies"
SIGN_IN = "/dashboard/sign-in"
_OWN_PAGE = re.compile(r"/dashboard(/[\w-]+(\.\w+)?)+(\?page=\d+)?", re.ASCII)  # no `//`, no `..`


@dataclass(frozen=True, slots=True)
class Visit:
    """A request from a person who is signed in, with its form."""

    request: Request
    service: Service
    session: Session
    form: Form

    @property
    def study_id(self) -> str:
        return str(self.request.path_params["study_id"])

    def page(self, template: str, *, status: int = 200, **values: object) -> Response:
        return page(template, status=status, session=self.session, **values)


Endpoint = Callable[[Request], Awaitable[Response]]


def sign_in_required(
    role: Role = "analyst", *, large_fields: Collection[str] = ()
) -> Callable[[Callable[[Visit], Awaitable[Response]]], Endpoint]:
    """A page for people with this role; others are asked to sign in.

    `large_fields` of its form may be as long as a request to open a study.
    """

    def around(show: Callable[[Visit], Awaitable[Response]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            service = service_of(request)
            session = await session_of(request)
            if session is None:
                return _ask_to_sign_in(request)
            if not session.may(role):
                raise Problem("forbidden", hint=f"sign in with a token with the role {role}")
            if request.method != "POST":
                return await show(Visit(request, service, session, Form()))
            async with own_form(request, session, large_fields) as form:
                return await show(Visit(request, service, session, form))

        return public_page(endpoint)

    return around


def public_page(show: Endpoint) -> Endpoint:
    """A page that needs no session. Our errors are shown as a page."""

    async def endpoint(request: Request) -> Response:
        try:
            response = await show(request)
        except SfumatoError as error:
            problem = Problem.of(error)
            response = page(
                "problem.html",
                status=problem.status,
                session=await session_of(request) if problem.status < 500 else None,
                title=KINDS[problem.code].title,
                detail=problem.detail,
                hint=problem.hint,
            )
            if problem.retry_after_seconds is not None:
                response.headers["Retry-After"] = str(problem.retry_after_seconds)
        return add_headers(response)

    return endpoint


async def session_of(request: Request) -> Session | None:
    """The session that a request's cookie names."""
    name, service = request.cookies.get(sessions.COOKIE), service_of(request)
    if not name:
        return None
    return await service.show(sessions.find, service.store, name, now=time.time())


@asynccontextmanager
async def own_form(
    request: Request, session: Session | None, large_fields: Collection[str] = ()
) -> AsyncIterator[Form]:
    """The form of a request, which takes room until the end of the block; Problem if it does not
    come from one of our pages."""
    origin = urlsplit(request.headers.get("origin", ""))
    if origin.netloc != request.headers.get("host", "") or not origin.netloc:
        raise Problem(
            "forbidden",
            "this form was not sent by a page of this collector",
            hint="a proxy before the collector must pass on the Host header unchanged",
        )
    service, content_type = service_of(request), request.headers.get("content-type", "")
    # Our pages send large fields as multipart/form-data; to decode others takes much more memory.
    is_large = large_fields and content_type.startswith("multipart/form-data")
    most_bytes = service.settings.study_bytes if is_large else FORM_BYTES
    async with (service.sign_ins if session is None else service.requests).read(
        request,
        most_bytes=SIGN_IN_BYTES if session is None else most_bytes,
        seconds=service.settings.upload_seconds,
        who="study" if is_large else "form",
    ) as body:
        form = await service.show(Form.parse, content_type, body, large_fields=large_fields)
        if session is not None and not session.has_csrf(form.text("csrf")):
            raise Problem("forbidden", "this form is from another session", hint="reload the page")
        yield form


def is_encrypted(request: Request) -> bool:
    """Whether the browser uses https, to us or to a proxy."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")


def safe_next_page(path: str) -> str:
    """The page to go to after signing in: this path if it is one of the dashboard's."""
    return path if _OWN_PAGE.fullmatch(path) else HOME


def _ask_to_sign_in(request: Request) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    next_page = safe_next_page(path) if request.method == "GET" else HOME
    address = SIGN_IN if next_page == HOME else f"{SIGN_IN}?next={quote(next_page, safe='/')}"
    if "hx-request" in request.headers:  # a live page has lost its session
        return Response(status_code=401, headers={"HX-Redirect": address})
    return RedirectResponse(address, status_code=303)

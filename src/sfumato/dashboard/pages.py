"""Pages to read: studies and their releases, the ledger, the costs; and the end of a study."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from sfumato.collector import studies
from sfumato.collector.http.service import service_of
from sfumato.collector.problems import Problem
from sfumato.dashboard import charts, sessions
from sfumato.dashboard import queries as reading
from sfumato.dashboard.queries import Known
from sfumato.dashboard.rendering import page, rows
from sfumato.dashboard.visits import (
    HOME,
    SIGN_IN,
    Visit,
    anybody,
    is_encrypted,
    own_form,
    page_of_ours,
    session_of,
    signed_in,
)
from sfumato.questions import registry

PAGE_ROWS = 100  # of a release's table on one page
_MEDIA_TYPES = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "png": "image/png",
}


@anybody
async def home(request: Request) -> Response:
    return RedirectResponse(HOME, status_code=303)


@anybody
async def sign_in_page(request: Request) -> Response:
    wanted = page_of_ours(request.query_params.get("next", ""))
    if await session_of(request) is not None:
        return RedirectResponse(wanted, status_code=303)
    return page("sign_in.html", session=None, next=wanted, problem=None)


@anybody
async def sign_in(request: Request) -> Response:
    form = await own_form(request, None)
    wanted, service = page_of_ours(form.text("next")), service_of(request)
    try:
        name, seconds = await service.show(
            sessions.start, service.store, form.text("token"), now=service.now()
        )
    except Problem as problem:
        if problem.code != "unauthorized":
            raise
        return page("sign_in.html", status=401, session=None, next=wanted, problem=problem)
    response = RedirectResponse(wanted, status_code=303)
    response.set_cookie(
        sessions.COOKIE,
        name,
        max_age=seconds,
        path="/dashboard",
        secure=is_encrypted(request),
        httponly=True,
        samesite="strict",
    )
    return response


@signed_in()
async def sign_out(visit: Visit) -> Response:
    name = visit.request.cookies[sessions.COOKIE]
    await visit.service.show(sessions.end, visit.service.store, name)
    response = RedirectResponse(SIGN_IN, status_code=303)
    response.delete_cookie(sessions.COOKIE, path="/dashboard", httponly=True, samesite="strict")
    return response


@signed_in()
async def study_list(visit: Visit) -> Response:
    lines = await visit.service.show(reading.lines, visit.service.store)
    return visit.page("studies.html", lines=lines, is_live=any(line.is_alive for line in lines))


@signed_in()
async def study(visit: Visit) -> Response:
    known, number = await _known(visit), _page_number(visit.request)
    total, first = len(known.estimates), (number - 1) * PAGE_ROWS
    pages = max(1, math.ceil(total / PAGE_ROWS))
    if number > pages:
        raise Problem("not-found")
    state = known.state
    return visit.page(
        "study.html",
        study=state,
        is_live=state["state"] in reading.ALIVE,
        wanted=reading.wanted_of([task["wanted"] for task in state["tasks"]], state),
        answering=known.answering,
        retention_days=visit.service.settings.retention_days,
        released=known.released,
        compared=reading.compared(state, known.released),
        rows=rows(tuple(known.estimates[first : first + PAGE_ROWS]), is_mean=known.is_mean),
        last=min(first + PAGE_ROWS, total),
        total=total,
        first=first,
        number=number,
        pages=pages,
        top=min(charts.TOP, total),
        is_paler=not all(each.is_sure for each in known.shown),
        endings=[] if known.released is None else _endings(known.released),
    )


@signed_in()
async def chart(visit: Visit) -> Response:
    """The picture of a release, for the page's script."""
    known = await _known(visit)
    _ = known.release  # raises where there is none
    return JSONResponse(charts.bars(known.shown, axis="mean" if known.is_mean else "reports"))


@signed_in()
async def export(visit: Visit) -> Response:
    """A release as a file."""
    known, ending = await _known(visit), visit.request.path_params["ending"]
    if ending not in _endings(known.release):
        raise Problem("not-found")
    content = await visit.service.show(_exported, known.release, ending)
    name = re.sub(r"[^A-Za-z0-9]+", "-", known.state["name"]).strip("-").lower() or "release"
    return Response(
        content,
        media_type=_MEDIA_TYPES[ending],
        headers={"Content-Disposition": f'attachment; filename="{name}.{ending}"'},
    )


@signed_in("admin")
async def close_page(visit: Visit) -> Response:
    known = await _known(visit)
    if known.state["state"] != "collecting":
        return RedirectResponse(f"{HOME}/{visit.study_id}", status_code=303)
    return visit.page("close.html", study=known.state, answering=known.answering)


@signed_in("admin")
async def close(visit: Visit) -> Response:
    await _known(visit)
    await visit.service.show(studies.close, visit.service.store, visit.study_id)
    await visit.service.tasks.snapshot(fresh=True)
    return RedirectResponse(f"{HOME}/{visit.study_id}", status_code=303)


@signed_in()
async def ledger(visit: Visit) -> Response:
    books = await visit.service.show(reading.books, visit.service.store)
    return visit.page("ledger.html", books=books)


@signed_in()
async def costs(visit: Visit) -> Response:
    bills = await visit.service.show(reading.bills, visit.service.store)
    return visit.page("costs.html", bills=bills)


@anybody
async def nothing(request: Request) -> Response:
    raise Problem("not-found")


async def _known(visit: Visit) -> Known:
    return await visit.service.show(reading.known, visit.service.store, visit.study_id)


def _page_number(request: Request) -> int:
    given = request.query_params.get("page", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", given):
        raise Problem("not-found")
    return int(given)


def _endings(released: Mapping[str, Any]) -> list[str]:
    """The kinds of files that a release can be had as."""
    can_plot = importlib.util.find_spec("matplotlib") is not None
    endings = registry.release_class(released["study"]["question"]).endings
    return [ending for ending in endings if ending != "png" or can_plot]


def _exported(released: Mapping[str, Any], ending: str) -> bytes:
    return registry.read_release(released).export(ending)

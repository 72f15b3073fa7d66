"""The pages that show studies, releases, the ledger and costs, and that close or retry a study."""

from __future__ import annotations

import importlib.util
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from sfumato.collector import studies, tokens
from sfumato.collector.http.service import service_of
from sfumato.collector.problems import Problem
from sfumato.dashboard import charts, fields, queries, sessions
from sfumato.dashboard.queries import StudyView
from sfumato.dashboard.rendering import page, rows
from sfumato.dashboard.visits import (
    HOME,
    SIGN_IN,
    Visit,
    is_encrypted,
    own_form,
    public_page,
    safe_next_page,
    session_of,
    sign_in_required,
)
from sfumato.device import offers
from sfumato.questions import registry

PAGE_ROWS = 100  # rows of a release's table on one page
_MEDIA_TYPES = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "png": "image/png",
    "html": "text/html; charset=utf-8",
}


@public_page
async def home(request: Request) -> Response:
    return RedirectResponse(HOME, status_code=303)


@public_page
async def sign_in_page(request: Request) -> Response:
    next_page = safe_next_page(request.query_params.get("next", ""))
    if await session_of(request) is not None:
        return RedirectResponse(next_page, status_code=303)
    return page("sign_in.html", session=None, next=next_page, problem=None)


@public_page
async def sign_in(request: Request) -> Response:
    service = service_of(request)
    async with own_form(request, None) as form:
        next_page, token = safe_next_page(form.text("next")), form.text("token")
    try:
        name, seconds = await service.show(sessions.start, service.store, token, now=time.time())
    except Problem as problem:
        if problem.code != "unauthorized":
            raise
        return page("sign_in.html", status=401, session=None, next=next_page, problem=problem)
    response = RedirectResponse(next_page, status_code=303)
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


@sign_in_required()
async def sign_out(visit: Visit) -> Response:
    name = visit.request.cookies[sessions.COOKIE]
    await visit.service.show(sessions.end, visit.service.store, name)
    response = RedirectResponse(SIGN_IN, status_code=303)
    response.delete_cookie(sessions.COOKIE, path="/dashboard", httponly=True, samesite="strict")
    return response


@sign_in_required()
async def study_list(visit: Visit) -> Response:
    summaries = await visit.service.show(
        queries.study_summaries, visit.service.store, visit.session.token
    )
    is_live = any(summary.is_alive for summary in summaries)
    key = offers.public_key(visit.service.key).hex()
    return visit.page("studies.html", summaries=summaries, is_live=is_live, public_key=key)


@sign_in_required()
async def study(visit: Visit) -> Response:
    view, number = await _study_view(visit), _page_number(visit.request)
    total, first = len(view.estimates), (number - 1) * PAGE_ROWS
    pages = max(1, math.ceil(total / PAGE_ROWS))
    if number > pages:
        raise Problem("not-found")
    state = view.state
    return visit.page(
        "study.html",
        study=state,
        is_live=state["state"] in studies.ALIVE,
        target=queries.target_of([task["wanted"] for task in state["tasks"]], state),
        active_rounds=view.active_rounds,
        retention_days=visit.service.settings.retention_days,
        release=view.release,
        comparisons=queries.comparisons(state, view.release),
        columns=view.columns,
        keys=fields.SETTINGS,
        rows=rows(
            tuple(view.estimates[first : first + PAGE_ROWS]),
            has_significance="significant" in view.columns,
        ),
        last=min(first + PAGE_ROWS, total),
        total=total,
        first=first,
        number=number,
        pages=pages,
        charts={name: len(view.chart_estimates(name)) for name in view.segments},
        has_paler_bars=not all(
            each.is_significant for name in view.segments for each in view.chart_estimates(name)
        ),
        endings=[] if view.release is None else _endings(view.release),
    )


@sign_in_required()
async def chart(visit: Visit) -> Response:
    """The chart of a release, or of one of its segments, for the page's script."""
    view, segment = await _study_view(visit), visit.request.query_params.get("segment", "")
    view.require_release()
    if segment not in view.segments:
        raise Problem("not-found")
    axis = "reports" if "count" in view.columns else "mean" if "mean" in view.columns else "value"
    return JSONResponse(charts.bars(view.chart_estimates(segment), axis=axis))


@sign_in_required()
async def export(visit: Visit) -> Response:
    """A release as a file."""
    view, ending = await _study_view(visit), visit.request.path_params["ending"]
    release = view.require_release()
    if ending not in _endings(release):
        raise Problem("not-found")
    content = await visit.service.show(_export, release, ending)
    name = re.sub(r"[^A-Za-z0-9]+", "-", view.state["name"]).strip("-").lower() or "release"
    return Response(
        content,
        media_type=_MEDIA_TYPES[ending],
        headers={"Content-Disposition": f'attachment; filename="{name}.{ending}"'},
    )


@sign_in_required("admin")
async def close_page(visit: Visit) -> Response:
    view = await _study_view(visit)
    if view.state["state"] != "collecting":
        return RedirectResponse(f"{HOME}/{visit.study_id}", status_code=303)
    return visit.page("close.html", study=view.state, active_rounds=view.active_rounds)


@sign_in_required("admin")
async def close(visit: Visit) -> Response:
    await _study_view(visit)
    await visit.service.show(studies.close, visit.service.store, visit.study_id)
    await visit.service.tasks.snapshot(fresh=True)
    return RedirectResponse(f"{HOME}/{visit.study_id}", status_code=303)


@sign_in_required("admin")
async def retry(visit: Visit) -> Response:
    await _study_view(visit)
    await visit.service.show(studies.retry, visit.service.store, visit.study_id)
    visit.service.wake_worker()
    return RedirectResponse(f"{HOME}/{visit.study_id}", status_code=303)


@sign_in_required()
async def ledger(visit: Visit) -> Response:
    tokens.require_all_studies(visit.session.token.studies)
    view = await visit.service.show(queries.ledger_view, visit.service.store)
    return visit.page("ledger.html", ledger=view)


@sign_in_required()
async def costs(visit: Visit) -> Response:
    bills = await visit.service.show(queries.bills, visit.service.store, visit.session.token)
    return visit.page("costs.html", bills=bills)


@public_page
async def not_found(request: Request) -> Response:
    raise Problem("not-found")


async def _study_view(visit: Visit) -> StudyView:
    """The study, if the person may see it; otherwise the answer is as if there were none."""
    if not visit.session.token.may_see(visit.study_id):
        raise Problem("unknown-study")
    return await visit.service.show(queries.study_view, visit.service.store, visit.study_id)


def _page_number(request: Request) -> int:
    text = request.query_params.get("page", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise Problem("not-found")
    return int(text)


def _endings(release: Mapping[str, Any]) -> list[str]:
    """The file formats of a release."""
    can_plot = importlib.util.find_spec("matplotlib") is not None
    endings = registry.release_class(release["study"]["question"]).endings
    return [ending for ending in endings if ending != "png" or can_plot]


def _export(release: Mapping[str, Any], ending: str) -> bytes:
    return registry.read_release(release).export(ending)

"""The page for a new study: what it would give is shown before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import RedirectResponse, Response

from sfumato.collector import requests, studies
from sfumato.collector.problems import Problem
from sfumato.dashboard import study_form
from sfumato.dashboard.forms import Form
from sfumato.dashboard.visits import HOME, Visit, signed_in
from sfumato.errors import SfumatoError
from sfumato.planning import Plan, plan
from sfumato.privacy import SystemRng


@signed_in("admin")
async def new_study(visit: Visit) -> Response:
    return _page(visit, visit.form)


@signed_in("admin")
async def show_plan(visit: Visit) -> Response:
    """What the study would give and cost; nothing starts.

    A script gets the plan alone, and puts it under the form.
    """
    alone = "hx-request" in visit.request.headers
    try:
        request = await visit.service.show(study_form.request_of, visit.form)
        planned = await visit.service.planners.call(_planned, request)
    except SfumatoError as error:
        problem = _shown(error)
        if alone:
            return visit.page("plan.html", status=problem.status, problem=problem, planned=None)
        return _page(visit, visit.form, problem=problem)
    told, digest = planned.to_dict(), study_form.digest(request)
    if alone:
        return visit.page("plan.html", planned=told, digest=digest, is_changed=False)
    return _page(visit, visit.form, request, planned=told, digest=digest)


@signed_in("admin")
async def start(visit: Visit) -> Response:
    """Open the study, if it is the one whose plan was shown."""
    request = None
    try:
        request = await visit.service.show(study_form.request_of, visit.form)
        digest = study_form.digest(request)
        if visit.form.text("planned") != digest:
            planned = await visit.service.planners.call(_planned, request)
            return _page(
                visit,
                visit.form,
                request,
                planned=planned.to_dict(),
                digest=digest,
                is_changed=True,
            )
        row = await visit.service.planners.call(
            studies.create,
            visit.service.store,
            request,
            key=visit.service.key,
            rng=SystemRng(),
            now=visit.service.now,
        )
    except SfumatoError as error:
        return _page(visit, visit.form, request, problem=_shown(error))
    await visit.service.tasks.snapshot(fresh=True)
    return RedirectResponse(f"{HOME}/{row.id}", status_code=303)


def _planned(request: Mapping[str, Any]) -> Plan:
    asked = requests.Request.from_mapping(request)
    study, dictionary = asked.asked(), asked.dictionary()
    return plan(study, items=None if dictionary is None else dictionary.items)


def _shown(error: SfumatoError) -> Problem:
    """The problem to show beside the form; one of the store is a page of its own."""
    problem = Problem.of(error)
    if problem.status >= 500:
        raise problem
    return problem


def _page(
    visit: Visit,
    form: Form,
    request: Mapping[str, Any] | None = None,
    *,
    problem: Problem | None = None,
    planned: Mapping[str, Any] | None = None,
    digest: str = "",
    is_changed: bool = False,
) -> Response:
    """The form as it was filled in; a file that was chosen is pasted, since it cannot be kept."""
    given = {"question": "frequencies", "trust": "local", "items": ""} | dict(form.texts)
    if request is not None and request["items"] is not None:
        given["items"] = "\n".join(request["items"])
    wrong = "" if problem is None else str(problem).partition(" ")[0]
    return visit.page(
        "new_study.html",
        status=200 if problem is None else problem.status,
        given=given,
        problem=problem,
        wrong=wrong,
        planned=planned,
        digest=digest,
        is_changed=is_changed,
        groups=study_form.GROUPS,
        questions={name: study_form.QUESTIONS[name] for name in study_form.questions()},
        trusts={name: study_form.TRUSTS[name] for name in study_form.trusts()},
        trusts_of=study_form.trusts,
    )

"""The page for a new study, which shows the plan before the study starts."""

from __future__ import annotations

import hashlib
import tempfile
import time
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.responses import RedirectResponse, Response

from sfumato import files
from sfumato.collector import studies
from sfumato.collector.problems import Problem
from sfumato.collector.requests import Request
from sfumato.dashboard.fields import (
    GROUPS,
    TRUST_TEXTS,
    Field,
    applies,
    questions,
    texts_of,
    trusts,
)
from sfumato.dashboard.forms import File, Form
from sfumato.dashboard.visits import HOME, Visit, sign_in_required
from sfumato.errors import DataError, SfumatoError, StudyError
from sfumato.privacy import SystemRng
from sfumato.spec import canonical
from sfumato.study import QUESTIONS, number

_LARGE_FIELDS = ("items", "dictionary")


@sign_in_required("admin")
async def new_study(visit: Visit) -> Response:
    return _page(visit, visit.form)


@sign_in_required("admin", large_fields=_LARGE_FIELDS)
async def show_plan(visit: Visit) -> Response:
    """Show the expected accuracy and cost, without starting the study.

    A script gets only the plan, and inserts it below the form.
    """
    is_script = "hx-request" in visit.request.headers
    try:
        request = await visit.service.show(request_of, visit.form)
        planned = await visit.service.planners.call(_plan, request)
    except SfumatoError as error:
        problem = _form_problem(error)
        if is_script:
            return visit.page("plan.html", status=problem.status, problem=problem, planned=None)
        return _page(visit, visit.form, problem=problem)
    digest = digest_of(request)
    if is_script:
        return visit.page("plan.html", planned=planned, digest=digest, is_changed=False)
    return _page(visit, visit.form, request, planned=planned, digest=digest)


@sign_in_required("admin", large_fields=_LARGE_FIELDS)
async def start(visit: Visit) -> Response:
    """Open the study, if it is the one whose plan was shown."""
    request = None
    try:
        request = await visit.service.show(request_of, visit.form)
        digest = digest_of(request)
        if visit.form.text("planned") != digest:
            planned = await visit.service.planners.call(_plan, request)
            return _page(
                visit,
                visit.form,
                request,
                planned=planned,
                digest=digest,
                is_changed=True,
            )
        row = await visit.service.planners.call(
            studies.create,
            visit.service.store,
            request,
            key=visit.service.key,
            rng=SystemRng(),
            now=time.time,
        )
    except SfumatoError as error:
        return _page(visit, visit.form, request, problem=_form_problem(error))
    await visit.service.tasks.snapshot(fresh=True)
    return RedirectResponse(f"{HOME}/{row.id}", status_code=303)


def _plan(values: Mapping[str, Any]) -> dict[str, Any]:
    return Request.from_mapping(values).plan().to_dict()


def _form_problem(error: SfumatoError) -> Problem:
    """The problem to show beside the form; one of the store is raised, for a page of its own."""
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
    """The form as it was filled in; the items of a chosen file are pasted, since a browser does not
    keep the file."""
    values = {"question": "frequencies", "trust": "local", "items": ""} | dict(form.texts)
    if request is not None and request["items"] is not None:
        values["items"] = "\n".join(request["items"])
    wrong = "" if problem is None else str(problem).partition(" ")[0]
    return visit.page(
        "new_study.html",
        status=200 if problem is None else problem.status,
        values=values,
        problem=problem,
        wrong=wrong,
        planned=planned,
        digest=digest,
        is_changed=is_changed,
        groups=GROUPS,
        questions={name: texts_of(name) for name in questions()},
        trusts={name: TRUST_TEXTS[name] for name in trusts()},
        trusts_of=trusts,
    )


_DAY_ZERO = date(1970, 1, 1)
_TERMS = (  # of the request, not of the study
    "delay_seconds",
    "lifetime_epsilon",
    "closes",
    "open_seconds",
    "minimum",
    "passcode_digest",
)


def request_of(form: Form) -> dict[str, Any]:
    """The request in a form; keys of its TOML override its fields.

    Fields that are empty, or for another question or trust, are left out.
    """
    toml = _toml(form.text("toml"))
    keys: dict[str, Any] = {name: form.text(name) for name in ("question", "trust")} | toml
    for field in (field for _, group in GROUPS for field in group):
        if (
            field.name not in toml
            and applies(field, keys["question"], keys["trust"])
            and form.text(field.name)
        ):
            keys[field.name] = _value(field, form.text(field.name))
    terms = {name: keys.pop(name) for name in _TERMS if name in keys}
    return {
        "name": form.text("name"),
        "purpose": form.text("purpose"),
        "study": keys,
        "items": items_of(form) if _lists_items(keys) else None,
        **terms,
    }


def digest_of(request: Mapping[str, Any]) -> str:
    """A digest of what the plan depends on: all of the request but its name and purpose."""
    study, items = request["study"], request["items"]
    terms = {key: value for key, value in request.items() if key in _TERMS}
    texts = {key: str(value) for key, value in (study | terms).items()}  # JSON has no inf, no date
    return hashlib.sha256(canonical({"items": items, "texts": texts}).encode()).hexdigest()


def items_of(form: Form) -> list[str] | None:
    """The dictionary: pasted lines, or a chosen file."""
    pasted = [item for line in form.texts.get("items", "").splitlines() if (item := line.strip())]
    file = form.files.get("dictionary")
    if file is None:
        return pasted or None
    if pasted:
        raise DataError("items must be pasted or in a file; got both")
    return _read(file)


def _read(file: File) -> list[str]:
    ending = Path(file.name.lower()).suffix
    if ending in (".csv", ".parquet"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"dictionary{ending}"
            path.write_bytes(file.content)
            batches = files.read_columns(path, [files.column_names(path)[0]], [pa.string()])
            items = [item for batch in batches for item in batch.column(0).to_pylist()]
        if None in items:
            raise DataError("the dictionary has a missing item")
        return items
    try:
        lines = file.content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("a dictionary must be a text, a .csv or a .parquet file") from None
    return [item for line in lines if (item := line.strip())]


def _lists_items(keys: Mapping[str, Any]) -> bool:
    facts = QUESTIONS.get(str(keys["question"]))
    return facts is not None and facts.dictionary != "none"


def _value(field: Field, text: str) -> Any:
    try:
        if field.kind == "whole":
            return int(text.replace(",", "").replace("_", ""))
        if field.kind == "number":
            return number(text)
        if field.kind == "date":
            return (date.fromisoformat(text) - _DAY_ZERO).days
    except ValueError:
        kind = {"whole": "a whole number", "number": "a number", "date": "a date"}[field.kind]
        raise StudyError(f"{field.name} must be {kind}; got {text[:40]!r}") from None
    return text


def _toml(text: str) -> dict[str, Any]:
    try:
        keys = tomllib.loads(text, parse_float=number)
    except (ValueError, RecursionError) as problem:  # of the syntax, and of numbers and nesting
        raise StudyError(f"the study is not TOML: {problem}") from None
    closes = keys.get("closes")
    # A time is a date, too, and no day.
    return keys | {"closes": (closes - _DAY_ZERO).days} if type(closes) is date else keys

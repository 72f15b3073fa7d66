"""The page for a new study: what it would give is shown before it starts."""

from __future__ import annotations

import hashlib
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from starlette.responses import RedirectResponse, Response

from sfumato import files
from sfumato.collector import requests, studies
from sfumato.collector.problems import Problem
from sfumato.dashboard.forms import File, Form
from sfumato.dashboard.visits import HOME, Visit, signed_in
from sfumato.errors import DataError, SfumatoError, StudyError
from sfumato.planning import Plan, plan
from sfumato.privacy import SystemRng
from sfumato.spec import canonical
from sfumato.study import QUESTIONS, TRUSTS, number


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
        request = await visit.service.show(request_of, visit.form)
        planned = await visit.service.planners.call(_planned, request)
    except SfumatoError as error:
        problem = _shown(error)
        if alone:
            return visit.page("plan.html", status=problem.status, problem=problem, planned=None)
        return _page(visit, visit.form, problem=problem)
    told, digest = planned.to_dict(), digest_of(request)
    if alone:
        return visit.page("plan.html", planned=told, digest=digest, is_changed=False)
    return _page(visit, visit.form, request, planned=told, digest=digest)


@signed_in("admin")
async def start(visit: Visit) -> Response:
    """Open the study, if it is the one whose plan was shown."""
    request = None
    try:
        request = await visit.service.show(request_of, visit.form)
        digest = digest_of(request)
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
    study, dictionary = asked.parse_study(), asked.dictionary()
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
        groups=GROUPS,
        questions={name: QUESTION_TEXTS.get(name, (name, "")) for name in questions()},
        trusts={name: TRUST_TEXTS[name] for name in trusts()},
        trusts_of=trusts,
    )


For = Literal[
    "", "local", "sums", "tables", "frequencies", "counts", "bytes", "words", "vectors", "mean"
]
_DAY_ZERO = date(1970, 1, 1)
_TERMS = ("delay_seconds", "lifetime_epsilon", "closes")  # of the request, not of the study

QUESTION_TEXTS = {
    "frequencies": ("Frequencies", "How common is each item of a list?"),
    "new_words": ("New words", "Which words, that nobody listed, are common?"),
    "heavy_hitters": ("Heavy hitters", "Which items, that nobody listed, occur often?"),
    "histogram": ("Histogram", "Which items are there, and how often?"),
    "mean": ("Mean", "What is the mean of the devices' vectors?"),
    "train": ("Model", "What do devices' examples teach it? Its table [training] is TOML, below."),
}
TRUST_TEXTS = {
    "local": ("Local", "Nobody is trusted. Devices blur what they send."),
    "secure": ("Secure", "The collector sees sums only. Devices add the noise in shares."),
    "central": ("Central", "The collector sees what devices send, and adds the noise."),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form, named as the key of a study or of its terms."""

    name: str
    label: str
    hint: str
    kind: Literal["whole", "number", "text", "date"] = "whole"
    example: str = ""
    only: For = ""  # for which trust or question it says something


PROMISE = (
    Field("epsilon", "Epsilon", "The smaller, the more private.", "number", "1"),
    Field("delta", "Delta", "What may go wrong at most.", "number", "1e-6", "sums"),
    Field("daily_reports", "Daily reports", "Of one device.", example="1", only="local"),
    Field("lifetime_epsilon", "Lifetime epsilon", "Of one device, in all.", "number", only="local"),
)
POPULATION = (
    Field("devices", "Devices", "How many will answer.", example="100000"),
    Field("items_per_device", "Items per device", "That may count.", example="1", only="tables"),
    Field("rounds", "Rounds", "Each asks other devices.", example="1", only="counts"),
    Field("dropout", "Dropout", "Share that will not answer.", "number", "0"),
)
ANSWER = (
    Field("threshold", "Threshold", "Counts below are not listed.", "number", only="counts"),
    Field(
        "target_error",
        "Target error",
        "As a share of the devices.",
        "number",
        "0.01",
        "frequencies",
    ),
    Field("bytes_per_device", "Bytes per device", "Most that one may send.", only="bytes"),
    Field("word_length", "Word length", "Longer words are cut.", example="10", only="words"),
    Field("alphabet", "Alphabet", "Of which words are made.", "text", only="words"),
    Field("clip", "Clip", "Longer vectors are scaled to it.", "number", "1", "vectors"),
    Field("dimensions", "Dimensions", "Of a vector.", example="1000", only="mean"),
)
TERMS = (
    Field("delay_seconds", "Delay (seconds)", "A report waits up to so long.", example="86400"),
    Field("closes", "Closes", "Last day on which reports count.", "date"),
)
GROUPS = (
    ("The promise", PROMISE),
    ("The devices", POPULATION),
    ("The answer", ANSWER),
    ("Collecting", TERMS),
)


def questions() -> list[str]:
    """Those that a collector answers, in the order of the form."""
    return [name for name, facts in QUESTIONS.items() if facts.collected]


def trusts(question: str | None = None) -> list[str]:
    """Those with which a collector answers a question, or any."""
    asked = [QUESTIONS[question]] if question else list(QUESTIONS.values())
    return [name for name in TRUSTS if any(name in facts.collected for facts in asked)]


def request_of(form: Form) -> dict[str, Any]:
    """The request that a form makes; keys of its TOML go before its fields.

    A field that is empty, or of another question or trust, says nothing.
    """
    told = _toml(form.text("toml"))
    keys: dict[str, Any] = {name: form.text(name) for name in ("question", "trust")} | told
    for field in (field for _, group in GROUPS for field in group):
        if field.name not in told and _applies(field, keys) and form.text(field.name):
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
    """What of a request its plan depends on: all but what it is called."""
    told = {key: value for key, value in request.items() if key not in ("name", "purpose")}
    study = {key: str(value) for key, value in told["study"].items()}  # inf is no JSON
    return hashlib.sha256(canonical(told | {"study": study}).encode()).hexdigest()


def items_of(form: Form) -> list[str] | None:
    """The dictionary: lines that were pasted, or a file that was chosen."""
    pasted = [item for line in form.texts.get("items", "").splitlines() if (item := line.strip())]
    file = form.files.get("dictionary")
    if file is None:
        return pasted or None
    if pasted:
        raise DataError("items are pasted or in a file; got both")
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
            raise DataError("the dictionary has an item that is missing")
        return items
    try:
        lines = file.content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("a dictionary must be a text, a .csv or a .parquet file") from None
    return [item for line in lines if (item := line.strip())]


def _lists_items(keys: Mapping[str, Any]) -> bool:
    facts = QUESTIONS.get(str(keys["question"]))
    return facts is not None and facts.dictionary != "none"


def _applies(field: Field, keys: Mapping[str, Any]) -> bool:
    """Whether a field says something; the page's style hides it where it does not."""
    facts, trust = QUESTIONS.get(str(keys["question"])), TRUSTS.get(keys["trust"])
    if facts is None or trust is None:
        return True  # the study says what is wrong
    is_items = facts.data == "items"
    return {
        "": True,
        "local": trust.is_local,
        "sums": not trust.is_local,
        "tables": not trust.is_local and is_items,
        "frequencies": facts.dictionary == "listed",
        "counts": is_items and facts.dictionary != "known",
        "bytes": facts.data != "examples" and facts.dictionary != "known",
        "words": is_items and facts.dictionary != "listed",
        "vectors": not is_items,
        "mean": facts.data == "vectors",
    }[field.only]


def _value(field: Field, text: str) -> Any:
    try:
        if field.kind == "whole":
            return int(text.replace(",", "").replace("_", ""))
        if field.kind == "number":
            return number(text)
        if field.kind == "date":
            return (date.fromisoformat(text) - _DAY_ZERO).days
    except ValueError:
        wanted = {"whole": "a whole number", "number": "a number", "date": "a date"}[field.kind]
        raise StudyError(f"{field.name} must be {wanted}; got {text[:40]!r}") from None
    return text


def _toml(text: str) -> dict[str, Any]:
    try:
        told = tomllib.loads(text, parse_float=number)
    except tomllib.TOMLDecodeError as problem:
        raise StudyError(f"the study is not TOML: {problem}") from None
    closes = told.get("closes")
    return told | {"closes": (closes - _DAY_ZERO).days} if isinstance(closes, date) else told

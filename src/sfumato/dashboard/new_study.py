"""The page for a new study, which shows the plan before the study starts."""

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
from sfumato.dashboard.visits import HOME, Visit, sign_in_required
from sfumato.errors import DataError, SfumatoError, StudyError
from sfumato.planning import Plan, plan
from sfumato.privacy import SystemRng
from sfumato.spec import canonical
from sfumato.study import QUESTIONS, TRUSTS, number

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
        planned = (await visit.service.planners.call(_plan, request)).to_dict()
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
        return _page(visit, visit.form, request, problem=_form_problem(error))
    await visit.service.tasks.snapshot(fresh=True)
    return RedirectResponse(f"{HOME}/{row.id}", status_code=303)


def _plan(values: Mapping[str, Any]) -> Plan:
    request = requests.Request.from_mapping(values)
    study, dictionary = request.parse_study(), request.dictionary()
    return plan(study, items=None if dictionary is None else dictionary.items)


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
        questions={name: QUESTION_TEXTS.get(name, (name, "")) for name in questions()},
        trusts={name: TRUST_TEXTS[name] for name in trusts()},
        trusts_of=trusts,
    )


For = Literal[
    "",
    "local",
    "reports",
    "sums",
    "tables",
    "frequencies",
    "counts",
    "bytes",
    "words",
    "vectors",
    "mean",
]
_DAY_ZERO = date(1970, 1, 1)
_TERMS = (  # of the request, not of the study
    "delay_seconds",
    "lifetime_epsilon",
    "closes",
    "open_seconds",
    "minimum",
    "passcode_digest",
)

QUESTION_TEXTS = {
    "frequencies": ("Frequencies", "How common is each item of a list?"),
    "new_words": ("New words", "Which words that are not in a list are common?"),
    "heavy_hitters": ("Heavy hitters", "Which items are common, without a list of them?"),
    "histogram": ("Histogram", "Which items exist, and how common is each?"),
    "mean": ("Mean", "What is the mean of the devices' vectors?"),
    "train": ("Model", "Train a model on the devices' examples. Add a [training] table as TOML."),
}
TRUST_TEXTS = {
    "local": ("Local", "No trust needed: devices randomise their reports."),
    "secure": ("Secure", "The collector sees only sums; devices add the noise in shares."),
    "central": ("Central", "The collector sees the reports and adds the noise."),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form, named as the key of a study or of its terms."""

    name: str
    label: str
    hint: str
    kind: Literal["whole", "number", "text", "date"] = "whole"
    example: str = ""
    only: For = ""  # the trusts or questions that it is for


PROMISE = (
    Field("epsilon", "Epsilon", "Smaller is more private.", "number", "1"),
    Field("delta", "Delta", "Failure probability.", "number", "1e-6", "sums"),
    Field("daily_reports", "Daily reports", "Per device.", example="1", only="local"),
    Field("lifetime_epsilon", "Lifetime epsilon", "Total per device.", "number", only="local"),
)
POPULATION = (
    Field("devices", "Devices", "Expected number of devices.", example="100000"),
    Field(
        "items_per_device", "Items per device", "Contribution bound.", example="1", only="tables"
    ),
    Field("rounds", "Rounds", "Each has its own devices.", example="1", only="counts"),
    Field("dropout", "Dropout", "Share that will not answer.", "number", "0"),
)
ANSWER = (
    Field("threshold", "Threshold", "Smallest count to list.", "number", only="counts"),
    Field(
        "target_error",
        "Target error",
        "As a share of the devices.",
        "number",
        "0.01",
        "frequencies",
    ),
    Field("bytes_per_device", "Bytes per device", "Most to send.", only="bytes"),
    Field(
        "failure_probability",
        "Failure probability",
        "Of the target error.",
        "number",
        "0.1",
        "frequencies",
    ),
    Field("algorithm", "Algorithm", "Chosen by the plan if empty.", "text", only="frequencies"),
    Field("rows", "Rows", "Of the algorithm's table.", only="frequencies"),
    Field("width", "Width", "Cells in each row.", only="frequencies"),
    Field("preset", "Preset", "A paper's setting.", "text", "apple-emoji-2017", "frequencies"),
    Field("word_length", "Word length", "Longer words are cut.", example="10", only="words"),
    Field("alphabet", "Alphabet", "Characters of words.", "text", only="words"),
    Field("clip", "Clip", "Longest norm. Mean: measured if empty.", "number", only="vectors"),
    Field("dimensions", "Dimensions", "Length of a vector.", example="1000", only="mean"),
)
TERMS = (
    Field("delay_seconds", "Delay (seconds)", "Longest delay of a report.", example="86400"),
    Field("closes", "Closes", "Last day for reports.", "date"),
    Field("open_seconds", "Open (seconds)", "Even if it is full.", only="reports"),
    Field("minimum", "Minimum", "Reports that suffice then.", only="reports"),
)
GROUPS = (
    ("Privacy", PROMISE),
    ("Devices", POPULATION),
    ("Answer", ANSWER),
    ("Collection", TERMS),
)


def questions() -> list[str]:
    """The questions that a collector answers, in the order of the form."""
    return [name for name, facts in QUESTIONS.items() if facts.collected]


def trusts(question: str | None = None) -> list[str]:
    """The trusts with which a collector answers a question, or any question."""
    rows = [QUESTIONS[question]] if question else list(QUESTIONS.values())
    return [name for name in TRUSTS if any(name in facts.collected for facts in rows)]


def request_of(form: Form) -> dict[str, Any]:
    """The request in a form; keys of its TOML override its fields.

    Fields that are empty, or for another question or trust, are left out.
    """
    toml = _toml(form.text("toml"))
    keys: dict[str, Any] = {name: form.text(name) for name in ("question", "trust")} | toml
    for field in (field for _, group in GROUPS for field in group):
        if field.name not in toml and applies(field, keys) and form.text(field.name):
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
    values = {key: value for key, value in request.items() if key not in ("name", "purpose")}
    study = {key: str(value) for key, value in values["study"].items()}  # JSON has no inf
    return hashlib.sha256(canonical(values | {"study": study}).encode()).hexdigest()


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


def applies(field: Field, keys: Mapping[str, Any]) -> bool:
    """Whether a field is for this question and trust; the page's style hides it if not."""
    facts, trust = QUESTIONS.get(str(keys["question"])), TRUSTS.get(keys["trust"])
    if facts is None or trust is None:
        return True  # planning raises the error
    is_items = facts.data == "items"
    return {
        "": True,
        "local": trust.is_local,
        "reports": not trust.is_masked,
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
        kind = {"whole": "a whole number", "number": "a number", "date": "a date"}[field.kind]
        raise StudyError(f"{field.name} must be {kind}; got {text[:40]!r}") from None
    return text


def _toml(text: str) -> dict[str, Any]:
    try:
        keys = tomllib.loads(text, parse_float=number)
    except tomllib.TOMLDecodeError as problem:
        raise StudyError(f"the study is not TOML: {problem}") from None
    closes = keys.get("closes")
    return keys | {"closes": (closes - _DAY_ZERO).days} if isinstance(closes, date) else keys

"""Routes for analysts and administrators, each of which needs a token with a sufficient role.

An analyst sizes studies and reads their state, releases and the ledger. Only an admin opens,
closes, retries and deletes studies, and replaces their passcodes. An analyst whose token is for
some studies gets the same answer about any other as about one that does not exist. No route shows a
report.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sfumato.collector import requests, studies, tokens
from sfumato.collector.http.openapi import BYTES, problems, takes_json
from sfumato.collector.http.service import Service, service_of
from sfumato.collector.problems import Problem
from sfumato.collector.store.ledger import StoreLedger, price
from sfumato.collector.store.store import Store, StudyRow, TokenRow
from sfumato.collector.tokens import Role
from sfumato.privacy import SystemRng
from sfumato.spec import to_json


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PlanRequest(_Request):
    """A study to size: the keys of a study file, and the items in place of its dictionary."""

    study: dict[str, Any] = Field(
        description='keys of a study file; epsilon null, or "inf": no promise'
    )
    items: list[str] | None = None

    @field_validator("study")
    @classmethod
    def _check_finite(cls, study: dict[str, Any]) -> dict[str, Any]:
        """A number that is too large, such as 1e400, must not mean that nothing is promised."""
        for key, value in study.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number; epsilon null says: no promise")
        return study | {"epsilon": None} if study.get("epsilon") == "inf" else study


class StudyRequest(PlanRequest):
    """A study to open, and the terms on which devices take part."""

    name: str = Field(description="what users are shown, and what consent goes by")
    purpose: str = Field(description="one sentence, shown to users")
    daily_reports: int | None = Field(None, description="null: what the study says, or one")
    delay_seconds: int = 86_400
    lifetime_epsilon: float | None = None
    closes: int | None = Field(None, description="last day, in days since 1970-01-01")
    open_seconds: int | None = Field(
        None, description="how long each task takes reports, even if it is full"
    )
    minimum: int | None = Field(
        None, description="reports that suffice after open_seconds; null: as many as planned"
    )
    passcode_digest: str | None = Field(
        None, description="SHA-256 of the passcode that devices need, in hexadecimal; null: none"
    )


class PasscodeRequest(_Request):
    """Another passcode for a study."""

    passcode_digest: str = Field(description="SHA-256 of the passcode, in hexadecimal")


class Me(BaseModel):
    """Whose token this is."""

    id: str
    name: str
    role: str = Field(description="admin or analyst")
    expires: int = Field(description="in seconds since 1970")
    studies: list[str] | None = Field(description="ids of those it may see; null: all")


class Fault(BaseModel):
    """An error in the work for a study, which is tried again."""

    problem: str
    tries: int = Field(description="how many failed in a row")
    next_try: int = Field(description="in seconds since 1970")


class Study(BaseModel):
    """A study and its state."""

    model_config = ConfigDict(extra="allow")

    id: str
    name: str
    purpose: str
    state: Literal["collecting", "closing", "released", "failed", "deleted"]
    problem: str = Field("", description="why it failed")
    fault: Fault | None = Field(None, description="null: its last step did not fail")


class Studies(BaseModel):
    studies: list[Study]


class Entry(BaseModel):
    """One charge: which devices, for which task, what it cost."""

    study: str | None = Field(description="its name; null if the store has no such study")
    epsilon: float | None = Field(description="of this charge alone; null: without bound")
    campaign: str
    cohort: str
    task: str
    loss: dict[str, Any]


class Ledger(BaseModel):
    """What was spent of the budget that all studies share."""

    epsilon: float | None = Field(description="the budget; null: no limit")
    delta: float
    spent: float | None = Field(description="by the device asked most; null: without bound")
    entries: list[Entry]


_BEARER = HTTPBearer(auto_error=False, description="a token that `sfumato token create` made")
_STUDY_ID = re.compile("[0-9a-f]{32}")
_Model = TypeVar("_Model", bound=BaseModel)

Served = Annotated[Service, Depends(service_of)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


def needs(role: Role) -> Callable[..., Awaitable[TokenRow]]:
    """A dependency that returns the caller's token if it has this role. It runs before a body is
    read."""

    async def authorise(service: Served, credentials: Credentials) -> TokenRow:
        token = None if credentials is None else credentials.credentials
        return await service.call(tokens.authorise, service.store, token, role, now=time.time())

    return authorise


def study_id_of(study_id: Annotated[str, Path(description="32 hexadecimal digits")]) -> str:
    """Refuse malformed ids here; a database may not take them."""
    if not _STUDY_ID.fullmatch(study_id):
        raise _unknown_study()
    return study_id


StudyId = Annotated[str, Depends(study_id_of)]
ANALYST = Depends(needs("analyst"))
ADMIN = Depends(needs("admin"))
Analyst = Annotated[TokenRow, ANALYST]


def visible_study(caller: Analyst, study_id: StudyId) -> str:
    """The id, if the caller may see this study. Otherwise the store is not asked whether there is
    one, so that not even the time of the answer tells."""
    if not caller.may_see(study_id):
        raise _unknown_study()
    return study_id


def needs_all_studies(caller: Analyst) -> None:
    """Refuse a token that is for some studies only."""
    tokens.require_all_studies(caller.studies)


VisibleStudy = Annotated[str, Depends(visible_study)]

_UNREADABLE = ("malformed-request", "too-slow", "too-large")
_UNPLANNED = ("invalid-study", "invalid-items", "impossible-study", "busy")
_UNWRITTEN = ("store-unavailable", "store-read-only", "store-full")

router = APIRouter(prefix="/v1", responses=problems("unauthorized", "store-unavailable"))


@router.get("/me")
async def show_caller(caller: Analyst) -> Me:
    """Whose token this is"""
    return Me(
        id=caller.id,
        name=caller.name,
        role=caller.role,
        expires=caller.expires,
        studies=None if caller.studies is None else caller.studies.split(","),
    )


@router.post(
    "/plan",
    dependencies=[ANALYST],
    responses=problems(*_UNREADABLE, *_UNPLANNED),
    openapi_extra=takes_json(PlanRequest),
)
async def make_plan(request: Request, service: Served) -> dict[str, Any]:
    """Size a study and predict its error, its bytes and its privacy"""
    async with _body(request, service) as body:
        return await service.planners.call(_plan, body)


@router.post(
    "/studies",
    status_code=201,
    dependencies=[ADMIN],
    responses=problems(
        "forbidden", *_UNREADABLE, *_UNPLANNED, "name-taken", "budget-refused", *_UNWRITTEN
    ),
    openapi_extra=takes_json(StudyRequest),
)
async def create_study(request: Request, service: Served) -> Study:
    """Open a study; the same request again opens nothing more"""
    async with _body(request, service) as body:
        row = await service.planners.call(_create, service, body)
    await service.tasks.snapshot(fresh=True)
    return await _read_study(service, row.id)


@router.get("/studies")
async def list_studies(service: Served, caller: Analyst) -> Studies:
    """Every study that the caller may see, and its state"""
    return Studies(studies=await service.call(_read_studies, service.store, caller))


@router.get("/studies/{study_id}", responses=problems("unknown-study"))
async def show_study(study_id: VisibleStudy, service: Served) -> Study:
    """A study: its state, how many reports came, how many were rejected and why, its plan"""
    return await _read_study(service, study_id)


@router.post(
    "/studies/{study_id}/close",
    dependencies=[ADMIN],
    responses=problems("forbidden", "unknown-study", "wrong-state", *_UNWRITTEN),
)
async def close_study(study_id: StudyId, service: Served) -> Study:
    """Take no more reports, and release what they say"""
    await service.call(studies.close, service.store, study_id)
    await service.tasks.snapshot(fresh=True)
    return await _read_study(service, study_id)


@router.put(
    "/studies/{study_id}/passcode",
    dependencies=[ADMIN],
    responses=problems(
        "forbidden",
        *_UNREADABLE,
        "busy",
        "invalid-study",
        "unknown-study",
        "wrong-state",
        *_UNWRITTEN,
    ),
    openapi_extra=takes_json(PasscodeRequest),
)
async def replace_passcode(request: Request, study_id: StudyId, service: Served) -> Study:
    """Let devices in with another passcode only; the one before is refused from now on"""
    async with _body(request, service) as body:
        digest = (await service.call(_parse, body, PasscodeRequest)).passcode_digest
    await service.call(studies.replace_passcode, service.store, study_id, digest)
    await service.tasks.snapshot(fresh=True)
    return await _read_study(service, study_id)


@router.post(
    "/studies/{study_id}/retry",
    dependencies=[ADMIN],
    responses=problems("forbidden", "unknown-study", "wrong-state", *_UNWRITTEN),
)
async def retry_study(study_id: StudyId, service: Served) -> Study:
    """Try a failing study again at once, or a failed one that still has its reports"""
    await service.call(studies.retry, service.store, study_id)
    service.wake_worker()
    return await _read_study(service, study_id)


@router.delete(
    "/studies/{study_id}",
    dependencies=[ADMIN],
    responses=problems("forbidden", "unknown-study", *_UNWRITTEN),
)
async def delete_study(study_id: StudyId, service: Served) -> Study:
    """Drop everything that devices sent; the release and the ledger stay"""
    await service.call(studies.delete, service.store, study_id)
    await service.tasks.snapshot(fresh=True)
    return await _read_study(service, study_id)


@router.get(
    "/studies/{study_id}/release",
    response_model=dict[str, Any],
    responses=problems("unknown-study", "not-ready", "store-damaged"),
)
async def show_release(study_id: VisibleStudy, service: Served) -> Response:
    """The answer: estimates with intervals, what they promise and what they cost"""
    text = await service.call(_read_release, service.store, study_id)
    return Response(text, media_type="application/json")


@router.get(
    "/studies/{study_id}/model",
    response_class=Response,
    responses={
        200: {
            "description": "The parameters: float32 numbers, little-endian",
            "content": BYTES,
        },
        **problems("unknown-study", "not-ready", "no-model", "store-damaged"),
    },
)
async def show_model(study_id: VisibleStudy, service: Served) -> Response:
    """The parameters of a released model"""
    body = await service.call(_read_model, service.store, study_id)
    return Response(body, media_type="application/octet-stream")


@router.get("/ledger", dependencies=[Depends(needs_all_studies)], responses=problems("forbidden"))
async def show_ledger(service: Served) -> Ledger:
    """What was charged, and what of the budget is spent"""
    return await service.call(_read_ledger, service.store)


def _body(request: Request, service: Service) -> AbstractAsyncContextManager[bytes]:
    """The body of a request for a study. Parsed and planned, it takes many times its own length, so
    it takes room until that is done."""
    limits = service.settings
    return service.requests.read(
        request, most_bytes=limits.study_bytes, seconds=limits.upload_seconds, who="study"
    )


def _parse(body: bytes, model: type[_Model]) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise Problem("malformed-request", f"{place}: {reason}" if place else reason) from None


def _create(service: Service, body: bytes) -> StudyRow:
    values = _parse(body, StudyRequest).model_dump()
    return studies.create(service.store, values, key=service.key, rng=SystemRng(), now=time.time)


def _plan(body: bytes) -> dict[str, Any]:
    plan_request = _parse(body, PlanRequest)
    request = requests.Request(
        name="", purpose="", study=plan_request.study, items=plan_request.items
    )
    return request.plan().to_dict()


async def _read_study(service: Service, study_id: str) -> Study:
    return Study.model_validate(await service.call(studies.state, service.store, study_id))


def _read_studies(store: Store, caller: TokenRow) -> list[Study]:
    with store.reading() as tx:
        rows, faults = tx.studies(), tx.faults()
    return [
        Study.model_validate(
            {
                "id": row.id,
                "name": row.name,
                "purpose": row.purpose,
                "state": row.state,
                "problem": row.problem,
                "fault": studies.fault_state(faults.get(row.id)),
            }
        )
        for row in rows
        if caller.may_see(row.id)
    ]


def _read_release(store: Store, study_id: str) -> str:
    with store.reading() as tx:
        if tx.study(study_id) is None:
            raise _unknown_study()
        text = tx.release(study_id)
    if text is None:
        raise Problem("not-ready", hint="close the study, or wait until it has its reports")
    return text


def _read_model(store: Store, study_id: str) -> bytes:
    _read_release(store, study_id)  # raises if there is none
    with store.reading() as tx:
        body = tx.released_model(study_id)
    if body is None:
        raise Problem("no-model", hint="its release has everything there is")
    return body


def _unknown_study() -> Problem:
    return Problem("unknown-study", hint="sfumato study list shows all studies")


def _read_ledger(store: Store) -> Ledger:
    with store.reading() as tx:
        ledger = StoreLedger(tx)
        budget, spent, entries = ledger.budget, ledger.spent(), ledger.entries()
        names = {row.id: row.name for row in tx.studies()}
        tasks = {entry.task: tx.task(entry.task) for entry in entries}
    return Ledger(
        epsilon=budget.epsilon,
        delta=budget.delta,
        spent=_bounded(spent),
        entries=[
            Entry(
                study=None if (task := tasks[entry.task]) is None else names[task.study_id],
                epsilon=_bounded(price([entry], budget.delta)),
                campaign=entry.campaign,
                cohort=entry.cohort,
                task=entry.task,
                loss=json.loads(to_json(entry.loss)),
            )
            for entry in entries
        ],
    )


def _bounded(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None

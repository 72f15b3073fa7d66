"""Routes for devices: the open studies, their items and models, and the upload of reports.

A request has no token and no identifier; it is answered from what it asks for alone, and from a
passcode that all devices of a study share. FastAPI documents these routes, and `app.Application`
calls their functions directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from sfumato.collector.http.contents import ChunkedResponse
from sfumato.collector.http.openapi import (
    BYTES,
    NOT_STORED,
    PASSCODE_HEADER,
    hexadecimal,
    problems,
    takes_bytes,
)
from sfumato.collector.http.service import service_of
from sfumato.collector.http.task_cache import task_closed
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Transaction
from sfumato.errors import MismatchError
from sfumato.flow.admission import TooManyReportsError

_LONG_BODY_BYTES = 1 << 16  # admitted in a thread, so that others are answered meanwhile
_OFFERS_SECONDS = 60  # how long offers may be cached
_DIGEST = re.compile("[0-9a-f]{64}")

Digest = Annotated[str, hexadecimal(64)]
TaskId = Annotated[str, hexadecimal(64)]
router = APIRouter(prefix="/v1")


class Envelope(BaseModel):
    """A signed offer."""

    offer: str = Field(description="canonical JSON of an offer")
    signature: str = Field(description="Ed25519, in hexadecimal")


class Offers(BaseModel):
    offers: list[Envelope]


class Rejections(BaseModel):
    rejected: dict[str, int] = Field(description="how many reports were rejected, by reason")


@router.get(
    "/offers",
    response_model=Offers,
    response_description="The offers",
    responses={
        304: {"description": "The same as those of If-None-Match"},
        **problems("store-unavailable"),
    },
)
async def list_offers(request: Request) -> Response:
    """Every open task's signed offer."""
    snapshot = await service_of(request).tasks.snapshot()
    headers = {"ETag": snapshot.etag, "Cache-Control": f"public, max-age={_OFFERS_SECONDS}"}
    if snapshot.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return ChunkedResponse(snapshot.offers, media_type="application/json", headers=headers)


@router.get(
    "/dictionaries/{digest}",
    response_class=PlainTextResponse,
    response_description="One JSON string per line",
    responses=problems("unknown-dictionary", "busy", "store-unavailable"),
)
async def get_dictionary(request: Request, digest: Digest) -> Response:
    """The items of a study.

    The digest is the SHA-256 of the body.
    """
    unknown = Problem("unknown-dictionary", hint="an offer names its dictionary")
    return await _by_digest(request, digest, Transaction.dictionary, "text/plain", unknown)


@router.get(
    "/models/{digest}",
    response_class=Response,
    responses={
        200: {"description": "float32 numbers, little-endian", "content": BYTES},
        **problems("unknown-model", "busy", "store-unavailable"),
    },
)
async def get_model(request: Request, digest: Digest) -> Response:
    """The parameters that an open round's devices train from.

    The digest is the SHA-256 of the body.
    """
    unknown = Problem("unknown-model", hint="an offer names its model; fetch the offers again")
    media_type = "application/octet-stream"
    return await _by_digest(request, digest, Transaction.model, media_type, unknown)


@router.post(
    "/tasks/{task_id}/reports",
    status_code=201,
    response_class=Response,
    response_description="All are stored",
    responses={
        200: {"description": "Some were rejected, the others are stored", "model": Rejections},
        **problems(
            "malformed-upload",
            "wrong-passcode",
            "unknown-task",
            "masked-task",
            "task-closed",
            *NOT_STORED,
        ),
    },
    openapi_extra={
        "parameters": [PASSCODE_HEADER],
        **takes_bytes("Reports, each behind its length in four bytes, little-endian"),
    },
)
async def upload_reports(request: Request, task_id: TaskId) -> Response:
    """Store reports for a task; the answer comes when they are on disk.

    A device that heard no answer sends the same bytes again: a report counts once. A rejected
    report does not fail the others.

    Who sees what: reports are checked for whether a device could have made them, and stored as they
    came. None is logged or measured; metrics count reports by study and outcome only.
    """
    service = service_of(request)
    limits = service.settings
    task = await service.tasks.find(task_id)
    task.check_passcode(request)
    if task.admission is None:
        raise Problem("masked-task", hint="join a round of this task")
    service.commits.check_capacity(task.id)
    async with service.uploads.read(
        request, most_bytes=limits.upload_bytes, seconds=limits.upload_seconds, who=task.id
    ) as body:
        admit = task.admission.admit
        try:
            if len(body) > _LONG_BODY_BYTES:
                async with service.admissions:
                    admitted = await service.call(admit, body, most_reports=limits.upload_reports)
            else:
                admitted = admit(body, most_reports=limits.upload_reports)
        except TooManyReportsError as problem:
            raise Problem("too-large", hint=str(problem)) from problem
        except MismatchError as problem:
            raise Problem("malformed-upload", hint=str(problem)) from problem
        rejected = {str(reason): count for reason, count in admitted.rejected.items()}
        task.bucket.take(admitted.count + sum(rejected.values()))
        if not await service.commits.add_upload(task.id, admitted.count, admitted.body, rejected):
            raise task_closed()
    for outcome, count in (("stored", admitted.count), *rejected.items()):
        if count:
            service.metrics.reports.labels(task.study_id, outcome).inc(count)
    return JSONResponse({"rejected": rejected}) if rejected else _STORED


_STORED = Response(status_code=201)  # without a body: uvicorn would send that on its own


async def _by_digest(
    request: Request,
    digest: str,
    read: Callable[[Transaction, str], bytes | None],
    media_type: str,
    unknown: Problem,
) -> Response:
    """Content that never changes under its digest, so caches may keep it."""
    service, body = service_of(request), None
    name = f"{media_type} {digest}"

    def load() -> bytes | None:
        with service.store.reading() as tx:
            return read(tx, digest)

    if _DIGEST.fullmatch(digest):
        body = await service.contents.take(name, lambda: service.call(load))
    if body is None:
        raise unknown
    headers = {"ETag": f'"{digest}"', "Cache-Control": "public, max-age=31536000, immutable"}
    response = ChunkedResponse(body, media_type=media_type, headers=headers)
    response.done = lambda: service.contents.give_back(name)
    return response

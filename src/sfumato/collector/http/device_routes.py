"""What devices ask: which studies are open, which items or model they are about, and to take
reports.

No token and no identifier: a request is answered from what it asks for alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope

from sfumato.collector.http.endpoint import Answer, Endpoint
from sfumato.collector.http.service import Service, service_of
from sfumato.collector.http.task_cache import task_closed
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store
from sfumato.errors import MismatchError
from sfumato.flow.admission import TooManyReportsError

_LONG_BODY_BYTES = 1 << 16  # admitted in a thread, so that others are answered meanwhile
_DIGEST = re.compile("[0-9a-f]{64}")
_OFFERS_SECONDS = 60  # for which offers may be kept


async def offers(request: Request) -> Response:
    """Every open task's signed offer.

    200  the offers            304  the same as those of If-None-Match
    """
    snapshot = await service_of(request).tasks.snapshot()
    headers = {"ETag": snapshot.etag, "Cache-Control": f"public, max-age={_OFFERS_SECONDS}"}
    if snapshot.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(snapshot.offers, media_type="application/json", headers=headers)


async def dictionary(request: Request) -> Response:
    """The items of a study, one JSON string a line; its name is its SHA-256.

    200  the items             404  unknown-dictionary
    """
    unknown = Problem("unknown-dictionary", hint="an offer names its dictionary")
    return await _by_digest(request, _dictionary, "text/plain", unknown)


async def model(request: Request) -> Response:
    """The parameters that an open round's devices train from, float32 numbers, little-endian; the
    name is their SHA-256.

    200  the parameters        404  unknown-model
    """
    unknown = Problem("unknown-model", hint="an offer names its model; fetch the offers again")
    return await _by_digest(request, _model, "application/octet-stream", unknown)


async def upload(service: Service, scope: Scope, receive: Receive) -> Answer:
    """Store reports for a task; answer when they are on disk.

    A device that heard no answer sends the same bytes again: a report counts once. A rejected
    report does not fail the others.

        201  all stored                        410  task-closed
        200  some rejected; the body says why  413  too-large
        400  malformed-upload                  429  busy; Retry-After is set
        404  unknown-task                      503  store-unavailable; Retry-After is set
        408  too-slow                          507  store-full
        409  masked-task

    Who sees what: reports are looked at to see whether they are possible, and stored as they came.
    None is logged or measured; metrics count reports by study and reason only.
    """
    limits = service.settings
    task = await service.tasks.find(scope["path_params"]["task_id"])
    if task.admission is None:
        raise Problem("masked-task", hint="join a round of this task")
    service.commits.check_capacity()
    body = await service.bodies.read(
        scope, receive, most_bytes=limits.upload_bytes, seconds=limits.upload_seconds
    )
    admit = task.admission.admit
    try:
        if len(body) > _LONG_BODY_BYTES:
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
            service.metrics.count_reports(task.study_id, outcome, count)
    return Answer.of_json(200, {"rejected": rejected}) if rejected else _STORED


_STORED = Answer(201)  # without a body: uvicorn would send that on its own
ROUTES = (
    Route("/v1/offers", offers, methods=["GET"]),
    Route("/v1/dictionaries/{digest}", dictionary, methods=["GET"]),
    Route("/v1/models/{digest}", model, methods=["GET"]),
)
ENDPOINTS = (Route("/v1/tasks/{task_id}/reports", Endpoint(upload), methods=["POST"]),)


def _model(store: Store, digest: str) -> bytes | None:
    with store.reading() as tx:
        return tx.model(digest)


async def _by_digest(
    request: Request, find: Callable[[Store, str], bytes | None], kind: str, unknown: Problem
) -> Response:
    """What never changes under its name, so that caches may keep it."""
    service, digest = service_of(request), request.path_params["digest"]
    body = await service.call(find, service.store, digest) if _DIGEST.fullmatch(digest) else None
    if body is None:
        raise unknown
    headers = {"ETag": f'"{digest}"', "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(body, media_type=kind, headers=headers)


def _dictionary(store: Store, digest: str) -> bytes | None:
    with store.reading() as tx:
        return tx.dictionary(digest)

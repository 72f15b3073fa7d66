"""The service's application: the routes of devices, of administration, and those that say how it
is; and the layer around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from h11 import LocalProtocolError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sfumato.collector.http import admin_routes, device_routes, openapi, round_routes
from sfumato.collector.http.admin_routes import Credentials, Served, needs, needs_all_studies
from sfumato.collector.http.openapi import problems
from sfumato.collector.http.service import Service, WorkerRole
from sfumato.collector.logs import log_error
from sfumato.collector.metrics import MEDIA_TYPE, OTHER
from sfumato.collector.problems import Problem, problem_response
from sfumato.errors import SfumatoError, StoreError

DIRECT_ROUTERS = (device_routes.router, round_routes.router)
_DEFAULT_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")


def create_app(service: Service, routes: Sequence[BaseRoute] = ()) -> FastAPI:
    """The application of a service, which it starts and stops; `routes` are others' beside ours."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.drain()

    app = Application(
        lifespan=lifespan,
        docs_url=None,  # the pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    for router in (*DIRECT_ROUTERS, admin_routes.router):
        app.include_router(router)
    app.add_api_route("/health", check_health, methods=["GET"])
    app.add_api_route(
        "/ready",
        check_ready,
        methods=["GET"],
        responses=problems("store-unavailable", "store-read-only", "worker-failing", "stopping"),
    )
    app.add_api_route(
        "/metrics",
        show_metrics,
        methods=["GET"],
        response_class=Response,
        responses=problems("unauthorized", "forbidden", "store-unavailable"),
    )
    app.router.routes.extend(routes)
    app.add_exception_handler(HTTPException, _answer_refusal)
    app.add_exception_handler(RequestValidationError, _answer_refusal)
    app.add_middleware(Shield)
    app.state.patterns = dict(_patterns(app.routes))
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]  # FastAPI's own way
    return app


async def check_health() -> dict[str, str]:
    """The process answers"""
    return {"health": "ok"}


class Ready(BaseModel):
    ready: bool
    failing_studies: int = Field(description="studies that the worker tries again after an error")
    worker: WorkerRole = Field(
        description="active: this process is the only worker of its store; standby: it waits to "
        "replace it; none: it was started without one"
    )


async def check_ready(service: Served) -> Ready:
    """Reports can be stored, and the worker works; how many studies it tries again"""
    failing = await service.check_ready()
    return Ready(ready=True, failing_studies=failing, worker=service.worker_role)


async def show_metrics(service: Served, credentials: Credentials) -> Response:
    """Counters and latencies of this process, for Prometheus"""
    if not service.settings.open_metrics:
        needs_all_studies(await needs("analyst")(service, credentials))
    with suppress(StoreError):  # other numbers are needed most while the store is away
        service.metrics.failing_studies.set(await service.call(service.count_failing))
    return Response(service.metrics.text(), media_type=MEDIA_TYPE)


class Shield:
    """Around every route: no answer is cached unless it says so, and one over TLS asks for TLS from
    now on; an error that nobody expected is a problem without details, with its type in the log;
    and the time until the answer is measured."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, started = time.perf_counter(), False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _observe(scope, message["status"], time.perf_counter() - begin)
                names = {name for name, _ in message["headers"]}
                missing = [header for header in _DEFAULT_HEADERS if header[0] not in names]
                if scope["scheme"] == "https":
                    missing.append(_HTTPS_ONLY)
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except (ClientDisconnect, LocalProtocolError):
            pass  # nobody is left to answer, or the server has refused a malformed body itself
        except Exception as error:
            problem = _problem_of(error)
            if not started:
                await problem_response(problem)(scope, receive, send_with_headers)


async def _call_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request by the function of its route, which gets the parameters of the path as they
    came."""
    response = await scope["endpoint"](Request(scope, receive), **scope["path_params"])
    await response(scope, receive, send)


_DIRECT = Shield(_call_endpoint)
_DIRECT_ROUTES = [
    (route.methods or set(), route.path_regex, route.endpoint)
    for router in DIRECT_ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
]


class Application(FastAPI):
    """A FastAPI application that calls the functions of `DIRECT_ROUTERS` itself: FastAPI's own
    layers take longer than it takes to store a report."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            for methods, path, endpoint in _DIRECT_ROUTES:
                if method in methods and (match := path.match(scope["path"])):
                    scope.update(app=self, endpoint=endpoint, path_params=match.groupdict())
                    await _DIRECT(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


def _observe(scope: Scope, status: int, seconds: float) -> None:
    """Measure a request. Its labels must not be a stranger's choice."""
    state = scope["app"].state
    route = state.patterns.get(scope.get("endpoint"), OTHER)
    method = OTHER if route == OTHER or status == 405 else scope["method"]
    state.service.metrics.observe_request(route, method, status, seconds)


def _patterns(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[object, str]]:
    """Every endpoint of an application, and the pattern of its address."""
    for context in iter_route_contexts(routes):
        pattern = prefix + (context.path or "")
        if isinstance(context.route, Mount):
            yield from _patterns(context.route.routes, pattern)
        else:
            yield context.endpoint, pattern


def _problem_of(error: Exception) -> Problem:
    """The problem to answer after an error; an unexpected one is logged."""
    if not isinstance(error, SfumatoError):
        log_error("internal", error)
        return Problem("internal")
    problem = Problem.of(error)
    if problem is not error and problem.status >= 500:
        log_error("refused", error, code=problem.code)
    return problem


async def _answer_refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that FastAPI refuses by itself."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    codes = {404: "not-found", 405: "method-not-allowed"}
    return problem_response(Problem(codes.get(status, "malformed-request")))

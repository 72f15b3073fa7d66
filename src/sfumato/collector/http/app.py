"""The service's addresses, put together: devices' routes, administration, and how it is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sfumato.collector.http import admin_routes, device_routes, openapi, round_routes
from sfumato.collector.http.admin_routes import Given, Served, needs
from sfumato.collector.http.endpoint import problem_of
from sfumato.collector.http.openapi import answers
from sfumato.collector.http.service import Service
from sfumato.collector.metrics import MEDIA_TYPE, OTHER, Metrics
from sfumato.collector.problems import ALWAYS, Problem, problem_response
from sfumato.errors import SfumatoError

ENDPOINTS = (*device_routes.ENDPOINTS, *round_routes.ENDPOINTS)


class Application(FastAPI):
    """A FastAPI application that hands requests for `ENDPOINTS` to them at once. They are among its
    routes, too: for other methods."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in ENDPOINTS:
                if scope["method"] in (route.methods or ()) and (
                    match := route.path_regex.match(scope["path"])
                ):
                    scope.update(app=self, route=route, path_params=match.groupdict())
                    await route.app(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


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
    )
    app.state.service = service
    app.router.routes.extend((*device_routes.ROUTES, *ENDPOINTS))
    app.include_router(admin_routes.router)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"], responses=answers(503))
    app.add_api_route(
        "/metrics", metrics, methods=["GET"], response_class=Response, responses=answers(401, 503)
    )
    app.router.routes.extend(routes)
    app.add_middleware(Shield, metrics=service.metrics, patterns=dict(_patterns(app.routes)))
    app.add_exception_handler(SfumatoError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]  # FastAPI's own way
    return app


async def health() -> dict[str, str]:
    """The process answers"""
    return {"health": "ok"}


async def ready(service: Served) -> dict[str, bool]:
    """Reports can be stored, and the worker works"""
    await service.check_ready()
    return {"ready": True}


async def metrics(service: Served, given: Given) -> Response:
    """Counters of this process, for Prometheus"""
    if not service.settings.open_metrics:
        await needs("analyst")(service, given)
    return Response(service.metrics.text(), media_type=MEDIA_TYPE)


class Shield:
    """Around everything else: no answer is cached unless it says so; an error that nobody expected
    is a problem without details, with its type in the log; and every request is timed."""

    def __init__(self, app: ASGIApp, metrics: Metrics, patterns: Mapping[object, str]) -> None:
        """`patterns` are those of the addresses, by endpoint."""
        self._app, self._metrics, self._patterns = app, metrics, patterns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, started = time.perf_counter(), False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._observe(scope, message["status"], time.perf_counter() - begin)
                headers = MutableHeaders(scope=message)
                for name, said in ALWAYS.items():
                    headers.setdefault(name, said)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            problem = problem_of(error)
            if not started:
                await problem_response(problem)(scope, receive, send_with_headers)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = self._patterns.get(scope.get("endpoint"), OTHER)
        is_known = route != OTHER and status != 405
        self._metrics.observe_request(
            route, scope["method"] if is_known else OTHER, status, seconds
        )


def _patterns(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[object, str]]:
    """Every endpoint of an application, and the pattern of its address."""
    for context in iter_route_contexts(routes):
        pattern = prefix + (context.path or "")
        if isinstance(context.route, Mount):
            yield from _patterns(context.route.routes, pattern)
        else:
            yield context.endpoint, pattern


async def _answer_error(request: Request, error: Exception) -> Response:
    return problem_response(problem_of(error))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # registered for nothing else
    codes = {404: "not-found", 405: "method-not-allowed"}
    return problem_response(Problem(codes.get(error.status_code, "malformed-request")))


async def _answer_invalid(request: Request, error: Exception) -> Response:
    return problem_response(Problem("malformed-request"))

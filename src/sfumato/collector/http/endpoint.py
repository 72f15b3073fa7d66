"""Devices' addresses, answered without the layers of the framework: those take longer than to store
a report."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from sfumato.collector.http.service import Service
from sfumato.collector.logs import log_error
from sfumato.collector.problems import ALWAYS, Problem, problem_response
from sfumato.errors import SfumatoError


class Answer:
    """What a device is answered; `Problem` is raised for everything else."""

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self._body = status, body
        lines = {**ALWAYS, **(headers or {})}
        if status != 204:
            lines["content-length"] = str(len(body))
        if body:
            lines["content-type"] = media_type
        self._headers = [(name.encode(), value.encode()) for name, value in lines.items()]

    @classmethod
    def of_json(cls, status: int, content: Mapping[str, object]) -> Answer:
        return cls(status, json.dumps(content, separators=(",", ":")).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


Handler = Callable[[Service, Scope, Receive], Awaitable[Answer]]


class Endpoint:
    """An ASGI application around a handler. The application that it belongs to has the service."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        service: Service = scope["app"].state.service
        respond: ASGIApp
        try:
            respond = answer = await self._handler(service, scope, receive)
            status = answer.status
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception as error:
            problem = problem_of(error)
            respond, status = problem_response(problem), problem.status
        seconds = time.perf_counter() - begin
        service.metrics.observe_request(scope["route"].path, scope["method"], status, seconds)
        await respond(scope, receive, send)


def problem_of(error: Exception) -> Problem:
    """What is answered after an error; an unexpected one is logged."""
    if not isinstance(error, SfumatoError):
        log_error("internal", error)
        return Problem("internal")
    problem = Problem.of(error)
    if problem is not error and problem.status >= 500:
        log_error("refused", error, code=problem.code)
    return problem

"""The service's description of itself: what FastAPI makes of the routes, and what it cannot know.

FastAPI knows addresses, answers and summaries. It does not know the problems that a route answers
with, nor what a function reads from the request by itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import FastAPI, Path
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from sfumato import __version__
from sfumato.collector.problems import KINDS, MEDIA_TYPE
from sfumato.device import passcodes

BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PASSCODE_HEADER = {
    "name": passcodes.HEADER,
    "in": "header",
    "description": "the study's passcode, if its offer says that it needs one",
    "schema": {"type": "string", "pattern": f"^{passcodes.PATTERN}$"},
}
_PROBLEM = {
    "type": "object",
    "required": ["status", "code", "title"],
    "properties": {
        "status": {"type": "integer"},
        "code": {"type": "string", "enum": list(KINDS)},
        "title": {"type": "string"},
        "detail": {"type": "string"},
        "hint": {"type": "string"},
    },
}


NOT_STORED = (  # problems of routes that take bytes
    "too-slow",
    "too-large",
    "busy",
    "store-unavailable",
    "store-read-only",
    "stopping",
    "store-full",
)


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The problems of these codes, as a route's `responses`."""
    titles = defaultdict(list)
    for code in codes:
        titles[KINDS[code].status].append(f"{code}: {KINDS[code].title}")
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": "; ".join(lines), "content": content}
        for status, lines in titles.items()
    }


def takes_json(model: type[BaseModel]) -> dict[str, Any]:
    """A body that the route reads by itself, after it has looked at the token."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def takes_bytes(description: str, **schema: object) -> dict[str, Any]:
    """A body that is not JSON, which the route reads by itself."""
    content = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary", **schema}}
    }
    return {"requestBody": {"required": True, "description": description, "content": content}}


def hexadecimal(digits: int) -> Any:
    """A parameter of a path, whose form is described here and checked by the route."""
    return Path(json_schema_extra={"pattern": f"^[0-9a-f]{{{digits}}}$"})


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title="sfumato collector", version=__version__, routes=app.routes)
        for operation in (each for path in schema["paths"].values() for each in path.values()):
            summary, _, description = operation.pop("description").partition("\n\n")
            operation["summary"] = " ".join(summary.split()).rstrip(".")
            if description:
                operation["description"] = description
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]  # FastAPI's own, which is never answered
        models = schema["components"]["schemas"]
        models.pop("HTTPValidationError", None)
        models.pop("ValidationError", None)
        models["Problem"] = _PROBLEM
        app.openapi_schema = schema
    return app.openapi_schema

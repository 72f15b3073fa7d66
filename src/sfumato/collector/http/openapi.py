"""The service's description of itself: what FastAPI makes of the routes of administration, and the
devices' routes, which are plain, written by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from sfumato import __version__
from sfumato.collector.problems import KINDS, MEDIA_TYPE

_PROBLEM = "#/components/schemas/Problem"
_HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems of these statuses, as a route's `responses`."""
    return {
        status: {
            "description": "; ".join(
                f"{code}: {kind.title}" for code, kind in KINDS.items() if kind.status == status
            ),
            "content": {MEDIA_TYPE: {"schema": {"$ref": _PROBLEM}}},
        }
        for status in statuses
    }


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """A body that the route reads by itself, after it has looked at the token."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title="sfumato collector", version=__version__, routes=app.routes)
        for operation in (each for path in schema["paths"].values() for each in path.values()):
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]  # FastAPI's own, which is never answered
        schema["paths"] |= _devices() | _rounds()
        models = schema["components"]["schemas"]
        models.pop("HTTPValidationError", None)
        models.pop("ValidationError", None)
        models["Problem"] = {
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
        app.openapi_schema = schema
    return app.openapi_schema


def _devices() -> dict[str, Any]:
    envelope = {
        "type": "object",
        "required": ["offer", "signature"],
        "properties": {
            "offer": {"type": "string", "description": "canonical JSON of an offer"},
            "signature": {"type": "string", "description": "Ed25519, in hexadecimal"},
        },
    }
    offers = {
        "type": "object",
        "required": ["offers"],
        "properties": {"offers": {"type": "array", "items": envelope}},
    }
    rejected = {
        "type": "object",
        "required": ["rejected"],
        "properties": {"rejected": {"type": "object", "additionalProperties": {"type": "integer"}}},
    }
    return {
        "/v1/offers": {
            "get": {
                "summary": "Every open task's signed offer",
                "operationId": "offers",
                "responses": {
                    200: _json("The offers", offers),
                    304: {"description": "The same as those of If-None-Match"},
                    **answers(503),
                },
            }
        },
        "/v1/dictionaries/{digest}": {
            "get": {
                "summary": "The items of a study",
                "operationId": "dictionary",
                "parameters": [_in_path("digest")],
                "responses": {
                    200: {
                        "description": "One JSON string a line",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    },
                    **answers(404, 503),
                },
            }
        },
        "/v1/models/{digest}": {
            "get": {
                "summary": "The parameters that an open round's devices train from",
                "operationId": "model",
                "parameters": [_in_path("digest")],
                "responses": {
                    200: {
                        "description": "float32 numbers, little-endian",
                        "content": {
                            "application/octet-stream": {
                                "schema": {"type": "string", "format": "binary"}
                            }
                        },
                    },
                    **answers(404, 503),
                },
            }
        },
        "/v1/tasks/{task_id}/reports": {
            "post": {
                "summary": "Store reports; the answer comes when they are on disk",
                "operationId": "upload",
                "parameters": [_in_path("task_id")],
                "requestBody": {
                    "required": True,
                    "description": "Reports, each behind its length in four bytes, little-endian",
                    "content": {
                        "application/octet-stream": {
                            "schema": {"type": "string", "format": "binary"}
                        }
                    },
                },
                "responses": {
                    201: {"description": "All are stored"},
                    200: _json("Some were rejected, the others are stored", rejected),
                    **answers(400, 404, 408, 409, 410, 413, 429, 503, 507),
                },
            }
        },
    }


def _rounds() -> dict[str, Any]:
    """Masked rounds."""
    key = {"type": "string", "format": "binary", "minLength": 32, "maxLength": 32}
    joined = {
        "type": "object",
        "required": ["ticket"],
        "properties": {"ticket": _HEX},
    }
    invitation = {
        "type": "object",
        "required": ["member", "invitation", "signature"],
        "properties": {
            "member": {"type": "integer", "minimum": 0},
            "invitation": {"type": "string", "description": "canonical JSON of round and roster"},
            "signature": {"type": "string", "description": "Ed25519, in hexadecimal"},
        },
    }
    not_yet = {"description": "Not yet: ask again"}
    wait = {
        "name": "wait",
        "in": "query",
        "description": "seconds to wait for an answer",
        "schema": {"type": "integer", "minimum": 0, "maximum": 25},
    }
    ticket = {
        "name": "Authorization",
        "in": "header",
        "description": "Ticket, and the 64 hexadecimal digits of one",
        "schema": {"type": "string", "pattern": "^Ticket [0-9a-f]{64}$"},
    }
    phase = {"type": "string", "enum": ["enrol", "share", "mask", "ack", "unmask"]}
    member = [
        _in_path("round_id") | {"schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}},
        _in_path("phase") | {"schema": phase},
        _in_path("member") | {"schema": {"type": "integer", "minimum": 0}},
        ticket,
    ]
    told = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "/v1/tasks/{task_id}/join": {
            "post": {
                "summary": "Wait for a masked round, under a key made for this once",
                "operationId": "join",
                "parameters": [_in_path("task_id"), ticket],
                "requestBody": {
                    "required": True,
                    "description": "An Ed25519 public key",
                    "content": {"application/octet-stream": {"schema": key}},
                },
                "responses": {
                    201: _json("It waits", joined),
                    200: _json("It waited already", joined),
                    **answers(400, 404, 408, 409, 410, 413, 429, 503, 507),
                },
            }
        },
        "/v1/tickets": {
            "get": {
                "summary": "The round that a ticket is for",
                "operationId": "ticket",
                "parameters": [ticket, wait],
                "responses": {
                    200: _json("The round", invitation),
                    204: not_yet,
                    **answers(403, 410, 503),
                },
            }
        },
        "/v1/rounds/{round_id}/{phase}/{member}": {
            "put": {
                "summary": "A member's message; the answer comes when it is on disk",
                "operationId": "say",
                "parameters": member,
                "requestBody": {"required": True, "content": told},
                "responses": {
                    201: _json("It is stored", {"type": "object"}),
                    200: _json("It was stored before", {"type": "object"}),
                    **answers(403, 404, 408, 409, 410, 413, 429, 503, 507),
                },
            },
            "get": {
                "summary": "What a member is told in a phase",
                "operationId": "hear",
                "parameters": [*member, wait],
                "responses": {
                    200: {"description": "What it is told", "content": told},
                    204: not_yet,
                    **answers(403, 404, 409, 410, 503),
                },
            },
        },
    }


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _HEX}

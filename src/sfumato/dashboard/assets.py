"""Scripts, styles and images of the pages, all served from here.

A file's address contains its digest, so browsers may cache it forever.
"""

from __future__ import annotations

import gzip
from functools import cache
from hashlib import sha256
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from sfumato.collector.problems import Problem
from sfumato.dashboard import fields

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_NAMES = frozenset(
    file.name
    for file in (resources.files("sfumato.dashboard") / "static").iterdir()
    if file.name.endswith(tuple(_TYPES))
)


def address(name: str) -> str:
    """The URL path of the file with this name."""
    return f"/dashboard/static/{_digest(name)}/{name}"


async def asset(request: Request) -> Response:
    """A file by its name and digest."""
    name = request.path_params["name"]
    if name not in _NAMES or request.path_params["digest"] != _digest(name):
        raise Problem("not-found")
    is_compressed = "gzip" in request.headers.get("accept-encoding", "")
    response = Response(
        _compressed(name) if is_compressed else _content(name),
        media_type=_TYPES[name[name.rindex(".") :]],
        headers={
            "Cache-Control": "public, max-age=31536000, immutable",
            "Vary": "Accept-Encoding",
        },
    )
    if is_compressed:
        response.headers["Content-Encoding"] = "gzip"
    return response


@cache
def _content(name: str) -> bytes:
    content = (resources.files("sfumato.dashboard") / "static" / name).read_bytes()
    return content + fields.style().encode() if name == "dashboard.css" else content


@cache
def _compressed(name: str) -> bytes:
    return gzip.compress(_content(name), mtime=0)


@cache
def _digest(name: str) -> str:
    return sha256(_content(name)).hexdigest()[:16]

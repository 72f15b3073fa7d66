"""Requests as devices mostly send them, read at a glance.

A parser for whatever HTTP allows, and what a framework prepares for whatever may follow, take most
of the time of a short request. So one that came whole and looks as most do is read by one pattern.
Any other is the parser's: a pattern that is stricter than HTTP leaves no two ways to read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

HEAD_BYTES = 16 << 10  # of a request's line and headers
SHORT_BYTES = 1 << 16  # of a body that is not long

_HEAD = re.compile(
    rb"(GET|POST|PUT) (/[a-z0-9/]*)(?:\?([a-z0-9=&]*))? HTTP/1\.1\r\n"
    rb"((?:[A-Za-z-]+: [!-~](?:[ -~]*[!-~])?\r\n)+)\r\n"
)
_HEADER = re.compile(rb"([A-Za-z-]+): ([ -~]+)\r\n")
_LENGTH = re.compile(b"[0-9]{1,15}")
_ABOUT_BODIES = (b"content-length", b"transfer-encoding")
# What these ask for is the parser's business.
_OTHER = frozenset((b"connection", b"expect", b"keep-alive", b"te", b"trailer", b"upgrade"))


class Usual(NamedTuple):
    """A request: of an ASGI scope, as much as is needed; and its body."""

    scope: dict[str, Any]
    body: bytes


def length_of(scope: Mapping[str, Any]) -> float:
    """Of a request's body, as its head says it; infinite if it does not say so plainly."""
    said = [header for header in scope["headers"] if header[0] in _ABOUT_BODIES]
    if not said:
        return 0
    plainly = len(said) == 1 and said[0][0] == b"content-length" and _LENGTH.fullmatch(said[0][1])
    return int(said[0][1]) if plainly else math.inf


def usual(data: bytes) -> Usual | None:
    """The request that these bytes are, all of them; None if they are not one, or an unusual one.

    >>> usual(b"GET /v1/offers?wait=5 HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n").scope["path"]
    '/v1/offers'
    >>> usual(b"GET /v1/offers HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n") is None
    True
    """
    head = _HEAD.match(data, 0, HEAD_BYTES)
    if head is None:
        return None
    method, path, query, lines = head.groups()
    headers = [(name.lower(), value) for name, value in _HEADER.findall(lines)]
    scope = {
        "method": method.decode(),
        "path": path.decode(),
        "query_string": query or b"",
        "headers": headers,
    }
    length = length_of(scope)
    if length > SHORT_BYTES or head.end() + length != len(data):
        return None
    if not _OTHER.isdisjoint(name for name, _ in headers):
        return None
    return Usual(scope, data[head.end() :])

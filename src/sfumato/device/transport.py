"""Bytes to a collector and back over HTTP, from the standard library alone.

Every device sends the same headers: the host, the length of the body and a fixed name. No cookie is
kept, no redirect followed, no answer's tag sent back: each could mark a device.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias
from urllib.parse import urlsplit

from sfumato.errors import ServiceError, SpecError

TIMEOUT_SECONDS = 20.0
LARGEST_BODY = 1 << 28  # of an answer
HEADERS = {"User-Agent": "sfumato"}


@dataclass(frozen=True, slots=True, repr=False)
class Response:
    """What a collector answered; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"Response({self.status}, {len(self.body)} bytes)"


Send: TypeAlias = Callable[[str, str, bytes, Mapping[str, str]], Response]
"""Method, path, body and further headers to an answer; ServiceError if none came."""


class Http:
    """One connection to a collector, kept open between calls and made again when it is gone.

    `ca` is a file of root certificates, in place of the system's. Without TLS anybody on the way
    could read along and change what is sent, so plain http is for this machine only, unless
    `allow_plain`.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: Path | str | None = None,
        allow_plain: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError("a collector's address must be https://host, with a port if need be")
        if parts.username or parts.query or parts.fragment:
            raise SpecError("a collector's address must have no user, query or fragment")
        if parts.scheme == "http" and not (allow_plain or _is_loopback(parts.hostname)):
            raise SpecError(
                "a collector must be reached by https, unless it is on this machine; got http",
                hint="allow plain http only where the network itself is private",
            )
        self._prefix = parts.path.rstrip("/")
        self._connection = self._made(parts.scheme, parts.hostname, parts.port, ca, timeout_seconds)

    @staticmethod
    def _made(
        scheme: str, host: str, port: int | None, ca: Path | str | None, timeout: float
    ) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        except OSError as problem:
            raise SpecError(f"the root certificates at {ca} cannot be read") from problem
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """The answer; ServiceError if there is none. A connection that went stale is made anew."""
        fresh = self._connection.sock is None
        try:
            return self._asked(method, path, body, headers)
        except (http.client.RemoteDisconnected, ConnectionError):
            self._connection.close()
            if fresh:
                raise _unreachable() from None
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise _unreachable() from None
        try:
            return self._asked(method, path, body, headers)
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise _unreachable() from None

    def _asked(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        connection = self._connection
        connection.putrequest(method, self._prefix + path, skip_accept_encoding=True)
        length = {"Content-Length": str(len(body))} if body else {}
        for name, value in {**HEADERS, **length, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        if answer.length is None or answer.length > LARGEST_BODY:
            data = answer.read(LARGEST_BODY + 1)
        else:
            data = answer.read()  # all of it: a shorter body is an error
        if len(data) > LARGEST_BODY:
            raise http.client.HTTPException
        told = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, told, data)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Http:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unreachable() -> ServiceError:
    return ServiceError(
        "the collector did not answer", hint="check its address and the network; try again later"
    )

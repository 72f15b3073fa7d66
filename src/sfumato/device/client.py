"""A device's requests to a collector, over any `Send`: offers, dictionaries, models, uploads."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from sfumato.device import passcodes
from sfumato.errors import OfferError, ServiceError, SpecError
from sfumato.flow.model_terms import ModelTerms, digest_of
from sfumato.flow.report import LENGTH_BYTES, Report, to_frames

MAX_REPORTS = 10_000  # per upload
MAX_BYTES = 1 << 22  # per upload
MAX_RETRY_AFTER = 7 * 86_400  # the longest wait, in seconds, that a collector may ask for
_OVER = {(404, "unknown-task"), (410, "task-closed")}


@dataclass(frozen=True, slots=True)
class Upload:
    """What became of some reports. If `stored`, the collector has all but the rejected ones."""

    stored: bool
    rejected: int = 0
    is_over: bool = False  # the task accepts no more reports
    wrong_passcode: bool = False  # it accepts none without the study's passcode
    retry_after_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Dictionary:
    """A list of items, identified by its digest."""

    digest: str
    body: bytes = field(compare=False, repr=False)

    def places(self) -> dict[str, int]:
        """The place of each item in the list."""
        return _places(self)


def fetch_offers(send: Send) -> list[Any]:
    """Fetch the envelopes of all open tasks, without verifying them."""
    answer = _expect(send("GET", "/v1/offers", b"", {}))
    try:
        envelopes = json.loads(answer.body)["offers"]
    except (ValueError, LookupError, TypeError, RecursionError):
        envelopes = None
    if not isinstance(envelopes, list):
        raise ServiceError("the collector's offers cannot be read", hint="check its address")
    return envelopes


def fetch_dictionary(send: Send, digest: str) -> Dictionary:
    """Fetch the dictionary with this digest; any other body is refused."""
    body = _expect(send("GET", f"/v1/dictionaries/{digest}", b"", {})).body
    if hashlib.sha256(body).hexdigest() != digest:
        raise OfferError(
            "a dictionary must have the digest that the offer names; got another",
            hint="the collector, or somebody on the way, sent something else; try again later",
        )
    dictionary = Dictionary(digest, body)
    dictionary.places()
    return dictionary


def fetch_model(send: Send, terms: ModelTerms) -> bytes:
    """Fetch the parameters that these terms name; any other body is refused."""
    body = _expect(send("GET", f"/v1/models/{terms.digest}", b"", {})).body
    if len(body) != terms.size or digest_of(body) != terms.digest:
        raise OfferError(
            "a model must have the size and the digest that the offer names; got another",
            hint="the collector, or somebody on the way, sent something else; try again later",
        )
    return body


def upload(
    send: Send, task_id: str, reports: Sequence[Report], passcode: str | None = None
) -> Upload:
    """Send reports in one body; `split_into_uploads` makes pieces that fit."""
    body = to_frames(report.to_bytes() for report in reports)
    answer = send("POST", f"/v1/tasks/{task_id}/reports", body, passcode_headers(passcode))
    if answer.status in (200, 201):
        return Upload(stored=True, rejected=_rejected(answer))
    code = problem_of(answer)[0]
    return Upload(
        stored=False,
        is_over=(answer.status, code) in _OVER,
        wrong_passcode=code == "wrong-passcode",
        retry_after_seconds=retry_after(answer),
    )


def passcode_headers(passcode: str | None) -> dict[str, str]:
    """The headers of a request to a study that needs this passcode; none if it needs none."""
    return {} if passcode is None else {passcodes.HEADER: passcode}


def split_into_uploads(reports: Sequence[Report]) -> Iterator[Sequence[Report]]:
    """The reports of one task in pieces, each of which fits into one upload."""
    start, size = 0, 0
    for place, report in enumerate(reports):
        more = LENGTH_BYTES + len(report.to_bytes())
        if place > start and (size + more > MAX_BYTES or place - start == MAX_REPORTS):
            yield reports[start:place]
            start, size = place, 0
        size += more
    if start < len(reports):
        yield reports[start:]


@lru_cache(maxsize=4)
def _places(dictionary: Dictionary) -> dict[str, int]:
    try:
        items = [json.loads(line) for line in dictionary.body.split(b"\n") if line]
    except (ValueError, RecursionError):
        items = [None]
    if not all(isinstance(item, str) for item in items) or len(set(items)) < len(items):
        raise OfferError("a dictionary must have one text per line, each once; got something else")
    return {item: place for place, item in enumerate(items)}


def _expect(answer: Response) -> Response:
    if answer.status != 200:
        raise ServiceError(
            f"the collector answered {answer.status}", hint="check its address; try again later"
        )
    return answer


def _rejected(answer: Response) -> int:
    try:
        counts = json.loads(answer.body).get("rejected", {}).values()
        return sum(int(count) for count in counts)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 0


def problem_of(answer: Response) -> tuple[str, str]:
    """The code and the text of a problem; 410 without a code means that the task is closed."""
    try:
        problem = json.loads(answer.body)
        code, detail = problem.get("code"), problem.get("detail") or problem.get("title")
    except (ValueError, AttributeError, RecursionError):
        code = detail = None
    if code is None and answer.status == 410:
        code = "task-closed"
    return str(code), str(detail or f"the collector answered {answer.status}")


def retry_after(answer: Response) -> int:
    """How many seconds the collector asks the device to wait before its next request."""
    text = answer.headers.get("retry-after", "")
    return min(int(text[:9]), MAX_RETRY_AFTER) if text.isascii() and text.isdigit() else 0


TIMEOUT_SECONDS = 20.0
MAX_ANSWER_BYTES = 1 << 28
HEADERS = {"User-Agent": "sfumato"}


@dataclass(frozen=True, slots=True, repr=False)
class Response:
    """A collector's answer; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"Response({self.status}, {len(self.body)} bytes)"


Send: TypeAlias = Callable[[str, str, bytes, Mapping[str, str]], Response]
"""Sends a request (method, path, body, further headers) and returns the answer; raises ServiceError
if there is none."""


class Http:
    """One connection to a collector, kept open between calls and reopened when it was closed.

    `ca` is a file of root certificates to use instead of the system's. Without TLS, anybody on the
    way could read and change the traffic, so plain http is allowed for this machine only, unless
    `allow_plain` is set.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: Path | str | None = None,
        allow_plain: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises if it is no port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError(
                "a collector's address must be like https://host or https://host:port; "
                "got something else"
            )
        if parts.username or parts.query or parts.fragment:
            raise SpecError(
                "a collector's address must have no user, query or fragment; leave them out"
            )
        if parts.scheme == "http" and not (allow_plain or is_loopback(parts.hostname)):
            raise SpecError(
                "a collector on another machine must be reached by https; got http",
                hint="allow plain http only where the network itself is private",
            )
        self._prefix = parts.path.rstrip("/")
        self._connection = self._connect(
            parts.scheme, parts.hostname, parts.port, ca, timeout_seconds
        )

    @staticmethod
    def _connect(
        scheme: str, host: str, port: int | None, ca: Path | str | None, timeout: float
    ) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        except OSError as problem:
            raise SpecError(
                f"the root certificates at {ca} cannot be read; give a readable PEM file"
            ) from problem
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """The collector's answer; ServiceError if there is none. Reopens a stale connection."""
        fresh = self._connection.sock is None
        try:
            return self._request(method, path, body, headers)
        except (http.client.RemoteDisconnected, ConnectionError) as problem:
            self._connection.close()
            if fresh:
                raise _unreachable() from problem
        except (OSError, http.client.HTTPException) as problem:
            self._connection.close()
            raise _unreachable() from problem
        try:
            return self._request(method, path, body, headers)
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise _unreachable() from None

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        connection = self._connection
        connection.putrequest(method, self._prefix + path, skip_accept_encoding=True)
        length = {"Content-Length": str(len(body))} if body else {}
        for name, value in {**HEADERS, **length, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        if answer.length is None or answer.length > MAX_ANSWER_BYTES:
            data = answer.read(MAX_ANSWER_BYTES + 1)
        else:
            data = answer.read()  # all of it: a shorter body is an error
        if len(data) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException
        received = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, received, data)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine."""
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

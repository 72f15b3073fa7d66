"""Bad requests, and a client that sends them, to test the service.

They are made from the service's own description (/openapi.json): each address with paths, tokens
and bodies that are nearly right; and from those requests by breaking their bytes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from sfumato.flow.report import Report, to_frames
from sfumato.study import Study

PATIENCE_SECONDS = 60.0  # hangs otherwise; an answer to a plan takes long on a busy machine
CONNECTIONS = 48
_ANSWER = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
_LENGTH = re.compile(rb"^content-length: *(\d+)\r$", re.IGNORECASE | re.MULTILINE)

ODD_TEXTS = (
    "", " ", "\0", "\n", "a\r\nSet-Cookie: a=b", "\x7f", "é", "日本", "\U0001f333", "\u202eabc",
    "e\u0301", "\ufeff", "\ufffe", "x" * 300, "x" * 20_000, "../../etc/passwd", "' OR 1=1 --",
    "{study_id}", "%00", "${7*7}", "nan", "0x10", "١٢", "True", "null",
)  # fmt: skip
ODD_NUMBERS = (
    0, -1, 1, 2, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400,
    0.0, -0.0, 0.5, 1e-300, 5e-324, 1e308, -1e308, 1.0, 1e18,
)  # fmt: skip
ODD_JSON = (
    "", " ", "{", "}", "[]", "null", "true", "0", '""', "{}{}", "{'a':1}", '{"a":1,}', "NaN",
    "Infinity", '{"study":NaN}', "[" * 50_000, '{"a":' * 5_000, '"\\ud800"', "\ufeff{}", "1e999",
    '{"study":{},"study":{}}', "1" * 5_000,
)  # fmt: skip
ODD_PATHS = (
    "", "//", "/.", "/..", "/../v1/studies", "/%2e%2e/metrics", "/v1//studies", "/V1/STUDIES",
    "/v1/studies/", "/v1/studies;a=b", "/v1/studies%00", "/v1/studies%2f", "/v1/%73tudies",
    "/v1/\\studies", "/%ff%fe", "/%", "/%zz", "*", "http://example.org/v1/me", "/" + "a" * 9_000,
    "/\u00e9".encode().decode("latin-1"), "/v1/me#x", "/?" + "a=b&" * 1_000, "/docs", "/.git/HEAD",
    "/dashboard", "/dashboard/", "/dashboard/studies", "/dashboard/static/../../app.py",
)  # fmt: skip
ODD_METHODS = ("HEAD", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get", "PRI")
ODD_HEADERS = (
    "Content-Length: -1", "Content-Length: 1e3", "Content-Length: +5", "Content-Length: 5, 5",
    f"Content-Length: {10**30}", f"Content-Length: {'9' * 5_000}", "Content-Length: 0x10",
    "Content-Length: 4194305", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: identity", "Transfer-Encoding: chunked, chunked", "Host: a", "Host:",
    "Expect: 100-continue", "Expect: a", "Upgrade: websocket", "Connection: upgrade, close",
    "Authorization: Bearer", "Authorization: Bearer \xff", "Authorization: Basic Og==",
    "Authorization: " + "Bearer " * 500, "Content-Type: multipart/form-data", "Cookie: a=b; a=b",
    "Content-Encoding: gzip", "If-None-Match: *", 'If-None-Match: W/"a", "b"', "Range: bytes=0-1",
    "X: " + "x" * 15_000, "X: " + "x" * 20_000, " folded: x", "No-Colon", ": empty", "X: \0",
    "X: é",
)  # fmt: skip


STUDY_KEYS = [each.name for each in fields(Study)]


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes to send, in pieces with a pause (in seconds) after each; the number of answers."""

    pieces: tuple[bytes, ...]
    pause: float = 0.0
    answers: int = 1
    kind: str = ""


@dataclass
class Responses:
    """The answers to all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    slow: list[Request] = field(default_factory=list)  # neither answered nor closed in time
    failed: list[tuple[int, Request]] = field(default_factory=list)  # 5xx that are not by design
    longest_seconds: float = 0.0


@dataclass(frozen=True)
class Knowledge:
    """What a fuzzer knows about the collector, which is more than a stranger does."""

    paths: dict[str, Any]  # of the service's description
    tokens: Sequence[str]
    study_ids: Sequence[str]
    digests: Sequence[str]  # of dictionaries
    messages: dict[str, list[bytes]]  # of devices, by task
    masked: Sequence[str]  # tasks whose tables are masked
    studies: Sequence[dict[str, Any]]  # correct requests


class Fuzzer:
    """Makes requests, the same ones for the same seed."""

    def __init__(self, knowledge: Knowledge, seed: int) -> None:
        self._knowledge = knowledge
        self._chance = random.Random(seed)
        self._tickets = [self._chance.randbytes(32).hex() for _ in range(100)]
        self._addresses = [
            (method.upper(), path) for path, each in knowledge.paths.items() for method in each
        ]

    def requests(self, count: int) -> Iterator[Request]:
        kinds: list[tuple[Callable[[], Request], int]] = [
            (self._described, 45),
            (self._study_request, 25),
            (self._upload, 60),
            (self._broken, 50),
            (self._odd_address, 20),
            (self._odd_header, 20),
            (self._chunked, 15),
            (self._masked, 15),
            (self._pipelined, 8),
            (self._slow, 2),
        ]
        makers, weights = zip(*kinds, strict=True)
        for _ in range(count):
            yield self._chance.choices(makers, weights)[0]()

    def _described(self) -> Request:
        """An address as it is described, with a body that is nearly right."""
        method, path = self._chance.choice(self._addresses)
        body = b""
        if "requestBody" in self._knowledge.paths[path][method.lower()]:
            odd = self._chance.choice(ODD_JSON).encode("utf-8", "surrogatepass")
            body = self._chance.choice((odd, b"{}", self._chance.randbytes(300)))
        return Request((self._http(method, self._filled(path), body),), kind="described")

    def _study_request(self) -> Request:
        """A study to plan or to open, with one or two mistakes."""
        request = json.loads(json.dumps(self._chance.choice(self._knowledge.studies)))
        path = self._chance.choice(("/v1/plan", "/v1/studies"))
        if path == "/v1/plan":
            request = {"study": request["study"], "items": request["items"]}
        for _ in range(self._chance.choice((1, 1, 2))):
            inside = request["study"] if isinstance(request["study"], dict) else {}
            where = self._chance.choice((request, inside, inside, inside))
            keys = [*where, *(STUDY_KEYS if where is inside else ("x",))]
            where[self._chance.choice(keys)] = self._odd_value()
        text = json.dumps(request, ensure_ascii=self._chance.random() < 0.5)
        body = text.encode("utf-8", "surrogatepass")
        token = self._knowledge.tokens[0]
        head = [f"Authorization: Bearer {token}", f"Content-Length: {len(body)}"]
        return Request((_head("POST", path, head) + body,), kind="study")

    def _upload(self) -> Request:
        return Request((self._http("POST", *self._reports()),), kind="upload")

    def _broken(self) -> Request:
        """A good request with some of its bytes changed, left out, doubled, or cut off."""
        data = bytearray(self._good())
        for _ in range(self._chance.randint(1, 4)):
            if not data:
                break
            head = data.find(b"\r\n\r\n") + 4 or len(data)
            at = self._chance.randrange(head if self._chance.random() < 0.8 else len(data))
            size = self._chance.choice((1, 1, 2, 4, 20))
            step = self._chance.randrange(5)
            if step == 0:
                data[at : at + size] = self._chance.randbytes(size)
            elif step == 1:
                del data[at : at + size]
            elif step == 2:
                data[at:at] = data[at : at + size] * self._chance.choice((1, 3, 100))
            elif step == 3:
                data[at:at] = self._chance.choice((b"\r\n", b"\n", b"\0", b":", b" ", b"\xff"))
            elif self._chance.random() < 0.1:  # rarely: each waits for the timeout
                del data[at:]
        return Request((bytes(data),), kind="broken")

    def _odd_address(self) -> Request:
        method = self._chance.choice((*ODD_METHODS, "GET", "POST", "DELETE"))
        path = self._chance.choice((*ODD_PATHS, *(path for _, path in self._addresses)))
        return Request((self._http(method, self._filled(path)),), kind="odd address")

    def _odd_header(self) -> Request:
        method, path = self._chance.choice(self._addresses)
        headers = self._chance.sample(ODD_HEADERS, self._chance.randint(1, 2))
        body = b"{}" if method == "POST" else b""
        return Request((self._http(method, self._filled(path), body, headers),), kind="odd header")

    def _chunked(self) -> Request:
        path, body = self._reports()
        chunks = b""
        while body:
            size = self._chance.choice((1, 10, 1_000))
            part, body = body[:size], body[size:]
            length = self._chance.choice((f"{len(part):x}", f"{len(part):x};a=b", f"{size:X}"))
            chunks += length.encode() + b"\r\n" + part + b"\r\n"
        ends = (b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"zz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"")
        end = self._chance.choices(ends, (10, 4, 2, 2, 2, 1))[0]
        head = self._head("POST", path, ["Transfer-Encoding: chunked"])
        return Request((head + chunks + end,), kind="chunked")

    def _masked(self) -> Request:
        """A device that joins a masked round, or sends a message in one, or pretends to."""
        ticket = self._chance.choice(self._tickets)
        key = self._chance.choice((ticket.encode()[:32], self._chance.randbytes(32), b"x" * 33))
        wait = self._chance.choice(("0", "1", "00001"))  # others wait as long as possible
        odd_wait = self._chance.choice(("", "-1", "1e3", "9" * 5_000, "%D9%A1", "0&wait=x"))
        phase = self._chance.choice(("enrol", "share", "mask", "ack", "unmask", "done", "", "x"))
        nonce = self._chance.choice(("0" * 32, self._chance.randbytes(16).hex(), "x"))
        method, path, body = self._chance.choice(
            (
                ("POST", f"/v1/tasks/{self._chance.choice(self._knowledge.masked)}/join", key),
                ("GET", f"/v1/tickets?wait={wait}", b""),
                ("GET", f"/v1/tickets?wait={odd_wait}", b""),
                ("GET", f"/v1/rounds/{nonce}/{phase}/{self._chance.choice((0, -1, 'x'))}", b""),
                ("PUT", f"/v1/rounds/{nonce}/{phase}/0", self._chance.randbytes(100)),
            )
        )
        if path.endswith(f"/tickets?wait={odd_wait}"):
            ticket = ticket[::-1]  # an unknown ticket, or the answer would wait
        sent_ticket = self._chance.choice((ticket, ticket, ticket[:-1], "x", ""))
        head = [f"Authorization: Ticket {sent_ticket}", f"Content-Length: {len(body)}"]
        return Request((_head(method, path, head) + body,), kind="masked")

    def _pipelined(self) -> Request:
        many = [self._good(keep=True) for _ in range(self._chance.randint(2, 6))]
        return Request((b"".join(many),), answers=len(many), kind="pipelined")

    def _slow(self) -> Request:
        """In four pieces, over longer than a body may take."""
        data = self._good()
        cuts = sorted(self._chance.sample(range(1, len(data)), 3))
        parts = [data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True)]
        return Request(tuple(parts), pause=0.4, kind="slow")

    def _good(self, *, keep: bool = False) -> bytes:
        """A request that could be a device's or an administrator's."""
        if self._chance.random() < 0.5:
            return self._http("POST", *self._reports(whole=True), keep=keep)
        paths = ("/v1/offers", "/v1/studies", "/v1/me", "/health", "/ready", "/metrics")
        return self._http("GET", self._chance.choice(paths), keep=keep)

    def _reports(self, *, whole: bool = False) -> tuple[str, bytes]:
        """The path of an upload and its body: reports, most of them nearly right."""
        task_id = self._chance.choice(list(self._knowledge.messages))
        messages = self._chance.choices(
            self._knowledge.messages[task_id], k=self._chance.randint(1, 5)
        )
        reports = [
            Report(task_id, self._chance.randbytes(16), message).to_bytes() for message in messages
        ]
        path = f"/v1/tasks/{task_id}/reports"
        if whole:
            return path, to_frames(reports)
        reports = [self._bent(report) for report in reports]
        body = to_frames(reports)
        harm = self._chance.randrange(10)
        if harm == 0:
            body = body[: self._chance.randrange(len(body) + 1)]
        elif harm == 1:
            size = self._chance.choice((0, 1, 2**31, 2**32 - 1, len(body)))
            body = size.to_bytes(4, "little") + body[4:]
        elif harm == 2:
            body = bytes(4 * self._chance.choice((1, 100, 10_000, 10_001)))
        elif harm == 3:
            body = self._chance.randbytes(self._chance.choice((1, 3, 4, 5, 100, 70_000)))
        elif harm == 4:
            body *= self._chance.choice((2, 50, 500))
        elif harm == 5:
            path = self._filled("/v1/tasks/{task_id}/reports")
        return path, body

    def _bent(self, report: bytes) -> bytes:
        way = self._chance.randrange(8)
        if way == 0:
            return report[: self._chance.randrange(len(report))]
        if way == 1:
            return report + self._chance.randbytes(self._chance.choice((1, 2, 100)))
        if way == 2:
            at = self._chance.randrange(len(report))
            return report[:at] + self._chance.randbytes(1) + report[at + 1 :]
        if way == 3:
            return report[:49] + self._chance.randbytes(len(report) - 49)
        return report

    def _odd_value(self, depth: int = 0) -> Any:
        plain: tuple[Any, ...] = (None, True, False, *ODD_NUMBERS, *ODD_TEXTS)
        if depth < 3 and self._chance.random() < 0.2:
            many = [self._odd_value(depth + 1) for _ in range(self._chance.randrange(4))]
            return many if self._chance.random() < 0.5 else {str(one): one for one in many}
        return self._chance.choice(plain)

    def _filled(self, path: str) -> str:
        """A path with its names filled in, sometimes with a query."""
        values = {
            "study_id": self._knowledge.study_ids,
            "digest": self._knowledge.digests,
            "task_id": list(self._knowledge.messages),
        }

        def fill(match: re.Match[str]) -> str:
            if self._chance.random() < 0.6 and values.get(match[1]):
                return str(self._chance.choice(values[match[1]]))
            odd = (*ODD_TEXTS, "0" * 64, "0" * 32, "g" * 32, "0" * 31, "A" * 64)
            return quote(self._chance.choice(odd), safe=self._chance.choice(("", "/")))

        path = re.sub(r"\{(\w+)\}", fill, path)
        return path + self._chance.choice(("", "", "", "?", "?a=b", f"?a={'x' * 500}", "?%ff=\x7f"))

    def _http(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[str] = (),
        *,
        keep: bool = False,
    ) -> bytes:
        length = [f"Content-Length: {len(body)}"] if body else []
        return self._head(method, path, [*length, *headers], keep=keep) + body

    def _head(self, method: str, path: str, headers: Sequence[str], *, keep: bool = False) -> bytes:
        token = self._chance.choice(
            (*self._knowledge.tokens, *self._knowledge.tokens, "sfu_wrong", "")
        )
        bearer = [f"Authorization: Bearer {token}"] if token else []
        return _head(method, path, [*bearer, *headers], keep=keep)


def _head(method: str, path: str, headers: Sequence[str], *, keep: bool = False) -> bytes:
    closing = [] if keep else ["Connection: close"]
    lines = [f"{method} {path} HTTP/1.1", "Host: collector", *closing, *headers]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


async def send_all(address: str, requests: Iterator[Request]) -> Responses:
    """Send requests over CONNECTIONS connections at once, each over a new one."""
    responses = Responses()
    host, _, port = address.removeprefix("http://").rpartition(":")

    async def drive() -> None:
        for request in requests:
            await _exchange(host, int(port), request, responses)

    await asyncio.gather(*(drive() for _ in range(CONNECTIONS)))
    return responses


async def _exchange(host: str, port: int, request: Request, responses: Responses) -> None:
    clock = asyncio.get_running_loop().time
    timeout_seconds = PATIENCE_SECONDS + request.pause * len(request.pieces)
    reader, writer = await asyncio.open_connection(host, port)
    start, data, statuses = clock(), b"", list[int]()
    try:
        async with asyncio.timeout(timeout_seconds):
            sending = asyncio.ensure_future(_send(writer, request))
            try:
                while len(statuses := answers(data)) < request.answers:
                    part = await reader.read(1 << 20)
                    if not part:
                        break
                    data += part
            finally:
                sending.cancel()
    except ConnectionError:
        statuses = answers(data)
    except TimeoutError:
        responses.slow.append(request)
    finally:
        writer.transport.abort()
    responses.longest_seconds = max(responses.longest_seconds, clock() - start)
    responses.statuses.update([str(status) for status in statuses] or ["closed"])
    responses.failed += [
        (each, request) for each in statuses if each >= 500 and each not in (503, 507)
    ]


async def _send(writer: asyncio.StreamWriter, request: Request) -> None:
    try:
        for piece in request.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(request.pause)
    except ConnectionError:
        pass  # the server has closed the connection


def answers(data: bytes) -> list[int]:
    """The statuses of the answers in this data; the body of the last may be missing."""
    statuses, at = [], 0
    while match := _ANSWER.match(data, at):
        status, length = int(match[1]), _LENGTH.search(match[2])
        at = match.end() + (int(length[1]) if length and status != 304 else 0)
        if status >= 200:
            statuses.append(status)
    return statuses

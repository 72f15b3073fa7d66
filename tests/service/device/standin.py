"""A stand-in for a collector, with only the endpoints that devices use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sfumato.device.offers import Offer, public_key, sign
from sfumato.flow.report import Report, from_frames

KEY = bytes(range(32))
PUBLIC = public_key(KEY)


class StandIn(ThreadingHTTPServer):
    """Answers correctly, unless `script` has (status, headers) for the next uploads."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.envelopes: list[Any] = []
        self.dictionaries: dict[str, bytes] = {}
        self.reports: list[Report] = []  # stored reports, including duplicates
        self.closed: set[str] = set()
        self.rejecting = 0  # how many reports of the next upload to reject
        self.script: list[tuple[int, dict[str, str]]] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def offer(self, *offers: Offer) -> None:
        """Offer only these studies."""
        self.envelopes = [sign(offer, KEY) for offer in offers]

    def keep(self, items: Sequence[str]) -> str:
        """Serve a dictionary; returns its digest."""
        body = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items).encode()
        digest = hashlib.sha256(body).hexdigest()
        self.dictionaries[digest] = body
        return digest

    @property
    def messages(self) -> list[bytes]:
        """The messages of the stored reports, without duplicates."""
        return list({report.report_id: report.message for report in self.reports}.values())


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StandIn

    def do_GET(self) -> None:
        self._log(b"")
        if self.path == "/v1/offers":
            return self._answer(200, json.dumps({"offers": self.server.envelopes}).encode())
        body = self.server.dictionaries.get(self.path.removeprefix("/v1/dictionaries/"))
        return self._answer(404, b"{}") if body is None else self._answer(200, body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._log(body)
        if self.server.script:
            status, headers = self.server.script.pop(0)
            if status == 0:  # stored, but never acknowledged
                self.server.reports += map(Report.from_bytes, from_frames(body))
                self.close_connection = True
                return None
            return self._answer(status, b'{"code": "busy"}', headers)
        if self.path.split("/")[3] in self.server.closed:
            return self._answer(410, b'{"code": "task-closed"}')
        reports = [Report.from_bytes(data) for data in from_frames(body)]
        left, self.server.rejecting = self.server.rejecting, 0
        self.server.reports += reports[left:]
        if left:
            return self._answer(200, json.dumps({"rejected": {"malformed": left}}).encode())
        return self._answer(201, b"{}")

    def _log(self, body: bytes) -> None:
        self.server.requests.append((self.command, self.path, dict(self.headers), body))

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002  # its own name
        pass


@contextmanager
def running() -> Iterator[StandIn]:
    """A stand-in that answers until the end of the block."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

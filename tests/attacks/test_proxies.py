"""A collector behind nginx and behind HAProxy, each with the file in examples/proxies.

A proxy sends the requests of many people over one connection to the collector. Whoever made the two
disagree about where a request ends would get another person's answer.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from certificates import write_certificate
from proxies import PROXIES, proxy
from serving import settings
from sfumato.collector import tokens
from sfumato.collector.serve import running
from sfumato.dashboard import ROUTES

PAUSE_SECONDS = 0.05
VISITS = 10


@dataclass(frozen=True, slots=True)
class Site:
    """A proxy, the collector behind it, and a token for it."""

    port: int
    certificate: Path
    token: str

    def connect(self) -> socket.socket:
        context = ssl.create_default_context(cafile=self.certificate)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def ask(
        self, method: str, path: str, body: str | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        context = ssl.create_default_context(cafile=self.certificate)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=20, context=context
        )
        with closing(connection):
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, fields)
            answer = connection.getresponse()
            answer.headers["body"] = answer.read().decode()
            return answer


@contextmanager
def opened_site(name: str, folder: Path) -> Iterator[Site]:
    certificate = write_certificate(folder)
    limits = settings(folder, proxies=("127.0.0.1",), hosts=("127.0.0.1",))
    with running(limits, routes=ROUTES) as collector:
        _, token = tokens.create(collector.store, role="admin", name="ops", days=1)
        with proxy(name, folder, [collector.address], certificate) as port:
            yield Site(port, certificate, token)


@pytest.fixture(scope="module", params=PROXIES)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with opened_site(request.param, tmp_path_factory.mktemp("site")) as site:
        yield site


def request(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


def disturb(site: Site, until: threading.Event, statuses: list[int]) -> None:
    """Ask for an upgrade, and send a request as the late body of that one."""
    smuggled = request("GET /health")
    first = request(
        "POST /nowhere", "Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(smuggled)}"
    )
    while not until.is_set():
        answers = b""
        with suppress(OSError), closing(site.connect()) as connection:
            connection.sendall(first)
            time.sleep(PAUSE_SECONDS)
            connection.sendall(smuggled)
            connection.settimeout(2 * PAUSE_SECONDS)
            while part := connection.recv(1 << 16):
                answers += part
        assert b"ops" not in answers
        statuses += [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def test_everybody_gets_their_own_answer(site: Site) -> None:
    until, statuses = threading.Event(), list[int]()
    strangers = [threading.Thread(target=disturb, args=(site, until, statuses)) for _ in range(4)]
    for stranger in strangers:
        stranger.start()
    try:
        visits = []
        for _ in range(VISITS):
            visits.append(site.ask("GET", "/v1/me", Authorization=f"Bearer {site.token}"))
            time.sleep(PAUSE_SECONDS)
    finally:
        until.set()
        for stranger in strangers:
            stranger.join()
    assert [visit.status for visit in visits] == [200] * VISITS
    assert {json.loads(visit.headers["body"])["name"] for visit in visits} == {"ops"}
    assert 404 in statuses
    assert set(statuses) <= {404, 429}  # never 200, the answer to the request in the body


def test_a_cookie_is_for_tls_alone(site: Site) -> None:
    host = f"127.0.0.1:{site.port}"
    answer = site.ask(
        "POST",
        "/dashboard/sign-in",
        urlencode({"token": site.token}),
        Origin=f"https://{host}",
        Content_Type="application/x-www-form-urlencoded",
        X_Forwarded_Proto="http",  # a proxy does not believe it
    )
    assert answer.status == 303
    assert "Secure" in answer.headers["set-cookie"]
    assert answer.headers["strict-transport-security"] == "max-age=31536000"


def test_other_hosts_are_refused(site: Site) -> None:
    assert site.ask("GET", "/health").status == 200
    assert site.ask("GET", "/health", Host="evil.example").status == 400


@pytest.mark.parametrize("name", PROXIES)
def test_one_address_has_a_limit(tmp_path: Path, name: str) -> None:
    with opened_site(name, tmp_path) as site, closing(site.connect()) as connection:
        connection.sendall(request("GET /health") * 700)
        answers = b""
        while b" 429 " not in answers:
            part = connection.recv(1 << 16)
            assert part, "it answers all of them"
            answers += part

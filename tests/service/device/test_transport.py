"""Requests over HTTP: TLS, stale connections, silence, and headers that identify no device."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from certificates import write_certificate
from service.device.standin import StandIn, running
from sfumato.device import Http
from sfumato.errors import ServiceError, SpecError


@contextmanager
def raw(*answers: bytes) -> Iterator[str]:
    """A server that sends these bytes to one connection after another, whatever the request."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        thread.join()
        listening.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    "url",
    [
        "http://collector.example",
        "http://10.0.0.1:8000",
        "ftp://127.0.0.1",
        "collector.example",
        "https://",
        "https://user:word@collector.example",
        "https://collector.example/?who=1",
        "https://collector.example:port",
        "https://[::1",
    ],
)
def test_an_address_that_is_not_safe_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="collector"):
        Http(url)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"])
def test_plain_http_is_for_this_machine(url: str) -> None:
    Http(url).close()


def test_plain_http_to_others_is_for_those_who_ask_for_it() -> None:
    Http("http://10.0.0.1:8000", allow_plain=True).close()


def test_a_certificate_is_checked_against_the_roots_given(tmp_path: Path) -> None:
    path = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    with running() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http://", "https://")
        with Http(url, ca=path) as send:
            assert send("GET", "/v1/offers", b"", {}).status == 200
        with Http(url) as send, pytest.raises(ServiceError):  # the system does not know this root
            send("GET", "/v1/offers", b"", {})
        other = url.replace("127.0.0.1", "localhost")  # nor is this its name
        with Http(other, ca=path) as send, pytest.raises(ServiceError):
            send("GET", "/v1/offers", b"", {})


def test_roots_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="certificates"):
        Http("https://collector.example", ca=tmp_path / "none.pem")


def test_a_path_in_the_address_comes_before_every_other(server: StandIn) -> None:
    with Http(server.url + "/below/") as send:
        assert send("GET", "/v1/offers", b"", {}).status == 404
    assert server.requests[0][1] == "/below/v1/offers"


def test_requests_share_a_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
    listening = socket.create_server(("127.0.0.1", 0))
    with closing(listening), Http(f"http://127.0.0.1:{listening.getsockname()[1]}") as send:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                for word in (b"ok", b"no"):
                    connection.recv(65_536)
                    connection.sendall(head + word)

        thread = threading.Thread(target=serve)
        thread.start()
        assert [send("GET", "/", b"", {}).body for _ in range(2)] == [b"ok", b"no"]
        thread.join()


def test_a_connection_that_went_stale_is_made_again() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with raw(answer, answer) as url, Http(url) as send:  # each answer closes its connection
        assert [send("GET", "/", b"", {}).status for _ in range(2)] == [200, 200]


def test_a_server_that_hangs_up_is_not_asked_for_ever() -> None:
    with raw(b"") as url, Http(url) as send, pytest.raises(ServiceError, match="did not answer"):
        send("GET", "/", b"", {})


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"]
)
def test_an_answer_that_cannot_be_read_is_none(answer: bytes) -> None:
    with raw(answer) as url, Http(url) as send, pytest.raises(ServiceError):
        send("GET", "/", b"", {})


def test_a_server_that_says_nothing_is_given_up_on() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with (
        closing(listening),
        Http(url, timeout_seconds=0.05) as send,
        pytest.raises(ServiceError, match="did not answer"),
    ):
        send("GET", "/", b"", {})


def test_a_server_that_is_away_is_told_in_our_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with Http(f"http://127.0.0.1:{port}") as send, pytest.raises(ServiceError) as caught:
        send("POST", "/", b"payload-canary", {})
    assert caught.value.hint
    assert "canary" not in str(caught.value)

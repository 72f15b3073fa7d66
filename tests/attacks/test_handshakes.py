"""Strangers who open connections with TLS and say nothing, or anything but TLS."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from certificates import write_certificate
from serving import settings, wait_for
from sfumato.collector.serve import CollectorServer, running

CONNECTIONS = 64
IDLE_SECONDS = 2
FILES, SILENT = 1_024, 1_100
PATIENCE_SECONDS = 60
MOST_SECONDS = 5  # for an answer, while all those connections are accepted


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path)


@pytest.fixture
def collector(tmp_path: Path, certificate: Path) -> Iterator[CollectorServer]:
    limits = settings(
        tmp_path,
        tls_cert=str(certificate),
        tls_key=str(certificate),
        connections=CONNECTIONS,
        idle_seconds=IDLE_SECONDS,
    )
    with running(limits) as collector:
        yield collector


def place(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("https://").split(":")
    return host, int(port)


def connect(address: str) -> socket.socket:
    return socket.create_connection(place(address), timeout=20)


def ask_health(address: str, certificate: Path) -> tuple[int, str | None, float]:
    """The status of an answer over TLS, what it says about TLS, and how long it took."""
    begin = time.monotonic()
    context = ssl.create_default_context(cafile=certificate)
    with closing(
        http.client.HTTPSConnection(*place(address), timeout=90, context=context)
    ) as connection:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, answer.headers["strict-transport-security"], time.monotonic() - begin


def test_silent_handshakes_keep_nobody_out(collector: CollectorServer, certificate: Path) -> None:
    with ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            stack.enter_context(closing(connect(collector.address)))
        status, only_tls, seconds = ask_health(collector.address, certificate)
        assert (status, only_tls) == (200, "max-age=31536000")
        assert seconds < IDLE_SECONDS  # so it did not wait for theirs to be over


@pytest.mark.parametrize("words", [b"", b"\x16", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_has_a_deadline(collector: CollectorServer, words: bytes) -> None:
    with closing(connect(collector.address)) as connection:
        begin = time.monotonic()
        connection.sendall(words)
        while connection.recv(1 << 10):
            pass  # an alert
        assert time.monotonic() - begin < IDLE_SECONDS + 2


def test_a_handshake_does_not_delay_the_end(tmp_path: Path, certificate: Path) -> None:
    limits = settings(tmp_path, tls_cert=str(certificate), tls_key=str(certificate))
    with ExitStack() as stack:
        with running(limits) as collector:
            for _ in range(5):
                stack.enter_context(closing(connect(collector.address)))
            assert ask_health(collector.address, certificate)[0] == 200
            begin = time.monotonic()
        assert time.monotonic() - begin < limits.idle_seconds / 2


@pytest.mark.slow
def test_more_silent_handshakes_than_files(tmp_path: Path, certificate: Path) -> None:
    """Without a limit before the handshake, this took a minute and 2.2 million logged errors."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

    environment = {
        **os.environ,
        "SFUMATO_TLS_CERT": str(certificate),
        "SFUMATO_TLS_KEY": str(certificate),
    }
    log, announcement = tmp_path / "log", tmp_path / "announcement"
    with log.open("wb") as stderr, announcement.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "sfumato", "serve", "--port", "0"],
            cwd=tmp_path,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=limit_files,
        )
    try:
        wait_for(lambda: b"\n" in announcement.read_bytes(), "the collector")
        address = announcement.read_text(encoding="utf-8").removeprefix("listening on ").strip()
        with ExitStack() as stack:
            for _ in range(SILENT):
                stack.enter_context(closing(connect(address)))
            status, _, seconds = ask_health(address, certificate)
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert status == 200
    assert seconds < MOST_SECONDS
    text = log.read_text(encoding="utf-8")
    assert '"event": "few-connections"' in text
    assert "asyncio" not in text
    assert files < FILES

"""Everything that takes memory, at once: a collector stays below the number that it prints."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from certificates import write_certificate
from serving import KEY, TASK, opened, wait_for
from sfumato.collector import tokens
from sfumato.collector.memory import memory_bound
from sfumato.collector.settings import MEBIBYTE, Settings
from sfumato.collector.store.store import Store

GIVE_BACK_SECONDS = 60.0
SECONDS = 20.0  # for an attacker to send what it wants to
REPORTS = f"/v1/tasks/{TASK.id}/reports"


@dataclass(frozen=True, slots=True)
class Attack:
    """How much of everything strangers send, and a person with a token."""

    silent: int  # connections without a handshake
    idle: int  # with one, and without a request
    forms: int  # of 60 MB, before signing in
    pipelines: int  # of 30 MB of requests, whose answers are not read
    readers: int  # of a dictionary, who do not read
    holders: int  # of bodies that are all but complete
    dictionary_bytes: int
    body_bytes: int
    study_bytes: int


LARGE = Attack(
    silent=300,
    idle=200,
    forms=8,
    pipelines=40,
    readers=150,
    holders=60,
    dictionary_bytes=16 * MEBIBYTE,
    body_bytes=4 * MEBIBYTE,
    study_bytes=16 * MEBIBYTE,
)
SMALL = Attack(
    silent=60,
    idle=20,
    forms=1,
    pipelines=2,
    readers=10,
    holders=6,
    dictionary_bytes=MEBIBYTE,
    body_bytes=MEBIBYTE // 4,
    study_bytes=MEBIBYTE,
)


class Process:
    """A process of `sfumato serve`, with TLS, an open study and a dictionary."""

    def __init__(self, folder: Path, dictionary_bytes: int, options: dict[str, Any]) -> None:
        self._certificate = write_certificate(folder)
        url = f"sqlite:///{folder}/collector.db"
        dictionary = b'"tree"\n' * (dictionary_bytes // 7)
        self.dictionary = f"/v1/dictionaries/{hashlib.sha256(dictionary).hexdigest()}"
        with closing(Store.open(url)) as store:
            store.migrate()
            opened(store)
            _, self.token = tokens.create(store, role="admin", name="ops", days=1)
            with store.transaction() as tx:
                tx.add_dictionary(self.dictionary.rpartition("/")[2], dictionary)
        (folder / "collector.key").write_text(KEY.hex())
        (folder / "collector.key").chmod(0o600)
        values = {
            **options,
            "store": url,
            "signing_key": str(folder / "collector.key"),
            "tls_cert": str(self._certificate),
            "tls_key": str(self._certificate),
        }
        self.settings = Settings(**values)
        environment = {f"SFUMATO_{name.upper()}": str(value) for name, value in values.items()}
        self._stdout = folder / "stdout"
        with self._stdout.open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sfumato", "serve", "--port", "0"],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=stdout,
                stderr=stderr,
            )

    def start(self) -> None:
        wait_for(lambda: b"\n" in self._stdout.read_bytes(), "the collector")
        address = self._stdout.read_text(encoding="utf-8").strip()
        host, port = address.removeprefix("listening on https://").split(":")
        self.place = host, int(port)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(40)
        finally:
            self._process.kill()
            self._process.wait()

    def memory(self, field: str) -> int:
        """A field of /proc/PID/status, in bytes: VmHWM is the peak, VmRSS what it is now."""
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        (line,) = [line for line in text.splitlines() if line.startswith(f"{field}:")]
        return int(line.split()[1]) << 10

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=SECONDS)

    def connect_securely(self) -> socket.socket:
        context = ssl.create_default_context(cafile=self._certificate)
        return context.wrap_socket(self.connect(), server_hostname=self.place[0])

    def ask(self, method: str, path: str, body: bytes | None = None) -> int:
        context = ssl.create_default_context(cafile=self._certificate)
        connection = http.client.HTTPSConnection(*self.place, timeout=120, context=context)
        with closing(connection):
            connection.request(method, path, body, {"Authorization": f"Bearer {self.token}"})
            return connection.getresponse().status


@contextmanager
def process(folder: Path, dictionary_bytes: int, **options: Any) -> Iterator[Process]:
    running = Process(folder, dictionary_bytes, options)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: collector", *headers, "", ""]
    return "\r\n".join(lines).encode()


def study(size: int) -> bytes:
    """A request for a study with short items, of about this many bytes."""
    values = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 1_000}
    items = [f"{number:04x}" for number in range(1 << 16)]
    items += [f"{number:06x}" for number in range(max(0, size // 9 - len(items)))]
    name = secrets.token_hex(4)
    request = {"name": name, "purpose": "An attack.", "study": values, "items": items[: size // 9]}
    return json.dumps(request, separators=(",", ":")).encode()


def attack(collector: Process, how: Attack, stack: ExitStack) -> list[int]:
    """All at once; return the statuses that the person with a token got."""
    statuses: list[int] = []
    upload = head("POST", REPORTS, f"Content-Length: {how.body_bytes}")
    form = head(
        "POST",
        "/dashboard/sign-in",
        "Origin: https://collector",
        "Content-Type: application/x-www-form-urlencoded",
        "Transfer-Encoding: chunked",
    )

    def keep(connection: socket.socket) -> socket.socket:
        return stack.enter_context(closing(connection))

    def send(packets: list[bytes]) -> None:
        with suppress(OSError):  # refused, or not read
            connection = keep(collector.connect_securely())
            connection.settimeout(0.5)
            for packet in packets:
                connection.sendall(packet)

    megabyte = b"%x\r\n" % 1_000_000 + b"a" * 1_000_000 + b"\r\n"
    health = head("GET", "/health")
    actions: list[tuple[int, Callable[[], object]]] = [
        (how.silent, lambda: keep(collector.connect())),
        (how.idle, lambda: send([])),
        (how.forms, lambda: send([form, *[megabyte] * 60])),
        (how.pipelines, lambda: send([health * (30_000_000 // len(health))])),
        (how.readers, lambda: send([head("GET", collector.dictionary)])),
        (how.holders, lambda: send([upload, bytes(how.body_bytes - 1)])),
        (2, lambda: statuses.append(collector.ask("POST", "/v1/studies", study(how.study_bytes)))),
    ]

    def repeat(count: int, action: Callable[[], object]) -> None:
        for _ in range(count):
            with suppress(OSError):
                action()

    threads = [threading.Thread(target=repeat, args=arguments) for arguments in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param(
            SMALL,
            {
                "connections": 100,
                "idle_seconds": 2,
                "upload_seconds": 3,
                "upload_bytes": MEBIBYTE // 4,
                "queue_bytes": MEBIBYTE,
                "commit_bytes": MEBIBYTE,
                "study_bytes": MEBIBYTE,
                "queue_uploads": 100,
            },
            id="small",
        ),
        pytest.param(LARGE, {}, id="default settings", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_below_the_bound_and_is_given_back(
    tmp_path: Path, how: Attack, options: dict[str, Any]
) -> None:
    """All that connections had is given back, and most of what planning took; libraries that were
    loaded for a plan stay."""
    with process(tmp_path, how.dictionary_bytes, **options) as collector:
        bound = sum(memory_bound(collector.settings).values())
        assert collector.ask("GET", "/health") == 200
        before = collector.memory("VmRSS")
        with ExitStack() as stack:
            statuses = attack(collector, how, stack)
            assert collector.ask("GET", "/health") == 200
            during = collector.memory("VmRSS")
        peak = collector.memory("VmHWM")
        assert statuses
        assert set(statuses) <= {201, 429}
        assert peak <= bound, f"{peak >> 20} MiB, but the bound is {bound >> 20}"
        most = (before + peak) // 2
        until = time.monotonic() + GIVE_BACK_SECONDS
        while how is not SMALL and collector.memory("VmRSS") > most and time.monotonic() < until:
            time.sleep(0.5)
        after = collector.memory("VmRSS")
        sys.stdout.write(
            f"\nMiB: {before >> 20} before, {during >> 20} during, {peak >> 20} at most,"
            f" {after >> 20} after; bound {bound >> 20}\n"
        )
        assert how is SMALL or after <= most  # a small attack leaves not much to give back

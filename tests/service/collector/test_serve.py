"""A collector as a process: its address, its log without personal data, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from serving import KEY, PATIENCE_SECONDS, TASK, ask, body, opened, stored, wait_for
from sfumato.collector.store.store import Store
from sfumato.flow.report import to_frames

UPLOAD = f"/v1/tasks/{TASK.id}/reports"
CANARY = "canary-4711"


@contextmanager
def process(command: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`sfumato COMMAND` in a folder; it ends with the block."""
    environment = {name: value for name, value in os.environ.items() if "SFUMATO" not in name}
    with (
        (folder / f"{command}.log").open("a") as log,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sfumato",
                command,
                "--store",
                "sqlite:///collector.db",
                *options,
            ],
            cwd=folder,
            env=environment | {"SFUMATO_SIGNING_KEY": "collector.key"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            yield server
        finally:
            if server.poll() is None:
                server.kill()


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:"), line
    return line.split()[-1]


def log_of(folder: Path, command: str = "serve") -> list[dict[str, Any]]:
    text = (folder / f"{command}.log").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store in which a task is open, and the key of its offers."""
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    opened(store, key=KEY)
    store.close()
    (tmp_path / "collector.key").write_text(KEY.hex())
    (tmp_path / "collector.key").chmod(0o600)
    return tmp_path


class Senders:
    """Threads that upload until the server is gone, and count the acknowledged reports."""

    def __init__(self, address: str, threads: int = 6) -> None:
        self._address = address
        self.acknowledged = [0] * threads
        self.refused: list[int] = []
        self._threads = [
            threading.Thread(target=self._send, args=(number,)) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, number: int) -> None:
        while True:
            try:
                answer = ask(self._address, "POST", UPLOAD, body(3))
            except (OSError, HTTPException):
                return
            if answer.status == 201:
                self.acknowledged[number] += 3
            else:
                self.refused.append(answer.status)

    def join(self) -> int:
        for thread in self._threads:
            thread.join()
        return sum(self.acknowledged)


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name
)
def test_what_was_acknowledged_under_load_is_there_however_it_ends(
    folder: Path, how: signal.Signals
) -> None:
    with process("serve", folder, "--port", "0", "--no-worker") as server:
        senders = Senders(address_of(server))
        wait_for(lambda: sum(senders.acknowledged) > 60, "some uploads")
        server.send_signal(how)
        acknowledged = senders.join()
        code = server.wait(PATIENCE_SECONDS)
    assert code == (-how if how is signal.SIGKILL else 0)
    assert set(senders.refused) <= {503}
    store = Store.open(folder / "collector.db")
    # One upload per thread may have been stored but not acknowledged.
    assert acknowledged <= stored(store) <= acknowledged + 3 * len(senders.acknowledged)
    store.close()
    if how is not signal.SIGKILL:
        assert log_of(folder)[-1]["event"] == "stopped"


def test_the_log_tells_nothing_of_who_asked_or_what(folder: Path) -> None:
    headers = {"User-Agent": CANARY, "X-Forwarded-For": CANARY, "X-Device": CANARY}
    with process("serve", folder, "--port", "0", "--no-worker") as server:
        address = address_of(server)
        first = log_of(folder)
        for method, path, data in (
            ("POST", UPLOAD, body(2)),
            ("POST", UPLOAD, to_frames([CANARY.encode()])),
            ("POST", UPLOAD, CANARY.encode()),
            ("POST", f"/v1/tasks/{CANARY}/reports", body(1)),
            ("GET", f"/v1/offers?{CANARY}", b""),
            ("GET", f"/{CANARY}", b""),
            ("POST", "/v1/studies", CANARY.encode()),
            (CANARY, "/", b""),
        ):
            ask(address, method, path, data, headers=headers, token=CANARY)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
    events = [line["event"] for line in first]
    assert events == ["no-token", "started"]
    rest = json.dumps(log_of(folder)[len(first) :])
    assert CANARY not in rest
    assert "127.0.0.1" not in rest
    assert "no-token" in events
    assert "sfumato token create" in first[0]["hint"]
    content = b"".join(file.read_bytes() for file in folder.iterdir() if file.suffix != ".log")
    assert CANARY.encode() not in content


def test_a_first_start_makes_a_store_and_a_key(tmp_path: Path) -> None:
    with process("serve", tmp_path, "--port", "0") as server:
        address = address_of(server)
        wait_for(lambda: ask(address, "GET", "/ready").status == 200, "the collector to be ready")
        assert ask(address, "GET", "/v1/offers").json() == {"offers": []}
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
    assert (tmp_path / "collector.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "collector.db").stat().st_mode & 0o077 == 0


def test_a_worker_alone_ends_when_told(folder: Path) -> None:
    with process("worker", folder) as worker:
        wait_for(lambda: (folder / "worker.log").stat().st_size > 0, "the worker to start")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_SECONDS) == 0
    assert [line["event"] for line in log_of(folder, "worker")][-2:] == [
        "worker-stopped",
        "stopped",
    ]

"""A collector as its users run it: a process of `sfumato serve`, usually on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sfumato.collector import tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.store.store import Store
from sfumato.collector.tokens import Role
from sfumato.device import offers

PATIENCE_SECONDS = 60.0
_SETTINGS = {"worker_seconds": "0.05", "seal_seconds": "0.5", "reports_per_second": "1000000"}


class Collector:
    """A running collector, with its files and its output in `folder`."""

    def __init__(self, process: subprocess.Popen[bytes], store: str, folder: Path) -> None:
        self.process = process
        self.store = store
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.address = self._read_address()
        key = bytes.fromhex((folder / "collector.key").read_text().strip())
        self.public_key = offers.public_key(key)

    def token(self, role: Role = "admin") -> str:
        """A token that is valid for a day."""
        with closing(Store.open(self.store)) as store:
            return tokens.create(store, role=role, name=role, days=1)[1]

    def admin(self) -> AdminClient:
        return AdminClient(self.address, self.token())

    def _read_address(self) -> str:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            first, newline, _ = self.stdout.read_text().partition("\n")
            if newline:
                return first.removeprefix("listening on ")
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < until, "the collector does not start"
            time.sleep(0.02)


def launch(folder: Path, store: str, *, port: int = 0, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process, with its output in the files `stdout` and `stderr`."""
    options = {
        **_SETTINGS,
        "signing_key": folder / "collector.key",
        **settings,
        "store": store,
    }
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SFUMATO_")},
        **{f"SFUMATO_{name.upper()}": str(value) for name, value in options.items()},
    }
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "sfumato", "serve", "--port", str(port)],
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
        )


@contextmanager
def collector(folder: Path, store: str | None = None, **settings: Any) -> Iterator[Collector]:
    """A collector, running during the block, with these settings."""
    store = store or f"sqlite:///{folder}/collector.db"
    process = launch(folder, store, **settings)
    try:
        yield Collector(process, store, folder)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def wait_for_end(admin: AdminClient, study_id: str) -> dict[str, Any]:
    """Wait for the end of a study, and return its state."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (state := admin.study(study_id))["state"] in ("collecting", "closing"):
        assert time.monotonic() < until, f"still {state['state']}"
        time.sleep(0.05)
    return state

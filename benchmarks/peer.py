"""Peers that run in their own environment and process (`scripts/peers`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.lines import ROOT


class Peer:
    """A server of `benchmarks/peers`, which reads one task per line and answers with one line."""

    def __init__(self, python: Path, server: str) -> None:
        self.process = subprocess.Popen(
            [str(python), "-W", "ignore", str(ROOT / "benchmarks" / "peers" / server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, task: dict[str, Any]) -> Any:
        assert self.process.stdin is not None  # piped above
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended without an answer to {task}; stderr says why")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None  # piped above
        self.process.stdin.close()
        self.process.wait()


def python_of(environment: str) -> Path | None:
    """The interpreter of `.venv-…`, if that exists."""
    path = ROOT / environment / "bin" / "python"
    return path if path.exists() else None

"""`sfumato serve` serves the dashboard, unless --no-dashboard is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serving import ask


@pytest.mark.parametrize(
    ("flags", "status"), [([], 303), (["--no-dashboard"], 404)], ids=["with", "without"]
)
def test_pages_are_served_unless_they_are_turned_off(
    tmp_path: Path, flags: list[str], status: int
) -> None:
    command = [sys.executable, "-m", "sfumato", "serve", "--port", "0", *flags]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None  # it is a pipe
        try:
            line = process.stdout.readline().decode()
            address = line.removeprefix("listening on ").strip()
            assert ask(address, "GET", "/").status == status
            assert ask(address, "GET", "/dashboard/sign-in").status == (200 if not flags else 404)
            assert ask(address, "GET", "/v1/offers").status == 200
        finally:
            process.terminate()
    assert process.returncode == 0

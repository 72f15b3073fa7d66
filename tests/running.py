"""Run the command line as a user does, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def sfumato(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `sfumato …`."""
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr

"""Running the command line: as a user does, in a process of its own, or within this one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import chdir
from pathlib import Path

from click.testing import CliRunner

from sfumato.cli.main import main


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


def within(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """The same without a process, which takes most of a second to start: an error that would print
    a traceback is raised."""
    with chdir(cwd):
        done = CliRunner(env={"NO_COLOR": "1"}).invoke(main, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr

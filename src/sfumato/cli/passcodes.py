"""Passcodes of studies in files, so that none is in the list of processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sfumato.errors import SpecError


def read(path: Path) -> str:
    """The passcode in a file, or on a line of stdin if the path is `-`."""
    from sfumato.device import passcodes  # slow to import

    if str(path) == "-":
        return passcodes.check(sys.stdin.readline().strip())
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as problem:
        raise SpecError(f"the passcode {path} cannot be read: {problem.strerror}") from None
    return passcodes.check(text.strip())


def read_or_create(path: Path) -> str:
    """The passcode in a file. If there is no such file, it gets a new one, for its owner only."""
    from sfumato.device import passcodes

    if str(path) == "-":
        return read(path)
    try:
        number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return read(path)
    except OSError as problem:
        raise SpecError(f"a passcode cannot be written to {path}: {problem.strerror}") from None
    with open(number, "w", encoding="ascii") as file:
        file.write(passcodes.create() + "\n")
        file.flush()
        os.fsync(number)
    return read(path)

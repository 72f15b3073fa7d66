"""Misuse of the command line, as a shell sees it."""

from __future__ import annotations

from pathlib import Path

from running import sfumato


def test_an_unknown_command_or_option_is_misuse(tmp_path: Path) -> None:
    assert sfumato("ask", cwd=tmp_path)[0] == 2
    assert sfumato("plan", "--speed", cwd=tmp_path)[0] == 2
    assert sfumato("reproduce", "999-fig9", cwd=tmp_path)[0] == 2

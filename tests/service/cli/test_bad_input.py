"""Misuse of the command line, as a shell sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from running import sfumato
from sfumato.cli.main import main


def test_an_unknown_command_or_option_is_misuse(tmp_path: Path) -> None:
    assert sfumato("ask", cwd=tmp_path)[0] == 2
    assert sfumato("plan", "--speed", cwd=tmp_path)[0] == 2
    assert sfumato("reproduce", "999-fig9", cwd=tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("plan", "study.toml"), "--plot"),
        (("simulate", "study.toml", "--data", "words.csv"), "--plot"),
        (("train", "study.toml", "--data", "clients.npz"), "--model"),
        (("train", "study.toml", "--data", "clients.npz"), "--metrics"),
        (("train", "study.toml", "--data", "clients.npz"), "--checkpoint"),
        (("release", "export", "Trees"), "--to"),
    ],
)
def test_a_file_in_a_folder_that_is_missing_is_refused_before_any_work(
    tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    """Previously a result was computed first, and then lost."""
    result = CliRunner().invoke(main, [*command, option, str(tmp_path / "none" / "file.json")])
    assert result.exit_code == 2, result.output
    assert f"there is no folder {tmp_path / 'none'}" in result.output.replace("\n", "")


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["reproduce", "000-fig3", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2, result.output
    assert "cannot be made: File exists" in result.output

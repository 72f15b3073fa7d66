"""scripts/release refuses what it must not build or publish."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")


def refusal(folder: Path, *arguments: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "TWINE_PASSWORD"}
    command = [str(folder / "scripts" / "release"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert not (folder / ".venv-release").exists()  # nothing was installed for it
    return result.stderr


def test_a_release_needs_a_commit_and_publishing_needs_a_token(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", tmp_path / "scripts")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert "has changes" in refusal(tmp_path)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", *IDENTITY, "commit", "-qm", "A"], cwd=tmp_path, check=True)
    assert "TWINE_PASSWORD" in refusal(tmp_path, "--publish")

"""scripts/release builds a whole package, and refuses what it must not build or publish."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")


ADDRESSES = {"AUTHOR_EMAIL": "authors@example.org", "HOME_URL": "https://example.org/sfumato"}
TOKEN = {"TWINE_PASSWORD": "pypi-none"}


def release(
    folder: Path, *arguments: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    unset = {*ADDRESSES, *TOKEN, "SIGN_KEY"}
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    command = [str(folder / "scripts" / "release"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment | variables, check=False
    )


def refusal(folder: Path, *arguments: str, **variables: str) -> str:
    result = release(folder, *arguments, variables=variables)
    assert result.returncode == 1
    assert not (folder / ".venv-release").exists()  # nothing was installed for it
    return result.stderr


def commit(folder: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", *IDENTITY, "commit", "-qm", "A"], cwd=folder, check=True)


def test_a_release_needs_a_commit_and_publishing_needs_a_token_and_addresses(
    tmp_path: Path,
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", tmp_path / "scripts")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert "has changes" in refusal(tmp_path)
    commit(tmp_path)
    assert "TWINE_PASSWORD" in refusal(tmp_path, "--publish", **ADDRESSES)
    for name in ADDRESSES:
        others = {key: text for key, text in ADDRESSES.items() if key != name}
        assert name in refusal(tmp_path, "--publish", **TOKEN, **others)
    assert "e-mail" in refusal(tmp_path, **ADDRESSES | {"AUTHOR_EMAIL": "nobody"})
    assert "https://" in refusal(tmp_path, **ADDRESSES | {"HOME_URL": "example.org"})
    assert "--publish" in refusal(tmp_path, "--upload")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_its_addresses_the_package_scores_ten_of_ten(tmp_path: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    commit(tmp_path)
    result = release(tmp_path, variables=ADDRESSES)
    assert result.returncode == 0, result.stderr
    assert "Final rating: 10/10" in result.stdout
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        (member,) = (name for name in archive.getnames() if name.endswith("/PKG-INFO"))
        described = archive.extractfile(member)
        assert described is not None  # it is a file
        metadata = described.read().decode()
    assert "Author-email: The sfumato authors <authors@example.org>" in metadata
    assert "Project-URL: Homepage, https://example.org/sfumato" in metadata

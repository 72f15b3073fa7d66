"""A release is built from a commit, twice with the same bytes, and its metadata is complete."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"AUTHOR_EMAIL": "authors@example.org", "HOME_URL": "https://example.org/sfumato"}


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_a_release_with_addresses_scores_ten_and_one_without_is_not_published(
    tmp_path: Path,
) -> None:
    checkout = tmp_path / "checkout"
    clone = ["git", "clone", "-q", "--no-local", str(ROOT), str(checkout)]
    assert subprocess.run(clone, check=False).returncode == 0
    complete = release(checkout, **ADDRESSES)
    assert complete.returncode == 0, complete.stdout + complete.stderr
    assert rating(complete) == 10
    assert "authors@example.org" in metadata(checkout)
    incomplete = release(checkout)
    assert incomplete.returncode == 0, incomplete.stdout + incomplete.stderr
    assert rating(incomplete) == 8
    refused = release(checkout, "--publish")
    assert refused.returncode == 1
    assert "AUTHOR_EMAIL" in refused.stderr


def release(checkout: Path, *options: str, **addresses: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in os.environ if name not in ADDRESSES}
    return subprocess.run(
        ["scripts/release", *options],
        cwd=checkout,
        env=environment | addresses,
        capture_output=True,
        text=True,
        timeout=1_200,
    )


def rating(done: subprocess.CompletedProcess[str]) -> int:
    """The points of `pyroma`, of ten."""
    (points,) = re.findall(r"Final rating: (\d+)/10", done.stdout + done.stderr)
    return int(points)


def metadata(checkout: Path) -> str:
    (archive,) = checkout.glob("dist/*.tar.gz")
    name = archive.name.removesuffix(".tar.gz")
    command = ["tar", "xOf", str(archive), f"{name}/PKG-INFO"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""Results as JSON lines, with their sizes, machine and code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import sfumato

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_PACKAGES = ("sfumato", "numpy", "numba", "scipy", "pyarrow", "dp-accounting")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a benchmark runs."""

    quick: bool = False  # tiny sizes, one repetition: shows that it runs, measures nothing
    repeats: int | None = None  # each benchmark has its own default
    only: str = "*"  # a pattern on the case, as in `i^-2/*/hybrid/*`
    processes: int = 1  # for the accuracy benchmarks; speed is measured alone

    def wants(self, case: str) -> bool:
        return fnmatch(case, self.only)


def line(
    name: str,
    case: str,
    settings: Settings,
    *,
    sizes: Mapping[str, Any],
    seeds: Sequence[int],
    repetitions: int,
    packages: Sequence[str] = (),
    **measured: Any,
) -> Line:
    """A result with its origin; `packages` are peers whose versions are recorded."""
    return {
        "name": name,
        "case": case,
        **_origin(),
        "versions": _versions((*_PACKAGES, *packages)),
        "quick": settings.quick,
        "sizes": dict(sizes),
        "seeds": list(seeds),
        "repetitions": repetitions,
        **measured,
    }


def append(path: Path, result: Line) -> None:
    """Append a line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")


def latest(path: Path) -> list[Line]:
    """The last line of each case in a file of results, in the order of the cases' first lines."""
    if not path.exists():
        return []
    every = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return list({result["case"]: result for result in every}.values())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded, so that it is readable as plain text."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *texts[1:]])


@cache
def _origin() -> dict[str, Any]:
    """The code that runs, by commit and by digest, and the machine it runs on."""
    package = Path(sfumato.__file__).parent
    running = {
        str(path.relative_to(package)): path.read_bytes() for path in sorted(package.rglob("*.py"))
    }
    commit = _git("rev-parse", "HEAD").decode().strip()
    return {
        "commit": commit or None,
        "modified": running != _committed(commit),  # since that commit
        "source": hashlib.sha256(b"".join(running.values())).hexdigest()[:16],
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
    }


def _committed(commit: str) -> dict[str, bytes]:
    """The package's sources as they are in a commit."""
    archive = _git("archive", commit, "src/sfumato") if commit else b""
    if not archive:
        return {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [(member.name, files.extractfile(member)) for member in files.getmembers()]
        return {
            name.removeprefix("src/sfumato/"): file.read()
            for name, file in members
            if file is not None and name.endswith(".py")
        }


def _git(*arguments: str) -> bytes:
    """The output of git; empty without git or a repository."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        return b""
    return done.stdout if done.returncode == 0 else b""


def _cpu() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions

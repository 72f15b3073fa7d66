"""Every benchmark runs in a process of its own and leaves its lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "hashing",
    "encode",
    "decode",
    "samplers",
    "simulate",
    "local",
    "fold",
    "growth",
    "masks",
    "secagg",
    "invertible",
    "dense",
    "clients",
    "ingest",
    "cluster",
    "rounds",
    "pages",
    "server",
    "studies",
    "refined",
    "coverage",
    "secure",
    "plans",
    "targets",
    "words",
    "comparison",
)


SERVED = ("ingest", "cluster", "rounds", "pages")  # start collectors, fleets and browsers


LONG = (
    "simulate",
    "clients",
    "dense",
    "refined",
    "coverage",
    "secure",
    "plans",
    "targets",
    "words",
    "comparison",
)


ORIGIN = {"name", "case", "commit", "machine", "versions", "sizes", "seeds", "repetitions"}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES[:3], id="first"),
        pytest.param(
            [name for name in NAMES[3:] if name not in SERVED + LONG],
            id="short",
            marks=pytest.mark.slow,
        ),
        pytest.param(SERVED, id="served", marks=pytest.mark.slow),
        pytest.param(LONG, id="long", marks=pytest.mark.slow),
    ],
)
def test_benchmarks_run_and_leave_their_lines(tmp_path: Path, names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        written = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(text) for text in written.splitlines()]
        assert lines, name
        assert all(line.keys() >= ORIGIN and line["name"] == name for line in lines)
        assert f"## {name}" in done.stdout
    for name, column in (("refined", "data"), ("plans", "study")):
        if name in names:
            assert f"| {column} " in (tmp_path / f"{name}.md").read_text(encoding="utf-8")


def test_an_unknown_benchmark_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "hushing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no benchmark hushing" in done.stderr

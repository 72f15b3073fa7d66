"""The page of the docs with the results of all benchmarks: their last lines, peers and floors
beside them, and what they miss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.__main__ import GROUPS, module
from benchmarks.lines import RESULTS, ROOT, Line, latest

ELSEWHERE = {  # long tables have pages of their own
    "refined": "concepts/refined.md",
    "plans": "concepts/plans.md",
    "targets": "concepts/sketches.md",
}
HEAD = """\
# Benchmarks

<!-- Written by scripts/generate_docs from benchmarks/results. Do not edit. -->

The last result of every case, from `python -m benchmarks` (`make bench` runs all of them). *Times
faster than* is a peer's time over ours: below 1 the peer is faster. *Times the floor* is our time
over that of a loop that does only the necessary work: 1 is the limit. Both are medians of ratios
within one repetition, with the range from smallest to largest. Nothing is left out: below a table
are the requirements that its lines miss.
"""


def page(results: Path = RESULTS) -> str:
    """The whole page, from the lines in a folder."""
    return "\n".join([HEAD, *(part for name in _names() for part in _section(name, results))])


def _names() -> list[str]:
    return [name for group in GROUPS.values() for name in group]


def _section(name: str, results: Path) -> Iterator[str]:
    lines = latest(results / f"{name}.jsonl")
    question, against = _about(name)
    yield f"## {name}\n\n{question[0].upper()}{question[1:]}.\n\nAgainst: {against}.\n"
    if not lines:
        yield "No result is kept: run it.\n"
        return
    benchmark = module(name)
    yield (
        f"The table is in [{ELSEWHERE[name]}]({ELSEWHERE[name]}).\n"
        if name in ELSEWHERE
        else f"{benchmark.table(lines)}\n"
    )
    misses = benchmark.missed(lines) if hasattr(benchmark, "missed") else []
    if misses:
        yield "Requirements missed:\n\n" + "\n".join(f"- {miss}" for miss in misses) + "\n"
    yield f"{_machines(lines)}\n"


def _about(name: str) -> tuple[str, str]:
    """The question of a benchmark, and what it is compared with, from benchmarks/README.md."""
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \| (.*) \| (.*) \|$", readme, flags=re.MULTILINE)
    if row is None:
        raise ValueError(f"benchmarks/README.md must have a row for {name}")
    return row[1], row[2]


def _machines(lines: list[Line]) -> str:
    machines = sorted({f"{each['machine']['cpu']}, {each['machine']['cores']}" for each in lines})
    return "Measured on " + "; ".join(f"{machine} cores" for machine in machines) + "."

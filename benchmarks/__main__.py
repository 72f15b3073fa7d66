"""`python -m benchmarks [NAME ...] [--quick]`: run benchmarks, append their lines, print tables."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.lines import RESULTS, Settings, append, latest

GROUPS = {
    "speed": (
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
    ),
    "accuracy": ("refined", "coverage", "secure", "plans", "targets", "words", "comparison"),
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    settings = Settings(
        quick=options.quick,
        repeats=options.repeats,
        only=options.only,
        processes=options.processes or (1 if options.quick else os.cpu_count() or 1),
    )
    folder = options.out or (None if options.quick else RESULTS)
    complaints = []
    for name in _benchmarks(options.names):
        benchmark = module(name)
        lines = []
        for result in benchmark.run(settings):
            print(f"{name}/{result['case']}", file=sys.stderr, flush=True)
            lines.append(result)
            if folder is not None:
                append(folder / f"{name}.jsonl", result)
        if not lines:
            print(f"\n## {name}\n\nno case matches {options.only}")
            continue
        print(f"\n## {name}\n\n{benchmark.table(lines)}", flush=True)
        if folder is not None and hasattr(benchmark, "report"):
            path = folder / f"{name}.md"
            path.write_text(benchmark.report(latest(folder / f"{name}.jsonl")), encoding="utf-8")
        if not options.quick and hasattr(benchmark, "missed"):  # tiny sizes have no requirements
            complaints += benchmark.missed(lines)
    if complaints:
        print("\n!!! REQUIREMENTS MISSED !!!\n" + "\n".join(complaints))
    return 0  # benchmarks report; tests judge


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = [name for group in GROUPS.values() for name in group]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(names)}, or a group: {', '.join(GROUPS)}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is kept")
    parser.add_argument("--repeats", type=int, help="repetitions or runs of each case")
    parser.add_argument("--only", default="*", help="a pattern on cases: 'i^-2/*/hybrid/*'")
    parser.add_argument("--processes", type=int, help="for accuracy; default: one per core")
    parser.add_argument("--out", type=Path, help="folder of results; default: benchmarks/results")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {*names, *GROUPS}
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    return options


def _benchmarks(names: list[str]) -> list[str]:
    groups = names or list(GROUPS)
    return [name for each in groups for name in GROUPS.get(each, (each,))]


def module(name: str) -> ModuleType:
    """The module of a benchmark."""
    group = next(group for group, members in GROUPS.items() if name in members)
    return importlib.import_module(f"benchmarks.{group}.{name}")


if __name__ == "__main__":
    sys.exit(main())

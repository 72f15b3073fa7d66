"""Six jobs, each as a user of sfumato and of other libraries would write it: lines, seconds, error.

The programs are in `benchmarks/peers/jobs`. Each runs in a process of its own, by the interpreter
of its library (`scripts/peers`), one after another and repeatedly; libraries that are not there are
left out. Seconds are those of the whole process, with imports and compilation. The data is
synthetic and public, and so is the truth.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import ROOT, Line, Settings, line, markdown
from benchmarks.peer import python_of

NAME = "comparison"
RUNS = 3
PEERS = ROOT / "benchmarks" / "peers"
LIBRARIES = {  # title, distribution and environment; None is ours
    "sfumato": ("sfumato", "sfumato", None),
    "opendp": ("OpenDP", "opendp", None),
    "diffprivlib": ("diffprivlib", "diffprivlib", ".venv-peers"),
    "pure_ldp": ("pure-ldp", "pure-ldp", ".venv-peers"),
    "flower": ("Flower", "flwr", ".venv-flower"),
    "pfl": ("pfl-research", "pfl", ".venv-pfl"),
}
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A job, with its data and the error of an answer."""

    title: str
    data: Callable[[bool], Data]
    error: Callable[[Data, Any], float]
    error_name: str
    libraries: tuple[str, ...]


def run(settings: Settings) -> Iterator[Line]:
    for name, job in JOBS.items():
        if settings.wants(name):
            yield _line(settings, name, job)


def table(lines: Sequence[Line]) -> str:
    rows = [
        [
            f"{JOBS[result['case']].title}; {_size(result)}" if place == 0 else "",
            LIBRARIES[name][0],
            f"{each['lines']}",
            f"{each['seconds']:.3g}",
            f"{each['error']:.3g}",
            JOBS[result["case"]].error_name if place == 0 else "",
        ]
        for result in lines
        for place, (name, each) in enumerate(result["libraries"].items())
    ]
    return markdown(["job", "library", "lines", "seconds", "error", "error is"], rows)


def _size(result: Line) -> str:
    """How many devices there are, and the length of what they have if it is a vector."""
    devices, *lengths = result["sizes"]["values"]
    devices = result["sizes"].get("people", devices)
    return f"{devices:,} devices" + "".join(f", length {length:,}" for length in lengths)


def report(lines: Sequence[Line]) -> str:
    """The table, and the versions that ran."""
    versions = {name: each["version"] for one in lines for name, each in one["libraries"].items()}
    peers = ", ".join(
        f"{LIBRARIES[name][0]} {version}" for name, version in versions.items() if name != "sfumato"
    )
    lost = "".join(
        f" {each['lost']} of {one['repetitions']} runs of {LIBRARIES[name][0]} gave no answer, and "
        "are not counted."
        for one in lines
        for name, each in one["libraries"].items()
        if each.get("lost")
    )
    return f"# Comparison\n\n{table(lines)}\n\nVersions: {peers}.{lost}\n"


def lines_of_code(path: Path) -> int:
    """How many lines of a program have code: not comments, not blank."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    code: set[int] = set()
    for token in tokens:
        if token.type not in {*nothing, tokenize.ENDMARKER}:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code)


def _line(settings: Settings, name: str, job: Job) -> Line:
    data = job.data(settings.quick)
    pythons = {each: _python(each) for each in job.libraries}
    here = {each: python for each, python in pythons.items() if python is not None}
    repetitions = settings.repeats or (1 if settings.quick else RUNS)
    results: dict[str, list[dict[str, float]]] = {each: [] for each in here}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "data.npz"
        np.savez(source, **data)
        for _ in range(repetitions):
            for each, python in here.items():
                program = f"{name}_{each}"
                answer, seconds = _answer(python, program, source, Path(folder) / "answer.json")
                if answer is not None:
                    results[each].append({"seconds": seconds, "error": job.error(data, answer)})
    return line(
        NAME,
        name,
        settings,
        sizes={key: list(np.shape(value)) or int(value) for key, value in data.items()},
        seeds=[1],  # of the data; noise is drawn anew in every run
        repetitions=repetitions,
        libraries={
            each: {
                "version": _version(here[each], LIBRARIES[each][1]),
                "lines": lines_of_code(PEERS / "jobs" / f"{name}_{each}.py"),
                "seconds": statistics.median(run["seconds"] for run in runs),
                "seconds_interval": _range([run["seconds"] for run in runs]),
                "error": statistics.median(run["error"] for run in runs),
                "error_interval": _range([run["error"] for run in runs]),
                "lost": repetitions - len(runs),  # runs that ended without an answer
            }
            for each, runs in results.items()
        },
    )


def _answer(python: Path, program: str, source: Path, target: Path) -> tuple[Any, float]:
    """The answer of a program, and the seconds of its whole process."""
    command = [python, "-W", "ignore", PEERS / "job.py", program, source, target]
    environment = {
        **os.environ,
        "PYTHONPATH": str(PEERS / "jobs"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray would listen on the machine's address
    }
    started = time.perf_counter()
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1_800
    )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr[-2_000:]}")
    answer = json.loads(target.read_text(encoding="utf-8"))
    if answer is None:
        print(f"{program} gave no answer: {done.stderr[-2_000:]}", file=sys.stderr)
    return answer, seconds


def _python(library: str) -> Path | None:
    environment = LIBRARIES[library][2]
    return Path(sys.executable) if environment is None else python_of(environment)


def _version(python: Path, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def _zipf(size: int, devices: int) -> np.ndarray:
    shares = 1 / np.arange(1, size + 1)
    return np.random.default_rng(1).choice(size, size=devices, p=shares / shares.sum())


def _counts(quick: bool) -> Data:
    return {"values": _zipf(50, 2_000 if quick else 100_000), "categories": 50}


def _local(quick: bool) -> Data:
    return {"values": _zipf(100, 1_000 if quick else 20_000), "categories": 100}


def _words(quick: bool) -> Data:
    return {"values": np.char.add("page ", _zipf(20_000, 5_000 if quick else 100_000).astype(str))}


def _vectors(devices: int, length: int) -> Data:
    vectors = np.random.default_rng(1).standard_normal((devices, length)) + 0.5
    return {"values": vectors / np.linalg.norm(vectors, axis=1, keepdims=True)}


def _points(quick: bool) -> Data:
    people, each, features, test = 200 if quick else 1_000, 20, 32, 2_000
    chance = np.random.default_rng(1)
    middles = chance.standard_normal((10, features))
    targets = chance.integers(10, size=people * each + test)
    points = middles[targets] + 1.5 * chance.standard_normal((len(targets), features))
    points = points.astype(np.float32)
    return {
        "values": points[:-test],
        "targets": targets[:-test],
        "owners": np.repeat(np.arange(people), each),
        "people": people,
        "test": points[-test:],
        "test_targets": targets[-test:],
    }


def _error_of_counts(data: Data, answer: list[float]) -> float:
    truth = np.bincount(data["values"], minlength=data["categories"])
    return float(np.sqrt(np.mean((np.array(answer) - truth) ** 2)))


def _error_of_words(data: Data, answer: dict[str, float]) -> float:
    words, counts = np.unique(data["values"], return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:100]
    errors = [answer.get(str(words[place]), 0.0) - counts[place] for place in largest]
    return float(np.sqrt(np.mean(np.square(errors))))


def _error_of_mean(data: Data, answer: list[float]) -> float:
    return float(np.linalg.norm(np.array(answer) - data["values"].mean(axis=0)))


JOBS = {
    "counts": Job(
        "counts of 50 items, trusted collector, epsilon 1",
        _counts,
        _error_of_counts,
        "of a count, root mean square",
        ("sfumato", "opendp", "diffprivlib"),
    ),
    "open": Job(
        "common items that nobody listed, trusted collector, epsilon 1, delta 1e-6",
        _words,
        _error_of_words,
        "of the 100 largest counts, root mean square; 0 if not listed",
        ("sfumato", "opendp"),
    ),
    "local": Job(
        "counts of 100 items, nobody trusted, epsilon 2",
        _local,
        _error_of_counts,
        "of a count, root mean square",
        ("sfumato", "pure_ldp", "opendp"),
    ),
    "mean": Job(
        "mean of vectors of norm 1, trusted collector, epsilon 1, delta 1e-6",
        lambda quick: _vectors(500 if quick else 10_000, 100),
        _error_of_mean,
        "of the mean, Euclidean",
        ("sfumato", "opendp", "diffprivlib"),
    ),
    "secure": Job(
        "mean in one masked round, no noise",
        lambda quick: _vectors(10 if quick else 20, 200 if quick else 10_000),
        _error_of_mean,
        "of the mean, Euclidean",
        ("sfumato", "flower"),
    ),
    "train": Job(
        "softmax regression, 20 examples each, 30 rounds, epsilon 4, delta 1e-5",
        _points,
        lambda data, answer: 1 - answer,
        "share of test examples that are misclassified",
        ("sfumato", "pfl"),
    ),
}

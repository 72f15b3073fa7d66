"""Where numba is not installed: another process, whose results are the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_device_makes_its_report_without_numba() -> None:
    out = run_python(
        """
        import sys
        import sfumato
        from sfumato.flow.aggregation import Plain
        from sfumato.flow.contribute import report
        from sfumato.privacy import NoNoise, SystemRng
        from sfumato.sketch import CountSketch
        from sfumato.flow.task import Task

        task = Task(sketch=CountSketch(rows=16, width=1000, seed=1), mechanism=NoNoise(),
                    aggregation=Plain(modulus_bits=20), cohort="everybody", max_count=1000)
        made = report(task, ["oak"], rng=SystemRng())
        print(len(made.to_bytes()), "numba" in sys.modules)
        """
    )
    assert out == f"{49 + 16 * 1000 * 20 // 8} False"


SAME_WORK = """
    import hashlib, sys
    if {blocked}:
        sys.modules["numba"] = None
    import numpy as np
    import sfumato
    from sfumato import kernels
    from sfumato.sketch import CountSketch, DecodedRounds, Running, refine

    items = np.arange(4_000)
    counts = np.floor(50_000 / np.arange(1, 4_001) ** 1.3).astype(np.int64)
    sketches = [CountSketch(rows=3, width=50, seed=1, sign_round=m) for m in range(3)]
    rounds = DecodedRounds.of([(s, s.encode(items, counts)) for s in sketches])
    points = sketches[0].points(items)
    words = sketches[0].points([str(i) for i in items])
    refined = refine(rounds.one(0), points)
    running = Running(points, rows=3, fresh=False)
    for sketch, table in zip(rounds.sketches, rounds.tables):
        running.add(sketch, table)
    parts = [rounds.tables, words, rounds.estimate(points), rounds.estimate(points, decode="mean"),
             refined.counts, refined.placebo_errors, running.estimate()]
    print(kernels.is_compiled(), hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest())
"""


@pytest.mark.slow
def test_everything_works_without_numba_and_gives_the_same() -> None:
    with_numba = run_python(SAME_WORK.format(blocked=False)).split()
    without = run_python(SAME_WORK.format(blocked=True)).split()
    assert with_numba[0] == "True"
    assert without == ["False", with_numba[1]]

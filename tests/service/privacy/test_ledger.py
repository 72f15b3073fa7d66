"""A ledger that several processes use, some of which are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.privacy import AdditiveLoss, Ledger
from sfumato.spec import to_json
from unit.privacy.test_ledger import LOSS, ONE

START = """
import os, signal, sys, time
from pathlib import Path
from sfumato.errors import BudgetError
from sfumato.privacy import Budget, Ledger
from sfumato.spec import from_json

path, loss = Path(sys.argv[1]), from_json(sys.argv[2])
"""


def start(program: str, path: Path, loss: AdditiveLoss = LOSS) -> subprocess.Popen[str]:
    """A process of its own, which gets the ledger's path and a loss."""
    return subprocess.Popen(
        [sys.executable, "-c", START + program, str(path), to_json(loss)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_a_charge_that_returned_survives_a_kill(path: Path) -> None:
    Ledger(ONE, path).close()
    child = start(
        """
ledger = Ledger(path=path)
ledger.charge(campaign="words", cohort="a", task="1", loss=loss)
os.kill(os.getpid(), signal.SIGKILL)
""",
        path,
    )
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert [entry.loss for entry in Ledger(path=path).entries()] == [LOSS]


def test_a_kill_before_the_commit_spends_nothing(path: Path) -> None:
    Ledger(ONE, path).close()
    child = start(
        """
ledger = Ledger(path=path)
ledger._connection.set_trace_callback(
    lambda statement: os.kill(os.getpid(), signal.SIGKILL) if statement == "COMMIT" else None
)
ledger.charge(campaign="words", cohort="a", task="1", loss=loss)
""",
        path,
    )
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    ledger = Ledger(path=path)
    assert ledger.entries() == []
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)


@pytest.mark.slow
def test_of_two_processes_that_race_for_the_last_of_a_budget_one_wins(path: Path) -> None:
    Ledger(ONE, path).close()
    program = """
ledger = Ledger(path=path)
print("ready", flush=True)
sys.stdin.readline()
try:
    ledger.charge(campaign="words", cohort="a", task=str(os.getpid()), loss=loss)
except BudgetError:
    print("refused")
else:
    print("charged")
"""
    racers = [start(program, path) for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = sorted(racer.communicate(timeout=60)[0] for racer in racers)
    assert outcomes == ["charged\n", "refused\n"]
    assert len(Ledger(path=path).entries()) == 1

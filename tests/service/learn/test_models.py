"""Where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_without_torch_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import sfumato
from sfumato import *
try:
    sfumato.train
except sfumato.SfumatoError as problem:
    print(problem, problem.hint, sep=" | ")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    expected = "sfumato.learn needs PyTorch, which is not installed | "
    assert done.stdout == expected + 'pip install "sfumato[learn]"\n'

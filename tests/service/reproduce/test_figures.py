"""The figures are named without PyTorch."""

from __future__ import annotations

import subprocess
import sys


def test_naming_the_figures_does_not_import_torch() -> None:
    code = "import sys, sfumato.reproduce as r; r.figures(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"

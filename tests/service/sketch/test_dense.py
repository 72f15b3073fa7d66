"""A device encodes a dense sketch without numba."""

from __future__ import annotations

import subprocess
import sys


def test_a_device_imports_no_numba() -> None:
    code = (
        "import sys, numpy as np; from sfumato.sketch.dense import DenseSketch; "
        "s = DenseSketch(length=2000, width=100, seed=1); s.decode(s.encode(np.ones(2000))); "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

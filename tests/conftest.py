"""How every test runs: on one thread of numpy and PyTorch, with files in memory if there is room,
and Hypothesis repeats itself unless a seed asks for fresh examples."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side on few cores

import hypothesis

from disks import quick_disk

if (memory := quick_disk()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)

pytest_plugins = ("databases",)  # fixtures: stores on each database

hypothesis.settings.register_profile(
    "sfumato",
    deadline=None,  # compiled kernels and imports make a first example slow
    derandomize="SFUMATO_TEST_SEED" not in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("sfumato")

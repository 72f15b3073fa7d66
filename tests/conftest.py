"""How every test runs: Hypothesis repeats itself unless a seed asks for fresh examples."""

from __future__ import annotations

import os

import hypothesis

pytest_plugins = ("databases",)  # fixtures: stores on each database

hypothesis.settings.register_profile(
    "sfumato",
    deadline=None,  # compiled kernels and imports make a first example slow
    derandomize="SFUMATO_TEST_SEED" not in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("sfumato")

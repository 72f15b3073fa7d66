"""Which cases of a test run by default, and which with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Every case, for `parametrize`; those that are not kept are slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]

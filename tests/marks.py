"""Which cases of a test run by default, and which with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *defaults: Any) -> list[Any]:
    """Every case, for `parametrize`; all but the `defaults` are slow."""
    return [
        case if case in defaults else pytest.param(case, marks=pytest.mark.slow) for case in cases
    ]

"""Every question and trust, answered by real devices through a real collector."""

from __future__ import annotations

from pathlib import Path

from conformance.test_questions import case
from questioning import Case, check_collection

__all__ = ["case"]  # a fixture


def test_devices_answer_it_and_a_collector_releases_it(case: Case, tmp_path: Path) -> None:
    check_collection(case, tmp_path)

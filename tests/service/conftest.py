"""What tests with a collector or another process have in common."""

from __future__ import annotations

import pytest

from sfumato.simulation import network_fleet


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that has done its part does not wait long for another masked round."""
    monkeypatch.setattr(network_fleet, "ROUND_SECONDS", 1.0)

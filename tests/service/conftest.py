"""What tests with a collector or another process have in common: they wait less."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sfumato.simulation import network_fleet

TICK_SECONDS = 0.01


@pytest.fixture(autouse=True, scope="session")
def _quick_stops() -> Iterator[None]:
    """A collector of this process looks ten times as often as usual whether it is to stop."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, TICK_SECONDS))

    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("uvicorn") is not None:  # not where only Flower is tested
            quicker = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
            patch.setattr(importlib.import_module("uvicorn.server"), "asyncio", quicker)
        yield


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that has done its part does not wait long for another masked round."""
    monkeypatch.setattr(network_fleet, "ROUND_SECONDS", 1.0)

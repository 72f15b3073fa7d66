"""Loops are compiled where their machine code cannot be cached, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numba import njit

from sfumato.kernels import compiling


def test_a_loop_is_compiled_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []

    def njit_without_folder(**keys: Any) -> Callable[..., Any]:
        options.append(keys)
        if keys.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available")
        compile_: Callable[..., Any] = njit(**keys)
        return compile_

    monkeypatch.setattr("sfumato.kernels.compiling.njit", njit_without_folder)

    @compiling.kernel
    def double(number: int) -> int:
        return 2 * number

    assert double(21) == 42
    assert options == [{"nogil": True, "cache": True}, {"nogil": True}]


def test_it_is_known_whether_loops_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling.has_cache()

    def refuse(**keys: Any) -> Callable[..., Any]:
        raise RuntimeError("no locator available")

    monkeypatch.setattr("sfumato.kernels.compiling.njit", refuse)
    assert not compiling.has_cache()

"""How the hot loops are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def has_cache() -> bool:
    """Whether machine code can be cached, so that the next process need not compile it."""
    try:
        njit(cache=True)(has_cache)  # only looks for a folder: nothing is compiled before a call
    except RuntimeError:  # numba has no folder for its cache
        return False
    return True


def kernel(function: Function) -> Function:
    """Compile a loop that releases the interpreter lock.

    Its machine code is cached beside the module or in the user's cache folder. If neither can be
    written (a service's own user, a read-only installation), each process compiles it again.
    """
    compiled: Any
    try:
        compiled = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba has no folder for its cache
        compiled = njit(nogil=True)(function)
    return cast(Function, compiled)

"""What a process that runs for months does with memory that it has used for a moment."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return free memory to the system, where the C library can (glibc).

    It keeps what was freed between pieces that are still in use, and under steady load that grows
    by megabytes a minute, though no more is in use. This takes milliseconds: after much was freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

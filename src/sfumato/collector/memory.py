"""What a process that runs for months does with memory that it has used for a moment."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for what `mallopt` sets
_KEPT_BYTES = 128 << 20
_OWN_BYTES = 16 << 20


def give_back() -> None:
    """Return free memory to the system, where the C library can (glibc).

    It keeps what was freed between pieces that are still in use, and under steady load that grows
    by megabytes a minute, though no more is in use. This takes milliseconds: after much was freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep() -> None:
    """Keep memory that was freed for what comes next, until it is given back (glibc).

    Else the C library asks the system anew for every masked table, and the system clears each page
    of it: that took longer than to receive the table and to add it.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_MMAP_THRESHOLD, _OWN_BYTES)

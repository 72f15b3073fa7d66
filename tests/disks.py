"""Where tests keep their files."""

from __future__ import annotations

import os
import shutil


def quick_disk() -> str | None:
    """A disk in memory if there is one with room: whoever commits waits for the disk."""
    memory = "/dev/shm"  # noqa: S108 -- a folder with a name of its own is made in it
    try:
        has_room = shutil.disk_usage(memory).free > 1 << 30
    except OSError:
        return None
    return memory if has_room and os.access(memory, os.W_OK) else None

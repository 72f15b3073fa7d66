"""The old name of `sfumato.device`; imports from here keep working."""

from sfumato.device import (
    Box,
    Device,
    Http,
    Joined,
    MemoryBox,
    Offered,
    Part,
    Response,
    Send,
    Sending,
    Skipped,
    SqliteBox,
)

__all__ = [
    "Box",
    "Device",
    "Http",
    "Joined",
    "MemoryBox",
    "Offered",
    "Part",
    "Response",
    "Send",
    "Sending",
    "Skipped",
    "SqliteBox",
]

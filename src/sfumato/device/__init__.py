"""What runs on a device: consent, records made private at once, an outbox, uploads.

An app embeds `Device`; it needs numpy and cryptography, and nothing else of what sfumato uses
elsewhere. docs/guides/devices.md shows how, docs/guides/device_rules.md what is kept and sent.
"""

from sfumato.device.box import Box, MemoryBox, SqliteBox
from sfumato.device.client import Http, Response, Send
from sfumato.device.device import Device, Offered, Sending, Skipped
from sfumato.device.rounds import Joined, Part

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

"""The device client: consent, records that are privatised at once, an outbox, uploads.

An app embeds `Device`, which needs only numpy and cryptography. docs/guides/devices.md shows how;
docs/guides/device_rules.md says what is kept and sent.
"""

from sfumato.device.box import Box, MemoryBox, SqliteBox
from sfumato.device.client import Http, Response, Send
from sfumato.device.device import Device, OfferedStudy, SendSummary, SkipReason
from sfumato.device.rounds import RoundClient, RoundOutcome

__all__ = [
    "Box",
    "Device",
    "Http",
    "MemoryBox",
    "OfferedStudy",
    "Response",
    "RoundClient",
    "RoundOutcome",
    "Send",
    "SendSummary",
    "SkipReason",
    "SqliteBox",
]

"""The old name of `sfumato.device`, with the old names of its classes; imports keep working."""

from sfumato.device import Box, Device, Http, MemoryBox, Response, Send, SqliteBox
from sfumato.device import OfferedStudy as Offered
from sfumato.device import RoundClient as Part
from sfumato.device import RoundOutcome as Joined
from sfumato.device import SendSummary as Sending
from sfumato.device import SkipReason as Skipped

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

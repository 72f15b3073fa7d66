"""The service's log: one JSON object per line on stderr, with fields from a closed list.

A field that is not on the list raises an error where the line is written, so an address, a header
or a payload cannot slip in. An exception is logged with its type, and with its message if it is
ours; another library's line with its type or its fixed text, without the arguments. Strangers can
make the HTTP server repeat itself, so each such line is written at most once a minute.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import IO, Any

from sfumato.errors import SfumatoError

FIELDS = frozenset(
    {
        "address",  # where the service listens
        "code",  # of a problem
        "count",
        "duration_ms",
        "hint",
        "public_key",  # for devices to check offers with
        "reason",
        "study_id",
        "task_id",
        "token_id",
        "version",
    }
)
_OURS = "sfumato"
MANY = 100  # reports from which on a line has their count
_REPEAT_SECONDS = 60.0
_MOST_TEXTS = 100  # texts of other libraries to remember
_LOGGER = logging.getLogger(_OURS)


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write a line."""
    if unknown := fields.keys() - FIELDS:
        raise TypeError(f"a log line has no field {', '.join(sorted(unknown))}")
    _LOGGER.log(level, event, extra={"fields": fields})


def count_field(count: int) -> dict[str, int]:
    """The field `count`, if it is at least `MANY`. Lines have a time, so a count of one would
    reveal when a report arrived.

    >>> count_field(250), count_field(1)
    ({'count': 250}, {})
    """
    return {"count": count} if count >= MANY else {}


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    """Write a line about an exception."""
    log(event, level=logging.ERROR, reason=reason_of(error), **fields)


def reason_of(error: BaseException) -> str:
    """An exception in a line: its type, and its message if it is ours."""
    reason = type(error).__name__
    return f"{reason}: {error}" if isinstance(error, SfumatoError) else reason


def set_up(level: str, stream: IO[str] | None = None) -> None:
    """Send the service's lines, and warnings of the HTTP server, to `stream` (stderr)."""
    ours, others = (logging.StreamHandler(stream or sys.stderr) for _ in range(2))
    ours.setFormatter(JsonLines())
    others.setFormatter(JsonLines())
    others.addFilter(RepeatFilter())
    others.addFilter(lambda record: "WebSocket library" not in str(record.msg))  # none is missing
    for name, least in ((_OURS, level.upper()), ("uvicorn", "WARNING"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers = [ours if name == _OURS else others]
        logger.setLevel(least)
        logger.propagate = False


class RepeatFilter(logging.Filter):
    """Passes a text once a minute; the next line with it says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, tuple[float, int]] = {}  # when written, and how often left out since

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        at, left_out = self._texts.get(text, (-math.inf, 0))
        if 0 <= record.created - at < _REPEAT_SECONDS:
            self._texts[text] = at, left_out + 1
            return False
        if len(self._texts) >= _MOST_TEXTS:
            self._texts.clear()
        self._texts[text] = record.created, 0
        record.left_out = left_out
        return True


class JsonLines(logging.Formatter):
    """Formats our records with their fields, and others with their fixed text only."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
        }
        if record.name == _OURS:
            return json.dumps(line | {"event": record.msg} | getattr(record, "fields", {}))
        line["event"] = record.name.partition(".")[0]
        if record.exc_info and record.exc_info[0] is not None:
            line["reason"] = record.exc_info[0].__name__
        elif isinstance(record.msg, str) and record.msg.strip():
            line["reason"] = record.msg.strip().splitlines()[0]
        if left_out := getattr(record, "left_out", 0):
            line["count"] = left_out
        return json.dumps(line)

"""The service's log: one JSON object a line on stderr, made of fields from a closed list.

A field that is not on the list is an error where the line is written, so an address, a header or a
payload cannot slip in. Of an exception there is its type, and its message if it is one of ours;
of another library's line, its type or its fixed text without what it was filled with. Strangers can
make the server beneath us repeat itself, so each such line is written once a minute at most.
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
        "address",  # that the service listens on
        "code",  # of a problem
        "count",
        "duration_ms",
        "hint",
        "public_key",  # with which devices check offers
        "reason",
        "study_id",
        "task_id",
        "token_id",
        "version",
    }
)
_OURS = "sfumato"
MANY = 100  # reports, of which a line says how many there were
_SELDOM_SECONDS = 60.0
_MOST_TEXTS = 100  # remembered, of other libraries
_LOGGER = logging.getLogger(_OURS)


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write a line."""
    if unknown := fields.keys() - FIELDS:
        raise TypeError(f"a log line has no field {', '.join(sorted(unknown))}")
    _LOGGER.log(level, event, extra={"fields": fields})


def counted(count: int) -> dict[str, int]:
    """The field `count`, if it is of many. A line has a time: with a count of one it would say when
    somebody's report came.

    >>> counted(250), counted(1)
    ({'count': 250}, {})
    """
    return {"count": count} if count >= MANY else {}


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    """Write a line about an exception: its type; its message if it is ours."""
    reason = type(error).__name__
    if isinstance(error, SfumatoError):
        reason += f": {error}"
    log(event, level=logging.ERROR, reason=reason, **fields)


def set_up(level: str, stream: IO[str] | None = None) -> None:
    """Send the service's lines, and warnings of the server beneath it, to `stream` (stderr)."""
    ours, others = (logging.StreamHandler(stream or sys.stderr) for _ in range(2))
    ours.setFormatter(JsonLines())
    others.setFormatter(JsonLines())
    others.addFilter(Seldom())
    for name, least in ((_OURS, level.upper()), ("uvicorn", "WARNING"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers = [ours if name == _OURS else others]
        logger.setLevel(least)
        logger.propagate = False


class Seldom(logging.Filter):
    """Lets a text through once a minute; the line that follows says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, tuple[float, int]] = {}  # when, and how often since

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        at, left_out = self._said.get(text, (-math.inf, 0))
        if 0 <= record.created - at < _SELDOM_SECONDS:
            self._said[text] = at, left_out + 1
            return False
        if len(self._said) >= _MOST_TEXTS:
            self._said.clear()
        self._said[text] = record.created, 0
        record.left_out = left_out
        return True


class JsonLines(logging.Formatter):
    """Our records with their fields; others' with nothing but their fixed text."""

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

"""A log line holds what is on the list, and nothing that came over the network."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sfumato.collector import logs
from sfumato.errors import StoreFull


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    before = {
        name: (logger.handlers, logger.level, logger.propagate)
        for name in ("sfumato", "uvicorn", "asyncio")
        if (logger := logging.getLogger(name)) is not None
    }
    stream = io.StringIO()
    logs.set_up("info", stream)
    yield stream
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def only(lines: io.StringIO) -> dict[str, Any]:
    written = lines.getvalue().splitlines()
    assert len(written) == 1
    line: dict[str, Any] = json.loads(written[0])
    return line


def test_a_line_is_json_with_a_time_in_seconds(lines: io.StringIO) -> None:
    logs.log("sealed", study_id="5f", count=3)
    line = only(lines)
    assert line.pop("time")[10] == "T"
    assert line == {"level": "info", "event": "sealed", "study_id": "5f", "count": 3}


@pytest.mark.parametrize("field", ["client", "peer", "header", "payload", "body", "user_agent"])
def test_a_field_that_is_not_on_the_list_is_an_error(lines: io.StringIO, field: str) -> None:
    with pytest.raises(TypeError, match=field):
        logs.log("upload", **{field: "canary"})  # type: ignore[arg-type]  # any field
    assert lines.getvalue() == ""


def test_our_own_errors_say_what_they_say(lines: io.StringIO) -> None:
    logs.log_error("uploads-not-stored", StoreFull("no room is left"))
    assert only(lines)["reason"] == "StoreFull: no room is left"


def test_of_other_errors_there_is_the_type_alone(lines: io.StringIO) -> None:
    logs.log_error("internal", ValueError("canary"))
    assert only(lines)["reason"] == "ValueError"


def test_what_another_library_fills_in_is_left_out(lines: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").warning("%s:%d - refused", "canary", 4711)
    assert only(lines)["reason"] == "%s:%d - refused"


def test_of_another_librarys_traceback_there_is_the_type_alone(lines: io.StringIO) -> None:
    try:
        raise ValueError("canary")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    assert only(lines)["reason"] == "ValueError"
    assert "canary" not in lines.getvalue()


def test_another_library_repeats_itself_once_a_minute(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now * 1e9))  # for later Pythons
    server = logging.getLogger("uvicorn.error")
    for _ in range(500):
        server.warning("Invalid HTTP request received.")
    server.warning("Exceeded concurrency limit.")
    now += 61
    server.warning("Invalid HTTP request received.")
    logs.log("sealed", count=1)
    logs.log("sealed", count=1)
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line.get("reason"), line.get("count")) for line in written] == [
        ("uvicorn", "Invalid HTTP request received.", None),
        ("uvicorn", "Exceeded concurrency limit.", None),
        ("uvicorn", "Invalid HTTP request received.", 499),
        ("sealed", None, 1),
        ("sealed", None, 1),
    ]


def test_few_texts_are_remembered() -> None:
    repeats = logs.RepeatFilter()
    for number in range(1_000):
        assert repeats.filter(logging.makeLogRecord({"msg": f"text {number}"}))
    assert repeats.filter(logging.makeLogRecord({"msg": "text 0"}))  # forgotten, though repeated


def test_another_library_is_heard_from_warnings_on(lines: io.StringIO) -> None:
    logging.getLogger("uvicorn.access").info('%s - "GET /" 200', "canary")
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
    assert lines.getvalue() == ""
